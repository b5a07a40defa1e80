//! The same by hand, with plain driver calls: a copy, three kernels and a copy on one stream for each flow. The ways
//! differ in who enqueues, and in how the sink learns that a message is done:
//!
//! | way | enqueued by | the sink |
//! |---|---|---|
//! | spin | the feeder | one thread, which never sleeps: it queries the events of all messages on their way |
//! | block | the feeder | a thread for each flow: `cuEventSynchronize` with `CU_EVENT_BLOCKING_SYNC`; parked while nothing is on its way |
//! | callback | the flow's task | the same tokio task: `cuLaunchHostFunc` behind the last copy answers through a channel |
//!
//! A spinning thread for each of 64 flows would need 64 cores.

use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use tokio::{
    runtime::Runtime,
    sync::{mpsc, oneshot},
};

use crate::{
    ELEMENTS, KERNELS, NANOSECONDS, THREADS, clock,
    feed::{Outcome, Plan, Seen, Sender, feed},
    gpu::{Event, Gpu, Kernel, Stream},
};

/// Messages of one flow that can be on their way.
const SLOTS: usize = 4;

struct Slot {
    input: &'static [AtomicU64],
    output: &'static [AtomicU64],
    device: u64,
    queried: Event,
    blocking: Event,
}

/// One flow. Message `n` uses the slot `n % SLOTS`.
struct Lane {
    kernel: Kernel,
    stream: Stream,
    slots: Vec<Slot>,
    /// Messages with a recorded event.
    sent: AtomicU64,
    /// Messages that the sink is done with.
    arrived: AtomicU64,
}

impl Lane {
    fn new(gpu: &Gpu, kernel: Kernel) -> Self {
        let slot = |_| Slot {
            input: gpu.host_memory(ELEMENTS),
            output: gpu.host_memory(ELEMENTS),
            device: gpu.memory(ELEMENTS * size_of::<u64>()),
            queried: Event::new(),
            blocking: Event::blocking(),
        };
        Self {
            kernel,
            stream: Stream::new(),
            slots: (0..SLOTS).map(slot).collect(),
            sent: AtomicU64::new(0),
            arrived: AtomicU64::new(0),
        }
    }

    fn slot(&self, number: u64) -> &Slot {
        &self.slots[number as usize % SLOTS]
    }

    /// Waits for the slot, which is most often free.
    fn fill(&self, number: u64) {
        while number >= self.arrived.load(Ordering::Acquire) + SLOTS as u64 {
            thread::yield_now();
        }
        let input = self.slot(number).input;
        input[0].store(number, Ordering::Relaxed);
        input[1].store(clock::now(), Ordering::Relaxed);
    }

    fn enqueue(&self, number: u64) {
        let slot = self.slot(number);
        // SAFETY: device memory for as many elements as the host memory has, never freed; the kernel's arguments are
        // that memory, its length and a time.
        unsafe {
            self.stream.copy_in(slot.device, slot.input);
            for _ in 0..KERNELS {
                self.stream.launch(self.kernel, THREADS, &[slot.device, ELEMENTS as u64, NANOSECONDS]);
            }
            self.stream.copy_out(slot.output, slot.device);
        }
    }

    /// Fills, enqueues, records the event that `of` selects, and lets the sink know.
    fn send(&self, number: u64, of: fn(&Slot) -> &Event) {
        self.fill(number);
        self.enqueue(number);
        self.stream.record(of(self.slot(number)));
        self.sent.store(number + 1, Ordering::Release);
    }

    fn is_sent(&self, number: u64) -> bool {
        number < self.sent.load(Ordering::Acquire)
    }

    /// Reads a message that is done.
    fn take(&self, number: u64, seen: &mut Seen) {
        let output = self.slot(number).output;
        seen.arrived(output[0].load(Ordering::Relaxed), output[1].load(Ordering::Relaxed));
        self.arrived.store(number + 1, Ordering::Release);
    }
}

pub(crate) struct Bare {
    gpu: Gpu,
    lanes: Vec<Arc<Lane>>,
}

impl Bare {
    /// For so many flows at most. The context is current on this thread.
    pub(crate) fn new(gpu: &Gpu, flows: usize) -> Self {
        let parameters = "unsigned long long *, unsigned long long, unsigned long long";
        let kernel = gpu.kernel("work", parameters, include_str!("work.cu"));
        Self { gpu: gpu.clone(), lanes: (0..flows).map(|_| Arc::new(Lane::new(gpu, kernel))).collect() }
    }

    /// The lanes of a pass, unused as new ones.
    fn lanes(&self, plan: &Plan) -> &[Arc<Lane>] {
        let lanes = &self.lanes[..plan.flows];
        for lane in lanes {
            lane.sent.store(0, Ordering::Relaxed);
            lane.arrived.store(0, Ordering::Relaxed);
        }
        lanes
    }

    pub(crate) fn spin(&self, plan: &Plan, outcome: &mut Outcome) {
        let lanes = self.lanes(plan);
        let senders = lanes.iter().map(|lane| -> Sender { Box::new(|number| lane.send(number, |slot| &slot.queried)) });
        let (fed, seen) = thread::scope(|scope| {
            let sink = scope.spawn(|| self.poll(lanes, plan.total()));
            let fed = feed(plan, || self.gpu.enter(), senders.collect());
            (fed, sink.join().expect("no panic"))
        });
        outcome.add(plan, fed, seen);
    }

    /// Queries events until so many messages of each lane have arrived.
    fn poll(&self, lanes: &[Arc<Lane>], total: u64) -> Vec<Seen> {
        self.gpu.enter();
        let mut all: Vec<_> = lanes.iter().map(|lane| (lane, 0, Seen::new())).collect();
        let mut open = lanes.len();
        while open > 0 {
            for (lane, next, seen) in &mut all {
                if lane.is_sent(*next) && lane.slot(*next).queried.is_done() {
                    lane.take(*next, seen);
                    *next += 1;
                    open -= usize::from(*next == total);
                }
            }
            hint::spin_loop();
        }
        all.into_iter().map(|(_, _, seen)| seen).collect()
    }

    pub(crate) fn block(&self, plan: &Plan, outcome: &mut Outcome) {
        let lanes = self.lanes(plan);
        let sink = |lane: &Lane| {
            self.gpu.enter();
            let mut seen = Seen::new();
            for number in 0..plan.total() {
                while !lane.is_sent(number) {
                    thread::park();
                }
                lane.slot(number).blocking.synchronize();
                lane.take(number, &mut seen);
            }
            seen
        };
        let (fed, seen) = thread::scope(|scope| {
            let sinks: Vec<_> = lanes.iter().map(|lane| scope.spawn(move || sink(lane))).collect();
            let senders = lanes.iter().zip(&sinks).map(|(lane, sink)| -> Sender {
                Box::new(|number| {
                    lane.send(number, |slot| &slot.blocking);
                    sink.thread().unpark();
                })
            });
            let fed = feed(plan, || self.gpu.enter(), senders.collect());
            (fed, sinks.into_iter().map(|sink| sink.join().expect("no panic")).collect::<Vec<_>>())
        });
        outcome.add(plan, fed, seen);
    }

    /// The context is current on the runtime's threads.
    pub(crate) fn callback(&self, runtime: &Runtime, plan: &Plan, outcome: &mut Outcome) {
        let (mut senders, mut tasks) = (Vec::<Sender>::new(), Vec::new());
        for lane in self.lanes(plan) {
            let (sender, mut messages) = mpsc::channel(SLOTS);
            let own = lane.clone();
            tasks.push(runtime.spawn(async move {
                let mut seen = Seen::new();
                while let Some(number) = messages.recv().await {
                    own.enqueue(number);
                    let (answer, answered) = oneshot::channel();
                    own.stream.host_function(move || _ = answer.send(()));
                    answered.await.expect("the driver calls the function");
                    own.take(number, &mut seen);
                }
                seen
            }));
            senders.push(Box::new(move |number| {
                lane.fill(number);
                sender.try_send(number).expect("room, because its slot was free");
            }));
        }
        let fed = feed(plan, || (), senders);
        let seen = tasks.into_iter().map(|task| runtime.block_on(task).expect("no panic"));
        outcome.add(plan, fed, seen);
    }
}
