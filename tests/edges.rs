//! Regression tests beside the scenarios: each was once a defect, found by review.

use std::{borrow::Cow, time::Duration};

use common::*;
use wakeline::{
    Inputs, Stream,
    condition::{Condition, Status, at_least, count},
    device::{Emulated, Faults, Simulation},
    prelude::*,
};

/// The last operator only enqueues, and nothing waits for its work; the work may still fail.
#[tokio::test]
async fn a_fault_in_the_last_work_of_a_flow_is_its_error() {
    let device = emulated_with(Emulated::new().faults(Faults::new().trap_kernel("increment", 3)));
    let mut flow = Flow::new("unheard");
    let produce = flow.add("produce", SendEach::new((0..3).map(|n| vec![n])));
    let last = flow.add(
        "last",
        task(|ports: &mut SinkPorts<Envelope<u32>>, cx: &mut Cx| {
            Box::pin(async move {
                while cx.ready(ports).await {
                    increment::launch(cx.stream()?, &mut ports.input.take()?)?;
                }
                Ok(())
            })
        }),
    );
    let last = last.on(&device);
    flow.connect_with(produce.output, last.input, HubOptions::default().envelope_bytes(4));
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_device_lost() && error.to_string().contains("`last`"), "{error}");
}

struct PanicsInDrop;

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        panic!("in a drop");
    }
}

/// A destructor that panics while its operator is aborted does not keep the flow from ending.
#[tokio::test]
async fn a_panic_in_a_drop_during_an_abort_does_not_hang_the_flow() {
    let mut flow = Flow::new("dropped");
    flow.add(
        "sleeper",
        task(|_: &mut (), _| {
            Box::pin(async {
                let _local = PanicsInDrop;
                std::future::pending().await
            })
        }),
    );
    flow.add("fails", task(|_: &mut (), _| Box::pin(async { Err("no more".into()) })));
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.to_string().contains("operator `fails`: no more"), "{error}");
}

struct PanicsAsAnOperator(PanicsInDrop);

impl Operator for PanicsAsAnOperator {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

/// An operator's destructor panics when the flow is dropped: the panic does not propagate, and the log names the
/// operator.
#[tokio::test]
async fn an_operator_whose_destructor_panics_under_run_is_named() {
    let warnings = Warnings::default();
    let _hearing = tracing::subscriber::set_default(warnings.clone());
    let mut flow = Flow::new("dropped");
    flow.add("first", PanicsAsAnOperator(PanicsInDrop));
    flow.add("second", PanicsAsAnOperator(PanicsInDrop));
    within(flow.run()).await.unwrap();
    drop(flow);
    let logged = warnings.messages();
    assert_eq!(logged.len(), 2, "{logged:?}");
    for (line, operator) in logged.iter().zip(["first", "second"]) {
        for part in [&format!("operator=\"{operator}\""), "flow=\"dropped\"", "panicked: in a drop", "`stop`"] {
            assert!(line.contains(part), "{part} in: {line}");
        }
    }
    // With `spawn` the flow fails with that panic.
    let mut flow = Flow::new("dropped");
    flow.add("first", PanicsAsAnOperator(PanicsInDrop));
    let error = within(flow.spawn().unwrap()).await.unwrap_err();
    assert_eq!(error.to_string(), "operator `first`: panicked: in a drop");
}

/// The element size does not divide the envelope size.
#[tokio::test]
async fn an_envelope_need_not_be_full_to_the_last_byte() {
    let seen = shared();
    let mut flow = Flow::new("slop");
    let produce = flow.add("produce", SendEach::new([vec![[1_u8, 2, 3], [4, 5, 6]]]));
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, consume.input, HubOptions::default().envelope_bytes(10));
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), [[[1, 2, 3], [4, 5, 6]]]);
}

#[tokio::test]
async fn allocating_more_than_the_host_has_is_an_error() {
    let error = Buffer::<u8>::pinned(&emulated(), 1 << 50).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
}

/// Switching the race checker on twice has the same effect as once.
#[tokio::test]
async fn a_device_is_checked_once() {
    let device = emulated().race_checked().race_checked();
    let stream = Stream::new(&device).unwrap();
    let buffer = Buffer::from_slice(&stream, &[1_u32, 2, 3]).unwrap();
    assert_eq!(within(buffer.to_vec(&stream)).await.unwrap(), [1, 2, 3]);
}

/// An endless operator without ports yields to other tasks, also under simulation.
#[tokio::test(start_paused = true)]
async fn an_operator_that_is_always_ready_can_be_stopped_under_simulation() {
    let simulation = Simulation::new(1);
    let outcome = simulation.run(async {
        let mut flow = Flow::new("busy");
        flow.add("busy", Busy);
        let running = flow.spawn()?;
        running.stop();
        running.await
    });
    assert!(outcome.await.unwrap().operator("busy").unwrap().runs < 100_000);
}

struct Busy;

impl Operator for Busy {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// A stream that waited only for finished work of another stream still depends on the device behind that stream.
#[tokio::test]
async fn a_lost_devices_work_is_not_reported_done_two_streams_away() {
    let first = emulated_with(Emulated::new().faults(Faults::new().trap_kernel("increment", 1)));
    let second = emulated();
    let (on_first, x, y) = (
        Stream::named(&first, "f").unwrap(),
        Stream::named(&second, "x").unwrap(),
        Stream::named(&second, "y").unwrap(),
    );
    let mut there = Buffer::from_slice(&on_first, &[1_u32; 16]).unwrap();
    let mut here = Buffer::<u32>::new(&second, 16).unwrap();
    increment::launch(&on_first, &mut there).unwrap();
    // If the fault is noticed at once, the call fails and no data can be read.
    if x.copy(&there, &mut here).is_err() {
        return;
    }
    assert!(within(x.completed()).await.unwrap_err().is_device_lost());
    assert!(within(here.to_vec(&y)).await.unwrap_err().is_device_lost(), "garbage");
}

#[derive(Message)]
struct Pair {
    #[envelope]
    both: Vec<Envelope<u32>>,
}

/// A message with several envelopes: each one is copied to the reader's device.
#[tokio::test]
async fn envelopes_in_a_vector_are_moved() {
    let device = emulated();
    let seen = shared();
    let sum = seen.clone();
    let mut flow = Flow::new("pairs");
    let produce = flow.add(
        "produce",
        task(|ports: &mut SourcePorts<Pair>, _| {
            Box::pin(async move {
                let of = |data: &[u32]| -> Result<Envelope<u32>> {
                    let mut buffer = Buffer::pinned(&Device::host(), data.len())?;
                    buffer.as_mut_slice()?.copy_from_slice(data);
                    Ok(buffer.into())
                };
                ports.output.send(Pair { both: vec![of(&[1, 2])?, of(&[3])?] }).await?;
                Ok(())
            })
        }),
    );
    let add = flow.add(
        "add",
        task(|ports: &mut MapPorts<Pair, Pair>, cx: &mut Cx| {
            Box::pin(async move {
                while cx.ready(ports).await {
                    let mut pair = ports.input.take()?;
                    for envelope in &mut pair.both {
                        increment::launch(cx.stream()?, envelope)?;
                    }
                    ports.output.send(pair).await?;
                }
                Ok(())
            })
        }),
    );
    let add = add.on(&device);
    let consume = flow.add(
        "consume",
        sink(move |pair: Pair| {
            let sum = sum.clone();
            async move {
                for envelope in &pair.both {
                    let data = envelope.read().await?;
                    lock(&sum).extend_from_slice(data);
                }
                Ok(())
            }
        }),
    );
    flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(8));
    flow.connect(add.output, consume.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [2, 3, 4]);
}

#[tokio::test]
async fn sizes_that_make_no_sense_are_reported_before_running() {
    let mut flow = Flow::new("sizes");
    let small = flow.add("small", SendEach::new([vec![1_u32]]));
    let all = flow.add("all", Collect(shared::<Vec<u32>>()));
    flow.connect_with(small.output, all.input, HubOptions::default().envelope_bytes(3));
    let plain = flow.add("plain", source(|| std::future::ready(Ok(Some(1_u32)))));
    let sink = flow.add("sink", sink(async |_: u32| Ok(())));
    flow.connect_with(plain.output, sink.input, HubOptions::default().envelope_bytes(64));
    let message = flow.run().await.unwrap_err().to_string();
    assert!(
        message.contains("2 problems")
            && message.contains("are too small for one element of 4")
            && message.contains("carry no envelopes"),
        "{message}"
    );
}

/// A message that is not taken makes the next run ready at once. An operator that leaves it in place a thousand times
/// is logged once; one that takes or sends a message now and then is not.
#[tokio::test]
async fn an_operator_that_takes_nothing_is_logged() {
    /// Takes a message in every run that is a multiple of `takes`, and sends one in every multiple of `sends`.
    struct Lazy {
        runs: u32,
        takes: u32,
        sends: u32,
    }

    #[derive(Ports)]
    struct LazyPorts {
        #[input]
        input: Input<u32>,
        #[output]
        output: Output<u32>,
    }

    impl Operator for Lazy {
        type Ports = LazyPorts;

        async fn compute(&mut self, ports: &mut LazyPorts, cx: &mut Cx) -> Result<()> {
            self.runs += 1;
            if self.runs == 5000 {
                cx.finish();
            }
            if self.runs.is_multiple_of(self.takes) {
                ports.input.take()?;
            }
            if self.runs.is_multiple_of(self.sends) {
                ports.output.send(1).await?;
            }
            Ok(())
        }
    }

    for (takes, sends, warned) in [(u32::MAX, u32::MAX, true), (700, u32::MAX, false), (u32::MAX, 700, false)] {
        let warnings = Warnings::default();
        let _hearing = tracing::subscriber::set_default(warnings.clone());
        let mut flow = Flow::new("lazy");
        let send = flow.add("send", source(async || Ok(Some(1_u32))));
        let lazy = flow.add("lazy", Lazy { runs: 0, takes, sends });
        let end = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(send.output, lazy.input);
        flow.connect(lazy.output, end.input);
        let report = within(flow.run()).await.unwrap();
        assert_eq!(report.operator("lazy").unwrap().runs, 5000);
        let logged = warnings.messages();
        assert_eq!(logged.len(), usize::from(warned), "takes {takes}, sends {sends}: {logged:?}");
        if warned {
            for part in ["has run 1024 times in a row", "operator=\"lazy\"", "port=\"input\""] {
                assert!(logged[0].contains(part), "{part} in: {}", logged[0]);
            }
        }
    }
}

/// An operator that leaves a message that it waits for in the queue, run after run, would spin for ever: it fails, and
/// the error names the input. An operator does not fail if the input is optional or keeps the latest value, or if its
/// runs wait for something else.
#[tokio::test]
async fn an_operator_that_never_takes_what_it_waits_for_fails() {
    /// The operator ends by itself after this many runs.
    const RUNS: u32 = 200_000;

    #[derive(Ports)]
    struct WaitsPorts {
        #[input]
        input: Input<u32>,
    }

    #[derive(Ports)]
    struct SeveralPorts {
        #[input(at_least = 2)]
        input: Inputs<u32>,
    }

    #[derive(Ports)]
    struct OptionalPorts {
        #[input(optional)]
        input: Input<u32>,
    }

    struct Leaves<P> {
        runs: u32,
        yields: bool,
        ports: std::marker::PhantomData<fn(P)>,
    }

    impl<P: Ports> Operator for Leaves<P> {
        type Ports = P;

        async fn compute(&mut self, _ports: &mut P, cx: &mut Cx) -> Result<()> {
            self.runs += 1;
            if self.runs == RUNS {
                cx.finish();
            }
            if self.yields {
                tokio::task::yield_now().await;
            }
            Ok(())
        }
    }

    fn leaves<P>(yields: bool) -> Leaves<P> {
        Leaves { runs: 0, yields, ports: std::marker::PhantomData }
    }

    let send = || source(async || Ok(Some(1_u32)));
    let text = "operator `leaves`: input `input`: invalid use: 131072 runs in a row have taken no message here and sent none: \
                take at least one in each run, or limit when the operator runs with `.when(..)`";
    for (case, fails) in ["waits", "named", "several", "optional", "latest", "yields"]
        .into_iter()
        .zip([true, true, true, false, false, false])
    {
        let mut flow = Flow::new("leaves");
        let send = [flow.add("one", send()).output, flow.add("other", send()).output];
        match case {
            "several" => {
                let to = flow.add("leaves", leaves::<SeveralPorts>(false)).input;
                send.into_iter().for_each(|send| flow.connect(send, to));
            }
            "optional" => {
                let to = flow.add("leaves", leaves::<OptionalPorts>(false)).input;
                flow.connect(send[0], to);
                let end = flow.add("end", sink(async |_: u32| Ok(()))).when(count(10));
                flow.connect(send[1], end.input);
            }
            _ => {
                let leaves = flow.add("leaves", leaves::<WaitsPorts>(case == "yields"));
                let to = leaves.input;
                if case == "named" {
                    let _ = leaves.when(at_least(to, 1));
                }
                if case == "latest" {
                    flow.connect_with(send[0], to, HubOptions::latest());
                } else {
                    flow.connect(send[0], to);
                }
                let end = flow.add("end", sink(async |_: u32| Ok(()))).when(count(10));
                flow.connect(send[1], end.input);
            }
        }
        match within(flow.run()).await {
            Ok(report) if !fails => assert_eq!(report.operator("leaves").unwrap().runs, u64::from(RUNS), "{case}"),
            Err(error) if fails => assert_eq!(error.to_string(), text, "{case}"),
            other => panic!("{case}: {other:?}"),
        }
    }
}

/// A condition that is ready and refuses every claim: its operator would poll for ever.
#[tokio::test]
async fn an_operator_whose_condition_refuses_every_claim_fails() {
    struct Refuses(u32);

    impl Condition for Refuses {
        fn poll_status(&mut self, _cx: &mut std::task::Context<'_>) -> Status {
            Status::Ready
        }

        fn claim(&mut self) -> bool {
            self.0 += 1;
            assert!(self.0 < 200_000, "the operator keeps polling");
            // The claims for the first two runs succeed after some attempts, the one for the third never.
            self.0.is_multiple_of(1000) && self.0 < 3000
        }

        fn describe(&self) -> Cow<'static, str> {
            "a token".into()
        }
    }

    let mut flow = Flow::new("refused");
    let send = flow.add("send", source(async || Ok(Some(1_u32)))).when(Refuses(0));
    let end = flow.add("end", sink(async |_: u32| Ok(())));
    flow.connect(send.output, end.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "operator `send`: invalid use: its condition (a token) was ready and refused the claim 131072 times in a row: \
         `claim` must succeed when `poll_status` has returned `Ready`, and `poll_status` must return a wait when `claim` \
         would fail"
    );
}

/// An operator that blocks its worker is logged once, with its name and a remedy. One with its own thread is not, and
/// neither is one that waits asynchronously for as long.
#[tokio::test]
async fn an_operator_that_blocks_its_worker_is_logged() {
    #[derive(Ports)]
    struct WaitsPorts {
        #[input(optional)]
        input: Input<u32>,
    }

    /// Awaits messages in its runs.
    struct Waits(u32);

    impl Operator for Waits {
        type Ports = WaitsPorts;

        async fn compute(&mut self, ports: &mut WaitsPorts, cx: &mut Cx) -> Result<()> {
            self.0 += 1;
            if ports.input.recv().await?.is_none() {
                cx.finish();
            }
            Ok(())
        }
    }

    fn blocks() -> impl Operator<Ports = SourcePorts<u32>> {
        let mut left = 4;
        source(move || {
            left -= 1;
            // The thread blocks on purpose.
            std::thread::sleep(Duration::from_millis(110));
            std::future::ready(Ok((left > 0).then_some(left)))
        })
    }

    for own_thread in [false, true] {
        let warnings = Warnings::default();
        let _hearing = tracing::subscriber::set_default(warnings.clone());
        let mut flow = Flow::new("blocks");
        let blocks = flow.add("blocks", blocks());
        let waits = flow.add("waits", Waits(0));
        flow.connect(blocks.output, waits.input);
        if own_thread {
            let _ = blocks.on_own_thread();
        }
        within(flow.run()).await.unwrap();
        let logged = warnings.messages();
        assert_eq!(logged.len(), usize::from(!own_thread), "{logged:?}");
        for part in logged.iter().flat_map(|line| {
            ["operator=\"blocks\"", "took=1", "blocked its worker thread", "`.on_own_thread()`"]
                .map(|part| (part, line))
        }) {
            assert!(part.1.contains(part.0), "{part:?}");
        }
    }
}

/// An operator waits for room and for device work at once. The room is available first, and all other operators are
/// idle: the flow has not ended, since the work completes by itself.
#[tokio::test]
async fn room_that_is_available_before_a_messages_work_is_noticed() {
    #[derive(Ports)]
    struct DonePorts {
        #[input(done)]
        input: Input<Envelope<u32>>,
        #[output]
        output: Output<u64>,
    }

    struct Number(u64);

    impl Operator for Number {
        type Ports = DonePorts;

        async fn compute(&mut self, ports: &mut DonePorts, _cx: &mut Cx) -> Result<()> {
            ports.input.take()?;
            self.0 += 1;
            ports.output.send(self.0).await?;
            Ok(())
        }
    }

    let device = emulated();
    let (free, busy) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let held_up = hold(&busy);
    let mut buffers =
        [&free, &free, &busy].map(|on| Envelope::from(Buffer::from_slice(on, &[1_u32]).unwrap())).into_iter();
    let (go, mut goes) = tokio::sync::mpsc::unbounded_channel();
    let seen = shared();
    let mut flow = Flow::new("both");
    let send = flow.add("send", source(move || std::future::ready(Ok(buffers.next())))).on(&device);
    let number = flow.add("number", Number(0)).on(&device);
    let takes = task({
        let seen = seen.clone();
        move |ports: &mut SinkPorts<u64>, cx: &mut Cx| {
            let seen = seen.clone();
            let mut goes = std::mem::replace(&mut goes, tokio::sync::mpsc::unbounded_channel().1);
            Box::pin(async move {
                for _ in 0..2 {
                    goes.recv().await.unwrap();
                    let number = ports.input.recv().await?;
                    lock(&seen).extend(number);
                }
                while cx.ready(ports).await {
                    let number = ports.input.take()?;
                    lock(&seen).push(number);
                }
                Ok(())
            })
        }
    });
    let takes = flow.add("takes", takes);
    flow.connect(send.output, number.input);
    flow.connect(number.output, takes.input);
    let running = flow.spawn().unwrap();
    let status = || running.status().into_iter().find(|operator| &*operator.name == "number").unwrap();
    until("it waits for room", || status().runs == 1 && status().status == Status::Wait).await;
    go.send(()).unwrap();
    until("it waits for the work, and there is no room", || status().runs == 2 && status().status == Status::WaitEvent)
        .await;
    go.send(()).unwrap();
    until("there is room", || *lock(&seen) == [1, 2]).await;
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    drop(held_up);
    within(running).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2, 3]);
}
