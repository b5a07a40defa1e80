use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    a: Input<u32>,
    /// Documented, but still neither.
    b: Output<u32>,
}

fn main() {}
