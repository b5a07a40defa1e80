//! Small messages that are copied together: what a reader gets, and `Output::send_all`.

use std::{pin::pin, time::Duration};

use common::{alone::within_bound, *};
use futures::{FutureExt, poll};
use wakeline::{
    Message,
    device::{Emulated, Simulation},
    operator::{InputHandle, OutputHandle, SinkPorts, SourcePorts, sink},
    prelude::*,
};

const LEN: usize = 16;

/// Sends an envelope with each number, of a length that depends on it. With a period, one in each.
struct Numbers {
    next: u32,
    end: u32,
    period: Duration,
}

fn numbers(end: u32) -> Numbers {
    Numbers { next: 0, end, period: Duration::ZERO }
}

/// The contents for a number.
fn data(number: u32) -> Vec<u32> {
    vec![number; 1 + number as usize % LEN]
}

impl Operator for Numbers {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        if !self.period.is_zero() {
            tokio::time::sleep(self.period).await;
        }
        let mut envelope = ports.output.blank().await?;
        envelope.fill_from(&data(self.next)).await?;
        self.next += 1;
        if self.next == self.end {
            cx.finish();
        }
        ports.output.send(envelope).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct BatchPorts {
    #[input(batch = 8)]
    input: Input<Envelope<u32>>,
    #[output]
    output: Output<Envelope<u32>>,
}

/// Increments several in a run, each time after this wait.
struct Batch(Vec<Envelope<u32>>, Duration);

impl Operator for Batch {
    type Ports = BatchPorts;

    async fn compute(&mut self, ports: &mut BatchPorts, cx: &mut Cx) -> Result<()> {
        self.0.extend(ports.input.take_batch()?);
        if !self.1.is_zero() {
            tokio::time::sleep(self.1).await;
        }
        for envelope in &mut self.0 {
            increment::launch(cx.stream()?, envelope)?;
        }
        ports.output.send_all(&mut self.0).await
    }
}

/// Checks what arrives.
fn checks(seen: Shared<u32>) -> impl Operator<Ports = SinkPorts<Envelope<u32>>> {
    sink(move |envelope: Envelope<u32>| {
        let seen = seen.clone();
        async move {
            let number = lock(&seen).len() as u32;
            let expected: Vec<u32> = data(number).iter().map(|number| number + 1).collect();
            assert_eq!(envelope.read().await?, expected);
            lock(&seen).push(number);
            Ok(())
        }
    })
}

fn hub(envelopes: usize) -> HubOptions {
    HubOptions::bounded(envelopes).envelopes(envelopes)
}

on_both!(messages_that_are_copied_together_arrive_in_order_and_whole, async |device: Device| {
    for batches in [false, true] {
        let seen = shared();
        let mut flow = Flow::new("joined");
        let source = flow.add("source", numbers(1000));
        let sink = flow.add("sink", checks(seen.clone()));
        let hub = hub(32).envelope_bytes(LEN * 4);
        if batches {
            let batch = flow.add("batch", Batch(Vec::new(), Duration::ZERO)).on(&device);
            flow.connect_with(source.output, batch.input, hub);
            flow.connect_with(batch.output, sink.input, hub);
        } else {
            let each = flow.add("each", Increment).on(&device);
            flow.connect_with(source.output, each.input, hub);
            flow.connect_with(each.output, sink.input, hub);
        }
        flow.run().await.unwrap();
        assert_eq!(lock(&seen).len(), 1000);
        freed(&device).await;
    }
});

type Ends = (InputHandle<Envelope<u32>>, OutputHandle<Envelope<u32>>);

/// The numbers of copies to the device and back, of 200 messages.
async fn copies<P: Ports>(
    source: Numbers,
    work: impl Operator<Ports = P>,
    ports: fn(&P::Handles) -> Ends,
) -> [usize; 2] {
    let (simulation, seen) = (Simulation::new(7), shared());
    let simulated = simulation.run(async {
        let device = Device::simulated(&simulation, Emulated::new()).race_checked();
        let mut flow = Flow::new("joined");
        let source = flow.add("source", source);
        let sink = flow.add("sink", checks(seen.clone()));
        let work = flow.add("work", work).on(&device);
        let (input, output) = ports(&work);
        flow.connect_with(source.output, input, HubOptions::bounded(64).envelopes(16).envelope_bytes(LEN * 4));
        flow.connect_with(output, sink.input, hub(32));
        flow.run().await
    });
    simulated.await.unwrap();
    assert_eq!(lock(&seen).len(), 200);
    let log = simulation.log();
    ["copies of source", "copies of work"]
        .map(|stream| log.iter().filter(|step| step.contains(stream) && step.contains("copy")).count())
}

/// The source is faster than the batches, and waits for envelopes: those that return together are copied to together.
#[tokio::test(start_paused = true)]
async fn messages_that_are_sent_together_or_wait_are_copied_together() {
    let slow = Batch(Vec::new(), Duration::from_millis(1));
    let [there, back] = copies(numbers(200), slow, |work| (work.input, work.output)).await;
    assert!(there <= 100 && back <= 50, "{there} copies to the device and {back} copies back of 200 messages");
}

#[tokio::test(start_paused = true)]
async fn a_message_behind_which_none_waits_is_copied_at_once() {
    let paced = Numbers { period: Duration::from_millis(1), ..numbers(200) };
    assert_eq!(copies(paced, Increment, |work| (work.input, work.output)).await, [200, 200]);
}

/// Its size is that of no message.
struct Huge;

impl Message for Huge {
    fn size_in_bytes(&self) -> usize {
        usize::MAX
    }
}

#[tokio::test]
async fn messages_of_any_size_are_copied_together() {
    let taken = shared();
    let mut flow = Flow::new("joined");
    let source = task(|ports: &mut SourcePorts<(Envelope<u32>, Huge)>, cx: &mut Cx| {
        async move {
            for number in 0..100 {
                let mut envelope = ports.output.blank().await?;
                envelope.fill_from(&data(number)).await?;
                ports.output.send((envelope, Huge)).await?;
            }
            cx.finish();
            Ok(())
        }
        .boxed()
    });
    let source = flow.add("source", source);
    let seen = taken.clone();
    let count = sink(move |(envelope, Huge): (Envelope<u32>, Huge)| {
        lock(&seen).push(envelope.len());
        std::future::ready(Ok(()))
    });
    let count = flow.add("count", count).on(&emulated());
    flow.connect_with(source.output, count.input, hub(32).envelope_bytes(LEN * 4));
    within(flow.run()).await.unwrap();
    assert_eq!(lock(&taken).len(), 100);
}

/// A message with two envelopes, of which the second is not full.
#[derive(Message)]
struct Pair {
    number: u32,
    #[envelope]
    left: Envelope<u32>,
    #[envelope]
    right: Envelope<u8>,
}

on_both!(messages_with_several_envelopes_are_copied_together, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("joined");
    let pairs = task(|ports: &mut PairPorts, cx: &mut Cx| {
        async move {
            for number in 0..500 {
                let mut left = ports.pairs.blank::<u32>().await?;
                left.fill_from(&data(number)).await?;
                let mut right = ports.pairs.blank::<u8>().await?;
                right.fill_from(&[number as u8; 3][..number as usize % 4]).await?;
                ports.pairs.send(Pair { number, left, right }).await?;
            }
            cx.finish();
            Ok(())
        }
        .boxed()
    });
    let pairs = flow.add("pairs", pairs);
    let pass = flow.add("pass", pass_on::<Pair>()).on(&device);
    let read = seen.clone();
    let check = flow.add(
        "check",
        sink(move |pair: Pair| {
            let seen = read.clone();
            async move {
                assert_eq!(pair.left.read().await?, data(pair.number));
                assert_eq!(pair.right.read().await?, &[pair.number as u8; 3][..pair.number as usize % 4]);
                lock(&seen).push(pair.number);
                Ok(())
            }
        }),
    );
    flow.connect_with(pairs.pairs, pass.input, hub(24));
    flow.connect_with(pass.output, check.input, hub(24).envelope_bytes(LEN * 4));
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), (0..500).collect::<Vec<_>>());
    freed(&device).await;
});

/// The reader keeps all envelopes, and then returns them one by one: there is one for a message that needs two.
#[test]
fn a_message_that_needs_more_envelopes_than_are_free_waits_for_them() {
    within_bound(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut flow = Flow::new("joined");
            let pairs = task(|ports: &mut PairPorts, cx: &mut Cx| {
                async move {
                    for number in 0..60 {
                        let mut left = ports.pairs.blank::<u32>().await?;
                        left.fill_from(&data(number)).await?;
                        let right = ports.pairs.blank::<u8>().await?;
                        ports.pairs.send(Pair { number, left, right }).await?;
                    }
                    cx.finish();
                    Ok(())
                }
                .boxed()
            });
            let pairs = flow.add("pairs", pairs);
            let keeper = task(|ports: &mut SinkPorts<Pair>, _| {
                async move {
                    for _ in 0..5 {
                        let mut kept = Vec::new();
                        while kept.len() < 12 {
                            kept.extend(ports.input.recv().await?);
                        }
                        for Pair { left, right, .. } in kept {
                            tokio::task::yield_now().await;
                            drop(left);
                            tokio::task::yield_now().await;
                            drop(right);
                        }
                    }
                    Ok(())
                }
                .boxed()
            });
            let keeper = flow.add("keeper", keeper).on(&emulated());
            flow.connect_with(pairs.pairs, keeper.input, hub(24));
            flow.run().await.unwrap();
        });
    });
}

#[derive(Ports)]
struct PairPorts {
    #[output(envelope_bytes = LEN * 4)]
    pairs: Output<Pair>,
}

/// A sender of many numbers at once, into a queue of two.
#[tokio::test]
async fn send_all_waits_for_room_and_keeps_what_it_has_not_sent() {
    let (seen, left) = (shared(), shared());
    let mut flow = Flow::new("send_all");
    let kept = left.clone();
    let source = task(move |ports: &mut SourcePorts<u32>, cx: &mut Cx| {
        let left = kept.clone();
        async move {
            let mut numbers: Vec<_> = (0..10).collect();
            {
                // Nothing is read during the poll: two are sent, and the others stay.
                let mut sending = pin!(ports.output.send_all(&mut numbers));
                assert!(poll!(sending.as_mut()).is_pending());
            }
            assert_eq!(numbers, (2..10).collect::<Vec<_>>());
            ports.output.send_all(&mut numbers).await?;
            assert!(numbers.is_empty() && ports.output.send_all(&mut numbers).await.is_ok());
            numbers.extend(10..20);
            let error = ports.output.send_all(&mut numbers).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Closed);
            lock(&left).extend(numbers);
            cx.finish();
            Ok(())
        }
        .boxed()
    });
    let source = flow.add("source", source);
    let read = seen.clone();
    let first = task(move |ports: &mut SinkPorts<u32>, cx: &mut Cx| {
        let seen = read.clone();
        async move {
            while lock(&seen).len() < 13 {
                let number = ports.input.recv().await?;
                lock(&seen).extend(number);
            }
            cx.finish();
            Ok(())
        }
        .boxed()
    });
    let first = flow.add("first", first);
    flow.connect_with(source.output, first.input, HubOptions::bounded(2));
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (0..13).collect::<Vec<_>>());
    let left = lock(&left).clone();
    assert!(!left.is_empty() && left.len() <= 7 && left.is_sorted() && left.last() == Some(&19), "{left:?}");
}

/// Eight at a time, each larger than a part of a thread's stack should be.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn large_messages_are_copied_together() {
    let taken = shared();
    let mut flow = Flow::new("large");
    let source = task(|ports: &mut SourcePorts<(Envelope<u32>, [u8; 36 << 10])>, cx: &mut Cx| {
        async move {
            let mut messages = Vec::new();
            for number in 0..8 {
                let mut envelope = ports.output.blank().await?;
                envelope.fill_from(&data(number)).await?;
                messages.push((envelope, [0; 36 << 10]));
            }
            ports.output.send_all(&mut messages).await?;
            cx.finish();
            Ok(())
        }
        .boxed()
    });
    let source = flow.add("source", source);
    let count = flow.add("count", keep(&taken)).on(&emulated());
    flow.connect_with(source.output, count.input, hub(32).envelope_bytes(LEN * 4));
    within(tokio::spawn(flow.spawn().unwrap())).await.unwrap().unwrap();
    assert_eq!(lock(&taken).len(), 8);
}

/// The first envelope is too large for those of the hub.
#[tokio::test]
async fn send_all_reports_a_transfer_that_fails() {
    let errors = shared();
    let mut flow = Flow::new("fails");
    let seen = errors.clone();
    let source = task(move |ports: &mut SourcePorts<Envelope<u32>>, cx: &mut Cx| {
        let errors = seen.clone();
        async move {
            let large = Buffer::<u32>::pinned(&Device::host(), 1000)?;
            let mut messages = vec![Envelope::from(large), ports.output.blank().await?];
            let sent = ports.output.send_all(&mut messages).await;
            lock(&errors).extend(sent.err());
            cx.finish();
            Ok(())
        }
        .boxed()
    });
    let source = flow.add("source", source);
    let reader = flow.add("reader", keep(&shared())).on(&emulated());
    flow.connect_with(source.output, reader.input, hub(32).envelope_bytes(LEN * 4));
    assert!(within(flow.run()).await.is_err());
    let error = lock(&errors)[0].to_string();
    assert!(error.contains("increase `envelope_bytes`"), "{error}");
}
