//! Limits of graphs, which are reported before the driver would, and what graphs keep: the same on both devices.

use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

use common::*;
use wakeline::{
    Stream,
    graph::{Graph, Node},
    prelude::*,
    stream::Event,
};

/// Enqueues work on a stream when it is dropped.
struct Enqueues(Stream);

impl Drop for Enqueues {
    fn drop(&mut self) {
        let _ = self.0.host_callback(|| ());
    }
}

/// Runs `work` on a thread that is left behind if it deadlocks.
fn apart(work: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        work();
        let _ = sender.send(());
    });
    receiver.recv_timeout(Duration::from_secs(20)).expect("the thread deadlocked or panicked");
}

async fn buffer(stream: &Stream, value: u32) -> Buffer<u32> {
    let buffer = Buffer::from_slice(stream, &[value; 64]).unwrap();
    stream.completed().await.unwrap();
    buffer
}

/// Subtracts one from each element.
#[kernel(unsafe(cuda = "kernels/decrement.cu"))]
fn decrement(x: &mut [u32]) {
    x.iter_mut().for_each(|x| *x -= 1);
}

/// A graph with a condition, which adds 1 to `data` if the flag is raised.
fn conditional(device: &Device, flag: &Buffer<u32>, data: &mut Buffer<u32>) -> Graph {
    let mut graph = Graph::builder(device).unwrap();
    let added = graph.run_if(&[], flag, |body| body.add(&[], |stream| increment::launch(stream, data)).map(drop));
    added.unwrap();
    graph.build().unwrap()
}

on_both!(a_graph_with_conditions_has_one_exec_at_a_time, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let graph = conditional(&device, &flag, &mut data);
    let exec = graph.instantiate().unwrap();
    let second = graph.instantiate().unwrap_err();
    assert_eq!(second.kind(), ErrorKind::Usage, "{second}");
    assert!(second.to_string().contains("has conditional nodes can have only one exec at a time"), "{second}");
    exec.launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64]);
    // The next exec, once the launches of the first are done.
    drop(exec);
    graph.instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [2; 64]);
});

on_both!(a_graph_with_conditions_is_no_child, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let inner = conditional(&device, &flag, &mut data);
    let mut outer = Graph::builder(&device).unwrap();
    let refused = outer.child(&[], &inner).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Usage, "{refused}");
    assert!(refused.to_string().contains("has conditional nodes cannot be a child"), "{refused}");
    // No node was added.
    assert!(outer.build().unwrap().nodes().is_empty());
});

on_both!(a_graph_that_allocates_has_one_exec_and_is_no_child, async |device: Device| {
    let mut graph = Graph::builder(&device).unwrap();
    let (_, mut scratch) = graph.alloc::<u32>(&[], 64).unwrap();
    graph.add(&[], |stream| stream.fill(&mut scratch, 1)).unwrap();
    let graph = graph.build().unwrap();
    let _exec = graph.instantiate().unwrap();
    let (second, child) = (graph.instantiate(), Graph::builder(&device).unwrap().child(&[], &graph));
    for refused in [second.map(drop), child.map(drop)] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Usage, "{refused}");
        assert!(refused.to_string().contains("a graph that allocates memory"), "{refused}");
    }
});

// The copy would stay in the graph and read memory that is not kept for it.
on_both!(a_copy_of_an_input_to_the_host_is_an_error, async |device: Device| {
    let mut host = [(); 3].map(|()| Buffer::<u32>::pinned(&device, 64).unwrap());
    let [input, output, constant] = &mut host;
    let copied = Graph::capture(&device, |capture| {
        capture.input(input)?;
        capture.output(output)?;
        capture.stream().copy(&*input, output)
    });
    let error = copied.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().contains("node 0 copies input 0 to host memory"), "{error}");
    // A copy from other memory is that of a constant, which is kept.
    constant.as_mut_slice().unwrap().fill(7);
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.input(input)?;
        capture.output(output)?;
        capture.stream().copy(&*constant, output)
    })
    .unwrap();
    let [_, output, _] = host;
    let stream = Stream::new(&device).unwrap();
    graph.instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(output.to_vec(&stream).await.unwrap(), [7; 64]);
});

on_both!(a_replaced_callback_is_dropped_when_no_launch_calls_it, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (graph, ()) = Graph::capture(&device, |capture| capture.stream().host_callback(|| ())).unwrap();
    let (exec, node) = (graph.instantiate().unwrap(), graph.nodes()[0].node);
    let owned: Vec<_> = (0..4).map(|_| Arc::new(())).collect();
    let owners = || owned.iter().map(Arc::strong_count).collect::<Vec<_>>();
    for owned in &owned[..3] {
        let captured = owned.clone();
        exec.set(node, |stream| stream.host_callback(move || _ = &captured)).unwrap();
        exec.launch(&stream).unwrap().completed().await.unwrap();
    }
    // The last callback may be called again. A callback that was set but never launched is dropped too.
    assert_eq!(owners(), [1, 1, 2, 1]);
    let captured = owned[3].clone();
    let refused = exec.set(node, |stream| {
        stream.host_callback(move || _ = &captured)?;
        stream.host_callback(|| ())
    });
    assert!(refused.is_err());
    assert_eq!(owners(), [1, 1, 2, 1]);
    // An update drops it too.
    let (other, ()) = Graph::capture(&device, |capture| capture.stream().host_callback(|| ())).unwrap();
    exec.update(&other).unwrap();
    assert_eq!(owners(), [1; 4]);
    exec.launch(&stream).unwrap().completed().await.unwrap();
});

on_both!(a_callback_of_an_execs_former_graph_is_dropped, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let owned: Vec<_> = (0..3).map(|_| Arc::new(())).collect();
    let capture = |owned: &Arc<()>| {
        let captured = owned.clone();
        Graph::capture(&device, |capture| capture.stream().host_callback(move || _ = &captured)).unwrap().0
    };
    let exec = capture(&owned[0]).instantiate().unwrap();
    for owned in &owned[1..] {
        exec.update(&capture(owned)).unwrap();
        exec.launch(&stream).unwrap().completed().await.unwrap();
    }
    // The first one is kept by its own graph.
    assert_eq!(owned.iter().map(Arc::strong_count).collect::<Vec<_>>(), [2, 1, 2]);
});

#[test]
fn a_refused_host_function_is_dropped_without_the_streams_lock() {
    apart(|| {
        let device = emulated();
        let (graph, ()) = Graph::capture(&device, |capture| {
            let stream = capture.stream();
            let owned = Enqueues(stream.clone());
            let refused = stream.host_function(move || _ = &owned).unwrap_err();
            assert!(refused.to_string().contains("use `host_callback`"), "{refused}");
            stream.host_callback(|| ())
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        let refused = exec.set(graph.nodes()[0].node, |stream| {
            stream.host_callback(|| ())?;
            let owned = Enqueues(stream.clone());
            stream.host_callback(move || _ = &owned)
        });
        assert!(refused.unwrap_err().to_string().contains("one piece of work"));
    });
}

/// Panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a destructor");
    }
}

#[test]
fn a_refused_host_function_that_panics_as_it_is_dropped_is_an_error() {
    let device = emulated();
    let other = Graph::builder(&device).unwrap().add(&[], |stream| stream.host_callback(|| ())).unwrap();
    Graph::capture(&device, |capture| {
        let bomb = Bomb;
        let refused = capture.stream().host_function(move || _ = &bomb).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Usage);
        Ok(())
    })
    .unwrap();
    let bomb = Bomb;
    let refused = Graph::builder(&device).unwrap().host(&[other], move || _ = &bomb).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Usage);
}

/// A caller that continues after the failure has the body's nodes in the graph, in order with later nodes.
#[test]
fn later_nodes_come_after_the_nodes_of_a_failed_body() {
    let device = emulated();
    let (flag, mut data) = (Buffer::<u32>::new(&device, 1).unwrap(), Buffer::<u32>::new(&device, 64).unwrap());
    let mut graph = Graph::builder(&device).unwrap();
    let failed = graph.run_if(&[], &flag, |body| {
        body.add(&[], |stream| stream.fill(&mut data, 1))?;
        Err("given up".into())
    });
    assert!(failed.is_err());
    let next = graph.add(&[], |stream| stream.fill(&mut data, 2)).unwrap();
    let graph = graph.build().unwrap();
    assert!(graph.comes_after(next, graph.nodes()[0].node), "{:?}", graph.nodes());
}

on_both!(timed_events_in_a_graph_measure_its_last_launch, async |device: Device| {
    let [one, two] = ["one", "two"].map(|name| Stream::named(&device, name).unwrap());
    let (begin, end) = (Event::timed(), Event::timed());
    let mut data = Buffer::from_slice(&one, &[0_u32; 64]).unwrap();
    let (graph, ()) = Graph::capture(&device, |capture| {
        begin.record(capture.stream())?;
        increment::launch(capture.stream(), &mut data)?;
        end.record(capture.stream())
    })
    .unwrap();
    let never = end.since(&begin).await.unwrap_err();
    assert_eq!(never.kind(), ErrorKind::Driver, "{never}");
    let exec = graph.instantiate().unwrap();
    for _ in 0..2 {
        let held = hold(&two);
        one.wait_for(&two).unwrap();
        let launched = exec.launch(&one).unwrap();
        let mut time = Box::pin(end.since(&begin));
        assert!(futures::poll!(&mut time).is_pending(), "the launch has not begun");
        drop(held);
        time.await.unwrap();
        assert!(launched.has_passed());
    }
});

/// Callbacks of an exec that was dropped in flight may instantiate another exec in their destructors. `instantiate`
/// first finishes dropped execs; callbacks are dropped with the memory of their launches, while no lock is held.
#[test]
fn a_callback_whose_drop_makes_an_exec_does_not_deadlock() {
    struct Instantiates(Graph);
    impl Drop for Instantiates {
        fn drop(&mut self) {
            self.0.instantiate().unwrap();
        }
    }
    apart(|| {
        let device = emulated();
        let stream = Stream::new(&device).unwrap();
        let (other, ()) = Graph::capture(&device, |capture| capture.stream().host_callback(|| ())).unwrap();
        let (owned, dropped) = (Instantiates(other.clone()), Arc::new(()));
        let watch = dropped.clone();
        let (graph, ()) =
            Graph::capture(&device, |capture| capture.stream().host_callback(move || _ = (&owned, &watch))).unwrap();
        let exec = graph.instantiate().unwrap();
        let held = hold(&stream);
        exec.launch(&stream).unwrap();
        drop((exec, graph));
        drop(held);
        stream.synchronize_blocking().unwrap();
        while Arc::strong_count(&dropped) > 1 {
            other.instantiate().unwrap();
        }
    });
}

/// A thread uses a stream of a capture while the capture ends: all copies of its input are removed from the graph.
#[test]
fn no_copy_of_an_input_is_added_after_they_were_removed() {
    let device = emulated();
    for _ in 0..200 {
        let host = Arc::new(Buffer::<u32>::pinned(&device, 64).unwrap());
        let (give, given) = mpsc::sync_channel::<Stream>(1);
        let (of_thread, input) = (device.clone(), host.clone());
        let other = std::thread::spawn(move || {
            let stream = given.recv().unwrap();
            // Each copy has its own destination.
            let mut copies = Vec::new();
            while copies.last().is_none_or(|(_, done)| *done) {
                let mut data = Buffer::<u32>::new(&of_thread, 64).unwrap();
                let done = stream.copy(&*input, &mut data).is_ok();
                copies.push((data, done));
            }
        });
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.input(&*host)?;
            give.send(capture.stream().clone()).unwrap();
            while capture.stream().ticket().number() < 4 {
                std::thread::yield_now();
            }
            Ok(())
        })
        .unwrap();
        other.join().unwrap();
        assert!(
            graph.nodes().is_empty(),
            "{} reads memory that it does not keep: {:?}",
            graph.nodes().len(),
            graph.nodes()
        );
    }
}

/// The driver's behaviour is undefined if two threads use one graph at once.
#[tokio::test]
#[ignore = "needs a GPU"]
async fn a_capture_does_not_end_while_another_thread_captures_into_it() {
    let _alone = alone().await;
    // The emulated device does not call external functions.
    let device = cuda();
    let (sender, receiver) = mpsc::channel();
    let (go, went) = mpsc::channel::<()>();
    let mut other = None;
    let captured = Graph::capture(&device, |capture| {
        let stream = capture.stream().clone();
        other = Some(std::thread::spawn(move || {
            let call = move |_: *mut std::ffi::c_void, _: [u64; 0]| {
                sender.send(()).unwrap();
                went.recv().unwrap();
                Ok(())
            };
            // SAFETY: it enqueues nothing.
            unsafe { stream.external("slow").enqueue(call) }
        }));
        receiver.recv().unwrap();
        Ok(())
    });
    let error = captured.map(drop).unwrap_err();
    assert!(error.to_string().contains("another thread is still capturing"), "{error}");
    go.send(()).unwrap();
    let _ = other.unwrap().join().unwrap();
    // Other streams are not affected.
    let stream = Stream::new(&device).unwrap();
    let mut data = Buffer::from_slice(&stream, &[0_u32; 64]).unwrap();
    let (graph, ()) = Graph::capture(&device, |capture| increment::launch(capture.stream(), &mut data)).unwrap();
    graph.instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64]);
}

/// An increment of each of two buffers, unordered.
fn beside(device: &Device, [left, right]: [&mut Buffer<u32>; 2]) -> (Graph, [Node; 2]) {
    let mut graph = Graph::builder(device).unwrap();
    let one = graph.add(&[], |stream| increment::launch(stream, left)).unwrap();
    let two = graph.add(&[], |stream| increment::launch(stream, right)).unwrap();
    (graph.build().unwrap(), [one, two])
}

on_both!(a_node_cannot_be_set_to_the_memory_of_an_unordered_node, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut a, mut b) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (mut c, mut d) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (graph, [one, two]) = beside(&device, [&mut a, &mut b]);
    let exec = graph.instantiate().unwrap();
    let refused = |node, data: &mut Buffer<u32>| {
        let error = exec.set(node, |stream| increment::launch(stream, data)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        error.to_string()
    };
    let other = exec.set(one, |stream| decrement::launch(stream, &mut a)).unwrap_err().to_string();
    assert!(other.contains("it runs kernel `increment` and cannot run `decrement`"), "{other}");
    let text = refused(one, &mut b);
    assert!(text.contains("node 1, `increment` uses the same memory, and no edge orders the two"), "{text}");
    refused(two, &mut a);
    // The check uses the other node's current memory.
    exec.set(two, |stream| increment::launch(stream, &mut c)).unwrap();
    refused(one, &mut c);
    exec.set(one, |stream| increment::launch(stream, &mut b)).unwrap();
    refused(two, &mut b);
    exec.set(two, |stream| increment::launch(stream, &mut a)).unwrap();
    exec.launch(&stream).unwrap();
    // And its memory after an update.
    exec.update(&beside(&device, [&mut c, &mut d]).0).unwrap();
    refused(one, &mut d);
    exec.set(one, |stream| increment::launch(stream, &mut b)).unwrap();
    exec.launch(&stream).unwrap();
    for (data, expected) in [(a, 1), (b, 2), (c, 0), (d, 1)] {
        assert_eq!(data.to_vec(&stream).await.unwrap(), [expected; 64]);
    }
});

on_both!(a_node_cannot_be_set_to_memory_within_an_unordered_node, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let (mut flag, mut a, mut b) = (buffer(&stream, 1).await, buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (mut d, mut e) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let (child, _) = {
        let mut graph = Graph::builder(&device).unwrap();
        let node = graph.add(&[], |stream| increment::launch(stream, &mut a)).unwrap();
        (graph.build().unwrap(), node)
    };
    let mut graph = Graph::builder(&device).unwrap();
    let one = graph.add(&[], |stream| increment::launch(stream, &mut b)).unwrap();
    graph.child(&[], &child).unwrap();
    let last = graph.run_if(&[], &flag, |body| body.add(&[], |stream| stream.fill(&mut e, 7)).map(drop)).unwrap();
    let late = graph.add(&[], |stream| increment::launch(stream, &mut d)).unwrap();
    let graph = graph.build().unwrap();
    assert!(graph.comes_after(last, one) && !graph.comes_after(late, last));
    let exec = graph.instantiate().unwrap();
    for data in [&mut flag, &mut e] {
        let refused = exec.set(late, |stream| increment::launch(stream, data)).unwrap_err();
        assert!(refused.to_string().contains("node 2, `if` uses the same memory"), "{refused}");
    }
    let refused = exec.set(one, |stream| increment::launch(stream, &mut a)).unwrap_err();
    assert!(refused.to_string().contains("node 1, `child graph` uses the same memory"), "{refused}");
    let mut c = buffer(&stream, 0).await;
    exec.set(one, |stream| increment::launch(stream, &mut c)).unwrap();
    exec.launch(&stream).unwrap();
    for (data, expected) in [(a, 1), (b, 0), (c, 1), (d, 1), (e, 7)] {
        assert_eq!(data.to_vec(&stream).await.unwrap(), [expected; 64]);
    }
});

/// A thread uses a stream of a capture while the capture ends: memory of every call that succeeded is kept.
#[test]
fn memory_that_another_thread_uses_as_the_capture_ends_is_kept() {
    let device = emulated();
    for _ in 0..500 {
        let (give, given) = mpsc::sync_channel::<Stream>(1);
        let of_thread = device.clone();
        let other = std::thread::spawn(move || {
            let stream = given.recv().unwrap();
            let mut last = None;
            loop {
                let mut data = Buffer::<u32>::new(&of_thread, 64).unwrap();
                let address = data.device_address().unwrap();
                if stream.fill(&mut data, 1).is_err() {
                    return last;
                }
                last = Some(address);
            }
        });
        let (graph, ()) = Graph::capture(&device, |capture| {
            give.send(capture.stream().clone()).unwrap();
            while capture.stream().ticket().number() < 2 {
                std::thread::yield_now();
            }
            Ok(())
        })
        .unwrap();
        let last = other.join().unwrap().unwrap();
        let asked: Vec<_> = (0..16).map(|_| Buffer::<u32>::new(&device, 64).unwrap()).collect();
        let given = asked.iter().any(|buffer| buffer.device_address().unwrap() == last);
        assert!(!given, "a node writes to it at each launch: {} nodes", graph.nodes().len());
    }
}
