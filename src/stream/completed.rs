//! [`Completed`]: the future of a ticket.
//!
//! It combines the protocol ([`completion`](super::completion)) with the device. A poll registers the waker first;
//! then, if it is the front of its stream, it queries the device (work that is done needs no notification); then it
//! arranges to [be notified](super::wait_strategy). It reports success only after the device has reported it: a signal
//! that came too early, or a device that faulted meanwhile, never counts as success.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use super::{
    Ticket,
    completion::{Progress, WaiterSlot},
    monitor::CompletionMonitor,
    wait_strategy::WaitStrategy,
};
use crate::error::{Error, ErrorKind, Result};

/// Resolves when the work up to a ticket is done, or with the error of the device that was lost.
///
/// Of several futures that wait on one stream, the one with the earliest ticket polls the device for all. Do not keep
/// one of them unpolled while others wait: the others may then be notified up to 50 ms late.
///
/// # Cancel safety
/// Dropping the future removes its waker and does nothing else: it does not block, and the work goes on.
#[must_use = "futures do nothing unless awaited"]
pub struct Completed {
    ticket: Ticket,
    place: WaiterSlot,
    effort: WaitStrategy,
}

impl Completed {
    pub(super) fn new(ticket: Ticket) -> Self {
        Self { ticket, place: WaiterSlot::default(), effort: WaitStrategy::default() }
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
                    return Poll::Ready(lost.and_then(|()| {
                        Err(Error::new(ErrorKind::DeviceLost, "the device was lost while this was pending"))
                    }));
                }
                Progress::Wait { front } => {
                    stream.not_captured()?;
                    // Marked at once: an event recorded later would cover later work, too.
                    this.ticket.commit()?;
                    let stream = this.ticket.stream();
                    CompletionMonitor::watch(stream);
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
