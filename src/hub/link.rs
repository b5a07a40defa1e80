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
    baggage::{Parcel, Since},
    envelope::RawEnvelope,
    pool::Pool,
    queue::{Counts, Full, Queue},
    ready_tickets::ReadyTickets,
    receiver::Receiver,
    sender::Sender,
    settle::refused,
};
use crate::{
    clock,
    device::{Device, human},
    error::{Error, ErrorKind, Result, panic_message},
    memory::transfer,
    mutants::{self, Mutant},
    stream::{CompletionMode, Stream, Ticket},
    sync::{Mutex, discard, lock, logged},
};

/// Envelopes that have been replaced, and are returned to their pools once no lock is held.
type Replaced = SmallVec<[RawEnvelope; 2]>;

/// What a hub is made from, once the flow is known completely.
#[derive(Clone, Debug)]
pub(crate) struct HubPlan {
    pub(crate) name: Arc<str>,
    pub(crate) capacity: usize,
    pub(crate) full: Full,
    /// The hubs of one reader that end together, if one of them keeps the latest message and this is one of them.
    pub(crate) ends_with: Option<Arc<EndTogether>>,
    pub(crate) envelopes: usize,
    /// For blank envelopes on the writer's side.
    pub(crate) writer_bytes: Option<usize>,
    /// For copies on the reader's side: set if the reader is at another location, or if the writer forks for it.
    pub(crate) reader_bytes: Option<usize>,
    /// This hub gets a fork, while another hub of the same output gets the message itself.
    pub(crate) forks: bool,
    pub(crate) writer: Device,
    pub(crate) reader: Device,
    /// Host memory is page-locked for this device.
    pub(crate) near: Device,
    /// The completion mode of the copy stream.
    pub(crate) mode: CompletionMode,
    /// The priority of the copy stream: that of the more urgent of the two operators.
    pub(crate) priority: i32,
    /// From which point the waiting times of messages are recorded for the reader.
    pub(crate) times: Option<Since>,
    /// The hub moves messages only when it is stepped.
    pub(crate) stepped: bool,
    /// The hub is made in a capture, and its writer works on this stream of the capture.
    pub(crate) captured: Option<Stream>,
}

pub(super) struct HubCore<M: Message> {
    pub(super) name: Arc<str>,
    pub(super) queue: Queue<Parcel<M>>,
    /// From which point the waiting times of messages are recorded for the reader.
    pub(super) times: Option<Since>,
    /// Present where the latest message is kept.
    pub(super) again: Option<Again<M>>,
    pub(super) stamps: ReadyTickets,
    pub(super) reader: Device,
    /// Messages that are sent here are forks, whose envelopes come from `arrivals`.
    pub(super) forks: bool,
    pub(super) blanks: Option<Arc<Pool>>,
    pub(super) arrivals: Option<Arc<Pool>>,
    pub(super) copies: Option<Stream>,
    /// Messages come from outside the flow.
    outside: AtomicBool,
    /// Moves are made only by `step`.
    stepped: AtomicBool,
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

#[derive(Default)]
struct Moved {
    /// The size of the message, if one was moved.
    bytes: Option<u64>,
    /// There may be more to move.
    again: bool,
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
    queues: Mutex<Vec<Weak<dyn HubState>>>,
}

impl EndTogether {
    /// `count`: the number of hubs that keep the latest message.
    pub(crate) fn new(count: usize) -> Self {
        Self { open: count.into(), ..Self::default() }
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
    /// Called when the writer has ended and the last message was read. Returns true if the reader ends, too.
    pub(super) fn ends(&self) -> bool {
        let Some(all) = &self.ends_with else { return false };
        if !self.over.swap(true, Ordering::AcqRel) {
            all.open.fetch_sub(1, Ordering::AcqRel);
        }
        all.is_over()
    }
}

/// What a hub's writer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriterWait {
    /// For the reader to take a message.
    Room,
    /// For the return of an envelope to fill.
    Blank,
    /// For the return of an envelope that a fork is copied to.
    Copy,
}

/// What a hub's reader waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReaderWait {
    /// For the writer to send a message.
    Message,
    /// For the return of an envelope that a message is copied to.
    Envelope,
    /// For the hub to move a message: it is stepped, or about to move one.
    Move,
}

/// A flow's view of a hub, independent of the message type.
pub(crate) trait HubState: Send + Sync {
    /// The number of queued messages that were not read.
    fn queued(&self) -> usize;
    /// Whether its newest message stays and may be read again.
    fn keeps_latest(&self) -> bool;
    /// What has become of the messages that are no longer queued.
    fn counts(&self) -> Counts;
    /// The last copy that was enqueued.
    fn last_copy(&self) -> Option<Ticket>;
    /// For a hub that is stepped: moves one message, if possible, and returns its size in bytes.
    fn step(&self) -> Result<Option<u64>>;
    /// Ends stepping: from now on the hub moves messages by itself.
    fn go_on(&self);
    /// Whether nothing can be taken, and nothing will be added.
    fn has_ended(&self) -> bool;
    fn name(&self) -> &Arc<str>;
    /// The number of envelopes of `pool` in its queue.
    fn holds(&self, pool: &Arc<Pool>) -> usize;
    /// What the writer waits for, if it cannot send.
    fn writer_waits(&self) -> Option<WriterWait>;
    /// What the reader waits for, if it cannot take. `in_run`: a kept message that the reader has already read does
    /// not count as a message.
    fn reader_waits(&self, in_run: bool) -> Option<ReaderWait>;
    fn carries_envelopes(&self) -> bool;
    /// Whether the reader gets copies of these envelopes.
    fn copies(&self) -> bool;
    /// A description of what the writer waits for.
    fn writer_lacks(&self, holders: &dyn EnvelopeHolders) -> Option<String>;
    /// A description of what the reader waits for.
    fn reader_lacks(&self, in_run: bool, holders: &dyn EnvelopeHolders) -> Option<String>;
}

/// The places where a flow's envelopes may be, for descriptions.
pub(crate) trait EnvelopeHolders {
    /// Calls `show` with all hubs of the flow.
    fn each_hub(&self, show: &mut dyn FnMut(&dyn HubState));
    /// The operators that may keep envelopes of the hub of this name.
    fn keepers(&self, hub: &str) -> Vec<String>;
}

/// No places are known.
impl EnvelopeHolders for () {
    fn each_hub(&self, _show: &mut dyn FnMut(&dyn HubState)) {}

    fn keepers(&self, _hub: &str) -> Vec<String> {
        Vec::new()
    }
}

/// The two ends of a hub, and a flow's view of it.
pub(crate) type HubEnds<M> = (Sender<M>, Receiver<M>, Arc<dyn HubState>);

/// Makes a hub: allocates its envelopes and its copy stream. `again`: copies a message that is read and stays.
pub(crate) fn link<M: Message>(plan: HubPlan, again: Option<AgainFn<M>>) -> Result<HubEnds<M>> {
    let name = &plan.name;
    let copier = if plan.reader.is_host() { &plan.writer } else { &plan.reader };
    let copies = || match (plan.reader_bytes, plan.captured.as_ref().and_then(Stream::capture)) {
        // Copies from host to host need no stream.
        (None, _) => Ok(None),
        _ if copier.is_host() => Ok(None),
        (_, Some(capture)) => capture.stream(&format!("copies of {name}"), Default::default()).map(Some),
        (_, None) => {
            let stream = Stream::with_priority(copier, format!("copies of {name}"), plan.priority)?;
            stream.set_completion_mode(plan.mode);
            Ok(Some(stream))
        }
    };
    let captured = if plan.captured.is_some() { copies()? } else { None };
    let pool = |bytes: Option<usize>, at: &Device, captured: &Option<Stream>| -> Result<Option<Arc<Pool>>> {
        let Some(bytes) = bytes else { return Ok(None) };
        if let Some(stream) = captured {
            return Ok(Some(Pool::captured(name, bytes, stream)));
        }
        let made = Pool::new(name, plan.envelopes, bytes, at, &plan.near);
        made.map(Some).map_err(|error| {
            let place = if at.is_host() { "the host" } else { at.name() };
            let size = human::bytes(bytes as u64);
            error.at(format!("hub `{name}` needs {} envelopes of {size} on {place}", plan.envelopes))
        })
    };
    // Device memory first: there is less of it, so a failure is found sooner.
    let (blanks, arrivals) = if plan.writer.is_host() {
        let arrivals = pool(plan.reader_bytes, &plan.reader, &captured)?;
        (pool(plan.writer_bytes, &plan.writer, &plan.captured)?, arrivals)
    } else {
        let blanks = pool(plan.writer_bytes, &plan.writer, &plan.captured)?;
        (blanks, pool(plan.reader_bytes, &plan.reader, &captured)?)
    };
    let copies = if plan.captured.is_some() { captured } else { copies()? };
    let queues = plan.ends_with.clone().filter(|_| again.is_none());
    let link = Arc::new(HubCore {
        name: name.clone(),
        queue: Queue::new(plan.capacity, plan.full),
        times: plan.times,
        again: again.map(|copy| Again { copy, ends_with: plan.ends_with, over: AtomicBool::new(false) }),
        stamps: ReadyTickets::default(),
        forks: plan.forks,
        reader: plan.reader,
        blanks,
        arrivals,
        copies,
        outside: AtomicBool::new(false),
        stepped: AtomicBool::new(plan.stepped),
        asked: WriterRequest::new(),
        failed: OnceLock::new(),
    });
    if let Some(all) = queues {
        let state: Arc<dyn HubState> = link.clone();
        lock(&all.queues).push(Arc::downgrade(&state));
    }
    if let Some(pool) = &link.blanks {
        let link = Arc::downgrade(&link);
        pool.listen(Box::new(move || {
            if let Some(link) = link.upgrade() {
                link.queue.wake_writer();
            }
        }));
    }
    if let Some(pool) = &link.arrivals {
        let link = Arc::downgrade(&link);
        pool.listen(Box::new(move || {
            if let Some(link) = link.upgrade().filter(|_| !mutants::is(Mutant::LostWake)) {
                // An error is stored for both ends.
                let _ = link.pump();
                if link.forks {
                    link.queue.wake_writer();
                }
            }
        }));
    }
    Ok((Sender::new(link.clone()), Receiver::new(link.clone()), link))
}

/// A hub without a limit, at one location, for messages that were taken from the hub of that name.
pub(crate) fn private<M: Message>(name: &str) -> (Sender<M>, Receiver<M>) {
    let link = Arc::new(HubCore {
        name: name.into(),
        queue: Queue::new(usize::MAX, Full::Hold),
        times: None,
        again: None,
        stamps: ReadyTickets::default(),
        reader: Device::host(),
        forks: false,
        blanks: None,
        arrivals: None,
        copies: None,
        outside: AtomicBool::new(false),
        stepped: AtomicBool::new(false),
        asked: WriterRequest::new(),
        failed: OnceLock::new(),
    });
    (Sender::new(link.clone()), Receiver::new(link))
}

impl<M: Message> HubCore<M> {
    /// Moves every message that can be moved.
    pub(super) fn pump(&self) -> Result<()> {
        if self.stepped.load(Ordering::Acquire) {
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
        let Some(mut message) = self.queue.begin_move() else { return Ok(Moved::default()) };
        // A message's own methods may panic, and so may the destructor of another message: the message is put back
        // into its slot.
        let brought = catch_unwind(AssertUnwindSafe(|| {
            let moved = self.bring(&mut message.message, &mut replaced)?;
            Ok(moved.then(|| message.message.size_in_bytes() as u64))
        }));
        let outcome = brought.unwrap_or_else(|panic| Err(Error::new(ErrorKind::Panicked, panic_message(panic))));
        let moved = matches!(outcome, Ok(Some(_)));
        if moved {
            self.note_time(&mut message, Since::Arrived);
        }
        let outcome = match outcome {
            Err(error) if self.is_of_message(&error) => {
                self.refuse(message, &error);
                drop(replaced);
                return Ok(Moved { bytes: None, again: true });
            }
            outcome => outcome,
        };
        // Before the move ends, so that no other move begins.
        let outcome = outcome.map_err(|error| self.fail(error));
        let (orphan, again) = self.queue.end_move(message, moved);
        // The messages behind it are moved even if its destructor panics.
        discard(orphan);
        drop(replaced);
        outcome.map(|bytes| Moved { bytes, again })
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

    /// Drops the message that is being moved, since it cannot be, and reports an error to its callers.
    #[cold]
    fn refuse(&self, message: Parcel<M>, error: &Error) {
        if let Some(number) = self.queue.drop_moving() {
            self.stamps.forget(number);
        }
        logged(|| {
            tracing::warn!(hub = &*self.name, %error, "dropped a message from outside: it cannot be moved to its reader");
        });
        let Parcel { message, baggage } = message;
        if let Some(baggage) = baggage {
            baggage.load.reply.fail(error.for_caller("the message was lost on its way into the flow"));
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
        if self.times == Some(now) {
            parcel.baggage.get_or_insert_default().since = Some(clock::now());
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
        let _ = self.failed.set(error.again());
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
            return Err(Error::new(ErrorKind::Usage, super::too_small(envelope.bytes(), arrivals.bytes())));
        }
        let Some(mut arrival) = arrivals.take()? else { return Ok(false) };
        arrival.replace_in_message(envelope);
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
    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.again()))
    }
}

impl<M: Message> HubState for HubCore<M> {
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
        let forks = self.forks && self.queue.full() == Full::Hold;
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
                    1 => format!("room in hub `{name}`: all {all} places are taken"),
                    _ => format!("room for {messages} messages in hub `{name}`: {taken} of its {all} places are taken"),
                })
            }
            WriterWait::Blank => {
                let whereabouts = self.blanks.as_ref()?.whereabouts(holders);
                Some(format!("{}: {whereabouts}", what("a blank envelope", "blank envelopes")))
            }
            WriterWait::Copy => {
                let whereabouts = self.arrivals.as_ref()?.whereabouts(holders);
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
                let whereabouts = self.arrivals.as_ref()?.whereabouts(holders);
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
