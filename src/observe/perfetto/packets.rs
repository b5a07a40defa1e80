//! [`TraceWriter`]: one flow's packets of a Perfetto trace. Numbers of fields are those of Perfetto's `.proto` files.

use super::protobuf::{double, fixed64, nested, string, varint};

/// `Trace.packet`.
const PACKET: u32 = 1;

/// Fields of `TracePacket`.
mod packet {
    pub(super) const CHROME_EVENTS: u32 = 5;
    pub(super) const TIMESTAMP: u32 = 8;
    pub(super) const SEQUENCE: u32 = 10;
    pub(super) const TRACK_EVENT: u32 = 11;
    pub(super) const INTERNED_DATA: u32 = 12;
    pub(super) const SEQUENCE_FLAGS: u32 = 13;
    pub(super) const TRACK_DESCRIPTOR: u32 = 60;
}

/// Values of `TracePacket.sequence_flags`.
const STATE_CLEARED: u64 = 1;
const NEEDS_STATE: u64 = 2;

/// Fields of `TrackEvent`, and its types.
mod event {
    pub(super) const CATEGORY: u32 = 3;
    pub(super) const ANNOTATION: u32 = 4;
    pub(super) const TYPE: u32 = 9;
    pub(super) const NAME_INTERNED: u32 = 10;
    pub(super) const TRACK: u32 = 11;
    pub(super) const NAME: u32 = 23;
    pub(super) const DOUBLE_COUNTER: u32 = 44;
    pub(super) const FLOW: u32 = 47;
    pub(super) const TERMINATING_FLOW: u32 = 48;

    pub(super) const SLICE_BEGIN: u64 = 1;
    pub(super) const SLICE_END: u64 = 2;
    pub(super) const INSTANT: u64 = 3;
    pub(super) const COUNTER: u64 = 4;
}

/// What is written once and referred to by number: a list in `InternedData`, whose numbers count from one.
#[derive(Clone, Copy)]
pub(super) enum Interned {
    Category = 1,
    EventName = 2,
    AnnotationName = 3,
    AnnotationText = 29,
}

/// What a track shows.
pub(super) enum TrackKind<'a> {
    /// Instants, and below it other tracks in the order of their ranks.
    Root,
    Slices,
    /// A counter of messages.
    Messages {
        description: &'a str,
    },
    /// A counter of bytes.
    Bytes,
}

/// A value of `TrackDescriptor.child_ordering`.
const CHILDREN_BY_RANK: u64 = 3;

/// Values of `CounterDescriptor.unit`.
const COUNT: u64 = 2;
const SIZE_BYTES: u64 = 3;

/// An end of an arrow.
#[derive(Clone, Copy)]
pub(super) enum ArrowEnd {
    Tail(u64),
    Head(u64),
}

/// The value of a debug annotation.
#[derive(Clone, Copy)]
pub(super) enum Note {
    Number(u64),
    /// The number of an [`Interned::AnnotationText`].
    Text(u64),
    /// Is left out.
    Unknown,
}

/// Writes one flow's packets: one sequence, with interned names of its own.
pub(super) struct TraceWriter<'a> {
    pub(super) out: &'a mut Vec<u8>,
    sequence: u64,
    /// The number of the last track: they are unique in the whole trace.
    tracks: &'a mut u64,
}

impl<'a> TraceWriter<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>, sequence: u64, tracks: &'a mut u64) -> Self {
        Self { out, sequence, tracks }
    }

    /// Writes the interned names; comes before all events.
    pub(super) fn names<'b>(&mut self, lists: impl Iterator<Item = (Interned, u64, &'b str)>) {
        nested(self.out, PACKET, |out| {
            varint(out, packet::SEQUENCE, self.sequence);
            varint(out, packet::SEQUENCE_FLAGS, STATE_CLEARED);
            nested(out, packet::INTERNED_DATA, |out| {
                for (list, number, name) in lists {
                    nested(out, list as u32, |out| {
                        varint(out, 1, number);
                        string(out, 2, name);
                    });
                }
            });
        });
    }

    /// Adds a track and returns its number. `parent`: zero for none; `rank`: its place among its parent's tracks.
    pub(super) fn track(&mut self, name: &str, parent: u64, rank: u64, kind: TrackKind<'_>) -> u64 {
        *self.tracks += 1;
        let number = *self.tracks;
        nested(self.out, PACKET, |out| {
            varint(out, packet::SEQUENCE, self.sequence);
            nested(out, packet::TRACK_DESCRIPTOR, |out| {
                varint(out, 1, number);
                string(out, 2, name);
                if parent != 0 {
                    varint(out, 5, parent);
                    varint(out, 12, rank);
                }
                match kind {
                    TrackKind::Root => varint(out, 11, CHILDREN_BY_RANK),
                    TrackKind::Slices => {}
                    TrackKind::Messages { description } => {
                        nested(out, 8, |out| {
                            varint(out, 3, COUNT);
                            string(out, 6, "messages");
                        });
                        string(out, 14, description);
                    }
                    TrackKind::Bytes => nested(out, 8, |out| varint(out, 3, SIZE_BYTES)),
                }
            });
        });
        number
    }

    /// Writes a number into the trace's metadata, as `cr-NAME`.
    pub(super) fn metadata(&mut self, name: &str, value: u64) {
        nested(self.out, PACKET, |out| {
            varint(out, packet::SEQUENCE, self.sequence);
            nested(out, packet::CHROME_EVENTS, |out| {
                nested(out, 2, |out| {
                    string(out, 1, name);
                    varint(out, 4, value);
                });
            });
        });
    }

    fn event(&mut self, at: u64, track: u64, kind: u64, body: impl FnOnce(&mut Vec<u8>)) {
        nested(self.out, PACKET, |out| {
            varint(out, packet::TIMESTAMP, at);
            varint(out, packet::SEQUENCE, self.sequence);
            varint(out, packet::SEQUENCE_FLAGS, NEEDS_STATE);
            nested(out, packet::TRACK_EVENT, |out| {
                varint(out, event::TYPE, kind);
                varint(out, event::TRACK, track);
                body(out);
            });
        });
    }

    /// `name` and `category` are numbers of interned names, as are the names of `notes`.
    pub(super) fn begin(&mut self, at: u64, track: u64, name: u64, category: u64, notes: &[(u64, Note)]) {
        self.event(at, track, event::SLICE_BEGIN, |out| {
            varint(out, event::CATEGORY, category);
            varint(out, event::NAME_INTERNED, name);
            annotate(out, notes);
        });
    }

    pub(super) fn end(&mut self, at: u64, track: u64) {
        self.end_with(at, track, &[]);
    }

    /// Ends a slice that is the head of these arrows.
    pub(super) fn end_with(&mut self, at: u64, track: u64, heads: &[u64]) {
        self.event(at, track, event::SLICE_END, |out| {
            heads.iter().for_each(|id| fixed64(out, event::TERMINATING_FLOW, *id));
        });
    }

    pub(super) fn instant(
        &mut self,
        at: u64,
        track: u64,
        name: u64,
        category: u64,
        arrow: Option<ArrowEnd>,
        notes: &[(u64, Note)],
    ) {
        self.event(at, track, event::INSTANT, |out| {
            varint(out, event::CATEGORY, category);
            varint(out, event::NAME_INTERNED, name);
            match arrow {
                Some(ArrowEnd::Tail(id)) => fixed64(out, event::FLOW, id),
                Some(ArrowEnd::Head(id)) => fixed64(out, event::TERMINATING_FLOW, id),
                None => {}
            }
            annotate(out, notes);
        });
    }

    /// An instant with a name of its own.
    pub(super) fn named_instant(&mut self, at: u64, track: u64, name: &str, category: u64) {
        self.event(at, track, event::INSTANT, |out| {
            varint(out, event::CATEGORY, category);
            string(out, event::NAME, name);
        });
    }

    pub(super) fn count(&mut self, at: u64, track: u64, value: f64) {
        self.event(at, track, event::COUNTER, |out| double(out, event::DOUBLE_COUNTER, value));
    }
}

fn annotate(out: &mut Vec<u8>, notes: &[(u64, Note)]) {
    for (name, value) in notes {
        let (field, value) = match value {
            Note::Number(number) => (3, *number),
            Note::Text(text) => (17, *text),
            Note::Unknown => continue,
        };
        nested(out, event::ANNOTATION, |out| {
            varint(out, 1, *name);
            varint(out, field, value);
        });
    }
}
