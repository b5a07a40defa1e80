//! What a flow sees of a [`HubCore`].

use std::sync::{Arc, atomic::Ordering};

use super::HubCore;
use crate::{
    error::Result,
    hub::{
        Message,
        pool::Pool,
        queue::Counts,
        view::{EnvelopeHolders, Fill, HubView, ReaderWait, WriterWait, whereabouts},
    },
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
};

impl<M: Message> HubCore<M> {
    /// For example `on cuda:0`.
    fn at_reader(&self) -> String {
        format!("on {}", if self.reader.is_host() { "the host" } else { self.reader.name() })
    }
}

impl<M: Message> HubView for HubCore<M> {
    fn queued(&self) -> usize {
        self.queue.unread()
    }

    fn fill(&self) -> Fill {
        let free = |pool: &Arc<Pool>| (pool.idle().min(pool.count()), pool.count());
        Fill {
            queued: self.queue.unread(),
            capacity: self.queue.capacity(),
            blanks: self.blank_pool.as_ref().map(free),
            arrivals: self.arrival_pool.as_ref().map(free),
        }
    }

    fn keeps_latest(&self) -> bool {
        self.latest.is_some()
    }

    fn counts(&self) -> Counts {
        self.queue.counts()
    }

    fn last_copy(&self) -> Option<Ticket> {
        self.copy_stream.as_ref().map(Stream::ticket)
    }

    fn step(&self) -> Result<Option<u64>> {
        // A message that was handed back is retried at the next step.
        self.move_one().map(|moved| moved.bytes)
    }

    fn stop_stepping(&self) {
        self.stepped.store(false, Ordering::Release);
        // An error is stored for both ends.
        let _ = self.pump();
    }

    fn has_ended(&self) -> bool {
        HubCore::has_ended(self)
    }

    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn holds(&self, pool: &Arc<Pool>) -> usize {
        // Used only for a text, from any thread: a message whose own code would run under the lock is not counted.
        if !M::VISITS_UNDER_LOCK {
            return 0;
        }
        let mut count = 0;
        let pool = Arc::downgrade(pool);
        self.queue.each(|parcel| {
            parcel.message.envelopes(&mut |envelope| count += usize::from(envelope.pool().ptr_eq(&pool)));
        });
        count
    }

    fn carries_envelopes(&self) -> bool {
        M::CARRIES_ENVELOPES
    }

    fn copies(&self) -> bool {
        self.arrival_pool.is_some()
    }

    fn writer_waits(&self) -> Option<WriterWait> {
        if self.queue.reader_gone() {
            return None;
        }
        let (messages, envelopes) = self.writer_request.noted();
        if !self.queue.has_room(messages) {
            return Some(WriterWait::Room);
        }
        if self.blank_pool.as_ref().is_some_and(|blanks| !blanks.has(envelopes)) {
            return Some(WriterWait::Blank);
        }
        // A hub that drops messages takes the envelopes from older ones, or drops the new message.
        let forks = self.forks && self.queue.when_full().blocks_writer();
        let lacks = forks && self.arrival_pool.as_ref().is_some_and(|arrivals| !arrivals.has(envelopes));
        lacks.then_some(WriterWait::Copy)
    }

    fn reader_waits(&self, in_run: bool) -> Option<ReaderWait> {
        let again = !in_run && self.queue.ready() > 0;
        if again || self.queue.has_new() || self.has_ended() {
            return None;
        }
        if self.keeps_latest() && mutants::is(Mutant::LatestUnseen) {
            return None;
        }
        if self.queue.unread() == 0 {
            return Some(ReaderWait::Message);
        }
        let arrivals = self.arrival_pool.as_ref()?;
        Some(if arrivals.has(1) { ReaderWait::Move } else { ReaderWait::Envelope })
    }

    fn writer_lacks(&self, holders: &dyn EnvelopeHolders) -> Option<String> {
        let (messages, envelopes) = self.writer_request.noted();
        let what = |one: &str, several: &str| {
            if envelopes == 1 { one.to_string() } else { format!("{envelopes} {several}") }
        };
        match self.writer_waits()? {
            WriterWait::Room => {
                let (name, taken, all) = (&self.name, self.queue.len(), self.queue.capacity());
                Some(match messages {
                    1 => format!("room in hub `{name}`: its queue of {all} is full"),
                    _ => {
                        format!("room for {messages} messages in hub `{name}`: its queue has {taken} of at most {all}")
                    }
                })
            }
            WriterWait::Blank => {
                let whereabouts = whereabouts(self.blank_pool.as_ref()?, holders);
                Some(format!("{}: {whereabouts}", what("a blank envelope", "blank envelopes")))
            }
            WriterWait::Copy => {
                let whereabouts = whereabouts(self.arrival_pool.as_ref()?, holders);
                Some(format!("{} {} to copy to: {whereabouts}", what("an envelope", "envelopes"), self.at_reader()))
            }
        }
    }

    fn reader_lacks(&self, in_run: bool, holders: &dyn EnvelopeHolders) -> Option<String> {
        let name = &self.name;
        match self.reader_waits(in_run)? {
            ReaderWait::Message if self.keeps_latest() && self.queue.len() > 0 => {
                Some(format!("a newer message in hub `{name}`"))
            }
            ReaderWait::Message => Some(format!("a message in hub `{name}`")),
            ReaderWait::Move => Some(format!("hub `{name}` to move a message")),
            ReaderWait::Envelope => {
                let whereabouts = whereabouts(self.arrival_pool.as_ref()?, holders);
                Some(format!("an envelope {}: {whereabouts}", self.at_reader()))
            }
        }
    }
}
