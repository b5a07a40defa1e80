//! [`Trace`]: the timelines of observed flows, as a file that Perfetto reads.

use std::{
    ffi::OsString,
    fmt,
    fs::{self, File},
    io::{self, Write},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{perfetto, timeline::Timeline};
use crate::error::{Error, Result};

/// The last seconds of observed flows: what [`Observe::trace`](super::Observe::trace) returns. Open the file that it
/// saves in <https://ui.perfetto.dev>.
///
/// ```
/// use std::time::Duration;
/// use wakeline::{observe::Observe, prelude::*};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// # let mut flow = Flow::new("ticks");
/// # let mut ticks = 0..10;
/// # let ticks = flow.add("ticks", source(move || std::future::ready(Ok(ticks.next()))));
/// # let count = flow.add("count", sink(async |_: i32| Ok(())));
/// # flow.connect(ticks.output, count.input);
/// # let folder = std::env::temp_dir().join(format!("wakeline-trace-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let file = folder.join("slow.pftrace");
/// let watch = Observe::new().record(65_536);
/// flow.observe(&watch);
/// flow.run().await?;
/// let trace = watch.trace(Duration::from_secs(2))?;
/// assert_eq!(trace.lost(), 0);
/// trace.save(file)?;
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub struct Trace {
    timelines: Vec<Timeline>,
}

impl Trace {
    pub(super) fn new(timelines: Vec<Timeline>) -> Self {
        Self { timelines }
    }

    /// The number of events that were recorded in this time and are not there any more: a ring was too small for them
    /// ([`Observe::record`](super::Observe::record)). A thread's events of other flows that it runs are counted, too.
    pub fn lost(&self) -> u64 {
        self.timelines.iter().map(|timeline| timeline.lost).sum()
    }

    /// The number of events that it has.
    pub fn len(&self) -> usize {
        self.timelines.iter().map(|timeline| timeline.events.len()).sum()
    }

    /// True if nothing has happened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The content of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        perfetto::encode(&self.timelines, &mut bytes);
        bytes
    }

    /// Writes the content of the file.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, mut to: impl Write) -> Result<()> {
        to.write_all(&self.to_bytes())?;
        Ok(to.flush()?)
    }

    /// Saves it. It blocks the thread: some 250 ms for a million events. The file is replaced at once, when all is written;
    /// a reader never sees a part.
    ///
    /// # Errors
    /// [`Operator`](crate::ErrorKind::Operator) with the error of the file system and the path. The path of a device or a
    /// pipe is refused: use [`write`](Self::write).
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        replace(path, &self.to_bytes()).map_err(|error| Error::from(error).at(format!("trace `{}`", path.display())))
    }
}

/// The number of the next file that is not complete.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// Writes a file beside the path, and renames it.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let Some(name) = path.file_name() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name"));
    };
    // A device such as `/dev/null`, or a pipe, would be replaced, too.
    if fs::metadata(path).is_ok_and(|known| !known.is_file()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path is not that of a regular file"));
    }
    let (partial, created) = loop {
        let mut partial = OsString::from(".");
        partial.push(name);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        partial.push(format!(".{}-{number}.partial", std::process::id()));
        let partial = path.with_file_name(partial);
        match File::create_new(&partial) {
            // That of a process which was killed, or of one with the same number in another container.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => break (partial, created),
        }
    };
    let renamed = created?.write_all(bytes).and_then(|()| fs::rename(&partial, path));
    if renamed.is_err() {
        // The first error is returned.
        let _ = fs::remove_file(&partial);
    }
    renamed
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flows: Vec<_> = self.timelines.iter().map(|timeline| &timeline.flow).collect();
        f.debug_struct("Trace")
            .field("flows", &flows)
            .field("events", &self.len())
            .field("lost", &self.lost())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("wakeline-replace-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.pftrace");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let trace = Trace::new(Vec::new());
        for wrong in [folder.clone(), folder.join("none/a.pftrace"), "/".into(), "".into()] {
            let error = trace.save(&wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("trace `{}`", wrong.display())), "{error}");
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing is left");
        // What a process with the same number has left is kept.
        let next = NUMBERS.load(Ordering::Relaxed);
        let left = [0, 1, 2, 3]
            .map(|after| next + after)
            .map(|number| folder.join(format!(".b.{}-{number}.partial", std::process::id())));
        left.iter().for_each(|left| fs::write(left, b"left").unwrap());
        replace(&folder.join("b"), b"three").unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 6);
        fs::remove_dir_all(folder).unwrap();
    }
}
