//! Model check of `memory/wait_queue.rs` and `stream/watch.rs`: tasks that wait for memory of a heap, tasks that free memory,
//! and the monitor's tick. The heap is two numbers under a lock.

#[allow(dead_code)]
#[path = "../../src/memory/wait_queue.rs"]
mod wait_queue;

#[allow(dead_code)]
#[path = "../../src/stream/watch.rs"]
mod watch;

use std::{future::poll_fn, task::Poll};

use self::wait_queue::{WaitQueue, WaitSlot, WaiterCount};
use self::watch::WatchFlag;
use crate::sync::model;
use futures::task::noop_waker_ref;
use loom::{
    future::block_on,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// Blocks of one size.
struct Heap {
    waiters: WaiterCount,
    wait_queue: WaitQueue,
    swept: WatchFlag,
    blocks: Mutex<Blocks>,
    /// How many sweeps are registered with the monitor.
    sweeps: Mutex<usize>,
}

#[derive(Default)]
struct Blocks {
    idle: usize,
    bound: usize,
    served: Vec<u32>,
}

impl Heap {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            waiters: WaiterCount::new(),
            wait_queue: WaitQueue::new(),
            swept: WatchFlag::new(),
            blocks: Mutex::default(),
            sweeps: Mutex::default(),
        })
    }

    /// As in `Ledger::tell`.
    fn tell(&self) {
        if self.waiters.is_any() {
            self.wait_queue.first().wake();
        }
    }

    /// As in `Memory::shelve_idle`.
    fn free(&self) {
        self.blocks.lock().unwrap().idle += 1;
        self.tell();
    }

    /// As in `Memory::shelve`.
    fn free_bound(&self) {
        let mut blocks = self.blocks.lock().unwrap();
        blocks.bound += 1;
        let has_to_tell = !self.swept.is_on() || self.waiters.is_any();
        drop(blocks);
        if has_to_tell {
            if self.swept.start() {
                *self.sweeps.lock().unwrap() += 1;
            }
            self.tell();
        }
    }

    /// As in `Heap::tick`, if a sweep is registered: the bound memory's work has completed.
    fn tick(&self) {
        if *self.sweeps.lock().unwrap() == 0 {
            return;
        }
        self.sweep();
        if !(self.has_bound() || self.swept.stop(|| self.has_bound())) {
            *self.sweeps.lock().unwrap() -= 1;
        }
    }

    fn has_bound(&self) -> bool {
        self.blocks.lock().unwrap().bound > 0
    }

    fn sweep(&self) -> bool {
        let mut blocks = self.blocks.lock().unwrap();
        let passed = std::mem::take(&mut blocks.bound);
        blocks.idle += passed;
        drop(blocks);
        if passed > 0 {
            self.tell();
        }
        passed > 0
    }

    fn take(&self, who: u32) -> bool {
        let mut blocks = self.blocks.lock().unwrap();
        let is = blocks.idle > 0;
        if is {
            blocks.idle -= 1;
            blocks.served.push(who);
        }
        is
    }

    /// As in `Heap::alloc_when_free`: the first in line waits for bound memory itself.
    fn alloc_when_free(&self, who: u32) {
        let mut place = WaitSlot::default();
        block_on(poll_fn(|cx| self.poll_alloc(who, &mut place, cx.waker())));
        self.leave(&mut place);
    }

    fn poll_alloc(&self, who: u32, place: &mut WaitSlot, waker: &std::task::Waker) -> Poll<()> {
        if !self.wait_queue.join(&self.waiters, place, waker) {
            return Poll::Pending;
        }
        loop {
            if self.take(who) {
                return Poll::Ready(());
            }
            if !self.sweep() {
                return Poll::Pending;
            }
        }
    }

    fn leave(&self, place: &mut WaitSlot) {
        if self.wait_queue.leave(&self.waiters, place) {
            self.wait_queue.first().wake();
        }
    }
}

#[test]
fn memory_freed_while_a_task_joins_wakes_it() {
    for bound in [false, true] {
        model(3, move || {
            let heap = Heap::new();
            let frees = {
                let heap = heap.clone();
                thread::spawn(move || if bound { heap.free_bound() } else { heap.free() })
            };
            heap.alloc_when_free(1);
            frees.join().unwrap();
            assert!(!heap.waiters.is_any());
        });
    }
}

/// One block for two tasks: the first leaves the line and wakes the second, which gets the block when the first frees
/// it.
#[test]
fn the_first_task_wakes_the_next_when_it_leaves() {
    model(3, || {
        let heap = Heap::new();
        let other = {
            let heap = heap.clone();
            thread::spawn(move || {
                heap.alloc_when_free(1);
                heap.free();
            })
        };
        heap.free();
        heap.alloc_when_free(2);
        heap.free();
        other.join().unwrap();
        let mut served = heap.blocks.lock().unwrap().served.clone();
        served.sort_unstable();
        assert_eq!(served, [1, 2]);
        assert!(!heap.waiters.is_any() && heap.wait_queue.is_empty());
    });
}

/// A dropped future, woken or not, does not block the tasks behind it.
#[test]
fn a_task_that_gives_up_its_place_wakes_the_next() {
    model(3, || {
        let heap = Heap::new();
        let mut place = WaitSlot::default();
        assert!(heap.poll_alloc(1, &mut place, noop_waker_ref()).is_pending());
        let next = {
            let heap = heap.clone();
            thread::spawn(move || heap.alloc_when_free(2))
        };
        heap.free();
        heap.leave(&mut place);
        next.join().unwrap();
        assert_eq!(heap.blocks.lock().unwrap().served, [2]);
    });
}

/// The device is lost: a task that is not first is notified, although the first is never polled again.
#[test]
fn a_loss_wakes_every_task_in_line() {
    model(3, || {
        let heap = Heap::new();
        let mut first = WaitSlot::default();
        assert!(heap.wait_queue.join(&heap.waiters, &mut first, noop_waker_ref()));
        let lost = Arc::new(AtomicBool::new(false));
        let next = {
            let (heap, lost) = (heap.clone(), lost.clone());
            thread::spawn(move || {
                let mut place = WaitSlot::default();
                // As in `Heap::alloc_when_free`.
                block_on(poll_fn(|cx| {
                    assert!(!heap.wait_queue.join(&heap.waiters, &mut place, cx.waker()));
                    if lost.load(Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
                }));
                assert!(heap.wait_queue.leave(&heap.waiters, &mut place));
            })
        };
        lost.store(true, Ordering::SeqCst);
        heap.wait_queue.wake_all();
        next.join().unwrap();
        assert!(heap.wait_queue.leave(&heap.waiters, &mut first));
    });
}

/// The condition of an operator takes nothing while a task is in line, and is woken when the last one leaves.
#[test]
fn a_condition_is_woken_when_the_line_is_empty() {
    model(3, || {
        let heap = Heap::new();
        let wait_queue = {
            let heap = heap.clone();
            thread::spawn(move || heap.alloc_when_free(1))
        };
        heap.free();
        heap.free();
        let mut place = WaitSlot::default();
        block_on(poll_fn(|cx| {
            heap.wait_queue.watch(&heap.waiters, &mut place, cx.waker());
            if heap.wait_queue.is_empty() && heap.take(2) { Poll::Ready(()) } else { Poll::Pending }
        }));
        assert!(!heap.wait_queue.leave(&heap.waiters, &mut place));
        wait_queue.join().unwrap();
        assert!(!heap.waiters.is_any());
    });
}

/// Memory is bound while a tick finds that none is: it is swept by a later tick, and only once.
#[test]
fn memory_bound_while_a_tick_ends_is_swept() {
    model(3, || {
        let heap = Heap::new();
        heap.free_bound();
        let frees = {
            let heap = heap.clone();
            thread::spawn(move || heap.free_bound())
        };
        heap.tick();
        frees.join().unwrap();
        let sweeps = *heap.sweeps.lock().unwrap();
        assert!(sweeps <= 1, "swept twice at each tick");
        assert!(sweeps == 1 || !heap.has_bound(), "memory is bound but never swept");
        heap.tick();
        assert!(!heap.has_bound() && *heap.sweeps.lock().unwrap() == 0);
        assert_eq!(heap.blocks.lock().unwrap().idle, 2);
    });
}

/// Two threads free memory while the tick ends: exactly one of the three keeps it running.
#[test]
fn two_threads_that_bind_memory_while_a_tick_ends_start_one() {
    model(3, || {
        let heap = Heap::new();
        heap.free_bound();
        let frees = [(); 2].map(|()| {
            let heap = heap.clone();
            thread::spawn(move || heap.free_bound())
        });
        heap.tick();
        for frees in frees {
            frees.join().unwrap();
        }
        let sweeps = *heap.sweeps.lock().unwrap();
        assert!(sweeps <= 1 && (sweeps == 1 || !heap.has_bound()), "{sweeps} sweeps");
    });
}
