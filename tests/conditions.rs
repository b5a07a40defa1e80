//! Scenarios C: when an operator may run.

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use common::*;
use futures::FutureExt;
use wakeline::{
    Message, Stream,
    device::{Emulated, Faults, Simulation},
    memory::BufferState,
    prelude::*,
    stream::{Event, Ticket},
};

/// The port of an operator that receives a message once the message's device work is done.
#[derive(Ports)]
struct DonePorts<M: Message> {
    #[input(done, capacity = 8)]
    input: Input<M>,
}

/// Records what each message holds, and checks that no work still writes it.
struct Note {
    seen: Shared<u32>,
    device: Device,
}

impl Operator for Note {
    type Ports = DonePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.input.take()?;
        let is = envelope.state()?;
        let number = first(&envelope, &self.device).await;
        lock(&self.seen).push(number);
        assert_eq!(is, BufferState::Idle, "the operator ran before its message was done");
        Ok(())
    }
}

/// Reads the first number of an envelope in device memory.
async fn first(envelope: &Envelope<u32>, device: &Device) -> u32 {
    let aside = Stream::named(device, "aside").unwrap();
    let mut here = Buffer::<u32>::pinned(device, 64).unwrap();
    aside.copy(envelope, &mut here).unwrap();
    here.read().await.unwrap()[0]
}

/// A buffer to which the stream writes `n`.
fn written(stream: &Stream, n: u32) -> Buffer<u32> {
    let mut buffer = Buffer::<u32>::new(stream.device(), 64).unwrap();
    stream.fill(&mut buffer, n).unwrap();
    buffer
}

fn sends<M: Message>(messages: impl IntoIterator<Item = M>) -> impl Operator<Ports = SourcePorts<M>> {
    let mut messages = messages.into_iter().collect::<Vec<_>>().into_iter();
    source(move || ready(Ok(messages.next())))
}

/// Yields often enough for an incorrect run to happen.
async fn a_while() {
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
}

// The only operator that is left waits at a port for the device. The flow is then neither idle nor stalled.
on_both!(c8_stream_an_operator_runs_when_the_work_is_done, async |device: Device| {
    let seen = shared();
    let stream = Stream::named(&device, "writer").unwrap();
    let mut buffer = written(&stream, 1);
    let held = hold(&stream);
    increment::launch(&stream, &mut buffer).unwrap();
    let mut flow = Flow::new("c8");
    let send = flow.add("send", sends([Envelope::from(buffer)])).on(&device);
    let note = flow.add("note", Note { seen: seen.clone(), device: device.clone() }).on(&device);
    flow.connect(send.output, note.input);
    let running = flow.spawn().unwrap();
    a_while().await;
    assert_eq!(*lock(&seen), [0; 0], "the operator must not run yet");
    drop(held);
    let report = running.await.unwrap();
    assert_eq!(*lock(&seen), [2]);
    assert_eq!(report.operator("note").unwrap().runs, 1);
    assert_eq!((report.operator("note").unwrap().messages_in, report.untaken), (1, 0));
});

// Each message has its own readiness: the second one waits for its stream, the first one does not, and the third one
// does not wait for work that its stream gets later.
on_both!(c8_stream_every_message_waits_for_its_own_work, async |device: Device| {
    let seen = shared();
    let streams: Vec<_> = (0..3).map(|n| Stream::named(&device, format!("writer {n}")).unwrap()).collect();
    let mut buffers: Vec<_> = streams.iter().zip(0..).map(|(stream, n)| written(stream, 10 * n)).collect();
    for (stream, buffer) in streams.iter().zip(&mut buffers) {
        increment::launch(stream, buffer).unwrap();
        stream.completed().await.unwrap();
    }
    let second = hold(&streams[1]);
    increment::launch(&streams[1], &mut buffers[1]).unwrap();
    // This is enqueued behind the message's work and blocks until the end of the test.
    let later = hold(&streams[2]);

    let mut flow = Flow::new("c8");
    let send = flow.add("send", sends(buffers.into_iter().map(Envelope::from))).on(&device);
    let note = flow.add("note", Note { seen: seen.clone(), device: device.clone() }).on(&device);
    flow.connect(send.output, note.input);
    let running = flow.spawn().unwrap();
    until("the first message has arrived", || *lock(&seen) == [1]).await;
    a_while().await;
    assert_eq!(*lock(&seen), [1], "the second message is blocked, and the order is kept");
    drop(second);
    running.await.unwrap();
    assert_eq!(*lock(&seen), [1, 12, 21]);
    drop(later);
});

/// A message with two envelopes from two streams.
#[derive(Message)]
struct Pair {
    #[envelope]
    left: Envelope<u32>,
    #[envelope]
    right: Vec<Envelope<u32>>,
}

on_both!(c8_stream_a_message_of_several_streams, async |device: Device| {
    for late in 0..3 {
        let streams: Vec<_> = (0..3).map(|n| Stream::named(&device, format!("writer {n}")).unwrap()).collect();
        let mut envelopes: Vec<_> = streams.iter().map(|stream| Envelope::from(written(stream, 1))).collect();
        let held = hold(&streams[late]);
        for (stream, envelope) in streams.iter().zip(&mut envelopes) {
            increment::launch(stream, envelope).unwrap();
        }
        let ran = Arc::new(AtomicUsize::new(0));
        let mut flow = Flow::new("c8");
        let left = envelopes.remove(0);
        let send = flow.add("send", sends([Pair { left, right: envelopes }])).on(&device);
        let look = counts(&ran, |ports: &mut DonePorts<Pair>| {
            let pair = ports.input.take()?;
            for envelope in pair.right.iter().chain([&pair.left]) {
                assert_eq!(envelope.state()?, BufferState::Idle);
            }
            Ok(())
        });
        let look = flow.add("look", look).on(&device);
        flow.connect(send.output, look.input);
        let running = flow.spawn().unwrap();
        a_while().await;
        assert_eq!(ran.load(Ordering::Relaxed), 0, "stream {late} is blocked");
        drop(held);
        running.await.unwrap();
        assert_eq!(ran.load(Ordering::Relaxed), 1);
    }
});

/// A message that no stream uses is done.
#[tokio::test]
async fn c8_stream_no_stream_is_ready() {
    let ran = Arc::new(AtomicUsize::new(0));
    let device = emulated();
    let never_written = Envelope::from(Buffer::<u32>::pinned(&device, 64).unwrap());
    let mut flow = Flow::new("c8");
    let number = flow.add("number", sends([7_u32]));
    let blank = flow.add("blank", sends([never_written]));
    let keep = flow.add("keep", counts(&ran, |ports: &mut DonePorts<u32>| ports.input.take().map(drop)));
    let look = flow.add("look", counts(&ran, |ports: &mut DonePorts<Envelope<u32>>| ports.input.take().map(drop)));
    flow.connect(number.output, keep.input);
    flow.connect(blank.output, look.input);
    within(flow.run()).await.unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 2);
}

/// Collects without an await, since the data of its messages have arrived.
struct CollectDone(Shared<Vec<u32>>);

impl Operator for CollectDone {
    type Ports = DonePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.input.take()?;
        lock(&self.0).push(envelope.as_slice()?.to_vec());
        Ok(())
    }
}

// The message waits for its copy to the reader's place. There are fewer envelopes than messages.
on_both!(c8_stream_a_message_that_is_copied_to_its_reader, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("c8");
    let produce = flow.add("produce", SendEach::new((0..50).map(|n| vec![n; 64])));
    let add = flow.add("add", Increment).on(&device);
    let collect = flow.add("collect", CollectDone(seen.clone()));
    flow.connect_with(produce.output, add.input, HubOptions::bounded(2).envelope_bytes(256));
    flow.connect_with(add.output, collect.input, HubOptions::bounded(4).envelopes(2));
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), (1..51).map(|n| vec![n; 64]).collect::<Vec<_>>());
    drop(flow);
    freed(&device).await;
});

// `try_take`, `len` and `recv` show only messages that are done.
on_both!(c8_stream_in_an_operators_own_loop, async |device: Device| {
    let stream = Stream::named(&device, "writer").unwrap();
    let mut buffers = [written(&stream, 1), written(&stream, 2)];
    stream.completed().await.unwrap();
    let held = hold(&stream);
    increment::launch(&stream, &mut buffers[1]).unwrap();
    let mut held = Some(held);
    let mut flow = Flow::new("c8");
    let send = flow.add("send", sends(buffers.map(Envelope::from))).on(&device);
    let take = flow.add(
        "take",
        task(move |ports: &mut DonePorts<Envelope<u32>>, cx: &mut Cx| {
            let held = held.take();
            let device = cx.device().clone();
            async move {
                let one = ports.input.recv().await?.expect("two messages were sent");
                assert_eq!(first(&one, &device).await, 1);
                assert!(ports.input.recv().now_or_never().is_none(), "the second message is blocked");
                assert!(ports.input.try_take()?.is_none(), "the second message is blocked");
                assert_eq!((ports.input.len(), ports.input.is_empty()), (0, true));
                let error = ports.input.take().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
                drop(held);
                let two = ports.input.recv().await?.expect("two messages were sent");
                assert_eq!(two.state()?, BufferState::Idle);
                assert_eq!(first(&two, &device).await, 3);
                assert!(ports.input.recv().await?.is_none(), "no message is left");
                Ok(())
            }
            .boxed()
        }),
    );
    let take = take.on(&device);
    flow.connect(send.output, take.input);
    flow.run().await.unwrap();
});

/// A device is lost while an operator on the host waits for it at a port. The operator gets the error from `take`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c8_stream_a_lost_device_is_an_error_of_take() {
    let device = emulated_with(Emulated::new().workers(2).faults(Faults::new().trap_kernel("increment", 2)));
    let stream = Stream::named(&device, "writer").unwrap();
    let mut buffers = [written(&stream, 1), written(&stream, 2)];
    increment::launch(&stream, &mut buffers[0]).unwrap();
    stream.completed().await.unwrap();
    let held = hold(&stream);
    increment::launch(&stream, &mut buffers[1]).unwrap();
    let (errors, ran) = (shared(), Arc::new(AtomicUsize::new(0)));
    let mut flow = Flow::new("c8");
    // The operator is on another device than its messages.
    let send = flow.add("send", sends(buffers.map(Envelope::from))).on(&emulated());
    let (noted, counted) = (errors.clone(), ran.clone());
    let take = task(move |ports: &mut DonePorts<Envelope<u32>>, cx: &mut Cx| {
        let (errors, ran) = (noted.clone(), counted.clone());
        async move {
            while cx.ready(ports).await {
                match ports.input.take() {
                    Ok(envelope) => {
                        assert_eq!(envelope.as_slice()?, [2; 64]);
                        ran.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(error) => lock(&errors).push(error.to_string()),
                }
            }
            Ok(())
        }
        .boxed()
    });
    let take = flow.add("take", take);
    flow.connect_with(send.output, take.input, HubOptions::default().envelope_bytes(256));
    let running = flow.spawn().unwrap();
    until("the first message was taken", || ran.load(Ordering::Relaxed) == 1).await;
    a_while().await;
    assert_eq!((ran.load(Ordering::Relaxed), lock(&errors).len()), (1, 0), "the second message is blocked");
    drop(held);
    // The last copy was ordered after the lost device's work, so the flow as a whole fails, too.
    let error = within(running).await.unwrap_err();
    assert!(error.is_device_lost(), "{error}");
    assert_eq!(ran.load(Ordering::Relaxed), 1);
    let errors = lock(&errors).clone();
    assert_eq!(errors.len(), 1, "one error, and then the loop continues: {errors:?}");
    assert!(errors[0].starts_with("a message of hub `send.output -> take.input`: device lost"), "{errors:?}");
    assert!(errors[0].contains("unfinished work on: `writer`"), "{errors:?}");
}

/// The order of events is random. See also `f4_abort_at_every_await_point`.
#[tokio::test(start_paused = true)]
async fn c8_stream_under_simulation() {
    for seed in 0..40 {
        let simulation = Simulation::new(seed);
        let seen = shared();
        let outcome = simulation
            .run(async {
                let device = Device::simulated(&simulation, Emulated::new()).race_checked();
                let mut flow = Flow::new("c8");
                let produce = flow.add("produce", SendEach::new((0..6).map(|n| vec![n; 8])));
                let add = flow.add("add", Increment).on(&device);
                let done = flow.add("done", IncrementDone).on(&device);
                let collect = flow.add("collect", CollectDone(seen.clone()));
                flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(32));
                flow.connect_with(add.output, done.input, HubOptions::bounded(2));
                flow.connect_with(done.output, collect.input, HubOptions::bounded(3));
                flow.run().await
            })
            .await;
        outcome.unwrap();
        assert_eq!(*lock(&seen), (2..8).map(|n| vec![n; 8]).collect::<Vec<_>>(), "seed {seed}");
    }
}

#[derive(Ports)]
struct MapDonePorts {
    #[input(done)]
    input: Input<Envelope<u32>>,
    #[output]
    output: Output<Envelope<u32>>,
}

struct IncrementDone;

impl Operator for IncrementDone {
    type Ports = MapDonePorts;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        assert_eq!(envelope.state()?, BufferState::Idle);
        increment::launch(cx.stream()?, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// Aborts at every await point of a flow whose operators wait for the device at their ports.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f4_abort_while_ports_wait_for_the_device() {
    let device = emulated();
    let mut aborted = 0;
    for steps in 0..300 {
        let mut flow = Flow::new("f4");
        let produce = flow.add("produce", SendEach::new((0..6).map(|n| vec![n; 64])));
        let done = flow.add("done", IncrementDone).on(&device);
        let collect = flow.add("collect", CollectDone(shared()));
        flow.connect_with(produce.output, done.input, HubOptions::bounded(2).envelope_bytes(256));
        flow.connect(done.output, collect.input);
        let running = flow.spawn().unwrap();
        for _ in 0..steps {
            tokio::task::yield_now().await;
        }
        running.abort();
        match within(running).await {
            Ok(_) => {}
            Err(error) => {
                assert!(error.is_cancelled(), "after {steps} steps: {error}");
                aborted += 1;
            }
        }
    }
    assert!(aborted > 0, "no flow was aborted in time");
    freed(&device).await;
}

/// The pixels are written at `decoded`; the device uses them further after that.
#[derive(Message)]
struct Frame {
    #[envelope]
    pixels: Envelope<u32>,
    #[event]
    decoded: Event,
    #[event("scaled")]
    small: Option<Ticket>,
}

#[derive(Ports)]
struct DecodedPorts<M: Message> {
    #[input(event = "decoded")]
    input: Input<M>,
}

#[derive(Ports)]
struct ScaledPorts<M: Message> {
    #[input(event = "scaled")]
    input: Input<M>,
}

/// Calls `take` in each run, and counts the runs.
fn counts<P: Ports>(ran: &Arc<AtomicUsize>, take: fn(&mut P) -> Result<()>) -> impl Operator<Ports = P> + use<P> {
    let ran = ran.clone();
    task(move |ports: &mut P, cx: &mut Cx| {
        let ran = ran.clone();
        async move {
            while cx.ready(ports).await {
                take(ports)?;
                ran.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }
        .boxed()
    })
}

/// A frame whose stream is blocked between `decoded` and `scaled`.
fn half_done(device: &Device) -> (Frame, Hold) {
    let stream = Stream::named(device, "writer").unwrap();
    let mut pixels = written(&stream, 1);
    let decoded = Event::new();
    decoded.record(&stream).unwrap();
    let held = hold(&stream);
    increment::launch(&stream, &mut pixels).unwrap();
    let small = Some(stream.ticket());
    (Frame { pixels: pixels.into(), decoded, small }, held)
}

// Each reader waits only for the event that it names, whatever other work the message's stream has.
on_both!(c8_event_only_the_named_one, async |device: Device| {
    let decoded = Arc::new(AtomicUsize::new(0));
    let scaled = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(AtomicUsize::new(0));
    let frames: Vec<_> = (0..3).map(|_| half_done(&device)).collect();
    let (mut frames, held): (Vec<_>, Vec<_>) = frames.into_iter().unzip();
    let mut flow = Flow::new("c8");
    let a = flow.add("a", sends(frames.pop())).on(&device);
    let b = flow.add("b", sends(frames.pop())).on(&device);
    let c = flow.add("c", sends(frames.pop())).on(&device);
    let by_decoded = counts(&decoded, |ports: &mut DecodedPorts<Frame>| ports.input.take().map(drop));
    let by_decoded = flow.add("decoded", by_decoded).on(&device);
    let by_scaled = counts(&scaled, |ports: &mut ScaledPorts<Frame>| ports.input.take().map(drop));
    let by_scaled = flow.add("scaled", by_scaled).on(&device);
    let when_done = counts(&done, |ports: &mut DonePorts<Frame>| ports.input.take().map(drop));
    let when_done = flow.add("done", when_done).on(&device);
    flow.connect(a.output, by_decoded.input);
    flow.connect(b.output, by_scaled.input);
    flow.connect(c.output, when_done.input);
    let counted = || [&decoded, &scaled, &done].map(|ran| ran.load(Ordering::Relaxed));
    let running = flow.spawn().unwrap();
    until("the first event has passed", || counted()[0] == 1).await;
    a_while().await;
    assert_eq!(counted(), [1, 0, 0]);
    drop(held);
    running.await.unwrap();
    assert_eq!(counted(), [1, 1, 1]);
});

// A message with several events of one name, and messages without an event.
on_both!(c8_event_all_of_a_list_and_none, async |device: Device| {
    let (list, none) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut later = Vec::new();
    let mut frames = Vec::new();
    for _ in 0..3 {
        let (frame, held) = half_done(&device);
        frames.push(frame);
        later.push(held);
    }
    let (mut without, held) = half_done(&device);
    (without.decoded, without.small) = (Event::new(), None);
    later.push(held);
    let last = later.remove(2);
    drop(later.drain(..2));
    let mut flow = Flow::new("c8");
    let a = flow.add("a", sends([frames])).on(&device);
    let b = flow.add("b", sends([Some(without), None])).on(&device);
    let by_all = counts(&list, |ports: &mut ScaledPorts<Vec<Frame>>| {
        assert!(ports.input.take()?.iter().all(|frame| frame.pixels.state().is_ok_and(BufferState::is_available)));
        Ok(())
    });
    let by_all = flow.add("all", by_all).on(&device);
    let by_none = counts(&none, |ports: &mut ScaledPorts<Option<Frame>>| ports.input.take().map(drop));
    let by_none = flow.add("none", by_none).on(&device);
    flow.connect(a.output, by_all.input);
    flow.connect(b.output, by_none.input);
    let running = flow.spawn().unwrap();
    until("the messages without an event are ready", || none.load(Ordering::Relaxed) == 2).await;
    a_while().await;
    assert_eq!(list.load(Ordering::Relaxed), 0, "one of three events is blocked");
    drop(last);
    running.await.unwrap();
    assert_eq!(list.load(Ordering::Relaxed), 1);
    drop(later);
});

// A buffer's state follows the work that uses it.
on_both!(c8_buffer_shows_its_state, async |device: Device| {
    let (writer, reader) = (Stream::named(&device, "writer").unwrap(), Stream::named(&device, "reader").unwrap());
    let mut buffer = Buffer::<u32>::new(&device, 64).unwrap();
    let mut here = Buffer::<u32>::pinned(&device, 64).unwrap();
    assert_eq!(buffer.state().unwrap(), BufferState::Idle);

    let held = hold(&writer);
    writer.fill(&mut buffer, 3).unwrap();
    assert_eq!(buffer.state().unwrap(), BufferState::Writing);
    assert!(!buffer.state().unwrap().is_available());
    let available = buffer.available();
    drop(held);
    available.await.unwrap();
    assert_eq!(buffer.state().unwrap(), BufferState::Idle);

    let held = hold(&reader);
    reader.copy(&buffer, &mut here).unwrap();
    assert_eq!((buffer.state().unwrap(), here.state().unwrap()), (BufferState::Reading, BufferState::Writing));
    assert!(buffer.state().unwrap().is_available());
    buffer.available().await.unwrap();
    let envelope = Envelope::from(buffer);
    assert_eq!(envelope.state().unwrap(), BufferState::Reading);
    envelope.available().await.unwrap();
    drop(held);
    here.available().await.unwrap();
    assert_eq!((envelope.state().unwrap(), here.state().unwrap()), (BufferState::Idle, BufferState::Idle));
    assert_eq!(here.as_slice().unwrap(), [3; 64]);
});

/// Works on its own buffer, and runs again only when the buffer is available.
struct OwnBuffer {
    buffer: Buffer<u32>,
    held: Shared<Hold>,
    states: Shared<BufferState>,
}

#[derive(Ports)]
struct TickPorts {
    #[input]
    input: Input<u32>,
}

impl Operator for OwnBuffer {
    type Ports = TickPorts;

    async fn compute(&mut self, ports: &mut TickPorts, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        lock(&self.states).push(self.buffer.state()?);
        let stream = cx.stream()?;
        lock(&self.held).push(hold(stream));
        increment::launch(stream, &mut self.buffer)?;
        cx.run_after(self.buffer.available());
        Ok(())
    }
}

// A message is queued, and the operator waits only for the device.
on_both!(c8_buffer_of_an_operator, async |device: Device| {
    let stream = Stream::named(&device, "first").unwrap();
    let buffer = written(&stream, 0);
    stream.completed().await.unwrap();
    let (held, states) = (shared(), shared());
    let mut flow = Flow::new("c8");
    let send = flow.add("send", sends([1_u32, 2, 3]));
    let own = OwnBuffer { buffer, held: held.clone(), states: states.clone() };
    let own = flow.add("own", own).on(&device);
    flow.connect_with(send.output, own.input, HubOptions::bounded(3));
    let running = flow.spawn().unwrap();
    for run in 1..=3 {
        until("the operator has run again", || lock(&states).len() == run && !lock(&held).is_empty()).await;
        a_while().await;
        assert_eq!(lock(&states).len(), run, "the run's device work is blocked");
        let held = lock(&held).pop();
        drop(held);
    }
    running.await.unwrap();
    assert_eq!(*lock(&states), [BufferState::Idle; 3]);
});

// All conditions must hold: a message that is done, another message, and room.
on_both!(c8_with_the_other_conditions, async |device: Device| {
    #[derive(Ports)]
    struct BothPorts {
        #[input(done)]
        done: Input<Envelope<u32>>,
        #[input]
        number: Input<u32>,
        #[output]
        output: Output<u32>,
    }
    let stream = Stream::named(&device, "writer").unwrap();
    let buffers: Vec<_> = (0..20).map(|n| written(&stream, n)).collect();
    let mut numbers = 0..10_u32;
    let seen = shared();
    let mut flow = Flow::new("c8");
    let send = flow.add("send", sends(buffers.into_iter().map(Envelope::from))).on(&device);
    let count = flow.add("count", source(move || ready(Ok(numbers.next()))));
    let both = task(move |ports: &mut BothPorts, cx: &mut Cx| {
        async move {
            while cx.ready(ports).await {
                let envelope = ports.done.take()?;
                assert_eq!(envelope.state()?, BufferState::Idle);
                ports.output.try_send(ports.number.take()?)?;
            }
            Ok(())
        }
        .boxed()
    });
    let both = flow.add("both", both).on(&device);
    let noted = seen.clone();
    let keep = sink(move |n: u32| {
        lock(&noted).push(n);
        ready(Ok(()))
    });
    let keep = flow.add("keep", keep);
    flow.connect(send.output, both.done);
    flow.connect(count.output, both.number);
    flow.connect(both.output, keep.input);
    let report = flow.run().await.unwrap();
    assert_eq!(*lock(&seen), (0..10).collect::<Vec<_>>());
    assert_eq!(report.operator("both").unwrap().runs, 10);
});

#[derive(Ports)]
struct ManyDonePorts {
    #[input(done)]
    input: Inputs<Envelope<u32>>,
}

// A port with several connections: for a run, the first message of every connection must be done; in an operator's own
// loop, `recv_any` returns any that is done.
on_both!(c8_stream_at_a_port_for_any_number, async |device: Device| {
    for in_a_loop in [false, true] {
        let streams: Vec<_> = (0..3).map(|n| Stream::named(&device, format!("writer {n}")).unwrap()).collect();
        let mut buffers: Vec<_> = streams.iter().zip(0..).map(|(stream, n)| written(stream, 10 * n)).collect();
        let held = hold(&streams[1]);
        for (stream, buffer) in streams.iter().zip(&mut buffers) {
            increment::launch(stream, buffer).unwrap();
        }
        let seen = shared();
        let noted = seen.clone();
        let mut flow = Flow::new("c8");
        let many = task(move |ports: &mut ManyDonePorts, cx: &mut Cx| {
            let noted = noted.clone();
            let device = cx.device().clone();
            async move {
                if in_a_loop {
                    while let Some((connection, envelope)) = ports.input.recv_any().await? {
                        assert_eq!(envelope.state()?, BufferState::Idle);
                        assert_eq!(first(&envelope, &device).await as usize, 10 * connection + 1);
                        lock(&noted).push(connection);
                    }
                }
                while cx.ready(ports).await {
                    for (connection, envelope) in ports.input.take()?.enumerate() {
                        assert_eq!(envelope.state()?, BufferState::Idle);
                        lock(&noted).push(connection);
                    }
                }
                Ok(())
            }
            .boxed()
        });
        let many = flow.add("many", many).on(&device);
        for (n, buffer) in buffers.into_iter().enumerate() {
            let send = flow.add(format!("send {n}"), sends([Envelope::from(buffer)])).on(&device);
            flow.connect(send.output, many.input);
        }
        let running = flow.spawn().unwrap();
        if in_a_loop {
            until("the messages that are done have arrived", || lock(&seen).len() == 2).await;
        }
        a_while().await;
        let before = lock(&seen).clone();
        assert!(!before.contains(&1) && before.len() == if in_a_loop { 2 } else { 0 }, "{before:?}");
        drop(held);
        running.await.unwrap();
        let mut seen = lock(&seen).clone();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2]);
    }
});

// A number that an operator on a device sends carries the operator's stream, and is done once the stream's earlier work
// is.
on_both!(c8_stream_of_a_number_from_a_device, async |device: Device| {
    let (held, is_held) = tokio::sync::oneshot::channel();
    let (mut held, ran) = (Some(held), Arc::new(AtomicUsize::new(0)));
    let mut flow = Flow::new("c8");
    let send = flow.add(
        "send",
        task(move |ports: &mut SourcePorts<u32>, cx: &mut Cx| {
            let held = held.take().unwrap();
            async move {
                let _ = held.send(hold(cx.stream()?));
                ports.output.send(7).await?;
                Ok(())
            }
            .boxed()
        }),
    );
    let send = send.on(&device);
    let take = flow.add("take", counts(&ran, |ports: &mut DonePorts<u32>| ports.input.take().map(drop)));
    flow.connect(send.output, take.input);
    let running = flow.spawn().unwrap();
    let held = is_held.await.unwrap();
    a_while().await;
    assert_eq!(ran.load(Ordering::Relaxed), 0, "the stream is blocked");
    drop(held);
    running.await.unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 1);
});

/// Refuses its second claim, and resets the count to `to` at that moment, as any thread could.
struct Loses {
    count: wakeline::condition::Count,
    to: i64,
    claims: u32,
}

impl wakeline::condition::Condition for Loses {
    fn poll_status(&mut self, _cx: &mut std::task::Context<'_>) -> wakeline::condition::Status {
        wakeline::condition::Status::Ready
    }

    fn claim(&mut self) -> bool {
        self.claims += 1;
        if self.claims == 2 {
            self.count.reset(self.to);
        }
        self.claims != 2
    }
}

#[tokio::test]
async fn a_count_that_is_reset_while_a_claim_fails_allows_the_runs_of_the_reset() {
    for (whole, to, expected) in [(10, 0, 1), (-1, 0, 1), (10, 3, 4), (-1, 3, 4), (1, 2, 1)] {
        let count = wakeline::condition::count(whole);
        let mut flow = Flow::new("count");
        let source = flow
            .add("source", wakeline::operator::source(async || Ok(Some(1_u32))))
            .when(count.clone())
            .when(Loses { count, to, claims: 0 });
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(source.output, end.input);
        let report = within(flow.run()).await.unwrap();
        assert_eq!(report.operator("source").unwrap().runs, expected, "count({whole}), then reset({to})");
    }
}

/// B4-10: a condition that is added while the flow is checked is checked, too.
#[tokio::test]
async fn a_condition_that_another_one_adds_is_checked_before_the_run() {
    use std::{
        sync::{Mutex, Weak},
        task::Context,
    };

    use wakeline::{
        condition::{Condition, PortId, Status, at_least},
        flow::Added,
        operator::SinkHandles,
    };

    type Adds = fn(Added<SinkHandles<u32>>);
    struct AddsAnother {
        /// The test owns the target, because the operator owns this condition.
        to: Weak<Mutex<Added<SinkHandles<u32>>>>,
        left: AtomicUsize,
        adds: Adds,
    }
    impl Condition for AddsAnother {
        fn poll_status(&mut self, _: &mut Context<'_>) -> Status {
            Status::Ready
        }

        fn problem(&self) -> Option<String> {
            let is_left =
                self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
            if let Some(to) = self.to.upgrade().filter(|_| is_left) {
                (self.adds)(lock(&to).clone());
            }
            None
        }
    }

    fn add(to: Added<SinkHandles<u32>>, least: usize) {
        let port: PortId = to.input.into();
        let _ = to.when(at_least(port, least));
    }
    let cases: [(Adds, usize, Option<&str>); 4] = [
        (|to| add(to, 0), 1, Some("waits for 0 messages")),
        (|to| add(to, 1000), 1, Some("1000")),
        (|to| add(to, 1), 1, None),
        (|to| add(to, 1), usize::MAX, Some("during every check")),
    ];
    for (adds, times, problem) in cases {
        let mut flow = Flow::new("unchecked");
        let mut numbers = 0..3;
        let from = flow.add("source", source(move || ready(Ok(numbers.next()))));
        let to = flow.add("sink", sink(async |_: u32| Ok(())));
        flow.connect_with(from.output, to.input, HubOptions::bounded(2));
        let kept = Arc::new(Mutex::new(to.clone()));
        let _ = to.when(AddsAnother { to: Arc::downgrade(&kept), left: times.into(), adds });
        match (within(flow.run()).await, problem) {
            (Ok(_), None) => {}
            (Err(error), Some(problem)) => {
                assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
                assert!(error.to_string().contains(problem), "{error}");
            }
            (outcome, _) => panic!("{problem:?}: {outcome:?}"),
        }
    }
}
