//! E1: requests that an operator drops. The run in which it drops them decides what their callers get.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use common::*;
use futures::{FutureExt, future::join_all};
use tokio::sync::{Notify, mpsc};
use wakeline::{Service, flow::LocalFlow, operator::Reply, prelude::*};

use crate::service::serving;

/// A request whose only reply is data in a message.
type Carried = Host<Reply>;

/// Sends each reply on as data, so that its run does not keep it.
struct Carries;

impl Operator for Carries {
    type Ports = MapPorts<u32, Carried>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        for reply in cx.take_replies() {
            ports.output.send_for(Reply::default(), Host(reply)).await?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    Fails,
    FailsLater,
    Panics,
    Succeeds,
    NeverEnds,
}

/// The number of endless runs that have dropped their messages.
static ENDLESS_RUNS: AtomicUsize = AtomicUsize::new(0);

impl Then {
    /// Drops a message, and then ends in this way.
    async fn after_dropping(self, message: Carried) -> Result<()> {
        drop(message);
        match self {
            Self::Fails => Err(Error::other("planned")),
            Self::FailsLater => {
                tokio::task::yield_now().await;
                Err(Error::other("planned"))
            }
            Self::Panics => panic!("planned"),
            Self::Succeeds => Ok(()),
            Self::NeverEnds => {
                ENDLESS_RUNS.fetch_add(1, Ordering::Relaxed);
                std::future::pending().await
            }
        }
    }
}

/// Drops its message in each run.
#[derive(Clone)]
struct Drops(Then);

impl Operator for Drops {
    type Ports = MapPorts<Carried, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        self.0.after_dropping(ports.input.take()?).await
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Runs {
    Compute,
    OwnLoop,
    OwnThread,
    Concurrent,
}

const ALL_RUNS: [Runs; 4] = [Runs::Compute, Runs::OwnLoop, Runs::OwnThread, Runs::Concurrent];

/// A service whose requests are dropped by `drops`.
fn dropping(runs: Runs, then: Then) -> (wakeline::Running, Service<u32, u32>) {
    let mut flow = Flow::new("e1");
    let carries = flow.add("carries", Carries);
    let drops = match runs {
        Runs::Compute => *flow.add("drops", Drops(then)),
        Runs::OwnThread => *flow.add("drops", Drops(then)).on_own_thread(),
        Runs::Concurrent => *flow.add("drops", wakeline::operator::concurrent(2, Drops(then))),
        Runs::OwnLoop => *flow.add(
            "drops",
            task::<MapPorts<Carried, u32>, _>(move |ports, _cx| {
                async move {
                    while let Some(message) = ports.input.recv().await? {
                        then.after_dropping(message).await?;
                    }
                    Ok(())
                }
                .boxed()
            }),
        ),
    };
    flow.connect(carries.output, drops.input);
    let service = flow.service("service", carries.input, drops.output).limit(1);
    (flow.spawn().unwrap(), service)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_a_request_that_a_failing_run_drops_gets_the_failure() {
    for runs in ALL_RUNS {
        for then in [Then::Fails, Then::FailsLater, Then::Panics] {
            let kind = if then == Then::Panics { ErrorKind::Panicked } else { ErrorKind::Operator };
            let (running, service) = dropping(runs, then);
            let error = within(service.ask(1)).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{runs:?}, {then:?}: {error}");
            assert_eq!(within(running).await.unwrap_err().kind(), kind);
        }
    }
}

/// The next request waits for the first one's slot within the limit, and the flow continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_a_request_that_a_run_drops_is_unanswered_once_the_run_has_ended() {
    for runs in ALL_RUNS {
        let (running, service) = dropping(runs, Then::Succeeds);
        for n in 0..3 {
            let error = within(service.ask(n)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unanswered, "{runs:?}: {error}");
        }
        drop(service);
        within(running).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_a_request_that_an_endless_run_drops_is_answered_at_the_end_of_the_flow() {
    for runs in ALL_RUNS {
        for drops_flow in [false, true] {
            let before = ENDLESS_RUNS.load(Ordering::Relaxed);
            let (running, service) = dropping(runs, Then::NeverEnds);
            let mut call = Box::pin(service.ask(1));
            until("the run has dropped the request", || {
                assert!(call.as_mut().now_or_never().is_none());
                ENDLESS_RUNS.load(Ordering::Relaxed) > before
            })
            .await;
            if drops_flow {
                drop(running);
            } else {
                running.abort();
            }
            let error = within(call).await.unwrap_err();
            assert!(error.is_cancelled(), "{runs:?}: {error}");
        }
    }
}

/// Hands its replies to another operator in a way that the flow does not know.
struct HandsOver(mpsc::UnboundedSender<Reply>);

impl Operator for HandsOver {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        cx.take_replies().into_iter().for_each(|reply| self.0.send(reply).unwrap());
        Ok(())
    }
}

async fn drop_all(received: &mut mpsc::UnboundedReceiver<Reply>) -> Result<()> {
    while let Some(reply) = received.recv().await {
        drop(reply);
    }
    Ok(())
}

struct DropsInARun(mpsc::UnboundedReceiver<Reply>);

impl Operator for DropsInARun {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        drop_all(&mut self.0).await
    }
}

struct DropsBetweenRuns(mpsc::UnboundedReceiver<Reply>);

impl Operator for DropsBetweenRuns {
    type Ports = ();

    async fn run(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        drop_all(&mut self.0).await
    }

    async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// The operator that drops it has no messages and no runs, or is in a run of another flow.
#[tokio::test]
async fn e1_a_request_that_is_dropped_outside_a_run_is_unanswered_at_once() {
    for of_other_flow in [false, true] {
        let (sender, received) = mpsc::unbounded_channel();
        let (mut flow, service) = serving(HandsOver(sender), 1);
        let mut other = Flow::new("other");
        if of_other_flow {
            other.add("drops", DropsInARun(received));
        } else {
            flow.add("drops", DropsBetweenRuns(received));
        }
        let (running, other) = (flow.spawn().unwrap(), of_other_flow.then(|| other.spawn().unwrap()));
        for n in 0..3 {
            let error = within(service.ask(n)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unanswered, "{error}");
        }
        running.abort();
        within(running).await.unwrap_err();
        // Its channel ends with the flow.
        if let Some(other) = other {
            within(other).await.unwrap();
        }
    }
}

/// Drops replies on a thread that it blocks until each caller has its answer.
struct DropsAndBlocks(mpsc::UnboundedReceiver<Reply>, std::sync::mpsc::Receiver<()>);

impl DropsAndBlocks {
    fn drop_all(&mut self) {
        while let Some(reply) = futures::executor::block_on(self.0.recv()) {
            drop(reply);
            if self.1.recv().is_err() {
                return;
            }
        }
    }
}

struct BlocksARun(DropsAndBlocks);

impl Operator for BlocksARun {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        self.0.drop_all();
        Ok(())
    }
}

struct BlocksBetweenRuns(DropsAndBlocks);

impl Operator for BlocksBetweenRuns {
    type Ports = ();

    async fn run(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        self.0.drop_all();
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// The operator is in no run, or in a run of another flow, which means nothing to the callers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_an_operator_that_blocks_its_thread_delays_no_answer() {
    for of_other_flow in [false, true] {
        let (sender, received) = mpsc::unbounded_channel();
        let (answered, awaited) = std::sync::mpsc::channel();
        let (mut flow, service) = serving(HandsOver(sender), 1);
        let (drops, mut other) = (DropsAndBlocks(received, awaited), Flow::new("other"));
        if of_other_flow {
            other.add("drops", BlocksARun(drops)).on_own_thread();
        } else {
            flow.add("drops", BlocksBetweenRuns(drops)).on_own_thread();
        }
        let (running, other) = (flow.spawn().unwrap(), of_other_flow.then(|| other.spawn().unwrap()));
        for n in 0..quick_or_long(20, 1000) {
            if n > 0 {
                answered.send(()).unwrap();
            }
            let error = within(service.ask(n)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unanswered, "{error}");
        }
        // The thread is free again.
        drop(answered);
        running.abort();
        within(running).await.unwrap_err();
        if let Some(other) = other {
            within(other).await.unwrap();
        }
    }
}

/// The operators of the inner flow end runs of their own on the same thread, meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_an_inner_flow_does_not_decide_about_the_requests_of_its_operator() {
    struct DropsAndNests;

    impl Operator for DropsAndNests {
        type Ports = MapPorts<Carried, u32>;

        async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
            drop(ports.input.take()?);
            let inner = async {
                let mut inner = LocalFlow::new("inner");
                let first = inner.add("first", source(async || Ok(None::<u32>)));
                let last = inner.add("last", sink(async |_: u32| Ok(())));
                inner.connect(first.output, last.input);
                inner.run().await
            };
            futures::executor::block_on(tokio::task::LocalSet::new().run_until(inner))?;
            Err(Error::other("planned"))
        }
    }

    let mut flow = Flow::new("outer");
    let carries = flow.add("carries", Carries);
    let nests = flow.add("nests", DropsAndNests).on_own_thread();
    flow.connect(carries.output, nests.input);
    let service: Service<u32, u32> = flow.service("service", carries.input, nests.output);
    let running = flow.spawn().unwrap();
    let error = within(service.ask(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Operator, "{error}");
    within(running).await.unwrap_err();
}

/// One run fails. Of the others, one has not taken its message, and one is in progress.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_callers_of_all_concurrent_runs_get_the_failure() {
    #[derive(Clone)]
    struct FailsLast(Arc<Notify>);

    impl Operator for FailsLast {
        type Ports = MapPorts<u32, u32>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            match ports.input.len() {
                0 => return Ok(()),
                _ if cx.name().ends_with("#1") => {}
                _ => {
                    let number = ports.input.take()?;
                    self.0.notify_one();
                    std::future::pending::<()>().await;
                    return Ok(ports.output.send(number).await?);
                }
            }
            self.0.notified().await;
            Err(Error::other("its message was not taken"))
        }
    }

    for _ in 0..quick_or_long(50, 1000) {
        let fails = FailsLast(Arc::default());
        let (flow, service) = serving(wakeline::operator::concurrent(2, fails), 2);
        let running = flow.spawn().unwrap();
        for answer in within(join_all((0..2).map(|n| service.ask(n)))).await {
            assert_eq!(answer.unwrap_err().kind(), ErrorKind::Operator);
        }
        within(running).await.unwrap_err();
    }
}
