//! Snapshots into a recorder of the crate `metrics`.

use metrics::{Key, KeyName, Label, Level, Metadata, Recorder, Unit};

use super::{
    super::Observe,
    distinct,
    families::{FAMILIES, Family, FamilyKind, Number},
};

const METADATA: Metadata<'static> = Metadata::new("wakeline::observe", Level::INFO, Some("wakeline::observe"));

#[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
impl Observe {
    /// Writes the [metrics](super::super#metrics) of all flows that it observes to a recorder of the crate
    /// [`metrics`](https://docs.rs/metrics), at 0.24: call it before the recorder is read, at each scrape or every few
    /// seconds. It needs the feature `metrics`.
    ///
    /// Names and labels are those of the table. Counters are set to their absolute value. Those in seconds are gauges here,
    /// since that crate's counters are whole numbers; so are state sets. A recorder keeps what it was given: the last
    /// values of a flow that has ended remain, and so do the times of a path that has no messages in the window. Its
    /// counters never fall: those of a flow that runs again under the same name stay until they exceed the former run's.
    ///
    /// It runs no code but the recorder's, whose panics are the caller's.
    ///
    /// ```
    /// use wakeline::observe::Observe;
    ///
    /// let watch = Observe::new();
    /// # let recorder = metrics::NoopRecorder;
    /// watch.export_to(&recorder);         // such as the recorder of `metrics-exporter-prometheus`, or
    /// metrics::with_recorder(|recorder| watch.export_to(recorder));    // the one that is installed
    /// ```
    pub fn export_to(&self, recorder: &dyn Recorder) {
        let all = distinct(self.snapshots());
        for family in FAMILIES {
            let name = family.sample_name();
            let mut is_described = false;
            for flow in &all {
                family.each(flow, |labels, number| {
                    let counts = match number {
                        Number::Whole(count) if family.kind == FamilyKind::Counter => Some(count),
                        _ => None,
                    };
                    if !std::mem::replace(&mut is_described, true) {
                        describe(family, name.clone(), counts.is_some(), recorder);
                    }
                    let labels: Vec<_> =
                        labels.iter().map(|(label, value)| Label::new(*label, value.to_string())).collect();
                    let key = Key::from_parts(name.clone(), labels);
                    match counts {
                        Some(count) => recorder.register_counter(&key, &METADATA).absolute(count),
                        None => recorder.register_gauge(&key, &METADATA).set(number.as_f64()),
                    }
                });
            }
        }
    }
}

fn describe(family: &Family, name: String, is_counter: bool, recorder: &dyn Recorder) {
    let unit = match family.unit {
        "seconds" => Some(Unit::Seconds),
        "bytes" => Some(Unit::Bytes),
        "messages" => Some(Unit::Count),
        _ => None,
    };
    let name = KeyName::from(name);
    if is_counter {
        recorder.describe_counter(name, unit, family.help.into());
    } else {
        recorder.describe_gauge(name, unit, family.help.into());
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{
            Arc, Mutex,
            atomic::{AtomicU64, Ordering},
        },
    };

    use metrics::{Counter, Gauge, Histogram, SharedString};

    use super::*;
    use crate::prelude::*;

    /// Keeps all values: gauges as the bits of their numbers.
    #[derive(Default)]
    struct Keeps {
        values: Mutex<BTreeMap<String, (&'static str, Arc<AtomicU64>)>>,
        described: Mutex<BTreeMap<String, Option<Unit>>>,
    }

    impl Keeps {
        fn value(&self, key: &Key, kind: &'static str) -> Arc<AtomicU64> {
            let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            let name = format!("{} {}", key.name(), labels.join(" "));
            self.values.lock().unwrap().entry(name).or_insert((kind, Arc::default())).1.clone()
        }

        fn of(&self, name: &str) -> Option<(&'static str, u64)> {
            self.values.lock().unwrap().get(name).map(|(kind, value)| (*kind, value.load(Ordering::Relaxed)))
        }
    }

    impl Recorder for Keeps {
        fn describe_counter(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
            self.described.lock().unwrap().insert(key.as_str().into(), unit);
        }

        fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
            self.described.lock().unwrap().insert(key.as_str().into(), unit);
        }

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.value(key, "counter"))
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.value(key, "gauge"))
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[tokio::test]
    async fn a_recorder_gets_absolute_values() {
        let watch = Observe::new();
        let mut left = 0..10_u32;
        let mut flow = Flow::new("ten");
        let read = flow.add("read", source(move || std::future::ready(Ok(left.next()))));
        let write = flow.add("write", sink(async |_: u32| Ok(())));
        flow.connect(read.output, write.input);
        flow.observe(&watch);
        flow.run().await.unwrap();
        let recorder = Keeps::default();
        watch.export_to(&recorder);
        // The same again, not the sum.
        watch.export_to(&recorder);
        let of = |name| recorder.of(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!(of("wakeline_operator_runs_total flow=ten operator=write"), ("counter", 10));
        assert_eq!(of("wakeline_hub_passed_messages_total flow=ten hub=read.output -> write.input"), ("counter", 10));
        let ended = of("wakeline_flow_state flow=ten wakeline_flow_state=ended");
        assert_eq!(ended, ("gauge", 1.0_f64.to_bits()));
        assert_eq!(of("wakeline_operator_busy_seconds_total flow=ten operator=write").0, "gauge");
        let described = recorder.described.lock().unwrap();
        assert_eq!(described["wakeline_operator_busy_seconds_total"], Some(Unit::Seconds));
        assert_eq!(described["wakeline_operator_runs_total"], None);
    }
}
