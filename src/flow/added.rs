//! [`Added`]: an operator that was added to a flow, and its placement.

use std::{fmt, ops::Deref, sync::Arc};

use crate::{
    condition::{IntoCondition, When},
    device::Device,
    hub::{ChunkHub, MergePolicy, chunks::core::ChunkHubView},
    memory::{Allocator, Plain},
    operator::operator_streams::OwnStreams,
    stream::StreamPool,
    sync::{Mutex, lock},
};

/// An operator that was added to a flow: the handles of its ports, and methods that set where and when it runs.
///
/// The handles are its fields: `upper.lines`, `upper.shouted`.
#[derive(Clone)]
pub struct Added<H> {
    pub(super) handles: H,
    pub(super) name: Arc<str>,
    pub(super) place: Arc<Mutex<OperatorSlot>>,
}

impl<H> Added<H> {
    /// Puts the operator on a device: its stream belongs to that device, and hubs copy envelopes there. The default is
    /// the host.
    pub fn on(self, device: &Device) -> Self {
        let replaced = lock(&self.place).device.replace(device.clone());
        drop(replaced);
        self
    }

    /// Takes the operator's streams from this pool instead of its device's default pool. Several operators may share a
    /// pool; if its maximum is below their number, a warning is logged. A pool of another device is an error when the
    /// flow runs.
    ///
    /// ```
    /// use wakeline::{prelude::*, operator::sink};
    ///
    /// # let device = Device::emulated(Emulated::new());
    /// let urgent = StreamPool::builder(&device).name("urgent").priority(-1).build()?;
    /// let mut flow = Flow::new("two");
    /// let one = flow.add("one", sink(async |_: u32| Ok(()))).on(&device).streams(&urgent);
    /// let two = flow.add("two", sink(async |_: u32| Ok(()))).on(&device).streams(&urgent);
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    pub fn streams(self, pool: &StreamPool) -> Self {
        let replaced = lock(&self.place).pool.replace(pool.clone());
        drop(replaced);
        self
    }

    /// Takes the operator's memory ([`Cx::alloc`](crate::Cx::alloc)) from this allocator instead of its device's own.
    /// An allocator of another device is an error when the flow runs.
    ///
    /// ```
    /// use wakeline::{prelude::*, memory::Allocator, operator::sink};
    ///
    /// # let device = Device::emulated(Emulated::new());
    /// let scratch = Allocator::blocks(&device, 1 << 20, 4)?;
    /// let mut flow = Flow::new("one");
    /// let one = flow.add("one", sink(async |_: u32| Ok(()))).on(&device).allocator(&scratch);
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    pub fn allocator(self, allocator: &Allocator) -> Self {
        let replaced = lock(&self.place).allocator.replace(allocator.clone());
        drop(replaced);
        self
    }

    /// Gives the operator no stream of its own: it uses the streams of the messages that it receives. See
    /// [`Cx::stream`](crate::Cx::stream). Combining this with a [pool](Self::streams) is an error when the flow runs.
    pub fn without_own_stream(self) -> Self {
        lock(&self.place).without_own_stream = true;
        self
    }

    /// Adds a condition: the operator runs only when this one, all those of its ports and all others added here are
    /// ready. A port that the condition names loses its default condition.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wakeline::{Flow, condition::{count, every}, operator::source};
    ///
    /// let mut flow = Flow::new("ten ticks");
    /// let ticks = flow
    ///     .add("ticks", source(async || Ok(Some(()))))
    ///     .when(every(Duration::from_millis(10)))
    ///     .when(count(10));
    /// ```
    ///
    /// See [`condition`](crate::condition) for all conditions.
    pub fn when(self, condition: impl IntoCondition) -> Self {
        let condition = condition.into_condition();
        lock(&self.place).conditions.push(condition);
        self
    }

    /// Sets how [`Metadata`](crate::hub::Metadata) of the same name is merged when one run takes several messages. The
    /// default is [`MergePolicy::Update`].
    pub fn merge_metadata(self, policy: MergePolicy) -> Self {
        lock(&self.place).merge = policy;
        self
    }

    /// Declares that the operator's [`start`](crate::Operator::start) puts the first chunks into this hub, through a
    /// link that it creates. Without this declaration, a flow whose operators read an empty hub without a producer is
    /// an error.
    ///
    /// The flow fails if `start` leaves the hub empty and without a producing link.
    ///
    /// ```
    /// use wakeline::{operator::Modify, prelude::*};
    ///
    /// #[derive(Ports)]
    /// struct CountPorts {
    ///     #[modify]
    ///     number: Modify<u32>,
    /// }
    ///
    /// /// Counts to ten, from zero.
    /// struct Count(ChunkHub<u32>);
    ///
    /// impl Operator for Count {
    ///     type Ports = CountPorts;
    ///
    ///     async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
    ///         self.0.produce(&Device::host())?.with(async |blank| blank.fill_from(&[0]).await).await?;
    ///         Ok(())
    ///     }
    ///
    ///     async fn compute(&mut self, ports: &mut CountPorts, cx: &mut Cx) -> Result<()> {
    ///         let number = ports.number.get_mut()?.write().await?;
    ///         number[0] += 1;
    ///         if number[0] == 10 {
    ///             cx.finish();
    ///         }
    ///         Ok(())
    ///     }
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let number = ChunkHub::<u32>::builder("number").elements(1).host_envelopes(1).build()?;
    /// let mut flow = Flow::new("count");
    /// let count = flow.add("count", Count(number.clone())).fills(&number);
    /// flow.link(count.number, &number);
    /// flow.run().await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn fills<T: Plain, S: Clone + Send + Sync + 'static>(self, hub: &ChunkHub<T, S>) -> Self {
        lock(&self.place).fills.push(hub.state());
        self
    }

    /// Runs the operator on its own thread, which has the operator's name: `start`, every run, `may_run`, `after`,
    /// `stop`, and the drop after an abort. Use it for an operator that blocks, or whose library must be called from
    /// one thread. The thread is started and joined by the flow.
    ///
    /// The operator may block for any length of time: the runtime's other tasks continue, even on a single-threaded
    /// runtime. Only its own flow may have to wait for it: for its messages, and, when it is stopped or aborted, for
    /// its current operation, since it is dropped at its next `await`. Tokio's timers, sockets and `tokio::spawn` work
    /// as usual, and so do calls that refuse to block on a worker thread, such as `blocking_recv`.
    ///
    /// An operator without its own thread that blocks its worker for 100 ms or more is named in the log the third
    /// time.
    ///
    /// A flow that was [spawned](super::Flow::spawn) also drops the operator on that thread;
    /// [`Flow::run`](super::Flow::run) keeps the operator for the next run, on another thread. In a
    /// [`Simulation`](crate::device::Simulation), which has no threads, it is an ordinary task.
    ///
    /// It cannot be combined with [`concurrent`](crate::operator::concurrent), whose runs are separate tasks: that is
    /// an error before the flow runs.
    ///
    /// ```
    /// use wakeline::{prelude::*, operator::{sink, source}};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("compress");
    /// let mut blocks = (0..4_u8).map(|n| vec![n; 1 << 10]);
    /// let read = flow.add("read", source(move || std::future::ready(Ok(blocks.next()))));
    /// let write = flow.add("write", sink(async |block: Vec<u8>| Ok(std::fs::write("/dev/null", block)?)));
    /// flow.connect(read.output, write.input);
    /// let _write = write.on_own_thread();
    /// flow.run().await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn on_own_thread(self) -> Self {
        lock(&self.place).own_thread = Some(ThreadPlan { core: None });
        self
    }

    /// Like [`on_own_thread`](Self::on_own_thread), with the thread pinned to a core, counted from 0. If the thread
    /// cannot be pinned to that core, the flow fails before it runs. This is the case for every core on systems other
    /// than Linux.
    pub fn on_own_thread_pinned(self, core: usize) -> Self {
        lock(&self.place).own_thread = Some(ThreadPlan { core: Some(core) });
        self
    }

    /// The device that the operator was put on.
    pub(crate) fn device(&self) -> Option<Device> {
        lock(&self.place).device.clone()
    }

    /// The name of the operator.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl<H> Deref for Added<H> {
    type Target = H;

    fn deref(&self) -> &H {
        &self.handles
    }
}

impl<H> fmt::Debug for Added<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Added").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The placement of an operator.
#[derive(Debug, Default)]
pub(super) struct OperatorSlot {
    pub(super) device: Option<Device>,
    /// The pool of the operator's own streams, if one was given.
    pub(super) pool: Option<StreamPool>,
    /// The operator has no stream of its own. Together with a pool, this is an error.
    pub(super) without_own_stream: bool,
    pub(super) allocator: Option<Allocator>,
    /// Empty while the flow runs.
    pub(super) conditions: Vec<When>,
    pub(super) merge: MergePolicy,
    pub(super) own_thread: Option<ThreadPlan>,
    /// Hubs that the operator's `start` puts chunks into.
    pub(super) fills: Vec<Arc<dyn ChunkHubView>>,
}

impl OperatorSlot {
    pub(super) fn streams(&self) -> OwnStreams {
        match &self.pool {
            _ if self.without_own_stream => OwnStreams::None,
            Some(pool) => OwnStreams::Pool(pool.clone()),
            None => OwnStreams::Default,
        }
    }
}

/// The request for an operator's own thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThreadPlan {
    pub(super) core: Option<usize>,
}
