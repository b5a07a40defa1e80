//! [`Ports`]: an operator's inputs and outputs, and what a flow needs of each of them.

use std::{
    any::Any,
    task::{Context, Waker},
};

use super::{
    edge::{Entry, Exit},
    plan::{Binder, Plan, PortOptions},
};
use tokio::time::Instant;

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
/// | `#[ports(each(left = n, right = m))]` | that many at each |
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
/// without polling: it may read the data without waiting. Messages without envelopes are done when the stream that they
/// came with is, and at once if they came with none. If the device is lost meanwhile, the operator runs and
/// [`Input::take`](super::Input::take) returns the error. Readiness is per message: each message of a queue waits for
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
    fn unclaim(&mut self);
    #[doc(hidden)]
    fn visit(&mut self, visit: &mut dyn FnMut(&'static str, &mut dyn AnyPort));
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

    fn unclaim(&mut self) {}

    fn visit(&mut self, _visit: &mut dyn FnMut(&'static str, &mut dyn AnyPort)) {}
}

/// The ports of any operator: code that uses them through this trait is compiled once.
pub(crate) trait AllPorts: Send {
    fn poll_all(&mut self, cx: &mut Context<'_>) -> Readiness;
    fn claim_all(&mut self) -> bool;
    fn visit_all(&mut self, visit: &mut dyn FnMut(&'static str, &mut dyn AnyPort));
}

impl<P: Ports> AllPorts for P {
    fn poll_all(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.poll_ready(cx)
    }

    fn claim_all(&mut self) -> bool {
        self.claim()
    }

    fn visit_all(&mut self, visit: &mut dyn FnMut(&'static str, &mut dyn AnyPort)) {
        self.visit(visit);
    }
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

/// A port, independent of its message type.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait AnyPort: PortState {
    /// The deadline of its wait, if it waits for a time.
    fn due(&self) -> Option<Instant> {
        None
    }
    fn state(&mut self) -> &mut dyn PortState;
    fn is_output(&self) -> bool;
    /// True for an input once no message is left and none will arrive.
    fn has_ended(&self) -> bool {
        false
    }
    fn traffic(&self) -> Traffic;
    /// True for an input with messages that allow the operator's runs until it takes one.
    fn allows_runs(&mut self, cx: &mut Context<'_>) -> bool {
        let _ = cx;
        false
    }
    /// True for an output whose reader has ended.
    fn reader_gone(&self) -> bool;
    /// Whether it waits for more than a message, so that [`lacks`](Self::lacks) describes its wait. For an output, its
    /// hubs do.
    fn notifies(&self) -> bool {
        false
    }
    /// What it waits for, if it describes that itself; to be followed by "at `its name`".
    fn lacks(&self) -> Option<String> {
        None
    }
    /// Whether it is linked to a hub of chunks.
    fn is_linked(&self) -> bool {
        false
    }
    /// A run has succeeded: its chunk is committed.
    fn run_ended(&mut self) -> Result<()> {
        Ok(())
    }
    /// Returns what the last run was given: a chunk that it did not commit, messages that it was promised and did not
    /// take.
    fn release_unneeded(&mut self) {}
    /// The operator no longer waits at the port.
    fn rest(&mut self) {}
    /// Registers the waker for the port's next change, whether or not the port is ready.
    fn watch(&mut self, waker: &Waker);
    /// Creates an end of the same kind for a worker and, for an input, the inlet for its messages.
    #[allow(clippy::type_complexity)]
    fn spread(&mut self) -> Result<(Vec<Box<dyn Any + Send>>, Option<Box<dyn Any + Send>>)>;
    /// Passes the messages of one run to a worker: those that the port's condition promised.
    fn hand_over(&mut self, inlet: &mut (dyn Any + Send)) -> Result<()> {
        let _ = inlet;
        Ok(())
    }
    /// Drops the messages that a worker's run has left. Returns their traffic, by connection.
    fn leave(&mut self) -> Vec<Traffic> {
        Vec::new()
    }
    /// Subtracts messages that a worker has left and not taken.
    fn left(&mut self, left: Vec<Traffic>) {
        drop(left);
    }
    /// Takes the messages that a worker's output has collected, and whether the worker has closed it.
    fn kept(&mut self) -> Option<Box<dyn Any + Send>> {
        None
    }
    /// Takes over the messages that a worker's output has collected.
    fn accept(&mut self, kept: Box<dyn Any + Send>) {
        drop(kept);
    }
    /// A worker has closed it: it must be closed as well, once the messages of all other workers are sent.
    fn closes(&self) -> bool {
        false
    }
    /// These messages are sent.
    fn settle(&mut self) {}
    /// The number of hubs that it receives from; one for an output, which sends to all of its hubs at once.
    fn connections(&self) -> u64 {
        1
    }
    /// The interface for a replayed section, if it is an input of envelopes.
    fn entry(&mut self) -> Option<&mut dyn Entry> {
        None
    }
    /// The interface for a replayed section, if it is an output of envelopes.
    fn exit(&mut self) -> Option<&mut dyn Exit> {
        None
    }
    /// Sends the messages that it has taken over.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Flush {
        let _ = cx;
        Ok(Ok(()))
    }
}

/// Everything is sent; or an error; or what the port waits for.
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
            // A message that is sent without another operator's help may make room for the others.
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
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness;
    /// As `poll_ready`, for an operator that waits for other operators at another port: it must be woken when this port
    /// becomes `Never`. It polls this port again after the other, so it need not be woken when this one becomes ready.
    fn look(&mut self, cx: &mut Context<'_>) -> Readiness;
    fn claim(&mut self) -> bool;
    fn unclaim(&mut self);
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
