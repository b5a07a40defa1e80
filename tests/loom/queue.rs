//! Model check of `hub/queue.rs`, with `hub/end_waker.rs` and `hub/when_full.rs`: a writer, a reader and the task that moves messages.

#[allow(dead_code)]
#[path = "../../src/hub/queue.rs"]
mod queue;

#[allow(dead_code)]
#[path = "../../src/hub/end_waker.rs"]
mod end_waker;

#[allow(dead_code)]
#[path = "../../src/hub/when_full.rs"]
mod when_full;

use std::{
    future::poll_fn,
    pin::pin,
    task::{Context, Poll, Waker},
};

use self::{
    end_waker::Interest,
    queue::{Answer, Counts, Pushed, Queue},
    when_full::WhenFull,
};
use crate::sync::model;
use loom::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Polls with a waker that its clones equal, as those of an operator do. The one that loom polls with does not: the queue
/// would not recognise it, and register it anew at each poll.
fn block_on<F: Future>(future: F) -> F::Output {
    let (mut future, mut own) = (pin!(future), None);
    loom::future::block_on(poll_fn(|cx| {
        let own = own.get_or_insert_with(|| cx.waker().clone());
        assert!(own.clone().will_wake(own));
        future.as_mut().poll(&mut Context::from_waker(own))
    }))
}

fn push(queue: &Queue<u32>, message: u32, ready: bool) -> Pushed {
    queue.push(&mut Some(message), ready)
}

fn take(queue: &Queue<u32>) -> Option<u32> {
    let mut place = None;
    queue.take(&mut place);
    place
}

async fn send(queue: &Queue<u32>, message: u32, ready: bool) -> bool {
    let answer = poll_fn(|cx| match queue.poll_room(Interest::Change, cx.waker()) {
        Answer::Wait => Poll::Pending,
        answer => Poll::Ready(answer),
    });
    answer.await == Answer::Yes && push(queue, message, ready) == Pushed::Queued
}

async fn receive(queue: &Queue<u32>) -> Option<u32> {
    let answer = poll_fn(|cx| match queue.poll_message(Interest::Change, cx.waker()) {
        Answer::Wait => Poll::Pending,
        answer => Poll::Ready(answer),
    });
    match answer.await {
        Answer::Yes => take(queue),
        _ => None,
    }
}

/// Each end is one task, which always has the same waker.
#[test]
fn a_queue_of_one_delivers_everything_in_order_and_ends() {
    model(3, || {
        let queue = Arc::new(Queue::new(1, WhenFull::Block));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                block_on(async {
                    for message in 1..=2 {
                        assert!(send(&queue, message, true).await);
                    }
                });
                queue.close_writer();
            })
        };
        block_on(async {
            assert_eq!(receive(&queue).await, Some(1));
            assert_eq!(receive(&queue).await, Some(2));
            assert_eq!(receive(&queue).await, None);
        });
        writer.join().unwrap();
    });
}

#[test]
fn a_reader_keeps_waiting_after_a_spurious_wake() {
    model(3, || {
        let queue = Arc::new(Queue::new(1, WhenFull::Block));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                queue.wake_both();
                assert_eq!(push(&queue, 1, true), Pushed::Queued);
            })
        };
        assert_eq!(block_on(receive(&queue)), Some(1));
        writer.join().unwrap();
    });
}

/// The writer moves a message itself, before its push, only if no other one waits to be moved: whichever task moves the
/// first one, the order is kept.
#[test]
fn a_message_moved_before_its_push_overtakes_no_other() {
    model(2, || {
        let queue = Arc::new(Queue::new(2, WhenFull::Block));
        assert_eq!(push(&queue, 1, false), Pushed::Queued);
        let mover = {
            let queue = queue.clone();
            thread::spawn(move || pump_freely(&queue))
        };
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                let ready = queue.all_ready();
                assert_eq!(push(&queue, 2, ready), Pushed::Queued);
                if !ready {
                    pump_freely(&queue);
                }
                queue.close_writer();
            })
        };
        assert_eq!(block_on(take_all(&queue)), [1, 2]);
        mover.join().unwrap();
        writer.join().unwrap();
        assert_eq!(queue.counts(), Counts { taken: 2, dropped: 0, untaken: 0 });
    });
}

#[test]
fn a_dropped_reader_ends_the_writer() {
    model(3, || {
        let queue = Arc::new(Queue::new(1, WhenFull::Block));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                let mut sent = 0;
                while sent < 3 && block_on(send(&queue, sent, true)) {
                    sent += 1;
                }
                sent
            })
        };
        let taken = block_on(receive(&queue)).is_some() as u32;
        let left = queue.close_reader().len() as u32;
        let sent = writer.join().unwrap();
        assert!(sent >= taken + left, "{sent} sent, {taken} taken, {left} left");
    });
}

fn begin_move(queue: &Queue<u32>) -> Option<u32> {
    let mut message = Vec::new();
    queue.begin_move(1, &mut message);
    message.pop()
}

/// Moves messages two at a time.
fn pump_pairs(queue: &Queue<u32>) {
    loop {
        let mut messages = Vec::new();
        queue.begin_move(2, &mut messages);
        let moved = messages.len();
        if moved == 0 || !queue.end_move(messages, moved, &mut Vec::new()) {
            return;
        }
    }
}

#[test]
fn messages_that_are_moved_together_arrive_in_order() {
    model(3, || {
        let queue = Arc::new(Queue::new(3, WhenFull::Block));
        for message in 1..=2 {
            assert_eq!(push(&queue, message, false), Pushed::Queued);
        }
        let mover = {
            let queue = queue.clone();
            thread::spawn(move || pump_pairs(&queue))
        };
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                assert_eq!(push(&queue, 3, false), Pushed::Queued);
                pump_pairs(&queue);
                queue.close_writer();
            })
        };
        assert_eq!(block_on(take_all(&queue)), [1, 2, 3]);
        mover.join().unwrap();
        writer.join().unwrap();
        assert_eq!(queue.counts(), Counts { taken: 3, dropped: 0, untaken: 0 });
    });
}

/// A pool of one envelope: a move needs it, and the reader returns it and pumps again.
fn pump(queue: &Queue<u32>, envelopes: &AtomicUsize) {
    while let Some(message) = begin_move(queue) {
        let moved = envelopes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |free| free.checked_sub(1)).is_ok();
        let mut orphans = Vec::new();
        let again = queue.end_move([message], usize::from(moved), &mut orphans);
        assert!(orphans.is_empty());
        if !again {
            break;
        }
    }
}

/// Moves all messages; the message 2 cannot be moved.
fn pump_but_two(queue: &Queue<u32>) {
    while let Some(message) = begin_move(queue) {
        if message == 2 {
            queue.drop_moving();
        } else if !queue.end_move([message], 1, &mut Vec::new()) {
            break;
        }
    }
}

#[test]
fn a_reader_is_notified_of_the_end_if_the_last_message_cannot_be_moved() {
    model(3, || {
        let queue = Arc::new(Queue::new(2, WhenFull::Block));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                for message in 1..=2 {
                    assert_eq!(push(&queue, message, false), Pushed::Queued);
                }
                queue.close_writer();
                // After the end: nothing else notifies the reader.
                pump_but_two(&queue);
            })
        };
        assert_eq!(block_on(receive(&queue)), Some(1));
        assert_eq!(block_on(receive(&queue)), None);
        writer.join().unwrap();
        assert_eq!(queue.counts(), Counts { taken: 1, dropped: 1, untaken: 0 });
    });
}

#[test]
fn a_message_that_cannot_be_moved_makes_room_for_the_next() {
    model(3, || {
        let queue = Arc::new(Queue::new(2, WhenFull::Block));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                for message in 1..=3 {
                    assert!(block_on(send(&queue, message, false)));
                }
                queue.close_writer();
                pump_but_two(&queue);
            })
        };
        // Until the writer has room for the third.
        while queue.counts().dropped == 0 {
            pump_but_two(&queue);
            thread::yield_now();
        }
        assert_eq!(block_on(receive(&queue)), Some(1));
        assert_eq!(block_on(receive(&queue)), Some(3));
        assert_eq!(block_on(receive(&queue)), None);
        writer.join().unwrap();
    });
}

#[test]
fn a_message_that_waits_for_an_envelope_is_moved_when_one_is_returned() {
    model(3, || {
        let queue = Arc::new(Queue::new(2, WhenFull::Block));
        let envelopes = Arc::new(AtomicUsize::new(1));
        let writer = {
            let (queue, envelopes) = (queue.clone(), envelopes.clone());
            thread::spawn(move || {
                for message in 1..=2 {
                    assert!(block_on(send(&queue, message, false)));
                    pump(&queue, &envelopes);
                }
            })
        };
        for message in 1..=2 {
            assert_eq!(block_on(receive(&queue)), Some(message));
            envelopes.fetch_add(1, Ordering::SeqCst);
            pump(&queue, &envelopes);
        }
        writer.join().unwrap();
    });
}

/// An operator with two inputs: it waits at one of them and checks the other.
async fn receive_both(first: &Queue<u32>, second: &Queue<u32>) -> Option<(u32, u32)> {
    let both = poll_fn(|cx| {
        let (one, other) = match first.poll_message(Interest::Change, cx.waker()) {
            Answer::Yes => (Answer::Yes, second.poll_message(Interest::Change, cx.waker())),
            waits => (waits, second.poll_message(Interest::Close, cx.waker())),
        };
        match (one, other) {
            (Answer::Never, _) | (_, Answer::Never) => Poll::Ready(false),
            (Answer::Yes, Answer::Yes) => Poll::Ready(true),
            _ => Poll::Pending,
        }
    });
    if both.await { take(first).zip(take(second)) } else { None }
}

#[test]
fn a_reader_of_two_queues_gets_both_messages_and_sees_the_end() {
    model(3, || {
        let (first, second) = (Arc::new(Queue::new(1, WhenFull::Block)), Arc::new(Queue::new(1, WhenFull::Block)));
        let writer = {
            let (first, second) = (first.clone(), second.clone());
            thread::spawn(move || {
                assert_eq!(push(&second, 2, true), Pushed::Queued);
                assert_eq!(push(&first, 1, true), Pushed::Queued);
                // The first queue does not end.
                second.close_writer();
            })
        };
        assert_eq!(block_on(receive_both(&first, &second)), Some((1, 2)));
        assert_eq!(block_on(receive_both(&first, &second)), None);
        writer.join().unwrap();
    });
}

#[test]
fn a_writer_that_waits_for_something_else_is_notified_of_a_dropped_reader() {
    model(3, || {
        let (input, output) = (Queue::<u32>::new(1, WhenFull::Block), Arc::new(Queue::new(1, WhenFull::Block)));
        assert_eq!(push(&output, 1, true), Pushed::Queued);
        let mut reader = None;
        let ended = poll_fn(|cx| {
            reader.get_or_insert_with(|| {
                // It has waited for room before.
                assert_eq!(output.poll_room(Interest::Change, cx.waker()), Answer::Wait);
                assert_eq!(take(&output), Some(1));
                assert_eq!(push(&output, 2, true), Pushed::Queued);
                let output = output.clone();
                thread::spawn(move || drop(output.close_reader()))
            });
            match (input.poll_message(Interest::Change, cx.waker()), output.poll_room(Interest::Close, cx.waker())) {
                (_, Answer::Wait) => Poll::Pending,
                // There is room, or the reader is already dropped.
                _ => Poll::Ready(()),
            }
        });
        block_on(ended);
        reader.unwrap().join().unwrap();
    });
}

#[test]
fn a_writer_that_never_waited_for_room_is_notified_of_a_dropped_reader() {
    model(3, || {
        let output = Arc::new(Queue::<u32>::new(1, WhenFull::Block));
        let reader = {
            let output = output.clone();
            thread::spawn(move || drop(output.close_reader()))
        };
        // There is room, but the writer waits for something else.
        block_on(poll_fn(|cx| match output.poll_room(Interest::Change, cx.waker()) {
            Answer::Never => Poll::Ready(()),
            _ => Poll::Pending,
        }));
        reader.join().unwrap();
    });
}

/// It was first polled by a combinator, which has a waker of its own.
#[test]
fn a_writer_with_another_waker_is_notified_of_a_dropped_reader() {
    model(3, || {
        let output = Arc::new(Queue::<u32>::new(1, WhenFull::Block));
        assert_eq!(output.poll_room(Interest::Change, Waker::noop()), Answer::Yes);
        let reader = {
            let output = output.clone();
            thread::spawn(move || drop(output.close_reader()))
        };
        block_on(poll_fn(|cx| match output.poll_room(Interest::Change, cx.waker()) {
            Answer::Never => Poll::Ready(()),
            _ => Poll::Pending,
        }));
        reader.join().unwrap();
    });
}

/// Pushes so many messages, counted from 1, into a queue that never makes its writer wait, and moves them.
fn push_all(queue: &Queue<u32>, messages: u32, ready: bool) {
    for message in 1..=messages {
        assert_ne!(push(queue, message, ready), Pushed::NotQueued);
        pump_freely(queue);
    }
    queue.close_writer();
}

/// There are enough envelopes.
fn pump_freely(queue: &Queue<u32>) {
    while let Some(message) = begin_move(queue) {
        if !queue.end_move([message], 1, &mut Vec::new()) {
            break;
        }
    }
}

/// Takes all messages, like an operator that takes one in each run.
async fn take_all(queue: &Queue<u32>) -> Vec<u32> {
    let mut taken = Vec::new();
    loop {
        drop(queue.release_reserved());
        let answer = poll_fn(|cx| match queue.poll_message(Interest::Change, cx.waker()) {
            Answer::Wait => Poll::Pending,
            answer => Poll::Ready(answer),
        });
        if answer.await == Answer::Never {
            return taken;
        }
        // The queue may have dropped it by now, but not after `hold`.
        if queue.reserve_ready() > 0 {
            taken.push(take(queue).expect("a held message"));
        }
    }
}

fn lossy(full: WhenFull, ready: bool) {
    model(3, move || {
        let queue = Arc::new(Queue::new(1, full));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || push_all(&queue, 3, ready))
        };
        let taken = block_on(take_all(&queue));
        writer.join().unwrap();
        assert!(taken.is_sorted() && !taken.is_empty(), "{taken:?}");
        assert_eq!(taken.last(), Some(&3), "the newest message is kept");
        let taken = taken.len() as u64;
        assert_eq!(queue.counts(), Counts { taken, dropped: 3 - taken, untaken: 0 });
    });
}

#[test]
fn drop_oldest_keeps_held_messages_and_counts_the_others() {
    lossy(WhenFull::DropOldest, true);
}

/// While a newer message is being moved there is nothing to take, unless a message is held.
#[test]
fn drop_oldest_for_a_message_that_must_be_moved_keeps_held_messages() {
    lossy(WhenFull::DropOldest, false);
}

/// A replaced message and its replacement: a lock-free check never sees the queue empty in between.
fn never_empty(full: WhenFull, take: impl Fn(&Queue<u32>) -> Option<u32> + Copy + Send + Sync + 'static) {
    model(3, move || {
        let queue = Arc::new(Queue::new(1, full));
        assert_eq!(push(&queue, 1, true), Pushed::Queued);
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                (2..=3).for_each(|message| assert_ne!(push(&queue, message, true), Pushed::NotQueued))
            })
        };
        assert_eq!(queue.poll_message(Interest::Change, Waker::noop()), Answer::Yes);
        assert_eq!((queue.len(), queue.ready()), (1, 1));
        assert!(take(&queue).is_some());
        writer.join().unwrap();
    });
}

#[test]
fn drop_oldest_always_has_a_message() {
    never_empty(WhenFull::DropOldest, take);
}

#[test]
fn latest_always_has_a_message() {
    never_empty(WhenFull::KeepLatest, |queue| {
        let mut place = None;
        queue.read(&mut place, Clone::clone);
        place
    });
}

#[test]
fn drop_newest_counts() {
    // No message in the queue is dropped, held or not.
    model(3, || {
        let queue = Arc::new(Queue::new(1, WhenFull::DropNewest));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || push_all(&queue, 3, true))
        };
        let mut taken = Vec::new();
        block_on(async {
            while let Some(message) = receive(&queue).await {
                taken.push(message);
            }
        });
        writer.join().unwrap();
        assert_eq!(taken[0], 1, "{taken:?}");
        let taken = taken.len() as u64;
        assert_eq!(queue.counts(), Counts { taken, dropped: 3 - taken, untaken: 0 });
    });
}

#[test]
fn a_message_dropped_during_its_move_is_counted_and_the_next_is_moved() {
    model(3, || {
        let queue = Arc::new(Queue::new(1, WhenFull::DropOldest));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || push_all(&queue, 2, false))
        };
        // The reader pumps while the writer moves, or moves while the writer pushes.
        pump_freely(&queue);
        let taken = block_on(take_all(&queue));
        writer.join().unwrap();
        assert_eq!(taken.last(), Some(&2));
        let taken = taken.len() as u64;
        assert_eq!(queue.counts(), Counts { taken, dropped: 2 - taken, untaken: 0 });
    });
}

#[test]
fn the_newest_is_read_repeatedly_and_counted_once() {
    model(3, || {
        let queue = Arc::new(Queue::new(1, WhenFull::KeepLatest));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || push_all(&queue, 2, true))
        };
        let mut last = 0;
        let mut seen = Vec::new();
        block_on(async {
            while poll_fn(|cx| match queue.poll_new(cx.waker()) {
                Answer::Wait => Poll::Pending,
                answer => Poll::Ready(answer == Answer::Yes),
            })
            .await
            {
                // The newest message, and then possibly the same one.
                for _ in 0..2 {
                    let mut place = None;
                    let number = queue.read(&mut place, Clone::clone).expect("a message");
                    let message = place.expect("a message that was read");
                    assert!(number == u64::from(message) && message >= last);
                    last = message;
                    if seen.last() != Some(&message) {
                        seen.push(message);
                    }
                }
            }
        });
        writer.join().unwrap();
        assert_eq!(last, 2, "the newest message");
        let taken = seen.len() as u64;
        assert_eq!(queue.counts(), Counts { taken, dropped: 2 - taken, untaken: 0 });
        drop(queue.close_reader());
        assert_eq!(queue.counts().untaken, 0, "the message was read");
    });
}

#[test]
fn a_message_dropped_while_it_is_peeked_is_counted_and_the_next_is_moved() {
    model(3, || {
        let queue = Arc::new(Queue::new(1, WhenFull::DropOldest));
        assert_eq!(push(&queue, 1, true), Pushed::Queued);
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                let _ = push(&queue, 2, false);
                pump_freely(&queue);
                queue.close_writer();
            })
        };
        // `peek` takes it out of its slot: meanwhile it is dropped there, or it goes back.
        let looked = queue.peek(0, |message| *message);
        assert!(looked.is_none_or(|message| message == 1 || message == 2));
        let taken = block_on(take_all(&queue));
        writer.join().unwrap();
        assert_eq!(taken.last(), Some(&2));
        let taken = taken.len() as u64;
        assert_eq!(queue.counts(), Counts { taken, dropped: 2 - taken, untaken: 0 });
    });
}
