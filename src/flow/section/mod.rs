//! [`Section`]: operators of a flow whose runs are replayed as one CUDA graph.
//!
//! The operators are as ever, and are connected as ever. In a *streamed* round each of them runs once, in the order of their
//! messages, as it would without a section. In a *replayed* one none of them runs: what they once enqueued is launched
//! as one graph, between a copy of the messages into its memory and one out of it.
//!
//! ```text
//!            a message at each input of the edge, room at each output
//!                                  │  their lengths: is there a graph?
//!        no, and none will be      │ not yet                              yes
//!   ┌──────────────────────────────┼───────────────────────────────┐
//!   streamed                       streamed, then captured:        replayed: in ──> launch ──> out
//!   compute, compute, ..           compute, polled once, ..        no operator runs
//!   └──────────────────────────────┴───────────────────────────────┘
//!            a message from each output, in the order of the inputs
//! ```
//!
//! [`plan`] finds out what it is made of, and what is wrong with that; [`table`] which graph a round takes; [`capture`] makes
//! one; [`run`] is the section's task.

mod capture;
mod plan;
mod run;
mod table;

use std::{fmt, sync::Arc};

pub(super) use plan::{Plan, plans};
pub(super) use run::{Start, Told, place, task};

use super::{Added, Flow, Place};
use crate::{
    condition::PortId,
    graph::Graph,
    hub::Envelope,
    memory::Plain,
    operator::{InputHandle, OutputHandle},
    sync::{Discarded, Mutex},
};

/// Kinds of lengths that are captured where no buckets are said.
const USUAL_SHAPES: usize = 8;

/// Operators of a flow whose runs are replayed as one CUDA graph: see [`Flow::replay`].
pub struct Section {
    name: Arc<str>,
    members: Vec<Member>,
    settings: Settings,
}

/// An operator of a section, as its flow knows it.
type Member = (Arc<str>, Arc<Mutex<Place>>);

#[derive(Clone, Default)]
struct Settings {
    buckets: Option<Vec<usize>>,
    /// Elements of a row, by input.
    rows: Vec<(PortId, usize)>,
    whole: Vec<PortId>,
    at_start: bool,
    most: Option<usize>,
    checked: bool,
    inspect: Option<Inspect>,
}

/// Is shown each graph.
type Inspect = Arc<Discarded<Box<dyn Fn(&Graph) + Send + Sync>>>;

/// Operators of one flow: `&one`, or several of them in a tuple, an array or a vector.
pub trait Operators {
    #[doc(hidden)]
    fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>));
}

/// An operator that was added, whatever its ports are.
#[doc(hidden)]
#[derive(Debug)]
pub struct AnyAdded<'a> {
    name: &'a Arc<str>,
    place: &'a Arc<Mutex<Place>>,
}

impl<H> Operators for &Added<H> {
    fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>)) {
        show(AnyAdded { name: &self.name, place: &self.place });
    }
}

impl<O: Operators, const N: usize> Operators for [O; N] {
    fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>)) {
        self.iter().for_each(|operator| operator.each(show));
    }
}

impl<O: Operators> Operators for Vec<O> {
    fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>)) {
        self.iter().for_each(|operator| operator.each(show));
    }
}

macro_rules! tuples {
    ($($name:ident),*) => {
        impl<$($name: Operators),*> Operators for ($($name,)*) {
            #[allow(non_snake_case)]
            fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>)) {
                let ($($name,)*) = self;
                $($name.each(show);)*
            }
        }
    };
}

tuples!(A);
tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);
tuples!(A, B, C, D, E);
tuples!(A, B, C, D, E, F);
tuples!(A, B, C, D, E, F, G);
tuples!(A, B, C, D, E, F, G, H);

impl Flow {
    /// Replays operators as one CUDA graph, a section of the flow: where their work is many small kernels, the host then
    /// enqueues one thing in place of all of them, and the device need not wait for the host in between. The operators are
    /// named in any order; they may form a chain, fork and join, and their branches stay parallel.
    ///
    /// They are the same operators, unchanged: each takes one message at each input and sends one at each output in a run,
    /// and its `compute` only enqueues (see [the whole list](#what-a-section-can-hold)). What crosses the section's edge are
    /// [`Envelope`]s; inside of it messages may be of any type.
    ///
    /// A graph has fixed sizes. With [`buckets`](Section::buckets) the messages are padded with zeros to the next one of them;
    /// without, there is a graph for each combination of lengths that comes, for [some of them](Section::at_most). The first round
    /// of each is run as the flow would without a section, and so is every round that fits none.
    ///
    /// ```
    /// use wakeline::{operator::{MapPorts, sink, source}, prelude::*};
    ///
    /// #[kernel]
    /// fn double(x: &mut [f32]) {
    ///     x.iter_mut().for_each(|x| *x *= 2.0);
    /// }
    ///
    /// struct Double;
    ///
    /// impl Operator for Double {
    ///     type Ports = MapPorts<Envelope<f32>, Envelope<f32>>;
    ///
    ///     async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
    ///         let mut x = ports.input.take()?;
    ///         double::launch(cx.stream()?, &mut x)?;
    ///         ports.output.send(x).await
    ///     }
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let device = Device::emulated(Emulated::new());
    /// let mut flow = Flow::new("net");
    /// let mut batches = [3, 1, 4, 9].into_iter();
    /// let read = flow.add("read", source(move || {
    ///     let batch = batches.next().map(|rows| Buffer::<f32>::pinned(&Device::host(), 16 * rows));
    ///     std::future::ready(batch.transpose().map(|batch| batch.map(Envelope::from)))
    /// }));
    /// let one = flow.add("one", Double).on(&device);
    /// let two = flow.add("two", Double).on(&device);
    /// let print = flow.add("print", sink(async |x: Envelope<f32>| { println!("{:?}", x.read().await?); Ok(()) }));
    /// flow.connect_with(read.output, one.input, Hub::bounded(1).envelope_bytes(1 << 10));
    /// flow.connect(one.output, two.input);
    /// flow.connect(two.output, print.input);
    ///
    /// flow.replay("net", (&one, &two)).buckets([1, 2, 4]).rows(one.input, 16);
    ///
    /// let report = flow.run().await?;
    /// let net = report.section("net").unwrap();
    /// assert_eq!((net.streamed, net.captured, net.replayed), (3, 2, 1));      // 9 rows fit no bucket
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # What a section can hold
    ///
    /// What no replay would do again is an error that names the operator and says why:
    ///
    /// - before the flow runs: operators on the host or on several devices, several runs at a time, threads or conditions of
    ///   their own, hubs of chunks, ports that wait for more than one message, another operator's message between two of them;
    /// - when it is captured: a `compute` that waits (for the host's look at data, a timer, another task), reads data back,
    ///   calls a function of the host once, works on a stream that it did not ask for [in that run](crate::Cx::stream),
    ///   allocates memory in the order of a stream, keeps memory that it allocates or is given within the section, sends more
    ///   or less than one message at an output, closes one, ends the operator, changes metadata, or asks who waits for an
    ///   answer; a `run`, `may_run` or `after` of its own.
    ///
    /// **What the host decides is baked in**: a scalar that `compute` counts up, a branch that it takes, is in the graph as it
    /// was when it was captured. What changes from round to round belongs into a message, or outside. A capture is one more
    /// call of `compute`, with messages that nobody has sent: what it counts on the host counts that, too.
    ///
    /// Memory that the operators have from before (weights, say) is used as ever, in order with everybody else who uses it. If
    /// one drops some in a streamed round, to have a larger one say, the graphs that use it are captured again.
    /// What they allocate in `compute` is the graph's, and used again within it where its edges allow; of an allocator that has
    /// so many blocks, each graph keeps those that it uses. An envelope that comes in has room for what came, and no more.
    ///
    /// In the [report](super::Report) the operators' runs count all rounds, and so do messages at the section's edge; those
    /// within it, and the device's time, are of the runs that the operators made themselves. Outside of the section nothing is different: order, metadata, callers who wait for
    /// an answer and back-pressure are those of an operator that takes and sends the same messages.
    pub fn replay(&mut self, name: impl Into<String>, operators: impl Operators) -> &mut Section {
        let mut members = Vec::new();
        operators.each(&mut |added| members.push((added.name.clone(), added.place.clone())));
        let at = self.sections.len();
        self.sections.push(Section { name: name.into().into(), members, settings: Settings::default() });
        &mut self.sections[at]
    }
}

impl Section {
    /// Graphs for so many rows each. The messages at the section's inputs have the same number of [rows](Self::rows), are
    /// padded with zeros to the next bucket, and what comes out is cut to the rows that went in. More rows than the largest,
    /// no whole number of them, or another number at each input: such a round is streamed.
    ///
    /// In a graph the operators are given as many rows as the bucket has: what they make of one row must not depend on the
    /// others, or on how many there are. A mean over all of them would take the padding in.
    pub fn buckets(&mut self, rows: impl IntoIterator<Item = usize>) -> &mut Self {
        // One by one: what an iterator says of its length need not be so.
        let mut buckets = Vec::new();
        rows.into_iter().for_each(|rows| buckets.push(rows));
        self.settings.buckets = Some(buckets);
        self
    }

    /// Elements of a row at an input of the section's edge; 1 if nothing is said.
    pub fn rows<T: Plain>(&mut self, input: InputHandle<Envelope<T>>, elements: usize) -> &mut Self {
        self.settings.rows.push((input.id, elements));
        self
    }

    /// What comes out here does not have the rows of what goes in: a sum over all of them, say. It is sent whole.
    pub fn whole<T: Plain>(&mut self, output: OutputHandle<Envelope<T>>) -> &mut Self {
        self.settings.whole.push(output.id);
        self
    }

    /// Captures all buckets before the first message, when every operator has started: then no round is streamed that fits
    /// one. Otherwise each is captured after the first round that it fits.
    pub fn at_start(&mut self) -> &mut Self {
        self.settings.at_start = true;
        self
    }

    /// Captures everything twice, and compares: what the host decides (a scalar that counts up, a branch that it takes, which
    /// of its buffers it uses) is baked into a graph, and where it decides differently the second time that is an error which
    /// names the operator. What lies in memory is not compared: a value that `compute` writes to host memory and copies from
    /// there is baked in unseen. For tests: what the host does in `compute` it does twice then.
    pub fn checked(&mut self) -> &mut Self {
        self.settings.checked = true;
        self
    }

    /// Shows each graph when it has been captured: to count its nodes, say, or to draw it ([`Graph::to_dot`]).
    ///
    /// ```
    /// # use wakeline::{operator::MapPorts, prelude::*};
    /// # struct Pass;
    /// # impl Operator for Pass {
    /// #     type Ports = MapPorts<Envelope<f32>, Envelope<f32>>;
    /// #     async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
    /// #         let x = ports.input.take()?;
    /// #         ports.output.send(x).await
    /// #     }
    /// # }
    /// # let mut flow = Flow::new("net");
    /// # let one = flow.add("one", Pass);
    /// flow.replay("net", &one).inspect(|graph| println!("{}", graph.to_dot()));
    /// ```
    pub fn inspect(&mut self, show: impl Fn(&Graph) + Send + Sync + 'static) -> &mut Self {
        self.settings.inspect = Some(Arc::new(Discarded::new(Box::new(show))));
        self
    }

    /// Without buckets: graphs for so many combinations of lengths, 8 if nothing is said. Rounds of others are streamed, until
    /// one of them has come three times since the least recently used graph was used: that graph is evicted for it.
    pub fn at_most(&mut self, graphs: usize) -> &mut Self {
        self.settings.most = Some(graphs);
        self
    }
}

impl fmt::Debug for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Section")
            .field("name", &self.name)
            .field("operators", &self.members.iter().map(|(name, _)| name).collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}
