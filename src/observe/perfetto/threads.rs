//! [`ThreadTracks`]: which operator each thread polls.

use super::{Sheet, name, operator_name, operators::Survey};

/// The tracks of the threads that poll operators.
pub(super) struct ThreadTracks(Vec<ThreadTrack>);

#[derive(Default)]
struct ThreadTrack {
    track: Option<u64>,
    /// The operators whose polls are open, innermost last.
    polls: Vec<u32>,
}

impl ThreadTracks {
    /// Begins the polls that began before the timeline.
    pub(super) fn start(sheet: &mut Sheet<'_>, surveys: &[Survey]) -> Self {
        let mut tracks = Self(sheet.timeline.threads.iter().map(|_| ThreadTrack::default()).collect());
        for (operator, survey) in (0..).zip(surveys) {
            for thread in &survey.polls_before {
                let first = tracks.0.get(*thread as usize).is_some_and(|track| track.polls.is_empty());
                if first {
                    tracks.poll_began(sheet, operator, sheet.timeline.from, *thread);
                }
            }
        }
        tracks
    }

    pub(super) fn poll_began(&mut self, sheet: &mut Sheet<'_>, operator: u32, at: u64, thread: u32) {
        let timeline = sheet.timeline;
        let of = timeline.threads.get(thread as usize).zip(self.0.get_mut(thread as usize));
        let Some((name, ThreadTrack { track, polls })) = of else { return };
        let rank = sheet.ranks().threads + u64::from(thread);
        let track =
            *track.get_or_insert_with(|| sheet.slices(&format!("thread {}: {name}", u64::from(thread) + 1), rank));
        polls.push(operator);
        sheet.writer.begin(at, track, operator_name(operator), name::POLL_CATEGORY, &[]);
    }

    /// Ends the poll of that operator, and those in it whose ends are missing.
    pub(super) fn poll_ended(&mut self, sheet: &mut Sheet<'_>, operator: u32, at: u64, thread: u32) {
        let Some(ThreadTrack { track: Some(track), polls }) = self.0.get_mut(thread as usize) else { return };
        if let Some(depth) = polls.iter().rposition(|open| *open == operator) {
            polls.drain(depth..).for_each(|_| sheet.writer.end(at, *track));
        }
    }

    /// Ends what is open.
    pub(super) fn finish(self, sheet: &mut Sheet<'_>, at: u64) {
        for ThreadTrack { track, polls } in &self.0 {
            polls.iter().zip(track.iter().cycle()).for_each(|(_, track)| sheet.writer.end(at, *track));
        }
    }
}
