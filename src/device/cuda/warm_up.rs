//! [`WarmUp`]: keeps the code that launches a kernel in the processor's caches.
//!
//! The first launch after a pause is slow, whichever thread makes it: the driver's code and data have left the caches. On
//! an H200 (driver 580.159.04) `cuLaunchKernel` took 4 us in a loop, 8 us after 1 ms and 16 to 19 us after 5 ms; after a
//! sleep as well as after queries of an event all the while. Microseconds from a kernel's launch to the host's knowledge
//! of its end, beyond the kernel's own time, p50 (p99), where the host sleeps and then queries for the last 250 us:
//!
//! | meanwhile, on another stream | 1 ms | 5 ms |
//! |---|---|---|
//! | nothing | 11 (32) to 13 (49) | 12 (39) to 23 (54) |
//! | a launch that the driver refuses (no blocks) | 13 (132) | 20 (180) |
//! | `cuStreamWriteValue32` | 15 (32) | 18 (61) |
//! | a fill of 4 bytes | 12 (29) | 17 (62) |
//! | an empty kernel | 10 (22) | 11 (28) |
//! | an empty kernel and an event, once | 10 (20) | 12 (30) |
//! | the same, every 80 us | 10 (21) | 10 (26) |
//! | the host queries from launch to end | 10 (18) | 21 (38) |
//!
//! So a task that polls for the end of long work launches an empty kernel now and then, on a stream that is for this
//! alone once the device is open (before, `event_time.rs` uses it). There is never more than one in flight.

use std::sync::atomic::{AtomicBool, Ordering};

use super::CudaBackend;
use crate::{
    device::{
        CudaTypes,
        backend::{Backend, BodyArg, KernelDef, KernelNumber, KernelSource, Launch, RawEvent, RawStream, StreamSpec},
    },
    error::Result,
};

static EMPTY: KernelDef = KernelDef {
    name: "wakeline_warm_up",
    file: "warm_up.rs",
    declared: concat!(file!(), ":", line!()),
    source: KernelSource::Ptx(PTX),
    prototype,
    body: unused_body,
    number: KernelNumber::new(),
};

fn prototype(_: &mut CudaTypes) -> String {
    "void wakeline_warm_up()".into()
}

/// Never called: the emulated device has no warm-up.
fn unused_body(_: &[BodyArg]) {}

const PTX: &str = "
.version 6.0
.target sm_50
.address_size 64
.visible .entry wakeline_warm_up()
{
    ret;
}
";

/// See the [module](self).
#[derive(Debug)]
pub(super) struct WarmUp {
    stream: RawStream,
    /// Behind the last launch.
    event: RawEvent,
    /// True while a thread is in `run`.
    runs: AtomicBool,
}

impl WarmUp {
    /// Loads the kernel, which may wait for the device: call it before there is work.
    pub(super) fn new(device: &CudaBackend) -> Result<Self> {
        device.load(&EMPTY)?;
        let event = device.event_create(false)?;
        let (priority, _) = device.stream_priorities();
        let spec = StreamSpec { name: "warm-up".into(), priority, non_blocking: true };
        match device.stream_create(&spec) {
            Ok(stream) => Ok(Self { stream, event, runs: AtomicBool::new(false) }),
            Err(error) => {
                device.event_destroy(event);
                Err(error)
            }
        }
    }

    pub(super) fn stream(&self) -> RawStream {
        self.stream
    }

    /// Launches the kernel, unless its last launch is not done, or another call waits for the context.
    pub(super) fn run(&self, device: &CudaBackend) -> Result<()> {
        if device.gate.is_pending() || self.runs.swap(true, Ordering::Acquire) {
            return Ok(());
        }
        let ran = self.launch(device);
        self.runs.store(false, Ordering::Release);
        ran
    }

    fn launch(&self, device: &CudaBackend) -> Result<()> {
        if !device.event_query(self.event)? {
            return Ok(());
        }
        let launch = Launch { kernel: &EMPTY, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &[] };
        // SAFETY: a live stream; the kernel has no parameters and accesses no memory.
        unsafe { device.launch(self.stream, &launch)? };
        device.event_record(self.event, self.stream)
    }

    /// Destroys the stream and the event. Nothing may use them.
    pub(super) fn close(&self, device: &CudaBackend) {
        device.stream_destroy(self.stream);
        device.event_destroy(self.event);
    }
}
