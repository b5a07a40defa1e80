//! [`Log`]: what a hub of chunks writes for people.
//!
//! A line is noted where something happens, and written once the hub's state has changed, with no lock held: the writer is
//! user code, which may use the hub, block or panic. One thread at a time has the writer; what others note meanwhile is
//! written by that one. So the lines keep their order.

use std::{
    collections::VecDeque,
    fmt,
    io::Write,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::sync::{Discarded, Mutex, contained, discard, lock};

/// Dropped with the hub, be it with other hubs.
type Writer = Discarded<Box<dyn Write + Send>>;

/// See the module.
#[derive(Default)]
pub(super) struct Log {
    /// There was a writer.
    any: AtomicBool,
    lines: Mutex<Lines>,
}

#[derive(Default)]
struct Lines {
    /// Taken out while it writes.
    writer: Option<Writer>,
    writing: bool,
    /// How many writers there were.
    writers: u64,
    waiting: VecDeque<String>,
}

impl Log {
    pub(super) fn set(&self, writer: Box<dyn Write + Send>) {
        let writer = Discarded::new(writer);
        let mut lines = lock(&self.lines);
        let old = lines.writer.replace(writer);
        lines.writers += 1;
        drop(lines);
        self.any.store(true, Ordering::Release);
        discard(old);
    }

    /// Is there a writer, or was there one?
    pub(super) fn is_set(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Keeps a line until [`write`](Self::write).
    pub(super) fn note(&self, line: String) {
        let mut lines = lock(&self.lines);
        if lines.writing || lines.writer.is_some() {
            lines.waiting.push_back(line);
        }
    }

    /// Writes what was noted. Called with no lock held.
    pub(super) fn write(&self, hub: &str) {
        if !self.is_set() {
            return;
        }
        let mut lines = lock(&self.lines);
        if lines.writing {
            return;
        }
        lines.writing = true;
        while let Some(line) = lines.waiting.pop_front() {
            let Some(mut writer) = lines.writer.take() else {
                lines.waiting.clear();
                break;
            };
            let writers = lines.writers;
            drop(lines);
            let mut goes_on = false;
            contained("the writer of a hub's log panicked", || {
                match writer.get_mut().map(|to| writeln!(to, "{hub}: {line}")) {
                    Some(Ok(())) => goes_on = true,
                    Some(Err(error)) => tracing::warn!(%error, hub, "the log of a hub ends here"),
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

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").finish_non_exhaustive()
    }
}
