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

/// Wakes the next one, notes whether that was woken at once, and panics.
struct WakesTheNext {
    next: Option<Arc<Waker>>,
    how: fn(&Arc<Waker>),
    woken: Arc<AtomicUsize>,
    nested: Arc<AtomicUsize>,
}

impl Wake for WakesTheNext {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let before = self.woken.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(next) = &self.next {
            (self.how)(next);
            let at_once = self.woken.load(Ordering::Relaxed) > before;
            self.nested.fetch_add(usize::from(at_once), Ordering::Relaxed);
        }
        panic!("from a waker");
    }
}

#[test]
fn wakes_within_wakes_are_made_at_once_up_to_a_depth_and_all_of_them_before_the_first_returns() {
    let ways: [fn(&Arc<Waker>); 4] = [
        |next| wake(Waker::clone(next)),
        wake_shared,
        |next| WakeList::from_iter([Waker::clone(next)]).wake(),
        |next| {
            let _later = Deferred::new();
            wake(Waker::clone(next));
        },
    ];
    for (way, how) in ways.into_iter().enumerate() {
        for (chain, at_once) in [(1, 0), (2, 1), (8, 7), (9, 7), (1000, 7)] {
            let (woken, nested) = (Arc::default(), Arc::default());
            let next = |next| {
                Some(Arc::new(Waker::from(Arc::new(WakesTheNext {
                    next,
                    how,
                    woken: Arc::clone(&woken),
                    nested: Arc::clone(&nested),
                }))))
            };
            let first = (0..chain).fold(None, |then, _| next(then)).unwrap();
            how(&first);
            let counts = (woken.load(Ordering::Relaxed), nested.load(Ordering::Relaxed));
            assert_eq!(counts, (chain, at_once), "way {way}, {chain}");
            // The depth is as before, though each has panicked.
            drop(first);
            assert_eq!(Arc::strong_count(&woken), 1, "way {way}, {chain}");
        }
    }
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
