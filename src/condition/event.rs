//! The event condition, `#[input(event = "decoded")]`: a message counts once its event of that name has passed.
//!
//! A message carries an [`Event`](crate::stream::Event) in a field marked `#[event]`, recorded on any stream; the
//! record at the time of the check is waited for. The field may also be a [`Ticket`], which is marked when the message
//! is sent, so work that its stream is given before then is waited for, too. A message with several events of one name
//! (a list of frames) waits for all of them; one without any this time (an event without a record, a field that is
//! `None`, another variant) waits for nothing. A name that messages of this type never have is an error when the port
//! is compiled.

use crate::{
    hub::Message,
    stream::{Event, Ticket},
};

pub(super) fn visit_event<M: Message>(message: &mut M, name: &str, visit: &mut dyn FnMut(&Ticket)) {
    message.events(name, &mut |ticket| visit(ticket));
}

/// The types of fields that may be marked `#[event]`.
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
