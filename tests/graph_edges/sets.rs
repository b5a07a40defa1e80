//! Changes of an exec: `Exec::set` and `Exec::update`.

use super::*;

// `set` within another exec's `set`, of the same graph: the work goes to the exec that keeps its memory.
alone!(nested_sets_keep_the_memory_with_the_right_exec, async |device: Device, stream: Stream| {
    let (mut old, mut new) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let graph = fills(&mut old, 1);
    let (one, two) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
    let node = first(&graph);
    let address = new.device_address().unwrap();
    let mut inner = None;
    let outer = one.set(node, |outer| {
        inner = Some(two.set(node, |_| outer.fill(&mut new, 2)));
        Ok(())
    });
    outer.unwrap();
    refused(inner.unwrap(), &["the closure enqueued no work"]);
    drop((two, new));
    assert!(!is_handed_out(&device, address), "a node of `one` writes to the memory");
    one.launch(&stream).unwrap();
});

// The same with two independent threads: each `set` takes only the work of its own closure.
alone!(two_threads_that_set_execs_of_one_graph_do_not_mix_their_work, async |_, stream: Stream| {
    let mut old = buffer(&stream, 0).await;
    let (mut a, mut b) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let graph = fills(&mut old, 1);
    let (one, two) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
    let node = first(&graph);
    let (first_in, second_in) = (AtomicBool::new(false), AtomicBool::new(false));
    let wait = |what: &AtomicBool| {
        let begun = Instant::now();
        while !what.load(Ordering::SeqCst) && begun.elapsed() < Duration::from_secs(1) {
            std::thread::yield_now();
        }
    };
    let (set_one, set_two) = std::thread::scope(|scope| {
        let one = scope.spawn(|| {
            one.set(node, |stream| {
                first_in.store(true, Ordering::SeqCst);
                wait(&second_in);
                stream.fill(&mut a, 10)
            })
        });
        let two = scope.spawn(|| {
            wait(&first_in);
            two.set(node, |stream| {
                second_in.store(true, Ordering::SeqCst);
                stream.fill(&mut b, 20)
            })
        });
        (one.join().unwrap(), two.join().unwrap())
    });
    assert!(set_one.is_ok() && set_two.is_ok(), "{set_one:?}, {set_two:?}");
    one.launch(&stream).unwrap();
    two.launch(&stream).unwrap();
    assert_eq!((a.to_vec(&stream).await.unwrap()[0], b.to_vec(&stream).await.unwrap()[0]), (10, 20));
});

// A stream that outlives its `set` must not work in a later `set`: the work would be one exec's, and its memory would
// be kept by the other.
alone!(a_stream_that_outlives_its_set_is_closed, async |_, stream: Stream| {
    let (mut old, mut new) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let graph = fills(&mut old, 1);
    let (one, two) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
    let node = first(&graph);
    let mut kept = None;
    one.set(node, |stream| {
        kept = Some(stream.clone());
        stream.fill(&mut old, 1)
    })
    .unwrap();
    refused(two.set(node, |_| kept.unwrap().fill(&mut new, 2)), &["the capture of this stream is over"]);
});

// Lock order: a launch takes the use lock and then the exec; `set` takes the exec and then, for the work that it
// enqueues, the use lock.
alone!(a_launch_and_a_set_do_not_deadlock, async |device: Device, stream: Stream| {
    let mut data = Buffer::<u32>::new(&device, 64).unwrap();
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let (go, went) = mpsc::channel();
    let (sender, launched) = mpsc::channel();
    std::thread::scope(|scope| {
        let (exec, stream) = (&exec, &stream);
        scope.spawn(move || {
            went.recv().unwrap();
            exec.launch(stream).unwrap();
            sender.send(()).unwrap();
        });
        let set = exec.set(first(&graph), |stream| {
            go.send(()).unwrap();
            launched.recv().unwrap();
            stream.fill(&mut data, 2)
        });
        set.unwrap();
    });
    stream.synchronize_blocking().unwrap();
});

// The closure of `set` uses the exec: the exec must not be locked while user code runs.
alone!(a_launch_within_a_set_does_not_hang, async |device: Device, stream: Stream| {
    let mut data = Buffer::<u32>::new(&device, 64).unwrap();
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let _ = exec.set(first(&graph), |captured| {
        let _ = exec.launch(&stream);
        captured.fill(&mut data, 2)
    });
    stream.synchronize_blocking().unwrap();
});

// Two pieces of work in a `set` are an error: the first one would be lost.
alone!(two_pieces_of_work_in_a_set_are_refused, async |device: Device, stream: Stream| {
    let (mut sum, one) = (buffer(&stream, 0).await, buffer(&stream, 1).await);
    let (graph, ()) = Graph::capture(&device, |capture| add_to::launch(capture.stream(), &mut sum, &one)).unwrap();
    let exec = graph.instantiate().unwrap();
    let set = exec.set(first(&graph), |stream| {
        let ten = Buffer::from_slice(stream, &[10_u32; 64])?;
        add_to::launch(stream, &mut sum, &ten)
    });
    refused(set, &["one piece of work"]);
    exec.launch(&stream).unwrap();
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [1; 64]);
});

// A `set` that is refused leaves the exec unchanged.
alone!(a_set_that_is_refused_leaves_the_exec_unchanged, async |_, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let set = exec.set(first(&graph), |stream| {
        stream.fill(&mut data, 2)?;
        increment::launch(stream, &mut data)
    });
    assert!(set.is_err());
    exec.launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64], "the exec is unchanged");
});

// The same if the user's closure fails.
alone!(a_set_whose_closure_fails_leaves_the_exec_unchanged, async |_, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let set = exec.set(first(&graph), |stream| {
        stream.fill(&mut data, 2)?;
        Err("no".into())
    });
    assert!(set.is_err());
    exec.launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64], "the exec is unchanged");
});

// A `set` must not use memory of a node where that memory does not exist.
alone!(memory_that_a_node_allocates_is_refused_in_a_set, async |device: Device, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let mut builder = Graph::builder(&device).unwrap();
    let before = builder.add(&[], |stream| stream.fill(&mut data, 1)).unwrap();
    let (_, mut x) = builder.alloc::<u32>(&[before], 64).unwrap();
    builder.add(&[], |stream| stream.fill(&mut x, 1)).unwrap();
    let exec = builder.build().unwrap().instantiate().unwrap();
    refused(exec.set(before, |stream| stream.fill(&mut x, 2)), &["a node of another graph allocates"]);
});

// Memory that a node was set to earlier is freed.
alone!(setting_a_node_repeatedly_frees_earlier_memory, async |device: Device, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let before = device.memory_stats().in_use;
    for _ in 0..100 {
        let mut other = Buffer::<u32>::new(&device, 64).unwrap();
        exec.set(first(&graph), |stream| stream.fill(&mut other, 2)).unwrap();
        exec.launch(&stream).unwrap().completed().await.unwrap();
    }
    let kept = (device.memory_stats().in_use - before) / 256;
    assert!(kept < 10, "{kept} buffers that no launch will touch again");
});

// Graphs that an exec was updated to earlier are freed.
alone!(updating_an_exec_repeatedly_frees_earlier_graphs, async |device: Device, stream: Stream| {
    let capture = || {
        let mut data = Buffer::<u32>::new(&device, 64).unwrap();
        fills(&mut data, 1)
    };
    let exec = capture().instantiate().unwrap();
    let before = device.memory_stats().in_use;
    for _ in 0..100 {
        exec.update(&capture()).unwrap();
        exec.launch(&stream).unwrap().completed().await.unwrap();
    }
    let kept = (device.memory_stats().in_use - before) / 256;
    assert!(kept < 10, "{kept} buffers that no launch will touch again");
});

// A closure of `set` records an event and panics: the node must not record an event that is not kept.
alone!(a_set_that_panics_leaves_no_dangling_event, async |device: Device, stream: Stream| {
    let (old, new) = (GraphEvent::new(&device).unwrap(), GraphEvent::new(&device).unwrap());
    let (graph, ()) = Graph::capture(&device, |capture| old.record(capture.stream())).unwrap();
    let exec = graph.instantiate().unwrap();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = exec.set(first(&graph), |stream| {
            new.record(stream)?;
            panic!("planned");
        });
    }));
    assert!(panicked.is_err());
    drop(new);
    exec.launch(&stream).unwrap().completed().await.unwrap();
});

// A replaced callback must not be dropped with the exec, its graph or a stream locked: its destructor may use them.
alone!(a_replaced_callback_is_not_dropped_under_locks, async |device: Device, _| {
    struct Asks(Graph);
    impl Drop for Asks {
        fn drop(&mut self) {
            let _ = self.0.nodes();
        }
    }
    let (graph, ()) = Graph::capture(&device, |capture| capture.stream().host_callback(|| ())).unwrap();
    let exec = graph.instantiate().unwrap();
    let asks = Asks(graph.clone());
    exec.set(first(&graph), |stream| stream.host_callback(move || _ = &asks)).unwrap();
    exec.set(first(&graph), |stream| stream.host_callback(|| ())).unwrap();
});
