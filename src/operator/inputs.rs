//! [`Inputs`]: one port for any number of connections.
//!
//! Each connection has a queue of its own, so the order of each sender is kept, and a slow sender delays only the runs
//! that wait for it. Connections are identified by their number, counted from 0 in the order of connecting.
//!
//! ```text
//!   by default ready:  every connection that has not ended has a message
//!   a connection has ended, and its remaining messages are taken:  it is ignored
//!   all have ended, except for kept latest values:  `Never`; if all hubs keep the latest: with the other inputs
//! ```

use std::{
    any::Any,
    collections::VecDeque,
    fmt,
    future::poll_fn,
    ops::BitOr,
    task::{Context, Waker},
};

use tokio::time::Instant;

use super::{
    handle::InputHandle,
    input_queue::{self, Inlet, InputQueue, Intake, Wait, Waits},
    plan::{Binder, Plan, PortKind, PortOptions},
    ports::{AnyPort, InputPort, Port, Traffic},
};
use crate::{
    condition::{Counted, PortState, Readiness},
    error::{Error, ErrorKind, Result},
    hub::{Message, receiver::Receiver},
    stream::Ticket,
};

/// A port that receives messages from any number of outputs: its handle is passed to
/// [`Flow::connect`](crate::Flow::connect) once for each.
///
/// **By default it waits for one message of each connection** that has not ended: a connection that stays silent delays
/// the messages of all others, and a message that an operator sends back to itself through such a port is a stall,
/// since no run can send the first one. An operator that should run on any message, from any connection, sets the
/// number over all connections together, in the attribute or with [`at_least`](crate::condition::at_least):
///
/// ```
/// # use wakeline::{Inputs, prelude::*};
/// #[derive(Ports)]
/// struct MergePorts {
///     #[input(at_least = 1)]
///     parts: Inputs<u32>,
/// }
///
/// struct Merge;
///
/// impl Operator for Merge {
///     type Ports = MergePorts;
///
///     async fn compute(&mut self, ports: &mut MergePorts, _cx: &mut Cx) -> Result<()> {
///         while let Some((connection, part)) = ports.parts.try_take_any()? {
///             println!("{part} from connection {connection}");
///         }
///         Ok(())
///     }
/// }
/// ```
///
/// | attribute | a run needs | taken by |
/// |---|---|---|
/// | `#[input]` | a message of each connection that has not ended | [`take`](Self::take): one of each |
/// | `#[input(at_least = n)]`, `batch = n, within = ".."` | n messages of all connections together | [`take_batch`](Self::take_batch), [`try_take_any`](Self::try_take_any) |
/// | `#[input(optional)]` | none | [`try_take_any`](Self::try_take_any) |
///
/// ```
/// use wakeline::{Flow, Inputs, operator::source, prelude::*};
///
/// #[derive(Ports)]
/// struct SumPorts {
///     #[input]
///     parts: Inputs<u32>,
/// }
///
/// struct Sum;
///
/// impl Operator for Sum {
///     type Ports = SumPorts;
///
///     async fn compute(&mut self, ports: &mut SumPorts, _cx: &mut Cx) -> Result<()> {
///         let sum: u32 = ports.parts.take()?.sum();     // one message of each connection
///         assert_eq!(sum, 30);
///         Ok(())
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let mut flow = Flow::new("sum");
/// let sum = flow.add("sum", Sum);
/// for n in [10, 20] {
///     let mut once = Some(n);
///     let part = flow.add(format!("part {n}"), source(move || std::future::ready(Ok(once.take()))));
///     flow.connect(part.output, sum.parts);
/// }
/// flow.run().await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub struct Inputs<M: Message> {
    connections: Vec<InputQueue<M>>,
    /// At least one connection has a latest-value hub, whose newest message is taken again and again.
    keeps: bool,
    /// The connection that [`try_take_any`](Self::try_take_any) checks first: the one after that of the last message.
    turn: usize,
    /// For a [batch](Self::take_batch): the connections that have messages for it, and how many each. Kept for its
    /// capacity.
    open: VecDeque<(usize, usize)>,
    intake: Intake<M>,
    /// `None`: one message of each connection.
    waits: Option<Box<Waits>>,
}

impl<M: Message> Inputs<M> {
    /// Takes one message of each connection that has not ended, in the order of connecting. They are available, because
    /// the port's condition was ready before the operator ran. Messages left in the iterator when it is dropped are
    /// dropped with it.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage), with nothing taken, if a connection has no message, for example when it is called
    /// twice in a run. The error of a failed transfer; then the messages that were taken before the error are dropped.
    pub fn take(&mut self) -> Result<impl ExactSizeIterator<Item = M>> {
        for hub in &mut self.connections {
            hub.check()?;
            if !hub.has_one() && !hub.has_ended() {
                let lacks = hub.lacks();
                return Err(Error::new(ErrorKind::Usage, format!("{lacks}: `take` once a run, or use `try_take_any`")));
            }
        }
        let mut connections = self.connections.iter_mut().filter(|connection| !connection.has_ended());
        self.intake.take_all(|intake| {
            for connection in connections.by_ref() {
                if let Some(message) = intake.take(connection, true)? {
                    return Ok(Some(message));
                }
            }
            Ok(None)
        })
    }

    /// Takes the next message of one connection, if there is one.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if there is no connection of that number; the error of a failed transfer.
    pub fn try_take_from(&mut self, connection: usize) -> Result<Option<M>> {
        let count = self.connections.len();
        let hub = self.connections.get_mut(connection).ok_or_else(|| {
            Error::new(ErrorKind::Usage, format!("connection {connection} of {count}: they are counted from 0"))
        })?;
        self.intake.take(hub, false)
    }

    /// Takes the next message of any connection that has one, together with the connection's number. Connections take
    /// turns, so that a busy one does not starve the others.
    ///
    /// # Errors
    /// The error of a failed transfer: a copy that failed, a device that was lost.
    pub fn try_take_any(&mut self) -> Result<Option<(usize, M)>> {
        let count = self.connections.len();
        for at in (self.turn..count).chain(0..self.turn) {
            if let Some(message) = self.try_take_from(at)? {
                self.turn = (at + 1) % count;
                return Ok(Some((at, message)));
            }
        }
        Ok(None)
    }

    /// Takes the messages that the port's condition promised, from any connections: as many as `at_least` or `batch`
    /// says, and fewer after a timeout or once the last sender is dropped. Without either attribute, takes all messages
    /// that are available at the call; messages sent meanwhile stay for the next batch.
    ///
    /// # Errors
    /// As for [`Inputs::try_take_any`]. The messages before the failed one are dropped.
    pub fn take_batch(&mut self) -> Result<impl ExactSizeIterator<Item = M>> {
        let mut left = self.waits.as_ref().map_or(usize::MAX, |waits| waits.batch());
        let Self { connections, turn, open, .. } = self;
        let count = connections.len();
        open.clear();
        open.extend((*turn..count).chain(0..*turn).map(|at| (at, connections[at].most_to_take())));
        self.intake.take_all(|intake| {
            while left > 0
                && let Some((at, there)) = open.pop_front()
            {
                if let Some(message) = intake.take(&mut connections[at], false)? {
                    left -= 1;
                    *turn = (at + 1) % count;
                    if there > 1 {
                        open.push_back((at, there - 1));
                    }
                    return Ok(Some(message));
                }
            }
            Ok(None)
        })
    }

    /// True once all senders are dropped and no message is left.
    pub fn has_ended(&self) -> bool {
        self.connections.iter().all(InputQueue::has_ended)
    }

    /// Waits for the next message of any connection, and returns it with the connection's number. Returns `None` when
    /// all senders are dropped and no message is left, and when the flow is idle, so that nothing in progress could
    /// send one.
    ///
    /// # Errors
    /// As for [`Inputs::try_take_any`].
    ///
    /// # Cancel safety
    /// A message is taken only when the future resolves: dropping the future loses none.
    pub fn recv_any(&mut self) -> impl Future<Output = Result<Option<(usize, M)>>> + Send {
        async move {
            self.intake.release_unneeded();
            loop {
                let waiting = Wait(&mut self.connections);
                let (intake, connections) = (&mut self.intake, &mut *waiting.0);
                let there = poll_fn(move |task| {
                    intake.poll_received(task, |task| {
                        let mut all = Readiness::NEVER;
                        for connection in &mut *connections {
                            match (connection.poll_new(task), all) {
                                (Readiness::READY, _) => return Readiness::READY,
                                (Readiness::NEVER, _) => {}
                                // The one that may become ready first.
                                (asked, Readiness::NEVER) => all = asked,
                                (asked, before) if before.needs_others() => all = asked,
                                _ => {}
                            }
                        }
                        all
                    })
                });
                let there = there.await;
                drop(waiting);
                let taken = if there { self.try_take_any()? } else { return Ok(None) };
                // Otherwise the hub has dropped the message since.
                if taken.is_some() {
                    return Ok(taken);
                }
            }
        }
    }

    /// The streams that this run's messages came from, one entry per message, in the order of taking. See
    /// [`Input::streams`](super::Input::streams).
    pub fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.intake.streams()
    }

    /// The number of connections, including those that have ended.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// The number of messages that can be taken now, over all connections.
    pub fn len(&self) -> usize {
        self.connections.iter().map(InputQueue::len).sum()
    }

    /// The number of messages of one connection that can be taken now; 0 if there is no connection of that number.
    pub fn len_of(&self, connection: usize) -> usize {
        self.connections.get(connection).map_or(0, InputQueue::len)
    }

    /// True if no message can be taken now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<M: Message> Inputs<M> {
    /// The kept latest value of an ended connection counts only together with other connections. All have been polled.
    #[inline]
    fn unless_over(&self, readiness: Readiness) -> Readiness {
        let over = self.keeps && readiness.is_ready() && self.is_over();
        if over { Readiness::NEVER } else { readiness }
    }

    /// If all of them keep the latest, it counts together with the operator's other inputs.
    #[cold]
    fn is_over(&self) -> bool {
        let mut all = self.connections.iter();
        all.clone().all(InputQueue::is_over)
            && (!all.clone().all(InputQueue::reads_again) || all.all(InputQueue::has_ended))
    }
}

impl<M: Message> fmt::Debug for Inputs<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Inputs").field(&self.connections).finish()
    }
}

impl<M: Message> InputPort for Inputs<M> {
    const EVENTS: &'static [&'static str] = M::EVENTS;
}

impl<M: Message> PortState for Inputs<M> {
    fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        input_queue::poll_count(&mut self.connections, most, cx)
    }

    fn poll_promised(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        input_queue::poll_promised(&mut self.connections, most, cx)
    }

    fn poll_room(&mut self, _count: usize, _cx: &mut Context<'_>) -> Readiness {
        Readiness::READY
    }

    fn oldest(&self) -> Option<Instant> {
        input_queue::oldest(&self.connections)
    }
}

impl<M: Message> AnyPort for Inputs<M> {
    fn due(&self) -> Option<Instant> {
        self.waits.as_ref()?.due()
    }

    fn notifies(&self) -> bool {
        self.waits.is_some()
    }

    fn lacks(&self) -> Option<String> {
        self.waits.as_ref()?.lacks()
    }

    fn state(&mut self) -> &mut dyn PortState {
        self
    }

    fn is_output(&self) -> bool {
        false
    }

    fn connections(&self) -> u64 {
        self.connections.len() as u64
    }

    fn has_ended(&self) -> bool {
        Self::has_ended(self)
    }

    fn traffic(&self) -> Traffic {
        self.intake.traffic()
    }

    fn allows_runs(&mut self, cx: &mut Context<'_>) -> bool {
        input_queue::allows_runs(&mut self.connections, self.waits.as_deref(), cx)
    }

    fn reader_gone(&self) -> bool {
        false
    }

    fn release_unneeded(&mut self) {
        self.connections.iter_mut().for_each(InputQueue::release);
    }

    fn rest(&mut self) {
        self.release_unneeded();
        self.connections.iter_mut().for_each(InputQueue::rest);
        self.waits.iter_mut().for_each(|waits| waits.rest());
    }

    fn watch(&mut self, waker: &Waker) {
        self.connections.iter().for_each(|connection| connection.watch(waker));
    }

    fn spread(&mut self) -> Result<(Vec<Box<dyn Any + Send>>, Option<Box<dyn Any + Send>>)> {
        let (ends, inlets): (Vec<_>, Vec<_>) = self.connections.iter().map(InputQueue::spread).unzip();
        let ends = ends.into_iter().map(|end| Box::new(end) as Box<dyn Any + Send>);
        Ok((ends.collect(), Some(Box::new(inlets))))
    }

    fn hand_over(&mut self, inlets: &mut (dyn Any + Send)) -> Result<()> {
        let Some(inlets) = inlets.downcast_mut::<Vec<Inlet<M>>>() else { return Ok(()) };
        let Self { connections, open, intake, waits, .. } = self;
        let mut both = connections.iter_mut().zip(inlets.iter_mut());
        let Some(waits) = waits else {
            // One message of each.
            return both.try_for_each(|(connection, inlet)| intake.hand_over(connection, inlet, true).map(drop));
        };
        // A number of messages from any connection, of those that are available at the beginning.
        let mut left = waits.batch();
        let mut both: Vec<_> = both.collect();
        open.clear();
        open.extend(both.iter().enumerate().map(|(at, (connection, _))| (at, connection.most_to_take())));
        while left > 0
            && let Some((at, there)) = open.pop_front()
        {
            let (connection, inlet) = &mut both[at];
            if intake.hand_over(connection, inlet, false)? {
                left -= 1;
                if there > 1 {
                    open.push_back((at, there - 1));
                }
            }
        }
        Ok(())
    }

    fn leave(&mut self) -> Vec<Traffic> {
        self.connections.iter_mut().map(InputQueue::leave).collect()
    }

    fn left(&mut self, left: Vec<Traffic>) {
        for (connection, left) in self.connections.iter().zip(left) {
            self.intake.left(connection, left);
        }
    }
}

impl<M: Message> Port for Inputs<M> {
    type Handle = InputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> InputHandle<M> {
        InputHandle::new(plan.add::<M>(name, PortKind::Inputs, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        let ends: Vec<Receiver<M>> = binder.ends(name)?;
        let connections: Vec<_> = ends.into_iter().map(|end| InputQueue::new(end, options.wanted)).collect();
        let (need, off) = binder.need(name, options.need);
        let keeps = connections.iter().any(InputQueue::reads_again);
        Ok(Self {
            connections,
            keeps,
            turn: 0,
            open: VecDeque::new(),
            intake: Intake::new(binder),
            waits: Waits::new(need, off),
        })
    }

    /// All connections are polled; the first one that lacks a message registers for it.
    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness {
        if let Some(waits) = &mut self.waits {
            return waits.poll(&mut self.connections, cx);
        }
        let mut all: Option<Readiness> = None;
        for connection in &mut self.connections {
            let waits = all.is_some_and(|all| !all.is_ready());
            let readiness = if waits { connection.look(cx) } else { connection.poll(cx) };
            if !readiness.is_never() {
                all = Some(all.map_or(readiness, |all| all | readiness));
            }
        }
        self.unless_over(all.unwrap_or(Readiness::NEVER))
    }

    #[inline]
    fn look(&mut self, cx: &mut Context<'_>) -> Readiness {
        if let Some(waits) = &mut self.waits {
            return waits.poll(&mut self.connections, cx);
        }
        let asked = self.connections.iter_mut().map(|connection| connection.look(cx));
        let open = asked.filter(|readiness| !readiness.is_never());
        let all = open.reduce(Readiness::bitor).unwrap_or(Readiness::NEVER);
        self.unless_over(all)
    }

    /// This port is the only reader: a message that was available still is, unless a hub drops messages.
    #[inline]
    fn claim(&mut self) -> bool {
        self.intake.begin();
        self.connections.iter_mut().all(InputQueue::claim)
    }

    fn unclaim(&mut self) {
        self.connections.iter_mut().for_each(InputQueue::release);
    }
}
