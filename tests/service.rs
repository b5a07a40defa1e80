//! Scenario E1: a flow as a service. Responses match their requests, back-pressure is readiness, every request is answered.

use std::{
    future::{poll_fn, ready},
    pin::pin,
    sync::Arc,
};

use common::*;
use futures::{FutureExt, future::join_all, poll};
use tokio::sync::{Notify, mpsc};
use tower::{Service as _, ServiceBuilder, ServiceExt, load_shed::error::Overloaded};
use wakeline::{
    Service,
    device::{Emulated, Faults},
    operator::Reply,
    prelude::*,
};

/// A service with this operator only; `capacity` is that of the hub of the requests.
pub(crate) fn serving<P>(operator: impl Operator<Ports = P>, capacity: usize) -> (Flow, Service<u32, u32>)
where
    P: wakeline::operator::Ports<Handles = wakeline::operator::MapHandles<u32, u32>>,
{
    let mut flow = Flow::new("e1");
    let only = flow.add("only", operator);
    let service = flow.service_with("service", only.input, only.output, HubOptions::bounded(capacity));
    (flow, service)
}

fn double() -> impl Operator<Ports = MapPorts<u32, u32>> {
    map(|n: u32| ready(Ok(2 * n)))
}

/// Doubles each number after a notification of `gate`.
fn gated(gate: &Arc<Notify>) -> impl Operator<Ports = MapPorts<u32, u32>> + use<> {
    let gate = gate.clone();
    map(move |n: u32| {
        let gate = gate.clone();
        async move {
            gate.notified().await;
            Ok(2 * n)
        }
    })
}

/// Waits until the flow runs and has room for a request.
async fn until_ready(service: &Service<u32, u32>) {
    within(service.clone().ready()).await.unwrap();
}

async fn until_running(running: &wakeline::Running) {
    until("an operator is in a run", || running.status().iter().any(|status| status.running)).await;
}

fn is_sync<T: Send + Sync + Unpin>(_: &T) {}

// Two operators on a device, and more callers than envelopes.
on_both!(e1_each_caller_gets_the_response_to_its_request, async |device: Device| {
    let mut flow = Flow::new("e1");
    let first = flow.add("first", Increment).on(&device);
    let second = flow.add("second", Increment).on(&device);
    flow.connect(first.output, second.input);
    let hub = HubOptions::bounded(2).envelopes(3).envelope_bytes(64);
    let service = flow.service_with("service", first.input, second.output, hub);
    is_sync(&service);
    let running = flow.spawn().unwrap();
    let ask = |n: u32| {
        let service = service.clone();
        tokio::spawn(async move {
            let mut request = service.blank().await?;
            request.space().await?[..2].copy_from_slice(&[n, 7 * n]);
            request.set_len(2)?;
            let response = if n.is_multiple_of(2) {
                service.ask(request).await?
            } else {
                // tower's way: `poll_ready`, then `call`.
                service.oneshot(request).await?
            };
            assert_eq!(response.read().await?, [n + 2, 7 * n + 2]);
            Ok::<_, Error>(())
        })
    };
    for response in join_all((0..300).map(ask)).await {
        response.unwrap().unwrap();
    }
    drop(service);
    let report = running.await.unwrap();
    assert_eq!(report.operator("service").unwrap().messages_in, 300);
    assert_eq!(report.operator("service").unwrap().messages_out, 300);
    freed(&device).await;
});

#[tokio::test]
async fn e1_ready_reserves_a_slot() {
    let gate = Arc::new(Notify::new());
    let (flow, mut service) = serving(gated(&gate), 1);
    let mut other = service.clone();
    assert!(poll!(pin!(service.ready())).is_pending(), "the flow does not run yet");
    let running = flow.spawn().unwrap();
    within(service.ready()).await.unwrap();
    let one = service.call(1);
    until_running(&running).await;
    within(service.ready()).await.unwrap();
    assert!(poll!(pin!(other.ready())).is_pending(), "the first caller has reserved the only slot");
    let two = service.call(2);
    assert!(poll!(pin!(other.ready())).is_pending(), "the only slot is in use");
    gate.notify_one();
    assert_eq!(within(one).await.unwrap(), 2);
    within(other.ready()).await.unwrap();

    // A caller that is dropped while it is ready releases its slot to the next one.
    let mut third = service.clone();
    let mut waiting = Box::pin(third.ready());
    assert!(poll!(waiting.as_mut()).is_pending());
    drop(other);
    within(waiting.as_mut()).await.unwrap();
    drop(waiting);
    let three = third.call(3);
    gate.notify_one();
    assert_eq!(within(two).await.unwrap(), 4);
    gate.notify_one();
    assert_eq!(within(three).await.unwrap(), 6);

    let error = within(service.call(4)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "`call` without `poll_ready`: {error}");
    drop((service, third));
    within(running).await.unwrap();
}

#[tokio::test]
async fn e1_load_shedding_fails_requests_without_room() {
    let gate = Arc::new(Notify::new());
    let (flow, service) = serving(gated(&gate), 2);
    let running = flow.spawn().unwrap();
    until_ready(&service).await;
    let shedding = ServiceBuilder::new().load_shed().service(service.clone());
    let mut calls = Vec::new();
    for n in 0..3 {
        calls.push(Box::pin(service.ask(n)));
        assert!(poll!(calls[n as usize].as_mut()).is_pending());
        if n == 0 {
            until_running(&running).await;
        }
    }
    for _ in 0..5 {
        let error = within(shedding.clone().oneshot(9)).await.unwrap_err();
        assert!(error.is::<Overloaded>(), "{error}");
    }
    for (n, call) in calls.into_iter().enumerate() {
        gate.notify_one();
        assert_eq!(within(call).await.unwrap(), 2 * n as u32);
    }
    gate.notify_one();
    assert_eq!(within(shedding.oneshot(9)).await.unwrap(), 18);
    drop(service);
    within(running).await.unwrap();
}

/// A request counts towards the limit until it is answered or its caller gives up, which operators can query.
#[tokio::test]
async fn e1_a_caller_that_gives_up_releases_its_slot() {
    let gate = Arc::new(Notify::new());
    let (report, mut abandoned) = mpsc::unbounded_channel();

    struct ReportsAbandoned(Arc<Notify>, mpsc::UnboundedSender<bool>);

    impl Operator for ReportsAbandoned {
        type Ports = MapPorts<u32, u32>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let n = ports.input.take()?;
            self.0.notified().await;
            for reply in cx.take_replies() {
                self.1.send(reply.is_abandoned()).unwrap();
                if !reply.is_abandoned() {
                    ports.output.send_for(reply, 2 * n).await?;
                }
            }
            Ok(())
        }
    }

    let (flow, service) = serving(ReportsAbandoned(gate.clone(), report), 8);
    let mut service = service.limit(1);
    let other = service.clone();
    let running = flow.spawn().unwrap();
    within(service.ready()).await.unwrap();
    let first = service.call(1);
    until_running(&running).await;
    assert!(poll!(pin!(other.clone().ready())).is_pending(), "there is room in the hub, but no slot within the limit");
    let mut second = Box::pin(other.ask(3));
    assert!(poll!(second.as_mut()).is_pending());
    drop(first);
    assert!(poll!(second.as_mut()).is_pending(), "it has the slot now, and no response yet");
    let mut late = service.clone();
    assert!(poll!(pin!(late.ready())).is_pending());
    gate.notify_one();
    gate.notify_one();
    until("both requests are processed", || {
        gate.notify_one();
        abandoned.len() == 2
    })
    .await;
    assert_eq!(within(second).await.unwrap(), 6);
    assert_eq!((abandoned.recv().await, abandoned.recv().await), (Some(true), Some(false)));
    within(late.ready()).await.unwrap();

    let mut none = service.clone().limit(0);
    let error = within(none.ready()).await.unwrap_err();
    assert!(error.to_string().contains("a limit of 0"), "{error}");
    assert!(within(none.ask(1)).await.is_err());
    drop((service, other, late, none));
    within(running).await.unwrap();
}

#[derive(Ports)]
struct BatchPorts {
    #[input(capacity = 4)]
    input: Input<u32>,
    #[output(capacity = 4)]
    output: Output<u32>,
}

/// Takes four messages in one run.
struct Batch {
    uses_replies: bool,
}

impl Operator for Batch {
    type Ports = BatchPorts;

    fn may_run(&mut self, ports: &BatchPorts, _cx: &Cx) -> bool {
        ports.input.len() == 4
    }

    async fn compute(&mut self, ports: &mut BatchPorts, cx: &mut Cx) -> Result<()> {
        let numbers: Vec<u32> = ports.input.take_batch()?.collect();
        if !self.uses_replies {
            return Ok(ports.output.send(numbers[0]).await?);
        }
        let mut replies: Vec<_> = numbers.into_iter().zip(cx.take_replies()).collect();
        assert!(cx.take_replies().is_empty());
        // Not in the order of arrival.
        replies.reverse();
        for (n, reply) in replies {
            ports.output.send_for(reply, 2 * n).await?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn e1_a_batch_needs_replies_to_match_its_responses() {
    for uses_replies in [true, false] {
        let mut flow = Flow::new("e1");
        let batch = flow.add("batch", Batch { uses_replies });
        let service = flow.service_with("service", batch.input, batch.output, HubOptions::bounded(4));
        let running = flow.spawn().unwrap();
        let answers = within(join_all((0..8).map(|n| service.ask(n)))).await;
        for (n, answer) in answers.into_iter().enumerate() {
            if uses_replies {
                assert_eq!(answer.unwrap(), 2 * n as u32);
            } else {
                let error = answer.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unanswered, "the mistake is not the caller's");
                assert!(error.to_string().contains("the response cannot be distinguished from those"), "{error}");
            }
        }
        drop(service);
        within(running).await.unwrap();
    }
}

/// By `n % 4`: refuses, drops, keeps for a later run, or answers the request.
struct Choosy {
    kept: Option<(u32, Reply)>,
}

impl Operator for Choosy {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let n = ports.input.take()?;
        let Some(reply) = cx.take_replies().pop() else { return Ok(()) };
        assert!(!reply.is_empty());
        match n % 4 {
            0 => reply.fail(Error::other("not this one")),
            1 => drop(reply),
            2 => self.kept = Some((n, reply)),
            _ => {
                ports.output.send_for(reply, 2 * n).await?;
                if let Some((kept, reply)) = self.kept.take() {
                    ports.output.send_for(reply, 2 * kept).await?;
                }
            }
        }
        Ok(())
    }
}

#[tokio::test]
async fn e1_every_request_is_answered() {
    let mut flow = Flow::new("e1");
    let choosy = flow.add("choosy", Choosy { kept: None });
    let pass = flow.add("pass", pass_on::<u32>());
    flow.connect(pass.output, choosy.input);
    let service = flow.service("service", pass.input, choosy.output);
    let running = flow.spawn().unwrap();
    let answers = within(join_all((0..20).map(|n| service.ask(n)))).await;
    for (n, answer) in answers.into_iter().enumerate() {
        match (n % 4, answer) {
            (0, Err(error)) => {
                assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Operator, "not this one"));
            }
            (1, Err(error)) => {
                assert_eq!(error.kind(), ErrorKind::Unanswered);
            }
            (_, answer) => assert_eq!(answer.unwrap(), 2 * n as u32),
        }
    }
    drop(service);
    within(running).await.unwrap();
}

/// An operator that filters in its own loop, without `take_replies`.
#[tokio::test]
async fn e1_a_request_dropped_in_an_own_loop_is_unanswered() {
    let odd = task::<MapPorts<u32, u32>, _>(|ports, _cx| {
        async move {
            while let Some(n) = ports.input.recv().await? {
                if n % 2 == 1 {
                    ports.output.send(2 * n).await?;
                }
            }
            Ok(())
        }
        .boxed()
    });
    let (flow, service) = serving(odd, 1);
    let running = flow.spawn().unwrap();
    for n in 0..6 {
        match within(service.ask(n)).await {
            Ok(doubled) => assert_eq!((doubled, n % 2), (2 * n, 1)),
            Err(error) => assert_eq!((error.kind(), n % 2), (ErrorKind::Unanswered, 0), "{error}"),
        }
    }
    drop(service);
    within(running).await.unwrap();
}

/// The operator ends with a request, and the flow continues.
#[tokio::test]
async fn e1_a_request_of_an_ended_operator_is_unanswered() {
    let once = task::<MapPorts<u32, u32>, _>(|ports, _cx| {
        async move {
            ports.input.recv().await?;
            Ok(())
        }
        .boxed()
    });
    let (mut flow, service) = serving(once, 1);
    let other = flow.add("other", sink(|_: u32| ready(Ok(()))));
    let numbers = flow.ingress("numbers", other.input);
    let running = flow.spawn().unwrap();
    let error = within(service.ask(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unanswered, "{error}");
    within(numbers.send(1)).await.unwrap();
    drop(numbers);
    within(running).await.unwrap();
}

struct KeepsReplies(Vec<Reply>);

impl Operator for KeepsReplies {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        self.0.extend(cx.take_replies());
        Ok(())
    }
}

#[tokio::test]
async fn e1_kept_replies_are_unanswered_at_the_end_of_the_flow() {
    let (flow, service) = serving(KeepsReplies(Vec::new()), 4);
    let mut running = flow.spawn().unwrap();
    let mut calls = Box::pin(join_all((0..3).map(|n| service.ask(n))));
    until("the operator has all requests", || {
        assert!(calls.as_mut().now_or_never().is_none());
        running.status()[0].runs == 3
    })
    .await;
    running.stop();
    within(&mut running).await.unwrap();
    for answer in within(calls).await {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unanswered);
    }
}

/// Answers in `after`, when the device work of the run is done.
struct AnswersAfter {
    result: Option<Envelope<u32>>,
}

impl Operator for AnswersAfter {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        increment::launch(cx.stream()?, &mut envelope)?;
        self.result = Some(envelope);
        Ok(())
    }

    async fn after(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        match self.result.take() {
            Some(envelope) => Ok(ports.output.send(envelope).await?),
            None => Ok(()),
        }
    }
}

#[tokio::test]
async fn e1_a_message_sent_in_after_is_the_response() {
    let device = emulated();
    let mut flow = Flow::new("e1");
    let after = flow.add("after", AnswersAfter { result: None }).on(&device);
    let hub = HubOptions::bounded(1).envelope_bytes(64);
    let service = flow.service_with("service", after.input, after.output, hub);
    let running = flow.spawn().unwrap();
    for n in 0..5 {
        let mut request = within(service.blank()).await.unwrap();
        request.space().await.unwrap()[0] = n;
        request.set_len(1).unwrap();
        assert_eq!(within(service.ask(request)).await.unwrap().read().await.unwrap(), [n + 1]);
    }
    drop(service);
    within(running).await.unwrap();
}

#[tokio::test]
async fn e1_a_request_split_over_two_paths_gets_one_joined_response() {
    #[derive(Ports)]
    struct SplitPorts {
        #[input]
        input: Input<u32>,
        #[output]
        one: Output<u32>,
        #[output]
        other: Output<u32>,
    }

    struct Split;

    impl Operator for Split {
        type Ports = SplitPorts;

        async fn compute(&mut self, ports: &mut SplitPorts, _cx: &mut Cx) -> Result<()> {
            let n = ports.input.take()?;
            ports.one.send(n).await?;
            ports.other.send(10 * n).await?;
            Ok(())
        }
    }

    #[derive(Ports)]
    struct JoinPorts {
        #[input]
        parts: wakeline::Inputs<u32>,
        #[output]
        sum: Output<u32>,
    }

    struct Join;

    impl Operator for Join {
        type Ports = JoinPorts;

        async fn compute(&mut self, ports: &mut JoinPorts, _cx: &mut Cx) -> Result<()> {
            let sum = ports.parts.take()?.sum();
            ports.sum.send(sum).await?;
            Ok(())
        }
    }

    let mut flow = Flow::new("e1");
    let split = flow.add("split", Split);
    let join = flow.add("join", Join);
    flow.connect(split.one, join.parts);
    flow.connect(split.other, join.parts);
    let service = flow.service("service", split.input, join.sum);
    let running = flow.spawn().unwrap();
    for (n, answer) in within(join_all((0..50).map(|n| service.ask(n)))).await.into_iter().enumerate() {
        assert_eq!(answer.unwrap(), 11 * n as u32, "both parts belong to the same request");
    }
    drop(service);
    within(running).await.unwrap();
}

/// Admitted requests are answered. Later ones, and those that wait for room, fail.
#[tokio::test]
async fn e1_stop_answers_admitted_requests_and_refuses_others() {
    let gate = Arc::new(Notify::new());
    let (flow, mut service) = serving(gated(&gate), 1);
    let running = flow.spawn().unwrap();
    until_ready(&service).await;
    let mut admitted: Vec<_> = (0..2).map(|n| Box::pin(service.ask(n))).collect();
    assert!(poll!(admitted[0].as_mut()).is_pending());
    until_running(&running).await;
    assert!(poll!(admitted[1].as_mut()).is_pending());
    let mut waiting = Box::pin(service.ask(2));
    assert!(poll!(waiting.as_mut()).is_pending());
    running.stop();
    let error = within(waiting).await.unwrap_err();
    assert!(error.is_closed() && error.to_string().contains("was stopped"), "{error}");
    for (n, call) in admitted.into_iter().enumerate() {
        gate.notify_one();
        assert_eq!(within(call).await.unwrap(), 2 * n as u32);
    }
    within(running).await.unwrap();
    assert!(within(service.ready()).await.unwrap_err().is_closed());
    assert!(within(service.ask(3)).await.unwrap_err().is_closed());
    assert!(service.is_closed());
}

/// A slot that was reserved before the stop does not delay the end of the flow.
#[tokio::test]
async fn e1_a_slot_reserved_before_the_stop_is_void_after_it() {
    let (flow, mut service) = serving(double(), 1);
    let running = flow.spawn().unwrap();
    within(service.ready()).await.unwrap();
    running.stop();
    within(running).await.unwrap();
    assert!(within(service.call(1)).await.unwrap_err().is_closed());
}

/// Also requests that wait for room.
#[tokio::test]
async fn e1_a_flow_that_ends_early_fails_all_requests() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum How {
        Abort,
        Drop,
        Fail,
        Panic,
    }
    for how in [How::Abort, How::Drop, How::Fail, How::Panic] {
        let gate = Arc::new(Notify::new());
        let opened = gate.clone();
        let end = map(move |n: u32| {
            let gate = opened.clone();
            async move {
                gate.notified().await;
                match how {
                    How::Fail => Err(Error::other("planned")),
                    How::Panic => panic!("planned"),
                    _ => Ok(n),
                }
            }
        });
        let (flow, service) = serving(end, 2);
        let running = flow.spawn().unwrap();
        until_ready(&service).await;
        let mut calls: Vec<_> = (0..5).map(|n| Box::pin(service.ask(n))).collect();
        for (n, call) in calls.iter_mut().enumerate() {
            assert!(poll!(call.as_mut()).is_pending());
            if n == 0 {
                until_running(&running).await;
            }
        }
        let handle = running.handle();
        assert!(handle.failure().is_none());
        let mut running = Some(running);
        match how {
            How::Abort => handle.abort(),
            How::Drop => drop(running.take()),
            How::Fail | How::Panic => gate.notify_one(),
        }
        let expected = match how {
            How::Abort | How::Drop => ErrorKind::Cancelled,
            How::Fail => ErrorKind::Operator,
            How::Panic => ErrorKind::Panicked,
        };
        for call in calls {
            let error = within(call).await.unwrap_err();
            assert_eq!(error.kind(), expected, "{how:?}: {error}");
        }
        assert_eq!(handle.failure().unwrap().kind(), expected);
        if let Some(running) = running {
            assert_eq!(within(running).await.unwrap_err().kind(), expected);
        }
        assert_eq!(within(service.ask(9)).await.unwrap_err().kind(), expected, "{how:?}");
    }
}

struct FailsWithReplies;

impl Operator for FailsWithReplies {
    type Ports = BatchPorts;

    async fn compute(&mut self, ports: &mut BatchPorts, cx: &mut Cx) -> Result<()> {
        let _numbers: Vec<u32> = ports.input.take_batch()?.collect();
        let _replies = cx.take_replies();
        Err(Error::other("failed with replies"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_callers_get_the_failure_and_not_unanswered() {
    for _ in 0..50 {
        let mut flow = Flow::new("e1");
        let fails = flow.add("fails", FailsWithReplies);
        let service = flow.service("service", fails.input, fails.output);
        let running = flow.spawn().unwrap();
        for answer in within(join_all((0..3).map(|n| service.ask(n)))).await {
            assert_eq!(answer.unwrap_err().kind(), ErrorKind::Operator, "the failure, not `Unanswered`");
        }
        let error = within(running).await.unwrap_err();
        assert!(error.to_string().contains("failed with replies"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_a_lost_device_fails_all_requests() {
    let faults = Faults::new().trap_kernel("increment", 5);
    let device = emulated_with(Emulated::new().workers(4).faults(faults));
    let mut flow = Flow::new("e1");
    let first = flow.add("first", Increment).on(&device);
    // It reads the data on the host, so its answers are right.
    let read = flow.add(
        "read",
        map(async |envelope: Envelope<u32>| {
            let first = envelope.read().await?[0];
            Ok(first)
        }),
    );
    flow.connect(first.output, read.input);
    let hub = HubOptions::bounded(2).envelope_bytes(256);
    let service = flow.service_with("service", first.input, read.output, hub);
    let running = flow.spawn().unwrap();
    let ask = |n: u32| {
        let service = service.clone();
        async move {
            let mut request = service.blank().await?;
            request.space().await?[0] = n;
            request.set_len(1)?;
            service.ask(request).await
        }
    };
    let answers = within(join_all((0..20).map(ask))).await;
    let mut lost = 0;
    for (n, answer) in answers.into_iter().enumerate() {
        match answer {
            Ok(answer) => assert_eq!(answer, n as u32 + 1),
            Err(error) => {
                assert!(error.is_device_lost(), "{error}");
                lost += 1;
            }
        }
    }
    assert!(lost >= 16, "only four requests precede the trap, but {} were answered", 20 - lost);
    assert!(within(running).await.unwrap_err().is_device_lost());
    assert!(within(ask(1)).await.unwrap_err().is_device_lost(), "later requests fail, too");
}

/// Many clients on a small hub, some of which give up: each gets the response to its own request, and no slot leaks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_clients_that_give_up_mix_no_responses_and_leak_no_slots() {
    for capacity in [1, 7] {
        let mut flow = Flow::new("e1");
        let first = flow.add("first", double());
        let second = flow.add("second", pass_on::<u32>());
        flow.connect(first.output, second.input);
        let service = flow.service_with("service", first.input, second.output, HubOptions::bounded(capacity)).limit(20);
        let running = flow.spawn().unwrap();
        let client = |client: u32| {
            let service = service.clone();
            tokio::spawn(async move {
                for n in 0..quick_or_long(60, 1000) {
                    let n = 1000 * client + n;
                    if n.is_multiple_of(5) {
                        let mut call = Box::pin(service.ask(n));
                        for _ in 0..n % 3 {
                            let _ = poll!(call.as_mut());
                            tokio::task::yield_now().await;
                        }
                        continue;
                    }
                    assert_eq!(service.clone().oneshot(n).await.unwrap(), 2 * n);
                }
            })
        };
        for client in within(join_all((0..50).map(client))).await {
            client.unwrap();
        }
        // All slots are free again.
        let mut ready: Vec<_> = (0..capacity).map(|_| service.clone()).collect();
        for service in &mut ready {
            within(poll_fn(|cx| service.poll_ready(cx))).await.unwrap();
        }
        drop((ready, service));
        within(running).await.unwrap();
    }
}
