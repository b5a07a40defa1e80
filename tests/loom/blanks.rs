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
    home: Mutex<u32>,
    operator: AtomicWaker,
    /// How often the operator was woken.
    woken: Mutex<u32>,
}

impl World {
    fn new(home: u32) -> Arc<Self> {
        Arc::new(Self {
            queue: BlankQueue::new(),
            home: Mutex::new(home),
            operator: AtomicWaker::new(),
            woken: Mutex::new(0),
        })
    }

    /// An envelope is returned.
    fn come_home(&self) {
        *self.home.lock().unwrap() += 1;
        *self.woken.lock().unwrap() += 1;
        self.operator.wake();
    }

    /// As in `IngressGate::blanks`.
    fn take(&self, count: u32) {
        let caller = self.queue.join(count as usize);
        block_on(poll_fn(|cx| {
            caller.register(cx.waker());
            let mut home = self.home.lock().unwrap();
            if *home < count {
                return Poll::Pending;
            }
            *home -= count;
            Poll::Ready(())
        }));
    }

    /// As in `IngressGate::on_wake`, until so many envelopes have been returned and all callers are woken or served.
    fn operate(&self, comes: u32) {
        block_on(poll_fn(|cx| {
            self.operator.register_by_ref(cx.waker());
            let over = *self.woken.lock().unwrap() == comes;
            let home = *self.home.lock().unwrap() as usize;
            if self.queue.least_needed().is_some_and(|least| least <= home) && self.queue.wake_first(home) {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if over { Poll::Ready(()) } else { Poll::Pending }
        }));
    }
}

#[test]
fn an_envelope_returned_while_a_caller_checks_is_not_lost() {
    model(2, || {
        let world = World::new(0);
        let threads = [
            thread::spawn({
                let world = world.clone();
                move || world.take(1)
            }),
            thread::spawn({
                let world = world.clone();
                move || world.come_home()
            }),
        ];
        world.operate(1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(world.queue.least_needed().is_none() && *world.home.lock().unwrap() == 0);
    });
}

/// The caller in front is woken but not polled; it is dropped at the end.
#[test]
fn a_caller_that_is_not_polled_does_not_block_the_next() {
    model(2, || {
        let world = World::new(0);
        let kept = world.queue.join(1);
        kept.register(&Waker::noop().clone());
        let takes = thread::spawn({
            let world = world.clone();
            move || world.take(1)
        });
        let comes = thread::spawn({
            let world = world.clone();
            move || world.come_home()
        });
        world.operate(1);
        takes.join().unwrap();
        comes.join().unwrap();
        drop(kept);
        assert!(world.queue.least_needed().is_none());
    });
}

/// The pool has one, and another one is returned: the caller that takes both gets them, although no single return is
/// enough for it.
#[test]
fn a_caller_that_takes_two_waits_for_the_second() {
    model(2, || {
        let world = World::new(1);
        let takes = thread::spawn({
            let world = world.clone();
            move || world.take(2)
        });
        let comes = thread::spawn({
            let world = world.clone();
            move || world.come_home()
        });
        world.operate(1);
        takes.join().unwrap();
        comes.join().unwrap();
        assert!(world.queue.least_needed().is_none() && *world.home.lock().unwrap() == 0);
    });
}

/// The caller in front needs more than are free: the one behind it, which needs fewer, is not kept waiting.
#[test]
fn a_caller_that_needs_more_does_not_block_one_that_needs_fewer() {
    model(2, || {
        let world = World::new(0);
        let kept = world.queue.join(2);
        kept.register(&Waker::noop().clone());
        let takes = thread::spawn({
            let world = world.clone();
            move || world.take(1)
        });
        let comes = thread::spawn({
            let world = world.clone();
            move || world.come_home()
        });
        world.operate(1);
        takes.join().unwrap();
        comes.join().unwrap();
        drop(kept);
        assert!(world.queue.least_needed().is_none());
    });
}
