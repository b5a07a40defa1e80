//! Converts a file of any size, even larger than the device's memory, to upper case on the device.
//!
//! `cargo run --release --example uppercase -- INPUT OUTPUT [--device cuda:0|emulated] [--chunk 4MiB] [--envelopes 3]`
//!
//! ```text
//!   read ──> {hub} ──> upper ──> {hub} ──> write
//!   host               device              host
//! ```

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
#[cfg(target_os = "linux")]
use rustix::fs::{AtFlags, CWD, OFlags, linkat};
use tempfile::NamedTempFile;
use tokio::signal;
use wakeline::prelude::*;

/// Converts a file to upper case on a GPU: `tr a-z A-Z`, byte for byte.
#[derive(Parser)]
struct Args {
    /// The file to read.
    input: PathBuf,
    /// The file to write; it appears only once it is complete. Missing folders are created.
    output: PathBuf,
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    device: Option<String>,
    /// Bytes that are read, sent through the device and written at once: 65536, 64KiB, 4MiB.
    #[arg(long, default_value = "4MiB", value_parser = bytes)]
    chunk: usize,
    /// Envelopes on each side of each hub.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    envelopes: u16,
}

fn bytes(text: &str) -> Result<usize, String> {
    let size: bytesize::ByteSize = text.parse()?;
    match usize::try_from(size.as_u64()) {
        Ok(0) | Err(_) => Err("a chunk must have at least 1 byte".into()),
        Ok(bytes) => Ok(bytes),
    }
}

/// One declaration, two bodies: uppercase.cu for a GPU, this function for the emulated device.
#[kernel(unsafe(cuda = "uppercase.cu"))]
fn uppercase(text: &mut [u8]) {
    text.make_ascii_uppercase();
}

#[derive(Ports)]
struct ReadPorts {
    #[output]
    chunks: Output<Envelope<u8>>,
}

struct ReadChunks(File);

impl Operator for ReadChunks {
    type Ports = ReadPorts;

    async fn compute(&mut self, ports: &mut ReadPorts, cx: &mut Cx) -> Result<()> {
        let mut chunk = ports.chunks.blank().await?;
        chunk.idle().await?;
        let space = chunk.as_mut_space()?;
        let mut filled = 0;
        while filled < space.len() {
            match self.0.read(&mut space[filled..]) {
                Ok(0) => break,
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        chunk.set_len(filled)?;
        if chunk.len() < chunk.capacity() {
            cx.finish();
        }
        if chunk.is_empty() {
            return Ok(());
        }
        ports.chunks.send(chunk).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct UpperPorts {
    #[input]
    chunks: Input<Envelope<u8>>,
    #[output]
    shouted: Output<Envelope<u8>>,
}

struct Upper;

impl Operator for Upper {
    type Ports = UpperPorts;

    async fn compute(&mut self, ports: &mut UpperPorts, cx: &mut Cx) -> Result<()> {
        let mut text = ports.chunks.take()?;
        uppercase::launch(cx.stream()?, &mut text)?;
        ports.shouted.send(text).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct WritePorts {
    #[input]
    chunks: Input<Envelope<u8>>,
}

struct WriteChunks {
    file: File,
    progress: ProgressBar,
}

impl Operator for WriteChunks {
    type Ports = WritePorts;

    async fn compute(&mut self, ports: &mut WritePorts, _cx: &mut Cx) -> Result<()> {
        let chunk = ports.chunks.take()?;
        chunk.idle().await?;
        self.file.write_all(chunk.as_slice()?)?;
        self.progress.inc(chunk.len() as u64);
        Ok(())
    }
}

/// The output. It has no name until it is complete, so that a killed process leaves nothing behind, or a temporary name
/// if the filesystem does not support that. A path that is not a regular file (`/dev/null`) is written directly.
enum Target {
    #[cfg(target_os = "linux")]
    Unnamed(File),
    Staged(NamedTempFile),
    Direct(File),
}

impl Target {
    fn create(path: &Path) -> io::Result<Self> {
        let found = match path.metadata() {
            Ok(found) if !found.is_file() => return Ok(Self::Direct(File::create(path)?)),
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        if found.is_some() {
            // The existing file is replaced only if it is writable.
            File::options().write(true).open(path)?;
        }
        let folder = folder_of(path);
        fs::create_dir_all(folder)?;
        let mut staged = staging();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;

            let mode = found.map_or(0o666, |found| found.permissions().mode());
            #[cfg(target_os = "linux")]
            if let Some(file) = unnamed(folder, mode) {
                return Ok(Self::Unnamed(file));
            }
            staged.permissions(PermissionsExt::from_mode(mode));
        }
        // Omits the name of the staging file, which means nothing to a user.
        staged.tempfile_in(folder).map(Self::Staged).map_err(|error| error.kind().into())
    }

    fn file(&self) -> io::Result<File> {
        match self {
            #[cfg(target_os = "linux")]
            Self::Unnamed(file) => file.try_clone(),
            Self::Staged(file) => file.as_file().try_clone(),
            Self::Direct(file) => file.try_clone(),
        }
    }

    fn complete(self, path: &Path) -> io::Result<()> {
        match self {
            // A new link cannot replace a file, but a rename can: so the file briefly has another name.
            #[cfg(target_os = "linux")]
            Self::Unnamed(file) => {
                let named = staging().make_in(folder_of(path), |name| {
                    linkat(CWD, open_file(&file), CWD, name, AtFlags::SYMLINK_FOLLOW).map_err(io::Error::from)
                });
                named?.persist(path).map_err(|error| error.error)
            }
            Self::Staged(file) => file.persist(path).map(drop).map_err(|error| error.error),
            Self::Direct(file) => file.sync_all().or(Ok(())),
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn staging() -> tempfile::Builder<'static, 'static> {
    let mut staging = tempfile::Builder::new();
    staging.prefix(".uppercase-");
    staging
}

/// A new file without a name, if the filesystem supports such files, and can name them later.
#[cfg(target_os = "linux")]
fn unnamed(folder: &Path, mode: u32) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;

    let flags = OFlags::TMPFILE.bits() as i32;
    let file = File::options().write(true).custom_flags(flags).mode(mode).open(folder).ok()?;
    open_file(&file).exists().then_some(file)
}

/// The path of an open file that has no name.
#[cfg(target_os = "linux")]
fn open_file(file: &File) -> PathBuf {
    use std::os::fd::AsRawFd;

    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// The destination of a path. Symbolic links are kept, even dangling ones.
fn destination(output: &Path) -> PathBuf {
    if let Ok(found) = output.canonicalize() {
        return found;
    }
    let mut path = output.to_owned();
    // An existing target without a path (the pipe behind `/dev/stdout`) is opened through the link.
    while path.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        && let Ok(next) = path.read_link()
    {
        path = folder_of(&path).join(next);
    }
    path
}

async fn shout(args: &Args) -> Result<String> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let named = |path: &Path| path.display().to_string();
    let input = File::open(&args.input).map_err(|error| Error::from(error).at(named(&args.input)))?;
    let size = input.metadata().map_err(|error| Error::from(error).at(named(&args.input)))?;
    if size.is_dir() {
        return Err(Error::from("is a directory, not a file").at(named(&args.input)));
    }
    let at_output = |error: io::Error| Error::from(error).at(named(&args.output));
    let output = destination(&args.output);
    let target = Target::create(&output).map_err(at_output)?;

    let style = "{wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
    let progress = ProgressBar::new(size.len()).with_style(ProgressStyle::with_template(style).map_err(Error::other)?);

    let began = Instant::now();
    let mut flow = Flow::new("uppercase");
    // File operations block, so reader and writer have threads of their own.
    let read = flow.add("read", ReadChunks(input)).on_own_thread();
    let upper = flow.add("upper", Upper).on(&device);
    let write = WriteChunks { file: target.file().map_err(at_output)?, progress: progress.clone() };
    let write = flow.add("write", write).on_own_thread();
    let hub = HubOptions::bounded(1).envelopes(usize::from(args.envelopes));
    flow.connect_with(read.chunks, upper.chunks, hub.envelope_bytes(args.chunk));
    flow.connect_with(upper.shouted, write.chunks, hub);
    let report = flow.run().await;
    progress.finish_and_clear();
    let report = report?;
    drop(flow);
    target.complete(&output).map_err(at_output)?;

    let seconds = began.elapsed().as_secs_f64();
    let bytes = report.operator("write").map_or(0, |write| write.bytes_in);
    Ok(format!(
        "{bytes} bytes in {seconds:.3} s, {:.2} GB/s, on {} ({}), peak device memory {} bytes",
        bytes as f64 / seconds / 1e9,
        device,
        device.description(),
        device.memory_peak()
    ))
}

/// Resolves at ctrl-c or SIGTERM, with the exit code of a program terminated by it.
async fn interrupted() -> u8 {
    #[cfg(unix)]
    let terminated = async {
        match signal::unix::signal(signal::unix::SignalKind::terminate()) {
            Ok(mut signals) => _ = signals.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    #[cfg(not(unix))]
    let terminated = std::future::pending();
    tokio::select! {
        Ok(()) = signal::ctrl_c() => 128 + 2,
        () = terminated => 128 + 15,
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = tokio::select! {
        // Polled first: it opens its files, which may block, before the signals are caught.
        biased;
        outcome = shout(&args) => outcome,
        // The job is dropped, and its staged file with it.
        code = interrupted() => {
            eprintln!("uppercase: interrupted");
            return code.into();
        }
    };
    match outcome {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("uppercase: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    /// Needs NVRTC, and no GPU: `cargo test --example uppercase -- --ignored`
    #[test]
    #[ignore = "needs NVRTC"]
    fn every_kernel_compiles() {
        wakeline::kernel::compile_all("sm_90").unwrap();
    }
}
