use wakeline::prelude::*;

#[derive(Ports)]
enum CopyPorts {
    Lines(Input<u32>),
    Copies(Output<u32>),
}

struct Copy;

impl Operator for Copy {
    type Ports = CopyPorts;

    async fn compute(&mut self, ports: &mut CopyPorts, _: &mut Cx) -> Result<()> {
        let _ = ports;
        Ok(())
    }
}

fn main() {
    let mut flow = Flow::new("copies");
    let (one, two) = (flow.add("one", Copy), flow.add("two", Copy));
    let _ = (one, two);
}
