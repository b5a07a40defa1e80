//! Model check of `operator/idle.rs`: an operator that waits at a port in the middle
//! of a run, and an event outside its flow that may wake it. The count of a waker's clones is that of `std::sync::Arc`,
//! reimplemented here.

#[allow(dead_code)]
#[path = "../../src/operator/idle.rs"]
mod idle;

use std::sync::Arc;

use self::idle::{Decision, NotedWaits, Parking, Tokens};
use crate::sync::model;
use loom::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

/// The only operator of its flow. In its run it waits for a message at a port, and possibly for an event from outside.
struct Operator {
    tokens: Tokens,
    parking: Parking,
    polled: AtomicBool,
    waits: NotedWaits,
    /// Set to 1 when the event from outside has come.
    event: AtomicUsize,
    /// Where the source of the event keeps the waker.
    kept: Mutex<Option<ProbeWaker>>,
    /// How often the flow was seen idle, and would have been reported as stalled.
    rests: AtomicUsize,
}

/// The waker that the operator's future is polled with.
struct ProbeWaker {
    operator: Arc<Operator>,
    clones: Arc<AtomicUsize>,
}

impl ProbeWaker {
    fn new(operator: &Arc<Operator>) -> Self {
        Self { operator: operator.clone(), clones: Arc::new(AtomicUsize::new(1)) }
    }

    fn wake(&self) {
        self.operator.wake();
    }
}

/// Counts like std's `Arc`.
impl Clone for ProbeWaker {
    fn clone(&self) -> Self {
        self.clones.fetch_add(1, Ordering::Relaxed);
        Self { operator: self.operator.clone(), clones: self.clones.clone() }
    }
}

impl Drop for ProbeWaker {
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
            waits: NotedWaits::new(),
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

    /// Sends the event from outside the flow.
    fn send(&self) {
        self.event.store(1, Ordering::Release);
        let kept = self.kept.lock().unwrap().take();
        if let Some(probe) = kept {
            probe.wake();
        }
    }

    /// Polls its task as long as it is woken. `awaits`: it also waits for the event until it has come. Sets `has_come`
    /// once it has.
    fn drive(&self, probe: &mut ProbeWaker, awaits: bool, has_come: &mut bool) {
        while self.polled.swap(false, Ordering::SeqCst) {
            self.parking.begin(&self.tokens);
            if awaits && !*has_come {
                // As in a channel: stores the waker first, then checks.
                *self.kept.lock().unwrap() = Some(probe.clone());
                if self.event.load(Ordering::Acquire) == 1 {
                    *has_come = true;
                    drop(self.kept.lock().unwrap().take());
                    self.waits.end_of_wait();
                }
            }
            // The port has no message.
            self.waits.note(true);
            match self.waits.decide(true, || probe.clones.load(Ordering::Relaxed) - 1) {
                Decision::KeepToken => {}
                Decision::Park => {
                    if self.parking.park(&self.tokens) {
                        assert!(!awaits || *has_come, "reported as stalled although an event is still to come");
                        self.rests.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Decision::Renew => {
                    *probe = ProbeWaker::new(&probe.operator);
                    probe.wake();
                }
            }
        }
    }
}

/// The event may come at any time: before it the flow is not idle; after it, it is.
#[test]
fn a_flow_whose_operator_awaits_an_event_has_not_stalled() {
    model(3, || {
        let operator = Operator::new();
        let outside = {
            let operator = operator.clone();
            thread::spawn(move || operator.send())
        };
        let (mut probe, mut has_come) = (ProbeWaker::new(&operator), false);
        operator.drive(&mut probe, true, &mut has_come);
        outside.join().unwrap();
        operator.drive(&mut probe, true, &mut has_come);
        assert!(has_come, "the wakeup was lost");
        assert!(operator.tokens.at_rest().is_some(), "nothing is awaited, but the flow is not idle");
        assert!(operator.rests.load(Ordering::Relaxed) >= 1);
    });
}

/// A clone of the waker outlives the wait that made it: the flow still becomes idle, and a late wake by that clone is
/// harmless.
#[test]
fn a_leftover_clone_does_not_hide_a_stall() {
    for wakes in [false, true] {
        model(3, move || {
            let operator = Operator::new();
            let (mut probe, mut has_come) = (ProbeWaker::new(&operator), false);
            let left = probe.clone();
            let outside = thread::spawn(move || {
                if wakes {
                    left.wake();
                }
                drop(left);
            });
            operator.drive(&mut probe, false, &mut has_come);
            assert!(operator.rests.load(Ordering::Relaxed) > 0 || wakes, "the flow was never seen idle");
            outside.join().unwrap();
            operator.drive(&mut probe, false, &mut has_come);
            assert!(operator.tokens.at_rest().is_some() && operator.rests.load(Ordering::Relaxed) > 0);
        });
    }
}

/// The last clone is dropped while the operator counts: if it finds none, it has seen everything that came before the
/// drop, including a wake.
#[test]
fn an_operator_that_counts_no_clones_has_seen_their_wakes() {
    model(3, || {
        let operator = Operator::new();
        let probe = ProbeWaker::new(&operator);
        let last = probe.clone();
        let outside = thread::spawn(move || {
            last.operator.event.store(1, Ordering::Relaxed);
            last.wake();
        });
        operator.parking.begin(&operator.tokens);
        operator.waits.note(true);
        let decision = operator.waits.decide(true, || probe.clones.load(Ordering::Relaxed) - 1);
        if decision == Decision::Park {
            assert_eq!(operator.event.load(Ordering::Relaxed), 1, "parked without having seen the wakeup");
        }
        outside.join().unwrap();
    });
}
