//! [`LocalFlow`]: a flow that stays on one thread.
//!
//! It is a [`Flow`] whose tasks are spawned on the present thread. It cannot be sent, so that its operators are dropped
//! on that thread too; what [`LocalFlow::spawn`] returns can, since it never holds them.

use std::{marker::PhantomData, rc::Rc};

use super::{Added, Checked, Flow, OnStall, Operators, Report, Running, Section, Steps, Targets, spawn::Threads};
use crate::{
    condition::Gate,
    error::Result,
    hub::{ChunkHub, HubOf, Message, role::DoesWith},
    memory::Plain,
    operator::{LinkHandle, LocalOperator, Operator, OutputHandle, Ports, local::Here},
    stream::CompletionMode,
};

/// A flow on one thread: its operators need not be `Send`, and may share what they have without a lock. Everything else
/// is as in a [`Flow`]: conditions, hubs, devices, the report, how it ends.
///
/// It runs inside a [`LocalSet`](tokio::task::LocalSet), on a runtime of either kind, or on a
/// [`LocalRuntime`](tokio::runtime::LocalRuntime), beside whatever else is spawned there. See [`LocalOperator`] for an
/// example.
///
/// In a [`Simulation`](crate::device::Simulation) it is simulated like any flow; that simulation then has to stay on its
/// thread until the flow has ended.
///
/// It cannot leave its thread:
///
/// ```compile_fail,E0277
/// let flow = wakeline::flow::LocalFlow::new("here");
/// std::thread::spawn(move || drop(flow));
/// ```
#[derive(Debug)]
pub struct LocalFlow {
    flow: Flow,
    here: PhantomData<Rc<()>>,
}

impl LocalFlow {
    /// An empty flow.
    pub fn new(name: impl Into<String>) -> Self {
        let flow = Flow { threads: Threads::This, ..Flow::new(name) };
        Self { flow, here: PhantomData }
    }

    /// As [`Flow::name`].
    pub fn name(&self) -> &str {
        self.flow.name()
    }

    /// As [`Flow::set_completion_mode`].
    pub fn set_completion_mode(&mut self, mode: CompletionMode) {
        self.flow.set_completion_mode(mode);
    }

    /// As [`Flow::device_times`].
    pub fn device_times(&mut self, on: bool) {
        self.flow.device_times(on);
    }

    /// As [`Flow::on_stall`].
    pub fn on_stall(&mut self, on_stall: OnStall) {
        self.flow.on_stall(on_stall);
    }

    /// As [`Flow::gate`].
    pub fn gate(&mut self, name: impl Into<String>) -> Gate {
        self.flow.gate(name)
    }

    /// As [`Flow::replay`], of operators of the kind that can be sent.
    pub fn replay(&mut self, name: impl Into<String>, operators: impl Operators) -> &mut Section {
        self.flow.replay(name, operators)
    }

    /// Adds an operator of the kind that can be sent. Of those here, only such a one can be put
    /// [on a thread of its own](Added::on_own_thread).
    pub fn add<O: Operator>(&mut self, name: impl Into<String>, operator: O) -> Added<<O::Ports as Ports>::Handles> {
        self.flow.add(name, operator)
    }

    /// Adds an operator that stays on this thread.
    pub fn add_local<O: LocalOperator>(
        &mut self,
        name: impl Into<String>,
        operator: O,
    ) -> Added<<O::Ports as Ports>::Handles> {
        let added = self.flow.add(name, Here::new(operator));
        if let Some(entry) = self.flow.entries.last_mut() {
            entry.stays = true;
        }
        added
    }

    /// As [`Flow::connect`].
    pub fn connect<M: Message>(&mut self, from: OutputHandle<M>, to: impl Targets<M>) {
        self.flow.connect(from, to);
    }

    /// As [`Flow::connect_with`].
    pub fn connect_with<M: Message>(&mut self, from: OutputHandle<M>, to: impl Targets<M>, hub: impl HubOf<M>) {
        self.flow.connect_with(from, to, hub);
    }

    /// As [`Flow::link`].
    pub fn link<K, T, S>(&mut self, port: LinkHandle<K, T, S>, hub: &ChunkHub<T, S>)
    where
        K: DoesWith,
        T: Plain,
        S: Clone + Send + Sync + 'static,
    {
        self.flow.link(port, hub);
    }

    /// As [`Flow::check`].
    ///
    /// # Errors
    /// As there.
    pub fn check(&self) -> Result<Checked> {
        self.flow.check()
    }

    /// As [`Flow::run`], on the present thread.
    ///
    /// # Errors
    /// As there, and [`Usage`](crate::ErrorKind::Usage) outside of a `LocalSet` or `LocalRuntime`, for which tokio also
    /// prints its own message.
    ///
    /// # Cancel safety
    /// As there: the operators' `stop`s run in the background while the `LocalSet` or `LocalRuntime` lives.
    pub async fn run(&mut self) -> Result<Report> {
        self.flow.run().await
    }

    /// As [`Flow::steps`], on the present thread.
    ///
    /// # Errors
    /// As [`run`](Self::run), for what can be known before anything runs.
    pub fn steps(self) -> Result<Steps> {
        self.flow.steps()
    }

    /// As [`Flow::spawn`], on the present thread. What it returns may be awaited, stopped and dropped on any.
    ///
    /// # Errors
    /// As [`run`](Self::run), for what can be known before anything runs.
    pub fn spawn(self) -> Result<Running> {
        self.flow.spawn()
    }
}
