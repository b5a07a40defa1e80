//! The `start` of an operator that waits for its own flow: that runs once all operators have started, so it would wait for ever.

use std::{future::Future, sync::Arc};

use crate::error::{Error, ErrorKind, Result};

tokio::task_local! {
    /// The flow, and the operator whose `start` this task is in.
    static STARTING: (u64, Arc<str>);
}

/// An operator's `start`.
pub(super) async fn starting<R>(flow: u64, operator: Arc<str>, start: impl Future<Output = R>) -> R {
    STARTING.scope((flow, operator), start).await
}

/// Before this task waits for a flow to run: an error if an operator of that flow is starting here.
pub(super) fn may_wait_for(flow: u64) -> Result<()> {
    let waits = |(starting, operator): &(u64, Arc<str>)| (*starting == flow).then(|| operator.clone());
    let Some(operator) = STARTING.try_with(waits).ok().flatten() else { return Ok(()) };
    let text = format!(
        "operator `{operator}` waits in its `start` for its own flow, which runs once all operators have started: do that in a \
         `run`, or from outside"
    );
    Err(Error::new(ErrorKind::Stalled, text))
}
