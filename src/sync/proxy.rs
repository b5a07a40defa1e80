//! [`ProxyWaker`]: given to other libraries' primitives in place of a user's waker.
//!
//! tokio's semaphore wakes under its lock when it is closed, and after a waker that panics it does not wake the others.
//! A proxy never panics, and if a [`Deferred`](super::Deferred) scope is open it wakes the user's waker after the
//! scope.

use std::{
    future::poll_fn,
    pin::pin,
    sync::Arc,
    task::{Context, Wake, Waker},
};

use super::WakerCell;

/// A waker that forwards to the waker of the task that polled it last.
#[derive(Debug)]
pub(crate) struct ProxyWaker {
    cell: Arc<Proxied>,
    waker: Waker,
}

#[derive(Debug)]
struct Proxied(WakerCell);

impl ProxyWaker {
    pub(crate) fn new() -> Self {
        let cell = Arc::new(Proxied(WakerCell::new()));
        Self { waker: Waker::from(cell.clone()), cell }
    }

    /// Registers the task's waker and returns the context to poll with in place of the task's.
    pub(crate) fn stand_in(&self, task: &Context<'_>) -> Context<'_> {
        self.cell.0.register(task.waker());
        Context::from_waker(&self.waker)
    }
}

impl Wake for Proxied {
    fn wake(self: Arc<Self>) {
        self.0.wake();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake();
    }
}

/// Runs a future with a proxy in place of the task's waker.
pub(crate) async fn proxied<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let proxy = ProxyWaker::new();
    poll_fn(|task| future.as_mut().poll(&mut proxy.stand_in(task))).await
}
