//! [`CallerErrors`]: the errors that a flow's callers receive.

use std::{
    fmt,
    sync::atomic::{AtomicU32, Ordering},
};

use super::{Error, ErrorKind};
use crate::sync::contained;

/// Replaces errors that were written for the flow's own program with an error for the callers of one service or
/// ingress: the same kind and a general message. The complete error is logged: as a warning the first time for each
/// kind, then at debug level, since a caller may retry any number of times.
pub(crate) struct CallerErrors {
    flow: String,
    /// The service, or the ingress.
    operator: String,
    /// One bit for each kind that was already logged as a warning.
    warned: AtomicU32,
}

impl CallerErrors {
    pub(crate) fn new(flow: &str, operator: &str) -> Self {
        Self { flow: flow.into(), operator: operator.into(), warned: AtomicU32::new(0) }
    }

    /// Converts an error of an access to an envelope's memory, on the host or on a device.
    #[cold]
    pub(crate) fn of_memory(&self, error: Error, is_host: bool) -> Error {
        self.given(
            &error,
            match error.kind() {
                ErrorKind::Usage if is_host => "this envelope is still in use: await `read()` or `write()` first",
                ErrorKind::Usage => {
                    "the host cannot access the memory of an envelope on a device: copy it to `Buffer::pinned` with \
                     `Stream::copy`"
                }
                _ => "the work on this envelope has failed",
            },
        )
    }

    #[cold]
    pub(crate) fn of_wait(&self, error: &Error) -> Error {
        self.given(error, "the work on this envelope has failed")
    }

    /// Converts an error of a response that could not be delivered.
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
        contained("logging a caller's error panicked", || {
            if first && error.kind() != ErrorKind::Usage {
                tracing::warn!(flow, operator, error = %format_args!("{error:#}"), "an envelope outside the flow failed");
            } else {
                tracing::debug!(flow, operator, error = %format_args!("{error:#}"), "an envelope outside the flow failed");
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
