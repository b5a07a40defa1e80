//! [`Link`]: one who has to do with a hub's chunks, at one place.

use std::{
    fmt,
    future::poll_fn,
    marker::PhantomData,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker, ready},
};

use super::{
    chunk::{Chunk, beside},
    core::{Seat, place_name},
    roles::{DoesWith, LinkName, Produce, Role},
    state::{Asks, LinkId},
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{envelope::Envelope, queue::Answer},
    memory::Plain,
    sync::wake_again,
};

/// A link to a [`ChunkHub`](super::ChunkHub), from [`produce`](super::ChunkHub::produce),
/// [`consume`](super::ChunkHub::consume), [`peek`](super::ChunkHub::peek) or [`modify`](super::ChunkHub::modify).
///
/// It is used from any task, on any runtime, with no flow at all. Dropping it takes the link away: no
/// chunk waits for it, though one that it was given may still be out. In a flow whose
/// operators have links to the same hub, it holds the flow: that does not end while this link may still do something.
pub struct Link<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static = ()> {
    pub(super) seat: Arc<Seat<T, S>>,
    kind: PhantomData<fn() -> K>,
}

/// A link that fills blanks.
pub type Producer<T, S = ()> = Link<super::roles::Produce, T, S>;
/// A link that takes chunks out.
pub type Consumer<T, S = ()> = Link<super::roles::Consume, T, S>;
/// A link that looks at chunks.
pub type Peeker<T, S = ()> = Link<super::roles::Peek, T, S>;
/// A link that changes chunks.
pub type Modifier<T, S = ()> = Link<super::roles::Modify, T, S>;

/// What was not sent, and why. `?` makes the [`Error`] of it.
pub struct Unsent<T: Plain> {
    envelope: Envelope<T>,
    error: Error,
}

/// One that waits, until it is dropped. It does not keep the link, which is gone where only this was forgotten.
pub(crate) struct Waiting<T: Plain, S: Clone + Send + Sync + 'static>(Weak<Seat<T, S>>);

impl<T: Plain, S: Clone + Send + Sync + 'static> Drop for Waiting<T, S> {
    fn drop(&mut self) {
        if let Some(seat) = self.0.upgrade() {
            seat.rest();
        }
    }
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> Link<K, T, S> {
    pub(super) fn new(seat: Seat<T, S>) -> Self {
        Self { seat: Arc::new(seat), kind: PhantomData }
    }

    /// The next chunk, or, of a link that produces, a blank one, once there is one for this link.
    ///
    /// A chunk that is consumed or modified is this link's until it is committed: **dropped without a `commit`, it is the
    /// next one again**. Where chunks stay, because nobody consumes them, links go round them for ever: one that peeks is
    /// given the only chunk again at once, changed or not.
    ///
    /// ```
    /// # use wakeline::prelude::*;
    /// # async fn sum(mut consumer: wakeline::hub::Consumer<u32>) -> Result<u32> {
    /// let mut sum = 0;
    /// while let Some(chunk) = consumer.next().await? {
    ///     sum += chunk.read().await?.iter().sum::<u32>();
    ///     chunk.commit()?;                                 // or the same chunk comes again
    /// }
    /// # Ok(sum)
    /// # }
    /// ```
    ///
    /// `None` when nothing is left and nobody is there who could bring more. For one that reads: all links that produce are
    /// gone. For one that produces: all that consume are; if nobody ever did, all that read, and nothing makes room or gives
    /// an envelope back any more. It is not final: with a new link that produces (or reads), this one goes on. Whoever has
    /// several producers one after the other keeps a link to produce meanwhile. Before anybody ever produced, it waits.
    ///
    /// The chunk's data may still be on its way here. Kernels are ordered after it by themselves, and the host awaits
    /// [`read`](Envelope::read).
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) if the hub has no envelopes where the link is, and nothing can come to lie there without, or
    /// [too few](super::ChunkHub#envelopes) for one more chunk that stays;
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the chunk cannot come here without [one more](super::ChunkHub#envelopes) and
    /// there is no memory for that; [`DeviceLost`](ErrorKind::DeviceLost) if the link's device is lost, or was lost with
    /// [the chunk's only copy](super::ChunkHub#a-device-that-is-lost); what else went wrong with a copy, if something did.
    ///
    /// # Cancel safety
    /// A chunk is taken only as the future resolves: dropping it takes none. A future that is kept and not polled keeps its turn
    /// among the links that wait, and these wait behind it: drop it to release the turn.
    pub async fn next(&mut self) -> Result<Option<Chunk<K, T, S>>> {
        let _waiting = self.waiting();
        poll_fn(|task| {
            // A chunk that stays is always there: others have their turns all the same. Tokio is not given the user's waker.
            if !tokio::task::coop::has_budget_remaining() {
                wake_again(task.waker());
                return Poll::Pending;
            }
            let budget = ready!(tokio::task::coop::poll_proceed(task));
            let next = self.seat.poll_next(true, task);
            if next.is_ready() {
                budget.made_progress();
            }
            next
        })
        .await
    }

    pub(crate) fn waiting(&self) -> Waiting<T, S> {
        Waiting(Arc::downgrade(&self.seat))
    }

    /// For a port: asks for the next chunk. Between this and `take` another may be quicker.
    pub(crate) fn ask(&self, task: &mut Context<'_>) -> Result<Answer> {
        self.seat.ask(Asks { blank: true, stays: true }, task)
    }

    /// Takes it, if it is still there.
    pub(crate) fn take(&self) -> Result<Option<Chunk<K, T, S>>> {
        self.seat.take(true)
    }

    /// It is not waited for any longer.
    pub(crate) fn rest(&self) {
        self.seat.rest();
    }

    /// Keeps the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.seat.watch(waker);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.seat.has_ended()
    }

    /// Its number in the hub.
    pub(crate) fn id(&self) -> LinkId {
        self.seat.id
    }

    /// Does something with the next chunk, and commits it if that goes well. `None` when there will be none any more.
    ///
    /// ```
    /// use wakeline::{ChunkHub, Device};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let numbers = ChunkHub::<u32>::builder("numbers").elements(3).host_envelopes(1).build()?;
    /// let (mut produce, mut double) = (numbers.produce(&Device::host())?, numbers.modify(&Device::host())?);
    /// produce.with(async |blank| blank.fill_from(&[1, 2, 3]).await).await?;
    /// double.with(async |chunk| { chunk.write().await?.iter_mut().for_each(|n| *n *= 2); Ok(()) }).await?;
    ///
    /// let chunk = numbers.peek(&Device::host())?.next().await?;
    /// assert_eq!(chunk.unwrap().read().await?, [2, 4, 6]);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// What `work` says: then the chunk is not committed. Otherwise as [`next`](Self::next).
    ///
    /// # Cancel safety
    /// Dropping the future drops the chunk, uncommitted.
    pub async fn with<R>(&mut self, work: impl AsyncFnOnce(&mut Chunk<K, T, S>) -> Result<R>) -> Result<Option<R>> {
        let Some(mut chunk) = self.next().await? else { return Ok(None) };
        let done = work(&mut chunk).await?;
        chunk.commit_any()?;
        Ok(Some(done))
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        &self.seat.device
    }

    /// The hub's name.
    pub fn hub(&self) -> &str {
        &self.seat.core.name
    }
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> Drop for Link<K, T, S> {
    fn drop(&mut self) {
        self.seat.retire();
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Link<Produce, T, S> {
    /// Sends an envelope or a buffer of the user's as a chunk, once there is room in the queue: a mapped file, or an
    /// envelope of another hub, which goes home after its last reader here. Nothing is copied.
    ///
    /// ```
    /// use wakeline::{Buffer, ChunkHub, Device};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut mine = Buffer::<u32>::pinned(&Device::host(), 2)?;
    /// mine.as_mut_slice()?.copy_from_slice(&[7, 8]);
    ///
    /// let hub = ChunkHub::<u32>::builder("files").elements(2).build()?;
    /// let (mut produce, mut consume) = (hub.produce(&Device::host())?, hub.consume(&Device::host())?);
    /// produce.send(mine, ()).await?;
    /// let chunk = consume.next().await?.unwrap();
    /// assert_eq!(chunk.into_envelope()?.read().await?, [7, 8]);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if its size is not that of the hub's envelopes, or if it lies elsewhere than the link;
    /// [`Closed`](ErrorKind::Closed) if nobody takes chunks any more. The envelope comes back.
    ///
    /// # Cancel safety
    /// Dropping the future drops the envelope, unsent. One that is kept and not polled keeps its turn, as in [`next`](Self::next).
    pub async fn send(&mut self, envelope: impl Into<Envelope<T>>, structure: S) -> Result<(), Unsent<T>> {
        self.send_as(envelope.into(), structure, false).await
    }

    /// As [`send`](Self::send), and what other links make of the chunk comes back into this envelope: where the chunk comes to a
    /// link at this place, after a link elsewhere has modified it, it is copied into this memory and into no other. So with a
    /// consumer at this place the user has the result in the memory that was sent.
    ///
    /// A chunk that is consumed elsewhere leaves in this memory what was last here.
    ///
    /// ```
    /// use wakeline::{Buffer, ChunkHub, prelude::*};
    ///
    /// # #[kernel]
    /// # fn double(numbers: &mut [u32]) { numbers.iter_mut().for_each(|n| *n *= 2); }
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let gpu = Device::emulated(Emulated::new());
    /// let hub = ChunkHub::<u32>::builder("numbers").elements(3).envelopes(&gpu, 1).build()?;
    /// let (mut produce, mut modify, mut consume) =
    ///     (hub.produce(&Device::host())?, hub.modify(&gpu)?, hub.consume(&Device::host())?);
    /// let (numbers, mine) = Buffer::wrap(vec![1_u32, 2, 3])?;
    /// produce.send_in_place(numbers, ()).await?;
    ///
    /// let stream = Stream::new(&gpu)?;
    /// modify.with(async |chunk| double::launch(&stream, chunk)).await?;
    /// consume.with(async |_| Ok(())).await?;
    /// assert_eq!(mine.into_inner().await?, [2, 4, 6]);
    /// # Ok::<(), Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`send`](Self::send); [`Usage`](ErrorKind::Usage) if the memory is read only.
    ///
    /// # Cancel safety
    /// As [`send`](Self::send).
    pub async fn send_in_place(&mut self, envelope: impl Into<Envelope<T>>, structure: S) -> Result<(), Unsent<T>> {
        self.send_as(envelope.into(), structure, true).await
    }

    async fn send_as(&mut self, envelope: Envelope<T>, structure: S, returns: bool) -> Result<(), Unsent<T>> {
        let waiting = self.waiting();
        let place = poll_fn(|task| self.poll_place(&envelope, returns, task)).await;
        drop(waiting);
        self.put(place, envelope, structure, returns)
    }

    /// A place in the queue for an envelope that fits.
    pub(crate) fn poll_place(
        &self,
        envelope: &Envelope<T>,
        returns: bool,
        task: &mut Context<'_>,
    ) -> Poll<Result<Option<Chunk<Produce, T, S>>>> {
        self.fits(envelope, returns)?;
        self.seat.poll_next(false, task)
    }

    /// Puts an envelope there.
    pub(crate) fn put(
        &self,
        place: Result<Option<Chunk<Produce, T, S>>>,
        mut envelope: Envelope<T>,
        structure: S,
        returns: bool,
    ) -> Result<(), Unsent<T>> {
        // Discarded where it is not used: were a panic of its destructor to leave this function, the envelope that is
        // returned would be leaked (rust-lang/rust#47949).
        let structure = beside(structure);
        // Whoever is given it is on another stream.
        let place = place.and_then(|place| {
            envelope.raw_mut().depart(None)?;
            place.ok_or_else(|| self.closed())
        });
        match place {
            Ok(mut place) => {
                let came_back = self.seat.comes_in(&mut envelope);
                place.fill_with(envelope, structure, returns);
                // It has both by now.
                let _ = place.commit_any();
                drop(came_back);
                Ok(())
            }
            Err(error) => Err(Unsent { envelope, error }),
        }
    }

    fn fits(&self, envelope: &Envelope<T>, returns: bool) -> Result<()> {
        let (bytes, wanted) = (envelope.raw().memory().bytes(), self.seat.core.bytes);
        let (name, of) = (&self.seat.core.name, size_of::<T>());
        let refuse = |why: String| Err(Error::new(ErrorKind::Usage, format!("hub `{name}`: {why}")));
        if bytes != wanted {
            return refuse(format!(
                "its envelopes have room for {} elements, and this one for {}: all of a hub have one size",
                wanted / of,
                bytes / of
            ));
        }
        if self.seat.core.device_of(envelope) != self.seat.device {
            let (lies, link) = (envelope.location(), place_name(&self.seat.device));
            return refuse(format!("an envelope on {lies} is sent by a link on {link}: link where it lies"));
        }
        if returns && envelope.raw().memory().is_read_only() {
            return refuse("`send_in_place` writes to what it sends, and this is read only: `send` it".into());
        }
        Ok(())
    }

    fn closed(&self) -> Error {
        Error::new(ErrorKind::Closed, format!("nobody takes chunks of hub `{}` any more", self.hub()))
    }
}

impl<T: Plain> Unsent<T> {
    /// Why it was not sent.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The envelope, to be used in another way.
    pub fn into_envelope(self) -> Envelope<T> {
        self.envelope
    }
}

impl<T: Plain> From<Unsent<T>> for Error {
    fn from(unsent: Unsent<T>) -> Self {
        unsent.error
    }
}

impl<T: Plain> fmt::Debug for Unsent<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T: Plain> fmt::Display for Unsent<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T: Plain> std::error::Error for Unsent<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

/// Whom data can be said to flow to: a link, or a port that is linked in a flow.
pub trait Destination {
    #[doc(hidden)]
    fn name(&self) -> DestinationName;
}

/// How a link is known to its hub.
#[doc(hidden)]
#[derive(Debug)]
pub struct DestinationName {
    name: LinkName,
    role: Role,
    /// Its hub's name, where it is known: of each hub another one, be it spelt the same.
    hub: Option<Arc<str>>,
}

impl DestinationName {
    /// A port's, whose hub is only known as the flow runs.
    pub(crate) fn of_port(name: LinkName, role: Role) -> Self {
        Self { name, role, hub: None }
    }

    /// What it is called, if it may be given chunks of that hub.
    pub(super) fn at_hub(self, hub: &Arc<str>) -> Result<LinkName> {
        let refuse = |why: String| Err(Error::new(ErrorKind::Usage, format!("hub `{hub}`: `flow_to` names {why}")));
        match &self.hub {
            Some(other) if !Arc::ptr_eq(other, hub) => {
                refuse(format!("a link of another hub, `{other}`, which is given no chunks of this one"))
            }
            _ if self.role == Role::Produce => refuse(
                "a link that produces, which is given no chunks and goes on whatever is said: name links that read"
                    .into(),
            ),
            _ => Ok(self.name),
        }
    }
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> Destination for Link<K, T, S> {
    fn name(&self) -> DestinationName {
        DestinationName { name: self.seat.name, role: self.seat.role, hub: Some(self.seat.core.name.clone()) }
    }
}

impl<K: DoesWith, T: Plain, S: Clone + Send + Sync + 'static> fmt::Debug for Link<K, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role: Role = self.seat.role;
        f.debug_struct("Link")
            .field("hub", &self.hub())
            .field("role", &role)
            .field("at", &place_name(self.device()))
            .finish()
    }
}
