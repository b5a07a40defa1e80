//! [`GraphTable`]: the graphs of a section, one for each shape, and the choice of the graph for a round.
//!
//! ```text
//!   buckets 1, 2, 4, 8     rows 3 ──> bucket 4, padded        rows 9 ──> none: streamed
//!   no buckets             these exact lengths ──> theirs     more combinations than graphs allowed ──> none: streamed
//! ```
//!
//! A shape without a graph is streamed once, and then captured.
//!
//! Without buckets the table may be full. Then a new shape is streamed and counted. Once it has occurred [`OFTEN`]
//! times since the least recently used graph was used, that graph is evicted and the new shape is captured, so that the
//! lengths that occur first do not stay forever. If more lengths alternate than the table has graphs, the graphs stay:
//! a capture costs more than a round, and each graph would be evicted before its next use.

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::operator::section_counts::StreamReason;

/// The size in bytes of the message at each input of the section.
pub(super) type Lengths = SmallVec<[usize; 2]>;

/// The message sizes that a graph is captured for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GraphShape {
    /// The bucket, if the section has buckets.
    pub(super) rows: Option<usize>,
    pub(super) lengths: Lengths,
}

/// A shape that occurs this often replaces a graph that is not used in the meantime.
const OFTEN: usize = 3;
const CANDIDATES: usize = 64;

/// How a round is executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// By launching the graph of this number. `rows`: the number of valid rows.
    Replayed { graph: usize, rows: Option<usize> },
    /// By its operators, followed by a capture.
    Captured(GraphShape),
    /// By its operators.
    Streamed(StreamReason),
}

/// See the [module](self).
pub(super) struct GraphTable<G> {
    /// In ascending order.
    buckets: Option<Vec<usize>>,
    /// The size of a row in bytes at each input.
    row_bytes: Lengths,
    /// The maximum number of graphs without buckets.
    most: usize,
    graphs: Vec<CachedGraph<G>>,
    /// Used when the table is full. Ordered by the last occurrence, the latest last.
    candidates: VecDeque<Candidate>,
    round: u64,
}

struct CachedGraph<G> {
    shape: GraphShape,
    graph: G,
    /// The round in which it was last used.
    used: u64,
}

struct Candidate {
    lengths: Lengths,
    /// The last rounds in which it occurred, the earliest first; 0: none.
    came: [u64; OFTEN],
}

impl<G> GraphTable<G> {
    pub(super) fn new(buckets: Option<&[usize]>, row_bytes: Lengths, most: usize) -> Self {
        let buckets = buckets.map(|buckets| {
            let mut buckets = buckets.to_vec();
            buckets.sort_unstable();
            buckets.dedup();
            buckets
        });
        Self { buckets, row_bytes, most, graphs: Vec::new(), candidates: VecDeque::new(), round: 0 }
    }

    /// Decides how a round with messages of these lengths is executed.
    pub(super) fn way(&mut self, lengths: &Lengths) -> Route {
        self.round += 1;
        if lengths.contains(&0) {
            return Route::Streamed(StreamReason::Empty);
        }
        let (rows, shape) = match &self.buckets {
            None => (None, GraphShape { rows: None, lengths: lengths.clone() }),
            Some(buckets) => {
                let Some(rows) = self.rows(lengths) else { return Route::Streamed(StreamReason::UnevenRows) };
                let bucket = buckets.iter().find(|bucket| **bucket >= rows);
                let Some(bucket) = bucket else { return Route::Streamed(StreamReason::TooManyRows) };
                (Some(rows), self.shape(*bucket))
            }
        };
        if let Some(graph) = self.graphs.iter().position(|entry| entry.shape == shape) {
            self.graphs[graph].used = self.round;
            return Route::Replayed { graph, rows };
        }
        if self.is_full() && !self.is_frequent(lengths) {
            return Route::Streamed(StreamReason::TooManyLengths);
        }
        Route::Captured(shape)
    }

    fn is_full(&self) -> bool {
        self.buckets.is_none() && self.graphs.len() >= self.most
    }

    /// Counts a shape without a graph. Returns true if it has occurred often enough to replace a graph.
    fn is_frequent(&mut self, lengths: &Lengths) -> bool {
        let Some(least) = self.graphs.iter().map(|entry| entry.used).min() else { return false };
        let known = self.candidates.iter().position(|candidate| candidate.lengths == *lengths);
        let known = known.and_then(|at| self.candidates.remove(at));
        let mut candidate = known.unwrap_or_else(|| Candidate { lengths: lengths.clone(), came: [0; OFTEN] });
        candidate.came.rotate_left(1);
        candidate.came[OFTEN - 1] = self.round;
        let often = candidate.came[0] > least;
        if !often {
            if self.candidates.len() == CANDIDATES {
                self.candidates.pop_front();
            }
            self.candidates.push_back(candidate);
        }
        often
    }

    /// Evicts the least recently used graph, if the table is full.
    pub(super) fn evict(&mut self) -> Option<(GraphShape, G)> {
        let least = self.graphs.iter().enumerate().min_by_key(|(_, entry)| entry.used);
        let (at, _) = least.filter(|_| self.is_full())?;
        let CachedGraph { shape, graph, .. } = self.graphs.swap_remove(at);
        Some((shape, graph))
    }

    /// The number of rows of the messages. `None` if it differs between them, is not whole, or is 0.
    fn rows(&self, lengths: &[usize]) -> Option<usize> {
        let mut rows =
            lengths.iter().zip(&self.row_bytes).map(|(bytes, row)| (bytes % row == 0).then_some(bytes / row));
        let first = rows.next()??;
        (first > 0 && rows.all(|other| other == Some(first))).then_some(first)
    }

    fn shape(&self, bucket: usize) -> GraphShape {
        GraphShape { rows: Some(bucket), lengths: self.row_bytes.iter().map(|row| row * bucket).collect() }
    }

    /// The shapes that are known before the first message.
    pub(super) fn shapes(&self) -> Vec<GraphShape> {
        self.buckets.iter().flatten().map(|bucket| self.shape(*bucket)).collect()
    }

    pub(super) fn add(&mut self, shape: GraphShape, graph: G) {
        self.graphs.push(CachedGraph { shape, graph, used: self.round });
    }

    /// Keeps the graphs for which `stays` is true, and drops the others.
    pub(super) fn retain(&mut self, stays: impl Fn(&G) -> bool) {
        self.graphs.retain(|entry| stays(&entry.graph));
    }

    pub(super) fn any(&self) -> Option<&G> {
        self.graphs.first().map(|entry| &entry.graph)
    }

    pub(super) fn get(&mut self, graph: usize) -> Option<&mut G> {
        self.graphs.get_mut(graph).map(|entry| &mut entry.graph)
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn replayed(graph: usize, rows: usize) -> Route {
        Route::Replayed { graph, rows: Some(rows) }
    }

    #[test]
    fn a_round_takes_the_smallest_bucket_that_holds_it() {
        let mut table = GraphTable::new(Some(&[8, 2, 2]), smallvec![4, 16], 0);
        let two = GraphShape { rows: Some(2), lengths: smallvec![8, 32] };
        assert_eq!(table.way(&smallvec![4, 16]), Route::Captured(two.clone()));
        assert_eq!(table.shapes(), [two.clone(), GraphShape { rows: Some(8), lengths: smallvec![32, 128] }]);
        table.add(two, ());
        assert_eq!(table.way(&smallvec![4, 16]), replayed(0, 1));
        assert_eq!(table.way(&smallvec![8, 32]), replayed(0, 2));
        assert!(matches!(table.way(&smallvec![12, 48]), Route::Captured(_)));
        assert_eq!(table.way(&smallvec![36, 144]), Route::Streamed(StreamReason::TooManyRows));
        assert_eq!(table.way(&smallvec![4, 32]), Route::Streamed(StreamReason::UnevenRows), "not the same rows");
        assert_eq!(table.way(&smallvec![6, 24]), Route::Streamed(StreamReason::UnevenRows), "no whole rows");
        assert_eq!(table.way(&smallvec![0, 0]), Route::Streamed(StreamReason::Empty));
    }

    #[test]
    fn without_buckets_each_combination_of_lengths_is_a_shape_until_there_are_too_many() {
        let mut table = GraphTable::new(None, smallvec![4, 4], 1);
        let Route::Captured(shape) = table.way(&smallvec![4, 6]) else { panic!("a new one") };
        table.add(shape, ());
        assert_eq!(table.way(&smallvec![4, 6]), Route::Replayed { graph: 0, rows: None });
        assert_eq!(table.way(&smallvec![6, 4]), Route::Streamed(StreamReason::TooManyLengths));
        assert_eq!(table.way(&smallvec![0, 4]), Route::Streamed(StreamReason::Empty));
    }

    /// Executes rounds as a section does. The result has one letter for each round.
    fn runs(table: &mut GraphTable<()>, rounds: impl IntoIterator<Item = usize>) -> String {
        let runs = rounds.into_iter().map(|length| match table.way(&smallvec![length]) {
            Route::Replayed { .. } => 'r',
            Route::Streamed(_) => 's',
            Route::Captured(shape) => {
                table.evict();
                table.add(shape, ());
                'c'
            }
        });
        runs.collect()
    }

    #[test]
    fn a_length_that_comes_often_takes_the_place_of_one_that_does_not_come_any_more() {
        let mut table = GraphTable::new(None, smallvec![1], 2);
        assert_eq!(runs(&mut table, [1, 2, 1, 1]), "ccrr");
        // Along with others that occur once, and while another graph is in use.
        assert_eq!(runs(&mut table, [7, 1, 8, 7, 9, 7, 7, 1, 2]), "srsssc".to_owned() + "rrs");
        assert_eq!(table.graphs.len(), 2);
    }

    #[test]
    fn more_lengths_in_turns_than_graphs_leave_the_graphs_in_place() {
        let mut table = GraphTable::new(None, smallvec![1], 2);
        let rounds = (0..300).map(|round| 1 + round % 3);
        assert_eq!(runs(&mut table, rounds), "ccs".to_owned() + &"rrs".repeat(99));
        let mut none = GraphTable::new(None, smallvec![1], 0);
        assert_eq!(runs(&mut none, [1; 9]), "sssssssss");
        // The number of counted shapes is limited.
        runs(&mut table, 10..10_000);
        assert_eq!(table.candidates.len(), CANDIDATES);
    }
}
