//! [`Arrivals`]: the end of a hub as an input holds it, with what the input waits for beside a message.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Waker},
};

use super::{
    lane::{Lane, Stamps},
    ports::Traffic,
};
use crate::{
    condition::{self, Front, Readiness, Wanted},
    error::Result,
    hub::{Message, receiver::Receiver},
    stream::Ticket,
};

/// Messages of one connection.
pub(super) struct Arrivals<M: Message> {
    receiver: Receiver<M>,
    /// For a port that waits for more than a message.
    front: Option<Box<Front>>,
    /// The hub may drop what was promised, unless it is held.
    lossy: bool,
    /// Something was, and the hub is lossy.
    promised: bool,
    /// The number of the message that was taken last.
    last: u64,
}

impl<M: Message> Arrivals<M> {
    pub(super) fn new(receiver: Receiver<M>, wanted: Wanted) -> Self {
        let front = Front::new(wanted);
        // The newest of a hub that keeps it may become a newer one, and that is as good.
        let lossy = receiver.is_lossy() && (front.is_some() || !receiver.reads_again());
        Self { receiver, front, lossy, promised: false, last: 0 }
    }

    /// Is there a message that may be taken, or an error to give?
    #[inline]
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.lossy {
            return self.poll_lossy(cx);
        }
        self.ask(cx)
    }

    #[inline]
    fn ask(&mut self, cx: &mut Context<'_>) -> Readiness {
        match &mut self.front {
            None => condition::message(&self.receiver, cx),
            Some(front) => front.poll(&self.receiver, cx),
        }
    }

    #[cold]
    fn poll_lossy(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.receiver.let_go();
        let readiness = self.ask(cx);
        self.promised = readiness == Readiness::Ready;
        readiness
    }

    /// The same, where the operator waits for something else: woken for the end, it asks again after that.
    #[inline]
    pub(super) fn look(&mut self, cx: &mut Context<'_>) -> Readiness {
        match &mut self.front {
            _ if self.lossy => self.poll_lossy(cx),
            None => self.receiver.look_for_message(cx.waker()).into(),
            Some(front) => front.poll(&self.receiver, cx),
        }
    }

    /// Is there a message that was not taken before?
    pub(super) fn poll_new(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.reads_again() {
            let new = self.receiver.poll_new(cx.waker()).into();
            if new != Readiness::Ready {
                return new;
            }
        }
        self.poll(cx)
    }

    /// A run begins: what was promised is there, and stays. False if it is not there any more.
    #[inline]
    pub(super) fn claim(&mut self) -> bool {
        !self.promised || self.hold()
    }

    #[cold]
    fn hold(&mut self) -> bool {
        let held = self.receiver.hold();
        let is_there = match &mut self.front {
            None => held > 0,
            Some(front) => front.has_one(&self.receiver),
        };
        is_there || self.receiver.check().is_err()
    }

    /// What the run was to have may be dropped again.
    pub(super) fn unclaim(&self) {
        if self.lossy {
            self.receiver.let_go();
        }
    }

    /// Does `take` give a message, or an error?
    pub(super) fn has_one(&mut self) -> bool {
        match &mut self.front {
            None => self.receiver.len() > 0,
            Some(_) if self.lossy => self.hold(),
            Some(front) => front.has_one(&self.receiver),
        }
    }

    /// `again`: also the newest that was taken before, of a hub that keeps it.
    #[inline]
    fn take(&mut self, again: bool) -> Result<Option<M>> {
        let taken = match &mut self.front {
            None => self.receiver.take(again),
            Some(front) => {
                if self.lossy {
                    self.receiver.hold();
                }
                front.take(&self.receiver, again)
            }
        }?;
        Ok(taken.map(|(number, message)| {
            self.last = number;
            message
        }))
    }

    /// The stamp of the message that was taken last. Asked once.
    #[inline]
    fn stamp(&self, message: &mut M) -> Option<Ticket> {
        self.receiver.stamp(message, self.last)
    }

    /// Messages that are known to be such as may be taken.
    pub(super) fn len(&self) -> usize {
        match &self.front {
            None => self.receiver.len(),
            Some(front) => front.len(&self.receiver),
        }
    }

    /// Keeps the waker for the next change.
    pub(super) fn watch(&self, waker: &Waker) {
        self.receiver.watch(waker);
    }

    /// What went wrong on the way, if something did.
    pub(super) fn check(&self) -> Result<()> {
        self.receiver.check()
    }

    /// The newest is taken again and again.
    pub(super) fn reads_again(&self) -> bool {
        self.receiver.reads_again()
    }

    /// True if nothing can be taken that was not taken before, and nothing will come.
    pub(super) fn is_over(&self) -> bool {
        self.receiver.is_over()
    }

    /// True if nothing can be taken and nothing will come.
    pub(super) fn has_ended(&self) -> bool {
        self.receiver.has_ended()
    }

    pub(super) fn hub(&self) -> &str {
        self.receiver.hub()
    }

    /// Why there is nothing to take.
    pub(super) fn lacks(&self) -> String {
        let which = if self.front.is_some() { "no message that may be taken yet" } else { "no message" };
        format!("{which} in hub `{}`", self.hub())
    }

    /// Waits for no device, until it is polled again.
    pub(super) fn rest(&mut self) {
        self.unclaim();
        if let Some(front) = &mut self.front {
            front.rest();
        }
    }
}

impl<M: Message> fmt::Debug for Arrivals<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrivals").field("receiver", &self.receiver).field("front", &self.front).finish()
    }
}

/// What an input has taken: of whichever of its connections.
#[derive(Debug)]
pub(super) struct Intake {
    traffic: Traffic,
    stamps: Stamps,
}

impl Intake {
    pub(super) fn new(lane: Option<Arc<Lane>>) -> Self {
        Self { traffic: Traffic::default(), stamps: Stamps::new(lane) }
    }

    /// A run begins.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.stamps.begin(self.traffic.messages);
    }

    /// The next message, if there is one: counted, and its stamp noted. `again`: also the newest that was taken before, of
    /// a hub that keeps it.
    #[inline]
    pub(super) fn take<M: Message>(&mut self, from: &mut Arrivals<M>, again: bool) -> Result<Option<M>> {
        let mut message = from.take(again)?;
        if let Some(message) = &mut message {
            self.traffic.count(message);
            if let Some(stamp) = from.stamp(message) {
                self.stamps.note(message, stamp, self.traffic.messages)?;
            }
        }
        Ok(message)
    }

    pub(super) fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// The streams that this run's messages came from.
    pub(super) fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.stamps.all(self.traffic.messages)
    }
}

/// A wait for messages of these connections; what waits for a device waits no longer than it.
pub(super) struct Wait<'a, M: Message>(pub(super) &'a mut [Arrivals<M>]);

impl<M: Message> Drop for Wait<'_, M> {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(Arrivals::rest);
    }
}
