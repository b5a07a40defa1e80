//! The protocol of completion: who waits for which ticket, who looks, and who is told.
//!
//! A stream counts its work in tickets: 1, 2, 3, ... A waiter waits until the stream has passed its ticket. Work on a
//! stream is done in order, so of all who wait only the one with the lowest ticket, the **front**, sees to it that
//! somebody looks; the others learn of their turn from it. This file knows no device, so that a model checker can try
//! every interleaving of it on a CPU (`tests/loom/completion.rs` includes it as it stands).
//!
//! Three things are told to it, from any thread:
//!
//! ```text
//!   wake(n)      a rumour: somebody (a host callback, an alarm) says that n may have passed. Wakes all up to n, who
//!                then look at the device themselves.
//!   advance(n)   the truth: the device said that n has passed. Resolves all up to n and wakes the next front.
//!   fail()       the device is lost. Resolves everybody.
//!
//!   a waiter:   poll -> Wait, not front ────────────────────── woken ──> poll -> ...
//!               poll -> Wait, front -> look at the device -> a source -> woken ──> poll -> ... -> Passed | Failed
//! ```
//!
//! Promises: a waiter that got `Wait` is woken by the first `wake`, `advance` or `fail` after that which concerns it; as
//! long as anybody waits, a front was told that it is one, or is being woken to be told; a waiter that is dropped is
//! forgotten, and if it was the front the next one is woken. A rumour that is false costs a look, and one that comes
//! twice or never does no harm: what never comes is caught by the lookout, which looks on a timer.

use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, WakeList, assert_may_wake, discard, lock};
use std::{collections::BTreeMap, task::Waker};

/// What a waiter does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The ticket has passed.
    Passed,
    /// The device is lost.
    Failed,
    /// The waker is kept. The front looks at the device: if the ticket has passed it says so with `advance` and polls
    /// again, if not it sees to it that a source is under way.
    Wait {
        /// Nobody waits for less.
        front: bool,
    },
}

/// The completions of one stream.
#[derive(Debug)]
pub(crate) struct Completion {
    /// All tickets up to this one have passed.
    passed: AtomicU64,
    failed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    waiters: Waiters,
    /// Tickets for which a callback is under way, in ascending order.
    armed: Vec<u64>,
}

/// Who waits, in the order of their tickets. What one of them costs does not grow with those beside it; the lowest, which is
/// mostly the only one, stands by itself.
#[derive(Debug)]
struct Waiters {
    lowest: Option<(Key, Kept)>,
    /// All of them above the lowest; empty where there is none.
    others: BTreeMap<Key, Kept>,
    next: u64,
}

/// The ticket, and a number that no other waiter has.
type Key = (u64, u64);

/// A waiter's waker. Taken when it is woken.
type Kept = Option<Waker>;

/// A waiter's place in the list, while it has one.
#[derive(Debug, Default)]
pub(crate) struct Place(Option<Key>);

impl Completion {
    pub(crate) fn new() -> Self {
        Self {
            passed: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            state: Mutex::new(State { waiters: Waiters::new(), armed: Vec::new() }),
        }
    }

    /// The highest ticket known to have passed.
    #[inline]
    pub(crate) fn passed(&self) -> u64 {
        self.passed.load(Ordering::Acquire)
    }

    pub(crate) fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// True if anybody waits.
    pub(crate) fn has_waiters(&self) -> bool {
        !lock(&self.state).waiters.is_empty()
    }

    /// Asks for `ticket`. Unless it is settled, `waker` is kept in `place` until `leave`.
    pub(crate) fn poll(&self, place: &mut Place, ticket: u64, waker: &Waker) -> Progress {
        if self.passed() >= ticket {
            self.leave(place).wake();
            return Progress::Passed;
        }
        // A clone runs user code: it is made without the lock, before the first look or when the kept one is another's.
        let mut new = place.0.is_none().then(|| waker.clone());
        loop {
            let mut state = lock(&self.state);
            // Asked again under the lock: `advance` and `fail` store first and lock then, so either this sees what they
            // stored, or they see the waiter.
            let passed = self.passed();
            if passed >= ticket || self.failed() {
                let gone = Self::remove(&mut state, place);
                drop(state);
                discard(gone.and_then(|(_, kept)| kept));
                discard(new);
                return if passed >= ticket { Progress::Passed } else { Progress::Failed };
            }
            let old = match place.0.and_then(|key| state.waiters.get_mut(key)) {
                Some(Some(kept)) if kept.will_wake(waker) => new,
                Some(_) if new.is_none() => {
                    drop(state);
                    new = Some(waker.clone());
                    continue;
                }
                Some(kept) => std::mem::replace(kept, new),
                None => {
                    place.0 = Some(state.waiters.insert(ticket, new));
                    None
                }
            };
            let front = state.waiters.front(passed).is_none_or(|(front, _)| front >= ticket);
            drop(state);
            discard(old);
            return Progress::Wait { front };
        }
    }

    /// Notes that a callback is under way which will say `ticket`. False if one was already: then do not start one.
    pub(crate) fn arm(&self, ticket: u64) -> bool {
        let mut state = lock(&self.state);
        let at = state.armed.binary_search(&ticket);
        if let Err(at) = at {
            state.armed.insert(at, ticket);
        }
        at.is_err()
    }

    /// The callback for `ticket` could not be started.
    pub(crate) fn disarm(&self, ticket: u64) {
        lock(&self.state).disarm(ticket);
    }

    /// A waiter gives up its place. What is returned is woken instead of it.
    pub(crate) fn leave(&self, place: &mut Place) -> WakeList {
        if place.0.is_none() {
            return WakeList::new();
        }
        let mut state = lock(&self.state);
        let left = Self::remove(&mut state, place);
        let passed = self.passed();
        let woken = match &left {
            // It was the front, and what it looked for has not come.
            Some(((ticket, _), _)) if *ticket > passed => state.waiters.wake_front_from(*ticket, passed),
            _ => None,
        };
        drop(state);
        discard(left.and_then(|(_, kept)| kept));
        woken.into_iter().collect()
    }

    fn remove(state: &mut State, place: &mut Place) -> Option<(Key, Kept)> {
        let key = place.0.take()?;
        state.waiters.remove(key).map(|kept| (key, kept))
    }

    /// A rumour: `ticket` may have passed.
    pub(crate) fn wake(&self, ticket: u64) {
        let mut state = lock(&self.state);
        state.disarm(ticket);
        let woken = state.waiters.take(ticket);
        drop(state);
        woken.wake();
    }

    /// The truth: all tickets up to `ticket` have passed. False if that was known.
    pub(crate) fn advance(&self, ticket: u64) -> bool {
        assert_may_wake();
        if self.passed.fetch_max(ticket, Ordering::AcqRel) >= ticket {
            return false;
        }
        let mut state = lock(&self.state);
        let mut woken = state.waiters.take(ticket);
        woken.extend(state.waiters.wake_front_from(0, ticket));
        drop(state);
        woken.wake();
        true
    }

    /// The device is lost.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
        let mut state = lock(&self.state);
        let woken = state.waiters.take(u64::MAX);
        drop(state);
        woken.wake();
    }
}

impl State {
    fn disarm(&mut self, ticket: u64) {
        if let Ok(at) = self.armed.binary_search(&ticket) {
            self.armed.remove(at);
        }
    }
}

impl Waiters {
    const fn new() -> Self {
        Self { lowest: None, others: BTreeMap::new(), next: 0 }
    }

    fn is_empty(&self) -> bool {
        self.lowest.is_none()
    }

    fn insert(&mut self, ticket: u64, kept: Kept) -> Key {
        let key = (ticket, self.next);
        self.next += 1;
        if self.lowest.is_none() {
            self.lowest = Some((key, kept));
        } else {
            self.insert_beside(key, kept);
        }
        key
    }

    // A lone waiter gets to none of the functions that are `cold`: inlined, they would lengthen its path.
    #[cold]
    #[inline(never)]
    fn insert_beside(&mut self, key: Key, kept: Kept) {
        let above = match &mut self.lowest {
            Some(lowest) if key < lowest.0 => std::mem::replace(lowest, (key, kept)),
            _ => (key, kept),
        };
        self.others.insert(above.0, above.1);
    }

    #[inline]
    fn get_mut(&mut self, key: Key) -> Option<&mut Kept> {
        match &mut self.lowest {
            Some(lowest) if lowest.0 == key => Some(&mut lowest.1),
            _ => Self::other(&mut self.others, key),
        }
    }

    #[cold]
    #[inline(never)]
    fn other(others: &mut BTreeMap<Key, Kept>, key: Key) -> Option<&mut Kept> {
        others.get_mut(&key)
    }

    #[inline]
    fn remove(&mut self, key: Key) -> Option<Kept> {
        match self.lowest.take_if(|lowest| lowest.0 == key) {
            Some((_, kept)) => {
                if !self.others.is_empty() {
                    self.next_is_lowest();
                }
                Some(kept)
            }
            None => self.remove_other(key),
        }
    }

    #[cold]
    #[inline(never)]
    fn next_is_lowest(&mut self) {
        self.lowest = self.others.pop_first();
    }

    #[cold]
    #[inline(never)]
    fn remove_other(&mut self, key: Key) -> Option<Kept> {
        self.others.remove(&key)
    }

    /// The lowest that has not passed.
    #[inline]
    fn front(&mut self, passed: u64) -> Option<(u64, &mut Kept)> {
        match &mut self.lowest {
            Some(lowest) if lowest.0.0 > passed => Some((lowest.0.0, &mut lowest.1)),
            Some(_) => Self::front_of(&mut self.others, passed),
            None => None,
        }
    }

    #[cold]
    #[inline(never)]
    fn front_of(others: &mut BTreeMap<Key, Kept>, passed: u64) -> Option<(u64, &mut Kept)> {
        others.range_mut((passed.checked_add(1)?, 0)..).next().map(|(key, kept)| (key.0, kept))
    }

    /// The front's waker, if the front is at or above `ticket`.
    fn wake_front_from(&mut self, ticket: u64, passed: u64) -> Option<Waker> {
        let (front, kept) = self.front(passed)?;
        if front >= ticket { kept.take() } else { None }
    }

    /// The wakers of all up to `ticket`; they keep their places until they poll or leave.
    fn take(&mut self, ticket: u64) -> WakeList {
        let Some(lowest) = self.lowest.as_mut().filter(|lowest| lowest.0.0 <= ticket) else { return WakeList::new() };
        let mut woken: WakeList = lowest.1.take().into_iter().collect();
        if !self.others.is_empty() {
            woken.extend(self.others.range_mut(..=(ticket, u64::MAX)).filter_map(|(_, kept)| kept.take()));
        }
        woken
    }
}
