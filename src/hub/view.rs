//! [`HubView`]: what a flow sees of a hub: its state, its counts, and what its two ends wait for.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use super::{pool::Pool, queue::Counts};
use crate::{error::Result, stream::Ticket};

/// What a hub's writer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriterWait {
    /// For the reader to take a message.
    Room,
    /// For the return of an envelope to fill.
    Blank,
    /// For the return of an envelope that a fork is copied to.
    Copy,
}

/// What a hub's reader waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReaderWait {
    /// For the writer to send a message.
    Message,
    /// For the return of an envelope that a message is copied to.
    Envelope,
    /// For the hub to move a message: it is stepped, or about to move one.
    Move,
}

/// How full a hub is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    pub(crate) queued: usize,
    pub(crate) capacity: usize,
    /// Envelopes that the writer fills, and those at the reader's location: how many are free, of how many.
    pub(crate) blanks: Option<(usize, usize)>,
    pub(crate) arrivals: Option<(usize, usize)>,
}

/// A hub, independent of its message type.
pub(crate) trait HubView: Send + Sync {
    /// The number of queued messages that were not read.
    fn queued(&self) -> usize;
    fn fill(&self) -> Fill;
    /// Whether its newest message stays, to be read repeatedly.
    fn keeps_latest(&self) -> bool;
    /// What has become of the messages that are no longer queued.
    fn counts(&self) -> Counts;
    /// The last copy that was enqueued.
    fn last_copy(&self) -> Option<Ticket>;
    /// For a hub that is stepped: moves one message, if possible, and returns its size in bytes.
    fn step(&self) -> Result<Option<u64>>;
    /// Ends stepping: from now on the hub moves messages by itself.
    fn stop_stepping(&self);
    /// Whether nothing can be taken, and nothing will be added.
    fn has_ended(&self) -> bool;
    fn name(&self) -> &Arc<str>;
    /// The number of envelopes of `pool` in its queue.
    fn holds(&self, pool: &Arc<Pool>) -> usize;
    /// What the writer waits for, if it cannot send.
    fn writer_waits(&self) -> Option<WriterWait>;
    /// What the reader waits for, if it cannot take. `in_run`: a kept message that the reader has already read does
    /// not count as a message.
    fn reader_waits(&self, in_run: bool) -> Option<ReaderWait>;
    fn carries_envelopes(&self) -> bool;
    /// Whether the reader gets copies of these envelopes.
    fn copies(&self) -> bool;
    /// A description of what the writer waits for.
    fn writer_lacks(&self, holders: &dyn EnvelopeHolders) -> Option<String>;
    /// A description of what the reader waits for.
    fn reader_lacks(&self, in_run: bool, holders: &dyn EnvelopeHolders) -> Option<String>;
}

/// The places where a flow's envelopes can be, for descriptions.
pub(crate) trait EnvelopeHolders {
    /// Calls `show` with all hubs of the flow.
    fn each_hub(&self, show: &mut dyn FnMut(&dyn HubView));
    /// The operators that may keep envelopes of the hub of this name.
    fn keepers(&self, hub: &str) -> Vec<String>;
}

/// No places are known.
impl EnvelopeHolders for () {
    fn each_hub(&self, _show: &mut dyn FnMut(&dyn HubView)) {}

    fn keepers(&self, _hub: &str) -> Vec<String> {
        Vec::new()
    }
}

/// The writer's last request: room for a number of messages, and a number of envelopes (blank ones, or those that its forks
/// are copied to). It explains a stall. Written only by a writer that may request more than one.
pub(super) struct WriterRequest {
    messages: AtomicUsize,
    envelopes: AtomicUsize,
}

impl WriterRequest {
    pub(super) fn new() -> Self {
        Self { messages: AtomicUsize::new(1), envelopes: AtomicUsize::new(1) }
    }

    #[inline]
    pub(super) fn note(&self, messages: usize, envelopes: usize) {
        for (noted, requested) in [(&self.messages, messages), (&self.envelopes, envelopes)] {
            // The value rarely changes, and other threads read the same cache line.
            if noted.load(Ordering::Relaxed) != requested {
                noted.store(requested, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn noted(&self) -> (usize, usize) {
        (self.messages.load(Ordering::Relaxed), self.envelopes.load(Ordering::Relaxed))
    }
}

/// `3 of the 3 envelopes of hub `a -> b` at this location are in use, 1 of them in hub `b -> c`; `c` keeps 2 of them:
/// set `.envelopes(5)``
///
/// The last part appears only if the pool's hub is one of the flow's: envelopes that no hub of the flow holds are
/// with operators.
pub(super) fn whereabouts(pool: &Arc<Pool>, holders: &dyn EnvelopeHolders) -> String {
    let count = pool.count();
    let out = count - pool.idle().min(count);
    let mut text = format!("{out} of the {count} envelopes of hub `{}` at this location are in use", pool.hub());
    let (mut queued, mut has_own) = (0, false);
    holders.each_hub(&mut |hub| {
        let (held, is_own) = (hub.holds(pool), hub.name() == pool.hub());
        queued += held;
        has_own |= is_own;
        if held > 0 && !is_own {
            text.push_str(&format!(", {held} of them in hub `{}`", hub.name()));
        }
    });
    let kept = out.saturating_sub(queued);
    if has_own && kept > 0 {
        let enough = count.saturating_add(kept);
        let (who, separator) = match &holders.keepers(pool.hub())[..] {
            [] => ("if operators keep".into(), ","),
            [one] => (format!("{one} keeps"), ":"),
            several => (format!("if {} keep", several.join(" or ")), ","),
        };
        text.push_str(&format!("; {who} {kept} of them{separator} set `.envelopes({enough})`"));
    }
    text
}
