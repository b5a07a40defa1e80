//! [`Watchers`]: those who want to hear whenever an operator shows something else.
//!
//! An operator shows how it stands at every turn, and mostly nobody watches: then that costs it a look at a count, and no
//! fence. So one who comes at the same moment may be overlooked, and may not see what was shown. It is up to whoever comes
//! to see to that: every operator that is not parked is woken, and its next poll finds the new watcher, and marks it again.
//! A parked operator has shown what it waits for before it parked, and its next poll sees all watchers that were added before: it is
//! not woken, since a wake for nothing would keep the flow from being found at rest.
//!
//! ```text
//!   operator:  polled ──> has anybody come? ──> ... ──> show ──> anybody there? ── yes ──> marked, watchers woken
//!                  ^              └── yes ──> marked
//!   watcher:   said to have come ──> operators that are not parked woken ──> [ unmark one ──> look at what it shows ]*
//! ```
//!
//! A poll that follows the wake comes after all that was said before it, and after all that the operator has shown before.
//! An operator that has ended is polled no more: for what it shows last there is a fence, here and with whoever comes. So
//! what an operator shows last, a watcher sees last. A mark is taken away before the look: what comes in between is marked
//! again.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
    task::{Context, Poll, Waker},
};

use smallvec::SmallVec;

use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering, WakeList, discard, fence, lock};

/// Those who want to hear of changes.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    /// Written with the lock.
    count: AtomicUsize,
    /// How many have ever come. Written with the lock.
    came: AtomicUsize,
    /// Nothing changes any more. Written with the lock.
    over: AtomicBool,
    all: Mutex<Vec<Weak<Watcher>>>,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Watcher(Mutex<Changed>);

/// Which operators have changed since it looked last.
#[derive(Debug)]
struct Changed {
    /// In the order of changing, each once.
    order: VecDeque<usize>,
    is: Vec<bool>,
    over: bool,
    waker: Option<Waker>,
}

impl Watchers {
    /// One more, to whom all of so many operators have changed. The caller wakes those that are not parked.
    pub(crate) fn add(&self, operators: usize) -> Arc<Watcher> {
        let mut all = lock(&self.all);
        let over = self.over.load(Ordering::Relaxed);
        let changed = Changed { order: (0..operators).collect(), is: vec![true; operators], over, waker: None };
        let watcher = Arc::new(Watcher(Mutex::new(changed)));
        all.retain(|watcher| watcher.strong_count() > 0);
        all.push(Arc::downgrade(&watcher));
        self.count.store(all.len(), Ordering::Relaxed);
        self.came.store(self.came.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        watcher
    }

    /// An operator has come to show something else.
    #[inline]
    pub(crate) fn tell(&self, operator: usize) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.mark(operator);
        }
    }

    /// An operator is polled; `seen`: how many had come when it was polled last.
    #[inline]
    pub(crate) fn look(&self, operator: usize, seen: &AtomicUsize) {
        let came = self.came.load(Ordering::Relaxed);
        if seen.load(Ordering::Relaxed) != came {
            seen.store(came, Ordering::Relaxed);
            self.mark(operator);
        }
    }

    /// An operator has ended: it is not polled again.
    pub(crate) fn tell_last(&self, operator: usize) {
        fence(Ordering::SeqCst);
        self.tell(operator);
    }

    fn mark(&self, operator: usize) {
        self.each(|changed| {
            if !std::mem::replace(&mut changed.is[operator], true) {
                changed.order.push_back(operator);
            }
        });
    }

    /// Nothing changes any more.
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
        // One lock after the other, and none when they are woken or dropped.
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
    /// The next that has changed; `None` when nothing does any more.
    pub(crate) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        let mut waker = None;
        loop {
            let mut changed = lock(&self.0);
            let answer = match changed.order.pop_front() {
                Some(operator) => {
                    changed.is[operator] = false;
                    Poll::Ready(Some(operator))
                }
                None if changed.over => Poll::Ready(None),
                None if waker.is_none() => {
                    // Cloned without the lock: that is user code. Then it is asked again.
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
