//! The completion protocol: which waiter waits for which ticket, which one polls the device, and which are woken.
//!
//! A stream numbers its operations with tickets: 1, 2, 3, ... A waiter waits until the stream has passed its ticket.
//! Operations complete in order, so only the waiter with the lowest ticket, the **front**, arranges for the device to
//! be polled; the others are woken in turn through it. This file does not use the device, so that a model checker can
//! try every interleaving on a CPU (`tests/loom/completion.rs` includes it unchanged).
//!
//! The protocol has three inputs, from any thread:
//!
//! ```text
//!   wake(n)      a hint: a host callback or an alarm reports that n may have passed. Wakes all waiters up to n, which
//!                query the device themselves.
//!   advance(n)   confirmed: the device reported that n has passed. Resolves all waiters up to n, wakes the next front.
//!   fail()       the device is lost. Every pending waiter fails.
//!
//!   a waiter:   poll -> Wait, not front ────────────────────── woken ──> poll -> ...
//!               poll -> Wait, front -> query the device -> a source -> woken ──> poll -> ... -> Passed | Failed
//! ```
//!
//! Guarantees: a waiter that got `Wait` is woken by the first later `wake`, `advance` or `fail` that concerns it. As
//! long as there are waiters, one of them knows that it is the front or is being woken to find out. A waiter that is
//! dropped is removed; if it was the front, the next waiter is woken. A false hint costs a query; a hint that comes
//! twice or never does no harm, since the completion monitor polls the stream on a timer.

use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, WakeList, assert_may_wake, discard, lock};
use std::{collections::BTreeMap, task::Waker};

/// What a waiter does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Passed,
    Failed,
    /// The waker is stored. The front queries the device: if the ticket has passed, it calls `advance` and polls again;
    /// if not, it arranges for a source of notification.
    Wait {
        /// True if no waiter has a lower ticket.
        front: bool,
    },
}

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
    /// Tickets with a callback pending, in ascending order.
    armed: Vec<u64>,
}

/// The waiters, in the order of their tickets. The cost of one does not grow with the number of others; the lowest,
/// mostly the only one, is stored separately.
#[derive(Debug)]
struct Waiters {
    lowest: Option<(WaiterKey, WaiterEntry)>,
    /// All waiters above the lowest; empty if there is no lowest.
    others: BTreeMap<WaiterKey, WaiterEntry>,
    next: u64,
}

/// The ticket, and a number unique among the waiters.
type WaiterKey = (u64, u64);

/// A waiter's waker. Taken when it is woken.
type WaiterEntry = Option<Waker>;

/// A waiter's key in the list, while it is registered.
#[derive(Debug, Default)]
pub(crate) struct WaiterSlot(Option<WaiterKey>);

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

    pub(crate) fn has_waiters(&self) -> bool {
        !lock(&self.state).waiters.is_empty()
    }

    /// Polls for `ticket`. If the ticket has neither passed nor failed, `waker` is stored under `slot` until `leave`.
    pub(crate) fn poll(&self, slot: &mut WaiterSlot, ticket: u64, waker: &Waker) -> Progress {
        if self.passed() >= ticket {
            self.leave(slot).wake();
            return Progress::Passed;
        }
        // Cloning runs user code, so it is done without the lock: before the first check, or when the stored waker
        // differs.
        let mut new = slot.0.is_none().then(|| waker.clone());
        loop {
            let mut state = lock(&self.state);
            // Checked again under the lock: `advance` and `fail` store first and lock afterwards, so either this sees
            // what they stored, or they see the waiter.
            let passed = self.passed();
            if passed >= ticket || self.failed() {
                let gone = Self::remove(&mut state, slot);
                drop(state);
                discard(gone.and_then(|(_, kept)| kept));
                discard(new);
                return if passed >= ticket { Progress::Passed } else { Progress::Failed };
            }
            let old = match slot.0.and_then(|key| state.waiters.get_mut(key)) {
                Some(Some(kept)) if kept.will_wake(waker) => new,
                Some(_) if new.is_none() => {
                    drop(state);
                    new = Some(waker.clone());
                    continue;
                }
                Some(kept) => std::mem::replace(kept, new),
                None => {
                    slot.0 = Some(state.waiters.insert(ticket, new));
                    None
                }
            };
            let front = state.waiters.front(passed).is_none_or(|(front, _)| front >= ticket);
            drop(state);
            discard(old);
            return Progress::Wait { front };
        }
    }

    /// Notes that a callback for `ticket` is pending. False if one already is: the caller must not start another.
    pub(crate) fn arm(&self, ticket: u64) -> bool {
        let mut state = lock(&self.state);
        let at = state.armed.binary_search(&ticket);
        if let Err(at) = at {
            state.armed.insert(at, ticket);
        }
        at.is_err()
    }

    pub(crate) fn disarm(&self, ticket: u64) {
        lock(&self.state).disarm(ticket);
    }

    /// Deregisters a waiter. The returned list is to be woken in its slot.
    pub(crate) fn leave(&self, slot: &mut WaiterSlot) -> WakeList {
        if slot.0.is_none() {
            return WakeList::new();
        }
        let mut state = lock(&self.state);
        let left = Self::remove(&mut state, slot);
        let passed = self.passed();
        let woken = match &left {
            // The waiter was the front, and its ticket has not passed.
            Some(((ticket, _), _)) if *ticket > passed => state.waiters.wake_front_from(*ticket, passed),
            _ => None,
        };
        drop(state);
        discard(left.and_then(|(_, kept)| kept));
        woken.into_iter().collect()
    }

    fn remove(state: &mut State, slot: &mut WaiterSlot) -> Option<(WaiterKey, WaiterEntry)> {
        let key = slot.0.take()?;
        state.waiters.remove(key).map(|kept| (key, kept))
    }

    /// A hint: `ticket` may have passed.
    pub(crate) fn wake(&self, ticket: u64) {
        let mut state = lock(&self.state);
        state.disarm(ticket);
        let woken = state.waiters.take(ticket);
        drop(state);
        woken.wake();
    }

    /// Confirmed: all tickets up to `ticket` have passed. False if this was known already.
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

    fn insert(&mut self, ticket: u64, kept: WaiterEntry) -> WaiterKey {
        let key = (ticket, self.next);
        self.next += 1;
        if self.lowest.is_none() {
            self.lowest = Some((key, kept));
        } else {
            self.insert_beside(key, kept);
        }
        key
    }

    // A lone waiter reaches none of the `cold` functions: inlined, they would lengthen its path.
    #[cold]
    #[inline(never)]
    fn insert_beside(&mut self, key: WaiterKey, kept: WaiterEntry) {
        let above = match &mut self.lowest {
            Some(lowest) if key < lowest.0 => std::mem::replace(lowest, (key, kept)),
            _ => (key, kept),
        };
        self.others.insert(above.0, above.1);
    }

    #[inline]
    fn get_mut(&mut self, key: WaiterKey) -> Option<&mut WaiterEntry> {
        match &mut self.lowest {
            Some(lowest) if lowest.0 == key => Some(&mut lowest.1),
            _ => Self::other(&mut self.others, key),
        }
    }

    #[cold]
    #[inline(never)]
    fn other(others: &mut BTreeMap<WaiterKey, WaiterEntry>, key: WaiterKey) -> Option<&mut WaiterEntry> {
        others.get_mut(&key)
    }

    #[inline]
    fn remove(&mut self, key: WaiterKey) -> Option<WaiterEntry> {
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
    fn remove_other(&mut self, key: WaiterKey) -> Option<WaiterEntry> {
        self.others.remove(&key)
    }

    /// The lowest waiter whose ticket has not passed.
    #[inline]
    fn front(&mut self, passed: u64) -> Option<(u64, &mut WaiterEntry)> {
        match &mut self.lowest {
            Some(lowest) if lowest.0.0 > passed => Some((lowest.0.0, &mut lowest.1)),
            Some(_) => Self::front_of(&mut self.others, passed),
            None => None,
        }
    }

    #[cold]
    #[inline(never)]
    fn front_of(others: &mut BTreeMap<WaiterKey, WaiterEntry>, passed: u64) -> Option<(u64, &mut WaiterEntry)> {
        others.range_mut((passed.checked_add(1)?, 0)..).next().map(|(key, kept)| (key.0, kept))
    }

    /// The front's waker, if the front is at or above `ticket`.
    fn wake_front_from(&mut self, ticket: u64, passed: u64) -> Option<Waker> {
        let (front, kept) = self.front(passed)?;
        if front >= ticket { kept.take() } else { None }
    }

    /// Takes the wakers of all waiters up to `ticket`; these stay registered until they poll or leave.
    fn take(&mut self, ticket: u64) -> WakeList {
        let Some(lowest) = self.lowest.as_mut().filter(|lowest| lowest.0.0 <= ticket) else { return WakeList::new() };
        let mut woken: WakeList = lowest.1.take().into_iter().collect();
        if !self.others.is_empty() {
            woken.extend(self.others.range_mut(..=(ticket, u64::MAX)).filter_map(|(_, kept)| kept.take()));
        }
        woken
    }
}
