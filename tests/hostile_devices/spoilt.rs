//! Which work and memory of other devices the loss of a device taints.

use super::*;

#[kernel]
fn adds(data: &mut [u32], number: u32) {
    data.iter_mut().for_each(|n| *n += number);
}

/// The loss also taints the memory that tainted work has written. Later work is sound unless it reads that memory. Memory that is
/// written anew is sound.
#[test]
fn a_loss_taints_the_work_that_waits_for_the_device_until_it_is_known() {
    within_bound(|| {
        let runtime = runtime();
        for (checked, known) in [(false, true), (false, false), (true, true), (true, false)] {
            let device = |name| {
                let device = Device::emulated(Emulated::new().name(name));
                if checked { device.race_checked() } else { device }
            };
            let (lost, healthy) = (device("faulty"), device("healthy"));
            let (remote, local) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
            let [mut tainted, mut unrelated, read] =
                [1, 2, 3].map(|number| Buffer::from_slice(&local, &[number; 4]).unwrap());
            let mut pinned = Buffer::<u32>::pinned(&healthy, 4).unwrap();
            local.synchronize_blocking().unwrap();
            let go = block(&remote);
            let mut from = Buffer::<u32>::new(&lost, 4).unwrap();
            remote.fill(&mut from, 2).unwrap();
            local.copy(&from, &mut tainted).unwrap();
            let mut again = local.alloc::<u32>(4).unwrap();
            local.copy(&read, &mut again).unwrap();
            local.copy(&read, &mut pinned).unwrap();
            let event = Event::new();
            event.record(&local).unwrap();
            lose(&remote, go, known);
            let assert_lost = |outcome: wakeline::Result<()>| {
                let error = outcome.expect_err("tainted");
                assert!(error.is_device_lost() && error.to_string().contains("faulty"), "{error}");
            };
            assert_lost(runtime.block_on(local.completed()));
            assert_lost(runtime.block_on(local.completed()));
            assert_lost(runtime.block_on(event.completed()));

            // Later work on the same stream and on another.
            let fresh = Stream::new(&healthy).unwrap();
            for stream in [&local, &fresh] {
                adds::launch(stream, &mut unrelated, 1).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            assert_eq!(runtime.block_on(unrelated.to_vec(&fresh)).unwrap(), [4; 4]);
            // Memory that tainted work has read.
            let mut read = read;
            adds::launch(&fresh, &mut read, 1).unwrap();
            assert_eq!(runtime.block_on(read.to_vec(&local)).unwrap(), [4; 4]);

            // Work that reads tainted memory is tainted, and work behind it is not.
            let mut copied = Buffer::<u32>::new(&healthy, 4).unwrap();
            for stream in [&local, &fresh] {
                let read = stream.copy(&tainted, &mut copied);
                assert_lost(read.and_then(|()| runtime.block_on(stream.completed())));
                assert_lost(runtime.block_on(copied.to_vec(&fresh)).map(drop));
                let read = adds::launch(stream, &mut tainted, 1);
                assert_lost(read.and_then(|()| runtime.block_on(stream.completed())));
                assert_lost(runtime.block_on(tainted.to_vec(stream)).map(drop));
                assert_lost(runtime.block_on(tainted.available()));
                assert_lost(Stream::new(&healthy).unwrap().wait_for(stream));
                adds::launch(stream, &mut unrelated, 0).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            assert_lost(event.wait(&fresh));
            assert_lost(runtime.block_on(pinned.read()).map(drop));
            runtime.block_on(fresh.completed()).unwrap();

            // Memory that is written anew can be read again.
            fresh.fill(&mut tainted, 7).unwrap();
            adds::launch(&local, &mut tainted, 1).unwrap();
            assert_eq!(runtime.block_on(tainted.to_vec(&local)).unwrap(), [8; 4]);
            local.copy(&tainted, &mut pinned).unwrap();
            assert_eq!(runtime.block_on(pinned.read()).unwrap(), [8; 4]);

            // So can recycled memory, on the stream that it is bound to and on another.
            drop(again);
            for stream in [&local, &fresh, &local] {
                let mut data = stream.alloc::<u32>(4).unwrap();
                if checked {
                    // The checker refuses a read of unwritten memory.
                    stream.fill(&mut data, 1).unwrap();
                }
                adds::launch(stream, &mut data, 1).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            assert!(healthy.lost().is_none());
        }
    });
}

#[test]
fn envelopes_are_sound_after_they_have_returned_to_their_hub() {
    within_bound(|| {
        runtime().block_on(async {
            let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
            let hub = ChunkHub::<u32>::builder("hub").elements(4).queue(2).envelopes(&healthy, 2).host_envelopes(2);
            let hub = hub.build().unwrap();
            let host = Device::host();
            let (mut on_lost, mut on_host) = (hub.produce(&lost).unwrap(), hub.produce(&host).unwrap());
            let mut consume = hub.consume(&healthy).unwrap();
            let stream = Stream::new(&lost).unwrap();
            let mut odd = stream.alloc::<u32>(4).unwrap();
            let go = block(&stream);
            stream.fill(&mut odd, 1).unwrap();
            on_lost.send(odd, ()).await.unwrap();
            // The copy for the consumer is in flight.
            let chunk = consume.next().await.unwrap().unwrap();
            lose(&stream, go, true);
            let local = Stream::new(&healthy).unwrap();
            let mut arrives = Buffer::<u32>::pinned(&healthy, 4).unwrap();
            local.copy(&*chunk, &mut arrives).unwrap();
            assert!(arrives.read().await.unwrap_err().is_device_lost());
            chunk.commit().unwrap();
            for round in 0..6 {
                on_host.with(async |blank| blank.fill_from(&[round; 4]).await).await.unwrap();
                let chunk = consume.next().await.unwrap().unwrap();
                local.copy(&*chunk, &mut arrives).unwrap();
                assert_eq!(arrives.read().await.unwrap(), [round; 4]);
                chunk.commit().unwrap();
            }
            assert!(healthy.lost().is_none());
        });
    });
}

/// A launch counts as a reader of the memory that its nodes write, except for memory of the graph's own.
#[test]
fn a_launch_is_tainted_while_its_memory_is() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let (remote, local) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
        let mut data = Buffer::from_slice(&local, &[1_u32; 4]).unwrap();
        let captured = Graph::capture(&healthy, |capture| {
            let stream = capture.stream();
            let mut within = stream.alloc::<u32>(4)?;
            stream.copy(&data, &mut within)?;
            adds::launch(stream, &mut within, 1)?;
            stream.copy(&within, &mut data)
        });
        let exec = captured.unwrap().0.instantiate().unwrap();
        let go = block(&remote);
        local.wait_for(&remote).unwrap();
        exec.launch(&local).unwrap();
        lose(&remote, go, true);
        assert!(runtime.block_on(local.completed()).unwrap_err().is_device_lost());
        let fresh = Stream::new(&healthy).unwrap();
        for stream in [&local, &fresh] {
            exec.launch(stream).unwrap();
            assert!(runtime.block_on(stream.completed()).unwrap_err().is_device_lost());
            local.fill(&mut data, 5).unwrap();
            exec.launch(stream).unwrap();
            assert_eq!(runtime.block_on(data.to_vec(stream)).unwrap(), [6; 4]);
            exec.launch(&fresh).unwrap();
            assert_eq!(runtime.block_on(data.to_vec(&local)).unwrap(), [7; 4]);
            // Taint the memory again, for the next stream.
            if stream == &local {
                let (lost, go) = {
                    let lost = Stream::new(&Device::emulated(Emulated::new())).unwrap();
                    let go = block(&lost);
                    (lost, go)
                };
                local.wait_for(&lost).unwrap();
                exec.launch(&local).unwrap();
                lose(&lost, go, true);
            }
        }
    });
}

/// A launch reads the inputs that were copied to the graph's own memory: a tainted copy taints it until the next copy.
#[test]
fn a_launch_is_tainted_while_an_input_is() {
    within_bound(|| {
        let runtime = runtime();
        // Whether the memory of the input is the graph's own, and whether the loss is known before the input is copied.
        for (own_memory, known) in [(true, true), (true, false), (false, true), (false, false)] {
            let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
            let remote = Stream::new(&lost).unwrap();
            let [local, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
            let (sample, mut out) = (Buffer::pinned(&healthy, 4).unwrap(), Buffer::<u32>::new(&healthy, 4).unwrap());
            let captured = Graph::capture(&healthy, |capture| {
                capture.input(&sample)?;
                let mut within = capture.stream().alloc::<u32>(4)?;
                capture.stream().copy(&sample, &mut within)?;
                capture.stream().copy(&within, &mut out)?;
                Ok((!own_memory).then_some(within))
            });
            let (graph, _within) = captured.unwrap();
            let exec = graph.instantiate().unwrap();
            let (mut tainted, mut sound) =
                (Buffer::<u32>::pinned(&healthy, 4).unwrap(), Buffer::<u32>::pinned(&healthy, 4).unwrap());
            sound.as_mut_slice().unwrap().fill(5);
            let go = block(&remote);
            local.wait_for(&remote).unwrap();
            local.copy(&sound, &mut tainted).unwrap();
            if known {
                lose(&remote, go, true);
                graph.inputs()[0].copy(&local, &tainted).unwrap();
            } else {
                graph.inputs()[0].copy(&local, &tainted).unwrap();
                lose(&remote, go, true);
            }
            let case = format!("the graph's own memory: {own_memory}, known: {known}");
            assert!(runtime.block_on(local.completed()).unwrap_err().is_device_lost(), "{case}");
            for stream in [&local, &other, &local] {
                exec.launch(stream).unwrap();
                assert!(runtime.block_on(stream.completed()).unwrap_err().is_device_lost(), "{case}");
                assert!(runtime.block_on(out.to_vec(stream)).unwrap_err().is_device_lost(), "{case}");
            }
            graph.inputs()[0].copy(&other, &sound).unwrap();
            local.fill(&mut out, 0).unwrap();
            for stream in [&local, &other] {
                exec.launch(stream).unwrap();
                assert_eq!(runtime.block_on(out.to_vec(stream)).unwrap(), [5; 4], "{case}");
            }
        }
    });
}

/// Work from before a capture becomes tainted after it. The launches are tainted until the memory is written anew.
#[test]
fn a_launch_is_sound_once_memory_tainted_before_its_capture_is_written_anew() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let remote = Stream::new(&lost).unwrap();
        let [local, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
        let [mut read, mut written, mut copied] = [(); 3].map(|()| Buffer::<u32>::new(&healthy, 4).unwrap());
        local.fill(&mut read, 1).unwrap();
        local.fill(&mut written, 1).unwrap();
        let go = block(&remote);
        other.wait_for(&remote).unwrap();
        // Both are tainted later: a write of memory that the graph reads, and a read of memory that it writes.
        other.fill(&mut read, 2).unwrap();
        other.copy(&written, &mut copied).unwrap();
        let captured = Graph::capture(&healthy, |capture| capture.stream().copy(&read, &mut written));
        let exec = captured.unwrap().0.instantiate().unwrap();
        let captured = Graph::capture(&healthy, |capture| capture.stream().fill(&mut written, 3));
        let fills = captured.unwrap().0.instantiate().unwrap();
        lose(&remote, go, true);
        assert!(runtime.block_on(other.completed()).unwrap_err().is_device_lost());
        fills.launch(&local).unwrap();
        assert_eq!(runtime.block_on(written.to_vec(&local)).unwrap(), [3; 4], "only a read of this memory is tainted");
        exec.launch(&local).unwrap();
        assert!(runtime.block_on(written.to_vec(&local)).unwrap_err().is_device_lost());
        for round in 4..7 {
            local.fill(&mut read, round).unwrap();
            local.fill(&mut written, 0).unwrap();
            exec.launch(&local).unwrap();
            assert_eq!(runtime.block_on(written.to_vec(&local)).unwrap(), [round; 4]);
        }
    });
}

/// Another stream writes memory of the graph's own during the capture. If that write is tainted, so are the launches that read it.
#[test]
fn a_launch_is_tainted_by_a_tainted_write_to_memory_of_its_capture() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let remote = Stream::new(&lost).unwrap();
        let [local, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
        let mut out = Buffer::<u32>::new(&healthy, 4).unwrap();
        let go = block(&remote);
        other.wait_for(&remote).unwrap();
        let captured = Graph::capture(&healthy, |capture| {
            let mut within = capture.stream().alloc::<u32>(4)?;
            other.fill(&mut within, 7)?;
            capture.stream().copy(&within, &mut out)
        });
        let exec = captured.unwrap().0.instantiate().unwrap();
        lose(&remote, go, true);
        assert!(runtime.block_on(other.completed()).unwrap_err().is_device_lost());
        for _ in 0..2 {
            local.fill(&mut out, 0).unwrap();
            exec.launch(&local).unwrap();
            assert!(runtime.block_on(out.to_vec(&local)).unwrap_err().is_device_lost());
        }
    });
}

/// A device of another kind cannot address the graph's memory.
#[test]
fn an_input_is_not_copied_on_a_stream_of_another_kind_of_device() {
    let simulation = Simulation::new(1);
    let (simulated, emulated) = (Device::simulated(&simulation, Emulated::new()), Device::emulated(Emulated::new()));
    let sample = Buffer::<u32>::pinned(&simulated, 4).unwrap();
    let mut out = Buffer::<u32>::new(&simulated, 4).unwrap();
    let captured = Graph::capture(&simulated, |capture| {
        capture.input(&sample)?;
        let mut within = capture.stream().alloc::<u32>(4)?;
        capture.stream().copy(&sample, &mut within)?;
        capture.stream().copy(&within, &mut out)
    });
    let graph = captured.unwrap().0;
    let from = Buffer::<u32>::pinned(&emulated, 4).unwrap();
    let stream = Stream::new(&emulated).unwrap();
    let error = graph.inputs()[0].copy(&stream, &from).unwrap_err();
    assert_eq!(error.kind(), wakeline::ErrorKind::Usage, "{error}");
    assert!(emulated.lost().is_none() && simulated.lost().is_none());
}

struct Allocates(wakeline::memory::Allocator);

#[derive(Ports)]
struct AllocatesPorts {}

impl Operator for Allocates {
    type Ports = AllocatesPorts;

    async fn compute(&mut self, _ports: &mut AllocatesPorts, cx: &mut Cx) -> Result<()> {
        let _memory = cx.alloc::<u8>(10)?;
        assert!(self.0.device().lost().is_none());
        cx.finish();
        Ok(())
    }
}

/// Tasks that wait for memory or for a chunk wait for no stream of the device. A fault that no call has observed still ends their
/// waits, whether its kernel was enqueued before the waits began or after.
#[test]
fn a_fault_ends_the_waits_for_memory_and_for_chunks() {
    type Waits = Box<dyn Fn(&Device, &Stream) -> Pin<Box<dyn Future<Output = Result<()>>>>>;
    fn held(device: &Device, stream: &Stream) -> (wakeline::memory::Allocator, Buffer<u8>) {
        let blocks = wakeline::memory::Allocator::blocks(device, 1024, 1).unwrap();
        let held = blocks.alloc::<u8>(stream, 10).unwrap();
        (blocks, held)
    }
    let waits: [fn() -> Waits; 4] = [
        || {
            Box::new(|device, stream| {
                let ((blocks, held), stream) = (held(device, stream), stream.clone());
                Box::pin(async move {
                    let _held = held;
                    blocks.alloc_when_free::<u8>(&stream, 10).await.map(drop)
                })
            })
        },
        // The second waiter in the queue.
        || {
            Box::new(|device, stream| {
                let ((blocks, held), stream) = (held(device, stream), stream.clone());
                Box::pin(async move {
                    let _held = held;
                    let mut first = pin!(blocks.alloc_when_free::<u8>(&stream, 10));
                    let mut cx = Context::from_waker(Waker::noop());
                    assert!(first.as_mut().poll(&mut cx).is_pending());
                    blocks.alloc_when_free::<u8>(&stream, 10).await.map(drop)
                })
            })
        },
        || {
            Box::new(|device, stream| {
                let (blocks, held) = held(device, stream);
                let mut flow = Flow::new("waits");
                let _ = flow
                    .add("waits", Allocates(blocks.clone()))
                    .on(device)
                    .when(wakeline::condition::memory(&blocks, 10));
                Box::pin(async move {
                    let _held = held;
                    flow.run().await.map(drop)
                })
            })
        },
        || {
            Box::new(|device, _| {
                let hub = ChunkHub::<u32>::builder("hub").elements(1).envelopes(device, 1).build().unwrap();
                let mut link = hub.consume(device).unwrap();
                let _produces = hub.produce(device).unwrap();
                Box::pin(async move {
                    let _produces = _produces;
                    link.next().await.map(drop)
                })
            })
        },
    ];
    for (number, waits) in waits.into_iter().enumerate() {
        for (before, dropped) in [(false, false), (true, false), (false, true), (true, true)] {
            let case = format!("wait {number}, enqueued before: {before}, stream dropped: {dropped}");
            common::alone::case_within_bound(&case.clone(), move || {
                let device = Device::emulated(Emulated::new());
                let [stream, traps_on] = [&device; 2].map(|device| Stream::new(device).unwrap());
                let mut data = Buffer::<u32>::new(&device, 1).unwrap();
                let mut enqueue = Some(move || {
                    let go = block(&traps_on);
                    if dropped {
                        traps_alone::launch(&traps_on, 1).unwrap();
                        return (go, None);
                    }
                    traps::launch(&traps_on, &mut data).unwrap();
                    (go, Some((traps_on, data)))
                });
                let go = if before { enqueue.take().map(|enqueue| enqueue()) } else { None };
                runtime().block_on(async {
                    let mut waits = waits()(&device, &stream);
                    for _ in 0..10 {
                        assert!(futures::poll!(waits.as_mut()).is_pending(), "{case}");
                        tokio::task::yield_now().await;
                    }
                    let (go, _kept) = go.or_else(|| enqueue.take().map(|enqueue| enqueue())).unzip();
                    drop(go);
                    let error = waits.await.expect_err(&case);
                    assert!(error.is_device_lost(), "{case}: {error}");
                });
            });
        }
    }
}

/// Decrements the counter when the device that keeps it is freed.
struct CountsDown(Arc<AtomicUsize>);

impl Drop for CountsDown {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Devices read memory of another device and are then lost. Once nothing runs on them, the memory keeps none of them alive and may
/// be written.
#[test]
fn memory_that_lost_devices_have_read_may_be_written_and_keeps_none_of_them_alive() {
    for (checked, pinned) in [(false, false), (true, false), (false, true), (true, true)] {
        common::alone::case_within_bound(&format!("checked: {checked}, pinned: {pinned}"), move || {
            let made = |device: Device| if checked { device.race_checked() } else { device };
            let home = made(Device::emulated(Emulated::new()));
            let [main, side] = [&home; 2].map(|home| Stream::new(home).unwrap());
            let new = || if pinned { Buffer::<u32>::pinned(&home, 16) } else { Buffer::new(&home, 16) };
            let mut data = new().unwrap();
            let write = |value: u32, data: &mut Buffer<u32>| {
                main.copy(&Buffer::from_slice(&main, &[value; 16]).unwrap(), data).unwrap();
                main.synchronize_blocking().unwrap();
            };
            write(3, &mut data);
            let alive = Arc::new(AtomicUsize::new(0));
            let read_and_lose = |data: &Buffer<u32>| {
                // A lost host function is kept as long as its device.
                let faults = Faults::new().fail_copy(1).lose_host_function(1);
                let device = made(Device::emulated(Emulated::new().workers(1).faults(faults)));
                let remote = Stream::new(&device).unwrap();
                alive.fetch_add(1, Ordering::SeqCst);
                let counts = CountsDown(alive.clone());
                remote.host_function(move || _ = &counts).unwrap();
                remote.copy(data, &mut Buffer::new(&device, 16).unwrap()).unwrap();
                assert!(remote.synchronize_blocking().unwrap_err().is_device_lost());
            };
            for _ in 0..20 {
                read_and_lose(&data);
            }
            // The last device is kept until a write, or a read on another stream.
            while alive.load(Ordering::SeqCst) > 1 {
                std::thread::yield_now();
            }
            write(4, &mut data);
            assert_eq!(runtime().block_on(data.to_vec(&side)).unwrap(), [4; 16]);
            while alive.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
            read_and_lose(&data);
            if pinned {
                runtime().block_on(data.write()).unwrap().fill(5);
                assert_eq!(data.as_slice().unwrap(), [5; 16]);
                read_and_lose(&data);
            }
            drop(data);
            drop(new().unwrap());
            assert_eq!((home.memory_leaked(), home.lost().is_none()), (0, true));
        });
    }
}

static READS: (Mutex<Progress>, Condvar) =
    (Mutex::new(Progress { began: false, ends: false, seen: 0 }), Condvar::new());

#[kernel]
fn reads(data: &[u32]) {
    let (progress, change) = &READS;
    let first = std::hint::black_box(data)[0];
    lock(progress).began = true;
    change.notify_all();
    let mut progress = change.wait_while(lock(progress), |progress| !progress.ends).unwrap();
    progress.seen = 1 + u32::from(std::hint::black_box(data)[0] == first);
    drop(progress);
    change.notify_all();
}

/// Other devices do not write memory that a lost device still reads, however many reads it had. Once nothing runs on the lost
/// device, they may.
#[test]
fn memory_that_a_lost_device_still_reads_is_not_written() {
    within_bound(|| {
        let (a, b) = (Device::emulated(Emulated::new().workers(2)), Device::emulated(Emulated::new().workers(1)));
        let [runs, faults] = [&a; 2].map(|a| Stream::new(a).unwrap());
        let [writes, other] = [&b; 2].map(|b| Stream::new(b).unwrap());
        let mut data = Buffer::from_slice(&runs, &[7_u32; 16]).unwrap();
        runs.synchronize_blocking().unwrap();
        let from = Buffer::from_slice(&writes, &[9_u32; 16]).unwrap();
        writes.synchronize_blocking().unwrap();
        reads::launch(&runs, &data).unwrap();
        // Reads that never begin.
        for _ in 0..5 {
            let waits = Stream::new(&a).unwrap();
            waits.wait_for(&runs).unwrap();
            waits.copy(&data, &mut Buffer::new(&a, 16).unwrap()).unwrap();
        }
        let (progress, change) = &READS;
        drop(change.wait_while(lock(progress), |progress| !progress.began).unwrap());
        traps_alone::launch(&faults, 1).unwrap();
        assert!(runtime().block_on(faults.completed()).unwrap_err().is_device_lost());
        for _ in 0..2 {
            assert!(writes.copy(&from, &mut data).unwrap_err().is_device_lost());
            // A read by another stream makes the library check the recorded reads.
            other.copy(&data, &mut Buffer::new(&b, 16).unwrap()).unwrap();
        }
        lock(progress).ends = true;
        change.notify_all();
        let seen = change.wait_while(lock(progress), |progress| progress.seen == 0).unwrap().seen;
        assert_eq!(seen, 2, "the memory is written while a kernel has a slice of it");
        // The kernel is about to return.
        while writes.copy(&from, &mut data).is_err() {
            std::thread::yield_now();
        }
        assert_eq!(runtime().block_on(data.to_vec(&writes)).unwrap(), [9; 16]);
    });
}

/// The stream waited for the write before the device was lost, so the write counts as one that the stream comes after.
#[test]
fn a_read_of_a_lost_write_is_an_error_on_a_stream_that_had_waited_for_it() {
    within_bound(|| {
        let healthy = Device::emulated(Emulated::new());
        let lost = Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1)));
        let (stream, other) = (Stream::new(&healthy).unwrap(), Stream::new(&lost).unwrap());
        let (mut data, mut copy) = (Buffer::<u32>::new(&healthy, 4).unwrap(), Buffer::<u32>::new(&healthy, 4).unwrap());
        stream.fill(&mut data, 1).unwrap();
        stream.synchronize_blocking().unwrap();
        let mut from = Buffer::<u32>::new(&lost, 4).unwrap();
        other.fill(&mut from, 2).unwrap();
        let (go, held) = mpsc::channel::<()>();
        other.host_function(move || _ = held.recv()).unwrap();
        other.copy(&from, &mut data).unwrap();
        stream.copy(&data, &mut copy).unwrap();
        drop(go);
        assert!(other.synchronize_blocking().unwrap_err().is_device_lost());
        for _ in 0..3 {
            let read = runtime().block_on(data.to_vec(&stream));
            assert!(read.unwrap_err().is_device_lost(), "the data is what it was before the lost write");
        }
        stream.fill(&mut data, 3).unwrap();
        assert_eq!(runtime().block_on(data.to_vec(&stream)).unwrap(), [3; 4]);
    });
}
