//! Graphs, on a GPU.
//!
//! Memory comes from the device at the beginning of a test and goes back at its end, both checked; what a graph has done is
//! read back from it.

use std::sync::atomic::AtomicUsize;

use super::*;
use crate::device::backend::HostCallback;

/// What tests of graphs need beside a GPU: some memory of the device and of the host.
struct Bench {
    gpu: Gpu,
    /// 256 bytes each.
    device: [Address; 2],
    host: [NonNull<u8>; 2],
}

const BYTES: usize = 256;

impl Bench {
    fn get() -> Option<Self> {
        let gpu = Gpu::get()?;
        let device = [(); 2].map(|()| gpu.device.alloc(BYTES as u64).unwrap());
        let host = [(); 2].map(|()| gpu.device.alloc_host(BYTES).unwrap());
        let bench = Self { gpu, device, host };
        device.iter().for_each(|&at| bench.put(at, &[0; BYTES]));
        Some(bench)
    }

    fn backend(&self) -> &CudaBackend {
        &self.gpu.device
    }

    fn put(&self, to: Address, bytes: &[u8]) {
        self.gpu.upload(self.host[0], to, bytes);
    }

    fn put_number(&self, to: Address, number: u32) {
        self.put(to, &number.to_ne_bytes());
    }

    fn read(&self, from: Address, bytes: usize) -> Vec<u8> {
        self.gpu.download(self.host[0], from, bytes)
    }

    fn number(&self, from: Address) -> u32 {
        u32::from_ne_bytes(self.read(from, 4).try_into().unwrap())
    }

    /// The floats that the device has there.
    fn floats<const N: usize>(&self, from: Address) -> [f32; N] {
        floats(&self.read(from, 4 * N)).try_into().unwrap()
    }

    fn graph(&self) -> RawGraph {
        self.backend().graph_create().unwrap()
    }

    fn add(&self, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> RawNode {
        // SAFETY: what the tests' nodes use is `self`'s or is freed after their execs; the arguments are the kernels'.
        unsafe { self.backend().graph_add(graph, after, work) }.unwrap()
    }

    fn exec(&self, graph: RawGraph) -> RawExec {
        self.backend().graph_instantiate(graph).unwrap()
    }

    /// Launches and waits.
    fn launch(&self, exec: RawExec) {
        // SAFETY: as in `add`.
        unsafe { self.backend().exec_launch(exec, self.gpu.stream) }.unwrap();
        self.backend().stream_synchronize(self.gpu.stream).unwrap();
    }

    fn update(&self, exec: RawExec, graph: RawGraph) -> Result<(), Refused> {
        // SAFETY: as in `add`.
        unsafe { self.backend().exec_update(exec, graph) }.unwrap()
    }

    fn set(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<(), Refused> {
        // SAFETY: as in `add`.
        unsafe { self.backend().exec_set(exec, node, work) }.unwrap()
    }

    fn end(&self, execs: &[RawExec], graphs: &[RawGraph]) {
        graphs.iter().for_each(|&graph| self.backend().graph_destroy(graph));
        // SAFETY: every launch was waited for.
        execs.iter().for_each(|&exec| unsafe { self.backend().exec_destroy(exec) });
    }

    /// What other libraries would do.
    fn external(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        mut call: impl FnMut(&Driver, CUstream) -> Code,
    ) -> (Result<Recorded>, Code) {
        let mut code = Code::SUCCESS;
        let driver = self.backend().cx.driver;
        let mut enqueue = |stream: *mut std::ffi::c_void| code = call(driver, stream.cast());
        let external = External { name: "theirs", args: &[], call: &mut enqueue, emulated: None };
        // SAFETY: as in `add`; it is enqueued into this stream alone.
        let recorded = unsafe { self.backend().graph_external(graph, after, external) };
        (recorded, code)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        self.backend().stream_synchronize(self.gpu.stream).unwrap();
        for (address, host) in self.device.into_iter().zip(self.host) {
            // SAFETY: the stream was synchronised.
            unsafe {
                self.backend().free(address).unwrap();
                self.backend().free_host(host, BYTES).unwrap();
            }
        }
        let graphs = format!("{:?}", self.backend().graphs);
        assert!(graphs.contains("graphs: {}, execs: {}"), "left behind: {graphs}");
    }
}

fn floats_at(address: Address) -> Arg<'static> {
    Arg::Slice { address, len: 4, bytes: 16, write: true }
}

/// `x[..4] *= a`.
fn scale<'a>(args: &'a [Arg<'a>]) -> NodeWork<'a> {
    NodeWork::Kernel(Launch { kernel: &SCALE_PTX, grid: [1; 3], block: [4, 1, 1], shared_bytes: 0, args })
}

fn copy(to: Place, from: Place, bytes: usize) -> NodeWork<'static> {
    NodeWork::Copy { to, from, bytes: bytes as u64 }
}

fn fill(to: Address, bits: u32, bytes: usize) -> NodeWork<'static> {
    NodeWork::Fill { to, pattern: Pattern { width: 4, bits }, bytes: bytes as u64 }
}

fn counter() -> (Arc<AtomicUsize>, HostCallback) {
    let count = Arc::new(AtomicUsize::new(0));
    let inside = Arc::clone(&count);
    let function = move || {
        inside.fetch_add(1, Ordering::SeqCst);
    };
    (count, Arc::new(function))
}

fn count(counter: &AtomicUsize) -> usize {
    counter.load(Ordering::SeqCst)
}

fn assert_tells(error: &Error, words: &[&str]) {
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "not all of {words:?} in {text}");
}

#[test]
fn nodes_of_all_kinds_run_in_their_order() {
    let Some(bench) = Bench::get() else { return };
    let ([a, b], [_, host]) = (bench.device, bench.host);
    let (graph, child) = (bench.graph(), bench.graph());
    let (two, three) = (2.0_f32, 3.0_f32);
    let at_b = [floats_at(b), scalar(&three)];
    bench.add(child, &[], &scale(&at_b));
    let event = bench.backend().event_create(false).unwrap();
    bench.backend().event_record(event, bench.gpu.stream).unwrap();
    let (called, function) = counter();

    let wait = bench.add(graph, &[], &NodeWork::Wait(event));
    let at_a = [floats_at(a), scalar(&two)];
    let doubled = bench.add(graph, &[wait], &scale(&at_a));
    let copied = bench.add(graph, &[doubled], &copy(Place::Device(b), Place::Device(a), 16));
    let tripled = bench.add(graph, &[copied], &NodeWork::Child(child));
    let filled = bench.add(graph, &[copied], &fill(Address(b.0 + 16), 7, 16));
    let joined = bench.add(graph, &[tripled, filled], &NodeWork::Empty);
    let out = bench.add(graph, &[joined], &copy(Place::Host(host.as_ptr()), Place::Device(b), 32));
    let nothing = bench.add(graph, &[out], &copy(Place::Device(a), Place::Device(b), 0));
    let recorded = bench.add(graph, &[nothing], &NodeWork::Record(event));
    bench.add(graph, &[recorded], &NodeWork::Host(function));

    let exec = bench.exec(graph);
    // The child is a copy, and the exec is too.
    bench.backend().graph_destroy(child);
    bench.put(a, bytemuck::cast_slice(&[1.0_f32, 2.0, 3.0, 4.0]));
    bench.backend().exec_upload(exec, bench.gpu.stream).unwrap();
    for (round, factor) in [(1, 6.0_f32), (2, 12.0)] {
        bench.launch(exec);
        assert_eq!(count(&called), round);
        // SAFETY: 256 bytes, which nothing writes now.
        let read = unsafe { slice::from_raw_parts(host.as_ptr(), 32) };
        assert_eq!(floats(&read[..16]), [1.0, 2.0, 3.0, 4.0].map(|x: f32| x * factor));
        assert_eq!(read[16..], [7_u32.to_ne_bytes(); 4].concat());
        assert!(bench.backend().event_query(event).unwrap());
    }
    bench.end(&[exec], &[graph]);
    assert_eq!(Arc::strong_count(&called), 1, "the host function is dropped");
    bench.backend().event_destroy(event);
}

#[test]
fn fills_of_all_widths_and_copies_from_the_host() {
    let Some(bench) = Bench::get() else { return };
    let ([a, b], [_, host]) = (bench.device, bench.host);
    let graph = bench.graph();
    // SAFETY: 256 bytes, which nothing uses yet.
    unsafe { host.as_ptr().write_bytes(0x5a, 8) };
    let width = |width, bits, at| NodeWork::Fill { to: Address(a.0 + at), pattern: Pattern { width, bits }, bytes: 8 };
    let one = bench.add(graph, &[], &width(1, 0x9911, 0));
    let two = bench.add(graph, &[], &width(2, 0x9922_1133, 8));
    let four = bench.add(graph, &[], &width(4, 0x4433_2211, 16));
    let put = bench.add(graph, &[], &copy(Place::Device(Address(a.0 + 24)), Place::Host(host.as_ptr()), 8));
    bench.add(graph, &[one, two, four, put], &copy(Place::Device(b), Place::Device(a), 32));
    // SAFETY: it is refused.
    let odd = unsafe { bench.backend().graph_add(graph, &[], &fill(Address(a.0 + 2), 0, 8)) };
    assert_eq!(odd.unwrap_err().kind(), ErrorKind::Usage);
    let exec = bench.exec(graph);
    bench.launch(exec);
    let expected = [
        [0x11; 8],
        [0x33, 0x11].repeat(4).try_into().unwrap(),
        [0x11, 0x22, 0x33, 0x44].repeat(2).try_into().unwrap(),
        [0x5a; 8],
    ];
    assert_eq!(bench.read(b, 32), expected.concat());
    bench.end(&[exec], &[graph]);
}

#[test]
fn copies_and_fills_of_more_than_four_gigabytes() {
    let Some(bench) = Bench::get() else { return };
    const LARGE: usize = (5 << 30) + 4;
    if bench.backend().memory().unwrap().free < 3 * LARGE as u64 {
        return;
    }
    let graph = bench.graph();
    let [from, to] = [(); 2].map(|()| bench.backend().alloc(LARGE as u64).unwrap());
    let filled = bench.add(graph, &[], &fill(from, 0x0102_0304, LARGE));
    let cleared = bench.add(graph, &[], &fill(to, 0, LARGE));
    bench.add(graph, &[filled, cleared], &copy(Place::Device(to), Place::Device(from), LARGE));
    let exec = bench.exec(graph);
    bench.launch(exec);
    for at in [0, (1 << 31) - 4, 1 << 31, (1 << 32) - 4, 1 << 32, LARGE as u64 - 4] {
        assert_eq!(bench.number(Address(to.0 + at)), 0x0102_0304, "at {at}");
    }
    bench.end(&[exec], &[graph]);
    // SAFETY: nothing uses them any more.
    [from, to].into_iter().for_each(|large| unsafe { bench.backend().free(large) }.unwrap());
}

#[test]
fn host_functions_live_as_long_as_what_may_call_them() {
    let Some(bench) = Bench::get() else { return };
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
fn a_panic_of_a_host_function_does_not_end_the_graph() {
    let Some(bench) = Bench::get() else { return };
    let (called, function) = counter();
    let graph = bench.graph();
    let first = bench.add(graph, &[], &NodeWork::Host(Arc::new(|| panic!("from a host function of a graph"))));
    bench.add(graph, &[first], &NodeWork::Host(function));
    let exec = bench.exec(graph);
    bench.launch(exec);
    bench.launch(exec);
    assert_eq!(count(&called), 2);
    bench.end(&[exec], &[graph]);
}

#[test]
fn an_exec_is_updated_as_a_whole() {
    let Some(bench) = Bench::get() else { return };
    let [a, b] = bench.device;
    let ((old, old_function), (new, new_function)) = (counter(), counter());
    let build = |factor: &f32, function| {
        let (graph, args) = (bench.graph(), [floats_at(a), scalar(factor)]);
        let scaled = bench.add(graph, &[], &scale(&args));
        bench.add(graph, &[scaled], &NodeWork::Host(function));
        graph
    };
    let (by_two, by_five) = (build(&2.0, old_function), build(&5.0, new_function));
    let exec = bench.exec(by_two);
    bench.put(a, bytemuck::cast_slice(&[1.0_f32; 4]));
    bench.launch(exec);
    assert_eq!(bench.floats(a), [2.0; 4]);
    bench.update(exec, by_five).unwrap();
    bench.backend().graph_destroy(by_five);
    bench.launch(exec);
    assert_eq!(bench.floats(a), [10.0; 4]);
    assert_eq!((count(&old), count(&new)), (1, 1));

    // Other nodes: refused, and nothing has changed.
    let other = bench.graph();
    let first = bench.add(other, &[], &fill(a, 0, 16));
    let second = bench.add(other, &[first], &fill(b, 0, 16));
    let refused = bench.update(exec, other).unwrap_err();
    assert!(refused.why.contains("another kind"), "{refused:?}");
    assert!(refused.node.is_some_and(|node| [first, second].contains(&node)), "{refused:?}");
    bench.add(other, &[], &NodeWork::Empty);
    let refused = bench.update(exec, other).unwrap_err();
    assert!(refused.why.contains("other nodes"), "{refused:?}");
    bench.launch(exec);
    assert_eq!(bench.floats(a), [50.0; 4]);
    bench.end(&[exec], &[by_two, other]);
    assert_eq!((Arc::strong_count(&old), Arc::strong_count(&new)), (1, 1));
}

#[test]
fn one_node_of_an_exec_is_changed() {
    let Some(bench) = Bench::get() else { return };
    let [a, b] = bench.device;
    let graph = bench.graph();
    let [one, two, five] = [1.0_f32, 2.0, 5.0];
    let (at_two, at_five) = ([floats_at(a), scalar(&two)], [floats_at(a), scalar(&five)]);
    let ((old, old_function), (new, new_function)) = (counter(), counter());
    let filled = bench.add(graph, &[], &fill(a, one.to_bits(), 16));
    let scaled = bench.add(graph, &[filled], &scale(&at_two));
    let copied = bench.add(graph, &[scaled], &copy(Place::Device(b), Place::Device(a), 16));
    let called = bench.add(graph, &[copied], &NodeWork::Host(old_function));
    let child = bench.graph();
    bench.add(child, &[], &fill(Address(b.0 + 64), 1, 4));
    let nested = bench.add(graph, &[called], &NodeWork::Child(child));
    let exec = bench.exec(graph);
    // An exec is changed by the nodes of the graph, also when its owner is done with that.
    bench.backend().graph_destroy(graph);
    bench.launch(exec);
    assert_eq!(bench.floats(b), [2.0; 4]);

    bench.set(exec, scaled, &scale(&at_five)).unwrap();
    bench.set(exec, copied, &copy(Place::Device(Address(b.0 + 16)), Place::Device(a), 16)).unwrap();
    bench.set(exec, called, &NodeWork::Host(Arc::clone(&new_function))).unwrap();
    bench.set(exec, called, &NodeWork::Host(new_function)).unwrap();
    let other = bench.graph();
    bench.add(other, &[], &fill(Address(b.0 + 64), 2, 4));
    bench.set(exec, nested, &NodeWork::Child(other)).unwrap();
    bench.launch(exec);
    assert_eq!(bench.floats(b), [2.0, 2.0, 2.0, 2.0, 5.0, 5.0, 5.0, 5.0]);
    assert_eq!((count(&old), count(&new), bench.number(Address(b.0 + 64))), (1, 1, 2));
    assert_eq!((Arc::strong_count(&old), Arc::strong_count(&new)), (2, 2));

    bench.set(exec, filled, &fill(a, two.to_bits(), 16)).unwrap();
    bench.backend().exec_enable(exec, scaled, false).unwrap().unwrap();
    bench.launch(exec);
    assert_eq!(bench.floats::<8>(b)[4..], [2.0; 4]);
    bench.backend().exec_enable(exec, scaled, true).unwrap().unwrap();
    bench.launch(exec);
    assert_eq!(bench.floats::<8>(b)[4..], [10.0; 4]);

    // What is refused changes nothing.
    for refused in [
        bench.set(exec, filled, &scale(&at_two)),
        bench.set(exec, filled, &NodeWork::Empty),
        bench.set(exec, filled, &fill(a, 0, 0)),
        bench.backend().exec_enable(exec, called, false).unwrap(),
    ] {
        let refused = refused.unwrap_err();
        assert!(refused.node.is_some_and(|node| [filled, called].contains(&node)), "{refused:?}");
        assert!(!refused.why.is_empty());
    }
    bench.launch(exec);
    assert_eq!(bench.floats::<8>(b)[4..], [10.0; 4]);
    bench.end(&[exec], &[child, other]);
    assert_eq!((Arc::strong_count(&old), Arc::strong_count(&new)), (1, 1));
}

#[test]
fn events_of_nodes_are_changed() {
    let Some(bench) = Bench::get() else { return };
    let graph = bench.graph();
    let [first, second] = [(); 2].map(|()| bench.backend().event_create(true).unwrap());
    let record = bench.add(graph, &[], &NodeWork::Record(first));
    let wait = bench.add(graph, &[record], &NodeWork::Wait(first));
    let exec = bench.exec(graph);
    bench.launch(exec);
    assert!(bench.backend().event_elapsed(first, first).is_ok(), "it was recorded");
    assert!(bench.backend().event_elapsed(first, second).is_err(), "it was not");
    bench.set(exec, record, &NodeWork::Record(second)).unwrap();
    bench.set(exec, wait, &NodeWork::Wait(second)).unwrap();
    bench.launch(exec);
    assert!(bench.backend().event_elapsed(first, second).is_ok());
    bench.end(&[exec], &[graph]);
    [first, second].into_iter().for_each(|event| bench.backend().event_destroy(event));
}

#[test]
fn a_node_is_taken_out_and_the_order_stays() {
    let Some(bench) = Bench::get() else { return };
    let [a, b] = bench.device;
    let graph = bench.graph();
    let two = 2.0_f32;
    let at_a = [floats_at(a), scalar(&two)];
    let first = bench.add(graph, &[], &fill(a, 1.0_f32.to_bits(), 16));
    let scaled = bench.add(graph, &[first], &scale(&at_a));
    let gone = bench.add(graph, &[scaled], &fill(a, 0, 16));
    // After both: one of the edges that are made is there already.
    let last = bench.add(graph, &[gone, scaled], &copy(Place::Device(b), Place::Device(a), 16));
    bench.add(graph, &[gone], &NodeWork::Empty);
    bench.backend().graph_remove(graph, gone).unwrap();
    let exec = bench.exec(graph);
    for _ in 0..100 {
        bench.launch(exec);
        assert_eq!(bench.floats(b), [2.0; 4]);
    }
    // The last and the first: nothing to join.
    bench.backend().graph_remove(graph, last).unwrap();
    bench.backend().graph_remove(graph, first).unwrap();
    bench.put(a, bytemuck::cast_slice(&[3.0_f32; 4]));
    let shorter = bench.exec(graph);
    bench.launch(shorter);
    assert_eq!((bench.floats(a), bench.floats(b)), ([6.0; 4], [2.0; 4]));
    bench.end(&[exec, shorter], &[graph]);
}

#[test]
fn what_other_libraries_enqueue_is_captured() {
    let Some(bench) = Bench::get() else { return };
    let ([a, b], [_, host]) = (bench.device, bench.host);
    let graph = bench.graph();
    let first = bench.add(graph, &[], &fill(a, 0x1111_1111, 16));
    // SAFETY: 16 bytes of the device's, in the stream that was given; so for the others below.
    let (recorded, code) =
        bench.external(graph, &[first], |driver, stream| unsafe { (driver.memset_d8_async)(a.0, 0x22, 8, stream) });
    let set = recorded.unwrap();
    assert_eq!((code, set.nodes, set.ends.len(), set.host_copies.len()), (Code::SUCCESS, 1, 1, 0));
    assert_ne!(set.ends[0], first);
    let copied = bench.add(graph, &set.ends, &copy(Place::Device(b), Place::Device(a), 16));

    // Nothing at all.
    let mut both = [first, copied];
    both.sort();
    for after in [&[][..], &[copied], &both] {
        let (nothing, _) = bench.external(graph, after, |_, _| Code::SUCCESS);
        let mut nothing = nothing.unwrap();
        nothing.ends.sort();
        assert_eq!((nothing.nodes, nothing.ends.as_slice()), (0, after));
    }

    // SAFETY: as above, and 16 bytes of the host's.
    let (recorded, _) = bench.external(graph, &[copied], |driver, stream| unsafe {
        let code = (driver.memcpy_dtoh_async)(host.as_ptr().cast(), b.0, 16, stream);
        assert!(code.is_success());
        (driver.memcpy_htod_async)(b.0, host.as_ptr().cast_const().cast(), 8, stream)
    });
    let copies = recorded.unwrap();
    assert_eq!((copies.nodes, copies.ends.len()), (2, 1));
    assert_eq!(copies.host_copies.as_slice(), [("device to host", 16), ("host to device", 8)]);
    // The same, for the driver to find out where the ends are.
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
fn what_cannot_be_captured_leaves_the_graph_as_it_was() {
    let Some(bench) = Bench::get() else { return };
    let [a, b] = bench.device;
    let graph = bench.graph();
    let first = bench.add(graph, &[], &fill(a, 0x1111_1111, 16));
    for round in 0..3 {
        // SAFETY: 16 bytes of the device's, in the stream that was given, which is then waited for.
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
        assert_tells(&error, &["`theirs`", "cannot be captured"]);
    }
    bench.add(graph, &[first], &copy(Place::Device(b), Place::Device(a), 16));
    // SAFETY: as above; this time nothing is wrong.
    let (recorded, _) = bench
        .external(graph, &[first], |driver, stream| unsafe { (driver.memset_d8_async)(b.0 + 16, 0x33, 16, stream) });
    assert_eq!(recorded.unwrap().nodes, 1);
    let exec = bench.exec(graph);
    bench.launch(exec);
    assert_eq!(bench.read(b, 32), [[0x11; 16], [0x33; 16]].concat());
    bench.end(&[exec], &[graph]);
}

#[test]
fn work_that_is_forked_and_not_joined_is_told() {
    let Some(bench) = Bench::get() else { return };
    let [a, _] = bench.device;
    let (device, graph) = (bench.backend(), bench.graph());
    let (other, forked) = (device.stream_create(&spec()).unwrap(), device.event_create(false).unwrap());
    // SAFETY: both streams and the event live; 16 bytes of the device's.
    let (recorded, _) = bench.external(graph, &[], |driver, stream| unsafe {
        assert!((driver.event_record)(super::event(forked), stream).is_success());
        assert!((driver.stream_wait_event)(super::stream(other), super::event(forked), 0).is_success());
        (driver.memset_d8_async)(a.0, 0x22, 16, super::stream(other))
    });
    let error = recorded.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_tells(&error, &["`theirs`", "not joined"]);
    // Nothing of it is left, on the other stream neither.
    device.stream_synchronize(other).unwrap();
    let exec = bench.exec(graph);
    bench.launch(exec);
    assert_eq!(bench.read(a, 16), [0; 16]);
    bench.end(&[exec], &[graph]);
    device.stream_destroy(other);
    device.event_destroy(forked);
}

#[test]
fn memory_of_a_graph_comes_and_goes_with_it() {
    let Some(bench) = Bench::get() else { return };
    let ([_, b], device) = (bench.device, bench.backend());
    let before = device.memory().unwrap().free;
    const LARGE: u64 = 64 << 20;
    let graph = bench.graph();
    let (made, memory) = device.graph_add_alloc(graph, &[], LARGE).unwrap();
    let filled = bench.add(graph, &[made], &fill(memory, 0x0102_0304, LARGE as usize));
    // Through a child, since nothing could be taken out again.
    // SAFETY: memory of the graph's, in its time.
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
    let copied = bench.add(graph, &recorded.ends, &copy(Place::Device(b), Place::Device(memory), 8));
    bench.add(graph, &[copied], &NodeWork::Free(memory));
    let error = device.graph_remove(graph, copied).unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("makes memory"), "{error}");
    let exec = bench.exec(graph);
    assert!(device.graph_instantiate(graph).is_err(), "one exec at a time");
    for _ in 0..3 {
        bench.put(b, &[0; 8]);
        bench.launch(exec);
        assert_eq!(bench.read(b, 8), [0x55, 0x55, 0x55, 0x55, 4, 3, 2, 1]);
    }
    bench.end(&[exec], &[graph]);

    // Memory that no node gives back is given back before the next launch.
    let graph = bench.graph();
    let (made, memory) = device.graph_add_alloc(graph, &[], LARGE).unwrap();
    bench.add(graph, &[made], &fill(memory, 9, 8));
    let exec = bench.exec(graph);
    (0..3).for_each(|_| bench.launch(exec));
    bench.end(&[exec], &[graph]);
    let after = device.memory().unwrap().free;
    assert!(after + LARGE / 2 > before, "{before} bytes were free, and now {after}");
}

#[test]
fn conditions_are_looked_at_when_their_turn_comes() {
    let Some(bench) = Bench::get() else { return };
    let ([flag, x], device) = (bench.device, bench.backend());
    if device.cx.driver.graph_conditional_handle_create.is_none() {
        return;
    }
    let conditional = |graph, after: &[RawNode], when| {
        // SAFETY: the flag lives as long as the bench.
        unsafe { device.graph_add_conditional(graph, after, when, flag) }.unwrap()
    };
    let graph = bench.graph();
    let first = bench.add(graph, &[], &fill(x, 1, 4));
    let (node, body) = conditional(graph, &[first], Condition::If);
    bench.add(body, &[], &fill(x, 2, 4));
    bench.add(graph, &[node], &copy(Place::Device(Address(x.0 + 4)), Place::Device(x), 4));
    let exec = bench.exec(graph);
    for (set, expected) in [(0, 1), (1, 2), (0, 1), (0x8000_0000, 2)] {
        bench.put_number(flag, set);
        bench.launch(exec);
        assert_eq!(bench.number(Address(x.0 + 4)), expected, "the flag is {set}");
    }
    let error = device.graph_remove(graph, node).unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("condition"), "{error}");
    let (_, function) = counter();
    // SAFETY: it is refused, or never launched.
    let host = unsafe { device.graph_add(body, &[], &NodeWork::Host(function)) };
    let refused = host.err().or_else(|| device.graph_instantiate(graph).err());
    assert!(refused.is_some(), "no host function can be there");
    bench.end(&[exec], &[graph]);
}

#[test]
fn loops_run_until_their_flag_is_zero() {
    let Some(bench) = Bench::get() else { return };
    let ([flag, x], device) = (bench.device, bench.backend());
    if device.cx.driver.graph_conditional_handle_create.is_none() {
        return;
    }
    let slice = |address| Arg::Slice { address, len: 1, bytes: 4, write: true };
    let args = [slice(flag), slice(x)];
    let countdown =
        NodeWork::Kernel(Launch { kernel: &COUNTDOWN, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args });
    let build = || {
        let graph = bench.graph();
        let first = bench.add(graph, &[], &fill(x, 0, 4));
        // SAFETY: the flag lives as long as the bench.
        let made = unsafe { device.graph_add_conditional(graph, &[first], Condition::While, flag) };
        let (node, body) = made.unwrap();
        let counted = bench.add(body, &[], &countdown);
        bench.add(graph, &[node], &copy(Place::Device(Address(x.0 + 4)), Place::Device(x), 4));
        (graph, body, counted)
    };
    let (graph, body, counted) = build();
    let run = |exec, from: u32, expected: u32| {
        bench.put_number(flag, from);
        bench.launch(exec);
        assert_eq!((bench.number(Address(x.0 + 4)), bench.number(flag)), (expected, 0), "from {from}");
    };
    let exec = bench.exec(graph);
    [0, 1, 5, 100].into_iter().for_each(|from| run(exec, from, from));
    // Once more the same, and once with more in it.
    let again = bench.exec(graph);
    run(again, 5, 5);
    bench.add(body, &[counted], &fill(Address(x.0 + 8), 7, 4));
    bench.add(body, &[], &NodeWork::Empty);
    let longer = bench.exec(graph);
    run(longer, 3, 3);
    assert_eq!(bench.number(Address(x.0 + 8)), 7);
    // Whether or not the driver takes one that is built in the same way, the exec loops afterwards.
    let (same, ..) = build();
    if let Err(refused) = bench.update(exec, same) {
        assert!(!refused.why.is_empty());
    }
    run(exec, 4, 4);
    bench.end(&[exec, again, longer], &[graph, same]);
}

#[test]
fn what_is_wrong_with_a_node_is_told() {
    let Some(bench) = Bench::get() else { return };
    let [a, _] = bench.device;
    let graph = bench.graph();
    let one = 1.0_f32;
    let args = [floats_at(a), scalar(&one)];
    // SAFETY: it is refused.
    let free = unsafe { bench.backend().graph_add(graph, &[], &NodeWork::Free(a)) };
    assert_tells(&free.unwrap_err(), &["free", "cuGraphAddMemFreeNode"]);
    if bench.backend().cx.driver.func_get_param_info.is_some() {
        let fewer = [floats_at(a)];
        // SAFETY: it is refused.
        let error = unsafe { bench.backend().graph_add(graph, &[], &scale(&fewer)) }.unwrap_err();
        assert!(error.kind() == ErrorKind::Kernel, "{error}");
    }
    // Here or, at the latest, when it is instantiated.
    let large = Launch { kernel: &SCALE_PTX, grid: [1; 3], block: [4096, 1, 1], shared_bytes: 0, args: &args };
    // SAFETY: it is refused.
    let added = unsafe { bench.backend().graph_add(graph, &[], &NodeWork::Kernel(large)) };
    let refused = added.err().or_else(|| bench.backend().graph_instantiate(graph).err());
    assert!(refused.is_some(), "no device has so large blocks");
    bench.end(&[], &[graph]);
}

#[test]
fn many_graphs_leave_nothing_behind() {
    let Some(bench) = Bench::get() else { return };
    let [a, b] = bench.device;
    let (called, function) = counter();
    let (two, device) = (2.0_f32, bench.backend());
    let args = [floats_at(a), scalar(&two)];
    let round = || {
        let graph = bench.graph();
        let scaled = bench.add(graph, &[], &scale(&args));
        let copied = bench.add(graph, &[scaled], &copy(Place::Device(b), Place::Device(a), 16));
        bench.add(graph, &[copied], &NodeWork::Host(Arc::clone(&function)));
        // SAFETY: 16 bytes of the device's, in the stream that was given.
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
fn threads_have_graphs_of_their_own_at_once() {
    let Some(bench) = Bench::get() else { return };
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
                        // SAFETY: 64 bytes of this thread's, in the stream that was given.
                        code = unsafe { (device.cx.driver.memset_d32_async)(memory.0, expected, 16, stream.cast()) };
                    };
                    let external = External { name: "theirs", args: &[], call: &mut enqueue, emulated: None };
                    // SAFETY: the memory is this thread's, and freed when the last launch is done.
                    unsafe {
                        let recorded = device.graph_external(graph, &[], external).unwrap();
                        let out = copy(Place::Host(host.as_ptr()), Place::Device(memory), 64);
                        device.graph_add(graph, &recorded.ends, &out).unwrap();
                        let exec = device.graph_instantiate(graph).unwrap();
                        device.exec_launch(exec, stream).unwrap();
                        // Another thread may be capturing: that is its own.
                        device.stream_synchronize(stream).unwrap();
                        device.exec_destroy(exec);
                        let read = slice::from_raw_parts(host.as_ptr(), 64);
                        assert_eq!(read, [expected.to_ne_bytes(); 16].concat());
                    }
                    assert!(code.is_success());
                    device.graph_destroy(graph);
                }
                // SAFETY: nothing uses them any more.
                unsafe {
                    device.free(memory).unwrap();
                    device.free_host(host, 64).unwrap();
                }
                device.stream_destroy(stream);
            });
        }
    });
}
