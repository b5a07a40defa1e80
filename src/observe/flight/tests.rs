use super::*;
use crate::tracepoint::{OUTSIDE, TraceClock, TraceEvent};

const ENDS: &[(u32, u32)] = &[(0, 1)];

/// A recorder of few events, a flow of it and the axis.
fn recorder() -> (Arc<FlightRecorder>, Arc<FlowSink>, TraceClock) {
    let recorder = FlightRecorder::new(1);
    (recorder.clone(), recorder.flow(), TraceClock::here())
}

fn all(recorder: &FlightRecorder, sink: &FlowSink, clock: &TraceClock) -> FlightEvents {
    recorder.events(sink, &clock.axis(), (0, u64::MAX), ENDS)
}

#[test]
fn an_event_comes_back_as_it_was() {
    use TraceEvent as E;
    let (recorder, sink, clock) = recorder();
    let other = recorder.flow();
    let events = [
        E::RunBegan { operator: 3, run: u64::MAX },
        E::Sent { operator: 0, hub: 0, message: 1 },
        E::Sent { operator: OUTSIDE, hub: 0, message: 2 },
        E::Taken { operator: 1, hub: 0, message: 1 },
        E::RunEnded { operator: u32::MAX - 1, run: 0 },
        E::PollBegan { operator: 7 },
        E::PollEnded { operator: 7 },
        E::Stalled,
        E::Failed { operator: OUTSIDE },
    ];
    for event in events {
        sink.record(clock.now(), event.pack());
        other.record(clock.now(), E::PollBegan { operator: 9 }.pack());
    }
    let found = all(&recorder, &sink, &clock);
    assert_eq!(found.events.iter().map(|event| event.event).collect::<Vec<_>>(), events);
    assert_eq!((found.threads.len(), found.lost), (1, 0));
    assert_eq!(all(&recorder, &other, &clock).events.len(), events.len());
    assert!(sink.take_stall() && !sink.take_stall() && !other.take_stall());
}

#[test]
fn what_was_overwritten_is_counted() {
    let (recorder, sink, clock) = recorder();
    for run in 0..SEGMENT as u64 + 100 {
        sink.record(clock.now(), TraceEvent::RunBegan { operator: 0, run }.pack());
    }
    // One axis: a later one has another rate.
    let axis = clock.axis();
    let found = recorder.events(&sink, &axis, (0, u64::MAX), ENDS);
    assert_eq!((found.events.len(), found.lost), (SEGMENT, 100));
    let TraceEvent::RunBegan { run, .. } = found.events[0].event else { panic!("{:?}", found.events[0]) };
    assert_eq!(run, 100);
    // None of a window that they are older than.
    let from = found.events[0].at;
    let found = recorder.events(&sink, &axis, (from, u64::MAX), ENDS);
    assert_eq!(found.lost, 0);
}

#[test]
fn a_trace_begins_where_the_events_of_all_threads_are_known() {
    let (recorder, sink, clock) = recorder();
    let record = |run| sink.record(clock.now(), TraceEvent::RunBegan { operator: 0, run }.pack());
    thread::scope(|scope| scope.spawn(|| record(1)).join()).unwrap();
    (0..SEGMENT as u64 + 1).for_each(|_| record(2));
    let found = all(&recorder, &sink, &clock);
    // The other thread's event, and the one that was overwritten.
    assert_eq!((found.events.len(), found.lost), (SEGMENT, 2));
    assert_eq!(found.from, found.events[0].at);
    assert!(found.events.iter().all(|event| event.event == TraceEvent::RunBegan { operator: 0, run: 2 }));
}

#[test]
fn a_window_counts_what_was_overwritten_in_it() {
    let (recorder, sink, clock) = recorder();
    let record = || sink.record(clock.now(), TraceEvent::PollBegan { operator: 0 }.pack());
    let note = || recorder.note(clock.host_now(), u64::MAX, &clock.axis());
    (0..1000).for_each(|_| record());
    note();
    let from = clock.host_now();
    (0..SEGMENT + 10).for_each(|_| record());
    let found = recorder.events(&sink, &clock.axis(), (from, u64::MAX), ENDS);
    assert_eq!((found.events.len(), found.lost), (SEGMENT, 10));
}

#[test]
fn the_rings_of_threads_that_have_ended_are_few_and_freed_when_they_are_old() {
    let (recorder, sink, clock) = recorder();
    for number in 0..MOST_ENDED + 10 {
        let (sink, at) = (sink.clone(), clock.now());
        let named = thread::Builder::new().name(format!("thread {number}"));
        let record = move || sink.record(at, TraceEvent::PollBegan { operator: 0 }.pack());
        named.spawn(record).unwrap().join().unwrap();
    }
    let found = all(&recorder, &sink, &clock);
    assert_eq!((found.threads.len(), found.lost), (MOST_ENDED, 10), "what had no room is counted");
    assert_eq!(found.threads.last().unwrap(), &format!("thread {}", MOST_ENDED + 9));
    recorder.note(clock.host_now(), u64::MAX, &clock.axis());
    assert_eq!(lock(&recorder.threads).len(), MOST_ENDED);
    recorder.note(clock.host_now() + 1_000_000_000, 1_000, &clock.axis());
    assert_eq!(lock(&recorder.threads).len(), 0);
}

#[test]
fn a_thread_forgets_the_ring_of_a_recorder_that_is_gone() {
    let (gone, sink, clock) = recorder();
    sink.record(clock.now(), TraceEvent::Stalled.pack());
    let ring = Arc::downgrade(&lock(&gone.threads)[0].ring);
    drop((gone, sink));
    assert!(ring.upgrade().is_some());
    let (_next, sink, clock) = recorder();
    sink.record(clock.now(), TraceEvent::Stalled.pack());
    assert!(ring.upgrade().is_none());
}

thread_local! {
    static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
}

/// Records when its thread ends.
struct Late(Arc<FlowSink>, u64);

impl Drop for Late {
    fn drop(&mut self) {
        self.0.record(self.1, TraceEvent::PollEnded { operator: 0 }.pack());
    }
}

#[test]
fn an_event_at_the_end_of_a_thread_is_recorded_or_counted() {
    let (recorder, sink, clock) = recorder();
    let ends = || {
        LATE.set(Some(Late(sink.clone(), clock.now())));
        sink.record(clock.now(), TraceEvent::PollBegan { operator: 0 }.pack());
    };
    thread::scope(|scope| scope.spawn(ends).join()).unwrap();
    let found = all(&recorder, &sink, &clock);
    assert_eq!(found.events.len() as u64 + found.lost, 2, "{:?}", found.events);
    assert!(lock(&recorder.threads).iter().all(RecordedThread::has_ended));
}
