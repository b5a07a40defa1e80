//! [`Lent`]: a port that others than its operator use while it runs; and [`Cx::attend`], how that operator spends its time.
//!
//! An operator whose messages come from outside of the flow has no runs: whoever is outside sends by the port itself,
//! on a thread of its own, and no task stands in between. The operator is there for the port's sake. It says
//! how long the flow has to count on messages, and when it ends the port is closed, whatever is done with it outside.

use std::{
    any::Any,
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    Cx,
    plan::{Binder, Plan, PortOptions},
    ports::{AnyPort, InputPort, OutputPort, Port, Traffic},
};
use crate::{
    condition::{Counted, PortState, Readiness, Status},
    error::{Error, ErrorKind, Result},
    sync::{Deferred, Level, Mutex, lock},
};

/// A port that is lent. Its operator does not wait at it.
pub(crate) struct Lent<P>(Loan<P>);

/// Whoever has this may use the port, until the operator takes it back.
pub(crate) struct Loan<P>(Arc<Mutex<Option<P>>>);

impl<P> Lent<P> {
    pub(crate) fn lend(&self) -> Loan<P> {
        Loan(self.0.0.clone())
    }
}

impl<P> Loan<P> {
    /// Uses the port. `None` if it was taken back.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut P) -> R) -> Option<R> {
        let _later = Deferred::new();
        lock(&self.0).as_mut().map(act)
    }
}

impl<P> Lent<P> {
    /// Uses the port with no lock held: for its operator, where no other task uses it. It goes back also if `act` panics.
    pub(crate) fn apart<R>(&self, act: impl FnOnce(&mut P) -> R) -> Option<R> {
        struct Back<'a, P>(&'a Mutex<Option<P>>, Option<P>);

        impl<P> Drop for Back<'_, P> {
            fn drop(&mut self) {
                *lock(self.0) = self.1.take();
            }
        }

        let place = &*self.0.0;
        // Released before `act` runs.
        let port = lock(place).take();
        Back(place, port).1.as_mut().map(act)
    }
}

/// Taken back.
impl<P> Drop for Lent<P> {
    fn drop(&mut self) {
        // Closed when no lock is held any more.
        let _port = lock(&self.0.0).take();
    }
}

impl<P: PortState> PortState for Lent<P> {
    fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        self.0.with(|port| port.poll_count(most, cx)).unwrap_or(Counted::NONE)
    }

    fn poll_room(&mut self, count: usize, cx: &mut Context<'_>) -> Readiness {
        self.0.with(|port| port.poll_room(count, cx)).unwrap_or(Readiness::NEVER)
    }

    fn oldest(&self) -> Option<Instant> {
        self.0.with(|port| port.oldest()).flatten()
    }
}

impl<P: AnyPort> AnyPort for Lent<P> {
    fn state(&mut self) -> &mut dyn PortState {
        self
    }

    fn is_output(&self) -> bool {
        self.0.with(|port| port.is_output()).unwrap_or_default()
    }

    fn traffic(&self) -> Traffic {
        self.0.with(|port| port.traffic()).unwrap_or_default()
    }

    fn reader_gone(&self) -> bool {
        self.0.with(|port| port.reader_gone()).unwrap_or_default()
    }

    fn watch(&mut self, waker: &Waker) {
        self.0.with(|port| port.watch(waker));
    }

    fn spread(&mut self) -> Result<(Vec<Box<dyn Any + Send>>, Option<Box<dyn Any + Send>>)> {
        Err(Error::new(ErrorKind::Usage, "a port that is used from outside of the flow has no workers"))
    }
}

impl<P: Port> Port for Lent<P> {
    type Handle = P::Handle;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> P::Handle {
        P::declare(plan, name, options.lent())
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        Ok(Self(Loan(Arc::new(Mutex::at(Level::Port, Some(P::bind(binder, name, options.optional())?))))))
    }

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Readiness {
        Readiness::READY
    }

    fn look(&mut self, _cx: &mut Context<'_>) -> Readiness {
        Readiness::READY
    }

    fn claim(&mut self) -> bool {
        true
    }

    fn unclaim(&mut self) {}
}

impl<P: InputPort> InputPort for Lent<P> {
    const EVENTS: &'static [&'static str] = P::EVENTS;
}

impl<P: OutputPort> OutputPort for Lent<P> {}

impl<P> fmt::Debug for Lent<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lent")
    }
}

impl Cx {
    /// Asks again and again, until the answer is [`Never`](Readiness::NEVER). While it is
    /// [`Wait`](Readiness::WAIT), the operator waits for others as it does between two runs, and the flow may be at
    /// rest; otherwise not. `ask` is also told whether the flow wants the operator to end.
    pub(crate) async fn attend(
        &mut self,
        mut ask: impl FnMut(&mut Context<'_>, bool) -> Result<Readiness>,
    ) -> Result<()> {
        let node = self.node().clone();
        // Its ports are not declared to wait: while it does, it waits at all of them.
        node.shown().set_has_workers();
        let mut told = None;
        poll_fn(|task| {
            let ending = node.is_finishing();
            if node.is_paused() && !ending {
                node.show(Status::WaitEvent);
                return Poll::Pending;
            }
            node.resume();
            let asked = ask(task, ending)?;
            if asked.is_never() {
                return Poll::Ready(Ok(()));
            }
            if told.replace(asked) != Some(asked) {
                let outside = (!asked.needs_others()).then(|| "somebody outside of the flow".into());
                node.shown().set_lacks(outside.into_iter().collect(), false);
            }
            node.show(asked.status(None));
            if asked.needs_others() {
                node.park();
            }
            Poll::Pending
        })
        .await
    }
}
