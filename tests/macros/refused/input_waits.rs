use std::time::Duration;
use wakeline::prelude::*;

#[derive(Ports)]
struct P {
    #[input(within = "5ms")]
    a: Input<u32>,
    #[input(batch = 8, within = "5")]
    b: Input<u32>,
    #[input(batch = 8, at_least = 8)]
    c: Input<u32>,
    #[input(at_least = 4, at_most = 3)]
    d: Input<u32>,
    #[input(at_least = 0)]
    e: Input<u32>,
    #[input(optional, batch = 2)]
    f: Input<u32>,
    #[input(batch = 2, since = Born)]
    g: Input<u32>,
    #[output(optional, room = 2)]
    h: Output<u32>,
}

/// Errors that only the compiler can find.
#[derive(Ports)]
struct Q {
    #[input(at_least = "4")]
    a: Input<u32>,
    #[input(batch = 4, within = Self::MILLIS)]
    b: Input<u32>,
    #[input(batch = 4, within = Self::SPAN)]
    c: Input<u32>,
}

impl Q {
    const MILLIS: u64 = 5;
    const SPAN: Duration = Duration::from_millis(5);
}

fn main() {}
