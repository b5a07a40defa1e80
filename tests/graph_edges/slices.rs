//! Slices of host memory that graphs use: no launch writes memory while a slice of it exists, and no mutable slice
//! exists of memory that a launch may read. Tested for every way to add a node: a builder, a capture on another thread,
//! a nested capture, a change of an exec, a child.

use super::*;

const WRITES: &str = "a graph or a capture writes";
const USES: &str = "a graph or a capture uses";

/// Page-locked host memory, filled with `value`.
fn host(device: &Device, value: u32) -> Buffer<u32> {
    let mut host = Buffer::<u32>::pinned(device, 64).unwrap();
    host.as_mut_slice().unwrap().fill(value);
    host
}

/// Asserts that neither a shared nor a mutable slice is available.
async fn is_written_by_a_graph(host: &mut Buffer<u32>) {
    refused(host.as_slice().map(drop), &[WRITES]);
    refused(host.read().await.map(drop), &[WRITES]);
    refused(host.as_mut_slice().map(drop), &[USES]);
    refused(host.write().await.map(drop), &[USES]);
}

/// Asserts that the host may read, and may not write.
fn is_read_by_a_graph(host: &mut Buffer<u32>) {
    assert_eq!(host.as_slice().unwrap().len(), 64);
    refused(host.as_mut_slice().map(drop), &[USES]);
}

/// Asserts that the host may read and write.
fn is_the_hosts(host: &mut Buffer<u32>) {
    host.as_slice().unwrap();
    host.as_mut_slice().unwrap().fill(1);
}

// A builder's node writes the memory: no slice is available even before the graph is built.
alone!(a_slice_of_what_a_builders_node_writes, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let mut out = host(&device, 1);
    let mut graph = Graph::builder(&device).unwrap();
    graph.add(&[], |stream| stream.copy(&x, &mut out)).unwrap();
    is_written_by_a_graph(&mut out).await;
    let exec = graph.build().unwrap().instantiate().unwrap();
    is_written_by_a_graph(&mut out).await;
    exec.launch(&stream).unwrap();
    drop(exec);
    assert_eq!(out.read().await.unwrap(), [7; 64]);
    is_the_hosts(&mut out);
});

// The exec is dropped while it runs. The host may use the memory after the last launch, whichever device it is
// page-locked for.
alone!(memory_of_another_device_is_the_hosts_when_a_dropped_exec_is_done, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let other = (!device.is_cuda()).then(common::emulated);
    for near in std::iter::once(device.clone()).chain(other) {
        let mut out = host(&near, 1);
        let mut graph = Graph::builder(&device).unwrap();
        graph.add(&[], |stream| stream.copy(&x, &mut out)).unwrap();
        let graph = graph.build().unwrap();
        let (release, held) = std::sync::mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        let exec = graph.instantiate().unwrap();
        exec.launch(&stream).unwrap();
        drop((exec, graph));
        drop(release);
        assert_eq!(out.write().await.unwrap(), [7; 64], "page-locked for {near}");
    }
});

// The same for memory that a launch reads: it could read a partial write of the host.
alone!(a_slice_to_write_of_what_a_builders_node_reads, async |device: Device, stream: Stream| {
    let mut x = buffer(&stream, 0).await;
    let mut from = host(&device, 5);
    let mut graph = Graph::builder(&device).unwrap();
    // A shared slice that exists before the read is compatible with it.
    let seen = from.as_slice().unwrap();
    graph.add(&[], |stream| stream.copy(&from, &mut x)).unwrap();
    assert_eq!(seen, [5; 64]);
    is_read_by_a_graph(&mut from);
    let exec = graph.build().unwrap().instantiate().unwrap();
    exec.launch(&stream).unwrap();
    is_read_by_a_graph(&mut from);
    drop(exec);
    from.write().await.unwrap().fill(6);
    assert_eq!(x.to_vec(&stream).await.unwrap(), [5; 64]);
});

// A dropped builder releases the memory.
alone!(a_slice_after_the_builder_was_dropped, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let (mut out, mut from) = (host(&device, 1), host(&device, 2));
    let mut y = buffer(&stream, 0).await;
    let mut graph = Graph::builder(&device).unwrap();
    graph.add(&[], |stream| stream.copy(&x, &mut out)).unwrap();
    graph.add(&[], |stream| stream.copy(&from, &mut y)).unwrap();
    drop(graph);
    is_the_hosts(&mut out);
    is_the_hosts(&mut from);
});

// A capture on another thread: a per-thread guard would not notice it here.
alone!(a_slice_while_another_thread_captures, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let mut out = host(&device, 1);
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.output(&mut out)?;
        capture.stream().copy(&x, &mut out)?;
        std::thread::scope(|scope| {
            let looks = || {
                refused(out.as_slice().map(drop), &[WRITES]);
                refused(out.as_mut_slice().map(drop), &[USES]);
            };
            scope.spawn(looks).join().unwrap();
        });
        Ok(())
    })
    .unwrap();
    is_written_by_a_graph(&mut out).await;
    drop(graph);
    is_the_hosts(&mut out);
});

// A nested capture: a guard of the innermost capture would not notice the outer one.
alone!(a_slice_within_a_nested_capture, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let (mut out, mut from) = (host(&device, 1), host(&device, 2));
    let mut y = buffer(&stream, 0).await;
    let (outer, inner) = Graph::capture(&device, |capture| {
        capture.output(&mut out)?;
        capture.stream().copy(&x, &mut out)?;
        capture.stream().copy(&from, &mut y)?;
        let mut other = buffer_of_zeros(&device);
        let (inner, ()) = Graph::capture(&device, |within| {
            refused(out.as_slice().map(drop), &[WRITES]);
            is_read_by_a_graph(&mut from);
            within.stream().fill(&mut other, 1)
        })?;
        Ok(inner)
    })
    .unwrap();
    is_written_by_a_graph(&mut out).await;
    is_read_by_a_graph(&mut from);
    drop(inner);
    is_written_by_a_graph(&mut out).await;
    drop(outer);
    is_the_hosts(&mut out);
    is_the_hosts(&mut from);
});

// A capture that fails after nodes were added: they will never be launched.
alone!(a_slice_after_a_capture_that_failed, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let (mut out, mut from) = (host(&device, 1), host(&device, 2));
    let mut y = buffer(&stream, 0).await;
    let failed = Graph::capture(&device, |capture| {
        capture.stream().copy(&x, &mut out)?;
        capture.stream().copy(&from, &mut y)?;
        Err::<(), _>(Error::new(ErrorKind::Usage, "rejected by the test"))
    });
    refused(failed, &["rejected by the test"]);
    is_the_hosts(&mut out);
    is_the_hosts(&mut from);
    // A capture with a copy to host memory that is not an output.
    refused(Graph::capture(&device, |capture| capture.stream().copy(&x, &mut out)), &["output"]);
    is_the_hosts(&mut out);
});

// A node of an exec is set to write other host memory: later launches write that, and earlier ones may still write the
// previous memory.
alone!(a_slice_of_what_a_node_is_set_to_write, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let (mut first, mut second) = (host(&device, 1), host(&device, 2));
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.output(&mut first)?;
        capture.stream().copy(&x, &mut first)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    exec.set(first_node(&graph), |stream| stream.copy(&x, &mut second)).unwrap();
    is_written_by_a_graph(&mut second).await;
    exec.launch(&stream).unwrap();
    is_written_by_a_graph(&mut second).await;
    is_written_by_a_graph(&mut first).await;
    drop((exec, graph));
    assert_eq!(second.read().await.unwrap(), [7; 64]);
    assert_eq!(first.read().await.unwrap(), [1; 64]);
    is_the_hosts(&mut first);
});

// A refused change leaves the memory available.
alone!(a_slice_after_a_change_that_was_refused, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let mut filled = buffer(&stream, 0).await;
    let mut out = host(&device, 1);
    let graph = fills(&mut filled, 3);
    let exec = graph.instantiate().unwrap();
    assert!(exec.set(first_node(&graph), |stream| stream.copy(&x, &mut out)).is_err());
    is_the_hosts(&mut out);
});

// A child graph is dropped after it was added: the parent's launches write the memory of the child's nodes.
alone!(a_slice_of_what_a_child_node_writes, async |device: Device, stream: Stream| {
    let x = buffer(&stream, 7).await;
    let mut out = host(&device, 1);
    let (child, ()) = Graph::capture(&device, |capture| {
        capture.output(&mut out)?;
        capture.stream().copy(&x, &mut out)
    })
    .unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    graph.child(&[], &child).unwrap();
    drop(child);
    is_written_by_a_graph(&mut out).await;
    let exec = graph.build().unwrap().instantiate().unwrap();
    exec.launch(&stream).unwrap();
    is_written_by_a_graph(&mut out).await;
    drop(exec);
    assert_eq!(out.read().await.unwrap(), [7; 64]);
});

// A `&str` of host memory that safe code holds across launches must stay valid UTF-8.
alone!(a_string_of_memory_that_launches_would_write, async |device: Device, stream: Stream| {
    let mut bytes = Buffer::<u8>::pinned(&device, 4).unwrap();
    bytes.as_mut_slice().unwrap().copy_from_slice(b"true");
    let mut x = Buffer::<u8>::new(&device, 4).unwrap();
    stream.fill(&mut x, 0xff).unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    graph.add(&[], |stream| stream.copy(&x, &mut bytes)).unwrap();
    let text = bytes.as_slice().map(|bytes| std::str::from_utf8(bytes).unwrap());
    let exec = graph.build().unwrap().instantiate().unwrap();
    exec.launch(&stream).unwrap();
    stream.completed().await.unwrap();
    if let Ok(text) = text {
        assert_eq!(text, "true");
        panic!("got a slice of memory that a node writes");
    }
});

// The host may use memory that is allocated in a capture until a node uses it.
alone!(holds_memory_made_in_a_capture_is_written_before_its_first_node, async |device: Device, stream: Stream| {
    let mut x = buffer(&stream, 0).await;
    let (graph, ()) = Graph::capture(&device, |capture| {
        let mut constant = Buffer::<u32>::pinned(&device, 64)?;
        constant.as_mut_slice()?.fill(9);
        assert_eq!(constant.as_slice()?, [9; 64]);
        capture.stream().copy(&constant, &mut x)?;
        is_read_by_a_graph(&mut constant);
        Ok(())
    })
    .unwrap();
    graph.instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(x.to_vec(&stream).await.unwrap(), [9; 64]);
});

// Unrelated work within a capture: a copy to the host and back on a separate stream.
alone!(unrelated_work_on_another_stream_within_a_capture_works, async |device: Device, stream: Stream| {
    let mut filled = buffer(&stream, 0).await;
    let free = buffer(&stream, 4).await;
    let other = Stream::named(&device, "other").unwrap();
    let own_before = device.pinned_memory_stats().in_use;
    let (graph, (mut there, back)) = Graph::capture(&device, |capture| {
        capture.stream().fill(&mut filled, 3)?;
        let back = pinned_copy(&free, &other)?;
        let there = Buffer::from_slice(&other, &[5_u32; 64])?;
        // Memory that was allocated in the capture and that no node uses.
        let mut between = Buffer::<u32>::new(&device, 64)?;
        other.copy(&there, &mut between)?;
        other.fill(&mut between, 6)?;
        Ok((there, back))
    })
    .unwrap();
    assert_eq!(back.await.unwrap(), [4; 64]);
    assert_eq!(there.to_vec(&other).await.unwrap(), [5; 64]);
    other.fill(&mut there, 8).unwrap();
    assert_eq!(there.to_vec(&other).await.unwrap(), [8; 64]);
    // The copies' staging memory does not belong to the graph.
    other.completed().await.unwrap();
    assert_eq!(device.pinned_memory_stats().in_use, own_before);
    graph.instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(filled.to_vec(&stream).await.unwrap(), [3; 64]);
});

// Memory that nodes use is still refused there, also that of an outer capture.
alone!(holds_another_streams_work_with_memory_of_the_capture_is_refused, async |device: Device, stream: Stream| {
    let mut filled = buffer(&stream, 0).await;
    let other = Stream::named(&device, "other").unwrap();
    let captured = Graph::capture(&device, |capture| {
        capture.stream().fill(&mut filled, 3)?;
        refused(other.fill(&mut filled, 4), &["is not part of the capture"]);
        Graph::capture(&device, |_| {
            refused(other.fill(&mut filled, 4), &["is not part of the capture"]);
            Ok(())
        })
        .map(drop)
    });
    captured.unwrap();
    other.fill(&mut filled, 4).unwrap();
    assert_eq!(filled.to_vec(&stream).await.unwrap(), [4; 64]);
});

fn first_node(graph: &Graph) -> Node {
    super::first(graph)
}

fn buffer_of_zeros(device: &Device) -> Buffer<u32> {
    Buffer::<u32>::new(device, 64).unwrap()
}

/// Enqueues a copy of a buffer now, and returns a future for the result.
fn pinned_copy<'a>(
    from: &'a Buffer<u32>,
    stream: &'a Stream,
) -> Result<impl Future<Output = Result<Vec<u32>>> + use<'a>> {
    let mut copy = Box::pin(from.to_vec(stream));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let begun = copy.as_mut().poll(&mut context);
    Ok(async move {
        match begun {
            std::task::Poll::Ready(done) => done,
            std::task::Poll::Pending => copy.await,
        }
    })
}

/// A slice request does not finish unrelated execs: the values of another user's callback are not dropped on the
/// requesting thread, which may hold any lock.
#[test]
fn a_slice_request_drops_no_other_graphs_callback() {
    /// Sends the id of the thread that drops it.
    struct Says(std::sync::mpsc::Sender<std::thread::ThreadId>);
    impl Drop for Says {
        fn drop(&mut self) {
            let _ = self.0.send(std::thread::current().id());
        }
    }
    let [one, other] = [(); 2].map(|()| common::emulated());
    let (theirs, stream) = (Stream::new(&one).unwrap(), Stream::new(&other).unwrap());
    let (said, says) = std::sync::mpsc::channel();
    let holds = std::sync::Mutex::new(Says(said));
    let (graph, ()) = Graph::capture(&one, |capture| {
        capture.stream().host_callback(move || {
            let _ = &holds;
        })
    })
    .unwrap();
    let (go, held) = std::sync::mpsc::channel::<()>();
    theirs.host_function(move || _ = held.recv()).unwrap();
    let exec = graph.instantiate().unwrap();
    exec.launch(&theirs).unwrap();
    drop((exec, graph));
    let x = Buffer::from_slice(&stream, &[1_u32; 64]).unwrap();
    let mut mine = Buffer::<u32>::pinned(&other, 64).unwrap();
    let (_kept, ()) = Graph::capture(&other, |capture| {
        capture.output(&mut mine)?;
        capture.stream().copy(&x, &mut mine)
    })
    .unwrap();
    drop(go);
    theirs.synchronize_blocking().unwrap();
    assert!(mine.as_slice().is_err(), "a graph may write the memory");
    assert_ne!(says.recv().unwrap(), std::thread::current().id());
}
