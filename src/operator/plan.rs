//! [`Plan`]: what a flow knows about an operator's ports before it runs; [`Binder`]: gives the ports the ends of their
//! hubs.

use std::{any::Any, collections::HashMap, fmt, sync::Arc, time::Duration};

use super::{operator_streams::OperatorStreams, run_context::RunContext};
use crate::{
    condition::{IntoCondition, MessageRequirement, Need, OnPorts, PortId, Room, When},
    error::{Error, ErrorKind, Result},
    hub::{EnvelopeCount, HubOptions, Message, Since, chunks::roles::Role},
};

/// The direction of a port, and how many hubs it can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    Input,
    /// An input that can be connected any number of times.
    Inputs,
    Output,
    Link(Role),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PortDecl {
    pub(crate) name: &'static str,
    pub(crate) kind: PortKind,
    pub(crate) hub: HubOptions,
    pub(crate) carries_envelopes: bool,
    /// Each message is an envelope and nothing else.
    pub(crate) is_envelope: bool,
    pub(crate) element_bytes: usize,
    /// In each message.
    pub(crate) envelopes: EnvelopeCount,
    /// The condition of an input, from its attribute.
    pub(crate) need: Need,
    /// What an input requires of a message besides its arrival.
    pub(crate) requirement: MessageRequirement,
    /// The room that an output waits for.
    pub(crate) room: Room,
    /// The port is used from outside of the flow, and not by its operator.
    pub(crate) shared: bool,
}

/// Collects an operator's ports when the operator is added.
#[doc(hidden)]
#[derive(Debug)]
pub struct Plan {
    pub(crate) flow: u64,
    pub(crate) operator: usize,
    pub(crate) ports: Vec<PortDecl>,
    /// Conditions over several ports.
    pub(crate) conditions: Vec<When>,
}

impl Plan {
    pub(super) fn add<M: Message>(&mut self, name: &'static str, kind: PortKind, options: PortOptions) -> PortId {
        self.ports.push(PortDecl {
            name,
            kind,
            hub: options.hub,
            carries_envelopes: M::CARRIES_ENVELOPES,
            is_envelope: M::IS_ENVELOPE,
            element_bytes: M::ELEMENT_BYTES,
            envelopes: M::ENVELOPES,
            need: options.need,
            requirement: options.requirement,
            room: options.room,
            shared: options.shared,
        });
        PortId { flow: self.flow, operator: self.operator, port: self.ports.len() - 1, name }
    }

    pub(super) fn add_link(&mut self, name: &'static str, role: Role, options: PortOptions) -> PortId {
        self.ports.push(PortDecl {
            name,
            kind: PortKind::Link(role),
            hub: HubOptions::default(),
            carries_envelopes: false,
            is_envelope: false,
            element_bytes: 1,
            envelopes: EnvelopeCount::NONE,
            need: options.need,
            requirement: options.requirement,
            room: options.room,
            shared: false,
        });
        PortId { flow: self.flow, operator: self.operator, port: self.ports.len() - 1, name }
    }

    /// Adds a condition from `#[ports(..)]`.
    #[doc(hidden)]
    pub fn condition(&mut self, condition: OnPorts) {
        self.conditions.push(condition.into_condition());
    }
}

/// The options that a port's attribute sets.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct PortOptions {
    hub: HubOptions,
    pub(super) room: Room,
    pub(super) requirement: MessageRequirement,
    pub(super) need: Need,
    pub(super) by_hand: bool,
    shared: bool,
}

#[allow(missing_docs)]
impl PortOptions {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn capacity(mut self, capacity: usize) -> Self {
        self.hub.capacity = Some(capacity);
        self
    }

    pub fn envelope_bytes(mut self, bytes: usize) -> Self {
        self.hub.envelope_bytes = Some(bytes);
        self
    }

    pub fn envelopes(mut self, count: usize) -> Self {
        self.hub.envelopes = Some(count);
        self
    }

    pub fn at_least(mut self, count: usize) -> Self {
        self.need = Need { least: count, together: true, ..self.need };
        self
    }

    pub fn at_most(mut self, count: usize) -> Self {
        self.need.most = Some(count);
        self
    }

    pub fn batch(mut self, count: usize) -> Self {
        self.need = Need { least: count, together: true, ..self.need };
        self
    }

    pub fn within(mut self, span: Duration) -> Self {
        self.need.within = Some(span);
        self
    }

    pub fn since(mut self, since: Since) -> Self {
        self.need.since = since;
        self
    }

    pub fn optional(mut self) -> Self {
        self.need.optional = true;
        self.room = Room::Unconditional;
        self
    }

    pub fn room(mut self, messages: usize) -> Self {
        self.room = Room::For(messages);
        self
    }

    pub fn by_hand(mut self) -> Self {
        self.by_hand = true;
        self
    }

    /// Marks the port as used from outside of the flow: its operator does not wait at it.
    pub(super) fn shared(self) -> Self {
        Self { shared: true, ..self.optional() }
    }

    pub(super) fn is_optional(&self) -> bool {
        self.need.optional
    }

    pub fn done(mut self) -> Self {
        self.requirement.done = true;
        self
    }

    pub fn event(mut self, name: &'static str) -> Self {
        self.requirement.event = Some(name);
        self
    }
}

/// An end of a hub, for the port that it is bound to.
pub(crate) type AnyEnd = Box<dyn Any + Send>;

/// Distributes the ends of hubs when a flow is built.
#[doc(hidden)]
pub struct Binder<'a> {
    pub(crate) streams: Option<Arc<OperatorStreams>>,
    pub(crate) context: Arc<RunContext>,
    /// Ports named in a condition of the operator; they have no condition of their own.
    pub(crate) named: &'a [(PortId, Option<Need>)],
    /// By port, in the order of connecting.
    pub(crate) ends: &'a mut HashMap<&'static str, Vec<AnyEnd>>,
}

impl Binder<'_> {
    /// What a port waits for: the need from a condition of the operator, or else that of the port's attribute. Also
    /// true if a condition names the port, so that the port itself does not wait.
    pub(super) fn need(&self, name: &str, options: Need) -> (Need, bool) {
        let mut named = self.named.iter().filter(|(port, _)| port.name == name).peekable();
        match named.peek() {
            // If several conditions name the port, the one that promises the most messages counts.
            Some(_) => (named.filter_map(|(_, need)| *need).max_by_key(|need| need.least).unwrap_or_default(), true),
            None => (options, false),
        }
    }

    pub(super) fn has<T: 'static>(&self, name: &str) -> bool {
        self.ends.get(name).and_then(|ends| ends.first()).is_some_and(|end| end.is::<T>())
    }

    pub(super) fn end<T: 'static>(&mut self, name: &'static str) -> Result<T> {
        self.ends(name)?.pop().ok_or_else(|| not_connected(name))
    }

    pub(super) fn ends<T: 'static>(&mut self, name: &'static str) -> Result<Vec<T>> {
        let ends = self.ends.remove(name).ok_or_else(|| not_connected(name))?;
        let ends = ends.into_iter().map(|end| end.downcast::<T>().map(|end| *end).map_err(|_| not_connected(name)));
        ends.collect()
    }
}

pub(super) fn not_connected(name: &str) -> Error {
    Error::new(ErrorKind::Setup, format!("port `{name}` is not connected: connect or link it before the flow runs"))
}

impl fmt::Debug for Binder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Binder").field("ends", &self.ends.keys()).finish()
    }
}
