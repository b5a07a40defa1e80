//! [`CompletionMode`]: what a stream's completions may cost, and what they are to bring.

use std::sync::atomic::{AtomicU8, Ordering};

/// How a stream learns that its work is done: how soon, and at what cost to the host.
///
/// Microseconds from the end of a kernel of 20 us, 1 ms and 5 ms, launch included, to the task that awaits it, median (one
/// in a hundred), and cores kept busy, on an H200 with 16 processors; a thread that spins in `cuStreamSynchronize` needs
/// 6 to 7 and a core (bench `completion`):
///
/// | | 20 us | 1 ms | 5 ms |
/// |---|---|---|---|
/// | `Adaptive` | 6 (12), 1.3 | 17 (47), 0.3 | 17 (31), 0.1 |
/// | `LowLatency` | 6 (11), 1.2 | 7 (16), 1.2 | 7 (17), 1.2 |
/// | `Quiet` | 45 (867), 0.3 | 538 (820), 0.1 | 537 (1121), 0.0 |
///
/// # What a waker may do
/// A waker is called on the thread that finds the end: on that of a task that looks, on the device's lookout, or on a worker's or
/// the driver's, from a host function. Wakers of a runtime are all right on each: they schedule a task and return. One that goes
/// on with its task at once, inside `wake`, runs that task there, and a device waits for it as for a host function. So on the
/// device's own threads no call of wakeline waits: enqueueing into a stream whose queue is full, as well as
/// [`synchronize_blocking`](crate::Stream::synchronize_blocking) and
/// [`Kernel::load_blocking`](crate::kernel::Kernel::load_blocking), is a [`Usage`](crate::ErrorKind::Usage) error there. On the
/// driver's callback thread CUDA permits no calls at all: all that need the driver are `Usage` errors there, and what is dropped
/// there is leaked until the process ends. Let such a waker wake a task of a runtime, and enqueue in that.
///
/// ```
/// use wakeline::{Flow, Stream, device::{Device, Emulated}, stream::CompletionMode};
///
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// stream.set_completion_mode(CompletionMode::LowLatency);
/// // All streams of a flow:
/// let mut flow = Flow::new("overnight");
/// flow.set_completion_mode(CompletionMode::Quiet);
/// # Ok::<(), wakeline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionMode {
    /// Looks when an end is near, sleeps when it is not.
    #[default]
    Adaptive,
    /// Looks all the time while somebody waits: soonest, and it may keep a core busy.
    LowLatency,
    /// Never looks again and again: the device calls back. Cheapest while work is long, and latest.
    Quiet,
}

/// A mode that may be set while others read it.
#[derive(Debug)]
pub(super) struct AtomicMode(AtomicU8);

impl AtomicMode {
    pub(super) fn new(mode: CompletionMode) -> Self {
        Self(AtomicU8::new(mode as u8))
    }

    pub(super) fn get(&self) -> CompletionMode {
        match self.0.load(Ordering::Relaxed) {
            1 => CompletionMode::LowLatency,
            2 => CompletionMode::Quiet,
            _ => CompletionMode::Adaptive,
        }
    }

    pub(super) fn set(&self, mode: CompletionMode) {
        self.0.store(mode as u8, Ordering::Relaxed);
    }
}
