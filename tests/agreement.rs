//! `kernel::agree` finds the first difference between the two bodies of a kernel.

use std::sync::atomic::{AtomicU64, Ordering};

use common::{alone, emulated};
use wakeline::{
    Stream,
    kernel::{RandomInputs, agree},
    prelude::*,
};

/// y[i] = a x[i] + b + i
#[kernel(unsafe(cuda = "kernels/affine.cu"), over = [x.len()])]
fn affine(x: &[u32], y: &mut [u32], a: u32, b: u32) {
    for (at, (y, x)) in y.iter_mut().zip(x).enumerate() {
        *y = a.wrapping_mul(*x).wrapping_add(b).wrapping_add(at as u32);
    }
}

/// Its CUDA body leaves out the last element.
#[kernel(unsafe(cuda = "kernels/rounded.cu"), over = [x.len()])]
fn rounded(x: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = x.round_ties_even());
}

async fn affines(stream: &Stream, random: &mut RandomInputs) -> Result<Vec<u32>> {
    let n = random.value(1..2000);
    let x = Buffer::from_slice(stream, &random.values(n, 0..u32::MAX))?;
    let mut y = Buffer::from_slice(stream, &vec![0; n])?;
    affine::launch(stream, &x, &mut y, random.value(0..100), random.value(0..100))?;
    y.to_vec(stream).await
}

async fn roundings(stream: &Stream, random: &mut RandomInputs) -> Result<Vec<f32>> {
    let x = Buffer::from_slice(stream, &random.values(100, 1.0..100.0))?;
    let mut y = Buffer::from_slice(stream, &[-1.0_f32; 100])?;
    rounded::launch(stream, &x, &mut y)?;
    y.to_vec(stream).await
}

#[tokio::test]
async fn two_devices_that_run_the_same_body_agree() {
    agree(1).on(&emulated()).run(affines).await.unwrap();
    agree(1).on(&emulated()).tolerance(0.0).rounds(3).run(roundings).await.unwrap();
}

#[tokio::test]
async fn a_planted_difference_is_found_with_its_index_both_values_and_the_seed() {
    let runs = AtomicU64::new(0);
    let planted = async |stream: &Stream, random: &mut RandomInputs| {
        let mut values = affines(stream, random).await?;
        // The second device, in the third round.
        if runs.fetch_add(1, Ordering::Relaxed) == 5 {
            values[0] = values[0].wrapping_add(1);
        }
        Ok((vec![0.5_f32], values))
    };
    let error = agree(10).on(&emulated()).run(planted).await.unwrap_err();
    assert_eq!((error.kind(), runs.load(Ordering::Relaxed)), (ErrorKind::Kernel, 6));
    for part in ["in result 1, element 0 of", "the first of 1 that differ", "the Rust body", "`agree(12).rounds(1)`"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[tokio::test]
async fn an_error_of_the_body_has_its_seed() {
    let fails = async |_: &Stream, _: &mut RandomInputs| Err::<Vec<u8>, Error>("given up".into());
    let error = agree(10).on(&emulated()).run(fails).await.unwrap_err();
    assert!(error.to_string().contains("seed 10") && error.to_string().contains("given up"), "{error}");
}

#[tokio::test]
async fn without_a_gpu_there_is_no_comparison() {
    if Device::cuda_count() == 0 {
        assert!(agree(1).run(affines).await.unwrap_err().is_no_device());
    }
}

#[tokio::test]
#[ignore = "needs a GPU"]
async fn the_bodies_of_a_right_kernel_agree_and_those_of_a_wrong_one_do_not() {
    let _alone = alone().await;
    agree(1).run(affines).await.unwrap();
    let error = agree(1).run(roundings).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Kernel);
    assert!(error.to_string().contains("element 99 of 100, the first of 1 that differ, is"), "{error}");
    assert!(error.to_string().contains("-1.0 on cuda:0"), "{error}");
}
