//! [`Queue`]: the queue between a hub's writer and its reader.
//!
//! This file does not depend on any device, so that a model checker can explore all of its interleavings on a CPU
//! (`tests/loom/queue.rs` includes it unchanged).
//!
//! A message might have to be moved to the reader (copied to its device) before it can be taken. Where no message in the
//! queue waits to be moved (`all_ready`), the writer may move its message first and push it ready. Otherwise the message is
//! pushed and moved later. Queued messages are moved in order, by any task that calls `begin_move`: the writer after its
//! push, or a task that returns an envelope for which a move was waiting. A move is of one message or of several
//! neighbours, and there is one move at a time.
//!
//! ```text
//!                   ready                   behind it
//!   take <── [ m1 ][ m2 ] | [ m3 ][ m4 ] <── push
//!                            └ taken out by `begin_move`, put back by `end_move`:
//!                              moved -> ready + 1;  not moved (no envelope) -> stays until the next `begin_move`
//!                              cannot be moved -> dropped by `drop_moving`, which frees its slot
//! ```
//!
//! Polling (`poll_message`, `poll_room`) changes nothing but the registered waker: repeated polls get the same answer
//! until the queue changes. A reader that takes the last message has to wait for the next one; this is recorded in
//! the same step, under the same lock, and the reader's next poll then only reads. An end that also waits for
//! something else polls with `Interest::Close`: it is woken when the other end closes or something fails, but not by every
//! message.
//!
//! A full queue ([`WhenFull`]) blocks the writer, or drops a message: the new one or the oldest. In a queue that drops
//! the oldest, the reader may reserve the messages that are ready when its run begins: they do not count against the
//! queue's capacity until the reader takes or releases them. A `KeepLatest` queue has one message, the
//! newest, which is read and stays.
//!
//! Messages are passed in and out through the caller's `&mut Option`: they may be large, and a returned value is copied at
//! each level of calls. A message that was not pushed stays in the `Option`.
//!
//! A ready message that replaces another becomes visible in the same step in which the old one is removed: a queue
//! that drops its oldest message for one that is ready is never seen empty. If the new message must be moved first,
//! other tasks might see the queue empty until then.
//!
//! Guarantees: Order is kept. A message is taken once, dropped, or handed back, and counted accordingly. A caller
//! that got `Wait` is woken by the change that it waits for, and a caller that got any answer is woken when the other
//! end closes. If `begin_move` is called during another move, the task that moves checks the queue again.

use super::{
    end_waker::{EndWaker, Interest, SecondWaker},
    when_full::WhenFull,
};
use crate::sync::{AtomicUsize, Level, Mutex, Ordering, discard, lock, mutex_at};
use smallvec::SmallVec;
use std::{collections::VecDeque, task::Waker};

/// The answer to an end that polls the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// There is a message to take, or room for one.
    Yes,
    /// Not yet; the waker is registered.
    Wait,
    /// Never again: the other end has closed.
    Never,
}

/// The result of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Pushed {
    Queued,
    /// The message is in the queue. An older one was dropped for it, and is in the caller's `Option`.
    Evicted,
    /// The message counts as dropped; the caller still has it.
    Dropped,
    /// There is no room, or no reader; the caller still has the message.
    NotQueued,
}

/// What has become of all messages that have left the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Each message counts once, however often it was read.
    pub(crate) taken: u64,
    pub(crate) dropped: u64,
    /// Left by a reader that has closed, or discarded by it.
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

/// A bounded queue with one writer and one reader. The order of the fields keeps what each message needs together: a hop
/// touches four cache lines here, and not six.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Queue<M> {
    /// The number of messages in the queue, and how many of the first of them are ready. Written under the lock, read
    /// without it.
    len: AtomicUsize,
    ready: AtomicUsize,
    capacity: usize,
    when_full: WhenFull,
    reader: EndWaker,
    writer: EndWaker,
    /// The number of messages that are not ready. Stored on its own, since `len` and `ready` are written one after the other.
    unready: AtomicUsize,
    state: Mutex<State<M>>,
}

#[derive(Debug)]
#[repr(C)]
struct State<M> {
    messages: VecDeque<Slot<M>>,
    /// The number of the last message that was pushed, counted from 1.
    number: u64,
    /// The first message was read already.
    seen: bool,
    moving: bool,
    /// `begin_move` was called during a move.
    move_again: bool,
    /// The message that is being moved was dropped during the move.
    dropped_in_move: bool,
    /// How many of the first messages are reserved for the reader.
    reserved: usize,
    reader: SecondWaker,
    writer: SecondWaker,
    counts: Counts,
    /// The number of the message that the reader has taken out of its slot to peek at; 0: none.
    peeked: u64,
}

/// A message's slot in the queue.
#[derive(Debug)]
pub(crate) struct Slot<M> {
    number: u64,
    /// `None` only while it is moved or read.
    message: Option<M>,
}

/// A message that the reader has taken out of its slot temporarily. Dropping this puts it back, unless the queue has
/// dropped it since.
struct PeekGuard<'a, M: 'static> {
    queue: &'a Queue<M>,
    number: u64,
    message: Option<M>,
}

impl<M: 'static> Drop for PeekGuard<'_, M> {
    fn drop(&mut self) {
        let mut state = lock(&self.queue.state);
        state.peeked = 0;
        // The messages before it might be gone.
        if let Ok(at) = state.messages.binary_search_by_key(&self.number, |slot| slot.number)
            && let Some(slot) = state.messages.get_mut(at)
        {
            slot.message = self.message.take();
        }
        drop(state);
        // Still here if the queue has dropped its slot since.
        discard(self.message.take());
    }
}

impl<M: 'static> Queue<M> {
    pub(crate) fn new(capacity: usize, when_full: WhenFull) -> Self {
        Self {
            capacity,
            when_full,
            len: AtomicUsize::new(0),
            ready: AtomicUsize::new(0),
            unready: AtomicUsize::new(0),
            reader: EndWaker::new(),
            writer: EndWaker::new(),
            state: mutex_at(
                Level::Hub,
                State {
                    // One more, since the oldest is removed after the new one was added.
                    messages: VecDeque::with_capacity(capacity.min(1024) + usize::from(when_full.may_lose_ready())),
                    number: 0,
                    counts: Counts::default(),
                    moving: false,
                    move_again: false,
                    dropped_in_move: false,
                    reserved: 0,
                    seen: false,
                    peeked: 0,
                    reader: SecondWaker::default(),
                    writer: SecondWaker::default(),
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

    /// Whether there is room for this many messages, or if the queue drops messages instead.
    #[inline]
    pub(crate) fn has_room(&self, messages: usize) -> bool {
        self.len().saturating_add(messages) <= self.capacity || !self.when_full.blocks_writer()
    }

    /// Whether the queue drops ready messages.
    pub(crate) fn is_lossy(&self) -> bool {
        self.when_full.may_lose_ready()
    }

    pub(crate) fn when_full(&self) -> WhenFull {
        self.when_full
    }

    /// Whether there is a message to take.
    #[inline]
    pub(crate) fn poll_message(&self, interest: Interest, waker: &Waker) -> Answer {
        match self.ready() {
            0 if self.reader.is_registered(waker, interest) && !self.writer_gone() => Answer::Wait,
            0 => self.wait_for_message(waker),
            _ if self.when_full.keeps_latest() => self.poll_newest(waker),
            _ => Answer::Yes,
        }
    }

    #[inline(never)]
    fn wait_for_message(&self, waker: &Waker) -> Answer {
        let mut clone = self.reader.clone_unknown(waker);
        let mut state = lock(&self.state);
        if self.ready() > 0 {
            return Answer::Yes;
        }
        if self.writer_gone() && self.len() == 0 {
            return Answer::Never;
        }
        self.reader.register(&mut state.reader, waker, &mut clone);
        Answer::Wait
    }

    /// The newest message can be read until the writer has closed, and once after that.
    #[cold]
    fn poll_newest(&self, waker: &Waker) -> Answer {
        let mut clone = self.reader.clone_unknown(waker);
        let mut state = lock(&self.state);
        self.reader.register_for_close(&mut state.reader, waker, &mut clone);
        if self.is_over(&state) { Answer::Never } else { Answer::Yes }
    }

    /// Whether there is a message that was not read before.
    pub(crate) fn poll_new(&self, waker: &Waker) -> Answer {
        let mut clone = self.reader.clone_unknown(waker);
        let mut state = lock(&self.state);
        if self.is_new(&state) {
            return Answer::Yes;
        }
        if self.is_over(&state) {
            return Answer::Never;
        }
        self.reader.register(&mut state.reader, waker, &mut clone);
        Answer::Wait
    }

    /// Whether a message can be taken that was not read before.
    pub(crate) fn has_new(&self) -> bool {
        self.is_new(&lock(&self.state))
    }

    fn is_new(&self, state: &State<M>) -> bool {
        self.ready() > 0 && !state.seen
    }

    /// Whether there is no unread message, and none will be added.
    pub(crate) fn has_ended(&self) -> bool {
        self.writer_gone() && self.is_over(&lock(&self.state))
    }

    fn is_over(&self, state: &State<M>) -> bool {
        self.writer_gone() && state.messages.len() == usize::from(state.seen)
    }

    /// The number of messages that were not taken or read.
    pub(crate) fn unread(&self) -> usize {
        let state = lock(&self.state);
        state.messages.len() - usize::from(state.seen)
    }

    pub(crate) fn counts(&self) -> Counts {
        lock(&self.state).counts
    }

    /// Whether there is room for a message.
    #[inline]
    pub(crate) fn poll_room(&self, interest: Interest, waker: &Waker) -> Answer {
        if self.reader_gone() {
            return Answer::Never;
        }
        // Only if this waker is known, and not another of the same end: it must be woken when the reader closes,
        // whatever it waits for next.
        if !self.writer.is_first_waker(waker) {
            return self.wait_for_room(waker);
        }
        match interest {
            _ if self.has_room(1) => Answer::Yes,
            Interest::Change if !self.writer.is_waiting() => self.wait_for_room(waker),
            _ => Answer::Wait,
        }
    }

    #[inline(never)]
    fn wait_for_room(&self, waker: &Waker) -> Answer {
        let mut clone = self.writer.clone_unknown(waker);
        let mut state = lock(&self.state);
        if self.reader_gone() {
            return Answer::Never;
        }
        if self.has_room(1) {
            self.writer.register_for_close(&mut state.writer, waker, &mut clone);
            return Answer::Yes;
        }
        self.writer.register(&mut state.writer, waker, &mut clone);
        Answer::Wait
    }

    pub(crate) fn poll_reader(&self, waker: &Waker) -> Answer {
        if !self.writer.is_first_waker(waker) {
            let mut clone = self.writer.clone_unknown(waker);
            self.writer.register_for_close(&mut lock(&self.state).writer, waker, &mut clone);
        }
        if self.reader_gone() { Answer::Never } else { Answer::Yes }
    }

    /// Appends the message in `place`; `ready`: it can be taken at once. A message that is removed in exchange, which
    /// may be this one, is in `place` afterwards.
    #[inline]
    pub(crate) fn push(&self, place: &mut Option<M>, ready: bool) -> Pushed {
        let mut state = lock(&self.state);
        if self.reader_gone() || place.is_none() {
            return Pushed::NotQueued;
        }
        let is_full = state.messages.len() - state.reserved >= self.capacity;
        if is_full && !self.when_full.may_lose_ready() {
            return self.push_to_full(&mut state);
        }
        // Not as an `Option`: its copy would read the message at other offsets than those at which it was just written,
        // and wait for each write.
        let Some(message) = place.take() else { return Pushed::NotQueued };
        let mut left = self.ready();
        state.number += 1;
        let number = state.number;
        state.messages.push_back(Slot { number, message: Some(message) });
        let pushed = if is_full { drop_oldest_for(&mut state, place, &mut left) } else { Pushed::Queued };
        self.publish(&state, left + usize::from(ready));
        if ready {
            let reader = self.reader.notify(&mut state.reader);
            drop(state);
            reader.wake();
        }
        pushed
    }

    #[cold]
    fn push_to_full(&self, state: &mut State<M>) -> Pushed {
        if self.when_full.blocks_writer() {
            return Pushed::NotQueued;
        }
        state.counts.dropped += 1;
        Pushed::Dropped
    }

    /// Publishes the lengths to callers that read them without the lock. Called once a change is complete, so that
    /// they do not see the intermediate state in which the oldest is removed and the new one is not yet ready.
    #[inline]
    fn publish(&self, state: &State<M>, ready: usize) {
        self.len.store(state.messages.len(), Ordering::Release);
        self.ready.store(ready, Ordering::Release);
        self.unready.store(state.messages.len() - ready, Ordering::Release);
    }

    /// For the writer: whether no message waits to be moved.
    #[inline]
    pub(crate) fn all_ready(&self) -> bool {
        // Only the writer adds such messages.
        self.unready() == 0
    }

    /// Counts a message as untaken that could not be pushed, since the reader has closed.
    pub(crate) fn count_unsent(&self) {
        lock(&self.state).counts.untaken += 1;
    }

    /// Counts a message that is dropped before it is pushed.
    pub(crate) fn count_dropped(&self) {
        lock(&self.state).counts.dropped += 1;
    }

    /// Drops the oldest message that is not reserved for the reader. Returns it, unless it is being moved.
    pub(crate) fn drop_oldest(&self) -> Option<Option<M>> {
        let mut state = lock(&self.state);
        let mut ready = self.ready();
        let oldest = remove_oldest(&mut state, &mut ready);
        self.publish(&state, ready);
        let reader = self.reader.notify(&mut state.reader);
        drop(state);
        reader.wake();
        oldest
    }

    /// Reserves the ready messages for the reader, so that none of them is dropped. Returns their number.
    pub(crate) fn reserve_ready(&self) -> usize {
        let mut state = lock(&self.state);
        state.reserved = self.ready();
        state.reserved
    }

    /// The state that a claim by the reader depends on: while it is unchanged, the claim has the same result.
    #[cfg(debug_assertions)]
    pub(crate) fn version(&self) -> Version {
        let state = lock(&self.state);
        let first = state.messages.front().map(|slot| slot.number);
        Version { pushed: state.number, first, ready: self.ready() }
    }

    pub(crate) fn first(&self) -> Option<u64> {
        lock(&self.state).messages.front().map(|slot| slot.number)
    }

    /// Ends the reservation of messages that the reader reserved and did not take. Those that exceed the capacity are
    /// dropped and returned.
    pub(crate) fn release_reserved(&self) -> SmallVec<[M; 1]> {
        let mut state = lock(&self.state);
        state.reserved = 0;
        let mut out = SmallVec::new();
        let mut ready = self.ready();
        while state.messages.len() > self.capacity {
            out.extend(remove_oldest(&mut state, &mut ready).flatten());
        }
        self.publish(&state, ready);
        out
    }

    /// For the reader: calls `read` with the message at `at`, if it is ready. `read` runs without the lock: the message is
    /// out of its slot during the call, and is put back even if `read` panics.
    pub(crate) fn peek<R>(&self, at: usize, read: impl FnOnce(&mut M) -> R) -> Option<R> {
        let mut state = lock(&self.state);
        if at >= self.ready() {
            return None;
        }
        let mut peeked = self.take_for_peek(&mut state, at)?;
        drop(state);
        peeked.message.as_mut().map(read)
    }

    /// Like [`peek`](Self::peek), but under the lock: `read` must not run user code.
    pub(crate) fn peek_locked<R>(&self, at: usize, read: impl FnOnce(&M) -> R) -> Option<R> {
        let state = lock(&self.state);
        if at >= self.ready() {
            return None;
        }
        state.messages.get(at)?.message.as_ref().map(read)
    }

    /// Takes the message at `at` out of its slot until the result is dropped.
    fn take_for_peek(&self, state: &mut State<M>, at: usize) -> Option<PeekGuard<'_, M>> {
        let slot = state.messages.get_mut(at)?;
        let (number, message) = (slot.number, slot.message.take()?);
        state.peeked = number;
        Some(PeekGuard { queue: self, number, message: Some(message) })
    }

    /// Calls `read` with all messages that are in their slots, under the lock: `read` must not run user code.
    pub(crate) fn each(&self, read: impl FnMut(&mut M)) {
        lock(&self.state).messages.iter_mut().filter_map(|slot| slot.message.as_mut()).for_each(read);
    }

    /// Takes the first message, if it is ready, into `place`, and returns its number.
    #[inline]
    pub(crate) fn take(&self, place: &mut Option<M>) -> Option<u64> {
        self.take_as(place, |counts| &mut counts.taken)
    }

    /// Like `take`, but counts the message as untaken.
    pub(crate) fn discard(&self, place: &mut Option<M>) -> Option<u64> {
        self.take_as(place, |counts| &mut counts.untaken)
    }

    /// Recounts this number of taken messages as untaken.
    pub(crate) fn recount_untaken(&self, messages: u64) {
        if messages > 0 {
            let counts = &mut lock(&self.state).counts;
            // User code might have swapped its ports, which are plain values, during the run: the messages are then
            // those of another hub.
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
        // Known to be empty below: the message is copied once, from its slot into place.
        if let Some(before) = place.take() {
            discard(before);
        }
        let mut state = lock(&self.state);
        let left = self.ready().checked_sub(1)?;
        let slot = state.messages.front_mut()?;
        let number = slot.number;
        *place = slot.message.take();
        state.messages.pop_front();
        self.publish(&state, left);
        state.reserved = state.reserved.saturating_sub(1);
        if !std::mem::take(&mut state.seen) {
            *count(&mut state.counts) += 1;
        }
        if left == 0 {
            self.reader.mark_waiting();
        }
        let writer = self.writer.notify(&mut state.writer);
        drop(state);
        writer.wake();
        Some(number)
    }

    /// Copies the first message into `place` and leaves it in the queue, even if `copy` panics. `copy` runs without
    /// the lock.
    pub(crate) fn read(&self, place: &mut Option<M>, copy: impl FnOnce(&M) -> M) -> Option<u64> {
        let mut state = lock(&self.state);
        let peeked = self.take_for_peek(&mut state, 0)?;
        if !std::mem::replace(&mut state.seen, true) {
            state.counts.taken += 1;
        }
        drop(state);
        *place = peeked.message.as_ref().map(copy);
        Some(peeked.number)
    }

    /// Takes out the first messages that are not ready, at most `most`, to move them. There are none if some are being
    /// moved already; the task that moves them then checks again. Only in a queue that blocks its writer, which drops
    /// no message meanwhile, may there be more than one.
    pub(crate) fn begin_move(&self, most: usize, out: &mut impl Extend<M>) {
        debug_assert!(most == 1 || self.when_full.blocks_writer(), "several of a queue that may drop them");
        let mut state = lock(&self.state);
        if state.moving {
            state.move_again = true;
            return;
        }
        let waiting = state.messages.iter_mut().skip(self.ready()).take(most);
        let mut messages = waiting.map_while(|slot| slot.message.take()).peekable();
        let is_moving = messages.peek().is_some();
        out.extend(messages);
        state.moving = is_moving;
        state.move_again = false;
    }

    /// Puts the messages back into their slots, the first `moved` of them as ready. `orphans` gets a message that was dropped
    /// meanwhile, and all of them if the reader has closed. Returns whether to check for other messages to move.
    pub(crate) fn end_move(
        &self,
        messages: impl IntoIterator<Item = M>,
        moved: usize,
        orphans: &mut impl Extend<M>,
    ) -> bool {
        let mut state = lock(&self.state);
        debug_assert!(state.moving, "a move that has begun");
        state.moving = false;
        let again = moved > 0 || state.move_again;
        if std::mem::take(&mut state.dropped_in_move) {
            orphans.extend(messages);
            return again;
        }
        if self.reader_gone() {
            let mut count = 0;
            orphans.extend(messages.into_iter().inspect(|_| count += 1));
            state.counts.untaken += count;
            return false;
        }
        let at = self.ready();
        for (slot, message) in state.messages.iter_mut().skip(at).zip(messages) {
            slot.message = Some(message);
        }
        if moved > 0 {
            self.publish(&state, at + moved);
            let reader = self.reader.notify(&mut state.reader);
            drop(state);
            reader.wake();
        }
        again
    }

    /// The number of messages that wait to be moved.
    #[inline]
    pub(crate) fn unready(&self) -> usize {
        self.unready.load(Ordering::Acquire)
    }

    /// Drops the message that is being moved, since it cannot be moved; its mover has it.
    pub(crate) fn drop_moving(&self) {
        let mut state = lock(&self.state);
        state.moving = false;
        if std::mem::take(&mut state.dropped_in_move) {
            return;
        }
        if self.reader_gone() {
            state.counts.untaken += 1;
            return;
        }
        let at = self.ready();
        state.messages.remove(at);
        state.counts.dropped += 1;
        self.publish(&state, at);
        // There is room now, and possibly no message left to wait for.
        let (reader, writer) =
            (self.reader.notify_always(&mut state.reader), self.writer.notify_always(&mut state.writer));
        drop(state);
        reader.wake();
        writer.wake();
    }

    /// Closes the writer's end. Messages in the queue can still be taken.
    pub(crate) fn close_writer(&self) {
        let mut state = lock(&self.state);
        self.writer.close();
        let (reader, writer) = (self.reader.notify_always(&mut state.reader), state.writer.take());
        drop(state);
        discard(writer);
        reader.wake();
    }

    /// Closes the reader's end, and returns the messages that were never taken.
    pub(crate) fn close_reader(&self) -> VecDeque<Slot<M>> {
        let mut state = lock(&self.state);
        self.reader.close();
        let left = std::mem::take(&mut state.messages);
        // A message that is being moved is counted when it comes back.
        let there = left.iter().filter(|slot| slot.message.is_some()).count();
        state.counts.untaken += there.saturating_sub(usize::from(state.seen)) as u64;
        (state.reserved, state.seen) = (0, false);
        self.publish(&state, 0);
        let (reader, writer) = (state.reader.take(), self.writer.notify_always(&mut state.writer));
        drop(state);
        discard(reader);
        writer.wake();
        left
    }

    /// Wakes both ends to poll again: an envelope was returned, or something failed.
    pub(crate) fn wake_both(&self) {
        let mut state = lock(&self.state);
        let (reader, writer) =
            (self.reader.notify_always(&mut state.reader), self.writer.notify_always(&mut state.writer));
        drop(state);
        reader.wake();
        writer.wake();
    }

    /// Wakes the writer to poll again: a blank envelope was returned.
    pub(crate) fn wake_writer(&self) {
        let writer = self.writer.notify(&mut lock(&self.state).writer);
        writer.wake();
    }

    /// Registers the writer's waker for another event that it waits for: a blank envelope.
    pub(crate) fn register_writer(&self, waker: &Waker) {
        if !self.writer.is_registered_for_change(waker) {
            let mut clone = self.writer.clone_unknown(waker);
            self.writer.register(&mut lock(&self.state).writer, waker, &mut clone);
        }
    }

    /// Registers the reader's waker for the next message or the writer's close.
    pub(crate) fn register_reader(&self, waker: &Waker) {
        if !self.reader.is_registered_for_change(waker) {
            let mut clone = self.reader.clone_unknown(waker);
            self.reader.register(&mut lock(&self.state).reader, waker, &mut clone);
        }
    }

    #[inline]
    pub(crate) fn writer_gone(&self) -> bool {
        self.writer.is_closed()
    }

    #[inline]
    pub(crate) fn reader_gone(&self) -> bool {
        self.reader.is_closed()
    }
}

/// Removes the oldest message that is not reserved for the reader. Returns it, unless it is being moved. `ready`: the
/// number of ready messages, updated by this call.
fn remove_oldest<M>(state: &mut State<M>, ready: &mut usize) -> Option<Option<M>> {
    let at = state.reserved;
    let Slot { number, message } = state.messages.remove(at)?;
    *ready -= usize::from(at < *ready);
    let seen = at == 0 && std::mem::take(&mut state.seen);
    if !seen {
        state.counts.dropped += 1;
        // Otherwise the reader has it, to peek at or to copy.
        state.dropped_in_move |= message.is_none() && number != state.peeked;
    }
    Some(message)
}

#[cold]
fn drop_oldest_for<M>(state: &mut State<M>, place: &mut Option<M>, ready: &mut usize) -> Pushed {
    match remove_oldest(state, ready) {
        Some(Some(old)) => {
            *place = Some(old);
            Pushed::Evicted
        }
        _ => Pushed::Queued,
    }
}
