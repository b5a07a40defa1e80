//! [`Message`]: a value that travels between operators.

use super::{event_names::EventNames, pool::RawEnvelope};
use crate::stream::Ticket;

/// A value that travels between operators.
///
/// Implemented for numbers, strings, byte strings and [`Envelope`](crate::Envelope), and for vectors, boxes, options, tuples and
/// arrays of messages. [`Host`] turns any other host data into a message. Derive it for your own types, and mark the
/// fields that hold envelopes so that the hub finds and moves them:
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
/// A message may also carry named events, which are points in the work of streams. A reader that has `#[input(event =
/// "decoded")]` does not run before that event has passed.
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
/// A message also has the events of the messages within it: those of the elements of a list or a tuple, and those of
/// fields that are marked `#[envelope]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot travel between operators",
    label = "not a `Message`",
    note = "derive it: `#[derive(wakeline::Message)]`; for a type of another crate, wrap it: `wakeline::Host<{Self}>`"
)]
pub trait Message: Send + 'static {
    /// Whether the message can contain envelopes, which a hub has to copy.
    const CARRIES_ENVELOPES: bool = false;

    /// Size in bytes of one element of its envelopes.
    #[doc(hidden)]
    const ELEMENT_BYTES: usize = 1;

    /// Calls `visit` with every envelope of the message.
    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        let _ = visit;
    }

    /// Whether [`envelopes`](Self::envelopes) runs only code of this crate and may therefore be called while a lock
    /// is held. Set by the derive macro. A manual implementation leaves it at `false`, and its envelopes are not
    /// counted when a stall is described.
    #[doc(hidden)]
    const VISITS_UNDER_LOCK: bool = false;

    /// The names of the events that the message can carry. A port cannot wait for any other event.
    const EVENTS: &'static [&'static str] = &[];

    /// Calls `visit` with every event of this name in the message.
    fn events(&mut self, name: &str, visit: &mut dyn FnMut(&mut Ticket)) {
        let _ = (name, visit);
    }

    /// The size of the message in bytes, for the report. For an envelope it is the valid part; for a string, a byte
    /// string, a `Vec` or an `Arc` it is the data. For a derived message it is its size on the stack, plus the data
    /// of those fields that are one of the above or a `Box`, plus the sizes of its fields that are marked
    /// `#[envelope]`. Data behind a second pointer, such as that of the vectors in a vector, is not counted;
    /// implement the trait manually where that matters. The method is called several times for each message, so it
    /// should be cheap.
    fn size_in_bytes(&self) -> usize {
        size_of_val(self)
    }

    /// The part of [`size_in_bytes`](Self::size_in_bytes) that is not on the stack, for a message that contains this
    /// one as a field.
    #[doc(hidden)]
    fn heap_bytes(&self) -> usize {
        self.size_in_bytes().saturating_sub(size_of_val(self))
    }

    /// Whether the message is exactly one envelope. Only such messages may cross the boundary of a section that is
    /// replayed.
    #[doc(hidden)]
    const IS_ENVELOPE: bool = false;

    /// Returns the message's one envelope, if [`IS_ENVELOPE`](Self::IS_ENVELOPE).
    #[doc(hidden)]
    fn into_envelope(self) -> Option<RawEnvelope>
    where
        Self: Sized,
    {
        None
    }

    /// Makes a message from an envelope.
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
/// A hub does not search it for envelopes: an [`Envelope`](crate::Envelope) in it is not copied. While such an envelope is outside its flow,
/// the flow assumes that it will not return, and may [stall](crate::ErrorKind::Stalled).
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

/// A hub does not search shared data for envelopes: an [`Envelope`](crate::Envelope) in it is treated like one in a [`Host`].
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

    /// Excludes the heap data of the contained value: it may be a list of any length in which each node contains the
    /// next.
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

/// The sizes come from user code and may be any number.
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
