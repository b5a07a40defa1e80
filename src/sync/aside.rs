//! [`set_aside`]: user code that runs in the middle of something is no part of it.
//!
//! A waker that is woken in another task's capture goes on with its own task. What the thread is in the middle of is none of
//! `sync`'s concern: whoever enters it on this thread registers a hook, which is called before the user code and returns the guard
//! that enters it again.

use std::{any::Any, cell::Cell};

/// Leaves what the thread is in the middle of, until the guard is dropped.
pub(crate) type SetAside = fn() -> Box<dyn Any>;

thread_local! {
    /// No destructor: it is there for destructors that run at the thread's end.
    static HOOK: Cell<Option<SetAside>> = const { Cell::new(None) };
}

/// Before user code: one load where the thread is in the middle of nothing.
#[inline]
pub(crate) fn set_aside() -> Option<Box<dyn Any>> {
    HOOK.get().map(|hook| hook())
}

/// Registers what [`set_aside`] calls on this thread, or nothing.
pub(crate) fn on_user_code(hook: Option<SetAside>) {
    HOOK.set(hook);
}
