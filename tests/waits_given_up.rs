//! Waits at ports that an operator cancels, in a `select!` or by a timeout, and its next waits. A pause, a step or a
//! period must not be mistaken for the end of the flow; a later deadlock or idle loop must be detected.

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

/// One operator sends all its messages in one run. The other one also waits shortly for a hint in each run.
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
    flow.connect_with(sends.output, takes.input, HubOptions::bounded(2));
    flow.connect(sends.hints, takes.hints);
    flow
}

#[tokio::test(start_paused = true)]
async fn a_pause_after_a_cancelled_wait_is_no_stall() {
    let mut running = hinted().spawn().unwrap();
    assert!(timeout(Duration::from_millis(50), &mut running).await.is_err());
    running.pause();
    assert!(timeout(Duration::from_secs(1000), &mut running).await.is_err(), "it is paused");
    running.resume();
    assert_eq!(within(running).await.unwrap().operator("takes").unwrap().runs, u64::from(MESSAGES));
}

#[derive(Ports)]
struct OwnLoopPorts {
    #[input(optional)]
    own: Input<u32>,
    #[output(optional)]
    output: Output<u32>,
}

/// Runs this many times, and cancels a wait at the end of each run.
struct Cancels(u32);

impl Operator for Cancels {
    type Ports = OwnLoopPorts;

    async fn run(&mut self, ports: &mut OwnLoopPorts, cx: &mut Cx) -> Result<()> {
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

    async fn compute(&mut self, _ports: &mut OwnLoopPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// `a` is stepped or paused beside `b`, which ends at once.
#[tokio::test(start_paused = true)]
async fn a_cancelled_wait_does_not_end_a_stepped_or_paused_flow() {
    for stepped in [false, true] {
        let mut flow = Flow::new("looks");
        for (name, runs) in [("a", 5), ("b", 0)] {
            let cancels = flow.add(name, Cancels(runs));
            flow.connect(cancels.output, cancels.own);
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

/// The wait for the next period begins in the same poll in which the other wait is cancelled.
#[tokio::test(start_paused = true)]
async fn a_cancelled_wait_before_a_period_does_not_end_the_flow() {
    let mut flow = Flow::new("ticks");
    struct Ticks(u32);
    impl Operator for Ticks {
        type Ports = OwnLoopPorts;
        async fn compute(&mut self, ports: &mut OwnLoopPorts, cx: &mut Cx) -> Result<()> {
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

/// One wait, for example for a shutdown, stays registered while others end or are cancelled.
#[tokio::test(start_paused = true)]
async fn a_wait_that_stays_registered_hides_no_deadlock_and_no_idle_loop() {
    #[derive(Ports)]
    struct KeepsWaitPorts {
        #[input(optional)]
        own: Input<u32>,
        #[input(optional)]
        other: Input<u32>,
        #[output(optional)]
        output: Output<u32>,
    }

    struct KeepsWait {
        deadlock: bool,
    }

    impl Operator for KeepsWait {
        type Ports = KeepsWaitPorts;

        async fn run(&mut self, ports: &mut KeepsWaitPorts, _cx: &mut Cx) -> Result<()> {
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
                return Ok(ports.output.send(2).await?);
            }
            while ports.own.recv().await?.is_some() {}
            Ok(())
        }

        async fn compute(&mut self, _ports: &mut KeepsWaitPorts, _cx: &mut Cx) -> Result<()> {
            Ok(())
        }
    }

    for deadlock in [true, false] {
        let mut flow = Flow::new("kept");
        let kept = flow.add("kept", KeepsWait { deadlock });
        flow.connect_with(kept.output, kept.own, HubOptions::bounded(1));
        // An operator that waits for a message during a run counts as waiting at all its inputs.
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

/// The wait that is cancelled, and the wait that begins in the same poll.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Waits {
    AsksThenReceives,
    AsksThenSends,
    ReceivesThenSends,
}

/// Cancels a wait by a timeout, and begins the next one in the same poll.
struct Asks(Waits, Arc<Mutex<Option<Service<u32, u32>>>>);

impl Operator for Asks {
    type Ports = AsksPorts;

    async fn run(&mut self, ports: &mut AsksPorts, _cx: &mut Cx) -> Result<()> {
        const SHORTLY: Duration = Duration::from_millis(20);
        let service = self.1.lock().unwrap().take().unwrap();
        if self.0 == Waits::ReceivesThenSends {
            assert!(timeout(SHORTLY, ports.other.recv()).await.is_err());
        } else {
            assert!(timeout(SHORTLY, service.ask(1)).await.is_err());
        }
        drop(service);
        if self.0 == Waits::AsksThenReceives {
            assert_eq!(ports.own.recv().await?, None, "its loop is idle");
            return Ok(());
        }
        ports.out.send(1).await?;
        ports.out.send(2).await?;
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut AsksPorts, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_cancelled_in_the_same_poll_does_not_count() {
    for waits in [Waits::AsksThenReceives, Waits::AsksThenSends, Waits::ReceivesThenSends] {
        let mut flow = Flow::new("given up");
        let service = Arc::new(Mutex::new(None));
        let asks = flow.add("asks", Asks(waits, service.clone()));
        flow.connect_with(asks.out, asks.own, HubOptions::bounded(1));
        // Stays in its run in the case that waits for its message.
        let never = source(move || async move {
            if waits == Waits::ReceivesThenSends {
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
        *service.lock().unwrap() = Some(flow.service_with("service", slow.input, slow.output, HubOptions::bounded(1)));
        let beside = flow.add("beside", sink(|_: u32| ready(Ok(()))));
        let held = flow.ingress("held", beside.input);
        let mut running = flow.spawn().unwrap();
        let handle = running.handle();
        let over = timeout(Duration::from_secs(2), &mut running).await;
        if waits == Waits::AsksThenReceives {
            assert!(over.is_err() && handle.failure().is_none(), "its response comes later: {over:?}");
            drop(held);
            within(running).await.unwrap();
        } else {
            let error = over.unwrap().unwrap_err().to_string();
            assert!(error.contains("`asks` waits for room in hub `asks.out -> asks.own`"), "{waits:?}: {error}");
            assert!(!error.contains("service") && !error.contains("never.output"), "{waits:?}: {error}");
        }
    }
}
