//! Emulated and simulated devices, their streams and wrapped memory, with wakers, functions and owners that panic or block.

#![forbid(unsafe_code)]

mod functions;
mod loss;
mod simulations;
mod spoilt;

use std::{
    future::pending,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use common::alone::{in_a_process, within_bound};
use wakeline::{
    Buffer, Stream,
    device::{Device, Emulated, Faults, Simulation},
    graph::{Graph, GraphEvent},
    hub::ChunkHub,
    prelude::*,
    stream::Event,
};

type Action = Box<dyn Fn() + Send + Sync>;

/// A waker with one action for each wake and another for its drop.
#[derive(Default)]
struct Hostile {
    woken: Option<Action>,
    dropped: Option<Action>,
}

impl Wake for Hostile {
    fn wake(self: Arc<Self>) {
        self.woken.iter().for_each(|action| action());
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.dropped.iter().for_each(|action| action());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Polls a simulation until it is idle: from then on a change wakes this waker.
fn wait_with<'s>(simulation: &'s Simulation, waker: &Waker) -> Pin<Box<dyn Future<Output = ()> + 's>> {
    let mut run: Pin<Box<dyn Future<Output = ()> + 's>> = Box::pin(simulation.run(pending::<()>()));
    for _ in 0..3 {
        assert!(run.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
    }
    run
}

/// Counts its drops, and panics in each.
struct Bomb(Arc<AtomicUsize>);

impl Drop for Bomb {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("a destructor");
    }
}

fn bombs() -> (Arc<AtomicUsize>, impl Fn() -> Bomb) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = dropped.clone();
    (dropped, move || Bomb(count.clone()))
}

#[kernel]
fn traps(data: &mut [u32]) {
    data[0] = 1;
    panic!("a trap");
}

/// Enqueues a kernel that traps on a blocked stream, unblocks the stream, and returns once the device has faulted. The host
/// observes the fault only if `observe` is set.
fn lose(stream: &Stream, blocked: mpsc::Sender<()>, observe: bool) {
    let mut data = Buffer::<u32>::new(stream.device(), 1).unwrap();
    traps::launch(stream, &mut data).unwrap();
    let (never_called, dropped) = mpsc::channel::<()>();
    stream.host_function(move || _ = never_called.send(())).unwrap();
    drop(blocked);
    assert!(dropped.recv().is_err(), "work behind the fault is dropped without a call");
    if observe {
        assert!(stream.synchronize_blocking().unwrap_err().is_device_lost());
    }
}

/// Blocks the stream until the sender is dropped.
fn block(stream: &Stream) -> mpsc::Sender<()> {
    let (go, held) = mpsc::channel();
    stream.host_function(move || _ = held.recv()).unwrap();
    go
}

#[kernel]
fn traps_alone(_number: u32) {
    panic!("a trap");
}

/// The progress of a kernel that waits until it may end.
struct Progress {
    began: bool,
    ends: bool,
    seen: u32,
}
