//! Where a flow's tasks run: on tokio's present runtime, or in the present simulation's loop.

use crate::{
    device::emulated::simulation,
    error::{Error, ErrorKind, Result},
};

/// An error where there is no runtime to run on.
pub(super) fn require_runtime() -> Result<()> {
    if in_simulation() || tokio::runtime::Handle::try_current().is_ok() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Usage, "a flow runs on a tokio runtime, and there is none here: call it inside one"))
}

/// True where there are no threads.
pub(super) fn in_simulation() -> bool {
    simulation::current().is_some()
}

/// Runs a task in the background. It says of itself, through a channel, how it ended.
pub(super) fn spawn(name: &str, task: impl Future<Output = ()> + Send + 'static) {
    match simulation::current() {
        Some(simulation) => drop(simulation.spawn(name, task)),
        None => drop(tokio::spawn(task)),
    }
}
