//! The queue between a writer and a reader.
//!
//! This file knows no device, so that a model checker can try every interleaving of it on a CPU
//! (`tests/loom/queue.rs` includes it as it stands).
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
//!                              never to be moved -> dropped by `drop_moving`, and its place is free
//! ```
//!
//! Asking (`poll_message`, `poll_room`) changes nothing but the waker that is kept: the same question gets the same
//! answer until somebody acts. A reader that takes the last message will wait for the next: that is noted in the same
//! step, under the same lock, and its question then only reads. An end that has something else to wait for asks with
//! `look_for_message` or `look_for_room`: it is woken by what concerns it whatever else it waits for (the other end has
//! gone, something failed), and not by every message.
//!
//! A full queue ([`Full`]) holds the writer up, or drops a message: the new one, or the oldest. Of the oldest the reader may
//! `hold` those that were ready when its run began: they are its own then, beside the queue's capacity, until it takes
//! them or lets go. A queue whose full is `Replace` has one message, the newest, which is read and stays.
//!
//! A message goes in from a place of its owner's (`&mut Option`), and comes out into one: it may be large, and what is
//! handed up in results is copied at each step. What does not go in stays where it is.
//!
//! A ready message that takes another's place is there as soon as that one is not: a queue that drops its oldest for one
//! that may be taken is never seen empty. Where the new one must be moved first, it is.
//!
//! Promises: order is kept; a message is taken once, dropped, or handed back, and counted as that; whoever got `Wait` is
//! woken by the change that it waits for, and whoever got any answer by the end of the other side; `begin_move` while
//! another moves makes that other go round again.

use super::waking::{End, Others};
use crate::sync::{AtomicUsize, Level, Mutex, Ordering, discard, lock, mutex_at};
use smallvec::SmallVec;
use std::{collections::VecDeque, task::Waker};

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

/// What a full queue does with one message more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Full {
    /// It has no room for it.
    #[default]
    Hold,
    DropNewest,
    DropOldest,
    /// Drops the one that it has, which can be read again and again until then.
    Replace,
}

impl Full {
    fn drops_oldest(self) -> bool {
        matches!(self, Self::DropOldest | Self::Replace)
    }
}

/// What has become of a message that was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Pushed {
    In,
    /// And an older one, of this number, is out: it lies in the new one's place.
    InFor(u64),
    /// It is dropped: whoever pushed has it.
    Refused,
    /// No room, or no reader.
    Back,
}

/// What has become of all messages that are in the queue no more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Once each, however often it was read.
    pub(crate) taken: u64,
    pub(crate) dropped: u64,
    /// By a reader that has gone, or who had no use for it.
    pub(crate) untaken: u64,
}

/// A state of a queue: it differs after a push, and after a message was moved, taken or dropped.
#[cfg(debug_assertions)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    pushed: u64,
    first: Option<u64>,
    ready: usize,
}

/// A bounded queue, one writer, one reader.
#[derive(Debug)]
pub(crate) struct Queue<M> {
    capacity: usize,
    full: Full,
    /// Messages in the queue; and how many of the first of them may be taken. Written under the lock, read without.
    len: AtomicUsize,
    ready: AtomicUsize,
    reader: End,
    writer: End,
    state: Mutex<State<M>>,
}

#[derive(Debug)]
struct State<M> {
    messages: VecDeque<Slot<M>>,
    /// Of the message that was pushed last, counted from 1.
    number: u64,
    counts: Counts,
    moving: bool,
    /// Somebody came by while a move was under way.
    again: bool,
    /// The one that is moved was dropped meanwhile.
    stray: bool,
    /// How many of the first are the reader's own.
    held: usize,
    /// The first was read already.
    seen: bool,
    /// The number of the message that the reader has out of its slot to look at; 0: none.
    lent: u64,
    reader: Others,
    writer: Others,
}

/// A message's place.
#[derive(Debug)]
pub(crate) struct Slot<M> {
    number: u64,
    /// `None` only while it is moved or read.
    message: Option<M>,
}

/// A message that the reader has out of its slot. It goes back as this is dropped, unless the queue has dropped it meanwhile.
struct Lent<'a, M: 'static> {
    queue: &'a Queue<M>,
    number: u64,
    message: Option<M>,
}

impl<M: 'static> Drop for Lent<'_, M> {
    fn drop(&mut self) {
        let mut state = lock(&self.queue.state);
        state.lent = 0;
        // Others may be before it no more.
        if let Ok(at) = state.messages.binary_search_by_key(&self.number, |slot| slot.number)
            && let Some(slot) = state.messages.get_mut(at)
        {
            slot.message = self.message.take();
        }
        drop(state);
        // Still here if the queue has dropped it meanwhile.
        discard(self.message.take());
    }
}

impl<M: 'static> Queue<M> {
    pub(crate) fn new(capacity: usize, full: Full) -> Self {
        Self {
            capacity,
            full,
            len: AtomicUsize::new(0),
            ready: AtomicUsize::new(0),
            reader: End::new(),
            writer: End::new(),
            state: mutex_at(
                Level::Hub,
                State {
                    // One more for a moment, where the oldest goes when a new one is in.
                    messages: VecDeque::with_capacity(capacity.min(1024) + usize::from(full.drops_oldest())),
                    number: 0,
                    counts: Counts::default(),
                    moving: false,
                    again: false,
                    stray: false,
                    held: 0,
                    seen: false,
                    lent: 0,
                    reader: Others::default(),
                    writer: Others::default(),
                },
            ),
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

    /// Has it room for so many, or drops some for them?
    #[inline]
    pub(crate) fn has_room(&self, messages: usize) -> bool {
        self.len().saturating_add(messages) <= self.capacity || self.full != Full::Hold
    }

    /// Does it drop ready messages?
    pub(crate) fn is_lossy(&self) -> bool {
        self.full.drops_oldest()
    }

    pub(crate) fn full(&self) -> Full {
        self.full
    }

    /// Is there a message to take?
    #[inline]
    pub(crate) fn poll_message(&self, waker: &Waker) -> Answer {
        match self.ready() {
            0 if self.reader.is_kept(waker) && !self.writer_gone() => Answer::Wait,
            0 => self.wait_for_message(waker),
            _ if self.full == Full::Replace => self.poll_newest(waker),
            _ => Answer::Yes,
        }
    }

    #[inline(never)]
    fn wait_for_message(&self, waker: &Waker) -> Answer {
        let mut spare = self.reader.spare(waker);
        let mut state = lock(&self.state);
        if self.ready() > 0 {
            return Answer::Yes;
        }
        if self.writer_gone() && self.len() == 0 {
            return Answer::Never;
        }
        self.reader.keep(&mut state.reader, waker, &mut spare);
        Answer::Wait
    }

    /// The newest can be read until the writer has gone, and once after that.
    #[cold]
    fn poll_newest(&self, waker: &Waker) -> Answer {
        let mut spare = self.reader.spare(waker);
        let mut state = lock(&self.state);
        self.reader.introduce(&mut state.reader, waker, &mut spare);
        if self.is_over(&state) { Answer::Never } else { Answer::Yes }
    }

    /// Is there a message that was not read before?
    pub(crate) fn poll_new(&self, waker: &Waker) -> Answer {
        let mut spare = self.reader.spare(waker);
        let mut state = lock(&self.state);
        if self.is_new(&state) {
            return Answer::Yes;
        }
        if self.is_over(&state) {
            return Answer::Never;
        }
        self.reader.keep(&mut state.reader, waker, &mut spare);
        Answer::Wait
    }

    /// Can a message be taken that was not read before?
    pub(crate) fn has_new(&self) -> bool {
        self.is_new(&lock(&self.state))
    }

    fn is_new(&self, state: &State<M>) -> bool {
        self.ready() > 0 && !state.seen
    }

    /// Nothing can be taken that was not taken before, and nothing will come.
    pub(crate) fn has_ended(&self) -> bool {
        self.writer_gone() && self.is_over(&lock(&self.state))
    }

    fn is_over(&self, state: &State<M>) -> bool {
        self.writer_gone() && state.messages.len() == usize::from(state.seen)
    }

    /// Messages that nobody has taken or read.
    pub(crate) fn unread(&self) -> usize {
        let state = lock(&self.state);
        state.messages.len() - usize::from(state.seen)
    }

    pub(crate) fn counts(&self) -> Counts {
        lock(&self.state).counts
    }

    /// As `poll_message`, of a reader that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_message(&self, waker: &Waker) -> Answer {
        if self.ready() == 0 && self.reader.is_known(waker) && !self.writer_gone() {
            return Answer::Wait;
        }
        self.poll_message(waker)
    }

    /// As `poll_room`, of a writer that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_room(&self, waker: &Waker) -> Answer {
        if !self.has_room(1) && self.writer.is_known(waker) && !self.reader_gone() {
            return Answer::Wait;
        }
        self.poll_room(waker)
    }

    /// Is there room for a message?
    #[inline]
    pub(crate) fn poll_room(&self, waker: &Waker) -> Answer {
        if self.reader_gone() {
            return Answer::Never;
        }
        // This waker, and not another of the same end: it is to hear of the reader's end whatever it waits for next.
        if self.has_room(1) && self.writer.is_known(waker) {
            return Answer::Yes;
        }
        if self.writer.is_kept(waker) { Answer::Wait } else { self.wait_for_room(waker) }
    }

    #[inline(never)]
    fn wait_for_room(&self, waker: &Waker) -> Answer {
        let mut spare = self.writer.spare(waker);
        let mut state = lock(&self.state);
        if self.reader_gone() {
            return Answer::Never;
        }
        if self.has_room(1) {
            self.writer.introduce(&mut state.writer, waker, &mut spare);
            return Answer::Yes;
        }
        self.writer.keep(&mut state.writer, waker, &mut spare);
        Answer::Wait
    }

    /// Is there a reader?
    pub(crate) fn poll_reader(&self, waker: &Waker) -> Answer {
        if !self.writer.is_known(waker) {
            let mut spare = self.writer.spare(waker);
            self.writer.introduce(&mut lock(&self.state).writer, waker, &mut spare);
        }
        if self.reader_gone() { Answer::Never } else { Answer::Yes }
    }

    /// Adds the message in `place` at the end; `ready`: it may be taken as it is. A message that comes out instead, be it
    /// this one, lies in `place` then.
    #[inline]
    pub(crate) fn push(&self, place: &mut Option<M>, ready: bool) -> Pushed {
        let mut state = lock(&self.state);
        if self.reader_gone() || place.is_none() {
            return Pushed::Back;
        }
        let is_full = state.messages.len() - state.held >= self.capacity;
        if is_full && !self.full.drops_oldest() {
            return self.refuse_or_hold(&mut state);
        }
        let mut left = self.ready();
        state.number += 1;
        let number = state.number;
        state.messages.push_back(Slot { number, message: place.take() });
        let pushed = if is_full { drop_oldest_for(&mut state, place, &mut left) } else { Pushed::In };
        self.show(&state, left + usize::from(ready));
        if ready {
            let reader = self.reader.due(&mut state.reader);
            drop(state);
            reader.wake();
        }
        pushed
    }

    #[cold]
    fn refuse_or_hold(&self, state: &mut State<M>) -> Pushed {
        if self.full == Full::Hold {
            return Pushed::Back;
        }
        state.counts.dropped += 1;
        Pushed::Refused
    }

    /// What has become of the queue, for those who ask without the lock: once a change is complete. They see nothing of
    /// what is between, where the oldest is out and the new one not yet ready.
    #[inline]
    fn show(&self, state: &State<M>, ready: usize) {
        self.len.store(state.messages.len(), Ordering::Release);
        self.ready.store(ready, Ordering::Release);
    }

    /// Counts a message that is dropped before it is pushed.
    pub(crate) fn refuse(&self) {
        lock(&self.state).counts.dropped += 1;
    }

    /// Drops the oldest message that is not the reader's: its number, and the message, unless that is just being moved.
    pub(crate) fn drop_oldest(&self) -> Option<(u64, Option<M>)> {
        let mut state = lock(&self.state);
        let mut ready = self.ready();
        let oldest = remove_oldest(&mut state, &mut ready);
        self.show(&state, ready);
        let reader = self.reader.due(&mut state.reader);
        drop(state);
        reader.wake();
        oldest
    }

    /// Makes the ready messages the reader's own, so that none of them is dropped. How many these are.
    pub(crate) fn hold(&self) -> usize {
        let mut state = lock(&self.state);
        state.held = self.ready();
        state.held
    }

    /// What a claim by the reader depends on: while two answers are equal, it succeeds both times or neither.
    #[cfg(debug_assertions)]
    pub(crate) fn version(&self) -> Version {
        let state = lock(&self.state);
        let first = state.messages.front().map(|slot| slot.number);
        Version { pushed: state.number, first, ready: self.ready() }
    }

    /// The number of the first message.
    pub(crate) fn first(&self) -> Option<u64> {
        lock(&self.state).messages.front().map(|slot| slot.number)
    }

    /// What the reader held and did not take is the queue's again. What that has no room for is dropped.
    pub(crate) fn let_go(&self) -> SmallVec<[(u64, Option<M>); 1]> {
        let mut state = lock(&self.state);
        state.held = 0;
        let mut out = SmallVec::new();
        let mut ready = self.ready();
        while state.messages.len() > self.capacity {
            out.extend(remove_oldest(&mut state, &mut ready));
        }
        self.show(&state, ready);
        out
    }

    /// For the reader: shows the message at `at` and its number, if it may be taken. `look` runs without the lock: the message
    /// is out of its slot meanwhile, and goes back also if `look` panics.
    pub(crate) fn peek<R>(&self, at: usize, look: impl FnOnce(u64, &mut M) -> R) -> Option<R> {
        let mut state = lock(&self.state);
        if at >= self.ready() {
            return None;
        }
        let mut lent = self.lend(&mut state, at)?;
        drop(state);
        let number = lent.number;
        lent.message.as_mut().map(|message| look(number, message))
    }

    /// As [`peek`](Self::peek), under the lock: `look` runs no code of the user's.
    pub(crate) fn peek_locked<R>(&self, at: usize, look: impl FnOnce(&M) -> R) -> Option<R> {
        let state = lock(&self.state);
        if at >= self.ready() {
            return None;
        }
        state.messages.get(at)?.message.as_ref().map(look)
    }

    /// Takes the message at `at` out of its slot until the result is dropped.
    fn lend(&self, state: &mut State<M>, at: usize) -> Option<Lent<'_, M>> {
        let slot = state.messages.get_mut(at)?;
        let (number, message) = (slot.number, slot.message.take()?);
        state.lent = number;
        Some(Lent { queue: self, number, message: Some(message) })
    }

    /// Shows all messages that are in their slots, under the lock: `look` runs no code of the user's.
    pub(crate) fn each(&self, look: impl FnMut(&mut M)) {
        lock(&self.state).messages.iter_mut().filter_map(|slot| slot.message.as_mut()).for_each(look);
    }

    /// Takes the first message, if it may be taken, into `place`; and its number.
    #[inline]
    pub(crate) fn take(&self, place: &mut Option<M>) -> Option<u64> {
        self.take_as(place, |counts| &mut counts.taken)
    }

    /// As `take`, of a reader that has no use for it.
    pub(crate) fn discard(&self, place: &mut Option<M>) -> Option<u64> {
        self.take_as(place, |counts| &mut counts.untaken)
    }

    /// Counts so many that were taken as such that the reader had no use for.
    pub(crate) fn leave(&self, messages: u64) {
        if messages > 0 {
            let counts = &mut lock(&self.state).counts;
            // A run of the user's may have swapped its ports, which are values: then these are another hub's.
            let messages = messages.min(counts.taken);
            counts.taken -= messages;
            counts.untaken += messages;
        }
    }

    #[inline]
    fn take_as(&self, place: &mut Option<M>, count: impl FnOnce(&mut Counts) -> &mut u64) -> Option<u64> {
        if self.ready() == 0 {
            return None;
        }
        let mut state = lock(&self.state);
        let left = self.ready().checked_sub(1)?;
        let Slot { number, message } = state.messages.pop_front()?;
        *place = message;
        self.show(&state, left);
        state.held = state.held.saturating_sub(1);
        if !std::mem::take(&mut state.seen) {
            *count(&mut state.counts) += 1;
        }
        if left == 0 {
            self.reader.will_wait();
        }
        let writer = self.writer.due(&mut state.writer);
        drop(state);
        writer.wake();
        Some(number)
    }

    /// Copies the first message into `place`, and leaves it there, also if `copy` panics. `copy` runs without the lock.
    pub(crate) fn read(&self, place: &mut Option<M>, copy: impl FnOnce(&M) -> M) -> Option<u64> {
        let mut state = lock(&self.state);
        let lent = self.lend(&mut state, 0)?;
        if !std::mem::replace(&mut state.seen, true) {
            state.counts.taken += 1;
        }
        drop(state);
        *place = lent.message.as_ref().map(copy);
        Some(lent.number)
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
        let message = state.messages.get_mut(at).and_then(|slot| slot.message.take());
        state.moving = message.is_some();
        state.again = false;
        message
    }

    /// Gives a message back to its place. Returns the message if it was dropped or the reader has gone meanwhile, and
    /// whether to go round again.
    pub(crate) fn end_move(&self, message: M, moved: bool) -> (Option<M>, bool) {
        let mut state = lock(&self.state);
        state.moving = false;
        let again = moved || state.again;
        if std::mem::take(&mut state.stray) {
            return (Some(message), again);
        }
        if self.reader_gone() {
            state.counts.untaken += 1;
            return (Some(message), false);
        }
        let at = self.ready();
        if let Some(slot) = state.messages.get_mut(at) {
            slot.message = Some(message);
        }
        if moved {
            self.ready.store(at + 1, Ordering::Release);
            let reader = self.reader.due(&mut state.reader);
            drop(state);
            reader.wake();
        }
        (None, again)
    }

    /// The message that is being moved cannot be: it is dropped, and its mover has it. Its number, if it was in the queue
    /// still.
    pub(crate) fn drop_moving(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        state.moving = false;
        if std::mem::take(&mut state.stray) {
            return None;
        }
        if self.reader_gone() {
            state.counts.untaken += 1;
            return None;
        }
        let at = self.ready();
        let Slot { number, .. } = state.messages.remove(at)?;
        state.counts.dropped += 1;
        self.show(&state, at);
        // There is room, and perhaps nothing more to come.
        let (reader, writer) = (self.reader.told(&mut state.reader), self.writer.told(&mut state.writer));
        drop(state);
        reader.wake();
        writer.wake();
        Some(number)
    }

    /// The writer is gone: what lies here can still be taken.
    pub(crate) fn close_writer(&self) {
        let mut state = lock(&self.state);
        self.writer.go();
        let (reader, writer) = (self.reader.told(&mut state.reader), state.writer.take());
        drop(state);
        discard(writer);
        reader.wake();
    }

    /// The reader is gone: what was never taken is handed back.
    pub(crate) fn close_reader(&self) -> VecDeque<Slot<M>> {
        let mut state = lock(&self.state);
        self.reader.go();
        let left = std::mem::take(&mut state.messages);
        // One that is being moved counts when it is back.
        let there = left.iter().filter(|slot| slot.message.is_some()).count();
        state.counts.untaken += there.saturating_sub(usize::from(state.seen)) as u64;
        (state.held, state.seen) = (0, false);
        self.len.store(0, Ordering::Release);
        self.ready.store(0, Ordering::Release);
        let (reader, writer) = (state.reader.take(), self.writer.told(&mut state.writer));
        drop(state);
        discard(reader);
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
            let mut spare = self.writer.spare(waker);
            self.writer.keep(&mut lock(&self.state).writer, waker, &mut spare);
        }
    }

    /// Keeps the reader's waker for the next message, or for the end.
    pub(crate) fn keep_reader(&self, waker: &Waker) {
        if !self.reader.is_kept(waker) {
            let mut spare = self.reader.spare(waker);
            self.reader.keep(&mut lock(&self.state).reader, waker, &mut spare);
        }
    }

    #[inline]
    pub(crate) fn writer_gone(&self) -> bool {
        self.writer.is_gone()
    }

    #[inline]
    pub(crate) fn reader_gone(&self) -> bool {
        self.reader.is_gone()
    }
}

/// Removes the oldest message that is not the reader's: its number, and the message, unless that is just being moved.
/// `ready`: how many may be taken, before and after.
fn remove_oldest<M>(state: &mut State<M>, ready: &mut usize) -> Option<(u64, Option<M>)> {
    let at = state.held;
    let Slot { number, message } = state.messages.remove(at)?;
    *ready -= usize::from(at < *ready);
    let seen = at == 0 && std::mem::take(&mut state.seen);
    if !seen {
        state.counts.dropped += 1;
        // Else the reader has it, to look at it or to copy it.
        state.stray |= message.is_none() && number != state.lent;
    }
    Some((number, message))
}

#[cold]
fn drop_oldest_for<M>(state: &mut State<M>, place: &mut Option<M>, ready: &mut usize) -> Pushed {
    match remove_oldest(state, ready) {
        Some((number, Some(old))) => {
            *place = Some(old);
            Pushed::InFor(number)
        }
        _ => Pushed::In,
    }
}
