use wakeline::{Stream, prelude::*};

#[kernel]
fn scale(_by: f32, _x: &mut [f32]) {}

fn launch(stream: &Stream, x: &Buffer<f32>) -> Result<()> {
    scale::launch(stream, 2.0, x)
}

fn main() {}
