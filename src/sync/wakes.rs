//! Wakes wakers and drops users' values with no lock held, whatever that code does.
//!
//! A waker's `wake` and `drop`, and the destructors of values that the user passed in, are user code: they may panic,
//! call back into the crate or drop a buffer. So:
//!
//! - they run with no lock of the crate held, which a debug build asserts;
//! - a panic is contained. It is logged as a `tracing` error, and the remaining wakers are woken. It is not resumed:
//!   the waking thread is rarely the waker's own. It is often a worker of the device or runs a destructor, and has
//!   changes of its own to complete.
//!
//! ```text
//!   wake, discard ──> a Deferred scope on this thread? ── no ───────────────────────> run now
//!                                   └── yes ──> queued ──> end of the outermost scope ──^
//! ```
//!
//! A function that wakes and may be called under its caller's lock need not return a list of wakers: the caller opens a
//! [`Deferred`] scope before it acquires the lock.
//!
//! User code may recurse: a waker drops a future that wakes the next waiter; a message's destructor drops the reader of
//! another queue; an error drops its cause. The user controls the length of such a [chain](Chain), and the stack is
//! limited. So a thread counts the calls of each chain on its stack, and queues them from [`MAX_DEPTH`] on:
//!
//! ```text
//!   wake, discard ──> fewer than MAX_DEPTH of this chain on the stack? ── yes ──> run now
//!                                   └── no ──> queued ──> the deepest has returned ──> run in a loop
//! ```
//!
//! The chains are counted separately: a user's destructor may wait for a task, whose wake must not be queued until the
//! destructor has returned.

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

use crate::sync::{assert_unlocked, is_unlocked, resume, strands_others, suspend};

/// Wakers that were collected under a lock, to be woken after its release. If the list is dropped without a wake, the
/// wakers are [discarded](discard).
#[derive(Debug, Default)]
#[must_use = "it wakes when `wake` is called"]
pub(crate) struct WakeList(SmallVec<[Waker; 4]>);

/// A wake, a drop or another call that runs later.
enum DeferredCall {
    Wake(Waker),
    WakeShared(Arc<Waker>),
    Drop(#[allow(dead_code, reason = "dropped")] Box<dyn Any>),
    Call(&'static str, Box<dyn FnOnce()>),
}

/// A kind of call that may lead to further calls of the same kind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chain {
    Wakes,
    /// The user's destructors.
    Drops,
    /// Listeners of pools, which wake tasks and move messages between hubs.
    Listeners,
}

/// The maximum number of calls of one chain on a thread's stack, which take a few KiB in a debug build.
pub(super) const MAX_DEPTH: usize = 8;

/// Set in [`SCOPES`] while actions are deferred.
const DEFERRED: usize = 1;
/// Set in [`SCOPES`] while the thread has an activity that excludes user code.
const IN_ACTIVITY: usize = 2;
/// The value that a call of the first chain adds to [`SCOPES`]. Each chain has four bits.
const CALL: usize = 4;
/// The value that one scope adds to [`SCOPES`].
const SCOPE: usize = CALL << 12;

thread_local! {
    /// The number of scopes that are open on this thread, whether actions are deferred, whether user code is to be [set
    /// aside](super::suspend), and the number of calls of each chain on the stack. One word, which is usually 0.
    static SCOPES: Cell<usize> = const { Cell::new(0) };
    /// For each chain, the calls that wait for the deepest one to return, which then runs them all. No destructor, as
    /// below.
    static TOO_DEEP: RefCell<ManuallyDrop<[Vec<DeferredCall>; 3]>> =
        const { RefCell::new(ManuallyDrop::new([Vec::new(), Vec::new(), Vec::new()])) };
    /// The actions that the open scopes defer. No destructor, so that it is usable in destructors that run at the
    /// thread's end; the end of the outermost scope empties it.
    static QUEUE: RefCell<ManuallyDrop<Vec<DeferredCall>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// A scope that defers the wakes and discards of its thread. They run at the end of the outermost scope. Open the scope
/// before its lock is acquired, so that it ends after the lock's release.
#[derive(Debug)]
#[must_use]
pub(crate) struct Deferred(PhantomData<*mut ()>);

impl WakeList {
    pub(crate) fn new() -> Self {
        Self(SmallVec::new())
    }

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

/// A guard that counts one call of a chain on the stack.
struct DepthGuard(Chain);

impl Chain {
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
        self.depth() == MAX_DEPTH
    }

    #[inline]
    fn enter(self) -> DepthGuard {
        SCOPES.set(SCOPES.get() + self.call());
        DepthGuard(self)
    }

    #[cold]
    fn queue(self, call: DeferredCall) {
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
                    DeferredCall::Wake(waker) => _ = wake_by_ref(waker),
                    DeferredCall::WakeShared(waker) => {
                        caught("a waker panicked", || waker.wake_by_ref());
                        discard(waker);
                    }
                    DeferredCall::Drop(value) => _ = caught("a destructor panicked", || drop(value)),
                    DeferredCall::Call(what, call) => _ = caught(what, call),
                }
            }
        }
    }
}

impl Drop for DepthGuard {
    #[inline]
    fn drop(&mut self) {
        if self.0.is_deepest() {
            self.0.run_queued();
        }
        SCOPES.set(SCOPES.get() - self.0.call());
    }
}

/// Makes a call that may recurse. Its panic propagates to the caller; the panic of a queued call is logged.
#[inline]
pub(crate) fn limit_depth(chain: Chain, call: impl FnOnce() + 'static) {
    if chain.is_deepest() {
        return chain.queue(DeferredCall::Call("a call that was queued in a long chain panicked", Box::new(call)));
    }
    let _entered = chain.enter();
    call();
}

pub(crate) fn wake(waker: Waker) {
    wake_one(waker);
}

/// Wakes a waker. Returns false if it panicked.
fn wake_one(waker: Waker) -> bool {
    if is_deferred() {
        defer(DeferredCall::Wake(waker));
        return true;
    }
    assert_unlocked();
    if Chain::Wakes.is_deepest() {
        Chain::Wakes.queue(DeferredCall::Wake(waker));
        return true;
    }
    let _entered = Chain::Wakes.enter();
    wake_by_ref(waker)
}

/// Wakes by reference: if the waker were dropped while its panic unwinds, a second panic in its destructor would abort.
fn wake_by_ref(waker: Waker) -> bool {
    let woken = caught("a waker panicked", || waker.wake_by_ref());
    drop_one(waker) && woken
}

/// Wakes a task from within its own poll, to have it polled again.
pub(crate) fn wake_again(waker: &Waker) {
    if is_deferred() || Chain::Wakes.is_deepest() {
        contained("the clone of a waker panicked", || wake(waker.clone()));
    } else {
        assert_unlocked();
        let _entered = Chain::Wakes.enter();
        caught("a waker panicked", || waker.wake_by_ref());
    }
}

/// A waker that stays registered and is woken often. The common wake, and the comparison with another waker, use the
/// copy in place, and touch no memory besides it; a wake that has to wait takes a reference to the shared copy, without
/// cloning the waker, which would run user code.
#[derive(Debug)]
pub(crate) struct KeptWaker {
    waker: Waker,
    shared: Arc<Waker>,
}

impl KeptWaker {
    /// `shared`: a clone of `waker`. Both are made where user code may run.
    pub(crate) fn new(waker: Waker, shared: Arc<Waker>) -> Self {
        Self { waker, shared }
    }

    /// Drops it, one copy after the other: the destructor of each may panic.
    pub(crate) fn discard(self) {
        let Self { waker, shared } = self;
        discard(waker);
        discard(shared);
    }

    #[inline]
    pub(crate) fn will_wake(&self, waker: &Waker) -> bool {
        self.waker.will_wake(waker)
    }

    #[inline]
    pub(crate) fn wake(&self) {
        wake_kept(&self.waker, &self.shared);
    }
}

/// Wakes a waker that stays registered. It is shared, so that it can be deferred, or collected under a lock, without
/// cloning the waker, which would run user code.
pub(crate) fn wake_shared(waker: &Arc<Waker>) {
    wake_kept(waker, waker);
}

/// Wakes `waker`; `shared` is the same one, for a wake that runs later.
fn wake_kept(waker: &Waker, shared: &Arc<Waker>) {
    let scopes = SCOPES.get();
    // The fast path: no scope is open, no activity is suspended, and only a few wakes are on the stack.
    if scopes < CALL * MAX_DEPTH / 2 && scopes.is_multiple_of(CALL) {
        assert_unlocked();
        SCOPES.set(scopes + CALL);
        caught_here("a waker panicked", || waker.wake_by_ref());
        SCOPES.set(SCOPES.get() - CALL);
    } else {
        wake_shared_aside(shared);
    }
}

/// The slow path: the wake may have to be deferred, set aside or queued.
#[cold]
fn wake_shared_aside(waker: &Arc<Waker>) {
    if is_deferred() {
        return defer(DeferredCall::WakeShared(waker.clone()));
    }
    assert_unlocked();
    if Chain::Wakes.is_deepest() {
        return Chain::Wakes.queue(DeferredCall::WakeShared(waker.clone()));
    }
    let _entered = Chain::Wakes.enter();
    caught("a waker panicked", || waker.wake_by_ref());
}

/// True if wakes and discards on this thread are deferred.
#[inline]
fn is_deferred() -> bool {
    SCOPES.get() >= SCOPE
}

/// Sets whether the thread has an activity that is to be suspended while user code runs.
pub(crate) fn set_in_activity(is: bool) {
    let others = SCOPES.get() & !IN_ACTIVITY;
    SCOPES.set(if is { others | IN_ACTIVITY } else { others });
}

/// Drops a value whose destructor is user code: a waker that was replaced, a closure that was refused.
pub(crate) fn discard<T: 'static>(value: T) {
    if std::mem::needs_drop::<T>() {
        assert_may_wake();
        discard_cause(value);
    }
}

/// Like [`discard`], for the cause of an error. Most causes are the crate's own errors, which may be dropped under a
/// lock, so this does not assert that no lock is held.
pub(crate) fn discard_cause<T: 'static>(cause: T) {
    if is_deferred() {
        defer(DeferredCall::Drop(Box::new(cause)));
    } else {
        drop_one(cause);
    }
}

/// Drops a value. Returns false if its destructor panicked.
fn drop_one<T: 'static>(value: T) -> bool {
    if Chain::Drops.is_deepest() {
        Chain::Drops.queue(DeferredCall::Drop(Box::new(value)));
        return true;
    }
    let _entered = Chain::Drops.enter();
    caught("a destructor panicked", || drop(value))
}

pub(crate) fn discard_all<T: 'static>(values: impl IntoIterator<Item = T>) {
    values.into_iter().for_each(discard);
}

/// Calls a `tracing` macro where a lock may be held: the subscriber is user code. A [`Deferred`] scope defers the call.
pub(crate) fn log(event: impl FnOnce() + 'static) {
    later("a subscriber panicked", event);
}

/// Calls a function that acquires locks of any level, or that runs user code. A [`Deferred`] scope defers the call to
/// its end.
pub(crate) fn later(what: &'static str, call: impl FnOnce() + 'static) {
    if is_deferred() {
        defer(DeferredCall::Call(what, Box::new(call)));
    } else {
        contained(what, call);
    }
}

/// Like [`log`], where no lock is held.
pub(crate) fn logged(event: impl FnOnce()) {
    contained("a subscriber panicked", event);
}

/// A value of the user's, such as a function, that is [discarded](discard) wherever its last owner drops it: on a
/// worker thread, within a list of others, or as a part of another such value.
pub(crate) struct DiscardOnDrop<T: 'static>(Option<T>);

impl<T: 'static> DiscardOnDrop<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// Creates an empty container, to be filled through [`place`](Self::place).
    #[inline]
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// The value. `None` if it was taken, or never set.
    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }

    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        self.0.as_mut()
    }

    // By reference: to move the container copied each message once more, 37 instructions of a hop of 64 bytes.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<T> {
        self.0.take()
    }

    /// Direct access, to take or set the value.
    #[inline]
    pub(crate) fn place(&mut self) -> &mut Option<T> {
        &mut self.0
    }
}

impl<T: 'static> Drop for DiscardOnDrop<T> {
    #[inline]
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(discard);
    }
}

/// Asserts, in a debug build, that no lock is held or a [`Deferred`] scope is open. Called by functions that may wake.
#[inline]
#[track_caller]
pub(crate) fn assert_may_wake() {
    if cfg!(debug_assertions) && !is_unlocked() && !is_deferred() {
        assert_unlocked();
    }
}

/// Calls user code. A panic is contained and logged. Returns false if there was one.
#[inline]
pub(crate) fn contained(what: &'static str, call: impl FnOnce()) -> bool {
    assert_unlocked();
    caught(what, call)
}

#[inline]
fn caught(what: &'static str, call: impl FnOnce()) -> bool {
    // An activity of this thread, such as a capture, does not include the call.
    let aside = SCOPES.get() & IN_ACTIVITY > 0;
    if aside {
        suspend();
    }
    let ok = caught_here(what, call);
    if aside {
        resume();
    }
    ok
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
    // The subscriber and the payload's destructor are user code, too. Each is called separately, as a panic during a
    // panic aborts.
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
fn defer(call: DeferredCall) {
    SCOPES.set(SCOPES.get() | DEFERRED);
    QUEUE.with_borrow_mut(|queue| queue.push(call));
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
            SCOPES.set(outer & !DEFERRED);
            assert_unlocked();
            if outer & DEFERRED > 0 {
                run_deferred();
            }
        } else {
            SCOPES.set(outer);
        }
    }
}

#[cold]
fn run_deferred() {
    // These actions may open scopes of their own and defer more, which those scopes run.
    let queue = QUEUE.with_borrow_mut(|queue| std::mem::take(&mut **queue));
    for call in queue {
        match call {
            DeferredCall::Wake(waker) => wake(waker),
            DeferredCall::WakeShared(waker) => {
                wake_shared(&waker);
                discard(waker);
            }
            DeferredCall::Drop(value) => discard(value),
            DeferredCall::Call(what, call) => later(what, call),
        }
    }
}
