//! The two ends of a hub, and what happens in between.
//!
//! [`Link`] puts the [`queue`](super::queue), the [pools](super::pool) and the copies together. Nobody runs it: whoever
//! sends a message, or gives back an envelope that a message was waiting for, moves what can be moved. A move only
//! enqueues; no lock of this hub is held while it does, nor while envelopes go home to other hubs.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    task::Waker,
};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    Message,
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
    /// For copies on the reader's side, if it is elsewhere.
    pub(crate) reader_bytes: Option<usize>,
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
    blanks: Option<Arc<Pool>>,
    arrivals: Option<Arc<Pool>>,
    copies: Option<Stream>,
    failed: OnceLock<Error>,
    untaken: AtomicUsize,
}

/// The writer's end. Dropping it ends the reader, after what lies in the queue.
pub(crate) struct Sender<M: Message>(Arc<Link<M>>);

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
        Some(_) => {
            let stream = Stream::with_priority(copier, format!("copies of {name}"), plan.priority)?;
            stream.set_completion_mode(plan.mode);
            Some(stream)
        }
        None => None,
    };
    let link = Arc::new(Link {
        name: name.clone(),
        queue: Queue::new(plan.capacity),
        times: plan.times,
        stamps: Stamps::default(),
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
            }
        }));
    }
    Ok((Sender(link.clone()), Receiver(link.clone()), link))
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
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{} valid bytes do not fit into its envelopes of {}: set `envelope_bytes`",
                    envelope.bytes(),
                    arrivals.bytes()
                ),
            ));
        }
        let Some(mut arrival) = arrivals.take() else { return Ok(false) };
        arrival.relieve(envelope);
        transfer::copy(copies, envelope.memory(), arrival.memory_mut(), envelope.bytes())?;
        // Marked now: whoever waits for it waits for this copy and for none after it.
        arrival.memory_mut().commit()?;
        replaced.push(std::mem::replace(envelope, arrival));
        Ok(true)
    }

    #[inline]
    fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.again()))
    }
}

impl<M: Message> Sender<M> {
    /// Room in the queue, and a blank envelope where the hub has such?
    #[inline]
    pub(crate) fn poll_room(&self, waker: &Waker) -> Answer {
        let link = &*self.0;
        if link.failed.get().is_some() {
            return Answer::Yes;
        }
        match link.queue.poll_room(waker) {
            Answer::Yes => self.poll_blank(waker),
            other => self.unless_failed(other),
        }
    }

    /// As `poll_room`, of a writer that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_room(&self, waker: &Waker) -> Answer {
        let link = &*self.0;
        if link.blanks.is_some() || link.failed.get().is_some() {
            return self.poll_room(waker);
        }
        self.unless_failed(link.queue.look_for_room(waker))
    }

    /// Room in the queue?
    #[inline]
    pub(crate) fn poll_queue(&self, waker: &Waker) -> Answer {
        if self.0.failed.get().is_some() {
            return Answer::Yes;
        }
        self.unless_failed(self.0.queue.poll_room(waker))
    }

    /// It may have failed before the waker was kept: then nobody wakes it.
    #[inline]
    fn unless_failed(&self, answer: Answer) -> Answer {
        if answer == Answer::Wait && self.0.failed.get().is_some() { Answer::Yes } else { answer }
    }

    /// A blank envelope, where the hub has such?
    #[inline]
    pub(crate) fn poll_blank(&self, waker: &Waker) -> Answer {
        let link = &*self.0;
        let Some(blanks) = &link.blanks else { return Answer::Yes };
        if blanks.has_one() || link.failed.get().is_some() {
            return Answer::Yes;
        }
        link.queue.keep_writer(waker);
        if link.queue.reader_gone() {
            return Answer::Never;
        }
        // Asked again: one may have come home before the waker was kept.
        if blanks.has_one() { Answer::Yes } else { self.unless_failed(Answer::Wait) }
    }

    /// A blank envelope, if there is one; an error if the hub has none at all.
    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        let link = &*self.0;
        link.check()?;
        match &link.blanks {
            Some(blanks) => Ok(blanks.take()),
            None => Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "hub `{}` has no blank envelopes: say how large they are, with `#[output(envelope_bytes = ..)]` or \
                     `Hub::envelope_bytes`",
                    link.name
                ),
            )),
        }
    }

    /// Sends, if there is room; otherwise the message comes back. `origin`: the stream that it carries, and its number
    /// among the writer's messages.
    pub(crate) fn try_send(
        &self,
        mut parcel: Parcel<M>,
        origin: Option<(&Stream, u64)>,
    ) -> Result<Result<(), Parcel<M>>> {
        let message = &mut parcel.message;
        let link = &*self.0;
        link.check()?;
        let mut ready = Ok(());
        for name in M::EVENTS {
            message.events(name, &mut |ticket| {
                if ready.is_ok() {
                    ready = ticket.commit();
                }
            });
        }
        let mut stamped = false;
        let mut misplaced = None;
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| {
                stamped = true;
                if ready.is_ok() {
                    ready = envelope.depart(origin.map(|(stream, _)| stream));
                }
                if link.arrivals.is_none() && !envelope.memory().is_at(&link.reader) {
                    misplaced.get_or_insert_with(|| link.misplaced(envelope));
                }
            });
        }
        ready?;
        if let Some(error) = misplaced {
            return Err(link.fail(error));
        }
        let origin = origin.filter(|_| !stamped);
        if link.queue.len() >= link.queue.capacity() {
            return Ok(Err(parcel));
        }
        if let Some((stream, count)) = origin {
            let mut stamp = stream.ticket();
            stamp.commit()?;
            link.stamps.put(count, stamp);
        }
        // Where nothing is ever moved, it can be taken at once.
        let moves = M::CARRIES_ENVELOPES && link.arrivals.is_some();
        link.note_time(&mut parcel, Since::Sent);
        if !moves {
            link.note_time(&mut parcel, Since::Arrived);
        }
        match link.queue.push(parcel, !moves) {
            Ok(()) if moves => link.pump().map(Ok),
            Ok(()) => Ok(Ok(())),
            Err(parcel) => {
                if let Some((_, count)) = origin {
                    link.stamps.take_back(count);
                }
                Ok(Err(parcel))
            }
        }
    }

    /// Room for so many messages in the queue?
    pub(crate) fn poll_room_for(&self, count: usize, waker: &Waker) -> Answer {
        let link = &*self.0;
        let asked = || {
            if link.queue.reader_gone() {
                Answer::Never
            } else if link.failed.get().is_some() || link.queue.len().saturating_add(count) <= link.queue.capacity() {
                Answer::Yes
            } else {
                Answer::Wait
            }
        };
        if asked() != Answer::Wait {
            return asked();
        }
        link.queue.keep_writer(waker);
        asked()
    }

    /// Keeps the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.0.queue.keep_writer(waker);
    }

    pub(crate) fn reader_gone(&self) -> bool {
        self.0.queue.reader_gone()
    }

    pub(crate) fn hub(&self) -> &str {
        &self.0.name
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
        self.0.queue.close_writer();
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
        let blanks = self.blanks.as_ref().filter(|blanks| !blanks.has_one())?;
        Some(format!("a blank envelope: {}", blanks.whereabouts(hubs)))
    }

    fn reader_lacks(&self, hubs: &mut dyn Iterator<Item = &dyn HubState>) -> Option<String> {
        if self.queue.ready() > 0 || (self.queue.writer_gone() && self.queue.len() == 0) {
            return None;
        }
        if self.queue.len() == 0 {
            return Some(format!("a message in hub `{}`", self.name));
        }
        let arrivals = self.arrivals.as_ref()?;
        let place = if self.reader.is_host() { "the host" } else { self.reader.name() };
        Some(format!("an envelope on {place}: {}", arrivals.whereabouts(hubs)))
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
        self.0.fmt(f)
    }
}

impl<M: Message> fmt::Debug for Receiver<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
