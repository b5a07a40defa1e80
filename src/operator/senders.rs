//! [`Senders`]: counts sends from outside a flow that are in progress.
//!
//! A sender that is not an operator has no [token](super::idle). While the operator that represents it keeps the
//! ingress open, that operator holds one, so the flow is not idle. Once the ingress is closed, the operator may park or
//! end while a message is still in transit: queued but not yet copied, or with a reader that has not been woken yet. So
//! a sender is counted from before its message is in the queue until all consequences of the send are done. Closing the
//! ingress lends one token to the counted senders, and the last of them returns it.
//!
//! ```text
//!   open, 0 <── leave ── enter ──> open, n          the operator holds a token
//!      │ close                        │ close: a token is lent, before the word says "closed"
//!   closed, 0 <────── leave ────── closed, n        the last one returns it
//! ```
//!
//! The order of these steps makes it safe. The operator gives up its token only after it has called `close` itself, or
//! has seen that another caller did; by then the lent token is counted. No sender enters after that, so exactly one
//! `leave` is the last. What a sender has woken holds a token of its own before the sender leaves.
//!
//! Does not depend on tokio: `tests/loom/idle.rs` includes this file unchanged.

use super::idle::Tokens;
use crate::sync::{AtomicUsize, Ordering};

const CLOSED: usize = 1;
const SENDER: usize = 2;

/// The senders of one ingress of a flow.
#[derive(Debug)]
pub(crate) struct Senders(AtomicUsize);

impl Senders {
    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Counts a sender, before its message becomes visible. False once the ingress is closed.
    pub(crate) fn enter(&self) -> bool {
        let mut seen = self.0.load(Ordering::Relaxed);
        while seen & CLOSED == 0 {
            match self.0.compare_exchange(seen, seen + SENDER, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Called when a sender has woken everything that its message concerns. True if this released the flow's last
    /// token.
    #[must_use = "the flow must be notified"]
    pub(crate) fn leave(&self, tokens: &Tokens) -> bool {
        self.0.fetch_sub(SENDER, Ordering::AcqRel) == CLOSED + SENDER && tokens.regain()
    }

    /// No sender enters from now on. The operator calls it before it gives up its token, and others may call it at any
    /// time. True if this released the flow's last token.
    #[must_use = "the flow must be notified"]
    pub(crate) fn close(&self, tokens: &Tokens) -> bool {
        if self.0.load(Ordering::Acquire) & CLOSED != 0 {
            return false;
        }
        // Before the word says "closed": an operator that reads it there may park at once.
        tokens.lend();
        let seen = self.0.fetch_or(CLOSED, Ordering::AcqRel);
        let kept_for_senders = seen & CLOSED == 0 && seen >= SENDER;
        !kept_for_senders && tokens.regain()
    }
}
