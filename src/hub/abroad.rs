//! [`Abroad`]: that somebody outside of a flow has an envelope of it.
//!
//! A flow comes to rest when none of its operators can go on by itself. Whoever has taken an envelope out of it, by an
//! egress or as a service's answer, is no operator; and yet the envelope comes home some time, and its hub's writer goes on.
//! So it is marked as it leaves, and until it is dropped the flow is not at rest.
//!
//! ```text
//!   operator ──sends──> [ marked: Abroad ] ──> whoever is outside ──drops──> home: its writer is woken
//!                         holds the flow                                     then the mark goes
//! ```
//!
//! Marked by an operator, while the flow is at work; and what comes home wakes before the mark goes: so no moment of rest is
//! seen in between. An envelope that is sent into its flow again is the flow's own again.

use std::{fmt, ptr, sync::Arc};

use super::Message;

/// A flow, as its envelopes know it that are outside.
pub(crate) trait Lender: Send + Sync + 'static {
    /// One is outside: from here on there is no rest.
    fn lend(&self);
    /// It is outside no more.
    fn regain(&self);
}

/// See the module. The flow is not at rest before it is dropped.
pub(crate) struct Abroad(Arc<dyn Lender>);

impl Abroad {
    /// Marks what leaves this flow. For one of its operators.
    pub(crate) fn mark<M: Message>(message: &mut M, flow: &Arc<impl Lender>) {
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| {
                flow.lend();
                envelope.set_abroad(Some(Self(flow.clone())));
            });
        }
    }

    /// Holds a flow: somebody outside may still cause something there.
    pub(crate) fn holding(flow: &Arc<dyn Lender>) -> Self {
        flow.lend();
        Self(flow.clone())
    }

    /// It holds that flow.
    pub(crate) fn holds(&self, flow: &Arc<dyn Lender>) -> bool {
        ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(flow))
    }

    /// What comes into this flow is abroad no more. For one of its operators.
    pub(crate) fn come_back<M: Message>(message: &mut M, flow: &Arc<impl Lender>) {
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| {
                if envelope.abroad().is_some_and(|abroad| ptr::addr_eq(Arc::as_ptr(&abroad.0), Arc::as_ptr(flow))) {
                    envelope.set_abroad(None);
                }
            });
        }
    }
}

impl Drop for Abroad {
    fn drop(&mut self) {
        self.0.regain();
    }
}

impl fmt::Debug for Abroad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Abroad")
    }
}
