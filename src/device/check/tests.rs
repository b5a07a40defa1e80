//! Tests of the checker over the emulated device, and of its memory use in a long run.

use std::{
    sync::{Arc, atomic::Ordering, mpsc},
    time::Duration,
};

use super::{
    CheckedBackend, checked,
    mock::{MockBackend, kernel},
    race_state::{Side, race_state},
};
use crate::{
    ErrorKind, Result,
    device::{
        backend::*,
        emulated::{self, Emulated, Faults},
    },
};

pub(super) fn device() -> Arc<dyn Backend> {
    checked(emulated::open(Emulated::new().workers(2)))
}

/// On the mock device, where queries report all work as done.
fn watched() -> (u64, Arc<dyn Backend>) {
    let mock = MockBackend::default();
    mock.answer.store(true, Ordering::Relaxed);
    let device = CheckedBackend::new(Arc::new(mock));
    (device.id, Arc::new(device))
}

pub(super) fn stream(device: &Arc<dyn Backend>, name: &str) -> RawStream {
    device.stream_create(&StreamSpec { name: name.into(), priority: 0, non_blocking: true }).unwrap()
}

pub(super) fn fill(device: &Arc<dyn Backend>, on: RawStream, to: Address, byte: u8, bytes: u64) -> Result<()> {
    // SAFETY: every test waits for its streams before it frees.
    unsafe { device.fill(on, to, Pattern { width: 1, bits: byte.into() }, bytes) }
}

pub(super) fn touch(device: &Arc<dyn Backend>, on: RawStream, address: Address, bytes: u64, write: bool) -> Result<()> {
    let args = [Arg::Slice { address, len: bytes, bytes, write }];
    let launch = Launch { kernel: kernel(), grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
    // SAFETY: the kernel touches nothing, whatever its arguments say.
    unsafe { device.launch(on, &launch) }
}

pub(super) fn copy(device: &Arc<dyn Backend>, on: RawStream, to: Endpoint, from: Endpoint, bytes: u64) -> Result<()> {
    // SAFETY: every test waits for its streams before it frees.
    unsafe { device.copy(on, to, from, bytes) }
}

/// Memory that was written, which the host has seen done.
pub(super) fn written(device: &Arc<dyn Backend>, bytes: u64) -> Address {
    let (memory, first) = (device.alloc(bytes).unwrap(), stream(device, "first"));
    fill(device, first, memory, 0, bytes).unwrap();
    device.stream_synchronize(first).unwrap();
    device.stream_destroy(first);
    memory
}

pub(super) fn hold(device: &Arc<dyn Backend>, on: RawStream) -> mpsc::Sender<()> {
    let (go, held) = mpsc::channel();
    device.host_function(on, &mut Some(Box::new(move || _ = held.recv()))).unwrap();
    go
}

pub(super) fn join(device: &Arc<dyn Backend>, from: RawStream, to: RawStream) {
    let event = device.event_create(false).unwrap();
    device.event_record(event, from).unwrap();
    device.stream_wait(to, event).unwrap();
    device.event_destroy(event);
}

#[test]
fn an_event_is_order() {
    let device = device();
    let (a, b, c) = (stream(&device, "a"), stream(&device, "b"), stream(&device, "c"));
    let memory = device.alloc(64).unwrap();
    fill(&device, a, memory, 1, 64).unwrap();
    join(&device, a, b);
    touch(&device, b, memory, 64, false).unwrap();
    join(&device, b, c);
    fill(&device, c, memory, 2, 64).unwrap();
}

/// Otherwise races would be hidden.
#[test]
fn measuring_orders_nothing_and_reaches_the_device() {
    let mock = Arc::new(MockBackend::default());
    mock.answer.store(true, Ordering::Relaxed);
    *mock.elapsed.lock() = Duration::from_millis(5);
    *mock.event_time.lock() = Duration::from_millis(2);
    let device: Arc<dyn Backend> = Arc::new(CheckedBackend::new(mock));
    assert_eq!(device.event_time(), Duration::from_millis(2));
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = device.alloc(64).unwrap();
    let [from, to] = [(); 2].map(|()| device.event_create(true).unwrap());
    device.event_record(from, a).unwrap();
    fill(&device, a, memory, 1, 64).unwrap();
    device.event_record(to, a).unwrap();
    assert_eq!(device.event_elapsed_if_passed(from, to).unwrap(), Some(Duration::from_millis(5)));
    assert!(fill(&device, b, memory, 2, 64).unwrap_err().is_race());
    assert!(device.event_query(to).unwrap());
    fill(&device, b, memory, 2, 64).unwrap();
}

#[test]
fn unordered_accesses_are_refused_before_they_run() {
    let device = device();
    let (a, b) = (stream(&device, "upper"), stream(&device, "copy-out"));
    let memory = device.alloc(64).unwrap();
    let host = device.alloc_host(64).unwrap();
    fill(&device, a, memory, 1, 64).unwrap();
    let error = fill(&device, b, memory, 2, 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Race);
    // Still refused once the stream is done, as the host has only measured that; and nothing has changed.
    while !device.stream_is_idle(a).unwrap() {
        std::thread::yield_now();
    }
    let error = touch(&device, b, memory, 64, false).unwrap_err();
    assert!(error.is_race());
    join(&device, a, b);
    copy(&device, b, Endpoint::Host(host.as_ptr()), Endpoint::Device(memory), 64).unwrap();
    let error = touch(&device, a, memory, 32, true).unwrap_err().to_string();
    let wanted = format!(
        "{}: race: kernel `touch` on stream `upper` writes bytes 0..32 of device memory #1 ({0}, 64 B), which copy to \
         host on stream `copy-out` reads; nothing orders them: make `upper` wait for `copy-out` after its call 2",
        device.name()
    );
    assert_eq!(error, wanted);
    device.stream_synchronize(b).unwrap();
    // SAFETY: the copy is done, and the memory has 64 bytes.
    assert_eq!(unsafe { std::slice::from_raw_parts(host.as_ptr(), 64) }, [1; 64]);
}

#[test]
fn readers_share_and_ranges_are_apart() {
    let device = device();
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = written(&device, 64);
    touch(&device, a, memory, 64, false).unwrap();
    touch(&device, b, memory, 64, false).unwrap();
    let other = device.alloc(64).unwrap();
    fill(&device, a, other, 1, 32).unwrap();
    fill(&device, b, Address(other.0 + 32), 1, 32).unwrap();
    // Both readers count: a writer that is ordered after only one of them is refused.
    let c = stream(&device, "c");
    join(&device, a, c);
    let error = fill(&device, c, memory, 1, 64).unwrap_err().to_string();
    assert!(error.contains("make `c` wait for `b`"), "{error}");
    join(&device, b, c);
    fill(&device, c, memory, 1, 64).unwrap();
    fill(&device, c, other, 1, 64).unwrap();
}

#[test]
fn a_later_record_does_not_order_what_an_earlier_one_did_not() {
    let device = device();
    let (a, b, c) = (stream(&device, "a"), stream(&device, "b"), stream(&device, "c"));
    let memory = device.alloc(64).unwrap();
    let event = device.event_create(false).unwrap();
    device.event_record(event, a).unwrap();
    device.stream_wait(b, event).unwrap();
    fill(&device, a, memory, 1, 64).unwrap();
    device.event_record(event, a).unwrap();
    // `b` waited for the first record only, `c` for the second.
    assert!(fill(&device, b, memory, 2, 64).unwrap_err().is_race());
    device.stream_wait(c, event).unwrap();
    device.event_record(event, b).unwrap();
    fill(&device, c, memory, 2, 64).unwrap();
}

#[test]
fn what_the_host_has_seen_is_order() {
    let device = device();
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = device.alloc(64).unwrap();
    fill(&device, a, memory, 1, 64).unwrap();
    device.stream_synchronize(a).unwrap();
    fill(&device, b, memory, 2, 64).unwrap();
    let event = device.event_create(false).unwrap();
    device.event_record(event, b).unwrap();
    while !device.event_query(event).unwrap() {
        std::thread::yield_now();
    }
    fill(&device, a, memory, 3, 64).unwrap();
    while !device.stream_query(a).unwrap() {
        std::thread::yield_now();
    }
    fill(&device, b, memory, 4, 64).unwrap();
    let (sender, receiver) = mpsc::channel();
    device.host_function(b, &mut Some(Box::new(move || sender.send(()).unwrap()))).unwrap();
    receiver.recv().unwrap();
    fill(&device, a, memory, 5, 64).unwrap();
    let go = hold(&device, a);
    fill(&device, a, memory, 5, 64).unwrap();
    device.host_function(a, &mut Some(Box::new(|| ()))).unwrap();
    assert!(fill(&device, b, memory, 6, 64).unwrap_err().is_race());
    drop(go);
}

#[test]
fn the_host_does_not_touch_memory_of_copies_in_flight() {
    let device = device();
    let a = stream(&device, "up");
    let (memory, host) = (device.alloc(64).unwrap(), device.alloc_host(64).unwrap());
    device.host_access(host.as_ptr(), 64, true).unwrap();
    let go = hold(&device, a);
    copy(&device, a, Endpoint::Device(memory), Endpoint::Host(host.as_ptr()), 32).unwrap();
    device.host_access(host.as_ptr(), 64, false).unwrap();
    let error = device.host_access(host.as_ptr(), 64, true).unwrap_err().to_string();
    assert!(error.contains("the host writes bytes 0..32 of pinned host memory"), "{error}");
    assert!(error.contains("copy to device on stream `up` reads"), "{error}");
    // SAFETY: inside its 64 bytes.
    device.host_access(unsafe { host.as_ptr().add(32) }, 32, true).unwrap();
    drop(go);
    device.stream_synchronize(a).unwrap();
    device.host_access(host.as_ptr(), 64, true).unwrap();
}

#[test]
fn memory_in_use_is_not_freed() {
    let device = device();
    let a = stream(&device, "a");
    let (memory, host) = (written(&device, 64), device.alloc_host(64).unwrap());
    let go = hold(&device, a);
    copy(&device, a, Endpoint::Host(host.as_ptr()), Endpoint::Device(memory), 64).unwrap();
    // SAFETY: refused, since the copy still uses both.
    unsafe {
        let error = device.free(memory).unwrap_err();
        assert!(error.is_race() && error.to_string().contains("is freed while"), "{error}");
        assert!(device.free_host(host, 64).unwrap_err().is_race());
    }
    drop(go);
    device.stream_synchronize(a).unwrap();
    // SAFETY: the stream is done.
    unsafe {
        device.free(memory).unwrap();
        device.free_host(host, 64).unwrap();
    }
}

#[test]
fn the_default_stream_orders_blocking_streams_only() {
    let device = device();
    let spec = StreamSpec { name: "blocking".into(), priority: 0, non_blocking: false };
    let (blocking, free) = (device.stream_create(&spec).unwrap(), stream(&device, "free"));
    let memory = device.alloc(64).unwrap();
    fill(&device, blocking, memory, 1, 64).unwrap();
    fill(&device, RawStream(0), memory, 2, 64).unwrap();
    fill(&device, blocking, memory, 3, 64).unwrap();
    assert!(fill(&device, free, memory, 4, 64).unwrap_err().is_race());
    device.stream_synchronize(RawStream(0)).unwrap();
    fill(&device, free, memory, 4, 64).unwrap();
    let error = fill(&device, RawStream(0), memory, 4, 64).unwrap_err().to_string();
    assert!(error.contains("make `default` wait for `free`"), "{error}");
}

#[test]
fn two_devices_are_one_universe() {
    let (one, two) = (device(), device());
    let (a, b) = (stream(&one, "a"), stream(&two, "b"));
    let (from, to) = (one.alloc(64).unwrap(), two.alloc(64).unwrap());
    fill(&one, a, from, 1, 64).unwrap();
    let error = copy(&two, b, Endpoint::Device(to), Endpoint::Device(from), 64).unwrap_err().to_string();
    assert!(error.contains(&format!("of {}", one.name())) && error.contains("copy on the device"), "{error}");
    let event = one.event_create(false).unwrap();
    one.event_record(event, a).unwrap();
    two.stream_wait(b, event).unwrap();
    copy(&two, b, Endpoint::Device(to), Endpoint::Device(from), 64).unwrap();
}

#[test]
fn a_lost_device_is_lost_and_no_race() {
    let device = checked(emulated::open(Emulated::new().faults(Faults::new().trap_kernel("touch", 1))));
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = device.alloc(64).unwrap();
    touch(&device, a, memory, 64, true).unwrap();
    assert!(device.stream_synchronize(a).unwrap_err().is_device_lost());
    assert!(fill(&device, b, memory, 1, 64).unwrap_err().is_device_lost());
    // SAFETY: refused; and nothing is in flight on a lost device.
    assert!(unsafe { device.free(memory) }.unwrap_err().is_device_lost());
}

#[test]
fn a_refused_call_leaves_no_trace() {
    let mock = Arc::new(MockBackend::default());
    let device = checked(mock.clone());
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = device.alloc(64).unwrap();
    mock.refuse.store(true, Ordering::Relaxed);
    assert_eq!(fill(&device, a, memory, 1, 64).unwrap_err().kind(), ErrorKind::Driver);
    mock.refuse.store(false, Ordering::Relaxed);
    fill(&device, b, memory, 1, 64).unwrap();
}

#[test]
fn a_long_run_stays_small() {
    let (number, device) = watched();
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = written(&device, 1 << 20);
    for round in 0..if cfg!(debug_assertions) { 20_000_u64 } else { 200_000 } {
        // Ranges of all sizes, with a query by the host now and then.
        let (from, bytes) = ((round * 7919) % (1 << 19), 1 + (round * 104_729) % 4096);
        touch(&device, a, Address(memory.0 + from), bytes, round % 3 == 0).unwrap();
        join(&device, a, b);
        touch(&device, b, Address(memory.0 + from), bytes / 2 + 1, round % 2 == 0).unwrap();
        join(&device, b, a);
        if round % 64 == 0 {
            let event = device.event_create(false).unwrap();
            device.event_record(event, a).unwrap();
            assert!(device.event_query(event).unwrap());
            device.event_destroy(event);
        }
        if round % 1000 == 0 {
            let (segments, entries) = race_state().sizes(Side::Device, memory.0, (number, a));
            assert!(segments < 2000 && entries <= 2, "{segments} segments, {entries} entries");
        }
    }
}

#[test]
fn destroyed_streams_are_forgotten() {
    let (number, device) = watched();
    let memory = device.alloc(64).unwrap();
    let keep = stream(&device, "keep");
    for _ in 0..1000 {
        let short = stream(&device, "short");
        join(&device, keep, short);
        fill(&device, short, memory, 1, 64).unwrap();
        join(&device, short, keep);
        device.stream_destroy(short);
    }
    assert!(race_state().lines_of(number) < 8);
    assert!(race_state().sizes(Side::Device, memory.0, (number, keep)).1 < 8);
    // The last of them still counts, as the host has not seen its end.
    let late = stream(&device, "late");
    assert!(fill(&device, late, memory, 1, 64).unwrap_err().is_race());
    drop(device);
    assert_eq!(race_state().lines_of(number), 0);
}

#[test]
fn memory_that_was_freed_is_not_used() {
    let device = device();
    let a = stream(&device, "late");
    let memory = written(&device, 64);
    // SAFETY: the host has seen its only use.
    unsafe { device.free(memory) }.unwrap();
    let thread = std::thread::current().name().unwrap().to_string();
    let error = touch(&device, a, Address(memory.0 + 8), 16, false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidMemory);
    let wanted = format!(
        "{0}: invalid memory: kernel `touch` on stream `late` reads device memory #1 ({0}, 64 B), which thread `{thread}` \
         has freed",
        device.name()
    );
    assert_eq!(error.to_string(), wanted);
    let host = device.alloc_host(64).unwrap();
    let error = copy(&device, a, Endpoint::Device(memory), Endpoint::Host(host.as_ptr()), 64).unwrap_err().to_string();
    assert!(error.contains("copy to device on stream `late` writes device memory #1"), "{error}");
    // SAFETY: refused.
    let error = unsafe { device.free(memory) }.unwrap_err();
    assert!(error.to_string().contains("invalid memory: double free of device memory #1"), "{error}");
    device.stream_synchronize(a).unwrap();
}

#[test]
fn memory_that_is_freed_in_stream_order_is_not_used_after_it() {
    let device = device();
    let a = stream(&device, "a");
    let memory = device.alloc_on(a, 64).unwrap();
    fill(&device, a, memory, 1, 64).unwrap();
    touch(&device, a, memory, 64, false).unwrap();
    // SAFETY: all its uses come before, in the same stream.
    unsafe { device.free_on(a, memory) }.unwrap();
    let error = touch(&device, a, memory, 64, false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidMemory, "{error}");
}

#[test]
fn a_read_of_unwritten_memory_is_refused() {
    let device = device();
    let a = stream(&device, "early");
    let (memory, other, host) = (device.alloc(64).unwrap(), device.alloc(64).unwrap(), device.alloc_host(64).unwrap());
    let part = |from: u64| Address(memory.0 + from);
    let error = touch(&device, a, part(16), 32, false).unwrap_err();
    let wanted = format!(
        "{0}: invalid memory: kernel `touch` on stream `early` reads bytes 16..48 of device memory #1 ({0}, 64 B), which \
         nothing has written: fill it, copy to it, or pass it to a kernel as `&mut` first",
        device.name()
    );
    assert_eq!((error.kind(), error.to_string()), (ErrorKind::InvalidMemory, wanted));
    let up = |to, from| copy(&device, a, Endpoint::Device(to), Endpoint::Device(from), 64);
    assert_eq!(up(other, memory).unwrap_err().kind(), ErrorKind::InvalidMemory);
    // Host memory is initialised; a fill and a kernel write.
    copy(&device, a, Endpoint::Device(part(0)), Endpoint::Host(host.as_ptr()), 8).unwrap();
    fill(&device, a, part(8), 1, 8).unwrap();
    touch(&device, a, part(16), 8, true).unwrap();
    touch(&device, a, part(0), 24, false).unwrap();
    // Some bytes may be padding. A copy makes no more bytes written than its source has.
    touch(&device, a, memory, 64, false).unwrap();
    up(other, memory).unwrap();
    touch(&device, a, Address(other.0 + 16), 32, false).unwrap();
    let error = touch(&device, a, Address(other.0 + 24), 40, false).unwrap_err().to_string();
    assert!(error.contains("reads bytes 24..64 of device memory #2"), "{error}");
    // A copy of unwritten bytes over written ones makes them unwritten.
    fill(&device, a, other, 2, 64).unwrap();
    copy(&device, a, Endpoint::Device(other), Endpoint::Device(part(20)), 32).unwrap();
    assert!(touch(&device, a, Address(other.0 + 4), 28, false).is_err());
    touch(&device, a, Address(other.0 + 32), 32, false).unwrap();
    // Recycled memory is unwritten.
    // SAFETY: in stream order, and there is no other use.
    unsafe { device.recycle(Some(a), memory, 64) }.unwrap();
    assert_eq!(touch(&device, a, memory, 64, false).unwrap_err().kind(), ErrorKind::InvalidMemory);
    device.stream_synchronize(a).unwrap();
}

#[test]
fn a_destroyed_stream_is_refused() {
    let device = device();
    let (a, b) = (stream(&device, "gone"), stream(&device, "b"));
    let memory = device.alloc(64).unwrap();
    let event = device.event_create(false).unwrap();
    let go = hold(&device, a);
    fill(&device, a, memory, 1, 64).unwrap();
    device.stream_destroy(a);
    for refused in [
        fill(&device, a, memory, 2, 64),
        device.event_record(event, a),
        device.stream_query(a).map(drop),
        device.stream_wait(a, event),
        device.host_function(a, &mut Some(Box::new(|| ()))),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("stream `gone` was destroyed"), "{error}");
    }
    // Its work still runs, and nothing can be ordered after it any more.
    let error = fill(&device, b, memory, 2, 64).unwrap_err().to_string();
    assert!(error.contains("make `b` wait for `gone` (destroyed since)"), "{error}");
    // SAFETY: refused.
    let error = unsafe { device.free(memory) }.unwrap_err().to_string();
    assert!(error.contains("first wait until `gone` (destroyed since) has passed its call 2"), "{error}");
    drop(go);
}

#[test]
fn a_destroyed_event_is_refused() {
    let device = device();
    let a = stream(&device, "a");
    let event = device.event_create(false).unwrap();
    device.event_record(event, a).unwrap();
    device.event_destroy(event);
    for refused in [device.stream_wait(a, event), device.event_record(event, a), device.event_query(event).map(drop)] {
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains("invalid use: the event was destroyed: it can no longer be recorded, queried"),
            "{error}"
        );
    }
}
