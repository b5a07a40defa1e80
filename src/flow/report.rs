//! [`Report`]: statistics of one run of a flow.

use std::{fmt, sync::Arc, time::Duration};

use super::section::SectionStats;
use crate::{
    device::{Device, ticks::TickClock},
    error::Error,
    hub::queue::Counts,
    operator::{
        section_counts::{StreamReason, fmt_streamed},
        settings::OperatorStats,
    },
    stream::DeviceTime,
};

/// The statistics of each operator and hub in one run of a flow. `Display` prints a table, followed by the hubs that
/// lost messages.
///
/// A run that failed also has a report, up to its failure: [`Error::report`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// In the order of adding.
    pub operators: Vec<OperatorReport>,
    /// In the order of connecting.
    pub hubs: Vec<HubReport>,
    /// In the order in which they were declared.
    pub sections: Vec<SectionReport>,
    /// The devices of its operators, without the host.
    pub devices: Vec<DeviceReport>,
    /// The time from the call to the end of the last `stop`.
    pub elapsed: Duration,
    /// The part of `elapsed` before the first `start`: allocating the hubs' envelopes, compiling kernels.
    pub setup: Duration,
    /// Messages that were sent and never taken, because their reader ended first.
    pub untaken: u64,
}

/// The statistics of one operator.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OperatorReport {
    /// The name of the operator.
    pub name: Arc<str>,
    /// The number of calls to `compute`.
    pub runs: u64,
    /// Messages taken from all inputs, and chunks that it consumed, peeked at or modified.
    pub messages_in: u64,
    /// Messages sent from all outputs, and chunks that it produced.
    pub messages_out: u64,
    /// The size of `messages_in`: the valid part of envelopes, the size of everything else.
    pub bytes_in: u64,
    /// The size of `messages_out`, counted in the same way.
    pub bytes_out: u64,
    /// The host's time from the start of each run to its end, including its waits.
    pub busy: Duration,
    /// The device's time for the work that its runs enqueued into its own stream, without waits for other streams.
    /// `None` on the host, and if the flow does not measure it ([`Flow::set_device_times`](crate::Flow::set_device_times)).
    pub device: Option<DeviceTime>,
    /// The peak of the memory that it had allocated with [`Cx::alloc`](crate::Cx::alloc), in bytes.
    pub memory_peak: u64,
}

/// The memory use of one device of the flow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Its name: `cuda:0`.
    pub name: Arc<str>,
    /// The peak of the device memory in use by wakeline since the device was opened, by all flows and by other code, in
    /// bytes.
    pub memory_peak: u64,
}

/// The messages that were sent through one hub. Each is counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HubReport {
    /// The name of the hub: `read.lines -> upper.lines`.
    pub name: Arc<str>,
    /// Messages that its reader took: each once, even if the reader took the [latest](crate::HubOptions::latest) several
    /// times.
    pub passed: u64,
    /// Messages that it dropped: because of its kind, or because they came from outside the flow and could not be
    /// delivered to its reader.
    pub dropped: u64,
    /// Messages that were still in the hub when its reader ended.
    pub untaken: u64,
}

/// The statistics of one [section](crate::flow::Section).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SectionReport {
    /// The name of the section.
    pub name: Arc<str>,
    /// Rounds that were replayed: each was one launch of a graph.
    pub replayed: u64,
    /// Rounds in which its operators ran.
    pub streamed: u64,
    /// Why: each reason that occurred, with its number of rounds.
    pub streamed_because: Vec<(StreamReason, u64)>,
    /// Graphs that were captured.
    pub captured: u64,
}

impl SectionReport {
    pub(super) fn new(stats: &SectionStats) -> Self {
        let counts = &stats.counts;
        let (streamed, streamed_because) = counts.streamed();
        Self {
            name: stats.name.clone(),
            replayed: counts.replayed(),
            streamed,
            streamed_because,
            captured: counts.captured(),
        }
    }
}

impl DeviceReport {
    pub(super) fn new(device: &Device) -> Self {
        Self { name: device.name().into(), memory_peak: device.memory_peak() }
    }
}

impl HubReport {
    pub(super) fn new(name: &Arc<str>, counts: Counts) -> Self {
        let Counts { taken, dropped, untaken } = counts;
        Self { name: name.clone(), passed: taken, dropped, untaken }
    }
}

impl Report {
    /// The report of one hub, by its name (`read.lines -> upper.lines`).
    pub fn hub(&self, name: &str) -> Option<&HubReport> {
        self.hubs.iter().find(|hub| &*hub.name == name)
    }

    /// The report of one section, by its name.
    pub fn section(&self, name: &str) -> Option<&SectionReport> {
        self.sections.iter().find(|section| &*section.name == name)
    }

    /// The report of one device, by its name (`cuda:0`).
    pub fn device(&self, name: &str) -> Option<&DeviceReport> {
        self.devices.iter().find(|device| &*device.name == name)
    }

    /// The report of one operator.
    pub fn operator(&self, name: &str) -> Option<&OperatorReport> {
        self.operators.iter().find(|operator| &*operator.name == name)
    }

    pub(super) fn add(&mut self, name: Arc<str>, tally: &OperatorStats, clock: &TickClock) {
        self.operators.push(OperatorReport {
            name,
            runs: tally.runs,
            messages_in: tally.received.messages,
            messages_out: tally.sent.messages,
            bytes_in: tally.received.bytes,
            bytes_out: tally.sent.bytes,
            busy: clock.duration(tally.busy),
            device: tally.device,
            memory_peak: tally.memory_peak,
        });
    }
}

// Here, since `Error` belongs to a lower layer, which does not know flows.
impl Error {
    /// The report of the flow that failed with this error: what its operators and hubs had done up to the failure. Set
    /// in the errors of [`Flow::run`](crate::Flow::run) and [`Running`](crate::Running).
    ///
    /// `None` for every other error: one that occurred before the operators began (a mistake in the setup), one of a
    /// runtime that was shut down, and that of [`Handle::failure`](super::Handle::failure), which is available before
    /// the operators have stopped.
    ///
    /// ```
    /// use wakeline::{Flow, operator::{sink, source}};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("store");
    /// let mut numbers = 1..=9_u32;
    /// let count = flow.add("count", source(move || std::future::ready(Ok(numbers.next()))));
    /// let store = flow.add("store", sink(async |n: u32| if n < 3 { Ok(()) } else { Err("disk full".into()) }));
    /// flow.connect(count.output, store.input);
    /// let error = flow.run().await.unwrap_err();
    /// assert_eq!(error.to_string(), "operator `store`: disk full");
    /// let report = error.report().unwrap();
    /// assert_eq!(report.operator("store").unwrap().runs, 3);
    /// # });
    /// ```
    pub fn report(&self) -> Option<&Report> {
        self.attachment()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Longer names exceed their column: a width above 65,535 would panic.
        const WIDEST: usize = 64;
        let widest = self.operators.iter().map(|operator| operator.name.chars().count()).max();
        let width = widest.unwrap_or(0).clamp(8, WIDEST);
        writeln!(
            f,
            "{:width$} {:>10} {:>10} {:>10} {:>14} {:>14} {:>14} {:>12} {:>12}",
            "operator", "runs", "in", "out", "bytes in", "bytes out", "memory peak", "busy ms", "device ms"
        )?;
        for operator in &self.operators {
            let device = match operator.device {
                // An operator that has enqueued nothing into its own stream was not measured.
                Some(device) if device.runs > 0 => format!("{:.3}", device.total.as_secs_f64() * 1e3),
                _ => "-".into(),
            };
            writeln!(
                f,
                "{:width$} {:>10} {:>10} {:>10} {:>14} {:>14} {:>14} {:>12.3} {device:>12}",
                operator.name,
                operator.runs,
                operator.messages_in,
                operator.messages_out,
                operator.bytes_in,
                operator.bytes_out,
                operator.memory_peak,
                operator.busy.as_secs_f64() * 1e3
            )?;
        }
        write!(f, "{:.3} ms in all", self.elapsed.as_secs_f64() * 1e3)?;
        for DeviceReport { name, memory_peak } in &self.devices {
            write!(f, "\n{name}: at most {memory_peak} bytes of memory in use")?;
        }
        for SectionReport { name, replayed, streamed, streamed_because, captured } in &self.sections {
            let streamed = fmt_streamed(*streamed, streamed_because);
            write!(f, "\nsection `{name}`: {replayed} rounds replayed, {streamed}, {captured} graphs captured")?;
        }
        for HubReport { name, passed, dropped, untaken } in self.hubs.iter().filter(|hub| hub.dropped + hub.untaken > 0)
        {
            write!(f, "\nhub `{name}`: {passed} messages passed, {dropped} dropped, {untaken} never taken")?;
        }
        Ok(())
    }
}
