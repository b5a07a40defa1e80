//! Model check of `condition/watch.rs`: handles that set a watch value and observers of it.

#[allow(dead_code)]
#[path = "../../src/condition/watch.rs"]
mod watch;

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Poll, Wake, Waker},
};

use self::watch::{Observed, WatchReader, WatchValue, WatchWriter};
use crate::sync::model;
use loom::{future::block_on, thread};

impl WatchValue for u32 {
    fn is_awaited(self) -> bool {
        self != NOT_AWAITED
    }
}

/// The value that observers do not await a change of.
const NOT_AWAITED: u32 = 9;

/// Counts wakes. Used by one thread only.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until `wanted` accepts the observed state. A lost wake-up is a deadlock, which loom reports.
fn wait_until(reader: &mut WatchReader<u32>, wanted: impl Fn(Observed<u32>) -> bool) -> Observed<u32> {
    block_on(poll_fn(|cx| {
        let seen = reader.poll(cx.waker());
        if wanted(seen) { Poll::Ready(seen) } else { Poll::Pending }
    }))
}

#[test]
fn a_change_while_an_observer_registers_is_seen() {
    model(3, || {
        let watch = WatchWriter::new(0);
        let mut reader = watch.reader();
        let sets = thread::spawn(move || {
            watch.set(|value| value + 1);
            watch.set(|value| value + 1);
        });
        assert_eq!(wait_until(&mut reader, |seen| seen.value == 2).value, 2);
        sets.join().unwrap();
    });
}

#[test]
fn dropping_the_last_handle_wakes_the_observers() {
    model(3, || {
        let watch = WatchWriter::new(0);
        let mut reader = watch.reader();
        let other = watch.clone();
        let drops = thread::spawn(move || drop(other));
        drop(watch);
        assert_eq!(wait_until(&mut reader, |seen| !seen.may_change), Observed { value: 0, may_change: false });
        drops.join().unwrap();
    });
}

/// Creating or dropping a handle wakes observers only while the value is awaited.
#[test]
fn a_new_handle_is_seen_by_a_waiting_observer() {
    model(3, || {
        let watch = WatchWriter::new(0);
        let reader = watch.reader();
        let mut waits = watch.reader();
        drop(watch);
        let recreated = thread::spawn(move || reader.writer());
        assert_eq!(wait_until(&mut waits, |seen| seen.may_change), Observed { value: 0, may_change: true });
        // The observer does not await this value, so a short-lived handle must not wake it.
        recreated.join().unwrap().set(|_| NOT_AWAITED);
        let woken = Arc::new(Woken::default());
        waits.poll(&Waker::from(woken.clone()));
        drop(waits.writer());
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
    });
}

/// The slot of a woken observer is free. Another observer may occupy it before the first is dropped.
#[test]
fn a_dropped_observer_does_not_free_the_slot_of_another() {
    model(3, || {
        let watch = WatchWriter::new(0);
        let (mut dropped, mut waiting) = (watch.reader(), watch.reader());
        dropped.poll(futures::task::noop_waker_ref());
        let waits = thread::spawn(move || wait_until(&mut waiting, |seen| seen.value == 2));
        watch.set(|_| 1);
        drop(dropped);
        watch.set(|_| 2);
        assert_eq!(waits.join().unwrap().value, 2);
    });
}

#[test]
fn exactly_one_of_two_observers_claims_the_last_run() {
    model(3, || {
        let watch = WatchWriter::new(1);
        let claims = |mut reader: WatchReader<u32>| {
            move || {
                let claimed = reader.change(|left| left.checked_sub(1), |left| left == 0).is_some();
                wait_until(&mut reader, |seen| seen.value == 0);
                claimed
            }
        };
        let other = thread::spawn(claims(watch.reader()));
        let first = claims(watch.reader())();
        assert!(first != other.join().unwrap(), "claimed by both or by neither");
    });
}

/// A task that moves to another executor has a new waker. The watch must use the last one.
#[test]
fn the_waker_of_the_last_poll_is_woken() {
    model(3, || {
        let watch = WatchWriter::new(0);
        let mut reader = watch.reader();
        reader.poll(futures::task::noop_waker_ref());
        let sets = thread::spawn(move || {
            watch.set(|_| 1);
            watch.set(|_| 2);
        });
        reader.poll(futures::task::noop_waker_ref());
        wait_until(&mut reader, |seen| seen.value == 2);
        sets.join().unwrap();
    });
}
