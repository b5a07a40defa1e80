//! User memory: wrapped by value, used without a copy, returned (H6).

use std::{
    io::Write,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use common::{
    Collect, Increment, SourcePorts, add_one, emulated, freed, hold, increment, lock, on_both, shared, streams, until,
    within,
};
use futures::FutureExt;
use wakeline::{Stream, device::Faults, memory::BufferState, prelude::*};

const LEN: usize = 4096;

/// A file of [`LEN`] bytes, each its own index.
fn file() -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&(0..LEN).map(|n| n as u8).collect::<Vec<_>>()).unwrap();
    file
}

struct Once<T: wakeline::memory::Plain>(Option<Envelope<T>>);

impl<T: wakeline::memory::Plain> Operator for Once<T> {
    type Ports = SourcePorts<Envelope<T>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        ports.output.send(self.0.take().unwrap()).await?;
        Ok(())
    }
}

// A mapped file is sent to a device and returned after the flow's end. Its pages are not copied on the host.
on_both!(h6_a_mapped_file_becomes_an_envelope_and_is_returned, async |device: Device| {
    // SAFETY: no other code uses the file.
    let map = unsafe { memmap2::Mmap::map(&file()) }.unwrap();
    let start = map.as_ptr();
    let (buffer, wrapped) = Buffer::<u8>::wrap_read_only(map).unwrap();
    assert!(buffer.is_host());
    assert_eq!(buffer.as_slice().unwrap().as_ptr(), start, "no copy");

    struct Sum(common::Shared<u64>);
    impl Operator for Sum {
        type Ports = common::SinkPorts<Envelope<u8>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let there = ports.input.take()?;
            assert_eq!(there.location(), cx.device().name());
            let mut here = Buffer::<u8>::pinned(cx.device(), there.len())?;
            cx.stream()?.copy(&there, &mut here)?;
            let sum = here.read().await?.iter().map(|byte| u64::from(*byte)).sum();
            lock(&self.0).push(sum);
            Ok(())
        }
    }
    let seen = shared();
    let mut flow = Flow::new("mapped");
    let send = flow.add("send", Once(Some(Envelope::from(buffer))));
    let sum = flow.add("sum", Sum(seen.clone())).on(&device);
    flow.connect_with(send.output, sum.input, HubOptions::default().envelope_bytes(LEN));
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [(LEN as u64 / 256) * (255 * 256 / 2)]);
    let map = within(wrapped.into_inner()).await.unwrap();
    assert_eq!((map.as_ptr(), map.len(), map[300]), (start, LEN, 44));
    drop(flow);
    freed(&device).await;
});

on_both!(h6_a_copy_from_a_device_reaches_the_mapped_file, async |device: Device| {
    let file = file();
    // SAFETY: no other code uses the file.
    let map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
    let stream = Stream::new(&device).unwrap();
    let (mut pages, wrapped) = Buffer::<u8>::wrap(map).unwrap();
    pages.write().await.unwrap()[..4].copy_from_slice(&[9; 4]);
    let mut there = Buffer::<u8>::new(&device, LEN).unwrap();
    stream.copy(&pages, &mut there).unwrap();
    // The copy has the data from before this write.
    pages.as_mut_slice().unwrap().fill(0);
    let held = hold(&stream);
    stream.copy(&there, &mut pages).unwrap();
    assert_eq!(pages.state().unwrap(), BufferState::Writing);
    assert!(pages.as_slice().is_err(), "the copy is pending");
    assert!(pages.as_mut_slice().is_err());
    drop(held);
    assert_eq!(pages.read().await.unwrap()[..8], [9, 9, 9, 9, 4, 5, 6, 7]);
    drop(pages);
    let map = within(wrapped.into_inner()).await.unwrap();
    assert_eq!(map[..8], [9, 9, 9, 9, 4, 5, 6, 7]);
    drop(there);
    freed(&device).await;
});

// The data arrives even if it is not read before the memory is returned.
on_both!(h6_a_pending_copy_arrives_before_the_memory_is_returned, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let there = Buffer::from_slice(&stream, &[7_u32; LEN]).unwrap();
    let (mut mine, wrapped) = Buffer::wrap(vec![0_u32; LEN]).unwrap();
    let held = hold(&stream);
    stream.copy(&there, &mut mine).unwrap();
    drop(mine);
    let mut back = Box::pin(wrapped.into_inner());
    assert!((&mut back).now_or_never().is_none(), "the copy is pending");
    drop(held);
    assert_eq!(within(back).await.unwrap(), [7; LEN]);
    drop(there);
    freed(&device).await;
});

// Data that has arrived and was not read is copied to a device from its staging memory.
on_both!(h6_staged_memory_is_passed_on_without_the_host, async |device: Device| {
    let [a, b] = [Stream::named(&device, "a").unwrap(), Stream::named(&device, "b").unwrap()];
    let there = Buffer::from_slice(&a, &[3_u32; LEN]).unwrap();
    let (mut mine, wrapped) = Buffer::wrap(vec![0_u32; LEN].into_boxed_slice()).unwrap();
    let mut again = Buffer::<u32>::new(&device, LEN).unwrap();
    let held = hold(&a);
    a.copy(&there, &mut mine).unwrap();
    // `b` waits for `a`, on the device.
    b.copy(&mine, &mut again).unwrap();
    increment::launch(&b, &mut again).unwrap();
    drop(held);
    assert_eq!(again.to_vec(&b).await.unwrap(), [4; LEN]);
    drop(mine);
    assert_eq!(within(wrapped.into_inner()).await.unwrap()[..], [3; LEN]);
    drop((there, again));
    freed(&device).await;
});

/// A write to read-only memory, such as `Bytes`, is an error that says so.
#[tokio::test]
async fn h6_read_only_memory_refuses_writes() {
    let device = emulated();
    let stream = Stream::new(&device).unwrap();
    let (mut bytes, wrapped) = Buffer::<u8>::wrap_read_only(bytes::Bytes::from_static(b"read only")).unwrap();
    let there = Buffer::<u8>::new(&device, 9).unwrap();
    for error in [
        bytes.as_mut_slice().map(drop).unwrap_err(),
        bytes.write().await.map(drop).unwrap_err(),
        stream.copy(&there, &mut bytes).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains("read-only"), "{error}");
    }
    assert_eq!(bytes.read().await.unwrap(), b"read only");
    assert_eq!(bytes.to_vec(&stream).await.unwrap(), b"read only");
    drop(bytes);
    assert_eq!(&wrapped.into_inner().await.unwrap()[..], b"read only");
    drop(there);
    common::at_rest(&device).await;
}

/// A wrong length is an error, and so is zero.
#[tokio::test]
async fn h6_a_wrong_size_is_an_error() {
    let device = emulated();
    let stream = Stream::new(&device).unwrap();
    let mut there = Buffer::<u32>::new(&device, 8).unwrap();
    let (mine, _wrapped) = Buffer::wrap(vec![0_u32; 7]).unwrap();
    let error = stream.copy(&mine, &mut there).unwrap_err();
    assert!(error.to_string().contains("7 elements to 8"), "{error}");
    let error = Buffer::<u32>::wrap(Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    // Larger than the hub's envelopes on the device.
    let seen = shared();
    let mut flow = Flow::new("too large");
    let (large, wrapped) = Buffer::wrap(vec![0_u32; 64]).unwrap();
    let send = flow.add("send", Once(Some(large.into())));
    let add = flow.add("add", Increment).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect_with(send.output, add.input, HubOptions::default().envelope_bytes(128));
    flow.connect(add.output, collect.input);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.to_string().contains("128"), "{error}");
    drop(flow);
    assert_eq!(within(wrapped.into_inner()).await.unwrap().len(), 64, "the memory is returned after an error, too");
}

struct Counted<T>(T, Arc<AtomicUsize>);

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

// Device memory of another library (here of another buffer) is used in place, and not returned while a stream uses it.
on_both!(h6_a_device_pointer_of_another_library, async |device: Device| {
    let stream = Stream::named(&device, "stream").unwrap();
    let theirs = Buffer::from_slice(&stream, &[1_u32; LEN]).unwrap();
    stream.completed().await.unwrap();
    let (address, drops) = (theirs.device_address().unwrap(), Arc::new(AtomicUsize::new(0)));
    // SAFETY: the buffer has this address and length for its whole life, and no other code uses it.
    let (mut mine, wrapped) =
        unsafe { Buffer::<u32>::from_device_address(&device, address, LEN, Counted(theirs, drops.clone())) }.unwrap();
    let held = hold(&stream);
    increment::launch(&stream, &mut mine).unwrap();
    drop(mine);
    let mut back = Box::pin(wrapped.into_inner());
    assert!((&mut back).now_or_never().is_none(), "the stream uses it");
    drop(held);
    let theirs = within(back).await.unwrap();
    assert_eq!(theirs.0.to_vec(&stream).await.unwrap(), [2; LEN]);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(theirs);
    // With `wrapped` dropped, the owner is dropped when the stream is done with the memory.
    let theirs = Buffer::<u32>::new(&device, LEN).unwrap();
    let address = theirs.device_address().unwrap();
    // SAFETY: as above.
    let (mut mine, wrapped) =
        unsafe { Buffer::<u32>::from_device_address(&device, address, LEN, Counted(theirs, drops.clone())) }.unwrap();
    drop(wrapped);
    let held = hold(&stream);
    stream.fill(&mut mine, 5).unwrap();
    drop(mine);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    drop(held);
    until("the owner is dropped", || drops.load(Ordering::SeqCst) == 2).await;
    freed(&device).await;
});

// Page-locked memory of another library is not staged: the device reads it directly.
on_both!(h6_page_locked_memory_of_another_library, async |device: Device| {
    let stream = Stream::named(&device, "stream").unwrap();
    let mut theirs = Buffer::<u32>::pinned(&device, LEN).unwrap();
    let first = NonNull::from(&mut theirs.as_mut_slice().unwrap()[0]);
    // SAFETY: the buffer has this address and length for its whole life, and no other code uses it.
    let (mut mine, wrapped) = unsafe { Buffer::from_page_locked(&device, first, LEN, theirs) }.unwrap();
    mine.as_mut_slice().unwrap().fill(6);
    let mut there = Buffer::<u32>::new(&device, LEN).unwrap();
    let held = hold(&stream);
    stream.copy(&mine, &mut there).unwrap();
    assert!(mine.as_mut_slice().is_err(), "the device reads it");
    drop(mine);
    let mut back = Box::pin(wrapped.into_inner());
    assert!((&mut back).now_or_never().is_none());
    drop(held);
    let theirs = within(back).await.unwrap();
    assert_eq!(theirs.as_slice().unwrap(), [6; LEN]);
    assert_eq!(there.to_vec(&stream).await.unwrap(), [6; LEN]);
    drop((there, theirs));
    freed(&device).await;
});

/// The device that memory was wrapped for may be dropped before another one is done with that memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h6_wrapped_memory_outlives_its_device_while_another_one_uses_it() {
    /// Notes whether it was dropped before the other device was released.
    struct Watched(Vec<u32>, Arc<[AtomicUsize; 2]>);
    impl Drop for Watched {
        fn drop(&mut self) {
            let [released, dropped] = &*self.1;
            dropped.store(1 + released.load(Ordering::SeqCst), Ordering::SeqCst);
        }
    }
    let (other, third) = (emulated(), emulated());
    for _ in 0..8 {
        let (device, stream) = (emulated(), Stream::new(&other).unwrap());
        let notes = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let mut theirs = Watched(vec![7; LEN], notes.clone());
        let first = NonNull::from(&mut theirs.0[0]);
        // SAFETY: the vector has this address and length for its whole life, and no other code uses it. Emulated devices
        // lock no pages.
        let (mine, wrapped) = unsafe { Buffer::from_page_locked(&device, first, LEN, theirs) }.unwrap();
        let mut there = Buffer::<u32>::new(&other, LEN).unwrap();
        let held = hold(&stream);
        stream.copy(&mine, &mut there).unwrap();
        drop((mine, wrapped, device));
        // Gives the dropped device time to release its memory.
        let busy = Stream::new(&third).unwrap();
        for _ in 0..20 {
            busy.host_function(|| ()).unwrap();
            within(busy.completed()).await.unwrap();
        }
        notes[0].store(1, Ordering::SeqCst);
        drop(held);
        assert_eq!(there.to_vec(&stream).await.unwrap(), [7; LEN]);
        until("the owner is dropped", || notes[1].load(Ordering::SeqCst) > 0).await;
        assert_eq!(notes[1].load(Ordering::SeqCst), 2, "dropped although a device had yet to read it");
    }
}

/// Data goes from one kind of device to another through the host, once it has arrived there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn data_goes_between_kinds_of_devices_through_the_host() {
    let _alone = common::alone().await;
    let cuda = common::cuda();
    let (theirs, stream) = (Stream::new(&emulated()).unwrap(), Stream::new(&cuda).unwrap());
    let sent = Buffer::from_slice(&theirs, &[7_u32; LEN]).unwrap();
    let mut near = Buffer::<u32>::pinned(&Device::host(), LEN).unwrap();
    let mut there = Buffer::<u32>::new(&cuda, LEN).unwrap();
    let held = hold(&theirs);
    theirs.copy(&sent, &mut near).unwrap();
    assert_eq!(stream.copy(&near, &mut there).unwrap_err().kind(), ErrorKind::Usage, "the first copy is pending");
    drop(held);
    within(theirs.completed()).await.unwrap();
    stream.copy(&near, &mut there).unwrap();
    assert_eq!(there.to_vec(&stream).await.unwrap(), [7; LEN]);
}

/// A lost device may still access the memory: it is neither returned nor reused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h6_after_a_fault_it_is_left_to_the_device() {
    let device = common::emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("add_one", 1)));
    let stream = Stream::new(&device).unwrap();
    let (mut out, mut there) = (Buffer::<u32>::new(&device, LEN).unwrap(), Buffer::<u32>::new(&device, LEN).unwrap());
    let drops = Arc::new(AtomicUsize::new(0));
    let mut theirs = Buffer::<u32>::new(&device, LEN).unwrap();
    stream.fill(&mut theirs, 0).unwrap();
    stream.fill(&mut there, 0).unwrap();
    within(stream.completed()).await.unwrap();
    let address = theirs.device_address().unwrap();
    // SAFETY: the buffer has this address and length for its whole life, and no other code uses it.
    let (mine, wrapped) =
        unsafe { Buffer::<u32>::from_device_address(&device, address, LEN, Counted(theirs, drops.clone())) }.unwrap();
    let held = hold(&stream);
    add_one::launch(&stream, &mine, &mut out).unwrap();
    let (mut vec, vec_wrapped) = Buffer::wrap(vec![0_u32; LEN]).unwrap();
    stream.copy(&there, &mut vec).unwrap();
    stream.fill(&mut there, 0).unwrap();
    drop((mine, vec));
    drop(held);
    assert!(within(wrapped.into_inner()).await.err().unwrap().is_device_lost());
    assert!(within(vec_wrapped.into_inner()).await.unwrap_err().is_device_lost());
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    assert!(device.memory_leaked() >= 4 * LEN as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h6_a_shorter_second_copy_keeps_the_rest_of_the_first() {
    let device = emulated();
    let [a, b] = streams(&device);
    let four = Buffer::from_slice(&a, &[1_u32, 2, 3, 4]).unwrap();
    let two = Buffer::from_slice(&a, &[8_u32, 9]).unwrap();
    a.completed().await.unwrap();
    let (mine, wrapped) = Buffer::wrap(vec![0_u32; 4]).unwrap();
    let mut mine = Envelope::from(mine);
    let held = hold(&a);
    a.copy(&four, &mut mine).unwrap();
    mine.set_len(2).unwrap();
    b.copy(&two, &mut mine).unwrap();
    let mut read = Box::pin(mine.read());
    assert!((&mut read).now_or_never().is_none(), "the first copy is pending");
    drop(read);
    drop(held);
    a.completed().await.unwrap();
    mine.set_len(4).unwrap();
    assert_eq!(within(mine.read()).await.unwrap(), [8, 9, 3, 4]);
    drop(mine);
    assert_eq!(within(wrapped.into_inner()).await.unwrap(), [8, 9, 3, 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h6_memory_with_a_pending_copy_into_a_part_is_passed_on_whole() {
    let device = emulated();
    let [a, b] = streams(&device);
    let two = Buffer::from_slice(&a, &[8_u32, 9]).unwrap();
    let (mine, wrapped) = Buffer::wrap(vec![1_u32, 2, 3, 4]).unwrap();
    let (mut mine, mut out) = (Envelope::from(mine), Buffer::<u32>::new(&device, 4).unwrap());
    let held = hold(&a);
    mine.set_len(2).unwrap();
    a.copy(&two, &mut mine).unwrap();
    mine.set_len(4).unwrap();
    let passed_on = b.copy(&mine, &mut out);
    drop(held);
    passed_on.unwrap();
    assert_eq!(out.to_vec(&b).await.unwrap(), [8, 9, 3, 4]);
    drop((mine, wrapped));
}

/// Reading tainted memory is an error until all of it is written again. A write of a part is not enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tainted_memory_stays_tainted_after_a_write_of_a_part() {
    for rewritten in [false, true] {
        let (device, lost) = (emulated(), Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1))));
        let ([a, _], [other, _]) = (streams(&device), streams(&lost));
        let [two, four] = [2, 4].map(|len| Buffer::from_slice(&a, &vec![7_u32; len]).unwrap());
        let (mine, wrapped) = Buffer::wrap(vec![1_u32, 2, 3, 4]).unwrap();
        let mut mine = Envelope::from(mine);
        let mut tainted = Buffer::<u32>::new(&lost, 4).unwrap();
        let held = hold(&other);
        other.copy(&Buffer::<u32>::new(&lost, 4).unwrap(), &mut tainted).unwrap();
        a.copy(&tainted, &mut mine).unwrap();
        drop(held);
        assert!(within(other.completed()).await.is_err() && within(a.completed()).await.is_err());
        assert!(mine.as_slice().is_err());

        mine.set_len(2).unwrap();
        a.copy(&two, &mut mine).unwrap();
        assert!(within(a.completed()).await.is_err(), "it wrote a part of tainted memory");
        mine.set_len(4).unwrap();
        for _ in 0..3 {
            assert!(within(mine.read()).await.is_err_and(|error| error.is_device_lost()));
        }
        if rewritten {
            a.copy(&four, &mut mine).unwrap();
            assert_eq!(within(mine.read()).await.unwrap(), [7; 4]);
        }
        drop(mine);
        let back = within(wrapped.into_inner()).await;
        assert!(if rewritten { back.is_ok_and(|all| all == [7; 4]) } else { back.is_err() });
    }
}

/// Owns the memory, and panics in its destructor.
struct Bomb(#[expect(dead_code, reason = "owns the memory")] Buffer<u32>, Arc<AtomicUsize>);

impl Drop for Bomb {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
        panic!("an owner's drop");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m9_an_owner_that_panics_leaks_no_other_memory() {
    let device = emulated();
    let [a, b] = streams(&device);
    let (theirs, drops) = (Buffer::<u32>::new(&device, 64).unwrap(), Arc::new(AtomicUsize::new(0)));
    let address = theirs.device_address().unwrap();
    // SAFETY: the buffer has this address and length for its whole life, and no other code uses it.
    let (mut mine, wrapped) =
        unsafe { Buffer::<u32>::from_device_address(&device, address, 64, Bomb(theirs, drops.clone())) }.unwrap();
    let mut data = Buffer::<u32>::new(&device, 64).unwrap();
    let (held, held_b) = (hold(&a), hold(&b));
    a.fill(&mut mine, 1).unwrap();
    b.fill(&mut data, 1).unwrap();
    drop((mine, wrapped, data));
    drop(held);
    until("the owner is dropped", || drops.load(Ordering::SeqCst) == 1).await;
    drop(held_b);
    until("all memory is released", || device.memory_in_use() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f4_a_cancelled_into_inner_drops_the_owner_after_its_last_use() {
    let device = emulated();
    let [a, _] = streams(&device);
    let theirs = Buffer::<u32>::new(&device, 64).unwrap();
    let address = theirs.device_address().unwrap();
    let live = Arc::new(());
    // SAFETY: the buffer has this address and length for its whole life, and no other code uses it.
    let (mut mine, wrapped) =
        unsafe { Buffer::<u32>::from_device_address(&device, address, 64, (theirs, live.clone())) }.unwrap();
    let held = hold(&a);
    a.fill(&mut mine, 1).unwrap();
    drop(mine);
    let mut back = Box::pin(wrapped.into_inner());
    assert!((&mut back).now_or_never().is_none());
    drop(back);
    assert_eq!(Arc::strong_count(&live), 2);
    drop(held);
    until("the owner is dropped", || Arc::strong_count(&live) == 1).await;
    common::at_rest(&device).await;
}

/// An owner whose destructor panics.
struct PanicsInDrop(Vec<u32>);

impl AsMut<[u32]> for PanicsInDrop {
    fn as_mut(&mut self) -> &mut [u32] {
        &mut self.0
    }
}

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        panic!("the owner's destructor");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h6_a_panic_in_an_owners_destructor_reaches_no_caller() {
    // Refused: it has no elements.
    assert_eq!(Buffer::wrap(PanicsInDrop(Vec::new())).err().unwrap().kind(), ErrorKind::Usage);
    // The future is dropped while it holds the owner.
    let (mine, wrapped) = Buffer::wrap(PanicsInDrop(vec![1; LEN])).unwrap();
    let mut wait = Box::pin(wrapped.into_inner());
    assert!(wait.as_mut().now_or_never().is_none());
    drop(mine);
    drop(wait);
    // Not returned, since a device was lost during a copy into it.
    let device = common::emulated_with(Emulated::new().faults(Faults::new().fail_copy(1)));
    let [stream] = streams(&device);
    let mut there = Buffer::<u32>::new(&device, LEN).unwrap();
    stream.fill(&mut there, 0).unwrap();
    let (mut mine, wrapped) = Buffer::wrap(PanicsInDrop(vec![1; LEN])).unwrap();
    stream.copy(&there, &mut mine).unwrap();
    assert!(within(stream.completed()).await.is_err());
    drop(mine);
    assert!(within(wrapped.into_inner()).await.err().unwrap().is_device_lost());
}
