//! The watch: asks streams that somebody waits for, on a timer, how they are.
//!
//! A callback may never come: a kernel that traps ends the device, and of all that was enqueued behind it the driver
//! runs nothing, not even the host functions (measured on an H200: half a second later neither had run, and the fault
//! showed only because somebody asked the event). So whoever waits must not depend on the callback alone. While
//! anything waits, each of its streams is asked every [`INTERVAL`]; a fault then resolves everybody, and a lost
//! callback costs an interval, not for ever. The same beat sweeps memory that was parked until its uses are over.
//!
//! Nothing waits: no thread. The thread ends when its list is empty and is made again when it is needed. Under a
//! [`Simulation`](crate::device::Simulation) there is no thread at all: its loop keeps the beat, in virtual time.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak, atomic::Ordering},
    time::Duration,
};

use super::{Inner, Stream};
use crate::{
    device::{Device, emulated},
    sync::lock,
};

/// How often a stream that somebody waits for is asked. A query costs 1.25 us on an H200; the driver itself takes some
/// 590 ms to notice a trap.
const INTERVAL: Duration = Duration::from_millis(50);

/// Called at each beat until it returns false.
type Sweep = Box<dyn FnMut() -> bool + Send>;

/// The watch of one device.
pub(crate) struct Watch {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    list: Mutex<List>,
    change: Condvar,
}

#[derive(Default)]
struct List {
    streams: Vec<Weak<Inner>>,
    sweeps: Vec<Sweep>,
    /// Somebody keeps the beat.
    beating: bool,
    closed: bool,
}

impl Watch {
    pub(super) fn new(device: &Device) -> Self {
        let shared = Shared {
            name: format!("wakeline-watch-{}", device.name()),
            list: Mutex::default(),
            change: Condvar::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// From now on, until nobody waits for it, the stream is asked. Called after the waiter has registered.
    pub(super) fn add(stream: &Stream) {
        if stream.0.watched.swap(true, Ordering::AcqRel) {
            return;
        }
        let watch = &stream.0.streams.watch;
        let mut list = lock(&watch.shared.list);
        list.streams.push(Arc::downgrade(&stream.0));
        watch.begin(list);
    }

    /// From now on, until it returns false, `sweep` is called at every beat.
    pub(crate) fn sweep(&self, sweep: Sweep) {
        let mut list = lock(&self.shared.list);
        list.sweeps.push(sweep);
        self.begin(list);
    }

    fn begin(&self, mut list: std::sync::MutexGuard<'_, List>) {
        if list.beating {
            return;
        }
        list.beating = true;
        drop(list);
        let shared = self.shared.clone();
        if let Some(simulation) = emulated::simulation::current() {
            simulation.on_idle_every(INTERVAL, Box::new(move || shared.beat()));
            return;
        }
        let thread = std::thread::Builder::new().name(shared.name.clone()).spawn(move || {
            loop {
                let list = lock(&shared.list);
                let waited = shared.change.wait_timeout(list, INTERVAL).unwrap_or_else(PoisonError::into_inner);
                let closed = waited.0.closed;
                drop(waited);
                if closed || !shared.beat() {
                    return;
                }
            }
        });
        if let Err(error) = thread {
            lock(&self.shared.list).beating = false;
            tracing::error!(%error, "no thread for the watch: a fault may go unnoticed until the next call");
        }
    }
}

impl Shared {
    /// One beat. False if there is nothing left to watch: then the beat has ended.
    fn beat(&self) -> bool {
        let (streams, mut sweeps) = {
            let mut list = lock(&self.list);
            (std::mem::take(&mut list.streams), std::mem::take(&mut list.sweeps))
        };
        let streams: Vec<Stream> = streams.iter().filter_map(Weak::upgrade).map(Stream).collect();
        let mut kept = Vec::new();
        for stream in streams {
            if stream.look().is_err() {
                // Everybody has been told, but for whoever came in between.
                stream.0.completion.fail();
            }
            if !stream.0.completion.has_waiters() {
                stream.0.watched.store(false, Ordering::Release);
                // A waiter registers first and asks for the watch then: one that found `watched` still set is seen here.
                if !stream.0.completion.has_waiters() {
                    continue;
                }
                stream.0.watched.store(true, Ordering::Release);
            }
            kept.push(Arc::downgrade(&stream.0));
        }
        sweeps.retain_mut(|sweep| sweep());
        let mut list = lock(&self.list);
        list.streams.append(&mut kept);
        list.sweeps.append(&mut sweeps);
        let idle = list.streams.is_empty() && list.sweeps.is_empty();
        list.beating = !idle && !list.closed;
        list.beating
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        lock(&self.shared.list).closed = true;
        self.shared.change.notify_all();
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("name", &self.shared.name).finish_non_exhaustive()
    }
}
