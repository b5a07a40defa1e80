use kernels::scale;
use wakeline::{Stream, kernel::Grid, prelude::*};

mod kernels {
    use wakeline::prelude::*;

    #[kernel(over = [x.len(), 1, 1, 1])]
    pub(super) fn scale(a: f32, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = a * x;
        }
    }
}

async fn use_it(stream: &Stream, x: &Buffer<f32>, y: &mut Buffer<f32>) -> Result<()> {
    kernels::scale::launch(stream, 2.0, x, y)?;
    scale::launch_with(Grid::blocks([1; 3]), stream, 2.0, x, y)?;
    scale::kernel().load(stream.device()).await
}

fn main() {}
