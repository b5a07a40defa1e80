//! [`Sender`] and [`Receiver`]: the two ends of a hub, and what each waits for.
//!
//! An end is a reference to the [`HubCore`], whose methods send and take the messages. A hub has one of each: only the owner
//! of the `Sender` sends, and only the owner of the `Receiver` takes. Dropping an end closes its side.

use std::{fmt, ops::Deref, sync::Arc, task::Waker};

use tokio::time::Instant;

use super::{
    Copier, Message,
    core::HubCore,
    end_waker::Interest,
    external::ExternalHandle,
    parcel::Parcel,
    pool::{Pool, RawEnvelope},
    queue::Answer,
    when_full::WhenFull,
};
use crate::{
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    stream::Stream,
    sync::{discard, discard_all},
};

/// What a writer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// Room for this many messages and, where the hub has them, the blank envelopes that they certainly need.
    Room(usize),
    /// Room for this many messages, regardless of blank envelopes.
    QueueRoom(usize),
    /// Room for one message with this many envelopes.
    Message(usize),
    /// This many blank envelopes, where the hub has them.
    Blanks(usize),
    /// Nothing, but a reader.
    Reader,
}

/// The number of envelopes that each message certainly needs.
#[inline]
pub(super) const fn per_message<M: Message>() -> usize {
    const { M::ENVELOPES.certain() }
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

    // A hub has one writer, which these methods take exclusively: the move before a push relies on it (`Queue::all_ready`).

    /// See [`HubCore::try_send`].
    #[inline]
    pub(crate) fn try_send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        self.0.try_send(place, origin)
    }

    /// See [`HubCore::try_send_unmoved`]. [`moves_later`](Self::moves_later) moves the messages.
    pub(crate) fn try_send_unmoved(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        self.0.try_send_unmoved(place, origin)
    }

    pub(crate) fn moves_later(&self) -> MovesLater<M> {
        MovesLater(Some(self.0.clone()))
    }

    /// See [`HubCore::try_send_departed`].
    pub(crate) fn try_send_departed(
        &mut self,
        place: &mut Option<Parcel<M>>,
        dropped: impl FnOnce(Parcel<M>),
    ) -> Result<()> {
        self.0.try_send_departed(place, dropped)
    }

    /// See [`HubCore::try_forward`].
    pub(crate) fn try_forward(&mut self, parcel: Parcel<M>) -> Result<Result<(), Parcel<M>>> {
        self.0.try_forward(parcel)
    }

    /// See [`HubCore::forward`].
    pub(crate) fn forward(&mut self, parcel: Parcel<M>) -> Result<()> {
        self.0.forward(parcel)
    }

    /// `Yes` if the hub can meet the demand, or has failed, so that the next call returns its error. `Never` if the reader
    /// has ended. A writer that demands only a [reader](Demand::Reader) waits for its end in a failed hub, too.
    #[inline]
    pub(crate) fn poll(&self, demand: Demand, interest: Interest, waker: &Waker) -> Answer {
        if demand != Demand::Reader && self.has_failed() {
            return Answer::Yes;
        }
        let answer = match demand {
            Demand::Room(1) if self.blank_pool.is_none() => self.queue.poll_room(interest, waker),
            // Blank envelopes are not queued here, so each change wakes a writer that waits for one.
            Demand::Room(1) => match self.queue.poll_room(Interest::Change, waker) {
                Answer::Yes => {
                    if per_message::<M>() > 1 {
                        self.request(1, per_message::<M>());
                    }
                    self.poll_blanks(per_message::<M>(), waker)
                }
                other => other,
            },
            Demand::Message(_) => self.queue.poll_room(Interest::Change, waker),
            Demand::Blanks(count) => self.poll_blanks(count, waker),
            Demand::Reader => self.queue.poll_reader(waker),
            Demand::Room(messages) => {
                let envelopes = messages.saturating_mul(per_message::<M>());
                self.request(messages, envelopes);
                self.poll_several(waker, || self.has_room(messages) && self.has_blanks(envelopes))
            }
            Demand::QueueRoom(messages) => self.poll_several(waker, || self.has_room(messages)),
        };
        // The hub might have failed before the waker was registered: nothing would wake it.
        if answer == Answer::Wait && self.has_failed() { Answer::Yes } else { answer }
    }

    #[inline(never)]
    fn poll_several(&self, waker: &Waker, is_available: impl Fn() -> bool) -> Answer {
        let answer = || match () {
            () if self.queue.poll_reader(waker) == Answer::Never => Answer::Never,
            () if is_available() => Answer::Yes,
            () => Answer::Wait,
        };
        match answer() {
            Answer::Wait => {
                // Checked again: the change might have come before the waker was registered.
                self.watch(waker);
                answer()
            }
            other => other,
        }
    }

    /// Whether there are this many blank envelopes, or `Yes` if the hub has no pool of them.
    #[inline]
    fn poll_blanks(&self, count: usize, waker: &Waker) -> Answer {
        let Some(blanks) = &self.blank_pool else { return Answer::Yes };
        if blanks.has(count) {
            return Answer::Yes;
        }
        self.watch(waker);
        if self.reader_gone() {
            return Answer::Never;
        }
        // Checked again: one might have been returned before the waker was registered.
        if blanks.has(count) { Answer::Yes } else { Answer::Wait }
    }

    /// Takes a blank envelope, if one is free; an error if the hub has no pool of them.
    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.check()?;
        match &self.blank_pool {
            Some(blanks) => blanks.take(),
            None => self.blanks().map(|_| None),
        }
    }

    /// The pool of blank envelopes, or an error that says why there is none.
    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        self.blank_pool.clone().ok_or_else(|| {
            let why = match M::CARRIES_ENVELOPES {
                true => "set their size with `#[output(envelope_bytes = ..)]` or `HubOptions::envelope_bytes`",
                false => "its messages hold none",
            };
            Error::new(ErrorKind::Usage, format!("hub `{}` has no blank envelopes: {why}", self.name))
        })
    }

    /// A handle of the hub, for the steps before and after sending that run without borrowing the sender.
    pub(crate) fn external(&self) -> ExternalHandle<M> {
        ExternalHandle::new(&self.0)
    }

    /// Whether the hub never blocks the writer.
    pub(crate) fn drops_messages(&self) -> bool {
        !self.queue.when_full().blocks_writer()
    }

    /// Whether the queue would accept one more message rather than drop it.
    pub(crate) fn would_queue(&self) -> bool {
        self.queue.when_full() != WhenFull::DropNewest || self.queue.len() < self.queue.capacity()
    }

    /// Makes this many envelopes free to copy to, by dropping older messages if needed. Returns false if the reader
    /// has too many of them.
    pub(super) fn free_envelopes(&self, count: usize) -> bool {
        let Some(arrivals) = &self.arrival_pool else { return true };
        while !arrivals.has(count) {
            if self.queue.when_full() != WhenFull::DropOldest {
                return false;
            }
            let Some(old) = self.queue.drop_oldest() else { return false };
            discard(old);
        }
        true
    }

    /// Whether this many blank envelopes are free, or if the hub has no pool of them.
    pub(super) fn has_blanks(&self, count: usize) -> bool {
        self.blank_pool.as_ref().is_none_or(|blanks| blanks.has(count))
    }

    /// A copier for the envelopes of a fork.
    pub(super) fn copier(&self) -> Copier<'_> {
        Copier::new(&self.name, self.arrival_pool.as_ref(), self.copy_stream.as_ref())
    }

    /// Registers the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.queue.register_writer(waker);
    }
}

/// Moves the messages that were [sent unmoved](Sender::try_send_unmoved): at the latest when it is dropped.
#[must_use]
pub(crate) struct MovesLater<M: Message>(Option<Arc<HubCore<M>>>);

impl<M: Message> MovesLater<M> {
    /// # Errors
    /// Those of the moves.
    pub(crate) fn move_now(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |hub| hub.pump())
    }
}

impl<M: Message> Drop for MovesLater<M> {
    fn drop(&mut self) {
        // An error is stored for both ends.
        let _ = self.0.take().map(|hub| hub.pump());
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

/// The reader's end of a hub. Dropping it returns the messages that were never taken.
pub(crate) struct Receiver<M: Message>(Arc<HubCore<M>>);

impl<M: Message> Deref for Receiver<M> {
    type Target = HubCore<M>;

    #[inline]
    fn deref(&self) -> &HubCore<M> {
        &self.0
    }
}

impl<M: Message> Receiver<M> {
    pub(super) fn new(hub: Arc<HubCore<M>>) -> Self {
        Self(hub)
    }

    /// Whether there are `count` messages to take, or the hub has failed. `Never` once the writer has closed with fewer
    /// than that, unless some are still being moved.
    #[inline]
    pub(crate) fn poll(&self, count: usize, interest: Interest, waker: &Waker) -> Answer {
        if self.has_failed() {
            return Answer::Yes;
        }
        // A hub that keeps the latest message ends when it no longer keeps one.
        if count > 1 && !(self.keeps_latest() && self.has_ended()) {
            return self.poll_several(count, waker);
        }
        let answer = match self.queue.poll_message(interest, waker) {
            // Checked again: the hub might have failed before the waker was registered.
            Answer::Wait if self.has_failed() => Answer::Yes,
            Answer::Wait if mutants::is(Mutant::EndTooSoon) && self.queue.writer_gone() => Answer::Never,
            other => other,
        };
        // A latest-value hub stays readable after its writer has closed.
        if answer == Answer::Never && self.keeps_latest() && !self.has_ended() { Answer::Yes } else { answer }
    }

    #[inline(never)]
    fn poll_several(&self, count: usize, waker: &Waker) -> Answer {
        let queue = &self.queue;
        let answer = || {
            if self.has_failed() || queue.ready() >= count {
                Answer::Yes
            } else if queue.writer_gone() && queue.len() < count && queue.len() == queue.ready() {
                Answer::Never
            } else {
                Answer::Wait
            }
        };
        match answer() {
            Answer::Wait => {
                queue.register_reader(waker);
                answer()
            }
            other => other,
        }
    }

    /// Since when the first message has waited, if that is recorded.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.wait_time_origin?;
        self.queue.peek_locked(0, Parcel::since).flatten()
    }

    /// Whether there is a message that was not read before. For a hub whose newest message is read repeatedly.
    pub(crate) fn poll_new(&self, waker: &Waker) -> Answer {
        match &self.latest {
            None => self.poll(1, Interest::Change, waker),
            Some(_) => self.queue.poll_new(waker),
        }
    }

    /// Whether the hub may drop messages that are ready to be taken.
    pub(crate) fn is_lossy(&self) -> bool {
        self.queue.is_lossy()
    }

    /// Whether the newest message is read repeatedly.
    pub(crate) fn keeps_latest(&self) -> bool {
        self.latest.is_some()
    }

    /// Reserves the ready messages for this reader, so that none of them is dropped. Returns their number.
    pub(crate) fn reserve_ready(&self) -> usize {
        self.queue.reserve_ready()
    }

    /// Ends the reservation of messages that were not taken.
    pub(crate) fn release_reserved(&self) {
        self.queue.release_reserved().into_iter().for_each(discard);
    }

    /// See [`Queue::version`](super::queue::Queue::version).
    #[cfg(debug_assertions)]
    pub(crate) fn version(&self) -> super::queue::Version {
        self.queue.version()
    }

    /// The number of the first message.
    pub(crate) fn first(&self) -> Option<u64> {
        self.queue.first()
    }

    /// Registers the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.queue.register_reader(waker);
    }

    /// Calls `read` with the message at `at`, without the lock, if the message can be taken.
    pub(crate) fn peek<R>(&self, at: usize, read: impl FnOnce(&mut Parcel<M>) -> R) -> Option<R> {
        self.queue.peek(at, read)
    }

    /// Drops the first message, and counts it as untaken.
    pub(crate) fn discard(&self) {
        self.queue.discard(&mut None);
    }

    /// Recounts this number of taken messages as untaken, because they were not used.
    pub(crate) fn recount_untaken(&self, messages: u64) {
        self.queue.recount_untaken(messages);
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.ready()
    }

    /// Whether there is no unread message, and none will be added.
    pub(crate) fn is_over(&self) -> bool {
        self.queue.has_ended()
    }
}

impl<M: Message> Drop for Receiver<M> {
    fn drop(&mut self) {
        discard_all(self.queue.close_reader());
    }
}

impl<M: Message> fmt::Debug for Receiver<M> {
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
        },
        stream::CompletionMode,
        sync::{Mutex, lock},
    };

    #[test]
    fn a_writer_that_waits_for_a_reader_sees_its_end_in_a_failed_hub() {
        let (sender, receiver) = build::private::<u32>("any");
        let poll = |demand| sender.poll(demand, Interest::Change, Waker::noop());
        let _ = sender.fail(Error::new(ErrorKind::Usage, "planned"));
        for demand in [Demand::Reader, Demand::Room(1), Demand::Room(2), Demand::QueueRoom(2), Demand::Blanks(1)] {
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

    fn pair_hub() -> build::HubEnds<Pair> {
        build::build(plan(1, 2), None).unwrap()
    }

    /// A hub from the host to an emulated device.
    fn plan(capacity: usize, envelopes: usize) -> HubPlan {
        let device = Device::emulated(Emulated::new());
        HubPlan {
            name: "any".into(),
            capacity,
            when_full: WhenFull::Block,
            ends_with: None,
            envelopes,
            writer_bytes: Some(8),
            reader_bytes: Some(8),
            forks: false,
            reads_anywhere: false,
            writer: Device::host(),
            reader: device.clone(),
            near: device,
            mode: CompletionMode::default(),
            priority: 0,
            wait_time_origin: None,
            stepped: false,
            captured: None,
            traced: None,
        }
    }

    /// A pair whose reader ends while it is moved.
    fn pair(pool: &Arc<Pool>, receiver: Receiver<Pair>) -> Option<Parcel<Pair>> {
        let free = || Envelope::<u8>::of_raw(pool.take().unwrap().unwrap());
        let (envelopes, reader) = ([free(), free()], Arc::new(Mutex::new(Some(receiver))));
        Some(Parcel::new(Pair { envelopes, visits: Arc::default(), reader }, None))
    }

    #[test]
    fn a_half_moved_message_is_untaken_if_its_reader_has_ended_meanwhile() {
        let (mut sender, receiver, view) = pair_hub();
        // One of the two envelopes to copy to is in use.
        let _used = sender.arrival_pool.as_ref().unwrap().take().unwrap().unwrap();
        let mut place = pair(sender.blank_pool.as_ref().unwrap(), receiver);
        assert!(sender.try_send(&mut place, None).unwrap_err().is_reader_gone());
        assert!(place.is_none(), "its sender does not get an envelope of the reader's");
        assert_eq!(view.counts().untaken, 1);
        assert!(sender.has_blanks(2), "its own envelopes have returned");
    }

    #[test]
    fn a_moved_message_is_untaken_and_not_sent_if_its_reader_has_ended_meanwhile() {
        let (mut sender, receiver, view) = pair_hub();
        let mut place = pair(sender.blank_pool.as_ref().unwrap(), receiver);
        assert!(sender.try_send(&mut place, None).unwrap_err().is_reader_gone());
        assert!(place.is_none(), "its sender does not get the envelopes of the reader");
        assert_eq!(view.counts().untaken, 1);
        assert!(sender.has_blanks(2), "its own envelopes have returned");
    }

    #[test]
    fn a_message_that_needs_no_move_returns_to_its_sender_if_its_reader_has_ended_meanwhile() {
        let (mut sender, receiver, view) = pair_hub();
        let mut place = pair(sender.arrival_pool.as_ref().unwrap(), receiver);
        sender.try_send(&mut place, None).unwrap();
        assert!(sender.reader_gone() && place.is_some());
        assert_eq!(view.counts().untaken, 0, "its sender has it");
    }

    /// Its envelope is visited, and another envelope then returns to its hub, as if on another thread.
    struct Hooked {
        envelope: Envelope<u8>,
        is_armed: Arc<AtomicUsize>,
        returns: Arc<Mutex<Option<RawEnvelope>>>,
    }

    impl Message for Hooked {
        const CARRIES_ENVELOPES: bool = true;
        const VISITS_UNDER_LOCK: bool = true;

        fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
            self.envelope.envelopes(visit);
            if self.is_armed.load(Ordering::Relaxed) > 0 {
                let returned = lock(&self.returns).take();
                drop(returned);
            }
        }
    }

    #[test]
    fn an_envelope_that_returns_during_a_move_is_not_missed() {
        let (mut sender, receiver, _view) = build::build::<Hooked>(plan(16, 16), None).unwrap();
        let arrivals = sender.arrival_pool.clone().unwrap();
        let mut taken: Vec<_> = (0..16).map(|_| arrivals.take().unwrap().unwrap()).collect();
        let (is_armed, returns) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(taken.pop())));
        for _ in 0..2 {
            let raw = sender.blank_pool.as_ref().unwrap().take().unwrap().unwrap();
            let message =
                Hooked { envelope: Envelope::of_raw(raw), is_armed: is_armed.clone(), returns: returns.clone() };
            let mut place = Some(Parcel::new(message, None));
            sender.try_send(&mut place, None).unwrap();
            assert!(place.is_none());
        }
        assert_eq!(receiver.queue.ready(), 0);
        is_armed.store(1, Ordering::Relaxed);
        sender.pump().unwrap();
        assert!(lock(&returns).is_none(), "an envelope has returned");
        assert_eq!((receiver.queue.ready(), arrivals.has(1)), (1, false), "it is used");
    }
}
