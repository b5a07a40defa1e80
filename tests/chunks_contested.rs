//! Operators that need chunks of two hubs at once and may each hold the chunk that the other one lacks.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::{chunks::Fill, emulated, quick_or_long, within};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wakeline::{
    condition::Gate,
    device::{Emulated, Simulation},
    operator::{Consume, Modify, Produce},
    prelude::*,
};

#[derive(Ports)]
struct ZipPorts {
    #[consume]
    left: Consume<u32>,
    #[consume]
    right: Consume<u32>,
}

struct Zip(Arc<AtomicUsize>);

impl Operator for Zip {
    type Ports = ZipPorts;

    async fn compute(&mut self, ports: &mut ZipPorts, _cx: &mut Cx) -> Result<()> {
        ports.left.get()?;
        ports.right.get()?;
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Two operators at different places consume pairs from the same two hubs. They must not keep moving the chunk that the
/// other one lacks back and forth.
#[tokio::test]
async fn consumers_of_pairs_from_two_hubs_lose_no_chunk_to_each_other_for_ever() {
    for envelopes in [1, 2] {
        let device = emulated();
        let hub = |name: &str| {
            let builder = ChunkHub::<u32>::builder(name).elements(1).queue(envelopes);
            builder.envelopes(&device, envelopes).host_envelopes(envelopes).build().unwrap()
        };
        let (left, right, pairs) = (hub("left"), hub("right"), Arc::default());
        let mut flow = Flow::new("pairs");
        for on_device in [false, true] {
            let zip = flow.add(if on_device { "there" } else { "here" }, Zip(Arc::clone(&pairs)));
            let zip = if on_device { zip.on(&device) } else { zip };
            flow.link(zip.left, &left);
            flow.link(zip.right, &right);
        }
        let fills = [&left, &right].map(|hub| {
            let mut produce = hub.produce(&Device::host()).unwrap();
            tokio::spawn(async move {
                for number in 0..200 {
                    produce.with(async |blank| blank.fill_from(&[number]).await).await.unwrap().unwrap();
                }
            })
        });
        let running = flow.spawn().unwrap();
        for fill in fills {
            within(fill).await.unwrap();
        }
        within(running).await.unwrap();
        assert_eq!(pairs.load(Ordering::Relaxed), 200);
    }
}

/// The same with two worker threads and more chunks in flight: younger chunks of one hub hold all envelopes of a place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_of_pairs_lose_no_chunk_to_each_other_behind_younger_chunks() {
    for _ in 0..quick_or_long(30, 150) {
        let (device, pairs) = (emulated(), Arc::default());
        let hubs = ["left", "right"].map(|name| {
            let builder = ChunkHub::<u32>::builder(name).elements(1).queue(3);
            builder.envelopes(&device, 2).host_envelopes(1).build().unwrap()
        });
        let mut flow = Flow::new("pairs");
        for (name, hub) in ["fill left", "fill right"].into_iter().zip(&hubs) {
            let fill = flow.add(name, Fill::each(0..20));
            flow.link(fill.numbers, hub);
        }
        for (name, on) in [("here", None), ("there", Some(&device))] {
            let zip = flow.add(name, Zip(Arc::clone(&pairs)));
            let (zip, [left, right]) = match on {
                Some(device) => (zip.on(device), [&hubs[1], &hubs[0]]),
                None => (zip, [&hubs[0], &hubs[1]]),
            };
            flow.link(zip.left, left);
            flow.link(zip.right, right);
        }
        within(flow.run()).await.unwrap();
        assert_eq!(pairs.load(Ordering::Relaxed), 20);
    }
}

#[derive(Ports)]
struct BothPorts {
    #[modify]
    left: Modify<u32>,
    #[modify]
    right: Modify<u32>,
}

/// Holds a chunk of each of two hubs in each run and sometimes gives one back. The fields are the number of runs that
/// are left and a seed.
struct Both(u32, u32);

impl Operator for Both {
    type Ports = BothPorts;

    async fn compute(&mut self, ports: &mut BothPorts, cx: &mut Cx) -> Result<()> {
        let chance = self.0.wrapping_mul(2_654_435_761).wrapping_add(self.1.wrapping_mul(40_503)) >> 7;
        let breaks = [1, 8].get(chance as usize % 6).copied().unwrap_or(0);
        for _ in 0..breaks {
            tokio::task::yield_now().await;
        }
        ports.left.get()?;
        ports.right.get()?;
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        if chance % 8 == 3 {
            ports.left.give_back();
        }
        Ok(())
    }
}

/// Operators that need chunks of two hubs do not evict each other's chunks for ever where chunks stay in their hubs.
#[tokio::test]
async fn operators_with_chunks_that_stay_lose_none_to_each_other_for_ever() {
    for round in 0..quick_or_long(12, 40) {
        let [other, device] = [(); 2].map(|()| emulated());
        let hubs = ["left", "right"].map(|name| {
            let builder = ChunkHub::<u32>::builder(name).elements(1).queue(2).host_envelopes(2);
            builder.envelopes(&other, 1).envelopes(&device, 1).build().unwrap()
        });
        for hub in &hubs {
            let mut produce = hub.produce(&Device::host()).unwrap();
            for number in 0..2 {
                within(produce.with(async |blank| blank.fill_from(&[number]).await)).await.unwrap().unwrap();
            }
        }
        let mut flow = Flow::new("stay");
        for number in 0..3 {
            let both = flow.add(format!("both {number}"), Both(24, round * 3 + number)).on(&device);
            let (first, second) = if number == 0 { (1, 0) } else { (0, 1) };
            flow.link(both.left, &hubs[first]);
            flow.link(both.right, &hubs[second]);
        }
        within(flow.run()).await.unwrap();
    }
}

async fn breaks(random: &mut StdRng, most: u32) {
    for _ in 0..random.random_range(0..=most) {
        tokio::task::yield_now().await;
    }
}

#[derive(Ports)]
struct FillPorts {
    #[produce]
    out: Produce<u32>,
}

/// Produces the given number of chunks and yields at most the given number of times before each.
struct SlowFill(u32, StdRng, u32);

impl Operator for SlowFill {
    type Ports = FillPorts;

    async fn compute(&mut self, ports: &mut FillPorts, cx: &mut Cx) -> Result<()> {
        breaks(&mut self.1, self.2).await;
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        ports.out.get_mut()?.fill_from(&[1]).await
    }
}

/// [`Zip`] after at most the given number of yields.
struct SlowZip(StdRng, u32);

impl Operator for SlowZip {
    type Ports = ZipPorts;

    async fn compute(&mut self, ports: &mut ZipPorts, _cx: &mut Cx) -> Result<()> {
        breaks(&mut self.0, self.1).await;
        ports.left.get()?;
        ports.right.get().map(drop)
    }
}

#[derive(Ports)]
struct OnePorts {
    #[consume]
    left: Consume<u32>,
}

struct One;

impl Operator for One {
    type Ports = OnePorts;

    async fn compute(&mut self, ports: &mut OnePorts, _cx: &mut Cx) -> Result<()> {
        ports.left.get().map(drop)
    }
}

/// Two operators that each hold a chunk that the other one lacks stay parked while a third one, which is ahead of them,
/// waits for its gate for an hour. In a simulation each of their polls is a step.
#[test]
fn operators_that_contest_chunks_wait_without_being_polled() {
    for seed in 0..quick_or_long(40, 500) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let (simulation, random) = (Simulation::new(seed), &mut StdRng::seed_from_u64(seed));
        let flow = async {
            let device = Device::simulated(&simulation, Emulated::new());
            let hubs = ["left", "right"].map(|name| {
                let builder = ChunkHub::<u32>::builder(name).elements(1).queue(random.random_range(1..=3));
                let builder = builder.envelopes(&device, random.random_range(1..=2));
                builder.host_envelopes(random.random_range(1..=2)).pinned_for(&device).build().unwrap()
            });
            let mut flow = Flow::new("contested");
            let count = random.random_range(5..40);
            for (name, hub) in ["fill left", "fill right"].into_iter().zip(&hubs) {
                let fill = SlowFill(count, StdRng::seed_from_u64(random.random()), random.random_range(0..8));
                let fill = flow.add(name, fill);
                flow.link(fill.out, hub);
            }
            let gate = Gate::open();
            let one = flow.add("one", One).when(gate.clone());
            let one = if random.random() { one.on(&device) } else { one };
            flow.link(one.left, &hubs[0]);
            for on_device in [true, false] {
                let zip = SlowZip(StdRng::seed_from_u64(random.random()), random.random_range(0..8));
                let zip = flow.add(if on_device { "there" } else { "here" }, zip);
                let zip = if on_device { zip.on(&device) } else { zip };
                flow.link(zip.left, &hubs[0]);
                flow.link(zip.right, &hubs[1]);
            }
            let running = flow.spawn()?;
            breaks(random, 300).await;
            gate.pause();
            tokio::time::sleep(Duration::from_secs(3600)).await;
            gate.resume();
            drop(gate);
            running.await
        };
        let mut run = pin!(simulation.run(flow));
        // The outcome of the flow, with or without chunks left over, does not matter here.
        runtime.block_on(poll_fn(|cx| {
            assert!(simulation.steps() < 20_000, "seed {seed}: the operators wake each other without progress");
            run.as_mut().poll(cx).map(drop)
        }));
    }
}
