//! [`Running`]: a flow at work.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    Handle, OperatorStatus, Report,
    drive::{Finished, OwnSeat},
};
use crate::{
    error::{Error, ErrorKind, Result},
    operator::control::Control,
    sync::ProxyWaker,
};

/// A flow that runs in the background: a future of its [`Report`]. If it fails, the report is
/// [in the error](Error::report).
///
/// # Cancel safety
/// Dropping it aborts the flow: operators are dropped at the await they are in, and every `stop` still runs, in the
/// background, while the runtime lives.
#[must_use = "dropping it aborts the flow"]
pub struct Running {
    control: Arc<Control>,
    finished: oneshot::Receiver<Finished>,
    proxy: ProxyWaker,
    seats: Vec<(usize, OwnSeat)>,
    /// How it ended, if somebody looked before this was awaited.
    outcome: Option<Result<Report>>,
    done: bool,
}

impl Running {
    pub(super) fn new(control: Arc<Control>, finished: oneshot::Receiver<Finished>) -> Self {
        Self { control, finished, proxy: ProxyWaker::new(), seats: Vec::new(), outcome: None, done: false }
    }

    /// The flow, for whoever asks, pauses or stops it while this is awaited. Its methods are here, too.
    pub fn handle(&self) -> Handle {
        Handle(self.control.clone())
    }

    /// See [`Handle::status`].
    pub fn status(&self) -> Vec<OperatorStatus> {
        self.handle().status()
    }

    /// See [`Handle::pause`].
    pub fn pause(&self) {
        self.handle().pause();
    }

    /// See [`Handle::resume`].
    pub fn resume(&self) {
        self.handle().resume();
    }

    /// Ends the flow by draining it: its sources do not run again, what is under way goes to its end. See
    /// [`Handle::stop`].
    pub fn stop(&self) {
        self.control.stop();
    }

    /// As [`stop`](Self::stop), and the flow is aborted if it has not ended after this time. See [`Handle::stop_within`].
    pub fn stop_within(&self, time: Duration) {
        self.control.stop_within(time);
    }

    /// Ends the flow at once: operators are dropped at the await they are in, then every `stop` runs. The future
    /// resolves with [`Cancelled`](ErrorKind::Cancelled).
    pub fn abort(&self) {
        self.control.abort();
    }

    /// Whether it has ended.
    pub(super) fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.done || self.outcome.is_some() {
            return Poll::Ready(());
        }
        Pin::new(&mut self.finished).poll(&mut self.proxy.stand_in(cx)).map(|finished| {
            self.outcome = Some(match finished {
                Ok(finished) => {
                    self.seats = finished.seats;
                    finished.outcome
                }
                Err(_) => Err(Error::new(ErrorKind::Cancelled, "the runtime ended while the flow ran")),
            });
        })
    }

    /// The operators by their numbers, once it has resolved.
    pub(super) fn seats(mut self) -> Vec<(usize, OwnSeat)> {
        std::mem::take(&mut self.seats)
    }
}

impl Future for Running {
    type Output = Result<Report>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Report>> {
        if self.done {
            return Poll::Ready(Err(Error::new(ErrorKind::Usage, "this flow's end was awaited before")));
        }
        ready!(self.poll_over(cx));
        self.done = true;
        let gone = || Err(Error::new(ErrorKind::Cancelled, "the runtime ended while the flow ran"));
        Poll::Ready(self.outcome.take().unwrap_or_else(gone))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.done {
            self.control.abort();
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("done", &self.done).finish_non_exhaustive()
    }
}
