//! [`Snapshot`]: one picture of a flow.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    activity::{Activity, Shares, activity},
    bottleneck::Bottleneck,
    finder,
    paths::{PathCounts, PathSnapshot},
    records::{Records, Summary},
    warnings::{Warning, WarningCounts},
};
use crate::{
    device::ticks::Ticks,
    hub::chunks::roles::Role,
    memory::MemoryStats,
    operator::{
        Handle,
        control::{Control, Hubs, SectionParts},
        section_counts::{StreamReason, fmt_streamed},
    },
    stream::DeviceTime,
    sync::contained,
};

/// A picture of a flow: what its operators do and wait for, how full its hubs are, what its devices hold. See
/// [`Handle::snapshot`]. `Display` prints it for a terminal, the bottleneck first.
///
/// With the feature `serde` it can be serialised; times are then in seconds and nanoseconds.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Snapshot {
    /// The name of the flow.
    pub flow: Arc<str>,
    /// The time since the flow's run began.
    pub elapsed: Duration,
    /// What the flow as a whole does.
    pub state: FlowState,
    /// Why the flow has failed, if it has.
    pub failure: Option<FailureSnapshot>,
    /// The time that all shares and rates are of, up to now. Zero if the flow is not [observed](super::Observe).
    pub window: Duration,
    /// What limits the flow's throughput, if it was observed for long enough to know.
    pub bottleneck: Option<Bottleneck>,
    /// What is probably wrong with it now, oldest first and at most 64, if the flow is observed: see
    /// [`Observe::warn_blocked`](super::Observe::warn_blocked). After the flow's end only a stall that ended it.
    pub warnings: Vec<Warning>,
    /// The warnings that have begun since the flow began.
    pub warning_counts: WarningCounts,
    /// In the order of adding.
    pub operators: Vec<OperatorSnapshot>,
    /// In the order of connecting. Empty once a flow has ended that was not observed.
    pub hubs: Vec<HubSnapshot>,
    /// In the order in which they were declared.
    pub sections: Vec<SectionSnapshot>,
    /// The hubs of chunks that its operators have links to.
    pub chunk_hubs: Vec<ChunkHubSnapshot>,
    /// The devices of its operators, without the host.
    pub devices: Vec<DeviceSnapshot>,
    /// How long messages took from their source to where they ended, if the flow is observed.
    pub paths: Vec<PathSnapshot>,
    /// The messages that `paths` are of.
    pub path_counts: PathCounts,
    /// Every operator has stopped.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) over: bool,
}

/// What a flow as a whole does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum FlowState {
    /// It runs.
    #[default]
    Running,
    /// It is [paused](Handle::pause).
    Paused,
    /// It is being [drained](Handle::stop).
    Stopping,
    /// It has failed; its operators may still be stopping.
    Failed,
    /// It has ended without an error.
    Ended,
}

/// The failure of a flow in a [`Snapshot`]: [`Handle::failure`] in words.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FailureSnapshot {
    /// The text of its [kind](crate::ErrorKind): `stalled`, `operator failed`.
    pub kind: String,
    /// The error and its causes in one line.
    pub message: String,
}

/// One operator in a [`Snapshot`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct OperatorSnapshot {
    /// The name of the operator.
    pub name: Arc<str>,
    /// Where it runs: `host`, `cuda:0`.
    pub device: Arc<str>,
    /// The section that it belongs to.
    pub section: Option<Arc<str>>,
    /// What it does now.
    pub activity: Activity,
    /// What it waits for, in words.
    pub waits_for: Vec<String>,
    /// How long it has done what it does, without a run that has ended meanwhile. As exact as the observer's interval; in a
    /// flow that is not observed, since it last began to wait.
    pub since: Duration,
    /// The number of runs that have ended.
    pub runs: u64,
    /// The host's time for its runs, including their waits, up to when it last began to wait for its next run.
    pub busy: Duration,
    /// The device time of those runs that were measured. `None` on the host, and if it is not
    /// [recorded](super::Observe::device_times).
    pub device_time: Option<DeviceTime>,
    /// Of how much of the window it did what. `None` if the flow is not observed.
    pub shares: Option<Shares>,
    /// Runs in a second, over the window.
    pub runs_per_second: Option<f64>,
}

/// One hub in a [`Snapshot`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HubSnapshot {
    /// The name of the hub: `read.lines -> upper.lines`.
    pub name: Arc<str>,
    /// The operator that writes to it.
    pub from: Arc<str>,
    /// The operator that reads from it.
    pub to: Arc<str>,
    /// Messages that the reader has not taken.
    pub queued: usize,
    /// Messages that fit in the queue.
    pub capacity: usize,
    /// The envelopes that the writer fills, if the hub has any.
    pub blanks: Option<EnvelopesSnapshot>,
    /// The envelopes at the reader's location that messages are copied to, if there are any.
    pub arrivals: Option<EnvelopesSnapshot>,
    /// Messages that the reader has taken.
    pub passed: u64,
    /// Messages that the hub has dropped.
    pub dropped: u64,
    /// Messages taken in a second, over the window.
    pub messages_per_second: Option<f64>,
    /// Of how much of the window its queue was full.
    pub full: Option<f64>,
}

/// One [`ChunkHub`](crate::ChunkHub) in a [`Snapshot`], with the links of this flow. Its counters are totals since the hub was
/// built, over all flows and over links outside of any flow.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ChunkHubSnapshot {
    /// The name of the hub.
    pub name: Arc<str>,
    /// The links of this flow's operators.
    pub links: Vec<ChunkLinkSnapshot>,
    /// Chunks that are still to be consumed; zero if no link consumes.
    pub queued: usize,
    /// Chunks that fit in the queue.
    pub capacity: usize,
    /// Its envelopes, at all locations.
    pub envelopes: usize,
    /// Chunks that were produced.
    pub produced: u64,
    /// Chunks that were consumed.
    pub consumed: u64,
}

/// The link of an operator to a hub of chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ChunkLinkSnapshot {
    /// The operator.
    pub operator: Arc<str>,
    /// What it does.
    pub role: LinkRole,
}

/// What a link to a hub of chunks does. Its names differ from those of the [roles](crate::hub::role), so that messages of the
/// compiler need no paths for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LinkRole {
    /// It produces chunks.
    Produces,
    /// It consumes them.
    Consumes,
    /// It looks at each, before it is consumed.
    Peeks,
    /// It changes each, before it is consumed.
    Modifies,
}

impl From<Role> for LinkRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Produce => Self::Produces,
            Role::Consume => Self::Consumes,
            Role::Peek => Self::Peeks,
            Role::Modify => Self::Modifies,
        }
    }
}

/// One word, as it is serialised: `produces`.
impl fmt::Display for LinkRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Produces => "produces",
            Self::Consumes => "consumes",
            Self::Peeks => "peeks",
            Self::Modifies => "modifies",
        })
    }
}

/// The envelopes of a hub at one location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EnvelopesSnapshot {
    /// Those that are not in use.
    pub free: usize,
    /// All of them.
    pub count: usize,
}

/// One section in a [`Snapshot`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SectionSnapshot {
    /// The name of the section.
    pub name: Arc<str>,
    /// Rounds that were replayed as one launch of a graph.
    pub replayed: u64,
    /// Rounds in which its operators ran.
    pub streamed: u64,
    /// Why: each reason that occurred, with its number of rounds.
    pub streamed_because: Vec<(StreamReason, u64)>,
    /// Graphs that were captured.
    pub captured: u64,
    /// The device time of those replays that were measured. `None` if it is not
    /// [recorded](super::Observe::device_times).
    pub device_time: Option<DeviceTime>,
}

/// One device in a [`Snapshot`], with the memory that wakeline uses there: this flow, other flows and other code.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceSnapshot {
    /// Its name: `cuda:0`.
    pub name: Arc<str>,
    /// Bytes in use.
    pub in_use: u64,
    /// Bytes that were freed while a stream might still be using them.
    pub waiting: u64,
    /// Bytes that were freed and are cached.
    pub cached: u64,
    /// The largest number of bytes that were in use or waiting at once.
    pub peak: u64,
    /// The most bytes that can be in use, if it is known.
    pub capacity: Option<u64>,
}

impl Handle {
    /// A picture of the flow as it is now. The state of each operator and hub is read where it is; a flow that runs
    /// meanwhile is not stopped for it, so that a message may be on its way between two hubs that are read.
    ///
    /// In an [observed](super::Observe) flow, it also has the shares and rates of the last seconds and the bottleneck,
    /// and once the flow has ended it is the picture of its end.
    ///
    /// ```
    /// use wakeline::prelude::*;
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// # let mut flow = Flow::new("ticks");
    /// # let ticks = flow.add("ticks", source(async || Ok(Some(()))));
    /// # let count = flow.add("count", sink(async |()| Ok(())));
    /// # flow.connect(ticks.output, count.input);
    /// let running = flow.spawn()?;
    /// # tokio::task::yield_now().await;
    /// println!("{}", running.handle().snapshot());
    /// # running.stop();
    /// # running.await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn snapshot(&self) -> Snapshot {
        let observed = Records::of(&self.0).and_then(|records| records.snapshot());
        observed.unwrap_or_else(|| Snapshot::new(self, &Summary::default(), devices(&self.0)).with_failure(self))
    }
}

impl Snapshot {
    /// `devices`: what [`devices`] returned, before any lock. [`with_failure`](Self::with_failure) is to be called on it.
    pub(super) fn new(flow: &Handle, summary: &Summary, devices: Vec<DeviceSnapshot>) -> Self {
        let control = &*flow.0;
        let observed = summary.samples > 0;
        let per_second = |now: u64, before: u64| {
            observed.then(|| now.saturating_sub(before) as f64 / summary.window.as_secs_f64().max(1e-3))
        };
        let (hubs, known) = (control.hubs(), control.observed.get());
        let now = Ticks::now();
        let operators = (0..control.tasks.len()).map(|number| {
            let recorded = summary.operators.get(number);
            let status = control.status(number);
            let cell = control.tasks[number].status_cell();
            let passed = control.clock.duration(now.since(cell.stopped()));
            OperatorSnapshot {
                name: status.name,
                device: known.map_or("host".into(), |known| known.devices.name(number).clone()),
                section: control.section(number).map(|section| control.section_name(section).clone()),
                activity: activity(control, &hubs, number),
                waits_for: status.waits_for,
                // What it does now may be newer than the last sample.
                since: recorded.map_or(passed, |recorded| match cell.status() {
                    (_, true) => recorded.since,
                    (_, false) => recorded.since.min(passed),
                }),
                runs: status.runs,
                busy: cell.busy(&control.clock),
                device_time: device_time(control, number),
                shares: recorded.map(|recorded| Shares(recorded.shares)),
                runs_per_second: recorded.and_then(|recorded| per_second(status.runs, recorded.runs)),
            }
        });
        let operators = operators.collect();
        let each = hubs.all.iter().enumerate().map(|(number, hub)| {
            let (fill, counts) = (hub.state.fill(), hub.state.counts());
            let recorded = summary.hubs.get(number);
            let envelopes = |of: Option<(usize, usize)>| of.map(|(free, count)| EnvelopesSnapshot { free, count });
            HubSnapshot {
                name: hub.state.name().clone(),
                from: control.names[hub.from].clone(),
                to: control.names[hub.to].clone(),
                queued: fill.queued,
                capacity: fill.capacity,
                blanks: envelopes(fill.blanks),
                arrivals: envelopes(fill.arrivals),
                passed: counts.taken,
                dropped: counts.dropped,
                messages_per_second: recorded.and_then(|recorded| per_second(counts.taken, recorded.passed)),
                full: recorded.map(|recorded| recorded.full),
            }
        });
        let each = each.collect();
        let (paths, path_counts) = Records::of(control).and_then(|records| records.paths(control)).unwrap_or_default();
        Self {
            flow: control.name.clone(),
            elapsed: control.clock.elapsed(),
            state: FlowState::of(flow),
            failure: None,
            window: summary.window,
            bottleneck: finder::find(control, &hubs, summary),
            warnings: summary.warnings.clone(),
            warning_counts: summary.warning_counts,
            operators,
            hubs: each,
            sections: sections(control),
            chunk_hubs: chunk_hubs(control, &hubs),
            devices,
            paths,
            path_counts,
            over: flow.has_ended(),
        }
    }

    /// Adds why the flow has failed. No lock may be held: the text of a cause is made by code of the user's, which may panic.
    pub(super) fn with_failure(mut self, flow: &Handle) -> Self {
        if let Some(error) = flow.failure().filter(|_| self.state == FlowState::Failed) {
            let kind = error.kind().to_string();
            let mut message = None;
            contained("the text of a flow's error panicked", || message = Some(format!("{error:#}")));
            let message = message.unwrap_or_else(|| format!("{kind}: the text of the error panicked"));
            self.failure = Some(FailureSnapshot { kind, message });
        }
        self
    }

    /// One operator, by its name.
    pub fn operator(&self, name: &str) -> Option<&OperatorSnapshot> {
        self.operators.iter().find(|operator| &*operator.name == name)
    }

    /// One hub, by its name (`read.lines -> upper.lines`).
    pub fn hub(&self, name: &str) -> Option<&HubSnapshot> {
        self.hubs.iter().find(|hub| &*hub.name == name)
    }
}

impl FlowState {
    fn of(flow: &Handle) -> Self {
        match () {
            () if flow.failure().is_some() => Self::Failed,
            () if flow.has_ended() => Self::Ended,
            () if flow.is_stopping() => Self::Stopping,
            () if flow.is_paused() => Self::Paused,
            () => Self::Running,
        }
    }

    pub(super) const ALL: [Self; 5] = [Self::Running, Self::Paused, Self::Stopping, Self::Failed, Self::Ended];

    /// One word, as in metrics: `running`, `paused`, `stopping`, `failed`, `ended`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopping => "stopping",
            Self::Failed => "failed",
            Self::Ended => "ended",
        }
    }
}

fn chunk_hubs(control: &Control, hubs: &Hubs) -> Vec<ChunkHubSnapshot> {
    let mut all = Vec::<(*const (), ChunkHubSnapshot)>::new();
    for link in &hubs.links {
        let of_link = ChunkLinkSnapshot { operator: control.names[link.operator].clone(), role: link.role.into() };
        if let Some((_, known)) = all.iter_mut().find(|(hub, _)| *hub == link.hub()) {
            known.links.push(of_link);
            continue;
        }
        let (hub, (produced, consumed), (capacity, envelopes)) = (&link.state, link.state.counts(), link.state.most());
        let (name, queued, links) = (hub.name().clone(), hub.queued(), vec![of_link]);
        let hub = ChunkHubSnapshot { name, links, queued, capacity, envelopes, produced, consumed };
        all.push((link.hub(), hub));
    }
    all.into_iter().map(|(_, hub)| hub).collect()
}

fn sections(control: &Control) -> Vec<SectionSnapshot> {
    let all = control.observed.get().into_iter().flat_map(|known| &known.sections).enumerate();
    let is_timed = control.watched().is_some_and(|watched| watched.work.is_some());
    let section = |(number, SectionParts { counts, work }): (usize, &SectionParts)| {
        let (streamed, streamed_because) = counts.streamed();
        SectionSnapshot {
            name: control.section_name(number).clone(),
            replayed: counts.replayed(),
            streamed,
            streamed_because,
            captured: counts.captured(),
            device_time: is_timed.then(|| work.sums()),
        }
    };
    all.map(section).collect()
}

fn device_time(control: &Control, operator: usize) -> Option<DeviceTime> {
    let work = control.watched()?.work.as_ref()?;
    let is_on_device = control.observed.get().is_some_and(|known| !known.devices.is_host(operator));
    is_on_device.then(|| work.times.get(operator).map(|times| times.sums())).flatten()
}

/// The memory of each device. No lock may be held: memory whose last use has completed is reclaimed, which can wake tasks.
pub(super) fn devices(control: &Control) -> Vec<DeviceSnapshot> {
    let devices = control.observed.get().map(|known| known.devices.open()).unwrap_or_default();
    let found = devices.iter().map(|device| {
        let MemoryStats { in_use, waiting, cached, peak, capacity, .. } = device.memory_stats();
        DeviceSnapshot { name: device.name().into(), in_use, waiting, cached, peak, capacity }
    });
    found.collect()
}

impl Snapshot {
    fn fmt_paths(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.paths.is_empty() {
            return Ok(());
        }
        let names: Vec<Arc<str>> = self.paths.iter().map(|path| path.name().into()).collect();
        let wide = width(names.iter());
        writeln!(
            f,
            "{:wide$} {:>9} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}",
            "path", "measured", "p50 us", "p99 us", "max us", "queued us", "host us", "device us", "copy us"
        )?;
        for (path, name) in self.paths.iter().zip(&names) {
            let PathSnapshot { count, p50, p99, max, parts, .. } = path;
            write!(f, "{name:wide$} {count:>9}")?;
            for time in [p50, p99, max, &parts.queued, &parts.host, &parts.device, &parts.copy] {
                write!(f, " {:>10.1}", time.as_secs_f64() * 1e6)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl PathSnapshot {
    /// Its operators with arrows: `read > upper > write`; `other` for the sum of all further paths.
    pub fn name(&self) -> String {
        if self.operators.is_empty() { "other".into() } else { path_name(&self.operators) }
    }
}

/// Between the operators of a path.
pub(super) const BETWEEN: &str = " > ";

pub(super) fn path_name(operators: &[Arc<str>]) -> String {
    operators.join(BETWEEN)
}

/// The width of a column of names.
fn width<'a>(names: impl Iterator<Item = &'a Arc<str>>) -> usize {
    /// Longer names exceed their column: a width above 65,535 would panic.
    const WIDEST: usize = 64;
    names.map(|name| name.chars().count()).max().unwrap_or(0).clamp(8, WIDEST)
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share))
}

fn rate(rate: Option<f64>) -> String {
    rate.map_or("-".into(), |rate| if rate < 10.0 { format!("{rate:.1}") } else { format!("{rate:.0}") })
}

/// The number of warnings that `Display` shows.
const WARNINGS: usize = 8;

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "flow `{}` is {} after {:.1} s", self.flow, self.state.word(), self.elapsed.as_secs_f64())?;
        if let Some(FailureSnapshot { message, .. }) = &self.failure {
            writeln!(f, "{message}")?;
        }
        if let Some(bottleneck) = &self.bottleneck {
            writeln!(f, "{bottleneck}")?;
        }
        for warning in self.warnings.iter().take(WARNINGS) {
            writeln!(f, "warning {warning}")?;
        }
        if let Some(more) = self.warnings.len().checked_sub(WARNINGS + 1) {
            writeln!(f, "and {} more warnings", more + 1)?;
        }
        let wide = width(self.operators.iter().map(|operator| &operator.name));
        writeln!(
            f,
            "{:wide$} {:10} {:>10} {:>9} {:>7} {:>9}  now",
            "operator", "on", "runs", "runs/s", "ran", "in runs s"
        )?;
        for operator in &self.operators {
            write!(
                f,
                "{:wide$} {:10} {:>10} {:>9} {:>7} {:>9.2}  {}",
                operator.name,
                operator.device,
                operator.runs,
                rate(operator.runs_per_second),
                percent(operator.shares.map(|shares| shares.of(Activity::Runs))),
                operator.busy.as_secs_f64(),
                operator.activity.phrase(),
            )?;
            if operator.activity != Activity::Ended {
                write!(f, " for {}", rounded(operator.since))?;
            }
            match &operator.waits_for[..] {
                [] => writeln!(f)?,
                waits => writeln!(f, ": {}", waits.join(", "))?,
            }
        }
        if !self.hubs.is_empty() {
            let wide = width(self.hubs.iter().map(|hub| &hub.name));
            writeln!(
                f,
                "{:wide$} {:>10} {:>7} {:>10} {:>9} {:>8} {:>13} {:>13}",
                "hub", "queued", "full", "passed", "per s", "dropped", "blanks free", "arrivals free"
            )?;
            for hub in &self.hubs {
                let envelopes = |of: Option<EnvelopesSnapshot>| {
                    of.map_or("-".into(), |EnvelopesSnapshot { free, count }| format!("{free} of {count}"))
                };
                writeln!(
                    f,
                    "{:wide$} {:>10} {:>7} {:>10} {:>9} {:>8} {:>13} {:>13}",
                    hub.name,
                    format!("{} of {}", hub.queued, hub.capacity),
                    percent(hub.full),
                    hub.passed,
                    rate(hub.messages_per_second),
                    hub.dropped,
                    envelopes(hub.blanks),
                    envelopes(hub.arrivals),
                )?;
            }
        }
        for ChunkHubSnapshot { name, links, queued, capacity, produced, consumed, .. } in &self.chunk_hubs {
            let links: Vec<_> = links.iter().map(|link| format!("`{}` ({})", link.operator, link.role)).collect();
            let links = links.join(", ");
            writeln!(
                f,
                "chunks of hub `{name}`: {queued} of {capacity} queued, {produced} produced, {consumed} consumed; {links}"
            )?;
        }
        for SectionSnapshot { name, replayed, streamed, streamed_because, captured, .. } in &self.sections {
            let streamed = fmt_streamed(*streamed, streamed_because);
            writeln!(f, "section `{name}`: {replayed} rounds replayed, {streamed}, {captured} graphs captured")?;
        }
        self.fmt_paths(f)?;
        for DeviceSnapshot { name, in_use, waiting, cached, peak, .. } in &self.devices {
            let mib = |bytes: &u64| *bytes as f64 / f64::from(1 << 20);
            writeln!(
                f,
                "{name}: {:.1} MiB in use, {:.1} waiting for streams, {:.1} cached, {:.1} at peak",
                mib(in_use),
                mib(waiting),
                mib(cached),
                mib(peak)
            )?;
        }
        Ok(())
    }
}

/// `950 ms`, `2.3 s`.
pub(super) fn rounded(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{} ms", time.as_millis())
    } else {
        format!("{:.1} s", time.as_secs_f64())
    }
}
