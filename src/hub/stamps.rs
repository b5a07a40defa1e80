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
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::{stream::Ticket, sync::lock};

/// By the number of the message, which each end counts for itself.
#[derive(Debug, Default)]
pub(super) struct Stamps {
    /// There ever was one.
    any: AtomicBool,
    of: Mutex<VecDeque<(u64, Ticket)>>,
    /// Messages that the reader has discarded and not counted.
    discarded: AtomicU64,
}

impl Stamps {
    /// Before the message goes into the queue, whose lock shows it to the other end.
    pub(super) fn put(&self, count: u64, stamp: Ticket) {
        self.any.store(true, Ordering::Relaxed);
        lock(&self.of).push_back((count, stamp));
    }

    /// The message did not go into the queue.
    pub(super) fn take_back(&self, count: u64) {
        // Dropped after the lock.
        let _back = lock(&self.of).pop_back_if(|(number, _)| *number == count);
    }

    /// The reader has taken a message that it does not count.
    pub(super) fn discard(&self) {
        self.discarded.fetch_add(1, Ordering::Relaxed);
    }

    /// While the message is in the queue: it is the writer's `count`th.
    pub(super) fn look(&self, count: u64) -> Option<Ticket> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        lock(&self.of).iter().find(|(number, _)| *number == count).map(|(_, stamp)| stamp.clone())
    }

    /// After the message came out of the queue.
    #[inline]
    pub(super) fn take(&self, count: u64) -> Option<Ticket> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let count = count + self.discarded.load(Ordering::Relaxed);
        let mut of = lock(&self.of);
        // Of a message that was discarded, or that could not be sent for another reason than a full queue.
        while of.front().is_some_and(|(number, _)| *number < count) {
            of.pop_front();
        }
        of.pop_front_if(|(number, _)| *number == count).map(|(_, stamp)| stamp)
    }
}
