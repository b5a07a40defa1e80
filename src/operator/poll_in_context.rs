//! Polls an operator's futures with the waker of its [`OperatorTask`] and with its device current.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;

use super::{
    operator_task::{OperatorTask, probe_waker::ProbeGuard},
    pacing::ExpectedMessage,
};
use crate::{device::Device, error::Result, stream::Streams};

/// Polls `work`, the future of one operator, with the operator's waker and with its device current, until it ends or is
/// aborted.
pub(crate) fn poll_in_context<'a, T>(
    operator_task: &'a Arc<OperatorTask>,
    device: &'a Device,
    work: impl Future<Output = Result<T>> + 'a,
) -> impl Future<Output = Result<T>> + 'a {
    let (probe, on_host) = (operator_task.install_probe_waker(), device.is_host());
    PolledInContext { work, operator_task, device, on_host, probe, expected: None }
}

pin_project! {
    struct PolledInContext<'a, F> {
        #[pin]
        work: F,
        operator_task: &'a Arc<OperatorTask>,
        device: &'a Device,
        on_host: bool,
        probe: ProbeGuard,
        // Allocated at the first pending poll of an operator that expects messages from outside.
        expected: Option<Box<ExpectedMessage>>,
    }
}

impl<T, F: Future<Output = Result<T>>> PolledInContext<'_, F> {
    #[inline]
    fn poll_once(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<T>> {
        let context = self.project();
        context.operator_task.poll(context.probe, task, |task| {
            if !*context.on_host
                && let Err(error) = context.device.backend().make_current()
            {
                // This might be the first sign of a fault: `observe` fails every future that waits for the device, and
                // the error names the operators whose work is lost.
                return Poll::Ready(Streams::of(context.device).observe(Err(error)));
            }
            context.work.poll(task)
        })
    }

    /// Polls the operator again while the message that it expects wakes it.
    #[cold]
    fn poll_expected(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<T>> {
        while self.as_mut().await_expected(task) {
            let polled = self.as_mut().poll_once(task);
            if polled.is_ready() {
                return polled;
            }
        }
        Poll::Pending
    }

    /// Spins for the expected message, or sets an alarm. True if the operator was woken meanwhile.
    fn await_expected(self: Pin<&mut Self>, task: &Context<'_>) -> bool {
        let context = self.project();
        let Some(pacing) = context.operator_task.pacing() else { return false };
        context.expected.get_or_insert_default().poll(pacing, context.operator_task, task)
    }
}

impl<T, F: Future<Output = Result<T>>> Future for PolledInContext<'_, F> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<T>> {
        let polled = self.as_mut().poll_once(task);
        // No loop here: it would keep the captured references on the stack, some 15 instructions of each hop.
        if polled.is_pending() && self.operator_task.pacing().is_some() { self.poll_expected(task) } else { polled }
    }
}

/// Like [`poll_in_context`], for `stop`: it runs even if the device is lost and cannot be made current. It does not use
/// the task of the operator's runs: the operators of an aborted flow stop like any others.
pub(crate) async fn poll_stop_in_context(device: &Device, work: impl Future<Output = Result<()>>) -> Result<()> {
    let mut work = pin!(work);
    let work = poll_fn(|task| {
        // A device error is left for `stop` to find, if it uses the device.
        let _ = device.backend().make_current();
        work.as_mut().poll(task)
    });
    poll_in_context(&OperatorTask::alone(), &Device::host(), work).await
}
