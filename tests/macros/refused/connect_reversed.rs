use wakeline::prelude::*;

#[derive(Ports)]
struct A {
    #[output]
    out: Output<u32>,
}

#[derive(Ports)]
struct B {
    #[input]
    input: Input<u32>,
}

fn connect(flow: &mut Flow, a: AHandles, b: BHandles) {
    flow.connect(b.input, a.out);
}

fn main() {}
