//! Bodies of conditionals that fail: by a panic, or because their builder is taken away. And what is recorded into a
//! graph or displayed of one.

use std::panic::{AssertUnwindSafe, catch_unwind};

use wakeline::{
    graph::{Builder, Registry},
    stream::Timer,
};

use super::*;

const INCOMPLETE: &str = "the graph is incomplete";
const EXCHANGED: &str = "replaced by another one";

/// Runs the closure and catches its panic.
fn panics<T>(run: impl FnOnce() -> T) {
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
}

/// How a body ends after it has given its builder away.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Returns,
    Fails,
    Panics,
}

const WAYS: [Way; 3] = [Way::Returns, Way::Fails, Way::Panics];

/// Returns a graph with a conditional whose body replaced its own builder by another one, and the body's builder, after
/// `with` was called with it.
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
                Way::Fails => Err(Error::new(ErrorKind::Usage, "rejected by the test")),
                Way::Panics => panic!("a panic of the body"),
            }
        })
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(made) => refused(made, &[if way == Way::Returns { EXCHANGED } else { "rejected by the test" }]),
        Err(_) => assert_eq!(way, Way::Panics),
    }
    (graph, stolen)
}

/// Asserts that every call that adds to the builder is refused.
fn is_closed(builder: &mut Builder, flag: &Buffer<u32>, child: &Graph, data: &mut Buffer<u32>) {
    refused(builder.add(&[], |stream| stream.fill(data, 9)), &[INCOMPLETE]);
    refused(builder.join(&[]), &[INCOMPLETE]);
    refused(builder.host(&[], || ()), &[INCOMPLETE]);
    refused(builder.child(&[], child), &[INCOMPLETE]);
    refused(builder.alloc::<u32>(&[], 64), &[INCOMPLETE]);
    refused(builder.run_if(&[], flag, |_| Ok(())), &[INCOMPLETE]);
}

// The body panics after it has added nodes: later nodes of the graph would have no edge after them.
alone!(a_graph_whose_body_panicked_is_incomplete, async |device: Device, stream: Stream| {
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let (child, ()) = Graph::capture(&device, |capture| capture.stream().alloc::<u32>(64).map(drop)).unwrap();
    let mut graph = Graph::builder(&device).unwrap();
    panics(|| {
        graph.run_if(&[], &flag, |body| {
            body.add(&[], |stream| stream.fill(&mut data, 1))?;
            panic!("a panic of the body");
        })
    });
    is_closed(&mut graph, &flag, &child, &mut data);
    refused(graph.build(), &[INCOMPLETE]);
    // The memory is usable again.
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
                panic!("a panic of the body");
            })
        });
        // The result does not matter.
        let _ = body.add(&[], |stream| stream.fill(flag, 0));
        Ok(())
    });
    refused(made, &[INCOMPLETE]);
    refused(graph.build(), &[INCOMPLETE]);
});

// A body's builder that is taken away must not add nodes to the outer graph, also after that was built or dropped.
alone!(a_builder_that_was_taken_from_a_body_is_closed, async |device: Device, stream: Stream| {
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

// Building a body on its own is refused: an exec of it would be one of a part of another graph.
alone!(a_body_cannot_be_built_as_a_graph, async |device: Device, stream: Stream| {
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

// A builder that was taken to another thread is in a nested body there when the outer graph is dropped.
alone!(a_nested_body_on_another_thread_may_outlive_the_graph, async |device: Device, stream: Stream| {
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let (sender, entered) = mpsc::channel();
    let (go, went) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut graph = Graph::builder(&device).unwrap();
        let (flag, data) = (&flag, &mut data);
        let made = graph.run_if(&[], flag, |body| {
            let mut body = std::mem::replace(body, Graph::builder(&device)?);
            scope.spawn(move || {
                let made = body.run_if(&[], flag, |inner| {
                    inner.join(&[])?;
                    sender.send(()).unwrap();
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

// Nodes that a taken builder has added use a child's own memory: it is kept as long as the graph that has the nodes.
alone!(a_child_of_a_taken_body_keeps_its_memory, async |device: Device, stream: Stream| {
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
        assert!(!is_handed_out(&device, address), "{way:?}: a node of a live graph writes to it");
        drop(graph);
        assert!(is_handed_out(&device, address), "{way:?}: the memory is leaked");
    }
});

// The nodes of a body that fails stay in the graph, before later nodes.
alone!(holds_nodes_of_a_failed_body_are_ordered_before_later_nodes, async |device: Device, stream: Stream| {
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let one = buffer(&stream, 1).await;
    let mut graph = Graph::builder(&device).unwrap();
    let made = graph.run_if(&[], &flag, |body| {
        body.add(&[], |stream| stream.fill(&mut data, 4))?;
        Err::<(), _>(Error::new(ErrorKind::Usage, "rejected by the test"))
    });
    refused(made, &["rejected by the test"]);
    graph.add(&[], |stream| add_to::launch(stream, &mut data, &one)).unwrap();
    graph.build().unwrap().instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [5; 64]);
});

// The body of a conditional comes after all nodes so far; nodes of a stream that was kept would have to as well, so the
// stream is closed.
alone!(a_stream_that_a_panicking_function_kept_is_closed, async |device: Device, stream: Stream| {
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
    refused(kept.fill(&mut other, 2), &["a node that was added"]);
    assert_eq!(graph.build().unwrap().nodes().len(), 1);
});

// A timer's events are destroyed with the timer, while the graph's nodes would record them at each launch.
alone!(a_timer_in_a_capture_is_refused, async |device: Device, stream: Stream| {
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
    // A timer around a launch works.
    let timer = Timer::start(&stream).unwrap();
    graph.instantiate().unwrap().launch(&stream).unwrap();
    timer.stop().unwrap().await.unwrap();
});

/// A graph that fills both buffers and calls the host.
fn fills_both(device: &Device, one: &mut Buffer<u32>, other: &mut Buffer<u32>) -> Graph {
    let mut graph = Graph::builder(device).unwrap();
    graph.add(&[], |stream| stream.fill(one, 1)).unwrap();
    graph.add(&[], |stream| stream.fill(other, 5)).unwrap();
    graph.host(&[], || ()).unwrap();
    graph.build().unwrap()
}

/// Calls the closure when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

// An update drops a callback that a node was set to. Its destructor sets another node to write memory that the new
// graph writes too, which is refused.
alone!(a_set_within_an_update_is_checked_against_the_new_graph, async |device: Device, stream: Stream| {
    let [mut x, mut y, mut z] = [0; 3].map(|_| Buffer::<u32>::new(&device, 64).unwrap());
    let mut q = buffer(&stream, 0).await;
    let (before, after) = (fills_both(&device, &mut x, &mut y), fills_both(&device, &mut z, &mut q));
    let nodes = before.nodes();
    let exec = Arc::new(before.instantiate().unwrap());
    let (sender, receiver) = mpsc::channel();
    let (weak, node) = (Arc::downgrade(&exec), nodes[0].node);
    let mut q = Some(q);
    let sets = std::sync::Mutex::new(OnDrop(move || {
        let (exec, mut q) = (weak.upgrade().unwrap(), q.take().unwrap());
        sender.send((exec.set(node, |stream| stream.fill(&mut q, 9)), q)).unwrap();
    }));
    exec.set(nodes[2].node, |stream| stream.host_callback(move || _ = &sets)).unwrap();
    exec.update(&after).unwrap();
    let (set, q) = receiver.recv().unwrap();
    refused(set, &["uses the same memory"]);
    exec.launch(&stream).unwrap();
    assert_eq!(q.to_vec(&stream).await.unwrap(), [5; 64]);
});

// A refused callback is dropped once the exec can be used again.
alone!(holds_what_a_refused_set_drops_may_use_the_exec, async |device: Device, stream: Stream| {
    let [mut x, mut y] = [0; 2].map(|_| Buffer::<u32>::new(&device, 64).unwrap());
    let graph = fills_both(&device, &mut x, &mut y);
    let nodes = graph.nodes();
    let exec = Arc::new(graph.instantiate().unwrap());
    let (sender, receiver) = mpsc::channel();
    let (weak, node) = (Arc::downgrade(&exec), nodes[0].node);
    let mut mine = Some(Buffer::<u32>::new(&device, 64).unwrap());
    let sets = std::sync::Mutex::new(OnDrop(move || {
        let mut mine = mine.take().unwrap();
        sender.send(weak.upgrade().unwrap().set(node, |stream| stream.fill(&mut mine, 9))).unwrap();
    }));
    refused(exec.set(nodes[1].node, |stream| stream.host_callback(move || _ = &sets)), &["is not changed"]);
    receiver.recv().unwrap().unwrap();
    exec.launch(&stream).unwrap();
    stream.completed().await.unwrap();
});

/// Calls the closure for each string that is written.
struct Writer<F: FnMut()>(F);

impl<F: FnMut()> std::fmt::Write for Writer<F> {
    fn write_str(&mut self, _: &str) -> std::fmt::Result {
        (self.0)();
        Ok(())
    }
}

// A writer that inspects the graph that is being written.
alone!(a_writer_that_inspects_the_graph_does_not_hang, async |device: Device, _| {
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

/// The maximum depth of nested graphs.
const LEVELS: usize = 64;

/// Adds conditionals nested to the given number of levels; the closure fills the innermost body.
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

/// Wraps a graph in child nodes of the given number of levels.
fn wrapped(device: &Device, innermost: &Graph, levels: usize) -> Result<Graph> {
    let mut graph = innermost.clone();
    for _ in 0..levels {
        let mut around = Graph::builder(device)?;
        around.child(&[], &graph)?;
        graph = around.build()?;
    }
    Ok(graph)
}

// Walking through nested graphs uses stack for each level, on threads whose stack the caller does not control: the
// device's workers.
#[tokio::test]
async fn nested_conditionals_are_bounded() {
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
    refused(made, &["65 levels", "at most 64", "one graph"]);
    assert!(graph.build().is_ok(), "only the innermost body is missing");
}

#[tokio::test]
async fn nested_children_are_bounded() {
    let device = emulated();
    let [stream] = streams(&device);
    let (flag, mut data) = (buffer(&stream, 1).await, buffer(&stream, 0).await);
    let (innermost, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 7)).unwrap();
    let deepest = wrapped(&device, &innermost, LEVELS).unwrap();
    deepest.instantiate().unwrap().launch(&stream).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [7; 64]);
    refused(wrapped(&device, &deepest, 1), &["65 levels", "at most 64"]);

    // Conditionals and children both count, and a graph has as many levels as its deepest node.
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

// Each level doubles the number of nodes that a device must hold: a graph of 19 levels has 1,048,574 nodes.
#[test]
fn the_number_of_nodes_of_nested_children_is_bounded() {
    let device = Device::emulated(wakeline::device::Emulated::new());
    let mut graph = Graph::builder(&device).unwrap().build().unwrap();
    for level in 1.. {
        let mut around = Graph::builder(&device).unwrap();
        around.child(&[], &graph).unwrap();
        let second = around.child(&[], &graph);
        if level == 20 {
            refused(second, &["2097148 nodes", "at most 1048576", "launch a child several times"]);
            // Nodes before, around and within a body count too.
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
