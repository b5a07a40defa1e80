use wakeline::prelude::*;

#[derive(Ports)]
struct CopyPorts(#[input] Input<u32>, #[output] Output<u32>);

struct Copy;

impl Operator for Copy {
    type Ports = CopyPorts;

    async fn compute(&mut self, ports: &mut CopyPorts, _: &mut Cx) -> Result<()> {
        let line = ports.0.take()?;
        ports.1.send(line).await?;
        Ok(())
    }
}

fn main() {
    let mut flow = Flow::new("copies");
    let (one, two) = (flow.add("one", Copy), flow.add("two", Copy));
    let _ = (one, two);
}
