//! The edge of a section that is replayed: its ports as the section uses them. Their messages are envelopes.
//!
//! In a streamed round the operators use the ports themselves. In a replayed round no operator runs, and the section
//! takes and sends through the same ports, so their hubs, their order and their counts work alike in both. For a
//! capture each port creates a temporary end of its own kind, to which the operator is bound meanwhile.
//!
//! ```text
//!   entry    first ──> take ──> the graph's input           in a capture:  the hub ──╳   inlet ──> operator
//!   exit     the graph's output ──> blank ──> send          in a capture:  operator ──> kept   ╳──> the hub
//! ```

use std::{any::Any, fmt, sync::Arc};

use super::{
    input_queue::{Inlet, InputQueue, Intake},
    run_context::RunContext,
};
use crate::{
    error::{Error, ErrorKind, Result},
    hub::{
        Message, RawEnvelope,
        header::Parcel,
        outbox::{Backlog, Outbox},
        outlet::Outlet,
        pool::Pool,
    },
    stream::Stream,
};

/// What a section needs to pass messages on in an operator's place: the metadata that they carry, and the stream that
/// the section works on.
#[doc(hidden)]
pub struct Passing {
    pub(crate) context: Arc<RunContext>,
    pub(crate) stream: Stream,
}

/// A temporary end, to which an operator's port is bound during a capture.
pub(crate) type AnyEnd = Box<dyn Any + Send>;

/// An input at the edge.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait Entry {
    /// Size in bytes of the first message, which stays until it is taken; `None` if there is none.
    fn first(&mut self) -> Result<Option<usize>>;
    fn take(&mut self, passing: &Passing) -> Result<RawEnvelope>;
    /// Creates an end for the operator in a capture, with this one message.
    fn feed(&mut self, envelope: RawEnvelope) -> Result<Box<dyn Any + Send>>;
}

/// An output at the edge.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait Exit {
    /// Takes a blank envelope of the hub; [`Blank`] says why there is none.
    fn blank(&mut self) -> Result<Blank>;
    /// Sends the envelope, once it is [flushed](super::AnyPort::poll_flush).
    fn send(&mut self, envelope: RawEnvelope, passing: &Passing) -> Result<()>;
    /// Creates an end for the operator in a capture, which works on this stream.
    fn keep(&mut self, stream: &Stream) -> Box<dyn Any + Send>;
    /// The envelopes that were sent to such an end.
    fn kept(&mut self) -> Vec<RawEnvelope>;
}

/// The source of an output's envelopes.
#[doc(hidden)]
#[derive(Debug)]
pub enum Blank {
    /// A blank envelope of the hub.
    Borrowed(RawEnvelope),
    /// The hub has blank envelopes, and all of them are in use.
    AllOut,
    /// The hub has no blank envelopes: the operator passes on those that it receives.
    PassedOn,
}

fn no_envelope() -> Error {
    Error::new(ErrorKind::Usage, "a message at the edge of a section is not an envelope")
}

pub(super) fn first<M: Message>(arrivals: &mut InputQueue<M>) -> Result<Option<usize>> {
    arrivals.check()?;
    Ok(if arrivals.claim() { arrivals.first_bytes() } else { None })
}

pub(super) fn take<M: Message>(
    intake: &mut Intake<M>,
    arrivals: &mut InputQueue<M>,
    passing: &Passing,
) -> Result<RawEnvelope> {
    let taken = intake.take_for(arrivals, &passing.context)?;
    taken.and_then(M::into_envelope).ok_or_else(no_envelope)
}

pub(super) fn feed<M: Message>(arrivals: &InputQueue<M>, envelope: RawEnvelope) -> Result<AnyEnd> {
    let (end, mut inlet): (_, Inlet<M>) = arrivals.spread();
    inlet.put(M::of_envelope(envelope).ok_or_else(no_envelope)?)?;
    Ok(Box::new(end))
}

pub(super) fn blank<M: Message>(to: &Outlet<M>) -> Result<Blank> {
    if to.blanks().is_err() {
        return Ok(Blank::PassedOn);
    }
    Ok(to.blank()?.map_or(Blank::AllOut, Blank::Borrowed))
}

pub(super) fn send<M: Message>(
    backlog: &mut Option<Box<Backlog<M>>>,
    envelope: RawEnvelope,
    passing: &Passing,
) -> Result<()> {
    let message = M::of_envelope(envelope).ok_or_else(no_envelope)?;
    let mut parcel = Parcel::new(message, passing.context.load());
    parcel.depart(Some(&passing.stream))?;
    backlog.get_or_insert_default().push_back(parcel);
    Ok(())
}

pub(super) fn keep<M: Message>(to: &Outlet<M>, stream: &Stream) -> AnyEnd {
    let blanks = to.blanks().map(|pool| Pool::captured(pool.hub(), pool.bytes(), stream));
    Box::new(Outlet::<M>::Outbox(Outbox::new(blanks)))
}

pub(super) fn kept<M: Message>(to: &mut Outlet<M>) -> Vec<RawEnvelope> {
    let Outlet::Outbox(kept) = to else { return Vec::new() };
    kept.take().drain(..).filter_map(|parcel| parcel.message.into_envelope()).collect()
}

impl fmt::Debug for Passing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Passing").field("stream", &self.stream).finish_non_exhaustive()
    }
}
