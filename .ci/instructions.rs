//! The program that `.ci/instructions` counts: repeats one path. `PATH COUNT`. Without its feature `observed` it must not
//! use anything newer than 6b1933d.

use wakeline::{Stream, 
    device::{Device, Emulated, Simulation},
    graph::Graph,
    operator::{map, sink, source},
    prelude::*,
    stream::Event,
};

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_default();
    let count: u64 = args.next().and_then(|count| count.parse().ok()).unwrap_or(1000);
    match path.as_str() {
        "hop" => hop(count, false),
        "observed" => hop(count, true),
        "alloc" => alloc(count),
        "launch" => launch(count),
        "copy" => copy(count),
        "graph" => graph(count),
        _ => panic!("expected a path (hop, observed, alloc, launch, copy or graph) and a count"),
    }
}

/// Messages through a chain of operators, on one thread.
fn hop(count: u64, observed: bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut flow = Flow::new("hop");
        let mut next = 0;
        let first = flow.add(
            "first",
            source(move || {
                next += 1;
                std::future::ready(Ok((next <= count).then_some(next)))
            }),
        );
        let mut output = first.output;
        for n in 0..8 {
            let hop = flow.add(format!("hop {n}"), map(|number: u64| std::future::ready(Ok(number))));
            flow.connect(output, hop.input);
            output = hop.output;
        }
        let last = flow.add("last", sink(|_: u64| std::future::ready(Ok(()))));
        flow.connect(output, last.input);
        #[cfg(feature = "observed")]
        if observed {
            flow.observe(&wakeline::observe::Observe::new());
        }
        assert!(!observed || cfg!(feature = "observed"), "needs the feature `observed`");
        flow.run().await.expect("a flow that works");
    });
}

/// Runs on a simulated device: without it the work of other threads would be counted, too.
fn simulated(does: impl AsyncFnOnce(&Device)) {
    let simulation = Simulation::new(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(simulation.run(async {
        does(&Device::simulated(&simulation, Emulated::new())).await;
    }));
}

#[kernel]
fn nothing(_number: u32) {}

/// Kernels on two streams that wait for each other.
fn launch(count: u64) {
    simulated(async |device| {
        let [one, other] = ["one", "other"].map(|name| Stream::named(device, name).expect("a stream"));
        for n in 0..count {
            nothing::launch(&one, 1).expect("launches");
            if n % 4 == 0 {
                other.wait_for(&one).expect("waits");
                nothing::launch(&other, 2).expect("launches");
                one.wait_for(&other).expect("waits");
            }
            if n % 64 == 0 {
                one.completed().await.expect("a device that works");
            }
        }
        one.completed().await.expect("a device that works");
    });
}

/// Copies to a device and back, between the same buffers.
fn copy(count: u64) {
    simulated(async |device| {
        let stream = Stream::new(device).expect("a stream");
        let mut here = Buffer::<u32>::pinned(device, 64).expect("memory");
        let mut there = Buffer::<u32>::new(device, 64).expect("memory");
        for n in 0..count {
            stream.copy(&here, &mut there).expect("a copy");
            stream.copy(&there, &mut here).expect("a copy");
            if n % 64 == 0 {
                stream.completed().await.expect("a device that works");
            }
        }
        stream.completed().await.expect("a device that works");
    });
}

/// Allocates, uses and frees memory on one stream.
fn alloc(count: u64) {
    simulated(async |device| {
        let stream = Stream::new(device).expect("a stream");
        for n in 0..count {
            let mut memory = stream.alloc::<u32>(256).expect("memory");
            stream.fill(&mut memory, 1).expect("a fill");
            drop(memory);
            if n % 64 == 0 {
                stream.completed().await.expect("a device that works");
            }
        }
        stream.completed().await.expect("a device that works");
    });
}

/// Launches of a small graph, each with an event behind it.
fn graph(count: u64) {
    simulated(async |device| {
        let stream = Stream::new(device).expect("a stream");
        let (graph, ()) = Graph::capture(device, |capture| {
            nothing::launch(capture.stream(), 1)?;
            nothing::launch(capture.stream(), 2)
        })
        .expect("a graph");
        let exec = graph.instantiate().expect("a graph that can be launched");
        let done = Event::new();
        for n in 0..count {
            exec.launch(&stream).expect("launches");
            done.record(&stream).expect("records");
            if n % 64 == 0 {
                stream.completed().await.expect("a device that works");
            }
        }
        stream.completed().await.expect("a device that works");
    });
}
