//! Operators with ports of hubs of chunks: one that fills, one that reads, one that drains.

use std::collections::VecDeque;

use wakeline::prelude::*;

use super::{Shared, lock};

#[derive(Ports)]
pub struct FillPorts {
    #[produce]
    pub numbers: Produce<u32>,
}

#[derive(Clone)]
pub struct Fill(pub VecDeque<Vec<u32>>);

impl Fill {
    pub fn each(numbers: impl IntoIterator<Item = u32>) -> Self {
        Self(numbers.into_iter().map(|number| vec![number]).collect())
    }
}

impl Operator for Fill {
    type Ports = FillPorts;

    async fn compute(&mut self, ports: &mut FillPorts, cx: &mut Cx) -> Result<()> {
        let data = self.0.pop_front().unwrap_or_default();
        if self.0.is_empty() {
            cx.finish();
        }
        ports.numbers.get_mut()?.fill_from(&data).await
    }
}

#[derive(Ports)]
pub struct SeePorts {
    #[peek]
    pub numbers: Peek<u32>,
}

pub struct See(pub u32, pub Shared<Vec<u32>>);

impl Operator for See {
    type Ports = SeePorts;

    async fn compute(&mut self, ports: &mut SeePorts, cx: &mut Cx) -> Result<()> {
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        let seen = ports.numbers.get()?.read().await?.to_vec();
        lock(&self.1).push(seen);
        Ok(())
    }
}

#[derive(Ports)]
pub struct DrainPorts {
    #[consume]
    pub numbers: Consume<u32>,
}

#[derive(Clone)]
pub struct Drain(pub Shared<Vec<u32>>);

impl Operator for Drain {
    type Ports = DrainPorts;

    async fn compute(&mut self, ports: &mut DrainPorts, _cx: &mut Cx) -> Result<()> {
        let seen = ports.numbers.get()?.read().await?.to_vec();
        lock(&self.0).push(seen);
        Ok(())
    }
}
