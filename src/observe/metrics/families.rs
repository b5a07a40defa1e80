//! [`FAMILIES`]: the table of all metrics.

use super::super::{Activity, FlowState, HubSnapshot, OperatorSnapshot, Snapshot, WarningKind};
use crate::stream::DeviceTime;

/// A metric with all of its samples.
pub(super) struct Family {
    /// Without the suffix of a counter. It ends with the unit, if there is one.
    pub(super) name: &'static str,
    pub(super) kind: FamilyKind,
    pub(super) unit: &'static str,
    /// The labels besides `flow`, which is the first one of all.
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
    /// Calls the function with the values of these labels and the number, for each sample of a flow.
    pub(super) samples: fn(&Snapshot, &mut Sample<'_>),
}

pub(super) type Sample<'a> = dyn FnMut(&[&str], Number) + 'a;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FamilyKind {
    /// It may fall.
    Gauge,
    /// It grows, from zero at the flow's begin. Its samples have the suffix `_total`.
    Counter,
    /// 1 for one of several states, and 0 for the others.
    StateSet,
}

/// Whole numbers are exact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Number {
    Whole(u64),
    Real(f64),
}

use FamilyKind::{Counter, Gauge, StateSet};
use Number::{Real, Whole};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "wakeline_flow_state",
        kind: StateSet,
        unit: "",
        labels: &["wakeline_flow_state"],
        help: "What the flow does.",
        samples: |flow, add| {
            FlowState::ALL.iter().for_each(|state| add(&[state.word()], is(flow.state == *state)));
        },
    },
    Family {
        name: "wakeline_flow_active_warnings",
        kind: Gauge,
        unit: "",
        labels: &["kind"],
        help: "Warnings that are not over, of the 64 oldest.",
        samples: |flow, add| {
            for kind in WarningKind::ALL {
                let count = flow.warnings.iter().filter(|warning| warning.kind == kind).count();
                add(&[kind.word()], Whole(count as u64));
            }
        },
    },
    Family {
        name: "wakeline_flow_warnings",
        kind: Counter,
        unit: "",
        labels: &["kind"],
        help: "Warnings that have begun.",
        samples: |flow, add| {
            WarningKind::ALL.iter().for_each(|kind| add(&[kind.word()], Whole(flow.warning_counts.of(*kind))));
        },
    },
    Family {
        name: "wakeline_operator_activity",
        kind: StateSet,
        unit: "",
        labels: &["operator", "wakeline_operator_activity"],
        help: "What the operator does.",
        samples: |flow, add| {
            for operator in &flow.operators {
                for activity in Activity::ALL {
                    add(&[&operator.name, activity.word()], is(operator.activity == activity));
                }
            }
        },
    },
    Family {
        name: "wakeline_operator_share",
        kind: Gauge,
        unit: "",
        labels: &["operator", "activity"],
        help: "Of how much of the window the operator did what, as a ratio.",
        samples: |flow, add| {
            for operator in &flow.operators {
                let Some(shares) = &operator.shares else { continue };
                // Zeros, too: a recorder keeps the last value of a sample that is left out.
                for activity in Activity::ALL {
                    add(&[&operator.name, activity.word()], Real(shares.of(activity)));
                }
            }
        },
    },
    Family {
        name: "wakeline_operator_runs",
        kind: Counter,
        unit: "",
        labels: &["operator"],
        help: "Runs that have ended.",
        samples: |flow, add| operators(flow, add, |operator| Some(Whole(operator.runs))),
    },
    Family {
        name: "wakeline_operator_busy_seconds",
        kind: Counter,
        unit: "seconds",
        labels: &["operator"],
        help: "The host's time for its runs, with their waits.",
        samples: |flow, add| operators(flow, add, |operator| Some(Real(operator.busy.as_secs_f64()))),
    },
    Family {
        name: "wakeline_operator_device_seconds",
        kind: Counter,
        unit: "seconds",
        labels: &["operator"],
        help: "The device's time for those of its runs that were measured.",
        samples: |flow, add| operators(flow, add, |operator| operator.device_time.map(seconds)),
    },
    Family {
        name: "wakeline_operator_device_runs",
        kind: Counter,
        unit: "",
        labels: &["operator"],
        help: "Runs whose time on the device was measured.",
        samples: |flow, add| operators(flow, add, |operator| operator.device_time.map(|time| Whole(time.runs))),
    },
    Family {
        name: "wakeline_hub_queued_messages",
        kind: Gauge,
        unit: "messages",
        labels: &["hub"],
        help: "Messages that were not taken.",
        samples: |flow, add| hubs(flow, add, |hub| hub.queued as u64),
    },
    Family {
        name: "wakeline_hub_capacity_messages",
        kind: Gauge,
        unit: "messages",
        labels: &["hub"],
        help: "Messages that fit in the queue.",
        samples: |flow, add| hubs(flow, add, |hub| hub.capacity as u64),
    },
    Family {
        name: "wakeline_hub_passed_messages",
        kind: Counter,
        unit: "messages",
        labels: &["hub"],
        help: "Messages that were taken.",
        samples: |flow, add| hubs(flow, add, |hub| hub.passed),
    },
    Family {
        name: "wakeline_hub_dropped_messages",
        kind: Counter,
        unit: "messages",
        labels: &["hub"],
        help: "Messages that were dropped.",
        samples: |flow, add| hubs(flow, add, |hub| hub.dropped),
    },
    Family {
        name: "wakeline_hub_envelopes",
        kind: Gauge,
        unit: "",
        labels: &["hub", "side", "state"],
        help: "Envelopes of the hub, by side (writer, reader) and state (free, used).",
        samples: |flow, add| {
            for hub in &flow.hubs {
                for (side, envelopes) in [("writer", hub.blanks), ("reader", hub.arrivals)] {
                    let Some(envelopes) = envelopes else { continue };
                    add(&[&hub.name, side, "free"], Whole(envelopes.free as u64));
                    add(&[&hub.name, side, "used"], Whole(envelopes.count.saturating_sub(envelopes.free) as u64));
                }
            }
        },
    },
    Family {
        name: "wakeline_section_rounds",
        kind: Counter,
        unit: "",
        labels: &["section", "kind"],
        help: "Rounds of the section, by kind (replayed, streamed).",
        samples: |flow, add| {
            for section in &flow.sections {
                add(&[&section.name, "replayed"], Whole(section.replayed));
                add(&[&section.name, "streamed"], Whole(section.streamed));
            }
        },
    },
    Family {
        name: "wakeline_section_captures",
        kind: Counter,
        unit: "",
        labels: &["section"],
        help: "Graphs that were captured.",
        samples: |flow, add| {
            flow.sections.iter().for_each(|section| add(&[&section.name], Whole(section.captured)));
        },
    },
    Family {
        name: "wakeline_section_device_seconds",
        kind: Counter,
        unit: "seconds",
        labels: &["section"],
        help: "The device's time for those of its replays that were measured.",
        samples: |flow, add| {
            for section in &flow.sections {
                section.device_time.into_iter().for_each(|time| add(&[&section.name], seconds(time)));
            }
        },
    },
    Family {
        name: "wakeline_section_device_replays",
        kind: Counter,
        unit: "",
        labels: &["section"],
        help: "Replays whose time on the device was measured.",
        samples: |flow, add| {
            for section in &flow.sections {
                section.device_time.into_iter().for_each(|time| add(&[&section.name], Whole(time.runs)));
            }
        },
    },
    Family {
        name: "wakeline_path_latency_seconds",
        kind: Gauge,
        unit: "seconds",
        labels: &["path", "quantile"],
        help: "The time from the source to where the message ended, of those measured in the window.",
        samples: |flow, add| {
            for path in flow.paths.iter().filter(|path| !path.max.is_zero()) {
                let all =
                    [("0.5", path.p50), ("0.9", path.p90), ("0.99", path.p99), ("0.999", path.p999), ("1", path.max)];
                all.iter().for_each(|(quantile, time)| add(&[&path.name(), quantile], Real(time.as_secs_f64())));
            }
        },
    },
    Family {
        name: "wakeline_path_part_seconds",
        kind: Gauge,
        unit: "seconds",
        labels: &["path", "part"],
        help: "Where the time of an average message went (queued, host, device, copy).",
        samples: |flow, add| {
            for path in flow.paths.iter().filter(|path| !path.max.is_zero()) {
                let parts = &path.parts;
                let all =
                    [("queued", parts.queued), ("host", parts.host), ("device", parts.device), ("copy", parts.copy)];
                all.iter().for_each(|(part, time)| add(&[&path.name(), part], Real(time.as_secs_f64())));
            }
        },
    },
    Family {
        name: "wakeline_path_measured_messages",
        kind: Counter,
        unit: "messages",
        labels: &["path"],
        help: "Messages that were measured on the path.",
        samples: |flow, add| flow.paths.iter().for_each(|path| add(&[&path.name()], Whole(path.count))),
    },
    Family {
        name: "wakeline_path_dropped_messages",
        kind: Counter,
        unit: "messages",
        labels: &[],
        help: "Messages that were to be measured and did not reach an end.",
        samples: |flow, add| add(&[], Whole(flow.path_counts.dropped)),
    },
    Family {
        name: "wakeline_device_memory_bytes",
        kind: Gauge,
        unit: "bytes",
        labels: &["device", "state"],
        help: "Memory of the whole device that wakeline uses while the flow runs, by state (in_use, waiting, cached).",
        samples: |flow, add| {
            for device in flow.devices.iter().filter(|_| !flow.over) {
                let all = [("in_use", device.in_use), ("waiting", device.waiting), ("cached", device.cached)];
                all.iter().for_each(|(state, bytes)| add(&[&device.name, state], Whole(*bytes)));
            }
        },
    },
    Family {
        name: "wakeline_device_memory_peak_bytes",
        kind: Gauge,
        unit: "bytes",
        labels: &["device"],
        help: "The most memory that was in use or waiting at once.",
        samples: |flow, add| flow.devices.iter().for_each(|device| add(&[&device.name], Whole(device.peak))),
    },
];

impl Family {
    /// The name of its samples.
    pub(super) fn sample_name(&self) -> String {
        let suffix = if self.kind == Counter { "_total" } else { "" };
        format!("{}{suffix}", self.name)
    }

    /// Calls the function with the labels and the number of each sample.
    pub(super) fn each(&self, flow: &Snapshot, mut add: impl FnMut(&[(&'static str, &str)], Number)) {
        let mut labels = Vec::with_capacity(self.labels.len() + 1);
        (self.samples)(flow, &mut |values, number| {
            labels.clear();
            labels.push(("flow", String::from(&*flow.flow)));
            labels.extend(self.labels.iter().copied().zip(values.iter().map(|value| String::from(*value))));
            let borrowed: Vec<_> = labels.iter().map(|(label, value)| (*label, value.as_str())).collect();
            add(&borrowed, number);
        });
    }
}

impl Number {
    #[cfg_attr(not(any(feature = "metrics", feature = "prometheus-client")), allow(dead_code, reason = "of adapters"))]
    pub(super) fn as_f64(self) -> f64 {
        match self {
            Whole(number) => number as f64,
            Real(number) => number,
        }
    }
}

fn is(it: bool) -> Number {
    Whole(u64::from(it))
}

fn seconds(time: DeviceTime) -> Number {
    Real(time.total.as_secs_f64())
}

fn operators(flow: &Snapshot, add: &mut Sample<'_>, number: fn(&OperatorSnapshot) -> Option<Number>) {
    for operator in &flow.operators {
        number(operator).into_iter().for_each(|number| add(&[&operator.name], number));
    }
}

fn hubs(flow: &Snapshot, add: &mut Sample<'_>, number: fn(&HubSnapshot) -> u64) {
    flow.hubs.iter().for_each(|hub| add(&[&hub.name], Whole(number(hub))));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in the documentation of `observe`.
    #[test]
    fn the_documentation_has_these_metrics() {
        let page = include_str!("../mod.rs");
        let rows: Vec<_> = page.lines().filter(|line| line.starts_with("//! | `wakeline_")).collect();
        let expected: Vec<_> = FAMILIES.iter().map(row).collect();
        assert_eq!(rows, expected, "replace them by:\n{}", expected.join("\n"));
    }

    /// A recorder keeps the value before one that is left out.
    #[test]
    fn a_share_of_zero_is_a_sample() {
        let operator = OperatorSnapshot {
            name: "a".into(),
            device: "host".into(),
            section: None,
            activity: Activity::Runs,
            waits_for: Vec::new(),
            since: std::time::Duration::ZERO,
            runs: 0,
            busy: std::time::Duration::ZERO,
            device_time: None,
            shares: Some(crate::observe::Shares::default()),
            runs_per_second: None,
        };
        let flow = Snapshot { operators: vec![operator], ..Snapshot::default() };
        let mut count = 0;
        let family = FAMILIES.iter().find(|family| family.name == "wakeline_operator_share").unwrap();
        family.each(&flow, |_, number| count += usize::from(number == Real(0.0)));
        assert_eq!(count, Activity::ALL.len());
    }

    fn row(family: &Family) -> String {
        let kind = match family.kind {
            Gauge => "gauge",
            Counter => "counter",
            StateSet => "stateset",
        };
        let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        format!("//! | `{}` | {kind} | {} | {} |", family.sample_name(), labels.join(" "), family.help)
    }

    #[test]
    fn names_follow_the_conventions() {
        let mut names = std::collections::HashSet::new();
        for Family { name, unit, labels, help, .. } in FAMILIES {
            assert!(names.insert(name), "{name} is there twice");
            assert!(name.starts_with("wakeline_") && !name.ends_with("_total"), "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert!(unit.is_empty() || name.ends_with(&format!("_{unit}")), "{name}: its unit is {unit}");
            assert!(!labels.contains(&"flow"), "{name}");
            assert!(help.ends_with('.') && help.is_ascii(), "{name}");
        }
    }
}
