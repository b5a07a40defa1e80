//! Valid and invalid kernels for the tests, declared by hand as `#[kernel]` would declare them.
//!
//! By name and signature each is `x[i] *= a`; most of them have one error.

use crate::device::{
    CudaTypes, KernelType,
    backend::{BodyArg, KernelDef, KernelNumber, KernelSource},
};

/// Never called, as these kernels do not run on the emulated device.
pub(super) fn no_body(_: &[BodyArg]) {
    unreachable!("the Rust body is for the emulated device")
}

const fn kernel(name: &'static str, source: KernelSource, prototype: fn(&mut CudaTypes) -> String) -> KernelDef {
    KernelDef {
        name,
        file: "scale.cu",
        declared: "tests.rs:1",
        source,
        prototype,
        body: no_body,
        number: KernelNumber::new(),
    }
}

const fn scale(source: KernelSource) -> KernelDef {
    kernel("scale", source, scale_prototype)
}

fn scale_prototype(_: &mut CudaTypes) -> String {
    "void scale(float* x, unsigned long long x_len, float a)".into()
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Point([f32; 2]);

// SAFETY: the sample's source defines it so.
unsafe impl KernelType for Point {
    const CUDA: &'static str = "Point";
    const DECLARE: &'static str = "struct Point;";
}

fn typed_prototype(types: &mut CudaTypes) -> String {
    Point::declare(types);
    "void typed(const Point* p, unsigned long long p_len)".into()
}

const SCALE: &str = "
__global__ void scale(float* x, unsigned long long x_len, float a) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < x_len) x[i] *= a;
}
";

pub(super) static SCALE_CUDA: KernelDef = scale(KernelSource::Cuda(SCALE));
pub(super) static SCALE_BROKEN: KernelDef =
    scale(KernelSource::Cuda("\n\n__global__ void scale(float* x, unsigned long long n, float a) { x[0] = b; }\n"));
pub(super) static SCALE_OTHER: KernelDef = scale(KernelSource::Cuda(
    "\nextern \"C\" __global__ void scale(const float* x, unsigned long long n, float a) {}\n",
));
pub(super) static SCALE_OVERLOAD: KernelDef =
    scale(KernelSource::Cuda("\n__global__ void scale(const float* x, unsigned long long n, float a) {}\n"));
pub(super) static SCALE_MISSPELT: KernelDef =
    scale(KernelSource::Cuda("__global__ void sclae(float* x, unsigned long long n, float a) {}"));
pub(super) static SCALE_TEMPLATE: KernelDef =
    scale(KernelSource::Cuda("template <class T> __global__ void scale(T* x, unsigned long long n, float a) {}"));
pub(super) static SCALE_NONE: KernelDef = scale(KernelSource::None);
pub(super) static SCALE_NO_CUBIN: KernelDef = scale(KernelSource::Cubin(b"no cubin at all"));
pub(super) static SCALE_BAD_PTX: KernelDef = scale(KernelSource::Ptx(".version 7.5\n.target sm_75\nnonsense\n"));
pub(super) static SCALE_PTX: KernelDef = scale(KernelSource::Ptx(PTX));
pub(super) static TRAP: KernelDef =
    scale(KernelSource::Cuda("__global__ void scale(float* x, unsigned long long n, float a) { __trap(); }"));
pub(super) static TYPED: KernelDef = kernel(
    "typed",
    KernelSource::Cuda(
        "struct Point { float x, y; };\n__global__ void typed(const Point* p, unsigned long long n) {}\n",
    ),
    typed_prototype,
);

pub(super) static COUNTDOWN: KernelDef = kernel("countdown", KernelSource::Ptx(COUNTDOWN_PTX), countdown_prototype);

fn countdown_prototype(_: &mut CudaTypes) -> String {
    "void countdown(unsigned int* left, unsigned long long left_len, unsigned int* done, unsigned long long done_len)"
        .into()
}

/// `left[0] -= 1, done[0] += 1`, for one thread.
const COUNTDOWN_PTX: &str = "
.version 7.5
.target sm_75
.address_size 64
.visible .entry countdown(.param .u64 left, .param .u64 left_len, .param .u64 done, .param .u64 done_len)
{
    .reg .b32 %r;
    .reg .b64 %d;
    ld.param.u64 %d, [left];
    cvta.to.global.u64 %d, %d;
    ld.global.u32 %r, [%d];
    sub.u32 %r, %r, 1;
    st.global.u32 [%d], %r;
    ld.param.u64 %d, [done];
    cvta.to.global.u64 %d, %d;
    ld.global.u32 %r, [%d];
    add.u32 %r, %r, 1;
    st.global.u32 [%d], %r;
    ret;
}
";

/// `x[i] *= a`, for one block.
const PTX: &str = "
.version 7.5
.target sm_75
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 n, .param .f32 a)
{
    .reg .pred %p;
    .reg .f32 %f<3>;
    .reg .b32 %r;
    .reg .b64 %d<5>;
    ld.param.u64 %d1, [x];
    ld.param.u64 %d2, [n];
    ld.param.f32 %f1, [a];
    mov.u32 %r, %tid.x;
    cvt.u64.u32 %d3, %r;
    setp.ge.u64 %p, %d3, %d2;
    @%p bra END;
    cvta.to.global.u64 %d1, %d1;
    shl.b64 %d4, %d3, 2;
    add.u64 %d4, %d1, %d4;
    ld.global.f32 %f2, [%d4];
    mul.f32 %f2, %f2, %f1;
    st.global.f32 [%d4], %f2;
END:
    ret;
}
";
