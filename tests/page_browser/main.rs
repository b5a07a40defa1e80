//! The live page in headless Chromium: `.ci/full page`. `browser.mjs` looks at it, says what is wrong there, and saves pictures in
//! the folder `WAKELINE_PAGES`, without which nothing is done.

use std::{path::Path, time::Duration};

use common::*;
use tokio::process::Command;
use wakeline::{
    Running,
    observe::{Observe, PageOptions},
    prelude::*,
};

/// Looks at a page as `scene`.
async fn look(watch: &Observe, scene: &str) {
    let Some(folder) = std::env::var_os("WAKELINE_PAGES") else { return };
    let page = watch.page_with("127.0.0.1:0", PageOptions::new().controls(true)).await.unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("page_browser/browser.mjs");
    let mut node = Command::new("node");
    node.arg(script).arg(scene).arg(page.url()).arg(folder);
    let status = tokio::time::timeout(Duration::from_secs(120), node.status()).await.unwrap().unwrap();
    assert!(status.success(), "{scene}: see above");
}

/// Sends until the flow is stopped.
struct Frames;

impl Operator for Frames {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let mut frame = ports.output.blank().await?;
        frame.fill_from(&[7; 1024]).await?;
        ports.output.send(frame).await?;
        Ok(())
    }
}

/// A flow with one slow operator, a fan-out and a replayed section.
fn busy(device: &Device, watch: &Observe) -> Running {
    let mut flow = Flow::new("busy");
    let read = flow.add("read", Frames);
    let one = flow.add("one", Increment).on(device);
    let two = flow.add("two", Increment).on(device);
    let slow = flow.add(
        "slow",
        map(async |data: Envelope<u32>| {
            std::thread::sleep(Duration::from_millis(8));
            data.read().await.map(|data| data[0])
        }),
    );
    let slow = slow.on_own_thread();
    let fast = flow.add("fast", sink(async |data: Envelope<u32>| data.read().await.map(drop)));
    let log = flow.add("<img src=x onerror=alert(1)>", sink(async |_: u32| Ok(())));
    let hub = HubOptions::bounded(4).envelopes(6).envelope_bytes(4096);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, two.input, hub);
    flow.connect_with(two.output, [slow.input, fast.input], hub);
    flow.connect_with(slow.output, log.input, HubOptions::bounded(4));
    flow.replay("both", (&one, &two)).buckets([1024]).at_start();
    flow.observe(watch);
    flow.spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Node and Chromium: `.ci/full page`"]
async fn a_busy_flow() {
    let watch = Observe::new().record(65_536);
    let running = busy(&emulated(), &watch);
    look(&watch, "busy").await;
    running.stop();
    running.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Node and Chromium: `.ci/full page`"]
async fn a_failed_flow() {
    let watch = Observe::new().record(65_536);
    let mut flow = Flow::new("before");
    let read = flow.add("read", SendEach::new(vec![vec![1_u32]]));
    let print = flow.add("print", sink(async |_: Envelope<u32>| Ok(())));
    flow.connect_with(read.output, print.input, HubOptions::bounded(1).envelope_bytes(4));
    flow.observe(&watch);
    flow.run().await.unwrap();
    let mut flow = Flow::new("broken");
    let mut left = 300;
    let pace = move || {
        left -= 1;
        async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            Ok((left > 0).then_some(left))
        }
    };
    let read = flow.add("read", source(pace));
    let check = flow.add("check", map(async |number: i32| Ok(number)));
    let print = flow.add(
        "print",
        sink(async |number: i32| if number == 1 { Err("the printer is out of paper".into()) } else { Ok(()) }),
    );
    flow.connect(read.output, check.input);
    flow.connect(check.output, print.input);
    flow.observe(&watch);
    flow.run().await.unwrap_err();
    look(&watch, "failed").await;
}

#[derive(Ports)]
struct JoinPorts {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
}

/// Takes one of each.
struct Join;

impl Operator for Join {
    type Ports = JoinPorts;

    async fn compute(&mut self, ports: &mut JoinPorts, _cx: &mut Cx) -> Result<()> {
        ports.left.take()?;
        ports.right.take()?;
        Ok(())
    }
}

#[derive(Ports)]
struct SplitPorts {
    #[input]
    numbers: Input<u32>,
    #[output]
    even: Output<u32>,
    #[output]
    odd: Output<u32>,
}

/// Numbers above 100 are all sent one way.
struct Split;

impl Operator for Split {
    type Ports = SplitPorts;

    async fn compute(&mut self, ports: &mut SplitPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.numbers.take()?;
        let to = if number > 100 || number.is_multiple_of(2) { &mut ports.even } else { &mut ports.odd };
        to.send(number).await?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Node and Chromium: `.ci/full page`"]
async fn a_stalled_flow() {
    let watch = Observe::new().record(65_536);
    let mut flow = Flow::new("join");
    let mut next = 0;
    let numbers = flow.add(
        "numbers",
        source(move || {
            next += 1;
            std::future::ready(Ok(Some(next)))
        }),
    );
    let split = flow.add("split", Split);
    let join = flow.add("join", Join);
    flow.connect(numbers.output, split.numbers);
    flow.connect(split.even, join.left);
    flow.connect(split.odd, join.right);
    flow.observe(&watch);
    assert!(flow.run().await.unwrap_err().is_stalled());
    look(&watch, "stalled").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Node and Chromium: `.ci/full page`"]
async fn a_flow_of_very_many_operators() {
    let watch = Observe::new();
    let mut flow = Flow::new("many");
    let first = flow.add("stage 0", map(async |n: u64| Ok(n)));
    let mut last = first.output;
    for at in 1..1000 {
        let next = flow.add(format!("{} {at}", ["stage", "other"][at / 500]), map(async |n: u64| Ok(n)));
        flow.connect(last, next.input);
        last = next.output;
    }
    let end = flow.add("end", sink(async |_: u64| Ok(())));
    flow.connect(last, end.input);
    let numbers = flow.ingress("numbers", first.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    look(&watch, "many").await;
    drop(numbers);
    running.await.unwrap();
}
