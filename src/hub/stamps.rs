//! The stamps of messages without envelopes, beside their queue.
//!
//! A stamp is a ticket of the stream that a message's sender says it was made on, at which the message's own work is
//! done: the latest of that stream's writes to its envelopes or, where it has no envelopes, all that the stream was given
//! until the message was sent. So whoever waits for a stamp waits for no later work of the sender's.
//!
//! Envelopes carry theirs themselves. For other messages they lie beside the queue and not in it, since most messages
//! between operators on the host have none: those pay for one look at a flag.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
};

use smallvec::SmallVec;

use crate::{
    stream::Ticket,
    sync::{Mutex, lock},
};

/// By the message's number in its queue.
#[derive(Debug, Default)]
pub(super) struct Stamps {
    /// There ever was one.
    any: AtomicBool,
    of: Mutex<VecDeque<(u64, Ticket)>>,
}

impl Stamps {
    /// Before the message goes into the queue, whose lock shows it to the other end.
    pub(super) fn put(&self, number: u64, stamp: Ticket) {
        self.any.store(true, Ordering::Relaxed);
        lock(&self.of).push_back((number, stamp));
    }

    /// The message did not go into the queue.
    pub(super) fn take_back(&self, number: u64) {
        let mut of = lock(&self.of);
        let back = if of.back().is_some_and(|(of, _)| *of == number) { of.pop_back() } else { None };
        drop(of);
        drop(back);
    }

    /// The message was dropped from the queue.
    pub(super) fn forget(&self, number: u64) {
        if self.any.load(Ordering::Relaxed) {
            let mut of = lock(&self.of);
            let gone = of.iter().position(|(of, _)| *of == number).and_then(|at| of.remove(at));
            drop(of);
            // It may be the last to hold its stream.
            drop(gone);
        }
    }

    /// While the message is in the queue.
    pub(super) fn look(&self, number: u64) -> Option<Ticket> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        lock(&self.of).iter().find(|(of, _)| *of == number).map(|(_, stamp)| stamp.clone())
    }

    /// After the message came out of the queue, or was read and `stays`.
    #[inline]
    pub(super) fn take(&self, number: u64, stays: bool) -> Option<Ticket> {
        if self.any.load(Ordering::Relaxed) { self.find(number, stays) } else { None }
    }

    #[inline(never)]
    fn find(&self, number: u64, stays: bool) -> Option<Ticket> {
        if stays {
            return self.look(number);
        }
        // Of a message that was discarded, or that could not be sent for another reason than a full queue. They are dropped after
        // the lock: they may be the last to hold their streams.
        let mut gone = SmallVec::<[(u64, Ticket); 1]>::new();
        let mut of = lock(&self.of);
        let earlier = of.iter().take_while(|(of, _)| *of < number).count();
        gone.extend(of.drain(..earlier));
        let is_first = of.front().is_some_and(|(of, _)| *of == number);
        let found = if is_first { of.pop_front() } else { None };
        found.map(|(_, stamp)| stamp)
    }
}
