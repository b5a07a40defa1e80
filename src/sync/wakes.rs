//! Waking wakers and dropping what is the user's: with no lock held, and whatever that code does.
//!
//! A waker's `wake` and `drop`, and the destructors of what the user gave away, are user code: they may panic, call back into
//! the crate, drop a buffer. So:
//!
//! - they run with no lock of the crate held, which a debug build asserts;
//! - a panic of one ends there. It is logged as a `tracing` error and the others are woken as well. It is not resumed: the
//!   thread that wakes is rarely the one that the waker belongs to, is often a worker of the device's or a destructor, and
//!   has changes of its own to complete.
//!
//! ```text
//!   wake, discard ──> a Deferred scope on this thread? ── no ───────────────────────> run now
//!                                   └── yes ──> queued ──> end of the outermost scope ──^
//! ```
//!
//! A function that wakes and may be called under its caller's lock needs no list handed back: the caller opens a [`Deferred`]
//! scope before it acquires the lock.
//!
//! User code may lead to more of its kind: a waker drops a future that wakes the next waiter; a message's destructor drops the
//! reader of another queue; an error drops its cause. The user decides how long such a [chain](Chain) is, and the stack is short.
//! So a thread counts those on its stack, and from [`DEEPEST`] on they are queued:
//!
//! ```text
//!   wake, discard ──> fewer than DEEPEST of this chain on the stack? ── yes ──> run now
//!                                   └── no ──> queued ──> the deepest has returned ──> run in a loop
//! ```
//!
//! The chains are counted apart: a user's destructor may wait for a task, whose wake is not queued until the destructor has
//! returned.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    marker::PhantomData,
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::Waker,
};

use smallvec::SmallVec;

use crate::sync::{assert_unlocked, is_unlocked, step_back, step_out, strands_others};

/// Wakers that were taken out under a lock, to be woken after it. Dropped without a wake, they are dropped one by one in the
/// same way.
#[derive(Debug, Default)]
#[must_use = "it wakes when `wake` is called"]
pub(crate) struct WakeList(SmallVec<[Waker; 4]>);

/// What a scope holds back.
enum Held {
    Wake(Waker),
    WakeShared(Arc<Waker>),
    Drop(#[allow(dead_code, reason = "dropped")] Box<dyn Any>),
    Call(&'static str, Box<dyn FnOnce()>),
}

/// What a call leads to: others of its own kind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chain {
    Wakes,
    /// The user's destructors.
    Drops,
    /// Listeners of pools, which wake tasks and move messages from hub to hub.
    Listeners,
}

/// So many calls of one chain lie on a thread's stack: a few KiB in a debug build.
pub(super) const DEEPEST: usize = 8;

/// Set in [`SCOPES`] while something is held back.
const HELD_BACK: usize = 1;
/// Set in [`SCOPES`] while the thread is in the middle of something that user code is no part of.
const IN_THE_MIDDLE: usize = 2;
/// What a call of the first chain adds to [`SCOPES`]. Each chain has four bits.
const CALL: usize = 4;
/// What one scope adds to [`SCOPES`].
const SCOPE: usize = CALL << 12;

thread_local! {
    /// Scopes that are open on this thread, whether they hold something back, whether user code is to be [set
    /// aside](super::aside), and how many calls of each chain are on the stack: one word, which is 0 on most calls.
    static SCOPES: Cell<usize> = const { Cell::new(0) };
    /// Of each chain, the calls that wait for the deepest one to return, which leaves this empty. Without a destructor, as
    /// below.
    static TOO_DEEP: RefCell<ManuallyDrop<[Vec<Held>; 3]>> =
        const { RefCell::new(ManuallyDrop::new([Vec::new(), Vec::new(), Vec::new()])) };
    /// What they hold back. Without a destructor, so that it is there for destructors that run at the thread's end; the
    /// outermost scope leaves it empty.
    static QUEUE: RefCell<ManuallyDrop<Vec<Held>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// While one of these is open on a thread, what is woken or discarded there is held back; the end of the outermost one runs
/// it. Open it before the lock that it is for, so that it ends after that.
#[derive(Debug)]
#[must_use]
pub(crate) struct Deferred(PhantomData<*mut ()>);

impl WakeList {
    pub(crate) fn new() -> Self {
        Self(SmallVec::new())
    }

    /// Wakes all.
    #[inline]
    pub(crate) fn wake(mut self) {
        assert_may_wake();
        if !self.0.is_empty() {
            for waker in self.0.drain(..) {
                if !wake_one(waker) && strands_others() {
                    break;
                }
            }
        }
    }
}

impl Extend<Waker> for WakeList {
    fn extend<I: IntoIterator<Item = Waker>>(&mut self, wakers: I) {
        self.0.extend(wakers);
    }
}

impl FromIterator<Waker> for WakeList {
    fn from_iter<I: IntoIterator<Item = Waker>>(wakers: I) -> Self {
        Self(wakers.into_iter().collect())
    }
}

impl Drop for WakeList {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            discard_all(self.0.drain(..));
        }
    }
}

/// One of a chain's calls on the stack.
struct Entered(Chain);

impl Chain {
    /// What one call adds to [`SCOPES`].
    #[inline]
    fn call(self) -> usize {
        CALL << (4 * self as usize)
    }

    #[inline]
    pub(super) fn depth(self) -> usize {
        SCOPES.get() / self.call() % 16
    }

    #[inline]
    fn is_deepest(self) -> bool {
        self.depth() == DEEPEST
    }

    #[inline]
    fn enter(self) -> Entered {
        SCOPES.set(SCOPES.get() + self.call());
        Entered(self)
    }

    #[cold]
    fn queue(self, call: Held) {
        TOO_DEEP.with_borrow_mut(|queues| queues[self as usize].push(call));
    }

    #[cold]
    fn run_queued(self) {
        loop {
            let queued = TOO_DEEP.with_borrow_mut(|queues| std::mem::take(&mut queues[self as usize]));
            if queued.is_empty() {
                return;
            }
            for call in queued {
                match call {
                    Held::Wake(waker) => _ = wake_by_ref(waker),
                    Held::WakeShared(waker) => {
                        caught("a waker panicked", || waker.wake_by_ref());
                        discard(waker);
                    }
                    Held::Drop(value) => _ = caught("a destructor panicked", || drop(value)),
                    Held::Call(what, call) => _ = caught(what, call),
                }
            }
        }
    }
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        if self.0.is_deepest() {
            self.0.run_queued();
        }
        SCOPES.set(SCOPES.get() - self.0.call());
    }
}

/// Makes a call that may lead to another one like it. A panic of it is the caller's; that of a queued one is logged.
#[inline]
pub(crate) fn limit_depth(chain: Chain, call: impl FnOnce() + 'static) {
    if chain.is_deepest() {
        return chain.queue(Held::Call("a call at the end of a long chain of them panicked", Box::new(call)));
    }
    let _entered = chain.enter();
    call();
}

/// Wakes one.
pub(crate) fn wake(waker: Waker) {
    wake_one(waker);
}

/// False if it has panicked.
fn wake_one(waker: Waker) -> bool {
    if is_deferred() {
        hold_back(Held::Wake(waker));
        return true;
    }
    assert_unlocked();
    if Chain::Wakes.is_deepest() {
        Chain::Wakes.queue(Held::Wake(waker));
        return true;
    }
    let _entered = Chain::Wakes.enter();
    wake_by_ref(waker)
}

/// By reference: were it dropped as its panic unwinds, a panic of its destructor would be the second at a time, an abort.
fn wake_by_ref(waker: Waker) -> bool {
    let woken = caught("a waker panicked", || waker.wake_by_ref());
    drop_one(waker) && woken
}

/// Wakes one from within its task's own poll, which asks to be polled again.
pub(crate) fn wake_again(waker: &Waker) {
    if is_deferred() || Chain::Wakes.is_deepest() {
        contained("the clone of a waker panicked", || wake(waker.clone()));
    } else {
        assert_unlocked();
        let _entered = Chain::Wakes.enter();
        caught("a waker panicked", || waker.wake_by_ref());
    }
}

/// Wakes one that stays. It is shared so that it can be held back, or taken out under a lock, without a clone of the waker,
/// which is user code.
pub(crate) fn wake_shared(waker: &Arc<Waker>) {
    let scopes = SCOPES.get();
    // A few wakes may be on the stack.
    if scopes < CALL * DEEPEST / 2 && scopes.is_multiple_of(CALL) {
        assert_unlocked();
        SCOPES.set(scopes + CALL);
        caught_here("a waker panicked", || waker.wake_by_ref());
        SCOPES.set(SCOPES.get() - CALL);
    } else {
        wake_shared_aside(waker);
    }
}

/// The same where it is to be held back, or set aside, or in a long chain.
#[cold]
fn wake_shared_aside(waker: &Arc<Waker>) {
    if is_deferred() {
        return hold_back(Held::WakeShared(waker.clone()));
    }
    assert_unlocked();
    if Chain::Wakes.is_deepest() {
        return Chain::Wakes.queue(Held::WakeShared(waker.clone()));
    }
    let _entered = Chain::Wakes.enter();
    caught("a waker panicked", || waker.wake_by_ref());
}

/// Whether what is woken or discarded on this thread is held back.
#[inline]
fn is_deferred() -> bool {
    SCOPES.get() >= SCOPE
}

/// Whether user code that this thread calls is to be set aside.
pub(crate) fn set_in_the_middle(is: bool) {
    let others = SCOPES.get() & !IN_THE_MIDDLE;
    SCOPES.set(if is { others | IN_THE_MIDDLE } else { others });
}

/// Drops a value whose destructor is the user's: a waker that was replaced, a closure that was refused.
pub(crate) fn discard<T: 'static>(value: T) {
    if std::mem::needs_drop::<T>() {
        assert_may_wake();
        discard_cause(value);
    }
}

/// The same for the cause of an error. Most are the crate's own, and dropped wherever that is: so it is not asserted that no
/// lock is held.
pub(crate) fn discard_cause<T: 'static>(cause: T) {
    if is_deferred() {
        hold_back(Held::Drop(Box::new(cause)));
    } else {
        drop_one(cause);
    }
}

/// False if its destructor has panicked.
fn drop_one<T: 'static>(value: T) -> bool {
    if Chain::Drops.is_deepest() {
        Chain::Drops.queue(Held::Drop(Box::new(value)));
        return true;
    }
    let _entered = Chain::Drops.enter();
    caught("a destructor panicked", || drop(value))
}

/// The same, one by one.
pub(crate) fn discard_all<T: 'static>(values: impl IntoIterator<Item = T>) {
    values.into_iter().for_each(discard);
}

/// Calls a `tracing` macro from where a lock may be held: the subscriber is user code. In a [`Deferred`] scope the call is held
/// back, too.
pub(crate) fn log(event: impl FnOnce() + 'static) {
    later("a subscriber panicked", event);
}

/// Calls a function that takes locks of any level, or leads to user code: in a [`Deferred`] scope at its end.
pub(crate) fn later(what: &'static str, call: impl FnOnce() + 'static) {
    if is_deferred() {
        hold_back(Held::Call(what, Box::new(call)));
    } else {
        contained(what, call);
    }
}

/// The same where no lock is held.
pub(crate) fn logged(event: impl FnOnce()) {
    contained("a subscriber panicked", event);
}

/// A function of the user's, or another value, that is [discarded](discard) wherever its last owner drops it: on a worker's
/// thread, in the middle of a list of others, or as a part of another one like it.
pub(crate) struct Discarded<T: 'static>(Option<T>);

impl<T: 'static> Discarded<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// For a value that comes later, into its [`place`](Self::place).
    #[inline]
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// `None` never comes: the value is there until it is taken, which consumes this.
    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }

    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        self.0.as_mut()
    }

    pub(crate) fn take(mut self) -> Option<T> {
        self.0.take()
    }

    /// For one that takes it out and leaves `None`, or leaves it.
    #[inline]
    pub(crate) fn place(&mut self) -> &mut Option<T> {
        &mut self.0
    }
}

impl<T: 'static> Drop for Discarded<T> {
    #[inline]
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(discard);
    }
}

/// Asserts, in a debug build, that what may wake is called with no lock held, or within a [`Deferred`] scope.
#[inline]
#[track_caller]
pub(crate) fn assert_may_wake() {
    if cfg!(debug_assertions) && !is_unlocked() && !is_deferred() {
        assert_unlocked();
    }
}

/// Calls user code. A panic of it ends here and is logged. False if there was one.
#[inline]
pub(crate) fn contained(what: &'static str, call: impl FnOnce()) -> bool {
    assert_unlocked();
    caught(what, call)
}

#[inline]
fn caught(what: &'static str, call: impl FnOnce()) -> bool {
    // It is no part of what this thread is in the middle of.
    let aside = SCOPES.get() & IN_THE_MIDDLE > 0;
    if aside {
        step_out();
    }
    let goes_well = caught_here(what, call);
    if aside {
        step_back();
    }
    goes_well
}

#[inline]
fn caught_here(what: &'static str, call: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(()) => true,
        Err(payload) => {
            report(what, payload);
            false
        }
    }
}

#[cold]
fn report(what: &'static str, payload: Box<dyn Any + Send>) {
    let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no text)".into());
    // The subscriber and the payload's destructor are user code, too: each by itself, as two panics at a time are an abort.
    for call in
        [Box::new(move || tracing::error!(panic = text, "{what}")) as Box<dyn FnOnce()>, Box::new(|| drop(payload))]
    {
        if let Err(second) = catch_unwind(AssertUnwindSafe(call))
            && let Err(third) = catch_unwind(AssertUnwindSafe(|| drop(second)))
        {
            std::mem::forget(third);
        }
    }
}

#[cold]
fn hold_back(held: Held) {
    SCOPES.set(SCOPES.get() | HELD_BACK);
    QUEUE.with_borrow_mut(|queue| queue.push(held));
}

impl Deferred {
    #[inline]
    pub(crate) fn new() -> Self {
        SCOPES.set(SCOPES.get() + SCOPE);
        Self(PhantomData)
    }
}

impl Drop for Deferred {
    #[inline]
    fn drop(&mut self) {
        let outer = SCOPES.get() - SCOPE;
        if outer < SCOPE {
            SCOPES.set(outer & !HELD_BACK);
            assert_unlocked();
            if outer & HELD_BACK > 0 {
                run_held();
            }
        } else {
            SCOPES.set(outer);
        }
    }
}

#[cold]
fn run_held() {
    // What runs here may hold back more, within scopes of its own, which run that.
    let queue = QUEUE.with_borrow_mut(|queue| std::mem::take(&mut **queue));
    for held in queue {
        match held {
            Held::Wake(waker) => wake(waker),
            Held::WakeShared(waker) => {
                wake_shared(&waker);
                discard(waker);
            }
            Held::Drop(value) => discard(value),
            Held::Call(what, call) => later(what, call),
        }
    }
}
