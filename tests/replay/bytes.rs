//! A section sends the same bytes whether it is replayed or streamed.

use super::*;

on_both!(g10_a_chain_gives_the_same_bytes_replayed_as_streamed_at_every_bucket_and_between, async |device: Device| {
    let (streamed, _) = chain(&device, ROWS, false).await;
    let (replayed, report) = chain(&device, ROWS, true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(replayed.len(), ROWS.len());
    // Streamed: the first round of each of the four buckets, and the two that exceed the largest.
    assert_eq!(section(&report, "net"), (10, 6, 4));
    assert_eq!(report.operator("two").unwrap().runs, ROWS.len() as u64);
    let text = "section `net`: 10 rounds replayed, 6 streamed (4 for lack of a graph, 2 for more rows than the largest bucket), 4 graphs captured";
    assert!(report.to_string().contains(text), "{report}");
});

on_both!(g10_a_fork_and_join_gives_the_same_bytes_replayed_as_streamed, async |device: Device| {
    let (streamed, _) = fork_and_join(&device, ROWS, false).await;
    let (replayed, report) = fork_and_join(&device, ROWS, true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (10, 6, 4));
});

on_both!(g10_the_branches_of_a_section_stay_parallel_in_its_graph, async |device: Device| {
    let graphs = shared();
    let inspected = graphs.clone();
    fork_and_join_inspected(&device, &[4, 4, 4], true, move |graph| lock(&inspected).push(graph.clone())).await;
    let graph: Graph = lock(&graphs).pop().unwrap();
    for (later, earlier) in [("left", "fork"), ("right", "fork"), ("join", "left"), ("join", "right")] {
        assert!(comes_after(&graph, later, earlier), "`{later}` after `{earlier}`: {}", graph.to_dot());
    }
    for (one, other) in [("left", "right"), ("right", "left")] {
        assert!(!comes_after(&graph, one, other), "`{one}` waits for `{other}`: {}", graph.to_dot());
    }
    assert!(
        graph.nodes().iter().all(|node| matches!(node.kind, NodeKind::Kernel | NodeKind::Copy)),
        "only kernels and copies: {}",
        graph.to_dot()
    );
});

on_both!(an_envelope_modified_in_place_may_leave_the_section, async |device: Device| {
    let rows = [4, 3, 4, 1, 2, 4];
    let replayed = run_one(&device, &rows, Increment, |flow, one| {
        flow.replay("net", one).buckets([4]).rows(one.input, ROW);
    });
    let (replayed, report) = replayed.await.unwrap();
    let (streamed, _) = run_one(&device, &rows, Increment, |_, _| {}).await.unwrap();
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (5, 1, 1));
});

/// Sends the sum of each message.
struct Total;

impl Operator for Total {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut total = ports.output.blank().await?;
        total.set_len(1)?;
        sum::launch(cx.stream()?, &x, &mut total)?;
        ports.output.send(total).await?;
        Ok(())
    }
}

on_both!(an_output_without_the_rows_of_the_inputs_must_be_declared_whole, async |device: Device| {
    let rows = [8, 8, 1, 5, 2, 8, 3];
    let replayed = run_one(&device, &rows, Total, |flow, one| {
        flow.replay("net", one).buckets([8]).rows(one.input, ROW).whole(one.output);
    });
    let (replayed, report) = replayed.await.unwrap();
    let sums: Vec<_> = batches(&rows).iter().map(|batch| vec![batch.iter().sum::<u32>()]).collect();
    assert_eq!(replayed, sums);
    assert_eq!(section(&report, "net"), (6, 1, 1));

    let undeclared = run_one(&device, &rows, Total, |flow, one| {
        flow.replay("net", one).buckets([8]).rows(one.input, ROW);
    });
    let error = undeclared.await.err().unwrap().to_string();
    assert_contains(
        &error,
        &["operator `one`: port `output`", "sends 1 element for 8 rows", "declare the output with `.whole(..)`"],
    );
});

/// Sends a fixed number of elements, regardless of its input.
struct Always(usize);

impl Operator for Always {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        drop(ports.input.take()?);
        let mut y = ports.output.blank().await?;
        y.set_len(self.0)?;
        cx.stream()?.fill(&mut y, 1)?;
        ports.output.send(y).await?;
        Ok(())
    }
}

on_both!(an_output_whose_row_size_differs_between_buckets_must_be_declared_whole, async |device: Device| {
    let undeclared = run_one(&device, &[1, 1, 2, 1], Always(8), |flow, one| {
        flow.replay("net", one).buckets([1, 2]).rows(one.input, ROW);
    });
    let error = undeclared.await.err().unwrap().to_string();
    let bucket = "it sends 32 bytes for one bucket and 32 for another, which is 16 and 32 bytes a row";
    assert_contains(&error, &["operator `one`: port `output`", bucket, "declare it with `.whole(..)`"]);

    let declared = run_one(&device, &[1, 1, 2, 1], Always(8), |flow, one| {
        flow.replay("net", one).buckets([1, 2]).rows(one.input, ROW).whole(one.output);
    });
    assert_eq!(declared.await.unwrap().0, [[1; 8]; 4]);
});

on_both!(padding_is_zero_after_an_operator_has_overwritten_it, async |device: Device| {
    /// Sends the sum of each message, and then modifies the message's memory, padding included.
    struct Sum;

    impl Operator for Sum {
        type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let mut x = ports.input.take()?;
            let mut total = ports.output.blank().await?;
            total.set_len(1)?;
            sum::launch(cx.stream()?, &x, &mut total)?;
            increment::launch(cx.stream()?, &mut x)?;
            ports.output.send(total).await?;
            Ok(())
        }
    }

    let rows = [8, 8, 1, 5, 2, 8, 3];
    let replayed = run_one(&device, &rows, Sum, |flow, one| {
        flow.replay("net", one).buckets([8]).rows(one.input, ROW).whole(one.output);
    });
    let (replayed, report) = replayed.await.unwrap();
    let sums: Vec<_> = batches(&rows).iter().map(|batch| vec![batch.iter().sum::<u32>()]).collect();
    assert_eq!(replayed, sums);
    assert_eq!(section(&report, "net"), (6, 1, 1));
});

on_both!(without_buckets_each_length_has_a_graph_up_to_the_limit, async |device: Device| {
    let rows = [3, 5, 7, 3, 5, 7, 7, 3];
    let replayed = run_one(&device, &rows, Affine(2, 3), |flow, one| {
        flow.replay("net", one).at_most(2);
    });
    let (replayed, report) = replayed.await.unwrap();
    let (streamed, _) = run_one(&device, &rows, Affine(2, 3), |_, _| {}).await.unwrap();
    assert_eq!(replayed, streamed);
    // The lengths 3 and 5 have the two graphs. The three rounds of length 7 are streamed.
    assert_eq!(section(&report, "net"), (3, 5, 2));
});

on_both!(without_buckets_a_recurring_length_evicts_the_graph_of_an_unused_one, async |device: Device| {
    let rows = [1, 2, 7, 7, 7, 7, 7, 1, 2];
    let replayed = run_one(&device, &rows, Affine(2, 3), |flow, one| {
        flow.replay("net", one).at_most(2);
    });
    let (replayed, report) = replayed.await.unwrap();
    let (streamed, _) = run_one(&device, &rows, Affine(2, 3), |_, _| {}).await.unwrap();
    assert_eq!(replayed, streamed);
    // After the third round of length 7 its graph replaces that of length 1. The graph of length 2 remains.
    assert_eq!(section(&report, "net"), (3, 6, 3));
});

on_both!(with_capture_at_the_start_no_round_that_fits_a_bucket_is_streamed, async |device: Device| {
    let rows = [1, 2, 3, 9];
    let replayed = run_one(&device, &rows, Affine(2, 3), |flow, one| {
        flow.replay("net", one).buckets([2, 4]).rows(one.input, ROW).at_start();
    });
    let (replayed, report) = replayed.await.unwrap();
    let (streamed, _) = run_one(&device, &rows, Affine(2, 3), |_, _| {}).await.unwrap();
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (3, 1, 2));
});

on_both!(messages_within_a_section_may_be_of_any_type, async |device: Device| {
    /// An envelope with values of the host.
    #[derive(Message)]
    struct Scaled {
        #[envelope]
        data: Envelope<u32>,
        by: u32,
        label: String,
    }

    struct Decide;

    #[derive(Ports)]
    struct DecidePorts {
        #[input]
        input: Input<Envelope<u32>>,
        #[output]
        scaled: Output<Scaled>,
        #[output]
        note: Output<u32>,
    }

    impl Operator for Decide {
        type Ports = DecidePorts;

        async fn compute(&mut self, ports: &mut DecidePorts, _cx: &mut Cx) -> Result<()> {
            let data = ports.input.take()?;
            ports.scaled.send(Scaled { data, by: 6, label: "six times".into() }).await?;
            ports.note.send(7).await?;
            Ok(())
        }
    }

    struct Scale;

    #[derive(Ports)]
    struct ScalePorts {
        #[input]
        scaled: Input<Scaled>,
        #[input]
        note: Input<u32>,
        #[output(envelope_bytes = 4096)]
        output: Output<Envelope<u32>>,
    }

    impl Operator for Scale {
        type Ports = ScalePorts;

        async fn compute(&mut self, ports: &mut ScalePorts, cx: &mut Cx) -> Result<()> {
            let (Scaled { data, by, label }, add) = (ports.scaled.take()?, ports.note.take()?);
            assert_eq!(label, "six times");
            let mut y = ports.output.blank().await?;
            y.set_len(data.len())?;
            affine::launch(cx.stream()?, &data, &mut y, by, add)?;
            ports.output.send(y).await?;
            Ok(())
        }
    }

    let run = async |replay: bool| {
        let seen = shared();
        let mut flow = Flow::new("any type");
        let read = flow.add("read", SendEach::new(batches(&[2, 2, 1, 2])));
        let decide = flow.add("decide", Decide).on(&device);
        let scale = flow.add("scale", Scale).on(&device);
        let collect = flow.add("collect", Collect(seen.clone()));
        flow.connect_with(read.output, decide.input, HubOptions::bounded(1).envelope_bytes(4096));
        flow.connect(decide.scaled, scale.scaled);
        flow.connect(decide.note, scale.note);
        flow.connect(scale.output, collect.input);
        if replay {
            flow.replay("net", (&decide, &scale)).buckets([2]).rows(decide.input, ROW);
        }
        let report = flow.run().await.unwrap();
        let seen = lock(&seen).clone();
        (seen, report)
    };
    let (streamed, _) = run(false).await;
    let (replayed, report) = run(true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (3, 1, 1));
});

on_both!(a_section_has_several_inputs_and_several_outputs, async |device: Device| {
    let run = async |replay: bool| {
        let (both, more) = (shared(), shared());
        let mut flow = Flow::new("cross");
        let hub = HubOptions::bounded(1).envelope_bytes(4096);
        let left = flow.add("left", SendEach::new(batches(&[2, 1, 2, 3])));
        let right = flow.add("right", SendEach::new(batches(&[2, 1, 1, 3])));
        let cross = flow.add("cross", Cross).on(&device);
        let first = flow.add("both", Collect(both.clone()));
        let second = flow.add("more", Collect(more.clone()));
        let other = flow.add("more of it", Collect(more.clone()));
        flow.connect_with(left.output, cross.left, hub);
        flow.connect_with(right.output, cross.right, hub);
        flow.connect(cross.both, first.input);
        // An output of a section may have several readers.
        flow.connect(cross.more, [second.input, other.input]);
        if replay {
            flow.replay("net", &cross).buckets([3]).rows(cross.left, ROW).rows(cross.right, ROW);
        }
        let report = flow.run().await.unwrap();
        let mut more = lock(&more).clone();
        more.sort();
        let both = lock(&both).clone();
        (both, more, report)
    };
    let (both, more, _) = run(false).await;
    let (replayed_both, replayed_more, report) = run(true).await;
    assert_eq!((replayed_both, &replayed_more), (both, &more));
    assert_eq!(more.len(), 8);
    // The third round has two rows at one input and one at the other: no bucket fits both.
    assert_eq!(section(&report, "net"), (2, 2, 1));
});

on_both!(metadata_of_a_message_passes_through_a_replay, async |device: Device| {
    struct Number(u32);

    impl Operator for Number {
        type Ports = SourcePorts<Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            self.0 += 1;
            if self.0 == 4 {
                cx.finish();
            }
            if self.0 != 3 {
                cx.insert_metadata("number", self.0);
            }
            let mut envelope = ports.output.blank().await?;
            envelope.space().await?[..4].fill(self.0);
            envelope.set_len(4)?;
            ports.output.send(envelope).await?;
            Ok(())
        }
    }

    struct Check(Shared<(Option<u32>, u32)>);

    impl Operator for Check {
        type Ports = SinkPorts<Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let envelope = ports.input.take()?;
            let number = cx.metadata().get::<u32>("number").copied();
            let first = envelope.read().await?[0];
            lock(&self.0).push((number, first));
            Ok(())
        }
    }

    let seen = shared();
    let mut flow = Flow::new("metadata");
    let read = flow.add("read", Number(0));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Affine(1, 0)).on(&device);
    let check = flow.add("check", Check(seen.clone()));
    let hub = HubOptions::bounded(1).envelope_bytes(64);
    flow.connect_with(read.output, one.input, hub);
    flow.connect(one.output, two.input);
    flow.connect_with(two.output, check.input, hub);
    flow.replay("net", (&one, &two));
    let report = flow.run().await.unwrap();
    assert_eq!(section(&report, "net"), (3, 1, 1));
    // The first element of each message is 3 (x + 1) + 1.
    assert_eq!(*lock(&seen), [(Some(1), 7), (Some(2), 10), (None, 13), (Some(4), 16)]);
});

#[tokio::test(start_paused = true)]
async fn the_bytes_are_the_same_in_every_simulated_order() {
    let rows = [1, 2, 3, 1, 9, 4, 2];
    let plain = emulated();
    let (chained, _) = chain(&plain, &rows, false).await;
    let (joined, _) = fork_and_join(&plain, &rows, false).await;
    for seed in 0..40 {
        let simulation = Simulation::new(seed);
        let run = async {
            let device = Device::simulated(&simulation, Emulated::new()).race_checked();
            let (both, report) = chain(&device, &rows, true).await;
            assert_eq!(both, chained, "seed {seed}");
            assert_eq!(section(&report, "net"), (3, 4, 3), "seed {seed}");
            let (both, _) = fork_and_join(&device, &rows, true).await;
            assert_eq!(both, joined, "seed {seed}");
        };
        simulation.run(run).await;
    }
}
