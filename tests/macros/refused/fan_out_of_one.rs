use wakeline::prelude::*;

#[derive(Message)]
struct Request {
    reply: std::sync::mpsc::Receiver<u8>,
}

struct Word(String);

impl Message for Word {}

#[derive(Ports)]
struct A {
    #[output]
    requests: Output<Request>,
    #[output]
    words: Output<Word>,
}

#[derive(Ports)]
struct B {
    #[input]
    requests: Input<Request>,
    #[input]
    words: Input<Word>,
}

fn connect(flow: &mut Flow, a: AHandles, b: [BHandles; 2]) {
    flow.connect(a.requests, b.map(|b| b.requests));
    flow.connect(a.words, (b[0].words, b[1].words));
}

fn main() {}
