//! [`Wiring`]: a flow with an index of its connections by their ends.

use std::ops::Deref;

use super::{Connection, Flow};
use crate::condition::PortId;

/// A flow, and for each operator its outgoing and incoming connections. An index, since a flow may have ten thousand.
pub(super) struct Wiring<'a> {
    flow: &'a Flow,
    leaving: Vec<Vec<usize>>,
    arriving: Vec<Vec<usize>>,
}

impl<'a> Wiring<'a> {
    pub(super) fn new(flow: &'a Flow) -> Self {
        let mut leaving = vec![Vec::new(); flow.entries.len()];
        let mut arriving = leaving.clone();
        for (at, connection) in flow.connections.iter().enumerate() {
            for (end, found) in [(connection.from, &mut leaving), (connection.to, &mut arriving)] {
                if end.flow == flow.id {
                    found[end.operator].push(at);
                }
            }
        }
        Self { flow, leaving, arriving }
    }

    /// The connections of one output, in the order of connecting, each with its number.
    pub(super) fn leaving(&self, output: PortId) -> impl DoubleEndedIterator<Item = (usize, &'a Connection)> + Clone {
        self.found(&self.leaving, output.operator).filter(move |(_, connection)| connection.from == output)
    }

    /// The connections of all outputs of one operator.
    pub(super) fn leaving_operator(&self, operator: usize) -> impl Iterator<Item = &'a Connection> {
        self.found(&self.leaving, operator).map(|(_, connection)| connection)
    }

    /// The connections that lead to one operator.
    pub(super) fn arriving(&self, operator: usize) -> impl Iterator<Item = &'a Connection> {
        self.found(&self.arriving, operator).map(|(_, connection)| connection)
    }

    fn found(
        &self,
        by: &[Vec<usize>],
        operator: usize,
    ) -> impl DoubleEndedIterator<Item = (usize, &'a Connection)> + Clone {
        by[operator].iter().map(|at| (*at, &self.flow.connections[*at]))
    }
}

impl Deref for Wiring<'_> {
    type Target = Flow;

    fn deref(&self) -> &Flow {
        self.flow
    }
}
