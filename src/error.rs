//! The one error type of wakeline.
//!
//! An [`Error`] has a [`kind`](Error::kind), a place (operator, port or device), a message and a cause (its
//! [`source`](std::error::Error::source), back to the original error). It is opaque: use its predicates. This lets
//! later versions add details without breaking callers.
//!
//! | kind | meaning and remedy |
//! |---|---|
//! | [`NoDevice`](ErrorKind::NoDevice) | choose another device, install a driver, or run on the emulated device |
//! | [`OutOfMemory`](ErrorKind::OutOfMemory) | use fewer or smaller envelopes; the message has the numbers |
//! | [`DeviceLost`](ErrorKind::DeviceLost) | the device's work is lost: start again in a new process |
//! | [`Race`](ErrorKind::Race) | two unordered accesses: add the ordering that the message names |
//! | [`InvalidMemory`](ErrorKind::InvalidMemory) | memory was used after it was freed, or read before it was written; the message says which |
//! | [`Kernel`](ErrorKind::Kernel) | fix the kernel's source; the compiler's log is in the message |
//! | [`NoCompiler`](ErrorKind::NoCompiler) | install NVRTC, which is part of the CUDA toolkit, or ship kernels as PTX |
//! | [`Setup`](ErrorKind::Setup) | a flow, or a hub outside of a flow, was built or configured incorrectly; the message says how to fix it |
//! | [`Usage`](ErrorKind::Usage) | an invalid call |
//! | [`Stalled`](ErrorKind::Stalled) | operators wait for each other; the message says which waits for what |
//! | [`Operator`](ErrorKind::Operator) | an operator's own error: see its cause |
//! | [`Panicked`](ErrorKind::Panicked) | an operator panicked |
//! | [`Closed`](ErrorKind::Closed) | the other end of a port or hub is closed |
//! | [`Unanswered`](ErrorKind::Unanswered) | an operator dropped a request, which the message names: answer it, or refuse it with `Reply::fail` |
//! | [`Cancelled`](ErrorKind::Cancelled) | the flow was aborted |
//! | [`Driver`](ErrorKind::Driver) | a driver call failed for another reason; the message has its name and code |
//! | [`Internal`](ErrorKind::Internal) | a bug in wakeline: please report it with the message |

mod caller;
mod panics;

use std::{any::Any, cell::Cell, error::Error as StdError, fmt, sync::Arc};

pub(crate) use caller::CallerErrors;
pub(crate) use panics::{catch_panic, caught, caught_call, panic_message};

use crate::sync::discard_cause;

/// The result of a wakeline call.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// A user's error. Its destructor is user code, which runs wherever the last copy of the [`Error`] is dropped.
struct Cause(Option<Box<dyn StdError + Send + Sync + 'static>>);

impl Drop for Cause {
    fn drop(&mut self) {
        discard_cause(self.0.take());
    }
}

/// The kind of failure that an [`Error`] is. Later versions may add kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no such device, or no driver for it.
    NoDevice,
    /// The device or the host does not have the requested memory.
    OutOfMemory,
    /// A fault ended the device: all of its work is lost, and it accepts no further work.
    DeviceLost,
    /// The race checker found two unordered accesses.
    Race,
    /// The race checker found a use of memory after it was freed, or a read before anything was written to it.
    InvalidMemory,
    /// A kernel could not be compiled, loaded or found, or its two bodies disagree.
    Kernel,
    /// A kernel needs the CUDA C++ compiler, NVRTC, and this machine or this program has none.
    NoCompiler,
    /// A flow, or something outside of a flow, was built or configured incorrectly. No part of the flow has run.
    Setup,
    /// An invalid call.
    Usage,
    /// The flow is not done, but nothing in it can make progress. An envelope outside the flow
    /// keeps the flow from stalling only if the hub can see it in its message, which it cannot in a
    /// [`Host`](crate::Host) or an [`Arc`].
    Stalled,
    /// An operator returned an error of its own.
    Operator,
    /// An operator panicked, or other user code that a flow calls, such as a condition. A panic in a kernel's Rust body
    /// is a fault of its emulated device: [`DeviceLost`](Self::DeviceLost).
    Panicked,
    /// The other end of a port or hub is closed.
    Closed,
    /// A request was dropped without an answer.
    Unanswered,
    /// The flow was aborted before it ended.
    Cancelled,
    /// A driver call failed.
    Driver,
    /// A bug in wakeline. Please report it.
    Internal,
}

impl ErrorKind {
    fn phrase(self) -> &'static str {
        match self {
            ErrorKind::NoDevice => "no such device",
            ErrorKind::OutOfMemory => "out of memory",
            ErrorKind::DeviceLost => "device lost",
            ErrorKind::Race => "race",
            ErrorKind::InvalidMemory => "invalid memory",
            ErrorKind::Kernel => "kernel",
            ErrorKind::NoCompiler => "no compiler",
            ErrorKind::Setup => "invalid setup",
            ErrorKind::Usage => "invalid use",
            ErrorKind::Stalled => "stalled",
            ErrorKind::Operator => "operator failed",
            ErrorKind::Panicked => "panicked",
            ErrorKind::Closed => "closed",
            ErrorKind::Unanswered => "unanswered",
            ErrorKind::Cancelled => "cancelled",
            ErrorKind::Driver => "driver call failed",
            ErrorKind::Internal => "internal error",
        }
    }
}

/// The text of an error without a message: `device lost`.
impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.phrase())
    }
}

/// A failure: its kind, its place and its cause. Clones share the cause.
///
/// ```
/// use wakeline::{Error, ErrorKind};
///
/// let error = Error::from(std::io::Error::other("disk on fire")).at("operator `write`");
/// assert_eq!(error.kind(), ErrorKind::Operator);
/// assert!(error.downcast_ref::<std::io::Error>().is_some());
/// assert_eq!(error.to_string(), "operator `write`: disk on fire");
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    /// The places (device, port, operator), outermost last.
    places: Vec<String>,
    message: Option<String>,
    /// Set if all readers of an operator's output have ended.
    reader_gone: bool,
    /// Shared, as a lost device returns the same cause from every call.
    cause: Option<Arc<Cause>>,
    /// A value of a higher layer, such as the report of the failed flow.
    attachment: Option<Arc<dyn Any + Send + Sync>>,
}

impl Error {
    /// Creates a failure of `kind` with a message of one line.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            places: Vec::new(),
            message: Some(message.into()),
            reader_gone: false,
            cause: None,
            attachment: None,
        }))
    }

    /// Creates the error for a state that only a bug of this crate can lead to.
    #[cold]
    pub(crate) fn internal(message: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Internal, format!("{message} (please report)"))
    }

    /// Creates the error for an output whose readers have all ended.
    pub(crate) fn reader_gone(message: impl Into<String>) -> Self {
        let mut error = Self::new(ErrorKind::Closed, message);
        error.0.reader_gone = true;
        error
    }

    /// True if the error only reports that all readers of an output have ended.
    pub(crate) fn is_reader_gone(&self) -> bool {
        self.0.reader_gone
    }

    /// Wraps any error as an operator's own error, with that error as its cause.
    ///
    /// `?` does this for [`std::io::Error`] and boxed errors.
    pub fn other(cause: impl Into<Box<dyn StdError + Send + Sync + 'static>>) -> Self {
        let cause = cause.into();
        // A boxed wakeline error is unwrapped.
        match cause.downcast::<Error>() {
            Ok(error) => *error,
            Err(cause) => Self(Box::new(Inner {
                kind: ErrorKind::Operator,
                places: Vec::new(),
                message: None,
                reader_gone: false,
                cause: Some(Arc::new(Cause(Some(cause)))),
                attachment: None,
            })),
        }
    }

    /// Adds a place (an operator, a port, a device) in front of the error's text.
    #[must_use]
    pub fn at(mut self, place: impl Into<String>) -> Self {
        let place = place.into();
        if self.0.places.last() != Some(&place) {
            self.0.places.push(place);
        }
        self
    }

    /// Adds advice to the message.
    pub(crate) fn advise(mut self, advice: &str) -> Self {
        match &mut self.0.message {
            Some(message) => {
                *message += "; ";
                *message += advice;
            }
            none => *none = Some(advice.into()),
        }
        self
    }

    /// Notes that `place` observed the error but did not cause it.
    pub(crate) fn noticed_by(mut self, place: &str) -> Self {
        let noticed = format!(" (noticed by {place})");
        match &mut self.0.message {
            Some(message) if message.contains("(noticed by ") => {}
            Some(message) => *message += &noticed,
            none => *none = Some(noticed.trim_start().into()),
        }
        self
    }

    /// Sets the cause. The text has the first 64 errors of a chain of causes; [`source`](std::error::Error::source) has
    /// all of them.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn StdError + Send + Sync + 'static>>) -> Self {
        self.0.cause = Some(Arc::new(Cause(Some(cause.into()))));
        self
    }

    /// The message, without places and causes; empty if there is none.
    pub(crate) fn message(&self) -> &str {
        self.0.message.as_deref().unwrap_or_default()
    }

    /// Attaches a value, which replaces the previous one.
    pub(crate) fn attach<T: Send + Sync + 'static>(mut self, value: T) -> Self {
        self.0.attachment = Some(Arc::new(value));
        self
    }

    /// The attached value, if it is a `T`.
    pub(crate) fn attachment<T: 'static>(&self) -> Option<&T> {
        self.0.attachment.as_deref()?.downcast_ref()
    }

    /// Creates an error of the same kind for a caller outside of the flow, with `message` only. Places and causes name
    /// operators, streams, addresses and files, which belong in the log and in the flow's own error.
    pub(crate) fn for_caller(&self, message: &str) -> Self {
        Self::new(self.kind(), message)
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// True if a fault has ended a device.
    pub fn is_device_lost(&self) -> bool {
        self.0.kind == ErrorKind::DeviceLost
    }

    /// True if memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        self.0.kind == ErrorKind::OutOfMemory
    }

    /// True if the race checker found a race.
    pub fn is_race(&self) -> bool {
        self.0.kind == ErrorKind::Race
    }

    /// True if there is no such device, or no driver for it.
    pub fn is_no_device(&self) -> bool {
        self.0.kind == ErrorKind::NoDevice
    }

    /// True if the flow was aborted.
    pub fn is_cancelled(&self) -> bool {
        self.0.kind == ErrorKind::Cancelled
    }

    /// True if nothing in the flow could make progress.
    pub fn is_stalled(&self) -> bool {
        self.0.kind == ErrorKind::Stalled
    }

    /// True if the other end of a port or hub is closed.
    pub fn is_closed(&self) -> bool {
        self.0.kind == ErrorKind::Closed
    }

    /// The original cause, if it is a `T`.
    pub fn downcast_ref<T: StdError + 'static>(&self) -> Option<&T> {
        let mut next: Option<&(dyn StdError + 'static)> = self.source();
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref::<T>() {
                return Some(found);
            }
            next = error.source();
        }
        None
    }
}

/// The number of errors of a chain of causes that are displayed, including the first one.
const MAX_DISPLAYED: usize = 64;

thread_local! {
    /// The number of nested errors that this thread is displaying.
    static DISPLAYED: Cell<usize> = const { Cell::new(0) };
}

/// A guard for one error that is being displayed.
struct Displayed;

impl Displayed {
    /// `None` if too many are being displayed.
    fn enter() -> Option<Self> {
        let within = DISPLAYED.get();
        (within < MAX_DISPLAYED).then(|| {
            DISPLAYED.set(within + 1);
            Self
        })
    }
}

impl Drop for Displayed {
    fn drop(&mut self) {
        DISPLAYED.set(DISPLAYED.get() - 1);
    }
}

impl Error {
    /// Writes the error's text. `names_kind`: with the phrase for its kind.
    fn write(&self, f: &mut fmt::Formatter<'_>, names_kind: bool) -> fmt::Result {
        let Some(_displayed) = Displayed::enter() else { return f.write_str("further causes are not displayed") };
        for place in self.0.places.iter().rev() {
            write!(f, "{place}: ")?;
        }
        let cause = self.source();
        let Some(message) = &self.0.message else {
            return match cause {
                Some(cause) => write!(f, "{cause}"),
                None => f.write_str(self.0.kind.phrase()),
            };
        };
        if names_kind && self.0.kind != ErrorKind::Operator {
            write!(f, "{}: ", self.0.kind.phrase())?;
        }
        // The fault comes first, then the list of the work that was lost with the device.
        let fault = cause.and_then(|cause| cause.downcast_ref::<Self>()).filter(|fault| fault.is_device_lost());
        match (cause, fault.filter(|_| self.is_device_lost())) {
            (_, Some(fault)) => {
                fault.write(f, false)?;
                write!(f, "; {message}")
            }
            (Some(cause), None) => write!(f, "{message}: {cause}"),
            (None, None) => f.write_str(message),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, true)
    }
}

/// Like [`Display`](fmt::Display), since `main() -> Result<()>` prints errors with `Debug`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let cause = self.0.cause.as_ref()?.0.as_ref()?;
        Some(&**cause)
    }
}

impl From<std::io::Error> for Error {
    fn from(cause: std::io::Error) -> Self {
        Self::other(cause)
    }
}

impl From<Box<dyn StdError + Send + Sync + 'static>> for Error {
    fn from(cause: Box<dyn StdError + Send + Sync + 'static>) -> Self {
        Self::other(cause)
    }
}

impl From<String> for Error {
    fn from(message: String) -> Self {
        Self::new(ErrorKind::Operator, message)
    }
}

impl From<&str> for Error {
    fn from(message: &str) -> Self {
        Self::new(ErrorKind::Operator, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_the_message_or_is_the_message() {
        let with = Error::new(ErrorKind::OutOfMemory, "asked for 8 bytes").advise("wait");
        assert_eq!(with.to_string(), "out of memory: asked for 8 bytes; wait");
        let mut without = Error::new(ErrorKind::OutOfMemory, "");
        without.0.message = None;
        assert_eq!(without.advise("wait").to_string(), "out of memory: wait");
    }

    #[test]
    fn the_fault_comes_before_the_work_that_is_lost_with_its_device() {
        let fault =
            Error::new(ErrorKind::DeviceLost, "kernel `k` on stream `s` failed").because("trapped").at("cuda:0");
        let loss = Error::new(ErrorKind::DeviceLost, "unfinished work on: `s`").because(fault);
        let wanted =
            "operator `o`: device lost: cuda:0: kernel `k` on stream `s` failed: trapped; unfinished work on: `s`";
        assert_eq!(loss.at("operator `o`").to_string(), wanted);
    }
}
