//! Queries per second of a perceptron: 4 layers of 512 x 512 in float16 with ReLU, at batches of 64, 200, 800 and 1600
//! rows.
//!
//! - replayed: three graphs on three streams, launched in turn by one task that awaits each launch;
//! - bare: the same calls of cuBLAS, captured, launched and awaited with the driver's own calls;
//! - streamed: 1, 3 and 8 callers, each with a stream, on 1, 3 and all launching threads; the best of these.

use std::{collections::VecDeque, thread, time::Instant};

use half::f16;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{runtime::Builder, task::JoinSet};
use wakeline::{
    Stream,
    graph::{Exec, Graph},
    prelude::*,
};

use crate::{
    figure::{alternate, figure, median},
    gpu::{self, Gpu},
    linear::Linear,
};

const WIDTH: usize = 512;
const LAYERS: usize = 4;
const GRAPHS: usize = 3;
/// The maximum of launches in flight.
const IN_FLIGHT: usize = 24;
/// Only a few on the emulated device, where nothing is measured.
const QUERIES: [usize; 2] = [6000, 12];
const ROUNDS: usize = 5;

/// A perceptron with a stream and an input of its own.
struct Net {
    stream: Stream,
    layers: Vec<Linear>,
    input: Buffer<f16>,
    rows: usize,
}

impl Net {
    fn new(device: &Device, rows: usize) -> Result<Self> {
        let stream = Stream::new(device)?;
        let mut random = StdRng::seed_from_u64(1);
        let mut numbers = |count: usize, scale: f32| -> Vec<f16> {
            (0..count).map(|_| f16::from_f32((random.random::<f32>() - 0.5) * scale)).collect()
        };
        let layers = (0..LAYERS).map(|_| Linear::new(&stream, &numbers(WIDTH * WIDTH, 0.1), &numbers(WIDTH, 0.1)));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let input = Buffer::from_slice(&stream, &numbers(rows * WIDTH, 1.0))?;
        let mut net = Self { stream, layers, input, rows };
        // Does one-time work now.
        let stream = net.stream.clone();
        net.forward(&stream)?;
        net.stream.synchronize_blocking()?;
        Ok(net)
    }

    fn forward(&mut self, stream: &Stream) -> Result<Buffer<f16>> {
        let len = self.rows * WIDTH;
        let mut last: Option<Buffer<f16>> = None;
        for layer in &mut self.layers {
            let mut next = stream.alloc::<f16>(len)?;
            layer.forward(stream, self.rows, (last.as_ref().unwrap_or(&self.input), len), (&mut next, len))?;
            last = Some(next);
        }
        last.ok_or_else(|| "no layers".into())
    }

    /// Captured as a graph; returns it with the buffer of its results.
    fn exec(&mut self, device: &Device) -> Result<(Exec, Buffer<f16>)> {
        let (graph, output) = Graph::capture(device, |capture| self.forward(&capture.stream().clone()))?;
        let exec = graph.instantiate()?;
        exec.upload(&self.stream)?;
        Ok((exec, output))
    }
}

fn a_second(queries: usize, begun: Instant) -> f64 {
    queries as f64 / begun.elapsed().as_secs_f64()
}

async fn replayed(queries: usize, nets: &[Net], execs: &[(Exec, Buffer<f16>)]) -> Result<f64> {
    let mut flying = VecDeque::with_capacity(IN_FLIGHT);
    let begun = Instant::now();
    for query in 0..queries {
        if flying.len() == IN_FLIGHT
            && let Some(first) = flying.pop_front()
        {
            first.await?;
        }
        let at = query % GRAPHS;
        flying.push_back(execs[at].0.launch(&nets[at].stream)?.completed());
    }
    for last in flying {
        last.await?;
    }
    Ok(a_second(queries, begun))
}

async fn caller(mut net: Net, queries: usize) -> Result<Net> {
    let stream = net.stream.clone();
    let mut flying = VecDeque::with_capacity(IN_FLIGHT);
    for _ in 0..queries {
        if flying.len() == IN_FLIGHT / GRAPHS
            && let Some(first) = flying.pop_front()
        {
            stream_done(first).await?;
        }
        let output = net.forward(&stream)?;
        flying.push_back((stream.completed(), output));
        tokio::task::yield_now().await;
    }
    for last in flying {
        stream_done(last).await?;
    }
    Ok(net)
}

async fn stream_done((done, _output): (wakeline::stream::Completed, Buffer<f16>)) -> Result<()> {
    done.await
}

fn streamed(queries: usize, device: &Device, rows: usize, callers: usize, threads: usize) -> Result<f64> {
    let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let nets = (0..callers).map(|_| Net::new(device, rows)).collect::<Result<Vec<_>>>()?;
    let queries = queries.div_ceil(callers);
    runtime.block_on(async {
        let mut all = JoinSet::new();
        let begun = Instant::now();
        nets.into_iter().for_each(|net| _ = all.spawn(caller(net, queries)));
        while let Some(ended) = all.join_next().await {
            ended.map_err(Error::other)??;
        }
        Ok(a_second(queries * callers, begun))
    })
}

struct Bare {
    streams: Vec<gpu::Stream>,
    graphs: Vec<gpu::Graph>,
    events: Vec<gpu::Event>,
}

impl Bare {
    fn new(gpu: &Gpu, nets: &mut [Net]) -> Result<Self> {
        let streams: Vec<_> = nets.iter().map(|_| gpu::Stream::new()).collect();
        let graphs = nets.iter_mut().zip(&streams).map(|(net, stream)| {
            let len = net.rows * WIDTH * size_of::<f16>();
            let [one, two] = [(); 2].map(|()| gpu.memory(len));
            let workspace = net.layers[0].workspace_bytes([net.rows, WIDTH, WIDTH])?;
            let workspace = gpu.memory(workspace);
            stream.begin_capture();
            let mut from = net.input.device_address()?;
            for (at, layer) in net.layers.iter_mut().enumerate() {
                let to = if at % 2 == 0 { one } else { two };
                // SAFETY: all buffers are as large as the layer's shape requires, and are not freed before the graph.
                unsafe { layer.forward_bare(stream.raw(), [from, to, workspace], net.rows) }?;
                from = to;
            }
            Ok(stream.end_capture())
        });
        let graphs = graphs.collect::<Result<_>>()?;
        Ok(Self { streams, graphs, events: (0..IN_FLIGHT).map(|_| gpu::Event::new()).collect() })
    }

    fn replayed(&self, queries: usize) -> f64 {
        let begun = Instant::now();
        for query in 0..queries {
            let done = &self.events[query % IN_FLIGHT];
            if query >= IN_FLIGHT {
                done.synchronize();
            }
            let at = query % GRAPHS;
            self.graphs[at].launch(&self.streams[at]);
            self.streams[at].record(done);
        }
        self.streams.iter().for_each(gpu::Stream::synchronize);
        a_second(queries, begun)
    }
}

pub(crate) fn measure(device: &Device, gpu: Option<&Gpu>) -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let queries = QUERIES[usize::from(gpu.is_none())];
    let batches: &[usize] = if gpu.is_some() { &[64, 200, 800, 1600] } else { &[1] };
    for &rows in batches {
        let mut nets = (0..GRAPHS).map(|_| Net::new(device, rows)).collect::<Result<Vec<_>>>()?;
        let bare = gpu.map(|gpu| Bare::new(gpu, &mut nets)).transpose()?;
        let execs = nets.iter_mut().map(|net| net.exec(device)).collect::<Result<Vec<_>>>()?;
        let (limit, ours) = alternate(
            ROUNDS,
            || bare.as_ref().map_or(0.0, |bare| bare.replayed(queries)),
            || runtime.block_on(replayed(queries, &nets, &execs)).expect("replays"),
        );
        figure(&format!("graph.mlp.{rows}"), ours.median, "queries/s", limit.median);
        figure(&format!("graph.mlp.{rows}.ratio"), ours.ratio, "of bare graphs", 1.0);
        let all = thread::available_parallelism().map_or(1, usize::from);
        let mut best = (0.0, 0, 0);
        for callers in [1, 3, 8] {
            for threads in [1, 3, all] {
                let rounds =
                    (0..3).map(|_| streamed(queries, device, rows, callers, threads)).collect::<Result<Vec<_>>>()?;
                let speed = median(rounds);
                if speed > best.0 {
                    best = (speed, callers, threads);
                }
            }
        }
        println!("# streamed best with {} callers on {} threads", best.1, best.2);
        figure(&format!("graph.mlp.{rows}.streamed"), best.0, "queries/s", ours.median);
    }
    Ok(())
}
