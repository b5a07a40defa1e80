use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[output(room = 0)]
    a: Output<u32>,
    #[output(room = 2, optional)]
    b: Output<u32>,
    #[input(optional)]
    c: Input<u32>,
}

fn main() {}
