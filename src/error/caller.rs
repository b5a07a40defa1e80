//! [`CallerErrors`]: a flow's errors as its callers get them.

use std::{
    fmt,
    sync::atomic::{AtomicU32, Ordering},
};

use super::{Error, ErrorKind};
use crate::sync::contained;

/// What the callers of one service or ingress get in place of errors that were written for the flow's own program: the kind
/// and a general message. The log has the whole error, as a warning the first time for each kind and at debug level after
/// that: a caller may ask again and again.
pub(crate) struct CallerErrors {
    flow: String,
    /// The service, or the ingress.
    operator: String,
    /// A bit for each kind that was logged as a warning.
    warned: AtomicU32,
}

impl CallerErrors {
    pub(crate) fn new(flow: &str, operator: &str) -> Self {
        Self { flow: flow.into(), operator: operator.into(), warned: AtomicU32::new(0) }
    }

    /// An error of an envelope's memory, which lies on the host or on a device.
    #[cold]
    pub(crate) fn of_memory(&self, error: Error, is_host: bool) -> Error {
        self.given(
            &error,
            match error.kind() {
                ErrorKind::Usage if is_host => "this envelope is still in use: await `read()` or `write()` first",
                ErrorKind::Usage => {
                    "the host cannot look into an envelope that lies on a device: copy it to `Buffer::pinned` with \
                     `Stream::copy`"
                }
                _ => "the work on this envelope has failed",
            },
        )
    }

    /// An error of the wait for an envelope's memory.
    #[cold]
    pub(crate) fn of_wait(&self, error: &Error) -> Error {
        self.given(error, "the work on this envelope has failed")
    }

    /// The error of a response that could not be given out.
    #[cold]
    pub(crate) fn of_response(&self, error: &Error) -> Error {
        self.given(
            error,
            match error.kind() {
                ErrorKind::OutOfMemory => "there is no memory for the response",
                _ => "the work on the response has failed",
            },
        )
    }

    fn given(&self, error: &Error, message: &str) -> Error {
        let kind = 1 << error.kind() as u32;
        let first = self.warned.fetch_or(kind, Ordering::Relaxed) & kind == 0;
        let (flow, operator) = (&*self.flow, &*self.operator);
        // The subscriber is user code.
        contained("the log of a caller's error panicked", || {
            if first && error.kind() != ErrorKind::Usage {
                tracing::warn!(flow, operator, %error, "an envelope outside of the flow has failed");
            } else {
                tracing::debug!(flow, operator, %error, "an envelope outside of the flow has failed");
            }
        });
        error.for_caller(message)
    }
}

impl fmt::Debug for CallerErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallerErrors")
    }
}
