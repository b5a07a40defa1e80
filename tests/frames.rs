//! Messages that hold envelopes: their blank envelopes, and how many a hub has of them.

use common::*;
use futures::FutureExt;
use wakeline::{
    Message,
    operator::{concurrent, map, sink},
    prelude::*,
};

const LEN: usize = 64;
const BYTES: usize = LEN * size_of::<u32>();

/// Two envelopes of different element types.
#[derive(Message)]
struct Frame {
    number: u32,
    #[envelope]
    pixels: Envelope<u32>,
    #[envelope]
    mask: Envelope<u8>,
}

/// Makes frames, whose pixels and mask hold numbers derived from the frame's.
struct Camera {
    next: u32,
    frames: u32,
}

fn camera(frames: u32) -> Camera {
    Camera { next: 0, frames }
}

#[derive(Ports)]
struct CameraPorts {
    #[output(envelope_bytes = BYTES)]
    frames: Output<Frame>,
}

impl Operator for Camera {
    type Ports = CameraPorts;

    async fn compute(&mut self, ports: &mut CameraPorts, cx: &mut Cx) -> Result<()> {
        let number = self.next;
        self.next += 1;
        if self.next == self.frames {
            cx.finish();
        }
        // Both are there: the run began because they were.
        let now = "the envelopes of a message are free when a run begins";
        let mut pixels = ports.frames.blank::<u32>().now_or_never().expect(now)?;
        let mut mask = ports.frames.blank::<u8>().now_or_never().expect(now)?;
        assert_eq!((pixels.capacity(), mask.capacity()), (LEN, BYTES));
        pixels.set_len(LEN)?;
        pixels.write().await?.fill(number);
        mask.set_len(3)?;
        mask.write().await?.fill(number as u8);
        ports.frames.send(Frame { number, pixels, mask }).await?;
        Ok(())
    }
}

/// Increments the pixels on a device, and passes the frame on.
struct Brighten;

impl Operator for Brighten {
    type Ports = wakeline::operator::MapPorts<Frame, Frame>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut frame = ports.input.take()?;
        increment::launch(cx.stream()?, &mut frame.pixels)?;
        ports.output.send(frame).await?;
        Ok(())
    }
}

fn checks(seen: Shared<u32>) -> impl Operator<Ports = wakeline::operator::SinkPorts<Frame>> {
    sink(move |frame: Frame| {
        let seen = seen.clone();
        async move {
            assert_eq!(frame.pixels.read().await?, [frame.number + 1; LEN]);
            assert_eq!(frame.mask.read().await?, [frame.number as u8; 3]);
            lock(&seen).push(frame.number);
            Ok(())
        }
    })
}

on_both!(frames_of_two_envelopes_pass_a_device, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("frames");
    let camera = flow.add("camera", camera(100));
    let brighten = flow.add("brighten", Brighten).on(&device);
    let check = flow.add("check", checks(seen.clone()));
    flow.connect(camera.frames, brighten.input);
    flow.connect(brighten.output, check.input);
    let report = flow.run().await.unwrap();
    assert_eq!(*lock(&seen), (0..100).collect::<Vec<_>>());
    assert_eq!(report.untaken, 0);
    assert_eq!(device.memory_peak(), 4 * BYTES as u64, "those of two frames on the device, for any number of frames");
    freed(&device).await;
});

on_both!(two_envelopes_are_enough_for_one_frame_at_a_time, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("frames");
    let camera = flow.add("camera", camera(20));
    let brighten = flow.add("brighten", Brighten).on(&device);
    let check = flow.add("check", checks(seen.clone()));
    flow.connect_with(camera.frames, brighten.input, HubOptions::bounded(1).envelopes(2));
    flow.connect_with(brighten.output, check.input, HubOptions::bounded(1).envelopes(2));
    flow.run().await.unwrap();
    assert_eq!(lock(&seen).len(), 20);
    assert_eq!(device.memory_peak(), 2 * BYTES as u64);
    freed(&device).await;
});

/// The reader returns the envelopes of a frame one by one, after it has taken the next frame.
struct Slow(Option<Frame>);

impl Operator for Slow {
    type Ports = wakeline::operator::SinkPorts<Frame>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let Some(Frame { pixels, mask, .. }) = self.0.replace(ports.input.take()?) else { return Ok(()) };
        for one in [Box::new(pixels) as Box<dyn std::any::Any + Send>, Box::new(mask)] {
            drop(one);
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_run_begins_once_all_envelopes_of_a_message_are_free() {
    let mut flow = Flow::new("slow");
    let camera = flow.add("camera", camera(20));
    let slow = flow.add("slow", Slow(None));
    // `Camera` expects both.
    flow.connect(camera.frames, slow.input);
    within(flow.run()).await.unwrap();
}

#[tokio::test]
async fn fewer_envelopes_than_a_message_has_is_an_error_before_the_flow_runs() {
    let mut flow = Flow::new("few");
    let camera = flow.add("camera", camera(1));
    let slow = flow.add("slow", Slow(None));
    flow.connect_with(camera.frames, slow.input, HubOptions::bounded(1).envelopes(1));
    let error = flow.check().unwrap_err().to_string();
    let text = "hub `camera.frames -> slow.input`: each of its messages has 2 envelopes or more, but the hub has 1: \
                set 2 or more with `HubOptions::envelopes`";
    assert!(error.contains(text), "{error}");

    let mut flow = Flow::new("drops");
    let camera = flow.add("camera", self::camera(1));
    let slow = flow.add("slow", Slow(None));
    flow.connect_with(camera.frames, slow.input, HubOptions::drop_oldest(1).envelopes(4));
    let error = flow.check().unwrap_err().to_string();
    assert!(
        error.contains("it needs 6, 2 for each message that it queues, 2 for the writer and 2 for the reader"),
        "{error}"
    );
}

#[tokio::test]
async fn an_envelope_size_holds_an_element_of_each_type() {
    #[derive(Message)]
    struct Sizes(#[envelope] Vec<Envelope<u8>>, #[envelope] Option<(u8, Envelope<f64>)>);

    let mut flow = Flow::new("sizes");
    let send = flow.add("send", task(|_: &mut wakeline::operator::SourcePorts<Sizes>, _| async { Ok(()) }.boxed()));
    let read = flow.add("read", sink(async |_: Sizes| Ok(())));
    flow.connect_with(send.output, read.input, HubOptions::bounded(1).envelope_bytes(7));
    let error = flow.check().unwrap_err().to_string();
    assert!(error.contains("envelopes of 7 bytes are too small for one element of 8 bytes"), "{error}");
}

#[derive(Ports)]
struct ListPorts {
    #[output(envelope_bytes = 64)]
    lists: Output<Vec<Envelope<u32>>>,
}

/// Sends one list of this many envelopes.
struct ListOf(u32);

impl Operator for ListOf {
    type Ports = ListPorts;

    async fn compute(&mut self, ports: &mut ListPorts, cx: &mut Cx) -> Result<()> {
        let mut list = Vec::new();
        for number in 0..self.0 {
            let mut one = ports.lists.blank().await?;
            one.set_len(1)?;
            one.write().await?[0] = number;
            list.push(one);
        }
        cx.finish();
        ports.lists.send(list).await?;
        Ok(())
    }
}

/// Sends a list of this many envelopes to a device and back, through hubs of this kind.
async fn list_through(device: &Device, len: u32, hub: HubOptions) -> Result<Vec<u32>> {
    let seen = shared();
    let mut flow = Flow::new("lists");
    let make = flow.add("make", ListOf(len));
    let there = flow.add("there", map(async |list: Vec<Envelope<u32>>| Ok(list))).on(device);
    let lists = seen.clone();
    let read = flow.add(
        "read",
        sink(move |list: Vec<Envelope<u32>>| {
            let seen = lists.clone();
            async move {
                for one in &list {
                    let number = one.read().await?[0];
                    lock(&seen).push(number);
                }
                Ok(())
            }
        }),
    );
    flow.connect_with(make.lists, there.input, hub);
    flow.connect_with(there.output, read.input, hub);
    flow.run().await?;
    let seen = std::mem::take(&mut *lock(&seen));
    Ok(seen)
}

on_both!(lists_of_envelopes_need_their_number_to_be_set, async |device: Device| {
    assert_eq!(list_through(&device, 3, HubOptions::bounded(1).envelopes(3)).await.unwrap(), [0, 1, 2]);
    let error = list_through(&device, 3, HubOptions::bounded(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    let text = "a blank envelope: 2 of the 2 envelopes of hub `make.lists -> there.input` at this location are in use; \
                `make` keeps 2 of them: set `.envelopes(4)`";
    assert!(error.to_string().contains(text), "{error}");
    freed(&device).await;
});

#[derive(Clone)]
struct CloneCamera;

impl Operator for CloneCamera {
    type Ports = wakeline::operator::MapPorts<u32, Frame>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        let (mut pixels, mut mask) = (ports.output.blank::<u32>().await?, ports.output.blank::<u8>().await?);
        pixels.set_len(LEN)?;
        pixels.write().await?.fill(number + 1);
        mask.set_len(3)?;
        mask.write().await?.fill(number as u8);
        ports.output.send(Frame { number, pixels, mask }).await?;
        Ok(())
    }
}

#[tokio::test]
async fn concurrent_runs_each_have_the_envelopes_of_a_message() {
    let seen = shared();
    let mut flow = Flow::new("concurrent");
    let mut numbers = 0..50_u32;
    let source = flow.add("source", wakeline::operator::source(move || std::future::ready(Ok(numbers.next()))));
    let camera = flow.add("camera", concurrent(3, CloneCamera));
    let check = flow.add("check", checks(seen.clone()));
    flow.connect(source.output, camera.input);
    flow.connect_with(camera.output, check.input, HubOptions::default().envelope_bytes(BYTES));
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (0..50).collect::<Vec<_>>());

    let mut flow = Flow::new("too few");
    let source = flow.add("source", wakeline::operator::source(|| std::future::ready(Ok(None::<u32>))));
    let camera = flow.add("camera", concurrent(3, CloneCamera));
    let check = flow.add("check", checks(seen));
    flow.connect(source.output, camera.input);
    flow.connect_with(camera.output, check.input, HubOptions::default().envelope_bytes(BYTES).envelopes(5));
    let error = flow.check().unwrap_err().to_string();
    assert!(error.contains("which keep 6 envelopes until their turn to send, but the hub has 5"), "{error}");
}

on_both!(frames_enter_from_outside, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("outside");
    let brighten = flow.add("brighten", Brighten).on(&device);
    let check = flow.add("check", checks(seen.clone()));
    let frames = flow.ingress_with("frames", brighten.input, HubOptions::default().envelope_bytes(BYTES));
    flow.connect(brighten.output, check.input);
    let running = flow.spawn().unwrap();
    for number in 0..20 {
        // Their types are inferred from the message.
        let (mut pixels, mut mask) = frames.blanks().await.unwrap();
        pixels.set_len(LEN).unwrap();
        pixels.write().await.unwrap().fill(number);
        mask.set_len(3).unwrap();
        mask.write().await.unwrap().fill(number as u8);
        frames.send(Frame { number, pixels, mask }).await.unwrap();
    }
    drop(frames);
    running.await.unwrap();
    assert_eq!(*lock(&seen), (0..20).collect::<Vec<_>>());
    freed(&device).await;
});

on_both!(requests_hold_envelopes, async |device: Device| {
    #[derive(Message)]
    struct Request {
        add: u32,
        #[envelope]
        numbers: Envelope<u32>,
    }

    let mut flow = Flow::new("service");
    let brighten = flow.add("unpack", map(async |request: Request| Ok((request.add, request.numbers))));
    let add = flow.add("increment", Pairs).on(&device);
    let total = flow.add(
        "total",
        map(async |(add, numbers): (u32, Envelope<u32>)| {
            Ok(numbers.read().await?.iter().map(|number| number + add).sum::<u32>())
        }),
    );
    flow.connect(brighten.output, add.input);
    flow.connect(add.output, total.input);
    let service = flow.service_with("sum", brighten.input, total.output, HubOptions::default().envelope_bytes(BYTES));
    let running = flow.spawn().unwrap();
    for add in 0..5 {
        let mut numbers = service.blank().await.unwrap();
        numbers.set_len(3).unwrap();
        // The element type is known: a message with envelopes of one type determines it.
        numbers.write().await.unwrap().iter_mut().for_each(|number| *number = number.pow(0) * add);
        assert_eq!(service.ask(Request { add, numbers }).await.unwrap(), 3 * (2 * add + 1));
    }
    drop(service);
    running.await.unwrap();
    freed(&device).await;
});

struct Pairs;

impl Operator for Pairs {
    type Ports = wakeline::operator::MapPorts<(u32, Envelope<u32>), (u32, Envelope<u32>)>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let (add, mut numbers) = ports.input.take()?;
        increment::launch(cx.stream()?, &mut numbers)?;
        ports.output.send((add, numbers)).await?;
        Ok(())
    }
}

/// Reads a frame's number and the sums of its envelopes.
async fn sums(frame: Frame) -> Result<(u32, u32, u32)> {
    let (pixels, mask) = (frame.pixels.read().await?, frame.mask.read().await?);
    Ok((frame.number, pixels.iter().sum(), mask.iter().copied().map(u32::from).sum()))
}

on_both!(callers_with_several_envelopes_do_not_block_each_other, async |device: Device| {
    for callers in [2, 4, 8, 32] {
        let mut flow = Flow::new("callers");
        let brighten = flow.add("brighten", Brighten).on(&device);
        let read = flow.add("read", map(sums));
        flow.connect(brighten.output, read.input);
        // The hub has the envelopes of two requests.
        let hub = HubOptions::default().envelope_bytes(BYTES);
        let service = flow.service_with("service", brighten.input, read.output, hub);
        let running = flow.spawn().unwrap();
        let call = |number: u32| {
            let service = service.clone();
            async move {
                for _ in 0..5 {
                    let (mut pixels, mut mask) = service.blanks().await.unwrap();
                    tokio::task::yield_now().await;
                    pixels.fill_from(&[number; 4]).await.unwrap();
                    tokio::task::yield_now().await;
                    mask.fill_from(&[1; 3]).await.unwrap();
                    let (answered, _, _) = service.ask(Frame { number, pixels, mask }).await.unwrap();
                    assert_eq!(answered, number);
                }
            }
        };
        within(futures::future::join_all((0..callers).map(call))).await;
        drop(service);
        within(running).await.unwrap();
    }
    freed(&device).await;
});

/// Of a message with two envelopes, whose hub has four. Returns an ingress and the running flow.
fn enters() -> (wakeline::Ingress<Frame>, wakeline::Running) {
    let mut flow = Flow::new("enters");
    let sink = flow.add("sink", sink(async |frame: Frame| sums(frame).await.map(drop)));
    let frames = flow.ingress_with("frames", sink.input, HubOptions::bounded(1).envelope_bytes(BYTES));
    (frames, flow.spawn().unwrap())
}

#[tokio::test]
async fn all_envelopes_of_a_message_are_taken_or_none() {
    let (frames, running) = enters();
    let [one, other, third]: [Envelope<u32>; 3] = within(frames.blanks()).await.unwrap();
    // Waits, and takes none of what is free meanwhile.
    let mut waits = Box::pin(frames.blanks::<(Envelope<u32>, Envelope<u8>)>());
    assert!(futures::poll!(waits.as_mut()).is_pending());
    let mut given_up = Box::pin(frames.blanks::<(Envelope<u32>, Envelope<u8>)>());
    assert!(futures::poll!(given_up.as_mut()).is_pending());
    drop(given_up);
    drop(one);
    let (pixels, mask) = within(waits).await.unwrap();
    drop((other, third));
    // Behind one that needs all four, and does not get them.
    let mut all = Box::pin(frames.blanks::<[Envelope<u32>; 4]>());
    assert!(futures::poll!(all.as_mut()).is_pending());
    let two: (Envelope<u32>, Envelope<u8>) = within(frames.blanks()).await.unwrap();
    assert!(futures::poll!(all.as_mut()).is_pending());
    drop((two, pixels, mask));
    drop(within(all).await.unwrap());
    // A future that was dropped has taken none.
    drop(frames.blanks::<[Envelope<u32>; 4]>().now_or_never());
    within(frames.blanks::<[Envelope<u32>; 4]>()).await.unwrap();
    drop(frames);
    within(running).await.unwrap();
}

#[tokio::test]
async fn more_envelopes_than_there_are_is_an_error() {
    let (frames, running) = enters();
    let error = within(frames.blanks::<[Envelope<u8>; 5]>()).await.unwrap_err();
    assert_eq!(error.kind(), wakeline::ErrorKind::Usage, "{error}");
    let what = "5 blank envelopes at the same time are more than the 4 that the hub has: set 5 or more with \
                `HubOptions::envelopes`";
    assert!(error.to_string().contains(what), "{error}");
    let (pixels, mask) = within(frames.blanks()).await.unwrap();
    within(frames.send(Frame { number: 1, pixels, mask })).await.unwrap();
    running.stop();
    within(running).await.unwrap();
    let error = within(frames.blanks::<[Envelope<u8>; 2]>()).await.unwrap_err();
    assert!(error.is_closed(), "{error}");
}

/// A message with a list of envelopes: callers with lists of several lengths take theirs at the same time.
#[tokio::test]
async fn callers_with_lists_of_envelopes_do_not_block_each_other() {
    let mut flow = Flow::new("lists");
    let count = flow.add("count", map(async |list: Vec<Envelope<u32>>| Ok(list.len() as u32)));
    let hub = HubOptions::bounded(1).envelopes(4).envelope_bytes(BYTES);
    let service = flow.service_with("service", count.input, count.output, hub);
    let running = flow.spawn().unwrap();
    let call = |number: usize| {
        let service = service.clone();
        async move {
            for _ in 0..10 {
                let list: Vec<Envelope<u32>> = match number % 4 {
                    0 => service.blanks::<[_; 1]>().await.unwrap().into(),
                    1 => service.blanks::<[_; 2]>().await.unwrap().into(),
                    2 => service.blanks::<[_; 3]>().await.unwrap().into(),
                    _ => service.blanks::<[_; 4]>().await.unwrap().into(),
                };
                tokio::task::yield_now().await;
                assert_eq!(service.ask(list).await.unwrap(), (number % 4 + 1) as u32);
            }
        }
    };
    within(futures::future::join_all((0..16).map(call))).await;
    drop(service);
    within(running).await.unwrap();
}

#[tokio::test]
async fn a_tuple_without_envelopes_has_no_blanks() {
    let mut flow = Flow::new("none");
    let send = flow.add(
        "send",
        task(|ports: &mut wakeline::operator::SourcePorts<(u32, u32)>, _| {
            async { ports.output.blank::<u32>().await.map(drop) }.boxed()
        }),
    );
    let read = flow.add("read", sink(async |_: (u32, u32)| Ok(())));
    flow.connect(send.output, read.input);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.to_string().contains("has no blank envelopes: its messages hold none"), "{error}");
}
