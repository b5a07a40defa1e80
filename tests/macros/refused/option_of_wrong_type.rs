use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[input(capacity = "four")]
    a: Input<u32>,
}

fn main() {}
