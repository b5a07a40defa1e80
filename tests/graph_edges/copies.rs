//! Copies between host and device: inputs, outputs, and memory of the users.

use super::*;

// A `&[T]` of the host's memory, and a launch that writes there: a data race in safe code.
alone!(a_launch_writes_to_host_memory_while_a_slice_of_it_is_borrowed, async |device: Device, stream: Stream| {
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
    // It is the host's again.
    drop((exec, graph));
    assert_eq!(out.read().await.unwrap(), [7; 64]);
    out.as_mut_slice().unwrap().fill(3);
});

// Memory that is not page-locked is copied by way of other memory, by the host in part: no launch would do that.
alone!(a_copy_of_memory_that_is_not_page_locked_fits_no_graph, async |device: Device, stream: Stream| {
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

// Two inputs, one after the other: their memory is the same block, and their copies are made before the launch.
alone!(inputs_overwrite_each_other, async |device: Device, stream: Stream| {
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

// An input's memory is used by the graph for something else before it: what was copied there is gone when it is read.
alone!(an_input_is_overwritten_by_what_used_the_memory_before, async |device: Device, stream: Stream| {
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

// A user's own memory as an input's source: it is given back while the copy may still read it.
alone!(memory_of_the_users_is_given_back_before_an_inputs_copy_has_read_it, async |device: Device, stream: Stream| {
    let mut sum = buffer(&stream, 0).await;
    let host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let graph = adds_input(&host, &mut sum).unwrap();
    let (mine, _wrapped) = Buffer::wrap(vec![5_u32; 64]).unwrap();
    // Memory that is not page-locked goes through other memory, which an input's copy does not.
    refused(graph.inputs()[0].copy(&stream, &mine), &["not page-locked"]);
});

// An input's copy, captured by another graph: it writes to memory that the first graph gives back.
alone!(an_inputs_copy_in_another_graph_outlives_its_memory, async |device: Device, stream: Stream| {
    let mut sum = buffer(&stream, 0).await;
    let host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let graph = adds_input(&host, &mut sum).unwrap();
    let captured = Graph::capture(&device, |capture| graph.inputs()[0].copy(capture.stream(), &host));
    refused(captured, &["an input is copied on a captured stream"]);
});

// A capture of a copy to wrapped memory fails, and the user's memory is overwritten with what never arrived.
alone!(a_capture_that_fails_overwrites_memory_of_the_users, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 1).await;
    let (mut mine, _wrapped) = Buffer::wrap(vec![7_u32; 64]).unwrap();
    let captured = Graph::capture(&device, |capture| {
        capture.output(&mut mine)?;
        capture.stream().copy(&x, &mut mine)
    });
    refused(captured, &["not page-locked"]);
    assert_eq!(mine.as_slice().unwrap(), [7; 64]);
});

// A node that copies to wrapped memory: the user sees neither what he had nor what a launch copied.
alone!(a_node_that_copies_to_wrapped_memory_copies_to_nowhere, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 1).await;
    let (mut mine, _wrapped) = Buffer::wrap(vec![7_u32; 64]).unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    refused(graph.add(&[], |stream| stream.copy(&x, &mut mine)), &["not page-locked"]);
    assert_eq!(mine.as_slice().unwrap(), [7; 64]);
});

// An input's copy was taken out of the graph, and launches still count as readers of where it came from.
alone!(the_source_of_an_input_that_was_taken_out_is_in_use_by_launches, async |device: Device, stream: Stream| {
    let mut sum = buffer(&stream, 0).await;
    let mut host = Buffer::<u32>::pinned(&device, 64).unwrap();
    let graph = adds_input(&host, &mut sum).unwrap();
    let exec = graph.instantiate().unwrap();
    graph.inputs()[0].copy(&stream, &host).unwrap();
    stream.completed().await.unwrap();
    let held = hold(&stream);
    exec.launch(&stream).unwrap();
    // The next one, meanwhile.
    let next = host.as_mut_slice().map(|_| ());
    drop(held);
    next.unwrap();
});

// Wrapped memory as an input: its copy is staged, and so is taken for a constant's; the first value is the graph's for ever.
alone!(an_input_of_wrapped_memory_is_taken_for_a_constant, async |_, stream: Stream| {
    let mut sum = buffer(&stream, 0).await;
    let (mine, _wrapped) = Buffer::wrap(vec![5_u32; 64]).unwrap();
    refused(adds_input(&mine, &mut sum), &["not page-locked"]);
});

// An input's copy on a stream of another device: in order with the launches.
alone!(holds_an_inputs_copy_on_another_device, async |device: Device, stream: Stream| {
    // Of a GPU there may be one alone.
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

// Whose copy was taken out stays in page-locked memory as long as the graph, though nothing uses it.
alone!(the_source_of_an_input_that_was_taken_out_is_kept, async |device: Device, _| {
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

// What an input is copied to is used before that copy: taken out, it would come first.
alone!(what_an_input_is_copied_to_is_used_before_that, async |device: Device, stream: Stream| {
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
    refused(of_a_device, &["an input is page-locked memory of the host"]);
});

// An input is known by where it lies: other memory at its address would be taken for it, and a launch would read what nothing
// keeps.
alone!(other_memory_begins_where_an_input_did, async |device: Device, stream: Stream| {
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
    assert!(after.as_mut_slice().is_err(), "a launch reads it: {:?}", graph.nodes());
    // An input's memory is free when the capture is over.
    blocks.alloc::<u8>(&stream, 4096).unwrap();
});
