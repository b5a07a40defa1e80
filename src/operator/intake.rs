//! [`Intake`]: takes the messages of an input for its operator, and accounts for them.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use super::{
    input_queue::InputQueue, operator_streams::TakenTickets, plan::Binder, ports::Traffic, run_context::RunContext,
    status_cell::InRun,
};
use crate::{
    condition::Readiness,
    error::Result,
    hub::{Message, parcel::Parcel},
    stream::Ticket,
    sync::{Discarded, discard_all},
};

/// What an input has taken, from any of its connections.
#[derive(Debug)]
pub(super) struct Intake<M: 'static> {
    /// `traffic`: all that was taken. Of that, `reread` had been taken before, and `untaken` was passed to workers that
    /// did not take it.
    traffic: Traffic,
    reread: Traffic,
    untaken: Traffic,
    tickets: TakenTickets,
    context: Arc<RunContext>,
    /// The messages of [`take_all`](Self::take_all); kept for its capacity.
    taken: Taken<M>,
}

/// Messages that were taken together. They are dropped one by one, since several may have a destructor that panics.
#[derive(Debug)]
struct Taken<M: 'static>(Vec<M>);

/// The result of [`take_all`](Intake::take_all).
#[derive(Debug)]
pub(super) struct Batch<'a, M: 'static>(std::vec::Drain<'a, M>);

impl<M: 'static> Drop for Taken<M> {
    fn drop(&mut self) {
        discard_all(self.0.drain(..));
    }
}

impl<M: 'static> Drop for Batch<'_, M> {
    fn drop(&mut self) {
        discard_all(self.0.by_ref());
    }
}

impl<M: 'static> Iterator for Batch<'_, M> {
    type Item = M;

    #[inline]
    fn next(&mut self) -> Option<M> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<M: 'static> ExactSizeIterator for Batch<'_, M> {}

impl<M: Message> Intake<M> {
    pub(super) fn new(binder: &Binder<'_>) -> Self {
        let (tickets, context) = (TakenTickets::new(binder.streams.clone()), binder.context.clone());
        Self {
            traffic: Traffic::default(),
            reread: Traffic::default(),
            untaken: Traffic::default(),
            tickets,
            context,
            taken: Taken(Vec::new()),
        }
    }

    /// A run begins.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.tickets.begin(self.traffic.messages);
    }

    /// Called when the operator begins to wait for the next message.
    #[inline]
    pub(super) fn release_unneeded(&self) {
        self.context.release_between_runs();
    }

    /// A wait for a message, perhaps in the middle of a run: true if there is one, false if none will arrive.
    pub(super) fn poll_received(
        &self,
        task: &mut Context<'_>,
        ask: impl FnOnce(&mut Context<'_>) -> Readiness,
    ) -> Poll<bool> {
        self.context.poll_port(InRun::RECEIVES, task, |task| match ask(task) {
            Readiness::READY => Ok(true),
            Readiness::NEVER => Ok(false),
            _ if self.context.node().take_release() => Ok(false),
            asked => Err(asked),
        })
    }

    /// Takes the next message, if there is one, counts it and notes its ticket. `again`: also the newest one of a
    /// latest-value hub, even if it was taken before.
    #[inline]
    pub(super) fn take(&mut self, from: &mut InputQueue<M>, again: bool) -> Result<Option<M>> {
        let mut place = Discarded::none();
        self.take_into(place.place(), from, again)?;
        Ok(place.take().map(|parcel| parcel.message))
    }

    /// As `take`, into `place`, where the message stays until its destructor may run.
    #[inline]
    pub(super) fn take_into(
        &mut self,
        place: &mut Option<Parcel<M>>,
        from: &mut InputQueue<M>,
        again: bool,
    ) -> Result<()> {
        let before = from.last();
        from.take(place, again)?;
        let Some(parcel) = place else { return Ok(()) };
        self.traffic.count(&parcel.message);
        if from.last() == before {
            self.reread.count(&parcel.message);
        }
        if let Some(ticket) = parcel.take_ticket() {
            self.tickets.note(&mut parcel.message, ticket, self.traffic.messages)?;
        }
        self.context.receive(parcel.header.take())
    }

    /// Takes the messages that `next` returns, until it returns none; those that the caller does not use are dropped.
    pub(super) fn take_all(&mut self, mut next: impl FnMut(&mut Self) -> Result<Option<M>>) -> Result<Batch<'_, M>> {
        // One by one also on an error or a panic.
        let mut taken = std::mem::replace(&mut self.taken, Taken(Vec::new()));
        while let Some(message) = next(self)? {
            taken.0.push(message);
        }
        self.taken = taken;
        Ok(Batch(self.taken.0.drain(..)))
    }

    /// Takes the next message, if there is one, in the operator's place: its metadata goes to `context`.
    pub(super) fn take_for(&mut self, from: &mut InputQueue<M>, context: &RunContext) -> Result<Option<M>> {
        let mut place = Discarded::none();
        from.take(place.place(), false)?;
        let Some(parcel) = place.get_mut() else { return Ok(None) };
        self.traffic.count(&parcel.message);
        // So that it is not taken for one of a run.
        let _ = parcel.take_ticket();
        context.gather(parcel.take_load())?;
        Ok(place.take().map(|parcel| parcel.message))
    }

    /// Passes the next message to a worker, with its header. False if there is none.
    pub(super) fn pass(&mut self, from: &mut InputQueue<M>, worker: &mut InputQueue<M>, again: bool) -> Result<bool> {
        let (mut place, before) = (Discarded::none(), from.last());
        from.take(place.place(), again)?;
        let Some(parcel) = place.get() else { return Ok(false) };
        self.traffic.count(&parcel.message);
        if from.last() == before {
            self.reread.count(&parcel.message);
        }
        place.take().map_or(Ok(()), |parcel| worker.put(parcel))?;
        Ok(true)
    }

    /// Drops the messages that a worker has not taken of those passed to it, and counts them as untaken.
    pub(super) fn take_back(&mut self, from: &InputQueue<M>, worker: &mut InputQueue<M>) {
        let mut untaken = Traffic::default();
        worker.clear(|message| untaken.count(message));
        // The newest message of a latest-value hub remains available for the next run.
        if !from.reads_again() {
            self.untaken.messages += untaken.messages;
            self.untaken.bytes = self.untaken.bytes.saturating_add(untaken.bytes);
            from.count_untaken(untaken.messages);
        }
    }

    /// Counts each message once, however often it was taken, and none that workers have not taken.
    pub(super) fn traffic(&self) -> Traffic {
        self.traffic.without(self.reread).without(self.untaken)
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.tickets.all(self.traffic.messages)
    }
}
