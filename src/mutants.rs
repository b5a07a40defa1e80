//! Mutants: bugs on purpose, by which the tests show that they would find one.
//!
//! Built with `--cfg wakeline_mutants`, as the package `tests/mutants` builds it, the library has them all, and a test activates one at
//! a time for the whole process. Built otherwise it has none: each site is a constant `false`, and no feature changes that.

/// Each of a kind that concurrent programs have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(wakeline_mutants), allow(unreachable_pub, reason = "public only where they can be activated"))]
#[repr(u8)]
pub enum Mutant {
    /// A stream reads memory without a wait for what writes it.
    MissingWait = 1,
    /// Of two streams that read memory, whoever writes it waits for the later one alone.
    EarlierReader,
    /// Memory is handed out again while streams may still use it.
    EarlyReuse,
    /// A stream that waits for a point of another's takes itself to come after all that the other has been given since.
    PresentClock,
    /// A stream that waits for a point of another's is given the mark before it.
    EarlyMark,
    /// Work is said to be done that was not asked about.
    EarlyCompletion,
    /// An envelope comes home, and the message that waits for it stays where it is.
    LostWake,
    /// An operator that waits for a device counts as one that is at rest.
    TokenTooSoon,
    /// One reader of several gets a message twice.
    SentTwice,
    /// An envelope does not go home.
    EnvelopeLost,
    /// A copy is one byte short.
    ShortCopy,
    /// What a lost device has spoilt on another one is taken for sound.
    FaultUnheard,
    /// A batch drops its last message.
    ShortBatch,
    /// What came beside a message stays for the next one.
    MetadataKept,
    /// A reader is told that there will be no more while a message is on its way.
    EndTooSoon,
    /// Runs that go on beside each other send as they end, though order was asked for.
    Overtaking,
    /// A stream is not given back to its pool.
    StreamKept,
    /// A chunk that was modified is still seen elsewhere as it was.
    StaleCopy,
    /// A caller that has its answer goes on with every message.
    CallersKept,
    /// Where two messages with callers become one, those callers are lost.
    CallersLost,
    /// A second response to one request is the answer to another.
    AnsweredTwice,
    /// The host is lent memory that nodes of a graph use.
    HostSliceLent,
    /// A waker that panics strands those that are woken after it.
    WakersStranded,
    /// Of operators that wait for each other alone, one is forgotten.
    GroupShort,
    /// To those, one is added that has nothing to do with them.
    GroupLong,
    /// A reader that lacks the message of a `latest` hub does not count as one that waits for it.
    LatestUnseen,
    /// An operator that a message has been sent to, and that has not looked yet, counts as one that waits.
    WakeUnseen,
}

#[cfg(wakeline_mutants)]
mod active {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static ACTIVE: AtomicU8 = AtomicU8::new(0);

    impl Mutant {
        /// All of them.
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

    /// From now on the process has this one, or none.
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

/// There are none.
#[cfg(not(wakeline_mutants))]
#[inline(always)]
pub(crate) const fn is(_mutant: Mutant) -> bool {
    false
}
