use wakeline::prelude::*;

#[derive(Ports)]
struct CountPorts {
    #[produce]
    numbers: Produce<u32>,
}

struct Count;

impl Operator for Count {
    type Ports = CountPorts;

    async fn compute(&mut self, ports: &mut CountPorts, _cx: &mut Cx) -> Result<()> {
        ports.numbers.get_mut()?.fill_from(&[1]).await
    }
}

fn main() -> Result<()> {
    let mut flow = Flow::new("wrong");
    let count = flow.add("count", Count);
    let hub = ChunkHub::<f32>::builder("floats").elements(1).build()?;
    flow.link(count.numbers, &hub);
    Ok(())
}
