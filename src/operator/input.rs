//! [`Input`]: one hub's end, where messages come in.

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
    hub::Message,
    stream::Ticket,
};

/// Messages come in here.
pub struct Input<M: Message> {
    arrivals: Arrivals<M>,
    intake: Intake,
}

impl<M: Message> Input<M> {
    /// The next message. It is there: the port's condition said so before the operator ran. Of a hub that keeps the
    /// [latest](crate::Hub::latest) it is the newest there is, whether it was taken before or not.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it is taken once more than the condition promised and there is none; what went
    /// wrong on the way, if something did.
    pub fn take(&mut self) -> Result<M> {
        match self.intake.take(&mut self.arrivals, true)? {
            Some(message) => Ok(message),
            None => {
                let lacks = self.arrivals.lacks();
                Err(Error::new(ErrorKind::Usage, format!("{lacks}: `take` once a run, or use `try_take`")))
            }
        }
    }

    /// The next message that was not taken before, if there is one (and if it is done, or its event has passed, where the port waits for that).
    ///
    /// # Errors
    /// What went wrong on the way: a copy that failed, a device that was lost.
    #[inline]
    pub fn try_take(&mut self) -> Result<Option<M>> {
        self.intake.take(&mut self.arrivals, false)
    }

    /// Waits for the next message. `None` when the last sender is gone and nothing is left.
    ///
    /// # Errors
    /// As [`Input::try_take`].
    ///
    /// # Cancel safety
    /// A message is taken only as the future resolves: dropping it loses none.
    pub async fn recv(&mut self) -> Result<Option<M>> {
        let waiting = Wait(std::slice::from_mut(&mut self.arrivals));
        let there = poll_fn(|cx| match waiting.0[0].poll_new(cx) {
            Readiness::Wait | Readiness::WaitEvent => Poll::Pending,
            Readiness::Ready => Poll::Ready(true),
            Readiness::Never => Poll::Ready(false),
        });
        let there = there.await;
        drop(waiting);
        if there { self.try_take() } else { Ok(None) }
    }

    /// The streams that this run's messages came from, one entry a message, in the order of taking: the point in its
    /// sender's stream at which the message's own work is done; `None` from a sender without one. Looking changes nothing.
    ///
    /// For [`Stream::join`](crate::Stream::join), where a message brings what wakeline does not track (another library's pointer, say) onto a
    /// stream other than the operator's own: that one joins by itself as the message is taken. Envelopes need none of it.
    ///
    /// Of more than 1024 messages in one run the oldest are forgotten.
    pub fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.intake.streams()
    }

    /// Messages that can be taken now. Where the port waits for their work, those that are known to be done: the device
    /// is not asked.
    pub fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// True if none can be taken now.
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

impl<M: Message> AnyPort for Input<M> {
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
        self.arrivals.rest();
    }

    fn watch(&mut self, waker: &Waker) {
        self.arrivals.watch(waker);
    }
}

impl<M: Message> Port for Input<M> {
    type Handle = InputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> InputHandle<M> {
        InputHandle::new(plan.add::<M>(name, PortKind::Input, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        Ok(Self {
            arrivals: Arrivals::new(binder.end(name)?, options.wanted),
            intake: Intake::new(binder.lane.clone()),
        })
    }

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.arrivals.poll(cx)
    }

    #[inline]
    fn look(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.arrivals.look(cx)
    }

    /// This is the only reader: what was there still is, unless its hub drops messages.
    #[inline]
    fn claim(&mut self) -> bool {
        self.intake.begin();
        self.arrivals.claim()
    }

    fn unclaim(&mut self) {
        self.arrivals.unclaim();
    }
}
