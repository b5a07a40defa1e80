//! [`SharedPort`]: a port that code outside its operator uses while the operator runs; and [`Cx::attend`], the loop of such
//! an operator.
//!
//! An operator whose messages come from outside of the flow has no runs: the external caller sends through the port
//! itself, on its own thread, without a task in between. The operator exists to hold the port. It reports how long the
//! flow must expect messages, and when it ends the port is closed, even if it is in use outside.

use std::{
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    Cx,
    plan::{Binder, Plan, PortOptions},
    ports::{AnyPort, HandleVisitor, InputPort, OutputPort, Port, PortStats},
};
use crate::{
    condition::{Counted, PortState, Readiness, Status},
    error::Result,
    sync::{Deferred, Level, Mutex, lock},
};

/// A shared port. Its operator does not wait at it.
pub(crate) struct SharedPort<P>(PortRef<P>);

/// A reference through which the port can be used until the operator takes it back.
pub(crate) struct PortRef<P>(Arc<Mutex<Option<P>>>);

impl<P> SharedPort<P> {
    pub(crate) fn share(&self) -> PortRef<P> {
        PortRef(self.0.0.clone())
    }
}

impl<P> PortRef<P> {
    /// Uses the port. `None` if it was taken back.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut P) -> R) -> Option<R> {
        let _later = Deferred::new();
        lock(&self.0).as_mut().map(act)
    }
}

impl<P> SharedPort<P> {
    /// Uses the port with no lock held: for its operator, where no other task uses it. The port is returned even if
    /// `act` panics.
    pub(crate) fn apart<R>(&self, act: impl FnOnce(&mut P) -> R) -> Option<R> {
        struct Back<'a, P>(&'a Mutex<Option<P>>, Option<P>);

        impl<P> Drop for Back<'_, P> {
            fn drop(&mut self) {
                *lock(self.0) = self.1.take();
            }
        }

        let place = &*self.0.0;
        // The lock is released before `act` runs.
        let port = lock(place).take();
        Back(place, port).1.as_mut().map(act)
    }
}

impl<P> Drop for SharedPort<P> {
    fn drop(&mut self) {
        // The port is closed after the lock is released.
        let _port = lock(&self.0.0).take();
    }
}

impl<P: PortState> PortState for SharedPort<P> {
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

impl<P: AnyPort> AnyPort for SharedPort<P> {
    fn is_output(&self) -> bool {
        self.0.with(|port| port.is_output()).unwrap_or_default()
    }

    fn has_ended(&self) -> bool {
        self.0.with(|port| port.has_ended()).unwrap_or_default()
    }

    fn stats(&self) -> PortStats {
        self.0.with(|port| port.stats()).unwrap_or_default()
    }

    fn watch(&mut self, waker: &Waker) {
        self.0.with(|port| port.watch(waker));
    }
}

impl<P: Port> Port for SharedPort<P> {
    type Handle = P::Handle;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> P::Handle {
        P::declare(plan, name, options.shared())
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        Ok(Self(PortRef(Arc::new(Mutex::at(Level::Port, Some(P::bind(binder, name, options.optional())?))))))
    }

    fn poll_ready(&mut self, _before: Readiness, _cx: &mut Context<'_>) -> Readiness {
        Readiness::READY
    }

    fn claim(&mut self) -> bool {
        true
    }

    fn give_back(&mut self) {}

    fn visit_handle(handle: P::Handle, visitor: &mut impl HandleVisitor) {
        P::visit_handle(handle, visitor);
    }
}

impl<P: InputPort> InputPort for SharedPort<P> {
    const EVENTS: &'static [&'static str] = P::EVENTS;
}

impl<P: OutputPort> OutputPort for SharedPort<P> {}

impl<P> fmt::Debug for SharedPort<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedPort")
    }
}

impl Cx {
    /// Calls `ask` at every poll, until it returns [`Never`](Readiness::NEVER). While it returns
    /// [`Wait`](Readiness::WAIT), the operator waits for others as it does between two runs, and the flow may be idle;
    /// otherwise the flow is not idle. The second argument of `ask` is true once the flow wants the operator to end.
    pub(crate) async fn attend(
        &mut self,
        mut ask: impl FnMut(&mut Context<'_>, bool) -> Result<Readiness>,
    ) -> Result<()> {
        let node = self.operator_task().clone();
        // Its ports are not declared to wait: while the operator waits, it waits at all of them.
        node.status_cell().set_has_workers();
        let mut status = None;
        poll_fn(|task| {
            let ending = node.is_finishing();
            if node.is_paused() && !ending {
                node.publish(Status::WaitEvent);
                return Poll::Pending;
            }
            node.resume();
            let readiness = ask(task, ending)?;
            if readiness.is_never() {
                return Poll::Ready(Ok(()));
            }
            if status.replace(readiness) != Some(readiness) {
                let outside = (!readiness.needs_others()).then(|| "a caller outside of the flow".into());
                node.status_cell().set_lacks(outside.into_iter().collect(), false);
            }
            node.publish(readiness.status(None));
            if readiness.needs_others() {
                node.park();
            }
            Poll::Pending
        })
        .await
    }
}
