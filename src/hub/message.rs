//! [`Message`]: a value that travels between operators.

use super::{event_names::EventNames, pool::RawEnvelope};
use crate::{memory::Plain, stream::Ticket};

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
/// A writer gets blank envelopes for its messages from its output, see [`Output::blank`](crate::Output::blank).
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

    /// Size in bytes of the largest element of its envelopes.
    #[doc(hidden)]
    const ELEMENT_BYTES: usize = 1;

    /// How many envelopes a message can have. A hub has by default enough of them for its messages.
    #[doc(hidden)]
    const ENVELOPES: EnvelopeCount = if Self::CARRIES_ENVELOPES { EnvelopeCount::ANY } else { EnvelopeCount::NONE };

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

/// A message that holds envelopes of `T`, so that its writer needs blank ones: see
/// [`Output::blank`](crate::Output::blank).
///
/// Implemented for [`Envelope<T>`](crate::Envelope), and for vectors, boxes, options and arrays of such messages.
/// `#[derive(Message)]` implements it where a field is marked `#[envelope]`. A message with envelopes of one type
/// implements it for that type alone, so that the compiler infers `T`. A tuple, or a message with marked fields of
/// several types, implements it for every `T`.
///
/// For a message that implements [`Message`] manually: `impl Carries<f32> for Mine {}`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` holds no envelopes of `{T}`",
    label = "no blank envelopes of `{T}` for this message",
    note = "in a message of your own, mark the field that holds them: \
            `#[derive(wakeline::Message)] struct Frame {{ #[envelope] data: wakeline::Envelope<..> }}`"
)]
pub trait Carries<T: Plain> {}

impl<T: Plain, M: Carries<T>> Carries<T> for Vec<M> {}
impl<T: Plain, M: Carries<T>> Carries<T> for Box<M> {}
impl<T: Plain, M: Carries<T>> Carries<T> for Option<M> {}
impl<T: Plain, M: Carries<T>, const N: usize> Carries<T> for [M; N] {}
impl<T: Plain, A: Carries<T>> Carries<T> for (A,) {}
impl<T: Plain, A: Message, B: Message> Carries<T> for (A, B) {}
impl<T: Plain, A: Message, B: Message, C: Message> Carries<T> for (A, B, C) {}
impl<T: Plain, A: Message, B: Message, C: Message, D: Message> Carries<T> for (A, B, C, D) {}

/// The number of envelopes in a message of some type, as far as the type determines it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvelopeCount {
    pub(crate) least: usize,
    /// `None` if there is no limit.
    pub(crate) most: Option<usize>,
}

#[allow(missing_docs)]
impl EnvelopeCount {
    pub const NONE: Self = Self { least: 0, most: Some(0) };
    pub const ONE: Self = Self { least: 1, most: Some(1) };
    pub const ANY: Self = Self { least: 0, most: None };

    /// That of a message with both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        let most = match (self.most, other.most) {
            (Some(one), Some(other)) => Some(one.saturating_add(other)),
            _ => None,
        };
        Self { least: self.least.saturating_add(other.least), most }
    }

    /// That of a message with either.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        let most = match (self.most, other.most) {
            (Some(one), Some(other)) => Some(if one > other { one } else { other }),
            _ => None,
        };
        Self { least: if self.least < other.least { self.least } else { other.least }, most }
    }

    /// That of a list of this length.
    #[must_use]
    pub const fn times(self, count: usize) -> Self {
        let most = match self.most {
            Some(most) => Some(most.saturating_mul(count)),
            None if count == 0 => Some(0),
            None => None,
        };
        Self { least: self.least.saturating_mul(count), most }
    }

    /// The number of envelopes that a message certainly needs, where there can be any: at least 1.
    pub(crate) const fn certain(self) -> usize {
        if self.least == 0 { 1 } else { self.least }
    }

    /// The number of envelopes that a hub has by default for each of its messages: at least 1.
    pub(crate) const fn usual(self) -> usize {
        match self.most {
            Some(most) if most > 1 => most,
            _ => self.certain(),
        }
    }
}

/// The larger of two element sizes.
#[doc(hidden)]
#[must_use]
pub const fn larger_element(one: usize, other: usize) -> usize {
    if one > other { one } else { other }
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
    const ELEMENT_BYTES: usize = M::ELEMENT_BYTES;
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
    const ELEMENT_BYTES: usize = M::ELEMENT_BYTES;
    const ENVELOPES: EnvelopeCount = M::ENVELOPES.times(N);
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
    const ELEMENT_BYTES: usize = M::ELEMENT_BYTES;
    const ENVELOPES: EnvelopeCount = M::ENVELOPES;
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
    const ELEMENT_BYTES: usize = M::ELEMENT_BYTES;
    const ENVELOPES: EnvelopeCount = M::ENVELOPES.or(EnvelopeCount::NONE);
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
            const ELEMENT_BYTES: usize = {
                let bytes = 1;
                $(let bytes = larger_element(bytes, $name::ELEMENT_BYTES);)*
                bytes
            };
            const ENVELOPES: EnvelopeCount = EnvelopeCount::NONE$(.and($name::ENVELOPES))*;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Envelope;

    const fn count(least: usize, most: Option<usize>) -> EnvelopeCount {
        EnvelopeCount { least, most }
    }

    #[test]
    fn a_type_says_how_many_envelopes_its_messages_have() {
        #[derive(crate::Message)]
        struct Frame {
            _number: u64,
            #[envelope]
            _pixels: Envelope<u8>,
            #[envelope]
            _planes: [Envelope<u16>; 3],
            #[envelope]
            _preview: Option<Envelope<f64>>,
        }
        #[derive(crate::Message)]
        enum Step {
            Frames(#[envelope] Box<Frame>, #[envelope] Box<Frame>),
            Other(#[envelope] Envelope<u8>),
        }
        #[derive(crate::Message)]
        enum Maybe {
            One(#[envelope] Envelope<u8>),
            None,
        }
        assert_eq!(u64::ENVELOPES, count(0, Some(0)));
        assert_eq!(Envelope::<u8>::ENVELOPES, count(1, Some(1)));
        assert_eq!(Frame::ENVELOPES, count(4, Some(5)));
        assert_eq!(Step::ENVELOPES, count(1, Some(10)));
        assert_eq!(Maybe::ENVELOPES, count(0, Some(1)));
        assert_eq!(<(u8, Frame, Box<Maybe>)>::ENVELOPES, count(4, Some(6)));
        assert_eq!(Vec::<Frame>::ENVELOPES, count(0, None));
        assert_eq!(<[Vec<Frame>; 0]>::ENVELOPES, count(0, Some(0)));
        assert_eq!(<[Frame; usize::MAX]>::ENVELOPES, count(usize::MAX, Some(usize::MAX)));
        assert_eq!(Frame::ELEMENT_BYTES, 8);
        assert_eq!(Vec::<(u32, Maybe)>::ELEMENT_BYTES, 1);
    }
}
