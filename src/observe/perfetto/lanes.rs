//! [`Lanes`]: tracks for slices that may overlap.

/// The tracks of one stream: on each, slices do not overlap.
#[derive(Default)]
pub(super) struct Lanes {
    /// Each track and the end of its last slice.
    lanes: Vec<(u64, u64)>,
}

impl Lanes {
    /// Takes a track that is free at `began`, until `ended`. `add` adds a track.
    pub(super) fn free_at(&mut self, began: u64, ended: u64, add: impl FnOnce() -> u64) -> u64 {
        match self.lanes.iter_mut().find(|(_, until)| *until <= began) {
            Some((track, until)) => {
                *until = ended;
                *track
            }
            None => {
                let track = add();
                self.lanes.push((track, ended));
                track
            }
        }
    }
}
