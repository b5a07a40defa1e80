//! Model check of `condition/told.rs`: every interleaving of handles that set a watch value and observers of it. The file is
//! included as it stands, with loom's primitives.

#[allow(dead_code)]
#[path = "../../src/condition/told.rs"]
mod told;

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Poll, Wake, Waker},
};

use self::told::{Heard, Seen, Told, Value};
use crate::sync::model;
use loom::{future::block_on, thread};

impl Value for u32 {
    fn is_awaited(self) -> bool {
        self != GOES_ON
    }
}

/// Its observers wait for no change.
const GOES_ON: u32 = 9;

/// How often it was woken. Where it is used there is one thread.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until what is seen is as `wanted`. A wake that is lost is a deadlock, which loom reports.
fn wait_until(heard: &mut Heard<u32>, wanted: impl Fn(Seen<u32>) -> bool) -> Seen<u32> {
    block_on(poll_fn(|cx| {
        let seen = heard.poll(cx.waker());
        if wanted(seen) { Poll::Ready(seen) } else { Poll::Pending }
    }))
}

#[test]
fn a_change_while_an_observer_registers_is_seen() {
    model(3, || {
        let told = Told::new(0);
        let mut heard = told.heard();
        let sets = thread::spawn(move || {
            told.set(|value| value + 1);
            told.set(|value| value + 1);
        });
        assert_eq!(wait_until(&mut heard, |seen| seen.value == 2).value, 2);
        sets.join().unwrap();
    });
}

#[test]
fn the_last_handle_wakes_its_observers_as_it_goes() {
    model(3, || {
        let told = Told::new(0);
        let mut heard = told.heard();
        let other = told.clone();
        let drops = thread::spawn(move || drop(other));
        drop(told);
        assert_eq!(wait_until(&mut heard, |seen| !seen.may_change), Seen { value: 0, may_change: false });
        drops.join().unwrap();
    });
}

/// A handle that comes and goes is news only where observers wait, and then none of it is missed.
#[test]
fn a_handle_again_is_seen_by_an_observer_that_waits() {
    model(3, || {
        let told = Told::new(0);
        let heard = told.heard();
        let mut waits = told.heard();
        drop(told);
        let again = thread::spawn(move || heard.teller());
        assert_eq!(wait_until(&mut waits, |seen| seen.may_change), Seen { value: 0, may_change: true });
        // Another value, which lets it go on: it is woken by that, and not by what becomes of the handles.
        again.join().unwrap().set(|_| GOES_ON);
        let woken = Arc::new(Woken::default());
        waits.poll(&Waker::from(woken.clone()));
        drop(waits.teller());
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
    });
}

/// The place of one that has been woken is void: another may have it by the time that the first goes.
#[test]
fn an_observer_that_goes_takes_no_other_ones_place() {
    model(3, || {
        let told = Told::new(0);
        let (mut goes, mut stays) = (told.heard(), told.heard());
        goes.poll(futures::task::noop_waker_ref());
        let waits = thread::spawn(move || wait_until(&mut stays, |seen| seen.value == 2));
        told.set(|_| 1);
        drop(goes);
        told.set(|_| 2);
        assert_eq!(waits.join().unwrap().value, 2);
    });
}

/// Two share a count of one: one of them has it, and the other is woken to see that none is left.
#[test]
fn one_of_two_claims_the_last_run() {
    model(3, || {
        let told = Told::new(1);
        let claims = |mut heard: Heard<u32>| {
            move || {
                let claimed = heard.change(|left| left.checked_sub(1), |left| left == 0).is_some();
                wait_until(&mut heard, |seen| seen.value == 0);
                claimed
            }
        };
        let other = thread::spawn(claims(told.heard()));
        let first = claims(told.heard())();
        assert!(first != other.join().unwrap(), "claimed by both, or by none");
    });
}

/// A task that is polled by another executor meanwhile comes with another waker: the last one counts.
#[test]
fn the_waker_of_the_last_poll_is_woken() {
    model(3, || {
        let told = Told::new(0);
        let mut heard = told.heard();
        heard.poll(futures::task::noop_waker_ref());
        let sets = thread::spawn(move || {
            told.set(|_| 1);
            told.set(|_| 2);
        });
        heard.poll(futures::task::noop_waker_ref());
        wait_until(&mut heard, |seen| seen.value == 2);
        sets.join().unwrap();
    });
}
