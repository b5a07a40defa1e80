//! Messages available: an input's condition. [`Need`] is how many.
//!
//! By default an input is ready while there is one message to take. `#[input(at_least = 4)]` asks for more,
//! `#[input(at_most = 8)]` for no more than so many, and `#[input(optional)]` asks for none at all. When the last sender is
//! gone, what is left is handed out, fewer than were asked for, and then the input is `Never`.
//!
//! `#[input(batch = 8, within = "5ms")]` is for those who would rather have fewer than wait: the input is ready with eight
//! messages, or once the oldest has waited that long.
//!
//! ```text
//!                    at least n (or the last ones)       more than at most
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
    /// Fewer than `least` will do once the oldest has waited so long.
    pub(crate) within: Option<Duration>,
    pub(crate) since: Since,
    /// It waits for none.
    pub(crate) optional: bool,
    /// The number was said: of several connections, of all together, also where it is 1. If not, one of each.
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

    /// About how many messages a port is to be asked.
    pub(crate) fn asks(&self) -> usize {
        self.most.map_or(self.least, |most| self.least.max(most.saturating_add(1)))
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// What a hub has to write down for it.
    pub(crate) fn times(&self) -> Option<Since> {
        self.within.map(|_| self.since)
    }

    /// What is wrong with it where the queue holds `capacity` messages; `latest`: only ever one, the newest.
    pub(crate) fn problem(&self, capacity: usize, latest: bool) -> Option<String> {
        let Self { least, most, within, .. } = *self;
        match most {
            _ if least == 0 => Some("waits for 0 messages: write `optional`, or at least 1".into()),
            _ if least > capacity && latest => Some(format!(
                "waits for {least} messages, and `Hub::latest` holds one, the newest: wait for one, or give it another \
                 hub, as `Hub::bounded({least})`"
            )),
            _ if least > capacity => Some(format!(
                "waits for {least} messages, and its queue holds {capacity}: give the hub a capacity of {least} or more"
            )),
            Some(most) if most < least => Some(format!("waits for at least {least} and at most {most} messages")),
            _ if within == Some(Duration::ZERO) => Some("waits for a batch no time at all: leave it out".into()),
            _ => None,
        }
    }

    /// What it waits for, in words.
    pub(crate) fn describe(&self) -> String {
        let Self { least, most, within, .. } = *self;
        match (most, within) {
            (Some(most), _) if most > least => format!("{least} to {}", messages(most)),
            (Some(_), _) => format!("no more than {}", messages(least)),
            (None, Some(within)) => format!("{} within {within:?}", messages(least)),
            (None, None) => messages(least),
        }
    }

    /// `counted` messages are there; `more` says why there are no more, if there are fewer than needed; `oldest`: since when
    /// the first has waited.
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
            // No more were asked about: the hub has failed, and whoever takes is told so.
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
    /// How many can be taken, up to as many as were asked about; more, if that is known.
    pub(crate) ready: usize,
    /// Why there are no more than that: `Ready` if nobody asked about more.
    pub(crate) more: Readiness,
    /// How many of `ready` were read before, and are in a hub that keeps the latest and whose writer has ended.
    pub(crate) kept: usize,
    /// Some of the connections do not keep the latest.
    pub(crate) once: bool,
}

impl Counted {
    /// Of no connection.
    pub(crate) const NONE: Self = Self { ready: 0, more: Readiness::NEVER, kept: 0, once: false };

    /// At a port that is no input of a flow's hubs.
    pub(crate) fn new(ready: usize, more: Readiness) -> Self {
        Self { ready, more, kept: 0, once: true }
    }

    /// Of several connections; `ask` asks all of them. With nothing but what is kept, they have ended: if one of them does not
    /// keep the latest, at once; if not, with the operator's other inputs.
    pub(crate) fn of_all(mut ask: impl FnMut() -> Self) -> Self {
        let counted = ask();
        if !counted.more.is_never() || counted.ready == 0 || counted.kept < counted.ready {
            return counted;
        }
        if counted.once {
            return Self { ready: 0, kept: 0, ..counted };
        }
        // Only after the first question is it known in all of these hubs that the others have ended.
        ask()
    }

    /// Of a port that was asked about one message.
    pub(crate) fn of_one(self) -> Readiness {
        if self.ready > 0 { Readiness::READY } else { self.more }
    }

    /// Of two connections: of both together.
    pub(crate) fn and(self, other: Self) -> Self {
        // Open while one of them is.
        let more = match (self.more.is_never(), other.more.is_never()) {
            (true, _) => other.more,
            (_, true) => self.more,
            // Whichever comes first.
            (false, false) if self.more.needs_others() => other.more,
            (false, false) => self.more,
        };
        Self {
            ready: self.ready.saturating_add(other.ready),
            more,
            kept: self.kept.saturating_add(other.kept),
            once: self.once || other.once,
        }
    }
}

pub(super) fn messages(count: usize) -> String {
    if count == 1 { "1 message".into() } else { format!("{count} messages") }
}
