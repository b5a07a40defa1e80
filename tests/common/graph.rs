//! Shared by the tests of graphs.

use wakeline::{Stream, prelude::*};

#[kernel(unsafe(cuda = "../kernels/add_to.cu"))]
pub fn add_to(y: &mut [u32], x: &[u32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

/// A buffer of 64 elements of one value, completed.
pub async fn buffer(stream: &Stream, value: u32) -> Buffer<u32> {
    let buffer = Buffer::from_slice(stream, &[value; 64]).unwrap();
    stream.completed().await.unwrap();
    buffer
}

#[track_caller]
pub fn refused<T>(outcome: Result<T>, says: &[&str]) {
    let error = outcome.err().expect("an error");
    let message = format!("{error:#}");
    assert_eq!(error.kind(), ErrorKind::Usage, "{message}");
    says.iter().for_each(|says| assert!(message.contains(says), "no `{says}` in: {message}"));
}
