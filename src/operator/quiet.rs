//! When has a flow come to rest? Tokens.
//!
//! Whatever may still cause something holds a token: an operator that runs, or that was woken and has not looked yet.
//! An operator that waits at its ports holds none. The waker takes the token for the operator that it wakes, on the
//! thread of whoever caused it and before that one's own token goes; so the count reaches zero only when nothing is
//! under way, and once it is zero nobody is left to raise it.
//!
//! ```text
//!              begin                park (nothing ready)
//!    WOKEN ────────────> LOOKING ──────────────────────> PARKED   gives its token back
//!      ^                    │ wake, or something is ready    │ wake
//!      └────────────────────┴────────────────────────────────┘    takes a token for it (only from PARKED)
//! ```
//!
//! `LOOKING` is set before the ports are asked, so a wake between the question and `park` makes `park` fail: the
//! operator keeps its token and looks again.
//!
//! Knows no tokio: `tests/loom_quiet.rs` includes it as it stands.

use crate::sync::{AtomicU8, AtomicUsize, Ordering};

const WOKEN: u8 = 0;
const LOOKING: u8 = 1;
const PARKED: u8 = 2;

/// The tokens of one flow.
#[derive(Debug)]
pub(crate) struct Tokens(AtomicUsize);

impl Tokens {
    /// `count` operators, all awake.
    pub(crate) fn new(count: usize) -> Self {
        Self(AtomicUsize::new(count))
    }

    pub(crate) fn take(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// True if that was the last.
    pub(crate) fn give_back(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }

    pub(crate) fn none(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

/// One operator's part.
#[derive(Debug)]
pub(crate) struct Parking(AtomicU8);

impl Parking {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(WOKEN))
    }

    /// The operator is about to ask its ports. Its task may have been polled for a wake of long ago, while it was
    /// parked: then it takes the token that the wake did not, and takes it first, since whoever finds `LOOKING` relies
    /// on there being one.
    pub(crate) fn begin(&self, tokens: &Tokens) {
        if self.0.load(Ordering::SeqCst) == PARKED {
            tokens.take();
            if self.0.compare_exchange(PARKED, LOOKING, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                return;
            }
            // A wake came in between and took one as well. That one is kept, so this is not the last.
            tokens.give_back();
        }
        // Not a plain store: what a wake that came before this wanted to show must be seen by the question.
        self.0.swap(LOOKING, Ordering::SeqCst);
    }

    /// Nothing was ready: give the token back, unless somebody woke it meanwhile. True if that was the last one.
    pub(crate) fn park(&self, tokens: &Tokens) -> bool {
        match self.0.compare_exchange(LOOKING, PARKED, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => tokens.give_back(),
            Err(_) => false,
        }
    }

    /// Somebody wakes the operator. The token is there before the state says so: the operator may run, and park again,
    /// as soon as it does. True if the last token was given back: a waker that holds none itself may come so late that
    /// whoever was quicker has run and given back its own.
    #[must_use]
    pub(crate) fn wake(&self, tokens: &Tokens) -> bool {
        let mut state = self.0.load(Ordering::SeqCst);
        let mut last = false;
        loop {
            if state == PARKED {
                tokens.take();
            }
            // Also from `WOKEN`: what this wake wants to show is then seen by the next `begin`.
            match self.0.compare_exchange(state, WOKEN, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return last,
                Err(now) => {
                    if state == PARKED {
                        // Whoever changed it took one as well.
                        last |= tokens.give_back();
                    }
                    state = now;
                }
            }
        }
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.0.load(Ordering::SeqCst) == PARKED
    }
}
