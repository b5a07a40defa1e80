//! Waits at ports that an operator gives up, in a `select!` or by a timeout, and what it waits for after that: neither a pause nor a
//! step nor a period is taken for the end of the flow, and a deadlock or a quiet loop that comes later is found.

use std::{future::ready, pin::pin, time::Duration};

use common::*;
use futures::FutureExt;
use tokio::time::{sleep, timeout};
use wakeline::{condition::every, prelude::*};

#[derive(Ports)]
struct HintedPorts {
    #[input]
    input: Input<u32>,
    #[input(optional)]
    hints: Input<u32>,
}

#[derive(Ports)]
struct HintingPorts {
    #[output]
    output: Output<u32>,
    #[output(optional)]
    hints: Output<u32>,
}

const MESSAGES: u32 = 20;

/// One operator sends all of its messages in one run, for another one that looks for a hint as well in each run.
fn hinted() -> Flow {
    let mut flow = Flow::new("hints");
    let sends = flow.add(
        "sends",
        task(|ports: &mut HintingPorts, _| {
            async {
                for number in 0..MESSAGES {
                    ports.output.send(number).await?;
                }
                Ok(())
            }
            .boxed()
        }),
    );
    struct Takes;
    impl Operator for Takes {
        type Ports = HintedPorts;
        async fn compute(&mut self, ports: &mut HintedPorts, _cx: &mut Cx) -> Result<()> {
            ports.input.take()?;
            let _ = timeout(Duration::from_millis(20), ports.hints.recv()).await;
            Ok(())
        }
    }
    let takes = flow.add("takes", Takes);
    flow.connect_with(sends.output, takes.input, Hub::bounded(2));
    flow.connect(sends.hints, takes.hints);
    flow
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_given_up_makes_a_pause_no_stall() {
    let mut running = hinted().spawn().unwrap();
    assert!(timeout(Duration::from_millis(50), &mut running).await.is_err());
    running.pause();
    assert!(timeout(Duration::from_secs(1000), &mut running).await.is_err(), "it is paused");
    running.resume();
    assert_eq!(within(running).await.unwrap().operator("takes").unwrap().runs, u64::from(MESSAGES));
}

#[derive(Ports)]
struct LooksPorts {
    #[input(optional)]
    own: Input<u32>,
    #[output(optional)]
    output: Output<u32>,
}

/// Runs so often, and ends each run with a wait that is given up at once.
struct Looks(u32);

impl Operator for Looks {
    type Ports = LooksPorts;

    async fn run(&mut self, ports: &mut LooksPorts, cx: &mut Cx) -> Result<()> {
        while self.0 > 0 && cx.ready(ports).await {
            self.0 -= 1;
            sleep(Duration::from_millis(10)).await;
            tokio::select! {
                biased;
                _ = ports.own.recv() => {}
                () = ready(()) => {}
            }
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut LooksPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// The runs of one that is stepped through beside another one, which ends at once.
#[tokio::test(start_paused = true)]
async fn a_wait_that_is_given_up_ends_no_flow_that_is_stepped_or_paused() {
    for stepped in [false, true] {
        let mut flow = Flow::new("looks");
        for (name, runs) in [("a", 5), ("b", 0)] {
            let looks = flow.add(name, Looks(runs));
            flow.connect(looks.output, looks.own);
        }
        let report = if stepped {
            let mut steps = flow.steps().unwrap();
            let all = async { while steps.next().await.is_some() {} };
            within(all).await;
            within(steps.run_on()).await
        } else {
            let mut running = flow.spawn().unwrap();
            assert!(timeout(Duration::from_millis(25), &mut running).await.is_err());
            running.pause();
            assert!(timeout(Duration::from_secs(1000), &mut running).await.is_err(), "it is paused");
            running.resume();
            within(running).await
        };
        assert_eq!(report.unwrap().operator("a").unwrap().runs, 5, "stepped: {stepped}");
    }
}

/// The next run waits for a period, and its wait begins in the poll in which the other wait was given up.
#[tokio::test(start_paused = true)]
async fn a_wait_that_is_given_up_before_a_period_ends_no_flow() {
    let mut flow = Flow::new("ticks");
    struct Ticks(u32);
    impl Operator for Ticks {
        type Ports = LooksPorts;
        async fn compute(&mut self, ports: &mut LooksPorts, cx: &mut Cx) -> Result<()> {
            tokio::select! {
                biased;
                _ = ports.own.recv() => {}
                () = ready(()) => {}
            }
            self.0 -= 1;
            if self.0 == 0 {
                cx.finish();
            }
            Ok(())
        }
    }
    let ticks = flow.add("ticks", Ticks(5)).when(every(Duration::from_millis(10)));
    flow.connect(ticks.output, ticks.own);
    assert_eq!(within(flow.run()).await.unwrap().operator("ticks").unwrap().runs, 5);
}

/// A wait for a shutdown, say, is kept beside waits that end or are given up.
#[tokio::test(start_paused = true)]
async fn what_stays_registered_hides_no_deadlock_and_no_quiet_loop() {
    #[derive(Ports)]
    struct KeptPorts {
        #[input(optional)]
        own: Input<u32>,
        #[input(optional)]
        other: Input<u32>,
        #[output(optional)]
        output: Output<u32>,
    }

    struct Kept {
        deadlock: bool,
    }

    impl Operator for Kept {
        type Ports = KeptPorts;

        async fn run(&mut self, ports: &mut KeptPorts, _cx: &mut Cx) -> Result<()> {
            let notify = tokio::sync::Notify::new();
            let mut stop = pin!(notify.notified());
            ports.output.send(1).await?;
            for _ in 0..3 {
                tokio::select! {
                    () = &mut stop => {}
                    () = sleep(Duration::from_millis(10)) => {}
                    _ = ports.other.recv(), if self.deadlock => {}
                    _ = ports.own.recv(), if !self.deadlock => {}
                }
            }
            if self.deadlock {
                // Its own hub is full.
                return ports.output.send(2).await;
            }
            while ports.own.recv().await?.is_some() {}
            Ok(())
        }

        async fn compute(&mut self, _ports: &mut KeptPorts, _cx: &mut Cx) -> Result<()> {
            Ok(())
        }
    }

    for deadlock in [true, false] {
        let mut flow = Flow::new("kept");
        let kept = flow.add("kept", Kept { deadlock });
        flow.connect_with(kept.output, kept.own, Hub::bounded(1));
        // One that waits for a message in a run counts as waiting at all of its inputs.
        let silent = Some(flow.ingress("silent", kept.other)).filter(|_| deadlock);
        let outcome = within(flow.run()).await;
        drop(silent);
        assert_eq!(outcome.is_err_and(|error| error.is_stalled()), deadlock);
    }
}
