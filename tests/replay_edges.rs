//! Sections that are replayed, at their edges: operators that keep what no replay keeps, odd shapes, ends in the middle.

mod common;

use common::*;
use futures::{FutureExt, future::BoxFuture};
use wakeline::{flow::Added, operator::MapHandles, prelude::*};

/// left += right
#[kernel(unsafe(cuda = "kernels/add_to.cu"))]
fn add_to(left: &mut [u32], right: &[u32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left = left.wrapping_add(*right);
    }
}

type Io = MapPorts<Envelope<u32>, Envelope<u32>>;
type Handles = MapHandles<Envelope<u32>, Envelope<u32>>;

/// An operator that is a function, and what it keeps from run to run.
struct Does<S, F>(S, F);

impl<S, F> Operator for Does<S, F>
where
    S: Send + 'static,
    F: for<'a> FnMut(&'a mut S, &'a mut Io, &'a mut Cx) -> BoxFuture<'a, Result<()>> + Send + 'static,
{
    type Ports = Io;

    async fn compute(&mut self, ports: &mut Io, cx: &mut Cx) -> Result<()> {
        (self.1)(&mut self.0, ports, cx).await
    }
}

fn does<S, F>(state: S, act: F) -> Does<S, F>
where
    S: Send + 'static,
    F: for<'a> FnMut(&'a mut S, &'a mut Io, &'a mut Cx) -> BoxFuture<'a, Result<()>> + Send + 'static,
{
    Does(state, act)
}

/// Each message is so many rows of four elements.
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
fn says(told: &str, what: &[&str]) {
    what.iter().for_each(|what| assert!(told.contains(what), "no `{what}` in: {told}"));
}

/// `read -> first -> one -> collect`: `first` increments in place, in its section or not.
async fn beside<O: Operator<Ports = Io>>(
    device: &Device,
    rows: &[usize],
    one: O,
    settle: impl FnOnce(&mut Flow, &Added<Handles>, &Added<Handles>),
) -> Result<(Vec<Vec<u32>>, Report)> {
    let seen = shared();
    let mut flow = Flow::new("edges");
    let read = flow.add("read", SendEach::new(batches(rows)));
    let first = flow.add("first", AddOne).on(device);
    let one = flow.add("one", one).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = Hub::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, first.input, hub);
    flow.connect_with(first.output, one.input, hub);
    flow.connect_with(one.output, collect.input, hub);
    settle(&mut flow, &first, &one);
    let report = flow.run().await?;
    let seen = lock(&seen).clone();
    Ok((seen, report))
}

/// Into a blank envelope.
struct AddOne;

impl Operator for AddOne {
    type Ports = Io;

    async fn compute(&mut self, ports: &mut Io, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = ports.output.blank().await?;
        y.set_len(x.len())?;
        add_one::launch(cx.stream()?, &x, &mut y)?;
        ports.output.send(y).await
    }
}

/// What a flow with `one` in a section fails with, `first` in it too.
async fn refused<O: Operator<Ports = Io>>(device: &Device, at_start: bool, checked: bool, one: O) -> String {
    let ran = beside(device, &[4, 4, 4, 4], one, |flow, first, one| {
        let net = flow.replay("net", (first, one)).buckets([1, 2, 4]).rows(first.input, ROW);
        if at_start {
            net.at_start();
        }
        if checked {
            net.checked();
        }
    });
    let error = ran.await.expect_err("it is refused");
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    let told = error.to_string();
    assert!(told.starts_with("section `net`: operator `one`: "), "{told}");
    told
}

on_both!(what_an_operator_makes_in_a_capture_it_cannot_keep, async |device: Device| {
    // In the graph of the first bucket it is written, and in none of the others'.
    let lazy = does(None, |weights: &mut Option<Buffer<u32>>, ports, cx| {
        async move {
            let mut x = ports.input.take()?;
            let stream = cx.stream()?;
            if weights.is_none() {
                *weights = Some(Buffer::from_slice(stream, &[100; 64])?);
            }
            add_to::launch(stream, &mut x, weights.as_ref().unwrap())?;
            ports.output.send(x).await
        }
        .boxed()
    });
    let told = refused(&device, true, false, lazy).await;
    says(&told, &["memory that was made in the capture", "is kept beyond it", "made before, in `start`"]);

    // The difference to the message before, which replays would take from the same one for ever.
    let differs = does(None, |before: &mut Option<Envelope<u32>>, ports, cx| {
        async move {
            let x = ports.input.take()?;
            let mut y = ports.output.blank().await?;
            y.set_len(x.len())?;
            let stream = cx.stream()?;
            stream.copy(&x, &mut y)?;
            if let Some(before) = before.take() {
                add_to::launch(stream, &mut y, &before)?;
            }
            *before = Some(x);
            ports.output.send(y).await
        }
        .boxed()
    });
    let told = refused(&device, false, false, differs).await;
    says(&told, &["memory that was made in the capture", "is kept beyond it"]);
});

on_both!(checked_a_section_uses_the_same_memory_in_every_run, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    // Which of them is written is not what the kernel is, but what it is given.
    for both in [false, true] {
        let sums = [1, 2].map(|n| Buffer::from_slice(&stream, &[100 * n; 64]).unwrap());
        let turns = does(sums, move |sums, ports, cx| {
            async move {
                let mut x = ports.input.take()?;
                sums.swap(0, 1);
                let [one, other] = sums;
                if both {
                    add_to::launch(cx.stream()?, one, other)?;
                }
                add_to::launch(cx.stream()?, &mut x, one)?;
                ports.output.send(x).await
            }
            .boxed()
        });
        let told = refused(&device, false, true, turns).await;
        says(&told, &["captured twice, it uses other memory the second time"]);
    }
});

on_both!(what_is_said_beside_work_and_messages_is_in_no_replay, async |device: Device| {
    let removes = does((), |_, ports, cx| {
        async move {
            let x = ports.input.take()?;
            cx.remove_metadata("number");
            ports.output.send(x).await
        }
        .boxed()
    });
    let told = refused(&device, false, false, removes).await;
    says(&told, &["it takes metadata away from messages, which no replay does"]);

    let replies = does((), |_, ports, cx| {
        async move {
            let x = ports.input.take()?;
            drop(cx.take_replies());
            ports.output.send(x).await
        }
        .boxed()
    });
    let told = refused(&device, false, false, replies).await;
    says(&told, &["it calls `Cx::take_replies`, which no replay does"]);

    let closes = does((), |_, ports, _| {
        async move {
            let x = ports.input.take()?;
            ports.output.send(x).await?;
            ports.output.close();
            Ok(())
        }
        .boxed()
    });
    let told = refused(&device, true, false, closes).await;
    says(&told, &["it closes `output`, which no replay does"]);

    let finishes = does(0, |n, ports, cx| {
        async move {
            *n += 1;
            if *n == 2 {
                cx.finish();
            }
            let x = ports.input.take()?;
            ports.output.send(x).await
        }
        .boxed()
    });
    let told = refused(&device, false, false, finishes).await;
    says(&told, &["it calls `Cx::finish`, which no replay does"]);
});

on_both!(an_operator_that_ends_before_anything_is_captured_ends_the_section, async |device: Device| {
    let once = does((), |_, ports, cx| {
        async move {
            cx.finish();
            let x = ports.input.take()?;
            ports.output.send(x).await
        }
        .boxed()
    });
    let ran = beside(&device, &[4, 4, 4], once, |flow, first, one| {
        flow.replay("net", (first, one));
    });
    let (seen, report) = ran.await.unwrap();
    assert_eq!((seen.len(), counts(&report)), (1, (0, 1, 0)));
});

on_both!(a_panic_in_a_capture_is_an_error_of_its_operator, async |device: Device| {
    let panics = does(0, |n, ports, _| {
        async move {
            let x = ports.input.take()?;
            *n += 1;
            assert!(*n != 2, "the second time");
            ports.output.send(x).await
        }
        .boxed()
    });
    let ran = beside(&device, &[4, 4, 4], panics, |flow, first, one| {
        flow.replay("net", (first, one));
    });
    let error = ran.await.expect_err("it panics");
    assert_eq!(error.kind(), ErrorKind::Panicked);
    says(&error.to_string(), &["section `net`: operator `one`", "the second time"]);
});

on_both!(what_is_sent_may_be_larger_than_the_envelopes_of_its_hub, async |device: Device| {
    let run = async |replay: bool| {
        let seen = shared();
        let mut flow = Flow::new("own");
        let own = does((), |_, ports, cx| {
            async move {
                let x = ports.input.take()?;
                let mut y = cx.alloc::<u32>(x.len())?;
                add_one::launch(cx.stream()?, &x, &mut y)?;
                ports.output.send(y.into()).await
            }
            .boxed()
        });
        let read = flow.add("read", SendEach::new(batches(&[8, 8, 1, 8])));
        let one = flow.add("one", own).on(&device);
        let two = flow.add("two", Increment).on(&device);
        let collect = flow.add("collect", Collect(seen.clone()));
        let hub = Hub::bounded(1).envelope_bytes(4096);
        flow.connect_with(read.output, one.input, hub);
        flow.connect_with(one.output, two.input, Hub::bounded(1).envelope_bytes(16));
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

on_both!(a_section_may_end_where_nothing_comes_out, async |device: Device| {
    /// Adds all that comes to what it has.
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
    let hub = Hub::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, adds.input, hub);
    flow.replay("net", (&one, &adds));
    let report = flow.run().await.unwrap();
    assert_eq!(counts(&report), (4, 1, 1));
});
