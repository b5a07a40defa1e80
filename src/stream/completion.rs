//! The protocol of completion: who waits for which ticket, and who is told.
//!
//! A stream counts its work in tickets: 1, 2, 3, ... A waiter waits until the stream has passed its ticket. This file
//! knows no device, so that a model checker can try every interleaving of it on a CPU
//! (`tests/loom_completion.rs` includes it as it stands).
//!
//! Three things are told to it, from any thread:
//!
//! ```text
//!   signal(n)    a rumour: somebody (a host callback, an alarm) says that n may have passed. Wakes all up to n; the
//!                first of them looks at the device and, if it is true, says so with `advance`.
//!   advance(n)   the truth: the device said that n has passed. Resolves all up to n.
//!   fail()       the device is lost. Resolves everybody.
//!
//!   a waiter:  poll -> Wait -> look, arm -> ... wake -> poll -> Look -> look -> poll -> Passed | Failed
//! ```
//!
//! Promises: a waiter that got `Wait` is woken by the first `signal`, `advance` or `fail` after that which concerns it
//! (none is lost), a waiter that is dropped is forgotten, a rumour that was false only costs a look, and one that comes
//! twice or never does no harm: what never comes is caught by the watch, which looks on a timer.

use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, lock};
use slab::Slab;
use std::task::Waker;

/// What a waiter does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The ticket has passed.
    Passed,
    /// The device is lost.
    Failed,
    /// A rumour covers the ticket: ask the device, `advance` if it is true, `deny` if not, and poll again.
    Look,
    /// The waker is kept: see to it that a source is under way (`arm`), then wait.
    Wait,
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
    /// The highest ticket that a rumour spoke of.
    rumour: u64,
    /// Tickets for which a source is under way.
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
            state: Mutex::new(State { waiters: Slab::new(), rumour: 0, armed: Vec::new() }),
        }
    }

    /// The highest ticket known to have passed.
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
        let mut state = lock(&self.state);
        // Asked again under the lock: `advance` and `fail` store first and lock then, so either this sees what they
        // stored, or they see the waiter.
        if self.passed() >= ticket {
            Self::remove(&mut state, place);
            return Progress::Passed;
        }
        if self.failed() {
            Self::remove(&mut state, place);
            return Progress::Failed;
        }
        match place.0 {
            Some(key) => {
                let kept = &mut state.waiters[key];
                match &kept.waker {
                    Some(old) if old.will_wake(waker) => {}
                    _ => kept.waker = Some(waker.clone()),
                }
            }
            None => place.0 = Some(state.waiters.insert(Waiter { ticket, waker: Some(waker.clone()) })),
        }
        if state.rumour >= ticket {
            return Progress::Look;
        }
        Progress::Wait
    }

    /// Notes that a source is under way which will signal `ticket`. False if one was already: then do not start one.
    pub(crate) fn arm(&self, ticket: u64) -> bool {
        let mut state = lock(&self.state);
        let new = !state.armed.contains(&ticket);
        if new {
            state.armed.push(ticket);
        }
        new
    }

    /// The source for `ticket` could not be started.
    pub(crate) fn disarm(&self, ticket: u64) {
        lock(&self.state).armed.retain(|armed| *armed != ticket);
    }

    /// A waiter gives up its place.
    pub(crate) fn leave(&self, place: &mut Place) {
        if place.0.is_some() {
            Self::remove(&mut lock(&self.state), place);
        }
    }

    fn remove(state: &mut State, place: &mut Place) {
        if let Some(key) = place.0.take() {
            state.waiters.try_remove(key);
        }
    }

    /// A rumour: `ticket` may have passed.
    pub(crate) fn signal(&self, ticket: u64) {
        let mut state = lock(&self.state);
        state.armed.retain(|armed| *armed != ticket);
        if ticket <= self.passed() {
            return;
        }
        state.rumour = state.rumour.max(ticket);
        let woken = Self::take(&mut state, ticket);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// The rumour was false: the device has not passed more than `passed()`.
    pub(crate) fn deny(&self) {
        let mut state = lock(&self.state);
        state.rumour = state.rumour.min(self.passed());
    }

    /// The truth: all tickets up to `ticket` have passed.
    pub(crate) fn advance(&self, ticket: u64) {
        if self.passed.fetch_max(ticket, Ordering::AcqRel) >= ticket {
            return;
        }
        let mut state = lock(&self.state);
        let woken = Self::take(&mut state, ticket);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// The device is lost.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
        let mut state = lock(&self.state);
        let woken = Self::take(&mut state, u64::MAX);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// The wakers of all up to `ticket`; they keep their places until they poll or leave.
    fn take(state: &mut State, ticket: u64) -> Vec<Waker> {
        let concerned = state.waiters.iter_mut().filter(|(_, waiter)| waiter.ticket <= ticket);
        concerned.filter_map(|(_, waiter)| waiter.waker.take()).collect()
    }
}
