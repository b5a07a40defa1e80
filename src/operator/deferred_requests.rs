//! Requests that an operator drops without an answer: they fail after its run, not at once.
//!
//! The run might still fail, and the callers then get its failure. While an operator's future is polled, the thread is
//! in a [`PollScope`], and a request that is dropped there is added to the scope. The
//! [run context](super::run_context::RunContext) takes the requests at the end of the poll, and drops them once the run
//! has ended and its failure, if any, is recorded.

use std::{
    cell::{Cell, RefCell},
    mem::ManuallyDrop,
    sync::Arc,
};

use super::activity::FlowActivity;
use crate::hub::reply::Caller;

/// The innermost scope has requests.
const HAS: u32 = 1;
/// Requests that are dropped now fail at once.
const AT_ONCE: u32 = 1 << 1;
/// The number of scopes on the stack is counted from this bit on: an operator may poll another flow.
const SCOPE: u32 = 1 << 2;

thread_local! {
    // Neither has a destructor, so that both are usable in destructors that run at the thread's end.
    static STATE: Cell<u32> = const { Cell::new(0) };
    /// Each with the number of its scope, in ascending order.
    static REQUESTS: RefCell<ManuallyDrop<Vec<(u32, DeferredRequest)>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// A request that fails when it is dropped.
pub(super) struct DeferredRequest {
    pub(super) request: Arc<dyn Caller>,
    /// Identifies the request's flow: the address of its [`FlowActivity`].
    pub(super) flow: usize,
}

/// A poll of an operator on this thread. Requests are left to an outer scope unless they are [taken](take) before the
/// end.
pub(super) struct PollScope(u32);

impl PollScope {
    #[inline]
    pub(super) fn enter() -> Self {
        let outer = STATE.get();
        STATE.set((outer & !(SCOPE - 1)) + SCOPE);
        Self(outer)
    }
}

impl Drop for PollScope {
    #[inline]
    fn drop(&mut self) {
        STATE.set(self.0);
    }
}

/// While it exists, requests that are dropped on this thread fail at once.
pub(super) struct AtOnce(u32);

impl AtOnce {
    pub(super) fn begin() -> Self {
        let before = STATE.get();
        STATE.set(before | AT_ONCE);
        Self(before)
    }
}

impl Drop for AtOnce {
    fn drop(&mut self) {
        STATE.set(self.0);
    }
}

/// True if requests were deferred in the current scope, and not taken since.
#[inline]
pub(super) fn any() -> bool {
    STATE.get() & HAS != 0
}

/// Takes the requests of the current scope.
#[cold]
pub(super) fn take() -> Vec<DeferredRequest> {
    let scope = STATE.get() / SCOPE;
    STATE.set(STATE.get() & !HAS);
    REQUESTS.with_borrow_mut(|requests| {
        let first = requests.partition_point(|(of, _)| *of < scope);
        let taken = requests.split_off(first).into_iter().map(|(_, request)| request).collect();
        if requests.is_empty() {
            // Also frees the allocation, which the thread does not do when it ends.
            **requests = Vec::new();
        }
        taken
    })
}

/// True if a request that is dropped now must be [deferred](defer).
pub(crate) fn is_required() -> bool {
    let state = STATE.get();
    state >= SCOPE && state & AT_ONCE == 0
}

/// Keeps a request, whose drop fails it, until the current run of the polling operator has ended.
pub(crate) fn defer(request: Arc<dyn Caller>, flow: &Arc<FlowActivity>) {
    let (scope, flow) = (STATE.get() / SCOPE, Arc::as_ptr(flow).addr());
    REQUESTS.with_borrow_mut(|requests| requests.push((scope, DeferredRequest { request, flow })));
    STATE.set(STATE.get() | HAS);
}
