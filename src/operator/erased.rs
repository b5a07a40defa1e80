//! [`BoxedOperator`]: an operator in a flow, independent of its type.
//!
//! The code that depends on the operator's type is behind one trait object, [`ErasedOperator`], which is called once
//! for each phase: the runs and the messages in between are compiled per operator, and everything around them is
//! compiled once for all operators.

use std::{collections::HashMap, sync::Arc};

use futures::future::BoxFuture;

use super::{
    Binder, Cx, Operator, Plan, Ports,
    cx::WorkContext,
    operator_task::{Method, OperatorTask},
    plan::AnyEnd,
    ports::{AllPorts, reader_gone},
    settings::{FlowContext, OperatorSettings, OperatorStats},
};
use crate::{
    condition::When,
    error::{Error, ErrorKind, Result, caught, caught_call},
    stream::Ticket,
    sync::discard,
};

/// The hub ends of an operator, by port, in the order of connecting.
pub(crate) type PortEnds = HashMap<&'static str, Vec<AnyEnd>>;

/// One operator, its ports while it runs, and its context.
pub(crate) struct BoxedOperator {
    pub(super) operator: Box<dyn ErasedOperator>,
    pub(super) cx: Option<Cx>,
    /// The context outside the capture, while the operator is captured.
    pub(super) in_capture: Option<WorkContext>,
    tally: OperatorStats,
    /// The conditions, for the flow's next run.
    conditions: Vec<When>,
}

/// An operator and its ports, independent of their types.
pub(super) trait ErasedOperator: Send {
    /// Binds the ports. Previous ports are dropped or, if `keeps` is set, put aside until [`restore`](Self::restore).
    fn bind(&mut self, binder: &mut Binder<'_>, keeps: bool) -> Result<()>;
    /// Restores the ports that were put aside, if any.
    fn restore(&mut self);
    fn ports(&mut self) -> Result<&mut dyn AllPorts>;
    /// Drops the ports. A panic of a port's destructor is propagated.
    fn close(&mut self);
    /// Drops all ports, one by one: a panic of a destructor is caught and does not affect the others.
    fn discard_ports(&mut self);
    fn start<'a>(&'a mut self, cx: &'a mut Cx) -> BoxFuture<'a, Result<()>>;
    fn run<'a>(&'a mut self, cx: &'a mut Cx) -> Result<BoxFuture<'a, Result<()>>>;
    fn compute<'a>(&'a mut self, cx: &'a mut Cx) -> Result<BoxFuture<'a, Result<()>>>;
    fn stop<'a>(&'a mut self, cx: &'a mut Cx) -> BoxFuture<'a, Result<()>>;
    /// Calls `may_run` and `after`, whose default implementations record that they are not overridden.
    fn call_overridable(&mut self, cx: &mut Cx) -> Result<()>;
}

struct OperatorCell<O: Operator> {
    operator: O,
    ports: Option<O::Ports>,
    /// The ports outside the capture, while the operator is captured.
    outside_capture: Option<O::Ports>,
}

impl<O: Operator> OperatorCell<O> {
    fn parts(&mut self) -> Result<(&mut O, &mut O::Ports)> {
        self.ports.as_mut().map(|ports| (&mut self.operator, ports)).ok_or_else(unbound)
    }
}

impl<O: Operator> ErasedOperator for OperatorCell<O> {
    fn bind(&mut self, binder: &mut Binder<'_>, keeps: bool) -> Result<()> {
        let before = self.ports.replace(O::Ports::bind(binder)?);
        if keeps {
            self.outside_capture = before;
        }
        Ok(())
    }

    fn restore(&mut self) {
        if let Some(ports) = self.outside_capture.take() {
            self.ports = Some(ports);
        }
    }

    fn ports(&mut self) -> Result<&mut dyn AllPorts> {
        self.parts().map(|(_, ports)| ports as &mut dyn AllPorts)
    }

    fn close(&mut self) {
        self.ports = None;
    }

    fn discard_ports(&mut self) {
        discard(self.ports.take());
        discard(self.outside_capture.take());
    }

    fn start<'a>(&'a mut self, cx: &'a mut Cx) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.operator.start(cx))
    }

    fn run<'a>(&'a mut self, cx: &'a mut Cx) -> Result<BoxFuture<'a, Result<()>>> {
        let (operator, ports) = self.parts()?;
        Ok(Box::pin(operator.run(ports, cx)))
    }

    fn compute<'a>(&'a mut self, cx: &'a mut Cx) -> Result<BoxFuture<'a, Result<()>>> {
        let (operator, ports) = self.parts()?;
        Ok(Box::pin(operator.compute(ports, cx)))
    }

    fn stop<'a>(&'a mut self, cx: &'a mut Cx) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.operator.stop(cx))
    }

    fn call_overridable(&mut self, cx: &mut Cx) -> Result<()> {
        let (operator, ports) = self.parts()?;
        let _ = operator.may_run(ports, cx);
        drop(operator.after(ports, cx));
        Ok(())
    }
}

/// User values are dropped one by one: a panic of one destructor does not affect the others.
impl Drop for BoxedOperator {
    fn drop(&mut self) {
        self.operator.discard_ports();
        discard(self.in_capture.take());
        discard(self.cx.take());
    }
}

/// Boxes an operator, and declares its ports.
pub(crate) fn boxed<O: Operator>(
    operator: O,
    flow: u64,
    index: usize,
) -> (BoxedOperator, Plan, <O::Ports as Ports>::Handles) {
    let mut plan = Plan { flow, operator: index, ports: Vec::new(), conditions: Vec::new() };
    let handles = O::Ports::declare(&mut plan);
    (BoxedOperator::new(Box::new(OperatorCell { operator, ports: None, outside_capture: None })), plan, handles)
}

/// An error for an overridden `may_run` or `after` in an operator that also overrides `run`: only the trait's `run`
/// calls them.
fn check_overrides(node: &OperatorTask) -> Result<()> {
    for (method, name) in [(Method::MayRun, "may_run"), (Method::After, "after")] {
        if !node.is_default(method) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "`{name}` had no effect: the operator's own `run` never called its `{name}`. Move that code into `run`, \
                     and remove `{name}`"
                ),
            ));
        }
    }
    Ok(())
}

/// Binds an operator's ports to these ends.
pub(super) fn bind(operator: &mut dyn ErasedOperator, cx: &Cx, ends: &mut PortEnds, keeps: bool) -> Result<()> {
    let (streams, context, named) = (cx.streams().cloned(), cx.context().clone(), cx.named().clone());
    operator.bind(&mut Binder { streams, context, named: &named, ends }, keeps)
}

pub(super) fn unbound() -> Error {
    Error::new(ErrorKind::Usage, "an operator runs only as part of a flow")
}

impl BoxedOperator {
    fn new(operator: Box<dyn ErasedOperator>) -> Self {
        Self { operator, cx: None, in_capture: None, tally: OperatorStats::default(), conditions: Vec::new() }
    }

    /// Gives the operator its context. From here on it can be stopped.
    pub(crate) fn enter(&mut self, setting: OperatorSettings, node: Arc<OperatorTask>, flow: Arc<FlowContext>) {
        self.cx = Some(Cx::new(setting, node, flow));
        self.tally = OperatorStats::default();
    }

    /// Binds its ports to these ends.
    pub(crate) fn bind(&mut self, mut ends: PortEnds) -> Result<()> {
        let cx = self.cx.as_mut().ok_or_else(unbound)?;
        bind(&mut *self.operator, cx, &mut ends, false)?;
        self.operator.ports()?.visit_all(&mut |_, port| {
            cx.run_loop.ports_notify |= port.input_wait().is_some();
            cx.run_loop.linked |= port.linked().is_some();
        });
        Ok(())
    }

    pub(crate) async fn start(&mut self) -> Result<()> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        caught(async {
            cx.run_loop.start_conditions();
            operator.start(cx).await
        })
        .await
    }

    /// Executes all runs. The ports stay open until `close`.
    pub(crate) async fn run(&mut self) -> Result<()> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        let (node, context) = (cx.operator_task().clone(), cx.context().clone());
        let mut ran = context.run(caught(operator.run(cx)?)).await;
        ran = cx.run_loop.take_failure().map_or(Ok(()), Err).and(ran);
        if ran.is_ok() {
            // For an operator with a loop of its own, which ended during a run.
            ran = cx.run_loop.commit(operator.ports()?);
        }
        if ran.is_ok() && !node.is_default(Method::Run) {
            let mut called = Ok(());
            ran = caught_call(&mut || called = operator.call_overridable(cx))
                .and(called)
                .and_then(|()| check_overrides(&node));
        }
        // A reader may end between an operator's condition and its send. The end spreads in both directions: this
        // operator ends as well.
        if ran.as_ref().is_err_and(Error::is_reader_gone) && reader_gone(operator.ports()?) {
            ran = Ok(());
        }
        ran
    }

    pub(crate) async fn stop(&mut self) -> Result<()> {
        // Dropped at the end of this function: its streams return to their pool.
        let mut cx = self.cx.take().ok_or_else(unbound)?;
        let stopped = caught(async { self.operator.stop(&mut cx).await }).await;
        stopped.and(cx.stopped(&mut self.tally, &mut self.conditions))
    }

    /// Resolves once the tasks besides its own have ended.
    pub(crate) async fn settled(&mut self) {
        if let Some(cx) = &mut self.cx {
            cx.settled().await;
        }
    }

    /// Closes its ports.
    pub(crate) fn close(&mut self) {
        let Ok(ports) = self.operator.ports() else { return };
        self.tally.add_traffic(ports);
        if let Some(cx) = &mut self.cx {
            cx.close();
            self.tally.runs = cx.run_loop.runs();
            self.tally.busy = cx.run_loop.busy.total();
        }
        self.operator.close();
    }

    /// The ticket of the last work on each of its streams.
    pub(crate) fn last(&self) -> Vec<Ticket> {
        self.cx.as_ref().map(Cx::last).unwrap_or_default()
    }

    pub(crate) fn tally(&self) -> OperatorStats {
        self.tally.clone()
    }

    /// The conditions with which it was added, available again after its `stop`.
    pub(crate) fn conditions(&mut self) -> Vec<When> {
        std::mem::take(&mut self.conditions)
    }
}
