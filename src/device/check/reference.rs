//! Compares the checker with brute force.
//!
//! Random programs of calls are run on the checker and on a plain graph, which has a node for each call and an edge for
//! each ordering, and is searched for every decision. Both must agree for every call on whether it races. The programs
//! include small CUDA graphs. The device is a mock that runs nothing and answers as the program says, since the
//! checker's decisions must not depend on timing.

use std::{
    ptr::NonNull,
    sync::{Arc, atomic::Ordering},
};

use proptest::prelude::*;

use super::{
    checked,
    mock::{MockBackend, kernel},
};
use crate::{device::backend::*, error::Result};

type CallId = usize;

#[derive(Default)]
struct CallGraph {
    before: Vec<Vec<CallId>>,
}

impl CallGraph {
    fn add(&mut self, before: Vec<CallId>) -> CallId {
        self.before.push(before);
        self.before.len() - 1
    }

    fn reaches(&self, from: CallId, to: CallId) -> bool {
        let (mut seen, mut left) = (vec![false; self.before.len()], vec![to]);
        while let Some(node) = left.pop() {
            if node == from {
                return true;
            }
            if !std::mem::replace(&mut seen[node], true) {
                left.extend(&self.before[node]);
            }
        }
        false
    }
}

#[derive(Clone, Copy)]
struct ModelAccess {
    memory: usize,
    from: u64,
    to: u64,
    write: bool,
    by: CallId,
}

struct ModelStream {
    device: usize,
    raw: RawStream,
    kind: StreamKind,
    last: Option<CallId>,
}

#[derive(Clone, Copy, PartialEq)]
enum StreamKind {
    Legacy,
    Blocking,
    Free,
}

#[derive(Clone, Copy)]
enum ModelMemory {
    Device(usize, Address),
    Host(NonNull<u8>),
}

impl ModelMemory {
    fn at(self, from: u64) -> Endpoint {
        match self {
            ModelMemory::Device(_, address) => Endpoint::Device(Address(address.0 + from)),
            ModelMemory::Host(start) => Endpoint::Host(start.as_ptr().wrapping_add(from as usize)),
        }
    }
}

struct ModelExec {
    device: usize,
    raw: RawExec,
    accesses: Vec<ModelAccess>,
    last: Option<CallId>,
}

struct Comparison {
    mocks: Vec<Arc<MockBackend>>,
    devices: Vec<Arc<dyn Backend>>,
    graph: CallGraph,
    host: CallId,
    all_streams: Vec<ModelStream>,
    /// The lines that a program can use.
    streams: Vec<usize>,
    events: Vec<(usize, RawEvent, Option<CallId>)>,
    memory: Vec<ModelMemory>,
    accesses: Vec<ModelAccess>,
    functions: Vec<Vec<CallId>>,
    execs: Vec<ModelExec>,
    races: usize,
    /// A call has failed: accesses that it might have replaced are forgotten, so races might be missed from now on.
    failed: bool,
}

const BYTES: u64 = 16;
const KINDS: [(usize, StreamKind); 6] = [
    (0, StreamKind::Legacy),
    (0, StreamKind::Blocking),
    (0, StreamKind::Free),
    (0, StreamKind::Free),
    (1, StreamKind::Free),
    (1, StreamKind::Blocking),
];

/// Allocates memory and fills it, as unwritten memory is not the subject of these tests.
fn written(device: &Arc<dyn Backend>) -> Address {
    let spec = StreamSpec { name: "first".into(), priority: 0, non_blocking: true };
    let (memory, first) = (device.alloc(BYTES).unwrap(), device.stream_create(&spec).unwrap());
    // SAFETY: the mock touches nothing.
    unsafe { device.fill(first, memory, Pattern { width: 1, bits: 0 }, BYTES) }.unwrap();
    device.stream_synchronize(first).unwrap();
    device.stream_destroy(first);
    memory
}

impl Comparison {
    fn new() -> Self {
        let mocks: Vec<Arc<MockBackend>> = vec![Arc::default(), Arc::default()];
        let devices: Vec<_> = mocks.iter().map(|mock| checked(mock.clone())).collect();
        let mut graph = CallGraph::default();
        let host = graph.add(Vec::new());
        let memory = vec![
            ModelMemory::Device(0, written(&devices[0])),
            ModelMemory::Device(1, written(&devices[1])),
            ModelMemory::Host(devices[0].alloc_host(BYTES as usize).unwrap()),
        ];
        let events = (0..4).map(|n| (n % 2, devices[n % 2].event_create(false).unwrap(), None)).collect();
        let mut comparison = Self {
            mocks,
            devices,
            graph,
            host,
            all_streams: Vec::new(),
            streams: Vec::new(),
            events,
            memory,
            accesses: Vec::new(),
            functions: vec![Vec::new(), Vec::new()],
            execs: Vec::new(),
            races: 0,
            failed: false,
        };
        for (device, kind) in KINDS {
            let line = comparison.line(device, kind);
            comparison.streams.push(line);
        }
        comparison
    }

    fn line(&mut self, device: usize, kind: StreamKind) -> usize {
        let spec = StreamSpec { name: "s".into(), priority: 0, non_blocking: kind == StreamKind::Free };
        let raw =
            if kind == StreamKind::Legacy { RawStream(0) } else { self.devices[device].stream_create(&spec).unwrap() };
        self.all_streams.push(ModelStream { device, raw, kind, last: None });
        self.all_streams.len() - 1
    }

    fn before(&self, line: usize) -> Vec<CallId> {
        let own = &self.all_streams[line];
        let others = self.all_streams.iter().filter(|other| {
            let pair = (own.kind, other.kind);
            other.device == own.device
                && (pair == (StreamKind::Legacy, StreamKind::Blocking)
                    || pair == (StreamKind::Blocking, StreamKind::Legacy))
        });
        [Some(self.host), own.last].into_iter().chain(others.map(|other| other.last)).flatten().collect()
    }

    fn observe(&mut self, seen: impl IntoIterator<Item = CallId>) {
        let before = seen.into_iter().chain([self.host]).collect();
        self.host = self.graph.add(before);
    }

    fn races(&self, node: CallId, new: &ModelAccess) -> bool {
        let with = |old: &&ModelAccess| {
            old.memory == new.memory && old.from < new.to && new.from < old.to && (old.write || new.write)
        };
        self.accesses.iter().filter(with).any(|old| !self.graph.reaches(old.by, node))
    }

    /// Compares the checker's decision with the graph's. True if the call was accepted.
    fn agree(&mut self, race: bool, got: &Result<()>) -> bool {
        match got {
            Err(error) if error.is_race() => {
                assert!(race, "a false alarm: {error}");
                self.races += 1;
                false
            }
            Err(_) => {
                assert!(!race || self.failed);
                self.failed = true;
                false
            }
            Ok(()) => {
                assert!(!race || self.failed, "a race was missed");
                true
            }
        }
    }

    fn touch(
        &mut self,
        line: usize,
        mut new: Vec<ModelAccess>,
        call: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) {
        let before = self.before(line);
        let node = self.graph.add(before);
        new.iter_mut().for_each(|access| access.by = node);
        let race = new.iter().any(|access| self.races(node, access));
        let own = &self.all_streams[line];
        let got = call(&*self.devices[own.device], own.raw);
        if self.agree(race, &got) {
            self.accesses.extend(new);
            self.all_streams[line].last = Some(node);
        }
    }

    fn arg(&self, access: &ModelAccess) -> Arg<'static> {
        let Endpoint::Device(address) = self.memory[access.memory].at(access.from) else { panic!() };
        let bytes = access.to - access.from;
        Arg::Slice { address, len: bytes, bytes, write: access.write }
    }

    /// An exec of a graph of three nodes with these accesses, without the nodes that race in it. `edges` are from the
    /// first to the second, from the first to the third, and from the second to the third.
    fn exec(&mut self, device: usize, list: [ModelAccess; 3], edges: [bool; 3]) -> ModelExec {
        let backend = self.devices[device].clone();
        let raw = backend.graph_create().unwrap();
        let (mut graph, mut added) = (CallGraph::default(), Vec::<(usize, CallId, RawNode, ModelAccess)>::new());
        for (at, new) in list.into_iter().enumerate() {
            let is_before = |other: usize| edges[other + at - 1];
            let after: Vec<_> = added.iter().filter(|(other, ..)| is_before(*other)).collect();
            let node = graph.add(after.iter().map(|(_, node, ..)| *node).collect());
            let after: Vec<_> = after.iter().map(|(_, _, raw, _)| *raw).collect();
            let race = added.iter().any(|(_, other, _, old)| {
                let overlap = old.memory == new.memory && old.from < new.to && new.from < old.to;
                overlap && (old.write || new.write) && !graph.reaches(*other, node)
            });
            let args = [self.arg(&new)];
            let launch = Launch { kernel: kernel(), grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
            // SAFETY: the mock touches nothing.
            let got = unsafe { backend.graph_add(raw, &after, &NodeWork::Kernel(launch)) };
            let raw = got.as_ref().ok().copied();
            if self.agree(race, &got.map(drop)) {
                added.extend(raw.map(|raw| (at, node, raw, new)));
            }
        }
        let accesses = added.into_iter().map(|(.., access)| access).collect();
        ModelExec { device, raw: backend.graph_instantiate(raw).unwrap(), accesses, last: None }
    }

    fn launch(&mut self, which: usize, on: u8) {
        let ModelExec { device, raw, ref accesses, last } = self.execs[which];
        let mut new = accesses.clone();
        let own: Vec<_> = self.streams.iter().copied().filter(|l| self.all_streams[*l].device == device).collect();
        let line = own[on as usize % own.len()];
        let before = self.before(line).into_iter().chain(last).collect();
        let node = self.graph.add(before);
        new.iter_mut().for_each(|access| access.by = node);
        let race = new.iter().any(|access| self.races(node, access));
        // SAFETY: the mock touches nothing.
        let got = unsafe { self.devices[device].exec_launch(raw, self.all_streams[line].raw) };
        if self.agree(race, &got) {
            self.accesses.extend(new);
            self.all_streams[line].last = Some(node);
            self.execs[which].last = Some(node);
        }
    }

    fn step(&mut self, [op, a, b, c, d, e]: [u8; 6]) {
        let pick = |n: u8, of: usize| n as usize % of;
        let line = self.streams[pick(a, self.streams.len())];
        let (device, raw) = (self.all_streams[line].device, self.all_streams[line].raw);
        let range = |n: u8| {
            let from = u64::from(n % 16);
            (from, (from + 1 + u64::from(n / 16)).min(BYTES))
        };
        let access = |memory: usize, (from, to): (u64, u64), write| ModelAccess { memory, from, to, write, by: 0 };
        let of_device = |n: u8| pick(n, 2);
        match op % 36 {
            0..=5 => {
                let list =
                    vec![access(of_device(b), range(c), d & 1 == 1), access(1 - of_device(b), range(e), d & 2 == 2)];
                let list: Vec<_> = list.into_iter().take(1 + pick(d / 4, 2)).collect();
                let args: Vec<_> = list.iter().map(|access| self.arg(access)).collect();
                self.touch(line, list, |device, stream| {
                    let launch = Launch { kernel: kernel(), grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
                    // SAFETY: the mock touches nothing.
                    unsafe { device.launch(stream, &launch) }
                });
            }
            6..=9 => {
                let (from, to) = (pick(b, 3), pick(c, 3));
                let bytes = u64::from(1 + e % 4);
                let (start, end) = (u64::from(d % 12), u64::from(d / 16 % 12));
                if from == to {
                    return;
                }
                let list = vec![access(from, (start, start + bytes), false), access(to, (end, end + bytes), true)];
                let (from, to) = (self.memory[from].at(start), self.memory[to].at(end));
                // SAFETY: the mock touches nothing.
                self.touch(line, list, |device, stream| unsafe { device.copy(stream, to, from, bytes) });
            }
            10 => {
                let (memory, (from, to)) = (of_device(b), range(c));
                let Endpoint::Device(address) = self.memory[memory].at(from) else { panic!() };
                let pattern = Pattern { width: 1, bits: 0 };
                self.touch(line, vec![access(memory, (from, to), true)], |device, stream| {
                    // SAFETY: the mock touches nothing.
                    unsafe { device.fill(stream, address, pattern, to - from) }
                });
            }
            11..=15 => {
                let event = pick(b, 4);
                let owner = self.events[event].0;
                // An event is recorded on its own device.
                let own: Vec<_> =
                    self.streams.iter().copied().filter(|l| self.all_streams[*l].device == owner).collect();
                let line = own[pick(a, own.len())];
                self.devices[owner].event_record(self.events[event].1, self.all_streams[line].raw).unwrap();
                let before = self.before(line);
                let node = self.graph.add(before);
                self.all_streams[line].last = Some(node);
                self.events[event].2 = Some(node);
            }
            16..=20 => {
                let (_, event, mark) = self.events[pick(b, 4)];
                self.devices[device].stream_wait(raw, event).unwrap();
                if let Some(mark) = mark {
                    let mut before = self.before(line);
                    before.push(mark);
                    self.all_streams[line].last = Some(self.graph.add(before));
                }
            }
            21 | 22 => {
                let (owner, event, mark) = self.events[pick(b, 4)];
                self.mocks[owner].answer.store(c % 4 != 0, Ordering::Relaxed);
                if self.devices[owner].event_query(event).unwrap() {
                    self.observe(mark);
                }
            }
            23 => {
                self.mocks[device].answer.store(c % 4 != 0, Ordering::Relaxed);
                if self.devices[device].stream_query(raw).unwrap() {
                    self.observe(self.all_streams[line].last);
                }
            }
            24 => {
                self.devices[device].stream_synchronize(raw).unwrap();
                let whole = self.all_streams[line].kind == StreamKind::Legacy;
                let others =
                    self.all_streams.iter().filter(|l| whole && l.device == device && l.kind == StreamKind::Blocking);
                let seen: Vec<_> = others.chain([&self.all_streams[line]]).filter_map(|l| l.last).collect();
                self.observe(seen);
            }
            25 => {
                self.devices[device].host_function(raw, &mut Some(Box::new(|| ()))).unwrap();
                let before = self.before(line);
                let node = self.graph.add(before);
                self.all_streams[line].last = Some(node);
                self.functions[device].push(node);
            }
            26 => {
                if self.functions[device].is_empty() {
                    return;
                }
                let which = pick(b, self.functions[device].len());
                let function = self.mocks[device].functions.lock().remove(which);
                (function.0)();
                let node = self.functions[device].remove(which);
                self.observe([node]);
            }
            27 | 28 => {
                let new = access(2, range(b), c & 1 == 1);
                let race = self.races(self.host, &new);
                let Endpoint::Host(start) = self.memory[2].at(new.from) else { panic!() };
                let got = self.devices[0].host_access(start, (new.to - new.from) as usize, new.write);
                if self.agree(race, &got) {
                    self.observe([]);
                    self.accesses.push(ModelAccess { by: self.host, ..new });
                }
            }
            29 => {
                let memory = pick(b, 3);
                let race = self.races(self.host, &access(memory, (0, BYTES), true));
                let got = match self.memory[memory] {
                    // SAFETY: the mock has no memory.
                    ModelMemory::Device(owner, address) => unsafe { self.devices[owner].free(address) },
                    // SAFETY: as above.
                    ModelMemory::Host(start) => unsafe { self.devices[0].free_host(start, BYTES as usize) },
                };
                if self.agree(race, &got) {
                    self.accesses.retain(|access| access.memory != memory);
                    self.execs.retain(|exec| exec.accesses.iter().all(|access| access.memory != memory));
                    self.memory[memory] = match self.memory[memory] {
                        ModelMemory::Device(owner, _) => ModelMemory::Device(owner, written(&self.devices[owner])),
                        ModelMemory::Host(_) => ModelMemory::Host(self.devices[0].alloc_host(BYTES as usize).unwrap()),
                    };
                }
            }
            30 => {
                let slot = pick(a, self.streams.len());
                let kind = self.all_streams[line].kind;
                if kind != StreamKind::Legacy {
                    self.devices[device].stream_destroy(raw);
                    self.streams[slot] = self.line(device, kind);
                }
            }
            31 | 32 => {
                // Three nodes with their edges and their accesses.
                let list =
                    [(b, 1), (c, 2), (d, 4)].map(|(n, write)| access(of_device(n / 64), range(n), e & write != 0));
                let edges = [e & 8 != 0, e & 16 != 0, e & 32 != 0];
                let exec = self.exec(device, list, edges);
                self.execs.insert(0, exec);
                self.execs.truncate(4);
            }
            33 | 34 => {
                if self.execs.is_empty() {
                    return;
                }
                let which = pick(b, self.execs.len());
                self.launch(which, a);
            }
            _ => {
                let slot = pick(b, 4);
                let (owner, event, _) = self.events[slot];
                self.devices[owner].event_destroy(event);
                self.events[slot] = (owner, self.devices[owner].event_create(false).unwrap(), None);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_brute_force(program in prop::collection::vec(any::<[u8; 6]>(), 1..120)) {
        let mut comparison = Comparison::new();
        program.into_iter().for_each(|step| comparison.step(step));
    }

    /// A call that the device refuses can hide a race, but never causes one.
    #[test]
    fn refused_calls_make_no_races(program in prop::collection::vec((any::<[u8; 6]>(), any::<u8>()), 1..120)) {
        let mut comparison = Comparison::new();
        for (step, luck) in program {
            // Only accesses are refused: records and waits are unwrapped above.
            let refuse = luck % 8 == 0 && matches!(step[0] % 36, 0..=10 | 29 | 31..=34);
            comparison.mocks.iter().for_each(|mock| mock.refuse.store(refuse, Ordering::Relaxed));
            comparison.step(step);
        }
    }
}

/// The programs above must race sometimes, but not always.
#[test]
fn random_programs_race_now_and_then() {
    use rand::{RngExt, SeedableRng, rngs::StdRng};
    let mut random = StdRng::seed_from_u64(7);
    let (mut races, mut clean) = (0, 0);
    for _ in 0..200 {
        let mut comparison = Comparison::new();
        for _ in 0..60 {
            comparison.step(random.random());
        }
        races += comparison.races;
        clean += comparison.accesses.len();
    }
    assert!(races > 500 && clean > 500, "{races} races, {clean} accesses in order");
}
