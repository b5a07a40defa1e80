//! Kernels whose CUDA bodies are wrong: `compile_all` finds each of them without a GPU.

use wakeline::{
    ErrorKind,
    kernel::{KernelType, compile_all},
    prelude::*,
};

#[kernel(unsafe(cuda = "doubles.cu"))]
fn doubles(x: &mut [f32]) {
    x.fill(0.0);
}

/// Without `extern "C"` its body is an overload, which compiles.
#[kernel(unsafe(cuda = "overload.cu"))]
fn overload(x: &mut [f32]) {
    x.fill(0.0);
}

#[kernel(unsafe(cuda = "brace.cu"))]
fn brace(x: &mut [f32]) {
    x.fill(0.0);
}

#[kernel(unsafe(cuda = "misspelt.cu"))]
fn misspelt(_x: &mut [f32]) {}

#[kernel(unsafe(cuda = "unknown.cu"))]
fn unknown(x: &mut [f32]) {
    x.fill(0.0);
}

/// The alignment of a type that was declared by hand is not what its C++ type has.
#[derive(Clone, Copy, KernelStruct)]
#[repr(C)]
struct Pair {
    number: u32,
    wide: Wide,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Wide([u32; 3]);

// SAFETY: never launched; wrong on purpose.
unsafe impl KernelType for Wide {
    const CUDA: &'static str = "uint4";
}

#[kernel(unsafe(cuda = "layout.cu"))]
fn layout(pair: Pair) {
    let _ = (pair.number, pair.wide.0);
}

#[kernel(unsafe(cuda = "fine.cu"))]
fn fine(_x: &mut [f32]) {}

#[derive(Clone, Copy, KernelStruct)]
#[repr(C)]
struct Point {
    x: f32,
    y: f32,
}

/// Beside a kernel that takes another struct.
#[kernel(unsafe(cuda = "structs.cu"))]
fn swap(points: &mut [Point]) {
    points.iter_mut().for_each(|point| std::mem::swap(&mut point.x, &mut point.y));
}

#[derive(Clone, Copy, KernelStruct)]
#[repr(C)]
struct Step {
    by: Point,
    times: u32,
}

#[kernel(unsafe(cuda = "structs.cu"))]
fn advance(step: Step, x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x += step.by.x * step.times as f32);
}

#[test]
#[ignore = "needs NVRTC"]
fn each_broken_kernel_is_reported_with_its_declaration_and_the_compilers_log() {
    let error = compile_all("sm_90").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Kernel);
    let text = error.to_string();
    println!("{text}");
    let mut reports = text.split("\n\n`");
    assert_eq!(reports.next(), Some("kernel: 6 of 9 kernels do not compile for sm_90:"));
    let expected: [&[&str]; 6] = [
        &["doubles` (declared at", "void doubles(float *, unsigned long long)", "doubles.cu(1): error"],
        &["overload` (declared at", "void overload(float *, unsigned long long)", "overload.cu(1): error"],
        &["brace` (declared at", "void brace(float *, unsigned long long)", "expected a \"}\"", "brace.cu(1)"],
        &["misspelt` (declared at", "there is no function `misspelt` in misspelt.cu"],
        &["layout` (declared at", "Pair has 16 bytes, aligned to 4, in Rust", "Pair::wide has 12 bytes in Rust"],
        &["unknown` (declared at", "void unknown(float *, unsigned long long)", "unknown.cu(2): error", "\"y\""],
    ];
    let reports: Vec<_> = reports.collect();
    assert_eq!(reports.len(), expected.len(), "{text}");
    for parts in expected {
        let has_all = |report: &&&str| parts.iter().all(|part| report.contains(part));
        assert_eq!(reports.iter().filter(has_all).count(), 1, "{parts:?} in\n{text}");
    }
}

#[test]
#[ignore = "needs NVRTC"]
fn an_architecture_that_the_compiler_does_not_know_is_refused() {
    let error = compile_all("sm_9999").unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("sm_90"), "{error}");
}

#[test]
fn a_misspelt_architecture_is_refused_first() {
    assert_eq!(compile_all("sm90").unwrap_err().kind(), ErrorKind::Usage);
}
