//! k-means on a device and the host together: hubs with chunks that stay, and are peeked and modified where needed.
//!
//! `cargo run --release -p wakeline-more-examples --example kmeans -- [--device cuda:0|emulated] [-n 10000] [-k 3] [--rounds 1000] [--picture k.png]`
//!
//! ```text
//!   {points}       peeked on the device                peeked on the host
//!                         │                                  │
//!   {centroids}    peeked ──>  assign     update  ──> modified
//!   {assignments}  modified <── (device)   (host) <── peeked
//! ```
//!
//! The two take turns. Each operator, after its run, sets the other place as the data's destination; the hubs copy it
//! there.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::Instant,
};

use clap::Parser;
use plotters::prelude::{
    BLACK, BitMapBackend, ChartBuilder, Circle, Color, Cross, DrawingAreaErrorKind, HSLColor, IntoDrawingArea, WHITE,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wakeline::{
    operator::{Modify, Peek},
    prelude::*,
};

/// Clusters random points on a GPU and compares the result with the host's.
#[derive(Parser)]
struct Args {
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    device: Option<String>,
    /// Number of points.
    #[arg(short, default_value_t = 10_000)]
    n: usize,
    /// Number of clusters.
    #[arg(short, default_value_t = 3)]
    k: usize,
    /// Number of rounds.
    #[arg(long, default_value_t = 1000)]
    rounds: usize,
    /// Seed of the points.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Draws the clusters into this PNG file.
    #[arg(long)]
    picture: Option<PathBuf>,
}

/// The nearest centroid of each point. Points and centroids are pairs of coordinates.
#[kernel(unsafe(cuda = "kmeans.cu"))]
fn assign(points: &[f32], centroids: &[f32], assignments: &mut [u32]) {
    for (point, assignment) in points.chunks_exact(2).zip(assignments) {
        let distance = |centroid: &[f32]| {
            let (dx, dy) = (point[0] - centroid[0], point[1] - centroid[1]);
            dx * dx + dy * dy
        };
        let mut nearest = f32::INFINITY;
        for (cluster, centroid) in centroids.chunks_exact(2).enumerate() {
            if distance(centroid) < nearest {
                nearest = distance(centroid);
                *assignment = cluster as u32;
            }
        }
    }
}

/// Moves each centroid to the middle of its points; one without points stays.
fn update(points: &[f32], assignments: &[u32], centroids: &mut [f32]) {
    let mut sums = vec![(0.0_f64, 0.0_f64, 0_u32); centroids.len() / 2];
    for (point, cluster) in points.chunks_exact(2).zip(assignments) {
        let (x, y, count) = &mut sums[*cluster as usize];
        *x += f64::from(point[0]);
        *y += f64::from(point[1]);
        *count += 1;
    }
    for (centroid, (x, y, count)) in centroids.chunks_exact_mut(2).zip(sums) {
        if count > 0 {
            centroid[0] = (x / f64::from(count)) as f32;
            centroid[1] = (y / f64::from(count)) as f32;
        }
    }
}

/// Switches turns, by setting the destination of the data.
struct Turns {
    centroids: ChunkHub<f32>,
    assignments: ChunkHub<u32>,
    ports: OnceLock<(AssignHandles, UpdateHandles)>,
}

impl Turns {
    fn assign(&self) -> Result<()> {
        if let Some((assign, _)) = self.ports.get() {
            self.centroids.flow_to(&[&assign.centroids])?;
            self.assignments.flow_to(&[&assign.assignments])?;
        }
        Ok(())
    }

    fn update(&self) -> Result<()> {
        if let Some((_, update)) = self.ports.get() {
            self.centroids.flow_to(&[&update.centroids])?;
            self.assignments.flow_to(&[&update.assignments])?;
        }
        Ok(())
    }
}

#[derive(Ports)]
struct AssignPorts {
    #[peek]
    points: Peek<f32>,
    #[peek]
    centroids: Peek<f32>,
    #[modify]
    assignments: Modify<u32>,
}

struct Assign {
    rounds: usize,
    turns: Arc<Turns>,
}

impl Operator for Assign {
    type Ports = AssignPorts;

    async fn compute(&mut self, ports: &mut AssignPorts, cx: &mut Cx) -> Result<()> {
        assign::launch(cx.stream()?, ports.points.get()?, ports.centroids.get()?, ports.assignments.get_mut()?)?;
        self.turns.update()?;
        self.rounds -= 1;
        if self.rounds == 0 {
            cx.finish();
        }
        Ok(())
    }
}

#[derive(Ports)]
struct UpdatePorts {
    #[peek]
    points: Peek<f32>,
    #[peek]
    assignments: Peek<u32>,
    #[modify]
    centroids: Modify<f32>,
}

struct Update {
    rounds: usize,
    turns: Arc<Turns>,
}

impl Operator for Update {
    type Ports = UpdatePorts;

    async fn compute(&mut self, ports: &mut UpdatePorts, cx: &mut Cx) -> Result<()> {
        let (points, assignments) = (ports.points.get()?.read().await?, ports.assignments.get()?.read().await?);
        update(points, assignments, ports.centroids.get_mut()?.write().await?);
        self.turns.assign()?;
        self.rounds -= 1;
        if self.rounds == 0 {
            cx.finish();
        }
        Ok(())
    }
}

/// The cluster of each point, and the centroids.
type Clusters = (Vec<u32>, Vec<f32>);

async fn with_hubs(device: &Device, points: &[f32], k: usize, rounds: usize) -> Result<Clusters> {
    let host = Device::host();
    let hub = |name, elements| ChunkHub::<f32>::builder(name).elements(elements);
    let all = hub("points", points.len()).envelopes(device, 1).host_envelopes(1).build()?;
    let centroids = hub("centroids", 2 * k).envelopes(device, 1).host_envelopes(1).build()?;
    let assignments = ChunkHub::<u32>::builder("assignments");
    let assignments = assignments.elements(points.len() / 2).envelopes(device, 1).host_envelopes(1).build()?;
    all.produce(&host)?.with(async |blank| blank.fill_from(points).await).await?;
    centroids.produce(&host)?.with(async |blank| blank.fill_from(&points[..2 * k]).await).await?;
    assignments.produce(device)?.with(async |blank| blank.set_len(points.len() / 2)).await?;

    let turns = Turns { centroids: centroids.clone(), assignments: assignments.clone(), ports: OnceLock::new() };
    let turns = Arc::new(turns);
    let mut flow = Flow::new("k-means");
    let assign = flow.add("assign", Assign { rounds, turns: turns.clone() }).on(device);
    let update = flow.add("update", Update { rounds, turns: turns.clone() });
    flow.link(assign.points, &all);
    flow.link(assign.centroids, &centroids);
    flow.link(assign.assignments, &assignments);
    flow.link(update.points, &all);
    flow.link(update.centroids, &centroids);
    flow.link(update.assignments, &assignments);
    turns.ports.get_or_init(|| (*assign, *update));
    turns.assign()?;
    flow.run().await?;

    centroids.flow_freely();
    assignments.flow_freely();
    let gone = || Error::from("the chunk was consumed");
    let centroids = centroids.peek(&host)?.next().await?.ok_or_else(gone)?.read().await?.to_vec();
    let assignments = assignments.peek(&host)?.next().await?.ok_or_else(gone)?.read().await?.to_vec();
    Ok((assignments, centroids))
}

/// The same on the host, step by step.
fn on_host(points: &[f32], k: usize, rounds: usize) -> Clusters {
    let (mut assignments, mut centroids) = (vec![0; points.len() / 2], points[..2 * k].to_vec());
    for _ in 0..rounds {
        assign(points, &centroids, &mut assignments);
        update(points, &assignments, &mut centroids);
    }
    (assignments, centroids)
}

/// Random points around as many centres as there are clusters.
fn random_points(args: &Args) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(args.seed);
    let centres: Vec<[f32; 2]> = (0..args.k).map(|_| [random.random(), random.random()]).collect();
    let mut around = |centre: f32| {
        let spread: f32 = (0..4).map(|_| random.random::<f32>() - 0.5).sum();
        centre + 0.2 * spread
    };
    (0..args.n).flat_map(|at| centres[at % centres.len()].map(&mut around)).collect()
}

fn draw(points: &[f32], (assignments, centroids): &Clusters, to: &Path) -> Result<()> {
    let wrong = |error: DrawingAreaErrorKind<_>| Error::from(error.to_string()).at(to.display().to_string());
    let area = BitMapBackend::new(to, (800, 800)).into_drawing_area();
    area.fill(&WHITE).map_err(wrong)?;
    let range = |axis: usize| {
        let all = || points.iter().skip(axis).step_by(2).copied();
        all().fold(f32::INFINITY, f32::min)..all().fold(f32::NEG_INFINITY, f32::max)
    };
    let mut chart = ChartBuilder::on(&area).margin(20).build_cartesian_2d(range(0), range(1)).map_err(wrong)?;
    let colour = |cluster: usize| HSLColor(cluster as f64 * 2.0 / centroids.len() as f64, 0.6, 0.55).filled();
    let dots = points.chunks_exact(2).zip(assignments);
    let dots = dots.map(|(point, cluster)| Circle::new((point[0], point[1]), 2, colour(*cluster as usize)));
    chart.draw_series(dots).map_err(wrong)?;
    let middles = centroids.chunks_exact(2).map(|middle| Cross::new((middle[0], middle[1]), 8, BLACK.stroke_width(3)));
    chart.draw_series(middles).map_err(wrong)?;
    area.present().map_err(wrong)
}

async fn cluster(args: &Args) -> Result<String> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let (n, k, rounds) = (args.n, args.k, args.rounds);
    if k == 0 || k > n || rounds == 0 {
        return Err(format!("-n {n} -k {k} --rounds {rounds}: each must be at least 1, and k at most n").into());
    }
    let points = random_points(args);
    let began = Instant::now();
    let clusters = with_hubs(&device, &points, k, rounds).await?;
    let took = began.elapsed();
    let expected = on_host(&points, k, rounds);
    let others = clusters.0.iter().zip(&expected.0).filter(|(here, there)| here != there).count();
    let furthest = clusters.1.iter().zip(&expected.1).map(|(here, there)| (here - there).abs()).fold(0.0, f32::max);
    if others > 0 || furthest > 1e-4 {
        return Err(format!("{others} points differ from the host's clusters, centroids by up to {furthest}").into());
    }
    let mut line = format!(
        "{n} points, {k} clusters, {rounds} rounds in {:.1} ms on {device} ({}): the host's clusters, centroids within \
         {furthest:.1e}",
        took.as_secs_f64() * 1e3,
        device.description()
    );
    if let Some(picture) = &args.picture {
        draw(&points, &clusters, picture)?;
        line.push_str(&format!(", drawn into {}", picture.display()));
    }
    Ok(line)
}

#[tokio::main]
async fn main() -> ExitCode {
    match cluster(&Args::parse()).await {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("kmeans: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    /// Needs NVRTC, and no GPU: `cargo test --example kmeans -- --ignored`
    #[test]
    #[ignore = "needs NVRTC"]
    fn every_kernel_compiles() {
        wakeline::kernel::compile_all("sm_90").unwrap();
    }
}
