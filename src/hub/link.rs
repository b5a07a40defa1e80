//! The two ends of a hub, and what happens in between.
//!
//! [`Link`] puts the [`queue`](super::queue), the [pools](super::pool) and the copies together. Nobody runs it: whoever
//! sends a message, or gives back an envelope that a message was waiting for, moves what can be moved. A move only
//! enqueues; no lock of this hub is held while it does, nor while envelopes go home to other hubs.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Waker,
};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Copier, Message,
    baggage::{Parcel, Since},
    envelope::RawEnvelope,
    pool::Pool,
    queue::{Answer, Queue},
    stamps::Stamps,
};
use crate::{
    device::{Device, human},
    error::{Error, ErrorKind, Result},
    memory::transfer,
    stream::{CompletionMode, Stream, Ticket},
};

/// Envelopes that have been replaced and go home once no lock is held.
type Replaced = SmallVec<[RawEnvelope; 2]>;

/// What a hub is made from, once everything is known.
#[derive(Debug)]
pub(crate) struct LinkPlan {
    pub(crate) name: Arc<str>,
    pub(crate) capacity: usize,
    pub(crate) envelopes: usize,
    /// For blanks on the writer's side.
    pub(crate) writer_bytes: Option<usize>,
    /// For copies on the reader's side: if it is elsewhere, or if the writer forks for it.
    pub(crate) reader_bytes: Option<usize>,
    /// Another hub of the same output gets the message itself, and this one gets a fork.
    pub(crate) forks: bool,
    pub(crate) writer: Device,
    pub(crate) reader: Device,
    /// Host memory is page-locked for this device.
    pub(crate) near: Device,
    /// Of the copies' stream.
    pub(crate) mode: CompletionMode,
    /// Of the copies' stream: that of the more urgent of the two operators.
    pub(crate) priority: i32,
    /// Since when messages wait is written down for the reader.
    pub(crate) times: Option<Since>,
}

/// A hub at work.
struct Link<M: Message> {
    name: Arc<str>,
    queue: Queue<Parcel<M>>,
    /// Since when messages wait is written down for the reader.
    times: Option<Since>,
    stamps: Stamps,
    reader: Device,
    /// The reader is where the writer is.
    together: bool,
    /// What is sent here is a fork, whose envelopes come from `arrivals`.
    forks: AtomicBool,
    blanks: Option<Arc<Pool>>,
    arrivals: Option<Arc<Pool>>,
    copies: Option<Stream>,
    failed: OnceLock<Error>,
    untaken: AtomicUsize,
}

/// The writer's end. Dropping it ends the reader, after what lies in the queue.
pub(crate) struct Sender<M: Message> {
    link: Arc<Link<M>>,
    /// Messages.
    sent: u64,
}

/// The reader's end. Dropping it hands back what was never taken.
pub(crate) struct Receiver<M: Message>(Arc<Link<M>>);

/// What a flow asks of a hub, whatever its messages are.
pub(crate) trait HubState: Send + Sync {
    /// Messages in the queue.
    fn queued(&self) -> usize;
    /// Messages that the reader left when it ended.
    fn untaken(&self) -> usize;
    /// The last copy that was enqueued.
    fn last_copy(&self) -> Option<Ticket>;
    /// Its name.
    fn name(&self) -> &Arc<str>;
    /// How many envelopes of a pool lie in its queue.
    fn holds(&self, pool: &Arc<Pool>) -> usize;
    /// What the writer waits for, if it cannot send; `hubs` are all of the flow's.
    fn writer_lacks(&self, hubs: &mut dyn Iterator<Item = &dyn HubState>) -> Option<String>;
    /// What the reader waits for, if it cannot take.
    fn reader_lacks(&self, hubs: &mut dyn Iterator<Item = &dyn HubState>) -> Option<String>;
}

/// The two ends of a hub, and what a flow sees of it.
pub(crate) type Ends<M> = (Sender<M>, Receiver<M>, Arc<dyn HubState>);

/// Makes a hub: allocates its envelopes and its copy stream.
pub(crate) fn link<M: Message>(plan: LinkPlan) -> Result<Ends<M>> {
    let name = &plan.name;
    let pool = |bytes: Option<usize>, at: &Device| -> Result<Option<Arc<Pool>>> {
        let Some(bytes) = bytes else { return Ok(None) };
        let made = Pool::new(name, plan.envelopes, bytes, at, &plan.near);
        made.map(Some).map_err(|error| {
            let place = if at.is_host() { "the host" } else { at.name() };
            let size = human::bytes(bytes as u64);
            error.at(format!("hub `{name}` needs {} envelopes of {size} on {place}", plan.envelopes))
        })
    };
    // A device's first: it has less, and says so sooner.
    let (blanks, arrivals) = if plan.writer.is_host() {
        let arrivals = pool(plan.reader_bytes, &plan.reader)?;
        (pool(plan.writer_bytes, &plan.writer)?, arrivals)
    } else {
        (pool(plan.writer_bytes, &plan.writer)?, pool(plan.reader_bytes, &plan.reader)?)
    };
    let copier = if plan.reader.is_host() { &plan.writer } else { &plan.reader };
    let copies = match &arrivals {
        // The host copies within itself.
        Some(_) if !copier.is_host() => {
            let stream = Stream::with_priority(copier, format!("copies of {name}"), plan.priority)?;
            stream.set_completion_mode(plan.mode);
            Some(stream)
        }
        _ => None,
    };
    let link = Arc::new(Link {
        name: name.clone(),
        queue: Queue::new(plan.capacity),
        times: plan.times,
        stamps: Stamps::default(),
        together: plan.reader == plan.writer,
        forks: AtomicBool::new(plan.forks),
        reader: plan.reader,
        blanks,
        arrivals,
        copies,
        failed: OnceLock::new(),
        untaken: AtomicUsize::new(0),
    });
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
            if let Some(link) = link.upgrade() {
                // An error is kept for both ends.
                let _ = link.pump();
                if link.forks.load(Ordering::Relaxed) {
                    link.queue.wake_writer();
                }
            }
        }));
    }
    Ok((Sender { link: link.clone(), sent: 0 }, Receiver(link.clone()), link))
}

/// A hub without a limit, within one place, for messages that have come through the hub of that name.
pub(crate) fn private<M: Message>(name: &str) -> (Sender<M>, Receiver<M>) {
    let link = Arc::new(Link {
        name: name.into(),
        queue: Queue::new(usize::MAX),
        times: None,
        stamps: Stamps::default(),
        reader: Device::host(),
        together: true,
        forks: AtomicBool::new(false),
        blanks: None,
        arrivals: None,
        copies: None,
        failed: OnceLock::new(),
        untaken: AtomicUsize::new(0),
    });
    (Sender { link: link.clone(), sent: 0 }, Receiver(link))
}

impl<M: Message> Link<M> {
    /// Moves every message that can be moved.
    fn pump(&self) -> Result<()> {
        let mut replaced = Replaced::new();
        while let Some(mut message) = self.queue.begin_move() {
            let outcome = self.bring(&mut message.message, &mut replaced);
            if matches!(outcome, Ok(true)) {
                self.note_time(&mut message, Since::Arrived);
            }
            let (orphan, again) = self.queue.end_move(message, matches!(outcome, Ok(true)));
            self.untaken.fetch_add(usize::from(orphan.is_some()), Ordering::Relaxed);
            drop(orphan);
            replaced.clear();
            if let Err(error) = outcome {
                return Err(self.fail(error));
            }
            if !again {
                break;
            }
        }
        Ok(())
    }

    #[inline]
    fn note_time(&self, parcel: &mut Parcel<M>, now: Since) {
        if self.times == Some(now) {
            parcel.baggage.get_or_insert_default().since = Some(Instant::now());
        }
    }

    fn misplaced(&self, envelope: &RawEnvelope) -> Error {
        Error::new(
            ErrorKind::Usage,
            format!(
                "an envelope on {} was sent, but the hub has none on {} to copy it to: its writer was expected to make \
                 its envelopes where it runs",
                envelope.memory().location(),
                self.reader
            ),
        )
    }

    /// Nothing passes any more.
    fn fail(&self, error: Error) -> Error {
        let error = error.at(format!("hub `{}`", self.name));
        // The first failure stays.
        let _ = self.failed.set(error.again());
        self.queue.wake_both();
        error
    }

    /// Brings all envelopes of a message to where the reader is. False if one lacks an envelope to be copied to.
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
        let (Some(arrivals), Some(copies)) = (&self.arrivals, &self.copies) else {
            return Err(self.misplaced(envelope));
        };
        if envelope.bytes() > arrivals.bytes() {
            return Err(Error::new(ErrorKind::Usage, super::too_small(envelope.bytes(), arrivals.bytes())));
        }
        let Some(mut arrival) = arrivals.take() else { return Ok(false) };
        arrival.relieve(envelope);
        transfer::copy(copies, envelope.memory(), arrival.memory_mut(), envelope.bytes())?;
        // Marked now: whoever waits for it waits for this copy and for none after it.
        arrival.memory_mut().commit()?;
        replaced.push(std::mem::replace(envelope, arrival));
        Ok(true)
    }

    /// `on cuda:0`
    fn at_reader(&self) -> String {
        format!("on {}", if self.reader.is_host() { "the host" } else { self.reader.name() })
    }

    #[inline]
    fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.again()))
    }
}

/// A message leaves its sender, which works on the stream `origin`: what was done to it is marked, for whoever comes after
/// that elsewhere. True if its envelopes carry that.
#[inline]
pub(super) fn depart<M: Message>(message: &mut M, origin: Option<&Stream>) -> Result<bool> {
    let (mut ready, mut stamped) = (Ok(()), false);
    for name in M::EVENTS {
        message.events(name, &mut |ticket| {
            if ready.is_ok() {
                ready = ticket.commit();
            }
        });
    }
    if M::CARRIES_ENVELOPES {
        message.envelopes(&mut |envelope| {
            stamped = true;
            if ready.is_ok() {
                ready = envelope.depart(origin);
            }
        });
    }
    ready.map(|()| stamped)
}

/// The stamp of a message without envelopes that is sent now.
pub(super) fn stamp_of(origin: &Stream) -> Result<Ticket> {
    let mut stamp = origin.ticket();
    stamp.commit()?;
    Ok(stamp)
}

impl<M: Message> Sender<M> {
    /// Room in the queue, and a blank envelope where the hub has such?
    #[inline]
    pub(crate) fn poll_room(&self, waker: &Waker) -> Answer {
        let link = &*self.link;
        if link.failed.get().is_some() {
            return Answer::Yes;
        }
        match link.queue.poll_room(waker) {
            Answer::Yes => self.poll_blank(waker),
            other => self.unless_failed(other),
        }
    }

    /// Room in the queue for so many, and blank envelopes where the hub has such?
    pub(crate) fn poll_room_for(&self, messages: usize, waker: &Waker) -> Answer {
        self.poll_until(waker, || self.has_room(messages) && self.has_blanks(messages))
    }

    /// Room in the queue for so many?
    pub(crate) fn poll_places(&self, messages: usize, waker: &Waker) -> Answer {
        self.poll_until(waker, || self.has_room(messages))
    }

    fn poll_until(&self, waker: &Waker, is_there: impl Fn() -> bool) -> Answer {
        let ask = || match () {
            () if self.link.failed.get().is_some() => Answer::Yes,
            () if self.reader_gone() => Answer::Never,
            () if is_there() => Answer::Yes,
            () => Answer::Wait,
        };
        match ask() {
            Answer::Wait => {
                // Asked again: it may have come before the waker was kept.
                self.watch(waker);
                ask()
            }
            answer => answer,
        }
    }

    /// As `poll_room`, of a writer that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_room(&self, waker: &Waker) -> Answer {
        let link = &*self.link;
        if link.blanks.is_some() || link.failed.get().is_some() {
            return self.poll_room(waker);
        }
        self.unless_failed(link.queue.look_for_room(waker))
    }

    /// Room in the queue?
    #[inline]
    pub(crate) fn poll_queue(&self, waker: &Waker) -> Answer {
        if self.link.failed.get().is_some() {
            return Answer::Yes;
        }
        self.unless_failed(self.link.queue.poll_room(waker))
    }

    /// It may have failed before the waker was kept: then nobody wakes it.
    #[inline]
    fn unless_failed(&self, answer: Answer) -> Answer {
        if answer == Answer::Wait && self.link.failed.get().is_some() { Answer::Yes } else { answer }
    }

    /// A blank envelope, where the hub has such?
    #[inline]
    pub(crate) fn poll_blank(&self, waker: &Waker) -> Answer {
        let link = &*self.link;
        let Some(blanks) = &link.blanks else { return Answer::Yes };
        if blanks.has(1) || link.failed.get().is_some() {
            return Answer::Yes;
        }
        link.queue.keep_writer(waker);
        if link.queue.reader_gone() {
            return Answer::Never;
        }
        // Asked again: one may have come home before the waker was kept.
        if blanks.has(1) { Answer::Yes } else { self.unless_failed(Answer::Wait) }
    }

    /// A blank envelope, if there is one; an error if the hub has none at all.
    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.check()?;
        match &self.link.blanks {
            Some(blanks) => Ok(blanks.take()),
            None => self.blanks().map(|_| None),
        }
    }

    /// The blank envelopes, or why there are none.
    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        self.link.blanks.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!(
                    "hub `{}` has no blank envelopes: say how large they are, with `#[output(envelope_bytes = ..)]` or \
                     `Hub::envelope_bytes`",
                    self.link.name
                ),
            )
        })
    }

    /// Sends, if there is room; otherwise the message comes back. `origin`: the stream that it carries.
    pub(crate) fn try_send(&mut self, mut parcel: Parcel<M>, origin: Option<&Stream>) -> Result<Result<(), Parcel<M>>> {
        self.check()?;
        let stamped = depart(&mut parcel.message, origin)?;
        self.check_places(&mut parcel.message)?;
        if !self.has_room(1) {
            return Ok(Err(parcel));
        }
        let stamp = origin.filter(|_| !stamped).map(stamp_of).transpose()?;
        self.push(parcel, stamp)
    }

    /// Puts a message that has departed into the queue; it comes back if there is no room or no reader.
    pub(super) fn push(&mut self, mut parcel: Parcel<M>, stamp: Option<Ticket>) -> Result<Result<(), Parcel<M>>> {
        let (link, count) = (&*self.link, self.sent + 1);
        let stamped = stamp.is_some();
        if let Some(stamp) = stamp {
            link.stamps.put(count, stamp);
        }
        // Where nothing is ever moved, it can be taken at once.
        let moves = M::CARRIES_ENVELOPES && link.arrivals.is_some();
        link.note_time(&mut parcel, Since::Sent);
        if !moves {
            link.note_time(&mut parcel, Since::Arrived);
        }
        match link.queue.push(parcel, !moves) {
            Ok(()) => self.sent = count,
            Err(parcel) => {
                if stamped {
                    link.stamps.take_back(count);
                }
                return Ok(Err(parcel));
            }
        }
        if moves {
            link.pump()?;
        }
        Ok(Ok(()))
    }

    /// As `hand_on`, if there is room; otherwise it comes back with its stamp.
    pub(crate) fn try_hand_on(
        &mut self,
        mut parcel: Parcel<M>,
        stamp: Option<Ticket>,
    ) -> Result<Result<(), (Parcel<M>, Option<Ticket>)>> {
        self.check()?;
        self.check_places(&mut parcel.message)?;
        if !self.has_room(1) {
            return Ok(Err((parcel, stamp)));
        }
        let sent = self.push(parcel, stamp.clone())?;
        Ok(sent.map_err(|parcel| (parcel, stamp)))
    }

    /// Puts a message that came out of another hub into this one, which is always there for it.
    pub(crate) fn hand_on(&mut self, parcel: Parcel<M>, stamp: Option<Ticket>) -> Result<()> {
        // Its reader ends after it.
        self.push(parcel, stamp).map(drop)
    }

    /// Where nothing is copied, every envelope is where the reader is.
    pub(super) fn check_places(&self, message: &mut M) -> Result<()> {
        let link = &*self.link;
        if !M::CARRIES_ENVELOPES || link.arrivals.is_some() {
            return Ok(());
        }
        let mut misplaced = None;
        message.envelopes(&mut |envelope| {
            if !envelope.memory().is_at(&link.reader) {
                misplaced.get_or_insert_with(|| link.misplaced(envelope));
            }
        });
        misplaced.map_or(Ok(()), |error| Err(link.fail(error)))
    }

    /// What went wrong on the way, if something did.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        self.link.check()
    }

    /// Room in the queue for so many?
    #[inline]
    pub(super) fn has_room(&self, messages: usize) -> bool {
        self.link.queue.len() + messages <= self.link.queue.capacity()
    }

    /// So many blank envelopes, where the hub has such?
    pub(super) fn has_blanks(&self, count: usize) -> bool {
        self.link.blanks.as_ref().is_none_or(|blanks| blanks.has(count))
    }

    /// The envelopes that forks are copied to.
    pub(super) fn arrivals(&self) -> Option<&Arc<Pool>> {
        self.link.arrivals.as_ref()
    }

    /// Makes the copies of a fork's envelopes.
    pub(super) fn copier(&self) -> Copier<'_> {
        let link = &*self.link;
        Copier::new(&link.name, link.arrivals.as_ref(), link.copies.as_ref())
    }

    /// Whether what is sent here are forks.
    pub(super) fn forks(&self) -> bool {
        self.link.forks.load(Ordering::Relaxed)
    }

    /// From now on it is sent the messages themselves.
    pub(super) fn forks_no_more(&self) {
        self.link.forks.store(false, Ordering::Relaxed);
    }

    /// Whether the reader is where the writer is.
    pub(super) fn is_together(&self) -> bool {
        self.link.together
    }

    /// Keeps the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.link.queue.keep_writer(waker);
    }

    pub(crate) fn reader_gone(&self) -> bool {
        self.link.queue.reader_gone()
    }

    pub(crate) fn hub(&self) -> &str {
        &self.link.name
    }
}

impl<M: Message> Receiver<M> {
    /// A message to take?
    #[inline]
    pub(crate) fn poll_message(&self, waker: &Waker) -> Answer {
        if self.0.failed.get().is_some() {
            return Answer::Yes;
        }
        match self.0.queue.poll_message(waker) {
            // Asked again: it may have failed before the waker was kept.
            Answer::Wait if self.0.failed.get().is_some() => Answer::Yes,
            other => other,
        }
    }

    /// So many messages to take? If not, why not; once the writer is gone there are no more than are there.
    pub(crate) fn poll_messages(&self, count: usize, waker: &Waker) -> Answer {
        let link = &*self.0;
        let asked = || {
            if link.failed.get().is_some() || link.queue.ready() >= count {
                Answer::Yes
            } else if link.queue.writer_gone() && link.queue.len() < count {
                Answer::Never
            } else {
                Answer::Wait
            }
        };
        if asked() != Answer::Wait {
            return asked();
        }
        link.queue.keep_reader(waker);
        asked()
    }

    /// Since when the first message has waited, if that is written down.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.0.times?;
        self.0.queue.peek(0, |parcel| parcel.baggage.as_ref().and_then(|baggage| baggage.since)).flatten()
    }

    /// As `poll_message`, of a reader that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_message(&self, waker: &Waker) -> Answer {
        let link = &*self.0;
        if link.failed.get().is_some() {
            return Answer::Yes;
        }
        match link.queue.look_for_message(waker) {
            // As in `poll_message`.
            Answer::Wait if link.failed.get().is_some() => Answer::Yes,
            other => other,
        }
    }

    /// Takes the first message, if it is there.
    #[inline]
    pub(crate) fn take(&self) -> Result<Option<Parcel<M>>> {
        let link = &*self.0;
        link.check()?;
        Ok(link.queue.take())
    }

    /// Keeps the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.0.queue.keep_reader(waker);
    }

    /// Shows the message at `at`, if it can be taken. `look` sends and takes nothing here.
    pub(crate) fn peek<R>(&self, at: usize, look: impl FnOnce(&mut M) -> R) -> Option<R> {
        self.0.queue.peek(at, |parcel| look(&mut parcel.message))
    }

    /// Drops the first message, which is of no use to anybody, and counts it as one that nobody took.
    pub(crate) fn discard(&self) {
        if self.0.queue.take().is_some() {
            self.0.untaken.fetch_add(1, Ordering::Relaxed);
            self.0.stamps.discard();
        }
    }

    /// The stamp of a message that was taken, the reader's `count`th. Asked once.
    #[inline]
    pub(crate) fn stamp(&self, message: &mut M, count: u64) -> Option<Ticket> {
        let mut last: Option<Ticket> = None;
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| {
                let stamp = envelope.take_stamp();
                if last.as_ref().is_none_or(|last| stamp.as_ref().is_some_and(|stamp| stamp.number() > last.number())) {
                    last = stamp;
                }
            });
        }
        last.or_else(|| self.0.stamps.take(count))
    }

    /// As `stamp`, without those that envelopes carry themselves.
    pub(crate) fn stamp_beside(&self, count: u64) -> Option<Ticket> {
        self.0.stamps.take(count)
    }

    /// The stamp of a message that is still in the queue, the writer's `count`th.
    pub(crate) fn stamp_of(&self, count: u64) -> Option<Ticket> {
        self.0.stamps.look(count)
    }

    /// Messages that can be taken now.
    pub(crate) fn len(&self) -> usize {
        self.0.queue.ready()
    }

    /// What went wrong on the way, if something did.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// True if nothing can be taken and nothing will come.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.queue.writer_gone() && self.0.queue.len() == 0
    }

    pub(crate) fn hub(&self) -> &str {
        &self.0.name
    }
}

impl<M: Message> Drop for Sender<M> {
    fn drop(&mut self) {
        self.link.queue.close_writer();
    }
}

impl<M: Message> Drop for Receiver<M> {
    fn drop(&mut self) {
        let left = self.0.queue.close_reader();
        self.0.untaken.fetch_add(left.iter().flatten().count(), Ordering::Relaxed);
    }
}

impl<M: Message> HubState for Link<M> {
    fn queued(&self) -> usize {
        self.queue.len()
    }

    fn untaken(&self) -> usize {
        self.untaken.load(Ordering::Relaxed)
    }

    fn last_copy(&self) -> Option<Ticket> {
        self.copies.as_ref().map(Stream::ticket)
    }

    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn holds(&self, pool: &Arc<Pool>) -> usize {
        let mut count = 0;
        let pool = Arc::downgrade(pool);
        self.queue.each(|parcel| {
            parcel.message.envelopes(&mut |envelope| count += usize::from(envelope.home().ptr_eq(&pool)));
        });
        count
    }

    fn writer_lacks(&self, hubs: &mut dyn Iterator<Item = &dyn HubState>) -> Option<String> {
        if self.queue.reader_gone() {
            return None;
        }
        if self.queue.len() >= self.queue.capacity() {
            return Some(format!("room in hub `{}`: all {} places are taken", self.name, self.queue.capacity()));
        }
        if let Some(blanks) = self.blanks.as_ref().filter(|blanks| !blanks.has(1)) {
            return Some(format!("a blank envelope: {}", blanks.whereabouts(hubs)));
        }
        let forks = self.forks.load(Ordering::Relaxed);
        let arrivals = self.arrivals.as_ref().filter(|arrivals| forks && !arrivals.has(1))?;
        Some(format!("an envelope {} to copy to: {}", self.at_reader(), arrivals.whereabouts(hubs)))
    }

    fn reader_lacks(&self, hubs: &mut dyn Iterator<Item = &dyn HubState>) -> Option<String> {
        if self.queue.ready() > 0 || (self.queue.writer_gone() && self.queue.len() == 0) {
            return None;
        }
        if self.queue.len() == 0 {
            return Some(format!("a message in hub `{}`", self.name));
        }
        let arrivals = self.arrivals.as_ref()?;
        Some(format!("an envelope {}: {}", self.at_reader(), arrivals.whereabouts(hubs)))
    }
}

impl<M: Message> fmt::Debug for Link<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("name", &self.name)
            .field("queued", &self.queue.len())
            .field("ready", &self.queue.ready())
            .finish_non_exhaustive()
    }
}

impl<M: Message> fmt::Debug for Sender<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.link.fmt(f)
    }
}

impl<M: Message> fmt::Debug for Receiver<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
