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
//! answer until somebody acts. A reader that takes the last message will wait for the next: that is noted in the same
//! step, under the same lock, and its question then only reads. An end that has something else to wait for asks with
//! `look_for_message` or `look_for_room`: it is woken by what concerns it whatever else it waits for (the other end has
//! gone, something failed), and not by every message.
//!
//! Promises: order is kept; a message is taken once or handed back; whoever got `Wait` is woken by the change that it
//! waits for; `begin_move` while another moves makes that other go round again.

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
    reader: End,
    writer: End,
    state: Mutex<State<M>>,
}

#[derive(Debug)]
struct State<M> {
    /// `None` only for the one that is being moved.
    messages: VecDeque<Option<M>>,
    moving: bool,
    /// Somebody came by while a move was under way.
    again: bool,
    reader: Others,
    writer: Others,
}

/// One end, as the other sees it.
#[derive(Debug)]
struct End {
    gone: AtomicBool,
    /// The waker that it came with first. An operator's is always the same, so it is kept here for good and nothing is
    /// cloned for a message.
    waker: OnceLock<Waker>,
    /// That one is to be woken by the next change. Written under the lock, read without: whoever finds it set will be
    /// woken, for what was changed before it was read as well.
    waits: AtomicBool,
}

/// Another waker of an end that is polled in more than one way.
type Others = Option<Waker>;

/// A wake that is due, once the lock has gone.
#[must_use]
struct Due<'a> {
    first: Option<&'a Waker>,
    other: Option<Waker>,
}

impl<M> Queue<M> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            len: AtomicUsize::new(0),
            ready: AtomicUsize::new(0),
            reader: End::new(),
            writer: End::new(),
            state: Mutex::new(State {
                messages: VecDeque::with_capacity(capacity.min(1024)),
                moving: false,
                again: false,
                reader: None,
                writer: None,
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
            Answer::Yes
        } else if self.reader.is_kept(waker) && !self.writer_gone() {
            Answer::Wait
        } else {
            self.wait_for_message(waker)
        }
    }

    /// As `poll_message`, of a reader that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_message(&self, waker: &Waker) -> Answer {
        if self.ready() > 0 {
            Answer::Yes
        } else if self.reader.is_known(waker) && !self.writer_gone() {
            Answer::Wait
        } else {
            self.wait_for_message(waker)
        }
    }

    #[inline(never)]
    fn wait_for_message(&self, waker: &Waker) -> Answer {
        let mut state = lock(&self.state);
        if self.ready() > 0 {
            return Answer::Yes;
        }
        if self.writer_gone() && self.len() == 0 {
            return Answer::Never;
        }
        self.reader.keep(&mut state.reader, waker);
        Answer::Wait
    }

    /// Is there room for a message?
    #[inline]
    pub(crate) fn poll_room(&self, waker: &Waker) -> Answer {
        if self.reader_gone() {
            Answer::Never
        } else if self.len() < self.capacity {
            Answer::Yes
        } else if self.writer.is_kept(waker) {
            Answer::Wait
        } else {
            self.wait_for_room(waker)
        }
    }

    /// As `poll_room`, of a writer that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_room(&self, waker: &Waker) -> Answer {
        if self.reader_gone() {
            Answer::Never
        } else if self.len() < self.capacity {
            Answer::Yes
        } else if self.writer.is_known(waker) {
            Answer::Wait
        } else {
            self.wait_for_room(waker)
        }
    }

    #[inline(never)]
    fn wait_for_room(&self, waker: &Waker) -> Answer {
        let mut state = lock(&self.state);
        if self.reader_gone() {
            return Answer::Never;
        }
        if self.len() < self.capacity {
            return Answer::Yes;
        }
        self.writer.keep(&mut state.writer, waker);
        Answer::Wait
    }

    /// Adds a message at the end; `ready`: it may be taken as it is. Given back if there is no room or no reader.
    pub(crate) fn push(&self, message: M, ready: bool) -> Result<(), M> {
        let mut state = lock(&self.state);
        let len = state.messages.len();
        if self.reader_gone() || len >= self.capacity {
            return Err(message);
        }
        state.messages.push_back(Some(message));
        self.len.store(len + 1, Ordering::Release);
        if ready {
            self.ready.store(self.ready() + 1, Ordering::Release);
            let reader = self.reader.due(&mut state.reader);
            drop(state);
            reader.wake();
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
        let left = self.ready().checked_sub(1)?;
        let message = state.messages.pop_front().flatten();
        self.len.store(state.messages.len(), Ordering::Release);
        self.ready.store(left, Ordering::Release);
        if left == 0 {
            self.reader.will_wait();
        }
        let writer = self.writer.due(&mut state.writer);
        drop(state);
        writer.wake();
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
        if self.reader_gone() {
            return (Some(message), false);
        }
        let at = self.ready();
        if let Some(place) = state.messages.get_mut(at) {
            *place = Some(message);
        }
        if moved {
            self.ready.store(at + 1, Ordering::Release);
            let reader = self.reader.due(&mut state.reader);
            drop(state);
            reader.wake();
        }
        (None, again)
    }

    /// The writer is gone: what lies here can still be taken.
    pub(crate) fn close_writer(&self) {
        let mut state = lock(&self.state);
        self.writer.gone.store(true, Ordering::Release);
        let (reader, writer) = (self.reader.told(&mut state.reader), state.writer.take());
        drop(state);
        drop(writer);
        reader.wake();
    }

    /// The reader is gone: what was never taken is handed back.
    pub(crate) fn close_reader(&self) -> VecDeque<Option<M>> {
        let mut state = lock(&self.state);
        self.reader.gone.store(true, Ordering::Release);
        let left = std::mem::take(&mut state.messages);
        self.len.store(0, Ordering::Release);
        self.ready.store(0, Ordering::Release);
        let (reader, writer) = (state.reader.take(), self.writer.told(&mut state.writer));
        drop(state);
        drop(reader);
        writer.wake();
        left
    }

    /// Wakes both ends, to look again: an envelope came back, or something failed.
    pub(crate) fn wake_both(&self) {
        let mut state = lock(&self.state);
        let (reader, writer) = (self.reader.told(&mut state.reader), self.writer.told(&mut state.writer));
        drop(state);
        reader.wake();
        writer.wake();
    }

    /// Wakes the writer, to look again: a blank envelope came home.
    pub(crate) fn wake_writer(&self) {
        let writer = self.writer.due(&mut lock(&self.state).writer);
        writer.wake();
    }

    /// Keeps the writer's waker for what else it waits for: a blank envelope.
    pub(crate) fn keep_writer(&self, waker: &Waker) {
        if !self.writer.is_kept(waker) {
            self.writer.keep(&mut lock(&self.state).writer, waker);
        }
    }

    /// Keeps the reader's waker for the next message, or for the end.
    pub(crate) fn keep_reader(&self, waker: &Waker) {
        if !self.reader.is_kept(waker) {
            self.reader.keep(&mut lock(&self.state).reader, waker);
        }
    }

    #[inline]
    pub(crate) fn writer_gone(&self) -> bool {
        self.writer.gone.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn reader_gone(&self) -> bool {
        self.reader.gone.load(Ordering::Acquire)
    }
}

impl End {
    fn new() -> Self {
        Self { gone: AtomicBool::new(false), waker: OnceLock::new(), waits: AtomicBool::new(false) }
    }

    /// Will this waker be woken by the next change? Asked without the lock; it may not know of one that will.
    #[inline]
    fn is_kept(&self, waker: &Waker) -> bool {
        self.waits.load(Ordering::Acquire) && self.is_known(waker)
    }

    /// Will this waker be woken by what concerns the end, whatever it waits for?
    #[inline]
    fn is_known(&self, waker: &Waker) -> bool {
        self.waker.get().is_some_and(|kept| kept.will_wake(waker))
    }

    /// Under the lock, as all below: what this end has just done is the last that it could do.
    #[inline]
    fn will_wait(&self) {
        self.waits.store(true, Ordering::Release);
    }

    fn keep(&self, other: &mut Others, waker: &Waker) {
        if self.waker.get_or_init(|| waker.clone()).will_wake(waker) {
            self.waits.store(true, Ordering::Release);
        } else if !other.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            *other = Some(waker.clone());
        }
    }

    /// There is something new for this end.
    #[inline]
    fn due(&self, other: &mut Others) -> Due<'_> {
        let mut first = None;
        if self.waits.load(Ordering::Acquire) {
            self.waits.store(false, Ordering::Release);
            first = self.waker.get();
        }
        Due { first, other: other.take() }
    }

    /// There is something that concerns this end, whatever it waits for.
    fn told(&self, other: &mut Others) -> Due<'_> {
        self.waits.store(false, Ordering::Release);
        Due { first: self.waker.get(), other: other.take() }
    }
}

impl Due<'_> {
    /// Called without the lock.
    #[inline]
    fn wake(self) {
        if let Some(first) = self.first {
            first.wake_by_ref();
        }
        if let Some(other) = self.other {
            other.wake();
        }
    }
}
