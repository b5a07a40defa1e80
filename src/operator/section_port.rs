//! [`SectionInput`] and [`SectionOutput`]: how a section that is replayed uses the ports on its boundary. Their
//! messages are envelopes.
//!
//! In a streamed round the operators use the ports themselves. In a replayed round no operator runs, and the section
//! takes and sends through the same ports, so hubs, order and counts work alike in both. For a capture, each port
//! creates a temporary end of its own kind, to which the operator is bound during the capture.
//!
//! ```text
//!   input     first_bytes ──> take ──> the graph's input   in a capture:  the hub ──╳   captured_end ──> operator
//!   output    the graph's output ──> blank ──> send        in a capture:  operator ──> captured_end   ╳──> the hub
//! ```

use std::{fmt, sync::Arc, task::Context};

use super::{plan::AnyEnd, run_context::RunContext};
use crate::{
    condition::Readiness,
    error::{Error, ErrorKind, Result},
    hub::RawEnvelope,
    stream::Stream,
};

/// What a section needs to take and send messages in an operator's place: the run context with their metadata, and the
/// section's stream.
#[doc(hidden)]
pub struct SectionContext {
    pub(crate) context: Arc<RunContext>,
    pub(crate) stream: Stream,
}

/// An input on the boundary.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait SectionInput {
    /// Polls for a message for the next round.
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Readiness;
    /// The size in bytes of the first message, which stays queued; `None` if there is no message.
    fn first_bytes(&mut self) -> Result<Option<usize>>;
    fn take(&mut self, section: &SectionContext) -> Result<RawEnvelope>;
    /// Creates an end for the operator in a capture, with `envelope` as its only message.
    fn captured_end(&self, envelope: RawEnvelope) -> Result<AnyEnd>;
}

/// An output on the boundary.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait SectionOutput {
    /// Takes a blank envelope of the hub; [`Blank`] says why there is none.
    fn take_blank(&mut self) -> Result<Blank>;
    /// Sends the envelope, once it is [flushed](super::AnyPort::poll_flush).
    fn send(&mut self, envelope: RawEnvelope, section: &SectionContext) -> Result<()>;
    /// Creates an end for the operator in a capture, which works on `stream`.
    fn captured_end(&self, stream: &Stream) -> AnyEnd;
    /// Takes the envelopes that were sent to the capture's end.
    fn captured(&mut self) -> Vec<RawEnvelope>;
}

/// A blank envelope for an output, or the reason why there is none.
#[doc(hidden)]
#[derive(Debug)]
pub enum Blank {
    Taken(RawEnvelope),
    /// All blank envelopes of the hub are in use.
    AllInUse,
    /// The hub has no blank envelopes: the operator passes on those that it receives.
    NoPool,
}

pub(super) fn no_envelope() -> Error {
    Error::new(
        ErrorKind::Usage,
        "a message on the boundary of a section is not an envelope: a section that is replayed can only receive and \
         send envelopes",
    )
}

impl fmt::Debug for SectionContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SectionContext").field("stream", &self.stream).finish_non_exhaustive()
    }
}
