//! A panic of user code, as an error.

use std::{
    any::Any,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;

use super::{Error, ErrorKind, Result};
use crate::sync::logged;

/// The message of a panic. The payload, which may be of any type, is dropped here; a payload whose drop panics is
/// forgotten.
pub(crate) fn panic_message(panic: Box<dyn Any + Send>) -> String {
    let message = match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => (*message).to_owned(),
        (_, Some(message)) => message.clone(),
        _ => "a panic without a message".to_owned(),
    };
    let dropping = catch_unwind(AssertUnwindSafe(move || drop(panic)));
    // The drop of the second payload might panic as well.
    dropping.unwrap_or_else(std::mem::forget);
    message
}

/// Polls a future to completion and catches a panic.
pub(crate) async fn catch_panic<F: Future>(future: F) -> std::thread::Result<F::Output> {
    let mut future = pin!(future);
    poll_fn(|task| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(task))) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// Converts a panic of the future to an error with its message, including a panic of the future's destructor, which
/// runs as soon as the future has resolved. After an error other than a cancellation, a panic of the destructor is logged.
/// Uses a `dyn` internally, so that little code is generated for each future type.
pub(crate) fn caught<F: Future<Output = Result<()>>>(future: F) -> CatchPanic<F> {
    CatchPanic { future: Some(future) }
}

pin_project! {
    /// See [`caught`].
    pub(crate) struct CatchPanic<F> {
        #[pin]
        future: Option<F>,
    }
}

impl<F: Future<Output = Result<()>>> Future for CatchPanic<F> {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<()>> {
        let mut this = self.project();
        let Some(future) = this.future.as_mut().as_pin_mut() else { return Poll::Pending };
        let outcome = ready!(poll_caught(future, task));
        Poll::Ready(with_drop(outcome, caught_call(&mut || this.future.set(None))))
    }
}

/// The outcome of a future whose destructor may have panicked.
fn with_drop(outcome: Result<()>, dropped: Result<()>) -> Result<()> {
    match (outcome, dropped) {
        (Err(error), Err(panic)) if !error.is_cancelled() => {
            logged(|| tracing::error!(%panic, "the destructor of an operator's future panicked after an error"));
            Err(error)
        }
        (outcome, Ok(())) => outcome,
        (_, dropped) => dropped,
    }
}

fn poll_caught(future: Pin<&mut dyn Future<Output = Result<()>>>, task: &mut Context<'_>) -> Poll<Result<()>> {
    catch_unwind(AssertUnwindSafe(|| future.poll(task))).unwrap_or_else(|panic| Poll::Ready(panicked(panic)))
}

/// Converts a panic of a function to an error.
pub(crate) fn caught_call(call: &mut dyn FnMut()) -> Result<()> {
    catch_unwind(AssertUnwindSafe(call)).or_else(panicked)
}

#[cold]
fn panicked(panic: Box<dyn Any + Send>) -> Result<()> {
    Err(Error::new(ErrorKind::Panicked, panic_message(panic)))
}
