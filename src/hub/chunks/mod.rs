//! [`ChunkHub`]: a hub whose chunks are used by several links, at several locations.
//!
//! A queue hub moves each message from one location to one other. In a chunk hub, a chunk is a set of data that links
//! read, modify and consume at any location. Its envelopes are copies of that data at these locations, and are always
//! equal. The hub makes the copies ahead of time, and frees envelopes that are no longer needed.
//!
//! ```text
//!            produce (host)                 modify (cuda:0)     peek (cuda:1)     consume (host)
//!   blank ──────────────> [ chunk: copies on the host, cuda:0, .. ]─┬─────────────┬──────────────> removed
//!     ^                        ^             │  copy streams        │             │
//!     └── freed, when no link  └─ changed <──┘                   seen by all    the oldest first
//!         needs the copy there
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `state.rs` | the state machine, independent of devices; in `state/`, whose turn it is, and what follows from an event |
//! | `model.rs` | the state machine against a model |
//! | `core.rs` | the lock around it, the envelopes, the copies; in `core/`, a link's registration, and a flow's view of the hub |
//! | `link.rs`, `chunk.rs` | the user's handles |

mod chunk;
pub(crate) mod core;
mod link;
#[cfg(test)]
mod model;
pub mod roles;
pub(crate) mod state;

use std::{fmt, io::Write, sync::Arc};

pub use chunk::Chunk;
pub(crate) use link::DestinationName;
pub use link::{Consumer, Destination, Link, Modifier, Peeker, Producer, Unsent};

use self::{
    core::{ChunkHubView, Core},
    roles::{ChunkRole, Consume, LinkName, Modify, Peek, Produce},
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    memory::{Plain, bytes_of},
};

/// A hub of chunks of up to a fixed number of elements `T`, each with a structure `S` beside its data, which may be
/// any type of the user's.
///
/// A `ChunkHub` is a cheap handle; clones refer to the same hub. It needs no flow: it is a channel for any tokio
/// program, whose ends may be on different devices. In a flow, ports of operators are [linked](crate::Flow::link) to
/// it.
///
/// ```
/// use wakeline::{Stream, prelude::*};
///
/// # #[kernel]
/// # fn double(numbers: &mut [f32]) { numbers.iter_mut().for_each(|n| *n *= 2.0); }
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let gpu = Device::emulated(Emulated::new());
/// let hub = ChunkHub::<f32>::builder("numbers").elements(1024).queue(2);
/// let hub = hub.host_envelopes(2).envelopes(&gpu, 2).build()?;
/// let (mut produce, mut modify, mut consume) =
///     (hub.produce(&Device::host())?, hub.modify(&gpu)?, hub.consume(&Device::host())?);
///
/// tokio::spawn(async move {
///     for n in 0..10 {
///         produce.with(async |blank| blank.fill_from(&[n as f32; 1000]).await).await?;
///     }
///     Ok::<(), Error>(())                                  // the link is dropped, and the other links end
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
/// With a link that consumes, each chunk is modified by all links that modify, once each, in the order of linking.
/// Then each link that peeks sees it once. Then it is consumed, by one of the consumers.
///
/// Without a link that consumes (and if there never was one) chunks stay in the hub. All links may peek at a chunk at
/// the same time; those that modify it take turns. Where there are several chunks, each link cycles through them.
///
/// [`flow_to`](Self::flow_to) overrides these rules at any time.
///
/// # Envelopes
///
/// A hub has the envelopes that it is given, and a chunk that is wanted at a location waits until an envelope is free
/// there. No chunk takes an envelope that the links need for an older one. However, a link may be added while chunks
/// are already there, and the flow of data may be redirected. All envelopes of a location may then hold chunks that
/// come after the one that is wanted there, with no free envelope elsewhere. When nothing else can make progress, the
/// hub allocates one more envelope for the waiting link, so that links may be added in any order. No location gets
/// more envelopes in this way than the queue has slots. Before that, the hub waits for envelopes that were taken out
/// of it and for chunks that are not committed. If all links exist before the chunks and keep asking for chunks, one
/// envelope per location is enough, regardless of the number of links and of the available memory.
///
/// Chunks that stay, because no link consumes them, need more envelopes: in a hub with several locations one per
/// chunk, plus one to move chunks between locations. A producer that asks for a blank beyond that while a link reads
/// gets a [`Setup`](ErrorKind::Setup) error that says how many are enough. So link the consumer before the producer
/// needs that many.
///
/// # A lost device
///
/// The hub continues without the device. Each call of a link there returns the device's error, and no chunk waits for
/// such a link. Nothing is copied to the device any more. A chunk with a copy elsewhere continues from that copy. A
/// chunk whose only copy was lost is reported as [`DeviceLost`](ErrorKind::DeviceLost) to each link that would get
/// it. The link's next call continues with the chunk after it, and the error of a consuming link removes the chunk.
///
/// A copy elsewhere that the device had not completed is also lost. Until that is known, a link may get this copy, and
/// gets the error when it awaits the data. After that no link gets this copy: the chunk is copied again from an intact
/// copy, or is lost.
///
/// # With a flow
///
/// A flow ends when its operators have ended, whether or not other links to its hubs exist. While its operators wait
/// and a link outside the flow exists, the flow is not stalled, since that link may produce or consume something. A
/// hub handle alone does not hold a flow, nor does [another flow](crate::Flow::link).
pub struct ChunkHub<T: Plain, S: Clone + Send + Sync + 'static = ()> {
    core: Arc<Core<T, S>>,
}

/// The configuration of a chunk hub. From [`ChunkHub::builder`].
#[derive(Debug)]
#[must_use = "`build` makes the hub"]
pub struct ChunkHubBuilder<T, S> {
    name: Arc<str>,
    elements: usize,
    capacity: Option<usize>,
    envelopes: Vec<(Device, usize)>,
    pinned_for: Option<Device>,
    of: std::marker::PhantomData<fn(T, S)>,
}

impl<T: Plain, S: Clone + Send + Sync + 'static> ChunkHubBuilder<T, S> {
    /// Sets how many elements each envelope has room for. All envelopes of a hub have the same size.
    pub fn elements(mut self, elements: usize) -> Self {
        self.elements = elements;
        self
    }

    /// Sets the maximum number of chunks, including those that are being produced or consumed. The default is 1.
    pub fn queue(mut self, chunks: usize) -> Self {
        self.capacity = Some(chunks);
        self
    }

    /// Allows as many chunks as there are envelopes for.
    pub fn unbounded(mut self) -> Self {
        self.capacity = Some(usize::MAX);
        self
    }

    /// Adds `count` envelopes on a device or on the host.
    pub fn envelopes(mut self, device: &Device, count: usize) -> Self {
        self.envelopes.push((device.clone(), count));
        self
    }

    /// Adds `count` envelopes on the host. They are page-locked for the device set with
    /// [`pinned_for`](Self::pinned_for) or, by default, the first device that has envelopes.
    pub fn host_envelopes(self, count: usize) -> Self {
        self.envelopes(&Device::host(), count)
    }

    /// Sets the device that envelopes on the host are page-locked for.
    pub fn pinned_for(mut self, device: &Device) -> Self {
        self.pinned_for = Some(device.clone());
        self
    }

    /// Makes the hub and allocates its envelopes. A hub without any envelope is valid: envelopes can be
    /// [added](ChunkHub::add_envelopes), or all chunks can be [sent](Link::send).
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) if the queue has 0 slots, if the envelopes have room for no element, or if there
    /// is no copy path between its devices; [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers.
    pub fn build(self) -> Result<ChunkHub<T, S>> {
        let Self { name, elements, capacity, envelopes, pinned_for, .. } = self;
        let refuse = |why: &str| Err(Error::new(ErrorKind::Setup, format!("hub `{name}`: {why}")));
        let capacity = capacity.unwrap_or(1);
        if capacity == 0 {
            return refuse("its queue has 0 slots, so that no chunk could pass: set at least 1");
        }
        if elements == 0 {
            return refuse("its envelopes have room for no element: set their size with `.elements(n)`");
        }
        let bytes = bytes_of::<T>(elements).map_err(|error| error.at(format!("hub `{name}`")))?;
        let device = envelopes.iter().map(|(device, _)| device).find(|device| !device.is_host()).cloned();
        let pinned_for = pinned_for.or(device);
        let core = Core::new(name, bytes, capacity);
        // Device memory first: there is less of it, so a failure is found sooner.
        let (host, devices): (Vec<_>, Vec<_>) = envelopes.into_iter().partition(|(device, _)| device.is_host());
        for (device, count) in devices.into_iter().chain(host).filter(|(_, count)| *count > 0) {
            core.add_envelopes(&device, count, pinned_for.as_ref())?;
        }
        Ok(ChunkHub { core })
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> ChunkHub<T, S> {
    /// Creates a builder for a hub of this name. At least the number of [elements](ChunkHubBuilder::elements) must be
    /// set.
    pub fn builder(name: impl Into<String>) -> ChunkHubBuilder<T, S> {
        ChunkHubBuilder {
            name: name.into().into(),
            elements: 0,
            capacity: None,
            envelopes: Vec::new(),
            pinned_for: None,
            of: std::marker::PhantomData,
        }
    }

    fn link<K: ChunkRole>(&self, device: &Device) -> Result<Link<K, T, S>> {
        self.core.link(K::ROLE.0, device, None).map(Link::new)
    }

    /// Creates a link that fills blanks on this device or on the host, and sends the user's own envelopes.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) if there is no copy path between this device and the hub's other devices.
    pub fn produce(&self, device: &Device) -> Result<Producer<T, S>> {
        self.link::<Produce>(device)
    }

    /// Creates a link that removes chunks, on this device or on the host. Several such links take turns.
    ///
    /// # Errors
    /// The same as for [`produce`](Self::produce).
    pub fn consume(&self, device: &Device) -> Result<Consumer<T, S>> {
        self.link::<Consume>(device)
    }

    /// Creates a link that reads chunks on this device or on the host, concurrently with other links.
    ///
    /// # Errors
    /// The same as for [`produce`](Self::produce).
    pub fn peek(&self, device: &Device) -> Result<Peeker<T, S>> {
        self.link::<Peek>(device)
    }

    /// Creates a link that changes chunks on this device or on the host.
    ///
    /// # Errors
    /// The same as for [`produce`](Self::produce).
    pub fn modify(&self, device: &Device) -> Result<Modifier<T, S>> {
        self.link::<Modify>(device)
    }

    /// Restricts the flow of chunks to these links, as if there were no others, until the next call. Links that
    /// produce are not affected. All other links that wait for a chunk continue to wait; with an empty list, `&[]`,
    /// all links wait.
    ///
    /// For ports of a flow, use their [handles](crate::operator::LinkHandle), before or while the flow runs. Whether
    /// a handle's port is linked to this hub is checked when its flow begins to run: it may be linked until then.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if a link belongs to another hub, or produces. Nothing changes then.
    pub fn flow_to(&self, links: &[&dyn Destination]) -> Result<()> {
        let names = links.iter().map(|link| link.name().at_hub(&self.core.name));
        self.core.set_flow(Some(names.collect::<Result<_>>()?));
        Ok(())
    }

    /// Ends the restriction of [`flow_to`](Self::flow_to): chunks are given to all links again.
    pub fn flow_freely(&self) {
        self.core.set_flow(None);
    }

    /// Adds `count` envelopes, on a device or on the host, for links that wait for one.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers; [`Setup`](ErrorKind::Setup) as
    /// for [`produce`](Self::produce).
    pub fn add_envelopes(&self, device: &Device, count: usize) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        self.core.add_envelopes(device, count, None)
    }

    /// The number of envelopes on a device or on the host, free or in use: those that the hub was given, and those
    /// that it had to [allocate](Self#envelopes).
    pub fn envelopes(&self, device: &Device) -> usize {
        self.core.envelopes(device)
    }

    /// Writes a line for each event: a chunk is produced, copied, given to a link, modified or consumed. A writer that
    /// fails or panics is not used again. The same lines go to `tracing`, at debug level.
    ///
    /// The writer may use the hub. One thread at a time writes; the lines of other threads are queued meanwhile, up
    /// to 1,024 of them. A thread also writes at most 1,024 lines before it continues. Further lines are dropped, and
    /// a line says how many. Lines that are left are written with the next event, or when the hub is dropped.
    pub fn log_to(&self, writer: impl Write + Send + 'static) {
        self.core.log_to(Box::new(writer));
    }

    /// The hub's name.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// The number of elements that each envelope has room for.
    pub fn elements(&self) -> usize {
        self.core.bytes / size_of::<T>()
    }

    /// The number of chunks in the hub.
    pub fn len(&self) -> usize {
        self.core.len()
    }

    /// Returns true if there are no chunks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A flow's view of the hub.
    pub(crate) fn state(&self) -> Arc<dyn ChunkHubView> {
        self.core.clone()
    }

    /// A link for a port of a flow.
    pub(crate) fn link_port<K: ChunkRole>(&self, device: &Device, name: LinkName) -> Result<Link<K, T, S>> {
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
