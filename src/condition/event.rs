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

pub(super) fn named<M: Message>(message: &mut M, name: &str, visit: &mut dyn FnMut(&Ticket)) {
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

/// Whether messages with `events` have this name. Evaluated at compile time.
#[doc(hidden)]
pub const fn knows_event(events: &[&str], name: &str) -> bool {
    let mut at = 0;
    while at < events.len() {
        if same(events[at].as_bytes(), name.as_bytes()) {
            return true;
        }
        at += 1;
    }
    false
}

const fn same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut at = 0;
    while at < one.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// The event names of a message that contains other messages, each once. Evaluated at compile time.
#[doc(hidden)]
#[derive(Debug)]
pub struct EventNames {
    names: [&'static str; Self::MOST],
    count: usize,
}

impl EventNames {
    /// More are a compile-time error.
    const MOST: usize = 64;

    #[doc(hidden)]
    pub const fn of_all(lists: &[&[&'static str]]) -> Self {
        let mut all = Self { names: [""; Self::MOST], count: 0 };
        let mut list = 0;
        while list < lists.len() {
            let mut at = 0;
            while at < lists[list].len() {
                let name = lists[list][at];
                if !knows_event(all.get(), name) {
                    assert!(
                        all.count < Self::MOST,
                        "a message has events with more than 64 names: leave some unmarked"
                    );
                    all.names[all.count] = name;
                    all.count += 1;
                }
                at += 1;
            }
            list += 1;
        }
        all
    }

    #[doc(hidden)]
    pub const fn get(&self) -> &[&'static str] {
        self.names.split_at(self.count).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_known_as_a_whole() {
        let events = ["decoded", "scaled"];
        assert!(knows_event(&events, "decoded") && knows_event(&events, "scaled"));
        assert!(!knows_event(&events, "decode") && !knows_event(&events, "decoded2"));
        assert!(!knows_event(&events, "") && !knows_event(&[], "decoded"));
    }

    #[test]
    fn names_of_several_messages_are_listed_once() {
        assert_eq!(EventNames::of_all(&[&["a", "b"], &[], &["c", "a"]]).get(), ["a", "b", "c"]);
        assert_eq!(EventNames::of_all(&[]).get(), [""; 0]);
    }
}
