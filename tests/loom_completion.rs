//! Model check of `stream/completion.rs`: every interleaving of waiters, signals and faults. The file is included as it
//! stands, with loom's primitives; the device is an atomic number, "so far the stream is".

mod sync {
    pub(crate) use loom::sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    };

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }
}

#[allow(dead_code)]
#[path = "../src/stream/completion.rs"]
mod completion;

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use completion::{Completion, Place, Progress};
use loom::{
    future::block_on,
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

/// As `stream/completed.rs` does it: register, look, arm.
struct Waiter {
    completion: Arc<Completion>,
    device: Arc<AtomicU64>,
    ticket: u64,
    place: Place,
}

impl Waiter {
    fn new(completion: &Arc<Completion>, device: &Arc<AtomicU64>, ticket: u64) -> Self {
        Self { completion: completion.clone(), device: device.clone(), ticket, place: Place::default() }
    }
}

impl Future for Waiter {
    type Output = bool;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<bool> {
        let this = &mut *self;
        let mut looked = false;
        loop {
            match this.completion.poll(&mut this.place, this.ticket, cx.waker()) {
                Progress::Passed => return Poll::Ready(true),
                Progress::Failed => return Poll::Ready(false),
                Progress::Wait if looked => {
                    this.completion.arm(this.ticket);
                    return Poll::Pending;
                }
                progress => {
                    let passed = this.device.load(Ordering::SeqCst);
                    if passed > 0 {
                        this.completion.advance(passed);
                    }
                    if progress == Progress::Look && passed < this.ticket {
                        this.completion.deny();
                    }
                    looked = true;
                }
            }
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.completion.leave(&mut self.place);
    }
}

#[test]
fn one_signal_resolves_all_up_to_it() {
    model(|| {
        let (completion, device) = (Arc::new(Completion::new()), Arc::new(AtomicU64::new(0)));
        let waiters = [1, 2].map(|ticket| {
            let waiter = Waiter::new(&completion, &device, ticket);
            thread::spawn(move || assert!(block_on(waiter)))
        });
        device.store(2, Ordering::SeqCst);
        completion.signal(2);
        for waiter in waiters {
            waiter.join().unwrap();
        }
        assert!(!completion.has_waiters());
    });
}

#[test]
fn a_false_rumour_and_one_that_comes_twice_do_no_harm() {
    model(|| {
        let (completion, device) = (Arc::new(Completion::new()), Arc::new(AtomicU64::new(0)));
        let waiter = {
            let waiter = Waiter::new(&completion, &device, 1);
            thread::spawn(move || assert!(block_on(waiter)))
        };
        completion.signal(1);
        device.store(1, Ordering::SeqCst);
        completion.signal(1);
        waiter.join().unwrap();
    });
}

#[test]
fn a_fault_resolves_everybody() {
    model(|| {
        let (completion, device) = (Arc::new(Completion::new()), Arc::new(AtomicU64::new(0)));
        let waiters = [1, 2].map(|ticket| {
            let waiter = Waiter::new(&completion, &device, ticket);
            thread::spawn(move || block_on(waiter))
        });
        completion.fail();
        for waiter in waiters {
            assert!(!waiter.join().unwrap(), "nothing was ever done");
        }
    });
}

#[test]
fn a_waiter_that_goes_takes_nobodys_wake_with_it() {
    model(|| {
        let (completion, device) = (Arc::new(Completion::new()), Arc::new(AtomicU64::new(0)));
        let stays = {
            let waiter = Waiter::new(&completion, &device, 1);
            thread::spawn(move || assert!(block_on(waiter)))
        };
        let goes = {
            let mut waiter = Waiter::new(&completion, &device, 1);
            thread::spawn(move || {
                let waker = futures::task::noop_waker();
                let _ = Pin::new(&mut waiter).poll(&mut Context::from_waker(&waker));
            })
        };
        device.store(1, Ordering::SeqCst);
        completion.signal(1);
        goes.join().unwrap();
        stays.join().unwrap();
        assert!(!completion.has_waiters());
    });
}
