//! When has a flow come to rest? Tokens.
//!
//! Whatever may still cause something holds a token: an operator that runs, or that was woken and has not looked yet.
//! An operator that waits at its ports holds none. The waker takes the token for the operator that it wakes, on the
//! thread of whoever caused it and before that one's own token goes; so nobody holds one only when nothing is under way,
//! and once that is so nobody is left to take one.
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
//! A token is part of its operator's state: it has one until it is `PARKED`, or has ended. The states of a few operators
//! are one word, a group, so that one step changes a state and shows whether it was the group's first token or its last.
//! What is counted are the groups that have any:
//!
//! ```text
//!   group    k: LOOKING   k+1: PARKED   k+2: WOKEN   k+3: PARKED      groups: 1
//! ```
//!
//! A group is counted before it has its first token and until after it has lost its last: so the count is never too small,
//! and zero means that there is no token at all. Who is no operator and may yet cause something counts as a group.
//!
//! To find out what a flow at rest is takes a while, and something from outside may begin meanwhile, and even end. So the same
//! word says how often a group was counted: if that is what it was, there was no token all the while ([`Tokens::at_rest`]).
//!
//! Knows no tokio: `tests/loom/quiet.rs` includes it as it stands.

use std::sync::Arc;

use crate::sync::{AtomicUsize, Ordering};

/// Bits of an operator's state: that it has a token, and that nobody need have its task polled.
///
/// `PARKED` is none of them, `LOOKING` the first, `WOKEN` both; with the second alone it has ended.
const BITS: usize = 2;

/// Operators of a group. Neighbours wake each other, and two threads that work on one word slow each other down: on an
/// H200's 16-core host, with one counter for all, a hop between two workers took 0.27 us in place of 0.21.
const GROUP: usize = 4;
/// Their tokens.
const TOKENS: usize = 0b01_01_01_01;

/// Of the word that counts the groups: those that have tokens in its lower half, and above it how often one came to have some.
const COUNTED: usize = usize::MAX >> (usize::BITS / 2);
const COMES: usize = COUNTED + 2;

/// The tokens of one flow.
#[derive(Debug)]
pub(crate) struct Tokens {
    groups: Alone,
    /// Of those, the tokens that are lent. It is changed before a token is lent and after it is back.
    lent: AtomicUsize,
    states: Box<[Arc<Alone>]>,
}

/// A word with a cache line of its own (two, as some processors fetch them in pairs).
#[derive(Debug)]
#[repr(align(128))]
struct Alone(AtomicUsize);

impl Tokens {
    /// `count` operators, all awake.
    pub(crate) fn new(count: usize) -> Self {
        let groups = count.div_ceil(GROUP);
        let all_woken = |group: usize| (1 << (BITS * (count - group * GROUP).min(GROUP))) - 1;
        let states = (0..groups).map(|group| Arc::new(Alone(AtomicUsize::new(all_woken(group)))));
        Self { groups: Alone(AtomicUsize::new(groups)), lent: AtomicUsize::new(0), states: states.collect() }
    }

    /// If there is no token: a value that is the same later only if there was none in between (up to a number of them that no
    /// look is long enough for).
    pub(crate) fn at_rest(&self) -> Option<usize> {
        let groups = self.groups.0.load(Ordering::SeqCst);
        (groups & COUNTED == 0).then_some(groups)
    }

    /// A group has its first token.
    #[inline]
    fn counts_one_more(&self) {
        self.groups.0.fetch_add(COMES, Ordering::SeqCst);
    }

    /// A group has lost its last. True if that was the last of all.
    #[inline]
    fn counts_one_less(&self) -> bool {
        self.groups.0.fetch_sub(1, Ordering::SeqCst) & COUNTED == 1
    }

    /// Something other than an operator may cause work: it counts as a token. Called by the holder of a token where the flow
    /// must not be at rest.
    pub(crate) fn lend(&self) {
        self.lent.fetch_add(1, Ordering::SeqCst);
        self.counts_one_more();
    }

    /// How many are lent, or were a moment ago.
    pub(crate) fn lent(&self) -> usize {
        self.lent.load(Ordering::SeqCst)
    }

    /// That one has it no longer. True if no token is left.
    pub(crate) fn regain(&self) -> bool {
        let last = self.counts_one_less();
        self.lent.fetch_sub(1, Ordering::SeqCst);
        last
    }

    /// A group's token has gone, and left its word so. True if that was the last one.
    #[inline]
    fn given_back(&self, left: usize) -> bool {
        left & TOKENS == 0 && self.counts_one_less()
    }
}

/// What has become of a wake.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct Woken {
    /// The first since the operator's task was polled: whoever made it sees to it that the task is polled again.
    pub(crate) first: bool,
    /// No token is left: a waker that holds none itself, and came when the operator had ended, may be the last to see it.
    pub(crate) last: bool,
}

/// One operator's part.
#[derive(Debug)]
pub(crate) struct Parking {
    group: Arc<Alone>,
    /// Its bits in the group's word, and both of them.
    token: usize,
    no_poll: usize,
    bits: usize,
}

impl Parking {
    /// Of one of the operators that these are the tokens of.
    pub(crate) fn new(tokens: &Tokens, operator: usize) -> Self {
        let token = 1 << (operator % GROUP * BITS);
        let (no_poll, bits) = (token << 1, token | token << 1);
        Self { group: tokens.states[operator / GROUP].clone(), token, no_poll, bits }
    }

    /// The operator's task is polled. If it was parked, no wake has taken a token for it.
    #[inline]
    pub(crate) fn begin(&self, tokens: &Tokens) {
        let seen = self.group.0.load(Ordering::SeqCst);
        if seen & self.bits == 0 {
            let _ = self.raise(tokens, self.token);
        } else if seen & self.no_poll != 0 {
            // Only where the state shows a wake: after one that it does not show yet, another poll follows. Not a plain store: what
            // that wake wanted to show must be seen by the questions.
            self.group.0.fetch_and(!self.no_poll, Ordering::SeqCst);
        }
    }

    /// The operator is about to ask its ports, maybe not for the first time since its task is polled: one that has parked
    /// and is asked all the same takes the token that no wake did.
    #[inline]
    pub(crate) fn resume(&self, tokens: &Tokens) {
        if self.is_parked() {
            let _ = self.raise(tokens, self.token);
        }
    }

    /// Nothing was ready: give the token back, unless somebody woke it meanwhile. True if that was the last one.
    #[inline]
    pub(crate) fn park(&self, tokens: &Tokens) -> bool {
        let word = &self.group.0;
        let mut seen = word.load(Ordering::SeqCst);
        while seen & self.bits == self.token {
            let left = seen & !self.token;
            match word.compare_exchange(seen, left, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return tokens.given_back(left),
                Err(now) => seen = now,
            }
        }
        false
    }

    /// It has a token, and nobody else has one.
    pub(crate) fn is_last(&self, tokens: &Tokens) -> bool {
        let others = self.group.0.load(Ordering::SeqCst) & TOKENS & !self.token;
        others == 0 && tokens.groups.0.load(Ordering::SeqCst) & COUNTED == 1
    }

    /// Somebody wakes the operator. The token is there as soon as the state says so: the operator may run, and park again,
    /// at once.
    #[inline]
    pub(crate) fn wake(&self, tokens: &Tokens) -> Woken {
        self.raise(tokens, self.bits)
    }

    /// The operator has ended: its token goes for good. True if that was the last one.
    pub(crate) fn end(&self, tokens: &Tokens) -> bool {
        // Aborted while it was parked, it had none. A rest before this is none: this one is told.
        let _ = self.wake(tokens);
        tokens.given_back(self.group.0.fetch_and(!self.token, Ordering::SeqCst) & !self.token)
    }

    #[inline]
    pub(crate) fn is_parked(&self) -> bool {
        self.group.0.load(Ordering::SeqCst) & self.bits == 0
    }

    /// It has been polled since it was woken last.
    pub(crate) fn is_calm(&self) -> bool {
        self.group.0.load(Ordering::SeqCst) & self.no_poll == 0
    }

    /// As `is_parked`, for a caller whose writes before this its next poll is to see. The word is written for that, with what it holds.
    pub(crate) fn is_parked_until_it_sees(&self) -> bool {
        self.group.0.fetch_or(0, Ordering::SeqCst) & self.bits == 0
    }

    /// Adds to its state, unless it has ended. The word is written where that changes nothing, too: what a wake wants to
    /// show is then seen by the next `begin`.
    #[inline]
    fn raise(&self, tokens: &Tokens, state: usize) -> Woken {
        let word = &self.group.0;
        let mut seen = word.load(Ordering::SeqCst);
        let mut last = false;
        loop {
            if seen & self.bits == self.no_poll {
                return Woken { first: false, last };
            }
            let first_token = seen & TOKENS == 0;
            if first_token {
                tokens.counts_one_more();
            }
            match word.compare_exchange(seen, seen | state, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Woken { first: seen & self.no_poll == 0, last },
                Err(now) => {
                    // Whoever was quicker and gave the group its first token has counted it as well.
                    last |= first_token && tokens.counts_one_less();
                    seen = now;
                }
            }
        }
    }
}
