//! [`Fruitless`]: notices an operator that runs again and again, and takes nothing of what is there.
//!
//! Conditions are level-triggered: a message that a run leaves where it is allows the next run at once. That is what an
//! operator wants that takes one message a run of several; one that takes none spins. Nothing is wrong with it as far as
//! anybody can tell, so it is told, not stopped: once, in the log.
//!
//! It is looked at where the operator lets others have a turn anyway, once in [`LONGEST_STREAK`] turns.

use std::task::Context;

use super::{Ports, cx::runs::LONGEST_STREAK};

/// As many looks in a row that find nothing moved make a thousand runs.
const LOOKS: u32 = 1000_u32.div_ceil(LONGEST_STREAK);

#[derive(Debug, Default)]
pub(super) struct Fruitless {
    /// Runs, and messages taken and sent, at the last look.
    runs: u64,
    moved: u64,
    /// Looks in a row that found nothing moved.
    looks: u32,
}

impl Fruitless {
    #[cold]
    pub(super) fn look<P: Ports>(&mut self, operator: &str, runs: u64, ports: &mut P, task: &mut Context<'_>) {
        let (mut moved, mut left) = (0, None);
        ports.visit(&mut |name, port| {
            moved += port.traffic().messages;
            if !port.is_output() && left.is_none() && port.state().poll_count(1, task).ready > 0 {
                left = Some(name);
            }
        });
        let ran = runs - std::mem::replace(&mut self.runs, runs);
        let stands_still = std::mem::replace(&mut self.moved, moved) == moved;
        // One that waits in between has at most one run for each turn that it waits.
        let never_waits = ran > u64::from(LONGEST_STREAK) * 3 / 4;
        match left {
            Some(port) if stands_still && never_waits => {
                self.looks = self.looks.saturating_add(1);
                if self.looks == LOOKS {
                    tracing::warn!(
                        operator,
                        port,
                        runs,
                        "an operator has run {} times in a row and taken nothing, though there is a message: it would go \
                         on like that for ever",
                        LOOKS * LONGEST_STREAK
                    );
                }
            }
            _ => self.looks = 0,
        }
    }
}
