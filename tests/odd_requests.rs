//! Odd requests: no request of one caller of a service affects the other callers. A request that cannot enter the flow
//! is its caller's error. A request whose device work does not end delays only its caller. The flow continues.

use std::{
    future::{poll_fn, ready},
    sync::Arc,
};

use common::*;
use futures::FutureExt;
use tokio::sync::Semaphore;
use tower::Service as _;
use wakeline::{
    Ingress, Message, Running, Service, Stream,
    device::{Emulated, Faults, Simulation},
    graph::Graph,
    prelude::*,
    stream::Event,
};

type Adder = Service<Envelope<u32>, Envelope<u32>>;

/// Adds one in place, on the host or its device. Each run takes a permit.
struct Add(Arc<Semaphore>);

impl Operator for Add {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        self.0.acquire().await.unwrap().forget();
        if cx.device().is_host() {
            envelope.write().await?.iter_mut().for_each(|x| *x += 1);
        } else {
            increment::launch(cx.stream()?, &mut envelope)?;
        }
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// A service with room for three requests, over an [`Add`] on a device or on the host, and its permits.
fn adder(at: Option<&Device>, envelopes: usize) -> (Adder, Running, Arc<Semaphore>) {
    let mut flow = Flow::new("adds");
    let permits = Arc::new(Semaphore::new(1000));
    let mut add = flow.add("add", Add(permits.clone()));
    if let Some(device) = at {
        add = add.on(device);
    }
    let hub = HubOptions::bounded(3).envelope_bytes(64).envelopes(envelopes);
    let service = flow.service_with("service", add.input, add.output, hub);
    (service, flow.spawn().unwrap(), permits)
}

async fn filled(service: &Adder, values: &[u32]) -> Envelope<u32> {
    let mut envelope = service.blank().await.unwrap();
    envelope.set_len(values.len()).unwrap();
    envelope.write().await.unwrap().copy_from_slice(values);
    envelope
}

/// The contents of an envelope on the host or a device.
async fn values(envelope: &Envelope<u32>) -> Vec<u32> {
    if envelope.is_host() {
        return envelope.read().await.unwrap().to_vec();
    }
    let stream = Stream::new(envelope.device()).unwrap();
    let mut host = Buffer::<u32>::pinned(envelope.device(), envelope.len()).unwrap();
    stream.copy(envelope, &mut host).unwrap();
    host.read().await.unwrap().to_vec()
}

/// Checks that more requests than the hub has room for are answered.
async fn others_are_served(service: &Adder) {
    for n in 0..5 {
        let answer = service.ask(filled(service, &[n; 4]).await).await.unwrap();
        assert_eq!(values(&answer).await, [n + 1; 4]);
    }
}

/// Ends a flow, and returns the kind of its callers' errors.
fn end(running: &Running, abort: bool) -> ErrorKind {
    if abort {
        running.abort();
        ErrorKind::Cancelled
    } else {
        running.stop();
        ErrorKind::Closed
    }
}

/// Drops the last service handle, and checks that the flow ends.
async fn finish(service: Adder, running: Running) {
    drop(service);
    running.await.unwrap();
}

fn fragile() -> Device {
    emulated_with(Emulated::new().workers(2).faults(Faults::new().trap_kernel("increment", 1)))
}

async fn lose(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut memory = stream.alloc::<u32>(4).unwrap();
    increment::launch(&stream, &mut memory).unwrap();
    assert!(stream.completed().await.unwrap_err().is_device_lost());
}

/// Requests whose last write or read is pending on a stream of the caller.
async fn endless_work(at: Device, own: Device) {
    for reads in [false, true] {
        let (service, running, _) = adder(Some(&at), 3);
        others_are_served(&service).await;
        let [stream] = streams(&own);
        let mut written = Buffer::<u32>::pinned(&own, 4).unwrap();
        let request = || {
            let buffer = Buffer::from_slice(&stream, &[5_u32; 4]).unwrap();
            Envelope::from(buffer)
        };
        // The first uses `ask`, the second `call`; the third drops its `ask`.
        let before = reads.then(request);
        let held = hold(&stream);
        let odd = match before {
            Some(read) => {
                stream.copy(&read, &mut written).unwrap();
                read
            }
            None => request(),
        };
        let (also, gone) = (request(), request());
        let mut asks = Box::pin(service.ask(odd));
        assert!(asks.as_mut().now_or_never().is_none());
        let mut tower = service.clone();
        poll_fn(|cx| tower.poll_ready(cx)).await.unwrap();
        let mut calls = tower.call(also);
        assert!((&mut calls).now_or_never().is_none());
        assert!(service.ask(gone).now_or_never().is_none());

        others_are_served(&service).await;
        assert!(asks.as_mut().now_or_never().is_none());
        drop(held);
        assert_eq!(values(&asks.await.unwrap()).await, [6; 4]);
        assert_eq!(values(&calls.await.unwrap()).await, [6; 4]);
        drop((tower, written));
        finish(service, running).await;
    }
}

on_both!(a_request_with_endless_work_delays_only_its_caller, async |device: Device| {
    endless_work(device.clone(), device).await;
});

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_with_endless_work_on_another_device_delays_only_its_caller() {
    within(endless_work(emulated(), emulated())).await;
}

on_both!(a_request_that_waits_for_its_work_fails_at_the_flows_end, async |device: Device| {
    for abort in [false, true] {
        let (service, running, _) = adder(Some(&device), 3);
        others_are_served(&service).await;
        let [stream] = streams(&device);
        let held = hold(&stream);
        let request = || Envelope::from(Buffer::from_slice(&stream, &[5_u32; 4]).unwrap());
        let mut asks = Box::pin(service.ask(request()));
        assert!(asks.as_mut().now_or_never().is_none());
        let mut tower = service.clone();
        poll_fn(|cx| tower.poll_ready(cx)).await.unwrap();
        let mut calls = tower.call(request());
        assert!((&mut calls).now_or_never().is_none());
        let kind = end(&running, abort);
        assert_eq!(asks.await.unwrap_err().kind(), kind);
        assert_eq!(calls.await.unwrap_err().kind(), kind);
        assert_eq!(service.ask(request()).await.unwrap_err().kind(), kind);
        assert_eq!(running.await.is_err(), abort);
        drop(held);
    }
});

struct Once;

impl Operator for Once {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        let envelope = ports.input.take()?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

// Between two runs of the flow a request with pending work waits for the next run. It fails if none can come.
on_both!(a_request_that_waits_for_its_work_fails_if_the_flow_is_dropped, async |device: Device| {
    let mut flow = Flow::new("once");
    let once = flow.add("once", Once);
    let service = flow.service_with("service", once.input, once.output, HubOptions::bounded(3).envelope_bytes(64));
    let first = async { service.ask(filled(&service, &[1; 4]).await).await.unwrap() };
    let (answer, report) = tokio::join!(first, flow.run());
    assert_eq!((values(&answer).await, report.unwrap().operator("once").unwrap().runs), (vec![1; 4], 1));
    let [stream] = streams(&device);
    let held = hold(&stream);
    let mut asks = Box::pin(service.ask(Envelope::from(Buffer::from_slice(&stream, &[5_u32; 4]).unwrap())));
    assert!(asks.as_mut().now_or_never().is_none());
    drop((flow, answer));
    assert_eq!(asks.await.unwrap_err().kind(), ErrorKind::Closed);
    drop(held);
});

#[derive(Message)]
struct Frame {
    number: u32,
    #[event]
    decoded: Event,
}

#[derive(Message)]
struct Shot {
    #[envelope]
    frame: Frame,
}

#[derive(Ports)]
struct DecodedPorts<M: Message> {
    #[input(event = "decoded")]
    input: Input<M>,
    #[output]
    output: Output<u32>,
}

struct Decoded<M>(fn(M) -> Frame);

impl<M: Message> Operator for Decoded<M> {
    type Ports = DecodedPorts<M>;

    async fn compute(&mut self, ports: &mut DecodedPorts<M>, _cx: &mut Cx) -> Result<()> {
        let frame = (self.0)(ports.input.take()?);
        ports.output.send(frame.number).await?;
        Ok(())
    }
}

/// `waits`: the operator's port waits for the event; otherwise the request itself does.
async fn pending_event<M: Message>(device: &Device, waits: bool, wrap: fn(Frame) -> M, unwrap: fn(M) -> Frame) {
    let mut flow = Flow::new("frames");
    let service = if waits {
        let decoded = flow.add("decoded", Decoded(unwrap));
        flow.service_with("service", decoded.input, decoded.output, HubOptions::bounded(3))
    } else {
        let number = flow.add("number", map(move |message: M| std::future::ready(Ok(unwrap(message).number))));
        flow.service_with("service", number.input, number.output, HubOptions::bounded(3))
    };
    let running = flow.spawn().unwrap();
    let [stream, other] = streams(device);
    let frame = |number, stream: &Stream| {
        let decoded = Event::new();
        decoded.record(stream).unwrap();
        wrap(Frame { number, decoded })
    };
    assert_eq!(service.ask(frame(0, &other)).await.unwrap(), 0);
    let held = hold(&stream);
    let mut odd = Box::pin(service.ask(frame(1, &stream)));
    for number in 2..6 {
        assert!(odd.as_mut().now_or_never().is_none(), "its event is pending");
        assert_eq!(service.ask(frame(number, &other)).await.unwrap(), number);
    }
    drop(held);
    assert_eq!(odd.await.unwrap(), 1);
    drop(service);
    running.await.unwrap();
}

on_both!(a_request_with_a_pending_event_delays_only_its_caller, async |device: Device| {
    for waits in [true, false] {
        pending_event(&device, waits, |frame| frame, |frame| frame).await;
        pending_event(&device, waits, |frame| (7, frame), |(_, frame): (u32, Frame)| frame).await;
        pending_event(&device, waits, |frame| Shot { frame }, |shot: Shot| shot.frame).await;
    }
});

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_whose_work_fails_is_its_callers_error() {
    // The operator is on the host or on a device. The caller's device is lost before the request or while it waits.
    for (on_device, before) in [(false, true), (false, false), (true, true), (true, false)] {
        let device = emulated();
        let (service, running, _) = adder(on_device.then_some(&device), 3);
        others_are_served(&service).await;
        let own = fragile();
        let [stream] = streams(&own);
        let mut on_own = stream.alloc::<u32>(4).unwrap();
        let mut pinned = Buffer::<u32>::pinned(&device, 4).unwrap();
        let held = hold(&stream);
        increment::launch(&stream, &mut on_own).unwrap();
        stream.copy(&on_own, &mut pinned).unwrap();
        let lost = async {
            drop(held);
            assert!(stream.completed().await.unwrap_err().is_device_lost());
        };
        let error = if before {
            lost.await;
            within(service.ask(pinned.into())).await.unwrap_err()
        } else {
            let mut odd = Box::pin(service.ask(pinned.into()));
            assert!(odd.as_mut().now_or_never().is_none());
            lost.await;
            within(odd).await.unwrap_err()
        };
        assert!(error.is_device_lost(), "{error}");
        assert!(error.to_string().contains("refused") && !error.to_string().contains("emulated"), "{error}");
        within(others_are_served(&service)).await;
        assert!(device.lost().is_none() && !service.is_closed());
        within(finish(service, running)).await;
    }
}

/// The caller's stream later waits for a device that is lost. This does not taint the stream's earlier work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_not_tainted_by_later_work_of_its_callers_stream() {
    for (on_device, wrapped) in [(false, false), (false, true), (true, false), (true, true)] {
        let (device, own, other) = (emulated(), emulated(), fragile());
        let (service, running, permits) = adder(on_device.then_some(&device), 1);
        others_are_served(&service).await;
        permits.forget_permits(usize::MAX);
        let ([stream], [later]) = (streams(&own), streams(&other));
        let from = Buffer::from_slice(&stream, &[5_u32; 4]).unwrap();
        let mut to = match wrapped {
            true => Buffer::wrap(vec![0; 4]).unwrap().0,
            false => Buffer::pinned(&own, 4).unwrap(),
        };
        stream.copy(&from, &mut to).unwrap();
        stream.completed().await.unwrap();
        let held = hold(&later);
        stream.wait_for(&later).unwrap();
        let mut asks = Box::pin(service.ask(to.into()));
        assert!(asks.as_mut().now_or_never().is_none());
        lose(&other).await;
        permits.add_permits(1000);
        let answer = within(asks).await.unwrap();
        assert_eq!(values(&answer).await, [6; 4]);
        within(others_are_served(&service)).await;
        drop((held, answer));
        within(finish(service, running)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_whose_device_is_lost_while_it_waits_is_its_callers_error() {
    let (device, own) = (emulated(), fragile());
    let (service, running, permits) = adder(Some(&device), 1);
    others_are_served(&service).await;
    permits.forget_permits(usize::MAX);
    let stream = Stream::new(&own).unwrap();
    let odd: Envelope<u32> = Buffer::from_slice(&stream, &[5; 4]).unwrap().into();
    stream.completed().await.unwrap();
    let good: Envelope<u32> = Buffer::wrap(vec![2_u32; 4]).unwrap().0.into();
    // The first request has the only envelope on the flow's device, so the others wait in the hub.
    let mut first = Box::pin(service.ask(filled(&service, &[1; 4]).await));
    let (mut odd, mut other) = (Box::pin(service.ask(odd)), Box::pin(service.ask(good)));
    assert!(first.as_mut().now_or_never().is_none());
    assert!(odd.as_mut().now_or_never().is_none());
    assert!(other.as_mut().now_or_never().is_none());
    lose(&own).await;
    permits.add_permits(1000);
    assert_eq!(values(&within(first).await.unwrap()).await, [2; 4]);
    let error = within(odd).await.unwrap_err();
    assert!(error.is_device_lost() && !error.to_string().contains("emulated"), "{error}");
    assert_eq!(values(&within(other).await.unwrap()).await, [3; 4]);
    within(others_are_served(&service)).await;
    within(finish(service, running)).await;
}

/// The same for a message of an ingress. It is the last one, and the flow ends without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whose_device_is_lost_while_it_waits_is_dropped_and_the_flow_continues() {
    let (device, own) = (emulated(), fragile());
    let permits = Arc::new(Semaphore::new(0));
    let mut flow = Flow::new("adds");
    let add = flow.add("add", Add(permits.clone())).on(&device);
    let ingress = flow.ingress_with("in", add.input, HubOptions::bounded(3).envelope_bytes(64).envelopes(1));
    let mut out = flow.egress("out", add.output);
    let running = flow.spawn().unwrap();
    let stream = Stream::new(&own).unwrap();
    let odd: Envelope<u32> = Buffer::from_slice(&stream, &[5; 4]).unwrap().into();
    stream.completed().await.unwrap();
    for message in [Buffer::wrap(vec![1_u32; 4]).unwrap().0.into(), odd] {
        ingress.send(message).await.unwrap();
    }
    lose(&own).await;
    drop(ingress);
    permits.add_permits(1000);
    assert_eq!(values(&within(out.recv()).await.unwrap()).await, [2; 4]);
    assert!(within(out.recv()).await.is_none());
    within(running).await.unwrap();
}

fn both(device: &Device) -> (Adder, Ingress<Envelope<u32>>, Running) {
    let mut flow = Flow::new("both");
    let add = flow.add("add", Increment).on(device);
    let other = flow.add("other", sink(|_: Envelope<u32>| ready(Ok(())))).on(device);
    let service = flow.service_with("service", add.input, add.output, HubOptions::bounded(3).envelope_bytes(64));
    let ingress = flow.ingress_with("ingress", other.input, HubOptions::bounded(3).envelope_bytes(64));
    (service, ingress, flow.spawn().unwrap())
}

fn assert_refused(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
}

// No copy path exists between a simulated device and an emulated or CUDA device.
on_both!(memory_that_the_flow_cannot_copy_from_is_refused, async |device: Device| {
    let (service, ingress, running) = both(&device);
    others_are_served(&service).await;
    let simulation = Simulation::new(7);
    let simulated = Device::simulated(&simulation, Emulated::new());
    let stream = Stream::new(&simulated).unwrap();
    let odd = || Envelope::from(Buffer::from_slice(&stream, &[5_u32; 4]).unwrap());
    assert_refused(&within(service.ask(odd())).await.unwrap_err());
    let unsent = within(ingress.send(odd())).await.unwrap_err();
    assert_refused(unsent.error());
    assert_eq!(unsent.into_message().unwrap().len(), 4, "the message is returned");
    others_are_served(&service).await;
    drop(ingress);
    finish(service, running).await;
});

on_both!(memory_of_a_capture_or_a_graph_is_refused, async |device: Device| {
    let (service, ingress, running) = both(&device);
    others_are_served(&service).await;
    let stream = Stream::new(&device).unwrap();
    let from = Buffer::from_slice(&stream, &[7_u32; 4]).unwrap();
    stream.completed().await.unwrap();
    let written = |capture: &Stream, mut to: Buffer<u32>| -> Result<Envelope<u32>> {
        capture.copy(&from, &mut to)?;
        Ok(to.into())
    };
    let mut kept = None;
    let graph = Graph::capture(&device, |capture| {
        let captured = || written(capture.stream(), stream.alloc(4)?);
        assert_refused(&service.ask(captured()?).now_or_never().unwrap().unwrap_err());
        assert_refused(&ingress.try_send(captured()?).unwrap_err().into());
        kept = Some(captured()?);
        Ok(())
    });
    let (graph, ()) = graph.unwrap();
    // Page-locked memory: such a graph is refused, but only at the end of the capture.
    let refused = Graph::capture(&device, |capture| {
        let captured = || written(capture.stream(), Buffer::pinned(&device, 4)?);
        assert_refused(&service.ask(captured()?).now_or_never().unwrap().unwrap_err());
        assert_refused(&ingress.try_send(captured()?).unwrap_err().into());
        Ok(())
    });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Usage);
    // Any later launch of the graph writes to it.
    assert_refused(&within(service.ask(kept.unwrap())).await.unwrap_err());
    others_are_served(&service).await;
    drop((graph, ingress, from));
    finish(service, running).await;
});

on_both!(read_only_memory_is_refused_where_it_would_be_written, async |device: Device| {
    let read_only = || Envelope::from(Buffer::<u32>::wrap_read_only(vec![1_u32; 4]).unwrap().0);
    let (service, running, _) = adder(None, 3);
    assert_refused(&within(service.ask(read_only())).await.unwrap_err());
    others_are_served(&service).await;
    finish(service, running).await;
    // An operator on a device modifies a copy.
    let (service, running, _) = adder(Some(&device), 3);
    let answer = service.ask(read_only()).await.unwrap();
    assert_eq!(values(&answer).await, [2; 4]);
    drop(answer);
    finish(service, running).await;
});

fn echo() -> (Service<u32, u32>, Running) {
    let mut flow = Flow::new("echo");
    let pass = flow.add("pass", pass_on::<u32>());
    let service = flow.service("service", pass.input, pass.output);
    (service, flow.spawn().unwrap())
}

/// A response can be polled in any task, whatever the request.
#[test]
fn a_response_is_send_and_sync() {
    fn check<T: Send + Sync + Unpin>() {}
    check::<wakeline::flow::ResponseFuture<u32>>();
}

#[tokio::test]
async fn an_answered_request_does_not_count_even_if_its_caller_does_not_poll() {
    let (service, running) = echo();
    let service = service.limit(1);
    let mut tower = service.clone();
    poll_fn(|cx| tower.poll_ready(cx)).await.unwrap();
    let unpolled = tower.call(1);
    assert_eq!(within(service.ask(2)).await.unwrap(), 2);
    assert_eq!(within(service.ask(3)).await.unwrap(), 3);
    assert_eq!(unpolled.await.unwrap(), 1);
    drop((service, tower));
    within(running).await.unwrap();
}

#[tokio::test]
async fn a_wait_for_the_limit_ends_with_the_flow() {
    for abort in [false, true] {
        let (service, running) = echo();
        let service = service.limit(1);
        assert_eq!(service.ask(1).await.unwrap(), 1);
        // It reserves the only place for ever.
        let mut reserving = service.clone();
        poll_fn(|cx| reserving.poll_ready(cx)).await.unwrap();
        let mut waits = Box::pin(service.ask(2));
        assert!(waits.as_mut().now_or_never().is_none());
        let kind = end(&running, abort);
        assert_eq!(within(waits).await.unwrap_err().kind(), kind);
        assert_eq!(within(running).await.is_err(), abort);
        drop(reserving);
    }
}

#[tokio::test]
async fn a_flow_that_runs_again_keeps_the_unread_output_of_earlier_runs() {
    let (mut number, mut flow) = (0, Flow::new("again"));
    let numbers = flow.add(
        "numbers",
        source(move || {
            number += 1;
            ready(Ok((number % 2 == 1).then_some(number)))
        }),
    );
    let mut out = flow.egress("out", numbers.output);
    for _ in 0..3 {
        assert_eq!(within(flow.run()).await.unwrap().untaken, 0);
    }
    assert_eq!(out.try_recv(), Some(1));
    within(flow.run()).await.unwrap();
    for expected in [Some(3), Some(5), Some(7), None] {
        assert_eq!(within(out.recv()).await, expected);
    }
    let next = tokio::join!(within(flow.run()), within(out.recv()));
    assert_eq!((next.0.is_ok(), next.1), (true, None), "no other run had begun at the call of `recv`");
    assert_eq!(out.try_recv(), Some(9));
}
