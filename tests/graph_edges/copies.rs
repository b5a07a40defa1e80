//! Copies between host and device: inputs, outputs, and users' memory.

use super::*;

// A launch that writes host memory while a `&[T]` of it exists would be a data race in safe code.
alone!(host_memory_that_a_launch_writes_gives_no_slice, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let mut out = Buffer::<u32>::pinned(&device, 64).unwrap();
    out.as_mut_slice().unwrap().fill(3);
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.output(&mut out)?;
        capture.stream().copy(&x, &mut out)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    assert!(out.as_slice().is_err() && out.as_mut_slice().is_err() && out.read().await.is_err());
    exec.launch(&stream).unwrap();
    assert_eq!(out.to_vec(&stream).await.unwrap(), [7; 64]);
    // The host can use the memory again.
    drop((exec, graph));
    assert_eq!(out.read().await.unwrap(), [7; 64]);
    out.as_mut_slice().unwrap().fill(3);
});

// Copies of memory that is not page-locked are staged, partly by the host, which a launch cannot do.
alone!(a_copy_of_memory_that_is_not_page_locked_is_refused, async |device: Device, stream: Stream| {
    let mut x = buffer(&stream, 7).await;
    let mut near = Buffer::<u32>::pinned(&Device::host(), 64).unwrap();
    let (mut mine, _back) = Buffer::wrap(vec![5_u32; 64]).unwrap();
    for near in [&mut near, &mut mine] {
        near.as_mut_slice().unwrap().fill(5);
        let wrong = [
            Graph::capture(&device, |capture| capture.stream().copy(&*near, &mut x)).unwrap_err(),
            Graph::capture(&device, |capture| capture.stream().copy(&x, near)).unwrap_err(),
            Graph::capture(&device, |capture| capture.input(near)).unwrap_err(),
            Graph::capture(&device, |capture| capture.output(near)).unwrap_err(),
        ];
        for error in wrong {
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            assert!(error.to_string().contains("`Buffer::pinned(&device, ..)`"), "{error}");
        }
        assert_eq!(near.as_slice().unwrap(), [5; 64]);
    }
    assert_eq!(x.to_vec(&stream).await.unwrap(), [7; 64]);
});

// Two inputs, used in sequence, must not share a block: both copies are made before the launch.
alone!(inputs_do_not_overwrite_each_other, async |device: Device, stream: Stream| {
    let mut sums = [buffer(&stream, 0).await, buffer(&stream, 0).await];
    let hosts = [(); 2].map(|()| Buffer::<u32>::pinned(&device, 64).unwrap());
    let (graph, ()) = Graph::capture(&device, |capture| {
        for (host, sum) in hosts.iter().zip(&mut sums) {
            capture.input(host)?;
            let stream = capture.stream();
            let mut x = stream.alloc::<u32>(64)?;
            stream.copy(host, &mut x)?;
            add_to::launch(stream, sum, &x)?;
        }
        Ok(())
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    for (input, value) in graph.inputs().iter().zip([5, 6]) {
        let mut from = Buffer::<u32>::pinned(&device, 64).unwrap();
        from.as_mut_slice().unwrap().fill(value);
        input.copy(&stream, &from).unwrap();
    }
    exec.launch(&stream).unwrap();
    let seen = [sums[0].to_vec(&stream).await.unwrap()[0], sums[1].to_vec(&stream).await.unwrap()[0]];
    assert_eq!(seen, [5, 6]);
});

// Each part of a buffer is an input of its own, with its own source.
alone!(parts_of_a_buffer_are_inputs_of_their_own, async |device: Device, stream: Stream| {
    let mut sums = [buffer(&stream, 0).await, buffer(&stream, 0).await];
    let host = Buffer::<u32>::pinned(&device, 128).unwrap();
    let (graph, ()) = Graph::capture(&device, |capture| {
        for (part, sum) in [host.slice(..64)?, host.slice(64..)?].into_iter().zip(&mut sums) {
            capture.input(&part)?;
            let stream = capture.stream();
            let mut x = stream.alloc::<u32>(64)?;
            stream.copy(&part, &mut x)?;
            add_to::launch(stream, sum, &x)?;
        }
        Ok(())
    })
    .unwrap();
    let found: Vec<_> = graph.inputs().iter().map(|copy| (copy.input(), copy.offset(), copy.bytes())).collect();
    assert_eq!(found, [(0, 0, 256), (1, 0, 256)]);
    let exec = graph.instantiate().unwrap();
    for (input, value) in graph.inputs().iter().zip([5, 6]) {
        let mut from = Buffer::<u32>::pinned(&device, 64).unwrap();
        from.as_mut_slice().unwrap().fill(value);
        input.copy(&stream, &from).unwrap();
    }
    exec.launch(&stream).unwrap();
    let seen = [sums[0].to_vec(&stream).await.unwrap()[0], sums[1].to_vec(&stream).await.unwrap()[0]];
    assert_eq!(seen, [5, 6]);
    // A copy of both parts belongs to neither.
    let mut x = Buffer::<u32>::new(&device, 128).unwrap();
    let both = Graph::capture(&device, |capture| {
        capture.input(&host.slice(..64)?)?;
        capture.stream().copy(&host, &mut x)
    });
    refused(both, &["only a part is input 0"]);
});

// What is beside an input in its buffer is a constant: the graph keeps it, and no one writes it.
alone!(a_part_that_is_no_input_is_a_constant, async |device: Device, stream: Stream| {
    let (mut x, mut sum) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let mut host = Buffer::<u32>::pinned(&device, 128).unwrap();
    host.as_mut_slice().unwrap().fill(3);
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.input(&host.slice(..64)?)?;
        let mut constant = capture.stream().alloc::<u32>(64)?;
        capture.stream().copy(&host.slice(64..)?, &mut constant)?;
        capture.stream().copy(&host.slice(..64)?, &mut x)?;
        add_to::launch(capture.stream(), &mut sum, &constant)
    })
    .unwrap();
    assert!(host.as_mut_slice().is_err(), "each launch copies the second half");
    drop(host);
    let exec = graph.instantiate().unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [3; 64]);
});

// An input's memory must not reuse a block that the graph used before: the copy is made before the launch, and would be
// overwritten.
alone!(an_input_is_not_overwritten_by_earlier_nodes, async |device: Device, stream: Stream| {
    let (mut sum, mut other) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.input(&host)?;
        let stream = capture.stream();
        let mut scratch = stream.alloc::<u32>(64)?;
        stream.fill(&mut scratch, 9)?;
        add_to::launch(stream, &mut other, &scratch)?;
        drop(scratch);
        let mut x = stream.alloc::<u32>(64)?;
        stream.copy(&host, &mut x)?;
        add_to::launch(stream, &mut sum, &x)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    let mut from = Buffer::<u32>::pinned(&device, 64).unwrap();
    from.as_mut_slice().unwrap().fill(5);
    graph.inputs()[0].copy(&stream, &from).unwrap();
    exec.launch(&stream).unwrap();
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [5; 64]);
});

// A user's own memory as an input's source could be returned while the copy may still read it.
alone!(a_copy_of_a_users_memory_to_an_input_is_refused, async |device: Device, stream: Stream| {
    let mut sum = buffer(&stream, 0).await;
    let host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let graph = adds_input(&host, &mut sum).unwrap();
    let (mine, _wrapped) = Buffer::wrap(vec![5_u32; 64]).unwrap();
    // Copies of memory that is not page-locked are staged, which an input's copy does not do.
    refused(graph.inputs()[0].copy(&stream, &mine), &["not page-locked"]);
});

// An input's copy that another graph captures would write to memory that the first graph frees.
alone!(an_inputs_copy_in_another_graph_is_refused, async |device: Device, stream: Stream| {
    let mut sum = buffer(&stream, 0).await;
    let host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let graph = adds_input(&host, &mut sum).unwrap();
    let captured = Graph::capture(&device, |capture| graph.inputs()[0].copy(capture.stream(), &host));
    refused(captured, &["an input cannot be copied on a captured stream"]);
});

// A failed capture of a copy to wrapped memory leaves the user's memory unchanged.
alone!(a_capture_that_fails_leaves_a_users_memory_unchanged, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 1).await;
    let (mut mine, _wrapped) = Buffer::wrap(vec![7_u32; 64]).unwrap();
    let captured = Graph::capture(&device, |capture| {
        capture.output(&mut mine)?;
        capture.stream().copy(&x, &mut mine)
    });
    refused(captured, &["not page-locked"]);
    assert_eq!(mine.as_slice().unwrap(), [7; 64]);
});

// A node that copies to wrapped memory is refused, and leaves the memory unchanged.
alone!(a_node_that_copies_to_wrapped_memory_is_refused, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 1).await;
    let (mut mine, _wrapped) = Buffer::wrap(vec![7_u32; 64]).unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    refused(graph.add(&[], |stream| stream.copy(&x, &mut mine)), &["not page-locked"]);
    assert_eq!(mine.as_slice().unwrap(), [7; 64]);
});

// An input's copy is removed from the graph, so launches do not count as readers of its source.
alone!(the_source_of_an_input_is_not_in_use_by_launches, async |device: Device, stream: Stream| {
    let mut sum = buffer(&stream, 0).await;
    let mut host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let graph = adds_input(&host, &mut sum).unwrap();
    let exec = graph.instantiate().unwrap();
    graph.inputs()[0].copy(&stream, &host).unwrap();
    stream.completed().await.unwrap();
    let held = hold(&stream);
    exec.launch(&stream).unwrap();
    // The host writes the next input meanwhile.
    let next = host.as_mut_slice().map(|_| ());
    drop(held);
    next.unwrap();
});

// Wrapped memory as an input is refused: its copy would be staged and taken for that of a constant, so that the graph
// would keep the first value for ever.
alone!(an_input_of_wrapped_memory_is_refused, async |_, stream: Stream| {
    let mut sum = buffer(&stream, 0).await;
    let (mine, _wrapped) = Buffer::wrap(vec![5_u32; 64]).unwrap();
    refused(adds_input(&mine, &mut sum), &["not page-locked"]);
});

// An input's copy on a stream of another device is ordered with the launches.
alone!(holds_an_inputs_copy_on_another_device, async |device: Device, stream: Stream| {
    // There may be only one GPU.
    let other = if device.is_cuda() { device.clone() } else { common::emulated() };
    let elsewhere = Stream::new(&other).unwrap();
    let mut sum = buffer(&stream, 0).await;
    let mut host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let graph = adds_input(&host, &mut sum).unwrap();
    host.as_mut_slice().unwrap().fill(5);
    let exec = graph.instantiate().unwrap();
    let held = hold(&elsewhere);
    graph.inputs()[0].copy(&elsewhere, &host).unwrap();
    exec.launch(&stream).unwrap();
    drop(held);
    assert_eq!(sum.to_vec(&stream).await.unwrap(), [5; 64]);
});

// The page-locked source of an input whose copy was removed is not kept by the graph, as no node uses it.
alone!(the_source_of_an_input_is_not_kept, async |device: Device, _| {
    let mut x = Buffer::<u32>::new(&device, 64).unwrap();
    let before = device.pinned_memory_stats().in_use;
    let host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.input(&host)?;
        capture.stream().copy(&host, &mut x)
    })
    .unwrap();
    drop(host);
    assert_eq!(device.pinned_memory_stats().in_use, before, "no node uses it: {:?}", graph.nodes());
});

// An input's destination must not be used before the copy: the copy is removed from the graph, and would come first.
alone!(an_earlier_use_of_an_inputs_destination_is_refused, async |device: Device, stream: Stream| {
    let (mut sum, mut x) = (buffer(&stream, 0).await, buffer(&stream, 0).await);
    let hosts = [(); 2].map(|()| Buffer::<u32>::pinned(&device, 64).unwrap());
    let filled = Graph::capture(&device, |capture| {
        capture.input(&hosts[0])?;
        capture.stream().fill(&mut x, 100)?;
        capture.stream().copy(&hosts[0], &mut x)?;
        add_to::launch(capture.stream(), &mut sum, &x)
    });
    refused(filled, &["node 0, `fill of 256 bytes`", "input 0", "memory of its own"]);
    let copied_twice = Graph::capture(&device, |capture| {
        for host in &hosts {
            capture.input(host)?;
            capture.stream().copy(host, &mut x)?;
            add_to::launch(capture.stream(), &mut sum, &x)?;
        }
        Ok(())
    });
    refused(copied_twice, &["input 1", "memory of its own"]);
    let of_a_device = Graph::capture(&device, |capture| capture.input(&sum));
    refused(of_a_device, &["an input must be page-locked host memory"]);
});

// An input is identified by its address: other memory at the same address would be mistaken for it, and a launch would
// read memory that is not kept.
alone!(other_memory_is_not_mistaken_for_an_input, async |device: Device, stream: Stream| {
    let blocks = Allocator::pinned_blocks(&device, 4096, 1).unwrap();
    let mut there = Buffer::<u8>::new(&device, 4096).unwrap();
    let (graph, (before, mut after)) = Graph::capture(&device, |capture| {
        let small = blocks.alloc::<u8>(&stream, 16)?;
        capture.input(&small)?;
        let before = small.as_slice()?.as_ptr().addr();
        drop(small);
        let large = blocks.alloc::<u8>(&stream, 4096).or_else(|_| Buffer::pinned(&device, 4096))?;
        capture.stream().copy(&large, &mut there)?;
        Ok((before, large))
    })
    .unwrap();
    assert_ne!(before, after.as_slice().unwrap().as_ptr().addr());
    assert!(after.as_mut_slice().is_err(), "a launch reads the memory: {:?}", graph.nodes());
    // An input's memory is free when the capture is over.
    blocks.alloc::<u8>(&stream, 4096).unwrap();
});
