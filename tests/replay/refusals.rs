//! What a section cannot be, and what a graph cannot hold, is an error that says whose it is.

use super::*;

/// What a flow with `operator` in a section fails with; and with `at_start`, before anything was streamed.
async fn refused<O>(device: &Device, at_start: bool, operator: O) -> String
where
    O: Operator<Ports = MapPorts<Envelope<u32>, Envelope<u32>>>,
{
    let ran = alone(device, &[2, 2, 2], operator, |flow, one| {
        let net = flow.replay("net", one);
        net.buckets([2]).rows(one.input, ROW).checked();
        if at_start {
            net.at_start();
        }
    });
    let error = ran.await.expect_err("it is refused");
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    let told = error.to_string();
    assert!(told.starts_with("section `net`: operator `one`: "), "{told}");
    told
}

/// An operator that does one thing which no graph can hold, beside what it is there for.
struct Odd<F>(F);

impl<F> Operator for Odd<F>
where
    F: for<'a> FnMut(&'a mut Envelope<u32>, &'a mut Cx) -> futures::future::BoxFuture<'a, Result<()>> + Send + 'static,
{
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut x = ports.input.take()?;
        (self.0)(&mut x, cx).await?;
        ports.output.send(x).await
    }
}

fn odd<F>(act: F) -> Odd<F>
where
    F: for<'a> FnMut(&'a mut Envelope<u32>, &'a mut Cx) -> futures::future::BoxFuture<'a, Result<()>> + Send + 'static,
{
    Odd(act)
}

on_both!(what_a_capture_cannot_hold_is_an_error_that_names_the_operator, async |device: Device| {
    use futures::FutureExt;

    let waits = odd(|_, _| tokio::task::yield_now().map(Ok).boxed());
    let told = refused(&device, false, waits).await;
    assert!(told.contains("its `compute` waits for something on the host"), "{told}");

    let awaits = odd(|x, cx| {
        async move {
            increment::launch(cx.stream()?, x)?;
            cx.stream()?.completed().await
        }
        .boxed()
    });
    let told = refused(&device, true, awaits).await;
    assert!(told.contains("the work of stream `one` is captured, and none of it has run"), "{told}");

    let looks = odd(|x, cx| {
        async move {
            let mut here = Buffer::<u32>::pinned(cx.device(), x.len())?;
            cx.stream()?.copy(x, &mut here)?;
            here.read().await.map(drop)
        }
        .boxed()
    });
    let told = refused(&device, false, looks).await;
    assert!(told.contains("the host can neither wait for it nor read its results"), "{told}");

    let copies_back = odd(|x, cx| {
        async move {
            let mut here = Buffer::<u32>::pinned(cx.device(), x.len())?;
            cx.stream()?.copy(x, &mut here)
        }
        .boxed()
    });
    let ran = alone(&device, &[2, 2], copies_back, |flow, one| {
        flow.replay("net", one);
    });
    let told = ran.await.err().unwrap().to_string();
    assert!(told.contains("operator `one` reads data back"), "{told}");

    let calls = odd(|_, cx| async { cx.stream()?.host_function(|| {}) }.boxed());
    let told = refused(&device, false, calls).await;
    assert!(told.contains("a host function that can be called once"), "{told}");

    let pool = Allocator::stream_ordered(&device);
    let allocates = odd(move |_, cx| {
        let made = cx.stream().and_then(|stream| pool.alloc::<u32>(stream, 8).map(drop));
        async move { made }.boxed()
    });
    let told = refused(&device, false, allocates).await;
    assert!(told.contains("stream-ordered memory in a capture"), "{told}");

    let mut number = 0;
    let counts = odd(move |x, cx| {
        number += 1;
        let launched = cx.stream().and_then(|stream| {
            let mut y = stream.alloc::<u32>(x.len())?;
            affine::launch(stream, x, &mut y, number, 0)
        });
        async move { launched }.boxed()
    });
    let told = refused(&device, true, counts).await;
    assert!(told.contains("captured twice, node 1, `affine` is not the same"), "{told}");

    let ends = odd(|_, cx| {
        cx.finish();
        async { Ok(()) }.boxed()
    });
    let told = refused(&device, true, ends).await;
    assert!(told.contains("it calls `Cx::finish`, which no replay does"), "{told}");

    let mut kept = None;
    let keeps = odd(move |_, cx| {
        let filled = cx.stream().cloned().and_then(|own| {
            if kept.is_none() {
                let data = Buffer::<u32>::new(own.device(), 8)?;
                kept = Some((own, data));
            }
            kept.as_mut().map_or(Ok(()), |(stream, data)| stream.fill(data, 1))
        });
        async move { filled }.boxed()
    });
    let told = refused(&device, false, keeps).await;
    assert!(told.contains("it enqueues work on a stream that it has kept from an earlier run"), "{told}");

    let marks = odd(|_, cx| {
        cx.insert_metadata("mine", 1);
        async { Ok(()) }.boxed()
    });
    let told = refused(&device, false, marks).await;
    assert!(told.contains("it gives messages metadata of its own, which no replay does"), "{told}");
});

/// Of those methods that no replay calls.
struct Wordy<const WHICH: u8>;

impl<const WHICH: u8> Operator for Wordy<WHICH> {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    fn may_run(&mut self, _ports: &Self::Ports, cx: &Cx) -> bool {
        if WHICH == b'm' { true } else { Increment.may_run(_ports, cx) }
    }

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        ports.output.send(x).await
    }

    fn after(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        if WHICH != b'a' {
            drop(Increment.after(ports, cx));
        }
        async { Ok(()) }
    }
}

/// As often as it is told.
struct SendsTwice;

impl Operator for SendsTwice {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = ports.output.blank().await?;
        y.set_len(x.len())?;
        cx.stream()?.copy(&x, &mut y)?;
        ports.output.send(x).await?;
        ports.output.send(y).await
    }
}

/// Takes nothing.
struct SendsOnly;

impl Operator for SendsOnly {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut y = ports.output.blank().await?;
        y.set_len(1)?;
        cx.stream()?.fill(&mut y, 1)?;
        ports.output.send(y).await
    }
}

on_both!(an_operator_of_a_section_computes_and_moves_one_message_each, async |device: Device| {
    let told = refused(&device, false, Wordy::<b'm'>).await;
    assert!(told.contains("it has a `may_run` of its own, which no replay does"), "{told}");
    let told = refused(&device, false, Wordy::<b'a'>).await;
    assert!(told.contains("it has a `after` of its own, which no replay does"), "{told}");
    let own = task(|ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, _| {
        use futures::FutureExt;
        async move { ports.input.recv().await.map(drop) }.boxed()
    });
    let told = refused(&device, false, own).await;
    assert!(told.contains("it has a `run` of its own, which no replay does"), "{told}");
    let told = refused(&device, true, SendsTwice).await;
    assert!(told.contains("a run of it sends 2 messages at `output`"), "{told}");
    for at_start in [true, false] {
        let told = refused(&device, at_start, SendsOnly).await;
        assert!(told.contains("a run of it takes 0 messages at `input`"), "{told}");
    }
});

/// The problems of a flow of `read -> one -> two -> collect`, the middle ones on a device.
fn problems(settle: impl FnOnce(&mut Flow, &Added<Io>, &Added<Io>, &Device)) -> String {
    let device = emulated();
    let mut flow = Flow::new("wrong");
    let read = flow.add("read", SendEach::new(batches(&[1])));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, one.input, Hub::bounded(1).envelope_bytes(64));
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    settle(&mut flow, &one, &two, &device);
    let error = flow.check().expect_err("it is wrong");
    assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
    error.to_string()
}

#[test]
fn what_is_wrong_with_a_section_is_said_before_anything_runs() {
    let told = problems(|flow, one, two, _| {
        let _ = flow.replay("net", (one, two)).buckets([]);
        flow.replay("net", one).buckets([0, 1]).rows(two.input, 4).rows(one.input, 0);
    });
    says(&told, &["section `net`: its list of buckets is empty", "section `net`: another section has the same name"]);
    says(&told, &["operator `one` is also in another section"]);

    let told = problems(|flow, one, two, _| {
        flow.replay("net", one).buckets([0, 1]).rows(two.input, 4).rows(one.input, 0).whole(two.output);
    });
    says(&told, &["a bucket of 0 rows holds nothing", "a row of 0 elements at `input`"]);
    says(
        &told,
        &["the rows of `two.input` are set, which is not a port on its boundary", "whole messages of `two.output`"],
    );

    let told = problems(|flow, one, _, _| {
        flow.replay("start", one).at_start();
    });
    says(&told, &["section `start`: it is to be captured at the start, when the sizes are not known yet"]);

    let told = problems(|flow, one, two, _| {
        let _ = two.clone().on(&Device::host());
        flow.replay("net", (one, two, one));
    });
    says(&told, &["operator `one` is named twice"]);

    let told = problems(|flow, one, two, _| {
        let _ = two.clone().on(&Device::host());
        flow.replay("net", (one, two));
    });
    says(&told, &["operator `two` is on the host, which has no graphs"]);

    let told = problems(|flow, one, two, _| {
        let _ = two.clone().on(&emulated());
        flow.replay("net", (one, two));
    });
    says(&told, &["a graph belongs to one device"]);

    let told = problems(|flow, one, two, _| {
        let _ = one.clone().on_own_thread();
        let _ = two.clone().when(wakeline::condition::count(3));
        flow.replay("net", (one, two));
    });
    says(&told, &["operator `one` has a thread of its own", "operator `two` has a condition of its own"]);

    let told = problems(|flow, one, two, device| {
        let elsewhere = Flow::new("other").add("far", Increment).on(device);
        flow.replay("net", (one, two, &elsewhere));
        flow.replay("nobody", Vec::<&Added<Io>>::new());
    });
    says(&told, &["operator `far` belongs to another flow", "section `nobody`: it has no operators"]);
}

#[test]
fn a_section_hangs_together_and_waits_for_nobody_of_its_own() {
    let device = emulated();
    let hub = Hub::bounded(1).envelope_bytes(64);

    let mut flow = Flow::new("apart");
    let (mut ends, mut all) = (Vec::new(), Vec::new());
    for name in ["one", "two"] {
        let read = flow.add(format!("read {name}"), SendEach::new(batches(&[1])));
        let one = flow.add(name, Increment).on(&device);
        let collect = flow.add(format!("collect {name}"), Collect(shared()));
        flow.connect_with(read.output, one.input, hub);
        flow.connect(one.output, collect.input);
        all.push(one);
        ends.push(collect);
    }
    flow.replay("net", [&all[0], &all[1]]);
    says(&flow.check().unwrap_err().to_string(), &["no path within it leads from `one` to `two` or back"]);

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
    says(
        &flow.check().unwrap_err().to_string(),
        &["`join` takes what `fork` sends by way of `around`", "wait for itself"],
    );

    let mut flow = Flow::new("numbers");
    let numbers = flow.add("numbers", source(|| std::future::ready(Ok(None::<u32>)))).on(&device);
    let double = flow.add("double", map(async |n: u32| Ok(2 * n))).on(&device);
    let end = flow.add("end", sink(async |_: u32| Ok(()))).on(&device);
    flow.connect(numbers.output, double.input);
    flow.connect(double.output, end.input);
    flow.replay("net", &double);
    let told = flow.check().unwrap_err().to_string();
    says(
        &told,
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
    says(&flow.check().unwrap_err().to_string(), &["no message comes into it from outside"]);
}

/// An operator that does more every second time stands before one that always does the same: that one is elsewhere in the
/// graph then, and is not to blame.
#[tokio::test]
async fn checked_names_the_operator_that_decides() {
    use futures::FutureExt;

    let device = emulated();
    let mut number = 0;
    let now_and_then = odd(move |x, cx| {
        number += 1;
        async move { if number % 2 == 0 { increment::launch(cx.stream()?, x) } else { Ok(()) } }.boxed()
    });
    let mut flow = Flow::new("two");
    let read = flow.add("read", SendEach::new(batches(&[2, 2])));
    let guilty = flow.add("guilty", now_and_then).on(&device);
    let innocent = flow.add("innocent", Affine(2, 7)).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    let hub = Hub::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, guilty.input, hub);
    flow.connect(guilty.output, innocent.input);
    flow.connect_with(innocent.output, collect.input, hub);
    flow.replay("net", (&guilty, &innocent)).buckets([2]).rows(guilty.input, ROW).checked();
    let told = flow.run().await.unwrap_err().to_string();
    says(&told, &["operator `guilty`", "captured twice", "`increment` is not the same"]);
}
