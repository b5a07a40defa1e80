//! Sizes, counts and durations at the ends of their ranges.

use super::{alignment::aligned::Wide, *};

on_both!(buffers_of_any_size_are_refused_with_the_numbers, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let half = MOST / 2 + 1;
    // Up to this size the driver is asked.
    refused("Buffer::new", Buffer::<u8>::new(&device, (1 << 48) - 1));
    out_of_memory("Buffer::pinned", Buffer::<u8>::pinned(&device, (1 << 48) - 1));
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
            // The allocator's counts are unchanged, and it works.
            assert_eq!(allocator.stats().in_use, 0);
        }
        let captured = Graph::capture(&device, |capture| capture.stream().alloc::<u32>(len).map(drop));
        out_of_memory("in a capture", captured);
        let mut builder = Graph::builder(&device).unwrap();
        out_of_memory("as a node", builder.alloc::<u32>(&[], len));
    }
    for _ in 0..100 {
        // None of these calls consumed memory or addresses.
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
    // Refused requests are not counted.
    at_rest(&device).await;
    assert_eq!(Allocator::blocks(&device, 0, 1).unwrap_err().kind(), ErrorKind::Usage);
    assert_eq!(Allocator::blocks(&device, 1, 0).unwrap_err().kind(), ErrorKind::Usage);
});

/// An emulated device reports as much memory as it was configured with; the machine has less.
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
fn an_emulated_device_starts_as_many_workers_as_possible() {
    let device = Device::emulated(Emulated::new().workers(MOST));
    let stream = Stream::new(&device).unwrap();
    let (sender, receiver) = mpsc::channel();
    stream.host_function(move || sender.send(()).unwrap()).unwrap();
    receiver.recv().unwrap();
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
    let flow = |hub: HubOptions, on: &Device| {
        let mut flow = Flow::new("any");
        let from = flow.add("from", SendEach::new([vec![1_u32; 4]]));
        let add = flow.add("add", Increment).on(on);
        let to = flow.add("to", Collect(shared()));
        flow.connect_with(from.output, add.input, hub);
        flow.connect(add.output, to.input);
        flow
    };
    let small = HubOptions::bounded(1).envelope_bytes(16);
    for hub in [
        small.envelope_bytes(MOST),
        small.envelope_bytes(MOST / 2 + 1),
        small.envelope_bytes(MOST / 2),
        small.envelopes(MOST),
        small.envelopes(MOST / 2 + 1),
        small.envelopes(1 << 40),
        small.envelopes(MOST).envelope_bytes(MOST),
        small.envelopes(2).envelope_bytes(1 << 47),
        HubOptions::drop_oldest(MOST).envelope_bytes(16),
        HubOptions::drop_newest(MOST).envelope_bytes(16),
        HubOptions::drop_oldest(MOST - 1).envelope_bytes(MOST),
    ] {
        let error = refused(&format!("{hub:?}"), within(flow(hub, &device).run()).await);
        assert!(error.to_string().contains("from"), "{hub:?}: {error}");
    }
    within(flow(HubOptions::bounded(MOST).envelopes(2).envelope_bytes(16), &device).run()).await.unwrap();
});

#[tokio::test]
async fn queues_conditions_and_limits_of_any_size_are_refused_or_work() {
    let numbers = || {
        let mut numbers = 0..3_u32;
        wakeline::operator::source(move || ready(Ok(numbers.next())))
    };
    for hub in [
        HubOptions::bounded(MOST),
        HubOptions::drop_newest(MOST),
        HubOptions::drop_oldest(MOST),
        HubOptions::bounded(MOST - 1),
    ] {
        let mut flow = host_only();
        let seen = shared();
        let (from, to) = (flow.add("from", numbers()), flow.add("to", keep(&seen)));
        flow.connect_with(from.output, to.input, hub);
        within(flow.run()).await.unwrap();
        assert_eq!(*lock(&seen), [0, 1, 2]);
    }
    // The requested number fits and never arrives: the messages that are there at the end are enough.
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
        for hub in [HubOptions::bounded(MOST), HubOptions::bounded(2)] {
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
        flow.connect_with(from.output, to.input, HubOptions::bounded(MOST));
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

/// A condition that is polled by hand, as a user's combinator would.
#[test]
fn counts_use_their_full_range() {
    for runs in [i64::MAX, i64::MIN, 0, -1] {
        let counter = count(runs);
        counter.reset(i64::MAX);
        counter.reset(runs);
        assert_eq!(counter.left(), runs);
    }
}

#[tokio::test(start_paused = true)]
async fn durations_of_any_length_are_accepted() {
    let longest = || {
        // The longest duration from now that the clock can represent: a timer that rounds up would overflow.
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
            // The status can be read while it waits.
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

/// Reservations for operators' runs: more than can ever be available is an error before the flow runs, and polling by
/// hand reserves nothing.
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
            flow.connect_with(from.output, to.input, HubOptions::bounded(1).envelope_bytes(4));
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
fn envelope_lengths_beyond_the_capacity_are_refused() {
    let buffer = Buffer::<u64>::pinned(&Device::host(), 4).unwrap();
    let mut envelope = Envelope::from(buffer);
    for len in [MOST, MOST / 2 + 1, MOST / 8 + 1, 5] {
        refused("set_len", envelope.set_len(len));
    }
    envelope.set_len(0).unwrap();
    assert_eq!(envelope.as_slice().unwrap(), [0_u64; 0]);
}

/// A message may report any size.
#[tokio::test]
async fn messages_of_any_size_are_counted() {
    struct Huge;
    impl wakeline::Message for Huge {
        fn size_in_bytes(&self) -> usize {
            MOST
        }
    }
    /// A message type with envelopes, used here without any.
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
        flow.connect_with(from.output, to.input, HubOptions::bounded(1).envelopes(2));
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
        let hub = HubOptions::bounded(1).envelope_bytes(16);
        flow.connect_with(from.output, add.input, hub);
        flow.connect(add.output, to.input);
        flow.replay("all", &add).buckets([rows]).rows(add.input, rows).at_most(most);
        if let Err(error) = within(flow.run()).await {
            assert!([ErrorKind::Setup, ErrorKind::OutOfMemory, ErrorKind::Usage].contains(&error.kind()), "{error}");
        }
    }
}

#[test]
fn devices_with_absurd_numbers_do_not_exist() {
    for n in [MOST, MOST / 2, u32::MAX as usize, i32::MAX as usize, i32::MAX as usize + 1] {
        assert!(Device::cuda(n).unwrap_err().is_no_device());
        assert!(format!("cuda:{n}").parse::<Device>().unwrap_err().is_no_device());
    }
    for name in ["", ":", "cuda:", "cuda:-1", "cuda:99999999999999999999999", "cuda:\0", "emulated\0", "\0"] {
        assert!(name.parse::<Device>().unwrap_err().is_no_device());
    }
}
