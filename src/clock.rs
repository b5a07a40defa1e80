//! [`now`]: tokio's clock, usable on any thread at any time.

use tokio::{runtime::Handle, task, time::Instant};

/// The time on tokio's clock.
///
/// Once a clock has been paused anywhere in the process, `Instant::now` looks up the clock of the thread's runtime, and
/// panics in the destructor of a thread-local that outlives tokio's own. There this returns the system's time, as on
/// every thread without a runtime.
pub(crate) fn now() -> Instant {
    if is_thread_over() { std::time::Instant::now().into() } else { Instant::now() }
}

/// True if the thread is ending and tokio's thread-locals are destroyed. Some of tokio's primitives panic then.
pub(crate) fn is_thread_over() -> bool {
    // Within a task there is a context. It is checked first, since cloning a handle changes a reference count.
    task::try_id().is_none() && Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed())
}
