//! Hostile user code in messages and their metadata: sizes, envelopes, events and destructors that panic or call back into the
//! library. The flow goes on for the other messages.
//!
//! Each body runs on its own thread. If it hangs, a watchdog names it and aborts the process.

#![forbid(unsafe_code)]

use std::{
    cell::Cell,
    collections::BTreeSet,
    fmt,
    future::{Future, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use tracing::span::Id;
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt},
};
use wakeline::{
    Ingress,
    device::Emulated,
    flow::StreamReason,
    hub::MergePolicy,
    operator::{MapPorts, SinkPorts, concurrent, map, sink, source},
    prelude::*,
    stream::{StreamPool, Ticket},
};

/// Runs a body that must not hang.
fn within_bound(what: &str, body: impl Future<Output = ()> + Send + 'static) {
    common::alone::case_within_bound(what, || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(body);
    });
}

/// A message whose `size_in_bytes` runs a closure.
struct Sized(u32, Option<Arc<dyn Fn() + Send + Sync>>);

impl Message for Sized {
    fn size_in_bytes(&self) -> usize {
        if let Some(act) = &self.1 {
            act();
        }
        4
    }
}

#[test]
fn a_message_whose_size_panics_takes_no_place_in_the_hub() {
    within_bound("a size that panics", async {
        let mut flow = Flow::new("flow");
        let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
        let end = flow.add(
            "end",
            sink(move |message: Sized| {
                ready(sender.send(message.0).map_err(|error| Error::new(ErrorKind::Operator, error.to_string())))
            }),
        );
        let ingress = flow.ingress_with("in", end.input, HubOptions::bounded(2));
        let running = flow.spawn().unwrap();
        ingress.send(Sized(1, None)).await.unwrap();
        for _ in 0..4 {
            let ingress = ingress.clone();
            let sent =
                tokio::spawn(
                    async move { ingress.send(Sized(2, Some(Arc::new(|| panic!("a size that panics"))))).await },
                );
            assert!(sent.await.unwrap_err().is_panic());
        }
        for n in 3..8 {
            ingress.send(Sized(n, None)).await.unwrap();
        }
        drop(ingress);
        running.await.unwrap();
        let mut all = Vec::new();
        while let Some(n) = received.recv().await {
            all.push(n);
        }
        assert_eq!(all, [1, 3, 4, 5, 6, 7]);
    });
}

#[test]
fn the_size_of_a_message_may_send_to_its_own_ingress() {
    within_bound("a size that sends", async {
        let mut flow = Flow::new("flow");
        let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
        let end = flow.add(
            "end",
            sink(move |message: Sized| {
                ready(sender.send(message.0).map_err(|error| Error::new(ErrorKind::Operator, error.to_string())))
            }),
        );
        let ingress: Ingress<Sized> = flow.ingress_with("in", end.input, HubOptions::bounded(4));
        let running = flow.spawn().unwrap();
        ingress.send(Sized(1, None)).await.unwrap();
        assert_eq!(received.recv().await, Some(1));
        let inner = ingress.clone();
        let left = AtomicUsize::new(1);
        let act = move || {
            if left.swap(0, Ordering::SeqCst) > 0 {
                assert!(inner.try_send(Sized(2, None)).is_ok());
            }
        };
        ingress.send(Sized(3, Some(Arc::new(act)))).await.unwrap();
        assert_eq!((received.recv().await, received.recv().await), (Some(2), Some(3)));
        drop(ingress);
        running.await.unwrap();
    });
}

/// Metadata that owns device memory, whose drop acquires several locks.
struct Scratch(#[allow(dead_code, reason = "dropped")] Buffer<u32>);

#[derive(Ports)]
struct TicksPorts {
    #[output]
    ticks: Output<u32>,
}

struct Ticks(u32);

impl Operator for Ticks {
    type Ports = TicksPorts;

    async fn compute(&mut self, ports: &mut TicksPorts, cx: &mut Cx) -> Result<()> {
        for _ in 0..2 {
            let scratch = Scratch(cx.alloc(64)?);
            cx.insert_metadata("scratch", scratch);
        }
        if self.0 == 1 {
            assert!(cx.remove_metadata("scratch"));
        }
        self.0 += 1;
        if self.0 == 3 {
            cx.finish();
        }
        ports.ticks.send(self.0).await?;
        Ok(())
    }
}

#[test]
fn metadata_that_is_replaced_or_removed_is_dropped_with_no_lock_held() {
    within_bound("metadata that drops memory", async {
        let device = Device::emulated(Emulated::new());
        let mut flow = Flow::new("flow");
        let ticks = flow.add("ticks", Ticks(0)).on(&device);
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(ticks.ticks, end.input);
        flow.run().await.unwrap();
    });
}

#[cfg(feature = "config")]
#[test]
fn a_key_of_many_parts_is_refused() {
    let key = |parts: usize| vec!["a"; parts].join(".");
    wakeline::Config::new().set(&key(64), 1).unwrap();
    for parts in [65, 20_000] {
        let error = wakeline::Config::new().set(&key(parts), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setup);
        assert!(error.to_string().len() < 300, "{error}");
    }
}

/// A message whose size grows with each call of `size_in_bytes`.
struct Grows(AtomicUsize);

impl Message for Grows {
    fn size_in_bytes(&self) -> usize {
        self.0.fetch_add(10, Ordering::Relaxed)
    }
}

#[derive(Clone)]
struct Leaves;

impl Operator for Leaves {
    type Ports = SinkPorts<Grows>;

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_size_that_changes_is_counted_without_overflow() {
    within_bound("a size that grows", async {
        let mut flow = Flow::new("flow");
        let mut left = 3;
        let source = flow.add(
            "source",
            source(move || {
                left -= 1;
                ready(Ok((left > 0).then(|| Grows(AtomicUsize::new(0)))))
            }),
        );
        let leaves = flow.add("leaves", concurrent(2, Leaves));
        flow.connect(source.output, leaves.input);
        let report = flow.run().await.unwrap();
        assert_eq!(report.operator("leaves").unwrap().bytes_in, 0);
    });
}

/// Records in each run whether the work of the previous run is done, as `run_after` promises.
#[derive(Clone)]
struct RunsAfter(Arc<Mutex<Runs>>);

/// The buffer of the last run, and for each run whether it found the previous buffer complete.
type Runs = (Option<Buffer<u32>>, Vec<bool>);

/// Checks the buffer of the last run, enqueues slow work, and asks for the next run after that work.
fn run_after(runs: &Mutex<Runs>, cx: &mut Cx) -> Result<()> {
    let mut state = runs.lock().unwrap();
    if let Some(before) = state.0.take() {
        let there = before.as_slice().is_ok();
        state.1.push(there);
    }
    let stream = cx.stream()?.clone();
    let mut host = Buffer::<u32>::pinned(cx.device(), 16)?;
    stream.host_function(|| (0..200).for_each(|_| thread::yield_now()))?;
    let mut there = stream.alloc::<u32>(16)?;
    stream.fill(&mut there, 1)?;
    stream.copy(&there, &mut host)?;
    cx.run_after(host.available());
    state.0 = Some(host);
    Ok(())
}

impl Operator for RunsAfter {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        run_after(&self.0, cx)
    }
}

#[test]
fn a_worker_of_a_concurrent_operator_honours_run_after() {
    within_bound("a worker that runs after a buffer", async {
        let device = Device::emulated(Emulated::new());
        let mut flow = Flow::new("flow");
        let mut left = 6;
        let source = flow.add(
            "source",
            source(move || {
                left -= 1;
                ready(Ok((left > 0).then_some(left)))
            }),
        );
        let runs = RunsAfter(Arc::default());
        let after = flow.add("after", concurrent(1, runs.clone())).on(&device);
        flow.connect(source.output, after.input);
        flow.run().await.unwrap();
        assert_eq!(runs.0.lock().unwrap().1, [true; 4]);
    });
}

#[derive(Debug)]
struct PanicsInDisplay;

impl fmt::Display for PanicsInDisplay {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("a display that panics")
    }
}

impl std::error::Error for PanicsInDisplay {}

/// Fails at a message with such a cause if the flag is set, and counts its `stop`s.
struct Fails(bool, Arc<AtomicUsize>);

impl Operator for Fails {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        if self.0 { Err(Error::new(ErrorKind::Operator, "it failed").because(PanicsInDisplay)) } else { Ok(()) }
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.1.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn every_stop_runs_after_an_error_whose_display_panics() {
    within_bound("an error that panics as it is logged", async {
        let _ = tracing_subscriber::fmt().with_writer(std::io::sink).try_init();
        let stops = Arc::new(AtomicUsize::new(0));
        let mut flow = Flow::new("flow");
        let fails = flow.add("fails", Fails(true, stops.clone()));
        let idle = flow.add("idle", Fails(false, stops.clone()));
        let (ingress, other) = (flow.ingress("in", fails.input), flow.ingress("other", idle.input));
        let running = flow.spawn().unwrap();
        ingress.send(1).await.unwrap();
        assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Operator);
        assert_eq!(stops.load(Ordering::SeqCst), 2);
        drop(other);
    });
}

/// A closure that a message's own code runs. A nested call is only counted.
#[derive(Clone, Default)]
struct Act(Arc<(AtomicUsize, Mutex<Option<Call>>)>);

type Call = Box<dyn FnMut() + Send>;

impl Act {
    fn set(&self, act: impl FnMut() + Send + 'static) {
        *self.0.1.lock().unwrap() = Some(Box::new(act));
    }

    fn run(&self) {
        self.0.0.fetch_add(1, Ordering::SeqCst);
        // The closure runs outside the mutex, since it may call `run` again.
        let act = self.0.1.lock().unwrap().take();
        if let Some(mut act) = act {
            act();
            *self.0.1.lock().unwrap() = Some(act);
        }
    }

    fn count(&self) -> usize {
        self.0.0.load(Ordering::SeqCst)
    }
}

/// A message whose `events` runs an act.
struct Shows(u32, Act);

impl Message for Shows {
    const EVENTS: &'static [&'static str] = &["done"];

    fn events(&mut self, _name: &str, _visit: &mut dyn FnMut(&mut Ticket)) {
        self.1.run();
    }
}

#[derive(Ports)]
struct DonePorts {
    #[input(event = "done")]
    input: Input<Shows>,
}

struct Done(tokio::sync::mpsc::UnboundedSender<u32>);

impl Operator for Done {
    type Ports = DonePorts;

    async fn compute(&mut self, ports: &mut DonePorts, _cx: &mut Cx) -> Result<()> {
        let _ = self.0.send(ports.input.take()?.0);
        Ok(())
    }
}

#[test]
fn the_events_of_a_message_may_read_the_status_and_send() {
    within_bound("events that send", async {
        let mut flow = Flow::new("flow");
        let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
        let done = flow.add("done", Done(sender));
        let ingress = flow.ingress_with("in", done.input, HubOptions::bounded(4));
        let running = flow.spawn().unwrap();
        let act = Act::default();
        let (handle, inner, mut more) = (running.handle(), ingress.clone(), vec![3, 2]);
        act.set(move || {
            assert_eq!(handle.status().len(), 2);
            if let Some(more) = more.pop() {
                assert!(inner.try_send(Shows(more, Act::default())).is_ok());
            }
        });
        ingress.send(Shows(1, act.clone())).await.unwrap();
        // The act sent 2 as 1 was sent, and 3 as the events of 1 were waited for.
        assert_eq!((received.recv().await, received.recv().await, received.recv().await), (Some(2), Some(1), Some(3)));
        assert!(act.count() >= 2);
        // The act owns a clone of the ingress, which keeps the flow running.
        act.set(|| ());
        drop(ingress);
        running.await.unwrap();
    });
}

#[test]
fn events_of_a_message_that_panic_fail_its_reader() {
    within_bound("events that panic", async {
        let mut flow = Flow::new("flow");
        let (sender, _received) = tokio::sync::mpsc::unbounded_channel();
        let done = flow.add("done", Done(sender));
        let ingress = flow.ingress("in", done.input);
        let running = flow.spawn().unwrap();
        let (act, mut times) = (Act::default(), 0);
        act.set(move || {
            times += 1;
            assert!(times < 2, "events that panic");
        });
        ingress.send(Shows(1, act)).await.unwrap();
        assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Panicked);
    });
}

/// A message whose `envelopes` runs an act.
struct Wrapped(Envelope<u32>, Act);

impl Message for Wrapped {
    const CARRIES_ENVELOPES: bool = true;

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut wakeline::hub::RawEnvelope)) {
        self.1.run();
        self.0.envelopes(visit);
    }
}

#[derive(Ports)]
struct BlanksPorts {
    #[output(envelope_bytes = 4)]
    out: Output<Envelope<u32>>,
}

struct Blanks;

impl Operator for Blanks {
    type Ports = BlanksPorts;

    async fn compute(&mut self, ports: &mut BlanksPorts, _cx: &mut Cx) -> Result<()> {
        let blank = ports.out.blank().await?;
        ports.out.send(blank).await?;
        Ok(())
    }
}

#[test]
fn the_envelopes_of_a_message_in_a_hub_may_read_the_status() {
    within_bound("envelopes that ask for the status", async {
        let mut flow = Flow::new("flow");
        let act = Act::default();
        let fill = flow.add("fill", Blanks);
        let shown = act.clone();
        let wrap = flow.add("wrap", map(move |envelope| ready(Ok(Wrapped(envelope, shown.clone())))));
        let end = flow.add("end", sink(async |_: Wrapped| Ok(())));
        // The reader waits for three messages, but there are only two envelopes.
        let input = end.input;
        let end = end.when(wakeline::condition::at_least(input, 3));
        flow.connect(fill.out, wrap.input);
        flow.connect_with(wrap.output, end.input, HubOptions::bounded(3));
        let running = flow.spawn().unwrap();
        let handle = running.handle();
        act.set(move || drop(handle.status()));
        let error = running.await.unwrap_err();
        assert!(error.is_stalled(), "{error}");
        let lacks = "2 of the 2 envelopes of hub `fill.out -> wrap.input` at this location are in use";
        assert!(error.to_string().contains(lacks), "{error}");
    });
}

/// A message with a derived `Message`: only library code visits its envelope.
#[derive(Message)]
struct Derived {
    #[envelope]
    of: (u32, Option<Envelope<u32>>),
}

#[test]
fn a_stall_names_the_hub_that_holds_the_envelopes_of_a_derived_message() {
    within_bound("a stall", async {
        let mut flow = Flow::new("flow");
        let fill = flow.add("fill", Blanks);
        let wrap = flow.add("wrap", map(async |envelope| Ok(Derived { of: (1, Some(envelope)) })));
        let end = flow.add("end", sink(async |_: Derived| Ok(())));
        let input = end.input;
        let end = end.when(wakeline::condition::at_least(input, 3));
        flow.connect(fill.out, wrap.input);
        flow.connect_with(wrap.output, end.input, HubOptions::bounded(3));
        let error = flow.run().await.unwrap_err();
        assert!(error.to_string().contains("2 of them in hub `wrap.output -> end.input`"), "{error}");
    });
}

#[test]
fn the_size_of_a_response_may_send() {
    within_bound("a response that sends", async {
        let mut flow = Flow::new("flow");
        let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
        let act = Act::default();
        let size = act.clone();
        let answer = flow.add(
            "answer",
            map(move |n: u32| {
                let act = size.clone();
                ready(Ok(Sized(n, Some(Arc::new(move || act.run())))))
            }),
        );
        let end =
            flow.add("end", sink(move |n: u32| ready(sender.send(n).map_err(|_| Error::new(ErrorKind::Operator, "")))));
        let ingress = flow.ingress_with("in", end.input, HubOptions::bounded(8));
        let service = flow.service("service", answer.input, answer.output);
        let running = flow.spawn().unwrap();
        // Both ends are open after this: an earlier `try_send` would be refused.
        ingress.send(1).await.unwrap();
        assert_eq!((received.recv().await, service.ask(2).await.unwrap().0), (Some(1), 2));
        let inner = ingress.clone();
        act.set(move || drop(inner.try_send(7)));
        assert_eq!(service.ask(3).await.unwrap().0, 3);
        assert_eq!(received.recv().await, Some(7));
        act.set(|| ());
        drop((ingress, service));
        running.await.unwrap();
    });
}

/// A value whose first clone panics.
struct ClonedTwice(Arc<AtomicUsize>);

impl Message for ClonedTwice {}

impl Clone for ClonedTwice {
    fn clone(&self) -> Self {
        assert!(self.0.fetch_add(1, Ordering::SeqCst) > 0, "a clone that panics");
        Self(self.0.clone())
    }
}

/// Takes the latest value twice: the first time its clone panics.
struct TakesTwice;

impl Operator for TakesTwice {
    type Ports = SinkPorts<ClonedTwice>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        assert!(catch_unwind(AssertUnwindSafe(|| ports.input.take().map(drop))).is_err());
        ports.input.take()?;
        cx.finish();
        Ok(())
    }
}

#[test]
fn a_latest_value_stays_in_its_hub_if_its_clone_panics() {
    within_bound("a clone that panics", async {
        let mut flow = Flow::new("flow");
        let mut once = Some(ClonedTwice(Arc::default()));
        let source = flow.add("source", source(move || ready(Ok(once.take()))));
        let takes = flow.add("takes", TakesTwice);
        flow.connect_with(source.output, takes.input, HubOptions::latest());
        flow.run().await.unwrap();
    });
}

/// A layer of a subscriber that calls back into wakeline from each callback, except from those of the test's own spans.
struct CallsBack {
    act: Act,
    calls: Arc<Mutex<BTreeSet<&'static str>>>,
}

thread_local! {
    static IN_TEST_CODE: Cell<bool> = const { Cell::new(false) };
}

impl CallsBack {
    fn call(&self, what: &'static str) {
        if !IN_TEST_CODE.get() {
            self.calls.lock().unwrap().insert(what);
            self.act.run();
        }
    }
}

impl<S: tracing::Subscriber> Layer<S> for CallsBack {
    fn on_follows_from(&self, _: &Id, _: &Id, _: Context<'_, S>) {
        self.call("follows_from");
    }

    fn on_event(&self, _: &tracing::Event<'_>, _: Context<'_, S>) {
        self.call("event");
    }

    fn on_enter(&self, _: &Id, _: Context<'_, S>) {
        self.call("enter");
    }

    fn on_exit(&self, _: &Id, _: Context<'_, S>) {
        self.call("exit");
    }

    fn on_close(&self, _: Id, _: Context<'_, S>) {
        self.call("close");
    }
}

#[derive(Ports)]
struct PairsPorts {
    #[input(at_least = 2)]
    input: Input<u32>,
    #[output]
    out: Output<u32>,
}

struct Pairs;

impl Operator for Pairs {
    type Ports = PairsPorts;

    async fn compute(&mut self, ports: &mut PairsPorts, cx: &mut Cx) -> Result<()> {
        let sum = ports.input.take()? + ports.input.take()?;
        cx.stream()?;
        tokio::task::yield_now().await;
        ports.out.send(sum).await?;
        Ok(())
    }
}

/// Runs a flow whose messages are sent in spans of that subscriber. Returns the callbacks that were called.
fn in_spans(panics: bool) -> BTreeSet<&'static str> {
    let calls = Arc::new(Mutex::new(BTreeSet::new()));
    let act = Act::default();
    let calls_back = CallsBack { act: act.clone(), calls: calls.clone() };
    let _here = tracing::subscriber::set_default(tracing_subscriber::registry().with(calls_back));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let device = Device::emulated(Emulated::new());
        // The pool is exhausted, so the operator logs that it has no stream of its own.
        let pool = StreamPool::builder(&device).maximum(1).build().unwrap();
        let _taken = pool.take().unwrap();
        let mut flow = Flow::new("flow");
        let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
        let pairs = flow.add("pairs", Pairs).on(&device).streams(&pool);
        let end =
            flow.add("end", sink(move |n: u32| ready(sender.send(n).map_err(|_| Error::new(ErrorKind::Operator, "")))));
        flow.connect(pairs.out, end.input);
        let other = flow.add("other", sink(async |_: u32| Ok(())));
        let ingress = flow.ingress_with("in", pairs.input, HubOptions::bounded(8));
        let other = Arc::new(flow.ingress("more", other.input));
        let running = flow.spawn().unwrap();
        ingress.send(0).await.unwrap();
        let (handle, to) = (running.handle(), Arc::downgrade(&other));
        act.set(move || {
            assert_eq!(handle.status().len(), 5);
            drop(to.upgrade().map(|other| other.try_send(0)));
            assert!(!panics, "a subscriber that panics");
        });
        for n in 1..6 {
            IN_TEST_CODE.set(true);
            tracing::info_span!("call").in_scope(|| assert!(ingress.try_send(n).is_ok()));
            IN_TEST_CODE.set(false);
        }
        drop(ingress);
        assert_eq!((received.recv().await, received.recv().await, received.recv().await), (Some(1), Some(5), Some(9)));
        drop(other);
        running.await.unwrap();
        assert!(tracing::Span::current().is_none());
    });
    calls.lock().unwrap().clone()
}

#[test]
fn a_subscriber_may_call_back_from_each_span_callback() {
    within_bound("a subscriber that calls back", async {
        let calls = thread::spawn(|| in_spans(false)).join().unwrap();
        for what in ["enter", "exit", "follows_from", "close", "event"] {
            assert!(calls.contains(what), "{what}: {calls:?}");
        }
    });
}

#[test]
fn a_subscriber_that_panics_harms_no_flow() {
    within_bound("a subscriber that panics", async {
        drop(thread::spawn(|| in_spans(true)).join().unwrap());
    });
}

struct ActsWhenDropped(Act);

impl Drop for ActsWhenDropped {
    fn drop(&mut self) {
        self.0.run();
    }
}

struct Tags(Act, u32);

impl Operator for Tags {
    type Ports = TicksPorts;

    async fn compute(&mut self, ports: &mut TicksPorts, cx: &mut Cx) -> Result<()> {
        cx.insert_metadata("asks", ActsWhenDropped(self.0.clone()));
        self.1 += 1;
        if self.1 == 3 {
            cx.finish();
        }
        ports.ticks.send(self.1).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct BothPorts {
    #[input]
    one: Input<u32>,
    #[input]
    other: Input<u32>,
}

struct Both;

impl Operator for Both {
    type Ports = BothPorts;

    async fn compute(&mut self, ports: &mut BothPorts, cx: &mut Cx) -> Result<()> {
        assert_eq!(ports.one.take()?, ports.other.take()?);
        assert!(cx.metadata().get::<ActsWhenDropped>("asks").is_some());
        Ok(())
    }
}

#[test]
fn merged_metadata_may_call_back_when_dropped() {
    within_bound("metadata that is merged", async {
        for policy in [MergePolicy::Update, MergePolicy::Reject] {
            let mut flow = Flow::new("flow");
            let act = Act::default();
            let one = flow.add("one", Tags(act.clone(), 0));
            let other = flow.add("other", Tags(act.clone(), 0));
            let both = flow.add("both", Both).merge_metadata(policy);
            flow.connect(one.ticks, both.one);
            flow.connect(other.ticks, both.other);
            let running = flow.spawn().unwrap();
            let handle = running.handle();
            act.set(move || assert_eq!(handle.status().len(), 3));
            running.await.unwrap();
            assert_eq!(act.count(), 6, "each value is dropped once");
        }
    });
}

#[derive(Ports)]
struct OddPorts {
    #[output(envelope_bytes = 16)]
    out: Output<Envelope<u32>>,
}

/// Sends five envelopes whose length is no whole number of rows.
struct Odd(u32);

impl Operator for Odd {
    type Ports = OddPorts;

    async fn compute(&mut self, ports: &mut OddPorts, cx: &mut Cx) -> Result<()> {
        let mut blank = ports.out.blank().await?;
        blank.space().await?.fill(0);
        blank.set_len(3)?;
        self.0 += 1;
        if self.0 == 5 {
            cx.finish();
        }
        ports.out.send(blank).await?;
        Ok(())
    }
}

/// Like [`RunsAfter`], with an output.
struct PassesAfter(Arc<Mutex<Runs>>);

impl Operator for PassesAfter {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let envelope = ports.input.take()?;
        run_after(&self.0, cx)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

#[test]
fn a_member_of_a_section_honours_run_after() {
    within_bound("a member that runs after a buffer", async {
        let device = Device::emulated(Emulated::new());
        let mut flow = Flow::new("flow");
        let odd = flow.add("odd", Odd(0));
        let runs = Arc::new(Mutex::new((None, Vec::new())));
        let member = flow.add("member", PassesAfter(runs.clone())).on(&device);
        let end = flow.add("end", sink(async |_: Envelope<u32>| Ok(())));
        flow.connect(odd.out, member.input);
        flow.connect(member.output, end.input);
        // No envelope has a whole number of rows, so each round is streamed as a run of the member.
        flow.replay("net", &member).buckets([4]).rows(member.input, 4);
        let report = flow.run().await.unwrap();
        let net = report.section("net").unwrap();
        assert_eq!((net.streamed, &net.streamed_because[..]), (5, &[(StreamReason::UnevenRows, 5)][..]));
        assert!(report.to_string().contains("5 streamed (5 for no common whole number of rows)"), "{report}");
        assert_eq!(runs.lock().unwrap().1, [true; 4]);
    });
}
