use wakeline::prelude::*;

#[kernel]
async fn a(_x: &mut [f32]) {}

#[kernel]
unsafe extern "C" fn b(_x: &mut [f32]) {}

#[kernel]
fn c(&self, _x: &mut [f32]) {}

#[kernel]
fn d(x: &mut [f32]);

#[kernel]
struct E;

fn main() {}
