//! Waits during a run: for room, for a blank envelope, for a message. The status shows them, and a flow that hangs in
//! them fails with a stall (Q7, Q8, C14).

use std::{
    future::poll_fn,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Poll, Waker},
    time::Duration,
};

use common::*;
use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use tokio::{
    sync::{Notify, mpsc},
    time::Instant,
};
use wakeline::{
    condition::{Gate, Status, predicate},
    operator::{InputHandle, OutputHandle},
    prelude::*,
};

#[derive(Ports)]
struct LoopPorts {
    #[output]
    forth: Output<u32>,
    #[input]
    back: Input<u32>,
    #[output(optional)]
    result: Output<u32>,
}

/// An operator with its own loop: sends a number that counts down in each round, and its result when no message is
/// left.
fn rounds(from: u32) -> impl Operator<Ports = LoopPorts> {
    task(move |ports: &mut LoopPorts, _cx| {
        async move {
            let (mut number, mut seen) = (from, 0);
            ports.forth.send(number).await?;
            while let Some(back) = ports.back.recv().await? {
                seen += 1;
                number = back;
                if number > 0 {
                    ports.forth.send(number - 1).await?;
                }
            }
            ports.result.send(seen).await?;
            Ok(())
        }
        .boxed()
    })
}

/// Connects `forth` to `back` through an operator.
fn send_back(flow: &mut Flow, forth: OutputHandle<u32>, back: InputHandle<u32>) {
    let echo = flow.add("echo", pass_on::<u32>());
    flow.connect(forth, echo.input);
    flow.connect(echo.output, back);
}

async fn q7(from: u32) {
    let results = shared();
    let mut flow = Flow::new("q7");
    // Added first, but downstream: it must not end before it has the result.
    let sink = flow.add("sink", keep(&results));
    let rounds = flow.add("rounds", rounds(from));
    let back = flow.add("back", pass_on::<u32>());
    flow.connect(rounds.forth, back.input);
    flow.connect(back.output, rounds.back);
    flow.connect(rounds.result, sink.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&results), [from + 1]);
}

#[tokio::test]
async fn q7_an_idle_cycle_ends_and_its_last_message_is_delivered() {
    q7(1000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q7_an_idle_cycle_ends_on_two_threads() {
    for _ in 0..200 {
        q7(10).await;
    }
}

#[tokio::test]
async fn q7_a_message_sent_after_a_second_none_is_delivered() {
    let results = shared();
    let mut flow = Flow::new("q7");
    let sink = flow.add("sink", keep(&results));
    let asks_twice = flow.add(
        "asks twice",
        task(|ports: &mut LoopPorts, _cx| {
            async move {
                ports.forth.send(7).await?;
                let mut ends = 0;
                while ends < 2 {
                    ends += u32::from(ports.back.recv().await?.is_none());
                }
                ports.result.send(ends).await?;
                Ok(())
            }
            .boxed()
        }),
    );
    send_back(&mut flow, asks_twice.forth, asks_twice.back);
    flow.connect(asks_twice.result, sink.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&results), [2]);
}

#[derive(Ports)]
struct SplitPorts {
    #[output]
    left: Output<u32>,
    #[output]
    right: Output<u32>,
}

#[derive(Ports)]
struct PairPorts {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
}

/// The writer sends two messages to `left`, which has room for one, before it sends to `right`, where the reader waits.
#[tokio::test]
async fn q8_operators_that_wait_for_each_other_during_a_run_are_a_stall() {
    let mut flow = Flow::new("q8");
    let split = flow.add(
        "split",
        task(|ports: &mut SplitPorts, cx| {
            async move {
                while cx.ready(ports).await {
                    ports.left.send(1).await?;
                    ports.left.send(2).await?;
                    ports.right.send(3).await?;
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let pair = flow.add(
        "pair",
        task(|ports: &mut PairPorts, _cx| {
            async move {
                while let Some(_right) = ports.right.recv().await? {
                    ports.left.recv().await?;
                }
                Ok(())
            }
            .boxed()
        }),
    );
    flow.connect(split.left, pair.left);
    flow.connect(split.right, pair.right);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    let text = error.to_string();
    assert!(text.contains("`split` waits for room in hub `split.left -> pair.left`: its queue of 1 is full"), "{text}");
    assert!(text.contains("`pair` waits for a message in hub `split.right -> pair.right`"), "{text}");
}

#[tokio::test]
async fn q8_an_operator_that_holds_all_blanks_and_waits_for_one_is_a_stall() {
    #[derive(Ports)]
    struct BlankPorts {
        #[output(envelope_bytes = 64)]
        output: Output<Envelope<u8>>,
    }
    let mut flow = Flow::new("q8");
    let greedy = flow.add(
        "greedy",
        task(|ports: &mut BlankPorts, _cx| {
            async move {
                let mut all = Vec::new();
                loop {
                    all.push(ports.output.blank().await?);
                }
            }
            .boxed()
        }),
    );
    let sink = flow.add("sink", sink(|_: Envelope<u8>| std::future::ready(Ok(()))));
    flow.connect_with(greedy.output, sink.input, HubOptions::bounded(1).envelopes(2));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    assert!(error.to_string().contains("`greedy` waits for a blank envelope"), "{error}");
}

/// An operator that also waits for an event from outside the flow is not idle.
#[tokio::test]
async fn c12_a_wait_for_an_outside_event_beside_a_port_is_no_stall() {
    #[derive(Clone, Copy)]
    enum Beside {
        Port,
        Condition,
    }
    async fn check(beside: Beside) {
        let (sender, receiver) = mpsc::unbounded_channel::<u32>();
        let (waits, received) = (Arc::new(Notify::new()), shared());
        let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
        let (will_wait, seen) = (waits.clone(), received.clone());
        let mut flow = Flow::new("c12");
        let rounds = flow.add(
            "rounds",
            task(move |ports: &mut LoopPorts, cx| {
                let (receiver, will_wait, seen) = (receiver.clone(), will_wait.clone(), seen.clone());
                async move {
                    let mut receiver = receiver.lock().await;
                    loop {
                        let has_message = async {
                            match beside {
                                Beside::Port => ports.back.recv().await.is_ok_and(|back| back.is_some()),
                                Beside::Condition => cx.ready(ports).await,
                            }
                        };
                        will_wait.notify_one();
                        tokio::select! {
                            biased;
                            has_message = has_message => if !has_message { return Ok(()) },
                            number = receiver.recv() => {
                                let Some(number) = number else { return Ok(()) };
                                lock(&seen).push(number);
                                ports.forth.send(number).await?;
                            }
                        }
                        let _ = ports.back.try_take()?;
                    }
                }
                .boxed()
            }),
        );
        let discard = flow.add("discard", sink(|_: u32| std::future::ready(Ok(()))));
        send_back(&mut flow, rounds.forth, rounds.back);
        flow.connect(rounds.result, discard.input);
        let mut running = flow.spawn().unwrap();
        for number in 0..100 {
            waits.notified().await;
            sender.send(number).unwrap();
        }
        until("all numbers are received", || lock(&received).len() == 100).await;
        assert!((&mut running).now_or_never().is_none(), "it waits for more");
        drop(sender);
        within(running).await.unwrap();
    }
    check(Beside::Port).await;
    check(Beside::Condition).await;
}

#[tokio::test]
async fn c14_the_status_shows_what_a_run_waits_for() {
    let (go, reads) = (Arc::new(Notify::new()), shared());
    let (gone, seen) = (go.clone(), reads.clone());
    let mut flow = Flow::new("c14");
    let writer = flow.add(
        "writer",
        task(|ports: &mut SplitPorts, _cx| {
            async move {
                for number in 0..3 {
                    ports.left.send(number).await?;
                }
                ports.right.send(3).await?;
                Ok(())
            }
            .boxed()
        }),
    );
    let reader = flow.add(
        "reader",
        task(move |ports: &mut PairPorts, _cx| {
            let (go, seen) = (gone.clone(), seen.clone());
            async move {
                go.notified().await;
                while let Some(number) = ports.left.recv().await? {
                    lock(&seen).push(number);
                }
                Ok(())
            }
            .boxed()
        }),
    );
    flow.connect(writer.left, reader.left);
    flow.connect(writer.right, reader.right);
    let running = flow.spawn().unwrap();
    until("the writer waits", || running.status()[0].status == Status::Wait).await;
    let [writer, reader] = &running.status()[..] else { panic!("two operators") };
    assert!(writer.running, "it is in a run");
    assert_eq!(writer.waits_for, ["room in hub `writer.left -> reader.left`: its queue of 1 is full"]);
    assert_eq!(reader.status, Status::Ready);
    go.notify_one();
    within(running).await.unwrap();
    assert_eq!(*lock(&reads), [0, 1, 2]);
}

/// A timer is outside the flow: an operator that waits for it is not idle.
#[tokio::test(start_paused = true)]
async fn c6_a_recv_with_a_timeout_waits_for_the_timer() {
    let seen = shared();
    let times = seen.clone();
    let mut flow = Flow::new("c6");
    let rounds = flow.add(
        "rounds",
        task(move |ports: &mut LoopPorts, _cx| {
            let times = times.clone();
            async move {
                let began = Instant::now();
                for round in 0..3 {
                    let back = tokio::time::timeout(Duration::from_secs(5), ports.back.recv()).await;
                    assert!(back.is_err(), "nothing comes in round {round}");
                    lock(&times).push(began.elapsed().as_secs());
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let discard = flow.add("discard", sink(|_: u32| std::future::ready(Ok(()))));
    send_back(&mut flow, rounds.forth, rounds.back);
    flow.connect(rounds.result, discard.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [5, 10, 15]);
}

fn one_number() -> impl Operator<Ports = SourcePorts<u32>> {
    let mut number = Some(0);
    source(move || std::future::ready(Ok(number.take())))
}

#[derive(Ports)]
struct EchoPorts {
    #[output]
    forth: Output<u32>,
    #[input]
    back: Input<u32>,
}

/// `recv` returns `None` only while the flow is idle. After a send it waits for the answer again.
#[tokio::test]
async fn q7_recv_after_an_idle_phase_waits_for_new_messages() {
    let answers = shared();
    let all = answers.clone();
    let mut flow = Flow::new("q7");
    let ask = flow.add(
        "ask",
        task(move |ports: &mut EchoPorts, _cx| {
            let all = all.clone();
            async move {
                assert_eq!(ports.back.recv().await?, None, "the flow is idle");
                ports.forth.send(7).await?;
                let answer = ports.back.recv().await?;
                lock(&all).push(answer);
                Ok(())
            }
            .boxed()
        }),
    );
    send_back(&mut flow, ask.forth, ask.back);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&answers), [Some(7)], "{report}");
}

/// A predicate is evaluated again whenever the flow is idle, since it may depend on what another operator did.
#[tokio::test]
async fn c12_a_predicate_is_evaluated_again_when_the_flow_is_idle_again() {
    let warm = Arc::new(AtomicBool::new(false));
    let (set, asked) = (warm.clone(), warm.clone());
    let seen = shared();
    let mut flow = Flow::new("c12");
    let last = flow.add(
        "last",
        task(move |ports: &mut EchoPorts, _cx| {
            let set = set.clone();
            async move {
                assert_eq!(ports.back.recv().await?, None, "the flow is idle");
                set.store(true, Ordering::SeqCst);
                Ok(())
            }
            .boxed()
        }),
    );
    send_back(&mut flow, last.forth, last.back);
    let bread = flow.add("bread", one_number()).when(predicate(move || asked.load(Ordering::SeqCst)));
    let eat = flow.add("eat", keep(&seen));
    flow.connect(bread.output, eat.input);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [0], "the predicate is true and was not evaluated: {report}");
}

/// A clone of the waker remains where no wait uses it: in a channel that was polled once, or from a cancelled wait.
#[tokio::test]
async fn q7_a_leftover_waker_does_not_delay_the_end() {
    let kept: Arc<Mutex<Option<Waker>>> = Arc::default();
    let mut flow = Flow::new("q7");
    let keeps = kept.clone();
    let ask = flow.add(
        "ask",
        task(move |ports: &mut EchoPorts, _cx| {
            let keeps = keeps.clone();
            async move {
                poll_fn(|task| {
                    *lock(&keeps) = Some(task.waker().clone());
                    Poll::Ready(())
                })
                .await;
                assert_eq!(ports.back.recv().await?, None, "the flow is idle");
                Ok(())
            }
            .boxed()
        }),
    );
    send_back(&mut flow, ask.forth, ask.back);
    within(flow.run()).await.unwrap();
    assert!(lock(&kept).is_some(), "the clone still exists");
}

/// Begins to wait for a message, drops or forgets the wait, and continues.
struct Forgets {
    /// By `Cx::ready`; otherwise by `recv`.
    by_ready: bool,
    forgotten: bool,
}

#[derive(Ports)]
struct RoundPorts {
    #[input]
    input: Input<u32>,
    #[output]
    output: Output<u32>,
}

async fn abandon(wait: impl Future, forgotten: bool) {
    let mut wait = Box::pin(wait);
    let is_pending = poll_fn(|task| Poll::Ready(wait.as_mut().poll(task).is_pending())).await;
    assert!(is_pending, "no message is queued");
    if forgotten {
        std::mem::forget(wait);
    }
}

impl Operator for Forgets {
    type Ports = RoundPorts;

    async fn run(&mut self, ports: &mut RoundPorts, cx: &mut Cx) -> Result<()> {
        if self.by_ready {
            abandon(cx.ready(ports), self.forgotten).await;
        } else {
            abandon(ports.input.recv(), self.forgotten).await;
        }
        while cx.ready(ports).await {
            ports.input.take()?;
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut RoundPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_flow_ends_although_an_operator_has_forgotten_a_wait() {
    for (by_ready, forgotten) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut flow = Flow::new("forgets");
        let forgets = flow.add("forgets", Forgets { by_ready, forgotten });
        flow.connect(forgets.output, forgets.input);
        within(flow.run()).await.unwrap();
    }
}

/// Waits for its runs in a combinator that polls with its own wakers, and ends after the first run.
struct Combines;

impl Operator for Combines {
    type Ports = ();

    async fn run(&mut self, ports: &mut (), cx: &mut Cx) -> Result<()> {
        let mut waits: FuturesUnordered<_> = std::iter::once(cx.ready(ports)).collect();
        waits.next().await;
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_wait_in_a_combinator_is_woken_when_the_flow_resumes_or_stops() {
    for resumed in [true, false] {
        let gate = Gate::paused();
        let mut flow = Flow::new("combines");
        let _ = flow.add("combines", Combines).when(gate.clone());
        let running = flow.spawn().unwrap();
        let handle = running.handle();
        let waits = async |what: &str| {
            while !handle.status()[0].waits_for.iter().any(|lacks| lacks.contains(what)) {
                tokio::task::yield_now().await;
            }
        };
        within(waits("gate")).await;
        if resumed {
            handle.pause();
            gate.resume();
            within(waits("resumed")).await;
            handle.resume();
        } else {
            handle.stop();
        }
        within(running).await.unwrap();
    }
}

/// Polls `recv` once, and drops it, before each wait.
fn polls_before_waiting(stalls: bool) -> impl Operator<Ports = LoopPorts> {
    task(move |ports: &mut LoopPorts, _cx| {
        async move {
            let mut seen = 0;
            loop {
                let polled = ports.back.recv().now_or_never();
                if stalls {
                    ports.forth.send(1).await?;
                    ports.forth.send(2).await?;
                }
                let back = match polled {
                    Some(back) => back?,
                    None if seen == 0 => Some(0),
                    None => ports.back.recv().await?,
                };
                let Some(_) = back else { return Ok(ports.result.send(seen).await?) };
                seen += 1;
                if seen < 4 {
                    ports.forth.send(seen).await?;
                }
            }
        }
        .boxed()
    })
}

/// A dropped wait does not count beside the next one, so the flow can be idle.
#[tokio::test]
async fn a_dropped_recv_hides_neither_the_end_nor_a_stall() {
    for stalls in [false, true] {
        let (mut flow, notes) = (Flow::new("looks"), shared());
        let looks = flow.add("looks", polls_before_waiting(stalls));
        if stalls {
            flow.connect(looks.forth, looks.back);
        } else {
            send_back(&mut flow, looks.forth, looks.back);
        }
        let end = flow.add("end", keep(&notes));
        flow.connect(looks.result, end.input);
        let outcome = within(flow.run()).await;
        match stalls {
            true => assert!(outcome.unwrap_err().is_stalled()),
            false => assert_eq!((outcome.is_ok(), lock(&notes).clone()), (true, vec![4_u32])),
        }
    }
}

struct NotSync(std::cell::Cell<u32>);

impl Message for NotSync {}

#[derive(Ports)]
struct NotSyncPorts {
    #[input]
    one: Input<NotSync>,
    #[input(capacity = 2)]
    several: Inputs<NotSync>,
}

#[tokio::test]
async fn messages_need_not_be_sync() {
    let mut flow = Flow::new("not sync");
    let numbered = || {
        let mut numbers = 1..=3;
        source(move || std::future::ready(Ok(numbers.next().map(|number| NotSync(number.into())))))
    };
    let [one, several] = ["one", "several"].map(|name| flow.add(name, numbered()));
    let (send_sum, sum) = tokio::sync::oneshot::channel();
    let mut send_sum = Some(send_sum);
    let sums = task(move |ports: &mut NotSyncPorts, _cx| {
        let send_sum = send_sum.take();
        async move {
            let mut sum = 0;
            while let Some(NotSync(number)) = ports.one.recv().await? {
                sum += number.get();
            }
            while let Some((_, NotSync(number))) = ports.several.recv_any().await? {
                sum += 10 * number.get();
            }
            send_sum.map(|sender| sender.send(sum));
            Ok(())
        }
        .boxed()
    });
    let sums = flow.add("sums", sums);
    flow.connect(one.output, sums.one);
    flow.connect(several.output, sums.several);
    flow.run().await.unwrap();
    assert_eq!(sum.await, Ok(66));
}

#[derive(Ports)]
struct SettingsPorts {
    #[input(optional)]
    settings: Input<u32>,
    #[input(optional)]
    data: Input<u32>,
    #[input(optional)]
    back: Input<u32>,
    #[output(optional)]
    forth: Output<u32>,
}

/// A run that has read the latest value of a hub and waits for a newer one waits for the writer, which may work for long.
/// The operator is neither in an idle loop nor in a deadlock with another writer that has no room.
#[tokio::test(start_paused = true)]
async fn q8_a_wait_for_a_newer_setting_waits_for_its_writer() {
    for latest in [false, true] {
        let mut flow = Flow::new("q8");
        let sets = task(|ports: &mut SourcePorts<u32>, _cx| {
            async move {
                ports.output.send(1).await?;
                tokio::time::sleep(Duration::from_secs(5)).await;
                ports.output.send(2).await?;
                Ok(())
            }
            .boxed()
        });
        let (sets, mut data) = (flow.add("sets", sets), 0..3);
        let data = flow.add("data", source(move || std::future::ready(Ok(data.next()))));
        let notes = Arc::new(Mutex::new(Vec::new()));
        let noted = notes.clone();
        let uses = task(move |ports: &mut SettingsPorts, _cx| {
            let noted = noted.clone();
            async move {
                for _ in 0..2 {
                    let setting = ports.settings.recv().await?;
                    lock(&noted).push(setting);
                }
                while let Some(number) = ports.data.recv().await? {
                    lock(&noted).push(Some(10 + number));
                }
                // No newer value can come: the writer has ended.
                let none = ports.settings.recv().await?;
                lock(&noted).push(none);
                Ok(())
            }
            .boxed()
        });
        let uses = flow.add("uses", uses);
        match latest {
            true => flow.connect_with(sets.output, uses.settings, HubOptions::latest()),
            false => flow.connect(sets.output, uses.settings),
        }
        flow.connect_with(data.output, uses.data, HubOptions::bounded(1));
        flow.connect(uses.forth, uses.back);
        let outcome = within(flow.run()).await;
        assert!(outcome.is_ok(), "latest {latest}: {}", outcome.unwrap_err());
        assert_eq!(*lock(&notes), [Some(1), Some(2), Some(10), Some(11), Some(12), None]);
    }
}
