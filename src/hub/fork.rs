//! [`Fork`]: makes several messages of one, for an output with several readers.
//!
//! Host data is cloned. An envelope belongs exclusively to its reader, so each further reader gets an envelope of its
//! own hub. The [`Copier`] fills it on the hub's copy stream, directly at that reader's location, and orders the copy
//! by the tracked uses of both envelopes. Sending does not wait for the copy. The exception is an envelope that is
//! copied from host to host: the sending thread copies it, once the data is there.
//!
//! ```text
//!   send ──> m ─┬─ fork ──> m' ──> hub `a.out -> b.in`
//!               ├─ fork ──> m''──> hub `a.out -> c.in`
//!               └─────────> m  ──> hub `a.out -> d.in`     one reader gets the message itself
//! ```

use std::{fmt, sync::Arc};

use super::{
    Envelope, Host, Message,
    pool::{Pool, RawEnvelope},
};
use crate::{
    error::{Error, ErrorKind, Result},
    memory::{BufferState, HostAccess, Plain, transfer},
    stream::Stream,
};

/// A message that can be sent to several readers.
///
/// `#[derive(Message)]` implements it where possible: fields that hold envelopes are forked, all others are cloned.
/// For a [`Message`] that is implemented manually it is usually:
///
/// ```
/// use wakeline::{Fork, Message, Result, hub::Copier};
///
/// #[derive(Clone)]
/// struct Word(String);
///
/// impl Message for Word {}
///
/// impl Fork for Word {
///     fn fork(&self, _copier: &mut Copier<'_>) -> Result<Self> {
///         Ok(self.clone())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot go to several readers",
    label = "only one reader can have it",
    note = "derive it: `#[derive(wakeline::Message)]`, with fields that are `Clone`; or share it: `std::sync::Arc<{Self}>`"
)]
pub trait Fork: Message + Sized {
    /// Makes another message of this one, for another reader.
    ///
    /// # Errors
    /// Any error of an envelope's copy.
    fn fork(&self, copier: &mut Copier<'_>) -> Result<Self>;

    /// Forks each of these messages; for plain data this is a single copy.
    #[doc(hidden)]
    fn fork_all(all: &[Self], copier: &mut Copier<'_>) -> Result<Vec<Self>> {
        all.iter().map(|message| message.fork(copier)).collect()
    }
}

/// The signature of [`Fork::fork`].
pub(crate) type ForkFn<M> = fn(&M, &mut Copier<'_>) -> Result<M>;

/// Makes the copies of a message's envelopes for one more reader.
pub struct Copier<'a> {
    hub: &'a str,
    arrival_pool: Option<&'a Arc<Pool>>,
    copy_stream: Option<&'a Stream>,
    /// The host access that must complete before a copy on the host is possible.
    pub(super) pending: Option<HostAccess>,
}

impl<'a> Copier<'a> {
    pub(super) fn new(hub: &'a str, arrival_pool: Option<&'a Arc<Pool>>, copy_stream: Option<&'a Stream>) -> Self {
        Self { hub, arrival_pool, copy_stream, pending: None }
    }

    fn copy(&mut self, from: &RawEnvelope) -> Result<RawEnvelope> {
        let wrong = |what: String| Error::new(ErrorKind::Usage, what).at(format!("hub `{}`", self.hub));
        let Some(arrivals) = self.arrival_pool else {
            let why = "a message has envelopes, but its `Message::CARRIES_ENVELOPES` is `false`: set it to `true`";
            return Err(wrong(why.into()));
        };
        if from.bytes() > arrivals.bytes() {
            return Err(wrong(arrivals.too_small_for(from.bytes())));
        }
        let Some(mut to) = arrivals.take()? else {
            return Err(wrong(
                "a message's `Fork::fork` copies more envelopes than its `Message::envelopes` visits: fix one of the two".into(),
            ));
        };
        to.set_bytes(from.bytes());
        to.ticket.clone_from(&from.ticket);
        if from.memory().is_host() && to.memory().is_host() {
            return self.copy_here(from, to);
        }
        let Some(copies) = self.copy_stream else {
            let place = from.memory().location();
            return Err(wrong(format!(
                "a message has an envelope on {place}, but its sender is on another device: send an envelope that is on the sender's device"
            )));
        };
        transfer::copy(copies, from.memory(), to.memory_mut(), from.bytes())?;
        // Committed now, so that later users of the envelope wait for this copy and for no work after it.
        to.memory_mut().commit()?;
        Ok(to)
    }

    /// Copies on the host; both envelopes are there.
    fn copy_here(&mut self, from: &RawEnvelope, mut to: RawEnvelope) -> Result<RawEnvelope> {
        let (written, unused) = (from.memory().state()?.is_available(), to.memory().state()?);
        if !written {
            self.pending = Some(from.memory().host_access(false));
        } else if unused != BufferState::Idle {
            self.pending = Some(to.memory().host_access(true));
        } else {
            let bytes = from.bytes();
            to.memory_mut().host_slice_mut()?[..bytes].copy_from_slice(&from.memory().host_slice()?[..bytes]);
            return Ok(to);
        }
        Err(Error::new(ErrorKind::Usage, "an envelope is still in use"))
    }
}

impl fmt::Debug for Copier<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copier").field("hub", &self.hub).finish_non_exhaustive()
    }
}

impl<T: Plain> Fork for Envelope<T> {
    fn fork(&self, copier: &mut Copier<'_>) -> Result<Self> {
        copier.copy(self.raw()).map(Self::of_raw)
    }
}

macro_rules! cloned {
    ($($type:ty),* $(,)?) => {
        $(impl Fork for $type {
            #[inline]
            fn fork(&self, _copier: &mut Copier<'_>) -> Result<Self> {
                Ok(self.clone())
            }

            fn fork_all(all: &[Self], _copier: &mut Copier<'_>) -> Result<Vec<Self>> {
                Ok(all.to_vec())
            }
        })*
    };
}

cloned!(
    (),
    bool,
    char,
    u8,
    i8,
    u16,
    i16,
    u32,
    i32,
    u64,
    i64,
    u128,
    i128,
    usize,
    isize,
    f32,
    f64,
    std::time::Instant,
    std::time::SystemTime,
    std::time::Duration,
    std::path::PathBuf,
    String,
    &'static str,
    bytes::Bytes,
);

impl<T: Clone + Send + 'static> Fork for Host<T> {
    fn fork(&self, _copier: &mut Copier<'_>) -> Result<Self> {
        Ok(self.clone())
    }
}

impl<T: Send + Sync + ?Sized + 'static> Fork for Arc<T> {
    fn fork(&self, _copier: &mut Copier<'_>) -> Result<Self> {
        Ok(self.clone())
    }
}

impl<M: Fork> Fork for Vec<M> {
    fn fork(&self, copier: &mut Copier<'_>) -> Result<Self> {
        M::fork_all(self, copier)
    }
}

impl<M: Fork> Fork for Box<M> {
    fn fork(&self, copier: &mut Copier<'_>) -> Result<Self> {
        (**self).fork(copier).map(Box::new)
    }
}

impl<M: Fork> Fork for Option<M> {
    fn fork(&self, copier: &mut Copier<'_>) -> Result<Self> {
        self.as_ref().map(|message| message.fork(copier)).transpose()
    }
}

impl<M: Fork, const N: usize> Fork for [M; N] {
    fn fork(&self, copier: &mut Copier<'_>) -> Result<Self> {
        let forks = M::fork_all(self, copier)?;
        forks.try_into().map_err(|_| Error::internal("the fork of an array has another length"))
    }
}

macro_rules! tuples {
    ($($name:ident),*) => {
        impl<$($name: Fork),*> Fork for ($($name,)*) {
            #[allow(non_snake_case)]
            fn fork(&self, copier: &mut Copier<'_>) -> Result<Self> {
                let ($($name,)*) = self;
                Ok(($($name.fork(copier)?,)*))
            }
        }
    };
}

tuples!(A);
tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);
