//! What the operator that this thread polls has waited for besides its ports, as far as it is known: see
//! [`note_wait`].

use std::cell::Cell;

/// What a future waits for that has returned `Pending`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Waited {
    /// For something that is not known here.
    #[default]
    Other,
    /// For work on a device.
    Device,
    /// For memory of an allocator.
    Memory,
}

thread_local! {
    static WAITED: Cell<Waited> = const { Cell::new(Waited::Other) };
}

/// Called by a future that is about to return `Pending`.
#[inline]
pub(crate) fn note_wait(waited: Waited) {
    WAITED.set(waited);
}

/// What was noted last on this thread.
#[inline]
pub(crate) fn take_wait() -> Waited {
    WAITED.replace(Waited::Other)
}
