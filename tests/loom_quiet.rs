//! Model check of `operator/quiet.rs`: every interleaving of operators that wake each other. The file is included as it
//! stands, with loom's primitives.

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
}

#[allow(dead_code)]
#[path = "../src/operator/quiet.rs"]
mod quiet;

use loom::{
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};
use quiet::{Parking, Tokens};

fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

/// An operator with one input, a counter of messages.
struct Operator {
    parking: Parking,
    input: AtomicUsize,
    polled: AtomicBool,
}

impl Operator {
    fn new(number: usize) -> Self {
        Self { parking: Parking::new(number), input: AtomicUsize::new(0), polled: AtomicBool::new(true) }
    }

    /// Somebody sends it a message, then wakes it: the token first, the task then.
    fn send(&self, tokens: &Tokens) {
        self.input.fetch_add(1, Ordering::SeqCst);
        assert!(!self.parking.wake(tokens), "the sender holds a token");
        self.polled.store(true, Ordering::SeqCst);
    }

    /// Its task runs once: takes a message or parks. What it does with the message, `run` says.
    fn poll(&self, tokens: &Tokens, rest: &AtomicUsize, messages: &AtomicUsize, run: impl Fn()) {
        self.parking.begin(tokens);
        if self.input.load(Ordering::SeqCst) > 0 {
            self.input.fetch_sub(1, Ordering::SeqCst);
            run();
            messages.fetch_sub(1, Ordering::SeqCst);
            // Looks again, as the loop does.
            self.polled.store(true, Ordering::SeqCst);
        } else if self.parking.park(tokens) {
            // The last token: nothing may be under way.
            assert_eq!(messages.load(Ordering::SeqCst), 0, "at rest with a message under way");
            rest.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The scheduler's part: polls while somebody asked for it.
    fn drive(&self, tokens: &Tokens, rest: &AtomicUsize, messages: &AtomicUsize, run: impl Fn()) {
        while self.polled.swap(false, Ordering::SeqCst) {
            self.poll(tokens, rest, messages, &run);
        }
    }
}

/// One operator sends to another, which may at any moment be polled for a wake of long ago. In one group, and in two.
#[test]
fn rest_is_never_seen_while_a_message_is_under_way() {
    for distance in [1, 4] {
        send_one(distance);
    }
}

fn send_one(distance: usize) {
    model(move || {
        let tokens = Arc::new(Tokens::new(distance + 1));
        // Those in between rest from the first.
        for between in 1..distance {
            Parking::new(between).end(&tokens);
        }
        let rest = Arc::new(AtomicUsize::new(0));
        let messages = Arc::new(AtomicUsize::new(1));
        let (a, b) = (Arc::new(Operator::new(0)), Arc::new(Operator::new(distance)));
        // What `a` has to do: one message, after which it sends one to `b`.
        a.input.store(1, Ordering::SeqCst);

        let other = {
            let (tokens, rest, messages, a, b) = (tokens.clone(), rest.clone(), messages.clone(), a.clone(), b.clone());
            thread::spawn(move || {
                a.drive(&tokens, &rest, &messages, || {
                    messages.fetch_add(1, Ordering::SeqCst);
                    b.send(&tokens);
                });
            })
        };
        b.drive(&tokens, &rest, &messages, || {});
        // A late poll, for a wake of long ago.
        b.poll(&tokens, &rest, &messages, || {});
        b.drive(&tokens, &rest, &messages, || {});
        other.join().unwrap();
        b.drive(&tokens, &rest, &messages, || {});
        b.poll(&tokens, &rest, &messages, || {});
        b.drive(&tokens, &rest, &messages, || {});
        assert!(tokens.none(), "everything is done, and a token is left");
        assert!(rest.load(Ordering::SeqCst) >= 1, "nobody saw the rest");
    });
}

/// Somebody outside the flow, who holds no token, wakes an operator that another has woken already, and that ends. Whose
/// token is the last to go, the flow is told.
#[test]
fn a_wake_from_outside_that_comes_too_late_hides_no_rest() {
    model(|| {
        let tokens = Arc::new(Tokens::new(2));
        let told = Arc::new(AtomicUsize::new(0));
        let parking = Arc::new(Parking::new(0));
        let other = Parking::new(1);
        parking.begin(&tokens);
        assert!(!parking.park(&tokens), "the other operator holds a token");

        let outside = {
            let (tokens, told, parking) = (tokens.clone(), told.clone(), parking.clone());
            thread::spawn(move || {
                if parking.wake(&tokens) {
                    told.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        let end = |parking: &Parking| {
            if parking.end(&tokens) {
                told.fetch_add(1, Ordering::SeqCst);
            }
        };
        // The other wakes it, it runs and ends, and then the other ends.
        assert!(!parking.wake(&tokens));
        assert!(!parking.wake(&tokens));
        end(&parking);
        end(&other);
        outside.join().unwrap();
        assert!(tokens.none());
        assert!(told.load(Ordering::SeqCst) >= 1, "nobody was told of the rest");
    });
}
