//! [`Line`]: the tasks that wait for memory of one heap, and [`Hunger`]: whether any task of the device does.
//!
//! ```text
//!   in the line:    join ──> first? ── yes ──> looks ── there is some ──> leave, which wakes the next
//!                     ^        │ no              │ none
//!                     └── woken, by leave or tell ┘
//!   at its side:    watch ──> looks ── none ──> woken, by tell ──> watch ──> ...
//! ```
//!
//! The line is served first come, first served, so that a large request is not overtaken for ever by small ones. Conditions
//! of operators watch from its side: they take nothing until their run begins, and are woken by every change.
//!
//! A task counts as hungry and is registered first, and looks at the heap then. Memory is put back under the heap's lock
//! first, and `tell` looks for hungry tasks then. So either the task sees the memory, or `tell` sees the task. Most memory
//! is freed while no task is hungry: that costs a load.
//!
//! A waker is taken out as it is woken, and registered again by the poll that follows: it is cloned, woken and dropped with
//! no lock held.
//!
//! Knows no device: `tests/loom/memory.rs` includes it as it stands.

use std::{collections::BTreeMap, task::Waker};

use crate::sync::{AtomicUsize, Mutex, Ordering, WakeList, discard, lock};

/// How many tasks wait for memory of a device, at whatever heap.
#[derive(Debug)]
pub(super) struct Hunger(AtomicUsize);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Line(Mutex<State>);

#[derive(Debug)]
struct State {
    /// In the order of arrival. `None` while its task is being woken.
    line: BTreeMap<u64, Option<Waker>>,
    aside: BTreeMap<u64, Option<Waker>>,
    /// The number of the next place, of either kind.
    next: u64,
}

/// A task's place, in the line or at its side, while it has one.
#[derive(Debug, Default)]
pub(super) struct Place(Option<At>);

#[derive(Clone, Copy, Debug)]
enum At {
    Line(u64),
    Side(u64),
}

impl Hunger {
    pub(super) fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    #[inline]
    pub(super) fn is_any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

impl Default for Hunger {
    fn default() -> Self {
        Self::new()
    }
}

impl Line {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { line: BTreeMap::new(), aside: BTreeMap::new(), next: 0 }))
    }

    /// Registers the waker, at the line's end if the task has no place in it. True if the task is the first.
    pub(super) fn join(&self, hunger: &Hunger, place: &mut Place, waker: &Waker) -> bool {
        self.register(hunger, place, waker, |state, number| {
            state.line.insert(number, None);
            At::Line(number)
        })
    }

    /// Registers the waker at the line's side.
    pub(super) fn watch(&self, hunger: &Hunger, place: &mut Place, waker: &Waker) {
        self.register(hunger, place, waker, |state, number| {
            state.aside.insert(number, None);
            At::Side(number)
        });
    }

    fn register(&self, hunger: &Hunger, place: &mut Place, waker: &Waker, enter: fn(&mut State, u64) -> At) -> bool {
        let mut state = lock(&self.0);
        let mut replaced = None;
        if !state.waker_of(place).is_some_and(|known| known.as_ref().is_some_and(|known| known.will_wake(waker))) {
            drop(state);
            let new = waker.clone();
            state = lock(&self.0);
            if place.0.is_none() {
                let number = state.next;
                state.next += 1;
                place.0 = Some(enter(&mut state, number));
                hunger.0.fetch_add(1, Ordering::SeqCst);
            }
            replaced = state.waker_of(place).and_then(|known| known.replace(new));
        }
        let front = state.line.first_key_value().map(|(front, _)| *front);
        let first = matches!((front, place.0), (Some(front), Some(At::Line(own))) if front == own);
        drop(state);
        replaced.into_iter().for_each(discard);
        first
    }

    /// Gives the place up. True if it was one in the line: then the caller wakes the next.
    #[must_use]
    pub(super) fn leave(&self, hunger: &Hunger, place: &mut Place) -> bool {
        let Some(at) = place.0.take() else { return false };
        let mut state = lock(&self.0);
        let left = match at {
            At::Line(number) => state.line.remove(&number),
            At::Side(number) => state.aside.remove(&number),
        };
        drop(state);
        hunger.0.fetch_sub(1, Ordering::SeqCst);
        left.flatten().into_iter().for_each(discard);
        matches!(at, At::Line(_))
    }

    /// The first of the line, and all at its side, to be woken.
    pub(super) fn first(&self) -> WakeList {
        let mut state = lock(&self.0);
        let State { line, aside, .. } = &mut *state;
        let first = line.values_mut().next().and_then(Option::take);
        let woken: WakeList = first.into_iter().chain(aside.values_mut().filter_map(Option::take)).collect();
        drop(state);
        woken
    }

    /// Wakes all of the line, and all at its side: what they wait for will not come, whether or not they are the first.
    pub(super) fn wake_all(&self) {
        let mut state = lock(&self.0);
        let State { line, aside, .. } = &mut *state;
        let woken: WakeList = line.values_mut().chain(aside.values_mut()).filter_map(Option::take).collect();
        drop(state);
        woken.wake();
    }

    /// True if a task stands in the line or at its side.
    pub(super) fn has_waiters(&self) -> bool {
        let state = lock(&self.0);
        !(state.line.is_empty() && state.aside.is_empty())
    }

    /// True if no task stands in the line: then those at its side may take some.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).line.is_empty()
    }
}

impl State {
    fn waker_of(&mut self, place: &Place) -> Option<&mut Option<Waker>> {
        match place.0? {
            At::Line(number) => self.line.get_mut(&number),
            At::Side(number) => self.aside.get_mut(&number),
        }
    }
}
