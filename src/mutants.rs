//! Mutants: deliberate bugs, which show that the tests would find such bugs.
//!
//! With `--cfg wakeline_mutants`, as in the package `tests/mutants`, the library contains all of them, and a test
//! activates one at a time for the whole process. Otherwise it contains none: each site is a constant `false`, and no
//! feature changes that.

/// A deliberate bug, of a kind that is typical of concurrent programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(wakeline_mutants), allow(unreachable_pub, reason = "public only where they can be activated"))]
#[repr(u8)]
pub enum Mutant {
    /// A stream reads memory without waiting for the last write.
    MissingWait = 1,
    /// With two streams that read memory, a writer waits only for the later one.
    EarlierReader,
    /// Memory is reused while streams may still use it.
    EarlyReuse,
    /// A stream that waits for a point of another stream records that it comes after everything enqueued there since.
    PresentClock,
    /// A stream that waits for a point of another stream waits for the mark before it.
    EarlyMark,
    /// Work is reported as complete that was not queried.
    EarlyCompletion,
    /// An envelope returns to its hub, and the message that waits for it is not resumed.
    LostWake,
    /// An operator that waits for a device counts as idle.
    TokenTooSoon,
    /// One of several readers receives a message twice.
    SentTwice,
    /// An envelope does not return to its hub.
    EnvelopeLost,
    /// A copy is one byte short.
    ShortCopy,
    /// Data that the loss of a device has spoilt on another device counts as valid.
    FaultUnheard,
    /// A batch drops its last message.
    ShortBatch,
    /// The metadata of a message stays attached for the next one.
    MetadataKept,
    /// A reader is notified of the end while a message is still in transit.
    EndTooSoon,
    /// Concurrent runs send in the order in which they end, although ordered output was requested.
    Overtaking,
    /// A stream is not returned to its pool.
    StreamKept,
    /// Another copy of a modified chunk still has the old contents.
    StaleCopy,
    /// A caller that was answered stays attached to all later messages.
    CallersKept,
    /// Where two messages with callers become one, the callers are lost.
    CallersLost,
    /// A second response to one request answers another request.
    AnsweredTwice,
    /// The host gets a slice of memory that nodes of a graph use.
    HostSliceLent,
    /// After a waker that panics, the remaining wakers are not woken.
    WakersStranded,
    /// Of a group of operators that wait only for each other, one is left out.
    GroupShort,
    /// An unrelated operator is added to such a group.
    GroupLong,
    /// A reader that lacks the message of a `latest` hub does not count as waiting for it.
    LatestUnseen,
    /// An operator that was sent a message, and has not been polled since, counts as waiting.
    WakeUnseen,
}

#[cfg(wakeline_mutants)]
mod active {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static ACTIVE: AtomicU8 = AtomicU8::new(0);

    impl Mutant {
        /// All mutants.
        pub const ALL: [Self; 27] = [
            Self::MissingWait,
            Self::EarlierReader,
            Self::EarlyReuse,
            Self::PresentClock,
            Self::EarlyMark,
            Self::EarlyCompletion,
            Self::LostWake,
            Self::TokenTooSoon,
            Self::SentTwice,
            Self::EnvelopeLost,
            Self::ShortCopy,
            Self::FaultUnheard,
            Self::ShortBatch,
            Self::MetadataKept,
            Self::EndTooSoon,
            Self::Overtaking,
            Self::StreamKept,
            Self::StaleCopy,
            Self::CallersKept,
            Self::CallersLost,
            Self::AnsweredTwice,
            Self::HostSliceLent,
            Self::WakersStranded,
            Self::GroupShort,
            Self::GroupLong,
            Self::LatestUnseen,
            Self::WakeUnseen,
        ];
    }

    /// Activates one mutant, or none, in this process.
    pub fn activate(mutant: Option<Mutant>) {
        ACTIVE.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::SeqCst);
    }

    pub(crate) fn is(mutant: Mutant) -> bool {
        ACTIVE.load(Ordering::Relaxed) == mutant as u8
    }
}

#[cfg(wakeline_mutants)]
pub use active::activate;
#[cfg(wakeline_mutants)]
pub(crate) use active::is;

/// Always false: there are no mutants in this build.
#[cfg(not(wakeline_mutants))]
#[inline(always)]
pub(crate) const fn is(_mutant: Mutant) -> bool {
    false
}
