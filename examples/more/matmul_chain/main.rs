//! Multiplies a chain of matrices: cuBLAS on a GPU, on the operator's stream; checked against float64.
//!
//! `cargo run --release -p wakeline-more-examples --example matmul_chain -- [--device cuda:0|emulated] [-n 256] [--count 16]`
//!
//! ```text
//!   matrices ──> {matrices} ──> multiply, on the device
//!    (host)                       │        ^
//!                        produces v        │ consumes
//!                                 {product}             the product so far
//! ```
//!
//! The chunks of both hubs are matrices of any shape; the shape is stored with the elements. The chunk left in
//! {product} when the flow has ended is consumed without an operator.

mod gemm;

use std::process::ExitCode;

use clap::Parser;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wakeline::{
    hub::{Chunk, role::ChunkRole},
    operator::{Consume, Produce},
    prelude::*,
};

use gemm::{Gemm, Matrix, Shape};

/// Multiplies a chain of random matrices on a GPU.
#[derive(Parser)]
struct Args {
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    device: Option<String>,
    /// Rows and columns of the largest matrix; the smallest has half as many.
    #[arg(short, default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..))]
    n: u16,
    /// Number of matrices.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    count: u16,
    /// Seed of the matrices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// A matrix on the host, its elements row by row.
struct Random {
    elements: Vec<f32>,
    shape: Shape,
}

/// A chain whose products stay of moderate size.
fn chain(args: &Args) -> Vec<Random> {
    let mut random = StdRng::seed_from_u64(args.seed);
    let n = usize::from(args.n);
    let mut rows = random.random_range(n.div_ceil(2)..=n);
    let next = |_| {
        let columns = random.random_range(n.div_ceil(2)..=n);
        let shape = [std::mem::replace(&mut rows, columns), columns];
        let elements = (0..shape[0] * shape[1]).map(|_| 2.0 * random.random::<f32>() / shape[0] as f32).collect();
        Random { elements, shape }
    };
    (0..args.count).map(next).collect()
}

#[derive(Ports)]
struct MatricesPorts {
    #[produce]
    matrices: Produce<f32, Shape>,
}

struct Matrices(std::vec::IntoIter<Random>);

impl Operator for Matrices {
    type Ports = MatricesPorts;

    async fn compute(&mut self, ports: &mut MatricesPorts, cx: &mut Cx) -> Result<()> {
        let Some(matrix) = self.0.next() else {
            ports.matrices.give_back();
            cx.finish();
            return Ok(());
        };
        let blank = ports.matrices.get_mut()?;
        blank.set_structure(matrix.shape);
        blank.fill_from(&matrix.elements).await
    }
}

#[derive(Ports)]
struct MultiplyPorts {
    #[consume]
    matrices: Consume<f32, Shape>,
    /// The product of all matrices so far.
    #[consume]
    product: Consume<f32, Shape>,
    #[produce]
    next: Produce<f32, Shape>,
}

#[derive(Default)]
struct Multiply(Gemm);

impl Operator for Multiply {
    type Ports = MultiplyPorts;

    async fn compute(&mut self, ports: &mut MultiplyPorts, cx: &mut Cx) -> Result<()> {
        let (product, matrix, next) = (ports.product.get()?, ports.matrices.get()?, ports.next.get_mut()?);
        let (left, right) = (shape_of(product)?, shape_of(matrix)?);
        let shape = [left[0], right[1]];
        let len = shape[0] * shape[1];
        next.set_len(len)?;
        next.set_structure(shape);
        self.0.multiply(
            cx.stream()?,
            &Matrix::new(product, product.len(), left)?,
            &Matrix::new(matrix, matrix.len(), right)?,
            Matrix::new(next, len, shape)?,
        )
    }
}

/// The shape is stored with every committed chunk.
fn shape_of<K: ChunkRole>(chunk: &Chunk<K, f32, Shape>) -> Result<Shape> {
    chunk.structure().copied().ok_or_else(|| "a matrix without a shape".into())
}

async fn with_hubs(device: &Device, n: usize, mut matrices: Vec<Random>) -> Result<Vec<f32>> {
    let hub = |name| ChunkHub::<f32, Shape>::builder(name).elements(n * n);
    let all = hub("matrices").envelopes(device, 2).host_envelopes(2).build()?;
    // Two envelopes: one is read while the next is written.
    let product = hub("product").queue(2).envelopes(device, 2).host_envelopes(1).build()?;
    let host = Device::host();
    let first = matrices.remove(0);
    let put = async |blank: &mut Chunk<_, _, _>| {
        blank.set_structure(first.shape);
        blank.fill_from(&first.elements).await
    };
    product.produce(&host)?.with(put).await?;

    let mut flow = Flow::new("matrix chain");
    let read = flow.add("read", Matrices(matrices.into_iter()));
    let multiply = flow.add("multiply", Multiply::default()).on(device);
    flow.link(read.matrices, &all);
    flow.link(multiply.matrices, &all);
    flow.link(multiply.product, &product);
    flow.link(multiply.next, &product);
    flow.run().await?;

    let last = product.consume(&host)?.next().await?.ok_or_else(|| Error::from("the product is missing"))?;
    Ok(last.read().await?.to_vec())
}

/// The same on the host in float64.
fn on_host(matrices: &[Random]) -> Vec<f64> {
    let wide = |matrix: &Random| matrix.elements.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let mut product = wide(&matrices[0]);
    for matrix in &matrices[1..] {
        let ([inner, columns], right) = (matrix.shape, wide(matrix));
        let rows = product.len() / inner;
        let mut next = vec![0.0; rows * columns];
        for (row, left) in next.chunks_exact_mut(columns).zip(product.chunks_exact(inner)) {
            for (factor, right) in left.iter().zip(right.chunks_exact(columns)) {
                row.iter_mut().zip(right).for_each(|(sum, right)| *sum += factor * right);
            }
        }
        product = next;
    }
    product
}

async fn multiply(args: &Args) -> Result<String> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let matrices = chain(args);
    let (first, last) = (matrices[0].shape, matrices[matrices.len() - 1].shape);
    let expected = on_host(&matrices);
    let product = with_hubs(&device, usize::from(args.n), matrices).await?;
    if product.len() != expected.len() {
        return Err(format!(
            "the product has {} elements on {device} and {} on the host",
            product.len(),
            expected.len()
        )
        .into());
    }
    // All elements are positive: no cancellation.
    let off =
        product.iter().zip(&expected).map(|(here, there)| (f64::from(*here) / there - 1.0).abs()).fold(0.0, f64::max);
    if off.is_nan() || off > 1e-5 {
        return Err(format!("an element has a relative error of {off:.1e} against float64").into());
    }
    let device = format!("{device} ({})", device.description());
    Ok(format!("{} matrices to {} x {} on {device}, within {off:.1e} of float64", args.count, first[0], last[1]))
}

#[tokio::main]
async fn main() -> ExitCode {
    match multiply(&Args::parse()).await {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("matmul_chain: {error:#}");
            ExitCode::FAILURE
        }
    }
}
