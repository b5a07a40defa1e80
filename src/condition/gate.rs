//! [`Gate`], `.when(gate.clone())`: code outside of an operator decides whether the operator runs.
//!
//! ```text
//!            pause                      end
//!   OPEN <──────────> PAUSED ────────────────────> ENDED      (from `OPEN`, too)
//!   ready    resume   waits for an event           never
//!                     │ the last handle is dropped
//!                     └──> waits; if all other operators are idle, the flow has stalled
//! ```
//!
//! Holoscan's boolean condition is the transition from `OPEN` to `ENDED`: a kill switch. A paused gate keeps its flow
//! from ending while a handle exists that can resume it.

use std::{borrow::Cow, collections::BTreeMap, task::Context};

use super::{
    Condition, IntoCondition, Status, When,
    watch::{WatchReader, WatchValue, WatchWriter},
};
use crate::error::{Error, ErrorKind, Result};

/// Pauses, resumes and ends operators, from any thread or task: those that were given the gate with
/// `.when(gate.clone())`.
///
/// ```
/// use wakeline::{Flow, condition::Gate, operator::source};
///
/// let gate = Gate::paused();
/// let mut flow = Flow::new("camera");
/// let frames = flow.add("frames", source(async || Ok(Some(0_u8)))).when(gate.clone());
/// gate.resume();
/// assert!(gate.is_open());
/// ```
///
/// An operator can look up a gate that [`Flow::gate`](crate::Flow::gate) has created by its name, with
/// [`Cx::gate`](crate::Cx::gate).
#[derive(Clone, Debug)]
pub struct Gate(WatchWriter<GateState>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GateState {
    Open,
    Paused,
    Ended,
}

impl WatchValue for GateState {
    fn is_awaited(self) -> bool {
        self == Self::Paused
    }
}

#[derive(Debug)]
struct Gated(WatchReader<GateState>);

impl Gate {
    /// Creates an open gate.
    pub fn open() -> Self {
        Self(WatchWriter::new(GateState::Open))
    }

    /// Creates a paused gate.
    pub fn paused() -> Self {
        Self(WatchWriter::new(GateState::Paused))
    }

    /// Lets no run begin until the gate is resumed. A run in progress continues to its end.
    pub fn pause(&self) {
        self.set(GateState::Paused);
    }

    /// Lets runs begin again.
    pub fn resume(&self) {
        self.set(GateState::Open);
    }

    /// Lets no further run begin: the gate's operators end, and then those downstream. This cannot be undone.
    pub fn end(&self) {
        self.set(GateState::Ended);
    }

    /// True unless the gate is paused or has ended.
    pub fn is_open(&self) -> bool {
        self.0.get() == GateState::Open
    }

    /// True once the gate has ended.
    pub fn has_ended(&self) -> bool {
        self.0.get() == GateState::Ended
    }

    fn set(&self, now: GateState) {
        self.0.set(|before| if before == GateState::Ended { before } else { now });
    }
}

/// The gates of a flow, by name. They are kept as readers, which do not count as handles.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gates(BTreeMap<String, WatchReader<GateState>>);

impl Gates {
    /// The gate called `name`; a new, open gate if there is none.
    pub(crate) fn get(&mut self, name: String) -> Gate {
        if let Some(known) = self.0.get(&name) {
            return Gate(known.writer());
        }
        let gate = Gate::open();
        self.0.insert(name, gate.0.reader());
        gate
    }

    /// The gate called `name`, which must exist.
    pub(crate) fn find(&self, name: &str) -> Result<Gate> {
        if let Some(known) = self.0.get(name) {
            return Ok(Gate(known.writer()));
        }
        let known: Vec<_> = self.0.keys().map(|name| format!("`{name}`")).collect();
        let known =
            if known.is_empty() { "it has none yet".into() } else { format!("its gates are {}", known.join(", ")) };
        Err(Error::new(
            ErrorKind::Usage,
            format!("the flow has no gate `{name}`: create it with `flow.gate(\"{name}\")` ({known})"),
        ))
    }
}

/// The condition itself holds no handle.
impl IntoCondition for Gate {
    fn into_condition(self) -> When {
        When::boxed(Gated(self.0.reader()))
    }
}

impl Condition for Gated {
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        let seen = self.0.poll(cx.waker());
        match seen.value {
            GateState::Open => Status::Ready,
            GateState::Ended => Status::Never,
            GateState::Paused => Status::wait_for_event(seen.may_change),
        }
    }

    fn describe(&self) -> Cow<'static, str> {
        "its gate to be resumed".into()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        task::{Context, Wake, Waker},
    };

    use super::{Gate, Gated};
    use crate::condition::{Condition, Status};

    /// Calls back when it is woken or dropped, and then panics.
    struct Hostile {
        gate: Gate,
        woken: Arc<AtomicUsize>,
        when_dropped: bool,
    }

    impl Hostile {
        fn waker(gate: &Gate, woken: &Arc<AtomicUsize>, when_dropped: bool) -> Waker {
            Waker::from(Arc::new(Self { gate: gate.clone(), woken: woken.clone(), when_dropped }))
        }

        fn call_back(&self) -> ! {
            assert!(!self.gate.has_ended());
            self.gate.clone().pause();
            panic!("a hostile waker");
        }
    }

    impl Wake for Hostile {
        fn wake(self: Arc<Self>) {
            self.woken.fetch_add(1, Ordering::Relaxed);
            if !self.when_dropped {
                self.call_back();
            }
        }
    }

    impl Drop for Hostile {
        fn drop(&mut self) {
            if self.when_dropped {
                self.call_back();
            }
        }
    }

    fn poll(gated: &mut Gated, waker: Waker) -> Status {
        let status = gated.poll_status(&mut Context::from_waker(&waker));
        // This might be the last clone.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(waker)));
        status
    }

    #[test]
    fn a_hostile_waker_at_a_gate_strands_no_other() {
        for when_dropped in [false, true] {
            let gate = Gate::paused();
            let woken = Arc::new(AtomicUsize::new(0));
            let mut all = [0, 1, 2].map(|_| Gated(gate.0.reader()));
            for gated in &mut all {
                assert_eq!(poll(gated, Hostile::waker(&gate, &woken, when_dropped)), Status::WaitEvent);
            }
            gate.pause();
            assert_eq!(woken.load(Ordering::Relaxed), 3, "when dropped: {when_dropped}");
            // Registered again, replaced and deregistered.
            for gated in &mut all {
                poll(gated, Hostile::waker(&gate, &woken, when_dropped));
                poll(gated, Hostile::waker(&gate, &woken, when_dropped));
            }
            drop(all);
            assert!(!gate.is_open());
        }
    }
}
