//! Pictures: a line for each way, both axes logarithmic.

use std::path::{Path, PathBuf};

use plotters::prelude::*;

/// A line: its name and its points.
pub(crate) type Line<'a> = (&'a str, Vec<(f64, f64)>);

/// The descriptions of a picture and of its axes.
pub(crate) struct Labels<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    /// Where the names of the lines stand.
    pub(crate) names: SeriesLabelPosition,
}

/// Draws `NAME.svg` into the folder for pictures: `WAKELINE_BENCH_DIR`, else `target`.
pub(crate) fn draw(name: &str, labels: &Labels, lines: &[Line]) -> Result<PathBuf, Box<dyn std::error::Error>> {
    let to = folder().join(format!("{name}.svg"));
    let points = || lines.iter().flat_map(|(_, points)| points);
    let bounds = |of: fn(&(f64, f64)) -> f64| {
        points().map(of).fold((f64::MAX, 0.0_f64), |(from, until), at| (from.min(at), until.max(at)))
    };
    let ((left, right), (bottom, top)) = (bounds(|point| point.0), bounds(|point| point.1));
    let area = SVGBackend::new(&to, (1000, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(labels.title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(80)
        .build_cartesian_2d((left * 0.9..right * 1.1).log_scale(), (bottom * 0.8..top * 1.2).log_scale())?;
    let number = |value: &f64| if *value < 0.1 { format!("{value:e}") } else { format!("{value}") };
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(labels.x).y_desc(labels.y).x_label_formatter(&number).y_label_formatter(&number).draw()?;
    for (at, (name, points)) in lines.iter().enumerate() {
        let colour = HSLColor(at as f64 / lines.len() as f64, 0.8, 0.42);
        chart
            .draw_series([PathElement::new(points.clone(), colour.stroke_width(2))])?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
    }
    let mut names = chart.configure_series_labels();
    names.position(labels.names.clone()).background_style(WHITE).border_style(BLACK).draw()?;
    area.present()?;
    drop((chart, area));
    Ok(to)
}

fn folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("WAKELINE_BENCH_DIR") {
        return folder.into();
    }
    let program = std::env::current_exe().unwrap_or_default();
    let target = program.ancestors().find(|folder| folder.ends_with("target"));
    target.map_or_else(std::env::temp_dir, Path::to_owned)
}
