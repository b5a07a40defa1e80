//! The implementations of a completion: five bare ones, and wakeline in each of its modes.

use std::{sync::Arc, time::Duration};

use wakeline::{Buffer, Device, Stream, kernel::Grid, stream::CompletionMode};

use crate::{
    gpu::{self, Gpu},
    scanner::Scanner,
    spin::spin,
};
use tokio::sync::oneshot;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// `cuStreamSynchronize`: the lower bound.
    Sync,
    /// The awaiting task queries an event, and yields in between.
    Poll,
    /// One thread queries the events of all tasks and answers through a channel.
    Scan,
    /// A host function on the work's own stream.
    Callback,
    /// A host function on a second stream, which waits for an event.
    Side,
    Ours(CompletionMode),
}

impl Source {
    pub(crate) const ALL: [Self; 8] = [
        Self::Sync,
        Self::Poll,
        Self::Scan,
        Self::Callback,
        Self::Side,
        Self::Ours(CompletionMode::Adaptive),
        Self::Ours(CompletionMode::LowLatency),
        Self::Ours(CompletionMode::Quiet),
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Poll => "poll",
            Self::Scan => "scan",
            Self::Callback => "callback",
            Self::Side => "side",
            Self::Ours(CompletionMode::LowLatency) => "lowlatency",
            Self::Ours(CompletionMode::Quiet) => "quiet",
            Self::Ours(_) => "adaptive",
        }
    }

    /// Its name in the picture.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Sync => "a thread spins in cuStreamSynchronize",
            Self::Poll => "the task polls",
            Self::Scan => "a thread scans",
            Self::Callback => "callback",
            Self::Side => "callback on a side stream",
            Self::Ours(CompletionMode::LowLatency) => "wakeline, LowLatency",
            Self::Ours(CompletionMode::Quiet) => "wakeline, Quiet",
            Self::Ours(_) => "wakeline",
        }
    }

    pub(crate) fn is_bare(self) -> bool {
        !matches!(self, Self::Ours(_))
    }
}

#[derive(Clone)]
pub(crate) struct Bare {
    pub(crate) gpu: Gpu,
    pub(crate) kernel: gpu::Kernel,
    pub(crate) scanner: Arc<Scanner>,
}

impl Bare {
    pub(crate) fn new(gpu: Gpu) -> Self {
        let parameters = "unsigned long long *, unsigned long long, unsigned long long";
        let kernel = gpu.kernel("spin", parameters, include_str!("spin.cu"));
        let scanner = Scanner::start(gpu.clone());
        Self { gpu, kernel, scanner }
    }
}

/// One task's stream, and how the task waits for it.
pub(crate) enum Waiter {
    Bare(BareWaiter),
    Ours(OurWaiter),
}

impl Waiter {
    pub(crate) fn new(source: Source, device: &Device, bare: Option<&Bare>) -> Self {
        match (source, bare) {
            (Source::Ours(mode), _) => Self::Ours(OurWaiter::new(device, mode)),
            (_, Some(bare)) => Self::Bare(BareWaiter::new(source, bare)),
            (_, None) => unreachable!("bare sources are for a GPU"),
        }
    }

    pub(crate) async fn once(&mut self, length: Duration) {
        match self {
            Self::Bare(waiter) => waiter.once(length).await,
            Self::Ours(waiter) => {
                waiter.launch(length);
                waiter.stream.completed().await.expect("a device that works");
            }
        }
    }
}

pub(crate) struct OurWaiter {
    pub(crate) stream: Stream,
    count: Buffer<u64>,
}

impl OurWaiter {
    pub(crate) fn new(device: &Device, mode: CompletionMode) -> Self {
        let stream = Stream::new(device).expect("a stream");
        stream.set_completion_mode(mode);
        let count = Buffer::from_slice(&stream, &[0_u64]).expect("memory");
        Self { stream, count }
    }

    pub(crate) fn launch(&mut self, length: Duration) {
        let one = Grid::blocks([1, 1, 1]).threads([1, 1, 1]);
        spin::launch_with(one, &self.stream, &mut self.count, length.as_nanos() as u64).expect("launches");
    }
}

pub(crate) struct BareWaiter {
    source: Source,
    bare: Bare,
    pub(crate) stream: gpu::Stream,
    side: Option<gpu::Stream>,
    event: Arc<gpu::Event>,
    count: u64,
}

impl BareWaiter {
    pub(crate) fn new(source: Source, bare: &Bare) -> Self {
        Self {
            source,
            bare: bare.clone(),
            stream: gpu::Stream::new(),
            side: (source == Source::Side).then(gpu::Stream::new),
            event: Arc::new(gpu::Event::new()),
            count: bare.gpu.memory(8),
        }
    }

    pub(crate) fn launch(&self, length: Duration) {
        // SAFETY: the arguments are memory for one count, which is never freed, its length, and a time.
        unsafe { self.stream.launch(self.bare.kernel, 1, &[self.count, 1, length.as_nanos() as u64]) };
    }

    /// Whether its waits block the thread.
    pub(crate) fn blocks(&self) -> bool {
        self.source == Source::Sync
    }

    async fn once(&mut self, length: Duration) {
        self.launch(length);
        let (sender, receiver) = oneshot::channel();
        let answer = move || _ = sender.send(());
        match (self.source, &self.side) {
            (Source::Poll, _) => {
                self.stream.record(&self.event);
                while !self.event.is_done() {
                    tokio::task::yield_now().await;
                }
                return;
            }
            (Source::Scan, _) => {
                self.stream.record(&self.event);
                self.bare.scanner.add(self.event.clone(), Box::new(answer));
            }
            (Source::Callback, _) => self.stream.host_function(answer),
            (Source::Side, Some(side)) => {
                self.stream.record(&self.event);
                side.wait(&self.event);
                side.host_function(answer);
            }
            _ => return self.stream.synchronize(),
        }
        receiver.await.expect("an answer");
    }

    /// Microseconds that a kernel of this length takes on the device, including the gap to the next: the mean of many
    /// in a row, which are all enqueued before the first begins.
    pub(crate) fn own_time(&self, length: Duration) -> f64 {
        let count = if length < Duration::from_millis(2) { 100 } else { 20 };
        let (from, to) = (gpu::Event::timed(), gpu::Event::timed());
        let mut took = 0.0;
        for _warm_then_measured in 0..2 {
            self.launch(Duration::from_millis(3));
            self.stream.record(&from);
            (0..count).for_each(|_| self.launch(length));
            self.stream.record(&to);
            self.stream.synchronize();
            took = to.since(&from) / f64::from(count);
        }
        took
    }
}
