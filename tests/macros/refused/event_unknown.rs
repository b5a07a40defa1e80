//! An input waits for an event that its messages never have.

use wakeline::{prelude::*, stream::Ticket};

#[derive(Message)]
struct Frame {
    #[event]
    decoded: Ticket,
}

#[derive(Ports)]
struct Show {
    #[input(event = "decoded")]
    right: Input<Option<Frame>>,
    #[input(event = "decode")]
    misspelt: Input<Frame>,
    #[input(event = "decoded")]
    none: Input<u32>,
}

#[derive(Message)]
struct Wrong {
    #[event]
    decoded: u32,
}

fn main() {}
