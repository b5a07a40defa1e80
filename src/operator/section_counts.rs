//! [`SectionCounts`]: how many rounds of a section were replayed, how many were streamed, and why.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

/// Why a round of a [section](crate::flow::Section) was streamed: its operators ran, and no graph was launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum StreamReason {
    /// There was no graph for messages of these lengths: none was captured yet, or an operator has dropped memory that it used.
    /// One is captured after the round, unless the flow ends with it.
    NoGraph,
    /// Its messages had more rows than the largest [bucket](crate::flow::Section::buckets).
    TooManyRows,
    /// Its messages had no whole number of [rows](crate::flow::Section::rows), or different numbers.
    UnevenRows,
    /// A message was empty.
    Empty,
    /// More combinations of lengths occur than [graphs are kept](crate::flow::Section::at_most).
    TooManyLengths,
}

impl StreamReason {
    const ALL: [Self; 5] = [Self::NoGraph, Self::TooManyRows, Self::UnevenRows, Self::Empty, Self::TooManyLengths];
}

/// For a sentence about so many rounds: `3 for lack of a graph`.
impl fmt::Display for StreamReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoGraph => "lack of a graph",
            Self::TooManyRows => "more rows than the largest bucket",
            Self::UnevenRows => "no common whole number of rows",
            Self::Empty => "an empty message",
            Self::TooManyLengths => "more combinations of lengths than graphs",
        })
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct SectionCounts {
    replayed: AtomicU64,
    /// By reason.
    streamed: [AtomicU64; StreamReason::ALL.len()],
    captured: AtomicU64,
}

impl SectionCounts {
    pub(crate) fn replayed(&self) -> u64 {
        self.replayed.load(Ordering::Relaxed)
    }

    pub(crate) fn captured(&self) -> u64 {
        self.captured.load(Ordering::Relaxed)
    }

    /// How many rounds were streamed; and the reasons that occurred, with the number of rounds.
    pub(crate) fn streamed(&self) -> (u64, Vec<(StreamReason, u64)>) {
        let all = StreamReason::ALL.into_iter().zip(&self.streamed);
        let all = all.map(|(reason, count)| (reason, count.load(Ordering::Relaxed)));
        let reasons: Vec<_> = all.filter(|(_, count)| *count > 0).collect();
        (reasons.iter().map(|(_, count)| count).sum(), reasons)
    }

    pub(crate) fn add_replayed(&self) {
        self.replayed.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_streamed(&self, reason: StreamReason) {
        self.streamed[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_captured(&self) {
        self.captured.fetch_add(1, Ordering::Relaxed);
    }
}

/// For a report: `3 streamed (2 for lack of a graph, 1 for an empty message)`.
pub(crate) fn fmt_streamed(streamed: u64, reasons: &[(StreamReason, u64)]) -> String {
    if reasons.is_empty() {
        return format!("{streamed} streamed");
    }
    let reasons: Vec<_> = reasons.iter().map(|(reason, count)| format!("{count} for {reason}")).collect();
    format!("{streamed} streamed ({})", reasons.join(", "))
}
