//! Scenario E1: a flow as a service. Requests and responses matched, back-pressure as readiness, and nobody left without an
//! answer.

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

/// A service whose only operator is this one.
fn serving<P>(operator: impl Operator<Ports = P>, places: usize) -> (Flow, Service<u32, u32>)
where
    P: wakeline::operator::Ports<Handles = wakeline::operator::MapHandles<u32, u32>>,
{
    let mut flow = Flow::new("e1");
    let only = flow.add("only", operator);
    let service = flow.service_with("service", only.input, only.output, Hub::bounded(places));
    (flow, service)
}

fn double() -> impl Operator<Ports = MapPorts<u32, u32>> {
    map(|n: u32| ready(Ok(2 * n)))
}

/// Doubles what it is given when it is told to, one at a time.
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

/// The flow has begun, and there is room.
async fn begun(service: &Service<u32, u32>) {
    within(service.clone().ready()).await.unwrap();
}

/// Has an operator taken a request?
async fn at_work(running: &wakeline::Running) {
    until("an operator is at work", || running.status().iter().any(|status| status.running)).await;
}

fn is_sync<T: Send + Sync + Unpin>(_: &T) {}

// Over two operators on a device, more callers than envelopes.
on_both!(e1_requests_and_responses_are_matched, async |device: Device| {
    let mut flow = Flow::new("e1");
    let first = flow.add("first", Increment).on(&device);
    let second = flow.add("second", Increment).on(&device);
    flow.connect(first.output, second.input);
    let hub = Hub::bounded(2).envelopes(3).envelope_bytes(64);
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
                // As tower does.
                service.oneshot(request).await?
            };
            assert_eq!(response.read().await?, [n + 2, 7 * n + 2]);
            Ok::<_, Error>(())
        })
    };
    for answered in join_all((0..300).map(ask)).await {
        answered.unwrap().unwrap();
    }
    drop(service);
    let report = running.await.unwrap();
    assert_eq!(report.operator("service").unwrap().messages_in, 300);
    assert_eq!(report.operator("service").unwrap().messages_out, 300);
    freed(&device).await;
});

#[tokio::test]
async fn e1_ready_is_a_place_that_is_kept() {
    let gate = Arc::new(Notify::new());
    let (flow, mut service) = serving(gated(&gate), 1);
    let mut other = service.clone();
    assert!(poll!(pin!(service.ready())).is_pending(), "the flow does not run yet");
    let running = flow.spawn().unwrap();
    within(service.ready()).await.unwrap();
    let one = service.call(1);
    at_work(&running).await;
    within(service.ready()).await.unwrap();
    assert!(poll!(pin!(other.ready())).is_pending(), "the only place is kept for the first");
    let two = service.call(2);
    assert!(poll!(pin!(other.ready())).is_pending(), "and now it is taken");
    gate.notify_one();
    assert_eq!(within(one).await.unwrap(), 2);
    within(other.ready()).await.unwrap();

    // Whoever is ready and goes away gives the place to the next.
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
    assert_eq!(error.kind(), ErrorKind::Usage, "it was not asked whether it is ready: {error}");
    drop((service, third));
    within(running).await.unwrap();
}

#[tokio::test]
async fn e1_overload_is_shed_where_that_is_asked_for() {
    let gate = Arc::new(Notify::new());
    let (flow, service) = serving(gated(&gate), 2);
    let running = flow.spawn().unwrap();
    begun(&service).await;
    let shedding = ServiceBuilder::new().load_shed().service(service.clone());
    let mut taken = Vec::new();
    for n in 0..3 {
        taken.push(Box::pin(service.ask(n)));
        assert!(poll!(taken[n as usize].as_mut()).is_pending());
        if n == 0 {
            at_work(&running).await;
        }
    }
    for _ in 0..5 {
        let error = within(shedding.clone().oneshot(9)).await.unwrap_err();
        assert!(error.is::<Overloaded>(), "{error}");
    }
    for (n, taken) in taken.into_iter().enumerate() {
        gate.notify_one();
        assert_eq!(within(taken).await.unwrap(), 2 * n as u32);
    }
    gate.notify_one();
    assert_eq!(within(shedding.oneshot(9)).await.unwrap(), 18);
    drop(service);
    within(running).await.unwrap();
}

/// A limit holds for the whole way; whoever goes away is not counted any more, and operators can know.
#[tokio::test]
async fn e1_a_client_that_goes_away_frees_its_slot() {
    let gate = Arc::new(Notify::new());
    let (told, mut abandoned) = mpsc::unbounded_channel();

    struct Looks(Arc<Notify>, mpsc::UnboundedSender<bool>);

    impl Operator for Looks {
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

    let (flow, service) = serving(Looks(gate.clone(), told), 8);
    let mut service = service.limit(1);
    let other = service.clone();
    let running = flow.spawn().unwrap();
    within(service.ready()).await.unwrap();
    let first = service.call(1);
    at_work(&running).await;
    assert!(poll!(pin!(other.clone().ready())).is_pending(), "there is room, but no slot");
    let mut asking = Box::pin(other.ask(3));
    assert!(poll!(asking.as_mut()).is_pending());
    drop(first);
    assert!(poll!(asking.as_mut()).is_pending(), "it has the slot now");
    let mut late = service.clone();
    assert!(poll!(pin!(late.ready())).is_pending());
    gate.notify_one();
    gate.notify_one();
    until("both are through", || {
        gate.notify_one();
        abandoned.len() == 2
    })
    .await;
    assert_eq!(within(asking).await.unwrap(), 6);
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

/// Takes all that are there, once there are four.
struct Batch {
    says_which: bool,
}

impl Operator for Batch {
    type Ports = BatchPorts;

    fn may_run(&mut self, ports: &BatchPorts, _cx: &Cx) -> bool {
        ports.input.len() == 4
    }

    async fn compute(&mut self, ports: &mut BatchPorts, cx: &mut Cx) -> Result<()> {
        let numbers: Vec<u32> = ports.input.take_batch()?.collect();
        if !self.says_which {
            return ports.output.send(numbers[0]).await;
        }
        let mut replies: Vec<_> = numbers.into_iter().zip(cx.take_replies()).collect();
        assert!(cx.take_replies().is_empty());
        // In another order than they came in.
        replies.reverse();
        for (n, reply) in replies {
            ports.output.send_for(reply, 2 * n).await?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn e1_a_batch_says_which_answer_is_whose() {
    for says_which in [true, false] {
        let mut flow = Flow::new("e1");
        let batch = flow.add("batch", Batch { says_which });
        let service = flow.service_with("service", batch.input, batch.output, Hub::bounded(4));
        let running = flow.spawn().unwrap();
        let answers = within(join_all((0..8).map(|n| service.ask(n)))).await;
        for (n, answer) in answers.into_iter().enumerate() {
            if says_which {
                assert_eq!(answer.unwrap(), 2 * n as u32);
            } else {
                let error = answer.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Usage);
                assert!(error.to_string().contains("the response cannot be distinguished from those"), "{error}");
            }
        }
        drop(service);
        within(running).await.unwrap();
    }
}

/// Refuses some, drops some, keeps some for later runs, and answers some.
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
async fn e1_nobody_is_left_without_an_answer() {
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

/// An operator that filters in a loop of its own, without a thought of who waits.
#[tokio::test]
async fn e1_what_a_loop_of_its_own_drops_is_answered_too() {
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

/// An operator that ends with a request in its hands, in a flow that goes on.
#[tokio::test]
async fn e1_what_an_operator_takes_with_it_is_answered_too() {
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

/// Keeps what it is asked, and never answers.
struct Hoards(Vec<Reply>);

impl Operator for Hoards {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        self.0.extend(cx.take_replies());
        Ok(())
    }
}

#[tokio::test]
async fn e1_what_is_kept_to_the_end_is_answered_then() {
    let (flow, service) = serving(Hoards(Vec::new()), 4);
    let mut running = flow.spawn().unwrap();
    let mut asked = Box::pin(join_all((0..3).map(|n| service.ask(n))));
    until("it has them all", || {
        assert!(asked.as_mut().now_or_never().is_none());
        running.status()[0].runs == 3
    })
    .await;
    running.stop();
    within(&mut running).await.unwrap();
    for answer in within(asked).await {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unanswered);
    }
}

/// Answers when its run's device work is done.
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
            Some(envelope) => ports.output.send(envelope).await,
            None => Ok(()),
        }
    }
}

#[tokio::test]
async fn e1_what_is_sent_after_a_run_answers_too() {
    let device = emulated();
    let mut flow = Flow::new("e1");
    let after = flow.add("after", AnswersAfter { result: None }).on(&device);
    let hub = Hub::bounded(1).envelope_bytes(64);
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

/// A request that goes two ways, of which one is enough to answer it.
#[tokio::test]
async fn e1_two_ways_and_one_answer() {
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
            ports.other.send(10 * n).await
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
            ports.sum.send(sum).await
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
        assert_eq!(answer.unwrap(), 11 * n as u32, "both parts are the same request's");
    }
    drop(service);
    within(running).await.unwrap();
}

/// Those who have asked are answered; those who ask later, and those who wait for room, are told.
#[tokio::test]
async fn e1_stop_drains() {
    let gate = Arc::new(Notify::new());
    let (flow, mut service) = serving(gated(&gate), 1);
    let running = flow.spawn().unwrap();
    begun(&service).await;
    let mut asked: Vec<_> = (0..2).map(|n| Box::pin(service.ask(n))).collect();
    assert!(poll!(asked[0].as_mut()).is_pending());
    at_work(&running).await;
    assert!(poll!(asked[1].as_mut()).is_pending());
    let mut waits = Box::pin(service.ask(2));
    assert!(poll!(waits.as_mut()).is_pending());
    running.stop();
    let error = within(waits).await.unwrap_err();
    assert!(error.is_closed() && error.to_string().contains("was stopped"), "{error}");
    for (n, asked) in asked.into_iter().enumerate() {
        gate.notify_one();
        assert_eq!(within(asked).await.unwrap(), 2 * n as u32);
    }
    within(running).await.unwrap();
    assert!(within(service.ready()).await.unwrap_err().is_closed());
    assert!(within(service.ask(3)).await.unwrap_err().is_closed());
    assert!(service.is_closed());
}

/// A place that was kept when the flow stopped is worth nothing, and holds no flow up.
#[tokio::test]
async fn e1_ready_before_the_stop_and_called_after_it() {
    let (flow, mut service) = serving(double(), 1);
    let running = flow.spawn().unwrap();
    within(service.ready()).await.unwrap();
    running.stop();
    within(running).await.unwrap();
    assert!(within(service.call(1)).await.unwrap_err().is_closed());
}

/// Aborted, its handle dropped, an operator that fails or panics: everybody hears of it, wherever their requests are.
#[tokio::test]
async fn e1_a_flow_that_ends_early_answers_all() {
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
                    How::Fail => Err(Error::other("a reason of its own")),
                    How::Panic => panic!("a reason of its own"),
                    _ => Ok(n),
                }
            }
        });
        let (flow, service) = serving(end, 2);
        let running = flow.spawn().unwrap();
        begun(&service).await;
        let mut asked: Vec<_> = (0..5).map(|n| Box::pin(service.ask(n))).collect();
        for (n, asked) in asked.iter_mut().enumerate() {
            assert!(poll!(asked.as_mut()).is_pending());
            if n == 0 {
                at_work(&running).await;
            }
        }
        let handle = running.handle();
        assert!(handle.failure().is_none());
        let mut left = Some(running);
        match how {
            How::Abort => handle.abort(),
            How::Drop => drop(left.take()),
            How::Fail | How::Panic => gate.notify_one(),
        }
        let wanted = match how {
            How::Abort | How::Drop => ErrorKind::Cancelled,
            How::Fail => ErrorKind::Operator,
            How::Panic => ErrorKind::Panicked,
        };
        for asked in asked {
            let error = within(asked).await.unwrap_err();
            assert_eq!(error.kind(), wanted, "{how:?}: {error}");
        }
        assert_eq!(handle.failure().unwrap().kind(), wanted);
        if let Some(running) = left {
            assert_eq!(within(running).await.unwrap_err().kind(), wanted);
        }
        assert_eq!(within(service.ask(9)).await.unwrap_err().kind(), wanted, "{how:?}");
    }
}

/// Takes a request, fails, and has replies in its hands.
struct FailsWithReplies;

impl Operator for FailsWithReplies {
    type Ports = BatchPorts;

    async fn compute(&mut self, ports: &mut BatchPorts, cx: &mut Cx) -> Result<()> {
        let _numbers: Vec<u32> = ports.input.take_batch()?.collect();
        let _replies = cx.take_replies();
        Err(Error::other("with replies in its hands"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_what_failed_is_said_and_not_what_was_dropped_for_it() {
    for _ in 0..50 {
        let mut flow = Flow::new("e1");
        let fails = flow.add("fails", FailsWithReplies);
        let service = flow.service("service", fails.input, fails.output);
        let running = flow.spawn().unwrap();
        for answer in within(join_all((0..3).map(|n| service.ask(n)))).await {
            assert_eq!(answer.unwrap_err().kind(), ErrorKind::Operator, "and not that it was not answered");
        }
        let error = within(running).await.unwrap_err();
        assert!(error.to_string().contains("with replies in its hands"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_a_lost_device_answers_all() {
    let faults = Faults::new().trap_kernel("increment", 5);
    let device = emulated_with(Emulated::new().workers(4).faults(faults));
    let mut flow = Flow::new("e1");
    let first = flow.add("first", Increment).on(&device);
    // On the host, and it looks at the data: so what it answers is right.
    let read = flow.add(
        "read",
        map(async |envelope: Envelope<u32>| {
            let first = envelope.read().await?[0];
            Ok(first)
        }),
    );
    flow.connect(first.output, read.input);
    let hub = Hub::bounded(2).envelope_bytes(256);
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
    assert!(lost >= 16, "only four came before the trap, and {} were answered", 20 - lost);
    assert!(within(running).await.unwrap_err().is_device_lost());
    assert!(within(ask(1)).await.unwrap_err().is_device_lost(), "from now on, too");
}

/// Many clients, with little room, who give up now and then: nobody gets another's answer, and no place is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_many_clients_some_of_whom_give_up() {
    for places in [1, 7] {
        let mut flow = Flow::new("e1");
        let first = flow.add("first", double());
        let second = flow.add("second", pass_on::<u32>());
        flow.connect(first.output, second.input);
        let service = flow.service_with("service", first.input, second.output, Hub::bounded(places)).limit(20);
        let running = flow.spawn().unwrap();
        let client = |client: u32| {
            let service = service.clone();
            tokio::spawn(async move {
                for n in 0..quick_or_long(60, 1000) {
                    let n = 1000 * client + n;
                    if n.is_multiple_of(5) {
                        let mut asked = Box::pin(service.ask(n));
                        for _ in 0..n % 3 {
                            let _ = poll!(asked.as_mut());
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
        // All places are there again.
        let mut ready: Vec<_> = (0..places).map(|_| service.clone()).collect();
        for service in &mut ready {
            within(poll_fn(|cx| service.poll_ready(cx))).await.unwrap();
        }
        drop((ready, service));
        within(running).await.unwrap();
    }
}
