//! Envelopes outside the flow that they belong to: the flow waits for them, wherever they are.

use std::cell::RefCell;

use common::{
    chunks::{DrainPorts, Fill},
    *,
};
use futures::FutureExt;
use wakeline::{Egress, Ingress, Running, flow::Handle, prelude::*};

#[derive(Ports)]
struct OneEnvelopePorts {
    #[output(envelopes = 1, envelope_bytes = 16)]
    output: Output<Envelope<u32>>,
}

/// Sends its only envelope this many times.
struct Sends(u32);

impl Operator for Sends {
    type Ports = OneEnvelopePorts;

    async fn compute(&mut self, ports: &mut OneEnvelopePorts, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.output.blank().await?;
        envelope.set_len(1)?;
        self.0 -= 1;
        envelope.as_mut_slice()?[0] = self.0;
        if self.0 == 0 {
            cx.finish();
        }
        ports.output.send(envelope).await?;
        Ok(())
    }
}

fn sends(times: u32) -> (Running, Egress<Envelope<u32>>) {
    let mut flow = Flow::new("sends");
    let send = flow.add("send", Sends(times));
    let out = flow.egress("out", send.output);
    (flow.spawn().unwrap(), out)
}

/// A flow that an envelope passes through.
struct Through {
    running: Running,
    to: Ingress<Envelope<u32>>,
    from: Egress<Envelope<u32>>,
}

impl Through {
    fn new(name: &str) -> Self {
        let mut flow = Flow::new(name);
        let pass = flow.add("pass", pass_on::<Envelope<u32>>());
        let to = flow.ingress("to", pass.input);
        let from = flow.egress("from", pass.output);
        Self { running: flow.spawn().unwrap(), to, from }
    }

    async fn pass(&mut self, envelope: Envelope<u32>) -> Envelope<u32> {
        within(self.to.send(envelope)).await.unwrap();
        within(self.from.recv()).await.unwrap()
    }

    async fn end(self) {
        drop((self.to, self.from));
        within(self.running).await.unwrap();
    }
}

/// Checks that the flow, which can only continue with the envelope, neither ends nor stalls.
async fn waits_for_the_envelope(running: &mut Running) {
    until("it waits", || running.status().iter().all(|status| !status.running || !status.waits_for.is_empty())).await;
    for _ in 0..64 {
        tokio::task::yield_now().await;
    }
    if let Some(end) = running.now_or_never() {
        panic!("the flow has ended: {end:?}");
    }
}

#[tokio::test]
async fn a_flow_waits_for_an_envelope_that_passes_through_others() {
    for flows in [0, 1, 2, 20] {
        let (mut running, mut out) = sends(4);
        let mut others: Vec<_> = (0..flows).map(|at| Through::new(&format!("flow {at}"))).collect();
        for wanted in (0..4).rev() {
            let mut envelope = within(out.recv()).await.unwrap();
            for other in &mut others {
                envelope = other.pass(envelope).await;
            }
            assert_eq!(envelope.as_slice().unwrap(), [wanted]);
            if wanted > 0 {
                waits_for_the_envelope(&mut running).await;
            }
        }
        assert!(within(out.recv()).await.is_none());
        within(running).await.unwrap();
        for other in others {
            other.end().await;
        }
    }
}

/// Once the envelope is dropped, the flow does not wait for it.
#[tokio::test]
async fn an_envelope_that_passes_through_a_flow_twice_counts_once() {
    let (mut running, mut out) = sends(2);
    let [mut first, mut second] = [Through::new("first"), Through::new("second")];
    let mut envelope = within(out.recv()).await.unwrap();
    for _ in 0..3 {
        envelope = first.pass(envelope).await;
        envelope = first.pass(envelope).await;
        envelope = second.pass(envelope).await;
        waits_for_the_envelope(&mut running).await;
    }
    drop(envelope);
    drop(within(out.recv()).await.unwrap());
    drop(out);
    within(running).await.unwrap();
    first.end().await;
    second.end().await;
}

struct SendsTwice;

impl Operator for SendsTwice {
    type Ports = OneEnvelopePorts;

    async fn compute(&mut self, ports: &mut OneEnvelopePorts, cx: &mut Cx) -> Result<()> {
        for _ in 0..2 {
            let envelope = ports.output.blank().await?;
            ports.output.send(envelope).await?;
        }
        cx.finish();
        Ok(())
    }
}

struct Stops(Handle);

impl Message for Stops {
    fn size_in_bytes(&self) -> usize {
        self.0.stop();
        4
    }
}

#[tokio::test]
async fn an_envelope_that_a_flow_refuses_stays_outside() {
    let mut flow = Flow::new("loop");
    let send = flow.add("send", SendsTwice);
    let end = flow.add("end", sink(|_: (Envelope<u32>, Stops)| std::future::ready(Ok(()))));
    let mut out = flow.egress("out", send.output);
    let back = flow.ingress("back", end.input);
    let mut running = flow.spawn().unwrap();
    let envelope = within(out.recv()).await.unwrap();
    waits_for_the_envelope(&mut running).await;
    let stops = (envelope, Stops(running.handle()));
    let refused = within(back.send(stops)).await.unwrap_err().into_message().unwrap();
    assert!(running.handle().is_stopping());
    drop(back);
    waits_for_the_envelope(&mut running).await;
    drop(refused);
    drop(within(out.recv()).await.unwrap());
    within(running).await.unwrap();
}

thread_local! {
    static LAST: RefCell<Option<Envelope<u32>>> = const { RefCell::new(None) };
}

#[tokio::test]
async fn an_envelope_dropped_at_a_threads_end_lets_every_flow_continue() {
    let (mut running, mut out) = sends(2);
    let mut others: Vec<_> = (0..3).map(|at| Through::new(&format!("flow {at}"))).collect();
    let mut envelope = within(out.recv()).await.unwrap();
    for other in &mut others {
        envelope = other.pass(envelope).await;
    }
    waits_for_the_envelope(&mut running).await;
    std::thread::spawn(|| LAST.set(Some(envelope))).join().unwrap();
    drop(within(out.recv()).await.unwrap());
    within(running).await.unwrap();
    for other in others {
        other.end().await;
    }
}

#[tokio::test]
async fn an_envelope_outlives_its_flows() {
    let (running, mut out) = sends(1);
    let mut envelope = within(out.recv()).await.unwrap();
    within(running).await.unwrap();
    for at in 0..50 {
        let mut other = Through::new(&format!("flow {at}"));
        envelope = other.pass(envelope).await;
        other.running.abort();
        within(other.running).await.unwrap_err();
    }
    assert_eq!(envelope.as_slice().unwrap(), [0]);
}

// --- chunk hubs

#[derive(Ports)]
struct SidePorts {
    #[input]
    ticks: Input<u32>,
    #[consume(optional)]
    numbers: Consume<u32>,
}

struct Side;

impl Operator for Side {
    type Ports = SidePorts;

    async fn compute(&mut self, ports: &mut SidePorts, _cx: &mut Cx) -> Result<()> {
        ports.ticks.take().map(drop)
    }
}

fn host() -> Device {
    Device::host()
}

/// Two flows use the envelopes of one hub. An envelope that is taken out by hand lets both continue when it returns.
#[tokio::test]
async fn every_flow_of_a_hub_waits_for_an_envelope_that_was_taken_out() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(1).build().unwrap();
    let mut consume = hub.consume(&host()).unwrap();
    let mut first = Flow::new("first");
    let side = first.add("side", Side);
    first.link(side.numbers, &hub);
    let ticks = first.ingress("ticks", side.ticks);
    let mut produce = Some(hub.produce(&host()).unwrap());
    let first = first.spawn().unwrap();
    ticks.send(0).await.unwrap();
    until("`side` has run", || first.status()[0].runs == 1).await;
    let mut second = Flow::new("second");
    let fill = second.add("fill", Fill::each(0..3));
    second.link(fill.numbers, &hub);
    let mut second = second.spawn().unwrap();
    for _ in 0..2 {
        let envelope = within(consume.next()).await.unwrap().unwrap().into_envelope().unwrap();
        // The links made by hand are dropped, and another one is made later.
        drop((consume, produce.take()));
        waits_for_the_envelope(&mut second).await;
        consume = hub.consume(&host()).unwrap();
        drop(envelope);
    }
    drop(within(consume.next()).await.unwrap().unwrap().into_envelope().unwrap());
    drop((consume, ticks));
    within(first).await.unwrap();
    within(second).await.unwrap();
}

struct Refuses;

impl Operator for Refuses {
    type Ports = DrainPorts;

    fn may_run(&mut self, _ports: &DrainPorts, _cx: &Cx) -> bool {
        false
    }

    async fn compute(&mut self, _ports: &mut DrainPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// An envelope in a hub of the flow is not outside, so the flow can be idle.
#[tokio::test]
async fn an_envelope_put_back_into_its_hub_delays_no_flow() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(1).build().unwrap();
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
    let mut flow = Flow::new("refuses");
    let refuses = flow.add("refuses", Refuses);
    flow.link(refuses.numbers, &hub);
    let mut running = flow.spawn().unwrap();
    waits_for_the_envelope(&mut running).await;
    produce.with(async |blank| blank.fill_from(&[7]).await).await.unwrap();
    let envelope = within(consume.next()).await.unwrap().unwrap().into_envelope().unwrap();
    drop(consume);
    waits_for_the_envelope(&mut running).await;
    within(produce.send(envelope, ())).await.unwrap();
    drop(produce);
    let stalled = within(running).await.unwrap_err();
    assert!(stalled.is_stalled(), "{stalled}");
}
