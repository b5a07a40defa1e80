//! Tickets ("stamps") of messages without envelopes, stored beside their queue.
//!
//! A stamp is a ticket of the stream on which, according to the sender, the message was made. When the ticket has
//! passed, the message's own work is done: the latest write of that stream to its envelopes or, if it has no
//! envelopes, everything that was enqueued on the stream before the message was sent. Waiting for a stamp therefore
//! never waits for later work of the sender.
//!
//! Envelopes carry their stamps themselves. For other messages they are stored beside the queue rather than in it,
//! since most messages between operators on the host have none: for those, the cost is one load of a flag.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
};

use smallvec::SmallVec;

use crate::{
    stream::Ticket,
    sync::{Mutex, lock},
};

/// Stamps, by the message's number in its queue.
#[derive(Debug, Default)]
pub(super) struct ReadyTickets {
    /// Whether there ever was a stamp.
    any: AtomicBool,
    of: Mutex<VecDeque<(u64, Ticket)>>,
}

impl ReadyTickets {
    /// Called before the message enters the queue, whose lock publishes it to the reader.
    pub(super) fn put(&self, number: u64, stamp: Ticket) {
        self.any.store(true, Ordering::Relaxed);
        lock(&self.of).push_back((number, stamp));
    }

    /// The message did not enter the queue.
    pub(super) fn take_back(&self, number: u64) {
        let mut of = lock(&self.of);
        let back = if of.back().is_some_and(|(of, _)| *of == number) { of.pop_back() } else { None };
        drop(of);
        // After the lock is released: it may hold the last reference to its stream.
        drop(back);
    }

    /// The queue has dropped the message.
    pub(super) fn forget(&self, number: u64) {
        if self.any.load(Ordering::Relaxed) {
            let mut of = lock(&self.of);
            let gone = of.iter().position(|(of, _)| *of == number).and_then(|at| of.remove(at));
            drop(of);
            // Dropped without the lock: it may hold the last reference to its stream.
            drop(gone);
        }
    }

    /// Returns the stamp of a message that is in the queue.
    pub(super) fn look(&self, number: u64) -> Option<Ticket> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        lock(&self.of).iter().find(|(of, _)| *of == number).map(|(_, stamp)| stamp.clone())
    }

    /// Called after the message was taken from the queue or, if it `stays`, was read.
    #[inline]
    pub(super) fn take(&self, number: u64, stays: bool) -> Option<Ticket> {
        if self.any.load(Ordering::Relaxed) { self.find(number, stays) } else { None }
    }

    #[inline(never)]
    fn find(&self, number: u64, stays: bool) -> Option<Ticket> {
        if stays {
            return self.look(number);
        }
        // Stamps of messages that were discarded, or whose send failed for another reason than a full queue. They are
        // dropped after the lock is released: they may hold the last references to their streams.
        let mut gone = SmallVec::<[(u64, Ticket); 1]>::new();
        let mut of = lock(&self.of);
        let earlier = of.iter().take_while(|(of, _)| *of < number).count();
        gone.extend(of.drain(..earlier));
        let is_first = of.front().is_some_and(|(of, _)| *of == number);
        let found = if is_first { of.pop_front() } else { None };
        found.map(|(_, stamp)| stamp)
    }
}
