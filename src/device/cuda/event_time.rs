//! How long a device takes to pass a timed event.
//!
//! The time between two events includes what the device takes to pass one of them. On an H200 (driver 580.159.04) two events
//! with nothing between them are 1.28 us apart (`guide/facts.md`). They are recorded behind a kernel that runs for longer than
//! the host takes to record them: on an idle stream the host may be the slower one.

use std::time::Duration;

use super::CudaBackend;
use crate::{
    device::{
        CudaTypes,
        backend::{Backend, BodyArg, KernelDef, KernelNumber, KernelSource, Launch, RawEvent, RawStream},
    },
    error::Result,
    sync::log,
};

/// The least of so many counts: another program may use the device.
const ROUNDS: u32 = 4;
/// Queries for the events of a round: some milliseconds.
const QUERIES: u32 = 10_000;
/// A longer time is not that of an event.
const MOST: Duration = Duration::from_micros(4);

/// Runs for 100,000 of the device's cycles, about 50 us.
static WAIT: KernelDef = KernelDef {
    name: "wakeline_wait",
    file: "event_time.rs",
    declared: concat!(file!(), ":", line!()),
    source: KernelSource::Ptx(PTX),
    prototype,
    body: unused_body,
    number: KernelNumber::new(),
};

fn prototype(_: &mut CudaTypes) -> String {
    "void wakeline_wait()".into()
}

/// Never called: the emulated device does not measure this.
fn unused_body(_: &[BodyArg]) {}

const PTX: &str = "
.version 6.0
.target sm_50
.address_size 64
.visible .entry wakeline_wait()
{
    .reg .u64 %begin, %now, %passed;
    .reg .pred %waits;
    mov.u64 %begin, %clock64;
again:
    mov.u64 %now, %clock64;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %waits, %passed, 100000;
    @%waits bra again;
    ret;
}
";

/// Zero if it is unknown. `stream`: one with nothing to do.
pub(super) fn event_time(device: &CudaBackend, stream: RawStream) -> Duration {
    match measure(device, stream) {
        Ok(Some(time)) if time <= MOST => time,
        other => {
            log(
                move || tracing::debug!(measured = ?other, "what the device takes to pass an event is unknown: device times include it"),
            );
            Duration::ZERO
        }
    }
}

fn measure(device: &CudaBackend, stream: RawStream) -> Result<Option<Duration>> {
    device.load(&WAIT)?;
    let from = device.event_create(true)?;
    let least = device.event_create(true).and_then(|to| {
        // After a round that was not passed in time, the stream is not idle.
        let rounds = (0..ROUNDS).map_while(|_| round(device, stream, from, to).transpose());
        let least = rounds.collect::<Result<Vec<_>>>().map(|rounds| rounds.into_iter().min());
        device.event_destroy(to);
        least
    });
    device.event_destroy(from);
    least
}

/// `None` if the device has not passed the events in time: others use it.
fn round(device: &CudaBackend, stream: RawStream, from: RawEvent, to: RawEvent) -> Result<Option<Duration>> {
    let launch = Launch { kernel: &WAIT, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &[] };
    // SAFETY: a live stream; the kernel has no parameters and accesses no memory.
    unsafe { device.launch(stream, &launch)? };
    device.event_record(from, stream)?;
    device.event_record(to, stream)?;
    for _ in 0..QUERIES {
        if let Some(between) = device.event_elapsed_if_passed(from, to)? {
            return Ok(Some(between));
        }
        std::hint::spin_loop();
    }
    Ok(None)
}
