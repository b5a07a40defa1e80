use wakeline::prelude::*;

#[derive(Ports)]
struct Wrong {
    #[produce]
    a: Consume<u32>,
    #[peek]
    b: Input<u32>,
    #[input]
    c: Peek<u32>,
}

#[derive(Ports)]
struct Options {
    #[peek(by_hand)]
    d: Peek<u32>,
    #[modify(capacity = 2)]
    e: Modify<u32>,
    #[consume = 1]
    f: Consume<u32>,
    #[input(by_hand)]
    g: Input<u32>,
}

fn main() {}
