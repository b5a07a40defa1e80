//! [`EventFeed`]: the events that viewers get, by server-sent events.
//!
//! There is one event at a time, the latest, shared by all viewers. A connection that has room for more takes it; one
//! that has none misses it. So a viewer that stops reading holds one event at most, besides its connection's buffers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, stream};
use hyper::body::Bytes;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    time::{sleep, timeout},
};

use super::{super::observer::ObservedFlows, picture};
use crate::sync::{AtomicU64, Ordering, contained};

/// Viewers at a time.
const VIEWERS: usize = 16;
/// Between two events.
const EVERY: Duration = Duration::from_millis(250);
/// The thread rests at least this number of times as long as it has worked: it takes at most 2.5 % of a core.
const REST: u32 = 39;
/// A viewer gets something at least this often, which shows that the connection still stands.
const BEAT: Duration = Duration::from_secs(15);

pub(super) struct EventFeed {
    flows: Arc<ObservedFlows>,
    controls: bool,
    /// `None` while there is no viewer.
    latest: watch::Sender<Option<Bytes>>,
    seats: Arc<Semaphore>,
    arrival: Notify,
}

/// How many parts the viewer of a connection has taken.
#[derive(Default)]
pub(super) struct ViewerProgress(AtomicU64);

impl ViewerProgress {
    pub(super) fn taken(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct Viewer {
    latest: watch::Receiver<Option<Bytes>>,
    progress: Arc<ViewerProgress>,
    _seat: OwnedSemaphorePermit,
}

impl EventFeed {
    pub(super) fn new(flows: Arc<ObservedFlows>, controls: bool) -> Self {
        let seats = Arc::new(Semaphore::new(VIEWERS));
        Self { flows, controls, latest: watch::Sender::new(None), seats, arrival: Notify::new() }
    }

    /// The events for one more viewer, if there is room for one.
    pub(super) fn view(&self, progress: Arc<ViewerProgress>) -> Option<impl Stream<Item = Bytes> + use<>> {
        let _seat = self.seats.clone().try_acquire_owned().ok()?;
        let mut latest = self.latest.subscribe();
        latest.mark_changed();
        self.arrival.notify_one();
        Some(stream::unfold(Viewer { latest, progress, _seat }, |mut viewer| async move {
            let part = viewer.next().await?;
            viewer.progress.0.fetch_add(1, Ordering::Relaxed);
            Some((part, viewer))
        }))
    }

    /// Publishes while there are viewers.
    pub(super) async fn publish(&self) {
        let mut number = 0_u64;
        loop {
            self.arrival.notified().await;
            let (mut before, mut cost) = (Bytes::new(), Duration::ZERO);
            while self.seats.available_permits() < VIEWERS {
                let began = Instant::now();
                let mut now = None;
                contained("a page's event panicked", || now = picture::of_all(&self.flows, self.controls));
                if let Some(now) = now.filter(|now| *now != before) {
                    number += 1;
                    let event = [format!("id: {number}\ndata: ").as_bytes(), &now, b"\n\n"].concat();
                    self.latest.send_replace(Some(event.into()));
                    before = now;
                }
                // One in which the thread was preempted says little about the cost.
                let took = began.elapsed();
                cost = if took < cost { took } else { cost + (took - cost) / 4 };
                sleep(EVERY.saturating_sub(took).max(cost * REST)).await;
            }
            self.latest.send_replace(None);
        }
    }
}

impl Viewer {
    /// `None` when the page is closed.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            match timeout(BEAT, self.latest.changed()).await {
                Err(_) => return Some(Bytes::from_static(b":\n\n")),
                Ok(changed) => changed.ok()?,
            }
            let event = self.latest.borrow_and_update().clone();
            if event.is_some() {
                return event;
            }
        }
    }
}
