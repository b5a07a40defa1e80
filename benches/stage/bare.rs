//! The limit: a loop of plain driver calls, with a chain of its own on each thread.

use std::{sync::atomic::Ordering, thread, time::Instant};

use crate::{
    ELEMENTS, ENVELOPES, STAGES, Streams, Watch, Window,
    gpu::{Event, Gpu, Kernel, Stream},
};

/// The same operators as a loop.
struct Chain {
    kernel: Kernel,
    /// One per stage, or one.
    streams: Vec<Stream>,
    /// One per stage but the last.
    passed: Vec<Event>,
    /// Of the last stage: one per buffer, since the next use of a buffer must come after its last use.
    ended: Vec<Event>,
    buffers: Vec<u64>,
}

impl Chain {
    fn new(gpu: &Gpu, kernel: Kernel, streams: Streams) -> Self {
        let count = match streams {
            Streams::Own => STAGES,
            Streams::Shared => 1,
        };
        Self {
            kernel,
            streams: (0..count).map(|_| Stream::new()).collect(),
            passed: (1..STAGES).map(|_| Event::new()).collect(),
            ended: (0..ENVELOPES).map(|_| Event::new()).collect(),
            buffers: (0..ENVELOPES).map(|_| gpu.memory(ELEMENTS * size_of::<u32>())).collect(),
        }
    }

    fn pass(&self, message: usize) {
        let at = message % ENVELOPES;
        let mut before = &self.ended[at];
        for stage in 0..STAGES {
            let stream = self.streams.get(stage).unwrap_or(&self.streams[0]);
            if self.streams.len() > 1 {
                stream.wait(before);
            }
            // SAFETY: a buffer of this many elements, which is never freed.
            unsafe { stream.launch(self.kernel, ELEMENTS as u32, &[self.buffers[at], ELEMENTS as u64]) };
            before = self.passed.get(stage).unwrap_or(&self.ended[at]);
            stream.record(before);
        }
    }

    fn drain(&self) {
        self.streams.iter().for_each(Stream::synchronize);
    }
}

struct Stop<'a>(&'a Watch);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

pub(crate) struct Bare {
    gpu: Gpu,
    chains: Vec<Chain>,
}

impl Bare {
    pub(crate) fn new(gpu: &Gpu, kernel: Kernel, streams: Streams, threads: usize) -> Self {
        Self { gpu: gpu.clone(), chains: (0..threads).map(|_| Chain::new(gpu, kernel, streams)).collect() }
    }

    pub(crate) fn measure(&self) -> Window {
        let watch = Watch::new(self.chains.len());
        let seen = thread::scope(|scope| {
            // Stops the threads even on a panic: the scope waits for them.
            let _stop = Stop(&watch);
            for (chain, passed) in self.chains.iter().zip(&watch.passed) {
                let (gpu, watch) = (&self.gpu, &watch);
                scope.spawn(move || {
                    gpu.enter();
                    let mut message = 0;
                    while !watch.stop.load(Ordering::Relaxed) {
                        chain.pass(message);
                        message += 1;
                        passed.0.store(message as u64, Ordering::Relaxed);
                    }
                });
            }
            watch.window(thread::sleep)
        });
        let ended = Instant::now();
        self.chains.iter().for_each(Chain::drain);
        let lag = ended.elapsed();
        Window::new(self.chains.len(), &seen, lag)
    }
}
