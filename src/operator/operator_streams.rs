//! [`OperatorStreams`]: selects the stream for an operator's work, and records the streams that its messages came from.
//!
//! ```text
//!   at the first use:
//!     the pool has one                     ──> its own: always the same; outputs carry it
//!     added without one, or exhausted      ──> selected anew in each run, at the first use:
//!          a message came from a stream  ──> the run's first; the others are joined to it; outputs carry it
//!          none did                      ──> the device's default stream; outputs carry none
//! ```
//!
//! While a section is captured, the operator uses another instance, whose streams belong to the capture.
//!
//! A message brings a ticket: the point in its sender's stream at which the message's own work is done (see
//! `hub/parcel.rs`). If the message carries envelopes, the ticket comes with them, and is only informative: their memory
//! keeps the order. Otherwise the header has it, and the operator's stream waits for it when the message is taken.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use smallvec::SmallVec;

use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::Message,
    stream::{CompletionMode, PooledStream, Stream, StreamPool, Ticket, capture::Capture},
    sync::{Deferred, Level, Mutex, discard_all, lock, log},
};

/// The source of the streams of an operator on a device.
#[derive(Clone, Debug, Default)]
pub(crate) enum OwnStreams {
    /// The device's default pool.
    #[default]
    Default,
    Pool(StreamPool),
    /// The operator was added without a stream of its own.
    None,
}

/// The streams that an operator on a device shares with its ports.
pub(crate) struct OperatorStreams {
    name: Arc<str>,
    device: Device,
    /// `None`: the operator was added without a stream of its own.
    pool: Option<StreamPool>,
    mode: CompletionMode,
    /// Streams are taken from this capture.
    capture: Option<Arc<Capture>>,
    own: OnceLock<OwnedStream>,
    state: Mutex<State>,
}

/// A stream of its own: from a pool, to which it returns, or from a capture.
struct OwnedStream {
    stream: Stream,
    _pooled: Option<PooledStream>,
}

#[derive(Default)]
struct State {
    named: Vec<(Box<str>, OwnedStream)>,
    /// The operator requested a stream of its own and got none.
    refused: bool,
    /// The tickets of messages without envelopes, one per stream: work on the operator's stream must be ordered after
    /// these.
    without_envelopes: Tickets,
    /// The tickets of this run's messages, one per stream, in the order of taking. Recorded while the operator has no
    /// stream of its own.
    received: Tickets,
    /// This run's stream, for an operator that has none of its own; and true if it was received with a message.
    borrowed: Option<(Stream, bool)>,
    /// All streams that the operator has borrowed, except for those whose work was found to be done.
    all_borrowed: SmallVec<[Stream; 1]>,
}

type Tickets = SmallVec<[Ticket; 2]>;

fn note(tickets: &mut Tickets, ticket: &Ticket) {
    match tickets.iter_mut().find(|known| known.stream().is(ticket.stream())) {
        Some(known) if known.number() < ticket.number() => *known = ticket.clone(),
        Some(_) => {}
        None => tickets.push(ticket.clone()),
    }
}

/// From this number of streams on, the device is queried for those whose work is done.
const MANY: usize = 16;

/// If there are many entries, removes those whose work is done, so that a stream that is used once does not stay. Call
/// it before adding an entry, within a `Deferred` scope. The device is queried only after the number of entries has
/// doubled since the last query.
fn forget_done<A: smallvec::Array>(all: &mut SmallVec<A>, last: impl Fn(&A::Item) -> Ticket)
where
    A::Item: 'static,
{
    if all.len() < MANY || all.len() < all.capacity() || Capture::current().is_some() {
        return;
    }
    let is_done = |one: &A::Item| {
        let mut last = last(one);
        last.query().is_ok_and(|done| done) && last.check_taint().is_ok() && last.is_settled()
    };
    let (done, mut open): (SmallVec<A>, SmallVec<A>) = std::mem::take(all).into_iter().partition(is_done);
    open.reserve(open.len());
    *all = open;
    // Deferred until the lock is released: each might be the last handle of its stream.
    discard_all(done);
}

impl OperatorStreams {
    /// `None` on the host, where there are no streams.
    pub(crate) fn new(
        name: &Arc<str>,
        device: &Device,
        streams: &OwnStreams,
        mode: CompletionMode,
    ) -> Option<Arc<Self>> {
        let pool = match streams {
            _ if device.is_host() => return None,
            OwnStreams::Default => StreamPool::default_of(device).ok(),
            OwnStreams::Pool(pool) => Some(pool.clone()),
            OwnStreams::None => None,
        };
        Some(Arc::new(Self {
            name: name.clone(),
            device: device.clone(),
            pool,
            mode,
            capture: None,
            own: OnceLock::new(),
            state: Mutex::at(Level::OperatorStreams, State::default()),
        }))
    }

    /// The streams of the same operator in a capture.
    pub(super) fn captured(&self, capture: &Arc<Capture>) -> Arc<Self> {
        Arc::new(Self {
            name: self.name.clone(),
            device: self.device.clone(),
            pool: self.pool.clone(),
            mode: self.mode,
            capture: Some(capture.clone()),
            own: OnceLock::new(),
            state: Mutex::at(Level::OperatorStreams, State::default()),
        })
    }

    /// A run begins. True if it selects its stream anew.
    #[inline]
    pub(super) fn begin(&self) -> bool {
        self.own.get().is_none() && self.begin_without_own()
    }

    #[inline(never)]
    fn begin_without_own(&self) -> bool {
        // A dropped value might be the last handle of a stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        state.received.clear();
        state.borrowed = None;
        state.without_envelopes.retain(|ticket| !ticket.has_passed());
        true
    }

    pub(super) fn stream(&self) -> Result<Stream> {
        if let Some(own) = self.own.get() {
            return Ok(own.stream.clone());
        }
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        if !state.refused {
            if let Some(own) = self.take(&self.name)? {
                let stream = own.stream.clone();
                stream.join(&state.without_envelopes)?;
                state.without_envelopes.clear();
                state.received.clear();
                // Only this operator sets it.
                let _ = self.own.set(own);
                return Ok(stream);
            }
            state.refused = true;
            let name = self.name.clone();
            log(move || {
                tracing::debug!(
                    operator = &*name,
                    "the operator has no stream of its own: it works on the streams that its messages come from"
                )
            });
        }
        if let Some((stream, _)) = &state.borrowed {
            return Ok(stream.clone());
        }
        let first = state.received.iter().find(|ticket| *ticket.stream().device() == self.device);
        let (stream, received) = match first {
            Some(ticket) => (ticket.stream().clone(), true),
            None => (Stream::default_of(&self.device)?, false),
        };
        stream.join(&state.received)?;
        stream.join(&state.without_envelopes)?;
        if !state.all_borrowed.contains(&stream) {
            forget_done(&mut state.all_borrowed, Stream::ticket);
            state.all_borrowed.push(stream.clone());
        }
        state.borrowed = Some((stream.clone(), received));
        Ok(stream)
    }

    fn take(&self, name: &str) -> Result<Option<OwnedStream>> {
        if let Some(capture) = &self.capture {
            let stream = capture.stream(name, Default::default())?;
            return Ok(Some(OwnedStream { stream, _pooled: None }));
        }
        let Some(pool) = &self.pool else { return Ok(None) };
        let taken = pool.take_as(name)?;
        Ok(taken.map(|pooled| {
            pooled.set_completion_mode(self.mode);
            OwnedStream { stream: pooled.stream().clone(), _pooled: Some(pooled) }
        }))
    }

    pub(super) fn named(&self, name: &str) -> Result<Stream> {
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        if let Some((_, stream)) = state.named.iter().find(|(known, _)| **known == *name) {
            return Ok(stream.stream.clone());
        }
        let refused = |error: Error| error.at(format!("stream `{name}` of `{}`", self.name));
        let Some(pool) = &self.pool else {
            let text = "the operator was added without streams of its own: give it a pool with `.streams(&pool)`";
            return Err(refused(Error::new(ErrorKind::Usage, text)));
        };
        let taken = self.take(&format!("{}, {name}", self.name)).map_err(refused)?;
        let pooled = taken.ok_or_else(|| refused(pool.used_up()))?;
        let stream = pooled.stream.clone();
        state.named.push((name.into(), pooled));
        Ok(stream)
    }

    /// Checks that `stream`, which messages are to carry, belongs to the operator's device.
    pub(super) fn require_own_device(&self, stream: &Stream) -> Result<()> {
        if *stream.device() == self.device {
            return Ok(());
        }
        let (name, own, other) = (&self.name, &self.device, stream.device());
        let again = if own.name() == other.name() { ", a different handle for that name" } else { "" };
        let text = format!(
            "`{name}` is on {own}, but its messages are to carry a stream on {other}{again}: use a stream on the \
             operator's own device, such as one from `cx.stream_named(..)`"
        );
        Err(Error::new(ErrorKind::Usage, text))
    }

    /// The stream that outputs carry if the operator has none of its own: the one that it received in this run.
    pub(super) fn borrowed(&self) -> Option<Stream> {
        lock(&self.state).borrowed.as_ref().filter(|(_, received)| *received).map(|(stream, _)| stream.clone())
    }

    /// Records the ticket of a message that was taken. `without_envelopes`: the message carries no envelopes.
    fn received(&self, ticket: &Ticket, without_envelopes: bool) -> Result<()> {
        if let Some(own) = self.own.get() {
            return if without_envelopes { own.stream.wait(ticket) } else { Ok(()) };
        }
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        note(&mut state.received, ticket);
        if without_envelopes {
            if !state.without_envelopes.iter().any(|known| known.stream().is(ticket.stream())) {
                forget_done(&mut state.without_envelopes, Ticket::clone);
            }
            note(&mut state.without_envelopes, ticket);
        }
        match &state.borrowed {
            Some((stream, _)) => stream.wait(ticket),
            None => Ok(()),
        }
    }

    #[inline]
    pub(super) fn own(&self) -> Option<&Stream> {
        self.own.get().map(|own| &own.stream)
    }

    /// The current end of each stream that the run might have used.
    pub(super) fn run_ends(&self) -> SmallVec<[Ticket; 2]> {
        let _later = Deferred::new();
        let state = lock(&self.state);
        let named = state.named.iter().map(|(_, taken)| &taken.stream);
        let borrowed = state.borrowed.iter().map(|(stream, _)| stream);
        self.own().into_iter().chain(borrowed).chain(named).map(Stream::ticket).collect()
    }

    /// The ticket of the last work on each stream that the operator has used.
    pub(super) fn last(&self) -> Vec<Ticket> {
        let _later = Deferred::new();
        let state = lock(&self.state);
        let named = state.named.iter().map(|(_, taken)| &taken.stream);
        self.own().into_iter().chain(named).chain(&state.all_borrowed).map(Stream::ticket).collect()
    }
}

impl fmt::Debug for OperatorStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorStreams").field("own", &self.own()).field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// The tickets of the messages that an input has taken in this run.
///
/// The port counts its messages, so that those without a ticket need no entry at the end.
#[derive(Debug, Default)]
pub(super) struct TakenTickets {
    /// `None` on the host.
    streams: Option<Arc<OperatorStreams>>,
    /// The port's count when the run began.
    begun: u64,
    /// One entry per message, up to the last one with a ticket.
    taken: Vec<Option<Ticket>>,
}

impl TakenTickets {
    /// The limit for an operator that takes messages without ever beginning a run.
    const MAX: usize = 1024;

    pub(super) fn new(streams: Option<Arc<OperatorStreams>>) -> Self {
        Self { streams, ..Self::default() }
    }

    #[inline]
    pub(super) fn begin(&mut self, count: u64) {
        self.begun = count;
        if !self.taken.is_empty() {
            self.taken.clear();
        }
    }

    /// Records the ticket of a message that was taken, the port's `count`th. `carries_none`: the message has no envelope.
    #[inline(never)]
    pub(super) fn note(&mut self, ticket: Ticket, carries_none: bool, count: u64) -> Result<()> {
        if let Some(streams) = &self.streams {
            streams.received(&ticket, carries_none)?;
        }
        let mut before = (count - self.begun) as usize - 1;
        if before >= Self::MAX {
            let gone = before - Self::MAX / 2;
            self.taken.drain(..gone.min(self.taken.len()));
            self.begun += gone as u64;
            before -= gone;
        }
        self.taken.resize(before, None);
        self.taken.push(Some(ticket));
        Ok(())
    }

    pub(super) fn all(&self, count: u64) -> impl Iterator<Item = Option<&Ticket>> {
        let without = (count - self.begun) as usize - self.taken.len();
        self.taken.iter().map(Option::as_ref).chain(std::iter::repeat_n(None, without.min(Self::MAX)))
    }
}

/// Whether there is any envelope in a message.
pub(super) fn carries_any<M: Message>(message: &mut M) -> bool {
    let mut any = false;
    if M::CARRIES_ENVELOPES {
        message.envelopes(&mut |_| any = true);
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, device::Emulated};

    #[test]
    fn streams_that_are_borrowed_once_are_forgotten() {
        let device = Device::emulated(Emulated::new());
        let streams =
            OperatorStreams::new(&"borrows".into(), &device, &OwnStreams::None, CompletionMode::default()).unwrap();
        let main = Stream::new(&device).unwrap();
        let mut data = Buffer::<u32>::new(&device, 4).unwrap();
        for _ in 0..200 {
            let theirs = Stream::new(&device).unwrap();
            theirs.fill(&mut data, 1).unwrap();
            streams.begin();
            streams.received(&theirs.ticket(), true).unwrap();
            assert!(streams.stream().unwrap().is(&theirs));
            drop(theirs);
            // Nothing but the end of this stream's work is known of it.
            main.fill(&mut data, 2).unwrap();
            main.synchronize_blocking().unwrap();
        }
        let state = lock(&streams.state);
        let kept = (state.all_borrowed.len(), state.without_envelopes.len());
        assert!(kept.0 <= 2 * MANY && kept.1 <= 2 * MANY, "{kept:?}");
    }
}
