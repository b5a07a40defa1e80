//! [`Link`]: a user of a hub's chunks, at one location.

use std::{
    fmt,
    future::poll_fn,
    marker::PhantomData,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker, ready},
};

use super::{
    chunk::{Chunk, beside},
    core::{Registration, place_name},
    roles::{ChunkRole, LinkName, Produce, Role},
    state::{LinkId, PollRequest},
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
/// It can be used from any task, on any runtime, without a flow. Dropping it removes the link: no chunk waits for it
/// any more, although a chunk that it was given might still be in use. If a flow's operators have links to the same
/// hub, this link keeps the flow from ending, since it may still produce or consume chunks.
pub struct Link<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static = ()> {
    pub(super) registration: Arc<Registration<T, S>>,
    kind: PhantomData<fn() -> K>,
}

/// A link that fills blanks.
pub type Producer<T, S = ()> = Link<super::roles::Produce, T, S>;
/// A link that removes chunks.
pub type Consumer<T, S = ()> = Link<super::roles::Consume, T, S>;
/// A link that reads chunks.
pub type Peeker<T, S = ()> = Link<super::roles::Peek, T, S>;
/// A link that changes chunks.
pub type Modifier<T, S = ()> = Link<super::roles::Modify, T, S>;

/// An envelope that was not sent, and the reason. `?` converts it to its [`Error`].
pub struct Unsent<T: Plain> {
    envelope: Envelope<T>,
    error: Error,
}

/// A guard: the link waits until the guard is dropped. The reference is weak, so that the link can be dropped even if
/// the guard is leaked.
pub(crate) struct Waiting<T: Plain, S: Clone + Send + Sync + 'static>(Weak<Registration<T, S>>);

impl<T: Plain, S: Clone + Send + Sync + 'static> Drop for Waiting<T, S> {
    fn drop(&mut self) {
        if let Some(registration) = self.0.upgrade() {
            registration.rest();
        }
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Link<K, T, S> {
    pub(super) fn new(registration: Registration<T, S>) -> Self {
        Self { registration: Arc::new(registration), kind: PhantomData }
    }

    /// Waits for the next chunk or, for a link that produces, for the next blank.
    ///
    /// A chunk that is consumed or modified belongs to this link until it is committed: **dropped without a `commit`,
    /// it is the link's next chunk again**. Where chunks stay, because no link consumes them, links cycle through them
    /// indefinitely: a peeking link gets a hub's only chunk again at once, changed or not.
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
    /// Returns `None` when there are no more chunks and no link is left that could produce more. For a reading link
    /// this means that all producing links are dropped. For a producing link it means that all consuming links are
    /// dropped; if there never was one, that all reading links are dropped and neither room nor an envelope becomes
    /// free any more. `None` is not final: when a new producing (or reading) link is made, this link continues. A
    /// program with several successive producers should therefore keep one producing link all the time. Before there
    /// is a first producer, `next` waits.
    ///
    /// The chunk's data may still be in transit. Kernels are ordered after its arrival automatically, and the host
    /// awaits [`read`](Envelope::read).
    ///
    /// # Errors
    /// - [`Setup`](ErrorKind::Setup) if the hub has no envelopes at the link's location and no data can get there
    ///   without, or has [too few](super::ChunkHub#envelopes) for one more chunk that stays.
    /// - [`OutOfMemory`](ErrorKind::OutOfMemory) if the chunk cannot get here without [one more
    ///   envelope](super::ChunkHub#envelopes) and there is no memory for it.
    /// - [`DeviceLost`](ErrorKind::DeviceLost) if the link's device is lost, or was lost with [the chunk's only
    ///   copy](super::ChunkHub#a-lost-device).
    /// - Any other error of a copy.
    ///
    /// # Cancel safety
    /// A chunk is taken only when the future resolves: dropping the future takes none. A future that is kept but not
    /// polled keeps its turn among the waiting links, and these wait behind it: drop it to release the turn.
    pub async fn next(&mut self) -> Result<Option<Chunk<K, T, S>>> {
        let _waiting = self.waiting();
        poll_fn(|task| {
            // A chunk that stays is always ready, so other tasks must get a turn. Tokio must not be given the user's
            // waker.
            if !tokio::task::coop::has_budget_remaining() {
                wake_again(task.waker());
                return Poll::Pending;
            }
            let budget = ready!(tokio::task::coop::poll_proceed(task));
            let next = self.registration.poll_next(true, task);
            if next.is_ready() {
                budget.made_progress();
            }
            next
        })
        .await
    }

    pub(crate) fn waiting(&self) -> Waiting<T, S> {
        Waiting(Arc::downgrade(&self.registration))
    }

    /// For a port: polls for the next chunk. Another link may take it before `take` is called.
    pub(crate) fn ask(&self, task: &mut Context<'_>) -> Result<Answer> {
        self.registration.ask(PollRequest { blank: true, stays: true }, task)
    }

    /// Takes the next chunk or blank, if it is still available.
    pub(crate) fn take(&self) -> Result<Option<Chunk<K, T, S>>> {
        self.registration.take(true)
    }

    /// Stops waiting.
    pub(crate) fn rest(&self) {
        self.registration.rest();
    }

    pub(crate) fn watch(&self, waker: &Waker) {
        self.registration.watch(waker);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.registration.has_ended()
    }

    pub(crate) fn id(&self) -> LinkId {
        self.registration.id
    }

    /// Runs `work` on the next chunk, and commits the chunk if `work` succeeds. Returns `None` if there will be no
    /// more chunks.
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
    /// Those of `work`, after which the chunk is not committed, and those of [`next`](Self::next).
    ///
    /// # Cancel safety
    /// Dropping the future drops the chunk, uncommitted.
    pub async fn with<R>(&mut self, work: impl AsyncFnOnce(&mut Chunk<K, T, S>) -> Result<R>) -> Result<Option<R>> {
        let Some(mut chunk) = self.next().await? else { return Ok(None) };
        let done = work(&mut chunk).await?;
        chunk.commit_any()?;
        Ok(Some(done))
    }

    /// The link's location.
    pub fn device(&self) -> &Device {
        &self.registration.device
    }

    /// The hub's name.
    pub fn hub(&self) -> &str {
        &self.registration.core.name
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Drop for Link<K, T, S> {
    fn drop(&mut self) {
        self.registration.retire();
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Link<Produce, T, S> {
    /// Sends a user's envelope or buffer as a chunk, once there is room in the queue: for example a mapped file, or
    /// an envelope of another hub, which returns there after its last reader here. Nothing is copied.
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
    /// [`Usage`](ErrorKind::Usage) if the envelope's size differs from that of the hub's envelopes, or if it is not at
    /// the link's location; [`Closed`](ErrorKind::Closed) if no link takes chunks any more. The envelope is returned
    /// with the error.
    ///
    /// # Cancel safety
    /// Dropping the future drops the envelope, unsent. A future that is kept but not polled keeps its turn, as in
    /// [`next`](Self::next).
    pub async fn send(&mut self, envelope: impl Into<Envelope<T>>, structure: S) -> Result<(), Unsent<T>> {
        self.send_as(envelope.into(), structure, false).await
    }

    /// Like [`send`](Self::send), but the chunk returns into this envelope: when a link at this location gets the
    /// chunk after a link elsewhere has modified it, the chunk is copied into this memory and no other. With a
    /// consumer at this location, the user thus gets the result in the memory that was sent.
    ///
    /// If the chunk is consumed elsewhere, this memory keeps the last content that the chunk had here.
    ///
    /// ```
    /// use wakeline::{Stream, Buffer, ChunkHub, prelude::*};
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
    /// Those of [`send`](Self::send); [`Usage`](ErrorKind::Usage) if the memory is read-only.
    ///
    /// # Cancel safety
    /// The same as for [`send`](Self::send).
    pub async fn send_in_place(&mut self, envelope: impl Into<Envelope<T>>, structure: S) -> Result<(), Unsent<T>> {
        self.send_as(envelope.into(), structure, true).await
    }

    async fn send_as(&mut self, envelope: Envelope<T>, structure: S, returns: bool) -> Result<(), Unsent<T>> {
        let waiting = self.waiting();
        let place = poll_fn(|task| self.poll_place(&envelope, returns, task)).await;
        drop(waiting);
        self.put(place, envelope, structure, returns)
    }

    /// Waits for a slot in the queue, after checking that the envelope fits.
    pub(crate) fn poll_place(
        &self,
        envelope: &Envelope<T>,
        returns: bool,
        task: &mut Context<'_>,
    ) -> Poll<Result<Option<Chunk<Produce, T, S>>>> {
        self.fits(envelope, returns)?;
        self.registration.poll_next(false, task)
    }

    /// Puts an envelope into the slot that [`poll_place`](Self::poll_place) returned.
    pub(crate) fn put(
        &self,
        place: Result<Option<Chunk<Produce, T, S>>>,
        mut envelope: Envelope<T>,
        structure: S,
        returns: bool,
    ) -> Result<(), Unsent<T>> {
        // DiscardOnDrop where it is not used: if a panic of its destructor left this function, the envelope that is
        // returned would be leaked (rust-lang/rust#47949).
        let structure = beside(structure);
        // Committed first, since the next user works on another stream.
        let place = place.and_then(|place| {
            envelope.raw_mut().depart(None)?;
            place.ok_or_else(|| self.closed())
        });
        match place {
            Ok(mut place) => {
                let came_back = self.registration.envelope_sent(&mut envelope);
                place.fill_with(envelope, structure, returns);
                // Cannot fail: the chunk has an envelope and a structure.
                let _ = place.commit_any();
                drop(came_back);
                Ok(())
            }
            Err(error) => Err(Unsent { envelope, error }),
        }
    }

    fn fits(&self, envelope: &Envelope<T>, returns: bool) -> Result<()> {
        let (bytes, wanted) = (envelope.raw().memory().bytes(), self.registration.core.bytes);
        let (name, of) = (&self.registration.core.name, size_of::<T>());
        let refuse = |why: String| Err(Error::new(ErrorKind::Usage, format!("hub `{name}`: {why}")));
        if bytes != wanted {
            return refuse(format!(
                "its envelopes have room for {} elements, but this one for {}: all envelopes of a hub have the same size",
                wanted / of,
                bytes / of
            ));
        }
        if self.registration.core.device_of(envelope) != self.registration.device {
            let (there, link) = (envelope.location(), place_name(&self.registration.device));
            return refuse(format!("an envelope on {there} cannot be sent by a link on {link}: use a link on {there}"));
        }
        if returns && envelope.raw().memory().is_read_only() {
            return refuse("`send_in_place` writes to the envelope, but this one is read-only: use `send`".into());
        }
        Ok(())
    }

    fn closed(&self) -> Error {
        Error::new(ErrorKind::Closed, format!("no link takes chunks of hub `{}` any more", self.hub()))
    }
}

impl<T: Plain> Unsent<T> {
    /// The reason why the envelope was not sent.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// Returns the envelope, for another use.
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

/// A destination for [`flow_to`](super::ChunkHub::flow_to): a link, or a port that is linked in a flow. Sealed.
pub trait Destination {
    #[doc(hidden)]
    fn name(&self) -> DestinationName;
}

/// A link's identity in its hub.
#[derive(Debug)]
pub struct DestinationName {
    name: LinkName,
    role: Role,
    /// The name of its hub, if known. Hubs are compared by the pointer, since several may have the same name.
    hub: Option<Arc<str>>,
}

impl DestinationName {
    /// For a port, whose hub is known only once the flow runs.
    pub(crate) fn of_port(name: LinkName, role: Role) -> Self {
        Self { name, role, hub: None }
    }

    /// The link's name, if it is a reading link of `hub`.
    pub(super) fn at_hub(self, hub: &Arc<str>) -> Result<LinkName> {
        let refuse = |why: String| Err(Error::new(ErrorKind::Usage, format!("hub `{hub}`: `flow_to` names {why}")));
        match &self.hub {
            Some(other) if !Arc::ptr_eq(other, hub) => {
                refuse(format!("a link of another hub, `{other}`: name links of this hub"))
            }
            _ if self.role == Role::Produce => {
                refuse("a link that produces, which gets no chunks: name links that read".into())
            }
            _ => Ok(self.name),
        }
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Destination for Link<K, T, S> {
    fn name(&self) -> DestinationName {
        DestinationName {
            name: self.registration.name,
            role: self.registration.role,
            hub: Some(self.registration.core.name.clone()),
        }
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> fmt::Debug for Link<K, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role: Role = self.registration.role;
        f.debug_struct("Link")
            .field("hub", &self.hub())
            .field("role", &role)
            .field("at", &place_name(self.device()))
            .finish()
    }
}
