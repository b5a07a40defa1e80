//! Scenarios E1 and L4: however a flow ends that is a service, and at whatever moment, each caller hears of it once, and
//! nothing hangs.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
};

use common::*;
use futures::{
    Sink as _,
    future::{join, join_all},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tower::{Service as _, ServiceExt as _};
use wakeline::{
    Service,
    device::{Emulated, Faults, Simulation},
    prelude::*,
};

/// Lets others have so many turns.
async fn turns(mut count: usize) {
    poll_fn(|task: &mut Context<'_>| {
        if count == 0 {
            return Poll::Ready(());
        }
        count -= 1;
        task.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Two operators on a device and one that reads the result on the host.
fn serving(device: &Device, requests: Hub) -> (Flow, Service<Envelope<u32>, u32>) {
    let mut flow = Flow::new("ends");
    let first = flow.add("first", Increment).on(device);
    let second = flow.add("second", Increment).on(device);
    let read = flow.add(
        "read",
        map(async |envelope: Envelope<u32>| {
            let first = envelope.read().await?[0];
            Ok(first)
        }),
    );
    flow.connect(first.output, second.input);
    flow.connect(second.output, read.input);
    let service = flow.service_with("service", first.input, read.output, requests.envelope_bytes(64));
    (flow, service)
}

async fn ask(service: Service<Envelope<u32>, u32>, n: u32) -> Result<u32> {
    let mut request = service.blank().await?;
    request.space().await?[0] = n;
    request.set_len(1)?;
    service.ask(request).await
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// Its handles are dropped once all is answered.
    Itself,
    Stop,
    Abort,
    Drop,
    /// Its device is lost.
    Lost,
}

/// How many were answered with a response.
async fn one(seed: u64, simulation: &Simulation) -> (End, usize) {
    const ALL: u32 = 12;
    let mut rng = StdRng::seed_from_u64(seed);
    let end = [End::Itself, End::Stop, End::Abort, End::Drop, End::Lost][rng.random_range(0..5)];
    let trap = if end == End::Lost { rng.random_range(1..=2 * u64::from(ALL)) } else { u64::MAX };
    let faults = Faults::new().trap_kernel("increment", trap);
    let device = Device::simulated(simulation, Emulated::new().faults(faults)).race_checked();
    let requests = Hub::bounded(rng.random_range(1..4)).envelopes(rng.random_range(1..4));
    let (flow, service) = serving(&device, requests);
    let handle = service.clone();
    let asked = join_all((0..ALL).map(|n| {
        let (service, moment) = (service.clone(), rng.random_range(0..40));
        async move {
            turns(moment).await;
            ask(service, n).await
        }
    }));
    drop(service);
    let running = flow.spawn().unwrap();
    let watch = running.handle();
    let moment = rng.random_range(0..200);
    let ending = async move {
        if matches!(end, End::Itself | End::Lost) {
            drop(handle);
            return Some(running.await);
        }
        turns(moment).await;
        match end {
            End::Stop => running.stop(),
            End::Abort => running.abort(),
            _ => {
                drop(running);
                return None;
            }
        }
        Some(running.await)
    };
    let (answers, outcome) = join(asked, ending).await;
    let mut good = 0;
    for (n, answer) in answers.into_iter().enumerate() {
        match answer {
            Ok(answer) => {
                assert_eq!(answer, n as u32 + 2);
                good += 1;
            }
            Err(error) => {
                let wanted = match end {
                    End::Itself => panic!("nothing went wrong, and yet: {error}"),
                    End::Stop => ErrorKind::Closed,
                    End::Abort | End::Drop => ErrorKind::Cancelled,
                    End::Lost => ErrorKind::DeviceLost,
                };
                assert_eq!(error.kind(), wanted, "{end:?}: {error}");
            }
        }
    }
    match (end, outcome) {
        (End::Itself | End::Stop, Some(outcome)) => {
            let report = outcome.unwrap();
            assert_eq!(report.operator("service").unwrap().messages_in, good as u64);
            assert_eq!(report.untaken, 0);
        }
        (_, Some(Err(error))) => assert_eq!(error.kind(), watch.failure().unwrap().kind()),
        (_, outcome) => assert!(good == ALL as usize || end == End::Drop, "{end:?}: {outcome:?}"),
    }
    (end, good)
}

#[tokio::test(start_paused = true)]
async fn e1_any_end_at_any_moment() {
    let seeds = quick_or_long(60, 3000);
    let mut cut_short = 0;
    for seed in 0..seeds {
        eprint!("seed {seed}");
        let simulation = Simulation::new(seed);
        let ended = simulation.run(one(seed, &simulation));
        let Ok((end, good)) = tokio::time::timeout(std::time::Duration::from_secs(60), ended).await else {
            panic!("it hangs")
        };
        eprintln!(": {end:?}, {good} answered");
        cut_short += usize::from((1..12).contains(&good));
    }
    assert!(cut_short > seeds as usize / 5, "only {cut_short} of {seeds} ended in the middle");
}

/// Waits for a message of its own, which it never sends.
struct Stuck;

#[derive(Ports)]
struct StuckPorts {
    #[input]
    requests: Input<u32>,
    #[input]
    own: Input<u32>,
    #[output]
    again: Output<u32>,
    #[output]
    responses: Output<u32>,
}

impl Operator for Stuck {
    type Ports = StuckPorts;

    async fn compute(&mut self, _ports: &mut StuckPorts, _cx: &mut Cx) -> Result<()> {
        unreachable!("it never has both messages")
    }
}

/// While somebody may call, a flow that cannot move may only be waiting; then it is a stall, which its callers hear of.
#[tokio::test]
async fn e1_a_flow_that_is_stuck_says_so_once_nobody_can_call() {
    let mut flow = Flow::new("ends");
    let stuck = flow.add("stuck", Stuck);
    flow.connect(stuck.again, stuck.own);
    let mut service = flow.service("service", stuck.requests, stuck.responses);
    let running = flow.spawn().unwrap();
    within(poll_fn(|task| service.poll_ready(task))).await.unwrap();
    let response = service.call(1);
    turns(100).await;
    assert!(running.handle().failure().is_none());
    drop(service);
    let error = within(running).await.unwrap_err();
    assert!(error.is_stalled() && error.to_string().contains("`stuck.again -> stuck.own`"), "{error}");
    assert!(within(response).await.unwrap_err().is_stalled());
}

/// Answers with envelopes, of which there are two.
#[derive(Ports)]
struct LendPorts {
    #[input]
    input: Input<u32>,
    #[output(envelope_bytes = 4, envelopes = 2)]
    output: Output<Envelope<u32>>,
}

struct Lend;

impl Operator for Lend {
    type Ports = LendPorts;

    async fn compute(&mut self, ports: &mut LendPorts, _cx: &mut Cx) -> Result<()> {
        let n = ports.input.take()?;
        let mut blank = ports.output.blank().await?;
        blank.space().await?[0] = n;
        blank.set_len(1)?;
        ports.output.send(blank).await
    }
}

/// The envelope in an answer is its caller's own: the two that the hub has are enough for any number of callers that hold theirs.
#[tokio::test(start_paused = true)]
async fn e1_callers_that_hold_their_answers_hold_up_no_others() {
    let mut flow = Flow::new("ends");
    let lend = flow.add("lend", Lend);
    let service = flow.service_with("service", lend.input, lend.output, Hub::bounded(8)).limit(8);
    let running = flow.spawn().unwrap();
    let mut held = Vec::new();
    for n in 0..20 {
        held.push(within(service.ask(n)).await.unwrap());
    }
    for (n, answer) in held.iter().enumerate() {
        assert_eq!(answer.as_slice().unwrap(), [n as u32]);
    }
    std::mem::forget(held.split_off(10));
    // A swap with an envelope of a hub's is as before: these lie where those do.
    let mut last = within(service.ask(20)).await.unwrap();
    held[0].swap(&mut last).unwrap();
    assert_eq!((held[0].as_slice().unwrap(), last.as_slice().unwrap()), (&[20][..], &[0][..]));
    drop(service);
    // The flow ends though they are held, and some forgotten.
    within(running).await.unwrap();
    assert_eq!(held[1].as_slice().unwrap(), [1]);
}

/// A stop answers all that is in, though those who were answered hold their envelopes.
#[tokio::test(start_paused = true)]
async fn e1_stop_answers_those_behind_callers_that_hold_their_answers() {
    let mut flow = Flow::new("ends");
    let lend = flow.add("lend", Lend);
    let service = flow.service_with("service", lend.input, lend.output, Hub::bounded(8));
    let running = flow.spawn().unwrap();
    let (let_go, go) = tokio::sync::watch::channel(false);
    let callers: Vec<_> = (0..4)
        .map(|n| {
            let (service, mut go) = (service.clone(), go.clone());
            tokio::spawn(async move {
                let answer = within(service.ask(n)).await?;
                go.wait_for(|go| *go).await.unwrap();
                Ok::<u32, Error>(answer.as_slice()?[0])
            })
        })
        .collect();
    until("all are answered", || running.status()[0].runs == 4).await;
    turns(100).await;
    running.stop();
    turns(100).await;
    assert!(running.handle().failure().is_none(), "{}", running.handle().failure().unwrap());
    let_go.send(true).unwrap();
    for (n, caller) in callers.into_iter().enumerate() {
        assert_eq!(within(caller).await.unwrap().unwrap(), n as u32);
    }
    within(running).await.unwrap();
}

/// The runtime that a flow runs on ends. Its callers are on another one.
#[test]
fn e1_a_runtime_that_ends_leaves_no_caller_waiting() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (flows, callers) = (runtime(), runtime());
    let mut flow = Flow::new("ends");
    let stuck = flow.add("stuck", map(|_: u32| std::future::pending::<Result<u32>>()));
    let service = flow.service("service", stuck.input, stuck.output);
    let running = {
        let _inside = flows.enter();
        flow.spawn().unwrap()
    };
    let ask = |n: u32| {
        let service = service.clone();
        callers.spawn(async move { within(service.ask(n)).await })
    };
    let asked: Vec<_> = (0..5).map(ask).collect();
    let status = || running.status().iter().any(|operator| operator.running);
    callers.block_on(until("it is at work", status));
    flows.shutdown_background();
    for asked in asked {
        callers.block_on(asked).unwrap().unwrap_err();
    }
    assert!(callers.block_on(within(running)).unwrap_err().is_cancelled());
    callers.block_on(within(service.ask(9))).unwrap_err();
}

/// The limit is of requests in flight: an answered one is none, though its future is still there.
#[tokio::test]
async fn e1_an_answered_request_frees_its_slot() {
    let mut flow = Flow::new("ends");
    let add = flow.add("add", map(async |n: u32| Ok(n + 1)));
    let mut service = flow.service("service", add.input, add.output).limit(1);
    let running = flow.spawn().unwrap();
    within(service.ready()).await.unwrap();
    let mut first = service.call(1);
    assert_eq!(within(&mut first).await.unwrap(), 2);
    within(service.ready()).await.unwrap();
    drop((first, service));
    within(running).await.unwrap();
}

#[derive(Ports)]
struct ExtraPorts {
    #[input]
    input: Input<u32>,
    #[input(optional)]
    extra: Input<u32>,
    #[output]
    output: Output<u32>,
}

/// Answers after its run, with what another has sent.
struct ExtraAfter;

impl Operator for ExtraAfter {
    type Ports = ExtraPorts;

    async fn compute(&mut self, ports: &mut ExtraPorts, _cx: &mut Cx) -> Result<()> {
        ports.input.take().map(drop)
    }

    async fn after(&mut self, ports: &mut ExtraPorts, _cx: &mut Cx) -> Result<()> {
        match ports.extra.recv().await? {
            Some(extra) => ports.output.send(extra).await,
            None => Ok(()),
        }
    }
}

/// What is taken after a run is the run's: it sends nobody away who waits for its answer.
#[tokio::test]
async fn e1_a_message_taken_after_a_run_keeps_the_runs_caller() {
    let mut flow = Flow::new("ends");
    let mut numbers = 0..3;
    let from = flow.add("numbers", source(move || std::future::ready(Ok(numbers.next()))));
    let work = flow.add("work", ExtraAfter);
    flow.connect(from.output, work.extra);
    let service = flow.service("service", work.input, work.output);
    let running = flow.spawn().unwrap();
    for n in 0..3 {
        assert_eq!(within(service.ask(9)).await.unwrap(), n);
    }
    drop(service);
    within(running).await.unwrap();
}

#[tokio::test]
async fn e1_no_request_is_let_in_once_the_flow_was_stopped() {
    let mut flow = Flow::new("ends");
    let add = flow.add("add", map(async |n: u32| Ok(n + 1)));
    let mut service = flow.service_with("service", add.input, add.output, Hub::bounded(8));
    let running = flow.spawn().unwrap();
    assert_eq!(within(service.ask(1)).await.unwrap(), 2);
    within(service.ready()).await.unwrap();
    running.stop();
    assert!(service.is_closed());
    assert!(within(service.ask(1)).await.unwrap_err().is_closed());
    assert!(within(service.call(1)).await.unwrap_err().is_closed());
    within(running).await.unwrap();
}

/// Reports the flow's handle as a run of the flow starts.
struct Reports(tokio::sync::mpsc::UnboundedSender<wakeline::flow::Handle>);

impl Operator for Reports {
    type Ports = ();

    async fn start(&mut self, cx: &mut Cx) -> Result<()> {
        let _ = self.0.send(cx.flow());
        Ok(())
    }

    async fn compute(&mut self, _: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

/// B4-9: readiness that was given in one run of a flow is none in the next.
#[tokio::test]
async fn a_place_of_an_earlier_run_is_asked_for_again() {
    let mut flow = Flow::new("twice");
    let double = flow.add("double", map(async |n: u32| Ok(2 * n)));
    let mut service = flow.service("service", double.input, double.output).limit(1);
    let seen = flow.add("seen", sink(async |_: u32| Ok(())));
    let mut ingress = flow.ingress("ingress", seen.input);
    let (report, mut handles) = tokio::sync::mpsc::unbounded_channel();
    flow.add("reports", Reports(report));
    let task = tokio::spawn(async move {
        for _ in 0..2 {
            flow.run().await.unwrap();
        }
    });
    let first = within(handles.recv()).await.unwrap();
    within(poll_fn(|cx| service.poll_ready(cx))).await.unwrap();
    within(poll_fn(|cx| Pin::new(&mut ingress).poll_ready(cx))).await.unwrap();
    first.stop();
    let second = within(handles.recv()).await.unwrap();
    until("the second run is open", || !service.is_closed() && !ingress.is_closed()).await;
    within(poll_fn(|cx| service.poll_ready(cx))).await.unwrap();
    assert_eq!(within(service.call(21)).await.unwrap(), 42);
    within(poll_fn(|cx| Pin::new(&mut ingress).poll_ready(cx))).await.unwrap();
    Pin::new(&mut ingress).start_send(5).unwrap();
    second.stop();
    within(task).await.unwrap();
    // No run follows in which there could be another place.
    assert_eq!(within(poll_fn(|cx| service.poll_ready(cx))).await.unwrap_err().kind(), ErrorKind::Closed);
}
