//! Scenarios S5 and S9: work that other libraries enqueue, streams of another library, events, and the current stream.
//!
//! On a GPU the other library is the driver itself, called through cudarc's raw bindings; on the emulated device it is
//! the replacement that `emulated` provides.

use std::{ffi::c_void, time::Duration};

use common::*;
use futures::FutureExt;
use wakeline::{
    Stream,
    device::{Emulated, Faults},
    memory::External,
    prelude::*,
    stream::Event,
};

/// Sets every element to `value`, as external work.
fn set<'a>(stream: &'a Stream, to: &'a mut Buffer<u32>, value: u32) -> Result<()> {
    let len = to.len();
    let call = stream.external("set").write(to).emulated(move |[mut to]| to.as_mut_slice::<u32>().fill(value));
    // SAFETY: one memset on this stream, of the slice that is declared.
    unsafe { call.enqueue(|stream, [to]| cuda::set(stream, to, value, len)) }
}

/// A copy, as external work.
fn copy<'a>(stream: &'a Stream, from: &'a Buffer<u32>, to: &'a mut Buffer<u32>) -> Result<()> {
    let bytes = 4 * from.len().min(to.len());
    let call = stream.external("copy").read(from).write(to).emulated(|[from, mut to]| {
        for (to, from) in to.as_mut_slice::<u32>().iter_mut().zip(from.as_slice::<u32>()) {
            *to = *from;
        }
    });
    // SAFETY: one copy on this stream, between the slices that are declared and within both.
    unsafe { call.enqueue(|stream, [from, to]| cuda::copy(stream, from, to, bytes)) }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use cudarc::driver::sys;

    pub(super) fn set(stream: *mut c_void, to: u64, value: u32, len: usize) -> Result<()> {
        // SAFETY: as the caller of `enqueue` vouches.
        Ok(unsafe { sys::cuMemsetD32Async(to, value, len, stream.cast()) }.result()?)
    }

    pub(super) fn copy(stream: *mut c_void, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: as the caller of `enqueue` vouches.
        Ok(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.cast()) }.result()?)
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use super::*;

    pub(super) fn set(_stream: *mut c_void, _to: u64, _value: u32, _len: usize) -> Result<()> {
        unreachable!("there is no GPU")
    }

    pub(super) fn copy(_stream: *mut c_void, _from: u64, _to: u64, _bytes: usize) -> Result<()> {
        unreachable!("there is no GPU")
    }
}

on_both!(s5_external_work_is_ordered_like_a_kernel, async |device: Device| {
    let [one, two, three] = ["one", "two", "three"].map(|name| Stream::named(&device, name).unwrap());
    let mut a = Buffer::from_slice(&one, &[1_u32; 64]).unwrap();
    let mut b = Buffer::from_slice(&two, &[0_u32; 64]).unwrap();
    one.completed().await.unwrap();
    two.completed().await.unwrap();
    let held = hold(&one);
    // After a kernel on another stream, before one on a third.
    increment::launch(&one, &mut a).unwrap();
    copy(&two, &a, &mut b).unwrap();
    // A write waits for the copy as for any reader.
    set(&three, &mut a, 7).unwrap();
    increment::launch(&three, &mut a).unwrap();
    for stream in [&two, &three] {
        assert!(!stream.ticket().has_passed());
    }
    drop(held);
    assert_eq!(b.to_vec(&one).await.unwrap(), [2; 64]);
    assert_eq!(a.to_vec(&one).await.unwrap(), [8; 64]);
    drop((a, b));
    freed(&device).await;
});

// Memory that is dropped while external work uses it is kept until the work is done.
on_both!(s5_memory_in_use_by_external_work_is_kept, async |device: Device| {
    let stream = Stream::named(&device, "stream").unwrap();
    let mut a = Buffer::from_slice(&stream, &[1_u32; 64]).unwrap();
    let mut b = Buffer::<u32>::new(&device, 64).unwrap();
    stream.completed().await.unwrap();
    let held = hold(&stream);
    set(&stream, &mut a, 3).unwrap();
    copy(&stream, &a, &mut b).unwrap();
    let before = device.memory_in_use();
    drop(a);
    assert_eq!(device.memory_in_use(), before);
    drop(held);
    assert_eq!(b.to_vec(&stream).await.unwrap(), [3; 64]);
    drop(b);
    freed(&device).await;
});

on_both!(m12_the_checker_sees_external_work, async |device: Device| {
    let (one, two) = (Stream::named(&device, "one").unwrap(), Stream::named(&device, "two").unwrap());
    let mut a = Buffer::from_slice(&one, &[1_u32; 64]).unwrap();
    let mut b = Buffer::from_slice(&one, &[5_u32; 64]).unwrap();
    one.completed().await.unwrap();
    device.switch_tracking_off();
    set(&one, &mut a, 2).unwrap();
    // Refused before the call: `b` is unchanged.
    let error = copy(&two, &a, &mut b).unwrap_err();
    assert!(error.is_race(), "{error}");
    let message = error.to_string();
    for part in [
        "external work `copy` on `two`",
        "external work `copy` on stream `two` reads bytes 0..256",
        "which external work `set` on stream `one` writes",
        "make `two` wait for `one`",
    ] {
        assert!(message.contains(part), "{part} in: {message}");
    }
    assert_eq!(b.to_vec(&two).await.unwrap(), [5; 64]);
    // The reverse: a kernel after external work.
    let error = increment::launch(&two, &mut a).unwrap_err();
    assert!(error.is_race() && error.to_string().contains("external work `set` on stream `one` writes"), "{error}");
    two.wait_for(&one).unwrap();
    copy(&two, &a, &mut b).unwrap();
    assert_eq!(b.to_vec(&two).await.unwrap(), [2; 64]);
});

/// External work without a replacement for the emulated device.
fn failing<'a>(stream: &'a Stream, a: &'a mut Buffer<u32>) -> External<'a, [u64; 1]> {
    stream.external("failing").write(a)
}

/// The function's error is returned with its location. It may have enqueued something, so its slices count as used.
#[tokio::test]
#[ignore = "needs a GPU"]
async fn s5_an_error_of_external_work_is_passed_on() {
    let device = common::cuda();
    let stream = Stream::named(&device, "stream").unwrap();
    let mut a = Buffer::from_slice(&stream, &[1_u32; 64]).unwrap();
    stream.completed().await.unwrap();
    let held = hold(&stream);
    let before = stream.ticket().number();
    // SAFETY: it enqueues nothing.
    let error =
        unsafe { failing(&stream, &mut a).enqueue(|_, _| Err(std::io::Error::other("no cuBLAS").into())) }.unwrap_err();
    assert_eq!(error.to_string(), "external work `failing` on `stream`: no cuBLAS");
    assert!(error.downcast_ref::<std::io::Error>().is_some());
    assert_eq!(stream.ticket().number(), before + 1);
    let in_use = device.memory_in_use();
    drop(a);
    assert_eq!(device.memory_in_use(), in_use, "work that was enqueued may still use it");
    drop(held);
    freed(&device).await;
}

/// The function cannot use the other part of the memory that its work declares: that use would be forgotten.
#[tokio::test]
#[ignore = "needs a GPU"]
async fn the_function_of_external_work_cannot_use_the_rest_of_its_memory() {
    let device = common::cuda();
    let [one, two] = ["one", "two"].map(|name| Stream::named(&device, name).unwrap());
    let mut a = Buffer::from_slice(&one, &[1_u32; 64]).unwrap();
    let (mut left, mut right) = a.split_at_mut(32).unwrap();
    let mut refused = None;
    let set = |stream, [to]: [u64; 1]| {
        refused = two.fill(&mut right, 3).err();
        cuda::set(stream, to, 7, 32)
    };
    // SAFETY: one memset on this stream, of the slice that is declared.
    unsafe { one.external("set").write(&mut left).enqueue(set) }.unwrap();
    let refused = refused.unwrap();
    assert_eq!(refused.kind(), ErrorKind::Usage);
    assert!(refused.to_string().contains("stream `two` would use memory that external work declares"), "{refused}");
    two.fill(&mut right, 3).unwrap();
    let mut expected = [7; 64];
    expected[32..].fill(3);
    assert_eq!(a.to_vec(&two).await.unwrap(), expected);
    drop(a);
    freed(&device).await;
}

/// The emulated device requires a replacement, runs it in stream order, and checks it against the declaration.
#[tokio::test]
async fn s5_the_replacement_of_external_work() {
    let device = emulated();
    let stream = Stream::named(&device, "stream").unwrap();
    let mut a = Buffer::from_slice(&stream, &[1_u32; 4]).unwrap();
    // SAFETY: it enqueues nothing.
    let error = unsafe { failing(&stream, &mut a).enqueue(|_, _| Ok::<_, Error>(())) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("provide a replacement with `.emulated(..)`"), "{error}");

    // Host memory and another device's memory are not slices of this device.
    let mut pinned = Buffer::pinned(&device, 4).unwrap();
    let error = set(&stream, &mut pinned, 1).unwrap_err();
    assert!(error.to_string().contains("external work `set` on `stream`: invalid use"), "{error}");
    let mut far = Buffer::new(&emulated(), 4).unwrap();
    let error = set(&stream, &mut far, 1).unwrap_err();
    assert!(error.to_string().contains("copy the argument to the stream's device first"), "{error}");

    for wrong in [true, false] {
        let device = emulated();
        let stream = Stream::named(&device, "stream").unwrap();
        let b = Buffer::from_slice(&stream, &[1_u32; 4]).unwrap();
        let call = stream.external("wrong").read(&b).emulated(move |[mut b]| {
            if wrong {
                b.as_slice::<f32>();
            } else {
                b.as_mut_slice::<u32>();
            }
        });
        // SAFETY: it enqueues nothing.
        unsafe { call.enqueue(|_, _| Ok::<_, Error>(())) }.unwrap();
        let error = within(stream.completed()).await.unwrap_err();
        assert!(error.is_device_lost());
        let expected = if wrong { "declared with elements of `u32`, not `f32`" } else { "declared with `read`" };
        assert!(format!("{error:#}").contains(expected), "{expected} in: {error:#}");
    }
}

/// A fault can be injected into external work, as into a kernel.
#[tokio::test]
async fn s5_external_work_may_trap() {
    let device = emulated_with(Emulated::new().faults(Faults::new().trap_kernel("set", 2)));
    let stream = Stream::named(&device, "stream").unwrap();
    let mut a = Buffer::<u32>::new(&device, 4).unwrap();
    set(&stream, &mut a, 1).unwrap();
    within(stream.completed()).await.unwrap();
    set(&stream, &mut a, 2).unwrap();
    assert!(within(stream.completed()).await.unwrap_err().is_device_lost());
}

// In a flow, external work becomes part of the message's work without a further call.
struct SetAndIncrement;

impl Operator for SetAndIncrement {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        let (stream, len) = (cx.stream()?, envelope.len());
        let call = stream.external("set").write(&mut envelope);
        let call = call.emulated(|[mut to]| to.as_mut_slice::<u32>().fill(41));
        // SAFETY: one memset on this stream, of the slice that is declared.
        unsafe { call.enqueue(|stream, [to]| cuda::set(stream, to, 41, len)) }?;
        increment::launch(stream, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

on_both!(s5_external_work_in_a_flow, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("s5");
    let produce = flow.add("produce", SendEach::new((0..20).map(|n| vec![n; 64])));
    let set = flow.add("set", SetAndIncrement).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, set.input, HubOptions::default().envelope_bytes(256));
    flow.connect(set.output, consume.input);
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), vec![vec![42; 64]; 20]);
});

/// Conversion from and to cudarc's streams.
#[cfg(feature = "cuda")]
mod of_cudarc {
    use super::*;
    use cudarc::driver::CudaContext;

    #[tokio::test]
    #[ignore = "needs a GPU"]
    async fn s5_a_stream_of_another_library() {
        let device = common::cuda();
        let context = CudaContext::new(0).unwrap();
        let theirs = context.new_stream().unwrap();
        // SAFETY: the stream is not captured, and the work that the test itself enqueues there touches only memory of
        // cudarc's.
        let ours = unsafe { Stream::from_cudarc(&device, theirs.clone()) }.unwrap();
        assert_eq!(ours.device(), &device);
        let other = Stream::named(&device, "other").unwrap();
        let mut a = Buffer::from_slice(&other, &[1_u32; 64]).unwrap();
        let mut b = Buffer::<u32>::new(&device, 64).unwrap();
        for _ in 0..20 {
            // Work through wakeline is ordered as on any stream.
            increment::launch(&other, &mut a).unwrap();
            increment::launch(&ours, &mut a).unwrap();
            copy(&ours, &a, &mut b).unwrap();
            increment::launch(&other, &mut a).unwrap();
        }
        assert_eq!(a.to_vec(&ours).await.unwrap(), [61; 64]);
        assert_eq!(b.to_vec(&other).await.unwrap(), [60; 64]);
        // cudarc's own work with its own memory: a wait for the stream includes it.
        let host = vec![9_u32; 1 << 20];
        let mut slice = theirs.alloc_zeros::<u32>(1 << 20).unwrap();
        theirs.memcpy_htod(&host, &mut slice).unwrap();
        let before = ours.ticket();
        within(ours.completed()).await.unwrap();
        assert!(before.has_passed());
        assert_eq!(theirs.clone_dtoh(&slice).unwrap(), host);
        // The wakeline stream outlives cudarc's handle.
        drop((slice, theirs));
        increment::launch(&ours, &mut a).unwrap();
        assert_eq!(a.to_vec(&ours).await.unwrap(), [62; 64]);

        // Back to cudarc.
        // SAFETY: `ours` outlives it, and it touches no memory of wakeline's.
        let again = unsafe { ours.to_cudarc() }.unwrap();
        again.synchronize().unwrap();
        drop(again);
        assert_eq!(a.to_vec(&ours).await.unwrap(), [62; 64], "cudarc does not destroy the stream");
        drop((a, b));
        freed(&device).await;
    }

    #[tokio::test]
    #[ignore = "needs a GPU"]
    async fn s5_a_stream_that_cannot_be_imported() {
        let device = common::cuda();
        let context = CudaContext::new(0).unwrap();
        // SAFETY: as above; this holds for all that follow.
        let null = unsafe { Stream::from_cudarc(&device, context.default_stream()) }.unwrap();
        assert_eq!(null, Stream::default_of(&device).unwrap());
        // SAFETY: as above.
        let error = unsafe { Stream::from_cudarc(&device, context.per_thread_stream()) }.unwrap_err();
        assert!(error.to_string().contains("is a different stream on each thread"), "{error}");
        // SAFETY: as above.
        let error = unsafe { Stream::from_cudarc(&emulated(), context.new_stream().unwrap()) }.unwrap_err();
        assert!(error.to_string().contains("is not a CUDA device"), "{error}");
        if Device::cuda_count() > 1 {
            let other = CudaContext::new(1).unwrap();
            // SAFETY: as above.
            let error = unsafe { Stream::from_cudarc(&device, other.new_stream().unwrap()) }.unwrap_err();
            assert!(error.to_string().contains("its context on device 1 is not"), "{error}");
        }
    }

    #[test]
    fn s5_an_emulated_stream_has_no_cudarc_stream() {
        let stream = Stream::new(&emulated()).unwrap();
        // SAFETY: the call fails and returns no stream.
        let error = unsafe { stream.to_cudarc() }.unwrap_err();
        assert!(error.to_string().contains("is not a CUDA device: cudarc has no stream on it"), "{error}");
    }
}

// S9: events.

on_both!(s9_an_event_is_recorded_awaited_and_queried, async |device: Device| {
    let (one, two) = (Stream::named(&device, "one").unwrap(), Stream::named(&device, "two").unwrap());
    let event = Event::new();
    assert!(event.query().unwrap(), "nothing is recorded");
    event.completed().await.unwrap();
    event.wait(&two).unwrap();
    let mut a = Buffer::from_slice(&one, &[1_u32; 64]).unwrap();
    one.completed().await.unwrap();
    device.switch_tracking_off();
    let held = hold(&one);
    increment::launch(&one, &mut a).unwrap();
    event.record(&one).unwrap();
    assert!(!event.query().unwrap());
    assert!(event.completed().now_or_never().is_none());
    event.wait(&two).unwrap();
    // The wait for the event is the only ordering, and it is sufficient.
    increment::launch(&two, &mut a).unwrap();
    assert!(!two.ticket().has_passed());
    drop(held);
    (&event).await.unwrap();
    assert!(event.query().unwrap());
    assert_eq!(a.to_vec(&two).await.unwrap(), [3; 64]);
});

// An event is recorded again: earlier waits keep the earlier record, on the device and on the host.
on_both!(s9_a_later_record_does_not_change_earlier_waits, async |device: Device| {
    for event in [Event::new(), Event::timed()] {
        let [one, two, three, four] = ["one", "two", "three", "four"].map(|name| Stream::named(&device, name).unwrap());
        let [mut a, mut b] = [0, 1].map(|_| Buffer::<u32>::new(&device, 64).unwrap());
        one.fill(&mut a, 0).unwrap();
        event.record(&one).unwrap();
        event.wait(&three).unwrap();
        let old = event.completed();
        let held = hold(&two);
        event.record(&two).unwrap();
        event.wait(&four).unwrap();
        assert!(!event.query().unwrap());
        old.await.unwrap();
        // Not host functions: a GPU's driver may run all of them on one thread, and that thread is held.
        three.fill(&mut a, 0).unwrap();
        three.completed().await.unwrap();
        four.fill(&mut b, 0).unwrap();
        assert!(four.completed().now_or_never().is_none());
        drop(held);
        four.completed().await.unwrap();
    }
});

// The same on one stream, where the device's event itself may be recorded again.
on_both!(s9_a_later_record_of_the_same_stream_does_not_change_earlier_waits, async |device: Device| {
    for somebody_waits in [false, true] {
        let [one, two, three] = ["one", "two", "three"].map(|name| Stream::named(&device, name).unwrap());
        let [mut a, mut b, mut c] = [0, 1, 2].map(|_| Buffer::<u32>::new(&device, 64).unwrap());
        let event = Event::new();
        one.fill(&mut a, 0).unwrap();
        event.record(&one).unwrap();
        event.wait(&two).unwrap();
        let old = somebody_waits.then(|| event.completed());
        let held = hold(&one);
        event.record(&one).unwrap();
        event.wait(&three).unwrap();
        assert!(!event.query().unwrap());
        if let Some(old) = old {
            old.await.unwrap();
        }
        two.fill(&mut b, 0).unwrap();
        two.completed().await.unwrap();
        three.fill(&mut c, 0).unwrap();
        assert!(three.completed().now_or_never().is_none());
        drop(held);
        three.completed().await.unwrap();
        assert!(event.query().unwrap());
    }
});

on_both!(s9_the_time_between_two_events, async |device: Device| {
    let (one, two) = (Stream::named(&device, "one").unwrap(), Stream::named(&device, "two").unwrap());
    let (begin, middle, end) = (Event::timed(), Event::timed(), Event::timed());
    let mut a = Buffer::<u32>::new(&device, 1 << 16).unwrap();
    begin.record(&one).unwrap();
    one.fill(&mut a, 0).unwrap();
    middle.record(&one).unwrap();
    // Across streams of the device.
    increment::launch(&two, &mut a).unwrap();
    end.record(&two).unwrap();
    let (first, second, all) = (middle.since(&begin), end.since(&middle), end.since(&begin));
    let (first, second, all) = (first.await.unwrap(), second.await.unwrap(), all.await.unwrap());
    assert!(all > Duration::ZERO);
    let parts = first + second;
    // The device's clock has a limited resolution.
    assert!(parts.abs_diff(all) < Duration::from_micros(5), "{first:?} + {second:?} = {all:?}");
    assert_eq!(begin.since(&end).await.unwrap(), Duration::ZERO, "the other way round");

    let since_error = async |from: &Event, to: &Event| to.since(from).await.unwrap_err().to_string();
    assert!(since_error(&Event::new(), &end).await.contains("create it with `Event::timed`"));
    assert!(since_error(&begin, &Event::timed()).await.contains("never recorded"));
    let (elsewhere, late) = (common::emulated(), Event::timed());
    late.record(&Stream::new(&elsewhere).unwrap()).unwrap();
    assert!(since_error(&begin, &late).await.contains("is not defined"));
});

/// A fault fails every wait for an event.
#[tokio::test]
async fn s9_an_event_on_a_lost_device() {
    let device = emulated_with(Emulated::new().faults(Faults::new().trap_kernel("increment", 1)));
    let stream = Stream::new(&device).unwrap();
    let mut a = Buffer::from_slice(&stream, &[1_u32; 4]).unwrap();
    let event = Event::timed();
    let held = hold(&stream);
    increment::launch(&stream, &mut a).unwrap();
    event.record(&stream).unwrap();
    drop(held);
    assert!(within(event.completed()).await.unwrap_err().is_device_lost());
    assert!(event.query().unwrap_err().is_device_lost());
    assert!(event.record(&stream).unwrap_err().is_device_lost());
}

// S9: the current stream.

on_both!(s9_a_scope_sets_the_current_stream, async |device: Device| {
    let (outer, inner) = (Stream::named(&device, "outer").unwrap(), Stream::named(&device, "inner").unwrap());
    let name = || Stream::current().map(|stream| stream.name().to_string());
    assert_eq!(name(), None);
    let seen = outer.scope(|| (name(), inner.scope(name), name()));
    assert_eq!(seen, (Some("outer".into()), Some("inner".into()), Some("outer".into())));
    // Async: the scope moves with the future, and does not affect tasks that run beside it.
    let other = inner.scoped(async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
            assert_eq!(name(), Some("inner".into()));
        }
        tokio::spawn(async move { name() }).await.unwrap()
    });
    let this = outer.scoped(async {
        for _ in 0..100 {
            assert_eq!(name(), Some("outer".into()));
            tokio::task::yield_now().await;
        }
    });
    let (spawned, ()) = futures::join!(other, this);
    assert_eq!((spawned, name()), (None, None));
    // The scope is restored after a panic too.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| outer.scope(|| panic!("on purpose"))));
    assert!(panicked.is_err() && name().is_none());
});

// MindSpore's example of events, as intended and as published, with functions that use the current stream.
on_both!(s7_mindspores_events_with_a_current_stream, async |device: Device| {
    fn increment_here(a: &mut Buffer<u32>) -> Result<()> {
        increment::launch(&Stream::current().expect("a scope"), a)
    }
    for wrong in [false, true] {
        let device = if device.is_cuda() { common::cuda() } else { common::emulated() };
        let (main, side) = (Stream::named(&device, "main").unwrap(), Stream::named(&device, "side").unwrap());
        let mut a = Buffer::from_slice(&main, &[1_u32; 64]).unwrap();
        main.completed().await.unwrap();
        device.switch_tracking_off();
        let (ev1, ev2) = (Event::new(), Event::new());
        main.scope(|| increment_here(&mut a)).unwrap();
        ev1.record(&main).unwrap();
        ev1.wait(&side).unwrap();
        side.scope(|| increment_here(&mut a)).unwrap();
        ev2.record(&side).unwrap();
        let awaited = if wrong { &ev1 } else { &ev2 };
        awaited.wait(&main).unwrap();
        let done = main.scope(|| increment_here(&mut a));
        if wrong {
            let error = done.unwrap_err();
            assert!(error.is_race() && error.to_string().contains("make `main` wait for `side`"), "{error}");
            side.completed().await.unwrap();
        } else {
            done.unwrap();
            assert_eq!(a.to_vec(&main).await.unwrap(), [4; 64]);
        }
    }
});
