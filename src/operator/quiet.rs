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
//!      ^                    │ wake                           │ wake
//!      └────────────────────┴────────────────────────────────┘    takes a token for it (only from PARKED)
//! ```
//!
//! Each poll of the operator's task begins with `LOOKING`, before anything is asked, so a wake between a question and
//! `park` makes `park` fail: the operator keeps its token and looks again. Whoever makes it `WOKEN` sees to it that its
//! task is polled; whoever finds it so need not.
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

/// What has become of a wake.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct Woken {
    /// The first since the operator's task was polled: whoever made it sees to it that the task is polled again.
    pub(crate) first: bool,
    /// The last token was given back: a waker that holds none itself may come so late that whoever was quicker has run
    /// and given back its own.
    pub(crate) last: bool,
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

    /// The operator's task is polled. If it was parked, nobody has taken a token for it.
    pub(crate) fn begin(&self, tokens: &Tokens) {
        self.resume(tokens);
        // Not a plain store: what a wake that came before this wanted to show must be seen by the questions.
        self.state.swap(LOOKING, Ordering::SeqCst);
    }

    /// The operator is about to ask its ports, maybe not for the first time since its task is polled: one that has parked
    /// and is asked all the same takes the token that no wake did. It takes it first, since whoever finds it not parked
    /// relies on there being one.
    #[inline]
    pub(crate) fn resume(&self, tokens: &Tokens) {
        if !self.is_parked() {
            return;
        }
        tokens.take(self.operator);
        if self.state.compare_exchange(PARKED, LOOKING, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            // A wake came in between and took one as well. That one is kept, so this is not the last.
            tokens.give_back(self.operator);
        }
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
    /// as soon as it does.
    pub(crate) fn wake(&self, tokens: &Tokens) -> Woken {
        let mut state = self.state.load(Ordering::SeqCst);
        let mut last = false;
        loop {
            if state == PARKED {
                tokens.take(self.operator);
            }
            // Also from `WOKEN`: what this wake wants to show is then seen by the next `begin`.
            match self.state.compare_exchange(state, WOKEN, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Woken { first: state != WOKEN, last },
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
