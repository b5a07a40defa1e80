//! The front of a queue whose messages count only once a device has done something.
//!
//! A message that has arrived may still be in the making: its work is enqueued, and travels with it. A port that asks for
//! more ([`Wanted`]) shows its operator a message only when the tickets it waits for have passed. What these are is for
//! the conditions to say ([`stream`](super::stream), [`event`](super::event)); how they are waited for is here, once.
//!
//! ```text
//!            a message is there           all have passed
//!   UNKNOWN ────────────────────> OPEN ────────────────────> DONE ──┐
//!      ^                            │ the device is lost            │ take: the message
//!      │                            └───────────────────> FAILED    │
//!      └───────────────── take: the error ───────────────────┴──────┘
//! ```
//!
//! Only the first message is asked about, the next when that one has been taken: so every message of the queue is, each
//! by its own tickets, whatever streams they belong to. The futures that wait are kept here, so that the operator is
//! woken; nothing polls. After a fault the message is of no use: `take` gives the error in its place, once, and goes on to
//! the next.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use smallvec::SmallVec;

use super::Readiness;
use crate::{
    error::{Error, Result},
    hub::{Message, receiver::Receiver},
    stream::{Completed, Ticket},
};

/// What a port waits for, beside a message.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted {
    /// All the work that wrote it.
    pub(crate) done: bool,
    /// The event of this name.
    pub(crate) event: Option<&'static str>,
}

/// The first message of a port that waits for more than its arrival.
pub(crate) struct Front {
    wanted: Wanted,
    /// Of the first message; kept for its room, so that the next one allocates nothing.
    open: SmallVec<[Completed; 2]>,
    state: State,
    /// The number of the message that was asked about: where its hub drops messages, another may be the first by now.
    of: u64,
}

enum State {
    Unknown,
    Open,
    Done,
    Failed(Error),
}

impl Wanted {
    /// Shows the tickets that the message at `at` is waited for by. Its number; none if there is no message.
    fn tickets<M: Message>(self, receiver: &Receiver<M>, at: usize, mut visit: impl FnMut(&Ticket)) -> Option<u64> {
        receiver.peek(at, |number, message| {
            if self.done {
                let stamp = receiver.stamp_of(number);
                super::stream::written(message, stamp.as_ref(), &mut visit);
            }
            if let Some(name) = self.event {
                super::event::named(message, name, &mut visit);
            }
            number
        })
    }
}

impl Front {
    /// `None` for a port that takes what is there.
    pub(crate) fn new(wanted: Wanted) -> Option<Box<Self>> {
        let more = wanted.done || wanted.event.is_some();
        more.then(|| Box::new(Self { wanted, open: SmallVec::new(), state: State::Unknown, of: 0 }))
    }

    /// Is there a message, and has it what is waited for? Also ready where `take` has an error to give.
    pub(crate) fn poll<M: Message>(&mut self, receiver: &Receiver<M>, cx: &mut Context<'_>) -> Readiness {
        if receiver.is_lossy() {
            // Another may be the first at any moment.
            receiver.watch(cx.waker());
            self.forget_dropped(receiver);
        }
        if let State::Unknown = self.state {
            match Readiness::from(receiver.poll_message(cx.waker())) {
                Readiness::Ready => self.ask(receiver),
                other => return other,
            }
        }
        if let State::Open = self.state {
            while let Some(last) = self.open.last_mut() {
                match Pin::new(last).poll(cx) {
                    Poll::Pending => return Readiness::WaitEvent,
                    Poll::Ready(Ok(())) => drop(self.open.pop()),
                    Poll::Ready(Err(error)) => return self.fail(error),
                }
            }
            self.state = State::Done;
        }
        Readiness::Ready
    }

    /// Does `take` give a message, or an error? The device is asked, now.
    pub(crate) fn has_one<M: Message>(&mut self, receiver: &Receiver<M>) -> bool {
        self.forget_dropped(receiver);
        if let State::Unknown = self.state {
            self.ask(receiver);
        }
        if let State::Open = self.state {
            match self.look() {
                Ok(true) => self.state = State::Done,
                Ok(false) => {}
                Err(error) => _ = self.fail(error),
            }
        }
        matches!(self.state, State::Done | State::Failed(_))
    }

    /// The first message and its number, if it has what is waited for. `again`: also one that was read before.
    pub(crate) fn take<M: Message>(&mut self, receiver: &Receiver<M>, again: bool) -> Result<Option<(u64, M)>> {
        if !self.has_one(receiver) {
            return receiver.check().map(|()| None);
        }
        receiver.check()?;
        match std::mem::replace(&mut self.state, State::Unknown) {
            State::Failed(error) => {
                receiver.discard();
                Err(error.at(format!("a message of hub `{}`", receiver.hub())))
            }
            _ => receiver.take(again),
        }
    }

    /// How many messages `take` would give, as far as that is known without asking the device.
    pub(crate) fn len<M: Message>(&self, receiver: &Receiver<M>) -> usize {
        let has_all = |at: &usize| {
            let mut has_all = true;
            let there = self.wanted.tickets(receiver, *at, |ticket| has_all &= ticket.has_passed());
            there.is_some() && has_all
        };
        (0..receiver.len()).take_while(has_all).count()
    }

    /// Waits for the device no longer, until it is polled again: one who waits and is not polled is of no use to others
    /// who wait for the same stream.
    pub(crate) fn rest(&mut self) {
        if let State::Open = self.state {
            self.open.clear();
            self.state = State::Unknown;
        }
    }

    fn ask<M: Message>(&mut self, receiver: &Receiver<M>) {
        let open = &mut self.open;
        let there = self.wanted.tickets(receiver, 0, |ticket| {
            if !ticket.is_settled() {
                open.push(ticket.completed());
            }
        });
        if let Some(number) = there {
            (self.state, self.of) = (State::Open, number);
        }
    }

    /// What is known is of a message that its hub has dropped since.
    fn forget_dropped<M: Message>(&mut self, receiver: &Receiver<M>) {
        if receiver.is_lossy() && !matches!(self.state, State::Unknown) && receiver.first() != Some(self.of) {
            self.open.clear();
            self.state = State::Unknown;
        }
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

    fn fail(&mut self, error: Error) -> Readiness {
        self.open.clear();
        self.state = State::Failed(error);
        Readiness::Ready
    }
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Front").field("wanted", &self.wanted).field("open", &self.open).finish_non_exhaustive()
    }
}
