//! The table of a section's graphs: one for each shape, and which of them a round takes.
//!
//! ```text
//!   buckets 1, 2, 4, 8     rows 3 ──> bucket 4, padded        rows 9 ──> none: streamed
//!   no buckets             these exact lengths ──> theirs     more kinds of them than there may be ──> none: streamed
//! ```
//!
//! A shape that has no graph yet is streamed once, and captured after that.

use smallvec::SmallVec;

/// Bytes of the message at each input of the section's edge.
pub(super) type Lengths = SmallVec<[usize; 2]>;

/// What a graph is captured for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Its bucket, where there are such.
    pub(super) rows: Option<usize>,
    /// Bytes at each input.
    pub(super) lengths: Lengths,
}

/// How a round goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By the graph of this number; `rows`: so many of them are valid.
    Replayed { graph: usize, rows: Option<usize> },
    /// By its operators, and then it is captured.
    Captured(Shape),
    /// By its operators.
    Streamed,
}

/// See the [module](self).
pub(super) struct Table<G> {
    /// Sorted.
    buckets: Option<Vec<usize>>,
    /// Bytes of a row at each input.
    row_bytes: Lengths,
    /// So many shapes, where there are no buckets.
    most: usize,
    graphs: Vec<(Shape, G)>,
}

impl<G> Table<G> {
    pub(super) fn new(buckets: Option<&[usize]>, row_bytes: Lengths, most: usize) -> Self {
        let buckets = buckets.map(|buckets| {
            let mut buckets = buckets.to_vec();
            buckets.sort_unstable();
            buckets.dedup();
            buckets
        });
        Self { buckets, row_bytes, most, graphs: Vec::new() }
    }

    /// How a round with messages of these lengths goes.
    pub(super) fn way(&self, lengths: &Lengths) -> Way {
        let (rows, shape) = match &self.buckets {
            None => (None, Shape { rows: None, lengths: lengths.clone() }),
            Some(buckets) => {
                let rows = self.rows(lengths);
                let bucket = rows.and_then(|rows| buckets.iter().find(|bucket| **bucket >= rows));
                let Some(bucket) = bucket else { return Way::Streamed };
                (rows, self.shape(*bucket))
            }
        };
        match self.graphs.iter().position(|(known, _)| *known == shape) {
            Some(graph) => Way::Replayed { graph, rows },
            None if self.buckets.is_none() && (self.graphs.len() >= self.most || lengths.contains(&0)) => Way::Streamed,
            None => Way::Captured(shape),
        }
    }

    /// Whether messages of these lengths may fit a bucket, if that is large enough; they do where there are none.
    pub(super) fn has_rows(&self, lengths: &[usize]) -> bool {
        self.buckets.is_none() || lengths.contains(&0) || self.rows(lengths).is_some()
    }

    /// How many rows all of the messages have; `None` if they differ, if one has no whole number of them, or none.
    fn rows(&self, lengths: &[usize]) -> Option<usize> {
        let mut rows =
            lengths.iter().zip(&self.row_bytes).map(|(bytes, row)| (bytes % row == 0).then_some(bytes / row));
        let first = rows.next()??;
        (first > 0 && rows.all(|other| other == Some(first))).then_some(first)
    }

    fn shape(&self, bucket: usize) -> Shape {
        Shape { rows: Some(bucket), lengths: self.row_bytes.iter().map(|row| row * bucket).collect() }
    }

    /// All that can be known before the first message.
    pub(super) fn shapes(&self) -> Vec<Shape> {
        self.buckets.iter().flatten().map(|bucket| self.shape(*bucket)).collect()
    }

    pub(super) fn add(&mut self, shape: Shape, graph: G) {
        self.graphs.push((shape, graph));
    }

    /// Those that are left are replayed; the shapes of the others have none any more.
    pub(super) fn retain(&mut self, stays: impl Fn(&G) -> bool) {
        self.graphs.retain(|(_, graph)| stays(graph));
    }

    pub(super) fn any(&self) -> Option<&G> {
        self.graphs.first().map(|(_, graph)| graph)
    }

    pub(super) fn get(&mut self, graph: usize) -> Option<&mut G> {
        self.graphs.get_mut(graph).map(|(_, graph)| graph)
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn replayed(graph: usize, rows: usize) -> Way {
        Way::Replayed { graph, rows: Some(rows) }
    }

    #[test]
    fn a_round_takes_the_smallest_bucket_that_holds_it() {
        let mut table = Table::new(Some(&[8, 2, 2]), smallvec![4, 16], 0);
        let two = Shape { rows: Some(2), lengths: smallvec![8, 32] };
        assert_eq!(table.way(&smallvec![4, 16]), Way::Captured(two.clone()));
        assert_eq!(table.shapes(), [two.clone(), Shape { rows: Some(8), lengths: smallvec![32, 128] }]);
        table.add(two, ());
        assert_eq!(table.way(&smallvec![4, 16]), replayed(0, 1));
        assert_eq!(table.way(&smallvec![8, 32]), replayed(0, 2));
        assert!(matches!(table.way(&smallvec![12, 48]), Way::Captured(_)));
        assert_eq!(table.way(&smallvec![36, 144]), Way::Streamed, "too large for any");
        assert_eq!(table.way(&smallvec![4, 32]), Way::Streamed, "not the same rows");
        assert_eq!(table.way(&smallvec![6, 24]), Way::Streamed, "no whole rows");
        assert_eq!(table.way(&smallvec![0, 0]), Way::Streamed, "no rows");
        let has_rows = [[36, 144], [4, 32], [6, 24], [0, 0]].map(|lengths| table.has_rows(&lengths));
        assert_eq!(has_rows, [true, false, false, true]);
    }

    #[test]
    fn without_buckets_each_combination_of_lengths_is_a_shape_until_there_are_too_many() {
        let mut table = Table::new(None, smallvec![4, 4], 1);
        let Way::Captured(shape) = table.way(&smallvec![4, 6]) else { panic!("a new one") };
        table.add(shape, ());
        assert_eq!(table.way(&smallvec![4, 6]), Way::Replayed { graph: 0, rows: None });
        assert_eq!(table.way(&smallvec![6, 4]), Way::Streamed);
    }
}
