//! [`BlanksFor`]: the blank envelopes of one message, taken at the same time.

use smallvec::SmallVec;

use super::{Carries, Envelope, Message, RawEnvelope};
use crate::memory::Plain;

/// Blank envelopes, most often of one message.
pub(crate) type RawEnvelopes = SmallVec<[RawEnvelope; 4]>;

/// The blank envelopes of a message `M`, which [`Ingress::blanks`](crate::Ingress::blanks) takes at the same time: a
/// tuple of up to eight [`Envelope`]s, or an array of any length. Sealed: implemented for these only.
///
/// The order is that in which they are written, and has nothing to do with the order of the message's fields: all blank
/// envelopes of a hub are alike.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a tuple or an array of envelopes for `{M}`",
    note = "write how many there are: `let (mut pixels, mut mask) = frames.blanks().await?`",
    note = "the type of their elements is one that the message holds: see `wakeline::hub::Carries`"
)]
pub trait BlanksFor<M: Message>: Sized {
    /// Their number.
    #[doc(hidden)]
    const COUNT: usize;

    /// Makes them of the first [`COUNT`](Self::COUNT) envelopes. `None` if there are fewer.
    #[doc(hidden)]
    fn of_raw(raw: &mut dyn Iterator<Item = RawEnvelope>) -> Option<Self>;
}

impl<M: Message + Carries<T>, T: Plain, const N: usize> BlanksFor<M> for [Envelope<T>; N] {
    const COUNT: usize = N;

    fn of_raw(raw: &mut dyn Iterator<Item = RawEnvelope>) -> Option<Self> {
        raw.take(N).map(Envelope::of_raw).collect::<Vec<_>>().try_into().ok()
    }
}

macro_rules! tuples {
    ($(#[$hidden:meta])? $($name:ident)*) => {
        $(#[$hidden])?
        impl<M: Message $(+ Carries<$name>)*, $($name: Plain),*> BlanksFor<M> for ($(Envelope<$name>,)*) {
            const COUNT: usize = [$(stringify!($name)),*].len();

            fn of_raw(raw: &mut dyn Iterator<Item = RawEnvelope>) -> Option<Self> {
                Some(($(Envelope::<$name>::of_raw(raw.next()?),)*))
            }
        }
    };
}

tuples!(A);
tuples!(A B);
tuples!(A B C);
tuples!(A B C D);
// Long types make the compiler's message about a wrong one hard to read.
tuples!(#[diagnostic::do_not_recommend] A B C D E);
tuples!(#[diagnostic::do_not_recommend] A B C D E F);
tuples!(#[diagnostic::do_not_recommend] A B C D E F G);
tuples!(#[diagnostic::do_not_recommend] A B C D E F G H);
