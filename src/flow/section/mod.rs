//! [`Section`]: operators of a flow whose runs are replayed as one CUDA graph.
//!
//! In a *streamed* round each operator runs once, in the order of the messages, as if there were no section. In a
//! *replayed* round no operator runs: the work that they enqueued during a capture is launched as one graph, between
//! copies of the messages into its memory and of the results out of it.
//!
//! ```text
//!            a message at each input of the section, room at each output
//!                                  │  their lengths: is there a graph?
//!        no, and none will be      │ not yet                              yes
//!   ┌──────────────────────────────┼───────────────────────────────┐
//!   streamed                       streamed, then captured:        replayed: in ──> launch ──> out
//!   compute, compute, ..           compute, polled once, ..        no operator runs
//!   └──────────────────────────────┴───────────────────────────────┘
//!            a message from each output, in the order of the inputs
//! ```
//!
//! [`plan`] checks and plans a section, [`graph_table`] chooses the graph of a round, [`capture`] makes one, and
//! [`run`] is the section's task.

mod capture;
mod graph_table;
mod plan;
mod run;

use std::{fmt, sync::Arc};

pub(super) use plan::{SectionPlan, plans};
pub(super) use run::{SectionSetup, SectionStats, place, task};

use super::{Added, Flow, OperatorSlot};
use crate::{
    condition::PortId,
    graph::Graph,
    hub::Envelope,
    memory::Plain,
    operator::{InputHandle, OutputHandle},
    sync::{DiscardOnDrop, Mutex},
};

/// The default number of graphs without buckets.
const USUAL_SHAPES: usize = 8;

/// Operators of a flow whose runs are replayed as one CUDA graph: see [`Flow::replay`].
pub struct Section {
    name: Arc<str>,
    members: Vec<Member>,
    settings: Settings,
}

type Member = (Arc<str>, Arc<Mutex<OperatorSlot>>);

#[derive(Clone, Default)]
struct Settings {
    buckets: Option<Vec<usize>>,
    /// The number of elements of a row, by input.
    rows: Vec<(PortId, usize)>,
    whole: Vec<PortId>,
    at_start: bool,
    most: Option<usize>,
    checked: bool,
    inspect: Option<Inspect>,
}

type Inspect = Arc<DiscardOnDrop<Box<dyn Fn(&Graph) + Send + Sync>>>;

/// Operators of one flow: `&one`, or several of them in a tuple, an array or a vector. Sealed.
pub trait Operators {
    #[doc(hidden)]
    fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>));
}

/// An operator that was added, with any kind of ports.
#[derive(Debug)]
pub struct AnyAdded<'a> {
    name: &'a Arc<str>,
    place: &'a Arc<Mutex<OperatorSlot>>,
}

impl<H> Operators for Added<H> {
    fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>)) {
        show(AnyAdded { name: &self.name, place: &self.place });
    }
}

impl<O: Operators + ?Sized> Operators for &O {
    fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>)) {
        (**self).each(show);
    }
}

/// For operators whose ports differ: `Box<dyn Operators>`.
impl<O: Operators + ?Sized> Operators for Box<O> {
    fn each(&self, show: &mut dyn FnMut(AnyAdded<'_>)) {
        (**self).each(show);
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
    /// Replays operators as one CUDA graph: they become a section of the flow. If their work consists of many small
    /// kernels, the host then enqueues one graph launch instead of all of them, and the device need not wait for the
    /// host in between. The operators may be listed in any order. They may form a chain, fork and join, and their
    /// branches stay parallel.
    ///
    /// The operators are ordinary ones. In a run, each takes one message at each input and sends one at each output,
    /// and its `compute` only enqueues work (see [the complete list](#what-a-section-can-hold)). Messages that cross
    /// the section's boundary are [`Envelope`]s; within it they may be of any type.
    ///
    /// A graph has fixed sizes. With [`buckets`](Section::buckets), the messages are padded with zeros to the next
    /// bucket. Without buckets, there is one graph for each combination of message lengths, up to [a
    /// limit](Section::at_most). The first round of each shape is streamed: the operators run as if there were no
    /// section. So is every round that fits no graph.
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
    ///         ports.output.send(x).await?;
    ///         Ok(())
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
    /// flow.connect_with(read.output, one.input, HubOptions::bounded(1).envelope_bytes(1 << 10));
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
    /// Behaviour that a replay could not repeat is an error that names the operator and the reason:
    ///
    /// - before the flow runs: operators on the host or on several devices; operators with concurrent runs, or with
    ///   their own thread or conditions; hubs of chunks; ports that wait for more than one message; a path between two
    ///   of them through an operator outside the section;
    /// - at the capture: a `compute` that waits (for the host to read data, a timer, another task), reads data back,
    ///   calls a function of the host once, works on a stream that it did not obtain [in that run](crate::Cx::stream),
    ///   allocates memory in the order of a stream, keeps memory that it allocates or receives within the section,
    ///   sends more or less than one message at an output, closes an output, ends the operator, changes metadata, or
    ///   takes replies; an operator that overrides `run`, `may_run` or `after`.
    ///
    /// **Decisions of the host are recorded in the graph**: a scalar that `compute` increments, or a branch that it
    /// takes, stays as it was at the capture. A value that changes from round to round must be in a message, or outside
    /// the section. A capture is one more call of `compute`, with messages that no operator has sent: a counter in
    /// `compute` counts that call, too.
    ///
    /// Memory that the operators have from before the capture, such as weights, is used as usual, ordered with all its
    /// other uses. If an operator drops such memory in a streamed round, for example for a larger buffer, the graphs
    /// that use it are captured again. Memory that operators allocate in `compute` belongs to the graph, and is reused
    /// within it where the graph's edges allow. With an allocator that has a fixed number of blocks, each graph keeps
    /// the blocks that it uses. An envelope that enters the section has exactly the size of its data.
    ///
    /// In the [report](super::Report), the operators' runs include all rounds, and so do the messages at the section's
    /// boundary. The messages within it and the device's time are those of streamed rounds only. Seen from outside, the
    /// section is one operator that takes and sends the same messages: order, metadata, callers that wait for a
    /// response, and back-pressure.
    pub fn replay(&mut self, name: impl Into<String>, operators: impl Operators) -> &mut Section {
        let mut members = Vec::new();
        operators.each(&mut |added| members.push((added.name.clone(), added.place.clone())));
        let at = self.sections.len();
        self.sections.push(Section { name: name.into().into(), members, settings: Settings::default() });
        &mut self.sections[at]
    }
}

impl Section {
    /// Captures one graph for each of these numbers of rows. The messages at the section's inputs have the same number
    /// of [rows](Self::rows) and are padded with zeros to the next bucket; each output is cut to that number. A round
    /// is streamed if it has more rows than the largest bucket, no whole number of rows, or different numbers at its
    /// inputs.
    ///
    /// In a graph, the operators process as many rows as the bucket has: the result for one row must not depend on the
    /// others, nor on their number. A mean over all rows would include the padding.
    pub fn buckets(&mut self, rows: impl IntoIterator<Item = usize>) -> &mut Self {
        // One by one, since the size hint of an iterator may be wrong.
        let mut buckets = Vec::new();
        rows.into_iter().for_each(|rows| buckets.push(rows));
        self.settings.buckets = Some(buckets);
        self
    }

    /// Sets the number of elements of a row at an input of the section. The default is 1.
    pub fn rows<T: Plain>(&mut self, input: InputHandle<Envelope<T>>, elements: usize) -> &mut Self {
        self.settings.rows.push((input.id, elements));
        self
    }

    /// Declares that the messages of this output do not have the rows of the inputs, for example a sum over all rows.
    /// They are sent uncut.
    pub fn whole<T: Plain>(&mut self, output: OutputHandle<Envelope<T>>) -> &mut Self {
        self.settings.whole.push(output.id);
        self
    }

    /// Captures all buckets before the first message, when every operator has started. Then no round that fits a bucket
    /// is streamed. Otherwise each bucket is captured after the first round that fits it.
    pub fn at_start(&mut self) -> &mut Self {
        self.settings.at_start = true;
        self
    }

    /// Captures everything twice and compares: decisions of the host (a scalar that it increments, a branch that it
    /// takes, the choice of a buffer) are recorded in a graph, and a different decision the second time is an error
    /// that names the operator. The contents of memory are not compared: a value that `compute` writes to host memory
    /// and copies from there is recorded unnoticed. Meant for tests: everything that `compute` does on the host is done
    /// twice.
    pub fn checked(&mut self) -> &mut Self {
        self.settings.checked = true;
        self
    }

    /// Calls a function with each graph after its capture, for example to count its nodes, or to draw it
    /// ([`Graph::to_dot`]).
    ///
    /// ```
    /// # use wakeline::{operator::MapPorts, prelude::*};
    /// # struct Pass;
    /// # impl Operator for Pass {
    /// #     type Ports = MapPorts<Envelope<f32>, Envelope<f32>>;
    /// #     async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
    /// #         let x = ports.input.take()?;
    /// #         ports.output.send(x).await?;
    /// #         Ok(())
    /// #     }
    /// # }
    /// # let mut flow = Flow::new("net");
    /// # let one = flow.add("one", Pass);
    /// flow.replay("net", &one).inspect(|graph| println!("{}", graph.to_dot()));
    /// ```
    pub fn inspect(&mut self, show: impl Fn(&Graph) + Send + Sync + 'static) -> &mut Self {
        self.settings.inspect = Some(Arc::new(DiscardOnDrop::new(Box::new(show))));
        self
    }

    /// Limits the number of graphs without buckets, each for one combination of lengths. The default is 8. Rounds of
    /// other lengths are streamed, until one combination has occurred three times since the least recently used graph
    /// was used, which is then evicted.
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
