use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[input]
    a: Vec<u32>,
}

fn main() {}
