//! [`Input`]: a port that receives messages, from one connection or from [several](super::Inputs).
//!
//! Each connection has its own queue. [`Connections`] says how many there are; all other code is shared.

use std::{
    fmt,
    future::poll_fn,
    mem,
    sync::Arc,
    task::{Context, Poll},
};

use super::{
    batch::{Batch, BatchBuffer, Turns},
    handle::InputHandle,
    input_queue::{InputQueue, WorkerEnd},
    input_wait::InputWait,
    operator_streams::{TakenTickets, carries_any},
    plan::{Binder, Plan, PortKind, PortOptions, not_connected},
    ports::{HandleVisitor, Port, Traffic},
    run_context::RunContext,
    status_cell::RunWait,
};
use crate::{
    condition::Readiness,
    error::{Error, ErrorKind, Result},
    hub::{Message, end_waker::Interest, parcel::Parcel},
    mutants::{self, Mutant},
    stream::Ticket,
    sync::DiscardOnDrop,
};

/// How many connections an [`Input`] has: [`One`] or [`Many`]. Sealed.
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

/// For an [`Input`] with one connection.
#[derive(Debug)]
pub struct One;

/// For an [`Input`] with any number of connections. See [`Inputs`](super::Inputs).
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

/// A port that receives messages from one connection: a field of a struct that derives [`Ports`](macro@crate::Ports),
/// marked `#[input]`. [`Inputs`](super::Inputs) is the same for several connections.
#[repr(C)]
pub struct Input<M: Message, C: Connections = One> {
    // What each message needs comes first: two cache lines.
    pub(super) queues: C::Queues<M>,
    pub(super) context: Arc<RunContext>,
    /// `None` if the port waits for one message of each connection.
    pub(super) wait: Option<Box<InputWait>>,
    /// All messages that were taken, from any connection. Of these, `reread` had been taken before, and `untaken` were
    /// passed to workers that did not take them.
    pub(super) traffic: Traffic,
    pub(super) tickets: TakenTickets,
    pub(super) reread: Traffic,
    pub(super) untaken: Traffic,
    /// The messages of a batch; kept for its capacity.
    pub(super) batch: BatchBuffer<M>,
    /// At least one of its hubs keeps the latest value.
    pub(super) keeps_latest: bool,
    pub(super) turns: Turns,
}

impl<M: Message> Input<M> {
    /// Takes the next message. It is available, because the port's condition was ready before the operator ran. From a
    /// hub that keeps the [latest](crate::HubOptions::latest) value it returns the newest message, whether or not that was
    /// taken before.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if more messages are taken than the condition promised and none is available. The
    /// error of the message, if its transfer failed.
    // Inlined, without `take_into`: the caller moves the message from where the queue has put it.
    #[inline]
    pub fn take(&mut self) -> Result<M> {
        let mut place = DiscardOnDrop::none();
        self.take_into(place.place(), 0, true)?;
        place.take().map(|parcel| parcel.message).ok_or_else(|| self.no_message())
    }

    #[cold]
    fn no_message(&self) -> Error {
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
        self.take_from(0, false)
    }

    /// Waits for the next message. Returns `None` when the last sender is dropped and no message is left, and when the
    /// flow is idle, since nothing can send one then.
    ///
    /// # Errors
    /// The same as for [`Input::try_take`].
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
    /// that are available at the call; later messages stay for the next batch.
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
    ///         ports.mean.send(sum / count).await?;
    ///         Ok(())
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// The same as for [`Input::try_take`]. The messages before the failed one are dropped: an operator that continues after an
    /// error should take messages one by one.
    pub fn take_batch(&mut self) -> Result<impl ExactSizeIterator<Item = M> + use<'_, M, C>> {
        self.turns.begin_batch(self.wait.as_ref().map_or(usize::MAX, |wait| wait.batch()), self.queues.as_ref());
        self.take_all(|input| {
            let taken =
                input.take_turn(|input, connection, is_first| input.take_from(connection, is_first && !C::MANY))?;
            Ok(taken.filter(|_| !(input.turns.is_complete() && mutants::is(Mutant::ShortBatch))))
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
    /// after the message when it is taken. Not needed for envelopes.
    ///
    /// If a run takes more than 1024 messages, the oldest entries are discarded.
    pub fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.tickets.all(self.traffic.messages)
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

    /// Takes the next message of a connection, if there is one, counts it and notes its ticket. `reread`: also the newest
    /// one of a latest-value hub, even if it was taken before.
    #[inline]
    pub(super) fn take_from(&mut self, connection: usize, reread: bool) -> Result<Option<M>> {
        let mut place = DiscardOnDrop::none();
        self.take_into(place.place(), connection, reread)?;
        Ok(place.take().map(|parcel| parcel.message))
    }

    /// Like `take_from`, into `place`, where the message stays until its destructor may run.
    #[inline(never)]
    fn take_into(&mut self, place: &mut Option<Parcel<M>>, connection: usize, reread: bool) -> Result<()> {
        let queue = &mut self.queues.as_mut()[connection];
        let before = queue.last();
        queue.take(place, reread)?;
        let Some(parcel) = place else { return Ok(()) };
        self.traffic.count(&parcel.message);
        if queue.last() == before {
            self.reread.count(&parcel.message);
        }
        if let Some(ticket) = parcel.take_ticket() {
            let carries_none = !carries_any(&mut parcel.message);
            self.tickets.note(ticket, carries_none, self.traffic.messages)?;
        }
        self.context.receive(parcel.header.take())
    }

    /// Takes the messages that `next` returns, until it returns none; those that the caller does not use are dropped.
    pub(super) fn take_all(&mut self, mut next: impl FnMut(&mut Self) -> Result<Option<M>>) -> Result<Batch<'_, M>> {
        // One by one also on an error or a panic.
        let mut taken = mem::replace(&mut self.batch, BatchBuffer::none());
        while let Some(message) = next(self)? {
            taken.push(message);
        }
        self.batch = taken;
        Ok(self.batch.drain())
    }

    /// Calls `take` with the connections whose turn it is, until one has a message. The last argument is true for the
    /// first message of the batch.
    pub(super) fn take_turn<T>(
        &mut self,
        mut take: impl FnMut(&mut Self, usize, bool) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let count = self.queues.as_ref().len();
        while let Some((connection, available, is_first)) = self.turns.next_turn() {
            if let Some(taken) = take(self, connection, is_first)? {
                self.turns.taken(connection, available, count);
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    /// Takes the next message of any connection that has one, together with the connection's number.
    pub(super) fn take_any(&mut self) -> Result<Option<(usize, M)>> {
        let count = self.queues.as_ref().len();
        for connection in self.turns.order(count) {
            if let Some(message) = self.take_from(connection, false)? {
                self.turns.served(connection, count);
                return Ok(Some((connection, message)));
            }
        }
        Ok(None)
    }

    /// Waits for the next message of any connection.
    pub(super) fn receive(&mut self) -> impl Future<Output = Result<Option<(usize, M)>>> + Send {
        async move {
            self.context.release_between_runs();
            loop {
                let waiting = IdleAtEnd(self.queues.as_mut());
                let (context, queues) = (&self.context, &mut *waiting.0);
                let available = poll_fn(move |task| poll_received(context, queues, task)).await;
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
    pub(super) fn poll_each(&mut self, mut interest: Interest, cx: &mut Context<'_>) -> Readiness {
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
            && (!all.clone().all(InputQueue::keeps_latest) || all.all(InputQueue::has_ended))
    }
}

/// Waits for a message, perhaps in the middle of a run: true if there is one, false if none will arrive.
fn poll_received<M: Message>(context: &RunContext, queues: &mut [InputQueue<M>], task: &mut Context<'_>) -> Poll<bool> {
    context.poll_port(RunWait::RECEIVES, task, |task| match poll_new(queues, task) {
        Readiness::READY => Ok(true),
        Readiness::NEVER => Ok(false),
        _ if context.operator_task().take_release() => Ok(false),
        readiness => Err(readiness),
    })
}

/// Ready if one of these queues has a message that was not taken before.
fn poll_new<M: Message>(queues: &mut [InputQueue<M>], cx: &mut Context<'_>) -> Readiness {
    let mut all = Readiness::NEVER;
    for queue in queues {
        match (queue.poll_new(cx), all) {
            (Readiness::READY, _) => return Readiness::READY,
            (Readiness::NEVER, _) => {}
            // The one that might become ready first.
            (readiness, Readiness::NEVER) => all = readiness,
            (readiness, before) if before.needs_others() => all = readiness,
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
            keeps_latest: queues.iter().any(InputQueue::keeps_latest),
            queues: queues.try_into().map_err(|_| not_connected(name))?,
            traffic: Traffic::default(),
            reread: Traffic::default(),
            untaken: Traffic::default(),
            tickets: TakenTickets::new(binder.streams.clone()),
            context: binder.context.clone(),
            batch: BatchBuffer::none(),
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
        self.tickets.begin(self.traffic.messages);
        self.queues.as_mut().iter_mut().all(InputQueue::claim)
    }

    fn give_back(&mut self) {
        self.queues.as_mut().iter_mut().for_each(InputQueue::release);
    }

    fn visit_handle(handle: InputHandle<M>, visitor: &mut impl HandleVisitor) {
        visitor.input(handle);
    }
}
