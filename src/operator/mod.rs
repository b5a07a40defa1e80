//! Operators: the processing steps of a flow, each one async task.
//!
//! ```text
//!   start ──> [ conditions ready ──> may_run ──> compute ──> its device work ──> after ]* ──> stop
//! ```
//!
//! The `start` methods of all operators of a flow run first, in the order of adding; then the operators run
//! concurrently. At the end every `stop` runs, in the order of adding, even after an error.

pub(crate) mod activity;
mod batch;
mod busy;
mod concurrent;
pub(crate) mod control;
mod cx;
pub(crate) mod dependency;
pub(crate) mod erased;
pub(crate) mod flow_devices;
mod functions;
mod handle;
pub(crate) mod idle;
mod input;
mod input_port;
mod input_queue;
mod input_wait;
mod inputs;
mod linked;
pub(crate) mod local;
pub(crate) mod observed_runs;
pub(crate) mod operator_streams;
pub(crate) mod operator_task;
mod output;
mod output_port;
pub(crate) mod pacing;
pub(crate) mod permit;
mod plan;
pub(crate) mod poll_in_context;
mod ports;
mod readers;
pub(crate) mod run_context;
pub(crate) mod run_loop;
pub(crate) mod section_counts;
pub(crate) mod section_operator;
mod section_port;
pub(crate) mod senders;
pub(crate) mod settings;
pub(crate) mod shared_port;
mod spinning;
pub(crate) mod status_cell;
pub(crate) mod watchers;
mod with_cx;

use crate::error::Result;
use operator_task::Method;
use run_loop::all_runs;

pub use concurrent::{Concurrent, concurrent};
pub use control::{Changes, Handle, OperatorStatus};

pub use cx::Cx;
pub use functions::{Map, MapPorts, Sink, SinkPorts, Source, SourcePorts, map, sink, source};
pub use functions::{MapHandles, SinkHandles, SourceHandles};
pub use handle::{InputHandle, OutputHandle};
pub use input::{Connections, Input, Many, One};
pub use inputs::Inputs;
pub use linked::{Consume, LinkHandle, Linked, Modify, Peek, Produce};
pub use local::LocalOperator;
pub(crate) use output::ExternalSend;
pub use output::{BlankFuture, Offer, Output};
#[doc(hidden)]
pub use plan::{Binder, Plan, PortOptions};
pub(crate) use plan::{PortDecl, PortKind};
pub use ports::Ports;
pub(crate) use ports::{AllPorts, Flushed};
pub use with_cx::{CxFunction, MapWith, SinkWith, SourceWith, WithState, map_with, sink_with, source_with, with_state};

#[doc(inline)]
pub use crate::hub::Reply;
#[doc(hidden)]
pub use ports::{
    AnyPort, HandleVisitor, InputPort, LinkPort, LinkedPort, OutputPort, Port, PortStats, Traffic, WorkerPort,
};
#[doc(hidden)]
pub use section_port::{Blank, SectionContext, SectionInput, SectionOutput};

/// One step of a flow: takes messages, enqueues work on its device, sends messages.
///
/// Write the methods as `async fn`. [`compute`](Self::compute) is called when all conditions of the ports are ready. It
/// does not wait for the device: it enqueues and sends, and the order of the device work travels with the messages.
///
/// ```
/// use wakeline::prelude::*;
///
/// #[derive(Ports)]
/// struct CountPorts {
///     #[output]
///     numbers: Output<u32>,
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
///         ports.numbers.send(self.0).await?;
///         Ok(())
///     }
/// }
/// ```
///
/// # Errors of your own
/// `?` converts an [`std::io::Error`] or a boxed error into an [`Error`](crate::Error). For another type write
/// `.map_err(Error::other)?`, or implement `From<MyError> for wakeline::Error` once. The caller that runs the flow gets
/// the error back with [`downcast_ref`](crate::Error::downcast_ref).
pub trait Operator: Send + 'static {
    /// The inputs and outputs; `()` for none.
    type Ports: Ports;

    /// Called before any operator of the flow has its first run.
    ///
    /// # Errors
    /// An error stops the flow before any operator runs; every operator's [`stop`](Self::stop) still runs.
    fn start(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        let _ = cx;
        async { Ok(()) }
    }

    /// Whether the operator may run when all its conditions are ready; the default is `true`. Called right before a run
    /// would begin. The answer should depend on the state of the operator or of its ports (`ports.lines.len() >= 3`).
    /// The method must not change any state: a `false` is asked again at once if the operator was woken in the
    /// meantime.
    ///
    /// After a `false` the method is called again as soon as the operator's conditions are ready, when a message
    /// arrives at one of its inputs, when an output gains room, when [`Cx::waker`] is woken, and when the whole flow
    /// becomes idle, since the answer might depend on another operator. It might be called more often. If the whole
    /// flow is idle and no operator may run, the flow ends or, with messages left, has stalled.
    fn may_run(&mut self, ports: &Self::Ports, cx: &Cx) -> bool {
        let _ = ports;
        cx.uses_default(Method::MayRun);
        true
    }

    /// One run. The messages and the room that the conditions promised are available. The run takes as many messages as
    /// it needs; while the conditions are ready with what remains, the operator runs again at once. After a thousand
    /// such runs in a row that moved no message, a warning is logged. An operator that waits for an input and leaves
    /// its messages there, run after run, fails.
    ///
    /// A run that blocks its thread for 100 ms or more is logged as a warning as well: see
    /// [`on_own_thread`](crate::flow::Added::on_own_thread).
    ///
    /// # Errors
    /// An error stops the flow: the first failure is what `run` returns, with this operator's name.
    ///
    /// # Cancel safety
    /// When the flow is aborted, the future is dropped at its current await. Work that it has enqueued continues, and
    /// keeps its resources alive.
    fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send;

    /// Called once after each successful run, when all work that the run enqueued on the operator's streams
    /// ([`Cx::stream`] and the named ones) has completed, before the operator may run again. Use it to read, send or
    /// count the results. An operator that does not override it never waits for its device.
    ///
    /// ```
    /// use wakeline::prelude::*;
    /// # #[derive(Ports)]
    /// # struct MeanPorts {
    /// #     #[input]
    /// #     numbers: Input<Envelope<f32>>,
    /// #     #[output]
    /// #     mean: Output<f32>,
    /// # }
    /// # struct Mean {
    /// #     result: Buffer<f32>,
    /// # }
    /// # #[kernel]
    /// # fn mean(numbers: &[f32], result: &mut [f32]) {
    /// #     result[0] = numbers.iter().sum::<f32>() / numbers.len() as f32;
    /// # }
    ///
    /// impl Operator for Mean {
    ///     type Ports = MeanPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut MeanPorts, cx: &mut Cx) -> Result<()> {
    ///         let numbers = ports.numbers.take()?;
    ///         let stream = cx.stream()?;
    ///         let mut result = Buffer::<f32>::new(stream.device(), 1)?;
    ///         mean::launch(stream, &numbers, &mut result)?;
    ///         stream.copy(&result, &mut self.result)
    ///     }
    ///
    ///     async fn after(&mut self, ports: &mut MeanPorts, _cx: &mut Cx) -> Result<()> {
    ///         ports.mean.send(self.result.as_slice()?[0]).await?;     // no wait: the copy is done
    ///         Ok(())
    ///     }
    /// }
    /// ```
    ///
    /// Written as a plain function that returns a future, it is called when the run ends, and the future is polled when
    /// the device work has completed.
    ///
    /// # Errors
    /// Like [`compute`](Self::compute). If the device is lost before its work is done, this method is not called, and
    /// the flow fails.
    ///
    /// # Cancel safety
    /// Like [`compute`](Self::compute).
    fn after(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        let _ = ports;
        cx.uses_default(Method::After);
        async { Ok(()) }
    }

    /// Called after the last run of every operator of the flow, also after an error, and even if `start` never ran or
    /// failed.
    ///
    /// # Errors
    /// `run` returns this error if nothing failed before.
    fn stop(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        let _ = cx;
        async { Ok(()) }
    }

    /// All runs, from the first to the last. Override it for a loop of your own: call [`Cx::ready`] before each run, or
    /// await the ports yourself. Such a loop replaces [`may_run`](Self::may_run) and [`after`](Self::after): overriding
    /// one of them as well is an error, since it would never be called.
    ///
    /// # Errors
    /// Like [`compute`](Self::compute).
    fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        all_runs!(self, ports, cx)
    }

    /// The number of additional tasks that execute the operator's runs; 0 if the runs are executed in its own task.
    #[doc(hidden)]
    fn workers(&self) -> usize {
        0
    }
}
