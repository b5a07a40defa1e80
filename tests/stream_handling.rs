//! Scenarios S2 to S6 and S8: an operator's own stream, the stream it uses without one, the streams that messages carry,
//! joining, the default stream.
//!
//! Where only a message's stream may order the work, the tracking of buffers is switched off: the race checker then
//! reports a missing order.

use std::{
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use common::*;
use futures::{FutureExt, future::BoxFuture};
use wakeline::{
    Inputs, Stream, StreamPool,
    device::{Emulated, Simulation},
    prelude::*,
    stream::{Event, Ticket},
};

struct Each<P, F>(F, PhantomData<fn(P)>);

impl<P, F> Operator for Each<P, F>
where
    P: Ports,
    F: for<'a> FnMut(&'a mut P, &'a mut Cx) -> BoxFuture<'a, Result<()>> + Send + 'static,
{
    type Ports = P;

    async fn compute(&mut self, ports: &mut P, cx: &mut Cx) -> Result<()> {
        (self.0)(ports, cx).await
    }
}

/// An operator with this `compute`.
fn each<P, F>(compute: F) -> impl Operator<Ports = P>
where
    P: Ports,
    F: for<'a> FnMut(&'a mut P, &'a mut Cx) -> BoxFuture<'a, Result<()>> + Send + 'static,
{
    Each(compute, PhantomData)
}

/// A buffer as host data: it is in no envelope, so a hub neither copies nor orders it.
type Loose = Host<Buffer<u32>>;

/// Fills a buffer with `value` on its stream and sends it, `runs` times.
fn fills(value: u32, runs: u32) -> impl Operator<Ports = SourcePorts<Loose>> {
    let mut left = runs;
    each(move |ports: &mut SourcePorts<Loose>, cx| {
        left -= 1;
        let last = left == 0;
        async move {
            let mut buffer = Buffer::new(cx.device(), 64)?;
            cx.stream()?.fill(&mut buffer, value)?;
            if last {
                cx.finish();
            }
            ports.output.send(Host(buffer)).await?;
            Ok(())
        }
        .boxed()
    })
}

/// The names of the tickets' streams.
fn names<'a>(streams: impl Iterator<Item = Option<&'a Ticket>>) -> Vec<Option<String>> {
    streams.map(|ticket| ticket.map(|ticket| ticket.stream().name().to_string())).collect()
}

#[derive(Ports)]
struct MergePorts {
    #[input]
    parts: Inputs<Loose>,
}

#[derive(Ports)]
struct PairPorts {
    #[input]
    left: Input<Loose>,
    #[input]
    right: Input<Loose>,
    #[output]
    output: Output<Loose>,
}

// S2, S5: an operator's own stream and its named ones.

on_both!(s2_an_operator_keeps_its_streams_for_all_runs, async |device: Device| {
    let seen: Shared<(Stream, Stream, Stream, Stream)> = shared();
    let list = seen.clone();
    let pool = StreamPool::builder(&device).maximum(3).build().unwrap();
    let mut flow = Flow::new("s2");
    let fill = flow.add("fill", fills(7, 5)).on(&device);
    let own = flow.add(
        "own",
        each(move |ports: &mut SinkPorts<Loose>, cx| {
            let list = list.clone();
            async move {
                let Host(mut buffer) = ports.input.take()?;
                let received = ports.input.streams().next().flatten().expect("filled on a stream").stream().clone();
                let (copies, other) = (cx.stream_named("copies")?, cx.stream_named("other")?);
                let own = cx.stream()?;
                increment::launch(own, &mut buffer)?;
                assert_eq!(buffer.to_vec(own).await?, [8; 64]);
                lock(&list).push((own.clone(), received, copies, other));
                Ok(())
            }
            .boxed()
        }),
    );
    let own = own.on(&device).streams(&pool);
    flow.connect(fill.output, own.input);
    flow.run().await.unwrap();
    let seen = lock(&seen);
    assert_eq!(seen.len(), 5);
    let (own, received, copies, other) = &seen[0];
    assert!(seen.iter().all(|run| run == &seen[0]), "the same streams in every run, the named ones too");
    let default = Stream::default_of(&device).unwrap();
    let all = [own, received, copies, other, &default];
    for (at, stream) in all.iter().enumerate() {
        assert!(all[..at].iter().all(|before| before != stream), "{stream:?} equals an earlier stream");
        assert_eq!(stream.device(), &device);
    }
    assert_eq!(
        [own, received, copies, other].map(|stream| stream.name()),
        ["own", "fill", "own, copies", "own, other"]
    );
    assert_eq!((pool.made(), pool.in_use()), (3, 0));
});

on_both!(s5_a_named_stream_is_refused_without_a_free_stream, async |device: Device| {
    let pool = StreamPool::builder(&device).name("one").maximum(1).build().unwrap();
    let errors = shared();
    for streams in [Some(&pool), None] {
        let list = errors.clone();
        let mut flow = Flow::new("s5");
        let alone = flow.add(
            "alone",
            each(move |_: &mut (), cx| {
                cx.finish();
                let list = list.clone();
                async move {
                    cx.stream()?;
                    let error = cx.stream_named("copies").unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Usage);
                    lock(&list).push(error.to_string());
                    Ok(())
                }
                .boxed()
            }),
        );
        let alone = alone.on(&device);
        let _alone = match streams {
            Some(pool) => alone.streams(pool),
            None => alone.without_own_stream(),
        };
        flow.run().await.unwrap();
    }
    let errors = lock(&errors);
    assert!(errors.iter().all(|error| error.contains("stream `copies` of `alone`")), "{errors:?}");
    assert!(errors[0].contains("pool `one` is used up: its maximum of 1 stream is in use"), "{}", errors[0]);
    assert!(errors[1].contains("added without streams"), "{}", errors[1]);
});

// S3: only the streams that they carry order these messages, which have no envelopes.

on_both!(s3_an_operators_stream_waits_for_two_inputs, async |device: Device| {
    device.switch_tracking_off();
    let sums = shared();
    let list = sums.clone();
    let mut flow = Flow::new("s3");
    let (left, right) = (flow.add("left", fills(3, 8)).on(&device), flow.add("right", fills(4, 8)).on(&device));
    let add = each(move |ports: &mut PairPorts, cx| {
        async move {
            // One input is taken before the stream is asked for, the other one after.
            let Host(left) = ports.left.take()?;
            let own = cx.stream()?;
            let Host(mut right) = ports.right.take()?;
            let mut sum = Buffer::new(own.device(), 1)?;
            common::sum::launch(own, &left, &mut sum)?;
            increment::launch(own, &mut right)?;
            // The uses are not tracked: the buffers are dropped only when the work is done.
            own.completed().await?;
            ports.output.send(Host(sum)).await?;
            Ok(())
        }
        .boxed()
    });
    let add = flow.add("add", add).on(&device);
    let read = each(move |ports: &mut SinkPorts<Loose>, cx| {
        let list = list.clone();
        async move {
            let Host(sum) = ports.input.take()?;
            let sum = sum.to_vec(cx.stream()?).await?;
            lock(&list).push(sum);
            Ok(())
        }
        .boxed()
    });
    let read = flow.add("read", read).on(&device);
    flow.connect(left.output, add.left);
    flow.connect(right.output, add.right);
    flow.connect(add.output, read.input);
    flow.run().await.unwrap();
    assert_eq!(*lock(&sums), vec![vec![3 * 64]; 8]);
});

on_both!(s3_a_message_is_ordered_after_its_own_work_only, async |device: Device| {
    let go = Arc::new(tokio::sync::Notify::new());
    let done = go.clone();
    let mut flow = Flow::new("s3");
    let early = each(move |ports: &mut SourcePorts<Loose>, cx| {
        let done = done.clone();
        async move {
            cx.finish();
            let mut buffer = Buffer::new(cx.device(), 64)?;
            let stream = cx.stream()?.clone();
            stream.fill(&mut buffer, 5)?;
            ports.output.send(Host(buffer)).await?;
            // A wait for the whole stream, and not for the message's ticket, would never end.
            let held = hold(&stream);
            done.notified().await;
            drop(held);
            Ok(())
        }
        .boxed()
    });
    let early = flow.add("early", early).on(&device);
    let late = each(move |ports: &mut SinkPorts<Loose>, cx| {
        let go = go.clone();
        async move {
            let stream = cx.stream()?.clone();
            let Host(mut buffer) = ports.input.take()?;
            increment::launch(&stream, &mut buffer)?;
            assert_eq!(buffer.to_vec(&stream).await?, [6; 64]);
            // The same for an explicit join.
            let other = cx.stream_named("other")?;
            other.join(ports.input.streams())?;
            other.fill(&mut buffer, 0)?;
            other.completed().await?;
            go.notify_one();
            Ok(())
        }
        .boxed()
    });
    let late = flow.add("late", late).on(&device);
    flow.connect(early.output, late.input);
    flow.run().await.unwrap();
});

on_both!(s3_inputs_show_the_streams_of_all_senders, async |device: Device| {
    let seen = shared();
    let list = seen.clone();
    let pool = StreamPool::builder(&device).build().unwrap();
    let mut flow = Flow::new("s3");
    let look = each(move |ports: &mut MergePorts, _cx| {
        let list = list.clone();
        async move {
            assert_eq!(names(ports.parts.streams()), [], "no message was taken in this run");
            let taken: Vec<_> = ports.parts.take()?.collect();
            assert_eq!(taken.len(), ports.parts.streams().count());
            lock(&list).push(names(ports.parts.streams()));
            Ok(())
        }
        .boxed()
    });
    let look = flow.add("look", look).on(&device).streams(&pool);
    for name in ["a", "b", "c"] {
        let part = flow.add(name, fills(1, 2)).on(&device);
        flow.connect(part.output, look.parts);
    }
    // Two senders on the device that use no stream.
    for name in ["d", "e"] {
        let (at, mut left) = (device.clone(), 2);
        let silent = source(move || {
            left -= 1;
            std::future::ready(Ok((left >= 0).then(|| Host(Buffer::new(&at, 64).unwrap()))))
        });
        let silent = flow.add(name, silent).on(&device);
        flow.connect(silent.output, look.parts);
    }
    flow.run().await.unwrap();
    let row = ["a", "b", "c"].map(|name| Some(name.to_string())).into_iter().chain([None, None]).collect::<Vec<_>>();
    assert_eq!(*lock(&seen), [row.clone(), row], "five messages, three with a stream");
    assert_eq!(pool.made(), 0, "reading the tickets takes no stream");
});

// An envelope carries the ticket of its last write. Later work on that stream does not delay its reader.
on_both!(s3_an_envelope_carries_the_ticket_of_its_last_write, async |device: Device| {
    let seen = shared();
    let list = seen.clone();
    let mut flow = Flow::new("s3");
    let produce = flow.add("produce", SendEach::new([vec![1_u32; 16]]));
    let work = each(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
        async move {
            let mut envelope = ports.input.take()?;
            assert_eq!(names(ports.input.streams()), [None], "the host has no stream");
            let stream = cx.stream()?;
            increment::launch(stream, &mut envelope)?;
            let written = stream.ticket().number();
            stream.host_function(|| ())?;
            assert_eq!(stream.ticket().number(), written + 1);
            ports.output.send(envelope).await?;
            Ok(())
        }
        .boxed()
    });
    let work = flow.add("work", work).on(&device);
    let pass = each(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
        let list = list.clone();
        async move {
            let envelope = ports.input.take()?;
            let ticket = ports.input.streams().next().flatten().cloned().expect("a stream");
            lock(&list).push((ticket.stream().name().to_string(), ticket.number() < ticket.stream().ticket().number()));
            cx.stream()?.host_function(|| ())?;
            ports.output.send(envelope).await?;
            Ok(())
        }
        .boxed()
    });
    let pass = flow.add("pass", pass).on(&device);
    let list = seen.clone();
    let end = each(move |ports: &mut SinkPorts<Envelope<u32>>, _cx| {
        let list = list.clone();
        async move {
            let envelope = ports.input.take()?;
            let ticket = ports.input.streams().next().flatten().cloned().expect("a stream");
            lock(&list).push((ticket.stream().name().to_string(), ticket.number() == 0));
            assert_eq!(envelope.read().await?, [2; 16]);
            Ok(())
        }
        .boxed()
    });
    let end = flow.add("end", end);
    flow.connect_with(produce.output, work.input, HubOptions::default().envelope_bytes(64));
    flow.connect(work.output, pass.input);
    flow.connect(pass.output, end.input);
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), [("work".to_string(), true), ("pass".to_string(), true)]);
});

// S4: operators with and without their own streams.

#[derive(Ports)]
struct ForkPorts {
    #[output]
    left: Output<Loose>,
    #[output]
    right: Output<Loose>,
}

on_both!(s4_two_sinks_that_share_a_pool_have_two_streams, async |device: Device| {
    let pool = StreamPool::builder(&device).maximum(2).build().unwrap();
    let seen: Shared<Stream> = shared();
    let mut flow = Flow::new("s4");
    let fork = each(move |ports: &mut ForkPorts, cx| {
        async move {
            cx.finish();
            for output in [&mut ports.left, &mut ports.right] {
                let mut buffer = Buffer::new(cx.device(), 8)?;
                cx.stream()?.fill(&mut buffer, 1)?;
                output.send(Host(buffer)).await?;
            }
            Ok(())
        }
        .boxed()
    });
    let fork = flow.add("fork", fork).on(&device);
    let sinks = ["one", "two"].map(|name| {
        let list = seen.clone();
        let sink = each(move |ports: &mut SinkPorts<Loose>, cx| {
            let list = list.clone();
            async move {
                ports.input.take()?;
                lock(&list).push(cx.stream()?.clone());
                Ok(())
            }
            .boxed()
        });
        flow.add(name, sink).on(&device).streams(&pool)
    });
    flow.connect(fork.left, sinks[0].input);
    flow.connect(fork.right, sinks[1].input);
    flow.run().await.unwrap();
    let seen = lock(&seen);
    assert!(seen.len() == 2 && seen[0] != seen[1]);
    assert_eq!((pool.made(), pool.in_use()), (2, 0));
});

/// Two senders, `add` without its own stream, a reader. Returns two names for each run: the stream that `add`'s message
/// carries, and the reader's stream.
async fn runs_without_own_stream(device: &Device, pool: Option<&StreamPool>) -> Vec<[Option<String>; 2]> {
    device.switch_tracking_off();
    let seen = shared();
    let mut flow = Flow::new("s4");
    let (left, right) = (flow.add("left", fills(3, 6)).on(device), flow.add("right", fills(4, 6)).on(device));
    let mut run = 0;
    let add = each(move |ports: &mut PairPorts, cx| {
        run += 1;
        let turned = run % 2 == 0;
        async move {
            // The input that is taken first decides the stream. Every third run asks for it between the two.
            let (mut left, mut right) = (None, None);
            for is_left in [!turned, turned] {
                if is_left {
                    left = Some(ports.left.take()?.0);
                } else {
                    right = Some(ports.right.take()?.0);
                }
                if run % 3 == 0 {
                    cx.stream()?;
                }
            }
            let (Some(left), Some(mut right)) = (left, right) else { unreachable!() };
            let mut sum = Buffer::new(cx.device(), 1)?;
            let stream = cx.stream()?.clone();
            assert_eq!(stream.name(), if turned { "right" } else { "left" });
            common::sum::launch(&stream, &left, &mut sum)?;
            increment::launch(&stream, &mut right)?;
            stream.completed().await?;
            ports.output.send(Host(sum)).await?;
            Ok(())
        }
        .boxed()
    });
    let add = flow.add("add", add).on(device);
    let add = match pool {
        Some(pool) => add.streams(pool),
        None => add.without_own_stream(),
    };
    let list = seen.clone();
    let read = each(move |ports: &mut SinkPorts<Loose>, cx| {
        let list = list.clone();
        async move {
            let Host(sum) = ports.input.take()?;
            let [name] = &names(ports.input.streams())[..] else { panic!("one message") };
            assert_eq!(sum.to_vec(cx.stream()?).await?, [3 * 64]);
            lock(&list).push([name.clone(), Some(cx.stream()?.name().to_string())]);
            Ok(())
        }
        .boxed()
    });
    let read = flow.add("read", read).on(device);
    flow.connect(left.output, add.left);
    flow.connect(right.output, add.right);
    flow.connect(add.output, read.input);
    flow.run().await.unwrap();
    lock(&seen).clone()
}

fn alternating() -> Vec<[Option<String>; 2]> {
    let row = |from: &str| [Some(from.to_string()), Some("read".to_string())];
    (0..6).map(|run| row(if run % 2 == 0 { "left" } else { "right" })).collect()
}

on_both!(s4_an_operator_without_own_stream_uses_the_first_received_one, async |device: Device| {
    assert_eq!(runs_without_own_stream(&device, None).await, alternating());
});

on_both!(s4_an_operator_with_an_exhausted_pool_uses_the_first_received_stream, async |device: Device| {
    let pool = StreamPool::builder(&device).maximum(1).build().unwrap();
    let only = pool.take().unwrap();
    assert_eq!(runs_without_own_stream(&device, Some(&pool)).await, alternating());
    drop(only);
});

#[derive(Ports)]
struct BlankPorts {
    #[output(envelope_bytes = 256)]
    output: Output<Envelope<u32>>,
}

#[derive(Ports)]
struct TwoPorts {
    #[input]
    left: Input<Envelope<u32>>,
    #[input]
    right: Input<Envelope<u32>>,
}

// A borrowed stream also waits for the work on other envelopes; the tracking of their memory is off.
on_both!(s4_a_borrowed_stream_waits_for_the_other_envelopes, async |device: Device| {
    device.switch_tracking_off();
    let sum = shared();
    let list = sum.clone();
    let mut flow = Flow::new("s4");
    let fill = |value: u32| {
        each(move |ports: &mut BlankPorts, cx| {
            async move {
                cx.finish();
                let mut blank = ports.output.blank().await?;
                blank.set_len(64)?;
                cx.stream()?.fill(&mut blank, value)?;
                ports.output.send(blank).await?;
                Ok(())
            }
            .boxed()
        })
    };
    let (left, right) = (flow.add("left", fill(1)).on(&device), flow.add("right", fill(2)).on(&device));
    let add = each(move |ports: &mut TwoPorts, cx| {
        let list = list.clone();
        async move {
            let (mut left, mut right) = (ports.left.take()?, ports.right.take()?);
            let mut total = Buffer::new(cx.device(), 1)?;
            let stream = cx.stream()?;
            assert_eq!(stream.name(), "left");
            increment::launch(stream, &mut left)?;
            increment::launch(stream, &mut right)?;
            common::sum::launch(stream, &right, &mut total)?;
            let total = total.to_vec(stream).await?;
            lock(&list).push(total);
            Ok(())
        }
        .boxed()
    });
    let add = flow.add("add", add).on(&device).without_own_stream();
    flow.connect(left.output, add.left);
    flow.connect(right.output, add.right);
    flow.run().await.unwrap();
    assert_eq!(*lock(&sum), [[3 * 64]]);
});

on_both!(s4_without_a_received_stream_the_default_one_is_used_and_none_is_sent, async |device: Device| {
    let seen = shared();
    let list = seen.clone();
    let mut flow = Flow::new("s4");
    let produce = flow.add("produce", SendEach::new((0..10).map(|n| vec![n; 64])));
    let add = each(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
        async move {
            let mut envelope = ports.input.take()?;
            let default = Stream::default_of(cx.device())?;
            assert_eq!(*cx.stream()?, default);
            increment::launch(cx.stream()?, &mut envelope)?;
            ports.output.send(envelope).await?;
            Ok(())
        }
        .boxed()
    });
    let add = flow.add("add", add).on(&device).without_own_stream();
    // The buffers are still ordered.
    let again = each(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
        let list = list.clone();
        async move {
            let mut envelope = ports.input.take()?;
            lock(&list).extend(names(ports.input.streams()));
            increment::launch(cx.stream()?, &mut envelope)?;
            ports.output.send(envelope).await?;
            Ok(())
        }
        .boxed()
    });
    let again = flow.add("again", again).on(&device);
    let numbers = shared();
    let consume = flow.add("consume", Collect(numbers.clone()));
    flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(256));
    flow.connect(add.output, again.input);
    flow.connect(again.output, consume.input);
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), vec![None; 10]);
    assert_eq!(*lock(&numbers), (0..10).map(|n| vec![n + 2; 64]).collect::<Vec<_>>());
});

// S5: the streams of outputs, and joining.

on_both!(s5_a_message_carries_a_named_stream_only_after_set_stream, async |device: Device| {
    device.switch_tracking_off();
    let seen = shared();
    let list = seen.clone();
    let mut flow = Flow::new("s5");
    let mut run = 0;
    let write = each(move |ports: &mut SourcePorts<Loose>, cx| {
        run += 1;
        let now = run;
        async move {
            let (own, named) = (cx.stream()?.clone(), cx.stream_named("named")?);
            match now {
                2 => ports.output.set_stream(&named)?,
                3 => {}
                _ => ports.output.set_stream(None)?,
            }
            if now == 4 {
                cx.finish();
            }
            let mut buffer = Buffer::new(cx.device(), 64)?;
            let on = if matches!(now, 2 | 3) { &named } else { &own };
            on.fill(&mut buffer, 9)?;
            ports.output.send(Host(buffer)).await?;
            Ok(())
        }
        .boxed()
    });
    let write = flow.add("write", write).on(&device);
    let read = each(move |ports: &mut SinkPorts<Loose>, cx| {
        let list = list.clone();
        async move {
            let Host(buffer) = ports.input.take()?;
            lock(&list).extend(names(ports.input.streams()));
            assert_eq!(buffer.to_vec(cx.stream()?).await?, [9; 64]);
            Ok(())
        }
        .boxed()
    });
    let read = flow.add("read", read).on(&device);
    flow.connect(write.output, read.input);
    flow.run().await.unwrap();
    let seen: Vec<_> = lock(&seen).iter().flatten().cloned().collect();
    assert_eq!(seen, ["write", "write, named", "write, named", "write"]);
});

on_both!(s5_an_operator_on_the_host_may_send_a_stream_it_created, async |device: Device| {
    device.switch_tracking_off();
    let stream = Stream::named(&device, "mine").unwrap();
    let mut flow = Flow::new("s5");
    let at = device.clone();
    let write = each(move |ports: &mut SourcePorts<Loose>, cx| {
        let (stream, at) = (stream.clone(), at.clone());
        async move {
            cx.finish();
            let mut buffer = Buffer::new(&at, 64)?;
            stream.fill(&mut buffer, 9)?;
            ports.output.set_stream(&stream)?;
            ports.output.send(Host(buffer)).await?;
            Ok(())
        }
        .boxed()
    });
    let write = flow.add("write", write);
    let read = each(move |ports: &mut SinkPorts<Loose>, cx| {
        async move {
            let Host(buffer) = ports.input.take()?;
            assert_eq!(names(ports.input.streams()), [Some("mine".into())]);
            assert_eq!(buffer.to_vec(cx.stream()?).await?, [9; 64]);
            Ok(())
        }
        .boxed()
    });
    let read = flow.add("read", read).on(&device);
    flow.connect(write.output, read.input);
    flow.run().await.unwrap();
});

on_both!(s5_several_streams_join_one, async |device: Device| {
    let [main, left, right, late] = ["main", "left", "right", "late"].map(|name| Stream::named(&device, name).unwrap());
    let mut buffers: Vec<_> = (0..3).map(|_| Buffer::from_slice(&main, &[1_u32; 64]).unwrap()).collect();
    main.completed().await.unwrap();
    device.switch_tracking_off();
    increment::launch(&left, &mut buffers[0]).unwrap();
    increment::launch(&right, &mut buffers[1]).unwrap();
    let before = late.ticket();
    increment::launch(&late, &mut buffers[2]).unwrap();
    // The stream itself and `None` are skipped. A ticket does not cover later work.
    main.join([Some(&left), None, Some(&main), Some(&right)]).unwrap();
    main.join([before]).unwrap();
    main.join(std::iter::empty::<Stream>()).unwrap();
    increment::launch(&main, &mut buffers[0]).unwrap();
    increment::launch(&main, &mut buffers[1]).unwrap();
    let error = increment::launch(&main, &mut buffers[2]).unwrap_err();
    assert!(error.is_race() && error.to_string().contains("make `main` wait for `late`"), "{error}");
    main.join([late.ticket()]).unwrap();
    increment::launch(&main, &mut buffers[2]).unwrap();
    for buffer in &buffers {
        assert_eq!(buffer.to_vec(&main).await.unwrap(), [3; 64]);
    }
    // A wait of the stream for itself would never end.
    main.join([&main, &main]).unwrap();
    main.completed().await.unwrap();
});

on_both!(s5_the_default_stream_is_joined_only_explicitly, async |device: Device| {
    let (main, side) = (Stream::named(&device, "main").unwrap(), Stream::named(&device, "side").unwrap());
    let default = Stream::default_of(&device).unwrap();
    assert_eq!((default.name(), default.device()), ("default", &device));
    assert_eq!(default, Stream::default_of(&device).unwrap(), "the same at every call");
    let mut buffer = Buffer::from_slice(&main, &[1_u32; 64]).unwrap();
    main.completed().await.unwrap();
    device.switch_tracking_off();
    increment::launch(&default, &mut buffer).unwrap();
    main.join([&side]).unwrap();
    let error = increment::launch(&main, &mut buffer).unwrap_err();
    assert!(error.is_race() && error.to_string().contains("make `main` wait for `default`"), "{error}");
    main.join([&side, &default]).unwrap();
    increment::launch(&main, &mut buffer).unwrap();
    assert_eq!(buffer.to_vec(&main).await.unwrap(), [3; 64]);
});

#[test]
fn s6_the_host_has_no_pool_and_no_default_stream() {
    let host = Device::host();
    for error in [
        StreamPool::builder(&host).build().map(drop).unwrap_err(),
        StreamPool::default_of(&host).map(drop).unwrap_err(),
        Stream::default_of(&host).map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("the host has no streams: choose a device"), "{error}");
    }
    assert_eq!(host.stream_priorities(), 0..=0);
}

// S8: the default stream, blocking and non-blocking streams work on the same envelopes.

on_both!(s8_default_and_non_blocking_streams_in_one_flow, async |device: Device| {
    let blocking = StreamPool::builder(&device).blocking(true).build().unwrap();
    let seen = shared();
    let mut flow = Flow::new("s8");
    let produce = flow.add("produce", SendEach::new((0..100).map(|n| vec![n; 64])));
    let first = flow.add("first", Increment).on(&device);
    let by_default = each(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
        async move {
            let mut envelope = ports.input.take()?;
            increment::launch(&Stream::default_of(cx.device())?, &mut envelope)?;
            ports.output.send(envelope).await?;
            Ok(())
        }
        .boxed()
    });
    let by_default = flow.add("by default", by_default).on(&device);
    let third = flow.add("third", Increment).on(&device).streams(&blocking);
    let last = flow.add("last", Increment).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, first.input, HubOptions::bounded(2).envelope_bytes(256));
    flow.connect(first.output, by_default.input);
    flow.connect(by_default.output, third.input);
    flow.connect(third.output, last.input);
    flow.connect(last.output, consume.input);
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), (0..100).map(|n| vec![n + 4; 64]).collect::<Vec<_>>());
    drop(flow);
    freed(&device).await;
});

/// The seed decides the order of the device's and the host's steps.
#[tokio::test]
async fn s4_borrowed_streams_work_in_many_interleavings() {
    for seed in 0..40 {
        let simulation = Simulation::new(seed);
        let device = Device::simulated(&simulation, Emulated::new()).race_checked();
        let pool = StreamPool::builder(&device).maximum(1).build().unwrap();
        let seen = shared();
        let mut flow = Flow::new("s4");
        let produce = flow.add("produce", SendEach::new((0..6).map(|n| vec![n; 16])));
        let first = flow.add("first", Increment).on(&device).streams(&pool);
        let borrows = flow.add("borrows", Increment).on(&device).streams(&pool);
        let last = flow.add("last", Increment).on(&device).without_own_stream();
        let consume = flow.add("consume", Collect(seen.clone()));
        flow.connect_with(produce.output, first.input, HubOptions::bounded(2).envelope_bytes(64));
        flow.connect(first.output, borrows.input);
        flow.connect(borrows.output, last.input);
        flow.connect(last.output, consume.input);
        within(simulation.run(flow.run())).await.unwrap();
        assert_eq!(*lock(&seen), (0..6).map(|n| vec![n + 3; 16]).collect::<Vec<_>>(), "seed {seed}");
        assert_eq!(pool.in_use(), 0, "seed {seed}");
    }
}

#[tokio::test]
async fn s4_borrowed_streams_and_memory_are_released() {
    let device = emulated();
    let pool = StreamPool::builder(&device).maximum(1).build().unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    for _ in 0..50 {
        let mut flow = Flow::new("s4");
        let fill = flow.add("fill", fills(1, 20)).on(&device).streams(&pool);
        let count = runs.clone();
        let read = each(move |ports: &mut SinkPorts<Loose>, cx| {
            let count = count.clone();
            async move {
                let Host(mut buffer) = ports.input.take()?;
                increment::launch(cx.stream()?, &mut buffer)?;
                count.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            .boxed()
        });
        let read = flow.add("read", read).on(&device).without_own_stream();
        flow.connect(fill.output, read.input);
        within(flow.run()).await.unwrap();
        assert_eq!((pool.made(), pool.in_use()), (1, 0));
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1000);
    freed(&device).await;
}

// Waiting for a stream includes what that stream waits for, also without work behind that wait.

on_both!(s5_waits_are_transitive, async |device: Device| {
    let [first, side, last] = ["first", "side", "last"].map(|name| Stream::named(&device, name).unwrap());
    let mut buffer = Buffer::from_slice(&first, &[1_u32; 8]).unwrap();
    first.completed().await.unwrap();
    let held = hold(&first);
    increment::launch(&first, &mut buffer).unwrap();
    side.wait_for(&first).unwrap();
    let (plain, timed) = (Event::new(), Event::timed());
    plain.record(&side).unwrap();
    timed.record(&side).unwrap();
    assert!(!plain.query().unwrap() && !timed.query().unwrap(), "the awaited work is held up");
    assert!(side.completed().now_or_never().is_none());
    // With tracking off, only the join orders `last`.
    device.switch_tracking_off();
    last.join([&side]).unwrap();
    increment::launch(&last, &mut buffer).unwrap();
    drop(held);
    plain.completed().await.unwrap();
    last.completed().await.unwrap();
});

/// Sends numbers, each with a new stream, of which it keeps no handle.
struct StreamPerMessage {
    device: Device,
    left: u32,
}

impl Operator for StreamPerMessage {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        self.left -= 1;
        if self.left == 0 {
            cx.finish();
        }
        let stream = Stream::new(&self.device)?;
        ports.output.set_stream(&stream)?;
        ports.output.send(self.left).await?;
        ports.output.set_stream(None)
    }
}

/// A message may own the last handle of its stream. Whether an operator takes it or its hub drops it, the stream ends
/// with no lock held, which a debug build asserts.
#[tokio::test]
async fn a_message_may_own_the_last_handle_of_its_stream() {
    for place in ["with a stream of its own", "without", "on the host"] {
        for hub in [HubOptions::bounded(1), HubOptions::drop_oldest(1)] {
            let device = emulated();
            let mut flow = Flow::new("f");
            let from = flow.add("from", StreamPerMessage { device: device.clone(), left: 20 });
            let to = flow.add("to", sink(async |_: u32| Ok(())));
            let to = match place {
                "with a stream of its own" => to.on(&device),
                "without" => to.on(&device).without_own_stream(),
                _ => to,
            };
            flow.connect_with(from.output, to.input, hub);
            within(flow.run()).await.unwrap();
        }
    }
}
