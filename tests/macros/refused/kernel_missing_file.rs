use wakeline::prelude::*;

#[kernel(unsafe(cuda = "missing.cu"))]
fn saxpy(_a: f32, _x: &[f32], _y: &mut [f32]) {}

fn main() {}
