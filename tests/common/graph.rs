//! What the tests of graphs share.

use wakeline::{graph::Graph, prelude::*};

/// Adds `x` to each element of `y`.
#[kernel(unsafe(cuda = "../kernels/add_to.cu"))]
pub(crate) fn add_to(y: &mut [u32], x: &[u32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

/// 64 of one value, which are there.
pub(crate) async fn buffer(stream: &Stream, value: u32) -> Buffer<u32> {
    let buffer = Buffer::from_slice(stream, &[value; 64]).unwrap();
    stream.completed().await.unwrap();
    buffer
}

pub(crate) fn streams<const N: usize>(device: &Device) -> [Stream; N] {
    std::array::from_fn(|n| Stream::named(device, ["one", "two", "three"][n]).unwrap())
}

/// One node, which fills.
pub(crate) fn fills(data: &mut Buffer<u32>, value: u32) -> Graph {
    let device = data.device().clone();
    Graph::capture(&device, |capture| capture.stream().fill(data, value)).unwrap().0
}
