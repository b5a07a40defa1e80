//! Polls an operator's futures with the waker of its [`OperatorTask`] and with its device current.

use std::{future::poll_fn, pin::pin, sync::Arc, task::Poll};

use super::{operator_task::OperatorTask, pacing::ExpectedMessage};
use crate::{device::Device, error::Result, stream::Streams};

/// Polls `work`, the future of one operator, with the operator's waker and with its device current, until it ends or is
/// aborted.
pub(crate) async fn poll_in_context<T>(
    operator_task: &Arc<OperatorTask>,
    device: &Device,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let mut probe = operator_task.install_probe_waker();
    let on_host = device.is_host();
    let mut work = pin!(work);
    let mut expected = ExpectedMessage::default();
    poll_fn(|task| {
        loop {
            let polled = operator_task.poll(&mut probe, task, |task| {
                if !on_host && let Err(error) = device.backend().make_current() {
                    // This might be the first sign of a fault: `observe` fails every future that waits for the device,
                    // and the error names the operators whose work is lost.
                    return Poll::Ready(Streams::of(device).observe(Err(error)));
                }
                work.as_mut().poll(task)
            });
            match operator_task.pacing() {
                Some(pacing) if polled.is_pending() && expected.poll(pacing, operator_task, task) => {}
                _ => return polled,
            }
        }
    })
    .await
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
