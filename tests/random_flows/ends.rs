//! Sources and sinks.

use std::pin::Pin;

use wakeline::{
    operator::{MapPorts, SinkPorts, SourcePorts},
    prelude::*,
};

use super::{
    data::{self, Head, Message, NO_TAG, Tag, create, seen, tally, world},
    operators::{Me, patiently, turn, turns},
    plan::{self, Make, Sink, WORDS},
};

pub(crate) struct Source {
    pub(crate) me: Me,
    pub(crate) messages: u32,
    pub(crate) make: Make,
}

impl Me {
    async fn send(&mut self, number: u32, make: Make, output: &mut Output<Message>, cx: &mut Cx) -> Result<()> {
        let words = self.dice.between(*WORDS.start(), *WORDS.end());
        let path = plan::passed(0, self.node);
        let head = Head { origin: self.number(), number, laps: plan::laps(number), path };
        let mut message = match make {
            Make::Blank | Make::FromIngress => output.blank().await?,
            Make::Wrapped => {
                let (buffer, wrapped) = Buffer::wrap(vec![0_u32; words])?;
                world(|world| world.wrapped.push(wrapped));
                buffer.into()
            }
            Make::Own if cx.device().is_host() => Buffer::pinned(&self.near, words)?.into(),
            Make::Own => Buffer::new(cx.device(), words)?.into(),
        };
        if message.is_host() {
            data::write(&mut message.space().await?[..words], head);
            message.set_len(words)?;
        } else {
            message.set_len(words)?;
            create::launch(cx.stream()?, &mut message, head.origin, number, head.laps, head.path)?;
        }
        cx.insert_metadata("tag", Tag { origin: head.origin, number });
        output.send(message).await?;
        world(|world| *world.sent.entry(self.node).or_default() += 1);
        Ok(())
    }
}

impl Operator for Source {
    type Ports = SourcePorts<Message>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let number = world(|world| *world.sent.entry(self.me.node).or_default());
        if number == self.messages {
            cx.finish();
            return Ok(());
        }
        if number + 1 == self.messages && self.me.chance() {
            cx.finish();
        }
        self.me.send(number, self.make, &mut ports.output, cx).await
    }
}

/// Sends the messages whose numbers arrive from outside.
pub(crate) struct FromIngress(pub(crate) Me);

impl Operator for FromIngress {
    type Ports = MapPorts<u32, Message>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        self.0.send(number, Make::FromIngress, &mut ports.output, cx).await
    }
}

/// A task outside the flow that sends numbers in.
pub(crate) async fn tell(mut me: Me, messages: u32, ingress: wakeline::Ingress<u32>) {
    for number in 0..messages {
        turns(me.dice.up_to(15) as u32).await;
        if ingress.send(number).await.is_err() {
            return;
        }
        world(|world| *world.accepted.entry(me.node).or_default() += 1);
    }
}

pub(crate) struct Last {
    pub(crate) me: Me,
    pub(crate) sink: Sink,
}

impl Operator for Last {
    type Ports = SinkPorts<Message>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        let (me, tag) = (&self.me, self.me.tag(cx));
        if self.sink == Sink::Device {
            return tally::launch(cx.stream()?, &message, me.number(), tag.origin, tag.number);
        }
        if let Some(head) = me.read(message.read().await?, tag) {
            seen(me.node, head);
        }
        Ok(())
    }
}

/// Drops each wait half way, and starts again.
pub(crate) struct Impatient(pub(crate) Me);

impl Operator for Impatient {
    type Ports = SinkPorts<Message>;

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    async fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        loop {
            let mut received = None;
            for _ in 0..3 {
                let patience = self.0.dice.up_to(11) as u32;
                received = patiently(patience, ports.input.recv()).await;
                if received.is_some() {
                    break;
                }
            }
            let received = match received {
                Some(received) => received?,
                None => ports.input.recv().await?,
            };
            let Some(message) = received else { return Ok(()) };
            let tag = self.0.tag(cx);
            while patiently(self.0.dice.up_to(3) as u32, message.read()).await.is_none() {
                turn().await;
            }
            if let Some(head) = self.0.read(message.read().await?, tag) {
                seen(self.0.node, head);
            }
        }
    }
}

#[derive(Ports)]
pub(crate) struct DoneSinkPorts {
    #[input(done)]
    pub(crate) input: Input<Message>,
}

/// Gets completed messages, and reads them without waiting.
pub(crate) struct DoneSink(pub(crate) Me);

impl Operator for DoneSink {
    type Ports = DoneSinkPorts;

    async fn compute(&mut self, ports: &mut DoneSinkPorts, cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        if let Some(head) = self.0.read(message.as_slice()?, self.0.tag(cx)) {
            seen(self.0.node, head);
        }
        Ok(())
    }
}

/// Sends numbers in parallel to the messages.
pub(crate) struct HintSource {
    pub(crate) to: usize,
    pub(crate) left: u64,
}

impl Operator for HintSource {
    type Ports = SourcePorts<u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        if self.left == 0 {
            cx.finish();
            return Ok(());
        }
        self.left -= 1;
        let number = world(|world| *world.hints.entry(self.to).or_default()) + 1;
        ports.output.send(number).await?;
        world(|world| world.hints.insert(self.to, number));
        Ok(())
    }
}

/// A task outside the flow that holds each message for a while.
pub(crate) async fn outside(mut me: Me, mut egress: wakeline::Egress<Message>) {
    while let Some(message) = egress.recv().await {
        turns(me.dice.up_to(19) as u32).await;
        let read: Pin<Box<dyn Future<Output = Result<&[u32]>> + Send>> = Box::pin(message.read());
        // A lost device is reported by the flow.
        let Ok(data) = read.await else { continue };
        if let Some(head) = me.read(data, NO_TAG) {
            seen(me.node, head);
        }
        turns(me.dice.up_to(19) as u32).await;
    }
}
