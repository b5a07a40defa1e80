//! The roles of a [`Link`](super::Link): it produces, consumes, peeks at or modifies chunks.

// A value for the state machine, and a type for the links and their guards.

use std::fmt::Debug;

/// The role of a link, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    Produce,
    Consume,
    Peek,
    Modify,
}

/// A link's name for `flow_to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LinkName {
    Standalone(u64),
    /// The numbers of a flow, an operator and a port: the same in all of the flow's runs.
    Port(u64, usize, usize),
}

impl LinkName {
    /// A sort key: ports in the order of their operators, which is the same in all hubs of a flow, then standalone
    /// links in the order of linking.
    pub(crate) fn order(self) -> u64 {
        match self {
            Self::Port(flow, operator, _) => (flow << 32 | operator as u64) & !(1 << 63),
            Self::Standalone(number) => number | 1 << 63,
        }
    }
}

impl Role {
    /// For example `produces`.
    pub(crate) fn verb(self) -> &'static str {
        match self {
            Self::Produce => "produces",
            Self::Consume => "consumes",
            Self::Peek => "peeks",
            Self::Modify => "modifies",
        }
    }
}

mod sealed {
    #[allow(unreachable_pub, reason = "public in a private module: that is what seals it")]
    pub trait Sealed {}
}

/// The role of a link, as a type: one of those in [`role`](self).
pub trait ChunkRole: sealed::Sealed + Debug + Send + Sync + 'static {
    #[doc(hidden)]
    const ROLE: RoleOf;
}

/// A [`Role`], for use by the trait only.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct RoleOf(pub(crate) Role);

/// A role whose links may write their chunks.
#[diagnostic::on_unimplemented(
    message = "chunks can be written only by links that produce or modify them",
    label = "this link does neither: make it a `Modify` or a `Produce`"
)]
pub trait Writes: ChunkRole {}

macro_rules! roles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $(
            $(#[$doc])*
            #[derive(Debug)]
            pub enum $name {}
            impl sealed::Sealed for $name {}
            impl ChunkRole for $name {
                const ROLE: RoleOf = RoleOf(Role::$name);
            }
        )*
    };
}

roles! {
    /// Fills blanks, which become chunks.
    Produce,
    /// Removes chunks.
    Consume,
    /// Reads chunks, concurrently with other links.
    Peek,
    /// Changes chunks, one link at a time.
    Modify,
}

impl Writes for Produce {}
impl Writes for Modify {}
