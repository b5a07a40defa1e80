use wakeline::prelude::*;

#[kernel]
fn k(
    _text: &str,
    _array: &[f32; 4],
    _one: &mut f32,
    _raw: *const f32,
    _kept: &'static [f32],
    _any: impl Copy,
    (_a, _b): (f32, f32),
) {
}

fn main() {}
