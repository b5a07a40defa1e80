//! Hostile user code in flows and their hubs: destructors that panic, several at once, methods of messages that panic on
//! the way, writers of logs that use the hub, and wakers that panic at the ends of a flow. None of it ends the process or
//! strands the others.
//!
//! Each body runs in a process of its own, which is killed if it hangs.

#![forbid(unsafe_code)]

#[path = "common/alone.rs"]
mod alone;

use std::{
    borrow::Cow,
    future::{pending, ready},
    io::{self, Write},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
};

use alone::in_a_process;
use futures::{FutureExt, StreamExt};
use wakeline::{
    ChunkHub, Error, ErrorKind,
    condition::{Condition, Status, until},
    device::Emulated,
    hub::{MergePolicy, Producer, RawEnvelope},
    operator::{MapPorts, Reply, SinkPorts, SourcePorts, concurrent, map, sink, source},
    prelude::*,
};

/// Runs an async body in a process of its own, on a runtime of two workers.
fn alone(name: &str, body: impl Future<Output = ()>) {
    in_a_process(name, || {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(body);
    });
}

fn host() -> Device {
    Device::host()
}

/// A value whose destructor panics.
#[derive(Debug)]
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a destructor of the user's panics");
    }
}

impl Message for Bomb {}

/// Bombs without end; `made` is told of each.
fn bombs(made: tokio::sync::mpsc::UnboundedSender<()>) -> impl FnMut() -> std::future::Ready<Result<Option<Bomb>>> {
    move || {
        let _ = made.send(());
        ready(Ok(Some(Bomb)))
    }
}

/// It begins a run and takes nothing.
struct Stuck;

impl Operator for Stuck {
    type Ports = SinkPorts<Bomb>;

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        pending().await
    }
}

#[test]
fn messages_in_a_hub_whose_destructors_panic_end_with_the_flow() {
    alone("messages_in_a_hub_whose_destructors_panic_end_with_the_flow", async {
        let (made, mut told) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let bombs = flow.add("bombs", source(bombs(made)));
        let stuck = flow.add("stuck", Stuck);
        flow.connect_with(bombs.output, stuck.input, Hub::bounded(4));
        let running = flow.spawn().unwrap();
        for _ in 0..4 {
            told.recv().await.unwrap();
        }
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
    });
}

/// Takes a batch, and drops it.
#[derive(Ports)]
struct BatchPorts {
    #[input(at_least = 3)]
    input: Input<Bomb>,
}

struct DropsBatch(usize);

impl Operator for DropsBatch {
    type Ports = BatchPorts;

    async fn compute(&mut self, ports: &mut BatchPorts, cx: &mut Cx) -> Result<()> {
        drop(ports.input.take_batch()?);
        self.0 += 1;
        if self.0 == 2 {
            cx.finish();
        }
        Ok(())
    }
}

#[test]
fn a_batch_whose_destructors_panic_is_dropped_unused() {
    alone("a_batch_whose_destructors_panic_is_dropped_unused", async {
        let (made, _told) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let bombs = flow.add("bombs", source(bombs(made)));
        let drops = flow.add("drops", DropsBatch(0));
        flow.connect_with(bombs.output, drops.input, Hub::bounded(6));
        // The source may be left with one bomb in hand, which is its own to drop.
        match flow.run().await {
            Ok(report) => assert_eq!(report.operators[1].runs, 2),
            Err(error) => assert!(error.to_string().contains("operator `bombs`"), "{error}"),
        }
    });
}

/// Two values beside its message.
struct Labels;

impl Operator for Labels {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.insert_metadata("a", Bomb);
        cx.insert_metadata("b", Bomb);
        ports.output.send(7).await?;
        cx.finish();
        Ok(())
    }
}

#[test]
fn metadata_whose_destructors_panic_go_with_their_message() {
    alone("metadata_whose_destructors_panic_go_with_their_message", async {
        let mut flow = Flow::new("f");
        let labels = flow.add("labels", Labels);
        let came = Arc::new(AtomicUsize::new(0));
        let seen = came.clone();
        let end = flow.add(
            "end",
            sink(move |number: u32| {
                seen.store(number as usize, Ordering::SeqCst);
                ready(Ok(()))
            }),
        );
        flow.connect(labels.output, end.input);
        flow.run().await.unwrap();
        assert_eq!(came.load(Ordering::SeqCst), 7);
    });
}

struct Never(#[allow(dead_code, reason = "dropped")] Bomb);

impl Condition for Never {
    fn poll_status(&mut self, _: &mut Context<'_>) -> Status {
        Status::Never
    }

    fn describe(&self) -> Cow<'static, str> {
        "nothing".into()
    }
}

#[test]
fn conditions_whose_destructors_panic_end_with_the_flow() {
    alone("conditions_whose_destructors_panic_end_with_the_flow", async {
        let flow = || {
            let mut flow = Flow::new("f");
            let source = flow.add("source", source(async || Ok(Some(1_u32)))).when(Never(Bomb)).when(Never(Bomb));
            let end = flow.add("end", sink(async |_: u32| Ok(())));
            flow.connect(source.output, end.input);
            flow
        };
        flow().spawn().unwrap().await.unwrap();
        flow().run().await.unwrap();
        drop(flow());
    });
}

/// An operator whose destructor panics. It ends at once.
struct Ends(#[allow(dead_code, reason = "dropped")] Bomb);

impl Operator for Ends {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, _ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

#[test]
fn operators_whose_destructors_panic_go_with_their_flow() {
    alone("operators_whose_destructors_panic_go_with_their_flow", async {
        let flow = || {
            let mut flow = Flow::new("f");
            for name in ["one", "other"] {
                let ends = flow.add(name, Ends(Bomb));
                let end = flow.add(format!("behind {name}"), sink(async |_: u32| Ok(())));
                flow.connect(ends.output, end.input);
            }
            flow
        };
        drop(flow());
        let mut kept = flow();
        kept.run().await.unwrap();
        drop(kept);
        // Those of a flow in the background are dropped as it ends, which they fail.
        let error = flow().spawn().unwrap().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Panicked, "{error}");
    });
}

/// A chunk's structure whose destructor panics.
#[derive(Clone)]
struct Shape(#[allow(dead_code, reason = "dropped")] Arc<Bomb>);

#[test]
fn structures_whose_destructors_panic_go_with_their_hub() {
    alone("structures_whose_destructors_panic_go_with_their_hub", async {
        let hub = ChunkHub::<u32, Shape>::builder("h").elements(1).queue(2).host_envelopes(2).build().unwrap();
        let mut produce = hub.produce(&host()).unwrap();
        for number in 0..2 {
            let mut blank = produce.next().await.unwrap().unwrap();
            blank.set_structure(Shape(Arc::new(Bomb)));
            blank.fill_from(&[number]).await.unwrap();
            blank.commit().unwrap();
        }
        drop((produce, hub));
    });
}

/// Which of a message's methods panics, and at which call.
#[derive(Clone, Copy, Debug)]
enum Panics {
    Envelopes(usize),
    SizeInBytes(usize),
    Never,
}

struct Parcel {
    envelope: Envelope<u32>,
    panics: Panics,
    calls: AtomicUsize,
}

impl Message for Parcel {
    const CARRIES_ENVELOPES: bool = true;
    const ELEMENT_BYTES: usize = 4;

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        if let Panics::Envelopes(at) = self.panics {
            assert_ne!(self.calls.fetch_add(1, Ordering::SeqCst), at, "a method of a message panics");
        }
        self.envelope.envelopes(visit);
    }

    fn size_in_bytes(&self) -> usize {
        if let Panics::SizeInBytes(at) = self.panics {
            assert_ne!(self.calls.fetch_add(1, Ordering::SeqCst), at, "a method of a message panics");
        }
        self.envelope.size_in_bytes()
    }
}

fn parcel(panics: Panics) -> Parcel {
    let mut buffer = Buffer::<u32>::pinned(&host(), 4).unwrap();
    buffer.as_mut_slice().unwrap().fill(1);
    Parcel { envelope: buffer.into(), panics, calls: AtomicUsize::new(0) }
}

/// The ways in which a message may panic.
fn ways_to_panic() -> impl Iterator<Item = (usize, Panics)> {
    (0..6).flat_map(|at| [Panics::Envelopes(at), Panics::SizeInBytes(at)].into_iter().enumerate())
}

/// A message of an operator's whose method panics as its hub moves it fails the flow.
async fn moves(device: Device) {
    let mut failed = [false; 2];
    for (kind, panics) in ways_to_panic() {
        let mut flow = Flow::new("f");
        let mut sends = vec![parcel(Panics::Never), parcel(panics), parcel(Panics::Never)];
        let start = flow.add("start", source(move || ready(Ok(sends.pop()))));
        let end = flow.add("end", sink(async |_: Parcel| Ok(()))).on(&device);
        flow.connect_with(start.output, end.input, Hub::bounded(3).envelopes(3).envelope_bytes(64));
        if let Err(error) = flow.run().await {
            assert_eq!(error.kind(), ErrorKind::Panicked, "{panics:?}: {error}");
            failed[kind] |= error.to_string().contains("hub `");
        }
    }
    assert_eq!(failed, [true; 2], "none has panicked in a move");
}

/// One from outside is dropped, and the others come through; one that panics before it has come in is its sender's.
async fn moves_of_strangers(device: Device) {
    let mut dropped = [false; 2];
    for (kind, panics) in ways_to_panic() {
        let mut flow = Flow::new("f");
        let end = flow.add("end", sink(async |_: Parcel| Ok(()))).on(&device);
        let ingress = flow.ingress_with("in", end.input, Hub::bounded(3).envelopes(3).envelope_bytes(64));
        let running = flow.spawn().unwrap();
        ingress.send(parcel(Panics::Never)).await.unwrap();
        let hostile = ingress.clone();
        let _ = tokio::spawn(async move { hostile.send(parcel(panics)).await.map_err(|_| ()) }).await;
        // Those after it come through, or learn that the reader has failed: none waits for ever.
        for _ in 0..8 {
            let _ = ingress.send(parcel(Panics::Never)).await.map_err(|_| ());
        }
        drop(ingress);
        match running.await {
            Ok(report) => dropped[kind] |= report.hubs.iter().any(|hub| hub.dropped > 0),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Panicked, "{panics:?}: {error}");
                assert!(!error.to_string().contains("hub `"), "{panics:?}: {error}");
            }
        }
    }
    assert_eq!(dropped, [true; 2], "none has panicked in a move");
}

#[test]
fn a_message_that_panics_in_a_move_fails_its_hub_emulated() {
    alone("a_message_that_panics_in_a_move_fails_its_hub_emulated", async {
        moves(Device::emulated(Emulated::new().workers(4)).race_checked()).await;
    });
}

#[test]
fn a_message_from_outside_that_panics_in_a_move_is_dropped_emulated() {
    alone("a_message_from_outside_that_panics_in_a_move_is_dropped_emulated", async {
        moves_of_strangers(Device::emulated(Emulated::new().workers(4)).race_checked()).await;
    });
}

#[test]
fn a_message_that_panics_in_a_move_cuda() {
    alone("a_message_that_panics_in_a_move_cuda", async {
        match Device::cuda(0) {
            Ok(device) => {
                moves(device.clone().race_checked()).await;
                moves_of_strangers(device.race_checked()).await;
            }
            Err(error) if std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1") => {
                panic!("REQUIRE_CUDA=1 and no GPU: {error}")
            }
            Err(error) => eprintln!("skipped, no GPU: {error}"),
        }
    });
}

/// What a writer does with the lines that it is given.
struct Lines<F>(F);

impl<F: FnMut(&str) + Send> Write for Lines<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.0)(&String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn put(produce: &mut Producer<u32>, number: u32) {
    produce.with(async |blank| blank.fill_from(&[number]).await).await.unwrap();
}

#[test]
fn the_writer_of_a_log_uses_its_hub() {
    alone("the_writer_of_a_log_uses_its_hub", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).queue(4).host_envelopes(4).build().unwrap();
        let (mut produce, mut other) = (hub.produce(&host()).unwrap(), Some(hub.produce(&host()).unwrap()));
        let (asked, text) = (hub.clone(), Arc::new(Mutex::new(String::new())));
        let told = text.clone();
        hub.log_to(Lines(move |line: &str| {
            // The chunk is there by the time that it is told.
            assert!(!asked.is_empty());
            told.lock().unwrap().push_str(line);
            if let Some(mut other) = other.take() {
                put(&mut other, 2).now_or_never().unwrap();
            }
        }));
        put(&mut produce, 1).await;
        assert_eq!(hub.len(), 2);
        let text = text.lock().unwrap().clone();
        assert_eq!(text, "h: chunk 1: produced on the host, 4 B\nh: chunk 2: produced on the host, 4 B\n");
        // A cycle: the hub keeps the writer, which has the hub.
        hub.log_to(io::sink());
    });
}

#[test]
fn the_writer_of_a_log_panics() {
    alone("the_writer_of_a_log_panics", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).build().unwrap();
        hub.log_to(Lines(|line: &str| assert!(!line.contains("modified"), "the writer of a log panics")));
        put(&mut hub.produce(&host()).unwrap(), 1).await;
        let mut modify = hub.modify(&host()).unwrap();
        for _ in 0..3 {
            modify.next().await.unwrap().unwrap().commit().unwrap();
        }
        // And one whose destructor does.
        hub.log_to(Lines({
            let bomb = Bomb;
            move |_: &str| _ = &bomb
        }));
        hub.log_to(io::sink());
        assert_eq!(hub.len(), 1);
    });
}

#[test]
fn the_writer_of_a_log_holds_up_its_own_thread_alone() {
    alone("the_writer_of_a_log_holds_up_its_own_thread_alone", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).queue(2).host_envelopes(2).build().unwrap();
        let (go, held) = mpsc::channel::<()>();
        let (began, wait) = mpsc::channel();
        let lines = Arc::new(AtomicUsize::new(0));
        let written = lines.clone();
        hub.log_to(Lines(move |line: &str| {
            let _ = began.send(());
            let _ = held.recv();
            written.fetch_add(line.matches('\n').count(), Ordering::SeqCst);
        }));
        let mut first = hub.produce(&host()).unwrap();
        let writes = std::thread::spawn(move || put(&mut first, 1).now_or_never().unwrap());
        wait.recv().unwrap();
        // Meanwhile others go on.
        let mut consume = hub.consume(&host()).unwrap();
        consume.next().await.unwrap().unwrap().commit().unwrap();
        drop(go);
        writes.join().unwrap();
        assert_eq!(lines.load(Ordering::SeqCst), 3, "what others have told meanwhile is written, too");
    });
}

/// A waker that panics as it is woken.
struct Hostile;

impl Wake for Hostile {
    fn wake(self: Arc<Self>) {
        panic!("a hostile waker");
    }
}

fn hostile() -> Waker {
    Waker::from(Arc::new(Hostile))
}

#[test]
fn a_waker_that_panics_at_an_egress_fails_no_flow() {
    alone("a_waker_that_panics_at_an_egress_fails_no_flow", async {
        let (go, numbers) = tokio::sync::mpsc::unbounded_channel::<u32>();
        let numbers = Arc::new(tokio::sync::Mutex::new(numbers));
        let next = move || {
            let numbers = numbers.clone();
            async move { Ok(numbers.lock().await.recv().await) }
        };
        let mut flow = Flow::new("f");
        let source = flow.add("source", source(next));
        let mut out = flow.egress("out", source.output);
        let running = flow.spawn().unwrap();
        assert!(Box::pin(out.recv()).as_mut().poll(&mut Context::from_waker(&hostile())).is_pending());
        (0..4).for_each(|number| go.send(number).unwrap());
        drop(go);
        assert_eq!(out.collect::<Vec<_>>().await, [0, 1, 2, 3]);
        running.await.unwrap();
    });
}

/// Keeps the replies of all requests that it takes.
struct Keeps(Arc<Mutex<Vec<Reply>>>, tokio::sync::mpsc::UnboundedSender<()>);

impl Operator for Keeps {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(cx.take_replies());
        let _ = self.1.send(());
        Ok(())
    }
}

#[test]
fn callers_whose_wakers_panic_leave_the_others_their_answers() {
    alone("callers_whose_wakers_panic_leave_the_others_their_answers", async {
        let (kept, (tell, mut told)) = (Arc::default(), tokio::sync::mpsc::unbounded_channel());
        let mut flow = Flow::new("f");
        let keeps = flow.add("keeps", Keeps(Arc::clone(&kept), tell));
        let ask = flow.service_with("ask", keeps.input, keeps.output, Hub::bounded(8));
        let running = flow.spawn().unwrap();
        let mut asked: Vec<_> = (0..3).map(|_| Box::pin(ask.ask(1))).collect();
        let ours = futures::task::noop_waker();
        let mut others: Vec<_> = Vec::new();
        for hostile_one in &mut asked {
            // Before it is answered it waits for the flow to run: asked until its request has come in.
            while told.try_recv().is_err() {
                assert!(hostile_one.as_mut().poll(&mut Context::from_waker(&hostile())).is_pending());
                tokio::task::yield_now().await;
            }
            let mut other = Box::pin(ask.ask(2));
            while told.try_recv().is_err() {
                assert!(other.as_mut().poll(&mut Context::from_waker(&ours)).is_pending());
                tokio::task::yield_now().await;
            }
            others.push(other);
        }
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        for other in others {
            assert!(other.await.unwrap_err().is_cancelled());
        }
    });
}

#[test]
fn peeks_whose_wakers_panic_leave_the_others_their_chunk() {
    alone("peeks_whose_wakers_panic_leave_the_others_their_chunk", async {
        let hub = ChunkHub::<u32>::builder("h").elements(1).host_envelopes(1).build().unwrap();
        let mut produce = hub.produce(&host()).unwrap();
        let mut links: Vec<_> = (0..7).map(|_| hub.peek(&host()).unwrap()).collect();
        let mut waits: Vec<_> = links.iter_mut().map(|link| Box::pin(link.next())).collect();
        let woken = Arc::new(Counts(AtomicUsize::new(0)));
        for (at, wait) in waits.iter_mut().enumerate() {
            let waker = if at < 3 { hostile() } else { Waker::from(woken.clone()) };
            assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        put(&mut produce, 1).await;
        assert_eq!(woken.0.load(Ordering::SeqCst), 4);
    });
}

struct Counts(AtomicUsize);

impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A waker that sends into the flow as it is dropped.
struct SendsWhenDropped(wakeline::Ingress<u32>, Arc<AtomicBool>);

impl Wake for SendsWhenDropped {
    fn wake(self: Arc<Self>) {}
}

impl Drop for SendsWhenDropped {
    fn drop(&mut self) {
        // The last one is dropped as the flow has ended.
        self.1.fetch_or(self.0.try_send(3).is_ok(), Ordering::SeqCst);
    }
}

type Slot = Arc<Mutex<Option<wakeline::Ingress<u32>>>>;

/// Waits for a message with wakers of its own.
struct OwnWakers(Slot, Arc<AtomicBool>);

impl Operator for OwnWakers {
    type Ports = SinkPorts<u32>;

    async fn run(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let ingress = self.0.lock().unwrap().take().unwrap();
        let mut receive = Box::pin(ports.input.recv());
        for _ in 0..8 {
            let waker = Waker::from(Arc::new(SendsWhenDropped(ingress.clone(), self.1.clone())));
            if receive.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                break;
            }
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_waker_that_is_replaced_sends_into_the_hub_that_drops_it() {
    alone("a_waker_that_is_replaced_sends_into_the_hub_that_drops_it", async {
        let (slot, sent) = (Slot::default(), Arc::default());
        let mut flow = Flow::new("f");
        let own = flow.add("own", OwnWakers(slot.clone(), Arc::clone(&sent)));
        *slot.lock().unwrap() = Some(flow.ingress_with("in", own.input, Hub::bounded(64)));
        flow.run().await.unwrap();
        assert!(sent.load(Ordering::SeqCst));
    });
}

/// An operator that never comes to start.
struct NeverStarts(tokio::sync::mpsc::UnboundedSender<()>);

impl Operator for NeverStarts {
    type Ports = SourcePorts<u32>;

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        let _ = self.0.send(());
        pending().await
    }

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[test]
fn operators_whose_destructors_panic_go_with_their_runtime() {
    alone("operators_whose_destructors_panic_go_with_their_runtime", async {
        let (tell, mut starts) = tokio::sync::mpsc::unbounded_channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let mut running = None;
            runtime.block_on(async {
                let mut flow = Flow::new("f");
                let never = flow.add("never", NeverStarts(tell));
                let end = flow.add("end", sink(async |_: u32| Ok(())));
                flow.connect(never.output, end.input);
                // They wait for their turn to start, as the runtime ends.
                for name in ["one", "other"] {
                    let ends = flow.add(name, Ends(Bomb));
                    let end = flow.add(format!("behind {name}"), sink(async |_: u32| Ok(())));
                    flow.connect(ends.output, end.input);
                }
                running = Some(flow.spawn().unwrap());
                starts.recv().await.unwrap();
            });
            drop(runtime);
            running.unwrap()
        });
        let running = thread.join().unwrap();
        assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Cancelled);
    });
}

/// It has one run, and does as it is asked at its end.
struct Stops {
    name: &'static str,
    stopped: Arc<Mutex<Vec<&'static str>>>,
    error: Option<fn() -> Error>,
    panics: bool,
}

/// Is there at once, and may panic as it is dropped.
struct Stopped(Option<Result<()>>, #[allow(dead_code, reason = "dropped")] Option<Bomb>);

impl Future for Stopped {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(self.0.take().unwrap())
    }
}

impl Operator for Stops {
    type Ports = ();

    async fn compute(&mut self, _: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }

    fn stop(&mut self, _: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        self.stopped.lock().unwrap().push(self.name);
        Stopped(Some(self.error.map_or(Ok(()), |error| Err(error()))), self.panics.then(|| Bomb))
    }
}

/// A flow of three whose `stop` ends like this: each has its turn all the same.
async fn all_stop(error: Option<fn() -> Error>, panics: bool) {
    let stopped = Arc::default();
    let mut flow = Flow::new("f");
    for name in ["a", "b", "c"] {
        flow.add(name, Stops { name, stopped: Arc::clone(&stopped), error, panics });
    }
    let outcome = flow.run().await;
    assert_eq!(*stopped.lock().unwrap(), ["a", "b", "c"]);
    drop(outcome.unwrap_err());
    // It has all its operators.
    drop(flow.run().await.unwrap_err());
    assert_eq!(stopped.lock().unwrap().len(), 6);
}

#[test]
fn every_stop_runs_though_a_future_of_one_panics_as_it_is_dropped() {
    alone("every_stop_runs_though_a_future_of_one_panics_as_it_is_dropped", all_stop(None, true));
}

/// A cause whose destructor panics.
#[derive(Debug)]
struct Cause(#[allow(dead_code, reason = "dropped")] Bomb);

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a cause")
    }
}

impl std::error::Error for Cause {}

#[test]
fn every_stop_runs_though_their_errors_panic_as_they_are_dropped() {
    alone(
        "every_stop_runs_though_their_errors_panic_as_they_are_dropped",
        all_stop(Some(|| Error::other(Cause(Bomb))), false),
    );
}

/// A cause whose text panics.
#[derive(Debug)]
struct NoText;

impl std::fmt::Display for NoText {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("the text of an error panics");
    }
}

impl std::error::Error for NoText {}

#[test]
fn every_stop_runs_though_the_text_of_their_errors_panics() {
    alone("every_stop_runs_though_the_text_of_their_errors_panics", async {
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(std::io::sink).init();
        all_stop(Some(|| Error::other(NoText)), false).await;
    });
}

#[test]
fn operators_whose_destructors_panic_go_with_an_outcome_that_is_not_taken() {
    alone("operators_whose_destructors_panic_go_with_an_outcome_that_is_not_taken", async {
        let mut flow = Flow::new("f");
        let ends: Vec<_> = ["one", "other"].map(|name| flow.add(name, Ends(Bomb))).into();
        let (end, mut ended) = tokio::sync::mpsc::unbounded_channel::<()>();
        for (at, ends) in ends.into_iter().enumerate() {
            let end = end.clone();
            let to = flow.add(format!("behind {at}"), Ended(end));
            flow.connect(ends.output, to.input);
        }
        drop(end);
        let mut run = Box::pin(flow.run());
        assert!(futures::poll!(&mut run).is_pending());
        // The last of them has stopped: the outcome is there, or about to be.
        assert_eq!(ended.recv().await, Some(()));
        assert_eq!(ended.recv().await, Some(()));
        tokio::task::yield_now().await;
        drop(run);
    });
}

/// Says that its `stop` has run.
struct Ended(tokio::sync::mpsc::UnboundedSender<()>);

impl Operator for Ended {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut SinkPorts<u32>, _: &mut Cx) -> Result<()> {
        ports.input.take().map(drop)
    }

    async fn stop(&mut self, _: &mut Cx) -> Result<()> {
        let _ = self.0.send(());
        Ok(())
    }
}

#[test]
fn functions_of_sections_and_writers_of_steps_panic_as_they_are_dropped() {
    alone("functions_of_sections_and_writers_of_steps_panic_as_they_are_dropped", async {
        struct Writer(#[allow(dead_code, reason = "dropped")] Bomb);
        impl Write for Writer {
            fn write(&mut self, text: &[u8]) -> io::Result<usize> {
                Ok(text.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut flow = Flow::new("f");
        for at in 0..2 {
            let bomb = Bomb;
            let work = flow.add(format!("work {at}"), map(async |n: u32| Ok(n)));
            flow.replay(format!("section {at}"), &work).inspect(move |_| _ = &bomb);
        }
        drop(flow);
        let mut flow = Flow::new("f");
        let from = flow.add("from", source(|| ready(Ok(None::<u32>))));
        let to = flow.add("to", sink(async |_: u32| Ok(())));
        flow.connect(from.output, to.input);
        let steps = flow.steps().unwrap().log_to(Writer(Bomb));
        let hub = "from.output -> to.input";
        let steps = steps.log_hub_to(hub, Writer(Bomb)).unwrap().log_hub_to(hub, Writer(Bomb)).unwrap();
        drop(steps);
        // Two at once, as the struct's fields.
        struct Hubs {
            _one: ChunkHub<u32>,
            _other: ChunkHub<u32>,
        }
        let hub = |name: &str| {
            let hub = ChunkHub::<u32>::builder(name).elements(1).host_envelopes(2).build().unwrap();
            hub.log_to(Writer(Bomb));
            hub
        };
        drop(Hubs { _one: hub("one"), _other: hub("other") });
    });
}

// Under its place's lock it would be a panic of a debug build, from the order of locks.
#[test]
fn an_allocator_and_a_pool_are_replaced_by_others() {
    let device = Device::emulated(Emulated::new());
    let mut flow = Flow::new("f");
    let mut end = flow.add("end", sink(async |_: u32| Ok(())));
    for _ in 0..2 {
        end = end
            .on(&Device::emulated(Emulated::new()))
            .allocator(&wakeline::memory::Allocator::blocks(&device, 64, 1).unwrap())
            .streams(&StreamPool::builder(&device).reserved(1).build().unwrap());
    }
    drop((flow, end));
}

/// A condition that answers each time otherwise whether it is asked last, and uses what it was given to.
struct OfTwoMinds(AtomicUsize, Box<dyn Fn() + Send + Sync>);

impl Condition for OfTwoMinds {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        Status::Ready
    }

    fn asked_last(&self) -> bool {
        (self.1)();
        (self.0.fetch_add(1, Ordering::SeqCst).wrapping_mul(2_654_435_761) >> 7).is_multiple_of(3)
    }
}

#[test]
fn conditions_that_are_of_two_minds_use_what_they_were_given_to() {
    alone("conditions_that_are_of_two_minds_use_what_they_were_given_to", async {
        let mut flow = Flow::new("f");
        let mut from = flow.add("from", source(|| ready(Ok(None::<u32>))));
        for at in 0..60 {
            let given_to = Mutex::new(from.clone());
            let uses = move || drop(given_to.lock().unwrap().clone().merge_metadata(MergePolicy::Reject));
            from = from.when(OfTwoMinds(AtomicUsize::new(at), Box::new(uses)));
        }
        let to = flow.add("to", sink(async |_: u32| Ok(())));
        flow.connect(from.output, to.input);
        flow.run().await.unwrap();
        flow.run().await.unwrap();
    });
}

#[test]
fn a_blank_envelope_comes_past_a_future_that_is_kept() {
    alone("a_blank_envelope_comes_past_a_future_that_is_kept", async {
        let mut flow = Flow::new("f");
        let end = flow.add("end", sink(async |_: Envelope<u8>| Ok(())));
        let ingress = flow.ingress_with("in", end.input, Hub::bounded(1).envelopes(1).envelope_bytes(8));
        let running = flow.spawn().unwrap();
        let blank = ingress.blank().await.unwrap();
        let [mut kept, mut waits] = [(); 2].map(|()| Box::pin(ingress.blank()));
        assert!(futures::poll!(&mut kept).is_pending());
        assert!(futures::poll!(&mut waits).is_pending());
        drop(blank);
        drop(waits.await.unwrap());
        drop(kept);
        running.abort();
    });
}

/// Ports whose destructor panics.
#[derive(Ports)]
struct BombPorts {
    #[input]
    numbers: Input<u32>,
    #[allow(dead_code, reason = "dropped")]
    #[output]
    out: Output<u32>,
}

impl Drop for BombPorts {
    fn drop(&mut self) {
        panic!("the destructor of ports panics");
    }
}

/// It says that it runs, and does so for ever, with a value of its own.
struct RunsForEver(tokio::sync::mpsc::UnboundedSender<()>, Bomb);

impl Clone for RunsForEver {
    fn clone(&self) -> Self {
        Self(self.0.clone(), Bomb)
    }
}

impl Operator for RunsForEver {
    type Ports = BombPorts;

    async fn compute(&mut self, ports: &mut BombPorts, _: &mut Cx) -> Result<()> {
        let _own = Bomb;
        ports.numbers.take()?;
        let _ = self.0.send(());
        pending().await
    }
}

/// The runtime ends in the middle of a run.
fn ends_in_a_run(name: &str, several: bool) {
    in_a_process(name, || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut running = None;
        runtime.block_on(async {
            let (tell, mut runs) = tokio::sync::mpsc::unbounded_channel();
            let mut flow = Flow::new("f");
            let from = flow.add("from", source(async || Ok(Some(1_u32))));
            let to = flow.add("to", sink(async |_: u32| Ok(())));
            let (input, output) = if several {
                let work = flow.add("work", concurrent(1, RunsForEver(tell, Bomb)));
                (work.numbers, work.out)
            } else {
                let work = flow.add("work", RunsForEver(tell, Bomb));
                (work.numbers, work.out)
            };
            flow.connect(from.output, input);
            flow.connect(output, to.input);
            running = Some(flow.spawn().unwrap());
            runs.recv().await.unwrap();
        });
        drop(runtime);
        drop(running);
    });
}

#[test]
fn an_operator_its_ports_and_its_run_panic_as_the_runtime_ends() {
    ends_in_a_run("an_operator_its_ports_and_its_run_panic_as_the_runtime_ends", false);
}

#[test]
fn a_worker_its_ports_and_its_run_panic_as_the_runtime_ends() {
    ends_in_a_run("a_worker_its_ports_and_its_run_panic_as_the_runtime_ends", true);
}

#[test]
fn a_function_of_until_and_its_future_panic_as_they_are_dropped() {
    alone("a_function_of_until_and_its_future_panic_as_they_are_dropped", async {
        let (tell, mut waits) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let bomb = Bomb;
        let from = flow.add("from", source(async || Ok(Some(1_u32)))).when(until(move || {
            let _ = (&bomb, tell.send(()));
            async {
                let _own = Bomb;
                pending::<()>().await;
            }
        }));
        let to = flow.add("to", sink(async |_: u32| Ok(())));
        flow.connect(from.output, to.input);
        let running = flow.spawn().unwrap();
        waits.recv().await.unwrap();
        running.abort();
        assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Cancelled);
    });
}

/// A condition that is always there, and makes a device as it is dropped.
struct MakesADevice(Arc<AtomicUsize>);

impl Condition for MakesADevice {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        self.0.fetch_add(1, Ordering::SeqCst);
        Status::Ready
    }

    fn describe(&self) -> Cow<'static, str> {
        "nothing".into()
    }
}

impl Drop for MakesADevice {
    fn drop(&mut self) {
        drop(Device::emulated(Emulated::new()));
    }
}

/// Does this in its run, and ends.
struct Does(Box<dyn FnMut() + Send>);

impl Operator for Does {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, _ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        (self.0)();
        cx.finish();
        Ok(())
    }
}

#[test]
fn a_condition_that_is_added_while_the_flow_runs_is_there_in_the_next_run() {
    alone("a_condition_that_is_added_while_the_flow_runs_is_there_in_the_next_run", async {
        let asked = Arc::new(AtomicUsize::new(0));
        let mut flow = Flow::new("f");
        let (add, added) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let does = flow.add("does", Does(Box::new(move || added.try_iter().for_each(|add| add()))));
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(does.output, end.input);
        let condition = MakesADevice(asked.clone());
        add.send(Box::new(move || drop(does.when(condition)))).unwrap();
        flow.run().await.unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), 0);
        flow.run().await.unwrap();
        assert!(asked.load(Ordering::SeqCst) > 0);
    });
}

/// A response that may have a destructor that panics.
struct Response(#[allow(dead_code, reason = "dropped")] Option<Bomb>);

impl Message for Response {}

#[test]
fn a_response_whose_destructor_panics_and_that_has_no_caller_harms_no_other() {
    alone("a_response_whose_destructor_panics_and_that_has_no_caller_harms_no_other", async {
        let (go, gate) = tokio::sync::watch::channel(false);
        let (tell, mut taken) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let answer = flow.add(
            "answer",
            map(move |n: u32| {
                let mut gate = gate.clone();
                let _ = tell.send(n);
                async move {
                    let _ = gate.wait_for(|open| *open).await;
                    Ok(Response((n == 1).then(|| Bomb)))
                }
            }),
        );
        let service = flow.service("service", answer.input, answer.output);
        let running = flow.spawn().unwrap();
        let mut first = Box::pin(service.ask(1));
        // Its caller goes before the answer comes.
        tokio::select! {
            _ = &mut first => unreachable!("it waits at the gate"),
            n = taken.recv() => assert_eq!(n, Some(1)),
        }
        drop(first);
        go.send(true).unwrap();
        assert!(service.ask(2).await.unwrap().0.is_none());
        drop(service);
        running.await.unwrap();
    });
}
