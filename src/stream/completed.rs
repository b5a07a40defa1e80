//! [`Completed`]: the future of a ticket.
//!
//! It puts the protocol ([`completion`](super::completion)) and the device together: it registers first, then looks
//! (work that is done needs no source), then arms one. After a wake it looks again before it says that all is well, so
//! that a signal which came too early, or a device that faulted meanwhile, is never reported as success.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use super::{
    Ticket,
    completion::{Place, Progress},
    watch::Watch,
};
use crate::error::Result;

/// Resolves when the work up to a ticket is done, or with the error that ended the device.
///
/// # Cancel safety
/// Dropping it takes its waker out and does nothing else: it does not block, and the work goes on.
#[must_use = "futures do nothing unless awaited"]
pub struct Completed {
    ticket: Ticket,
    place: Place,
}

impl Completed {
    pub(super) fn new(ticket: Ticket) -> Self {
        Self { ticket, place: Place::default() }
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
        let (stream, number) = (&this.ticket.stream, this.ticket.number);
        let completion = &stream.0.completion;
        let mut looked = false;
        loop {
            match completion.poll(&mut this.place, number, cx.waker()) {
                Progress::Passed => return Poll::Ready(stream.sound()),
                Progress::Failed => {
                    // The device stores its error before it fails the waiters.
                    return Poll::Ready(stream.0.device.check());
                }
                Progress::Look => {
                    stream.look()?;
                    if completion.passed() < number {
                        completion.deny();
                    }
                    looked = true;
                }
                Progress::Wait if !looked => {
                    looked = true;
                    stream.mark(number)?;
                    stream.look()?;
                }
                Progress::Wait => {
                    Watch::add(stream);
                    stream.arm(number)?;
                    return Poll::Pending;
                }
            }
        }
    }
}

impl Drop for Completed {
    fn drop(&mut self) {
        self.ticket.stream.0.completion.leave(&mut self.place);
    }
}

impl fmt::Debug for Completed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completed").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}
