//! Idle detection of a flow: [`Tokens`], and [`NotedWaits`], which decides whether an operator that waits in the middle
//! of a run returns its token.
//!
//! Everything that can still cause work holds a token: an operator that runs, or one that was woken and has not polled
//! its ports yet. An operator that waits at its ports holds none. A waker takes the token for the operator that it
//! wakes, on the waking thread, before that thread's own token is returned. So the number of tokens is zero only when
//! no work is in progress, and from then on nothing is left that could take one.
//!
//! ```text
//!              begin                park (nothing ready)
//!    WOKEN ────────────> POLLED ───────────────────────> PARKED   returns its token
//!      ^                    │ wake                           │ wake
//!      └────────────────────┴────────────────────────────────┘    takes a token for it (only from PARKED)
//! ```
//!
//! Each poll of the operator's task begins with `POLLED`, before any condition is polled, so a wake between a poll of
//! a condition and `park` makes `park` fail: the operator keeps its token and polls again. The caller that changes the
//! state to `WOKEN` must have the task polled; a caller that finds it `WOKEN` need not.
//!
//! A token is part of its operator's state: the operator holds one until it is `PARKED`, or has ended. The states of a
//! few operators form a group, in one word, so that one atomic operation changes a state and shows whether its token
//! was the group's first or last one. The groups that hold any token are counted:
//!
//! ```text
//!   group    k: POLLED   k+1: PARKED   k+2: WOKEN   k+3: PARKED      groups: 1
//! ```
//!
//! A group is counted before it has its first token and until after it has lost its last one, so the count is never too
//! small, and zero means that there is no token at all. Anything else that can still cause work counts as a group.
//!
//! While an idle flow is analysed, something outside might begin to cause work, and even finish. So the same word also
//! counts how often a group was added: if that number is unchanged, there was no token during the analysis
//! ([`Tokens::at_rest`]).
//!
//! # In the middle of a run
//!
//! An operator that waits in the middle of a run returns its token if only other operators of its flow can wake it.
//!
//! ```text
//!   a poll begins ──> waits at a port: note ──> the poll is over: decide
//!                                                  │ it waits for something else ──────────────> keeps its token
//!                                                  │ it reached several waits ─────────────────> polled again, once
//!                                                  │ no clone of its waker is kept ────────────> parks
//!                                                  │ a clone is kept, the waker is old ────────> polled again, new waker
//!                                                  └ a clone is kept, of this poll's waker ────> keeps its token
//! ```
//!
//! Everything that the operator's future awaits keeps a clone of the waker that the future is polled with, except for
//! the operator's own ports. So while no clone is kept, only another operator of the flow can wake it. A clone might be
//! left over from a wait that has ended. A new waker shows that, since only the waits that are still pending are polled
//! with it. If the operator reached several waits, a second poll shows which of them are pending: all but the last
//! might have been dropped within the first poll.
//!
//! The last clone might be dropped right after it was used to wake. The wake comes before the drop, so a task that sees
//! the drop also sees the wake, and does not park.
//!
//! Does not depend on tokio: `tests/loom/idle.rs` and `tests/loom/probe_waker.rs` include this file unchanged.

use std::sync::Arc;

use crate::sync::{AtomicUsize, Ordering, fence};

/// The number of bits of an operator's state. The first: it has a token. The second: no wake needs to schedule its
/// task.
///
/// `PARKED` has neither bit, `POLLED` the first, `WOKEN` both; with the second bit alone the operator has ended.
const BITS: usize = 2;

/// The number of operators in a group. Neighbours wake each other, and two threads that change one word slow each other
/// down: on an H200's 16-core host, with one counter for all, a hop between two workers took 0.27 us instead of 0.21.
const GROUP: usize = 4;
/// The token bits of a group.
const TOKENS: usize = 0b01_01_01_01;

/// The word that counts the groups: its lower half is the number of groups that have tokens, its upper half the number
/// of times that a group got its first token.
const COUNTED: usize = usize::MAX >> (usize::BITS / 2);
const ONE_GROUP: usize = COUNTED + 2;

/// The tokens of one flow.
#[derive(Debug)]
pub(crate) struct Tokens {
    groups: CachePadded,
    /// The number of lent tokens, which are included in `groups`. Incremented before a token is lent, and decremented
    /// after it is returned.
    lent: AtomicUsize,
    states: Box<[Arc<CachePadded>]>,
}

/// A word on a cache line of its own: on two, since some processors fetch lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct CachePadded(AtomicUsize);

impl Tokens {
    /// `count` operators, all awake.
    pub(crate) fn new(count: usize) -> Self {
        let groups = count.div_ceil(GROUP);
        let all_woken = |group: usize| (1 << (BITS * (count - group * GROUP).min(GROUP))) - 1;
        let states = (0..groups).map(|group| Arc::new(CachePadded(AtomicUsize::new(all_woken(group)))));
        Self { groups: CachePadded(AtomicUsize::new(groups)), lent: AtomicUsize::new(0), states: states.collect() }
    }

    /// If there is no token, a value that stays the same only while there is none (unless the counter wraps around, for
    /// which no analysis takes long enough).
    pub(crate) fn at_rest(&self) -> Option<usize> {
        let groups = self.groups.0.load(Ordering::SeqCst);
        (groups & COUNTED == 0).then_some(groups)
    }

    /// Counts a group that gets its first token.
    #[inline]
    fn count_group(&self) {
        self.groups.0.fetch_add(ONE_GROUP, Ordering::SeqCst);
    }

    /// Uncounts a group that has lost its last token. True if that was the last token of all.
    #[inline]
    fn uncount_group(&self) -> bool {
        self.groups.0.fetch_sub(1, Ordering::SeqCst) & COUNTED == 1
    }

    /// Lends a token to something other than an operator that can cause work. Called by the holder of a token where the
    /// flow must not become idle.
    pub(crate) fn lend(&self) {
        self.lent.fetch_add(1, Ordering::SeqCst);
        self.count_group();
    }

    /// The number of tokens that are lent, or were a moment ago.
    pub(crate) fn lent(&self) -> usize {
        self.lent.load(Ordering::SeqCst)
    }

    /// Returns a lent token. True if no token is left.
    pub(crate) fn regain(&self) -> bool {
        let last = self.uncount_group();
        self.lent.fetch_sub(1, Ordering::SeqCst);
        last
    }

    /// Called after a token was returned, which left `left` in its group's word. True if that was the last token of
    /// all.
    #[inline]
    fn token_returned(&self, left: usize) -> bool {
        left & TOKENS == 0 && self.uncount_group()
    }
}

/// The result of a wake.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) struct Woken {
    /// This is the first wake since the operator's task was polled: the caller must have the task polled again.
    pub(crate) first: bool,
    /// No token is left. A wake by a thread without a token, of an operator that has ended, can be the last to see
    /// that.
    pub(crate) last: bool,
}

#[derive(Debug)]
pub(crate) struct Parking {
    group: Arc<CachePadded>,
    /// The first of the operator's two bits in the group's word.
    token: usize,
}

impl Parking {
    /// The state of one of the operators of `tokens`.
    pub(crate) fn new(tokens: &Tokens, operator: usize) -> Self {
        Self { group: tokens.states[operator / GROUP].clone(), token: 1 << (operator % GROUP * BITS) }
    }

    #[inline]
    fn no_poll(&self) -> usize {
        self.token << 1
    }

    /// Both bits.
    #[inline]
    fn bits(&self) -> usize {
        self.token | self.no_poll()
    }

    /// Begins a poll of the operator's task. If the operator was parked, no wake has taken a token for it.
    #[inline]
    pub(crate) fn begin(&self, tokens: &Tokens) {
        let seen = self.group.0.load(Ordering::SeqCst);
        if seen & self.bits() == 0 {
            let _ = self.raise(tokens, self.token);
        } else if seen & self.no_poll() != 0 {
            // Only if the state shows a wake: a wake that it does not show yet causes another poll. Not a plain store,
            // since writes before that wake must be visible to the conditions that are polled next.
            self.group.0.fetch_and(!self.no_poll(), Ordering::SeqCst);
        }
    }

    /// Called before the operator polls its ports, possibly not for the first time in this poll of its task. If it has
    /// parked, it takes the token that no wake took for it.
    #[inline]
    pub(crate) fn resume(&self, tokens: &Tokens) {
        if self.is_parked() {
            let _ = self.raise(tokens, self.token);
        }
    }

    /// Returns the token after nothing was ready, unless the operator was woken since. True if that was the last one.
    #[inline]
    pub(crate) fn park(&self, tokens: &Tokens) -> bool {
        let word = &self.group.0;
        let mut seen = word.load(Ordering::SeqCst);
        while seen & self.bits() == self.token {
            let left = seen & !self.token;
            match word.compare_exchange(seen, left, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return tokens.token_returned(left),
                Err(now) => seen = now,
            }
        }
        false
    }

    /// True if the operator has a token and there is no other.
    pub(crate) fn is_last(&self, tokens: &Tokens) -> bool {
        let others = self.group.0.load(Ordering::SeqCst) & TOKENS & !self.token;
        others == 0 && tokens.groups.0.load(Ordering::SeqCst) & COUNTED == 1
    }

    /// Wakes the operator. It has its token as soon as the state shows the wake, since it might run and park again at
    /// once.
    #[inline]
    pub(crate) fn wake(&self, tokens: &Tokens) -> Woken {
        self.raise(tokens, self.bits())
    }

    /// Returns the token of an operator that has ended, for good. True if that was the last one.
    pub(crate) fn end(&self, tokens: &Tokens) -> bool {
        // An operator that is aborted while it is parked has no token. It takes one, so that its return is reported if
        // it is the last: an idle state before this point does not count.
        let _ = self.wake(tokens);
        tokens.token_returned(self.group.0.fetch_and(!self.token, Ordering::SeqCst) & !self.token)
    }

    #[inline]
    pub(crate) fn is_parked(&self) -> bool {
        self.group.0.load(Ordering::SeqCst) & self.bits() == 0
    }

    /// True if the operator was polled since it was last woken.
    pub(crate) fn is_polled_since_wake(&self) -> bool {
        self.group.0.load(Ordering::SeqCst) & self.no_poll() == 0
    }

    /// Like `is_parked`, and makes the caller's earlier writes visible to the operator's next poll: the word is
    /// written, with its value unchanged.
    pub(crate) fn publish_and_check_parked(&self) -> bool {
        self.group.0.fetch_or(0, Ordering::SeqCst) & self.bits() == 0
    }

    /// Sets bits of the operator's state, unless it has ended. The word is written even if nothing changes, so that
    /// writes before a wake are visible after the next `begin`.
    #[inline]
    fn raise(&self, tokens: &Tokens, state: usize) -> Woken {
        let word = &self.group.0;
        let mut seen = word.load(Ordering::SeqCst);
        let mut last = false;
        loop {
            if seen & self.bits() == self.no_poll() {
                return Woken { first: false, last };
            }
            let first_token = seen & TOKENS == 0;
            if first_token {
                tokens.count_group();
            }
            match word.compare_exchange(seen, seen | state, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Woken { first: seen & self.no_poll() == 0, last },
                Err(now) => {
                    // Another thread was faster: it gave the group its first token, and counted it as well.
                    last |= first_token && tokens.uncount_group();
                    seen = now;
                }
            }
        }
    }
}

/// The waits that the current poll of an operator has reached. Used only by the operator's own task.
#[derive(Debug)]
pub(crate) struct NotedWaits {
    /// One of [`waits`], with [`waits::NEW`] or without.
    noted: AtomicUsize,
}

mod waits {
    pub(super) const NOTHING: usize = 0;
    /// The waker was made for this poll. The lowest bit: any greater value is a wait.
    pub(super) const NEW: usize = 1;
    /// One wait, for other operators of the flow.
    pub(super) const OTHERS: usize = 2;
    /// One wait, for something else.
    pub(super) const MORE: usize = 4;
    /// Several waits, at least one of them for something else.
    pub(super) const SEVERAL: usize = 6;
    /// Several waits, all for other operators.
    pub(super) const SEVERAL_OTHERS: usize = 8;
}

/// The result of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Decision {
    KeepToken,
    Park,
    /// The future gets a new waker and is polled again: its waits are noted anew.
    Renew,
}

impl NotedWaits {
    pub(crate) fn new() -> Self {
        Self { noted: AtomicUsize::new(waits::NOTHING) }
    }

    /// Notes that the current poll waits at a port. `for_others`: only for other operators of the flow.
    pub(crate) fn note(&self, for_others: bool) {
        let before = self.noted.load(Ordering::Relaxed);
        let now = match (before & !waits::NEW, for_others) {
            (waits::NOTHING, true) => waits::OTHERS,
            (waits::NOTHING, false) => waits::MORE,
            (waits::OTHERS | waits::SEVERAL_OTHERS, true) => waits::SEVERAL_OTHERS,
            _ => waits::SEVERAL,
        };
        self.noted.store(before & waits::NEW | now, Ordering::Relaxed);
    }

    /// True if the current poll waits at a port, or was made to see which waits are still pending:
    /// [`decide`](Self::decide) must follow.
    #[inline]
    pub(crate) fn is_noted(&self) -> bool {
        self.noted.load(Ordering::Relaxed) != waits::NOTHING
    }

    /// True if the current poll waits at a port.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.noted.load(Ordering::Relaxed) > waits::NEW
    }

    /// Notes that a wait has ended in the current poll: the next wait has not been polled with the new waker before.
    #[inline]
    pub(crate) fn end_of_wait(&self) {
        self.noted.store(self.noted.load(Ordering::Relaxed) & !waits::NEW, Ordering::Relaxed);
    }

    /// Decides at the end of a poll. `clones`: the number of clones of the waker that are kept.
    pub(crate) fn decide(&self, pending: bool, clones: impl FnOnce() -> usize) -> Decision {
        let at = self.noted.load(Ordering::Relaxed);
        self.noted.store(waits::NOTHING, Ordering::Relaxed);
        // By the next poll the holder of a clone might have been dropped, and another wait begun: the waker is old
        // then.
        let (at, is_new) = (at & !waits::NEW, at & waits::NEW != 0);
        if !pending || matches!(at, waits::NOTHING | waits::MORE) {
            return Decision::KeepToken;
        }
        // If there are several waits, one might have been dropped within the poll.
        let waits_for_all = at == waits::OTHERS || at == waits::SEVERAL_OTHERS && is_new;
        if waits_for_all && clones() == 0 {
            // Pairs with the release that dropped the last clone.
            fence(Ordering::Acquire);
            return Decision::Park;
        }
        if is_new {
            return Decision::KeepToken;
        }
        self.noted.store(waits::NEW, Ordering::Relaxed);
        Decision::Renew
    }
}
