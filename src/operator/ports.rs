//! [`Ports`]: an operator's inputs and outputs, and what a flow needs of each of them.

use std::{
    any::Any,
    task::{Context, Waker},
};

use super::{
    handle::{InputHandle, OutputHandle},
    input_wait::InputWait,
    plan::{AnyEnd, Binder, Plan, PortOptions},
    section_port::{SectionInput, SectionOutput},
};
#[cfg(doc)]
use crate::condition::Since;
use crate::{
    condition::{PortId, PortState, Readiness},
    error::{Error, Result},
    hub::Message,
};

/// An operator's ports: a struct of [`Input`](super::Input)s and [`Output`](super::Output)s. Derive it.
///
/// ```
/// use wakeline::prelude::*;
///
/// #[derive(Ports)]
/// struct UpperPorts {
///     /// Lines to shout.
///     #[input(capacity = 4)]
///     lines: Input<Envelope<u8>>,
///     #[output]
///     shouted: Output<Envelope<u8>>,
/// }
/// ```
///
/// # Options
///
/// What an operator waits for at a port; by default one message at an input, and room for one at an output:
///
/// | | |
/// |---|---|
/// | `at_least = n` | of an input: `n` messages; with several connections, of all together |
/// | `at_most = n` | of an input: at most `n` messages, and at least one |
/// | `batch = n, within = "5ms"` | of an input: `n` messages, or fewer once the oldest has waited for that time |
/// | `since = Sent` | of an input with `within`: the time counts from when each message was sent, and not from when it [arrived](Since) |
/// | `done` | of an input: a message counts once the work that wrote it is done |
/// | `event = "name"` | of an input: a message counts once its event of that name has passed |
/// | `room = n` | of an output: room for `n` messages |
/// | `optional` | nothing |
///
/// The properties of its hub, where the connection does not set them:
///
/// | | |
/// |---|---|
/// | `capacity = n` | it queues up to `n` messages; by default as many as the port waits for |
/// | `envelopes = n`, `envelope_bytes = n` | of an output: the number of envelopes on each side, and their size |
///
/// A port that is [linked](crate::Flow::link) to a hub of chunks has the attribute `#[produce]`, `#[consume]`,
/// `#[peek]` or `#[modify]` (see [`Linked`](super::Linked)). It waits for its chunk or, with `optional`, for nothing.
/// The chunk of a run is committed when the run has succeeded; with `by_hand`, when the run calls for it.
///
/// Numbers are expressions of type `usize`; a time is a string such as `"5ms"` or an expression of type
/// [`Duration`](std::time::Duration).
///
/// Attributes of the struct set conditions over several inputs together. These inputs then have no condition of their
/// own; the others keep theirs:
///
/// | | |
/// |---|---|
/// | `#[ports(sum(left, right) = n)]` | `n` messages at all of them together |
/// | `#[ports(each(left = n, right = m))]` | `n` messages at `left` and `m` at `right` |
/// | `or_after = "10ms"`, beside one of these | or when that time has passed since the last run began, with any number of messages |
/// | `#[ports(handles = Name)]` | another name for the struct of handles |
///
/// ```
/// use wakeline::prelude::*;
///
/// #[derive(Ports)]
/// #[ports(sum(left, right) = 3, or_after = "10ms")]
/// struct MergePorts {
///     #[input(capacity = 4)]
///     left: Input<u32>,
///     #[input(capacity = 4)]
///     right: Input<u32>,
///     /// Present only if one was sent: `try_take`.
///     #[input(optional)]
///     settings: Input<String>,
///     #[output(capacity = 4, room = 3)]
///     merged: Output<u32>,
/// }
///
/// struct Merge;
///
/// impl Operator for Merge {
///     type Ports = MergePorts;
///
///     async fn compute(&mut self, ports: &mut MergePorts, _cx: &mut Cx) -> Result<()> {
///         for number in ports.left.take_batch()?.chain(ports.right.take_batch()?) {
///             ports.merged.send(number).await?;
///         }
///         Ok(())
///     }
/// }
/// ```
///
/// Without `done` or `event` an operator runs as soon as a message has arrived, and what it enqueues is ordered after
/// the message's own work. With `done` it is woken only when all work that wrote the message's envelopes is done,
/// without polling: it may read the data without waiting. A message without envelopes is done when the
/// work enqueued on its sender's stream before the send has completed, or at once if the sender has no stream. If the
/// device is lost first, the operator runs and [`Input::take`](super::Input::take) returns the error. Readiness is per message: each message of a queue waits for
/// its own work only. If both `done` and `event` are set, both must hold.
///
/// ```
/// # use wakeline::{prelude::*, stream::Event};
/// #[derive(Message)]
/// struct Frame {
///     #[envelope]
///     pixels: Envelope<u8>,
///     #[event]
///     decoded: Event,
/// }
///
/// #[derive(Ports)]
/// struct ShowPorts {
///     /// On the host: when `compute` runs, `as_slice` needs no `await`.
///     #[input(done)]
///     text: Input<Envelope<u8>>,
///     #[input(event = "decoded")]
///     frames: Input<Frame>,
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a set of ports",
    label = "expected a struct with `#[derive(Ports)]`"
)]
pub trait Ports: Sized + Send + 'static {
    /// The ports' handles, for [`Flow::connect`](crate::Flow::connect).
    type Handles: Copy + Send + Sync + 'static;

    #[doc(hidden)]
    fn declare(plan: &mut Plan) -> Self::Handles;
    #[doc(hidden)]
    fn bind(binder: &mut Binder<'_>) -> Result<Self>;
    #[doc(hidden)]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness;
    #[doc(hidden)]
    fn claim(&mut self) -> bool;
    #[doc(hidden)]
    fn give_back(&mut self);
    #[doc(hidden)]
    fn visit<'a>(&'a mut self, visit: &mut dyn FnMut(&'static str, &'a mut dyn AnyPort));
    /// Calls the visitor with each handle, in the order of the fields.
    #[doc(hidden)]
    fn visit_handles(handles: Self::Handles, visitor: &mut impl HandleVisitor);
}

/// Code for each port of an operator that depends on the type of its messages. Generic, so that it is compiled only for
/// the operators that are visited.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait HandleVisitor {
    fn input<M: Message>(&mut self, handle: InputHandle<M>);
    fn output<M: Message>(&mut self, handle: OutputHandle<M>);
    /// A port that is linked to a hub of chunks.
    fn link(&mut self, port: PortId);
}

/// No ports: an operator that runs again and again, or once.
impl Ports for () {
    type Handles = ();

    fn declare(_plan: &mut Plan) {}

    fn bind(_binder: &mut Binder<'_>) -> Result<()> {
        Ok(())
    }

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Readiness {
        Readiness::READY
    }

    fn claim(&mut self) -> bool {
        true
    }

    fn give_back(&mut self) {}

    fn visit<'a>(&'a mut self, _visit: &mut dyn FnMut(&'static str, &'a mut dyn AnyPort)) {}

    fn visit_handles(_handles: (), _visitor: &mut impl HandleVisitor) {}
}

/// The ports of any operator: code that uses them through this trait is compiled once.
pub(crate) trait AllPorts: Send {
    fn poll_all(&mut self, cx: &mut Context<'_>) -> Readiness;
    fn claim_all(&mut self) -> bool;
    fn visit_all<'a>(&'a mut self, visit: &mut dyn FnMut(&'static str, &'a mut dyn AnyPort));
}

impl<P: Ports> AllPorts for P {
    fn poll_all(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.poll_ready(cx)
    }

    fn claim_all(&mut self) -> bool {
        self.claim()
    }

    fn visit_all<'a>(&'a mut self, visit: &mut dyn FnMut(&'static str, &'a mut dyn AnyPort)) {
        self.visit(visit);
    }
}

/// Whether all readers of one of the outputs have ended.
pub(super) fn reader_gone(ports: &mut dyn AllPorts) -> bool {
    let mut gone = false;
    ports.visit_all(&mut |_, port| gone |= port.is_output() && port.has_ended());
    gone
}

/// The traffic of a port.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
}

impl Traffic {
    #[inline]
    pub(super) fn count<M: Message>(&mut self, message: &M) {
        self.add(message.size_in_bytes() as u64);
    }

    pub(super) fn without(self, other: Self) -> Self {
        // The `size_in_bytes` of a user's message type may differ from call to call.
        Self { messages: self.messages.saturating_sub(other.messages), bytes: self.bytes.saturating_sub(other.bytes) }
    }

    #[inline]
    pub(super) fn add(&mut self, bytes: u64) {
        self.messages += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// The statistics of a port.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PortStats {
    pub(crate) traffic: Traffic,
    /// The number of hubs that it receives from; one for an output, which sends to all of its hubs at once.
    pub(crate) connections: u64,
}

/// A port, independent of its message type, as its operator's waits and runs use it. What only some ports have, or only
/// some operators use, is behind an accessor.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait AnyPort: PortState {
    fn is_output(&self) -> bool;
    /// True for an input with no message left and none to come, and for an output whose readers have all ended.
    fn has_ended(&self) -> bool;
    fn stats(&self) -> PortStats;
    /// Registers the waker for the port's next change, whether or not the port is ready.
    fn watch(&mut self, waker: &Waker);
    /// Called when the operator stops waiting at the port.
    fn idle(&mut self) {}
    /// True for an input with messages that allow the operator's runs until it takes one.
    fn allows_runs(&mut self, cx: &mut Context<'_>) -> bool {
        let _ = cx;
        false
    }
    /// Sends the messages that were collected for it.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Flush {
        let _ = cx;
        Ok(Ok(()))
    }
    /// The wait of an input that waits for something other than one message.
    fn input_wait(&self) -> Option<&InputWait> {
        None
    }
    /// A port that is linked to a hub of chunks.
    fn linked(&mut self) -> Option<&mut dyn LinkedPort> {
        None
    }
    /// A port of a concurrent operator or of one of its workers.
    fn worker_port(&mut self) -> Option<&mut dyn WorkerPort> {
        None
    }
    /// An input of envelopes.
    fn section_input(&mut self) -> Option<&mut dyn SectionInput> {
        None
    }
    /// An output of envelopes.
    fn section_output(&mut self) -> Option<&mut dyn SectionOutput> {
        None
    }
}

/// A port that is linked to a hub of chunks, for its operator's runs.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait LinkedPort {
    /// Commits the chunk of a run that has succeeded.
    fn commit_run(&mut self) -> Result<()>;
    /// Returns a chunk that the last run did not commit.
    fn release(&mut self);
}

/// A port of a [concurrent](super::concurrent()) operator, which passes messages to its workers and collects theirs. A
/// worker's port has the same type: the methods get it as `dyn Any`.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait WorkerPort: Any {
    /// Creates ends of the same kind for the port of a worker.
    fn worker_ends(&self) -> Vec<AnyEnd>;
    /// Passes the messages of one run, which the port's condition promised, to the worker.
    fn dispatch(&mut self, worker: &mut dyn Any) -> Result<()> {
        let _ = worker;
        Ok(())
    }
    /// Drops the messages that the worker's run has not taken, and counts them as untaken here.
    fn take_back(&mut self, worker: &mut dyn Any) {
        let _ = worker;
    }
    /// Collects the messages that the worker's run has sent. True if the run has closed the port.
    fn collect(&mut self, worker: &mut dyn Any) -> bool {
        let _ = worker;
        false
    }
    /// Closes the port if a run has closed it. Called when the messages of all runs are sent.
    fn finish_close(&mut self) {}
}

/// `Ok`: everything is sent, or sending has failed. `Err`: what the port waits for.
pub(crate) type Flush = std::result::Result<Result<()>, Readiness>;

/// The combined results of several outputs.
#[derive(Default)]
pub(crate) struct Flushed {
    failed: Option<Error>,
    waits: Option<Readiness>,
}

impl Flushed {
    pub(crate) fn add(&mut self, one: Flush) {
        match one {
            Ok(Ok(())) => {}
            Ok(Err(error)) => drop(self.failed.get_or_insert(error)),
            // A message that is sent without another operator's help might make room for the others.
            Err(waits) if waits.needs_others() => drop(self.waits.get_or_insert(waits)),
            Err(waits) => self.waits = Some(waits),
        }
    }

    pub(crate) fn all(self) -> Flush {
        match self {
            Self { failed: Some(error), .. } => Ok(Err(error)),
            Self { waits: Some(waits), .. } => Err(waits),
            _ => Ok(Ok(())),
        }
    }
}

/// The interface of a port for the derive macro.
#[doc(hidden)]
#[allow(missing_docs)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a port",
    label = "expected `Input<M>`, `Inputs<M>` or `Output<M>`, where `M` is a `Message`, or a port that is linked to a hub of chunks"
)]
pub trait Port: AnyPort + Send + 'static {
    type Handle: Copy + Into<PortId> + Send + Sync + 'static;
    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> Self::Handle;
    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self>
    where
        Self: Sized;
    /// Polls the port's condition. `before`: the result of the operator's ports before this one. If they wait for other
    /// operators, this port need not wake the operator when it becomes ready, only when it becomes `Never`: the operator
    /// polls all ports again when those operators have acted. A timer or an event does not wake it for other ports.
    fn poll_ready(&mut self, before: Readiness, cx: &mut Context<'_>) -> Readiness;
    fn claim(&mut self) -> bool;
    fn give_back(&mut self);
    fn visit_handle(handle: Self::Handle, visitor: &mut impl HandleVisitor);
}

/// A port that may have the attribute `#[input]`.
#[doc(hidden)]
#[allow(missing_docs)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an input",
    label = "`#[input]` belongs on an `Input<M>` or `Inputs<M>`"
)]
pub trait InputPort: Port {
    /// The names of the events that its messages can carry.
    const EVENTS: &'static [&'static str];
}

/// A port that may have the attribute `#[produce]`, `#[consume]`, `#[peek]` or `#[modify]`.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not match the attribute of this port",
    label = "`#[produce]` belongs on a `Produce<T>`, `#[consume]` on a `Consume<T>`, `#[peek]` on a `Peek<T>`, `#[modify]` on a `Modify<T>`"
)]
pub trait LinkPort<K>: Port {}

/// A port that may have the attribute `#[output]`.
#[doc(hidden)]
#[diagnostic::on_unimplemented(message = "`{Self}` is not an output", label = "`#[output]` belongs on an `Output<M>`")]
pub trait OutputPort: Port {}
