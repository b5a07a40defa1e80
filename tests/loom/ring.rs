//! Model check of `observe/ring.rs`: a thread that writes events over older ones, while another one copies them.

#[allow(dead_code)]
#[path = "../../src/observe/ring.rs"]
mod ring;

use self::ring::{Entry, Ring};
use crate::sync::model;
use loom::thread;

/// The entry of a number: each word says which it is.
fn entry(number: u64) -> Entry {
    [number, number + 100, number + 200]
}

/// What is copied is whole, in order, and complete from its first entry on.
fn check<const SEGMENT: usize>(ring: &Ring<SEGMENT>, from: u64) -> (u64, u64) {
    let mut copied = Vec::new();
    let found = ring.copy(from, &mut copied);
    let expected: Vec<_> = (found.first..found.end).map(entry).collect();
    assert_eq!(copied, expected, "{found:?}");
    (found.first, found.end)
}

#[test]
fn no_copy_has_a_torn_entry() {
    model(3, || {
        let (ring, mut writer) = Ring::<1>::new(2);
        writer.push(entry(0));
        let writes = thread::spawn(move || (1..4).for_each(|number| writer.push(entry(number))));
        let (_, end) = check(&ring, 0);
        assert!(end >= 1);
        writes.join().unwrap();
        assert_eq!(check(&ring, 0), (2, 4), "the last two are kept");
    });
}

#[test]
fn a_reader_continues_where_it_was() {
    model(3, || {
        let (ring, mut writer) = Ring::<2>::new(2);
        let writes = thread::spawn(move || {
            for number in 0..3 {
                if !writer.push_in_segment(entry(number)) {
                    writer.push(entry(number));
                }
            }
        });
        let (_, end) = check(&ring, 0);
        let (first, later) = check(&ring, end);
        assert!(first >= end && later >= end);
        writes.join().unwrap();
        let (first, last) = check(&ring, later);
        assert_eq!((first, last), (later.max(1), 3));
    });
}
