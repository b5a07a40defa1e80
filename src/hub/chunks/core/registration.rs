//! [`Registration`]: a link's registration at its hub, through which it polls, takes and returns chunks.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
};

use super::{Core, Envelopes, HubLocations, Inner, Structure, place_name};
use crate::{
    device::{Device, human},
    error::Result,
    hub::{
        chunks::{
            chunk::Chunk,
            roles::{ChunkRole, LinkName, Role},
            state::{Actions, ChunkHubState, Grant, LinkId, LocationId, PollRequest},
        },
        envelope::Envelope,
        queue::Answer,
        response_transfer::ReturnedGuards,
    },
    memory::Plain,
    stream::Streams,
    sync::{lock, logged},
};

/// A link's registration. It exists until the link and all chunks that it was given are dropped.
pub(in crate::hub::chunks) struct Registration<T: Plain, S: Clone + Send + Sync + 'static> {
    pub(in crate::hub::chunks) core: Arc<Core<T, S>>,
    pub(in crate::hub::chunks) id: LinkId,
    pub(in crate::hub::chunks) name: LinkName,
    pub(in crate::hub::chunks) role: Role,
    pub(in crate::hub::chunks) place: LocationId,
    pub(in crate::hub::chunks) device: Device,
    pub(super) forgotten: UncommittedDetector,
}

/// Detects a link that is given the same chunk again and again and never commits it. This may be intended, so it is
/// logged rather than prevented.
#[derive(Debug, Default)]
pub(super) struct UncommittedDetector {
    number: AtomicU64,
    times: AtomicU32,
}

impl UncommittedDetector {
    const MANY: u32 = 1000;

    /// Counts a chunk that is given back. Returns true once that has happened too often.
    fn is_one_more(&self, number: u64) -> bool {
        if self.number.swap(number, Ordering::Relaxed) != number {
            self.times.store(0, Ordering::Relaxed);
        }
        self.times.fetch_add(1, Ordering::Relaxed) + 1 == Self::MANY
    }

    fn forget(&self) {
        self.number.store(0, Ordering::Relaxed);
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Registration<T, S> {
    /// Polls for the next chunk, or blank.
    pub(in crate::hub::chunks) fn ask(&self, asks: PollRequest, task: &mut Context<'_>) -> Result<Answer> {
        self.core.check()?;
        self.device.check()?;
        loop {
            let mut actions = Actions::default();
            let mut ask = |shared: Option<&Arc<Waker>>| {
                let Inner { state, places } = &mut *lock(&self.core.inner);
                let asked = state.poll(self.id, asks, task.waker(), shared, places, &mut actions)?;
                state.take_gone(&mut actions);
                let waits = asked == Answer::Wait && (asks.blank || self.role != Role::Produce);
                let comes = if waits { self.can_come(state, places) } else { Ok(()) };
                Some((asked, comes.map(|()| waits && state.claim_spare(self.id))))
            };
            // Cloned without the lock, and only if it is not registered yet.
            let asked = ask(None).or_else(|| ask(Some(&Arc::new(task.waker().clone()))));
            let (asked, comes) = asked.unwrap_or((Answer::Wait, Ok(false)));
            // Polling may let other links make progress, whatever the answer to this link is.
            self.core.carry_out(actions);
            if comes? {
                // With the additional envelope the chunk can be copied here, unless another link takes the envelope.
                self.core.add_spare(&self.device)?;
                continue;
            }
            if asked == Answer::Wait {
                // If the device was lost before the link waited, the loss does not wake the link.
                self.device.check()?;
                Streams::waiter_added(&self.device);
            }
            return Ok(asked);
        }
    }

    /// Returns an error if no data can ever reach this link's location.
    fn can_come(&self, state: &ChunkHubState<Envelopes<T>, Structure<S>>, places: &HubLocations<T>) -> Result<()> {
        if self.role == Role::Produce
            && let Some(too_few) = state.too_few(0, places)
        {
            return Err(self.core.too_few_envelopes(too_few, &self.device));
        }
        if places.count(self.place) > 0 {
            return Ok(());
        }
        // While the hub has no producer, one may still be linked here and send its own envelopes.
        let nothing_yet = state.len() == 0 && state.link_count(Role::Produce) == 0;
        if self.role != Role::Produce && (nothing_yet || state.has_source_at(self.place)) {
            return Ok(());
        }
        Err(self.core.no_envelopes(self.role, &self.device))
    }

    /// Takes the chunk or blank, if it is still there.
    pub(in crate::hub::chunks) fn take<K: ChunkRole>(self: &Arc<Self>, blank: bool) -> Result<Option<Chunk<K, T, S>>> {
        self.core.check()?;
        let grant = self.core.act(|state, places, _| state.take(self.id, blank, places));
        grant.map(|grant| self.given(grant)).transpose()
    }

    /// Polls, and takes the chunk or blank at once. `None`: there will be nothing more.
    pub(in crate::hub::chunks) fn poll_next<K: ChunkRole>(
        self: &Arc<Self>,
        blank: bool,
        task: &mut Context<'_>,
    ) -> Poll<Result<Option<Chunk<K, T, S>>>> {
        loop {
            match self.ask(PollRequest { blank, stays: false }, task)? {
                Answer::Never => return Poll::Ready(Ok(None)),
                Answer::Wait => return Poll::Pending,
                Answer::Yes => {
                    // If another link has taken it, this one polls again.
                    if let Some(chunk) = self.take(blank)? {
                        return Poll::Ready(Ok(Some(chunk)));
                    }
                }
            }
        }
    }

    fn given<K: ChunkRole>(self: &Arc<Self>, grant: Grant<Envelopes<T>, Structure<S>>) -> Result<Chunk<K, T, S>> {
        let (number, verb) = (grant.number, self.role.verb());
        if let Some(place) = grant.lost {
            return Err(self.core.lost_chunk(number, place));
        }
        if self.role != Role::Produce {
            self.core.log_event(|| {
                format!("chunk {number}: given to a link that {verb} it on {}", place_name(&self.device))
            });
        }
        let chunk = Chunk::new(self.clone(), grant);
        self.core.log.write(&self.core.name);
        chunk
    }

    pub(in crate::hub::chunks) fn watch(&self, waker: &Waker) {
        let waker = Arc::new(waker.clone());
        let mut actions = Actions::default();
        let mut inner = lock(&self.core.inner);
        inner.state.watch(self.id, &waker);
        inner.state.take_gone(&mut actions);
        drop(inner);
        self.core.carry_out(actions);
    }

    pub(in crate::hub::chunks) fn has_ended(&self) -> bool {
        let Inner { state, places } = &*lock(&self.core.inner);
        state.has_ended(self.id, places)
    }

    pub(in crate::hub::chunks) fn rest(&self) {
        self.core.act(|state, _, _| state.rest(self.id));
    }

    /// Called when the link is dropped and polls no more. Chunks that it was given might still be in use.
    pub(in crate::hub::chunks) fn retire(&self) {
        self.core.act(|state, _, _| state.retire(self.id));
    }

    // --- the end of a grant

    pub(in crate::hub::chunks) fn produced(
        &self,
        number: u64,
        envelope: Envelope<T>,
        structure: Structure<S>,
        returns: bool,
    ) {
        let (device, bytes) = (self.core.device_of(&envelope), envelope.raw().bytes());
        self.core.counts.produced.fetch_add(1, Ordering::Relaxed);
        let size = || human::bytes(bytes as u64);
        self.core.log_event(|| format!("chunk {number}: produced on {}, {}", place_name(&device), size()));
        self.core.act(|state, places, _| {
            let place = places.number(&device);
            state.produced(number, place, Arc::new(envelope), structure, returns);
        });
    }

    pub(in crate::hub::chunks) fn unproduced(&self, number: u64) {
        self.core.act(|state, _, _| state.unproduced(number));
    }

    pub(in crate::hub::chunks) fn consumed(&self, number: u64) {
        self.core.counts.consumed.fetch_add(1, Ordering::Relaxed);
        self.core.log_event(|| format!("chunk {number}: consumed on {}", place_name(&self.device)));
        // The returned structure belongs to the user, and is dropped without a lock: its destructor may use the hub.
        // Likewise below.
        drop(self.core.act(|state, _, out| state.consumed(number, out)));
    }

    pub(in crate::hub::chunks) fn modified(&self, number: u64, envelope: Envelope<T>, structure: Structure<S>) {
        self.forgotten.forget();
        self.core.log_event(|| format!("chunk {number}: modified on {}", place_name(&self.device)));
        drop(self.core.act(|state, _, out| state.modified(self.id, number, Arc::new(envelope), structure, out)));
    }

    pub(in crate::hub::chunks) fn given_back(&self, number: u64, envelope: Envelope<T>, written: bool) {
        self.core.log_event(|| format!("chunk {number}: given back on {}", place_name(&self.device)));
        // For a port, the operator has its own detection of this.
        if let LinkName::Standalone(_) = self.name
            && self.forgotten.is_one_more(number)
        {
            // The chunk is given back even if the subscriber panics.
            logged(|| {
                tracing::warn!(
                    hub = &*self.core.name,
                    link = self.role.verb(),
                    "a link has been given chunk {number} {} times in a row and has dropped it uncommitted each time: \
                     call `commit`, or use `with`",
                    UncommittedDetector::MANY
                );
            });
        }
        self.core.act(|state, _, out| state.given_back(self.id, number, Arc::new(envelope), written, out));
    }

    pub(in crate::hub::chunks) fn peeked(&self, number: u64, envelope: Envelopes<T>, unseen: bool) {
        drop(self.core.act(|state, _, out| state.peeked(self.id, number, self.place, envelope, unseen, out)));
    }

    /// Called when the envelope is taken out of the hub outside a flow: no flow of this hub is at rest until it
    /// returns, including flows that begin before that. Until this call, the link itself keeps the flows from ending.
    pub(in crate::hub::chunks) fn envelope_taken(&self, envelope: &mut Envelope<T>) {
        if let LinkName::Standalone(_) = self.name {
            self.core.envelope_taken().iter().for_each(|boundary| boundary.guard_one(envelope.raw_mut()));
        }
    }

    /// Called when the envelope enters this hub, so that the hub's flows need not wait for it. The caller drops the
    /// returned guards once the hub has the envelope.
    pub(in crate::hub::chunks) fn envelope_sent(&self, envelope: &mut Envelope<T>) -> ReturnedGuards {
        let mut came_back = ReturnedGuards::default();
        came_back.take(envelope, |boundary| self.core.waits(boundary));
        came_back
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Drop for Registration<T, S> {
    fn drop(&mut self) {
        self.core.act(|state, _, _| state.unlink(self.id));
        // After other links were woken, so that the flow never appears to be at rest in between.
        let held = lock(&self.core.flows).outside.remove(&self.id);
        drop(held);
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> fmt::Debug for Registration<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("hub", &self.core.name).field("role", &self.role).finish_non_exhaustive()
    }
}
