//! What passing through a device costs: chunks that already lie in page-locked envelopes go to the GPU, through a kernel
//! and back, against bare copies of page-locked memory in both directions at once. Both in this process, alternating.
//!
//! `cargo bench --bench through` (needs a CUDA device)

#[path = "support/figure.rs"]
mod figure;

#[cfg(feature = "cuda")]
mod bench {
    use std::time::Instant;

    use super::figure::{alternate, figure};
    use cudarc::driver::{result, sys};
    use wakeline::{kernel::Grid, prelude::*};

    const MIB: usize = 1 << 20;
    const ROUNDS: usize = 7;
    /// Bytes that pass in one round.
    const TOTAL: usize = 4 << 30;

    #[kernel(unsafe(cuda = "touch.cu"))]
    fn touch(data: &mut [u8]) {
        data.iter_mut().step_by(4096).for_each(|byte| *byte = byte.wrapping_add(1));
    }

    #[derive(Ports)]
    struct FeedPorts {
        #[output]
        chunks: Output<Envelope<u8>>,
    }

    /// Sends blank envelopes as they are: whole, and filled by nobody.
    struct Feed(usize);

    impl Operator for Feed {
        type Ports = FeedPorts;

        async fn compute(&mut self, ports: &mut FeedPorts, cx: &mut Cx) -> Result<()> {
            let mut chunk = ports.chunks.blank().await?;
            chunk.set_len(chunk.capacity())?;
            self.0 -= 1;
            if self.0 == 0 {
                cx.finish();
            }
            ports.chunks.send(chunk).await
        }
    }

    #[derive(Ports)]
    struct TouchPorts {
        #[input]
        chunks: Input<Envelope<u8>>,
        #[output]
        touched: Output<Envelope<u8>>,
    }

    struct Touch;

    impl Operator for Touch {
        type Ports = TouchPorts;

        async fn compute(&mut self, ports: &mut TouchPorts, cx: &mut Cx) -> Result<()> {
            let mut chunk = ports.chunks.take()?;
            let grid = Grid::blocks([(chunk.len() / 4096).div_ceil(256) as u32, 1, 1]);
            touch::launch_with(grid, cx.stream()?, &mut chunk)?;
            ports.touched.send(chunk).await
        }
    }

    #[derive(Ports)]
    struct EatPorts {
        #[input]
        chunks: Input<Envelope<u8>>,
    }

    /// Waits for each chunk's arrival, as whoever reads it must.
    struct Eat;

    impl Operator for Eat {
        type Ports = EatPorts;

        async fn compute(&mut self, ports: &mut EatPorts, _cx: &mut Cx) -> Result<()> {
            let chunk = ports.chunks.take()?;
            std::hint::black_box(chunk.read().await?[0]);
            Ok(())
        }
    }

    async fn ours(device: &Device, chunk: usize, envelopes: usize) -> f64 {
        let mut flow = Flow::new("through");
        let feed = flow.add("feed", Feed(TOTAL / chunk));
        let through = flow.add("touch", Touch).on(device);
        let eat = flow.add("eat", Eat);
        let hub = Hub::bounded(envelopes).envelopes(envelopes);
        flow.connect_with(feed.chunks, through.chunks, hub.envelope_bytes(chunk));
        flow.connect_with(through.touched, eat.chunks, hub);
        let report = flow.run().await.expect("the flow runs");
        let took = report.elapsed.as_secs_f64() - report.setup.as_secs_f64();
        TOTAL as f64 / took / 1e9
    }

    /// Bytes a second each way, in GB/s.
    fn bare(chunk: usize, pairs: &Pairs) -> f64 {
        let began = Instant::now();
        for at in 0..TOTAL / chunk {
            let pair = at % pairs.host.len();
            // SAFETY: every buffer is `chunk` bytes long and outlives the synchronisation below; the two directions use
            // different buffers.
            unsafe {
                let host = pairs.host[pair];
                sys::cuMemcpyHtoDAsync_v2(pairs.device[pair][0], host[0].cast(), chunk, pairs.streams[0])
                    .result()
                    .expect("copies");
                sys::cuMemcpyDtoHAsync_v2(host[1].cast(), pairs.device[pair][1], chunk, pairs.streams[1])
                    .result()
                    .expect("copies");
            }
        }
        for stream in pairs.streams {
            // SAFETY: made in `Pairs::new`.
            unsafe { result::stream::synchronize(stream).expect("synchronises") };
        }
        TOTAL as f64 / began.elapsed().as_secs_f64() / 1e9
    }

    struct Pairs {
        host: Vec<[*mut u8; 2]>,
        device: Vec<[u64; 2]>,
        streams: [sys::CUstream; 2],
    }

    impl Pairs {
        fn new(chunk: usize, count: usize) -> Self {
            // SAFETY: plain allocations, freed in `drop`.
            let host =
                || unsafe { result::malloc_host(chunk, sys::CU_MEMHOSTALLOC_PORTABLE).expect("host memory").cast() };
            // SAFETY: as above.
            let device = || unsafe { result::malloc_sync(chunk).expect("device memory") };
            let stream = || result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream");
            Self {
                host: (0..count).map(|_| [host(), host()]).collect(),
                device: (0..count).map(|_| [device(), device()]).collect(),
                streams: [stream(), stream()],
            }
        }
    }

    impl Drop for Pairs {
        fn drop(&mut self) {
            // SAFETY: made in `new`; everything was synchronised.
            unsafe {
                self.host.iter().flatten().for_each(|host| result::free_host(host.cast()).expect("frees"));
                self.device.iter().flatten().for_each(|device| result::free_sync(*device).expect("frees"));
                self.streams.iter().for_each(|stream| result::stream::destroy(*stream).expect("ends"));
            }
        }
    }

    pub(super) fn run() {
        let device = match Device::cuda(0) {
            Ok(device) => device,
            Err(error) => return println!("through: not measured: {error}"),
        };
        let context = cudarc::driver::CudaContext::new(0).expect("the context");
        context.bind_to_thread().expect("current");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
        for (chunk, envelopes) in [(MIB, 16), (4 * MIB, 8), (16 * MIB, 4)] {
            let pairs = Pairs::new(chunk, envelopes);
            let (bare, ours) = alternate(
                ROUNDS,
                || bare(chunk, &pairs),
                || runtime.block_on(async { ours(&device, chunk, envelopes).await }),
            );
            let name = format!("through.{}MiB", chunk / MIB);
            figure(&name, ours.median, "GB/s", bare.median);
            figure(&format!("{name}.ratio"), ours.ratio, "x", 1.0);
        }
    }
}

fn main() {
    if !figure::asked() {
        return;
    }
    #[cfg(feature = "cuda")]
    bench::run();
    #[cfg(not(feature = "cuda"))]
    println!("through: not measured: built without the feature `cuda`");
}
