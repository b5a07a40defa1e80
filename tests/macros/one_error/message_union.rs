use wakeline::prelude::*;

#[derive(Message)]
#[derive(Clone, Copy)]
union Frame {
    number: u64,
    real: f64,
}

#[derive(Ports)]
struct CopyPorts {
    #[input]
    frames: Input<Frame>,
    #[output]
    copies: Output<Frame>,
}

struct Copy;

impl Operator for Copy {
    type Ports = CopyPorts;

    async fn compute(&mut self, ports: &mut CopyPorts, _: &mut Cx) -> Result<()> {
        let frame = ports.frames.take()?;
        ports.copies.send(frame).await?;
        Ok(())
    }
}

fn main() {
    let mut flow = Flow::new("copies");
    let [one, two, three] = ["one", "two", "three"].map(|name| flow.add(name, Copy));
    flow.connect(one.copies, [two.frames, three.frames]);
}
