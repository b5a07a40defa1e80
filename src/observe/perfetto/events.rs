//! [`EventTracks`]: the tracks of a flow, of its operators and of threads, from the timeline's events in their order.

use super::{
    OUTSIDE_RANK, Sheet,
    arrows::Arrows,
    name,
    operators::{Instant, OperatorTracks, survey},
    packets::ArrowEnd,
    threads::ThreadTracks,
};
use crate::{observe::timeline::TimelineEvent, tracepoint::TraceEvent};

pub(super) fn encode_events(sheet: &mut Sheet<'_>) {
    let timeline = sheet.timeline;
    let to = timeline.to.max(timeline.from);
    let mut tracks = EventTracks::new(sheet);
    for (index, event) in timeline.events.iter().enumerate() {
        tracks.now = tracks.now.max(event.at).min(to);
        tracks.event(sheet, index, event);
    }
    let EventTracks { mut operators, threads, .. } = tracks;
    operators.iter_mut().for_each(|tracks| tracks.finish(sheet, to));
    threads.finish(sheet, to);
}

struct EventTracks<'a> {
    operators: Vec<OperatorTracks>,
    threads: ThreadTracks,
    /// Of messages from outside.
    outside: Option<u64>,
    arrows: Arrows<'a>,
    now: u64,
}

impl<'a> EventTracks<'a> {
    /// Begins what began before the timeline.
    fn new(sheet: &mut Sheet<'a>) -> Self {
        let timeline = sheet.timeline;
        let surveys = survey(timeline);
        let mut operators: Vec<_> = surveys.iter().map(|_| OperatorTracks::default()).collect();
        for (number, (tracks, survey)) in (0..).zip(operators.iter_mut().zip(&surveys)) {
            tracks.start(sheet, number, survey);
        }
        let threads = ThreadTracks::start(sheet, &surveys);
        Self { operators, threads, outside: None, arrows: Arrows::new(timeline), now: timeline.from }
    }

    fn event(&mut self, sheet: &mut Sheet<'_>, index: usize, TimelineEvent { thread, event, .. }: &TimelineEvent) {
        let (now, thread) = (self.now, *thread);
        match *event {
            TraceEvent::Sent { operator, .. } => {
                if let Some(instant) = self.arrows.sent(sheet.flow, index) {
                    self.message(sheet, operator, thread, &instant);
                }
            }
            TraceEvent::Taken { operator, hub, message } => {
                let (late, mut instant) = self.arrows.taken(sheet.flow, hub, message);
                // A send whose time was read after that of the take: its arrow must not lead backwards.
                if let Some((sender, instant)) = late {
                    self.message(sheet, sender.operator, sender.thread, &instant);
                }
                if let (Some(ArrowEnd::Head(id)), Some(taker)) = (instant.arrow, self.operator(operator))
                    && taker.is_head(id)
                {
                    instant.arrow = None;
                }
                self.message(sheet, operator, thread, &instant);
            }
            TraceEvent::Stalled => {
                sheet.writer.instant(now, sheet.root, name::STALLED, name::FLOW_CATEGORY, None, &[]);
            }
            TraceEvent::Failed { operator } => {
                let text = match sheet.timeline.operators.get(operator as usize) {
                    Some(name) => format!("failed: `{name}`"),
                    None => "failed".to_owned(),
                };
                sheet.writer.named_instant(now, sheet.root, &text, name::FLOW_CATEGORY);
            }
            TraceEvent::RunBegan { operator, run } => {
                if let Some(tracks) = self.operator(operator) {
                    tracks.run_began(sheet, operator, now, run);
                }
            }
            TraceEvent::RunEnded { operator, run } => {
                if let Some(tracks) = self.operator(operator) {
                    tracks.run_ended(sheet, now, run);
                }
            }
            TraceEvent::PollBegan { operator } => {
                if let Some(tracks) = self.operator(operator) {
                    tracks.poll_began(sheet, operator, now, thread);
                    self.threads.poll_began(sheet, operator, now, thread);
                }
            }
            TraceEvent::PollEnded { operator } => {
                if let Some(tracks) = self.operator(operator) {
                    tracks.poll_ended(sheet, now, thread);
                    self.threads.poll_ended(sheet, operator, now, thread);
                }
            }
        }
    }

    fn operator(&mut self, number: u32) -> Option<&mut OperatorTracks> {
        self.operators.get_mut(number as usize)
    }

    fn message(&mut self, sheet: &mut Sheet<'_>, operator: u32, thread: u32, instant: &Instant) {
        let track = match self.operators.get_mut(operator as usize) {
            Some(tracks) => tracks.message_track(sheet, operator, thread),
            None => *self.outside.get_or_insert_with(|| sheet.slices("outside", OUTSIDE_RANK)),
        };
        instant.write(sheet, self.now, track);
    }
}
