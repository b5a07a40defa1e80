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

/// Operators that share a counter. Neighbours wake each other, and two threads that work on one counter slow each other
/// down: on an H200's 16-core host, with one counter for all, a hop between two workers took 0.27 us in place of 0.21.
const GROUP: usize = 4;

/// The tokens of one flow: a counter a group of operators, and one of the groups that have any.
///
/// A group is counted before it has its first token and until after it has lost its last: so the number of groups is
/// never too small, and zero means that there is no token at all.
#[derive(Debug)]
pub(crate) struct Tokens {
    groups: Alone,
    of_group: Box<[Alone]>,
}

/// A counter with a cache line of its own (two, as some processors fetch them in pairs).
#[derive(Debug)]
#[repr(align(128))]
struct Alone(AtomicUsize);

impl Tokens {
    /// `count` operators, all awake.
    pub(crate) fn new(count: usize) -> Self {
        let groups = count.div_ceil(GROUP);
        let of_group = (0..groups).map(|group| Alone(AtomicUsize::new((count - group * GROUP).min(GROUP))));
        Self { groups: Alone(AtomicUsize::new(groups)), of_group: of_group.collect() }
    }

    fn take(&self, operator: usize) {
        let group = &self.of_group[operator / GROUP].0;
        let mut tokens = group.load(Ordering::SeqCst);
        loop {
            if tokens == 0 {
                self.groups.0.fetch_add(1, Ordering::SeqCst);
            }
            match group.compare_exchange(tokens, tokens + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(now) => {
                    if tokens == 0 {
                        // Somebody else gave it its first, and counted it.
                        self.groups.0.fetch_sub(1, Ordering::SeqCst);
                    }
                    tokens = now;
                }
            }
        }
    }

    /// True if that was the last.
    fn give_back(&self, operator: usize) -> bool {
        self.of_group[operator / GROUP].0.fetch_sub(1, Ordering::SeqCst) == 1
            && self.groups.0.fetch_sub(1, Ordering::SeqCst) == 1
    }

    /// Asked by an operator that has one: is it the only one?
    fn last(&self, operator: usize) -> bool {
        self.groups.0.load(Ordering::SeqCst) == 1 && self.of_group[operator / GROUP].0.load(Ordering::SeqCst) == 1
    }

    pub(crate) fn none(&self) -> bool {
        self.groups.0.load(Ordering::SeqCst) == 0
    }
}

/// One operator's part.
#[derive(Debug)]
pub(crate) struct Parking {
    /// Its number in the flow.
    operator: usize,
    state: AtomicU8,
}

impl Parking {
    pub(crate) fn new(operator: usize) -> Self {
        Self { operator, state: AtomicU8::new(WOKEN) }
    }

    /// The operator is about to ask its ports. Its task may have been polled for a wake of long ago, while it was
    /// parked: then it takes the token that the wake did not, and takes it first, since whoever finds `LOOKING` relies
    /// on there being one.
    pub(crate) fn begin(&self, tokens: &Tokens) {
        match self.state.load(Ordering::SeqCst) {
            PARKED => {
                tokens.take(self.operator);
                if self.state.compare_exchange(PARKED, LOOKING, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                    return;
                }
                // A wake came in between and took one as well. That one is kept, so this is not the last.
                tokens.give_back(self.operator);
            }
            // Nobody has woken it since it looked last. If somebody has and this does not show it yet, `park` will fail.
            LOOKING => return,
            _ => {}
        }
        // Not a plain store: what a wake that came before this wanted to show must be seen by the question.
        self.state.swap(LOOKING, Ordering::SeqCst);
    }

    /// Nothing was ready: give the token back, unless somebody woke it meanwhile. True if that was the last one.
    pub(crate) fn park(&self, tokens: &Tokens) -> bool {
        match self.state.compare_exchange(LOOKING, PARKED, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => tokens.give_back(self.operator),
            Err(_) => false,
        }
    }

    /// It has a token, and nobody else has one.
    pub(crate) fn is_last(&self, tokens: &Tokens) -> bool {
        tokens.last(self.operator)
    }

    /// Somebody wakes the operator. The token is there before the state says so: the operator may run, and park again,
    /// as soon as it does. True if the last token was given back: a waker that holds none itself may come so late that
    /// whoever was quicker has run and given back its own.
    #[must_use]
    pub(crate) fn wake(&self, tokens: &Tokens) -> bool {
        let mut state = self.state.load(Ordering::SeqCst);
        let mut last = false;
        loop {
            if state == PARKED {
                tokens.take(self.operator);
            }
            // Also from `WOKEN`: what this wake wants to show is then seen by the next `begin`.
            match self.state.compare_exchange(state, WOKEN, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return last,
                Err(now) => {
                    if state == PARKED {
                        // Whoever changed it took one as well.
                        last |= tokens.give_back(self.operator);
                    }
                    state = now;
                }
            }
        }
    }

    /// The operator has ended: its token goes for good. True if that was the last one.
    pub(crate) fn end(&self, tokens: &Tokens) -> bool {
        // Aborted while it was parked, it held none. A rest before this is none: this one is told.
        let _ = self.wake(tokens);
        tokens.give_back(self.operator)
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.state.load(Ordering::SeqCst) == PARKED
    }
}
