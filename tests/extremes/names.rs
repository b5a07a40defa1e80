//! Names of arbitrary text.

use super::*;

/// Names that are invalid for operating systems, drivers or drawings.
fn names() -> Vec<String> {
    ["", "\0", "a\0b", "\n\r\t\u{1b}[31m", "\"} evil [label=\"", "\\", "\u{85}\u{200f}é", "/../..", "%s%n"]
        .map(String::from)
        .into_iter()
        .chain(["x".repeat(1 << 20), "é".repeat(70_000), "\0".repeat(1000)])
        .collect()
}

#[tokio::test]
async fn any_name_works_for_a_device_an_operator_and_a_flow() {
    for name in names() {
        let device = emulated_with(Emulated::new().workers(1).name(name.clone()));
        assert_eq!(device.name(), name);
        for own_thread in [false, true] {
            let mut flow = Flow::new(name.clone());
            let seen = shared();
            let from = flow.add(format!("{name}1"), SendEach::new([vec![1_u32; 4]]));
            let add = flow.add(format!("{name}2"), Increment).on(&device);
            let to = flow.add(format!("{name}3"), Collect(seen.clone()));
            flow.connect_with(from.output, add.input, HubOptions::bounded(1).envelope_bytes(16));
            flow.connect(add.output, to.input);
            let _gate = flow.gate(name.clone());
            let _ = if own_thread { to.on_own_thread() } else { to };
            let report = within(flow.run()).await.unwrap();
            assert_eq!(*lock(&seen), [vec![2; 4]]);
            assert!(!report.to_string().is_empty());
        }
        // The completion monitor's thread is named after the device.
        let stream = Stream::named(&device, name.clone()).unwrap();
        let held = hold(&stream);
        let waits = stream.completed();
        let mut waits = std::pin::pin!(waits);
        assert!(futures::poll!(waits.as_mut()).is_pending());
        drop(held);
        within(waits).await.unwrap();
    }
}

on_both!(any_name_works_for_streams_pools_hubs_and_graphs, async |device: Device| {
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

/// The drawing of a section's graph contains the operators' names.
#[tokio::test]
async fn a_drawing_has_no_control_characters() {
    let device = emulated();
    for name in names().into_iter().filter(|name| name.len() < 100) {
        let (sender, receiver) = mpsc::channel();
        let mut flow = host_only();
        let from = flow.add("from", SendEach::new([vec![1_u32; 4], vec![1; 4]]));
        let add = flow.add(name.clone(), Increment).on(&device);
        let to = flow.add("to", Collect(shared()));
        flow.connect_with(from.output, add.input, HubOptions::bounded(1).envelope_bytes(16));
        flow.connect(add.output, to.input);
        flow.replay(name, &add).inspect(move |graph| sender.send(graph.to_dot()).unwrap());
        within(flow.run()).await.unwrap();
        drop(flow);
        for dot in receiver {
            assert!(dot.contains("label=") && dot.chars().all(|char| char == '\n' || !char.is_control()), "{dot:?}");
            assert_eq!(dot.matches("evil [label").count(), dot.matches("evil [label=\\\"").count(), "{dot}");
        }
    }
}

/// A single-threaded flow, and one in a simulation.
#[tokio::test(start_paused = true)]
async fn any_name_works_on_one_thread_and_in_a_simulation() {
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
