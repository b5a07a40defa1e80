//! [`Chunk`]: the guard of a chunk that a link was given, until it is committed or dropped.

use std::{
    any::Any,
    fmt,
    marker::PhantomData,
    mem,
    ops::{Deref, RangeBounds},
    sync::Arc,
};

use super::{
    core::{Registration, Structure, sole},
    roles::{ChunkRole, Consume, Modify, Produce, Role, Writes},
    state::Grant,
};
use crate::{
    error::{Error, ErrorKind, Result},
    hub::envelope::Envelope,
    memory::{DeviceSlice, DeviceSliceMut, Plain, Sealed, SliceMut, View, ViewMut},
    sync::DiscardOnDrop,
};

/// A chunk of a [`ChunkHub`](super::ChunkHub) that was given to a link, or a blank that becomes one. It dereferences
/// to an [`Envelope`] at the link's location: kernels take it as a slice, and its location, capacity and valid part
/// can be queried.
///
/// | from a link that | it may | committed | dropped |
/// |---|---|---|---|
/// | produces | be written | becomes the hub's newest chunk | returns to its pool |
/// | consumes | be read, and taken out with [`into_envelope`](Chunk::into_envelope) | is removed from the hub | is the next chunk again |
/// | peeks | be read, by others too | | ends the peek |
/// | modifies | be written | is visible to all; copies elsewhere are discarded | is unchanged, unless it was the only copy |
///
/// If a modifying link drops a chunk without committing it, its envelope is discarded together with what was written,
/// provided that there is a copy at another location: the chunk continues from that copy, unchanged. (Copies
/// elsewhere that exist when the chunk is given out are kept until the commit.)
///
/// **The only copy stays as it was written**, data and length, and is visible to all: there is no earlier content to
/// return to. A copy is the only one if the chunk was produced or last modified at the link's own location and was
/// not wanted elsewhere since, or if a copy elsewhere had to make room; in a hub with envelopes at a single location,
/// it always is. Its structure is unchanged. Code that may fail or be cancelled while writing should write to memory
/// of its own first, and copy that into the chunk at the end.
///
/// A structure is stored beside the data. It is any value of the user's, such as a matrix's shape or a frame's time.
pub struct Chunk<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static = ()> {
    registration: Arc<Registration<T, S>>,
    number: u64,
    /// `None` only while the chunk is committed or dropped.
    held: Option<HeldEnvelope<T>>,
    /// Shared with the hub, so that it is never cloned there.
    structure: Option<Structure<S>>,
    /// Whether anything was written to or set on the chunk.
    written: bool,
    /// The user's own envelope was sent, and the chunk returns into it.
    returns: bool,
    kind: PhantomData<fn() -> K>,
}

pub(super) fn beside<S>(structure: S) -> Structure<S> {
    Arc::new(DiscardOnDrop::new(structure))
}

enum HeldEnvelope<T: Plain> {
    Alone(Envelope<T>),
    Shared(Arc<Envelope<T>>),
    /// A slot in the queue.
    Place,
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Chunk<K, T, S> {
    pub(super) fn new(
        registration: Arc<Registration<T, S>>,
        grant: Grant<Arc<Envelope<T>>, Structure<S>>,
    ) -> Result<Self> {
        let Grant { number, envelope, structure, .. } = grant;
        let held = match envelope {
            None => HeldEnvelope::Place,
            Some(envelope) if registration.role == Role::Peek => HeldEnvelope::Shared(envelope),
            Some(envelope) if registration.role == Role::Produce => {
                HeldEnvelope::Alone(registration.core.blank(envelope)?)
            }
            Some(envelope) => HeldEnvelope::Alone(sole(envelope)?),
        };
        // In a hub without structures (`S = ()`), it need not be set.
        let structure = structure.or_else(|| (&() as &dyn Any).downcast_ref::<S>().cloned().map(beside));
        Ok(Self {
            registration,
            number,
            held: Some(held),
            structure,
            written: false,
            returns: false,
            kind: PhantomData,
        })
    }

    fn envelope(&self) -> &Envelope<T> {
        match &self.held {
            Some(HeldEnvelope::Alone(envelope)) => envelope,
            Some(HeldEnvelope::Shared(envelope)) => envelope,
            Some(HeldEnvelope::Place) | None => {
                unreachable!("a chunk owns its envelope until it is committed or dropped")
            }
        }
    }

    /// The chunk's number in the hub, counted from 1, in the order in which blanks were given out.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The structure beside the data. `None` for a blank whose structure was not [set](Chunk::set_structure) yet.
    pub fn structure(&self) -> Option<&S> {
        self.structure.as_deref().and_then(DiscardOnDrop::get)
    }

    /// Returns true for a blank that has not been written to, and whose length and structure were not set.
    pub(crate) fn is_untouched(&self) -> bool {
        self.registration.role == Role::Produce && !self.written
    }

    /// Undoes the grant after a run that did not use it: the chunk is new to the link again.
    pub(crate) fn put_back(mut self) {
        match self.held.take() {
            Some(HeldEnvelope::Shared(envelope)) => self.registration.peeked(self.number, envelope, true),
            // A chunk held exclusively is given back by its drop.
            held => self.held = held,
        }
    }

    /// Commits the chunk according to its link's role, for callers that do not know the role.
    pub(crate) fn commit_any(mut self) -> Result<()> {
        match self.registration.role {
            Role::Produce => self.commit_produced(),
            Role::Modify => self.commit_modified(),
            Role::Consume => self.commit_consumed().map(drop),
            Role::Peek => Ok(()),
        }
    }

    fn commit_produced(&mut self) -> Result<()> {
        self.has_structure()?;
        let (Some(HeldEnvelope::Alone(envelope)), Some(structure)) = (&mut self.held, &self.structure) else {
            return Ok(());
        };
        envelope.raw_mut().depart(None)?;
        let structure = structure.clone();
        if let Some(HeldEnvelope::Alone(envelope)) = self.held.take() {
            self.registration.produced(self.number, envelope, structure, self.returns);
        }
        Ok(())
    }

    /// Returns an error for a blank whose structure was not set, or a chunk that was swapped with such a blank.
    fn has_structure(&self) -> Result<()> {
        if self.structure.is_some() {
            return Ok(());
        }
        let (what, name) =
            (if self.registration.role == Role::Produce { "blank" } else { "chunk" }, &self.registration.core.name);
        let text = format!("a {what} of hub `{name}` has no structure: call `set_structure` before the commit");
        Err(Error::new(ErrorKind::Usage, text))
    }

    fn commit_modified(&mut self) -> Result<()> {
        self.has_structure()?;
        if let Some(HeldEnvelope::Alone(envelope)) = &mut self.held {
            envelope.raw_mut().depart(None)?;
        }
        if let (Some(HeldEnvelope::Alone(envelope)), Some(structure)) = (self.held.take(), self.structure.take()) {
            self.registration.modified(self.number, envelope, structure);
        }
        Ok(())
    }

    fn commit_consumed(&mut self) -> Result<Option<Envelope<T>>> {
        if let Some(HeldEnvelope::Alone(envelope)) = &mut self.held {
            envelope.raw_mut().depart(None)?;
        }
        let Some(HeldEnvelope::Alone(envelope)) = self.held.take() else { return Ok(None) };
        self.registration.consumed(self.number);
        Ok(Some(envelope))
    }
}

impl<K: Writes, T: Plain, S: Clone + Send + Sync + 'static> Chunk<K, T, S> {
    fn envelope_mut(&mut self) -> &mut Envelope<T> {
        self.written = true;
        match &mut self.held {
            Some(HeldEnvelope::Alone(envelope)) => envelope,
            Some(HeldEnvelope::Shared(_) | HeldEnvelope::Place) | None => {
                unreachable!("links that may write have exclusive access")
            }
        }
    }

    /// Sets the structure beside the data.
    pub fn set_structure(&mut self, structure: S) {
        self.structure = Some(beside(structure));
        self.written |= self.registration.role == Role::Produce;
    }

    /// Sets the number of valid elements: see [`Envelope::set_len`].
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it exceeds the capacity.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        self.envelope_mut().set_len(len)
    }

    /// Gives write access to the valid part on the host, once all work on it is done.
    ///
    /// # Errors
    /// The same as for [`Envelope::write`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn write(&mut self) -> Result<&mut [T]> {
        self.envelope_mut().write().await
    }

    /// Gives write access to the full capacity on the host, once all work on it is done.
    ///
    /// # Errors
    /// The same as for [`Envelope::space`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn space(&mut self) -> Result<&mut [T]> {
        self.envelope_mut().space().await
    }

    /// Copies `data` into the chunk on the host, as its valid part.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `data` exceeds the capacity, or if the chunk is in device memory.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves leaves data and length as they were.
    pub async fn fill_from(&mut self, data: &[T]) -> Result<()> {
        self.envelope_mut().fill_from(data).await
    }

    /// Swaps the contents of two chunks, of this hub or another: data, valid part and structure. Nothing is copied.
    ///
    /// # Errors
    /// The same as for [`Envelope::swap`].
    pub fn swap<L: Writes>(&mut self, other: &mut Chunk<L, T, S>) -> Result<()> {
        self.envelope_mut().swap(other.envelope_mut())?;
        mem::swap(&mut self.structure, &mut other.structure);
        Ok(())
    }
}

impl<K: Writes, T: Plain, S: Clone + Send + Sync + 'static> Chunk<K, T, S> {
    /// A part of the valid elements to write: see [`Envelope::slice_mut`]. To read one: [`Envelope::slice`].
    ///
    /// # Errors
    /// Those of [`Envelope::slice_mut`].
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<SliceMut<'_, T>> {
        // The chunk counts as written only if there is such a part.
        let range = self.envelope().valid_range(range)?;
        self.envelope_mut().slice_mut(range)
    }

    /// The valid elements before `at`, and those from `at` on, both for writing: see [`Envelope::split_at_mut`].
    ///
    /// # Errors
    /// Those of [`Envelope::split_at_mut`].
    pub fn split_at_mut(&mut self, at: usize) -> Result<(SliceMut<'_, T>, SliceMut<'_, T>)> {
        self.envelope().valid_range(at..)?;
        self.envelope_mut().split_at_mut(at)
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Chunk<Produce, T, S> {
    /// Publishes the chunk as the hub's newest one.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if its structure was not set; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn commit(mut self) -> Result<()> {
        self.commit_produced()
    }

    /// Puts an envelope into the slot that was reserved for one.
    pub(super) fn fill_with(&mut self, envelope: Envelope<T>, structure: Structure<S>, returns: bool) {
        self.returns = returns;
        (self.held, self.structure) = (Some(HeldEnvelope::Alone(envelope)), Some(structure));
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Chunk<Modify, T, S> {
    /// Publishes the chunk's present content to all links. Copies at other locations are discarded.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it was swapped with a blank and has no structure;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault. The chunk is then given back.
    pub fn commit(mut self) -> Result<()> {
        self.commit_modified()
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Chunk<Consume, T, S> {
    /// Removes the chunk from the hub. Its envelope returns to its pool.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn commit(mut self) -> Result<()> {
        self.commit_consumed().map(drop)
    }

    /// Removes the chunk from the hub and returns its envelope, to write to or to send on. The envelope returns to this
    /// hub after its last use. An envelope that you put into the hub with
    /// [`send`](super::Link::send) is yours again.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn into_envelope(mut self) -> Result<Envelope<T>> {
        match self.commit_consumed()? {
            Some(mut envelope) => {
                self.registration.envelope_taken(&mut envelope);
                Ok(envelope)
            }
            None => Err(Error::new(ErrorKind::Usage, "this chunk was committed already")),
        }
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Drop for Chunk<K, T, S> {
    fn drop(&mut self) {
        match self.held.take() {
            None => {}
            Some(HeldEnvelope::Shared(envelope)) => {
                // An error of the device is reported to the next user.
                let _ = envelope.raw().commit_uses();
                self.registration.peeked(self.number, envelope, false);
            }
            Some(HeldEnvelope::Place) => self.registration.unproduced(self.number),
            Some(HeldEnvelope::Alone(envelope)) if self.registration.role == Role::Produce => {
                // First, so that the link that gets the slot finds the envelope.
                drop(envelope);
                self.registration.unproduced(self.number);
            }
            Some(HeldEnvelope::Alone(envelope)) => {
                let _ = envelope.raw().commit_uses();
                self.registration.given_back(self.number, envelope, self.written);
            }
        }
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Deref for Chunk<K, T, S> {
    type Target = Envelope<T>;

    fn deref(&self) -> &Envelope<T> {
        self.envelope()
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Sealed<T> for Chunk<K, T, S> {}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> DeviceSlice<T> for Chunk<K, T, S> {
    fn view(&self) -> View<'_> {
        self.envelope().view()
    }
}

impl<K: Writes, T: Plain, S: Clone + Send + Sync + 'static> DeviceSliceMut<T> for Chunk<K, T, S> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        self.envelope_mut().view_mut()
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> fmt::Debug for Chunk<K, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Chunk");
        shown
            .field("hub", &self.registration.core.name)
            .field("number", &self.number)
            .field("role", &self.registration.role);
        if let Some(HeldEnvelope::Alone(_) | HeldEnvelope::Shared(_)) = &self.held {
            shown.field("envelope", self.envelope());
        }
        shown.finish_non_exhaustive()
    }
}
