//! Streams, buffers, events and allocators without a flow: a few tasks that perform random operations.
//!
//! The expected contents of a buffer are known from the calls, in the order in which they were made: tracking
//! guarantees that, whatever streams and devices they go to. Kernels and the host check it. Futures are dropped half
//! way, buffers and streams while they are in use. Graphs of buffers are built, launched and dropped, too ([`graphs`]).

mod graphs;

use std::sync::{Arc, Mutex};

use wakeline::{
    Stream,
    device::{Emulated, Faults, Simulation, Task},
    memory::Allocator,
    prelude::*,
    stream::Event,
};

use super::{
    data::{world, wrong},
    operators::{patiently, turn, turns},
    plan::{Dice, Fault, Limits},
};

/// Words of every buffer: buffers of one allocator are interchangeable.
const WORDS: usize = 16;

/// Decisions of a seed before the run; further ones are made during it, and logged.
#[derive(Clone, Debug)]
pub(crate) struct ByHand {
    pub(crate) seed: u64,
    pub(crate) faults: Vec<Option<Fault>>,
    tasks: usize,
    steps: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    Nothing,
    /// The same value in each word.
    Flat(u32),
    Painted(u32),
}

struct Slot {
    number: u32,
    buffer: Buffer<u32>,
    holds: Holds,
}

/// Shared by all tasks. It is not locked across an await.
#[derive(Default)]
struct Shelf {
    slots: Vec<Slot>,
    streams: Vec<Stream>,
    events: Vec<Event>,
    graphs: Vec<graphs::Built>,
    made: u32,
}

struct Hand {
    devices: Vec<Device>,
    allocators: Vec<Allocator>,
    shelf: Arc<Mutex<Shelf>>,
    dice: Dice,
    name: usize,
}

fn painted(value: u32, at: usize) -> u32 {
    (value ^ at as u32).wrapping_mul(0x9e37_79b1).rotate_left(11)
}

fn is(holds: Holds, data: &[u32]) -> bool {
    data.iter().enumerate().all(|(at, word)| match holds {
        Holds::Nothing => true,
        Holds::Flat(value) => *word == value,
        Holds::Painted(value) => *word == painted(value, at),
    })
}

fn look_at(who: &str, number: u32, holds: Holds, data: &[u32]) -> Option<String> {
    (!is(holds, data)).then(|| format!("{who} finds wrong data in buffer {number}, expected {holds:x?}: {data:x?}"))
}

fn holds(flat: u32, value: u32) -> Holds {
    if flat != 0 { Holds::Flat(value) } else { Holds::Painted(value) }
}

fn found(what: Option<String>) {
    world(|world| world.wrong_on_devices.extend(what));
}

#[kernel]
fn paint(data: &mut [u32], value: u32) {
    data.iter_mut().enumerate().for_each(|(at, word)| *word = painted(value, at));
}

#[kernel]
fn repaint(data: &mut [u32], number: u32, flat: u32, before: u32, value: u32) {
    found(look_at("kernel `repaint`", number, holds(flat, before), data));
    data.iter_mut().enumerate().for_each(|(at, word)| *word = painted(value, at));
}

#[kernel]
fn compare(one: &[u32], flat: u32, value: u32, other: &[u32], other_flat: u32, other_value: u32, number: u32) {
    found(look_at("kernel `compare`", number, holds(flat, value), one));
    found(look_at("kernel `compare`, second argument,", number, holds(other_flat, other_value), other));
}

impl ByHand {
    pub(crate) fn new(seed: u64, limits: Limits) -> Self {
        let mut dice = Dice::new(seed);
        let faults = (0..1 + dice.up_to(1)).map(|_| fault(&mut dice)).collect();
        let (tasks, steps) = (1 + dice.up_to(2), 10 + dice.up_to(50));
        Self { seed, faults, tasks: tasks.min(limits.operators), steps: steps.min(8 * limits.messages as usize) }
    }

    pub(crate) async fn run(&self, simulation: &Simulation) -> (Vec<Device>, Vec<String>) {
        let devices: Vec<_> = self.faults.iter().map(|fault| open(simulation, *fault)).collect();
        let shelf = Arc::<Mutex<Shelf>>::default();
        let mut allocators = Vec::new();
        for device in &devices {
            let bytes = 4 * WORDS as u64;
            allocators.extend([Allocator::unbounded(device), Allocator::stream_ordered(device)]);
            allocators.extend(Allocator::blocks(device, bytes, 2));
        }
        let tasks: Vec<Task<Result<()>>> = (0..self.tasks)
            .map(|name| {
                let dice = Dice::new(self.seed.wrapping_mul(31) + name as u64);
                let (devices, allocators, shelf) = (devices.clone(), allocators.clone(), shelf.clone());
                let mut hand = Hand { devices, allocators, shelf, dice, name };
                let steps = self.steps;
                simulation.spawn(format!("hand {name}"), async move {
                    for _ in 0..steps {
                        hand.step().await?;
                    }
                    Ok(())
                })
            })
            .collect();
        let mut failed = Vec::new();
        for task in tasks {
            match task.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => failed.extend(unexplained(error, &devices)),
                Err(unfinished) => failed.push(format!("{unfinished:#}")),
            }
        }
        drop(shelf);
        (devices, failed)
    }
}

pub(crate) fn fault(dice: &mut Dice) -> Option<Fault> {
    let nth = 1 + dice.up_to(25) as u64;
    dice.one_in(6).then(|| match dice.up_to(3) {
        0 => Fault::Trap(dice.of(&["repaint", "step"]), nth),
        1 => Fault::Copy(nth),
        2 => Fault::Alloc(nth),
        _ => Fault::LostFunction(nth.min(5)),
    })
}

pub(crate) fn open(simulation: &Simulation, fault: Option<Fault>) -> Device {
    let faults = match fault {
        Some(Fault::Trap(kernel, nth)) => Faults::new().trap_kernel(kernel, nth),
        Some(Fault::Copy(nth)) => Faults::new().fail_copy(nth),
        Some(Fault::Alloc(nth)) => Faults::new().fail_alloc(nth),
        Some(Fault::LostFunction(nth)) => Faults::new().lose_host_function(nth),
        None => Faults::new(),
    };
    Device::simulated(simulation, Emulated::new().memory(1 << 20).faults(faults)).race_checked()
}

/// Returns a call's error unless a fault explains it.
pub(crate) fn unexplained(error: Error, devices: &[Device]) -> Option<String> {
    let explained = match error.kind() {
        ErrorKind::DeviceLost => devices.iter().any(|device| device.lost().is_some()),
        ErrorKind::OutOfMemory => true,
        _ => false,
    };
    (!explained).then(|| format!("a call failed: {error:#}"))
}

pub(crate) fn judge(devices: &[Device], failed: &[String]) -> Vec<String> {
    let mut found = failed.to_vec();
    world(|world| {
        found.append(&mut world.wrong);
        // After a fault later work still runs, on unwritten data.
        if devices.iter().all(|device| device.lost().is_none()) {
            found.append(&mut world.wrong_on_devices);
        }
    });
    found
}

impl Hand {
    fn shelf<R>(&self, look: impl FnOnce(&mut Shelf) -> R) -> R {
        look(&mut self.shelf.lock().unwrap())
    }

    fn note(&self, what: String) {
        world(|world| world.done.push(format!("hand {}: {what}", self.name)));
    }

    fn device(&mut self) -> Device {
        self.devices[self.dice.up_to(self.devices.len() - 1)].clone()
    }

    /// One of the streams, or a new one; of this device, if given.
    fn stream(&mut self, device: Option<&Device>) -> Result<Stream> {
        let there: Vec<Stream> = self.shelf(|shelf| {
            let fits = |stream: &&Stream| device.is_none_or(|device| stream.device() == device);
            shelf.streams.iter().filter(fits).cloned().collect()
        });
        if !there.is_empty() && (there.len() > 3 || !self.dice.one_in(4)) {
            return Ok(there[self.dice.up_to(there.len() - 1)].clone());
        }
        let on = device.cloned().unwrap_or_else(|| self.device());
        let number = self.shelf(|shelf| shelf.streams.len());
        let stream = Stream::named(&on, format!("s{number} of hand {}", self.name))?;
        self.shelf(|shelf| shelf.streams.push(stream.clone()));
        Ok(stream)
    }

    fn take(&mut self, fits: impl Fn(&Slot) -> bool) -> Option<Slot> {
        let there: Vec<_> = self.shelf(|shelf| (0..shelf.slots.len()).filter(|at| fits(&shelf.slots[*at])).collect());
        let at = *there.get(self.dice.up_to(there.len()))?;
        Some(self.shelf(|shelf| shelf.slots.remove(at)))
    }

    fn put(&self, slot: Slot) {
        self.shelf(|shelf| shelf.slots.push(slot));
    }

    fn value(&mut self) -> u32 {
        self.dice.up_to(u32::MAX as usize) as u32
    }

    async fn step(&mut self) -> Result<()> {
        match self.dice.up_to(21) {
            0 | 1 => self.make().await?,
            2..=4 => self.write()?,
            5 | 6 => self.copy()?,
            7 | 8 => self.read_on_device()?,
            9 | 10 => self.read_on_host().await?,
            11 => self.order().await?,
            12 => self.wait().await?,
            13 => {
                if let Some(slot) = self.take(|_| true) {
                    self.note(format!("drops buffer {}", slot.number));
                }
            }
            14 => {
                let many = self.shelf(|shelf| shelf.streams.len());
                if many > 1 {
                    let at = self.dice.up_to(many - 1);
                    let stream = self.shelf(|shelf| shelf.streams.remove(at));
                    self.note(format!("drops {stream:?}"));
                }
            }
            15 | 16 => self.graph()?,
            17..=19 => self.launch().await?,
            20 => {
                if self.dice.one_in(2) {
                    self.take_apart();
                }
            }
            _ => turns(self.dice.up_to(9) as u32).await,
        }
        if self.dice.one_in(3) {
            turn().await;
        }
        Ok(())
    }

    async fn make(&mut self) -> Result<()> {
        if self.shelf(|shelf| shelf.slots.len()) > 8 {
            return Ok(());
        }
        let device = self.device();
        let mut holds = Holds::Nothing;
        let buffer = match self.dice.up_to(5) {
            5 => {
                let (buffer, wrapped) = Buffer::wrap(vec![0; WORDS])?;
                world(|world| world.wrapped.push(wrapped));
                holds = Holds::Flat(0);
                buffer
            }
            0 => Buffer::pinned(&device, WORDS)?,
            1 => Buffer::new(&device, WORDS)?,
            _ => {
                let allocator = self.allocators[self.dice.up_to(self.allocators.len() - 1)].clone();
                let stream = self.stream(Some(allocator.device()))?;
                match allocator.alloc(&stream, WORDS) {
                    Ok(buffer) => buffer,
                    // This task may itself hold the blocks, so it waits only for a while.
                    Err(error) if error.is_out_of_memory() => {
                        let patience = self.dice.up_to(40) as u32;
                        match patiently(patience, allocator.alloc_when_free(&stream, WORDS)).await {
                            Some(buffer) => buffer?,
                            None => return Ok(()),
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        let number = self.shelf(|shelf| {
            shelf.made += 1;
            shelf.made
        });
        self.note(format!("makes buffer {number}: {buffer:?}"));
        self.put(Slot { number, buffer, holds });
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        let Some(mut slot) = self.take(|slot| !slot.buffer.is_host()) else { return Ok(()) };
        let stream = self.stream(Some(&slot.buffer.device().clone()))?;
        let value = self.value();
        self.note(format!("writes buffer {} on `{}`", slot.number, stream.name()));
        let after = match (self.dice.up_to(2), slot.holds) {
            (0, _) => stream.fill(&mut slot.buffer, value).map(|()| Holds::Flat(value)),
            (1, _) | (_, Holds::Nothing) => {
                paint::launch(&stream, &mut slot.buffer, value).map(|()| Holds::Painted(value))
            }
            (_, holds) => {
                let (flat, before) = arguments(holds);
                let done = repaint::launch(&stream, &mut slot.buffer, slot.number, flat, before, value);
                done.map(|()| Holds::Painted(value))
            }
        };
        slot.holds = after?;
        self.put(slot);
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        let Some(from) = self.take(|slot| slot.holds != Holds::Nothing) else { return Ok(()) };
        let Some(mut to) = self.take(|_| true) else {
            self.put(from);
            return Ok(());
        };
        let stream = self.stream(None)?;
        self.note(format!("copies buffer {} to {} on `{}`", from.number, to.number, stream.name()));
        stream.copy(&from.buffer, &mut to.buffer)?;
        to.holds = from.holds;
        self.put(from);
        self.put(to);
        Ok(())
    }

    fn read_on_device(&mut self) -> Result<()> {
        let Some(one) = self.take(|slot| !slot.buffer.is_host() && slot.holds != Holds::Nothing) else { return Ok(()) };
        let device = one.buffer.device().clone();
        let other =
            self.take(|slot| !slot.buffer.is_host() && slot.holds != Holds::Nothing && *slot.buffer.device() == device);
        let stream = self.stream(Some(&device))?;
        let beside = other.as_ref().unwrap_or(&one);
        self.note(format!("reads buffers {} and {} on `{}`", one.number, beside.number, stream.name()));
        let ((flat, value), (other_flat, other_value)) = (arguments(one.holds), arguments(beside.holds));
        compare::launch(&stream, &one.buffer, flat, value, &beside.buffer, other_flat, other_value, one.number)?;
        self.put(one);
        other.into_iter().for_each(|other| self.put(other));
        Ok(())
    }

    async fn read_on_host(&mut self) -> Result<()> {
        let Some(mut slot) = self.take(|slot| slot.buffer.is_host() || slot.holds != Holds::Nothing) else {
            return Ok(());
        };
        self.note(format!("looks at buffer {}", slot.number));
        let patience = self.dice.up_to(6) as u32;
        if !slot.buffer.is_host() {
            let stream = self.stream(None)?;
            let read = patiently(patience, slot.buffer.to_vec(&stream)).await;
            if let Some(data) = read.transpose()? {
                look_at("the host", slot.number, slot.holds, &data).into_iter().for_each(wrong);
            }
        } else if slot.holds != Holds::Nothing && self.dice.one_in(2) {
            if let Some(data) = patiently(patience, slot.buffer.read()).await.transpose()? {
                look_at("the host", slot.number, slot.holds, data).into_iter().for_each(wrong);
            }
        } else {
            let value = self.value();
            if let Some(data) = patiently(patience, slot.buffer.write()).await.transpose()? {
                data.fill(value);
                slot.holds = Holds::Flat(value);
            }
        }
        self.put(slot);
        Ok(())
    }

    async fn order(&mut self) -> Result<()> {
        let (one, other) = (self.stream(None)?, self.stream(None)?);
        self.note(format!("orders `{}` after `{}`", one.name(), other.name()));
        match self.dice.up_to(2) {
            0 => one.wait_for(&other),
            1 => one.join([&other]),
            _ => {
                let event = Event::new();
                event.record(&other)?;
                turns(self.dice.up_to(4) as u32).await;
                event.wait(&one)?;
                self.shelf(|shelf| shelf.events.push(event));
                Ok(())
            }
        }
    }

    async fn wait(&mut self) -> Result<()> {
        let patience = self.dice.up_to(20) as u32;
        let event = self.shelf(|shelf| shelf.events.pop());
        if let Some(event) = event.filter(|_| self.dice.one_in(2)) {
            self.note("waits for an event".into());
            patiently(patience, event.completed()).await.transpose()?;
            return Ok(());
        }
        let stream = self.stream(None)?;
        self.note(format!("waits for `{}`", stream.name()));
        let (all, ticket) = (stream.completed(), stream.ticket());
        turns(self.dice.up_to(4) as u32).await;
        patiently(patience, all).await.transpose()?;
        ticket.completed().await
    }
}

/// The kernel arguments for expected contents.
fn arguments(holds: Holds) -> (u32, u32) {
    match holds {
        Holds::Nothing => (0, 0),
        Holds::Flat(value) => (1, value),
        Holds::Painted(value) => (0, value),
    }
}
