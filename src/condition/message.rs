//! [`Need`]: how many messages an input waits for.
//!
//! By default an input is ready while there is a message to take. `#[input(at_least = 4)]` waits for more messages,
//! `#[input(at_most = 8)]` also for no more than this many, and `#[input(optional)]` for none at all. When the last
//! sender has closed, the remaining messages can be taken even if they are fewer, and then the input is `Never`.
//!
//! `#[input(batch = 8, within = "5ms")]` bounds the wait for a batch: the input is ready with eight messages, or once
//! the oldest has waited that long.
//!
//! ```text
//!                    at least n (or the last ones)     more than `at_most`
//!   n not reached ────────────────────────────────> READY ────────────────> WAIT
//!     │   ^                                           ^
//!     │   └──── take ─────────────────────────────────┤
//!     └──────── the oldest has waited long enough ────┘
//! ```

use std::time::Duration;

use tokio::time::Instant;

use super::{Alarm, Readiness, alarm::after};
use crate::hub::Since;

/// How many messages an input waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) least: usize,
    pub(crate) most: Option<usize>,
    /// Fewer than `least` messages suffice once the oldest has waited this long.
    pub(crate) within: Option<Duration>,
    pub(crate) since: Since,
    /// True if the input waits for no message.
    pub(crate) optional: bool,
    /// True if `least` was set explicitly, even to 1: it then applies to all connections together. Otherwise one
    /// message from each connection is needed.
    pub(crate) together: bool,
}

impl Default for Need {
    fn default() -> Self {
        Self { least: 1, most: None, within: None, since: Since::Arrived, optional: false, together: false }
    }
}

impl Need {
    pub(crate) fn at_least(least: usize) -> Self {
        Self { least, together: true, ..Self::default() }
    }

    /// The number of messages up to which a port has to count.
    pub(crate) fn asks(&self) -> usize {
        self.most.map_or(self.least, |most| self.least.max(most.saturating_add(1)))
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The times that a hub has to record for the batch, if there is one.
    pub(crate) fn times(&self) -> Option<Since> {
        self.within.map(|_| self.since)
    }

    /// The configuration error, if any, for a queue that holds `capacity` messages; with `latest`, only the newest.
    pub(crate) fn problem(&self, capacity: usize, latest: bool) -> Option<String> {
        let Self { least, most, within, .. } = *self;
        match most {
            _ if least == 0 => Some("waits for 0 messages: wait for at least 1, or make the input `optional`".into()),
            _ if least > capacity && latest => Some(format!(
                "waits for {least} messages, but `HubOptions::latest` holds only the newest one: wait for 1 message, or use \
                 another hub, such as `HubOptions::bounded({least})`"
            )),
            _ if least > capacity => Some(format!(
                "waits for {least} messages, but its queue holds at most {capacity}: give the hub a capacity of {least} \
                 or more"
            )),
            Some(most) if most < least => Some(format!(
                "waits for at least {least} and at most {most} messages: make `at_most` at least as large as `at_least`"
            )),
            _ if within == Some(Duration::ZERO) => {
                Some("waits for a batch within 0 seconds: give it a longer time, or leave out `within`".into())
            }
            _ => None,
        }
    }

    pub(crate) fn describe(&self) -> String {
        let Self { least, most, within, .. } = *self;
        match (most, within) {
            (Some(most), _) if most > least => format!("{least} to {}", messages(most)),
            (Some(_), _) => format!("no more than {}", messages(least)),
            (None, Some(within)) => format!("{} within {within:?}", messages(least)),
            (None, None) => messages(least),
        }
    }

    /// The readiness with `counted` messages. `oldest`: when the oldest message began to wait.
    pub(crate) fn readiness(
        &self,
        counted: Counted,
        oldest: impl FnOnce() -> Option<Instant>,
        alarm: &mut Option<Box<Alarm>>,
        cx: &mut std::task::Context<'_>,
    ) -> Readiness {
        let Counted { ready, more, .. } = counted;
        if self.most.is_some_and(|most| ready > most) {
            return Readiness::WAIT;
        }
        if ready >= self.least || (more.is_never() && ready > 0) {
            return Readiness::READY;
        }
        match (self.within, oldest()) {
            // The port did not look for more: its hub has failed, and the next `take` returns the error.
            _ if more.is_ready() => more,
            (Some(within), Some(oldest)) if ready > 0 => {
                let alarm = alarm.get_or_insert_default();
                if alarm.has_passed(after(oldest, within), cx) { Readiness::READY } else { Readiness::WAIT_TIME }
            }
            _ => more,
        }
    }
}

/// The messages at an input.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// How many messages can be taken: exact up to the number asked for, and possibly more.
    pub(crate) ready: usize,
    /// Why there are no more: `Ready` if no more were asked for.
    pub(crate) more: Readiness,
    /// How many of `ready` were already read, in latest-value hubs whose writers have ended.
    pub(crate) already_read: usize,
    /// True if some of the connections are not latest-value hubs.
    pub(crate) has_queue: bool,
}

impl Counted {
    /// The count for no connection.
    pub(crate) const NONE: Self = Self { ready: 0, more: Readiness::NEVER, already_read: 0, has_queue: false };

    /// The count for a port without latest-value hubs.
    pub(crate) fn new(ready: usize, more: Readiness) -> Self {
        Self { ready, more, already_read: 0, has_queue: true }
    }

    /// The count for several connections; `ask` polls all of them. If only values that were already read remain, the
    /// connections have ended: at once if one of them is not a latest-value hub, otherwise together with the operator's
    /// other inputs.
    pub(crate) fn of_all(mut ask: impl FnMut() -> Self) -> Self {
        let counted = ask();
        if !counted.more.is_never() || counted.ready == 0 || counted.already_read < counted.ready {
            return counted;
        }
        if counted.has_queue {
            return Self { ready: 0, already_read: 0, ..counted };
        }
        // Only after the first poll does each of these hubs know that the others have ended.
        ask()
    }

    /// The readiness of a port that was asked for one message.
    pub(crate) fn of_one(self) -> Readiness {
        if self.ready > 0 { Readiness::READY } else { self.more }
    }

    /// Combines two connections.
    pub(crate) fn and(self, other: Self) -> Self {
        // The connections are open while either of them is.
        let more = match (self.more.is_never(), other.more.is_never()) {
            (true, _) => other.more,
            (_, true) => self.more,
            // Of two waits, the one that ends without another operator is reported.
            (false, false) if self.more.needs_others() => other.more,
            (false, false) => self.more,
        };
        Self {
            ready: self.ready.saturating_add(other.ready),
            more,
            already_read: self.already_read.saturating_add(other.already_read),
            has_queue: self.has_queue || other.has_queue,
        }
    }
}

pub(super) fn messages(count: usize) -> String {
    if count == 1 { "1 message".into() } else { format!("{count} messages") }
}
