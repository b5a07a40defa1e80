use wakeline::prelude::*;

#[derive(Ports)]
enum P {
    A,
}

fn main() {}
