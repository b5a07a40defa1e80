//! Operators: the work of a flow, each one async task.
//!
//! ```text
//!   start ──> [ conditions ready ──> claim ──> compute ]* ──> stop
//! ```
//!
//! All of a flow's `start`s run first, in the order of adding; then the operators run beside each other; at the end
//! every `stop` runs, in the order of adding, after an error too.

mod arrivals;
mod cx;
mod functions;
mod inputs;
pub(crate) mod node;
mod ports;
pub(crate) mod quiet;
pub(crate) mod seat;

use crate::error::Result;

pub use cx::Cx;
pub use functions::{Map, MapPorts, Sink, SinkPorts, Source, SourcePorts, map, sink, source};
pub use functions::{MapHandles, SinkHandles, SourceHandles};
pub use inputs::Inputs;
#[doc(hidden)]
pub use ports::{AnyPort, Binder, InputPort, OutputPort, Plan, Port, PortId, PortOptions, Traffic};
pub use ports::{Input, InputHandle, Output, OutputHandle, Ports};
pub(crate) use ports::{PortDecl, PortKind};

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

    /// One run. The messages and the room that its conditions promised are there.
    ///
    /// # Errors
    /// Stops the flow: the first failure is what `run` returns, with this operator's name.
    ///
    /// # Cancel safety
    /// When the flow is aborted the future is dropped at the await it is in. Work that it has enqueued goes on, and
    /// keeps what it uses.
    fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send;

    /// After the flow's last run of any operator, also after an error, and even if `start` never ran or failed.
    ///
    /// # Errors
    /// Are what `run` returns if nothing failed before.
    fn stop(&mut self, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        let _ = cx;
        async { Ok(()) }
    }

    /// All runs, from the first to the end. Override it for a loop of your own: call [`Cx::ready`] before each run, or
    /// await the ports yourself.
    ///
    /// # Errors
    /// As [`compute`](Self::compute).
    fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        async move {
            while cx.ready(ports).await {
                self.compute(ports, cx).await?;
            }
            Ok(())
        }
    }
}
