//! Model check of `memory/line.rs` and `stream/watch.rs`: every interleaving of tasks that wait for memory of a heap, of
//! those that free some, and of the lookout's beat. The files are included as they stand, with loom's primitives; the heap is
//! two numbers under a lock.

#[allow(dead_code)]
#[path = "../../src/memory/line.rs"]
mod line;

#[allow(dead_code)]
#[path = "../../src/stream/watch.rs"]
mod watch;

use std::{future::poll_fn, task::Poll};

use self::line::{Hunger, Line, Place};
use self::watch::Watched;
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
    hunger: Hunger,
    line: Line,
    swept: Watched,
    blocks: Mutex<Blocks>,
    /// How many sweeps the lookout calls at every beat.
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
            hunger: Hunger::new(),
            line: Line::new(),
            swept: Watched::new(),
            blocks: Mutex::default(),
            sweeps: Mutex::default(),
        })
    }

    /// As `Ledger::tell`.
    fn tell(&self) {
        if self.hunger.is_any() {
            self.line.first().wake();
        }
    }

    /// As `Memory::shelve_idle`.
    fn free(&self) {
        self.blocks.lock().unwrap().idle += 1;
        self.tell();
    }

    /// As `Memory::shelve`.
    fn free_bound(&self) {
        let mut blocks = self.blocks.lock().unwrap();
        blocks.bound += 1;
        let has_to_tell = !self.swept.is_on() || self.hunger.is_any();
        drop(blocks);
        if has_to_tell {
            if self.swept.start() {
                *self.sweeps.lock().unwrap() += 1;
            }
            self.tell();
        }
    }

    /// As `Heap::beat`, if there is one: what is bound has passed.
    fn beat(&self) {
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

    /// As `Heap::alloc_when_free`: what is bound is waited for by the first itself.
    fn alloc_when_free(&self, who: u32) {
        let mut place = Place::default();
        block_on(poll_fn(|cx| self.poll_alloc(who, &mut place, cx.waker())));
        self.leave(&mut place);
    }

    fn poll_alloc(&self, who: u32, place: &mut Place, waker: &std::task::Waker) -> Poll<()> {
        if !self.line.join(&self.hunger, place, waker) {
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

    fn leave(&self, place: &mut Place) {
        if self.line.leave(&self.hunger, place) {
            self.line.first().wake();
        }
    }
}

#[test]
fn memory_that_comes_free_while_a_task_joins_wakes_it() {
    for bound in [false, true] {
        model(3, move || {
            let heap = Heap::new();
            let frees = {
                let heap = heap.clone();
                thread::spawn(move || if bound { heap.free_bound() } else { heap.free() })
            };
            heap.alloc_when_free(1);
            frees.join().unwrap();
            assert!(!heap.hunger.is_any());
        });
    }
}

/// One block for two: the first leaves the line and wakes the next, which gets the block when the first frees it.
#[test]
fn the_first_that_leaves_wakes_the_next() {
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
        assert!(!heap.hunger.is_any() && heap.line.is_empty());
    });
}

/// A future that is dropped, woken or not, holds up none behind it.
#[test]
fn a_task_that_gives_up_its_place_wakes_the_next() {
    model(3, || {
        let heap = Heap::new();
        let mut place = Place::default();
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

/// The device is lost: a task that is not the first hears of it, though the first is never polled again.
#[test]
fn a_loss_wakes_all_of_the_line() {
    model(3, || {
        let heap = Heap::new();
        let mut first = Place::default();
        assert!(heap.line.join(&heap.hunger, &mut first, noop_waker_ref()));
        let lost = Arc::new(AtomicBool::new(false));
        let next = {
            let (heap, lost) = (heap.clone(), lost.clone());
            thread::spawn(move || {
                let mut place = Place::default();
                // As `Heap::alloc_when_free`.
                block_on(poll_fn(|cx| {
                    assert!(!heap.line.join(&heap.hunger, &mut place, cx.waker()));
                    if lost.load(Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
                }));
                assert!(heap.line.leave(&heap.hunger, &mut place));
            })
        };
        lost.store(true, Ordering::SeqCst);
        heap.line.wake_all();
        next.join().unwrap();
        assert!(heap.line.leave(&heap.hunger, &mut first));
    });
}

/// The condition of an operator: as long as a task stands in line it takes nothing, and it is woken when the last one leaves.
#[test]
fn one_at_the_side_is_woken_when_the_line_is_empty() {
    model(3, || {
        let heap = Heap::new();
        let line = {
            let heap = heap.clone();
            thread::spawn(move || heap.alloc_when_free(1))
        };
        heap.free();
        heap.free();
        let mut place = Place::default();
        block_on(poll_fn(|cx| {
            heap.line.watch(&heap.hunger, &mut place, cx.waker());
            if heap.line.is_empty() && heap.take(2) { Poll::Ready(()) } else { Poll::Pending }
        }));
        assert!(!heap.line.leave(&heap.hunger, &mut place));
        line.join().unwrap();
        assert!(!heap.hunger.is_any());
    });
}

/// Memory is bound as the beat finds that none is: it is swept by one beat to come, and not by two.
#[test]
fn memory_that_is_bound_as_a_beat_ends_is_swept() {
    model(3, || {
        let heap = Heap::new();
        heap.free_bound();
        let frees = {
            let heap = heap.clone();
            thread::spawn(move || heap.free_bound())
        };
        heap.beat();
        frees.join().unwrap();
        let sweeps = *heap.sweeps.lock().unwrap();
        assert!(sweeps <= 1, "swept twice at each beat");
        assert!(sweeps == 1 || !heap.has_bound(), "memory is bound and is never swept");
        heap.beat();
        assert!(!heap.has_bound() && *heap.sweeps.lock().unwrap() == 0);
        assert_eq!(heap.blocks.lock().unwrap().idle, 2);
    });
}

/// Two free memory as the beat ends: one of the three has it go on.
#[test]
fn two_that_bind_memory_as_a_beat_ends_begin_one() {
    model(3, || {
        let heap = Heap::new();
        heap.free_bound();
        let frees = [(); 2].map(|()| {
            let heap = heap.clone();
            thread::spawn(move || heap.free_bound())
        });
        heap.beat();
        for frees in frees {
            frees.join().unwrap();
        }
        let sweeps = *heap.sweeps.lock().unwrap();
        assert!(sweeps <= 1 && (sweeps == 1 || !heap.has_bound()), "{sweeps} sweeps");
    });
}
