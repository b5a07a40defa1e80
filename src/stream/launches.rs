//! [`Launches`]: the latest launches of a stream. The error of a lost device names those that may not be done.

use std::fmt;

/// How many launches are remembered.
const REMEMBERED: usize = 4;

/// What was launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launched {
    Kernel(&'static str),
    Graph,
}

/// A ring of the latest launches, each different from its predecessor, with the ticket of its last repetition.
#[derive(Debug, Default)]
pub(super) struct Launches {
    last: [Option<(u64, Launched)>; REMEMBERED],
    newest: usize,
}

impl Launches {
    #[inline]
    pub(super) fn note(&mut self, ticket: u64, launched: Launched) {
        if self.last[self.newest].is_some_and(|(_, newest)| newest != launched) {
            self.newest = (self.newest + 1) % REMEMBERED;
        }
        self.last[self.newest] = Some((ticket, launched));
    }

    /// The launches after this ticket, oldest first, in parentheses; empty if there are none.
    pub(super) fn after(&self, passed: u64) -> impl fmt::Display + use<> {
        let oldest_first = (1..=REMEMBERED).filter_map(|at| self.last[(self.newest + at) % REMEMBERED]);
        let open: Vec<_> = oldest_first.filter(|(ticket, _)| *ticket > passed).map(|(_, launched)| launched).collect();
        Unfinished(open)
    }
}

struct Unfinished(Vec<Launched>);

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((first, others)) = self.0.split_first() else { return Ok(()) };
        // If all that are remembered are unfinished, there may be earlier ones.
        let before = if self.0.len() == REMEMBERED { ".., " } else { "" };
        write!(f, " ({before}{first}")?;
        others.iter().try_for_each(|other| write!(f, ", {other}"))?;
        f.write_str(")")
    }
}

impl fmt::Display for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(name) => write!(f, "kernel `{name}`"),
            Self::Graph => f.write_str("a graph"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Launched::*, *};

    #[test]
    fn launches_that_may_not_be_done_are_named_oldest_first() {
        let mut launches = Launches::default();
        assert_eq!(launches.after(0).to_string(), "");
        launches.note(1, Kernel("a"));
        assert_eq!(launches.after(0).to_string(), " (kernel `a`)");
        launches.note(3, Graph);
        launches.note(4, Graph);
        assert_eq!(launches.after(0).to_string(), " (kernel `a`, a graph)");
        assert_eq!(launches.after(3).to_string(), " (a graph)");
        assert_eq!(launches.after(4).to_string(), "");
        launches.note(5, Kernel("a"));
        launches.note(6, Kernel("b"));
        launches.note(9, Kernel("c"));
        assert_eq!(launches.after(0).to_string(), " (.., a graph, kernel `a`, kernel `b`, kernel `c`)");
        assert_eq!(launches.after(5).to_string(), " (kernel `b`, kernel `c`)");
    }
}
