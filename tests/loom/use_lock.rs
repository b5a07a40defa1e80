//! Model check of `memory/use_lock.rs`: a graph's launches, its updates, and other uses of the same memory. Around the
//! file are the locks that such a use takes, in their order: the use lock, the state of the launches, the uses of
//! memory, the stream's order.

#[allow(dead_code)]
#[path = "../../src/memory/use_lock.rs"]
mod use_lock;

use std::cell::Cell;

use self::use_lock::{UseLock, UseLockGuard};
use crate::sync::model;
use loom::{
    sync::{Arc, Mutex, atomic::AtomicUsize},
    thread,
};

loom::thread_local! {
    static MINE: Cell<bool> = Cell::new(false);
}

/// An operation: its stream and its number there.
type Ticket = (usize, u64);

#[derive(Default)]
struct Stream {
    tickets: u64,
    waits: Vec<Ticket>,
}

struct Device {
    turns: UseLock,
    /// The memory that launches use.
    exec: Mutex<usize>,
    /// Memory 0 is lent to the thread of `external`.
    lent: Mutex<bool>,
    /// The last write of each memory.
    uses: [Mutex<Option<Ticket>>; 2],
    streams: [Mutex<Stream>; 2],
}

impl Device {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            turns: UseLock {
                lock: Mutex::new(()),
                lent: AtomicUsize::new(0),
                returned: crate::sync::Condvar(loom::sync::Condvar::new()),
            },
            lent: Mutex::new(false),
            exec: Mutex::new(0),
            uses: [Mutex::new(None), Mutex::new(None)],
            streams: [Mutex::default(), Mutex::default()],
        })
    }

    fn use_lock(&self) -> UseLockGuard<'_> {
        self.turns.acquire(|mine| MINE.with(|kept| kept.replace(mine)))
    }

    /// For memory that may be lent to another thread.
    fn turn_at(&self, memory: impl Fn() -> usize) -> UseLockGuard<'_> {
        let is_lent = || memory() == 0 && *self.lent.lock().unwrap();
        self.turns.acquire_when(|mine| MINE.with(|kept| kept.replace(mine)), is_lent)
    }

    /// As another library's work that writes memory 0, enqueued by a function that runs without the lock.
    fn external(&self, stream: usize) -> Ticket {
        let use_lock = self.turn_at(|| 0);
        self.before_write(0, stream);
        *self.lent.lock().unwrap() = true;
        self.turns.lend();
        drop(use_lock);
        let ticket = self.enqueue(stream);
        self.note(0, ticket);
        let use_lock = self.use_lock();
        *self.lent.lock().unwrap() = false;
        self.turns.take_back();
        drop(use_lock);
        ticket
    }

    /// Makes the stream wait for the recorded uses.
    fn before_write(&self, memory: usize, stream: usize) {
        let _turn = self.use_lock();
        let last = *self.uses[memory].lock().unwrap();
        if let Some(last) = last.filter(|last| last.0 != stream) {
            self.streams[stream].lock().unwrap().waits.push(last);
        }
    }

    fn enqueue(&self, stream: usize) -> Ticket {
        let mut order = self.streams[stream].lock().unwrap();
        order.tickets += 1;
        (stream, order.tickets)
    }

    fn note(&self, memory: usize, ticket: Ticket) {
        let _turn = self.use_lock();
        *self.uses[memory].lock().unwrap() = Some(ticket);
    }

    /// As a kernel that writes memory of the user.
    fn write(&self, memory: usize, stream: usize) -> Ticket {
        let _turn = self.turn_at(|| memory);
        self.before_write(memory, stream);
        let ticket = self.enqueue(stream);
        self.note(memory, ticket);
        ticket
    }

    /// As a launch of a graph that writes it. Returns the memory that it wrote, and the ticket.
    fn launch(&self, stream: usize) -> (usize, Ticket) {
        let _turn = self.turn_at(|| *self.exec.lock().unwrap());
        let exec = self.exec.lock().unwrap();
        self.before_write(*exec, stream);
        let ticket = self.enqueue(stream);
        self.note(*exec, ticket);
        (*exec, ticket)
    }

    /// As an update, after which launches use other memory.
    fn update(&self, memory: usize) {
        let _turn = self.use_lock();
        *self.exec.lock().unwrap() = memory;
    }

    fn waits(&self, stream: usize) -> Vec<Ticket> {
        self.streams[stream].lock().unwrap().waits.clone()
    }
}

#[test]
fn a_launch_and_a_write_are_ordered() {
    model(3, || {
        let device = Device::new();
        let launches = {
            let device = device.clone();
            thread::spawn(move || device.launch(0).1)
        };
        let write = device.write(0, 1);
        let launch = launches.join().unwrap();
        let (before, after) = (device.waits(0).contains(&write), device.waits(1).contains(&launch));
        assert!(before != after, "the launch waits: {before}, the write waits: {after}");
    });
}

#[test]
fn two_launches_on_two_streams_are_ordered() {
    model(3, || {
        let device = Device::new();
        let launches = {
            let device = device.clone();
            thread::spawn(move || device.launch(0).1)
        };
        let other = device.launch(1).1;
        let one = launches.join().unwrap();
        assert!(device.waits(0).contains(&other) != device.waits(1).contains(&one), "not ordered");
    });
}

/// The launch uses the graph before or after the update: its accesses are ordered with other uses either way.
#[test]
fn a_launch_during_an_update_is_ordered_with_other_uses() {
    model(3, || {
        let device = Device::new();
        let updates = {
            let device = device.clone();
            thread::spawn(move || {
                device.update(1);
                device.write(1, 1)
            })
        };
        let (memory, launch) = device.launch(0);
        let write = updates.join().unwrap();
        let ordered = device.waits(0).contains(&write) != device.waits(1).contains(&launch);
        assert_eq!(ordered, memory == 1, "memory {memory}");
    });
}

#[test]
fn external_work_without_the_lock_and_a_launch_are_ordered() {
    model(3, || {
        let device = Device::new();
        let launches = {
            let device = device.clone();
            thread::spawn(move || device.launch(0).1)
        };
        let external = device.external(1);
        let launch = launches.join().unwrap();
        assert!(device.waits(0).contains(&external) != device.waits(1).contains(&launch), "not ordered");
    });
}

#[test]
fn two_external_operations_are_ordered_and_both_end() {
    model(3, || {
        let device = Device::new();
        let other = {
            let device = device.clone();
            thread::spawn(move || device.external(0))
        };
        let one = device.external(1);
        let other = other.join().unwrap();
        assert!(device.waits(0).contains(&one) != device.waits(1).contains(&other), "not ordered");
    });
}
