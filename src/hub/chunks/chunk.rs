//! [`Chunk`]: what a link is given, until it is committed or dropped.

use std::{any::Any, fmt, marker::PhantomData, mem, ops::Deref, sync::Arc};

use super::{
    core::{Seat, Structure, sole},
    roles::{Consume, DoesWith, Modify, Produce, Role, Writes},
    state::Grant,
};
use crate::{
    error::{Error, ErrorKind, Result},
    hub::envelope::Envelope,
    memory::{DeviceSlice, DeviceSliceMut, Plain, Sealed, View, ViewMut},
    sync::Discarded,
};

/// A chunk of a [`ChunkHub`](super::ChunkHub), in the hands of a link; or a blank that becomes one. It is an
/// [`Envelope`] where the link is: kernels take it as a slice, and it shows its location, its capacity, its valid part.
///
/// | from a link that | it may | committed | dropped |
/// |---|---|---|---|
/// | produces | be written | is the hub's newest chunk | goes home |
/// | consumes | be read, and taken out with [`into_envelope`](Chunk::into_envelope) | is gone from the hub | is the next chunk again |
/// | peeks | be read, by others too | | is over |
/// | modifies | be written | is what all see; copies elsewhere go | is as it was, unless it was the only copy |
///
/// What a link that modifies has written and not committed is gone with its envelope, where there is a copy at another
/// place: from there the chunk goes on as it was. (Copies elsewhere that there are as it is given out are kept until the
/// commit.)
///
/// **The only copy stays as it was written**, data and length, and is what all see: there is nothing else that the chunk
/// could be. It is the only one where it was produced or last modified at the very place of this link and nobody was to see
/// it elsewhere since, or where a copy elsewhere had to make room: always, in a hub with envelopes at one place alone. Its
/// structure is as it was. Whoever may fail, or be cancelled, in the middle of writing writes to memory of its own first, and
/// copies that into the chunk at the end.
///
/// A structure stands beside the data, any value of the user's: a matrix's shape, a frame's time.
pub struct Chunk<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static = ()> {
    seat: Arc<Seat<T, S>>,
    number: u64,
    /// Only gone while it is committed or dropped.
    held: Option<Held<T>>,
    /// Shared with the hub, so that it is never cloned there.
    structure: Option<Structure<S>>,
    /// Of a blank: anything was said about it at all.
    written: bool,
    /// The user's own envelope was sent, for the chunk to come back into it.
    returns: bool,
    kind: PhantomData<fn() -> K>,
}

pub(super) fn beside<S>(structure: S) -> Structure<S> {
    Arc::new(Discarded::new(structure))
}

enum Held<T: Plain> {
    Alone(Envelope<T>),
    Shared(Arc<Envelope<T>>),
    /// A place in the queue.
    Place,
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> Chunk<K, T, S> {
    pub(super) fn new(seat: Arc<Seat<T, S>>, grant: Grant<Arc<Envelope<T>>, Structure<S>>) -> Result<Self> {
        let Grant { number, envelope, structure, .. } = grant;
        let held = match envelope {
            None => Held::Place,
            Some(envelope) if seat.role == Role::Peek => Held::Shared(envelope),
            Some(envelope) => Held::Alone(sole(envelope)?),
        };
        // Of a hub without structures nobody need say that there is none.
        let structure = structure.or_else(|| (&() as &dyn Any).downcast_ref::<S>().cloned().map(beside));
        Ok(Self { seat, number, held: Some(held), structure, written: false, returns: false, kind: PhantomData })
    }

    fn envelope(&self) -> &Envelope<T> {
        match &self.held {
            Some(Held::Alone(envelope)) => envelope,
            Some(Held::Shared(envelope)) => envelope,
            Some(Held::Place) | None => unreachable!("a chunk has its envelope until it is committed or dropped"),
        }
    }

    /// Its number in the hub, counted from 1, in the order in which blanks were given out.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// What stands beside the data. `None` of a blank whose structure was not [said](Chunk::set_structure) yet.
    pub fn structure(&self) -> Option<&S> {
        self.structure.as_deref().and_then(Discarded::get)
    }

    /// A blank that nobody has written to, nor given a length or a structure.
    pub(crate) fn is_untouched(&self) -> bool {
        self.seat.role == Role::Produce && !self.written
    }

    /// A run that was none: the chunk is new to the link.
    pub(crate) fn put_back(mut self) {
        match self.held.take() {
            Some(Held::Shared(envelope)) => self.seat.peeked(self.number, envelope, true),
            // Whoever had it alone gives it back by dropping it.
            held => self.held = held,
        }
    }

    /// Ends it as its link's role says. For those who do not know it.
    pub(crate) fn commit_any(mut self) -> Result<()> {
        match self.seat.role {
            Role::Produce => self.commit_produced(),
            Role::Modify => self.commit_modified(),
            Role::Consume => self.commit_consumed().map(drop),
            Role::Peek => Ok(()),
        }
    }

    fn commit_produced(&mut self) -> Result<()> {
        self.has_structure()?;
        let (Some(Held::Alone(envelope)), Some(structure)) = (&mut self.held, &self.structure) else { return Ok(()) };
        envelope.raw_mut().depart(None)?;
        let structure = structure.clone();
        if let Some(Held::Alone(envelope)) = self.held.take() {
            self.seat.produced(self.number, envelope, structure, self.returns);
        }
        Ok(())
    }

    /// A blank has none before it is said; and a chunk that was swapped with such a blank.
    fn has_structure(&self) -> Result<()> {
        if self.structure.is_some() {
            return Ok(());
        }
        let (what, name) = (if self.seat.role == Role::Produce { "blank" } else { "chunk" }, &self.seat.core.name);
        let text = format!("a {what} of hub `{name}` has no structure: `set_structure` before it is committed");
        Err(Error::new(ErrorKind::Usage, text))
    }

    fn commit_modified(&mut self) -> Result<()> {
        self.has_structure()?;
        if let Some(Held::Alone(envelope)) = &mut self.held {
            envelope.raw_mut().depart(None)?;
        }
        if let (Some(Held::Alone(envelope)), Some(structure)) = (self.held.take(), self.structure.take()) {
            self.seat.modified(self.number, envelope, structure);
        }
        Ok(())
    }

    fn commit_consumed(&mut self) -> Result<Option<Envelope<T>>> {
        if let Some(Held::Alone(envelope)) = &mut self.held {
            envelope.raw_mut().depart(None)?;
        }
        let Some(Held::Alone(envelope)) = self.held.take() else { return Ok(None) };
        self.seat.consumed(self.number);
        Ok(Some(envelope))
    }
}

impl<K: Writes, T: Plain, S: Clone + Send + Sync + 'static> Chunk<K, T, S> {
    fn envelope_mut(&mut self) -> &mut Envelope<T> {
        self.written = true;
        match &mut self.held {
            Some(Held::Alone(envelope)) => envelope,
            Some(Held::Shared(_) | Held::Place) | None => unreachable!("what may write has it alone"),
        }
    }

    /// Says what stands beside the data.
    pub fn set_structure(&mut self, structure: S) {
        self.structure = Some(beside(structure));
        self.written |= self.seat.role == Role::Produce;
    }

    /// Says how many elements are valid: see [`Envelope::set_len`].
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it has no room for so many.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        self.envelope_mut().set_len(len)
    }

    /// The valid part to write to, once nothing uses it any more. On the host.
    ///
    /// # Errors
    /// As [`Envelope::write`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn write(&mut self) -> Result<&mut [T]> {
        self.envelope_mut().write().await
    }

    /// All it has room for, to write to, once nothing uses it any more. On the host.
    ///
    /// # Errors
    /// As [`Envelope::space`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn space(&mut self) -> Result<&mut [T]> {
        self.envelope_mut().space().await
    }

    /// Makes these its valid part. On the host.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it has no room for so many, or if it lies on a device.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn fill_from(&mut self, data: &[T]) -> Result<()> {
        self.set_len(data.len())?;
        self.write().await?.copy_from_slice(data);
        Ok(())
    }

    /// Swaps the contents of two chunks, of this hub or another: data, valid part and structure. Nothing is copied.
    ///
    /// # Errors
    /// As [`Envelope::swap`].
    pub fn swap<L: Writes>(&mut self, other: &mut Chunk<L, T, S>) -> Result<()> {
        self.envelope_mut().swap(other.envelope_mut())?;
        mem::swap(&mut self.structure, &mut other.structure);
        Ok(())
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Chunk<Produce, T, S> {
    /// It is the hub's newest chunk.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if its structure was not said; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn commit(mut self) -> Result<()> {
        self.commit_produced()
    }

    /// Puts an envelope in the place that was kept for one.
    pub(super) fn fill_with(&mut self, envelope: Envelope<T>, structure: Structure<S>, returns: bool) {
        self.returns = returns;
        (self.held, self.structure) = (Some(Held::Alone(envelope)), Some(structure));
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Chunk<Modify, T, S> {
    /// From now on all see it as it is now. Copies at other places go home.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it was swapped with a blank and has no structure;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault. It is given back then.
    pub fn commit(mut self) -> Result<()> {
        self.commit_modified()
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Chunk<Consume, T, S> {
    /// It leaves the hub, and its envelope goes home.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn commit(mut self) -> Result<()> {
        self.commit_consumed().map(drop)
    }

    /// It leaves the hub. Its envelope is the caller's, to write to or to pass on: it goes home to this hub after its last
    /// use. One that was [sent](super::Link::send) by the user is the user's again.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn into_envelope(mut self) -> Result<Envelope<T>> {
        match self.commit_consumed()? {
            Some(mut envelope) => {
                self.seat.goes_out(&mut envelope);
                Ok(envelope)
            }
            None => Err(Error::new(ErrorKind::Usage, "a chunk that is gone already")),
        }
    }
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> Drop for Chunk<K, T, S> {
    fn drop(&mut self) {
        match self.held.take() {
            None => {}
            Some(Held::Shared(envelope)) => {
                // What is wrong with the device, whoever uses it next learns.
                let _ = envelope.raw().mark();
                self.seat.peeked(self.number, envelope, false);
            }
            Some(Held::Place) => self.seat.unproduced(self.number),
            Some(Held::Alone(envelope)) if self.seat.role == Role::Produce => {
                // First, so that whoever is given the place finds the envelope.
                drop(envelope);
                self.seat.unproduced(self.number);
            }
            Some(Held::Alone(envelope)) => {
                let _ = envelope.raw().mark();
                self.seat.given_back(self.number, envelope, self.written);
            }
        }
    }
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> Deref for Chunk<K, T, S> {
    type Target = Envelope<T>;

    fn deref(&self) -> &Envelope<T> {
        self.envelope()
    }
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> Sealed<T> for Chunk<K, T, S> {}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> DeviceSlice<T> for Chunk<K, T, S> {
    fn view(&self) -> View<'_> {
        self.envelope().view()
    }
}

impl<K: Writes, T: Plain, S: Clone + Send + Sync + 'static> DeviceSliceMut<T> for Chunk<K, T, S> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        self.envelope_mut().view_mut()
    }
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> fmt::Debug for Chunk<K, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Chunk");
        shown.field("hub", &self.seat.core.name).field("number", &self.number).field("role", &self.seat.role);
        if let Some(Held::Alone(_) | Held::Shared(_)) = &self.held {
            shown.field("envelope", self.envelope());
        }
        shown.finish_non_exhaustive()
    }
}
