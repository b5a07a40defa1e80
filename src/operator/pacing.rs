//! [`Pacing`]: an operator whose messages come from outside, at a regular pace, is awake for the next one.
//!
//! Between two messages of a slow source all workers sleep. To wake one takes tens of microseconds, which every message
//! then pays, and so does its sender. So in a flow with [`CompletionMode::LowLatency`] the reader of an ingress expects
//! the next message: the completion monitor wakes it shortly before, and it spins on its worker until it is woken by
//! the message, or the message is overdue. A wake of a task that [spins](Spinning) costs its sender nothing. Meanwhile
//! the reader warms up the device's launches, which are slow after a pause, too.
//!
//! ```text
//!    message        from              expected            until
//!   ────┼─────────────┼──────────────────┼──────────────────┼───────────> time
//!       └── sleeps ───┴── spins ──> the message, or overdue ┘
//!                                    └─> expects the next one: sleeps until then
//! ```
//!
//! How long before the message it wakes is the time by which such wakes were late. With an irregular pace, or one faster
//! than the workers fall asleep, nothing is expected and nothing spins; nor on a runtime with one worker. One reader of the
//! process spins at a time: the others find its worker awake.
//!
//! Bench `paced`, one message of 64 KiB a millisecond on an H200, microseconds from the send to the data at the sink, p50
//! (p99), where a thread that spins takes 59 (89) and a full core: 134 (349) at 0.17 cores without this, 81 (235) at 0.30
//! cores with it. Tried: the operator of the ingress spins instead, and the sender wakes the reader: 96 (160) to 103 (672)
//! at 0.43 to 0.49. A lead of at most 100 us: the same p50, 258 to 306 at p99, 0.24 cores.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    task::Context,
    time::{Duration, Instant},
};

use tokio::task::coop::has_budget_remaining;

use super::operator_task::OperatorTask;
use crate::{
    CompletionMode,
    condition::Status,
    device::Device,
    operator::Cx,
    stream::{Streams, WakeAlarm},
    sync::{has_more_workers, wake_again},
};

/// Messages that come faster find the workers awake. Of slower ones, some tens of microseconds are no longer much.
const PERIOD: (Duration, Duration) = (Duration::from_micros(300), Duration::from_millis(100));
/// The bounds of the time that is spent spinning before a message is expected: at most a quarter of the period.
const LEAD: (Duration, Duration) = (Duration::from_micros(30), Duration::from_micros(250));
/// An alarm that was set so much too early or too late is not set anew.
const SLACK: Duration = Duration::from_micros(20);
/// How long one poll spins, before other tasks of the worker have their turn.
const BURST: Duration = Duration::from_micros(100);

/// The pace of an ingress, as its senders record it.
pub(crate) struct Pacing {
    streams: Arc<Streams>,
    opened: Instant,
    /// The number of messages that were sent.
    sent: AtomicU64,
    /// When the last one was sent: nanoseconds since `opened`.
    last: AtomicU64,
}

impl Pacing {
    /// For the ingress with this context, the only reader of which is on the device `reader`. `None` if that reader is to
    /// expect no message.
    pub(crate) fn of(cx: &Cx, reader: Option<Device>) -> Option<Arc<Self>> {
        let wanted = cx.completion_mode() == CompletionMode::LowLatency && !cx.is_local();
        let reader = reader.filter(|_| wanted)?;
        let pacing = Arc::new(Self::new(&reader)?);
        let (control, operator) = (cx.flow().0, cx.operator_task().operator());
        let to = control.hubs().of(operator).find(|hub| hub.from == operator)?.to;
        control.tasks[to].expect_messages(&pacing).then_some(pacing)
    }

    fn new(reader: &Device) -> Option<Self> {
        // A simulation runs in virtual time, in which nothing takes time to wake.
        (!reader.is_host() && reader.backend().simulation().is_none()).then(|| Self {
            streams: Streams::of(reader),
            opened: Instant::now(),
            sent: AtomicU64::new(0),
            last: AtomicU64::new(0),
        })
    }

    fn alarm(&self, at: Instant, reader: &Arc<OperatorTask>) -> Option<WakeAlarm> {
        self.streams.monitor().alarm_for(at, reader.clone().into())
    }

    /// Called before each message is sent, whose send wakes the reader.
    pub(crate) fn note_send(&self) {
        self.last.store(self.opened.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.sent.fetch_add(1, Ordering::Release);
    }
}

/// What the reader expects.
#[derive(Default)]
pub(super) struct ExpectedMessage {
    /// Messages that it knows of, and runs of the reader.
    seen: u64,
    runs: u64,
    /// The reader was woken while it spun, and has not yielded since.
    spun: bool,
    pace: Pace,
    lateness: Lateness,
    window: Option<Window>,
    alarm: Option<WakeAlarm>,
    /// For the message after the expected one.
    following: Option<WakeAlarm>,
    spins: Option<SpinSlot>,
}

/// When to spin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    from: Instant,
    until: Instant,
}

/// Until when a reader spins: nanoseconds since [`ORIGIN`].
static SPINS_UNTIL: AtomicU64 = AtomicU64::new(0);
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Held by the one reader that spins. It expires, since a task may be polled no more.
struct SpinSlot {
    until: u64,
}

impl SpinSlot {
    fn take(now: Instant, until: Instant) -> Option<Self> {
        let [now, until] = [now, until].map(|at| at.saturating_duration_since(*ORIGIN).as_nanos() as u64);
        let free = |taken_until: u64| (taken_until <= now).then_some(until);
        SPINS_UNTIL.fetch_update(Ordering::Relaxed, Ordering::Relaxed, free).ok()?;
        Some(Self { until })
    }
}

impl Drop for SpinSlot {
    fn drop(&mut self) {
        // Unless another reader has it by now.
        let _ = SPINS_UNTIL.compare_exchange(self.until, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl ExpectedMessage {
    /// Called after each poll of the reader that is pending: spins for a moment, or sets an alarm. True if the reader was
    /// woken meanwhile, and is to be polled again.
    ///
    /// A task that the reader has just woken waits for this worker, whatever the other workers do. So it spins once at most
    /// before it yields, and only after a poll that ran nothing.
    #[cold]
    pub(super) fn poll(&mut self, pacing: &Pacing, reader: &Arc<OperatorTask>, task: &Context<'_>) -> bool {
        let runs = reader.status_cell().runs();
        let may_spin = std::mem::replace(&mut self.runs, runs) == runs && !self.spun;
        self.spun = self.spin(pacing, reader, task, may_spin);
        self.spun
    }

    fn spin(&mut self, pacing: &Pacing, reader: &Arc<OperatorTask>, task: &Context<'_>, may_spin: bool) -> bool {
        let now = Instant::now();
        let sent = pacing.sent.load(Ordering::Acquire);
        if sent != self.seen {
            self.note(pacing, sent, now);
        }
        let Some(Window { from, until }) = self.window else { return false };
        if now < from {
            if self.alarm.as_ref().map(WakeAlarm::at) != Some(from) {
                self.alarm = pacing.alarm(from, reader);
            }
            return false;
        }
        self.note_wake(now);
        if now >= until {
            (self.window, self.spins, self.following) = (None, None, None);
            return false;
        }
        // One that is ready, or has no budget left, is polled again at once.
        let (status, runs) = reader.status_cell().status();
        let waits = !runs && status != Status::Ready && has_budget_remaining();
        if !waits || !reader.runs_by_itself() {
            return false;
        }
        // The only worker would have no time for the sender, or for what its tasks wait for: there, a message every 2 ms
        // took 103 to 220 us in place of 24 to 27.
        if self.spins.is_none() && has_more_workers() {
            self.spins = SpinSlot::take(now, until);
        }
        if self.spins.is_none() {
            return false;
        }
        if may_spin {
            pacing.streams.warm_up(now);
            if self.following.is_none() {
                // While there is time for it, and not when the message is there.
                self.following = self.pace.period().and_then(|period| pacing.alarm(from.checked_add(period)?, reader));
            }
            if reader.spin_until(until.min(now + BURST)) {
                return true;
            }
        }
        wake_again(task.waker());
        false
    }

    /// Called when the alarm, or an earlier message, has woken the reader.
    fn note_wake(&mut self, now: Instant) {
        if let Some(alarm) = self.alarm.take() {
            self.lateness.note(now.saturating_duration_since(alarm.at()));
        }
    }

    fn note(&mut self, pacing: &Pacing, sent: u64, now: Instant) {
        if self.window.is_some_and(|window| now >= window.from) {
            self.note_wake(now);
        }
        let at = pacing.opened + Duration::from_nanos(pacing.last.load(Ordering::Relaxed));
        self.pace.sent(at, sent - self.seen);
        self.seen = sent;
        self.window = self.pace.next(self.lateness.most).filter(|window| now < window.until);
        (self.alarm, self.spins) = (self.following.take(), None);
        match (&mut self.window, self.alarm.as_ref().map(WakeAlarm::at)) {
            // The alarm that is set will do.
            (Some(window), Some(at)) if at > now && at.max(window.from) - at.min(window.from) <= SLACK => {
                window.from = at;
            }
            _ => self.alarm = None,
        }
    }
}

/// How late the alarms have woken the reader.
#[derive(Debug)]
struct Lateness {
    /// The most, slowly forgotten.
    most: Duration,
}

impl Default for Lateness {
    fn default() -> Self {
        Self { most: LEAD.1 }
    }
}

impl Lateness {
    fn note(&mut self, late: Duration) {
        self.most = if late > self.most { late.min(LEAD.1) } else { self.most - (self.most - late) / 16 };
    }
}

/// The time between messages.
#[derive(Debug, Default)]
struct Pace {
    last: Option<Instant>,
    /// The mean and its mean deviation, in seconds.
    period: Option<(f64, f64)>,
}

impl Pace {
    /// The last of `count` messages was sent at this time.
    fn sent(&mut self, at: Instant, count: u64) {
        let Some(last) = self.last.replace(at) else { return };
        let took = at.saturating_duration_since(last).as_secs_f64() / count as f64;
        self.period = Some(match self.period {
            // A new pace.
            Some((mean, _)) if took > 2.0 * mean || took < mean / 2.0 => (took, took),
            Some((mean, deviation)) => {
                let off = took - mean;
                (mean + off / 4.0, deviation + (off.abs() - deviation) / 4.0)
            }
            None => (took, took),
        });
    }

    fn period(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.period?.0).ok()
    }

    /// When to spin for the next message, if it is expected. `late`: how late the alarm may wake the reader.
    fn next(&self, late: Duration) -> Option<Window> {
        let ((mean, deviation), last) = (self.period?, self.last?);
        let [period, spread] = [mean, deviation].map(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let (period, spread) = (period?, spread?);
        if !(PERIOD.0..=PERIOD.1).contains(&period) || spread > LEAD.1.min(period / 4) {
            return None;
        }
        let lead = late.clamp(LEAD.0, LEAD.1.min(period / 4)) + spread;
        let expected = last.checked_add(period)?;
        Some(Window { from: expected.checked_sub(lead)?, until: expected.checked_add(lead)? })
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Poll, Wake, Waker};

    use super::*;
    use std::sync::atomic::AtomicBool;

    use crate::{device::Emulated, error::Result};

    const MS: Duration = Duration::from_millis(1);

    fn after(pace: &mut Pace, start: Instant, micros: &[u64]) -> Option<Window> {
        for at in micros {
            pace.sent(start + Duration::from_micros(*at), 1);
        }
        pace.next(LEAD.1)
    }

    /// Counts how often it is woken.
    #[derive(Default)]
    struct Count(AtomicU64);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A reader whose task was polled with a waker that counts.
    struct Reader {
        task: Arc<OperatorTask>,
        woken: Arc<Count>,
        expected: ExpectedMessage,
    }

    impl Reader {
        fn new(window: Window) -> Self {
            let expected = ExpectedMessage { window: Some(window), ..Default::default() };
            Self { task: OperatorTask::alone(), woken: Arc::default(), expected }
        }

        /// Polls the task, which finds nothing, and then what it expects.
        fn poll(&mut self, pacing: &Pacing) -> bool {
            let waker = Waker::from(self.woken.clone());
            let task = &mut Context::from_waker(&waker);
            let mut probe = self.task.install_probe_waker();
            self.task.publish(Status::Wait);
            let polled = self.task.poll(&mut probe, task, |_| Poll::<Result<()>>::Pending);
            assert!(polled.is_pending());
            self.expected.poll(pacing, &self.task, task)
        }

        fn wakes(&self) -> u64 {
            self.woken.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn one_reader_spins_while_its_message_is_expected() {
        let device = Device::emulated(Emulated::new());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let _inside = runtime.enter();
        assert!(Pacing::new(&Device::host()).is_none());
        let [pacing, other] = [(); 2].map(|()| Pacing::new(&device).unwrap());
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let window = Window { from: now, until: now + hour };
        let (mut first, mut second) = (Reader::new(window), Reader::new(window));
        assert!(!first.poll(&pacing), "other tasks have their turn");
        assert_eq!(first.wakes(), 1, "and then it spins on");
        assert!(!second.poll(&other));
        assert_eq!(second.wakes(), 0, "the worker is awake for both");

        // A wake within a poll: the spinning poll notices it, and its task is not woken.
        let over = Arc::new(AtomicBool::new(false));
        let sender = std::thread::spawn({
            let (task, over) = (first.task.clone(), over.clone());
            move || {
                while !over.load(Ordering::Relaxed) {
                    task.wake_by_ref();
                }
            }
        });
        while !first.poll(&pacing) {}
        over.store(true, Ordering::Relaxed);
        sender.join().unwrap();
        let wakes = first.wakes();
        // The message ends the window.
        pacing.note_send();
        assert!(!first.poll(&pacing));
        assert_eq!(first.wakes(), wakes);
        assert!(!second.poll(&other));
        assert_eq!(second.wakes(), 1, "another one may spin");

        // A task that is polled no more: its turn ends all the same.
        let paused = SpinSlot::take(now + hour, now + 2 * hour);
        assert!(paused.is_some() && SpinSlot::take(now + hour, now + 2 * hour).is_none());
        assert!(SpinSlot::take(now + 2 * hour, now + 3 * hour).is_some());
        drop(paused);

        // Overdue.
        let mut overdue = Reader::new(Window { from: now, until: now });
        assert!(!overdue.poll(&pacing));
        assert_eq!((overdue.wakes(), overdue.expected.window), (0, None));
    }

    #[test]
    fn nothing_spins_on_a_runtime_with_one_worker() {
        let pacing = Pacing::new(&Device::emulated(Emulated::new())).unwrap();
        let window = Window { from: Instant::now(), until: Instant::now() + Duration::from_secs(3600) };
        let mut reader = Reader::new(window);
        assert!(!reader.poll(&pacing), "outside of a runtime");
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let inside = runtime.enter();
        assert!(!reader.poll(&pacing));
        assert_eq!(reader.wakes(), 0);
        drop(inside);
    }

    #[test]
    fn the_lead_is_as_long_as_wakes_were_late() {
        let mut lateness = Lateness::default();
        let micros = Duration::from_micros;
        for _ in 0..1000 {
            lateness.note(micros(40));
        }
        assert!(lateness.most < micros(41), "{lateness:?}");
        lateness.note(micros(90));
        assert_eq!(lateness.most, micros(90));
        lateness.note(micros(40));
        assert!(lateness.most > micros(80), "{lateness:?}");
        lateness.note(MS);
        assert_eq!(lateness.most, LEAD.1);
    }

    #[test]
    fn a_regular_pace_is_expected_to_continue() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        assert_eq!(after(&mut pace, start, &[0, 1000]), None, "one period is no pace");
        let window = after(&mut pace, start, &[2000, 3010, 3990, 5000, 6000, 7000, 8005, 9000]).unwrap();
        let next = start + 10 * MS;
        assert!(window.from < next && window.until > next, "{window:?}");
        assert!(window.until - window.from < MS, "{window:?}");
        // A message that the operator has missed.
        pace.sent(start + 11 * MS, 2);
        let window = pace.next(LEAD.1).unwrap();
        assert!(window.from < start + 12 * MS && window.until > start + 12 * MS, "{window:?}");
    }

    #[test]
    fn nothing_is_expected_of_an_irregular_or_fast_source() {
        let start = Instant::now();
        let irregular = [0, 1000, 1900, 4000, 4300, 6900, 7000, 9000];
        assert_eq!(after(&mut Pace::default(), start, &irregular), None);
        let fast: Vec<_> = (0..50).map(|at| at * 20).collect();
        assert_eq!(after(&mut Pace::default(), start, &fast), None);
        let slow: Vec<_> = (0..50).map(|at| at * 10_000_000).collect();
        assert_eq!(after(&mut Pace::default(), start, &slow), None);
        // After a pause of a day, until the pace is back.
        let mut pace = Pace::default();
        assert!(after(&mut pace, start, &(0..20).map(|at| at * 1000).collect::<Vec<_>>()).is_some());
        assert_eq!(after(&mut pace, start, &[86_400_000_000]), None);
        let back: Vec<_> = (1..20).map(|at| 86_400_000_000 + at * 1000).collect();
        assert!(after(&mut pace, start, &back).is_some());
    }
}
