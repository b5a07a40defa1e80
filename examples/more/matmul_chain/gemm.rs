//! cuBLAS on a stream of wakeline: its reads and writes are declared, and it is ordered with the stream's other work.

use wakeline::{
    Stream,
    memory::{DeviceSlice, DeviceSliceMut},
    prelude::*,
};

/// Rows and columns of a matrix, stored row by row.
pub(crate) type Shape = [usize; 2];

/// Multiplies matrices of float32 on one stream.
#[derive(Default)]
pub(crate) struct Gemm {
    #[cfg(feature = "cuda")]
    cublas: cublas::Cublas,
}

/// A matrix, or room for one.
pub(crate) struct Matrix<S> {
    elements: S,
    shape: Shape,
}

impl<S> Matrix<S> {
    /// # Errors
    /// If the number of elements does not match the shape.
    pub(crate) fn new(elements: S, len: usize, shape: Shape) -> Result<Self> {
        let [rows, columns] = shape;
        if rows.checked_mul(columns) != Some(len) || len == 0 || len > i32::MAX as usize {
            return Err(format!("a matrix of {rows} x {columns} cannot have {len} elements").into());
        }
        Ok(Self { elements, shape })
    }
}

impl Gemm {
    /// Enqueues `product = left * right`.
    ///
    /// # Errors
    /// If the shapes do not match, and errors of cuBLAS.
    pub(crate) fn multiply(
        &mut self,
        stream: &Stream,
        left: &Matrix<&(impl DeviceSlice<f32> + ?Sized)>,
        right: &Matrix<&(impl DeviceSlice<f32> + ?Sized)>,
        product: Matrix<&mut (impl DeviceSliceMut<f32> + ?Sized)>,
    ) -> Result<()> {
        let ([rows, inner], [also_inner, columns]) = (left.shape, right.shape);
        if inner != also_inner || product.shape != [rows, columns] {
            let text = format!("{:?} times {:?} does not give {:?}", left.shape, right.shape, product.shape);
            return Err(text.into());
        }
        let call = stream.external("sgemm").read(left.elements).read(right.elements).write(product.elements).emulated(
            move |[left, right, mut product]| {
                multiply(left.as_slice(), right.as_slice(), product.as_mut_slice(), [rows, inner, columns]);
            },
        );
        // SAFETY: one call of `cublasSgemm` on this stream. It reads and writes the declared slices, within their
        // lengths, as every `Matrix` has as many elements as its shape says, and its handle's own workspace.
        unsafe { call.enqueue(|stream, addresses| self.sgemm(stream, addresses, [rows, inner, columns])) }
    }

    #[cfg(feature = "cuda")]
    fn sgemm(&mut self, stream: *mut std::ffi::c_void, matrices: [u64; 3], sizes: [usize; 3]) -> Result<()> {
        self.cublas.sgemm(stream, matrices, sizes)
    }

    #[cfg(not(feature = "cuda"))]
    fn sgemm(&mut self, _stream: *mut std::ffi::c_void, _matrices: [u64; 3], _sizes: [usize; 3]) -> Result<()> {
        unreachable!("there is no GPU")
    }
}

/// The same on the host: used on the emulated device.
fn multiply(left: &[f32], right: &[f32], product: &mut [f32], [rows, inner, columns]: [usize; 3]) {
    product.fill(0.0);
    for row in 0..rows {
        let product = &mut product[row * columns..][..columns];
        for at in 0..inner {
            let factor = left[row * inner + at];
            product.iter_mut().zip(&right[at * columns..][..columns]).for_each(|(sum, right)| *sum += factor * right);
        }
    }
}

#[cfg(feature = "cuda")]
mod cublas {
    use std::ffi::c_void;

    use cudarc::cublas::{result, sys};
    use wakeline::prelude::*;

    /// A handle, created by the first call: cuBLAS binds it to the context that is current then.
    #[derive(Default)]
    pub(super) struct Cublas(Option<sys::cublasHandle_t>);

    // SAFETY: a handle may be used from any thread, by one at a time, which `&mut` ensures.
    unsafe impl Send for Cublas {}

    impl Cublas {
        pub(super) fn sgemm(
            &mut self,
            stream: *mut c_void,
            [left, right, product]: [u64; 3],
            [rows, inner, columns]: [usize; 3],
        ) -> Result<()> {
            let handle = match self.0 {
                Some(handle) => handle,
                None => *self.0.insert(create()?),
            };
            let (m, n, k) = (columns as i32, rows as i32, inner as i32);
            let (zero, one) = (0.0, 1.0);
            let no = sys::cublasOperation_t::CUBLAS_OP_N;
            // SAFETY: the handle is alive; the caller of `enqueue` guarantees the stream and the three matrices. cuBLAS
            // is column-major: in its terms the result is `right * left`.
            unsafe {
                result::set_stream(handle, stream.cast()).map_err(Error::other)?;
                let (left, right, product) = (left as *const f32, right as *const f32, product as *mut f32);
                result::sgemm(handle, no, no, m, n, k, &one, right, m, left, k, &zero, product, m).map_err(Error::other)
            }
        }
    }

    fn create() -> Result<sys::cublasHandle_t> {
        // SAFETY: only checks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Err("cuBLAS is not installed: it comes with the CUDA toolkit".into());
        }
        result::create_handle().map_err(Error::other)
    }

    impl Drop for Cublas {
        fn drop(&mut self) {
            if let Some(handle) = self.0.take() {
                // SAFETY: made by `create`, and not used after this. cuBLAS waits for its own work.
                let _ = unsafe { result::destroy_handle(handle) };
            }
        }
    }
}
