//! An operator that was added to a flow, and where it is to run.

use std::{fmt, ops::Deref, sync::Arc};

use crate::{
    condition::{IntoCondition, When},
    device::Device,
    hub::{ChunkHub, MergePolicy, chunks::core::ChunkState},
    memory::{Allocator, Plain},
    operator::lane::OwnStreams,
    stream::StreamPool,
    sync::{Mutex, lock},
};

/// An operator that was added: its ports' handles, and where it is to run.
///
/// The handles are its fields: `upper.lines`, `upper.shouted`.
#[derive(Clone)]
pub struct Added<H> {
    pub(super) handles: H,
    pub(super) name: Arc<str>,
    pub(super) place: Arc<Mutex<Place>>,
}

impl<H> Added<H> {
    /// Puts the operator on a device: its stream is there, and hubs bring envelopes there. On the host if never called.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        let replaced = lock(&self.place).device.replace(device.clone());
        drop(replaced);
        self
    }

    /// Takes the operator's streams from this pool, and not from its device's default one. Several operators may share a
    /// pool; one whose maximum is below their number is warned of when the flow runs, and a pool of another device is an
    /// error then.
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
    #[must_use]
    pub fn streams(self, pool: &StreamPool) -> Self {
        let replaced = lock(&self.place).pool.replace(pool.clone());
        drop(replaced);
        self
    }

    /// Takes the memory that the operator asks for ([`Cx::alloc`](crate::Cx::alloc)) from this allocator, and not from its
    /// device's own. One of another device is an error when the flow runs.
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
    #[must_use]
    pub fn allocator(self, allocator: &Allocator) -> Self {
        let replaced = lock(&self.place).allocator.replace(allocator.clone());
        drop(replaced);
        self
    }

    /// Gives the operator no stream of its own: it works on the streams of the messages that it is given. See
    /// [`Cx::stream`](crate::Cx::stream). With a [pool](Self::streams) as well that is an error when the flow runs.
    #[must_use]
    pub fn without_own_stream(self) -> Self {
        lock(&self.place).without_own_stream = true;
        self
    }

    /// The operator runs only when this is ready, too: with all that its ports wait for, and whatever else was said so. A
    /// port that the condition names loses its default condition.
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
    /// See [`condition`](crate::condition) for all there are.
    #[must_use]
    pub fn when(self, condition: impl IntoCondition) -> Self {
        let condition = condition.into_condition();
        lock(&self.place).conditions.push(condition);
        self
    }

    /// What happens where the operator takes several messages in one run that have [`Metadata`](crate::hub::Metadata) of the
    /// same name; [`MergePolicy::Update`] if nothing is said.
    #[must_use]
    pub fn merge_metadata(self, policy: MergePolicy) -> Self {
        lock(&self.place).merge = policy;
        self
    }

    /// The operator puts the first chunks into this hub in its [`start`](crate::Operator::start), by a link of its own, and has no
    /// port that produces chunks there. Without it a flow whose operators read an empty hub that has no producer is refused.
    ///
    /// A `start` that leaves the hub empty, and without a link that produces, fails the flow.
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
    #[must_use]
    pub fn fills<T: Plain, S: Clone + Send + Sync + 'static>(self, hub: &ChunkHub<T, S>) -> Self {
        lock(&self.place).fills.push(hub.state());
        self
    }

    /// Runs the operator on a thread of its own, which has its name: `start`, every run, `may_run`, `after` and `stop`, and
    /// the drop of what an abort interrupts. For one that blocks, or whose library wants to be called from one thread
    /// alone. The thread begins with the flow and is gone when the flow has ended.
    ///
    /// It may block as long as it likes: the runtime's other tasks go on meanwhile, on a runtime of one thread too. Only
    /// its own flow may have to wait for it: for its messages, and, when it is stopped or aborted, for the end of what it
    /// is doing, since it is dropped at its next `await`. Tokio's timers, sockets and `tokio::spawn` work there as
    /// anywhere, and so does what refuses to block on a worker, such as `blocking_recv`.
    ///
    /// An operator without one that blocks its worker for 100 ms and more is named in the log, at the third time.
    ///
    /// A flow that was [spawned](super::Flow::spawn) drops the operator there as well; [`Flow::run`](super::Flow::run) keeps it for the next
    /// run, on another thread. In a [`Simulation`](crate::device::Simulation), which has no threads, it is a task like
    /// any other.
    ///
    /// The runs of a [`concurrent`](crate::operator::concurrent) operator are tasks of their own: the two together are an
    /// error before the flow runs.
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
    #[must_use]
    pub fn on_own_thread(self) -> Self {
        lock(&self.place).own_thread = Some(ThreadPlan { core: None });
        self
    }

    /// As [`on_own_thread`](Self::on_own_thread), with the thread pinned to a core of the machine, counted from 0. A core
    /// that it cannot be pinned to is an error before the flow runs; so is every core where the system has no pinning
    /// (all but Linux).
    #[must_use]
    pub fn on_own_thread_pinned(self, core: usize) -> Self {
        lock(&self.place).own_thread = Some(ThreadPlan { core: Some(core) });
        self
    }

    /// The operator's name.
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

/// Where an operator is to run.
#[derive(Debug, Default)]
pub(super) struct Place {
    pub(super) device: Option<Device>,
    /// Of its own streams, if one was said; and whether it was asked to have none. Both is an error.
    pub(super) pool: Option<StreamPool>,
    pub(super) without_own_stream: bool,
    pub(super) allocator: Option<Allocator>,
    /// Away while the flow runs.
    pub(super) conditions: Vec<When>,
    pub(super) merge: MergePolicy,
    pub(super) own_thread: Option<ThreadPlan>,
    /// Hubs that the operator's `start` puts chunks into.
    pub(super) fills: Vec<Arc<dyn ChunkState>>,
}

impl Place {
    pub(super) fn streams(&self) -> OwnStreams {
        match &self.pool {
            _ if self.without_own_stream => OwnStreams::None,
            Some(pool) => OwnStreams::Pool(pool.clone()),
            None => OwnStreams::Default,
        }
    }
}

/// An operator's own thread, as asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThreadPlan {
    pub(super) core: Option<usize>,
}
