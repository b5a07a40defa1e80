//! [`Input`]: the receiving end of one hub.

use std::{
    any::Any,
    fmt,
    future::poll_fn,
    slice,
    task::{Context, Waker},
};

use tokio::time::Instant;

use super::{
    edge::{self, Entry, Passing},
    handle::InputHandle,
    input_queue::{self, InputQueue, Intake, Wait, Waits},
    plan::{Binder, Plan, PortKind, PortOptions},
    ports::{AnyPort, InputPort, Port, Traffic},
};
use crate::{
    condition::{Counted, PortState, Readiness},
    error::{Error, ErrorKind, Result},
    hub::{Message, RawEnvelope},
    mutants::{self, Mutant},
    stream::Ticket,
    sync::Discarded,
};

/// A port that receives messages.
pub struct Input<M: Message> {
    arrivals: InputQueue<M>,
    intake: Intake<M>,
    /// `None`: the port waits for one message.
    waits: Option<Box<Waits>>,
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
        self.intake.take_into(place.place(), &mut self.arrivals, true)?;
        place.take().map(|parcel| parcel.message).ok_or_else(|| self.nothing())
    }

    #[cold]
    fn nothing(&self) -> Error {
        let lacks = self.arrivals.lacks();
        Error::new(ErrorKind::Usage, format!("{lacks}: `take` once a run, or use `try_take`"))
    }

    /// Takes the next message that was not taken before, if one is available (and, where the port waits for that, if
    /// its work is done or its event has passed).
    ///
    /// # Errors
    /// The error of a failed transfer: a copy that failed, a device that was lost.
    #[inline]
    pub fn try_take(&mut self) -> Result<Option<M>> {
        self.intake.take(&mut self.arrivals, false)
    }

    /// Takes the messages that the port's condition promised: as many as `at_least` or `batch` says, and fewer after a
    /// timeout or once the last sender is dropped. Without either attribute, takes all messages that are available at
    /// the call; messages sent meanwhile stay for the next batch.
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
    pub fn take_batch(&mut self) -> Result<impl ExactSizeIterator<Item = M>> {
        let left = self.waits.as_ref().map_or(usize::MAX, |waits| waits.batch());
        let mut left = left.min(self.arrivals.most_to_take());
        // The first may be taken again: a latest-value hub yields its value even if there is no newer one.
        let (arrivals, mut again) = (&mut self.arrivals, true);
        self.intake.take_all(|intake| {
            if left == 0 {
                return Ok(None);
            }
            left -= 1;
            let first = std::mem::take(&mut again);
            let taken = intake.take(arrivals, first);
            if left == 0 && mutants::is(Mutant::ShortBatch) { Ok(None) } else { taken }
        })
    }

    /// True once all senders are dropped and no message is left.
    pub fn has_ended(&self) -> bool {
        self.arrivals.has_ended()
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
        async move {
            self.intake.release_unneeded();
            loop {
                let waiting = Wait(slice::from_mut(&mut self.arrivals));
                let (intake, arrivals) = (&mut self.intake, &mut waiting.0[0]);
                let there = poll_fn(move |task| intake.poll_received(task, |task| arrivals.poll_new(task))).await;
                drop(waiting);
                let taken = if there { self.try_take()? } else { return Ok(None) };
                // Otherwise the hub has dropped the message since.
                if taken.is_some() {
                    return Ok(taken);
                }
            }
        }
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

    /// The number of messages that can be taken now. Where the port waits for their work, counts those that are known
    /// to be done, without a query to the device.
    pub fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// True if no message can be taken now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<M: Message> fmt::Debug for Input<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Input").field(&self.arrivals).finish()
    }
}

impl<M: Message> InputPort for Input<M> {
    const EVENTS: &'static [&'static str] = M::EVENTS;
}

impl<M: Message> PortState for Input<M> {
    fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        self.arrivals.poll_count(most, cx)
    }

    fn poll_promised(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        self.arrivals.poll_promised(most, cx)
    }

    fn poll_room(&mut self, _count: usize, _cx: &mut Context<'_>) -> Readiness {
        Readiness::READY
    }

    fn oldest(&self) -> Option<Instant> {
        self.arrivals.oldest()
    }
}

impl<M: Message> AnyPort for Input<M> {
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

    fn has_ended(&self) -> bool {
        self.arrivals.has_ended()
    }

    fn traffic(&self) -> Traffic {
        self.intake.traffic()
    }

    fn allows_runs(&mut self, cx: &mut Context<'_>) -> bool {
        input_queue::allows_runs(slice::from_mut(&mut self.arrivals), self.waits.as_deref(), cx)
    }

    fn reader_gone(&self) -> bool {
        false
    }

    fn release_unneeded(&mut self) {
        self.arrivals.release();
    }

    fn rest(&mut self) {
        self.arrivals.release();
        self.arrivals.rest();
        self.waits.iter_mut().for_each(|waits| waits.rest());
    }

    fn watch(&mut self, waker: &Waker) {
        self.arrivals.watch(waker);
    }

    fn spread(&mut self) -> Result<(Vec<Box<dyn Any + Send>>, Option<Box<dyn Any + Send>>)> {
        let (end, inlet) = self.arrivals.spread();
        Ok((vec![Box::new(end)], Some(Box::new(inlet))))
    }

    fn hand_over(&mut self, inlet: &mut (dyn Any + Send)) -> Result<()> {
        let Some(inlet) = inlet.downcast_mut() else { return Ok(()) };
        let most = self.waits.as_ref().map_or(1, |waits| waits.batch());
        for at in 0..most.min(self.arrivals.most_to_take()) {
            if !self.intake.hand_over(&mut self.arrivals, inlet, at == 0)? {
                break;
            }
        }
        Ok(())
    }

    fn entry(&mut self) -> Option<&mut dyn Entry> {
        if M::IS_ENVELOPE { Some(self) } else { None }
    }

    fn leave(&mut self) -> Vec<Traffic> {
        vec![self.arrivals.leave()]
    }

    fn left(&mut self, left: Vec<Traffic>) {
        left.into_iter().for_each(|left| self.intake.left(&self.arrivals, left));
    }
}

impl<M: Message> Entry for Input<M> {
    fn first(&mut self) -> Result<Option<usize>> {
        edge::first(&mut self.arrivals)
    }

    fn take(&mut self, passing: &Passing) -> Result<RawEnvelope> {
        edge::take(&mut self.intake, &mut self.arrivals, passing)
    }

    fn feed(&mut self, envelope: RawEnvelope) -> Result<Box<dyn Any + Send>> {
        edge::feed(&self.arrivals, envelope)
    }
}

impl<M: Message> Port for Input<M> {
    type Handle = InputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> InputHandle<M> {
        InputHandle::new(plan.add::<M>(name, PortKind::Input, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        let (need, off) = binder.need(name, options.need);
        let arrivals = InputQueue::new(binder.end(name)?, options.wanted);
        Ok(Self { arrivals, intake: Intake::new(binder), waits: Waits::new(need, off) })
    }

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness {
        match &mut self.waits {
            None => self.arrivals.poll(cx),
            Some(waits) => waits.poll(slice::from_mut(&mut self.arrivals), cx),
        }
    }

    #[inline]
    fn look(&mut self, cx: &mut Context<'_>) -> Readiness {
        match &mut self.waits {
            None => self.arrivals.look(cx),
            Some(waits) => waits.poll(slice::from_mut(&mut self.arrivals), cx),
        }
    }

    /// This port is the only reader: a message that was available still is, unless its hub drops messages.
    #[inline]
    fn claim(&mut self) -> bool {
        self.intake.begin();
        self.arrivals.claim()
    }

    fn unclaim(&mut self) {
        self.arrivals.release();
    }
}
