//! Parts of buffers, envelopes and chunks: as arguments of kernels and other libraries, in copies, fills and graphs.

use std::thread;

use common::*;
use futures::FutureExt;
use wakeline::{Stream, device::Emulated, graph::Graph, memory::DeviceSlice, prelude::*};

const LEN: usize = 64;

fn numbers() -> Vec<u32> {
    (0..LEN as u32).collect()
}

/// The numbers, with those of `range` from `with`.
fn with(range: std::ops::Range<usize>, with: impl Fn(usize) -> u32) -> Vec<u32> {
    let mut all = numbers();
    range.for_each(|at| all[at] = with(at));
    all
}

on_both!(a_kernel_gets_parts_of_a_buffer, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut x = Buffer::from_slice(&stream, &numbers()).unwrap();
    increment::launch(&stream, &mut x.slice_mut(5..9).unwrap()).unwrap();
    assert_eq!(x.to_vec(&stream).await.unwrap(), with(5..9, |at| at as u32 + 1));
    increment::launch(&stream, &mut x.slice_mut(60..).unwrap().slice_mut(1..=1).unwrap()).unwrap();
    assert_eq!(x.slice(61..62).unwrap().len(), 1);
    assert_eq!(x.to_vec(&stream).await.unwrap()[60..], [60, 62, 62, 63]);
    // An empty part is nothing to do, wherever it is.
    increment::launch(&stream, &mut x.slice_mut(LEN..).unwrap()).unwrap();
    drop(x);

    let mut x = Buffer::from_slice(&stream, &numbers()).unwrap();
    let (left, mut right) = x.split_at_mut(LEN / 2).unwrap();
    add_one::launch(&stream, &left.slice(1..).unwrap(), &mut right.slice_mut(..LEN / 2 - 1).unwrap()).unwrap();
    assert_eq!(x.to_vec(&stream).await.unwrap(), with(32..63, |at| at as u32 - 32 + 2));
    let (empty, mut all) = x.split_at_mut(0).unwrap();
    add_one::launch(&stream, &empty, &mut all.slice_mut(..0).unwrap()).unwrap();
    let (mut all, empty) = x.split_at_mut(LEN).unwrap();
    assert_eq!((all.len(), empty.len(), empty.is_empty()), (LEN, 0, true));
    increment::launch(&stream, &mut all).unwrap();
    drop(x);
    freed(&device).await;
});

/// Memory for the numbers, at each kind of place.
async fn places(device: &Device, stream: &Stream) -> Vec<(&'static str, Buffer<u32>)> {
    let mut pinned = Buffer::pinned(device, LEN).unwrap();
    pinned.write().await.unwrap().copy_from_slice(&numbers());
    let (wrapped, _) = Buffer::wrap(numbers()).unwrap();
    let on_device = Buffer::from_slice(stream, &numbers()).unwrap();
    vec![("pinned", pinned), ("not page-locked", wrapped), ("the device", on_device)]
}

on_both!(parts_are_copied_between_all_places, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    for (from_name, mut from) in places(&device, &stream).await {
        for (to_name, mut to) in places(&device, &stream).await {
            // Twice: the second copy overlaps the first, which may still be on its way.
            stream.copy(&from.slice(10..20).unwrap(), &mut to.slice_mut(30..40).unwrap()).unwrap();
            stream.copy(&from.slice(1..4).unwrap(), &mut to.slice_mut(38..41).unwrap()).unwrap();
            let mut expected = with(30..40, |at| at as u32 - 20);
            expected[38..41].copy_from_slice(&[1, 2, 3]);
            // Onwards from where the first copies might not have arrived.
            stream.copy(&to.slice(35..45).unwrap(), &mut from.slice_mut(0..10).unwrap()).unwrap();
            assert_eq!(to.to_vec(&stream).await.unwrap(), expected, "from {from_name} to {to_name}");
            assert_eq!(
                from.to_vec(&stream).await.unwrap()[..11],
                [15, 16, 17, 1, 2, 3, 41, 42, 43, 44, 10],
                "back from {to_name} to {from_name}"
            );
            if to.is_host() {
                assert_eq!(to.read().await.unwrap(), expected, "{to_name}");
            }
            stream.copy(&to.slice(..10).unwrap(), &mut from.slice_mut(..10).unwrap()).unwrap();
            if from.is_host() {
                assert_eq!(from.read().await.unwrap(), numbers(), "{from_name}");
            }
        }
        // From one half to the other of the same memory.
        let (left, mut right) = from.split_at_mut(LEN / 2).unwrap();
        stream.copy(&left, &mut right).unwrap();
        assert_eq!(from.to_vec(&stream).await.unwrap(), with(32..64, |at| at as u32 - 32), "{from_name}");
    }
    let mut x = Buffer::from_slice(&stream, &numbers()).unwrap();
    stream.fill(&mut x.slice_mut(3..7).unwrap(), 9).unwrap();
    assert_eq!(x.to_vec(&stream).await.unwrap(), with(3..7, |_| 9));
    let mut x = Buffer::from_slice(&stream, &[1_u8; 8]).unwrap();
    stream.fill(&mut x.slice_mut(3..6).unwrap(), 9).unwrap();
    assert_eq!(x.to_vec(&stream).await.unwrap(), [1, 1, 1, 9, 9, 9, 1, 1]);
    let error = stream.fill(&mut Buffer::pinned(&device, 4).unwrap().slice_mut(1..2).unwrap(), 1_u32).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
});

async fn between_two(one: Device, other: Device) {
    let [a, b] = [&one, &other].map(|device| Stream::new(device).unwrap());
    let mut x = Buffer::from_slice(&a, &numbers()).unwrap();
    let mut y = Buffer::<u32>::from_slice(&b, &[7; LEN]).unwrap();
    b.copy(&x.slice(2..6).unwrap(), &mut y.slice_mut(60..).unwrap()).unwrap();
    a.copy(&y.slice(58..62).unwrap(), &mut x.slice_mut(..4).unwrap()).unwrap();
    assert_eq!(y.to_vec(&b).await.unwrap()[58..], [7, 7, 2, 3, 4, 5]);
    assert_eq!(x.to_vec(&a).await.unwrap()[..6], [7, 7, 2, 3, 4, 5]);
}

#[tokio::test]
async fn parts_are_copied_between_emulated_devices() {
    within(between_two(emulated(), emulated())).await;
}

#[tokio::test]
#[ignore = "needs two GPUs"]
async fn parts_are_copied_between_two_gpus() {
    let gpu = |n| Device::cuda(n).unwrap().race_checked();
    within(between_two(gpu(0), gpu(1))).await;
}

on_both!(the_race_checker_sees_the_parts_alone, async |device: Device| {
    let [a, b] = streams(&device);
    let mut x = Buffer::from_slice(&a, &numbers()).unwrap();
    a.completed().await.unwrap();
    device.switch_tracking_off();
    {
        let (mut left, mut right) = x.split_at_mut(10).unwrap();
        increment::launch(&a, &mut left).unwrap();
        increment::launch(&b, &mut right.slice_mut(5..).unwrap()).unwrap();
        b.fill(&mut right.slice_mut(..5).unwrap(), 1).unwrap();
        let error = b.fill(&mut left.slice_mut(9..).unwrap(), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Race, "{error}");
        let error = increment::launch(&a, &mut right.slice_mut(..1).unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Race, "{error}");
    }
    let mut y = Buffer::<u32>::pinned(&device, 1).unwrap();
    a.copy(&x.slice(9..10).unwrap(), &mut y).unwrap();
    let error = a.copy(&x.slice(10..11).unwrap(), &mut y).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Race, "{error}");
    a.wait_for(&b).unwrap();
    a.copy(&x.slice(10..11).unwrap(), &mut y).unwrap();
    a.completed().await.unwrap();
    b.completed().await.unwrap();
});

on_both!(work_on_one_half_comes_after_earlier_work_on_the_other, async |device: Device| {
    let [a, b] = streams(&device);
    let mut x = Buffer::from_slice(&a, &numbers()).unwrap();
    let held = hold(&a);
    let (mut left, mut right) = x.split_at_mut(LEN / 2).unwrap();
    increment::launch(&a, &mut left).unwrap();
    increment::launch(&b, &mut right).unwrap();
    tokio::task::yield_now().await;
    assert!(b.completed().now_or_never().is_none(), "the memory is tracked as a whole");
    drop(held);
    assert_eq!(x.to_vec(&b).await.unwrap(), with(0..LEN, |at| at as u32 + 1));
});

on_both!(halves_are_used_on_two_threads, async |device: Device| {
    let [a, b, c] = streams(&device);
    for round in 0..quick_or_long(20, 200) {
        let mut x = Buffer::from_slice(&c, &numbers()).unwrap();
        let (mut left, mut right) = x.split_at_mut(LEN / 2).unwrap();
        thread::scope(|scope| {
            for (stream, half) in [(&a, &mut left), (&b, &mut right)] {
                scope.spawn(move || {
                    for _ in 0..10 {
                        increment::launch(stream, &mut half.slice_mut(1..).unwrap()).unwrap();
                        stream.fill(&mut half.slice_mut(..1).unwrap(), 5).unwrap();
                    }
                });
            }
        });
        // Comes after both; the race checker would refuse it otherwise.
        let mut expected = with(0..LEN, |at| at as u32 + 10);
        (expected[0], expected[LEN / 2]) = (5, 5);
        if round % 2 == 0 {
            assert_eq!(x.to_vec(&c).await.unwrap(), expected);
        }
        // Freed and allocated anew while the streams may still be using it.
        drop(x);
    }
    freed(&device).await;
});

on_both!(many_parts_are_used_on_threads_and_streams_of_their_own, async |device: Device| {
    const PARTS: usize = 4;
    let streams = streams::<PARTS>(&device);
    for _ in 0..quick_or_long(10, 100) {
        let mut x = Buffer::from_slice(&streams[0], &numbers()).unwrap();
        let (mut parts, mut rest) = (Vec::new(), x.slice_mut(..).unwrap());
        for len in (1..PARTS).map(|at| 3 * at) {
            let (part, tail) = rest.split_at_mut(len).unwrap();
            parts.push(part);
            rest = tail;
        }
        parts.push(rest);
        assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [3, 6, 9, 46]);
        thread::scope(|scope| {
            for (stream, mut part) in streams.iter().zip(parts) {
                scope.spawn(move || {
                    for _ in 0..5 {
                        increment::launch(stream, &mut part).unwrap();
                    }
                });
            }
        });
        assert_eq!(x.to_vec(&streams[1]).await.unwrap(), with(0..LEN, |at| at as u32 + 5));
    }
    freed(&device).await;
});

on_both!(a_graph_works_on_parts, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut input = Buffer::pinned(&device, LEN).unwrap();
    input.write().await.unwrap().copy_from_slice(&numbers());
    let mut x = Buffer::<u32>::from_slice(&stream, &[0; LEN]).unwrap();
    let mut out = Buffer::<u32>::pinned(&device, 8).unwrap();
    out.write().await.unwrap().fill(0);
    let (graph, ()) = Graph::capture(&device, |capture| {
        capture.input(&input.slice(4..)?)?;
        let (mut left, mut right) = out.split_at_mut(4)?;
        capture.output(&mut left)?;
        capture.output(&mut right)?;
        let stream = capture.stream();
        stream.copy(&input.slice(8..16)?, &mut x.slice_mut(4..12)?)?;
        increment::launch(stream, &mut x.slice_mut(5..7)?)?;
        stream.copy(&x.slice(4..8)?, &mut left)?;
        stream.copy(&x.slice(8..12)?, &mut right)
    })
    .unwrap();
    let exec = graph.instantiate().unwrap();
    let [copy] = graph.inputs() else { panic!("one copy from the input") };
    assert_eq!((copy.offset(), copy.bytes()), (16, 32), "counted from the part's start");
    let mut other = Buffer::<u32>::pinned(&device, LEN + 8).unwrap();
    other.write().await.unwrap().iter_mut().zip(0..).for_each(|(number, at)| *number = 100 * at);
    // A part stands for the whole input, too.
    copy.copy(&stream, &other.slice(12..).unwrap()).unwrap();
    exec.launch(&stream).unwrap().completed().await.unwrap();
    assert_eq!(out.to_vec(&stream).await.unwrap(), [1600, 1701, 1801, 1900, 2000, 2100, 2200, 2300]);
    let error = copy.copy(&stream, &other.slice(8..16).unwrap()).unwrap_err();
    assert!(error.to_string().contains("cannot copy 32 bytes from offset 16 of 32 bytes"), "{error}");
});

on_both!(an_envelope_keeps_its_length, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut envelope = Envelope::from(Buffer::from_slice(&stream, &numbers()).unwrap());
    envelope.set_len(20).unwrap();
    stream.fill(&mut envelope.slice_mut(18..).unwrap(), 3).unwrap();
    let (mut left, right) = envelope.split_at_mut(15).unwrap();
    stream.copy(&right, &mut left.slice_mut(..5).unwrap()).unwrap();
    assert_eq!((envelope.len(), envelope.capacity()), (20, LEN));
    let error = envelope.slice(18..21).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("the valid part of an envelope with room for 64 elements (see `Envelope::set_len`)"),
        "{text}"
    );
    assert!(text.ends_with("there is no part 18..21 of these elements: there are 20"), "{text}");
    for error in [
        envelope.slice_mut(..=20).map(drop).unwrap_err(),
        envelope.split_at(21).map(drop).unwrap_err(),
        envelope.split_at_mut(21).map(drop).unwrap_err(),
    ] {
        assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("there are 20"), "{error}");
    }
    let mut here = Buffer::<u32>::pinned(&device, 20).unwrap();
    stream.copy(&envelope, &mut here).unwrap();
    let mut expected = numbers()[..20].to_vec();
    expected[..5].copy_from_slice(&[15, 16, 17, 3, 3]);
    expected[18..].fill(3);
    assert_eq!(here.read().await.unwrap(), expected);
});

on_both!(a_chunk_has_parts, async |device: Device| {
    let hub = ChunkHub::<u32>::builder("chunks").elements(8).envelopes(&device, 1).host_envelopes(1).build().unwrap();
    hub.produce(&Device::host()).unwrap().with(async |blank| blank.fill_from(&[1, 2, 3, 4, 5, 6]).await).await.unwrap();
    let stream = Stream::new(&device).unwrap();
    let mut modify = hub.modify(&device).unwrap();
    let mut chunk = modify.next().await.unwrap().unwrap();
    assert!(chunk.slice_mut(4..7).is_err());
    increment::launch(&stream, &mut chunk.slice_mut(4..).unwrap()).unwrap();
    let (left, mut right) = chunk.split_at_mut(1).unwrap();
    stream.copy(&left, &mut right.slice_mut(..1).unwrap()).unwrap();
    assert_eq!(chunk.slice(1..).unwrap().len(), 5);
    chunk.commit().unwrap();
    let chunk = hub.peek(&Device::host()).unwrap().next().await.unwrap().unwrap();
    assert_eq!(chunk.read().await.unwrap(), [1, 1, 3, 4, 6, 7]);
});

on_both!(other_libraries_get_parts, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut x = Buffer::from_slice(&stream, &numbers()).unwrap();
    let start = x.device_address().unwrap();
    let (left, mut right) = x.split_at_mut(8).unwrap();
    let left = left.slice(4..).unwrap();
    let call = stream.external("copy").read(&left).write(&mut right).emulated(|[from, mut to]| {
        let from = from.as_slice::<u32>();
        to.as_mut_slice::<u32>()[..from.len()].copy_from_slice(from);
    });
    // SAFETY: nothing is enqueued.
    unsafe {
        call.enqueue(|_, addresses| {
            assert_eq!(addresses, [start + 16, start + 32]);
            Ok(())
        })
    }
    .unwrap();
    let copied = |at: usize| if device.name().starts_with("cuda") { at as u32 } else { at as u32 - 4 };
    assert_eq!(x.to_vec(&stream).await.unwrap(), with(8..12, copied));
});

#[tokio::test]
async fn a_range_that_is_not_there_is_an_error() {
    fn text<T>(made: Result<T>) -> String {
        let error = made.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        error.to_string()
    }
    let mut x = Buffer::<u32>::new(&emulated(), 8).unwrap();
    assert!(text(x.slice(3..9)).contains("there is no part 3..9 of these elements: there are 8"));
    #[expect(clippy::reversed_empty_ranges)]
    let reversed = 5..3;
    assert!(text(x.slice(reversed)).contains("there is no part 5..3 of these elements: it begins after its end"));
    assert!(text(x.slice(9..)).contains("there are 8"));
    assert!(text(x.slice(..=usize::MAX)).contains("there are 8"));
    assert!(text(x.slice((std::ops::Bound::Excluded(usize::MAX), std::ops::Bound::Unbounded))).contains("there are 8"));
    assert!(text(x.slice_mut(usize::MAX..)).contains("there are 8"));
    assert!(text(x.split_at(9)).contains("there are 8"));
    assert!(text(x.split_at_mut(usize::MAX)).contains("there are 8"));
    let mut part = x.slice_mut(2..6).unwrap();
    assert!(text(part.slice(..5)).contains("there are 4"));
    assert!(text(part.slice_mut(..5)).contains("there are 4"));
    assert!(text(part.split_at(5)).contains("there are 4"));
    assert!(text(part.slice_mut(..).unwrap().split_at_mut(5)).contains("there are 4"));
    assert!(text(part.split_at_mut(usize::MAX)).contains("there are 4"));
    assert!(text(x.slice(2..6).unwrap().slice(..5)).contains("there are 4"));
    assert_eq!(x.slice(..).unwrap().len(), 8);
    let stream = Stream::new(x.slice(1..2).unwrap().device()).unwrap();
    let y = Buffer::<u32>::new(stream.device(), 2).unwrap();
    assert!(text(stream.copy(&y, &mut x.slice_mut(1..2).unwrap())).contains("cannot copy 2 elements to 1 elements"));
}

#[tokio::test]
async fn the_elements_of_a_part_are_aligned() {
    #[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C, align(64))]
    struct Wide([u8; 64]);

    let device = emulated_with(Emulated::new());
    let stream = Stream::new(&device).unwrap();
    let all: Vec<Wide> = (0..5).map(|n| Wide([n; 64])).collect();
    let x = Buffer::from_slice(&stream, &all).unwrap();
    let read = |part: wakeline::memory::Slice<'_, Wide>| {
        let wanted = part.len();
        let call = stream.external("look").read(&part).emulated(move |[slice]| {
            assert_eq!((slice.as_slice::<Wide>().len(), slice.as_slice::<Wide>().as_ptr().addr() % 64), (wanted, 0));
        });
        // SAFETY: nothing is enqueued.
        unsafe { call.enqueue(|_, _| Ok(())) }.unwrap();
    };
    read(x.slice(1..).unwrap());
    read(x.slice(3..4).unwrap());
    stream.completed().await.unwrap();
}

/// Code that is generic over what it reads gets parts, too.
#[tokio::test]
async fn a_part_is_a_slice_for_generic_code() {
    fn copied(stream: &Stream, from: &(impl DeviceSlice<u32> + ?Sized), len: usize) -> Result<Buffer<u32>> {
        let mut to = Buffer::new(stream.device(), len)?;
        stream.copy(from, &mut to)?;
        Ok(to)
    }
    let stream = Stream::new(&emulated()).unwrap();
    let mut x = Buffer::from_slice(&stream, &numbers()).unwrap();
    let part = copied(&stream, &x.slice_mut(1..3).unwrap(), 2).unwrap();
    assert_eq!(part.to_vec(&stream).await.unwrap(), [1, 2]);
}
