//! Warnings of observed flows: an operator that blocks a worker thread, one that waits for too long, and operators that wait
//! only for each other. Each is an item of the snapshot while it lasts, a call of the hooks and a line of the log.

use std::{
    future::{pending, ready},
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use common::*;
use tokio::sync::oneshot;
use wakeline::{
    Running, Stream,
    condition::{Gate, every, memory},
    flow::{LocalFlow, OnStall},
    memory::Allocator,
    observe::{Observe, Snapshot, Warning, WarningKind},
    operator::concurrent,
    prelude::*,
};

mod blocked;
mod hooks;
mod stalls;
mod waits;

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// An observer with these limits, and what its hook was called with.
fn watch(blocked: Duration, waiting: Duration) -> (Observe, Receiver<Warning>) {
    let (called, calls) = channel();
    let watch = Observe::new()
        .every(ms(1))
        .warn_blocked(blocked)
        .warn_waiting(waiting)
        .on_warning(move |warning| _ = called.send(warning.clone()));
    (watch, calls)
}

fn next(calls: &Receiver<Warning>) -> Warning {
    calls.recv_timeout(Duration::from_secs(60)).expect("there is a warning")
}

/// The operators of a warning.
fn of(warning: &Warning) -> Vec<&str> {
    warning.operators.iter().map(|name| &**name).collect()
}

/// Looks until the snapshot is so.
async fn snapshot(running: &Running, is_so: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let began = Instant::now();
    loop {
        let snapshot = running.snapshot();
        if is_so(&snapshot) {
            return snapshot;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{snapshot}");
        tokio::time::sleep(ms(2)).await;
    }
}

async fn end(running: Running) {
    running.abort();
    let _ = running.await;
}

/// A lock that a test holds, to block operators.
#[derive(Clone, Default)]
struct Block(Arc<Mutex<()>>);

impl Block {
    fn pass(&self) {
        drop(self.0.lock().unwrap());
    }
}

/// A source that sends nothing, a sink, and operators in between.
fn chain(flow: &mut Flow, first: impl Operator<Ports = SourcePorts<u32>>, between: &[&'static str]) {
    let first = flow.add("read", first);
    let mut last = first.output;
    for name in between {
        let map = flow.add(*name, map(async |n: u32| Ok(n)));
        flow.connect(last, map.input);
        last = map.output;
    }
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(last, write.input);
}
