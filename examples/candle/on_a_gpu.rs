use candle_core::{CudaDevice, CudaStorage, D, Shape, Storage, Tensor, op::BackpropOp};
use wakeline::{Stream, memory::DeviceSlice, operator::MapPorts, prelude::*};

/// Scales each row of `columns` numbers to a sum of one, with candle on its own stream of the operator's GPU.
pub struct Normalise {
    pub columns: usize,
    /// Of `Device::new_cuda_with_stream`: the stream of `Device::new_cuda` is another one on each thread.
    pub candle: CudaDevice,
}

impl Operator for Normalise {
    type Ports = MapPorts<Envelope<f32>, Envelope<f32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let rows = ports.input.take()?;
        let shape = (rows.len() / self.columns, self.columns);
        let rows = to_tensor(cx.stream()?, &self.candle, &rows, rows.len(), shape)?;
        let sums = rows.sum_keepdim(D::Minus1).map_err(Error::other)?;
        let normal = rows.broadcast_div(&sums).map_err(Error::other)?;
        // Enqueued, not awaited: the reader comes after candle's kernels, on the device.
        Ok(ports.output.send(from_tensor(cx.device(), &normal)?.into()).await?)
    }
}

/// A tensor with a copy of these elements.
pub fn to_tensor(
    stream: &Stream,
    candle: &CudaDevice,
    elements: &impl DeviceSlice<f32>,
    len: usize,
    shape: impl Into<Shape>,
) -> Result<Tensor> {
    let shape = shape.into();
    if shape.elem_count() != len {
        return Err(format!("{len} elements are no tensor of {shape:?}").into());
    }
    // SAFETY: the copy writes all of the memory before anything reads it.
    let room = unsafe { candle.alloc::<f32>(len) }.map_err(Error::other)?;
    let (mut room, _) = Buffer::from_cudarc(stream.device(), room)?;
    stream.copy(elements, &mut room)?;
    let storage = CudaStorage::wrap_cuda_slice(room.into_cudarc()?, candle.clone());
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
}

/// A buffer with a copy of a tensor's elements, row by row.
pub fn from_tensor(device: &Device, tensor: &Tensor) -> Result<Buffer<f32>> {
    let tensor = tensor.contiguous().map_err(Error::other)?;
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        return Err("the tensor is not on a CUDA device".into());
    };
    let elements = storage.as_cuda_slice::<f32>().map_err(Error::other)?.slice(start..end);
    let copy = storage.device.cuda_stream().clone_dtod(&elements)?;
    Ok(Buffer::from_cudarc(device, copy)?.0)
}
