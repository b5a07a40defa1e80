//! The limit: bare copies of page-locked memory, in both directions at once, with plain driver calls.

use std::{
    sync::{Arc, Barrier},
    thread,
    time::Instant,
};

use cudarc::driver::{CudaContext, result, sys};

/// Page-locked and device memory for both directions, and a stream for each.
pub(crate) struct Pairs {
    context: Arc<CudaContext>,
    chunk: usize,
    host: Vec<[*mut u8; 2]>,
    device: Vec<[u64; 2]>,
    streams: [sys::CUstream; 2],
}

// SAFETY: page-locked memory and handles that any thread may use with the context current, which `copy` ensures.
unsafe impl Sync for Pairs {}

impl Pairs {
    pub(crate) fn new(ordinal: usize, chunk: usize, count: usize) -> Self {
        let context = CudaContext::new(ordinal).expect("the context");
        context.bind_to_thread().expect("current");
        // SAFETY: plain allocations, freed in `drop`.
        let host = || unsafe { result::malloc_host(chunk, sys::CU_MEMHOSTALLOC_PORTABLE).expect("host memory").cast() };
        // SAFETY: as above.
        let device = || unsafe { result::malloc_sync(chunk).expect("device memory") };
        let stream = || result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream");
        Self {
            chunk,
            host: (0..count).map(|_| [host(), host()]).collect(),
            device: (0..count).map(|_| [device(), device()]).collect(),
            streams: [stream(), stream()],
            context,
        }
    }

    /// Copies so many bytes each way. Returns seconds.
    pub(crate) fn copy(&self, total: usize) -> f64 {
        self.context.bind_to_thread().expect("current");
        let began = Instant::now();
        for at in 0..total / self.chunk {
            let pair = at % self.host.len();
            // SAFETY: every buffer is `chunk` bytes long and outlives the synchronisation below; the two directions use
            // different buffers.
            unsafe {
                let (host, device) = (self.host[pair], self.device[pair]);
                sys::cuMemcpyHtoDAsync_v2(device[0], host[0].cast(), self.chunk, self.streams[0])
                    .result()
                    .expect("copies");
                sys::cuMemcpyDtoHAsync_v2(host[1].cast(), device[1], self.chunk, self.streams[1])
                    .result()
                    .expect("copies");
            }
        }
        for stream in self.streams {
            // SAFETY: created in `new`.
            unsafe { result::stream::synchronize(stream).expect("synchronises") };
        }
        began.elapsed().as_secs_f64()
    }
}

/// The same on several devices at once, one thread each: the time until the last is done.
pub(crate) fn copy_on_all(pairs: &[Pairs], total: usize) -> f64 {
    let ready = Barrier::new(pairs.len());
    thread::scope(|scope| {
        let run = |pairs: &Pairs| {
            ready.wait();
            pairs.copy(total)
        };
        let all: Vec<_> = pairs.iter().map(|pairs| scope.spawn(move || run(pairs))).collect();
        all.into_iter().map(|one| one.join().expect("copies")).fold(0.0, f64::max)
    })
}

impl Drop for Pairs {
    fn drop(&mut self) {
        self.context.bind_to_thread().expect("current");
        // SAFETY: created in `new`; all work was synchronised.
        unsafe {
            self.host.iter().flatten().for_each(|host| result::free_host(host.cast()).expect("frees"));
            self.device.iter().flatten().for_each(|device| result::free_sync(*device).expect("frees"));
            self.streams.iter().for_each(|stream| result::stream::destroy(*stream).expect("ends"));
        }
    }
}
