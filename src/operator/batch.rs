//! [`Turns`] and [`Batch`]: how an input takes several messages together, from connections that take turns.

use std::{collections::VecDeque, mem, vec};

use super::input_queue::InputQueue;
use crate::{hub::Message, sync::discard_all};

/// The order in which the connections are served. They take turns, so that a busy one does not starve the others.
#[derive(Default)]
pub(super) struct Turns {
    /// The connection that is served first: the one after that of the last message.
    first: usize,
    /// For a batch: the connections that have messages for it, and how many each. Kept for its capacity.
    open: VecDeque<(usize, usize)>,
    /// The number of messages that the batch can still take, and whether it has taken none so far.
    left: usize,
    is_new: bool,
}

impl Turns {
    /// The connections, of `count`, in the order of their turns.
    pub(super) fn order(&self, count: usize) -> impl Iterator<Item = usize> + use<> {
        (self.first..count).chain(0..self.first)
    }

    /// A message was taken from this connection, of `count`.
    pub(super) fn served(&mut self, connection: usize, count: usize) {
        self.first = (connection + 1) % count;
    }

    /// Begins a batch of up to `most` messages, of those that are available now.
    pub(super) fn begin_batch<M: Message>(&mut self, most: usize, queues: &[InputQueue<M>]) {
        (self.left, self.is_new) = (most, true);
        self.open.clear();
        let order = self.order(queues.len());
        self.open.extend(order.map(|connection| (connection, queues[connection].batch_limit())));
    }

    /// The next connection of the batch, the number of messages that it has for it, and true for the batch's first call.
    pub(super) fn next_turn(&mut self) -> Option<(usize, usize, bool)> {
        if self.left == 0 {
            return None;
        }
        let (connection, available) = self.open.pop_front()?;
        Some((connection, available, mem::take(&mut self.is_new)))
    }

    /// A message of the batch was taken from this connection, of `count`.
    pub(super) fn taken(&mut self, connection: usize, available: usize, count: usize) {
        self.left -= 1;
        self.served(connection, count);
        if available > 1 {
            self.open.push_back((connection, available - 1));
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.left == 0 || self.open.is_empty()
    }
}

/// Messages that were taken together. They are dropped one by one, since several might have a destructor that panics.
#[derive(Debug)]
pub(super) struct BatchBuffer<M: 'static>(Vec<M>);

/// The messages of a batch, in the order of taking.
#[derive(Debug)]
pub(super) struct Batch<'a, M: 'static>(vec::Drain<'a, M>);

impl<M: 'static> BatchBuffer<M> {
    pub(super) fn none() -> Self {
        Self(Vec::new())
    }

    pub(super) fn push(&mut self, message: M) {
        self.0.push(message);
    }

    pub(super) fn drain(&mut self) -> Batch<'_, M> {
        Batch(self.0.drain(..))
    }
}

impl<M: 'static> Drop for BatchBuffer<M> {
    fn drop(&mut self) {
        discard_all(self.0.drain(..));
    }
}

impl<M: 'static> Drop for Batch<'_, M> {
    fn drop(&mut self) {
        discard_all(self.0.by_ref());
    }
}

impl<M: 'static> Iterator for Batch<'_, M> {
    type Item = M;

    #[inline]
    fn next(&mut self) -> Option<M> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<M: 'static> ExactSizeIterator for Batch<'_, M> {}
