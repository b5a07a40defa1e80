//! [`SendError`] and [`TrySendError`]: a message that was not sent, and the reason.

use std::{
    error::Error as StdError,
    fmt,
    sync::{Mutex, PoisonError},
};

use crate::{
    error::{Error, ErrorKind, SendFailure},
    sync::discard,
};

/// A message that was not sent, and the reason.
///
/// `?` converts it into the [`Error`], which drops the message.
///
/// ```
/// use wakeline::prelude::*;
///
/// #[derive(Ports)]
/// struct ForwardPorts {
///     #[input]
///     jobs: Input<String>,
///     #[output]
///     work: Output<String>,
/// }
///
/// /// Forwards jobs, and keeps those that its reader did not take.
/// struct Forward(Vec<String>);
///
/// impl Operator for Forward {
///     type Ports = ForwardPorts;
///
///     async fn compute(&mut self, ports: &mut ForwardPorts, cx: &mut Cx) -> Result<()> {
///         if let Err(unsent) = ports.work.send(ports.jobs.take()?).await {
///             let error = unsent.error().clone();
///             self.0.extend(unsent.into_message());
///             return Err(error);
///         }
///         Ok(())
///     }
/// }
/// ```
pub struct SendError<M> {
    /// Never locked: it makes the error `Sync` for every message, so that `?` converts it into boxed errors, too.
    message: Mutex<Option<M>>,
    /// The source, by which [`Error::other`] finds the reason in a boxed `SendError`.
    error: SendFailure,
}

impl<M> SendError<M> {
    #[cold]
    pub(crate) fn new(message: Option<M>, error: Error) -> Self {
        Self { message: Mutex::new(message), error: SendFailure(error) }
    }

    /// The reason.
    pub fn error(&self) -> &Error {
        &self.error.0
    }

    /// The message. `None` if it was lost on the way to the reader's device, or if one of several readers has received
    /// it.
    pub fn into_message(self) -> Option<M> {
        self.message.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reason, without the message.
    pub fn into_error(self) -> Error {
        self.error.0
    }
}

/// A destructor of the message that panics is contained.
impl<M: 'static> From<SendError<M>> for Error {
    #[cold]
    fn from(unsent: SendError<M>) -> Self {
        let SendError { message, error } = unsent;
        discard(message.into_inner().unwrap_or_else(PoisonError::into_inner));
        error.0
    }
}

impl<M> fmt::Display for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the message was not sent")?;
        if f.alternate() { write!(f, ": {:#}", self.error.0) } else { Ok(()) }
    }
}

impl<M> fmt::Debug for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error.0, f)
    }
}

impl<M> StdError for SendError<M> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.error)
    }
}

/// A message that was not sent at once, and the reason.
///
/// `?` converts it into an [`Error`], which drops the message; for [`Full`](Self::Full) the error's kind is
/// [`Usage`](ErrorKind::Usage).
pub enum TrySendError<M> {
    /// There is no room now: a later send may succeed.
    Full(M),
    /// Sending has failed.
    Failed(SendError<M>),
}

impl<M> TrySendError<M> {
    /// True if there is no room now.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full(_))
    }

    /// The message: see [`SendError::into_message`].
    pub fn into_message(self) -> Option<M> {
        match self {
            Self::Full(message) => Some(message),
            Self::Failed(unsent) => unsent.into_message(),
        }
    }
}

const FULL: &str = "there is no room for the message: wait for it with `send`, or check for `TrySendError::Full`";

impl<M> From<SendError<M>> for TrySendError<M> {
    fn from(unsent: SendError<M>) -> Self {
        Self::Failed(unsent)
    }
}

/// A destructor of the message that panics is contained.
impl<M: 'static> From<TrySendError<M>> for Error {
    #[cold]
    fn from(unsent: TrySendError<M>) -> Self {
        match unsent {
            TrySendError::Full(message) => {
                discard(message);
                Self::new(ErrorKind::Usage, FULL)
            }
            TrySendError::Failed(unsent) => unsent.into(),
        }
    }
}

impl<M> fmt::Display for TrySendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(_) => f.write_str(FULL),
            Self::Failed(unsent) => unsent.fmt(f),
        }
    }
}

impl<M> fmt::Debug for TrySendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(_) => f.write_str("Full(..)"),
            Self::Failed(unsent) => f.debug_tuple("Failed").field(unsent).finish(),
        }
    }
}

impl<M> StdError for TrySendError<M> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Full(_) => None,
            Self::Failed(unsent) => unsent.source(),
        }
    }
}
