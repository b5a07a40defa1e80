//! Model checks of `operator/idle.rs`: operators that wake each other; of `operator/watchers.rs`: an operator and a
//! watcher; and of `operator/senders.rs`: a send from outside and the close of its ingress.

#[allow(dead_code)]
#[path = "../../src/operator/idle.rs"]
mod idle;

#[allow(dead_code)]
#[path = "../../src/operator/senders.rs"]
mod senders;

#[allow(dead_code)]
#[path = "../../src/operator/watchers.rs"]
mod watchers;

use std::task::{Context, Poll, Waker};

use self::idle::{Parking, Tokens, Woken};
use self::senders::Senders;
use self::watchers::{Watcher, Watchers};
use crate::sync::model;
use loom::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

/// An operator with one input, a counter of messages.
struct Operator {
    parking: Parking,
    input: AtomicUsize,
    polled: AtomicBool,
}

impl Operator {
    fn new(tokens: &Tokens, number: usize) -> Self {
        Self { parking: Parking::new(tokens, number), input: AtomicUsize::new(0), polled: AtomicBool::new(true) }
    }

    /// Sends a message and then wakes the operator: the token first, then the task.
    fn send(&self, tokens: &Tokens) {
        self.input.fetch_add(1, Ordering::SeqCst);
        let Woken { first, last } = self.parking.wake(tokens);
        assert!(!last, "the sender holds a token");
        if first {
            // Not a plain store: loom might order it before a swap that had seen an earlier value.
            self.polled.swap(true, Ordering::SeqCst);
        }
    }

    /// Runs its task once: takes a message or parks. `run` handles the message.
    fn poll(&self, tokens: &Tokens, rest: &AtomicUsize, messages: &AtomicUsize, run: impl Fn()) {
        self.parking.begin(tokens);
        if self.input.load(Ordering::SeqCst) > 0 {
            self.input.fetch_sub(1, Ordering::SeqCst);
            run();
            messages.fetch_sub(1, Ordering::SeqCst);
            // Checks again, as the loop does. Not a plain store, for the reason given in `send`.
            self.polled.swap(true, Ordering::SeqCst);
        } else if self.parking.park(tokens) {
            // The last token: no message may be in flight.
            assert_eq!(messages.load(Ordering::SeqCst), 0, "idle with a message in flight");
            rest.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The scheduler: polls the task as long as it is woken.
    fn drive(&self, tokens: &Tokens, rest: &AtomicUsize, messages: &AtomicUsize, run: impl Fn()) {
        while self.polled.swap(false, Ordering::SeqCst) {
            self.poll(tokens, rest, messages, &run);
        }
    }
}

/// The tokens of two operators; the operators between them have already ended.
fn tokens_of_two(distance: usize) -> Tokens {
    let tokens = Tokens::new(distance + 1);
    for between in 1..distance {
        Parking::new(&tokens, between).end(&tokens);
    }
    tokens
}

/// One operator sends to another, which may at any moment be polled because of an old wake. In one group, and in two.
#[test]
fn idle_is_never_seen_while_a_message_is_in_flight() {
    for distance in [1, 4] {
        send_one(distance);
    }
}

fn send_one(distance: usize) {
    model(3, move || {
        let tokens = Arc::new(tokens_of_two(distance));
        let rest = Arc::new(AtomicUsize::new(0));
        let messages = Arc::new(AtomicUsize::new(1));
        let (a, b) = (Arc::new(Operator::new(&tokens, 0)), Arc::new(Operator::new(&tokens, distance)));
        // The work of `a`: one message, after which it sends one to `b`.
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
        // A late poll, from an old wake.
        b.poll(&tokens, &rest, &messages, || {});
        b.drive(&tokens, &rest, &messages, || {});
        other.join().unwrap();
        b.drive(&tokens, &rest, &messages, || {});
        b.poll(&tokens, &rest, &messages, || {});
        b.drive(&tokens, &rest, &messages, || {});
        assert!(tokens.at_rest().is_some(), "all work is done, but a token is left");
        assert!(rest.load(Ordering::SeqCst) >= 1, "the idle state was not seen");
    });
}

/// A thread outside the flow, which holds no token, wakes an operator that another has already woken and that ends. The
/// release of the last token notifies the flow, whichever thread makes it.
#[test]
fn a_late_wake_from_outside_does_not_hide_the_idle_state() {
    for distance in [1, 4] {
        wake_too_late(distance);
    }
}

fn wake_too_late(distance: usize) {
    model(3, move || {
        let tokens = Arc::new(tokens_of_two(distance));
        let notified = Arc::new(AtomicUsize::new(0));
        let parking = Arc::new(Parking::new(&tokens, 0));
        let other = Parking::new(&tokens, distance);
        parking.begin(&tokens);
        assert!(!parking.park(&tokens), "the other operator holds a token");

        let outside = {
            let (tokens, notified, parking) = (tokens.clone(), notified.clone(), parking.clone());
            thread::spawn(move || {
                if parking.wake(&tokens).last {
                    notified.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        let end = |parking: &Parking| {
            if parking.end(&tokens) {
                notified.fetch_add(1, Ordering::SeqCst);
            }
        };
        // The other operator wakes it, it runs and ends, and then the other ends.
        assert!(!parking.wake(&tokens).last);
        assert!(!parking.wake(&tokens).last);
        end(&parking);
        end(&other);
        outside.join().unwrap();
        assert!(tokens.at_rest().is_some());
        assert!(notified.load(Ordering::SeqCst) >= 1, "the flow was not notified that it is idle");
    });
}

/// Two threads wake an operator in the middle of its run, or while it waits at its ports: the second relies on the
/// first to have the task polled, and its change must be seen nevertheless.
#[test]
fn a_wake_that_relies_on_the_poll_of_another_is_not_lost() {
    for parks in [false, true] {
        model(2, move || {
            let tokens = Arc::new(Tokens::new(3));
            let parking = Arc::new(Parking::new(&tokens, 0));
            let shown = Arc::new(AtomicUsize::new(0));
            let polled = Arc::new(AtomicBool::new(true));
            let wakers: Vec<_> = [1, 2]
                .map(|_| {
                    let (tokens, parking, shown, polled) =
                        (tokens.clone(), parking.clone(), shown.clone(), polled.clone());
                    thread::spawn(move || {
                        // Nothing else orders the change.
                        shown.fetch_add(1, Ordering::Relaxed);
                        if parking.wake(&tokens).first {
                            polled.swap(true, Ordering::Release);
                        }
                    })
                })
                .into();
            let mut seen = 0;
            let mut drive = || {
                while polled.swap(false, Ordering::Acquire) {
                    parking.begin(&tokens);
                    seen = shown.load(Ordering::Relaxed);
                    if parks {
                        parking.park(&tokens);
                    }
                }
            };
            drive();
            for waker in wakers {
                waker.join().unwrap();
            }
            drive();
            assert_eq!(seen, 2, "the task was not polled after a wake");
        });
    }
}

/// An operator polls its ports twice in one poll of its task, as a loop of its own over several futures may: it has a
/// token whenever it proceeds, and none once it has parked for good.
#[test]
fn an_operator_that_polls_again_after_parking_has_a_token() {
    model(3, || {
        let tokens = Arc::new(Tokens::new(2));
        let operator = Arc::new(Operator::new(&tokens, 0));
        let other = {
            let (tokens, operator) = (tokens.clone(), operator.clone());
            thread::spawn(move || {
                operator.send(&tokens);
                assert!(tokens.at_rest().is_none(), "idle with a message in flight");
                Parking::new(&tokens, 1).end(&tokens);
            })
        };
        let mut taken = 0;
        let mut drive = || {
            while operator.polled.swap(false, Ordering::SeqCst) {
                operator.parking.begin(&tokens);
                for _ in 0..2 {
                    operator.parking.resume(&tokens);
                    if operator.input.load(Ordering::SeqCst) > taken {
                        assert!(tokens.at_rest().is_none(), "a run without a token");
                        taken += 1;
                        operator.polled.store(true, Ordering::SeqCst);
                    } else {
                        operator.parking.park(&tokens);
                    }
                }
            }
        };
        drive();
        other.join().unwrap();
        drive();
        assert_eq!(taken, 1);
        assert!(tokens.at_rest().is_some(), "all work is done, but a token is left");
    });
}

/// An operator stops waiting at its ports and proceeds with something else: it has a token, even if other tasks wake it
/// or release their own tokens.
#[test]
fn an_operator_that_stops_waiting_has_a_token() {
    for distance in [1, 4] {
        model(3, move || {
            let tokens = Arc::new(tokens_of_two(distance));
            let parking = Arc::new(Parking::new(&tokens, 0));
            parking.begin(&tokens);
            assert!(!parking.park(&tokens), "the other operator holds a token");
            let other = {
                let (tokens, parking) = (tokens.clone(), parking.clone());
                thread::spawn(move || {
                    let _ = parking.wake(&tokens);
                })
            };
            parking.resume(&tokens);
            assert!(!Parking::new(&tokens, distance).end(&tokens), "idle while an operator proceeds");
            assert!(tokens.at_rest().is_none(), "it proceeds without a token");
            other.join().unwrap();
            assert!(tokens.at_rest().is_none(), "it proceeds without a token");
            assert!(parking.end(&tokens), "the last token was released without a notification");
            assert!(tokens.at_rest().is_some());
        });
    }
}

/// Two looks that show the same idle state mean that no work ran in between: an operator that was notified, and has
/// parked again, is detected.
#[test]
fn an_idle_state_seen_twice_is_the_same() {
    for distance in [1, 4] {
        model(3, move || {
            let tokens = Arc::new(tokens_of_two(distance));
            let (one, two) = (Parking::new(&tokens, 0), Parking::new(&tokens, distance));
            one.begin(&tokens);
            two.begin(&tokens);
            assert!(!one.park(&tokens) && two.park(&tokens));
            let ran = Arc::new(AtomicUsize::new(0));
            let other = {
                let (tokens, ran) = (tokens.clone(), ran.clone());
                thread::spawn(move || {
                    let _ = one.wake(&tokens);
                    one.begin(&tokens);
                    ran.fetch_add(1, Ordering::SeqCst);
                    assert!(one.park(&tokens));
                })
            };
            let (first, before) = (tokens.at_rest(), ran.load(Ordering::SeqCst));
            let (after, second) = (ran.load(Ordering::SeqCst), tokens.at_rest());
            if first.is_some() && first == second {
                assert_eq!(before, after, "it ran between the two looks");
            }
            other.join().unwrap();
            assert_ne!(tokens.at_rest(), None);
        });
    }
}

/// Visits everything that is marked as changed, and reads what the operator shows then.
fn look(watcher: &Watcher, shown: &AtomicUsize, seen: &mut usize) -> Poll<()> {
    while let Poll::Ready(next) = watcher.poll_next(&mut Context::from_waker(Waker::noop())) {
        if next.is_none() {
            return Poll::Ready(());
        }
        *seen = shown.load(Ordering::Acquire);
    }
    Poll::Pending
}

/// An operator's task as a watcher sees it.
struct Shows {
    watchers: Watchers,
    now: AtomicUsize,
    watched: AtomicUsize,
    woken: AtomicBool,
    turns: AtomicUsize,
}

impl Shows {
    /// Initially woken.
    fn new() -> Self {
        let [now, watched, turns] = [0; 3].map(AtomicUsize::new);
        Self { watchers: Watchers::default(), now, watched, woken: AtomicBool::new(true), turns }
    }

    /// Polls while it is woken. In its first turn it shows a value, then another one, or its end, which is the last.
    fn drive(&self, ends: bool) {
        while self.woken.swap(false, Ordering::AcqRel) {
            self.watchers.notify_new(0, &self.watched);
            if self.turns.fetch_add(1, Ordering::Relaxed) > 0 {
                continue;
            }
            self.now.store(1, Ordering::Release);
            self.watchers.notify(0);
            self.now.store(2, Ordering::Release);
            if ends {
                self.watchers.notify_last(0);
                return;
            }
            self.watchers.notify(0);
        }
    }
}

/// A watcher does not wake a parked operator, and misses nothing nevertheless: earlier values are visible, and the next
/// poll finds them.
#[test]
fn a_watcher_of_a_parked_operator_misses_nothing() {
    model(3, || {
        let (shows, tokens) = (Arc::new(Shows::new()), Arc::new(Tokens::new(1)));
        let parking = Arc::new(Parking::new(&tokens, 0));
        let operator = {
            let (shows, tokens, parking) = (shows.clone(), tokens.clone(), parking.clone());
            thread::spawn(move || {
                for use_lock in 1..=2 {
                    parking.begin(&tokens);
                    shows.watchers.notify_new(0, &shows.watched);
                    shows.now.store(use_lock, Ordering::Release);
                    shows.watchers.notify(0);
                    parking.park(&tokens);
                    if use_lock == 1 {
                        // A message arrives.
                        let _ = parking.wake(&tokens);
                    }
                }
            })
        };
        let watcher = shows.watchers.add(1);
        let wakes = !parking.publish_and_check_parked();
        let mut seen = usize::MAX;
        assert!(look(&watcher, &shows.now, &mut seen).is_pending());
        operator.join().unwrap();
        if wakes {
            // Its task runs again, possibly once more than needed.
            shows.watchers.notify_new(0, &shows.watched);
        }
        assert!(look(&watcher, &shows.now, &mut seen).is_pending());
        assert_eq!(seen, 2);
    });
}

/// A watcher finally sees the operator's last value, whenever the watcher was added and whenever it looks.
#[test]
fn a_watcher_misses_nothing() {
    for ends in [false, true] {
        model(3, move || {
            let shows = Arc::new(Shows::new());
            let operator = {
                let shows = shows.clone();
                thread::spawn(move || shows.drive(ends))
            };
            let watcher = shows.watchers.add(1);
            shows.woken.swap(true, Ordering::AcqRel);
            let mut seen = usize::MAX;
            assert!(look(&watcher, &shows.now, &mut seen).is_pending());
            assert_ne!(seen, usize::MAX, "each is marked initially");
            operator.join().unwrap();
            if !ends {
                // Its task runs again, if the first wake was too late.
                shows.drive(ends);
            }
            assert!(look(&watcher, &shows.now, &mut seen).is_pending());
            assert_eq!(seen, 2, "ends: {ends}");
            shows.watchers.end();
            assert!(look(&watcher, &shows.now, &mut seen).is_ready());
        });
    }
}

/// An operator sends an object out of the flow and parks. The thread that holds it there wakes the operator when it
/// returns the object, and releases its token of the flow only after that.
#[test]
fn an_object_outside_is_returned_before_the_flow_is_idle() {
    model(3, || {
        let tokens = Arc::new(Tokens::new(1));
        let rest = Arc::new(AtomicUsize::new(0));
        let messages = Arc::new(AtomicUsize::new(1));
        let operator = Arc::new(Operator::new(&tokens, 0));
        tokens.lend();
        let outside = {
            let (tokens, rest, operator) = (tokens.clone(), rest.clone(), operator.clone());
            thread::spawn(move || {
                operator.send(&tokens);
                if tokens.regain() {
                    rest.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        operator.drive(&tokens, &rest, &messages, || {});
        outside.join().unwrap();
        operator.drive(&tokens, &rest, &messages, || {});
        assert!(tokens.at_rest().is_some(), "all work is done, but a token is left");
        assert!(rest.load(Ordering::SeqCst) >= 1, "the idle state was not seen");
    });
}

/// A flow of two operators: the first represents senders from outside, the second reads their messages.
struct FedFlow {
    tokens: Tokens,
    senders: Senders,
    reader: Operator,
    rest: AtomicUsize,
    /// Accepted messages that the reader has not taken, whether or not it was woken for them.
    messages: AtomicUsize,
    accepted: AtomicUsize,
    taken: AtomicUsize,
}

impl FedFlow {
    fn new() -> Arc<Self> {
        let tokens = Tokens::new(2);
        let [rest, messages, accepted, taken] = [0; 4].map(AtomicUsize::new);
        let reader = Operator::new(&tokens, 1);
        Arc::new(Self { tokens, senders: Senders::new(), reader, rest, messages, accepted, taken })
    }

    /// Notifies the flow's own task that no token is left.
    fn rests(&self, last: bool) {
        if last {
            assert_eq!(self.messages.load(Ordering::SeqCst), 0, "idle with a message on its way in");
            self.rest.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Enqueues the message, and wakes the reader later. `closes`: in between it finds that no more can be sent.
    fn send(&self, closes: bool) {
        if !self.senders.enter() {
            return;
        }
        self.messages.fetch_add(1, Ordering::SeqCst);
        self.accepted.fetch_add(1, Ordering::SeqCst);
        if closes {
            assert!(!self.senders.close(&self.tokens), "idle with a message on its way in");
        }
        self.reader.send(&self.tokens);
        self.rests(self.senders.leave(&self.tokens));
    }

    fn read(&self) {
        self.reader.drive(&self.tokens, &self.rest, &self.messages, || {
            self.taken.fetch_add(1, Ordering::SeqCst);
        });
    }
}

/// Runs `others` while the reader waits and the first operator closes the ingress and ends.
fn fed<const N: usize>(others: [fn(&FedFlow); N]) {
    let flow = FedFlow::new();
    let others = others.map(|other| {
        let flow = flow.clone();
        thread::spawn(move || other(&flow))
    });
    flow.read();
    flow.rests(flow.senders.close(&flow.tokens));
    flow.rests(Parking::new(&flow.tokens, 0).end(&flow.tokens));
    if flow.tokens.at_rest().is_some() {
        assert_eq!(flow.messages.load(Ordering::SeqCst), 0, "idle with a message on its way in");
    }
    others.into_iter().for_each(|other| other.join().unwrap());
    flow.read();
    assert_eq!(flow.taken.load(Ordering::SeqCst), flow.accepted.load(Ordering::SeqCst), "a message is lost");
    assert!(flow.tokens.at_rest().is_some(), "all work is done, but a token is left");
    assert!(flow.rest.load(Ordering::SeqCst) >= 1, "the idle state was not seen");
}

/// A message from outside is accepted while the ingress is being closed: the flow is not idle before its reader is
/// woken.
#[test]
fn a_message_on_its_way_in_keeps_the_flow_busy() {
    model(3, || fed([|flow| flow.send(false)]));
}

/// The same if another thread closes the ingress, a sender or not, and the operator finds it closed. With several
/// senders, the last one lets the flow become idle.
#[test]
fn closing_the_ingress_keeps_a_token_for_the_senders() {
    model(2, || {
        fed([|flow| flow.send(false), |flow| flow.rests(flow.senders.close(&flow.tokens))]);
    });
    model(2, || fed([|flow| flow.send(false), |flow| flow.send(true)]));
}
