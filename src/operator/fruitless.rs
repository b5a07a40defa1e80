//! [`Fruitless`]: notices an operator that runs again and again to no purpose.
//!
//! Conditions are level-triggered: a message that a run leaves where it is allows the next run at once, and so does a port
//! that is not waited at. That is what an operator wants that takes one message a run of several; one that takes and sends
//! nothing spins. Nothing is wrong with it as far as anybody can tell, so it is told, not stopped: once, in the log.
//!
//! It is looked at where the operator lets others have a turn anyway, once in [`LONGEST_STREAK`] turns.

use crate::sync::logged;
use std::{
    task::Context,
    time::{Duration, Instant},
};

use super::{Ports, cx::runs::LONGEST_STREAK};

/// As many looks in a row that find nothing moved make a thousand runs.
const LOOKS: u32 = 1000_u32.div_ceil(LONGEST_STREAK);

/// A run that has nothing to do takes less.
const QUICK: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub(super) struct Fruitless {
    /// Runs, and messages taken and sent, at the last look.
    runs: u64,
    moved: u64,
    /// Looks in a row that found nothing moved.
    looks: u32,
    looked: Option<Instant>,
}

impl Fruitless {
    #[cold]
    pub(super) fn look<P: Ports>(&mut self, operator: &str, runs: u64, ports: &mut P, task: &mut Context<'_>) {
        let (mut moved, mut left) = (0, None);
        let (mut inputs, mut over) = (false, true);
        ports.visit(&mut |name, port| {
            moved += port.traffic().messages;
            if !port.is_output() {
                inputs = true;
                over &= port.has_ended();
                if left.is_none() && port.state().poll_count(1, task).ready > 0 {
                    left = Some(name);
                }
            }
        });
        let ran = runs - std::mem::replace(&mut self.runs, runs);
        let stands_still = std::mem::replace(&mut self.moved, moved) == moved;
        // One that waits in between has at most one run for each turn that it waits.
        let never_waits = ran > u64::from(LONGEST_STREAK) * 3 / 4;
        // One whose runs take their time waits for something in them.
        let now = Instant::now();
        let quick = self.looked.replace(now).is_some_and(|before| now - before < LONGEST_STREAK * QUICK);
        if !stands_still || !never_waits || !quick {
            self.looks = 0;
            return;
        }
        self.looks = self.looks.saturating_add(1);
        if self.looks != LOOKS {
            return;
        }
        let times = LOOKS * LONGEST_STREAK;
        logged(|| match left {
            Some(port) => tracing::warn!(
                operator,
                port,
                "an operator has run {times} times in a row and taken nothing new, though there is a message: take it, or \
                 say with `.when(..)` when it is to run"
            ),
            None if inputs && over => tracing::warn!(
                operator,
                "an operator has run {times} times in a row since nothing will come to it any more: it waits for none of \
                 its inputs, so call `cx.finish()` once they have ended"
            ),
            None => tracing::warn!(
                operator,
                "an operator has run {times} times in a row and had nothing to take and nothing to send: all that it waits \
                 for is always there, so say with `.when(..)` when it is to run"
            ),
        });
    }
}
