//! A picture of the tails: for each latency, the share of the messages that took at least as long.

use std::path::Path;

use hdrhistogram::Histogram;
use plotters::prelude::*;

type Points = Vec<(f64, f64)>;

fn points(latency: &Histogram<u64>) -> Points {
    let (mut below, all) = (0, latency.len() as f64);
    let each = latency.iter_recorded().map(|step| {
        let share = 1.0 - below as f64 / all;
        below += step.count_at_value();
        (step.value_iterated_to() as f64 / 1e3, share)
    });
    each.collect()
}

pub(crate) fn draw(title: &str, ways: &[(&str, &Histogram<u64>)], to: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let lines: Vec<_> = ways.iter().map(|(name, latency)| (*name, points(latency))).collect();
    let all = || lines.iter().flat_map(|(_, points)| points);
    let (from, until) = all().fold((f64::MAX, 0.0_f64), |(from, until), point| (from.min(point.0), until.max(point.0)));
    let rarest = all().fold(1.0_f64, |rarest, point| rarest.min(point.1));
    let area = SVGBackend::new(to, (1000, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(80)
        .build_cartesian_2d((from * 0.9..until * 1.1).log_scale(), (rarest * 0.8..1.2).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("latency from the send to the sink, in microseconds")
        .y_desc("share of the messages that took as long or longer")
        .y_label_formatter(&|share| format!("{share:e}"))
        .draw()?;
    for (at, (name, points)) in lines.into_iter().enumerate() {
        let colour = HSLColor(at as f64 / ways.len() as f64, 0.8, 0.42);
        chart
            .draw_series([PathElement::new(points, colour.stroke_width(2))])?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}
