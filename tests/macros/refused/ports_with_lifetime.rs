use wakeline::prelude::*;

#[derive(Ports)]
struct P<'a> {
    #[input]
    a: Input<&'a str>,
}

fn main() {}
