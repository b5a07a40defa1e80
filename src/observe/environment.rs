//! `WAKELINE_STATUS`: snapshots of a program's flows, without a change of the program.

use std::{
    io::Write,
    sync::{Arc, LazyLock, Once},
    time::Duration,
};

use super::{FlowRecords, Observe, Snapshot};
use crate::{flow::FlowObserver, sync::logged};

const VARIABLE: &str = "WAKELINE_STATUS";

/// How often to print, if the environment says so.
static INTERVAL: LazyLock<Option<Duration>> = LazyLock::new(|| {
    let value = std::env::var_os(VARIABLE).filter(|value| !value.is_empty())?;
    let interval = value.to_str().and_then(duration);
    if interval.is_none() {
        logged(|| {
            tracing::warn!(
                "{VARIABLE}={} is not used: it must be a whole number with a unit, from `1ms` on: `500ms`, `2s`, `1m`",
                value.display()
            );
        });
    }
    interval
});

/// Observes all flows of the process.
static ALL: LazyLock<Observe> = LazyLock::new(Observe::new);

/// The observer of a flow that begins.
pub(crate) fn from_environment() -> Option<Arc<dyn FlowObserver>> {
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
            logged(|| tracing::warn!(%error, "cannot spawn the thread that prints {VARIABLE}"));
        }
    });
    let Observe { sampling, hooks, shared } = ALL.clone();
    Some(Arc::new(FlowRecords { sampling, hooks, shared, at_end: Some(print_end) }))
}

fn print_end(snapshot: &Snapshot) {
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
    fn an_interval_has_a_number_and_a_unit() {
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(duration(" 2s "), Some(Duration::from_secs(2)));
        assert_eq!(duration("1m"), Some(Duration::from_secs(60)));
        for wrong in ["", "2", "s", "0s", "-1s", "1.5s", "2h", "18446744073709551615m", "99999999999999999999s"] {
            assert_eq!(duration(wrong), None, "{wrong}");
        }
    }
}
