//! What a flow did.

use std::{fmt, sync::Arc, time::Duration};

use crate::{device::ticks::TickClock, hub::queue::Counts, operator::seat::Tally, stream::DeviceTime};

/// What each operator and hub of a flow did in one run. Prints as a table, with the hubs that lost messages.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// In the order of adding.
    pub operators: Vec<OperatorReport>,
    /// In the order of connecting.
    pub hubs: Vec<HubReport>,
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
    /// Messages taken from all inputs.
    pub messages_in: u64,
    /// Messages sent from all outputs.
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
}

/// What became of the messages that were sent through one hub. Each is counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HubReport {
    /// Its name: `read.lines -> upper.lines`.
    pub name: Arc<str>,
    /// Messages that its reader took: once each, however often it took the [latest](crate::Hub::latest).
    pub passed: u64,
    /// Messages that it dropped, since that is its kind.
    pub dropped: u64,
    /// Messages that its reader left when it ended.
    pub untaken: u64,
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
        });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.operators.iter().map(|operator| operator.name.chars().count()).max().unwrap_or(0).max(8);
        writeln!(
            f,
            "{:width$} {:>10} {:>10} {:>10} {:>14} {:>14} {:>12} {:>12}",
            "operator", "runs", "in", "out", "bytes in", "bytes out", "busy ms", "device ms"
        )?;
        for operator in &self.operators {
            let device = match operator.device {
                // Of one that has put nothing into a stream of its own, nothing is known.
                Some(device) if device.runs > 0 => format!("{:.3}", device.total.as_secs_f64() * 1e3),
                _ => "-".into(),
            };
            writeln!(
                f,
                "{:width$} {:>10} {:>10} {:>10} {:>14} {:>14} {:>12.3} {device:>12}",
                operator.name,
                operator.runs,
                operator.messages_in,
                operator.messages_out,
                operator.bytes_in,
                operator.bytes_out,
                operator.busy.as_secs_f64() * 1e3
            )?;
        }
        write!(f, "{:.3} ms in all", self.elapsed.as_secs_f64() * 1e3)?;
        for HubReport { name, passed, dropped, untaken } in self.hubs.iter().filter(|hub| hub.dropped + hub.untaken > 0)
        {
            write!(f, "\nhub `{name}`: {passed} messages passed, {dropped} dropped, {untaken} never taken")?;
        }
        Ok(())
    }
}
