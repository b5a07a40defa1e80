//! [`FlightRecorder`]: the last events of each thread that runs observed flows, from [tracepoints](crate::tracepoint).
//!
//! ```text
//!   thread 1 ──record──> Ring ─┐
//!   thread 2 ──record──> Ring ─┼──copy──> events of one flow in a window, sorted, and how many of them are lost
//!   thread 3 ──record──> Ring ─┘
//! ```
//!
//! A thread finds its ring in a thread-local, and only it writes there: an event costs a reading of the clock and a few
//! stores. One recorder's rings have the events of all flows that it records. The number of events that were
//! overwritten within a window follows from how many a ring had at what time, which the observer's thread notes now and
//! then.
//!
//! The ring of a thread that has ended is kept for as long as its events may be in the window, but of no more than
//! [`MOST_ENDED`] threads. Those of a recorder that is gone are freed when their thread ends or next finds a new ring.

use std::{
    cell::RefCell,
    collections::VecDeque,
    fmt,
    mem::ManuallyDrop,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
};

use super::{
    ring::{Entry, Ring, RingWriter},
    timeline::TimelineEvent,
};
use crate::{
    operator::control::Control,
    sync::{Mutex, lock},
    tracepoint::{PackedEvent, TraceAxis, TraceSink},
};

/// Events for which memory is allocated at once: 24 KiB.
const SEGMENT: usize = 1024;
/// The bounds of the number of events that are kept of a thread.
const EVENTS: (usize, usize) = (SEGMENT, 1 << 24);
/// Rings of threads that have ended.
const MOST_ENDED: usize = 64;
/// How often the counts of a ring are noted in the kept time.
const NOTES: u64 = 512;

thread_local! {
    /// The rings of this thread. Without a destructor: whether that has run would be checked at each event.
    static RINGS: ManuallyDrop<RefCell<RingsOfThread>> =
        const { ManuallyDrop::new(RefCell::new(RingsOfThread::NONE)) };
    /// Its first access registers its destructor, which drops the rings.
    static GUARD: RingsGuard = const { RingsGuard };
}

type ThreadRing = Ring<SEGMENT>;
type ThreadWriter = RingWriter<SEGMENT>;

/// By the numbers of their recorders.
struct RingsOfThread {
    /// The one that was used last.
    last: Option<(u32, ThreadWriter)>,
    others: Vec<(u32, ThreadWriter)>,
}

impl RingsOfThread {
    const NONE: Self = Self { last: None, others: Vec::new() };
}

/// Drops the rings at the end of the thread.
struct RingsGuard;

impl Drop for RingsGuard {
    fn drop(&mut self) {
        let rings = RINGS.try_with(|rings| {
            rings.try_borrow_mut().ok().map(|mut rings| std::mem::replace(&mut *rings, RingsOfThread::NONE))
        });
        drop(rings);
    }
}

/// See the [module](self).
pub(super) struct FlightRecorder {
    number: u32,
    capacity: usize,
    flows: AtomicU32,
    threads: Mutex<Vec<RecordedThread>>,
    /// Rings that were freed: the time of the last event, and the number of all.
    freed: Mutex<VecDeque<(u64, u64)>>,
    /// Events of threads whose thread-locals are gone.
    homeless: AtomicU64,
}

/// The ring of one thread.
struct RecordedThread {
    name: String,
    ring: Arc<ThreadRing>,
    /// How many events it had at what time, on the axis of nanoseconds.
    counts: VecDeque<(u64, u64)>,
}

/// Records one run of a flow.
#[derive(Debug)]
pub(super) struct FlowSink {
    recorder: Arc<FlightRecorder>,
    /// That of the recorder.
    number: u32,
    /// Its number, in the free bits of an event.
    flow: u64,
    stalled: AtomicBool,
}

/// The events of a flow in a window.
pub(super) struct FlightEvents {
    /// From when all events are known: not before the first one of a ring that was overwritten in the window.
    pub(super) from: u64,
    pub(super) threads: Vec<String>,
    /// Sorted by time.
    pub(super) events: Vec<TimelineEvent>,
    /// Events of the window that were overwritten, of any flow, or had no ring; and those before `from`.
    pub(super) lost: u64,
}

impl FlightRecorder {
    /// `events`: of each thread, rounded up to a power of two.
    pub(super) fn new(events: usize) -> Arc<Self> {
        static NUMBERS: AtomicU32 = AtomicU32::new(0);
        Arc::new(Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            capacity: events.clamp(EVENTS.0, EVENTS.1).next_power_of_two(),
            flows: AtomicU32::new(0),
            threads: Mutex::default(),
            freed: Mutex::default(),
            homeless: AtomicU64::new(0),
        })
    }

    pub(super) fn flow(self: &Arc<Self>) -> Arc<FlowSink> {
        let flow = PackedEvent::free(self.flows.fetch_add(1, Ordering::Relaxed));
        Arc::new(FlowSink { recorder: self.clone(), number: self.number, flow, stalled: AtomicBool::new(false) })
    }

    /// The sink that a run of a flow was given.
    pub(super) fn sink_of(&self, flow: &Control) -> Option<Arc<FlowSink>> {
        let given = flow.watched()?.recordings.iter().filter_map(|known| known.clone().downcast::<FlowSink>().ok());
        given.into_iter().find(|sink| std::ptr::eq(&*sink.recorder, self))
    }

    /// Where the entry begins a segment, the thread's last event was another recorder's, or its thread-locals are gone.
    #[cold]
    #[inline(never)]
    fn push_elsewhere(&self, entry: Entry) {
        // An error at the end of the thread, when the rings are dropped.
        let guarded = GUARD.try_with(|_| ());
        let pushed = guarded.and_then(|()| {
            RINGS.try_with(|rings| {
                // Borrowed already only if the allocator of the program runs a flow.
                let RingsOfThread { last, others } = &mut *rings.try_borrow_mut().ok()?;
                others.extend(last.take());
                let mut writer = match others.iter().position(|(number, _)| *number == self.number) {
                    Some(at) => others.swap_remove(at).1,
                    None => {
                        // Those of recorders that are gone.
                        others.retain(|(_, writer)| Arc::strong_count(writer.ring()) > 1);
                        self.new_ring()
                    }
                };
                writer.push(entry);
                *last = Some((self.number, writer));
                Some(())
            })
        });
        if pushed.ok().flatten().is_none() {
            self.homeless.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn new_ring(&self) -> ThreadWriter {
        let (ring, writer) = ThreadRing::new(self.capacity);
        let current = thread::current();
        let name = current.name().map_or_else(|| format!("{:?}", current.id()), Into::into);
        let mut threads = lock(&self.threads);
        let ended = threads.iter().filter(|thread| thread.has_ended()).count();
        let mut surplus = (ended + 1).saturating_sub(MOST_ENDED);
        let gone: Vec<_> = threads
            .extract_if(.., |thread| {
                let goes = surplus > 0 && thread.has_ended();
                surplus -= usize::from(goes);
                goes
            })
            .collect();
        threads.push(RecordedThread { name, ring, counts: VecDeque::new() });
        drop(threads);
        self.forget(gone);
        writer
    }

    /// Frees rings. Their events count as lost where they are in a window: also in that of a flow that ended before.
    fn forget(&self, gone: Vec<RecordedThread>) {
        let mut freed = lock(&self.freed);
        for thread in &gone {
            let Some([at, ..]) = thread.ring.last() else { continue };
            let mut count = thread.ring.written();
            if freed.len() == MOST_ENDED {
                count += freed.pop_front().map_or(0, |(_, count)| count);
            }
            freed.push_back((at, count));
        }
        drop(freed);
        drop(gone);
    }

    /// Notes how many events each ring has, and frees those of threads that have ended and whose last event is older than
    /// `keep` nanoseconds. For the observer's thread, now and then.
    pub(super) fn note(&self, now: u64, keep: u64, axis: &TraceAxis) {
        let mut threads = lock(&self.threads);
        let from = now.saturating_sub(keep);
        let gone: Vec<_> = threads
            .extract_if(.., |thread| {
                thread.has_ended() && thread.ring.last().is_none_or(|[at, ..]| axis.nanos(at) < from)
            })
            .collect();
        for thread in &mut *threads {
            if thread.counts.back().is_none_or(|(last, _)| now.saturating_sub(*last) >= keep / NOTES) {
                thread.counts.push_back((now, thread.ring.written()));
            }
            while thread.counts.get(1).is_some_and(|(second, _)| *second < from) {
                thread.counts.pop_front();
            }
        }
        drop(threads);
        self.forget(gone);
    }

    /// The events of a flow between two times on the axis. `ends`: the writer and the reader of each of its hubs.
    pub(super) fn events(
        &self,
        flow: &FlowSink,
        axis: &TraceAxis,
        (from, to): (u64, u64),
        ends: &[(u32, u32)],
    ) -> FlightEvents {
        let rings: Vec<_> = lock(&self.threads)
            .iter()
            .map(|thread| (thread.name.clone(), thread.ring.clone(), thread.written_until(from)))
            .collect();
        let freed: u64 =
            lock(&self.freed).iter().filter(|(at, _)| axis.nanos(*at) >= from).map(|(_, count)| count).sum();
        let lost = self.homeless.load(Ordering::Relaxed) + freed;
        let mut found = FlightEvents { from, threads: Vec::new(), events: Vec::new(), lost };
        let mut entries = Vec::new();
        for (name, ring, before) in rings {
            entries.clear();
            let copy = ring.copy(0, &mut entries);
            let first = entries.first().map_or(u64::MAX, |[at, ..]| axis.nanos(*at));
            let overwritten = copy.first.saturating_sub(before);
            if first > from && overwritten > 0 {
                found.lost += overwritten;
                found.from = found.from.max(first.min(to));
            }
            let thread = found.threads.len() as u32;
            let events = entries.iter().filter_map(|[at, word, number]| {
                let event = Some(PackedEvent { word: *word, number: *number })
                    .filter(|event| event.word & PackedEvent::FREE == flow.flow)?;
                let at = axis.nanos(*at);
                let event = event.unpack(ends).filter(|_| (from..=to).contains(&at))?;
                Some(TimelineEvent { at, thread, event })
            });
            let known = found.events.len();
            found.events.extend(events);
            if found.events.len() > known {
                found.threads.push(name);
            }
        }
        found.events.sort_by_key(|event| event.at);
        let unknown = found.events.partition_point(|event| event.at < found.from);
        found.events.drain(..unknown);
        found.lost += unknown as u64;
        found
    }
}

impl RecordedThread {
    fn has_ended(&self) -> bool {
        Arc::strong_count(&self.ring) == 1
    }

    /// How many events it had at a time, as far as that was noted.
    fn written_until(&self, at: u64) -> u64 {
        let after = self.counts.partition_point(|(noted, _)| *noted <= at);
        let Some((before, count)) = after.checked_sub(1).map(|last| self.counts[last]) else { return 0 };
        let Some((next, more)) = self.counts.get(after) else { return count };
        let share = (at - before) as f64 / (next - before).max(1) as f64;
        count + ((more - count) as f64 * share) as u64
    }
}

impl FlowSink {
    pub(super) fn recorder(&self) -> &Arc<FlightRecorder> {
        &self.recorder
    }

    /// True if operators have stalled since the last call.
    pub(super) fn take_stall(&self) -> bool {
        self.stalled.swap(false, Ordering::Relaxed)
    }
}

impl TraceSink for FlowSink {
    fn takes_late(&self) -> bool {
        true
    }

    fn record(&self, at: u64, event: PackedEvent) {
        if event.is_stall() {
            self.stalled.store(true, Ordering::Relaxed);
        }
        let entry = [at, event.word | self.flow, event.number];
        let pushed = RINGS.try_with(|rings| match rings.try_borrow_mut().as_deref_mut() {
            Ok(RingsOfThread { last: Some((number, writer)), .. }) if *number == self.number => {
                writer.push_in_segment(entry)
            }
            _ => false,
        });
        if pushed != Ok(true) {
            self.recorder.push_elsewhere(entry);
        }
    }
}

impl fmt::Debug for FlightRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let threads = lock(&self.threads).len();
        f.debug_struct("FlightRecorder").field("events", &self.capacity).field("threads", &threads).finish()
    }
}

#[cfg(test)]
mod tests;
