//! [`Input`]: a port that receives messages, from one connection or from [several](super::Inputs).
//!
//! Each connection has a queue of its own. [`Connections`] says how many there are; everything else is written once.

use std::{
    any::Any,
    collections::VecDeque,
    fmt,
    future::poll_fn,
    task::{Context, Waker},
};

use tokio::time::Instant;

use super::{
    handle::InputHandle,
    input_queue::{InputQueue, WorkerEnd},
    input_wait::{self, InputWait},
    intake::Intake,
    plan::{AnyEnd, Binder, Plan, PortKind, PortOptions, not_connected},
    ports::{AnyPort, InputPort, Port, PortStats, WorkerPort},
    section_port::{SectionContext, SectionInput, no_envelope},
};
use crate::{
    condition::{Counted, PortState, Readiness},
    error::{Error, ErrorKind, Result},
    hub::{Message, RawEnvelope, waking::Interest},
    mutants::{self, Mutant},
    stream::Ticket,
    sync::Discarded,
};

/// How many connections an [`Input`] has: [`One`] or [`Many`].
pub trait Connections: 'static {
    #[doc(hidden)]
    const MANY: bool;
    #[doc(hidden)]
    type Queues<M: Message>: AsRef<[InputQueue<M>]>
        + AsMut<[InputQueue<M>]>
        + TryFrom<Vec<InputQueue<M>>>
        + Send
        + 'static;
}

/// Of an [`Input`]: it has one connection.
#[derive(Debug)]
pub struct One;

/// Of an [`Input`]: it has any number of connections. See [`Inputs`](super::Inputs).
#[derive(Debug)]
pub struct Many;

impl Connections for One {
    const MANY: bool = false;
    type Queues<M: Message> = [InputQueue<M>; 1];
}

impl Connections for Many {
    const MANY: bool = true;
    type Queues<M: Message> = Vec<InputQueue<M>>;
}

/// A port that receives messages, from one connection. [`Inputs`](super::Inputs) is the same for several.
pub struct Input<M: Message, C: Connections = One> {
    pub(super) queues: C::Queues<M>,
    pub(super) intake: Intake<M>,
    /// `None`: one message of each connection.
    wait: Option<Box<InputWait>>,
    /// Some of its hubs keep the latest value, and the newest message is taken again and again.
    keeps_latest: bool,
    pub(super) turns: Turns,
}

/// The order in which the connections are served. They take turns, so that a busy one does not starve the others.
#[derive(Default)]
pub(super) struct Turns {
    /// The connection that is served first: the one after that of the last message.
    first: usize,
    /// For a batch: the connections that have messages for it, and how many each. Kept for its capacity.
    open: VecDeque<(usize, usize)>,
    /// The number of messages that the batch may still take, and whether it has taken none yet.
    left: usize,
    is_new: bool,
}

impl Turns {
    /// The connections, of `count`, in the order of their turns.
    pub(super) fn order(&self, count: usize) -> impl Iterator<Item = usize> + use<> {
        (self.first..count).chain(0..self.first)
    }

    /// A message was taken from this connection, of `count`.
    pub(super) fn served(&mut self, connection: usize, count: usize) {
        self.first = (connection + 1) % count;
    }

    /// Begins a batch of up to `most` messages, of those that are available now.
    fn begin_batch<M: Message>(&mut self, most: usize, queues: &[InputQueue<M>]) {
        (self.left, self.is_new) = (most, true);
        self.open.clear();
        let order = self.order(queues.len());
        self.open.extend(order.map(|connection| (connection, queues[connection].batch_limit())));
    }

    /// Calls `take` with the connections whose turn it is, until one has a message. The second argument is true for the
    /// first message of the batch.
    fn take_next<T>(
        &mut self,
        count: usize,
        mut take: impl FnMut(usize, bool) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        while self.left > 0
            && let Some((connection, available)) = self.open.pop_front()
        {
            if let Some(taken) = take(connection, std::mem::take(&mut self.is_new))? {
                self.left -= 1;
                self.served(connection, count);
                if available > 1 {
                    self.open.push_back((connection, available - 1));
                }
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    fn is_complete(&self) -> bool {
        self.left == 0 || self.open.is_empty()
    }
}

impl<M: Message> Input<M> {
    /// Takes the next message. It is available, because the port's condition was ready before the operator ran. From a
    /// hub that keeps the [latest](crate::Hub::latest) value it returns the newest message, whether or not that was
    /// taken before.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if more messages are taken than the condition promised and none is available. The
    /// error of the message, if its transfer failed.
    pub fn take(&mut self) -> Result<M> {
        let mut place = Discarded::none();
        let [queue] = &mut self.queues;
        self.intake.take_into(place.place(), queue, true)?;
        place.take().map(|parcel| parcel.message).ok_or_else(|| self.nothing())
    }

    #[cold]
    fn nothing(&self) -> Error {
        let [queue] = &self.queues;
        let wait = queue.describe_wait();
        Error::new(ErrorKind::Usage, format!("{wait}: `take` once a run, or use `try_take`"))
    }

    /// Takes the next message that was not taken before, if one is available (and, where the port waits for that, if
    /// its work is done or its event has passed).
    ///
    /// # Errors
    /// The error of a failed transfer: a copy that failed, a device that was lost.
    #[inline]
    pub fn try_take(&mut self) -> Result<Option<M>> {
        let [queue] = &mut self.queues;
        self.intake.take(queue, false)
    }

    /// Waits for the next message. Returns `None` when the last sender is dropped and no message is left, and when the
    /// flow is idle, so that nothing in progress could send one.
    ///
    /// # Errors
    /// As for [`Input::try_take`].
    ///
    /// # Cancel safety
    /// A message is taken only when the future resolves: dropping the future loses none. If it is polled beside another
    /// future (in a `select!`, say), or in a combinator that polls with wakers of its own (`FuturesUnordered`), it
    /// counts as work in progress: the flow is not idle.
    pub fn recv(&mut self) -> impl Future<Output = Result<Option<M>>> + Send {
        async move { Ok(self.receive().await?.map(|(_, message)| message)) }
    }
}

impl<M: Message, C: Connections> Input<M, C> {
    /// Takes the messages that the port's condition promised, from any connection: as many as `at_least` or `batch`
    /// says, and fewer after a timeout or once the last sender is dropped. Without either attribute, takes all messages
    /// that are available at the call; messages sent meanwhile stay for the next batch.
    ///
    /// ```
    /// use wakeline::prelude::*;
    ///
    /// #[derive(Ports)]
    /// struct MeanPorts {
    ///     #[input(batch = 8, within = "5ms", capacity = 8)]
    ///     numbers: Input<f32>,
    ///     #[output]
    ///     mean: Output<f32>,
    /// }
    ///
    /// struct Mean;
    ///
    /// impl Operator for Mean {
    ///     type Ports = MeanPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut MeanPorts, _cx: &mut Cx) -> Result<()> {
    ///         let numbers = ports.numbers.take_batch()?;
    ///         let count = numbers.len() as f32;
    ///         let sum: f32 = numbers.sum();
    ///         ports.mean.send(sum / count).await
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// As for [`Input::try_take`]. The messages before the failed one are dropped: an operator that continues after an
    /// error should take messages one by one.
    pub fn take_batch(&mut self) -> Result<impl ExactSizeIterator<Item = M> + use<'_, M, C>> {
        let (queues, turns) = (self.queues.as_mut(), &mut self.turns);
        turns.begin_batch(self.wait.as_ref().map_or(usize::MAX, |wait| wait.batch()), queues);
        let count = queues.len();
        self.intake.take_all(|intake| {
            let taken = turns
                .take_next(count, |connection, is_first| intake.take(&mut queues[connection], is_first && !C::MANY))?;
            Ok(taken.filter(|_| !(turns.is_complete() && mutants::is(Mutant::ShortBatch))))
        })
    }

    /// True once all senders are dropped and no message is left.
    pub fn has_ended(&self) -> bool {
        self.queues.as_ref().iter().all(InputQueue::has_ended)
    }

    /// The streams that this run's messages came from, one entry per message, in the order of taking: the point in the
    /// sender's stream at which the message's own work is done; `None` for a sender without a stream. Reading them
    /// changes nothing.
    ///
    /// Use it with [`Stream::join`](crate::Stream::join) where a message brings data that wakeline does not track
    /// (another library's pointer, say) to a stream other than the operator's own: the operator's own stream is ordered
    /// after the message when it is taken. Envelopes need none of it.
    ///
    /// If a run takes more than 1024 messages, the oldest entries are discarded.
    pub fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.intake.streams()
    }

    /// The number of messages that can be taken now, over all connections. Where the port waits for their work, counts
    /// those that are known to be done, without a query to the device.
    pub fn len(&self) -> usize {
        self.queues.as_ref().iter().map(InputQueue::len).sum()
    }

    /// True if no message can be taken now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the next message of any connection that has one, together with the connection's number.
    pub(super) fn take_any(&mut self) -> Result<Option<(usize, M)>> {
        let queues = self.queues.as_mut();
        for connection in self.turns.order(queues.len()) {
            if let Some(message) = self.intake.take(&mut queues[connection], false)? {
                self.turns.served(connection, queues.len());
                return Ok(Some((connection, message)));
            }
        }
        Ok(None)
    }

    /// Waits for the next message of any connection.
    pub(super) fn receive(&mut self) -> impl Future<Output = Result<Option<(usize, M)>>> + Send {
        async move {
            self.intake.release_unneeded();
            loop {
                let waiting = IdleAtEnd(self.queues.as_mut());
                let (intake, queues) = (&mut self.intake, &mut *waiting.0);
                let available = poll_fn(move |task| intake.poll_received(task, |task| poll_new(queues, task))).await;
                drop(waiting);
                let taken = if available { self.take_any()? } else { return Ok(None) };
                // Otherwise the hub has dropped the message since.
                if taken.is_some() {
                    return Ok(taken);
                }
            }
        }
    }

    /// One message of each connection that has not ended. All connections are polled; the first one that lacks a
    /// message registers for it.
    fn poll_each(&mut self, mut interest: Interest, cx: &mut Context<'_>) -> Readiness {
        let mut all: Option<Readiness> = None;
        for queue in self.queues.as_mut() {
            let readiness = queue.poll(interest, cx);
            if !readiness.is_never() {
                all = Some(all.map_or(readiness, |all| all | readiness));
                if !readiness.is_ready() {
                    interest = Interest::Close;
                }
            }
        }
        // The kept latest value of an ended connection counts only together with other connections.
        all.filter(|all| !(self.keeps_latest && all.is_ready() && self.is_over())).unwrap_or(Readiness::NEVER)
    }

    /// If all of them keep the latest, it counts together with the operator's other inputs.
    #[cold]
    fn is_over(&self) -> bool {
        let mut all = self.queues.as_ref().iter();
        all.clone().all(InputQueue::is_over)
            && (!all.clone().all(InputQueue::reads_again) || all.all(InputQueue::has_ended))
    }
}

/// Is there a message in one of these queues that was not taken before?
fn poll_new<M: Message>(queues: &mut [InputQueue<M>], cx: &mut Context<'_>) -> Readiness {
    let mut all = Readiness::NEVER;
    for queue in queues {
        match (queue.poll_new(cx), all) {
            (Readiness::READY, _) => return Readiness::READY,
            (Readiness::NEVER, _) => {}
            // The one that may become ready first.
            (asked, Readiness::NEVER) => all = asked,
            (asked, before) if before.needs_others() => all = asked,
            _ => {}
        }
    }
    all
}

/// A wait for messages of these queues; a wait for a device ends with it.
struct IdleAtEnd<'a, M: Message>(&'a mut [InputQueue<M>]);

impl<M: Message> Drop for IdleAtEnd<'_, M> {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(InputQueue::idle);
    }
}

impl<M: Message, C: Connections> fmt::Debug for Input<M, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple(if C::MANY { "Inputs" } else { "Input" }).field(&self.queues.as_ref()).finish()
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
        PortStats { traffic: self.intake.traffic(), connections: self.queues.as_ref().len() as u64 }
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

    fn hand_over(&mut self, worker: &mut dyn Any) -> Result<()> {
        let Some(worker) = worker.downcast_mut::<Self>() else { return Ok(()) };
        let Self { queues, intake, wait, turns, .. } = self;
        let (queues, workers) = (queues.as_mut(), worker.queues.as_mut());
        let Some(wait) = wait else {
            // One message of each.
            return queues.iter_mut().zip(workers).try_for_each(|(from, to)| intake.pass(from, to, true).map(drop));
        };
        turns.begin_batch(wait.batch(), queues);
        let count = queues.len();
        let mut pass = |at: usize, is_first: bool| {
            let passed = intake.pass(&mut queues[at], &mut workers[at], is_first && !C::MANY)?;
            Ok(passed.then_some(()))
        };
        while turns.take_next(count, &mut pass)?.is_some() {}
        Ok(())
    }

    fn take_back(&mut self, worker: &mut dyn Any) {
        let Some(worker) = worker.downcast_mut::<Self>() else { return };
        for (from, to) in self.queues.as_ref().iter().zip(worker.queues.as_mut()) {
            self.intake.take_back(from, to);
        }
    }
}

impl<M: Message, C: Connections> SectionInput for Input<M, C> {
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.unclaim();
        self.poll_promised(1, cx).more
    }

    fn first_bytes(&mut self) -> Result<Option<usize>> {
        let [queue, ..] = self.queues.as_mut() else { return Ok(None) };
        queue.check()?;
        Ok(if queue.claim() { queue.first_bytes() } else { None })
    }

    fn take(&mut self, section: &SectionContext) -> Result<RawEnvelope> {
        let [queue, ..] = self.queues.as_mut() else { return Err(no_envelope()) };
        let taken = self.intake.take_for(queue, &section.context)?;
        taken.and_then(M::into_envelope).ok_or_else(no_envelope)
    }

    fn captured_end(&self, envelope: RawEnvelope) -> Result<AnyEnd> {
        let [queue, ..] = self.queues.as_ref() else { return Err(no_envelope()) };
        Ok(Box::new(queue.end_with(M::of_envelope(envelope).ok_or_else(no_envelope)?)?))
    }
}

impl<M: Message, C: Connections> Port for Input<M, C> {
    type Handle = InputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> InputHandle<M> {
        InputHandle::new(plan.add::<M>(name, if C::MANY { PortKind::Inputs } else { PortKind::Input }, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        let queues: Vec<_> = if binder.has::<WorkerEnd<M>>(name) {
            binder.ends(name)?.into_iter().map(|end| InputQueue::of_worker(end, options.requirement)).collect()
        } else {
            binder.ends(name)?.into_iter().map(|end| InputQueue::new(end, options.requirement)).collect()
        };
        let (need, disabled) = binder.need(name, options.need);
        Ok(Self {
            keeps_latest: queues.iter().any(InputQueue::reads_again),
            queues: queues.try_into().map_err(|_| not_connected(name))?,
            intake: Intake::new(binder),
            wait: InputWait::new(need, disabled),
            turns: Turns::default(),
        })
    }

    #[inline]
    fn poll_ready(&mut self, before: Readiness, cx: &mut Context<'_>) -> Readiness {
        match (&mut self.wait, self.queues.as_mut()) {
            (None, [queue]) => queue.poll(before.interest(), cx),
            (None, _) => self.poll_each(before.interest(), cx),
            (Some(wait), queues) => wait.poll(queues, cx),
        }
    }

    /// This port is the only reader: a message that was available still is, unless its hub drops messages.
    #[inline]
    fn claim(&mut self) -> bool {
        self.intake.begin();
        self.queues.as_mut().iter_mut().all(InputQueue::claim)
    }

    fn unclaim(&mut self) {
        self.queues.as_mut().iter_mut().for_each(InputQueue::release);
    }
}
