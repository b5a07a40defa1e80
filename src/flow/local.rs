//! [`LocalFlow`]: a flow that stays on one thread.
//!
//! It is a [`Flow`] whose tasks are spawned on the current thread. It is not `Send`, so its operators are also dropped
//! on that thread. The [`Running`] that [`LocalFlow::spawn`] returns is `Send`, since it never holds the operators.

use std::{marker::PhantomData, rc::Rc};

use super::{Added, Checked, Flow, OnStall, Operators, Report, Running, Section, Steps, Targets, spawn::Threads};
use crate::{
    condition::Gate,
    error::Result,
    hub::{ChunkHub, HubOptionsFor, Message, role::ChunkRole},
    memory::Plain,
    operator::{LinkHandle, LocalOperator, Operator, OutputHandle, Ports, local::LocalAdapter},
    stream::CompletionMode,
};

/// A flow on one thread: its operators need not be `Send`, and may share state without locks. Conditions, hubs,
/// devices, the report and the end are those of a [`Flow`].
///
/// It runs inside a [`LocalSet`], on a runtime of either kind, or on a [`LocalRuntime`], along with other tasks there. See
/// [`LocalOperator`] for an example.
///
/// In a [`Simulation`](crate::device::Simulation) it is simulated like any flow. The simulation must then stay on its
/// thread until the flow has ended.
///
/// A `LocalFlow` cannot be sent to another thread:
///
/// ```compile_fail,E0277
/// let flow = wakeline::flow::LocalFlow::new("here");
/// std::thread::spawn(move || drop(flow));
/// ```
///
/// [`LocalSet`]: https://docs.rs/tokio/1/tokio/task/struct.LocalSet.html
/// [`LocalRuntime`]: https://docs.rs/tokio/1/tokio/runtime/struct.LocalRuntime.html
#[derive(Debug)]
pub struct LocalFlow {
    flow: Flow,
    here: PhantomData<Rc<()>>,
}

impl LocalFlow {
    /// Creates an empty flow.
    pub fn new(name: impl Into<String>) -> Self {
        let flow = Flow { threads: Threads::This, ..Flow::new(name) };
        Self { flow, here: PhantomData }
    }

    /// The flow within, which must stay on this thread.
    pub(crate) fn into_flow(self) -> Flow {
        self.flow
    }

    /// Adds an operator that is `Send`. Only such an operator can be put [on a thread of its
    /// own](Added::on_own_thread).
    pub fn add<O: Operator>(&mut self, name: impl Into<String>, operator: O) -> Added<<O::Ports as Ports>::Handles> {
        self.flow.add(name, operator)
    }

    /// Adds an operator that stays on this thread.
    pub fn add_local<O: LocalOperator>(
        &mut self,
        name: impl Into<String>,
        operator: O,
    ) -> Added<<O::Ports as Ports>::Handles> {
        let added = self.flow.add(name, LocalAdapter::new(operator));
        if let Some(entry) = self.flow.entries.last_mut() {
            entry.stays = true;
        }
        added
    }

    /// See [`Flow::connect`].
    pub fn connect<M: Message>(&mut self, from: OutputHandle<M>, to: impl Targets<M>) {
        self.flow.connect(from, to);
    }

    /// See [`Flow::connect_with`].
    pub fn connect_with<M: Message>(&mut self, from: OutputHandle<M>, to: impl Targets<M>, hub: impl HubOptionsFor<M>) {
        self.flow.connect_with(from, to, hub);
    }

    /// See [`Flow::check`].
    ///
    /// # Errors
    /// See [`Flow::check`].
    pub fn check(&self) -> Result<Checked> {
        self.flow.check()
    }

    /// Like [`Flow::run`], on the current thread.
    ///
    /// # Errors
    /// Those of [`Flow::run`], and [`Usage`](crate::ErrorKind::Usage) outside a `LocalSet` or `LocalRuntime`, in which
    /// case tokio also prints its own message.
    ///
    /// # Cancel safety
    /// Like [`Flow::run`]: the `stop`s of the operators run in the background as long as the `LocalSet` or
    /// `LocalRuntime` does.
    pub async fn run(&mut self) -> Result<Report> {
        self.flow.run().await
    }

    /// Like [`Flow::spawn`], on the current thread. The returned handle may be awaited, stopped and dropped on any
    /// thread.
    ///
    /// # Errors
    /// Those of [`run`](Self::run) for mistakes that are found before anything runs.
    pub fn spawn(self) -> Result<Running> {
        self.flow.spawn()
    }

    /// See [`Flow::gate`].
    pub fn gate(&mut self, name: impl Into<String>) -> Gate {
        self.flow.gate(name)
    }

    /// See [`Flow::set_completion_mode`].
    pub fn set_completion_mode(&mut self, mode: CompletionMode) {
        self.flow.set_completion_mode(mode);
    }

    /// See [`Flow::set_device_times`].
    pub fn set_device_times(&mut self, on: bool) {
        self.flow.set_device_times(on);
    }

    pub(crate) fn flow_mut(&mut self) -> &mut Flow {
        &mut self.flow
    }

    /// See [`Flow::set_on_stall`].
    pub fn set_on_stall(&mut self, on_stall: OnStall) {
        self.flow.set_on_stall(on_stall);
    }

    /// See [`Flow::name`].
    pub fn name(&self) -> &str {
        self.flow.name()
    }

    /// See [`Flow::link`].
    pub fn link<K, T, S>(&mut self, port: LinkHandle<K, T, S>, hub: &ChunkHub<T, S>)
    where
        K: ChunkRole,
        T: Plain,
        S: Clone + Send + Sync + 'static,
    {
        self.flow.link(port, hub);
    }

    /// Like [`Flow::replay`]. The operators must be `Send`: those added with [`add`](Self::add).
    pub fn replay(&mut self, name: impl Into<String>, operators: impl Operators) -> &mut Section {
        self.flow.replay(name, operators)
    }

    /// Like [`Flow::steps`], on the current thread.
    ///
    /// # Errors
    /// Those of [`run`](Self::run) for mistakes that are found before anything runs.
    pub fn steps(self) -> Result<Steps> {
        self.flow.steps()
    }
}
