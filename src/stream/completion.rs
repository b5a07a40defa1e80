//! The protocol of completion: who waits for which ticket, who looks, and who is told.
//!
//! A stream counts its work in tickets: 1, 2, 3, ... A waiter waits until the stream has passed its ticket. Work on a
//! stream is done in order, so of all who wait only the one with the lowest ticket, the **front**, sees to it that
//! somebody looks; the others learn of their turn from it. This file knows no device, so that a model checker can try
//! every interleaving of it on a CPU (`tests/loom_completion.rs` includes it as it stands).
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
use slab::Slab;
use std::task::Waker;

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
    waiters: Slab<Waiter>,
    /// Tickets for which a callback is under way.
    armed: Vec<u64>,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    /// Taken when it is woken.
    waker: Option<Waker>,
}

/// A waiter's place in the list, while it has one.
#[derive(Debug, Default)]
pub(crate) struct Place(Option<usize>);

impl Completion {
    pub(crate) fn new() -> Self {
        Self {
            passed: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            state: Mutex::new(State { waiters: Slab::new(), armed: Vec::new() }),
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
            self.leave(place);
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
                discard(gone.and_then(|gone| gone.waker));
                discard(new);
                return if passed >= ticket { Progress::Passed } else { Progress::Failed };
            }
            let old = match place.0.and_then(|key| state.waiters.get_mut(key)) {
                Some(Waiter { waker: Some(kept), .. }) if kept.will_wake(waker) => new,
                Some(_) if new.is_none() => {
                    drop(state);
                    new = Some(waker.clone());
                    continue;
                }
                Some(waiter) => std::mem::replace(&mut waiter.waker, new),
                None => {
                    place.0 = Some(state.waiters.insert(Waiter { ticket, waker: new }));
                    None
                }
            };
            let front = state.front(passed).is_none_or(|front| front >= ticket);
            drop(state);
            discard(old);
            return Progress::Wait { front };
        }
    }

    /// Notes that a callback is under way which will say `ticket`. False if one was already: then do not start one.
    pub(crate) fn arm(&self, ticket: u64) -> bool {
        let mut state = lock(&self.state);
        let new = !state.armed.contains(&ticket);
        if new {
            state.armed.push(ticket);
        }
        new
    }

    /// The callback for `ticket` could not be started.
    pub(crate) fn disarm(&self, ticket: u64) {
        lock(&self.state).armed.retain(|armed| *armed != ticket);
    }

    /// A waiter gives up its place.
    pub(crate) fn leave(&self, place: &mut Place) {
        if place.0.is_none() {
            return;
        }
        let mut state = lock(&self.state);
        let left = Self::remove(&mut state, place);
        let passed = self.passed();
        let woken = match &left {
            // It was the front, and what it looked for has not come.
            Some(left) if left.ticket > passed => state.wake_front_from(left.ticket, passed),
            _ => None,
        };
        drop(state);
        discard(left.and_then(|left| left.waker));
        woken.into_iter().collect::<WakeList>().wake();
    }

    fn remove(state: &mut State, place: &mut Place) -> Option<Waiter> {
        place.0.take().and_then(|key| state.waiters.try_remove(key))
    }

    /// A rumour: `ticket` may have passed.
    pub(crate) fn wake(&self, ticket: u64) {
        let mut state = lock(&self.state);
        state.armed.retain(|armed| *armed != ticket);
        let woken = state.take(ticket);
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
        let mut woken = state.take(ticket);
        woken.extend(state.wake_front_from(0, ticket));
        drop(state);
        woken.wake();
        true
    }

    /// The device is lost.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
        let mut state = lock(&self.state);
        let woken = state.take(u64::MAX);
        drop(state);
        woken.wake();
    }
}

impl State {
    /// The lowest ticket that is waited for and has not passed.
    fn front(&self, passed: u64) -> Option<u64> {
        self.waiters.iter().map(|(_, waiter)| waiter.ticket).filter(|ticket| *ticket > passed).min()
    }

    /// The front's waker, if the front is at or above `ticket`.
    fn wake_front_from(&mut self, ticket: u64, passed: u64) -> Option<Waker> {
        let open = self.waiters.iter_mut().map(|(_, waiter)| waiter).filter(|waiter| waiter.ticket > passed);
        let front = open.min_by_key(|waiter| waiter.ticket)?;
        if front.ticket >= ticket { front.waker.take() } else { None }
    }

    /// The wakers of all up to `ticket`; they keep their places until they poll or leave.
    fn take(&mut self, ticket: u64) -> WakeList {
        let concerned = self.waiters.iter_mut().filter(|(_, waiter)| waiter.ticket <= ticket);
        concerned.filter_map(|(_, waiter)| waiter.waker.take()).collect()
    }
}
