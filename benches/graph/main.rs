//! Graphs: host and device cost of a launch, against streams and against the driver's own calls.
//!
//! ```text
//! cargo bench -p wakeline-benches --bench graph                        everything
//! cargo bench -p wakeline-benches --bench graph -- shapes              32 empty kernels: in a line, in two branches, forked and joined
//! cargo bench -p wakeline-benches --bench graph -- copies              input and output: copies on the stream, and copy nodes with new addresses
//! cargo bench -p wakeline-benches --bench graph -- chain               32 operators, streamed and replayed: host time per message
//! cargo bench -p wakeline-benches --bench graph -- mlp                 a perceptron with cuBLAS: queries per second
//! ```
//!
//! All in one process, alternating. Needs a CUDA device. With `WAKELINE_DEVICE=emulated` wakeline runs on the emulated
//! device, which only checks that the bench works; limits are then 0.

mod chain;
mod copies;
#[path = "../support/cpu.rs"]
mod cpu;
#[path = "../support/figure.rs"]
mod figure;
#[path = "../support/gpu.rs"]
mod gpu;
#[path = "../../examples/more/mlp/linear.rs"]
mod linear;
mod mlp;
mod nothing;
mod shapes;
#[path = "../stage/step.rs"]
mod step;

use wakeline::{Device, Result, device::Emulated};

use gpu::Gpu;

fn device() -> Result<Option<(Device, Option<Gpu>)>> {
    if std::env::var("WAKELINE_DEVICE").is_ok_and(|name| name == "emulated") {
        return Ok(Some((Device::emulated(Emulated::new()), None)));
    }
    if Device::cuda_count() == 0 {
        return Ok(None);
    }
    let device = Device::cuda(0)?;
    let gpu = Gpu::open();
    gpu.enter();
    Ok(Some((device, Some(gpu))))
}

fn main() -> Result<()> {
    if !figure::asked() {
        return Ok(());
    }
    let Some((device, gpu)) = device()? else {
        println!("no CUDA device: nothing is measured (WAKELINE_DEVICE=emulated checks that the bench works)");
        return Ok(());
    };
    println!("{}", device.description());
    let which: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let is_asked = |name: &str| which.is_empty() || which.iter().any(|asked| asked == name);
    if is_asked("shapes") {
        shapes::measure(&device, gpu.as_ref())?;
    }
    if let Some(gpu) = gpu.as_ref().filter(|_| is_asked("copies")) {
        copies::measure(gpu);
    }
    if is_asked("chain") {
        chain::measure(&device)?;
    }
    if is_asked("mlp") {
        mlp::measure(&device, gpu.as_ref())?;
    }
    Ok(())
}
