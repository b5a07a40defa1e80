//! The operators between the ends of a random flow, and their common state.

use std::{future::poll_fn, pin::pin, task::Poll};

use wakeline::{operator::MapPorts, prelude::*};

use super::{
    data::{self, ANY, Head, Message, NO_TAG, Tag, look, step, transfer, wrong},
    plan::{Dice, Work},
};

/// Yields once to all other tasks.
pub(crate) async fn turn() {
    let mut turned = false;
    poll_fn(|task| {
        if std::mem::replace(&mut turned, true) {
            return Poll::Ready(());
        }
        task.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

pub(crate) async fn turns(count: u32) {
    for _ in 0..count {
        turn().await;
    }
}

/// Drops a future that is not done within so many turns.
pub(crate) async fn patiently<T>(turns: u32, future: impl Future<Output = T>) -> Option<T> {
    let (mut future, mut left) = (pin!(future), turns);
    poll_fn(|task| match future.as_mut().poll(task) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if left == 0 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            task.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

#[derive(Clone)]
pub(crate) struct Me {
    pub(crate) node: usize,
    /// How it changes a message: one of the constants in [`data`].
    pub(crate) mark: u32,
    pub(crate) own_stream: bool,
    /// The device for which page-locked memory is allocated.
    pub(crate) near: Device,
    pub(crate) dice: Dice,
    /// It is part of a section: it cannot pass anything about a message to a kernel, and treats every message alike.
    pub(crate) in_section: bool,
}

impl Me {
    pub(crate) fn number(&self) -> u32 {
        self.node as u32
    }

    pub(crate) fn chance(&mut self) -> bool {
        self.in_section || self.dice.one_in(2)
    }

    pub(crate) fn read(&self, data: &[u32], tag: Tag) -> Option<Head> {
        data::read(data, format_args!("operator {}, on the host,", self.node), tag)
    }

    /// The same as `step` on a device.
    fn step(&self, data: &mut [u32], tag: Tag) {
        if let Some(head) = self.read(data, tag) {
            data::write(data, data::step_on(head, self.node, self.mark));
        }
    }

    /// The expected message, according to its metadata.
    pub(crate) fn tag(&self, cx: &Cx) -> Tag {
        if self.in_section {
            return data::PADDED;
        }
        let metadata = cx.metadata();
        metadata.get::<Tag>("tag").copied().unwrap_or(NO_TAG)
    }

    /// Several messages were taken at once: which one's metadata is present does not matter to this test.
    fn untag(&self, cx: &mut Cx) {
        cx.remove_metadata("tag");
    }
}

#[derive(Clone)]
pub(crate) struct Relay {
    pub(crate) me: Me,
    pub(crate) work: Work,
}

impl Relay {
    async fn pass(&mut self, message: Message, output: &mut Output<Message>, cx: &mut Cx) -> Result<()> {
        let made = self.work_on(message, output, cx).await?;
        output.send(made).await?;
        Ok(())
    }

    async fn work_on(&mut self, message: Message, output: &mut Output<Message>, cx: &mut Cx) -> Result<Message> {
        let tag = self.me.tag(cx);
        if message.is_host() {
            self.on_host(message, tag, output).await
        } else {
            self.on_device(message, tag, output, cx).await
        }
    }

    async fn on_host(&mut self, mut message: Message, tag: Tag, output: &mut Output<Message>) -> Result<Message> {
        let me = &mut self.me;
        let words = message.len();
        match self.work {
            Work::Transfer => {
                let mut other = output.blank().await?;
                let from = message.read().await?;
                let to = &mut other.space().await?[..words];
                to.copy_from_slice(from);
                me.step(to, tag);
                other.set_len(words)?;
                Ok(other)
            }
            Work::Fresh => {
                let mut other = Buffer::pinned(&me.near, words)?;
                other.write().await?.copy_from_slice(message.read().await?);
                me.step(other.as_mut_slice()?, tag);
                Ok(other.into())
            }
            _ => {
                me.step(message.write().await?, tag);
                Ok(message)
            }
        }
    }

    async fn on_device(
        &mut self,
        mut message: Message,
        tag: Tag,
        output: &mut Output<Message>,
        cx: &mut Cx,
    ) -> Result<Message> {
        let me = &mut self.me;
        let (node, mark, Tag { origin, number }) = (me.number(), me.mark, tag);
        let words = message.len();
        match self.work {
            Work::Side if me.own_stream => {
                let (side, other) = (cx.stream_named("side")?, cx.stream_named("other")?);
                let mut copy = Buffer::<u32>::new(cx.device(), words)?;
                transfer::launch(&other, &message, &mut copy, node, mark, origin, number)?;
                look::launch(&side, &message, node, origin, number)?;
                if me.chance() {
                    let number = if me.in_section { number } else { ANY };
                    step::launch(cx.stream()?, &mut copy, node, mark, ANY, number)?;
                }
                if me.chance() {
                    // While it is in use, and another allocation asks for memory.
                    drop(copy);
                }
                step::launch(cx.stream()?, &mut message, node, mark, origin, number)?;
            }
            Work::Look => {
                let mut here = Buffer::<u32>::pinned(cx.device(), words)?;
                cx.stream()?.copy(&message, &mut here)?;
                let patience = me.dice.up_to(7) as u32;
                if patiently(patience, here.read()).await.is_none() {
                    here.read().await?;
                }
                me.read(here.as_slice()?, tag);
                step::launch(cx.stream()?, &mut message, node, mark, origin, number)?;
            }
            Work::Transfer => {
                let mut other = output.blank().await?;
                other.set_len(words)?;
                transfer::launch(cx.stream()?, &message, &mut other, node, mark, origin, number)?;
                return Ok(other);
            }
            Work::Fresh => {
                let mut other = cx.alloc::<u32>(words)?;
                transfer::launch(cx.stream()?, &message, &mut other, node, mark, origin, number)?;
                return Ok(other.into());
            }
            Work::Named if me.own_stream => {
                let named = cx.stream_named("named")?;
                step::launch(&named, &mut message, node, mark, origin, number)?;
                let chosen = me.chance().then_some(&named);
                output.set_stream(chosen)?;
            }
            _ => step::launch(cx.stream()?, &mut message, node, mark, origin, number)?,
        }
        Ok(message)
    }
}

impl Operator for Relay {
    type Ports = MapPorts<Message, Message>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        self.pass(message, &mut ports.output, cx).await
    }
}

#[derive(Ports)]
pub(crate) struct DonePorts {
    #[input(done)]
    pub(crate) input: Input<Message>,
    #[output]
    pub(crate) output: Output<Message>,
}

#[derive(Clone)]
pub(crate) struct DoneRelay(pub(crate) Relay);

impl Operator for DoneRelay {
    type Ports = DonePorts;

    async fn compute(&mut self, ports: &mut DonePorts, cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        if message.is_host() {
            self.0.me.read(message.as_slice()?, self.0.me.tag(cx));
        } else if !message.state()?.is_available() {
            wrong(format!("operator {} got a message before its work was done", self.0.me.node));
        }
        self.0.pass(message, &mut ports.output, cx).await
    }
}

#[derive(Ports)]
pub(crate) struct HintedPorts {
    #[input]
    pub(crate) input: Input<Message>,
    #[input(optional)]
    pub(crate) hints: Input<u64>,
    #[output]
    pub(crate) output: Output<Message>,
}

/// Takes the hints for its messages: each once, and in order.
pub(crate) struct HintedRelay {
    pub(crate) relay: Relay,
    pub(crate) last: u64,
}

impl Operator for HintedRelay {
    type Ports = HintedPorts;

    async fn compute(&mut self, ports: &mut HintedPorts, cx: &mut Cx) -> Result<()> {
        while let Some(hint) = ports.hints.try_take()? {
            if hint <= self.last {
                wrong(format!("operator {} got hint {hint} after {}", self.relay.me.node, self.last));
                break;
            }
            self.last = hint;
        }
        let message = ports.input.take()?;
        self.relay.pass(message, &mut ports.output, cx).await
    }
}

/// Checks in `after` that its work is done.
pub(crate) struct AfterRelay {
    pub(crate) relay: Relay,
    pub(crate) here: Option<Buffer<u32>>,
}

impl Operator for AfterRelay {
    type Ports = MapPorts<Message, Message>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        if !message.is_host() {
            let mut here = Buffer::pinned(cx.device(), message.len())?;
            cx.stream()?.copy(&message, &mut here)?;
            self.here = Some(here);
        }
        self.relay.pass(message, &mut ports.output, cx).await
    }

    async fn after(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        if let Some(here) = self.here.take() {
            self.relay.me.read(here.as_slice()?, NO_TAG);
        }
        Ok(())
    }
}

pub(crate) struct Batch {
    pub(crate) relay: Relay,
    pub(crate) most: usize,
}

impl Operator for Batch {
    type Ports = MapPorts<Message, Message>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let messages: Vec<_> = ports.input.take_batch()?.collect();
        if messages.is_empty() || messages.len() > self.most {
            wrong(format!("operator {} got a batch of {}", self.relay.me.node, messages.len()));
        }
        self.relay.me.untag(cx);
        if self.relay.work != Work::InPlace {
            for message in messages {
                self.relay.pass(message, &mut ports.output, cx).await?;
            }
            return Ok(());
        }
        let mut made = Vec::new();
        for message in messages {
            made.push(self.relay.work_on(message, &mut ports.output, cx).await?);
        }
        ports.output.send_all(&mut made).await
    }
}

/// Keeps messages until there are more, and sends the rest at the end.
pub(crate) struct Keep {
    pub(crate) relay: Relay,
    pub(crate) count: usize,
}

impl Operator for Keep {
    type Ports = MapPorts<Message, Message>;

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    async fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut kept = std::collections::VecDeque::new();
        while let Some(message) = ports.input.recv().await? {
            kept.push_back(message);
            if kept.len() > self.count
                && let Some(message) = kept.pop_front()
            {
                self.relay.me.untag(cx);
                self.relay.pass(message, &mut ports.output, cx).await?;
            }
        }
        for message in kept {
            self.relay.me.untag(cx);
            self.relay.pass(message, &mut ports.output, cx).await?;
        }
        Ok(())
    }
}

#[derive(Ports)]
pub(crate) struct EachPorts {
    #[input]
    pub(crate) inputs: Inputs<Message>,
    #[output]
    pub(crate) output: Output<Message>,
}

pub(crate) struct MergeEach(pub(crate) Relay);

impl Operator for MergeEach {
    type Ports = EachPorts;

    async fn compute(&mut self, ports: &mut EachPorts, cx: &mut Cx) -> Result<()> {
        let messages: Vec<_> = ports.inputs.take()?.collect();
        self.0.me.untag(cx);
        for message in messages {
            self.0.pass(message, &mut ports.output, cx).await?;
        }
        Ok(())
    }
}

#[derive(Ports)]
pub(crate) struct AnyPorts {
    #[input(at_least = 1)]
    pub(crate) inputs: Inputs<Message>,
    #[output]
    pub(crate) output: Output<Message>,
}

pub(crate) struct MergeAny(pub(crate) Relay);

impl Operator for MergeAny {
    type Ports = AnyPorts;

    async fn compute(&mut self, ports: &mut AnyPorts, cx: &mut Cx) -> Result<()> {
        match ports.inputs.try_take_any()? {
            Some((_, message)) => self.0.pass(message, &mut ports.output, cx).await,
            None => {
                wrong(format!("operator {} ran without a message", self.0.me.node));
                Ok(())
            }
        }
    }
}

#[derive(Ports)]
pub(crate) struct RoundsPorts {
    #[input]
    pub(crate) input: Input<Message>,
    #[input(optional)]
    pub(crate) back: Input<Message>,
    #[output]
    pub(crate) output: Output<Message>,
    #[output(optional)]
    pub(crate) forth: Output<Message>,
}

/// Sends each message through its rounds, and waits for it.
pub(crate) struct Rounds {
    pub(crate) relay: Relay,
    pub(crate) laps: u32,
}

impl Operator for Rounds {
    type Ports = RoundsPorts;

    async fn compute(&mut self, ports: &mut RoundsPorts, cx: &mut Cx) -> Result<()> {
        let mut message = ports.input.take()?;
        for _ in 0..self.laps {
            ports.forth.send(message).await?;
            message = match ports.back.recv().await? {
                Some(message) => message,
                None if cx.flow().failure().is_some() => return Ok(()),
                None => {
                    wrong(format!("operator {} lost a message in its round", self.relay.me.node));
                    return Ok(());
                }
            };
        }
        self.relay.pass(message, &mut ports.output, cx).await
    }
}

#[derive(Ports)]
pub(crate) struct QuietPorts {
    #[input(at_least = 1)]
    pub(crate) inputs: Inputs<Message>,
    #[output(optional)]
    pub(crate) output: Output<Message>,
    #[output(optional)]
    pub(crate) forth: Output<Message>,
}

/// Sends each message through as many rounds as it says. Only becoming quiet ends it.
pub(crate) struct Quiet(pub(crate) Relay);

impl Operator for Quiet {
    type Ports = QuietPorts;

    async fn compute(&mut self, ports: &mut QuietPorts, cx: &mut Cx) -> Result<()> {
        let Some((_, message)) = ports.inputs.try_take_any()? else { return Ok(()) };
        let mut here;
        let data = if message.is_host() {
            message.read().await?
        } else {
            here = Buffer::<u32>::pinned(cx.device(), message.len())?;
            cx.stream()?.copy(&message, &mut here)?;
            here.read().await?
        };
        match self.0.me.read(data, self.0.me.tag(cx)) {
            Some(head) if head.laps > 0 => Ok(ports.forth.send(message).await?),
            _ => self.0.pass(message, &mut ports.output, cx).await,
        }
    }
}
