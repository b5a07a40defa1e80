//! Input and output of a graph, by the driver's calls: copies on the stream around a launch, against copy nodes whose
//! addresses are updated before each launch. 128 bytes within the device; the graph in between is 32 empty kernels.

use std::{mem::MaybeUninit, ptr};

use cudarc::driver::sys;

use crate::{
    figure::{figure, median},
    gpu::{self, Gpu},
    shapes::{self, Took},
};

const BYTES: usize = 128;
const ROUNDS: usize = 9;

/// A graph with a copy before its kernels and one after, and these two nodes.
struct Copying {
    exec: sys::CUgraphExec,
    nodes: Vec<(sys::CUgraphNode, sys::CUDA_MEMCPY3D)>,
    context: sys::CUcontext,
}

impl Copying {
    fn new(stream: &gpu::Stream, kernel: gpu::Kernel, [from, within, to]: [u64; 3]) -> Self {
        let raw = stream.raw().cast();
        let (mut graph, mut exec, mut context) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let (mut nodes, mut count) = ([ptr::null_mut(); 64], 64);
        // SAFETY: a live stream of the current context, captured by this thread only; the memory is never freed; every
        // output argument outlives its call. The kernel has no arguments.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            sys::cuStreamBeginCapture_v2(raw, mode).result().expect("begins a capture");
            sys::cuMemcpyAsync(within, from, BYTES, raw).result().expect("copies");
            (0..shapes::NODES).for_each(|_| stream.launch(kernel, 1, &[]));
            sys::cuMemcpyAsync(to, within, BYTES, raw).result().expect("copies");
            sys::cuStreamEndCapture(raw, &mut graph).result().expect("a capture that ends well");
            sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result().expect("a graph that can be launched");
            sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count).result().expect("the graph's nodes");
            sys::cuCtxGetCurrent(&mut context).result().expect("a context");
        }
        let copy = |node: &sys::CUgraphNode| {
            let mut params = MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
            // SAFETY: a node of the graph; the driver returns an error for a node that is not a copy, and otherwise
            // writes its parameters.
            let asked = unsafe { sys::cuGraphMemcpyNodeGetParams(*node, params.as_mut_ptr()) };
            // SAFETY: the call succeeded and has written them.
            asked.result().ok().map(|()| (*node, unsafe { params.assume_init() }))
        };
        let nodes: Vec<_> = nodes[..count].iter().filter_map(copy).collect();
        assert_eq!(nodes.len(), 2, "one copy in, one out");
        Self { exec, nodes, context }
    }

    /// Sets the source of the first copy and the destination of the second.
    fn set_ends(&mut self, [from, to]: [u64; 2]) {
        (self.nodes[0].1.srcDevice, self.nodes[1].1.dstDevice) = (from, to);
        for (node, params) in &self.nodes {
            // SAFETY: a live exec and nodes of its graph; both addresses are device memory that is never freed.
            let set = unsafe { sys::cuGraphExecMemcpyNodeSetParams(self.exec, *node, params, self.context) };
            set.result().expect("another address");
        }
    }

    fn launch(&self, stream: &gpu::Stream) {
        // SAFETY: both are live.
        unsafe { sys::cuGraphLaunch(self.exec, stream.raw().cast()).result().expect("launches") };
    }
}

pub(crate) fn measure(gpu: &Gpu) {
    let stream = gpu::Stream::new();
    let kernel = gpu.kernel("nothing", "", include_str!("nothing.cu"));
    let [from, within, to] = [(); 3].map(|()| gpu.memory(4096));
    let mut copying = Copying::new(&stream, kernel, [from, within, to]);
    stream.begin_capture();
    // SAFETY: a kernel without arguments.
    (0..shapes::NODES).for_each(|_| unsafe { stream.launch(kernel, 1, &[]) });
    let plain = stream.end_capture();
    let copy = |to: u64, from: u64| {
        // SAFETY: device memory that is never freed, and a live stream.
        unsafe { sys::cuMemcpyAsync(to, from, BYTES, stream.raw().cast()).result().expect("copies") };
    };
    let drain = || stream.synchronize();
    let mut other = 0;
    let mut all: [Vec<Took>; 4] = Default::default();
    for round in 0..=ROUNDS {
        let took = [
            shapes::timed(|| plain.launch(&stream), drain),
            shapes::timed(|| copy(within, from), drain),
            shapes::timed(
                || {
                    copy(within, from);
                    plain.launch(&stream);
                    copy(to, within);
                },
                drain,
            ),
            shapes::timed(
                || {
                    other ^= BYTES as u64;
                    copying.set_ends([from + other, to + other]);
                    copying.launch(&stream);
                },
                drain,
            ),
        ];
        if round > 0 {
            all.iter_mut().zip(took).for_each(|(all, took)| all.push(took));
        }
    }
    let of = |way: usize, time: fn(&Took) -> f64| median(all[way].iter().map(time).collect());
    let [launch, copy, around, nodes] = [0, 1, 2, 3].map(|way| of(way, |took| took.host));
    figure("graph.copies.stream_copy", copy, "us", launch);
    figure("graph.copies.nodes.host", nodes, "us", around);
    figure("graph.copies.nodes.device", of(3, |took| took.device), "us", of(2, |took| took.device));
}
