use wakeline::prelude::*;

#[derive(Ports)]
struct A {
    #[output]
    out: Output<u32>,
}

#[derive(Ports)]
struct B {
    #[input]
    input: Input<String>,
}

fn connect(flow: &mut Flow, a: AHandles, b: BHandles) {
    flow.connect(a.out, b.input);
}

fn main() {}
