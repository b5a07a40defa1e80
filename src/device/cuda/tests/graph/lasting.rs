//! The resources that graphs hold, and their release.

use super::*;

#[test]
#[ignore = "needs a GPU"]
fn copies_and_fills_of_more_than_four_gigabytes() {
    let bench = Bench::get();
    const LARGE: usize = (5 << 30) + 4;
    if bench.backend().memory().unwrap().free < 3 * LARGE as u64 {
        return;
    }
    let graph = bench.graph();
    let [from, to] = [(); 2].map(|()| bench.backend().alloc(LARGE as u64).unwrap());
    let filled = bench.add(graph, &[], &fill(from, 0x0102_0304, LARGE));
    let cleared = bench.add(graph, &[], &fill(to, 0, LARGE));
    bench.add(graph, &[filled, cleared], &copy(Endpoint::Device(to), Endpoint::Device(from), LARGE));
    let exec = bench.exec(graph);
    bench.launch(exec);
    for at in [0, (1 << 31) - 4, 1 << 31, (1 << 32) - 4, 1 << 32, LARGE as u64 - 4] {
        assert_eq!(bench.number(Address(to.0 + at)), 0x0102_0304, "at {at}");
    }
    bench.end(&[exec], &[graph]);
    // SAFETY: no longer in use.
    [from, to].into_iter().for_each(|large| unsafe { bench.backend().free(large) }.unwrap());
}

#[test]
#[ignore = "needs a GPU"]
fn host_functions_live_as_long_as_graphs_and_execs_that_may_call_them() {
    let bench = Bench::get();
    let ((outside, outer), (inside, inner)) = (counter(), counter());
    let (graph, child) = (bench.graph(), bench.graph());
    bench.add(child, &[], &NodeWork::Host(inner));
    let first = bench.add(graph, &[], &NodeWork::Child(child));
    bench.add(graph, &[first], &NodeWork::Host(outer));
    bench.backend().graph_destroy(child);
    let execs = [bench.exec(graph), bench.exec(graph)];
    bench.backend().graph_destroy(graph);
    for round in 1..=3 {
        execs.iter().for_each(|&exec| bench.launch(exec));
        assert_eq!((count(&outside), count(&inside)), (2 * round, 2 * round));
    }
    let holders = || (Arc::strong_count(&outside), Arc::strong_count(&inside));
    bench.end(&execs[..1], &[]);
    assert_eq!(holders(), (2, 2));
    bench.launch(execs[1]);
    bench.end(&execs[1..], &[]);
    assert_eq!(holders(), (1, 1));
}

#[test]
#[ignore = "needs a GPU"]
fn a_host_function_that_was_replaced_is_released() {
    let bench = Bench::get();
    let (called, function) = counter();
    let graph = bench.graph();
    let node = bench.add(graph, &[], &NodeWork::Host(function));
    let exec = bench.exec(graph);
    let ((first, one), (second, two)) = (counter(), counter());
    bench.set(exec, node, &NodeWork::Host(Arc::clone(&one))).unwrap();
    bench.launch(exec);
    bench.set(exec, node, &NodeWork::Host(Arc::clone(&two))).unwrap();
    bench.launch(exec);
    // The caller that set it reports that no launch calls it any more.
    bench.backend().release_callback(&one);
    drop((one, two));
    assert_eq!([&called, &first, &second].map(|counter| count(counter)), [0, 1, 1]);
    assert_eq!([&called, &first, &second].map(Arc::strong_count), [2, 1, 2]);
    bench.launch(exec);
    assert_eq!((count(&first), count(&second)), (1, 2));
    bench.end(&[exec], &[graph]);
    assert_eq!([&called, &second].map(Arc::strong_count), [1, 1]);
}

#[test]
#[ignore = "needs a GPU"]
fn memory_of_a_graph_is_freed_with_it() {
    let bench = Bench::get();
    let ([_, b], device) = (bench.device, bench.backend());
    let before = device.memory().unwrap().free;
    const LARGE: u64 = 64 << 20;
    let graph = bench.graph();
    let (made, memory) = device.graph_add_alloc(graph, &[], LARGE).unwrap();
    let filled = bench.add(graph, &[made], &fill(memory, 0x0102_0304, LARGE as usize));
    // Captured as a child, since nodes of this graph could not be removed.
    // SAFETY: memory of the graph, within its lifetime.
    let (recorded, _) = bench
        .external(graph, &[filled], |driver, stream| unsafe { (driver.memset_d8_async)(memory.0, 0x55, 4, stream) });
    let recorded = recorded.unwrap();
    assert_eq!((recorded.nodes, recorded.ends.len()), (1, 1));
    // SAFETY: as above.
    let (failed, _) = bench.external(graph, &[filled], |driver, stream| unsafe {
        (driver.memset_d8_async)(memory.0, 0x66, 4, stream);
        (driver.stream_synchronize)(stream)
    });
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Usage);
    let copied = bench.add(graph, &recorded.ends, &copy(Endpoint::Device(b), Endpoint::Device(memory), 8));
    bench.add(graph, &[copied], &NodeWork::Free(memory));
    let error = device.graph_remove(graph, copied).unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("allocates or frees memory"), "{error}");
    let exec = bench.exec(graph);
    assert_reports(&device.graph_instantiate(graph).unwrap_err(), &["one exec at a time"]);
    for _ in 0..3 {
        bench.put(b, &[0; 8]);
        bench.launch(exec);
        assert_eq!(bench.read(b, 8), [0x55, 0x55, 0x55, 0x55, 4, 3, 2, 1]);
    }
    bench.end(&[exec], &[graph]);

    // Memory that no node frees is freed before the next launch.
    let graph = bench.graph();
    let (made, memory) = device.graph_add_alloc(graph, &[], LARGE).unwrap();
    bench.add(graph, &[made], &fill(memory, 9, 8));
    let exec = bench.exec(graph);
    (0..3).for_each(|_| bench.launch(exec));
    bench.end(&[exec], &[graph]);
    device.memory.trim(&device.cx).unwrap();
    let after = device.memory().unwrap().free;
    assert!(after + LARGE / 2 > before, "{before} bytes were free, and now {after}");
}

#[test]
#[ignore = "needs a GPU"]
fn many_graphs_leave_nothing_behind() {
    let bench = Bench::get();
    let [a, b] = bench.device;
    let (called, function) = counter();
    let (two, device) = (2.0_f32, bench.backend());
    let args = [floats_at(a), scalar(&two)];
    let round = || {
        let graph = bench.graph();
        let scaled = bench.add(graph, &[], &scale(&args));
        let copied = bench.add(graph, &[scaled], &copy(Endpoint::Device(b), Endpoint::Device(a), 16));
        bench.add(graph, &[copied], &NodeWork::Host(Arc::clone(&function)));
        // SAFETY: 16 bytes of device memory, in the stream that was passed.
        let (recorded, _) = bench
            .external(graph, &[scaled], |driver, stream| unsafe { (driver.memset_d8_async)(b.0 + 16, 1, 16, stream) });
        recorded.unwrap();
        let exec = bench.exec(graph);
        bench.launch(exec);
        bench.end(&[exec], &[graph]);
    };
    (0..100).for_each(|_| round());
    let before = device.memory().unwrap().free;
    (0..10_000).for_each(|_| round());
    let after = device.memory().unwrap().free;
    assert_eq!(count(&called), 10_100);
    drop(function);
    assert_eq!(Arc::strong_count(&called), 1);
    assert!(after + (8 << 20) > before, "{before} bytes were free, and now {after}");
}

#[test]
#[ignore = "needs a GPU"]
fn threads_use_separate_graphs_concurrently() {
    let bench = Bench::get();
    let device: &CudaBackend = bench.backend();
    thread::scope(|scope| {
        for thread in 0..4_u32 {
            scope.spawn(move || {
                let stream = device.stream_create(&spec()).unwrap();
                let (memory, host) = (device.alloc(64).unwrap(), device.alloc_host(64).unwrap());
                for round in 0..200 {
                    let (graph, expected) = (device.graph_create().unwrap(), thread << 16 | round);
                    let mut code = Code::SUCCESS;
                    let mut enqueue = |stream: *mut std::ffi::c_void| {
                        // SAFETY: 64 bytes of this thread, in the stream that was passed.
                        code = unsafe { (device.cx.driver.memset_d32_async)(memory.0, expected, 16, stream.cast()) };
                    };
                    let external = ExternalWork { name: "theirs", args: &[], call: &mut enqueue, emulated: None };
                    // SAFETY: the memory belongs to this thread, and is freed when the last launch is done.
                    unsafe {
                        let recorded = device.graph_external(graph, &[], external).unwrap();
                        let out = copy(Endpoint::Host(host.as_ptr()), Endpoint::Device(memory), 64);
                        device.graph_add(graph, &recorded.ends, &out).unwrap();
                        let exec = device.graph_instantiate(graph).unwrap();
                        device.exec_launch(exec, stream).unwrap();
                        // Allowed while another thread captures: captures are thread-local.
                        device.stream_synchronize(stream).unwrap();
                        device.exec_destroy(exec);
                        let read = slice::from_raw_parts(host.as_ptr(), 64);
                        assert_eq!(read, [expected.to_ne_bytes(); 16].concat());
                    }
                    assert!(code.is_success());
                    device.graph_destroy(graph);
                }
                // SAFETY: no longer in use.
                unsafe {
                    device.free(memory).unwrap();
                    device.free_host(host, 64).unwrap();
                }
                device.stream_destroy(stream);
            });
        }
    });
}
