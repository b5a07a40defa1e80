//! One error type for the whole of wakeline.
//!
//! An [`Error`] says what went wrong ([`kind`](Error::kind)), where (operator, port or device), what was being done,
//! and why (its [`source`](std::error::Error::source), back to the original cause). It is opaque: ask it with its
//! predicates, so that more can be said later without breaking anybody.
//!
//! | kind | what a user does about it |
//! |---|---|
//! | [`NoDevice`](ErrorKind::NoDevice) | choose another device, install a driver, or run on the emulated one |
//! | [`OutOfMemory`](ErrorKind::OutOfMemory) | fewer or smaller envelopes; the message has the numbers |
//! | [`DeviceLost`](ErrorKind::DeviceLost) | the work that was there is gone: start again in a new process |
//! | [`Race`](ErrorKind::Race) | two accesses that nothing orders: add what the message says is missing |
//! | [`InvalidMemory`](ErrorKind::InvalidMemory) | memory used after it was freed, or read before anything wrote it: the message says which |
//! | [`Kernel`](ErrorKind::Kernel) | mend the kernel's source; the compiler's log is in the message |
//! | [`Setup`](ErrorKind::Setup) | a flow, or a hub by hand, was put together or configured wrongly: the message says how it is right |
//! | [`Usage`](ErrorKind::Usage) | a call that cannot be carried out as it was made |
//! | [`Stalled`](ErrorKind::Stalled) | operators wait for each other; the message says who for what |
//! | [`Operator`](ErrorKind::Operator) | an operator's own error: look at its cause |
//! | [`Panicked`](ErrorKind::Panicked) | an operator panicked |
//! | [`Closed`](ErrorKind::Closed) | the other end is gone |
//! | [`Unanswered`](ErrorKind::Unanswered) | an operator dropped a request: the message says which; answer it, or refuse it with `Reply::fail` |
//! | [`Cancelled`](ErrorKind::Cancelled) | the flow was aborted |
//! | [`Driver`](ErrorKind::Driver) | a driver call failed for another reason: its name and code are there |

mod caller;

use std::{
    any::Any,
    cell::Cell,
    error::Error as StdError,
    fmt,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    task::Poll,
};

pub(crate) use caller::CallerErrors;

use crate::sync::discard_cause;

/// The result of a wakeline call.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// A user's error, whose destructor is the user's, too: dropped wherever the last copy of an error is.
struct Cause(Option<Box<dyn StdError + Send + Sync + 'static>>);

impl Drop for Cause {
    fn drop(&mut self) {
        discard_cause(self.0.take());
    }
}

/// What kind of failure an [`Error`] is. More kinds may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no such device, or no driver for it.
    NoDevice,
    /// A device or the host has no memory left for what was asked.
    OutOfMemory,
    /// A fault ended the device: all of its work is lost and it takes no more.
    DeviceLost,
    /// The race checker found two accesses that nothing orders.
    Race,
    /// The race checker found memory that is used after it was freed, or read before anything was written to it.
    InvalidMemory,
    /// A kernel could not be compiled, loaded or found.
    Kernel,
    /// A flow, or something without one, was put together or configured wrongly. Of a flow nothing has run.
    Setup,
    /// A call that cannot be carried out as it was made.
    Usage,
    /// Nothing in the flow can move, though not all is done. An envelope that is outside of the flow, and not in a message
    /// that shows it ([`Host`](crate::Host), [`Arc`]), does not count as something that may still move.
    Stalled,
    /// An operator returned an error of its own.
    Operator,
    /// An operator panicked, or other code of the user's that a flow calls, such as a condition. A kernel's Rust body that panics is a
    /// fault of its emulated device: [`DeviceLost`](Self::DeviceLost).
    Panicked,
    /// The other end of a port or hub is gone.
    Closed,
    /// A request was dropped without an answer.
    Unanswered,
    /// The flow was aborted before it ended.
    Cancelled,
    /// A driver call failed.
    Driver,
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
            ErrorKind::Setup => "wrong setup",
            ErrorKind::Usage => "wrong use",
            ErrorKind::Stalled => "stalled",
            ErrorKind::Operator => "operator failed",
            ErrorKind::Panicked => "panicked",
            ErrorKind::Closed => "closed",
            ErrorKind::Unanswered => "unanswered",
            ErrorKind::Cancelled => "cancelled",
            ErrorKind::Driver => "driver call failed",
        }
    }
}

/// As an error without a message says it: `device lost`.
impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.phrase())
    }
}

/// What went wrong, where, and why.
///
/// ```
/// use wakeline::{Error, ErrorKind};
///
/// let error = Error::from(std::io::Error::other("disk on fire")).at("operator `write`");
/// assert_eq!(error.kind(), ErrorKind::Operator);
/// assert!(error.downcast_ref::<std::io::Error>().is_some());
/// assert_eq!(error.to_string(), "operator `write`: disk on fire");
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    /// Where, outermost last: device, port, operator.
    places: Vec<String>,
    message: Option<String>,
    /// All readers of an operator's output have ended.
    reader_gone: bool,
    /// Shared: a lost device answers every call with the same cause.
    cause: Option<Arc<Cause>>,
    /// A value of a higher layer's, by its type: the report of the flow that failed.
    attachment: Option<Arc<dyn Any + Send + Sync>>,
}

impl Error {
    /// A failure of `kind`, told in one line.
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

    /// An output's readers have ended.
    pub(crate) fn reader_gone(message: impl Into<String>) -> Self {
        let mut error = Self::new(ErrorKind::Closed, message);
        error.0.reader_gone = true;
        error
    }

    /// An output's readers have ended, and nothing else is wrong.
    pub(crate) fn is_reader_gone(&self) -> bool {
        self.0.reader_gone
    }

    /// An operator's own error: any error, kept as the cause.
    ///
    /// `?` does this by itself for [`std::io::Error`] and boxed errors.
    pub fn other(cause: impl Into<Box<dyn StdError + Send + Sync + 'static>>) -> Self {
        let cause = cause.into();
        // A wakeline error that went through a box is itself again.
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

    /// The same error with a place put before what it said: an operator, a port, a device.
    #[must_use]
    pub fn at(mut self, place: impl Into<String>) -> Self {
        let place = place.into();
        if self.0.places.last() != Some(&place) {
            self.0.places.push(place);
        }
        self
    }

    /// The same error, and what to do about it.
    pub(crate) fn advise(mut self, advice: &str) -> Self {
        if let Some(message) = &mut self.0.message {
            *message += "; ";
            *message += advice;
        }
        self
    }

    /// The same error, which was met here and is not of this place's making.
    pub(crate) fn noticed_by(mut self, place: &str) -> Self {
        let noticed = format!(" (noticed by {place})");
        match &mut self.0.message {
            Some(message) if message.contains("(noticed by ") => {}
            Some(message) => *message += &noticed,
            none => *none = Some(noticed.trim_start().into()),
        }
        self
    }

    /// The same error with a cause below it. In a chain of causes the text has the first 64 errors;
    /// [`source`](std::error::Error::source) has all.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn StdError + Send + Sync + 'static>>) -> Self {
        self.0.cause = Some(Arc::new(Cause(Some(cause.into()))));
        self
    }

    /// The same error with a value attached, in place of the one before.
    pub(crate) fn attach<T: Send + Sync + 'static>(mut self, value: T) -> Self {
        self.0.attachment = Some(Arc::new(value));
        self
    }

    /// The attached value, if it is a `T`.
    pub(crate) fn attachment<T: 'static>(&self) -> Option<&T> {
        self.0.attachment.as_deref()?.downcast_ref()
    }

    /// A failure of the same kind for a caller outside of the flow. It has this message alone: places and causes name
    /// operators, streams, addresses and files, and belong to the log and to the flow's own error.
    pub(crate) fn for_caller(&self, message: &str) -> Self {
        Self::new(self.kind(), message)
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// True where a fault has ended a device.
    pub fn is_device_lost(&self) -> bool {
        self.0.kind == ErrorKind::DeviceLost
    }

    /// True where memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        self.0.kind == ErrorKind::OutOfMemory
    }

    /// True where the race checker spoke.
    pub fn is_race(&self) -> bool {
        self.0.kind == ErrorKind::Race
    }

    /// True where there is no such device or no driver for it.
    pub fn is_no_device(&self) -> bool {
        self.0.kind == ErrorKind::NoDevice
    }

    /// True where the flow was aborted.
    pub fn is_cancelled(&self) -> bool {
        self.0.kind == ErrorKind::Cancelled
    }

    /// True where nothing in the flow could move.
    pub fn is_stalled(&self) -> bool {
        self.0.kind == ErrorKind::Stalled
    }

    /// True where the other end of a port or hub is gone.
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

    /// The same failure for one more listener. The cause is shared.
    #[must_use]
    pub fn again(&self) -> Self {
        Self(Box::new(Inner {
            kind: self.0.kind,
            places: self.0.places.clone(),
            message: self.0.message.clone(),
            reader_gone: self.0.reader_gone,
            cause: self.0.cause.clone(),
            attachment: self.0.attachment.clone(),
        }))
    }
}

/// A future's output, or what it panicked with.
pub(crate) async fn catch_panic<F: Future>(future: F) -> std::thread::Result<F::Output> {
    let mut future = pin!(future);
    poll_fn(|task| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(task))) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// What a panic said. Its payload may be of any type and is dropped here: one whose own drop panics is forgotten.
pub(crate) fn said(panic: Box<dyn Any + Send>) -> String {
    let said = match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(said), _) => (*said).to_owned(),
        (_, Some(said)) => said.clone(),
        _ => "a panic without a message".to_owned(),
    };
    let dropping = catch_unwind(AssertUnwindSafe(move || drop(panic)));
    // The same may be true of this one's.
    dropping.unwrap_or_else(std::mem::forget);
    said
}

/// So many errors of a chain of causes are displayed, the first one included.
const MOST_DISPLAYED: usize = 64;

thread_local! {
    /// Errors that this thread is displaying, each within the one before.
    static DISPLAYED: Cell<usize> = const { Cell::new(0) };
}

/// One of those.
struct Displayed;

impl Displayed {
    /// `None` if there are too many.
    fn enter() -> Option<Self> {
        let within = DISPLAYED.get();
        (within < MOST_DISPLAYED).then(|| {
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(_displayed) = Displayed::enter() else { return f.write_str("further causes are not displayed") };
        for place in self.0.places.iter().rev() {
            write!(f, "{place}: ")?;
        }
        let cause = self.source();
        match (&self.0.message, cause) {
            (Some(message), _) if self.0.kind == ErrorKind::Operator => write!(f, "{message}")?,
            (Some(message), _) => write!(f, "{}: {message}", self.0.kind.phrase())?,
            (None, Some(cause)) => return write!(f, "{cause}"),
            (None, None) => write!(f, "{}", self.0.kind.phrase())?,
        }
        if let Some(cause) = cause {
            write!(f, ": {cause}")?;
        }
        Ok(())
    }
}

/// As [`Display`](fmt::Display): `main() -> Result<()>` prints this, and a person reads it.
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
