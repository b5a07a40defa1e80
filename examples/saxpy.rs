//! A kernel, a stream and two buffers, without a flow; checked against the same function on the host.
//!
//! `cargo run --release --example saxpy -- [--device cuda:0|emulated] [-n 1000000]`

use std::process::ExitCode;

use clap::Parser;
use wakeline::{Stream, prelude::*};

/// Adds a times x to y on a GPU.
#[derive(Parser)]
struct Args {
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    device: Option<String>,
    /// Elements of x and of y.
    #[arg(short, default_value_t = 1_000_000)]
    n: usize,
}

/// One declaration, two bodies: saxpy.cu for a GPU, this function for the emulated device.
#[kernel(unsafe(cuda = "saxpy.cu"))]
fn saxpy(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

async fn run(args: &Args) -> Result<String> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let stream = Stream::new(&device)?;
    let x: Vec<f32> = (0..args.n).map(|i| i as f32).collect();
    let mut y = vec![1.0; args.n];

    let there = Buffer::from_slice(&stream, &x)?;
    let mut result = Buffer::from_slice(&stream, &y)?;
    saxpy::launch(&stream, 0.1, &there, &mut result)?;
    let result = result.to_vec(&stream).await?; // only the copy back is awaited

    saxpy(0.1, &x, &mut y); // the kernel is also a plain function
    match result.iter().zip(&y).position(|(device, host)| device.to_bits() != host.to_bits()) {
        None => Ok(format!("{} elements on {device} ({}), the same as on the host", args.n, device.description())),
        Some(at) => Err(format!("element {at} is {} on {device} and {} on the host", result[at], y[at]).into()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(&Args::parse()).await {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("saxpy: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    /// Needs NVRTC, and no GPU: `cargo test --example saxpy -- --ignored`
    #[test]
    #[ignore = "needs NVRTC"]
    fn every_kernel_compiles() {
        wakeline::kernel::compile_all("sm_90").unwrap();
    }
}
