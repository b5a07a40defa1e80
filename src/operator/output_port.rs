//! [`Output`] as a port of an operator, of one of its workers, and of a section.

use std::{
    any::Any,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    output::Output,
    plan::AnyEnd,
    ports::{AnyPort, Flush, OutputPort, PortStats, WorkerPort},
    readers::Readers,
    section_port::{Blank, SectionContext, SectionOutput, no_envelope},
};
use crate::{
    condition::{Counted, PortState, Readiness, Room},
    error::Result,
    hub::{Message, RawEnvelope, end_waker::Interest, outbox::Outbox, parcel::Parcel, pool::Pool, queue::Answer},
    stream::Stream,
    sync::{DiscardOnDrop, discard},
};

impl<M: Message> Output<M> {
    /// Sends a departed message of a worker. Returns it if there is no room.
    fn try_forward(&mut self, parcel: Parcel<M>) -> Result<Result<(), Parcel<M>>> {
        match &mut self.readers {
            Readers::One(sender) if !sender.reader_gone() => sender.try_forward(parcel),
            Readers::Several(fan) if !fan.is_closed() => fan.try_forward(parcel),
            _ => {
                discard(parcel);
                Err(self.readers.closed())
            }
        }
    }
}

impl<M: Message> OutputPort for Output<M> {}

impl<M: Message> PortState for Output<M> {
    fn poll_count(&mut self, _most: usize, _cx: &mut Context<'_>) -> Counted {
        Counted::NONE
    }

    fn poll_room(&mut self, count: usize, cx: &mut Context<'_>) -> Readiness {
        self.poll_demand(Room::For(count), Interest::Change, cx)
    }

    fn oldest(&self) -> Option<Instant> {
        None
    }
}

impl<M: Message> AnyPort for Output<M> {
    fn is_output(&self) -> bool {
        true
    }

    fn has_ended(&self) -> bool {
        self.readers.have_ended()
    }

    fn stats(&self) -> PortStats {
        PortStats { traffic: self.traffic, connections: 1 }
    }

    fn watch(&mut self, waker: &Waker) {
        self.readers.watch(waker);
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Flush {
        loop {
            if let Some(pending) = &mut self.pending {
                let Poll::Ready(done) = Pin::new(&mut **pending).poll(cx) else { return Err(Readiness::WAIT_EVENT) };
                self.pending = None;
                if done.is_err() {
                    return Ok(done);
                }
            }
            let Some(first) = self.backlog.as_mut().and_then(|backlog| backlog.pop_front()) else {
                return Ok(Ok(()));
            };
            let mut first = DiscardOnDrop::new(first);
            let (mut answer, mut bytes) = (Answer::Wait, 0);
            if let Some(parcel) = first.get_mut() {
                answer = self.readers.poll_send(&mut parcel.message, cx.waker());
                bytes = parcel.message.size_in_bytes() as u64;
            }
            let back = match (answer, first.take()) {
                (Answer::Wait, first) => first,
                (_, None) => None,
                (_, Some(parcel)) => match self.try_forward(parcel) {
                    Ok(sent) => sent.err(),
                    Err(error) => return Ok(Err(error)),
                },
            };
            let Some(back) = back else {
                self.traffic.add(bytes);
                continue;
            };
            self.backlog.get_or_insert_default().push_front(back);
            self.pending = self.readers.pending().map(Box::new);
            if self.pending.is_some() {
                continue;
            }
            if answer != Answer::Wait {
                // Another writer was faster.
                cx.waker().wake_by_ref();
            }
            return Err(Readiness::WAIT);
        }
    }

    fn worker_port(&mut self) -> Option<&mut (dyn WorkerPort + 'static)> {
        Some(self)
    }

    fn section_output(&mut self) -> Option<&mut dyn SectionOutput> {
        if M::IS_ENVELOPE { Some(self) } else { None }
    }
}

impl<M: Message> WorkerPort for Output<M> {
    fn worker_ends(&self) -> Vec<AnyEnd> {
        vec![Box::new(Outbox::<M>::new(self.readers.blanks()))]
    }

    fn collect(&mut self, worker: &mut dyn Any) -> bool {
        let Some(worker) = worker.downcast_mut::<Self>() else { return false };
        let (mut sent, closes) = match &mut worker.readers {
            Readers::Outbox(outbox) => (outbox.take(), false),
            // The worker has closed it.
            _ => (worker.backlog.take().map(|backlog| *backlog).unwrap_or_default(), true),
        };
        self.backlog.get_or_insert_default().append(&mut sent);
        self.closing |= closes;
        closes
    }

    fn finish_close(&mut self) {
        if std::mem::take(&mut self.closing) {
            self.close();
        }
    }
}

impl<M: Message> SectionOutput for Output<M> {
    fn take_blank(&mut self) -> Result<Blank> {
        if self.readers.blanks().is_err() {
            return Ok(Blank::NoPool);
        }
        Ok(self.readers.blank()?.map_or(Blank::AllInUse, Blank::Taken))
    }

    fn send(&mut self, envelope: RawEnvelope, section: &SectionContext) -> Result<()> {
        let message = M::of_envelope(envelope).ok_or_else(no_envelope)?;
        let mut parcel = Parcel::new(message, section.context.load());
        parcel.depart(Some(&section.stream))?;
        self.backlog.get_or_insert_default().push_back(parcel);
        Ok(())
    }

    fn captured_end(&self, stream: &Stream) -> AnyEnd {
        let blanks = self.readers.blanks().map(|pool| Pool::captured(pool.hub(), pool.bytes(), stream));
        Box::new(Outbox::<M>::new(blanks))
    }

    fn captured(&mut self) -> Vec<RawEnvelope> {
        let Readers::Outbox(outbox) = &mut self.readers else { return Vec::new() };
        outbox.take().drain(..).filter_map(|parcel| parcel.message.into_envelope()).collect()
    }
}
