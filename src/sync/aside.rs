//! [`step_out`]: user code that runs in the middle of something is no part of it.
//!
//! A waker that is woken in another task's capture goes on with its own task. What the thread is in the middle of is none of
//! `sync`'s concern: the code that enters it on this thread registers a hook, which is called before the user code and returns
//! the guard that enters it again.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    mem::ManuallyDrop,
};

/// Leaves what the thread is in the middle of, until the guard is dropped.
pub(crate) type SetAside = fn() -> Box<dyn Any>;

use super::wakes::set_in_the_middle;

thread_local! {
    /// No destructor: it is there for destructors that run at the thread's end.
    static HOOK: Cell<Option<SetAside>> = const { Cell::new(None) };
    /// Of the user code that is on the stack, the innermost last. Each takes its own off.
    static GUARDS: RefCell<ManuallyDrop<Vec<Box<dyn Any>>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Before user code of a thread that is in the middle of something.
#[cold]
pub(crate) fn step_out() {
    if let Some(set_aside) = HOOK.get() {
        let guard = set_aside();
        GUARDS.with_borrow_mut(|guards| guards.push(guard));
    }
}

/// After it.
#[cold]
pub(crate) fn step_back() {
    let guard = GUARDS.with_borrow_mut(|guards| {
        let guard = guards.pop();
        if guards.is_empty() {
            // Its allocation goes, too: the thread does not release it when it ends.
            **guards = Vec::new();
        }
        guard
    });
    drop(guard);
}

/// Registers what is called before user code on this thread, or nothing.
pub(crate) fn on_user_code(hook: Option<SetAside>) {
    HOOK.set(hook);
    set_in_the_middle(hook.is_some());
}
