//! A group of operators that begins to wait only for itself because of what another operator does, long after its
//! members have begun to wait, is still found (Q8).

use std::{future::ready, time::Duration};

use common::*;
use tokio::time::{sleep, timeout};
use wakeline::prelude::*;

#[derive(Ports)]
struct StuckPorts {
    #[input(optional)]
    own: Input<u32>,
    #[output(optional)]
    out: Output<u32>,
    #[output(optional)]
    other: Output<u32>,
}

/// Fills the hub to another operator, and waits for room in its own.
struct Stuck;

impl Operator for Stuck {
    type Ports = StuckPorts;

    async fn run(&mut self, ports: &mut StuckPorts, _cx: &mut Cx) -> Result<()> {
        ports.other.send(1).await?;
        ports.out.send(1).await?;
        ports.out.send(2).await?;
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut StuckPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[derive(Ports)]
struct OtherPorts {
    #[input(optional)]
    input: Input<u32>,
}

/// After a delay it takes its message or leaves it, and then ends or continues in the same run.
#[derive(Clone, Copy, Debug)]
struct Other {
    takes: bool,
    goes_on: bool,
}

impl Operator for Other {
    type Ports = OtherPorts;

    async fn run(&mut self, ports: &mut OtherPorts, _cx: &mut Cx) -> Result<()> {
        sleep(LATER).await;
        if self.takes {
            assert_eq!(ports.input.try_take()?, Some(1));
        }
        if self.goes_on {
            sleep(FOR_EVER).await;
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut OtherPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// Later than the flow's own check for stalls.
const LATER: Duration = Duration::from_millis(300);
const FOR_EVER: Duration = Duration::from_secs(100_000);
/// Limit for finding the stall.
const FOUND: Duration = Duration::from_secs(2);

/// Runs the flow with an ingress that is kept, so that the flow does not count as idle. Returns the stall's message.
async fn stalls(mut flow: Flow, stepped: bool) -> String {
    let beside = flow.add("beside", sink(|_: u32| ready(Ok(()))));
    let held = flow.ingress("held", beside.input);
    let over = if stepped {
        let mut steps = flow.steps().unwrap();
        timeout(FOUND, async { while steps.next().await.is_some() {} }).await.expect("a stall is found");
        steps.run_on().await
    } else {
        timeout(FOUND, flow.spawn().unwrap()).await.expect("a stall is found")
    };
    drop(held);
    let error = over.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    error.to_string()
}

#[tokio::test(start_paused = true)]
async fn q8_an_operator_that_ends_or_takes_a_message_may_leave_a_deadlock() {
    for (takes, goes_on) in [(false, false), (true, false), (true, true)] {
        for stepped in [false, true] {
            let mut flow = Flow::new("closed late");
            let stuck = flow.add("stuck", Stuck);
            let other = flow.add("other", Other { takes, goes_on });
            flow.connect_with(stuck.out, stuck.own, HubOptions::bounded(1));
            flow.connect_with(stuck.other, other.input, HubOptions::bounded(1));
            let text = stalls(flow, stepped).await;
            assert!(
                text.contains("`stuck` waits for room in hub `stuck.out -> stuck.own`"),
                "{takes} {goes_on}: {text}"
            );
        }
    }
}

#[derive(Ports)]
struct BlanksPorts {
    #[output(optional, envelope_bytes = 4, envelopes = 1)]
    out: Output<Envelope<u8>>,
    #[output(optional, envelope_bytes = 4, envelopes = 1)]
    away: Output<Envelope<u8>>,
}

/// Keeps the one envelope of a hub and asks for another.
struct Blanks;

impl Operator for Blanks {
    type Ports = BlanksPorts;

    async fn run(&mut self, ports: &mut BlanksPorts, _cx: &mut Cx) -> Result<()> {
        let mut away = ports.away.blank().await?;
        away.set_len(1)?;
        ports.away.send(away).await?;
        let _first = ports.out.blank().await?;
        ports.out.blank().await.map(drop)
    }

    async fn compute(&mut self, _ports: &mut BlanksPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn q8_an_envelope_that_comes_back_from_outside_may_leave_a_deadlock() {
    for stepped in [false, true] {
        let mut flow = Flow::new("closed late");
        let blanks = flow.add("blanks", Blanks);
        let end = flow.add("end", sink(|_: Envelope<u8>| ready(Ok(()))));
        flow.connect(blanks.out, end.input);
        let mut egress = flow.egress("away", blanks.away);
        let outside = tokio::spawn(async move {
            let envelope = egress.recv().await;
            sleep(LATER).await;
            drop(envelope);
            sleep(FOR_EVER).await;
            drop(egress);
        });
        let text = stalls(flow, stepped).await;
        assert!(text.contains("`blanks` waits for a blank envelope"), "{text}");
        outside.abort();
    }
}
