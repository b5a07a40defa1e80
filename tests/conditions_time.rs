//! Scenarios C6 and C10: periods, to the millisecond, and conditions of which one suffices.

use std::{task::Context, time::Duration};

use common::clock::*;
use common::*;
use tokio::time::Instant;
use wakeline::{
    condition::{Condition, Gate, IntoCondition, MissedTicks, Status, When, all_of, any_of, at_least, count, every},
    prelude::*,
};

/// Records the times of its runs. The first runs last as long as the list says, the others no time.
struct Ticks {
    notes: Notes<()>,
    last: std::slice::Iter<'static, u64>,
}

impl Ticks {
    fn new(notes: &Notes<()>, last: &'static [u64]) -> Self {
        Self { notes: notes.clone(), last: last.iter() }
    }
}

impl Operator for Ticks {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        self.notes.add(());
        tokio::time::sleep(ms(self.last.next().copied().unwrap_or_default())).await;
        Ok(())
    }
}

/// The second run lasts from 10 to 35, so the ticks at 20 and 30 are missed.
#[tokio::test(start_paused = true)]
async fn c6_ticks_missed_because_of_a_long_run() {
    for (missed, wanted) in [
        (MissedTicks::CatchUp, [0, 10, 35, 35, 40, 50, 60]),
        (MissedTicks::Spaced, [0, 10, 35, 45, 55, 65, 75]),
        (MissedTicks::Skip, [0, 10, 35, 40, 50, 60, 70]),
    ] {
        let notes = Notes::begin();
        let mut flow = Flow::new("c6");
        let _ = flow.add("tick", Ticks::new(&notes, &[0, 25])).when(every(ms(10)).missed(missed)).when(count(7));
        within(flow.run()).await.unwrap();
        assert_eq!(notes.times(), wanted, "{missed:?}");
    }
}

/// By default missed ticks are made up for. The first run is immediate, each time that the flow is run.
#[tokio::test(start_paused = true)]
async fn c6_the_first_run_is_immediate_in_every_run_of_the_flow() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c6");
    let _ = flow.add("tick", Ticks::new(&notes, &[25])).when(every(ms(10))).when(count(4));
    for _ in 0..2 {
        within(flow.run()).await.unwrap();
    }
    assert_eq!(notes.times(), [0, 25, 25, 30, 30, 40, 50, 60]);
}

/// The message that the operator needs in addition to the time arrives at 35.
#[tokio::test(start_paused = true)]
async fn c6_ticks_missed_because_of_a_late_message() {
    for (missed, wanted) in [
        (MissedTicks::CatchUp, [0, 35, 35, 35, 40, 50]),
        (MissedTicks::Spaced, [0, 35, 45, 55, 65, 75]),
        (MissedTicks::Skip, [0, 35, 40, 50, 60, 70]),
    ] {
        let notes = Notes::begin();
        let mut flow = Flow::new("c6");
        let send = flow.add("send", at([(0, 0), (35, 1), (35, 2), (35, 3), (35, 4), (35, 5)]));
        let noted = notes.clone();
        let take = flow.add(
            "take",
            runs(move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
                noted.add(ports.input.take()?);
                Ok(())
            }),
        );
        let take = take.clone().when(every(ms(10)).missed(missed));
        flow.connect_with(send.output, take.input, HubOptions::bounded(8));
        within(flow.run()).await.unwrap();
        assert_eq!(notes.all(), wanted.into_iter().zip(0..6).collect::<Vec<_>>(), "{missed:?}");
    }
}

/// The longest possible period does not overflow.
#[tokio::test(start_paused = true)]
async fn c6_a_period_beyond_the_range_of_the_clock() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c6");
    for (name, missed) in
        [("catch up", MissedTicks::CatchUp), ("spaced", MissedTicks::Spaced), ("skip", MissedTicks::Skip)]
    {
        let _ = flow.add(name, Ticks::new(&notes, &[])).when(every(Duration::MAX).missed(missed));
    }
    let running = flow.spawn().unwrap();
    tokio::time::sleep(ms(1000)).await;
    running.stop();
    within(running).await.unwrap();
    assert_eq!(notes.times(), [0, 0, 0]);
}

/// The earlier of two times applies. The run at 30 counts for the longer period.
#[tokio::test(start_paused = true)]
async fn c10_the_earlier_of_two_times() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c10");
    let either = any_of(every(ms(30)), every(ms(20)));
    let _ = flow.add("tick", Ticks::new(&notes, &[])).when(either).when(count(7));
    within(flow.run()).await.unwrap();
    assert_eq!(notes.times(), [0, 20, 30, 40, 60, 80, 90]);
}

/// A condition that has ended does not end the operator while the other one has not.
#[tokio::test(start_paused = true)]
async fn c10_never_does_not_win() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c10");
    let either = any_of(count(2), every(ms(10)));
    let _ = flow.add("tick", Ticks::new(&notes, &[])).when(either).when(count(5));
    within(flow.run()).await.unwrap();
    assert_eq!(notes.times(), [0, 0, 10, 20, 30]);

    let notes = Notes::begin();
    let mut flow = Flow::new("c10");
    let _ = flow.add("tick", Ticks::new(&notes, &[])).when(any_of(count(2), any_of(count(0), count(1))));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("tick").unwrap().runs, 2, "the operator ends when all of them have ended");
}

#[derive(Ports)]
struct BothPorts {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
}

/// A message at either port allows a run. When one port's sender is dropped, messages at the other port still do.
#[tokio::test(start_paused = true)]
async fn c10_a_message_at_one_port_or_at_another() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c10");
    let left = flow.add("left", at([(0, 1), (10, 2)]));
    let right = flow.add("right", at([(5, 10), (12, 11), (20, 12)]));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs(move |ports: &mut BothPorts, _cx: &mut Cx| {
            noted.add((ports.left.try_take()?, ports.right.try_take()?));
            Ok(())
        }),
    );
    let take = take.clone().when(any_of(at_least(take.left, 1), at_least(take.right, 1)));
    flow.connect(left.output, take.left);
    flow.connect(right.output, take.right);
    let report = within(flow.run()).await.unwrap();
    let wanted = [
        (0, (Some(1), None)),
        (5, (None, Some(10))),
        (10, (Some(2), None)),
        (12, (None, Some(11))),
        (20, (None, Some(12))),
    ];
    assert_eq!(notes.all(), wanted);
    assert_eq!(report.untaken, 0);
}

/// An either-or with a group: a message and its time, or an open gate.
#[tokio::test(start_paused = true)]
async fn c10_all_of_some_or_another() {
    let notes = Notes::begin();
    let gate = Gate::paused();
    let mut flow = Flow::new("c10");
    let send = flow.add("send", at_until(60, [(5, 1), (12, 2)]));
    let (noted, opened, says) = (notes.clone(), gate.clone(), gate.clone());
    let take = flow.add(
        "take",
        runs(move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
            noted.add(ports.input.try_take()?);
            opened.pause();
            Ok(())
        }),
    );
    let take = take.clone().when(any_of(gate, all_of(every(ms(20)), at_least(take.input, 1))));
    flow.connect(send.output, take.input);
    let says = task(move |(): &mut (), _cx: &mut Cx| {
        let says = says.clone();
        Box::pin(async move {
            tokio::time::sleep(ms(40)).await;
            says.resume();
            tokio::time::sleep(ms(10)).await;
            says.end();
            Ok(())
        })
    });
    let _ = flow.add("says", says);
    within(flow.run()).await.unwrap();
    assert_eq!(notes.all(), [(5, Some(1)), (25, Some(2)), (40, None)]);
}

/// An operator that runs for a message or a tick would tick for ever. When the flow is stopped, it still ends once the
/// messages in flight have arrived.
#[tokio::test(start_paused = true)]
async fn c10_a_stop_ends_what_runs_for_a_message_or_a_tick() {
    let notes = Notes::begin();
    let mut flow = Flow::new("c10");
    let mut number = 0;
    let send = flow.add(
        "send",
        source(move || {
            number += 1;
            std::future::ready(Ok(Some(number)))
        }),
    );
    let send = send.when(every(ms(7)));
    let noted = notes.clone();
    let take = flow.add(
        "take",
        runs_for(5, move |ports: &mut SinkPorts<u32>, _cx: &mut Cx| {
            noted.add(ports.input.try_take()?);
            Ok(())
        }),
    );
    let take = take.clone().when(any_of(at_least(take.input, 1), every(ms(10)).missed(MissedTicks::Skip)));
    flow.connect(send.output, take.input);
    let running = flow.spawn().unwrap();
    tokio::time::sleep(ms(36)).await;
    running.stop();
    let report = within(running).await.unwrap();
    let taken: Vec<_> = notes.all().into_iter().filter_map(|(_, taken)| taken).collect();
    assert_eq!(taken, [1, 2, 3, 4, 5, 6], "sent at 0, 7, 14, 21, 28, 35");
    assert_eq!(report.untaken, 0);
}

/// A used-up count is an ended side of the either-or until it is reset. The reset takes effect immediately, not at the
/// next tick.
#[tokio::test(start_paused = true)]
async fn c5_a_count_in_either_or_takes_effect_when_it_is_reset() {
    let (notes, left) = (Notes::begin(), count(2));
    let mut flow = Flow::new("c5");
    let either = any_of(left.clone(), every(ms(10)));
    let _ = flow.add("tick", Ticks::new(&notes, &[])).when(either).when(count(8));
    let resets = left.clone();
    let resets = task(move |(): &mut (), _cx: &mut Cx| {
        let resets = resets.clone();
        Box::pin(async move {
            tokio::time::sleep(ms(15)).await;
            resets.reset(3);
            Ok(())
        })
    });
    let _ = flow.add("resets", resets);
    within(flow.run()).await.unwrap();
    // The run at 10 is from the period, and the runs at 15 are from the count.
    assert_eq!(notes.times(), [0, 0, 10, 15, 15, 15, 20, 30]);
    assert_eq!(left.left(), 0);
}

/// Two operators share a count. The last run of one ends the other, which waits for a gate that never opens.
#[tokio::test(start_paused = true)]
async fn c5_a_shared_count_that_is_used_up_ends_the_other_operator() {
    let (notes, left, gate) = (Notes::begin(), count(3), Gate::paused());
    let mut flow = Flow::new("c5");
    let _ = flow.add("runs", Ticks::new(&notes, &[10, 10, 10])).when(left.clone());
    let _ = flow.add("waits", Ticks::new(&notes, &[])).when(gate.clone()).when(left.clone());
    let report = within(flow.run()).await.unwrap();
    assert_eq!(notes.times(), [0, 10, 20]);
    assert_eq!((report.operator("waits").unwrap().runs, gate.is_open()), (0, false));
}

/// A user-defined condition that allows one run for each period and sets no timer.
struct Own {
    period: Duration,
    due: Option<Instant>,
    /// Whether it reads the clock itself. Otherwise it returns the same time before and after that time.
    looks: bool,
    last: bool,
}

fn own(period: Duration) -> Own {
    Own { period, due: None, looks: true, last: false }
}

impl Condition for Own {
    fn start(&mut self) {
        self.due = Some(Instant::now() + self.period);
    }

    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        match self.due {
            Some(due) if !self.looks || Instant::now() < due => Status::WaitTime(due),
            _ => Status::Ready,
        }
    }

    fn claim(&mut self) -> bool {
        self.due = Some(Instant::now() + self.period);
        true
    }

    fn is_polled_last(&self) -> bool {
        self.last
    }
}

/// The flow sets the timer, wherever the condition is polled.
#[tokio::test(start_paused = true)]
async fn c12_a_time_that_a_user_defined_condition_waits_for() {
    let closed = Gate::paused();
    let conditions: [(&str, When, &[u64]); 7] = [
        ("alone", own(ms(10)).into_condition(), &[10, 20, 30]),
        ("never looks", Own { looks: false, ..own(ms(10)) }.into_condition(), &[10, 20, 30]),
        ("asked last", Own { last: true, ..own(ms(10)) }.into_condition(), &[10, 20, 30]),
        ("beside a gate", any_of(own(ms(10)), closed.clone()), &[10, 20, 30]),
        ("beside a gate, asked last", any_of(closed.clone(), Own { last: true, ..own(ms(10)) }), &[10, 20, 30]),
        ("the earlier of two", any_of(own(ms(10)), own(ms(15))), &[10, 15, 20]),
        ("the later of two, within", any_of(closed, all_of(own(ms(10)), own(ms(15)))), &[15, 30, 45]),
    ];
    for (name, condition, wanted) in conditions {
        let notes = Notes::begin();
        let mut flow = Flow::new("c12");
        let _ = flow.add("tick", Ticks::new(&notes, &[])).when(condition).when(count(3));
        within(flow.run()).await.unwrap();
        assert_eq!(notes.times(), wanted, "{name}");
    }
}

/// The status shows the time, and a time beyond the range of timers is waited for like any other.
#[tokio::test(start_paused = true)]
async fn c12_a_time_that_no_clock_reaches() {
    let notes = Notes::begin();
    let (mut far, mut step) = (Instant::now(), Duration::MAX);
    while !step.is_zero() {
        far = far.checked_add(step).unwrap_or(far);
        step /= 2;
    }
    struct Far(Instant);
    impl Condition for Far {
        fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
            Status::WaitTime(self.0)
        }
    }
    let mut flow = Flow::new("c12");
    let _ = flow.add("tick", Ticks::new(&notes, &[])).when(Far(far));
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    tokio::time::sleep(ms(1000)).await;
    assert!(matches!(handle.status()[0].status, Status::WaitTime(due) if due > Instant::now() + ms(1 << 30)));
    running.stop();
    within(running).await.unwrap();
    assert_eq!(notes.times(), [0; 0]);
}

/// A runtime without timers is an error before the flow runs, for each operator that waits for a time, and not a panic
/// later.
#[test]
fn c6_a_runtime_without_timers_is_an_error_before_the_flow_runs() {
    #[derive(Ports)]
    struct BatchPorts {
        #[input(batch = 2, within = "5ms", capacity = 2)]
        input: Input<u32>,
    }

    #[derive(Ports)]
    #[ports(sum(left, right) = 3, or_after = "7ms")]
    struct SumPorts {
        #[input(capacity = 3)]
        left: Input<u32>,
        #[input(capacity = 3)]
        right: Input<u32>,
    }

    fn flow(waits: bool) -> Flow {
        let mut flow = Flow::new("c6");
        let tick = flow.add("tick", source(async || Ok(None::<u32>)));
        let others = ["a", "b"].map(|name| flow.add(name, source(async || Ok(None::<u32>))).output);
        if waits {
            let _ = tick.clone().when(count(1)).when(any_of(every(ms(10)), Gate::paused()));
            let batch = flow.add("batch", runs(|_: &mut BatchPorts, _: &mut Cx| Ok(())));
            let sum = flow.add("sum", runs(|_: &mut SumPorts, _: &mut Cx| Ok(())));
            flow.connect(tick.output, batch.input);
            flow.connect(others[0], sum.left);
            flow.connect(others[1], sum.right);
        } else {
            for (at, output) in [tick.output].into_iter().chain(others).enumerate() {
                let end = flow.add(format!("end {at}"), sink(async |_: u32| Ok(())));
                flow.connect(output, end.input);
            }
        }
        flow
    }

    let without_timers = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (error, fine) =
        without_timers.block_on(async { (flow(true).run().await.unwrap_err(), flow(false).run().await) });
    fine.unwrap();
    assert_eq!(error.kind(), wakeline::ErrorKind::Setup);
    let lines = [
        "operator `tick` waits for its next tick, one every 10ms,",
        "operator `batch` waits for 2 messages within 5ms at `input`,",
        "operator `sum` waits for 3 messages at `left`, `right` together, or 7ms since its last run,",
    ];
    let lines = lines.map(|line| {
        format!("\n  - {line} but this tokio runtime has no timers: build it with `enable_time` or `enable_all`")
    });
    assert_eq!(error.to_string(), format!("flow `c6`: invalid setup: 3 problems:{}", lines.concat()));
    // Outside a runtime, timers cannot be checked.
    flow(true).check().unwrap();
}
