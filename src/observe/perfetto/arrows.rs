//! [`Arrows`]: which ends of a message's way are in the timeline, so that each arrow has two.

use rustc_hash::FxHashMap;

use super::{
    Timeline, hub_note, name,
    operators::Instant,
    packets::{ArrowEnd, Note},
};
use crate::tracepoint::TraceEvent;

/// Messages that were sent in the timeline, and not yet taken.
pub(super) struct Arrows<'a> {
    timeline: &'a Timeline,
    /// By hub and message: the index of the event that sent it, and whether it is written.
    sent: FxHashMap<(u32, u64), (usize, bool)>,
}

/// From where a message was sent.
pub(super) struct MessageOrigin {
    pub(super) operator: u32,
    pub(super) thread: u32,
}

impl<'a> Arrows<'a> {
    pub(super) fn new(timeline: &'a Timeline) -> Self {
        let mut sent = FxHashMap::default();
        for (index, event) in timeline.events.iter().enumerate() {
            if let TraceEvent::Sent { hub, message, .. } = event.event {
                sent.insert((hub, message), (index, false));
            }
        }
        Self { timeline, sent }
    }

    /// The instant of the send with that index; `None` if it was written with its take.
    pub(super) fn sent(&mut self, flow: u64, index: usize) -> Option<Instant> {
        let TraceEvent::Sent { hub, message, .. } = self.timeline.events.get(index)?.event else { return None };
        let (_, written) = self.sent.get_mut(&(hub, message))?;
        let arrow = (!*written).then(|| ArrowEnd::Tail(id(flow, hub, message)));
        *written = true;
        Some(self.instant(name::SENT, hub, message, arrow))
    }

    /// The instant of a take; before it that of the send, if that comes later in the timeline. Only the first take of a
    /// message is the head of an arrow.
    pub(super) fn taken(&mut self, flow: u64, hub: u32, message: u64) -> (Option<(MessageOrigin, Instant)>, Instant) {
        let Some((index, written)) = self.sent.remove(&(hub, message)) else {
            return (None, self.instant(name::TAKEN, hub, message, None));
        };
        let id = id(flow, hub, message);
        let late = self.timeline.events.get(index).filter(|_| !written).and_then(|event| match event.event {
            TraceEvent::Sent { operator, .. } => {
                let instant = self.instant(name::SENT, hub, message, Some(ArrowEnd::Tail(id)));
                Some((MessageOrigin { operator, thread: event.thread }, instant))
            }
            _ => None,
        });
        (late, self.instant(name::TAKEN, hub, message, Some(ArrowEnd::Head(id))))
    }

    fn instant(&self, name: u64, hub: u32, message: u64, arrow: Option<ArrowEnd>) -> Instant {
        let hub = (name::HUB, hub_note(self.timeline, hub));
        Instant { name, arrow, notes: [(name::MESSAGE_NUMBER, Note::Number(message)), hub] }
    }
}

/// The number of an arrow, unique in the trace. Messages so many apart that their numbers wrap are not in one timeline.
fn id(flow: u64, hub: u32, message: u64) -> u64 {
    flow << 56 | (u64::from(hub) & 0xF_FFFF) << 36 | (message & 0xF_FFFF_FFFF)
}
