//! Hostile user code in flows and their hubs: destructors that panic, several at once; methods of messages that panic; log
//! writers that use their hub; wakers that panic at the ends of a flow. None of it aborts the process or strands other tasks.
//!
//! Each body runs in its own process, which is killed if it hangs.

#![forbid(unsafe_code)]

mod chunks;
mod conditions;
mod logs;
mod messages;
mod operators;
mod wakers;

use std::{
    borrow::Cow,
    future::{pending, ready},
    io::{self, Write},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
};

use common::alone::in_a_process;
use futures::{FutureExt, StreamExt};
use tracing::Instrument;
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};
use wakeline::{
    ChunkHub, Error, ErrorKind,
    condition::{Condition, Gate, Status, at_least, count, every, until},
    device::Emulated,
    hub::{MergePolicy, Producer, RawEnvelope},
    operator::{MapPorts, Reply, SinkPorts, SourcePorts, concurrent, map, sink, source},
    prelude::*,
};

/// Runs an async body in its own process, on a runtime of two workers.
fn alone(name: &str, body: impl Future<Output = ()>) {
    in_a_process(name, || {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(body);
    });
}

fn host() -> Device {
    Device::host()
}

#[derive(Debug)]
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a user's destructor panics");
    }
}

impl Message for Bomb {}

async fn put(produce: &mut Producer<u32>, number: u32) {
    produce.with(async |blank| blank.fill_from(&[number]).await).await.unwrap();
}

struct Counts(AtomicUsize);

impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}
