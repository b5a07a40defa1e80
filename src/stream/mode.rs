//! [`CompletionMode`]: the trade-off between the latency of a stream's completions and their cost.

use std::sync::atomic::{AtomicU8, Ordering};

/// How the host learns that a stream's work is done: how soon, and at what cost.
///
/// Median (99th percentile) microseconds from the end of a kernel of 20 us, 1 ms and 5 ms, launch included, to the task
/// that awaits it, and cores kept busy, on an H200 with 16 processors. A thread that spins in `cuStreamSynchronize`
/// needs 6 to 7 us and a core (bench `completion`):
///
/// | | 20 us | 1 ms | 5 ms |
/// |---|---|---|---|
/// | `Adaptive` | 6 (12), 1.3 | 17 (47), 0.3 | 17 (31), 0.1 |
/// | `LowLatency` | 6 (11), 1.2 | 7 (16), 1.2 | 7 (17), 1.2 |
/// | `Quiet` | 45 (867), 0.3 | 538 (820), 0.1 | 537 (1121), 0.0 |
///
/// # What a waker may do
/// A waker is called on the thread that detects the completion: that of a polling task, the device's completion
/// monitor, or, from a host function, a worker or the driver's thread. The wakers of runtimes are safe on each: they
/// schedule a task and return. A waker that runs its task at once, inside `wake`, runs it on that thread, and the
/// device waits for it as for a host function. Therefore no call of wakeline blocks on the device's own threads:
/// enqueueing into a stream whose queue is full, [`synchronize_blocking`](crate::Stream::synchronize_blocking) and
/// [`Kernel::load_blocking`](crate::kernel::Kernel::load_blocking) return a [`Usage`](crate::ErrorKind::Usage) error
/// there. On the driver's callback thread CUDA permits no calls at all: every call that needs the driver is a `Usage`
/// error there, and what is dropped there is leaked until the process ends. Let such a waker wake a runtime's task, and
/// enqueue in that task.
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
    /// Polls when the end is near, sleeps before.
    #[default]
    Adaptive,
    /// Polls as long as there are waiters: the lowest latency, but it may keep a core busy.
    LowLatency,
    /// Never polls: the device calls back. The cheapest for long work, with the highest latency.
    Quiet,
}

/// A mode that can be set while others read it.
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
