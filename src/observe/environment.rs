//! `WAKELINE_STATUS`, `WAKELINE_TRACE` and `WAKELINE_PAGE`: snapshots, traces and a page of a program's flows, without a change
//! of the program.

use std::{
    ffi::OsString,
    fmt::Display,
    io::Write,
    net::{SocketAddr, ToSocketAddrs},
    path::{Path, PathBuf},
    sync::{
        Arc, LazyLock, Once,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use super::{
    Observe, Snapshot,
    observer::{self, FlowRecords},
    records::Records,
    trace::Trace,
};
use crate::{
    flow::FlowObserver,
    sync::{Deferred, log, logged},
};

const STATUS: &str = "WAKELINE_STATUS";
const TRACE: &str = "WAKELINE_TRACE";
pub(super) const PAGE: &str = "WAKELINE_PAGE";
/// Events of each thread for a trace at the end of a flow: 6 MiB.
const EVENTS: usize = 262_144;

/// How often to print, if the environment says so.
static INTERVAL: LazyLock<Option<Duration>> = LazyLock::new(|| {
    let value = std::env::var_os(STATUS).filter(|value| !value.is_empty())?;
    let interval = value.to_str().and_then(duration);
    if interval.is_none() {
        let value = value.display();
        warn(format!(
            "{STATUS}={value} is not used: it must be a whole number with a unit, from `1ms` on: `500ms`, `2s`, `1m`"
        ));
    }
    interval
});

/// The file for the trace of the first flow that ends, if the environment names one.
static FILE: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let file = PathBuf::from(std::env::var_os(TRACE).filter(|value| !value.is_empty())?);
    if file.file_name().is_some() && !file.is_dir() {
        // The program may create it before a flow ends.
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir());
        folder.into_iter().for_each(|folder| {
            warn(format!("{TRACE}: there is no folder `{}` yet: without it no trace is saved", folder.display()));
        });
        return Some(file);
    }
    let file = file.display();
    warn(format!("{TRACE}={file} is not used: it must be the path of a file that can be written: `flow.pftrace`"));
    None
});

/// Where to serve a page, if the environment says so.
static ADDRESS: LazyLock<Option<SocketAddr>> = LazyLock::new(|| {
    let value = std::env::var_os(PAGE).filter(|value| !value.is_empty())?;
    let found = value.to_string_lossy().trim().to_socket_addrs().map(|mut all| all.next());
    let wrong = match found {
        Ok(address @ Some(_)) if cfg!(feature = "page") => return address,
        Ok(Some(_)) => {
            "wakeline was built without its feature `page`, which `--features wakeline/page` or Cargo.toml enables"
                .into()
        }
        Ok(None) => "it has no address".into(),
        Err(error) => {
            format!("{error}: it must be an address and a port: `127.0.0.1:7070`, or `127.0.0.1:0` for a free port")
        }
    };
    warn(format!("{PAGE}={} is not used: {wrong}", value.display()));
    None
});

/// Observes all flows of the process.
static ALL: LazyLock<Observe> = LazyLock::new(Observe::new);

/// Records all flows of the process, with all of their device work.
static RECORDED: LazyLock<Observe> = LazyLock::new(|| Observe::new().paths(1).record(EVENTS));

/// The observers of a flow that begins.
pub(crate) fn from_environment() -> impl Iterator<Item = Arc<dyn FlowObserver>> {
    // What is wrong is logged when all is read: a subscriber may begin a flow.
    let _later = Deferred::new();
    printer().into_iter().chain(recorder()).chain(page())
}

/// Shows the flow on a page.
fn page() -> Option<Arc<dyn FlowObserver>> {
    /// Observes all flows of the process, and records them.
    static SHOWN: LazyLock<Observe> = LazyLock::new(|| {
        let observe = Observe::new().record(observer::RECORDED);
        #[cfg(feature = "page")]
        ADDRESS.iter().for_each(|address| super::page::open_for_process(observe.shared.clone(), *address));
        observe
    });
    ADDRESS.is_some().then(|| Arc::new(FlowRecords { observe: SHOWN.clone(), at_end: None }) as _)
}

/// Saves a trace when the flow ends.
fn recorder() -> Option<Arc<dyn FlowObserver>> {
    FILE.is_some().then(|| Arc::new(FlowRecords { observe: RECORDED.clone(), at_end: Some(save_end) }) as _)
}

/// The first flow that ends is in the file itself.
fn save_end(snapshot: &Snapshot, records: Option<&Arc<Records>>) {
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    let Some((file, timeline)) = FILE.as_ref().zip(records.and_then(|records| records.timeline(Duration::MAX))) else {
        return;
    };
    let file = numbered(file, ENDED.fetch_add(1, Ordering::Relaxed));
    let (flow, file_name) = (&snapshot.flow, file.display());
    let seconds = Duration::from_nanos(timeline.to.saturating_sub(timeline.from)).as_secs_f64();
    let trace = Trace::new(vec![timeline]);
    match trace.save(&file) {
        Ok(()) => print_line(format_args!("the last {seconds:.1} s of flow `{flow}` are in {file_name}")),
        Err(error) => {
            print_line(format_args!("{TRACE}: the trace of flow `{flow}` is not saved: {error:#}"));
            logged(|| tracing::error!(flow = &**flow, error = %format_args!("{error:#}"), "{TRACE} is not saved"));
        }
    }
}

/// Prints a line, since a program may have no subscriber for its log. A program without a standard error has no reader either.
pub(super) fn print_line(line: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "wakeline: {line}");
}

/// Reports what is wrong with the value of a variable.
fn warn(why: String) {
    print_line(&why);
    log(move || tracing::warn!("{why}"));
}

/// `flow.pftrace`, then `flow.2.pftrace` and so on.
fn numbered(file: &Path, before: usize) -> PathBuf {
    if before == 0 {
        return file.into();
    }
    let mut extension = OsString::from((before + 1).to_string());
    if let Some(own) = file.extension() {
        extension.push(".");
        extension.push(own);
    }
    file.with_extension(extension)
}

/// Prints snapshots of the flow.
fn printer() -> Option<Arc<dyn FlowObserver>> {
    static PRINTS: Once = Once::new();
    let interval = (*INTERVAL)?;
    PRINTS.call_once(|| {
        let print = std::thread::Builder::new().name("wakeline-status".into()).spawn(move || {
            loop {
                std::thread::sleep(interval);
                ALL.snapshots().iter().filter(|snapshot| !snapshot.over).for_each(print);
            }
        });
        if let Err(error) = print {
            log(move || tracing::warn!(%error, "cannot spawn the thread that prints {STATUS}"));
        }
    });
    Some(Arc::new(FlowRecords { observe: ALL.clone(), at_end: Some(print_end) }))
}

fn print_end(snapshot: &Snapshot, _records: Option<&Arc<Records>>) {
    print(snapshot);
}

/// A program without a standard error has no reader either.
fn print(snapshot: &Snapshot) {
    let _ = writeln!(std::io::stderr().lock(), "{snapshot}");
}

/// A whole number and `ms`, `s` or `m`. `None` also for zero.
fn duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text.find(|letter: char| !letter.is_ascii_digit())?;
    let number: u64 = text[..digits].parse().ok().filter(|number| *number > 0)?;
    match &text[digits..] {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_flow_has_a_file() {
        let all = |file: &str| [0, 1, 11].map(|before| numbered(file.as_ref(), before).display().to_string());
        assert_eq!(all("a/flow.pftrace"), ["a/flow.pftrace", "a/flow.2.pftrace", "a/flow.12.pftrace"]);
        assert_eq!(all("flow"), ["flow", "flow.2", "flow.12"]);
    }

    #[test]
    fn an_interval_has_a_number_and_a_unit() {
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(duration(" 2s "), Some(Duration::from_secs(2)));
        assert_eq!(duration("1m"), Some(Duration::from_secs(60)));
        for wrong in ["", "2", "s", "0s", "-1s", "1.5s", "2h", "18446744073709551615m", "99999999999999999999s"] {
            assert_eq!(duration(wrong), None, "{wrong}");
        }
    }
}
