//! Handles: name an operator's ports, to connect them in a flow.

use std::{fmt, marker::PhantomData};

use crate::condition::PortId;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub struct $name<M> {
            pub(crate) id: PortId,
            of: PhantomData<fn(M) -> M>,
        }

        impl<M> $name<M> {
            pub(super) fn new(id: PortId) -> Self {
                Self { id, of: PhantomData }
            }
        }

        impl<M> From<$name<M>> for PortId {
            fn from(handle: $name<M>) -> Self {
                handle.id
            }
        }

        impl<M> Clone for $name<M> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<M> Copy for $name<M> {}

        impl<M> fmt::Debug for $name<M> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.id).finish()
            }
        }
    };
}

handle! {
    /// An input, to connect once or, if it is an [`Inputs`](super::Inputs) port, any number of times.
    InputHandle
}
handle! {
    /// An output, to connect.
    OutputHandle
}
