//! What the tests of graphs share.

use wakeline::prelude::*;

/// Adds `x` to each element of `y`.
#[kernel(unsafe(cuda = "../kernels/add_to.cu"))]
pub fn add_to(y: &mut [u32], x: &[u32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

/// 64 of one value, which are there.
pub async fn buffer(stream: &Stream, value: u32) -> Buffer<u32> {
    let buffer = Buffer::from_slice(stream, &[value; 64]).unwrap();
    stream.completed().await.unwrap();
    buffer
}

#[track_caller]
pub fn refused<T>(outcome: Result<T>, says: &[&str]) {
    let error = outcome.err().expect("it is refused");
    let told = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Usage, "{told}");
    says.iter().for_each(|says| assert!(told.contains(says), "no `{says}` in: {told}"));
}
