//! Scenario E2: ingress and egress handles of a flow, used from any task or thread.

use std::{
    cell::RefCell,
    future::ready,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use common::*;
use futures::{FutureExt, SinkExt, StreamExt, future::join_all, poll, stream};
use tokio::sync::{Notify, oneshot};
use wakeline::{
    Egress, Ingress, Running,
    condition::Status,
    device::{Emulated, Faults},
    hub::{RawEnvelope, TrySendError},
    prelude::*,
    stream::Ticket,
};

/// An operator that doubles each number, and holds each message until `gate` is notified.
fn gated(gate: &Arc<Notify>) -> impl Operator<Ports = MapPorts<u32, u32>> + use<> {
    let gate = gate.clone();
    map(move |n: u32| {
        let gate = gate.clone();
        async move {
            gate.notified().await;
            Ok(2 * n)
        }
    })
}

fn double() -> impl Operator<Ports = MapPorts<u32, u32>> {
    map(|n: u32| ready(Ok(2 * n)))
}

/// `numbers -> double -> doubled`; the first hub has the given capacity.
fn doubling(places: usize) -> (Flow, Ingress<u32>, Egress<u32>) {
    let mut flow = Flow::new("doubling");
    let double = flow.add("double", double());
    let numbers = flow.ingress_with("numbers", double.input, HubOptions::bounded(places));
    let doubled = flow.egress("doubled", double.output);
    (flow, numbers, doubled)
}

fn is_sync<T: Send + Sync + Unpin>(_: &T) {}

#[tokio::test]
async fn e2_ingress_is_a_sink_and_egress_a_stream() {
    let (flow, numbers, doubled) = doubling(1);
    is_sync(&numbers);
    is_sync(&doubled);
    let running = flow.spawn().unwrap();
    let other = numbers.clone();
    // `forward` drops the handle when it ends.
    let sent = stream::iter(0..100).map(Ok).forward(numbers);
    let (sent, also, seen) =
        within(futures::future::join3(sent, async move { other.send(1000).await }, doubled.collect::<Vec<_>>())).await;
    sent.unwrap();
    also.unwrap();
    let wanted: Vec<_> = (0..100).map(|n| 2 * n).collect();
    assert_eq!(
        seen.iter().copied().filter(|n| *n != 2000).collect::<Vec<_>>(),
        wanted,
        "each handle's messages in order"
    );
    assert_eq!(seen.len(), 101);
    let report = within(running).await.unwrap();
    assert_eq!(report.operator("numbers").unwrap().messages_out, 101);
    assert_eq!(report.operator("doubled").unwrap().messages_in, 101);
    assert_eq!(report.untaken, 0);
}

#[tokio::test]
async fn e2_what_is_sent_before_the_flow_runs_waits() {
    let (flow, numbers, mut doubled) = doubling(2);
    assert_eq!(numbers.try_send(1).map_err(full), Err(1), "no room yet");
    let mut early = Box::pin(numbers.send(7));
    assert!(poll!(early.as_mut()).is_pending());
    assert!(doubled.recv().now_or_never().is_none());
    let running = flow.spawn().unwrap();
    within(early).await.unwrap();
    assert_eq!(within(doubled.recv()).await, Some(14));
    assert!(!numbers.is_closed());
    drop(numbers);
    assert_eq!(within(doubled.recv()).await, None);
    within(running).await.unwrap();

    let (flow, numbers, mut doubled) = doubling(1);
    let mut early = pin!(numbers.send(7));
    assert!(poll!(early.as_mut()).is_pending());
    drop(flow);
    let unsent = within(early).await.unwrap_err();
    assert!(unsent.error().is_closed() && unsent.error().to_string().contains("before it ran"), "{unsent}");
    assert_eq!(unsent.into_message(), Some(7));
    assert!(numbers.is_closed());
    assert_eq!(within(doubled.recv()).await, None);
}

/// Capacity is the hub's; waiting senders are served first come, first served.
#[tokio::test]
async fn e2_back_pressure_reaches_the_senders() {
    let gate = Arc::new(Notify::new());
    let mut flow = Flow::new("e2");
    let slow = flow.add("slow", gated(&gate));
    let numbers = flow.ingress_with("numbers", slow.input, HubOptions::bounded(2));
    let mut out = flow.egress("out", slow.output);
    let running = flow.spawn().unwrap();
    for n in 0..3 {
        within(numbers.send(n)).await.unwrap();
        if n == 0 {
            // The operator holds one message, two are in the hub.
            until("one message is taken", || running.status().iter().any(|status| status.running)).await;
        }
    }
    assert_eq!(numbers.try_send(9).map_err(full), Err(9), "a full hub returns the message");
    let mut waiting: Vec<_> = (3..8).map(|n| Box::pin(numbers.send(n))).collect();
    for send in &mut waiting {
        assert!(poll!(send.as_mut()).is_pending());
    }
    // A cancelled send does not block the others.
    drop(waiting.remove(1));
    let sending = async { join_all(waiting).await.into_iter().collect::<Result<Vec<_>, _>>().map(drop) };
    let taking = async {
        let mut seen = Vec::new();
        for _ in 0..7 {
            gate.notify_one();
            seen.extend(out.recv().await);
        }
        seen
    };
    let (sent, seen) = within(futures::future::join(sending, taking)).await;
    sent.unwrap();
    assert_eq!(seen, [0, 2, 4, 6, 10, 12, 14]);
    drop(numbers);
    within(running).await.unwrap();
}

/// A handle that is ready owns a slot; when it is dropped, the next sender gets the slot.
#[tokio::test]
async fn e2_an_unused_slot_is_released() {
    let gate = Arc::new(Notify::new());
    let mut flow = Flow::new("e2");
    let slow = flow.add("slow", gated(&gate));
    let mut numbers = flow.ingress_with("numbers", slow.input, HubOptions::bounded(1));
    let mut out = flow.egress("out", slow.output);
    let running = flow.spawn().unwrap();
    within(numbers.send(1)).await.unwrap();
    until("the message is taken", || running.status().iter().any(|status| status.running)).await;

    within(futures::future::poll_fn(|cx| numbers.poll_ready_unpin(cx))).await.unwrap();
    let other = numbers.clone();
    assert_eq!(other.try_send(2).map_err(full), Err(2), "the only slot is reserved");
    let mut waiting = Box::pin(other.send(2));
    assert!(poll!(waiting.as_mut()).is_pending());
    numbers.start_send_unpin(3).unwrap();
    assert!(poll!(waiting.as_mut()).is_pending());
    gate.notify_one();
    assert_eq!(within(out.recv()).await, Some(2));
    within(waiting).await.unwrap();

    gate.notify_one();
    assert_eq!(within(out.recv()).await, Some(6));
    within(futures::future::poll_fn(|cx| numbers.poll_ready_unpin(cx))).await.unwrap();
    let mut waiting = Box::pin(other.send(4));
    assert!(poll!(waiting.as_mut()).is_pending());
    drop(numbers);
    within(waiting).await.unwrap();
    gate.notify_one();
    assert_eq!(within(out.recv()).await, Some(4));
    gate.notify_one();
    assert_eq!(within(out.recv()).await, Some(8));

    // Closing a sink releases its slot as dropping the handle does.
    let mut last = other.clone();
    drop(other);
    assert!(last.start_send_unpin(1).is_err(), "`start_send` without `poll_ready`");
    last.close().await.unwrap();
    assert!(last.is_closed());
    assert_eq!(last.send(1).await.unwrap_err().into_message(), Some(1));
    within(running).await.unwrap();
}

/// Many senders, some on their own threads, over a small hub: each message arrives once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e2_many_senders_on_any_thread() {
    const EACH: u32 = quick_or_long(500, 20_000);
    for places in [1, 3] {
        let (flow, numbers, doubled) = doubling(places);
        let running = flow.spawn().unwrap();
        let mut tasks = Vec::new();
        for sender in 0..4 {
            let numbers = numbers.clone();
            tasks.push(tokio::spawn(async move {
                for n in 0..EACH {
                    let mut n = sender * EACH + n;
                    // Every way to send.
                    match n % 3 {
                        0 => numbers.send(n).await.unwrap(),
                        1 => numbers.clone().feed(n).await.unwrap(),
                        _ => {
                            while let Err(back) = numbers.try_send(n).map_err(full) {
                                n = back;
                                // Polled once and dropped.
                                let _ = numbers.send(1_000_000_000).now_or_never().map(|sent| sent.unwrap());
                                tokio::task::yield_now().await;
                            }
                        }
                    }
                }
            }));
        }
        let thread = numbers.clone();
        let thread = std::thread::spawn(move || {
            for n in 4 * EACH..5 * EACH {
                futures::executor::block_on(thread.send(n)).unwrap();
            }
        });
        drop(numbers);
        let mut seen: Vec<u32> = within(doubled.filter(|n| ready(*n != 2_000_000_000)).collect()).await;
        join_all(tasks).await.into_iter().for_each(|task| task.unwrap());
        thread.join().unwrap();
        seen.sort_unstable();
        assert!(seen == (0..5 * EACH).map(|n| 2 * n).collect::<Vec<_>>(), "places: {places}");
        within(running).await.unwrap();
    }
}

#[tokio::test]
async fn e2_a_dropped_egress_ends_the_flow_upwards() {
    for flowing in [false, true] {
        let (flow, numbers, mut doubled) = doubling(1);
        let running = flow.spawn().unwrap();
        if flowing {
            within(numbers.send(1)).await.unwrap();
            assert_eq!(within(doubled.recv()).await, Some(2));
            within(numbers.send(1)).await.unwrap();
        } else {
            let idle = || running.status().iter().all(|status| status.status != Status::Ready);
            until("all operators wait", idle).await;
        }
        drop(doubled);
        until("the egress has ended", || running.status().iter().any(|status| status.status == Status::Never)).await;
        let _ = numbers.try_send(3);
        within(running).await.unwrap();
        let unsent = within(numbers.send(5)).await.unwrap_err();
        assert!(unsent.error().is_closed(), "{unsent}");
        assert_eq!(unsent.into_message(), Some(5));
        assert!(numbers.is_closed());
        assert_eq!(numbers.try_send(6).unwrap_err().into_message(), Some(6));
    }
}

/// Accepted messages drain, and senders that still wait for room get their messages back.
#[tokio::test]
async fn e2_stop_closes_the_ingress_and_drains() {
    let gate = Arc::new(Notify::new());
    let mut flow = Flow::new("e2");
    let slow = flow.add("slow", gated(&gate));
    let numbers = flow.ingress_with("numbers", slow.input, HubOptions::bounded(2));
    let mut out = flow.egress("out", slow.output);
    let running = flow.spawn().unwrap();
    for n in 0..3 {
        within(numbers.send(n)).await.unwrap();
    }
    let mut late = pin!(numbers.send(3));
    assert!(poll!(late.as_mut()).is_pending());
    running.stop();
    let unsent = within(late).await.unwrap_err();
    assert!(unsent.error().is_closed() && unsent.error().to_string().contains("was stopped"), "{unsent}");
    assert_eq!(unsent.into_message(), Some(3));
    for n in 0..3 {
        gate.notify_one();
        assert_eq!(within(out.recv()).await, Some(2 * n));
    }
    assert_eq!(within(out.recv()).await, None);
    let report = within(running).await.unwrap();
    assert_eq!(report.untaken, 0);
}

/// Senders that wait for room get their messages back after an abort.
#[tokio::test]
async fn e2_an_abort_returns_unsent_messages() {
    for dropped in [false, true] {
        let gate = Arc::new(Notify::new());
        let mut flow = Flow::new("e2");
        let slow = flow.add("slow", gated(&gate));
        let numbers = flow.ingress("numbers", slow.input);
        let mut out = flow.egress("out", slow.output);
        let running = flow.spawn().unwrap();
        within(numbers.send(0)).await.unwrap();
        within(numbers.send(1)).await.unwrap();
        let mut waiting = pin!(numbers.send(2));
        assert!(poll!(waiting.as_mut()).is_pending());
        if dropped {
            drop(running);
        } else {
            running.abort();
            assert!(within(running).await.unwrap_err().is_cancelled());
        }
        let unsent = within(waiting).await.unwrap_err();
        assert!(unsent.error().is_cancelled(), "{unsent}");
        assert_eq!(unsent.into_message(), Some(2));
        assert_eq!(within(out.recv()).await, None);
        assert!(Error::from(within(numbers.send(3)).await.unwrap_err()).is_cancelled());
    }
}

// More callers than envelopes fill the hub's envelopes outside the flow; the only copies are to the device and back.
on_both!(e2_blank_envelopes, async |device: Device| {
    let mut flow = Flow::new("e2");
    let first = flow.add("first", Increment).on(&device);
    let second = flow.add("second", Increment).on(&device);
    let chunks = flow.ingress_with("chunks", first.input, HubOptions::bounded(2).envelopes(2).envelope_bytes(256));
    flow.connect(first.output, second.input);
    let mut out = flow.egress("out", second.output);
    let running = flow.spawn().unwrap();
    let fill = |n: u32| {
        let chunks = chunks.clone();
        tokio::spawn(async move {
            let mut blank = chunks.blank().await.unwrap();
            assert!(blank.is_empty() && blank.capacity() == 64 && blank.is_host());
            // Dropped while it has an envelope: the envelope returns to the pool, and other callers continue.
            drop(chunks.blank().now_or_never());
            blank.space().await.unwrap()[..8].fill(n);
            blank.set_len(8).unwrap();
            chunks.send(blank).await.unwrap();
        })
    };
    let tasks: Vec<_> = (0..50).map(fill).collect();
    let mut seen = Vec::new();
    while seen.len() < 50 {
        let envelope = out.recv().await.unwrap();
        let data = envelope.read().await.unwrap();
        assert_eq!(data, [data[0]; 8]);
        seen.push(data[0] - 2);
    }
    join_all(tasks).await.into_iter().for_each(|task| task.unwrap());
    seen.sort_unstable();
    assert_eq!(seen, (0..50).collect::<Vec<_>>());
    let kept = chunks.blank().await.unwrap();
    running.stop();
    running.await.unwrap();
    assert!(chunks.blank().await.unwrap_err().is_closed());
    assert!(chunks.send(kept).await.unwrap_err().into_message().is_some());
    drop(out);
    freed(&device).await;
});

/// Two envelopes that return at once go to two waiting callers, even if the first one does not poll.
#[tokio::test]
async fn e2_blank_envelopes_go_to_all_waiting_callers() {
    let mut flow = Flow::new("e2");
    let sink = flow.add("sink", sink(|_: Envelope<u32>| ready(Ok(()))));
    let chunks = flow.ingress_with("chunks", sink.input, HubOptions::bounded(4).envelopes(2).envelope_bytes(64));
    let running = flow.spawn().unwrap();
    for _ in 0..10 {
        let both = (within(chunks.blank()).await.unwrap(), within(chunks.blank()).await.unwrap());
        let (mut first, mut second) = (Box::pin(chunks.blank()), Box::pin(chunks.blank()));
        assert!(poll!(first.as_mut()).is_pending() && poll!(second.as_mut()).is_pending());
        drop(both);
        let _kept = within(first).await.unwrap();
        within(second).await.unwrap();
    }
    drop(chunks);
    within(running).await.unwrap();
}

/// A caller is polled when there is an envelope for it, and rarely otherwise.
#[tokio::test]
async fn e2_a_returned_envelope_wakes_one_waiting_caller() {
    const CALLERS: usize = 300;
    let mut flow = Flow::new("e2");
    let sink = flow.add("sink", sink(|_: Envelope<u32>| ready(Ok(()))));
    let chunks = flow.ingress_with("chunks", sink.input, HubOptions::bounded(4).envelopes(2).envelope_bytes(64));
    let running = flow.spawn().unwrap();
    let polls = Arc::new(AtomicUsize::new(0));
    let call = |chunks: Ingress<Envelope<u32>>, polls: Arc<AtomicUsize>| async move {
        let mut blank = Box::pin(chunks.blank());
        let counted = std::future::poll_fn(|task| {
            polls.fetch_add(1, Ordering::Relaxed);
            blank.as_mut().poll(task)
        });
        let envelope = counted.await.unwrap();
        chunks.send(envelope).await.unwrap();
    };
    let both = (within(chunks.blank()).await.unwrap(), within(chunks.blank()).await.unwrap());
    let callers: Vec<_> = (0..CALLERS).map(|_| tokio::spawn(call(chunks.clone(), polls.clone()))).collect();
    until("all callers wait", || polls.load(Ordering::Relaxed) >= CALLERS).await;
    drop(both);
    within(join_all(callers)).await.into_iter().for_each(|caller| caller.unwrap());
    let polls = polls.load(Ordering::Relaxed);
    assert!(polls <= 8 * CALLERS, "{polls} polls of {CALLERS} callers");
    drop(chunks);
    within(running).await.unwrap();
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The caller that was woken is dropped or never polled again: the next one gets the envelope, although nothing else
/// happens in the flow.
#[tokio::test]
async fn e2_a_blank_envelope_skips_callers_that_do_not_take_it() {
    let mut flow = Flow::new("e2");
    let sink = flow.add("sink", sink(|_: Envelope<u32>| ready(Ok(()))));
    let chunks = flow.ingress_with("chunks", sink.input, HubOptions::bounded(4).envelopes(1).envelope_bytes(64));
    let running = flow.spawn().unwrap();
    for drops in [true, false] {
        let held = within(chunks.blank()).await.unwrap();
        let (mut first, mut second) = (Box::pin(chunks.blank()), Box::pin(chunks.blank()));
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        assert!(first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert!(poll!(second.as_mut()).is_pending());
        drop(held);
        until("the first caller is woken", || woken.0.load(Ordering::Relaxed)).await;
        if drops {
            drop(first);
            within(second).await.unwrap();
        } else {
            within(second).await.unwrap();
            drop(first);
        }
    }
    drop(chunks);
    within(running).await.unwrap();
}

#[tokio::test]
async fn e2_a_hub_without_blank_envelopes_is_an_error() {
    let mut flow = Flow::new("e2");
    let sink = flow.add("sink", sink(|_: Envelope<u32>| ready(Ok(()))));
    let chunks = flow.ingress("chunks", sink.input);
    let running = flow.spawn().unwrap();
    let error = within(chunks.blank()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("envelope_bytes"), "{error}");
    drop(chunks);
    within(running).await.unwrap();
}

/// A message with a point in the work of a stream that its reader might wait for.
struct Pending(Ticket);

impl wakeline::Message for Pending {
    const EVENTS: &'static [&'static str] = &["done"];

    fn events(&mut self, _name: &str, visit: &mut dyn FnMut(&mut Ticket)) {
        visit(&mut self.0);
    }
}

#[tokio::test]
async fn e2_a_message_that_cannot_be_sent_is_returned_and_not_called_lost() {
    let device = emulated_with(Emulated::new().workers(2).faults(Faults::new().trap_kernel("increment", 1)));
    let [stream, other] = streams(&device);
    let held = hold(&other);
    // Not done when the device is lost.
    let done = other.ticket();
    increment::launch(&stream, &mut Buffer::<u32>::new(&device, 4).unwrap()).unwrap();
    assert!(within(stream.completed()).await.unwrap_err().is_device_lost());
    let mut flow = Flow::new("e2");
    let sink = flow.add("sink", sink(|_: Pending| ready(Ok(()))));
    let jobs = flow.ingress("jobs", sink.input);
    let running = flow.spawn().unwrap();
    let unsent = within(jobs.send(Pending(done))).await.unwrap_err();
    assert!(unsent.error().is_device_lost(), "{unsent}");
    assert_eq!(unsent.error().to_string(), "device lost: the message could not be sent into the flow");
    assert!(unsent.into_message().is_some());
    drop((jobs, held));
    within(running).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e2_a_cancelled_recv_loses_nothing() {
    let (flow, numbers, mut doubled) = doubling(2);
    let running = flow.spawn().unwrap();
    tokio::spawn(async move {
        for n in 0..1000 {
            numbers.send(n).await.unwrap();
        }
    });
    let mut seen = Vec::new();
    let all = async {
        loop {
            // Polled once and dropped.
            match doubled.recv().now_or_never() {
                Some(Some(n)) => seen.push(n),
                Some(None) => break,
                None => tokio::task::yield_now().await,
            }
        }
    };
    within(all).await;
    assert_eq!(seen, (0..1000).map(|n| 2 * n).collect::<Vec<_>>());
    within(running).await.unwrap();
}

/// An idle cycle whose only caller outside receives: the egress handle does not keep the flow from ending.
#[tokio::test]
async fn e2_an_egress_does_not_keep_an_idle_flow_running() {
    #[derive(Ports)]
    struct LoopPorts {
        #[input]
        input: Input<u32>,
        #[output]
        again: Output<u32>,
        #[output]
        out: Output<u32>,
    }

    /// Counts down.
    struct Loop;

    impl Operator for Loop {
        type Ports = LoopPorts;

        async fn run(&mut self, ports: &mut LoopPorts, cx: &mut Cx) -> Result<()> {
            ports.again.send(3).await?;
            while cx.ready(ports).await {
                let n = ports.input.take()?;
                ports.out.send(n).await?;
                if n > 0 {
                    ports.again.send(n - 1).await?;
                }
            }
            Ok(())
        }

        async fn compute(&mut self, _ports: &mut LoopPorts, _cx: &mut Cx) -> Result<()> {
            unreachable!()
        }
    }

    let mut flow = Flow::new("e2");
    let count = flow.add("count", Loop);
    flow.connect_with(count.again, count.input, HubOptions::bounded(2));
    let mut out = flow.egress("out", count.out);
    let running = flow.spawn().unwrap();
    let mut seen = Vec::new();
    while let Some(n) = within(out.recv()).await {
        seen.push(n);
    }
    assert_eq!(seen, [3, 2, 1, 0]);
    within(running).await.unwrap();
}

/// Messages that wait in an egress are not a stall, and the status names what the flow waits for.
#[tokio::test]
async fn e2_a_flow_waits_for_callers_outside() {
    let (flow, numbers, mut doubled) = doubling(1);
    let running = flow.spawn().unwrap();
    let status = |name: &str| running.status().into_iter().find(|status| &*status.name == name).unwrap();
    until("it waits for a caller", || status("numbers").status == Status::WaitEvent).await;
    assert_eq!(status("numbers").waits_for, ["a caller outside of the flow"]);
    // One in each of the two hubs, one in the egress.
    for n in 0..3 {
        within(numbers.send(n)).await.unwrap();
    }
    drop(numbers);
    until("every hub is full", || status("doubled").status == Status::WaitEvent).await;
    assert_eq!(status("doubled").waits_for, ["the egress handle to take a message"]);
    let mut seen = Vec::new();
    while let Some(n) = within(doubled.recv()).await {
        seen.push(n);
        tokio::task::yield_now().await;
    }
    assert_eq!(seen, [0, 2, 4]);
    within(running).await.unwrap();
}

/// A receiver outside that holds an envelope is like a slow operator: the envelope returns later, and the flow
/// continues.
#[tokio::test(start_paused = true)]
async fn e2_a_flow_waits_for_envelopes_that_are_outside() {
    let mut flow = Flow::new("e2");
    let make = flow.add("make", SendEach::new((0..10).map(|n| vec![n; 4])));
    let mut out = flow.egress_with("out", make.output, HubOptions::bounded(1).envelopes(2).envelope_bytes(16));
    let running = flow.spawn().unwrap();
    let mut seen = Vec::new();
    while let Some(envelope) = within(out.recv()).await {
        // The next envelope is queued, its writer has none left, and no operator of the flow can run.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(running.handle().failure().is_none(), "{}", running.handle().failure().unwrap());
        seen.push(envelope.as_slice().unwrap()[0]);
    }
    assert_eq!(seen, (0..10).collect::<Vec<u32>>());
    within(running).await.unwrap();
}

/// An envelope that is sent back into its flow no longer counts as outside: an operator that keeps it stalls the flow.
#[tokio::test]
async fn e2_an_envelope_that_is_sent_back_is_not_outside() {
    struct KeepAll(Vec<Envelope<u32>>);

    impl Operator for KeepAll {
        type Ports = SinkPorts<Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
            self.0.push(ports.input.take()?);
            Ok(())
        }
    }

    let mut flow = Flow::new("e2");
    let make = flow.add("make", SendEach::new((0..10).map(|n| vec![n; 4])));
    let mut out = flow.egress_with("out", make.output, HubOptions::bounded(1).envelopes(2).envelope_bytes(16));
    let keep = flow.add("keep", KeepAll(Vec::new()));
    let back = flow.ingress("back", keep.input);
    let running = flow.spawn().unwrap();
    for _ in 0..2 {
        let envelope = within(out.recv()).await.unwrap();
        within(back.send(envelope)).await.unwrap();
    }
    drop(back);
    let error = within(running).await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
}

/// Senders that wait for a flow to run fail when it never will.
#[tokio::test]
async fn e2_a_flow_that_never_runs() {
    struct NotToday;

    impl Operator for NotToday {
        type Ports = MapPorts<u32, u32>;

        async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
            Err(Error::other("not today"))
        }

        async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
            unreachable!()
        }
    }

    let mut flow = Flow::new("e2");
    let not = flow.add("not", NotToday);
    let numbers = flow.ingress("numbers", not.input);
    let mut out = flow.egress("out", not.output);
    let mut early = pin!(numbers.send(1));
    assert!(poll!(early.as_mut()).is_pending());
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.to_string().contains("not today"), "{error}");
    // The flow still exists.
    let unsent = within(early).await.unwrap_err();
    assert_eq!(unsent.error().kind(), ErrorKind::Operator, "{unsent}");
    assert_eq!(unsent.into_message(), Some(1));
    assert_eq!(within(out.recv()).await, None);
}

/// Ends after one message, and with it the flow, which can be run again.
struct OneARun;

impl Operator for OneARun {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        let n = ports.input.take()?;
        ports.output.send(2 * n).await?;
        Ok(())
    }
}

#[tokio::test]
async fn e2_a_flow_that_runs_again_is_open_again() {
    let (mut flow, numbers, mut out) = one_a_run();
    for n in 0..3 {
        let outside = async {
            numbers.send(n).await.unwrap();
            assert_eq!(out.recv().await, Some(2 * n));
        };
        let (ran, ()) = within(futures::future::join(flow.run(), outside)).await;
        ran.unwrap();
        assert_eq!(within(out.recv()).await, None);
    }
    // Dropped in the middle of a run: the operators are dropped, and all handles are closed.
    assert!(flow.run().now_or_never().is_none());
    until("the handle is closed", || numbers.is_closed()).await;
    assert!(within(numbers.send(1)).await.is_err());
    assert_eq!(within(out.recv()).await, None);
}

/// `numbers -> once -> out`, with one message per run.
fn one_a_run() -> (Flow, Ingress<u32>, Egress<u32>) {
    let mut flow = Flow::new("e2");
    let once = flow.add("once", OneARun);
    let numbers = flow.ingress("numbers", once.input);
    let out = flow.egress("out", once.output);
    (flow, numbers, out)
}

/// Between two runs, as before the first, every way to send waits for the next run.
#[tokio::test]
async fn e2_what_is_sent_between_two_runs_waits_for_the_next() {
    let (mut flow, mut numbers, mut out) = one_a_run();
    let (ran, sent) = within(futures::future::join(flow.run(), numbers.send(1))).await;
    ran.unwrap();
    sent.unwrap();
    assert_eq!(within(out.recv()).await, Some(2));

    assert!(!numbers.is_closed(), "a further run may come");
    assert_eq!(numbers.try_send(7).map_err(full), Err(7), "no room yet");
    let mut between = Box::pin(numbers.send(2));
    assert!(poll!(between.as_mut()).is_pending());
    let (ran, sent) = within(futures::future::join(flow.run(), between)).await;
    ran.unwrap();
    sent.unwrap();
    assert_eq!(within(out.recv()).await, Some(4));

    let mut ready = Box::pin(futures::future::poll_fn(|cx| numbers.poll_ready_unpin(cx)));
    assert!(poll!(ready.as_mut()).is_pending());
    drop(ready);
    let feeding = async { numbers.feed(3).await };
    let (ran, fed) = within(futures::future::join(flow.run(), feeding)).await;
    ran.unwrap();
    fed.unwrap();
    assert_eq!(within(out.recv()).await, Some(6));

    // There is no further run.
    let mut between = Box::pin(numbers.send(4));
    assert!(poll!(between.as_mut()).is_pending());
    drop(flow);
    let unsent = within(between).await.unwrap_err();
    assert!(unsent.error().is_closed(), "{unsent}");
    assert_eq!(unsent.into_message(), Some(4));
    assert!(numbers.is_closed());
    assert!(within(numbers.send(5)).await.unwrap_err().error().is_closed());
}

/// A run that was stopped or has failed refuses waiting sends; a later send is for the next run.
#[tokio::test]
async fn e2_what_is_sent_after_a_stop_or_a_failure_waits_for_the_next_run() {
    let mut flow = Flow::new("e2");
    let numbers_of = |n: u32| async move { if n == 0 { Err("meant to fail".into()) } else { Ok(()) } };
    let keep = flow.add("keep", sink(numbers_of));
    let numbers = flow.ingress("numbers", keep.input);
    let failing = async {
        numbers.send(0).await.unwrap();
        // Until this run ends.
        while numbers.send(1).await.is_ok() {}
    };
    let (ran, ()) = within(futures::future::join(flow.run(), failing)).await;
    assert!(ran.unwrap_err().to_string().contains("meant to fail"));
    // The future owns the last handle.
    let mut between = Box::pin(async move { numbers.send(2).await });
    assert!(poll!(between.as_mut()).is_pending());
    let (ran, sent) = within(futures::future::join(flow.run(), between)).await;
    sent.unwrap();
    assert_eq!(ran.unwrap().operator("keep").unwrap().runs, 1);
}

/// A send that races with the start of a run belongs to that run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e2_a_send_that_races_with_the_next_run_is_not_lost() {
    let (mut flow, numbers, mut out) = one_a_run();
    for n in 0..200 {
        let (numbers, begin) = (numbers.clone(), Arc::new(std::sync::Barrier::new(2)));
        let begun = begin.clone();
        let thread = std::thread::spawn(move || {
            begun.wait();
            futures::executor::block_on(numbers.send(n))
        });
        begin.wait();
        within(flow.run()).await.unwrap();
        thread.join().unwrap().unwrap();
        assert_eq!(within(out.recv()).await, Some(2 * n));
    }
}

/// A service behaves like an ingress between runs.
#[tokio::test]
async fn e2_a_request_between_two_runs_waits_for_the_next() {
    let mut flow = Flow::new("e2");
    let once = flow.add("once", OneARun);
    let double = flow.service("double", once.input, once.output);
    for n in 0..3 {
        let mut asked = Box::pin(double.ask(n));
        assert!(poll!(asked.as_mut()).is_pending());
        let (ran, doubled) = within(futures::future::join(flow.run(), asked)).await;
        ran.unwrap();
        assert_eq!(doubled.unwrap(), 2 * n);
        assert!(!double.is_closed());
    }
    let mut asked = Box::pin(double.ask(3));
    assert!(poll!(asked.as_mut()).is_pending());
    drop(flow);
    assert!(within(asked).await.unwrap_err().is_closed());
}

#[tokio::test]
async fn e2_the_output_of_the_second_run_is_received_too() {
    let mut flow = Flow::new("e2");
    let mut next = 0;
    let from = flow.add(
        "from",
        source(move || {
            next += 1;
            ready(Ok((next % 2 == 1).then_some(next)))
        }),
    );
    let mut out = flow.egress("out", from.output);
    for n in [1, 3] {
        within(flow.run()).await.unwrap();
        assert_eq!((out.try_recv(), out.try_recv()), (Some(n), None));
    }
}

/// Sends another message when it is dropped.
struct SendsAnother(Option<Ingress<SendsAnother>>);

impl Message for SendsAnother {}

impl Drop for SendsAnother {
    fn drop(&mut self) {
        if let Some(ingress) = self.0.take() {
            let _ = ingress.try_send(SendsAnother(None));
        }
    }
}

/// A hub that drops a message to make room holds no lock meanwhile. Runs on its own thread, so that a deadlock is
/// noticed.
#[test]
fn e2_a_message_that_is_dropped_may_use_its_ingress() {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for hub in [HubOptions::drop_oldest(1), HubOptions::drop_newest(1)] {
            runtime.block_on(async {
                let mut flow = Flow::new("e2");
                let end = flow.add("end", sink(async |_: SendsAnother| Ok(())));
                let ingress = flow.ingress_with("in", end.input, hub);
                let running = flow.spawn().unwrap();
                running.pause();
                for _ in 0..3 {
                    within(ingress.send(SendsAnother(Some(ingress.clone())))).await.unwrap();
                }
                drop(running);
            });
        }
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(Duration::from_secs(60)).expect("the send deadlocked");
}

/// Sends are refused from the call of `stop` on, not only once the operators have noticed it.
#[tokio::test]
async fn e2_nothing_is_accepted_once_the_flow_was_stopped() {
    let (flow, numbers, doubled) = doubling(8);
    let mut sink = numbers.clone();
    let running = flow.spawn().unwrap();
    within(numbers.send(1)).await.unwrap();
    within(sink.feed(2)).await.unwrap();
    within(std::future::poll_fn(|task| sink.poll_ready_unpin(task))).await.unwrap();
    running.stop();
    assert!(numbers.is_closed());
    let TrySendError::Failed(unsent) = numbers.try_send(3).unwrap_err() else { panic!("stopped, not full") };
    assert!(unsent.error().is_closed() && unsent.error().to_string().contains("was stopped"), "{unsent}");
    assert_eq!(unsent.into_message(), Some(3));
    assert_eq!(
        numbers.send(4).now_or_never().expect("a stopped flow refuses at once").unwrap_err().into_message(),
        Some(4)
    );
    assert_eq!(sink.start_send_unpin(5).unwrap_err().into_message(), Some(5));
    assert_eq!(within(doubled.collect::<Vec<_>>()).await, [2, 4]);
    within(running).await.unwrap();
}

/// The call of a message's code in which a thread blocks.
struct Blocks {
    calls_before: usize,
    blocked: oneshot::Sender<()>,
    goes_on: mpsc::Receiver<()>,
}

thread_local! {
    static BLOCKS: RefCell<Option<Blocks>> = const { RefCell::new(None) };
}

/// A message whose code blocks on a thread that has set `BLOCKS`.
struct Blocking(Envelope<u8>);

impl Blocking {
    fn new() -> Self {
        let mut envelope = Envelope::from(Buffer::<u8>::pinned(&Device::host(), 16).unwrap());
        envelope.set_len(8).unwrap();
        Self(envelope)
    }
}

impl Message for Blocking {
    const CARRIES_ENVELOPES: bool = true;

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        let due = BLOCKS.with_borrow_mut(|blocks| {
            if let Some(Blocks { calls_before: calls_before @ 1.., .. }) = blocks {
                *calls_before -= 1;
                return None;
            }
            blocks.take()
        });
        if let Some(Blocks { blocked, goes_on, .. }) = due {
            blocked.send(()).unwrap();
            goes_on.recv().unwrap();
        }
        self.0.envelopes(visit);
    }
}

/// A thread sends a message and blocks in the message's code, after `calls_before` calls of it. Meanwhile the flow is
/// stopped and runs as far as it can. Returns whether the message was accepted; `None` if there was no such call.
async fn stopped_in_a_send(
    calls_before: usize,
    running: Running,
    send: impl FnOnce() -> Result<bool> + Send + 'static,
) -> Option<bool> {
    let ((blocked, has_blocked), (go_on, goes_on)) = (oneshot::channel(), mpsc::channel());
    let sends = std::thread::spawn(move || {
        BLOCKS.set(Some(Blocks { calls_before, blocked, goes_on }));
        let sent = send();
        // Drops the channel if no call has blocked.
        BLOCKS.take();
        sent
    });
    let has_blocked = within(has_blocked).await.is_ok();
    running.stop();
    // More yields than its tasks need: they share one thread with this test.
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
    if has_blocked {
        go_on.send(()).unwrap();
    }
    let report = within(running).await.unwrap_or_else(|error| panic!("after {calls_before} calls: {error}"));
    assert_eq!(report.untaken, 0);
    let accepted =
        sends.join().unwrap().or_else(|error| if error.is_closed() { Ok(false) } else { Err(error) }).unwrap();
    has_blocked.then_some(accepted)
}

/// The flow is stopped while a message is in the hub and its sender is enqueueing the copy to the reader: the message
/// is delivered, and the flow ends without an error.
#[tokio::test]
async fn e2_a_stop_waits_for_a_message_that_is_being_sent() {
    let mut outcomes = Vec::new();
    for calls_before in 0.. {
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let mut flow = Flow::new("e2");
        let end = sink(move |_: Blocking| {
            sender.send(()).unwrap();
            ready(Ok(()))
        });
        let end = flow.add("end", end).on(&emulated());
        let messages = flow.ingress_with("messages", end.input, HubOptions::bounded(2).envelope_bytes(16));
        let running = flow.spawn().unwrap();
        within(messages.send(Blocking::new())).await.unwrap();
        within(receiver.recv()).await.unwrap();
        let send = move || fits(messages.try_send(Blocking::new()));
        let Some(accepted) = stopped_in_a_send(calls_before, running, send).await else { break };
        assert_eq!(receiver.recv().await.is_some(), accepted, "after {calls_before} calls");
        outcomes.push(accepted);
    }
    // The message's code is called before it is accepted, and while it is copied.
    assert!(outcomes.contains(&false) && outcomes.contains(&true), "{outcomes:?}");
}

/// The same for a request to a service, which is answered.
#[tokio::test]
async fn e2_a_stop_waits_for_a_request_that_is_being_sent() {
    let mut outcomes = Vec::new();
    for calls_before in 0.. {
        let mut flow = Flow::new("e2");
        let len = flow.add("len", map(async |request: Blocking| Ok(request.0.len()))).on(&emulated());
        let service = flow.service_with("service", len.input, len.output, HubOptions::bounded(2).envelope_bytes(16));
        let running = flow.spawn().unwrap();
        assert_eq!(within(service.ask(Blocking::new())).await.unwrap(), 8);
        let send = move || futures::executor::block_on(service.ask(Blocking::new())).map(|len| len == 8);
        let Some(accepted) = stopped_in_a_send(calls_before, running, send).await else { break };
        outcomes.push(accepted);
    }
    assert!(outcomes.contains(&false) && outcomes.contains(&true), "{outcomes:?}");
}
