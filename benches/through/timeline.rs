//! A picture of the overlap: ten chunks, each produced, copied in, computed, copied out and consumed.
//!
//! Ends are seen by tasks that await them, some microseconds late. Begins are derived: a copy or a kernel begins when
//! its input is complete and the previous one is done.

use std::{
    fmt::Write,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use plotters::prelude::*;
use tokio::runtime::Runtime;
use wakeline::{memory::HostAccess, operator::MapPorts, prelude::*};

use crate::{
    churn::churn,
    flow::{SinkPorts, SourcePorts},
};

const CHUNKS: usize = 10;
/// Chunks that pass first, as a warm-up.
const WARM: usize = 4;
const ENVELOPES: usize = 3;
const STAGES: [&str; 5] = ["produce", "copy in", "compute", "copy out", "consume"];

/// Begin and end.
type Span = (Duration, Duration);
type Stages = [Span; STAGES.len()];

/// Records when each stage of each chunk began and ended.
#[derive(Clone)]
struct Clock {
    began: Instant,
    seen: Arc<Mutex<[Stages; WARM + CHUNKS]>>,
}

impl Clock {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn note(&self, stage: usize, chunk: usize, from: Duration) {
        self.seen.lock().expect("no panic")[chunk][stage] = (from, self.now());
    }

    /// Records when it ends.
    fn watch(&self, stage: usize, chunk: usize, end: HostAccess) {
        let clock = self.clone();
        tokio::spawn(async move {
            let from = clock.now();
            end.await.expect("the device works");
            clock.note(stage, chunk, from);
        });
    }
}

struct Produce(usize, Clock);

impl Operator for Produce {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let (number, clock) = (self.0, self.1.clone());
        let mut chunk = ports.output.blank().await?;
        chunk.idle().await?;
        let chunk = tokio::task::spawn_blocking(move || -> Result<Envelope<u32>> {
            let from = clock.now();
            chunk.as_mut_space()?.fill(number as u32);
            chunk.set_len(chunk.capacity())?;
            clock.note(0, number, from);
            Ok(chunk)
        });
        self.0 += 1;
        if self.0 == WARM + CHUNKS {
            cx.finish();
        }
        ports.output.send(chunk.await.map_err(Error::other)??).await?;
        Ok(())
    }
}

struct Compute(usize, u32, Clock);

impl Operator for Compute {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut chunk = ports.input.take()?;
        self.2.watch(1, self.0, chunk.available());
        churn::launch(cx.stream()?, &mut chunk, self.1)?;
        self.2.watch(2, self.0, chunk.available());
        self.0 += 1;
        ports.output.send(chunk).await?;
        Ok(())
    }
}

/// Waits for each chunk while the one before it is consumed.
struct Arrive(usize, Clock);

impl Operator for Arrive {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let chunk = ports.input.take()?;
        let from = self.1.now();
        chunk.available().await?;
        self.1.note(3, self.0, from);
        self.0 += 1;
        ports.output.send(chunk).await?;
        Ok(())
    }
}

struct Consume(usize, Clock);

impl Operator for Consume {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let chunk = ports.input.take()?;
        let (number, clock) = (self.0, self.1.clone());
        self.0 += 1;
        let consumed = tokio::task::spawn_blocking(move || -> Result<()> {
            let from = clock.now();
            std::hint::black_box(chunk.as_slice()?.iter().fold(0_u32, |sum, element| sum.wrapping_add(*element)));
            clock.note(4, number, from);
            Ok(())
        });
        consumed.await.map_err(Error::other)?
    }
}

async fn measure(device: &Device, bytes: usize, rounds: u32) -> Result<Vec<Stages>> {
    let clock = Clock { began: Instant::now(), seen: Arc::default() };
    let mut flow = Flow::new("timeline");
    let produce = flow.add("produce", Produce(0, clock.clone()));
    let compute = flow.add("compute", Compute(0, rounds, clock.clone())).on(device);
    let arrive = flow.add("arrive", Arrive(0, clock.clone()));
    let consume = flow.add("consume", Consume(0, clock.clone()));
    let hub = HubOptions::bounded(1).envelopes(ENVELOPES);
    flow.connect_with(produce.output, compute.input, hub.envelope_bytes(bytes));
    flow.connect_with(compute.output, arrive.input, hub);
    flow.connect(arrive.output, consume.input);
    flow.run().await?;
    let mut spans = clock.seen.lock().expect("no panic").to_vec();
    // Enqueued work begins when its input is complete and the previous one has ended.
    for number in 0..spans.len() {
        for stage in 1..4 {
            let before = number.checked_sub(1).map_or(Duration::ZERO, |before| spans[before][stage].1);
            let input = spans[number][stage - 1].1;
            let span = &mut spans[number][stage];
            span.0 = input.max(before).min(span.1);
        }
    }
    Ok(spans.split_off(WARM))
}

/// One line per stage; where it was busy, the line shows the number of the chunk.
fn text(spans: &[Stages]) -> String {
    const WIDTH: usize = 96;
    let (from, to) = range(spans);
    let column = |at: Duration| ((at - from).as_secs_f64() / (to - from).as_secs_f64() * WIDTH as f64) as usize;
    let mut picture = String::new();
    for (stage, name) in STAGES.iter().enumerate() {
        let mut line = vec![b'.'; WIDTH];
        for (number, chunk) in spans.iter().enumerate() {
            let (begin, end) = (column(chunk[stage].0).min(WIDTH - 1), column(chunk[stage].1).min(WIDTH));
            line[begin..end.max(begin + 1)].fill(b'0' + (number % 10) as u8);
        }
        let _ = writeln!(picture, "{name:>9} |{}|", String::from_utf8_lossy(&line));
    }
    let _ = write!(picture, "{:>9}  {:.2} ms", "", (to - from).as_secs_f64() * 1e3);
    picture
}

fn range(spans: &[Stages]) -> Span {
    let all = || spans.iter().flatten();
    (all().map(|span| span.0).min().unwrap_or_default(), all().map(|span| span.1).max().unwrap_or_default())
}

fn draw(spans: &[Stages], device: &Device, bytes: usize, to: &Path) -> Result<()> {
    let wrong = |error: DrawingAreaErrorKind<_>| Error::other(std::io::Error::other(error.to_string()));
    let (begin, end) = range(spans);
    let milliseconds = |at: Duration| (at - begin).as_secs_f64() * 1e3;
    let area = SVGBackend::new(to, (1000, 320)).into_drawing_area();
    area.fill(&WHITE).map_err(wrong)?;
    let title = format!("ten chunks of {} MiB through {} ({})", bytes >> 20, device, device.description());
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..milliseconds(end), (0.0..STAGES.len() as f64).step(1.0))
        .map_err(wrong)?;
    chart.configure_mesh().disable_y_mesh().disable_y_axis().x_desc("milliseconds").draw().map_err(wrong)?;
    let row = |stage: usize| (STAGES.len() - 1 - stage) as f64;
    for (number, chunk) in spans.iter().enumerate() {
        let colour = HSLColor(number as f64 / CHUNKS as f64, 0.55, 0.6);
        let bars = chunk.iter().enumerate().map(|(stage, span)| {
            let corners = [(milliseconds(span.0), row(stage) + 0.15), (milliseconds(span.1), row(stage) + 0.85)];
            Rectangle::new(corners, colour.filled())
        });
        chart.draw_series(bars).map_err(wrong)?;
    }
    let names = STAGES.iter().enumerate().map(|(stage, name)| {
        let style = ("sans-serif", 14).into_font().color(&BLACK);
        EmptyElement::at((0.0, row(stage) + 0.5)) + Text::new((*name).to_string(), (-66, -6), style)
    });
    chart.draw_series(names).map_err(wrong)?;
    area.present().map_err(wrong)
}

pub(crate) fn run(runtime: &Runtime) {
    let device = Device::first().expect("a device");
    // The kernel takes about as long as a copy.
    let (bytes, rounds) = if device.is_cuda() { (16 << 20, 1500) } else { (1 << 20, 1) };
    let spans = runtime.block_on(measure(&device, bytes, rounds)).expect("the flow runs");
    println!("{}", text(&spans));
    let to = crate::folder().join("timeline.svg");
    draw(&spans, &device, bytes, &to).expect("the picture");
    println!("through.timeline: {}", to.display());
}
