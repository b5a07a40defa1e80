//! The primitives that the protocols are written with.
//!
//! `stream/completion.rs`, `hub/queue.rs`, `operator/quiet.rs` and `operator/watchers.rs` use nothing else of the crate. The model checks in
//! `tests/loom_*.rs` include those files as they stand, beside a module of this name with loom's primitives in it.

pub(crate) use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
};

/// Locks, whatever a panicking thread left behind: the protocols keep their state whole at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
