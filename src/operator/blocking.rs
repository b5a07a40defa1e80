//! [`Blocking`]: detects an operator that blocks its worker thread.
//!
//! A run that computes for long, reads a file or calls a blocking library occupies its thread: other tasks of that
//! thread wait meanwhile. The time for which an operator is busy without a pause is measured anyway, for the report. A
//! busy stretch that began and ended in one poll of the task blocked the thread. The third long one is logged, with the
//! operator's name: the first may have compiled a kernel or filled a cache.
//!
//! An operator with a [thread of its own](crate::flow::Added::on_own_thread) may block.

use std::time::Duration;

use crate::{device::ticks::TickClock, sync::logged};

/// In ticks: shorter than [`BLOCKS`], whatever the frequency of the machine's clock.
pub(super) const LONG: u64 = 20_000_000;

/// A poll of this length delays other tasks. Tokio recommends a thousandth of it.
const BLOCKS: Duration = Duration::from_millis(100);

/// The number of such stretches before a warning is logged.
const TIMES: u32 = 3;

#[derive(Debug)]
pub(super) struct Blocking {
    /// The operator has a thread of its own.
    may_block: bool,
    clock: TickClock,
    times: u32,
}

impl Blocking {
    pub(super) fn new(may_block: bool) -> Self {
        Self { may_block, clock: TickClock::start(), times: 0 }
    }

    /// One poll of the operator's task was busy for `ticks` ticks.
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
