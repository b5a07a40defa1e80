//! Model check of `condition/told.rs`: every interleaving of handles that set a watch value and observers of it. The file is
//! included as it stands, with loom's primitives.

#[path = "common/loom.rs"]
mod sync;

#[allow(dead_code)]
#[path = "../src/condition/told.rs"]
mod told;

use std::{future::poll_fn, task::Poll};

use loom::{future::block_on, thread};
use sync::model;
use told::{Heard, Seen, Told};

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
