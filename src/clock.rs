//! [`now`]: tokio's clock, on any thread at any time.

use tokio::{runtime::Handle, task, time::Instant};

/// The time on tokio's clock.
///
/// Once a clock was paused anywhere in the process, tokio looks for that of the thread's runtime, and panics in the destructor
/// of a thread-local that outlives its own. There it is the system's time, as on every thread without a runtime.
pub(crate) fn now() -> Instant {
    if is_thread_over() { std::time::Instant::now().into() } else { Instant::now() }
}

/// The thread is at its end, and tokio's thread-locals are gone: some of its primitives panic then.
pub(crate) fn is_thread_over() -> bool {
    // Within a task there is a context: that is asked first, since a handle is counted.
    task::try_id().is_none() && Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed())
}
