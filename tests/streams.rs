//! Scenarios S and M12: streams, the order that tracking keeps, and the race checker that proves it; pools of streams.
//!
//! The three examples of MindSpore's page on streams, in its order: one that is wrong there, one whose event is the wrong
//! one, and one that needed a mechanism of its own.

use std::{
    sync::mpsc,
    task::{Context, Waker},
};

use common::*;
use futures::{FutureExt, executor::block_on};
use wakeline::{
    CompletionMode,
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

/// Everything that a test of the examples needs: two streams, A on the device, room for B and C.
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
        // Known to be done: nothing of this is what the test is about.
        main.completed().await.unwrap();
        side.completed().await.unwrap();
        Self { main, side, a, b, c }
    }
}

/// What the race checker says: both sides, by kernel and stream, and what is missing.
fn assert_race(error: &Error, second: (&str, &str), first: (&str, &str)) {
    assert_eq!(error.kind(), ErrorKind::Race, "{error}");
    let told = error.to_string();
    let at = |(what, stream): (&str, &str)| {
        let side = format!("{what} on stream `{stream}`");
        told.find(&side).unwrap_or_else(|| panic!("no word of {side} in: {told}"))
    };
    assert!(at(second) < at(first), "the second comes first: {told}");
    let missing = format!("make `{}` wait for `{}`", second.1, first.1);
    assert!(told.contains(&missing), "{missing} in: {told}");
}

// B = matmul(A, A); on another stream, without a wait: C = sum(B).
on_both!(s7_use_on_another_stream_without_a_wait, async |device: Device| {
    let mut stage = Stage::new(&device).await;
    let held = hold(&stage.main);
    square::launch(&stage.main, &stage.a, &mut stage.b, N as u32).unwrap();
    sum::launch(&stage.side, &stage.b, &mut stage.c).unwrap();
    // The side stream had all the time to be early.
    drop(held);
    assert_eq!(stage.c.to_vec(&stage.side).await.unwrap(), [sum_of_square()]);
});

on_both!(m12_the_checker_finds_the_use_without_a_wait, async |device: Device| {
    let mut stage = Stage::new(&device).await;
    device.switch_tracking_off();
    square::launch(&stage.main, &stage.a, &mut stage.b, N as u32).unwrap();
    let error = sum::launch(&stage.side, &stage.b, &mut stage.c).unwrap_err();
    assert_race(&error, ("kernel `sum`", "side"), ("kernel `square`", "main"));
    // Before it happened: C is as it was, and the device goes on.
    assert_eq!(stage.c.to_vec(&stage.side).await.unwrap(), [0]);
    assert!(device.lost().is_none());
    // With the wait that it said was missing there is no race.
    stage.side.wait_for(&stage.main).unwrap();
    sum::launch(&stage.side, &stage.b, &mut stage.c).unwrap();
    assert_eq!(stage.c.to_vec(&stage.side).await.unwrap(), [sum_of_square()]);
});

// ... C = sum(B) on the side; then the main stream waits for the event of B, where that of C is meant: D = C + 1.
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
    // `ev1.wait()`: for what is on this stream itself.
    stage.main.wait_for(&stage.main).unwrap();
    let error = add_one::launch(&stage.main, &stage.c, &mut d).unwrap_err();
    assert_race(&error, ("kernel `add_one`", "main"), ("kernel `sum`", "side"));
    assert_eq!(d.to_vec(&stage.main).await.unwrap(), [77]);
    // `ev2.wait()`.
    stage.main.wait_for(&stage.side).unwrap();
    add_one::launch(&stage.main, &stage.c, &mut d).unwrap();
    assert_eq!(d.to_vec(&stage.main).await.unwrap(), [sum_of_square() + 1]);
});

// Memory is freed on one stream while another, which is slow, still reads it; a third party asks for as much.
on_both!(s7_memory_is_freed_while_another_stream_reads_it, async |device: Device| {
    const LEN: usize = 4096;
    let main = Stream::named(&device, "main").unwrap();
    let side = Stream::named(&device, "side").unwrap();
    let input = Buffer::from_slice(&main, &[1_u32; LEN]).unwrap();
    let mess_input = Buffer::from_slice(&main, &[1000_u32; LEN]).unwrap();
    let mut add_s0 = Buffer::<u32>::new(&device, LEN).unwrap();
    let mut add_s1 = Buffer::<u32>::new(&device, LEN).unwrap();
    add_one::launch(&main, &input, &mut add_s0).unwrap();
    // In place of the convolution that takes so long.
    let held = hold(&side);
    add_one::launch(&side, &add_s0, &mut add_s1).unwrap();
    let before = device.memory_in_use();
    drop(add_s0);
    assert_eq!(device.memory_in_use(), before, "the side stream still reads it");
    // The main stream makes a mess of as much memory, and is done with it before the side stream has begun.
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

/// The same where there is no other memory left: it is not handed out again while it is read, and it is afterwards.
#[tokio::test]
async fn s7_memory_that_is_read_is_not_handed_out_again() {
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
    Buffer::<u32>::new(&device, 256).expect("it is free now");
}

// Two streams read; a write on a third waits for both of them, not for the later one only.
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
        // One reader is done before the other has begun.
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

// In a flow: the checker's word arrives as the flow's error, with the operator's name.
on_both!(m12_a_race_in_a_flow_names_the_operator, async |device: Device| {
    let produce = || SendEach::new((0..8).map(|n| vec![n; 64]));
    for tracked in [true, false] {
        // A device of its own each time: tracking stays off once it is.
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
        flow.connect_with(produce.output, add.input, Hub::default().envelope_bytes(256));
        flow.connect(add.output, again.input);
        flow.connect(again.output, consume.input);
        match flow.run().await {
            Ok(_) => {
                assert!(tracked, "nothing orders the operators, and nobody said so");
                assert_eq!(*lock(&seen), (0..8).map(|n| vec![n + 2; 64]).collect::<Vec<_>>());
            }
            Err(error) => {
                assert!(!tracked, "{error}");
                assert!(error.is_race(), "{error}");
                let told = error.to_string();
                assert!(told.starts_with("operator `"), "{told}");
                assert!(told.contains("nothing orders them: make"), "{told}");
            }
        }
    }
});

/// A stream without a device, a device without a driver: errors that say so.
#[tokio::test]
async fn s6_no_cuda_device() {
    let error = Device::cuda(99).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoDevice, "{error}");
    assert_eq!("cuda:99".parse::<Device>().unwrap_err().kind(), ErrorKind::NoDevice);
    if Device::cuda_count() == 0 {
        let error = Device::cuda(0).unwrap_err();
        assert!(error.is_no_device(), "{error}");
        assert!(!error.to_string().contains('\n'), "one line: {error}");
        if std::env::var_os("WAKELINE_DEVICE").is_none() {
            assert!(Device::first().unwrap().is_emulated());
        }
    }
    let error = Stream::new(&Device::host()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
}

/// An operator that asks for a stream where there is none.
#[tokio::test]
async fn s6_an_operator_on_the_host_has_no_stream() {
    let mut flow = Flow::new("s6");
    let produce = flow.add("produce", SendEach::new([vec![1_u32]]));
    let add = flow.add("add", Increment);
    let consume = flow.add("consume", Collect(shared()));
    flow.connect_with(produce.output, add.input, Hub::default().envelope_bytes(4));
    flow.connect(add.output, consume.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().starts_with("operator `add`: "), "{error}");
    assert!(error.to_string().contains(".on(&device)"), "and what to do about it: {error}");
}

/// Two devices of one make in one flow.
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
    flow.connect_with(produce.output, add.input, Hub::default().envelope_bytes(128));
    flow.connect(add.output, again.input);
    flow.connect(again.output, back.input);
    flow.connect(back.output, consume.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (0..50).map(|n| vec![n + 3; 32]).collect::<Vec<_>>());
    freed(&one).await;
    freed(&two).await;
}

/// Two words that contradict each other are an error, whichever came last.
#[tokio::test]
async fn s4_a_pool_and_no_stream_of_its_own_is_an_error_before_running() {
    let device = emulated();
    let pool = StreamPool::builder(&device).name("narrow").build().unwrap();
    let mut flow = Flow::new("s4");
    let once = flow.add("once", source(async || Ok(None::<u32>)));
    let one = flow.add("one", sink(async |_: u32| Ok(()))).on(&device).streams(&pool).without_own_stream();
    let two = flow.add("two", sink(async |_: u32| Ok(()))).on(&device).without_own_stream().streams(&pool);
    flow.connect(once.output, [one.input, two.input]);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let told = error.to_string();
    for name in ["one", "two"] {
        let part = format!("operator `{name}` has the pool of streams `narrow` and is to have no stream of its own");
        assert!(told.contains(&part), "{part}\n{told}");
    }
}

/// Its work is not there.
#[tokio::test]
async fn s5_a_stream_of_another_device_is_not_sent_on() {
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
    let told = error.to_string();
    let part = format!("`send` is on {device}, and its messages are to carry a stream of {other}");
    assert!(told.starts_with("operator `send`: ") && told.contains(&part), "{told}");
}

// S1: pools of streams.

on_both!(s1_what_is_given_back_is_used_again, async |device: Device| {
    let pool = StreamPool::builder(&device).name("few").reserved(1).maximum(2).build().unwrap();
    assert_eq!((pool.made(), pool.in_use(), pool.maximum()), (1, 0, Some(2)), "what is reserved is made at once");
    let one = pool.take().unwrap();
    assert_eq!((pool.made(), pool.in_use()), (1, 1));
    let two = pool.take().unwrap();
    assert!(*one != *two);
    assert_eq!(one.device(), &device);
    let error = pool.clone().take().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("pool `few` is used up: its maximum of 2 streams is in use"), "{error}");
    // Given back in the middle of its work: who gets it next comes after that.
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

on_both!(s1_the_default_pool, async |device: Device| {
    let pool = StreamPool::default_of(&device).unwrap();
    assert_eq!((pool.maximum(), pool.priority()), (None, 0));
    let many: Vec<_> = (0..20).map(|_| pool.take().unwrap()).collect();
    drop(many);
    let same = StreamPool::default_of(&device).unwrap();
    assert_eq!((same.made(), same.in_use()), (20, 0), "one a device");
});

#[test]
fn s1_a_pool_that_cannot_be() {
    let device = emulated();
    let told = |pool: wakeline::stream::StreamPoolBuilder| {
        let error = pool.name("bad").build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("pool `bad`"), "{error}");
        error.to_string()
    };
    assert!(told(StreamPool::builder(&device).maximum(0)).contains("its maximum is 0"));
    assert!(
        told(StreamPool::builder(&device).maximum(1).reserved(2))
            .contains("2 streams are reserved, and its maximum is 1")
    );
    assert!(told(StreamPool::builder(&Device::host())).contains("the host has no streams"));
}

on_both!(s1_priorities_are_within_what_the_device_has, async |device: Device| {
    let range = device.stream_priorities();
    assert!(range.contains(&0), "{range:?}");
    for (asked, has) in [(0, 0), (i32::MIN, *range.start()), (i32::MAX, *range.end())] {
        let pool = StreamPool::builder(&device).priority(asked).build().unwrap();
        assert_eq!((pool.priority(), pool.take().unwrap().priority()), (has, has));
    }
    assert_eq!(Stream::new(&device).unwrap().priority(), 0);
});

/// One worker, and it is busy: of what waits for it, the urgent stream's work goes first, and what signals its end too.
#[tokio::test]
async fn s1_urgent_streams_go_first() {
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
        flow.connect_with(from, add.input, Hub::default().envelope_bytes(256));
        from = add.output;
    }
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect(from, consume.input);
    for _ in 0..3 {
        flow.run().await.unwrap();
        assert_eq!((pool.made(), pool.in_use()), (3, 0), "given back at the end, and used again");
    }
    assert_eq!(*lock(&seen), (0..20).map(|n| vec![n + 3; 64]).collect::<Vec<_>>());
    assert_eq!(StreamPool::default_of(&device).unwrap().made(), 0, "nobody took one there");
});

#[tokio::test]
async fn s1_a_pool_smaller_than_its_sharers_is_warned_of_before_running() {
    let device = emulated();
    let warnings = Warnings::default();
    let _hearing = tracing::subscriber::set_default(warnings.clone());
    for (maximum, warned) in [(1, true), (2, false)] {
        let pool = StreamPool::builder(&device).name("narrow").maximum(maximum).build().unwrap();
        let mut flow = Flow::new("s1");
        let produce = flow.add("produce", SendEach::new([vec![1_u32; 4]]));
        let one = flow.add("one", Increment).on(&device).streams(&pool);
        let two = flow.add("two", Increment).on(&device).streams(&pool);
        let consume = flow.add("consume", Collect(shared()));
        flow.connect_with(produce.output, one.input, Hub::default().envelope_bytes(16));
        flow.connect(one.output, two.input);
        flow.connect(two.output, consume.input);
        let running = flow.spawn().unwrap();
        let told = warnings.messages();
        assert_eq!(told.len(), usize::from(warned), "before anything has run: {told:?}");
        if warned {
            for part in ["narrow", "maximum=1", "one, two", "fewer streams than operators that share it"] {
                assert!(told[0].contains(part), "{part} in: {}", told[0]);
            }
        }
        within(running).await.unwrap();
    }
}

#[tokio::test]
async fn s1_a_pool_of_another_device_is_an_error_before_running() {
    let (device, other) = (emulated(), emulated());
    let pool = StreamPool::builder(&other).name("far").build().unwrap();
    let mut flow = Flow::new("s1");
    let one = flow.add("one", sink(async |_: u32| Ok(()))).on(&device).streams(&pool);
    let _two = flow.add("two", sink(async |_: u32| Ok(()))).streams(&pool);
    let once = flow.add("once", source(async || Ok(None::<u32>)));
    flow.connect(once.output, one.input);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let told = error.to_string();
    let far = format!("and its pool of streams `far` is on {other}");
    for part in [
        format!("operator `one` is on {device}, {far}"),
        format!("operator `two` is on the host, {far}"),
        "input `two.input` is not connected".into(),
    ] {
        assert!(told.contains(&part), "{part} in: {told}");
    }
}

/// Whoever is given a stream of a device that was lost meanwhile is told so, and the pool stays as it was.
#[tokio::test]
async fn s1_a_pool_of_a_device_that_was_lost() {
    let device = emulated_with(Emulated::new().faults(Faults::new().trap_kernel("increment", 1)));
    let pool = StreamPool::builder(&device).reserved(1).maximum(1).build().unwrap();
    let stream = Stream::new(&device).unwrap();
    let mut buffer = Buffer::from_slice(&stream, &[1_u32; 4]).unwrap();
    let (told, over) = tokio::sync::oneshot::channel();
    increment::launch(&stream, &mut buffer).unwrap();
    // Nobody has asked the device yet: the host function that is dropped behind the fault says that it has happened.
    let told = Told(Some(told));
    let _ = stream.host_function(move || drop(told));
    within(over).await.unwrap_err();
    let taken = within(tokio::task::spawn_blocking(move || pool.take().map(drop).map(|()| pool.in_use()))).await;
    assert!(taken.unwrap().is_err_and(|error| error.is_device_lost()));
}

/// Says by being dropped that it is.
struct Told(#[allow(dead_code, reason = "dropped, never looked at")] Option<tokio::sync::oneshot::Sender<()>>);

// The hook leaves the order of a checked handle's streams to the checker. The streams of an unchecked handle of the same device
// it does not see: between those and others there is an order all the same.
#[tokio::test]
async fn m12_without_the_tracking_streams_of_another_handle_are_ordered() {
    for writes_unchecked in [false, true] {
        let plain = Device::emulated(Emulated::new().workers(4));
        let checked = plain.clone().race_checked();
        if checked == plain {
            // `WAKELINE_RACE_CHECK` has every device checked.
            return;
        }
        checked.switch_tracking_off();
        let (on_plain, on_checked) = (Stream::new(&plain).unwrap(), Stream::new(&checked).unwrap());
        let (writer, reader) = if writes_unchecked { (&on_plain, &on_checked) } else { (&on_checked, &on_plain) };
        let mut data = Buffer::from_slice(&on_checked, &[1_u32; 4]).unwrap();
        let mut read = Buffer::<u32>::new(&checked, 4).unwrap();
        // Whatever was done until here is done for all streams.
        within(on_checked.completed()).await.unwrap();
        let held = hold(writer);
        writer.fill(&mut data, 2).unwrap();
        reader.copy(&data, &mut read).unwrap();
        // The reader has all the time to be early.
        let early = reader.completed();
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        drop(held);
        within(early).await.unwrap();
        assert_eq!(within(read.to_vec(reader)).await.unwrap(), [2; 4], "the writer is unchecked: {writes_unchecked}");

        // And where memory is used again.
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

// A fill is no copy: it reaches the memory of its stream's device alone, and that through each handle of it.
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

/// What a wait costs does not depend on how many wait beside it, or have waited: with a walk over all of them, each half of this
/// would take minutes in a release build.
#[test]
fn a_wait_costs_the_same_beside_many_others_and_after_them() {
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
    // In an order that is not that of their arrival: the front leaves, and its last is woken in its place, say.
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

/// The same for memory.
#[test]
fn a_wait_for_memory_costs_the_same_beside_many_others() {
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
