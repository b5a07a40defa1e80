//! The queue between a writer and a reader.
//!
//! This file knows no device, so that a model checker can try every interleaving of it on a CPU
//! (`tests/loom_queue.rs` includes it as it stands).
//!
//! A message that must be moved to where the reader is (copied to its device) lies in the queue from the moment it is
//! sent, but may be taken only when it has been moved. Messages are moved one at a time, in order, by whoever comes
//! by: the writer after its push, or whoever gives back an envelope that a move was waiting for.
//!
//! ```text
//!                   ready                   behind it
//!   take <── [ m1 ][ m2 ] | [ m3 ][ m4 ] <── push
//!                            └ taken out by `begin_move`, back by `end_move`:
//!                              moved -> ready + 1;  not moved (no envelope) -> stays, until somebody comes by
//! ```
//!
//! Asking (`poll_message`, `poll_room`) changes nothing but the waker that is kept: the same question gets the same
//! answer until somebody acts. Promises: order is kept; a message is taken once or handed back; whoever got `Wait` is
//! woken by the change that it waits for; `begin_move` while another moves makes that other go round again.

use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering, lock};
use std::{collections::VecDeque, sync::OnceLock, task::Waker};

/// What an end of the queue is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// There is a message to take, or room for one.
    Yes,
    /// Not yet; the waker is kept.
    Wait,
    /// Never again: the other end is gone.
    Never,
}

/// A bounded queue, one writer, one reader.
#[derive(Debug)]
pub(crate) struct Queue<M> {
    capacity: usize,
    /// Messages in the queue; and how many of the first of them may be taken. Written under the lock, read without.
    len: AtomicUsize,
    ready: AtomicUsize,
    writer_gone: AtomicBool,
    reader_gone: AtomicBool,
    /// The wakers that the two ends came with first. An operator's is always the same, so it is kept here for good and
    /// nothing is cloned for a message.
    reader: OnceLock<Waker>,
    writer: OnceLock<Waker>,
    state: Mutex<State<M>>,
}

#[derive(Debug)]
struct State<M> {
    /// `None` only for the one that is being moved.
    messages: VecDeque<Option<M>>,
    moving: bool,
    /// Somebody came by while a move was under way.
    again: bool,
    reader: Wanted,
    writer: Wanted,
}

/// Whom to wake at one end.
#[derive(Debug, Default)]
struct Wanted {
    /// The end's first waker.
    first: bool,
    /// Another, from an end that is polled in more than one way.
    other: Option<Waker>,
}

impl<M> Queue<M> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            len: AtomicUsize::new(0),
            ready: AtomicUsize::new(0),
            writer_gone: AtomicBool::new(false),
            reader_gone: AtomicBool::new(false),
            reader: OnceLock::new(),
            writer: OnceLock::new(),
            state: Mutex::new(State {
                messages: VecDeque::with_capacity(capacity.min(1024)),
                moving: false,
                again: false,
                reader: Wanted::default(),
                writer: Wanted::default(),
            }),
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn ready(&self) -> usize {
        self.ready.load(Ordering::Acquire)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Is there a message to take?
    #[inline]
    pub(crate) fn poll_message(&self, waker: &Waker) -> Answer {
        if self.ready() > 0 {
            return Answer::Yes;
        }
        let mut state = lock(&self.state);
        if self.ready() > 0 {
            return Answer::Yes;
        }
        if self.writer_gone.load(Ordering::Acquire) && self.len() == 0 {
            return Answer::Never;
        }
        state.reader.keep(&self.reader, waker);
        Answer::Wait
    }

    /// Is there room for a message?
    #[inline]
    pub(crate) fn poll_room(&self, waker: &Waker) -> Answer {
        if self.reader_gone.load(Ordering::Acquire) {
            return Answer::Never;
        }
        if self.len() < self.capacity {
            return Answer::Yes;
        }
        let mut state = lock(&self.state);
        if self.reader_gone.load(Ordering::Acquire) {
            return Answer::Never;
        }
        if self.len() < self.capacity {
            return Answer::Yes;
        }
        state.writer.keep(&self.writer, waker);
        Answer::Wait
    }

    /// Adds a message at the end; `ready`: it may be taken as it is. Given back if there is no room or no reader.
    pub(crate) fn push(&self, message: M, ready: bool) -> Result<(), M> {
        let mut state = lock(&self.state);
        if self.reader_gone.load(Ordering::Acquire) || state.messages.len() >= self.capacity {
            return Err(message);
        }
        state.messages.push_back(Some(message));
        self.len.store(state.messages.len(), Ordering::Release);
        if ready {
            self.ready.store(self.ready() + 1, Ordering::Release);
            let reader = std::mem::take(&mut state.reader);
            drop(state);
            reader.wake(&self.reader);
        }
        Ok(())
    }

    /// Shows the message at `at`, if it may be taken. `look` calls nothing of this queue.
    pub(crate) fn peek<R>(&self, at: usize, look: impl FnOnce(&mut M) -> R) -> Option<R> {
        let mut state = lock(&self.state);
        if at >= self.ready() {
            return None;
        }
        state.messages.get_mut(at).and_then(Option::as_mut).map(look)
    }

    /// Shows all messages that are not being moved. `look` calls nothing of this queue.
    pub(crate) fn each(&self, look: impl FnMut(&mut M)) {
        lock(&self.state).messages.iter_mut().flatten().for_each(look);
    }

    /// Takes the first message, if it may be taken.
    pub(crate) fn take(&self) -> Option<M> {
        if self.ready() == 0 {
            return None;
        }
        let mut state = lock(&self.state);
        if self.ready() == 0 {
            return None;
        }
        let message = state.messages.pop_front().flatten();
        self.len.store(state.messages.len(), Ordering::Release);
        self.ready.store(self.ready() - 1, Ordering::Release);
        let writer = std::mem::take(&mut state.writer);
        drop(state);
        writer.wake(&self.writer);
        message
    }

    /// The first message that is not ready, to be moved. `None` if there is none, or if it is being moved already:
    /// whoever moves it then goes round again.
    pub(crate) fn begin_move(&self) -> Option<M> {
        let mut state = lock(&self.state);
        if state.moving {
            state.again = true;
            return None;
        }
        let at = self.ready();
        let message = state.messages.get_mut(at).and_then(Option::take);
        state.moving = message.is_some();
        state.again = false;
        message
    }

    /// Gives a message back to its place. Returns the message if the reader has gone meanwhile, and whether to go
    /// round again.
    pub(crate) fn end_move(&self, message: M, moved: bool) -> (Option<M>, bool) {
        let mut state = lock(&self.state);
        state.moving = false;
        let again = moved || state.again;
        if self.reader_gone.load(Ordering::Acquire) {
            return (Some(message), false);
        }
        let at = self.ready();
        if let Some(place) = state.messages.get_mut(at) {
            *place = Some(message);
        }
        if moved {
            self.ready.store(at + 1, Ordering::Release);
            let reader = std::mem::take(&mut state.reader);
            drop(state);
            reader.wake(&self.reader);
        }
        (None, again)
    }

    /// The writer is gone: what lies here can still be taken.
    pub(crate) fn close_writer(&self) {
        let mut state = lock(&self.state);
        self.writer_gone.store(true, Ordering::Release);
        let (reader, writer) = (std::mem::take(&mut state.reader), std::mem::take(&mut state.writer));
        drop(state);
        drop(writer);
        reader.wake(&self.reader);
    }

    /// The reader is gone: what was never taken is handed back.
    pub(crate) fn close_reader(&self) -> VecDeque<Option<M>> {
        let mut state = lock(&self.state);
        self.reader_gone.store(true, Ordering::Release);
        let left = std::mem::take(&mut state.messages);
        self.len.store(0, Ordering::Release);
        self.ready.store(0, Ordering::Release);
        let (reader, writer) = (std::mem::take(&mut state.reader), std::mem::take(&mut state.writer));
        drop(state);
        drop(reader);
        writer.wake(&self.writer);
        left
    }

    /// Wakes both ends, to look again: an envelope came back, or something failed.
    pub(crate) fn wake_both(&self) {
        let mut state = lock(&self.state);
        let (reader, writer) = (std::mem::take(&mut state.reader), std::mem::take(&mut state.writer));
        drop(state);
        reader.wake(&self.reader);
        writer.wake(&self.writer);
    }

    /// Wakes the writer, to look again: a blank envelope came home.
    pub(crate) fn wake_writer(&self) {
        let writer = std::mem::take(&mut lock(&self.state).writer);
        writer.wake(&self.writer);
    }

    /// Keeps the writer's waker for what else it waits for: a blank envelope.
    pub(crate) fn keep_writer(&self, waker: &Waker) {
        lock(&self.state).writer.keep(&self.writer, waker);
    }

    /// Keeps the reader's waker for the next message, or for the end.
    pub(crate) fn keep_reader(&self, waker: &Waker) {
        lock(&self.state).reader.keep(&self.reader, waker);
    }

    pub(crate) fn writer_gone(&self) -> bool {
        self.writer_gone.load(Ordering::Acquire)
    }

    pub(crate) fn reader_gone(&self) -> bool {
        self.reader_gone.load(Ordering::Acquire)
    }
}

impl Wanted {
    fn keep(&mut self, first: &OnceLock<Waker>, waker: &Waker) {
        if first.get_or_init(|| waker.clone()).will_wake(waker) {
            self.first = true;
        } else if !self.other.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            self.other = Some(waker.clone());
        }
    }

    /// Called without the lock.
    fn wake(self, first: &OnceLock<Waker>) {
        if self.first
            && let Some(first) = first.get()
        {
            first.wake_by_ref();
        }
        if let Some(other) = self.other {
            other.wake();
        }
    }
}
