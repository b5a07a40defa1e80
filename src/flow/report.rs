//! What a flow did.

use std::{fmt, sync::Arc, time::Duration};

use super::section::Told;
use crate::{
    device::{Device, ticks::TickClock},
    error::Error,
    hub::queue::Counts,
    operator::seat::Tally,
    stream::DeviceTime,
};

/// What each operator and hub of a flow did in one run. Prints as a table, with the hubs that lost messages.
///
/// A run that failed has one as well, up to its failure: [`Error::report`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// In the order of adding.
    pub operators: Vec<OperatorReport>,
    /// In the order of connecting.
    pub hubs: Vec<HubReport>,
    /// In the order in which they were said.
    pub sections: Vec<SectionReport>,
    /// Those that its operators were on, the host left out.
    pub devices: Vec<DeviceReport>,
    /// From the call to the last `stop`.
    pub elapsed: Duration,
    /// The part of `elapsed` before the first `start`: allocating the hubs' envelopes, compiling kernels.
    pub setup: Duration,
    /// Messages that were sent and that nobody took, because their reader ended before.
    pub untaken: u64,
}

/// What one operator did.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OperatorReport {
    /// Its name.
    pub name: Arc<str>,
    /// How often `compute` was called.
    pub runs: u64,
    /// Messages taken from all inputs, and chunks that it was given to consume, peek at or modify.
    pub messages_in: u64,
    /// Messages sent from all outputs, and chunks that it has produced.
    pub messages_out: u64,
    /// Bytes of them: the valid part of envelopes, the size of everything else.
    pub bytes_in: u64,
    /// Bytes of them.
    pub bytes_out: u64,
    /// The host's time from each run's begin to its end, what it awaited in between included.
    pub busy: Duration,
    /// The device's time for the work that its runs put into its own stream, waits for other streams left out. `None` on
    /// the host, and where the flow did not ask for it ([`Flow::device_times`](crate::Flow::device_times)).
    pub device: Option<DeviceTime>,
    /// The most bytes that it had at once of the memory that it allocated ([`Cx::alloc`](crate::Cx::alloc)).
    pub memory_peak: u64,
}

/// What a device of the flow's had to hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Its name: `cuda:0`.
    pub name: Arc<str>,
    /// The most bytes of its memory that wakeline had in use at once since it was opened, whoever used them.
    pub memory_peak: u64,
}

/// What became of the messages that were sent through one hub. Each is counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HubReport {
    /// Its name: `read.lines -> upper.lines`.
    pub name: Arc<str>,
    /// Messages that its reader took: once each, however often it took the [latest](crate::Hub::latest).
    pub passed: u64,
    /// Messages that it dropped, since that is its kind, or since they came from outside of the flow and could not be brought
    /// to its reader.
    pub dropped: u64,
    /// Messages that its reader left when it ended.
    pub untaken: u64,
}

/// How the rounds of a [section](crate::flow::Section) went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SectionReport {
    /// Its name.
    pub name: Arc<str>,
    /// Rounds that were launches of a graph.
    pub replayed: u64,
    /// Rounds in which its operators ran.
    pub streamed: u64,
    /// Graphs that were captured.
    pub captured: u64,
}

impl SectionReport {
    pub(super) fn new(told: &Told) -> Self {
        let [replayed, streamed, captured] = told.counts();
        Self { name: told.name.clone(), replayed, streamed, captured }
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

    pub(super) fn add(&mut self, name: Arc<str>, tally: &Tally, clock: &TickClock) {
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

/// Here and not beside the other methods: an error belongs to a lower layer, which knows no flows.
impl Error {
    /// The report of the flow that failed with this error: what its operators and hubs had done up to the failure. It comes
    /// with the error that [`Flow::run`](crate::Flow::run) or [`Running`](crate::Running) resolves to.
    ///
    /// `None` for every other error: one from before the operators began (a wrong setup), one from a runtime that was
    /// shut down, and [`Handle::failure`](super::Handle::failure), which is there before the operators have stopped.
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
        /// Longer names stand out of their column: a width of more than 65,535 would be a panic.
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
                // Of one that has put nothing into a stream of its own, nothing is known.
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
        for SectionReport { name, replayed, streamed, captured } in &self.sections {
            write!(
                f,
                "\nsection `{name}`: {replayed} rounds replayed, {streamed} streamed, {captured} graphs captured"
            )?;
        }
        for HubReport { name, passed, dropped, untaken } in self.hubs.iter().filter(|hub| hub.dropped + hub.untaken > 0)
        {
            write!(f, "\nhub `{name}`: {passed} messages passed, {dropped} dropped, {untaken} never taken")?;
        }
        Ok(())
    }
}
