use kernels::scale;
use wakeline::{Stream, kernel::Grid, prelude::*};

mod kernels {
    use wakeline::prelude::*;

    #[kernel]
    pub(super) fn scale(a: f32, x: &[f32], y: &mut [f32], clear: bool) {
        let _ = (a, x, clear);
        y.fill(0.0);
    }
}

async fn use_it(stream: &Stream, x: &Buffer<f32>, y: &mut Buffer<f32>) -> Result<()> {
    kernels::scale::launch(stream, 2.0, x, y, true)?;
    scale::launch_with(Grid::blocks([1; 3]), stream, 2.0, x, y, true)?;
    scale::kernel().load(stream.device()).await
}

fn main() {}
