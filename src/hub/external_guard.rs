//! [`ExternalGuard`]: notes on an envelope that it is outside its flow, and keeps the flow from being idle.
//!
//! A flow is idle when none of its operators can make progress by itself. An envelope that has left the flow, through an
//! egress or in a service's response, is in use by no operator, but it will be returned at some time, and its hub's writer
//! can make progress after that. It therefore gets a guard when it leaves, and the flow does not count as idle until the guard
//! is dropped.
//!
//! ```text
//!   operator ──sends──> [ ExternalGuard ]          ──> the program outside ──drops──> its pool: the writer is woken
//!                         holds the flow                                      then the guards are dropped
//! ```
//!
//! An operator adds the guard while the flow is active, and a returned envelope wakes the writer before its guards are
//! dropped: the flow never appears idle in between. An envelope that is sent into its flow again loses that
//! flow's guards.
//!
//! An envelope may pass through several flows. It has a guard for each flow that it is outside of.
//!
//! A guard may also say that the envelope was given to a [caller](CallerErrors) of the flow, which must not see the
//! names of the flow's operators and streams. Such a guard does not hold the flow: a blank envelope of an ingress is
//! held by the ingress, and one in a service's response becomes the caller's own memory (`ResponseTransfer`), since callers
//! do not trust each other.

use std::{fmt, ptr, sync::Arc};

use smallvec::SmallVec;

use crate::error::CallerErrors;

/// A flow, as seen by its envelopes that are outside of it.
pub(crate) trait OutsideTracker: Send + Sync + 'static {
    /// Counts an envelope that is outside: the flow is not idle until [`regain`](Self::regain).
    fn lend(&self);
    fn regain(&self);
    /// Whether no operator of the flow runs any more.
    fn has_ended(&self) -> bool;
    /// For an implementation that keeps other flows from being idle: releases those for which `_is` returns true.
    fn release(&self, _is: &dyn Fn(&Boundary) -> bool) -> SmallVec<[ExternalGuard; 1]> {
        SmallVec::new()
    }
}

/// A place where envelopes leave a flow: an egress, a service, an ingress that hands out blank envelopes, a chunk
/// hub.
pub(crate) struct Boundary {
    pub(super) flow: Arc<dyn OutsideTracker>,
    /// Whether the flow is kept from being idle while an envelope is outside.
    lends: bool,
    /// The errors that callers get in place of the envelope's own.
    pub(super) errors: Option<Arc<CallerErrors>>,
}

/// See the module. If its boundary lends, it holds the flow until it is dropped.
pub(crate) struct ExternalGuard(pub(super) Arc<Boundary>);

/// The guards of one envelope, at most one of each kind. Most envelopes have none, and few have several.
#[derive(Default)]
pub(super) struct ExternalGuards {
    first: Option<ExternalGuard>,
    #[expect(
        clippy::box_collection,
        reason = "one word: envelopes are moved more often than they have several guards"
    )]
    others: Option<Box<Vec<ExternalGuard>>>,
}

impl Boundary {
    /// To the program that the flow belongs to.
    pub(crate) fn of_program(flow: Arc<dyn OutsideTracker>) -> Arc<Self> {
        Arc::new(Self { flow, lends: true, errors: None })
    }

    /// To callers, which get these errors. The envelopes do not hold the flow.
    pub(crate) fn of_callers(flow: Arc<dyn OutsideTracker>, errors: CallerErrors) -> Arc<Self> {
        Arc::new(Self { flow, lends: false, errors: Some(Arc::new(errors)) })
    }

    pub(crate) fn is_of(&self, flow: &Arc<dyn OutsideTracker>) -> bool {
        is_same_flow(&self.flow, flow)
    }

    /// Whether both are boundaries of the same flow.
    pub(crate) fn has_flow_of(&self, other: &Self) -> bool {
        is_same_flow(&self.flow, &other.flow)
    }

    /// The address of the flow; unique while the flow is alive.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.flow).cast::<()>().addr()
    }

    /// Whether a guard of one is equivalent to a guard of the other.
    fn is_equivalent(&self, other: &Self) -> bool {
        let same_errors = match &other.errors {
            None => self.errors.is_none(),
            Some(errors) => self.has_errors(errors),
        };
        same_errors && self.lends == other.lends && self.has_flow_of(other)
    }

    fn has_errors(&self, errors: &Arc<CallerErrors>) -> bool {
        self.errors.as_ref().is_some_and(|own| Arc::ptr_eq(own, errors))
    }
}

fn is_same_flow(one: &Arc<dyn OutsideTracker>, other: &Arc<dyn OutsideTracker>) -> bool {
    ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

impl ExternalGuard {
    /// Keeps the flow from being idle, since something outside might still cause activity in it.
    pub(crate) fn holding(boundary: &Arc<Boundary>) -> Self {
        if boundary.lends {
            boundary.flow.lend();
        }
        Self(boundary.clone())
    }

    pub(crate) fn boundary(&self) -> &Arc<Boundary> {
        &self.0
    }

    pub(crate) fn holds(&self, flow: &Arc<dyn OutsideTracker>) -> bool {
        self.0.is_of(flow)
    }
}

impl Drop for ExternalGuard {
    fn drop(&mut self) {
        if self.0.lends {
            self.0.flow.regain();
        }
    }
}

impl fmt::Debug for ExternalGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExternalGuard")
    }
}

impl ExternalGuards {
    pub(super) fn iter(&self) -> impl Iterator<Item = &ExternalGuard> {
        self.first.iter().chain(self.others.iter().flat_map(|others| others.iter()))
    }

    /// Adds a guard, unless there is an equivalent one.
    pub(super) fn add(&mut self, boundary: &Arc<Boundary>) {
        if !self.iter().any(|guard| guard.0.is_equivalent(boundary)) {
            self.push(ExternalGuard::holding(boundary));
        }
    }

    pub(super) fn push(&mut self, guard: ExternalGuard) {
        if self.first.is_some() && self.others.as_ref().is_none_or(|others| others.len() == others.capacity()) {
            // Only when there is no room, so that the cost per guard is bounded.
            self.forget_ended();
        }
        match &self.first {
            None => self.first = Some(guard),
            Some(_) => self.others.get_or_insert_default().push(guard),
        }
    }

    /// Removes the guards of flows that have ended. One of those that hide errors from callers stays: the envelope can
    /// return to none of these flows.
    fn forget_ended(&mut self) {
        let mut for_callers = false;
        let gone = self.take(|guard| {
            let ended = guard.0.flow.has_ended();
            let stays = !ended || (guard.0.errors.is_some() && !for_callers);
            for_callers |= ended && stays;
            !stays
        });
        drop(gone);
    }

    /// Removes and returns the guards that hold a flow.
    pub(super) fn take_lending(&mut self) -> SmallVec<[ExternalGuard; 1]> {
        self.take(|guard| guard.0.lends)
    }

    pub(super) fn take(&mut self, mut is: impl FnMut(&ExternalGuard) -> bool) -> SmallVec<[ExternalGuard; 1]> {
        let mut taken = SmallVec::new();
        taken.extend(self.first.take_if(|guard| is(guard)));
        if let Some(others) = &mut self.others {
            taken.extend(others.extract_if(.., |guard| is(guard)));
            if self.first.is_none() {
                self.first = others.pop();
            }
        }
        taken
    }

    /// What a caller gets in place of the envelope's own errors, if the envelope was given to one.
    pub(super) fn errors(&self) -> Option<&Arc<CallerErrors>> {
        self.iter().find_map(|guard| guard.0.errors.as_ref())
    }

    /// Called when this envelope takes over the memory of another one: hides its errors where the errors of the other one
    /// were hidden.
    pub(super) fn hide_as(&mut self, other: &Self) {
        for guard in other.iter() {
            let Boundary { flow, errors: Some(errors), .. } = &*guard.0 else { continue };
            if !self.iter().any(|own| own.0.has_errors(errors)) {
                let hides = Boundary { flow: flow.clone(), lends: false, errors: Some(errors.clone()) };
                self.push(ExternalGuard::holding(&Arc::new(hides)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

    use super::*;

    #[derive(Default)]
    struct Counted {
        out: AtomicIsize,
        ended: AtomicBool,
    }

    impl OutsideTracker for Counted {
        fn lend(&self) {
            self.out.fetch_add(1, Ordering::SeqCst);
        }

        fn regain(&self) {
            self.out.fetch_sub(1, Ordering::SeqCst);
        }

        fn has_ended(&self) -> bool {
            self.ended.load(Ordering::SeqCst)
        }
    }

    fn out(flows: &[Arc<Counted>]) -> Vec<isize> {
        flows.iter().map(|flow| flow.out.load(Ordering::SeqCst)).collect()
    }

    fn flows<const N: usize>() -> [Arc<Counted>; N] {
        std::array::from_fn(|_| Arc::default())
    }

    #[test]
    fn an_envelope_has_one_guard_for_each_flow() {
        let flows = flows::<3>();
        let mut external_guards = ExternalGuards::default();
        for flow in flows.iter().chain(&flows) {
            external_guards.add(&Boundary::of_program(flow.clone()));
        }
        assert_eq!(out(&flows), [1, 1, 1]);
        for gone in [0, 2, 1] {
            let flow: Arc<dyn OutsideTracker> = flows[gone].clone();
            drop(external_guards.take(|guard| guard.holds(&flow)));
            assert_eq!(flows[gone].out.load(Ordering::SeqCst), 0);
        }
        assert!(external_guards.iter().next().is_none());
    }

    #[test]
    fn guards_of_flows_that_have_ended_do_not_pile_up() {
        let mut external_guards = ExternalGuards::default();
        let runs = Arc::new(Counted::default());
        let all: Vec<_> = (0..10_000)
            .map(|number| {
                let flow = Arc::new(Counted::default());
                let errors = || CallerErrors::new("flow", "service");
                external_guards.add(&match number % 2 {
                    0 => Boundary::of_program(flow.clone()),
                    _ => Boundary::of_callers(flow.clone(), errors()),
                });
                flow.ended.store(true, Ordering::SeqCst);
                if number == 500 {
                    external_guards.add(&Boundary::of_program(runs.clone()));
                }
                assert!(external_guards.iter().count() <= 8, "{number}");
                flow
            })
            .collect();
        assert!(external_guards.errors().is_some());
        assert_eq!(runs.out.load(Ordering::SeqCst), 1, "a flow that runs is held");
        drop(external_guards);
        assert!(out(&all).iter().all(|out| *out == 0));
        assert_eq!(runs.out.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn errors_are_hidden_while_a_guard_hides_them() {
        let [first, second] = flows();
        let mut external_guards = ExternalGuards::default();
        external_guards.add(&Boundary::of_program(second.clone()));
        assert!(external_guards.errors().is_none());
        let mut other = ExternalGuards::default();
        other.add(&Boundary::of_callers(first.clone(), CallerErrors::new("flow", "service")));
        external_guards.hide_as(&other);
        external_guards.hide_as(&other);
        assert!(external_guards.errors().is_some());
        assert_eq!(external_guards.iter().count(), 2);
        assert_eq!(out(&[first.clone(), second]), [0, 1], "a guard that only hides errors holds no flow");
        let flow: Arc<dyn OutsideTracker> = first;
        drop(external_guards.take(|guard| guard.holds(&flow)));
        assert!(external_guards.errors().is_none());
    }
}
