//! A trace of a real run, and what the run did, for `query.mjs`, which `.ci/full trace` compares them with. They are saved in the
//! folder `WAKELINE_TRACES`.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use common::*;
use serde_json::json;
use wakeline::{
    condition::Gate,
    device::Emulated,
    observe::Observe,
    operator::{concurrent, map},
    prelude::*,
};

const COUNT: u32 = 40;

/// Adds one to a message. Its scratch memory is still in use when it is released: the sampling of memory reclaims it.
struct Add;

impl Operator for Add {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        let mut scratch = Buffer::from_slice(cx.stream()?, &[0_u32; 64])?;
        increment::launch(cx.stream()?, &mut scratch)?;
        increment::launch(cx.stream()?, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

// Device work, copies both ways, a fan-out, overlapping runs, and a queue that is full while a gate is closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_shows_what_the_flow_did() {
    let ms = Duration::from_millis;
    let device = emulated_with(Emulated::new().workers(4).kernel_time("increment", ms(1)).copy_time(ms(1)));
    let gate = Gate::paused();
    let watch = Observe::new().every(ms(1)).paths(1).record(65_536);
    let mut flow = Flow::new("traced");
    let produce = flow.add("produce", SendEach::new((0..COUNT).map(|number| vec![number; 64])));
    let add = flow.add("add", Add).on(&device).when(gate.clone());
    let [one, other] = [shared(), shared()];
    let write = flow.add("write", Collect(one.clone()));
    let count = flow.add("count", Collect(other.clone()));
    flow.connect_with(produce.output, add.input, HubOptions::bounded(2).envelope_bytes(256));
    flow.connect(add.output, [write.input, count.input]);
    let mut left = 1..COUNT;
    let numbers = flow.add("numbers", source(move || std::future::ready(Ok(left.next()))));
    let numbers = numbers.when(gate.clone());
    let wait = map(async |number: u32| {
        tokio::time::sleep(Duration::from_millis(3)).await;
        Ok(number)
    });
    let work = flow.add("work", concurrent(3, wait));
    let sum = flow.add("sum", sink(async |_: u32| Ok(())));
    flow.connect(numbers.output, work.input);
    flow.connect(work.output, sum.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    // Until the queue was seen full in many samples.
    let is_full =
        || running.snapshot().hubs.iter().any(|hub| &*hub.to == "add" && hub.full.is_some_and(|share| share > 0.1));
    let wait = async {
        while !is_full() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap();
    let held = running.snapshot().devices[0].in_use;
    assert!(held > 0);
    gate.resume();
    let report = running.await.unwrap();
    assert_eq!([lock(&one).len(), lock(&other).len()], [COUNT as usize; 2]);

    let trace = watch.trace(Duration::from_secs(3600)).unwrap();
    assert_eq!(trace.lost(), 0);
    let Some(folder) = std::env::var_os("WAKELINE_TRACES").map(PathBuf::from) else { return };
    let runs: BTreeMap<_, _> = report.operators.iter().map(|operator| (&*operator.name, operator.runs)).collect();
    let device = &report.devices[0];
    let expected = json!({
        "runs": runs,
        "arrows": {
            "produce -> add": COUNT,
            "add -> write": COUNT,
            "add -> count": COUNT,
            "numbers -> work": COUNT - 1,
            "work -> sum": COUNT - 1,
        },
        "fills": { "produce.output -> add.input": 2 },
        "device": { "add": COUNT, "copies to device": COUNT, "copies to host": COUNT },
        "memory": { &*device.name: [held, device.memory_peak] },
    });
    trace.save(folder.join("traced.pftrace")).unwrap();
    std::fs::write(folder.join("traced.json"), expected.to_string()).unwrap();
}
