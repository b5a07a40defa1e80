//! [`OpenWork`]: what a service's request waits for before it enters the flow. All device work on the request must be
//! complete, and none of it may have failed.
//!
//! The callers of a service do not trust each other. Messages in a hub keep their order, and the copies of one hub
//! are made on one stream: a request whose last write does not complete would block all requests behind it, and the
//! error of a failed one would reach an operator and fail the flow. A request therefore waits outside the hub, at its
//! caller's expense, and errors of its work go to its caller.
//!
//! ```text
//!   request ──> query ── open ──> wait ──> query again
//!                 │ done             │ failed
//!                 v                  v
//!     its uses are forgotten,    the caller's error
//!     then it asks for a place
//! ```
//!
//! Completed uses are forgotten, so that no stream of the flow is ordered after a stream of the caller's. Streams
//! that the caller's stream is itself ordered after, and which might be lost later, do not affect the flow.

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
    /// The incomplete work on this message; `None` once all of it is complete. Queries the devices without waiting
    /// for them.
    ///
    /// # Errors
    /// The failure of that work, as the message's sender gets it.
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
            message.events(name, &mut |ticket| match ticket.query() {
                Ok(true) => {
                    if let Err(error) = ticket.check_taint() {
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

    /// Resolves when all of the work is complete.
    ///
    /// # Errors
    /// The same as for [`on`](Self::on).
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

/// The sender's error. It hides the details, since the streams and devices might belong to another flow.
fn failed(error: &Error) -> Error {
    logged(|| tracing::debug!(error = %format_args!("{error:#}"), "a request was rejected: work on it has failed"));
    refused(error.kind(), "the work on one of its envelopes or events has failed")
}

/// The error of a message from outside that is not accepted by the flow.
#[cold]
pub(super) fn refused(kind: ErrorKind, why: &str) -> Error {
    Error::new(kind, format!("the message is refused: {why}"))
}
