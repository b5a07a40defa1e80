//! [`Streams`]: the state shared by all streams of one device, with its completion monitor and the handling of a fault.

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::{Stream, Ticket, monitor::CompletionMonitor, stream::StreamInner, watch::FaultWatch};
use crate::{
    device::{
        Device, WeakDevice,
        backend::{Backend, RawEvent, RawStream},
    },
    error::{Error, Result},
    sync::{Level, Mutex, assert_may_wake, discard, later, lock, log},
};

/// The interval at which polling tasks warm up the launches of a device. A warm-up takes 5 us.
const WARM_UP_INTERVAL: Duration = Duration::from_micros(100);

pub(crate) struct Streams {
    device: WeakDevice,
    backend: Arc<dyn Backend>,
    live: Mutex<Vec<Weak<StreamInner>>>,
    /// The device's default stream, while a handle exists.
    pub(super) default: Mutex<Weak<StreamInner>>,
    monitor: CompletionMonitor,
    /// Whether the device is polled for tasks that are only notified of its loss.
    pub(super) fault_watch: FaultWatch,
    /// The number of tasks that poll for their work.
    pub(super) pollers: AtomicUsize,
    /// The number of polling tasks that count against the limit.
    pub(super) poll_slots: AtomicUsize,
    opened: Instant,
    /// When the device's launches were last warmed up: microseconds since `opened`.
    warmed_up: AtomicU64,
    /// Events at the ends of streams that were dropped with work in flight.
    end_events: Mutex<Vec<RawEvent>>,
}

impl Streams {
    pub(crate) fn of(device: &Device) -> Arc<Self> {
        device.extension(|device| {
            let weak = device.downgrade();
            device.backend().when_lost(Box::new(move |error| {
                if let Some(device) = weak.upgrade() {
                    let _ = Self::of(&device).observe::<()>(Err(error));
                }
            }));
            Arc::new(Self {
                device: device.downgrade(),
                backend: device.backend().clone(),
                live: Mutex::default(),
                default: Mutex::at(Level::DefaultStream, Weak::new()),
                monitor: CompletionMonitor::new(device),
                fault_watch: FaultWatch::new(),
                pollers: AtomicUsize::new(0),
                poll_slots: AtomicUsize::new(0),
                opened: Instant::now(),
                warmed_up: AtomicU64::new(0),
                end_events: Mutex::default(),
            })
        })
    }

    pub(crate) fn monitor(&self) -> &CompletionMonitor {
        &self.monitor
    }

    /// Microseconds since the device was first used.
    pub(crate) fn micros(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.opened).as_micros() as u64
    }

    /// Called by a task that polls for the end of long work, or for the next message of a slow source, so that the launch
    /// after it is quick.
    pub(crate) fn warm_up(&self, now: Instant) {
        let now = self.micros(now);
        let last = self.warmed_up.load(Ordering::Relaxed);
        let is_due = now >= last + WARM_UP_INTERVAL.as_micros() as u64;
        if is_due && self.warmed_up.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // An error shows at the next query.
            let _ = self.backend.warm_up();
        }
    }

    /// Called by a task that waits for other tasks and is [notified](crate::device::LossObserver) of a loss, after it
    /// has registered: as long as it waits and work is in flight, the device is queried at every tick.
    pub(crate) fn waiter_added(device: &Device) {
        if device.is_host() {
            return;
        }
        let streams = Self::of(device);
        if streams.fault_watch.waiter_added() {
            streams.start_ticks();
        }
    }

    /// Called when work was enqueued while tasks wait and no tick runs for them.
    #[cold]
    pub(super) fn work_added(self: &Arc<Self>) {
        if self.fault_watch.work_added() {
            self.start_ticks();
        }
    }

    #[cold]
    fn start_ticks(self: &Arc<Self>) {
        let own = Arc::downgrade(self);
        self.monitor.sweep(Box::new(move || own.upgrade().is_some_and(|streams| streams.tick())));
    }

    fn tick(&self) -> bool {
        let Some(device) = self.device.upgrade() else { return false };
        let goes_on = self.fault_watch.tick(|| !device.is_lost() && device.has_waiters(), || self.has_work());
        discard(device);
        goes_on
    }

    /// Queries the progress of each stream with unfinished work. True if any work is still unfinished.
    fn has_work(&self) -> bool {
        let live: Vec<Stream> = lock(&self.live).iter().filter_map(Weak::upgrade).map(Stream).collect();
        let mut has_work = false;
        for stream in &live {
            let issued = lock(&stream.0.order).issued;
            if issued > stream.0.completion.passed() {
                // The query itself handles a loss; after any other error the stream is queried again.
                let _ = Ticket::new(stream.clone(), issued).query_progress();
                has_work |= issued > stream.0.completion.passed();
            }
        }
        discard(live);
        let mut left = std::mem::take(&mut *lock(&self.end_events));
        left.retain(|event| !self.observe(self.is_over(*event)).unwrap_or_default());
        has_work |= !left.is_empty();
        lock(&self.end_events).append(&mut left);
        has_work
    }

    /// Called when the last handle of a stream is dropped and its work is not known to be done. Memory in use keeps its
    /// stream alive; this covers work that uses no memory. `may_query` is true if the device may be queried on this
    /// thread.
    #[cold]
    pub(super) fn note_dropped(self: &Arc<Self>, device: &Device, stream: RawStream, may_query: bool) {
        let is_left = !device.is_lost() && device.check_process().is_ok();
        if !is_left || (may_query && self.backend.stream_query(stream).unwrap_or_default()) {
            return;
        }
        // Two at each call, so that there are never more events than streams in flight at a time.
        let oldest: Vec<_> = {
            let mut left = lock(&self.end_events);
            let count = if may_query { left.len().min(2) } else { 0 };
            left.drain(..count).collect()
        };
        let mut still: Vec<_> = oldest.into_iter().filter(|event| !self.is_over(*event).unwrap_or_default()).collect();
        let recorded = self.backend.event_create(false).and_then(|event| {
            still.push(event);
            self.backend.event_record(event, stream)
        });
        let mut left = lock(&self.end_events);
        left.append(&mut still);
        let is_armed = self.fault_watch.is_armed();
        drop(left);
        if is_armed || recorded.is_err() {
            let own = self.clone();
            later("a device-loss callback panicked", move || {
                let _ = own.observe(recorded);
                own.work_added();
            });
        }
    }

    /// True if the work before this event of [`end_events`](Self::end_events) is done. If so, destroys the event.
    fn is_over(&self, event: RawEvent) -> Result<bool> {
        let is_over = self.backend.event_query(event)?;
        if is_over {
            self.backend.event_destroy(event);
        }
        Ok(is_over)
    }

    pub(super) fn register(&self, stream: &Stream) {
        let mut live = lock(&self.live);
        live.retain(|stream| stream.strong_count() > 0);
        live.push(Arc::downgrade(&stream.0));
    }

    /// The stream over this raw stream, while a handle exists: a stream of wakeline, or another library's that the same
    /// owner keeps alive.
    #[cfg(feature = "cuda")]
    pub(crate) fn over_other<O>(&self, raw: RawStream, owner: &Arc<O>) -> Option<Stream> {
        // Any of these may be the last handle, so none is dropped under the lock.
        let live: Vec<Stream> = lock(&self.live).iter().filter_map(Weak::upgrade).map(Stream).collect();
        let is_it = |stream: &&Stream| stream.0.raw == raw && stream.0.driver_stream.is_kept_by(owner);
        let known = live.iter().find(is_it).cloned();
        discard(live);
        known
    }

    /// Returns `result`. If this device is lost, all waiters for the device fail first, and the returned error names
    /// all streams whose work was not known to be done.
    ///
    /// A call that involves another device as well (a wait, a copy, a launch of a graph that waits) also fails if the
    /// other device is lost. So the error alone does not decide: this device is queried.
    pub(crate) fn observe<T>(&self, result: Result<T>) -> Result<T> {
        assert_may_wake();
        result.map_err(|error| self.failed(error))
    }

    #[cold]
    fn failed(&self, error: Error) -> Error {
        // In a forked child process every driver call fails, with various codes.
        if let Some(Err(forked)) = self.device.upgrade().map(|device| device.check_process()) {
            return forked;
        }
        // The last query decides; it makes no driver call if the loss is already known.
        if error.is_device_lost() && self.backend.make_current().is_err_and(|own| own.is_device_lost()) {
            return self.set_lost(error);
        }
        error
    }

    fn set_lost(&self, error: Error) -> Error {
        let Some(device) = self.device.upgrade() else { return error };
        if let Some(known) = device.lost() {
            return known;
        }
        let live: Vec<Stream> = lock(&self.live).iter().filter_map(Weak::upgrade).map(Stream).collect();
        let unfinished: Vec<String> = live
            .iter()
            .filter_map(|stream| {
                // Under the lock: work that fails at once may be known to have failed before it gets its ticket.
                let (order, passed) = (lock(&stream.0.order), stream.0.completion.passed());
                (order.issued > passed).then(|| format!("`{}`{}", stream.name(), order.launches.after(passed)))
            })
            .collect();
        let whose = match unfinished.len() {
            0 => "no unfinished work".to_string(),
            _ => format!("unfinished work on: {}", unfinished.join(", ")),
        };
        let loss = error
            .into_loss(&format!("{device} takes no more work in this process; {whose}; start again in a new process"));
        let is_first = device.set_lost(loss);
        discard(live);
        // Read again: a stream that was created since may already have waiters.
        let live: Vec<Stream> = lock(&self.live).iter().filter_map(Weak::upgrade).map(Stream).collect();
        live.iter().for_each(|stream| stream.0.completion.fail());
        discard(live);
        // The callbacks acquire locks of their own. If this is called with a lock held, they run at the end of the
        // `Deferred` scope.
        let lost = device.clone();
        later("a device-loss callback panicked", move || lost.notify_lost());
        if is_first {
            let (device, unfinished) = (device.name().to_owned(), unfinished.join(", "));
            log(move || tracing::error!(%device, unfinished, "device lost"));
        }
        match device.check() {
            Err(error) => error,
            Ok(()) => Error::internal("a lost device is not marked as lost"),
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.end_events.get_mut().drain(..).for_each(|event| self.backend.event_destroy(event));
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("backend", &self.backend).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::{Emulated, LossObserver};

    /// A task that waits for another task.
    #[derive(Default)]
    struct Waits {
        waiting: Mutex<bool>,
        lost: AtomicUsize,
    }

    impl LossObserver for Waits {
        fn device_lost(&self) {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }

        fn has_waiters(&self) -> bool {
            *lock(&self.waiting)
        }
    }

    /// The tick of a device with nothing in flight ends although a task waits, and new work restarts it: an idle flow
    /// uses no processor.
    #[test]
    fn a_device_is_polled_for_waiting_tasks_only_while_work_is_in_flight() {
        let device = Device::emulated(Emulated::new());
        let (stream, streams) = (Stream::new(&device).unwrap(), Streams::of(&device));
        let waits = Arc::<Waits>::default();
        let observer: Weak<Waits> = Arc::downgrade(&waits);
        device.on_loss(observer);
        *lock(&waits.waiting) = true;
        // This test runs the ticks: the completion monitor has none.
        assert!(streams.fault_watch.waiter_added());
        assert!(!streams.tick() && streams.fault_watch.is_armed(), "nothing is in flight");
        assert!(!streams.fault_watch.waiter_added(), "work starts it");
        let (go, held) = std::sync::mpsc::channel::<()>();
        assert!(streams.fault_watch.work_added());
        stream.host_function(move || _ = held.recv()).unwrap();
        assert!(streams.tick() && !streams.fault_watch.is_armed(), "work is in flight");
        drop(go);
        // No task polls for what has passed: the tick itself finds out.
        device.backend().stream_synchronize(stream.raw()).unwrap();
        assert!(!streams.tick() && streams.fault_watch.is_armed());
        // An enqueue starts a tick of the completion monitor, which ends again, although no task polls for the work.
        stream.host_function(|| ()).unwrap();
        assert!(stream.ticket().number() == 2);
        while !streams.fault_watch.is_armed() {
            std::thread::yield_now();
        }
        assert_eq!(stream.0.completion.passed(), 2, "the completion monitor has queried");
        *lock(&waits.waiting) = false;
        assert!(streams.fault_watch.work_added());
        assert!(!streams.tick() && !streams.fault_watch.is_armed(), "no task waits");
        assert!(streams.fault_watch.waiter_added());
        assert_eq!(waits.lost.load(Ordering::SeqCst), 0);
    }
}
