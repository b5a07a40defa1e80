//! What an output is connected to: one input, or several at once.
//!
//! Each connection has its own hub. With several readers, messages must be [`Fork`]: this is checked here,
//! where the message type is known, since a flow stores connections with the type erased.

use std::{any::Any, fmt, sync::Arc};

use crate::{
    condition::PortId,
    error::Result,
    hub::{
        Fork, ForkFn, HubOptions, HubOptionsFor, Message, TypedHubOptions,
        build::{self, HubPlan},
        fan,
        view::HubView,
    },
    operator::InputHandle,
};

/// One end of a hub, for its port.
type ErasedEnd = Box<dyn Any + Send>;

/// Creates a hub, with the message type erased.
pub(super) type MakeLink = Arc<dyn Fn(HubPlan) -> Result<(ErasedEnd, ErasedEnd, Arc<dyn HubView>)> + Send + Sync>;

/// A requested connection.
#[doc(hidden)]
pub struct Target {
    pub(super) to: PortId,
    pub(super) hub: HubOptions,
    pub(super) make: MakeLink,
    /// The output may have several readers.
    pub(super) forks: bool,
}

impl Target {
    fn new<M: Message>(input: InputHandle<M>, hub: TypedHubOptions<M>, fork: Option<ForkFn<M>>) -> Self {
        let TypedHubOptions { options: hub, clone_latest } = hub;
        let make: MakeLink = Arc::new(move |plan| {
            let (sender, receiver, state) = build::build::<M>(plan, clone_latest)?;
            Ok((Box::new(fan::WriterEnd { sender, fork }), Box::new(receiver), state))
        });
        Self { to: input.id, hub, make, forks: fork.is_some() }
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("to", &self.to).field("hub", &self.hub).finish_non_exhaustive()
    }
}

/// The possible targets of an output of `M`: an input, or several in an array, a tuple or a vector if `M` is [`Fork`].
/// An input may have its own kind of hub, see [`InputHandle::with`]. Sealed: implemented for these types only.
#[diagnostic::on_unimplemented(
    message = "an output of `{M}` cannot be connected to `{Self}`",
    label = "not an input of `{M}`, nor several",
    note = "write the output first: `connect(from.out, to.input)`, or `connect(from.out, [one.input, other.input])`; \
            if the two are reversed, swap them"
)]
pub trait Targets<M: Message> {
    /// `hub`: the kind of hub for inputs that have none of their own.
    #[doc(hidden)]
    fn targets(self, hub: TypedHubOptions<M>) -> Vec<Target>;
}

/// An input and the kind of hub that connects it: see [`InputHandle::with`].
pub struct Branch<M> {
    input: InputHandle<M>,
    hub: Option<TypedHubOptions<M>>,
}

impl<M> InputHandle<M> {
    /// Connects this input by a hub of its own kind. For [`Flow::connect`](crate::Flow::connect), where an output has
    /// several readers.
    ///
    /// ```
    /// use wakeline::{Flow, HubOptions, operator::{sink, source}};
    ///
    /// # let mut flow = Flow::new("two");
    /// # let numbers = flow.add("numbers", source(|| std::future::ready(Ok(None::<u32>))));
    /// # let all = flow.add("all", sink(async |_: u32| Ok(())));
    /// # let some = flow.add("some", sink(async |_: u32| Ok(())));
    /// flow.connect(numbers.output, (all.input, some.input.with(HubOptions::bounded(16))));
    /// ```
    #[must_use]
    pub fn with(self, hub: impl HubOptionsFor<M>) -> Branch<M>
    where
        M: Message,
    {
        Branch { input: self, hub: Some(hub.typed()) }
    }
}

impl<M> From<InputHandle<M>> for Branch<M> {
    fn from(input: InputHandle<M>) -> Self {
        Self { input, hub: None }
    }
}

impl<M> Branch<M> {
    fn hub_or(self, hub: TypedHubOptions<M>) -> TypedHubOptions<M> {
        self.hub.map_or(hub, |own| own.or(hub))
    }
}

impl<M: Fork> Branch<M> {
    fn forked(self, hub: TypedHubOptions<M>) -> Target {
        Target::new(self.input, self.hub_or(hub), Some(M::fork))
    }
}

impl<M: Message> Targets<M> for InputHandle<M> {
    fn targets(self, hub: TypedHubOptions<M>) -> Vec<Target> {
        vec![Target::new(self, hub, None)]
    }
}

impl<M: Message> Targets<M> for Branch<M> {
    fn targets(self, hub: TypedHubOptions<M>) -> Vec<Target> {
        vec![Target::new(self.input, self.hub_or(hub), None)]
    }
}

impl<M: Fork, B: Into<Branch<M>>, const N: usize> Targets<M> for [B; N] {
    fn targets(self, hub: TypedHubOptions<M>) -> Vec<Target> {
        self.into_iter().map(|branch| branch.into().forked(hub)).collect()
    }
}

impl<M: Fork, B: Into<Branch<M>>> Targets<M> for Vec<B> {
    fn targets(self, hub: TypedHubOptions<M>) -> Vec<Target> {
        self.into_iter().map(|branch| branch.into().forked(hub)).collect()
    }
}

macro_rules! tuples {
    ($($name:ident),*) => {
        impl<M: Fork, $($name: Into<Branch<M>>),*> Targets<M> for ($($name,)*) {
            #[allow(non_snake_case)]
            fn targets(self, hub: TypedHubOptions<M>) -> Vec<Target> {
                let ($($name,)*) = self;
                vec![$($name.into().forked(hub)),*]
            }
        }
    };
}

tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);
tuples!(A, B, C, D, E);
tuples!(A, B, C, D, E, F);
tuples!(A, B, C, D, E, F, G);
tuples!(A, B, C, D, E, F, G, H);

impl<M> Clone for Branch<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Branch<M> {}

impl<M> fmt::Debug for Branch<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Branch").field("input", &self.input).field("hub", &self.hub.map(|hub| hub.options)).finish()
    }
}
