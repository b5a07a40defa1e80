//! [`Blocking`]: notices an operator that blocks its worker.
//!
//! A run that computes for long, reads a file or calls a library that waits keeps its thread to itself: whatever else would be
//! polled there waits as long. How long an operator was busy at a stretch is measured anyway, for the report. A stretch that
//! began and ended in one poll of its task blocked the thread; the third that did so for long is logged, with the operator's
//! name. The first may have compiled a kernel, or filled a cache.
//!
//! An operator with a [thread of its own](crate::flow::Added::on_own_thread) may block.

use std::time::Duration;

use crate::{device::ticks::TickClock, sync::logged};

/// In ticks: less than [`BLOCKS`], whatever the machine's clock.
pub(super) const LONG: u64 = 20_000_000;

/// A poll that takes so long holds up others. Tokio's advice is a thousandth of it.
const BLOCKS: Duration = Duration::from_millis(100);

/// Stretches of that length before it is logged.
const TIMES: u32 = 3;

#[derive(Debug)]
pub(super) struct Blocking {
    /// It has a thread of its own.
    may_block: bool,
    clock: TickClock,
    times: u32,
}

impl Blocking {
    pub(super) fn new(may_block: bool) -> Self {
        Self { may_block, clock: TickClock::start(), times: 0 }
    }

    /// One poll of the operator's task was busy for so many ticks.
    pub(super) fn note(&mut self, operator: &str, ticks: u64) {
        let took = self.clock.duration(ticks);
        if self.may_block || took < BLOCKS {
            return;
        }
        self.times = self.times.saturating_add(1);
        if self.times == TIMES {
            logged(|| {
                tracing::warn!(
                    operator,
                    ?took,
                    "an operator blocks its worker, now for the third time: nothing else runs there meanwhile; give it a \
                     thread of its own with `.on_own_thread()`, or call what blocks in `tokio::task::spawn_blocking`"
                );
            });
        }
    }
}
