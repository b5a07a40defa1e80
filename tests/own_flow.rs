//! An operator that waits for its own flow as a caller outside would: for a response of its service, for room in its
//! ingress, and in its `start` (Q8).

use std::{
    future::{poll_fn, ready},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use common::*;
use futures::FutureExt;
use tokio::{sync::Notify, time::Instant};
use tower_service::Service as _;
use wakeline::{
    Ingress, Service,
    condition::{Status, every},
    operator::MapPorts,
    prelude::*,
};

/// A service that the flow's operators ask.
type Asked = Arc<std::sync::Mutex<Option<Service<u32, u32>>>>;

async fn ask(service: &Asked, request: u32) -> Result<u32> {
    let service = lock(service).clone().unwrap();
    service.ask(request).await
}

/// Factorials: `product` asks the service for the factorial of the number below.
fn asks_itself(before: usize, behind: usize) -> (Flow, Asked) {
    let (mut flow, service) = (Flow::new("factorial"), Asked::default());
    let asked = service.clone();
    let product = flow.add(
        "product",
        map(move |number: u32| {
            let asked = asked.clone();
            async move { if number == 0 { Ok(1) } else { Ok(number * ask(&asked, number - 1).await?) } }
        }),
    );
    let (mut first, mut last) = (product.input, product.output);
    for number in 0..before {
        let pass = flow.add(format!("before {number}"), pass_on::<u32>());
        flow.connect(pass.output, first);
        first = pass.input;
    }
    for number in 0..behind {
        let pass = flow.add(format!("behind {number}"), pass_on::<u32>());
        flow.connect(last, pass.input);
        last = pass.output;
    }
    *lock(&service) = Some(flow.service("factorials", first, last));
    let tick = flow.add("tick", source(|| ready(Ok(Some(0_u8)))));
    let tick = tick.when(every(Duration::from_millis(20)));
    let log = flow.add("log", sink(|_: u8| ready(Ok(()))));
    flow.connect(tick.output, log.input);
    (flow, service)
}

#[tokio::test(start_paused = true)]
async fn an_operator_that_asks_its_own_service_is_a_stall() {
    for (before, behind) in [(0, 0), (0, 2), (2, 0), (1, 1)] {
        let (flow, service) = asks_itself(before, behind);
        let running = flow.spawn().unwrap();
        assert_eq!(within(ask(&service, 0)).await.unwrap(), 1, "a request without recursion is answered");
        let error = within(ask(&service, 3)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Stalled);
        let text = within(running).await.unwrap_err().to_string();
        let wait = "`product` waits for a response from its own flow's service `factorials`";
        assert!(text.contains(wait), "{before} before and {behind} behind: {text}");
        lock(&service).take();
    }
}

/// The same in a flow that is being stopped, without a ticking operator.
#[tokio::test(start_paused = true)]
async fn an_operator_that_asks_its_own_service_is_a_stall_as_the_flow_is_stopped() {
    let (mut flow, service) = (Flow::new("stops"), Asked::default());
    let asked = service.clone();
    let begun = Arc::new(Notify::new());
    let begins = begun.clone();
    let asks = flow.add(
        "asks",
        map(move |number: u32| {
            let (asked, begins) = (asked.clone(), begins.clone());
            async move {
                begins.notify_one();
                ask(&asked, number).await
            }
        }),
    );
    *lock(&service) = Some(flow.service("service", asks.input, asks.output));
    let running = flow.spawn().unwrap();
    let outside = tokio::spawn({
        let service = service.clone();
        async move { ask(&service, 3).await }
    });
    within(begun.notified()).await;
    running.stop();
    assert_eq!(within(running).await.unwrap_err().kind(), ErrorKind::Stalled);
    assert_eq!(within(outside).await.unwrap().unwrap_err().kind(), ErrorKind::Stalled);
    lock(&service).take();
}

/// The requests of other callers leave no room for the request of the operator that takes them.
#[tokio::test(start_paused = true)]
async fn an_operator_that_waits_for_room_in_its_own_service_is_a_stall() {
    for (before, behind) in [(0, 0), (2, 0), (1, 1)] {
        let (flow, service) = asks_itself(before, behind);
        let running = flow.spawn().unwrap();
        let callers = (0..8).map(|_| {
            tokio::spawn({
                let service = service.clone();
                async move { ask(&service, 3).await }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            assert_eq!(within(caller).await.unwrap().unwrap_err().kind(), ErrorKind::Stalled);
        }
        let text = within(running).await.unwrap_err().to_string();
        let wait = "`product` waits for room in hub `factorials.requests -> ";
        assert!(text.contains(wait), "{before} before and {behind} behind: {text}");
        lock(&service).take();
    }
}

/// The reader of an ingress sends to it.
#[tokio::test(start_paused = true)]
async fn an_operator_that_waits_for_room_in_its_own_ingress_is_a_stall() {
    let (mut flow, feed) = (Flow::new("echoes"), Arc::new(OnceLock::<Ingress<u32>>::new()));
    let own = feed.clone();
    let echo = flow.add(
        "echo",
        sink(move |number: u32| {
            let own = own.clone();
            async move {
                for _ in 0..number {
                    own.get().unwrap().send(number - 1).await?;
                }
                Ok(())
            }
        }),
    );
    let ingress = flow.ingress_with("in", echo.input, HubOptions::bounded(2));
    feed.set(ingress.clone()).unwrap();
    let running = flow.spawn().unwrap();
    within(ingress.send(2)).await.unwrap();
    within(ingress.send(3)).await.unwrap();
    let error = within(running).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled);
    let text = error.to_string();
    assert!(
        text.contains("`echo` waits for room in hub `in.messages -> echo.input`: its queue of 2 is full"),
        "{text}"
    );
}

/// An outside caller reserves room and uses it later. The hub is then full, although no operator has parked since.
#[tokio::test(start_paused = true)]
async fn reserved_room_that_an_outside_caller_has_used_hides_no_stall() {
    for stepped in [false, true] {
        let (flow, service) = asks_itself(0, 0);
        let reserving = lock(&service).clone().unwrap();
        let first = tokio::spawn({
            let service = service.clone();
            async move { ask(&service, 2).await }
        });
        let second = tokio::spawn(async move {
            let mut reserving = reserving;
            poll_fn(|task| reserving.poll_ready(task)).await?;
            tokio::time::sleep(Duration::from_millis(730)).await;
            reserving.call(2).await
        });
        let error = if stepped {
            let mut steps = flow.steps().unwrap();
            let all = async { while steps.next().await.is_some() {} };
            // Each tick is a step.
            let _ = tokio::time::timeout(Duration::from_secs(30), all).await;
            steps.handle().failure().expect("the stall has been found")
        } else {
            within(flow.spawn().unwrap()).await.unwrap_err()
        };
        assert_eq!(error.kind(), ErrorKind::Stalled, "{stepped}");
        for caller in [first, second] {
            assert_eq!(within(caller).await.unwrap().unwrap_err().kind(), ErrorKind::Stalled, "{stepped}");
        }
        lock(&service).take();
    }
}

/// Room that an outside caller has reserved may be released at any time.
#[tokio::test(start_paused = true)]
async fn an_operator_that_waits_for_room_reserved_by_an_outside_caller_is_in_no_deadlock() {
    let (flow, service) = asks_itself(0, 0);
    let running = flow.spawn().unwrap();
    assert_eq!(within(ask(&service, 0)).await.unwrap(), 1);
    // The operator has not taken this request yet, so `reserving` is the next to get room.
    let mut outside = Box::pin(ask(&service, 1));
    assert!(futures::poll!(&mut outside).is_pending());
    let mut reserving = lock(&service).clone().unwrap();
    assert!(futures::poll!(poll_fn(|task| reserving.poll_ready(task))).is_pending());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(running.handle().failure().is_none());
    drop(reserving);
    // Now the operator's request is queued for the operator itself.
    assert_eq!(within(outside).await.unwrap_err().kind(), ErrorKind::Stalled);
    assert_eq!(within(running).await.unwrap_err().kind(), ErrorKind::Stalled);
    lock(&service).take();
}

#[tokio::test(start_paused = true)]
async fn an_operator_that_asks_its_own_service_may_be_answered_by_another_task() {
    let (mut flow, service) = (Flow::new("asks"), Asked::default());
    // Answers odd numbers later, from a task. Passes even numbers on to `asks`.
    let even = flow.add(
        "even",
        task(|ports: &mut MapPorts<u32, u32>, cx| {
            async move {
                while cx.ready(ports).await {
                    let number = ports.input.take()?;
                    if number.is_multiple_of(2) {
                        ports.output.send(number).await?;
                        continue;
                    }
                    let replies = cx.take_replies();
                    tokio::spawn(async move {
                        tokio::time::sleep(Duration::from_secs(30)).await;
                        for reply in replies {
                            reply.fail(Error::new(ErrorKind::Usage, format!("{number} is odd")));
                        }
                    });
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let (asked, errors) = (service.clone(), shared());
    let noted = errors.clone();
    let asks = flow.add(
        "asks",
        map(move |number: u32| {
            let (asked, noted) = (asked.clone(), noted.clone());
            async move {
                let answer = ask(&asked, number + 1).await;
                lock(&noted).push(answer.unwrap_err().to_string());
                Ok(number)
            }
        }),
    );
    flow.connect(even.output, asks.input);
    *lock(&service) = Some(flow.service("service", even.input, asks.output));
    let running = flow.spawn().unwrap();
    assert_eq!(within(ask(&service, 2)).await.unwrap(), 2);
    lock(&service).take();
    running.stop();
    within(running).await.unwrap();
    assert!(lock(&errors)[0].contains("3 is odd"));
}

#[tokio::test(start_paused = true)]
async fn an_operator_that_asks_a_service_which_does_not_need_it_is_in_no_deadlock() {
    let (mut flow, service) = (Flow::new("asks"), Asked::default());
    let slow = flow.add(
        "slow",
        map(async |number: u32| {
            tokio::time::sleep(Duration::from_secs(60)).await;
            Ok(number + 1)
        }),
    );
    *lock(&service) = Some(flow.service("service", slow.input, slow.output));
    let asked = service.clone();
    let mut numbers = 0..3_u32;
    let asks = flow.add(
        "asks",
        source(move || {
            let (asked, number) = (asked.clone(), numbers.next());
            async move {
                let Some(number) = number else { return Ok(None) };
                ask(&asked, number).await.map(Some)
            }
        }),
    );
    let results = shared();
    let keep = flow.add("keep", keep(&results));
    flow.connect(asks.output, keep.input);
    let running = flow.spawn().unwrap();
    tokio::time::sleep(Duration::from_secs(200)).await;
    lock(&service).take();
    running.stop();
    within(running).await.unwrap();
    assert_eq!(*lock(&results), [1, 2, 3]);
}

/// A response that is polled from outside is no wait of an operator, nor of one that has ended.
#[tokio::test(start_paused = true)]
async fn a_response_that_is_polled_from_outside_is_no_operators_wait() {
    let mut flow = Flow::new("asks");
    let slow = flow.add(
        "slow",
        map(async |number: u32| {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(number)
        }),
    );
    let service = flow.service("service", slow.input, slow.output);
    let mut once = Some(1_u32);
    let once = flow.add("once", source(move || ready(Ok(once.take()))));
    let end = flow.add("end", sink(|_: u32| ready(Ok(()))));
    flow.connect(once.output, end.input);
    let running = flow.spawn().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let ended = || running.status().into_iter().find(|operator| &*operator.name == "once").unwrap();
    assert_eq!((ended().status, ended().running), (Status::Never, false));
    let mut response = Box::pin(service.ask(7));
    assert!(response.as_mut().now_or_never().is_none());
    assert_eq!((ended().status, ended().running), (Status::Never, false));
    assert_eq!(within(response).await.unwrap(), 7);
    drop(service);
    within(running).await.unwrap();
}

struct InStart<F>(F);

impl<W: Future<Output = Result<()>> + Send, F: Fn() -> W + Send + 'static> Operator for InStart<F> {
    type Ports = ();

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        (self.0)().await
    }

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

/// The flow runs once all operators have started: a `start` that waits for the flow would wait for ever.
#[tokio::test]
async fn q8_a_start_that_waits_for_its_own_flow_is_a_stall() {
    for own_thread in [false, true] {
        for asks in [true, false] {
            let mut flow = Flow::new("q8");
            let echo = flow.add("echo", pass_on::<u32>());
            let service = Arc::new(flow.service("echoes", echo.input, echo.output));
            let end = flow.add("end", sink(|_: u32| ready(Ok(()))));
            let ingress = Arc::new(flow.ingress("numbers", end.input));
            let early = flow.add(
                "early",
                InStart(move || {
                    let (service, ingress) = (service.clone(), ingress.clone());
                    async move { if asks { service.ask(1).await.map(drop) } else { Ok(ingress.send(1).await?) } }
                }),
            );
            if own_thread {
                let _ = early.on_own_thread();
            }
            let error = within(flow.run()).await.unwrap_err();
            assert!(
                error.is_stalled() && error.to_string().contains("operator `early` waits in its `start`"),
                "{error}"
            );
        }
    }
}

/// A flow has no output before it runs. A separate task may wait for it, and so may the `start` of an operator of
/// another flow.
#[tokio::test(start_paused = true)]
async fn q8_a_start_may_wait_for_another_flow() {
    let mut flow = Flow::new("q8");
    let echo = flow.add("echo", pass_on::<u32>());
    let service = Arc::new(Mutex::new(Some(flow.service("echoes", echo.input, echo.output))));
    let (mut other, outer) = (Flow::new("other"), lock(&service).clone().unwrap());
    let (answers, mut answer) = tokio::sync::mpsc::unbounded_channel();
    flow.add(
        "spawns",
        InStart(move || {
            let (service, answers) = (lock(&service).take().unwrap(), answers.clone());
            async move {
                tokio::spawn(async move { answers.send(service.ask(7).await) });
                Ok(())
            }
        }),
    );
    let numbers = other.add("numbers", source(|| ready(Ok(None::<u32>))));
    let out = Arc::new(tokio::sync::Mutex::new(other.egress("out", numbers.output)));
    let outer = Arc::new(Mutex::new(Some(outer)));
    other.add(
        "waits",
        InStart(move || {
            let (service, out) = (lock(&outer).take().unwrap(), out.clone());
            async move {
                assert_eq!(out.lock().await.recv().await, None);
                assert_eq!(service.ask(8).await?, 8);
                Ok(())
            }
        }),
    );
    let other = other.spawn().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let running = flow.spawn().unwrap();
    within(other).await.unwrap();
    within(running).await.unwrap();
    assert_eq!(within(answer.recv()).await.unwrap().unwrap(), 7);
}

/// The time limit also applies while an operator is in its `start`.
#[tokio::test(start_paused = true)]
async fn stop_within_ends_a_flow_that_has_not_begun() {
    let mut flow = Flow::new("begins");
    flow.add("waits", InStart(std::future::pending::<Result<()>>));
    let running = flow.spawn().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    running.stop_within(Duration::from_secs(3));
    let begun = Instant::now();
    let error = within(running).await.unwrap_err();
    assert!(error.is_cancelled() && error.to_string().contains("`waits` is in its `start`"), "{error}");
    assert_eq!(begun.elapsed().as_secs(), 3);
}

/// A stopped flow is checked for a stall while a response for one of its operators is queued at the service.
#[tokio::test(start_paused = true)]
async fn a_response_on_its_way_in_a_stopped_flow_is_no_stall() {
    // How long the last operator works, and how long before its end the flow is stopped, in milliseconds.
    for (works, early) in [(50, 25), (150, 99), (150, 100), (150, 101), (200, 100), (250, 100), (250, 150)] {
        let mut flow = Flow::new("stopped");
        let inner = Arc::new(Mutex::new(None::<Service<u32, u32>>));
        let asks = inner.clone();
        let asks = map(move |number: u32| {
            let service = lock(&asks).take();
            async move {
                tokio::time::sleep(Duration::from_millis(150)).await;
                service.expect("one request").ask(number).await
            }
        });
        let after = |time| {
            map(move |number: u32| async move {
                tokio::time::sleep(Duration::from_millis(time)).await;
                Ok(number + 1)
            })
        };
        let (asks, first, second) =
            (flow.add("asks", asks), flow.add("first", after(50)), flow.add("second", after(works)));
        flow.connect(first.output, second.input);
        let outer = flow.service("outer", asks.input, asks.output);
        *lock(&inner) = Some(flow.service("inner", first.input, second.output));
        let running = flow.spawn().unwrap();
        let handle = running.handle();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(200 + works - early)).await;
            handle.stop();
        });
        let answer = within(outer.ask(1)).await;
        drop(outer);
        assert_eq!(answer.unwrap_or_else(|error| panic!("{works}, {early}: {error}")), 3);
        within(running).await.unwrap();
    }
}
