//! The decisions of a seed: a flow, where its operators run, the faults, and how it ends.
//!
//! A [`Plan`] is data: it can be printed, and the same seed and [`Limits`] give the same plan: see
//! [`maker`](super::maker).
//!
//! Each operator that a message passes changes its *route*, a number in its data. So the plan says which routes reach a
//! sink, and for each of them which messages, and in which order.

use std::fmt;

/// Words of the smallest message, and of the largest.
pub(crate) const WORDS: std::ops::RangeInclusive<usize> = 6..=32;
/// The size of every envelope.
pub(crate) const BYTES: usize = *WORDS.end() * 4;

/// Limits of a plan: smaller ones help to find out what a failure needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) operators: usize,
    pub(crate) messages: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { operators: 6, messages: 9 }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) devices: Vec<Vec<Fault>>,
    /// Sources first, then in an order in which every input is connected to an earlier node.
    pub(crate) nodes: Vec<Node>,
    pub(crate) edges: Vec<Edge>,
    pub(crate) ending: Ending,
    pub(crate) mode: usize,
    pub(crate) section: Option<Section>,
}

/// Relays in sequence whose runs are replayed as a graph.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    pub(crate) nodes: Vec<usize>,
    /// Sizes of the buckets, in words; or one graph for each length, up to so many.
    pub(crate) buckets: Result<Vec<usize>, usize>,
    pub(crate) at_start: bool,
    pub(crate) checked: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    /// Its device; `None` is the host.
    pub(crate) device: Option<usize>,
    pub(crate) own_thread: bool,
    pub(crate) own_stream: bool,
    /// Milliseconds from one run to the next.
    pub(crate) every: Option<u64>,
    /// It is paused now and then.
    pub(crate) gate: bool,
    /// Its buffers come from so many blocks, and it waits until one is free.
    pub(crate) blocks: Option<usize>,
    /// The routes of its messages, one per edge.
    pub(crate) routes: Vec<Route>,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Source {
        messages: u32,
        make: Make,
    },
    Relay {
        work: Work,
        done: bool,
        runs: Runs,
        hints: Option<Hints>,
    },
    /// Sends on so many at a time, or fewer after so many milliseconds.
    Batch {
        most: usize,
        within: u64,
    },
    /// Keeps so many until there are more.
    Keep {
        count: usize,
    },
    /// Takes one message from each input, or from any.
    Merge {
        each: bool,
    },
    /// Each message goes through a further operator and back, so many times.
    Rounds {
        laps: u32,
        body: Option<usize>,
    },
    /// The same with the number of rounds given in the message, and any number of messages at a time.
    Quiet {
        body: Option<usize>,
    },
    Sink(Sink),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Make {
    Blank,
    Own,
    /// User memory, on the host.
    Wrapped,
    /// Blank envelopes, each for a number that arrives from outside the flow.
    FromIngress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    InPlace,
    /// Reads it on two further streams, and then changes it.
    Side,
    /// Copies it to the host, and checks it.
    Look,
    Transfer,
    Fresh,
    /// Works on a named stream, and sends the message with it.
    Named,
    /// Checks in `after` that it is done.
    After,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    One,
    Several { count: usize, ordered: bool },
}

/// Numbers that arrive in parallel to the messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hints {
    pub(crate) count: u64,
    pub(crate) full: Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    Hold,
    DropNewest,
    DropOldest,
    Latest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sink {
    Read,
    /// Checks completed messages on the host.
    Done,
    /// Reads on the host, drops the wait half way, and starts again.
    Impatient,
    /// Checks on its device.
    Device,
    Outside,
}

/// Messages of one source that have come the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) source: usize,
    pub(crate) path: u32,
    pub(crate) ordered: bool,
    pub(crate) lossy: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) hub: HubPlan,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct HubPlan {
    pub(crate) capacity: Option<usize>,
    pub(crate) full: Full,
    pub(crate) envelopes: Option<usize>,
    pub(crate) sized: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Trap(&'static str, u64),
    Copy(u64),
    Alloc(u64),
    LostFunction(u64),
}

/// After so many turns of the observing task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    ByItself,
    Stop(u32),
    Abort(u32),
    Drop(u32),
}

/// The path after this operator.
pub(crate) fn passed(path: u32, node: usize) -> u32 {
    (path ^ (node as u32 + 1)).wrapping_mul(0x0100_0193).rotate_left(7)
}

/// The number of rounds of a message.
pub(crate) fn laps(number: u32) -> u32 {
    number % 4
}

/// Random decisions from a seed. (SplitMix64: two lines, and a clone diverges.)
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.roll().is_multiple_of(n)
    }

    pub(crate) fn up_to(&mut self, n: usize) -> usize {
        (self.roll() % (n as u64 + 1)) as usize
    }

    pub(crate) fn between(&mut self, from: usize, to: usize) -> usize {
        from + self.up_to(to - from)
    }

    pub(crate) fn of<T: Copy>(&mut self, these: &[T]) -> T {
        these[self.up_to(these.len() - 1)]
    }
}

impl Plan {
    pub(crate) fn has_faults(&self) -> bool {
        self.devices.iter().flatten().any(|fault| !matches!(fault, Fault::LostFunction(_)))
    }

    pub(crate) fn may_run_out(&self) -> bool {
        self.devices.iter().flatten().any(|fault| matches!(fault, Fault::Alloc(_)))
    }

    pub(crate) fn in_section(&self, node: usize) -> bool {
        self.section.as_ref().is_some_and(|section| section.nodes.contains(&node))
    }

    pub(crate) fn name(&self, node: usize) -> String {
        let word = match self.nodes[node].kind {
            Kind::Source { .. } => "source",
            Kind::Relay { .. } => "relay",
            Kind::Batch { .. } => "batch",
            Kind::Keep { .. } => "keep",
            Kind::Merge { .. } => "merge",
            Kind::Rounds { .. } => "rounds",
            Kind::Quiet { .. } => "quiet",
            Kind::Sink(_) => "sink",
        };
        format!("{word}{node}")
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (device, faults) in self.devices.iter().enumerate() {
            writeln!(f, "  simulated:{device}, faults: {faults:?}")?;
        }
        for (number, node) in self.nodes.iter().enumerate() {
            let place = node.device.map_or("the host".into(), |device| format!("simulated:{device}"));
            write!(f, "  {:8} on {place}: {:?}", self.name(number), node.kind)?;
            let marks = [
                (node.own_thread, "own thread"),
                (!node.own_stream, "no own stream"),
                (node.gate, "gate"),
                (node.every.is_some(), "paced"),
                (node.blocks.is_some(), "blocks"),
            ];
            marks.iter().filter(|(is, _)| *is).try_for_each(|(_, mark)| write!(f, ", {mark}"))?;
            writeln!(f)?;
        }
        for Edge { from, to, hub } in &self.edges {
            writeln!(f, "  {} -> {}: {hub:?}", self.name(*from), self.name(*to))?;
        }
        if let Some(section) = &self.section {
            writeln!(f, "  {section:?}")?;
        }
        write!(f, "  ends: {:?}", self.ending)
    }
}
