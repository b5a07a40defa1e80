//! File to file: the time of reading and writing alone, and with a device in between.
//!
//! ```text
//!   limit   read ──> {queue} ──> write                                   two threads, page-locked buffers
//!   ours    read ──> {hub} ──> touch, on the device ──> {hub} ──> write     on threads of their own: file operations block
//! ```

use std::{
    fs::File,
    io::{Read, Write},
    path::Path,
    sync::mpsc,
    thread,
    time::Instant,
};

use tokio::runtime::Runtime;
use wakeline::prelude::*;

use crate::{
    figure::{alternate, figure, median},
    flow::{SinkPorts, SourcePorts, Touch, seconds},
};

const CHUNK: usize = 4 << 20;
const ENVELOPES: usize = 4;
const ROUNDS: usize = 5;

struct ReadFile(File);

impl Operator for ReadFile {
    type Ports = SourcePorts<Envelope<u8>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut chunk = ports.output.blank().await?;
        let len = fill(&mut self.0, chunk.space().await?)?;
        chunk.set_len(len)?;
        if chunk.is_empty() {
            cx.finish();
            return Ok(());
        }
        ports.output.send(chunk).await?;
        Ok(())
    }
}

struct WriteFile(File);

impl Operator for WriteFile {
    type Ports = SinkPorts<Envelope<u8>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let chunk = ports.input.take()?;
        Ok(self.0.write_all(chunk.read().await?)?)
    }
}

fn fill(file: &mut File, space: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < space.len() {
        match file.read(&mut space[filled..])? {
            0 => break,
            more => filled += more,
        }
    }
    Ok(filled)
}

async fn through(device: &Device, from: &Path, to: &Path) -> Result<f64> {
    let mut flow = Flow::new("file");
    let read = flow.add("read", ReadFile(File::open(from)?)).on_own_thread();
    let touch = flow.add("touch", Touch).on(device);
    let write = flow.add("write", WriteFile(File::create(to)?)).on_own_thread();
    let hub = HubOptions::bounded(1).envelopes(ENVELOPES);
    flow.connect_with(read.output, touch.input, hub.envelope_bytes(CHUNK));
    flow.connect_with(touch.output, write.input, hub);
    Ok(seconds(&flow.run().await?))
}

/// Copies the same files with two threads and as many buffers. Returns seconds, in total and busy in each of the two.
fn bare(device: &Device, from: &Path, to: &Path) -> Result<(f64, f64, f64)> {
    let (mut from, mut to) = (File::open(from)?, File::create(to)?);
    let (full, to_write) = mpsc::channel::<(Buffer<u8>, usize)>();
    let (empty, to_fill) = mpsc::channel();
    for _ in 0..ENVELOPES {
        empty.send(Buffer::<u8>::pinned(device, CHUNK)?).map_err(Error::other)?;
    }
    let began = Instant::now();
    thread::scope(|scope| {
        let reader = scope.spawn(move || -> Result<f64> {
            let mut busy = 0.0;
            while let Ok(mut buffer) = to_fill.recv() {
                let began = Instant::now();
                let len = fill(&mut from, buffer.as_mut_slice()?)?;
                busy += began.elapsed().as_secs_f64();
                if len == 0 || full.send((buffer, len)).is_err() {
                    break;
                }
            }
            Ok(busy)
        });
        let mut writing = 0.0;
        while let Ok((buffer, len)) = to_write.recv() {
            let began = Instant::now();
            to.write_all(&buffer.as_slice()?[..len])?;
            writing += began.elapsed().as_secs_f64();
            // The reader may have reached the end.
            let _ = empty.send(buffer);
        }
        let reading = reader.join().map_err(|_| Error::from("the reading thread panicked"))??;
        Ok((began.elapsed().as_secs_f64(), reading, writing))
    })
}

pub(crate) fn run(runtime: &Runtime) {
    let device = Device::first().expect("a device");
    let total: usize = if device.is_cuda() { 4 << 30 } else { 128 << 20 };
    let folder = tempfile::tempdir_in(crate::folder()).expect("a folder for the files");
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    let mut file = File::create(&from).expect("a file");
    let block: Vec<u8> = (0..CHUNK).map(|at| (at / 7) as u8).collect();
    (0..total / CHUNK).for_each(|_| file.write_all(&block).expect("room for the file"));
    drop(file);

    let (mut reading, mut writing) = (Vec::new(), Vec::new());
    let rate = |seconds: f64| total as f64 / seconds / 1e9;
    let (limit, ours) = alternate(
        ROUNDS,
        || {
            let (all, read, write) = bare(&device, &from, &to).expect("reads and writes");
            reading.push(rate(read));
            writing.push(rate(write));
            rate(all)
        },
        || rate(runtime.block_on(through(&device, &from, &to)).expect("the flow runs")),
    );
    figure("through.file.read", median(reading), "GB/s", 0.0);
    figure("through.file.write", median(writing), "GB/s", 0.0);
    figure("through.file", ours.median, "GB/s", limit.median);
    figure("through.file.ratio", ours.ratio, "x", 1.0);
}
