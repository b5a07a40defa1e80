//! Waits at ports that an operator gives up, in a `select!` or by a timeout, and what it waits for after that: neither a pause nor a
//! step nor a period is taken for the end of the flow, and a deadlock or a quiet loop that comes later is found.

use std::{
    future::ready,
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::*;
use futures::FutureExt;
use tokio::time::{sleep, timeout};
use wakeline::{Service, condition::every, prelude::*};

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

#[derive(Ports)]
struct AsksPorts {
    #[input(optional)]
    own: Input<u32>,
    #[input(optional)]
    other: Input<u32>,
    #[output(optional)]
    out: Output<u32>,
}

/// What is given up first, and what the operator waits for in the same poll.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    AsksAndReceives,
    AsksAndSends,
    ReceivesAndSends,
}

/// Waits that are given up by a timeout, with nothing between them and the next wait that would make another poll.
struct Asks(Then, Arc<Mutex<Option<Service<u32, u32>>>>);

impl Operator for Asks {
    type Ports = AsksPorts;

    async fn run(&mut self, ports: &mut AsksPorts, _cx: &mut Cx) -> Result<()> {
        const SHORTLY: Duration = Duration::from_millis(20);
        let service = self.1.lock().unwrap().take().unwrap();
        if self.0 == Then::ReceivesAndSends {
            assert!(timeout(SHORTLY, ports.other.recv()).await.is_err());
        } else {
            assert!(timeout(SHORTLY, service.ask(1)).await.is_err());
        }
        drop(service);
        if self.0 == Then::AsksAndReceives {
            assert_eq!(ports.own.recv().await?, None, "its loop has gone quiet");
            return Ok(());
        }
        ports.out.send(1).await?;
        ports.out.send(2).await
    }

    async fn compute(&mut self, _ports: &mut AsksPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_was_given_up_in_the_same_poll_is_none() {
    for then in [Then::AsksAndReceives, Then::AsksAndSends, Then::ReceivesAndSends] {
        let mut flow = Flow::new("given up");
        let service = Arc::new(Mutex::new(None));
        let asks = flow.add("asks", Asks(then, service.clone()));
        flow.connect_with(asks.out, asks.own, Hub::bounded(1));
        // In a run without an end where it is waited for.
        let never = source(move || async move {
            if then == Then::ReceivesAndSends {
                std::future::pending::<()>().await;
            }
            Ok(None::<u32>)
        });
        let never = flow.add("never", never);
        flow.connect(never.output, asks.other);
        let slow = flow.add(
            "slow",
            map(async |number: u32| {
                sleep(Duration::from_secs(3)).await;
                Ok(number)
            }),
        );
        *service.lock().unwrap() = Some(flow.service_with("service", slow.input, slow.output, Hub::bounded(1)));
        let beside = flow.add("beside", sink(|_: u32| ready(Ok(()))));
        let held = flow.ingress("held", beside.input);
        let mut running = flow.spawn().unwrap();
        let handle = running.handle();
        let over = timeout(Duration::from_secs(2), &mut running).await;
        if then == Then::AsksAndReceives {
            assert!(over.is_err() && handle.failure().is_none(), "its answer comes later: {over:?}");
            drop(held);
            within(running).await.unwrap();
        } else {
            let error = over.unwrap().unwrap_err().to_string();
            assert!(error.contains("`asks` waits for room in hub `asks.out -> asks.own`"), "{then:?}: {error}");
            assert!(!error.contains("service") && !error.contains("never.output"), "{then:?}: {error}");
        }
    }
}
