use std::ffi::c_void;

use cudarc::cudnn::{result, result::CudnnError, sys};
use wakeline::{operator::MapPorts, prelude::*};

/// Replaces each row of `classes` scores by its softmax.
pub struct Softmax {
    pub classes: usize,
    pub dnn: Dnn,
}

impl Operator for Softmax {
    type Ports = MapPorts<Envelope<f32>, Envelope<f32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut scores = ports.input.take()?;
        let (rows, classes) = (scores.len() / self.classes, self.classes);
        let call = cx.stream()?.external("softmax").write(&mut scores).emulated(move |[mut scores]| {
            for row in scores.as_mut_slice::<f32>().chunks_exact_mut(classes) {
                let highest = row.iter().copied().fold(f32::MIN, f32::max);
                let sum: f32 = row.iter().map(|score| (score - highest).exp()).sum();
                row.iter_mut().for_each(|score| *score = (*score - highest).exp() / sum);
            }
        });
        // SAFETY: one call of cuDNN into this stream, in place, on `rows * classes` elements of the declared slice.
        unsafe { call.enqueue(|stream, [x]| self.dnn.softmax(stream, x, [rows, classes]).map_err(Error::other)) }?;
        Ok(ports.output.send(scores).await?)
    }
}

/// A cuDNN handle and a tensor's description. The first call creates them, in the context that is current then.
#[derive(Default)]
pub struct Dnn(Option<(sys::cudnnHandle_t, sys::cudnnTensorDescriptor_t)>);

// SAFETY: a handle may be used from any thread, by one at a time, which `&mut` ensures; so may a description.
unsafe impl Send for Dnn {}

impl Dnn {
    fn softmax(&mut self, stream: *mut c_void, scores: u64, [rows, classes]: [usize; 2]) -> Result<(), CudnnError> {
        let create = || Ok((result::create_handle()?, result::create_tensor_descriptor()?));
        let (dnn, shape) = *self.0.insert(self.0.map_or_else(create, Ok)?);
        let (nchw, float) = (sys::cudnnTensorFormat_t::CUDNN_TENSOR_NCHW, sys::cudnnDataType_t::CUDNN_DATA_FLOAT);
        let accurate = sys::cudnnSoftmaxAlgorithm_t::CUDNN_SOFTMAX_ACCURATE;
        let per_row = sys::cudnnSoftmaxMode_t::CUDNN_SOFTMAX_MODE_INSTANCE;
        let [one, zero] = [&1.0_f32, &0.0].map(|scale| std::ptr::from_ref(scale).cast());
        // SAFETY: the caller guarantees the stream and the slice.
        unsafe {
            result::set_stream(dnn, stream.cast())?;
            result::set_tensor4d_descriptor(shape, nchw, float, [rows as i32, classes as i32, 1, 1])?;
            result::softmax_forward(dnn, accurate, per_row, one, shape, scores as _, zero, shape, scores as _)
        }
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        // SAFETY: not used after this.
        self.0.take().map(|(dnn, of)| unsafe { (result::destroy_tensor_descriptor(of), result::destroy_handle(dnn)) });
    }
}
