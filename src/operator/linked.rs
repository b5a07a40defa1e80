//! [`Linked`]: a port that is linked to a hub of chunks.
//!
//! Its condition is its next chunk, or a blank one. The chunk is claimed when a run begins, and held during the run.
//! When the run has succeeded, it is committed; otherwise it is unchanged.
//!
//! ```text
//!   waits ──ready──> claimed: `get`, `get_mut` ──the run returns Ok──> committed
//!     ^                 │    │                                           │
//!     │      an error   │    └── `commit` ──> committed, before the end ─┤
//!     └── given back <──┴── the end, `by_hand`, or an untouched blank <──┘
//! ```

use std::{
    fmt,
    future::poll_fn,
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    plan::{Binder, Plan, PortOptions},
    ports::{AnyPort, HandleVisitor, LinkPort, LinkedPort, Port, PortStats, Traffic},
    run_context::RunContext,
    status_cell::RunWait,
};
use crate::{
    condition::{Counted, PortId, PortState, Readiness},
    error::{Error, ErrorKind, Result},
    hub::{
        Chunk, Destination, DestinationName, Envelope, Link, Unsent,
        chunks::roles::{LinkName, Role},
        role::{self, ChunkRole, Writes},
    },
    memory::Plain,
};

/// A port that is linked to a [`ChunkHub`](crate::ChunkHub): [`Produce`], [`Consume`], [`Peek`] or [`Modify`].
///
/// Its operator runs when the port's chunk (for a producer, a blank chunk) is available on the operator's device. The
/// run holds the chunk: [`get`](Self::get), [`get_mut`](Self::get_mut). When the run returns `Ok`, the chunk is
/// committed. It is given back if the run fails, or if the port is `by_hand` and [`commit`](Self::commit) was not
/// called. A chunk of a `by_hand` port is held until the operator's [`after`](crate::Operator::after) has ended, and
/// may be committed there.
///
/// A blank that was neither written to nor given a length or a structure returns to the hub when the run ends: a source
/// that has no more data calls `cx.finish()` and returns. To produce an empty chunk, use `fill_from(&[])` or `commit`.
///
/// A chunk that is given back is unchanged, with one exception: a [`Modify`] port that has written to a chunk's *only*
/// copy. There is no other copy to restore it from, and all readers see what was written; [`Chunk`] says when that is.
///
/// ```
/// use wakeline::{operator::{Modify, Peek}, prelude::*};
///
/// #[derive(Ports)]
/// struct UpdatePorts {
///     /// Read, shared with other readers.
///     #[peek]
///     sums: Peek<f32>,
///     /// Written, by one link at a time.
///     #[modify]
///     centroids: Modify<f32>,
/// }
/// # #[kernel]
/// # fn update(sums: &[f32], centroids: &mut [f32]) { let _ = (sums, centroids); }
///
/// struct Update;
///
/// impl Operator for Update {
///     type Ports = UpdatePorts;
///
///     async fn compute(&mut self, ports: &mut UpdatePorts, cx: &mut Cx) -> Result<()> {
///         update::launch(cx.stream()?, ports.sums.get()?, ports.centroids.get_mut()?)
///     }
/// }
///
/// # let device = Device::emulated(Emulated::new());
/// # let sums = ChunkHub::<f32>::builder("sums").elements(3).envelopes(&device, 1).build()?;
/// # let centroids = ChunkHub::<f32>::builder("centroids").elements(3).envelopes(&device, 1).build()?;
/// let mut flow = Flow::new("k-means");
/// let update = flow.add("update", Update).on(&device);
/// flow.link(update.sums, &sums);
/// flow.link(update.centroids, &centroids);
/// # Ok::<(), Error>(())
/// ```
pub struct Linked<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static = ()> {
    link: Link<K, T, S>,
    chunk: Option<Chunk<K, T, S>>,
    /// Why the link cannot wait for a chunk, as of the last poll.
    refused: Option<Error>,
    /// The error of this run, in place of a chunk.
    failed: Option<Failed>,
    name: &'static str,
    is_required: bool,
    by_hand: bool,
    traffic: Traffic,
    context: Arc<RunContext>,
}

struct Failed {
    error: Error,
    /// If false, the run fails with this error: a lost chunk is lost for good. Initially true if no chunk is lost.
    retrieved: AtomicBool,
}

impl Failed {
    fn was_retrieved(&self) -> bool {
        self.retrieved.load(Ordering::Relaxed)
    }
}

#[cold]
fn missing(failed: &Option<Failed>, port: &str, hub: &str) -> Error {
    if let Some(failed) = failed {
        failed.retrieved.store(true, Ordering::Relaxed);
        return failed.error.clone();
    }
    let text = format!(
        "port `{port}` has no chunk of hub `{hub}`: it got none in this run, or has committed it or given it back already"
    );
    Error::new(ErrorKind::Usage, text)
}

/// A port that fills blank chunks, with the attribute `#[produce]`. See [`Linked`].
pub type Produce<T, S = ()> = Linked<role::Produce, T, S>;
/// A port that takes chunks out, with the attribute `#[consume]`. See [`Linked`].
pub type Consume<T, S = ()> = Linked<role::Consume, T, S>;
/// A port that reads chunks, shared with other readers, with the attribute `#[peek]`. See [`Linked`].
pub type Peek<T, S = ()> = Linked<role::Peek, T, S>;
/// A port that changes chunks, with the attribute `#[modify]`. See [`Linked`].
pub type Modify<T, S = ()> = Linked<role::Modify, T, S>;

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Linked<K, T, S> {
    /// This run's chunk.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if there is none: it was committed already, or the port is `optional`. The error of
    /// its copy, if that failed. A run that does not retrieve the error of a lost chunk fails with it.
    pub fn get(&self) -> Result<&Chunk<K, T, S>> {
        self.chunk.as_ref().ok_or_else(|| missing(&self.failed, self.name, self.link.hub()))
    }

    /// This run's chunk, to write to.
    ///
    /// # Errors
    /// The same as for [`get`](Self::get).
    pub fn get_mut(&mut self) -> Result<&mut Chunk<K, T, S>>
    where
        K: Writes,
    {
        let Self { link, chunk, failed, name, .. } = self;
        chunk.as_mut().ok_or_else(|| missing(failed, name, link.hub()))
    }

    /// True if this run has a chunk here that was not committed. It has none if the chunk was lost with a device:
    /// [`get`](Self::get) returns that error, and a run that does not call it fails with the error.
    pub fn has_chunk(&self) -> bool {
        self.chunk.is_some()
    }

    /// True once no chunk will become available here any more.
    pub fn has_ended(&self) -> bool {
        self.chunk.is_none() && self.link.has_ended()
    }

    /// Commits this run's chunk now instead of at the end of the run.
    ///
    /// # Errors
    /// The same as for [`get`](Self::get); [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn commit(&mut self) -> Result<()> {
        self.get()?;
        self.commit_chunk()
    }

    /// Gives this run's chunk back, as if the run had failed.
    pub fn give_back(&mut self) {
        self.chunk = None;
    }

    fn commit_chunk(&mut self) -> Result<()> {
        let Some(chunk) = self.chunk.take() else { return Ok(()) };
        let bytes = (chunk.len() * size_of::<T>()) as u64;
        if K::ROLE.0 == Role::Produce {
            self.traffic.add(bytes);
        }
        chunk.commit_any()
    }

    fn poll_link(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.chunk.is_some() || self.failed.is_some() {
            return Readiness::READY;
        }
        self.refused = None;
        match self.link.ask(cx) {
            Ok(answer) => answer.into(),
            // The run gets the error, in place of a chunk.
            Err(error) => {
                self.refused = Some(error);
                Readiness::READY
            }
        }
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Linked<role::Consume, T, S> {
    /// Takes this run's chunk out as an envelope, to write to or to send on. It returns to the hub after its last use.
    ///
    /// # Errors
    /// The same as for [`get`](Self::get).
    pub fn take(&mut self) -> Result<Envelope<T>> {
        let chunk = self.chunk.take().ok_or_else(|| missing(&self.failed, self.name, self.link.hub()))?;
        chunk.into_envelope()
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Linked<role::Produce, T, S> {
    /// Sends an envelope or a buffer of the user's as a chunk, once there is room in the queue; see [`Link::send`]. It
    /// is meant for an `optional` port, since the blank of any other port occupies a place in the queue. A run of an
    /// optional port that was given a blank ([`has_chunk`](Self::has_chunk)) occupies one, too:
    /// [`give_back`](Self::give_back) the blank first, or this waits for another place.
    ///
    /// # Errors
    /// The same as for [`Link::send`].
    ///
    /// # Cancel safety
    /// Dropping the future drops the envelope, unsent.
    pub async fn send(&mut self, envelope: impl Into<Envelope<T>>, structure: S) -> Result<(), Unsent<T>> {
        self.send_as(envelope.into(), structure, false).await
    }

    /// Like [`send`](Self::send), and the changes that other links make to the chunk are written back to this memory; see
    /// [`Link::send_in_place`].
    ///
    /// # Errors
    /// The same as for [`Link::send_in_place`].
    ///
    /// # Cancel safety
    /// Dropping the future drops the envelope, unsent.
    pub async fn send_in_place(&mut self, envelope: impl Into<Envelope<T>>, structure: S) -> Result<(), Unsent<T>> {
        self.send_as(envelope.into(), structure, true).await
    }

    async fn send_as(&mut self, envelope: Envelope<T>, structure: S, returns: bool) -> Result<(), Unsent<T>> {
        let bytes = envelope.len() * size_of::<T>();
        let (context, waiting) = (self.context.clone(), self.link.waiting());
        let place = poll_fn(|task| {
            context.poll_port(RunWait::SENDS, task, |task| match self.link.poll_place(&envelope, returns, task) {
                Poll::Ready(place) => Ok(place),
                Poll::Pending => Err(Readiness::WAIT),
            })
        });
        let place = place.await;
        drop(waiting);
        self.link.put(place, envelope, structure, returns)?;
        self.traffic.add(bytes as u64);
        Ok(())
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Destination for Linked<K, T, S> {
    fn name(&self) -> DestinationName {
        self.link.name()
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> PortState for Linked<K, T, S> {
    fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        let more = self.poll_link(cx);
        let ready = usize::from(more.is_ready());
        Counted::new(ready, if ready < most { more | Readiness::WAIT } else { more })
    }

    fn poll_room(&mut self, _count: usize, cx: &mut Context<'_>) -> Readiness {
        self.poll_link(cx)
    }

    fn oldest(&self) -> Option<Instant> {
        None
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> AnyPort for Linked<K, T, S> {
    fn is_output(&self) -> bool {
        K::ROLE.0 == Role::Produce
    }

    fn has_ended(&self) -> bool {
        self.has_ended()
    }

    fn stats(&self) -> PortStats {
        PortStats { traffic: self.traffic, connections: 1 }
    }

    fn watch(&mut self, waker: &Waker) {
        self.link.watch(waker);
    }

    fn idle(&mut self) {
        self.link.rest();
    }

    fn linked(&mut self) -> Option<&mut dyn LinkedPort> {
        Some(self)
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> LinkedPort for Linked<K, T, S> {
    fn commit_run(&mut self) -> Result<()> {
        if let Some(failed) = self.failed.as_ref().filter(|failed| !failed.was_retrieved()) {
            return Err(failed.error.clone());
        }
        if self.by_hand {
            return Ok(());
        }
        if self.chunk.as_ref().is_some_and(Chunk::is_untouched) {
            self.give_back();
        }
        self.commit_chunk()
    }

    fn release(&mut self) {
        self.chunk = None;
        // The next run gets a chunk if the cause no longer applies, otherwise the error again that the last run did not
        // retrieve.
        self.refused = None;
        let _ = self.failed.take_if(|failed| failed.was_retrieved());
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> Port for Linked<K, T, S> {
    type Handle = LinkHandle<K, T, S>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> LinkHandle<K, T, S> {
        LinkHandle { id: plan.add_link(name, K::ROLE.0, options), of: PhantomData }
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        Ok(Self {
            link: binder.end(name)?,
            chunk: None,
            refused: None,
            failed: None,
            name,
            is_required: !options.is_optional(),
            by_hand: options.by_hand,
            traffic: Traffic::default(),
            context: binder.context.clone(),
        })
    }

    fn poll_ready(&mut self, _before: Readiness, cx: &mut Context<'_>) -> Readiness {
        let readiness = self.poll_link(cx);
        // An operator that does not need a chunk is woken for one even so, if it waits for something else.
        if self.is_required { readiness } else { Readiness::READY }
    }

    fn claim(&mut self) -> bool {
        if self.chunk.is_some() || self.failed.is_some() {
            return true;
        }
        let taken = self.refused.take().map_or_else(|| self.link.take(), Err);
        match taken {
            Ok(Some(chunk)) => {
                if K::ROLE.0 != Role::Produce {
                    self.traffic.add((chunk.len() * size_of::<T>()) as u64);
                }
                self.chunk = Some(chunk);
                true
            }
            Ok(None) if self.is_required => false,
            Ok(None) => {
                // Other links must not queue behind a run that has no chunk.
                self.link.rest();
                true
            }
            Err(error) => {
                let is_gone = K::ROLE.0 != Role::Produce && error.is_device_lost();
                self.failed = Some(Failed { error, retrieved: AtomicBool::new(!is_gone) });
                true
            }
        }
    }

    fn give_back(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            chunk.put_back();
        }
    }

    fn visit_handle(handle: LinkHandle<K, T, S>, visitor: &mut impl HandleVisitor) {
        visitor.link(handle.id);
    }
}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> LinkPort<K> for Linked<K, T, S> {}

impl<K: ChunkRole, T: Plain, S: Clone + Send + Sync + 'static> fmt::Debug for Linked<K, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Linked").field("link", &self.link).field("chunk", &self.chunk).finish_non_exhaustive()
    }
}

/// A port to link to a hub of chunks, with [`Flow::link`](crate::Flow::link); also a destination of
/// [`flow_to`](crate::ChunkHub::flow_to).
pub struct LinkHandle<K, T, S> {
    pub(crate) id: PortId,
    #[allow(clippy::type_complexity)]
    of: PhantomData<fn(K, T, S) -> (K, T, S)>,
}

impl<K, T, S> LinkHandle<K, T, S> {
    pub(crate) fn link_name(&self) -> LinkName {
        LinkName::Port(self.id.flow, self.id.operator, self.id.port)
    }
}

impl<K: ChunkRole, T, S> Destination for LinkHandle<K, T, S> {
    fn name(&self) -> DestinationName {
        DestinationName::of_port(self.link_name(), K::ROLE.0)
    }
}

impl<K, T, S> From<LinkHandle<K, T, S>> for PortId {
    fn from(handle: LinkHandle<K, T, S>) -> Self {
        handle.id
    }
}

impl<K, T, S> Clone for LinkHandle<K, T, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K, T, S> Copy for LinkHandle<K, T, S> {}

impl<K, T, S> fmt::Debug for LinkHandle<K, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LinkHandle").field(&self.id).finish()
    }
}
