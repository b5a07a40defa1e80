use wakeline::prelude::*;

#[derive(Ports)]
#[ports(sum(left, rihgt) = 3)]
#[ports(sum(left, out) = 3)]
#[ports(each(left = 1, left = 2))]
#[ports(each(right = 1, full = 2), or_after = "soon")]
#[ports(or_after = "10ms")]
#[ports(sum(left, right))]
#[ports(sum(left) = 1, sum(right) = 1)]
struct P {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
    #[input(batch = 4, within = "5ms")]
    full: Input<u32>,
    #[output]
    out: Output<u32>,
}

/// Errors that only the compiler can find.
#[derive(Ports)]
#[ports(sum(left, right) = "3")]
#[ports(each(left = 1, right = 2), or_after = Self::MILLIS)]
struct Q {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
}

impl Q {
    const MILLIS: u64 = 5;
}

fn main() {}
