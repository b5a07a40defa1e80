//! The operators of [`Loops`](super::Loops).

use std::{sync::atomic::Ordering, time::Duration};

use tokio::time::sleep;
use wakeline::{
    Inputs,
    operator::{SinkPorts, SourcePorts},
    prelude::*,
};

use super::{super::data::wrong, Shown, parts_of, token, way};

#[derive(Ports)]
pub(super) struct WalkerPorts {
    #[input(at_least = 1)]
    pub(super) inputs: Inputs<u64>,
    #[output(optional)]
    pub(super) a: Output<u64>,
    #[output(optional)]
    pub(super) b: Output<u64>,
    #[output(optional)]
    pub(super) c: Output<u64>,
    #[output(optional)]
    pub(super) exit: Output<u64>,
}

/// Sends each message the way that its number determines.
pub(super) struct Walking {
    pub(super) sleeps: u64,
    pub(super) shown: Option<Shown>,
    pub(super) doubles: bool,
}

impl Operator for Walking {
    type Ports = WalkerPorts;

    async fn compute(&mut self, ports: &mut WalkerPorts, _cx: &mut Cx) -> Result<()> {
        let Some((_, message)) = ports.inputs.try_take_any()? else {
            wrong("a walker ran without a message".into());
            return Ok(());
        };
        if self.sleeps > 0 {
            sleep(Duration::from_millis(self.sleeps)).await;
        }
        let (number, left) = parts_of(message);
        if left == 0 {
            return Ok(ports.exit.send(message).await?);
        }
        let next = token(number, left - 1);
        for _ in 0..1 + usize::from(self.doubles) {
            match way(number, left) {
                0 => {
                    ports.a.send(next).await?;
                    self.shown.iter().for_each(|Shown(sent, _)| sent.store(next, Ordering::Relaxed));
                }
                1 => ports.b.send(next).await?,
                _ => ports.c.send(next).await?,
            }
        }
        Ok(())
    }
}

#[derive(Ports)]
pub(super) struct ExitPorts {
    #[input(at_least = 1)]
    pub(super) inputs: Inputs<u64>,
    #[output]
    pub(super) output: Output<u64>,
}

pub(super) struct Exit;

impl Operator for Exit {
    type Ports = ExitPorts;

    async fn compute(&mut self, ports: &mut ExitPorts, _cx: &mut Cx) -> Result<()> {
        match ports.inputs.try_take_any()? {
            Some((_, token)) => Ok(ports.output.send(parts_of(token).0).await?),
            None => Ok(()),
        }
    }
}

#[derive(Ports)]
pub(super) struct ShowPorts {
    #[input]
    pub(super) newest: Input<u64>,
    #[input]
    pub(super) ticks: Input<u64>,
}

pub(super) struct ShowBeside<F>(pub(super) F);

impl<F: FnMut(u64) + Send + 'static> Operator for ShowBeside<F> {
    type Ports = ShowPorts;

    async fn compute(&mut self, ports: &mut ShowPorts, _cx: &mut Cx) -> Result<()> {
        ports.ticks.take()?;
        (self.0)(ports.newest.take()?);
        Ok(())
    }
}

#[derive(Ports)]
pub(super) struct ExchangePorts {
    #[input]
    pub(super) requests: Input<u64>,
    #[input]
    pub(super) back: Input<u64>,
    #[output]
    pub(super) forth: Output<u64>,
    #[output]
    pub(super) responses: Output<u64>,
}

pub(super) struct Exchange;

impl Operator for Exchange {
    type Ports = ExchangePorts;

    async fn compute(&mut self, ports: &mut ExchangePorts, _cx: &mut Cx) -> Result<()> {
        let sum = ports.requests.take()? + ports.back.take()?;
        ports.forth.send(sum).await?;
        ports.responses.send(sum).await?;
        Ok(())
    }
}

#[derive(Ports)]
pub(super) struct ExchangeInRunPorts {
    #[input]
    pub(super) requests: Input<u64>,
    #[input(optional)]
    pub(super) back: Input<u64>,
    #[output]
    pub(super) forth: Output<u64>,
    #[output]
    pub(super) responses: Output<u64>,
}

/// The same in the middle of its run.
pub(super) struct ExchangeInRun;

impl Operator for ExchangeInRun {
    type Ports = ExchangeInRunPorts;

    async fn compute(&mut self, ports: &mut ExchangeInRunPorts, _cx: &mut Cx) -> Result<()> {
        let request = ports.requests.take()?;
        let Some(back) = ports.back.recv().await? else { return Ok(()) };
        ports.forth.send(request + back).await?;
        ports.responses.send(request + back).await?;
        Ok(())
    }
}

#[derive(Ports)]
pub(super) struct SplitPorts {
    #[input]
    pub(super) input: Input<u64>,
    #[output]
    pub(super) one: Output<u64>,
    #[output]
    pub(super) other: Output<u64>,
}

pub(super) struct Split {
    pub(super) ahead: usize,
}

impl Operator for Split {
    type Ports = SplitPorts;

    async fn compute(&mut self, ports: &mut SplitPorts, _cx: &mut Cx) -> Result<()> {
        let token = ports.input.take()?;
        for _ in 0..self.ahead {
            ports.one.send(token).await?;
        }
        ports.other.send(token).await?;
        Ok(())
    }
}

#[derive(Ports)]
pub(super) struct JoinPorts {
    #[input]
    pub(super) one: Input<u64>,
    #[input]
    pub(super) other: Input<u64>,
    #[output]
    pub(super) output: Output<u64>,
}

pub(super) struct Join;

impl Operator for Join {
    type Ports = JoinPorts;

    async fn compute(&mut self, ports: &mut JoinPorts, _cx: &mut Cx) -> Result<()> {
        let pair = ports.one.take()?.min(ports.other.take()?);
        ports.output.send(pair).await?;
        Ok(())
    }
}

pub(super) struct Fill;

impl Operator for Fill {
    type Ports = SourcePorts<Envelope<u8>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.output.blank().await?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

pub(super) struct Window(pub(super) Vec<Envelope<u8>>);

impl Operator for Window {
    type Ports = SinkPorts<Envelope<u8>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        self.0.push(ports.input.take()?);
        Ok(())
    }
}
