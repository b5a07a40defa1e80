//! What happens between the two ends of a hub.
//!
//! [`HubCore`] combines the [`queue`](super::queue), the [pools](super::pool) and the copies. It has no task of its own:
//! a sender, or a caller that returns an envelope for which a message was waiting, moves what can be moved. A move
//! only enqueues work. No lock of this hub is held during a move, nor while envelopes return to other hubs.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use smallvec::SmallVec;

use super::{
    AgainFn, Message,
    header::{Parcel, Since},
    pool::Pool,
    queue::{Counts, Full, Pushed, Queue},
    raw_envelope::RawEnvelope,
    settle::refused,
    view::{EnvelopeHolders, HubView, ReaderWait, WriterWait, whereabouts},
};
use crate::{
    clock,
    device::Device,
    error::{Error, ErrorKind, Result, panic_message},
    memory::transfer,
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
    sync::{Mutex, discard, lock, logged},
};

/// Envelopes that have been replaced, and are returned to their pools once no lock is held.
type Replaced = SmallVec<[RawEnvelope; 2]>;

pub(crate) struct HubCore<M: Message> {
    pub(super) name: Arc<str>,
    pub(super) queue: Queue<Parcel<M>>,
    /// From which point the waiting times of messages are recorded for the reader.
    pub(super) times: Option<Since>,
    /// Present where the latest message is kept.
    pub(super) again: Option<Again<M>>,
    pub(super) reader: Device,
    /// Messages that are sent here are forks, whose envelopes come from `arrivals`.
    pub(super) forks: bool,
    pub(super) blanks: Option<Arc<Pool>>,
    pub(super) arrivals: Option<Arc<Pool>>,
    pub(super) copies: Option<Stream>,
    /// Messages come from outside the flow.
    pub(super) outside: AtomicBool,
    /// Moves are made only by `step`.
    pub(super) stepped: AtomicBool,
    /// The writer's last request.
    pub(super) asked: WriterRequest,
    pub(super) failed: OnceLock<Error>,
}

/// The room for messages and the number of envelopes (blank ones, or those that its forks are copied to) that a
/// writer has requested, to explain what it waits for. Written only by a writer that may request more than one.
pub(super) struct WriterRequest {
    messages: AtomicUsize,
    envelopes: AtomicUsize,
}

impl WriterRequest {
    fn new() -> Self {
        Self { messages: AtomicUsize::new(1), envelopes: AtomicUsize::new(1) }
    }

    #[inline]
    pub(super) fn note(&self, messages: usize, envelopes: usize) {
        for (noted, asked) in [(&self.messages, messages), (&self.envelopes, envelopes)] {
            // The value rarely changes, and other threads read the same cache line.
            if noted.load(Ordering::Relaxed) != asked {
                noted.store(asked, Ordering::Relaxed);
            }
        }
    }

    fn noted(&self) -> (usize, usize) {
        (self.messages.load(Ordering::Relaxed), self.envelopes.load(Ordering::Relaxed))
    }
}

/// The result of an attempt to move a queued message.
#[derive(Default)]
struct Moved {
    /// The size of the message, if one was moved.
    bytes: Option<u64>,
    /// There may be more to move.
    again: bool,
}

/// What has become of a message that was to be moved.
enum MoveOutcome {
    /// It is at the reader's location. It has this size in bytes.
    Done(u64),
    /// There is no envelope to copy to.
    Waits,
    /// It comes from outside and cannot be moved, which does not concern the hub.
    Refused(Error),
    /// The hub has failed.
    Failed(Error),
}

/// How a message that stays in the hub is read, and when that ends.
pub(super) struct Again<M> {
    pub(super) copy: AgainFn<M>,
    ends_with: Option<Arc<EndTogether>>,
    over: AtomicBool,
}

/// The hubs of an operator without any input that ends it alone. Those that keep the latest message end when all of
/// them have ended.
#[derive(Default)]
pub(crate) struct EndTogether {
    /// How many hubs that keep the latest message have not ended.
    open: AtomicUsize,
    /// The other hubs: queues of optional inputs.
    queues: Mutex<Vec<Weak<dyn HubView>>>,
}

impl EndTogether {
    /// `count`: the number of hubs that keep the latest message.
    pub(crate) fn new(count: usize) -> Self {
        Self { open: count.into(), ..Self::default() }
    }

    /// Adds a queue of an optional input.
    pub(super) fn add(&self, queue: Weak<dyn HubView>) {
        lock(&self.queues).push(queue);
    }

    fn is_over(&self) -> bool {
        // The upgraded reference may be the last one of its hub, so it is dropped with no lock held.
        let mut queues = (0..).map_while(|at| lock(&self.queues).get(at).cloned());
        self.open.load(Ordering::Acquire) == 0
            && queues.all(|queue| queue.upgrade().is_none_or(|queue| queue.has_ended()))
    }
}

impl fmt::Debug for EndTogether {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndTogether").field("open", &self.open).finish_non_exhaustive()
    }
}

impl<M> Again<M> {
    pub(super) fn new(copy: AgainFn<M>, ends_with: Option<Arc<EndTogether>>) -> Self {
        Self { copy, ends_with, over: AtomicBool::new(false) }
    }

    /// Called when the writer has ended and the last message was read. Returns true if the reader ends, too.
    pub(super) fn ends(&self) -> bool {
        let Some(all) = &self.ends_with else { return false };
        if !self.over.swap(true, Ordering::AcqRel) {
            all.open.fetch_sub(1, Ordering::AcqRel);
        }
        all.is_over()
    }
}

impl<M: Message> HubCore<M> {
    /// A hub without envelopes.
    pub(super) fn new(name: Arc<str>, queue: Queue<Parcel<M>>, reader: Device) -> Self {
        Self {
            name,
            queue,
            times: None,
            again: None,
            reader,
            forks: false,
            blanks: None,
            arrivals: None,
            copies: None,
            outside: AtomicBool::new(false),
            stepped: AtomicBool::new(false),
            asked: WriterRequest::new(),
            failed: OnceLock::new(),
        }
    }

    /// Sends the message in `place`: a writer has found room for it. It stays there if the reader has ended.
    #[inline]
    pub(super) fn send(&self, place: &mut Option<Parcel<M>>) -> Result<()> {
        if !self.moves() {
            self.enqueue(place, discard);
            return Ok(());
        }
        self.move_and_send(place)
    }

    /// Whether messages are moved to the reader. Otherwise they can be taken at once.
    #[inline]
    fn moves(&self) -> bool {
        M::CARRIES_ENVELOPES && self.arrivals.is_some()
    }

    /// Moves the message first where no other one waits to be moved: it then enters the queue ready to be taken.
    fn move_and_send(&self, place: &mut Option<Parcel<M>>) -> Result<()> {
        let is_next = !self.stepped.load(Ordering::Acquire) && self.queue.full().blocks() && self.queue.all_ready();
        let Some(parcel) = place.as_mut().filter(|_| is_next && !self.queue.reader_gone()) else {
            self.enqueue(place, discard);
            return self.pump();
        };
        self.note_time(parcel, Since::Sent);
        let mut replaced = Replaced::new();
        match self.bring_caught(parcel, &mut replaced) {
            MoveOutcome::Done(_) => {
                if self.queue.push(place, true) == Pushed::Back {
                    // The reader has ended since: as if it had done so after the push.
                    self.queue.leave_unsent();
                    discard(place.take());
                }
            }
            // It is moved once an envelope returns, which may have happened since.
            MoveOutcome::Waits => {
                self.enqueue(place, discard);
                if place.is_some() && !replaced.is_empty() {
                    // The reader has ended since, and the message is no longer as its sender made it.
                    self.queue.leave_unsent();
                    discard(place.take());
                }
                return self.pump();
            }
            MoveOutcome::Refused(error) => {
                self.queue.refuse();
                place.take().into_iter().for_each(|parcel| self.refuse(parcel, &error));
            }
            MoveOutcome::Failed(error) => {
                self.enqueue(place, discard);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Pushes the message in `place` into the queue, where it may have to be [moved](Self::pump). It stays in `place`
    /// if there is no room or no reader. `dropped` gets the message that is dropped for it, which may be this one.
    #[inline]
    pub(super) fn enqueue(&self, place: &mut Option<Parcel<M>>, dropped: impl FnOnce(Parcel<M>)) {
        let moves = self.moves();
        if let Some(parcel) = place {
            self.note_time(parcel, Since::Sent);
            if !moves {
                self.note_time(parcel, Since::Arrived);
            }
        }
        match self.queue.push(place, !moves) {
            Pushed::InFor | Pushed::Refused => drop(place.take().map(dropped)),
            Pushed::In | Pushed::Back => {}
        }
    }

    /// Moves every message that can be moved.
    pub(super) fn pump(&self) -> Result<()> {
        if !self.moves() || self.stepped.load(Ordering::Acquire) {
            return Ok(());
        }
        while self.move_one()?.again {}
        Ok(())
    }

    /// Moves the first message that needs it, if possible.
    fn move_one(&self) -> Result<Moved> {
        if self.failed.get().is_some() {
            // Both ends get the error at their next call. A failed move is not retried.
            return Ok(Moved::default());
        }
        let mut replaced = Replaced::new();
        let Some(mut parcel) = self.queue.begin_move() else { return Ok(Moved::default()) };
        // A hub that fails does so before the move ends, so that no other move begins.
        let outcome = match self.bring_caught(&mut parcel, &mut replaced) {
            MoveOutcome::Refused(error) => {
                self.queue.drop_moving();
                self.refuse(parcel, &error);
                return Ok(Moved { bytes: None, again: true });
            }
            MoveOutcome::Done(bytes) => Ok(Some(bytes)),
            MoveOutcome::Waits => Ok(None),
            MoveOutcome::Failed(error) => Err(error),
        };
        let (orphan, again) = self.queue.end_move(parcel, matches!(outcome, Ok(Some(_))));
        // The messages behind it are moved even if its destructor panics.
        discard(orphan);
        drop(replaced);
        outcome.map(|bytes| Moved { bytes, again })
    }

    /// Moves all envelopes of a message to the reader's location. A message's own methods may panic, and so may the
    /// destructor of another message.
    fn bring_caught(&self, parcel: &mut Parcel<M>, replaced: &mut Replaced) -> MoveOutcome {
        let brought = catch_unwind(AssertUnwindSafe(|| {
            let moved = self.bring(&mut parcel.message, replaced)?;
            Ok(moved.then(|| parcel.message.size_in_bytes() as u64))
        }));
        match brought.unwrap_or_else(|panic| Err(Error::new(ErrorKind::Panicked, panic_message(panic)))) {
            Ok(Some(bytes)) => {
                self.note_time(parcel, Since::Arrived);
                MoveOutcome::Done(bytes)
            }
            Ok(None) => MoveOutcome::Waits,
            Err(error) if self.is_of_message(&error) => MoveOutcome::Refused(error),
            Err(error) => MoveOutcome::Failed(self.fail(error)),
        }
    }

    /// Records that messages sent here come from outside the flow.
    pub(super) fn is_fed_from_outside(&self) {
        if !self.outside.load(Ordering::Relaxed) {
            self.outside.store(true, Ordering::Relaxed);
        }
    }

    /// Whether an error of a move concerns only the message, which comes from outside, and not the hub.
    #[cold]
    fn is_of_message(&self, error: &Error) -> bool {
        let own_is_lost = || self.copies.as_ref().is_some_and(|copies| copies.device().is_lost());
        self.outside.load(Ordering::Relaxed) && error.kind() != ErrorKind::Race && !own_is_lost()
    }

    /// Drops a message that cannot be moved, and reports an error to its callers.
    #[cold]
    fn refuse(&self, parcel: Parcel<M>, error: &Error) {
        logged(|| {
            tracing::warn!(hub = &*self.name, %error, "dropped a message from outside: it cannot be moved to its reader");
        });
        let Parcel { message, header } = parcel;
        if let Some(load) = header.and_then(|header| header.load) {
            load.reply.fail(error.for_caller("the message was lost on its way into the flow"));
        }
        discard(message);
    }

    /// Checks whether an envelope from outside can be moved to the reader, as far as that is known now.
    ///
    /// # Errors
    /// For the sender: the error does not mention anything of the flow.
    pub(super) fn accepts_one(&self, envelope: &RawEnvelope) -> Result<()> {
        let memory = envelope.memory();
        if memory.is_in_capture() {
            let why = "the memory of an envelope belongs to a capture or to the launches of a graph: copy the data to other \
                       memory first";
            return Err(refused(ErrorKind::Usage, why));
        }
        if memory.is_at(&self.reader) {
            return Ok(());
        }
        let (Some(arrivals), Some(copies)) = (&self.arrivals, &self.copies) else {
            return Err(refused(ErrorKind::Usage, "an envelope is not at its reader's location: use a blank envelope"));
        };
        let bytes = envelope.bytes();
        if bytes > arrivals.bytes() {
            let why = format!("an envelope has {bytes} bytes, and at most {} are allowed", arrivals.bytes());
            return Err(refused(ErrorKind::Usage, &why));
        }
        if !memory.device().copies_with(copies.device()) {
            let why = "there is no copy path from an envelope's location to its reader's: use a blank envelope";
            return Err(refused(ErrorKind::Usage, why));
        }
        memory.device().check().map_err(|error| refused(error.kind(), "the device of an envelope is lost"))
    }

    #[inline]
    pub(super) fn note_time(&self, parcel: &mut Parcel<M>, now: Since) {
        // Not again where a move was tried before the message is queued.
        if self.times == Some(now) && (now == Since::Arrived || parcel.since().is_none()) {
            parcel.set_since(clock::now());
        }
    }

    pub(super) fn misplaced(&self, envelope: &RawEnvelope) -> Error {
        Error::new(
            ErrorKind::Usage,
            format!(
                "an envelope on {} was sent, but the hub has none on {} to copy it to: its writer must allocate envelopes \
                 at its own location",
                envelope.memory().location(),
                self.reader
            ),
        )
    }

    /// Marks the hub as failed; it passes no more messages.
    pub(super) fn fail(&self, error: Error) -> Error {
        let error = error.at(format!("hub `{}`", self.name));
        // Only the first failure is stored.
        let _ = self.failed.set(error.clone());
        self.queue.wake_both();
        error
    }

    /// Moves all envelopes of a message to the reader's location. Returns false if there are too few envelopes to
    /// copy to.
    fn bring(&self, message: &mut M, replaced: &mut Replaced) -> Result<bool> {
        let mut outcome = Ok(true);
        message.envelopes(&mut |envelope| {
            if matches!(outcome, Ok(true)) {
                outcome = self.bring_one(envelope, replaced);
            }
        });
        outcome
    }

    fn bring_one(&self, envelope: &mut RawEnvelope, replaced: &mut Replaced) -> Result<bool> {
        if envelope.memory().is_at(&self.reader) {
            return Ok(true);
        }
        if self.outside.load(Ordering::Relaxed) {
            // Its device may have been lost since it was sent.
            self.accepts_one(envelope)?;
        }
        let (Some(arrivals), Some(copies)) = (&self.arrivals, &self.copies) else {
            return Err(self.misplaced(envelope));
        };
        if envelope.bytes() > arrivals.bytes() {
            return Err(Error::new(ErrorKind::Usage, arrivals.too_small_for(envelope.bytes())));
        }
        let Some(mut arrival) = arrivals.take()? else { return Ok(false) };
        arrival.set_bytes(envelope.bytes());
        arrival.ticket = envelope.take_ticket();
        let short = usize::from(mutants::is(Mutant::ShortCopy));
        transfer::copy(copies, envelope.memory(), arrival.memory_mut(), envelope.bytes().saturating_sub(short))?;
        // Committed now, so that later users of the envelope wait for this copy and for no work after it.
        arrival.memory_mut().commit()?;
        replaced.push(std::mem::replace(envelope, arrival));
        Ok(true)
    }

    /// Whether nothing can be taken, and nothing will be added.
    pub(super) fn has_ended(&self) -> bool {
        // A hub that keeps the latest message reports its end to the others even if it never had a message.
        self.queue.has_ended() && self.again.as_ref().is_none_or(|again| again.ends() || self.queue.len() == 0)
    }

    /// For example `on cuda:0`.
    fn at_reader(&self) -> String {
        format!("on {}", if self.reader.is_host() { "the host" } else { self.reader.name() })
    }

    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.failed.get().is_some()
    }

    /// Whether there is room in the queue for this many messages, or if it drops messages instead.
    #[inline]
    pub(super) fn has_room(&self, messages: usize) -> bool {
        self.queue.has_room(messages)
    }

    pub(crate) fn reader_gone(&self) -> bool {
        self.queue.reader_gone()
    }

    /// Records what the writer requests from now on, so that a stall can be explained.
    #[inline]
    pub(super) fn ask_for(&self, messages: usize, envelopes: usize) {
        self.asked.note(messages, envelopes);
    }

    /// The hub's error, if it has failed.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl<M: Message> HubView for HubCore<M> {
    fn queued(&self) -> usize {
        self.queue.unread()
    }

    fn keeps_latest(&self) -> bool {
        self.again.is_some()
    }

    fn counts(&self) -> Counts {
        self.queue.counts()
    }

    fn last_copy(&self) -> Option<Ticket> {
        self.copies.as_ref().map(Stream::ticket)
    }

    fn step(&self) -> Result<Option<u64>> {
        // A message that was handed back is retried at the next step.
        self.move_one().map(|moved| moved.bytes)
    }

    fn go_on(&self) {
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
            parcel.message.envelopes(&mut |envelope| count += usize::from(envelope.home().ptr_eq(&pool)));
        });
        count
    }

    fn carries_envelopes(&self) -> bool {
        M::CARRIES_ENVELOPES
    }

    fn copies(&self) -> bool {
        self.arrivals.is_some()
    }

    fn writer_waits(&self) -> Option<WriterWait> {
        if self.queue.reader_gone() {
            return None;
        }
        let (messages, envelopes) = self.asked.noted();
        if !self.queue.has_room(messages) {
            return Some(WriterWait::Room);
        }
        if self.blanks.as_ref().is_some_and(|blanks| !blanks.has(envelopes)) {
            return Some(WriterWait::Blank);
        }
        // A hub that drops messages takes the envelopes from older ones, or drops the new message.
        let forks = self.forks && self.queue.full().blocks();
        let lacks = forks && self.arrivals.as_ref().is_some_and(|arrivals| !arrivals.has(envelopes));
        lacks.then_some(WriterWait::Copy)
    }

    fn reader_waits(&self, in_run: bool) -> Option<ReaderWait> {
        let again = !in_run && self.queue.ready() > 0;
        if again || self.queue.has_new() || self.has_ended() {
            return None;
        }
        if self.queue.full() == Full::Replace && mutants::is(Mutant::LatestUnseen) {
            return None;
        }
        if self.queue.unread() == 0 {
            return Some(ReaderWait::Message);
        }
        let arrivals = self.arrivals.as_ref()?;
        Some(if arrivals.has(1) { ReaderWait::Move } else { ReaderWait::Envelope })
    }

    fn writer_lacks(&self, holders: &dyn EnvelopeHolders) -> Option<String> {
        let (messages, envelopes) = self.asked.noted();
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
                let whereabouts = whereabouts(self.blanks.as_ref()?, holders);
                Some(format!("{}: {whereabouts}", what("a blank envelope", "blank envelopes")))
            }
            WriterWait::Copy => {
                let whereabouts = whereabouts(self.arrivals.as_ref()?, holders);
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
                let whereabouts = whereabouts(self.arrivals.as_ref()?, holders);
                Some(format!("an envelope {}: {whereabouts}", self.at_reader()))
            }
        }
    }
}

impl<M: Message> fmt::Debug for HubCore<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubCore")
            .field("name", &self.name)
            .field("queued", &self.queue.len())
            .field("ready", &self.queue.ready())
            .finish_non_exhaustive()
    }
}
