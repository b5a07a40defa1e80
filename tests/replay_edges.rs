//! Edge cases of replayed sections: operators with state, unusual shapes, early ends, and work of other threads.

use common::*;
use futures::{FutureExt, future::BoxFuture};
use wakeline::{Stream, flow::Added, operator::MapHandles, prelude::*};

/// left += right
#[kernel(unsafe(cuda = "kernels/add_to.cu"))]
fn add_to(left: &mut [u32], right: &[u32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left = left.wrapping_add(*right);
    }
}

type Io = MapPorts<Envelope<u32>, Envelope<u32>>;
type Handles = MapHandles<Envelope<u32>, Envelope<u32>>;

/// An operator made of a function and the state that it keeps between runs.
struct Stateful<S, F>(S, F);

impl<S, F> Operator for Stateful<S, F>
where
    S: Send + 'static,
    F: for<'a> FnMut(&'a mut S, &'a mut Io, &'a mut Cx) -> BoxFuture<'a, Result<()>> + Send + 'static,
{
    type Ports = Io;

    async fn compute(&mut self, ports: &mut Io, cx: &mut Cx) -> Result<()> {
        (self.1)(&mut self.0, ports, cx).await
    }
}

fn stateful<S, F>(state: S, act: F) -> Stateful<S, F>
where
    S: Send + 'static,
    F: for<'a> FnMut(&'a mut S, &'a mut Io, &'a mut Cx) -> BoxFuture<'a, Result<()>> + Send + 'static,
{
    Stateful(state, act)
}

/// The number of elements in a row.
const ROW: usize = 4;

fn batches(rows: &[usize]) -> Vec<Vec<u32>> {
    let batch = |(number, rows): (usize, &usize)| (0..rows * ROW).map(|at| (1000 * number + at) as u32).collect();
    rows.iter().enumerate().map(batch).collect()
}

fn counts(report: &Report) -> (u64, u64, u64) {
    let net = report.section("net").unwrap();
    (net.replayed, net.streamed, net.captured)
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "no `{part}` in: {text}"));
}

/// `read -> first -> one -> collect`. `first` is an [`AddOne`].
async fn run_chain<O: Operator<Ports = Io>>(
    device: &Device,
    rows: &[usize],
    one: O,
    configure: impl FnOnce(&mut Flow, &Added<Handles>, &Added<Handles>),
) -> Result<(Vec<Vec<u32>>, Report)> {
    let seen = shared();
    let mut flow = Flow::new("edges");
    let read = flow.add("read", SendEach::new(batches(rows)));
    let first = flow.add("first", AddOne).on(device);
    let one = flow.add("one", one).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, first.input, hub);
    flow.connect_with(first.output, one.input, hub);
    flow.connect_with(one.output, collect.input, hub);
    configure(&mut flow, &first, &one);
    let report = flow.run().await?;
    let seen = lock(&seen).clone();
    Ok((seen, report))
}

/// Adds one to each element, into a blank envelope.
struct AddOne;

impl Operator for AddOne {
    type Ports = Io;

    async fn compute(&mut self, ports: &mut Io, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = ports.output.blank().await?;
        y.set_len(x.len())?;
        add_one::launch(cx.stream()?, &x, &mut y)?;
        ports.output.send(y).await?;
        Ok(())
    }
}

/// The error of a flow with `first` and `one` in a section.
async fn refused<O: Operator<Ports = Io>>(device: &Device, at_start: bool, checked: bool, one: O) -> String {
    let run = run_chain(device, &[4, 4, 4, 4], one, |flow, first, one| {
        let net = flow.replay("net", (first, one)).buckets([1, 2, 4]).rows(first.input, ROW);
        if at_start {
            net.at_start();
        }
        if checked {
            net.checked();
        }
    });
    let error = run.await.expect_err("the section is refused");
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    let text = error.to_string();
    assert!(text.starts_with("section `net`: operator `one`: "), "{text}");
    text
}

on_both!(an_operator_that_keeps_memory_allocated_in_a_capture_is_refused, async |device: Device| {
    // Only the graph of the first bucket would write `weights`; those of the other buckets would only read it.
    let lazy = stateful(None, |weights: &mut Option<Buffer<u32>>, ports, cx| {
        async move {
            let mut x = ports.input.take()?;
            let stream = cx.stream()?;
            if weights.is_none() {
                *weights = Some(Buffer::from_slice(stream, &[100; 64])?);
            }
            add_to::launch(stream, &mut x, weights.as_ref().unwrap())?;
            ports.output.send(x).await?;
            Ok(())
        }
        .boxed()
    });
    let error = refused(&device, true, false, lazy).await;
    assert_contains(
        &error,
        &[
            "memory that was allocated in the capture",
            "outlives the capture",
            "allocate it earlier, for example in `start`",
        ],
    );

    // Adds the previous message. Every replay would add the one of the captured run.
    let adds_previous = stateful(None, |previous: &mut Option<Envelope<u32>>, ports, cx| {
        async move {
            let x = ports.input.take()?;
            let mut y = ports.output.blank().await?;
            y.set_len(x.len())?;
            let stream = cx.stream()?;
            stream.copy(&x, &mut y)?;
            if let Some(previous) = previous.take() {
                add_to::launch(stream, &mut y, &previous)?;
            }
            *previous = Some(x);
            ports.output.send(y).await?;
            Ok(())
        }
        .boxed()
    });
    let error = refused(&device, false, false, adds_previous).await;
    assert_contains(&error, &["memory that was allocated in the capture", "outlives the capture"]);
});

on_both!(checked_refuses_an_operator_that_uses_other_memory_in_the_next_run, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    // The kernels are the same in every run; only their arguments differ.
    for both in [false, true] {
        let sums = [1, 2].map(|n| Buffer::from_slice(&stream, &[100 * n; 64]).unwrap());
        let alternates = stateful(sums, move |sums, ports, cx| {
            async move {
                let mut x = ports.input.take()?;
                sums.swap(0, 1);
                let [one, other] = sums;
                if both {
                    add_to::launch(cx.stream()?, one, other)?;
                }
                add_to::launch(cx.stream()?, &mut x, one)?;
                ports.output.send(x).await?;
                Ok(())
            }
            .boxed()
        });
        let error = refused(&device, false, true, alternates).await;
        assert_contains(&error, &["two captures differ: it uses other memory the second time"]);
    }
});

on_both!(effects_other_than_work_and_messages_are_refused, async |device: Device| {
    let removes = stateful((), |_, ports, cx| {
        async move {
            let x = ports.input.take()?;
            cx.remove_metadata("number");
            ports.output.send(x).await?;
            Ok(())
        }
        .boxed()
    });
    let error = refused(&device, false, false, removes).await;
    assert_contains(&error, &["it calls `Cx::remove_metadata`, which a replay cannot repeat"]);

    let replies = stateful((), |_, ports, cx| {
        async move {
            let x = ports.input.take()?;
            drop(cx.take_replies());
            ports.output.send(x).await?;
            Ok(())
        }
        .boxed()
    });
    let error = refused(&device, false, false, replies).await;
    assert_contains(&error, &["it calls `Cx::take_replies`, which a replay cannot repeat"]);

    let closes = stateful((), |_, ports, _| {
        async move {
            let x = ports.input.take()?;
            ports.output.send(x).await?;
            ports.output.close();
            Ok(())
        }
        .boxed()
    });
    let error = refused(&device, true, false, closes).await;
    assert_contains(&error, &["it closes `output`, which a replay cannot repeat"]);

    let finishes = stateful(0, |n, ports, cx| {
        async move {
            *n += 1;
            if *n == 2 {
                cx.finish();
            }
            let x = ports.input.take()?;
            ports.output.send(x).await?;
            Ok(())
        }
        .boxed()
    });
    let error = refused(&device, false, false, finishes).await;
    assert_contains(&error, &["it calls `Cx::finish`, which a replay cannot repeat"]);
});

on_both!(an_operator_that_finishes_before_the_first_capture_ends_the_section, async |device: Device| {
    let once = stateful((), |_, ports, cx| {
        async move {
            cx.finish();
            let x = ports.input.take()?;
            ports.output.send(x).await?;
            Ok(())
        }
        .boxed()
    });
    let run = run_chain(&device, &[4, 4, 4], once, |flow, first, one| {
        flow.replay("net", (first, one));
    });
    let (seen, report) = run.await.unwrap();
    assert_eq!((seen.len(), counts(&report)), (1, (0, 1, 0)));
});

on_both!(a_panic_in_a_capture_is_an_error_of_its_operator, async |device: Device| {
    let panics = stateful(0, |n, ports, _| {
        async move {
            let x = ports.input.take()?;
            *n += 1;
            assert!(*n != 2, "the second time");
            ports.output.send(x).await?;
            Ok(())
        }
        .boxed()
    });
    let run = run_chain(&device, &[4, 4, 4], panics, |flow, first, one| {
        flow.replay("net", (first, one));
    });
    let error = run.await.expect_err("the operator panics");
    assert_eq!(error.kind(), ErrorKind::Panicked);
    assert_contains(&error.to_string(), &["section `net`: operator `one`", "the second time"]);
});

on_both!(an_operator_may_send_a_buffer_larger_than_its_hubs_envelopes, async |device: Device| {
    let run = async |replay: bool| {
        let seen = shared();
        let mut flow = Flow::new("own");
        let own = stateful((), |_, ports, cx| {
            async move {
                let x = ports.input.take()?;
                let mut y = cx.alloc::<u32>(x.len())?;
                add_one::launch(cx.stream()?, &x, &mut y)?;
                ports.output.send(y.into()).await?;
                Ok(())
            }
            .boxed()
        });
        let read = flow.add("read", SendEach::new(batches(&[8, 8, 1, 8])));
        let one = flow.add("one", own).on(&device);
        let two = flow.add("two", Increment).on(&device);
        let collect = flow.add("collect", Collect(seen.clone()));
        let hub = HubOptions::bounded(1).envelope_bytes(4096);
        flow.connect_with(read.output, one.input, hub);
        flow.connect_with(one.output, two.input, HubOptions::bounded(1).envelope_bytes(16));
        flow.connect_with(two.output, collect.input, hub);
        if replay {
            flow.replay("net", &one);
        }
        let report = flow.run().await.unwrap();
        let seen = lock(&seen).clone();
        (seen, report)
    };
    let (streamed, _) = run(false).await;
    let (replayed, report) = run(true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(counts(&report), (2, 2, 2));
});

on_both!(a_section_may_have_no_output, async |device: Device| {
    /// Adds each message to a buffer.
    struct Adds(Buffer<u32>);

    impl Operator for Adds {
        type Ports = SinkPorts<Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let x = ports.input.take()?;
            add_to::launch(cx.stream()?, &mut self.0, &x)
        }

        async fn stop(&mut self, cx: &mut Cx) -> Result<()> {
            let sums = self.0.to_vec(cx.stream()?).await?;
            assert_eq!(sums[..4], [1010, 1015, 1020, 1025]);
            Ok(())
        }
    }

    let stream = Stream::new(&device).unwrap();
    let mut flow = Flow::new("sink");
    let read = flow.add("read", SendEach::new((0..5).map(|n| (0..16).map(|at| at + 100 * n).collect())));
    let one = flow.add("one", AddOne).on(&device);
    let adds = flow.add("adds", Adds(Buffer::from_slice(&stream, &[5; 16]).unwrap())).on(&device);
    let hub = HubOptions::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, adds.input, hub);
    flow.replay("net", (&one, &adds));
    let report = flow.run().await.unwrap();
    assert_eq!(counts(&report), (4, 1, 1));
});

/// Forwards each message at one output, and sends each element plus one at the other.
struct Both;

#[derive(Ports)]
struct BothPorts {
    #[input]
    input: Input<Envelope<u32>>,
    #[output(envelope_bytes = 64)]
    on: Output<Envelope<u32>>,
    #[output(envelope_bytes = 64)]
    more: Output<Envelope<u32>>,
}

impl Operator for Both {
    type Ports = BothPorts;

    async fn compute(&mut self, ports: &mut BothPorts, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut more = ports.more.blank().await?;
        more.set_len(x.len())?;
        add_one::launch(cx.stream()?, &x, &mut more)?;
        ports.on.send(x).await?;
        ports.more.send(more).await?;
        Ok(())
    }
}

/// Sends the sum of its two inputs.
struct Sum;

#[derive(Ports)]
struct SumPorts {
    #[input]
    left: Input<Envelope<u32>>,
    #[input]
    right: Input<Envelope<u32>>,
    #[output(envelope_bytes = 64)]
    output: Output<Envelope<u32>>,
}

impl Operator for Sum {
    type Ports = SumPorts;

    async fn compute(&mut self, ports: &mut SumPorts, cx: &mut Cx) -> Result<()> {
        let (mut left, right) = (ports.left.take()?, ports.right.take()?);
        add_to::launch(cx.stream()?, &mut left, &right)?;
        ports.output.send(left).await?;
        Ok(())
    }
}

/// Sends numbers, each with metadata that contains its name.
struct Named(&'static str, u32);

impl Operator for Named {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        self.1 += 1;
        if self.1 == 4 {
            cx.finish();
        }
        cx.insert_metadata(self.0, self.1);
        cx.insert_metadata("who", self.0);
        let mut envelope = ports.output.blank().await?;
        envelope.space().await?[..4].fill(self.1);
        envelope.set_len(4)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// Records the data and the metadata of each message.
struct Names(Shared<String>);

impl Operator for Names {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let metadata = cx.metadata();
        let names: Vec<_> = metadata.names().collect();
        let line = format!("{:?} {names:?} {:?}", x.read().await?, metadata.get::<&str>("who"));
        lock(&self.0).push(line);
        Ok(())
    }
}

on_both!(metadata_takes_the_same_path_as_its_message, async |device: Device| {
    let run = async |replay: bool| {
        let seen = [shared(), shared()];
        let mut flow = Flow::new("names");
        let one = flow.add("one", Named("one", 0));
        let two = flow.add("two", Named("two", 0));
        let both = flow.add("both", Both).on(&device);
        let sum = flow.add("sum", Sum).on(&device).merge_metadata(wakeline::hub::MergePolicy::Reject);
        let first = flow.add("first", Names(seen[0].clone()));
        let second = flow.add("second", Names(seen[1].clone()));
        let hub = HubOptions::bounded(1).envelope_bytes(64);
        flow.connect_with(one.output, both.input, hub);
        flow.connect_with(two.output, sum.left, hub);
        flow.connect(both.more, sum.right);
        flow.connect(both.on, first.input);
        flow.connect(sum.output, second.input);
        if replay {
            flow.replay("net", (&both, &sum));
        }
        let report = flow.run().await.unwrap();
        (seen.map(|seen| lock(&seen).clone()), report)
    };
    let (streamed, _) = run(false).await;
    let (replayed, report) = run(true).await;
    assert_eq!(counts(&report), (3, 1, 1));
    assert_eq!(replayed, streamed);
});

on_both!(a_loop_may_go_through_a_section, async |device: Device| {
    /// Sends each message through the loop once.
    struct Round;

    #[derive(Ports)]
    struct RoundPorts {
        #[input(optional)]
        input: Input<Envelope<u32>>,
        #[input(optional)]
        back: Input<Envelope<u32>>,
        #[output]
        forth: Output<Envelope<u32>>,
        #[output]
        output: Output<Envelope<u32>>,
    }

    impl Operator for Round {
        type Ports = RoundPorts;

        async fn compute(&mut self, _ports: &mut RoundPorts, _cx: &mut Cx) -> Result<()> {
            unreachable!("`run` does not call `compute`")
        }

        async fn run(&mut self, ports: &mut RoundPorts, _cx: &mut Cx) -> Result<()> {
            while let Some(x) = ports.input.recv().await? {
                ports.forth.send(x).await?;
                let Some(x) = ports.back.recv().await? else { return Ok(()) };
                ports.output.send(x).await?;
            }
            ports.forth.close();
            Ok(())
        }
    }

    let seen = shared();
    let mut flow = Flow::new("loop");
    let read = flow.add("read", SendEach::new(batches(&[2, 2, 1, 1, 2])));
    let round = flow.add("round", Round).on(&device);
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, round.input, hub);
    flow.connect(round.forth, one.input);
    flow.connect(one.output, two.input);
    flow.connect(two.output, round.back);
    flow.connect(round.output, collect.input);
    flow.replay("net", (&one, &two));
    let report = flow.run().await.unwrap();
    assert_eq!(counts(&report), (3, 2, 2));
    let sent = batches(&[2, 2, 1, 1, 2]).into_iter().map(|batch| batch.iter().map(|x| x + 2).collect());
    assert_eq!(*lock(&seen), sent.collect::<Vec<Vec<u32>>>());
});

on_both!(a_service_answers_through_a_section, async |device: Device| {
    let mut flow = Flow::new("service");
    let forth = {
        let device = device.clone();
        map(move |x: Vec<u32>| {
            std::future::ready(Stream::new(&device).and_then(|own| Buffer::from_slice(&own, &x).map(Envelope::from)))
        })
    };
    let forth = flow.add("forth", forth).on(&device);
    let one = flow.add("one", AddOne).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let back = flow.add("back", map(async |x: Envelope<u32>| x.read().await.map(<[u32]>::to_vec)));
    let hub = HubOptions::bounded(2).envelope_bytes(4096);
    flow.connect(forth.output, one.input);
    flow.connect_with(one.output, two.input, hub);
    flow.connect_with(two.output, back.input, hub);
    flow.replay("net", (&one, &two)).buckets([1, 2, 4]).rows(one.input, ROW);
    let service = flow.service("ask", forth.input, back.output);
    let running = flow.spawn().unwrap();
    let length = |n: u32| ROW * (1 + n as usize % 5);
    let requests: Vec<_> = (0..40)
        .map(|n| {
            let service = service.clone();
            tokio::spawn(async move { service.ask(vec![n; length(n)]).await })
        })
        .collect();
    for (n, request) in (0..).zip(requests) {
        // Some callers abort. Their requests pass through the flow all the same.
        match n % 7 {
            3 => request.abort(),
            _ => assert_eq!(request.await.unwrap().unwrap(), vec![n + 2; length(n)]),
        }
    }
    drop(service);
    let (replayed, streamed, captured) = counts(&running.await.unwrap());
    assert!(replayed > 0 && streamed > captured && captured == 3, "{replayed}, {streamed}, {captured}");
});

/// Takes its message and fails.
struct Fails;

impl Operator for Fails {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        Err(Error::other("planned"))
    }
}

#[tokio::test]
async fn the_caller_of_a_request_that_fails_a_section_gets_the_failure() {
    let device = emulated();
    let mut flow = Flow::new("service");
    let forth = flow.add("forth", pass_on::<Envelope<u32>>()).on(&device);
    let one = flow.add("one", Increment).on(&device);
    let fails = flow.add("fails", Fails).on(&device);
    flow.connect(forth.output, one.input);
    flow.connect(one.output, fails.input);
    flow.replay("net", (&one, &fails));
    let hub = HubOptions::bounded(2).envelope_bytes(64);
    let service = flow.service_with("ask", forth.input, fails.output, hub);
    let running = flow.spawn().unwrap();
    let mut request = within(service.blank()).await.unwrap();
    request.fill_from(&[1]).await.unwrap();
    assert_eq!(within(service.ask(request)).await.unwrap_err().kind(), ErrorKind::Operator);
    within(running).await.unwrap_err();
}

on_both!(a_flow_that_is_aborted_or_dropped_during_a_blocked_replay_releases_all_memory, async |device: Device| {
    for aborted in [false, true] {
        let other = Stream::new(&device).unwrap();
        let mut weights = Buffer::from_slice(&other, &[1_u32; 64]).unwrap();
        let held = hold(&other);
        // Every replay waits for this write.
        other.fill(&mut weights, 1).unwrap();
        let adds = stateful(weights, |weights, ports, cx| {
            async move {
                let mut x = ports.input.take()?;
                add_to::launch(cx.stream()?, &mut x, weights)?;
                ports.output.send(x).await?;
                Ok(())
            }
            .boxed()
        });
        let mut flow = Flow::new("held");
        let read = flow.add("read", SendEach::new(batches(&[2; 40])));
        let one = flow.add("one", adds).on(&device);
        let collect = flow.add("collect", Collect(shared()));
        let hub = HubOptions::bounded(2).envelope_bytes(4096);
        flow.connect_with(read.output, one.input, hub);
        flow.connect_with(one.output, collect.input, hub);
        flow.replay("net", &one).at_start().buckets([2]).rows(one.input, ROW);
        let running = flow.spawn().unwrap();
        let handle = running.handle();
        until("a second run", || handle.status()[1].runs > 1).await;
        if aborted {
            handle.abort();
            let error = running.await.unwrap_err();
            assert!(error.is_cancelled(), "{error}");
        } else {
            drop(running);
        }
        drop(held);
        freed(&device).await;
    }
});

/// On one thread, so that `yield_now` lets every other task run.
#[tokio::test]
async fn a_capture_waits_for_memory_that_streams_still_use() {
    let device = emulated_with(wakeline::device::Emulated::new().workers(4).memory(64 << 10));
    let other = Stream::new(&device).unwrap();
    let held = hold(&other);
    // The device has memory for eight envelopes: the hubs have three, `large` occupies three, and the graph needs three.
    let mut large = Buffer::<u32>::new(&device, 24 << 8).unwrap();
    other.fill(&mut large, 1).unwrap();
    drop(large);
    let seen = shared();
    let mut flow = Flow::new("full");
    let read = flow.add("read", SendEach::new(batches(&[512; 3])));
    let one = flow.add("one", AddOne).on(&device);
    let two = flow.add("two", AddOne).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(1).envelopes(1).envelope_bytes(8192);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, two.input, hub);
    flow.connect_with(two.output, collect.input, hub);
    flow.replay("net", (&one, &two));
    let running = flow.spawn().unwrap();
    until("the first message is collected", || lock(&seen).len() == 1).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(lock(&seen).len(), 1, "the capture, which precedes the second round, waits for memory");
    drop(held);
    assert_eq!(counts(&within(running).await.unwrap()), (2, 1, 1));
}

on_both!(no_replay_uses_a_buffer_that_its_operator_has_replaced, async |device: Device| {
    // Adds each message to a buffer, which it replaces by a larger one for a longer message.
    let sums = || {
        stateful(None, |sum: &mut Option<Buffer<u32>>, ports, cx| {
            async move {
                let mut x = ports.input.take()?;
                let stream = cx.stream()?;
                if sum.as_ref().is_none_or(|sum| sum.len() < x.len()) {
                    let mut larger = stream.alloc(x.len())?;
                    stream.fill(&mut larger, 0)?;
                    if let Some(sum) = sum.take() {
                        add_to::launch(stream, &mut larger, &sum)?;
                    }
                    *sum = Some(larger);
                }
                let sum = sum.as_mut().unwrap();
                add_to::launch(stream, sum, &x)?;
                add_to::launch(stream, &mut x, sum)?;
                ports.output.send(x).await?;
                Ok(())
            }
            .boxed()
        })
    };
    let rows = [2, 2, 2, 9, 2, 2, 2, 1];
    let (streamed, _) = run_chain(&device, &rows, sums(), |_, _, _| {}).await.unwrap();
    let replayed = run_chain(&device, &rows, sums(), |flow, _, one| {
        flow.replay("net", one).buckets([2]).rows(one.input, ROW);
    });
    let (replayed, report) = replayed.await.unwrap();
    assert_eq!(replayed, streamed);
    // The message that fits no bucket replaces the buffer, so the bucket is captured again.
    assert_eq!(counts(&report), (5, 3, 2));
});

on_both!(a_section_that_only_forwards_messages_is_replayed, async |device: Device| {
    let forwards =
        || stateful((), |_, ports, _| async move { Ok(ports.output.send(ports.input.take()?).await?) }.boxed());
    let (streamed, _) = run_chain(&device, &[2, 2, 1, 2], forwards(), |_, _, _| {}).await.unwrap();
    let replayed = run_chain(&device, &[2, 2, 1, 2], forwards(), |flow, _, one| {
        flow.replay("net", one);
    });
    let (replayed, report) = replayed.await.unwrap();
    assert_eq!(replayed, streamed);
    assert_eq!(counts(&report), (2, 2, 2));
});

on_both!(a_section_pauses_and_resumes_with_its_flow, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("pause");
    let read = flow.add("read", SendEach::new(batches(&[2; 200])));
    let one = flow.add("one", AddOne).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, two.input, hub);
    flow.connect_with(two.output, collect.input, hub);
    flow.replay("net", (&one, &two));
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    until("some rounds", || handle.status()[1].runs > 3).await;
    handle.pause();
    let runs = handle.status()[1].runs;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    // One run may have been in progress.
    assert!(handle.status()[1].runs <= runs + 1);
    handle.resume();
    assert_eq!(counts(&running.await.unwrap()), (199, 1, 1));
    assert_eq!(lock(&seen).len(), 200);
});

#[tokio::test]
async fn a_local_flow_replays_sections() {
    let device = emulated();
    let seen = shared();
    let mut flow = wakeline::flow::LocalFlow::new("here");
    let read = flow.add("read", SendEach::new(batches(&[2, 2, 1, 2])));
    let one = flow.add("one", AddOne).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, collect.input, hub);
    flow.replay("net", &one);
    let report = tokio::task::LocalSet::new().run_until(flow.run()).await.unwrap();
    assert_eq!(counts(&report), (2, 2, 2));
}

on_both!(work_of_another_thread_on_the_operators_stream_is_allowed_during_a_capture, async |device: Device| {
    // Like a reader without a stream of its own, which may enqueue work from another thread at any time.
    let shares = stateful(None, |own: &mut Option<Stream>, ports, cx| {
        async move {
            let mut x = ports.input.take()?;
            let stream = cx.stream()?;
            increment::launch(stream, &mut x)?;
            match own.take() {
                None => *own = Some(stream.clone()),
                Some(own) => {
                    let work = move || own.fill(&mut Buffer::<u32>::new(own.device(), 8)?, 1);
                    std::thread::spawn(work).join().expect("the thread does not panic")?;
                }
            }
            ports.output.send(x).await?;
            Ok(())
        }
        .boxed()
    });
    let run = run_chain(&device, &[2, 2, 2], shares, |flow, first, one| {
        flow.replay("net", (first, one));
    });
    assert_eq!(counts(&run.await.unwrap().1), (2, 1, 1));
});

on_both!(an_operator_that_works_on_its_own_stream_in_a_capture_is_refused, async |device: Device| {
    // Counts its messages on its own stream.
    let own = Stream::new(&device).unwrap();
    let count = Buffer::from_slice(&own, &[0_u32]).unwrap();
    let counting = stateful((own, count), |(own, count), ports, cx| {
        async move {
            let mut x = ports.input.take()?;
            increment::launch(cx.stream()?, &mut x)?;
            increment::launch(own, count)?;
            ports.output.send(x).await?;
            Ok(())
        }
        .boxed()
    });
    let error = refused(&device, false, false, counting).await;
    assert_contains(&error, &["it enqueues work on a stream from outside the capture"]);
});

#[test]
fn a_bucket_larger_than_any_memory_is_reported_before_the_flow_runs() {
    let device = emulated();
    let mut flow = Flow::new("large");
    let read = flow.add("read", SendEach::new(batches(&[1])));
    let one = flow.add("one", Increment).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, one.input, HubOptions::bounded(1).envelope_bytes(64));
    flow.connect(one.output, collect.input);
    flow.replay("net", &one).buckets([1, usize::MAX / 8]).rows(one.input, ROW);
    let error = flow.check().unwrap_err().to_string();
    assert_contains(&error, &["section `net`: a bucket of 2305843009213693951 rows is larger than any memory"]);
}
