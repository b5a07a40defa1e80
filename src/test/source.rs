//! [`SourceQueue`]: the messages that a test has sent to an input; and the operator that feeds them to it.

use std::{any::Any, borrow::Cow, collections::VecDeque, sync::Arc, task::Context};

use crate::{
    condition::{Condition, Status},
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{
        Message,
        parcel::Load,
        relocate::{Relocated, relocate},
    },
    operator::{Cx, Operator, SourcePorts},
    sync::{Mutex, WakerCell, lock},
};

/// Unlimited, so that sending never waits.
pub(super) struct SourceQueue<M> {
    port: &'static str,
    state: Mutex<State<M>>,
    /// The operator that feeds the input.
    owner: WakerCell,
}

struct State<M> {
    messages: VecDeque<(M, Load)>,
    /// The number of messages that were fed to the input.
    fed: u64,
    closed: bool,
}

/// A queue for messages of any type.
pub(super) trait AnySource: Any + Send + Sync {
    fn close(&self);
    /// True if it is closed and empty.
    fn has_ended(&self) -> bool;
    /// The number of messages that were fed to the input.
    fn fed(&self) -> u64;
}

impl<M: Message> SourceQueue<M> {
    pub(super) fn new(port: &'static str) -> Arc<Self> {
        let state = Mutex::new(State { messages: VecDeque::new(), fed: 0, closed: false });
        Arc::new(Self { port, state, owner: WakerCell::new() })
    }

    pub(super) fn send(&self, message: M, load: Load) -> Result<()> {
        let mut state = lock(&self.state);
        if state.closed {
            drop(state);
            let text = format!("input `{}` was closed: send before `close` and `finish`", self.port);
            return Err(Error::new(ErrorKind::Closed, text));
        }
        state.messages.push_back((message, load));
        drop(state);
        self.owner.wake();
        Ok(())
    }
}

impl<M> SourceQueue<M> {
    fn take(&self) -> Option<(M, Load)> {
        let mut state = lock(&self.state);
        state.fed += 1;
        state.messages.pop_front()
    }
}

impl<M: Message> AnySource for SourceQueue<M> {
    fn close(&self) {
        lock(&self.state).closed = true;
        self.owner.wake();
    }

    fn has_ended(&self) -> bool {
        let state = lock(&self.state);
        state.closed && state.messages.is_empty()
    }

    fn fed(&self) -> u64 {
        lock(&self.state).fed
    }
}

/// The condition of the feeding operator: a message was sent.
pub(super) struct MessageSent<M>(pub(super) Arc<SourceQueue<M>>);

impl<M: Message> Condition for MessageSent<M> {
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        self.0.owner.register(cx.waker());
        let state = lock(&self.0.state);
        match (state.messages.is_empty(), state.closed) {
            (false, _) => Status::Ready,
            (true, true) => Status::Never,
            // The test is outside the flow.
            (true, false) => Status::WaitEvent,
        }
    }

    fn describe(&self) -> Cow<'static, str> {
        format!("the test to send to `{}`", self.0.port).into()
    }
}

/// Feeds one message in each run, with its envelopes on the device of the operator under test.
pub(super) struct TestSource<M> {
    pub(super) queue: Arc<SourceQueue<M>>,
    pub(super) device: Device,
}

impl<M: Message> Operator for TestSource<M> {
    type Ports = SourcePorts<M>;

    async fn compute(&mut self, ports: &mut SourcePorts<M>, cx: &mut Cx) -> Result<()> {
        let Some((mut message, Load { metadata, reply, .. })) = self.queue.take() else { return Ok(()) };
        let stream = if M::CARRIES_ENVELOPES && !self.device.is_host() { Some(cx.stream()?.clone()) } else { None };
        relocate(&mut message, Relocated::Others, &self.device, stream.as_ref()).await?;
        cx.replace_metadata(metadata);
        ports.output.send_for(reply, message).await?;
        Ok(())
    }
}
