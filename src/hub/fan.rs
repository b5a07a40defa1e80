//! [`Fan`]: an output that has several readers.
//!
//! Each reader has a hub of its own, with its own queue and envelopes. One of them, the [`heir`], is sent the message itself,
//! if it can be one that need not copy it. All others are sent a [fork](super::Fork), and all forks are made before any is sent: a message goes to all that are open, or to nobody.
//!
//! ```text
//!   room:   every open hub has room in its queue and, but for the heir's, an envelope to copy to
//!   end:    a hub whose reader has ended is passed over; when all have, the output is closed
//! ```
//!
//! A fork's envelopes are lent by its own hub, and nobody else takes any there: those that were asked for are there.

use std::{fmt, sync::Arc, task::Waker};

use super::{
    ForkFn, Message,
    baggage::Parcel,
    envelope::RawEnvelope,
    kept::Stamped,
    pool::Pool,
    queue::Answer,
    sender::{Sender, depart, stamp_of},
};
use crate::{
    error::{Error, ErrorKind, Result},
    memory::HostAccess,
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
    sync::{Discarded, discard, discard_all},
};

/// What one of an output's hubs did with a message that it was [offered](crate::Output::offer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// It has it.
    Sent,
    /// It has no room for it, or no envelope to copy it to.
    Full,
    /// It dropped it, since that is its kind: it is full, or its reader has all the envelopes that it could be copied to.
    Dropped,
    /// Its reader has ended.
    Closed,
}

/// One hub's end, as an output is given it.
pub(crate) struct End<M: Message> {
    pub(crate) sender: Sender<M>,
    /// Where the output was said to have several.
    pub(crate) fork: Option<ForkFn<M>>,
}

/// The forks of a message, each with its branch. Whatever ends the sending, those that are left go home then, one by one:
/// several may have a destructor that panics.
struct Forks<M: Message>(Vec<(usize, M)>);

impl<M: Message> Drop for Forks<M> {
    fn drop(&mut self) {
        discard_all(self.0.drain(..));
    }
}

/// The writer's ends of several hubs.
pub(crate) struct Fan<M: Message> {
    branches: Box<[Sender<M>]>,
    fork: ForkFn<M>,
    /// Who is sent the message itself.
    heir: usize,
    /// Whose blank envelopes the writer is lent: the first heir's.
    lender: usize,
    /// What becomes of the present message, by branch. Kept for its capacity, as is `forks`, which is empty between two.
    outcomes: Vec<Outcome>,
    forks: Vec<(usize, M)>,
    /// What the host has to wait for before it can copy the last message.
    pending: Option<HostAccess>,
}

/// Which of an output's hubs is sent the messages themselves: the first that is where the writer is, else the last. One that
/// drops messages is only if all do: it would keep envelopes from the writer.
pub(crate) fn heir<B>(
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
        let heir = branches.iter().position(|branch| !branch.forks()).unwrap_or(0);
        let (outcomes, forks) = (Vec::with_capacity(branches.len()), Vec::with_capacity(branches.len()));
        let branches = branches.into_boxed_slice();
        Self { branches, fork, heir, lender: heir, outcomes, forks, pending: None }
    }

    /// Room for so many messages of one envelope each, and as many blanks where there are such?
    pub(crate) fn poll_room(&self, messages: usize, waker: &Waker) -> Answer {
        self.ask_for(messages, messages);
        self.poll(waker, |fan| fan.branches[fan.lender].has_blanks(messages) && fan.has_room(messages, messages))
    }

    /// Room for so many messages of one envelope each, whether there are blanks or not?
    pub(crate) fn poll_places(&self, messages: usize, waker: &Waker) -> Answer {
        self.poll(waker, |fan| fan.has_room(messages, messages))
    }

    /// Room for this message?
    pub(crate) fn poll_send(&self, message: &mut M, waker: &Waker) -> Answer {
        let envelopes = envelopes_in(message);
        self.ask_for(1, envelopes);
        self.poll(waker, |fan| fan.has_room(1, envelopes))
    }

    /// Is there any reader?
    pub(crate) fn poll_readers(&self, waker: &Waker) -> Answer {
        // All are asked: each that is there keeps the waker.
        let asked = self.branches.iter().map(|branch| branch.poll_reader(waker));
        asked.fold(Answer::Never, |any, one| if one == Answer::Yes { one } else { any })
    }

    /// A blank envelope, where there are such?
    pub(crate) fn poll_blank(&self, waker: &Waker) -> Answer {
        self.poll(waker, |fan| fan.branches[fan.lender].has_blanks(1))
    }

    /// What all of them are asked for from now on. Blank envelopes go into messages of one each.
    fn ask_for(&self, messages: usize, envelopes: usize) {
        for (at, branch) in self.branches.iter().enumerate() {
            branch.ask_for(messages, if at == self.lender { messages } else { envelopes });
        }
    }

    fn poll(&self, waker: &Waker, is_there: impl Fn(&Self) -> bool) -> Answer {
        match self.ask(waker, &is_there) {
            Answer::Wait => {
                // Asked again: it may have come before the waker was kept.
                self.watch(waker);
                self.ask(waker, &is_there)
            }
            answer => answer,
        }
    }

    fn ask(&self, waker: &Waker, is_there: impl Fn(&Self) -> bool) -> Answer {
        match () {
            () if self.check().is_err() => Answer::Yes,
            () if self.poll_readers(waker) == Answer::Never => Answer::Never,
            () if is_there(self) => Answer::Yes,
            () => Answer::Wait,
        }
    }

    fn has_room(&self, messages: usize, envelopes: usize) -> bool {
        (0..self.branches.len()).all(|at| self.outcome(at, messages, envelopes) != Outcome::Full)
    }

    /// What would become of so many messages, which have so many envelopes together, at one hub.
    fn outcome(&self, at: usize, messages: usize, envelopes: usize) -> Outcome {
        let branch = &self.branches[at];
        let can_fork = || at == self.heir || branch.arrivals().is_none_or(|arrivals| arrivals.has(envelopes));
        if branch.reader_gone() {
            Outcome::Closed
        } else if branch.drops() {
            if branch.takes_one() { Outcome::Sent } else { Outcome::Dropped }
        } else if branch.has_room(messages) && can_fork() {
            Outcome::Sent
        } else {
            Outcome::Full
        }
    }

    /// A blank envelope, if there is one; an error if there are none at all.
    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.branches[self.lender].blank()
    }

    /// Sends what lies in `place` to all that are open, if all of them have room; otherwise it stays there.
    pub(crate) fn try_send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        let Some(parcel) = place else { return Ok(()) };
        self.look(&mut parcel.message)?;
        if self.outcomes.contains(&Outcome::Full) {
            return Ok(());
        }
        self.free_arrivals(&mut parcel.message);
        let stamp = self.depart(&mut parcel.message, origin)?;
        let Some(forks) = self.fork_all(&mut parcel.message)? else { return Ok(()) };
        self.hand_over(place, stamp, forks)
    }

    /// Sends what a worker of the operator has sent, if all have room.
    pub(crate) fn hand_on(&mut self, parcel: Parcel<M>, stamp: Option<Ticket>) -> Result<Result<(), Stamped<M>>> {
        let mut place = Discarded::new(parcel);
        if let Some(parcel) = place.get_mut() {
            self.look(&mut parcel.message)?;
            if !self.outcomes.contains(&Outcome::Full) {
                self.free_arrivals(&mut parcel.message);
                if let Some(forks) = self.fork_all(&mut parcel.message)? {
                    self.hand_over(place.place(), stamp.clone(), forks)?;
                }
            }
        }
        Ok(place.take().map_or(Ok(()), |parcel| Err((parcel, stamp))))
    }

    /// The blank envelopes, or why there are none.
    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        self.branches[self.lender].blanks()
    }

    /// Sends what lies in `place` to those that have room, and tells of each what it did. Where nobody took it, it stays.
    pub(crate) fn offer(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<Vec<Outcome>> {
        let Some(parcel) = place else { return Ok(Vec::new()) };
        self.look(&mut parcel.message)?;
        self.free_arrivals(&mut parcel.message);
        let stamp = self.depart(&mut parcel.message, origin)?;
        // What the host cannot copy yet is not waited for.
        let (forks, _) = self.fork(&mut parcel.message)?;
        self.hand_over(place, stamp, forks)?;
        Ok(self.outcomes.clone())
    }

    /// Finds out what can become of a message.
    fn look(&mut self, message: &mut M) -> Result<()> {
        self.check()?;
        self.pending = None;
        self.outcomes.clear();
        let envelopes = envelopes_in(message);
        for at in 0..self.branches.len() {
            let branch = &self.branches[at];
            if let Some(arrivals) = branch.arrivals().filter(|arrivals| at != self.heir && arrivals.count() < envelopes)
            {
                let (hub, count) = (branch.hub(), arrivals.count());
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!(
                        "a message of {envelopes} envelopes cannot be copied to the {count} of hub `{hub}`: give it as \
                         many, with `Hub::envelopes`"
                    ),
                ));
            }
            self.outcomes.push(self.outcome(at, 1, envelopes));
        }
        if !M::CARRIES_ENVELOPES
            && self.outcomes[self.heir] != Outcome::Sent
            && let Some(other) = self.outcomes.iter().rposition(|outcome| *outcome == Outcome::Sent)
        {
            // One clone less. Envelopes are copied to those of the hub's own, which the heir's has not.
            self.heir = other;
        }
        Ok(())
    }

    /// Hubs that drop messages get the envelopes for the new one from older ones.
    fn free_arrivals(&mut self, message: &mut M) {
        let envelopes = envelopes_in(message);
        for (at, branch) in self.branches.iter().enumerate() {
            let forks = at != self.heir && self.outcomes[at] == Outcome::Sent && branch.drops();
            if forks && !branch.free_arrivals(envelopes) {
                self.outcomes[at] = Outcome::Dropped;
            }
        }
    }

    fn depart(&self, message: &mut M, origin: Option<&Stream>) -> Result<Option<Ticket>> {
        let stamped = depart(message, origin)?;
        if self.outcomes[self.heir] == Outcome::Sent {
            self.branches[self.heir].check_places(message)?;
        }
        origin.filter(|_| !stamped).map(stamp_of).transpose()
    }

    /// All forks; `None` if the host has to wait before it can make them.
    fn fork_all(&mut self, message: &mut M) -> Result<Option<Forks<M>>> {
        let (forks, all) = self.fork(message)?;
        Ok(all.then_some(forks))
    }

    /// The forks, and whether these are all: the host may have to wait before it can make another one.
    fn fork(&mut self, message: &mut M) -> Result<(Forks<M>, bool)> {
        let mut forks = Forks(std::mem::take(&mut self.forks));
        let mut all = true;
        for (at, branch) in self.branches.iter().enumerate() {
            if at == self.heir || self.outcomes[at] != Outcome::Sent {
                continue;
            }
            let mut copier = branch.copier();
            match (self.fork)(message, &mut copier) {
                Ok(fork) => {
                    forks.0.push((at, fork));
                    if mutants::is(Mutant::SentTwice) {
                        forks.0.extend((self.fork)(message, &mut copier).map(|fork| (at, fork)));
                    }
                }
                Err(error) => {
                    self.pending = Some(copier.pending.take().ok_or(error)?);
                    self.outcomes[at] = Outcome::Full;
                    all = false;
                }
            }
        }
        // What the copies have read is marked: a write elsewhere waits for them and for no more.
        let mut marked = Ok(());
        if M::CARRIES_ENVELOPES && !forks.0.is_empty() {
            message.envelopes(&mut |envelope| {
                if marked.is_ok() {
                    marked = envelope.memory_mut().commit();
                }
            });
        }
        marked.map(|()| (forks, all))
    }

    /// The message stays where it is if nobody took it, or dropped it.
    fn hand_over(&mut self, place: &mut Option<Parcel<M>>, stamp: Option<Ticket>, mut forks: Forks<M>) -> Result<()> {
        let load = place.as_ref().and_then(|parcel| Some(parcel.baggage.as_ref()?.load.clone()));
        let mut done = false;
        // From behind: what an error leaves is dropped one by one.
        forks.0.reverse();
        while let Some((at, fork)) = forks.0.pop() {
            // Each takes along the same.
            let mut fork = Discarded::new(Parcel::with(fork, load.clone()));
            self.branches[at].push(fork.place(), stamp.clone())?;
            match fork.get() {
                None => done = true,
                // There was room: its reader has ended.
                Some(_) => self.outcomes[at] = Outcome::Closed,
            }
        }
        self.forks = std::mem::take(&mut forks.0);
        if self.outcomes[self.heir] == Outcome::Sent {
            self.branches[self.heir].push(place, stamp)?;
            match place {
                None => done = true,
                Some(_) => self.outcomes[self.heir] = Outcome::Closed,
            }
        }
        for (branch, outcome) in self.branches.iter().zip(&self.outcomes) {
            if *outcome == Outcome::Dropped {
                branch.refuse();
                done = true;
            }
        }
        if done {
            discard(place.take());
        }
        Ok(())
    }

    /// What the host has to wait for before it can copy the message that came back.
    pub(crate) fn pending(&mut self) -> Option<HostAccess> {
        self.pending.take()
    }

    /// Keeps the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.branches.iter().for_each(|branch| branch.watch(waker));
    }

    /// All readers have ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.branches.iter().all(Sender::reader_gone)
    }

    pub(crate) fn count(&self) -> usize {
        self.branches.len()
    }

    fn check(&self) -> Result<()> {
        self.branches.iter().try_for_each(Sender::check)
    }
}

fn envelopes_in<M: Message>(message: &mut M) -> usize {
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
