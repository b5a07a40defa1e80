//! Scenarios C5, C7, C11 and C12: counts, gates, work elsewhere, futures, predicates, user-defined conditions.

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    task::Context,
};

use common::clock::*;
use common::{until as becomes, *};
use futures::FutureExt;
use tokio::{sync::Notify, time::Instant};
use wakeline::{
    Stream,
    condition::{
        AsyncState, Asynchronous, Condition, Gate, MissedTicks, Status, any_of, count, every, predicate, sum, until,
    },
    device::Simulation,
    memory::BufferState,
    prelude::*,
};

/// Yields often enough for an incorrect run to happen.
async fn a_while() {
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
}

/// An operator that always runs again, and the number of its runs.
fn counts() -> (Arc<AtomicUsize>, impl Operator<Ports = ()>) {
    let ran = Arc::new(AtomicUsize::new(0));
    let counted = ran.clone();
    let operator = runs(move |(): &mut (), _cx: &mut Cx| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    (ran, operator)
}

#[tokio::test]
async fn c5_a_count_applies_anew_in_every_run_of_the_flow() {
    let mut flow = Flow::new("c5");
    let three = flow.add("three", source(|| ready(Ok(Some(1_u32))))).when(count(3));
    let none = flow.add("none", source(|| ready(Ok(Some(1_u32))))).when(count(0));
    let end = flow.add("end", sink(|_: u32| ready(Ok(()))));
    let empty = flow.add("empty", sink(|_: u32| ready(Ok(()))));
    flow.connect(three.output, end.input);
    flow.connect(none.output, empty.input);
    for _ in 0..2 {
        let report = within(flow.run()).await.unwrap();
        let ran = ["three", "end", "none", "empty"].map(|name| report.operator(name).unwrap().runs);
        assert_eq!(ran, [3, 3, 0, 0]);
    }
}

#[tokio::test]
async fn c5_a_count_without_end() {
    let (ran, operator) = counts();
    let mut flow = Flow::new("c5");
    let endless = count(-1);
    let _ = flow.add("endless", operator).when(endless.clone());
    let running = flow.spawn().unwrap();
    becomes("the operator keeps running", || ran.load(Ordering::Relaxed) > 1000).await;
    assert_eq!(endless.left(), -1);
    endless.reset(0);
    within(running).await.unwrap();
}

/// An operator resets its count in its last run. Two operators that share a count use it up together.
#[tokio::test]
async fn c5_a_count_can_be_reset_and_shared() {
    let left = count(3);
    let (mut again, own) = (2, left.clone());
    let mut flow = Flow::new("c5");
    let last = runs(move |(): &mut (), _cx: &mut Cx| {
        if own.left() == 0 && again > 0 {
            again -= 1;
            own.reset(2);
        }
        Ok(())
    });
    let _ = flow.add("again", last).when(left);
    let shared = count(100);
    for name in ["one", "other"] {
        let _ = flow.add(name, counts().1).when(shared.clone());
    }
    let report = within(flow.run()).await.unwrap();
    let runs = |name| report.operator(name).unwrap().runs;
    assert_eq!(runs("again"), 3 + 2 + 2);
    assert_eq!(runs("one") + runs("other"), 100);
}

/// Holoscan's boolean condition: a reader ends its source, and the end propagates downstream.
#[tokio::test]
async fn c5_a_gate_that_ends_is_a_kill_switch() {
    let mut flow = Flow::new("c5");
    let gate = Gate::open();
    let mut number = 0;
    let send = flow.add(
        "send",
        source(move || {
            number += 1;
            ready(Ok(Some(number)))
        }),
    );
    let send = send.when(gate.clone());
    let (seen, switch) = (shared(), gate.clone());
    let noted = seen.clone();
    let take = flow.add(
        "take",
        sink(move |number: u32| {
            lock(&noted).push(number);
            if number == 5 {
                switch.end();
                switch.resume(); // has no effect after the end
            }
            ready(Ok(()))
        }),
    );
    flow.connect(send.output, take.input);
    let report = within(flow.run()).await.unwrap();
    assert!(gate.has_ended() && !gate.is_open());
    let sent = report.operator("send").unwrap().runs;
    assert!((5..=7).contains(&sent), "one message may be queued, and one may be in flight: {sent}");
    assert_eq!(*lock(&seen), (1..=sent as u32).collect::<Vec<_>>());
    assert_eq!(report.untaken, 0);
}

/// The gate is read and set by an operator that knows only its name.
#[tokio::test(start_paused = true)]
async fn c5_a_gate_by_its_name() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c5");
    let gate = flow.gate("recording");
    let noted = notes.clone();
    let record = flow.add(
        "record",
        runs(move |(): &mut (), cx: &mut Cx| {
            assert!(cx.gate("recording")?.is_open());
            noted.add(());
            Ok(())
        }),
    );
    let _ = record.when(gate).when(every(ms(10)).missed(MissedTicks::Skip)).when(count(6));
    let remote = task(|(): &mut (), cx: &mut Cx| {
        async move {
            let error = cx.gate("recordings").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(
                error.to_string().contains("no gate `recordings`")
                    && error.to_string().contains("its gates are `recording`")
            );
            tokio::time::sleep(ms(25)).await;
            cx.gate("recording")?.pause();
            tokio::time::sleep(ms(30)).await;
            assert!(!cx.gate("recording")?.is_open());
            cx.gate("recording")?.resume();
            Ok(())
        }
        .boxed()
    });
    let _ = flow.add("remote", remote);
    within(flow.run()).await.unwrap();
    assert_eq!(notes.times(), [0, 10, 20, 55, 60, 70]);
}

/// The gate of two operators is set through a handle, from another thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c5_a_gate_by_a_handle() {
    let gate = Gate::paused();
    let mut flow = Flow::new("c5");
    let ran: [_; 2] = std::array::from_fn(|n| {
        let (ran, operator) = counts();
        let _ = flow.add(format!("operator {n}"), operator).when(gate.clone());
        ran
    });
    let counted = || ran.each_ref().map(|ran| ran.load(Ordering::Relaxed));
    let running = flow.spawn().unwrap();
    a_while().await;
    assert_eq!(counted(), [0, 0]);
    for _ in 0..5 {
        let [one, other] = counted();
        let elsewhere = gate.clone();
        std::thread::spawn(move || elsewhere.resume()).join().unwrap();
        becomes("both run", || counted()[0] > one && counted()[1] > other).await;
        gate.pause();
        becomes("both wait", || running.status().iter().all(|operator| operator.status == Status::WaitEvent)).await;
        let before = counted();
        a_while().await;
        assert_eq!(counted(), before);
    }
    gate.end();
    within(running).await.unwrap();
}

/// Sends a request to a thread in each run.
struct Ask {
    work: mpsc::Sender<()>,
    state: Asynchronous,
    ran: Arc<AtomicUsize>,
}

impl Operator for Ask {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        assert_ne!(self.state.state(), AsyncState::EventWaiting, "the last run's event is still pending");
        self.state.set(AsyncState::EventWaiting);
        self.ran.fetch_add(1, Ordering::Relaxed);
        self.work.send(()).map_err(|_| Error::other("the worker thread has ended"))
    }
}

/// The first run is immediate. Then each answer of the thread allows one run, with or without messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c7_a_run_for_each_event_from_a_thread() {
    let state = Asynchronous::new();
    assert_eq!(state.state(), AsyncState::Ready);
    let ran = Arc::new(AtomicUsize::new(0));
    let (work, asked) = mpsc::channel();
    let (allow, allowed) = mpsc::channel::<AsyncState>();
    let done = state.clone();
    let worker = std::thread::spawn(move || {
        for () in asked {
            done.set(allowed.recv().unwrap());
        }
    });
    let mut flow = Flow::new("c7");
    let send = flow.add("send", source(|| ready(Ok(Some(1_u32)))));
    let ask = flow.add("ask", Ask { work, state: state.clone(), ran: ran.clone() }).when(state.clone());
    flow.connect_with(send.output, ask.input, HubOptions::bounded(4));
    let running = flow.spawn().unwrap();
    for run in 1..=5 {
        becomes("it has run", || ran.load(Ordering::Relaxed) == run).await;
        becomes("its run is over, and it waits", || running.status()[1].status == Status::WaitEvent).await;
        a_while().await;
        assert_eq!((ran.load(Ordering::Relaxed), state.state()), (run, AsyncState::EventWaiting));
        let ask = running.status().remove(1);
        assert_eq!(ask.status, Status::WaitEvent);
        assert_eq!(ask.waits_for, ["its event to be done"]);
        allow.send(if run < 5 { AsyncState::EventDone } else { AsyncState::Never }).unwrap();
    }
    let report = within(running).await.unwrap();
    assert_eq!(report.operator("ask").unwrap().runs, 5);
    assert_eq!(state.state(), AsyncState::Never);
    worker.join().unwrap();
}

/// Only the holder of the handle changes the state: done stays done until it is set otherwise.
#[tokio::test]
async fn c7_a_state_stays_as_it_was_set() {
    let (ran, operator) = counts();
    let state = Asynchronous::default();
    state.set(AsyncState::Wait);
    let mut flow = Flow::new("c7");
    let _ = flow.add("on and on", operator).when(state.clone());
    let running = flow.spawn().unwrap();
    a_while().await;
    assert_eq!(ran.load(Ordering::Relaxed), 0, "the state was not set yet");
    for (go, wait) in [(AsyncState::Ready, AsyncState::Wait), (AsyncState::EventDone, AsyncState::EventWaiting)] {
        let before = ran.load(Ordering::Relaxed);
        state.set(go);
        becomes("the operator keeps running", || ran.load(Ordering::Relaxed) > before + 100).await;
        assert_eq!(state.state(), go);
        state.set(wait);
        a_while().await;
        let before = ran.load(Ordering::Relaxed);
        a_while().await;
        assert_eq!((ran.load(Ordering::Relaxed), state.state()), (before, wait));
    }
    // No handle is left that could set the state.
    drop(state);
    let error = within(running).await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    assert!(error.to_string().contains("`on and on` waits for its event to be done"), "{error}");
}

#[derive(Ports)]
struct DonePorts {
    #[input(done, capacity = 8)]
    input: Input<Envelope<u32>>,
}

/// Records the state of each message.
struct Look(Shared<(Instant, BufferState)>);

impl Operator for Look {
    type Ports = DonePorts;

    async fn compute(&mut self, ports: &mut DonePorts, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.input.take()?;
        lock(&self.0).push((Instant::now(), envelope.state()?));
        Ok(())
    }
}

fn sends(envelopes: Vec<Buffer<u32>>) -> impl Operator<Ports = SourcePorts<Envelope<u32>>> {
    let mut envelopes = envelopes.into_iter().map(Envelope::from);
    source(move || ready(Ok(envelopes.next())))
}

// The number of runs equals the count, and no run begins before its message is done or before its time.
on_both!(c11_a_message_that_is_done_a_count_and_a_period, async |device: Device| {
    let streams: Vec<_> = (0..8).map(|n| Stream::named(&device, format!("writer {n}")).unwrap()).collect();
    let mut held = None;
    let mut buffers = Vec::new();
    for (n, stream) in streams.iter().enumerate() {
        let mut buffer = Buffer::<u32>::new(&device, 64).unwrap();
        stream.fill(&mut buffer, 1).unwrap();
        if n == 2 {
            held = Some(hold(stream));
        }
        increment::launch(stream, &mut buffer).unwrap();
        buffers.push(buffer);
    }
    let seen = shared();
    let mut flow = Flow::new("c11");
    let send = flow.add("send", sends(buffers)).on(&device);
    let look = flow.add("look", Look(seen.clone())).on(&device);
    let look = look.when(count(5)).when(every(ms(5)).missed(MissedTicks::Spaced));
    flow.connect(send.output, look.input);
    let begun = Instant::now();
    let running = flow.spawn().unwrap();
    becomes("two have run", || lock(&seen).len() == 2).await;
    becomes("its time has come, and its message is not done", || {
        let look = &running.status()[1];
        look.status == Status::WaitEvent && !look.waits_for.iter().any(|what| what.contains("tick"))
    })
    .await;
    assert_eq!(lock(&seen).len(), 2, "the third message is blocked");
    drop(held);
    let report = running.await.unwrap();
    let seen = lock(&seen).clone();
    assert_eq!((seen.len(), report.operator("look").unwrap().runs, report.untaken), (5, 5, 3));
    for (n, (time, state)) in seen.into_iter().enumerate() {
        assert_eq!(state, BufferState::Idle, "run {n} was before its message was done");
        assert!(time - begun >= n as u32 * ms(5), "run {n} was early");
    }
});

/// The same with a random order of events, with exact times.
#[tokio::test(start_paused = true)]
async fn c11_under_simulation() {
    for seed in 0..20 {
        let simulation = Simulation::new(seed);
        let (seen, begun) = (shared(), Instant::now());
        let outcome = simulation.run(async {
            let device = Device::simulated(&simulation, Emulated::new()).race_checked();
            let mut flow = Flow::new("c11");
            let produce = flow.add("produce", SendEach::new((0..8).map(|n| vec![n; 8])));
            let add = flow.add("add", Increment).on(&device);
            let look = flow.add("look", Look(seen.clone())).on(&device).when(every(ms(5))).when(count(5));
            flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(32));
            flow.connect(add.output, look.input);
            flow.run().await
        });
        within(outcome).await.unwrap();
        let times: Vec<_> = lock(&seen).iter().map(|(time, _)| (*time - begun).as_millis()).collect();
        assert_eq!(times, [0, 5, 10, 15, 20], "seed {seed}");
        assert!(lock(&seen).iter().all(|(_, state)| *state == BufferState::Idle), "seed {seed}");
    }
}

/// Each run needs a new future. A future that has resolved stays valid until the run that it allows.
#[tokio::test(start_paused = true)]
async fn c12_any_future() {
    let notes = Notes::begin();
    let made = Arc::new(AtomicUsize::new(0));
    let mut flow = Flow::new("c12");
    let send = flow.add("send", at([(3, 1), (4, 2), (55, 3)]));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
            noted.add(ports.input.take()?);
            Ok(())
        }),
    );
    let counted = made.clone();
    let take = take.clone().when(until(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(ms(10))
    }));
    flow.connect_with(send.output, take.input, HubOptions::bounded(2));
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(10, 1), (20, 2), (55, 3)]);
    assert_eq!(made.load(Ordering::Relaxed), 4, "one for each run, and one that was not needed");
}

/// A future that resolves to `false` finishes the operator. When the flow is run again, new futures are created.
#[tokio::test]
async fn c12_a_future_that_resolves_to_false() {
    let (ran, operator) = counts();
    let button = Arc::new(Notify::new());
    let (pressed, left) = (button.clone(), Arc::new(AtomicUsize::new(3)));
    let mut flow = Flow::new("c12");
    let _ = flow.add("photo", operator).when(until(move || {
        let (pressed, left) = (pressed.clone(), left.clone());
        async move {
            pressed.notified().await;
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
        }
    }));
    for times in [3, 0] {
        ran.store(0, Ordering::Relaxed);
        {
            let mut running = std::pin::pin!(flow.run());
            for press in 0..times + 1 {
                assert!(running.as_mut().now_or_never().is_none());
                a_while().await;
                assert_eq!(ran.load(Ordering::Relaxed), press);
                button.notify_one();
                a_while().await;
            }
            within(running).await.unwrap();
        }
        assert_eq!(ran.load(Ordering::Relaxed), times);
    }
}

/// A predicate is polled last. It is polled again when another operator may have changed its result, and not
/// continuously.
#[tokio::test(start_paused = true)]
async fn c12_a_predicate_is_polled_again_after_other_runs() {
    let (warm, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let notes = Notes::begin();
    let mut flow = Flow::new("c12");
    let (noted, warms) = (notes.clone(), warm.clone());
    let oven = flow.add(
        "oven",
        runs(move |(): &mut (), _cx: &mut Cx| {
            noted.add("oven");
            warms.store(noted.all().len() == 3, Ordering::Relaxed);
            Ok(())
        }),
    );
    let _ = oven.when(every(ms(10))).when(count(3));
    let (noted, counted, is_warm) = (notes.clone(), asked.clone(), warm.clone());
    let bread = flow.add(
        "bread",
        runs(move |(): &mut (), _cx: &mut Cx| {
            noted.add("bread");
            Ok(())
        }),
    );
    let _ = bread.when(count(2)).when(predicate(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        is_warm.load(Ordering::Relaxed)
    }));
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(0, "oven"), (10, "oven"), (20, "oven"), (20, "bread"), (20, "bread")]);
    let asked = asked.load(Ordering::Relaxed);
    assert!(asked <= 6, "polled {asked} times for two runs");
}

/// A predicate is also polled after a message. One that stays false ends the flow, or is a stall that names the
/// operator.
#[tokio::test(start_paused = true)]
async fn c12_a_predicate_that_depends_on_messages() {
    let (came, notes) = (Arc::new(AtomicU64::new(0)), Notes::begin());
    let mut flow = Flow::new("c12");
    let mut numbers = 1..=5_u32;
    let sent = came.clone();
    let send = flow.add(
        "send",
        source(move || {
            let next = numbers.next();
            sent.fetch_add(u64::from(next.is_some()), Ordering::Relaxed);
            ready(Ok(next))
        }),
    );
    let send = send.when(every(ms(10)));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
            noted.add(ports.input.take()?);
            Ok(())
        }),
    );
    let take = take.when(predicate(move || came.load(Ordering::Relaxed) == 3));
    flow.connect_with(send.output, take.input, HubOptions::bounded(8));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(notes.all(), [(20, 1), (20, 2), (20, 3)]);
    assert_eq!(error.kind(), ErrorKind::Stalled);
    assert!(error.to_string().contains("`take` waits for its predicate to allow it"), "{error}");
}

/// Records the calls that it gets. Fails the given number of claims although it was ready.
struct Spy {
    name: &'static str,
    pages: Shared<String>,
    refuses: usize,
    last: bool,
}

impl Spy {
    fn new(name: &'static str, pages: &Shared<String>) -> Self {
        Self { name, pages: pages.clone(), refuses: 0, last: false }
    }

    fn note(&self, what: &str) {
        lock(&self.pages).push(format!("{} {what}", self.name));
    }
}

impl Condition for Spy {
    fn start(&mut self) {
        self.note("started");
    }

    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        self.note("asked");
        Status::Ready
    }

    fn claim(&mut self) -> bool {
        let claimed = self.refuses == 0;
        self.refuses = self.refuses.saturating_sub(1);
        self.note(if claimed { "claimed" } else { "refused" });
        claimed
    }

    fn give_back(&mut self) {
        self.note("given back");
    }

    fn ended(&mut self) {
        self.note("ended");
    }

    fn is_polled_last(&self) -> bool {
        self.last
    }
}

/// The order is: poll, claim, run, `ended`; then poll again.
#[tokio::test]
async fn c12_the_order_of_calls() {
    let pages = shared();
    let mut flow = Flow::new("c12");
    let noted = pages.clone();
    let operator = runs(move |(): &mut (), _cx: &mut Cx| {
        lock(&noted).push("run".to_owned());
        Ok(())
    });
    // The condition that is polled last was added first.
    let last = Spy { last: true, ..Spy::new("last", &pages) };
    let _ = flow.add("operator", operator).when(last).when(Spy::new("first", &pages)).when(count(2));
    for _ in 0..2 {
        lock(&pages).clear();
        within(flow.run()).await.unwrap();
        let run = ["first asked", "last asked", "first claimed", "last claimed", "run", "first ended", "last ended"];
        let mut started = lock(&pages).drain(..2).collect::<Vec<_>>();
        started.sort_unstable();
        assert_eq!(started, ["first started", "last started"]);
        // The count is used up, so the conditions that come after it are not polled.
        assert_eq!(*lock(&pages), [&run[..], &run, &["first asked"]].concat());
    }
}

#[derive(Ports)]
struct PatientPorts {
    #[input(capacity = 4)]
    input: Input<u32>,
}

/// When one condition's claim fails, all others take back their claims, and the attempt has no effect.
#[tokio::test(start_paused = true)]
async fn c12_a_claim_that_fails_gives_everything_back() {
    let (pages, notes) = (shared(), Notes::begin());
    let left = count(2);
    let mut flow = Flow::new("c12");
    let send = flow.add("send", at_until(100, [(0, 1), (0, 2), (0, 3)]));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut PatientPorts, _cx: &mut Cx| {
            noted.add(ports.input.take()?);
            Ok(())
        }),
    );
    let input = take.input;
    let _ = take
        .when(every(ms(10)))
        .when(left.clone())
        .when(sum([input.into()], 9).or_after(ms(25)))
        .when(any_of(Spy::new("either", &pages), Gate::open()))
        .when(Spy::new("before", &pages))
        .when(Spy { refuses: 2, ..Spy::new("refuses", &pages) })
        .when(Spy::new("after", &pages));
    flow.connect_with(send.output, input, HubOptions::bounded(9));
    let report = within(flow.run()).await.unwrap();
    // The interval and the period both count from the last run that took place.
    assert_eq!(notes.all(), [(25, 1), (50, 2)]);
    assert_eq!((report.operator("take").unwrap().runs, left.left()), (2, 0));
    let claims: Vec<_> = lock(&pages).iter().filter(|page| !page.ends_with("asked")).skip(4).cloned().collect();
    let refused =
        ["either claimed", "before claimed", "refuses refused", "before given back", "either given back"].as_slice();
    let run = [
        "either claimed",
        "before claimed",
        "refuses claimed",
        "after claimed",
        "either ended",
        "before ended",
        "refuses ended",
        "after ended",
    ]
    .as_slice();
    assert_eq!(claims, [refused, refused, run, run].concat());
}

/// In an either-or, a condition whose claim fails is skipped. The run is given up only if every claim fails.
#[tokio::test]
async fn c12_a_claim_that_fails_in_one_of_two() {
    let pages = shared();
    let (ran, operator) = counts();
    let mut flow = Flow::new("c12");
    let one = Spy { refuses: 2, ..Spy::new("one", &pages) };
    let other = Spy { refuses: 1, ..Spy::new("other", &pages) };
    let _ = flow.add("operator", operator).when(any_of(one, other)).when(count(2));
    within(flow.run()).await.unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 2);
    let claims: Vec<_> = lock(&pages).iter().filter(|page| !page.ends_with("asked")).skip(2).cloned().collect();
    let wanted = [
        "one refused",
        "other refused", // no run takes place
        "one refused",
        "other claimed",
        "other ended",
        "one claimed",
        "other claimed",
        "one ended",
        "other ended",
    ];
    assert_eq!(claims, wanted);
}
