//! Scenario S5 with cudarc: its slices as buffers and back, its views of wakeline's memory, and the guide's operators with
//! cuBLAS, cuDNN and cuFFT.
//!
//! On a GPU a stream of cudarc is held by a host function that wakeline enqueues there: what must wait for it is seen to
//! wait.

use std::sync::Arc;

use common::*;
use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg,
    sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode},
};
use futures::FutureExt;
use wakeline::{Stream, graph::Graph, memory::Wrapped, prelude::*};

#[path = "guide/cublas.rs"]
mod cublas;
#[path = "guide/cudnn.rs"]
mod cudnn;
#[path = "guide/cufft.rs"]
mod cufft;

const LEN: usize = 64;

/// A memset of cudarc's own slice, on a stream of cudarc.
fn set(stream: &CudaStream, slice: &mut CudaSlice<u32>, value: u32) {
    let len = slice.len();
    let (address, _recorded) = slice.device_ptr_mut(stream);
    // SAFETY: within the slice, which outlives the work.
    unsafe { sys::cuMemsetD32Async(address, value, len, stream.cu_stream()) }.result().unwrap();
}

fn wrapper(device: &Device, stream: &Arc<CudaStream>) -> Stream {
    // SAFETY: the stream is not captured, and what cudarc enqueues there accesses its own memory only.
    unsafe { Stream::from_cudarc(device, stream.clone()) }.unwrap()
}

/// A stream of a context of the test's own, with cudarc's event tracking on.
fn their_stream() -> Arc<CudaStream> {
    let context = CudaContext::new(0).unwrap();
    assert!(context.is_event_tracking());
    context.new_stream().unwrap()
}

fn slice_of(stream: &Arc<CudaStream>, value: u32) -> CudaSlice<u32> {
    let slice = stream.clone_htod(&[value; LEN]).unwrap();
    stream.synchronize().unwrap();
    slice
}

fn buffer_of(device: &Device, slice: CudaSlice<u32>) -> (Buffer<u32>, Wrapped<CudaSlice<u32>>) {
    Buffer::from_cudarc(device, slice).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn s5_a_slice_becomes_a_buffer_after_cudarcs_work_and_returns_before_it() {
    let _alone = alone().await;
    let (device, theirs) = (cuda(), their_stream());
    let (ours, stream) = (wrapper(&device, &theirs), Stream::named(&device, "stream").unwrap());
    let mut slice = slice_of(&theirs, 1);
    for round in 0..20 {
        let held = hold(&ours);
        set(&theirs, &mut slice, round);
        let (mut buffer, _) = buffer_of(&device, slice);
        increment::launch(&stream, &mut buffer).unwrap();
        assert!(stream.completed().now_or_never().is_none(), "before cudarc's work was done");
        drop(held);
        // And back, while this stream is held.
        let held = hold(&stream);
        increment::launch(&stream, &mut buffer).unwrap();
        slice = buffer.into_cudarc().unwrap();
        let copy = slice.try_clone().unwrap();
        assert!(ours.completed().now_or_never().is_none(), "before wakeline's work was done");
        drop(held);
        assert_eq!(theirs.clone_dtoh(&copy).unwrap(), [round + 2; LEN]);
    }
    drop(slice);
    freed(&device).await;
}

/// cudarc's events order a slice across the streams of cudarc, in both directions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn s5_a_slice_is_ordered_with_other_streams_of_cudarc() {
    let _alone = alone().await;
    let (device, theirs) = (cuda(), their_stream());
    let other = theirs.context().new_stream().unwrap();
    let (others, stream) = (wrapper(&device, &other), Stream::named(&device, "stream").unwrap());
    let mut slice = slice_of(&theirs, 1);
    let mut copy = theirs.clone_htod(&[0_u32; LEN]).unwrap();
    for round in 0..20 {
        // A write on a stream that is not the slice's own, then a read.
        for write in [true, false] {
            let held = hold(&others);
            if write {
                set(&other, &mut slice, round);
            } else {
                other.memcpy_dtod(&slice, &mut copy).unwrap();
            }
            let (mut buffer, _) = buffer_of(&device, slice);
            stream.fill(&mut buffer, if write { 100 } else { 150 } + round).unwrap();
            assert!(stream.completed().now_or_never().is_none(), "before the use on cudarc's other stream");
            drop(held);
            within(stream.completed()).await.unwrap();
            slice = buffer.into_cudarc().unwrap();
        }
        assert_eq!(theirs.clone_dtoh(&copy).unwrap(), [100 + round; LEN], "the read came before the second fill");
        // Back: a use on the other stream comes after wakeline's.
        let (mut buffer, _) = buffer_of(&device, slice);
        let held = hold(&stream);
        stream.fill(&mut buffer, 200 + round).unwrap();
        slice = buffer.into_cudarc().unwrap();
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        assert!(others.completed().now_or_never().is_none(), "before wakeline's fill");
        drop(held);
        assert_eq!(other.clone_dtoh(&copy).unwrap(), [200 + round; LEN]);
    }
}

/// cudarc waits for events only in a context that has a stream of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn s5_a_slice_of_the_default_stream_is_ordered_with_a_stream_that_was_dropped() {
    let _alone = alone().await;
    let device = cuda();
    let (blocker, stream) = (Stream::named(&device, "blocker").unwrap(), Stream::named(&device, "stream").unwrap());
    for of_another_context in [false, true] {
        let context = CudaContext::new(0).unwrap();
        let default = context.default_stream();
        let (slice, mut copy) = (slice_of(&default, 1), slice_of(&default, 0));
        let user = if of_another_context { CudaContext::new(0).unwrap() } else { context.clone() };
        // Synchronizes the context, so nothing may be held before.
        let other = user.new_stream().unwrap();
        let held = hold(&blocker);
        {
            // SAFETY: `blocker` outlives it, and it gets an event only.
            let blocker = unsafe { blocker.to_cudarc() }.unwrap();
            other.wait(&blocker.record_event(None).unwrap()).unwrap();
        }
        other.memcpy_dtod(&slice, &mut copy).unwrap();
        drop(other);
        assert!(context.is_event_tracking() && !context.is_in_multi_stream_mode());

        let (mut buffer, _) = buffer_of(&device, slice);
        stream.fill(&mut buffer, 100).unwrap();
        assert!(stream.completed().now_or_never().is_none(), "before the read on the dropped stream");
        assert!(!context.is_in_multi_stream_mode(), "the context is as before");
        drop(held);
        within(stream.completed()).await.unwrap();
        assert_eq!(default.clone_dtoh(&copy).unwrap(), [1; LEN], "the read came before the fill");
        assert_eq!(default.clone_dtoh(&buffer.into_cudarc().unwrap()).unwrap(), [100; LEN]);
    }
    freed(&device).await;
}

/// A buffer that is dropped frees the slice after its last use; the handle returns it after its last use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn s5_a_slice_is_freed_or_returned_after_its_last_use() {
    let _alone = alone().await;
    let (device, theirs) = (cuda(), their_stream());
    let stream = Stream::named(&device, "stream").unwrap();
    for keeps in [false, true] {
        let (mut buffer, wrapped) = buffer_of(&device, slice_of(&theirs, 1));
        let held = hold(&stream);
        increment::launch(&stream, &mut buffer).unwrap();
        drop(buffer);
        let mut back = Box::pin(wrapped.into_inner());
        assert!((&mut back).now_or_never().is_none(), "the kernel uses it");
        if keeps {
            drop(held);
            let slice = within(back).await.unwrap();
            assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [2; LEN]);
        } else {
            drop(back);
            assert!(Arc::strong_count(&theirs) > 1, "the slice holds its stream");
            drop(held);
        }
        until("the slice is freed", || Arc::strong_count(&theirs) == 1).await;
    }
    // The handle of a buffer whose slice was taken.
    let (buffer, wrapped) = buffer_of(&device, slice_of(&theirs, 3));
    let slice = buffer.into_cudarc().unwrap();
    let error = within(wrapped.into_inner()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(error.to_string().contains("`Buffer::into_cudarc` has taken it"), "{error}");
    assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [3; LEN]);
    freed(&device).await;
}

struct Once<M>(Option<M>);

impl<M: wakeline::Message + Sync> Operator for Once<M> {
    type Ports = SourcePorts<M>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        match self.0.take() {
            Some(message) => Ok(ports.output.send(message).await?),
            None => Ok(()),
        }
    }
}

/// A slice as the data of a message: the reader on its device gets the slice itself, and it returns after its last use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn s5_a_slice_travels_through_a_flow() {
    let _alone = alone().await;
    let (device, theirs) = (cuda(), their_stream());
    let (ours, seen) = (wrapper(&device, &theirs), shared());
    let mut slice = slice_of(&theirs, 1);
    let held = hold(&ours);
    set(&theirs, &mut slice, 5);
    let (buffer, wrapped) = buffer_of(&device, slice);
    let mut flow = Flow::new("s5");
    let send = flow.add("send", Once(Some(Envelope::from(buffer)))).on(&device);
    let add = flow.add("add", Increment).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect_with(send.output, add.input, HubOptions::default().envelope_bytes(4 * LEN));
    flow.connect(add.output, collect.input);
    drop(held);
    within(flow.run()).await.unwrap();
    drop(flow);
    assert_eq!(*lock(&seen), vec![vec![6; LEN]]);
    let slice = within(wrapped.into_inner()).await.unwrap();
    assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [6; LEN], "the kernel wrote into the slice");
    drop((slice, ours));
    freed(&device).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn s5_a_slice_that_cannot_be_imported_or_returned() {
    let _alone = alone().await;
    let (device, theirs) = (cuda(), their_stream());
    let refused = |device: &Device, slice: CudaSlice<u32>, why: &str| {
        let error = Buffer::from_cudarc(device, slice).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains("slice of cudarc") && error.to_string().contains(why), "{why} in: {error}");
    };
    refused(&common::emulated(), slice_of(&theirs, 1), "is not a CUDA device");
    refused(&Device::host(), slice_of(&theirs, 1), "is not a CUDA device");
    // The driver may refuse it, too.
    if let Ok(empty) = their_stream().null() {
        refused(&device, empty, "zero-length slice");
    }
    let of_thread = theirs.context().per_thread_stream();
    refused(&device, slice_of(&of_thread, 1), "is a different stream on each thread");
    // Of the null stream.
    let (buffer, _) = buffer_of(&device, slice_of(&theirs.context().default_stream(), 4));
    assert_eq!(buffer.to_vec(&Stream::new(&device).unwrap()).await.unwrap(), [4; LEN]);
    drop(buffer.into_cudarc().unwrap());
    // While its stream is captured. What is refused is dropped, which ends the capture with an error: a stream each.
    for imported in [false, true] {
        let captured = their_stream();
        let slice = slice_of(&captured, 1);
        let (slice, buffer) = if imported { (None, Some(buffer_of(&device, slice).0)) } else { (Some(slice), None) };
        captured.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        let refused = slice.map(|slice| Buffer::from_cudarc(&device, slice).unwrap_err());
        let error = refused.or_else(|| Some(buffer?.into_cudarc().unwrap_err())).unwrap();
        drop(captured.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH));
        // The error that the drop has left.
        let _ = captured.context().check_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains("is being captured"), "{error}");
    }
    // While a graph uses it.
    let (mut buffer, _) = buffer_of(&device, slice_of(&theirs, 1));
    let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut buffer, 1)).unwrap();
    let error = buffer.into_cudarc().unwrap_err();
    assert!(error.to_string().contains("drop the graph first"), "{error}");
    drop(graph);
    // Of a context that is not the primary one, and of another device.
    let foreign = CudaContext::new_non_primary(0, 0).unwrap();
    refused(&device, slice_of(&foreign.new_stream().unwrap(), 1), "is not the primary context");
    if Device::cuda_count() > 1 {
        let other = CudaContext::new(1).unwrap().new_stream().unwrap();
        refused(&device, slice_of(&other, 1), "its context on device 1");
    }
    freed(&device).await;
}

// A buffer that is not of cudarc.
on_both!(s5_a_buffer_of_wakeline_is_no_slice_of_cudarc, async |device: Device| {
    for buffer in [Buffer::<u32>::new(&device, 4), Buffer::pinned(&device, 4), Ok(Buffer::wrap(vec![0; 4]).unwrap().0)]
    {
        let error = buffer.unwrap().into_cudarc().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains("was not made from a slice of cudarc"), "{error}");
    }
});

/// A function that is written against cudarc alone.
fn duplicate(stream: &Arc<CudaStream>, from: &impl DevicePtr<u32>, to: &mut impl DevicePtrMut<u32>) -> Result<()> {
    Ok(stream.memcpy_dtod(from, to)?)
}

on_both!(s5_cudarcs_views_of_wakelines_memory, async |device: Device| {
    let [one, two] = streams(&device);
    let mut a = Buffer::from_slice(&one, &[1_u32; LEN]).unwrap();
    let mut b = Buffer::from_slice(&one, &[0_u32; LEN]).unwrap();
    one.completed().await.unwrap();
    let held = hold(&one);
    increment::launch(&one, &mut a).unwrap();
    let call = two.external("duplicate").read(&a).write(&mut b).emulated(|[a, mut b]| {
        b.as_mut_slice::<u32>()[LEN / 2..].copy_from_slice(&a.as_slice()[..LEN / 2]);
    });
    // SAFETY: one copy on this stream, between the declared slices and within both.
    unsafe {
        call.enqueue_cudarc(|stream, [a, mut b]| {
            assert!(a.len() == LEN && !b.is_empty() && format!("{a:?}").contains("u32"));
            duplicate(stream, &a.as_view().slice(..LEN / 2), &mut b.as_view_mut().slice_mut(LEN / 2..))
        })
    }
    .unwrap();
    assert!(two.completed().now_or_never().is_none(), "before the kernel");
    drop(held);
    assert_eq!(b.to_vec(&one).await.unwrap(), [[0; LEN / 2], [2; LEN / 2]].concat());
    // A view of other elements, and one for writing of a slice that is only read.
    let wrong = |write: bool| {
        let call = two.external("wrong").read(&a).emulated(|_| ());
        // SAFETY: it enqueues nothing.
        let run = || unsafe {
            call.enqueue_cudarc(|_, [mut a]| {
                if write {
                    a.as_view_mut::<u32>();
                } else {
                    a.as_view::<f32>();
                }
                Ok(())
            })
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
    };
    for write in [false, true] {
        let outcome = wrong(write);
        if !device.is_cuda() {
            outcome.unwrap().unwrap();
            continue;
        }
        let panic = outcome.unwrap_err();
        let text =
            panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(|text| text.to_string()));
        let expected = if write { "declared with `read`" } else { "declared with elements of `u32`, not `f32`" };
        assert!(text.as_ref().is_some_and(|text| text.contains(expected)), "{expected} in: {text:?}");
    }
    // Without a counterpart, the emulated device refuses it.
    // SAFETY: it enqueues nothing.
    let outcome = unsafe { two.external("bare").read(&a).enqueue_cudarc(|_, _| Ok(())) };
    assert_eq!(outcome.is_ok(), device.is_cuda(), "{outcome:?}");
    drop((a, b));
    freed(&device).await;
});

/// A kernel that cudarc compiles and launches with views; in a graph, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn s5_a_kernel_of_cudarc_with_views_in_a_graph() {
    let _alone = alone().await;
    let (device, theirs) = (cuda(), their_stream());
    let source = r#"extern "C" __global__ void twice(const unsigned *from, unsigned *to, int len) {
        int at = blockIdx.x * blockDim.x + threadIdx.x;
        if (at < len) to[at] = 2 * from[at];
    }"#;
    let module = theirs.context().load_module(cudarc::nvrtc::compile_ptx(source).unwrap()).unwrap();
    let twice = module.load_function("twice").unwrap();
    let enqueue = |stream: &Stream, a: &Buffer<u32>, b: &mut Buffer<u32>| {
        let call = stream.external("twice").read(a).write(b);
        // SAFETY: one kernel on this stream, which reads and writes the declared slices within their lengths.
        unsafe {
            call.enqueue_cudarc(|stream, [a, mut b]| {
                let (from, mut to, len) = (a.as_view::<u32>(), b.as_view_mut::<u32>(), LEN as i32);
                let mut launch = stream.launch_builder(&twice);
                launch.arg(&from).arg(&mut to).arg(&len);
                launch.launch(LaunchConfig::for_num_elems(LEN as u32))?;
                Ok(())
            })
        }
    };
    let stream = Stream::named(&device, "stream").unwrap();
    let mut a = Buffer::from_slice(&stream, &[3_u32; LEN]).unwrap();
    let mut b = Buffer::from_slice(&stream, &[0_u32; LEN]).unwrap();
    enqueue(&stream, &a, &mut b).unwrap();
    assert_eq!(b.to_vec(&stream).await.unwrap(), [6; LEN]);
    let (graph, ()) = Graph::capture(&device, |capture| {
        increment::launch(capture.stream(), &mut a)?;
        enqueue(capture.stream(), &a, &mut b)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    for round in 1..4 {
        exec.launch(&stream).unwrap().completed().await.unwrap();
        assert_eq!(b.to_vec(&stream).await.unwrap(), [2 * (3 + round); LEN]);
    }
}

/// A slice that was allocated on a stream of wakeline, through cudarc.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn s5_a_slice_of_a_stream_of_wakeline() {
    let _alone = alone().await;
    let device = cuda();
    let [stream, other] = streams(&device);
    // SAFETY: `stream` outlives it, and it accesses cudarc's own memory only.
    let theirs = unsafe { stream.to_cudarc() }.unwrap();
    assert!(!theirs.context().is_event_tracking());
    let mut slice = slice_of(&theirs, 1);
    let held = hold(&stream);
    set(&theirs, &mut slice, 7);
    let (mut buffer, _) = buffer_of(&device, slice);
    increment::launch(&other, &mut buffer).unwrap();
    assert!(other.completed().now_or_never().is_none());
    drop(held);
    let slice = buffer.into_cudarc().unwrap();
    assert_eq!(theirs.clone_dtoh(&slice).unwrap(), [8; LEN]);
    drop((slice, theirs));
    freed(&device).await;
}

/// Runs one of the guide's operators on each of these messages.
async fn through<T, O>(device: &Device, operator: O, messages: Vec<Vec<T>>) -> Vec<Vec<T>>
where
    T: wakeline::memory::Plain,
    O: Operator<Ports = MapPorts<Envelope<T>, Envelope<T>>>,
{
    let (seen, bytes) = (shared(), 1 << 12);
    let mut flow = Flow::new("guide");
    let send = flow.add("send", SendEach::new(messages));
    let run = flow.add("run", operator).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect_with(send.output, run.input, HubOptions::default().envelope_bytes(bytes));
    flow.connect_with(run.output, collect.input, HubOptions::default().envelope_bytes(bytes));
    within(flow.run()).await.unwrap();
    drop(flow);
    let mut seen = lock(&seen);
    std::mem::take(&mut *seen)
}

on_both!(s5_the_guides_operator_with_cublas, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    // Three rows of weights, two columns.
    let weights = Buffer::from_slice(&stream, &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    let project = cublas::Project { weights, inner: 3, blas: cublas::Blas::default() };
    let out = through(&device, project, vec![vec![1.0, 0.0, 0.0, 0.0, 1.0, 1.0], vec![1.0, 2.0, 3.0]]).await;
    assert_eq!(out, [vec![1.0, 2.0, 8.0, 10.0], vec![22.0, 28.0]]);
});

/// False, with a message, for a library that is not installed.
fn is_installed(name: &str, is: bool) -> bool {
    if !is {
        eprintln!("{name} is not installed here: the test has checked nothing");
    }
    is
}

on_both!(s5_the_guides_operator_with_cufft, async |device: Device| {
    // SAFETY: only looks for the library.
    if device.is_cuda() && !is_installed("cuFFT", unsafe { cudarc::cufft::sys::is_culib_present() }) {
        return;
    }
    let points = 16;
    let wave = |turns: usize| {
        let angle = |n: usize| std::f32::consts::TAU * (turns * n) as f32 / points as f32;
        (0..points).map(|n| [angle(n).cos(), angle(n).sin()]).collect::<Vec<_>>()
    };
    let transform = cufft::Transform { points, plan: cufft::Plan::default() };
    let out = through(&device, transform, (0..5).map(wave).collect()).await;
    assert_eq!(out.len(), 5);
    for (turns, spectrum) in out.iter().enumerate() {
        for (k, [re, im]) in spectrum.iter().enumerate() {
            let expected = if k == turns { points as f32 } else { 0.0 };
            assert!((re - expected).abs() < 1e-3 && im.abs() < 1e-3, "{turns} turns: {spectrum:?}");
        }
    }
});

on_both!(s5_the_guides_operator_with_cudnn, async |device: Device| {
    // SAFETY: only looks for the library.
    if device.is_cuda() && !is_installed("cuDNN", unsafe { cudarc::cudnn::sys::is_culib_present() }) {
        return;
    }
    let softmax = cudnn::Softmax { classes: 2, dnn: cudnn::Dnn::default() };
    let out = through(&device, softmax, vec![vec![0.0, 0.0, 3.0_f32.ln(), 0.0], vec![700.0, 700.0]]).await;
    let flat: Vec<f32> = out.concat();
    let close = flat.iter().zip([0.5, 0.5, 0.75, 0.25, 0.5, 0.5]).all(|(got, wanted)| (got - wanted).abs() < 1e-5);
    assert!(flat.len() == 6 && close, "{out:?}");
});

/// The guide shows the operators that these tests run, and the example with candle.
#[test]
fn the_guide_shows_the_tested_operators() {
    let page = include_str!("../src/guide/existing_code.md");
    let shown = [
        include_str!("guide/cublas.rs"),
        include_str!("guide/cudnn.rs"),
        include_str!("guide/cufft.rs"),
        // Built by `.ci/full candle`.
        include_str!("../examples/candle/on_the_host.rs"),
        include_str!("../examples/candle/on_a_gpu.rs"),
    ];
    for code in shown {
        assert!(page.contains(code), "`src/guide/existing_code.md` does not show this code: {code}");
        assert!(code.lines().count() <= 60, "{} lines", code.lines().count());
    }
}
