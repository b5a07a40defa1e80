//! [`ChunkHub`]: a hub whose chunks are seen by several links, at several places.
//!
//! A queue hub moves each message from one place to one other. Here a chunk is one set of data that links look at, change
//! and take out wherever they are; its envelopes are the copies of it at those places, always equal. The hub makes the
//! copies, ahead of time, and takes the envelopes back.
//!
//! ```text
//!            produce (host)                 modify (cuda:0)     peek (cuda:1)     consume (host)
//!   blank ──────────────> [ chunk: copies on the host, cuda:0, .. ]─┬─────────────┬──────────────> gone
//!     ^                        ^             │  copy streams        │             │
//!     └── home, when nobody    └─ changed <──┘                   seen by all    the oldest first
//!         needs the copy there
//! ```
//!
//! | file | what |
//! |---|---|
//! | `state.rs` | the state machine, which knows no device; in `state/`, whose turn it is, and what follows from what |
//! | `model.rs` | the state machine against a model |
//! | `core.rs` | the lock around it, the envelopes, the copies; in `core/`, links as the hub knows them, the hub as a flow does |
//! | `link.rs`, `chunk.rs` | what a user has in hand |

mod chunk;
pub(crate) mod core;
mod link;
#[cfg(test)]
mod model;
pub mod roles;
pub(crate) mod state;

use std::{fmt, io::Write, sync::Arc};

pub use chunk::Chunk;
#[doc(hidden)]
pub use link::DestinationName;
pub use link::{Consumer, Destination, Link, Modifier, Peeker, Producer, Unsent};

use self::{
    core::{ChunkState, Core},
    roles::{Consume, DoesWith, LinkName, Modify, Peek, Produce},
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    memory::{Plain, bytes_of},
};

/// A hub of chunks of up to so many elements `T`, each with a structure `S` beside its data: any type of the user's.
///
/// It is a cheap handle; clones are the same hub. It needs no flow: it is a channel for any tokio program, whose ends may
/// be on different devices. In a flow, ports of operators are [linked](crate::Flow::link) to it.
///
/// ```
/// use wakeline::{prelude::*, ChunkHub};
///
/// # #[kernel]
/// # fn double(numbers: &mut [f32]) { numbers.iter_mut().for_each(|n| *n *= 2.0); }
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let gpu = Device::emulated(Emulated::new());
/// let hub = ChunkHub::<f32>::builder("numbers").elements(1024).queue(2).host_envelopes(2).envelopes(&gpu, 2).build()?;
/// let (mut produce, mut modify, mut consume) =
///     (hub.produce(&Device::host())?, hub.modify(&gpu)?, hub.consume(&Device::host())?);
///
/// tokio::spawn(async move {
///     for n in 0..10 {
///         produce.with(async |blank| blank.fill_from(&[n as f32; 1000]).await).await?;
///     }
///     Ok::<(), Error>(())                                  // the link is gone, and the chunks come to an end
/// });
/// tokio::spawn(async move {
///     let stream = Stream::new(&gpu)?;
///     while modify.with(async |chunk| double::launch(&stream, chunk)).await?.is_some() {}
///     Ok::<(), Error>(())
/// });
/// let mut seen = Vec::new();
/// while let Some(chunk) = consume.next().await? {
///     seen.push(chunk.read().await?[0]);
///     chunk.commit()?;
/// }
/// assert_eq!(seen, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0]);
/// # Ok::<(), Error>(())
/// # }).unwrap();
/// ```
///
/// # Where the data flows
///
/// With a link that consumes, each chunk goes through all links that modify it, once each, in the order of linking. Then
/// each link that peeks sees it, once. Then it is consumed; of several consumers, by one.
///
/// Without a link that consumes (and if there never was one) the chunk stays. All may peek at it at once; those who modify
/// it have it in turn. Where there are several, each link goes round them.
///
/// [`flow_to`](Self::flow_to) says otherwise, at any time.
///
/// # Envelopes
///
/// A hub has the envelopes that it is given, and a chunk that is wanted at a place waits until one is free there. No chunk takes
/// an envelope that the links need for an older one. But a link may come when the chunks are there, and data may be made to flow
/// elsewhere: then all envelopes of a place may hold chunks that come after the one that is wanted there, with no envelope free
/// at another place. Where nothing else can go on, the hub allocates one more envelope for the link that waits, so that links
/// may come in any order. Where all links are there before the chunks and go on asking, one envelope at each place suffices,
/// whatever the number of links and the memory. No place gets more in this way than the queue has places. An envelope that is taken out of the hub,
/// and a chunk that is not committed, is waited for first.
///
/// Chunks that stay, since no link consumes them, need more: in a hub with envelopes at several places one for each chunk, and
/// one to move chunks from place to place. A producer that asks for a blank beyond that, while a link reads, has an
/// [error](ErrorKind::Setup) that says how many suffice. So link the consumer before the producer asks for that many.
///
/// # A device that is lost
///
/// The hub goes on without it. Each call of a link there is the device's error, and no chunk waits for such a link. Nothing is
/// copied to the device any more. A chunk with a copy elsewhere goes on from that copy. A chunk whose only copy was lost
/// is an error, [`DeviceLost`](ErrorKind::DeviceLost), for each link that it comes to: the link's next call goes on to the
/// chunk after it, and the error of a link that consumes takes the chunk out.
///
/// A copy elsewhere that the device had not finished is lost, too. Until that is known a link may be given it, and learns it as it
/// awaits the data. From then on no link is given that copy: the chunk is copied again from a sound one, or is lost.
///
/// # With a flow
///
/// A flow ends when its operators have ended, whoever has links here. While they wait and somebody else has a link, by hand,
/// that is no stall: that one may produce something, or take something out. A mere handle does not hold a flow, nor does
/// [another flow](crate::Flow::link).
pub struct ChunkHub<T: Plain, S: Clone + Send + Sync + 'static = ()> {
    core: Arc<Core<T, S>>,
}

/// What a hub of chunks is to be like. From [`ChunkHub::builder`].
#[derive(Debug)]
#[must_use = "`build` makes the hub"]
pub struct ChunkHubBuilder<T, S> {
    name: Arc<str>,
    elements: usize,
    capacity: Option<usize>,
    envelopes: Vec<(Device, usize)>,
    near: Option<Device>,
    of: std::marker::PhantomData<fn(T, S)>,
}

impl<T: Plain, S: Clone + Send + Sync + 'static> ChunkHubBuilder<T, S> {
    /// How many elements each envelope has room for. All of a hub have one size.
    pub fn elements(mut self, elements: usize) -> Self {
        self.elements = elements;
        self
    }

    /// How many chunks there are at once, at most: those that are being produced and consumed count. 1 if nothing is said.
    pub fn queue(mut self, chunks: usize) -> Self {
        self.capacity = Some(chunks);
        self
    }

    /// As many chunks as there are envelopes for.
    pub fn unbounded(mut self) -> Self {
        self.capacity = Some(usize::MAX);
        self
    }

    /// So many envelopes on a device, or on the host.
    pub fn envelopes(mut self, device: &Device, count: usize) -> Self {
        self.envelopes.push((device.clone(), count));
        self
    }

    /// So many envelopes on the host, page-locked for the first device that has some, or that it is [near](Self::near).
    pub fn host_envelopes(self, count: usize) -> Self {
        self.envelopes(&Device::host(), count)
    }

    /// The device that envelopes on the host are page-locked for.
    pub fn near(mut self, device: &Device) -> Self {
        self.near = Some(device.clone());
        self
    }

    /// Makes the hub, and allocates its envelopes.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) if its queue is to have 0 places, or its envelopes room for no element, or if nothing can
    /// be copied between its devices; [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers. A hub without any envelope
    /// is none: they may be [added](ChunkHub::add_envelopes), or all that passes be [sent](Link::send).
    pub fn build(self) -> Result<ChunkHub<T, S>> {
        let Self { name, elements, capacity, envelopes, near, .. } = self;
        let refuse = |why: &str| Err(Error::new(ErrorKind::Setup, format!("hub `{name}`: {why}")));
        let capacity = capacity.unwrap_or(1);
        if capacity == 0 {
            return refuse("its queue has 0 places, and nothing could ever pass: at least 1");
        }
        if elements == 0 {
            return refuse("its envelopes have room for no element: say for how many, `.elements(n)`");
        }
        let bytes = bytes_of::<T>(elements).map_err(|error| error.at(format!("hub `{name}`")))?;
        let device = envelopes.iter().map(|(device, _)| device).find(|device| !device.is_host()).cloned();
        let near = near.or(device);
        let core = Core::new(name, bytes, capacity);
        // A device's first: it has less, and says so sooner.
        let (host, devices): (Vec<_>, Vec<_>) = envelopes.into_iter().partition(|(device, _)| device.is_host());
        for (device, count) in devices.into_iter().chain(host).filter(|(_, count)| *count > 0) {
            core.add_envelopes(&device, count, near.as_ref())?;
        }
        Ok(ChunkHub { core })
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> ChunkHub<T, S> {
    /// A hub of that name. Say at least how many [elements](ChunkHubBuilder::elements) its envelopes have.
    pub fn builder(name: impl Into<String>) -> ChunkHubBuilder<T, S> {
        ChunkHubBuilder {
            name: name.into().into(),
            elements: 0,
            capacity: None,
            envelopes: Vec::new(),
            near: None,
            of: std::marker::PhantomData,
        }
    }

    fn link<K: DoesWith>(&self, device: &Device) -> Result<Link<K, T, S>> {
        self.core.link(K::ROLE.0, device, None).map(Link::new)
    }

    /// A link that fills blanks on this device, or on the host, and sends the user's own.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) if nothing can be copied between that device and the hub's others.
    pub fn produce(&self, device: &Device) -> Result<Producer<T, S>> {
        self.link::<Produce>(device)
    }

    /// A link that takes chunks out, on this device or on the host. Several take turns.
    ///
    /// # Errors
    /// As [`produce`](Self::produce).
    pub fn consume(&self, device: &Device) -> Result<Consumer<T, S>> {
        self.link::<Consume>(device)
    }

    /// A link that looks at chunks on this device, or on the host, while others do.
    ///
    /// # Errors
    /// As [`produce`](Self::produce).
    pub fn peek(&self, device: &Device) -> Result<Peeker<T, S>> {
        self.link::<Peek>(device)
    }

    /// A link that changes chunks on this device, or on the host.
    ///
    /// # Errors
    /// As [`produce`](Self::produce).
    pub fn modify(&self, device: &Device) -> Result<Modifier<T, S>> {
        self.link::<Modify>(device)
    }

    /// Only these links are given chunks, until it is said otherwise: as if there were no others. Links that produce go on.
    /// Whoever else waits for a chunk goes on waiting, and of no links at all, `&[]`, everybody does.
    ///
    /// Of a flow, [handles](crate::operator::LinkHandle) of ports are as good as links, before it runs and while it does.
    /// Whether a handle's port is linked to this hub is looked at as its flow begins to run: it may be linked until then.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if one is a link of another hub, or one that produces. Nothing is changed then.
    pub fn flow_to(&self, links: &[&dyn Destination]) -> Result<()> {
        let names = links.iter().map(|link| link.name().at_hub(&self.core.name));
        self.core.set_flow(Some(names.collect::<Result<_>>()?));
        Ok(())
    }

    /// Chunks are given to all links again.
    pub fn flow_freely(&self) {
        self.core.set_flow(None);
    }

    /// So many envelopes more, on a device or on the host, for whoever waits for one.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers; [`Setup`](ErrorKind::Setup) as [`produce`](Self::produce).
    pub fn add_envelopes(&self, device: &Device, count: usize) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        self.core.add_envelopes(device, count, None)
    }

    /// How many envelopes it has on a device or on the host, wherever they are lent to: those that it was given, and those that
    /// it had to [allocate](Self#envelopes).
    pub fn envelopes(&self, device: &Device) -> usize {
        self.core.envelopes(device)
    }

    /// Writes a line for each event: what is produced, copied from where to where, given to whom, modified, consumed. A
    /// writer that fails or panics is not written to again. The same goes to `tracing`, at debug level.
    ///
    /// The writer may use the hub. One thread at a time writes, and while it does, the lines of others wait for it: up to 1,024
    /// of them, which is also what a thread writes at most before it goes on. Lines beyond that are dropped, and a line says
    /// how many. What is left after a turn is written with the next event, or as the hub is dropped.
    pub fn log_to(&self, writer: impl Write + Send + 'static) {
        self.core.log_to(Box::new(writer));
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// Elements that each envelope has room for.
    pub fn elements(&self) -> usize {
        self.core.bytes / size_of::<T>()
    }

    /// Chunks in it.
    pub fn len(&self) -> usize {
        self.core.len()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a flow sees of it.
    pub(crate) fn state(&self) -> Arc<dyn ChunkState> {
        self.core.clone()
    }

    /// A link for a port of a flow.
    pub(crate) fn link_port<K: DoesWith>(&self, device: &Device, name: LinkName) -> Result<Link<K, T, S>> {
        self.core.link(K::ROLE.0, device, Some(name)).map(Link::new)
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Clone for ChunkHub<T, S> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone() }
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> fmt::Debug for ChunkHub<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkHub").field("name", &self.name()).field("chunks", &self.len()).finish_non_exhaustive()
    }
}
