//! Structs that kernels take: arrays, nesting, alignment, names that Rust reserves.
#![deny(missing_docs, missing_debug_implementations, unreachable_pub, warnings)]
#![forbid(unsafe_code)]
#![allow(dead_code)]

use wakeline::{Stream, kernel::KernelType, prelude::*};

const ROWS: usize = 2;

#[derive(Clone, Copy, Debug, KernelStruct)]
#[repr(C)]
struct Point {
    x: f32,
    y: f32,
}

/// Aligned, as a `float4` is.
#[derive(Clone, Copy, Debug, KernelStruct)]
#[repr(C, align(16))]
struct Camera {
    view: [[f32; 4]; ROWS],
    corners: [Point; 3],
    r#type: u32,
    padding: [u8; 4],
}

#[derive(Clone, Copy, KernelStruct)]
#[repr(C)]
#[repr(align(8))]
struct Everything {
    a: u64,
    b: i64,
    c: usize,
    d: isize,
    e: f64,
    f: u32,
    g: i32,
    h: f32,
    i: u16,
    j: i16,
    k: u8,
    l: i8,
    m: [u8; 2],
    n: u8,
    o: [[u8; 1]; 3],
}

#[kernel(over = [points.len()])]
fn look(camera: Camera, points: &mut [Point], all: &[Everything]) {
    points[0].x = camera.view[0][0] + all.len() as f32;
}

fn launches(stream: &Stream, camera: Camera, points: &mut Buffer<Point>, all: &Buffer<Everything>) -> Result<()> {
    look::launch(stream, camera, points, all)
}

pub(super) fn main() {
    assert_eq!((Camera::CUDA, size_of::<Camera>()), ("Camera", 64));
    let mut points = [Point { x: 0.0, y: 0.0 }];
    look(camera(), &mut points, &[]);
    assert_eq!(points[0].x, 1.0);
}

fn camera() -> Camera {
    Camera { view: [[1.0; 4]; ROWS], corners: [Point { x: 0.0, y: 0.0 }; 3], r#type: 0, padding: [0; 4] }
}
