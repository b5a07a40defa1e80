//! A folder of images through two-dimensional kernels: thumbnails, drawn like cartoons, in one picture at the end.
//!
//! `cargo run --release -p wakeline-more-examples --example pictures -- FOLDER SHEET.png [--size 128] [--device emulated]`
//!
//! ```text
//!                          ┌──> soften ──┐
//!   read ──> shrink ───────┤             ├──> draw ──> egress `thumbnails` ──> SHEET.png
//!   host     device        └──> edges ───┘
//!            reads a whole image, writes a thumbnail: a blank of its own output
//! ```
//!
//! Files that are no images, or too large, are skipped and counted.

mod kernels;

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use clap::Parser;
use image::{Rgba, RgbaImage, imageops};
use wakeline::{operator::MapPorts, prelude::*};

/// Draws thumbnails of the images in a folder, on a GPU.
#[derive(Parser)]
struct Args {
    /// The folder with PNG and JPEG files.
    folder: PathBuf,
    /// The picture to write, with all thumbnails.
    sheet: PathBuf,
    /// Width and height of a thumbnail, in pixels.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(8..=1024))]
    size: u32,
    /// The largest number of pixels of an image; larger ones are skipped.
    #[arg(long, default_value_t = 1 << 22)]
    pixels: usize,
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    device: Option<String>,
}

/// An image, or a thumbnail: a pixel is red, green, blue and alpha in the bytes of a `u32`.
#[derive(Message)]
struct Picture {
    name: String,
    width: u32,
    height: u32,
    #[envelope]
    pixels: Envelope<u32>,
}

#[derive(Ports)]
struct ReadPorts {
    #[output]
    images: Output<Picture>,
}

/// Decodes the files, one in each run.
struct Read {
    files: VecDeque<PathBuf>,
    skipped: Arc<AtomicUsize>,
}

impl Operator for Read {
    type Ports = ReadPorts;

    async fn compute(&mut self, ports: &mut ReadPorts, cx: &mut Cx) -> Result<()> {
        let Some(file) = self.files.pop_front() else {
            cx.finish();
            return Ok(());
        };
        let mut pixels = ports.images.blank::<u32>().await?;
        let image = match image::open(&file) {
            Ok(image) if image.width() as usize * image.height() as usize <= pixels.capacity() => image.into_rgba8(),
            other => {
                let why = other.map_or_else(|error| error.to_string(), |_| "it is too large: see --pixels".into());
                eprintln!("pictures: skipped {}: {why}", file.display());
                self.skipped.fetch_add(1, Ordering::Relaxed);
                return Ok(()); // the blank returns to its hub
            }
        };
        let (width, height) = image.dimensions();
        pixels.set_len((width * height) as usize)?;
        let bytes = bytemuck::cast_slice_mut(pixels.write().await?);
        bytes.copy_from_slice(&image);
        let name = file.file_name().unwrap_or_default().to_string_lossy().into();
        ports.images.send(Picture { name, width, height, pixels }).await?;
        Ok(())
    }
}

/// Makes a thumbnail that fits into a square.
struct Shrink {
    size: u32,
}

impl Operator for Shrink {
    type Ports = MapPorts<Picture, Picture>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let (image, mut pixels) = (ports.input.take()?, ports.output.blank::<u32>().await?);
        let longest = image.width.max(image.height);
        let scaled = |side: u32| (u64::from(side) * u64::from(self.size) / u64::from(longest)).max(1) as u32;
        let (width, height) = (scaled(image.width), scaled(image.height));
        pixels.set_len((width * height) as usize)?;
        let stream = cx.stream()?;
        kernels::shrink::launch(stream, image.width, image.height, &image.pixels, width, height, &mut pixels)?;
        ports.output.send(Picture { name: image.name, width, height, pixels }).await?;
        Ok(())
    }
}

/// A kernel from the pixels of a thumbnail to those of another.
type Filter = fn(&wakeline::Stream, u32, u32, &Envelope<u32>, &mut Envelope<u32>) -> Result<()>;

/// Applies a filter to each thumbnail.
struct Apply(Filter);

impl Operator for Apply {
    type Ports = MapPorts<Picture, Picture>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let (picture, mut pixels) = (ports.input.take()?, ports.output.blank::<u32>().await?);
        let Picture { name, width, height, .. } = picture;
        pixels.set_len(picture.pixels.len())?;
        (self.0)(cx.stream()?, width, height, &picture.pixels, &mut pixels)?;
        ports.output.send(Picture { name, width, height, pixels }).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct DrawPorts {
    #[input]
    soft: Input<Picture>,
    #[input]
    edges: Input<Picture>,
    #[output]
    drawn: Output<Picture>,
}

/// Draws the edges over the softened picture. Its two inputs pair the branches: a run takes one message of each.
struct Draw;

impl Operator for Draw {
    type Ports = DrawPorts;

    async fn compute(&mut self, ports: &mut DrawPorts, cx: &mut Cx) -> Result<()> {
        let (mut soft, edges) = (ports.soft.take()?, ports.edges.take()?);
        kernels::draw::launch(cx.stream()?, &mut soft.pixels, &edges.pixels)?;
        ports.drawn.send(soft).await?;
        Ok(())
    }
}

/// The image files of a folder, in the order of their names.
fn files(folder: &Path) -> Result<VecDeque<PathBuf>> {
    let at = |error: std::io::Error| Error::from(error).at(folder.display().to_string());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(at)? {
        let path = entry.map_err(at)?.path();
        let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default().to_ascii_lowercase();
        if ["png", "jpg", "jpeg"].contains(&&*kind) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files.into())
}

/// The thumbnails in rows, each in a square.
fn sheet(thumbnails: &[RgbaImage], size: u32) -> RgbaImage {
    let columns = (thumbnails.len() as f64).sqrt().ceil().max(1.0) as u32;
    let rows = (thumbnails.len() as u32).div_ceil(columns).max(1);
    let mut sheet = RgbaImage::from_pixel(columns * size, rows * size, Rgba([255; 4]));
    for (at, thumbnail) in thumbnails.iter().enumerate() {
        let (column, row) = (at as u32 % columns, at as u32 / columns);
        let (left, top) = ((size - thumbnail.width()) / 2, (size - thumbnail.height()) / 2);
        imageops::overlay(&mut sheet, thumbnail, (column * size + left).into(), (row * size + top).into());
    }
    sheet
}

async fn draw(args: &Args) -> Result<String> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let skipped = Arc::new(AtomicUsize::new(0));
    let images = HubOptions::bounded(2).envelope_bytes(args.pixels.saturating_mul(4));
    let thumbnails = HubOptions::bounded(2).envelope_bytes((args.size * args.size * 4) as usize);

    let mut flow = Flow::new("pictures");
    let read = Read { files: files(&args.folder)?, skipped: skipped.clone() };
    let read = flow.add("read", read).on_own_thread(); // decoding blocks
    let shrink = flow.add("shrink", Shrink { size: args.size }).on(&device);
    let soften = flow.add("soften", Apply(kernels::soften::launch)).on(&device);
    let edges = flow.add("edges", Apply(kernels::edges::launch)).on(&device);
    let draw = flow.add("draw", Draw).on(&device);
    flow.connect_with(read.images, shrink.input, images);
    flow.connect_with(shrink.output, [soften.input, edges.input], thumbnails);
    flow.connect_with(soften.output, draw.soft, thumbnails);
    flow.connect_with(edges.output, draw.edges, thumbnails);
    let mut drawn = flow.egress("thumbnails", draw.drawn);

    let running = flow.spawn()?;
    let mut all = Vec::new();
    while let Some(picture) = drawn.recv().await {
        let bytes = bytemuck::cast_slice(picture.pixels.read().await?).to_vec();
        let thumbnail = RgbaImage::from_raw(picture.width, picture.height, bytes);
        all.push(thumbnail.ok_or_else(|| Error::other(format!("{}: the wrong number of pixels", picture.name)))?);
    }
    running.await?;
    sheet(&all, args.size)
        .save(&args.sheet)
        .map_err(|error| Error::other(error).at(args.sheet.display().to_string()))?;
    let skipped = skipped.load(Ordering::Relaxed);
    Ok(format!("{} thumbnails on {}, {skipped} files skipped: {}", all.len(), device.name(), args.sheet.display()))
}

#[tokio::main]
async fn main() -> ExitCode {
    match draw(&Args::parse()).await {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("pictures: {error:#}");
            ExitCode::FAILURE
        }
    }
}
