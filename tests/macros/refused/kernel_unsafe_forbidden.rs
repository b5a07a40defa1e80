#![forbid(unsafe_code)]

use wakeline::prelude::*;

#[kernel]
fn fine(_x: &mut [f32]) {}

#[kernel(unsafe(cuda = "../accepted/saxpy.cu"))]
fn saxpy(_a: f32, _x: &[f32], _y: &mut [f32]) {}

fn main() {}
