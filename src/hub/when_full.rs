//! [`WhenFull`]: what a full queue does with a new message.
//!
//! Does not depend on any device, like [`queue`](super::queue), and is model-checked with it in
//! `tests/loom/queue.rs`.

/// What a full queue does with a new message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WhenFull {
    /// Rejects it: there is no room, and the writer waits.
    #[default]
    Block,
    DropNewest,
    DropOldest,
    /// Drops its only message, which can be read repeatedly until then.
    KeepLatest,
}

impl WhenFull {
    /// Whether the writer waits for room.
    pub(crate) fn blocks_writer(self) -> bool {
        self == Self::Block
    }

    /// Whether messages are dropped that were ready to be taken.
    pub(crate) fn may_lose_ready(self) -> bool {
        matches!(self, Self::DropOldest | Self::KeepLatest)
    }

    /// Whether the newest message stays, to be read repeatedly.
    pub(crate) fn keeps_latest(self) -> bool {
        self == Self::KeepLatest
    }
}
