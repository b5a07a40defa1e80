//! What the loss of a device has spoilt on others, and what is sound.

use super::*;

#[kernel]
fn adds(data: &mut [u32], number: u32) {
    data.iter_mut().for_each(|n| *n += number);
}

/// The loss of a device spoils what another one's streams had enqueued behind a wait for it, until it was known, and the memory
/// that this has written. What comes later is sound, but for what reads that memory; and memory that is written anew is, too.
#[test]
fn a_loss_spoils_what_came_after_it_until_it_was_known() {
    within_bound(|| {
        let runtime = runtime();
        for (checked, known) in [(false, true), (false, false), (true, true), (true, false)] {
            let device = |name| {
                let device = Device::emulated(Emulated::new().name(name));
                if checked { device.race_checked() } else { device }
            };
            let (lost, healthy) = (device("faulty"), device("healthy"));
            let (its, own) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
            let [mut spoilt, mut unrelated, read] =
                [1, 2, 3].map(|number| Buffer::from_slice(&own, &[number; 4]).unwrap());
            let mut pinned = Buffer::<u32>::pinned(&healthy, 4).unwrap();
            own.synchronize_blocking().unwrap();
            let go = held_up(&its);
            let mut from = Buffer::<u32>::new(&lost, 4).unwrap();
            its.fill(&mut from, 2).unwrap();
            own.copy(&from, &mut spoilt).unwrap();
            let mut again = own.alloc::<u32>(4).unwrap();
            own.copy(&read, &mut again).unwrap();
            own.copy(&read, &mut pinned).unwrap();
            let event = Event::new();
            event.record(&own).unwrap();
            lose(&its, go, known);
            let names = |outcome: wakeline::Result<()>| {
                let error = outcome.expect_err("what is spoilt");
                assert!(error.is_device_lost() && error.to_string().contains("faulty"), "{error}");
            };
            names(runtime.block_on(own.completed()));
            names(runtime.block_on(own.completed()));
            names(runtime.block_on(event.completed()));

            // The same stream, and another.
            let fresh = Stream::new(&healthy).unwrap();
            for stream in [&own, &fresh] {
                adds::launch(stream, &mut unrelated, 1).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            assert_eq!(runtime.block_on(unrelated.to_vec(&fresh)).unwrap(), [4; 4]);
            // What was read by what is spoilt.
            let mut read = read;
            adds::launch(&fresh, &mut read, 1).unwrap();
            assert_eq!(runtime.block_on(read.to_vec(&own)).unwrap(), [4; 4]);

            // What reads something spoilt is spoilt, and what comes after it is not.
            let mut copied = Buffer::<u32>::new(&healthy, 4).unwrap();
            for stream in [&own, &fresh] {
                let read = stream.copy(&spoilt, &mut copied);
                names(read.and_then(|()| runtime.block_on(stream.completed())));
                names(runtime.block_on(copied.to_vec(&fresh)).map(drop));
                let read = adds::launch(stream, &mut spoilt, 1);
                names(read.and_then(|()| runtime.block_on(stream.completed())));
                names(runtime.block_on(spoilt.to_vec(stream)).map(drop));
                names(runtime.block_on(spoilt.available()));
                names(Stream::new(&healthy).unwrap().wait_for(stream));
                adds::launch(stream, &mut unrelated, 0).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            names(event.wait(&fresh));
            names(runtime.block_on(pinned.read()).map(drop));
            runtime.block_on(fresh.completed()).unwrap();

            // Written anew it can be read again.
            fresh.fill(&mut spoilt, 7).unwrap();
            adds::launch(&own, &mut spoilt, 1).unwrap();
            assert_eq!(runtime.block_on(spoilt.to_vec(&own)).unwrap(), [8; 4]);
            own.copy(&spoilt, &mut pinned).unwrap();
            assert_eq!(runtime.block_on(pinned.read()).unwrap(), [8; 4]);

            // And memory that is used again, on the stream that it is bound to and elsewhere.
            drop(again);
            for stream in [&own, &fresh, &own] {
                let mut data = stream.alloc::<u32>(4).unwrap();
                if checked {
                    // The checker refuses a read of what was never written.
                    stream.fill(&mut data, 1).unwrap();
                }
                adds::launch(stream, &mut data, 1).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            assert!(healthy.lost().is_none());
        }
    });
}

/// Envelopes of a hub that have carried what a lost device has spoilt carry other chunks after that.
#[test]
fn envelopes_are_sound_when_they_come_home() {
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
            let go = held_up(&stream);
            stream.fill(&mut odd, 1).unwrap();
            on_lost.send(odd, ()).await.unwrap();
            // Its copy is on its way.
            let chunk = consume.next().await.unwrap().unwrap();
            lose(&stream, go, true);
            let own = Stream::new(&healthy).unwrap();
            let mut arrives = Buffer::<u32>::pinned(&healthy, 4).unwrap();
            own.copy(&*chunk, &mut arrives).unwrap();
            assert!(arrives.read().await.unwrap_err().is_device_lost());
            chunk.commit().unwrap();
            for round in 0..6 {
                on_host.with(async |blank| blank.fill_from(&[round; 4]).await).await.unwrap();
                let chunk = consume.next().await.unwrap().unwrap();
                own.copy(&*chunk, &mut arrives).unwrap();
                assert_eq!(arrives.read().await.unwrap(), [round; 4]);
                chunk.commit().unwrap();
            }
            assert!(healthy.lost().is_none());
        });
    });
}

/// A launch reads what its graph's nodes write: it is spoilt while that is. What is only its own makes no difference.
#[test]
fn a_launch_is_spoilt_while_its_memory_is() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let (its, own) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
        let mut data = Buffer::from_slice(&own, &[1_u32; 4]).unwrap();
        let captured = Graph::capture(&healthy, |capture| {
            let stream = capture.stream();
            let mut within = stream.alloc::<u32>(4)?;
            stream.copy(&data, &mut within)?;
            adds::launch(stream, &mut within, 1)?;
            stream.copy(&within, &mut data)
        });
        let exec = captured.unwrap().0.instantiate().unwrap();
        let go = held_up(&its);
        own.wait_for(&its).unwrap();
        exec.launch(&own).unwrap();
        lose(&its, go, true);
        assert!(runtime.block_on(own.completed()).unwrap_err().is_device_lost());
        let fresh = Stream::new(&healthy).unwrap();
        for stream in [&own, &fresh] {
            exec.launch(stream).unwrap();
            assert!(runtime.block_on(stream.completed()).unwrap_err().is_device_lost());
            own.fill(&mut data, 5).unwrap();
            exec.launch(stream).unwrap();
            assert_eq!(runtime.block_on(data.to_vec(stream)).unwrap(), [6; 4]);
            exec.launch(&fresh).unwrap();
            assert_eq!(runtime.block_on(data.to_vec(&own)).unwrap(), [7; 4]);
            // Spoilt again, for the next stream.
            if stream == &own {
                let (lost, go) = {
                    let lost = Stream::new(&Device::emulated(Emulated::new())).unwrap();
                    let go = held_up(&lost);
                    (lost, go)
                };
                own.wait_for(&lost).unwrap();
                exec.launch(&own).unwrap();
                lose(&lost, go, true);
            }
        }
    });
}

/// A launch reads the inputs that were copied to the graph's own memory: it is spoilt from a spoilt copy until the next one.
#[test]
fn a_launch_is_spoilt_while_an_input_is() {
    within_bound(|| {
        let runtime = runtime();
        // Whether the memory of the input is the graph's own, and whether the loss is known before the input is copied.
        for (own_memory, known) in [(true, true), (true, false), (false, true), (false, false)] {
            let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
            let its = Stream::new(&lost).unwrap();
            let [own, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
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
            let (mut spoilt, mut sound) =
                (Buffer::<u32>::pinned(&healthy, 4).unwrap(), Buffer::<u32>::pinned(&healthy, 4).unwrap());
            sound.as_mut_slice().unwrap().fill(5);
            let go = held_up(&its);
            own.wait_for(&its).unwrap();
            own.copy(&sound, &mut spoilt).unwrap();
            if known {
                lose(&its, go, true);
                graph.inputs()[0].copy(&own, &spoilt).unwrap();
            } else {
                graph.inputs()[0].copy(&own, &spoilt).unwrap();
                lose(&its, go, true);
            }
            let place = format!("own memory: {own_memory}, known: {known}");
            assert!(runtime.block_on(own.completed()).unwrap_err().is_device_lost(), "{place}");
            for stream in [&own, &other, &own] {
                exec.launch(stream).unwrap();
                assert!(runtime.block_on(stream.completed()).unwrap_err().is_device_lost(), "{place}");
                assert!(runtime.block_on(out.to_vec(stream)).unwrap_err().is_device_lost(), "{place}");
            }
            graph.inputs()[0].copy(&other, &sound).unwrap();
            own.fill(&mut out, 0).unwrap();
            for stream in [&own, &other] {
                exec.launch(stream).unwrap();
                assert_eq!(runtime.block_on(out.to_vec(stream)).unwrap(), [5; 4], "{place}");
            }
        }
    });
}

/// What was enqueued before a graph was captured is spoilt after that: so are the launches, until the memory is written anew.
#[test]
fn a_launch_is_sound_when_what_came_before_its_capture_is_written_anew() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let its = Stream::new(&lost).unwrap();
        let [own, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
        let [mut read, mut written, mut copied] = [(); 3].map(|()| Buffer::<u32>::new(&healthy, 4).unwrap());
        own.fill(&mut read, 1).unwrap();
        own.fill(&mut written, 1).unwrap();
        let go = held_up(&its);
        other.wait_for(&its).unwrap();
        // Both are spoilt: a write of what the graph reads, and a read of what it writes.
        other.fill(&mut read, 2).unwrap();
        other.copy(&written, &mut copied).unwrap();
        let captured = Graph::capture(&healthy, |capture| capture.stream().copy(&read, &mut written));
        let exec = captured.unwrap().0.instantiate().unwrap();
        let captured = Graph::capture(&healthy, |capture| capture.stream().fill(&mut written, 3));
        let fills = captured.unwrap().0.instantiate().unwrap();
        lose(&its, go, true);
        assert!(runtime.block_on(other.completed()).unwrap_err().is_device_lost());
        fills.launch(&own).unwrap();
        assert_eq!(runtime.block_on(written.to_vec(&own)).unwrap(), [3; 4], "only a read of it was spoilt");
        exec.launch(&own).unwrap();
        assert!(runtime.block_on(written.to_vec(&own)).unwrap_err().is_device_lost());
        for round in 4..7 {
            own.fill(&mut read, round).unwrap();
            own.fill(&mut written, 0).unwrap();
            exec.launch(&own).unwrap();
            assert_eq!(runtime.block_on(written.to_vec(&own)).unwrap(), [round; 4]);
        }
    });
}

/// Memory of the graph's own that a stream wrote before it was dropped: launches that read it are spoilt if that write is.
#[test]
fn a_launch_is_spoilt_by_what_was_written_to_memory_of_its_capture() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let its = Stream::new(&lost).unwrap();
        let [own, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
        let mut out = Buffer::<u32>::new(&healthy, 4).unwrap();
        let go = held_up(&its);
        other.wait_for(&its).unwrap();
        let captured = Graph::capture(&healthy, |capture| {
            let mut within = capture.stream().alloc::<u32>(4)?;
            other.fill(&mut within, 7)?;
            capture.stream().copy(&within, &mut out)
        });
        let exec = captured.unwrap().0.instantiate().unwrap();
        lose(&its, go, true);
        assert!(runtime.block_on(other.completed()).unwrap_err().is_device_lost());
        for _ in 0..2 {
            own.fill(&mut out, 0).unwrap();
            exec.launch(&own).unwrap();
            assert!(runtime.block_on(out.to_vec(&own)).unwrap_err().is_device_lost());
        }
    });
}

/// An engine of another make knows no address of the graph's memory.
#[test]
fn an_input_is_copied_on_no_stream_of_another_make() {
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

/// A source that waits for memory, and allocates it.
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

/// Tasks that wait for memory in use, or for a chunk, wait for no stream of the device: a fault that no call has met ends their
/// waits all the same, whether its kernel was enqueued before they waited or after.
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
        // The second in the line.
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
            let case = format!("wait {number}, enqueued before: {before}, and the stream is dropped: {dropped}");
            common::alone::case_within_bound(&case.clone(), move || {
                let device = Device::emulated(Emulated::new());
                let [stream, traps_on] = [&device; 2].map(|device| Stream::new(device).unwrap());
                let mut data = Buffer::<u32>::new(&device, 1).unwrap();
                let mut enqueue = Some(move || {
                    let go = held_up(&traps_on);
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

/// Counts down as it is dropped, with the device that keeps it.
struct CountsDown(Arc<AtomicUsize>);

impl Drop for CountsDown {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Devices that read memory of another one and are lost then: once they run nothing any more the memory keeps none of them, and
/// may be written.
#[test]
fn memory_that_lost_devices_have_read_is_written_and_keeps_none_of_them() {
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
            let is_lost = |data: &Buffer<u32>| {
                // What it loses lives as long as the device.
                let faults = Faults::new().fail_copy(1).lose_host_function(1);
                let device = made(Device::emulated(Emulated::new().workers(1).faults(faults)));
                let its = Stream::new(&device).unwrap();
                alive.fetch_add(1, Ordering::SeqCst);
                let counts = CountsDown(alive.clone());
                its.host_function(move || _ = &counts).unwrap();
                its.copy(data, &mut Buffer::new(&device, 16).unwrap()).unwrap();
                assert!(its.synchronize_blocking().unwrap_err().is_device_lost());
            };
            for _ in 0..20 {
                is_lost(&data);
            }
            // The last one is kept until the next read of another stream, or a write.
            while alive.load(Ordering::SeqCst) > 1 {
                std::thread::yield_now();
            }
            write(4, &mut data);
            assert_eq!(runtime().block_on(data.to_vec(&side)).unwrap(), [4; 16]);
            while alive.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
            is_lost(&data);
            if pinned {
                runtime().block_on(data.write()).unwrap().fill(5);
                assert_eq!(data.as_slice().unwrap(), [5; 16]);
                is_lost(&data);
            }
            // Memory that is freed is used again.
            drop(data);
            drop(new().unwrap());
            assert_eq!((home.memory_leaked(), home.lost().is_none()), (0, true));
        });
    }
}

static READS: (Mutex<Look>, Condvar) = (Mutex::new(Look { began: false, ends: false, seen: 0 }), Condvar::new());

#[kernel]
fn reads(data: &[u32]) {
    let (look, change) = &READS;
    let first = std::hint::black_box(data)[0];
    lock(look).began = true;
    change.notify_all();
    let mut look = change.wait_while(lock(look), |look| !look.ends).unwrap();
    look.seen = 1 + u32::from(std::hint::black_box(data)[0] == first);
    drop(look);
    change.notify_all();
}

/// Memory that a lost device still reads is written by no other one, however many reads of it there were; once nothing runs on the
/// lost one, it is.
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
        // Others that never begin.
        for _ in 0..5 {
            let waits = Stream::new(&a).unwrap();
            waits.wait_for(&runs).unwrap();
            waits.copy(&data, &mut Buffer::new(&a, 16).unwrap()).unwrap();
        }
        let (look, change) = &READS;
        drop(change.wait_while(lock(look), |look| !look.began).unwrap());
        traps_alone::launch(&faults, 1).unwrap();
        assert!(runtime().block_on(faults.completed()).unwrap_err().is_device_lost());
        for _ in 0..2 {
            assert!(writes.copy(&from, &mut data).unwrap_err().is_device_lost());
            // With this the reads are looked through.
            other.copy(&data, &mut Buffer::new(&b, 16).unwrap()).unwrap();
        }
        lock(look).ends = true;
        change.notify_all();
        let seen = change.wait_while(lock(look), |look| look.seen == 0).unwrap().seen;
        assert_eq!(seen, 2, "it is written while a kernel has a slice of it");
        // The kernel is about to return.
        while writes.copy(&from, &mut data).is_err() {
            std::thread::yield_now();
        }
        assert_eq!(runtime().block_on(data.to_vec(&writes)).unwrap(), [9; 16]);
    });
}

/// A stream that had waited for the device before it was lost knows that write as one that it came after.
#[test]
fn what_a_lost_device_was_to_write_is_an_error_on_a_stream_that_had_waited_for_it() {
    within_bound(|| {
        let well = Device::emulated(Emulated::new());
        let lost = Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1)));
        let (stream, other) = (Stream::new(&well).unwrap(), Stream::new(&lost).unwrap());
        let (mut data, mut copy) = (Buffer::<u32>::new(&well, 4).unwrap(), Buffer::<u32>::new(&well, 4).unwrap());
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
        // What is written anew is sound.
        stream.fill(&mut data, 3).unwrap();
        assert_eq!(runtime().block_on(data.to_vec(&stream)).unwrap(), [3; 4]);
    });
}
