//! Scenarios C0 to C4: no condition, messages at one port and at several, batches, room downstream.

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use common::clock::*;
use common::*;
use wakeline::{
    condition::{Gate, Since, any_of, at_least, at_most, batch, count, each, every, room, sum},
    device::{Emulated, Simulation},
    prelude::*,
    test::{self, Stepped},
};

/// An operator without conditions always runs again, and does not starve other tasks.
#[tokio::test]
async fn c0_without_conditions_an_operator_runs_again_and_again() {
    let ran: [Arc<AtomicUsize>; 2] = Default::default();
    let mut flow = Flow::new("c0");
    for (name, ran) in ["one", "other"].into_iter().zip(ran.clone()) {
        flow.add(
            name,
            runs(move |(): &mut (), _cx: &mut Cx| {
                ran.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }),
        );
    }
    let running = flow.spawn().unwrap();
    // All on one thread: this task and both operators make progress.
    until("both operators have run", || ran.iter().all(|ran| ran.load(Ordering::Relaxed) > 1000)).await;
    running.stop();
    let report = within(running).await.unwrap();
    assert_eq!(report.operator("one").unwrap().runs, ran[0].load(Ordering::Relaxed) as u64);
}

#[derive(Ports)]
struct FourPorts {
    #[input(at_least = 4, capacity = 8)]
    input: Input<u32>,
}

fn batches(notes: &Notes<Vec<u32>>) -> impl Operator<Ports = FourPorts> + use<> {
    let notes = notes.clone();
    runs(move |ports: &mut FourPorts, _cx: &mut Cx| {
        notes.add(ports.input.take_batch()?.collect());
        Ok(())
    })
}

#[tokio::test(start_paused = true)]
async fn c1_so_many_messages_a_run_and_the_last_ones_short() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c1");
    let send = flow.add("send", at((1..=10).map(|n| (n, n as u32))));
    let take = flow.add("take", batches(&notes));
    flow.connect(send.output, take.input);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(4, vec![1, 2, 3, 4]), (8, vec![5, 6, 7, 8]), (10, vec![9, 10])]);
    assert_eq!((report.operator("take").unwrap().messages_in, report.untaken), (10, 0));
}

#[derive(Ports)]
struct AnyConnectionPorts {
    #[input(at_least = 4)]
    input: Inputs<u32>,
}

/// The minimum counts the messages of all connections together. Each has a queue of one, which suffices.
#[tokio::test(start_paused = true)]
async fn c1_so_many_messages_of_several_connections() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c1");
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut AnyConnectionPorts, _cx: &mut Cx| {
            let mut all: Vec<u32> = ports.input.take_batch()?.collect();
            all.sort_unstable();
            noted.add(all);
            Ok(())
        }),
    );
    for n in 1..=4 {
        let send = flow.add(format!("send {n}"), at_until(20, [(n, n as u32), (10, 10 * n as u32)]));
        flow.connect(send.output, take.input);
    }
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(4, vec![1, 2, 3, 4]), (10, vec![10, 20, 30, 40])]);
}

#[derive(Ports)]
struct FrontPorts {
    #[input(at_most = 2, capacity = 4)]
    input: Input<u32>,
}

/// The operator runs only while at most two messages are queued.
#[tokio::test(start_paused = true)]
async fn c1_at_most_so_many_messages() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c1");
    let send = flow.add("send", at_until(30, [(0, 1), (10, 2), (10, 3), (20, 4), (20, 5), (20, 6)]));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut FrontPorts, _cx: &mut Cx| {
            noted.add(ports.input.take_batch()?.collect::<Vec<_>>());
            Ok(())
        }),
    );
    flow.connect(send.output, take.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(notes.all(), [(0, vec![1]), (10, vec![2, 3])]);
    assert_eq!(error.kind(), ErrorKind::Stalled, "three messages are queued, and no other operator takes them");
    assert!(error.to_string().contains("`take` waits for 1 to 2 messages at `input`"), "{error}");
}

/// Three messages are too many for the operator until another operator opens the gate.
#[tokio::test(start_paused = true)]
async fn c1_at_most_so_many_messages_or_an_open_gate() {
    let (notes, gate) = (Notes::begin(), Gate::paused());
    let mut flow = Flow::new("c1");
    let send = flow.add("send", at_until(30, [(0, 1), (10, 2), (10, 3), (10, 4)]));
    let noted = notes.clone();
    let (opened, open) = (gate.clone(), gate.clone());
    let take = flow.add(
        "take",
        runs(move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
            noted.add(std::iter::from_fn(|| ports.input.try_take().unwrap()).collect::<Vec<_>>());
            opened.pause();
            Ok(())
        }),
    );
    let take = take.clone().when(any_of(at_most(take.input, 2), gate));
    flow.connect_with(send.output, take.input, HubOptions::bounded(4));
    let says = task(move |(): &mut (), _cx: &mut Cx| {
        let open = open.clone();
        Box::pin(async move {
            tokio::time::sleep(ms(20)).await;
            open.resume();
            tokio::time::sleep(ms(20)).await;
            open.end();
            Ok(())
        })
    });
    let _ = flow.add("says", says);
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(0, vec![1]), (20, vec![2, 3, 4])]);
}

#[derive(Ports)]
struct SettingsPorts {
    #[input]
    ticks: Input<u32>,
    #[input(optional)]
    settings: Input<&'static str>,
}

/// The operator waits neither for messages at an optional input nor for its end. `take` on an empty one is a usage
/// error.
#[tokio::test]
async fn c1_an_optional_input_is_not_waited_for() {
    let seen = shared();
    let noted = seen.clone();
    let take = runs(move |ports: &mut SettingsPorts, _cx: &mut Cx| {
        let tick = ports.ticks.take()?;
        let setting = ports.settings.try_take()?;
        assert_eq!(ports.settings.take().unwrap_err().kind(), ErrorKind::Usage, "no message is left");
        lock(&noted).push((tick, setting));
        Ok(())
    });
    let mut take = test::operator(take).start().unwrap();
    take.input(take.ticks).send(0).unwrap();
    assert_eq!(take.step().await.unwrap(), Stepped::Ran(1));
    take.input(take.settings).send("dark").unwrap();
    assert!(take.step().await.unwrap().is_waiting());
    take.input(take.ticks).send(1).unwrap();
    assert_eq!(take.step().await.unwrap(), Stepped::Ran(2));
    take.input(take.settings).close();
    (2..4).for_each(|tick| take.input(take.ticks).send(tick).unwrap());
    take.finish().await.unwrap();
    assert_eq!(*lock(&seen), [(0, None), (1, Some("dark")), (2, None), (3, None)]);
}

/// Conditions that are set when an operator is added replace those of the port, without a change to the operator.
#[tokio::test(start_paused = true)]
async fn c1_from_outside_a_condition_is_added_or_replaced() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c1");
    let send = flow.add("send", at_until(50, [(0, 1), (10, 2), (20, 3)]));
    let take = flow.add("take", batches(&notes));
    // A queue of one, although the port's attribute asks for four messages.
    let take = take.clone().when(at_least(take.input, 1));
    flow.connect_with(send.output, take.input, HubOptions::bounded(1));

    let settings = flow.add("settings", at_until(50, [(30, "dark")]));
    let ticks = flow.add("ticks", at_until(50, [(5, 7)]));
    let (noted, both) = (notes.clone(), runs::<SettingsPorts, _>);
    let both = flow.add(
        "both",
        both(move |ports, _cx| {
            noted.add(vec![ports.ticks.take()?]);
            assert_eq!(ports.settings.take()?, "dark", "the condition guarantees a message");
            Ok(())
        }),
    );
    let both = both.clone().when(at_least(both.settings, 1));
    flow.connect(settings.output, both.settings);
    flow.connect(ticks.output, both.ticks);
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(0, vec![1]), (10, vec![2]), (20, vec![3]), (30, vec![7])]);
}

#[derive(Ports)]
struct RoomPorts {
    #[output(room = 3, capacity = 2)]
    output: Output<u32>,
}

/// All conditions that can never hold are reported before any operator runs, all of them at once.
#[tokio::test]
async fn c1_a_minimum_above_the_queue_is_an_error_before_running() {
    let mut flow = Flow::new("c1");
    let send: [_; 4] = std::array::from_fn(|n| {
        flow.add(format!("send {n}"), runs(|_: &mut SourcePorts<u32>, _: &mut Cx| unreachable!("no operator runs")))
    });
    let notes = Notes::begin();
    let four = flow.add("four", batches(&notes));
    flow.connect_with(send[0].output, four.input, HubOptions::bounded(3));
    let three = flow.add("three", sink(|_: u32| ready(Ok(()))));
    let three = three.clone().when(batch(three.input, 3, ms(1)));
    flow.connect_with(send[1].output, three.input, HubOptions::bounded(1));
    let both = flow.add("both", Both(notes.clone()));
    let both = both.clone().when(sum([both.left.into(), both.right.into()], 9));
    let both = both.clone().when(each([(both.left.into(), 5), (both.left.into(), 1)]));
    flow.connect(send[2].output, both.left);
    flow.connect(send[3].output, both.right);
    let room_for_three = flow.add("room", runs(|_: &mut RoomPorts, _: &mut Cx| Ok(())));
    let end = flow.add("end", sink(|_: u32| ready(Ok(()))));
    // The first condition asks for room at an input, the second one names a port of another operator.
    let end = end.clone().when(room(end.input, 1)).when(at_least(three.input, 1)).when(every(ms(0)));
    flow.connect(room_for_three.output, end.input);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let text = error.to_string();
    for wanted in [
        "port `four.input` waits for 4 messages, but its queue holds at most 3: give the hub a capacity of 4 or more",
        "operator `three` port `input` waits for 3 messages, but its queue holds at most 1",
        "operator `both` has a `sum` condition that waits for 9 messages, but its queue holds at most 8",
        "operator `both` has a condition that names port `left` twice: name it once",
        "operator `both` port `left` waits for 5 messages, but its queue holds at most 4",
        "`room.output` waits for room for 3 messages, but its queue holds at most 2",
        "operator `end` waits for room at its input `input`: only an output has room",
        "operator `end` has a condition on `input`, a port of another operator",
        "operator `end` runs every 0 seconds",
    ] {
        assert!(text.contains(wanted), "{wanted}\n\n{text}");
    }
}

#[derive(Ports)]
struct BatchPorts {
    #[input(batch = 3, within = "10ms", capacity = 8)]
    input: Input<u32>,
}

/// A run gets a full batch, or whatever is queued once the oldest message has waited for its time. A message that a
/// batch leaves has waited since it arrived.
#[tokio::test(start_paused = true)]
async fn c2_a_batch_or_what_is_there_in_time() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c2");
    let messages = [0, 1, 2, 5, 20, 24, 38, 50, 50, 50, 50, 56, 70];
    let send = flow.add("send", at(messages.map(|time| (time, time as u32))));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut BatchPorts, _cx: &mut Cx| {
            noted.add(ports.input.take_batch()?.collect::<Vec<_>>());
            Ok(())
        }),
    );
    flow.connect(send.output, take.input);
    within(flow.run()).await.unwrap();
    let wanted = [
        (2, vec![0, 1, 2]),
        (15, vec![5]),
        (30, vec![20, 24]),
        (48, vec![38]),
        (50, vec![50, 50, 50]),
        (60, vec![50, 56]),
        (70, vec![70]), // immediately, at the end
    ];
    assert_eq!(notes.all(), wanted);
}

/// The same as a value at a port without the attribute, after another condition on the port.
#[tokio::test(start_paused = true)]
async fn c2_a_batch_from_outside() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c2");
    let send = flow.add("send", at([(0, 0), (1, 1), (2, 2), (5, 5), (30, 30), (30, 31), (30, 32), (30, 33)]));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
            noted.add(ports.input.take_batch()?.collect::<Vec<_>>());
            Ok(())
        }),
    );
    let take = take.clone().when(at_least(take.input, 1)).when(batch(take.input, 3, ms(10)));
    flow.connect_with(send.output, take.input, HubOptions::bounded(4));
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(2, vec![0, 1, 2]), (15, vec![5]), (30, vec![30, 31, 32]), (30, vec![33])]);
}

#[derive(Ports)]
struct SentPorts {
    #[input(batch = 2, within = "10ms", since = Sent, capacity = 4)]
    input: Input<Envelope<u32>>,
}

#[derive(Ports)]
struct ArrivedPorts {
    #[input(batch = 2, within = "10ms", since = Arrived, capacity = 4)]
    input: Input<Envelope<u32>>,
}

/// Takes the queued messages, and works on them for some time.
fn holds<P: Ports>(
    notes: &Notes<usize>,
    take: fn(&mut P) -> Result<Vec<Envelope<u32>>>,
) -> impl Operator<Ports = P> + use<P> {
    struct Holds<P>(Notes<usize>, fn(&mut P) -> Result<Vec<Envelope<u32>>>);
    impl<P: Ports> Operator for Holds<P> {
        type Ports = P;

        async fn compute(&mut self, ports: &mut P, _cx: &mut Cx) -> Result<()> {
            let batch = self.1(ports)?;
            self.0.add(batch.len());
            tokio::time::sleep(ms(7)).await;
            Ok(())
        }
    }
    Holds(notes.clone(), take)
}

/// The second message is sent immediately, but arrives only when the sole envelope on the reader's device is free
/// again.
#[tokio::test(start_paused = true)]
async fn c2_since_a_message_was_sent_or_since_it_arrived() {
    for (since, wanted) in [(Since::Sent, [(10, 1), (17, 1)]), (Since::Arrived, [(10, 1), (27, 1)])] {
        for seed in 0..5 {
            let simulation = Simulation::new(seed);
            let notes = Notes::begin();
            let outcome = simulation.run(async {
                let device = Device::simulated(&simulation, Emulated::new()).race_checked();
                let mut flow = Flow::new("c2");
                let mut twice = Some(());
                let send = flow.add(
                    "send",
                    task(move |ports: &mut SourcePorts<Envelope<u32>>, _cx: &mut Cx| {
                        twice.take().unwrap();
                        Box::pin(async move {
                            for _ in 0..2 {
                                let mut envelope = ports.output.blank().await?;
                                envelope.space().await?[0] = 1;
                                envelope.set_len(1)?;
                                ports.output.send(envelope).await?;
                            }
                            tokio::time::sleep(ms(50)).await;
                            Ok(())
                        })
                    }),
                );
                let hub = HubOptions::default().envelopes(1).envelope_bytes(64);
                match since {
                    Since::Sent => {
                        let take = holds(&notes, |ports: &mut SentPorts| Ok(ports.input.take_batch()?.collect()));
                        let take = flow.add("take", take).on(&device);
                        flow.connect_with(send.output, take.input, hub);
                    }
                    Since::Arrived => {
                        let take = holds(&notes, |ports: &mut ArrivedPorts| Ok(ports.input.take_batch()?.collect()));
                        let take = flow.add("take", take).on(&device);
                        flow.connect_with(send.output, take.input, hub);
                    }
                }
                flow.run().await
            });
            within(outcome).await.unwrap();
            assert_eq!(notes.all(), wanted, "{since:?}, seed {seed}");
        }
    }
}

#[derive(Ports)]
#[ports(sum(left, right) = 3)]
struct SumPorts {
    #[input(capacity = 4)]
    left: Input<u32>,
    #[input(capacity = 4)]
    right: Input<u32>,
}

fn both(ports: (&mut Input<u32>, &mut Input<u32>), notes: &Notes<Vec<u32>>) -> Result<()> {
    let (left, right) = ports;
    let all = left.take_batch()?.chain(right.take_batch()?).collect();
    notes.add(all);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn c3_so_many_messages_at_several_ports_together() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c3");
    let left = flow.add("left", at_until(30, [(0, 1), (2, 2), (20, 3), (21, 4)]));
    let right = flow.add("right", at_until(40, [(1, 10), (10, 11), (10, 12), (10, 13)]));
    let noted = notes.clone();
    let take = flow
        .add("take", runs(move |ports: &mut SumPorts, _cx: &mut Cx| both((&mut ports.left, &mut ports.right), &noted)));
    flow.connect(left.output, take.left);
    flow.connect(right.output, take.right);
    let report = within(flow.run()).await.unwrap();
    // The last batch has two messages, since no sender of a third is left.
    assert_eq!(notes.all(), [(2, vec![1, 2, 10]), (10, vec![11, 12, 13]), (40, vec![3, 4])]);
    assert_eq!(report.untaken, 0);
}

#[derive(Ports)]
#[ports(each(left = 2, right = 1))]
struct EachPorts {
    #[input(capacity = 4)]
    left: Input<u32>,
    #[input(capacity = 4)]
    right: Input<u32>,
    /// A port that keeps its own condition.
    #[input]
    other: Input<u32>,
}

#[tokio::test(start_paused = true)]
async fn c3_so_many_messages_at_each_of_several_ports() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c3");
    let left = flow.add("left", at_until(50, [(0, 1), (1, 2), (20, 3), (30, 4)]));
    let right = flow.add("right", at_until(50, [(5, 10), (6, 11)]));
    let other = flow.add("other", at_until(50, [(10, 100), (11, 101)]));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut EachPorts, _cx: &mut Cx| {
            noted.add(vec![ports.left.take()?, ports.left.take()?, ports.right.take()?, ports.other.take()?]);
            Ok(())
        }),
    );
    flow.connect(left.output, take.left);
    flow.connect(right.output, take.right);
    flow.connect(other.output, take.other);
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(10, vec![1, 2, 10, 100]), (30, vec![3, 4, 11, 101])]);
}

#[derive(Ports)]
#[ports(sum(left, right) = 3, or_after = "10ms")]
struct PatientPorts {
    #[input(capacity = 4)]
    left: Input<u32>,
    #[input(capacity = 4)]
    right: Input<u32>,
}

/// The interval counts from the operator's last run, whatever the reason for that run. When no sender is left, the
/// operator does not wait.
#[tokio::test(start_paused = true)]
async fn c3_so_many_messages_or_an_interval() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c3");
    let left = flow.add("left", at_until(45, [(3, 1), (12, 2), (13, 3)]));
    let right = flow.add("right", at_until(45, [(14, 10), (44, 11)]));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut PatientPorts, _cx: &mut Cx| both((&mut ports.left, &mut ports.right), &noted)),
    );
    flow.connect(left.output, take.left);
    flow.connect(right.output, take.right);
    within(flow.run()).await.unwrap();
    let wanted = [(10, vec![1]), (14, vec![2, 3, 10]), (24, vec![]), (34, vec![]), (44, vec![11])];
    assert_eq!(notes.all(), wanted);
}

#[derive(Ports)]
#[ports(sum(input) = 2, or_after = Self::PATIENCE)]
struct AlonePorts {
    #[input(capacity = 4)]
    input: Input<u32>,
}

impl AlonePorts {
    const PATIENCE: std::time::Duration = ms(10);
}

/// Set by attribute, and by value in two ways.
#[tokio::test(start_paused = true)]
async fn c3_one_port_alone_with_an_interval() {
    for way in 0..3 {
        let notes = Notes::begin();
        let mut flow = Flow::new("c3");
        let send = flow.add("send", at_until(40, [(3, 1), (12, 2), (13, 3)]));
        let noted = notes.clone();
        let input = if way == 0 {
            let take = runs(move |ports: &mut AlonePorts, _cx: &mut Cx| {
                noted.add(ports.input.take_batch()?.collect::<Vec<_>>());
                Ok(())
            });
            flow.add("take", take).input
        } else {
            let take = runs(move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
                let mut all = Vec::new();
                while let Some(message) = ports.input.try_take()? {
                    all.push(message);
                }
                noted.add(all);
                Ok(())
            });
            let take = flow.add("take", take);
            let take = match way {
                1 => take.clone().when(at_least(take.input, 2).or_after(ms(10))),
                _ => take.clone().when(each([(take.input.into(), 2)]).or_after(ms(10))),
            };
            take.input
        };
        flow.connect_with(send.output, input, HubOptions::bounded(4));
        within(flow.run()).await.unwrap();
        assert_eq!(notes.all(), [(10, vec![1]), (13, vec![2, 3]), (23, vec![]), (33, vec![])], "way {way}");
    }
}

/// A batch with a long limit and a shorter interval: the first one that holds allows the run.
#[tokio::test(start_paused = true)]
async fn c3_a_batch_or_an_interval() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c3");
    let send = flow.add("send", at_until(60, [(3, 1), (11, 2), (27, 3)]));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
            let mut all = Vec::new();
            while let Some(message) = ports.input.try_take()? {
                all.push(message);
            }
            noted.add(all);
            Ok(())
        }),
    );
    let take = take.clone().when(batch(take.input, 3, ms(5)).or_after(ms(15)));
    flow.connect_with(send.output, take.input, HubOptions::bounded(4));
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(8, vec![1]), (16, vec![2]), (31, vec![3]), (46, vec![])]);
}

#[derive(Ports)]
struct BothPorts {
    #[input(capacity = 4)]
    left: Input<u32>,
    #[input(capacity = 4)]
    right: Input<u32>,
}

struct Both(Notes<Vec<u32>>);

impl Operator for Both {
    type Ports = BothPorts;

    async fn compute(&mut self, ports: &mut BothPorts, _cx: &mut Cx) -> Result<()> {
        both((&mut ports.left, &mut ports.right), &self.0)
    }
}

/// Conditions as values work like attributes, and a flow that is run again keeps them.
#[tokio::test(start_paused = true)]
async fn c3_several_ports_from_outside() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c3");
    let mut sent = 0;
    // Three messages, the end, and three more when the flow is run again.
    let left = flow.add(
        "left",
        source(move || {
            sent += 1;
            ready(Ok((sent % 4 != 0).then_some(sent)))
        }),
    );
    let right = flow.add("right", source(|| ready(Ok(None::<u32>))));
    let take = flow.add("take", Both(notes.clone()));
    let take = take.clone().when(sum([take.left.into(), take.right.into()], 3));
    flow.connect(left.output, take.left);
    flow.connect(right.output, take.right);
    for _ in 0..2 {
        within(flow.run()).await.unwrap();
    }
    assert_eq!(notes.all(), [(0, vec![1, 2, 3]), (0, vec![5, 6, 7])]);
}

#[derive(Ports)]
struct TwoOutPorts {
    #[output(room = 2, capacity = 3)]
    output: Output<u32>,
}

/// Each run sends two messages and never waits for room.
#[tokio::test(start_paused = true)]
async fn c4_room_for_so_many_messages() {
    for from_outside in [false, true] {
        let notes = Notes::begin();
        let noted = notes.clone();
        let mut flow = Flow::new("c4");
        let output = if from_outside {
            let send = flow.add(
                "send",
                runs(move |ports: &mut SourcePorts<u32>, _cx: &mut Cx| {
                    noted.add(());
                    ports.output.try_send(1)?;
                    ports.output.try_send(2)?;
                    Ok(())
                }),
            );
            send.clone().when(room(send.output, 2)).when(count(4)).output
        } else {
            let send = flow.add(
                "send",
                runs(move |ports: &mut TwoOutPorts, _cx: &mut Cx| {
                    noted.add(());
                    ports.output.try_send(1)?;
                    ports.output.try_send(2)?;
                    Ok(())
                }),
            );
            send.clone().when(count(4)).output
        };
        let take =
            flow.add("take", runs_for(10, |ports: &mut SinkPorts<u32>, _cx: &mut Cx| ports.input.take().map(drop)));
        flow.connect_with(output, take.input, HubOptions::bounded(3));
        let report = within(flow.run()).await.unwrap();
        assert_eq!(notes.times(), [0, 0, 20, 40]);
        assert_eq!(report.operator("take").unwrap().runs, 8);
    }
}

#[derive(Ports)]
struct OptionalOutPorts {
    #[output(optional)]
    output: Output<u32>,
}

/// With an optional output the operator runs with or without room, and `try_send` returns what does not fit.
#[tokio::test(start_paused = true)]
async fn c4_an_optional_output_is_not_waited_for() {
    let notes = Notes::begin();
    let noted = notes.clone();
    let mut flow = Flow::new("c4");
    let mut number = 0;
    let send = flow.add(
        "send",
        runs(move |ports: &mut OptionalOutPorts, _cx: &mut Cx| {
            number += 1;
            noted.add((number, fits(ports.output.try_send(number))?));
            Ok(())
        }),
    );
    let send = send.clone().when(every(ms(4))).when(count(6));
    let seen = shared();
    let taken = seen.clone();
    let take = flow.add(
        "take",
        runs_for(10, move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
            lock(&taken).push(ports.input.take()?);
            Ok(())
        }),
    );
    flow.connect(send.output, take.input);
    within(flow.run()).await.unwrap();
    let wanted = [(0, (1, true)), (4, (2, true)), (8, (3, false)), (12, (4, true)), (16, (5, false)), (20, (6, true))];
    assert_eq!(notes.all(), wanted);
    assert_eq!(*lock(&seen), [1, 2, 4, 6]);
}
