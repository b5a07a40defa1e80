//! Reads what the encoder writes, as Perfetto does: packets by time, names by number, slices from their begin and end.

use std::collections::{BTreeMap, HashMap};

#[derive(Debug, Default)]
pub(super) struct Trace {
    pub(super) flows: Vec<String>,
    /// By begin; an instant has no length.
    pub(super) slices: Vec<Slice>,
    /// Indices of the slices that an arrow connects.
    pub(super) arrows: Vec<(usize, usize)>,
    /// Track with its unit, time, value.
    pub(super) counts: Vec<(String, u64, f64)>,
    pub(super) metadata: Vec<(String, u64)>,
}

#[derive(Debug, PartialEq)]
pub(super) struct Slice {
    pub(super) flow: String,
    pub(super) track: String,
    pub(super) track_number: u64,
    pub(super) depth: usize,
    pub(super) name: String,
    pub(super) category: String,
    pub(super) began: u64,
    pub(super) ended: u64,
    pub(super) notes: BTreeMap<String, String>,
}

struct Track {
    name: String,
    flow: String,
    /// Indices of slices.
    open: Vec<usize>,
}

enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    fn number(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            Self::Bytes(_) => panic!("not a number"),
        }
    }

    fn bytes(&self) -> &'a [u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(_) => panic!("not bytes"),
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (byte, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            break;
        }
    }
    value
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            1 => {
                let (number, rest) = bytes.split_at(8);
                bytes = rest;
                Field::Number(u64::from_le_bytes(number.try_into().unwrap()))
            }
            2 => {
                let length = varint(&mut bytes) as usize;
                let (body, rest) = bytes.split_at(length);
                bytes = rest;
                Field::Bytes(body)
            }
            other => panic!("wire type {other}"),
        };
        found.push((key >> 3, field));
    }
    found
}

fn find<'a, 'b>(fields: &'b [(u64, Field<'a>)], number: u64) -> Option<&'b Field<'a>> {
    fields.iter().find(|(field, _)| *field == number).map(|(_, field)| field)
}

pub(super) fn decode(trace: &[u8]) -> Trace {
    let mut packets: Vec<_> = fields(trace).iter().map(|(_, packet)| fields(packet.bytes())).collect();
    packets.sort_by_key(|packet| find(packet, 8).map_or(0, Field::number));
    let (mut trace, mut tracks, mut tails) = (Trace::default(), HashMap::new(), HashMap::new());
    // By sequence, list and number.
    let mut names = HashMap::new();
    for packet in &packets {
        let sequence = find(packet, 10).unwrap().number();
        if let Some(interned) = find(packet, 12) {
            for (list, entry) in fields(interned.bytes()) {
                let entry = fields(entry.bytes());
                let (number, name) = (find(&entry, 1).unwrap().number(), find(&entry, 2).unwrap().text());
                assert!(names.insert((sequence, list, number), name).is_none());
            }
        }
        if let Some(descriptor) = find(packet, 60) {
            describe(&fields(descriptor.bytes()), &mut tracks, &mut trace);
        }
        if let Some(event) = find(packet, 11) {
            let at = find(packet, 8).unwrap().number();
            let interned = |list, number| names[&(sequence, list, number)].clone();
            read_event(at, &fields(event.bytes()), interned, &mut tracks, &mut tails, &mut trace);
        }
        if let Some(chrome) = find(packet, 5) {
            let entry = fields(chrome.bytes());
            let entry = fields(entry[0].1.bytes());
            trace.metadata.push((entry[0].1.text(), entry[1].1.number()));
        }
    }
    assert!(tracks.values().all(|track: &Track| track.open.is_empty()), "slices without an end");
    trace
}

fn describe(descriptor: &[(u64, Field<'_>)], tracks: &mut HashMap<u64, Track>, trace: &mut Trace) {
    let number = find(descriptor, 1).unwrap().number();
    let mut name = find(descriptor, 2).unwrap().text();
    let flow = match find(descriptor, 5) {
        Some(parent) => tracks[&parent.number()].name.clone(),
        None => {
            trace.flows.push(name.clone());
            name.clone()
        }
    };
    if let Some(counter) = find(descriptor, 8) {
        let counter = fields(counter.bytes());
        let unit = find(&counter, 6).map_or("bytes".to_owned(), Field::text);
        name = format!("{name} [{unit}]");
    }
    assert!(tracks.insert(number, Track { name, flow, open: Vec::new() }).is_none());
}

fn read_event(
    at: u64,
    event: &[(u64, Field<'_>)],
    interned: impl Fn(u64, u64) -> String,
    tracks: &mut HashMap<u64, Track>,
    tails: &mut HashMap<u64, usize>,
    trace: &mut Trace,
) {
    let track_number = find(event, 11).unwrap().number();
    let track = tracks.get_mut(&track_number).unwrap();
    let kind = find(event, 9).unwrap().number();
    match kind {
        1 | 3 => {
            let name = match find(event, 10) {
                Some(number) => interned(2, number.number()),
                None => find(event, 23).unwrap().text(),
            };
            let notes = event.iter().filter(|(field, _)| *field == 4).map(|(_, note)| {
                let note = fields(note.bytes());
                let value = match find(&note, 3) {
                    Some(number) => number.number().to_string(),
                    None => interned(29, find(&note, 17).unwrap().number()),
                };
                (interned(3, find(&note, 1).unwrap().number()), value)
            });
            let index = trace.slices.len();
            trace.slices.push(Slice {
                flow: track.flow.clone(),
                track: track.name.clone(),
                track_number,
                depth: track.open.len(),
                name,
                category: interned(1, find(event, 3).unwrap().number()),
                began: at,
                ended: at,
                notes: notes.collect(),
            });
            if kind == 1 {
                track.open.push(index);
            }
            if let Some(id) = find(event, 47) {
                assert!(tails.insert(id.number(), index).is_none(), "two tails");
            }
            read_heads(event, index, tails, trace);
        }
        2 => {
            let index = track.open.pop().expect("no begin");
            trace.slices[index].ended = at;
            read_heads(event, index, tails, trace);
        }
        4 => {
            let value = f64::from_bits(find(event, 44).unwrap().number());
            trace.counts.push((track.name.clone(), at, value));
        }
        other => panic!("type {other}"),
    }
}

fn read_heads(event: &[(u64, Field<'_>)], head: usize, tails: &mut HashMap<u64, usize>, trace: &mut Trace) {
    for (_, id) in event.iter().filter(|(field, _)| *field == 48) {
        trace.arrows.push((tails.remove(&id.number()).expect("no tail"), head));
    }
}
