use wakeline::prelude::*;

#[kernel]
fn fill<T: Copy>(x: &mut [T], with: T) {
    x.fill(with);
}

fn main() {}
