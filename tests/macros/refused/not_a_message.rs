use wakeline::prelude::*;

struct NotSend(*const u8);

#[derive(Ports)]
struct P {
    #[input]
    a: Input<NotSend>,
}

fn main() {}
