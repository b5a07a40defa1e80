//! [`Senders`]: sends from outside of a flow that are in progress.
//!
//! A sender that is no operator has no [token](super::quiet). While the operator that stands for it keeps the way in open,
//! that operator has one, so the flow is not at rest. Once the way in is closed the operator may park or end, and a message
//! may still be on its way: in the queue, and not copied yet, or its reader not woken. So a sender is counted from before its
//! message is in the queue until after all that follows from it, and closing the way in lends the senders that are
//! counted one token, which the last of them gives back.
//!
//! ```text
//!   open, 0 <── leave ── enter ──> open, n          the operator has a token
//!      │ close                        │ close: a token is lent, before the word says "closed"
//!   closed, 0 <────── leave ────── closed, n        the last one gives it back
//! ```
//!
//! The order makes it safe. The operator gives up its token only after it has called `close` itself, or has seen that another
//! did; by then the lent one is counted. No sender enters after that, so one leave is the last. What a sender has woken has
//! a token of its own before the sender leaves.
//!
//! Knows no tokio: `tests/loom/quiet.rs` includes it as it stands.

use super::quiet::Tokens;
use crate::sync::{AtomicUsize, Ordering};

const CLOSED: usize = 1;
const SENDER: usize = 2;

/// The senders of one way into a flow.
#[derive(Debug)]
pub(crate) struct Senders(AtomicUsize);

impl Senders {
    /// Open, with no senders.
    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Counts a sender, before its message is where it can be seen. False once the way in is closed.
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

    /// A sender has woken all that its message concerns. True if the flow's last token has gone with it.
    #[must_use = "the flow must be notified"]
    pub(crate) fn leave(&self, tokens: &Tokens) -> bool {
        self.0.fetch_sub(SENDER, Ordering::AcqRel) == CLOSED + SENDER && tokens.regain()
    }

    /// No sender enters from now on. The operator calls it before it gives up its token, and others may call it at any
    /// time. True if the flow's last token has gone with it.
    #[must_use = "the flow must be notified"]
    pub(crate) fn close(&self, tokens: &Tokens) -> bool {
        if self.0.load(Ordering::Acquire) & CLOSED != 0 {
            return false;
        }
        // Before the word says so: the operator that reads it there may park at once.
        tokens.lend();
        let seen = self.0.fetch_or(CLOSED, Ordering::AcqRel);
        let kept_for_senders = seen & CLOSED == 0 && seen >= SENDER;
        !kept_for_senders && tokens.regain()
    }
}
