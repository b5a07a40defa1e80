//! Messages, metadata, envelopes and responses whose destructors or methods panic.

use super::*;

/// An endless source of bombs, which sends a message to `made` for each.
fn bombs(made: tokio::sync::mpsc::UnboundedSender<()>) -> impl FnMut() -> std::future::Ready<Result<Option<Bomb>>> {
    move || {
        let _ = made.send(());
        ready(Ok(Some(Bomb)))
    }
}

/// Begins a run, takes nothing and never ends.
struct Stuck;

impl Operator for Stuck {
    type Ports = SinkPorts<Bomb>;

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        pending().await
    }
}

#[test]
fn queued_messages_whose_destructors_panic_are_dropped_with_the_flow() {
    alone("hostile_flows::messages::queued_messages_whose_destructors_panic_are_dropped_with_the_flow", async {
        let (made, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let bombs = flow.add("bombs", source(bombs(made)));
        let stuck = flow.add("stuck", Stuck);
        flow.connect_with(bombs.output, stuck.input, HubOptions::bounded(4));
        let running = flow.spawn().unwrap();
        for _ in 0..4 {
            receiver.recv().await.unwrap();
        }
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
    });
}

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
fn a_batch_whose_destructors_panic_may_be_dropped_unused() {
    alone("hostile_flows::messages::a_batch_whose_destructors_panic_may_be_dropped_unused", async {
        let (made, _receiver) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let bombs = flow.add("bombs", source(bombs(made)));
        let drops = flow.add("drops", DropsBatch(0));
        flow.connect_with(bombs.output, drops.input, HubOptions::bounded(6));
        // The source may still own one bomb, and fails when it drops that.
        match flow.run().await {
            Ok(report) => assert_eq!(report.operators[1].runs, 2),
            Err(error) => assert!(error.to_string().contains("operator `bombs`"), "{error}"),
        }
    });
}

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
fn metadata_whose_destructors_panic_are_dropped_with_their_message() {
    alone("hostile_flows::messages::metadata_whose_destructors_panic_are_dropped_with_their_message", async {
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

fn ways_to_panic() -> impl Iterator<Item = (usize, Panics)> {
    (0..6).flat_map(|at| [Panics::Envelopes(at), Panics::SizeInBytes(at)].into_iter().enumerate())
}

/// If a method of an operator's message panics while the hub moves the message, the flow fails.
async fn move_from_an_operator(device: Device) {
    let mut failed = [false; 2];
    for (kind, panics) in ways_to_panic() {
        let mut flow = Flow::new("f");
        let mut sends = vec![parcel(Panics::Never), parcel(panics), parcel(Panics::Never)];
        let start = flow.add("start", source(move || ready(Ok(sends.pop()))));
        let end = flow.add("end", sink(async |_: Parcel| Ok(()))).on(&device);
        flow.connect_with(start.output, end.input, HubOptions::bounded(3).envelopes(3).envelope_bytes(64));
        if let Err(error) = flow.run().await {
            assert_eq!(error.kind(), ErrorKind::Panicked, "{panics:?}: {error}");
            failed[kind] |= error.to_string().contains("hub `");
        }
    }
    assert_eq!(failed, [true; 2], "no message panicked in a move");
}

/// A message from outside is dropped instead, and the others arrive. A panic before the message has entered is its sender's.
async fn move_from_outside(device: Device) {
    let mut dropped = [false; 2];
    for (kind, panics) in ways_to_panic() {
        let mut flow = Flow::new("f");
        let end = flow.add("end", sink(async |_: Parcel| Ok(()))).on(&device);
        let ingress = flow.ingress_with("in", end.input, HubOptions::bounded(3).envelopes(3).envelope_bytes(64));
        let running = flow.spawn().unwrap();
        ingress.send(parcel(Panics::Never)).await.unwrap();
        let hostile = ingress.clone();
        let _ = tokio::spawn(async move { hostile.send(parcel(panics)).await.map_err(|_| ()) }).await;
        // Later messages arrive, or their senders get an error because the reader has failed.
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
    assert_eq!(dropped, [true; 2], "no message panicked in a move");
}

#[test]
fn a_message_that_panics_in_a_move_fails_its_flow_emulated() {
    alone("hostile_flows::messages::a_message_that_panics_in_a_move_fails_its_flow_emulated", async {
        move_from_an_operator(Device::emulated(Emulated::new().workers(4)).race_checked()).await;
    });
}

#[test]
fn a_message_from_outside_that_panics_in_a_move_is_dropped_emulated() {
    alone("hostile_flows::messages::a_message_from_outside_that_panics_in_a_move_is_dropped_emulated", async {
        move_from_outside(Device::emulated(Emulated::new().workers(4)).race_checked()).await;
    });
}

#[test]
#[ignore = "needs a GPU"]
fn a_message_that_panics_in_a_move_cuda() {
    alone("hostile_flows::messages::a_message_that_panics_in_a_move_cuda", async {
        let device = Device::cuda(0).unwrap();
        move_from_an_operator(device.clone().race_checked()).await;
        move_from_outside(device.race_checked()).await;
    });
}

#[test]
fn a_blank_envelope_passes_a_future_that_is_not_polled() {
    alone("hostile_flows::messages::a_blank_envelope_passes_a_future_that_is_not_polled", async {
        let mut flow = Flow::new("f");
        let end = flow.add("end", sink(async |_: Envelope<u8>| Ok(())));
        let ingress = flow.ingress_with("in", end.input, HubOptions::bounded(1).envelopes(1).envelope_bytes(8));
        let running = flow.spawn().unwrap();
        let blank = ingress.blank().await.unwrap();
        let [mut unpolled, mut waits] = [(); 2].map(|()| Box::pin(ingress.blank()));
        assert!(futures::poll!(&mut unpolled).is_pending());
        assert!(futures::poll!(&mut waits).is_pending());
        drop(blank);
        drop(waits.await.unwrap());
        drop(unpolled);
        running.abort();
    });
}

/// A response whose destructor panics if it owns a bomb.
struct Response(#[allow(dead_code, reason = "dropped")] Option<Bomb>);

impl Message for Response {}

#[test]
fn a_dropped_response_whose_destructor_panics_harms_no_other_caller() {
    alone("hostile_flows::messages::a_dropped_response_whose_destructor_panics_harms_no_other_caller", async {
        let (go, gate) = tokio::sync::watch::channel(false);
        let (sender, mut taken) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("f");
        let answer = flow.add(
            "answer",
            map(move |n: u32| {
                let mut gate = gate.clone();
                let _ = sender.send(n);
                async move {
                    let _ = gate.wait_for(|open| *open).await;
                    Ok(Response((n == 1).then(|| Bomb)))
                }
            }),
        );
        let service = flow.service("service", answer.input, answer.output);
        let running = flow.spawn().unwrap();
        let mut first = Box::pin(service.ask(1));
        // The caller is dropped before its response is sent.
        tokio::select! {
            _ = &mut first => unreachable!("the run waits at the gate"),
            n = taken.recv() => assert_eq!(n, Some(1)),
        }
        drop(first);
        go.send(true).unwrap();
        assert!(service.ask(2).await.unwrap().0.is_none());
        drop(service);
        running.await.unwrap();
    });
}

struct PanicsAtClose;

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for PanicsAtClose {
    fn on_close(&self, _: tracing::span::Id, _: tracing_subscriber::layer::Context<'_, S>) {
        panic!("a subscriber panics as a span is closed");
    }
}

#[test]
fn a_message_and_its_span_may_panic_when_dropped() {
    alone("hostile_flows::messages::a_message_and_its_span_may_panic_when_dropped", async {
        tracing_subscriber::registry().with(PanicsAtClose).init();
        let mut flow = Flow::new("f");
        let stuck = flow.add("stuck", Stuck);
        let ingress = flow.ingress_with("in", stuck.input, HubOptions::bounded(4));
        let running = flow.spawn().unwrap();
        for _ in 0..4 {
            // The flow holds the last handle of the span, and so closes it.
            let span = tracing::error_span!("request");
            ingress.send(Bomb).instrument(span).await.unwrap();
        }
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
    });
}

/// A numbered message. The destructor of the third panics.
struct Third(u32);

impl wakeline::Message for Third {}

impl Clone for Third {
    fn clone(&self) -> Self {
        Self(self.0)
    }
}

impl wakeline::Fork for Third {
    fn fork(&self, _: &mut wakeline::hub::Copier<'_>) -> Result<Self> {
        Ok(self.clone())
    }
}

impl Drop for Third {
    fn drop(&mut self) {
        if self.0 == 3 && !std::thread::panicking() {
            panic!("the third message");
        }
    }
}

/// Forgets its messages: it may take clones of the third.
fn takes(seen: &Arc<AtomicUsize>) -> impl Operator<Ports = SinkPorts<Third>> + use<> {
    let seen = seen.clone();
    sink(move |message: Third| {
        seen.fetch_add(1, Ordering::SeqCst);
        std::mem::forget(message);
        ready(Ok(()))
    })
}

/// Takes none of the messages of its runs.
#[derive(Clone)]
struct Leaves;

impl Operator for Leaves {
    type Ports = SinkPorts<Third>;

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// The library drops a message that an operator sent or has left. A panic of that drop is not a failure of the operator.
#[test]
fn a_message_that_panics_when_the_library_drops_it_fails_no_operator() {
    alone("hostile_flows::messages::a_message_that_panics_when_the_library_drops_it_fails_no_operator", async {
        for hub in [HubOptions::drop_oldest(1), HubOptions::drop_newest(1)] {
            for readers in [1, 2] {
                let (mut flow, seen, mut next) = (Flow::new("f"), Arc::new(AtomicUsize::new(0)), 0);
                let gate = Gate::open();
                gate.pause();
                let opens = gate.clone();
                let twelve = source(move || {
                    next += 1;
                    if next > 12 {
                        opens.resume();
                    }
                    ready(Ok((next <= 12).then_some(Third(next))))
                });
                let source = flow.add("source", twelve);
                let slow = flow.add("slow", takes(&seen)).when(gate);
                if readers == 1 {
                    flow.connect_with(source.output, slow.input, hub);
                } else {
                    let other = flow.add("other", takes(&seen));
                    flow.connect(source.output, [slow.input.with(hub), other.input.with(HubOptions::bounded(1))]);
                }
                let report = flow.run().await.unwrap();
                assert_eq!(report.operator("source").unwrap().runs, 13);
                let dropped = report.hub("source.output -> slow.input").unwrap().dropped;
                assert_eq!((dropped, report.operator("slow").unwrap().runs), (11, 1));
            }
        }
        // A newer value replaces a latest value.
        let (mut flow, seen, mut next) = (Flow::new("f"), Arc::new(AtomicUsize::new(0)), 0);
        let five = source(move || {
            next += 1;
            ready(Ok((next <= 5).then_some(Third(next))))
        });
        let source = flow.add("source", five);
        let slow = flow.add("slow", takes(&seen)).when(count(1));
        flow.connect_with(source.output, slow.input, HubOptions::latest());
        flow.run().await.unwrap();
        // The runs of a concurrent operator leave their messages.
        let (mut flow, mut next) = (Flow::new("f"), 0);
        let five = wakeline::operator::source(move || {
            next += 1;
            ready(Ok((next <= 5).then_some(Third(next))))
        });
        let source = flow.add("source", five);
        let leaves = flow.add("leaves", concurrent(2, Leaves));
        flow.connect(source.output, leaves.input);
        assert_eq!(flow.run().await.unwrap().operator("leaves").unwrap().runs, 5);
        // A message to a reader that has ended. The sender ends, and has not failed.
        let (mut flow, seen) = (Flow::new("f"), Arc::new(AtomicUsize::new(0)));
        let thirds = wakeline::operator::source(|| ready(Ok(Some(Third(3)))));
        let source = flow.add("source", thirds);
        let takes = flow.add("takes", takes(&seen)).when(count(2));
        flow.connect(source.output, takes.input);
        flow.run().await.unwrap();
        assert_eq!(seen.load(Ordering::SeqCst), 2);
    });
}

/// A message with a method that panics at its `nth` call, and a destructor that panics too.
struct Twice;

thread_local! {
    /// Whether `size_in_bytes` panics, or `envelopes`, and how many calls are left before the one that panics.
    static PANICS: std::cell::Cell<(bool, usize)> = const { std::cell::Cell::new((false, usize::MAX)) };
}

impl Twice {
    fn called(size: bool) {
        let (of_size, left) = PANICS.get();
        if of_size == size {
            PANICS.set((size, left.wrapping_sub(1)));
            assert_ne!(left, 0, "the message's own code");
        }
    }
}

impl wakeline::Message for Twice {
    const CARRIES_ENVELOPES: bool = true;

    fn envelopes(&mut self, _visit: &mut dyn FnMut(&mut RawEnvelope)) {
        Self::called(false);
    }

    fn size_in_bytes(&self) -> usize {
        Self::called(true);
        1
    }
}

impl Drop for Twice {
    fn drop(&mut self) {
        panic!("the message's destructor");
    }
}

struct Offers;

impl Operator for Offers {
    type Ports = SourcePorts<Twice>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(ports.output.offer(Twice).map(|offer| std::mem::forget(offer.kept))?)
    }
}

/// Passes such a message through the library in one way.
async fn pass_through(way: &str) {
    let hub = HubOptions::bounded(1).envelope_bytes(8);
    let mut flow = Flow::new("f");
    let forgets = || {
        sink(|message: Twice| {
            std::mem::forget(message);
            ready(Ok(()))
        })
    };
    match way {
        "offer" => {
            let (offers, takes) = (flow.add("offers", Offers), flow.add("takes", forgets()));
            flow.connect_with(offers.output, takes.input, hub);
            let _ = flow.run().await;
        }
        "egress" => {
            let mut once = Some(());
            let source = flow.add("source", source(move || ready(Ok(once.take().map(|()| Twice)))));
            let mut egress = flow.egress_with("egress", source.output, hub);
            let running = flow.spawn().unwrap();
            while let Some(message) = egress.recv().await {
                std::mem::forget(message);
            }
            let _ = running.await;
        }
        "response" => {
            let answers = flow.add("answers", map(|_: u32| ready(Ok(Twice))));
            let service = flow.service("service", answers.input, answers.output);
            let running = flow.spawn().unwrap();
            let _ = service.ask(1).await.map(std::mem::forget);
            drop(service);
            let _ = running.await;
        }
        "ingress" | "sink" => {
            let takes = flow.add("takes", forgets());
            let mut ingress = flow.ingress_with("ingress", takes.input, hub);
            let running = flow.spawn().unwrap();
            let sends = std::panic::AssertUnwindSafe(async {
                if way == "sink" {
                    let sent = futures::SinkExt::send(&mut ingress, Twice).await;
                    sent.unwrap_or_else(|unsent| std::mem::forget(unsent.into_message()));
                } else {
                    ingress.send(Twice).await.unwrap_or_else(|unsent| std::mem::forget(unsent.into_message()));
                }
            });
            let _ = sends.catch_unwind().await;
            drop(ingress);
            let _ = running.await;
        }
        "leaves" => {
            #[derive(Clone)]
            struct Leaves;

            impl Operator for Leaves {
                type Ports = SinkPorts<Twice>;

                async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
                    Ok(())
                }
            }

            let mut once = Some(());
            let source = flow.add("source", source(move || ready(Ok(once.take().map(|()| Twice)))));
            let leaves = flow.add("leaves", concurrent(2, Leaves));
            flow.connect_with(source.output, leaves.input, hub);
            let _ = flow.run().await;
        }
        _ => {
            let takes = map(|message: Twice| {
                std::mem::forget(message);
                ready(Ok(1_u32))
            });
            let takes = flow.add("takes", takes);
            let mut service = flow.service_with("service", takes.input, takes.output, hub);
            let running = flow.spawn().unwrap();
            let asks = std::panic::AssertUnwindSafe(async {
                if way == "ask" {
                    let _ = service.ask(Twice).await;
                } else {
                    use tower_service::Service as _;

                    std::future::poll_fn(|task| service.poll_ready(task)).await.unwrap();
                    let _ = service.call(Twice).await;
                }
            });
            let _ = asks.catch_unwind().await;
            drop(service);
            let _ = running.await;
        }
    }
}

/// Two panics at once abort the process: the library never drops a message while a panic of the message's own code unwinds.
#[test]
fn a_message_whose_methods_and_destructor_panic_does_not_abort() {
    in_a_process("hostile_flows::messages::a_message_whose_methods_and_destructor_panic_does_not_abort", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for way in ["offer", "egress", "response", "ingress", "sink", "ask", "call", "leaves"] {
            for of_size in [false, true] {
                for nth in 0..8 {
                    PANICS.set((of_size, nth));
                    println!("{way}, call {nth} of size {of_size}");
                    runtime.block_on(pass_through(way));
                }
            }
        }
    });
}
