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

use self::watch::{Seen, Watch, WatchReader, WatchValue};
use crate::sync::model;
use loom::{future::block_on, thread};

impl WatchValue for u32 {
    fn is_awaited(self) -> bool {
        self != GOES_ON
    }
}

/// The value with which observers no longer wait for a change.
const GOES_ON: u32 = 9;

/// Counts wakes. Used by one thread only.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until the observed value is as `wanted`. A lost wakeup is a deadlock, which loom reports.
fn wait_until(reader: &mut WatchReader<u32>, wanted: impl Fn(Seen<u32>) -> bool) -> Seen<u32> {
    block_on(poll_fn(|cx| {
        let seen = reader.poll(cx.waker());
        if wanted(seen) { Poll::Ready(seen) } else { Poll::Pending }
    }))
}

#[test]
fn a_change_while_an_observer_registers_is_seen() {
    model(3, || {
        let told = Watch::new(0);
        let mut reader = told.reader();
        let sets = thread::spawn(move || {
            told.set(|value| value + 1);
            told.set(|value| value + 1);
        });
        assert_eq!(wait_until(&mut reader, |seen| seen.value == 2).value, 2);
        sets.join().unwrap();
    });
}

#[test]
fn dropping_the_last_handle_wakes_the_observers() {
    model(3, || {
        let told = Watch::new(0);
        let mut reader = told.reader();
        let other = told.clone();
        let drops = thread::spawn(move || drop(other));
        drop(told);
        assert_eq!(wait_until(&mut reader, |seen| !seen.may_change), Seen { value: 0, may_change: false });
        drops.join().unwrap();
    });
}

/// A handle that is created or dropped is a change only if observers wait, and then none misses it.
#[test]
fn a_new_handle_is_seen_by_a_waiting_observer() {
    model(3, || {
        let told = Watch::new(0);
        let reader = told.reader();
        let mut waits = told.reader();
        drop(told);
        let again = thread::spawn(move || reader.writer());
        assert_eq!(wait_until(&mut waits, |seen| seen.may_change), Seen { value: 0, may_change: true });
        // This value lets the observer proceed: it is woken by the value, and not by the handles.
        again.join().unwrap().set(|_| GOES_ON);
        let woken = Arc::new(Woken::default());
        waits.poll(&Waker::from(woken.clone()));
        drop(waits.writer());
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
    });
}

/// The slot of a woken observer is free: another may have it by the time that the first is dropped.
#[test]
fn a_dropped_observer_does_not_free_the_slot_of_another() {
    model(3, || {
        let told = Watch::new(0);
        let (mut goes, mut stays) = (told.reader(), told.reader());
        goes.poll(futures::task::noop_waker_ref());
        let waits = thread::spawn(move || wait_until(&mut stays, |seen| seen.value == 2));
        told.set(|_| 1);
        drop(goes);
        told.set(|_| 2);
        assert_eq!(waits.join().unwrap().value, 2);
    });
}

/// Two observers share a count of one: one of them claims it, and the other is woken to see that none is left.
#[test]
fn one_of_two_claims_the_last_run() {
    model(3, || {
        let told = Watch::new(1);
        let claims = |mut reader: WatchReader<u32>| {
            move || {
                let claimed = reader.change(|left| left.checked_sub(1), |left| left == 0).is_some();
                wait_until(&mut reader, |seen| seen.value == 0);
                claimed
            }
        };
        let other = thread::spawn(claims(told.reader()));
        let first = claims(told.reader())();
        assert!(first != other.join().unwrap(), "claimed by both or by neither");
    });
}

/// A task that another executor polls meanwhile has another waker: the last one is used.
#[test]
fn the_waker_of_the_last_poll_is_woken() {
    model(3, || {
        let told = Watch::new(0);
        let mut reader = told.reader();
        reader.poll(futures::task::noop_waker_ref());
        let sets = thread::spawn(move || {
            told.set(|_| 1);
            told.set(|_| 2);
        });
        reader.poll(futures::task::noop_waker_ref());
        wait_until(&mut reader, |seen| seen.value == 2);
        sets.join().unwrap();
    });
}
