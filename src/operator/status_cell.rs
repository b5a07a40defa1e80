//! [`StatusCell`]: the status that an operator publishes.
//!
//! The operator's own task writes it at every turn, at the cost of one store; the reader assembles the status.
//! [`watchers`](super::watchers) are notified of changes by the caller.

use std::{
    sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    clock,
    condition::Status,
    device::ticks::{TickClock, Ticks},
    sync::{Mutex, lock},
};

/// The status of one operator. The two numbers that each turn writes come first.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct StatusCell {
    /// One of [`code`] and, in the bits above it, the time of `WAIT_TIME`, in nanoseconds since `made`.
    state: AtomicU64,
    runs: AtomicU64,
    /// The length of all stretches of runs that have ended, and when the latest one ended, in ticks.
    busy: AtomicU64,
    stopped: AtomicU64,
    /// The longest time that was shown for `busy`, in nanoseconds: estimates of a tick's length vary.
    shown: AtomicU64,
    made: Instant,
    /// What the operator waits for besides its hubs.
    lacks: Mutex<Vec<String>>,
    /// Some of these waits are not at its ports: any event might end such a wait.
    elsewhere: AtomicBool,
    /// Its runs execute in other tasks, or its ports are used there. The waits of those tasks are not shown here.
    has_workers: AtomicBool,
    /// It is an egress: what it waits for besides its hubs is outside of the flow.
    is_egress: AtomicBool,
    /// See [`ingress_waits`](Self::ingress_waits).
    asked: Mutex<Vec<IngressWait>>,
    /// One of [`responses`].
    responses: AtomicU8,
}

/// What an operator does with the responses of a service that it receives.
mod responses {
    /// It is not the operator of a service.
    pub(super) const NONE: u8 = 0;
    /// It passes each on to its caller.
    pub(super) const PASSED_ON: u8 = 1;
    /// It might hold one at the moment.
    pub(super) const HELD: u8 = 2;
}

/// A wait of a run at an ingress of its own flow, with the number of the operator that represents the ingress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IngressWait {
    /// For a response from a service.
    Answer(usize),
    /// For room for a message or a request.
    Room(usize),
}

mod code {
    pub(super) const READY: u64 = 0;
    pub(super) const WAIT_TIME: u64 = 1;
    pub(super) const WAIT: u64 = 2;
    pub(super) const WAIT_EVENT: u64 = 3;
    pub(super) const NEVER: u64 = 4;
    pub(super) const RUNNING: u64 = 5;
    /// With the bits of an [`RunWait`](super::RunWait).
    pub(super) const IN_RUN: u64 = 8;
    pub(super) const BITS: u32 = 4;
    pub(super) const MASK: u64 = (1 << BITS) - 1;
}

/// What an operator waits for in the middle of a run: one thing, or several at the same time, in a `select!` for
/// example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunWait(u64);

impl RunWait {
    /// Room, or a blank envelope.
    pub(crate) const SENDS: Self = Self(1);
    pub(crate) const RECEIVES: Self = Self(2);
    /// A response from a service of its own flow, or room for a message that it sends like an external caller.
    pub(crate) const ASKS: Self = Self(4);

    pub(crate) fn sends(self) -> bool {
        self.0 & Self::SENDS.0 != 0
    }

    pub(crate) fn receives(self) -> bool {
        self.0 & Self::RECEIVES.0 != 0
    }

    pub(crate) fn asks(self) -> bool {
        self.0 & Self::ASKS.0 != 0
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl StatusCell {
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU64::new(code::READY),
            made: clock::now(),
            runs: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            stopped: AtomicU64::new(Ticks::now().count()),
            shown: AtomicU64::new(0),
            lacks: Mutex::default(),
            elsewhere: AtomicBool::new(false),
            has_workers: AtomicBool::new(false),
            is_egress: AtomicBool::new(false),
            asked: Mutex::default(),
            responses: AtomicU8::new(responses::NONE),
        }
    }

    /// Returns true if the state has changed.
    #[inline]
    fn set(&self, state: u64) -> bool {
        let changed = self.state.load(Ordering::Relaxed) != state;
        if changed {
            self.state.store(state, Ordering::Release);
        }
        changed
    }

    #[inline]
    pub(crate) fn set_running(&self) -> bool {
        self.set(code::RUNNING)
    }

    pub(crate) fn set_in_run(&self, what: RunWait) -> bool {
        self.set(code::IN_RUN | what.0)
    }

    /// What a run waits for, if it waits.
    pub(crate) fn in_run(&self) -> Option<RunWait> {
        let state = self.state.load(Ordering::Acquire) & code::MASK;
        (state & code::IN_RUN != 0).then_some(RunWait(state & !code::IN_RUN))
    }

    /// Records that a run waits for `ask`. `among`: besides other such waits in the same poll.
    pub(crate) fn add_ingress_wait(&self, ask: IngressWait, among: bool) {
        let mut asked = lock(&self.asked);
        if !among {
            asked.clear();
        }
        asked.push(ask);
    }

    /// What a run waits for at the ingresses of its own flow.
    pub(crate) fn ingress_waits(&self) -> Vec<IngressWait> {
        if self.in_run().is_some_and(RunWait::asks) { lock(&self.asked).clone() } else { Vec::new() }
    }

    #[inline]
    pub(crate) fn set_runs(&self, runs: u64) {
        self.runs.store(runs, Ordering::Relaxed);
    }

    /// A stretch of runs has ended; `busy`: the length of all, in ticks.
    #[inline]
    pub(crate) fn set_stopped(&self, busy: u64, at: Ticks) {
        self.busy.store(busy, Ordering::Relaxed);
        self.stopped.store(at.count(), Ordering::Relaxed);
    }

    /// The length of all stretches of runs that have ended. Never less than before.
    pub(crate) fn busy(&self, clock: &TickClock) -> Duration {
        let busy = clock.duration(self.busy.load(Ordering::Relaxed)).as_nanos();
        let busy = u64::try_from(busy).unwrap_or(u64::MAX);
        Duration::from_nanos(self.shown.fetch_max(busy, Ordering::Relaxed).max(busy))
    }

    /// When the latest stretch ended.
    pub(crate) fn stopped(&self) -> Ticks {
        Ticks::of_count(self.stopped.load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn set_status(&self, status: Status) -> bool {
        self.set(match status {
            Status::Ready => code::READY,
            Status::Wait => code::WAIT,
            Status::WaitEvent => code::WAIT_EVENT,
            Status::Never => code::NEVER,
            Status::WaitTime(due) => {
                let since = due.saturating_duration_since(self.made).as_nanos();
                let since = u64::try_from(since).unwrap_or(u64::MAX).min(u64::MAX >> code::BITS);
                since << code::BITS | code::WAIT_TIME
            }
        })
    }

    /// Sets what the operator waits for besides its hubs, until the next call. `elsewhere`: some of it is not at its
    /// ports.
    pub(crate) fn set_lacks(&self, lacks: Vec<String>, elsewhere: bool) {
        self.elsewhere.store(elsewhere, Ordering::Relaxed);
        *lock(&self.lacks) = lacks;
    }

    pub(crate) fn waits_elsewhere(&self) -> bool {
        self.elsewhere.load(Ordering::Relaxed)
    }

    pub(crate) fn set_has_workers(&self) {
        self.has_workers.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_workers(&self) -> bool {
        self.has_workers.load(Ordering::Relaxed)
    }

    pub(crate) fn set_is_egress(&self) {
        self.is_egress.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_egress(&self) -> bool {
        self.is_egress.load(Ordering::Relaxed)
    }

    /// Records that the operator passes the responses of a service on to callers outside the flow, and whether it might
    /// hold one now. Set before the response is taken, and cleared after all that it contained was passed on.
    pub(crate) fn set_passes_responses_on(&self, holds: bool) {
        self.responses.store(if holds { responses::HELD } else { responses::PASSED_ON }, Ordering::Release);
    }

    /// True for the operator of a service: nothing of what it receives stays with it, or goes to other operators.
    pub(crate) fn passes_responses_on(&self) -> bool {
        self.responses.load(Ordering::Relaxed) != responses::NONE
    }

    pub(crate) fn holds_a_response(&self) -> bool {
        self.responses.load(Ordering::Acquire) == responses::HELD
    }

    pub(crate) fn lacks(&self) -> Vec<String> {
        lock(&self.lacks).clone()
    }

    pub(crate) fn runs(&self) -> u64 {
        self.runs.load(Ordering::Relaxed)
    }

    /// The status, and whether a run is in progress.
    pub(crate) fn status(&self) -> (Status, bool) {
        let state = self.state.load(Ordering::Acquire);
        let status = match state & code::MASK {
            code::WAIT => Status::Wait,
            code::WAIT_EVENT => Status::WaitEvent,
            code::NEVER => Status::Never,
            code::WAIT_TIME => Status::WaitTime(self.made + Duration::from_nanos(state >> code::BITS)),
            code::RUNNING => return (Status::Ready, true),
            in_run if in_run & code::IN_RUN != 0 => return (Status::Wait, true),
            _ => Status::Ready,
        };
        (status, false)
    }
}
