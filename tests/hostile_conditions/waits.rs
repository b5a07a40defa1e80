//! Waits for memory, for conditions on memory and for blank envelopes.

use std::{
    pin::{Pin, pin},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use tokio::sync::Notify;
use wakeline::{
    Stream,
    condition::{Condition, Status, memory},
    memory::Allocator,
    operator::{concurrent, sink, source},
    prelude::*,
};

use common::{emulated, lock, on_both, shared, streams, within};

const BLOCK: u64 = 4096;

type Call = Box<dyn FnOnce() + Send>;

/// A waker that counts its wakes, with one call for the first wake and another for its drop.
#[derive(Default)]
struct Hostile {
    woken: AtomicUsize,
    on_wake: Mutex<Option<Call>>,
    on_drop: Mutex<Option<Call>>,
}

impl Wake for Hostile {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.fetch_add(1, Ordering::SeqCst);
        let call = lock(&self.on_wake).take();
        if let Some(call) = call {
            call();
        }
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let call = lock(&self.on_drop).take();
        if let Some(call) = call {
            call();
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    PanicsWhenWoken,
    PanicsWhenDropped,
    CallsBackWhenWoken,
    CallsBackWhenDropped,
}

const KINDS: [Kind; 4] =
    [Kind::PanicsWhenWoken, Kind::PanicsWhenDropped, Kind::CallsBackWhenWoken, Kind::CallsBackWhenDropped];

/// A waker of that kind. It calls `back`, or drops it while it panics.
fn hostile(kind: Kind, back: impl FnOnce() + Send + 'static) -> Waker {
    let panics = matches!(kind, Kind::PanicsWhenWoken | Kind::PanicsWhenDropped);
    let call: Call = Box::new(move || {
        if panics {
            let _dropped_as_it_unwinds = back;
            panic!("a hostile waker");
        }
        back();
    });
    let hostile = Hostile::default();
    match kind {
        Kind::PanicsWhenWoken | Kind::CallsBackWhenWoken => *lock(&hostile.on_wake) = Some(call),
        Kind::PanicsWhenDropped | Kind::CallsBackWhenDropped => *lock(&hostile.on_drop) = Some(call),
    }
    Waker::from(Arc::new(hostile))
}

fn counting() -> (Arc<Hostile>, Waker) {
    let counts = Arc::new(Hostile::default());
    (counts.clone(), Waker::from(counts))
}

/// Polls once. The future keeps the waker.
fn poll_with<F: Future + ?Sized>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

/// Runs the work on its own thread, so that a deadlock fails the test and a panic is noticed.
async fn on_its_own_thread(work: impl FnOnce() + Send + 'static) {
    let (sender, outcome) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        let _ = sender.send(done.is_ok());
    });
    assert!(within(outcome).await.unwrap(), "a waker's panic left a call of the library");
}

/// Reads the statistics, allocates, frees a buffer and waits for memory.
fn back(all: &Allocator, stream: &Stream, buffer: Buffer<u8>) -> impl FnOnce() + Send + 'static {
    let (all, stream) = (all.clone(), stream.clone());
    move || {
        let _ = all.stats();
        let _ = all.alloc::<u8>(&stream, 1).map(drop);
        drop(buffer);
        let _ = poll_with(pin!(all.alloc_when_free::<u8>(&stream, 1)), Waker::noop()).map(drop);
    }
}

on_both!(the_queue_for_memory_advances_past_a_hostile_waker, async |device: Device| {
    for kind in KINDS {
        let [a] = streams(&device);
        let all = Allocator::blocks(&device, BLOCK, 2).unwrap();
        let [one, other] = [0, 1].map(|_| all.alloc::<u8>(&a, 1).unwrap());
        let waker = hostile(kind, back(&all, &a, other));
        let mut first = Box::pin(all.alloc_when_free::<u8>(&a, 1));
        assert!(poll_with(first.as_mut(), &waker).is_pending());
        drop(waker);
        let (all_too, b) = (all.clone(), a.clone());
        let mut second = Box::pin(async move { all_too.alloc_when_free::<u8>(&b, 1).await });
        assert!(poll_with(second.as_mut(), Waker::noop()).is_pending());
        let second = tokio::spawn(second);
        let (counts, plain) = counting();
        let mut third = Box::pin(all.alloc_when_free::<u8>(&a, 1));
        assert!(poll_with(third.as_mut(), &plain).is_pending());
        on_its_own_thread(move || drop(one)).await;
        assert!(poll_with(third.as_mut(), &plain).is_pending(), "the memory is reserved for the first waiter");
        drop(first);
        let served = within(second).await.unwrap().unwrap();
        drop(served);
        let served = within(third).await.unwrap();
        assert!(counts.woken.load(Ordering::SeqCst) <= 2, "{kind:?}");
        drop(served);
    }
});

on_both!(a_replaced_hostile_waker_blocks_no_allocation, async |device: Device| {
    for kind in KINDS {
        let [a] = streams(&device);
        let all = Allocator::blocks(&device, BLOCK, 2).unwrap();
        let [one, other] = [0, 1].map(|_| all.alloc::<u8>(&a, 1).unwrap());
        let mut waits = Box::pin(all.alloc_when_free::<u8>(&a, 1));
        let waker = hostile(kind, back(&all, &a, other));
        assert!(poll_with(waits.as_mut(), &waker).is_pending());
        drop(waker);
        // The poll replaces the hostile waker and drops its last clone.
        let replaced = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = poll_with(waits.as_mut(), Waker::noop()).map(|served| served.map(drop));
        }));
        assert!(replaced.is_ok(), "{kind:?}: a destructor's panic left a poll");
        drop(waits);
        drop(one);
        drop(within(all.alloc_when_free::<u8>(&a, 1)).await.unwrap());
    }
});

on_both!(a_memory_condition_is_woken_beside_a_hostile_one, async |device: Device| {
    for kind in KINDS {
        let [a] = streams(&device);
        let all = Allocator::blocks(&device, BLOCK, 2).unwrap();
        let [one, other] = [0, 1].map(|_| all.alloc::<u8>(&a, 1).unwrap());
        let mut first = memory(&all, BLOCK);
        let mut second = memory(&all, BLOCK);
        let waker = hostile(kind, back(&all, &a, other));
        let (counts, plain) = counting();
        assert_ne!(first.poll_status(&mut Context::from_waker(&waker)), Status::Ready);
        assert_ne!(second.poll_status(&mut Context::from_waker(&plain)), Status::Ready);
        drop(waker);
        on_its_own_thread(move || drop(one)).await;
        assert!(counts.woken.load(Ordering::SeqCst) > 0, "{kind:?}: the other condition was not woken");
        let status = second.poll_status(&mut Context::from_waker(&plain));
        assert_eq!(status, Status::Ready, "{kind:?}");
        // Both deregister; the hostile one drops its waker.
        on_its_own_thread(move || drop((first, second))).await;
        drop(within(all.alloc_when_free::<u8>(&a, 1)).await.unwrap());
    }
});

#[derive(Ports)]
struct BlankMapPorts {
    #[input]
    input: Input<u32>,
    #[output(envelope_bytes = 4)]
    output: Output<Envelope<u32>>,
}

struct NotifiesWhenDropped(Arc<Notify>);

impl Drop for NotifiesWhenDropped {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// The first run keeps all blank envelopes until the second run waits for one. The second run polls with a hostile waker, which is
/// woken or replaced, and then with its own.
#[derive(Clone)]
struct Workers {
    kind: Kind,
    begun: Arc<Notify>,
    taken: Arc<Notify>,
    waits: Arc<Notify>,
    allocator: Allocator,
    stream: Stream,
}

impl Operator for Workers {
    type Ports = BlankMapPorts;

    async fn compute(&mut self, ports: &mut BlankMapPorts, _cx: &mut Cx) -> Result<()> {
        let n = ports.input.take()?;
        if n == 1 {
            self.begun.notify_one();
            self.taken.notified().await;
        }
        let mut blanks = Vec::new();
        if n == 0 {
            // The second run can begin only while a blank envelope is free.
            self.begun.notified().await;
            loop {
                let blank = pin!(ports.output.blank());
                match poll_with(blank, Waker::noop()) {
                    Poll::Ready(blank) => blanks.push(blank?),
                    Poll::Pending => break,
                }
            }
            self.taken.notify_one();
            self.waits.notified().await;
        } else {
            let buffer = self.allocator.alloc::<u8>(&self.stream, 1)?;
            let called = Arc::new(Notify::new());
            let (call, notifies) = (back(&self.allocator, &self.stream, buffer), NotifiesWhenDropped(called.clone()));
            let waker = hostile(self.kind, move || {
                let _notifies = notifies;
                call();
            });
            let mut blank = pin!(ports.output.blank());
            if let Poll::Ready(blank) = poll_with(blank.as_mut(), &waker) {
                blanks.push(blank?);
            }
            drop(waker);
            let waits = self.waits.clone();
            if matches!(self.kind, Kind::PanicsWhenWoken | Kind::CallsBackWhenWoken) {
                waits.notify_one();
                called.notified().await;
            }
            let own = std::future::poll_fn(|cx| {
                let polled = blank.as_mut().poll(cx);
                waits.notify_one();
                polled
            });
            if blanks.is_empty() {
                blanks.push(own.await?);
            }
        }
        let mut blank = blanks.pop().expect("a blank envelope was taken");
        drop(blanks);
        blank.space().await?[0] = n;
        blank.set_len(1)?;
        ports.output.send(blank).await?;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_gets_its_blank_envelope_beside_a_hostile_waker() {
    for kind in KINDS {
        let device = emulated();
        let [stream] = streams(&device);
        let seen = shared();
        let mut flow = Flow::new("blanks");
        let mut next = 0;
        let numbers = source(move || {
            next += 1;
            let number = (next <= 2).then(|| next - 1);
            async move { Ok(number) }
        });
        let from = flow.add("numbers", numbers);
        let workers = Workers {
            kind,
            begun: Arc::default(),
            taken: Arc::default(),
            waits: Arc::default(),
            allocator: Allocator::unbounded(&device),
            stream,
        };
        let work = flow.add("work", concurrent(2, workers));
        let seen_there = seen.clone();
        let collect = sink(move |message: Envelope<u32>| {
            let seen = seen_there.clone();
            async move {
                let first = message.read().await?[0];
                lock(&seen).push(first);
                Ok(())
            }
        });
        let to = flow.add("collect", collect);
        flow.connect(from.output, work.input);
        flow.connect_with(work.output, to.input, HubOptions::bounded(1));
        within(flow.run()).await.unwrap();
        assert_eq!(*lock(&seen), [0, 1], "{kind:?}");
    }
}
