//! Timelines as a trace in [Perfetto]'s format, of protobuf packets, for <https://ui.perfetto.dev>.
//!
//! The tracks of a flow are below one of its name, in this order:
//!
//! | track | on it |
//! |---|---|
//! | the flow | stalls, failures, and how many events were lost |
//! | `outside` | messages that are sent from outside the flow |
//! | each operator | its runs, in each the polls of its task, in those the messages taken and sent |
//! | of an operator with overlapping runs | its runs, in as many rows as overlap; polls and messages on a track for each thread |
//! | each thread | polls, by the operator's name |
//! | each stream | its device work, by the operator's name |
//! | each hub, each device | counters: messages in the queue, bytes in use |
//!
//! An arrow leads from where a message was sent to the run that took it first; to the instant when it was taken, where it is not
//! known which run that was.
//!
//! What began before [`Timeline::from`] or ended after [`Timeline::to`] is clipped there, so that slices always nest.
//!
//! A flow is no process in Perfetto's sense: in its user interface, tracks of a process are sorted by name.
//!
//! [Perfetto]: https://perfetto.dev/docs/reference/synthetic-track-event

mod arrows;
mod events;
mod lanes;
mod operators;
mod packets;
mod protobuf;
#[cfg(test)]
mod tests;
mod threads;

use self::{
    lanes::Lanes,
    packets::{Interned, Note, TraceWriter, TrackKind},
};
use super::timeline::{Counter, Timeline};

/// Numbers of interned names.
mod name {
    pub(super) const POLL: u64 = 1;
    pub(super) const SENT: u64 = 2;
    pub(super) const TAKEN: u64 = 3;
    pub(super) const STALLED: u64 = 4;
    /// The number of the first operator's name; the streams' follow.
    pub(super) const OPERATORS: u64 = 8;

    pub(super) const RUN_CATEGORY: u64 = 1;
    pub(super) const POLL_CATEGORY: u64 = 2;
    pub(super) const MESSAGE_CATEGORY: u64 = 3;
    pub(super) const DEVICE_CATEGORY: u64 = 4;
    pub(super) const FLOW_CATEGORY: u64 = 5;

    pub(super) const RUN_NUMBER: u64 = 1;
    pub(super) const MESSAGE_NUMBER: u64 = 2;
    pub(super) const HUB: u64 = 3;
    pub(super) const THREAD: u64 = 4;
}

/// Appends a whole trace of these flows to `out`.
pub(super) fn encode(timelines: &[Timeline], out: &mut Vec<u8>) {
    let mut tracks = 0;
    for (flow, timeline) in (1..).zip(timelines) {
        encode_flow(timeline, flow, TraceWriter::new(out, flow, &mut tracks));
    }
}

/// What the parts of an encoder share.
struct Sheet<'a> {
    timeline: &'a Timeline,
    /// The flow's number, from one.
    flow: u64,
    /// The flow's own track, which all others are below.
    root: u64,
    writer: TraceWriter<'a>,
}

/// The rank of the track for messages from outside.
const OUTSIDE_RANK: u64 = 1;

/// The places of tracks among those of the flow.
struct Ranks {
    threads: u64,
    streams: u64,
    hubs: u64,
    devices: u64,
}

impl Sheet<'_> {
    fn ranks(&self) -> Ranks {
        let threads = self.operator_rank(self.timeline.operators.len() as u64);
        let streams = threads + self.timeline.threads.len() as u64;
        let hubs = streams + self.timeline.streams.len() as u64;
        Ranks { threads, streams, hubs, devices: hubs + self.timeline.hubs.len() as u64 }
    }

    /// The rank of an operator's runs; its polls on each thread follow.
    fn operator_rank(&self, operator: u64) -> u64 {
        1 + OUTSIDE_RANK + operator * (1 + self.timeline.threads.len() as u64)
    }

    fn slices(&mut self, name: &str, rank: u64) -> u64 {
        self.writer.track(name, self.root, rank, TrackKind::Slices)
    }

    fn thread(&self, thread: u32) -> Note {
        let Timeline { hubs, threads, .. } = self.timeline;
        let known = (thread as usize) < threads.len();
        if known { Note::Text(1 + hubs.len() as u64 + u64::from(thread)) } else { Note::Unknown }
    }
}

/// The interned name of an operator.
fn operator_name(operator: u32) -> u64 {
    name::OPERATORS + u64::from(operator)
}

/// The interned name of a stream's work that is of no single operator: a section's, or a hub's copies.
fn stream_name(timeline: &Timeline, stream: u32) -> u64 {
    name::OPERATORS + timeline.operators.len() as u64 + u64::from(stream)
}

/// A hub as a note.
fn hub_note(timeline: &Timeline, hub: u32) -> Note {
    if (hub as usize) < timeline.hubs.len() { Note::Text(1 + u64::from(hub)) } else { Note::Unknown }
}

fn names(timeline: &Timeline) -> impl Iterator<Item = (Interned, u64, &str)> {
    let categories = ["run", "poll", "message", "device", "flow"];
    let events = ["poll", "sent", "taken", "stalled"];
    let annotations = ["run", "message", "hub", "thread"];
    let operators = timeline.operators.iter().map(|name| &**name);
    // Without the device.
    let streams = timeline.streams.iter().map(|name| name.split_once(' ').map_or(&**name, |(_, work)| work));
    let hubs = timeline.hubs.iter().map(|hub| &*hub.name);
    let threads = timeline.threads.iter().map(|name| &**name);
    let list = |list, first: u64| move |(at, name)| (list, first + at as u64, name);
    let categories = categories.into_iter().enumerate().map(list(Interned::Category, 1));
    let events = events.into_iter().enumerate().map(list(Interned::EventName, 1));
    let operators = operators.chain(streams).enumerate().map(list(Interned::EventName, name::OPERATORS));
    let annotations = annotations.into_iter().enumerate().map(list(Interned::AnnotationName, 1));
    let texts = hubs.chain(threads).enumerate().map(list(Interned::AnnotationText, 1));
    categories.chain(events).chain(operators).chain(annotations).chain(texts)
}

fn encode_flow(timeline: &Timeline, flow: u64, mut writer: TraceWriter<'_>) {
    writer.names(names(timeline));
    let root = writer.track(&timeline.flow, 0, 0, TrackKind::Root);
    let mut sheet = Sheet { timeline, flow, root, writer };
    sheet.writer.metadata(&format!("lost events of flow `{}`", timeline.flow), timeline.lost);
    if timeline.lost > 0 {
        let text = format!("{} events lost", timeline.lost);
        sheet.writer.named_instant(timeline.from, root, &text, name::FLOW_CATEGORY);
    }
    events::encode_events(&mut sheet);
    encode_device(&mut sheet);
    encode_counters(&mut sheet);
}

/// Spans that overlap, such as copies from several streams, are on tracks of one name.
fn encode_device(sheet: &mut Sheet<'_>) {
    let timeline = sheet.timeline;
    let mut streams: Vec<Lanes> = timeline.streams.iter().map(|_| Lanes::default()).collect();
    for slice in &timeline.device {
        let (began, ended) = (slice.began.max(timeline.from), slice.ended.min(timeline.to));
        let Some((lanes, stream)) =
            streams.get_mut(slice.stream as usize).zip(timeline.streams.get(slice.stream as usize))
        else {
            continue;
        };
        if began > ended {
            continue;
        }
        let rank = sheet.ranks().streams + u64::from(slice.stream);
        let track = lanes.free_at(began, ended, || sheet.slices(stream, rank));
        let notes = [(name::RUN_NUMBER, Note::Number(slice.run))];
        let of_operator = (slice.operator as usize) < timeline.operators.len();
        let name = if of_operator { operator_name(slice.operator) } else { stream_name(timeline, slice.stream) };
        sheet.writer.begin(began, track, name, name::DEVICE_CATEGORY, &notes);
        sheet.writer.end(ended, track);
    }
}

/// Writes the samples that differ from the one before.
fn encode_counters(sheet: &mut Sheet<'_>) {
    let timeline = sheet.timeline;
    let mut hubs = vec![None; timeline.hubs.len()];
    let mut devices = vec![None; timeline.devices.len()];
    for sample in &timeline.counters {
        let last = match sample.counter {
            Counter::HubFill(hub) => hubs.get_mut(hub as usize),
            Counter::Memory(device) => devices.get_mut(device as usize),
        };
        let Some(last) = last else { continue };
        let track = match *last {
            Some((_, value)) if value == sample.value => continue,
            Some((track, _)) => track,
            None => counter_track(sheet, sample.counter),
        };
        *last = Some((track, sample.value));
        let at = sample.at.clamp(timeline.from, timeline.to.max(timeline.from));
        sheet.writer.count(at, track, sample.value);
    }
}

fn counter_track(sheet: &mut Sheet<'_>, counter: Counter) -> u64 {
    let Timeline { hubs, devices, .. } = sheet.timeline;
    let ranks = sheet.ranks();
    match counter {
        Counter::HubFill(hub) => {
            let known = hubs.get(hub as usize);
            let (name, capacity) = known.map_or(("", 0), |hub| (&*hub.name, hub.capacity));
            let kind = TrackKind::Messages { description: &format!("{capacity} messages fit in the queue") };
            sheet.writer.track(&format!("queue of {name}"), sheet.root, ranks.hubs + u64::from(hub), kind)
        }
        Counter::Memory(device) => {
            let name = devices.get(device as usize).map_or("", |name| name);
            let rank = ranks.devices + u64::from(device);
            sheet.writer.track(&format!("memory of {name}"), sheet.root, rank, TrackKind::Bytes)
        }
    }
}
