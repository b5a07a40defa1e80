//! [`Running`]: a running flow.

use std::{
    fmt,
    ops::Deref,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::sync::oneshot;

use super::{
    Handle, Report,
    drive::{Finished, OwnedOperator},
};
use crate::{
    error::{Error, ErrorKind, Result},
    operator::control::Control,
    sync::ProxyWaker,
};

/// A flow that runs in the background: a future of its [`Report`]. If the flow fails, the report is [in the
/// error](Error::report). It has the methods of its [`Handle`]: to observe the flow, to pause it and to end it.
///
/// ```
/// use wakeline::prelude::*;
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// # let mut flow = Flow::new("ticks");
/// # let ticks = flow.add("ticks", source(async || Ok(Some(()))));
/// # let count = flow.add("count", sink(async |()| Ok(())));
/// # flow.connect(ticks.output, count.input);
/// let running = flow.spawn()?;
/// let handle = running.handle();
/// tokio::spawn(async move { handle.stop() }); // for example on a signal
/// println!("{}", running.await?);             // the report
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
///
/// # Cancel safety
/// Dropping this future aborts the flow: operators are dropped at their current await, and every `stop` still runs in
/// the background, as long as the runtime does.
#[must_use = "dropping it aborts the flow"]
pub struct Running {
    handle: Handle,
    finished: oneshot::Receiver<Finished>,
    proxy: ProxyWaker,
    operators: Vec<(usize, OwnedOperator)>,
    /// The outcome, if it was received before this future was polled to completion.
    outcome: Option<Result<Report>>,
    done: bool,
}

impl Running {
    pub(super) fn new(control: Arc<Control>, finished: oneshot::Receiver<Finished>) -> Self {
        Self {
            handle: Handle(control),
            finished,
            proxy: ProxyWaker::new(),
            operators: Vec::new(),
            outcome: None,
            done: false,
        }
    }

    /// A handle that controls the flow while this future is awaited. Its methods are also available here.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Ready once the flow has ended.
    pub(super) fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.done || self.outcome.is_some() {
            return Poll::Ready(());
        }
        Pin::new(&mut self.finished).poll(&mut self.proxy.stand_in(cx)).map(|finished| {
            self.outcome = Some(match finished {
                Ok(finished) => {
                    self.operators = finished.operators;
                    finished.outcome
                }
                Err(_) => Err(Error::new(ErrorKind::Cancelled, "the runtime shut down while the flow was running")),
            });
        })
    }

    /// The operators by their numbers, after this future has resolved.
    pub(super) fn operators(mut self) -> Vec<(usize, OwnedOperator)> {
        std::mem::take(&mut self.operators)
    }
}

/// The flow is controlled through its [`Handle`].
impl Deref for Running {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl Future for Running {
    type Output = Result<Report>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Report>> {
        if self.done {
            return Poll::Ready(Err(Error::new(ErrorKind::Usage, "`Running` polled after completion")));
        }
        ready!(self.poll_over(cx));
        self.done = true;
        let gone = || Err(Error::new(ErrorKind::Cancelled, "the runtime shut down while the flow was running"));
        Poll::Ready(self.outcome.take().unwrap_or_else(gone))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.done {
            self.handle.abort();
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("done", &self.done).finish_non_exhaustive()
    }
}
