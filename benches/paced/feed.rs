//! Threads that send on time, and what is measured: common to all ways.

use std::{thread, time::Instant};

use hdrhistogram::Histogram;

use crate::{KERNELS, clock, cpu};

/// Nanoseconds from one message of a flow to its next.
const PERIOD: u64 = 1_000_000;
/// Messages of each flow at the beginning of each pass that are not recorded.
const WARM: u64 = 200;

/// Nanoseconds, up to 10 s.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 10_000_000_000, 3).expect("valid bounds")
}

/// One pass of one way.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) flows: usize,
    /// Of each flow, besides those that warm up.
    pub(crate) messages: u64,
    pub(crate) feeders: usize,
}

impl Plan {
    /// The messages of each flow.
    pub(crate) fn total(&self) -> u64 {
        WARM + self.messages
    }
}

/// Sends the message with this number, stamped just before.
pub(crate) type Sender<'a> = Box<dyn FnMut(u64) + Send + 'a>;

/// What the sink of one flow has seen.
pub(crate) struct Seen {
    next: u64,
    latency: Histogram<u64>,
}

impl Seen {
    pub(crate) fn new() -> Self {
        Self { next: 0, latency: histogram() }
    }

    /// Records a message. Its first element was its number, its second the time at which it was sent; each kernel has
    /// added one to both.
    pub(crate) fn arrived(&mut self, number: u64, sent: u64) {
        let now = clock::now();
        assert_eq!(number, self.next + KERNELS, "a message came out of order, or missed a kernel");
        if self.next >= WARM {
            self.latency.saturating_record(now - (sent - KERNELS));
        }
        self.next += 1;
    }
}

/// What the feeders have seen.
pub(crate) struct Fed {
    lateness: Histogram<u64>,
    wall: f64,
    cpu: f64,
}

/// Sends the messages of all flows, the phases of which are spread evenly over the period. Each feeder calls `enter`
/// once, and then sends for its share of the flows. Returns when all messages are sent and all senders dropped.
pub(crate) fn feed(plan: &Plan, enter: impl Fn() + Sync, senders: Vec<Sender>) -> Fed {
    let mut shares: Vec<Vec<(u64, Sender)>> = (0..plan.feeders.clamp(1, plan.flows)).map(|_| Vec::new()).collect();
    let feeders = shares.len();
    for (flow, sender) in senders.into_iter().enumerate() {
        shares[flow % feeders].push((PERIOD * flow as u64 / plan.flows as u64, sender));
    }
    let (cpu, began) = (cpu::used(), Instant::now());
    let start = clock::now() + PERIOD;
    let one = |mut share: Vec<(u64, Sender)>| {
        enter();
        clock::wake_on_time();
        let mut lateness = histogram();
        for number in 0..plan.total() {
            for (phase, send) in &mut share {
                let due = start + PERIOD * number + *phase;
                clock::sleep_until(due);
                if number >= WARM {
                    lateness.saturating_record(clock::now() - due);
                }
                send(number);
            }
        }
        lateness
    };
    let mut lateness = histogram();
    thread::scope(|scope| {
        let threads: Vec<_> = shares.into_iter().map(|share| scope.spawn(|| one(share))).collect();
        for thread in threads {
            lateness.add(thread.join().expect("no panic")).expect("the same bounds");
        }
    });
    Fed { lateness, wall: began.elapsed().as_secs_f64(), cpu: (cpu::used() - cpu).as_secs_f64() }
}

/// The passes of one way.
pub(crate) struct Outcome {
    pub(crate) latency: Histogram<u64>,
    pub(crate) lateness: Histogram<u64>,
    wall: f64,
    cpu: f64,
    sent: u64,
}

impl Outcome {
    pub(crate) fn none() -> Self {
        Self { latency: histogram(), lateness: histogram(), wall: 0.0, cpu: 0.0, sent: 0 }
    }

    pub(crate) fn add(&mut self, plan: &Plan, fed: Fed, seen: impl IntoIterator<Item = Seen>) {
        for seen in seen {
            assert_eq!(seen.next, plan.total(), "a message was lost");
            self.latency.add(seen.latency).expect("the same bounds");
        }
        self.lateness.add(fed.lateness).expect("the same bounds");
        self.wall += fed.wall;
        self.cpu += fed.cpu;
        self.sent += plan.total() * plan.flows as u64;
    }

    pub(crate) fn cores(&self) -> f64 {
        self.cpu / self.wall
    }

    /// Microseconds of processor time.
    pub(crate) fn cpu_per_message(&self) -> f64 {
        self.cpu * 1e6 / self.sent as f64
    }
}
