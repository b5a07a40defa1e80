//! [`Meter`]: encloses the device work of a run in timed events.
//!
//! A run's work is a number of operations on its stream, with waits for other streams between them. The events enclose
//! the operations but not the waits, so that a run is not charged for pending work on another operator's stream. Where a
//! task waits for the stream, a span ends as well: until the next operation the device has nothing to do.
//!
//! ```text
//!   begin_run     wait   launch   launch   wait   copy   end_run
//!                       [ span of the run ]      [ span ]
//! ```
//!
//! What was recorded goes to the run's [`SpanReader`](super::spans::SpanReader), which reads it once the device has
//! passed it. If it has no room, since the device is far behind, a run is not measured and counts as missed.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    event_pool::{EventPool, PooledEvent},
    spans::{OpenSpans, PendingSpan, SpanOwner},
};
use crate::{
    clock,
    device::backend::{Backend, RawStream},
    error::Result,
};

pub(super) struct Meter {
    pool: Arc<EventPool>,
    owner: Option<SpanOwner>,
    phase: Phase,
    recorded: bool,
}

/// A call that records an event on an idle stream and takes longer is repeated: the device may have passed the event at any
/// time of the call. On an H200 it takes 1.3 us (`guide/facts.md`).
const LONG_RECORD: Duration = Duration::from_micros(3);
/// How often at most.
const REPEATS: usize = 2;

enum Phase {
    /// Between two runs.
    Off,
    /// In a run that is not measured: there was no room, or a call failed.
    Missed,
    /// The next operation begins a span.
    Armed,
    In(BegunSpan),
}

/// Of a [`PendingSpan`], what is known before its end.
struct BegunSpan {
    from: PooledEvent,
    was_idle: bool,
    began: Instant,
    recorded: Instant,
    enqueued: Option<Instant>,
}

impl Meter {
    pub(super) fn new(backend: &Arc<dyn Backend>) -> Box<Self> {
        Box::new(Self { pool: EventPool::new(backend), owner: None, phase: Phase::Off, recorded: false })
    }

    /// Begins to measure a run. Returns what it measured until then.
    #[must_use]
    pub(super) fn begin_run(&mut self, owner: SpanOwner) -> Option<SpanOwner> {
        self.recorded = false;
        if owner.reader.has_room(&owner.times) {
            self.phase = Phase::Armed;
            return self.owner.replace(owner);
        }
        self.phase = Phase::Missed;
        owner.times.miss(owner.run);
        self.owner.take()
    }

    /// Has the spans of the run also go to `spans`. False if no run is measured.
    pub(super) fn add_spans(&mut self, spans: &OpenSpans) -> bool {
        if let (Some(owner), Phase::Armed | Phase::In(..)) = (&mut self.owner, &self.phase) {
            owner.spans.push(spans.clone());
        }
        !matches!(self.phase, Phase::Off)
    }

    /// Ends the run. True if the run has recorded spans in the stream.
    pub(super) fn end_run(&mut self, stream: RawStream) -> (bool, Option<SpanOwner>) {
        self.end_span(stream);
        self.phase = Phase::Off;
        (self.recorded, self.owner.take())
    }

    pub(super) fn work(&mut self, stream: RawStream) {
        if let Phase::Armed = self.phase {
            match self.begin_span(stream) {
                Ok(span) => self.phase = Phase::In(span),
                Err(_) => self.give_up(),
            }
        }
    }

    /// Called after an operation was enqueued.
    pub(super) fn enqueued(&mut self) {
        if let Phase::In(BegunSpan { enqueued: enqueued @ None, .. }) = &mut self.phase {
            *enqueued = Some(clock::now());
        }
    }

    /// Called after a function of the user's has enqueued operations: from its begin on, the device may have worked.
    pub(super) fn enqueued_by_user(&mut self) {
        if let Phase::In(BegunSpan { enqueued: enqueued @ None, recorded, .. }) = &mut self.phase {
            *enqueued = Some(*recorded);
        }
    }

    /// Called before a wait for another stream, and when a task waits for this one.
    pub(super) fn wait(&mut self, stream: RawStream) {
        self.end_span(stream);
    }

    fn begin_span(&self, stream: RawStream) -> Result<BegunSpan> {
        let (backend, from) = (&self.pool.backend, self.pool.take()?);
        let was_idle = backend.stream_is_idle(stream)?;
        // An idle device passes the event at once, at a time that is as exact as the call was short.
        let record = || {
            let began = clock::now();
            backend.event_record(from.raw, stream).map(|()| (began, clock::now()))
        };
        let (mut began, mut recorded) = record()?;
        let is_exact = !was_idle || backend.event_instant(from.raw).is_some();
        for _ in 0..REPEATS {
            if is_exact || recorded - began <= LONG_RECORD {
                break;
            }
            (began, recorded) = record()?;
        }
        Ok(BegunSpan { from, was_idle, began, recorded, enqueued: None })
    }

    fn end_span(&mut self, stream: RawStream) {
        if !matches!(self.phase, Phase::In(..)) {
            return;
        }
        let Phase::In(span) = std::mem::replace(&mut self.phase, Phase::Armed) else { return };
        // `None` if its operation was refused: the device has done nothing.
        let Some(enqueued) = span.enqueued else { return };
        let (Ok(to), Some(owner)) = (self.record(stream), self.owner.as_ref()) else { return self.give_up() };
        let (run, times, spans) = (owner.run, owner.times.clone(), owner.spans.clone());
        let (BegunSpan { from, was_idle, began, recorded, .. }, stream) = (span, stream.0);
        owner.reader.push(PendingSpan { run, times, spans, from, to, was_idle, began, recorded, enqueued, stream });
        self.recorded = true;
    }

    fn record(&self, stream: RawStream) -> Result<PooledEvent> {
        let event = self.pool.take()?;
        self.pool.backend.event_record(event.raw, stream).map(|()| event)
    }

    /// Stops measuring this run, as a call failed. Users of the device get the error from their own calls.
    fn give_up(&mut self) {
        self.phase = Phase::Missed;
        if let Some(owner) = &self.owner {
            owner.times.miss(owner.run);
        }
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("owner", &self.owner).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::Ordering, thread, time::Instant};

    use smallvec::SmallVec;

    use super::*;
    use crate::{
        device::{
            Device, Emulated,
            check::mock::{MockBackend, pass},
        },
        stream::{DeviceTime, DeviceTimes, SpanReader, Stream},
    };

    const MS: Duration = Duration::from_millis(1);
    const ON: RawStream = RawStream(1);

    /// What is counted of one run on a device with a clock of its own, which is idle and measures 100 ms between its events.
    /// The host's time is virtual.
    fn measured(does: impl FnOnce(&mut Meter, &MockBackend)) -> (DeviceTime, usize) {
        let device = Arc::new(MockBackend::default());
        device.answer.store(true, Ordering::Relaxed);
        *device.elapsed.lock() = 100 * MS;
        let mut meter = Meter::new(&(device.clone() as Arc<dyn Backend>));
        let (reader, times) = (SpanReader::new(), Arc::new(DeviceTimes::default()));
        let owner = SpanOwner { reader: reader.clone(), run: 0, times: times.clone(), spans: SmallVec::new() };
        drop(meter.begin_run(owner));
        does(&mut meter, &device);
        drop(meter.end_run(ON));
        device.answer.store(true, Ordering::Relaxed);
        reader.read(None);
        (times.sums(), device.records.load(Ordering::Relaxed))
    }

    fn of_one_run(took: Duration) -> DeviceTime {
        DeviceTime { total: took, longest: took, runs: 1, missed: 0 }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_stream_has_nothing_to_do_while_the_first_operation_is_enqueued() {
        let (times, _) = measured(|meter, _| {
            meter.work(ON);
            pass(5 * MS);
            meter.enqueued();
            pass(5 * MS);
        });
        assert_eq!(times, of_one_run(95 * MS));
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_stream_reaches_its_first_event_late() {
        let (times, _) = measured(|meter, device| {
            device.answer.store(false, Ordering::Relaxed);
            meter.work(ON);
            pass(5 * MS);
            meter.enqueued();
        });
        assert_eq!(times, of_one_run(100 * MS));
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_that_the_device_takes_to_pass_an_event_does_not_count() {
        for (of_event, counts) in [(3 * MS, 97 * MS), (200 * MS, Duration::ZERO)] {
            let (times, _) = measured(|meter, device| {
                *device.event_time.lock() = of_event;
                device.answer.store(false, Ordering::Relaxed);
                meter.work(ON);
                meter.enqueued();
            });
            assert_eq!(times, of_one_run(counts));
        }
    }

    /// It may enqueue a thousand kernels, and the device works on the first of them meanwhile.
    #[tokio::test(start_paused = true)]
    async fn what_a_function_of_the_users_enqueues_is_device_time_from_its_begin_on() {
        let (times, _) = measured(|meter, _| {
            meter.work(ON);
            pass(5 * MS);
            meter.enqueued_by_user();
        });
        assert_eq!(times, of_one_run(100 * MS));
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_that_was_refused_has_no_device_time() {
        let (times, _) = measured(|meter, _| meter.work(ON));
        assert_eq!(times, DeviceTime::default());
        let (times, _) = measured(|meter, _| {
            meter.work(ON);
            meter.wait(ON);
            meter.work(ON);
            meter.enqueued();
        });
        assert_eq!(times, of_one_run(100 * MS));
    }

    /// The device may have passed the event at any time of the call.
    #[tokio::test(start_paused = true)]
    async fn a_record_that_takes_long_on_an_idle_stream_is_repeated() {
        // One event is recorded at the end.
        for (is_idle, slow, records) in [(true, 0, 2), (true, 1, 3), (true, 2, 4), (true, 10, 4), (false, 10, 2)] {
            let (times, recorded) = measured(|meter, device| {
                device.answer.store(is_idle, Ordering::Relaxed);
                device.slow.store(slow, Ordering::Relaxed);
                meter.work(ON);
                meter.enqueued();
            });
            assert_eq!((times, recorded), (of_one_run(100 * MS), records), "{slow} slow calls, idle: {is_idle}");
        }
    }

    /// An idle device passes the first event while the host is still about to enqueue the work.
    #[test]
    fn the_time_of_the_call_that_enqueues_is_not_device_time() {
        const CALL: Duration = Duration::from_millis(50);
        let stream = Stream::new(&Device::emulated(Emulated::new())).unwrap();
        let (reader, times) = (SpanReader::new(), Arc::new(DeviceTimes::default()));
        let (mut placed, began) = (Vec::new(), Instant::now());
        stream.begin_run(SpanOwner { reader: reader.clone(), run: 0, times: times.clone(), spans: SmallVec::new() });
        // Not a wait for an event: this is the duration that must not count.
        let call = |_: &dyn Backend, _: RawStream| {
            thread::sleep(CALL);
            Ok(())
        };
        stream.enqueue_point(call).unwrap();
        stream.end_run();
        while times.sums().runs == 0 {
            reader.read(Some(&mut |span| placed.push(span)));
        }
        // The device has nothing to do: what is left is the host's own, until the last event is recorded.
        let beside = began.elapsed().saturating_sub(CALL);
        assert!(times.sums().total <= beside, "{:?}, {beside:?} beside the call", times.sums());
        assert!(placed[0].ended - placed[0].began <= beside, "{placed:?}");
    }
}
