//! How long a device takes to pass a timed event.
//!
//! Two events that enclose work are as far apart as the work takes, and one of them. On an H200 (driver 580.159.04) two events
//! with nothing between them are 1.28 us apart, of 2,000 none less than 1.25 nor, behind a kernel that was still running, 1 in
//! 100 more than 1.31. On an idle stream the host may be the slower one, so the least of some counts.

use std::time::Duration;

use super::CudaBackend;
use crate::{
    device::backend::{Backend, RawEvent, RawStream, StreamSpec},
    error::Result,
};

const EVENTS: usize = 32;
/// Queries of the last event: some milliseconds.
const QUERIES: u32 = 10_000;
/// More is due to the host, such as where a tool examines each call.
const MOST: Duration = Duration::from_micros(2);

/// Zero if it is not known.
pub(super) fn event_time(backend: &CudaBackend) -> Duration {
    let mut events = Vec::with_capacity(EVENTS);
    let measured = measure(backend, &mut events);
    events.into_iter().for_each(|event| backend.event_destroy(event));
    measured.ok().flatten().filter(|time| *time <= MOST).unwrap_or_default()
}

fn measure(backend: &CudaBackend, events: &mut Vec<RawEvent>) -> Result<Option<Duration>> {
    for _ in 0..EVENTS {
        events.push(backend.event_create(true)?);
    }
    let stream = backend.stream_create(&StreamSpec { name: "event time".into(), priority: 0, non_blocking: true })?;
    let least = record(backend, events, stream);
    backend.stream_destroy(stream);
    least
}

/// `None` if the device has not passed them in time: others use it.
fn record(backend: &CudaBackend, events: &[RawEvent], stream: RawStream) -> Result<Option<Duration>> {
    events.iter().try_for_each(|event| backend.event_record(*event, stream))?;
    let Some(last) = events.last() else { return Ok(None) };
    for _ in 0..QUERIES {
        if backend.event_query(*last)? {
            let between = events.windows(2).map(|pair| backend.event_elapsed(pair[0], pair[1]));
            return between.collect::<Result<Vec<_>>>().map(|between| between.into_iter().min());
        }
        std::hint::spin_loop();
    }
    Ok(None)
}
