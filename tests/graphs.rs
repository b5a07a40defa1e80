//! Scenarios G1 to G8, G11 and G12: graphs, captured or built node by node, and launched in order with other work.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use common::graph::*;
use common::*;
use wakeline::{
    Stream,
    graph::{Graph, GraphEvent, Node, NodeKind, Registry},
    memory::Allocator,
    prelude::*,
    stream::Event,
};

/// Subtracts one from each element.
#[kernel(unsafe(cuda = "kernels/decrement.cu"))]
fn decrement(x: &mut [u32]) {
    x.iter_mut().for_each(|x| *x -= 1);
}

fn node(graph: &Graph, name: &str) -> Node {
    let nodes = graph.nodes();
    let found: Vec<_> = nodes.iter().filter(|node| node.name == name).collect();
    assert_eq!(found.len(), 1, "nodes named `{name}` in {nodes:?}");
    found[0].node
}

on_both!(g1_a_capture_forks_and_joins, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut left, mut right) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (graph, ()) = Graph::capture(&device, |capture| {
        let side = capture.fork("side")?;
        capture.stream().fill(&mut left, 1)?;
        increment::launch(&side, &mut right)?;
        // Joined by the data dependency.
        add_to::launch(capture.stream(), &mut left, &right)
    })
    .unwrap();
    let (fill, inc, add) = (node(&graph, "fill of 256 bytes"), node(&graph, "increment"), node(&graph, "add_to"));
    assert!(graph.comes_after(add, fill) && graph.comes_after(add, inc));
    assert!(!graph.comes_after(inc, fill) && !graph.comes_after(fill, inc), "the branches are unordered");
    // The capture has run nothing.
    assert_eq!(left.to_vec(&stream).await.unwrap(), [0; 64]);
    let exec = graph.instantiate().unwrap();
    for round in 1..4 {
        exec.launch(&stream).unwrap().completed().await.unwrap();
        assert_eq!(left.to_vec(&stream).await.unwrap(), [1 + round; 64]);
    }
});

on_both!(g1_a_branch_that_is_not_joined_is_an_error, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut data = buffer(&stream, 0).await;
    let captured = Graph::capture(&device, |capture| {
        let side = capture.fork("side")?;
        increment::launch(&side, &mut data)
    });
    refused(captured, &["stream `side` was not joined", "`increment`", "wait_for"]);
    let captured = Graph::capture(&device, |capture| {
        let side = capture.fork("side")?;
        increment::launch(&side, &mut data)?;
        capture.stream().wait_for(&side)
    });
    assert!(captured.is_ok());
    // The buffer is unchanged.
    increment::launch(&stream, &mut data).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64]);
});

on_both!(g1_a_capture_ends_whatever_happens_in_it, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut data = buffer(&stream, 0).await;
    let mut kept = None;
    let failed = Graph::capture(&device, |capture| {
        kept = Some(capture.stream().clone());
        increment::launch(capture.stream(), &mut data)?;
        Err::<(), _>("given up".into())
    });
    assert!(failed.unwrap_err().to_string().contains("given up"));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = Graph::capture(&device, |_| -> Result<()> { panic!("planned") });
    }));
    assert!(panicked.is_err());
    // A capture stream that outlives the capture returns errors; allocation works again for all streams.
    let kept = kept.unwrap();
    refused(increment::launch(&kept, &mut data), &["the capture of this stream is over"]);
    let expected = format!("the capture of stream `{}` is over, and none of its work runs on it", kept.name());
    refused(kept.synchronize_blocking(), &[&expected]);
    let scratch = Buffer::<u32>::new(&device, 64).unwrap();
    drop(scratch);
    increment::launch(&stream, &mut data).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64]);
});

on_both!(g1_what_a_capture_cannot_hold_is_an_error_of_the_call, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut data = buffer(&stream, 0).await;
    let mut host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let ordered = Allocator::stream_ordered(&device);
    let outside = Stream::named(&device, "outside").unwrap();
    Graph::capture(&device, |capture| {
        let own = capture.stream();
        increment::launch(own, &mut data)?;
        refused(own.synchronize_blocking(), &["captured"]);
        let waited = futures::FutureExt::now_or_never(own.completed()).expect("the error is immediate");
        refused(waited, &["captured", "host cannot wait"]);
        refused(increment::launch(&outside, &mut data), &["`outside`", "is not part of the capture"]);
        refused(ordered.alloc::<u32>(own, 64), &["stream-ordered memory"]);
        refused(own.host_function(|| ()), &["host_callback"]);
        own.copy(&data, &mut host)?;
        refused(host.as_slice(), &["a capture"]);
        let read = futures::FutureExt::now_or_never(host.read()).expect("the error is immediate");
        refused(read, &["captured"]);
        Err::<(), Error>("seen".into())
    })
    .unwrap_err();
    // After the capture all of that is possible.
    stream.copy(&data, &mut host).unwrap();
    assert_eq!(host.read().await.unwrap(), [0; 64]);
});

on_both!(g2_nodes_of_every_kind, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut a, mut b) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (calls, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (inner, ()) = Graph::capture(&device, |capture| increment::launch(capture.stream(), &mut a)).unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    let fill = graph.add(&[], |stream| stream.fill(&mut a, 7)).unwrap();
    let child = graph.child(&[fill], &inner).unwrap();
    let copy = graph.add(&[child], |stream| stream.copy(&a, &mut b)).unwrap();
    let count = calls.clone();
    let host = graph.host(&[], move || _ = count.fetch_add(1, Ordering::SeqCst)).unwrap();
    let join = graph.join(&[copy, host]).unwrap();
    let sum = graph.add(&[join], |stream| add_to::launch(stream, &mut b, &a)).unwrap();
    let (count, calls_then) = (calls.clone(), seen.clone());
    graph
        .add(&[sum], |stream| {
            stream.host_callback(move || calls_then.store(count.load(Ordering::SeqCst), Ordering::SeqCst))
        })
        .unwrap();
    let graph = graph.build().unwrap();
    let kinds: Vec<_> = graph.nodes().into_iter().map(|node| node.kind).collect();
    use NodeKind::*;
    assert_eq!(kinds, [Fill, Child, Copy, Host, Empty, Kernel, Host]);
    let exec = graph.instantiate().unwrap();
    exec.upload(&stream).unwrap();
    for round in 1..=3 {
        exec.launch(&stream).unwrap().completed().await.unwrap();
        assert_eq!(b.to_vec(&stream).await.unwrap(), [16; 64]);
        assert_eq!((calls.load(Ordering::SeqCst), seen.load(Ordering::SeqCst)), (round, round));
    }
});

on_both!(g2_memory_that_nodes_allocate_and_free, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut sum = buffer(&stream, 0).await;
    let mut graph = Graph::builder(&device).unwrap();
    let (made, mut x) = graph.alloc::<u32>(&[], 64).unwrap();
    graph.add(&[], |stream| stream.fill(&mut x, 4)).unwrap();
    let used = graph.add(&[], |stream| add_to::launch(stream, &mut sum, &x)).unwrap();
    refused(stream.fill(&mut x, 1), &["memory that a node of a graph allocates"]);
    let freed = graph.free(&[], x).unwrap();
    // This memory is freed automatically.
    let (_, mut y) = graph.alloc::<u32>(&[freed], 64).unwrap();
    graph.add(&[], |stream| stream.fill(&mut y, 5)).unwrap();
    let last = graph.add(&[], |stream| add_to::launch(stream, &mut sum, &y)).unwrap();
    let graph = graph.build().unwrap();
    assert!(graph.comes_after(used, made) && graph.comes_after(freed, used));
    let nodes = graph.nodes();
    let frees: Vec<_> = nodes.iter().filter(|node| node.kind == NodeKind::Free).collect();
    assert!(frees.len() == 2 && graph.comes_after(frees[1].node, last), "{nodes:?}");
    let exec = graph.instantiate().unwrap();
    for _ in 0..3 {
        exec.launch(&stream).unwrap();
    }
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [27; 64]);
});

on_both!(g2_events_within_a_graph, async |device: Device| {
    let [one, two] = streams(&device);
    let (begun, go) = (GraphEvent::new(&device).unwrap(), GraphEvent::new(&device).unwrap());
    let (from, to) = (Event::timed(), Event::timed());
    let calls = Arc::new(AtomicUsize::new(0));
    let count = || {
        let calls = calls.clone();
        move || _ = calls.fetch_add(1, Ordering::SeqCst)
    };
    let (graph, ()) = Graph::capture(&device, |capture| {
        let own = capture.stream();
        from.record(own)?;
        own.host_callback(count())?;
        begun.record(own)?;
        go.wait(own)?;
        own.host_callback(count())?;
        to.record(own)
    })
    .unwrap();
    let kinds: Vec<_> = graph.nodes().into_iter().map(|node| node.kind).collect();
    use NodeKind::*;
    assert_eq!(kinds, [Record, Host, Record, Wait, Host, Record]);
    let exec = graph.instantiate().unwrap();
    for round in 1..3 {
        let held = hold(&two);
        go.record(&two).unwrap();
        let launched = exec.launch(&one).unwrap();
        assert!(calls.load(Ordering::SeqCst) < 2 * round, "the launch waits for the other stream");
        drop(held);
        launched.completed().await.unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 2 * round);
        assert!(begun.query().unwrap());
        begun.wait(&two).unwrap();
        two.completed().await.unwrap();
    }
    // The events hold the records of the last launch, also after the graph is dropped.
    drop((exec, graph));
    to.since(&from).await.unwrap();
});

on_both!(g2_graphs_within_nodes_run_according_to_a_flag, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut left, mut sum) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (mut flag, one) = (buffer(&stream, 0).await, buffer(&stream, 1).await);
    let mut graph = Graph::builder(&device).unwrap();
    // Both come after earlier nodes on their data, without explicit edges.
    let before = graph.add(&[], |stream| stream.fill(&mut sum, 0)).unwrap();
    let maybe =
        graph.run_if(&[], &flag, |body| body.add(&[], |stream| add_to::launch(stream, &mut sum, &one)).map(drop));
    let again = graph.run_while(&[], &mut left, |body, left| {
        body.add(&[], |stream| add_to::launch(stream, &mut sum, &one))?;
        body.add(&[], |stream| decrement::launch(stream, left)).map(drop)
    });
    let (maybe, again) = (maybe.unwrap(), again.unwrap());
    let graph = graph.build().unwrap();
    assert!(graph.comes_after(maybe, before) && graph.comes_after(again, maybe));
    let exec = graph.instantiate().unwrap();
    for (set, rounds) in [(0, 0), (1, 0), (0, 3), (1, 5)] {
        stream.fill(&mut flag, set).unwrap();
        stream.fill(&mut left, rounds).unwrap();
        exec.launch(&stream).unwrap();
        assert_eq!(sum.to_vec(&stream).await.unwrap(), [set + rounds; 64], "{set}, {rounds}");
    }
});

on_both!(g2_children_are_ordered_with_other_uses_of_their_memory, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut data = buffer(&stream, 0).await;
    let (child, ()) = Graph::capture(&device, |capture| {
        let mut x = capture.stream().alloc::<u32>(64)?;
        capture.stream().fill(&mut x, 1)?;
        add_to::launch(capture.stream(), &mut data, &x)
    })
    .unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    let fill = graph.add(&[], |stream| stream.fill(&mut data, 10)).unwrap();
    let one = graph.child(&[], &child).unwrap();
    let two = graph.child(&[], &child).unwrap();
    let last = graph.add(&[], |stream| increment::launch(stream, &mut data)).unwrap();
    let graph = graph.build().unwrap();
    assert!([(one, fill), (two, one), (last, two)].iter().all(|(node, before)| graph.comes_after(*node, *before)));
    let (exec, alone) = (graph.instantiate().unwrap(), child.instantiate().unwrap());
    drop((graph, child));
    let other = Stream::new(&device).unwrap();
    for _ in 0..3 {
        exec.launch(&stream).unwrap();
        alone.launch(&other).unwrap();
    }
    assert_eq!(data.to_vec(&stream).await.unwrap(), [14; 64]);
});

on_both!(g2_data_dependencies_need_no_explicit_edges, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut a, mut b) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let mut graph = Graph::builder(&device).unwrap();
    let one = graph.add(&[], |stream| stream.fill(&mut a, 1)).unwrap();
    let two = graph.add(&[], |stream| stream.fill(&mut b, 2)).unwrap();
    let both = graph.add(&[], |stream| add_to::launch(stream, &mut b, &a)).unwrap();
    // A write after a read.
    let again = graph.add(&[], |stream| stream.fill(&mut a, 5)).unwrap();
    let graph = graph.build().unwrap();
    assert!(graph.comes_after(both, one) && graph.comes_after(both, two) && graph.comes_after(again, both));
    assert!(!graph.comes_after(two, one));
    let exec = graph.instantiate().unwrap();
    exec.launch(&stream).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(b.to_vec(&stream).await.unwrap(), [3; 64]);
    assert_eq!(a.to_vec(&stream).await.unwrap(), [5; 64]);
});

on_both!(g2_a_cycle_is_an_error, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut a, mut b) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let mut graph = Graph::builder(&device).unwrap();
    let one = graph.add(&[], |stream| stream.fill(&mut a, 1)).unwrap();
    let two = graph.add(&[one], |stream| stream.fill(&mut b, 2)).unwrap();
    let three = graph.join(&[two]).unwrap();
    refused(graph.order(three, one), &["a cycle", "node 2, `join`", "node 0, `fill of 256 bytes`"]);
    refused(graph.order(one, one), &["a cycle"]);
    graph.order(one, three).unwrap();
    let mut other = Graph::builder(&device).unwrap();
    refused(other.join(&[one]), &["another graph"]);
    graph.build().unwrap().instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(b.to_vec(&stream).await.unwrap(), [2; 64]);
});

on_both!(g3_launches_are_ordered_with_streams, async |device: Device| {
    let [one, two, three] = streams(&device);
    let mut data = buffer(&one, 0).await;
    let mut sum = buffer(&one, 0).await;
    let (graph, ()) = Graph::capture(&device, |capture| increment::launch(capture.stream(), &mut data)).unwrap();
    let exec = graph.instantiate().unwrap();
    let held = hold(&one);
    // After a fill that has not run, before a kernel on a third stream; and in reverse.
    one.fill(&mut data, 10).unwrap();
    let launched = exec.launch(&two).unwrap();
    add_to::launch(&three, &mut sum, &data).unwrap();
    exec.launch(&one).unwrap();
    add_to::launch(&two, &mut sum, &data).unwrap();
    assert!(!launched.has_passed());
    drop(held);
    assert_eq!(sum.to_vec(&three).await.unwrap(), [11 + 12; 64]);
    launched.completed().await.unwrap();
});

on_both!(g3_work_from_before_the_capture_comes_first, async |device: Device| {
    let [one, two, three] = streams(&device);
    let (mut data, mut sum) = (buffer(&one, 0).await, buffer(&one, 0).await);
    let held = hold(&one);
    one.fill(&mut data, 10).unwrap();
    let event = Event::new();
    event.record(&one).unwrap();
    let (graph, ()) = Graph::capture(&device, |capture| {
        event.wait(capture.stream())?;
        add_to::launch(capture.stream(), &mut sum, &data)
    })
    .unwrap();
    // A use on a stream before the first launch comes after the fill too.
    let mut other = Buffer::<u32>::new(&device, 64).unwrap();
    three.copy(&data, &mut other).unwrap();
    let exec = graph.instantiate().unwrap();
    let launched = exec.launch(&two).unwrap();
    assert!(!launched.has_passed());
    drop(held);
    assert_eq!(other.to_vec(&three).await.unwrap(), [10; 64]);
    assert_eq!(sum.to_vec(&two).await.unwrap(), [10; 64]);
});

on_both!(g4_execs_are_updated_and_their_nodes_changed, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut a, mut b, mut sum) = (buffer(&stream, 0).await, buffer(&stream, 0).await, buffer(&stream, 0).await);
    let chain = |x: &mut Buffer<u32>, value: u32, sum: &mut Buffer<u32>| {
        Graph::capture(&device, |capture| {
            capture.stream().fill(x, value)?;
            add_to::launch(capture.stream(), sum, x)
        })
        .unwrap()
        .0
    };
    let graph = chain(&mut a, 1, &mut sum);
    let exec = graph.instantiate().unwrap();
    let total = async |stream: &Stream, sum: &Buffer<u32>| sum.to_vec(stream).await.unwrap()[0];
    exec.launch(&stream).unwrap();
    assert_eq!(total(&stream, &sum).await, 1);
    // Updates the whole graph to another buffer. Its owner drops it, and the exec keeps it.
    exec.update(&chain(&mut b, 10, &mut sum)).unwrap();
    drop(b);
    exec.launch(&stream).unwrap();
    assert_eq!(total(&stream, &sum).await, 11);
    // One node.
    let mut c = buffer(&stream, 100).await;
    exec.set(node(&graph, "add_to"), |stream| add_to::launch(stream, &mut sum, &c)).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(total(&stream, &sum).await, 111);
    // Work on streams is ordered with the node's current memory.
    stream.fill(&mut c, 1000).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(total(&stream, &sum).await, 1111);
    // Disabled and enabled again.
    exec.enable(node(&graph, "add_to"), false).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(total(&stream, &sum).await, 1111);
    exec.enable(node(&graph, "add_to"), true).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(total(&stream, &sum).await, 2111);
});

on_both!(g4_what_cannot_be_updated_is_an_error_that_names_the_node, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut a, mut sum) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.stream().fill(&mut a, 1)?;
        add_to::launch(capture.stream(), &mut sum, &a)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    let fill = node(&graph, "fill of 256 bytes");
    refused(exec.set(fill, |stream| increment::launch(stream, &mut a)), &["node 0, `fill of 256 bytes`"]);
    refused(exec.set(fill, |_| Ok(())), &["node 0", "the closure enqueued no work"]);
    let (longer, ()) = Graph::capture(&device, |capture| {
        capture.stream().fill(&mut a, 1)?;
        add_to::launch(capture.stream(), &mut sum, &a)?;
        increment::launch(capture.stream(), &mut sum)
    })
    .unwrap();
    refused(exec.update(&longer), &["the exec is not updated"]);
    refused(exec.enable(node(&longer, "increment"), false), &["another graph"]);
    let other = Graph::capture(&device, |capture| {
        increment::launch(capture.stream(), &mut a)?;
        add_to::launch(capture.stream(), &mut sum, &a)
    });
    refused(exec.update(&other.unwrap().0), &["the exec is not updated"]);
    // The exec is unchanged.
    exec.launch(&stream).unwrap();
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [1; 64]);
});

on_both!(g4_a_node_is_set_to_one_piece_of_work_or_not_at_all, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (a, mut b, mut c) = (buffer(&stream, 2).await, buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (graph, ()) = Graph::capture(&device, |capture| square::launch(capture.stream(), &a, &mut b, 8)).unwrap();
    let exec = graph.instantiate().unwrap();
    let square_node = node(&graph, "square");
    // Even if the closure ignores the second call's error.
    let two = exec.set(square_node, |stream| {
        square::launch(stream, &a, &mut c, 8)?;
        let _ = square::launch(stream, &a, &mut c, 8);
        Ok(())
    });
    refused(two, &["node 0, `square`", "one piece of work"]);
    exec.launch(&stream).unwrap();
    assert_eq!((b.to_vec(&stream).await.unwrap()[0], c.to_vec(&stream).await.unwrap()[0]), (32, 0));
    // The arguments become the node's, slices and scalars.
    let n = std::hint::black_box(4);
    exec.set(square_node, |stream| square::launch(stream, &a, &mut c, n)).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(c.to_vec(&stream).await.unwrap()[..16], [16; 16]);
});

on_both!(g4_launches_are_ordered_after_the_dependencies_of_a_set, async |device: Device| {
    let [one, two] = streams(&device);
    let (graph, ()) = Graph::capture(&device, |capture| capture.stream().host_callback(|| ())).unwrap();
    let exec = graph.instantiate().unwrap();
    let (there, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let held = hold(&two);
    let (arrives, looks) = (there.clone(), (there.clone(), seen.clone()));
    two.host_function(move || arrives.store(true, Ordering::SeqCst)).unwrap();
    exec.set(node(&graph, "host function"), |stream| {
        stream.wait_for(&two)?;
        stream.host_callback(move || looks.1.store(looks.0.load(Ordering::SeqCst), Ordering::SeqCst))
    })
    .unwrap();
    let launched = exec.launch(&one).unwrap();
    drop(held);
    launched.completed().await.unwrap();
    assert!(seen.load(Ordering::SeqCst), "the node was set to work that comes after another stream's work");
});

on_both!(g5_several_execs_of_one_graph_on_several_streams, async |device: Device| {
    let [one, two] = streams(&device);
    let mut sum = buffer(&one, 0).await;
    let constant = buffer(&one, 3).await;
    let (graph, ()) = Graph::capture(&device, |capture| add_to::launch(capture.stream(), &mut sum, &constant)).unwrap();
    let execs = [graph.instantiate().unwrap(), graph.instantiate().unwrap()];
    for round in 0..50 {
        execs[round % 2].launch(if round % 3 == 0 { &one } else { &two }).unwrap();
    }
    assert_eq!(sum.to_vec(&two).await.unwrap(), [150; 64]);
    drop(graph);
    execs[0].launch(&two).unwrap();
    drop(execs);
    assert_eq!(sum.to_vec(&two).await.unwrap(), [153; 64]);
});

on_both!(g6_copies_of_inputs_are_made_by_the_caller, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut host_in, mut host_out) =
        (Buffer::<u32>::pinned(&device, 64).unwrap(), Buffer::<u32>::pinned(&device, 64).unwrap());
    host_in.as_mut_slice().unwrap().fill(1);
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.input(&host_in)?;
        capture.output(&mut host_out)?;
        let stream = capture.stream();
        // A constant, created during the capture.
        let bias = Buffer::from_slice(stream, &[1000_u32; 64])?;
        let mut x = stream.alloc::<u32>(64)?;
        stream.copy(&host_in, &mut x)?;
        add_to::launch(stream, &mut x, &bias)?;
        stream.copy(&x, &mut host_out)
    })
    .unwrap();
    let copies = graph.nodes().into_iter().filter(|node| node.kind == NodeKind::Copy).count();
    assert_eq!(copies, 2, "one of the constant and one of the output");
    let [input] = graph.inputs() else { panic!("{:?}", graph.inputs()) };
    assert_eq!((input.input(), input.offset(), input.bytes()), (0, 0, 256));
    let exec = graph.instantiate().unwrap();
    for value in [5, 6] {
        let mut other = Buffer::<u32>::pinned(&device, 64).unwrap();
        other.as_mut_slice().unwrap().fill(value);
        input.copy(&stream, &other).unwrap();
        exec.launch(&stream).unwrap();
        assert_eq!(host_out.to_vec(&stream).await.unwrap(), [1000 + value; 64]);
        refused(host_out.as_slice(), &["memory that a graph or a capture writes", "to_vec"]);
    }
    refused(input.copy(&stream, &Buffer::<u32>::pinned(&device, 8).unwrap()), &["256 bytes"]);
});

on_both!(g6_other_host_copies_are_an_error, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut x = buffer(&stream, 0).await;
    let [mut one, mut two] = [(); 2].map(|()| Buffer::<u32>::pinned(&device, 64).unwrap());
    let captured = Graph::capture(&device, |capture| capture.stream().copy(&x, &mut one));
    refused(captured, &["copies 256 bytes to host memory that is not an output"]);
    let captured = Graph::capture(&device, |capture| capture.output(&mut one));
    refused(captured, &["output 0 is written by 0 copies"]);
    let captured = Graph::capture(&device, |capture| {
        capture.output(&mut one)?;
        capture.output(&mut two)?;
        capture.stream().copy(&x, &mut one)?;
        capture.stream().copy(&x, &mut two)?;
        capture.stream().copy(&x, &mut one)
    });
    refused(captured, &["output 0 is written by 2 copies"]);
    let captured = Graph::capture(&device, |capture| {
        capture.output(&mut one)?;
        capture.stream().copy(&x, &mut one)?;
        capture.stream().copy(&one, &mut x)
    });
    refused(captured, &["copies from host memory that is an output"]);
});

on_both!(g7_memory_that_nodes_use_is_kept, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut sum = buffer(&stream, 0).await;
    let before = device.memory_stats().in_use;
    let constant = buffer(&stream, 7).await;
    let (graph, ()) = Graph::capture(&device, |capture| add_to::launch(capture.stream(), &mut sum, &constant)).unwrap();
    let exec = graph.instantiate().unwrap();
    drop((constant, graph));
    // An allocation of the same size gets other memory.
    let mut other = Buffer::<u32>::new(&device, 64).unwrap();
    stream.fill(&mut other, 1).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [7; 64]);
    let held = hold(&stream);
    let launched = exec.launch(&stream).unwrap();
    drop((exec, other));
    assert!(device.memory_stats().in_use > before, "the memory is kept while a launch runs");
    drop(held);
    launched.completed().await.unwrap();
    until("the constant is freed", || device.memory_stats().in_use == before).await;
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [14; 64]);
});

on_both!(g7_memory_is_reused_only_where_edges_order_the_uses, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut sum = buffer(&stream, 0).await;
    let mut addresses = Vec::new();
    let step = |stream: &Stream, sum: &mut Buffer<u32>, value: u32| -> Result<u64> {
        let mut x = stream.alloc::<u32>(64)?;
        stream.fill(&mut x, value)?;
        add_to::launch(stream, sum, &x)?;
        x.device_address()
    };
    let mut side_sum = buffer(&stream, 0).await;
    let (graph, ()) = Graph::capture(&device, |capture| {
        let own = capture.stream().clone();
        let side = capture.fork("side")?;
        addresses.push(step(&own, &mut sum, 1)?);
        addresses.push(step(&own, &mut sum, 2)?);
        // On a parallel branch: nothing orders the two.
        addresses.push(step(&side, &mut side_sum, 3)?);
        own.wait_for(&side)?;
        // Another size.
        drop(own.alloc::<u32>(65)?);
        addresses.push(step(&own, &mut sum, 4)?);
        Ok(())
    })
    .unwrap();
    assert_eq!(addresses[0], addresses[1], "ordered nodes reuse memory");
    assert_ne!(addresses[1], addresses[2], "a parallel branch does not");
    assert!(addresses[..3].contains(&addresses[3]), "after the join it is reused");
    assert_eq!(graph.own_bytes(), (2 * 256 + 260_u64.next_multiple_of(4)).max(graph.own_bytes()));
    // The graph owns the memory: an allocation on a stream gets other memory.
    let scratch = stream.alloc::<u32>(64).unwrap();
    assert!(!addresses.contains(&scratch.device_address().unwrap()));
    let exec = graph.instantiate().unwrap();
    exec.launch(&stream).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [14; 64]);
    assert_eq!(side_sum.to_vec(&stream).await.unwrap(), [6; 64]);
    // Two graphs share no memory.
    let (other, address) = Graph::capture(&device, |capture| step(&capture.stream().clone(), &mut sum, 1)).unwrap();
    assert!(!addresses.contains(&address));
    drop(other);
});

on_both!(g7_the_next_launch_waits_for_the_readers_of_the_last_outputs, async |device: Device| {
    let [one, two] = streams(&device);
    let mut seen = buffer(&one, 0).await;
    let (graph, mut output) = Graph::capture(&device, |capture| {
        let mut output = capture.stream().alloc::<u32>(64)?;
        capture.stream().fill(&mut output, 5)?;
        Ok(output)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    exec.launch(&one).unwrap();
    let held = hold(&two);
    add_to::launch(&two, &mut seen, &output).unwrap();
    let launched = exec.launch(&one).unwrap();
    one.fill(&mut output, 9).unwrap();
    assert!(!launched.has_passed());
    drop(held);
    assert_eq!(seen.to_vec(&two).await.unwrap(), [5; 64]);
    assert_eq!(output.to_vec(&one).await.unwrap(), [9; 64]);
    exec.launch(&one).unwrap();
    assert_eq!(output.to_vec(&one).await.unwrap(), [5; 64]);
});

on_both!(g8_a_registry_launches_and_removes_models, async |device: Device| {
    let streams = [0, 1, 2].map(|n| Stream::named(&device, format!("stream {n}")).unwrap());
    let registry = Registry::new();
    let one = buffer(&streams[0], 1).await;
    let mut sums = Vec::new();
    for _ in 0..3 {
        let mut sum = buffer(&streams[0], 0).await;
        let (graph, ()) = Graph::capture(&device, |capture| add_to::launch(capture.stream(), &mut sum, &one)).unwrap();
        assert_eq!(registry.add("sum", &graph).unwrap(), sums.len());
        sums.push(sum);
    }
    assert_eq!((registry.count("sum"), registry.models()), (3, vec!["sum".to_string()]));
    let held = hold(&streams[2]);
    for (at, stream) in streams.iter().enumerate() {
        registry.launch("sum", at, stream).unwrap();
    }
    refused(registry.launch("sum", 3, &streams[0]), &["model `sum` has no graph 3", "it has 3"]);
    refused(registry.launch("product", 0, &streams[0]), &["no model `product`", "`sum`"]);
    // While one of its launches is in flight.
    registry.remove("sum").unwrap();
    refused(registry.remove("sum"), &["no model `sum`", "the registry is empty"]);
    drop((one, held));
    for (sum, stream) in sums.iter().zip(&streams) {
        assert_eq!(sum.to_vec(stream).await.unwrap(), [1; 64]);
    }
});

on_both!(g11_threads_capture_at_once_while_others_work, async |device: Device| {
    let stop = Arc::new(AtomicBool::new(false));
    let busy = {
        let (device, stop) = (device.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                let stream = Stream::new(&device).unwrap();
                let mut scratch = Buffer::<u32>::new(&device, 1 << 10).unwrap();
                let mut pinned = Buffer::<u32>::pinned(&device, 1 << 10).unwrap();
                stream.fill(&mut scratch, 3).unwrap();
                stream.copy(&scratch, &mut pinned).unwrap();
                stream.synchronize_blocking().unwrap();
                rounds += 1;
            }
            rounds
        })
    };
    let capturing = [0, 1].map(|lane| {
        let device = device.clone();
        tokio::spawn(async move {
            let stream = Stream::named(&device, format!("lane {lane}")).unwrap();
            for round in 0..20_u32 {
                let (graph, sum) = Graph::capture(&device, |capture| {
                    let own = capture.stream();
                    let mut sum = own.alloc::<u32>(64)?;
                    own.fill(&mut sum, round)?;
                    for value in 0..5 {
                        let mut x = own.alloc::<u32>(64)?;
                        own.fill(&mut x, value)?;
                        add_to::launch(own, &mut sum, &x)?;
                        // Lets the other thread capture too.
                        std::thread::yield_now();
                    }
                    Ok(sum)
                })
                .unwrap();
                assert_eq!(graph.nodes().len(), 11);
                graph.instantiate().unwrap().launch(&stream).unwrap();
                assert_eq!(sum.to_vec(&stream).await.unwrap(), [round + 10; 64]);
            }
        })
    });
    for capturing in capturing {
        capturing.await.unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    assert!(busy.join().unwrap() > 0);
});

#[test]
fn g12_a_graph_is_drawn_as_dot() {
    let device = common::emulated();
    let (mut a, mut b) = (Buffer::<u32>::new(&device, 64).unwrap(), Buffer::<u32>::new(&device, 64).unwrap());
    let mut graph = Graph::builder(&device).unwrap();
    let fill = graph.add(&[], |stream| stream.fill(&mut a, 1)).unwrap();
    let host = graph.host(&[], || ()).unwrap();
    let copy = graph.add(&[], |stream| stream.copy(&a, &mut b)).unwrap();
    graph.join(&[copy, host]).unwrap();
    let _ = fill;
    let expected = r#"digraph {
  rankdir=LR;
  node [shape=box];
  0 [label="fill of 256 bytes", style=rounded];
  1 [label="host function", shape=oval];
  2 [label="copy on the device of 256 bytes", style=rounded];
  3 [label="join", shape=point];
  0 -> 2;
  2 -> 3;
  1 -> 3;
}
"#;
    assert_eq!(graph.build().unwrap().to_dot(), expected);
}

on_both!(capturing_repeatedly_leaks_nothing, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut sum = buffer(&stream, 0).await;
    let mut known = BTreeSet::new();
    for _ in 0..200 {
        let (graph, ()) = Graph::capture(&device, |capture| {
            let mut x = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut x, 1)?;
            add_to::launch(capture.stream(), &mut sum, &x)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        exec.launch(&stream).unwrap().completed().await.unwrap();
        drop((exec, graph));
        known.insert(device.memory_stats().in_use);
    }
    assert_eq!(known.len(), 1, "bytes in use after each: {known:?}");
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [200; 64]);
});
