//! Tests of the guarantees between locks and wakes.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Wake, Waker},
};

use super::{wakes::MAX_DEPTH, *};

struct Panics(Arc<AtomicUsize>);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("from a waker");
    }
}

fn panicking(count: &Arc<AtomicUsize>) -> Waker {
    Arc::new(Panics(count.clone())).into()
}

#[test]
fn all_wakers_are_woken_even_if_each_panics() {
    let count = Arc::new(AtomicUsize::new(0));
    let list: WakeList = (0..6).map(|_| panicking(&count)).collect();
    list.wake();
    assert_eq!(count.load(Ordering::Relaxed), 6);
    assert_eq!(Arc::strong_count(&count), 1);
}

#[test]
fn wakes_and_drops_within_a_scope_run_at_its_end() {
    struct Says(Arc<AtomicUsize>);
    impl Drop for Says {
        fn drop(&mut self) {
            assert_unlocked();
            self.0.fetch_add(10, Ordering::Relaxed);
        }
    }
    let (count, mutex) = (Arc::new(AtomicUsize::new(0)), Mutex::new(()));
    {
        let _outer = Deferred::new();
        let held = lock(&mutex);
        {
            let _inner = Deferred::new();
            wake(panicking(&count));
            wake_shared(&Arc::new(panicking(&count)));
            discard(Says(count.clone()));
        }
        assert_eq!(count.load(Ordering::Relaxed), 0);
        drop(held);
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }
    assert_eq!(count.load(Ordering::Relaxed), 12);
}

#[test]
fn a_scope_works_in_a_destructor_at_the_threads_end() {
    struct AtTheEnd(Arc<AtomicUsize>);
    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            let _later = Deferred::new();
            let mutex = Mutex::new(());
            let _held = lock(&mutex);
            wake(panicking(&self.0));
        }
    }
    thread_local!(static KEPT: std::cell::RefCell<Option<AtTheEnd>> = const { std::cell::RefCell::new(None) });
    let count = Arc::new(AtomicUsize::new(0));
    let kept = AtTheEnd(count.clone());
    std::thread::spawn(move || KEPT.set(Some(kept))).join().unwrap();
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

#[test]
#[cfg(debug_assertions)]
fn lock_order_and_calls_under_a_lock_are_asserted() {
    let refused = |act: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).is_err();
    let (outer, inner, leaf) = (Mutex::at(Level::UseLock, 1), Mutex::at(Level::StreamOrder, 2), Mutex::new(3));
    let same = Mutex::at(Level::StreamOrder, 4);
    assert!(!refused(&|| _ = (lock(&outer), lock(&inner), lock(&leaf))));
    assert!(refused(&|| _ = (lock(&inner), lock(&outer))));
    assert!(refused(&|| _ = (lock(&inner), lock(&same))));
    assert!(refused(&|| _ = (lock(&leaf), lock(&outer))));
    assert!(refused(&|| _ = (lock(&outer), wake(Waker::noop().clone()))));
    assert!(refused(&|| _ = (lock(&outer), WakeList::new().wake())));
    assert!(refused(&|| _ = (lock(&outer), discard(String::from("a user's")))));
    // None of them leaves an entry behind.
    assert_unlocked();
}

fn depth() -> usize {
    Chain::Drops.depth()
}

fn chain(left: usize, calls: Arc<AtomicUsize>) {
    calls.fetch_add(1, Ordering::Relaxed);
    if left > 0 {
        limit_depth(Chain::Drops, move || chain(left - 1, calls));
    }
}

#[test]
fn a_long_chain_ends_before_the_first_call_returns() {
    for left in [0, 1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 1_000_000] {
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
            limit_depth(Chain::Drops, move || chain(left - 1, panics, calls));
        }
        assert!(!panics(left), "on purpose");
    }
    const CALLS: usize = MAX_DEPTH + 20;
    // The last call panics; all queued calls; the call that queues the first one; a call before that.
    let panics: [fn(usize) -> bool; 4] =
        [|left| left == 0, |left| left < CALLS - MAX_DEPTH, |left| left == CALLS - MAX_DEPTH, |left| left == CALLS - 2];
    for (case, panics) in panics.into_iter().enumerate() {
        let calls = Arc::default();
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| chain(CALLS, panics, Arc::clone(&calls))));
        assert_eq!(outcome.is_err(), case > 1, "case {case}");
        assert_eq!((calls.load(Ordering::Relaxed), depth()), (CALLS + 1, 0), "case {case}");
    }
}
