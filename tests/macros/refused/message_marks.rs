use wakeline::prelude::*;

#[derive(Message)]
#[envelope]
struct A {
    #[envelope(device)]
    a: Envelope<u8>,
}

#[derive(Message)]
struct B {
    #[envelope]
    b: std::cell::Cell<u8>,
}

#[derive(Message)]
union C {
    c: u8,
}

fn main() {}
