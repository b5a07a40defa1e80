//! Kernels of every form: sources, places, visibilities, and arguments named like generated items.
#![deny(missing_docs, missing_debug_implementations, unreachable_pub, warnings)]
#![allow(dead_code)]

use wakeline::{Stream, prelude::*};

/// Adds.
#[kernel(unsafe(cuda = "saxpy.cu"))]
pub(crate) fn saxpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

#[kernel(unsafe(ptx = concat!("saxpy", ".ptx")))]
fn from_ptx(_a: f32, _x: &[f32], _y: &mut [f32]) {}

#[kernel(unsafe(cubin = "saxpy.cubin"))]
fn from_cubin(_a: f32, _x: &[f32], _y: &mut [f32]) {}

#[kernel]
fn launch(stream: &[f32], mut grid: &mut [f32], call: f32, mut arguments: u32, argument_0: u8) {
    grid = &mut grid[..stream.len()];
    arguments += u32::from(argument_0);
    grid.fill(call + arguments as f32);
}

#[kernel]
fn no_arguments() {}

#[kernel]
#[cfg(any())]
fn never(x: &NoSuchType) {}

mod inner {
    use wakeline::prelude::*;

    #[kernel]
    pub(super) fn r#match(text: &mut [u8]) {
        text.make_ascii_uppercase();
    }
}

use inner::r#match as renamed;

fn launches(stream: &Stream, x: &Buffer<f32>, y: &mut Buffer<f32>, text: &mut Buffer<u8>) -> Result<()> {
    #[kernel]
    fn inside(y: &mut [f32]) {
        y.fill(0.0);
    }

    saxpy::launch(stream, 2.0, x, y)?;
    saxpy::launch_with(Default::default(), stream, 2.0, x, y)?;
    from_ptx::launch(stream, 2.0, x, y)?;
    from_cubin::launch(stream, 2.0, x, y)?;
    launch::launch(stream, x, y, 1.0, 2, 3)?;
    no_arguments::launch(stream)?;
    renamed::launch(stream, text)?;
    inside::launch(stream, y)
}

pub(super) fn main() {
    let mut y = [1.0];
    saxpy(2.0, &[3.0], &mut y); // still a plain function
    assert_eq!(y, [7.0]);
    let _ = (saxpy::kernel(), launch::kernel());
}
