use std::ffi::c_void;

use cudarc::cufft::{result, result::CufftError, sys};
use wakeline::{operator::MapPorts, prelude::*};

/// Replaces each message by its discrete Fourier transform. Elements are complex: the real and the imaginary part.
pub struct Transform {
    /// The number of elements of every message, which the plan is for.
    pub points: usize,
    pub plan: Plan,
}

impl Operator for Transform {
    type Ports = MapPorts<Envelope<[f32; 2]>, Envelope<[f32; 2]>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut signal = ports.input.take()?;
        let points = self.points;
        if signal.len() != points {
            return Err(format!("a signal of {} points, not {points}", signal.len()).into());
        }
        let call = cx.stream()?.external("fft").write(&mut signal).emulated(move |[mut signal]| {
            let input = signal.as_slice::<[f32; 2]>().to_vec();
            for (k, out) in signal.as_mut_slice::<[f32; 2]>().iter_mut().enumerate() {
                *out = input.iter().enumerate().fold([0.0; 2], |[re, im], (n, [x, y])| {
                    let (sin, cos) = (-std::f32::consts::TAU * (k * n % points) as f32 / points as f32).sin_cos();
                    [re + x * cos - y * sin, im + x * sin + y * cos]
                });
            }
        });
        // SAFETY: one transform on this stream, in place, of as many elements as the declared slice has.
        unsafe { call.enqueue(|stream, [signal]| self.plan.forward(stream, signal, points).map_err(Error::other)) }?;
        Ok(ports.output.send(signal).await?)
    }
}

/// A cuFFT plan. The first call creates it, in the context that is current then: the device's.
#[derive(Default)]
pub struct Plan(Option<sys::cufftHandle>);

impl Plan {
    fn forward(&mut self, stream: *mut c_void, signal: u64, points: usize) -> Result<(), CufftError> {
        let create = || result::plan_1d(points as i32, sys::cufftType::CUFFT_C2C, 1);
        let plan = *self.0.insert(self.0.map_or_else(create, Ok)?);
        const FORWARD: i32 = -1;
        // SAFETY: the caller guarantees the stream and the slice, of `points` elements.
        unsafe {
            result::set_stream(plan, stream.cast())?;
            result::exec_c2c(plan, signal as *mut _, signal as *mut _, FORWARD)
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: the plan was created above and is not used after this.
        self.0.take().map(|plan| unsafe { result::destroy(plan) });
    }
}
