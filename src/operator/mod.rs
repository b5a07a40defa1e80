//! Operators: the work of a flow, each one async task.
//!
//! ```text
//!   start ──> [ conditions ready ──> may_run ──> claim ──> compute ──> its device work ──> after ]* ──> stop
//! ```
//!
//! All of a flow's `start`s run first, in the order of adding; then the operators run beside each other; at the end
//! every `stop` runs, in the order of adding, after an error too.

mod arrivals;
pub(crate) mod attend;
mod blocking;
pub(crate) mod carry;
mod concurrent;
pub(crate) mod control;
mod cx;
mod edge;
mod fruitless;
mod functions;
mod handle;
mod input;
mod inputs;
pub(crate) mod lane;
pub(crate) mod lent;
mod linked;
pub(crate) mod local;
pub(crate) mod member;
pub(crate) mod node;
mod only_others;
mod output;
pub(crate) mod permit;
mod plan;
mod ports;
pub(crate) mod quiet;
pub(crate) mod rest_check;
pub(crate) mod rounds;
pub(crate) mod seat;
pub(crate) mod senders;
pub(crate) mod shown;
pub(crate) mod stand;
pub(crate) mod watchers;

use crate::error::Result;
use node::Method;

pub use concurrent::{Concurrent, concurrent};
pub use control::{Changes, Handle, OperatorStatus};

pub use cx::Cx;
pub use functions::{Map, MapPorts, Sink, SinkPorts, Source, SourcePorts, map, sink, source};
pub use functions::{MapHandles, SinkHandles, SourceHandles};
pub use handle::{InputHandle, OutputHandle};
pub use input::Input;
pub use inputs::Inputs;
pub use linked::{Consume, LinkHandle, Linked, Modify, Peek, Produce};
pub use local::LocalOperator;
pub(crate) use output::Departure;
pub use output::{Offer, Output};
#[doc(hidden)]
pub use plan::{Binder, Plan, PortOptions};
pub(crate) use plan::{PortDecl, PortKind};
pub(crate) use ports::Flushed;
pub use ports::Ports;

pub use crate::hub::Reply;
#[doc(hidden)]
pub use edge::{Blank, Entry, Exit, Passing};
#[doc(hidden)]
pub use ports::{AnyPort, InputPort, LinkPort, OutputPort, Port, Traffic};

/// After a run: what the operator does once the work of that run is done, if it has written that.
macro_rules! after_run {
    ($operator:ident, $ports:ident, $cx:ident) => {
        if $cx.has_run() {
            let end = $cx.end_of_run();
            let is_written = {
                let after = $operator.after($ports, $cx);
                let is_written = end.done().await?;
                if is_written {
                    after.await?;
                }
                is_written
            };
            $cx.calls_after(is_written);
        }
    };
}
pub(crate) use after_run;

/// All runs of an operator that has not written `run`. A macro, since one kind's futures are `Send` and the other's are
/// not.
macro_rules! all_runs {
    ($operator:ident, $ports:ident, $cx:ident) => {{
        $cx.not_written(Method::Run);
        async move {
            while $cx.until_ready($ports, |ports, cx| $operator.may_run(ports, cx)).await {
                $operator.compute($ports, $cx).await?;
                $cx.commit($ports)?;
                $crate::operator::after_run!($operator, $ports, $cx);
            }
            Ok(())
        }
    }};
}
use all_runs;

/// One step of a flow: takes messages, enqueues work on its device, sends messages.
///
/// # Errors of your own
/// `?` turns an [`std::io::Error`] or a boxed error into an [`Error`](crate::Error) by itself; for another type write
/// `.map_err(Error::other)?`, or once `impl From<MyError> for wakeline::Error`. Whoever runs the flow gets it back with
/// [`downcast_ref`](crate::Error::downcast_ref).
///
/// Write the methods as `async fn`. [`compute`](Self::compute) is called when all conditions of the ports are ready. It
/// does not wait for the device: it enqueues and sends, and the order travels along.
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
///         ports.numbers.send(self.0).await
///     }
/// }
/// ```
pub trait Operator: Send + 'static {
    /// Its inputs and outputs; `()` for none.
    type Ports: Ports;

    /// Before the flow's first run of any operator.
    ///
    /// # Errors
    /// Stops the flow before it has begun; every operator's [`stop`](Self::stop) still runs.
    fn start(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        let _ = cx;
        async { Ok(()) }
    }

    /// Whether it may run, when all its conditions are ready; `true` if it is not written. Called right before a run
    /// would begin. What it depends on should be its own, or its ports' (`ports.lines.len() >= 3`); it changes nothing
    /// there, and nowhere else: a no that comes with something that wakes its own operator is asked for again at once.
    ///
    /// After a no it is asked again, as soon as its conditions are ready, when a message comes to one of its inputs or
    /// room to one of its outputs, when somebody wakes [`Cx::waker`], and when all of the flow has come to rest, since it
    /// may depend on what another operator did; it may be asked more often. If nobody may run then, the flow is at its
    /// end, or, with messages left, stalled.
    fn may_run(&mut self, ports: &Self::Ports, cx: &Cx) -> bool {
        let _ = ports;
        cx.not_written(Method::MayRun);
        true
    }

    /// One run. The messages and the room that its conditions promised are there. It takes what it likes of them; while
    /// its conditions are ready with what it leaves, it runs again at once. One that has run a thousand times so and moved
    /// nothing is warned of in the log; one that leaves a message that it waits for where it is, run after run, fails.
    ///
    /// A run that blocks its thread for 100 ms and more is warned of as well: see
    /// [`on_own_thread`](crate::flow::Added::on_own_thread).
    ///
    /// # Errors
    /// Stops the flow: the first failure is what `run` returns, with this operator's name.
    ///
    /// # Cancel safety
    /// When the flow is aborted the future is dropped at the await it is in. Work that it has enqueued goes on, and
    /// keeps what it uses.
    fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send;

    /// After each run that went well: called once when all that the run has put into the operator's streams
    /// ([`Cx::stream`] and the named ones) is done, before it may run again. For what needs the results: look at them, send them, count them. An operator that does
    /// not write it never waits for its device.
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
    ///         ports.mean.send(self.result.as_slice()?[0]).await     // it is there
    ///     }
    /// }
    /// ```
    ///
    /// Written as a plain function that returns a future, it is called when the run ends, and the future is polled when
    /// the device is done.
    ///
    /// # Errors
    /// As [`compute`](Self::compute). If the device is lost meanwhile it is not called, and the flow fails.
    ///
    /// # Cancel safety
    /// As [`compute`](Self::compute).
    fn after(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        let _ = ports;
        cx.not_written(Method::After);
        async { Ok(()) }
    }

    /// After the flow's last run of any operator, also after an error, and even if `start` never ran or failed.
    ///
    /// # Errors
    /// Are what `run` returns if nothing failed before.
    fn stop(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        let _ = cx;
        async { Ok(()) }
    }

    /// All runs, from the first to the end. Override it for a loop of your own: call [`Cx::ready`] before each run, or
    /// await the ports yourself. Such a loop does by itself what [`may_run`](Self::may_run) and [`after`](Self::after)
    /// are for; one of them beside it, which nobody would call, is an error.
    ///
    /// # Errors
    /// As [`compute`](Self::compute).
    fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        all_runs!(self, ports, cx)
    }

    /// Tasks beside its own that its runs go on in; 0 if they go on in its own.
    #[doc(hidden)]
    fn workers(&self) -> usize {
        0
    }
}
