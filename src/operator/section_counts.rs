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
    /// There was no graph for its messages yet. One was captured after it.
    NewLengths,
    /// Its messages had more rows than the largest [bucket](crate::flow::Section::buckets).
    TooManyRows,
    /// Its messages had no whole number of [rows](crate::flow::Section::rows), or different numbers.
    UnequalRows,
    /// A message was empty.
    Empty,
    /// More combinations of lengths occur than [graphs are kept](crate::flow::Section::at_most).
    TooManyLengths,
}

impl StreamReason {
    const ALL: [Self; 5] = [Self::NewLengths, Self::TooManyRows, Self::UnequalRows, Self::Empty, Self::TooManyLengths];
}

/// For a sentence about so many rounds: `3 for new lengths`.
impl fmt::Display for StreamReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NewLengths => "new lengths",
            Self::TooManyRows => "more rows than the largest bucket",
            Self::UnequalRows => "unequal rows",
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

    pub(crate) fn streamed(&self) -> u64 {
        self.streamed.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn captured(&self) -> u64 {
        self.captured.load(Ordering::Relaxed)
    }

    /// The reasons that occurred, with the number of rounds.
    pub(crate) fn reasons(&self) -> Vec<(StreamReason, u64)> {
        let all = StreamReason::ALL.into_iter().zip(&self.streamed);
        all.map(|(reason, count)| (reason, count.load(Ordering::Relaxed))).filter(|(_, count)| *count > 0).collect()
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

/// For a report: `3 streamed (2 for new lengths, 1 for an empty message)`.
pub(crate) fn fmt_streamed(streamed: u64, reasons: &[(StreamReason, u64)]) -> String {
    if reasons.is_empty() {
        return format!("{streamed} streamed");
    }
    let reasons: Vec<_> = reasons.iter().map(|(reason, count)| format!("{count} for {reason}")).collect();
    format!("{streamed} streamed ({})", reasons.join(", "))
}
