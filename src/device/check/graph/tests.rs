//! Tests of the errors that the checker finds in graphs and launches, and of valid ones that it accepts.

use std::sync::{Arc, mpsc};

use super::super::{
    checked,
    mock::kernel,
    tests::{copy, device, fill, hold, join, stream, touch, written},
};
use crate::{
    ErrorKind, Result,
    device::{
        backend::*,
        emulated::{self, Emulated, Faults},
    },
};

type Device = Arc<dyn Backend>;

fn add(device: &Device, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> Result<RawNode> {
    // SAFETY: every test waits for its streams before it frees.
    unsafe { device.graph_add(graph, after, work) }
}

fn filling(to: Address, bytes: u64) -> NodeWork<'static> {
    NodeWork::Fill { to, pattern: Pattern { width: 1, bits: 1 }, bytes }
}

fn slice(address: Address, bytes: u64, write: bool) -> [Arg<'static>; 1] {
    [Arg::Slice { address, len: bytes, bytes, write }]
}

/// A kernel that touches nothing, whatever its arguments say.
fn touching<'a>(args: &'a [Arg<'a>]) -> NodeWork<'a> {
    NodeWork::Kernel(Launch { kernel: kernel(), grid: [1; 3], block: [1; 3], shared_bytes: 0, args })
}

fn reading(device: &Device, graph: RawGraph, after: &[RawNode], from: Address, bytes: u64) -> Result<RawNode> {
    add(device, graph, after, &touching(&slice(from, bytes, false)))
}

fn start(device: &Device, exec: RawExec, on: RawStream) -> Result<()> {
    // SAFETY: as for `add`.
    unsafe { device.exec_launch(exec, on) }
}

fn set(device: &Device, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
    // SAFETY: as for `add`.
    unsafe { device.exec_set(exec, node, work) }
}

/// A graph that fills some memory.
fn filler(device: &Device, memory: Address, bytes: u64) -> (RawGraph, RawExec, RawNode) {
    let graph = device.graph_create().unwrap();
    let node = add(device, graph, &[], &filling(memory, bytes)).unwrap();
    (graph, device.graph_instantiate(graph).unwrap(), node)
}

#[test]
fn two_writers_that_no_edge_orders_are_refused_before_they_are_added() {
    let device = device();
    let memory = device.alloc(64).unwrap();
    let graph = device.graph_create().unwrap();
    let top = add(&device, graph, &[], &NodeWork::Empty).unwrap();
    let first = add(&device, graph, &[top], &filling(memory, 40)).unwrap();
    let second = touching(&[]);
    let late = Address(memory.0 + 32);
    let error = add(&device, graph, &[top], &touching(&slice(late, 32, true))).unwrap_err();
    let wanted = format!(
        "{0}: race: kernel `touch` writes bytes 32..40 of device memory #1 ({0}, 64 B), which fill of the same graph \
         writes; no edge orders them: make one depend on the other",
        device.name()
    );
    assert_eq!((error.kind(), error.to_string()), (ErrorKind::Race, wanted));
    // A reader is refused too; a node that touches nothing, or that an edge orders, however indirectly, is not.
    assert!(reading(&device, graph, &[], memory, 8).unwrap_err().is_race());
    let between = add(&device, graph, &[first], &second).unwrap();
    add(&device, graph, &[between], &touching(&slice(late, 32, true))).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    let work = stream(&device, "work");
    start(&device, exec, work).unwrap();
    device.stream_synchronize(work).unwrap();
}

#[test]
fn fork_and_join_is_no_race() {
    let device = device();
    let (memory, work) = (device.alloc(128).unwrap(), stream(&device, "work"));
    let graph = device.graph_create().unwrap();
    let part = |n: u64| Address(memory.0 + n * 32);
    let top = add(&device, graph, &[], &filling(memory, 128)).unwrap();
    let mut left = vec![top];
    for _ in 0..70 {
        left.push(add(&device, graph, &[left[left.len() - 1]], &touching(&slice(part(0), 32, true))).unwrap());
    }
    let right = add(&device, graph, &[top], &touching(&slice(part(1), 32, true))).unwrap();
    // Both branches read memory that none of them writes.
    let one = reading(&device, graph, &[left[70]], part(2), 32).unwrap();
    let two = reading(&device, graph, &[right], part(2), 64).unwrap();
    assert!(add(&device, graph, &[two], &filling(part(2), 32)).unwrap_err().is_race());
    assert!(add(&device, graph, &[left[69], two], &filling(part(0), 1)).unwrap_err().is_race());
    add(&device, graph, &[one, two], &filling(memory, 128)).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    let other = stream(&device, "other");
    for round in 0..10 {
        start(&device, exec, [work, other][round % 2]).unwrap();
    }
    device.stream_synchronize(other).unwrap();
}

#[test]
fn an_edge_that_is_added_later_orders_all_that_follows() {
    let device = device();
    let (memory, other, work) = (device.alloc(64).unwrap(), device.alloc(64).unwrap(), stream(&device, "work"));
    let graph = device.graph_create().unwrap();
    let reads = reading(&device, graph, &[], memory, 64).unwrap();
    let follows = add(&device, graph, &[reads], &NodeWork::Empty).unwrap();
    let writes = add(&device, graph, &[], &filling(other, 64)).unwrap();
    assert!(add(&device, graph, &[follows], &touching(&slice(other, 8, true))).unwrap_err().is_race());
    device.graph_order(graph, writes, reads).unwrap();
    add(&device, graph, &[follows], &touching(&slice(other, 8, true))).unwrap();
    // The first node added runs last: what it reads has been written then.
    let graph = device.graph_create().unwrap();
    let last = add(&device, graph, &[], &touching(&slice(other, 64, true))).unwrap();
    let first = add(&device, graph, &[], &filling(memory, 64)).unwrap();
    device.graph_order(graph, first, last).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    set(&device, exec, last, &touching(&slice(memory, 64, false))).unwrap().unwrap();
    start(&device, exec, work).unwrap();
    device.stream_synchronize(work).unwrap();
}

#[test]
fn removing_a_node_leaves_the_order_of_the_others() {
    let device = device();
    let memory = device.alloc(64).unwrap();
    let graph = device.graph_create().unwrap();
    let first = add(&device, graph, &[], &filling(memory, 64)).unwrap();
    let between = add(&device, graph, &[first], &NodeWork::Empty).unwrap();
    let last = reading(&device, graph, &[between], memory, 64).unwrap();
    device.graph_remove(graph, between).unwrap();
    add(&device, graph, &[last], &filling(memory, 64)).unwrap();
    let beside = device.alloc(64).unwrap();
    let node = add(&device, graph, &[], &filling(beside, 64)).unwrap();
    assert!(reading(&device, graph, &[last], beside, 64).unwrap_err().is_race());
    device.graph_remove(graph, node).unwrap();
    add(&device, graph, &[last], &filling(beside, 64)).unwrap();
}

#[test]
fn a_node_does_not_read_unwritten_memory() {
    let device = device();
    let (memory, other, work) = (device.alloc(64).unwrap(), device.alloc(64).unwrap(), stream(&device, "early"));
    let graph = device.graph_create().unwrap();
    let first = add(&device, graph, &[], &filling(memory, 32)).unwrap();
    let second = reading(&device, graph, &[first], memory, 32).unwrap();
    reading(&device, graph, &[second], other, 64).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    let error = start(&device, exec, work).unwrap_err();
    let wanted = format!(
        "{0}: invalid memory: kernel `touch` of a graph on stream `early` reads bytes 0..64 of device memory #2 ({0}, 64 \
         B), which nothing has written: fill it, copy to it, or pass it to a kernel as `&mut` first",
        device.name()
    );
    assert_eq!((error.kind(), error.to_string()), (ErrorKind::InvalidMemory, wanted));
    // Still refused at the next launch: the writes of earlier nodes were undone.
    assert_eq!(touch(&device, work, memory, 32, false).unwrap_err().kind(), ErrorKind::InvalidMemory);
    let side = stream(&device, "side");
    fill(&device, side, other, 1, 64).unwrap();
    // Now only the order is at issue.
    assert!(start(&device, exec, work).unwrap_err().is_race());
    join(&device, side, work);
    start(&device, exec, work).unwrap();
    touch(&device, work, memory, 32, false).unwrap();
    // A copy in a graph makes no more bytes written than its source has.
    let graph = device.graph_create().unwrap();
    let (to, from) = (Endpoint::Device(other), Endpoint::Device(memory));
    let node = add(&device, graph, &[], &NodeWork::Copy { to, from, bytes: 64 }).unwrap();
    reading(&device, graph, &[node], Address(other.0 + 32), 32).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    assert_eq!(start(&device, exec, work).unwrap_err().kind(), ErrorKind::InvalidMemory);
    device.stream_synchronize(work).unwrap();
}

#[test]
fn a_launch_is_a_call_of_its_stream() {
    let device = device();
    let (a, b) = (stream(&device, "replay"), stream(&device, "copy-out"));
    let memory = device.alloc(64).unwrap();
    let (_, exec, _) = filler(&device, memory, 64);
    let go = hold(&device, a);
    start(&device, exec, a).unwrap();
    let error = touch(&device, b, memory, 16, false).unwrap_err();
    let wanted = format!(
        "{0}: race: kernel `touch` on stream `copy-out` reads bytes 0..16 of device memory #1 ({0}, 64 B), which fill of \
         a graph on stream `replay` writes; nothing orders them: make `copy-out` wait for `replay` after its call 2",
        device.name()
    );
    assert_eq!(error.to_string(), wanted);
    join(&device, a, b);
    touch(&device, b, memory, 16, false).unwrap();
    let error = start(&device, exec, a).unwrap_err().to_string();
    assert!(error.contains("fill of a graph on stream `replay` writes bytes 0..16"), "{error}");
    join(&device, b, a);
    start(&device, exec, a).unwrap();
    // SAFETY: refused.
    assert!(unsafe { device.free(memory) }.unwrap_err().is_race());
    drop(go);
    device.stream_synchronize(a).unwrap();
    // SAFETY: all is done.
    unsafe { device.free(memory) }.unwrap();
    let error = start(&device, exec, a).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidMemory && error.to_string().contains("has freed"), "{error}");
    device.stream_synchronize(a).unwrap();
}

#[test]
fn execs_are_ordered_by_themselves_and_not_by_their_graph() {
    let device = device();
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = device.alloc(64).unwrap();
    let (graph, exec, _) = filler(&device, memory, 64);
    let go = hold(&device, a);
    start(&device, exec, a).unwrap();
    start(&device, exec, b).unwrap();
    // Work after the second launch is also after the first.
    fill(&device, b, memory, 2, 64).unwrap();
    assert!(fill(&device, a, memory, 2, 64).unwrap_err().is_race());
    let twin = device.graph_instantiate(graph).unwrap();
    assert!(start(&device, twin, a).unwrap_err().is_race());
    start(&device, twin, b).unwrap();
    join(&device, b, a);
    start(&device, exec, a).unwrap();
    drop(go);
    device.stream_synchronize(a).unwrap();
    // The host has seen all of it.
    start(&device, twin, stream(&device, "c")).unwrap();
}

#[test]
fn children_and_bodies_count_as_their_node() {
    let device = device();
    let (memory, other, flag) = (written(&device, 64), written(&device, 64), written(&device, 4));
    let work = stream(&device, "work");
    let (child, _, _) = filler(&device, memory, 64);
    let graph = device.graph_create().unwrap();
    let node = add(&device, graph, &[], &NodeWork::Child(child)).unwrap();
    // A snapshot: nodes that are added to the child later do not count.
    add(&device, child, &[], &filling(other, 64)).unwrap();
    reading(&device, graph, &[], other, 64).unwrap();
    assert!(reading(&device, graph, &[], memory, 64).unwrap_err().is_race());
    assert!(add(&device, graph, &[], &NodeWork::Child(child)).unwrap_err().is_race());
    reading(&device, graph, &[node], memory, 64).unwrap();

    let graph = device.graph_create().unwrap();
    let conditional = |after: &[RawNode]| {
        // SAFETY: the flag lives as long as the test.
        unsafe { device.graph_add_conditional(graph, after, GraphCondition::If, flag) }
    };
    let raise = add(&device, graph, &[], &filling(flag, 4)).unwrap();
    let error = conditional(&[]).unwrap_err().to_string();
    assert!(error.contains("condition reads bytes 0..4") && error.contains("which fill of the same graph"), "{error}");
    let (node, body) = conditional(&[raise]).unwrap();
    let within = add(&device, body, &[], &filling(other, 64)).unwrap();
    assert!(add(&device, body, &[], &filling(other, 8)).unwrap_err().is_race(), "within it");
    assert!(reading(&device, graph, &[raise], other, 64).unwrap_err().is_race(), "beside it");
    // A conflicting node beside it, and then one within it.
    add(&device, graph, &[raise], &touching(&slice(memory, 8, true))).unwrap();
    assert!(add(&device, body, &[within], &filling(memory, 64)).unwrap_err().is_race());
    // A body may write the flag: it runs after the flag was read.
    let lower = add(&device, body, &[within], &filling(flag, 4)).unwrap();
    // SAFETY: the flag lives as long as the test.
    let (_, inner) = unsafe { device.graph_add_conditional(body, &[lower], GraphCondition::If, flag) }.unwrap();
    assert!(add(&device, inner, &[], &filling(memory, 64)).unwrap_err().is_race());
    add(&device, inner, &[], &filling(other, 64)).unwrap();
    reading(&device, graph, &[node], other, 64).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    start(&device, exec, work).unwrap();
    let side = stream(&device, "side");
    assert!(touch(&device, side, other, 8, false).unwrap_err().is_race());
    device.stream_synchronize(work).unwrap();
    set(&device, exec, within, &filling(memory, 64)).unwrap().unwrap();
    assert!(start(&device, exec, work).unwrap_err().is_race());
    // Its flag must have been written.
    let fresh = device.alloc(4).unwrap();
    let graph = device.graph_create().unwrap();
    // SAFETY: the flag lives as long as the test.
    unsafe { device.graph_add_conditional(graph, &[], GraphCondition::While, fresh) }.unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    assert!(
        start(&device, exec, work).unwrap_err().to_string().contains("condition of a graph on stream `work` reads")
    );
}

#[test]
fn a_changed_node_of_an_exec_counts_with_its_new_accesses() {
    let device = device();
    let (work, side) = (stream(&device, "work"), stream(&device, "side"));
    let (memory, other) = (written(&device, 64), written(&device, 64));
    let make = |memory, other| {
        let graph = device.graph_create().unwrap();
        let one = add(&device, graph, &[], &filling(memory, 64)).unwrap();
        let two = add(&device, graph, &[], &filling(other, 32)).unwrap();
        (graph, one, two)
    };
    let (graph, one, two) = make(memory, other);
    let exec = device.graph_instantiate(graph).unwrap();
    // Nothing orders the two, which is found before they run.
    set(&device, exec, one, &filling(Address(other.0 + 16), 32)).unwrap().unwrap();
    for _ in 0..2 {
        let error = start(&device, exec, work).unwrap_err();
        assert!(error.is_race() && error.to_string().contains("no edge orders them"), "{error}");
    }
    // A disabled node conflicts with nothing.
    for passed_over in [one, two] {
        device.exec_enable(exec, passed_over, false).unwrap().unwrap();
        start(&device, exec, work).unwrap();
        device.exec_enable(exec, passed_over, true).unwrap().unwrap();
        assert!(start(&device, exec, work).unwrap_err().is_race());
    }
    device.stream_synchronize(work).unwrap();
    // They swap their accesses, one after the other.
    set(&device, exec, one, &filling(other, 32)).unwrap().unwrap();
    set(&device, exec, two, &filling(memory, 32)).unwrap().unwrap();
    start(&device, exec, work).unwrap();
    device.stream_synchronize(work).unwrap();
    set(&device, exec, two, &filling(other, 32)).unwrap().unwrap();
    set(&device, exec, one, &filling(Address(other.0 + 32), 32)).unwrap().unwrap();
    start(&device, exec, work).unwrap();
    touch(&device, side, memory, 64, true).unwrap();
    assert!(touch(&device, side, Address(other.0 + 32), 8, false).unwrap_err().is_race());
    device.stream_synchronize(work).unwrap();
    touch(&device, side, Address(other.0 + 32), 8, false).unwrap();
    assert!(start(&device, exec, work).unwrap_err().is_race());
    device.exec_enable(exec, one, false).unwrap().unwrap();
    start(&device, exec, work).unwrap();
    device.exec_enable(exec, one, true).unwrap().unwrap();
    assert!(start(&device, exec, work).unwrap_err().is_race());
    device.stream_synchronize(side).unwrap();
    device.stream_synchronize(work).unwrap();
    assert!(set(&device, exec, two, &NodeWork::Empty).unwrap().is_err());
    start(&device, exec, work).unwrap();
    assert!(touch(&device, side, other, 8, false).unwrap_err().is_race());
    device.stream_synchronize(work).unwrap();
    // SAFETY: as for `add`.
    unsafe { device.exec_update(exec, make(other, memory).0) }.unwrap().unwrap();
    start(&device, exec, work).unwrap();
    touch(&device, side, Address(memory.0 + 32), 32, true).unwrap();
    assert!(touch(&device, side, Address(other.0 + 48), 8, false).unwrap_err().is_race());
    device.stream_synchronize(work).unwrap();
}

#[test]
fn external_work_touches_what_it_says() {
    let device = device();
    let memory = device.alloc(64).unwrap();
    let graph = device.graph_create().unwrap();
    let external = |after: &[RawNode], name| {
        let (call, emulated) = (&mut |_| (), Some(Arc::new(|_: &[BodyArg]| ()) as _));
        // SAFETY: it touches nothing, whatever its arguments say.
        unsafe {
            device.graph_external(graph, after, ExternalWork { name, args: &slice(memory, 64, true), call, emulated })
        }
    };
    let first = external(&[], "gemm").unwrap();
    let error = external(&[], "norm").unwrap_err().to_string();
    assert!(error.contains("external work `norm` writes") && error.contains("external work `gemm` of"), "{error}");
    external(&first.ends, "norm").unwrap();
}

#[test]
fn memory_of_a_graph_exists_within_its_launches_only() {
    let device = device();
    let (work, out) = (stream(&device, "work"), device.alloc(64).unwrap());
    let graph = device.graph_create().unwrap();
    let (alloc, memory) = device.graph_add_alloc(graph, &[], 64).unwrap();
    assert!(add(&device, graph, &[], &filling(memory, 64)).unwrap_err().to_string().contains("allocation of the same"));
    let first = add(&device, graph, &[alloc], &filling(memory, 64)).unwrap();
    let (to, from) = (Endpoint::Device(out), Endpoint::Device(memory));
    let last = add(&device, graph, &[first], &NodeWork::Copy { to, from, bytes: 64 }).unwrap();
    assert!(add(&device, graph, &[first], &NodeWork::Free(memory)).unwrap_err().is_race());
    let freed = add(&device, graph, &[last], &NodeWork::Free(memory)).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    let error = fill(&device, work, memory, 1, 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidMemory, "before a launch");
    start(&device, exec, work).unwrap();
    start(&device, exec, work).unwrap();
    let error = fill(&device, work, memory, 1, 64).unwrap_err();
    assert!(error.to_string().contains("exists only within a launch of its graph"), "{error}");
    touch(&device, work, out, 64, false).unwrap();
    // The graph's own use after the free is found as well, and a read of fresh memory.
    set(&device, exec, first, &filling(out, 64)).unwrap().unwrap();
    assert_eq!(start(&device, exec, work).unwrap_err().kind(), ErrorKind::InvalidMemory);
    set(&device, exec, first, &filling(memory, 64)).unwrap().unwrap();
    start(&device, exec, work).unwrap();
    device.stream_synchronize(work).unwrap();
    // SAFETY: its launches are done.
    unsafe { device.exec_destroy(exec) };
    reading(&device, graph, &[freed], memory, 8).unwrap();
    let late = device.graph_instantiate(graph).unwrap();
    let error = start(&device, late, work).unwrap_err().to_string();
    assert!(error.contains("kernel `touch` of a graph") && error.contains("only within a launch"), "{error}");
    // SAFETY: it was never launched.
    unsafe { device.exec_destroy(late) };
    device.graph_destroy(graph);
    let error = fill(&device, work, memory, 1, 64).unwrap_err().to_string();
    assert!(error.contains("has freed"), "{error}");
    device.stream_synchronize(work).unwrap();
}

#[test]
fn events_and_functions_of_a_graph_are_order() {
    let device = device();
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let (memory, host) = (device.alloc(64).unwrap(), device.alloc_host(64).unwrap());
    let [before, after] = [(); 2].map(|()| device.event_create(false).unwrap());
    let graph = device.graph_create().unwrap();
    let wait = add(&device, graph, &[], &NodeWork::Wait(before)).unwrap();
    let first = add(&device, graph, &[wait], &touching(&slice(memory, 64, true))).unwrap();
    let record = add(&device, graph, &[first], &NodeWork::Record(after)).unwrap();
    let (to, from) = (Endpoint::Host(host.as_ptr()), Endpoint::Device(memory));
    let out = add(&device, graph, &[record], &NodeWork::Copy { to, from, bytes: 64 }).unwrap();
    let (sender, receiver) = mpsc::channel();
    add(&device, graph, &[out], &NodeWork::Host(Arc::new(move || sender.send(()).unwrap()))).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    fill(&device, b, memory, 1, 64).unwrap();
    assert!(start(&device, exec, a).unwrap_err().is_race());
    device.event_record(before, b).unwrap();
    // Once its function was called, the host has seen the launch's end, and later enqueues come after it.
    let go = hold(&device, a);
    start(&device, exec, a).unwrap();
    assert!(touch(&device, b, memory, 64, false).unwrap_err().is_race());
    device.stream_wait(b, after).unwrap();
    touch(&device, b, memory, 64, false).unwrap();
    drop(go);
    // The function was called: the host may access the memory.
    receiver.recv().unwrap();
    device.host_access(host.as_ptr(), 64, false).unwrap();
    // The next launch has not called it yet.
    join(&device, b, a);
    let go = hold(&device, a);
    start(&device, exec, a).unwrap();
    assert!(device.host_access(host.as_ptr(), 64, false).unwrap_err().is_race());
    drop(go);
    receiver.recv().unwrap();
    device.host_access(host.as_ptr(), 64, false).unwrap();
    device.event_destroy(before);
    assert_eq!(start(&device, exec, a).unwrap_err().kind(), ErrorKind::Usage);
    assert_eq!(add(&device, graph, &[], &NodeWork::Wait(before)).unwrap_err().kind(), ErrorKind::Usage);
    device.stream_synchronize(a).unwrap();
    device.stream_synchronize(b).unwrap();
}

#[test]
fn a_launch_that_the_device_refuses_leaves_no_trace() {
    let mock = Arc::new(super::super::mock::MockBackend::default());
    let device = checked(mock.clone());
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = device.alloc(64).unwrap();
    let (_, exec, _) = filler(&device, memory, 64);
    mock.refuse.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(start(&device, exec, a).unwrap_err().kind(), ErrorKind::Driver);
    mock.refuse.store(false, std::sync::atomic::Ordering::Relaxed);
    fill(&device, b, memory, 1, 64).unwrap();
    assert!(start(&device, exec, a).unwrap_err().is_race());
    // A launch that failed orders nothing either.
    let graph = device.graph_create().unwrap();
    reading(&device, graph, &[], memory, 64).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    mock.refuse.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(start(&device, exec, b).unwrap_err().kind(), ErrorKind::Driver);
    mock.refuse.store(false, std::sync::atomic::Ordering::Relaxed);
    assert!(start(&device, exec, a).unwrap_err().is_race());
    start(&device, exec, b).unwrap();
    start(&device, exec, a).unwrap();
}

#[test]
fn a_lost_device_is_lost_and_no_race() {
    let device = checked(emulated::open(Emulated::new().faults(Faults::new().trap_kernel("touch", 1))));
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = device.alloc(64).unwrap();
    let graph = device.graph_create().unwrap();
    add(&device, graph, &[], &touching(&slice(memory, 64, true))).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    start(&device, exec, a).unwrap();
    assert!(device.stream_synchronize(a).unwrap_err().is_device_lost());
    assert!(start(&device, exec, b).unwrap_err().is_device_lost());
    assert!(fill(&device, b, memory, 1, 64).unwrap_err().is_device_lost());
    assert!(add(&device, graph, &[], &filling(memory, 64)).unwrap_err().is_device_lost());
}

#[test]
fn what_a_graph_leaves_unordered_the_device_does_in_several_orders() {
    // Without the checker the same graph, with an edge absent, has two results.
    let results = [1, 2].map(|launches| {
        let device = emulated::open(Emulated::new());
        let (memory, work) = (device.alloc(1).unwrap(), stream(&device, "work"));
        let graph = device.graph_create().unwrap();
        for byte in [1, 2] {
            let work = NodeWork::Fill { to: memory, pattern: Pattern { width: 1, bits: byte }, bytes: 1 };
            add(&device, graph, &[], &work).unwrap();
        }
        let exec = device.graph_instantiate(graph).unwrap();
        (0..launches).for_each(|_| start(&device, exec, work).unwrap());
        let mut out = 0_u8;
        copy(&device, work, Endpoint::Host(&mut out), Endpoint::Device(memory), 1).unwrap();
        device.stream_synchronize(work).unwrap();
        out
    });
    assert_ne!(results[0], results[1]);
}

#[test]
fn a_launch_beside_a_slice_of_the_hosts_is_a_race() {
    let device = device();
    let (memory, host, work) = (device.alloc(64).unwrap(), device.alloc_host(64).unwrap(), stream(&device, "work"));
    let (there, here) = (Endpoint::Device(memory), Endpoint::Host(host.as_ptr()));
    let (out, back) =
        (NodeWork::Copy { to: here, from: there, bytes: 64 }, NodeWork::Copy { to: there, from: here, bytes: 64 });
    fill(&device, work, memory, 1, 64).unwrap();
    let made = |node_work: &NodeWork<'_>| {
        let graph = device.graph_create().unwrap();
        let node = add(&device, graph, &[], node_work).unwrap();
        (device.graph_instantiate(graph).unwrap(), node)
    };
    // Adding the node ended the borrows before it.
    device.host_borrow(host.as_ptr(), 64, true);
    let ((writes, node), (reads, _)) = (made(&out), made(&back));
    start(&device, writes, work).unwrap();
    start(&device, reads, work).unwrap();
    device.host_borrow(host.as_ptr(), 64, false);
    start(&device, reads, work).unwrap();
    let error = start(&device, writes, work).unwrap_err();
    let wanted = format!(
        "{0}: race: copy to host of a graph on stream `work` writes bytes 0..64 of pinned host memory #2 ({0}, 64 B), which \
         the host has borrowed as `&[_]` since the node was added; nothing orders them: a launch of the graph might run while \
         the slice is in use",
        device.name()
    );
    assert_eq!((error.kind(), error.to_string()), (ErrorKind::Race, wanted));
    device.host_borrow(host.as_ptr(), 64, true);
    let error = start(&device, reads, work).unwrap_err();
    assert!(error.is_race() && error.to_string().contains("as `&mut [_]`"), "{error}");
    // The node is set again, which needs the memory exclusively.
    set(&device, writes, node, &out).unwrap().unwrap();
    start(&device, writes, work).unwrap();
    // Borrows of other memory do not matter.
    let other = device.alloc_host(64).unwrap();
    device.host_borrow(other.as_ptr(), 64, true);
    start(&device, writes, work).unwrap();
    device.stream_synchronize(work).unwrap();
}
