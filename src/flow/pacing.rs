//! [`Pacing`]: an ingress whose messages come at a regular pace keeps a worker awake for the next one.
//!
//! Between two messages of a slow source all workers sleep. To wake one takes tens of microseconds, which every message
//! then pays. So in a flow with [`CompletionMode::LowLatency`] the operator of an ingress expects the next message, wakes
//! shortly before it, and spins on its worker until the message is there or overdue. Then it leaves the worker, which
//! finds the reader woken by the sender as its next task. Meanwhile it warms up the device's launches, which are slow
//! after a pause, too.
//!
//! ```text
//!    message        from              expected            until
//!   ────┼─────────────┼──────────────────┼──────────────────┼───────────> time
//!       └── sleeps ───┴── spins ──> the message, or overdue ┘
//!                                    └─> expects the next one: sleeps until then
//! ```
//!
//! With an irregular pace, or one faster than the workers fall asleep, nothing is expected and nothing spins; nor on a runtime
//! with one worker. Of all ingresses whose readers are on one device, one spins at a time: the others find its worker awake.
//!
//! Bench `paced`, one message of 64 KiB a millisecond on an H200, microseconds from the send to the data at the sink, p50
//! (p99), where a thread that spins takes 59 (82) and a full core: 129 (310) at 0.17 cores before this, 82 (152) at 0.39
//! cores with it. A task that always keeps a worker awake gives 70 (137) at 1.5 cores.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Waker},
    time::{Duration, Instant},
};

use tokio::runtime::Handle;

use crate::{
    CompletionMode,
    device::Device,
    operator::Cx,
    stream::{Streams, WakeAlarm},
    sync::wake_again,
};

/// Messages that come faster find the workers awake. Of slower ones, some tens of microseconds are no longer much.
const PERIOD: (Duration, Duration) = (Duration::from_micros(300), Duration::from_millis(100));
/// The bounds of the time that is spent spinning before a message is expected, a quarter of the period: a timer and a worker
/// must wake before that.
const LEAD: (Duration, Duration) = (Duration::from_micros(100), Duration::from_micros(250));
/// How long one poll spins, before other tasks of the worker have their turn.
const BURST: Duration = Duration::from_micros(8);

/// The pace of an ingress, as its senders record it.
pub(super) struct Pacing {
    streams: Arc<Streams>,
    opened: Instant,
    /// The number of messages that were sent.
    sent: AtomicU64,
    /// When the last one was sent: nanoseconds since `opened`.
    last: AtomicU64,
    /// The operator notices a send without being woken by the sender.
    attends: AtomicBool,
    /// The operator's waker.
    operator: Waker,
}

impl Pacing {
    /// For an ingress of the operator with this context. `None` if no message is to be expected.
    pub(super) fn of(cx: &Cx, reader: Option<Device>) -> Option<Self> {
        // The only worker would have no time for the sender, or for what its tasks wait for: on a runtime with one worker, a
        // message every 2 ms took 103 to 220 us in place of 24 to 27.
        let has_more_workers = || Handle::try_current().is_ok_and(|runtime| runtime.metrics().num_workers() > 1);
        let wanted = cx.completion_mode() == CompletionMode::LowLatency && !cx.is_local() && has_more_workers();
        Self::new(reader.filter(|_| wanted)?, cx.waker())
    }

    fn new(reader: Device, operator: Waker) -> Option<Self> {
        // A simulation runs in virtual time, in which nothing takes time to wake.
        (!reader.is_host() && reader.backend().simulation().is_none()).then(|| Self {
            streams: Streams::of(&reader),
            opened: Instant::now(),
            sent: AtomicU64::new(0),
            last: AtomicU64::new(0),
            attends: AtomicBool::new(false),
            operator,
        })
    }

    /// Called after each send.
    pub(super) fn note_send(&self) {
        let now = self.opened.elapsed().as_nanos() as u64;
        let last = self.last.swap(now, Ordering::Relaxed);
        self.sent.fetch_add(1, Ordering::SeqCst);
        let is_slow = now.saturating_sub(last) >= PERIOD.0.as_nanos() as u64;
        if is_slow && !self.attends.load(Ordering::SeqCst) {
            self.operator.wake_by_ref();
        }
    }
}

/// The operator's side.
#[derive(Default)]
pub(super) struct ExpectedSend {
    seen: u64,
    pace: Pace,
    window: Option<Window>,
    alarm: Option<WakeAlarm>,
    spins: Option<SpinSlot>,
}

/// When to spin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    from: Instant,
    until: Instant,
}

/// Held by the one ingress of a device that spins. It expires, since a paused flow is not polled.
struct SpinSlot {
    streams: Arc<Streams>,
    until: u64,
}

impl SpinSlot {
    fn take(streams: &Arc<Streams>, now: Instant, until: Instant) -> Option<Self> {
        let (now, until) = (streams.micros(now), streams.micros(until));
        let free = |taken_until: u64| (taken_until <= now).then_some(until);
        streams.awake_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, free).ok()?;
        Some(Self { streams: streams.clone(), until })
    }
}

impl Drop for SpinSlot {
    fn drop(&mut self) {
        let slot = &self.streams.awake_until;
        // Unless another ingress has it by now.
        let _ = slot.compare_exchange(self.until, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl ExpectedSend {
    /// Called at each poll of the ingress's operator: sleeps, spins for a moment, or expects nothing.
    pub(super) fn poll(&mut self, pacing: &Pacing, task: &Context<'_>) {
        let began = Instant::now();
        let mut now = began;
        loop {
            let sent = pacing.sent.load(Ordering::Acquire);
            if sent != self.seen {
                let spun = self.spins.take().is_some();
                self.note(pacing, sent, now);
                if spun {
                    // The worker is left to the reader. The alarm at the end of the window continues.
                    return;
                }
            }
            match self.window {
                Some(Window { until, .. }) if now >= until => {
                    (self.window, self.alarm, self.spins) = (None, None, None);
                }
                Some(Window { from, .. }) if now < from => return self.sleep(pacing, from),
                Some(Window { until, .. }) => {
                    if self.spins.is_none() {
                        self.spins = SpinSlot::take(&pacing.streams, now, until);
                        // Continues after the window, whatever the worker does then.
                        self.sleep(pacing, until);
                    }
                    if self.spins.is_none() {
                        return;
                    }
                    if now - began >= BURST {
                        pacing.streams.warm_up(now);
                        return wake_again(task.waker());
                    }
                    std::hint::spin_loop();
                }
                None => {
                    pacing.attends.store(false, Ordering::SeqCst);
                    if pacing.sent.load(Ordering::SeqCst) == self.seen {
                        return;
                    }
                }
            }
            now = Instant::now();
        }
    }

    fn note(&mut self, pacing: &Pacing, sent: u64, now: Instant) {
        let at = pacing.opened + Duration::from_nanos(pacing.last.load(Ordering::Relaxed));
        self.pace.sent(at, sent - self.seen);
        self.seen = sent;
        self.window = self.pace.next().filter(|window| now < window.until);
    }

    /// Sets an alarm, unless it is set.
    fn sleep(&mut self, pacing: &Pacing, at: Instant) {
        if self.alarm.as_ref().map(WakeAlarm::at) != Some(at) {
            self.alarm = pacing.streams.monitor().alarm_for(at, pacing.operator.clone());
            pacing.attends.store(self.alarm.is_some(), Ordering::SeqCst);
        }
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

    /// When to spin for the next message, if it is expected.
    fn next(&self) -> Option<Window> {
        let ((mean, deviation), last) = (self.period?, self.last?);
        let [period, spread] = [mean, deviation].map(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let (period, spread) = (period?, spread?);
        if !(PERIOD.0..=PERIOD.1).contains(&period) || spread > LEAD.1.min(period / 4) {
            return None;
        }
        let lead = (period / 4).clamp(LEAD.0, LEAD.1) + spread;
        let expected = last.checked_add(period)?;
        Some(Window { from: expected.checked_sub(lead)?, until: expected.checked_add(lead)? })
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;
    use crate::device::Emulated;

    const MS: Duration = Duration::from_millis(1);

    fn after(pace: &mut Pace, start: Instant, micros: &[u64]) -> Option<Window> {
        for at in micros {
            pace.sent(start + Duration::from_micros(*at), 1);
        }
        pace.next()
    }

    /// Counts how often it is woken.
    #[derive(Default)]
    struct Count(AtomicU64);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn one_ingress_spins_while_its_message_is_expected() {
        let device = Device::emulated(Emulated::new());
        let [operator, task, idle] = [(); 3].map(|()| Arc::new(Count::default()));
        let woken = |count: &Arc<Count>| count.0.load(Ordering::Relaxed);
        let mut pacing = Pacing::new(device.clone(), operator.clone().into()).unwrap();
        let other = Pacing::new(device, Waker::noop().clone()).unwrap();
        assert!(Pacing::new(Device::host(), Waker::noop().clone()).is_none());
        let (waker, idle_waker) = (Waker::from(task.clone()), Waker::from(idle.clone()));
        let (cx, idle_cx) = (Context::from_waker(&waker), Context::from_waker(&idle_waker));

        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let expected = || ExpectedSend { window: Some(Window { from: now, until: now + hour }), ..Default::default() };
        let (mut first, mut second) = (expected(), expected());
        first.poll(&pacing, &cx);
        second.poll(&other, &idle_cx);
        assert_eq!((woken(&task), woken(&idle)), (1, 0), "the first one spins, and the worker is awake for both");
        // The message comes: the worker is left to its reader.
        pacing.note_send();
        first.poll(&pacing, &cx);
        assert_eq!((woken(&task), woken(&operator)), (1, 0));
        second.poll(&other, &idle_cx);
        assert_eq!(woken(&idle), 1, "another one may spin");

        // A paused flow is not polled: its turn ends all the same.
        let paused = SpinSlot::take(&other.streams, now + hour, now + 2 * hour);
        assert!(paused.is_some() && SpinSlot::take(&other.streams, now + hour, now + 2 * hour).is_none());
        assert!(SpinSlot::take(&other.streams, now + 2 * hour, now + 3 * hour).is_some());
        drop(paused);

        // Overdue: it does not spin, and the next send wakes the operator.
        first.window = Some(Window { from: now, until: now });
        first.poll(&pacing, &cx);
        assert_eq!((woken(&task), woken(&operator)), (1, 0));
        pacing.opened -= MS;
        pacing.last.store(0, Ordering::Relaxed);
        pacing.note_send();
        assert_eq!(woken(&operator), 1);
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
        let window = pace.next().unwrap();
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
