//! Model check of `hub/queue.rs`: every interleaving of a writer, a reader and whoever moves messages. The file is
//! included as it stands, with loom's primitives.

mod sync {
    pub(crate) use loom::sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    };

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }
}

#[allow(dead_code)]
#[path = "../src/hub/queue.rs"]
mod queue;

use std::{future::poll_fn, task::Poll};

use loom::{
    future::block_on,
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};
use queue::{Answer, Queue};

fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

async fn send(queue: &Queue<u32>, message: u32, ready: bool) -> bool {
    let answer = poll_fn(|cx| match queue.poll_room(cx.waker()) {
        Answer::Wait => Poll::Pending,
        answer => Poll::Ready(answer),
    });
    answer.await == Answer::Yes && queue.push(message, ready).is_ok()
}

async fn receive(queue: &Queue<u32>) -> Option<u32> {
    let answer = poll_fn(|cx| match queue.poll_message(cx.waker()) {
        Answer::Wait => Poll::Pending,
        answer => Poll::Ready(answer),
    });
    match answer.await {
        Answer::Yes => queue.take(),
        _ => None,
    }
}

/// Each end is one task, which comes with the same waker every time.
#[test]
fn a_queue_of_one_hands_everything_over_in_order_and_ends() {
    model(|| {
        let queue = Arc::new(Queue::new(1));
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
fn a_reader_that_was_woken_for_nothing_waits_on() {
    model(|| {
        let queue = Arc::new(Queue::new(1));
        let writer = {
            let queue = queue.clone();
            thread::spawn(move || {
                queue.wake_both();
                assert!(queue.push(1, true).is_ok());
            })
        };
        assert_eq!(block_on(receive(&queue)), Some(1));
        writer.join().unwrap();
    });
}

#[test]
fn a_reader_that_goes_ends_the_writer() {
    model(|| {
        let queue = Arc::new(Queue::new(1));
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

/// A pool of one envelope: a move needs it, and the reader gives it back and comes by.
fn pump(queue: &Queue<u32>, envelopes: &AtomicUsize) {
    while let Some(message) = queue.begin_move() {
        let moved = envelopes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |free| free.checked_sub(1)).is_ok();
        let (orphan, again) = queue.end_move(message, moved);
        assert!(orphan.is_none());
        if !again {
            break;
        }
    }
}

#[test]
fn a_message_that_waits_for_an_envelope_is_moved_when_one_comes_home() {
    model(|| {
        let queue = Arc::new(Queue::new(2));
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

/// An operator with two inputs: it waits at one of them and looks at the other.
async fn receive_both(first: &Queue<u32>, second: &Queue<u32>) -> Option<(u32, u32)> {
    let both = poll_fn(|cx| {
        let (one, other) = match first.poll_message(cx.waker()) {
            Answer::Yes => (Answer::Yes, second.poll_message(cx.waker())),
            waits => (waits, second.look_for_message(cx.waker())),
        };
        match (one, other) {
            (Answer::Never, _) | (_, Answer::Never) => Poll::Ready(false),
            (Answer::Yes, Answer::Yes) => Poll::Ready(true),
            _ => Poll::Pending,
        }
    });
    if both.await { first.take().zip(second.take()) } else { None }
}

#[test]
fn one_that_waits_at_two_queues_gets_what_both_have_and_hears_of_an_end() {
    model(|| {
        let (first, second) = (Arc::new(Queue::new(1)), Arc::new(Queue::new(1)));
        let writer = {
            let (first, second) = (first.clone(), second.clone());
            thread::spawn(move || {
                assert!(second.push(2, true).is_ok());
                assert!(first.push(1, true).is_ok());
                // The first has no end.
                second.close_writer();
            })
        };
        assert_eq!(block_on(receive_both(&first, &second)), Some((1, 2)));
        assert_eq!(block_on(receive_both(&first, &second)), None);
        writer.join().unwrap();
    });
}

#[test]
fn a_writer_that_waits_for_something_else_hears_that_its_reader_has_gone() {
    model(|| {
        let (input, output) = (Queue::<u32>::new(1), Arc::new(Queue::new(1)));
        assert!(output.push(1, true).is_ok());
        let mut reader = None;
        let ended = poll_fn(|cx| {
            reader.get_or_insert_with(|| {
                // It has waited for room before.
                assert_eq!(output.poll_room(cx.waker()), Answer::Wait);
                assert_eq!(output.take(), Some(1));
                assert!(output.push(2, true).is_ok());
                let output = output.clone();
                thread::spawn(move || drop(output.close_reader()))
            });
            match (input.poll_message(cx.waker()), output.look_for_room(cx.waker())) {
                (_, Answer::Wait) => Poll::Pending,
                // Room, or already the end.
                _ => Poll::Ready(()),
            }
        });
        block_on(ended);
        reader.unwrap().join().unwrap();
    });
}
