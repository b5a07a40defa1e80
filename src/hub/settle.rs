//! What a request of a service waits for before it enters the flow: all device work on it is done, and none of it has failed.
//!
//! The callers of a service do not trust each other. In a hub the messages keep their order, and the copies of one hub are
//! made on one stream: a request whose last write does not end would hold up all requests behind it, and the error of one
//! that failed would reach an operator, which fails the flow. So a request waits outside of the hub, at its caller's expense,
//! and an error of its work is its caller's.
//!
//! ```text
//!   request ──> look ── open ──> wait ──> look again
//!                 │ done           │ failed
//!                 v                v
//!     its uses are forgotten,    the caller's error
//!     then it asks for a place
//! ```
//!
//! The uses that are done are forgotten, so that no stream of the flow comes after a stream of the caller's: what that stream
//! comes after in its turn, and may be lost later, does not concern the flow.

use smallvec::SmallVec;

use super::Message;
use crate::{
    error::{Error, ErrorKind, Result},
    memory::HostAccess,
    stream::Completed,
    sync::logged,
};

/// The device work that uses a message's envelopes or precedes its events.
pub(crate) struct OpenWork {
    accesses: SmallVec<[HostAccess; 1]>,
    events: SmallVec<[Completed; 1]>,
}

impl OpenWork {
    /// The work on this message; `None` once all of it is done. Asks the devices, and does not wait for them.
    ///
    /// # Errors
    /// What has failed on its way, as the message's sender is given it.
    pub(crate) fn on<M: Message>(message: &mut M) -> Result<Option<Self>> {
        if !M::CARRIES_ENVELOPES && M::EVENTS.is_empty() {
            return Ok(None);
        }
        let mut work = Self { accesses: SmallVec::new(), events: SmallVec::new() };
        let mut problem = Ok(());
        if M::CARRIES_ENVELOPES {
            // Reads as well as writes: an operator may write in place.
            message.envelopes(&mut |envelope| match envelope.forget_work() {
                Ok(true) => {}
                Ok(false) => work.accesses.push(envelope.host_access(true)),
                Err(error) => problem = Err(error),
            });
        }
        for name in M::EVENTS {
            message.events(name, &mut |ticket| match ticket.look() {
                Ok(true) => {
                    if let Err(error) = ticket.sound() {
                        problem = Err(error);
                    }
                }
                Ok(false) => work.events.push(ticket.completed()),
                Err(error) => problem = Err(error),
            });
        }
        problem.map_err(|error| failed(&error))?;
        Ok((!work.accesses.is_empty() || !work.events.is_empty()).then_some(work))
    }

    /// Resolves when all of it is done.
    ///
    /// # Errors
    /// As [`on`](Self::on).
    pub(crate) async fn done(self) -> Result<()> {
        let Self { accesses, events } = self;
        for access in accesses {
            access.wait().await.map_err(|error| failed(&error))?;
        }
        for event in events {
            event.await.map_err(|error| failed(&error))?;
        }
        Ok(())
    }
}

/// The error of the sender. The streams and devices may be those of another flow, which its callers do not learn of.
fn failed(error: &Error) -> Error {
    logged(|| tracing::debug!(%error, "a request is refused: the work on it has failed"));
    refused(error.kind(), "the work on one of its envelopes or events has failed")
}

/// Why a message from outside does not enter the flow.
#[cold]
pub(super) fn refused(kind: ErrorKind, why: &str) -> Error {
    Error::new(kind, format!("the message is refused: {why}"))
}
