//! The names of the events that messages of a type can carry, known at compile time.

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
    names: [&'static str; Self::MAX],
    count: usize,
}

impl EventNames {
    /// More are a compile-time error.
    const MAX: usize = 64;

    #[doc(hidden)]
    pub const fn of_all(lists: &[&[&'static str]]) -> Self {
        let mut all = Self { names: [""; Self::MAX], count: 0 };
        let mut list = 0;
        while list < lists.len() {
            let mut at = 0;
            while at < lists[list].len() {
                let name = lists[list][at];
                if !knows_event(all.get(), name) {
                    assert!(all.count < Self::MAX, "a message has events with more than 64 names: leave some unmarked");
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
