//! Captures of other libraries' work.

use super::*;

#[test]
#[ignore = "needs a GPU"]
fn work_of_other_libraries_is_captured() {
    let bench = Bench::get();
    let ([a, b], [_, host]) = (bench.device, bench.host);
    let graph = bench.graph();
    let first = bench.add(graph, &[], &fill(a, 0x1111_1111, 16));
    // SAFETY: 16 bytes of device memory, in the stream that was passed; this applies to the calls below as well.
    let (recorded, code) =
        bench.external(graph, &[first], |driver, stream| unsafe { (driver.memset_d8_async)(a.0, 0x22, 8, stream) });
    let set = recorded.unwrap();
    assert_eq!((code, set.nodes, set.ends.len(), set.host_copies.len()), (Code::SUCCESS, 1, 1, 0));
    assert_ne!(set.ends[0], first);
    let copied = bench.add(graph, &set.ends, &copy(Endpoint::Device(b), Endpoint::Device(a), 16));

    // A library that enqueues nothing.
    let mut both = [first, copied];
    both.sort();
    for after in [&[][..], &[copied], &both] {
        let (nothing, _) = bench.external(graph, after, |_, _| Code::SUCCESS);
        let mut nothing = nothing.unwrap();
        nothing.ends.sort();
        assert_eq!((nothing.nodes, nothing.ends.as_slice()), (0, after));
    }

    // SAFETY: as above, and 16 bytes of host memory.
    let (recorded, _) = bench.external(graph, &[copied], |driver, stream| unsafe {
        let code = (driver.memcpy_dtoh_async)(host.as_ptr().cast(), b.0, 16, stream);
        assert!(code.is_success());
        (driver.memcpy_htod_async)(b.0, host.as_ptr().cast_const().cast(), 8, stream)
    });
    let mut copies = recorded.unwrap();
    copies.host_copies.sort();
    assert_eq!((copies.nodes, copies.ends.len()), (2, 1));
    assert_eq!(copies.host_copies.as_slice(), [("device to host", 16), ("host to device", 8)]);
    // The same with a call by which the driver determines where the ends are.
    // SAFETY: as above.
    let (recorded, _) = bench.external(graph, &copies.ends, |driver, stream| unsafe {
        (driver.memcpy_async)(host.as_ptr().expose_provenance() as u64, b.0, 16, stream)
    });
    assert_eq!(recorded.unwrap().host_copies.as_slice(), [("device to host", 16)]);

    let exec = bench.exec(graph);
    bench.launch(exec);
    let expected = [[0x22; 8], [0x11; 8]].concat();
    assert_eq!(bench.read(b, 16), expected);
    // SAFETY: nothing writes it now.
    assert_eq!(unsafe { slice::from_raw_parts(host.as_ptr(), 16) }, expected);
    bench.end(&[exec], &[graph]);
}

#[test]
#[ignore = "needs a GPU"]
fn work_that_cannot_be_captured_leaves_the_graph_unchanged_or_spoiled() {
    let bench = Bench::get();
    let [a, b] = bench.device;
    for round in 0..3 {
        let graph = bench.graph();
        let first = bench.add(graph, &[], &fill(a, 0x1111_1111, 16));
        // SAFETY: 16 bytes of device memory, in the stream that was passed; the calls after that access no memory.
        let (recorded, code) = bench.external(graph, &[first], |driver, stream| unsafe {
            assert!((driver.memset_d8_async)(a.0, 0x22, 16, stream).is_success());
            match round {
                0 => (driver.stream_synchronize)(stream),
                1 => (driver.stream_query)(stream),
                _ => {
                    let mut address = 0;
                    (driver.mem_alloc)(&mut address, 256)
                }
            }
        });
        assert!(!code.is_success(), "round {round}");
        let error = recorded.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "round {round}: {error}");
        assert_reports(&error, &["`theirs`", "cannot be captured"]);
        match bench.backend().graph_instantiate(graph) {
            Ok(exec) => {
                bench.launch(exec);
                assert_eq!(bench.read(a, 16), [0x11; 16]);
                bench.end(&[exec], &[graph]);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
                assert_reports(&error, &["cannot be used any more"]);
                bench.end(&[], &[graph]);
            }
        }
    }
    // Other graphs are not affected.
    let graph = bench.graph();
    let first = bench.add(graph, &[], &fill(a, 0x1111_1111, 16));
    bench.add(graph, &[first], &copy(Endpoint::Device(b), Endpoint::Device(a), 16));
    // SAFETY: as above.
    let (recorded, _) = bench
        .external(graph, &[first], |driver, stream| unsafe { (driver.memset_d8_async)(b.0 + 16, 0x33, 16, stream) });
    assert_eq!(recorded.unwrap().nodes, 1);
    let exec = bench.exec(graph);
    bench.launch(exec);
    assert_eq!(bench.read(b, 32), [[0x11; 16], [0x33; 16]].concat());
    bench.end(&[exec], &[graph]);
}

#[test]
#[ignore = "needs a GPU"]
fn forked_work_that_is_not_joined_is_refused() {
    let bench = Bench::get();
    let [a, _] = bench.device;
    let (device, graph) = (bench.backend(), bench.graph());
    let (other, forked) = (device.stream_create(&spec()).unwrap(), device.event_create(false).unwrap());
    // SAFETY: both streams and the event are live; 16 bytes of device memory.
    let (recorded, _) = bench.external(graph, &[], |driver, stream| unsafe {
        assert!((driver.event_record)(super::event(forked), stream).is_success());
        assert!((driver.stream_wait_event)(super::stream(other), super::event(forked), 0).is_success());
        (driver.memset_d8_async)(a.0, 0x22, 16, super::stream(other))
    });
    let error = recorded.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_reports(&error, &["`theirs`", "not joined"]);
    // Nothing of it remains, not on the other stream either.
    device.stream_synchronize(other).unwrap();
    match bench.backend().graph_instantiate(graph) {
        Ok(exec) => {
            bench.launch(exec);
            assert_eq!(bench.read(a, 16), [0; 16]);
            bench.end(&[exec], &[graph]);
        }
        Err(error) => {
            assert_reports(&error, &["cannot be used any more"]);
            bench.end(&[], &[graph]);
        }
    }
    device.stream_destroy(other);
    device.event_destroy(forked);
}
