//! Snapshots as a collector of the crate `prometheus-client`.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
    registry::Unit,
};

use super::{
    super::Observe,
    distinct,
    families::{FAMILIES, FamilyKind, Number},
};

/// The [metrics](super::super#metrics) of all flows that it observes, for a registry of the crate
/// [`prometheus-client`](https://docs.rs/prometheus-client), at 0.26: they are read at each scrape, and at no other time.
/// State sets are gauges, which that crate has instead. It needs the feature `prometheus-client`.
///
/// ```
/// use prometheus_client::{encoding::text::encode, registry::Registry};
/// use wakeline::observe::Observe;
///
/// let watch = Observe::new();
/// let mut registry = Registry::default();
/// registry.register_collector(Box::new(watch.clone()));
///
/// let mut text = String::new();
/// encode(&mut text, &registry)?;
/// assert!(text.ends_with("# EOF\n"));
/// # Ok::<(), std::fmt::Error>(())
/// ```
#[cfg_attr(docsrs, doc(cfg(feature = "prometheus-client")))]
impl Collector for Observe {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let all = distinct(self.snapshots());
        for family in FAMILIES {
            let kind = match family.kind {
                FamilyKind::Counter => MetricType::Counter,
                FamilyKind::Gauge | FamilyKind::StateSet => MetricType::Gauge,
            };
            // The encoder appends the unit.
            let unit = match family.unit {
                "" => None,
                "seconds" => Some(Unit::Seconds),
                "bytes" => Some(Unit::Bytes),
                other => Some(Unit::Other(other.into())),
            };
            let name = match family.name.strip_suffix(family.unit) {
                Some(name) if unit.is_some() => name.trim_end_matches('_'),
                _ => family.name,
            };
            let mut metric = encoder.encode_descriptor(name, family.help, unit.as_ref(), kind)?;
            let mut outcome = Ok(());
            for flow in &all {
                family.each(flow, |labels, number| {
                    let mut add = || {
                        let mut sample = metric.encode_family(&labels)?;
                        match (family.kind, number) {
                            (FamilyKind::Counter, Number::Whole(count)) => {
                                sample.encode_counter::<NoLabelSet, u64, u64>(&count, None)
                            }
                            (FamilyKind::Counter, Number::Real(sum)) => {
                                sample.encode_counter::<NoLabelSet, f64, u64>(&sum, None)
                            }
                            (_, Number::Whole(number)) => sample.encode_gauge(&number),
                            (_, Number::Real(number)) => sample.encode_gauge(&number),
                        }
                    };
                    if outcome.is_ok() {
                        outcome = add();
                    }
                });
            }
            outcome?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;
    use crate::prelude::*;

    /// The registry's text has the samples of `open_metrics`, in the same order.
    #[tokio::test]
    async fn a_registry_has_the_same_samples() {
        let watch = Observe::new().paths(1);
        let mut left = 0..10_u32;
        let mut flow = Flow::new("a \"name\"\n");
        let read = flow.add("read", source(move || std::future::ready(Ok(left.next()))));
        let write = flow.add("write", sink(async |_: u32| Ok(())));
        flow.connect(read.output, write.input);
        flow.observe(&watch);
        flow.run().await.unwrap();
        let mut registry = Registry::default();
        registry.register_collector(Box::new(watch.clone()));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let own = watch.open_metrics();
        let samples = |text: &str| -> Vec<_> {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            let sample = |line: &str| {
                let (name, number) = line.rsplit_once(' ').unwrap();
                (name.to_string(), number.parse::<f64>().unwrap())
            };
            lines.map(sample).collect()
        };
        assert_eq!(samples(&text), samples(&own));
        let path = "wakeline_path_measured_messages_total{flow=\"a \\\"name\\\"\\n\",path=\"read > write\"}";
        assert!(samples(&own).contains(&(path.into(), 10.0)), "{own}");
        let described = |text: &str| -> Vec<_> {
            let mut lines: Vec<_> = text.lines().filter(|line| line.starts_with('#')).map(str::to_string).collect();
            lines.iter_mut().for_each(|line| *line = line.replace(" stateset", " gauge"));
            lines.sort();
            lines
        };
        assert_eq!(described(&text), described(&own));
    }
}
