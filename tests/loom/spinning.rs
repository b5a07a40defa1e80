//! Model check of `operator/spinning.rs`: a task that spins is woken once, by its spinning or otherwise.

#[path = "../../src/operator/spinning.rs"]
mod spinning;

use std::sync::Arc;

use self::spinning::Spinning;
use crate::sync::{AtomicBool, Ordering, model};
use loom::thread;

/// A task, its flag `woken` as in `operator/idle.rs`, and whether its waker was called.
struct Task {
    spinning: Spinning,
    woken: AtomicBool,
    called: AtomicBool,
}

#[test]
fn a_wake_of_a_spinning_task_is_noticed_once() {
    model(4, || {
        let task =
            Arc::new(Task { spinning: Spinning::new(), woken: AtomicBool::new(false), called: AtomicBool::new(false) });
        let waker = task.clone();
        let waker = thread::spawn(move || {
            waker.woken.swap(true, Ordering::SeqCst);
            if !waker.spinning.wake() {
                waker.called.store(true, Ordering::SeqCst);
            }
        });
        task.spinning.begin();
        let mut turns = if task.woken.load(Ordering::SeqCst) { 0 } else { 2 };
        while task.spinning.is_on() && turns > 0 {
            turns -= 1;
            thread::yield_now();
        }
        let noticed = task.spinning.end();
        waker.join().unwrap();
        assert_ne!(
            noticed,
            task.called.load(Ordering::SeqCst),
            "either the spinning notices it, or the waker is called"
        );
    });
}
