//! [`Ports`]: what an operator has of inputs and outputs, and what a flow needs of each of them.

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
/// What an operator waits for at a port; one message or room for one, if nothing is said:
///
/// | | |
/// |---|---|
/// | `at_least = n` | of an input: so many messages; of several connections, of all together |
/// | `at_most = n` | of an input: no more than so many, and at least one |
/// | `batch = n, within = "5ms"` | of an input: so many, or fewer once the oldest has waited so long |
/// | `since = Sent` | of an input that waits `within` a time: from when each was sent, and not from when it [arrived](Since) |
/// | `done` | of an input: a message counts once the work that wrote it is done |
/// | `event = "name"` | of an input: a message counts once the event of that name that it carries has passed |
/// | `room = n` | of an output: room for so many |
/// | `optional` | nothing |
///
/// and what its hub is, where the connection does not say:
///
/// | | |
/// |---|---|
/// | `capacity = n` | it queues so many messages; if nothing is said, as many as are waited for |
/// | `envelopes = n`, `envelope_bytes = n` | of an output: how many envelopes it has on each side, and how large |
///
/// A port that is [linked](crate::Flow::link) to a hub of chunks is marked `#[produce]`, `#[consume]`, `#[peek]` or
/// `#[modify]` (see [`Linked`](super::Linked)). It waits for its chunk; `optional`, for nothing. What its run was given is
/// committed when that has ended well; `by_hand`, when it says so.
///
/// Numbers are expressions of type `usize`; a time is a string such as `"5ms"` or an expression of type
/// [`Duration`](std::time::Duration).
///
/// Beside the struct stands what is waited for at several inputs together; they have no condition of their own then, and
/// the others keep theirs:
///
/// | | |
/// |---|---|
/// | `#[ports(sum(left, right) = n)]` | so many messages at all of them together |
/// | `#[ports(each(left = n, right = m))]` | so many at each |
/// | `or_after = "10ms"`, beside one of these | or so long after the last run began, whatever is there |
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
///     /// One is there if somebody has sent one: `try_take`.
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
/// Without `done` or `event` an operator runs as soon as a message is there, and what it enqueues comes after the
/// message's own work by itself. With `done` it is woken when all work that wrote the message's envelopes is done, not
/// before, and nothing polls: it may look at the data without waiting. Messages without envelopes are done when the stream that
/// they came with is, and at once if they came with none. If the device
/// is lost meanwhile, the operator runs and [`Input::take`](super::Input::take) gives the error. Readiness is per message; each of a queue
/// waits for its own work only. The two may stand together, then both must be.
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

/// The ports of any operator: what is done with them through this is compiled once.
pub(super) trait AllPorts: Send {
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

/// What has passed a port.
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
        // A message of the user's may give another size each time it is asked.
        Self { messages: self.messages.saturating_sub(other.messages), bytes: self.bytes.saturating_sub(other.bytes) }
    }

    /// One message of so many bytes.
    #[inline]
    pub(super) fn add(&mut self, bytes: u64) {
        self.messages += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// A port, whatever it carries.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait AnyPort: PortState {
    /// Until when it waits, if it waits for a time.
    fn due(&self) -> Option<Instant> {
        None
    }
    fn state(&mut self) -> &mut dyn PortState;
    fn is_output(&self) -> bool;
    /// True for an input once nothing is left and nothing will come.
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
    /// It waits for more than a message. What an output waits for is for its hubs to say.
    fn tells(&self) -> bool {
        false
    }
    /// What it waits for, where it tells: to be followed by "at `its name`".
    fn lacks(&self) -> Option<String> {
        None
    }
    /// It is linked to a hub of chunks.
    fn is_linked(&self) -> bool {
        false
    }
    /// A run has ended well: what it was given is committed.
    fn run_ended(&mut self) -> Result<()> {
        Ok(())
    }
    /// What the last run was given goes back: a chunk that it did not commit, messages that it was promised and did not take.
    fn let_go(&mut self) {}
    /// It is not waited at any longer.
    fn rest(&mut self) {}
    /// Keeps the waker for its next change, whether it is ready or not.
    fn watch(&mut self, waker: &Waker);
    /// An end of the same kind for a worker, and where its messages are put, if it is an input.
    #[allow(clippy::type_complexity)]
    fn spread(&mut self) -> Result<(Vec<Box<dyn Any + Send>>, Option<Box<dyn Any + Send>>)>;
    /// Gives a worker the messages of one run: those that the port's condition promised.
    fn hand_over(&mut self, inlet: &mut (dyn Any + Send)) -> Result<()> {
        let _ = inlet;
        Ok(())
    }
    /// What a worker's run has left of its messages is dropped: what that was, by connection.
    fn leave(&mut self) -> Vec<Traffic> {
        Vec::new()
    }
    /// That has been left by a worker, and was not taken.
    fn left(&mut self, left: Vec<Traffic>) {
        drop(left);
    }
    /// What a worker's output has kept, and whether that has closed it.
    fn kept(&mut self) -> Option<Box<dyn Any + Send>> {
        None
    }
    /// Takes over what a worker's output has kept.
    fn accept(&mut self, kept: Box<dyn Any + Send>) {
        drop(kept);
    }
    /// A worker has closed it: it is to be closed as well, once what all others have kept was sent.
    fn closes(&self) -> bool {
        false
    }
    /// That has been sent.
    fn settle(&mut self) {}
    /// How many hubs it has messages from; one for an output, which sends to all of its own at once.
    fn connections(&self) -> u64 {
        1
    }
    /// As a section uses it that is replayed, if it is an input of envelopes.
    fn entry(&mut self) -> Option<&mut dyn Entry> {
        None
    }
    /// As a section uses it that is replayed, if it is an output of envelopes.
    fn exit(&mut self) -> Option<&mut dyn Exit> {
        None
    }
    /// Sends what it has taken over.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Flush {
        let _ = cx;
        Ok(Ok(()))
    }
}

/// All is sent, or an error, or what is waited for.
pub(crate) type Flush = std::result::Result<Result<()>, Readiness>;

/// What several outputs have answered.
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
            // A message that one sends by itself may make room for the others.
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

/// What the derive macro needs of a port.
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
    /// As `poll_ready`, where the operator waits for others of the flow at another port: it is woken when this one is
    /// `Never`, and asks again after the other, so it need not be woken when this one is ready.
    fn look(&mut self, cx: &mut Context<'_>) -> Readiness;
    fn claim(&mut self) -> bool;
    fn unclaim(&mut self);
}

/// A port that `#[input]` may stand on.
#[doc(hidden)]
#[allow(missing_docs)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an input",
    label = "`#[input]` stands on an `Input<M>` or `Inputs<M>`"
)]
pub trait InputPort: Port {
    /// Those that its messages can carry.
    const EVENTS: &'static [&'static str];
}

/// A port that `#[produce]`, `#[consume]`, `#[peek]` or `#[modify]` may stand on.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not do with chunks what its attribute says",
    label = "`#[produce]` stands on a `Produce<T>`, `#[consume]` on a `Consume<T>`, `#[peek]` on a `Peek<T>`, `#[modify]` on a `Modify<T>`"
)]
pub trait LinkPort<K>: Port {}

/// A port that `#[output]` may stand on.
#[doc(hidden)]
#[diagnostic::on_unimplemented(message = "`{Self}` is not an output", label = "`#[output]` stands on an `Output<M>`")]
pub trait OutputPort: Port {}
