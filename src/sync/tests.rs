//! What locks and wakes promise to each other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Wake, Waker},
};

use super::*;

/// Counts its wakes, and panics at each.
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
fn all_are_woken_though_each_panics() {
    let count = Arc::new(AtomicUsize::new(0));
    let list: WakeList = (0..6).map(|_| panicking(&count)).collect();
    list.wake();
    assert_eq!(count.load(Ordering::Relaxed), 6);
    assert_eq!(Arc::strong_count(&count), 1);
}

#[test]
fn what_is_woken_and_dropped_within_a_scope_waits_for_its_end() {
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
fn the_order_of_locks_and_what_runs_under_them_is_asserted() {
    let refused = |act: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).is_err();
    let (outer, inner, leaf) = (Mutex::at(Level::Turn, 1), Mutex::at(Level::StreamOrder, 2), Mutex::new(3));
    let same = Mutex::at(Level::StreamOrder, 4);
    assert!(!refused(&|| _ = (lock(&outer), lock(&inner), lock(&leaf))));
    assert!(refused(&|| _ = (lock(&inner), lock(&outer))));
    assert!(refused(&|| _ = (lock(&inner), lock(&same))));
    assert!(refused(&|| _ = (lock(&leaf), lock(&outer))));
    assert!(refused(&|| _ = (lock(&outer), wake(Waker::noop().clone()))));
    assert!(refused(&|| _ = (lock(&outer), WakeList::new().wake())));
    assert!(refused(&|| _ = (lock(&outer), discard(String::from("a user's")))));
    // Nothing is left behind of any of them.
    assert_unlocked();
}
