use wakeline::prelude::*;

#[derive(Ports)]
struct P(Input<u32>);

fn main() {}
