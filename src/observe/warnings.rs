//! [`Warning`]: what is wrong with a flow that runs, while it lasts.

use std::{fmt, sync::Arc, time::Duration};

use super::snapshot::rounded;

/// Something that is probably wrong with a flow: an operator blocks a worker thread of the runtime, an operator waits for
/// too long, or operators wait only for each other. `Display` is one sentence, with how long it has lasted and what to do.
///
/// A warning begins once for each occurrence: it is then logged (`tracing`, level `WARN`, target `wakeline::observe`; a stall
/// by its flow, observed or not, or as the error of the flow that fails because of it), given to the [hooks](super::Observe::on_warning), and an item of [`Snapshot::warnings`](super::Snapshot::warnings)
/// until it is over.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Warning {
    /// Counts the warnings of one run of a flow, from 0. It identifies a warning in several snapshots.
    pub number: u64,
    /// The name of the flow.
    pub flow: Arc<str>,
    /// What is wrong.
    pub kind: WarningKind,
    /// The operators that are blocked, wait or have stalled: one, unless it is a stall or a section.
    pub operators: Vec<Arc<str>>,
    /// When it began, as a time since the flow's run began.
    pub began: Duration,
    /// How long it has lasted, up to this snapshot, or to when the hook was to be called.
    pub since: Duration,
    /// The sentence, without how long it has lasted.
    pub sentence: String,
}

/// What a [`Warning`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum WarningKind {
    /// One poll of the operator has occupied a worker thread of the runtime for longer than
    /// [`warn_blocked`](super::Observe::warn_blocked).
    Blocked,
    /// The operator has waited for longer than [`warn_waiting`](super::Observe::warn_waiting), and for no operator that
    /// has waited for long itself.
    Waiting,
    /// The operators wait only for each other: see [`OnStall`](crate::flow::OnStall).
    Stalled,
}

/// The number of warnings of one run of a flow that have begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct WarningCounts {
    /// Polls that blocked a worker thread for too long.
    pub blocked: u64,
    /// Waits that were too long.
    pub waiting: u64,
    /// Groups of operators that waited only for each other.
    pub stalled: u64,
    /// Those that were neither logged nor given to the hooks, because too many were waiting for that.
    pub lost: u64,
}

impl WarningKind {
    pub(super) const ALL: [Self; 3] = [Self::Blocked, Self::Waiting, Self::Stalled];

    /// One word, as in metrics: `blocked`, `waiting`, `stalled`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Blocked => "blocked",
            Self::Waiting => "waiting",
            Self::Stalled => "stalled",
        }
    }
}

impl WarningCounts {
    /// The number of warnings of one kind.
    pub fn of(&self, kind: WarningKind) -> u64 {
        match kind {
            WarningKind::Blocked => self.blocked,
            WarningKind::Waiting => self.waiting,
            WarningKind::Stalled => self.stalled,
        }
    }

    pub(super) fn add(&mut self, kind: WarningKind) {
        match kind {
            WarningKind::Blocked => self.blocked += 1,
            WarningKind::Waiting => self.waiting += 1,
            WarningKind::Stalled => self.stalled += 1,
        }
    }
}

/// `` for 2.3 s: `read` blocks a worker thread: .. ``
impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "for {}: {}", rounded(self.since), self.sentence)
    }
}
