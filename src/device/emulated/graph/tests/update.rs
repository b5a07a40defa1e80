//! Updates of execs.

use super::*;

#[test]
fn an_exec_takes_other_parameters_of_the_same_graph() {
    let device = open(Emulated::new());
    let (work, order) = (stream(&device, "work"), Order::default());
    let memory = device.alloc(8).unwrap();
    let make = |byte, who, edge: bool| {
        let graph = device.graph_create().unwrap();
        let fill = add(&device, graph, &[], &filling(memory, byte, 8)).unwrap();
        let up = add(&device, graph, &[fill], &kernel(&INCREMENT, &bytes(memory, 4))).unwrap();
        let after: &[RawNode] = if edge { &[up] } else { &[] };
        let last = note(&device, graph, after, &order, who);
        (graph, fill, up, last)
    };
    let (graph, fill, up, last) = make(1, "first", true);
    let exec = device.graph_instantiate(graph).unwrap();
    let state = |exec| {
        run(&device, exec, work).unwrap();
        (read(&device, work, memory, 8), taken(&order)[0])
    };
    assert_eq!(state(exec), (vec![2, 2, 2, 2, 1, 1, 1, 1], "first"));
    // A launch in flight keeps its old parameters.
    let go = hold(&device, work);
    start(&device, exec, work).unwrap();
    update(&device, exec, make(5, "second", true).0).unwrap().unwrap();
    drop(go);
    device.stream_synchronize(work).unwrap();
    assert_eq!((read(&device, work, memory, 2), taken(&order)), (vec![2, 2], vec!["first"]));
    assert_eq!(state(exec), (vec![6, 6, 6, 6, 5, 5, 5, 5], "second"));
    // Another topology, fewer nodes, another kind: refused without effect.
    let (other, .., loose) = make(7, "third", false);
    let refused = update(&device, exec, other).unwrap().unwrap_err();
    assert!(refused.node == Some(loose) && refused.why.contains("topology"), "{refused:?}");
    device.graph_remove(other, loose).unwrap();
    let refused = update(&device, exec, other).unwrap().unwrap_err();
    assert!(refused.node.is_none() && refused.why.contains("2 nodes instead of 3"), "{refused:?}");
    let empty = add(&device, other, &[], &NodeWork::Empty).unwrap();
    device.graph_remove(other, empty).unwrap();
    let (kinds, .., up_too) = {
        let graph = device.graph_create().unwrap();
        let fill = add(&device, graph, &[], &filling(memory, 0, 8)).unwrap();
        let none = add(&device, graph, &[fill], &NodeWork::Empty).unwrap();
        note(&device, graph, &[none], &order, "kinds");
        (graph, fill, none)
    };
    let refused = update(&device, exec, kinds).unwrap().unwrap_err();
    assert_eq!((refused.node, &*refused.why), (Some(up_too), "it is a kernel and cannot be an empty node"));
    assert_eq!(state(exec), (vec![6, 6, 6, 6, 5, 5, 5, 5], "second"));
    set(&device, exec, fill, &filling(memory, 9, 6)).unwrap().unwrap();
    set(&device, exec, up, &kernel(&INCREMENT, &bytes(memory, 2))).unwrap().unwrap();
    assert_eq!(state(exec), (vec![10, 10, 9, 9, 9, 9, 5, 5], "second"));
    let refused = set(&device, exec, up, &kernel(&BOOM, &[])).unwrap().unwrap_err();
    assert!(refused.node == Some(up) && refused.why.contains("`INCREMENT` and cannot run `BOOM`"), "{refused:?}");
    assert!(set(&device, exec, last, &NodeWork::Empty).unwrap().is_err());
    assert!(set(&device, exec, fill, &NodeWork::Free(memory)).unwrap().is_err());
    assert!(set(&device, exec, up_too, &NodeWork::Empty).is_err(), "another graph's node");
    let wide = NodeWork::Fill { to: memory, pattern: Pattern { width: 4, bits: 0 }, bytes: 6 };
    assert_eq!(set(&device, exec, fill, &wide).unwrap_err().kind(), ErrorKind::Driver);
    device.exec_enable(exec, up, false).unwrap().unwrap();
    assert_eq!(state(exec).0[..2], [9, 9]);
    // An update changes what nodes do, but not whether they are enabled.
    update(&device, exec, graph).unwrap().unwrap();
    assert_eq!(state(exec), (vec![1; 8], "first"));
    device.exec_enable(exec, up, true).unwrap().unwrap();
    assert_eq!(state(exec).0[..2], [2, 2]);
    let refused = device.exec_enable(exec, last, false).unwrap().unwrap_err();
    assert!(refused.why.contains("only kernels, copies and fills"), "{refused:?}");
    let fresh = device.graph_instantiate(graph).unwrap();
    assert_eq!(state(fresh), (vec![2, 2, 2, 2, 1, 1, 1, 1], "first"));
}

#[test]
fn children_bodies_and_copies_are_updated_and_compared() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let (memory, flag) = (device.alloc(8).unwrap(), device.alloc(4).unwrap());
    let mut host = [7_u8; 8];
    let make = |byte, when, from: Endpoint, copies: bool| {
        let (graph, child) = (device.graph_create().unwrap(), device.graph_create().unwrap());
        if copies {
            add(&device, child, &[], &NodeWork::Copy { to: Endpoint::Device(memory), from, bytes: 4 }).unwrap();
        } else {
            add(&device, child, &[], &NodeWork::Empty).unwrap();
        }
        let first = add(&device, graph, &[], &NodeWork::Child(child)).unwrap();
        // SAFETY: the flag lives as long as the test.
        let (node, body) = unsafe { device.graph_add_conditional(graph, &[first], when, flag) }.unwrap();
        let fill = add(&device, body, &[], &filling(Address(memory.0 + 4), byte, 4)).unwrap();
        (graph, first, node, fill)
    };
    let from = Endpoint::Host(host.as_mut_ptr());
    raise(&device, work, flag, 1);
    let (graph, first, _, fill) = make(1, GraphCondition::If, from, true);
    let exec = device.graph_instantiate(graph).unwrap();
    run(&device, exec, work).unwrap();
    assert_eq!(read(&device, work, memory, 8), [7, 7, 7, 7, 1, 1, 1, 1]);
    update(&device, exec, make(2, GraphCondition::If, from, true).0).unwrap().unwrap();
    run(&device, exec, work).unwrap();
    assert_eq!(read(&device, work, memory, 8)[4..], [2; 4]);
    set(&device, exec, fill, &filling(Address(memory.0 + 4), 3, 4)).unwrap().unwrap();
    run(&device, exec, work).unwrap();
    assert_eq!(read(&device, work, memory, 8)[4..], [3; 4]);
    let (other, _, node, _) = make(4, GraphCondition::While, from, true);
    let refused = update(&device, exec, other).unwrap().unwrap_err();
    assert!(refused.node == Some(node) && refused.why.contains("While"), "{refused:?}");
    let (other, child, ..) = make(4, GraphCondition::If, from, false);
    let refused = update(&device, exec, other).unwrap().unwrap_err();
    assert!(refused.node == Some(child) && refused.why.contains("in its child graph: it is a copy"), "{refused:?}");
    let (other, child, ..) = make(4, GraphCondition::If, Endpoint::Device(flag), true);
    let refused = update(&device, exec, other).unwrap().unwrap_err();
    assert!(refused.node == Some(child) && refused.why.contains("cannot copy on the device"), "{refused:?}");
    // A child is set as a whole.
    let child = device.graph_create().unwrap();
    let from = Endpoint::Host(host[4..].as_mut_ptr());
    add(&device, child, &[], &NodeWork::Copy { to: Endpoint::Device(memory), from, bytes: 2 }).unwrap();
    set(&device, exec, first, &NodeWork::Child(child)).unwrap().unwrap();
    device.exec_enable(exec, fill, false).unwrap().unwrap();
    host[4..].fill(8);
    run(&device, exec, work).unwrap();
    assert_eq!(read(&device, work, memory, 8), [8, 8, 7, 7, 3, 3, 3, 3]);
}

#[test]
fn an_update_visits_few_nodes_for_each_and_a_launch_none() {
    const NODES: usize = 1000;
    let device = open(Emulated::new());
    let (work, memory) = (stream(&device, "work"), device.alloc(8).unwrap());
    let make = |byte| {
        let graph = device.graph_create().unwrap();
        let mut last: Option<RawNode> = None;
        for _ in 0..NODES {
            last = Some(add(&device, graph, last.as_slice(), &filling(memory, byte, 8)).unwrap());
        }
        graph
    };
    let (for_one, graph) = visits(|| make(1));
    assert!((NODES..NODES * 32).contains(&for_one), "{for_one} to make it");
    let exec = device.graph_instantiate(graph).unwrap();
    let other = make(2);
    let (for_all, updated) = visits(|| update(&device, exec, other).unwrap());
    updated.unwrap();
    assert!((NODES..NODES * 32).contains(&for_all), "{for_all} for {NODES} nodes");
    let go = hold(&device, work);
    let (for_launch, launched) = visits(|| start(&device, exec, work));
    launched.unwrap();
    assert_eq!(for_launch, 0, "a launch delays launches on other devices");
    drop(go);
    device.stream_synchronize(work).unwrap();
    assert_eq!(read(&device, work, memory, 8), vec![2; 8]);
}
