//! Count, `.when(count(100))`: so many runs, then never again.

use std::{borrow::Cow, fmt, task::Context};

use super::{
    Condition, IntoCondition, Status, When,
    told::{Heard, Told, Value},
};

/// How many runs are left. A handle: its clones are the same count, and two operators that are given one share its runs.
///
/// An operator ends when its count is used up, as it does at [`Status::Never`] of any of its conditions; what is said later
/// does not bring it back. Where the count is one side of [`any_of`](super::any_of), the operator goes on with the other
/// side, and with the count again once it is [`reset`](Self::reset). A count that is used up keeps no flow from ending.
#[derive(Clone)]
pub struct Count {
    left: Told<Left>,
    whole: i64,
}

#[derive(Clone, Copy)]
struct Left {
    /// Runs; negative: without end.
    runs: i64,
    /// How often that was set: what was claimed before is not given back to what was set after.
    resets: u64,
}

impl Left {
    fn reset(self, runs: i64) -> Self {
        Self { runs, resets: self.resets.wrapping_add(1) }
    }
}

/// The condition.
struct Counts {
    left: Heard<Left>,
    whole: i64,
    /// The number of resets at the claim that took a run away.
    claimed: Option<u64>,
}

/// So many runs: 0 is never, a negative number without end. Each time the flow is run it begins anew.
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
    Count { left: Told::new(Left { runs, resets: 0 }), whole: runs }
}

impl Count {
    /// From now on there are so many runs left, as for [`count`]. With 0 its operators end, whatever else they wait for. An
    /// operator that had none left has ended, and stays so.
    pub fn reset(&self, runs: i64) {
        self.left.set(|left| left.reset(runs));
    }

    /// How many runs are left; negative: without end.
    pub fn left(&self) -> i64 {
        self.left.get().runs
    }
}

impl Value for Left {
    /// None left is the end, and some are no reason to wait.
    fn is_awaited(self) -> bool {
        false
    }
}

impl IntoCondition for Count {
    fn into_condition(self) -> When {
        When::own(Counts { left: self.left.heard(), whole: self.whole, claimed: None })
    }
}

impl Condition for Counts {
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
        // The last one: those that share it have none.
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
        "a run left of its count".into()
    }
}

impl fmt::Debug for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Count").field(&self.left()).finish()
    }
}
