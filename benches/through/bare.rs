//! The limits, with plain driver calls: bare copies of page-locked memory, in both directions at once; and the same copies
//! with a kernel between them, enqueued by hand.

use std::{
    sync::{Arc, Barrier, atomic::AtomicU64},
    thread,
    time::Instant,
};

use cudarc::driver::{CudaContext, result, sys};

use crate::{
    flow::threads,
    gpu::{Event, Gpu, Kernel, Stream},
};

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

/// One thread that copies each chunk in, launches the kernel and copies the chunk out, on a stream for each, ordered by
/// events. Before a chunk's memory is used again, the thread waits until the chunk is out.
pub(crate) struct ByHand {
    gpu: Gpu,
    kernel: Kernel,
    chunk: usize,
    slots: Vec<Slot>,
    streams: [Stream; 3],
}

/// The memory of a chunk on its way, and the ends of its three operations.
struct Slot {
    from: &'static [AtomicU64],
    device: u64,
    to: &'static [AtomicU64],
    ends: [Event; 3],
}

impl ByHand {
    pub(crate) fn new(chunk: usize, count: usize) -> Self {
        let gpu = Gpu::open();
        gpu.enter();
        let kernel = gpu.kernel("touch", "unsigned char *data, unsigned long long len", include_str!("touch.cu"));
        let slot = |_| Slot {
            from: gpu.host_memory(chunk / 8),
            device: gpu.memory(chunk),
            to: gpu.host_memory(chunk / 8),
            ends: [(); 3].map(|()| Event::new()),
        };
        let slots = (0..count).map(slot).collect();
        Self { kernel, chunk, slots, streams: [(); 3].map(|()| Stream::new()), gpu }
    }

    /// Passes so many bytes. Returns seconds.
    pub(crate) fn pass(&self, total: usize) -> f64 {
        self.gpu.enter();
        let [input, compute, output] = &self.streams;
        let began = Instant::now();
        for at in 0..total / self.chunk {
            let Slot { from, device, to, ends: [arrived, computed, left] } = &self.slots[at % self.slots.len()];
            if at >= self.slots.len() {
                left.synchronize();
            }
            // SAFETY: each memory has `chunk` bytes, and the device's is never freed. Events order the operations on one chunk, and the
            // thread has waited for the chunk before it.
            unsafe {
                input.copy_in(*device, from);
                input.record(arrived);
                compute.wait(arrived);
                compute.launch(self.kernel, threads(self.chunk), &[*device, self.chunk as u64]);
                compute.record(computed);
                output.wait(computed);
                output.copy_out(to, *device);
                output.record(left);
            }
        }
        output.synchronize();
        began.elapsed().as_secs_f64()
    }
}
