//! [`Watchers`]: receive a notification whenever an operator publishes a new status.
//!
//! An operator publishes its status at every turn, and usually there is no watcher: then the cost is a load of a
//! counter, without a fence. So an operator might miss a watcher that registers at the same moment, and that watcher
//! might miss the status. The registering side makes up for it: it wakes every operator that is not parked, and
//! the operator's next poll finds the new watcher and marks the operator as changed again. A parked operator has
//! published what it waits for before it parked, and its next poll sees all watchers that were added before. It is not
//! woken, since a spurious wake would keep the flow from being detected as idle.
//!
//! ```text
//!   operator:  polled ──> new watcher? ──> ... ──> publish ──> any watcher? ── yes ──> marked, watchers woken
//!                  ^           └── yes ──> marked
//!   watcher:   registered ──> operators that are not parked woken ──> [ unmark one ──> read its status ]*
//! ```
//!
//! A poll after the wake comes after the registration, and after everything that the operator has published before. An
//! operator that has ended is not polled again: for its last status there is a fence here, and another one in the
//! registration. So the last status that an operator publishes is also the last one that a watcher reads. A mark is
//! cleared before the status is read, so a change in between sets the mark again.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
};

use smallvec::SmallVec;

use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering, WakeList, discard, fence, lock};

/// The registered watchers of a flow's operators.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    /// Written with the lock held.
    count: AtomicUsize,
    /// The number of registrations so far. Written with the lock held.
    registrations: AtomicUsize,
    /// No operator changes any more. Written with the lock held.
    over: AtomicBool,
    all: Mutex<Vec<Weak<Watcher>>>,
}

#[derive(Debug)]
pub(crate) struct Watcher(Mutex<Changed>);

/// The operators that have changed since the watcher last read them.
#[derive(Debug)]
struct Changed {
    /// In the order of changing, each once.
    order: VecDeque<usize>,
    is_marked: Vec<bool>,
    over: bool,
    waker: Option<Waker>,
}

impl Watchers {
    /// Registers a watcher, for which all `operators` operators are marked as changed. The caller wakes those that are
    /// not parked.
    pub(crate) fn add(&self, operators: usize) -> Arc<Watcher> {
        let mut all = lock(&self.all);
        let over = self.over.load(Ordering::Relaxed);
        let changed = Changed { order: (0..operators).collect(), is_marked: vec![true; operators], over, waker: None };
        let watcher = Arc::new(Watcher(Mutex::new(changed)));
        all.retain(|watcher| watcher.strong_count() > 0);
        all.push(Arc::downgrade(&watcher));
        self.count.store(all.len(), Ordering::Relaxed);
        self.registrations.store(self.registrations.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        watcher
    }

    /// Marks an operator as changed, after it has published a new status.
    #[inline]
    pub(crate) fn notify(&self, operator: usize) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.mark(operator);
        }
    }

    /// Called when an operator is polled. `seen`: the number of registrations at its previous poll.
    #[inline]
    pub(crate) fn notify_new(&self, operator: usize, seen: &AtomicUsize) {
        let registrations = self.registrations.load(Ordering::Relaxed);
        if seen.load(Ordering::Relaxed) != registrations {
            seen.store(registrations, Ordering::Relaxed);
            self.mark(operator);
        }
    }

    /// Like `notify`, for an operator that has ended and is not polled again.
    pub(crate) fn notify_last(&self, operator: usize) {
        fence(Ordering::SeqCst);
        self.notify(operator);
    }

    fn mark(&self, operator: usize) {
        self.each(|changed| {
            if !std::mem::replace(&mut changed.is_marked[operator], true) {
                changed.order.push_back(operator);
            }
        });
    }

    /// Ends all watchers, once no operator changes any more.
    pub(crate) fn end(&self) {
        let all = lock(&self.all);
        self.over.store(true, Ordering::Relaxed);
        drop(all);
        self.each(|changed| changed.over = true);
    }

    #[cold]
    fn each(&self, mut change: impl FnMut(&mut Changed)) {
        let mut all = lock(&self.all);
        all.retain(|watcher| watcher.strong_count() > 0);
        self.count.store(all.len(), Ordering::Relaxed);
        let watchers: SmallVec<[_; 2]> = all.iter().filter_map(Weak::upgrade).collect();
        // One lock at a time, and none while watchers are woken or dropped.
        drop(all);
        let mut woken = WakeList::new();
        for watcher in &watchers {
            let mut changed = lock(&watcher.0);
            change(&mut changed);
            woken.extend(changed.waker.take());
        }
        discard(watchers);
        woken.wake();
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        discard(self.waker.take());
    }
}

impl Watcher {
    /// Polls for the next operator that has changed; `None` once no operator changes any more.
    pub(crate) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        let mut waker = None;
        loop {
            let mut changed = lock(&self.0);
            let answer = match changed.order.pop_front() {
                Some(operator) => {
                    changed.is_marked[operator] = false;
                    Poll::Ready(Some(operator))
                }
                None if changed.over => Poll::Ready(None),
                None if waker.is_none() => {
                    // Cloned without the lock, since that is user code. Then the state is checked again.
                    drop(changed);
                    waker = Some(cx.waker().clone());
                    continue;
                }
                None => {
                    std::mem::swap(&mut changed.waker, &mut waker);
                    Poll::Pending
                }
            };
            drop(changed);
            discard(waker);
            return answer;
        }
    }
}
