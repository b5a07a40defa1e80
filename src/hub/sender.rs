//! [`Sender`]: the writer's end of a hub.

use std::{fmt, ops::Deref, sync::Arc, task::Waker};

use super::{
    Copier, Message,
    core::HubCore,
    external::ExternalHandle,
    header::Parcel,
    pool::Pool,
    queue::{Answer, Full},
    raw_envelope::RawEnvelope,
    waking::Interest,
};
use crate::{
    error::{Error, ErrorKind, Result},
    stream::Stream,
    sync::{Discarded, discard},
};

/// What a writer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// Room for this many messages of one envelope each and, where the hub has them, as many blank envelopes.
    Room(usize),
    /// Room for this many messages of one envelope each, regardless of blank envelopes.
    Places(usize),
    /// Room for one message with this many envelopes.
    Message(usize),
    /// A blank envelope, where the hub has them.
    Blank,
    /// Nothing, but a reader.
    Reader,
}

/// The writer's end of a hub. Dropping it ends the reader after it has taken the queued messages.
pub(crate) struct Sender<M: Message>(Arc<HubCore<M>>);

impl<M: Message> Deref for Sender<M> {
    type Target = HubCore<M>;

    #[inline]
    fn deref(&self) -> &HubCore<M> {
        &self.0
    }
}

impl<M: Message> Sender<M> {
    pub(super) fn new(hub: Arc<HubCore<M>>) -> Self {
        Self(hub)
    }

    /// Whether the hub has what the writer demands, or has failed: the next call then returns its error. `Never`: the
    /// reader has ended. A writer that waits for nothing but a reader waits for that of a failed hub, too.
    #[inline]
    pub(crate) fn poll(&self, demand: Demand, interest: Interest, waker: &Waker) -> Answer {
        if demand != Demand::Reader && self.has_failed() {
            return Answer::Yes;
        }
        let answer = match demand {
            Demand::Room(1) if self.blanks.is_none() => self.queue.poll_room(interest, waker),
            // Blank envelopes are not queued here, so each change wakes a writer that waits for one.
            Demand::Room(1) => match self.queue.poll_room(Interest::Change, waker) {
                Answer::Yes => self.poll_blank(waker),
                other => other,
            },
            Demand::Message(_) => self.queue.poll_room(Interest::Change, waker),
            Demand::Blank => self.poll_blank(waker),
            Demand::Reader => self.queue.poll_reader(waker),
            Demand::Room(messages) => {
                self.ask_for(messages, messages);
                self.poll_several(waker, || self.has_room(messages) && self.has_blanks(messages))
            }
            Demand::Places(messages) => self.poll_several(waker, || self.has_room(messages)),
        };
        // The hub may have failed before the waker was registered, in which case nothing would wake it.
        if answer == Answer::Wait && self.has_failed() { Answer::Yes } else { answer }
    }

    #[inline(never)]
    fn poll_several(&self, waker: &Waker, is_available: impl Fn() -> bool) -> Answer {
        let ask = || match () {
            () if self.queue.poll_reader(waker) == Answer::Never => Answer::Never,
            () if is_available() => Answer::Yes,
            () => Answer::Wait,
        };
        match ask() {
            Answer::Wait => {
                // Checked again: the change may have come before the waker was registered.
                self.watch(waker);
                ask()
            }
            answer => answer,
        }
    }

    /// Whether there is a blank envelope, or `Yes` if the hub has no pool of them.
    #[inline]
    fn poll_blank(&self, waker: &Waker) -> Answer {
        let Some(blanks) = &self.blanks else { return Answer::Yes };
        if blanks.has(1) {
            return Answer::Yes;
        }
        self.watch(waker);
        if self.reader_gone() {
            return Answer::Never;
        }
        // Checked again: one may have been returned before the waker was registered.
        if blanks.has(1) { Answer::Yes } else { Answer::Wait }
    }

    /// Takes a blank envelope, if one is free; an error if the hub has no pool of them.
    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.check()?;
        match &self.blanks {
            Some(blanks) => blanks.take(),
            None => self.blanks().map(|_| None),
        }
    }

    /// The pool of blank envelopes, or an error that says why there is none.
    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        self.blanks.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!(
                    "hub `{}` has no blank envelopes: set their size with `#[output(envelope_bytes = ..)]` or \
                     `Hub::envelope_bytes`",
                    self.name
                ),
            )
        })
    }

    /// Sends the message in `place`, if there is room; otherwise it stays there. `origin`: the stream on which its
    /// sender works.
    #[inline]
    pub(crate) fn try_send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        self.check()?;
        let Some(parcel) = place else { return Ok(()) };
        self.check_places(&mut parcel.message)?;
        if !self.has_room(1) {
            return Ok(());
        }
        parcel.depart(origin)?;
        self.send(place)
    }

    /// Sends a message that has [departed](Parcel::depart), like `try_send`. `dropped` gets the message that the hub
    /// drops for it, which may be this one. Nothing is moved.
    pub(crate) fn try_send_departed(
        &mut self,
        place: &mut Option<Parcel<M>>,
        dropped: impl FnOnce(Parcel<M>),
    ) -> Result<()> {
        self.check()?;
        if self.has_room(1) {
            self.enqueue(place, dropped);
        }
        Ok(())
    }

    /// A handle of the hub, for the steps before and after sending that run without borrowing the sender.
    pub(super) fn external(&self) -> ExternalHandle<M> {
        ExternalHandle::new(&self.0)
    }

    /// Like `hand_on`, if there is room; otherwise returns the message.
    pub(crate) fn try_hand_on(&mut self, parcel: Parcel<M>) -> Result<Result<(), Parcel<M>>> {
        let mut place = Discarded::new(parcel);
        self.check()?;
        if let Some(parcel) = place.get_mut() {
            self.check_places(&mut parcel.message)?;
        }
        if self.has_room(1) {
            self.send(place.place())?;
        }
        Ok(place.take().map_or(Ok(()), Err))
    }

    /// Pushes a message that was taken from another hub into this one, which always has room for it.
    pub(crate) fn hand_on(&mut self, parcel: Parcel<M>) -> Result<()> {
        // Always succeeds: the reader closes after this sender.
        self.send(Discarded::new(parcel).place())
    }

    /// Whether the hub never blocks the writer.
    pub(super) fn drops(&self) -> bool {
        !self.queue.full().blocks()
    }

    /// Whether the queue would accept one more message rather than drop it.
    pub(super) fn takes_one(&self) -> bool {
        self.queue.full() != Full::DropNewest || self.queue.len() < self.queue.capacity()
    }

    /// Makes this many envelopes free to copy to, by dropping older messages if needed. Returns false if the reader
    /// has too many of them.
    pub(super) fn free_arrivals(&self, count: usize) -> bool {
        let Some(arrivals) = &self.arrivals else { return true };
        while !arrivals.has(count) {
            if self.queue.full() != Full::DropOldest {
                return false;
            }
            let Some(old) = self.queue.drop_oldest() else { return false };
            discard(old);
        }
        true
    }

    /// Whether this many blank envelopes are free, or if the hub has no pool of them.
    pub(super) fn has_blanks(&self, count: usize) -> bool {
        self.blanks.as_ref().is_none_or(|blanks| blanks.has(count))
    }

    /// A copier for the envelopes of a fork.
    pub(super) fn copier(&self) -> Copier<'_> {
        Copier::new(&self.name, self.arrivals.as_ref(), self.copies.as_ref())
    }

    /// Registers the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.queue.keep_writer(waker);
    }

    /// Checks that the message can be moved: where the hub copies nothing, its envelopes are at the reader's location;
    /// otherwise all that are not can be copied at once, as they must be before the message is read.
    #[inline]
    pub(super) fn check_places(&self, message: &mut M) -> Result<()> {
        if !M::CARRIES_ENVELOPES {
            return Ok(());
        }
        let Some(arrivals) = &self.arrivals else { return self.check_location(message) };
        // A message that is one envelope needs one to copy to, and each hub that copies has one.
        if M::IS_ENVELOPE { Ok(()) } else { self.check_count(arrivals.count(), message) }
    }

    fn check_location(&self, message: &mut M) -> Result<()> {
        let mut misplaced = None;
        message.envelopes(&mut |envelope| {
            if !envelope.memory().is_at(&self.reader) {
                misplaced.get_or_insert_with(|| self.misplaced(envelope));
            }
        });
        misplaced.map_or(Ok(()), |error| Err(self.fail(error)))
    }

    fn check_count(&self, most: usize, message: &mut M) -> Result<()> {
        let mut copied = 0;
        message.envelopes(&mut |envelope| copied += usize::from(!envelope.memory().is_at(&self.reader)));
        if copied <= most {
            return Ok(());
        }
        let text = format!(
            "a message has {copied} envelopes to copy, but the hub has only {most}: set `Hub::envelopes` to at least \
             {copied}"
        );
        Err(self.fail(Error::new(ErrorKind::Usage, text)))
    }
}

impl<M: Message> Drop for Sender<M> {
    fn drop(&mut self) {
        self.queue.close_writer();
    }
}

impl<M: Message> fmt::Debug for Sender<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{
        device::{Device, Emulated},
        hub::{
            Envelope, RawEnvelope,
            build::{self, HubPlan},
            receiver::Receiver,
        },
        stream::CompletionMode,
        sync::{Mutex, lock},
    };

    #[test]
    fn a_writer_that_waits_for_a_reader_sees_its_end_in_a_failed_hub() {
        let (sender, receiver) = build::private::<u32>("any");
        let poll = |demand| sender.poll(demand, Interest::Change, Waker::noop());
        let _ = sender.fail(Error::new(ErrorKind::Usage, "planned"));
        for demand in [Demand::Reader, Demand::Room(1), Demand::Room(2), Demand::Places(2), Demand::Blank] {
            assert_eq!(poll(demand), Answer::Yes, "{demand:?}");
        }
        drop(receiver);
        assert_eq!(poll(Demand::Reader), Answer::Never);
        assert_eq!(poll(Demand::Room(1)), Answer::Yes, "the next call returns the error");
    }

    /// Two envelopes. Its reader ends while they are visited for the third time: after the check of their number and the
    /// departure, to move them.
    struct Pair {
        envelopes: [Envelope<u8>; 2],
        visits: Arc<AtomicUsize>,
        reader: Arc<Mutex<Option<Receiver<Self>>>>,
    }

    impl Message for Pair {
        const CARRIES_ENVELOPES: bool = true;

        fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
            self.envelopes.iter_mut().for_each(|envelope| envelope.envelopes(visit));
            if self.visits.fetch_add(1, Ordering::Relaxed) == 2 {
                let reader = lock(&self.reader).take();
                drop(reader);
            }
        }
    }

    #[test]
    fn a_half_moved_message_is_untaken_if_its_reader_has_ended_meanwhile() {
        let (device, host) = (Device::emulated(Emulated::new()), Device::host());
        let plan = HubPlan {
            name: "any".into(),
            capacity: 1,
            full: Full::Hold,
            ends_with: None,
            envelopes: 2,
            writer_bytes: Some(8),
            reader_bytes: Some(8),
            forks: false,
            writer: host,
            reader: device.clone(),
            near: device,
            mode: CompletionMode::default(),
            priority: 0,
            times: None,
            stepped: false,
            captured: None,
        };
        let (mut sender, receiver, view) = build::build::<Pair>(plan, None).unwrap();
        let blank = || Envelope::<u8>::of_raw(sender.blank().unwrap().unwrap());
        let envelopes = [blank(), blank()];
        // One of the two envelopes to copy to is in use.
        let _used = sender.arrivals.as_ref().unwrap().take().unwrap().unwrap();
        let reader = Arc::new(Mutex::new(Some(receiver)));
        let mut place = Some(Parcel::new(Pair { envelopes, visits: Arc::default(), reader }, None));
        sender.try_send(&mut place, None).unwrap();
        assert!(place.is_none(), "its sender does not get an envelope of the reader's");
        assert_eq!(view.counts().untaken, 1);
        assert!(sender.has_blanks(2), "its own envelopes have returned");
    }
}
