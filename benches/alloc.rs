//! Cost of memory: a pair of allocation and release, against `cuMemAllocAsync` and `cuMemFreeAsync` in the same
//! process.
//!
//! `cargo bench -p wakeline-benches --bench alloc`; without a GPU on the emulated device, wakeline only.
//!
//! - `alloc.same_stream`: on the stream on which the memory was freed.
//! - `alloc.waited`: on a stream that has waited, on the device, for the one on which it was freed.
//! - `alloc.other`: on a stream that has not waited, while the work of the first is blocked: the memory must not be
//!   reused, and the allocation must not wait.
//!
//! Each with the driver's calls for memory, over all pairs.

#[path = "support/figure.rs"]
mod figure;
#[cfg(feature = "cuda")]
#[path = "support/gpu.rs"]
mod gpu;

use std::{sync::mpsc, time::Instant};

use figure::{alternate, figure};
use wakeline::{Stream, memory::Allocator, prelude::*};

const BYTES: usize = 1 << 20;
const PAIRS: u32 = 20_000;
const ROUNDS: usize = 9;

/// Nanoseconds per pair.
fn pairs(mut pair: impl FnMut()) -> f64 {
    let begun = Instant::now();
    (0..PAIRS).for_each(|_| pair());
    begun.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
}

/// Blocks a stream until the sender is dropped.
fn hold(stream: &Stream) -> mpsc::Sender<()> {
    let (go, held) = mpsc::channel::<()>();
    stream.host_function(move || _ = held.recv()).expect("a stream that works");
    go
}

/// Two streams and an allocator; allocated memory has been used.
struct Ours {
    memory: Allocator,
    one: Stream,
    other: Stream,
}

impl Ours {
    fn new(device: &Device) -> Result<Self> {
        let memory = Allocator::unbounded(device).maximum(64 * BYTES as u64);
        Ok(Self { memory, one: Stream::named(device, "one")?, other: Stream::named(device, "other")? })
    }

    fn alloc(&self, on: &Stream) -> Buffer<u8> {
        self.memory.alloc(on, BYTES).expect("memory")
    }

    /// Leaves memory bound to the first stream, whose work does not end meanwhile.
    fn leave_one_bound(&self) {
        let mut used = self.alloc(&self.one);
        self.one.fill(&mut used, 1).expect("fills");
    }

    fn same_stream(&self) -> f64 {
        let _held = hold(&self.one);
        self.leave_one_bound();
        pairs(|| drop(self.alloc(&self.one)))
    }

    fn waited(&self) -> f64 {
        let _held = hold(&self.one);
        self.leave_one_bound();
        self.other.wait_for(&self.one).expect("waits");
        pairs(|| drop(self.alloc(&self.other)))
    }

    fn other(&self) -> f64 {
        let _held = hold(&self.one);
        self.leave_one_bound();
        pairs(|| drop(self.alloc(&self.other)))
    }
}

#[cfg(feature = "cuda")]
struct Bare(cudarc::driver::sys::CUstream);

#[cfg(feature = "cuda")]
impl Bare {
    /// Sets the release threshold of the device's default pool, so that no memory is returned to the system.
    fn new() -> Self {
        use cudarc::driver::{result, sys};
        let mut keep = u64::MAX;
        // SAFETY: the context is current; the pool is the device's own, and the threshold is a 64-bit number that is
        // read during the call.
        unsafe {
            let mut pool = std::ptr::null_mut();
            sys::cuDeviceGetDefaultMemPool(&mut pool, 0).result().expect("the default pool");
            let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast()).result().expect("a threshold");
        }
        Self(result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream"))
    }

    fn pairs(&self) -> f64 {
        use cudarc::driver::result;
        pairs(|| {
            // SAFETY: the stream is alive, and the memory is used nowhere else.
            unsafe {
                let memory = result::malloc_async(self.0, BYTES).expect("memory");
                result::free_async(memory, self.0).expect("frees");
            }
        })
    }
}

fn measure(device: &Device, mut limit: impl FnMut() -> f64) -> Result<()> {
    type Way = fn(&Ours) -> f64;
    let ways: [(&str, Way); 3] = [("same_stream", Ours::same_stream), ("waited", Ours::waited), ("other", Ours::other)];
    for (name, way) in ways {
        let ours = Ours::new(device)?;
        let mut before = 0;
        let mut rounds = 0;
        let (bare, sample) = alternate(ROUNDS, &mut limit, || {
            let time = way(&ours);
            ours.one.synchronize_blocking().expect("synchronises");
            ours.other.synchronize_blocking().expect("synchronises");
            rounds += 1;
            if rounds == 1 {
                before = ours.memory.stats().from_driver;
            }
            time
        });
        let calls = ours.memory.stats().from_driver - before;
        figure(&format!("alloc.{name}"), sample.median, "ns", bare.median);
        figure(&format!("alloc.{name}.driver_calls"), calls as f64, "calls", 0.0);
    }
    Ok(())
}

fn main() -> Result<()> {
    if !figure::asked() {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if Device::cuda_count() > 0 {
        let device = Device::cuda(0)?;
        let gpu = gpu::Gpu::open();
        gpu.enter();
        println!("{}", device.description());
        let bare = Bare::new();
        return measure(&device, || bare.pairs());
    }
    println!("no GPU: measured on the emulated device, without a limit");
    measure(&Device::emulated(Emulated::new()), || f64::NAN)
}
