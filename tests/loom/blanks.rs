//! Model check of `flow/blank_queue.rs`: callers that wait for an envelope, the operator that wakes them one by one,
//! and an envelope that is returned meanwhile.

#[allow(dead_code)]
#[path = "../../src/flow/blank_queue.rs"]
mod blank_queue;

use std::{
    future::poll_fn,
    task::{Poll, Waker},
};

use self::blank_queue::BlankQueue;
use crate::sync::model;
use loom::{
    future::{AtomicWaker, block_on},
    sync::{Arc, Mutex},
    thread,
};

/// The callers, the free envelopes, and the operator's waker, which is woken when an envelope is returned.
struct World {
    queue: BlankQueue,
    free: Mutex<u32>,
    operator: AtomicWaker,
    /// How often the operator was woken.
    woken: Mutex<u32>,
}

impl World {
    fn new(free: u32) -> Arc<Self> {
        Arc::new(Self {
            queue: BlankQueue::new(),
            free: Mutex::new(free),
            operator: AtomicWaker::new(),
            woken: Mutex::new(0),
        })
    }

    /// An envelope is returned.
    fn return_one(&self) {
        *self.free.lock().unwrap() += 1;
        *self.woken.lock().unwrap() += 1;
        self.operator.wake();
    }

    /// As in `IngressGate::blanks`.
    fn take(&self, count: u32) {
        let caller = self.queue.join(count as usize);
        block_on(poll_fn(|cx| {
            caller.register(cx.waker());
            let mut free = self.free.lock().unwrap();
            if *free < count {
                return Poll::Pending;
            }
            *free -= count;
            Poll::Ready(())
        }));
    }

    /// As in `IngressGate::on_wake`, until so many envelopes have been returned and all callers are woken or served.
    fn operate(&self, comes: u32) {
        block_on(poll_fn(|cx| {
            self.operator.register_by_ref(cx.waker());
            let over = *self.woken.lock().unwrap() == comes;
            let free = *self.free.lock().unwrap() as usize;
            if self.queue.least_needed().is_some_and(|least| least <= free) && self.queue.wake_first(free) {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if over { Poll::Ready(()) } else { Poll::Pending }
        }));
    }
}

/// One caller takes `needs` envelopes while one is returned and the operator runs, beside a caller that is registered for
/// `kept` and never polled. At the end no caller waits, and all envelopes are taken.
fn a_return_serves_a_caller(free: u32, needs: u32, kept: Option<u32>) {
    model(2, move || {
        let world = World::new(free);
        let kept = kept.map(|needs| {
            let kept = world.queue.join(needs as usize);
            kept.register(&Waker::noop().clone());
            kept
        });
        let takes = thread::spawn({
            let world = world.clone();
            move || world.take(needs)
        });
        let returns = thread::spawn({
            let world = world.clone();
            move || world.return_one()
        });
        world.operate(1);
        takes.join().unwrap();
        returns.join().unwrap();
        drop(kept);
        assert!(world.queue.least_needed().is_none() && *world.free.lock().unwrap() == 0);
    });
}

#[test]
fn an_envelope_returned_while_a_caller_checks_is_not_lost() {
    a_return_serves_a_caller(0, 1, None);
}

/// The caller in front is woken but not polled; it is dropped at the end.
#[test]
fn a_caller_that_is_not_polled_does_not_block_the_next() {
    a_return_serves_a_caller(0, 1, Some(1));
}

/// The pool has one, and another one is returned: the caller that takes both gets them, although no single return is
/// enough for it.
#[test]
fn a_caller_that_takes_two_waits_for_the_second() {
    a_return_serves_a_caller(1, 2, None);
}

/// The caller in front needs more than are free: the one behind it, which needs fewer, is not kept waiting.
#[test]
fn a_caller_that_needs_more_does_not_block_one_that_needs_fewer() {
    a_return_serves_a_caller(0, 1, Some(2));
}
