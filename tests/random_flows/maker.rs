//! Makes a [`Plan`] from a seed.
//!
//! A flow without faults must never stall by construction, or a lost wakeup would look the same:
//!
//! - every hub has envelopes for the messages that an operator keeps (a batch, a loop that counts its rounds);
//! - messages are taken in pairs only where no output has several readers, since branches that meet again may wait for
//!   each other;
//! - a loop that ends when it goes quiet has nothing downstream or in parallel that waits for an end.

use super::plan::*;

/// Work that only enqueues.
const REPLAYABLE: [Work; 5] = [Work::InPlace, Work::Side, Work::Transfer, Work::Fresh, Work::Named];

fn is_replayable(node: &Node) -> bool {
    matches!(node.kind, Kind::Relay { work, runs: Runs::One, hints: None, .. } if REPLAYABLE.contains(&work))
}

impl Plan {
    pub(crate) fn new(seed: u64, limits: Limits) -> Self {
        Maker::new(seed, limits).make()
    }
}

struct Maker {
    dice: Dice,
    /// Decisions about sections.
    more: Dice,
    limits: Limits,
    plan: Plan,
    /// Messages may be taken in pairs, and no output has several readers; or the reverse.
    pairs: bool,
    readers: Vec<usize>,
    sent: Vec<Vec<Route>>,
    /// Number of messages that operators keep.
    kept: usize,
}

impl Maker {
    fn new(seed: u64, limits: Limits) -> Self {
        let mut dice = Dice::new(seed);
        let pairs = dice.one_in(3);
        let plan = Plan {
            seed,
            devices: vec![Vec::new(); 1 + dice.up_to(2)],
            nodes: Vec::new(),
            edges: Vec::new(),
            ending: Ending::ByItself,
            mode: dice.up_to(2),
            section: None,
        };
        Self { dice, more: Dice::new(!seed), limits, plan, pairs, readers: Vec::new(), sent: Vec::new(), kept: 0 }
    }

    fn make(mut self) -> Plan {
        let sources = 1 + self.dice.up_to(2).min(self.limits.operators.saturating_sub(1));
        for _ in 0..sources {
            let messages = self.dice.between(1, self.limits.messages as usize) as u32;
            let make =
                self.dice.of(&[Make::Blank, Make::Blank, Make::Blank, Make::Own, Make::Wrapped, Make::FromIngress]);
            let node = self.add(Kind::Source { messages, make });
            if make == Make::Wrapped {
                self.plan.nodes[node].device = None;
            }
            self.sent[node] = vec![Route { source: node, path: passed(0, node), ordered: true, lossy: false }];
        }
        for _ in 0..self.dice.up_to(self.limits.operators) {
            self.add_operator();
        }
        for node in 0..self.plan.nodes.len() {
            if self.readers[node] == 0 && !matches!(self.plan.nodes[node].kind, Kind::Sink(_)) && self.sends(node) {
                self.add_sink(node);
            }
        }
        self.replay();
        self.size_hubs();
        self.widen_hubs();
        self.go_wrong();
        self.plan
    }

    /// A body of a loop sends only to that loop.
    fn sends(&self, node: usize) -> bool {
        !self.sent[node].is_empty()
    }

    fn add(&mut self, kind: Kind) -> usize {
        let dice = &mut self.dice;
        let device = if dice.one_in(4) { None } else { Some(dice.up_to(self.plan.devices.len() - 1)) };
        let paced =
            !matches!(kind, Kind::Rounds { .. } | Kind::Quiet { .. } | Kind::Sink(Sink::Outside) | Kind::Keep { .. });
        let several = matches!(kind, Kind::Relay { runs: Runs::Several { .. }, .. });
        self.plan.nodes.push(Node {
            kind,
            device,
            own_thread: !several && dice.one_in(8),
            own_stream: !dice.one_in(8),
            every: (paced && dice.one_in(8)).then(|| 1 + dice.up_to(4) as u64),
            gate: paced && dice.one_in(8),
            blocks: None,
            routes: Vec::new(),
        });
        self.readers.push(0);
        self.sent.push(Vec::new());
        self.plan.nodes.len() - 1
    }

    fn add_operator(&mut self) {
        let inputs = match self.dice.up_to(19) {
            0..=1 => self.outputs(2),
            2..=3 => self.outputs(3),
            _ => self.outputs(1),
        };
        if inputs.is_empty() {
            return;
        }
        let each = inputs.len() > 1 && self.pairs && self.dice.one_in(2);
        let kind = if inputs.len() > 1 { Kind::Merge { each } } else { self.one_input() };
        let node = self.add(kind);
        let mut routes = Vec::new();
        for from in inputs {
            routes.extend(self.connect(from, node));
        }
        self.plan.nodes[node].routes = routes.clone();
        let ordered = !matches!(
            self.plan.nodes[node].kind,
            Kind::Quiet { .. } | Kind::Relay { runs: Runs::Several { ordered: false, .. }, .. }
        );
        for route in &mut routes {
            route.path = passed(route.path, node);
            route.ordered &= ordered;
        }
        self.sent[node] = routes;
        if matches!(self.plan.nodes[node].kind, Kind::Rounds { .. } | Kind::Quiet { .. }) {
            self.add_body(node);
        }
        self.add_chain(node);
    }

    /// After an operator that can be in a section, sometimes adds more of them.
    fn add_chain(&mut self, mut last: usize) {
        while is_replayable(&self.plan.nodes[last]) && self.more.one_in(2) {
            let work = self.more.of(&REPLAYABLE);
            let node = self.add(Kind::Relay { work, done: false, runs: Runs::One, hints: None });
            let mut routes = self.connect(last, node);
            self.plan.nodes[node].routes = routes.clone();
            routes.iter_mut().for_each(|route| route.path = passed(route.path, node));
            self.sent[node] = routes;
            last = node;
        }
    }

    /// Outputs to connect to; rarely one that already has a reader.
    fn outputs(&mut self, count: usize) -> Vec<usize> {
        let nodes = 0..self.plan.nodes.len();
        let mut open: Vec<_> = nodes.clone().filter(|node| self.readers[*node] == 0 && self.sends(*node)).collect();
        if open.is_empty() || (!self.pairs && self.dice.one_in(3)) {
            open = nodes.filter(|node| self.readers[*node] < 3 && self.sends(*node)).collect();
        }
        if self.pairs {
            open.retain(|node| self.readers[*node] == 0);
        }
        let mut chosen = Vec::new();
        let mut routes = 0;
        while chosen.len() < count && !open.is_empty() {
            let node = open.swap_remove(self.dice.up_to(open.len() - 1));
            routes += self.sent[node].len();
            if routes > 4 {
                break;
            }
            chosen.push(node);
        }
        chosen
    }

    fn one_input(&mut self) -> Kind {
        let dice = &mut self.dice;
        match dice.up_to(15) {
            0 | 1 => {
                let most = 2 + dice.up_to(2);
                self.kept += most;
                Kind::Batch { most, within: 1 + dice.up_to(9) as u64 }
            }
            2 => {
                let count = 1 + dice.up_to(2);
                self.kept += count;
                Kind::Keep { count }
            }
            3 => Kind::Rounds { laps: 1 + dice.up_to(2) as u32, body: None },
            4 if !self.pairs => Kind::Quiet { body: None },
            _ => {
                let work = dice.of(&[
                    Work::InPlace,
                    Work::InPlace,
                    Work::Side,
                    Work::Side,
                    Work::Look,
                    Work::Transfer,
                    Work::Transfer,
                    Work::Fresh,
                    Work::Named,
                    Work::After,
                ]);
                let runs = match dice.up_to(7) {
                    0 if work != Work::After => Runs::Several { count: 2 + dice.up_to(1), ordered: dice.one_in(2) },
                    _ => Runs::One,
                };
                let full = dice.of(&[Full::Hold, Full::DropNewest, Full::DropOldest, Full::Latest]);
                let hints =
                    (runs == Runs::One && dice.one_in(6)).then(|| Hints { count: 1 + dice.up_to(9) as u64, full });
                Kind::Relay { work, done: dice.one_in(5), runs, hints }
            }
        }
    }

    fn add_body(&mut self, node: usize) {
        let work = self.dice.of(&[Work::InPlace, Work::Side, Work::Transfer]);
        let body = self.add(Kind::Relay { work, done: false, runs: Runs::One, hints: None });
        self.plan.nodes[body].every = None;
        self.plan.nodes[body].gate = false;
        match &mut self.plan.nodes[node].kind {
            Kind::Rounds { body: own, .. } | Kind::Quiet { body: own } => *own = Some(body),
            _ => {}
        }
        for (from, to) in [(node, body), (body, node)] {
            let hub = HubPlan { capacity: None, full: Full::Hold, envelopes: None, sized: true };
            self.plan.edges.push(Edge { from, to, hub });
        }
    }

    fn add_sink(&mut self, from: usize) {
        let sink = self.dice.of(&[Sink::Read, Sink::Read, Sink::Done, Sink::Impatient, Sink::Device, Sink::Outside]);
        let node = self.add(Kind::Sink(sink));
        match sink {
            Sink::Device => _ = self.plan.nodes[node].device.get_or_insert(0),
            _ => self.plan.nodes[node].device = None,
        }
        let mut routes = self.connect(from, node);
        if sink == Sink::Device && !self.plan.nodes[node].own_stream {
            // Each message is on the stream that it came with.
            routes.iter_mut().for_each(|route| route.ordered = false);
        }
        self.plan.nodes[node].routes = routes;
    }

    fn connect(&mut self, from: usize, to: usize) -> Vec<Route> {
        self.readers[from] += 1;
        let dice = &mut self.dice;
        let full = match dice.up_to(15) {
            0 if !self.pairs => Full::DropOldest,
            1 if !self.pairs => Full::DropNewest,
            _ => Full::Hold,
        };
        let capacity = if full == Full::Hold && dice.one_in(2) { None } else { Some(1 + dice.up_to(3)) };
        self.plan.edges.push(Edge { from, to, hub: HubPlan { capacity, full, envelopes: None, sized: true } });
        let lossy = full != Full::Hold;
        self.sent[from].iter().map(|route| Route { lossy: route.lossy || lossy, ..*route }).collect()
    }

    /// The maximum number of messages that can reach a node.
    fn messages(&self, routes: &[Route]) -> usize {
        let of = |route: &Route| match self.plan.nodes[route.source].kind {
            Kind::Source { messages, .. } => messages as usize,
            _ => 0,
        };
        routes.iter().map(of).sum()
    }

    fn replay(&mut self) {
        let (plan, dice) = (&mut self.plan, &mut self.more);
        let on = |plan: &Plan, node: usize| {
            let mut edges = plan.edges.iter().filter(|edge| edge.from == node);
            edges.next().copied().filter(|_| edges.next().is_none())
        };
        let mut first: Vec<_> = (0..plan.nodes.len()).filter(|node| is_replayable(&plan.nodes[*node])).collect();
        if first.is_empty() || dice.one_in(3) {
            return;
        }
        let mut nodes = vec![first.swap_remove(dice.up_to(first.len() - 1))];
        while let Some(edge) = on(plan, nodes[nodes.len() - 1])
            && edge.hub.full == Full::Hold
            && is_replayable(&plan.nodes[edge.to])
            && !dice.one_in(6)
        {
            nodes.push(edge.to);
        }
        let device = nodes.iter().find_map(|node| plan.nodes[*node].device).unwrap_or(0);
        for node in &nodes {
            let node = &mut plan.nodes[*node];
            (node.device, node.own_thread, node.every, node.gate) = (Some(device), false, None, false);
            if let Kind::Relay { done, .. } = &mut node.kind {
                *done = false;
            }
        }
        let buckets = dice.of(&[&[][..], &[32], &[8, 16], &[8, 16, 32]]);
        let buckets = if buckets.is_empty() { Err(1 + dice.up_to(3)) } else { Ok(buckets.to_vec()) };
        let at_start = buckets.is_ok() && dice.one_in(2);
        plan.section = Some(Section { nodes, buckets, at_start, checked: dice.one_in(3) });
    }

    fn size_hubs(&mut self) {
        // In a flow that goes quiet, a message left at an optional input is a stall.
        if self.plan.nodes.iter().any(|node| matches!(node.kind, Kind::Quiet { .. })) {
            for node in &mut self.plan.nodes {
                if let Kind::Relay { hints, .. } = &mut node.kind {
                    *hints = None;
                }
            }
        }
        for node in 0..self.plan.nodes.len() {
            if let Kind::Quiet { .. } = self.plan.nodes[node].kind {
                self.kept += self.messages(&self.plan.nodes[node].routes);
            }
        }
        for node in &mut self.plan.nodes {
            let fresh = matches!(node.kind, Kind::Relay { work: Work::Fresh, runs: Runs::One, .. });
            // One held by the operator, one elsewhere, and those that are kept.
            node.blocks = (fresh && node.device.is_some() && self.dice.one_in(2)).then(|| 2 + self.kept);
        }
        // A section waits only for its messages, not for memory.
        for node in self.plan.section.iter().flat_map(|section| &section.nodes) {
            self.plan.nodes[*node].blocks = None;
        }
        for at in 0..self.plan.edges.len() {
            let Edge { from, to, mut hub } = self.plan.edges[at];
            let dice = &mut self.dice;
            if hub.full != Full::Hold {
                // One for each message that it queues, one at each end, and those that are kept.
                hub.envelopes = (self.kept > 0).then(|| hub.capacity.unwrap_or(1) + self.kept + 2);
            } else {
                let in_loop = |end: usize| matches!(self.plan.nodes[end].kind, Kind::Rounds { .. });
                let needs = match self.plan.nodes[from].kind {
                    // The envelopes filled by runs that wait for their turn.
                    Kind::Relay { runs: Runs::Several { count, .. }, .. } => count,
                    // A body that writes another envelope holds two.
                    _ => usize::from(in_loop(from) || in_loop(to)),
                };
                if self.kept > 0 || dice.one_in(2) {
                    hub.envelopes = Some(self.kept + needs + 1 + dice.up_to(2));
                }
            }
            if let Kind::Batch { most, .. } = self.plan.nodes[to].kind {
                hub.capacity = hub.capacity.map(|capacity| capacity.max(most));
            }
            for end in [from, to] {
                let Kind::Quiet { body } = self.plan.nodes[end].kind else { continue };
                if body == Some(from) || body == Some(to) {
                    hub.capacity = Some(self.messages(&self.plan.nodes[end].routes) + 1);
                }
            }
            // An operator that only passes messages on need not set their size.
            let own = match self.plan.nodes[from].kind {
                Kind::Source { .. } | Kind::Relay { work: Work::Transfer | Work::Fresh, .. } => true,
                _ => self.plan.nodes[from].device.is_none(),
            };
            hub.sized = own || self.dice.one_in(3);
            self.plan.edges[at].hub = hub;
        }
    }

    /// Gives some hubs so many envelopes that messages are copied together.
    fn widen_hubs(&mut self) {
        let mut dice = Dice::new(self.plan.seed.rotate_left(32) ^ 1);
        for edge in &mut self.plan.edges {
            if edge.hub.full == Full::Hold && dice.one_in(3) {
                edge.hub.capacity = Some(edge.hub.capacity.unwrap_or(1).max(8 + dice.up_to(4)));
                edge.hub.envelopes = Some(edge.hub.envelopes.unwrap_or(1).max(8 + dice.up_to(12)));
            }
        }
    }

    fn go_wrong(&mut self) {
        let dice = &mut self.dice;
        if dice.one_in(3) {
            let device = dice.up_to(self.plan.devices.len() - 1);
            let nth = 1 + dice.up_to(20) as u64;
            let fault = match dice.up_to(5) {
                0 | 1 => Fault::Trap(dice.of(&["step", "look", "transfer"]), nth),
                2 | 3 => Fault::Copy(nth),
                4 => Fault::Alloc(nth),
                _ => Fault::LostFunction(nth.min(4)),
            };
            self.plan.devices[device].push(fault);
        }
        let turns = dice.up_to(300) as u32;
        self.plan.ending = match dice.up_to(9) {
            0 => Ending::Stop(turns),
            1 => Ending::Abort(turns),
            2 => Ending::Drop(turns),
            _ => Ending::ByItself,
        };
    }
}
