//! Device times on the host's axis.

use smallvec::SmallVec;

use super::*;
use crate::{
    device::{
        Device,
        backend::{KernelNumber, KernelSource},
    },
    stream::{DeviceTimes, PassedSpan, SpanOwner, SpanReader, Stream},
};

static SPIN: KernelDef = KernelDef {
    name: "spin",
    file: "spin.cu",
    declared: "axis.rs:1",
    source: KernelSource::Cuda(
        "extern \"C\" __global__ void spin(unsigned long long nanos) {
            unsigned long long begin, now;
            asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(begin));
            do asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(now)); while (now - begin < nanos);
        }",
    ),
    prototype: |_| "void spin(unsigned long long nanos)".into(),
    body: samples::no_body,
    number: KernelNumber::new(),
};

fn launch(stream: &Stream, length: Duration) {
    let nanos = (length.as_nanos() as u64).to_ne_bytes();
    let args = [Arg::Scalar(&nanos)];
    let launch = Launch { kernel: &SPIN, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
    // SAFETY: the argument is the kernel's, and it accesses no memory.
    stream.enqueue_point(|backend, raw| unsafe { backend.launch(raw, &launch) }).unwrap();
}

/// Timed launches, whose completion this thread polls for. `is_idle`: the stream has nothing to do before each.
fn spin(stream: &Stream, owners: impl Iterator<Item = (SpanOwner, Duration)>, is_idle: bool) -> Vec<PassedSpan> {
    let wait = || {
        let mut end = stream.ticket();
        while !end.query().unwrap() {
            std::hint::spin_loop();
        }
    };
    let mut found = Vec::new();
    let mut all = None;
    for (owner, length) in owners {
        if !is_idle && all.is_none() {
            launch(stream, Duration::from_micros(100));
        }
        let reader = owner.reader.clone();
        stream.begin_run(owner);
        launch(stream, length);
        stream.end_run();
        if is_idle {
            wait();
            reader.read(Some(&mut |passed| found.push(passed)));
        }
        all = Some(reader);
    }
    wait();
    all.into_iter().for_each(|reader| reader.read(Some(&mut |passed| found.push(passed))));
    found
}

/// Kernels of known lengths, for a minute: on the host's axis, before any clamping, they lie between their enqueue and their
/// completion. Where the stream is busy before them their lengths are exact, but for the start and the end of a kernel and
/// the events. On an idle stream they depend on when two calls returned and on when the device noticed them, which is
/// delayed for some in 1,000 (`guide/facts.md`).
#[test]
#[ignore = "needs a GPU"]
fn device_work_lies_between_its_enqueue_and_its_completion() {
    const LENGTHS: [Duration; 3] = [Duration::from_micros(50), Duration::from_micros(200), Duration::from_micros(1000)];
    let _alone = alone();
    let device = Device::cuda(0).expect("this test needs a GPU");
    device.backend().load(&SPIN).unwrap();
    let stream = Stream::new(&device).unwrap();
    let reader = SpanReader::new();
    let [idle_times, busy_times] = [(); 2].map(|()| Arc::new(DeviceTimes::default()));
    let (began, mut outside, mut busy, mut idle) = (Instant::now(), Vec::new(), Vec::new(), Vec::new());
    let mut runs = 0;
    while began.elapsed() < Duration::from_secs(60) {
        for (is_idle, wrong) in [(true, &mut idle), (false, &mut busy)] {
            let times = if is_idle { &idle_times } else { &busy_times };
            let owner =
                || SpanOwner { reader: reader.clone(), run: runs, times: times.clone(), spans: SmallVec::new() };
            let passed = spin(&stream, LENGTHS.iter().map(|length| (owner(), *length)), is_idle);
            assert_eq!(passed.len(), LENGTHS.len());
            outside.extend(passed.iter().map(|passed| passed.outside));
            wrong.extend(
                passed.iter().zip(LENGTHS).map(|(passed, length)| (passed.ended - passed.began).abs_diff(length)),
            );
            runs += 1;
        }
        // As the observer's thread does.
        reader.adjust();
        // Clocks drift, and the first launch after a pause is slow.
        if runs % 200 == 0 {
            thread::sleep(Duration::from_millis(300));
        }
    }
    let at = |all: &[Duration], share: f64| all[((all.len() - 1) as f64 * share) as usize];
    let mut all = [&busy[..], &idle].concat();
    let lengths = [("length.busy", &mut busy), ("length.idle", &mut idle), ("length.all", &mut all)];
    for (name, all) in [("outside", &mut outside)].into_iter().chain(lengths) {
        all.sort_unstable();
        for (percentile, share) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
            println!("figure axis.{name}.{percentile} = {:.1} us", at(all, share).as_secs_f64() * 1e6);
        }
    }
    let event_time = device.backend().event_time();
    println!("figure axis.event = {:.2} us", event_time.as_secs_f64() * 1e6);
    // What is counted in `DeviceTime`, which nothing clamps: three kernels a run.
    for (name, times) in [("busy", busy_times), ("idle", idle_times)] {
        let more = times.sums().mean().as_secs_f64() - LENGTHS.iter().sum::<Duration>().as_secs_f64();
        let more = more * 1e6 / LENGTHS.len() as f64;
        println!("figure axis.counted.{name}.mean = {more:.1} us");
        assert!((-0.2..2.0).contains(&more), "{more}");
    }
    assert!(at(&outside, 0.999) <= Duration::from_micros(6), "{:?}", at(&outside, 0.999));
    assert!(at(&busy, 0.999) <= Duration::from_micros(2), "{:?}", at(&busy, 0.999));
    assert!(at(&idle, 0.99) <= Duration::from_micros(3), "{:?}", at(&idle, 0.99));
    assert!(at(&all, 0.999) <= Duration::from_micros(3), "{:?}", at(&all, 0.999));
    // The median of events with nothing between them, behind a kernel.
    let events = [(); 2].map(|()| device.backend().event_create(true).unwrap());
    let between = || {
        launch(&stream, LENGTHS[1]);
        for event in events {
            stream.enqueue_point(|backend, raw| backend.event_record(event, raw)).unwrap();
        }
        let mut end = stream.ticket();
        while !end.query().unwrap() {
            std::hint::spin_loop();
        }
        device.backend().event_elapsed(events[0], events[1]).unwrap()
    };
    let mut all: Vec<_> = (0..101).map(|_| between()).collect();
    all.sort_unstable();
    assert!(event_time.abs_diff(all[50]) <= Duration::from_nanos(100), "{event_time:?} {:?}", all[50]);
    events.into_iter().for_each(|event| device.backend().event_destroy(event));
}
