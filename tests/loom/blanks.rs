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

    fn come_home(&self) {
        *self.home.lock().unwrap() += 1;
        *self.woken.lock().unwrap() += 1;
        self.operator.wake();
    }

    /// As in `IngressGate::blank`.
    fn take(&self) {
        let caller = self.queue.join();
        block_on(poll_fn(|cx| {
            caller.register(cx.waker());
            let mut home = self.home.lock().unwrap();
            if *home == 0 {
                return Poll::Pending;
            }
            *home -= 1;
            Poll::Ready(())
        }));
    }

    /// As in `IngressGate::tend`, until so many envelopes have been returned and all callers are woken or served.
    fn operate(&self, comes: u32) {
        block_on(poll_fn(|cx| {
            self.operator.register_by_ref(cx.waker());
            let over = *self.woken.lock().unwrap() == comes;
            let home = *self.home.lock().unwrap() > 0;
            if home && self.queue.wake_first() {
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
                move || world.take()
            }),
            thread::spawn({
                let world = world.clone();
                move || world.come_home()
            }),
        ];
        world.operate(1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(world.queue.is_empty() && *world.home.lock().unwrap() == 0);
    });
}

/// The caller in front is woken but not polled; it is dropped at the end.
#[test]
fn a_caller_that_is_not_polled_does_not_block_the_next() {
    model(2, || {
        let world = World::new(0);
        let kept = world.queue.join();
        kept.register(&Waker::noop().clone());
        let takes = thread::spawn({
            let world = world.clone();
            move || world.take()
        });
        let comes = thread::spawn({
            let world = world.clone();
            move || world.come_home()
        });
        world.operate(1);
        takes.join().unwrap();
        comes.join().unwrap();
        drop(kept);
        assert!(world.queue.is_empty());
    });
}
