//! One layer of a perceptron on a stream of wakeline: cuBLASLt, with bias and ReLU in the same kernel.

use half::f16;
use wakeline::{
    Stream,
    memory::{DeviceSlice, DeviceSliceMut},
    prelude::*,
};

/// `output = relu(input * weights^T + bias)`: float16, with sums in float32. Rows of input become rows of output.
///
/// The weights are stored output by output, as in PyTorch.
pub(crate) struct Linear {
    weights: Buffer<f16>,
    bias: Buffer<f16>,
    /// Numbers per row: of input, of output.
    sizes: [usize; 2],
    lt: lt::Lt,
}

impl Linear {
    /// Copies weights and bias to the stream's device.
    ///
    /// # Errors
    /// If their sizes do not match, the device has no room for them, or cuBLAS is not installed.
    pub(crate) fn new(stream: &Stream, weights: &[f16], bias: &[f16]) -> Result<Self> {
        let [inputs, outputs] = [weights.len() / bias.len().max(1), bias.len()];
        if inputs * outputs != weights.len() || weights.is_empty() {
            return Err(format!("{} weights do not match {outputs} outputs", weights.len()).into());
        }
        Ok(Self {
            weights: Buffer::from_slice(stream, weights)?,
            bias: Buffer::from_slice(stream, bias)?,
            sizes: [inputs, outputs],
            lt: if stream.device().is_cuda() { lt::Lt::new()? } else { lt::Lt::default() },
        })
    }

    #[allow(dead_code, reason = "unused by the bench")]
    pub(crate) fn sizes(&self) -> [usize; 2] {
        self.sizes
    }

    /// Enqueues the layer for so many rows.
    ///
    /// # Errors
    /// If input or output are too short for them, and errors of cuBLAS.
    pub(crate) fn forward(
        &mut self,
        stream: &Stream,
        rows: usize,
        (input, input_len): (&(impl DeviceSlice<f16> + ?Sized), usize),
        (output, output_len): (&mut (impl DeviceSliceMut<f16> + ?Sized), usize),
    ) -> Result<()> {
        let [inputs, outputs] = self.sizes;
        if rows == 0 || input_len < rows * inputs || output_len < rows * outputs {
            let text = format!("{rows} rows of {inputs} to {outputs} numbers do not fit {input_len} and {output_len}");
            return Err(text.into());
        }
        let sizes = [rows, inputs, outputs];
        let mut workspace = stream.alloc::<u8>(self.workspace_bytes(sizes)?)?;
        let call = stream.external("linear").read(input).read(&self.weights).read(&self.bias).write(output);
        let call = call.write(&mut workspace).emulated(move |[input, weights, bias, mut output, _]| {
            forward(input.as_slice(), weights.as_slice(), bias.as_slice(), output.as_mut_slice(), sizes);
        });
        // SAFETY: one call of `cublasLtMatmul` on this stream. It reads and writes the declared slices, within their
        // lengths, as was just checked; the workspace is as large as the algorithm requires.
        unsafe { call.enqueue(|stream, addresses| self.lt.matmul(stream, addresses, sizes)) }
    }

    /// The size of the workspace in bytes, for: rows, numbers per row of input, and of output.
    pub(crate) fn workspace_bytes(&mut self, sizes: [usize; 3]) -> Result<usize> {
        self.lt.workspace_bytes(sizes)
    }

    /// The same without wakeline, from `input` to `output`: for comparison in a bench.
    ///
    /// # Safety
    /// Both have so many rows, the workspace has the required size, and all of it lives until the work is done.
    #[allow(dead_code, reason = "for the bench")]
    pub(crate) unsafe fn forward_bare(
        &mut self,
        stream: *mut std::ffi::c_void,
        [input, output, workspace]: [u64; 3],
        rows: usize,
    ) -> Result<()> {
        let (weights, bias) = (self.weights.device_address()?, self.bias.device_address()?);
        let addresses = [input, weights, bias, output, workspace];
        self.lt.matmul(stream, addresses, [rows, self.sizes[0], self.sizes[1]])
    }
}

/// The same on the host: used on the emulated device.
pub(crate) fn forward(
    input: &[f16],
    weights: &[f16],
    bias: &[f16],
    output: &mut [f16],
    [rows, inputs, outputs]: [usize; 3],
) {
    let wide = |numbers: &[f16]| numbers.iter().map(|number| number.to_f32()).collect::<Vec<_>>();
    let weights = wide(weights);
    for row in 0..rows {
        let input = wide(&input[row * inputs..][..inputs]);
        for (at, output) in output[row * outputs..][..outputs].iter_mut().enumerate() {
            let products = input.iter().zip(&weights[at * inputs..][..inputs]).map(|(input, weight)| input * weight);
            *output = f16::from_f32((products.sum::<f32>() + bias[at].to_f32()).max(0.0));
        }
    }
}

#[cfg(feature = "cuda")]
mod lt {
    use std::{
        collections::{HashMap, hash_map::Entry},
        ffi::c_void,
        ptr,
    };

    use cudarc::cublaslt::{result, sys};
    use wakeline::prelude::*;

    /// The maximum workspace of an algorithm, in bytes: as in PyTorch on this generation of GPUs.
    const WORKSPACE: usize = 32 << 20;

    /// A handle, and the plan for each shape.
    #[derive(Default)]
    pub(super) struct Lt {
        handle: Option<sys::cublasLtHandle_t>,
        plans: HashMap<[usize; 3], Plan>,
    }

    /// The plan for one shape: cuBLAS's own choice of algorithm, cached.
    struct Plan {
        desc: sys::cublasLtMatmulDesc_t,
        weights: sys::cublasLtMatrixLayout_t,
        input: sys::cublasLtMatrixLayout_t,
        output: sys::cublasLtMatrixLayout_t,
        algorithm: sys::cublasLtMatmulAlgo_t,
        workspace: usize,
    }

    // SAFETY: handle and descriptions may be used from any thread, by one at a time, which `&mut` ensures.
    unsafe impl Send for Lt {}

    impl Lt {
        pub(super) fn new() -> Result<Self> {
            // SAFETY: only checks whether the library can be loaded.
            if !unsafe { sys::is_culib_present() } {
                return Err("cuBLAS is not installed: it comes with the CUDA toolkit".into());
            }
            Ok(Self { handle: Some(result::create_handle().map_err(Error::other)?), plans: HashMap::new() })
        }

        /// At least 1: an allocation of 0 bytes is an error.
        pub(super) fn workspace_bytes(&mut self, sizes: [usize; 3]) -> Result<usize> {
            match self.handle {
                Some(_) => Ok(self.plan(sizes)?.workspace.max(1)),
                None => Ok(1),
            }
        }

        fn plan(&mut self, sizes: [usize; 3]) -> Result<&Plan> {
            let Some(handle) = self.handle else { return Err("the layer was created for another device".into()) };
            Ok(match self.plans.entry(sizes) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(Plan::new(handle, sizes).map_err(Error::other)?),
            })
        }

        pub(super) fn matmul(
            &mut self,
            stream: *mut c_void,
            [input, weights, bias, output, workspace]: [u64; 5],
            sizes: [usize; 3],
        ) -> Result<()> {
            let handle = self.handle;
            let plan = self.plan(sizes)?;
            let (zero, one) = (0.0_f32, 1.0_f32);
            let at = |address: u64| address as *mut c_void;
            // SAFETY: the handle and the plan are alive; the caller of `enqueue` guarantees the stream and the slices.
            // The address of the bias is read from the description at each call.
            unsafe {
                let pointer = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                result::set_matmul_desc_attribute(plan.desc, pointer, ptr::from_ref(&bias).cast(), size_of::<u64>())
                    .map_err(Error::other)?;
                result::matmul(
                    handle.unwrap_or(ptr::null_mut()),
                    plan.desc,
                    ptr::from_ref(&one).cast(),
                    ptr::from_ref(&zero).cast(),
                    at(weights),
                    plan.weights,
                    at(input),
                    plan.input,
                    at(output),
                    plan.output,
                    at(output),
                    plan.output,
                    &plan.algorithm,
                    at(workspace),
                    plan.workspace,
                    stream.cast(),
                )
                .map_err(Error::other)
            }
        }
    }

    impl Plan {
        /// cuBLAS is column-major: a row here is a column there, and `output = weights^T * input`.
        fn new(
            handle: sys::cublasLtHandle_t,
            [rows, inputs, outputs]: [usize; 3],
        ) -> Result<Self, result::CublasError> {
            use sys::cublasLtMatmulDescAttributes_t as Attribute;
            let number = sys::cudaDataType::CUDA_R_16F;
            let (rows, inputs, outputs) = (rows as u64, inputs as u64, outputs as u64);
            let desc = result::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            )?;
            let transposed = cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_T;
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_BIAS;
            // SAFETY: the description was just created; each attribute has the given size, and is copied.
            unsafe {
                let set = |attribute, value: *const c_void, bytes| {
                    result::set_matmul_desc_attribute(desc, attribute, value, bytes)
                };
                set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, ptr::from_ref(&transposed).cast(), 4)?;
                set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, ptr::from_ref(&epilogue).cast(), 4)?;
            }
            let weights = result::create_matrix_layout(number, inputs, outputs, inputs as i64)?;
            let input = result::create_matrix_layout(number, inputs, rows, inputs as i64)?;
            let output = result::create_matrix_layout(number, outputs, rows, outputs as i64)?;
            let preference = result::create_matmul_pref()?;
            // SAFETY: all of them were just created, and none is freed before the calls return.
            let found = unsafe {
                let most = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
                let limit = ptr::from_ref(&WORKSPACE).cast();
                result::set_matmul_pref_attribute(preference, most, limit, size_of::<usize>())?;
                let found = result::get_matmul_algo_heuristic(handle, desc, weights, input, output, output, preference);
                result::destroy_matmul_pref(preference)?;
                found?
            };
            Ok(Self { desc, weights, input, output, algorithm: found.algo, workspace: found.workspaceSize })
        }
    }

    impl Drop for Lt {
        fn drop(&mut self) {
            // SAFETY: made by `new` and `plan`, and not used after this. cuBLASLt has no work of its own.
            unsafe {
                for plan in self.plans.values() {
                    let _ = result::destroy_matmul_desc(plan.desc);
                    for layout in [plan.weights, plan.input, plan.output] {
                        let _ = result::destroy_matrix_layout(layout);
                    }
                }
                if let Some(handle) = self.handle {
                    let _ = result::destroy_handle(handle);
                }
            }
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod lt {
    use std::ffi::c_void;

    use wakeline::prelude::*;

    #[derive(Default)]
    pub(super) struct Lt {}

    impl Lt {
        pub(super) fn new() -> Result<Self> {
            Err("built without CUDA".into())
        }

        pub(super) fn workspace_bytes(&mut self, _sizes: [usize; 3]) -> Result<usize> {
            Ok(1)
        }

        pub(super) fn matmul(&mut self, _stream: *mut c_void, _addresses: [u64; 5], _sizes: [usize; 3]) -> Result<()> {
            unreachable!("there is no GPU")
        }
    }
}
