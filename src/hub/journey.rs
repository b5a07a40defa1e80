//! [`Journey`]: the way of a sampled message from its source to where it ends.
//!
//! A flow whose paths are observed samples one in so many messages at each source. A sampled message has a journey in
//! its header, and what an operator makes of it continues the journey: a list of the runs that it went through, newest
//! first, which the branches of a fan-out share.
//!
//! ```text
//!   source ──> [Journey] ──take──> Arrived ──send──> [Journey: + a JourneyStage] ──take──> Arrived ──end of run──> FinishedJourney
//!                  │ dropped                             │ dropped, replaced                                    │
//!                  └──────────────> counted <────────────┘                                          JourneyLog <┘
//! ```
//!
//! Where several journeys meet in a run, the oldest continues, and the others end there without a trace. A journey is
//! complete or absent: none begins in the middle of a flow.

use std::{
    fmt, mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use tokio::time::Instant;

use crate::{
    clock,
    stream::{OpenSpans, SpanOwner, SpanReader, Spans, Stream},
    sync::{Mutex, lock},
};

/// The journey of a message on its way.
pub(crate) struct Journey {
    log: Arc<JourneyLog>,
    origin: JourneyOrigin,
    last: Arc<JourneyStage>,
    /// The copies to the next reader's location.
    copies: Option<Arc<Spans>>,
    /// Its end is known, or another one with its past continues: it is not counted when it is dropped.
    ended: AtomicBool,
}

/// Where and when a journey began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JourneyOrigin {
    pub(crate) at: Instant,
    /// The number of the message, or of the source's run, counted from zero.
    pub(crate) number: u64,
}

/// A run that a journey went through.
pub(crate) struct JourneyStage {
    pub(crate) before: Option<Arc<Self>>,
    /// The number of stages up to this one.
    length: u32,
    pub(crate) operator: usize,
    /// The copies to its location.
    pub(crate) copies: Option<Arc<Spans>>,
    /// When the message was taken, and when the next one was sent or, at the end of a journey, the run ended.
    pub(crate) taken: Instant,
    pub(crate) left: Instant,
    /// The device work of the run.
    pub(crate) work: Arc<Spans>,
}

#[cfg(test)]
impl JourneyStage {
    /// The next stage of a journey: a run, which had the message for that time.
    pub(crate) fn after(
        before: Option<Arc<Self>>,
        (taken, left): (Instant, Instant),
        work: Arc<Spans>,
        copies: Option<Arc<Spans>>,
    ) -> Arc<Self> {
        let length = before.as_ref().map_or(1, |before| before.length + 1);
        Arc::new(Self { before, length, operator: 0, copies, taken, left, work })
    }
}

/// A journey whose message was taken in a run.
pub(crate) struct Arrived {
    journey: Journey,
    taken: Instant,
    work: OpenSpans,
    /// The number of messages that continue it.
    sent: u32,
}

/// A journey that has ended.
pub(crate) struct FinishedJourney {
    pub(crate) origin: JourneyOrigin,
    pub(crate) last: Arc<JourneyStage>,
}

/// Where the journeys of a flow end.
pub(crate) struct JourneyLog {
    finished: Mutex<Vec<FinishedJourney>>,
    /// Journeys whose message was dropped or replaced by a newer one.
    dropped: AtomicU64,
    /// Journeys that were too long, or too many at once.
    lost: AtomicU64,
    /// Set if device work is timed.
    reader: Option<Arc<SpanReader>>,
}

impl JourneyLog {
    /// The maximum number of journeys that end between two calls of [`take`](Self::take).
    const MOST: usize = 16_384;

    pub(crate) fn new(reader: Option<Arc<SpanReader>>) -> Arc<Self> {
        Arc::new(Self { finished: Mutex::default(), dropped: AtomicU64::new(0), lost: AtomicU64::new(0), reader })
    }

    /// Takes the journeys that have ended since the last call.
    pub(crate) fn take(&self) -> Vec<FinishedJourney> {
        mem::take(&mut *lock(&self.finished))
    }

    /// Journeys that were dropped, and that were lost.
    pub(crate) fn counts(&self) -> [u64; 2] {
        [&self.dropped, &self.lost].map(|count| count.load(Ordering::Relaxed))
    }

    fn push(&self, ended: FinishedJourney) {
        let mut finished = lock(&self.finished);
        if finished.len() < Self::MOST {
            return finished.push(ended);
        }
        drop(finished);
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
}

/// Samples the messages of one source.
#[derive(Debug)]
pub(crate) struct PathSource {
    log: Arc<JourneyLog>,
    operator: usize,
    every: u32,
    /// Until the next sample.
    left: AtomicU32,
    samples: AtomicU64,
}

impl PathSource {
    pub(crate) fn new(log: &Arc<JourneyLog>, operator: usize, every: u32) -> Self {
        let (left, samples) = (AtomicU32::new(0), AtomicU64::new(0));
        Self { log: log.clone(), operator, every: every.max(1), left, samples }
    }

    /// The number of a message that is sampled, if the next one is. Concurrent calls may sample one too many.
    #[inline]
    pub(crate) fn sample(&self) -> Option<u64> {
        match self.left.load(Ordering::Relaxed) {
            0 => {
                self.left.store(self.every - 1, Ordering::Relaxed);
                Some(self.samples.fetch_add(1, Ordering::Relaxed) * u64::from(self.every))
            }
            left => {
                self.left.store(left - 1, Ordering::Relaxed);
                None
            }
        }
    }

    /// Begins a journey: of a message that is sent now by a run with this device work.
    pub(crate) fn begin(&self, number: u64, work: &OpenSpans) -> Journey {
        let now = clock::now();
        let stage = JourneyStage {
            before: None,
            length: 1,
            operator: self.operator,
            copies: None,
            taken: now,
            left: now,
            work: work.spans().clone(),
        };
        let (log, origin) = (self.log.clone(), JourneyOrigin { at: now, number });
        Journey { log, origin, last: Arc::new(stage), copies: None, ended: AtomicBool::new(false) }
    }

    /// Begins the journey of a message from outside, if it is sampled.
    pub(crate) fn begin_external(&self) -> Option<Journey> {
        self.sample().map(|number| self.begin(number, &Spans::begin()))
    }
}

impl Journey {
    /// The maximum number of runs that a journey goes through.
    const LONGEST: u32 = 256;

    /// Called when the message is taken in a run with this device work.
    pub(crate) fn arrive(self, work: OpenSpans) -> Arrived {
        Arrived { journey: self, taken: clock::now(), work, sent: 0 }
    }

    /// Called when its message is where it was before, or was sent elsewhere: nothing was dropped.
    pub(crate) fn unsent(mut self) {
        *self.ended.get_mut() = true;
    }

    /// Its message does not reach so many readers, which other ones of the message do.
    pub(crate) fn count_dropped(&self, readers: u64) {
        self.log.dropped.fetch_add(readers, Ordering::Relaxed);
    }

    /// The journey of the first reader of a value that stays: later ones have none.
    pub(crate) fn read(&self) -> Option<Self> {
        let journey = self.clone();
        (!self.ended.swap(true, Ordering::Relaxed)).then_some(journey)
    }

    /// Times the copies of the message, which are enqueued on `stream` until its [`end_run`](Stream::end_run).
    pub(crate) fn begin_copies(&mut self, stream: &Stream, to_host: bool) -> Option<OpenSpans> {
        let open = self.begin_other_copies(stream, to_host)?;
        self.share_copies(&open);
        Some(open)
    }

    /// Times the copies of a fork of the message, which are its own only.
    pub(crate) fn begin_other_copies(&self, stream: &Stream, to_host: bool) -> Option<OpenSpans> {
        let reader = self.log.reader.as_ref()?;
        let open = Spans::begin();
        stream.begin_run(SpanOwner {
            reader: reader.clone(),
            run: self.origin.number,
            times: reader.copies(to_host).clone(),
            spans: [open.clone()].into(),
        });
        Some(open)
    }

    /// Has copies that were not begun as its own.
    pub(crate) fn share_copies(&mut self, open: &OpenSpans) {
        self.copies = Some(open.spans().clone());
    }
}

impl Arrived {
    /// True if this began before `other`.
    pub(crate) fn is_older(&self, other: &Self) -> bool {
        self.journey.origin.at < other.journey.origin.at
    }

    /// Ends without a trace, since an older one continues.
    pub(crate) fn merge(mut self) {
        *self.journey.ended.get_mut() = true;
    }

    pub(crate) fn work(&self) -> &OpenSpans {
        &self.work
    }

    /// The journey of a message that is sent in the run. `None` if it is too long.
    pub(crate) fn send(&mut self, operator: usize) -> Option<Journey> {
        self.sent = self.sent.saturating_add(1);
        let stage = self.stage(operator)?;
        let (log, origin) = (self.journey.log.clone(), self.journey.origin);
        Some(Journey { log, origin, last: Arc::new(stage), copies: None, ended: AtomicBool::new(false) })
    }

    /// A message that was to continue it was not sent.
    pub(crate) fn unsent(&mut self) {
        self.sent = self.sent.saturating_sub(1);
    }

    /// The end of the run: of the journey as well, unless it continues with a message that was sent.
    pub(crate) fn end(mut self, operator: usize) {
        *self.journey.ended.get_mut() = true;
        if self.sent == 0
            && let Some(last) = self.stage(operator)
        {
            self.journey.log.push(FinishedJourney { origin: self.journey.origin, last: Arc::new(last) });
        }
    }

    fn stage(&self, operator: usize) -> Option<JourneyStage> {
        let Journey { log, last, copies, .. } = &self.journey;
        if last.length == Journey::LONGEST {
            log.lost.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(JourneyStage {
            before: Some(last.clone()),
            length: last.length + 1,
            operator,
            copies: copies.clone(),
            taken: self.taken,
            left: clock::now(),
            work: self.work.spans().clone(),
        })
    }
}

/// The journey of another message with the same past.
impl Clone for Journey {
    fn clone(&self) -> Self {
        let Self { log, origin, last, copies, ended } = self;
        let ended = AtomicBool::new(ended.load(Ordering::Relaxed));
        Self { log: log.clone(), origin: *origin, last: last.clone(), copies: copies.clone(), ended }
    }
}

impl Drop for Journey {
    fn drop(&mut self) {
        if !*self.ended.get_mut() {
            self.log.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for Journey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journey")
            .field("origin", &self.origin)
            .field("stages", &self.last.length)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Arrived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrived").field("journey", &self.journey).finish_non_exhaustive()
    }
}

impl fmt::Debug for JourneyLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JourneyLog").field("counts", &self.counts()).finish_non_exhaustive()
    }
}
