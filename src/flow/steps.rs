//! [`Steps`]: a flow that is run step by step.
//!
//! Operators and hubs work as in any run, but a run begins only if its [permit](crate::operator::permit) allows it, and
//! a hub moves messages only on request. A generation asks each operator, in the order of adding, for one run, and then
//! each hub, in the order of connecting, for one move:
//!
//! ```text
//!   ┌─> operator 1 ──> operator 2 ──> .. ──> hub 1 ──> hub 2 ──> .. ──┐   each is asked for a step; if it makes one,
//!   └──────────────── something has moved ────────────────────────────┤   the step's device work is awaited
//!                                                                     │ nothing has moved
//!   all or some operators have ended or stalled <── they wait only for each other ─────────┤
//!   wait until a task is woken <───── it waits for time, an event, or something outside ───┘
//! ```

use std::{
    fmt,
    future::poll_fn,
    io::{self, Write},
    sync::Arc,
    task::{Context, Poll, Wake},
};

use tokio::time::Instant;

use super::{Flow, Handle, Running};
use crate::{
    clock,
    device::human,
    error::{Error, ErrorKind, Result},
    hub::view::HubView,
    operator::{
        control::{Control, Hubs},
        permit::{StepOutcome, TURN},
    },
    stream::Ticket,
    sync::{DiscardOnDrop, contained, logged},
};

/// A flow that is run step by step, to observe it: one run of one operator at a time, in the order of adding, and one
/// copy of a message to its reader's device at a time, in the order of connecting. When a step is returned, its device
/// work is complete. Created by [`Flow::steps`].
///
/// ```
/// use wakeline::{Flow, operator::{sink, source}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let mut flow = Flow::new("steps");
/// let mut numbers = 1..=2;
/// let source = flow.add("source", source(move || std::future::ready(Ok(numbers.next()))));
/// let sink = flow.add("sink", sink(async |number: i32| { println!("{number}"); Ok(()) }));
/// flow.connect(source.output, sink.input);
///
/// let mut steps = flow.steps()?.log_to(std::io::stderr());
/// let mut done = Vec::new();
/// while let Some(step) = steps.next().await {
///     done.push(step.to_string());
/// }
/// assert_eq!(done[..4], ["source: run 1", "sink: run 1", "source: run 2", "sink: run 2"]);
/// assert_eq!(done[4..], ["source: run 3", "source: ended", "sink: ended"]);
/// let report = steps.run_on().await?;             // runs what is left: here nothing
/// # assert_eq!(report.operators[1].runs, 2);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
///
/// An operator whose own loop never calls [`Cx::ready`](crate::operator::Cx::ready) is not stepped: it runs by itself,
/// and so do the users of an ingress or an egress. A message reaches an egress only after some more steps: call
/// `try_recv` between them. A run may wait for another operator's run by means other than a port: for a notification of
/// the program's own, for a response of the flow's own service in a combinator with its own wakers, or for a slot
/// within that service's limit. Stepping then waits for that run while no other operator runs; [`run_on`](Self::run_on)
/// lets the others run.
///
/// Dropping it aborts the flow, as dropping [`Running`] does.
#[must_use = "dropping it aborts the flow"]
pub struct Steps {
    running: Running,
    control: Arc<Control>,
    hub_names: Vec<Arc<str>>,
    /// Counted from 1.
    generation: u64,
    /// What a generation asks, in order: operators by their numbers and, after the numbers of the operators, hubs.
    order: Vec<usize>,
    /// The place in `order` of the next one.
    turn: usize,
    /// The time at which the operator was asked for a run.
    asked: Option<Instant>,
    moved: bool,
    /// The last step, its unfinished device work, and its start time.
    settling: Option<(Step, Vec<Ticket>, Instant)>,
    /// By operator: whether its end has been returned as a step.
    ended: Vec<bool>,
    /// By operator: whether it has begun a run that has not ended.
    began: Vec<bool>,
    log: Option<StepLog>,
    hub_logs: Vec<(usize, StepLog)>,
    /// By hub: its counts as last logged.
    seen: Vec<LoggedCounts>,
    over: bool,
}

type StepLog = DiscardOnDrop<Box<dyn Write + Send>>;

/// One step of a flow. See [`Steps`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// An operator has run, and the device work of that run is complete.
    Ran {
        /// The name of the operator.
        operator: Arc<str>,
        /// Counted from 1.
        run: u64,
    },
    /// An operator has begun a run that waits for another operator or a hub, for example for room.
    Began {
        /// The name of the operator.
        operator: Arc<str>,
        /// Counted from 1.
        run: u64,
    },
    /// An operator has ended, and will not run again.
    Ended {
        /// The name of the operator.
        operator: Arc<str>,
    },
    /// A hub has copied a message to its reader's device.
    Moved {
        /// The name of the hub: `read.lines -> upper.lines`.
        hub: Arc<str>,
        /// The size of the message.
        bytes: u64,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ran { operator, run } => write!(f, "{operator}: run {run}"),
            Self::Began { operator, run } => write!(f, "{operator}: run {run} waits in its middle"),
            Self::Ended { operator } => write!(f, "{operator}: ended"),
            Self::Moved { hub, bytes } => write!(f, "{hub}: moved {}", human::bytes(*bytes)),
        }
    }
}

/// What a call of [`Steps::advance`] has found.
pub(crate) enum Advance {
    Step(Step),
    /// A generation has ended in which nothing has moved.
    Quiet,
    /// The flow has ended.
    Over,
}

/// What remains when nothing can move.
pub(crate) enum Rest {
    /// Operators have ended, or the flow is over.
    Changed,
    /// Nothing can move until something outside the operators occurs, or until a device is done. The value is for
    /// [`Steps::wait_for_event`].
    Waits(bool),
}

/// The numbers of messages that have passed a hub, or are queued in it, as last logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LoggedCounts {
    queued: u64,
    taken: u64,
    dropped: u64,
    untaken: u64,
}

impl LoggedCounts {
    fn of(hub: &dyn HubView) -> Self {
        let counts = hub.counts();
        Self { queued: hub.queued() as u64, taken: counts.taken, dropped: counts.dropped, untaken: counts.untaken }
    }

    fn sent(&self) -> u64 {
        self.queued + self.taken + self.dropped + self.untaken
    }

    /// `1 message in, 2 taken: 1 queued`
    fn since(&self, before: &Self) -> String {
        let changes = [
            ("in", self.sent().saturating_sub(before.sent())),
            ("taken", self.taken.saturating_sub(before.taken)),
            ("dropped", self.dropped.saturating_sub(before.dropped)),
            ("left untaken", self.untaken.saturating_sub(before.untaken)),
        ];
        let parts = changes.iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}"));
        format!("{}: {} queued", parts.collect::<Vec<_>>().join(", "), self.queued)
    }
}

impl Flow {
    /// Runs the flow step by step. See [`Steps`].
    ///
    /// # Errors
    /// The same as for [`Flow::spawn`].
    pub fn steps(mut self) -> Result<Steps> {
        let running = self.launch(false, true)?;
        let control = running.handle().0;
        let operators = control.tasks.len();
        // The first operator of a section is asked for all of them.
        let ended = (0..operators).map(|operator| control.is_represented(operator)).collect();
        let hub_names = self.hub_names();
        Ok(Steps {
            running,
            control,
            generation: 0,
            order: (0..operators + hub_names.len()).collect(),
            turn: operators + hub_names.len(),
            asked: None,
            moved: true,
            settling: None,
            ended,
            began: vec![false; operators],
            log: None,
            hub_logs: Vec::new(),
            seen: vec![LoggedCounts::default(); hub_names.len()],
            hub_names,
            over: false,
        })
    }
}

impl Steps {
    /// Writes a line for each event: each generation, what each operator does or waits for, and the messages that are
    /// put into hubs, moved by them and taken from them. If a write fails, the log ends.
    pub fn log_to(mut self, writer: impl Write + Send + 'static) -> Self {
        self.log = Some(DiscardOnDrop::new(Box::new(writer)));
        self
    }

    /// Writes a line for each event of one hub. It is named as in reports and in [`Checked`](super::Checked):
    /// `read.lines -> upper.lines`.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if there is no hub of that name; the message lists the hubs.
    pub fn log_hub_to(mut self, hub: &str, writer: impl Write + Send + 'static) -> Result<Self> {
        let Some(at) = self.hub_names.iter().position(|name| **name == *hub) else {
            let names: Vec<_> = self.hub_names.iter().map(|name| format!("`{name}`")).collect();
            let text = format!("flow `{}` has no hub `{hub}`: its hubs are {}", self.control.name, names.join(", "));
            return Err(Error::new(ErrorKind::Usage, text));
        };
        self.hub_logs.push((at, DiscardOnDrop::new(Box::new(writer))));
        Ok(self)
    }

    /// Makes the next step and returns it. `None` when the flow has ended, with or without an error:
    /// [`run_on`](Self::run_on) returns the outcome.
    ///
    /// After a generation in which nothing has moved, all or part of the flow ends or [stalls](super::OnStall) as it
    /// would without steps. Otherwise this waits for a timer, a device, or something outside.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the next call continues with the same step.
    pub async fn next(&mut self) -> Option<Step> {
        loop {
            match self.advance().await {
                Advance::Step(step) => return Some(step),
                Advance::Over => return None,
                Advance::Quiet => {
                    if let Rest::Waits(was_idle) = self.rest().await {
                        self.write(|| "nothing can move until something outside the operators occurs".into());
                        self.wait_for_event(was_idle).await;
                    }
                }
            }
        }
    }

    /// From the next generation on, asks only these: operators by their numbers and, after the numbers of the operators,
    /// hubs. Call it when [`advance`](Self::advance) has returned.
    pub(crate) fn ask_only(&mut self, order: &[usize]) {
        self.order.clear();
        self.order.extend_from_slice(order);
        (self.turn, self.moved) = (self.order.len(), true);
    }

    /// Makes the next step, or ends a generation. After a quiet one, another call returns the same until
    /// [`rest`](Self::rest) or [`ask_only`](Self::ask_only) was called.
    ///
    /// # Cancel safety
    /// Like [`next`](Self::next).
    pub(crate) async fn advance(&mut self) -> Advance {
        loop {
            if let Some(step) = self.settle().await {
                return Advance::Step(step);
            }
            if self.over {
                return Advance::Over;
            }
            let operators = self.control.tasks.len();
            match self.order.get(self.turn).copied() {
                Some(operator) if operator < operators => self.ask_operator(operator).await,
                Some(hub) => self.ask_hub(hub - operators),
                None if self.moved => self.begin_generation(),
                None => return Advance::Quiet,
            }
        }
    }

    /// The generation of the last step, counted from 1.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// A handle that reports the flow's status, stops and aborts it.
    pub fn handle(&self) -> Handle {
        self.running.handle()
    }

    /// Lets the flow continue by itself, like after [`Flow::spawn`].
    pub fn run_on(self) -> Running {
        self.control.unstep();
        self.running
    }

    async fn settle(&mut self) -> Option<Step> {
        while let Some(last) = self.settling.as_mut()?.1.last() {
            // The flow itself reports a failure of this work.
            let _ = last.completed().await;
            self.settling.as_mut()?.1.pop();
        }
        let (step, _, since) = self.settling.take()?;
        self.write(|| format!("  {step} ({:.1?})", clock::now() - since));
        if let Step::Moved { hub, .. } = &step {
            let at = self.hub_names.iter().position(|name| name == hub);
            self.write_hub(at, || step.to_string());
        }
        self.log_hubs();
        Some(step)
    }

    fn begin_settling(&mut self, step: Step, last: Vec<Ticket>, since: Instant) {
        self.moved = true;
        self.settling = Some((step, last, since));
    }

    async fn ask_operator(&mut self, at: usize) {
        let node = self.control.tasks[at].clone();
        let operator = self.control.names[at].clone();
        let Some(permit) = node.permit().filter(|_| !self.ended[at]) else {
            self.turn += 1;
            return;
        };
        if self.asked.is_none() {
            permit.grant();
            node.wake_by_ref();
        }
        let since = *self.asked.get_or_insert_with(clock::now);
        let outcome = poll_fn(|task| match permit.poll_outcome(task) {
            Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
            // The flow may have failed before the operator began.
            Poll::Pending => self.running.poll_over(task).map(|()| None),
        });
        let Some(outcome) = outcome.await else { return self.end() };
        self.asked = None;
        // If the operator ends with this run, its end is the next step.
        self.turn += usize::from(!matches!(outcome, StepOutcome::Ran(_)) || !permit.has_ended());
        let runs = node.status_cell().runs();
        match outcome {
            StepOutcome::Ran(last) => {
                self.began[at] = false;
                self.begin_settling(Step::Ran { operator, run: runs }, last, since);
            }
            StepOutcome::Waits if !std::mem::replace(&mut self.began[at], true) => {
                self.begin_settling(Step::Began { operator, run: runs + 1 }, Vec::new(), since);
            }
            StepOutcome::Ended => {
                self.ended[at] = true;
                self.begin_settling(Step::Ended { operator }, Vec::new(), since);
            }
            StepOutcome::Waits | StepOutcome::Refused => {
                let control = self.control.clone();
                self.write(|| {
                    // The operator has had its turn, and may have been polled again since.
                    let mut waits = control.status(at).waits_for;
                    waits.retain(|lacks| lacks != TURN);
                    match &waits[..] {
                        [] => format!("  {operator}: continues by itself"),
                        waits => format!("  {operator}: waits for {}", waits.join(" and for ")),
                    }
                });
            }
        }
    }

    fn ask_hub(&mut self, at: usize) {
        self.turn += 1;
        let since = clock::now();
        let hubs = self.hubs();
        let Some(hub) = hubs.all.get(at) else { return };
        match hub.state.step() {
            Ok(None) => {}
            Ok(Some(bytes)) => {
                let step = Step::Moved { hub: hub.state.name().clone(), bytes };
                self.begin_settling(step, hub.state.last_copy().into_iter().collect(), since);
            }
            // Both ends of the hub get the error.
            Err(error) => self.write(|| format!("  {}: {error:#}", hub.state.name())),
        }
    }

    fn begin_generation(&mut self) {
        self.generation += 1;
        (self.turn, self.moved) = (0, false);
        // The others may have been woken since they were asked.
        let asked = self.order.iter().filter_map(|operator| self.control.tasks.get(*operator)?.permit());
        asked.for_each(|permit| permit.clear_woken());
        let generation = self.generation;
        self.write(|| format!("generation {generation}"));
    }

    /// Called when nothing can move: all or part of the flow ends or stalls, or it waits for an event.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: [`advance`](Self::advance) is quiet again.
    pub(crate) async fn rest(&mut self) -> Rest {
        let was_idle = self.control.is_idle();
        let checked = self.check_idle().await;
        if checked == Some(false) {
            return Rest::Waits(was_idle);
        }
        if was_idle {
            self.write(|| "no operator can make progress".into());
        }
        self.end_if_over(checked).await;
        Rest::Changed
    }

    /// Ends the steps if the flow is over; otherwise a generation begins.
    async fn end_if_over(&mut self, checked: Option<bool>) {
        // The ends of operators are also steps, except after a stall.
        let over = poll_fn(|task| Poll::Ready(self.running.poll_over(task).is_ready())).await;
        let has_stalled = checked.is_none() && self.handle().failure().is_some();
        if over && (has_stalled || self.ended.iter().all(|ended| *ended)) {
            return self.end();
        }
        self.moved = true;
    }

    /// Returns whether the flow's task has ended operators or their waits. `None` if the flow is over.
    async fn check_idle(&mut self) -> Option<bool> {
        self.control.idle_check.ask();
        self.control.flow_task.wake();
        poll_fn(|task| {
            self.control.activity.stepper.register(task.waker());
            match (self.running.poll_over(task), self.control.idle_check.answered()) {
                (Poll::Ready(()), _) => Poll::Ready(None),
                (Poll::Pending, Some(moved)) => Poll::Ready(Some(moved)),
                (Poll::Pending, None) => Poll::Pending,
            }
        })
        .await
    }

    /// Waits until an operator is woken, the flow is over, or the idle flow has to be checked again. `was_idle`: the value
    /// of [`Rest::Waits`].
    pub(crate) async fn wait_for_event(&mut self, was_idle: bool) {
        poll_fn(|task| {
            self.control.activity.stepper.register(task.waker());
            let over = self.running.poll_over(task).is_ready();
            let check_again = self.control.idle_check.is_withdrawn() || (!was_idle && self.control.is_idle());
            if over || check_again { Poll::Ready(()) } else { self.poll_woken(task) }
        })
        .await;
        self.end_if_over(Some(false)).await;
    }

    fn poll_woken(&self, task: &mut Context<'_>) -> Poll<()> {
        let mut woken = Poll::Pending;
        for permit in self.control.tasks.iter().filter_map(|node| node.permit()) {
            if permit.poll_woken(task).is_ready() {
                woken = Poll::Ready(());
            }
        }
        woken
    }

    fn end(&mut self) {
        self.over = true;
        let failure = self.handle().failure();
        self.write(|| match failure {
            None => "the flow has ended".into(),
            Some(error) => format!("the flow has failed: {error:#}"),
        });
    }

    fn hubs(&self) -> Arc<Hubs> {
        self.control.hubs()
    }

    fn log_hubs(&mut self) {
        for (at, hub) in self.hubs().all.iter().enumerate() {
            let (now, name) = (LoggedCounts::of(&*hub.state), hub.state.name());
            let before = std::mem::replace(&mut self.seen[at], now);
            if now != before {
                self.write(|| format!("    {name}: {}", now.since(&before)));
                self.write_hub(Some(at), || now.since(&before));
            }
        }
    }

    fn write(&mut self, line: impl FnOnce() -> String) {
        if let Some(log) = self.log.as_mut().and_then(DiscardOnDrop::get_mut)
            && !goes_on(log, line, "the log of a flow's steps ends here")
        {
            self.log = None;
        }
    }

    fn write_hub(&mut self, hub: Option<usize>, line: impl Fn() -> String) {
        let generation = self.generation;
        self.hub_logs.retain_mut(|(at, log)| {
            if Some(*at) != hub {
                return true;
            }
            let Some(log) = log.get_mut() else { return false };
            goes_on(log, || format!("generation {generation}: {}", line()), "the log of a hub ends here")
        });
    }
}

/// Writes a line. If the writer fails, returns false and logs `end`. The writer is user code, and so is an error's
/// `Display`.
fn goes_on(log: &mut impl Write, line: impl FnOnce() -> String, end: &str) -> bool {
    let mut text = String::from("(a text that panicked)");
    contained("an error's `Display` panicked", || text = line());
    let mut written = Err(io::Error::other("the writer panicked"));
    contained("the writer of a log panicked", || written = writeln!(log, "{text}"));
    if let Err(error) = &written {
        logged(|| tracing::warn!(error = %format_args!("{error:#}"), "{end}"));
    }
    written.is_ok()
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steps")
            .field("flow", &self.control.name)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}
