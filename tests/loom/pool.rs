//! Model check of `hub/free_list.rs`: every interleaving of those who take envelopes of one pool, and of those who give them
//! back. The file is included as it stands, with loom's primitives.

#[allow(dead_code)]
#[path = "../../src/hub/free_list.rs"]
mod free_list;

use std::{future::poll_fn, task::Poll};

use self::free_list::FreeList;
use crate::sync::model;
use loom::{future::block_on, sync::Arc, thread};

/// As a worker of an operator does it: waits until one is there, and is woken again where another was quicker.
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
fn one_that_comes_back_while_a_worker_begins_to_wait_wakes_it() {
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

/// One envelope, two workers: each has it in its turn.
#[test]
fn a_worker_that_came_too_late_is_woken_by_the_next() {
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

/// A worker that is woken and goes, as it is aborted, leaves the envelope to the other one: all who wait are woken.
#[test]
fn a_worker_that_goes_takes_no_wake_with_it() {
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

/// One that leaves while an envelope comes back keeps no waker here, and takes none of another's away.
#[test]
fn a_worker_that_leaves_while_one_comes_back_leaves_no_waker_behind() {
    model(3, || {
        let list = Arc::new(FreeList::new());
        let wakers = [(); 2].map(|()| std::sync::Arc::new(Counts));
        let leaves = {
            let (list, wakers) = (list.clone(), wakers.clone());
            thread::spawn(move || {
                let waiter = list.waiter();
                // Of a future that is polled with another waker each time.
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
