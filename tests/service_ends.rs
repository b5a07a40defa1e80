//! Scenarios E1 and L4: the flow of a service ends in any way and at any moment. Each caller gets one answer, and nothing
//! hangs.

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

async fn yields(mut count: usize) {
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
fn serving(device: &Device, requests: HubOptions) -> (Flow, Service<Envelope<u32>, u32>) {
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
    /// All handles of the service are dropped once every request is answered.
    Itself,
    Stop,
    Abort,
    Drop,
    Lost,
}

/// Runs one flow. Returns how it ended and the number of responses.
async fn run_one(seed: u64, simulation: &Simulation) -> (End, usize) {
    const ALL: u32 = 12;
    let mut rng = StdRng::seed_from_u64(seed);
    let end = [End::Itself, End::Stop, End::Abort, End::Drop, End::Lost][rng.random_range(0..5)];
    let trap = if end == End::Lost { rng.random_range(1..=2 * u64::from(ALL)) } else { u64::MAX };
    let faults = Faults::new().trap_kernel("increment", trap);
    let device = Device::simulated(simulation, Emulated::new().faults(faults)).race_checked();
    let requests = HubOptions::bounded(rng.random_range(1..4)).envelopes(rng.random_range(1..4));
    let (flow, service) = serving(&device, requests);
    let handle = service.clone();
    let calls = join_all((0..ALL).map(|n| {
        let (service, moment) = (service.clone(), rng.random_range(0..40));
        async move {
            yields(moment).await;
            ask(service, n).await
        }
    }));
    drop(service);
    let running = flow.spawn().unwrap();
    let flow_handle = running.handle();
    let moment = rng.random_range(0..200);
    let ending = async move {
        if matches!(end, End::Itself | End::Lost) {
            drop(handle);
            return Some(running.await);
        }
        yields(moment).await;
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
    let (answers, outcome) = join(calls, ending).await;
    let mut responses = 0;
    for (n, answer) in answers.into_iter().enumerate() {
        match answer {
            Ok(answer) => {
                assert_eq!(answer, n as u32 + 2);
                responses += 1;
            }
            Err(error) => {
                let expected = match end {
                    End::Itself => panic!("no failure was planned: {error}"),
                    End::Stop => ErrorKind::Closed,
                    End::Abort | End::Drop => ErrorKind::Cancelled,
                    End::Lost => ErrorKind::DeviceLost,
                };
                assert_eq!(error.kind(), expected, "{end:?}: {error}");
            }
        }
    }
    match (end, outcome) {
        (End::Itself | End::Stop, Some(outcome)) => {
            let report = outcome.unwrap();
            assert_eq!(report.operator("service").unwrap().messages_in, responses as u64);
            assert_eq!(report.untaken, 0);
        }
        (_, Some(Err(error))) => assert_eq!(error.kind(), flow_handle.failure().unwrap().kind()),
        (_, outcome) => assert!(responses == ALL as usize || end == End::Drop, "{end:?}: {outcome:?}"),
    }
    (end, responses)
}

#[tokio::test(start_paused = true)]
async fn e1_any_end_at_any_moment_answers_each_caller_once() {
    let seeds = quick_or_long(60, 3000);
    let mut cut_short = 0;
    for seed in 0..seeds {
        eprint!("seed {seed}");
        let simulation = Simulation::new(seed);
        let run = simulation.run(run_one(seed, &simulation));
        let Ok((end, responses)) = tokio::time::timeout(std::time::Duration::from_secs(60), run).await else {
            panic!("it hangs")
        };
        eprintln!(": {end:?}, {responses} answered");
        cut_short += usize::from((1..12).contains(&responses));
    }
    assert!(cut_short > seeds as usize / 5, "only {cut_short} of {seeds} ended in the middle");
}

/// Waits for its own message, which it never sends.
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

/// While a handle exists, the flow may be waiting for a request. Once none exists, it is a stall, also for the callers.
#[tokio::test]
async fn e1_a_stuck_flow_stalls_once_no_handle_is_left() {
    let mut flow = Flow::new("ends");
    let stuck = flow.add("stuck", Stuck);
    flow.connect(stuck.again, stuck.own);
    let mut service = flow.service("service", stuck.requests, stuck.responses);
    let running = flow.spawn().unwrap();
    within(poll_fn(|task| service.poll_ready(task))).await.unwrap();
    let response = service.call(1);
    yields(100).await;
    assert!(running.handle().failure().is_none());
    drop(service);
    let error = within(running).await.unwrap_err();
    assert!(error.is_stalled() && error.to_string().contains("`stuck.again -> stuck.own`"), "{error}");
    assert!(within(response).await.unwrap_err().is_stalled());
}

#[derive(Ports)]
struct RespondPorts {
    #[input]
    input: Input<u32>,
    #[output(envelope_bytes = 4, envelopes = 2)]
    output: Output<Envelope<u32>>,
}

/// Answers with one of its hub's two envelopes.
struct Respond;

impl Operator for Respond {
    type Ports = RespondPorts;

    async fn compute(&mut self, ports: &mut RespondPorts, _cx: &mut Cx) -> Result<()> {
        let n = ports.input.take()?;
        let mut blank = ports.output.blank().await?;
        blank.space().await?[0] = n;
        blank.set_len(1)?;
        ports.output.send(blank).await?;
        Ok(())
    }
}

/// The envelope in a response is the caller's own memory: two envelopes in the hub are enough for any number of callers
/// that keep theirs.
#[tokio::test(start_paused = true)]
async fn e1_callers_that_hold_their_answers_hold_up_no_others() {
    let mut flow = Flow::new("ends");
    let respond = flow.add("respond", Respond);
    let service = flow.service_with("service", respond.input, respond.output, HubOptions::bounded(8)).limit(8);
    let running = flow.spawn().unwrap();
    let mut held = Vec::new();
    for n in 0..20 {
        held.push(within(service.ask(n)).await.unwrap());
    }
    for (n, answer) in held.iter().enumerate() {
        assert_eq!(answer.as_slice().unwrap(), [n as u32]);
    }
    std::mem::forget(held.split_off(10));
    // The envelope in a response can still be swapped.
    let mut last = within(service.ask(20)).await.unwrap();
    held[0].swap(&mut last).unwrap();
    assert_eq!((held[0].as_slice().unwrap(), last.as_slice().unwrap()), (&[20][..], &[0][..]));
    drop(service);
    // The flow ends although responses are kept and forgotten.
    within(running).await.unwrap();
    assert_eq!(held[1].as_slice().unwrap(), [1]);
}

#[tokio::test(start_paused = true)]
async fn e1_stop_answers_requests_behind_callers_that_keep_their_responses() {
    let mut flow = Flow::new("ends");
    let respond = flow.add("respond", Respond);
    let service = flow.service_with("service", respond.input, respond.output, HubOptions::bounded(8));
    let running = flow.spawn().unwrap();
    let (release, released) = tokio::sync::watch::channel(false);
    let callers: Vec<_> = (0..4)
        .map(|n| {
            let (service, mut released) = (service.clone(), released.clone());
            tokio::spawn(async move {
                let answer = within(service.ask(n)).await?;
                released.wait_for(|released| *released).await.unwrap();
                Ok::<u32, Error>(answer.as_slice()?[0])
            })
        })
        .collect();
    until("all requests are answered", || running.status()[0].runs == 4).await;
    yields(100).await;
    running.stop();
    yields(100).await;
    assert!(running.handle().failure().is_none(), "{}", running.handle().failure().unwrap());
    release.send(true).unwrap();
    for (n, caller) in callers.into_iter().enumerate() {
        assert_eq!(within(caller).await.unwrap().unwrap(), n as u32);
    }
    within(running).await.unwrap();
}

/// The callers run on another runtime than the flow.
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
    let calls: Vec<_> = (0..5).map(ask).collect();
    let is_running = || running.status().iter().any(|operator| operator.running);
    callers.block_on(until("an operator is in a run", is_running));
    flows.shutdown_background();
    for call in calls {
        callers.block_on(call).unwrap().unwrap_err();
    }
    assert!(callers.block_on(within(running)).unwrap_err().is_cancelled());
    callers.block_on(within(service.ask(9))).unwrap_err();
}

/// The limit counts requests in flight: an answered one does not count, although its future still exists.
#[tokio::test]
async fn e1_an_answered_request_releases_its_slot() {
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

/// Answers in `after`, with a message of another operator.
struct ExtraAfter;

impl Operator for ExtraAfter {
    type Ports = ExtraPorts;

    async fn compute(&mut self, ports: &mut ExtraPorts, _cx: &mut Cx) -> Result<()> {
        ports.input.take().map(drop)
    }

    async fn after(&mut self, ports: &mut ExtraPorts, _cx: &mut Cx) -> Result<()> {
        match ports.extra.recv().await? {
            Some(extra) => Ok(ports.output.send(extra).await?),
            None => Ok(()),
        }
    }
}

#[tokio::test]
async fn e1_a_message_taken_in_after_keeps_the_runs_caller() {
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
async fn e1_a_stopped_flow_admits_no_request() {
    let mut flow = Flow::new("ends");
    let add = flow.add("add", map(async |n: u32| Ok(n + 1)));
    let mut service = flow.service_with("service", add.input, add.output, HubOptions::bounded(8));
    let running = flow.spawn().unwrap();
    assert_eq!(within(service.ask(1)).await.unwrap(), 2);
    within(service.ready()).await.unwrap();
    running.stop();
    assert!(service.is_closed());
    assert!(within(service.ask(1)).await.unwrap_err().is_closed());
    assert!(within(service.call(1)).await.unwrap_err().is_closed());
    within(running).await.unwrap();
}

/// Sends the flow's handle when a run of the flow starts.
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

/// B4-9: a slot reserved in one run of a flow is void in the next, and is reserved again.
#[tokio::test]
async fn a_slot_of_an_earlier_run_is_reserved_again() {
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
    // No run follows that could grant another slot.
    assert_eq!(within(poll_fn(|cx| service.poll_ready(cx))).await.unwrap_err().kind(), ErrorKind::Closed);
}
