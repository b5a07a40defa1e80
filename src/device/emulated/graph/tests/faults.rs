//! Conditional nodes, and faults in a launch.

use super::*;

/// Adds a node that decrements a counter and counts as a kernel.
fn countdown(device: &Device, graph: RawGraph, flag: Address) {
    let args = [Arg::Slice { address: flag, len: 1, bytes: 4, write: true }];
    let emulated = Some(Arc::new(|args: &[BodyArg]| {
        // SAFETY: the one argument is a `u32` that it may write.
        let count = unsafe { args[0].slice_mut::<u32>() };
        count[0] -= 1;
    }) as _);
    let call = &mut |_| ();
    // SAFETY: the replacement takes the one argument.
    unsafe { device.graph_external(graph, &[], ExternalWork { name: "countdown", args: &args, call, emulated }) }
        .unwrap();
}

#[test]
fn a_condition_is_evaluated_when_its_node_is_reached() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let (flag, memory) = (device.alloc(4).unwrap(), device.alloc(8).unwrap());
    let graph = device.graph_create().unwrap();
    let conditional = |when| {
        // SAFETY: the flag lives as long as the test.
        unsafe { device.graph_add_conditional(graph, &[], when, flag) }.unwrap()
    };
    let (node, body) = conditional(GraphCondition::If);
    add(&device, body, &[], &kernel(&INCREMENT, &bytes(memory, 8))).unwrap();
    fill(&device, work, memory, 0, 8);
    let once = device.graph_instantiate(graph).unwrap();
    for (value, wanted) in [(0, 0), (1, 1), (7, 2), (0, 2)] {
        raise(&device, work, flag, value);
        run(&device, once, work).unwrap();
        assert_eq!(read(&device, work, memory, 8), [wanted; 8]);
    }
    destroy(&device, once);
    device.graph_remove(graph, node).unwrap();
    assert!(add(&device, body, &[], &NodeWork::Empty).is_err(), "it was removed with its node");
    let (_, body) = conditional(GraphCondition::While);
    countdown(&device, body, flag);
    add(&device, body, &[], &kernel(&INCREMENT, &bytes(memory, 8))).unwrap();
    let again = device.graph_instantiate(graph).unwrap();
    raise(&device, work, flag, 5);
    run(&device, again, work).unwrap();
    assert_eq!(read(&device, work, memory, 8), [7; 8]);
    assert_eq!(read(&device, work, flag, 4), [0; 4]);
    // What a body cannot contain, and calls that a body does not support.
    let error = add(&device, body, &[], &NodeWork::Host(Arc::new(|| ()))).unwrap_err();
    assert!(error.to_string().contains("a host function cannot be in the body"), "{error}");
    assert!(device.graph_add_alloc(body, &[], 8).is_err());
    assert!(device.graph_instantiate(body).is_err());
    device.graph_destroy(body);
    add(&device, body, &[], &NodeWork::Empty).unwrap();
    // SAFETY: refused.
    assert!(unsafe { device.graph_add_conditional(graph, &[], GraphCondition::If, Address(flag.0 + 1)) }.is_err());
}

#[test]
fn a_loop_ends_with_its_device() {
    for within in [true, false] {
        let device = open(Emulated::new().workers(2));
        let (work, other) = (stream(&device, "work"), stream(&device, "other"));
        let flag = device.alloc(4).unwrap();
        let graph = device.graph_create().unwrap();
        raise(&device, work, flag, 1);
        // SAFETY: the flag lives as long as the test.
        let (_, body) = unsafe { device.graph_add_conditional(graph, &[], GraphCondition::While, flag) }.unwrap();
        let (sender, receiver) = mpsc::sync_channel(0);
        let sender = Mutex::new(sender);
        let emulated = Some(Arc::new(move |_: &[BodyArg]| {
            // The first round is reported; after that the loop goes on by itself.
            let _ = sender.lock().unwrap().try_send(());
            assert!(!within, "in a round");
        }) as _);
        let call = &mut |_| ();
        // SAFETY: it touches nothing.
        unsafe { device.graph_external(body, &[], ExternalWork { name: "round", args: &[], call, emulated }) }.unwrap();
        let exec = device.graph_instantiate(graph).unwrap();
        start(&device, exec, work).unwrap();
        if !within {
            receiver.recv().unwrap();
            launch(&device, other, &BOOM, &[]).unwrap();
        }
        let error = device.stream_synchronize(other).and_then(|()| device.stream_synchronize(work)).unwrap_err();
        assert!(error.is_device_lost(), "{error}");
        // The loop is over, and its rounds' functions are dropped.
        destroy(&device, exec);
        device.graph_destroy(graph);
        while receiver.recv().is_ok() {}
    }
}

#[test]
fn a_fault_in_a_node_is_the_devices_and_names_the_node() {
    let device = open(Emulated::new());
    let (work, after) = (stream(&device, "work"), Order::default());
    let graph = device.graph_create().unwrap();
    let boom = add(&device, graph, &[], &kernel(&BOOM, &[])).unwrap();
    note(&device, graph, &[boom], &after, "never");
    let exec = device.graph_instantiate(graph).unwrap();
    start(&device, exec, work).unwrap();
    let error = device.stream_synchronize(work).unwrap_err();
    let text = format!("{error:#}");
    assert!(error.is_device_lost() && taken(&after).is_empty());
    assert!(
        text.contains("graph of 2 steps on stream `work` failed")
            && text.contains("kernel `BOOM`: trapped: out of cheese"),
        "{text}"
    );
    assert!(start(&device, exec, work).unwrap_err().is_device_lost());
    assert!(device.graph_create().unwrap_err().is_device_lost());
    destroy(&device, exec);
    device.graph_destroy(graph);
    assert_eq!(Arc::strong_count(&after), 1, "no reference is kept");
}

#[test]
fn faults_can_be_planned_for_nodes() {
    let faults = Faults::new().trap_kernel("INCREMENT", 3).lose_host_function(1).fail_alloc(2);
    let device = open(Emulated::new().faults(faults));
    let (work, order) = (stream(&device, "work"), Order::default());
    let memory = device.alloc(8).unwrap();
    let graph = device.graph_create().unwrap();
    assert!(device.graph_add_alloc(graph, &[], 8).unwrap_err().is_out_of_memory());
    add(&device, graph, &[], &kernel(&INCREMENT, &bytes(memory, 8))).unwrap();
    note(&device, graph, &[], &order, "called");
    let exec = device.graph_instantiate(graph).unwrap();
    run(&device, exec, work).unwrap();
    assert_eq!(taken(&order).len(), 0, "lost");
    launch(&device, work, &INCREMENT, &bytes(memory, 8)).unwrap();
    device.stream_synchronize(work).unwrap();
    let error = format!("{:#}", run(&device, exec, work).unwrap_err());
    assert!(error.contains("kernel `INCREMENT`: trapped: a planned fault"), "{error}");

    let device = open(Emulated::new().faults(Faults::new().trap_kernel("countdown", 4).fail_copy(1)));
    let work = stream(&device, "work");
    let flag = device.alloc(4).unwrap();
    let graph = device.graph_create().unwrap();
    // SAFETY: the flag lives as long as the test.
    let (_, body) = unsafe { device.graph_add_conditional(graph, &[], GraphCondition::While, flag) }.unwrap();
    countdown(&device, body, flag);
    let exec = device.graph_instantiate(graph).unwrap();
    raise(&device, work, flag, 3);
    // Reading a flag does not count as a copy for a plan.
    run(&device, exec, work).unwrap();
    raise(&device, work, flag, 1);
    assert!(format!("{:#}", run(&device, exec, work).unwrap_err()).contains("external work `countdown`"));
}

#[test]
fn a_panic_of_a_function_is_contained() {
    let device = open(Emulated::new());
    let (work, order) = (stream(&device, "work"), Order::default());
    let graph = device.graph_create().unwrap();
    let first = add(&device, graph, &[], &NodeWork::Host(Arc::new(|| panic!("caught")))).unwrap();
    note(&device, graph, &[first], &order, "goes on");
    let exec = device.graph_instantiate(graph).unwrap();
    run(&device, exec, work).unwrap();
    assert_eq!(taken(&order), ["goes on"]);
}

#[test]
fn a_lost_device_drops_what_its_launches_held() {
    let device = open(Emulated::new());
    let (work, side, other) = (stream(&device, "work"), stream(&device, "side"), stream(&device, "other"));
    let held = Arc::new(());
    let graph = device.graph_create().unwrap();
    let kept = held.clone();
    add(&device, graph, &[], &NodeWork::Host(Arc::new(move || _ = &kept))).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_destroy(graph);
    let go = hold(&device, work);
    start(&device, exec, work).unwrap();
    start(&device, exec, side).unwrap();
    destroy(&device, exec);
    assert!(Arc::strong_count(&held) > 1, "two launches wait");
    launch(&device, other, &BOOM, &[]).unwrap();
    assert!(device.stream_synchronize(other).unwrap_err().is_device_lost());
    drop(go);
    while Arc::strong_count(&held) > 1 {
        std::thread::yield_now();
    }
}
