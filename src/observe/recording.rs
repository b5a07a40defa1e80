//! [`Recording`]: what is recorded of one run of a flow, and the [`Timeline`] made of it.

use std::{
    collections::VecDeque,
    sync::{Arc, OnceLock},
    time::Duration,
};

use super::{
    flight::FlowSink,
    timeline::{Counter, CounterSample, Timeline, TimelineHub, TimelineSlice},
};
use crate::{
    device::Device,
    operator::control::Control,
    stream::{KeptSpan, KeptSpans, SpanReader},
    sync::{Mutex, lock},
    tracepoint::{OUTSIDE, Tracepoints, tokio_nanos},
};

/// Samples of counters that are kept of one flow: 24 bytes each.
const SAMPLES: usize = 65_536;

/// See the [module](self).
pub(super) struct Recording {
    sink: Arc<FlowSink>,
    points: Tracepoints,
    flow: Arc<str>,
    operators: Vec<Arc<str>>,
    hubs: Vec<TimelineHub>,
    /// The writer and the reader of each hub.
    ends: Vec<(u32, u32)>,
    began: u64,
    /// The name of each device once, without the host.
    devices: Vec<Arc<str>>,
    /// The devices, until the flow has ended.
    open: Mutex<Vec<Device>>,
    tracks: Vec<DeviceTrack>,
    reader: Mutex<Option<Arc<SpanReader>>>,
    /// Those of an ended flow.
    spans: Mutex<KeptSpans>,
    counters: Mutex<Counters>,
    /// When the flow has ended.
    ended: OnceLock<u64>,
}

/// The device work that is on one track, by the addresses that its spans have.
struct DeviceTrack {
    name: String,
    times: usize,
    /// `None`: of all devices.
    backend: Option<usize>,
    operator: u32,
}

#[derive(Default)]
struct Counters {
    samples: VecDeque<CounterSample>,
    /// By hub, then by device: the last sample.
    last: Vec<f64>,
    /// Samples that were forgotten, and the time of the last of them.
    forgotten: u64,
    until: u64,
}

impl Recording {
    /// `None` if the recorder does not trace the flow. Its hubs exist.
    pub(super) fn begin(control: &Control, sink: Arc<FlowSink>) -> Option<Self> {
        let points = control.traced()?.clone();
        let began = points.clock().host_now();
        let hubs = control.hubs();
        let number = |operator: usize| u32::try_from(operator).unwrap_or(OUTSIDE);
        let devices = control.observed.get().map(|known| known.devices.open()).unwrap_or_default();
        let reader = control.watched().and_then(|watched| watched.work.as_ref()).map(|work| work.reader.clone());
        Some(Self {
            sink,
            points,
            flow: control.name.clone(),
            operators: control.names.clone(),
            hubs: hubs
                .all
                .iter()
                .map(|hub| TimelineHub { name: hub.state.name().clone(), capacity: hub.state.fill().capacity })
                .collect(),
            ends: hubs.all.iter().map(|hub| (number(hub.from), number(hub.to))).collect(),
            began,
            tracks: tracks(control, &devices),
            devices: devices.iter().map(|device| device.name().into()).collect(),
            open: Mutex::new(devices),
            reader: Mutex::new(reader),
            spans: Mutex::default(),
            counters: Mutex::default(),
            ended: OnceLock::new(),
        })
    }

    pub(super) fn sink(&self) -> &Arc<FlowSink> {
        &self.sink
    }

    /// Called at the end of the flow: nothing of its devices is kept any longer.
    pub(super) fn end(&self) {
        let _ = self.ended.set(self.points.clock().host_now());
        let reader = lock(&self.reader).take();
        let spans = reader.as_ref().map(|reader| reader.with_kept(|kept| kept.clone())).unwrap_or_default();
        *lock(&self.spans) = spans;
        let open = std::mem::take(&mut *lock(&self.open));
        drop((reader, open));
    }

    /// Bytes in use on each device. No lock may be held: memory whose last use has completed is reclaimed, which can wake tasks.
    pub(super) fn memory(&self) -> Vec<u64> {
        let open = lock(&self.open).clone();
        open.iter().map(|device| device.memory_stats().in_use).collect()
    }

    /// The time at which a sample begins.
    pub(super) fn now(&self) -> u64 {
        self.points.clock().host_now()
    }

    /// Samples the counters: the messages in each hub from `now` on, and what [`memory`](Self::memory) returned. For the
    /// observer's thread, now and then: it has no clock of the flow's if that is paused.
    pub(super) fn sample(&self, now: u64, fills: impl Iterator<Item = usize>, memory: &[u64], keep: Duration) {
        if self.points.clock().is_paused() {
            return;
        }
        self.sink.recorder().note(now, nanos(keep), &self.points.clock().axis());
        let fills = fills.map(|queued| queued as f64);
        let memory = memory.iter().map(|bytes| *bytes as f64);
        let all = (0..).map(Counter::HubFill).zip(fills).chain((0..).map(Counter::Memory).zip(memory));
        let mut counters = lock(&self.counters);
        let Counters { samples, last, forgotten, until } = &mut *counters;
        for (at, (counter, value)) in all.enumerate() {
            match last.get_mut(at) {
                Some(before) if *before == value => continue,
                Some(before) => *before = value,
                None => last.push(value),
            }
            samples.push_back(CounterSample { at: now, counter, value });
        }
        let from = now.saturating_sub(nanos(keep));
        if *until < from {
            *forgotten = 0;
        }
        while samples.len() > SAMPLES {
            *forgotten += 1;
            *until = samples.pop_front().map_or(0, |sample| sample.at);
        }
    }

    /// The last `window` of the flow, up to its end.
    pub(super) fn timeline(&self, window: Duration) -> Timeline {
        let clock = self.points.clock();
        let axis = clock.axis();
        let recorder = self.sink.recorder();
        let mut to = self.ended.get().copied().unwrap_or_else(|| clock.host_now());
        if clock.is_paused() {
            // The caller may be outside of the runtime whose clock is paused.
            let all = recorder.events(&self.sink, &axis, (0, u64::MAX), &self.ends);
            to = all.events.last().map_or(to, |event| event.at);
        }
        let asked = to.saturating_sub(nanos(window));
        let events = recorder.events(&self.sink, &axis, (asked, to), &self.ends);
        let mut from = events.from;
        let mut lost = events.lost;
        let (device, forgotten) = self.slices(from, to);
        lost += forgotten;
        let counters = lock(&self.counters);
        if from <= self.began {
            // The flow began in the window.
            let firsts = [
                events.events.first().map(|event| event.at),
                device.first().map(|slice| slice.began),
                counters.samples.front().map(|sample| sample.at),
            ];
            from = firsts.into_iter().flatten().fold(to, u64::min).max(from);
        }
        // Before the window, the last value of each counter.
        let first = counters.samples.partition_point(|sample| sample.at < from);
        let mut before = vec![None; self.hubs.len() + self.devices.len()];
        for sample in counters.samples.iter().take(first) {
            let at = match sample.counter {
                Counter::HubFill(hub) => hub as usize,
                Counter::Memory(device) => self.hubs.len() + device as usize,
            };
            before.get_mut(at).into_iter().for_each(|last| *last = Some(CounterSample { at: from, ..*sample }));
        }
        let mut values: Vec<_> = before.into_iter().flatten().collect();
        values.extend(counters.samples.iter().skip(first).filter(|sample| sample.at <= to));
        if counters.until >= from {
            lost += counters.forgotten;
        }
        drop(counters);
        Timeline {
            flow: self.flow.clone(),
            from,
            to,
            operators: self.operators.clone(),
            hubs: self.hubs.clone(),
            threads: events.threads,
            streams: self.tracks.iter().map(|track| track.name.clone()).collect(),
            devices: self.devices.clone(),
            events: events.events,
            device,
            counters: values,
            lost,
        }
    }

    /// The device work in a window, and how much of that was forgotten at most.
    fn slices(&self, from: u64, to: u64) -> (Vec<TimelineSlice>, u64) {
        let place = |kept: &mut KeptSpans| {
            let mut all: Vec<_> = kept.spans.iter().filter_map(|span| self.slice(span)).collect();
            let is_full = all.first().is_some_and(|first| first.began > from);
            all.retain(|slice| slice.ended >= from && slice.began <= to);
            all.sort_by_key(|slice| slice.began);
            (all, if is_full { kept.forgotten } else { 0 })
        };
        let reader = lock(&self.reader).clone();
        match reader {
            Some(reader) => reader.with_kept(place),
            None => place(&mut lock(&self.spans)),
        }
    }

    fn slice(&self, span: &KeptSpan) -> Option<TimelineSlice> {
        let is_of = |track: &DeviceTrack| {
            track.times == span.times && track.backend.is_none_or(|backend| backend == span.backend)
        };
        let stream = self.tracks.iter().position(is_of)?;
        let operator = self.tracks[stream].operator;
        let (began, ended) = (tokio_nanos(span.began), tokio_nanos(span.ended));
        Some(TimelineSlice { stream: stream as u32, operator, run: span.run, began, ended })
    }
}

/// The tracks of operators, of sections, and of copies each way.
fn tracks(control: &Control, devices: &[Device]) -> Vec<DeviceTrack> {
    let (Some(work), Some(known)) =
        (control.watched().and_then(|watched| watched.work.as_ref()), control.observed.get())
    else {
        return Vec::new();
    };
    let mut tracks = Vec::new();
    for (number, times) in work.times.iter().enumerate() {
        if !known.devices.is_host(number) {
            let name = format!("{} {}", known.devices.name(number), control.names[number]);
            let operator = number as u32;
            tracks.push(DeviceTrack { name, times: Arc::as_ptr(times).addr(), backend: None, operator });
        }
    }
    for (number, section) in known.sections.iter().enumerate() {
        let device = control.operators_of(number).first().map_or("", |first| known.devices.name(*first));
        let (name, times) = (format!("{device} {}", control.section_name(number)), Arc::as_ptr(&section.work).addr());
        tracks.push(DeviceTrack { name, times, backend: None, operator: OUTSIDE });
    }
    for device in devices {
        for (to_host, way) in [(false, "to device"), (true, "to host")] {
            let times = Arc::as_ptr(work.reader.copies(to_host)).addr();
            let (name, backend) = (format!("{} copies {way}", device.name()), Arc::as_ptr(device.backend()).addr());
            tracks.push(DeviceTrack { name, times, backend: Some(backend), operator: OUTSIDE });
        }
    }
    tracks
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
