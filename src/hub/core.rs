//! [`HubCore`]: a hub, as its two [ends](super::ends) share it.
//!
//! It combines the [`queue`](super::queue), the [pools](super::pool) and the copies. It has no task: the writer that sends a
//! message moves it, or a task that returns an envelope for which a message was waiting. A move only enqueues work.
//! No lock of this hub is held during a move, nor while envelopes return to other hubs.
//!
//! # The way of a message
//!
//! From `send` in one operator to the next operator's `compute` on another device, a message is handed through ten types
//! in eight files: Output, Parcel, Readers, Sender, HubCore, Queue, Slot, Receiver, InputQueue, Input. Files without a
//! folder are in `hub`. Types in brackets work beside the way; the message does not pass them. While a call or a
//! future holds the message, it does so in a `DiscardOnDrop` (`sync/wakes.rs`): an `Option` that contains a panic of the
//! message's destructor.
//!
//! ```text
//!   send     Output (operator/output.rs)      makes a Parcel (parcel.rs): the message and its header, with the run's load
//!              v
//!            Readers (operator/readers.rs)    one Sender (ends.rs), the writer's end: a reference to the HubCore. With
//!              v                              several readers a [Fan] (fan.rs) forks the message for all but one of them
//!            HubCore::try_send (core.rs)      are the envelopes where the hub expects them, and is there room? Without
//!              │                              room the message stays at the output, which waits
//!              │                              Parcel::depart: [RawEnvelope]::depart commits the uses and sets the ticket
//!              │
//!              ├── nothing is to be moved ──> push as ready
//!              │
//!              │  The queue blocks its writer, none of its messages waits to be moved, and the hub is not stepped:
//!              ├── yes ──> move; if an envelope is free for each, push as ready; otherwise push, and move later
//!              └── no ───> push, then move: now, or when an envelope returns (`pump`), or in a step of a flow that runs
//!                          in steps. `Queue::begin_move` takes the message out of its slot, `Queue::end_move` puts it
//!                          back as ready, and wakes the reader. Small messages that wait are moved several at a time
//!                          (core/joined.rs)
//!
//!   move     HubCore::move_message (core.rs)  for each [RawEnvelope] (pool.rs) of the message:
//!              [Pool]::take (pool.rs)         an envelope at the reader's location. There is none: the message waits
//!              [transfer::copy]               memory/transfer.rs enqueues the copy on the hub's [Stream] of a [Backend]
//!                                             the copy's uses are committed, and the new envelope replaces the old one,
//!                                             which returns to its pool once the message is pushed or put back
//!
//!   push     Queue::push (queue.rs)           under its lock, into a Slot. If the message is ready, the reader's
//!              v                              [EndWaker] (end_waker.rs) is woken after it
//!   wait     the task of the [OperatorTask] (operator/operator_task.rs) is woken: `poll_next` (operator/run_loop/next_run.rs)
//!            polls the ports through [OperatorRuns] (operator/cx.rs), and claims what the run needs; the [RunLoop]
//!            (operator/run_loop.rs) begins the run. At an input: Input::poll_ready (operator/input.rs) ──>
//!            InputQueue::poll (operator/input_queue.rs) ──> Receiver::poll (ends.rs) ──> Queue::poll_message; then
//!            Input::claim ──> InputQueue::claim
//!              v
//!            `compute` begins
//!              v
//!   take     Input::take ──> InputQueue::take ──> HubCore::take, through the Receiver ──> Queue::take, under its lock
//!              v                              the writer's [EndWaker] is woken after it
//!            Parcel::take_ticket              the ticket goes to the port's [TakenTickets]: the operator's stream waits for
//!                                             it if the message carries no envelope. The load of the header goes to the
//!                                             [RunContext] (operator/run_context.rs)
//! ```
//!
//! Nothing waits for the copy: the memory's record of uses orders the reader's work after it. An envelope that is
//! dropped returns its memory to its pool, which calls its hub: the hub moves a message that waits for an envelope.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use smallvec::SmallVec;

use super::{
    Message,
    latest::KeptLatest,
    open_work::refused,
    parcel::{Parcel, Since},
    pool::{Pool, RawEnvelope},
    queue::{Pushed, Queue},
    view::WriterRequest,
};
use crate::{
    clock,
    device::Device,
    error::{Error, ErrorKind, Result, panic_message},
    memory::transfer,
    mutants::{self, Mutant},
    stream::{OpenSpans, Stream},
    sync::{DiscardOnDrop, discard, discard_all, logged},
    tracepoint::TracedHub,
};

mod joined;
mod view;

/// Envelopes that have been replaced, and are returned to their pools once no lock is held.
type Replaced = SmallVec<[RawEnvelope; 2]>;

/// See the [module](self). Only the hub's one [`Sender`](super::ends::Sender) sends, and only its one
/// [`Receiver`](super::ends::Receiver) takes. What each message needs comes first.
#[repr(C, align(64))]
pub(crate) struct HubCore<M: Message> {
    pub(super) queue: Queue<Parcel<M>>,
    /// Something is noted of each message that is pushed: its time, or a tracepoint.
    pub(super) is_noted: bool,
    /// Messages are taken from the queue, and nothing else is done: the latest is not kept, and nothing is traced.
    pub(super) is_plain: bool,
    /// From which point the waiting times of messages are recorded for the reader.
    pub(super) wait_time_origin: Option<Since>,
    pub(super) failed: OnceLock<Error>,
    /// The envelopes that the writer fills.
    pub(super) blank_pool: Option<Arc<Pool>>,
    /// The envelopes at the reader's location, which messages are copied to. Absent if the hub copies nothing.
    pub(super) arrival_pool: Option<Arc<Pool>>,
    /// `Some` if the hub keeps its latest message.
    pub(super) latest: Option<KeptLatest<M>>,
    pub(super) name: Arc<str>,
    pub(super) reader: Device,
    /// Its messages are forks, whose envelopes come from `arrival_pool`.
    pub(super) forks: bool,
    /// The reader takes envelopes wherever they are.
    pub(super) reads_anywhere: bool,
    /// Absent if the hub copies nothing, or from host to host.
    pub(super) copy_stream: Option<Stream>,
    /// The writer is outside the flow: an ingress or a service.
    pub(super) has_external_writer: AtomicBool,
    /// Moves are made only by `step`.
    pub(super) stepped: AtomicBool,
    /// The writer's last request.
    pub(super) writer_request: WriterRequest,
    /// Set if its messages are traced.
    pub(super) traced: Option<Box<TracedHub>>,
}

/// The result of an attempt to move a queued message.
#[derive(Default)]
struct Moved {
    /// The size of the message, if one was moved.
    bytes: Option<u64>,
    /// Another message might be ready to move.
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

impl<M: Message> HubCore<M> {
    /// A hub without envelopes.
    pub(super) fn new(name: Arc<str>, queue: Queue<Parcel<M>>, reader: Device) -> Self {
        Self {
            name,
            queue,
            is_noted: false,
            is_plain: true,
            wait_time_origin: None,
            latest: None,
            reader,
            forks: false,
            reads_anywhere: false,
            blank_pool: None,
            arrival_pool: None,
            copy_stream: None,
            has_external_writer: AtomicBool::new(false),
            stepped: AtomicBool::new(false),
            writer_request: WriterRequest::new(),
            traced: None,
            failed: OnceLock::new(),
        }
    }

    /// Sends the message in `place`, if there is room; otherwise it stays there. `origin`: the stream on which its
    /// sender works.
    #[inline]
    pub(super) fn try_send(&self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        if self.depart(place, origin)? { self.send(place) } else { Ok(()) }
    }

    /// Like [`try_send`](Self::try_send), but moves nothing: the writer sends several messages, and then calls
    /// [`pump`](Self::pump).
    pub(super) fn try_send_unmoved(&self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        if self.depart(place, origin)? {
            self.enqueue(place, discard);
        }
        Ok(())
    }

    /// Lets the message in `place` depart if there is room for it.
    #[inline]
    fn depart(&self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<bool> {
        self.check()?;
        let Some(parcel) = place else { return Ok(false) };
        self.check_places(&mut parcel.message)?;
        if !self.has_room(1) {
            return Ok(false);
        }
        parcel.depart(origin)?;
        Ok(true)
    }

    /// Sends a message that has [departed](Parcel::depart), like `try_send`. `dropped` gets the message that the hub
    /// drops for it, which may be this one. Nothing is moved.
    pub(super) fn try_send_departed(
        &self,
        place: &mut Option<Parcel<M>>,
        dropped: impl FnOnce(Parcel<M>),
    ) -> Result<()> {
        self.check()?;
        if self.has_room(1) {
            self.enqueue(place, dropped);
        }
        Ok(())
    }

    /// Like `forward`, if there is room; otherwise returns the message.
    pub(super) fn try_forward(&self, parcel: Parcel<M>) -> Result<Result<(), Parcel<M>>> {
        let mut place = DiscardOnDrop::new(parcel);
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
    pub(super) fn forward(&self, parcel: Parcel<M>) -> Result<()> {
        // Always succeeds: the reader closes after this sender.
        self.send(DiscardOnDrop::new(parcel).place())
    }

    /// Sends the message in `place`, for which the writer has found room. It stays there if the reader has ended, or if
    /// it cannot be moved to the reader.
    ///
    /// # Errors
    /// Those of the hub; that the reader has ended, if the message was lost with it.
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
        M::CARRIES_ENVELOPES && self.arrival_pool.is_some()
    }

    /// Moves the message before it is pushed, if no other message waits to be moved: it is pushed ready.
    fn move_and_send(&self, place: &mut Option<Parcel<M>>) -> Result<()> {
        let is_next =
            !self.stepped.load(Ordering::Acquire) && self.queue.when_full().blocks_writer() && self.queue.all_ready();
        let Some(parcel) = place.as_mut().filter(|_| is_next && !self.queue.reader_gone()) else {
            self.enqueue(place, discard);
            return self.pump();
        };
        self.note_time(parcel, Since::Sent);
        let mut replaced = Replaced::new();
        match self.move_message(parcel, &mut replaced) {
            MoveOutcome::Done(_) => {
                if self.push(place, true) == Pushed::NotQueued {
                    return self.check_unchanged(place, &replaced);
                }
            }
            // It is moved once an envelope returns, which might have happened since.
            MoveOutcome::Waits => {
                self.enqueue(place, discard);
                if place.is_some() {
                    return self.check_unchanged(place, &replaced);
                }
                return self.pump();
            }
            MoveOutcome::Refused(error) => {
                self.queue.count_dropped();
                place.take().into_iter().for_each(|parcel| self.drop_refused(parcel, &error));
            }
            MoveOutcome::Failed(error) => {
                if !replaced.is_empty() {
                    self.discard_unsent(place);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Called with a message that was not pushed, since the reader has ended during the move: it stays in `place` for its
    /// sender, unless some of its envelopes are the reader's by now.
    ///
    /// # Errors
    /// The reader has ended, and the message was dropped.
    #[cold]
    fn check_unchanged(&self, place: &mut Option<Parcel<M>>, replaced: &Replaced) -> Result<()> {
        if replaced.is_empty() {
            return Ok(());
        }
        self.discard_unsent(place);
        Err(self.reader_gone_error())
    }

    /// Drops a message that was moved, or moved in part, and cannot be pushed.
    fn discard_unsent(&self, place: &mut Option<Parcel<M>>) {
        self.queue.count_unsent();
        discard(place.take());
    }

    /// Pushes the message in `place` into the queue, where it might have to be [moved](Self::pump). It stays in `place`
    /// if there is no room or no reader. `dropped` gets the message that is dropped for it, which may be this one.
    #[inline]
    pub(super) fn enqueue(&self, place: &mut Option<Parcel<M>>, dropped: impl FnOnce(Parcel<M>)) {
        let moves = self.moves();
        let pushed = if self.is_noted { self.push_noted(place, !moves) } else { self.queue.push(place, !moves) };
        match pushed {
            Pushed::Evicted | Pushed::Dropped => drop(place.take().map(dropped)),
            Pushed::Queued | Pushed::NotQueued => {}
        }
    }

    #[inline]
    fn push(&self, place: &mut Option<Parcel<M>>, ready: bool) -> Pushed {
        if self.is_noted { self.push_traced(place, ready) } else { self.queue.push(place, ready) }
    }

    #[inline]
    fn push_traced(&self, place: &mut Option<Parcel<M>>, ready: bool) -> Pushed {
        let mut push = || self.queue.push(place, ready);
        let Some(traced) = &self.traced else { return push() };
        let is_outside = self.has_external_writer.load(Ordering::Relaxed);
        traced.send(is_outside, push, |pushed| matches!(pushed, Pushed::Queued | Pushed::Evicted))
    }

    #[inline(never)]
    fn push_noted(&self, place: &mut Option<Parcel<M>>, ready: bool) -> Pushed {
        if let Some(parcel) = place.as_mut().filter(|_| self.wait_time_origin.is_some()) {
            self.note_time(parcel, Since::Sent);
            if !self.moves() {
                self.note_time(parcel, Since::Arrived);
            }
        }
        self.push_traced(place, ready)
    }

    /// Moves the first message that needs it, if possible.
    fn move_one(&self) -> Result<Moved> {
        if self.failed.get().is_some() {
            // Both ends get the error at their next call. A failed move is not retried.
            return Ok(Moved::default());
        }
        let mut replaced = Replaced::new();
        let mut parcels = SmallVec::<[Parcel<M>; 1]>::new();
        self.queue.begin_move(1, &mut parcels);
        let Some(mut parcel) = parcels.pop() else { return Ok(Moved::default()) };
        // A hub that fails does so before the move ends, so that no other move begins.
        let outcome = match self.move_message(&mut parcel, &mut replaced) {
            MoveOutcome::Refused(error) => {
                self.queue.drop_moving();
                self.drop_refused(parcel, &error);
                return Ok(Moved { bytes: None, again: true });
            }
            MoveOutcome::Done(bytes) => Ok(Some(bytes)),
            MoveOutcome::Waits => Ok(None),
            MoveOutcome::Failed(error) => Err(error),
        };
        let again = self.queue.end_move([parcel], usize::from(matches!(outcome, Ok(Some(_)))), &mut parcels);
        // The messages behind it are moved even if the destructor of an orphan panics.
        discard_all(parcels);
        drop(replaced);
        outcome.map(|bytes| Moved { bytes, again })
    }

    /// Moves all envelopes of a message to the reader's location. A message's own methods may panic, and so may the
    /// destructor of another message.
    fn move_message(&self, parcel: &mut Parcel<M>, replaced: &mut Replaced) -> MoveOutcome {
        let copies = self.begin_copies(parcel);
        let moved = catch_unwind(AssertUnwindSafe(|| {
            let moved = self.move_envelopes(&mut parcel.message, replaced)?;
            Ok(moved.then(|| parcel.message.size_in_bytes() as u64))
        }));
        self.end_copies(copies);
        match moved.unwrap_or_else(|panic| Err(Error::new(ErrorKind::Panicked, panic_message(panic)))) {
            Ok(Some(bytes)) => {
                self.note_time(parcel, Since::Arrived);
                MoveOutcome::Done(bytes)
            }
            Ok(None) => MoveOutcome::Waits,
            Err(error) if self.is_of_message(&error) => MoveOutcome::Refused(error),
            Err(error) => MoveOutcome::Failed(self.fail(error)),
        }
    }

    /// Takes the first message, if it is ready, into `place`, and returns its number. `reread`: for a hub that keeps
    /// the newest, also a message that was read before.
    #[inline]
    pub(crate) fn take(&self, place: &mut Option<Parcel<M>>, reread: bool) -> Option<u64> {
        if self.is_plain { self.queue.take(place) } else { self.take_noted(place, reread) }
    }

    #[inline(never)]
    fn take_noted(&self, place: &mut Option<Parcel<M>>, reread: bool) -> Option<u64> {
        let taken = if self.latest.is_none() { self.queue.take(place) } else { self.read_latest(place, reread) };
        if let (Some(traced), Some(message)) = (&self.traced, taken) {
            traced.taken(message);
        }
        taken
    }

    #[inline(never)]
    fn read_latest(&self, place: &mut Option<Parcel<M>>, reread: bool) -> Option<u64> {
        let kept = self.latest.as_ref().filter(|_| reread || self.queue.unread() > 0)?;
        self.queue.read(place, |parcel| parcel.read_with((kept.clone)(&parcel.message)))
    }

    /// Checks that the message can be moved: where the hub copies nothing, its envelopes are at the reader's location;
    /// otherwise all that are not can be copied at once, as they must be before the message is read.
    #[inline]
    pub(super) fn check_places(&self, message: &mut M) -> Result<()> {
        if !M::CARRIES_ENVELOPES {
            return Ok(());
        }
        let Some(arrivals) = &self.arrival_pool else { return self.check_location(message) };
        // A message that is one envelope needs one to copy to, and each hub that copies has one.
        if M::IS_ENVELOPE { Ok(()) } else { self.check_count(arrivals.count(), message) }
    }

    fn check_location(&self, message: &mut M) -> Result<()> {
        let mut misplaced = None;
        message.envelopes(&mut |envelope| {
            if !envelope.memory().is_at(&self.reader) && !self.reads_anywhere {
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
            "a message has {copied} envelopes to copy, but the hub has only {most}: set `HubOptions::envelopes` to at least \
             {copied}"
        );
        Err(self.fail(Error::new(ErrorKind::Usage, text)))
    }

    /// Records that messages sent here come from outside the flow.
    pub(super) fn set_has_external_writer(&self) {
        if !self.has_external_writer.load(Ordering::Relaxed) {
            self.has_external_writer.store(true, Ordering::Relaxed);
        }
    }

    /// Whether an error of a move concerns only the message, which comes from outside, and not the hub.
    #[cold]
    fn is_of_message(&self, error: &Error) -> bool {
        let own_is_lost = || self.copy_stream.as_ref().is_some_and(|copies| copies.device().is_lost());
        self.has_external_writer.load(Ordering::Relaxed) && error.kind() != ErrorKind::Race && !own_is_lost()
    }

    /// Drops a message that cannot be moved, and reports an error to its callers.
    #[cold]
    fn drop_refused(&self, parcel: Parcel<M>, error: &Error) {
        logged(|| {
            tracing::warn!(hub = &*self.name, error = %format_args!("{error:#}"), "dropped a message from outside: it cannot be moved to its reader");
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
        let (Some(arrivals), Some(copies)) = (&self.arrival_pool, &self.copy_stream) else {
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
        if self.wait_time_origin == Some(now) && (now == Since::Arrived || parcel.since().is_none()) {
            parcel.set_since(clock::now());
        }
    }

    pub(super) fn misplaced(&self, envelope: &RawEnvelope) -> Error {
        Error::new(
            ErrorKind::Usage,
            format!(
                "a message has an envelope on {}, but its reader is on {}, and this hub copies nothing: send an envelope that \
                 is on the writer's device, such as a blank one",
                envelope.memory().location(),
                self.reader
            ),
        )
    }

    pub(crate) fn hub_name(&self) -> &str {
        &self.name
    }

    /// Marks the hub as failed. Both ends get the error at their next call.
    pub(super) fn fail(&self, error: Error) -> Error {
        let error = error.at(format!("hub `{}`", self.name));
        // Only the first failure is stored.
        let _ = self.failed.set(error.clone());
        self.queue.wake_both();
        error
    }

    /// Times the copies of a sampled message. Forks were copied before they were sent.
    #[inline]
    pub(super) fn begin_copies(&self, parcel: &mut Parcel<M>) -> Option<OpenSpans> {
        if !M::CARRIES_ENVELOPES || self.forks {
            return None;
        }
        let to_host = self.reader.is_host();
        parcel
            .journey()
            .zip(self.copy_stream.as_ref())
            .and_then(|(journey, copies)| journey.begin_copies(copies, to_host))
    }

    /// Times the copies for a fork of a sampled message.
    #[inline]
    pub(super) fn begin_other_copies(&self, parcel: &mut Parcel<M>) -> Option<OpenSpans> {
        if !M::CARRIES_ENVELOPES {
            return None;
        }
        let to_host = self.reader.is_host();
        parcel
            .journey()
            .zip(self.copy_stream.as_ref())
            .and_then(|(journey, copies)| journey.begin_other_copies(copies, to_host))
    }

    #[inline]
    pub(super) fn end_copies(&self, open: Option<OpenSpans>) {
        if let Some(copies) = self.copy_stream.as_ref().filter(|_| open.is_some()) {
            copies.end_run();
        }
    }

    /// Moves all envelopes of a message to the reader's location. Returns false if there are too few envelopes to
    /// copy to.
    fn move_envelopes(&self, message: &mut M, replaced: &mut Replaced) -> Result<bool> {
        let mut outcome = Ok(true);
        message.envelopes(&mut |envelope| {
            if matches!(outcome, Ok(true)) {
                outcome = self.move_envelope(envelope, replaced);
            }
        });
        outcome
    }

    fn move_envelope(&self, envelope: &mut RawEnvelope, replaced: &mut Replaced) -> Result<bool> {
        if envelope.memory().is_at(&self.reader) {
            return Ok(true);
        }
        if self.has_external_writer.load(Ordering::Relaxed) {
            // Its device might have been lost since it was sent.
            self.accepts_one(envelope)?;
        }
        let (Some(arrivals), Some(copies)) = (&self.arrival_pool, &self.copy_stream) else {
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
    pub(crate) fn has_ended(&self) -> bool {
        // A hub that keeps the latest message reports its end to its `EndTogether` even if it never had a message.
        self.queue.has_ended() && self.latest.as_ref().is_none_or(|kept| kept.ends() || self.queue.len() == 0)
    }

    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.failed.get().is_some()
    }

    /// Whether the queue has room for this many messages, or drops messages instead.
    #[inline]
    pub(super) fn has_room(&self, messages: usize) -> bool {
        self.queue.has_room(messages)
    }

    pub(crate) fn reader_gone(&self) -> bool {
        self.queue.reader_gone()
    }

    #[cold]
    pub(crate) fn reader_gone_error(&self) -> Error {
        Error::reader_gone(format!("the reader of hub `{}` has ended", self.name))
    }

    /// Records what the writer requests from now on, so that a stall can be explained.
    #[inline]
    pub(super) fn request(&self, messages: usize, envelopes: usize) {
        self.writer_request.note(messages, envelopes);
    }

    /// The hub's error, if it has failed.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some(error) => cloned(error),
        }
    }
}

#[cold]
fn cloned(error: &Error) -> Result<()> {
    Err(error.clone())
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
