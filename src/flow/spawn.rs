//! Where a flow's tasks run: on tokio's present runtime, on the present thread of it, or in the present simulation's
//! loop.

use std::{panic::catch_unwind, sync::Arc, time::Duration};

use crate::{
    device::emulated::simulation,
    error::{Error, ErrorKind, Result, catch_panic, said},
    operator::{control::Control, seat::Spawn},
};

/// Which of a runtime's threads may poll a flow's tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Threads {
    Any,
    /// The present one, and no other.
    This,
}

/// An error where there is no runtime to run on.
pub(super) fn require_runtime(threads: Threads) -> Result<()> {
    if in_simulation() {
        return Ok(());
    }
    if tokio::runtime::Handle::try_current().is_err() {
        let text = "a flow runs on a tokio runtime, and there is none here: call it inside one";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    // Tokio cannot be asked. It panics, having changed nothing, and says on which line.
    if threads == Threads::This && catch_unwind(|| tokio::task::spawn_local(async {})).is_err() {
        let text = "a flow on one thread runs inside a `tokio::task::LocalSet` or a `tokio::runtime::LocalRuntime`, and \
                    there is none here: `LocalSet::new().run_until(flow.run())`";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    Ok(())
}

/// False if the present tokio runtime has no timers. True where there is none, and so no flow is run.
pub(super) fn has_timers() -> bool {
    // As for `spawn_local` above: tokio cannot be asked, and panics.
    let unknown = tokio::runtime::Handle::try_current().is_err() && !in_simulation();
    unknown || catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).is_ok()
}

/// True where there are no threads.
pub(super) fn in_simulation() -> bool {
    simulation::current().is_some()
}

/// Runs a task in the background. It says of itself, through a channel, how it ended.
pub(super) fn spawn(threads: Threads, name: &str, task: impl Future<Output = ()> + Send + 'static) {
    match simulation::current() {
        Some(simulation) => drop(simulation.spawn(name, task)),
        None if threads == Threads::This => drop(tokio::task::spawn_local(task)),
        None => drop(tokio::spawn(task)),
    }
}

/// A task of a flow's, `part` of it. Operators' own panics are caught where they happen; one beside them (a message's drop,
/// a fault of this crate) ends the flow with what it said, and not as if the runtime had ended.
pub(super) async fn guarded(control: Arc<Control>, part: String, task: impl Future<Output = ()>) {
    if let Err(panic) = catch_panic(task).await {
        let error = Error::new(ErrorKind::Panicked, said(panic));
        control.fail(error.at(part).at(format!("flow `{}`", control.name)));
        // Those that are left end: nobody would tell them.
        control.abort();
    }
}

/// As [`spawn`], for an operator that has tasks beside its own.
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
