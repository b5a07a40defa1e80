//! Extremes that safe code can ask for: sizes, counts, durations, alignments, names, and a thread that ends. Each is an error
//! that says what is wrong, or works; none is a panic, an abort or undefined behaviour, in debug and in release
//! (`cargo test --release --test extremes`).

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod common;

use std::{
    any::Any,
    cell::RefCell,
    future::ready,
    sync::{Arc, mpsc},
    time::Duration,
};

use common::*;
use wakeline::{
    condition::{self, Condition, MissedTicks, at_least, at_most, batch, count, every, memory, room},
    device::Simulation,
    flow::LocalFlow,
    graph::Graph,
    hub::{Metadata, RawEnvelope},
    kernel::Grid,
    memory::Allocator,
    operator::concurrent,
    prelude::*,
};

const MOST: usize = usize::MAX;

/// Errors that say what is wrong with a size, and nothing else.
#[track_caller]
fn refused<T>(what: &str, outcome: Result<T>) -> Error {
    let Err(error) = outcome else { panic!("{what} was taken") };
    let expected = [ErrorKind::OutOfMemory, ErrorKind::Usage, ErrorKind::Setup, ErrorKind::Driver];
    assert!(expected.contains(&error.kind()), "{what}: {error}");
    error
}

#[track_caller]
fn out_of_memory<T>(what: &str, outcome: Result<T>) {
    let error = refused(what, outcome);
    assert!(error.is_out_of_memory(), "{what}: {error}");
}

fn host_only() -> Flow {
    Flow::new("host")
}

// ---- a thread that ends

/// Runs a function when its thread ends, after the destructors of all thread-locals that are used first after it.
struct AtEnd(RefCell<Option<Box<dyn FnOnce()>>>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        if let Some(last) = self.0.take() {
            last();
        }
    }
}

thread_local! {
    static AT_END: AtEnd = const { AtEnd(RefCell::new(None)) };
}

/// A thread: what `work` returns is run by a destructor of a thread-local that goes after those of wakeline and of tokio.
fn as_a_thread_ends(work: impl FnOnce() -> Box<dyn FnOnce()> + Send + 'static) {
    std::thread::spawn(|| {
        AT_END.with(|_| ());
        let last = work();
        AT_END.with(|end| *end.0.borrow_mut() = Some(last));
    })
    .join()
    .unwrap();
}

on_both!(a_buffer_in_flight_goes_with_its_threads_locals, async |device: Device| {
    let [a, b]: [Stream; 2] = streams(&device);
    let held = hold(&a);
    let (own, other) = (a.clone(), b.clone());
    let thread = move || {
        as_a_thread_ends(move || {
            let from = Buffer::<u32>::pinned(own.device(), 64).unwrap();
            let mut to = Buffer::<u32>::new(own.device(), 64).unwrap();
            own.copy(&from, &mut to).unwrap();
            // Whatever there is of wakeline's on this thread is made, and is gone before the buffers.
            other.scope(|| assert_eq!(Stream::current(), Some(other.clone())));
            futures::executor::block_on(Simulation::new(1).run(ready(())));
            Box::new(move || drop((from, to)))
        });
    };
    tokio::task::spawn_blocking(thread).await.unwrap();
    drop(held);
    a.completed().await.unwrap();
    freed(&device).await;
});

on_both!(all_of_wakeline_works_in_a_threads_last_locals, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let thread = move || {
        as_a_thread_ends(move || {
            // Its locals are there first.
            everything(&stream);
            Box::new(move || everything(&stream))
        });
    };
    tokio::task::spawn_blocking(thread).await.unwrap();
});

fn everything(stream: &Stream) {
    let device = stream.device();
    let mut data = Buffer::from_slice(stream, &[1_u32; 64]).unwrap();
    stream.scope(|| {
        assert_eq!(Stream::current().as_ref(), Some(stream));
        let (graph, ()) = Graph::capture(device, |capture| {
            assert!(Graph::capture(device, |inner| inner.stream().fill(&mut data, 2)).is_ok());
            capture.stream().fill(&mut data, 3)
        })
        .unwrap();
        graph.instantiate().unwrap().launch(stream).unwrap();
    });
    assert_eq!(Stream::current(), None);
    let mut scoped = Box::pin(stream.scoped(async { Stream::current() }));
    let polled = scoped.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert_eq!(polled, std::task::Poll::Ready(Some(stream.clone())));
    drop(Stream::new(device).unwrap());
    data.state().unwrap();
    drop(data);
    #[cfg(feature = "config")]
    {
        let config = wakeline::Config::new().set("a.b", 1).unwrap();
        assert!(format!("{config:?}").contains("Config"));
    }
}

/// The stream of a scoped future is the current one while the future is polled and while it is dropped, and nowhere else.
#[tokio::test]
async fn a_scoped_futures_drop_is_in_its_scope() {
    struct Looks(mpsc::Sender<Option<Stream>>);
    impl Drop for Looks {
        fn drop(&mut self) {
            self.0.send(Stream::current()).unwrap();
        }
    }
    let device = emulated();
    let [a, b]: [Stream; 2] = streams(&device);
    let (tell, told) = mpsc::channel();
    let looks = Looks(tell.clone());
    let mut pending = Box::pin(a.scoped(async move {
        let _looks = looks;
        std::future::pending::<()>().await;
    }));
    assert!(futures::poll!(pending.as_mut()).is_pending());
    assert_eq!(Stream::current(), None);
    b.scope(|| {
        drop(pending);
        assert_eq!(Stream::current(), Some(b.clone()));
    });
    assert_eq!(told.try_recv().unwrap(), Some(a.clone()));
    let looks = Looks(tell);
    a.scoped(async move { drop(looks) }).await;
    assert_eq!(told.try_recv().unwrap(), Some(a.clone()));
    // A panic leaves it as it was.
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| a.scope(|| panic!("within a scope"))));
    assert!(outcome.is_err());
    assert_eq!(Stream::current(), None);
}

// ---- alignment

#[allow(unsafe_code)]
mod aligned {
    use wakeline::{kernel, kernel::KernelType};

    /// As wide as memory is aligned.
    #[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C, align(256))]
    pub(crate) struct Wide(pub(crate) [u64; 32]);

    // SAFETY: double_wide.cu has the same.
    unsafe impl KernelType for Wide {
        const CUDA: &'static str = "Wide";
        const DECLARE: &'static str = "struct Wide;";
    }

    #[kernel(unsafe(cuda = "kernels/double_wide.cu"))]
    pub(crate) fn double_wide(x: &mut [Wide]) {
        assert!(x.as_ptr().is_aligned());
        for n in x.iter_mut().flat_map(|wide| &mut wide.0) {
            *n *= 2;
        }
    }
}
use aligned::{Wide, double_wide};

on_both!(elements_of_the_widest_alignment_lie_right_everywhere, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    // Odd sizes between them: nothing is aligned by luck.
    let mut kept: Vec<Box<dyn Any + Send>> = Vec::new();
    for n in 1..20_u64 {
        let data: Vec<Wide> = (0..n).map(|at| Wide([at; 32])).collect();
        let mut there = Buffer::from_slice(&stream, &data).unwrap();
        double_wide::launch(&stream, &mut there).unwrap();
        let doubled: Vec<Wide> = (0..n).map(|at| Wide([2 * at; 32])).collect();
        assert_eq!(there.to_vec(&stream).await.unwrap(), doubled);
        for near in [&device, &Device::host()] {
            let odd = Buffer::<u8>::pinned(near, 1 + 3 * n as usize).unwrap();
            let mut here = Buffer::<Wide>::pinned(near, n as usize).unwrap();
            assert!(here.as_slice().unwrap().as_ptr().is_aligned());
            here.as_mut_slice().unwrap().copy_from_slice(&data);
            let envelope = Envelope::from(here);
            assert_eq!(envelope.as_slice().unwrap(), data);
            kept.push(Box::new((odd, envelope)));
        }
    }
    let hub = ChunkHub::<Wide, ()>::builder("wide").elements(3).host_envelopes(2).near(&device).build().unwrap();
    let mut produce = hub.produce(&Device::host()).unwrap();
    produce.with(async |blank| blank.fill_from(&[Wide([7; 32]); 3]).await).await.unwrap();
});

/// An envelope keeps its elements' type; where the doc-hidden way around that is taken, what does not fit is an error.
#[test]
fn memory_of_other_elements_is_an_error_and_no_panic() {
    fn as_other<T: wakeline::memory::Plain>(envelope: Envelope<u8>) -> Envelope<T> {
        let raw: Option<RawEnvelope> = wakeline::Message::into_envelope(envelope);
        wakeline::Message::of_envelope(raw.unwrap()).unwrap()
    }
    for offset in 0..16 {
        struct Part(Vec<u8>, usize);
        impl AsRef<[u8]> for Part {
            fn as_ref(&self) -> &[u8] {
                &self.0[self.1..]
            }
        }
        let (part, _) = Buffer::wrap_read_only(Part(vec![1; 1024], offset)).unwrap();
        let other = as_other::<Wide>(part.into());
        if let Err(error) = other.as_slice() {
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            assert!(error.to_string().contains("Wide"), "{error}");
        }
        let mut mine = as_other::<f64>(Buffer::wrap(vec![1_u8; 64 + offset]).unwrap().0.into());
        let _ = mine.as_mut_slice().map(|all| assert!(all.as_ptr().is_aligned()));
        let _ = mine.as_mut_space().map(|all| assert!(all.as_ptr().is_aligned()));
    }
    // A vector of one byte each at an odd address is what it is.
    let (odd, _) = Buffer::wrap_read_only(bytes_at(1)).unwrap();
    assert_eq!(odd.as_slice().unwrap().len(), 63);
}

fn bytes_at(offset: usize) -> impl AsRef<[u8]> + Send + 'static {
    struct At(Arc<[u8]>, usize);
    impl AsRef<[u8]> for At {
        fn as_ref(&self) -> &[u8] {
            &self.0[self.1..]
        }
    }
    At(Arc::from([0; 64]), offset)
}

// ---- sizes

on_both!(buffers_of_any_size_are_refused_with_the_numbers, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let half = MOST / 2 + 1;
    // Up to here a driver is asked.
    refused("Buffer::new", Buffer::<u8>::new(&device, (1 << 48) - 1));
    refused("Buffer::pinned", Buffer::<u8>::pinned(&device, (1 << 48) - 1));
    refused("stream-ordered", Allocator::stream_ordered(&device).alloc::<u8>(&stream, (1 << 48) - 1));
    for len in [MOST, MOST - 1, half, half - 1, MOST / 4, MOST / 8, MOST / 16, 1 << 48] {
        out_of_memory("Buffer::new", Buffer::<u8>::new(&device, len));
        out_of_memory("Buffer::new", Buffer::<u64>::new(&device, len));
        out_of_memory("Buffer::new", Buffer::<Wide>::new(&device, len));
        out_of_memory("Buffer::pinned", Buffer::<u64>::pinned(&device, len));
        out_of_memory("Buffer::pinned", Buffer::<u64>::pinned(&Device::host(), len));
        out_of_memory("Stream::alloc", stream.alloc::<u32>(len));
        for allocator in [
            Allocator::unbounded(&device),
            Allocator::unbounded(&device).maximum(u64::MAX),
            Allocator::unbounded(&device).maximum(0),
            Allocator::unbounded(&device).maximum(1000),
            Allocator::stream_ordered(&device),
            Allocator::stream_ordered(&device).maximum(u64::MAX),
            Allocator::pinned(&device),
            Allocator::pinned(&device).maximum(u64::MAX),
            Allocator::blocks(&device, 1024, 2).unwrap(),
            Allocator::pinned_blocks(&device, 1024, 2).unwrap(),
        ] {
            out_of_memory(&allocator.to_string(), allocator.alloc::<u8>(&stream, len));
            out_of_memory(&allocator.to_string(), allocator.alloc::<u64>(&stream, len));
            out_of_memory(&allocator.to_string(), allocator.alloc_when_free::<u16>(&stream, len).await);
            // What it counts is as before, and it works.
            assert_eq!(allocator.stats().in_use, 0);
        }
        let captured = Graph::capture(&device, |capture| capture.stream().alloc::<u32>(len).map(drop));
        out_of_memory("in a capture", captured);
        let mut builder = Graph::builder(&device).unwrap();
        out_of_memory("as a node", builder.alloc::<u32>(&[], len));
    }
    for _ in 0..100 {
        // None of these took anything, addresses neither.
        out_of_memory("Buffer::new", Buffer::<u8>::new(&device, half - 1));
    }
    Buffer::from_slice(&stream, &[1_u8; 100]).unwrap().to_vec(&stream).await.unwrap();
    for zero in [Buffer::<u8>::new(&device, 0).map(drop), stream.alloc::<u8>(0).map(drop)] {
        assert_eq!(zero.unwrap_err().kind(), ErrorKind::Usage);
    }
    assert_eq!(Buffer::wrap(Vec::<u8>::new()).unwrap_err().kind(), ErrorKind::Usage);
});

on_both!(blocks_of_any_number_are_refused_at_once, async |device: Device| {
    let half = u64::MAX / 2 + 1;
    for (bytes, count) in [
        (1, MOST),
        (u64::MAX, 1),
        (u64::MAX, MOST),
        (half, 2),
        (half, 1),
        (2, MOST / 2 + 1),
        (1 << 32, 1 << 32),
        (1, 1 << 40),
        (1 << 20, 1 << 30),
        (1 << 40, 1 << 20),
    ] {
        for host in [false, true] {
            let make = if host { Allocator::pinned_blocks } else { Allocator::blocks };
            out_of_memory(&format!("{count} of {bytes}"), make(&device, bytes, count));
        }
        out_of_memory("of the host", Allocator::pinned_blocks(&Device::host(), bytes, count));
    }
    // What was refused is counted nowhere.
    at_rest(&device).await;
    assert_eq!(Allocator::blocks(&device, 0, 1).unwrap_err().kind(), ErrorKind::Usage);
    assert_eq!(Allocator::blocks(&device, 1, 0).unwrap_err().kind(), ErrorKind::Usage);
});

/// An emulated device says that it has as much memory as it was given; the machine has not.
#[tokio::test]
async fn an_emulated_device_of_any_size_takes_no_more_than_the_machine_has() {
    for memory in [0, 1, u64::MAX / 2, u64::MAX - 1, u64::MAX] {
        let device = emulated_with(Emulated::new().memory(memory).workers(1));
        assert_eq!(device.memory().unwrap().total, memory);
        for len in [1 << 45, MOST >> 16, MOST >> 15, MOST >> 1, MOST] {
            out_of_memory("Buffer::new", Buffer::<u8>::new(&device, len));
        }
        out_of_memory("blocks", Allocator::blocks(&device, 1, MOST));
        out_of_memory("blocks", Allocator::blocks(&device, 1 << 30, 1 << 20));
        assert_eq!(Buffer::<u8>::new(&device, 1).is_ok(), memory > 0);
    }
}

#[test]
fn an_emulated_device_has_as_many_workers_as_it_can() {
    let device = Device::emulated(Emulated::new().workers(MOST));
    let stream = Stream::new(&device).unwrap();
    let (tell, told) = mpsc::channel();
    stream.host_function(move || tell.send(()).unwrap()).unwrap();
    told.recv().unwrap();
    drop(Device::emulated(Emulated::new().workers(0)));
}

on_both!(launches_of_any_shape_are_refused, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let mut data = Buffer::from_slice(&stream, &[1_u32; 64]).unwrap();
    let most = u32::MAX;
    for grid in [
        Grid::default().threads([most; 3]),
        Grid::default().threads([most, most, 1]),
        Grid::default().threads([most, 1, 1]),
        Grid::default().threads([1 << 31, 1 << 31, 4]),
        Grid::default().threads([0, most, most]),
        Grid::default().threads([1025, 1, 1]),
        Grid::default().threads([32, 32, 2]),
        Grid::blocks([most, 1, 1]),
        Grid::blocks([1, 65_536, 1]),
        Grid::blocks([1, 1, most]),
        Grid::blocks([most; 3]).threads([most; 3]),
        Grid::blocks([0; 3]),
        Grid::default().shared_bytes(most),
    ] {
        refused(&format!("{grid:?}"), increment::launch_with(grid, &stream, &mut data));
        let captured = Graph::capture(&device, |capture| increment::launch_with(grid, capture.stream(), &mut data));
        refused(&format!("{grid:?} in a capture"), captured);
    }
    increment::launch(&stream, &mut data).unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [2; 64]);
});

on_both!(stream_pools_of_any_size_are_refused, async |device: Device| {
    let pool = || StreamPool::builder(&device).name("any");
    refused("reserved", pool().reserved(MOST).build());
    refused("reserved", pool().reserved(MOST).maximum(MOST).build());
    refused("reserved", pool().reserved(1 << 32).build());
    refused("maximum", pool().maximum(0).build());
    for priority in [i32::MIN, i32::MAX] {
        let pool = pool().maximum(MOST).priority(priority).build().unwrap();
        assert!(device.stream_priorities().contains(&pool.priority()));
        drop(pool.take().unwrap());
    }
});

on_both!(hubs_of_any_size_are_refused_or_work, async |device: Device| {
    let flow = |hub: Hub, on: &Device| {
        let mut flow = Flow::new("any");
        let from = flow.add("from", SendEach::new([vec![1_u32; 4]]));
        let add = flow.add("add", Increment).on(on);
        let to = flow.add("to", Collect(shared()));
        flow.connect_with(from.output, add.input, hub);
        flow.connect(add.output, to.input);
        flow
    };
    let small = Hub::bounded(1).envelope_bytes(16);
    for hub in [
        small.envelope_bytes(MOST),
        small.envelope_bytes(MOST / 2 + 1),
        small.envelope_bytes(MOST / 2),
        small.envelopes(MOST),
        small.envelopes(MOST / 2 + 1),
        small.envelopes(1 << 40),
        small.envelopes(MOST).envelope_bytes(MOST),
        small.envelopes(2).envelope_bytes(1 << 47),
        Hub::drop_oldest(MOST).envelope_bytes(16),
        Hub::drop_newest(MOST).envelope_bytes(16),
        Hub::drop_oldest(MOST - 1).envelope_bytes(MOST),
    ] {
        let error = refused(&format!("{hub:?}"), within(flow(hub, &device).run()).await);
        assert!(error.to_string().contains("from"), "{hub:?}: {error}");
    }
    within(flow(Hub::bounded(MOST).envelopes(2).envelope_bytes(16), &device).run()).await.unwrap();
});

#[tokio::test]
async fn queues_conditions_and_limits_of_any_size_are_refused_or_work() {
    let numbers = || {
        let mut numbers = 0..3_u32;
        wakeline::operator::source(move || ready(Ok(numbers.next())))
    };
    for hub in [Hub::bounded(MOST), Hub::drop_newest(MOST), Hub::drop_oldest(MOST), Hub::bounded(MOST - 1)] {
        let mut flow = host_only();
        let seen = shared();
        let (from, to) = (flow.add("from", numbers()), flow.add("to", keep(&seen)));
        flow.connect_with(from.output, to.input, hub);
        within(flow.run()).await.unwrap();
        assert_eq!(*lock(&seen), [0, 1, 2]);
    }
    // As much as is asked for fits, and never comes: what there is at the end does.
    type Ask = fn(condition::PortId) -> condition::OnPorts;
    let conditions: [(&str, Ask); 7] = [
        ("at_least", |port| at_least(port, MOST)),
        ("at_most", |port| at_most(port, MOST)),
        ("batch", |port| batch(port, MOST, Duration::MAX)),
        ("batch of one", |port| batch(port, 1, Duration::MAX)),
        ("sum", |port| condition::sum([port], MOST)),
        ("each", |port| condition::each([(port, MOST)])),
        ("or_after", |port| at_least(port, 2).or_after(Duration::MAX)),
    ];
    for (name, ask) in conditions {
        for hub in [Hub::bounded(MOST), Hub::bounded(2)] {
            let mut flow = host_only();
            let seen = shared();
            let from = flow.add("from", numbers());
            let to = flow.add("to", keep(&seen));
            let port: condition::PortId = to.input.into();
            flow.connect_with(from.output, to.input, hub);
            let _ = to.when(ask(port));
            match within(flow.run()).await {
                Ok(_) => assert_eq!(*lock(&seen), [0, 1, 2], "{name}"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Setup, "{name}: {error}"),
            }
        }
    }
    for places in [MOST, 3] {
        let mut flow = host_only();
        let (from, to) = (flow.add("from", numbers()), flow.add("to", keep(&shared())));
        let port: condition::PortId = from.output.into();
        flow.connect_with(from.output, to.input, Hub::bounded(MOST));
        let _ = from.when(room(port, places));
        within(flow.run()).await.unwrap();
    }
    for runs in [MOST, MOST / 2, 1 << 40] {
        let mut flow = host_only();
        let from = flow.add("from", numbers());
        let to = flow.add("to", concurrent(runs, Takes));
        flow.connect(from.output, to.input);
        let error = refused("concurrent", within(flow.run()).await);
        assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
    }
    let mut flow = host_only();
    let from = flow.add("from", numbers()).on_own_thread_pinned(MOST);
    let to = flow.add("to", keep(&shared()));
    flow.connect(from.output, to.input);
    assert_eq!(within(flow.run()).await.unwrap_err().kind(), ErrorKind::Setup);
}

#[derive(Clone)]
struct Takes;

impl Operator for Takes {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.input.take().map(drop)
    }
}

/// A condition that is asked by hand, as a combinator of the user's would.
#[test]
fn counts_go_to_the_end_of_their_range() {
    for runs in [i64::MAX, i64::MIN, 0, -1] {
        let counter = count(runs);
        counter.reset(i64::MAX);
        counter.reset(runs);
        assert_eq!(counter.left(), runs);
    }
}

#[tokio::test(start_paused = true)]
async fn durations_of_any_length_are_taken() {
    let longest = || {
        // The longest that the clock can go from now: a timer that rounds up would overflow.
        let now = std::time::Instant::now();
        let (mut fits, mut over) = (Duration::ZERO, Duration::MAX);
        while over - fits > Duration::from_nanos(1) {
            let middle = fits + (over - fits) / 2;
            if now.checked_add(middle).is_some() { fits = middle } else { over = middle }
        }
        fits
    };
    let far = Duration::from_secs(60 * 365 * 86_400);
    for period in [Duration::MAX, longest(), longest() - Duration::from_millis(1), far, Duration::from_nanos(1)] {
        for missed in [MissedTicks::CatchUp, MissedTicks::Spaced, MissedTicks::Skip] {
            let mut flow = host_only();
            let seen = shared::<u32>();
            let mut runs = 0..2_u32;
            let from = wakeline::operator::source(move || ready(Ok(runs.next())));
            let from = flow.add("from", from).when(every(period).missed(missed)).when(count(2));
            let to = flow.add("to", keep(&seen));
            flow.connect(from.output, to.input);
            let running = flow.spawn().unwrap();
            while lock(&seen).is_empty() {
                tokio::task::yield_now().await;
            }
            // Its state can be looked at while it waits.
            drop(format!("{:?}", running.status()));
            if period > Duration::from_secs(1) {
                running.abort();
                assert!(running.await.unwrap_err().is_cancelled());
            } else {
                running.await.unwrap();
            }
        }
    }
}

/// Reservations for operators' runs: more than there can ever be is said before the flow runs, and asking by hand takes none.
#[tokio::test]
async fn reservations_of_any_size_are_refused() {
    let device = emulated();
    let all = [
        Allocator::unbounded(&device),
        Allocator::unbounded(&device).maximum(u64::MAX),
        Allocator::blocks(&device, 1000, 3).unwrap(),
        Allocator::pinned(&device),
        Allocator::pinned(&device).maximum(u64::MAX),
        Allocator::pinned_blocks(&device, 1000, 3).unwrap(),
    ];
    for allocator in &all {
        for bytes in [u64::MAX, u64::MAX - 1, u64::MAX / 2 + 1, 1 << 50] {
            let mut flow = host_only();
            let (from, to) = (flow.add("from", SendEach::new([vec![1_u32]])), flow.add("to", Collect::<u32>(shared())));
            flow.connect_with(from.output, to.input, Hub::bounded(1).envelope_bytes(4));
            let _ = to.on(&device).when(memory(allocator, bytes));
            assert_eq!(within(flow.run()).await.unwrap_err().kind(), ErrorKind::Setup);
            let mut one = memory(allocator, bytes);
            let mut other = memory(allocator, u64::MAX);
            for _ in 0..4 {
                let _ = one.claim();
                let _ = other.claim();
            }
            one.give_back();
            other.give_back();
        }
    }
    drop(all);
    at_rest(&device).await;
}

on_both!(chunk_hubs_of_any_size_are_refused, async |device: Device| {
    let hub = || ChunkHub::<u64, ()>::builder("any");
    refused("elements", hub().elements(MOST).envelopes(&device, 1).build());
    refused("elements", hub().elements(MOST / 8).envelopes(&device, 1).build());
    refused("elements", hub().elements(MOST / 16).host_envelopes(1).build());
    refused("envelopes", hub().elements(1).envelopes(&device, MOST).build());
    refused("envelopes", hub().elements(1).host_envelopes(MOST).build());
    refused("envelopes", hub().elements(1 << 40).host_envelopes(1 << 20).build());
    refused("queue", hub().elements(1).queue(0).build());
    let hub = hub().elements(4).queue(MOST).host_envelopes(2).build().unwrap();
    refused("more", hub.add_envelopes(&device, MOST));
    refused("more", hub.add_envelopes(&Device::host(), MOST));
    assert_eq!(hub.envelopes(&Device::host()), 2);
    let mut produce = hub.produce(&Device::host()).unwrap();
    produce
        .with(async |blank| {
            refused("a chunk's length", blank.set_len(MOST));
            blank.fill_from(&[1, 2, 3]).await
        })
        .await
        .unwrap();
});

#[test]
fn envelopes_have_as_much_as_they_have() {
    let buffer = Buffer::<u64>::pinned(&Device::host(), 4).unwrap();
    let mut envelope = Envelope::from(buffer);
    for len in [MOST, MOST / 2 + 1, MOST / 8 + 1, 5] {
        refused("set_len", envelope.set_len(len));
    }
    envelope.set_len(0).unwrap();
    assert_eq!(envelope.as_slice().unwrap(), [0_u64; 0]);
}

/// A message may say of itself that it has any size.
#[tokio::test]
async fn messages_of_any_size_are_counted() {
    struct Huge;
    impl wakeline::Message for Huge {
        fn size_in_bytes(&self) -> usize {
            MOST
        }
    }
    /// One that has envelopes, of which there are none this time.
    #[derive(wakeline::Message)]
    struct Derived(#[envelope] Vec<Envelope<u8>>, #[envelope] Carries, #[envelope] Carries);
    struct Carries;
    impl wakeline::Message for Carries {
        const CARRIES_ENVELOPES: bool = true;

        fn size_in_bytes(&self) -> usize {
            MOST
        }
    }
    async fn three<M: wakeline::Message + Sync>(make: fn() -> M) {
        let mut left = 3;
        let mut flow = host_only();
        let from = wakeline::operator::source(move || {
            left -= 1;
            ready(Ok((left >= 0).then(make)))
        });
        let (from, to) = (flow.add("from", from), flow.add("to", wakeline::operator::sink(|_: M| ready(Ok(())))));
        flow.connect_with(from.output, to.input, Hub::bounded(1).envelopes(2));
        let report = within(flow.run()).await.unwrap();
        let to = report.operator("to").unwrap();
        assert_eq!((to.messages_in, to.bytes_in), (3, u64::MAX));
    }
    three(|| Huge).await;
    three(|| (Huge, Huge)).await;
    three(|| vec![Carries, Carries]).await;
    three(|| Derived(Vec::new(), Carries, Carries)).await;
}

#[tokio::test]
async fn sections_of_any_size_are_refused_or_work() {
    let device = emulated();
    for (rows, most) in [(MOST, 1), (MOST / 2, MOST), (MOST / 8 + 1, MOST), (1, MOST)] {
        let mut flow = Flow::new("any");
        let from = flow.add("from", SendEach::new([vec![1_u32; 4], vec![1; 4], vec![1; 4]]));
        let add = flow.add("add", Increment).on(&device);
        let to = flow.add("to", Collect(shared()));
        let hub = Hub::bounded(1).envelope_bytes(16);
        flow.connect_with(from.output, add.input, hub);
        flow.connect(add.output, to.input);
        flow.replay("all", &add).buckets([rows]).rows(add.input, rows).at_most(most);
        if let Err(error) = within(flow.run()).await {
            assert!([ErrorKind::Setup, ErrorKind::OutOfMemory, ErrorKind::Usage].contains(&error.kind()), "{error}");
        }
    }
}

#[test]
fn devices_of_any_number_are_not_there() {
    for n in [MOST, MOST / 2, u32::MAX as usize, i32::MAX as usize, i32::MAX as usize + 1] {
        assert!(Device::cuda(n).unwrap_err().is_no_device());
        assert!(format!("cuda:{n}").parse::<Device>().unwrap_err().is_no_device());
    }
    for name in ["", ":", "cuda:", "cuda:-1", "cuda:99999999999999999999999", "cuda:\0", "emulated\0", "\0"] {
        assert!(name.parse::<Device>().unwrap_err().is_no_device());
    }
}

// ---- a panic beside the operators

/// Panics when it is told of an event with this text.
struct PanicsAt(&'static str);

impl tracing::Subscriber for PanicsAt {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Finds(&'static str, bool);
        impl tracing::field::Visit for Finds {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.1 |= format!("{value:?}").contains(self.0);
            }
        }
        let mut finds = Finds(self.0, false);
        event.record(&mut finds);
        assert!(!finds.1, "the log is full");
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// The first failure is what the flow ends with, though its own task panics after that: it was `Cancelled: the runtime ended`.
#[tokio::test]
async fn a_panic_in_the_flows_own_task_hides_no_error() {
    let _told = tracing::subscriber::set_default(PanicsAt("flow failed"));
    let mut flow = host_only();
    flow.add("fails", task(|_: &mut (), _| Box::pin(async { Err("no more".into()) })));
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Operator && error.to_string().contains("no more"), "{error}");
}

/// A flow that fails logs its report, with all names.
#[tokio::test]
async fn a_flow_of_long_names_fails_with_its_own_error() {
    let _told = tracing::subscriber::set_default(PanicsAt("nothing is like this"));
    let mut flow = host_only();
    flow.add("x".repeat(1 << 17), task(|_: &mut (), _| Box::pin(async { Err("no more".into()) })));
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Operator && error.to_string().ends_with("no more"), "{:?}", error.kind());
}

/// What a panic carries may panic when it is dropped.
#[tokio::test]
async fn a_panics_payload_that_panics_is_forgotten() {
    struct Payload;
    impl Drop for Payload {
        fn drop(&mut self) {
            std::panic::panic_any(Payload);
        }
    }
    let mut flow = host_only();
    flow.add("bomb", task(|_: &mut (), _| Box::pin(async { std::panic::panic_any(Payload) })));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Panicked, "{error}");

    let device = emulated_with(Emulated::new().workers(1));
    let stream = Stream::new(&device).unwrap();
    for _ in 0..3 {
        stream.host_function(|| std::panic::panic_any(Payload)).unwrap();
    }
    // Its only worker goes on.
    within(stream.completed()).await.unwrap();
}

// ---- names

/// What no operating system, no driver and no drawing has for a name.
fn names() -> Vec<String> {
    ["", "\0", "a\0b", "\n\r\t\u{1b}[31m", "\"} evil [label=\"", "\\", "\u{85}\u{200f}é", "/../..", "%s%n"]
        .map(String::from)
        .into_iter()
        .chain(["x".repeat(1 << 20), "é".repeat(70_000), "\0".repeat(1000)])
        .collect()
}

#[tokio::test]
async fn any_name_does_for_a_device_an_operator_and_a_flow() {
    for name in names() {
        let device = emulated_with(Emulated::new().workers(1).name(name.clone()));
        assert_eq!(device.name(), name);
        for own_thread in [false, true] {
            let mut flow = Flow::new(name.clone());
            let seen = shared();
            let from = flow.add(format!("{name}1"), SendEach::new([vec![1_u32; 4]]));
            let add = flow.add(format!("{name}2"), Increment).on(&device);
            let to = flow.add(format!("{name}3"), Collect(seen.clone()));
            flow.connect_with(from.output, add.input, Hub::bounded(1).envelope_bytes(16));
            flow.connect(add.output, to.input);
            let _gate = flow.gate(name.clone());
            let _ = if own_thread { to.on_own_thread() } else { to };
            let report = within(flow.run()).await.unwrap();
            assert_eq!(*lock(&seen), [vec![2; 4]]);
            assert!(!report.to_string().is_empty());
        }
        // The lookout's thread is named after the device.
        let stream = Stream::named(&device, name.clone()).unwrap();
        let held = hold(&stream);
        let waits = stream.completed();
        let mut waits = std::pin::pin!(waits);
        assert!(futures::poll!(waits.as_mut()).is_pending());
        drop(held);
        within(waits).await.unwrap();
    }
}

on_both!(any_name_does_for_streams_pools_hubs_and_graphs, async |device: Device| {
    for name in names() {
        let stream = Stream::named(&device, name.clone()).unwrap();
        let pool = StreamPool::builder(&device).name(name.clone()).build().unwrap();
        drop(pool.take().unwrap());
        let mut data = Buffer::from_slice(&stream, &[1_u8; 8]).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| {
            let fork = capture.fork(&name)?;
            fork.fill(&mut data, 1)?;
            capture.stream().wait_for(&fork)
        })
        .unwrap();
        let dot = graph.to_dot();
        assert!(dot.chars().all(|char| char == '\n' || !char.is_control()), "{dot:?}");
        graph.instantiate().unwrap().launch(&stream).unwrap().completed().await.unwrap();
        let hub = ChunkHub::<u8, ()>::builder(name.clone()).elements(1).host_envelopes(1).build().unwrap();
        assert_eq!(hub.name(), name);
    }
});

/// An operator's name stands in the drawing of the graph that its section becomes.
#[tokio::test]
async fn a_drawing_has_no_control_characters() {
    let device = emulated();
    for name in names().into_iter().filter(|name| name.len() < 100) {
        let (tell, told) = mpsc::channel();
        let mut flow = host_only();
        let from = flow.add("from", SendEach::new([vec![1_u32; 4], vec![1; 4]]));
        let add = flow.add(name.clone(), Increment).on(&device);
        let to = flow.add("to", Collect(shared()));
        flow.connect_with(from.output, add.input, Hub::bounded(1).envelope_bytes(16));
        flow.connect(add.output, to.input);
        flow.replay(name, &add).inspect(move |graph| tell.send(graph.to_dot()).unwrap());
        within(flow.run()).await.unwrap();
        drop(flow);
        for dot in told {
            assert!(dot.contains("label=") && dot.chars().all(|char| char == '\n' || !char.is_control()), "{dot:?}");
            assert_eq!(dot.matches("evil [label").count(), dot.matches("evil [label=\\\"").count(), "{dot}");
        }
    }
}

/// A flow on one thread, and one in a simulation.
#[tokio::test(start_paused = true)]
async fn any_name_does_on_one_thread_and_in_a_simulation() {
    for name in names() {
        let local = async {
            let mut flow = LocalFlow::new(name.clone());
            flow.add(name.clone(), task(|_: &mut (), _| Box::pin(async { Ok(()) })));
            flow.run().await.unwrap();
        };
        tokio::task::LocalSet::new().run_until(within(local)).await;
        let simulation = Simulation::new(1);
        let device = Device::simulated(&simulation, Emulated::new().name(name.clone()));
        simulation.run(async { Stream::named(&device, name.clone()).unwrap().completed().await.unwrap() }).await;
        assert!(!simulation.log().is_empty());
    }
}

// ---- chains of any length

/// Runs a test's body in a process of its own: an overflow of a stack aborts the process.
fn on_a_small_stack(test: &str, body: impl FnOnce() + Send + 'static) {
    alone::in_a_process(test, || small_stack(256 << 10, body));
}

fn small_stack(bytes: usize, body: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(bytes).spawn(body).unwrap().join().unwrap();
}

/// Every hub is full, and every message waits for an envelope of the next hub: one that comes home at the end lets all move.
#[test]
fn envelopes_come_home_along_any_number_of_hubs() {
    const HUBS: u32 = 100;
    async fn run(simulation: &Simulation) {
        let device = Device::simulated(simulation, Emulated::new());
        let mut flow = Flow::new("long");
        let hub = Hub::bounded(1).envelopes(1).envelope_bytes(16);
        let mut last = flow.add("from", SendEach::new((0..4 * HUBS).map(|n| vec![n]))).output;
        for at in 0..HUBS {
            let next = flow.add(format!("pass {at}"), pass_on::<Envelope<u32>>());
            let next = if at % 2 == 0 { next.on(&device) } else { next };
            flow.connect_with(last, next.input, hub);
            last = next.output;
        }
        let mut out = flow.egress("out", last);
        let running = flow.spawn().unwrap();
        let first = out.recv().await.unwrap();
        let sent = || running.status().iter().find(|operator| &*operator.name == "from").unwrap().runs;
        // The clock is paused: it goes on when nothing else can.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = sent();
        assert!(before > u64::from(HUBS) && before < u64::from(4 * HUBS), "{before} messages");
        small_stack(64 << 10, move || drop(first));
        for n in 1..4 {
            let envelope = out.recv().await.unwrap();
            assert_eq!(envelope.read().await.unwrap(), [n]);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        // Four have come home, and each has let one more in at the other end.
        assert_eq!(sent(), before + 4);
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
    }
    alone::in_a_process("envelopes_come_home_along_any_number_of_hubs", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let simulation = Simulation::new(1);
        runtime.block_on(simulation.run(run(&simulation)));
    });
}

/// A retry that keeps its last failure, as the cause or within another error.
#[test]
fn chains_of_causes_may_be_of_any_length() {
    const FAILURES: usize = 20_000;
    on_a_small_stack("chains_of_causes_may_be_of_any_length", || {
        fn retry(last: Error) -> Error {
            Error::new(ErrorKind::Operator, "a retry failed").because(last)
        }
        let wrapped = |last: Error| retry(std::io::Error::other(last).into());
        let again = |last: Error| retry(last.again());
        let cases: [fn(Error) -> Error; 3] = [retry, wrapped, again];
        for next in cases {
            let first = Error::from(std::io::Error::other("the first failure"));
            let error = (0..FAILURES).fold(first, |last, _| next(last));
            for text in [error.to_string(), format!("{error:?}")] {
                assert!(text.starts_with("a retry failed: a retry failed"), "{text}");
                assert!(text.ends_with("a retry failed: further causes are not displayed"), "{text}");
                assert!(text.len() < 64 * 64, "{text}");
            }
            let sources = std::iter::successors(std::error::Error::source(&error), |error| error.source());
            let last = sources.last().unwrap();
            assert_eq!(last.to_string(), "the first failure");
            drop(error);
        }
        let few = (0..60).fold(Error::from("the first failure"), |last, _| retry(last));
        assert_eq!(few.to_string(), "a retry failed: ".repeat(60) + "the first failure");
    });
}

/// An operator of a cycle that keeps what came with the message before.
#[test]
fn metadata_may_lie_in_metadata_to_any_depth() {
    on_a_small_stack("metadata_may_lie_in_metadata_to_any_depth", || {
        let drops = Arc::new(());
        let mut metadata = Metadata::default();
        for _ in 0..20_000 {
            let before = std::mem::take(&mut metadata);
            metadata.insert("before", before);
            metadata.insert("drops", drops.clone());
        }
        drop(metadata);
        assert_eq!(Arc::strong_count(&drops), 1);
    });
}

struct Once;

impl Operator for Once {
    type Ports = ();

    async fn compute(&mut self, _: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

/// Any number of conditions, in a loop, and those that are nested too deeply.
#[test]
fn conditions_within_conditions_are_refused_beyond_a_depth() {
    use condition::{Gate, When, all_of, any_of};
    let outcome = |when: When| {
        let mut flow = host_only();
        let _ = flow.add("once", Once).when(when);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(flow.run())
    };
    on_a_small_stack("conditions_within_conditions_are_refused_beyond_a_depth", move || {
        let open = Gate::open;
        let nested = |levels: usize| {
            (0..levels).fold(any_of(open(), open()), |when, level| match level % 4 {
                0 => all_of(when, open()),
                1 => any_of(open(), when),
                2 => all_of(open(), when),
                _ => any_of(when, open()),
            })
        };
        drop(nested(50_000));
        outcome(nested(63)).unwrap();
        // One more than is taken; one more than that; so many that those before them have been refused, too.
        for levels in [64, 65, 200, 50_000] {
            let error = outcome(nested(levels)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
            assert!(error.to_string().contains("more than 64 levels deep"), "{error}");
        }
        // One level, however it is written.
        let both: [fn(When, When) -> When; 2] = [any_of, all_of];
        for both in both {
            let one = || all_of(open(), open());
            outcome((0..2000).fold(one(), |when, _| both(when, one()))).unwrap();
            outcome((0..2000).fold(one(), |when, _| both(one(), when))).unwrap();
        }
    });
}
