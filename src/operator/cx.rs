//! [`Cx`]: what an operator is given beside its ports.

use std::{
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use super::{
    Operator, Ports,
    lane::{Lane, OwnStreams},
    node::{Method, Node},
    seat::How,
};
use crate::{
    condition::{self, Awaited, Readiness},
    device::{Device, ticks::Ticks},
    error::{Error, ErrorKind, Result},
    memory::HostAccess,
    stream::{DeviceTime, Stream, Ticket},
};

/// As many runs as tokio lets a task have operations at a stretch.
const LONGEST_STREAK: u32 = 128;

/// An operator's surroundings: its name, its device and stream, and the wait for its next run.
pub struct Cx {
    name: Arc<str>,
    device: Device,
    /// `None` on the host. Gives its streams back when it is dropped, after the operator's `stop`.
    pub(crate) lane: Option<Arc<Lane>>,
    /// The stream for its work, once asked for: its own, or this run's.
    stream: Option<Stream>,
    /// Its runs are timed on the device, where they have a stream of their own.
    timed: bool,
    node: Arc<Node>,
    finished: bool,
    /// What the next run waits for.
    awaited: Awaited,
    /// Whether the operator's `may_run` and `after` are called: until it is known that it has none of its own.
    asks_may_run: bool,
    calls_after: bool,
    /// Runs since it last let others have a turn.
    streak: u32,
    pub(crate) runs: u64,
    /// In ticks.
    pub(crate) busy: u64,
    /// In a run.
    running: bool,
    /// When the present run began, or the first of those since it last waited.
    busy_since: Option<Ticks>,
}

impl Cx {
    pub(crate) fn new(name: Arc<str>, device: Device, streams: &OwnStreams, node: Arc<Node>, how: How) -> Self {
        let How { mode, timed } = how;
        Self {
            lane: Lane::new(&name, &device, streams, mode),
            name,
            device,
            stream: None,
            timed,
            node,
            finished: false,
            awaited: Awaited::new(),
            asks_may_run: true,
            calls_after: true,
            streak: 0,
            runs: 0,
            busy: 0,
            running: false,
            busy_since: None,
        }
    }

    /// The operator's name in the flow.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device it was put on; the host if none.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The operator's own stream: taken from its pool at its first use, the same ever after. What it touches is ordered
    /// onto it, and what it sends carries that order along, without a call. Messages without envelopes are ordered onto it
    /// as they are taken.
    ///
    /// If it has none of its own, because it [was asked not to](crate::flow::Added::without_own_stream) or because its
    /// pool was used up when it asked first: the stream that the first message of this run came with, which all others
    /// join; and if none came with one, the device's default stream, which is not sent on.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for an operator on the host; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn stream(&mut self) -> Result<&Stream> {
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = self.lane()?.stream()?;
                if self.running
                    && let Some(timed) = self.timed_stream()
                {
                    timed.begin_run();
                }
                stream
            }
        };
        Ok(self.stream.insert(stream))
    }

    /// A further stream of the operator's, from its pool: the same for the same name, and another than
    /// [`stream`](Self::stream). Outputs carry it only after [`Output::set_stream`](super::Output::set_stream), and
    /// messages without envelopes are not ordered onto it by themselves: [`Stream::join`] them.
    ///
    /// It is given back with the operator's own stream, when the flow ends.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for an operator on the host or without streams of its own, or if its pool is used up;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn stream_named(&mut self, name: &str) -> Result<Stream> {
        self.lane()?.named(name)
    }

    fn lane(&self) -> Result<&Lane> {
        self.lane.as_deref().ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!("`{}` is on the host, which has no streams: put it on a device with `.on(&device)`", self.name),
            )
        })
    }

    /// This run is the operator's last: it ends after it, as a source does that has no more.
    pub fn finish(&mut self) {
        self.finished = true;
    }

    /// The operator's next run also waits for this, with all its other conditions: for the data of a buffer that no
    /// message carries. It is woken when that is available, or, with an error where it uses the buffer, when the device
    /// is lost.
    ///
    /// ```
    /// use wakeline::prelude::*;
    ///
    /// /// Sends what its device has computed, and never waits in the middle of a run.
    /// struct Results {
    ///     results: Buffer<f32>,
    /// }
    ///
    /// #[derive(Ports)]
    /// struct ResultsPorts {
    ///     #[output]
    ///     first: Output<f32>,
    /// }
    ///
    /// impl Operator for Results {
    ///     type Ports = ResultsPorts;
    ///
    ///     async fn start(&mut self, cx: &mut Cx) -> Result<()> {
    ///         cx.run_after(self.results.available());
    ///         Ok(())
    ///     }
    ///
    ///     async fn compute(&mut self, ports: &mut ResultsPorts, cx: &mut Cx) -> Result<()> {
    ///         cx.finish();
    ///         ports.first.send(self.results.as_slice()?[0]).await
    ///     }
    /// }
    /// ```
    pub fn run_after(&mut self, available: HostAccess) {
        self.awaited.push(available);
    }

    /// Wakes the operator, to ask its conditions and its [`may_run`](super::Operator::may_run) again: for whoever changes
    /// what that depends on. It holds no flow up: one in which nobody can run meanwhile is at its end.
    pub fn waker(&self) -> Waker {
        Waker::from(self.node.clone())
    }

    /// Waits until the operator may run, and begins the run: all conditions are ready and what they promise is claimed.
    /// False if it may never run again. For operators that override [`run`](super::Operator::run).
    ///
    /// # Cancel safety
    /// Nothing is taken from a port before it resolves; dropping it changes nothing. While it waits, and only then, the
    /// operator counts as one that waits for others: a flow of which all do is at its end.
    pub async fn ready<P: Ports>(&mut self, ports: &mut P) -> bool {
        self.asks_may_run = false;
        self.until_ready(ports, |_, _| true).await
    }

    /// Whether a run has ended after which [`after`](Self::after) is to be called.
    #[inline]
    pub(super) fn has_run(&self) -> bool {
        self.calls_after && self.running
    }

    /// A run has ended: what the operator does when its device work is done, too.
    pub(super) async fn after<O: Operator + ?Sized>(&mut self, operator: &mut O, ports: &mut O::Ports) -> Result<()> {
        self.end_run();
        self.stop_clock();
        let node = self.node.clone();
        let last = self.lane.as_ref().map(|lane| lane.run_ends()).unwrap_or_default();
        // This runs nothing of an `async fn`, and says whether there is one.
        let after = operator.after(ports, self);
        if node.is_default(Method::After) {
            drop(after);
            self.calls_after = false;
            return Ok(());
        }
        for last in last {
            last.completed().await?;
        }
        after.await
    }

    /// As [`ready`](Self::ready), with what the operator's own `may_run` has to say.
    #[inline]
    pub(super) async fn until_ready<P: Ports>(
        &mut self,
        ports: &mut P,
        mut may_run: impl FnMut(&P, &Cx) -> bool,
    ) -> bool {
        let mut asking = Asking { cx: self, ports, waits: false };
        poll_fn(|task| {
            let asked = asking.cx.poll_ready(asking.ports, &mut may_run, task);
            asking.waits = asked.is_pending();
            // The end of one run is the beginning of the next, if it does not have to wait.
            if asked != Poll::Ready(true) {
                asking.cx.stop_clock();
            }
            asked
        })
        .await
    }

    #[inline]
    fn poll_ready<P: Ports>(
        &mut self,
        ports: &mut P,
        may_run: &mut impl FnMut(&P, &Cx) -> bool,
        task: &mut Context<'_>,
    ) -> Poll<bool> {
        self.end_run();
        if self.finished || self.node.is_finishing() {
            return Poll::Ready(false);
        }
        // An operator that is always ready lets others have a turn now and then, also where tokio's budget is off.
        self.streak += 1;
        if self.streak == LONGEST_STREAK {
            self.streak = 0;
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        let budget = ready!(tokio::task::coop::poll_proceed(task));
        self.node.resume();
        let mut asked = ports.poll_ready(task);
        if !self.awaited.is_empty() {
            asked = asked.and(condition::buffers(&mut self.awaited, task));
        }
        match asked {
            Readiness::Ready => {
                budget.made_progress();
                if self.asks_may_run && !self.may_run(ports, may_run, task.waker()) {
                    self.node.park_refused();
                    return Poll::Pending;
                }
                if !ports.claim() {
                    // Another task was quicker: look again, after it.
                    task.waker().wake_by_ref();
                    return Poll::Pending;
                }
                if self.lane.as_ref().is_some_and(|lane| lane.begin()) {
                    self.stream = None;
                }
                if let Some(stream) = self.timed_stream() {
                    stream.begin_run();
                }
                self.running = true;
                if self.busy_since.is_none() {
                    self.busy_since = Some(Ticks::now());
                }
                Poll::Ready(true)
            }
            Readiness::Wait => {
                self.stop_clock();
                self.node.park();
                Poll::Pending
            }
            // What it waits for comes by itself: the flow is not at rest.
            Readiness::WaitEvent => Poll::Pending,
            Readiness::Never => Poll::Ready(false),
        }
    }

    /// Asks the operator itself, of whose conditions all are ready.
    #[cold]
    fn may_run<P: Ports>(&mut self, ports: &mut P, may_run: &mut impl FnMut(&P, &Cx) -> bool, waker: &Waker) -> bool {
        // A port that has what it waits for keeps no waker; but the next message is a reason to ask again. Kept first, so
        // that none comes unseen.
        ports.visit(&mut |_, port| port.watch(waker));
        let allowed = may_run(ports, self);
        self.asks_may_run = !self.node.is_default(Method::MayRun);
        self.node.answered(allowed);
        allowed
    }

    /// The present run's end, if there is one.
    #[inline]
    fn end_run(&mut self) {
        if !std::mem::take(&mut self.running) {
            return;
        }
        self.runs += 1;
        if let Some(stream) = self.timed_stream() {
            stream.end_run();
        }
    }

    #[inline]
    fn stop_clock(&mut self) {
        if let Some(since) = self.busy_since.take() {
            self.busy += Ticks::now().since(since);
        }
    }

    /// Said by the trait's own methods: the operator has not written this one.
    pub(super) fn not_written(&self, method: Method) {
        self.node.set_default(method);
    }

    /// What the device spent on its runs, where that is measured.
    pub(super) fn device_time(&self) -> Option<DeviceTime> {
        if !self.timed || self.device.is_host() {
            return None;
        }
        Some(self.timed_stream().and_then(Stream::device_time).unwrap_or_default())
    }

    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The stream that its runs are timed on: its own, and no other's.
    #[inline]
    fn timed_stream(&self) -> Option<&Stream> {
        if self.timed { self.lane.as_ref()?.own() } else { None }
    }

    /// The last work of each stream that it has used.
    pub(crate) fn last(&self) -> Vec<Ticket> {
        self.lane.as_ref().map(|lane| lane.last()).unwrap_or_default()
    }

    /// The last run's time, if it ended with an error.
    pub(crate) fn close(&mut self) {
        self.end_run();
        self.stop_clock();
        self.finished = false;
        self.awaited.clear();
    }
}

/// A wait for the next run. Given up in the middle, it is no wait any more: the operator goes on with something else.
struct Asking<'a, P: Ports> {
    cx: &'a mut Cx,
    ports: &'a mut P,
    waits: bool,
}

impl<P: Ports> Drop for Asking<'_, P> {
    fn drop(&mut self) {
        if self.waits {
            self.ports.visit(&mut |_, port| port.rest());
            self.cx.awaited.iter_mut().for_each(HostAccess::rest);
            self.cx.node.resume();
        }
    }
}

impl fmt::Debug for Cx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cx")
            .field("name", &self.name)
            .field("device", &self.device)
            .field("runs", &self.runs)
            .finish_non_exhaustive()
    }
}
