use std::ffi::c_void;

use cudarc::cublas::{result, result::CublasError, sys};
use wakeline::{operator::MapPorts, prelude::*};

/// Multiplies each message, a matrix with `inner` columns, by `weights`. All matrices are stored row by row.
pub struct Project {
    pub weights: Buffer<f32>,
    pub inner: usize,
    pub blas: Blas,
}

impl Operator for Project {
    type Ports = MapPorts<Envelope<f32>, Envelope<f32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let rows = ports.input.take()?;
        let [m, k, n] = [rows.len() / self.inner, self.inner, self.weights.len() / self.inner];
        let mut product = ports.output.blank().await?;
        product.set_len(m * n)?;
        let call = cx.stream()?.external("sgemm").read(&rows).read(&self.weights).write(&mut product);
        let call = call.emulated(move |[a, b, mut c]| {
            let (a, b) = (a.as_slice::<f32>(), b.as_slice::<f32>());
            for (at, c) in c.as_mut_slice::<f32>().iter_mut().enumerate() {
                *c = (0..k).map(|i| a[at / n * k + i] * b[i * n + at % n]).sum();
            }
        });
        // SAFETY: one call of cuBLAS into this stream. It accesses m k, k n and m n elements of the three slices.
        unsafe { call.enqueue(|stream, slices| self.blas.sgemm(stream, slices, [m, k, n]).map_err(Error::other)) }?;
        Ok(ports.output.send(product).await?)
    }
}

/// A cuBLAS handle. The first call creates it, in the context that is current then: the device's.
#[derive(Default)]
pub struct Blas(Option<sys::cublasHandle_t>);

// SAFETY: a handle may be used from any thread, by one at a time, which `&mut` ensures.
unsafe impl Send for Blas {}

impl Blas {
    fn sgemm(&mut self, stream: *mut c_void, [a, b, c]: [u64; 3], sizes: [usize; 3]) -> Result<(), CublasError> {
        let blas = *self.0.insert(self.0.map_or_else(result::create_handle, Ok)?);
        let ([m, k, n], no) = (sizes.map(|size| size as i32), sys::cublasOperation_t::CUBLAS_OP_N);
        let (a, b, c) = (a as *const f32, b as *const f32, c as *mut f32);
        // SAFETY: the caller guarantees the stream and the slices. cuBLAS stores matrices column by column: in its terms,
        // the transposed product is `b` times `a`.
        unsafe {
            result::set_stream(blas, stream.cast())?;
            result::sgemm(blas, no, no, n, m, k, &1.0, b, n, a, k, &0.0, c, n)
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: the handle was created above and is not used after this. cuBLAS waits for its own work.
        self.0.take().map(|blas| unsafe { result::destroy_handle(blas) });
    }
}
