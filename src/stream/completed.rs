//! [`Completed`]: the future of a ticket.
//!
//! It combines the protocol ([`completion`](super::completion)) with the device. A poll first registers the waker. If
//! the future is the front of its stream, the poll then queries the device (completed work needs no notification) and
//! otherwise arranges to [be notified](super::wait_strategy). The future reports success only after the device has
//! reported it: a signal that comes too early, or a device that has faulted since, never counts as success.
//!
//! # The path of a completion
//!
//! ```text
//!   enqueue           Stream::enqueue (enqueue.rs) ── under the lock on Order (order.rs) ──> Ticket (stream.rs)
//!                                                                                               │
//!   mark              Ticket::commit ──> Stream::mark: an event is recorded behind the ticket ──> Mark (mark.rs)
//!                         │ at once in `Stream::completed`; in `Ticket::completed` at the first poll, after `register`
//!   register          Completed (completed.rs) ── polled: waker and ticket ──> Completion (completion.rs)
//!                         │ the waiter with the lowest ticket is the front, and continues
//!   query             WaitStrategy (wait_strategy.rs) asks StreamInner::query (stream.rs): has the
//!                         │ mark's event passed? ── yes ──────────────────────────────────────────────┐
//!                         │ no: it chooses the next source                                            │
//!                         ├── POLL: the task itself, polled again ────────> query ────────────────────┤
//!                         ├── SCAN: CompletionMonitor (monitor.rs) ───────> query ────────────────────┤
//!                         ├── SLEEP: the monitor's alarm ──> Completion::wake ──> Completed ──> query ┤
//!                         ├── CALLED: a host callback ──> Completion::wake ──> Completed ──> query ───┤
//!                         └── in any case, the monitor's tick ────────────> query ────────────────────┤
//!                                                                                                     v
//!   notify            wakers of all waiters up to the mark's ticket, and of the next front <── Completion::advance
//!                         │                                                                (completion.rs)
//!                         └──> Completed, polled again: passed, or the error of a lost device
//! ```
//!
//! An operator's waker is its OperatorTask's (operator/operator_task.rs). `Monitored`, through which the monitor polls a stream,
//! is implemented in wait_strategy.rs.
//!
//! A query that finds the device lost goes to `Streams::observe` (streams.rs), which fails the waiters of all streams
//! of the device: `Completion::fail`.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use super::{
    Stream, Ticket,
    completion::{Progress, WaiterSlot},
    wait_strategy::WaitStrategy,
};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{Waited, note_wait},
};

/// Resolves when the work up to a ticket is done, or with the error of the device that was lost.
///
/// Of several futures that wait on one stream, the one with the earliest ticket polls the device for all. Do not leave
/// one of them unpolled while others wait: the others may be notified up to 50 ms late.
///
/// # Cancel safety
/// Dropping the future removes its waker and has no other effect: it does not block, and the work continues.
#[must_use = "futures do nothing unless awaited"]
pub struct Completed {
    ticket: Ticket,
    slot: WaiterSlot,
    strategy: WaitStrategy,
}

impl Completed {
    pub(super) fn new(ticket: Ticket) -> Self {
        Self { ticket, slot: WaiterSlot::default(), strategy: WaitStrategy::default() }
    }

    /// The ticket that the future waits for.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

impl Stream {
    /// Resolves when all work that was enqueued before this call is done. Work that is enqueued between this call and
    /// the first poll is not waited for.
    pub fn completed(&self) -> Completed {
        let mut ticket = self.ticket();
        if self.capture().is_none() {
            // The mark is recorded now: a mark that is recorded at the first poll would include later work. The poll
            // reports an error.
            let _ = ticket.commit();
        }
        Completed::new(ticket)
    }

    /// Blocks the thread until all work that was enqueued before this call is done. Meant for code without a runtime;
    /// in async code await [`completed`](Self::completed).
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault; [`Usage`](ErrorKind::Usage) for a stream under capture, and
    /// in a host function, in a waker that a device thread calls, and in a destructor that runs on such a thread: see
    /// [`CompletionMode`](super::CompletionMode).
    pub fn synchronize_blocking(&self) -> Result<()> {
        // In a forked child process no worker thread exists that could complete the work.
        self.0.device.check_process()?;
        self.0.check_not_captured()?;
        self.check_may_block("all of its work")?;
        let ticket = self.ticket();
        self.0.streams.observe(self.0.backend.stream_synchronize(self.0.raw))?;
        self.0.completion.advance(ticket.number());
        ticket.check_taint()
    }
}

impl Ticket {
    /// Resolves when the work up to this ticket is done. If no stream and no event has waited for the ticket, the
    /// future may also wait for work that is enqueued before its first poll. [`Stream::completed`] and
    /// [`Event`](super::Event) mark their point at once.
    pub fn completed(&self) -> Completed {
        Completed::new(self.clone())
    }
}

impl Future for Completed {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        let number = this.ticket.number();
        loop {
            let stream = this.ticket.stream();
            match stream.0.completion.poll(&mut this.slot, number, cx.waker()) {
                Progress::Passed => {
                    this.strategy.end();
                    return Poll::Ready(stream.check_taint(number));
                }
                Progress::Failed => {
                    this.strategy.end();
                    // The device stores its error before it fails the waiters.
                    let lost = stream.device().check();
                    return Poll::Ready(lost.and_then(|()| {
                        Err(Error::new(ErrorKind::DeviceLost, "the device was lost while this was pending"))
                    }));
                }
                Progress::Wait { front } => {
                    stream.0.check_not_captured()?;
                    // Marked at once: an event recorded later would cover later work, too.
                    this.ticket.commit()?;
                    let stream = this.ticket.stream();
                    stream.end_span();
                    stream.watch();
                    match this.ticket.marked() {
                        Some(mark) if front && !this.strategy.arrange(stream, mark, cx.waker())? => {
                            note_wait(Waited::Device);
                            return Poll::Pending;
                        }
                        Some(_) if !front => {
                            note_wait(Waited::Device);
                            return Poll::Pending;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
}

impl Drop for Completed {
    fn drop(&mut self) {
        self.ticket.stream().0.completion.leave(&mut self.slot).wake();
    }
}

impl fmt::Debug for Completed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completed").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}
