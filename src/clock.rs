//! [`now`]: tokio's clock, on any thread at any time.

use tokio::{runtime::Handle, task, time::Instant};

/// The time on tokio's clock.
///
/// Once a clock was paused anywhere in the process, tokio looks for that of the thread's runtime, and panics in the destructor
/// of a thread-local that outlives its own. There it is the system's time, as on every thread without a runtime.
pub(crate) fn now() -> Instant {
    if is_destroyed() { std::time::Instant::now().into() } else { Instant::now() }
}

fn is_destroyed() -> bool {
    // Within a task there is a context: that is asked first, since a handle is counted.
    task::try_id().is_none() && Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed())
}
