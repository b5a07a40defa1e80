use wakeline::prelude::*;

#[kernel]
struct Scale {
    by: f32,
}

fn main() {
    let _ = Scale { by: 2.0 }.by;
}
