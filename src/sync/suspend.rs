//! [`suspend`]: excludes user code from an activity of the thread, such as a capture, that the user code interrupts.
//!
//! A waker that is woken during another task's capture runs code of its own task. `sync` does not know the activity:
//! the code that begins it on this thread registers a hook. The hook is called before user code, suspends the activity
//! and returns a guard whose drop resumes the activity.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    mem::ManuallyDrop,
};

/// A hook that suspends the thread's activity until the returned guard is dropped.
pub(crate) type SuspendHook = fn() -> Box<dyn Any>;

use super::wakes::set_in_activity;

thread_local! {
    /// Has no destructor, so that it is usable in destructors that run at the thread's end.
    static HOOK: Cell<Option<SuspendHook>> = const { Cell::new(None) };
    /// The guards of the user code on the stack, the innermost last.
    static GUARDS: RefCell<ManuallyDrop<Vec<Box<dyn Any>>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Suspends the thread's activity before user code runs.
#[cold]
pub(crate) fn suspend() {
    if let Some(hook) = HOOK.get() {
        let guard = hook();
        GUARDS.with_borrow_mut(|guards| guards.push(guard));
    }
}

#[cold]
pub(crate) fn resume() {
    let guard = GUARDS.with_borrow_mut(|guards| {
        let guard = guards.pop();
        if guards.is_empty() {
            // Also frees the allocation, which the thread does not do when it ends.
            **guards = Vec::new();
        }
        guard
    });
    drop(guard);
}

/// Registers or clears the hook that is called before user code on this thread.
pub(crate) fn on_user_code(hook: Option<SuspendHook>) {
    HOOK.set(hook);
    set_in_activity(hook.is_some());
}
