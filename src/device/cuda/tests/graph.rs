//! Graphs on a GPU.
//!
//! Each test allocates device memory at its beginning and frees it at its end, both checked. Results of graphs are read
//! back from it.

mod captured;
mod conditional;
mod lasting;

use std::sync::atomic::AtomicUsize;

use super::driver::Code;
use super::*;
use crate::device::backend::HostCallback;

/// A GPU with some device and host memory, for tests of graphs.
struct Bench {
    gpu: Gpu,
    /// 256 bytes each.
    device: [Address; 2],
    host: [NonNull<u8>; 2],
}

const BYTES: usize = 256;

impl Bench {
    fn get() -> Self {
        let gpu = Gpu::get();
        let device = [(); 2].map(|()| gpu.device.alloc(BYTES as u64).unwrap());
        let host = [(); 2].map(|()| gpu.device.alloc_host(BYTES).unwrap());
        let bench = Self { gpu, device, host };
        device.iter().for_each(|&at| bench.put(at, &[0; BYTES]));
        bench
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

    fn floats<const N: usize>(&self, from: Address) -> [f32; N] {
        floats(&self.read(from, 4 * N)).try_into().unwrap()
    }

    fn graph(&self) -> RawGraph {
        self.backend().graph_create().unwrap()
    }

    fn add(&self, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> RawNode {
        // SAFETY: the memory that the tests' nodes use belongs to `self` or is freed after their execs; the arguments
        // are the kernels'.
        unsafe { self.backend().graph_add(graph, after, work) }.unwrap()
    }

    fn exec(&self, graph: RawGraph) -> RawExec {
        self.backend().graph_instantiate(graph).unwrap()
    }

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

    /// Adds work as another library would enqueue it.
    fn external(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        mut call: impl FnMut(&Driver, CUstream) -> Code,
    ) -> (Result<ExternalNodes>, Code) {
        let mut code = Code::SUCCESS;
        let driver = self.backend().cx.driver;
        let mut enqueue = |stream: *mut std::ffi::c_void| code = call(driver, stream.cast());
        let external = ExternalWork { name: "theirs", args: &[], call: &mut enqueue, emulated: None };
        // SAFETY: as in `add`; it is enqueued only into this stream.
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
        assert_eq!(self.backend().graphs.counts(), (0, 0), "graphs and execs are left behind");
    }
}

fn floats_at(address: Address) -> Arg<'static> {
    Arg::Slice { address, len: 4, bytes: 16, write: true }
}

/// `x[..4] *= a`.
fn scale<'a>(args: &'a [Arg<'a>]) -> NodeWork<'a> {
    NodeWork::Kernel(Launch { kernel: &SCALE_PTX, grid: [1; 3], block: [4, 1, 1], shared_bytes: 0, args })
}

fn copy(to: Endpoint, from: Endpoint, bytes: usize) -> NodeWork<'static> {
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

fn assert_reports(error: &Error, words: &[&str]) {
    let text = format!("{error:#}");
    assert!(words.iter().all(|word| text.contains(word)), "not all of {words:?} in {text}");
}

#[test]
#[ignore = "needs a GPU"]
fn nodes_of_all_kinds_run_in_order() {
    let bench = Bench::get();
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
    let copied = bench.add(graph, &[doubled], &copy(Endpoint::Device(b), Endpoint::Device(a), 16));
    let tripled = bench.add(graph, &[copied], &NodeWork::Child(child));
    let filled = bench.add(graph, &[copied], &fill(Address(b.0 + 16), 7, 16));
    let joined = bench.add(graph, &[tripled, filled], &NodeWork::Empty);
    let out = bench.add(graph, &[joined], &copy(Endpoint::Host(host.as_ptr()), Endpoint::Device(b), 32));
    let nothing = bench.add(graph, &[out], &copy(Endpoint::Device(a), Endpoint::Device(b), 0));
    let recorded = bench.add(graph, &[nothing], &NodeWork::Record(event));
    bench.add(graph, &[recorded], &NodeWork::Host(function));

    let exec = bench.exec(graph);
    // The graph's child is a copy, and so is the exec's.
    bench.backend().graph_destroy(child);
    bench.put(a, bytemuck::cast_slice(&[1.0_f32, 2.0, 3.0, 4.0]));
    bench.backend().exec_upload(exec, bench.gpu.stream).unwrap();
    for (round, factor) in [(1, 6.0_f32), (2, 12.0)] {
        bench.launch(exec);
        assert_eq!(count(&called), round);
        // SAFETY: 256 bytes, which nothing writes at this point.
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
#[ignore = "needs a GPU"]
fn fills_of_all_widths_and_copies_from_the_host() {
    let bench = Bench::get();
    let ([a, b], [_, host]) = (bench.device, bench.host);
    let graph = bench.graph();
    // SAFETY: 256 bytes, which nothing uses yet.
    unsafe { host.as_ptr().write_bytes(0x5a, 8) };
    let width = |width, bits, at| NodeWork::Fill { to: Address(a.0 + at), pattern: Pattern { width, bits }, bytes: 8 };
    let one = bench.add(graph, &[], &width(1, 0x9911, 0));
    let two = bench.add(graph, &[], &width(2, 0x9922_1133, 8));
    let four = bench.add(graph, &[], &width(4, 0x4433_2211, 16));
    let put = bench.add(graph, &[], &copy(Endpoint::Device(Address(a.0 + 24)), Endpoint::Host(host.as_ptr()), 8));
    bench.add(graph, &[one, two, four, put], &copy(Endpoint::Device(b), Endpoint::Device(a), 32));
    // SAFETY: the node is refused.
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
#[ignore = "needs a GPU"]
fn a_panic_of_a_host_function_does_not_end_the_graph() {
    let bench = Bench::get();
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
#[ignore = "needs a GPU"]
fn an_exec_is_updated_as_a_whole() {
    let bench = Bench::get();
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
    bench.launch(exec);
    assert_eq!(bench.floats(a), [10.0; 4]);
    assert_eq!((count(&old), count(&new)), (1, 1));

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
    bench.end(&[exec], &[by_two, by_five, other]);
    assert_eq!((Arc::strong_count(&old), Arc::strong_count(&new)), (1, 1));
}

#[test]
#[ignore = "needs a GPU"]
fn one_node_of_an_exec_is_changed() {
    let bench = Bench::get();
    let [a, b] = bench.device;
    let graph = bench.graph();
    let [one, two, five] = [1.0_f32, 2.0, 5.0];
    let (at_two, at_five) = ([floats_at(a), scalar(&two)], [floats_at(a), scalar(&five)]);
    let ((old, old_function), (new, new_function)) = (counter(), counter());
    let filled = bench.add(graph, &[], &fill(a, one.to_bits(), 16));
    let scaled = bench.add(graph, &[filled], &scale(&at_two));
    let copied = bench.add(graph, &[scaled], &copy(Endpoint::Device(b), Endpoint::Device(a), 16));
    let called = bench.add(graph, &[copied], &NodeWork::Host(old_function));
    let child = bench.graph();
    bench.add(child, &[], &fill(Address(b.0 + 64), 1, 4));
    let nested = bench.add(graph, &[called], &NodeWork::Child(child));
    let exec = bench.exec(graph);
    // The nodes of a graph can be used to change its exec even after the owner has released the graph.
    bench.backend().graph_destroy(graph);
    bench.launch(exec);
    assert_eq!(bench.floats(b), [2.0; 4]);

    bench.set(exec, scaled, &scale(&at_five)).unwrap();
    bench.set(exec, copied, &copy(Endpoint::Device(Address(b.0 + 16)), Endpoint::Device(a), 16)).unwrap();
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

    // Refused changes have no effect.
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
#[ignore = "needs a GPU"]
fn events_of_nodes_are_changed() {
    let bench = Bench::get();
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
#[ignore = "needs a GPU"]
fn a_removed_node_leaves_its_order() {
    let bench = Bench::get();
    let [a, b] = bench.device;
    let graph = bench.graph();
    let two = 2.0_f32;
    let at_a = [floats_at(a), scalar(&two)];
    let first = bench.add(graph, &[], &fill(a, 1.0_f32.to_bits(), 16));
    let scaled = bench.add(graph, &[first], &scale(&at_a));
    let gone = bench.add(graph, &[scaled], &fill(a, 0, 16));
    // After both: one of the edges that the removal adds exists already.
    let last = bench.add(graph, &[gone, scaled, gone], &copy(Endpoint::Device(b), Endpoint::Device(a), 16));
    bench.add(graph, &[gone], &NodeWork::Empty);
    bench.backend().graph_remove(graph, gone).unwrap();
    let exec = bench.exec(graph);
    for _ in 0..100 {
        bench.launch(exec);
        assert_eq!(bench.floats(b), [2.0; 4]);
    }
    // The last and the first node: no edges to add.
    bench.backend().graph_remove(graph, last).unwrap();
    bench.backend().graph_remove(graph, first).unwrap();
    bench.put(a, bytemuck::cast_slice(&[3.0_f32; 4]));
    let shorter = bench.exec(graph);
    bench.launch(shorter);
    assert_eq!((bench.floats(a), bench.floats(b)), ([6.0; 4], [2.0; 4]));
    bench.end(&[exec, shorter], &[graph]);
}

#[test]
#[ignore = "needs a GPU"]
fn errors_of_nodes_are_described() {
    let bench = Bench::get();
    let [a, _] = bench.device;
    let graph = bench.graph();
    let one = 1.0_f32;
    let args = [floats_at(a), scalar(&one)];
    // SAFETY: the node is refused.
    let free = unsafe { bench.backend().graph_add(graph, &[], &NodeWork::Free(a)) };
    assert_reports(&free.unwrap_err(), &["free", "cuGraphAddMemFreeNode"]);
    if bench.backend().cx.driver.func_get_param_info.is_some() {
        let fewer = [floats_at(a)];
        // SAFETY: the node is refused.
        let error = unsafe { bench.backend().graph_add(graph, &[], &scale(&fewer)) }.unwrap_err();
        assert!(error.kind() == ErrorKind::Kernel, "{error}");
    }
    // Refused here or, at the latest, at the instantiation.
    let large = Launch { kernel: &SCALE_PTX, grid: [1; 3], block: [4096, 1, 1], shared_bytes: 0, args: &args };
    // SAFETY: the node is refused.
    let added = unsafe { bench.backend().graph_add(graph, &[], &NodeWork::Kernel(large)) };
    let refused = added.err().or_else(|| bench.backend().graph_instantiate(graph).err());
    assert!(refused.is_some(), "no device supports such large blocks");
    bench.end(&[], &[graph]);
}

#[test]
#[ignore = "needs a GPU"]
fn nodes_are_ordered_afterwards() {
    let bench = Bench::get();
    let [a, b] = bench.device;
    let graph = bench.graph();
    let copied = bench.add(graph, &[], &copy(Endpoint::Device(b), Endpoint::Device(a), 16));
    let two = 2.0_f32;
    let at_a = [floats_at(a), scalar(&two)];
    let filled = bench.add(graph, &[], &fill(a, 1.0_f32.to_bits(), 16));
    let scaled = bench.add(graph, &[filled], &scale(&at_a));
    for (before, after) in [(filled, scaled), (scaled, copied), (scaled, copied)] {
        bench.backend().graph_order(graph, before, after).unwrap();
    }
    let exec = bench.exec(graph);
    for _ in 0..100 {
        bench.put(b, &[0; 16]);
        bench.launch(exec);
        assert_eq!(bench.floats(b), [2.0; 4]);
    }
    // A cycle is found at the instantiation at the latest.
    let circle = bench.backend().graph_order(graph, copied, filled);
    let error = circle.err().or_else(|| bench.backend().graph_instantiate(graph).err());
    assert!(error.is_some(), "its nodes form a cycle");
    bench.end(&[exec], &[graph]);
}
