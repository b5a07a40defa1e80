//! Sections in whole flows: several sections, repeated runs, stalls, steps, stops and fan-out.

use super::*;

on_both!(two_sections_of_one_flow_are_both_replayed, async |device: Device| {
    let run = async |replay: bool| {
        let seen = shared();
        let mut flow = Flow::new("two");
        let hub = HubOptions::bounded(2).envelope_bytes(4096);
        let read = flow.add("read", SendEach::new(batches(&[2; 20])));
        let one = flow.add("one", Affine(2, 3)).on(&device);
        let between = flow.add("between", Increment).on(&device);
        let two = flow.add("two", Affine(5, 7)).on(&device);
        let three = flow.add("three", Increment).on(&device);
        let collect = flow.add("collect", Collect(seen.clone()));
        flow.connect_with(read.output, one.input, hub);
        flow.connect_with(one.output, between.input, hub);
        flow.connect(between.output, two.input);
        flow.connect_with(two.output, three.input, hub);
        flow.connect(three.output, collect.input);
        if replay {
            flow.replay("first", &one).at_most(1);
            flow.replay("second", (&two, &three)).buckets([2, 4]).rows(two.input, ROW);
        }
        let report = flow.run().await.unwrap();
        let seen = lock(&seen).clone();
        (seen, report)
    };
    let (streamed, _) = run(false).await;
    let (replayed, report) = run(true).await;
    assert_eq!(replayed, streamed);
    assert_eq!([section(&report, "first"), section(&report, "second")], [(19, 1, 1); 2]);
});

on_both!(g11_flows_capture_concurrently_while_another_thread_allocates_and_creates_streams, async |device: Device| {
    let (streamed, _) = chain(&device, &[1, 2, 3, 4, 5, 6, 7, 8], false).await;
    let done = Arc::new(AtomicBool::new(false));
    let busy = std::thread::spawn({
        let (device, done) = (device.clone(), done.clone());
        move || {
            while !done.load(Ordering::Relaxed) {
                let stream = Stream::new(&device).unwrap();
                let mut data = Buffer::from_slice(&stream, &[1_u32; 64]).unwrap();
                increment::launch(&stream, &mut data).unwrap();
                stream.synchronize_blocking().unwrap();
            }
        }
    });
    let flows: Vec<_> = (0..2)
        .map(|_| {
            let device = device.clone();
            tokio::spawn(async move { chain(&device, &[1, 2, 3, 4, 5, 6, 7, 8], true).await })
        })
        .collect();
    for flow in flows {
        let (replayed, report) = flow.await.unwrap();
        assert_eq!(replayed, streamed);
        assert_eq!(section(&report, "net"), (4, 4, 4));
    }
    done.store(true, Ordering::Relaxed);
    busy.join().unwrap();
});

on_both!(a_section_runs_again_and_uses_buffers_that_its_operators_keep, async |device: Device| {
    /// Adds a buffer that is older than the capture.
    struct Add(Buffer<u32>);

    impl Operator for Add {
        type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let mut x = ports.input.take()?;
            add_to::launch(cx.stream()?, &mut x, &self.0)?;
            ports.output.send(x).await?;
            Ok(())
        }
    }

    let stream = Stream::new(&device).unwrap();
    let weights = Buffer::from_slice(&stream, &[100; 64]).unwrap();
    let seen = shared();
    let mut flow = Flow::new("again");
    let read = flow
        .add(
            "read",
            source({
                let device = device.clone();
                let mut left = 0;
                move || {
                    left += 1;
                    let batch = (left % 4 != 0).then(|| Buffer::from_slice(&Stream::new(&device)?, &[left; 8]));
                    std::future::ready(batch.transpose().map(|batch| batch.map(Envelope::from)))
                }
            }),
        )
        .on(&device);
    let one = flow.add("one", Add(weights)).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect(read.output, one.input);
    flow.connect_with(one.output, collect.input, HubOptions::bounded(1).envelope_bytes(64));
    flow.replay("net", &one);
    for _ in 0..2 {
        let report = flow.run().await.unwrap();
        assert_eq!(section(&report, "net"), (2, 1, 1));
    }
    let firsts: Vec<_> = lock(&seen).iter().map(|data: &Vec<u32>| data[0]).collect();
    assert_eq!(firsts, [101, 102, 103, 105, 106, 107]);
});

on_both!(a_stall_error_names_the_section_and_what_it_waits_for, async |device: Device| {
    let mut flow = Flow::new("stalled");
    let hub = HubOptions::bounded(1).envelope_bytes(64);
    let read = flow.add("read", SendEach::new(batches(&[1, 1])));
    let never = flow.add(
        "never",
        task(|ports: &mut SourcePorts<Envelope<u32>>, _| {
            use futures::FutureExt;
            // It waits for a blank while it holds all of them, so it neither sends nor ends.
            async move {
                let _first = ports.output.blank().await?;
                let _second = ports.output.blank().await?;
                ports.output.blank().await.map(drop)
            }
            .boxed()
        }),
    );
    let cross = flow.add("cross", Cross).on(&device);
    let both = flow.add("both", Collect(shared()));
    let more = flow.add("more", Collect(shared()));
    flow.connect_with(read.output, cross.left, hub);
    flow.connect_with(never.output, cross.right, hub);
    flow.connect(cross.both, both.input);
    flow.connect(cross.more, more.input);
    flow.replay("net", &cross);
    let error = flow.run().await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    assert_contains(
        &error.to_string(),
        &["`cross` of section `net` waits for a message in hub `never.output -> cross.right`"],
    );
});

on_both!(a_section_is_stepped_through_and_stopped_like_an_operator, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("steps");
    let hub = HubOptions::bounded(1).envelope_bytes(64);
    let read = flow.add("read", SendEach::new(batches(&[1, 1])));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect_with(read.output, one.input, hub);
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    flow.replay("net", (&one, &two));
    let mut steps = flow.steps().unwrap();
    let mut runs = Vec::new();
    while let Some(step) = steps.next().await {
        runs.push(step.to_string());
    }
    let of = |name: &str| runs.iter().filter(|run| run.starts_with(&format!("{name}:"))).cloned().collect::<Vec<_>>();
    assert_eq!(of("one"), ["one: run 1", "one: run 2", "one: ended"], "{runs:?}");
    assert_eq!(of("two"), [""; 0], "the steps of the section are those of its first operator");
    let report = steps.run_on().await.unwrap();
    assert_eq!(section(&report, "net"), (1, 1, 1));
    assert_eq!(*lock(&seen), [[2, 3, 4, 5], [1002, 1003, 1004, 1005]]);

    // The section yields to other tasks now and then. That must not cost it a run in any generation.
    let mut flow = Flow::new("many steps");
    let read = flow.add("read", SendEach::new(vec![vec![1_u32; 4]; 300]));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, one.input, hub);
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    flow.replay("net", [&one, &two]);
    let mut steps = flow.steps().unwrap();
    let mut ran = Vec::new();
    while let Some(step) = steps.next().await {
        if matches!(&step, Step::Ran { operator, .. } if &**operator == "one") {
            ran.push(steps.generation());
        }
    }
    assert_eq!(ran.len(), 300);
    assert!(ran.windows(2).all(|two| two[1] - two[0] == ran[1] - ran[0]), "{ran:?}");
    steps.run_on().await.unwrap();

    let (mut flow, many) = (Flow::new("stop"), vec![vec![1_u32; 4]; 100_000]);
    let read = flow.add("read", SendEach::new(many));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, one.input, hub);
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    flow.replay("net", [&one, &two]);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    let mut changes = handle.changes();
    until("some rounds", || handle.status()[1].runs > 3).await;
    handle.stop();
    let mut reported = [Vec::new(), Vec::new()];
    while let Some(status) = futures::StreamExt::next(&mut changes).await {
        match &*status.name {
            "one" => reported[0].push(status.status),
            "two" => reported[1].push(status.status),
            _ => {}
        }
    }
    let last = reported.map(|statuses| statuses.last().copied());
    assert_eq!(last, [Some(Status::Never); 2], "the status of both operators is reported to the end");
    let report = running.await.unwrap();
    let (replayed, ..) = section(&report, "net");
    assert!(replayed > 2 && report.untaken == 0, "every message that was sent is processed: {report}");
    assert_eq!(report.operator("read").unwrap().messages_out, report.operator("collect").unwrap().messages_in);
});

on_both!(a_section_may_contain_fan_out_and_a_port_with_several_connections, async |device: Device| {
    struct Sums;

    #[derive(Ports)]
    struct SumsPorts {
        #[input]
        parts: Inputs<Envelope<u32>>,
        #[output]
        output: Output<Envelope<u32>>,
    }

    impl Operator for Sums {
        type Ports = SumsPorts;

        async fn compute(&mut self, ports: &mut SumsPorts, cx: &mut Cx) -> Result<()> {
            let mut parts = ports.parts.take()?;
            let mut sum = parts.next().expect("one message of each connection");
            for part in parts {
                add_to::launch(cx.stream()?, &mut sum, &part)?;
            }
            ports.output.send(sum).await?;
            Ok(())
        }
    }

    let run = async |replay: bool| {
        let (seen, graphs) = (shared(), shared());
        let mut flow = Flow::new("fan out");
        let hub = HubOptions::bounded(1).envelope_bytes(4096);
        let read = flow.add("read", SendEach::new(batches(&[2, 2, 1, 2])));
        let one = flow.add("one", Increment).on(&device);
        let left = flow.add("left", Affine(2, 7)).on(&device);
        let right = flow.add("right", Increment).on(&device);
        let sums = flow.add("sums", Sums).on(&device);
        let collect = flow.add("collect", Collect(seen.clone()));
        flow.connect_with(read.output, one.input, hub);
        flow.connect(one.output, [left.input, right.input]);
        flow.connect_with(left.output, sums.parts, hub);
        flow.connect(right.output, sums.parts);
        flow.connect(sums.output, collect.input);
        if replay {
            let inspected = graphs.clone();
            let net = flow.replay("net", (&one, &left, &right, &sums));
            net.buckets([2]).rows(one.input, ROW).inspect(move |graph: &Graph| lock(&inspected).push(graph.clone()));
        }
        let report = flow.run().await.unwrap();
        let (seen, graph) = (lock(&seen).clone(), lock(&graphs).pop());
        (seen, report, graph)
    };
    let (streamed, ..) = run(false).await;
    let (replayed, report, graph) = run(true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (3, 1, 1));
    let graph = graph.expect("the section is captured");
    // One copy into the section, one out of it, and one for the second reader of the fan-out.
    assert_eq!(graph.nodes().iter().filter(|node| node.kind == NodeKind::Copy).count(), 3, "{}", graph.to_dot());
    assert!(!comes_after(&graph, "left", "right"), "{}", graph.to_dot());
});
