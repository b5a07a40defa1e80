//! [`Flow::link`]: ports of operators that are linked to hubs of chunks, and their check before the flow runs.
//!
//! Such a hub does not belong to the flow: it exists before and after it, and may have other links. Each run creates
//! links of its own, in the order of linking, on the devices of their operators.

use std::{
    any::Any,
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::{Flow, check};
use crate::{
    condition::PortId,
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{
        ChunkHub,
        chunks::{
            core::{ChunkHubView, makes_envelopes},
            roles::{LinkName, Role},
        },
        external_guard::OutsideTracker,
        role::ChunkRole,
    },
    memory::Plain,
    operator::{LinkHandle, control::LinkedTo},
    sync::lock,
};

/// Creates a link, with the element type erased, for a port of this name.
type MakeLinked = Arc<dyn Fn(&Device, LinkName) -> Result<(Box<dyn Any + Send>, LinkedTo)> + Send + Sync>;

/// A requested link.
#[derive(Clone)]
pub(super) struct Linking {
    pub(super) port: PortId,
    pub(super) role: Role,
    pub(super) hub: Arc<dyn ChunkHubView>,
    name: LinkName,
    make: MakeLinked,
}

impl Linking {
    /// The link for the port, and the flow's view of it.
    pub(super) fn make(&self, device: &Device) -> Result<(Box<dyn Any + Send>, LinkedTo)> {
        (self.make)(device, self.name)
    }
}

/// The identity of a hub, which all its handles share.
fn key(hub: &Arc<dyn ChunkHubView>) -> *const () {
    Arc::as_ptr(hub).cast()
}

/// The links of each hub, in the order of linking. Indexed by hub, since a flow may have ten thousand links.
fn by_hub(links: &[Linking]) -> Vec<Vec<&Linking>> {
    let (mut groups, mut numbers) = (Vec::<Vec<_>>::new(), HashMap::new());
    for link in links {
        let number = *numbers.entry(key(&link.hub)).or_insert(groups.len());
        match groups.get_mut(number) {
            Some(group) => group.push(link),
            None => groups.push(vec![link]),
        }
    }
    groups
}

impl Flow {
    /// Links a port to a hub of chunks: a [`Produce`](crate::operator::Produce), [`Consume`](crate::operator::Consume),
    /// [`Peek`](crate::operator::Peek) or [`Modify`](crate::operator::Modify). The order of linking is the order in
    /// which the modifying links get each chunk.
    ///
    /// ```
    /// use wakeline::{operator::{Consume, Produce}, prelude::*};
    ///
    /// #[derive(Ports)]
    /// struct CountPorts {
    ///     #[produce]
    ///     numbers: Produce<u32>,
    /// }
    ///
    /// struct Count(u32);
    ///
    /// impl Operator for Count {
    ///     type Ports = CountPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut CountPorts, cx: &mut Cx) -> Result<()> {
    ///         self.0 += 1;
    ///         if self.0 == 3 {
    ///             cx.finish();
    ///         }
    ///         ports.numbers.get_mut()?.fill_from(&[self.0]).await        // committed as the run ends
    ///     }
    /// }
    ///
    /// #[derive(Ports)]
    /// struct PrintPorts {
    ///     #[consume]
    ///     numbers: Consume<u32>,
    /// }
    ///
    /// struct Print;
    ///
    /// impl Operator for Print {
    ///     type Ports = PrintPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut PrintPorts, _cx: &mut Cx) -> Result<()> {
    ///         println!("{:?}", ports.numbers.get()?.read().await?);
    ///         Ok(())
    ///     }
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let numbers = ChunkHub::builder("numbers").elements(1).queue(2).host_envelopes(2).build()?;
    /// let mut flow = Flow::new("print");
    /// let count = flow.add("count", Count(0));
    /// let print = flow.add("print", Print);
    /// flow.link(count.numbers, &numbers);
    /// flow.link(print.numbers, &numbers);
    /// flow.run().await?;
    /// assert!(numbers.is_empty());
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// Mistakes are reported when the flow runs, with all others: a port that is linked twice or not at all, a hub
    /// without an envelope on an operator's device, readers of a hub without a producer.
    ///
    /// # Flows that share a hub
    /// A link that is not a flow's port, such as the one from `hub.produce(..)`, keeps a flow alive while its operators
    /// wait. A port of *another flow* does not: a flow whose operators all wait for chunks that another flow is working
    /// on is at rest, and ends without them. So combine the two flows, or keep the reading flow alive with such a link
    /// until the writing flow has ended:
    ///
    /// ```
    /// # use wakeline::prelude::*;
    /// # async fn both(numbers: ChunkHub<u32>, mut writes: Flow, mut reads: Flow) -> Result<()> {
    /// let hold = numbers.produce(&Device::host())?;
    /// let reading = reads.spawn()?;
    /// writes.run().await?;
    /// drop(hold);                                          // nothing more comes
    /// reading.await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn link<K, T, S>(&mut self, port: LinkHandle<K, T, S>, hub: &ChunkHub<T, S>)
    where
        K: ChunkRole,
        T: Plain,
        S: Clone + Send + Sync + 'static,
    {
        let (name, state) = (port.link_name(), hub.state());
        let hub = hub.clone();
        let make: MakeLinked = Arc::new(move |device, name| {
            let link = hub.link_port::<K>(device, name)?;
            let (role, operator) = (K::ROLE.0, port.id.operator);
            let linked = LinkedTo { state: hub.state(), link: link.id(), role, operator };
            Ok((Box::new(link), linked))
        });
        self.links.push(Linking { port: port.id, role: K::ROLE.0, hub: state, name, make });
    }
}

/// Checks, after an operator's `start`, that it has put chunks into the hubs that it declared.
pub(super) fn are_filled(hubs: &[Arc<dyn ChunkHubView>]) -> Result<()> {
    let lacks = |hub: &&Arc<dyn ChunkHubView>| hub.is_empty() && hub.link_count(Role::Produce) == 0;
    hubs.iter().find(lacks).map_or(Ok(()), |hub| {
        let text = format!(
            "`start` committed no chunk to hub `{}`, although the operator declares `.fills(&hub)`: produce one there, \
             `hub.produce(..)?.with(..)`, or remove `fills`",
            hub.name()
        );
        Err(Error::new(ErrorKind::Usage, text))
    })
}

/// Operators that do not end by themselves when the flow is drained, since they read chunks of other operators: pairs
/// of a writer and a reader.
pub(super) fn drained_through(links: &[Linking]) -> impl Iterator<Item = (usize, usize)> + '_ {
    by_hub(links).into_iter().flat_map(|own| {
        let here = own.iter().any(|link| link.role == Role::Consume);
        let is_consumed = here || own.first().is_some_and(|link| link.hub.link_count(Role::Consume) > 0);
        let of = |writes: bool| own.iter().filter(move |link| (link.role == Role::Produce) == writes);
        let writers: Vec<_> = of(true).map(|link| link.port.operator).collect();
        let readers: Vec<_> = of(false).filter(|_| is_consumed).map(|link| link.port.operator).collect();
        readers.into_iter().flat_map(move |reader| writers.clone().into_iter().map(move |writer| (writer, reader)))
    })
}

/// A hub of chunks, as the path of its chunks through a flow.
pub(super) struct Passage {
    pub(super) hub: Arc<dyn ChunkHubView>,
    pub(super) producers: Vec<usize>,
    /// The reading links, in the order in which each chunk passes them: one stage for each link that modifies, one for
    /// all that peek, and one for those that consume. A single stage if chunks stay in the hub. Links that `flow_to`
    /// excludes are left out.
    pub(super) stages: Vec<Vec<PortId>>,
    /// Links outside the flow produce chunks.
    pub(super) is_fed: bool,
    /// There might be chunks before any operator runs.
    pub(super) is_filled: bool,
    /// The largest number of chunks at once.
    pub(super) holds: usize,
}

/// The passages of a flow whose links have been checked.
pub(super) fn passages(flow: &Flow) -> Vec<Passage> {
    let filled: HashSet<_> =
        flow.entries.iter().flat_map(|entry| lock(&entry.place).fills.iter().map(key).collect::<Vec<_>>()).collect();
    let passages = by_hub(&flow.links).into_iter().filter_map(|own| {
        let hub = own.first()?.hub.clone();
        let named = hub.flow();
        let of = |role| own.iter().filter(move |link| link.role == role);
        let served =
            |role| of(role).filter(|link| named.is_empty() || named.contains(&link.name)).map(|link| link.port);
        let is_consumed = served(Role::Consume).next().is_some() || hub.link_count(Role::Consume) > 0;
        let readers = [served(Role::Peek).collect(), served(Role::Consume).collect()];
        let mut stages: Vec<Vec<_>> = served(Role::Modify).map(|port| vec![port]).chain(readers).collect();
        if !is_consumed {
            stages = vec![stages.concat()];
        }
        stages.retain(|stage| !stage.is_empty());
        let is_fed = hub.link_count(Role::Produce) > 0;
        // An optional port may send envelopes of the user's.
        let sends = is_fed || of(Role::Produce).any(|link| check::decl(flow, link.port).need.optional);
        let (places, envelopes) = hub.most();
        Some(Passage {
            producers: of(Role::Produce).map(|link| link.port.operator).collect(),
            stages,
            is_fed,
            is_filled: is_fed || !hub.is_empty() || filled.contains(&key(&hub)),
            holds: if sends && places < usize::MAX { places } else { places.min(envelopes) },
            hub,
        })
    });
    passages.collect()
}

/// The hubs of these links, each once.
pub(super) fn hubs<'a>(links: impl IntoIterator<Item = &'a LinkedTo>) -> Vec<Arc<dyn ChunkHubView>> {
    let mut found = HashSet::new();
    let new = links.into_iter().filter(|link| found.insert(key(&link.state)));
    new.map(|link| link.state.clone()).collect()
}

/// Makes a flow known to its hubs while it runs: their other links may cause work in it.
pub(super) struct Attached {
    hubs: Vec<Arc<dyn ChunkHubView>>,
    flow: Arc<dyn OutsideTracker>,
}

impl Attached {
    pub(super) fn new(hubs: Vec<Arc<dyn ChunkHubView>>, flow: Arc<dyn OutsideTracker>) -> Self {
        hubs.iter().for_each(|hub| hub.join(&flow));
        Self { hubs, flow }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.hubs.iter().for_each(|hub| hub.leave(&self.flow));
    }
}

/// The properties of a hub that the check of each of its links depends on.
struct Group<'a> {
    /// The devices on which ports that run without a chunk send their own chunks, which need not be copied there.
    sent_at: Vec<Device>,
    produced: bool,
    names: HashSet<LinkName>,
    before: HashMap<usize, Vec<&'a Linking>>,
    /// Whether the mistakes of the hub itself have been reported.
    is_done: bool,
}

impl Group<'_> {
    fn new(links: &[&Linking], device: impl Fn(PortId) -> Device, optional: impl Fn(PortId) -> bool) -> Self {
        let producers = || links.iter().filter(|link| link.role == Role::Produce);
        let mut sent_at: Vec<Device> = Vec::new();
        for sends in producers().filter(|link| optional(link.port)) {
            let on = device(sends.port);
            if !sent_at.contains(&on) {
                sent_at.push(on);
            }
        }
        Self {
            sent_at,
            produced: producers().next().is_some(),
            names: links.iter().map(|link| link.name).collect(),
            before: HashMap::new(),
            is_done: false,
        }
    }
}

/// Collects the mistakes in a flow's links. `optional`: whether the port's operator runs without a chunk; `filled`: the
/// hubs that operators put chunks into in their `start`.
pub(super) fn problems(
    links: &[Linking],
    port: impl Fn(PortId) -> String,
    device: impl Fn(PortId) -> Device,
    optional: impl Fn(PortId) -> bool,
    filled: &[Arc<dyn ChunkHubView>],
    problems: &mut Vec<String>,
) {
    let groups = by_hub(links).into_iter().filter_map(|group| {
        let hub = key(&group.first()?.hub);
        Some((hub, Group::new(&group, &device, &optional)))
    });
    let mut groups: HashMap<_, _> = groups.collect();
    for link in links {
        let Some(group) = groups.get_mut(&key(&link.hub)) else { continue };
        let first = !std::mem::replace(&mut group.is_done, true);
        let before = group.before.entry(link.port.operator).or_default();
        before.push(link);
        let (name, hub, on) = (port(link.port), link.hub.name(), device(link.port));
        let place = if on.is_host() { "the host" } else { on.name() };
        if let Some(other) = link.hub.device_without_copy_path(&on) {
            problems.push(format!(
                "port `{name}` is on {place} and hub `{hub}` on {other}, but there is no copy path between these devices: put \
                 the operator on the host"
            ));
            continue;
        }
        let comes = if link.role == Role::Produce {
            optional(link.port)
        } else {
            link.hub.has_source_at(&on) || group.sent_at.contains(&on)
        };
        if link.hub.envelopes_at(&on) == 0 && !comes {
            problems.push(format!(
                "port `{name}` {} chunks of hub `{hub}` on {place}, where the hub has no envelopes: add some, \
                 with `{}` or `add_envelopes`",
                link.role.verb(),
                makes_envelopes(&on)
            ));
        }
        let reads = |link: &Linking| link.role != Role::Produce && !optional(link.port);
        let both_peek = |other: &Linking| link.role == Role::Peek && other.role == Role::Peek;
        // A port that is linked twice is reported separately.
        let is_beside =
            |other: &&&Linking| other.port.port != link.port.port && reads(other) && !both_peek(other) && reads(link);
        let beside = before.iter().find(is_beside).copied();
        if let Some(other) = beside {
            problems.push(format!(
                "ports `{}` and `{name}` of one operator wait for the same chunk of hub `{hub}`, which one of them \
                 needs exclusively: remove one of them, or make it `optional`",
                port(other.port)
            ));
        }
        if !first {
            continue;
        }
        for named in link.hub.flow() {
            let LinkName::Port(flow, operator, number) = named else { continue };
            if flow == link.port.flow && !group.names.contains(&named) {
                let named = port(PortId { operator, port: number, ..link.port });
                problems.push(format!(
                    "`flow_to` of hub `{hub}` names port `{named}`, which is not linked to it and receives none of its \
                     chunks: link the port to it, or remove the port from `flow_to`"
                ));
            }
        }
        let is_filled = || filled.iter().any(|hub| key(hub) == key(&link.hub));
        if !group.produced && link.hub.link_count(Role::Produce) == 0 && link.hub.is_empty() && !is_filled() {
            problems.push(format!(
                "no port produces chunks for hub `{hub}`, so `{name}` would wait forever: link a port that does, create a \
                 producer with `hub.produce(..)`, or mark the operator whose `start` fills the hub with `.fills(&hub)`"
            ));
        }
    }
}
