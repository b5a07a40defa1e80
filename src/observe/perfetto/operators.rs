//! [`OperatorTracks`]: the tracks of one operator, and what is open on them.
//!
//! If runs or polls of an operator overlap anywhere in the timeline, a poll cannot be attributed to a run: each thread
//! that polls it then has a track of its own. Otherwise polls nest in runs. A poll that spans the begin or the end
//! of a run is in pieces: one on each side.

use smallvec::SmallVec;

use super::{
    Sheet, Timeline, name, operator_name,
    packets::{ArrowEnd, Note},
};
use crate::{observe::timeline::TimelineEvent, tracepoint::TraceEvent};

/// What a first pass over the timeline finds about an operator.
#[derive(Default)]
pub(super) struct Survey {
    /// Runs that ended without a begin: they began before the timeline.
    pub(super) runs_before: Vec<u64>,
    /// Threads of polls that ended without a begin.
    pub(super) polls_before: Vec<u32>,
    /// Runs or polls overlap.
    overlaps: bool,
    runs: Vec<u64>,
    /// Each thread that polled it, and whether it does.
    polls: SmallVec<[(u32, bool); 2]>,
    began: bool,
}

pub(super) fn survey(timeline: &Timeline) -> Vec<Survey> {
    let mut surveys: Vec<_> = timeline.operators.iter().map(|_| Survey::default()).collect();
    for TimelineEvent { thread, event, .. } in &timeline.events {
        let (TraceEvent::RunBegan { operator, .. }
        | TraceEvent::RunEnded { operator, .. }
        | TraceEvent::PollBegan { operator }
        | TraceEvent::PollEnded { operator }) = *event
        else {
            continue;
        };
        if let Some(survey) = surveys.get_mut(operator as usize) {
            survey.see(*thread, *event);
        }
    }
    surveys
}

impl Survey {
    fn see(&mut self, thread: u32, event: TraceEvent) {
        match event {
            TraceEvent::RunBegan { run, .. } => {
                self.overlaps |= !self.runs.is_empty();
                self.began = true;
                self.runs.push(run);
            }
            TraceEvent::RunEnded { run, .. } => match self.runs.iter().position(|open| *open == run) {
                Some(at) => {
                    self.runs.swap_remove(at);
                }
                None => {
                    self.overlaps |= self.began || !self.runs_before.is_empty();
                    self.runs_before.push(run);
                }
            },
            TraceEvent::PollBegan { .. } => {
                self.overlaps |= self.polls.iter().any(|(other, open)| *open && *other != thread);
                match self.polls.iter_mut().find(|(of, _)| *of == thread) {
                    Some((_, open)) => *open = true,
                    None => self.polls.push((thread, true)),
                }
            }
            TraceEvent::PollEnded { .. } => match self.polls.iter_mut().find(|(of, _)| *of == thread) {
                Some((_, open)) => *open = false,
                None => {
                    self.overlaps |= !self.polls.is_empty();
                    self.polls.push((thread, false));
                    self.polls_before.push(thread);
                }
            },
            _ => {}
        }
    }
}

/// The tracks of one operator.
#[derive(Default)]
pub(super) struct OperatorTracks {
    overlaps: bool,
    /// Each track of runs, and the run on it.
    runs: SmallVec<[(u64, Option<u64>); 1]>,
    /// Arrows whose head is the run: of the messages that it has taken.
    heads: SmallVec<[u64; 4]>,
    poll: PollState,
    /// If they overlap: each thread, its track, and whether it polls.
    polls: Vec<(u32, u64, bool)>,
}

/// A poll in the track of runs.
#[derive(Clone, Copy, Default)]
enum PollState {
    #[default]
    None,
    /// Not written yet: without a length it is left out.
    Since(u64, u32),
    Written(u32),
}

impl OperatorTracks {
    /// Adds the first track, and begins what began before the timeline.
    pub(super) fn start(&mut self, sheet: &mut Sheet<'_>, operator: u32, survey: &Survey) {
        self.overlaps = survey.overlaps;
        let from = sheet.timeline.from;
        self.run_track(sheet, operator);
        survey.runs_before.iter().for_each(|run| self.run_began(sheet, operator, from, *run));
        survey.polls_before.iter().for_each(|thread| self.poll_began(sheet, operator, from, *thread));
    }

    /// Finds or adds a track without a run. All have one name: they are shown as rows of one track.
    fn run_track(&mut self, sheet: &mut Sheet<'_>, operator: u32) -> usize {
        if let Some(free) = self.runs.iter().position(|(_, run)| run.is_none()) {
            return free;
        }
        let name = sheet.timeline.operators.get(operator as usize).map_or("", |name| name);
        let track = sheet.slices(name, sheet.operator_rank(operator.into()));
        self.runs.push((track, None));
        self.runs.len() - 1
    }

    pub(super) fn run_began(&mut self, sheet: &mut Sheet<'_>, operator: u32, at: u64, run: u64) {
        let poll = self.end_piece(sheet, at);
        let free = self.run_track(sheet, operator);
        let (track, open) = &mut self.runs[free];
        *open = Some(run);
        let notes = [(name::RUN_NUMBER, Note::Number(run))];
        sheet.writer.begin(at, *track, operator_name(operator), name::RUN_CATEGORY, &notes);
        self.resume(poll, at);
    }

    pub(super) fn run_ended(&mut self, sheet: &mut Sheet<'_>, at: u64, run: u64) {
        let Some(ended) = self.runs.iter().position(|(_, open)| *open == Some(run)) else { return };
        let poll = self.end_piece(sheet, at);
        let (track, open) = &mut self.runs[ended];
        *open = None;
        sheet.writer.end_with(at, *track, &self.heads);
        self.heads.clear();
        self.resume(poll, at);
    }

    pub(super) fn poll_began(&mut self, sheet: &mut Sheet<'_>, operator: u32, at: u64, thread: u32) {
        if !self.overlaps {
            self.end_poll(sheet, at);
            self.poll = PollState::Since(at, thread);
            return;
        }
        let poll = self.poll_track(sheet, operator, thread);
        let (_, track, open) = &mut self.polls[poll];
        if std::mem::replace(open, true) {
            sheet.writer.end(at, *track);
        }
        let notes = [(name::THREAD, sheet.thread(thread))];
        sheet.writer.begin(at, *track, name::POLL, name::POLL_CATEGORY, &notes);
    }

    pub(super) fn poll_ended(&mut self, sheet: &mut Sheet<'_>, at: u64, thread: u32) {
        if !self.overlaps {
            self.end_poll(sheet, at);
        } else if let Some((_, track, open)) = self.polls.iter_mut().find(|(of, ..)| *of == thread)
            && std::mem::replace(open, false)
        {
            sheet.writer.end(at, *track);
        }
    }

    /// The track of messages that the operator takes and sends on a thread.
    pub(super) fn message_track(&mut self, sheet: &mut Sheet<'_>, operator: u32, thread: u32) -> u64 {
        if self.overlaps {
            let poll = self.poll_track(sheet, operator, thread);
            return self.polls[poll].1;
        }
        self.write_poll(sheet);
        self.runs[0].0
    }

    /// Makes the run the head of an arrow, so that a path can be followed from run to run. False if it is not known which run,
    /// or none is open.
    pub(super) fn is_head(&mut self, arrow: u64) -> bool {
        let is_open = !self.overlaps && self.runs.first().is_some_and(|(_, run)| run.is_some());
        if is_open {
            self.heads.push(arrow);
        }
        is_open
    }

    /// Ends what is open.
    pub(super) fn finish(&mut self, sheet: &mut Sheet<'_>, at: u64) {
        self.end_piece(sheet, at);
        for (track, _) in self.runs.iter().filter(|(_, run)| run.is_some()) {
            sheet.writer.end_with(at, *track, &self.heads);
            self.heads.clear();
        }
        for (_, track, _) in self.polls.iter().filter(|(_, _, open)| *open) {
            sheet.writer.end(at, *track);
        }
    }

    fn poll_track(&mut self, sheet: &mut Sheet<'_>, operator: u32, thread: u32) -> usize {
        if let Some(known) = self.polls.iter().position(|(of, ..)| *of == thread) {
            return known;
        }
        let name = sheet.timeline.operators.get(operator as usize).map_or("", |name| name);
        let number = 1 + u64::from(thread);
        let rank = sheet.operator_rank(operator.into()) + number;
        let track = sheet.slices(&format!("{name} on thread {number}"), rank);
        self.polls.push((thread, track, false));
        self.polls.len() - 1
    }

    fn write_poll(&mut self, sheet: &mut Sheet<'_>) {
        if let PollState::Since(since, thread) = self.poll {
            let notes = [(name::THREAD, sheet.thread(thread))];
            sheet.writer.begin(since, self.runs[0].0, name::POLL, name::POLL_CATEGORY, &notes);
            self.poll = PollState::Written(thread);
        }
    }

    fn end_poll(&mut self, sheet: &mut Sheet<'_>, at: u64) {
        if matches!(self.poll, PollState::Since(since, _) if since < at) {
            self.write_poll(sheet);
        }
        if let PollState::Written(_) = std::mem::take(&mut self.poll) {
            sheet.writer.end(at, self.runs[0].0);
        }
    }

    /// Ends the piece of a poll at the begin or the end of a run. Returns the poll's thread.
    fn end_piece(&mut self, sheet: &mut Sheet<'_>, at: u64) -> Option<u32> {
        let (PollState::Since(_, thread) | PollState::Written(thread)) = self.poll else { return None };
        self.end_poll(sheet, at);
        Some(thread)
    }

    fn resume(&mut self, poll: Option<u32>, at: u64) {
        if let Some(thread) = poll {
            self.poll = PollState::Since(at, thread);
        }
    }
}

/// A message that was sent or taken.
pub(super) struct Instant {
    pub(super) name: u64,
    pub(super) arrow: Option<ArrowEnd>,
    pub(super) notes: [(u64, Note); 2],
}

impl Instant {
    pub(super) fn write(&self, sheet: &mut Sheet<'_>, at: u64, track: u64) {
        sheet.writer.instant(at, track, self.name, name::MESSAGE_CATEGORY, self.arrow, &self.notes);
    }
}
