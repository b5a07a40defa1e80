//! 32 empty kernels in three shapes, as in NVIDIA's talk on TensorFlow's CUDA graphs. The talk does not draw them, but
//! gives their times: two branches 0.55 of a straight line, fork and join 0.76, which is 17 and 24 kernels in sequence.
//! A fourth shape has two separate branches: the driver itself takes half as long again to launch a graph with two
//! roots.
//!
//! ```text
//!   straight   o─o─o ... ─o      branches   o─┬─o ... ─o      fork   o─┬─o─┬─o ... o─┬─o─┬─o      apart   o─o ... ─o
//!                                             └─o ... ─o               └─o─┘         └─o─┘                o─o ... ─o
//! ```
//!
//! Four implementations: the driver's streams, the driver's graph, wakeline's streams, wakeline's graph. `host` is the
//! time of the calls, `device` the time until all work is done, each per launch, of many launches in sequence. Each
//! launch of a graph has a completion: an event after it.

use std::{cell::RefCell, time::Instant};

use wakeline::{
    Stream,
    graph::{Exec, Graph},
    prelude::*,
    stream::Event,
};

use crate::{
    figure::{figure, median},
    gpu::{self, Gpu},
    nothing::nothing,
};

pub(crate) const NODES: usize = 32;
const WARM: u32 = 20;
const LAUNCHES: u32 = 200;
const ROUNDS: usize = 9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Straight,
    Branches,
    Fork,
    Apart,
}

/// The interface that both kinds of enqueueing share: two streams, and order between them.
trait Lanes {
    fn launch(&mut self, lane: usize);
    fn wait(&mut self, lane: usize, other: usize);
}

/// Enqueues the shape, so that the first stream ends after all of it.
fn enqueue(shape: Shape, lanes: &mut impl Lanes) {
    match shape {
        Shape::Straight => (0..NODES).for_each(|_| lanes.launch(0)),
        Shape::Branches => {
            lanes.launch(0);
            lanes.wait(1, 0);
            (1..NODES).for_each(|node| lanes.launch(node % 2));
            lanes.wait(0, 1);
        }
        Shape::Fork => (0..NODES / 4).for_each(|_| {
            lanes.launch(0);
            lanes.wait(1, 0);
            lanes.launch(0);
            lanes.launch(1);
            lanes.wait(0, 1);
            lanes.launch(0);
        }),
        Shape::Apart => {
            lanes.wait(1, 0);
            (0..NODES).for_each(|node| lanes.launch(node % 2));
            lanes.wait(0, 1);
        }
    }
}

/// Microseconds per launch: of the calls, and until all work is done.
#[derive(Clone, Copy, Default)]
pub(crate) struct Took {
    pub(crate) host: f64,
    pub(crate) device: f64,
}

pub(crate) fn timed(mut launch: impl FnMut(), drain: impl Fn()) -> Took {
    // The previous implementation has left its own data in the caches.
    (0..WARM).for_each(|_| launch());
    drain();
    let begun = Instant::now();
    (0..LAUNCHES).for_each(|_| launch());
    let host = begun.elapsed();
    drain();
    let each = |time: std::time::Duration| time.as_secs_f64() * 1e6 / f64::from(LAUNCHES);
    Took { host: each(host), device: each(begun.elapsed()) }
}

struct Bare {
    kernel: gpu::Kernel,
    streams: [gpu::Stream; 2],
    events: [gpu::Event; 2],
    done: gpu::Event,
}

impl Lanes for Bare {
    fn launch(&mut self, lane: usize) {
        // SAFETY: a kernel without arguments.
        unsafe { self.streams[lane].launch(self.kernel, 1, &[]) };
    }

    fn wait(&mut self, lane: usize, other: usize) {
        self.streams[other].record(&self.events[other]);
        self.streams[lane].wait(&self.events[other]);
    }
}

impl Bare {
    fn new(gpu: &Gpu) -> Self {
        Self {
            kernel: gpu.kernel("nothing", "", include_str!("nothing.cu")),
            streams: [(); 2].map(|()| gpu::Stream::new()),
            events: [(); 2].map(|()| gpu::Event::new()),
            done: gpu::Event::new(),
        }
    }

    fn streamed(&mut self, shape: Shape) -> Took {
        let this = RefCell::new(self);
        let drain = || this.borrow().streams.iter().for_each(gpu::Stream::synchronize);
        timed(|| enqueue(shape, *this.borrow_mut()), drain)
    }

    fn graph(&mut self, shape: Shape) -> gpu::Graph {
        self.streams[0].begin_capture();
        enqueue(shape, self);
        self.streams[0].end_capture()
    }

    fn replayed(&self, graph: &gpu::Graph) -> Took {
        let launch = || {
            graph.launch(&self.streams[0]);
            self.streams[0].record(&self.done);
        };
        timed(launch, || self.streams[0].synchronize())
    }
}

struct Ours {
    streams: [Stream; 2],
}

impl Lanes for &[Stream; 2] {
    fn launch(&mut self, lane: usize) {
        nothing::launch(&self[lane]).expect("launches");
    }

    fn wait(&mut self, lane: usize, other: usize) {
        self[lane].wait_for(&self[other]).expect("waits");
    }
}

impl Ours {
    fn drain(&self) {
        self.streams.iter().for_each(|stream| stream.synchronize_blocking().expect("synchronises"));
    }

    fn streamed(&self, shape: Shape) -> Took {
        timed(|| enqueue(shape, &mut &self.streams), || self.drain())
    }

    fn exec(&self, device: &Device, shape: Shape) -> Result<Exec> {
        let (graph, ()) = Graph::capture(device, |capture| {
            let streams = [capture.stream().clone(), capture.fork("side")?];
            enqueue(shape, &mut &streams);
            Ok(())
        })?;
        assert_eq!(graph.nodes().len(), NODES, "{}", graph.to_dot());
        let exec = graph.instantiate()?;
        exec.upload(&self.streams[0])?;
        Ok(exec)
    }

    fn replayed(&self, exec: &Exec) -> Took {
        let done = Event::new();
        let launch = || {
            exec.launch(&self.streams[0]).expect("launches");
            done.record(&self.streams[0]).expect("records");
        };
        timed(launch, || self.drain())
    }
}

pub(crate) fn measure(device: &Device, gpu: Option<&Gpu>) -> Result<()> {
    let shapes =
        [("straight", Shape::Straight), ("branches", Shape::Branches), ("fork", Shape::Fork), ("apart", Shape::Apart)];
    for (name, shape) in shapes {
        let ours = Ours { streams: [Stream::named(device, "one")?, Stream::named(device, "two")?] };
        let exec = ours.exec(device, shape)?;
        let mut bare = gpu.map(|gpu| {
            let mut bare = Bare::new(gpu);
            let graph = bare.graph(shape);
            (bare, graph)
        });
        let mut all: [Vec<Took>; 4] = Default::default();
        for round in 0..=ROUNDS {
            let (streams, graphs) = (ours.streamed(shape), ours.replayed(&exec));
            let limits = bare.as_mut().map(|(bare, graph)| (bare.streamed(shape), bare.replayed(graph)));
            let (bare_streams, bare_graphs) = limits.unwrap_or_default();
            if round > 0 {
                all.iter_mut().zip([streams, graphs, bare_streams, bare_graphs]).for_each(|(all, took)| all.push(took));
            }
        }
        let of = |way: usize, time: fn(&Took) -> f64| median(all[way].iter().map(time).collect());
        let ratio = |way: usize, over: usize, time: fn(&Took) -> f64| {
            median(all[way].iter().zip(&all[over]).map(|(one, other)| time(one) / time(other)).collect())
        };
        for (what, time) in [("host", (|took| took.host) as fn(&Took) -> f64), ("device", |took| took.device)] {
            figure(&format!("graph.{name}.{what}"), of(1, time), "us", of(3, time));
            figure(&format!("graph.{name}.{what}.streams"), of(0, time), "us", of(2, time));
            let limit = if bare.is_some() { ratio(2, 3, time) } else { 0.0 };
            figure(&format!("graph.{name}.{what}.ratio"), ratio(0, 1, time), "fold", limit);
            let over = if bare.is_some() { ratio(1, 3, time) } else { 0.0 };
            figure(&format!("graph.{name}.{what}.over_bare"), over, "x", 1.0);
        }
    }
    Ok(())
}
