//! The one error type of wakeline.
//!
//! An [`Error`] has a [`kind`](Error::kind), a place (operator, port or device), a message and a cause. It is opaque:
//! use its predicates. This lets later versions add details without breaking callers.
//!
//! | format | text |
//! |---|---|
//! | `{error}` | the place and the message |
//! | `{error:#}` | the same and its causes, in one line, separated by `: ` |
//! | `{error:?}` | the same, with each cause on a line below `Caused by:`, as `fn main() -> Result<()>` prints it |
//!
//! An operator's own error is wrapped without a message of its own: the text of its cause takes the message's place.
//! So the [`source`](std::error::Error::source) of such an error is the cause's source, and no text is repeated;
//! [`downcast_ref`](Error::downcast_ref) finds the cause itself. In a chain of causes, at most 64 errors are displayed.
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
//! | [`Unanswered`](ErrorKind::Unanswered) | an operator dropped a request, or answered several with one response; the log has the details: answer each, or refuse it with `Reply::fail` |
//! | [`Cancelled`](ErrorKind::Cancelled) | the flow was aborted |
//! | [`Driver`](ErrorKind::Driver) | a driver call failed for another reason; the message has its name and code |
//! | [`Internal`](ErrorKind::Internal) | a bug in wakeline: please report it with the message |

mod caller;
mod panics;

use std::{any::Any, cell::Cell, error::Error as StdError, fmt, iter::successors, sync::Arc};

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

/// The reason why a message was not sent, in the chain of causes of a `SendError`, whose type depends on the message's.
pub(crate) struct SendFailure(pub(crate) Error);

impl fmt::Display for SendFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for SendFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl StdError for SendFailure {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
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
///
/// let error = Error::new(ErrorKind::Setup, "no configuration").because(error);
/// assert_eq!(error.to_string(), "invalid setup: no configuration");
/// assert_eq!(format!("{error:#}"), "invalid setup: no configuration: operator `write`: disk on fire");
/// assert_eq!(
///     format!("{error:?}"),
///     "invalid setup: no configuration\n\nCaused by:\n    operator `write`: disk on fire",
/// );
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    /// The places (device, port, operator), outermost last.
    places: Vec<String>,
    /// `None`: the text of the cause, or of the kind.
    message: Option<String>,
    /// Advice, and who noticed the error: the end of the text.
    note: String,
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
            note: String::new(),
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

    /// Wraps any error as an operator's own error, which displays that error's text. [`downcast_ref`](Self::downcast_ref)
    /// returns it.
    ///
    /// `?` does this for [`std::io::Error`] and boxed errors.
    pub fn other(cause: impl Into<Box<dyn StdError + Send + Sync + 'static>>) -> Self {
        let cause = cause.into();
        // A boxed wakeline error is unwrapped, and so is a send error: the message is dropped.
        if let Some(SendFailure(error)) = cause.source().and_then(|source| source.downcast_ref()) {
            let error = error.clone();
            discard_cause(Some(cause));
            return error;
        }
        match cause.downcast::<Error>() {
            Ok(error) => *error,
            Err(cause) => Self(Box::new(Inner {
                kind: ErrorKind::Operator,
                places: Vec::new(),
                message: None,
                note: String::new(),
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
        self.0.note += "; ";
        self.0.note += advice;
        self
    }

    /// Notes that `place` observed the error but did not cause it.
    pub(crate) fn noticed_by(mut self, place: &str) -> Self {
        if !self.0.note.contains("(noticed by ") {
            self.0.note += &format!(" (noticed by {place})");
        }
        self
    }

    /// Creates the error for the loss of a device with this fault. The fault comes first, then `consequences`.
    pub(crate) fn into_loss(self, consequences: &str) -> Self {
        let mut loss =
            Self::new(ErrorKind::DeviceLost, format!("{}; {consequences}", Text { error: &self, kind: false }));
        loss.0.cause = self.0.cause.filter(|_| self.0.message.is_some());
        loss
    }

    /// Sets the cause, which `{:#}` and `{:?}` display. An error that [wraps](Self::other) another one keeps that one's text
    /// as its message. They display the first 64 errors of a chain of causes;
    /// [`source`](std::error::Error::source) has all of them.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn StdError + Send + Sync + 'static>>) -> Self {
        if self.0.message.is_none()
            && let Some(wrapped) = self.cause()
        {
            self.0.message = Some(wrapped.to_string());
        }
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

    /// The first cause that is a `T`.
    pub fn downcast_ref<T: StdError + 'static>(&self) -> Option<&T> {
        let mut next = self.cause();
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref::<T>() {
                return Some(found);
            }
            next = match error.downcast_ref::<Self>() {
                Some(error) => error.cause(),
                None => error.source(),
            };
        }
        None
    }

    fn cause(&self) -> Option<&(dyn StdError + 'static)> {
        let cause = self.0.cause.as_ref()?.0.as_ref()?;
        Some(&**cause)
    }

    /// The causes, without an error whose text this error displays as its own.
    fn causes(&self) -> impl Iterator<Item = &(dyn StdError + 'static)> {
        successors(self.source(), |&cause| cause.source())
    }
}

/// The number of errors of a chain of causes that are displayed, including the first one.
const MAX_DISPLAYED: usize = 64;

const NOT_DISPLAYED: &str = "further causes are not displayed";

thread_local! {
    /// The number of errors without a message whose cause this thread is visiting, one within the other.
    static NESTED: Cell<usize> = const { Cell::new(0) };
}

/// A guard for a visit of the cause of an error without a message. The cause may visit its own in turn: this bounds the
/// stack.
struct Nested;

impl Nested {
    /// `None` if too many are being visited.
    fn enter() -> Option<Self> {
        let within = NESTED.get();
        (within < MAX_DISPLAYED).then(|| {
            NESTED.set(within + 1);
            Self
        })
    }
}

impl Drop for Nested {
    fn drop(&mut self) {
        NESTED.set(NESTED.get() - 1);
    }
}

/// The text of an error without its causes. `kind`: with the phrase for its kind.
struct Text<'a> {
    error: &'a Error,
    kind: bool,
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.error.0;
        for place in inner.places.iter().rev() {
            write!(f, "{place}: ")?;
        }
        match (&inner.message, self.error.cause()) {
            (Some(message), _) if self.kind && inner.kind != ErrorKind::Operator => {
                write!(f, "{}: {message}", inner.kind.phrase())?;
            }
            (Some(message), _) => f.write_str(message)?,
            (None, Some(cause)) => match Nested::enter() {
                Some(_nested) => write!(f, "{cause}")?,
                None => f.write_str(NOT_DISPLAYED)?,
            },
            (None, None) => f.write_str(inner.kind.phrase())?,
        }
        f.write_str(&inner.note)
    }
}

/// `{}`: the place and the message. `{:#}`: also the causes.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Text { error: self, kind: true }.fmt(f)?;
        if f.alternate() {
            for (displayed, cause) in (1..).zip(self.causes()) {
                if displayed == MAX_DISPLAYED {
                    return write!(f, ": {NOT_DISPLAYED}");
                }
                write!(f, ": {cause}")?;
            }
        }
        Ok(())
    }
}

/// The text for a user, since `main() -> Result<()>` prints errors with `Debug`: the causes are listed below the error.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        let mut causes = self.causes().take(MAX_DISPLAYED).enumerate().peekable();
        if causes.peek().is_some() {
            f.write_str("\n\nCaused by:")?;
        }
        let several = self.causes().nth(1).is_some();
        for (at, cause) in causes {
            let text = match at + 1 {
                MAX_DISPLAYED => NOT_DISPLAYED.into(),
                _ => cause.to_string(),
            };
            match several {
                true => write!(f, "\n{at:>5}: {}", text.replace('\n', "\n       "))?,
                false => write!(f, "\n    {}", text.replace('\n', "\n    "))?,
            }
        }
        Ok(())
    }
}

/// The cause. If this error displays the cause's text as its own, the cause's source: no text is in the chain twice.
impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let cause = self.cause()?;
        match (&self.0.message, Nested::enter()) {
            (None, Some(_nested)) => cause.source(),
            _ => Some(cause),
        }
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
    fn advice_follows_the_text() {
        let with = Error::new(ErrorKind::OutOfMemory, "asked for 8 bytes").advise("wait");
        assert_eq!(with.to_string(), "out of memory: asked for 8 bytes; wait");
        let wrapped = Error::other("asked for 8 bytes").advise("wait");
        assert_eq!(format!("{wrapped:#}"), "asked for 8 bytes; wait");
    }

    #[test]
    fn the_fault_comes_before_the_work_that_is_lost_with_its_device() {
        let fault =
            Error::new(ErrorKind::DeviceLost, "kernel `k` on stream `s` failed").because("trapped").at("cuda:0");
        let loss = fault.into_loss("unfinished work on: `s`").at("operator `o`").noticed_by("operator `p`");
        let wanted = "operator `o`: device lost: cuda:0: kernel `k` on stream `s` failed; unfinished work on: `s` \
                      (noticed by operator `p`)";
        assert_eq!(loss.to_string(), wanted);
        assert_eq!(format!("{loss:#}"), format!("{wanted}: trapped"));
    }

    /// An error of a user's, with a cause.
    #[derive(Debug)]
    struct Outer(std::io::Error);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("outer")
        }
    }

    impl StdError for Outer {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn a_cause_of_a_wrapped_error_does_not_replace_its_text() {
        let error = Error::other(std::io::Error::other("disk on fire")).because("second");
        assert_eq!(error.to_string(), "disk on fire");
        assert_eq!(format!("{error:#}"), "disk on fire: second");
    }

    #[test]
    fn the_text_of_a_wrapped_error_is_in_the_chain_once() {
        let error = Error::other(Outer(std::io::Error::other("inner"))).at("operator `o`");
        assert_eq!(error.to_string(), "operator `o`: outer");
        assert_eq!(format!("{error:#}"), "operator `o`: outer: inner");
        assert_eq!(format!("{error:?}"), "operator `o`: outer\n\nCaused by:\n    inner");
        assert_eq!(error.source().unwrap().to_string(), "inner");
        assert!(error.downcast_ref::<Outer>().is_some() && error.downcast_ref::<std::io::Error>().is_some());

        let error = Error::new(ErrorKind::Setup, "two\nlines").because(error);
        assert_eq!(error.to_string(), "invalid setup: two\nlines");
        assert_eq!(format!("{error:#}"), "invalid setup: two\nlines: operator `o`: outer: inner");
        let wanted = "invalid setup: two\nlines\n\nCaused by:\n    0: operator `o`: outer\n    1: inner";
        assert_eq!(format!("{error:?}"), wanted);
        assert!(error.downcast_ref::<Outer>().is_some() && error.downcast_ref::<std::io::Error>().is_some());
        let error = Error::new(ErrorKind::Closed, "it").because("a\nb");
        assert_eq!(format!("{error:?}"), "closed: it\n\nCaused by:\n    a\n    b");
    }
}
