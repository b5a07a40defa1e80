//! Snapshots as text in the OpenMetrics format.
//!
//! Each metric is one block: its type, its unit, its help and then the samples of all flows.

use std::fmt::Write;

use super::{
    super::Snapshot,
    distinct,
    families::{FAMILIES, FamilyKind, Number},
};

pub(in super::super) fn text(all: Vec<Snapshot>) -> String {
    let (all, mut text) = (distinct(all), String::new());
    for family in FAMILIES {
        let kind = match family.kind {
            FamilyKind::Gauge => "gauge",
            FamilyKind::Counter => "counter",
            FamilyKind::StateSet => "stateset",
        };
        let (name, sample_name) = (family.name, family.sample_name());
        let _ = writeln!(text, "# TYPE {name} {kind}");
        if !family.unit.is_empty() {
            let _ = writeln!(text, "# UNIT {name} {}", family.unit);
        }
        let _ = writeln!(text, "# HELP {name} {}", family.help);
        for flow in &all {
            family.each(flow, |labels, number| {
                let _ = write!(text, "{sample_name}{{");
                for (at, (label, value)) in labels.iter().enumerate() {
                    let comma = if at == 0 { "" } else { "," };
                    let _ = write!(text, "{comma}{label}=\"{}\"", escaped(value));
                }
                let _ = match number {
                    Number::Whole(number) => writeln!(text, "}} {number}"),
                    Number::Real(number) => writeln!(text, "}} {number}"),
                };
            });
        }
    }
    text.push_str("# EOF\n");
    text
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
