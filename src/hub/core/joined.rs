//! Messages that wait to be moved, moved several at a time.
//!
//! The driver's calls for a small copy take the host longer than the copy takes the bus, so one copy serves several
//! small envelopes that lie one behind the other ([`transfer::copy_joined`]). No message waits for that: those are moved
//! together that are there when a move begins, since the hub had no envelopes to copy to, or since their writer sent
//! several at once. Envelopes that were moved together return together, and the hub that they return to can do the same.
//!
//! Chosen by measuring the same work by hand, in programs of CUDA C that are not kept, on an H200: 64 KiB in, through a kernel and out, in GB/s each way: a copy,
//! a launch and a copy for each message from one thread 7.5; from three threads 9.1; eight copies by
//! `cuMemcpyBatchAsync`, eight launches 9.8; eight chains in one graph 11.4; one copy of eight neighbours, eight launches
//! 12.8.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
};

use smallvec::SmallVec;

use super::{HubCore, Moved};
use crate::{
    error::{Error, ErrorKind, Result, panic_message},
    hub::{
        Message,
        ends::per_message,
        parcel::{Parcel, Since},
        pool::{self, MAX_JOINED, Pool, RawEnvelope},
    },
    memory::{
        Owned,
        transfer::{self, JoinedCopy},
    },
    stream::Stream,
    sync::discard_all,
};

/// One for each envelope that is copied.
type Several<T> = SmallVec<[T; MAX_JOINED]>;

impl<M: Message> HubCore<M> {
    /// Whether such messages may be moved together: their envelopes are visited several times, in the same order, which
    /// only code of this crate is relied on for.
    pub(in crate::hub) const JOINS: bool = M::CARRIES_ENVELOPES && M::VISITS_UNDER_LOCK;

    /// The number of messages that are moved together, where so many wait; 1 if each is moved on its own.
    #[inline]
    fn most_joined(&self) -> usize {
        match &self.arrival_pool {
            Some(arrivals) if Self::JOINS => (arrivals.most_joined() / per_message::<M>()).max(1),
            _ => 1,
        }
    }

    /// Moves every message that can be moved.
    pub(in crate::hub) fn pump(&self) -> Result<()> {
        if !self.moves() || self.stepped.load(Ordering::Acquire) {
            return Ok(());
        }
        while self.move_next()?.again {}
        Ok(())
    }

    fn move_next(&self) -> Result<Moved> {
        let most = self.most_joined().min(self.queue.unready());
        if most > 1
            && self.failed.get().is_none()
            && let Some(moved) = self.move_several(most)?
        {
            return Ok(moved);
        }
        self.move_one()
    }

    /// Moves up to `most` messages. Returns `None` if the first of them must be moved, or dropped, on its own.
    // Not inline: its frame is large.
    #[inline(never)]
    fn move_several(&self, most: usize) -> Result<Option<Moved>> {
        let (Some(arrivals), Some(copies)) = (&self.arrival_pool, &self.copy_stream) else { return Ok(None) };
        if !arrivals.has(2 * per_message::<M>()) {
            return Ok(None);
        }
        // Not on the stack: messages may be large, and moves nest along a flow.
        let mut parcels = Vec::with_capacity(most);
        self.queue.begin_move(most, &mut parcels);
        if parcels.is_empty() {
            // Another task moves, and looks again.
            return Ok(Some(Moved::default()));
        }
        let mut joined = Joined::default();
        let moved =
            parcels.iter_mut().map_while(|parcel| self.add(parcel, arrivals, &mut joined).then_some(())).count();
        let (moving, _) = parcels.split_at_mut(moved);
        let timed = moving.iter_mut().find_map(|parcel| self.begin_copies(parcel));
        if let Some(timed) = &timed {
            moving.iter_mut().filter_map(Parcel::journey).for_each(|journey| journey.share_copies(timed));
        }
        let copied = joined.copy(copies);
        self.end_copies(timed);
        let outcome = match copied {
            Ok(()) => {
                joined.finish(moving);
                moving.iter_mut().for_each(|parcel| self.note_time(parcel, Since::Arrived));
                Ok(moved)
            }
            Err(error) => {
                joined.put_back(moving);
                // An error of only one of the messages is found again when they are moved one by one. Otherwise the hub
                // fails before the move ends, so that no other move begins.
                if self.is_of_message(&error) { Ok(0) } else { Err(self.fail(error)) }
            }
        };
        let mut orphans = Vec::new();
        let again = self.queue.end_move(parcels, *outcome.as_ref().unwrap_or(&0), &mut orphans);
        discard_all(orphans);
        let bytes = joined.sources.iter().map(|source| source.bytes() as u64).sum();
        pool::return_all(joined.sources.into_iter());
        outcome.map(|moved| (moved > 0).then_some(Moved { bytes: Some(bytes), again }))
    }

    /// Prepares the copies of a message's envelopes. Returns false, without a change, if the message must wait or must be
    /// moved on its own.
    fn add(&self, parcel: &mut Parcel<M>, arrivals: &Arc<Pool>, joined: &mut Joined) -> bool {
        let is_external = self.has_external_writer.load(Ordering::Relaxed);
        let (mut copies, mut can_join) = (0, true);
        parcel.message.envelopes(&mut |envelope| {
            if !envelope.memory().is_at(&self.reader) {
                copies += 1;
                can_join &= envelope.bytes() <= arrivals.bytes() && !envelope.memory().is_staged();
                can_join &= !is_external || self.accepts_one(envelope).is_ok();
            }
        });
        let is_enough = !joined.sources.is_empty() && joined.sources.len() + copies > arrivals.most_joined();
        if !can_join || is_enough {
            return false;
        }
        let targets: Several<_> = (0..copies).map_while(|_| arrivals.take().ok().flatten()).collect();
        if targets.len() < copies {
            pool::put_back(targets);
            return false;
        }
        let mut targets = targets.into_iter();
        parcel.message.envelopes(&mut |envelope| {
            if !envelope.memory().is_at(&self.reader)
                && let Some(mut arrival) = targets.next()
            {
                arrival.set_bytes(envelope.bytes());
                arrival.ticket = envelope.take_ticket();
                joined.targets.extend(arrival.memory.take());
                joined.sources.push(std::mem::replace(envelope, arrival));
            }
        });
        true
    }
}

/// The two ends of several copies. While it exists, the envelopes in the messages are without their memory.
#[derive(Default)]
struct Joined {
    sources: Several<RawEnvelope>,
    targets: Several<Owned>,
}

impl Joined {
    /// Enqueues the copies.
    fn copy(&mut self, copies: &Stream) -> Result<()> {
        let Self { sources, targets } = self;
        let copied = catch_unwind(AssertUnwindSafe(|| {
            let mut all: Several<_> = sources
                .iter()
                .zip(targets.iter_mut())
                .map(|(source, target)| JoinedCopy { from: source.memory(), to: target, bytes: source.bytes() })
                .collect();
            transfer::copy_joined(copies, &mut all)
        }));
        copied.unwrap_or_else(|panic| Err(Error::new(ErrorKind::Panicked, panic_message(panic))))
    }

    /// Gives the messages the memory that was copied to.
    fn finish<M: Message>(&mut self, parcels: &mut [Parcel<M>]) {
        let mut targets = self.targets.drain(..);
        for parcel in parcels {
            parcel.message.envelopes(&mut |envelope| {
                if envelope.memory.is_none() {
                    envelope.memory = targets.next();
                }
            });
        }
    }

    /// Gives the messages their own envelopes again.
    fn put_back<M: Message>(&mut self, parcels: &mut [Parcel<M>]) {
        let mut pairs = self.sources.drain(..).zip(self.targets.drain(..));
        let mut arrivals = Several::new();
        for parcel in parcels {
            parcel.message.envelopes(&mut |envelope| {
                if envelope.memory.is_some() {
                    return;
                }
                let Some((source, target)) = pairs.next() else { return };
                let mut arrival = std::mem::replace(envelope, source);
                (envelope.ticket, arrival.memory) = (arrival.take_ticket(), Some(target));
                arrivals.push(arrival);
            });
        }
        drop(pairs);
        pool::put_back(arrivals);
    }
}
