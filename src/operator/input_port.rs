//! [`Input`] as a port of an operator, of one of its workers, and of a section.

use std::{
    any::Any,
    task::{Context, Waker},
};

use tokio::time::Instant;

use super::{
    input::{Connections, Input},
    input_queue::InputQueue,
    input_wait::{self, InputWait},
    plan::AnyEnd,
    ports::{AnyPort, InputPort, Port, PortStats, Traffic, WorkerPort},
    section_port::{SectionContext, SectionInput, no_envelope},
};
use crate::{
    condition::{Counted, PortState, Readiness},
    error::Result,
    hub::{Message, RawEnvelope},
    sync::DiscardOnDrop,
};

impl<M: Message, C: Connections> Input<M, C> {
    /// Counts each message once, however often it was taken, and none that workers have not taken.
    fn counted(&self) -> Traffic {
        self.traffic.without(self.reread).without(self.untaken)
    }

    /// Passes the next message of a connection to a worker, with its header. False if there is none.
    fn pass(&mut self, connection: usize, worker: &mut InputQueue<M>, reread: bool) -> Result<bool> {
        let queue = &mut self.queues.as_mut()[connection];
        let (mut place, before) = (DiscardOnDrop::none(), queue.last());
        queue.take(place.place(), reread)?;
        let Some(parcel) = place.get() else { return Ok(false) };
        self.traffic.count(&parcel.message);
        if queue.last() == before {
            self.reread.count(&parcel.message);
        }
        place.take().map_or(Ok(()), |parcel| worker.feed(parcel))?;
        Ok(true)
    }
}

impl<M: Message, C: Connections> InputPort for Input<M, C> {
    const EVENTS: &'static [&'static str] = M::EVENTS;
}

impl<M: Message, C: Connections> PortState for Input<M, C> {
    fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        input_wait::poll_count(self.queues.as_mut(), most, cx)
    }

    fn poll_promised(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        input_wait::poll_promised(self.queues.as_mut(), most, cx)
    }

    fn poll_room(&mut self, _count: usize, _cx: &mut Context<'_>) -> Readiness {
        Readiness::READY
    }

    fn oldest(&self) -> Option<Instant> {
        input_wait::oldest(self.queues.as_ref())
    }
}

impl<M: Message, C: Connections> AnyPort for Input<M, C> {
    fn is_output(&self) -> bool {
        false
    }

    fn has_ended(&self) -> bool {
        self.has_ended()
    }

    fn stats(&self) -> PortStats {
        PortStats { traffic: self.counted(), connections: self.queues.as_ref().len() as u64 }
    }

    fn watch(&mut self, waker: &Waker) {
        self.queues.as_ref().iter().for_each(|queue| queue.watch(waker));
    }

    fn idle(&mut self) {
        for queue in self.queues.as_mut() {
            queue.release();
            queue.idle();
        }
        self.wait.iter_mut().for_each(|wait| wait.idle());
    }

    fn allows_runs(&mut self, cx: &mut Context<'_>) -> bool {
        input_wait::allows_runs(self.queues.as_mut(), self.wait.as_deref(), cx)
    }

    fn input_wait(&self) -> Option<&InputWait> {
        self.wait.as_deref()
    }

    fn worker_port(&mut self) -> Option<&mut (dyn WorkerPort + 'static)> {
        Some(self)
    }

    fn section_input(&mut self) -> Option<&mut dyn SectionInput> {
        if M::IS_ENVELOPE && !C::MANY { Some(self) } else { None }
    }
}

impl<M: Message, C: Connections> WorkerPort for Input<M, C> {
    fn worker_ends(&self) -> Vec<AnyEnd> {
        self.queues.as_ref().iter().map(|queue| Box::new(queue.worker_end()) as AnyEnd).collect()
    }

    fn dispatch(&mut self, worker: &mut dyn Any) -> Result<()> {
        let Some(worker) = worker.downcast_mut::<Self>() else { return Ok(()) };
        let Some(wait) = &self.wait else {
            // One message of each.
            let mut workers = worker.queues.as_mut().iter_mut().enumerate();
            return workers.try_for_each(|(connection, to)| self.pass(connection, to, true).map(drop));
        };
        self.turns.begin_batch(wait.batch(), self.queues.as_ref());
        let workers = worker.queues.as_mut();
        let mut pass = |input: &mut Self, connection: usize, is_first: bool| {
            let passed = input.pass(connection, &mut workers[connection], is_first && !C::MANY)?;
            Ok(passed.then_some(()))
        };
        while self.take_turn(&mut pass)?.is_some() {}
        Ok(())
    }

    fn take_back(&mut self, worker: &mut dyn Any) {
        let Some(worker) = worker.downcast_mut::<Self>() else { return };
        for (from, to) in self.queues.as_ref().iter().zip(worker.queues.as_mut()) {
            let mut untaken = Traffic::default();
            to.clear(|message| untaken.count(message));
            // The newest message of a latest-value hub remains available for the next run.
            if !from.keeps_latest() {
                self.untaken.messages += untaken.messages;
                self.untaken.bytes = self.untaken.bytes.saturating_add(untaken.bytes);
                from.count_untaken(untaken.messages);
            }
        }
    }
}

impl<M: Message, C: Connections> SectionInput for Input<M, C> {
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.give_back();
        self.poll_promised(1, cx).more
    }

    fn first_bytes(&mut self) -> Result<Option<usize>> {
        let [queue, ..] = self.queues.as_mut() else { return Ok(None) };
        queue.check()?;
        Ok(if queue.claim() { queue.first_bytes() } else { None })
    }

    fn take(&mut self, section: &SectionContext) -> Result<RawEnvelope> {
        let [queue, ..] = self.queues.as_mut() else { return Err(no_envelope()) };
        let mut place = DiscardOnDrop::none();
        queue.take(place.place(), false)?;
        let parcel = place.get_mut().ok_or_else(no_envelope)?;
        self.traffic.count(&parcel.message);
        // Otherwise it would be counted as a ticket of a run.
        let _ = parcel.take_ticket();
        section.context.gather(parcel.take_load())?;
        place.take().and_then(|parcel| parcel.message.into_envelope()).ok_or_else(no_envelope)
    }

    fn captured_end(&self, envelope: RawEnvelope) -> Result<AnyEnd> {
        let [queue, ..] = self.queues.as_ref() else { return Err(no_envelope()) };
        Ok(Box::new(queue.end_with(M::of_envelope(envelope).ok_or_else(no_envelope)?)?))
    }
}
