//! A hub of chunks without a flow: links of all kinds at random places, each in a task.
//!
//! Each chunk visits every link that modifies, once, in the order of linking; then each link that peeks reads it once;
//! and exactly one consuming link gets it. Links return chunks uncommitted, and drop waits half way.

use wakeline::{
    ChunkHub, Device, Stream,
    device::{Simulation, Task},
    hub::{Consumer, Modifier, Peeker, Producer},
    prelude::*,
};

use super::{
    by_hand,
    data::{self, Head, PASS, Tag, create, seen, step, tally, world},
    operators::{patiently, turns},
    plan::{self, Dice, Fault, Limits, WORDS},
};

/// Numbers of links, by role.
const MODIFY: usize = 100;
const PEEK: usize = 200;
const CONSUME: usize = 300;

#[derive(Clone, Debug)]
pub(crate) struct Chunks {
    seed: u64,
    faults: Vec<Option<Fault>>,
    queue: Option<usize>,
    /// At each place; the last is the host.
    envelopes: Vec<usize>,
    /// Their places, and the number of chunks that each producer makes.
    produce: Vec<(usize, u32)>,
    modify: Vec<usize>,
    peek: Vec<usize>,
    consume: Vec<usize>,
}

pub(crate) struct Ran {
    pub(crate) devices: Vec<Device>,
    went_well: bool,
    failed: Vec<String>,
}

struct Hand<L> {
    link: L,
    node: usize,
    stream: Option<Stream>,
    dice: Dice,
}

impl Chunks {
    pub(crate) fn new(seed: u64, limits: Limits) -> Self {
        let mut dice = Dice::new(seed);
        let faults: Vec<_> = (0..1 + dice.up_to(1)).map(|_| by_hand::fault(&mut dice)).collect();
        let places = faults.len();
        let some = |dice: &mut Dice, from: usize, to: usize| -> Vec<usize> {
            (0..dice.between(from, to.max(from))).map(|_| dice.up_to(places)).collect()
        };
        let most = limits.operators.min(3);
        let (produce, modify) = (some(&mut dice, 1, 2.min(most)), some(&mut dice, 0, most));
        let (peek, consume) = (some(&mut dice, 0, 2.min(most)), some(&mut dice, 1, 2.min(most)));
        let produce = produce.into_iter().map(|at| (at, dice.between(1, limits.messages as usize) as u32)).collect();
        let queue = (!dice.one_in(4)).then(|| 1 + dice.up_to(3));
        let envelopes = (0..=places).map(|_| 1 + dice.up_to(2)).collect();
        Self { seed, faults, queue, envelopes, produce, modify, peek, consume }
    }

    pub(crate) async fn run(&self, simulation: &Simulation) -> Ran {
        let devices: Vec<_> = self.faults.iter().map(|fault| by_hand::open(simulation, *fault)).collect();
        let failed = match self.spawn(simulation, &devices) {
            Ok(tasks) => {
                let mut failed = Vec::new();
                for task in tasks {
                    match task.await {
                        Ok(done) => failed.extend(done.err()),
                        Err(unfinished) => {
                            return Ran { devices, went_well: false, failed: vec![format!("{unfinished:#}")] };
                        }
                    }
                }
                failed
            }
            Err(error) => vec![error],
        };
        let went_well = failed.is_empty();
        let failed = failed.into_iter().filter_map(|error| by_hand::unexplained(error, &devices)).collect();
        Ran { devices, went_well, failed }
    }

    fn spawn(&self, simulation: &Simulation, devices: &[Device]) -> Result<Vec<Task<Result<()>>>> {
        let host = Device::host();
        let at = |place: usize| devices.get(place).unwrap_or(&host);
        let mut hub = ChunkHub::<u32, Tag>::builder("chunks").elements(*WORDS.end()).pinned_for(&devices[0]);
        hub = match self.queue {
            Some(queue) => hub.queue(queue),
            None => hub.unbounded(),
        };
        let places =
            self.produce.iter().map(|(place, _)| place).chain(&self.modify).chain(&self.peek).chain(&self.consume);
        let mut places: Vec<_> = places.copied().collect();
        places.sort_unstable();
        places.dedup();
        for place in places {
            hub = hub.envelopes(at(place), self.envelopes[place]);
        }
        let hub = hub.build()?;
        let mut tasks: Vec<Task<Result<()>>> = Vec::new();
        // All links first: they determine the flow of the chunks.
        macro_rules! hands {
            ($places:expr, $base:expr, $link:ident) => {{
                let made = $places.iter().enumerate().map(|(number, place)| {
                    let device = at(*place);
                    let stream = if device.is_host() { None } else { Some(Stream::new(device)?) };
                    let node = $base + number;
                    let dice = Dice::new(self.seed.wrapping_mul(37) + node as u64);
                    Ok(Hand { link: hub.$link(device)?, node, stream, dice })
                });
                made.collect::<Result<Vec<_>>>()?
            }};
        }
        let produce_at: Vec<usize> = self.produce.iter().map(|(place, _)| *place).collect();
        let produce = hands!(produce_at, 0, produce);
        let modify = hands!(self.modify, MODIFY, modify);
        let peek = hands!(self.peek, PEEK, peek);
        let consume = hands!(self.consume, CONSUME, consume);
        drop(hub);
        for (hand, (_, count)) in produce.into_iter().zip(&self.produce) {
            tasks.push(simulation.spawn(format!("produces {}", hand.node), hand.produce(*count)));
        }
        tasks.extend(modify.into_iter().map(|hand| simulation.spawn(format!("modifies {}", hand.node), hand.modify())));
        tasks.extend(peek.into_iter().map(|hand| simulation.spawn(format!("peeks {}", hand.node), hand.peek())));
        tasks.extend(
            consume.into_iter().map(|hand| simulation.spawn(format!("consumes {}", hand.node), hand.consume())),
        );
        Ok(tasks)
    }

    /// If all succeeded, each chunk was seen by the right links, once and unchanged.
    pub(crate) fn judge(&self, ran: &Ran) -> Vec<String> {
        if ran.went_well {
            self.judge_links();
        }
        by_hand::judge(&ran.devices, &ran.failed)
    }

    fn judge_links(&self) {
        let mut all: Vec<Head> = Vec::new();
        for (origin, (_, count)) in self.produce.iter().enumerate() {
            let path = (MODIFY..).take(self.modify.len()).fold(plan::passed(0, origin), plan::passed);
            all.extend((0..*count).map(|number| Head { origin: origin as u32, number, laps: 0, path }));
        }
        let check = |who: &str, mut got: Vec<Head>| {
            got.sort_unstable_by_key(|head| (head.origin, head.number));
            if got != all {
                world(|world| world.wrong_on_devices.push(format!("{who} got {got:?} instead of {all:?}")));
            }
        };
        let got = |node: usize| world(|world| world.seen.remove(&node)).unwrap_or_default();
        for node in (PEEK..).take(self.peek.len()) {
            check(&format!("link {node}, which peeks,"), got(node));
        }
        let consumed = (CONSUME..).take(self.consume.len()).flat_map(got).collect();
        check("all consuming links together", consumed);
    }
}

impl Hand<Producer<u32, Tag>> {
    async fn produce(mut self, count: u32) -> Result<()> {
        let mut number = 0;
        while number < count {
            let mut blank = None;
            for _ in 0..2 {
                if blank.is_none() {
                    blank = patiently(self.dice.up_to(20) as u32, self.link.next()).await.transpose()?;
                }
            }
            let blank = match blank {
                Some(blank) => blank,
                None => self.link.next().await?,
            };
            let Some(mut chunk) = blank else { return Ok(()) };
            let words = self.dice.between(*WORDS.start(), *WORDS.end());
            let (origin, path) = (self.node as u32, plan::passed(0, self.node));
            chunk.set_structure(Tag { origin, number });
            match &self.stream {
                Some(stream) => {
                    chunk.set_len(words)?;
                    create::launch(stream, &mut chunk, origin, number, 0, path)?;
                }
                None => {
                    data::write(&mut chunk.space().await?[..words], Head { origin, number, laps: 0, path });
                    chunk.set_len(words)?;
                }
            }
            if self.dice.one_in(6) {
                // Returned uncommitted: it is discarded.
                continue;
            }
            chunk.commit()?;
            number += 1;
            turns(self.dice.up_to(4) as u32).await;
        }
        Ok(())
    }
}

fn tag(structure: Option<&Tag>) -> Tag {
    structure.copied().unwrap_or(data::NO_TAG)
}

impl Hand<Modifier<u32, Tag>> {
    async fn modify(mut self) -> Result<()> {
        while let Some(mut chunk) = self.link.next().await? {
            if self.dice.one_in(6) {
                // Returned uncommitted: it comes again.
                turns(self.dice.up_to(4) as u32).await;
                continue;
            }
            let tag = tag(chunk.structure());
            match &self.stream {
                Some(stream) => step::launch(stream, &mut chunk, self.node as u32, PASS, tag.origin, tag.number)?,
                None => {
                    let data = chunk.write().await?;
                    if let Some(head) = data::read(data, format_args!("link {}", self.node), tag) {
                        data::write(data, data::step_on(head, self.node, PASS));
                    }
                }
            }
            chunk.commit()?;
        }
        Ok(())
    }
}

impl Hand<Peeker<u32, Tag>> {
    async fn peek(mut self) -> Result<()> {
        while let Some(chunk) = self.link.next().await? {
            turns(self.dice.up_to(4) as u32).await;
            look(self.node, self.stream.as_ref(), &chunk, tag(chunk.structure())).await?;
        }
        Ok(())
    }
}

impl Hand<Consumer<u32, Tag>> {
    async fn consume(mut self) -> Result<()> {
        while let Some(chunk) = self.link.next().await? {
            if self.dice.one_in(6) {
                // Returned uncommitted: the next consume gets it again.
                continue;
            }
            look(self.node, self.stream.as_ref(), &chunk, tag(chunk.structure())).await?;
            if self.dice.one_in(3) {
                let _out = chunk.into_envelope()?;
                turns(self.dice.up_to(20) as u32).await;
            } else {
                chunk.commit()?;
            }
        }
        Ok(())
    }
}

/// Checks a chunk where it is, and records it.
async fn look(node: usize, stream: Option<&Stream>, chunk: &Envelope<u32>, tag: Tag) -> Result<()> {
    match stream {
        Some(stream) => tally::launch(stream, chunk, node as u32, tag.origin, tag.number),
        None => {
            let data = chunk.read().await?;
            data::read(data, format_args!("link {node}"), tag).into_iter().for_each(|head| seen(node, head));
            Ok(())
        }
    }
}
