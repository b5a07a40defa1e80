//! Tests of the emulated device's graphs, through the `Backend` interface only.

mod faults;
mod update;

use std::{
    cell::Cell,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
};

use super::super::{
    Emulated, Faults, Simulation, open,
    tests::{BOOM, INCREMENT, bytes, fill, hold, launch, read, spec, stream},
};
use crate::{
    ErrorKind, Result,
    device::backend::{
        Address, Arg, Backend, BodyArg, Endpoint, ExternalWork, GraphCondition, Launch, NodeWork, Pattern, RawExec,
        RawGraph, RawNode, RawStream, Refused,
    },
};

thread_local!(static VISITS: Cell<usize> = const { Cell::new(0) });

pub(super) fn visit() {
    VISITS.set(VISITS.get() + 1);
}

/// The number of nodes that this thread visits.
fn visits<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = VISITS.get();
    let outcome = work();
    (VISITS.get() - before, outcome)
}

type Device = Arc<dyn Backend>;
/// The names of the nodes that ran, in order.
type Order = Arc<Mutex<Vec<&'static str>>>;

fn add(device: &Device, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> Result<RawNode> {
    // SAFETY: every test waits for its streams before its memory is freed, and arguments are those of the kernels.
    unsafe { device.graph_add(graph, after, work) }
}

fn kernel<'a>(kernel: &'static crate::device::backend::KernelDef, args: &'a [Arg<'a>]) -> NodeWork<'a> {
    NodeWork::Kernel(Launch { kernel, grid: [1; 3], block: [1; 3], shared_bytes: 0, args })
}

fn filling(to: Address, byte: u8, bytes: u64) -> NodeWork<'static> {
    NodeWork::Fill { to, pattern: Pattern { width: 1, bits: byte.into() }, bytes }
}

fn note(device: &Device, graph: RawGraph, after: &[RawNode], order: &Order, who: &'static str) -> RawNode {
    let order = order.clone();
    add(device, graph, after, &NodeWork::Host(Arc::new(move || order.lock().unwrap().push(who)))).unwrap()
}

fn start(device: &Device, exec: RawExec, on: RawStream) -> Result<()> {
    // SAFETY: as for `add`.
    unsafe { device.exec_launch(exec, on) }
}

fn run(device: &Device, exec: RawExec, on: RawStream) -> Result<()> {
    start(device, exec, on)?;
    device.stream_synchronize(on)
}

fn set(device: &Device, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
    // SAFETY: as for `add`.
    unsafe { device.exec_set(exec, node, work) }
}

fn update(device: &Device, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
    // SAFETY: as for `add`.
    unsafe { device.exec_update(exec, graph) }
}

fn destroy(device: &Device, exec: RawExec) {
    // SAFETY: its launches were waited for.
    unsafe { device.exec_destroy(exec) }
}

fn taken(order: &Order) -> Vec<&'static str> {
    std::mem::take(&mut *order.lock().unwrap())
}

fn raise(device: &Device, on: RawStream, flag: Address, value: u32) {
    // SAFETY: valid for the length of the test.
    unsafe { device.fill(on, flag, Pattern { width: 4, bits: value }, 4) }.unwrap();
}

#[test]
fn kernels_copies_fills_and_functions_run_at_every_launch() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let (memory, other) = (device.alloc(8).unwrap(), device.alloc(8).unwrap());
    let graph = device.graph_create().unwrap();
    let called = Arc::new(AtomicUsize::new(0));
    let count = called.clone();
    let first = add(&device, graph, &[], &filling(memory, 4, 8)).unwrap();
    let second = add(&device, graph, &[first], &kernel(&INCREMENT, &bytes(memory, 8))).unwrap();
    let both = add(&device, graph, &[first, second, second], &NodeWork::Empty).unwrap();
    let (to, from) = (Endpoint::Device(other), Endpoint::Device(memory));
    let copy = add(&device, graph, &[both], &NodeWork::Copy { to, from, bytes: 8 }).unwrap();
    let emulated = Some(Arc::new(|args: &[BodyArg]| {
        // SAFETY: the one argument is bytes that it may write.
        let slice = unsafe { args[0].slice_mut::<u8>() };
        slice[0] = 9;
    }) as _);
    let call = &mut |_| unreachable!("no device here has a driver");
    let external = ExternalWork { name: "library", args: &bytes(other, 8), call, emulated };
    // SAFETY: the replacement takes one slice, which it gets.
    let recorded = unsafe { device.graph_external(graph, &[copy], external) };
    let recorded = recorded.unwrap();
    assert_eq!((recorded.ends.len(), recorded.nodes), (1, 1));
    let host = NodeWork::Host(Arc::new(move || _ = count.fetch_add(1, Ordering::SeqCst)));
    add(&device, graph, &recorded.ends, &host).unwrap();
    drop(host);
    let exec = device.graph_instantiate(graph).unwrap();
    device.exec_upload(exec, work).unwrap();
    // The graph is no longer needed, and each launch runs all of its nodes.
    device.graph_destroy(graph);
    for launches in 1..=3 {
        run(&device, exec, work).unwrap();
        assert_eq!(read(&device, work, other, 8), [9, 5, 5, 5, 5, 5, 5, 5]);
        assert_eq!(called.load(Ordering::SeqCst), launches);
        fill(&device, work, other, 0, 8);
    }
    destroy(&device, exec);
    assert_eq!(start(&device, exec, work).unwrap_err().kind(), ErrorKind::Usage);
    assert_eq!(Arc::strong_count(&called), 1, "the function went with the last of both");
}

#[test]
fn the_order_respects_the_edges_and_differs_at_each_launch() {
    let device = open(Emulated::new());
    let (work, order) = (stream(&device, "work"), Order::default());
    let graph = device.graph_create().unwrap();
    let top = note(&device, graph, &[], &order, "top");
    let left = note(&device, graph, &[top], &order, "left");
    let right = note(&device, graph, &[top], &order, "right");
    note(&device, graph, &[left, right], &order, "bottom");
    let exec = device.graph_instantiate(graph).unwrap();
    let orders: Vec<_> = (0..8)
        .map(|_| {
            run(&device, exec, work).unwrap();
            taken(&order)
        })
        .collect();
    for two in orders.chunks(2) {
        assert_ne!(two[0], two[1], "nodes that no edge orders change places");
        assert!(two.iter().all(|order| order[0] == "top" && order[3] == "bottom"), "{two:?}");
    }
    let again = device.graph_instantiate(graph).unwrap();
    for order_then in orders {
        run(&device, again, work).unwrap();
        assert_eq!(taken(&order), order_then);
    }
}

#[test]
fn a_simulation_decides_the_order_by_its_seed() {
    let orders = |seed| {
        let simulation = Simulation::new(seed);
        let device = simulation.device(Emulated::new());
        let (work, order) = (stream(&device, "work"), Order::default());
        let graph = device.graph_create().unwrap();
        for who in ["a", "b", "c", "d", "e"] {
            note(&device, graph, &[], &order, who);
        }
        let exec = device.graph_instantiate(graph).unwrap();
        (0..3).for_each(|_| run(&device, exec, work).unwrap());
        (taken(&order), simulation.log())
    };
    assert_eq!(orders(7), orders(7));
    assert_ne!(orders(7).0, orders(8).0);
}

#[test]
fn removing_a_node_joins_its_edges() {
    let device = open(Emulated::new());
    let (work, order) = (stream(&device, "work"), Order::default());
    let graph = device.graph_create().unwrap();
    let first = note(&device, graph, &[], &order, "first");
    let between = note(&device, graph, &[first], &order, "between");
    note(&device, graph, &[between], &order, "last");
    device.graph_remove(graph, between).unwrap();
    assert_eq!(device.graph_remove(graph, between).unwrap_err().kind(), ErrorKind::Usage);
    let exec = device.graph_instantiate(graph).unwrap();
    for _ in 0..4 {
        run(&device, exec, work).unwrap();
        assert_eq!(taken(&order), ["first", "last"]);
    }
}

#[test]
fn a_node_may_depend_on_one_that_was_added_later() {
    let device = open(Emulated::new());
    let (work, order) = (stream(&device, "work"), Order::default());
    let (child, graph) = (device.graph_create().unwrap(), device.graph_create().unwrap());
    note(&device, child, &[], &order, "within");
    let last = note(&device, graph, &[], &order, "last");
    let first = add(&device, graph, &[], &NodeWork::Child(child)).unwrap();
    let between = note(&device, graph, &[], &order, "between");
    device.graph_order(graph, first, between).unwrap();
    device.graph_order(graph, between, last).unwrap();
    device.graph_order(graph, between, last).unwrap();
    let error = device.graph_order(graph, last, first).unwrap_err();
    assert!(error.to_string().contains("a cycle"), "{error}");
    assert!(device.graph_order(graph, first, first).is_err());
    assert!(device.graph_order(child, first, last).is_err());
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_remove(graph, between).unwrap();
    let shorter = device.graph_instantiate(graph).unwrap();
    for _ in 0..4 {
        run(&device, exec, work).unwrap();
        assert_eq!(taken(&order), ["within", "between", "last"]);
        run(&device, shorter, work).unwrap();
        assert_eq!(taken(&order), ["within", "last"]);
    }
}

#[test]
fn an_exec_never_overlaps_itself() {
    let device = open(Emulated::new().workers(4));
    let streams = [stream(&device, "a"), stream(&device, "b"), stream(&device, "c")];
    let (inside, most, runs) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), 60);
    let graph = device.graph_create().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let node = {
        let (inside, most) = (inside.clone(), most.clone());
        NodeWork::Host(Arc::new(move || {
            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
        }))
    };
    let enter = add(&device, graph, &[], &node).unwrap();
    let leave = NodeWork::Host(Arc::new(move || _ = inside.fetch_sub(1, Ordering::SeqCst)));
    add(&device, graph, &[enter], &leave).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    let go = hold(&device, streams[0]);
    for number in 0..runs {
        let on = streams[number % 3];
        start(&device, exec, on).unwrap();
        let order = order.clone();
        device.host_function(on, &mut Some(Box::new(move || order.lock().unwrap().push(number % 3)))).unwrap();
    }
    // The first launch blocks, and so all do.
    assert!(!device.stream_query(streams[1]).unwrap());
    assert!(order.lock().unwrap().is_empty());
    drop(go);
    streams.iter().for_each(|on| device.stream_synchronize(*on).unwrap());
    assert_eq!(most.load(Ordering::SeqCst), 1);
    assert_eq!(order.lock().unwrap().len(), runs);
}

#[test]
fn two_execs_of_a_graph_run_at_once() {
    let device = open(Emulated::new().workers(2));
    let graph = device.graph_create().unwrap();
    let barrier = Arc::new(std::sync::Barrier::new(2));
    add(&device, graph, &[], &NodeWork::Host(Arc::new(move || _ = barrier.wait()))).unwrap();
    let streams = [stream(&device, "a"), stream(&device, "b")];
    for on in streams {
        start(&device, device.graph_instantiate(graph).unwrap(), on).unwrap();
    }
    streams.iter().for_each(|on| device.stream_synchronize(*on).unwrap());
}

#[test]
fn a_launch_is_ordered_with_its_stream_and_the_default_stream() {
    let device = open(Emulated::new().workers(2));
    let blocking =
        device.stream_create(&crate::device::backend::StreamSpec { non_blocking: false, ..spec("blocking") }).unwrap();
    let memory = device.alloc(8).unwrap();
    let graph = device.graph_create().unwrap();
    add(&device, graph, &[], &kernel(&INCREMENT, &bytes(memory, 8))).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    let go = hold(&device, blocking);
    fill(&device, blocking, memory, 1, 8);
    start(&device, exec, RawStream(0)).unwrap();
    launch(&device, blocking, &INCREMENT, &bytes(memory, 8)).unwrap();
    drop(go);
    assert_eq!(read(&device, blocking, memory, 8), [3; 8]);
}

#[test]
fn a_child_is_a_snapshot_of_its_graph() {
    let device = open(Emulated::new());
    let (work, order) = (stream(&device, "work"), Order::default());
    let (child, graph) = (device.graph_create().unwrap(), device.graph_create().unwrap());
    let one = note(&device, child, &[], &order, "child one");
    note(&device, child, &[one], &order, "child two");
    let first = note(&device, graph, &[], &order, "first");
    let within = add(&device, graph, &[first], &NodeWork::Child(child)).unwrap();
    note(&device, graph, &[within], &order, "last");
    note(&device, child, &[], &order, "too late");
    device.graph_destroy(child);
    let exec = device.graph_instantiate(graph).unwrap();
    for _ in 0..4 {
        run(&device, exec, work).unwrap();
        assert_eq!(taken(&order), ["first", "child one", "child two", "last"]);
    }
}

#[test]
fn events_are_waited_for_and_recorded() {
    let device = open(Emulated::new().workers(2));
    let (work, other) = (stream(&device, "work"), stream(&device, "other"));
    let [before, after] = [device.event_create(false).unwrap(), device.event_create(false).unwrap()];
    let memory = device.alloc(8).unwrap();
    let graph = device.graph_create().unwrap();
    let wait = add(&device, graph, &[], &NodeWork::Wait(before)).unwrap();
    let node = add(&device, graph, &[wait], &kernel(&INCREMENT, &bytes(memory, 8))).unwrap();
    add(&device, graph, &[node], &NodeWork::Record(after)).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    let go = hold(&device, other);
    fill(&device, other, memory, 1, 8);
    device.event_record(before, other).unwrap();
    start(&device, exec, work).unwrap();
    assert!(!device.event_query(after).unwrap());
    device.stream_wait(other, after).unwrap();
    launch(&device, other, &INCREMENT, &bytes(memory, 8)).unwrap();
    drop(go);
    assert_eq!(read(&device, other, memory, 8), [3; 8]);
    assert!(device.event_query(after).unwrap());
    // An event of another device can be waited for, but not recorded.
    let far = open(Emulated::new());
    let stranger = far.event_create(false).unwrap();
    add(&device, graph, &[], &NodeWork::Wait(stranger)).unwrap();
    assert_eq!(add(&device, graph, &[], &NodeWork::Record(stranger)).unwrap_err().kind(), ErrorKind::Usage);
    // A destroyed event is an error of the launch, which then has no effect.
    device.event_destroy(before);
    assert_eq!(start(&device, exec, work).unwrap_err().kind(), ErrorKind::Driver);
    device.stream_synchronize(work).unwrap();
    assert_eq!(read(&device, work, memory, 8), [3; 8]);
}

#[test]
fn memory_exists_between_its_nodes() {
    let device = open(Emulated::new().memory(1000));
    let work = stream(&device, "work");
    let out = device.alloc(8).unwrap();
    let graph = device.graph_create().unwrap();
    let (alloc, memory) = device.graph_add_alloc(graph, &[], 900).unwrap();
    assert_eq!(memory.0 % 256, 0);
    assert_eq!(device.memory().unwrap().free, 92);
    assert!(device.graph_add_alloc(graph, &[], 100).unwrap_err().is_out_of_memory());
    let (to, from) = (Endpoint::Device(out), Endpoint::Device(memory));
    let copy = add(&device, graph, &[alloc], &NodeWork::Copy { to, from, bytes: 8 }).unwrap();
    let change = add(&device, graph, &[copy], &filling(memory, 3, 900)).unwrap();
    let error = add(&device, graph, &[], &NodeWork::Free(memory)).unwrap_err();
    assert!(error.to_string().contains("does not depend on its allocation"), "{error}");
    assert!(add(&device, graph, &[change], &NodeWork::Free(out)).is_err());
    let freed = add(&device, graph, &[change], &NodeWork::Free(memory)).unwrap();
    assert!(add(&device, graph, &[freed], &NodeWork::Free(memory)).unwrap_err().to_string().contains("twice"));
    let exec = device.graph_instantiate(graph).unwrap();
    let error = device.graph_instantiate(graph).unwrap_err();
    assert!(error.to_string().contains("one exec at a time"), "{error}");
    for _ in 0..2 {
        run(&device, exec, work).unwrap();
        assert_eq!(read(&device, work, out, 8), [0xAD; 8]);
    }
    let other = device.graph_create().unwrap();
    assert!(add(&device, other, &[], &NodeWork::Child(graph)).is_err());
    assert!(device.graph_remove(graph, copy).is_err());
    assert!(update(&device, exec, graph).unwrap().unwrap_err().why.contains("memory nodes"));
    // Counted until both are destroyed.
    device.graph_destroy(graph);
    assert_eq!(device.memory().unwrap().free, 92);
    run(&device, exec, work).unwrap();
    destroy(&device, exec);
    assert_eq!(device.memory().unwrap().free, 992);
    let second = device.graph_instantiate(other).unwrap();
    run(&device, second, work).unwrap();
}

#[test]
fn memory_that_a_graph_has_freed_is_an_illegal_address() {
    for (before, late) in [(true, false), (false, true), (false, false)] {
        let device = open(Emulated::new());
        let work = stream(&device, "work");
        let graph = device.graph_create().unwrap();
        let first = add(&device, graph, &[], &NodeWork::Empty).unwrap();
        let (alloc, memory) = device.graph_add_alloc(graph, &[first], 64).unwrap();
        let freed = add(&device, graph, &[alloc], &NodeWork::Free(memory)).unwrap();
        if late {
            add(&device, graph, &[freed], &filling(memory, 1, 64)).unwrap();
        }
        let exec = device.graph_instantiate(graph).unwrap();
        if before {
            fill(&device, work, memory, 1, 64);
        }
        start(&device, exec, work).ok();
        if !before && !late {
            device.stream_synchronize(work).unwrap();
            fill(&device, work, memory, 1, 64);
        }
        let error = device.stream_synchronize(work).unwrap_err();
        assert!(error.is_device_lost() && format!("{error:#}").contains("illegal address"), "{error:#}");
    }
}

#[test]
fn memory_that_a_launch_does_not_free_prevents_the_next_launch() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let graph = device.graph_create().unwrap();
    let (alloc, memory) = device.graph_add_alloc(graph, &[], 8).unwrap();
    add(&device, graph, &[alloc], &filling(memory, 5, 8)).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    run(&device, exec, work).unwrap();
    assert_eq!(read(&device, work, memory, 8), [5; 8]);
    assert!(start(&device, exec, work).unwrap_err().to_string().contains("that no node frees"));
    destroy(&device, exec);
    device.graph_destroy(graph);
    assert_eq!(device.memory().unwrap().free, device.memory().unwrap().total);
}

#[test]
fn wrong_nodes_are_errors_of_the_call() {
    let device = open(Emulated::new());
    let memory = device.alloc(8).unwrap();
    let (graph, other) = (device.graph_create().unwrap(), device.graph_create().unwrap());
    let node = add(&device, graph, &[], &NodeWork::Empty).unwrap();
    let error = add(&device, other, &[node], &NodeWork::Empty).unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("does not belong to this graph"), "{error}");
    let wide = NodeWork::Fill { to: memory, pattern: Pattern { width: 4, bits: 0 }, bytes: 6 };
    assert_eq!(add(&device, graph, &[], &wide).unwrap_err().kind(), ErrorKind::Driver);
    let overlapping = [bytes(memory, 8)[0], bytes(Address(memory.0 + 7), 1)[0]];
    let error = add(&device, graph, &[], &kernel(&INCREMENT, &overlapping)).unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("kernel `INCREMENT`"), "{error}");
    // SAFETY: refused.
    let error = unsafe {
        let call = &mut |_| ();
        device.graph_external(graph, &[node], ExternalWork { name: "cublas", args: &[], call, emulated: None })
    };
    let error = error.unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains(".emulated("), "{error}");
    device.graph_destroy(graph);
    assert!(add(&device, graph, &[], &NodeWork::Empty).is_err());
    assert!(device.graph_instantiate(graph).is_err());
    let far = open(Emulated::new());
    assert!(far.graph_instantiate(other).is_err(), "another device's");
}
