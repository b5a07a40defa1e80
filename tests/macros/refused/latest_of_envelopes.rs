use wakeline::prelude::*;

#[derive(Ports)]
struct A {
    #[output]
    out: Output<Envelope<f32>>,
}

#[derive(Ports)]
struct B {
    #[input]
    input: Input<Envelope<f32>>,
}

fn connect(flow: &mut Flow, a: AHandles, b: BHandles) {
    flow.connect_with(a.out, b.input, HubOptions::latest());
}

fn main() {}
