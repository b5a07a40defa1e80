//! [`Inputs`]: one port for any number of connections.
//!
//! Each connection has a queue of its own, so each sender's order is kept and a slow one holds up nobody but whoever
//! waits for it. They are told apart by their number, counted from 0 in the order of connecting.
//!
//! ```text
//!   by default ready:  every connection that has not ended has a message
//!   a connection has ended, and what it left is taken:  it counts no longer
//!   all have, but for the newest that a hub keeps:  `Never`
//! ```

use std::{
    fmt,
    future::poll_fn,
    task::{Context, Poll, Waker},
};

use super::{
    arrivals::{Arrivals, Intake, Wait},
    handle::InputHandle,
    plan::{Binder, Plan, PortKind, PortOptions},
    ports::{AnyPort, InputPort, Port, Traffic},
};
use crate::{
    condition::Readiness,
    error::{Error, ErrorKind, Result},
    hub::{Message, receiver::Receiver},
    stream::Ticket,
};

/// Messages come in here from any number of outputs: its handle is given to [`Flow::connect`](crate::Flow::connect) once
/// for each.
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
    connections: Vec<Arrivals<M>>,
    /// The newest of one of them is taken again and again.
    keeps: bool,
    /// Where [`try_take_any`](Self::try_take_any) looks first: behind the one that it took from last.
    turn: usize,
    /// What [`take`](Self::take) gives out; kept for its room.
    taken: Vec<M>,
    intake: Intake,
}

impl<M: Message> Inputs<M> {
    /// One message of each connection that has not ended, in the order of connecting. They are there: the port's
    /// condition said so before the operator ran. What is left in the iterator when it is dropped is dropped with it.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage), and nothing is taken, if a connection has none, as where it is called twice in a
    /// run; what went wrong on the way.
    pub fn take(&mut self) -> Result<impl ExactSizeIterator<Item = M>> {
        for hub in &mut self.connections {
            hub.check()?;
            if !hub.has_one() && !hub.has_ended() {
                let lacks = hub.lacks();
                return Err(Error::new(ErrorKind::Usage, format!("{lacks}: `take` once a run, or use `try_take_any`")));
            }
        }
        self.taken.clear();
        for hub in self.connections.iter_mut().filter(|hub| !hub.has_ended()) {
            self.taken.extend(self.intake.take(hub, true)?);
        }
        Ok(self.taken.drain(..))
    }

    /// The next message of one connection, if there is one.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if there are not so many connections; what went wrong on the way.
    pub fn try_take_from(&mut self, connection: usize) -> Result<Option<M>> {
        let count = self.connections.len();
        let hub = self.connections.get_mut(connection).ok_or_else(|| {
            Error::new(ErrorKind::Usage, format!("connection {connection} of {count}: they are counted from 0"))
        })?;
        self.intake.take(hub, false)
    }

    /// The next message of whichever connection has one, and that one's number. They take turns: one that always has
    /// some does not keep the others waiting.
    ///
    /// # Errors
    /// What went wrong on the way: a copy that failed, a device that was lost.
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

    /// Waits for the next message of whichever connection, and gives that one's number too. `None` when all senders
    /// are gone and nothing is left.
    ///
    /// # Errors
    /// As [`Inputs::try_take_any`].
    ///
    /// # Cancel safety
    /// A message is taken only as the future resolves: dropping it loses none.
    pub async fn recv_any(&mut self) -> Result<Option<(usize, M)>> {
        let waiting = Wait(&mut self.connections);
        let there = poll_fn(|cx| {
            let mut ended = true;
            for connection in &mut *waiting.0 {
                match connection.poll_new(cx) {
                    Readiness::Ready => return Poll::Ready(true),
                    Readiness::Wait | Readiness::WaitEvent => ended = false,
                    Readiness::Never => {}
                }
            }
            if ended { Poll::Ready(false) } else { Poll::Pending }
        });
        let there = there.await;
        drop(waiting);
        if there { self.try_take_any() } else { Ok(None) }
    }

    /// The streams that this run's messages came from, one entry a message, in the order of taking. See
    /// [`Input::streams`](super::Input::streams).
    pub fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.intake.streams()
    }

    /// How many connections it has, those that have ended included.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Messages that can be taken now, of all connections together.
    pub fn len(&self) -> usize {
        self.connections.iter().map(Arrivals::len).sum()
    }

    /// Messages of one connection that can be taken now; 0 if there are not so many connections.
    pub fn len_of(&self, connection: usize) -> usize {
        self.connections.get(connection).map_or(0, Arrivals::len)
    }

    /// True if none can be taken now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<M: Message> Inputs<M> {
    /// What is kept of one that has ended goes on only with the others.
    #[inline]
    fn unless_over(&self, readiness: Readiness) -> Readiness {
        let over = self.keeps && readiness == Readiness::Ready && self.connections.iter().all(Arrivals::is_over);
        if over { Readiness::Never } else { readiness }
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

impl<M: Message> AnyPort for Inputs<M> {
    fn is_output(&self) -> bool {
        false
    }

    fn traffic(&self) -> Traffic {
        self.intake.traffic()
    }

    fn reader_gone(&self) -> bool {
        false
    }

    fn rest(&mut self) {
        self.connections.iter_mut().for_each(Arrivals::rest);
    }

    fn watch(&mut self, waker: &Waker) {
        self.connections.iter().for_each(|connection| connection.watch(waker));
    }
}

impl<M: Message> Port for Inputs<M> {
    type Handle = InputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> InputHandle<M> {
        InputHandle::new(plan.add::<M>(name, PortKind::Inputs, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        let ends: Vec<Receiver<M>> = binder.ends(name)?;
        let connections: Vec<_> = ends.into_iter().map(|end| Arrivals::new(end, options.wanted)).collect();
        let taken = Vec::with_capacity(connections.len());
        let keeps = connections.iter().any(Arrivals::reads_again);
        Ok(Self { connections, keeps, turn: 0, taken, intake: Intake::new(binder.lane.clone()) })
    }

    /// All are asked, the first that lacks a message is waited for.
    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness {
        let mut all = None;
        for connection in &mut self.connections {
            let waits = matches!(all, Some(Readiness::Wait | Readiness::WaitEvent));
            let readiness = if waits { connection.look(cx) } else { connection.poll(cx) };
            if readiness != Readiness::Never {
                all = Some(all.map_or(readiness, |all: Readiness| all.and(readiness)));
            }
        }
        self.unless_over(all.unwrap_or(Readiness::Never))
    }

    #[inline]
    fn look(&mut self, cx: &mut Context<'_>) -> Readiness {
        let asked = self.connections.iter_mut().map(|connection| connection.look(cx));
        let open = asked.filter(|readiness| *readiness != Readiness::Never);
        let all = open.reduce(Readiness::and).unwrap_or(Readiness::Never);
        self.unless_over(all)
    }

    /// This is the only reader: what was there still is, unless a hub drops messages.
    #[inline]
    fn claim(&mut self) -> bool {
        self.intake.begin();
        self.connections.iter_mut().all(Arrivals::claim)
    }

    fn unclaim(&mut self) {
        self.connections.iter().for_each(Arrivals::unclaim);
    }
}
