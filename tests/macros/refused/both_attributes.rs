use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[input]
    #[output]
    a: Input<u32>,
    #[input]
    #[input]
    b: Input<u32>,
}

fn main() {}
