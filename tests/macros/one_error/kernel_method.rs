use wakeline::prelude::*;

struct Scale;

impl Scale {
    #[kernel]
    fn scale(&self, y: &mut [f32]) {
        y.fill(0.0);
    }
}

fn main() {
    let _ = Scale;
}
