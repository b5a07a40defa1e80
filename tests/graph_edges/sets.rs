//! What an exec does from now on: `Exec::set` and `Exec::update`.

use super::*;

// `set` of one exec within that of another of the same graph: the work goes to one, and what it uses is kept by the other.
alone!(two_sets_at_once_keep_the_memory_with_the_wrong_exec, async |device: Device, stream: Stream| {
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
    refused(inner.unwrap(), &["nothing was enqueued for it"]);
    drop((two, new));
    assert!(!is_handed_out(&device, address), "it is memory that a node of `one` writes to");
    one.launch(&stream).unwrap();
});

// The same with threads that know nothing of each other: whoever sets takes what the other one enqueues.
alone!(two_threads_that_set_execs_of_one_graph_take_each_others_work, async |_, stream: Stream| {
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

// A stream that a former `set` has left to somebody: its work becomes another exec's, and what it uses is kept by the first.
alone!(a_stream_of_a_former_set_works_again_within_the_next, async |_, stream: Stream| {
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
    refused(two.set(node, |_| kept.unwrap().fill(&mut new, 2)), &["its capture is over"]);
});

// A launch takes the turn and then the exec; `set` takes the exec and then, for what it enqueues, the turn.
alone!(a_launch_and_a_set_wait_for_each_other, async |device: Device, stream: Stream| {
    let mut data = Buffer::<u32>::new(&device, 64).unwrap();
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let (go, went) = mpsc::channel();
    let (tell, launched) = mpsc::channel();
    std::thread::scope(|scope| {
        let (exec, stream) = (&exec, &stream);
        scope.spawn(move || {
            went.recv().unwrap();
            exec.launch(stream).unwrap();
            tell.send(()).unwrap();
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

// `set` calls the user with the exec locked: whatever he does there with the exec waits for itself.
alone!(a_launch_within_a_set_hangs, async |device: Device, stream: Stream| {
    let mut data = Buffer::<u32>::new(&device, 64).unwrap();
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let _ = exec.set(first(&graph), |captured| {
        let _ = exec.launch(&stream);
        captured.fill(&mut data, 2)
    });
    stream.synchronize_blocking().unwrap();
});

// Two pieces of work in a `set`: the first is lost, and nobody says so.
alone!(work_in_a_set_before_the_piece_that_fits_is_lost_in_silence, async |device: Device, stream: Stream| {
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

// A `set` that fails changes the exec all the same.
alone!(a_set_that_is_refused_changes_the_exec, async |_, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let set = exec.set(first(&graph), |stream| {
        stream.fill(&mut data, 2)?;
        increment::launch(stream, &mut data)
    });
    assert!(set.is_err());
    exec.launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64], "`it is as it was then`");
});

// The same where the user's closure fails.
alone!(a_set_whose_closure_fails_changes_the_exec, async |_, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let graph = fills(&mut data, 1);
    let exec = graph.instantiate().unwrap();
    let set = exec.set(first(&graph), |stream| {
        stream.fill(&mut data, 2)?;
        Err("no".into())
    });
    assert!(set.is_err());
    exec.launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 64], "`it is as it was then`");
});

// The same in a `set`, after the node that gives it back.
alone!(memory_that_a_node_makes_is_set_where_it_is_gone, async |device: Device, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let mut builder = Graph::builder(&device).unwrap();
    let before = builder.add(&[], |stream| stream.fill(&mut data, 1)).unwrap();
    let (_, mut x) = builder.alloc::<u32>(&[before], 64).unwrap();
    builder.add(&[], |stream| stream.fill(&mut x, 1)).unwrap();
    let exec = builder.build().unwrap().instantiate().unwrap();
    refused(exec.set(before, |stream| stream.fill(&mut x, 2)), &["a node of another graph makes"]);
});

// A node is set to other memory again and again: all of it is kept.
alone!(setting_a_node_again_and_again_keeps_all_that_it_ever_used, async |device: Device, stream: Stream| {
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

// An exec is updated again and again: all graphs are kept.
alone!(updating_an_exec_again_and_again_keeps_all_that_it_ever_was, async |device: Device, stream: Stream| {
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

// A closure of `set` records an event and panics: the node records it from now on, and nobody keeps it.
alone!(a_set_that_panics_leaves_an_event_that_is_not_kept, async |device: Device, stream: Stream| {
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

// A callback that is replaced is dropped with the exec, its graph and a stream locked: what it owns may ask them something.
alone!(what_a_replaced_callback_owns_is_dropped_under_locks, async |device: Device, _| {
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
