//! Operators that wait only for each other while the rest of the flow continues: they end or stall (Q7, Q8).

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use common::*;
use futures::{FutureExt, future::join_all};
use tokio::{sync::Notify, time::Instant};
use wakeline::{
    Service,
    condition::every,
    flow::OnStall,
    operator::{InputHandle, MapPorts, OutputHandle, Reply, SinkPorts},
    prelude::*,
};

#[derive(Ports)]
struct JunctionPorts {
    #[input(at_least = 1)]
    any: Inputs<u32>,
    #[output]
    forth: Output<u32>,
    #[output]
    seen: Output<u32>,
}

/// Counts the numbers in the loop down, and sends each to `seen`.
struct Junction;

impl Operator for Junction {
    type Ports = JunctionPorts;

    async fn compute(&mut self, ports: &mut JunctionPorts, _cx: &mut Cx) -> Result<()> {
        let Some((_, number)) = ports.any.try_take_any()? else { return Ok(()) };
        ports.seen.send(number).await?;
        if number > 0 {
            ports.forth.send(number - 1).await?;
        }
        Ok(())
    }
}

/// A loop that counts down from a number, beside an operator that runs every 20 ms with the loop's latest number.
fn loop_beside_a_timer(from: u32) -> (Flow, Arc<AtomicU64>) {
    let mut flow = Flow::new("q7");
    let ticks = add_loop(&mut flow, from, "");
    (flow, ticks)
}

fn add_loop(flow: &mut Flow, from: u32, which: &str) -> Arc<AtomicU64> {
    let ticks = Arc::new(AtomicU64::new(0));
    let (mut once, counted) = (Some(from), ticks.clone());
    let begin = flow.add(format!("begin{which}"), source(move || ready(Ok(once.take()))));
    let junction = flow.add(format!("junction{which}"), Junction);
    let back = flow.add(format!("back{which}"), pass_on::<u32>());
    let show = sink(move |_: u32| ready(Ok(_ = counted.fetch_add(1, Ordering::Relaxed))));
    let show = flow.add(format!("show{which}"), show).when(every(Duration::from_millis(20)));
    flow.connect(begin.output, junction.any);
    flow.connect(junction.forth, back.input);
    flow.connect(back.output, junction.any);
    flow.connect_with(junction.seen, show.input, HubOptions::latest());
    ticks
}

#[tokio::test(start_paused = true)]
async fn q7_two_loops_that_become_idle_together_end() {
    let mut flow = Flow::new("q7");
    add_loop(&mut flow, 10, "");
    add_loop(&mut flow, 10, " too");
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("junction too").unwrap().runs, 11);
}

/// One search finds all loops: with a search for each, at ten searches a second, this would take five seconds.
#[tokio::test(start_paused = true)]
async fn q7_fifty_idle_loops_end_within_a_second() {
    let (mut flow, start) = (Flow::new("q7"), tokio::time::Instant::now());
    for which in 0..50 {
        add_loop(&mut flow, 1, &which.to_string());
    }
    within(flow.run()).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn q7_an_idle_loop_beside_a_timer_ends() {
    let (mut flow, ticks) = loop_beside_a_timer(10);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("junction").unwrap().runs, 11);
    assert!(ticks.load(Ordering::Relaxed) > 1, "the timer's operator runs meanwhile");
}

#[tokio::test(start_paused = true)]
async fn q7_a_loop_beside_a_timer_is_drained_when_the_flow_is_stopped() {
    let (flow, ticks) = loop_beside_a_timer(1000);
    let running = flow.spawn().unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(ticks.load(Ordering::Relaxed) > 2);
    running.stop();
    let report = within(running).await.unwrap();
    assert_eq!(report.operator("begin").unwrap().runs, 2, "messages in the loop are drained");
}

#[derive(Ports)]
struct DeskPorts {
    #[input(at_least = 1)]
    any: Inputs<u32>,
    #[output]
    back: Output<u32>,
    #[output]
    responses: Output<u32>,
}

/// Sends each request round the loop until it is 0, then answers it.
struct Desk;

impl Operator for Desk {
    type Ports = DeskPorts;

    async fn compute(&mut self, ports: &mut DeskPorts, _cx: &mut Cx) -> Result<()> {
        match ports.any.try_take_any()? {
            Some((_, 0)) => Ok(ports.responses.send(0).await?),
            Some((_, number)) => Ok(ports.back.send(number - 1).await?),
            None => Ok(()),
        }
    }
}

/// A closed service waits only for its responses, and thus for the loop that produces them.
#[tokio::test(start_paused = true)]
async fn q7_an_idle_loop_of_a_closed_service_beside_a_timer_ends() {
    for stops in [false, true] {
        let mut flow = Flow::new("q7");
        let desk = flow.add("desk", Desk);
        let show = flow.add("show", sink(|_: u32| ready(Ok(())))).when(every(Duration::from_millis(20)));
        let service = flow.service("rounds", desk.any, desk.responses);
        flow.connect(desk.back, [desk.any.with(HubOptions::bounded(4)), show.input.with(HubOptions::latest())]);
        let running = flow.spawn().unwrap();
        assert_eq!(within(service.ask(3)).await.unwrap(), 0);
        // While calls are possible, nothing ends.
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(within(service.ask(2)).await.unwrap(), 0);
        if stops {
            running.stop();
        } else {
            drop(service);
        }
        let report = within(running).await.unwrap();
        assert_eq!(report.operator("desk").unwrap().runs, 7);
    }
}

#[derive(Ports)]
struct BesidePorts {
    #[input]
    newest: Input<u32>,
    #[input]
    ticks: Input<u64>,
}

/// Needs a message of each input: ticks stay in their hub until `newest` has one.
struct Beside(Arc<AtomicU64>);

impl Operator for Beside {
    type Ports = BesidePorts;

    async fn compute(&mut self, ports: &mut BesidePorts, _cx: &mut Cx) -> Result<()> {
        ports.newest.take()?;
        ports.ticks.take()?;
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A reader of the loop that still has messages on another input ends with the loop, as it would with a source.
#[tokio::test(start_paused = true)]
async fn q7_an_idle_loop_ends_though_its_reader_has_queued_messages() {
    for (sent, stops) in [(None, true), (Some(2), true), (None, false), (Some(2), false)] {
        let (mut flow, runs) = (Flow::new("q7"), Arc::new(AtomicU64::new(0)));
        let mut ticks = 0..if stops { u64::MAX } else { 20 };
        let ticks = flow.add("ticks", source(move || ready(Ok(ticks.next()))));
        let ticks = ticks.when(every(Duration::from_millis(20)));
        let desk = flow.add("desk", Desk);
        let beside = flow.add("beside", Beside(runs.clone()));
        let end = flow.add("end", sink(|_: u32| ready(Ok(()))));
        let ingress = flow.ingress("rounds", desk.any);
        flow.connect(desk.back, [desk.any.with(HubOptions::bounded(4)), beside.newest.with(HubOptions::latest())]);
        flow.connect(desk.responses, end.input);
        flow.connect(ticks.output, beside.ticks);
        let running = flow.spawn().unwrap();
        if let Some(number) = sent {
            within(ingress.send(number)).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        match stops {
            true => running.stop(),
            false => drop(ingress),
        }
        let report = within(running).await.unwrap();
        assert_eq!(report.operator("desk").unwrap().runs, sent.map_or(0, |number| u64::from(number) + 1));
        assert_eq!(runs.load(Ordering::Relaxed) > 0, sent.is_some());
    }
}

#[derive(Ports)]
struct ExchangePorts {
    #[input]
    requests: Input<u32>,
    #[input]
    back: Input<u32>,
    #[output]
    forth: Output<u32>,
    #[output]
    responses: Output<u32>,
}

/// Waits for a request and for an echo of its own last message: the first echo never comes.
struct Exchange;

impl Operator for Exchange {
    type Ports = ExchangePorts;

    async fn compute(&mut self, ports: &mut ExchangePorts, _cx: &mut Cx) -> Result<()> {
        let sum = ports.requests.take()? + ports.back.take()?;
        ports.forth.send(sum).await?;
        ports.responses.send(sum).await?;
        Ok(())
    }
}

fn exchange(flow: &mut Flow) -> (InputHandle<u32>, OutputHandle<u32>) {
    let exchange = flow.add("exchange", Exchange);
    let echo = flow.add("echo", pass_on::<u32>());
    flow.connect(exchange.forth, echo.input);
    flow.connect(echo.output, exchange.back);
    (exchange.requests, exchange.responses)
}

#[tokio::test(start_paused = true)]
async fn q8_a_deadlock_in_a_service_is_a_stall_and_answers_the_callers() {
    let mut flow = Flow::new("q8");
    let (requests, responses) = exchange(&mut flow);
    let service = flow.service("sums", requests, responses);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    let calls = [1, 2, 3].map(|number| {
        let service = service.clone();
        async move { service.ask(number).await }
    });
    for answer in within(join_all(calls)).await {
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Stalled);
    }
    assert_eq!(handle.failure().unwrap().kind(), ErrorKind::Stalled);
    let text = within(running).await.unwrap_err().to_string();
    for wait in [
        "these operators wait only for each other",
        "`exchange` waits for a message in hub `echo.output -> exchange.back`",
        "`echo` waits for a message in hub `exchange.forth -> echo.input`",
    ] {
        assert!(text.contains(wait), "{text}");
    }
    assert!(!text.contains("sums"), "the service is not part of the deadlock: {text}");
}

fn deadlock_beside_a_timer() -> (Flow, Service<u32, u32>, Arc<AtomicU64>) {
    let (mut flow, ticks) = (Flow::new("q8"), Arc::new(AtomicU64::new(0)));
    let (requests, responses) = exchange(&mut flow);
    let service = flow.service("sums", requests, responses);
    let counted = ticks.clone();
    let tick = flow.add("tick", source(move || ready(Ok(Some(counted.fetch_add(1, Ordering::Relaxed))))));
    let tick = tick.when(every(Duration::from_millis(20)));
    let log = flow.add("log", sink(|_: u64| ready(Ok(()))));
    flow.connect(tick.output, log.input);
    (flow, service, ticks)
}

#[tokio::test(start_paused = true)]
async fn q8_with_on_stall_warn_the_other_operators_run_until_the_stop() {
    let (mut flow, service, ticks) = deadlock_beside_a_timer();
    flow.set_on_stall(OnStall::Warn);
    let warnings = Warnings::default();
    let _subscriber = tracing::subscriber::set_default(warnings.clone());
    let running = flow.spawn().unwrap();
    let call = tokio::spawn(async move { service.ask(1).await });
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(ticks.load(Ordering::Relaxed) > 499);
    assert!(running.handle().failure().is_none() && !call.is_finished());
    let warned = warnings.messages();
    assert_eq!(warned.iter().filter(|text| text.contains("`exchange` waits for")).count(), 1, "{warned:?}");
    running.stop();
    assert_eq!(within(running).await.unwrap_err().kind(), ErrorKind::Stalled);
    assert_eq!(within(call).await.unwrap().unwrap_err().kind(), ErrorKind::Stalled);
}

#[tokio::test(start_paused = true)]
async fn q8_a_deadlock_beside_a_timer_is_a_stall() {
    let (flow, service, ticks) = deadlock_beside_a_timer();
    let running = flow.spawn().unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(ticks.load(Ordering::Relaxed) > 499);
    assert!(running.handle().failure().is_none(), "without a request the flow has not stalled");
    assert_eq!(within(service.ask(1)).await.unwrap_err().kind(), ErrorKind::Stalled);
    assert_eq!(within(running).await.unwrap_err().kind(), ErrorKind::Stalled);
}

/// An operator keeps all envelopes of its hub and waits for another message.
#[tokio::test(start_paused = true)]
async fn q8_kept_envelopes_beside_a_timer_are_a_stall() {
    let (mut flow, kept) = (Flow::new("q8"), shared());
    let keeps = kept.clone();
    let fill = flow.add(
        "fill",
        task(|ports: &mut SourcePorts<Envelope<u8>>, _cx| {
            async move {
                loop {
                    let envelope = ports.output.blank().await?;
                    ports.output.send(envelope).await?;
                }
            }
            .boxed()
        }),
    );
    let window = flow.add(
        "window",
        sink(move |envelope: Envelope<u8>| {
            lock(&keeps).push(envelope);
            ready(Ok(()))
        }),
    );
    flow.connect_with(fill.output, window.input, HubOptions::bounded(1).envelope_bytes(8));
    let tick = flow.add("tick", source(|| ready(Ok(Some(0_u8)))));
    let tick = tick.when(every(Duration::from_millis(20)));
    let log = flow.add("log", sink(|_: u8| ready(Ok(()))));
    flow.connect(tick.output, log.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled);
    let text = error.to_string();
    assert!(
        text.contains("`fill` waits for a blank envelope") && text.contains("`window` waits for a message"),
        "{text}"
    );
    assert_eq!(lock(&kept).len(), 2);
}

/// An operator that waits for something other than its ports may be notified from outside of the flow.
#[tokio::test(start_paused = true)]
async fn q8_a_wait_for_a_notification_from_outside_is_no_deadlock() {
    let (mut flow, outside) = (Flow::new("q8"), Arc::new(Notify::new()));
    let notified = outside.clone();
    let mut rounds = 0..3_u32;
    let slow = flow.add(
        "slow",
        source(move || {
            let (notified, next) = (notified.clone(), rounds.next());
            async move {
                notified.notified().await;
                Ok(next)
            }
        }),
    );
    let results = shared();
    let keep = flow.add("keep", keep(&results));
    flow.connect(slow.output, keep.input);
    let tick = flow.add("tick", source(|| ready(Ok(Some(0_u8)))));
    let tick = tick.when(every(Duration::from_millis(20)));
    let log = flow.add("log", sink(|_: u8| ready(Ok(()))));
    flow.connect(tick.output, log.input);
    let running = flow.spawn().unwrap();
    let start = Instant::now();
    for round in 0..4 {
        tokio::time::sleep_until(start + Duration::from_secs(10 * (round + 1))).await;
        assert!(running.handle().failure().is_none());
        outside.notify_one();
    }
    running.stop();
    within(running).await.unwrap();
    assert_eq!(*lock(&results), [0, 1, 2]);
}

/// The stop finds a source in a run that never ends.
#[tokio::test(start_paused = true)]
async fn a_flow_that_does_not_stop_in_time_is_aborted_and_names_the_remaining_operators() {
    let mut flow = Flow::new("slow");
    let never = flow.add("never", source(std::future::pending::<Result<Option<u8>>>));
    let reads = flow.add("reads", sink(|_: u8| ready(Ok(()))));
    let mut once = Some(1_u8);
    let done = flow.add("done", source(move || ready(Ok(once.take()))));
    let also = flow.add("also", sink(|_: u8| ready(Ok(()))));
    flow.connect(never.output, reads.input);
    flow.connect(done.output, also.input);
    let running = flow.spawn().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let start = Instant::now();
    running.handle().stop_within(Duration::from_secs(60));
    running.stop_within(Duration::from_secs(3));
    let error = within(running).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(start.elapsed().as_secs(), 3, "the earliest deadline counts");
    let text = error.to_string();
    assert!(text.contains("flow `slow` did not end within 3s of `stop`"), "{text}");
    assert!(text.contains("`never` is in a run") && text.contains("`reads` waits for a message"), "{text}");
    assert!(!text.contains("`done`") && !text.contains("`also`"), "{text}");
}

#[derive(Ports)]
struct AskPorts {
    #[input(optional)]
    answers: Input<u32>,
    #[output(optional)]
    slow: Output<u32>,
    #[output(optional)]
    asks: Output<u32>,
}

#[derive(Ports)]
struct AnswerPorts {
    #[input(optional)]
    asks: Input<u32>,
    #[output(optional)]
    answers: Output<u32>,
}

/// In one run, `asks` waits for a message of `answers` and for room in the hub of `slow`, which takes a message every 700
/// ms. `answers` waits for `asks`.
async fn asks_and_waits<A>(asks: A) -> Result<wakeline::Report>
where
    A: for<'p> FnMut(&'p mut AskPorts, &'p mut Cx) -> futures::future::BoxFuture<'p, Result<()>> + Send + 'static,
{
    let mut flow = Flow::new("asks");
    let asks = flow.add("asks", task(asks));
    let answers = task(|ports: &mut AnswerPorts, _cx| {
        async move {
            ports.asks.recv().await?;
            ports.asks.recv().await?;
            ports.answers.send(5).await?;
            Ok(())
        }
        .boxed()
    });
    let answers = flow.add("answers", answers);
    let slow = flow.add("slow", sink(|_: u32| ready(Ok(())))).when(every(Duration::from_millis(700)));
    flow.connect(asks.asks, answers.asks);
    flow.connect(answers.answers, asks.answers);
    flow.connect(asks.slow, slow.input);
    within(flow.run()).await
}

#[tokio::test(start_paused = true)]
async fn q8_a_run_that_waits_for_a_message_or_for_room_waits_for_both() {
    for message_first in [false, true] {
        asks_and_waits(move |ports, _cx| {
            async move {
                ports.asks.send(0).await?;
                // `slow` takes the first message at once. The second one stays in the hub.
                ports.slow.send(1).await?;
                ports.slow.send(2).await?;
                {
                    let (message, room) = (ports.answers.recv(), ports.slow.send(3));
                    let (mut message, mut room) = (std::pin::pin!(message), std::pin::pin!(room));
                    std::future::poll_fn(|task| {
                        if message_first {
                            assert!(message.as_mut().poll(task).is_pending(), "no message was sent");
                        }
                        let sent = room.as_mut().poll(task);
                        if !message_first && sent.is_pending() {
                            assert!(message.as_mut().poll(task).is_pending(), "no message was sent");
                        }
                        sent
                    })
                    .await?;
                }
                ports.asks.send(1).await?;
                assert_eq!(ports.answers.recv().await?, Some(5));
                Ok(())
            }
            .boxed()
        })
        .await
        .unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn q8_a_completed_wait_for_room_hides_no_deadlock() {
    let received = shared();
    let list = received.clone();
    asks_and_waits(move |ports, _cx| {
        let list = list.clone();
        async move {
            ports.asks.send(0).await?;
            let slow = async {
                ports.slow.send(1).await?;
                ports.slow.send(2).await?;
                ports.slow.send(3).await
            };
            let (message, sent) = futures::join!(ports.answers.recv(), slow);
            sent?;
            // No message can come: `answers` waits for this operator.
            lock(&list).push(message?);
            Ok(())
        }
        .boxed()
    })
    .await
    .unwrap();
    assert_eq!(*lock(&received), [None]);
}

/// Two operators refuse to run with less than two messages. One ends, since its reader has ended; the refusal of the other
/// one is a stall.
#[tokio::test(start_paused = true)]
async fn an_ended_operator_that_had_refused_does_not_cause_endless_calls_of_may_run() {
    struct Pairs(Arc<AtomicU64>);

    impl Operator for Pairs {
        type Ports = MapPorts<u32, u32>;

        fn may_run(&mut self, ports: &MapPorts<u32, u32>, _cx: &Cx) -> bool {
            let Self(calls) = self;
            assert!(calls.fetch_add(1, Ordering::Relaxed) < 1000, "`may_run` is called without end");
            ports.input.len() >= 2
        }

        async fn compute(&mut self, ports: &mut MapPorts<u32, u32>, _cx: &mut Cx) -> Result<()> {
            let sum = ports.input.take()? + ports.input.take()?;
            ports.output.send(sum).await?;
            Ok(())
        }
    }

    /// Ends some time after its first message.
    struct First;

    impl Operator for First {
        type Ports = SinkPorts<u32>;

        async fn compute(&mut self, ports: &mut SinkPorts<u32>, cx: &mut Cx) -> Result<()> {
            ports.input.take()?;
            cx.finish();
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok(())
        }
    }

    let mut flow = Flow::new("refuses");
    for (name, count) in [("a", 3), ("b", 1)] {
        let mut numbers = 0..count;
        let numbers = flow.add(format!("{name} numbers"), source(move || ready(Ok(numbers.next()))));
        let pairs = flow.add(format!("{name} pairs"), Pairs(Arc::default()));
        let first = flow.add(format!("{name} first"), First);
        flow.connect_with(numbers.output, pairs.input, HubOptions::bounded(2));
        flow.connect(pairs.output, first.input);
    }
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
}

/// All handles of the gate are dropped. Then an operator gets a new one by name, and resumes the gate later.
#[tokio::test(start_paused = true)]
async fn a_gate_with_a_new_handle_keeps_its_flow_alive() {
    let mut flow = Flow::new("again");
    let gate = flow.gate("gate");
    gate.pause();
    let mut numbers = 0..1;
    let send = flow.add("send", source(move || ready(Ok(numbers.next()))));
    let finds = flow.add("finds", FindsGate);
    let seen = shared();
    let into = seen.clone();
    let keep = move |number: u32| {
        lock(&into).push(number);
        ready(Ok(()))
    };
    let gated = flow.add("gated", sink(keep)).when(gate.clone());
    drop(gate);
    flow.connect(send.output, finds.input);
    flow.connect(finds.output, gated.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [0]);
}

#[derive(Ports)]
struct FillsEachOtherPorts {
    #[input(optional)]
    from: Input<u32>,
    #[output]
    to: Output<u32>,
}

/// Sends nothing in its first run, and more than there is room for in the second.
struct FillsEachOther(u32);

impl Operator for FillsEachOther {
    type Ports = FillsEachOtherPorts;

    async fn compute(&mut self, ports: &mut FillsEachOtherPorts, _cx: &mut Cx) -> Result<()> {
        self.0 += 1;
        for number in 0..5 * (self.0 - 1) {
            ports.to.send(number).await?;
        }
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn q8_a_deadlock_in_a_periodic_run_is_found() {
    let mut flow = Flow::new("q8");
    let a = flow.add("a", FillsEachOther(0)).when(every(Duration::from_millis(50)));
    let b = flow.add("b", FillsEachOther(0));
    flow.connect(a.to, b.from);
    flow.connect(b.to, a.from);
    let ticks = flow.add("ticks", source(async || Ok(Some(0_u32)))).when(every(Duration::from_millis(20)));
    let takes = flow.add("takes", sink(|_: u32| ready(Ok(()))));
    flow.connect(ticks.output, takes.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("`a` waits for room") && text.contains("`b` waits for room") && !text.contains("tick"),
        "{text}"
    );
}

/// Refuses to run, and queries gates in each `may_run`.
struct QueriesGates(Arc<AtomicU64>, &'static [&'static str]);

impl Operator for QueriesGates {
    type Ports = SourcePorts<u32>;

    fn may_run(&mut self, _ports: &Self::Ports, cx: &Cx) -> bool {
        let open = self.1.iter().filter(|gate| cx.gate(gate).unwrap().is_open()).count();
        assert_eq!(open, self.1.len());
        self.0.fetch_add(1, Ordering::Relaxed);
        false
    }

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        unreachable!("it may not run")
    }
}

/// Otherwise operators that query each other's gates would call `may_run` without end.
#[tokio::test]
async fn querying_a_gate_wakes_no_operator() {
    let (mut flow, calls) = (Flow::new("looks"), Arc::new(AtomicU64::new(0)));
    let gates = ["a", "b"].map(|name| flow.gate(name));
    for (name, gate) in ["one", "other"].into_iter().zip(gates) {
        let looks = flow.add(name, QueriesGates(calls.clone(), &["a", "b"])).when(gate);
        let takes = flow.add(format!("after {name}"), sink(|_: u32| ready(Ok(()))));
        flow.connect(looks.output, takes.input);
    }
    within(flow.run()).await.unwrap();
    assert!(calls.load(Ordering::Relaxed) < 100, "{calls:?}");
}

/// Forwards a message, and resumes the gate long after the other operators have become idle.
struct FindsGate;

impl Operator for FindsGate {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        ports.output.send(number).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let gate = cx.gate("gate")?;
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            gate.resume();
        });
        Ok(())
    }
}

#[derive(Ports)]
struct TwoPorts {
    #[input(at_least = 2, capacity = 2)]
    back: Input<u32>,
    #[input(optional)]
    ticks: Input<u32>,
    #[output(optional)]
    forth: Output<u32>,
}

/// An operator that waits for a second message of its own does not wait for its optional input, whose writer still runs.
#[tokio::test(start_paused = true)]
async fn q8_an_optional_input_hides_no_deadlock() {
    let mut flow = Flow::new("q8");
    let mut ticks = 0..;
    let ticks = flow.add("ticks", source(move || ready(Ok(ticks.next())))).when(every(Duration::from_millis(50)));
    let own = task(|ports: &mut TwoPorts, cx| {
        async move {
            ports.forth.send(1).await?;
            while cx.ready(ports).await {
                ports.back.take()?;
            }
            Ok(())
        }
        .boxed()
    });
    let own = flow.add("own", own);
    flow.connect(own.forth, own.back);
    flow.connect_with(ticks.output, own.ticks, HubOptions::drop_oldest(1));
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_stalled() && error.to_string().contains("`own` waits for 2 messages"), "{error}");
}

#[derive(Ports)]
struct FillPorts {
    #[input(capacity = 8)]
    number: Input<u32>,
    #[output(envelope_bytes = 4, envelopes = 2, capacity = 4)]
    filled: Output<Envelope<u32>>,
}

/// Puts each number into one of the two envelopes of its hub.
struct FillOne;

impl Operator for FillOne {
    type Ports = FillPorts;

    async fn compute(&mut self, ports: &mut FillPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.number.take()?;
        let mut blank = ports.filled.blank().await?;
        blank.fill_from(&[number]).await?;
        ports.filled.send(blank).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct WindowPorts {
    #[input(at_least = 1)]
    any: Inputs<Envelope<u32>>,
    #[output]
    answers: Output<Envelope<u32>>,
}

/// Keeps envelopes, with their replies, until there are `size`, and then answers with each.
struct Window {
    size: usize,
    kept: Vec<(Reply, Envelope<u32>)>,
}

impl Operator for Window {
    type Ports = WindowPorts;

    async fn compute(&mut self, ports: &mut WindowPorts, cx: &mut Cx) -> Result<()> {
        let Some((_, envelope)) = ports.any.try_take_any()? else { return Ok(()) };
        self.kept.extend(cx.take_replies().into_iter().zip([envelope]));
        if self.kept.len() == self.size {
            for (reply, envelope) in self.kept.drain(..).filter(|(reply, _)| !reply.is_empty()) {
                ports.answers.send_for(reply, envelope).await?;
            }
        }
        Ok(())
    }
}

/// A service behind which two envelopes are in use until the window is full, and the input of the window.
fn window_behind_a_service(flow: &mut Flow, size: usize) -> (Service<u32, Envelope<u32>>, InputHandle<Envelope<u32>>) {
    let fill = flow.add("fill", FillOne);
    let window = flow.add("window", Window { size, kept: Vec::new() });
    flow.connect(fill.filled, window.any);
    (flow.service("numbers", fill.number, window.answers), window.any)
}

async fn ask_all(service: &Service<u32, Envelope<u32>>, count: u32) -> Vec<Result<Envelope<u32>>> {
    join_all((0..count).map(|number| service.ask(number))).await
}

/// The service passes responses on and keeps no envelope of the flow: no request can release one.
#[tokio::test(start_paused = true)]
async fn q8_kept_envelopes_behind_a_service_are_a_stall() {
    let mut flow = Flow::new("q8");
    let (service, _) = window_behind_a_service(&mut flow, 3);
    let running = flow.spawn().unwrap();
    for answer in within(ask_all(&service, 4)).await {
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Stalled);
    }
    let text = within(running).await.unwrap_err().to_string();
    for wait in ["`fill` waits for a blank envelope", "`window` waits for a message"] {
        assert!(text.contains(wait), "{text}");
    }
    assert!(!text.contains("numbers"), "the service is not part of the deadlock: {text}");
}

/// Callers keep their responses, and wait for others: no operator waits for an envelope that no request can release.
#[tokio::test(start_paused = true)]
async fn q8_a_service_that_a_further_request_lets_continue_has_not_stalled() {
    let mut flow = Flow::new("q8");
    let (service, _) = window_behind_a_service(&mut flow, 2);
    let running = flow.spawn().unwrap();
    let kept = within(ask_all(&service, 4)).await;
    let waits = tokio::spawn({
        let service = service.clone();
        async move { service.ask(4).await }
    });
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(running.handle().failure().is_none() && !waits.is_finished());
    within(service.ask(5)).await.unwrap();
    within(waits).await.unwrap().unwrap();
    drop((service, kept));
    within(running).await.unwrap();
}

/// The operator that keeps the envelopes also waits for messages from outside, and returns them after one.
#[tokio::test(start_paused = true)]
async fn q8_kept_envelopes_behind_a_service_that_an_ingress_can_release_are_no_stall() {
    let mut flow = Flow::new("q8");
    let (service, window) = window_behind_a_service(&mut flow, 3);
    let ingress = flow.ingress_with("more", window, HubOptions::bounded(1).envelope_bytes(4));
    let running = flow.spawn().unwrap();
    let calls = tokio::spawn({
        let service = service.clone();
        async move { ask_all(&service, 3).await }
    });
    // The first message completes a window with two requests, and the others one with the third request.
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(running.handle().failure().is_none() && !calls.is_finished());
        let mut more = within(ingress.blank()).await.unwrap();
        more.fill_from(&[7]).await.unwrap();
        within(ingress.send(more)).await.unwrap();
    }
    for answer in within(calls).await.unwrap() {
        answer.unwrap();
    }
    drop((service, ingress));
    within(running).await.unwrap();
}
