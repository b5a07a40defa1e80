//! The edge of a section that is replayed: its ports as the section uses them, whose messages are envelopes.
//!
//! In a streamed round the ports are the operators' own, as ever. In a replayed one no operator runs, and the section itself
//! takes and sends by the same ports: so their hubs, their order and their counts know no difference. For a capture each
//! makes an end of its own kind, which the operator is bound to meanwhile.
//!
//! ```text
//!   entry    first ──> take ──> the graph's input           in a capture:  the hub ──╳   inlet ──> operator
//!   exit     the graph's output ──> blank ──> send          in a capture:  operator ──> kept   ╳──> the hub
//! ```

use std::{any::Any, fmt, sync::Arc};

use super::{
    arrivals::{Arrivals, Inlet, Intake},
    carry::Carry,
};
use crate::{
    error::{Error, ErrorKind, Result},
    hub::{
        Message, RawEnvelope,
        baggage::Parcel,
        kept::{Backlog, Kept},
        outlet::Outlet,
        pool::Pool,
        sender::depart,
    },
    stream::Stream,
};

/// How a section passes messages on in an operator's place: what they bring along, and the stream that it works on.
#[doc(hidden)]
pub struct Passing {
    pub(crate) carry: Arc<Carry>,
    pub(crate) stream: Stream,
}

/// An end for a capture, for an operator's port to be bound to.
pub(crate) type End = Box<dyn Any + Send>;

/// An input at the edge.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait Entry {
    /// Bytes of the first message, which stays until it is taken; `None` if there is none.
    fn first(&mut self) -> Result<Option<usize>>;
    fn take(&mut self, passing: &Passing) -> Result<RawEnvelope>;
    /// An end for the operator in a capture, with this one message.
    fn feed(&mut self, envelope: RawEnvelope) -> Result<Box<dyn Any + Send>>;
}

/// An output at the edge.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait Exit {
    /// A blank envelope of its hub's; `None` if the hub has such, and none at home.
    fn blank(&mut self) -> Result<Blank>;
    /// Sends it, once it is [flushed](super::AnyPort::poll_flush).
    fn send(&mut self, envelope: RawEnvelope, passing: &Passing) -> Result<()>;
    /// An end for the operator in a capture, which works on this stream.
    fn keep(&mut self, stream: &Stream) -> Box<dyn Any + Send>;
    /// What was sent to such an end.
    fn kept(&mut self) -> Vec<RawEnvelope>;
}

/// Where an output's envelopes come from.
#[doc(hidden)]
#[derive(Debug)]
pub enum Blank {
    /// Its hub has blank ones.
    Lent(RawEnvelope),
    /// Its hub has some, and they are all out.
    AllOut,
    /// Its hub has none: others are passed on.
    PassedOn,
}

fn no_envelope() -> Error {
    Error::new(ErrorKind::Usage, "a message at the edge of a section that is no envelope")
}

pub(super) fn first<M: Message>(arrivals: &mut Arrivals<M>) -> Result<Option<usize>> {
    arrivals.check()?;
    Ok(if arrivals.claim() { arrivals.first_bytes() } else { None })
}

pub(super) fn take<M: Message>(
    intake: &mut Intake<M>,
    arrivals: &mut Arrivals<M>,
    passing: &Passing,
) -> Result<RawEnvelope> {
    let taken = intake.take_for(arrivals, &passing.carry)?;
    taken.and_then(M::into_envelope).ok_or_else(no_envelope)
}

pub(super) fn feed<M: Message>(arrivals: &Arrivals<M>, envelope: RawEnvelope) -> Result<End> {
    let (end, mut inlet): (_, Inlet<M>) = arrivals.spread();
    inlet.put(M::of_envelope(envelope).ok_or_else(no_envelope)?)?;
    Ok(Box::new(end))
}

pub(super) fn blank<M: Message>(to: &Outlet<M>) -> Result<Blank> {
    if to.blanks().is_err() {
        return Ok(Blank::PassedOn);
    }
    Ok(to.blank()?.map_or(Blank::AllOut, Blank::Lent))
}

pub(super) fn send<M: Message>(
    backlog: &mut Option<Box<Backlog<M>>>,
    envelope: RawEnvelope,
    passing: &Passing,
) -> Result<()> {
    let mut message = M::of_envelope(envelope).ok_or_else(no_envelope)?;
    depart(&mut message, Some(&passing.stream))?;
    backlog.get_or_insert_default().push_back((Parcel::with(message, passing.carry.load()), None));
    Ok(())
}

pub(super) fn keep<M: Message>(to: &Outlet<M>, stream: &Stream) -> End {
    let blanks = to.blanks().map(|pool| Pool::captured(pool.hub(), pool.bytes(), stream));
    Box::new(Outlet::<M>::Kept(Kept::new(blanks)))
}

pub(super) fn kept<M: Message>(to: &mut Outlet<M>) -> Vec<RawEnvelope> {
    let Outlet::Kept(kept) = to else { return Vec::new() };
    kept.take().drain(..).filter_map(|(parcel, _)| parcel.message.into_envelope()).collect()
}

impl fmt::Debug for Passing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Passing").field("stream", &self.stream).finish_non_exhaustive()
    }
}
