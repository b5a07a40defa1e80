//! Snapshots as text in the OpenMetrics format.
//!
//! Each metric is one block: its type, its unit, its help and then the samples of all flows.

use std::fmt::Write;

use super::{Activity, FlowState, HubSnapshot, OperatorSnapshot, Snapshot};

/// The samples of one metric.
struct Metric<'a> {
    text: &'a mut String,
    name: &'static str,
}

impl Metric<'_> {
    fn new<'a>(text: &'a mut String, name: &'static str, kind: &str, unit: &str, help: &str) -> Metric<'a> {
        let _ = writeln!(text, "# TYPE {name} {kind}");
        if !unit.is_empty() {
            let _ = writeln!(text, "# UNIT {name} {unit}");
        }
        let _ = writeln!(text, "# HELP {name} {help}");
        Metric { text, name }
    }

    fn sample(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let _ = write!(self.text, "{}{suffix}{{", self.name);
        for (at, (label, value)) in labels.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            let _ = write!(self.text, "{comma}{label}=\"{}\"", escaped(value));
        }
        let _ = writeln!(self.text, "}} {value}");
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

pub(super) fn text(mut all: Vec<Snapshot>) -> String {
    // Two samples with the same labels are an error: of two flows with one name, the later one counts.
    let mut names = std::collections::HashSet::new();
    all.reverse();
    all.retain(|snapshot| names.insert(snapshot.flow.clone()));
    all.reverse();

    let mut out = String::new();
    let text = &mut out;
    let mut metric = Metric::new(text, "wakeline_flow_state", "stateset", "", "What the flow does.");
    for snapshot in &all {
        for state in FlowState::ALL {
            let labels = [("flow", &*snapshot.flow), ("wakeline_flow_state", state.word())];
            metric.sample("", &labels, u8::from(snapshot.state == state));
        }
    }

    let operators = || all.iter().flat_map(|flow| flow.operators.iter().map(|operator| (&*flow.flow, operator)));
    let mut metric = Metric::new(text, "wakeline_operator_activity", "stateset", "", "What the operator does.");
    for (flow, operator) in operators() {
        for activity in Activity::ALL {
            let labels =
                [("flow", flow), ("operator", &operator.name), ("wakeline_operator_activity", activity.word())];
            metric.sample("", &labels, u8::from(operator.activity == activity));
        }
    }
    let help = "Of how much of the last seconds the operator did what.";
    let mut metric = Metric::new(text, "wakeline_operator_share", "gauge", "", help);
    for (flow, operator) in operators() {
        for (activity, share) in operator.shares.iter().flat_map(|shares| shares.iter()) {
            let labels = [("flow", flow), ("operator", &*operator.name), ("activity", activity.word())];
            metric.sample("", &labels, share);
        }
    }
    let mut of_operators = |name, unit, help, value: fn(&OperatorSnapshot) -> f64| {
        let mut metric = Metric::new(text, name, "counter", unit, help);
        for (flow, operator) in operators() {
            metric.sample("_total", &[("flow", flow), ("operator", &operator.name)], value(operator));
        }
    };
    of_operators("wakeline_operator_runs", "", "Runs that have ended.", |operator| operator.runs as f64);
    let help = "The host's time for its runs, with their waits.";
    of_operators("wakeline_operator_busy_seconds", "seconds", help, |operator| operator.busy.as_secs_f64());

    let hubs = || all.iter().flat_map(|flow| flow.hubs.iter().map(|hub| (&*flow.flow, hub)));
    let mut of_hubs = |name, kind: &str, help, value: fn(&HubSnapshot) -> u64| {
        let mut metric = Metric::new(text, name, kind, "messages", help);
        let suffix = if kind == "counter" { "_total" } else { "" };
        for (flow, hub) in hubs() {
            metric.sample(suffix, &[("flow", flow), ("hub", &hub.name)], value(hub));
        }
    };
    of_hubs("wakeline_hub_queued_messages", "gauge", "Messages that were not taken.", |hub| hub.queued as u64);
    let help = "Messages that fit in the queue.";
    of_hubs("wakeline_hub_capacity_messages", "gauge", help, |hub| hub.capacity as u64);
    of_hubs("wakeline_hub_passed_messages", "counter", "Messages that were taken.", |hub| hub.passed);
    of_hubs("wakeline_hub_dropped_messages", "counter", "Messages that were dropped.", |hub| hub.dropped);
    let mut metric = Metric::new(text, "wakeline_hub_envelopes", "gauge", "", "Envelopes of the hub.");
    for (flow, hub) in hubs() {
        for (side, envelopes) in [("writer", hub.blanks), ("reader", hub.arrivals)] {
            let Some(envelopes) = envelopes else { continue };
            for (state, count) in [("free", envelopes.free), ("used", envelopes.count - envelopes.free)] {
                metric.sample("", &[("flow", flow), ("hub", &*hub.name), ("side", side), ("state", state)], count);
            }
        }
    }

    let sections = || all.iter().flat_map(|flow| flow.sections.iter().map(|section| (&*flow.flow, section)));
    let mut metric = Metric::new(text, "wakeline_section_rounds", "counter", "", "Rounds of the section.");
    for (flow, section) in sections() {
        for (kind, count) in [("replayed", section.replayed), ("streamed", section.streamed)] {
            metric.sample("_total", &[("flow", flow), ("section", &section.name), ("kind", kind)], count);
        }
    }
    let mut metric = Metric::new(text, "wakeline_section_captures", "counter", "", "Graphs that were captured.");
    for (flow, section) in sections() {
        metric.sample("_total", &[("flow", flow), ("section", &section.name)], section.captured);
    }

    let devices = || all.iter().flat_map(|flow| flow.devices.iter().map(|device| (&*flow.flow, device)));
    let help = "Memory that wakeline uses on the device.";
    let mut metric = Metric::new(text, "wakeline_device_memory_bytes", "gauge", "bytes", help);
    for (flow, device) in devices() {
        for (state, bytes) in [("in_use", device.in_use), ("waiting", device.waiting), ("cached", device.cached)] {
            metric.sample("", &[("flow", flow), ("device", &device.name), ("state", state)], bytes);
        }
    }
    let help = "The most memory that was in use or waiting at once.";
    let mut metric = Metric::new(text, "wakeline_device_memory_peak_bytes", "gauge", "bytes", help);
    for (flow, device) in devices() {
        metric.sample("", &[("flow", flow), ("device", &device.name)], device.peak);
    }
    out.push_str("# EOF\n");
    out
}
