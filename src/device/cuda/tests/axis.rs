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

/// One timed launch, whose completion this thread polls for.
fn spin(stream: &Stream, owner: SpanOwner, length: Duration) -> PassedSpan {
    let reader = owner.reader.clone();
    stream.begin_run(owner);
    let nanos = (length.as_nanos() as u64).to_ne_bytes();
    let args = [Arg::Scalar(&nanos)];
    let launch = Launch { kernel: &SPIN, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
    // SAFETY: the argument is the kernel's, and it accesses no memory.
    stream.enqueue_point(|backend, raw| unsafe { backend.launch(raw, &launch) }).unwrap();
    stream.end_run();
    let mut end = stream.ticket();
    while !end.query().unwrap() {
        std::hint::spin_loop();
    }
    let mut found = None;
    reader.read(Some(&mut |passed| found = Some(passed)));
    found.expect("the stream has passed it")
}

/// Kernels of known lengths, for a minute: on the host's axis, before any clamping, they lie between their enqueue and their
/// completion. Their lengths are printed: besides the loop, they have the start and the end of the kernel in them.
#[test]
#[ignore = "needs a GPU"]
fn device_work_lies_between_its_enqueue_and_its_completion() {
    let _alone = alone();
    let device = Device::cuda(0).expect("this test needs a GPU");
    device.backend().load(&SPIN).unwrap();
    let stream = Stream::new(&device).unwrap();
    let (reader, times) = (SpanReader::new(), Arc::new(DeviceTimes::default()));
    let (began, mut outside, mut wrong) = (Instant::now(), Vec::new(), Vec::new());
    let mut run = 0;
    while began.elapsed() < Duration::from_secs(60) {
        for micros in [50, 200, 1000] {
            let length = Duration::from_micros(micros);
            let (reader, times) = (reader.clone(), times.clone());
            let owner = SpanOwner { reader, run, times, spans: SmallVec::new() };
            let passed = spin(&stream, owner, length);
            outside.push(passed.outside);
            wrong.push((passed.ended - passed.began).abs_diff(length));
            run += 1;
        }
        // As the observer's thread does.
        reader.adjust();
        // Clocks drift, and the first launch after a pause is slow.
        if run % 300 == 0 {
            thread::sleep(Duration::from_millis(300));
        }
    }
    outside.sort_unstable();
    wrong.sort_unstable();
    let at = |all: &[Duration], share: f64| all[((all.len() - 1) as f64 * share) as usize];
    for (name, all) in [("outside", &outside), ("length", &wrong)] {
        for (percentile, share) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
            println!("figure axis.{name}.{percentile} = {:.1} us", at(all, share).as_secs_f64() * 1e6);
        }
    }
    assert!(at(&outside, 0.999) <= Duration::from_micros(6), "{:?}", at(&outside, 0.999));
}
