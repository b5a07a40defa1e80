//! Scenarios C13 and C14: the visible status of operators that wait, the cost of waiting, and the end of a flow whose
//! operators all wait.

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Context,
};

use common::clock::*;
use common::{until as becomes, *};
use futures::StreamExt;
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, sleep, timeout},
};
use wakeline::{
    Running, Stream,
    condition::{
        AsyncState, Asynchronous, Condition, Count, Gate, IntoCondition, Status, When, any_of, at_least, count, every,
        predicate, until,
    },
    flow::{Handle, OperatorStatus},
    prelude::*,
};

/// An operator that sends what arrives from the channel, until all of the channel's senders are dropped.
fn fed<M: wakeline::Message>() -> (mpsc::Sender<M>, impl Operator<Ports = SourcePorts<M>>) {
    let (feed, fed) = mpsc::channel(8);
    let fed = Arc::new(tokio::sync::Mutex::new(fed));
    let operator = source(move || {
        let fed = fed.clone();
        async move { Ok(fed.lock().await.recv().await) }
    });
    (feed, operator)
}

fn one(flow: &Handle, name: &str) -> OperatorStatus {
    flow.status().into_iter().find(|operator| &*operator.name == name).expect("the operator was added")
}

/// Lets all tasks finish the work that is ready, without advancing the time.
async fn settled() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

/// Holoscan's states in Holoscan's order of precedence: Never, WaitEvent, Wait, WaitTime, Ready.
#[tokio::test(start_paused = true)]
async fn c14_what_an_operator_waits_for_can_be_read_at_any_time() {
    let gate = Gate::paused();
    let (feed, feeds) = fed();
    let mut flow = Flow::new("c14");
    let send = flow.add("send", feeds);
    let take = flow.add("take", runs_for(3, |ports: &mut SinkPorts<u32>, _cx: &mut Cx| ports.input.take().map(drop)));
    let take = take.when(every(ms(10))).when(gate.clone());
    flow.connect(send.output, take.input);
    let running = flow.spawn().unwrap();
    let flow = running.handle();
    let take = || one(&flow, "take");
    assert_eq!((take().status, take().running, take().runs), (Status::Ready, false, 0), "before the first poll");

    settled().await;
    let message = "a message in hub `send.output -> take.input`";
    assert_eq!(take().status, Status::WaitEvent, "the gate takes precedence over the message");
    assert_eq!(take().waits_for, [message, "its gate to be resumed"]);
    let send = one(&flow, "send");
    assert!(send.running && send.waits_for.is_empty(), "waits within a run are not listed: {send:?}");

    gate.resume();
    settled().await;
    assert_eq!((take().status, take().waits_for), (Status::Wait, vec![message.to_owned()]));

    let begun = Instant::now();
    feed.send(1).await.unwrap();
    settled().await;
    assert_eq!((take().status, take().running, take().runs), (Status::Ready, true, 0));
    assert!(take().waits_for.is_empty());

    sleep(ms(4)).await;
    assert_eq!(
        (take().status, take().running, take().runs),
        (Status::Wait, false, 1),
        "the message takes precedence over the time"
    );
    assert_eq!(take().waits_for, [message, "its next tick, one every 10ms"]);

    feed.send(2).await.unwrap();
    settled().await;
    assert_eq!(take().status, Status::WaitTime(begun + ms(10)));
    assert_eq!(take().waits_for, ["its next tick, one every 10ms"]);

    gate.end();
    drop(feed);
    let report = within(running).await.unwrap();
    assert_eq!((take().status, take().running, take().runs), (Status::Never, false, 1));
    assert!(take().waits_for.is_empty());
    assert_eq!(report.untaken, 1);
}

/// With several times the status has the latest one, since all of them must pass.
#[tokio::test(start_paused = true)]
async fn c14_the_moment_that_an_operator_waits_for() {
    let mut flow = Flow::new("c14");
    let tick = flow.add("tick", runs(|(): &mut (), _cx: &mut Cx| Ok(())));
    let _ = tick.when(every(ms(10))).when(every(ms(30))).when(any_of(every(ms(50)), every(ms(20)))).when(count(2));
    let running = flow.spawn().unwrap();
    let (flow, begun) = (running.handle(), Instant::now());
    settled().await;
    assert_eq!((one(&flow, "tick").status, one(&flow, "tick").runs), (Status::WaitTime(begun + ms(30)), 1));
    within(running).await.unwrap();
}

#[derive(Ports)]
struct SeveralPorts {
    #[input(at_least = 4, capacity = 4)]
    four: Input<u32>,
    #[input(batch = 8, within = "20ms", capacity = 8)]
    batch: Input<u32>,
    #[input(optional)]
    optional: Input<u32>,
    #[output(optional)]
    whatever: Output<u32>,
    #[output(room = 2, capacity = 2)]
    two: Output<u32>,
}

/// Each port describes what it lacks. Ports that the operator does not wait at are not listed.
#[tokio::test(start_paused = true)]
async fn c14_what_ports_wait_for_in_words() {
    let mut flow = Flow::new("c14");
    let (four, fours) = fed();
    let (batch, batches) = fed();
    let (_optional, optionals) = fed::<u32>();
    let (fours, batches) = (flow.add("fours", fours), flow.add("batches", batches));
    let optionals = flow.add("optionals", optionals);
    let take = flow.add(
        "take",
        runs(|ports: &mut SeveralPorts, _cx: &mut Cx| {
            assert_eq!((ports.four.take_batch()?.len(), ports.batch.take_batch()?.len()), (4, 1));
            ports.whatever.try_send(1)?;
            ports.two.try_send(1)?;
            Ok(())
        }),
    );
    let gate = Gate::paused();
    let whatever = flow.add("whatever", sink(|_: u32| ready(Ok(())))).when(gate.clone());
    let two = flow.add("two", sink(|_: u32| ready(Ok(())))).when(gate.clone());
    flow.connect(fours.output, take.four);
    flow.connect(batches.output, take.batch);
    flow.connect(optionals.output, take.optional);
    flow.connect(take.whatever, whatever.input);
    flow.connect(take.two, two.input);
    let running = flow.spawn().unwrap();
    let flow = running.handle();
    let take = || one(&flow, "take");
    let begun = Instant::now();
    let (of_four, of_batch) = ("4 messages at `four`", "8 messages within 20ms at `batch`");

    settled().await;
    let hubs = ["fours.output -> take.four", "batches.output -> take.batch"];
    let [no_four, no_batch] = hubs.map(|hub| format!("a message in hub `{hub}`"));
    assert_eq!(
        (take().status, take().waits_for),
        (Status::Wait, vec![no_four, no_batch, of_four.into(), of_batch.into()])
    );

    for number in [1, 2] {
        four.send(number).await.unwrap();
    }
    batch.send(1).await.unwrap();
    settled().await;
    assert_eq!((take().status, take().waits_for), (Status::Wait, vec![of_four.into(), of_batch.into()]));

    for number in [3, 4] {
        four.send(number).await.unwrap();
    }
    settled().await;
    assert_eq!((take().status, take().waits_for), (Status::WaitTime(begun + ms(20)), vec![of_batch.into()]));

    sleep(ms(21)).await;
    assert_eq!(take().runs, 1);
    for number in 0..8 {
        four.send(number).await.unwrap();
        batch.send(number).await.unwrap();
    }
    settled().await;
    let no_room = "room for 2 messages in hub `take.two -> two.input`: its queue has 1 of at most 2";
    assert_eq!((take().status, take().waits_for), (Status::Wait, vec![no_room.into()]));
    running.abort();
    assert!(within(running).await.unwrap_err().is_cancelled());
}

/// A condition that holds now is no longer listed.
#[tokio::test]
async fn c14_conditions_that_hold_are_not_listed() {
    #[derive(Ports)]
    struct TickPorts {
        #[input]
        input: Input<u32>,
    }
    /// Each run leaves device work on the buffer that the next one waits for.
    struct Own(Buffer<u32>, Shared<Hold>);
    impl Operator for Own {
        type Ports = TickPorts;

        async fn compute(&mut self, ports: &mut TickPorts, cx: &mut Cx) -> Result<()> {
            ports.input.take()?;
            let stream = cx.stream()?;
            lock(&self.1).push(hold(stream));
            increment::launch(stream, &mut self.0)?;
            cx.run_after(self.0.available());
            Ok(())
        }
    }
    let device = emulated();
    let first = Stream::named(&device, "first").unwrap();
    let mut buffer = Buffer::<u32>::new(&device, 64).unwrap();
    first.fill(&mut buffer, 0).unwrap();
    first.completed().await.unwrap();
    let held = shared();
    let (feed, feeds) = fed();
    let mut flow = Flow::new("c14");
    let send = flow.add("send", feeds);
    let own = flow.add("own", Own(buffer, held.clone())).on(&device);
    flow.connect(send.output, own.input);
    let running = flow.spawn().unwrap();
    let flow = running.handle();
    let message = "a message in hub `send.output -> own.input`";
    becomes("the operator waits for a message", || one(&flow, "own").waits_for == [message]).await;
    feed.send(1).await.unwrap();
    becomes("the operator waits for its buffer, too", || one(&flow, "own").waits_for == [message, "a buffer's data"])
        .await;
    assert_eq!(one(&flow, "own").status, Status::WaitEvent);
    lock(&held).clear();
    becomes("the operator waits for a message", || one(&flow, "own").waits_for == [message]).await;
    assert_eq!(one(&flow, "own").status, Status::Wait);
    running.handle().pause();
    becomes("the operator is paused", || one(&flow, "own").status == Status::WaitEvent).await;
    assert_eq!(one(&flow, "own").waits_for, [message, "the flow to be resumed"]);
    running.handle().resume();
    drop(feed);
    within(running).await.unwrap();
}

/// The stream yields every operator's current status, then each change, until the end.
#[tokio::test(start_paused = true)]
async fn c14_changes_as_a_stream() {
    let gate = Gate::paused();
    let (feed, feeds) = fed();
    let mut flow = Flow::new("c14");
    let send = flow.add("send", feeds);
    let take = flow.add("take", runs_for(3, |ports: &mut SinkPorts<u32>, _cx: &mut Cx| ports.input.take().map(drop)));
    let take = take.when(gate.clone()).when(count(1));
    flow.connect(send.output, take.input);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    let seen = shared();
    let (noted, mut changes) = (seen.clone(), handle.changes());
    let watching = tokio::spawn(async move {
        while let Some(OperatorStatus { name, status, running, .. }) = changes.next().await {
            lock(&noted).push((name.to_string(), status, running));
        }
    });
    settled().await;
    gate.resume();
    settled().await;
    feed.send(1).await.unwrap();
    drop(feed);
    within(running).await.unwrap();
    within(watching).await.unwrap();
    let of = |wanted: &str| {
        let all = lock(&seen).clone();
        all.into_iter().filter(|(name, ..)| name == wanted).map(|(_, status, running)| (status, running)).collect()
    };
    let take: Vec<_> = of("take");
    let wanted = [
        (Status::Ready, false),
        (Status::WaitEvent, false),
        (Status::Wait, false),
        (Status::Ready, true),
        (Status::Never, false),
    ];
    // The first status may have changed before the stream was polled.
    assert_eq!(take[take.len() - 4..], wanted[1..]);
    let send: Vec<_> = of("send");
    assert_eq!(send.last(), Some(&(Status::Never, false)), "{send:?}");

    // After the flow's end, the stream yields the final statuses and ends.
    let all: Vec<_> = within(handle.changes().collect()).await;
    let all: Vec<_> = all.iter().map(|operator| (&*operator.name, operator.status)).collect();
    assert_eq!(all, [("send", Status::Never), ("take", Status::Never)]);
}

/// A paused gate whose last handle was dropped can never open, so an operator that waits only for it has stalled.
#[tokio::test(start_paused = true)]
async fn c5_a_paused_gate_without_handles_is_a_stall() {
    let gate = Gate::paused();
    let mut flow = Flow::new("c5");
    let send = flow.add("send", source(|| ready(Ok(Some(1_u32))))).when(gate.clone());
    let take = flow.add("take", sink(|_: u32| ready(Ok(()))));
    flow.connect(send.output, take.input);
    let mut running = flow.spawn().unwrap();
    // After a week, the remaining handle may still resume the gate.
    assert!(timeout(ms(7 * 86_400_000), &mut running).await.is_err());
    let status = running.status();
    assert_eq!([status[0].status, status[1].status], [Status::WaitEvent, Status::Wait]);
    drop(gate);
    let error = within(running).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled);
    assert!(error.to_string().contains("`send` waits for its gate to be resumed"), "{error}");
}

/// The same when a message is queued: the error is a stall and says so.
#[tokio::test(start_paused = true)]
async fn c5_a_paused_gate_without_handles_is_a_stall_before_a_message() {
    let mut flow = Flow::new("c5");
    let send = flow.add("send", at([(0, 1_u32)]));
    let take = flow.add("take", sink(|_: u32| ready(Ok(())))).when(Gate::paused());
    flow.connect(send.output, take.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled);
    assert!(error.to_string().contains("`take` waits for its gate to be resumed"), "{error}");
}

/// The flow's own entry for a named gate does not count as a handle. A handle that an operator holds does keep the
/// flow.
#[tokio::test(start_paused = true)]
async fn c5_a_gate_by_its_name_keeps_no_flow_from_ending() {
    let mut flow = Flow::new("c5");
    let gate = flow.gate("recording");
    gate.pause();
    let _ = flow.add("record", runs(|(): &mut (), _cx: &mut Cx| Ok(()))).when(gate);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled);
}

/// An operator waits for a message and for a future. No message can arrive, and the future alone does not keep the
/// flow.
#[tokio::test(start_paused = true)]
async fn c12_a_future_keeps_no_flow_in_which_no_message_can_come() {
    let mut flow = Flow::new("c12");
    let pass = flow.add("pass", pass_on::<u32>()).when(until(std::future::pending::<()>));
    flow.connect(pass.output, pass.input);
    let tick = flow.add("tick", pass_on::<u32>()).when(every(ms(10))).when(Gate::open());
    flow.connect(tick.output, tick.input);
    // The flow ends, and a cycle that never began is an error.
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.to_string().contains("`pass` is connected to itself and waits for its own first message"), "{error}");
}

/// The message has arrived, so the operator waits only for the future, which may still resolve.
#[tokio::test(start_paused = true)]
async fn c12_a_future_keeps_a_flow_that_waits_for_nothing_else() {
    let button = Arc::new(Notify::new());
    let pressed = button.clone();
    let mut flow = Flow::new("c12");
    let send = flow.add("send", at([(0, 1_u32)]));
    let take = flow.add("take", sink(|_: u32| ready(Ok(()))));
    let take = take.when(until(move || {
        let pressed = pressed.clone();
        async move { pressed.notified().await }
    }));
    flow.connect(send.output, take.input);
    let mut running = flow.spawn().unwrap();
    assert!(timeout(ms(86_400_000), &mut running).await.is_err());
    assert_eq!(running.status()[1].waits_for, ["the future of its `until` condition"]);
    button.notify_one();
    let report = within(running).await.unwrap();
    assert_eq!(report.operator("take").unwrap().runs, 1);
}

/// One side of an either-or suffices to keep a flow, and to end it.
#[tokio::test(start_paused = true)]
async fn c10_either_of_two_keeps_a_flow() {
    let gate = Gate::paused();
    let mut flow = Flow::new("c10");
    // No message can arrive from the operator itself.
    let pass = flow.add(
        "pass",
        runs(|_: &mut MapPorts<u32, u32>, cx: &mut Cx| {
            cx.finish();
            Ok(())
        }),
    );
    let pass = pass.clone().when(any_of(at_least(pass.input, 1), gate.clone()));
    flow.connect(pass.output, pass.input);
    let mut running = flow.spawn().unwrap();
    assert!(timeout(ms(86_400_000), &mut running).await.is_err());
    let status = running.status().remove(0);
    assert_eq!(status.status, Status::WaitEvent);
    assert_eq!(status.waits_for.last().unwrap(), "1 message at `input` or its gate to be resumed");
    gate.resume();
    let report = within(running).await.unwrap();
    assert_eq!(report.operator("pass").unwrap().runs, 1);
}

/// A predicate that stays false ends a flow that has no other work.
#[tokio::test(start_paused = true)]
async fn c12_a_predicate_that_stays_false_ends_an_idle_flow() {
    let mut flow = Flow::new("c12");
    let _ = flow.add("never", runs(|(): &mut (), _cx: &mut Cx| Ok(()))).when(predicate(|| false)).when(every(ms(10)));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("never").unwrap().runs, 0);
}

/// A flow that is stopped ends immediately, whatever its operators wait for.
#[tokio::test(start_paused = true)]
async fn c14_a_stop_ends_every_wait() {
    let begun = Instant::now();
    let gate = Gate::paused();
    let mut flow = Flow::new("stop");
    let idle = || runs(|(): &mut (), _cx: &mut Cx| Ok(()));
    let _ = flow.add("gate", idle()).when(gate.clone());
    let _ = flow.add("future", idle()).when(until(std::future::pending::<()>));
    let _ = flow.add("time", idle()).when(every(ms(1_000_000)));
    let _ = flow.add("endless", idle()).when(count(-1)).when(any_of(gate.clone(), every(ms(1_000_000))));
    // The source of this operator's messages has already ended.
    let end = flow.add("end", source(|| ready(Ok(None::<u32>))));
    let either = flow.add("either", sink(|_: u32| ready(Ok(()))));
    let either = either.clone().when(any_of(at_least(either.input, 1), gate.clone()));
    flow.connect(end.output, either.input);
    let send = flow.add("send", source(|| ready(Ok(Some(1_u32))))).when(every(ms(1_000_000)));
    let take = flow.add("take", sink(|_: u32| ready(Ok(()))));
    let take = take.clone().when(at_least(take.input, 2).or_after(ms(500_000)));
    flow.connect_with(send.output, take.input, HubOptions::bounded(2));
    let running = flow.spawn().unwrap();
    settled().await;
    running.stop();
    let report = within(running).await.unwrap();
    assert_eq!(begun.elapsed(), ms(0));
    assert_eq!((report.operator("take").unwrap().messages_in, report.untaken), (1, 0));
}

/// Whatever else an operator waits for, a pause shows immediately, and a condition that becomes `Never` ends it
/// immediately.
#[tokio::test(start_paused = true)]
async fn c14_changes_reach_an_operator_that_waits_for_something_else() {
    let state = Asynchronous::new();
    let (gate, left) = (Gate::open(), count(-1));
    let conditions: [fn(&Gate, &Count, &Asynchronous) -> When; 3] = [
        |gate, _, _| gate.clone().into_condition(),
        |_, left, _| left.clone().into_condition(),
        |_, _, state| state.clone().into_condition(),
    ];
    let mut flow = Flow::new("c14");
    for (number, condition) in conditions.into_iter().enumerate() {
        let waits = flow.add(format!("waits {number}"), runs(|(): &mut (), _cx: &mut Cx| Ok(())));
        let _ = waits.when(every(ms(1_000_000))).when(condition(&gate, &left, &state));
    }
    let running = flow.spawn().unwrap();
    let flow = running.handle();
    let all = || flow.status().into_iter().map(|operator| operator.status).collect::<Vec<_>>();
    settled().await;
    assert!(all().iter().all(|status| matches!(status, Status::WaitTime(_))), "{:?}", all());
    let begun = Instant::now();
    gate.pause();
    state.set(AsyncState::EventWaiting);
    settled().await;
    assert!(matches!(all()[..], [Status::WaitEvent, Status::WaitTime(_), Status::WaitEvent]), "{:?}", all());
    gate.end();
    left.reset(0);
    state.set(AsyncState::Never);
    let report = within(running).await.unwrap();
    assert_eq!(begun.elapsed(), ms(0), "the next tick is far away");
    assert!(report.operators.iter().all(|operator| operator.runs == 1));
}

/// This thread's CPU time in nanoseconds, and the number of its voluntary context switches.
#[cfg(target_os = "linux")]
fn used() -> (u64, u64) {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/thread-self/{file}")).unwrap();
    let nanos = read("schedstat").split_whitespace().next().unwrap().parse().unwrap();
    let status = read("status");
    let switches = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    (nanos, switches.trim().parse().unwrap())
}

/// Not available on this platform.
#[cfg(not(target_os = "linux"))]
fn used() -> (u64, u64) {
    (0, 0)
}

/// A condition that counts its polls and is never ready.
struct Asked(Arc<AtomicUsize>);

impl Condition for Asked {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        self.0.fetch_add(1, Ordering::Relaxed);
        Status::WaitEvent
    }
}

/// 10,000 operators on this thread, each in one of four kinds of wait, for two seconds of real time.
#[tokio::test]
async fn c13_operators_that_wait_use_no_cpu_time() {
    const QUARTER: usize = 2500;
    let (gate, asked) = (Gate::paused(), Arc::new(AtomicUsize::new(0)));
    let mut flow = Flow::new("c13");
    for number in 0..QUARTER {
        let send = flow.add(format!("gate {number}"), source(|| ready(Ok(Some(1_u32))))).when(gate.clone());
        let take = flow.add(format!("message {number}"), sink(|_: u32| ready(Ok(()))));
        flow.connect(send.output, take.input);
        let idle = || runs(|(): &mut (), _cx: &mut Cx| Ok(()));
        let _ = flow.add(format!("time {number}"), idle()).when(every(ms(1_000_000)));
        let _ = flow.add(format!("asked {number}"), idle()).when(Asked(asked.clone()));
    }
    let running = flow.spawn().unwrap();
    let mut changes = running.handle().changes();
    let mut waits = std::collections::HashSet::new();
    while waits.len() < 4 * QUARTER {
        let OperatorStatus { name, status, .. } = changes.next().await.unwrap();
        match status {
            Status::Wait | Status::WaitEvent | Status::WaitTime(_) => waits.insert(name),
            _ => waits.remove(&name),
        };
    }
    drop(changes);
    settled().await;
    let asked_before = asked.load(Ordering::Relaxed);
    let (nanos, switches) = used();
    sleep(ms(2000)).await;
    let (nanos, switches) = (used().0 - nanos, used().1 - switches);
    assert_eq!(asked.load(Ordering::Relaxed), asked_before, "no condition was polled");
    // The limits allow for other tests of this process: a test that loses a device wakes all flows.
    assert!(nanos < 200_000_000, "{nanos} ns of 2 s is more than a tenth");
    assert!(switches < 20, "woken {switches} times");
    running.abort();
    assert!(within(running).await.unwrap_err().is_cancelled());
}

/// Drops the flow's runtime. Futures of the flow that another runtime awaits must then end.
fn end_without_it(runtime: tokio::runtime::Runtime, running: Running, mut changes: impl futures::Stream + Unpin) {
    drop(runtime);
    let own = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    own.block_on(async {
        assert_eq!(within(running).await.unwrap_err().kind(), ErrorKind::Cancelled);
        within(async { while changes.next().await.is_some() {} }).await;
    });
}

#[test]
fn c14_changes_end_with_the_flows_runtime() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (running, changes) = runtime.block_on(async {
        let mut flow = Flow::new("c14");
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        let ingress = flow.ingress("in", end.input);
        let running = flow.spawn().unwrap();
        let changes = running.handle().changes();
        ingress.send(1).await.unwrap();
        std::mem::forget(ingress);
        (running, changes)
    });
    end_without_it(runtime, running, changes);
}

#[test]
fn c14_changes_end_with_a_runtime_that_never_polled_the_flow() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (running, changes) = runtime.block_on(async {
        let mut flow = Flow::new("c14");
        let start = flow.add("start", source(async || Ok(Some(1_u32))));
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(start.output, end.input);
        let running = flow.spawn().unwrap();
        let changes = running.handle().changes();
        (running, changes)
    });
    end_without_it(runtime, running, changes);
}

/// An observer of the flow's changes wakes every operator, which makes no progress.
#[test]
fn c14_a_stall_is_found_while_the_flow_is_observed() {
    struct KeepAll(Vec<Envelope<u32>>);

    impl Operator for KeepAll {
        type Ports = SinkPorts<Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
            self.0.push(ports.input.take()?);
            Ok(())
        }
    }

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for _ in 0..300 {
        let mut flow = Flow::new("c14");
        let make = flow.add("make", SendEach::new((0..10).map(|n| vec![n; 1])));
        let keep = flow.add("keep", KeepAll(Vec::new()));
        flow.connect_with(make.output, keep.input, HubOptions::bounded(1).envelopes(2).envelope_bytes(4));
        let running = {
            let _in = runtime.enter();
            flow.spawn().unwrap()
        };
        let handle = running.handle();
        while handle.failure().is_none() && !handle.status().iter().all(|one| one.status == Status::Never) {
            drop(handle.changes());
        }
        let error = runtime.block_on(running).unwrap_err();
        assert!(error.to_string().contains("`make` waits for a blank envelope"), "{error}");
    }
}
