//! Tests the queue against a plain list, with random sequences of operations.

use proptest::prelude::*;

use super::{
    queue::{Counts, Pushed, Queue},
    when_full::WhenFull,
};

#[derive(Clone, Copy, Debug)]
enum Step {
    Push,
    Take,
    Discard,
    Read,
    Hold,
    LetGo,
    DropOldest,
    Refuse,
    BeginMove(usize),
    EndMove(usize),
    Peek(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => Just(Step::Push),
        3 => Just(Step::Take),
        1 => Just(Step::Discard),
        2 => Just(Step::Read),
        2 => Just(Step::Hold),
        1 => Just(Step::LetGo),
        1 => Just(Step::DropOldest),
        1 => Just(Step::Refuse),
        2 => (1..4_usize).prop_map(Step::BeginMove),
        3 => (0..4_usize).prop_map(Step::EndMove),
        1 => (0..4_usize).prop_map(Step::Peek),
    ];
    prop::collection::vec(step, 0..80)
}

/// The reference model. Messages are the numbers from 1 on.
#[derive(Default)]
struct List {
    capacity: usize,
    when_full: WhenFull,
    messages: Vec<(u64, bool)>,
    /// The message that is being moved, whether or not it is still in the list.
    moving: Option<u64>,
    reserved: usize,
    seen: bool,
    pushed: u64,
    counts: Counts,
}

impl List {
    fn ready(&self) -> usize {
        self.messages.iter().filter(|(_, ready)| *ready).count()
    }

    fn remove_oldest(&mut self) -> Option<u64> {
        if self.reserved >= self.messages.len() {
            return None;
        }
        let (oldest, _) = self.messages.remove(self.reserved);
        let seen = self.reserved == 0 && std::mem::take(&mut self.seen);
        self.counts.dropped += u64::from(!seen);
        Some(oldest)
    }

    fn take(&mut self) -> Option<(u64, bool)> {
        let first = self.messages.first().is_some_and(|(_, ready)| *ready).then(|| self.messages.remove(0));
        self.reserved -= usize::from(first.is_some() && self.reserved > 0);
        let new = first.is_some() && !(std::mem::take(&mut self.seen) && first.is_some());
        first.map(|(number, _)| (number, new))
    }
}

/// `moves`: messages are not ready when they are pushed.
fn check(when_full: WhenFull, capacity: usize, moves: bool, steps: &[Step]) -> Result<(), TestCaseError> {
    let queue = Queue::new(capacity, when_full);
    let mut list = List { capacity, when_full, ..List::default() };
    let mut out = Vec::new();
    for step in steps {
        match *step {
            Step::Push => {
                let message = list.pushed + 1;
                let mut place = Some(message);
                let is_full = list.messages.len() - list.reserved >= list.capacity;
                let oldest = match list.when_full {
                    WhenFull::Block if is_full => {
                        prop_assert_eq!(queue.push(&mut place, !moves), Pushed::NotQueued);
                        prop_assert_eq!(place, Some(message));
                        continue;
                    }
                    WhenFull::DropNewest if is_full => {
                        prop_assert_eq!(queue.push(&mut place, !moves), Pushed::Dropped);
                        prop_assert_eq!(place, Some(message));
                        list.counts.dropped += 1;
                        continue;
                    }
                    _ if is_full => list.remove_oldest(),
                    _ => None,
                };
                list.pushed = message;
                list.messages.push((message, !moves));
                match queue.push(&mut place, !moves) {
                    Pushed::Evicted => prop_assert_eq!(place, oldest),
                    Pushed::Queued => {
                        prop_assert!(oldest.is_none() || oldest == list.moving);
                        prop_assert_eq!(place, None);
                    }
                    other => prop_assert!(false, "{:?}", other),
                }
            }
            Step::Take | Step::Discard => {
                let discards = matches!(step, Step::Discard);
                let mut place = None;
                let taken = if discards { queue.discard(&mut place) } else { queue.take(&mut place) };
                let wanted = list.take();
                prop_assert_eq!(taken, wanted.map(|(number, _)| number));
                prop_assert_eq!(place, taken);
                if let Some((_, true)) = wanted {
                    *(if discards { &mut list.counts.untaken } else { &mut list.counts.taken }) += 1;
                }
            }
            Step::Read if when_full.keeps_latest() => {
                let mut place = None;
                let read = queue.read(&mut place, |message| *message);
                prop_assert_eq!(read, list.messages.first().map(|(number, _)| *number));
                prop_assert_eq!(place, read);
                if read.is_some() && !std::mem::replace(&mut list.seen, true) {
                    list.counts.taken += 1;
                }
            }
            Step::Hold if queue.is_lossy() => {
                list.reserved = list.ready();
                prop_assert_eq!(queue.reserve_ready(), list.reserved);
            }
            Step::LetGo if queue.is_lossy() => {
                list.reserved = 0;
                let mut wanted = Vec::new();
                while list.messages.len() > capacity {
                    wanted.extend(list.remove_oldest());
                }
                let out: Vec<_> = queue.release_reserved().into_iter().collect();
                prop_assert_eq!(out, wanted);
            }
            Step::DropOldest if queue.is_lossy() => {
                let (dropped, oldest) = (queue.drop_oldest(), list.remove_oldest());
                prop_assert_eq!(dropped.is_some(), oldest.is_some());
                // The queue does not have a message that is being moved.
                prop_assert_eq!(dropped.flatten(), oldest.filter(|oldest| list.moving != Some(*oldest)));
            }
            Step::Refuse => {
                queue.count_dropped();
                list.counts.dropped += 1;
            }
            Step::BeginMove(most) if moves => {
                // Messages may be dropped during a move in the other queues.
                let most = if when_full.blocks_writer() { most } else { 1 };
                let waiting = list.messages.iter().filter(|(_, ready)| !ready);
                let next: Vec<_> = waiting.map(|(number, _)| *number).take(most).collect();
                let mut begun = Vec::new();
                queue.begin_move(most, &mut begun);
                if out.is_empty() {
                    prop_assert_eq!(&begun, &next);
                    (out, list.moving) = (begun, next.first().copied());
                } else {
                    prop_assert_eq!(begun, [0; 0], "one move at a time");
                }
            }
            Step::EndMove(moved) if !out.is_empty() => {
                let (moved, mut orphans) = (moved.min(out.len()), Vec::new());
                queue.end_move(out.clone(), moved, &mut orphans);
                let is_there = |number: &u64| list.messages.iter().any(|(other, _)| other == number);
                let dropped: Vec<_> = out.iter().copied().filter(|number| !is_there(number)).collect();
                prop_assert_eq!(orphans, dropped, "a message dropped during its move is not put back");
                for message in &out[..moved] {
                    list.messages
                        .iter_mut()
                        .filter(|(number, _)| number == message)
                        .for_each(|(_, ready)| *ready = true);
                }
                (out, list.moving) = (Vec::new(), None);
            }
            Step::Peek(at) => {
                let wanted = list.messages.get(at).filter(|(_, ready)| *ready).map(|(number, _)| *number);
                prop_assert_eq!(queue.peek(at, |message| *message), wanted);
            }
            _ => {}
        }
        prop_assert_eq!(queue.len(), list.messages.len());
        prop_assert_eq!(queue.ready(), list.ready());
        prop_assert_eq!(queue.all_ready(), list.ready() == list.messages.len());
        prop_assert_eq!(queue.counts(), list.counts);
        prop_assert_eq!(queue.unread(), list.messages.len() - usize::from(list.seen));
        prop_assert!(list.messages.len() <= capacity + list.reserved);
    }
    if !out.is_empty() {
        queue.end_move(out, 0, &mut Vec::new());
    }
    let refused = steps.iter().filter(|step| matches!(step, Step::Refuse)).count() as u64;
    drop(queue.close_reader());
    let Counts { taken, dropped, untaken } = queue.counts();
    let newest = if when_full == WhenFull::DropNewest { dropped - refused } else { 0 };
    prop_assert_eq!(taken + dropped + untaken, list.pushed + newest + refused, "each is counted once");
    Ok(())
}

proptest! {
    #[test]
    fn the_queue_is_a_list_that_counts(
        steps in steps(),
        capacity in 1..4_usize,
        when_full in prop_oneof![Just(WhenFull::Block), Just(WhenFull::DropNewest), Just(WhenFull::DropOldest)],
        moves in any::<bool>(),
    ) {
        check(when_full, capacity, moves, &steps)?;
    }

    #[test]
    fn the_newest_message_can_be_read_repeatedly(steps in steps()) {
        check(WhenFull::KeepLatest, 1, false, &steps)?;
    }
}
