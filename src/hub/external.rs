//! [`ExternalHandle`]: a hub's core, for a sender outside the flow.
//!
//! Such a sender shares the output with others, under a lock. The steps that call code of the message run without the lock:
//! [`accepts`](ExternalHandle::accepts) and [`depart`](ExternalHandle::depart) before the message is enqueued, and
//! [`pump`](ExternalHandle::pump) after it.

use std::sync::Arc;

use super::{Message, core::HubCore, open_work::refused, parcel::Parcel, pool::RawEnvelope};
use crate::{
    device::Device,
    error::{ErrorKind, Result},
    stream::Stream,
};

/// See the [module](self).
pub(crate) struct ExternalHandle<M: Message>(Arc<HubCore<M>>);

impl<M: Message> ExternalHandle<M> {
    /// Marks the hub as fed from outside its flow.
    pub(super) fn new(hub: &Arc<HubCore<M>>) -> Self {
        hub.set_has_external_writer();
        Self(hub.clone())
    }

    /// Where the hub's messages are read.
    pub(crate) fn reader(&self) -> &Device {
        &self.0.reader
    }

    /// Like [`Parcel::depart`]. After it, `Sender::try_send_departed` calls no code of the message.
    pub(crate) fn depart(&self, parcel: &mut Parcel<M>, origin: Option<&Stream>) -> Result<()> {
        self.0.check()?;
        parcel.depart(origin)
    }

    /// Checks that the hub can move a message from outside to its reader. If not, the hub continues to work, and the
    /// error does not mention anything of the flow.
    pub(crate) fn accepts(&self, message: &mut M, by: SentBy) -> Result<()> {
        if !M::CARRIES_ENVELOPES {
            return Ok(());
        }
        let hub = &*self.0;
        let (mut problem, mut copied) = (Ok(()), 0);
        message.envelopes(&mut |envelope| {
            copied += usize::from(!envelope.memory().is_at(&hub.reader));
            if problem.is_ok() {
                problem = hub.accepts_one(envelope).and_then(|()| by.may_send(envelope, &hub.reader));
            }
        });
        let most = hub.arrival_pool.as_ref().map_or(usize::MAX, |arrivals| arrivals.count());
        if copied > most {
            return Err(refused(
                ErrorKind::Usage,
                &format!("it has {copied} envelopes, and at most {most} are allowed"),
            ));
        }
        problem
    }

    /// Moves the messages that can be moved.
    pub(crate) fn pump(&self) -> Result<()> {
        self.0.pump()
    }
}

/// The sender of a message from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SentBy {
    /// The program that feeds the flow through an ingress.
    Feeder,
    /// One of several callers of a service, which do not trust each other.
    Caller,
}

impl SentBy {
    /// Checks that a caller cannot access its request's memory later, and that the request does not make an operator on the
    /// host fail.
    fn may_send(self, envelope: &RawEnvelope, reader: &Device) -> Result<()> {
        let memory = envelope.memory();
        if self == Self::Feeder {
            return Ok(());
        }
        if memory.is_in_graph() {
            let why = "a graph may use the memory of an envelope at any time: copy the data to other memory first";
            return Err(refused(ErrorKind::Usage, why));
        }
        if memory.is_read_only() && memory.is_at(reader) {
            let why = "the memory of an envelope was wrapped read-only, and an operator may write to it: copy the data to \
                       other memory first, such as a blank envelope of the service";
            return Err(refused(ErrorKind::Usage, why));
        }
        Ok(())
    }
}
