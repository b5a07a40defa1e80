//! [`SinkQueue`]: the messages that an output has sent; and the operator that takes them from it.

use std::{
    borrow::Cow,
    collections::VecDeque,
    fmt,
    ops::{Deref, DerefMut},
    sync::Arc,
    task::{Context, Waker},
};

use crate::{
    condition::{Condition, Status},
    device::Device,
    error::Result,
    hub::{
        Message, Metadata, Reply,
        relocate::{Relocated, relocate},
    },
    operator::{Cx, Operator, SinkPorts},
    sync::{Mutex, WakerCell, lock},
};

/// A message that the operator under test has sent, with its metadata.
///
/// Its envelopes are copies in host memory, whose data is there: `as_slice` needs no wait. It dereferences to the message.
pub struct Received<M> {
    message: M,
    metadata: Metadata,
    /// The requests that it answers, by their numbers.
    requests: Vec<u64>,
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

/// The maximum number of messages that an output keeps: an operator that sends without end would use all memory.
pub(super) const MAX_KEPT: usize = 1 << 16;

/// The messages that an output has sent. So many are kept that the operator under test practically always finds room.
pub(super) struct SinkQueue<M> {
    port: &'static str,
    messages: Mutex<VecDeque<Received<M>>>,
    /// The operator that takes them from the output.
    owner: WakerCell,
    /// Woken when that operator finds no room.
    refused: WakerCell,
}

/// A queue for messages of any type.
pub(super) trait AnySink: Send + Sync {
    /// The port's name, if no more messages can be kept.
    fn full(&self) -> Option<&'static str>;

    /// Registers a waker for when another message comes that cannot be kept.
    fn register(&self, waker: &Waker);
}

impl<M: Message> AnySink for SinkQueue<M> {
    fn full(&self) -> Option<&'static str> {
        (lock(&self.messages).len() >= MAX_KEPT).then_some(self.port)
    }

    fn register(&self, waker: &Waker) {
        self.refused.register(waker);
    }
}

impl<M: Message> SinkQueue<M> {
    pub(super) fn new(port: &'static str) -> Arc<Self> {
        Arc::new(Self { port, messages: Mutex::default(), owner: WakerCell::new(), refused: WakerCell::new() })
    }

    pub(super) fn take(&self) -> Option<Received<M>> {
        let mut messages = lock(&self.messages);
        let was_full = messages.len() >= MAX_KEPT;
        let message = messages.pop_front();
        drop(messages);
        if was_full {
            self.owner.wake();
        }
        message
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.messages).is_empty()
    }

    /// Whether a message answers the request.
    pub(super) fn answers(&self, request: u64) -> bool {
        lock(&self.messages).iter().any(|message| message.requests.contains(&request))
    }

    /// The first message that answers the request.
    ///
    /// # Errors
    /// The number of requests that the message answers, if that is not one. The message stays.
    pub(super) fn take_answer(&self, request: u64) -> Option<Result<Received<M>, usize>> {
        let mut messages = lock(&self.messages);
        let at = messages.iter().position(|message| message.requests.contains(&request))?;
        match messages[at].requests.len() {
            1 => {}
            several => return Some(Err(several)),
        }
        let was_full = messages.len() >= MAX_KEPT;
        let message = messages.remove(at);
        drop(messages);
        if was_full {
            self.owner.wake();
        }
        message.map(Ok)
    }
}

/// The condition of the operator that takes the messages: there is room for one.
pub(super) struct RoomForMessage<M>(pub(super) Arc<SinkQueue<M>>);

impl<M: Message> Condition for RoomForMessage<M> {
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        self.0.owner.register(cx.waker());
        match self.0.full() {
            None => Status::Ready,
            // The test is outside the flow.
            Some(_) => {
                self.0.refused.wake();
                Status::WaitEvent
            }
        }
    }

    fn describe(&self) -> Cow<'static, str> {
        format!("the test to receive from `{}`, which keeps {MAX_KEPT} messages at most", self.0.port).into()
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
        // Dropped once the message is in the queue: a request whose replies are all dropped has no other answer.
        let replies = cx.take_replies();
        let requests = replies.iter().flat_map(Reply::callers).filter(|caller| caller.is_waiting());
        let requests = requests.map(|caller| caller.number()).collect();
        let received = Received { message, metadata: cx.metadata(), requests };
        lock(&self.queue.messages).push_back(received);
        Ok(())
    }
}
