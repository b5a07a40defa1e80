//! Builds the flow of a plan with loops, and runs it.

use std::{collections::BTreeMap, future::ready, sync::atomic::Ordering, time::Duration};

use tokio::time::{Instant, sleep};
use wakeline::{
    Ingress, Service,
    condition::{Gate, every},
    device::{Simulation, Task},
    flow::Branch,
    operator::{InputHandle, OutputHandle, map, sink, source},
    prelude::*,
};

use super::{
    super::{
        data::wrong,
        plan::{Dice, Full},
    },
    Answers, ENDLESS, FEW, Feed, Loops, Pace, Part, Ran, Show, Shown, Stop, Stuck, Walk, Walker,
    operators::*,
    parts_of, token,
};

struct Builder<'a> {
    flow: Flow,
    simulation: &'a Simulation,
    dice: Dice,
    shown: BTreeMap<usize, Shown>,
    callers: Vec<Task<Answers>>,
}

impl Loops {
    pub(crate) async fn run(&self, simulation: &Simulation) -> Ran {
        let flow = Flow::new(format!("seed {}", self.seed));
        let mut builder = Builder {
            flow,
            simulation,
            dice: Dice::new(self.seed.wrapping_mul(59)),
            shown: BTreeMap::new(),
            callers: Vec::new(),
        };
        for (at, part) in self.parts.iter().enumerate() {
            match part {
                Part::Walk(walk) => builder.walk(at, walk),
                Part::Stuck(stuck) => builder.stuck(at, stuck),
                Part::Ticks { every, count } => {
                    let ticks = builder.ticks(at, *every, *count);
                    builder.log(at, ticks);
                }
            }
        }
        let Builder { flow, shown, callers, .. } = builder;
        let begun = Instant::now();
        let outcome = match flow.spawn() {
            Err(error) => Err(error),
            Ok(running) => {
                if let Some(Stop { at, within }) = self.stop {
                    let handle = running.handle();
                    drop(simulation.spawn("stops", async move {
                        sleep(Duration::from_millis(at)).await;
                        match within {
                            Some(within) => handle.stop_within(Duration::from_millis(within)),
                            None => handle.stop(),
                        }
                    }));
                }
                running.await
            }
        };
        let took = begun.elapsed().as_millis() as u64;
        let mut answers = Vec::new();
        for caller in callers {
            match caller.await {
                Ok(more) => answers.extend(more),
                Err(unfinished) => wrong(format!("a caller did not end: {unfinished}")),
            }
        }
        Ran { devices: Vec::new(), outcome, took, shown, answers }
    }
}

impl Builder<'_> {
    fn ticks(&mut self, part: usize, period: u64, count: Option<u64>) -> OutputHandle<u64> {
        let mut left = 0..count.unwrap_or(u64::MAX);
        let ticks = self.flow.add(format!("ticks{part}"), source(move || ready(Ok(left.next()))));
        ticks.when(every(Duration::from_millis(period))).output
    }

    fn log(&mut self, part: usize, output: OutputHandle<u64>) {
        let log = self.flow.add(format!("log{part}"), sink(async |_: u64| Ok(())));
        self.flow.connect(output, log.input);
    }

    /// Sends messages with these hops; endlessly if the list is empty.
    fn feed(&mut self, part: usize, to: InputHandle<u64>, hops: &[u32]) {
        let (mut next, hops) = (0, hops.to_vec());
        let feed = move || {
            let number = next;
            next += 1;
            let left = if hops.is_empty() { Some(&ENDLESS) } else { hops.get(number as usize) };
            ready(Ok(left.map(|left| token(number, *left))))
        };
        let feed = self.flow.add(format!("feed{part}"), source(feed));
        self.flow.connect_with(feed.output, to, HubOptions::bounded(FEW));
    }

    fn walk(&mut self, part: usize, walk: &Walk) {
        let room = walk.hops.len() + 1;
        let exit = self.flow.add(format!("exit{part}"), Exit);
        let mut walkers = Vec::new();
        for (at, Walker { pace, .. }) in walk.walkers.iter().enumerate() {
            let shown = (at == 0 && walk.show.is_some()).then(Shown::default);
            self.shown.extend(shown.clone().map(|shown| (part, shown)));
            let sleeps = if let Pace::Sleeps(time) = pace { *time } else { 0 };
            let mut added = self.flow.add(format!("walk{part}_{at}"), Walking { sleeps, shown, doubles: false });
            if let Pace::Every(period) = pace {
                added = added.when(every(Duration::from_millis(*period)));
            }
            if let Some((paused, time)) = walk.gate
                && paused == at
            {
                let gate = Gate::paused();
                added = added.when(gate.clone());
                drop(self.simulation.spawn("gate", async move {
                    sleep(Duration::from_millis(time)).await;
                    gate.resume();
                }));
            }
            self.flow.connect_with(added.exit, exit.inputs, HubOptions::bounded(room));
            walkers.push(added);
        }
        let show = walk.show.map(|show| self.show(part, show));
        for (from, Walker { ways, .. }) in walk.walkers.iter().enumerate() {
            let to = ways.map(|to| walkers[to].inputs.with(HubOptions::bounded(room)));
            match show.filter(|_| from == 0) {
                Some(show) => self.flow.connect(walkers[from].a, [to[0], show]),
                None => self.flow.connect(walkers[from].a, to[0]),
            }
            self.flow.connect(walkers[from].b, to[1]);
            self.flow.connect(walkers[from].c, to[2]);
        }
        if walk.feed != Feed::Service {
            self.log(part, exit.output);
        }
        match walk.feed {
            Feed::Source => self.feed(part, walkers[0].inputs, &walk.hops),
            Feed::Ingress => {
                let ingress = self.flow.ingress(format!("in{part}"), walkers[0].inputs);
                let dice = Dice::new(self.dice.up_to(1 << 20) as u64);
                drop(self.simulation.spawn("sends", send(ingress, walk.hops.clone(), dice)));
            }
            Feed::Service => {
                let service = self.flow.service(format!("service{part}"), walkers[0].inputs, exit.output);
                self.call(service, &walk.hops);
            }
        }
    }

    /// Every second message has a caller of its own.
    fn call(&mut self, service: Service<u64, u64>, hops: &[u32]) {
        let tokens: Vec<_> = hops.iter().enumerate().map(|(number, hops)| token(number as u64, *hops)).collect();
        for tokens in tokens.chunks(2) {
            let dice = Dice::new(self.dice.up_to(1 << 20) as u64);
            let calls = call(service.clone(), tokens.to_vec(), dice);
            self.callers.push(self.simulation.spawn("calls", calls));
        }
    }

    fn show(&mut self, part: usize, show: Show) -> Branch<u64> {
        let last = self.shown[&part].1.clone();
        let see = move |token| last.store(token, Ordering::Relaxed);
        let name = format!("show{part}");
        let input = if let Some(ticks) = show.ticks {
            let added = self.flow.add(name, ShowBeside(see));
            let ticks = self.ticks(part, 20, Some(ticks));
            self.flow.connect(ticks, added.ticks);
            added.newest
        } else {
            let sees = move |token| {
                see(token);
                ready(Ok(()))
            };
            let added = self.flow.add(name, sink(sees));
            let input = added.input;
            if let Some(period) = show.every {
                let _added = added.when(every(Duration::from_millis(period)));
            }
            input
        };
        match show.hub {
            Full::Latest => input.with(HubOptions::latest()),
            Full::DropOldest => input.with(HubOptions::drop_oldest(1)),
            _ => input.with(HubOptions::bounded(1)),
        }
    }

    fn stuck(&mut self, part: usize, stuck: &Stuck) {
        match stuck {
            Stuck::Exchange { feed, once, echoes, back, in_run } => {
                let exchange = if *in_run {
                    let added = self.flow.add(format!("exchange{part}"), ExchangeInRun);
                    (added.requests, added.back, added.forth, added.responses)
                } else {
                    let added = self.flow.add(format!("exchange{part}"), Exchange);
                    (added.requests, added.back, added.forth, added.responses)
                };
                let (requests, input, mut last, responses) = exchange;
                for at in 0..*echoes {
                    let echo = self.flow.add(format!("echo{part}_{at}"), map(async |token: u64| Ok(token)));
                    self.flow.connect(last, echo.input);
                    last = echo.output;
                }
                match back {
                    Full::Latest => self.flow.connect_with(last, input, HubOptions::latest()),
                    Full::DropOldest => self.flow.connect_with(last, input, HubOptions::drop_oldest(1)),
                    _ => self.flow.connect(last, input),
                }
                if *feed == Feed::Service {
                    let service = self.flow.service(format!("service{part}"), requests, responses);
                    let dice = Dice::new(self.dice.up_to(1 << 20) as u64);
                    drop(self.simulation.spawn("calls", call(service, vec![token(0, 0)], dice)));
                } else {
                    self.log(part, responses);
                    self.feed(part, requests, if *once { &[0] } else { &[] });
                }
            }
            Stuck::Flood { ways } => {
                let exit = self.flow.add(format!("exit{part}"), Exit);
                let walking = || Walking { sleeps: 0, shown: None, doubles: true };
                let walkers: Vec<_> =
                    (0..ways.len()).map(|at| self.flow.add(format!("walk{part}_{at}"), walking())).collect();
                for (from, ways) in ways.iter().enumerate() {
                    for (way, to) in ways.iter().enumerate() {
                        let output = [walkers[from].a, walkers[from].b, walkers[from].c][way];
                        self.flow.connect_with(output, walkers[*to].inputs, HubOptions::bounded(FEW));
                    }
                    self.flow.connect(walkers[from].exit, exit.inputs);
                }
                self.log(part, exit.output);
                self.feed(part, walkers[0].inputs, &[]);
            }
            Stuck::Pairs { relays } => {
                let split = self.flow.add(format!("split{part}"), Split { ahead: relays + 3 });
                let join = self.flow.add(format!("join{part}"), Join);
                let mut last = split.one;
                for at in 0..*relays {
                    let relay = self.flow.add(format!("relay{part}_{at}"), map(async |token: u64| Ok(token)));
                    self.flow.connect_with(last, relay.input, HubOptions::bounded(1));
                    last = relay.output;
                }
                self.flow.connect_with(last, join.one, HubOptions::bounded(1));
                self.flow.connect(split.other, join.other);
                self.log(part, join.output);
                self.feed(part, split.input, &[]);
            }
            Stuck::Kept => {
                let fill = self.flow.add(format!("fill{part}"), Fill);
                let window = self.flow.add(format!("window{part}"), Window(Vec::new()));
                self.flow.connect_with(fill.output, window.input, HubOptions::bounded(1).envelope_bytes(8));
            }
        }
    }
}

async fn send(ingress: Ingress<u64>, hops: Vec<u32>, mut dice: Dice) {
    for (number, hops) in hops.into_iter().enumerate() {
        sleep(Duration::from_millis(dice.up_to(300) as u64)).await;
        // A flow that has ended is reported elsewhere.
        let _ = ingress.send(token(number as u64, hops)).await;
    }
}

async fn call(service: Service<u64, u64>, tokens: Vec<u64>, mut dice: Dice) -> Answers {
    let mut answers = Vec::new();
    for token in tokens {
        sleep(Duration::from_millis(dice.up_to(300) as u64)).await;
        answers.push((parts_of(token).0, service.ask(token).await));
    }
    answers
}
