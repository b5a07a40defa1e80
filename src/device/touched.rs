//! [`Touched`]: the bytes that a graph node reads and writes. When a node's work is changed, it is checked against the
//! nodes that are not ordered with it.

use smallvec::SmallVec;

use super::backend::{Address, Arg, Endpoint, NodeWork};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TouchedRange {
    /// In host memory. A host address can equal a device address.
    host: bool,
    start: u64,
    bytes: u64,
    write: bool,
}

/// See the [module](self).
pub(crate) type Touched = SmallVec<[TouchedRange; 2]>;

impl TouchedRange {
    pub(crate) fn new(place: Endpoint, bytes: u64, write: bool) -> Self {
        let (host, start) = match place {
            Endpoint::Host(start) => (true, start.addr() as u64),
            Endpoint::Device(Address(start)) => (false, start),
        };
        Self { host, start, bytes, write }
    }

    fn clashes(&self, other: &Self) -> bool {
        let ends_after = |one: &Self, other: &Self| one.start.saturating_add(one.bytes) > other.start;
        self.host == other.host
            && (self.write || other.write)
            && ends_after(self, other)
            && ends_after(other, self)
            && self.bytes.min(other.bytes) > 0
    }
}

/// True if both access the same bytes and at least one of them writes.
pub(crate) fn clash(one: &[TouchedRange], other: &[TouchedRange]) -> bool {
    one.iter().any(|one| other.iter().any(|other| one.clashes(other)))
}

/// The bytes that the work itself accesses, without those of a nested graph.
pub(crate) fn touched_by(work: &NodeWork<'_>) -> Touched {
    match work {
        NodeWork::Kernel(launch) => touched_by_args(launch.args),
        NodeWork::Copy { to, from, bytes } => {
            [TouchedRange::new(*from, *bytes, false), TouchedRange::new(*to, *bytes, true)].into_iter().collect()
        }
        NodeWork::Fill { to, bytes, .. } => {
            [TouchedRange::new(Endpoint::Device(*to), *bytes, true)].into_iter().collect()
        }
        NodeWork::Host(_)
        | NodeWork::Empty
        | NodeWork::Child(_)
        | NodeWork::Record(_)
        | NodeWork::Wait(_)
        | NodeWork::Free(_) => Touched::new(),
    }
}

pub(crate) fn touched_by_args(args: &[Arg<'_>]) -> Touched {
    let touched = args.iter().filter_map(|arg| match *arg {
        Arg::Slice { address, bytes, write, .. } => Some(TouchedRange::new(Endpoint::Device(address), bytes, write)),
        Arg::Scalar(_) => None,
    });
    touched.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_and_another_access_of_the_same_bytes_clash() {
        let at = |start, bytes, write| TouchedRange::new(Endpoint::Device(Address(start)), bytes, write);
        let host =
            |start: usize, write| TouchedRange::new(Endpoint::Host(std::ptr::without_provenance_mut(start)), 8, write);
        for (one, other, expected) in [
            (at(0, 8, true), at(7, 1, false), true),
            (at(0, 8, true), at(8, 1, false), false),
            (at(4, 1, true), at(0, 8, true), true),
            (at(0, 8, false), at(0, 8, false), false),
            (at(4, 0, true), at(0, 8, true), false),
            (at(0, 8, true), host(0, true), false),
            (host(0, false), host(7, true), true),
        ] {
            assert_eq!(clash(&[one], &[other]), expected, "{one:?}, {other:?}");
            assert_eq!(clash(&[other], &[one]), expected, "{other:?}, {one:?}");
        }
        assert!(!clash(&[], &[at(0, 8, true)]));
        assert!(clash(&[at(0, 1, true), at(16, 1, true)], &[at(8, 1, true), at(16, 1, false)]));
    }
}
