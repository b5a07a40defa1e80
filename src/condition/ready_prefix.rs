//! The prefix of a queue whose messages count only once a device has done something.
//!
//! A message may arrive before its work is done: the work is enqueued, and its tickets travel with the message. A port
//! that asks for more ([`Wanted`]) shows its operator a message only when the tickets it waits for have passed. Which
//! tickets these are is defined by the conditions ([`stream`](super::stream), [`event`](super::event)); waiting for
//! them is implemented here.
//!
//! ```text
//!   of the first message that is not known to be done, number `done`:
//!
//!            it has arrived            all have passed
//!   UNKNOWN ─────────────> OPEN ──────────────────────────> UNKNOWN, of the next: done + 1
//!      ^                     │ the device is lost
//!      │                     └────────────────────> FAILED
//!      └──────────── take, with done = 0: the error ───┘        take, with done > 0: the first message, done - 1
//! ```
//!
//! One message is checked at a time, in order, each by its own tickets, whatever streams they belong to. The pending
//! futures are kept here, so that the operator is woken; nothing polls. After a fault the message is unusable: `take`
//! returns the error in its place, once, and continues with the next.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use smallvec::SmallVec;

use super::{Counted, Readiness};
use crate::{
    error::{Error, Result},
    hub::{Message, ends::Receiver, hub_side::Interest, parcel::Parcel},
    stream::{Completed, Ticket},
};

/// What a port waits for, besides a message.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted {
    /// All work that wrote it.
    pub(crate) done: bool,
    /// The event of this name.
    pub(crate) event: Option<&'static str>,
}

/// The first messages of a port that waits for more than their arrival.
pub(crate) struct ReadyPrefix {
    wanted: Wanted,
    /// The number of messages that may be taken.
    done: usize,
    /// The pending tickets of the message after these; kept for its capacity, so that the next one allocates nothing.
    open: SmallVec<[Completed; 2]>,
    state: State,
    /// The number of the first message at the last check: if the hub drops messages, another may be the first by now.
    first: u64,
}

enum State {
    Unknown,
    Open,
    Failed(Error),
}

impl Wanted {
    /// Visits the tickets that the message at `at` waits for. Returns false if there is no message.
    fn tickets<M: Message>(self, receiver: &Receiver<M>, at: usize, mut visit: impl FnMut(&Ticket)) -> bool {
        let visited = receiver.peek(at, |Parcel { message, header }| {
            if self.done {
                super::stream::written(message, header.as_ref().and_then(|header| header.ticket.as_ref()), &mut visit);
            }
            if let Some(name) = self.event {
                super::event::named(message, name, &mut visit);
            }
        });
        visited.is_some()
    }
}

impl ReadyPrefix {
    /// `None` for a port that takes messages on arrival.
    pub(crate) fn new(wanted: Wanted) -> Option<Box<Self>> {
        let more = wanted.done || wanted.event.is_some();
        more.then(|| Box::new(Self { wanted, done: 0, open: SmallVec::new(), state: State::Unknown, first: 0 }))
    }

    /// Counts up to `most` messages that have what is waited for, and reports why there are no more. A message that
    /// `take` will replace by an error counts, too.
    pub(crate) fn poll_count<M: Message>(
        &mut self,
        receiver: &Receiver<M>,
        most: usize,
        cx: &mut Context<'_>,
    ) -> Counted {
        if receiver.is_lossy() {
            // Another message may become the first at any moment.
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
                    self.ask(receiver);
                    if let State::Unknown = self.state {
                        // The hub has failed, and `take` reports it.
                        return Counted::new(self.done + 1, Readiness::READY);
                    }
                }
                State::Open => match self.poll_open(cx) {
                    Poll::Pending => break Readiness::WAIT_EVENT,
                    Poll::Ready(Ok(())) => self.is_done(),
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
                self.ask(receiver);
            }
            match self.state {
                State::Failed(_) => return true,
                State::Unknown => return false,
                State::Open => match self.look() {
                    Ok(true) => self.is_done(),
                    Ok(false) => return false,
                    Err(error) => self.fail(error),
                },
            }
        }
        true
    }

    /// Takes the first message, if it has what is waited for, into `place`, and returns its number. With `reread`, also
    /// takes one that was read before.
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

    /// How many messages `take` would return, as far as is known without querying the device.
    pub(crate) fn len<M: Message>(&self, receiver: &Receiver<M>) -> usize {
        let has_all = |at: &usize| {
            let mut has_all = true;
            let there = self.wanted.tickets(receiver, *at, |ticket| has_all &= ticket.has_passed());
            there && has_all
        };
        (0..receiver.len()).take_while(has_all).count()
    }

    /// Stops waiting for the device until it is polled again: a registered waiter that is not polled holds up the other
    /// waiters of the same stream.
    pub(crate) fn rest(&mut self) {
        if let State::Open = self.state {
            self.open.clear();
            self.state = State::Unknown;
        }
    }

    fn is_done(&mut self) {
        self.done += 1;
        self.state = State::Unknown;
    }

    fn ask<M: Message>(&mut self, receiver: &Receiver<M>) {
        let open = &mut self.open;
        let there = self.wanted.tickets(receiver, self.done, |ticket| {
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

    fn look(&mut self) -> Result<bool> {
        while let Some(last) = self.open.last() {
            let mut ticket = last.ticket().clone();
            if !ticket.look()? {
                return Ok(false);
            }
            ticket.sound()?;
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
        f.debug_struct("ReadyPrefix").field("wanted", &self.wanted).field("open", &self.open).finish_non_exhaustive()
    }
}
