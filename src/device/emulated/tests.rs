//! Tests of the threaded device through its `Backend` interface only.

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use super::*;
use crate::{
    ErrorKind,
    device::{
        CudaTypes,
        backend::{
            Address, Arg, BodyArg, Endpoint, KernelDef, KernelSource, Launch, Pattern, RawEvent, RawStream, StreamSpec,
        },
    },
};

fn prototype(_: &mut CudaTypes) -> String {
    String::new()
}

macro_rules! kernel {
    ($name:ident, $body:expr) => {
        pub(super) static $name: KernelDef = KernelDef {
            name: stringify!($name),
            file: file!(),
            declared: "",
            source: KernelSource::None,
            prototype,
            body: $body,
            number: crate::device::backend::KernelNumber::new(),
        };
    };
}

kernel!(INCREMENT, |args| {
    let BodyArg::Slice(start, len) = args[0] else { panic!() };
    // SAFETY: the launches below pass one written slice of bytes.
    unsafe { std::slice::from_raw_parts_mut(start, len) }.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
});
kernel!(BOOM, |_| panic!("out of cheese"));

pub(super) fn spec(name: &str) -> StreamSpec {
    StreamSpec { name: name.into(), priority: 0, non_blocking: true }
}

pub(super) fn stream(device: &Arc<dyn Backend>, name: &str) -> RawStream {
    device.stream_create(&spec(name)).unwrap()
}

pub(super) fn bytes(address: Address, bytes: u64) -> [Arg<'static>; 1] {
    [Arg::Slice { address, len: bytes, bytes, write: true }]
}

pub(super) fn launch(
    device: &Arc<dyn Backend>,
    on: RawStream,
    kernel: &'static KernelDef,
    args: &[Arg],
) -> crate::Result<()> {
    // SAFETY: the arguments are those of the kernels above; every test reads results back before it frees.
    unsafe { device.launch(on, &Launch { kernel, grid: [1; 3], block: [1; 3], shared_bytes: 0, args }) }
}

pub(super) fn fill(device: &Arc<dyn Backend>, on: RawStream, to: Address, byte: u8, bytes: u64) {
    // SAFETY: every test frees only after the stream has passed this.
    unsafe { device.fill(on, to, Pattern { width: 1, bits: byte.into() }, bytes) }.unwrap();
}

pub(super) fn read(device: &Arc<dyn Backend>, on: RawStream, from: Address, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    // SAFETY: `out` outlives the wait below.
    unsafe { device.copy(on, Endpoint::Host(out.as_mut_ptr()), Endpoint::Device(from), bytes as u64) }.unwrap();
    device.stream_synchronize(on).unwrap();
    out
}

/// Blocks a stream until the sender is dropped or used.
pub(super) fn hold(device: &Arc<dyn Backend>, on: RawStream) -> mpsc::Sender<()> {
    let (go, held) = mpsc::channel();
    device.host_function(on, &mut Some(Box::new(move || _ = held.recv()))).unwrap();
    go
}

#[test]
fn data_is_copied_to_the_device_and_back() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let memory = device.alloc(64).unwrap();
    assert_eq!(read(&device, work, memory, 64), [0xAD; 64]);
    let data: Vec<u8> = (0..64).collect();
    // SAFETY: `data` outlives the synchronising read.
    unsafe { device.copy(work, Endpoint::Device(memory), Endpoint::Host(data.as_ptr().cast_mut()), 64) }.unwrap();
    launch(&device, work, &INCREMENT, &bytes(memory, 64)).unwrap();
    // SAFETY: the memory is valid until it is freed below.
    unsafe { device.fill(work, Address(memory.0 + 32), Pattern { width: 4, bits: 0x0403_0201 }, 32) }.unwrap();
    let got = read(&device, work, memory, 64);
    assert_eq!(got[..32], (1..33).collect::<Vec<u8>>());
    assert_eq!(got[32..], [1, 2, 3, 4].repeat(8));
    // SAFETY: the stream is done.
    unsafe { device.free(memory) }.unwrap();
}

#[test]
fn an_event_orders_two_streams() {
    let device = open(Emulated::new().workers(2));
    let (a, b) = (stream(&device, "a"), stream(&device, "b"));
    let memory = device.alloc(16).unwrap();
    let event = device.event_create(false).unwrap();
    let go = hold(&device, a);
    fill(&device, a, memory, 7, 16);
    device.event_record(event, a).unwrap();
    device.stream_wait(b, event).unwrap();
    // The wait is for the first record: neither the event's destruction nor a later record changes that.
    device.event_destroy(event);
    launch(&device, b, &INCREMENT, &bytes(memory, 16)).unwrap();
    assert!(!device.stream_query(b).unwrap());
    go.send(()).unwrap();
    assert_eq!(read(&device, b, memory, 16), [8; 16]);
    assert!(device.stream_query(a).unwrap());
}

#[test]
fn events_can_be_recorded_again_and_measure_time() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let (from, to) = (device.event_create(true).unwrap(), device.event_create(true).unwrap());
    let plain = device.event_create(false).unwrap();
    assert!(device.event_query(plain).unwrap(), "never recorded");
    device.stream_wait(work, plain).unwrap();
    device.event_record(from, work).unwrap();
    let go = hold(&device, work);
    device.event_record(to, work).unwrap();
    assert!(!device.event_query(to).unwrap());
    assert_eq!(device.event_elapsed(from, to).unwrap_err().kind(), ErrorKind::Driver);
    drop(go);
    device.stream_synchronize(work).unwrap();
    assert!(device.event_query(to).unwrap());
    assert!(device.event_elapsed(from, to).unwrap() < Duration::from_secs(60));
    let go = hold(&device, work);
    device.event_record(to, work).unwrap();
    assert!(!device.event_query(to).unwrap(), "re-recorded");
    drop(go);
    device.stream_synchronize(work).unwrap();
    assert_eq!(device.event_elapsed(from, plain).unwrap_err().kind(), ErrorKind::Driver);
}

#[test]
fn the_capacity_is_enforced_and_reported() {
    let device = open(Emulated::new().memory(1000));
    let first = device.alloc(600).unwrap();
    assert_eq!(first.0 % 256, 0);
    let error = device.alloc(401).unwrap_err();
    assert!(error.is_out_of_memory());
    let text = format!("{error:#}");
    assert!(["401", "600", "1000"].iter().all(|number| text.contains(number)), "{text}");
    let second = device.alloc(400).unwrap();
    assert_eq!(device.memory().unwrap().free, 0);
    // SAFETY: nothing was enqueued.
    unsafe {
        device.free(first).unwrap();
        device.free(second).unwrap();
        assert_eq!(device.free(second).unwrap_err().kind(), ErrorKind::Driver);
    }
    assert_eq!(device.memory().unwrap().free, 1000);
    assert_eq!(device.description(), "emulated, 1000 B");
}

#[test]
fn host_memory_is_initialised_and_not_counted() {
    let device = open(Emulated::new().memory(1));
    let memory = device.alloc_host(100).unwrap();
    assert_eq!(memory.as_ptr().addr() % 64, 0);
    // SAFETY: 100 initialised bytes, nothing enqueued.
    unsafe {
        assert_eq!(std::slice::from_raw_parts(memory.as_ptr(), 100), [0xAD; 100]);
        assert_eq!(device.free_host(memory, 99).unwrap_err().kind(), ErrorKind::Driver);
        device.free_host(memory, 100).unwrap();
    }
}

#[test]
fn an_access_outside_of_an_allocation_is_a_fault() {
    for (offset, len) in [(0, 65), (64, 1), (1 << 40, 1), (60, 8)] {
        let device = open(Emulated::new());
        let work = stream(&device, "work");
        let memory = device.alloc(64).unwrap();
        let far = Address(memory.0 + offset);
        // SAFETY: it is outside an allocation, which is what is tested: the emulated device must detect it.
        unsafe { device.fill(work, far, Pattern { width: 1, bits: 0 }, len) }.unwrap();
        let error = device.stream_synchronize(work).unwrap_err();
        assert!(error.is_device_lost());
        assert!(format!("{error:#}").contains("illegal address"), "{error:#}");
    }
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let memory = device.alloc(64).unwrap();
    let crooked = [Arg::Slice { address: Address(memory.0 + 1), len: 2, bytes: 8, write: true }];
    launch(&device, work, &INCREMENT, &crooked).unwrap();
    assert!(format!("{:#}", device.stream_synchronize(work).unwrap_err()).contains("aligned"));
}

#[test]
fn an_access_to_freed_memory_is_a_fault() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let memory = device.alloc(64).unwrap();
    let go = hold(&device, work);
    fill(&device, work, memory, 1, 64);
    // SAFETY: the memory was freed, which is what is tested: the emulated device reports a fault.
    unsafe { device.free(memory) }.unwrap();
    drop(go);
    assert!(device.stream_synchronize(work).unwrap_err().is_device_lost());
}

#[test]
fn peers_copy() {
    let (one, two) = (open(Emulated::new()), open(Emulated::new()));
    assert_ne!(one.name(), two.name());
    let (a, b) = (stream(&one, "a"), stream(&two, "b"));
    let (from, to) = (one.alloc(32).unwrap(), two.alloc(32).unwrap());
    let event = one.event_create(false).unwrap();
    let go = hold(&one, a);
    fill(&one, a, from, 5, 32);
    one.event_record(event, a).unwrap();
    two.stream_wait(b, event).unwrap();
    // SAFETY: both live to the end of the test.
    unsafe { two.copy(b, Endpoint::Device(to), Endpoint::Device(from), 32) }.unwrap();
    drop(go);
    assert_eq!(read(&two, b, to, 32), [5; 32]);
    assert_eq!(two.event_record(event, b).unwrap_err().kind(), ErrorKind::Driver);
    assert_eq!(two.stream_query(a).unwrap_err().kind(), ErrorKind::Driver);
}

#[test]
fn the_default_stream_orders_blocking_streams() {
    let device = open(Emulated::new().workers(4));
    let blocking = |name: &str| device.stream_create(&StreamSpec { non_blocking: false, ..spec(name) }).unwrap();
    let (a, b, free) = (blocking("a"), blocking("b"), stream(&device, "free"));
    let memory = device.alloc(8).unwrap();
    let go = hold(&device, a);
    fill(&device, a, memory, 1, 8);
    launch(&device, RawStream(0), &INCREMENT, &bytes(memory, 8)).unwrap();
    launch(&device, b, &INCREMENT, &bytes(memory, 8)).unwrap();
    assert!(!device.stream_query(b).unwrap());
    // A non-blocking stream is not ordered.
    device.host_function(free, &mut Some(Box::new(|| ()))).unwrap();
    device.stream_synchronize(free).unwrap();
    assert!(!device.stream_query(RawStream(0)).unwrap());
    drop(go);
    device.stream_synchronize(RawStream(0)).unwrap();
    assert_eq!(read(&device, b, memory, 8), [3; 8]);
}

#[test]
fn urgent_streams_go_first() {
    let device = open(Emulated::new().workers(1));
    let plain = stream(&device, "plain");
    let urgent = device.stream_create(&StreamSpec { priority: -3, ..spec("urgent") }).unwrap();
    let busy = stream(&device, "busy");
    let go = hold(&device, busy);
    let (sender, order) = mpsc::channel();
    for (on, name) in [(plain, "plain"), (urgent, "urgent")] {
        let sender = sender.clone();
        device.host_function(on, &mut Some(Box::new(move || sender.send(name).unwrap()))).unwrap();
    }
    drop(go);
    assert_eq!([order.recv().unwrap(), order.recv().unwrap()], ["urgent", "plain"]);
}

#[test]
fn a_trap_ends_this_device_and_no_other() {
    let (device, other) = (open(Emulated::new()), open(Emulated::new()));
    let (work, side) = (stream(&device, "work"), stream(&device, "side"));
    let memory = device.alloc(8).unwrap();
    let event = device.event_create(false).unwrap();
    let go = hold(&device, work);
    launch(&device, work, &BOOM, &[]).unwrap();
    device.event_record(event, work).unwrap();
    device.stream_wait(side, event).unwrap();
    // Dropped without a call: the receiver only sees that the sender is gone.
    let (sender, receiver) = mpsc::channel::<()>();
    device.host_function(side, &mut Some(Box::new(move || sender.send(()).unwrap()))).unwrap();
    let far = stream(&other, "far");
    other.stream_wait(far, event).unwrap();
    drop(go);
    assert!(receiver.recv().is_err());
    let error = device.stream_synchronize(side).unwrap_err();
    assert!(error.is_device_lost());
    let text = format!("{error:#}");
    assert!(text.contains("`BOOM`") && text.contains("`work`") && text.contains("out of cheese"), "{text}");
    assert!(device.event_query(event).unwrap_err().is_device_lost());
    assert!(device.alloc(8).unwrap_err().is_device_lost());
    assert!(device.memory().unwrap_err().is_device_lost());
    assert!(device.stream_create(&spec("new")).unwrap_err().is_device_lost());
    assert!(device.host_function(work, &mut Some(Box::new(|| ()))).unwrap_err().is_device_lost());
    // SAFETY: nothing is enqueued any more.
    assert!(unsafe { device.free(memory) }.unwrap_err().is_device_lost());
    device.stream_destroy(side);
    device.stream_destroy(work);
    // The other device goes on, even past an event that never came.
    let memory = other.alloc(8).unwrap();
    fill(&other, far, memory, 3, 8);
    assert_eq!(read(&other, far, memory, 8), [3; 8]);
}

#[test]
fn planned_faults_occur_as_planned() {
    let faults = Faults::new().trap_kernel("INCREMENT", 2).fail_alloc(2).lose_host_function(1);
    let device = open(Emulated::new().faults(faults));
    let work = stream(&device, "work");
    let memory = device.alloc(8).unwrap();
    assert!(device.alloc(8).unwrap_err().is_out_of_memory());
    device.alloc(8).unwrap();
    // The first host function is never called and not dropped yet, and the stream goes on.
    let (sender, receiver) = mpsc::channel();
    for number in 1..=2 {
        let sender = sender.clone();
        device.host_function(work, &mut Some(Box::new(move || sender.send(number).unwrap()))).unwrap();
    }
    drop(sender);
    assert_eq!(receiver.recv(), Ok(2));
    assert_eq!(receiver.try_recv(), Err(mpsc::TryRecvError::Empty));
    launch(&device, work, &INCREMENT, &bytes(memory, 8)).unwrap();
    device.stream_synchronize(work).unwrap();
    launch(&device, work, &INCREMENT, &bytes(memory, 8)).unwrap();
    assert!(format!("{:#}", device.stream_synchronize(work).unwrap_err()).contains("planned"));
    drop(device);
    assert!(receiver.recv().is_err(), "dropped with the device");

    let device = open(Emulated::new().faults(Faults::new().fail_copy(1)));
    let work = stream(&device, "work");
    let (memory, mut byte) = (device.alloc(1).unwrap(), 0_u8);
    // SAFETY: `byte` outlives the wait.
    unsafe { device.copy(work, Endpoint::Host(&mut byte), Endpoint::Device(memory), 1) }.unwrap();
    let error = device.stream_synchronize(work).unwrap_err();
    assert!(
        error.is_device_lost() && format!("{error:#}").contains("copy to host of 1 byte on stream `work` failed"),
        "{error:#}"
    );
}

#[test]
fn a_thousand_streams_on_two_workers() {
    let device = open(Emulated::new().workers(2));
    let memory = device.alloc(4).unwrap();
    let first = stream(&device, "first");
    let go = hold(&device, first);
    fill(&device, first, memory, 0, 4);
    let (mut last, mut events) = (first, Vec::<RawEvent>::new());
    for number in 0..1000 {
        let event = device.event_create(false).unwrap();
        device.event_record(event, last).unwrap();
        events.push(event);
        last = stream(&device, &format!("stream {number}"));
        device.stream_wait(last, event).unwrap();
        launch(&device, last, &INCREMENT, &bytes(memory, 4)).unwrap();
    }
    drop(go);
    assert_eq!(read(&device, last, memory, 4), [(1000 % 256) as u8; 4]);
    assert!(events.into_iter().all(|event| device.event_query(event).unwrap()));
}

#[test]
fn streams_run_concurrently() {
    let device = open(Emulated::new().workers(2));
    let barrier = Arc::new(Barrier::new(2));
    let streams = [stream(&device, "a"), stream(&device, "b")];
    for on in streams {
        let barrier = barrier.clone();
        device.host_function(on, &mut Some(Box::new(move || _ = barrier.wait()))).unwrap();
    }
    streams.iter().for_each(|on| device.stream_synchronize(*on).unwrap());
}

#[test]
fn a_destroyed_stream_or_device_finishes_its_work_first() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let done = Arc::new(AtomicUsize::new(0));
    let (sender, receiver) = mpsc::channel::<()>();
    let go = hold(&device, work);
    for _ in 0..10 {
        let (done, sender) = (done.clone(), sender.clone());
        let function = move || {
            done.fetch_add(1, Ordering::SeqCst);
            drop(sender);
        };
        device.host_function(work, &mut Some(Box::new(function))).unwrap();
    }
    drop(sender);
    device.stream_destroy(work);
    assert_eq!(device.stream_query(work).unwrap_err().kind(), ErrorKind::Driver);
    drop(device);
    drop(go);
    assert!(receiver.recv().is_err());
    assert_eq!(done.load(Ordering::SeqCst), 10);
}

#[test]
fn a_panic_of_a_host_function_is_contained() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    device.host_function(work, &mut Some(Box::new(|| panic!("caught")))).unwrap();
    device.stream_synchronize(work).unwrap();
}

#[test]
fn a_device_may_be_dropped_by_its_own_host_function() {
    let device = open(Emulated::new().workers(1));
    let work = stream(&device, "work");
    let (sender, receiver) = mpsc::channel::<()>();
    let go = hold(&device, work);
    let owned = device.clone();
    device
        .host_function(
            work,
            &mut Some(Box::new(move || {
                drop(owned);
                drop(sender);
            })),
        )
        .unwrap();
    drop(device);
    drop(go);
    assert!(receiver.recv().is_err());
}

#[test]
fn wrong_calls_are_errors_and_not_faults() {
    let device = open(Emulated::new());
    let work = stream(&device, "work");
    let memory = device.alloc(64).unwrap();
    // SAFETY: refused.
    let error = unsafe { device.fill(work, memory, Pattern { width: 4, bits: 0 }, 6) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Driver);
    let both = [bytes(memory, 64)[0], bytes(Address(memory.0 + 63), 1)[0]];
    assert_eq!(launch(&device, work, &INCREMENT, &both).unwrap_err().kind(), ErrorKind::Usage);
    let none = Launch { kernel: &INCREMENT, grid: [0, 1, 1], block: [1; 3], shared_bytes: 0, args: &[] };
    // SAFETY: refused.
    assert_eq!(unsafe { device.launch(work, &none) }.unwrap_err().kind(), ErrorKind::Driver);
    let empty = [Arg::Slice { address: Address(0), len: 0, bytes: 0, write: true }];
    launch(&device, work, &INCREMENT, &empty).unwrap();
    device.stream_synchronize(work).unwrap();
}
