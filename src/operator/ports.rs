//! Ports: the ends of hubs as an operator holds them, and their handles for connecting.

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    future::poll_fn,
    marker::PhantomData,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use super::{
    arrivals::{Arrivals, Wait},
    lane::{Lane, Stamps},
};
use crate::{
    condition::{self, Readiness, Wanted},
    error::{Error, ErrorKind, Result},
    hub::{Envelope, Hub, Message, link::Sender, queue::Answer},
    memory::Plain,
    stream::{Stream, Ticket},
};

/// An operator's ports: a struct of [`Input`]s and [`Output`]s. Derive it.
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
/// | | |
/// |---|---|
/// | `capacity = n` | the hub queues so many messages |
/// | `envelopes = n`, `envelope_bytes = n` | of an output: how many envelopes its hub has on each side, and how large |
/// | `done` | of an input: a message counts once the work that wrote it is done |
/// | `event = "name"` | of an input: a message counts once the event of that name that it carries has passed |
///
/// Without one of the last two an operator runs as soon as a message is there, and what it enqueues comes after the
/// message's own work by itself. With `done` it is woken when all work that wrote the message's envelopes is done, not
/// before, and nothing polls: it may look at the data without waiting. Messages without envelopes are done when the stream that
/// they came with is, and at once if they came with none. If the device
/// is lost meanwhile, the operator runs and [`Input::take`] gives the error. Readiness is per message; each of a queue
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
        Readiness::Ready
    }

    fn claim(&mut self) -> bool {
        true
    }

    fn unclaim(&mut self) {}

    fn visit(&mut self, _visit: &mut dyn FnMut(&'static str, &mut dyn AnyPort)) {}
}

/// Messages come in here.
pub struct Input<M: Message> {
    arrivals: Arrivals<M>,
    traffic: Traffic,
    stamps: Stamps,
}

/// Messages go out here.
pub struct Output<M: Message> {
    /// `None` once closed.
    sender: Option<Sender<M>>,
    traffic: Traffic,
    /// `None` on the host.
    lane: Option<Arc<Lane>>,
    /// The stream that messages carry, if that was said.
    chosen: Option<Stream>,
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
        self.messages += 1;
        self.bytes += message.size_in_bytes() as u64;
    }
}

impl<M: Message> Input<M> {
    /// The next message. It is there: the port's condition said so before the operator ran.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it is taken once more than the condition promised and there is none; what went
    /// wrong on the way, if something did.
    pub fn take(&mut self) -> Result<M> {
        match self.try_take()? {
            Some(message) => Ok(message),
            None => {
                let lacks = self.arrivals.lacks();
                Err(Error::new(ErrorKind::Usage, format!("{lacks}: `take` once a run, or use `try_take`")))
            }
        }
    }

    /// The next message, if there is one (and if it is done, or its event has passed, where the port waits for that).
    ///
    /// # Errors
    /// What went wrong on the way: a copy that failed, a device that was lost.
    #[inline]
    pub fn try_take(&mut self) -> Result<Option<M>> {
        let mut message = self.arrivals.take()?;
        if let Some(message) = &mut message {
            self.traffic.count(message);
            if let Some(stamp) = self.arrivals.stamp(message) {
                self.stamps.note(message, stamp, self.traffic.messages)?;
            }
        }
        Ok(message)
    }

    /// Waits for the next message. `None` when the last sender is gone and nothing is left.
    ///
    /// # Errors
    /// As [`Input::try_take`].
    ///
    /// # Cancel safety
    /// A message is taken only as the future resolves: dropping it loses none.
    pub async fn recv(&mut self) -> Result<Option<M>> {
        let waiting = Wait(std::slice::from_mut(&mut self.arrivals));
        let there = poll_fn(|cx| match waiting.0[0].poll(cx) {
            Readiness::Wait | Readiness::WaitEvent => Poll::Pending,
            Readiness::Ready => Poll::Ready(true),
            Readiness::Never => Poll::Ready(false),
        });
        let there = there.await;
        drop(waiting);
        if there { self.try_take() } else { Ok(None) }
    }

    /// The streams that this run's messages came from, one entry a message, in the order of taking: the point in its
    /// sender's stream at which the message's own work is done; `None` from a sender without one. Looking changes nothing.
    ///
    /// For [`Stream::join`], where a message brings what wakeline does not track (another library's pointer, say) onto a
    /// stream other than the operator's own: that one joins by itself as the message is taken. Envelopes need none of it.
    ///
    /// Of more than 1024 messages in one run the oldest are forgotten.
    pub fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.stamps.all(self.traffic.messages)
    }

    /// Messages that can be taken now. Where the port waits for their work, those that are known to be done: the device
    /// is not asked.
    pub fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// True if none can be taken now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<M: Message> Output<M> {
    /// Sends a message, waiting for room if there is none. The first of a run finds room: the port's condition said so.
    ///
    /// A wait for room in the middle of a run counts as work under way: a flow whose operators all wait so is not told
    /// to be stalled. Send no more in a run than its conditions promise, or give the hub room for it.
    ///
    /// The order of device work travels with it: whoever uses an envelope next comes after all that was enqueued on it.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) if the reader is gone or the port was closed; what went wrong on the way. The
    /// message is dropped then; [`try_send`](Self::try_send) gives it back. A reader may end at any moment: an operator
    /// that returns this error because its reader is gone has ended, and not failed.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent.
    pub async fn send(&mut self, message: M) -> Result<()> {
        let mut message = message;
        loop {
            match self.try_send(message)? {
                Ok(()) => return Ok(()),
                Err(back) => message = back,
            }
            let answer = poll_fn(|cx| match self.sender.as_ref().map(|sender| sender.poll_queue(cx.waker())) {
                Some(Answer::Wait) => Poll::Pending,
                answer => Poll::Ready(answer),
            });
            if let None | Some(Answer::Never) = answer.await {
                return Err(self.closed());
            }
        }
    }

    /// Sends a message if there is room; gives it back if not.
    ///
    /// # Errors
    /// As [`Output::send`].
    pub fn try_send(&mut self, message: M) -> Result<Result<(), M>> {
        let Some(sender) = self.sender.as_ref().filter(|sender| !sender.reader_gone()) else {
            return Err(self.closed());
        };
        let bytes = message.size_in_bytes() as u64;
        let number = self.traffic.messages + 1;
        let origin = |stream| Some((stream, number));
        let sent = match (&self.chosen, &self.lane) {
            (Some(chosen), _) => sender.try_send(message, origin(chosen))?,
            (None, None) => sender.try_send(message, None)?,
            (None, Some(lane)) => match lane.own() {
                Some(own) => sender.try_send(message, origin(own))?,
                None => sender.try_send(message, lane.lent().as_ref().and_then(origin))?,
            },
        };
        if sent.is_ok() {
            self.traffic.messages += 1;
            self.traffic.bytes += bytes;
        }
        Ok(sent)
    }

    /// From now on messages carry this stream; with `None` the operator's own again, as they do without a call.
    ///
    /// It is what the reader sees in [`Input::streams`]; and whatever it touches that wakeline does not track comes after
    /// what was put into this stream before the message was sent. A [named](crate::Cx::stream_named) stream is sent on only
    /// by this.
    pub fn set_stream<'a>(&mut self, stream: impl Into<Option<&'a Stream>>) {
        self.chosen = stream.into().cloned();
    }

    /// Says that nothing more will be sent: the reader ends once it has taken what is left, and so does this operator.
    pub fn close(&mut self) {
        self.sender = None;
    }

    /// True if nothing that is sent can arrive any more.
    pub fn is_closed(&self) -> bool {
        self.sender.as_ref().is_none_or(Sender::reader_gone)
    }

    fn closed(&self) -> Error {
        match &self.sender {
            None => Error::new(ErrorKind::Closed, "this output was closed"),
            Some(sender) => Error::new(ErrorKind::Closed, format!("the reader of hub `{}` has ended", sender.hub())),
        }
    }
}

impl<T: Plain> Output<Envelope<T>> {
    /// A blank envelope of the hub's, to fill and to send. It is there: the port's condition said so before the
    /// operator ran; a second one in the same run is waited for, and as with [`send`](Self::send) that wait counts as work
    /// under way.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if nobody said how large the hub's envelopes are, [`Closed`](ErrorKind::Closed) if
    /// the reader is gone.
    ///
    /// # Cancel safety
    /// An envelope is taken only as the future resolves: dropping it loses none.
    pub async fn blank(&mut self) -> Result<Envelope<T>> {
        loop {
            let Some(sender) = &self.sender else { return Err(self.closed()) };
            if let Some(raw) = sender.blank()? {
                return Ok(Envelope::of_raw(raw));
            }
            let answer = poll_fn(|cx| match sender.poll_blank(cx.waker()) {
                Answer::Wait => Poll::Pending,
                answer => Poll::Ready(answer),
            });
            if answer.await == Answer::Never {
                return Err(self.closed());
            }
        }
    }
}

impl<M: Message> fmt::Debug for Input<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Input").field(&self.arrivals).finish()
    }
}

impl<M: Message> fmt::Debug for Output<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Output").field(&self.sender).finish()
    }
}

/// Which port of which operator of which flow.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortId {
    pub(crate) flow: u64,
    pub(crate) operator: usize,
    pub(crate) port: usize,
}

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub struct $name<M> {
            pub(crate) id: PortId,
            of: PhantomData<fn(M) -> M>,
        }

        impl<M> $name<M> {
            pub(super) fn new(id: PortId) -> Self {
                Self { id, of: PhantomData }
            }
        }

        impl<M> Clone for $name<M> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<M> Copy for $name<M> {}

        impl<M> fmt::Debug for $name<M> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.id).finish()
            }
        }
    };
}

handle! {
    /// An input, to connect: once, or if it is one of [`Inputs`](super::Inputs), any number of times.
    InputHandle
}
handle! {
    /// An output, to connect.
    OutputHandle
}

/// Which way, and for how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    Input,
    /// Can be connected any number of times.
    Inputs,
    Output,
}

/// What a flow knows of a port before it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortDecl {
    pub(crate) name: &'static str,
    pub(crate) kind: PortKind,
    pub(crate) hub: Hub,
    pub(crate) carries_envelopes: bool,
    pub(crate) element_bytes: usize,
}

/// Gathers an operator's ports when it is added.
#[doc(hidden)]
#[derive(Debug)]
pub struct Plan {
    pub(crate) flow: u64,
    pub(crate) operator: usize,
    pub(crate) ports: Vec<PortDecl>,
}

/// Hands out the ends of hubs when a flow is built.
#[doc(hidden)]
pub struct Binder<'a> {
    pub(crate) lane: Option<Arc<Lane>>,
    /// By port, in the order of connecting.
    pub(crate) ends: &'a mut HashMap<&'static str, Vec<Box<dyn Any + Send>>>,
}

impl Binder<'_> {
    fn end<T: 'static>(&mut self, name: &'static str) -> Result<T> {
        self.ends(name)?.pop().ok_or_else(|| not_connected(name))
    }

    pub(super) fn ends<T: 'static>(&mut self, name: &'static str) -> Result<Vec<T>> {
        let ends = self.ends.remove(name).ok_or_else(|| not_connected(name))?;
        let ends = ends.into_iter().map(|end| end.downcast::<T>().map(|end| *end).map_err(|_| not_connected(name)));
        ends.collect()
    }
}

fn not_connected(name: &str) -> Error {
    Error::new(ErrorKind::Setup, format!("port `{name}` is not connected"))
}

impl fmt::Debug for Binder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Binder").field("ends", &self.ends.keys()).finish()
    }
}

/// What an attribute said of a port.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct PortOptions {
    hub: Hub,
    pub(super) wanted: Wanted,
}

#[allow(missing_docs)]
impl PortOptions {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn capacity(mut self, capacity: usize) -> Self {
        self.hub.capacity = Some(capacity);
        self
    }

    pub fn envelope_bytes(mut self, bytes: usize) -> Self {
        self.hub.envelope_bytes = Some(bytes);
        self
    }

    pub fn envelopes(mut self, count: usize) -> Self {
        self.hub.envelopes = Some(count);
        self
    }

    pub fn done(mut self) -> Self {
        self.wanted.done = true;
        self
    }

    pub fn event(mut self, name: &'static str) -> Self {
        self.wanted.event = Some(name);
        self
    }
}

/// A port, whatever it carries.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait AnyPort {
    fn is_output(&self) -> bool;
    fn traffic(&self) -> Traffic;
    /// True for an output whose reader has ended.
    fn reader_gone(&self) -> bool;
    /// It is not waited at any longer.
    fn rest(&mut self) {}
    /// Keeps the waker for its next change, whether it is ready or not.
    fn watch(&mut self, waker: &Waker);
}

/// What the derive macro needs of a port.
#[doc(hidden)]
#[allow(missing_docs)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a port",
    label = "expected `Input<M>`, `Inputs<M>` or `Output<M>`, where `M` is a `Message`"
)]
pub trait Port: AnyPort + Send + 'static {
    type Handle: Copy + Send + Sync + 'static;
    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> Self::Handle;
    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self>
    where
        Self: Sized;
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness;
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

/// A port that `#[output]` may stand on.
#[doc(hidden)]
#[diagnostic::on_unimplemented(message = "`{Self}` is not an output", label = "`#[output]` stands on an `Output<M>`")]
pub trait OutputPort: Port {}

impl<M: Message> InputPort for Input<M> {
    const EVENTS: &'static [&'static str] = M::EVENTS;
}

impl<M: Message> OutputPort for Output<M> {}

impl<M: Message> AnyPort for Input<M> {
    fn is_output(&self) -> bool {
        false
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }

    fn reader_gone(&self) -> bool {
        false
    }

    fn rest(&mut self) {
        self.arrivals.rest();
    }

    fn watch(&mut self, waker: &Waker) {
        self.arrivals.watch(waker);
    }
}

impl<M: Message> AnyPort for Output<M> {
    fn is_output(&self) -> bool {
        true
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }

    fn reader_gone(&self) -> bool {
        self.sender.as_ref().is_some_and(Sender::reader_gone)
    }

    fn watch(&mut self, waker: &Waker) {
        if let Some(sender) = &self.sender {
            sender.watch(waker);
        }
    }
}

impl<M: Message> Port for Input<M> {
    type Handle = InputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> InputHandle<M> {
        InputHandle::new(plan.add::<M>(name, PortKind::Input, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        let (arrivals, stamps) = (Arrivals::new(binder.end(name)?, options.wanted), Stamps::new(binder.lane.clone()));
        Ok(Self { arrivals, traffic: Traffic::default(), stamps })
    }

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.arrivals.poll(cx)
    }

    /// This is the only reader: what was there still is.
    #[inline]
    fn claim(&mut self) -> bool {
        self.stamps.begin(self.traffic.messages);
        true
    }

    fn unclaim(&mut self) {}
}

impl<M: Message> Port for Output<M> {
    type Handle = OutputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> OutputHandle<M> {
        OutputHandle::new(plan.add::<M>(name, PortKind::Output, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, _options: PortOptions) -> Result<Self> {
        let (sender, lane) = (Some(binder.end(name)?), binder.lane.clone());
        Ok(Self { sender, traffic: Traffic::default(), lane, chosen: None })
    }

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness {
        match &self.sender {
            Some(sender) => condition::room(sender, cx),
            None => Readiness::Never,
        }
    }

    /// This is the only writer: the room that was there still is.
    #[inline]
    fn claim(&mut self) -> bool {
        true
    }

    fn unclaim(&mut self) {}
}

impl Plan {
    pub(super) fn add<M: Message>(&mut self, name: &'static str, kind: PortKind, options: PortOptions) -> PortId {
        self.ports.push(PortDecl {
            name,
            kind,
            hub: options.hub,
            carries_envelopes: M::CARRIES_ENVELOPES,
            element_bytes: M::ELEMENT_BYTES,
        });
        PortId { flow: self.flow, operator: self.operator, port: self.ports.len() - 1 }
    }
}
