//! Count, `.when(count(100))`: so many runs, then never again.

use std::{
    borrow::Cow,
    fmt,
    sync::Arc,
    sync::atomic::{AtomicI64, Ordering},
    task::Context,
};

use super::{Condition, Status};

/// How many runs are left. Shared by its clones: an operator that runs takes from all of them, and two operators with
/// clones of one count share its runs.
#[derive(Clone)]
pub struct Count {
    left: Arc<AtomicI64>,
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
    Count { left: Arc::new(AtomicI64::new(runs)), whole: runs }
}

impl Count {
    /// From now on there are so many runs left, as for [`count`]. An operator that had none left has ended, and stays so.
    pub fn reset(&self, runs: i64) {
        self.left.store(runs, Ordering::Release);
    }

    /// How many runs are left; negative: without end.
    pub fn left(&self) -> i64 {
        self.left.load(Ordering::Acquire)
    }
}

impl Condition for Count {
    fn start(&mut self) {
        self.reset(self.whole);
    }

    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        if self.left() == 0 { Status::Never } else { Status::Ready }
    }

    fn claim(&mut self) -> bool {
        let take = |left: i64| match left {
            0 => None,
            1.. => Some(left - 1),
            _ => Some(left),
        };
        self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
    }

    fn give_back(&mut self) {
        let _ = self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| (left >= 0).then_some(left + 1));
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
