//! [`Completed`]: the future of a ticket.
//!
//! It puts the protocol ([`completion`](super::completion)) and the device together: it registers first, then, if it is
//! its stream's front, asks the device (work that is done needs no source), then makes an [effort](super::effort) to
//! learn of the end. It says that all is well only after the device has said so: a signal that came too early, or a device
//! that faulted meanwhile, is never reported as success.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use super::{
    Ticket,
    completion::{Place, Progress},
    effort::Effort,
    lookout::Lookout,
};
use crate::error::{Error, ErrorKind, Result};

/// Resolves when the work up to a ticket is done, or with the error that ended the device.
///
/// Of several that wait on one stream, the one with the earliest ticket looks for all; keep none of them unpolled while
/// others wait, or the others learn of their end up to 50 ms late.
///
/// # Cancel safety
/// Dropping it takes its waker out and does nothing else: it does not block, and the work goes on.
#[must_use = "futures do nothing unless awaited"]
pub struct Completed {
    ticket: Ticket,
    place: Place,
    effort: Effort,
}

impl Completed {
    pub(super) fn new(ticket: Ticket) -> Self {
        Self { ticket, place: Place::default(), effort: Effort::default() }
    }

    /// The ticket it waits for.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

impl Future for Completed {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        let number = this.ticket.number();
        loop {
            let stream = this.ticket.stream();
            match stream.0.completion.poll(&mut this.place, number, cx.waker()) {
                Progress::Passed => {
                    this.effort.end();
                    return Poll::Ready(stream.sound(number));
                }
                Progress::Failed => {
                    this.effort.end();
                    // The device stores its error before it fails the waiters.
                    let lost = stream.device().check();
                    return Poll::Ready(
                        lost.and_then(|()| Err(Error::new(ErrorKind::DeviceLost, "its waiters were failed"))),
                    );
                }
                Progress::Wait { front } => {
                    stream.not_captured()?;
                    // Marked at once: an event cannot be recorded later without waiting for more.
                    this.ticket.commit()?;
                    let stream = this.ticket.stream();
                    Lookout::watch(stream);
                    match this.ticket.marked() {
                        Some(mark) if front && !this.effort.make(stream, mark, cx.waker())? => return Poll::Pending,
                        Some(_) if !front => return Poll::Pending,
                        _ => {}
                    }
                }
            }
        }
    }
}

impl Drop for Completed {
    fn drop(&mut self) {
        self.ticket.stream().0.completion.leave(&mut self.place).wake();
    }
}

impl fmt::Debug for Completed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completed").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}
