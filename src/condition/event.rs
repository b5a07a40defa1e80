//! The event condition, `#[input(event = "decoded")]`: a message counts once its event called `decoded` has passed.
//!
//! A message carries an [`Event`] in a field marked `#[event]`, recorded on any stream; the check uses the latest
//! record. The field can also be a [`Ticket`], which is moved to the end of its stream when the message is sent: it
//! then includes all work that was enqueued before. A message with several events of one name (a list of frames) counts
//! once all of them have passed. A message without such an event (one without a record, a field that is `None`, another
//! variant) counts at once. A name that messages of this type never have is an error when the port is compiled.

use crate::{
    hub::Message,
    stream::{Event, Ticket},
};

/// Visits the tickets of the message's events called `name`.
pub(super) fn visit_event<M: Message>(message: &mut M, name: &str, visit: &mut dyn FnMut(&Ticket)) {
    message.events(name, &mut |ticket| visit(ticket));
}

/// The types of fields that can be marked `#[event]`.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an event",
    label = "`#[event]` marks an `Event`, a `Ticket`, or an `Option` of one"
)]
pub trait EventField {
    #[doc(hidden)]
    fn show(&mut self, visit: &mut dyn FnMut(&mut Ticket));
}

impl EventField for Event {
    fn show(&mut self, visit: &mut dyn FnMut(&mut Ticket)) {
        if let Some(mut ticket) = self.ticket() {
            visit(&mut ticket);
        }
    }
}

impl EventField for Ticket {
    fn show(&mut self, visit: &mut dyn FnMut(&mut Ticket)) {
        visit(self);
    }
}

impl<E: EventField> EventField for Option<E> {
    fn show(&mut self, visit: &mut dyn FnMut(&mut Ticket)) {
        self.iter_mut().for_each(|event| event.show(visit));
    }
}
