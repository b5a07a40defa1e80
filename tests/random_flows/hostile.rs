//! Misbehaving wakers, destructors and host functions: a few tasks poll futures of all kinds by hand, with wakers that
//! drop buffers and streams, enqueue work, poll other futures or panic, when they are woken or dropped.
//!
//! Each waker first wakes its own task. So every future must still resolve, including those of the other tasks, which
//! wait for the same streams; and nothing may be left behind.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Wake, Waker},
};

use wakeline::{
    ChunkHub, Stream,
    device::{Simulation, Task},
    memory::Allocator,
    prelude::*,
    stream::Event,
};

use super::{
    by_hand,
    data::world,
    operators::turns,
    plan::{Dice, Fault, Limits},
};

/// The message of every panic here.
pub(crate) const ON_PURPOSE: &str = "hostile on purpose";

const WORDS: usize = 16;

#[derive(Clone, Debug)]
pub(crate) struct Hostile {
    seed: u64,
    faults: Vec<Option<Fault>>,
    tasks: usize,
    steps: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conduct {
    Nothing,
    /// Drops a buffer that is in use, and a stream.
    Drops,
    /// Enqueues work, and drops the wait for it.
    Enqueues,
    /// Polls a future that waits for the same stream.
    Polls,
    Panics,
}

const CONDUCTS: [Conduct; 5] = [Conduct::Nothing, Conduct::Drops, Conduct::Enqueues, Conduct::Polls, Conduct::Panics];

type Pending = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// Everything needed to misbehave once.
struct Luggage {
    conduct: Conduct,
    stream: Stream,
    buffer: Option<Buffer<u32>>,
    pending: Option<Pending>,
}

impl Luggage {
    fn unpack(mut self) {
        // A lost device fails all of this, and the error is reported elsewhere.
        match self.conduct {
            Conduct::Nothing => {}
            Conduct::Drops => drop((self.buffer.take(), self.stream)),
            Conduct::Enqueues => {
                if let Some(mut buffer) = self.buffer.take() {
                    let _ = self.stream.fill(&mut buffer, 3_u32);
                }
                drop(self.stream.completed());
            }
            Conduct::Polls => {
                if let Some(mut pending) = self.pending.take() {
                    let _ = pending.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                }
            }
            Conduct::Panics => panic!("{ON_PURPOSE}"),
        }
    }
}

struct Trap {
    task: Option<Waker>,
    woken: Mutex<Option<Luggage>>,
    dropped: Mutex<Option<Luggage>>,
}

impl Wake for Trap {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.task.iter().for_each(Waker::wake_by_ref);
        let luggage = self.woken.lock().unwrap().take();
        luggage.into_iter().for_each(Luggage::unpack);
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        let luggage = self.dropped.get_mut().unwrap().take();
        // A panic during a panic would be an abort, and the user's fault.
        luggage.filter(|_| !std::thread::panicking()).into_iter().for_each(Luggage::unpack);
    }
}

#[kernel]
fn fill(data: &mut [u32], word: u32) {
    data.fill(word);
}

impl Hostile {
    pub(crate) fn new(seed: u64, limits: Limits) -> Self {
        let mut dice = Dice::new(seed);
        // A function that is never called keeps its captured values alive, possibly a buffer, as long as its device.
        let is_kept = |fault: &Fault| matches!(fault, Fault::LostFunction(_));
        let fault = |dice: &mut Dice| by_hand::fault(dice).filter(|fault| !is_kept(fault));
        let faults = (0..1 + dice.up_to(1)).map(|_| fault(&mut dice)).collect();
        let (tasks, steps) = (2 + dice.up_to(2), 3 + dice.up_to(12));
        Self { seed, faults, tasks: tasks.min(limits.operators), steps: steps.min(2 * limits.messages as usize) }
    }

    pub(crate) async fn run(&self, simulation: &Simulation) -> (Vec<Device>, Vec<String>) {
        let devices: Vec<_> = self.faults.iter().map(|fault| by_hand::open(simulation, *fault)).collect();
        let mut failed = Vec::new();
        let mut tasks: Vec<Task<Result<()>>> = Vec::new();
        let shared: Vec<_> = devices.iter().filter_map(|device| Stream::named(device, "shared").ok()).collect();
        for name in 0..self.tasks {
            let mut hand = Hand {
                streams: shared.clone(),
                allocators: devices.iter().filter_map(|device| Allocator::blocks(device, 64, 2).ok()).collect(),
                dice: Dice::new(self.seed.wrapping_mul(53) + name as u64),
                name,
            };
            let steps = self.steps;
            tasks.push(simulation.spawn(format!("hand {name}"), async move {
                for _ in 0..steps {
                    hand.step().await?;
                }
                Ok(())
            }));
        }
        drop(shared);
        for task in tasks {
            match task.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => failed.extend(by_hand::unexplained(error, &devices)),
                Err(unfinished) => failed.push(format!("{unfinished:#}")),
            }
        }
        (devices, failed)
    }
}

struct Hand {
    streams: Vec<Stream>,
    allocators: Vec<Allocator>,
    dice: Dice,
    name: usize,
}

impl Hand {
    async fn step(&mut self) -> Result<()> {
        if self.streams.is_empty() {
            return Ok(());
        }
        let stream = self.stream();
        if self.dice.one_in(4) {
            self.host_function(&stream)?;
        }
        let future = self.future(&stream)?;
        self.poll(future, &stream).await?;
        turns(self.dice.up_to(4) as u32).await;
        Ok(())
    }

    /// A stream that all tasks share.
    fn stream(&mut self) -> Stream {
        self.streams[self.dice.up_to(self.streams.len() - 1)].clone()
    }

    fn used(&mut self, stream: &Stream) -> Result<Buffer<u32>> {
        let mut buffer = Buffer::new(stream.device(), WORDS)?;
        stream.fill(&mut buffer, 5_u32)?;
        Ok(buffer)
    }

    fn luggage(&mut self, stream: &Stream) -> Option<Luggage> {
        let conduct = self.dice.of(&CONDUCTS);
        if conduct == Conduct::Nothing {
            return None;
        }
        let own = Stream::new(stream.device()).ok()?;
        let stream = if self.dice.one_in(2) { stream.clone() } else { own };
        let pending: Pending = Box::pin(stream.completed());
        world(|world| world.done.push(format!("hand {}: {conduct:?}", self.name)));
        Some(Luggage { conduct, buffer: self.used(&stream).ok(), stream, pending: Some(pending) })
    }

    fn trap(&mut self, stream: &Stream, task: Option<&Waker>) -> Trap {
        Trap { task: task.cloned(), woken: Mutex::new(self.luggage(stream)), dropped: Mutex::new(self.luggage(stream)) }
    }

    /// The captured values are dropped by the host function, or by the call that refuses it.
    fn host_function(&mut self, stream: &Stream) -> Result<()> {
        let trap = Arc::new(self.trap(stream, None));
        stream.host_function(move || trap.wake())
    }

    fn future(&mut self, stream: &Stream) -> Result<Pending> {
        let buffer = self.used(stream)?;
        Ok(match self.dice.up_to(5) {
            0 => Box::pin(stream.completed()),
            1 => {
                let ticket = stream.ticket();
                Box::pin(async move { ticket.completed().await })
            }
            2 => {
                let event = Event::new();
                event.record(stream)?;
                Box::pin(async move { event.completed().await })
            }
            3 => {
                let mut here = Buffer::<u32>::pinned(stream.device(), WORDS)?;
                stream.copy(&buffer, &mut here)?;
                Box::pin(async move { here.read().await.map(drop) })
            }
            4 if !self.allocators.is_empty() => {
                let allocator = self.allocators[self.dice.up_to(self.allocators.len() - 1)].clone();
                let stream = Stream::new(allocator.device())?;
                // All blocks but one, which is returned later.
                let kept = allocator.alloc::<u32>(&stream, WORDS)?;
                let mut soon = allocator.alloc::<u32>(&stream, WORDS)?;
                stream.fill(&mut soon, 9_u32)?;
                let mut soon = Some(soon);
                let mut wait = Box::pin(async move {
                    let third = allocator.alloc_when_free::<u32>(&stream, WORDS).await;
                    drop(kept);
                    third.map(drop)
                });
                Box::pin(poll_fn(move |task| {
                    let polled = wait.as_mut().poll(task);
                    drop(soon.take());
                    polled
                }))
            }
            5 => self.chunk(stream)?,
            _ => Box::pin(stream.completed()),
        })
    }

    /// The reader and the writer wait for each other's chunk.
    fn chunk(&mut self, stream: &Stream) -> Result<Pending> {
        let device = stream.device();
        let hub =
            ChunkHub::<u32, ()>::builder("hostile").elements(WORDS).pinned_for(device).envelopes(device, 1).build()?;
        let (mut producer, mut consumer) = (hub.produce(device)?, hub.consume(device)?);
        drop(hub);
        let stream = stream.clone();
        let produce = async move {
            for _ in 0..2 {
                let Some(mut chunk) = producer.next().await? else { break };
                chunk.set_len(WORDS)?;
                fill::launch(&stream, &mut chunk, 1)?;
                chunk.commit()?;
            }
            Ok::<(), Error>(())
        };
        let consume = async move {
            while let Some(chunk) = consumer.next().await? {
                chunk.commit()?;
            }
            Ok::<(), Error>(())
        };
        Ok(Box::pin(async move { futures::try_join!(produce, consume).map(drop) }))
    }

    /// Polls the future until it resolves, or drops it; each poll has another waker.
    async fn poll(&mut self, mut future: Pending, stream: &Stream) -> Result<()> {
        let mut patience = if self.dice.one_in(4) { self.dice.up_to(6) } else { usize::MAX };
        let outcome = poll_fn(|task| {
            for _ in 0..=self.dice.up_to(1) {
                let waker = Waker::from(Arc::new(self.trap(stream, Some(task.waker()))));
                // Dropping the previous waker may panic in the call of its own task.
                let polled = contained(|| future.as_mut().poll(&mut Context::from_waker(&waker)));
                contained(|| drop(waker));
                match polled {
                    Some(Poll::Pending) => {}
                    Some(Poll::Ready(output)) => return Poll::Ready(output),
                    None => return Poll::Ready(Ok(())),
                }
            }
            if patience == 0 {
                return Poll::Ready(Ok(()));
            }
            patience -= 1;
            Poll::Pending
        })
        .await;
        contained(|| drop(future));
        outcome
    }
}

/// Catches panics of user code on its own stack; returns `None` if it panics.
fn contained<R>(call: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}
