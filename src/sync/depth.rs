//! [`limit_depth`]: chains of destructors and listeners of any length, on a stack of any size; [`Nested`]: a value with a
//! destructor that may be a part of one.
//!
//! Some calls lead to the next of their kind: an envelope that comes home lets the hub move a message, whose old envelope comes
//! home to the hub before; an error drops its cause, which is an error with a cause; a wait that is given up wakes the next one,
//! whose waker gives that up. The user decides how long such a chain is.
//!
//! ```text
//!   limit_depth ──> fewer than DEEPEST of this chain on this thread's stack? ── yes ──> called now
//!                                   └── no ──> queued ──> the deepest call has returned: called in a loop
//! ```
//!
//! A chain that is shorter than [`DEEPEST`] runs as if this was not there. The [kinds](Chain) of chains are counted apart: a
//! user's destructor may wait for a task that waits for an envelope, so the listener of that is not queued until the destructor
//! has returned.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{discard, discard_all, log};
use crate::error::said;

/// A few KiB of stack in a debug build.
const DEEPEST: usize = 8;

/// What a call leads to: others of its own kind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chain {
    /// The user's destructors.
    Destructors,
    /// Listeners of pools, which wake tasks and move messages from hub to hub.
    Listeners,
    /// Wakes that a future's destructor makes, of the waiter behind it: the waker may drop that one's future.
    Wakes,
}

/// One chain of a thread.
struct Calls {
    /// Those on its stack.
    depth: Cell<usize>,
    /// Those that wait for the deepest of them to return. Without a destructor, so that it is there for destructors that run
    /// at the thread's end; the deepest call leaves it empty.
    queued: RefCell<ManuallyDrop<Vec<Queued>>>,
}

impl Calls {
    const fn new() -> Self {
        Self { depth: Cell::new(0), queued: RefCell::new(ManuallyDrop::new(Vec::new())) }
    }
}

thread_local! {
    static DESTRUCTORS: Calls = const { Calls::new() };
    static LISTENERS: Calls = const { Calls::new() };
    static WAKES: Calls = const { Calls::new() };
}

type Queued = Box<dyn FnOnce()>;

/// One of the calls on the stack.
struct Entered(Chain);

impl Chain {
    #[inline]
    fn with<R>(self, with: impl FnOnce(&Calls) -> R) -> R {
        match self {
            Self::Destructors => DESTRUCTORS.with(with),
            Self::Listeners => LISTENERS.with(with),
            Self::Wakes => WAKES.with(with),
        }
    }
}

/// Makes a call that may lead to another one like it. A panic of it is the caller's; that of a queued one is logged.
#[inline]
pub(crate) fn limit_depth(chain: Chain, call: impl FnOnce() + 'static) {
    let depth = chain.with(|calls| calls.depth.get());
    if depth == DEEPEST {
        return queue(chain, Box::new(call));
    }
    chain.with(|calls| calls.depth.set(depth + 1));
    let _entered = Entered(chain);
    call();
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        let depth = self.0.with(|calls| calls.depth.get());
        if depth == DEEPEST {
            call_queued(self.0);
        }
        self.0.with(|calls| calls.depth.set(depth - 1));
    }
}

#[cold]
fn queue(chain: Chain, call: Queued) {
    chain.with(|calls| calls.queued.borrow_mut().push(call));
}

#[cold]
fn call_queued(chain: Chain) {
    loop {
        let queued = chain.with(|calls| std::mem::take(&mut **calls.queued.borrow_mut()));
        if queued.is_empty() {
            return;
        }
        for call in queued {
            // The calls behind it are made, and this may be the drop of a value as a panic unwinds.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
                let panic = said(panic);
                log(move || tracing::error!(panic, "a call at the end of a long chain of them panicked"));
            }
        }
    }
}

/// Drops what a reader has left in a queue, one by one, as several may have a destructor that panics. A message may hold the
/// reader of another queue.
pub(crate) fn discard_left<T: 'static>(left: VecDeque<T>) {
    if !left.is_empty() {
        limit_depth(Chain::Destructors, move || discard_all(left));
    }
}

/// A value of the user's that may hold others of its kind, to any depth. It is [discarded](discard) wherever its last owner
/// drops it.
pub(crate) struct Nested<T: 'static>(Option<T>);

impl<T: 'static> Nested<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// `None` never comes: only the destructor takes the value out.
    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }
}

impl<T: 'static> Drop for Nested<T> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<T>() {
            let value = self.0.take();
            limit_depth(Chain::Destructors, move || discard(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    fn depth() -> usize {
        Chain::Destructors.with(|calls| calls.depth.get())
    }

    fn chain(left: usize, calls: Arc<AtomicUsize>) {
        calls.fetch_add(1, Ordering::Relaxed);
        if left > 0 {
            limit_depth(Chain::Destructors, move || chain(left - 1, calls));
        }
    }

    #[test]
    fn a_long_chain_is_over_when_the_first_call_returns() {
        for left in [0, 1, DEEPEST - 1, DEEPEST, DEEPEST + 1, 1_000_000] {
            let calls = Arc::default();
            chain(left, Arc::clone(&calls));
            assert_eq!(calls.load(Ordering::Relaxed), left + 1);
            assert_eq!((depth(), Arc::strong_count(&calls)), (0, 1));
        }
    }

    #[test]
    fn a_panic_stops_no_other_call() {
        fn chain(left: usize, panics: fn(usize) -> bool, calls: Arc<AtomicUsize>) {
            calls.fetch_add(1, Ordering::Relaxed);
            if left > 0 {
                let calls = calls.clone();
                limit_depth(Chain::Destructors, move || chain(left - 1, panics, calls));
            }
            assert!(!panics(left), "on purpose");
        }
        const CALLS: usize = DEEPEST + 20;
        // One at the end, all that are queued, the one that queues the first, one before it.
        let panics: [fn(usize) -> bool; 4] =
            [|left| left == 0, |left| left < CALLS - DEEPEST, |left| left == CALLS - DEEPEST, |left| left == CALLS - 2];
        for (case, panics) in panics.into_iter().enumerate() {
            let calls = Arc::default();
            let outcome = catch_unwind(AssertUnwindSafe(|| chain(CALLS, panics, Arc::clone(&calls))));
            assert_eq!(outcome.is_err(), case > 1, "case {case}");
            assert_eq!((calls.load(Ordering::Relaxed), depth()), (CALLS + 1, 0), "case {case}");
        }
    }
}
