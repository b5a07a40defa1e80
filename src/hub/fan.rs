//! [`Fan`]: an output with several readers.
//!
//! Each reader has its own hub, with its own queue and envelopes. One of the hubs, the [`primary`], gets the message
//! itself, preferably one that need not copy it. All others get a [fork](super::Fork). All forks are made before any
//! is sent, so a message goes to all open hubs or to none.
//!
//! ```text
//!   room:   every open hub has room in its queue and, except for the primary's, an envelope to copy to
//!   end:    a hub whose reader has ended is skipped; when all have ended, the output is closed
//! ```
//!
//! A fork's envelopes come from its hub, and nothing else takes envelopes from that hub: if the poll found enough of them,
//! they are still there when the forks are made.

use std::{fmt, sync::Arc, task::Waker};

use super::{
    ForkFn, Message,
    ends::{Demand, Sender, per_message},
    parcel::Parcel,
    pool::{Pool, RawEnvelope},
    queue::Answer,
};
use crate::{
    error::{Error, ErrorKind, Result},
    memory::HostAccess,
    mutants::{self, Mutant},
    stream::{OpenSpans, Stream},
    sync::{DiscardOnDrop, discard, discard_all},
};

/// What one of an output's hubs did with a message that it was [offered](crate::Output::offer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The hub has accepted it.
    Sent,
    /// The hub has no room for it, or no envelope to copy it to.
    Full,
    /// The hub, which drops messages, has dropped it: the hub is full, or its reader has all the envelopes that the
    /// message could be copied to.
    Dropped,
    /// The hub's reader has ended.
    Closed,
}

/// One hub's writer end, as given to an output.
pub(crate) struct WriterEnd<M: Message> {
    pub(crate) sender: Sender<M>,
    /// Present if the output was declared to have several readers.
    pub(crate) fork: Option<ForkFn<M>>,
}

/// The index of the branch, the message, and its copies if they are timed.
type Forked<M> = (usize, M, Option<OpenSpans>);

/// The forks of a message. If sending ends early, the remaining ones are discarded
/// one by one: several might have a destructor that panics.
struct Forks<M: Message>(Vec<Forked<M>>);

impl<M: Message> Drop for Forks<M> {
    fn drop(&mut self) {
        discard_all(self.0.drain(..));
    }
}

/// Ends what is timed of a fork's copies, also where the fork panics.
struct EndCopiesOnDrop<'a, M: Message>(&'a Sender<M>, Option<OpenSpans>);

impl<M: Message> Drop for EndCopiesOnDrop<'_, M> {
    fn drop(&mut self) {
        self.0.end_copies(self.1.take());
    }
}

/// The writer's ends of several hubs.
pub(crate) struct Fan<M: Message> {
    branches: Box<[Sender<M>]>,
    fork: ForkFn<M>,
    /// The hub that gets the message itself.
    primary: usize,
    /// The hub whose blank envelopes the writer gets: the initial primary.
    lender: usize,
    /// The outcome of the current message, by branch. Kept for its capacity, as is `forks`, which is empty between
    /// messages.
    outcomes: Vec<Outcome>,
    forks: Vec<Forked<M>>,
    /// The access that the host has to wait for before it can copy the last message.
    pending: Option<HostAccess>,
}

/// Chooses which of an output's hubs gets the messages themselves: the first at the writer's location, else the last.
/// A hub that drops messages is chosen only if all do, since it would keep envelopes from the writer.
pub(crate) fn primary<B>(
    branches: impl DoubleEndedIterator<Item = B> + Clone,
    drops: impl Fn(&B) -> bool,
    is_together: impl Fn(&B) -> bool,
) -> Option<B> {
    let hold = || branches.clone().filter(|branch| !drops(branch));
    let near = hold().find(&is_together).or_else(|| hold().next_back());
    near.or_else(|| branches.clone().find(&is_together)).or_else(|| branches.clone().next_back())
}

impl<M: Message> Fan<M> {
    pub(crate) fn new(branches: Vec<Sender<M>>, fork: ForkFn<M>) -> Self {
        let primary = branches.iter().position(|branch| !branch.forks).unwrap_or(0);
        let (outcomes, forks) = (Vec::with_capacity(branches.len()), Vec::with_capacity(branches.len()));
        let branches = branches.into_boxed_slice();
        Self { branches, fork, primary, lender: primary, outcomes, forks, pending: None }
    }

    /// See [`Sender::poll`].
    pub(crate) fn poll(&self, demand: Demand, waker: &Waker) -> Answer {
        match demand {
            Demand::Room(messages) => self.request(messages, messages.saturating_mul(per_message::<M>())),
            Demand::Message(envelopes) => self.request(1, envelopes),
            Demand::QueueRoom(_) | Demand::Blanks(_) | Demand::Reader => {}
        }
        match self.answer(demand, waker) {
            Answer::Wait => {
                // Checked again: the change might have come before the waker was registered.
                self.watch(waker);
                self.answer(demand, waker)
            }
            other => other,
        }
    }

    fn answer(&self, demand: Demand, waker: &Waker) -> Answer {
        if demand != Demand::Reader && self.check().is_err() {
            return Answer::Yes;
        }
        // All are polled, so that each open hub registers the waker.
        let readers = self.branches.iter().map(|branch| branch.queue.poll_reader(waker));
        if readers.fold(Answer::Never, |any, one| if one == Answer::Yes { one } else { any }) == Answer::Never {
            return Answer::Never;
        }
        let is_met = match demand {
            Demand::Room(messages) => {
                let envelopes = messages.saturating_mul(per_message::<M>());
                self.branches[self.lender].has_blanks(envelopes) && self.has_room(messages, envelopes)
            }
            Demand::QueueRoom(messages) => self.has_room(messages, messages.saturating_mul(per_message::<M>())),
            Demand::Message(envelopes) => self.has_room(1, envelopes),
            Demand::Blanks(count) => self.branches[self.lender].has_blanks(count),
            Demand::Reader => true,
        };
        if is_met { Answer::Yes } else { Answer::Wait }
    }

    /// Records the request at all branches. The writer's blank envelopes are those that its messages certainly need.
    fn request(&self, messages: usize, envelopes: usize) {
        for (at, branch) in self.branches.iter().enumerate() {
            let blanks = messages.saturating_mul(per_message::<M>());
            branch.request(messages, if at == self.lender { blanks } else { envelopes });
        }
    }

    fn has_room(&self, messages: usize, envelopes: usize) -> bool {
        (0..self.branches.len()).all(|at| self.outcome(at, messages, envelopes) != Outcome::Full)
    }

    /// The outcome at one hub of sending this many messages, with this many envelopes in total.
    fn outcome(&self, at: usize, messages: usize, envelopes: usize) -> Outcome {
        let branch = &self.branches[at];
        let can_fork =
            || at == self.primary || branch.arrival_pool.as_ref().is_none_or(|arrivals| arrivals.has(envelopes));
        if branch.reader_gone() {
            Outcome::Closed
        } else if branch.drops_messages() {
            if branch.would_queue() { Outcome::Sent } else { Outcome::Dropped }
        } else if branch.has_room(messages) && can_fork() {
            Outcome::Sent
        } else {
            Outcome::Full
        }
    }

    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.branches[self.lender].blank()
    }

    /// Sends the message in `place` to all open hubs, if all of them have room; otherwise it stays there.
    pub(crate) fn try_send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        let Some(parcel) = place else { return Ok(()) };
        self.determine_outcomes(&mut parcel.message)?;
        if self.outcomes.contains(&Outcome::Full) {
            return Ok(());
        }
        self.free_arrivals(&mut parcel.message);
        self.depart(parcel, origin)?;
        let Some(forks) = self.fork_all(parcel)? else { return Ok(()) };
        self.deliver(place, forks)
    }

    /// Sends a message that a worker of the operator has sent, if all hubs have room.
    pub(crate) fn try_forward(&mut self, parcel: Parcel<M>) -> Result<Result<(), Parcel<M>>> {
        let mut place = DiscardOnDrop::new(parcel);
        if let Some(parcel) = place.get_mut() {
            self.determine_outcomes(&mut parcel.message)?;
            if !self.outcomes.contains(&Outcome::Full) {
                self.free_arrivals(&mut parcel.message);
                if let Some(forks) = self.fork_all(parcel)? {
                    self.deliver(place.place(), forks)?;
                }
            }
        }
        Ok(place.take().map_or(Ok(()), Err))
    }

    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        self.branches[self.lender].blanks()
    }

    /// Sends the message in `place` to the hubs that have room, and returns each hub's outcome. If no hub accepts or
    /// drops it, it stays in `place`.
    pub(crate) fn offer(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<Vec<Outcome>> {
        let Some(parcel) = place else { return Ok(Vec::new()) };
        self.determine_outcomes(&mut parcel.message)?;
        self.free_arrivals(&mut parcel.message);
        self.depart(parcel, origin)?;
        // Copies that the host cannot make yet are not awaited.
        let (forks, _) = self.fork(parcel)?;
        match self.deliver(place, forks) {
            Err(error) if !error.is_reader_gone() => Err(error),
            _ => Ok(self.outcomes.clone()),
        }
    }

    /// Determines the outcome of a message at each hub.
    fn determine_outcomes(&mut self, message: &mut M) -> Result<()> {
        self.check()?;
        self.pending = None;
        self.outcomes.clear();
        let envelopes = envelopes_in(message);
        for at in 0..self.branches.len() {
            let branch = &self.branches[at];
            if let Some(arrivals) =
                branch.arrival_pool.as_ref().filter(|arrivals| at != self.primary && arrivals.count() < envelopes)
            {
                let (hub, count) = (&branch.name, arrivals.count());
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!(
                        "a message has {envelopes} envelopes to copy, but hub `{hub}` has only {count}: set \
                         `HubOptions::envelopes` to at least {envelopes}"
                    ),
                ));
            }
            self.outcomes.push(self.outcome(at, 1, envelopes));
        }
        if !M::CARRIES_ENVELOPES
            && self.outcomes[self.primary] != Outcome::Sent
            && let Some(other) = self.outcomes.iter().rposition(|outcome| *outcome == Outcome::Sent)
        {
            // Saves one clone. Not for messages with envelopes: a fork is copied to envelopes of its own hub, and the
            // primary's hub has none for that.
            self.primary = other;
        }
        Ok(())
    }

    /// Hubs that drop messages free the envelopes for the new one by dropping older ones.
    fn free_arrivals(&mut self, message: &mut M) {
        let envelopes = envelopes_in(message);
        for (at, branch) in self.branches.iter().enumerate() {
            let forks = at != self.primary && self.outcomes[at] == Outcome::Sent && branch.drops_messages();
            if forks && !branch.free_envelopes(envelopes) {
                self.outcomes[at] = Outcome::Dropped;
            }
        }
    }

    fn depart(&self, parcel: &mut Parcel<M>, origin: Option<&Stream>) -> Result<()> {
        if self.outcomes[self.primary] == Outcome::Sent {
            self.branches[self.primary].check_places(&mut parcel.message)?;
        }
        parcel.depart(origin)
    }

    /// Makes all forks; `None` if the host has to wait before it can make them.
    fn fork_all(&mut self, parcel: &mut Parcel<M>) -> Result<Option<Forks<M>>> {
        let (forks, all) = self.fork(parcel)?;
        Ok(all.then_some(forks))
    }

    /// Makes the forks. Returns false with them if some are missing because the host has to wait first.
    fn fork(&mut self, parcel: &mut Parcel<M>) -> Result<(Forks<M>, bool)> {
        let mut forks = Forks(std::mem::take(&mut self.forks));
        let mut all = true;
        for (at, branch) in self.branches.iter().enumerate() {
            if at == self.primary || self.outcomes[at] != Outcome::Sent {
                continue;
            }
            let mut copier = branch.copier();
            let timed = EndCopiesOnDrop(branch, branch.begin_other_copies(parcel));
            let message = &parcel.message;
            match (self.fork)(message, &mut copier) {
                Ok(fork) => {
                    forks.0.push((at, fork, timed.1.clone()));
                    if mutants::is(Mutant::SentTwice) {
                        forks.0.extend((self.fork)(message, &mut copier).map(|fork| (at, fork, None)));
                    }
                }
                Err(error) => {
                    self.pending = Some(copier.pending.take().ok_or(error)?);
                    self.outcomes[at] = Outcome::Full;
                    all = false;
                }
            }
        }
        // The reads by the copies are committed, so that a write elsewhere waits for them and for no later work.
        let mut marked = Ok(());
        if M::CARRIES_ENVELOPES && !forks.0.is_empty() {
            parcel.message.envelopes(&mut |envelope| {
                if marked.is_ok() {
                    marked = envelope.memory_mut().commit();
                }
            });
        }
        marked.map(|()| (forks, all))
    }

    /// Sends the forks, and the message to the primary. The message stays in `place` if no hub accepts or drops it, also
    /// after an error, unless the primary's reader has ended and the message was lost with it.
    fn deliver(&mut self, place: &mut Option<Parcel<M>>, mut forks: Forks<M>) -> Result<()> {
        let (mut done, mut lost) = (false, Ok(()));
        if let Some(journey) = place.as_mut().and_then(Parcel::journey) {
            journey.count_dropped(self.outcomes.iter().filter(|outcome| **outcome == Outcome::Dropped).count() as u64);
        }
        // Reversed, to pop them in order. After an error the remaining ones are discarded one by one.
        forks.0.reverse();
        while let Some((at, fork, copies)) = forks.0.pop() {
            let mut fork = DiscardOnDrop::new(match place {
                Some(parcel) => parcel.with_message(fork),
                None => Parcel::new(fork, None),
            });
            if let Some((copies, journey)) = copies.zip(fork.get_mut().and_then(Parcel::journey)) {
                journey.share_copies(&copies);
            }
            match self.branches[at].send(fork.place()) {
                Ok(()) if fork.get().is_none() => done = true,
                Err(error) if !error.is_reader_gone() => {
                    if done {
                        discard(place.take());
                    }
                    return Err(error);
                }
                // There was room, so its reader has ended.
                _ => self.outcomes[at] = Outcome::Closed,
            }
        }
        self.forks = std::mem::take(&mut forks.0);
        if self.outcomes[self.primary] == Outcome::Sent {
            match self.branches[self.primary].send(place) {
                Ok(()) if place.is_none() => done = true,
                Ok(()) => self.outcomes[self.primary] = Outcome::Closed,
                Err(error) if error.is_reader_gone() => {
                    self.outcomes[self.primary] = Outcome::Closed;
                    lost = Err(error);
                }
                Err(error) => {
                    if done {
                        discard(place.take());
                    }
                    return Err(error);
                }
            }
        }
        for (branch, outcome) in self.branches.iter().zip(&self.outcomes) {
            if *outcome == Outcome::Dropped {
                branch.queue.count_dropped();
                done = true;
            }
        }
        if done {
            if let Some(journey) = place.as_mut().and_then(Parcel::take_journey) {
                journey.unsent();
            }
            discard(place.take());
            return Ok(());
        }
        lost
    }

    /// The access that the host has to wait for before it can copy the message that was not sent.
    pub(crate) fn pending(&mut self) -> Option<HostAccess> {
        self.pending.take()
    }

    pub(crate) fn watch(&self, waker: &Waker) {
        self.branches.iter().for_each(|branch| branch.watch(waker));
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.branches.iter().all(|branch| branch.reader_gone())
    }

    pub(crate) fn count(&self) -> usize {
        self.branches.len()
    }

    fn check(&self) -> Result<()> {
        self.branches.iter().try_for_each(|branch| branch.check())
    }
}

pub(crate) fn envelopes_in<M: Message>(message: &mut M) -> usize {
    let mut count = 0;
    if M::CARRIES_ENVELOPES {
        message.envelopes(&mut |_| count += 1);
    }
    count
}

impl<M: Message> fmt::Debug for Fan<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.branches).finish()
    }
}
