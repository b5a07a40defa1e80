//! Model check of `stream/completion.rs`: waiters, sources and faults. The device is modelled by the last completed
//! ticket and the enqueued callbacks.

#[allow(dead_code)]
#[path = "../../src/stream/completion.rs"]
mod completion;

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use self::completion::{Completion, Progress, WaiterSlot};
use crate::sync::model;
use loom::{
    future::block_on,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

/// A stream of a device: its progress, and the callbacks behind its work.
struct Device {
    completion: Completion,
    done: AtomicU64,
    callbacks: Mutex<Vec<u64>>,
}

impl Device {
    fn new() -> Arc<Self> {
        let (done, callbacks) = (AtomicU64::new(0), Mutex::new(Vec::new()));
        Arc::new(Self { completion: Completion::new(), done, callbacks })
    }

    /// Enqueues a host function behind the work up to `ticket`.
    fn call_back(&self, ticket: u64) {
        if !self.completion.arm(ticket) {
            return;
        }
        let mut callbacks = self.callbacks.lock().unwrap();
        if self.done.load(Ordering::SeqCst) < ticket {
            return callbacks.push(ticket);
        }
        drop(callbacks);
        self.completion.wake(ticket);
    }

    /// Completes all work up to `ticket` and runs its callbacks.
    fn finish(&self, ticket: u64) {
        let mut callbacks = self.callbacks.lock().unwrap();
        self.done.store(ticket, Ordering::SeqCst);
        let due: Vec<u64> = callbacks.iter().copied().filter(|at| *at <= ticket).collect();
        callbacks.retain(|at| *at > ticket);
        drop(callbacks);
        due.into_iter().for_each(|at| self.completion.wake(at));
    }

    /// Queries the stream's progress.
    fn ask(&self, ticket: u64) -> bool {
        let done = self.done.load(Ordering::SeqCst) >= ticket;
        if done {
            self.completion.advance(ticket);
        }
        done
    }
}

/// As in `stream/completed.rs`: registers; the first in line queries the device and arms a callback.
struct Waiter {
    device: Arc<Device>,
    ticket: u64,
    place: WaiterSlot,
}

impl Future for Waiter {
    type Output = bool;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<bool> {
        let this = &mut *self;
        loop {
            match this.device.completion.poll(&mut this.place, this.ticket, cx.waker()) {
                Progress::Passed => return Poll::Ready(true),
                Progress::Failed => return Poll::Ready(false),
                Progress::Wait { front: true } if this.device.ask(this.ticket) => {}
                Progress::Wait { front } => {
                    if front {
                        this.device.call_back(this.ticket);
                    }
                    return Poll::Pending;
                }
            }
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.device.completion.leave(&mut self.place).wake();
    }
}

fn waiter(device: &Arc<Device>, ticket: u64) -> Waiter {
    Waiter { device: device.clone(), ticket, place: WaiterSlot::default() }
}

fn spawn(waiter: Waiter) -> thread::JoinHandle<bool> {
    thread::spawn(move || block_on(waiter))
}

/// Only the first in line arms a callback: the others are notified by it when they become first.
#[test]
fn the_first_in_line_is_notified() {
    model(3, || {
        let device = Device::new();
        let waiters = [1, 2].map(|ticket| spawn(waiter(&device, ticket)));
        device.finish(2);
        for waiter in waiters {
            assert!(waiter.join().unwrap());
        }
        assert!(!device.completion.has_waiters());
    });
}

/// A callback and a task that scans, for one ticket.
#[test]
fn two_sources_race() {
    model(3, || {
        let device = Device::new();
        let only = spawn(waiter(&device, 1));
        let scanner = {
            let device = device.clone();
            thread::spawn(move || device.ask(1))
        };
        device.finish(1);
        let _ = scanner.join().unwrap();
        assert!(only.join().unwrap());
        assert!(!device.completion.has_waiters());
    });
}

/// The scanner sees only the first of two completions, and the callback is for that one as well.
#[test]
fn two_sources_race_and_the_next_waiter_keeps_waiting() {
    model(3, || {
        let device = Device::new();
        let first = spawn(waiter(&device, 1));
        let scanner = {
            let device = device.clone();
            thread::spawn(move || device.ask(1))
        };
        device.finish(1);
        let mut second = waiter(&device, 2);
        let waker = futures::task::noop_waker();
        assert!(Pin::new(&mut second).poll(&mut Context::from_waker(&waker)).is_pending());
        let _ = scanner.join().unwrap();
        assert!(first.join().unwrap());
        device.finish(2);
        assert!(block_on(second));
    });
}

#[test]
fn false_and_repeated_notifications_are_harmless() {
    model(3, || {
        let device = Device::new();
        let only = spawn(waiter(&device, 1));
        device.completion.wake(1);
        device.finish(1);
        device.completion.wake(1);
        assert!(only.join().unwrap());
    });
}

#[test]
fn a_fault_fails_every_waiter() {
    model(3, || {
        let device = Device::new();
        let waiters = [1, 2].map(|ticket| spawn(waiter(&device, ticket)));
        device.completion.fail();
        for waiter in waiters {
            assert!(!waiter.join().unwrap(), "no work was completed");
        }
    });
}

/// The first waiter is dropped; the one behind it has no source of its own until it is notified.
#[test]
fn a_dropped_first_waiter_passes_its_place_to_the_next() {
    model(3, || {
        let device = Device::new();
        let mut goes = waiter(&device, 1);
        let waker = futures::task::noop_waker();
        assert!(Pin::new(&mut goes).poll(&mut Context::from_waker(&waker)).is_pending());
        let stays = spawn(waiter(&device, 2));
        let going = thread::spawn(move || drop(goes));
        // Ticket 1 does not complete by itself: the callback armed for it never comes in time.
        device.callbacks.lock().unwrap().retain(|at| *at != 1);
        device.finish(2);
        going.join().unwrap();
        assert!(stays.join().unwrap());
        assert!(!device.completion.has_waiters());
    });
}

#[test]
fn a_dropped_waiter_loses_no_wake_of_another() {
    model(3, || {
        let device = Device::new();
        let stays = spawn(waiter(&device, 1));
        let goes = {
            let mut other = waiter(&device, 1);
            thread::spawn(move || {
                let waker = futures::task::noop_waker();
                let _ = Pin::new(&mut other).poll(&mut Context::from_waker(&waker));
            })
        };
        device.finish(1);
        goes.join().unwrap();
        assert!(stays.join().unwrap());
        assert!(!device.completion.has_waiters());
    });
}
