use wakeline::prelude::*;

#[derive(Ports)]
struct CopyPorts {
    #[input]
    lines: Input<u32>,
    #[output(at_least = 2)]
    copies: Output<u32>,
}

struct Copy;

impl Operator for Copy {
    type Ports = CopyPorts;

    async fn compute(&mut self, ports: &mut CopyPorts, _: &mut Cx) -> Result<()> {
        let line = ports.lines.take()?;
        ports.copies.send(line).await?;
        Ok(())
    }
}

fn main() {
    let mut flow = Flow::new("copies");
    let (one, two) = (flow.add("one", Copy), flow.add("two", Copy));
    flow.connect(one.copies, two.lines);
}
