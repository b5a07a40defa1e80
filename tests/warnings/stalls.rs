//! Operators that wait only for each other.

use super::*;

#[derive(Ports)]
struct JoinPorts {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
    #[output]
    out: Output<u32>,
}

/// Takes one of each, and sends their sum.
struct Join;

impl Operator for Join {
    type Ports = JoinPorts;

    async fn compute(&mut self, ports: &mut JoinPorts, _cx: &mut Cx) -> Result<()> {
        let (left, right) = (ports.left.take()?, ports.right.take()?);
        ports.out.send(left + right).await?;
        Ok(())
    }
}

/// A loop in which `join` waits for a message of `back`, and `back` for one of `join`; a timer runs beside it.
pub(super) fn stalls(flow: &mut Flow) {
    let feed = flow.add("feed", source(async || Ok(Some(1))));
    let join = flow.add("join", Join);
    let back = flow.add("back", map(async |n: u32| Ok(n)));
    flow.connect(feed.output, join.left);
    flow.connect(join.out, back.input);
    flow.connect(back.output, join.right);
    let tick = flow.add("tick", source(async || Ok(Some(1)))).when(every(ms(5)));
    let tock = flow.add("tock", sink(async |_: u32| Ok(())));
    flow.connect(tick.output, tock.input);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_is_a_warning_while_it_lasts() {
    let (watch, calls) = watch(Duration::MAX, Duration::from_secs(50));
    let mut flow = Flow::new("stalls");
    stalls(&mut flow);
    flow.set_on_stall(OnStall::Warn);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Stalled, vec!["feed", "join", "back"]), "{warning}");
    assert!(warning.sentence.contains("`back` waits for a message in hub `join.out -> back.input`"), "{warning}");
    let seen = snapshot(&running, |seen| seen.warnings.iter().any(|now| now.since > ms(100))).await;
    assert_eq!((seen.warnings.len(), seen.warning_counts.stalled), (1, 1), "{seen}");
    end(running).await;
    assert!(calls.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_that_fails_the_flow_is_in_its_last_snapshot() {
    let (watch, calls) = watch(Duration::MAX, Duration::MAX);
    let mut flow = Flow::new("fails");
    stalls(&mut flow);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    let error = running.await.unwrap_err();
    assert!(error.is_stalled(), "{error:#}");
    let warning = next(&calls);
    assert_eq!(warning.kind, WarningKind::Stalled);
    let last = handle.snapshot();
    assert_eq!(last.warnings.len(), 1, "{last}");
    assert_eq!(last.warning_counts.stalled, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_switched_off_is_silent() {
    let (watch, calls) = watch(Duration::MAX, Duration::MAX);
    let mut flow = Flow::new("silent");
    stalls(&mut flow);
    flow.observe(&watch.warn_stalled(false));
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    assert!(running.await.unwrap_err().is_stalled());
    let last = handle.snapshot();
    assert!(last.warnings.is_empty() && calls.try_recv().is_err(), "{last}");
}
