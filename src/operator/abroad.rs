//! [`Abroad`]: that somebody outside of a flow has an envelope of it.
//!
//! A flow comes to rest when no operator holds a [token](super::quiet). Whoever has taken an envelope out of it, by an
//! egress or as a service's answer, is no operator; and yet the envelope comes home some time, and its hub's writer goes on.
//! So it is marked as it leaves, and until it is dropped the flow is not at rest.
//!
//! ```text
//!   operator ──sends──> [ marked: Abroad ] ──> whoever is outside ──drops──> home: its writer is woken
//!                         holds the flow                                     then the mark goes
//! ```
//!
//! Marked by an operator, which holds a token; and what comes home wakes before the mark goes: so no moment of rest is seen
//! in between. An envelope that is sent into its flow again is the flow's own again.

use std::{fmt, sync::Arc};

use super::node::{Node, Rest};
use crate::hub::Message;

/// See the module. The flow is not at rest before it is dropped.
pub(crate) struct Abroad(Arc<Rest>);

impl Abroad {
    /// Marks what leaves the flow of this operator, which sends it.
    pub(crate) fn mark<M: Message>(message: &mut M, node: &Node) {
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| {
                node.rest().tokens.lend();
                envelope.set_abroad(Some(Self(node.rest().clone())));
            });
        }
    }

    /// What comes into the flow of this operator, which holds a token, is abroad no more.
    pub(crate) fn come_back<M: Message>(message: &mut M, node: &Node) {
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| {
                if envelope.abroad().is_some_and(|abroad| Arc::ptr_eq(&abroad.0, node.rest())) {
                    envelope.set_abroad(None);
                }
            });
        }
    }
}

impl Drop for Abroad {
    fn drop(&mut self) {
        if self.0.tokens.regain() {
            self.0.flow.wake();
        }
    }
}

impl fmt::Debug for Abroad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Abroad")
    }
}
