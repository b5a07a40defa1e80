//! Hubs: async channels of device-resident envelopes.
//!
//! A hub joins an output to an input. It is a queue and, where the messages are envelopes, the owner of those
//! envelopes: it allocates them once, lends them to the writer, copies what was written to where the reader is, and
//! takes them back.
//!
//! ```text
//!              writer's side                       reader's side
//!   pool ──> blank ──> send ──> [ queue: copy ──> envelope ] ──> take
//!     ^                            (copy stream)     |             |
//!     └──── home, when the copy has read it ─────────┘      home ──┘ after its last use
//! ```
//!
//! The copy is enqueued as soon as there is an envelope to copy to, before the reader asks: while the reader works on
//! one, the next is on its way. Only the valid part is copied. An envelope that the reader passes on into a further hub
//! still belongs to this one, and goes home after its last reader there.
//!
//! A [`ChunkHub`] is the other kind: its chunks are seen by several links, at several places, that produce, consume, peek at
//! and modify them. It needs no flow.

pub(crate) mod abroad;
pub(crate) mod baggage;
pub(crate) mod carried;
pub(crate) mod chunks;
mod envelope;
pub(crate) mod fan;
mod fork;
mod free_list;
pub(crate) mod kept;
mod kind;
pub(crate) mod link;
mod metadata;
pub(crate) mod outlet;
pub(crate) mod pool;
pub(crate) mod queue;
pub(crate) mod receiver;
pub(crate) mod reply;
pub(crate) mod sender;
pub(crate) mod settle;
mod stamps;
#[cfg(test)]
mod tests;
mod waking;

pub use baggage::Since;
#[doc(hidden)]
pub use chunks::DestinationName;
pub use chunks::{
    Chunk, ChunkHub, ChunkHubBuilder, Consumer, Destination, Link, Modifier, Peeker, Producer, Unsent, roles as role,
};
pub use envelope::{Envelope, RawEnvelope};
pub use fan::Outcome;
pub(crate) use fork::ForkFn;
pub use fork::{Copier, Fork};
pub(crate) use kind::{AgainFn, DEFAULT_CAPACITY, at_least_one};
pub use kind::{Hub, HubKind, HubOf, Latest};
pub use metadata::{MergePolicy, Metadata};
pub use reply::Reply;

use crate::{condition::EventNames, stream::Ticket};

/// What travels between operators.
///
/// Implemented for numbers, strings, byte strings and [`Envelope`], and for vectors, boxes, options, tuples and arrays of
/// messages. [`Host`] makes one of anything else that lies on the host. Derive it for your own types; mark fields that hold envelopes, so that the hub finds and moves them:
///
/// ```
/// use wakeline::{Envelope, Message};
///
/// #[derive(Message)]
/// struct Frame {
///     number: u64,
///     #[envelope]
///     pixels: Envelope<u8>,
/// }
/// ```
///
/// A message may also carry events, points in the work of streams, by name: a reader that has
/// `#[input(event = "decoded")]` does not run before that one has passed.
///
/// ```
/// use wakeline::{Envelope, Message, stream::Event};
///
/// #[derive(Message)]
/// struct Frame {
///     #[envelope]
///     pixels: Envelope<u8>,
///     /// After it the pixels are there; the thumbnails come later.
///     #[event]
///     decoded: Event,
/// }
/// ```
///
/// The events of the messages in a message are its own: of a list's, a tuple's, and of fields that are marked `#[envelope]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot travel between operators",
    label = "not a `Message`",
    note = "derive it: `#[derive(wakeline::Message)]`; for a type of another crate, wrap it: `wakeline::Host<{Self}>`"
)]
pub trait Message: Send + 'static {
    /// Whether there is anything for a hub to move.
    const CARRIES_ENVELOPES: bool = false;

    /// Bytes of one element of its envelopes.
    #[doc(hidden)]
    const ELEMENT_BYTES: usize = 1;

    /// Shows every envelope in it.
    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        let _ = visit;
    }

    /// Whether [`envelopes`](Self::envelopes) runs code of the crate only, so that it may be called while a lock is held. For
    /// the derive macro: an implementation by hand leaves it at `false`, and is not counted where a stall is described.
    #[doc(hidden)]
    const VISITS_UNDER_LOCK: bool = false;

    /// The names of the events that it can carry: no port waits for another.
    const EVENTS: &'static [&'static str] = &[];

    /// Shows every event of that name in it; none where it carries none this time.
    fn events(&mut self, name: &str, visit: &mut dyn FnMut(&mut Ticket)) {
        let _ = (name, visit);
    }

    /// Its size, for the report. Of an envelope it is the valid part; of a string, a byte string, a `Vec` or an `Arc` the data; of
    /// a derived message what lies on the stack, the data of its fields that are one of those or a `Box`, and the sizes
    /// of its fields that are marked `#[envelope]`. What lies behind a further pointer, as the data of the vectors in a
    /// vector, is not counted: where that matters, implement the trait by hand. Called several times for each message, so
    /// it should cost little.
    fn size_in_bytes(&self) -> usize {
        size_of_val(self)
    }

    /// How much of that does not lie on the stack, for a message that it is a field of.
    #[doc(hidden)]
    fn heap_bytes(&self) -> usize {
        self.size_in_bytes().saturating_sub(size_of_val(self))
    }

    /// It is an envelope and nothing else: such messages may cross the edge of a section that is replayed.
    #[doc(hidden)]
    const IS_ENVELOPE: bool = false;

    /// That envelope.
    #[doc(hidden)]
    fn into_envelope(self) -> Option<RawEnvelope>
    where
        Self: Sized,
    {
        None
    }

    /// The message that this envelope is.
    #[doc(hidden)]
    fn of_envelope(envelope: RawEnvelope) -> Option<Self>
    where
        Self: Sized,
    {
        drop(envelope);
        None
    }
}

/// Any host data as a message.
///
/// A hub sees nothing of what is in it. So an [`Envelope`] in it is copied nowhere; and while it is outside of its flow, the
/// flow takes it for one that does not come home, and may [stall](crate::ErrorKind::Stalled).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Host<T>(pub T);

impl<T: Send + 'static> Message for Host<T> {}

macro_rules! host_messages {
    ($($type:ty),* $(,)?) => { $(impl Message for $type {})* };
}

host_messages!(
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
);

impl Message for String {
    fn size_in_bytes(&self) -> usize {
        self.len()
    }

    fn heap_bytes(&self) -> usize {
        self.size_in_bytes()
    }
}

impl Message for &'static str {
    fn size_in_bytes(&self) -> usize {
        self.len()
    }

    fn heap_bytes(&self) -> usize {
        self.size_in_bytes()
    }
}

impl Message for bytes::Bytes {
    fn size_in_bytes(&self) -> usize {
        self.len()
    }

    fn heap_bytes(&self) -> usize {
        self.size_in_bytes()
    }
}

impl<M: Message> Message for Vec<M> {
    const CARRIES_ENVELOPES: bool = M::CARRIES_ENVELOPES;
    const VISITS_UNDER_LOCK: bool = M::VISITS_UNDER_LOCK;
    const EVENTS: &'static [&'static str] = M::EVENTS;

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        if M::CARRIES_ENVELOPES {
            self.iter_mut().for_each(|message| message.envelopes(visit));
        }
    }

    fn events(&mut self, name: &str, visit: &mut dyn FnMut(&mut Ticket)) {
        self.iter_mut().for_each(|message| message.events(name, visit));
    }

    fn size_in_bytes(&self) -> usize {
        if M::CARRIES_ENVELOPES { sum_of_sizes(self.iter().map(M::size_in_bytes)) } else { size_of_val(&**self) }
    }

    fn heap_bytes(&self) -> usize {
        self.size_in_bytes()
    }
}

/// A hub sees nothing of what is shared: an [`Envelope`] in it is as one in a [`Host`].
impl<T: Send + Sync + ?Sized + 'static> Message for std::sync::Arc<T> {
    fn size_in_bytes(&self) -> usize {
        size_of_val(&**self)
    }

    fn heap_bytes(&self) -> usize {
        self.size_in_bytes()
    }
}

impl<M: Message, const N: usize> Message for [M; N] {
    const CARRIES_ENVELOPES: bool = M::CARRIES_ENVELOPES;
    const VISITS_UNDER_LOCK: bool = M::VISITS_UNDER_LOCK;
    const EVENTS: &'static [&'static str] = M::EVENTS;

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        if M::CARRIES_ENVELOPES {
            self.iter_mut().for_each(|message| message.envelopes(visit));
        }
    }

    fn events(&mut self, name: &str, visit: &mut dyn FnMut(&mut Ticket)) {
        self.iter_mut().for_each(|message| message.events(name, visit));
    }

    fn size_in_bytes(&self) -> usize {
        if M::CARRIES_ENVELOPES { sum_of_sizes(self.iter().map(M::size_in_bytes)) } else { size_of_val(self) }
    }

    fn heap_bytes(&self) -> usize {
        sum_of_sizes(self.iter().map(M::heap_bytes))
    }
}

impl<M: Message> Message for Box<M> {
    const CARRIES_ENVELOPES: bool = M::CARRIES_ENVELOPES;
    const VISITS_UNDER_LOCK: bool = M::VISITS_UNDER_LOCK;
    const EVENTS: &'static [&'static str] = M::EVENTS;

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        (**self).envelopes(visit);
    }

    fn events(&mut self, name: &str, visit: &mut dyn FnMut(&mut Ticket)) {
        (**self).events(name, visit);
    }

    fn size_in_bytes(&self) -> usize {
        (**self).size_in_bytes()
    }

    /// Without what that has on the heap: it may be a list of any length, of which each part is in the one before.
    fn heap_bytes(&self) -> usize {
        size_of_val(&**self)
    }
}

impl<M: Message> Message for Option<M> {
    const CARRIES_ENVELOPES: bool = M::CARRIES_ENVELOPES;
    const VISITS_UNDER_LOCK: bool = M::VISITS_UNDER_LOCK;
    const EVENTS: &'static [&'static str] = M::EVENTS;

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        self.iter_mut().for_each(|message| message.envelopes(visit));
    }

    fn events(&mut self, name: &str, visit: &mut dyn FnMut(&mut Ticket)) {
        self.iter_mut().for_each(|message| message.events(name, visit));
    }

    fn size_in_bytes(&self) -> usize {
        self.as_ref().map_or(0, Message::size_in_bytes)
    }

    fn heap_bytes(&self) -> usize {
        self.as_ref().map_or(0, Message::heap_bytes)
    }
}

/// What a message says of itself may be any number.
fn sum_of_sizes(sizes: impl IntoIterator<Item = usize>) -> usize {
    sizes.into_iter().fold(0, usize::saturating_add)
}

macro_rules! tuple_messages {
    ($($name:ident),*) => {
        impl<$($name: Message),*> Message for ($($name,)*) {
            const CARRIES_ENVELOPES: bool = $($name::CARRIES_ENVELOPES ||)* false;
            const VISITS_UNDER_LOCK: bool = $((!$name::CARRIES_ENVELOPES || $name::VISITS_UNDER_LOCK) &&)* true;
            const EVENTS: &'static [&'static str] = const { &EventNames::of_all(&[$($name::EVENTS),*]) }.get();

            #[allow(non_snake_case)]
            fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
                let ($($name,)*) = self;
                $(if $name::CARRIES_ENVELOPES {
                    $name.envelopes(visit);
                })*
            }

            #[allow(non_snake_case)]
            fn events(&mut self, name: &str, visit: &mut dyn FnMut(&mut Ticket)) {
                let ($($name,)*) = self;
                $($name.events(name, visit);)*
            }

            #[allow(non_snake_case)]
            fn size_in_bytes(&self) -> usize {
                let ($($name,)*) = self;
                sum_of_sizes([$($name.size_in_bytes()),*])
            }

            #[allow(non_snake_case)]
            fn heap_bytes(&self) -> usize {
                let ($($name,)*) = self;
                sum_of_sizes([$($name.heap_bytes()),*])
            }
        }
    };
}

tuple_messages!(A);
tuple_messages!(A, B);
tuple_messages!(A, B, C);
tuple_messages!(A, B, C, D);

/// Why an envelope cannot be copied.
fn too_small(valid: usize, room: usize) -> String {
    format!("{valid} valid bytes do not fit into its envelopes of {room}: set `envelope_bytes`")
}
