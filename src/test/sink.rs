//! [`SinkQueue`]: the messages that an output has sent; and the operator that takes them from it.

use std::{
    collections::VecDeque,
    fmt,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use crate::{
    device::Device,
    error::Result,
    hub::{
        Message, Metadata,
        relocate::{Relocated, relocate},
    },
    operator::{Cx, Operator, SinkPorts},
    sync::{Mutex, lock},
};

/// A message that the operator under test has sent, with its metadata.
///
/// Its envelopes are copies in host memory, whose data is there: `as_slice` needs no wait. It dereferences to the message.
pub struct Received<M> {
    message: M,
    metadata: Metadata,
}

impl<M> Received<M> {
    /// The metadata that was sent with it.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The message.
    pub fn into_inner(self) -> M {
        self.message
    }
}

impl<M> Deref for Received<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.message
    }
}

impl<M> DerefMut for Received<M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.message
    }
}

impl<M: fmt::Debug> fmt::Debug for Received<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Received").field("message", &self.message).field("metadata", &self.metadata).finish()
    }
}

/// Unlimited, so that the operator under test always finds room.
pub(super) struct SinkQueue<M>(Mutex<VecDeque<Received<M>>>);

impl<M: Message> SinkQueue<M> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(VecDeque::new())))
    }

    pub(super) fn take(&self) -> Option<Received<M>> {
        lock(&self.0).pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }
}

/// Takes one message in each run, and copies its envelopes to the host.
pub(super) struct TestSink<M> {
    pub(super) queue: Arc<SinkQueue<M>>,
    pub(super) device: Device,
}

impl<M: Message> Operator for TestSink<M> {
    type Ports = SinkPorts<M>;

    async fn compute(&mut self, ports: &mut SinkPorts<M>, cx: &mut Cx) -> Result<()> {
        let mut message = ports.input.take()?;
        let stream = if M::CARRIES_ENVELOPES && !self.device.is_host() { Some(cx.stream()?.clone()) } else { None };
        // The originals return to their hub, so the operator finds blank envelopes however many the test keeps.
        relocate(&mut message, Relocated::All, &Device::host(), stream.as_ref()).await?;
        let received = Received { message, metadata: cx.metadata() };
        lock(&self.queue.0).push_back(received);
        Ok(())
    }
}
