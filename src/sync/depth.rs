//! [`limit_depth`]: chains of destructors and listeners of any length, on a stack of any size.
//!
//! Some calls lead to the next of their kind: an envelope that comes home lets the hub move a message, whose old envelope comes
//! home to the hub before; an error drops its cause, which is an error with a cause. The user decides how long such a chain is.
//!
//! ```text
//!   limit_depth ──> fewer than DEEPEST on this thread's stack? ── yes ──> called now
//!                                   └── no ──> queued ──> the deepest call has returned: called in a loop
//! ```
//!
//! A chain that is shorter than [`DEEPEST`] runs as if this was not there.

use std::{
    cell::{Cell, RefCell},
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::log;
use crate::error::said;

/// A few KiB of stack in a debug build.
const DEEPEST: usize = 8;

thread_local! {
    /// Calls on this thread's stack.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Calls that wait for the deepest of those to return. Without a destructor, so that it is there for destructors that run
    /// at the thread's end; the deepest call leaves it empty.
    static QUEUED: RefCell<ManuallyDrop<Vec<Queued>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

type Queued = Box<dyn FnOnce()>;

/// One of the calls on the stack.
struct Entered;

/// Makes a call that may lead to another one like it. A panic of it is the caller's; that of a queued one is logged.
#[inline]
pub(crate) fn limit_depth(call: impl FnOnce() + 'static) {
    let depth = DEPTH.get();
    if depth == DEEPEST {
        return queue(Box::new(call));
    }
    DEPTH.set(depth + 1);
    let _entered = Entered;
    call();
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        let depth = DEPTH.get();
        if depth == DEEPEST {
            call_queued();
        }
        DEPTH.set(depth - 1);
    }
}

#[cold]
fn queue(call: Queued) {
    QUEUED.with_borrow_mut(|queued| queued.push(call));
}

#[cold]
fn call_queued() {
    loop {
        let queued = QUEUED.with_borrow_mut(|queued| std::mem::take(&mut **queued));
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

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    fn chain(left: usize, calls: Arc<AtomicUsize>) {
        calls.fetch_add(1, Ordering::Relaxed);
        if left > 0 {
            limit_depth(move || chain(left - 1, calls));
        }
    }

    #[test]
    fn a_long_chain_is_over_when_the_first_call_returns() {
        for left in [0, 1, DEEPEST - 1, DEEPEST, DEEPEST + 1, 1_000_000] {
            let calls = Arc::default();
            chain(left, Arc::clone(&calls));
            assert_eq!(calls.load(Ordering::Relaxed), left + 1);
            assert_eq!((DEPTH.get(), Arc::strong_count(&calls)), (0, 1));
        }
    }

    #[test]
    fn a_panic_stops_no_other_call() {
        fn chain(left: usize, panics: fn(usize) -> bool, calls: Arc<AtomicUsize>) {
            calls.fetch_add(1, Ordering::Relaxed);
            if left > 0 {
                let calls = calls.clone();
                limit_depth(move || chain(left - 1, panics, calls));
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
            assert_eq!((calls.load(Ordering::Relaxed), DEPTH.get()), (CALLS + 1, 0), "case {case}");
        }
    }
}
