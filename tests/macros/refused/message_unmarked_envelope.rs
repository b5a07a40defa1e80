use wakeline::prelude::*;

#[derive(Message)]
struct Frame {
    number: u64,
    pixels: Vec<Envelope<u8>>,
}

fn main() {}
