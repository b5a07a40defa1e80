//! Scenario Q5: any number of senders on one port, and the ways to take their messages; and Q9: metadata, which is
//! merged from the messages of several senders.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use common::clock::{Notes, at_until, runs};
use common::*;
use futures::FutureExt;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wakeline::{
    Ingress, Inputs,
    condition::{self, Gate},
    hub::MergePolicy,
    operator::{InputHandle, OutputHandle, concurrent},
    prelude::*,
    test::{self, Stepped},
};

#[derive(Ports)]
struct MergePorts {
    #[input]
    parts: Inputs<u64>,
}

/// Sends these numbers and ends.
fn numbers(
    numbers: impl IntoIterator<Item = u64, IntoIter: Send + 'static>,
) -> impl Operator<Ports = SourcePorts<u64>> {
    let mut numbers = numbers.into_iter();
    source(move || std::future::ready(Ok(numbers.next())))
}

/// Records the result of `take` in each run.
struct Rows(Shared<Vec<u64>>);

impl Operator for Rows {
    type Ports = MergePorts;

    async fn compute(&mut self, ports: &mut MergePorts, _cx: &mut Cx) -> Result<()> {
        lock(&self.0).push(ports.parts.take()?.collect());
        Ok(())
    }
}

/// One message of each connection per run, in the order of connecting; ended connections are skipped.
#[tokio::test]
async fn q5_one_message_of_each_in_the_order_of_connecting() {
    let rows = shared();
    let mut flow = Flow::new("q5");
    // The order of adding differs from that of connecting.
    let merge = flow.add("merge", Rows(rows.clone()));
    let parts: Vec<_> =
        [3, 1, 2].map(|n| (n, flow.add(format!("{n}"), numbers((0..n).map(move |at| 10 * n + at))))).into();
    for (_, part) in &parts {
        flow.connect(part.output, merge.parts);
    }
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&rows), [vec![30, 10, 20], vec![31, 21], vec![32]]);
    assert_eq!(report.operator("merge").unwrap().messages_in, 6);
    assert_eq!(report.untaken, 0);
}

/// A hundred senders; the order of each one's messages is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q5_a_hundred_senders() {
    const SENDERS: u64 = 100;
    const EACH: u64 = 50;
    let rows = shared();
    let mut flow = Flow::new("q5");
    let merge = flow.add("merge", Rows(rows.clone()));
    for sender in 0..SENDERS {
        let part = flow.add(format!("{sender}"), numbers((0..EACH).map(move |n| sender * EACH + n)));
        flow.connect(part.output, merge.parts);
    }
    within(flow.run()).await.unwrap();
    let wanted: Vec<Vec<u64>> = (0..EACH).map(|n| (0..SENDERS).map(|sender| sender * EACH + n).collect()).collect();
    assert_eq!(*lock(&rows), wanted);
}

/// Any message: an idle sender does not block the others, and a busy one does not starve them.
#[tokio::test]
async fn q5_idle_senders_do_not_block_and_busy_ones_do_not_starve_others() {
    let seen = shared();
    let hold_back = Arc::new(AtomicBool::new(true));
    let mut flow = Flow::new("q5");
    let (list, held) = (seen.clone(), hold_back.clone());
    let merge = flow.add(
        "merge",
        task(move |ports: &mut MergePorts, _cx| {
            let (list, held) = (list.clone(), held.clone());
            async move {
                assert_eq!(ports.parts.connections(), 3);
                // Both active senders have two messages queued before any is taken.
                until("two of each", || ports.parts.len_of(0) == 2 && ports.parts.len_of(2) == 2).await;
                assert_eq!((ports.parts.len(), ports.parts.len_of(1), ports.parts.len_of(9)), (4, 0, 0));
                while let Some((connection, message)) = ports.parts.recv_any().await? {
                    lock(&list).push((connection, message));
                    if lock(&list).len() == 4 {
                        held.store(false, Ordering::Release);
                    }
                }
                assert!(ports.parts.is_empty());
                assert!(ports.parts.try_take_any()?.is_none());
                Ok(())
            }
            .boxed()
        }),
    );
    let mut last = Some(9);
    let silent = source(move || {
        let (held, last) = (hold_back.clone(), last.take());
        async move {
            until("it may send", || !held.load(Ordering::Acquire)).await;
            Ok(last)
        }
    });
    let (one, silent, two) =
        (flow.add("one", numbers([1, 2])), flow.add("silent", silent), flow.add("two", numbers([11, 12])));
    for part in [one.output, silent.output, two.output] {
        flow.connect_with(part, merge.parts, HubOptions::bounded(2));
    }
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [(0, 1), (2, 11), (0, 2), (2, 12), (1, 9)]);
}

/// A second `take` in one run is refused and takes nothing: the queued messages can still be taken one by one.
#[tokio::test]
async fn q5_a_take_that_is_refused_takes_nothing() {
    struct Twice;
    impl Operator for Twice {
        type Ports = MergePorts;

        async fn compute(&mut self, ports: &mut MergePorts, _cx: &mut Cx) -> Result<()> {
            assert_eq!(ports.parts.take()?.collect::<Vec<_>>(), [1, 11]);
            let error = ports.parts.take().map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains("no message in hub `test:parts:0.output -> twice.parts`"), "{error}");
            assert_eq!(ports.parts.try_take_from(0)?, None);
            assert_eq!(ports.parts.try_take_from(1)?, Some(12));
            let error = ports.parts.try_take_from(2).unwrap_err();
            assert!(error.to_string().contains("there is no connection 2"), "{error}");
            Ok(())
        }
    }
    let twice = test::operator_named("twice", Twice);
    let parts = twice.parts;
    let mut twice = twice.writers(parts, 2).input_hub(parts, HubOptions::bounded(2)).start().unwrap();
    for (writer, number) in [(0, 1), (1, 11), (1, 12)] {
        twice.input(parts).writer(writer).send(number).unwrap();
    }
    assert_eq!(twice.step().await.unwrap(), Stepped::Ran(1));
}

/// Wrong connections of such a port are reported before anything runs.
#[tokio::test]
async fn q5_never_connected_is_an_error_before_running() {
    let mut flow = Flow::new("q5");
    flow.add("merge", Rows(shared()));
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert!(error.to_string().contains("input `merge.parts` is not connected"), "{error}");

    let mut flow = Flow::new("q5");
    let merge = flow.add("merge", Rows(shared()));
    let (once, twice) = (flow.add("once", sink(async |_: u64| Ok(()))), flow.add("twice", numbers([1])));
    flow.connect(twice.output, merge.parts);
    flow.connect(twice.output, once.input);
    flow.connect(twice.output, once.input);
    let message = flow.run().await.unwrap_err().to_string();
    assert!(message.contains("port `twice.output` is connected more than once"), "{message}");
    let wanted = "output `twice.output` is connected to input `once.input` more than once: connect the two once";
    assert!(message.contains(wanted), "{message}");
    assert!(!message.contains("`Inputs<..>`") && !message.contains("merge.parts"), "it can be: {message}");
}

/// The likely mistake comes first: the same line twice. Only two different outputs need an `Inputs`.
#[tokio::test]
async fn q5_a_connection_that_is_made_again_is_not_one_of_another_output() {
    let connected = async |pairs: &[(usize, usize)]| {
        let mut flow = Flow::new("q5");
        let from = ["one", "two"].map(|name| flow.add(name, numbers([1])).output);
        let to = ["left", "right"].map(|name| flow.add(name, sink(async |_: u64| Ok(()))).input);
        pairs.iter().for_each(|&(one, other)| flow.connect(from[one], to[other]));
        flow.run().await.unwrap_err().to_string()
    };
    let again = "output `one.output` is connected to input `left.input` more than once: connect the two once";
    let inputs = "port `left.input` is connected more than once: for messages of several outputs, use an `Inputs<..>`";
    for times in [2, 3] {
        let mut pairs = vec![(0, 0); times];
        pairs.push((1, 1));
        assert_eq!(connected(&pairs).await, format!("flow `q5`: invalid setup: {again}"), "and nothing else");
    }
    assert_eq!(connected(&[(0, 0), (1, 0), (1, 1)]).await.matches(inputs).count(), 1);
    let both = connected(&[(0, 0), (1, 0), (0, 0), (1, 1)]).await;
    assert!(both.contains(again) && both.contains(inputs), "{both}");
}

/// Envelopes of several senders, on a device; the flow runs twice.
#[derive(Ports)]
struct SumPorts {
    #[input]
    parts: Inputs<Envelope<u32>>,
    #[output(envelope_bytes = 4)]
    total: Output<Envelope<u32>>,
}

struct SumOf;

impl Operator for SumOf {
    type Ports = SumPorts;

    async fn compute(&mut self, ports: &mut SumPorts, cx: &mut Cx) -> Result<()> {
        for part in ports.parts.take()? {
            let mut total = ports.total.blank().await?;
            total.set_len(1)?;
            sum::launch(cx.stream()?, &part, &mut total)?;
            ports.total.send(total).await?;
        }
        Ok(())
    }
}

on_both!(q5_envelopes_of_several_senders, async |device: Device| {
    let totals = shared();
    let mut flow = Flow::new("q5");
    let sum = flow.add("sum", SumOf).on(&device);
    for n in 1..=3_u32 {
        let part = flow.add(format!("{n}"), SendEach::new((0..4).map(move |at| vec![n + at; 10])));
        flow.connect_with(part.output, sum.parts, HubOptions::default().envelope_bytes(40));
    }
    let collect = flow.add("collect", Collect(totals.clone()));
    flow.connect_with(sum.total, collect.input, HubOptions::bounded(3));
    flow.run().await.unwrap();
    let wanted: Vec<_> = (0..4).flat_map(|at| (1..=3).map(move |n| vec![10 * (n + at)])).collect();
    assert_eq!(*lock(&totals), wanted);
    drop(flow);
    freed(&device).await;
});

/// A connection that can never deliver blocks the others' messages: the stall names the hub that lacks a message.
#[tokio::test]
async fn q5_a_stall_names_the_connection() {
    let mut flow = Flow::new("q5");
    let merge = flow.add("merge", Rows(shared()));
    let one = flow.add("one", numbers([1]));
    // A loop that waits for its own first message, beside a sender whose message has arrived.
    let (begin, ring, round) =
        (flow.add("begin", numbers([1])), flow.add("ring", looped()), flow.add("round", pass_on::<u64>()));
    flow.connect(one.output, merge.parts);
    flow.connect(begin.output, ring.parts);
    flow.connect(ring.one, round.input);
    flow.connect(round.output, ring.parts);
    flow.connect(ring.other, merge.parts);
    let text = within(flow.run()).await.unwrap_err().to_string();
    // Only that hub: the first sender has sent its message.
    assert!(text.contains("`merge` waits for a message in hub `ring.other -> merge.parts` (`parts` waits"), "{text}");
}

/// An operator that waits for a loop's messages, with others queued, continues without the loop once the loop ends.
/// The error is that the loop never ran.
#[tokio::test]
async fn q5_a_loop_that_never_begins_is_named_and_not_its_reader() {
    let mut flow = Flow::new("q5");
    let rows = shared();
    let (merge, one) = (flow.add("merge", Rows(rows.clone())), flow.add("one", numbers([1])));
    // Each operator waits for the other's first message.
    let (ring, round) = (flow.add("ring", pass_on::<u64>()), flow.add("round", Fork));
    flow.connect(one.output, merge.parts);
    flow.connect(ring.output, round.input);
    flow.connect(round.output, ring.input);
    flow.connect(round.merged, merge.parts);
    let text = within(flow.run()).await.unwrap_err().to_string();
    assert!(
        text.contains("`ring`, `round` form a cycle in which each waits for another's first message")
            && !text.contains("merge"),
        "{text}"
    );
    assert_eq!(*lock(&rows), [[1]]);
}

/// Takes a message of each connection and sends none.
fn looped() -> impl Operator<Ports = LoopPorts> {
    runs(|ports: &mut LoopPorts, _cx: &mut Cx| {
        ports.parts.take_batch()?.for_each(drop);
        Ok(())
    })
}

/// A loop that waits for its own first message: the stall says once what such a port waits for, and how to run on any
/// message.
#[tokio::test]
async fn q5_a_stall_says_that_the_port_waits_for_each_connection() {
    async fn outcome(at_least: bool) -> String {
        let mut flow = Flow::new("q5");
        let merge = flow.add("merge", looped());
        let merge = if at_least { merge.clone().when(condition::at_least(merge.parts, 1)) } else { merge };
        let one = flow.add("one", numbers([1]));
        flow.connect(one.output, merge.parts);
        for output in [merge.one, merge.other] {
            flow.connect(output, merge.parts);
        }
        within(flow.run()).await.map_or_else(|error| error.to_string(), |report| report.untaken.to_string())
    }
    let wanted = "`merge` waits for a message in hub `merge.one -> merge.parts` and for a message in hub \
                  `merge.other -> merge.parts` (`parts` waits for one from each connection; with `at_least = 1` it waits for one from any)";
    assert!(outcome(false).await.contains(wanted), "{}", outcome(false).await);
    assert_eq!(outcome(true).await, "0");
}

#[derive(Ports)]
struct LoopPorts {
    #[input]
    parts: Inputs<u64>,
    #[output]
    one: Output<u64>,
    #[output]
    other: Output<u64>,
}

#[derive(Ports)]
struct ForkPorts {
    #[input]
    input: Input<u64>,
    #[output]
    output: Output<u64>,
    #[output]
    merged: Output<u64>,
}

struct Fork;

impl Operator for Fork {
    type Ports = ForkPorts;

    async fn compute(&mut self, ports: &mut ForkPorts, _cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        ports.output.send(message).await?;
        ports.merged.send(message).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct AnyPorts {
    #[input(at_least = 1)]
    parts: Inputs<u64>,
}

/// An explicit number counts all connections together, even if it is one: silent senders are not waited for.
#[tokio::test(start_paused = true)]
async fn c1_one_message_of_any_connection() {
    let notes = Notes::begin();
    let noted = notes.clone();
    let mut flow = Flow::new("c1");
    let merge = flow.add(
        "merge",
        runs(move |ports: &mut AnyPorts, _cx: &mut Cx| {
            noted.add(ports.parts.take_batch()?.collect::<Vec<_>>());
            Ok(())
        }),
    );
    let (one, other) = (flow.add("one", at_until(50, [(10, 1), (30, 3)])), flow.add("other", at_until(50, [(20, 2)])));
    flow.connect(one.output, merge.parts);
    flow.connect(other.output, merge.parts);
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(10, vec![1]), (20, vec![2]), (30, vec![3])]);
}

/// Sends numbers, each with itself as metadata under the sender's name and under a common name.
fn labelled(name: &'static str, mut numbers: std::ops::Range<u64>) -> impl Operator<Ports = SourcePorts<u64>> {
    runs(move |ports: &mut SourcePorts<u64>, cx: &mut Cx| {
        let Some(number) = numbers.next() else {
            cx.finish();
            return Ok(());
        };
        cx.insert_metadata(name, number);
        cx.insert_metadata("number", number);
        Ok(ports.output.try_send(number)?)
    })
}

/// The metadata of a run, by name.
fn values(cx: &Cx) -> Vec<(String, u64)> {
    let metadata = cx.metadata();
    metadata.names().map(|name| (name.to_owned(), *metadata.get::<u64>(name).unwrap())).collect()
}

fn named(values: &[(&str, u64)]) -> Vec<(String, u64)> {
    values.iter().map(|(name, value)| (name.to_string(), *value)).collect()
}

/// Metadata travels from operator to operator and to every reader of a fan-out, and may be changed on the way. No
/// message carries the metadata of another.
#[tokio::test]
async fn q9_metadata_travels_with_its_message() {
    let mut flow = Flow::new("q9");
    let send = flow.add("send", labelled("sent", 0..4));
    let change = runs(|ports: &mut MapPorts<u64, u64>, cx: &mut Cx| {
        let number = ports.input.take()?;
        if number == 1 {
            assert!(cx.remove_metadata("sent") && !cx.remove_metadata("nothing"));
            cx.insert_metadata("changed", 10 * number);
        }
        Ok(ports.output.try_send(number)?)
    });
    let change = flow.add("change", change);
    flow.connect(send.output, change.input);
    let (one, two) = (shared(), shared());
    let note = |seen: &Shared<(u64, Vec<(String, u64)>)>| {
        let seen = seen.clone();
        runs(move |ports: &mut SinkPorts<u64>, cx: &mut Cx| {
            lock(&seen).push((ports.input.take()?, values(cx)));
            Ok(())
        })
    };
    let readers = [flow.add("one", note(&one)).input, flow.add("two", note(&two)).input];
    flow.connect(change.output, readers);
    within(flow.run()).await.unwrap();
    let wanted = [
        (0, named(&[("number", 0), ("sent", 0)])),
        (1, named(&[("changed", 10), ("number", 1)])),
        (2, named(&[("number", 2), ("sent", 2)])),
        (3, named(&[("number", 3), ("sent", 3)])),
    ];
    assert_eq!(*lock(&one), wanted);
    assert_eq!(*lock(&two), wanted);
}

/// Two messages of one run have values of the same name: the later one wins, the earlier one wins, or the operator
/// fails.
#[tokio::test]
async fn q9_metadata_merges_by_the_operators_policy() {
    let run = async |policy: Option<MergePolicy>| {
        let seen = shared();
        let noted = seen.clone();
        let merge = runs(move |ports: &mut MergePorts, cx: &mut Cx| {
            let taken: Vec<_> = ports.parts.take()?.collect();
            lock(&noted).push((taken, values(cx)));
            Ok(())
        });
        let merge = test::operator_named("merge", merge).with(|merge| match policy {
            Some(policy) => merge.merge_metadata(policy),
            None => merge,
        });
        let parts = merge.parts;
        let mut merge = merge.writers(parts, 2).start().unwrap();
        for (writer, name, number) in [(0, "left", 1), (0, "left", 2), (1, "right", 11), (1, "right", 12_u64)] {
            let input = merge.input(parts).writer(writer);
            input.metadata(name, number).metadata("number", number).send(number).unwrap();
        }
        let outcome = within(merge.finish()).await;
        (outcome, std::mem::take(&mut *lock(&seen)))
    };
    for (policy, numbers) in
        [(None, [11, 12]), (Some(MergePolicy::Update), [11, 12]), (Some(MergePolicy::Reject), [1, 2])]
    {
        let (outcome, seen) = run(policy).await;
        outcome.unwrap();
        let wanted = numbers.map(|number| {
            let n = number % 10;
            (vec![n, 10 + n], named(&[("left", n), ("number", number), ("right", 10 + n)]))
        });
        assert_eq!(seen, wanted, "{policy:?}");
    }
    let (outcome, seen) = run(Some(MergePolicy::Raise)).await;
    let message = outcome.unwrap_err().to_string();
    assert!(message.starts_with("operator `merge`: ") && message.contains("metadata `number`"), "{message}");
    assert!(seen.is_empty());
}

/// While a batch is taken, each of its messages sends another one when its size is counted.
struct Feed(Arc<Feeding>);

#[derive(Default)]
struct Feeding {
    ingress: OnceLock<wakeline::Ingress<Feed>>,
    taking: AtomicBool,
    sent: AtomicUsize,
}

impl Message for Feed {
    fn size_in_bytes(&self) -> usize {
        // Not for the messages that it sends itself, which are counted as they are sent.
        if self.0.taking.swap(false, Ordering::Relaxed) {
            // Bounds the test if the batch never ends.
            if self.0.sent.fetch_add(1, Ordering::Relaxed) < 1000 {
                let _ = self.0.ingress.get().unwrap().try_send(Self(self.0.clone()));
            }
            self.0.taking.store(true, Ordering::Relaxed);
        }
        1
    }
}

#[derive(Ports)]
struct OnePorts {
    #[input(optional)]
    one: Input<Feed>,
}

#[derive(Ports)]
struct ManyPorts {
    #[input(optional)]
    many: Inputs<Feed>,
}

/// A batch of all queued messages ends, although senders keep sending while it is taken.
#[tokio::test]
async fn q5_a_batch_has_the_messages_that_were_queued_when_it_began() {
    async fn batches(many: bool) -> Vec<usize> {
        let (feeding, seen) = (Arc::new(Feeding::default()), shared());
        let mut flow = Flow::new("q5");
        let (feeds, noted, gate) = (feeding.clone(), seen.clone(), Gate::paused());
        let take = move |take: &mut dyn FnMut() -> Result<usize>, cx: &mut Cx| {
            feeds.taking.store(true, Ordering::Relaxed);
            lock(&noted).push(take()?);
            feeds.taking.store(false, Ordering::Relaxed);
            if lock(&noted).len() == 3 {
                cx.finish();
            }
            Ok(())
        };
        let ports = if many {
            let takes = runs(move |ports: &mut ManyPorts, cx: &mut Cx| {
                take(&mut || ports.many.take_batch().map(|batch| batch.len()), cx)
            });
            let port = flow.add("takes", takes).when(gate.clone()).many;
            vec![port, port]
        } else {
            let takes = runs(move |ports: &mut OnePorts, cx: &mut Cx| {
                take(&mut || ports.one.take_batch().map(|batch| batch.len()), cx)
            });
            vec![flow.add("takes", takes).when(gate.clone()).one]
        };
        let ports = ports.into_iter().enumerate();
        let ingresses = ports.map(|(at, port)| flow.ingress_with(format!("in {at}"), port, HubOptions::bounded(8)));
        let ingresses: Vec<_> = ingresses.collect();
        let running = flow.spawn().unwrap();
        for ingress in &ingresses {
            for _ in 0..2 {
                ingress.send(Feed(feeding.clone())).await.map_err(drop).unwrap();
            }
        }
        assert!(feeding.ingress.set(ingresses[0].clone()).is_ok());
        gate.resume();
        within(running).await.unwrap();
        std::mem::take(&mut *lock(&seen))
    }
    assert_eq!(batches(false).await, [2, 2, 2]);
    assert_eq!(batches(true).await, [4, 4, 4]);
}

/// Takes all queued messages, once.
#[derive(Clone)]
struct TakesOne(Shared<usize>);

#[derive(Clone)]
struct TakesMany(Shared<usize>);

macro_rules! takes_all {
    ($operator:ident, $ports:ident, $port:ident) => {
        impl Operator for $operator {
            type Ports = $ports;

            async fn compute(&mut self, ports: &mut $ports, cx: &mut Cx) -> Result<()> {
                lock(&self.0).push(ports.$port.take_batch()?.len());
                cx.finish();
                Ok(())
            }
        }
    };
}

takes_all!(TakesOne, OnePorts, one);
takes_all!(TakesMany, ManyPorts, many);

/// The same for a concurrent operator, whose runs are given their messages.
#[tokio::test]
async fn q5_a_batch_of_a_concurrent_operator_has_the_messages_that_were_queued() {
    async fn batch(many: bool) -> usize {
        let (feeding, seen, gate) = (Arc::new(Feeding::default()), shared(), Gate::paused());
        let mut flow = Flow::new("q5");
        let port = if many {
            flow.add("takes", concurrent(1, TakesMany(seen.clone()))).when(gate.clone()).many
        } else {
            flow.add("takes", concurrent(1, TakesOne(seen.clone()))).when(gate.clone()).one
        };
        let ingress = flow.ingress_with("in", port, HubOptions::bounded(8));
        let running = flow.spawn().unwrap();
        for _ in 0..2 {
            ingress.send(Feed(feeding.clone())).await.map_err(drop).unwrap();
        }
        assert!(feeding.ingress.set(ingress).is_ok());
        feeding.taking.store(true, Ordering::Relaxed);
        gate.resume();
        within(running).await.unwrap();
        let batches = lock(&seen);
        batches[0]
    }
    assert_eq!(batch(false).await, 2);
    assert_eq!(batch(true).await, 2);
}

/// Runs a flow on this thread, and fails if it takes more scheduler turns than it can need. Counts turns, not time.
async fn ends(flow: Flow, turns: usize) -> Report {
    let mut running = flow.spawn().unwrap();
    for _ in 0..turns {
        if let Some(outcome) = (&mut running).now_or_never() {
            return outcome.unwrap();
        }
        tokio::task::yield_now().await;
    }
    panic!("it spins: {:?}", running.status());
}

/// An optional port is queried for a message: by the detection of operators that spin, once in 128 turns, and by `recv`
/// in a run. The query must not reserve a message for a run, even if the hub drops messages: a run whose reservation is
/// never renewed could never be claimed.
#[tokio::test]
async fn q5_a_query_reserves_no_message_for_a_run() {
    #[derive(Ports)]
    struct BesidePorts {
        #[input]
        needed: Input<u64>,
        #[input(optional)]
        beside: Input<u64>,
        #[input(optional)]
        parts: Inputs<u64>,
    }

    for receives in [false, true] {
        let taken = shared();
        let noted = taken.clone();
        let mut flow = Flow::new("q5");
        let needed = flow.add("needed", numbers(0..300));
        let beside = flow.add("beside", numbers(0..300));
        let parts = flow.add("parts", numbers(0..300));
        let takes = flow.add("takes", Takes { receives, taken: noted });
        flow.connect(needed.output, takes.needed);
        flow.connect_with(beside.output, takes.beside, HubOptions::drop_oldest(1));
        flow.connect_with(parts.output, takes.parts, HubOptions::drop_oldest(1));
        let report = ends(flow, 10_000).await;
        assert_eq!(report.operator("takes").unwrap().runs, 300, "receives: {receives}");
        assert_eq!(*lock(&taken), (0..300).collect::<Vec<_>>());
    }

    struct Takes {
        receives: bool,
        taken: Shared<u64>,
    }

    impl Operator for Takes {
        type Ports = BesidePorts;

        async fn compute(&mut self, ports: &mut BesidePorts, _cx: &mut Cx) -> Result<()> {
            lock(&self.taken).push(ports.needed.take()?);
            if self.receives {
                ports.beside.recv().await?;
                ports.parts.recv_any().await?;
            } else {
                ports.beside.try_take()?;
                ports.parts.try_take_any()?;
            }
            Ok(())
        }
    }
}

/// A message that a hub which drops the oldest has reserved for a run stays until it is taken, even when the run awaits
/// a message there.
#[tokio::test]
async fn q5_a_run_that_waits_at_a_port_keeps_its_reserved_message() {
    #[derive(Ports)]
    struct ThreePorts {
        #[input(at_least = 3, capacity = 3)]
        input: Input<u64>,
    }

    struct Three(Arc<OnceLock<Ingress<u64>>>, Shared<u64>);

    impl Operator for Three {
        type Ports = ThreePorts;

        async fn compute(&mut self, ports: &mut ThreePorts, cx: &mut Cx) -> Result<()> {
            let first = ports.input.recv().await?;
            for newer in 4..10 {
                let _ = self.0.get().unwrap().try_send(newer);
            }
            lock(&self.1).extend(first.into_iter().chain(ports.input.take_batch()?));
            cx.finish();
            Ok(())
        }
    }

    let (feed, taken) = (Arc::new(OnceLock::new()), shared());
    let mut flow = Flow::new("q5");
    let three = flow.add("three", Three(feed.clone(), taken.clone()));
    let ingress = flow.ingress_with("in", three.input, HubOptions::drop_oldest(3));
    let running = flow.spawn().unwrap();
    for number in 1..=3 {
        ingress.send(number).await.unwrap();
    }
    assert!(feed.set(ingress).is_ok());
    within(running).await.unwrap();
    assert_eq!(lock(&taken)[..3], [1, 2, 3]);
}

/// Random flows: an operator with required and optional inputs, each from a hub of a random kind, with writers that end
/// at random times and a random way to take messages. Each flow ends, none spins, and each message is counted exactly
/// once.
#[tokio::test]
async fn q5_random_flows_end() {
    #[derive(Ports)]
    struct AnyPorts {
        #[input]
        needed: Input<u64>,
        #[input(optional)]
        beside: Input<u64>,
        #[input(at_least = 1)]
        some: Inputs<u64>,
        #[input(optional, done)]
        parts: Inputs<u64>,
        #[output(optional)]
        sent: Output<u64>,
    }

    struct Any(StdRng);

    impl Operator for Any {
        type Ports = AnyPorts;

        async fn compute(&mut self, ports: &mut AnyPorts, cx: &mut Cx) -> Result<()> {
            let Self(random) = self;
            ports.needed.take()?;
            match random.random_range(0..5) {
                0 => drop(ports.beside.recv().await?),
                1 => drop(ports.beside.take_batch()?),
                2 => {}
                _ => drop(ports.beside.try_take()?),
            }
            match random.random_range(0..3) {
                0 => drop(ports.some.recv_any().await?),
                1 => drop(ports.some.take_batch()?),
                _ => drop(ports.some.try_take_any()?),
            }
            match random.random_range(0..5) {
                0 => drop(ports.parts.recv_any().await?),
                1 => drop(ports.parts.take_batch()?),
                2 => {}
                _ => drop(ports.parts.try_take_any()?),
            }
            if random.random_range(0..400) == 0 {
                cx.finish();
            }
            fits(ports.sent.try_send(1))?;
            Ok(())
        }
    }

    fn connect(flow: &mut Flow, random: &mut StdRng, from: OutputHandle<u64>, to: InputHandle<u64>) {
        let capacity = random.random_range(1..4);
        match random.random_range(0..4) {
            0 => flow.connect_with(from, to, HubOptions::bounded(capacity)),
            1 => flow.connect_with(from, to, HubOptions::drop_newest(capacity)),
            2 => flow.connect_with(from, to, HubOptions::drop_oldest(capacity)),
            _ => flow.connect_with(from, to, HubOptions::latest()),
        }
    }

    let (first, last) = match std::env::var("WAKELINE_SEEDS") {
        Ok(seeds) => {
            seeds.split_once("..").map(|(first, last)| (first.parse().unwrap(), last.parse().unwrap())).unwrap()
        }
        Err(_) => (0, quick_or_long(150, 1000)),
    };
    for seed in first..last {
        let mut random = StdRng::seed_from_u64(seed);
        let mut flow = Flow::new("q5");
        let any = flow.add("any", Any(StdRng::seed_from_u64(random.random())));
        for (port, name) in [(any.needed, "needed"), (any.beside, "beside"), (any.some, "some"), (any.parts, "parts")] {
            let connections = if matches!(name, "some" | "parts") { random.random_range(1..4) } else { 1 };
            for connection in 0..connections {
                let most = random.random_range(1..300);
                let source = flow.add(format!("{name} {connection}"), numbers(0..most));
                connect(&mut flow, &mut random, source.output, port);
            }
        }
        let end = flow.add("end", sink(async |_: u64| Ok(())));
        connect(&mut flow, &mut random, any.sent, end.input);
        let report = ends(flow, 100_000).await;
        for (hub, counts) in report.hubs.iter().map(|hub| (&hub.name, hub.passed + hub.dropped + hub.untaken)) {
            let from = hub.split('.').next().unwrap();
            assert_eq!(report.operator(from).unwrap().messages_out, counts, "seed {seed}, hub {hub}: {report}");
        }
    }
}
