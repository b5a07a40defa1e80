//! [`LogLine`]: one step of a simulation. It is formatted only when the log is read.

use std::{fmt, sync::Arc};

use super::{super::work::Description, task::TaskId};

#[derive(Clone)]
pub(in super::super) enum LogLine {
    Root,
    Task {
        id: TaskId,
        name: Arc<str>,
        aborted: bool,
    },
    /// An entry of a stream. A name is unknown once its stream or device is destroyed.
    Work {
        device: Option<Arc<str>>,
        stream: Option<Arc<str>>,
        work: Description,
    },
}

impl fmt::Display for LogLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("root"),
            Self::Task { id, name, aborted } => {
                write!(f, "{} {id}", if *aborted { "abort" } else { "task" })?;
                if name.is_empty() { Ok(()) } else { write!(f, " `{name}`") }
            }
            Self::Work { device, stream, work } => {
                write!(f, "{}/{}: {work}", device.as_deref().unwrap_or("?"), stream.as_deref().unwrap_or("?"))
            }
        }
    }
}
