//! [`KeptLatest`]: how a hub keeps its latest message, and when that ends.

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use super::{CloneFn, view::HubView};
use crate::sync::{Mutex, lock};

/// How a message that stays in the hub is read, and when that ends.
pub(super) struct KeptLatest<M> {
    pub(super) clone: CloneFn<M>,
    ends_with: Option<Arc<EndTogether>>,
    over: AtomicBool,
}

/// The hubs of an operator that has no input whose end alone ends the operator. The hubs that keep the latest message end
/// when all of these hubs have ended.
#[derive(Default)]
pub(crate) struct EndTogether {
    /// How many hubs that keep the latest message have not ended.
    open: AtomicUsize,
    /// The other hubs: queues of optional inputs.
    queues: Mutex<Vec<Weak<dyn HubView>>>,
}

impl EndTogether {
    /// `count`: the number of hubs that keep the latest message.
    pub(crate) fn new(count: usize) -> Self {
        Self { open: count.into(), ..Self::default() }
    }

    /// Adds a queue of an optional input.
    pub(super) fn add(&self, queue: Weak<dyn HubView>) {
        lock(&self.queues).push(queue);
    }

    fn is_over(&self) -> bool {
        // The upgraded reference might be the last one to its hub, so it is dropped with no lock held.
        let mut queues = (0..).map_while(|at| lock(&self.queues).get(at).cloned());
        self.open.load(Ordering::Acquire) == 0
            && queues.all(|queue| queue.upgrade().is_none_or(|queue| queue.has_ended()))
    }
}

impl fmt::Debug for EndTogether {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndTogether").field("open", &self.open).finish_non_exhaustive()
    }
}

impl<M> KeptLatest<M> {
    pub(super) fn new(clone: CloneFn<M>, ends_with: Option<Arc<EndTogether>>) -> Self {
        Self { clone, ends_with, over: AtomicBool::new(false) }
    }

    /// Called when the writer has ended and the last message was read. Returns true if the reader ends, too.
    pub(super) fn ends(&self) -> bool {
        let Some(all) = &self.ends_with else { return false };
        if !self.over.swap(true, Ordering::AcqRel) {
            all.open.fetch_sub(1, Ordering::AcqRel);
        }
        all.is_over()
    }
}
