//! The encoder's traces, read back by a decoder of what it writes.

mod decoder;

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;

use self::decoder::{Slice, Trace, decode};
use super::encode;
use crate::{
    observe::timeline::{Counter, CounterSample, Timeline, TimelineEvent, TimelineHub, TimelineSlice},
    tracepoint::{OUTSIDE, TraceEvent},
};

const READ: u32 = 0;
const UPPER: u32 = 1;
const WRITE: u32 = 2;

fn timeline(from: u64, to: u64, events: Vec<(u64, u32, TraceEvent)>) -> Timeline {
    let hub = |name: &str| TimelineHub { name: Arc::from(name), capacity: 2 };
    let events = events.into_iter().map(|(at, thread, event)| TimelineEvent { at, thread, event }).collect();
    Timeline {
        flow: Arc::from("shout"),
        from,
        to,
        operators: ["read", "upper", "write"].map(Arc::from).to_vec(),
        hubs: vec![hub("read.output -> upper.input"), hub("upper.output -> write.input")],
        threads: vec!["worker".into(), "worker".into()],
        streams: vec!["cuda:0 upper".into(), "cuda:0 copies to device".into()],
        devices: vec![Arc::from("cuda:0")],
        events,
        device: Vec::new(),
        counters: Vec::new(),
        lost: 0,
    }
}

fn trace(timelines: &[Timeline]) -> Trace {
    let mut out = Vec::new();
    encode(timelines, &mut out);
    decode(&out)
}

/// The slices of a track as `name begin..end`, each with two more spaces in front for each one around it.
fn drawn(trace: &Trace, track: &str) -> Vec<String> {
    let slices = trace.slices.iter().filter(|slice| slice.track == track);
    slices
        .map(|Slice { depth, name, began, ended, .. }| format!("{}{name} {began}..{ended}", "  ".repeat(*depth)))
        .collect()
}

#[test]
fn polls_nest_in_runs_and_messages_in_polls() {
    let events = vec![
        (20, 0, TraceEvent::PollBegan { operator: UPPER }),
        (21, 0, TraceEvent::Taken { operator: UPPER, hub: 0, message: 7 }),
        (22, 0, TraceEvent::RunBegan { operator: UPPER, run: 3 }),
        (25, 0, TraceEvent::PollEnded { operator: UPPER }),
        (30, 1, TraceEvent::PollBegan { operator: UPPER }),
        (33, 1, TraceEvent::Sent { operator: UPPER, hub: 1, message: 4 }),
        (35, 1, TraceEvent::RunEnded { operator: UPPER, run: 3 }),
        (35, 1, TraceEvent::RunBegan { operator: UPPER, run: 4 }),
        (36, 1, TraceEvent::RunEnded { operator: UPPER, run: 4 }),
        (37, 1, TraceEvent::PollEnded { operator: UPPER }),
    ];
    let trace = trace(&[timeline(10, 90, events)]);
    assert_eq!(
        drawn(&trace, "upper"),
        [
            "poll 20..22",
            "  taken 21..21",
            "upper 22..35",
            "  poll 22..25",
            "  poll 30..35",
            "    sent 33..33",
            "upper 35..36",
            "  poll 35..36",
            "poll 36..37",
        ]
    );
    assert_eq!(drawn(&trace, "thread 1: worker"), ["upper 20..25"]);
    assert_eq!(drawn(&trace, "thread 2: worker"), ["upper 30..37"]);
    let run = trace.slices.iter().find(|slice| slice.category == "run").unwrap();
    assert_eq!(run.notes["run"], "3");
    let taken = trace.slices.iter().find(|slice| slice.name == "taken").unwrap();
    assert_eq!((&*taken.notes["message"], &*taken.notes["hub"]), ("7", "read.output -> upper.input"));
}

#[test]
fn what_begins_before_or_ends_after_the_timeline_is_clipped() {
    let mut timeline = timeline(
        100,
        200,
        vec![
            (90, 0, TraceEvent::PollBegan { operator: READ }),
            (110, 0, TraceEvent::PollEnded { operator: READ }),
            (120, 1, TraceEvent::PollEnded { operator: UPPER }),
            (130, 1, TraceEvent::RunEnded { operator: UPPER, run: 9 }),
            (150, 0, TraceEvent::RunBegan { operator: READ, run: 1 }),
            (160, 0, TraceEvent::PollBegan { operator: READ }),
        ],
    );
    timeline.device = [(90, 110), (150, 250), (10, 20), (210, 220)]
        .map(|(began, ended)| TimelineSlice { stream: 0, operator: UPPER, run: 1, began, ended })
        .to_vec();
    let trace = trace(&[timeline]);
    assert_eq!(drawn(&trace, "read"), ["poll 100..110", "read 150..200", "  poll 160..200"]);
    assert_eq!(drawn(&trace, "upper"), ["upper 100..130", "  poll 100..120"]);
    assert_eq!(drawn(&trace, "thread 1: worker"), ["read 100..110", "read 160..200"]);
    assert_eq!(drawn(&trace, "thread 2: worker"), ["upper 100..120"]);
    assert_eq!(drawn(&trace, "cuda:0 upper"), ["upper 100..110", "upper 150..200"]);
}

#[test]
fn overlapping_runs_are_on_tracks_of_one_name_and_their_polls_on_one_for_each_thread() {
    let events = vec![
        (20, 0, TraceEvent::RunBegan { operator: UPPER, run: 1 }),
        (20, 0, TraceEvent::PollBegan { operator: UPPER }),
        (30, 1, TraceEvent::RunBegan { operator: UPPER, run: 2 }),
        (30, 1, TraceEvent::PollBegan { operator: UPPER }),
        (35, 1, TraceEvent::Sent { operator: UPPER, hub: 1, message: 1 }),
        (40, 0, TraceEvent::PollEnded { operator: UPPER }),
        (40, 0, TraceEvent::RunEnded { operator: UPPER, run: 1 }),
        (50, 0, TraceEvent::RunBegan { operator: UPPER, run: 3 }),
        (60, 1, TraceEvent::PollEnded { operator: UPPER }),
        (60, 1, TraceEvent::RunEnded { operator: UPPER, run: 2 }),
        (70, 0, TraceEvent::RunEnded { operator: UPPER, run: 3 }),
    ];
    let trace = trace(&[timeline(10, 90, events)]);
    let runs = trace.slices.iter().filter(|slice| slice.track == "upper");
    let runs: Vec<_> = runs.map(|run| (run.track_number, &*run.notes["run"])).collect();
    let (first, second) = (runs[0].0, runs[1].0);
    assert_ne!(first, second);
    assert_eq!(runs, [(first, "1"), (second, "2"), (first, "3")]);
    assert_eq!(drawn(&trace, "upper on thread 1"), ["poll 20..40"]);
    assert_eq!(drawn(&trace, "upper on thread 2"), ["poll 30..60", "  sent 35..35"]);
}

#[test]
fn an_arrow_leads_from_where_a_message_was_sent_to_where_it_was_first_taken() {
    let events = vec![
        (20, 0, TraceEvent::Sent { operator: READ, hub: 0, message: 1 }),
        // The same number in another hub.
        (21, 0, TraceEvent::Sent { operator: OUTSIDE, hub: 1, message: 1 }),
        (30, 0, TraceEvent::Taken { operator: UPPER, hub: 0, message: 1 }),
        // The latest value is read once more.
        (40, 0, TraceEvent::Taken { operator: UPPER, hub: 0, message: 1 }),
        (50, 0, TraceEvent::Taken { operator: WRITE, hub: 1, message: 1 }),
        // Sent before the timeline.
        (60, 0, TraceEvent::Taken { operator: WRITE, hub: 1, message: 0 }),
        // The time of the take was read first.
        (70, 0, TraceEvent::Taken { operator: UPPER, hub: 0, message: 2 }),
        (71, 1, TraceEvent::Sent { operator: READ, hub: 0, message: 2 }),
        // Is taken after the timeline.
        (80, 0, TraceEvent::Sent { operator: READ, hub: 0, message: 3 }),
    ];
    let trace = trace(&[timeline(10, 90, events)]);
    let end = |index: usize| (&*trace.slices[index].track, trace.slices[index].began);
    let arrows: Vec<_> = trace.arrows.iter().map(|(tail, head)| (end(*tail), end(*head))).collect();
    assert_eq!(
        arrows,
        [(("read", 20), ("upper", 30)), (("outside", 21), ("write", 50)), (("read", 70), ("upper", 70)),]
    );
    assert_eq!(drawn(&trace, "read"), ["sent 20..20", "sent 70..70", "sent 80..80"]);
    assert_eq!(drawn(&trace, "upper"), ["taken 30..30", "taken 40..40", "taken 70..70"]);
}

#[test]
fn an_arrow_leads_to_the_run_that_took_the_message() {
    let events = vec![
        (20, 0, TraceEvent::Sent { operator: READ, hub: 0, message: 1 }),
        (25, 1, TraceEvent::RunBegan { operator: UPPER, run: 1 }),
        (28, 0, TraceEvent::Sent { operator: READ, hub: 0, message: 2 }),
        (30, 1, TraceEvent::Taken { operator: UPPER, hub: 0, message: 1 }),
        (35, 1, TraceEvent::Taken { operator: UPPER, hub: 0, message: 2 }),
        (40, 1, TraceEvent::RunEnded { operator: UPPER, run: 1 }),
        (50, 0, TraceEvent::Sent { operator: READ, hub: 0, message: 3 }),
        (55, 1, TraceEvent::RunBegan { operator: UPPER, run: 2 }),
        (60, 1, TraceEvent::Taken { operator: UPPER, hub: 0, message: 3 }),
    ];
    let trace = trace(&[timeline(10, 90, events)]);
    let arrows = trace.arrows.iter().map(|(tail, head)| (&trace.slices[*tail], &trace.slices[*head]));
    let arrows: Vec<_> = arrows.map(|(tail, head)| (tail.began, &*head.category, &*head.notes["run"])).collect();
    assert_eq!(arrows, [(20, "run", "1"), (28, "run", "1"), (50, "run", "2")]);
    assert_eq!(
        drawn(&trace, "upper"),
        ["upper 25..40", "  taken 30..30", "  taken 35..35", "upper 55..90", "  taken 60..60"]
    );
}

#[test]
fn counters_have_units_and_only_changes_are_written() {
    let mut timeline = timeline(10, 90, Vec::new());
    let sample = |(at, counter, value)| CounterSample { at, counter, value };
    timeline.counters = vec![
        (20, Counter::HubFill(0), 1.0),
        (20, Counter::Memory(0), 4096.0),
        (30, Counter::HubFill(0), 1.0),
        (30, Counter::Memory(0), 8192.0),
        (40, Counter::HubFill(0), 0.0),
        // There are no such hub and device.
        (50, Counter::HubFill(9), 0.0),
        (50, Counter::Memory(9), 0.0),
    ]
    .into_iter()
    .map(sample)
    .collect();
    let trace = trace(&[timeline]);
    let counts = |name: &str| {
        trace.counts.iter().filter(|(track, ..)| track == name).map(|(_, at, value)| (*at, *value)).collect::<Vec<_>>()
    };
    assert_eq!(counts("queue of read.output -> upper.input [messages]"), [(20, 1.0), (40, 0.0)]);
    assert_eq!(counts("memory of cuda:0 [bytes]"), [(20, 4096.0), (30, 8192.0)]);
}

#[test]
fn copies_that_overlap_are_on_tracks_of_one_name() {
    let mut timeline = timeline(10, 90, Vec::new());
    timeline.device = [(20, 40), (30, 50), (40, 60)]
        .map(|(began, ended)| TimelineSlice { stream: 1, operator: OUTSIDE, run: 1, began, ended })
        .to_vec();
    let trace = trace(&[timeline]);
    assert_eq!(
        drawn(&trace, "cuda:0 copies to device"),
        ["copies to device 20..40", "copies to device 30..50", "copies to device 40..60"]
    );
    let tracks: Vec<_> = trace.slices.iter().map(|slice| slice.track_number).collect();
    assert_eq!((tracks[0], tracks[0] != tracks[1]), (tracks[2], true));
}

#[test]
fn stalls_failures_and_lost_events_are_on_the_flows_own_track() {
    let events = vec![(20, 0, TraceEvent::Stalled), (30, 0, TraceEvent::Failed { operator: UPPER })];
    let timeline = Timeline { lost: 12, ..timeline(10, 90, events) };
    let trace = trace(&[timeline]);
    assert_eq!(drawn(&trace, "shout"), ["12 events lost 10..10", "stalled 20..20", "failed: `upper` 30..30"]);
    assert_eq!(trace.metadata, [("lost events of flow `shout`".to_owned(), 12)]);
}

#[test]
fn flows_stand_side_by_side() {
    let events = |at| {
        vec![
            (at, 0, TraceEvent::Sent { operator: READ, hub: 0, message: 1 }),
            (at + 1, 0, TraceEvent::Taken { operator: UPPER, hub: 0, message: 1 }),
        ]
    };
    let second = Timeline { flow: Arc::from("whisper"), ..timeline(10, 90, events(21)) };
    let trace = trace(&[timeline(10, 90, events(20)), second]);
    assert_eq!(trace.flows, ["shout", "whisper"]);
    let arrows = trace.arrows.iter().map(|(tail, head)| [*tail, *head].map(|end| &*trace.slices[end].flow));
    assert_eq!(arrows.collect::<Vec<_>>(), [["shout"; 2], ["whisper"; 2]]);
    assert!(decode(&[]).flows.is_empty());
}

/// Events of all kinds, in the order of their times; also such as cannot come from one flow.
fn any_events() -> impl Strategy<Value = Vec<(u64, u32, TraceEvent)>> {
    let event = (0..7_u32, 0..4_u32, 0..4_u64, 0..3_u32).prop_map(|(kind, operator, number, hub)| match kind {
        0 => TraceEvent::RunBegan { operator, run: number },
        1 => TraceEvent::RunEnded { operator, run: number },
        2 => TraceEvent::PollBegan { operator },
        3 => TraceEvent::PollEnded { operator },
        4 => TraceEvent::Sent { operator: if operator == 3 { OUTSIDE } else { operator }, hub, message: number },
        5 => TraceEvent::Taken { operator, hub, message: number },
        _ => TraceEvent::Failed { operator },
    });
    let events = proptest::collection::vec((0..3_u64, 0..3_u32, event), 0..60);
    events.prop_map(|events| {
        let mut now = 0;
        events
            .into_iter()
            .map(|(later, thread, event)| {
                now += later;
                (now, thread, event)
            })
            .collect()
    })
}

proptest! {
    /// The decoder panics at a slice that ends before one in it, and at an arrow with one end.
    #[test]
    fn slices_nest_and_arrows_have_two_ends_whatever_happened(
        events in any_events(),
        (from, length) in (0..60_u64, 0..60_u64),
        spans in proptest::collection::vec((0..3_u32, 0..90_u64, 0..30_u64), 0..20),
    ) {
        let mut timeline = timeline(from, from + length, events);
        timeline.device = spans.iter()
            .map(|(stream, began, length)| TimelineSlice { stream: *stream, operator: UPPER, run: 1, began: *began, ended: began + length })
            .collect();
        timeline.device.sort_by_key(|slice| slice.began);
        let trace = trace(&[timeline]);
        for slice in &trace.slices {
            prop_assert!(from <= slice.began && slice.began <= slice.ended && slice.ended <= from + length, "{slice:?}");
        }
        for (tail, head) in &trace.arrows {
            let [tail, head] = [tail, head].map(|end| &trace.slices[*end]);
            let is_taken = |slice: &Slice| {
                slice.name == "taken" && slice.notes == tail.notes && slice.track_number == head.track_number
                    && (head.began..=head.ended).contains(&slice.began) && tail.began <= slice.began
            };
            prop_assert!(tail.name == "sent" && trace.slices.iter().any(is_taken), "{tail:?} {head:?}");
        }
    }

    /// Runs and polls as a flow has them: every run is in the trace once, with its polls, at its times.
    #[test]
    fn each_run_and_poll_is_drawn_once(steps in proptest::collection::vec((0..3_u32, 1..9_u64, 0..4_u64, 1..9_u64), 1..40)) {
        let (mut now, mut runs, mut events, mut expected) = (100, BTreeMap::new(), Vec::new(), Vec::new());
        for (operator, wait, polls, length) in steps {
            let run = runs.entry(operator).and_modify(|run| *run += 1).or_insert(1_u64);
            now += wait;
            let began = now;
            events.push((now, 0, TraceEvent::RunBegan { operator, run: *run }));
            for _ in 0..polls {
                now += 1;
                events.push((now, 0, TraceEvent::PollBegan { operator }));
                events.push((now + length, 0, TraceEvent::PollEnded { operator }));
                now += length;
                expected.push((operator, "poll", now - length, now));
            }
            now += 1;
            events.push((now, 0, TraceEvent::RunEnded { operator, run: *run }));
            expected.push((operator, "run", began, now));
        }
        let trace = trace(&[timeline(0, now, events)]);
        let operators = ["read", "upper", "write"];
        let mut drawn = Vec::new();
        for slice in &trace.slices {
            if let Some(operator) = operators.iter().position(|name| *name == slice.track) {
                drawn.push((operator as u32, &*slice.category, slice.began, slice.ended));
                prop_assert_eq!(slice.depth, usize::from(slice.category == "poll"));
            }
        }
        drawn.sort();
        expected.sort();
        prop_assert_eq!(drawn, expected);
    }
}
