//! Where the tasks of a flow run: on the current tokio runtime, on its current thread only, or in the loop of the
//! current simulation.

use std::{panic::catch_unwind, sync::Arc, time::Duration};

use crate::{
    device::emulated::simulation,
    error::{Error, ErrorKind, Result, catch_panic, panic_message},
    operator::{control::Control, settings::Spawn},
};

/// Which of a runtime's threads may poll a flow's tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Threads {
    Any,
    /// Only the current one.
    This,
}

/// Returns an error if there is no runtime to run on.
pub(super) fn require_runtime(threads: Threads) -> Result<()> {
    if in_simulation() {
        return Ok(());
    }
    if tokio::runtime::Handle::try_current().is_err() {
        let text = "no tokio runtime: run the flow inside one";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    // Tokio has no query for this: it panics, without side effects, and prints the location.
    if threads == Threads::This && catch_unwind(|| tokio::task::spawn_local(async {})).is_err() {
        let text = "no `tokio::task::LocalSet` or `tokio::runtime::LocalRuntime`: run the flow inside one, for example \
                    `LocalSet::new().run_until(flow.run())`";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    Ok(())
}

/// False if the current tokio runtime has no timers. True outside a runtime, where no flow is run.
pub(super) fn has_timers() -> bool {
    // Like `spawn_local` above: tokio has no query for this, and panics.
    let unknown = tokio::runtime::Handle::try_current().is_err() && !in_simulation();
    unknown || catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).is_ok()
}

/// True in a simulation, which has no threads.
pub(super) fn in_simulation() -> bool {
    simulation::current().is_some()
}

/// Runs a task in the background. The task reports its end through a channel.
pub(super) fn spawn(threads: Threads, name: &str, task: impl Future<Output = ()> + Send + 'static) {
    match simulation::current() {
        Some(simulation) => drop(simulation.spawn(name, task)),
        None if threads == Threads::This => drop(tokio::task::spawn_local(task)),
        None => drop(tokio::spawn(task)),
    }
}

/// Wraps one of a flow's tasks, which `part` names in errors. Panics of operators are caught where they occur. Any
/// other panic (in the drop of a message, or a bug of this crate) ends the flow with the panic's message, instead of
/// looking like the end of the runtime.
pub(super) async fn guarded(control: Arc<Control>, part: String, task: impl Future<Output = ()>) {
    if let Err(panic) = catch_panic(task).await {
        let error = Error::new(ErrorKind::Panicked, panic_message(panic));
        control.fail(error.at(part).at(format!("flow `{}`", control.name)));
        // Operators that are still waiting would not be notified.
        control.abort();
    }
}

/// Like [`spawn`], for an operator with tasks besides its own.
pub(super) fn spawner(threads: Threads) -> Spawn {
    match threads {
        Threads::Any => |name, task| spawn(Threads::Any, name, task),
        Threads::This => |name, task| spawn(Threads::This, name, task),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_says_which_part_of_the_flow_it_was() {
        let control = Control::new("any".into(), vec!["a".into()], Vec::new());
        guarded(control.clone(), "its own task".into(), async { panic!("at {}", 7) }).await;
        assert!(control.is_aborted());
        let error = control.fail(Error::new(ErrorKind::Cancelled, "the runtime ended while the flow ran"));
        assert_eq!(error.kind(), ErrorKind::Panicked);
        assert_eq!(error.to_string(), "flow `any`: its own task: panicked: at 7");

        let control = Control::new("any".into(), vec!["a".into()], Vec::new());
        guarded(control.clone(), "its own task".into(), async {}).await;
        assert!(!control.is_aborted());
    }
}
