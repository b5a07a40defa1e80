//! Conditional nodes, whose bodies run depending on a flag.

use super::*;

#[test]
#[ignore = "needs a GPU"]
fn conditions_are_evaluated_when_they_are_reached() {
    let bench = Bench::get();
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
    let (node, body) = conditional(graph, &[first], GraphCondition::If);
    bench.add(body, &[], &fill(x, 2, 4));
    bench.add(graph, &[node], &copy(Endpoint::Device(Address(x.0 + 4)), Endpoint::Device(x), 4));
    let exec = bench.exec(graph);
    for (set, expected) in [(0, 1), (1, 2), (0, 1), (0x8000_0000, 2)] {
        bench.put_number(flag, set);
        bench.launch(exec);
        assert_eq!(bench.number(Address(x.0 + 4)), expected, "the flag is {set}");
    }
    let error = device.graph_remove(graph, node).unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("condition"), "{error}");
    let (_, function) = counter();
    // SAFETY: the node is refused, or never launched.
    let host = unsafe { device.graph_add(body, &[], &NodeWork::Host(function)) };
    let refused = host.err().or_else(|| device.graph_instantiate(graph).err());
    assert!(refused.is_some(), "no host function can be there");
    bench.end(&[exec], &[graph]);
}

#[test]
#[ignore = "needs a GPU"]
fn loops_run_until_their_flag_is_zero() {
    let bench = Bench::get();
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
        let made = unsafe { device.graph_add_conditional(graph, &[first], GraphCondition::While, flag) };
        let (node, body) = made.unwrap();
        let counted = bench.add(body, &[], &countdown);
        bench.add(graph, &[node], &copy(Endpoint::Device(Address(x.0 + 4)), Endpoint::Device(x), 4));
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
    let error = device.graph_instantiate(graph).unwrap_err();
    assert_reports(&error, &["has conditional nodes", "one exec at a time"]);
    let outer = bench.graph();
    // SAFETY: the node is refused.
    let child = unsafe { device.graph_add(outer, &[], &NodeWork::Child(graph)) };
    assert_reports(&child.unwrap_err(), &["has conditional nodes", "cannot be a child"]);
    // A second exec of the same graph, then one of the graph with more nodes.
    bench.end(&[exec], &[outer]);
    let exec = bench.exec(graph);
    run(exec, 2, 2);
    bench.end(&[exec], &[]);
    bench.add(body, &[counted], &fill(Address(x.0 + 8), 7, 4));
    bench.add(body, &[], &NodeWork::Empty);
    let longer = bench.exec(graph);
    run(longer, 3, 3);
    assert_eq!(bench.number(Address(x.0 + 8)), 7);
    // Whether or not the driver accepts an update from an identical graph, the exec loops afterwards.
    let (same, ..) = build();
    if let Err(refused) = bench.update(longer, same) {
        assert!(!refused.why.is_empty());
    }
    run(longer, 4, 4);
    bench.end(&[longer], &[graph, same]);
}
