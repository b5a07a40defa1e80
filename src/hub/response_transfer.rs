//! [`ResponseTransfer`] and [`ReturnedGuards`]: messages that cross the boundary of a flow. Their envelopes are
//! [guarded](super::external_guard) when they leave the flow, become the caller's memory in a response, and lose the flow's
//! guards when they enter it again.

use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::{
    Message,
    external_guard::{Boundary, ExternalGuard, OutsideTracker},
    pool::{Pool, PoolReplacement, RawEnvelope},
};
use crate::error::{CallerErrors, Error, Result};

/// Transfers the envelopes of a service's responses to its callers.
pub(crate) struct ResponseTransfer {
    boundary: Arc<Boundary>,
    no_pool: Weak<Pool>,
}

/// The guards that were removed from a message as it entered their flow, kept until the message is known to stay there.
#[derive(Default)]
pub(crate) struct ReturnedGuards {
    /// Each with the index of its envelope in the message.
    guards: SmallVec<[(usize, Option<ExternalGuard>); 2]>,
}

impl Boundary {
    /// Guards the envelopes of a message that leaves the flow. If the guards lend, call it from one of the flow's
    /// operators.
    pub(crate) fn guard<M: Message>(self: &Arc<Self>, message: &mut M) {
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| envelope.external_guards_mut().add(self));
        }
    }

    /// Guards one envelope. If the guard lends, the caller must hold the flow.
    pub(crate) fn guard_one(self: &Arc<Self>, envelope: &mut RawEnvelope) {
        envelope.external_guards_mut().add(self);
    }
}

impl ResponseTransfer {
    pub(crate) fn new(flow: Arc<dyn OutsideTracker>, errors: CallerErrors) -> Self {
        Self { boundary: Boundary::of_callers(flow, errors), no_pool: Pool::none() }
    }

    /// Transfers the envelopes of a message to their receiver. Their hubs get replacement memory, which costs an
    /// allocation per envelope. Call it from one of the flow's operators, with no lock held.
    ///
    /// # Errors
    /// The errors of the allocation, in the form for the caller. Some of the message's envelopes still belong to their hubs
    /// then: drop the message.
    pub(crate) fn hand_out<M: Message>(&self, message: &mut M) -> Result<()> {
        if !M::CARRIES_ENVELOPES {
            return Ok(());
        }
        let (mut replacements, mut failed) = (SmallVec::<[PoolReplacement; 1]>::new(), None::<Error>);
        message.envelopes(&mut |envelope| {
            if failed.is_none() {
                match envelope.leave_pool(&self.no_pool) {
                    Ok(replacement) => replacements.push(replacement),
                    Err(error) => failed = Some(error),
                }
            }
            self.boundary.guard_one(envelope);
        });
        // Outside of the visit above, since the waiters' wakers are user code, as is the method that calls the
        // visitor.
        replacements.into_iter().for_each(PoolReplacement::complete);
        match (failed, &self.boundary.errors) {
            (None, _) => Ok(()),
            (Some(error), Some(errors)) => Err(errors.of_response(&error)),
            (Some(error), None) => Err(error),
        }
    }
}

impl ReturnedGuards {
    /// Removes the guards of these flows from a message that enters them, and keeps them as long as it lives. Drop it
    /// after the message can wake an operator, or is itself dropped.
    pub(crate) fn take<M: Message>(&mut self, message: &mut M, is_there: impl Fn(&Boundary) -> bool) {
        if M::CARRIES_ENVELOPES {
            let mut number = 0;
            message.envelopes(&mut |envelope| {
                self.take_one(number, envelope, &is_there);
                number += 1;
            });
        }
    }

    fn take_one(&mut self, number: usize, envelope: &mut RawEnvelope, is_there: &dyn Fn(&Boundary) -> bool) {
        let taken = envelope.external_guards_mut().take(|guard| is_there(&guard.0));
        self.guards.extend(taken.into_iter().map(|guard| (number, Some(guard))));
        for guard in envelope.external_guards_mut().iter() {
            let released = guard.0.flow.release(is_there);
            self.guards.extend(released.into_iter().map(|guard| (number, Some(guard))));
        }
    }

    /// Restores the guards of a message that did not enter.
    pub(crate) fn put_back<M: Message>(mut self, message: &mut M) {
        if !self.guards.is_empty() {
            let mut number = 0;
            message.envelopes(&mut |envelope| {
                for (_, guard) in self.guards.iter_mut().filter(|(of, _)| *of == number) {
                    guard.take().into_iter().for_each(|guard| envelope.external_guards_mut().push(guard));
                }
                number += 1;
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicIsize, Ordering};

    use super::*;
    use crate::{
        device::{Device, Emulated},
        error::ErrorKind,
        hub::Envelope,
    };

    /// A flow that counts its envelopes outside.
    #[derive(Default)]
    struct Counted(AtomicIsize);

    impl OutsideTracker for Counted {
        fn lend(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn regain(&self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }

        fn has_ended(&self) -> bool {
            false
        }
    }

    fn out(flows: &[Arc<Counted>]) -> Vec<isize> {
        flows.iter().map(|flow| flow.0.load(Ordering::SeqCst)).collect()
    }

    #[test]
    fn an_envelope_that_is_handed_over_is_replaced_or_stays_its_hubs() {
        let device = Device::emulated(Emulated::new().memory(1 << 20));
        let pool = Pool::new(&"inner-hub".into(), 1, 400 << 10, &device, &device).unwrap();
        let take = || Envelope::<u8>::of_raw(pool.take().unwrap().unwrap());
        let [flow, other]: [Arc<Counted>; 2] = Default::default();
        let transfer = ResponseTransfer::new(flow.clone(), CallerErrors::new("flow", "service"));
        let mut first = take();
        Boundary::of_program(other.clone()).guard(&mut first);
        transfer.hand_out(&mut first).unwrap();
        assert_eq!((pool.count(), pool.idle()), (1, 1), "its hub has a replacement");
        assert_eq!(out(&[flow.clone(), other.clone()]), [0, 0], "nothing waits for it");

        // There is no memory for a third.
        let mut second = take();
        Boundary::of_program(other.clone()).guard(&mut second);
        let error = transfer.hand_out(&mut second).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        assert!(!format!("{error:?} {error}").contains("inner"), "{error:?}");
        assert_eq!((pool.idle(), out(&[flow, other.clone()])), (0, vec![0, 1]), "it still belongs to its hub");
        drop(second);
        assert_eq!((pool.idle(), out(&[other])), (1, vec![0]));

        let mut third = take();
        drop(first);
        assert_eq!(pool.idle(), 0, "an envelope that was handed over does not return to its pool");
        transfer.hand_out(&mut third).unwrap();
        assert_eq!(pool.idle(), 1);
    }
}
