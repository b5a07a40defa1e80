//! How an operator's futures are polled: with its node's waker, its device current.

use std::{future::poll_fn, pin::pin, sync::Arc, task::Poll};

use super::node::Node;
use crate::{device::Device, error::Result, stream::Streams};

/// The task of one operator: polls `work` with the operator's waker, its device current, until it ends or is aborted.
pub(crate) async fn attended<T>(node: &Arc<Node>, device: &Device, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut worn = node.wear_face();
    let on_host = device.is_host();
    let mut work = pin!(work);
    poll_fn(|task| {
        node.poll(&mut worn, task, |task| {
            if !on_host && let Err(error) = device.backend().make_current() {
                // Whoever is the first to hear of a fault tells everybody, and says whose work is lost.
                return Poll::Ready(Streams::of(device).heed(Err(error)));
            }
            work.as_mut().poll(task)
        })
    })
    .await
}

/// As [`attended`], for `stop`: it runs even where the device is lost and cannot be made current. Not with the node of
/// its runs: an aborted flow's operators stop like any others.
pub(crate) async fn attended_to_the_end(device: &Device, work: impl Future<Output = Result<()>>) -> Result<()> {
    let mut work = pin!(work);
    let work = poll_fn(|task| {
        // What is wrong with the device is for `stop` to find, if it uses it.
        let _ = device.backend().make_current();
        work.as_mut().poll(task)
    });
    attended(&Node::alone(), &Device::host(), work).await
}
