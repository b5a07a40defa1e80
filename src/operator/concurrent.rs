//! [`Concurrent`]: one operator with several concurrent runs.
//!
//! The operator's own task is the dispatcher: it waits for the conditions, claims the messages of one run, and hands
//! them to a worker, which is a task with a clone of the operator, ports of its own and a stream of its own. The worker
//! collects the messages that its run sends, and the dispatcher sends them on, in the order of claiming unless the
//! operator is unordered.
//!
//! ```text
//!                        ┌──> worker 1: compute ──┐
//!   ports ──claim, n──>  ├──> worker 2: compute ──┤ ──> run n is done ──in order of n──> ports
//!          dispatcher    └──> worker 3: compute ──┘            dispatcher
//! ```
//!
//! Each run has a number, and the dispatcher receives the result of every run, successful or not. A failed run ends the
//! flow at once, without waiting for its turn. A worker begins its next run only when the messages of its last run have
//! been sent on, which bounds the number of collected messages.
//!
//! The dispatcher holds the flow's token only while a run is active. A run that has ended, and whose messages wait to
//! be sent on, waits for other operators like the dispatcher does; and so does a run that is parked in its middle, for
//! example in a wait for a blank envelope.

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    future::poll_fn,
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::{Either, select};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use tokio::sync::mpsc;

use super::{
    Cx, Operator, Ports,
    operator_task::{Method, OperatorTask},
    plan::Binder,
    poll_in_context::poll_in_context,
    ports::{AnyPort, Flush, Flushed, WorkerPort},
    run_context::RunContext,
    run_loop::after_run,
    status_cell::RunWait,
};
use crate::{
    condition::{Need, PortId, Readiness},
    error::{Error, ErrorKind, Result, caught},
    mutants::{self, Mutant},
    sync::DiscardOnDrop,
};

/// The operator that [`concurrent`] creates.
pub struct Concurrent<O> {
    operator: O,
    runs: usize,
    ordered: bool,
}

/// Wraps an operator so that up to `runs` of its runs execute concurrently, each in a task of its own with a clone of
/// the operator: for runs that wait for a service, keep the host busy, or leave parts of a device idle.
///
/// Put data that the clones share behind an `Arc`. Each clone has its own stream, so that their device work overlaps.
/// Messages are sent in the order in which the runs claimed theirs, unless the operator is
/// [`unordered`](Concurrent::unordered). `start`, `stop` and `may_run` are called on the operator itself, and clones
/// are made after its `start`. `after` is called on the clone, as a part of its run.
///
/// The messages that a run sends are collected until the run has ended and its turn comes: a run does not wait for
/// room. The operator's own `run` is never called. A `runs` of 0 counts as 1, and more than 65,536 is an error before
/// the flow runs.
///
/// A run that waits for its turn holds the blank envelopes that it has filled. So an output's hub needs as many
/// envelopes as all runs take together, and gets one more if the number is not set. A run is assumed to take one, or
/// `n` with `#[output(room = n)]`: an operator that takes more must declare it there.
///
/// A run gets only its own messages: [`recv`](super::Input::recv) returns those and then `None`. Messages that it does
/// not take are dropped when it has ended, and counted as never taken. An output that a run
/// [closes](super::Output::close) is closed when all runs in progress have ended and their messages are sent.
///
/// Runs are tasks of the runtime: combining this with [`on_own_thread`](crate::flow::Added::on_own_thread) is an error.
///
/// ```
/// use wakeline::{Flow, operator::{concurrent, map, sink, source}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let mut flow = Flow::new("look up");
/// let mut names = ["a", "b", "c"].into_iter();
/// let names = flow.add("names", source(move || std::future::ready(Ok(names.next()))));
/// let ask = flow.add("ask", concurrent(8, map(async |name: &'static str| Ok(format!("{name}!")))));
/// let print = flow.add("print", sink(async |answer: String| { println!("{answer}"); Ok(()) }));
/// flow.connect(names.output, ask.input);
/// flow.connect(ask.output, print.input);      // a!, b!, c!, whichever was answered first
/// flow.run().await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub fn concurrent<O: Operator + Clone>(runs: usize, operator: O) -> Concurrent<O> {
    Concurrent { operator, runs: runs.max(1), ordered: true }
}

impl<O> Concurrent<O> {
    /// Sends messages in the order in which the runs end.
    #[must_use]
    pub fn unordered(mut self) -> Self {
        self.ordered = false;
        self
    }
}

struct Job<P> {
    number: u64,
    ports: P,
}

/// A run that has ended.
struct Done<P> {
    worker: usize,
    number: u64,
    ports: P,
    outcome: Result<()>,
    /// The clone has called [`Cx::finish`].
    finished: bool,
    /// How long the run was busy, in ticks.
    busy: u64,
}

/// A worker, as the dispatcher sees it.
struct Worker<P> {
    jobs: mpsc::UnboundedSender<Job<P>>,
    task: Arc<OperatorTask>,
}

/// All workers. Dropping this aborts their runs.
struct Workers<P>(Vec<Worker<P>>);

/// The runs in progress.
struct Runs<P> {
    tasks: Vec<Arc<OperatorTask>>,
    /// `working`: the workers from which the dispatcher awaits a result, in no order. `slots`: for each worker, its
    /// index in `working`.
    working: Vec<usize>,
    slots: Vec<usize>,
    done: mpsc::UnboundedReceiver<Done<P>>,
    ordered: bool,
    begun: u64,
    /// `ended`: the number of runs whose result was received. `passed`: the number of those whose messages were sent
    /// on.
    ended: u64,
    passed: u64,
    /// Results that wait for their turn, by turn.
    waiting: FxHashMap<u64, Done<P>>,
}

impl<P: Ports> Runs<P> {
    /// True if a run has not ended and does not wait only for other operators of the flow.
    fn at_work(&self) -> bool {
        self.working.iter().any(|&worker| !self.tasks[worker].is_parked())
    }

    fn begin(&mut self, worker: usize) {
        self.slots[worker] = self.working.len();
        self.working.push(worker);
        self.begun += 1;
    }

    fn end(&mut self, worker: usize) {
        let slot = self.slots[worker];
        self.working.swap_remove(slot);
        if let Some(&moved) = self.working.get(slot) {
            self.slots[moved] = slot;
        }
        self.ended += 1;
    }

    /// Waits for the result of the next run that ends.
    async fn ended(&mut self, context: &RunContext) -> Option<Done<P>> {
        poll_fn(|task| {
            context.poll_port(RunWait::SENDS, task, |task| match self.done.poll_recv(task) {
                Poll::Ready(ended) => Ok(ended),
                Poll::Pending if self.at_work() => Err(Readiness::WAIT_EVENT),
                Poll::Pending => Err(Readiness::WAIT),
            })
        })
        .await
    }

    /// True if the messages of some runs have not been sent on.
    fn under_way(&self) -> bool {
        self.passed < self.begun
    }

    /// Records the result of a run. `ports` are the dispatcher's.
    fn record(&mut self, ended: Option<Done<P>>, ports: &mut P) -> Result<()> {
        let mut ended = ended.ok_or_else(gone)?;
        // A failure takes effect at once.
        std::mem::replace(&mut ended.outcome, Ok(()))?;
        with_worker(ports, &mut ended.ports, |port, worker| port.take_back(worker));
        let ordered = self.ordered && !mutants::is(Mutant::Overtaking);
        let turn = if ordered { ended.number } else { self.ended };
        self.end(ended.worker);
        self.waiting.insert(turn, ended);
        Ok(())
    }

    /// Takes the result whose turn it is, if that run has ended.
    fn next(&mut self) -> Option<Done<P>> {
        let next = self.waiting.remove(&self.passed)?;
        self.passed += 1;
        Some(next)
    }

    /// Sends the messages on that a worker's run has sent. True if the run has closed an output.
    async fn pass_on(&mut self, worker: &mut P, ports: &mut P, context: &RunContext) -> Result<bool> {
        let mut closes = false;
        with_worker(ports, worker, |port, worker| closes |= port.collect(worker));
        poll_fn(|task| {
            context.poll_port(RunWait::SENDS, task, |task| {
                // Records runs that have ended in the meantime first, since `at_work` depends on them.
                while let Poll::Ready(ended) = self.done.poll_recv(task) {
                    if let Err(error) = self.record(ended, ports) {
                        return Ok(Err(error));
                    }
                }
                flush(ports, task).map_err(|waits| if self.at_work() { Readiness::WAIT_EVENT } else { waits })
            })
        })
        .await?;
        Ok(closes)
    }
}

impl<P> Drop for Workers<P> {
    fn drop(&mut self) {
        self.0.iter().for_each(|worker| worker.task.abort());
    }
}

impl<O: Operator + Clone> Operator for Concurrent<O> {
    type Ports = O::Ports;

    fn start(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        self.operator.start(cx)
    }

    fn may_run(&mut self, ports: &O::Ports, cx: &Cx) -> bool {
        self.operator.may_run(ports, cx)
    }

    /// A single run, without workers.
    fn compute(&mut self, ports: &mut O::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        self.operator.compute(ports, cx)
    }

    fn stop(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        self.operator.stop(cx)
    }

    fn workers(&self) -> usize {
        self.runs
    }

    async fn run(&mut self, ports: &mut O::Ports, cx: &mut Cx) -> Result<()> {
        // Not reported as overridden: `may_run` and `after` are called, unlike those of other operators with a `run`.
        cx.uses_default(Method::Run);
        cx.operator_task().status_cell().set_has_workers();
        let (results, done) = mpsc::unbounded_channel();
        let context = cx.context().clone();
        let traced = context.observed().and_then(|observed| observed.traced.as_ref());
        traced.into_iter().for_each(|traced| traced.hand_over());
        let mut workers = Workers(Vec::with_capacity(self.runs));
        let mut idle = Vec::with_capacity(self.runs);
        for worker in 0..self.runs {
            let own = cx.worker(worker);
            let own_ports = worker_ports(ports, &own, cx.named())?;
            let (jobs, task) = self.spawn_worker(worker, own, cx, &results);
            workers.0.push(Worker { jobs, task });
            idle.push((worker, own_ports));
        }
        drop(results);

        let waiting = FxHashMap::default();
        let tasks: Vec<_> = workers.0.iter().map(|worker| worker.task.clone()).collect();
        cx.operator_task().show_workers(&tasks);
        let (working, slots) = (Vec::new(), vec![0; self.runs]);
        let mut runs =
            Runs { tasks, working, slots, done, ordered: self.ordered, begun: 0, ended: 0, passed: 0, waiting };
        // `ending`: no further run begins. `closing`: none begins before an output is closed.
        let (mut ending, mut closing) = (false, false);
        loop {
            let ended = if ending || closing || idle.is_empty() {
                if !runs.under_way() {
                    if ending {
                        return Ok(());
                    }
                    ports.visit(&mut |_, port| port.worker_port().into_iter().for_each(|port| port.finish_close()));
                    closing = false;
                    continue;
                }
                // The time of the runs is that of the workers.
                cx.run_loop.stop_clock();
                runs.ended(&context).await
            } else {
                let at_work = runs.at_work();
                cx.run_loop.holds_token(at_work);
                let ended = {
                    let next = poll_fn(|task| match runs.done.poll_recv(task) {
                        Poll::Ready(ended) => Poll::Ready(Some(ended)),
                        // A worker was parked or woken: whether this task must hold the token has changed.
                        Poll::Pending if runs.at_work() != at_work => Poll::Ready(None),
                        Poll::Pending => Poll::Pending,
                    });
                    let ended = pin!(context.await_as_port(next));
                    let ready = pin!(cx.until_ready(ports, |ports, cx| self.operator.may_run(ports, cx)));
                    match select(ended, ready).await {
                        Either::Left((None, _)) => continue,
                        Either::Left((ended, _)) => ended,
                        Either::Right((ready, _)) => {
                            ending = !ready;
                            None
                        }
                    }
                };
                match ended {
                    Some(ended) => ended,
                    None if ending => continue,
                    None => {
                        let Some((worker, mut own_ports)) = idle.pop() else { continue };
                        hand_over(ports, &mut own_ports)?;
                        let job = Job { number: runs.begun, ports: own_ports };
                        workers.0[worker].jobs.send(job).map_err(|_| gone())?;
                        runs.begin(worker);
                        continue;
                    }
                }
            };
            runs.record(ended, ports)?;
            // The requests of messages that the run has not taken fail now.
            context.release_unneeded();
            while let Some(Done { worker, ports: mut own_ports, finished, busy, .. }) = runs.next() {
                cx.run_loop.add_busy(busy);
                ending |= finished;
                closing |= runs.pass_on(&mut own_ports, ports, &context).await?;
                idle.push((worker, own_ports));
            }
        }
    }
}

impl<O: Operator + Clone> Concurrent<O> {
    fn spawn_worker(
        &self,
        worker: usize,
        mut own: Cx,
        cx: &mut Cx,
        results: &mpsc::UnboundedSender<Done<O::Ports>>,
    ) -> (mpsc::UnboundedSender<Job<O::Ports>>, Arc<OperatorTask>) {
        let (jobs, mut next) = mpsc::unbounded_channel::<Job<O::Ports>>();
        // The task might be dropped during a run, when the runtime shuts down: a panic of one destructor must not
        // affect the others.
        let (mut operator, here) = (DiscardOnDrop::new(self.operator.clone()), cx.helper());
        let (results, operator_task, name) = (results.clone(), own.operator_task().clone(), own.name().to_string());
        // A run has its messages when it begins: it must not wait for more.
        operator_task.finish();
        let task = async move {
            let mut unsent = None;
            while let Some(Job { number, ports }) = next.recv().await {
                let mut ports = DiscardOnDrop::new(ports);
                let (operator_task, device, before) =
                    (own.operator_task().clone(), own.device().clone(), own.run_loop.busy.total());
                let context = own.context().clone();
                let outcome = {
                    let (Some(operator), Some(ports)) = (operator.get_mut(), ports.get_mut()) else { break };
                    let run = poll_in_context(&operator_task, &device, one(operator, ports, &mut own));
                    context.run(caught(run)).await
                };
                if outcome.is_ok() {
                    context.release_unneeded();
                }
                let (finished, busy) = (own.run_loop.has_finished(), own.run_loop.busy.total() - before);
                let Some(ports) = ports.take() else { break };
                if let Err(done) = results.send(Done { worker, number, ports, outcome, finished, busy }) {
                    unsent = Some(done);
                    break;
                }
            }
            // Not dropped here: if the operator has failed, its failure might not be recorded yet, and the callers of
            // requests that are dropped must receive it.
            let _ = here.send(Box::new((operator, own, unsent)));
        };
        cx.spawn(&name, Box::pin(task));
        (jobs, operator_task)
    }
}

async fn one<O: Operator>(operator: &mut O, ports: &mut O::Ports, cx: &mut Cx) -> Result<()> {
    cx.run_loop.until_awaited().await;
    cx.begin_claimed(ports);
    operator.compute(ports, cx).await?;
    after_run!(operator, ports, cx);
    cx.finish_run();
    Ok(())
}

/// Creates ports for a worker.
fn worker_ports<P: Ports>(ports: &mut P, own: &Cx, named: &[(PortId, Option<Need>)]) -> Result<P> {
    let (mut ends, mut failed) = (HashMap::new(), None);
    ports.visit(&mut |name, port| match port.worker_port() {
        Some(port) => drop(ends.insert(name, port.worker_ends())),
        None => failed = Some(name),
    });
    if let Some(name) = failed {
        let text =
            format!("port `{name}` is linked to a hub of chunks, which `concurrent` does not support: use an input");
        return Err(Error::new(ErrorKind::Usage, text));
    }
    let (streams, context) = (own.streams().cloned(), own.context().clone());
    P::bind(&mut Binder { streams, context, named, ends: &mut ends })
}

/// Calls `act` with each of the operator's ports, and with the worker's port of the same name.
fn with_worker<P: Ports>(ports: &mut P, worker: &mut P, mut act: impl FnMut(&mut dyn WorkerPort, &mut dyn Any)) {
    let mut own = SmallVec::<[&mut dyn AnyPort; 4]>::new();
    worker.visit(&mut |_, port| own.push(port));
    let mut own = own.into_iter();
    ports.visit(&mut |_, port| {
        if let (Some(own), Some(port)) = (own.next().and_then(AnyPort::worker_port), port.worker_port()) {
            act(port, own);
        }
    });
}

/// Passes the messages of one run to a worker.
fn hand_over<P: Ports>(ports: &mut P, worker: &mut P) -> Result<()> {
    let mut handed = Ok(());
    with_worker(ports, worker, |port, worker| {
        if handed.is_ok() {
            handed = port.dispatch(worker);
        }
    });
    handed
}

/// Sends what all outputs have collected.
fn flush<P: Ports>(ports: &mut P, task: &mut Context<'_>) -> Flush {
    let mut flushed = Flushed::default();
    ports.visit(&mut |_, port| flushed.add(port.poll_flush(task)));
    flushed.all()
}

fn gone() -> Error {
    Error::new(ErrorKind::Cancelled, "the runtime ended while the flow ran")
}

impl<O: fmt::Debug> fmt::Debug for Concurrent<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Concurrent").field("operator", &self.operator).field("runs", &self.runs).finish_non_exhaustive()
    }
}
