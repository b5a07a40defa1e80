//! [`EventLog`]: the event log of a chunk hub.
//!
//! A line is queued before the hub's state changes, and written after the change, with no lock held: the writer is
//! user code, which may use the hub, block or panic. One thread at a time uses the writer, and also writes the lines
//! that other threads queue meanwhile, so the lines keep their order.
//!
//! ```text
//!   note ──> waiting, up to MOST ──> write: up to MOST lines ──> the rest: by the next `write`, or at the hub's end
//!               └── full ──> dropped and counted: the count is written instead
//! ```
//!
//! So a thread writes at most MOST lines before it continues, however many lines other threads queue, and memory is
//! bounded.

use std::{
    collections::VecDeque,
    fmt,
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::sync::{DiscardOnDrop, Mutex, contained, discard, later, lock};

/// Dropped with the hub, possibly nested in the drop of other hubs.
type Writer = DiscardOnDrop<Box<dyn Write + Send>>;

/// The maximum number of lines that wait for the writer, and of lines that one thread writes before it continues.
const MOST: usize = 1024;

/// See the module.
#[derive(Default)]
pub(super) struct EventLog {
    /// Whether there has ever been a writer.
    any: AtomicBool,
    lines: Mutex<Lines>,
}

#[derive(Default)]
struct Lines {
    /// `None` while a thread uses it.
    writer: Option<Writer>,
    writing: bool,
    writers: u64,
    waiting: VecDeque<Line>,
    /// Lines that were dropped since the last one that waits.
    dropped: u64,
}

struct Line {
    /// Lines that were dropped before it.
    dropped: u64,
    text: String,
}

impl Lines {
    /// The next line to write: how many were dropped before it, and its text, which is `None` if only the count is
    /// left.
    fn next(&mut self) -> Option<(u64, Option<String>)> {
        match self.waiting.pop_front() {
            Some(Line { dropped, text }) => Some((dropped, Some(text))),
            None if self.dropped > 0 => Some((std::mem::take(&mut self.dropped), None)),
            None => None,
        }
    }
}

impl EventLog {
    pub(super) fn set(&self, writer: Box<dyn Write + Send>) {
        let writer = DiscardOnDrop::new(writer);
        let mut lines = lock(&self.lines);
        let old = lines.writer.replace(writer);
        lines.writers += 1;
        drop(lines);
        self.any.store(true, Ordering::Release);
        discard(old);
    }

    pub(super) fn is_set(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    pub(super) fn note(&self, line: String) {
        let mut lines = lock(&self.lines);
        if !lines.writing && lines.writer.is_none() {
            return;
        }
        if lines.waiting.len() >= MOST {
            lines.dropped += 1;
            return;
        }
        let dropped = std::mem::take(&mut lines.dropped);
        lines.waiting.push_back(Line { dropped, text: line });
    }

    /// Writes the remaining lines when the hub is dropped.
    pub(super) fn end(mut self, hub: Arc<str>) {
        let Lines { waiting, dropped, .. } = self.lines.get_mut();
        if !waiting.is_empty() || *dropped > 0 {
            later("the writer of a hub's log panicked", move || self.write(&hub));
        }
    }

    /// Writes the queued lines, at most [`MOST`]. Call it with no lock held.
    pub(super) fn write(&self, hub: &str) {
        if !self.is_set() {
            return;
        }
        let mut lines = lock(&self.lines);
        if lines.writing {
            return;
        }
        lines.writing = true;
        // One more, for the count of dropped lines.
        for _ in 0..=MOST {
            let Some((dropped, text)) = lines.next() else { break };
            let Some(mut writer) = lines.writer.take() else {
                (lines.waiting, lines.dropped) = Default::default();
                break;
            };
            let writers = lines.writers;
            drop(lines);
            let mut goes_on = false;
            contained("the writer of a hub's log panicked", || {
                let written = writer.get_mut().map(|to| {
                    if dropped > 0 {
                        writeln!(to, "{hub}: {dropped} lines were dropped here, since the writer is too slow")?;
                    }
                    text.iter().try_for_each(|text| writeln!(to, "{hub}: {text}"))
                });
                match written {
                    Some(Ok(())) => goes_on = true,
                    Some(Err(error)) => {
                        tracing::warn!(error = %format_args!("{error:#}"), hub, "the log of a hub ends here")
                    }
                    None => {}
                }
            });
            lines = lock(&self.lines);
            if goes_on && lines.writers == writers {
                lines.writer = Some(writer);
            } else {
                drop(lines);
                discard(writer);
                lines = lock(&self.lines);
            }
        }
        lines.writing = false;
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventLog").finish_non_exhaustive()
    }
}
