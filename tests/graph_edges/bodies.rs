//! Bodies of conditionals that do not end well: a panic, or a builder that is taken away. And what is recorded into a graph or
//! shown of one.

use std::panic::{AssertUnwindSafe, catch_unwind};

use wakeline::{
    graph::{Builder, Registry},
    stream::Timer,
};

use super::*;

const INCOMPLETE: &str = "the graph is incomplete";
const EXCHANGED: &str = "exchanged for another one";

/// Runs it and catches its panic.
fn panics<T>(run: impl FnOnce() -> T) {
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
}

/// The ways a body can give its builder away.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Returns,
    Fails,
    Panics,
}

const WAYS: [Way; 3] = [Way::Returns, Way::Fails, Way::Panics];

/// A graph with a conditional whose body puts another builder in the place of its own; and the body's, after `with`.
fn steal(
    device: &Device,
    flag: &Buffer<u32>,
    way: Way,
    with: impl FnOnce(&mut Builder) -> Result<()>,
) -> (Builder, Builder) {
    let mut graph = Graph::builder(device).unwrap();
    let mut stolen = Graph::builder(device).unwrap();
    let run = || {
        graph.run_if(&[], flag, |body| {
            with(body)?;
            std::mem::swap(body, &mut stolen);
            match way {
                Way::Returns => Ok(()),
                Way::Fails => Err(Error::new(ErrorKind::Usage, "given up")),
                Way::Panics => panic!("the body's own"),
            }
        })
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(made) => refused(made, &[if way == Way::Returns { EXCHANGED } else { "given up" }]),
        Err(_) => assert_eq!(way, Way::Panics),
    }
    (graph, stolen)
}

/// Nothing is added to it.
fn is_closed(builder: &mut Builder, flag: &Buffer<u32>, child: &Graph, data: &mut Buffer<u32>) {
    refused(builder.add(&[], |stream| stream.fill(data, 9)), &[INCOMPLETE]);
    refused(builder.join(&[]), &[INCOMPLETE]);
    refused(builder.host(&[], || ()), &[INCOMPLETE]);
    refused(builder.child(&[], child), &[INCOMPLETE]);
    refused(builder.alloc::<u32>(&[], 64), &[INCOMPLETE]);
    refused(builder.run_if(&[], flag, |_| Ok(())), &[INCOMPLETE]);
}

// The body panics after it has added nodes: those that follow in the graph would have no edge after them.
alone!(a_graph_whose_body_panicked_is_launched_without_an_edge, async |device: Device, stream: Stream| {
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let (child, ()) = Graph::capture(&device, |capture| capture.stream().alloc::<u32>(64).map(drop)).unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    panics(|| {
        graph.run_if(&[], &flag, |body| {
            body.add(&[], |stream| stream.fill(&mut data, 1))?;
            panic!("the body's own");
        })
    });
    is_closed(&mut graph, &flag, &child, &mut data);
    refused(graph.build(), &[INCOMPLETE]);
    // The memory is free again.
    stream.fill(&mut data, 2).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [2; 64]);
});

// The same in a loop, and in a body within a body whose panic the outer one catches.
alone!(a_panic_within_a_body_of_a_body_is_not_hidden_by_the_outer_one, async |device: Device, stream: Stream| {
    let (mut flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let other = buffer(&stream, 1).await;
    let mut graph = Graph::builder(&device).unwrap();
    let made = graph.run_while(&[], &mut flag, |body, flag| {
        panics(|| {
            body.run_if(&[], &other, |inner| {
                inner.add(&[], |stream| stream.fill(&mut data, 1))?;
                panic!("the body's own");
            })
        });
        // Whatever comes of this.
        let _ = body.add(&[], |stream| stream.fill(flag, 0));
        Ok(())
    });
    refused(made, &[INCOMPLETE]);
    refused(graph.build(), &[INCOMPLETE]);
});

// A body's builder that is kept adds nodes behind the back of the graph around it, also after that was built or dropped.
alone!(a_body_that_was_taken_away_adds_to_a_graph_that_is_over, async |device: Device, stream: Stream| {
    let flag = buffer(&stream, 1).await;
    let mut data = buffer(&stream, 0).await;
    let child = fills(&mut data, 3);
    for way in WAYS {
        let (graph, mut stolen) = steal(&device, &flag, way, |body| body.join(&[]).map(drop));
        is_closed(&mut stolen, &flag, &child, &mut data);
        drop(graph);
        is_closed(&mut stolen, &flag, &child, &mut data);
        refused(stolen.build(), &["a conditional's body"]);

        let (mut graph, mut stolen) = steal(&device, &flag, way, |body| body.join(&[]).map(drop));
        is_closed(&mut graph, &flag, &child, &mut data);
        refused(graph.build(), &[INCOMPLETE]);
        is_closed(&mut stolen, &flag, &child, &mut data);
    }
});

// A body is built on its own, while it is made: an exec of it would be one of a part of another graph.
alone!(a_body_is_built_as_a_graph_of_its_own, async |device: Device, stream: Stream| {
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let mut graph = Graph::builder(&device).unwrap();
    let made = graph.run_if(&[], &flag, |body| {
        body.add(&[], |stream| stream.fill(&mut data, 1))?;
        let body = std::mem::replace(body, Graph::builder(&device)?);
        refused(body.build(), &["a conditional's body"]);
        Ok(())
    });
    refused(made, &[EXCHANGED]);
    refused(graph.build(), &[INCOMPLETE]);
});

// A builder that was taken away to another thread is in a body of its own when the graph around both is dropped.
alone!(a_body_of_a_body_that_was_taken_away_outlives_the_graph, async |device: Device, stream: Stream| {
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let (tell, entered) = mpsc::channel();
    let (go, went) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut graph = Graph::builder(&device).unwrap();
        let (flag, data) = (&flag, &mut data);
        let made = graph.run_if(&[], flag, |body| {
            let mut body = std::mem::replace(body, Graph::builder(&device)?);
            scope.spawn(move || {
                let made = body.run_if(&[], flag, |inner| {
                    inner.join(&[])?;
                    tell.send(()).unwrap();
                    went.recv().unwrap();
                    refused(inner.add(&[], |stream| stream.fill(data, 9)), &[INCOMPLETE]);
                    refused(inner.run_if(&[], flag, |_| Ok(())), &[INCOMPLETE]);
                    Ok(())
                });
                refused(made, &[INCOMPLETE]);
            });
            entered.recv().unwrap();
            Ok(())
        });
        refused(made, &[EXCHANGED]);
        drop(graph);
        go.send(()).unwrap();
    });
});

// What a body that was taken away has added is used by nodes of the graph that it was taken from: a child's own memory.
alone!(a_child_of_a_body_that_was_taken_away_loses_its_memory, async |device: Device, stream: Stream| {
    let flag = buffer(&stream, 1).await;
    for way in WAYS {
        let (child, address) = Graph::capture(&device, |capture| {
            let mut scratch = capture.stream().alloc::<u32>(64)?;
            capture.stream().fill(&mut scratch, 1)?;
            scratch.device_address()
        })
        .unwrap();
        let (graph, stolen) = steal(&device, &flag, way, |body| body.child(&[], &child).map(drop));
        drop((stolen, child));
        assert!(!is_handed_out(&device, address), "{way:?}: a node of a graph that is there writes to it");
        drop(graph);
        assert!(is_handed_out(&device, address), "{way:?}: it is kept for ever");
    }
});

// A body that fails is as it was: what it added stays in its place, before what comes later.
alone!(holds_a_body_that_fails_is_in_order_with_later_nodes, async |device: Device, stream: Stream| {
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let one = buffer(&stream, 1).await;
    let mut graph = Graph::builder(&device).unwrap();
    let made = graph.run_if(&[], &flag, |body| {
        body.add(&[], |stream| stream.fill(&mut data, 4))?;
        Err::<(), _>(Error::new(ErrorKind::Usage, "given up"))
    });
    refused(made, &["given up"]);
    graph.add(&[], |stream| add_to::launch(stream, &mut data, &one)).unwrap();
    graph.build().unwrap().instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [5; 64]);
});

// The body of a condition comes after all nodes so far, and so must the nodes of a stream that was kept.
alone!(a_stream_that_a_panicking_function_kept_is_open, async |device: Device, stream: Stream| {
    let flag = buffer(&stream, 1).await;
    let mut data = buffer(&stream, 0).await;
    let mut other = buffer(&stream, 0).await;
    let mut graph = Graph::builder(&device).unwrap();
    let mut kept = None;
    panics(|| {
        graph.add(&[], |stream| {
            kept = Some(stream.clone());
            panic!("after it has kept the stream");
        })
    });
    let kept = kept.unwrap();
    graph.run_if(&[], &flag, |body| body.add(&[], |stream| stream.fill(&mut data, 1)).map(drop)).unwrap();
    refused(kept.fill(&mut other, 2), &["of a node that was added"]);
    assert_eq!(graph.build().unwrap().nodes().len(), 1);
});

// A timer's events are gone with the timer, and the graph's nodes would record them at each launch.
alone!(a_timer_in_a_capture_leaves_nodes_that_record_its_events, async |device: Device, stream: Stream| {
    let mut data = buffer(&stream, 0).await;
    let (graph, ()) = Graph::capture(&device, |capture| {
        refused(Timer::start(capture.stream()), &["is captured"]);
        capture.stream().fill(&mut data, 1)
    })
    .unwrap();
    assert_eq!(graph.nodes().len(), 1);
    let mut built = Graph::builder(&device).unwrap();
    let added = built.add(&[], |stream| Timer::start(stream).map(drop));
    refused(added, &["is captured"]);
    assert!(built.build().unwrap().nodes().is_empty());
    // Around a launch.
    let timer = Timer::start(&stream).unwrap();
    graph.instantiate().unwrap().launch(&stream).unwrap();
    timer.stop().unwrap().await.unwrap();
});

/// Fills one buffer and another, and calls the host.
fn fills_both(device: &Device, one: &mut Buffer<u32>, other: &mut Buffer<u32>) -> Graph {
    let mut graph = Graph::builder(device).unwrap();
    graph.add(&[], |stream| stream.fill(one, 1)).unwrap();
    graph.add(&[], |stream| stream.fill(other, 5)).unwrap();
    graph.host(&[], || ()).unwrap();
    graph.build().unwrap()
}

/// Calls it when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

// An update lets go of what a node was set to, whose destructor sets another node: to write what the new graph writes, too.
alone!(a_set_within_an_update_is_checked_against_the_graph_before, async |device: Device, stream: Stream| {
    let [mut x, mut y, mut z] = [0; 3].map(|_| Buffer::<u32>::new(&device, 64).unwrap());
    let mut q = buffer(&stream, 0).await;
    let (before, after) = (fills_both(&device, &mut x, &mut y), fills_both(&device, &mut z, &mut q));
    let nodes = before.nodes();
    let exec = Arc::new(before.instantiate().unwrap());
    let (tell, told) = mpsc::channel();
    let (weak, node) = (Arc::downgrade(&exec), nodes[0].node);
    let mut q = Some(q);
    let sets = std::sync::Mutex::new(OnDrop(move || {
        let (exec, mut q) = (weak.upgrade().unwrap(), q.take().unwrap());
        tell.send((exec.set(node, |stream| stream.fill(&mut q, 9)), q)).unwrap();
    }));
    exec.set(nodes[2].node, |stream| stream.host_callback(move || _ = &sets)).unwrap();
    exec.update(&after).unwrap();
    let (set, q) = told.recv().unwrap();
    refused(set, &["uses the same memory"]);
    exec.launch(&stream).unwrap();
    assert_eq!(q.to_vec(&stream).await.unwrap(), [5; 64]);
});

// What is set and refused is dropped when the exec can be used again.
alone!(holds_what_a_refused_set_drops_may_use_the_exec, async |device: Device, stream: Stream| {
    let [mut x, mut y] = [0; 2].map(|_| Buffer::<u32>::new(&device, 64).unwrap());
    let graph = fills_both(&device, &mut x, &mut y);
    let nodes = graph.nodes();
    let exec = Arc::new(graph.instantiate().unwrap());
    let (tell, told) = mpsc::channel();
    let (weak, node) = (Arc::downgrade(&exec), nodes[0].node);
    let mut mine = Some(Buffer::<u32>::new(&device, 64).unwrap());
    let sets = std::sync::Mutex::new(OnDrop(move || {
        let mut mine = mine.take().unwrap();
        tell.send(weak.upgrade().unwrap().set(node, |stream| stream.fill(&mut mine, 9))).unwrap();
    }));
    refused(exec.set(nodes[1].node, |stream| stream.host_callback(move || _ = &sets)), &["is not changed"]);
    told.recv().unwrap().unwrap();
    exec.launch(&stream).unwrap();
    stream.completed().await.unwrap();
});

/// Calls it for each piece that is written.
struct Writer<F: FnMut()>(F);

impl<F: FnMut()> std::fmt::Write for Writer<F> {
    fn write_str(&mut self, _: &str) -> std::fmt::Result {
        (self.0)();
        Ok(())
    }
}

// A writer that looks at what is written there.
alone!(a_writer_of_a_graph_hangs_if_it_looks_at_it, async |device: Device, _| {
    use std::fmt::Write;
    let mut builder = Graph::builder(&device).unwrap();
    builder.join(&[]).unwrap();
    write!(Writer(|| _ = format!("{device:?}")), "{builder:?}").unwrap();
    let graph = builder.build().unwrap();
    write!(Writer(|| _ = graph.nodes()), "{graph:?}").unwrap();
    let registry = Registry::new();
    registry.add("model", &graph).unwrap();
    write!(Writer(|| assert_eq!(registry.count("model"), 1)), "{registry:?}").unwrap();
    assert_eq!(format!("{registry:?}"), r#"{"model": 1}"#);
    let exec = registry.get("model", 0).unwrap();
    write!(Writer(|| _ = exec.graph().nodes()), "{exec:?}").unwrap();
    registry.remove("model").unwrap();
});

/// The most levels of graphs within each other.
const LEVELS: usize = 64;

/// Conditionals within each other, so many, and what is in the innermost.
fn nested(
    body: &mut Builder,
    flag: &Buffer<u32>,
    levels: usize,
    innermost: &mut dyn FnMut(&mut Builder) -> Result<()>,
) -> Result<()> {
    match levels {
        0 => innermost(body),
        _ => body.run_if(&[], flag, |body| nested(body, flag, levels - 1, innermost)).map(drop),
    }
}

/// A graph with others within each other, so many, of which the innermost is this.
fn wrapped(device: &Device, innermost: &Graph, levels: usize) -> Result<Graph> {
    let mut graph = innermost.clone();
    for _ in 0..levels {
        let mut around = Graph::builder(device)?;
        around.child(&[], &graph)?;
        graph = around.build()?;
    }
    Ok(graph)
}

// What walks through graphs within graphs takes stack for each level, on threads whose stack is not the caller's: the device's
// workers.
#[tokio::test]
async fn conditionals_within_each_other_are_bounded() {
    let device = emulated();
    let [stream] = streams(&device);
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let mut graph = Graph::builder(&device).unwrap();
    let add = &mut |body: &mut Builder| body.add(&[], |stream| stream.fill(&mut data, 7)).map(drop);
    nested(&mut graph, &flag, LEVELS, add).unwrap();
    graph.build().unwrap().instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [7; 64]);

    let mut graph = Graph::builder(&device).unwrap();
    let made = nested(&mut graph, &flag, LEVELS + 1, &mut |_| panic!("there is no such level"));
    refused(made, &["65 levels", "at most 64", "beside each other"]);
    assert!(graph.build().is_ok(), "only the innermost is missing");
}

#[tokio::test]
async fn children_within_each_other_are_bounded() {
    let device = emulated();
    let [stream] = streams(&device);
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let (innermost, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 7)).unwrap();
    let deepest = wrapped(&device, &innermost, LEVELS).unwrap();
    deepest.instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [7; 64]);
    refused(wrapped(&device, &deepest, 1), &["65 levels", "at most 64"]);

    // Both count, and a graph's levels are those of its deepest node.
    let child = wrapped(&device, &innermost, 3).unwrap();
    let add = &mut |body: &mut Builder| {
        body.child(&[], &child)?;
        body.child(&[], &innermost).map(drop)
    };
    let mut graph = Graph::builder(&device).unwrap();
    nested(&mut graph, &flag, LEVELS - 4, add).unwrap();
    assert!(graph.build().is_ok());
    let mut graph = Graph::builder(&device).unwrap();
    refused(nested(&mut graph, &flag, LEVELS - 3, add), &["65 levels"]);
}

// Each level doubles what a device has to hold: there are 1,048,574 nodes within a graph of 19 levels.
#[test]
fn children_that_are_added_twice_at_each_level_are_bounded() {
    let device = Device::emulated(wakeline::device::Emulated::new());
    let mut graph = Graph::builder(&device).unwrap().build().unwrap();
    for level in 1.. {
        let mut around = Graph::builder(&device).unwrap();
        around.child(&[], &graph).unwrap();
        let second = around.child(&[], &graph);
        if level == 20 {
            refused(second, &["2097148 nodes", "at most 1048576", "launch a child several times"]);
            // What was added before, around and within a body counts, too.
            let stream = Stream::new(&device).unwrap();
            let flag = Buffer::from_slice(&stream, &[0_u32]).unwrap();
            let body = |body: &mut Builder| body.child(&[], &graph).map(drop);
            refused(around.run_if(&[], &flag, body), &["2097148 nodes"]);
            let mut around = Graph::builder(&device).unwrap();
            around.run_if(&[], &flag, body).unwrap();
            refused(around.run_if(&[], &flag, body), &["2097149 nodes"]);
            break;
        }
        second.unwrap();
        graph = around.build().unwrap();
    }
}
