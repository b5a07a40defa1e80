use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[input(capacity = 0)]
    a: Input<u32>,
}

fn main() {}
