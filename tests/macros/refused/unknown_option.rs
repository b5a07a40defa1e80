use wakeline::prelude::*;

#[derive(Ports)]
#[ports(name = P)]
struct P {
    #[input(size = 3)]
    a: Input<u32>,
    #[output(size = 3)]
    b: Output<u32>,
    #[input(envelopes = 3)]
    c: Input<u32>,
    #[input(capacity = 3, capacity = 4)]
    d: Input<u32>,
    #[input(capacity)]
    e: Input<u32>,
    #[input = 3]
    f: Input<u32>,
}

fn main() {}
