//! Invalid sections, and work that a graph cannot hold, are errors that name the section and the operator.

use super::*;

/// The error of a flow with `operator` in a section; with `at_start`, before any round is streamed.
async fn refused<O>(device: &Device, at_start: bool, operator: O) -> String
where
    O: Operator<Ports = MapPorts<Envelope<u32>, Envelope<u32>>>,
{
    let run = run_one(device, &[2, 2, 2], operator, |flow, one| {
        let net = flow.replay("net", one);
        net.buckets([2]).rows(one.input, ROW).checked();
        if at_start {
            net.at_start();
        }
    });
    let error = run.await.expect_err("the section is refused");
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    let text = error.to_string();
    assert!(text.starts_with("section `net`: operator `one`: "), "{text}");
    text
}

/// Calls a function with each message, and forwards the message.
struct Forwarding<F>(F);

impl<F> Operator for Forwarding<F>
where
    F: for<'a> FnMut(&'a mut Envelope<u32>, &'a mut Cx) -> futures::future::BoxFuture<'a, Result<()>> + Send + 'static,
{
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut x = ports.input.take()?;
        (self.0)(&mut x, cx).await?;
        ports.output.send(x).await?;
        Ok(())
    }
}

fn forwarding<F>(act: F) -> Forwarding<F>
where
    F: for<'a> FnMut(&'a mut Envelope<u32>, &'a mut Cx) -> futures::future::BoxFuture<'a, Result<()>> + Send + 'static,
{
    Forwarding(act)
}

on_both!(work_that_a_graph_cannot_hold_is_an_error_that_names_the_operator, async |device: Device| {
    use futures::FutureExt;

    let waits = forwarding(|_, _| tokio::task::yield_now().map(Ok).boxed());
    let error = refused(&device, false, waits).await;
    assert!(error.contains("its `compute` waits for something other than its ports"), "{error}");

    let awaits = forwarding(|x, cx| {
        async move {
            increment::launch(cx.stream()?, x)?;
            cx.stream()?.completed().await
        }
        .boxed()
    });
    let error = refused(&device, true, awaits).await;
    assert!(error.contains("the work of stream `one` is captured, and none of it has run"), "{error}");

    let reads = forwarding(|x, cx| {
        async move {
            let mut host = Buffer::<u32>::pinned(cx.device(), x.len())?;
            cx.stream()?.copy(x, &mut host)?;
            host.read().await.map(drop)
        }
        .boxed()
    });
    let error = refused(&device, false, reads).await;
    assert!(error.contains("the host cannot wait for this work or read its results"), "{error}");

    let copies_back = forwarding(|x, cx| {
        async move {
            let mut host = Buffer::<u32>::pinned(cx.device(), x.len())?;
            cx.stream()?.copy(x, &mut host)
        }
        .boxed()
    });
    let run = run_one(&device, &[2, 2], copies_back, |flow, one| {
        flow.replay("net", one);
    });
    let error = run.await.err().unwrap().to_string();
    assert!(error.contains("operator `one` reads data back"), "{error}");

    let calls = forwarding(|_, cx| async { cx.stream()?.host_function(|| {}) }.boxed());
    let error = refused(&device, false, calls).await;
    assert!(error.contains("this host function can be called only once"), "{error}");

    let pool = Allocator::stream_ordered(&device);
    let allocates = forwarding(move |_, cx| {
        let allocated = cx.stream().and_then(|stream| pool.alloc::<u32>(stream, 8).map(drop));
        async move { allocated }.boxed()
    });
    let error = refused(&device, false, allocates).await;
    assert!(error.contains("stream-ordered memory in a capture"), "{error}");

    let mut number = 0;
    let counts = forwarding(move |x, cx| {
        number += 1;
        let launched = cx.stream().and_then(|stream| {
            let mut y = stream.alloc::<u32>(x.len())?;
            affine::launch(stream, x, &mut y, number, 0)
        });
        async move { launched }.boxed()
    });
    let error = refused(&device, true, counts).await;
    assert!(error.contains("two captures differ: node 1, `affine` is not the same"), "{error}");

    let ends = forwarding(|_, cx| {
        cx.finish();
        async { Ok(()) }.boxed()
    });
    let error = refused(&device, true, ends).await;
    assert!(error.contains("it calls `Cx::finish`, which a replay cannot repeat"), "{error}");

    let mut kept = None;
    let keeps = forwarding(move |_, cx| {
        let filled = cx.stream().cloned().and_then(|own| {
            if kept.is_none() {
                let data = Buffer::<u32>::new(own.device(), 8)?;
                kept = Some((own, data));
            }
            kept.as_mut().map_or(Ok(()), |(stream, data)| stream.fill(data, 1))
        });
        async move { filled }.boxed()
    });
    let error = refused(&device, false, keeps).await;
    assert!(error.contains("it enqueues work on a stream from outside the capture"), "{error}");

    let marks = forwarding(|_, cx| {
        cx.insert_metadata("mine", 1);
        async { Ok(()) }.boxed()
    });
    let error = refused(&device, false, marks).await;
    assert!(error.contains("it calls `Cx::insert_metadata`, which a replay cannot repeat"), "{error}");
});

/// Overrides one of the methods that a replay does not call: `m` is `may_run`, `a` is `after`. The other one calls its
/// default.
struct Overrides<const METHOD: u8>;

impl<const METHOD: u8> Operator for Overrides<METHOD> {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    fn may_run(&mut self, _ports: &Self::Ports, cx: &Cx) -> bool {
        if METHOD == b'm' { true } else { Increment.may_run(_ports, cx) }
    }

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        ports.output.send(x).await?;
        Ok(())
    }

    fn after(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        if METHOD != b'a' {
            drop(Increment.after(ports, cx));
        }
        async { Ok(()) }
    }
}

/// Sends two messages in each run.
struct SendsTwice;

impl Operator for SendsTwice {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = ports.output.blank().await?;
        y.set_len(x.len())?;
        cx.stream()?.copy(&x, &mut y)?;
        ports.output.send(x).await?;
        ports.output.send(y).await?;
        Ok(())
    }
}

/// Takes no message.
struct SendsOnly;

impl Operator for SendsOnly {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut y = ports.output.blank().await?;
        y.set_len(1)?;
        cx.stream()?.fill(&mut y, 1)?;
        ports.output.send(y).await?;
        Ok(())
    }
}

on_both!(an_operator_of_a_section_has_only_compute_and_passes_one_message_per_port, async |device: Device| {
    let error = refused(&device, false, Overrides::<b'm'>).await;
    assert!(error.contains("it overrides `may_run`, which a replay cannot repeat"), "{error}");
    let error = refused(&device, false, Overrides::<b'a'>).await;
    assert!(error.contains("it overrides `after`, which a replay cannot repeat"), "{error}");
    let own = task(|ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, _| {
        use futures::FutureExt;
        async move { ports.input.recv().await.map(drop) }.boxed()
    });
    let error = refused(&device, false, own).await;
    assert!(error.contains("it overrides `run`, which a replay cannot repeat"), "{error}");
    let error = refused(&device, true, SendsTwice).await;
    assert!(error.contains("a run sends 2 messages at `output` instead of 1 message"), "{error}");
    for at_start in [true, false] {
        let error = refused(&device, at_start, SendsOnly).await;
        assert!(error.contains("a run takes 0 messages at `input` instead of 1 message"), "{error}");
    }
});

/// The setup error of the flow `read -> one -> two -> collect`. `one` and `two` are on a device.
fn problems(configure: impl FnOnce(&mut Flow, &Added<Io>, &Added<Io>, &Device)) -> String {
    let device = emulated();
    let mut flow = Flow::new("wrong");
    let read = flow.add("read", SendEach::new(batches(&[1])));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, one.input, HubOptions::bounded(1).envelope_bytes(64));
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    configure(&mut flow, &one, &two, &device);
    let error = flow.check().expect_err("the flow is invalid");
    assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
    error.to_string()
}

#[test]
fn problems_of_a_section_are_reported_before_the_flow_runs() {
    let error = problems(|flow, one, two, _| {
        let _ = flow.replay("net", (one, two)).buckets([]);
        flow.replay("net", one).buckets([0, 1]).rows(two.input, 4).rows(one.input, 0);
    });
    assert_contains(
        &error,
        &["section `net`: its list of buckets is empty", "section `net`: another section has the same name"],
    );
    assert_contains(&error, &["operator `one` is also in another section"]);

    let error = problems(|flow, one, two, _| {
        flow.replay("net", one).buckets([0, 1]).rows(two.input, 4).rows(one.input, 0).whole(two.output);
    });
    assert_contains(&error, &["a bucket of 0 rows holds nothing", "a row of 0 elements at `input`"]);
    assert_contains(
        &error,
        &["the rows of `two.input` are set, but this is not a port on its boundary", "whole messages of `two.output`"],
    );

    let error = problems(|flow, one, _, _| {
        flow.replay("start", one).at_start();
    });
    assert_contains(
        &error,
        &["section `start`: it is set to be captured at the start, when the sizes are not known yet"],
    );

    let error = problems(|flow, one, two, _| {
        let _ = two.clone().on(&Device::host());
        flow.replay("net", (one, two, one));
    });
    assert_contains(&error, &["operator `one` is named twice"]);

    let error = problems(|flow, one, two, _| {
        let _ = two.clone().on(&Device::host());
        flow.replay("net", (one, two));
    });
    assert_contains(&error, &["operator `two` is on the host, which has no graphs"]);

    let error = problems(|flow, one, two, _| {
        let _ = two.clone().on(&emulated());
        flow.replay("net", (one, two));
    });
    assert_contains(&error, &["a graph belongs to one device"]);

    let error = problems(|flow, one, two, _| {
        let _ = one.clone().on_own_thread();
        let _ = two.clone().when(wakeline::condition::count(3));
        flow.replay("net", (one, two));
    });
    assert_contains(&error, &["operator `one` has its own thread", "operator `two` has a condition of its own"]);

    let error = problems(|flow, one, two, device| {
        let foreign = Flow::new("other").add("far", Increment).on(device);
        flow.replay("net", (one, two, &foreign));
        flow.replay("empty", Vec::<&Added<Io>>::new());
    });
    assert_contains(&error, &["operator `far` belongs to another flow", "section `empty`: it has no operators"]);
}

#[test]
fn a_section_with_an_unsuitable_shape_or_boundary_is_refused() {
    let device = emulated();
    let hub = HubOptions::bounded(1).envelope_bytes(64);

    let mut flow = Flow::new("apart");
    let (mut ends, mut operators) = (Vec::new(), Vec::new());
    for name in ["one", "two"] {
        let read = flow.add(format!("read {name}"), SendEach::new(batches(&[1])));
        let one = flow.add(name, Increment).on(&device);
        let collect = flow.add(format!("collect {name}"), Collect(shared()));
        flow.connect_with(read.output, one.input, hub);
        flow.connect(one.output, collect.input);
        operators.push(one);
        ends.push(collect);
    }
    flow.replay("net", [&operators[0], &operators[1]]);
    assert_contains(&flow.check().unwrap_err().to_string(), &["no path within it leads from `one` to `two` or back"]);

    let mut flow = Flow::new("around");
    let read = flow.add("read", SendEach::new(batches(&[1])));
    let fork = flow.add("fork", Fork).on(&device);
    let around = flow.add("around", Increment);
    let join = flow.add("join", Join).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, fork.input, hub);
    flow.connect(fork.left, join.left);
    flow.connect(fork.right, around.input);
    flow.connect_with(around.output, join.right, hub);
    flow.connect(join.output, collect.input);
    flow.replay("net", (&fork, &join));
    assert_contains(
        &flow.check().unwrap_err().to_string(),
        &["`join` takes messages that `fork` sends by way of `around`", "wait for itself"],
    );

    let mut flow = Flow::new("numbers");
    let numbers = flow.add("numbers", source(|| std::future::ready(Ok(None::<u32>)))).on(&device);
    let double = flow.add("double", map(async |n: u32| Ok(2 * n))).on(&device);
    let end = flow.add("end", sink(async |_: u32| Ok(()))).on(&device);
    flow.connect(numbers.output, double.input);
    flow.connect(double.output, end.input);
    flow.replay("net", &double);
    let error = flow.check().unwrap_err().to_string();
    assert_contains(
        &error,
        &[
            "the messages at `double.input`, on its boundary, are not plain envelopes",
            "the messages at `double.output`",
        ],
    );

    let mut flow = Flow::new("source");
    let numbers = flow.add("numbers", source(|| std::future::ready(Ok(None::<u32>)))).on(&device);
    let end = flow.add("end", sink(async |_: u32| Ok(()))).on(&device);
    flow.connect(numbers.output, end.input);
    flow.replay("net", (&numbers, &end));
    assert_contains(&flow.check().unwrap_err().to_string(), &["no message enters it from outside"]);
}

/// `guilty` enqueues additional work in every second run, and `innocent` always enqueues the same. The nodes of `innocent`
/// then have other positions in the graph, which must not be blamed on it.
#[tokio::test]
async fn checked_names_the_operator_whose_work_differs() {
    use futures::FutureExt;

    let device = emulated();
    let mut number = 0;
    let alternates = forwarding(move |x, cx| {
        number += 1;
        async move { if number % 2 == 0 { increment::launch(cx.stream()?, x) } else { Ok(()) } }.boxed()
    });
    let mut flow = Flow::new("two");
    let read = flow.add("read", SendEach::new(batches(&[2, 2])));
    let guilty = flow.add("guilty", alternates).on(&device);
    let innocent = flow.add("innocent", Affine(2, 7)).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    let hub = HubOptions::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, guilty.input, hub);
    flow.connect(guilty.output, innocent.input);
    flow.connect_with(innocent.output, collect.input, hub);
    flow.replay("net", (&guilty, &innocent)).buckets([2]).rows(guilty.input, ROW).checked();
    let error = flow.run().await.unwrap_err().to_string();
    assert_contains(&error, &["operator `guilty`", "two captures differ", "`increment` is not the same"]);
}
