use wakeline::prelude::*;

#[kernel]
fn double(x: &mut [u32]) {
    x.iter_mut().for_each(|x| *x *= 2);
}

#[derive(Ports)]
struct LookPorts {
    #[peek]
    numbers: Peek<u32>,
}

struct Look;

impl Operator for Look {
    type Ports = LookPorts;

    async fn compute(&mut self, ports: &mut LookPorts, cx: &mut Cx) -> Result<()> {
        double::launch(cx.stream()?, ports.numbers.get_mut()?)
    }
}

fn main() {}
