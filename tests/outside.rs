//! Envelopes outside of the flow that they belong to: the flow waits for them, wherever they are.

use std::cell::RefCell;

use common::{
    chunks::{DrainPorts, Fill},
    *,
};
use futures::FutureExt;
use wakeline::{Egress, Ingress, Running, flow::Handle, prelude::*};

#[derive(Ports)]
struct LendPorts {
    #[output(envelopes = 1, envelope_bytes = 16)]
    output: Output<Envelope<u32>>,
}

/// Sends so many envelopes, and has only one.
struct Lend(u32);

impl Operator for Lend {
    type Ports = LendPorts;

    async fn compute(&mut self, ports: &mut LendPorts, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.output.blank().await?;
        envelope.set_len(1)?;
        self.0 -= 1;
        envelope.as_mut_slice()?[0] = self.0;
        if self.0 == 0 {
            cx.finish();
        }
        ports.output.send(envelope).await
    }
}

/// A flow that lends one envelope so many times.
fn lends(times: u32) -> (Running, Egress<Envelope<u32>>) {
    let mut flow = Flow::new("lends");
    let lend = flow.add("lend", Lend(times));
    let out = flow.egress("out", lend.output);
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

/// Nothing but the envelope could make the flow go on, and still it neither ends nor stalls.
async fn is_held(running: &mut Running) {
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
        let (mut running, mut out) = lends(4);
        let mut others: Vec<_> = (0..flows).map(|at| Through::new(&format!("flow {at}"))).collect();
        for wanted in (0..4).rev() {
            let mut envelope = within(out.recv()).await.unwrap();
            for other in &mut others {
                envelope = other.pass(envelope).await;
            }
            assert_eq!(envelope.as_slice().unwrap(), [wanted]);
            if wanted > 0 {
                is_held(&mut running).await;
            }
        }
        assert!(within(out.recv()).await.is_none());
        within(running).await.unwrap();
        for other in others {
            other.end().await;
        }
    }
}

/// In and out of one flow again and again: it is waited for as one envelope, and not at all once it is dropped.
#[tokio::test]
async fn an_envelope_that_passes_twice_is_waited_for_once() {
    let (mut running, mut out) = lends(2);
    let [mut first, mut second] = [Through::new("first"), Through::new("second")];
    let mut envelope = within(out.recv()).await.unwrap();
    for _ in 0..3 {
        envelope = first.pass(envelope).await;
        envelope = first.pass(envelope).await;
        envelope = second.pass(envelope).await;
        is_held(&mut running).await;
    }
    drop(envelope);
    drop(within(out.recv()).await.unwrap());
    drop(out);
    within(running).await.unwrap();
    first.end().await;
    second.end().await;
}

/// Sends two envelopes in one run, and has only one.
struct LendTwice;

impl Operator for LendTwice {
    type Ports = LendPorts;

    async fn compute(&mut self, ports: &mut LendPorts, cx: &mut Cx) -> Result<()> {
        for _ in 0..2 {
            let envelope = ports.output.blank().await?;
            ports.output.send(envelope).await?;
        }
        cx.finish();
        Ok(())
    }
}

/// Stops a flow as it is sent.
struct Stops(Handle);

impl Message for Stops {
    fn size_in_bytes(&self) -> usize {
        self.0.stop();
        4
    }
}

/// One that a flow refuses on its way in is as much outside as before.
#[tokio::test]
async fn an_envelope_that_a_flow_refuses_keeps_its_marks() {
    let mut flow = Flow::new("loop");
    let lend = flow.add("lend", LendTwice);
    let end = flow.add("end", sink(|_: (Envelope<u32>, Stops)| std::future::ready(Ok(()))));
    let mut out = flow.egress("out", lend.output);
    let back = flow.ingress("back", end.input);
    let mut running = flow.spawn().unwrap();
    let envelope = within(out.recv()).await.unwrap();
    is_held(&mut running).await;
    let stops = (envelope, Stops(running.handle()));
    let refused = within(back.send(stops)).await.unwrap_err().into_message().unwrap();
    assert!(running.handle().is_stopping());
    drop(back);
    is_held(&mut running).await;
    drop(refused);
    drop(within(out.recv()).await.unwrap());
    within(running).await.unwrap();
}

thread_local! {
    static LAST: RefCell<Option<Envelope<u32>>> = const { RefCell::new(None) };
}

#[tokio::test]
async fn the_end_of_a_thread_lets_every_flow_go_on() {
    let (mut running, mut out) = lends(2);
    let mut others: Vec<_> = (0..3).map(|at| Through::new(&format!("flow {at}"))).collect();
    let mut envelope = within(out.recv()).await.unwrap();
    for other in &mut others {
        envelope = other.pass(envelope).await;
    }
    is_held(&mut running).await;
    std::thread::spawn(|| LAST.set(Some(envelope))).join().unwrap();
    drop(within(out.recv()).await.unwrap());
    within(running).await.unwrap();
    for other in others {
        other.end().await;
    }
}

/// An envelope outlives all the flows that it has passed through.
#[tokio::test]
async fn an_envelope_outlives_its_flows() {
    let (running, mut out) = lends(1);
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

// --- hubs of chunks

#[derive(Ports)]
struct SidePorts {
    #[input]
    ticks: Input<u32>,
    #[consume(optional)]
    numbers: Consume<u32>,
}

/// Has a link to a hub, and does nothing with it.
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

/// Two flows use the envelopes of one hub. One that is taken out by hand makes either go on, as it comes home.
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
    until("it has run", || first.status()[0].runs == 1).await;
    let mut second = Flow::new("second");
    let fill = second.add("fill", Fill::each(0..3));
    second.link(fill.numbers, &hub);
    let mut second = second.spawn().unwrap();
    for _ in 0..2 {
        let envelope = within(consume.next()).await.unwrap().unwrap().into_envelope().unwrap();
        // The links by hand are gone, and another is made later.
        drop((consume, produce.take()));
        is_held(&mut second).await;
        consume = hub.consume(&host()).unwrap();
        drop(envelope);
    }
    drop(within(consume.next()).await.unwrap().unwrap().into_envelope().unwrap());
    drop((consume, ticks));
    within(first).await.unwrap();
    within(second).await.unwrap();
}

/// Takes no chunk.
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

/// An envelope that lies in a hub of the flow is not outside: the flow may come to rest.
#[tokio::test]
async fn an_envelope_that_was_put_back_into_its_hub_holds_no_flow() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(1).build().unwrap();
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
    let mut flow = Flow::new("refuses");
    let refuses = flow.add("refuses", Refuses);
    flow.link(refuses.numbers, &hub);
    let mut running = flow.spawn().unwrap();
    is_held(&mut running).await;
    produce.with(async |blank| blank.fill_from(&[7]).await).await.unwrap();
    let envelope = within(consume.next()).await.unwrap().unwrap().into_envelope().unwrap();
    drop(consume);
    is_held(&mut running).await;
    within(produce.send(envelope, ())).await.unwrap();
    drop(produce);
    let stalled = within(running).await.unwrap_err();
    assert!(stalled.is_stalled(), "{stalled}");
}
