//! The buffer condition, [`Cx::run_after`](crate::Cx::run_after): the next run waits for a buffer's data.
//!
//! For a buffer that no message carries: weights that a stream is still uploading, or an operator's own scratch memory.
//! A buffer in a message has its condition on the port ([`stream`](super::stream)). A fault makes it ready: the
//! operator gets the error when it uses the buffer.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use super::Readiness;
use crate::memory::HostAccess;

/// The buffers that the next run waits for.
pub(crate) type Awaited = Vec<HostAccess>;

/// Polls the buffers, and removes those whose data is available.
pub(crate) fn poll_buffers(awaited: &mut Awaited, cx: &mut Context<'_>) -> Readiness {
    while let Some(last) = awaited.last_mut() {
        match Pin::new(last).poll(cx) {
            Poll::Pending => return Readiness::WAIT_EVENT,
            Poll::Ready(_) => drop(awaited.pop()),
        }
    }
    Readiness::READY
}
