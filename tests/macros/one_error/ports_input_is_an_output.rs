use wakeline::prelude::*;

#[derive(Ports)]
struct CopyPorts {
    #[input]
    lines: Input<u32>,
    #[output]
    copies: Input<u32>,
}

struct Copy;

impl Operator for Copy {
    type Ports = CopyPorts;

    async fn compute(&mut self, ports: &mut CopyPorts, _: &mut Cx) -> Result<()> {
        ports.lines.take().map(drop)
    }
}

fn main() {
    let mut flow = Flow::new("copies");
    let (one, two) = (flow.add("one", Copy), flow.add("two", Copy));
    let _ = (one, two);
}
