use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[output(room = 0)]
    a: Output<u32>,
    #[output(room = 2, unconditional)]
    b: Output<u32>,
    #[input(unconditional)]
    c: Input<u32>,
}

fn main() {}
