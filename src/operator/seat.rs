//! An operator in its place in a flow, whatever its type.
//!
//! The trait object is used once for each phase; the runs and the messages in between know the operator's own type.

use std::{
    any::Any,
    collections::HashMap,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use async_trait::async_trait;
use futures::future::BoxFuture;
use pin_project_lite::pin_project;

use super::{
    Binder, Cx, Operator, Plan, Ports, Traffic,
    control::Control,
    lane::OwnStreams,
    member::{AllPorts, Driven, InCapture, reader_gone},
    node::{Method, Node},
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
#[async_trait]
pub(crate) trait Seat: Driven {
    /// Gives it its surroundings. From here on it can be stopped.
    fn enter(&mut self, setting: Setting, node: Arc<Node>, flow: Arc<Surroundings>);
    /// Gives it its ends.
    fn bind(&mut self, ends: Ends) -> Result<()>;
    async fn start(&mut self) -> Result<()>;
    /// All runs. Its ports are open until it is closed.
    async fn run(&mut self) -> Result<()>;
    async fn stop(&mut self) -> Result<()>;
    /// Resolves once the tasks that it had beside its own are gone.
    async fn settled(&mut self);
    /// Closes its ports.
    fn close(&mut self);
    /// The last work that its streams were given.
    fn last(&self) -> Vec<Ticket>;
    fn tally(&self) -> Tally;
    /// What it was given when it was added, back after its `stop`.
    fn conditions(&mut self) -> Vec<When>;
}

pub(crate) struct Place<O: Operator> {
    pub(super) operator: O,
    pub(super) ports: Option<O::Ports>,
    pub(super) cx: Option<Cx>,
    /// While it is captured.
    pub(super) in_capture: Option<InCapture<O::Ports>>,
    tally: Tally,
    /// For the flow's next run.
    conditions: Vec<When>,
}

/// What is a user's is dropped one by one: a panic of one destructor leaves the others.
impl<O: Operator> Drop for Place<O> {
    fn drop(&mut self) {
        discard(self.ports.take());
        discard(self.in_capture.take());
        discard(self.cx.take());
    }
}

/// An operator and what it declared.
pub(crate) fn seat<O: Operator>(
    operator: O,
    flow: u64,
    index: usize,
) -> (Box<dyn Seat>, Plan, <O::Ports as Ports>::Handles) {
    let mut plan = Plan { flow, operator: index, ports: Vec::new(), conditions: Vec::new() };
    let handles = O::Ports::declare(&mut plan);
    let place =
        Place { operator, ports: None, cx: None, in_capture: None, tally: Tally::default(), conditions: Vec::new() };
    (Box::new(place), plan, handles)
}

/// A panic becomes an error, with what it said: also one of the future's destructor, which runs as soon as it has resolved.
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
        let polled = catch_unwind(AssertUnwindSafe(|| match this.future.as_mut().as_pin_mut() {
            Some(future) => future.poll(task),
            None => Poll::Pending,
        }));
        let outcome = match polled {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(outcome)) => outcome,
            Err(panic) => panicked(panic),
        };
        Poll::Ready(outcome.and(caught_call(&mut || this.future.set(None))))
    }
}

/// The same for a future that is not polled for each message: through a `dyn`, so that hardly anything of this is compiled once more
/// for each operator.
pub(super) fn caught_aside<F: Future<Output = Result<()>>>(future: F) -> CaughtAside<F> {
    CaughtAside { future: Some(future) }
}

pin_project! {
    /// See [`caught_aside`].
    pub(super) struct CaughtAside<F> {
        #[pin]
        future: Option<F>,
    }
}

impl<F: Future<Output = Result<()>>> Future for CaughtAside<F> {
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

/// An operator with a `run` of its own has no other methods that only the trait's own `run` calls: nobody writes one that
/// then is never called, and does not hear of it.
fn nothing_left_out<O: Operator>(operator: &mut O, ports: &mut O::Ports, cx: &mut Cx) -> Result<()> {
    let node = cx.node().clone();
    let _ = operator.may_run(ports, cx);
    drop(operator.after(ports, cx));
    none_was_missed(&node)
}

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

/// An operator's ports, with these ends.
pub(super) fn bound<P: Ports>(cx: &Cx, ends: &mut Ends) -> Result<P> {
    let (lane, carry, named) = (cx.lane.clone(), cx.carry().clone(), cx.named().clone());
    P::bind(&mut Binder { lane, carry, named: &named, ends })
}

pub(super) fn unbound() -> Error {
    Error::new(ErrorKind::Usage, "an operator runs only as part of a flow")
}

#[async_trait]
impl<O: Operator> Seat for Place<O> {
    fn enter(&mut self, setting: Setting, node: Arc<Node>, flow: Arc<Surroundings>) {
        self.cx = Some(Cx::new(setting, node, flow));
        self.tally = Tally::default();
    }

    fn bind(&mut self, mut ends: Ends) -> Result<()> {
        let cx = self.cx.as_mut().ok_or_else(unbound)?;
        let mut ports: O::Ports = bound(cx, &mut ends)?;
        ports.visit(&mut |_, port| {
            cx.ports_tell |= port.tells();
            cx.linked |= port.is_linked();
        });
        self.ports = Some(ports);
        Ok(())
    }

    async fn start(&mut self) -> Result<()> {
        let cx = self.cx.as_mut().ok_or_else(unbound)?;
        caught_aside(async {
            cx.start_conditions();
            self.operator.start(cx).await
        })
        .await
    }

    async fn run(&mut self) -> Result<()> {
        let (Some(cx), Some(ports)) = (&mut self.cx, &mut self.ports) else { return Err(unbound()) };
        let (node, carry) = (cx.node().clone(), cx.carry().clone());
        let mut ran = {
            let mut run = pin!(caught(self.operator.run(ports, cx)));
            poll_fn(|task| carry.within(|| run.as_mut().poll(task))).await
        };
        ran = cx.take_failure().map_or(Ok(()), Err).and(ran);
        if ran.is_ok() {
            // Of one with a loop of its own, which ended in a run.
            ran = cx.commit(ports);
        }
        if ran.is_ok() && !node.is_default(Method::Run) {
            let mut left_out = Ok(());
            ran = caught_call(&mut || left_out = nothing_left_out(&mut self.operator, ports, cx)).and(left_out);
        }
        // A reader may end between an operator's condition and its send. The end walks the flow both ways: this operator
        // ends, too.
        if ran.as_ref().is_err_and(Error::is_reader_gone) && reader_gone(ports) {
            ran = Ok(());
        }
        ran
    }

    async fn stop(&mut self) -> Result<()> {
        // Gone afterwards: its streams go back to their pool.
        let mut cx = self.cx.take().ok_or_else(unbound)?;
        let stopped = caught_aside(self.operator.stop(&mut cx)).await;
        stopped.and(cx.stopped(&mut self.tally, &mut self.conditions))
    }

    async fn settled(&mut self) {
        if let Some(cx) = &mut self.cx {
            cx.settled().await;
        }
    }

    fn close(&mut self) {
        let Some(mut ports) = self.ports.take() else { return };
        self.tally.add_traffic(&mut ports);
        if let Some(cx) = &mut self.cx {
            cx.close();
            self.tally.runs = cx.runs;
            self.tally.busy = cx.busy;
        }
    }

    fn last(&self) -> Vec<Ticket> {
        self.cx.as_ref().map(Cx::last).unwrap_or_default()
    }

    fn tally(&self) -> Tally {
        self.tally.clone()
    }

    fn conditions(&mut self) -> Vec<When> {
        std::mem::take(&mut self.conditions)
    }
}
