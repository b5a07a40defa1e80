//! Memory that a graph uses is kept as long as the graph, and not reused meanwhile.

use super::*;

// The nodes of a conditional's body that fails stay in the graph, so their memory must be kept.
alone!(memory_of_the_nodes_of_a_failed_body_is_kept, async |device: Device, stream: Stream| {
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let address = data.device_address().unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    let failed = graph.run_if(&[], &flag, |body| {
        body.add(&[], |stream| stream.fill(&mut data, 1))?;
        Err("given up".into())
    });
    assert!(failed.is_err());
    // The user ignores the failure.
    let graph = graph.build().unwrap();
    let exec = graph.instantiate().unwrap();
    drop(data);
    assert!(!is_handed_out(&device, address), "a node writes to it at each launch");
    exec.launch(&stream).unwrap();
});

// A body's builder is swapped with another one, so that another graph would keep the memory of the body's nodes.
alone!(a_builder_that_is_swapped_out_of_its_closure_is_refused, async |device: Device, stream: Stream| {
    let flag = buffer(&stream, 1).await;
    let mut mine = Graph::builder(&device).unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    let swapped = graph.run_if(&[], &flag, |body| {
        std::mem::swap(body, &mut mine);
        Ok(())
    });
    refused(swapped, &["replaced by another one"]);
});

// Nested captures of two devices are swapped: each would return the other's graph.
alone!(captures_that_are_swapped_return_no_graph, async |device: Device, stream: Stream| {
    let other = Device::emulated(Emulated::new());
    let mut data = buffer(&stream, 0).await;
    let swapped = Graph::capture(&device, |outer| {
        let inner = Graph::capture(&other, |inner| {
            std::mem::swap(outer, inner);
            Ok(())
        });
        refused(inner, &["replaced by another one"]);
        Ok(())
    });
    refused(swapped, &["replaced by another one"]);
    stream.fill(&mut data, 7).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [7; 64]);
});

// A stream that outlives its capture must not be given the graph's own memory, which launches write.
alone!(a_stream_that_outlives_its_capture_cannot_allocate, async |device: Device, _| {
    let (_graph, kept) = Graph::capture(&device, |capture| {
        let mut scratch = capture.stream().alloc::<u32>(64)?;
        capture.stream().fill(&mut scratch, 1)?;
        Ok(capture.stream().clone())
    })
    .unwrap();
    refused(kept.alloc::<u32>(64), &["the capture of this stream is over"]);
});

// Memory of one graph that another graph uses too is kept when the first graph is dropped.
alone!(a_graphs_memory_is_kept_while_another_graph_uses_it, async |device: Device, stream: Stream| {
    let (one, (two, address)) = Graph::capture(&device, |capture| {
        let mut shared = capture.stream().alloc::<u32>(64)?;
        capture.stream().fill(&mut shared, 1)?;
        let (two, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut shared, 2))?;
        Ok((two, shared.device_address()?))
    })
    .unwrap();
    let exec = two.instantiate().unwrap();
    drop((one, two));
    assert!(!is_handed_out(&device, address), "a node writes to it at each launch");
    exec.launch(&stream).unwrap();
});

// The same two graphs, both alive: launches that write the same memory are ordered.
alone!(launches_of_two_graphs_that_share_memory_are_ordered, async |device: Device, _| {
    let [a, b] = streams(&device);
    let (one, two) = Graph::capture(&device, |capture| {
        let mut shared = capture.stream().alloc::<u32>(64)?;
        capture.stream().fill(&mut shared, 1)?;
        Ok(Graph::capture(&device, |capture| capture.stream().fill(&mut shared, 2))?.0)
    })
    .unwrap();
    let (one, two) = (one.instantiate().unwrap(), two.instantiate().unwrap());
    let held = hold(&a);
    one.launch(&a).unwrap();
    let second = two.launch(&b).map(|_| ());
    drop(held);
    second.unwrap();
});

// Memory of a builder that was used on a stream and dropped: launches come after that use.
alone!(a_launch_comes_after_a_use_of_memory_that_was_dropped_before_the_build, async |device: Device, _| {
    let [one, two] = streams(&device);
    let mut seen = buffer(&one, 0).await;
    let mut builder = Graph::builder(&device).unwrap();
    let mut made = None;
    builder
        .add(&[], |stream| {
            let mut x = stream.alloc::<u32>(64)?;
            stream.fill(&mut x, 1)?;
            made = Some(x);
            Ok(())
        })
        .unwrap();
    let mut x = made.unwrap();
    one.fill(&mut x, 9).unwrap();
    one.completed().await.unwrap();
    let held = hold(&two);
    add_to::launch(&two, &mut seen, &x).unwrap();
    drop(x);
    let exec = builder.build().unwrap().instantiate().unwrap();
    let launched = exec.launch(&one).map(|_| ());
    drop(held);
    launched.unwrap();
    assert_eq!(seen.to_vec(&two).await.unwrap(), [9; 64]);
});

// Memory that a node of one graph allocates does not exist in another graph.
alone!(memory_that_a_node_allocates_is_refused_in_another_graph, async |device: Device, _| {
    let mut builder = Graph::builder(&device).unwrap();
    let (_, mut x) = builder.alloc::<u32>(&[], 64).unwrap();
    let captured = Graph::capture(&device, |capture| capture.stream().fill(&mut x, 1));
    refused(captured, &["a node of another graph allocates"]);
});

// A stream of a capture, or an event that was recorded there, must not keep the graph and its callbacks alive.
alone!(a_stream_that_outlives_its_capture_does_not_keep_callbacks, async |device: Device, _| {
    let owned = Arc::new(());
    let captured = owned.clone();
    let (graph, kept) = Graph::capture(&device, |capture| {
        capture.stream().host_callback(move || _ = &captured)?;
        let event = wakeline::stream::Event::new();
        event.record(capture.stream())?;
        Ok(event)
    })
    .unwrap();
    drop(graph);
    assert_eq!(Arc::strong_count(&owned), 1, "the callback's values outlive the dropped graph");
    drop(kept);
});

/// An allocation as a thread ends, after it has captured, works.
#[test]
fn an_allocation_as_a_thread_ends_after_a_capture_works() {
    struct AtEnd(std::cell::RefCell<Option<(Device, mpsc::Sender<bool>)>>);
    impl Drop for AtEnd {
        fn drop(&mut self) {
            let Some((device, sender)) = self.0.take() else { return };
            let made =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Buffer::<u32>::new(&device, 64).is_ok()));
            let _ = sender.send(made.unwrap_or(false));
        }
    }
    thread_local! {
        static EARLY: AtEnd = const { AtEnd(std::cell::RefCell::new(None)) };
        static LATE: AtEnd = const { AtEnd(std::cell::RefCell::new(None)) };
    }
    let device = common::emulated();
    let (sender, receiver) = mpsc::channel();
    let of_thread = device.clone();
    std::thread::spawn(move || {
        EARLY.with(|at_end| at_end.0.replace(Some((of_thread.clone(), sender.clone()))));
        Graph::capture(&of_thread, |_| Ok(())).unwrap();
        LATE.with(|at_end| at_end.0.replace(Some((of_thread, sender))));
    })
    .join()
    .unwrap();
    assert_eq!(receiver.into_iter().collect::<Vec<_>>(), [true, true]);
}

/// Allocating memory of another device for a captured stream is an error, as it is outside a capture.
#[test]
fn memory_of_another_device_for_a_captured_stream_is_an_error() {
    let (here, there) = (common::emulated(), common::emulated());
    let allocator = Allocator::unbounded(&there);
    let made = Graph::capture(&here, |capture| Ok(allocator.alloc::<u32>(capture.stream(), 64).map(drop))).unwrap().1;
    assert!(made.is_err(), "`choose one of its own device`");
}

// A second exec of a graph that allocates memory, or its use as a child, is a `Usage` error on every device.
alone!(misuse_of_graphs_that_allocate_memory_is_a_usage_error, async |device: Device, _| {
    let mut builder = Graph::builder(&device).unwrap();
    let (_, mut x) = builder.alloc::<u32>(&[], 64).unwrap();
    builder.add(&[], |stream| stream.fill(&mut x, 1)).unwrap();
    let graph = builder.build().unwrap();
    let mut outer = Graph::builder(&device).unwrap();
    let child = outer.child(&[], &graph).unwrap_err();
    let _exec = graph.instantiate().unwrap();
    let second = graph.instantiate().unwrap_err();
    assert_eq!((child.kind(), second.kind()), (ErrorKind::Usage, ErrorKind::Usage), "{child}; {second}");
});

// Memory allocated before a capture and used in it: stream-ordered and a user's own; dropped in any order.
alone!(holds_memory_of_every_kind_in_any_order, async |device: Device, stream: Stream| {
    for order in 0..6 {
        let mut sum = buffer(&stream, 0).await;
        let allocator = Allocator::stream_ordered(&device);
        let mut ordered = allocator.alloc::<u32>(&stream, 64).unwrap();
        stream.fill(&mut ordered, 1).unwrap();
        let under = buffer(&stream, 2).await;
        let address = under.device_address().unwrap();
        // SAFETY: the owner keeps the memory, and nothing else accesses it.
        let (mine, wrapped) = unsafe { Buffer::<u32>::from_device_address(&device, address, 64, under) }.unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| {
            add_to::launch(capture.stream(), &mut sum, &ordered)?;
            add_to::launch(capture.stream(), &mut sum, &mine)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        let held = hold(&stream);
        let launched = exec.launch(&stream).unwrap();
        let (mut graph, mut exec, mut made) = (Some(graph), Some(exec), Some((ordered, mine)));
        let mut back = Box::pin(wrapped.into_inner());
        for step in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]][order] {
            match step {
                0 => drop(graph.take()),
                1 => drop(exec.take()),
                _ => drop(made.take()),
            }
            assert!(futures::FutureExt::now_or_never(&mut back).is_none(), "a launch uses the memory");
        }
        drop(held);
        launched.completed().await.unwrap();
        drop(back.await.unwrap());
        assert_eq!(sum.to_vec(&stream).await.unwrap(), [3; 64]);
    }
    freed(&device).await;
});

// Nested captures, of another device and of the same one, with the outer capture's memory.
alone!(holds_nested_captures, async |here: Device, one: Stream| {
    let there = common::emulated();
    let two = Stream::new(&there).unwrap();
    let (mut a, mut b) = (buffer(&one, 0).await, buffer(&two, 0).await);
    let (outer, inner) = Graph::capture(&here, |capture| {
        let mut scratch = capture.stream().alloc::<u32>(64)?;
        capture.stream().fill(&mut scratch, 3)?;
        let (inner, ()) = Graph::capture(&there, |inner| {
            let mut scratch = inner.stream().alloc::<u32>(64)?;
            inner.stream().fill(&mut scratch, 4)?;
            add_to::launch(inner.stream(), &mut b, &scratch)
        })?;
        let nothing = Graph::capture(&here, |inner| {
            inner.stream().fill(&mut a, 9)?;
            Err::<(), Error>("no".into())
        });
        assert!(nothing.is_err());
        add_to::launch(capture.stream(), &mut a, &scratch)?;
        Ok(inner)
    })
    .unwrap();
    outer.instantiate().unwrap().launch(&one).unwrap();
    inner.instantiate().unwrap().launch(&two).unwrap();
    assert_eq!((a.to_vec(&one).await.unwrap()[0], b.to_vec(&two).await.unwrap()[0]), (3, 4));
});

// Memory that a capture returned to its caller stays valid after the graph is dropped, and is ordered after its last
// launches.
alone!(holds_an_output_outlives_its_graph, async |device: Device, _| {
    let [one, two] = streams(&device);
    let (graph, mut output) = Graph::capture(&device, |capture| {
        let mut output = capture.stream().alloc::<u32>(64)?;
        capture.stream().fill(&mut output, 5)?;
        Ok(output)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    let held = hold(&one);
    exec.launch(&one).unwrap();
    drop((exec, graph));
    increment::launch(&two, &mut output).unwrap();
    drop(held);
    assert_eq!(output.to_vec(&two).await.unwrap(), [6; 64]);
    drop(output);
    freed(&device).await;
});

// Memory of a capture that another graph uses too is not reused in that capture; tested in three ways.
on_both!(memory_of_a_capture_that_another_graph_uses_is_not_reused, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut other = Buffer::from_slice(&stream, &[0_u32; 64]).unwrap();
    let (settable, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut other, 5)).unwrap();
    let set = settable.instantiate().unwrap();
    for way in ["nested", "set", "thread"] {
        let (graph, (kept, uses)) = Graph::capture(&device, |capture| {
            let mut scratch = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut scratch, 1)?;
            let uses = match way {
                "nested" => Some(Graph::capture(&device, |within| within.stream().fill(&mut scratch, 77))?.0),
                "set" => {
                    set.set(settable.nodes()[0].node, |stream| stream.fill(&mut scratch, 77))?;
                    None
                }
                _ => {
                    let (device, scratch) = (&device, &mut scratch);
                    let thread = move || Graph::capture(device, |within| within.stream().fill(&mut *scratch, 77));
                    Some(std::thread::scope(|scope| scope.spawn(thread).join().unwrap())?.0)
                }
            };
            drop(scratch);
            let mut kept = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut kept, 2)?;
            Ok((kept, uses))
        })
        .unwrap();
        graph.instantiate().unwrap().launch(&stream).unwrap();
        match &uses {
            Some(graph) => graph.instantiate().unwrap().launch(&stream).unwrap(),
            None => set.launch(&stream).unwrap(),
        };
        assert_eq!(kept.to_vec(&stream).await.unwrap(), [2; 64], "{way}");
    }
});

// Memory that a change of an exec replaced while a launch was in flight is freed when the launch is done, without
// another call on the exec.
on_both!(replaced_memory_of_an_exec_is_freed_when_its_last_launch_is_done, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let blocks = Allocator::blocks(&device, 256, 1).unwrap();
    let mut replaced = blocks.alloc::<u32>(&stream, 64).unwrap();
    let mut other = Buffer::from_slice(&stream, &[0_u32; 64]).unwrap();
    let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut other, 5)).unwrap();
    let exec = graph.instantiate().unwrap();
    let node = graph.nodes()[0].node;
    exec.set(node, |stream| stream.fill(&mut replaced, 6)).unwrap();
    let held = hold(&stream);
    exec.launch(&stream).unwrap();
    exec.set(node, |stream| stream.fill(&mut other, 7)).unwrap();
    drop((replaced, held));
    within(blocks.alloc_when_free::<u32>(&stream, 64)).await.unwrap();
    drop(exec);
});
