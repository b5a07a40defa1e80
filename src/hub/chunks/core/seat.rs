//! [`Seat`]: a link as its hub knows it; what it asks, and what it says of the chunks that it was given.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
};

use super::{Core, Envelopes, Inner, Places, Structure, place_name};
use crate::{
    device::{Device, human},
    error::Result,
    hub::{
        abroad::CameBack,
        chunks::{
            chunk::Chunk,
            roles::{DoesWith, LinkName, Role},
            state::{Actions, Asks, Grant, LinkId, Place, State},
        },
        envelope::Envelope,
        queue::Answer,
    },
    memory::Plain,
    stream::Streams,
    sync::{lock, logged},
};

/// A link's registration. It goes when the link and all that it was given are gone.
pub(in crate::hub::chunks) struct Seat<T: Plain, S: Clone + Send + Sync + 'static> {
    pub(in crate::hub::chunks) core: Arc<Core<T, S>>,
    pub(in crate::hub::chunks) id: LinkId,
    pub(in crate::hub::chunks) name: LinkName,
    pub(in crate::hub::chunks) role: Role,
    pub(in crate::hub::chunks) place: Place,
    pub(in crate::hub::chunks) device: Device,
    pub(super) forgotten: Forgotten,
}

/// Notices whoever is given one chunk again and again and never commits it. Nothing is wrong with that as far as anybody can
/// tell, so it is told, not stopped.
#[derive(Debug, Default)]
pub(super) struct Forgotten {
    number: AtomicU64,
    times: AtomicU32,
}

impl Forgotten {
    const MANY: u32 = 1000;

    /// It is given back. True once it is too often.
    fn is_one_more(&self, number: u64) -> bool {
        if self.number.swap(number, Ordering::Relaxed) != number {
            self.times.store(0, Ordering::Relaxed);
        }
        self.times.fetch_add(1, Ordering::Relaxed) + 1 == Self::MANY
    }

    /// One was committed.
    fn forget(&self) {
        self.number.store(0, Ordering::Relaxed);
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Seat<T, S> {
    /// Asks for the next chunk, or blank.
    pub(in crate::hub::chunks) fn ask(&self, asks: Asks, task: &mut Context<'_>) -> Result<Answer> {
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
            // Cloned without the lock, and only where it is not kept yet.
            let asked = ask(None).or_else(|| ask(Some(&Arc::new(task.waker().clone()))));
            let (asked, comes) = asked.unwrap_or((Answer::Wait, Ok(false)));
            // That it asked may let others go on, whatever its own answer is.
            self.core.carry_out(actions);
            if comes? {
                // With it the chunk comes here, if no other link was quicker.
                self.core.add_spare(&self.device)?;
                continue;
            }
            if asked == Answer::Wait {
                // Lost before it waited: the loss wakes it no more.
                self.device.check()?;
                Streams::attend(&self.device);
            }
            return Ok(asked);
        }
    }

    /// An error if nothing can ever come to where this link is.
    fn can_come(&self, state: &State<Envelopes<T>, Structure<S>>, places: &Places<T>) -> Result<()> {
        if self.role == Role::Produce
            && let Some(too_few) = state.too_few(0, places)
        {
            return Err(self.core.too_few_envelopes(too_few, &self.device));
        }
        if places.count(self.place) > 0 {
            return Ok(());
        }
        // Somebody may link there and send its own, as long as nobody does elsewhere.
        let nothing_yet = state.len() == 0 && state.links_that(Role::Produce) == 0;
        if self.role != Role::Produce && (nothing_yet || state.may_lie_at(self.place)) {
            return Ok(());
        }
        Err(self.core.no_envelopes(self.role, &self.device))
    }

    /// Takes it, if it is still there.
    pub(in crate::hub::chunks) fn take<K: DoesWith>(self: &Arc<Self>, blank: bool) -> Result<Option<Chunk<K, T, S>>> {
        self.core.check()?;
        let grant = self.core.act(|state, places, _| state.take(self.id, blank, places));
        grant.map(|grant| self.given(grant)).transpose()
    }

    /// Asks, and takes it at once. `None`: there will be nothing more.
    pub(in crate::hub::chunks) fn poll_next<K: DoesWith>(
        self: &Arc<Self>,
        blank: bool,
        task: &mut Context<'_>,
    ) -> Poll<Result<Option<Chunk<K, T, S>>>> {
        loop {
            match self.ask(Asks { blank, stays: false }, task)? {
                Answer::Never => return Poll::Ready(Ok(None)),
                Answer::Wait => return Poll::Pending,
                Answer::Yes => {
                    // Else another was quicker, and it asks again.
                    if let Some(chunk) = self.take(blank)? {
                        return Poll::Ready(Ok(Some(chunk)));
                    }
                }
            }
        }
    }

    fn given<K: DoesWith>(self: &Arc<Self>, grant: Grant<Envelopes<T>, Structure<S>>) -> Result<Chunk<K, T, S>> {
        let (number, verb) = (grant.number, self.role.verb());
        if let Some(place) = grant.lost {
            return Err(self.core.lost_chunk(number, place));
        }
        if self.role != Role::Produce {
            self.core
                .tell(|| format!("chunk {number}: given to a link that {verb} it on {}", place_name(&self.device)));
        }
        let chunk = Chunk::new(self.clone(), grant);
        self.core.log.write(&self.core.name);
        chunk
    }

    /// Keeps the waker for the next change.
    pub(in crate::hub::chunks) fn watch(&self, waker: &Waker) {
        let waker = Arc::new(waker.clone());
        let mut actions = Actions::default();
        let mut inner = lock(&self.core.inner);
        inner.state.watch(self.id, &waker);
        inner.state.take_gone(&mut actions);
        drop(inner);
        self.core.carry_out(actions);
    }

    /// There will be nothing more for it.
    pub(in crate::hub::chunks) fn has_ended(&self) -> bool {
        let Inner { state, places } = &*lock(&self.core.inner);
        state.has_ended(self.id, places)
    }

    /// It waits no longer.
    pub(in crate::hub::chunks) fn rest(&self) {
        self.core.act(|state, _, _| state.rest(self.id));
    }

    /// The link is gone, and asks no more; what it was given may still be out.
    pub(in crate::hub::chunks) fn retire(&self) {
        self.core.act(|state, _, _| state.retire(self.id));
    }

    // --- what becomes of what it was given

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
        self.core.tell(|| format!("chunk {number}: produced on {}, {}", place_name(&device), size()));
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
        self.core.tell(|| format!("chunk {number}: consumed on {}", place_name(&self.device)));
        // What is returned is the user's, and dropped without a lock: it may use the hub. So below.
        drop(self.core.act(|state, _, out| state.consumed(number, out)));
    }

    pub(in crate::hub::chunks) fn modified(&self, number: u64, envelope: Envelope<T>, structure: Structure<S>) {
        self.forgotten.forget();
        self.core.tell(|| format!("chunk {number}: modified on {}", place_name(&self.device)));
        drop(self.core.act(|state, _, out| state.modified(self.id, number, Arc::new(envelope), structure, out)));
    }

    pub(in crate::hub::chunks) fn given_back(&self, number: u64, envelope: Envelope<T>, written: bool) {
        self.core.tell(|| format!("chunk {number}: given back on {}", place_name(&self.device)));
        // A port's operator tells of itself.
        if let LinkName::Hand(_) = self.name
            && self.forgotten.is_one_more(number)
        {
            // The chunk goes back, whatever the subscriber does.
            logged(|| {
                tracing::warn!(
                    hub = &*self.core.name,
                    link = self.role.verb(),
                    "a link has been given chunk {number} {} times in a row and has dropped it each time: so it comes \
                     again; `commit` it, or use `with`",
                    Forgotten::MANY
                );
            });
        }
        self.core.act(|state, _, out| state.given_back(self.id, number, Arc::new(envelope), written, out));
    }

    pub(in crate::hub::chunks) fn peeked(&self, number: u64, envelope: Envelopes<T>, unseen: bool) {
        drop(self.core.act(|state, _, out| state.peeked(self.id, number, self.place, envelope, unseen, out)));
    }

    /// The envelope is taken out by hand: no flow of this hub is at rest until it comes home, also one that begins
    /// before that. This link holds them until here.
    pub(in crate::hub::chunks) fn goes_out(&self, envelope: &mut Envelope<T>) {
        if let LinkName::Hand(_) = self.name {
            self.core.goes_out().iter().for_each(|boundary| boundary.mark_one(envelope.raw_mut()));
        }
    }

    /// The envelope comes into this hub: its flows need not wait for it. Their marks are for the caller to drop, once the
    /// hub has the envelope.
    pub(in crate::hub::chunks) fn comes_in(&self, envelope: &mut Envelope<T>) -> CameBack {
        let mut came_back = CameBack::default();
        came_back.take(envelope, |boundary| self.core.waits(boundary));
        came_back
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Drop for Seat<T, S> {
    fn drop(&mut self) {
        self.core.act(|state, _, _| state.unlink(self.id));
        // After others were woken: no moment of rest is seen in between.
        let held = lock(&self.core.flows).outside.remove(&self.id);
        drop(held);
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> fmt::Debug for Seat<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("hub", &self.core.name).field("role", &self.role).finish_non_exhaustive()
    }
}
