use wakeline::{Buffer, Result, Stream};

fn reads_what_it_writes(stream: &Stream, a: &mut Buffer<f32>) {
    let _ = stream.external("aliased").read(a).write(a);
}

fn writes_twice(stream: &Stream, a: &mut Buffer<f32>) {
    let _ = stream.external("twice").write(a).write(a);
}

fn counts_wrongly(stream: &Stream, a: &Buffer<f32>) -> Result<()> {
    let call = stream.external("one").read(a);
    unsafe { call.enqueue(|_, [_a, _b]| Ok::<_, std::io::Error>(())) }
}

fn vouches_for_nothing(stream: &Stream, a: &Buffer<f32>) -> Result<()> {
    stream.external("safe").read(a).enqueue(|_, [_a]| Ok::<_, std::io::Error>(()))
}

fn main() {}
