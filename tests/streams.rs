//! Scenarios S and M12: streams, the order that tracking keeps, the race checker, and pools of streams.
//!
//! The three examples of MindSpore's page on streams, in its order: a missing wait, a wait for the wrong event, and
//! memory that is freed while another stream reads it.

use std::{
    sync::mpsc,
    task::{Context, Waker},
};

use common::*;
use futures::{FutureExt, executor::block_on};
use wakeline::{
    CompletionMode, Stream,
    device::{Emulated, Faults},
    memory::Allocator,
    prelude::*,
};

/// Rows and columns of the matrix.
const N: usize = 20;

fn matrix() -> Vec<u32> {
    (0..(N * N) as u32).map(|n| n % 7).collect()
}

/// The sum of the elements of the matrix's square.
fn sum_of_square() -> u32 {
    let a = matrix();
    let cells = (0..N * N).map(|at| (0..N).map(|k| a[at / N * N + k] * a[k * N + at % N]).sum::<u32>());
    cells.sum()
}

/// The fixture of the examples: two streams, A on the device, memory for B and C.
struct Stage {
    main: Stream,
    side: Stream,
    a: Buffer<u32>,
    b: Buffer<u32>,
    c: Buffer<u32>,
}

impl Stage {
    async fn new(device: &Device) -> Self {
        let main = Stream::named(device, "main").unwrap();
        let side = Stream::named(device, "side").unwrap();
        let a = Buffer::from_slice(&main, &matrix()).unwrap();
        let (b, mut c) = (Buffer::new(device, N * N).unwrap(), Buffer::new(device, 1).unwrap());
        side.fill(&mut c, 0).unwrap();
        // The setup is done before the test begins.
        main.completed().await.unwrap();
        side.completed().await.unwrap();
        Self { main, side, a, b, c }
    }
}

/// Checks that a race error names both accesses, by kernel and stream, and the missing wait.
fn assert_race(error: &Error, second: (&str, &str), first: (&str, &str)) {
    assert_eq!(error.kind(), ErrorKind::Race, "{error}");
    let text = error.to_string();
    let at = |(what, stream): (&str, &str)| {
        let access = format!("{what} on stream `{stream}`");
        text.find(&access).unwrap_or_else(|| panic!("{access} is not in: {text}"))
    };
    assert!(at(second) < at(first), "the later access is named first: {text}");
    let missing = format!("make `{}` wait for `{}`", second.1, first.1);
    assert!(text.contains(&missing), "{missing} is not in: {text}");
}

// B = matmul(A, A); on another stream, without a wait: C = sum(B).
on_both!(s7_use_on_another_stream_without_a_wait, async |device: Device| {
    let mut stage = Stage::new(&device).await;
    let held = hold(&stage.main);
    square::launch(&stage.main, &stage.a, &mut stage.b, N as u32).unwrap();
    sum::launch(&stage.side, &stage.b, &mut stage.c).unwrap();
    // Without an order, the side stream would have run by now.
    drop(held);
    assert_eq!(stage.c.to_vec(&stage.side).await.unwrap(), [sum_of_square()]);
});

on_both!(m12_the_checker_finds_the_use_without_a_wait, async |device: Device| {
    let mut stage = Stage::new(&device).await;
    device.switch_tracking_off();
    square::launch(&stage.main, &stage.a, &mut stage.b, N as u32).unwrap();
    let error = sum::launch(&stage.side, &stage.b, &mut stage.c).unwrap_err();
    assert_race(&error, ("kernel `sum`", "side"), ("kernel `square`", "main"));
    // The launch was refused: C is unchanged, and the device still works.
    assert_eq!(stage.c.to_vec(&stage.side).await.unwrap(), [0]);
    assert!(device.lost().is_none());
    // With the wait that the error suggests there is no race.
    stage.side.wait_for(&stage.main).unwrap();
    sum::launch(&stage.side, &stage.b, &mut stage.c).unwrap();
    assert_eq!(stage.c.to_vec(&stage.side).await.unwrap(), [sum_of_square()]);
});

// C = sum(B) on the side stream; then D = C + 1 on the main stream, which waits for B's event instead of C's.
on_both!(s7_a_wait_for_the_wrong_event, async |device: Device| {
    let mut stage = Stage::new(&device).await;
    let mut d = Buffer::new(&device, 1).unwrap();
    square::launch(&stage.main, &stage.a, &mut stage.b, N as u32).unwrap();
    let held = hold(&stage.side);
    sum::launch(&stage.side, &stage.b, &mut stage.c).unwrap();
    add_one::launch(&stage.main, &stage.c, &mut d).unwrap();
    drop(held);
    assert_eq!(d.to_vec(&stage.main).await.unwrap(), [sum_of_square() + 1]);
});

on_both!(m12_the_checker_finds_the_wrong_event, async |device: Device| {
    let mut stage = Stage::new(&device).await;
    let mut d = Buffer::from_slice(&stage.main, &[77_u32]).unwrap();
    device.switch_tracking_off();
    square::launch(&stage.main, &stage.a, &mut stage.b, N as u32).unwrap();
    stage.side.wait_for(&stage.main).unwrap();
    sum::launch(&stage.side, &stage.b, &mut stage.c).unwrap();
    // `ev1.wait()`: a wait for itself.
    stage.main.wait_for(&stage.main).unwrap();
    let error = add_one::launch(&stage.main, &stage.c, &mut d).unwrap_err();
    assert_race(&error, ("kernel `add_one`", "main"), ("kernel `sum`", "side"));
    assert_eq!(d.to_vec(&stage.main).await.unwrap(), [77]);
    // `ev2.wait()`.
    stage.main.wait_for(&stage.side).unwrap();
    add_one::launch(&stage.main, &stage.c, &mut d).unwrap();
    assert_eq!(d.to_vec(&stage.main).await.unwrap(), [sum_of_square() + 1]);
});

// Memory is freed on one stream while a slow one still reads it; the next allocation has the same size.
on_both!(s7_memory_is_freed_while_another_stream_reads_it, async |device: Device| {
    const LEN: usize = 4096;
    let main = Stream::named(&device, "main").unwrap();
    let side = Stream::named(&device, "side").unwrap();
    let input = Buffer::from_slice(&main, &[1_u32; LEN]).unwrap();
    let mess_input = Buffer::from_slice(&main, &[1000_u32; LEN]).unwrap();
    let mut add_s0 = Buffer::<u32>::new(&device, LEN).unwrap();
    let mut add_s1 = Buffer::<u32>::new(&device, LEN).unwrap();
    add_one::launch(&main, &input, &mut add_s0).unwrap();
    // Stands for the long convolution of the original.
    let held = hold(&side);
    add_one::launch(&side, &add_s0, &mut add_s1).unwrap();
    let before = device.memory_in_use();
    drop(add_s0);
    assert_eq!(device.memory_in_use(), before, "the side stream still reads it");
    // The main stream overwrites memory of the same size before the side stream has begun.
    let mut mess_output = Buffer::<u32>::new(&device, LEN).unwrap();
    add_one::launch(&main, &mess_input, &mut mess_output).unwrap();
    main.completed().await.unwrap();
    drop(held);
    let mut add_1_s0 = Buffer::<u32>::new(&device, LEN).unwrap();
    add_one::launch(&main, &add_s1, &mut add_1_s0).unwrap();
    assert_eq!(add_1_s0.to_vec(&main).await.unwrap(), [4; LEN]);
    assert_eq!(mess_output.to_vec(&main).await.unwrap(), [1001; LEN]);
    drop((input, mess_input, mess_output, add_s1, add_1_s0));
    freed(&device).await;
});

/// With no other memory left: freed memory is not allocated again until its reader has completed.
#[tokio::test]
async fn s7_memory_is_not_reused_while_a_stream_reads_it() {
    let device = emulated_with(Emulated::new().memory(2048).workers(2));
    let (main, side) = (Stream::named(&device, "main").unwrap(), Stream::named(&device, "side").unwrap());
    let first = Buffer::from_slice(&main, &[1_u32; 256]).unwrap();
    let mut second = Buffer::<u32>::new(&device, 256).unwrap();
    let held = hold(&side);
    add_one::launch(&side, &first, &mut second).unwrap();
    drop(first);
    let error = Buffer::<u32>::new(&device, 256).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    drop(held);
    assert_eq!(within(second.to_vec(&side)).await.unwrap(), [2; 256]);
    Buffer::<u32>::new(&device, 256).expect("the memory is free now");
}

on_both!(s7_a_write_waits_for_all_readers, async |device: Device| {
    for last in [0, 1] {
        let streams = ["one", "two", "three"].map(|name| Stream::named(&device, name).unwrap());
        let mut data = Buffer::from_slice(&streams[2], &[1_u32; 64]).unwrap();
        // One hold at a time: a GPU's driver may have one thread for all host functions.
        let held = hold(&streams[last]);
        let mut copies = [0, 1].map(|_| Buffer::<u32>::new(&device, 64).unwrap());
        add_one::launch(&streams[0], &data, &mut copies[0]).unwrap();
        add_one::launch(&streams[1], &data, &mut copies[1]).unwrap();
        streams[2].fill(&mut data, 9).unwrap();
        let [one, two] = &copies;
        let (early, late) = if last == 0 { (two, one) } else { (one, two) };
        // One reader completes before the other has begun.
        assert_eq!(early.to_vec(&streams[1 - last]).await.unwrap(), [2; 64]);
        assert!(!streams[2].ticket().has_passed(), "the write waits for the other reader as well");
        drop(held);
        assert_eq!(late.to_vec(&streams[last]).await.unwrap(), [2; 64]);
        assert_eq!(data.to_vec(&streams[2]).await.unwrap(), [9; 64]);
    }
});

on_both!(m12_the_checker_finds_each_of_two_readers, async |device: Device| {
    let streams = ["one", "two", "three"].map(|name| Stream::named(&device, name).unwrap());
    let mut data = Buffer::from_slice(&streams[2], &[1_u32; 64]).unwrap();
    let mut copies = [0, 1].map(|_| Buffer::<u32>::new(&device, 64).unwrap());
    streams[2].completed().await.unwrap();
    device.switch_tracking_off();
    add_one::launch(&streams[0], &data, &mut copies[0]).unwrap();
    add_one::launch(&streams[1], &data, &mut copies[1]).unwrap();
    streams[2].wait_for(&streams[0]).unwrap();
    let error = increment::launch(&streams[2], &mut data).unwrap_err();
    assert_race(&error, ("kernel `increment`", "three"), ("kernel `add_one`", "two"));
    streams[2].wait_for(&streams[1]).unwrap();
    increment::launch(&streams[2], &mut data).unwrap();
    assert_eq!(data.to_vec(&streams[2]).await.unwrap(), [2; 64]);
});

on_both!(m12_a_race_in_a_flow_names_the_operator, async |device: Device| {
    let produce = || SendEach::new((0..8).map(|n| vec![n; 64]));
    for tracked in [true, false] {
        // A new device in each round: tracking cannot be switched on again.
        let device = if device.is_cuda() { common::cuda() } else { common::emulated() };
        if !tracked {
            device.switch_tracking_off();
        }
        let seen = shared();
        let mut flow = Flow::new("m12");
        let produce = flow.add("produce", produce());
        let add = flow.add("add", Increment).on(&device);
        let again = flow.add("again", Increment).on(&device);
        let consume = flow.add("consume", Collect(seen.clone()));
        flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(256));
        flow.connect(add.output, again.input);
        flow.connect(again.output, consume.input);
        match flow.run().await {
            Ok(_) => {
                assert!(tracked, "no order between the operators, and no error");
                assert_eq!(*lock(&seen), (0..8).map(|n| vec![n + 2; 64]).collect::<Vec<_>>());
            }
            Err(error) => {
                assert!(!tracked, "{error}");
                assert!(error.is_race(), "{error}");
                let text = error.to_string();
                assert!(text.starts_with("operator `"), "{text}");
                assert!(text.contains("nothing orders them: make"), "{text}");
            }
        }
    }
});

#[tokio::test]
async fn s6_a_missing_device_is_an_error() {
    let error = Device::cuda(99).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoDevice, "{error}");
    assert_eq!("cuda:99".parse::<Device>().unwrap_err().kind(), ErrorKind::NoDevice);
    if Device::cuda_count() == 0 {
        let error = Device::cuda(0).unwrap_err();
        assert!(error.is_no_device(), "{error}");
        assert!(!error.to_string().contains('\n'), "more than one line: {error}");
        if std::env::var_os("WAKELINE_DEVICE").is_none() {
            assert!(Device::first().unwrap().is_emulated());
        }
    }
    let error = Stream::new(&Device::host()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
}

#[tokio::test]
async fn s6_an_operator_on_the_host_has_no_stream() {
    let mut flow = Flow::new("s6");
    let produce = flow.add("produce", SendEach::new([vec![1_u32]]));
    let add = flow.add("add", Increment);
    let consume = flow.add("consume", Collect(shared()));
    flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(4));
    flow.connect(add.output, consume.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().starts_with("operator `add`: "), "{error}");
    assert!(error.to_string().contains(".on(&device)"), "no remedy in: {error}");
}

#[tokio::test]
async fn s6_two_emulated_devices_in_one_flow() {
    let (one, two) = (emulated(), emulated_with(Emulated::new().workers(1).faults(Faults::new())));
    let seen = shared();
    let mut flow = Flow::new("two");
    let produce = flow.add("produce", SendEach::new((0..50).map(|n| vec![n; 32])));
    let add = flow.add("add", Increment).on(&one);
    let again = flow.add("again", Increment).on(&two);
    let back = flow.add("back", Increment).on(&one);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(128));
    flow.connect(add.output, again.input);
    flow.connect(again.output, back.input);
    flow.connect(back.output, consume.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (0..50).map(|n| vec![n + 3; 32]).collect::<Vec<_>>());
    freed(&one).await;
    freed(&two).await;
}

#[tokio::test]
async fn s4_a_pool_and_no_own_stream_is_a_setup_error() {
    let device = emulated();
    let pool = StreamPool::builder(&device).name("narrow").build().unwrap();
    let mut flow = Flow::new("s4");
    let once = flow.add("once", source(async || Ok(None::<u32>)));
    let one = flow.add("one", sink(async |_: u32| Ok(()))).on(&device).streams(&pool).without_own_stream();
    let two = flow.add("two", sink(async |_: u32| Ok(()))).on(&device).without_own_stream().streams(&pool);
    flow.connect(once.output, [one.input, two.input]);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let text = error.to_string();
    for name in ["one", "two"] {
        let part = format!("operator `{name}` has the stream pool `narrow`, but is set to have no stream of its own");
        assert!(text.contains(&part), "{part}\n{text}");
    }
}

/// The work of the operator's messages is on its own device.
#[tokio::test]
async fn s5_an_output_refuses_a_stream_of_another_device() {
    let (device, other) = (emulated(), emulated());
    let far = Stream::named(&other, "far").unwrap();
    let mut flow = Flow::new("s5");
    let send = flow.add(
        "send",
        task(move |ports: &mut SourcePorts<u32>, cx: &mut Cx| {
            let far = far.clone();
            Box::pin(async move {
                let near = cx.stream_named("near")?;
                ports.output.set_stream(&near)?;
                ports.output.set_stream(None)?;
                ports.output.set_stream(&far)
            })
        }),
    );
    let send = send.on(&device);
    let take = flow.add("take", sink(async |_: u32| Ok(())));
    flow.connect(send.output, take.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    let text = error.to_string();
    let part = format!("`send` is on {device}, but its messages are to carry a stream on {other}");
    assert!(text.starts_with("operator `send`: ") && text.contains(&part), "{text}");
}

// S1: pools of streams.

on_both!(s1_a_returned_stream_is_reused, async |device: Device| {
    let pool = StreamPool::builder(&device).name("few").reserved(1).maximum(2).build().unwrap();
    assert_eq!((pool.made(), pool.in_use(), pool.maximum()), (1, 0, Some(2)), "reserved streams are created at once");
    let one = pool.take().unwrap();
    assert_eq!((pool.made(), pool.in_use()), (1, 1));
    let two = pool.take().unwrap();
    assert!(*one != *two);
    assert_eq!(one.device(), &device);
    let error = pool.clone().take().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("pool `few` is used up: its maximum of 2 streams is in use"), "{error}");
    // Returned with work in progress: the next owner's work comes after it.
    let mut buffer = Buffer::from_slice(&two, &[1_u32; 8]).unwrap();
    let held = hold(&two);
    increment::launch(&two, &mut buffer).unwrap();
    drop(two);
    let again = pool.take().unwrap();
    assert_eq!((pool.made(), pool.in_use()), (2, 2));
    increment::launch(&again, &mut buffer).unwrap();
    assert!(!again.ticket().has_passed());
    drop(held);
    assert_eq!(buffer.to_vec(&again).await.unwrap(), [3; 8]);
    drop((one, again));
    assert_eq!((pool.made(), pool.in_use()), (2, 0));
});

on_both!(s1_a_device_has_one_default_pool, async |device: Device| {
    let pool = StreamPool::default_of(&device).unwrap();
    assert_eq!((pool.maximum(), pool.priority()), (None, 0));
    let many: Vec<_> = (0..20).map(|_| pool.take().unwrap()).collect();
    drop(many);
    let same = StreamPool::default_of(&device).unwrap();
    assert_eq!((same.made(), same.in_use()), (20, 0), "one default pool for each device");
});

#[test]
fn s1_an_impossible_pool_is_a_usage_error() {
    let device = emulated();
    let error_of = |pool: wakeline::stream::StreamPoolBuilder| {
        let error = pool.name("bad").build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("pool `bad`"), "{error}");
        error.to_string()
    };
    assert!(error_of(StreamPool::builder(&device).maximum(0)).contains("its maximum is 0"));
    assert!(
        error_of(StreamPool::builder(&device).maximum(1).reserved(2))
            .contains("2 streams are reserved, and its maximum is 1")
    );
    assert!(error_of(StreamPool::builder(&Device::host())).contains("the host has no streams"));
}

on_both!(s1_priorities_are_clamped_to_the_devices_range, async |device: Device| {
    let range = device.stream_priorities();
    assert!(range.contains(&0), "{range:?}");
    for (requested, actual) in [(0, 0), (i32::MIN, *range.start()), (i32::MAX, *range.end())] {
        let pool = StreamPool::builder(&device).priority(requested).build().unwrap();
        assert_eq!((pool.priority(), pool.take().unwrap().priority()), (actual, actual));
    }
    assert_eq!(Stream::new(&device).unwrap().priority(), 0);
});

/// The only worker is busy: of the queued work, that of the urgent stream runs first, with its completion.
#[tokio::test]
async fn s1_a_stream_of_higher_priority_runs_first() {
    let device = emulated_with(Emulated::new().workers(1));
    let pool = |priority| StreamPool::builder(&device).priority(priority).build().unwrap();
    let (calm, urgent) = (pool(0).take().unwrap(), pool(-3).take().unwrap());
    let busy = Stream::new(&device).unwrap();
    let order = shared();
    for _ in 0..20 {
        let held = hold(&busy);
        for (stream, name) in [(&calm, "calm"), (&urgent, "urgent")] {
            let order = order.clone();
            stream.host_function(move || lock(&order).push(name)).unwrap();
        }
        drop(held);
        within(calm.completed()).await.unwrap();
        within(urgent.completed()).await.unwrap();
    }
    assert_eq!(*lock(&order), ["urgent", "calm"].repeat(20));
}

on_both!(s1_operators_share_a_pool, async |device: Device| {
    let pool = StreamPool::builder(&device).maximum(3).build().unwrap();
    let seen = shared();
    let mut flow = Flow::new("s1");
    let produce = flow.add("produce", SendEach::new((0..20).map(|n| vec![n; 64])));
    let mut from = produce.output;
    for name in ["one", "two", "three"] {
        let add = flow.add(name, Increment).on(&device).streams(&pool);
        flow.connect_with(from, add.input, HubOptions::default().envelope_bytes(256));
        from = add.output;
    }
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect(from, consume.input);
    for _ in 0..3 {
        flow.run().await.unwrap();
        assert_eq!((pool.made(), pool.in_use()), (3, 0), "returned when the flow ends, and reused");
    }
    assert_eq!(*lock(&seen), (0..20).map(|n| vec![n + 3; 64]).collect::<Vec<_>>());
    assert_eq!(StreamPool::default_of(&device).unwrap().made(), 0, "no stream comes from the default pool");
});

#[tokio::test]
async fn s1_a_pool_with_fewer_streams_than_operators_is_a_warning_at_the_start() {
    let device = emulated();
    let warnings = Warnings::default();
    let _subscriber = tracing::subscriber::set_default(warnings.clone());
    for (maximum, warned) in [(1, true), (2, false)] {
        let pool = StreamPool::builder(&device).name("narrow").maximum(maximum).build().unwrap();
        let mut flow = Flow::new("s1");
        let produce = flow.add("produce", SendEach::new([vec![1_u32; 4]]));
        let one = flow.add("one", Increment).on(&device).streams(&pool);
        let two = flow.add("two", Increment).on(&device).streams(&pool);
        let consume = flow.add("consume", Collect(shared()));
        flow.connect_with(produce.output, one.input, HubOptions::default().envelope_bytes(16));
        flow.connect(one.output, two.input);
        flow.connect(two.output, consume.input);
        let running = flow.spawn().unwrap();
        let messages = warnings.messages();
        assert_eq!(messages.len(), usize::from(warned), "before the first run: {messages:?}");
        if warned {
            for part in ["narrow", "maximum=1", "one, two", "fewer streams than operators that share it"] {
                assert!(messages[0].contains(part), "{part} is not in: {}", messages[0]);
            }
        }
        within(running).await.unwrap();
    }
}

#[tokio::test]
async fn s1_a_pool_of_another_device_is_a_setup_error() {
    let (device, other) = (emulated(), emulated());
    let pool = StreamPool::builder(&other).name("far").build().unwrap();
    let mut flow = Flow::new("s1");
    let one = flow.add("one", sink(async |_: u32| Ok(()))).on(&device).streams(&pool);
    let _two = flow.add("two", sink(async |_: u32| Ok(()))).streams(&pool);
    let once = flow.add("once", source(async || Ok(None::<u32>)));
    flow.connect(once.output, one.input);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let text = error.to_string();
    let far = format!("but its stream pool `far` is on {other}");
    for part in [
        format!("operator `one` is on {device}, {far}"),
        format!("operator `two` is on the host, {far}"),
        "input `two.input` is not connected".into(),
    ] {
        assert!(text.contains(&part), "{part} is not in: {text}");
    }
}

#[tokio::test]
async fn s1_taking_a_stream_of_a_lost_device_is_an_error() {
    let device = emulated_with(Emulated::new().faults(Faults::new().trap_kernel("increment", 1)));
    let pool = StreamPool::builder(&device).reserved(1).maximum(1).build().unwrap();
    let stream = Stream::new(&device).unwrap();
    let mut buffer = Buffer::from_slice(&stream, &[1_u32; 4]).unwrap();
    let (sender, dropped) = tokio::sync::oneshot::channel();
    increment::launch(&stream, &mut buffer).unwrap();
    // The loss is not known yet. The host function behind the fault is dropped, which shows that the fault has happened.
    let sender = OnlyDropped(Some(sender));
    let _ = stream.host_function(move || drop(sender));
    within(dropped).await.unwrap_err();
    let taken = within(tokio::task::spawn_blocking(move || pool.take().map(drop).map(|()| pool.in_use()))).await;
    assert!(taken.unwrap().is_err_and(|error| error.is_device_lost()));
}

/// Closes the channel when it is dropped.
struct OnlyDropped(#[allow(dead_code, reason = "only dropped")] Option<tokio::sync::oneshot::Sender<()>>);

// With tracking off, the checker does not see the streams of an unchecked handle of the same device: they stay ordered
// with those of the checked handle.
#[tokio::test]
async fn m12_without_tracking_streams_of_an_unchecked_handle_are_ordered() {
    for writes_unchecked in [false, true] {
        let plain = Device::emulated(Emulated::new().workers(4));
        let checked = plain.clone().race_checked();
        if checked == plain {
            // `WAKELINE_RACE_CHECK` is set: every device is checked.
            return;
        }
        checked.switch_tracking_off();
        let (on_plain, on_checked) = (Stream::new(&plain).unwrap(), Stream::new(&checked).unwrap());
        let (writer, reader) = if writes_unchecked { (&on_plain, &on_checked) } else { (&on_checked, &on_plain) };
        let mut data = Buffer::from_slice(&on_checked, &[1_u32; 4]).unwrap();
        let mut read = Buffer::<u32>::new(&checked, 4).unwrap();
        // The setup is complete for all streams.
        within(on_checked.completed()).await.unwrap();
        let held = hold(writer);
        writer.fill(&mut data, 2).unwrap();
        reader.copy(&data, &mut read).unwrap();
        // Without an order, the reader would complete here.
        let early = reader.completed();
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        drop(held);
        within(early).await.unwrap();
        assert_eq!(within(read.to_vec(reader)).await.unwrap(), [2; 4], "the writer is unchecked: {writes_unchecked}");

        // The same for reused memory.
        let memory = Allocator::blocks(&checked, 64, 1).unwrap();
        let mut first = memory.alloc::<u32>(&on_checked, 4).unwrap();
        let held = hold(&on_plain);
        on_plain.fill(&mut first, 3).unwrap();
        drop(first);
        let mut second = memory.alloc::<u32>(&on_checked, 4).unwrap();
        on_checked.fill(&mut second, 4).unwrap();
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        drop(held);
        within(on_plain.completed()).await.unwrap();
        assert_eq!(within(second.to_vec(&on_checked)).await.unwrap(), [4; 4]);
    }
}

// A fill reaches only memory of its stream's device, through any handle of the device.
#[tokio::test]
async fn s6_a_fill_of_another_devices_memory_is_refused() {
    let device = Device::emulated(Emulated::new());
    let stream = Stream::new(&device).unwrap();
    let mut others = Buffer::<u32>::new(&Device::emulated(Emulated::new()), 4).unwrap();
    let error = stream.fill(&mut others, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    let mut own = Buffer::<u32>::new(&device.clone().race_checked(), 4).unwrap();
    stream.fill(&mut own, 1).unwrap();
    assert_eq!(within(own.to_vec(&stream)).await.unwrap(), [1; 4]);
}

/// The cost of a wait does not depend on the number of other waits. With a walk over all of them, each half of this test
/// would take minutes in a release build.
#[test]
fn the_cost_of_a_wait_is_independent_of_other_waits() {
    const MANY: usize = quick_or_long(30_000, 200_000);
    let device = common::emulated();
    let stream = Stream::new(&device).unwrap();
    stream.set_completion_mode(CompletionMode::Quiet);
    let hold = || {
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        go
    };
    let mut cx = Context::from_waker(Waker::noop());
    let go = hold();
    let mut waits: Vec<_> = (0..MANY).map(|_| stream.completed()).collect();
    for wait in &mut waits {
        assert!(wait.poll_unpin(&mut cx).is_pending());
    }
    // Waits leave out of order of arrival.
    let others = waits.split_off(MANY / 2);
    drop(others);
    drop(go);
    for wait in waits {
        block_on(wait).unwrap();
    }
    let go = hold();
    for _ in 0..MANY {
        assert!(stream.completed().poll_unpin(&mut cx).is_pending());
    }
    drop(go);
    block_on(stream.completed()).unwrap();
}

#[test]
fn the_cost_of_a_wait_for_memory_is_independent_of_other_waits() {
    const MANY: usize = quick_or_long(30_000, 200_000);
    let device = common::emulated();
    let stream = Stream::new(&device).unwrap();
    let blocks = Allocator::blocks(&device, 256, 1).unwrap();
    let taken = blocks.alloc::<u8>(&stream, 1).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let mut waits: Vec<_> = (0..MANY).map(|_| Box::pin(blocks.alloc_when_free::<u8>(&stream, 1))).collect();
    for _ in 0..2 {
        for wait in &mut waits {
            assert!(wait.as_mut().poll(&mut cx).is_pending());
        }
    }
    drop(taken);
    for wait in waits {
        drop(block_on(wait).unwrap());
    }
}
