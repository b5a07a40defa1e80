//! [`BoxedOperator`] in a section: the section drives it round by round.
//!
//! ```text
//!   streamed    round: its ports are ready ──> compute, awaited ──> takes one message per input, sends one per output
//!   captured    enter ──> ports of the capture ──> compute, polled once ──> the same ──> leave: its own ports again
//!   replayed    the operator is not called: its runs are counted
//! ```
//!
//! All three must have the same effect. So the operator can only have a `compute`: a replay does not call `run`,
//! `after` or `may_run`.

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
    operator_task::{Method, OperatorTask},
    ports::{AllPorts, PortStats, reader_gone},
    run_context::RunContext,
    status_cell::RunWait,
};
use crate::{
    condition::Readiness,
    device::human,
    error::{Error, ErrorKind, Result, caught},
    stream::{
        Stream,
        capture::{Capture, UncapturedWorkDetector},
    },
};

/// The current statistics of each port.
fn stats(ports: &mut dyn AllPorts) -> Vec<PortStats> {
    let mut all = Vec::new();
    ports.visit_all(&mut |_, port| all.push(port.stats()));
    all
}

/// Checks that each input has taken one message from each connection in a run, and each output has sent one.
fn one_each(before: &[PortStats], ports: &mut dyn AllPorts) -> Result<()> {
    let mut wrong = None;
    let mut before = before.iter();
    ports.visit_all(&mut |name, port| {
        let Some(PortStats { traffic: before, connections }) = before.next() else { return };
        // Ports are values: the run might have swapped them.
        let passed = port.stats().traffic.without(*before).messages;
        if passed != *connections && wrong.is_none() {
            let does = if port.is_output() { "sends" } else { "takes" };
            let expected = human::count(*connections as usize, "message");
            wrong = Some(format!(
                "a run {does} {} at `{name}` instead of {expected}: in a section that is replayed, every run must take \
                 one message from each connection and send one at each output",
                human::count(passed as usize, "message")
            ));
        }
    });
    wrong.map_or(Ok(()), |text| Err(Error::new(ErrorKind::Usage, text)))
}

/// The name of an output that is closed.
fn closed(ports: &mut dyn AllPorts) -> Option<&'static str> {
    let mut closed = None;
    ports.visit_all(&mut |name, port| {
        if port.is_output() && port.poll_room(1, &mut Context::from_waker(Waker::noop())).is_never() {
            closed = Some(name);
        }
    });
    closed
}

fn not_replayable(what: &str) -> Error {
    let text = format!("{what}, which a replay cannot repeat: leave the operator out of the section");
    Error::new(ErrorKind::Usage, text)
}

fn check_no_override(task: &OperatorTask) -> Result<()> {
    let methods = [(Method::Run, "run"), (Method::MayRun, "may_run"), (Method::After, "after")];
    match methods.into_iter().find(|(method, _)| !task.is_default(*method)) {
        Some((_, name)) => Err(not_replayable(&format!("it overrides `{name}`"))),
        None => Ok(()),
    }
}

/// Checks that the captured run has done nothing but device work and messages, which is all that a replay repeats.
fn check_replayable(before: &[PortStats], ports: &mut dyn AllPorts, cx: &Cx, works_beside: bool) -> Result<()> {
    one_each(before, ports)?;
    if let Some(call) = cx.unreplayable() {
        return Err(not_replayable(call));
    }
    if let Some(name) = closed(ports) {
        return Err(not_replayable(&format!("it closes `{name}`")));
    }
    if works_beside {
        let text = "it enqueues work on a stream from outside the capture, such as one kept from an earlier run: this \
                    work runs now and is not part of the graph; call `cx.stream()` in each run";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    Ok(())
}

/// The error for a `compute` that is pending in a capture.
fn pending_in_capture(for_what: Option<RunWait>) -> Error {
    let what = match for_what {
        Some(RunWait::RECEIVES) => "for a message",
        Some(RunWait::SENDS) => "for room, or for a blank envelope",
        Some(RunWait::ASKS) => "for a response from its own flow's service",
        Some(_) => "for several things at the same time",
        None => "for something other than its ports, such as data on the host, a timer, a channel or another task",
    };
    let text = format!(
        "its `compute` waits {what}, but a replay cannot wait: make `compute` only enqueue work, or leave the operator \
         out of the section"
    );
    Error::new(ErrorKind::Usage, text)
}

impl BoxedOperator {
    /// Checks that the operator overrides no method that a replay would not call.
    pub(crate) fn only_computes(&mut self) -> Result<()> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        let task = cx.operator_task().clone();
        task.forget_defaults();
        operator.call_overridable(cx)?;
        drop(operator.run(cx)?);
        check_no_override(&task)
    }

    /// Visits each of the operator's ports: its own or, in a capture, those of the capture.
    pub(crate) fn visit(&mut self, visit: &mut dyn FnMut(&'static str, &mut dyn AnyPort)) {
        if let Ok(ports) = self.operator.ports() {
            ports.visit_all(visit);
        }
    }

    /// The run context, with the metadata that the operator's messages carry.
    pub(crate) fn context(&self) -> Result<Arc<RunContext>> {
        self.cx.as_ref().map(|cx| cx.context().clone()).ok_or_else(unbound)
    }

    /// Runs the operator once. False if no further run is possible.
    pub(crate) async fn round(&mut self) -> Result<bool> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        let context = cx.context().clone();
        let ports = operator.ports()?;
        let ready = poll_fn(|task| {
            context.poll_port(RunWait::RECEIVES, task, |task| match ports.poll_all(task) {
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
        let ran = context.run(caught(operator.compute(cx)?)).await;
        cx.finish_run();
        let ports = operator.ports()?;
        if ran.as_ref().is_err_and(Error::is_reader_gone) && reader_gone(ports) {
            return Ok(false);
        }
        // After an error the context is released later, when the error is recorded: its callers receive that.
        ran?;
        one_each(&before, ports)?;
        context.release_unneeded();
        Ok(true)
    }

    pub(crate) fn has_finished(&self) -> bool {
        self.cx.as_ref().is_some_and(|cx| cx.run_loop.has_finished())
    }

    /// Counts a replayed round as a run.
    pub(crate) fn count_run(&mut self) {
        if let Some(cx) = &mut self.cx {
            cx.run_loop.count_run();
        }
    }

    /// Makes the operator work on streams of `capture` until [`leave_capture`](Self::leave_capture). Returns its own
    /// stream there.
    pub(crate) fn enter_capture(&mut self, capture: &Arc<Capture>) -> Result<Stream> {
        let cx = self.cx.as_mut().ok_or_else(unbound)?;
        self.in_capture = Some(cx.enter_capture(capture)?);
        cx.stream().cloned()
    }

    /// Binds the operator to its ports for the capture.
    pub(crate) fn bind_captured(&mut self, mut ends: PortEnds) -> Result<()> {
        let Self { operator, cx: Some(cx), in_capture: Some(_), .. } = self else { return Err(unbound()) };
        bind(&mut **operator, cx, &mut ends, true)
    }

    /// Runs the operator once in the capture, and checks that a replay can repeat the run.
    pub(crate) fn run_captured(&mut self) -> Result<()> {
        let Self { operator, cx: Some(cx), .. } = self else { return Err(unbound()) };
        let task = cx.operator_task().clone();
        let ports = operator.ports()?;
        let before = stats(ports);
        cx.begin_claimed(ports);
        let detector = UncapturedWorkDetector::new();
        // The waker does nothing, since a pending run is an error here. Unconstrained, since tokio's budget belongs to
        // the task and not to the operator.
        let polled = pin!(caught(unconstrained(operator.compute(cx)?))).poll(&mut Context::from_waker(Waker::noop()));
        let works_beside = detector.found_work();
        match polled {
            Poll::Ready(ran) => ran?,
            Poll::Pending => return Err(pending_in_capture(task.status_cell().in_run())),
        }
        check_replayable(&before, operator.ports()?, cx, works_beside)
    }

    /// Restores the operator's own ports and streams.
    pub(crate) fn leave_capture(&mut self) {
        let (Some(cx), Some(before)) = (&mut self.cx, self.in_capture.take()) else { return };
        self.operator.restore();
        cx.leave_capture(before);
    }
}
