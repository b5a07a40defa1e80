//! Launches: the work that they are ordered after, and what is dropped while they are in flight.

use super::*;

// Two execs of one graph that write nothing run concurrently, as `instantiate` documents.
alone!(execs_of_one_graph_that_write_nothing_run_concurrently, async |device: Device, _| {
    let [one, two] = streams(&device);
    // Not a host function: a GPU's driver may call one at a time, and the one that holds the stream is running.
    let mut builder = Graph::builder(&device).unwrap();
    builder.join(&[]).unwrap();
    let graph = builder.build().unwrap();
    let execs = [graph.instantiate().unwrap(), graph.instantiate().unwrap()];
    let held = hold(&one);
    let first = execs[0].launch(&one).unwrap();
    let second = execs[1].launch(&two).unwrap();
    let beside = tokio::time::timeout(Duration::from_secs(2), second.completed()).await;
    drop(held);
    first.completed().await.unwrap();
    assert!(beside.is_ok(), "the second one waits for the first");
});

// A builder's stream that is used while a conditional's body is being made would not be ordered with the body.
alone!(a_builders_stream_within_a_body_is_refused, async |device: Device, stream: Stream| {
    let (flag, mut data, mut other) = (buffer(&stream, 1).await, buffer(&stream, 0).await, buffer(&stream, 0).await);
    let mut graph = Graph::builder(&device).unwrap();
    let mut kept = None;
    graph
        .add(&[], |stream| {
            kept = Some(stream.clone());
            stream.fill(&mut other, 0)
        })
        .unwrap();
    let kept = kept.unwrap();
    let built = graph.run_if(&[], &flag, |body| {
        body.add(&[], |stream| stream.fill(&mut data, 1))?;
        kept.fill(&mut data, 2)
    });
    refused(built, &["use the stream that is passed to the closure of the next node"]);
});

// When the device is lost, a graph's callbacks are dropped nevertheless.
alone!(callbacks_of_an_exec_in_flight_are_dropped_on_a_lost_device, async |_, _| {
    let device = traps_at_increment();
    let stream = Stream::new(&device).unwrap();
    let mut data = buffer(&stream, 0).await;
    let owned = Arc::new(());
    let captured = owned.clone();
    let (graph, ()) = Graph::capture(&device, |capture| {
        increment::launch(capture.stream(), &mut data)?;
        capture.stream().host_callback(move || _ = &captured)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    assert!(exec.launch(&stream).unwrap().completed().await.is_err());
    drop((exec, graph, data));
    until("the callback is dropped", || Arc::strong_count(&owned) == 1).await;
});

// Within a capture, an outside stream must use captured memory neither in a kernel nor in a graph launch.
alone!(a_launch_outside_of_a_capture_of_the_same_memory_is_an_error, async |device: Device, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let (graph, ()) = Graph::capture(&device, |capture| increment::launch(capture.stream(), &mut data)).unwrap();
    let exec = graph.instantiate().unwrap();
    let launched = Graph::capture(&device, |capture| {
        increment::launch(capture.stream(), &mut data)?;
        assert!(increment::launch(&stream, &mut data).is_err(), "the stream takes no part in the capture");
        Ok(exec.launch(&stream).map(drop))
    })
    .unwrap()
    .1;
    assert!(launched.is_err(), "the launch would run now, and not as part of the graph");
});

// A graph's events are dropped with it while a launch that records and waits for them is in flight.
alone!(holds_events_that_are_dropped_before_a_launch_is_done, async |device: Device, _| {
    let [one, two] = streams(&device);
    let (begun, go) = (GraphEvent::new(&device).unwrap(), GraphEvent::new(&device).unwrap());
    let (graph, ()) = Graph::capture(&device, |capture| {
        begun.record(capture.stream())?;
        go.wait(capture.stream())?;
        begun.record(capture.stream())
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    let held = hold(&two);
    go.record(&two).unwrap();
    let launched = exec.launch(&one).unwrap();
    drop((begun, go, exec, graph));
    drop(held);
    launched.completed().await.unwrap();
});

// Several threads launch execs, another uses the buffers, and all of it is dropped by a third.
alone!(holds_threads_that_launch_use_and_drop, async |device: Device, stream: Stream| {
    for _ in 0..30 {
        let (mut sum, constant) = (buffer(&stream, 0).await, buffer(&stream, 1).await);
        let (graph, ()) = Graph::capture(&device, |capture| {
            let mut x = capture.stream().alloc::<u32>(64)?;
            capture.stream().copy(&constant, &mut x)?;
            add_to::launch(capture.stream(), &mut sum, &x)
        })
        .unwrap();
        let exec = Arc::new(graph.instantiate().unwrap());
        let launching: Vec<_> = (0..3)
            .map(|_| {
                let (device, exec) = (device.clone(), exec.clone());
                std::thread::spawn(move || {
                    let stream = Stream::new(&device).unwrap();
                    (0..20).for_each(|_| drop(exec.launch(&stream).unwrap()));
                })
            })
            .collect();
        drop((exec, graph, constant));
        let own = Stream::new(&device).unwrap();
        let mut seen = Buffer::<u32>::new(&device, 64).unwrap();
        for _ in 0..20 {
            own.copy(&sum, &mut seen).unwrap();
        }
        launching.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(sum.to_vec(&stream).await.unwrap(), [60; 64]);
        drop((sum, seen));
    }
    freed(&device).await;
});

// A fault that a query of a graph event reports must mark the device as lost, not only fail the query.
alone!(a_fault_that_a_graph_event_reports_loses_the_device, async |_, _| {
    let device = traps_at_increment();
    let stream = Stream::new(&device).unwrap();
    let mut data = buffer(&stream, 0).await;
    let event = GraphEvent::new(&device).unwrap();
    let held = hold(&stream);
    increment::launch(&stream, &mut data).unwrap();
    event.record(&stream).unwrap();
    drop(held);
    let error = loop {
        match event.query() {
            Ok(_) => tokio::task::yield_now().await,
            Err(error) => break error,
        }
    };
    assert!(error.is_device_lost(), "{error}");
    assert!(device.lost().is_some(), "the query has reported the loss: {error}");
});

// The handles of a capture's own events differ from those of the device's events: a record of a graph event is a node.
alone!(holds_graph_events_are_no_events_of_the_capture, async |device: Device, _| {
    let events: Vec<_> = (0..200).map(|_| GraphEvent::new(&device).unwrap()).collect();
    let (graph, ()) = Graph::capture(&device, |capture| {
        let _others: Vec<_> = (0..20).map(|n| capture.fork(&format!("{n}"))).collect::<Result<_>>()?;
        events.iter().try_for_each(|event| event.record(capture.stream()))
    })
    .unwrap();
    assert_eq!(graph.nodes().len(), 200);
});

// Threads capture, launch, set, update, use and drop at random, with one operation at a time on each exec.
alone!(holds_threads_at_random, async |device: Device, _| {
    let shared = Arc::new(buffer(&Stream::new(&device).unwrap(), 1).await);
    let threads: Vec<_> = (0..4_u64)
        .map(|seed| {
            let (device, shared) = (device.clone(), shared.clone());
            std::thread::spawn(move || {
                let mut state = seed * 77 + 1;
                let mut dice = move |sides: u64| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 33) % sides
                };
                let streams = [Stream::new(&device).unwrap(), Stream::new(&device).unwrap()];
                let mut data = Buffer::<u32>::new(&device, 64).unwrap();
                streams[0].fill(&mut data, 0).unwrap();
                let capture = |data: &mut Buffer<u32>| {
                    Graph::capture(&device, |capture| {
                        let mut x = capture.stream().alloc::<u32>(64)?;
                        capture.stream().copy(&*shared, &mut x)?;
                        add_to::launch(capture.stream(), data, &x)
                    })
                    .unwrap()
                    .0
                };
                let mut execs: Vec<wakeline::graph::Exec> = Vec::new();
                for _ in 0..300 {
                    let stream = &streams[dice(2) as usize];
                    match dice(8) {
                        0 => execs.push(capture(&mut data).instantiate().unwrap()),
                        1 if !execs.is_empty() => drop(execs.swap_remove(dice(execs.len() as u64) as usize)),
                        2 if !execs.is_empty() => execs[0].update(&capture(&mut data)).unwrap(),
                        3 => {
                            let mut other = Buffer::<u32>::new(&device, 64).unwrap();
                            stream.copy(&data, &mut other).unwrap();
                            std::mem::swap(&mut other, &mut data);
                        }
                        4 => increment::launch(stream, &mut data).unwrap(),
                        _ if !execs.is_empty() => {
                            drop(execs[dice(execs.len() as u64) as usize].launch(stream).unwrap())
                        }
                        _ => {}
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    drop(shared);
    freed(&device).await;
});

// A graph that allocates memory has one exec at a time. An exec that is dropped in flight does not block the next one
// once its launches are done, even if the completion monitor has not noticed that yet.
alone!(an_exec_that_was_dropped_in_flight_does_not_block_the_next, async |device: Device, stream: Stream| {
    let mut builder = Graph::builder(&device).unwrap();
    let (_, mut x) = builder.alloc::<u32>(&[], 64).unwrap();
    builder.add(&[], |stream| stream.fill(&mut x, 1)).unwrap();
    let graph = builder.build().unwrap();
    let exec = graph.instantiate().unwrap();
    let held = hold(&stream);
    let launched = exec.launch(&stream).unwrap();
    drop((exec, held));
    launched.completed().await.unwrap();
    // The first exec is dropped, and its launches are done.
    let next = graph.instantiate().map(drop);
    assert!(next.is_ok(), "{next:?}");
});
