//! A [`BoxedOperator`] in a section, which drives it round by round.
//!
//! ```text
//!   streamed    round: its ports are ready ──> compute, awaited ──> takes one message per input, sends one per output
//!   captured    enter ──> ports of the capture ──> compute, polled once ──> the same ──> leave: its own ports again
//!   replayed    the operator is not called: its runs are counted
//! ```
//!
//! All three must have the same effect. So the operator may have only a `compute`: a replay would not repeat what it
//! does in a loop of its own, after its device work, or in `may_run`.

use std::{
    future::poll_fn,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::task::coop::unconstrained;

use super::{
    AnyPort, Cx,
    erased::{BoxedOperator, PortEnds, bind, unbound},
    node::{Method, OperatorTask},
    ports::{AllPorts, PortStats, reader_gone},
    run_context::RunContext,
    status_cell::InRun,
};
use crate::{
    condition::Readiness,
    device::human,
    error::{Error, ErrorKind, Result, caught},
    stream::{
        Stream,
        capture::{Capture, Watch},
    },
};

/// The statistics of each port so far.
fn stats(ports: &mut dyn AllPorts) -> Vec<PortStats> {
    let mut all = Vec::new();
    ports.visit_all(&mut |_, port| all.push(port.stats()));
    all
}

/// Checks that in one run each input takes one message of each connection, and each output sends one.
fn one_each(before: &[PortStats], ports: &mut dyn AllPorts) -> Result<()> {
    let mut wrong = None;
    let mut before = before.iter();
    ports.visit_all(&mut |name, port| {
        let Some(PortStats { traffic: before, connections }) = before.next() else { return };
        // A run may have swapped its ports, which are values.
        let passed = port.stats().traffic.without(*before).messages;
        if passed != *connections && wrong.is_none() {
            let does = if port.is_output() { "sends" } else { "takes" };
            wrong = Some(format!(
                "a run of it {does} {} at `{name}`: within a section that is replayed an operator takes one \
                 at each input and sends one at each output, in every run",
                human::count(passed as usize, "message")
            ));
        }
    });
    wrong.map_or(Ok(()), |text| Err(Error::new(ErrorKind::Usage, text)))
}

/// The name of an output that was closed.
fn closed(ports: &mut dyn AllPorts) -> Option<&'static str> {
    let mut closed = None;
    ports.visit_all(&mut |name, port| {
        if port.is_output() && port.poll_room(1, &mut Context::from_waker(Waker::noop())).is_never() {
            closed = Some(name);
        }
    });
    closed
}

fn is_no_replay(what: &str) -> Error {
    let text = format!("{what}, which no replay does: leave the operator out of the section");
    Error::new(ErrorKind::Usage, text)
}

fn none_is_written(node: &OperatorTask) -> Result<()> {
    let methods = [(Method::Run, "run"), (Method::MayRun, "may_run"), (Method::After, "after")];
    match methods.into_iter().find(|(method, _)| !node.is_default(*method)) {
        Some((_, name)) => Err(is_no_replay(&format!("it has its own `{name}`"))),
        None => Ok(()),
    }
}

/// A replay repeats the work and the messages of a captured run: anything else that the run has done is an error.
fn is_replayed_as_it_ran(before: &[PortStats], ports: &mut dyn AllPorts, cx: &Cx, works_beside: bool) -> Result<()> {
    one_each(before, ports)?;
    if let Some(call) = cx.unreplayable() {
        return Err(is_no_replay(call));
    }
    if let Some(name) = closed(ports) {
        return Err(is_no_replay(&format!("it closes `{name}`")));
    }
    if works_beside {
        let text = "it enqueues work on a stream that it has kept from an earlier run, or made: that is in no graph, \
                    and runs now; ask for the stream in each run, `cx.stream()`";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    Ok(())
}

/// The error for a `compute` that was pending.
fn waits(for_what: Option<InRun>) -> Error {
    let what = match for_what {
        Some(InRun::RECEIVES) => "for a message",
        Some(InRun::SENDS) => "for room, or for a blank envelope",
        Some(InRun::ASKS) => "for a response of its own flow's service",
        Some(_) => "for several things at once",
        None => "for something on the host: data, a timer, a channel or another task",
    };
    let text = format!(
        "its `compute` waits {what}: a capture polls it once, and a replay cannot wait; let it only enqueue, or \
         leave the operator out of the section"
    );
    Error::new(ErrorKind::Usage, text)
}

impl BoxedOperator {
    /// An error if the operator overrides methods that a replay would not call.
    pub(crate) fn only_computes(&mut self) -> Result<()> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        let node = cx.node().clone();
        node.forget_defaults();
        operator.call_overridable(cx)?;
        drop(operator.run(cx)?);
        none_is_written(&node)
    }

    /// Visits each of its ports: its own or, in a capture, those of the capture.
    pub(crate) fn visit(&mut self, visit: &mut dyn FnMut(&'static str, &mut dyn AnyPort)) {
        if let Ok(ports) = self.operator.ports() {
            ports.visit_all(visit);
        }
    }

    /// The metadata that its messages carry.
    pub(crate) fn context(&self) -> Result<Arc<RunContext>> {
        self.cx.as_ref().map(|cx| cx.context().clone()).ok_or_else(unbound)
    }

    /// One run. False if no further run is possible.
    pub(crate) async fn round(&mut self) -> Result<bool> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        let context = cx.context().clone();
        let ports = operator.ports()?;
        let ready = poll_fn(|task| {
            context.poll_port(InRun::RECEIVES, task, |task| match ports.poll_all(task) {
                Readiness::READY if ports.claim_all() => Ok(true),
                Readiness::READY => {
                    // The hub has dropped the message in favour of a newer one.
                    task.waker().wake_by_ref();
                    Err(Readiness::READY)
                }
                asked if asked.is_never() => Ok(false),
                asked => Err(asked),
            })
        });
        if !ready.await {
            return Ok(false);
        }
        cx.run_loop.until_awaited().await;
        let ports = operator.ports()?;
        let before = stats(ports);
        cx.begin_claimed(ports);
        let ran = {
            let mut run = pin!(caught(operator.compute(cx)?));
            poll_fn(|task| context.within(|| run.as_mut().poll(task))).await
        };
        cx.finish_run();
        context.release_unneeded();
        let ports = operator.ports()?;
        if ran.as_ref().is_err_and(Error::is_reader_gone) && reader_gone(ports) {
            return Ok(false);
        }
        ran?;
        one_each(&before, ports)?;
        Ok(true)
    }

    pub(crate) fn has_finished(&self) -> bool {
        self.cx.as_ref().is_some_and(|cx| cx.run_loop.has_finished())
    }

    /// A round was replayed: it counts as a run.
    pub(crate) fn count_run(&mut self) {
        if let Some(cx) = &mut self.cx {
            cx.run_loop.count_run();
        }
    }

    /// Makes it work on streams of this capture until it leaves it. Returns its own stream there.
    pub(crate) fn enter_capture(&mut self, capture: &Arc<Capture>) -> Result<Stream> {
        let cx = self.cx.as_mut().ok_or_else(unbound)?;
        self.in_capture = Some(cx.enter_capture(capture)?);
        cx.stream().cloned()
    }

    /// Binds it to its ports for the capture.
    pub(crate) fn bind_captured(&mut self, mut ends: PortEnds) -> Result<()> {
        let Self { operator, cx: Some(cx), in_capture: Some(_), .. } = self else { return Err(unbound()) };
        bind(&mut **operator, cx, &mut ends, true)
    }

    pub(crate) fn run_captured(&mut self) -> Result<()> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        let node = cx.node().clone();
        let ports = operator.ports()?;
        let before = stats(ports);
        cx.begin_claimed(ports);
        let watch = Watch::new();
        // The waker does nothing: what is pending now would be pending at every replay. Tokio's budget belongs to the
        // task, not to the operator.
        let polled = pin!(caught(unconstrained(operator.compute(cx)?))).poll(&mut Context::from_waker(Waker::noop()));
        let works_beside = watch.end();
        match polled {
            Poll::Ready(ran) => ran?,
            Poll::Pending => return Err(waits(node.status_cell().in_run())),
        }
        is_replayed_as_it_ran(&before, operator.ports()?, cx, works_beside)
    }

    /// Restores its own ports and streams.
    pub(crate) fn leave_capture(&mut self) {
        let (Some(cx), Some(before)) = (&mut self.cx, self.in_capture.take()) else { return };
        self.operator.restore();
        cx.leave_capture(before);
    }
}
