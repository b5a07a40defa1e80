use wakeline::prelude::*;

#[kernel(cuda = "saxpy.cu")]
fn saxpy(_a: f32, _x: &[f32], _y: &mut [f32]) {}

fn main() {}
