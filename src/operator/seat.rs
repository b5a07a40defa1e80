//! [`Seat`]: an operator in its place in a flow, whatever its type.
//!
//! What knows the operator's own type is behind one trait object, [`ErasedOperator`], which is called once for each phase: the runs and
//! the messages in between are the operator's own, and everything around them is compiled once for all operators.

use std::{
    any::Any,
    collections::HashMap,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures::future::BoxFuture;
use pin_project_lite::pin_project;

use super::{
    Binder, Cx, Operator, Plan, Ports, Traffic,
    control::Control,
    cx::Uncaptured,
    lane::OwnStreams,
    member::reader_gone,
    node::{Method, Node},
    ports::AllPorts,
};
use crate::{
    condition::{Gates, When},
    device::Device,
    error::{Error, ErrorKind, Result, said},
    hub::MergePolicy,
    memory::Allocator,
    stream::{CompletionMode, DeviceTime, Ticket},
    sync::discard,
};

/// The ends of an operator's hubs, by port, each port's in the order of connecting.
pub(crate) type Ends = HashMap<&'static str, Vec<Box<dyn Any + Send>>>;

/// What an operator did in one run of its flow.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) runs: u64,
    /// In ticks.
    pub(crate) busy: u64,
    pub(crate) received: Traffic,
    pub(crate) sent: Traffic,
    pub(crate) device: Option<DeviceTime>,
    /// Bytes that it had in use at once of the memory that it allocated.
    pub(crate) memory_peak: u64,
}

/// What an operator was given when it was added.
pub(crate) struct Setting {
    pub(crate) name: Arc<str>,
    pub(crate) device: Device,
    pub(crate) streams: OwnStreams,
    pub(crate) allocator: Option<Allocator>,
    pub(crate) conditions: Vec<When>,
    pub(crate) merge: MergePolicy,
    /// It has a thread of its own.
    pub(crate) may_block: bool,
}

impl Tally {
    fn add_traffic(&mut self, ports: &mut dyn AllPorts) {
        ports.visit_all(&mut |_, port| {
            let traffic = port.traffic();
            let sum = if port.is_output() { &mut self.sent } else { &mut self.received };
            sum.messages += traffic.messages;
            sum.bytes = sum.bytes.saturating_add(traffic.bytes);
        });
    }
}

/// What a flow says to all of its operators.
pub(crate) struct Surroundings {
    pub(crate) how: How,
    pub(crate) gates: Gates,
    pub(crate) control: Arc<Control>,
    /// Begins a task of this name where the flow's others are.
    pub(crate) spawn: Spawn,
}

pub(crate) type Spawn = fn(&str, BoxFuture<'static, ()>);

/// What a flow says of its operators' streams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(crate) mode: CompletionMode,
    /// Their runs are timed on the device.
    pub(crate) timed: bool,
}

/// One operator, its ports while it runs, and its surroundings.
pub(crate) struct Seat {
    pub(super) operator: Box<dyn ErasedOperator>,
    pub(super) cx: Option<Cx>,
    /// While it is captured: what it has beside the capture.
    pub(super) in_capture: Option<Uncaptured>,
    tally: Tally,
    /// For the flow's next run.
    conditions: Vec<When>,
}

/// An operator and its ports, whatever their types.
pub(super) trait ErasedOperator: Send {
    /// Gives it its ports. Those that it has are dropped, or kept aside until [`restore`](Self::restore).
    fn bind(&mut self, binder: &mut Binder<'_>, keeps: bool) -> Result<()>;
    /// Its ports are those that are kept aside, if there are any.
    fn restore(&mut self);
    fn ports(&mut self) -> Result<&mut dyn AllPorts>;
    /// Drops its ports. A panic of a port's destructor goes on.
    fn close(&mut self);
    /// Drops all that it has of ports, one by one: a panic of one destructor leaves the others, and ends there.
    fn discard_ports(&mut self);
    fn start<'a>(&'a mut self, cx: &'a mut Cx) -> BoxFuture<'a, Result<()>>;
    fn run<'a>(&'a mut self, cx: &'a mut Cx) -> Result<BoxFuture<'a, Result<()>>>;
    fn compute<'a>(&'a mut self, cx: &'a mut Cx) -> Result<BoxFuture<'a, Result<()>>>;
    fn stop<'a>(&'a mut self, cx: &'a mut Cx) -> BoxFuture<'a, Result<()>>;
    /// Calls its `may_run` and `after`, whose defaults say that they are none of its own.
    fn call_others(&mut self, cx: &mut Cx) -> Result<()>;
}

struct OperatorCell<O: Operator> {
    operator: O,
    ports: Option<O::Ports>,
    /// Its own, while it is captured.
    aside: Option<O::Ports>,
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
            self.aside = before;
        }
        Ok(())
    }

    fn restore(&mut self) {
        if let Some(ports) = self.aside.take() {
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
        discard(self.aside.take());
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

    fn call_others(&mut self, cx: &mut Cx) -> Result<()> {
        let (operator, ports) = self.parts()?;
        let _ = operator.may_run(ports, cx);
        drop(operator.after(ports, cx));
        Ok(())
    }
}

/// What is a user's is dropped one by one: a panic of one destructor leaves the others.
impl Drop for Seat {
    fn drop(&mut self) {
        self.operator.discard_ports();
        discard(self.in_capture.take());
        discard(self.cx.take());
    }
}

/// An operator and what it declared.
pub(crate) fn seat<O: Operator>(operator: O, flow: u64, index: usize) -> (Seat, Plan, <O::Ports as Ports>::Handles) {
    let mut plan = Plan { flow, operator: index, ports: Vec::new(), conditions: Vec::new() };
    let handles = O::Ports::declare(&mut plan);
    (Seat::new(Box::new(OperatorCell { operator, ports: None, aside: None })), plan, handles)
}

/// A panic becomes an error, with what it said: also one of the future's destructor, which runs as soon as it has resolved. Through
/// a `dyn`, so that hardly anything of this is compiled once more for each future.
pub(crate) fn caught<F: Future<Output = Result<()>>>(future: F) -> Caught<F> {
    Caught { future: Some(future) }
}

pin_project! {
    /// See [`caught`].
    pub(crate) struct Caught<F> {
        #[pin]
        future: Option<F>,
    }
}

impl<F: Future<Output = Result<()>>> Future for Caught<F> {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<()>> {
        let mut this = self.project();
        let Some(future) = this.future.as_mut().as_pin_mut() else { return Poll::Pending };
        let outcome = ready!(poll_caught(future, task));
        Poll::Ready(outcome.and(caught_call(&mut || this.future.set(None))))
    }
}

fn poll_caught(future: Pin<&mut dyn Future<Output = Result<()>>>, task: &mut Context<'_>) -> Poll<Result<()>> {
    catch_unwind(AssertUnwindSafe(|| future.poll(task))).unwrap_or_else(|panic| Poll::Ready(panicked(panic)))
}

/// A panic of a function becomes an error.
pub(super) fn caught_call(call: &mut dyn FnMut()) -> Result<()> {
    catch_unwind(AssertUnwindSafe(call)).or_else(panicked)
}

#[cold]
fn panicked(panic: Box<dyn Any + Send>) -> Result<()> {
    Err(Error::new(ErrorKind::Panicked, said(panic)))
}

/// An error for a `may_run` or an `after` beside a `run` of the operator's own, which does not call it: only the trait's `run` does.
fn none_was_missed(node: &Node) -> Result<()> {
    for (method, name) in [(Method::MayRun, "may_run"), (Method::After, "after")] {
        if !node.is_default(method) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "it has a `run` of its own, which never called its `{name}`: do that in `run`, and remove `{name}`"
                ),
            ));
        }
    }
    Ok(())
}

/// An operator's ports become those of these ends.
pub(super) fn bind(operator: &mut dyn ErasedOperator, cx: &Cx, ends: &mut Ends, keeps: bool) -> Result<()> {
    let (lane, carry, named) = (cx.lane.clone(), cx.carry().clone(), cx.named().clone());
    operator.bind(&mut Binder { lane, carry, named: &named, ends }, keeps)
}

pub(super) fn unbound() -> Error {
    Error::new(ErrorKind::Usage, "an operator runs only as part of a flow")
}

impl Seat {
    fn new(operator: Box<dyn ErasedOperator>) -> Self {
        Self { operator, cx: None, in_capture: None, tally: Tally::default(), conditions: Vec::new() }
    }

    /// Gives it its surroundings. From here on it can be stopped.
    pub(crate) fn enter(&mut self, setting: Setting, node: Arc<Node>, flow: Arc<Surroundings>) {
        self.cx = Some(Cx::new(setting, node, flow));
        self.tally = Tally::default();
    }

    /// Gives it its ends.
    pub(crate) fn bind(&mut self, mut ends: Ends) -> Result<()> {
        let cx = self.cx.as_mut().ok_or_else(unbound)?;
        bind(&mut *self.operator, cx, &mut ends, false)?;
        self.operator.ports()?.visit_all(&mut |_, port| {
            cx.ports_tell |= port.tells();
            cx.linked |= port.is_linked();
        });
        Ok(())
    }

    pub(crate) async fn start(&mut self) -> Result<()> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        caught(async {
            cx.start_conditions();
            operator.start(cx).await
        })
        .await
    }

    /// All runs. Its ports are open until it is closed.
    pub(crate) async fn run(&mut self) -> Result<()> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        let (node, carry) = (cx.node().clone(), cx.carry().clone());
        let mut ran = {
            let mut run = pin!(caught(operator.run(cx)?));
            poll_fn(|task| carry.within(|| run.as_mut().poll(task))).await
        };
        ran = cx.take_failure().map_or(Ok(()), Err).and(ran);
        if ran.is_ok() {
            // Of one with a loop of its own, which ended in a run.
            ran = cx.commit(operator.ports()?);
        }
        if ran.is_ok() && !node.is_default(Method::Run) {
            let mut called = Ok(());
            ran = caught_call(&mut || called = operator.call_others(cx))
                .and(called)
                .and_then(|()| none_was_missed(&node));
        }
        // A reader may end between an operator's condition and its send. The end walks the flow both ways: this operator
        // ends, too.
        if ran.as_ref().is_err_and(Error::is_reader_gone) && reader_gone(operator.ports()?) {
            ran = Ok(());
        }
        ran
    }

    pub(crate) async fn stop(&mut self) -> Result<()> {
        // Gone afterwards: its streams go back to their pool.
        let mut cx = self.cx.take().ok_or_else(unbound)?;
        let stopped = caught(async { self.operator.stop(&mut cx).await }).await;
        stopped.and(cx.stopped(&mut self.tally, &mut self.conditions))
    }

    /// Resolves once the tasks that it had beside its own are gone.
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
            self.tally.runs = cx.runs;
            self.tally.busy = cx.busy;
        }
        self.operator.close();
    }

    /// The last work that its streams were given.
    pub(crate) fn last(&self) -> Vec<Ticket> {
        self.cx.as_ref().map(Cx::last).unwrap_or_default()
    }

    pub(crate) fn tally(&self) -> Tally {
        self.tally.clone()
    }

    /// What it was given when it was added, back after its `stop`.
    pub(crate) fn conditions(&mut self) -> Vec<When> {
        std::mem::take(&mut self.conditions)
    }
}
