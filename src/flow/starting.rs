//! Detects an operator whose `start` waits for its own flow, which would never end: the flow runs only once all
//! operators have started.

use std::{future::Future, sync::Arc};

use crate::error::{Error, ErrorKind, Result};

tokio::task_local! {
    /// The flow and the operator whose `start` runs in this task.
    static STARTING: (u64, Arc<str>);
}

/// Runs an operator's `start`.
pub(super) async fn starting<R>(flow: u64, operator: Arc<str>, start: impl Future<Output = R>) -> R {
    STARTING.scope((flow, operator), start).await
}

/// Returns an error if this task runs the `start` of an operator of that flow. Call it before the task waits for the
/// flow to run.
pub(super) fn may_wait_for(flow: u64) -> Result<()> {
    let waits = |(starting, operator): &(u64, Arc<str>)| (*starting == flow).then(|| operator.clone());
    let Some(operator) = STARTING.try_with(waits).ok().flatten() else { return Ok(()) };
    let text = format!(
        "operator `{operator}` waits in its `start` for its own flow, which runs only once all operators have started: \
         wait for it in `run`, or outside the flow"
    );
    Err(Error::new(ErrorKind::Stalled, text))
}
