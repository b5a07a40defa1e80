use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    a: Input<u32>,
    /// Documented, but not marked.
    b: Output<u32>,
}

fn main() {}
