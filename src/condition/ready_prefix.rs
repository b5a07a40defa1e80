//! [`ReadyPrefix`]: the first messages of a queue that count only once a device has done its work on them.
//!
//! A message can arrive before its work is done: the work is enqueued, and its tickets travel with the message. A port
//! with a [`MessageRequirement`] counts a message only when certain tickets have passed. The conditions define which
//! tickets ([`stream`](super::stream), [`event`](super::event)); the wait for them is implemented here.
//!
//! ```text
//!   the state of message number `done`, the first that is not known to be done:
//!
//!            it has arrived            all have passed
//!   UNKNOWN ─────────────> OPEN ──────────────────────────> UNKNOWN, of the next: done + 1
//!      ^                     │ the device is lost
//!      │                     └────────────────────> FAILED
//!      └──────────── take, with done = 0: the error ───┘        take, with done > 0: the first message, done - 1
//! ```
//!
//! Messages are checked one at a time, in order, each by its own tickets, on whatever streams. The pending futures are
//! kept here, and wake the operator. After a fault the message is unusable: `take` returns the error in its place,
//! once, and continues with the next message.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use smallvec::SmallVec;

use super::{Counted, Readiness};
use crate::{
    error::{Error, Result},
    hub::{Message, end_waker::Interest, ends::Receiver, parcel::Parcel},
    stream::{Completed, Ticket},
};

/// What a port requires of a message besides its arrival.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MessageRequirement {
    /// All work that wrote the message is done.
    pub(crate) done: bool,
    /// The message's event of this name has passed.
    pub(crate) event: Option<&'static str>,
}

/// The first messages of a port that requires more than their arrival.
pub(crate) struct ReadyPrefix {
    requirement: MessageRequirement,
    /// The number of messages that may be taken.
    done: usize,
    /// The pending tickets of the next message. The vector keeps its capacity, so that later messages allocate nothing.
    open: SmallVec<[Completed; 2]>,
    state: State,
    /// The number of the first message at the last check: if the hub has dropped messages since, another one is first.
    first: u64,
}

enum State {
    Unknown,
    Open,
    Failed(Error),
}

impl MessageRequirement {
    /// Visits the required tickets of the message at `at`. Returns false if there is no such message.
    fn tickets<M: Message>(self, receiver: &Receiver<M>, at: usize, mut visit: impl FnMut(&Ticket)) -> bool {
        let visited = receiver.peek(at, |Parcel { message, header }| {
            if self.done {
                super::stream::visit_writes(
                    message,
                    header.as_ref().and_then(|header| header.ticket.as_ref()),
                    &mut visit,
                );
            }
            if let Some(name) = self.event {
                super::event::visit_event(message, name, &mut visit);
            }
        });
        visited.is_some()
    }
}

impl ReadyPrefix {
    /// `None` for a port that takes messages on arrival.
    pub(crate) fn new(requirement: MessageRequirement) -> Option<Box<Self>> {
        let more = requirement.done || requirement.event.is_some();
        more.then(|| Box::new(Self { requirement, done: 0, open: SmallVec::new(), state: State::Unknown, first: 0 }))
    }

    /// Counts up to `most` messages that meet the requirement, and reports why there are no more. A message that `take`
    /// will replace by an error counts, too.
    pub(crate) fn poll_count<M: Message>(
        &mut self,
        receiver: &Receiver<M>,
        most: usize,
        cx: &mut Context<'_>,
    ) -> Counted {
        if receiver.is_lossy() {
            // Another message can become the first at any moment.
            receiver.watch(cx.waker());
            self.forget_dropped(receiver);
        }
        let more = loop {
            if self.done >= most {
                break Readiness::READY;
            }
            match &self.state {
                State::Failed(_) => return Counted::new(self.done + 1, Readiness::READY),
                State::Unknown => {
                    let more = Readiness::from(receiver.poll(self.done + 1, Interest::Change, cx.waker()));
                    if !more.is_ready() {
                        break more;
                    }
                    self.open_next(receiver);
                    if let State::Unknown = self.state {
                        // The hub has failed, and `take` reports it.
                        return Counted::new(self.done + 1, Readiness::READY);
                    }
                }
                State::Open => match self.poll_open(cx) {
                    Poll::Pending => break Readiness::WAIT_EVENT,
                    Poll::Ready(Ok(())) => self.count_done(),
                    Poll::Ready(Err(error)) => self.fail(error),
                },
            }
        };
        Counted::new(self.done, more)
    }

    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        while let Some(last) = self.open.last_mut() {
            ready!(Pin::new(last).poll(cx))?;
            self.open.pop();
        }
        Poll::Ready(Ok(()))
    }

    /// Whether `take` would return `count` messages, or an error in place of one. Queries the device.
    pub(crate) fn has<M: Message>(&mut self, receiver: &Receiver<M>, count: usize) -> bool {
        self.forget_dropped(receiver);
        while self.done < count {
            if let State::Unknown = self.state {
                self.open_next(receiver);
            }
            match self.state {
                State::Failed(_) => return true,
                State::Unknown => return false,
                State::Open => match self.query_open() {
                    Ok(true) => self.count_done(),
                    Ok(false) => return false,
                    Err(error) => self.fail(error),
                },
            }
        }
        true
    }

    /// Takes the first message into `place`, if it meets the requirement, and returns its number. With `reread`, also
    /// takes a message that was read before.
    pub(crate) fn take<M: Message>(
        &mut self,
        receiver: &Receiver<M>,
        place: &mut Option<Parcel<M>>,
        reread: bool,
    ) -> Result<Option<u64>> {
        if !self.has(receiver, 1) {
            return receiver.check().map(|()| None);
        }
        receiver.check()?;
        if self.done > 0 {
            self.done -= 1;
            let taken = receiver.take(place, reread);
            self.first = receiver.first().unwrap_or_default();
            return Ok(taken);
        }
        match std::mem::replace(&mut self.state, State::Unknown) {
            State::Failed(error) => {
                receiver.discard();
                Err(error.at(format!("a message of hub `{}`", receiver.hub_name())))
            }
            _ => Ok(receiver.take(place, reread)),
        }
    }

    /// How many messages `take` would return, as far as known without querying the device.
    pub(crate) fn len<M: Message>(&self, receiver: &Receiver<M>) -> usize {
        let has_all = |at: &usize| {
            let mut has_all = true;
            let there = self.requirement.tickets(receiver, *at, |ticket| has_all &= ticket.has_passed());
            there && has_all
        };
        (0..receiver.len()).take_while(has_all).count()
    }

    /// Stops waiting for the device until it is polled again: a registered waiter that is not polled delays the other
    /// waiters of the same stream.
    pub(crate) fn stop_waiting(&mut self) {
        if let State::Open = self.state {
            self.open.clear();
            self.state = State::Unknown;
        }
    }

    /// Counts the next message, whose tickets have passed.
    fn count_done(&mut self) {
        self.done += 1;
        self.state = State::Unknown;
    }

    /// Collects the pending tickets of the next message, if there is one.
    fn open_next<M: Message>(&mut self, receiver: &Receiver<M>) {
        let open = &mut self.open;
        let there = self.requirement.tickets(receiver, self.done, |ticket| {
            if !ticket.is_settled() {
                open.push(ticket.completed());
            }
        });
        if there {
            self.first = receiver.first().unwrap_or_default();
            self.state = State::Open;
        }
    }

    /// Resets the state if it belongs to messages that their hub has dropped since.
    fn forget_dropped<M: Message>(&mut self, receiver: &Receiver<M>) {
        let known = self.done > 0 || !matches!(self.state, State::Unknown);
        if known && receiver.is_lossy() && receiver.first() != Some(self.first) {
            self.forget();
        }
    }

    /// Resets the state: its messages are no longer in the queue.
    pub(crate) fn forget(&mut self) {
        self.open.clear();
        self.done = 0;
        self.state = State::Unknown;
    }

    /// Queries the device: true if all open tickets have passed.
    fn query_open(&mut self) -> Result<bool> {
        while let Some(last) = self.open.last() {
            let mut ticket = last.ticket().clone();
            if !ticket.query()? {
                return Ok(false);
            }
            ticket.check_taint()?;
            self.open.pop();
        }
        Ok(true)
    }

    fn fail(&mut self, error: Error) {
        self.open.clear();
        self.state = State::Failed(error);
    }
}

impl fmt::Debug for ReadyPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadyPrefix")
            .field("requirement", &self.requirement)
            .field("open", &self.open)
            .finish_non_exhaustive()
    }
}
