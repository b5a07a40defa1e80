use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[input]
    a: Output<u32>,
    #[output]
    b: Input<u32>,
}

fn main() {}
