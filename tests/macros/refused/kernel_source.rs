use wakeline::prelude::*;

#[kernel(unsafe)]
fn a(_x: &mut [f32]) {}

#[kernel(unsafe(spirv = "x.spv"))]
fn b(_x: &mut [f32]) {}

#[kernel(unsafe(cuda = "x.cu", ptx = "x.ptx"))]
fn c(_x: &mut [f32]) {}

#[kernel(unsafe(cuda = 3))]
fn d(_x: &mut [f32]) {}

fn main() {}
