//! Model check of `operator/only_others.rs`, with `operator/quiet.rs`: every interleaving of an operator that waits at a port in
//! the middle of a run, and of something outside of its flow that may wake it. The files are included as they stand, with loom's
//! primitives; the count of a waker's clones is `std::sync::Arc`'s, written out.

#[allow(dead_code)]
#[path = "../../src/operator/only_others.rs"]
mod only_others;

#[allow(dead_code)]
#[path = "../../src/operator/quiet.rs"]
mod quiet;

use std::sync::Arc;

use self::only_others::{Decision, OnlyOthers};
use self::quiet::{Parking, Tokens};
use crate::sync::model;
use loom::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

/// The only operator of its flow. In its run it waits for a message at a port, and maybe for an event from outside.
struct Operator {
    tokens: Tokens,
    parking: Parking,
    polled: AtomicBool,
    only_others: OnlyOthers,
    /// From outside: it has come.
    event: AtomicUsize,
    /// Where the source of the event keeps the waker.
    kept: Mutex<Option<Face>>,
    /// The flow was seen at rest: it would be said to have stalled.
    rests: AtomicUsize,
}

/// The waker that its future is polled with.
struct Face {
    operator: Arc<Operator>,
    clones: Arc<AtomicUsize>,
}

impl Face {
    fn new(operator: &Arc<Operator>) -> Self {
        Self { operator: operator.clone(), clones: Arc::new(AtomicUsize::new(1)) }
    }

    fn wake(&self) {
        self.operator.wake();
    }
}

/// As std's `Arc` counts.
impl Clone for Face {
    fn clone(&self) -> Self {
        self.clones.fetch_add(1, Ordering::Relaxed);
        Self { operator: self.operator.clone(), clones: self.clones.clone() }
    }
}

impl Drop for Face {
    fn drop(&mut self) {
        self.clones.fetch_sub(1, Ordering::Release);
    }
}

impl Operator {
    fn new() -> Arc<Self> {
        let tokens = Tokens::new(1);
        Arc::new(Self {
            parking: Parking::new(&tokens, 0),
            tokens,
            polled: AtomicBool::new(true),
            only_others: OnlyOthers::new(),
            event: AtomicUsize::new(0),
            kept: Mutex::new(None),
            rests: AtomicUsize::new(0),
        })
    }

    fn wake(&self) {
        if self.parking.wake(&self.tokens).first {
            self.polled.swap(true, Ordering::SeqCst);
        }
    }

    /// Outside of the flow: the event comes.
    fn send(&self) {
        self.event.store(1, Ordering::Release);
        let kept = self.kept.lock().unwrap().take();
        if let Some(face) = kept {
            face.wake();
        }
    }

    /// Its task is polled as long as it is woken. `awaits`: the event as well, until it has come. True once it has.
    fn drive(&self, face: &mut Face, awaits: bool, has_come: &mut bool) {
        while self.polled.swap(false, Ordering::SeqCst) {
            self.parking.begin(&self.tokens);
            if awaits && !*has_come {
                // As a channel does: kept first, asked then.
                *self.kept.lock().unwrap() = Some(face.clone());
                if self.event.load(Ordering::Acquire) == 1 {
                    *has_come = true;
                    drop(self.kept.lock().unwrap().take());
                    self.only_others.end_of_wait();
                }
            }
            // The port has nothing.
            self.only_others.note(true);
            match self.only_others.decide(true, || face.clones.load(Ordering::Relaxed) - 1) {
                Decision::KeepToken => {}
                Decision::Park => {
                    if self.parking.park(&self.tokens) {
                        assert!(!awaits || *has_come, "stalled, with an event to come");
                        self.rests.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Decision::Renew => {
                    *face = Face::new(&face.operator);
                    face.wake();
                }
            }
        }
    }
}

/// The event may come at any time: before it has, the flow is not at rest; after it, it is.
#[test]
fn a_flow_whose_operator_awaits_an_event_has_not_stalled() {
    model(3, || {
        let operator = Operator::new();
        let outside = {
            let operator = operator.clone();
            thread::spawn(move || operator.send())
        };
        let (mut face, mut has_come) = (Face::new(&operator), false);
        operator.drive(&mut face, true, &mut has_come);
        outside.join().unwrap();
        operator.drive(&mut face, true, &mut has_come);
        assert!(has_come, "the wake was lost");
        assert!(operator.tokens.at_rest().is_some(), "nothing is awaited, and the flow is not at rest");
        assert!(operator.rests.load(Ordering::Relaxed) >= 1);
    });
}

/// A clone that was left behind by a wait that is over: the flow comes to rest all the same, and a late wake by it does no
/// harm.
#[test]
fn a_clone_that_is_left_behind_hides_no_stall() {
    for wakes in [false, true] {
        model(3, move || {
            let operator = Operator::new();
            let (mut face, mut has_come) = (Face::new(&operator), false);
            let left = face.clone();
            let outside = thread::spawn(move || {
                if wakes {
                    left.wake();
                }
                drop(left);
            });
            operator.drive(&mut face, false, &mut has_come);
            assert!(operator.rests.load(Ordering::Relaxed) > 0 || wakes, "no rest was seen");
            outside.join().unwrap();
            operator.drive(&mut face, false, &mut has_come);
            assert!(operator.tokens.at_rest().is_some() && operator.rests.load(Ordering::Relaxed) > 0);
        });
    }
}

/// The last clone goes as the operator counts: if it finds none, it has seen all that came before that, a wake as well.
#[test]
fn one_that_finds_the_last_clone_gone_sees_what_it_was_used_for() {
    model(3, || {
        let operator = Operator::new();
        let face = Face::new(&operator);
        let last = face.clone();
        let outside = thread::spawn(move || {
            last.operator.event.store(1, Ordering::Relaxed);
            last.wake();
        });
        operator.parking.begin(&operator.tokens);
        operator.only_others.note(true);
        let decision = operator.only_others.decide(true, || face.clones.load(Ordering::Relaxed) - 1);
        if decision == Decision::Park {
            assert_eq!(operator.event.load(Ordering::Relaxed), 1, "parks, and has not seen the wake");
        }
        outside.join().unwrap();
    });
}
