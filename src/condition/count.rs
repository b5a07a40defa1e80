//! [`Count`], `.when(count(100))`: allows a number of runs, and no run after them.

use std::{borrow::Cow, fmt, task::Context};

use super::{
    Condition, IntoCondition, Status, When,
    watch::{WatchReader, WatchValue, WatchWriter},
};

/// The number of runs left. Clones are handles to the same count, and operators that are given the same count share its
/// runs.
///
/// An operator ends when its count is used up, like with any condition that is [`Status::Never`]; a later change does
/// not restart it. If the count is one side of [`any_of`](super::any_of), the operator continues with the other side,
/// and with the count again once it is [`reset`](Self::reset). A used-up count does not keep its flow from ending.
#[derive(Clone)]
pub struct Count {
    left: WatchWriter<Left>,
    whole: i64,
}

#[derive(Clone, Copy)]
struct Left {
    /// Runs; negative: unlimited.
    runs: i64,
    /// The number of resets: a claim is not given back to a count that was reset after it.
    resets: u64,
}

impl Left {
    fn reset(self, runs: i64) -> Self {
        Self { runs, resets: self.resets.wrapping_add(1) }
    }
}

struct CountCondition {
    left: WatchReader<Left>,
    whole: i64,
    /// The number of resets at the claim that took a run.
    claimed: Option<u64>,
}

/// Allows `runs` runs: none if 0, and any number if negative. The count restarts each time the flow is run.
///
/// ```
/// use wakeline::{Flow, condition::count, operator::source};
/// # use wakeline::operator::sink;
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let mut flow = Flow::new("three");
/// let ones = flow.add("ones", source(async || Ok(Some(1_u32)))).when(count(3));
/// # let end = flow.add("end", sink(async |_: u32| Ok(())));
/// # flow.connect(ones.output, end.input);
/// let report = flow.run().await?;
/// assert_eq!(report.operator("ones").unwrap().runs, 3);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub fn count(runs: i64) -> Count {
    Count { left: WatchWriter::new(Left { runs, resets: 0 }), whole: runs }
}

impl Count {
    /// Sets the number of runs left, like [`count`]. With 0 its operators end, whatever else they wait for. An operator
    /// that had no run left has ended, and is not restarted.
    pub fn reset(&self, runs: i64) {
        self.left.set(|left| left.reset(runs));
    }

    /// The number of runs left; negative: unlimited.
    pub fn left(&self) -> i64 {
        self.left.get().runs
    }
}

impl WatchValue for Left {
    /// With no run left the condition is `Never`, otherwise ready: it never waits.
    fn is_awaited(self) -> bool {
        false
    }
}

impl IntoCondition for Count {
    fn into_condition(self) -> When {
        When::boxed(CountCondition { left: self.left.reader(), whole: self.whole, claimed: None })
    }
}

impl Condition for CountCondition {
    fn start(&mut self) {
        self.claimed = None;
        self.left.change(|left| Some(left.reset(self.whole)), |_| true);
    }

    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        if self.left.poll(cx.waker()).value.runs == 0 { Status::Never } else { Status::Ready }
    }

    fn claim(&mut self) -> bool {
        let one_less = |left: Left| match left.runs {
            0 => None,
            1.. => Some(Left { runs: left.runs - 1, ..left }),
            _ => Some(left),
        };
        // After the last one, operators that share the count have none.
        let left = self.left.change(one_less, |left| left.runs == 0);
        self.claimed = left.filter(|left| left.runs >= 0).map(|left| left.resets);
        left.is_some()
    }

    fn give_back(&mut self) {
        let Some(claimed) = self.claimed.take() else { return };
        let one_more =
            |left: Left| (left.resets == claimed).then_some(Left { runs: left.runs.saturating_add(1), ..left });
        self.left.change(one_more, |left| left.runs == 1);
    }

    fn describe(&self) -> Cow<'static, str> {
        "a run to be left in its count".into()
    }
}

impl fmt::Debug for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Count").field(&self.left()).finish()
    }
}
