//! The metrics of a snapshot: one table, from which each format is made.
//!
//! ```text
//!   Snapshot ──> families::FAMILIES ──> text: OpenMetrics
//!                                 ├──> facade: a recorder of the crate `metrics`      (feature `metrics`)
//!                                 └──> registry: a collector of `prometheus-client`   (feature `prometheus-client`)
//! ```

#[cfg(feature = "metrics")]
mod facade;
mod families;
#[cfg(feature = "prometheus-client")]
mod registry;
mod text;

use std::collections::HashSet;

pub(super) use self::text::text;
use super::Snapshot;

/// Two samples with the same labels are an error: of two flows with one name, the later one counts.
fn distinct(mut all: Vec<Snapshot>) -> Vec<Snapshot> {
    let mut names = HashSet::new();
    all.reverse();
    all.retain(|snapshot| names.insert(snapshot.flow.clone()));
    all.reverse();
    all
}
