//! [`Egress`]: messages that leave a flow.
//!
//! An operator takes each message and sends it to the handle through a queue of one. While that queue is full, the
//! operator waits for the program outside, and the flow waits with it. While there is no message, it waits for other
//! operators, so that an idle flow ends even if an egress is still polled. Envelopes are guarded as [outside the
//! flow](crate::hub::external_guard), since dropping one may let a writer continue. The program that holds the handle
//! owns the flow, so the envelopes' errors contain the flow's names.
//!
//! Each run has its own queue. The queues of earlier runs are kept until the handle has taken their messages, in the
//! order of the runs.
//!
//! ```text
//!   hub ──> [ operator ──> queue of one ] ──> handle
//!             └─ the flow has ended: `None`   └─ dropped: the operator ends, and then those upstream of it
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
        HubOptions, Message,
        end_waker::Interest,
        external_guard::Boundary,
        queue::{Answer, Queue},
        when_full::WhenFull,
    },
    operator::{Cx, Operator, OutputHandle, SinkPorts},
    sync::{DiscardOnDrop, Mutex, WakerCell, discard_all, lock, logged},
};

impl Flow {
    /// Adds an operator called `name` that forwards the messages of an output to the returned handle. See [`Egress`].
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
        self.egress_with(name, from, HubOptions::default())
    }

    /// Like [`egress`](Self::egress), with this kind of hub between the output and the egress.
    pub fn egress_with<M: Message>(
        &mut self,
        name: impl Into<String>,
        from: OutputHandle<M>,
        hub: HubOptions,
    ) -> Egress<M> {
        let exit = Arc::new(EgressShared::default());
        let queue = exit.queue();
        let added = self
            .add(name, EgressOperator(exit.clone()))
            .when(RoomCondition { exit: exit.clone(), queue: queue.clone() });
        self.connect_with(from, added.input, hub);
        Egress { flow: self.id, exit, queue }
    }
}

/// Receives the messages that a flow sends out, in any task or thread, as a [`Stream`][stream] or with
/// [`recv`](Self::recv). Created by [`Flow::egress`].
///
/// The flow waits for the handle as for a slow operator. It ends with messages left in the egress only if it fails or
/// is aborted. If it needs a received [`Envelope`](crate::Envelope) to continue, it also waits until that is dropped,
/// even while the envelope passes through another flow. This holds for the envelopes that a message
/// [shows](Message::envelopes): one within an [`Arc`] or a [`Host`](crate::Host) is unknown to the flow, which may
/// [stall](crate::ErrorKind::Stalled) while it is outside.
///
/// The program that has the handle owns the flow. The errors of a received envelope, such as the loss of its device,
/// therefore name the part of the flow that failed; those of a [service's](crate::Service) response do not.
///
/// Dropping the handle ends the flow from there upstream. `None` marks the end of the messages, also after a failure;
/// [`Running`](crate::Running) has the error. If a flow runs again, the messages of a later run follow those of the
/// earlier ones. Each run may leave one message in the egress.
///
/// [stream]: https://docs.rs/futures-core/0.3/futures_core/stream/trait.Stream.html
pub struct Egress<M: Message> {
    flow: u64,
    exit: Arc<EgressShared<M>>,
    queue: Arc<Queue<M>>,
}

struct EgressShared<M> {
    state: Mutex<State<M>>,
    /// Wakes the operator when the handle is dropped.
    owner: WakerCell,
}

struct State<M> {
    /// The queue of the current run, or the next.
    queue: Arc<Queue<M>>,
    /// The queues of earlier runs that the handle has not taken yet, oldest first.
    earlier: VecDeque<Arc<Queue<M>>>,
    dropped: bool,
}

impl<M: 'static> Default for EgressShared<M> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                queue: Arc::new(Queue::new(1, WhenFull::Block)),
                earlier: VecDeque::new(),
                dropped: false,
            }),
            owner: WakerCell::new(),
        }
    }
}

impl<M: 'static> EgressShared<M> {
    fn queue(&self) -> Arc<Queue<M>> {
        lock(&self.state).queue.clone()
    }

    /// Begins a run. A queue that an earlier run has closed is kept for the handle.
    fn open(&self) -> Arc<Queue<M>> {
        let mut empty = None;
        let mut state = lock(&self.state);
        if state.queue.writer_gone() && !state.dropped {
            let old = mem::replace(&mut state.queue, Arc::new(Queue::new(1, WhenFull::Block)));
            if old.len() > 0 {
                state.earlier.push_back(old);
            } else {
                empty = Some(old);
            }
        }
        let queue = state.queue.clone();
        drop(state);
        // Its wakers are dropped with no lock held.
        drop(empty);
        queue
    }

    /// The queue after this one, which has ended: the oldest of earlier runs, otherwise that of the current or next
    /// run.
    fn next(&self, queue: &Arc<Queue<M>>) -> Arc<Queue<M>> {
        let mut state = lock(&self.state);
        // The handle received from this queue while its run was the current one.
        let is_first = state.earlier.front().is_some_and(|earlier| Arc::ptr_eq(earlier, queue));
        let come_to = if is_first { state.earlier.pop_front() } else { None };
        let next = state.earlier.pop_front().unwrap_or_else(|| state.queue.clone());
        drop(state);
        drop(come_to);
        next
    }
}

impl<M: Message> Egress<M> {
    /// Waits for the next message. `None` when there will be no more, and also, with a warning in the log, in the
    /// `start` of an operator of the same flow, which runs only once all operators have started.
    ///
    /// # Cancel safety
    /// A message is taken only when the future resolves.
    pub async fn recv(&mut self) -> Option<M> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Returns the next message if it is available now.
    pub fn try_recv(&mut self) -> Option<M> {
        loop {
            let mut place = None;
            self.queue.take(&mut place);
            if place.is_some() || !self.queue.has_ended() || !self.listen_on() {
                return place;
            }
        }
    }

    /// Moves on to the queue of the next run. False if there is none yet.
    fn listen_on(&mut self) -> bool {
        let next = self.exit.next(&self.queue);
        let goes_on = !Arc::ptr_eq(&next, &self.queue);
        self.queue = next;
        goes_on
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<M>> {
        loop {
            match self.queue.poll_message(Interest::Change, cx.waker()) {
                Answer::Yes => return Poll::Ready(self.try_recv()),
                Answer::Wait => {
                    let Err(error) = may_wait_for(self.flow) else { return Poll::Pending };
                    logged(
                        || tracing::warn!(error = %format_args!("{error:#}"), "an egress has no messages before its flow runs"),
                    );
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

struct EgressOperator<M: Message>(Arc<EgressShared<M>>);

/// The operator's condition: room for one message.
struct RoomCondition<M: Message> {
    exit: Arc<EgressShared<M>>,
    queue: Arc<Queue<M>>,
}

impl<M: Message> Condition for RoomCondition<M> {
    fn start(&mut self) {
        self.queue = self.exit.open();
    }

    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        self.exit.owner.register(cx.waker());
        match self.queue.poll_room(Interest::Change, cx.waker()) {
            Answer::Yes => Status::Ready,
            Answer::Wait => Status::WaitEvent,
            Answer::Never => Status::Never,
        }
    }

    fn describe(&self) -> Cow<'static, str> {
        "the egress handle to take a message".into()
    }
}

/// Closes the queue when a run ends, in whatever way.
struct CloseQueueOnDrop<'a, M: 'static>(&'a Queue<M>);

impl<M: 'static> Drop for CloseQueueOnDrop<'_, M> {
    fn drop(&mut self) {
        self.0.close_writer();
    }
}

impl<M: Message> Operator for EgressOperator<M> {
    type Ports = SinkPorts<M>;

    async fn run(&mut self, ports: &mut SinkPorts<M>, cx: &mut Cx) -> Result<()> {
        let queue = self.0.queue();
        let _closing = CloseQueueOnDrop(&queue);
        cx.operator_task().status_cell().set_is_egress();
        let boundary = Boundary::of_program(cx.operator_task().activity().clone());
        while cx.ready(ports).await {
            let mut message = DiscardOnDrop::new(ports.input.take()?);
            if let Some(message) = message.get_mut() {
                boundary.guard(message);
            }
            // Drops the message once the handle is dropped.
            let _ = self.0.queue().push(message.place(), true);
        }
        Ok(())
    }

    /// Never called: `run` is overridden.
    async fn compute(&mut self, _ports: &mut SinkPorts<M>, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    /// For a flow whose operators never ran.
    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.0.queue().close_writer();
        Ok(())
    }
}

/// For a flow that was dropped before it ran.
impl<M: Message> Drop for EgressOperator<M> {
    fn drop(&mut self) {
        self.0.queue().close_writer();
    }
}
