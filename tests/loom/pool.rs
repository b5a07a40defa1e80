//! Model check of `hub/free_list.rs`: tasks that take envelopes from one pool and tasks that return them.

#[allow(dead_code)]
#[path = "../../src/hub/free_list.rs"]
mod free_list;

use std::{future::poll_fn, task::Poll};

use self::free_list::FreeList;
use crate::sync::model;
use loom::{future::block_on, sync::Arc, thread};

/// As in a worker of an operator: waits until an envelope is free, and waits again if another worker was faster.
fn take(list: &FreeList<u32>) -> u32 {
    let waiter = list.waiter();
    let item = block_on(poll_fn(|cx| {
        loop {
            if !list.poll_some(waiter, cx.waker()) {
                return Poll::Pending;
            }
            if let Some(item) = list.take() {
                return Poll::Ready(item);
            }
        }
    }));
    list.leave(waiter);
    item
}

#[test]
fn an_envelope_returned_while_a_worker_registers_wakes_it() {
    model(3, || {
        let list = Arc::new(FreeList::new());
        let gives = {
            let list = list.clone();
            thread::spawn(move || list.put(7))
        };
        assert_eq!(take(&list), 7);
        gives.join().unwrap();
        assert_eq!(list.len(), 0);
    });
}

/// One envelope, two workers: each gets it in turn.
#[test]
fn a_worker_that_was_too_late_is_woken_by_the_next_return() {
    model(3, || {
        let list = Arc::new(FreeList::new());
        let other = {
            let list = list.clone();
            thread::spawn(move || {
                let item = take(&list);
                list.put(item);
            })
        };
        list.put(7);
        let item = take(&list);
        list.put(item);
        other.join().unwrap();
        assert_eq!(list.len(), 1);
    });
}

/// A worker that is woken and aborted leaves the envelope to the other one: all waiters are woken.
#[test]
fn an_aborted_worker_loses_no_wake() {
    model(3, || {
        let list = Arc::new(FreeList::new());
        assert!(!list.poll_some(list.waiter(), futures::task::noop_waker_ref()));
        let waits = {
            let list = list.clone();
            thread::spawn(move || take(&list))
        };
        list.put(7);
        assert_eq!(waits.join().unwrap(), 7);
    });
}

/// A waker whose clones are counted.
struct Counts;

impl std::task::Wake for Counts {
    fn wake(self: std::sync::Arc<Self>) {}
}

/// A worker that leaves while an envelope is returned leaves no waker behind, and removes no other worker's.
#[test]
fn a_worker_that_leaves_during_a_return_leaves_no_waker_behind() {
    model(3, || {
        let list = Arc::new(FreeList::new());
        let wakers = [(); 2].map(|()| std::sync::Arc::new(Counts));
        let leaves = {
            let (list, wakers) = (list.clone(), wakers.clone());
            thread::spawn(move || {
                let waiter = list.waiter();
                // A future that is polled with another waker each time.
                for waker in &wakers {
                    let _ = list.poll_some(waiter, &std::task::Waker::from(waker.clone()));
                }
                list.leave(waiter);
            })
        };
        let waits = {
            let list = list.clone();
            thread::spawn(move || take(&list))
        };
        list.put(7);
        assert_eq!(waits.join().unwrap(), 7);
        leaves.join().unwrap();
        assert!(wakers.iter().all(|waker| std::sync::Arc::strong_count(waker) == 1));
    });
}
