//! [`Tracepoints`]: the points in a flow's run at which observers are called, with a [`TraceEvent`] each.
//!
//! A flow that no observer traces pays a bit in words that it loads anyway: the state of an operator's task, what its runs
//! prepare, and a flag of each hub. All else is behind calls that are not inlined.
//!
//! ```text
//!   poll of a task    OperatorTask::poll       TracedPolls ────┐
//!   run               Cx::begin_run, end_run   TracedRuns ─────┤
//!   message           HubCore::push, take      TracedHub ──────┼──> Tracepoints ──> each TraceSink
//!   stall, failure    supervisor, Control      ────────────────┘
//! ```

mod clock;
mod event;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

pub(crate) use clock::{TraceAxis, TraceClock, tokio_nanos};
pub(crate) use event::{OUTSIDE, PackedEvent, TraceEvent};

use crate::device::ticks::Ticks;

/// What is called at the tracepoints of a flow's run, on the thread where the event happens. It must not block, call into the
/// flow, or panic.
pub(crate) trait TraceSink: Send + Sync + fmt::Debug {
    /// `at`: the time by the flow's [`TraceClock`]. The bits [`PackedEvent::FREE`] of the event are zero.
    fn record(&self, at: u64, event: PackedEvent);

    /// Whether it may be called with an event of the past.
    fn takes_late(&self) -> bool;
}

impl<S: TraceSink> TraceSink for Arc<S> {
    #[inline]
    fn record(&self, at: u64, event: PackedEvent) {
        (**self).record(at, event);
    }

    fn takes_late(&self) -> bool {
        (**self).takes_late()
    }
}

/// The sinks of one flow's run. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Tracepoints(Arc<TracepointsState>);

#[derive(Debug)]
struct TracepointsState {
    clock: TraceClock,
    /// One sink, and the processor's counter as the clock: all but the call of the sink is inlined in the tracepoint.
    is_short: bool,
    /// Each sink takes an event of the past.
    takes_late: bool,
    first: Box<dyn TraceSink>,
    others: Box<[Box<dyn TraceSink>]>,
    /// By operator, if its runs may overlap: the number of its runs.
    runs: Box<[AtomicU64]>,
}

impl Tracepoints {
    /// `None` without a sink.
    pub(crate) fn new(clock: TraceClock, sinks: Vec<Box<dyn TraceSink>>, operators: usize) -> Option<Self> {
        let runs = (0..operators).map(|_| AtomicU64::new(0)).collect();
        let mut sinks = sinks.into_iter();
        let (first, others) = (sinks.next()?, sinks.collect::<Box<[_]>>());
        let is_short = others.is_empty() && !clock.is_paused();
        let takes_late = !clock.is_paused() && others.iter().chain([&first]).all(|sink| sink.takes_late());
        Some(Self(Arc::new(TracepointsState { clock, is_short, takes_late, first, others, runs })))
    }

    /// For code that is not inlined where nothing is traced.
    #[allow(clippy::inline_always, reason = "the event is packed where it is known: see `TraceEvent::pack`")]
    #[inline(always)]
    pub(crate) fn record(&self, event: TraceEvent) {
        let (state, event) = (&*self.0, event.pack());
        if state.is_short { state.first.record(Ticks::now().count(), event) } else { self.record_in_all(None, event) }
    }

    pub(crate) fn clock(&self) -> &TraceClock {
        &self.0.clock
    }

    #[inline]
    fn now(&self) -> u64 {
        self.0.clock.now()
    }

    #[inline]
    fn record_at(&self, at: u64, event: PackedEvent) {
        let state = &*self.0;
        if state.is_short { state.first.record(at, event) } else { self.record_in_all(Some(at), event) }
    }

    #[cold]
    #[inline(never)]
    fn record_in_all(&self, at: Option<u64>, event: PackedEvent) {
        let at = at.unwrap_or_else(|| self.now());
        self.0.first.record(at, event);
        self.0.others.iter().for_each(|sink| sink.record(at, event));
    }

    pub(crate) fn polls(&self, operator: usize) -> TracedPolls {
        TracedPolls { points: self.clone(), operator: number(operator), open: AtomicU64::new(0) }
    }

    pub(crate) fn runs(&self, operator: usize, may_overlap: bool) -> TracedRuns {
        let numbers = if may_overlap { numbers::SHARED } else { numbers::OWN };
        TracedRuns {
            points: self.clone(),
            operator: number(operator),
            numbers: AtomicU8::new(numbers),
            begun: AtomicU64::new(0),
        }
    }

    /// A hub between two operators.
    pub(crate) fn hub(&self, hub: usize, from: usize, to: usize) -> TracedHub {
        let (hub, from, to) = (number(hub), number(from), number(to));
        TracedHub { points: self.clone(), hub, from, to, sent: AtomicU64::new(0) }
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(OUTSIDE)
}

/// The tracepoints of the polls of an operator's task.
///
/// A task that waits for a device may ask it in one poll after the other, a million times a second. The begin of such a poll is
/// recorded when it ends, and only if it was more than that question: otherwise those polls would fill a recorder within
/// milliseconds.
#[derive(Debug)]
pub(crate) struct TracedPolls {
    points: Tracepoints,
    operator: u32,
    /// When the poll began that is not recorded yet. Zero: there is none.
    open: AtomicU64,
}

impl TracedPolls {
    /// `asks`: the last poll waited for a device, so this one may only ask whether the work is done.
    #[inline(never)]
    pub(crate) fn begin(&self, asks: bool) {
        if asks && self.points.0.takes_late {
            return self.open.store(self.points.now().max(1), Ordering::Relaxed);
        }
        self.points.record(TraceEvent::PollBegan { operator: self.operator });
    }

    /// `asks`: this poll waits for a device, too.
    #[inline(never)]
    pub(crate) fn end(&self, asks: bool) {
        if self.open.load(Ordering::Relaxed) != 0 {
            return self.end_open(asks);
        }
        self.points.record(TraceEvent::PollEnded { operator: self.operator });
    }

    #[cold]
    #[inline(never)]
    fn end_open(&self, asks: bool) {
        let (operator, now) = (self.operator, self.points.now());
        let began = self.open.swap(0, Ordering::Relaxed);
        if asks && now.saturating_sub(began) < QUESTION {
            return;
        }
        self.points.record_at(began, TraceEvent::PollBegan { operator }.pack());
        self.points.record_at(now, TraceEvent::PollEnded { operator }.pack());
    }
}

/// For another task of the operator.
impl Clone for TracedPolls {
    fn clone(&self) -> Self {
        Self { points: self.points.clone(), operator: self.operator, open: AtomicU64::new(0) }
    }
}

/// A poll that takes so many ticks, some 60 to 100 us, does more than ask a device: it asks for 40 us at most
/// (`stream/wait_strategy.rs`).
const QUESTION: u64 = 200_000;

/// The tracepoints of one task's runs of an operator.
#[derive(Debug)]
pub(crate) struct TracedRuns {
    points: Tracepoints,
    operator: u32,
    /// One of [`numbers`].
    numbers: AtomicU8,
    /// One more than the number of the run that began last.
    begun: AtomicU64,
}

/// Where the numbers of runs come from.
mod numbers {
    /// The task runs alone: from its own count.
    pub(super) const OWN: u8 = 0;
    /// Runs of other tasks overlap: from the operator's count.
    pub(super) const SHARED: u8 = 1;
    /// None: its workers' runs are traced instead.
    pub(super) const NONE: u8 = 2;
}

impl TracedRuns {
    /// Called before the first run of an operator whose task hands each run to a worker.
    pub(crate) fn hand_over(&self) {
        self.numbers.store(numbers::NONE, Ordering::Relaxed);
    }

    #[inline(never)]
    pub(crate) fn begin(&self) {
        if self.numbers.load(Ordering::Relaxed) != numbers::OWN {
            return self.begin_shared();
        }
        // Only the operator's own task executes this.
        self.begin_numbered(self.begun.load(Ordering::Relaxed));
    }

    #[inline(never)]
    fn begin_shared(&self) {
        let Self { points, operator, .. } = self;
        if self.numbers.load(Ordering::Relaxed) == numbers::SHARED {
            let runs = points.0.runs.get(*operator as usize);
            let own = || self.begun.load(Ordering::Relaxed);
            self.begin_numbered(runs.map_or_else(own, |runs| runs.fetch_add(1, Ordering::Relaxed)));
        }
    }

    #[inline]
    fn begin_numbered(&self, run: u64) {
        let Self { points, operator, .. } = self;
        self.begun.store(run + 1, Ordering::Relaxed);
        points.record(TraceEvent::RunBegan { operator: *operator, run });
    }

    /// The number of the run in progress. Before the first run it is zero.
    pub(crate) fn current(&self) -> u64 {
        self.begun.load(Ordering::Relaxed).saturating_sub(1)
    }

    #[inline(never)]
    pub(crate) fn end(&self) {
        if self.numbers.load(Ordering::Relaxed) == numbers::NONE {
            return;
        }
        let Self { points, operator, .. } = self;
        points.record(TraceEvent::RunEnded { operator: *operator, run: self.current() });
    }
}

/// The tracepoints of a hub.
#[derive(Debug)]
pub(crate) struct TracedHub {
    points: Tracepoints,
    hub: u32,
    from: u32,
    to: u32,
    /// Messages that were accepted. Written by the hub's one writer: the same number as the queue's own.
    sent: AtomicU64,
}

impl TracedHub {
    /// Calls `push`, which returns whether the queue has accepted a message. The reader may take it before `push` returns,
    /// so the time is read before.
    pub(crate) fn send<R>(&self, is_outside: bool, push: impl FnOnce() -> R, is_sent: impl FnOnce(&R) -> bool) -> R {
        let at = self.points.now();
        let pushed = push();
        if is_sent(&pushed) {
            let message = self.sent.load(Ordering::Relaxed) + 1;
            self.sent.store(message, Ordering::Relaxed);
            let operator = if is_outside { OUTSIDE } else { self.from };
            self.points.record_at(at, TraceEvent::Sent { operator, hub: self.hub, message }.pack());
        }
        pushed
    }

    pub(crate) fn taken(&self, message: u64) {
        self.points.record(TraceEvent::Taken { operator: self.to, hub: self.hub, message });
    }
}

/// For another run of the flow.
impl Clone for TracedHub {
    fn clone(&self) -> Self {
        let Self { points, hub, from, to, .. } = self;
        Self { points: points.clone(), hub: *hub, from: *from, to: *to, sent: AtomicU64::new(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{Mutex, lock};

    #[derive(Debug, Default)]
    struct Events(Mutex<Vec<(u64, TraceEvent)>>, bool);

    impl TraceSink for Events {
        fn record(&self, at: u64, event: PackedEvent) {
            lock(&self.0).extend(event.unpack(&[]).map(|event| (at, event)));
        }

        fn takes_late(&self) -> bool {
            self.1
        }
    }

    fn points(sinks: &[&Arc<Events>]) -> Tracepoints {
        let sinks = sinks.iter().map(|sink| Box::new(Arc::clone(sink)) as Box<dyn TraceSink>).collect();
        Tracepoints::new(TraceClock::here(), sinks, 1).unwrap()
    }

    const BEGAN: TraceEvent = TraceEvent::PollBegan { operator: 0 };
    const ENDED: TraceEvent = TraceEvent::PollEnded { operator: 0 };

    fn taken(events: &Events) -> Vec<TraceEvent> {
        std::mem::take(&mut *lock(&events.0)).into_iter().map(|(_, event)| event).collect()
    }

    /// They would leave no room in a recorder for the rest.
    #[test]
    fn polls_that_only_ask_a_device_are_not_recorded() {
        let events = Arc::new(Events(Mutex::default(), true));
        let points = points(&[&events]);
        let polls = points.polls(0);
        let ask = || {
            polls.begin(true);
            polls.end(true);
            taken(&events).is_empty()
        };
        // A poll in which the thread was preempted is recorded.
        assert!((0..1000).any(|_| ask()));
        polls.begin(false);
        polls.end(true);
        assert_eq!(taken(&events), [BEGAN, ENDED], "it has found the device busy");
        polls.begin(true);
        let between = points.now();
        polls.end(false);
        let [(began, BEGAN), (ended, ENDED)] = lock(&events.0)[..] else { panic!("{events:?}") };
        assert!(began <= between && between <= ended, "the device was done: the poll began before");
        taken(&events);
        polls.begin(true);
        let began = points.now();
        while points.now() < began + 2 * QUESTION {}
        polls.end(true);
        assert_eq!(taken(&events), [BEGAN, ENDED], "it took longer than a question");
    }

    #[test]
    fn a_sink_that_takes_nothing_late_has_all_polls() {
        let (late, now) = [true, false].map(|late| Arc::new(Events(Mutex::default(), late))).into();
        for sinks in [&[&now][..], &[&late, &now]] {
            let polls = points(sinks).polls(0);
            polls.begin(true);
            polls.end(true);
            sinks.iter().for_each(|sink| assert_eq!(taken(sink), [BEGAN, ENDED]));
        }
    }
}
