//! Cost of passing through a device, against the limit of the bus or the files. Both in this process, alternating.
//!
//! ```text
//! cargo bench -p wakeline-benches --bench through                    all parts that this machine supports
//! cargo bench -p wakeline-benches --bench through -- sizes           chunks of 64 KiB to 16 MiB, in both directions at once
//! cargo bench -p wakeline-benches --bench through -- small           chunks of 64 and 256 KiB, against the same work by hand
//! cargo bench -p wakeline-benches --bench through -- devices         on all GPUs at once, if there are several
//! cargo bench -p wakeline-benches --bench through -- constant        64 GiB, and the growth of memory meanwhile
//! cargo bench -p wakeline-benches --bench through -- file            file to file; with the time of the files alone
//! cargo bench -p wakeline-benches --bench through -- timeline        a picture: ten chunks produced, copied in, computed, copied out, consumed
//! ```
//!
//! The first four need CUDA devices. `file` and `timeline` also run on the emulated device, which only checks that
//! they work. Files are written to `WAKELINE_BENCH_DIR`, by default to the temporary folder.

#[cfg(feature = "cuda")]
mod bare;
#[cfg(feature = "cuda")]
mod bus;
mod churn;
#[path = "../support/figure.rs"]
mod figure;
mod file;
mod flow;
#[cfg(feature = "cuda")]
#[path = "../support/gpu.rs"]
mod gpu;
#[cfg(feature = "cuda")]
mod memory;
mod timeline;
mod touch;

/// The folder for files.
fn folder() -> std::path::PathBuf {
    std::env::var_os("WAKELINE_BENCH_DIR").map_or_else(std::env::temp_dir, Into::into)
}

fn main() {
    if !figure::asked() {
        return;
    }
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|arg| arg == name);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
    #[cfg(feature = "cuda")]
    {
        // Before anything larger: it reads the peak of the device's memory.
        if wants("constant") {
            bus::constant(&runtime);
        }
        if wants("sizes") {
            bus::sizes(&runtime);
        }
        if wants("small") {
            bus::small(&runtime);
        }
        if wants("devices") {
            bus::devices(&runtime);
        }
    }
    if wants("file") {
        file::run(&runtime);
    }
    if wants("timeline") {
        timeline::run(&runtime);
    }
}
