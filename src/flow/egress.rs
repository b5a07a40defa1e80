//! [`Egress`]: messages to whoever is outside.
//!
//! An operator like any other takes what comes, and hands it over to the handle by a queue of one. While that one is
//! full it waits for somebody outside, and so does the flow; while there is nothing to take it waits for other operators,
//! so that a flow that has gone quiet ends though an egress is still listened to. Envelopes are marked as
//! [`Abroad`](crate::hub::abroad): to drop one may still make a writer go on. The program that has the handle owns the flow:
//! the envelopes' errors name what is inside.
//!
//! Each run has a queue of its own. A flow may run again before the handle has come to what an earlier run left: those queues
//! are kept for it, in the order of the runs.
//!
//! ```text
//!   hub ──> [ operator ──> queue of one ] ──> handle
//!             └─ the flow's end: `None`       └─ dropped: the operator ends, and the end walks up from there
//! ```

use std::{
    borrow::Cow,
    collections::VecDeque,
    fmt,
    future::poll_fn,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::Stream;

use super::{Flow, starting::may_wait_for};
use crate::{
    condition::{Condition, Status},
    error::Result,
    hub::{
        Hub, Message,
        abroad::Boundary,
        queue::{Answer, Full, Queue},
    },
    operator::{Cx, Operator, OutputHandle, SinkPorts},
    sync::{Discarded, Mutex, WakerCell, discard_all, lock, logged},
};

impl Flow {
    /// A way out: what this output sends comes to the handle. It adds an operator of that name, which stands for whoever
    /// has the handle. See [`Egress`].
    ///
    /// ```
    /// use wakeline::{Flow, operator::source};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("count");
    /// let mut numbers = 1..=3_u32;
    /// let count = flow.add("count", source(move || std::future::ready(Ok(numbers.next()))));
    /// let mut numbers = flow.egress("numbers", count.output);
    /// let running = flow.spawn()?;
    /// let mut sum = 0;
    /// while let Some(number) = numbers.recv().await {
    ///     sum += number;
    /// }
    /// running.await?;
    /// assert_eq!(sum, 6);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn egress<M: Message>(&mut self, name: impl Into<String>, from: OutputHandle<M>) -> Egress<M> {
        self.egress_with(name, from, Hub::default())
    }

    /// As [`egress`](Self::egress), with a hub of another size.
    pub fn egress_with<M: Message>(&mut self, name: impl Into<String>, from: OutputHandle<M>, hub: Hub) -> Egress<M> {
        let exit = Arc::new(Exit::default());
        let queue = exit.queue();
        let added = self.add(name, Leave(exit.clone())).when(Outside { exit: exit.clone(), queue: queue.clone() });
        self.connect_with(from, added.input, hub);
        Egress { flow: self.id, exit, queue }
    }
}

/// Receives what a flow sends out of it, in any task or thread: a [`Stream`], and [`recv`](Self::recv). From
/// [`Flow::egress`].
///
/// The flow waits for whoever has it, as for a slow operator, and ends with messages untaken only if it fails or is aborted.
/// It also waits for an [`Envelope`](crate::Envelope) that was received to be dropped, where it needs that to go on: also while
/// that passes through another flow. That holds for the envelopes that a message [shows](Message::envelopes): one within an
/// [`Arc`] or a [`Host`](crate::Host) is unknown to the flow, which may
/// [stall](crate::ErrorKind::Stalled) while the envelope is outside.
///
/// The program that has the handle owns the flow. So the errors of an envelope that was received, that of a lost device say,
/// name what failed inside; those of a [service's](crate::Service) response do not.
///
/// Dropping it says that no more messages are wanted, and the flow ends from there upwards. `None` is the end of what comes
/// here, also after a failure: what that was [`Running`](crate::Running) says. Of a flow that runs again, the messages of a
/// later run follow those of the earlier ones: each run may leave one message here.
pub struct Egress<M: Message> {
    /// Its number.
    flow: u64,
    exit: Arc<Exit<M>>,
    /// Of the run that it listens to.
    queue: Arc<Queue<M>>,
}

/// What the handle and the operator share.
struct Exit<M> {
    state: Mutex<State<M>>,
    /// The operator, for when the handle is dropped.
    owner: WakerCell,
}

struct State<M> {
    /// Of the present run, or the next.
    queue: Arc<Queue<M>>,
    /// Of earlier runs, oldest first: what the handle has not come to.
    earlier: VecDeque<Arc<Queue<M>>>,
    /// The handle is.
    dropped: bool,
}

impl<M: 'static> Default for Exit<M> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                queue: Arc::new(Queue::new(1, Full::Hold)),
                earlier: VecDeque::new(),
                dropped: false,
            }),
            owner: WakerCell::new(),
        }
    }
}

impl<M: 'static> Exit<M> {
    fn queue(&self) -> Arc<Queue<M>> {
        lock(&self.state).queue.clone()
    }

    /// A run begins: what was closed at the end of another is kept for the handle.
    fn open(&self) -> Arc<Queue<M>> {
        let mut empty = None;
        let mut state = lock(&self.state);
        if state.queue.writer_gone() && !state.dropped {
            let old = mem::replace(&mut state.queue, Arc::new(Queue::new(1, Full::Hold)));
            if old.len() > 0 {
                state.earlier.push_back(old);
            } else {
                empty = Some(old);
            }
        }
        let queue = state.queue.clone();
        drop(state);
        // Its wakers go without the lock.
        drop(empty);
        queue
    }

    /// The queue that comes after this one, which has ended: that of the present run, or the next, if nothing is left of
    /// earlier ones.
    fn next(&self, queue: &Arc<Queue<M>>) -> Arc<Queue<M>> {
        let mut state = lock(&self.state);
        // The handle has come to it while its run was the present one.
        let is_first = state.earlier.front().is_some_and(|earlier| Arc::ptr_eq(earlier, queue));
        let come_to = if is_first { state.earlier.pop_front() } else { None };
        let next = state.earlier.pop_front().unwrap_or_else(|| state.queue.clone());
        drop(state);
        drop(come_to);
        next
    }
}

impl<M: Message> Egress<M> {
    /// The next message, once there is one. `None` when nothing more will come; and, with a warning in the log, in the `start` of an
    /// operator of the same flow, which runs once all operators have started.
    ///
    /// # Cancel safety
    /// A message is taken only as the future resolves: dropping it loses none.
    pub async fn recv(&mut self) -> Option<M> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// The next message, if it has come out already.
    pub fn try_recv(&mut self) -> Option<M> {
        loop {
            let mut place = None;
            self.queue.take(&mut place);
            if place.is_some() || !self.queue.has_ended() || !self.listen_on() {
                return place;
            }
        }
    }

    /// The run that it has listened to has ended. False if there is no other yet.
    fn listen_on(&mut self) -> bool {
        let next = self.exit.next(&self.queue);
        let goes_on = !Arc::ptr_eq(&next, &self.queue);
        self.queue = next;
        goes_on
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<M>> {
        loop {
            match self.queue.poll_message(cx.waker()) {
                Answer::Yes => return Poll::Ready(self.try_recv()),
                Answer::Wait => {
                    let Err(error) = may_wait_for(self.flow) else { return Poll::Pending };
                    logged(|| tracing::warn!(%error, "nothing comes out of a flow before it runs"));
                    return Poll::Ready(None);
                }
                Answer::Never => {}
            }
            if !self.listen_on() {
                return Poll::Ready(None);
            }
        }
    }
}

impl<M: Message> Stream for Egress<M> {
    type Item = M;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<M>> {
        self.poll_recv(cx)
    }
}

impl<M: Message> Drop for Egress<M> {
    fn drop(&mut self) {
        let mut state = lock(&self.exit.state);
        state.dropped = true;
        let (queue, earlier) = (state.queue.clone(), mem::take(&mut state.earlier));
        drop(state);
        discard_all(queue.close_reader());
        earlier.iter().for_each(|queue| discard_all(queue.close_reader()));
        discard_all(self.queue.close_reader());
        self.exit.owner.wake();
    }
}

impl<M: Message> fmt::Debug for Egress<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.exit.state);
        let mut others: Vec<_> = state.earlier.iter().chain([&state.queue]).cloned().collect();
        drop(state);
        others.retain(|queue| !Arc::ptr_eq(queue, &self.queue));
        let messages = others.iter().map(|queue| queue.len()).sum::<usize>() + self.queue.len();
        f.debug_struct("Egress").field("messages", &messages).finish_non_exhaustive()
    }
}

/// The operator.
struct Leave<M: Message>(Arc<Exit<M>>);

/// Its condition: room for one more.
struct Outside<M: Message> {
    exit: Arc<Exit<M>>,
    queue: Arc<Queue<M>>,
}

impl<M: Message> Condition for Outside<M> {
    fn start(&mut self) {
        self.queue = self.exit.open();
    }

    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        self.exit.owner.register(cx.waker());
        match self.queue.poll_room(cx.waker()) {
            Answer::Yes => Status::Ready,
            Answer::Wait => Status::WaitEvent,
            Answer::Never => Status::Never,
        }
    }

    fn describe(&self) -> Cow<'static, str> {
        "somebody outside to take what has come out".into()
    }
}

/// The end of a run, however it ends.
struct Closing<'a, M: 'static>(&'a Queue<M>);

impl<M: 'static> Drop for Closing<'_, M> {
    fn drop(&mut self) {
        self.0.close_writer();
    }
}

impl<M: Message> Operator for Leave<M> {
    type Ports = SinkPorts<M>;

    async fn run(&mut self, ports: &mut SinkPorts<M>, cx: &mut Cx) -> Result<()> {
        let queue = self.0.queue();
        let _closing = Closing(&queue);
        let boundary = Boundary::of_program(cx.node().rest().clone());
        while cx.ready(ports).await {
            let mut message = Discarded::new(ports.input.take()?);
            if let Some(message) = message.get_mut() {
                boundary.mark(message);
            }
            // Once the handle is dropped, messages are dropped, too.
            let _ = self.0.queue().push(message.place(), true);
        }
        Ok(())
    }

    /// It has no runs.
    async fn compute(&mut self, _ports: &mut SinkPorts<M>, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    /// Also of a flow that never came to run.
    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.0.queue().close_writer();
        Ok(())
    }
}

/// The flow was dropped, and never ran.
impl<M: Message> Drop for Leave<M> {
    fn drop(&mut self) {
        self.0.queue().close_writer();
    }
}
