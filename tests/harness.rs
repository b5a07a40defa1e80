//! The harness for tests of one operator, `wakeline::test`.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::{clock::ms, *};
use futures::FutureExt;
use tokio::time::Instant;
use wakeline::{
    Stream,
    condition::{Gate, at_least, every},
    device::Faults,
    hub::MergePolicy,
    operator::{LocalOperator, Reply, concurrent},
    prelude::*,
    test::{self, Stepped},
};

#[derive(Ports)]
struct AddPorts {
    #[input]
    left: Input<Envelope<u32>>,
    #[input]
    right: Input<u32>,
    #[output(envelope_bytes = 64)]
    sums: Output<Envelope<u32>>,
    /// Never used.
    #[output(optional)]
    _rest: Output<String>,
}

/// Adds one to the left and then, by another kernel, as often as the right says.
struct Add;

impl Operator for Add {
    type Ports = AddPorts;

    async fn compute(&mut self, ports: &mut AddPorts, cx: &mut Cx) -> Result<()> {
        let (left, right) = (ports.left.take()?, ports.right.take()?);
        let mut sums = ports.sums.blank().await?;
        sums.set_len(left.len())?;
        add_one::launch(cx.stream()?, &left, &mut sums)?;
        for _ in 1..right {
            increment::launch(cx.stream()?, &mut sums)?;
        }
        ports.sums.send(sums).await?;
        Ok(())
    }
}

on_both!(envelopes_are_sent_as_slices_and_read_back_on_the_host, async |device: Device| {
    let mut add = test::operator(Add).on(&device).start().unwrap();
    add.input(add.left).send_slice(&[1, 2, 3]).unwrap();
    assert!(add.step().await.unwrap().is_waiting(), "one input lacks a message");
    add.input(add.right).metadata("frame", 7_u64).send(2).unwrap();
    let sums = add.output(add.sums).recv().await.unwrap().unwrap();
    assert_eq!(sums.as_slice().unwrap(), [3, 4, 5], "the data is there");
    assert_eq!(sums.metadata().get::<u64>("frame"), Some(&7));
    assert_eq!(sums.metadata().names().collect::<Vec<_>>(), ["frame"]);
    assert_eq!(add.runs(), 1);

    // Without metadata, and without data.
    add.input(add.left).send_slice(&[]).unwrap();
    add.input(add.right).send(1).unwrap();
    let empty = add.output(add.sums).recv().await.unwrap().unwrap();
    assert!(empty.is_empty() && empty.metadata().is_empty());
    let report = add.finish().await.unwrap();
    assert_eq!(report.operator("Add").unwrap().runs, 2);
});

// The output's hub has two blank envelopes: the test may keep any number.
on_both!(a_test_keeps_more_envelopes_than_the_hub_has, async |device: Device| {
    let mut add = test::operator(Add).on(&device).start().unwrap();
    for number in 0..20 {
        add.input(add.left).send_slice(&[number]).unwrap();
        add.input(add.right).send(1).unwrap();
    }
    assert!(add.settle().await.unwrap().is_waiting());
    assert_eq!(add.runs(), 20);
    let sums = add.output(add.sums).drain().unwrap();
    let sums: Vec<_> = sums.iter().map(|sum| sum.as_slice().unwrap()[0]).collect();
    assert_eq!(sums, (1..=20).collect::<Vec<_>>());
    assert!(add.output(add.sums).try_recv().unwrap().is_none());
    add.finish().await.unwrap();
});

#[derive(Message)]
struct Frame {
    number: u32,
    #[envelope]
    pixels: Envelope<u32>,
    #[envelope]
    mask: Envelope<u32>,
}

fn frame(number: u32) -> Frame {
    let envelope = |data: Vec<u32>| Envelope::from(Buffer::wrap(data).unwrap().0);
    Frame { number, pixels: envelope(vec![number; 4]), mask: envelope(vec![0; 2]) }
}

struct Brighten;

impl Operator for Brighten {
    type Ports = MapPorts<Frame, Frame>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut frame = ports.input.take()?;
        increment::launch(cx.stream()?, &mut frame.pixels)?;
        ports.output.send(frame).await?;
        Ok(())
    }
}

on_both!(the_envelopes_of_a_message_are_copied_to_the_device_and_back, async |device: Device| {
    let mut brighten = test::operator_named("brighten", Brighten).on(&device).start().unwrap();
    for number in [1, 2] {
        brighten.input(brighten.input).send(frame(number)).unwrap();
    }
    // One that is on the device already.
    let stream = Stream::new(&device).unwrap();
    let there = || Envelope::from(Buffer::from_slice(&stream, &[3; 4]).unwrap());
    brighten.input(brighten.input).send(Frame { number: 3, pixels: there(), mask: there() }).unwrap();
    for number in 1..=3 {
        let frame = brighten.output(brighten.output).recv().await.unwrap().unwrap().into_inner();
        assert_eq!(frame.number, number);
        assert_eq!(frame.pixels.as_slice().unwrap(), [number + 1; 4]);
        assert!(frame.mask.is_host());
        assert_eq!(brighten.runs(), u64::from(number), "no run ahead of the test");
    }
    brighten.finish().await.unwrap();
});

/// Sends host memory, though it works on a device.
struct Download;

impl Operator for Download {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let there = ports.input.take()?;
        let stream = cx.stream()?;
        let mut here = Buffer::pinned(stream.device(), there.len())?;
        stream.copy(&there, &mut here)?;
        ports.output.send(here.into()).await?;
        Ok(())
    }
}

on_both!(an_output_may_send_envelopes_from_anywhere, async |device: Device| {
    let mut download = test::operator(Download).on(&device).start().unwrap();
    download.input(download.input).send_slice(&[4, 5]).unwrap();
    let here = download.output(download.output).recv().await.unwrap().unwrap();
    assert_eq!(here.as_slice().unwrap(), [4, 5]);
    download.finish().await.unwrap();

    // On the host, with an envelope of a device.
    let mut pass = test::operator(pass_on::<Envelope<u32>>()).start().unwrap();
    let stream = Stream::new(&device).unwrap();
    pass.input(pass.input).send(Buffer::from_slice(&stream, &[6, 7]).unwrap().into()).unwrap();
    let here = pass.output(pass.output).recv().await.unwrap().unwrap();
    assert_eq!(here.as_slice().unwrap(), [6, 7]);
    pass.finish().await.unwrap();
});

#[derive(Ports)]
struct SumPorts {
    #[input]
    parts: Inputs<u32>,
    #[input(optional)]
    factor: Input<u32>,
    #[output]
    sums: Output<u32>,
}

struct Sum {
    factor: u32,
}

impl Operator for Sum {
    type Ports = SumPorts;

    async fn compute(&mut self, ports: &mut SumPorts, _cx: &mut Cx) -> Result<()> {
        if let Some(factor) = ports.factor.try_take()? {
            self.factor = factor;
        }
        let sum: u32 = ports.parts.take()?.sum();
        ports.sums.send(sum * self.factor).await?;
        Ok(())
    }
}

#[tokio::test]
async fn an_input_with_several_writers_and_an_optional_one() {
    let sum = test::operator(Sum { factor: 1 });
    let parts = sum.parts;
    let mut sum = sum.writers(parts, 3).start().unwrap();
    for (writer, part) in [(0, 1), (2, 3)] {
        sum.input(parts).writer(writer).send(part).unwrap();
    }
    let Stepped::Waits(waits) = sum.step().await.unwrap() else { panic!("writer 1 has sent nothing") };
    assert!(waits[0].contains("test:parts:1.output -> Sum.parts"), "{waits:?}");
    sum.input(parts).writer(1).send(2).unwrap();
    assert_eq!(*sum.output(sum.sums).recv().await.unwrap().unwrap(), 6);

    sum.input(sum.factor).send(10).unwrap();
    (0..3).for_each(|writer| sum.input(parts).writer(writer).send(1).unwrap());
    assert_eq!(*sum.output(sum.sums).recv().await.unwrap().unwrap(), 30);
    let error = sum.input(parts).writer(3).send(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("input `parts` has no writer 3, as it has 3"), "{error}");

    // An ended writer no longer counts.
    sum.input(parts).writer(0).close();
    (1..3).for_each(|writer| sum.input(parts).writer(writer).send(2).unwrap());
    assert_eq!(*sum.output(sum.sums).recv().await.unwrap().unwrap(), 40);
    sum.finish().await.unwrap();
}

#[tokio::test]
async fn conditions_and_settings_are_those_of_a_flow() {
    let gate = Gate::open();
    let sum = test::operator(sink(async |_: u32| Ok(())));
    let numbers = sum.input;
    let sum = sum.when(gate.clone()).when(at_least(numbers, 2)).with(|sum| sum.merge_metadata(MergePolicy::Raise));
    let mut sum = sum.input_hub(numbers, HubOptions::bounded(3)).start().unwrap();
    sum.input(numbers).send(1).unwrap();
    assert!(sum.step().await.unwrap().is_waiting());
    sum.input(numbers).send(2).unwrap();
    assert_eq!(sum.step().await.unwrap(), Stepped::Ran(1));
    assert!(sum.step().await.unwrap().is_waiting(), "the other message is alone");
    sum.input(numbers).send(3).unwrap();

    // A gate is opened from outside: `step` waits for it.
    gate.pause();
    assert!(sum.step().now_or_never().is_none());
    let opens = gate.clone();
    tokio::spawn(async move { opens.resume() });
    assert_eq!(within(sum.step()).await.unwrap(), Stepped::Ran(2));
    assert_eq!(sum.runs(), 2);
}

/// A run begins only in a call of the harness, and each call makes one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operator_runs_only_while_the_test_waits_for_it() {
    let seen = shared();
    let mut keep = test::operator(keep(&seen)).start().unwrap();
    (0..5).for_each(|number| keep.input(keep.input).send(number).unwrap());
    for run in 1..=3 {
        assert_eq!(keep.step().await.unwrap(), Stepped::Ran(run));
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(lock(&seen).len() as u64, run);
        assert_eq!(keep.runs(), run);
    }
    keep.finish().await.unwrap();
    assert_eq!(*lock(&seen), [0, 1, 2, 3, 4], "what was sent is processed");
    assert_eq!(keep.step().await.unwrap(), Stepped::Ended);
    assert!(keep.input(keep.input).send(5).unwrap_err().is_closed());
}

#[derive(Ports)]
struct PairPorts {
    #[input]
    numbers: Input<u32>,
    #[output]
    sums: Output<u32>,
}

/// Waits for its second number in the middle of a run.
struct Pair;

impl Operator for Pair {
    type Ports = PairPorts;

    async fn compute(&mut self, ports: &mut PairPorts, _cx: &mut Cx) -> Result<()> {
        let first = ports.numbers.take()?;
        let second = ports.numbers.recv().await?.ok_or("no second number")?;
        for _ in 0..3 {
            ports.sums.send(first + second).await?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_run_that_waits_in_its_middle_goes_on_in_the_next_call() {
    let mut pair = test::operator(Pair).start().unwrap();
    pair.input(pair.numbers).send(1).unwrap();
    for _ in 0..2 {
        let Stepped::Waits(waits) = pair.step().await.unwrap() else { panic!("it has one number") };
        assert_eq!(waits, ["a message in hub `test:numbers.output -> Pair.numbers`"]);
        assert_eq!((pair.runs(), pair.status().running), (0, true));
    }
    pair.input(pair.numbers).send(2).unwrap();
    assert_eq!(pair.step().await.unwrap(), Stepped::Ran(1));
    let sums = pair.output(pair.sums).drain().unwrap();
    assert_eq!(sums.iter().map(|sum| **sum).collect::<Vec<_>>(), [3; 3], "all that the run has sent is there");

    pair.input(pair.numbers).send(3).unwrap();
    let error = pair.finish().await.unwrap_err();
    assert_eq!(error.to_string(), "operator `Pair`: no second number");
    assert_eq!(error.report().unwrap().operator("Pair").unwrap().runs, 2);
}

#[tokio::test]
async fn a_call_that_cannot_succeed_says_what_the_operator_waits_for() {
    let mut pair = test::operator_named("pair", Pair).start().unwrap();
    let error = pair.output(pair.sums).recv().await.unwrap_err();
    assert!(error.is_stalled());
    let wanted = "output `sums` has no message, and operator `pair` waits for a message in hub \
                  `test:numbers.output -> pair.numbers`: send to its inputs, `.input(..).send(..)`, or end them, \
                  `.input(..).close()`";
    assert!(error.to_string().ends_with(wanted), "{error}");
    // It is no failure of the operator.
    (1..=2).for_each(|number| pair.input(pair.numbers).send(number).unwrap());
    assert_eq!(*pair.output(pair.sums).recv().await.unwrap().unwrap(), 3);

    // Nothing opens this gate.
    let gate = Gate::open();
    gate.pause();
    let mut pair = test::operator_named("pair", Pair).when(gate.clone()).timeout(ms(20)).start().unwrap();
    pair.input(pair.numbers).send(1).unwrap();
    for _ in 0..2 {
        let error = pair.step().await.unwrap_err();
        assert!(error.is_stalled());
        let text = error.to_string();
        assert!(
            text.contains("no step within 20ms: operator `pair` waits for its gate to be resumed; let that"),
            "{text}"
        );
        assert!(text.contains("`gate.resume()`") && !text.contains("start_paused"), "it is no test of time: {text}");
    }
    gate.resume();
    assert!(pair.step().await.unwrap().is_waiting(), "it has begun, and has one number");
    pair.input(pair.numbers).send(2).unwrap();
    assert_eq!(pair.step().await.unwrap(), Stepped::Ran(1));
    assert_eq!(pair.output(pair.sums).drain().unwrap().len(), 3);

    // Nothing can open it any more: no message would help.
    gate.pause();
    drop(gate);
    pair.input(pair.numbers).send(3).unwrap();
    let text = pair.output(pair.sums).recv().await.unwrap_err().to_string();
    let wanted =
        "operator `pair` waits for its gate to be resumed: the test has to act on that: for example, resume a gate";
    assert!(text.contains(wanted) && !text.contains(".send(..)"), "{text}");
}

/// Answers each queued word but those that are abandoned, with an error for an empty one. It drops `drop`, keeps `keep`, and
/// answers two words beginning with `+` by one message.
struct Answers(Vec<Reply>);

#[derive(Ports)]
struct AnswersPorts {
    #[input]
    words: Input<String>,
    #[output]
    answers: Output<String>,
    #[output]
    _others: Output<String>,
}

impl Operator for Answers {
    type Ports = AnswersPorts;

    async fn compute(&mut self, ports: &mut AnswersPorts, cx: &mut Cx) -> Result<()> {
        let words: Vec<String> = ports.words.take_batch()?.collect();
        if words[0].starts_with('+') {
            ports.answers.send(words.concat()).await?;
            return Ok(());
        }
        // The last one first.
        for (word, reply) in words.into_iter().zip(cx.take_replies()).rev() {
            match &*word {
                "" => reply.fail(Error::new(ErrorKind::Usage, "no word")),
                "drop" => drop(reply),
                "keep" => self.0.push(reply),
                _ if reply.is_abandoned() => {}
                word => ports.answers.send_for(reply, word.to_uppercase()).await?,
            }
        }
        Ok(())
    }
}

fn answers() -> test::Harness<AnswersPorts> {
    let answers = test::operator_named("answers", Answers(Vec::new()));
    let words = answers.words;
    answers.input_hub(words, HubOptions::bounded(8)).start().unwrap()
}

#[tokio::test]
async fn each_request_gets_its_own_answer_or_its_own_error() {
    let mut all = answers();
    let words = ["one", "", "drop", "two", "three"];
    let [one, none, dropped, two, gives_up] = words.map(|word| all.input(all.words).request(word.into()).unwrap());
    drop(gives_up);
    assert_eq!(*all.output(all.answers).answer(&one).await.unwrap(), "ONE");
    let error = all.output(all.answers).answer(&none).await.unwrap_err();
    assert_eq!((error.kind(), &*error.to_string()), (ErrorKind::Usage, "invalid use: no word"), "unchanged");
    let error = all.output(all.answers).answer(&dropped).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unanswered);
    assert!(error.to_string().contains("operator `answers`") && error.to_string().contains("`answers`"), "{error}");
    assert_eq!(*all.output(all.answers).answer(&two).await.unwrap(), "TWO");
    let error = all.output(all.answers).answer(&two).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("was received before"), "{error}");
    assert!(all.output(all.answers).drain().unwrap().is_empty(), "the word that was given up has no answer");

    // With metadata, and beside a message without a caller, which `recv` gets.
    all.input(all.words).send("plain".into()).unwrap();
    let four = all.input(all.words).metadata("number", 4_u32).request("four".into()).unwrap();
    let answer = all.output(all.answers).answer(&four).await.unwrap();
    assert_eq!((&**answer, answer.metadata().get::<u32>("number")), ("FOUR", Some(&4)));
    assert_eq!(*all.output(all.answers).recv().await.unwrap().unwrap(), "PLAIN");
    all.finish().await.unwrap();
}

#[tokio::test]
async fn a_request_that_no_message_answers_says_why() {
    let mut all = answers();
    // Kept by the operator: another message might make it answer.
    let kept = all.input(all.words).request("keep".into()).unwrap();
    let error = all.output(all.answers).answer(&kept).await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    assert!(error.to_string().contains("output `answers` has no answer to this request, and operator `answers` waits"));
    // By one message.
    let [left, right] = ["+left", "+right"].map(|word| all.input(all.words).request(word.into()).unwrap());
    for request in [&left, &right] {
        let error = all.output(all.answers).answer(request).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("answers 2 requests") && error.to_string().contains("`cx.take_replies()`"));
    }
    assert_eq!(*all.output(all.answers).recv().await.unwrap().unwrap(), "+left+right", "it is there");
    // At another output.
    let one = all.input(all.words).request("one".into()).unwrap();
    let error = all.output(all._others).answer(&one).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Unanswered && error.to_string().contains("`_others`"), "{error}");
    // Kept until the operator has ended.
    all.input(all.words).close();
    let error = all.output(all.answers).answer(&kept).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unanswered, "{error}");
    assert!(all.input(all.words).request("late".into()).unwrap_err().is_closed());
}

/// As behind a service: the failure of the run in which it has dropped them.
#[tokio::test]
async fn a_request_that_a_failing_run_drops_gets_the_failure() {
    struct DropsThenFails(Vec<Reply>);

    impl Operator for DropsThenFails {
        type Ports = MapPorts<u32, u32>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let number = ports.input.take()?;
            if number == 0 {
                self.0.extend(cx.take_replies());
                return Ok(());
            }
            self.0.clear();
            for number in 0..number {
                ports.output.send(number).await?;
                tokio::task::yield_now().await;
            }
            Err(Error::other("planned"))
        }
    }

    for number in 1..4 {
        let mut fails = test::operator(DropsThenFails(Vec::new())).start().unwrap();
        let request = fails.input(fails.input).request(0).unwrap();
        fails.step().await.unwrap();
        fails.input(fails.input).send(number).unwrap();
        let error = fails.output(fails.output).answer(&request).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Operator, "{error}");
    }
}

#[tokio::test]
async fn an_answer_that_was_received_as_a_message_is_no_longer_there() {
    let mut double = test::operator(map(async |number: u32| Ok(2 * number))).start().unwrap();
    let request = double.input(double.input).request(21).unwrap();
    assert_eq!(*double.output(double.output).recv().await.unwrap().unwrap(), 42);
    let error = double.output(double.output).answer(&request).await.unwrap_err();
    assert!(error.to_string().contains("one that `recv` or `drain` has returned is no longer there"), "{error}");
}

/// An operator that is not `Send`.
struct Tally(Rc<RefCell<Vec<u32>>>);

impl LocalOperator for Tally {
    type Ports = MapPorts<u32, usize>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        self.0.borrow_mut().push(ports.input.take()?);
        let len = self.0.borrow().len();
        Ok(ports.output.send(len).await?)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_that_stays_on_its_thread() {
    let outside = test::local_operator(Tally(Rc::default())).start().unwrap_err();
    assert!(outside.kind() == ErrorKind::Usage && outside.to_string().contains("LocalSet"), "{outside}");
    let test = async {
        let seen = Rc::default();
        let mut tally = test::local_operator(Tally(Rc::clone(&seen))).start().unwrap();
        [7, 8].into_iter().for_each(|number| tally.input(tally.input).send(number).unwrap());
        assert_eq!(tally.step().await.unwrap(), Stepped::Ran(1));
        assert_eq!(*seen.borrow(), [7]);
        assert_eq!(**tally.output(tally.output).drain().unwrap().last().unwrap(), 1);
        let report = tally.finish().await.unwrap();
        assert_eq!(report.operator("Tally").unwrap().runs, 2);
        assert_eq!(*seen.borrow(), [7, 8]);
    };
    tokio::task::LocalSet::new().run_until(test).await;
}

/// The limit is one of real time, where time is virtual, too.
#[tokio::test(start_paused = true)]
async fn the_timeout_is_real_time() {
    let (begun, virtual_begun) = (std::time::Instant::now(), Instant::now());
    let gate = Gate::open();
    gate.pause();
    let mut waits = test::operator(sink(async |_: u32| Ok(()))).when(gate.clone()).timeout(ms(20)).start().unwrap();
    assert!(waits.step().await.unwrap_err().is_stalled());
    assert!(begun.elapsed() >= ms(20));
    gate.resume();
    let day = Duration::from_secs(24 * 60 * 60);
    let mut daily = test::operator(source(async || Ok(Some(1)))).when(every(day)).timeout(ms(5000)).start().unwrap();
    for day in 1..=1000 {
        assert_eq!(daily.step().await.unwrap(), Stepped::Ran(day));
    }
    assert_eq!(virtual_begun.elapsed().as_secs() / day.as_secs(), 999);
}

#[tokio::test(start_paused = true)]
async fn time_passes_in_step_and_stands_in_settle() {
    let begun = Instant::now();
    let ticks = pass_on::<u32>();
    let mut ticks = test::operator(ticks).when(every(ms(10))).start().unwrap();
    (0..4).for_each(|number| ticks.input(ticks.input).send(number).unwrap());
    assert!(ticks.settle().await.unwrap().is_waiting());
    assert_eq!((ticks.runs(), begun.elapsed()), (1, ms(0)));
    tokio::time::advance(ms(10)).await;
    assert!(ticks.settle().await.unwrap().is_waiting());
    assert_eq!((ticks.runs(), begun.elapsed()), (2, ms(10)));
    assert_eq!(ticks.step().await.unwrap(), Stepped::Ran(3));
    assert_eq!(begun.elapsed(), ms(20));
    // The call may be dropped.
    assert!(tokio::time::timeout(ms(9), ticks.step()).await.is_err());
    assert_eq!(ticks.step().await.unwrap(), Stepped::Ran(4));
    assert_eq!((begun.elapsed(), ticks.output(ticks.output).drain().unwrap().len()), (ms(30), 4));
    ticks.finish().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn each_seed_decides_a_run_and_a_failure_names_its_seed() {
    let run = async |simulation: &wakeline::device::Simulation| {
        let device = Device::simulated(simulation, Emulated::new()).race_checked();
        let mut add = test::operator(Add).on(&device).start()?;
        for number in 0..3 {
            add.input(add.left).send_slice(&[number; 3])?;
            add.input(add.right).send(2)?;
            let sums = add.output(add.sums).recv().await?.expect("one for each");
            assert_eq!(sums.as_slice()?, [number + 2; 3]);
        }
        add.finish().await?;
        Ok::<_, Error>(())
    };
    let logs = shared();
    for seeds in [0..10, 0..10] {
        test::simulate(seeds, async |simulation| {
            run(simulation).await?;
            lock(&logs).push(simulation.log());
            Ok(())
        })
        .await
        .unwrap();
    }
    let logs = lock(&logs).clone();
    assert_eq!(logs[..10], logs[10..], "a seed always decides the same run");
    assert!(logs[1..10].iter().any(|log| *log != logs[0]), "another seed decides another one");

    let fails = async |simulation: &wakeline::device::Simulation| match simulation.seed() {
        17 => Err("not this one".into()),
        _ => Ok(()),
    };
    let error = test::simulate(0..100, fails).await.unwrap_err();
    assert_eq!(error.to_string(), "seed 17: not this one");
    let panics = test::simulate([3], async |_| panic!("as the test does"));
    let panic = std::panic::AssertUnwindSafe(panics).catch_unwind().await.unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"as the test does"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planned_faults_fail_the_call_in_which_they_show() {
    let faults = Faults::new().trap_kernel("add_one", 2);
    let device = Device::emulated(Emulated::new().faults(faults)).race_checked();
    let mut add = test::operator(Add).on(&device).start().unwrap();
    let send = |add: &test::Harness<AddPorts>| {
        add.input(add.left).send_slice(&[1])?;
        add.input(add.right).send(1)
    };
    send(&add).unwrap();
    assert!(add.output(add.sums).recv().await.unwrap().is_some());
    send(&add).unwrap();
    let error = add.output(add.sums).recv().await.unwrap_err();
    assert!(error.is_device_lost());
    assert!(error.to_string().contains("kernel `add_one` on stream `Add`"), "{error}");
    // It is the error of each later call.
    assert_eq!(send(&add).unwrap_err().kind(), ErrorKind::DeviceLost);
    for error in [add.step().await.unwrap_err(), add.settle().await.unwrap_err(), add.finish().await.unwrap_err()] {
        assert!(error.to_string().contains("`add_one`"), "{error}");
    }

    // Without an output, `finish` finds it.
    let device = Device::emulated(Emulated::new().faults(Faults::new().trap_kernel("increment", 1)));
    let mut enqueue = test::operator(Enqueue).on(&device).start().unwrap();
    enqueue.input(enqueue.input).send_slice(&[1]).unwrap();
    let _ = enqueue.step().await;
    assert!(enqueue.finish().await.unwrap_err().is_device_lost());

    let allocates = Device::emulated(Emulated::new().faults(Faults::new().fail_alloc(1)));
    let error = match test::operator(Add).on(&allocates).start() {
        Err(error) => error,
        Ok(mut add) => add.step().await.unwrap_err(),
    };
    assert!(error.is_out_of_memory(), "{error}");
}

struct Enqueue;

impl Operator for Enqueue {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        increment::launch(cx.stream()?, &mut ports.input.take()?)
    }
}

#[tokio::test]
async fn a_panic_and_a_mistake_in_the_setup_name_the_operator() {
    let mut fails = test::operator_named("fails", map(async |_: u32| -> Result<u32> { panic!("on purpose") }));
    fails = fails.timeout(Duration::MAX);
    let mut fails = fails.start().unwrap();
    fails.input(fails.input).send(1).unwrap();
    let error = fails.output(fails.output).recv().await.unwrap_err();
    assert!(error.to_string().contains("operator `fails`") && error.to_string().contains("on purpose"), "{error}");

    let error = test::operator(Peeks).start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert!(error.to_string().contains("port `points` of operator `Peeks` is not linked"), "{error}");

    let sum = test::operator(Sum { factor: 1 });
    let (none, many) = (test::operator(Sum { factor: 1 }), sum.parts);
    let error = sum.writers(many, usize::MAX).start().unwrap_err();
    assert!(error.to_string().contains("input `parts` of operator `Sum` has more than 65536 writers"), "{error}");
    let parts = none.parts;
    let error = none.writers(parts, 0).start().unwrap_err();
    assert!(error.to_string().contains("input `Sum.parts` is not connected"), "{error}");
    let twice = test::operator_named("twice", pass_on::<u32>());
    let input = twice.input;
    let error = twice.writers(input, 2).start().unwrap_err();
    assert!(error.to_string().contains("port `twice.input` is connected more than once"), "{error}");

    // A port of another operator.
    let mut one = test::operator_named("one", pass_on::<u32>()).start().unwrap();
    let other = test::operator_named("other", pass_on::<u32>()).start().unwrap();
    let errors = [one.input(other.input).send(1).unwrap_err(), one.output(other.output).recv().await.unwrap_err()];
    for (error, port) in errors.iter().zip(["input", "output"]) {
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(
            error.to_string().contains(&format!("port `{port}` belongs to another operator than `one`")),
            "{error}"
        );
    }
}

#[derive(Ports)]
struct PeeksPorts {
    #[peek]
    points: Peek<u32>,
    #[input]
    rounds: Input<u32>,
    #[output]
    sums: Output<u32>,
}

struct Peeks;

impl Operator for Peeks {
    type Ports = PeeksPorts;

    async fn compute(&mut self, ports: &mut PeeksPorts, _cx: &mut Cx) -> Result<()> {
        let factor = ports.rounds.take()?;
        let sum: u32 = ports.points.get()?.read().await?.iter().sum();
        ports.sums.send(factor * sum).await?;
        Ok(())
    }
}

#[tokio::test]
async fn a_port_is_linked_to_the_tests_hub_of_chunks() {
    let points = ChunkHub::<u32>::builder("points").elements(4).host_envelopes(2).build().unwrap();
    let producer = points.produce(&Device::host()).unwrap();
    let peeks = test::operator(Peeks);
    let port = peeks.points;
    let mut peeks = peeks.link(port, &points).start().unwrap();
    peeks.input(peeks.rounds).send(2).unwrap();
    let Stepped::Waits(waits) = peeks.step().await.unwrap() else { panic!("there is no chunk") };
    assert!(waits.iter().any(|wait| wait.contains("`points`")), "{waits:?}");
    let mut producer = producer;
    producer.with(async |blank| blank.fill_from(&[1, 2, 3]).await).await.unwrap();
    assert_eq!(*peeks.output(peeks.sums).recv().await.unwrap().unwrap(), 12);
    peeks.input(peeks.rounds).send(3).unwrap();
    assert_eq!(*peeks.output(peeks.sums).recv().await.unwrap().unwrap(), 18);
    drop(producer);
    peeks.finish().await.unwrap();
}

/// Operators that do not run in the usual way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sources_own_loops_own_threads_and_concurrent_runs() {
    // A source never waits.
    let mut numbers = 0..;
    let mut count = test::operator(source(move || std::future::ready(Ok(numbers.next())))).start().unwrap();
    for number in 0..3 {
        assert_eq!(*count.output(count.output).recv().await.unwrap().unwrap(), number);
        assert_eq!(count.runs(), number + 1);
    }
    let error = within(count.settle()).await.unwrap_err();
    assert!(error.to_string().contains("has run 10000 times"), "{error}");
    within(count.finish()).await.unwrap();

    // A loop of its own.
    let doubles = task(|ports: &mut MapPorts<u32, u32>, _| {
        async move {
            while let Some(number) = ports.input.recv().await? {
                ports.output.send(2 * number).await?;
            }
            Ok(())
        }
        .boxed()
    });
    let mut doubles = test::operator(doubles).start().unwrap();
    for number in 1..100 {
        doubles.input(doubles.input).send(number).unwrap();
        assert_eq!(*within(doubles.output(doubles.output).recv()).await.unwrap().unwrap(), 2 * number);
    }
    assert!(within(doubles.output(doubles.output).recv()).await.unwrap_err().is_stalled());
    within(doubles.finish()).await.unwrap();
    assert!(doubles.output(doubles.output).recv().await.unwrap().is_none());

    let mut apart = test::operator(pass_on::<u32>()).with(|pass| pass.on_own_thread()).start().unwrap();
    apart.input(apart.input).send(4).unwrap();
    assert_eq!(*within(apart.output(apart.output).recv()).await.unwrap().unwrap(), 4);
    within(apart.finish()).await.unwrap();

    let mut several = test::operator(concurrent(4, map(async |number: u32| Ok(number)))).start().unwrap();
    (0..16).for_each(|number| several.input(several.input).send(number).unwrap());
    for number in 0..16 {
        assert_eq!(*within(several.output(several.output).recv()).await.unwrap().unwrap(), number);
    }
    within(several.finish()).await.unwrap();
}

/// Waits for nothing else than its inputs' end, at a port that need not have messages.
#[tokio::test(start_paused = true)]
async fn finish_ends_an_operator_that_would_go_on_for_ever() {
    #[derive(Ports)]
    struct PollPorts {
        #[input(optional)]
        settings: Input<u32>,
    }

    struct Poll(Shared<u32>);

    impl Operator for Poll {
        type Ports = PollPorts;

        async fn compute(&mut self, ports: &mut PollPorts, _cx: &mut Cx) -> Result<()> {
            lock(&self.0).extend(ports.settings.try_take()?);
            Ok(())
        }
    }

    let seen = shared();
    let mut poll = test::operator(Poll(seen.clone())).when(every(ms(10))).start().unwrap();
    (1..=3).for_each(|number| poll.input(poll.settings).send(number).unwrap());
    assert_eq!(poll.step().await.unwrap(), Stepped::Ran(1));
    let report = within(poll.finish()).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2, 3]);
    assert!(report.operator("Poll").unwrap().runs <= 5, "{report}");
}

#[derive(Ports)]
struct BurstPorts {
    #[output]
    numbers: Output<u64>,
}

/// Sends this number of messages in each run.
struct Burst(u64);

impl Operator for Burst {
    type Ports = BurstPorts;

    async fn compute(&mut self, ports: &mut BurstPorts, _cx: &mut Cx) -> Result<()> {
        for number in 0..self.0 {
            ports.numbers.send(number).await?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_message_is_received_before_its_run_ends() {
    let mut burst = test::operator(Burst(200_000)).start().unwrap();
    for number in 0..100 {
        assert_eq!(*burst.output(burst.numbers).recv().await.unwrap().unwrap(), number);
    }
    assert_eq!((burst.runs(), burst.status().running), (0, true));

    // The run goes on in the next call.
    let mut burst = test::operator(Burst(100)).start().unwrap();
    assert_eq!(*burst.output(burst.numbers).recv().await.unwrap().unwrap(), 0);
    assert_eq!(burst.step().await.unwrap(), Stepped::Ran(1));
    assert_eq!(burst.output(burst.numbers).drain().unwrap().len(), 99);
}

#[tokio::test]
async fn a_run_that_sends_without_end_is_an_error() {
    let mut burst = test::operator(Burst(u64::MAX)).timeout(ms(200)).start().unwrap();
    for number in 0..3 {
        assert_eq!(*burst.output(burst.numbers).recv().await.unwrap().unwrap(), number);
    }
    for error in [burst.step().await.unwrap_err(), burst.settle().await.unwrap_err()] {
        assert!(error.is_stalled());
        assert!(error.to_string().contains("no step within 200ms: operator `Burst` "), "{error}");
        assert!(error.to_string().contains("if it sends without end, receive with `recv`"), "{error}");
    }
    assert!(burst.finish().await.unwrap_err().is_stalled());
}

/// A flow that ends by itself is fast: messages without end would use all memory within the timeout.
#[tokio::test]
async fn an_output_keeps_a_limited_number_of_messages() {
    let mut burst = test::operator(Burst(100_000)).timeout(ms(120_000)).start().unwrap();
    assert_eq!(*burst.output(burst.numbers).recv().await.unwrap().unwrap(), 0);
    let error = burst.finish().await.unwrap_err();
    let wanted = "output `numbers` keeps 65536 messages, the maximum: receive them";
    assert!(error.is_stalled() && error.to_string().contains(wanted), "{error}");
    let kept = burst.output(burst.numbers).drain().unwrap().len();
    assert_eq!(kept, 1 << 16, "{error}");
    // It has room again.
    burst.finish().await.unwrap();
    assert_eq!(1 + kept + burst.output(burst.numbers).drain().unwrap().len(), 100_000);
}

/// Latest values are read again and again.
#[tokio::test]
async fn an_input_may_have_a_hub_that_keeps_the_latest() {
    let sum = test::operator(Add2);
    let (left, right) = (sum.left, sum.right);
    let mut sum = sum.input_hub(right, HubOptions::latest()).start().unwrap();
    sum.input(right).send(10).unwrap();
    for number in 1..=3 {
        sum.input(left).send(number).unwrap();
        assert_eq!(*sum.output(sum.sums).recv().await.unwrap().unwrap(), number + 10);
    }
    sum.finish().await.unwrap();
}

#[derive(Ports)]
struct Add2Ports {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
    #[output]
    sums: Output<u32>,
}

struct Add2;

impl Operator for Add2 {
    type Ports = Add2Ports;

    async fn compute(&mut self, ports: &mut Add2Ports, _cx: &mut Cx) -> Result<()> {
        let sum = ports.left.take()? + ports.right.take()?;
        ports.sums.send(sum).await?;
        Ok(())
    }
}

/// A message's destructor and a log's writer are user code.
#[tokio::test]
async fn a_harness_that_is_dropped_stops_its_operator() {
    struct Stops(Arc<AtomicBool>);

    impl Operator for Stops {
        type Ports = SinkPorts<Counted>;

        async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
            Ok(())
        }

        async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
            self.0.store(true, Ordering::SeqCst);
            Ok(())
        }
    }

    let (stopped, census) = (Arc::new(AtomicBool::new(false)), Census::default());
    let mut stops = test::operator(Stops(stopped.clone())).log_to(std::io::sink()).start().unwrap();
    (0..3).for_each(|number| stops.input(stops.input).send(census.message(number)).unwrap());
    stops.step().await.unwrap();
    drop(stops);
    until("the operator is stopped", || stopped.load(Ordering::SeqCst) && census.live() == 0).await;
}
