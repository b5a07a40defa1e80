//! Count, `.when(count(100))`: so many runs, then never again.

use std::{borrow::Cow, fmt, task::Context};

use super::{
    Condition, IntoCondition, Status, When,
    told::{Heard, Told},
};

/// How many runs are left. A handle: its clones are the same count, and two operators that are given one share its runs.
///
/// An operator ends when its count is used up, as it does at [`Status::Never`] of any of its conditions; what is said later
/// does not bring it back. Where the count is one side of [`any_of`](super::any_of), the operator goes on with the other
/// side, and with the count again once it is [`reset`](Self::reset). A count that is used up keeps no flow from ending.
#[derive(Clone)]
pub struct Count {
    left: Told<i64>,
    whole: i64,
}

/// The condition.
#[derive(Debug)]
struct Counts {
    left: Heard<i64>,
    whole: i64,
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
    Count { left: Told::new(runs), whole: runs }
}

impl Count {
    /// From now on there are so many runs left, as for [`count`]. With 0 its operators end, whatever else they wait for. An
    /// operator that had none left has ended, and stays so.
    pub fn reset(&self, runs: i64) {
        self.left.set(|_| runs);
    }

    /// How many runs are left; negative: without end.
    pub fn left(&self) -> i64 {
        self.left.get()
    }
}

impl IntoCondition for Count {
    fn into_condition(self) -> When {
        When::own(Counts { left: self.left.heard(), whole: self.whole })
    }
}

impl Condition for Counts {
    fn start(&mut self) {
        self.left.change(|_| Some(self.whole), |_| true);
    }

    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        if self.left.poll(cx.waker()).value == 0 { Status::Never } else { Status::Ready }
    }

    fn claim(&mut self) -> bool {
        let one_less = |left: i64| match left {
            0 => None,
            1.. => Some(left - 1),
            _ => Some(left),
        };
        // The last one: whoever shares it has none.
        self.left.change(one_less, |left| left == 0).is_some()
    }

    fn give_back(&mut self) {
        self.left.change(|left| (left >= 0).then_some(left.saturating_add(1)), |left| left == 1);
    }

    fn describe(&self) -> Cow<'static, str> {
        "a run left of its count".into()
    }
}

impl fmt::Debug for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Count").field(&self.left).finish()
    }
}
