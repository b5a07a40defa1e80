//! [`Triggers`]: what has the last seconds of a flow saved when it happens.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{records::Records, snapshot::BETWEEN, trace::Trace};
use crate::sync::{Mutex, contained, lock, logged};

/// The least time between two saves of one trigger.
const COOL_DOWN: Duration = Duration::from_secs(60);

/// When a trace is saved.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TriggerCause {
    /// A message took longer on the path of this name.
    Slower(String, Duration),
    Stalled,
    Failed,
    /// A poll of an operator took longer.
    Blocked(Duration),
}

/// What has happened in a flow since it was last looked at.
#[derive(Debug, Default)]
pub(super) struct Happened {
    /// The slowest message of each path.
    pub(super) slowest: Vec<(String, Duration)>,
    pub(super) stalled: bool,
    pub(super) failed: bool,
    /// The operator with the longest poll, and for how long that was seen.
    pub(super) blocked: Option<(Arc<str>, Duration)>,
}

/// The triggers of an observer.
#[derive(Debug, Default)]
pub(super) struct Triggers(Mutex<Vec<Arc<Trigger>>>);

#[derive(Debug)]
struct Trigger {
    cause: TriggerCause,
    file: PathBuf,
    /// When it has last fired.
    fired: Mutex<Option<Instant>>,
}

impl Triggers {
    pub(super) fn add(&self, cause: TriggerCause, file: PathBuf) {
        lock(&self.0).push(Arc::new(Trigger { cause, file, fired: Mutex::default() }));
    }

    /// True if the paths of messages matter.
    pub(super) fn look_at_paths(&self) -> bool {
        lock(&self.0).iter().any(|trigger| matches!(trigger.cause, TriggerCause::Slower(..)))
    }

    /// Warns of paths of which a flow has some operators and not others: those of another flow it has none of.
    pub(super) fn check_paths(&self, flow: &str, operators: &[Arc<str>]) {
        let all = lock(&self.0).clone();
        // Where a name has the separator in it, a path cannot be taken apart.
        if operators.iter().any(|name| name.contains(BETWEEN)) {
            return;
        }
        for path in all.iter().filter_map(|trigger| trigger.cause.path()) {
            let (known, unknown): (Vec<_>, Vec<_>) =
                path.split(BETWEEN).partition(|name| operators.iter().any(|operator| **operator == **name));
            if !known.is_empty() && !unknown.is_empty() {
                let unknown = unknown.join("`, `");
                logged(|| {
                    tracing::warn!(
                        flow,
                        "`when_slower` saves nothing for path `{path}`: this flow has no operator `{unknown}`"
                    );
                });
            }
        }
    }

    /// Saves the last seconds of a flow for each trigger whose cause is there. `is_last`: at the end of the flow, before
    /// this returns; otherwise on a thread of its own.
    pub(super) fn fire(&self, happened: &Happened, records: &Arc<Records>, is_last: bool) {
        let all = lock(&self.0).clone();
        let due = all.into_iter().filter_map(|trigger| {
            let why = trigger.cause.why(happened)?;
            trigger.takes_turn().then_some((trigger, why))
        });
        for (trigger, why) in due {
            let of = records.clone();
            let save = move || trigger.save(&of, &why);
            if is_last { save() } else { records.save(save) }
        }
    }
}

impl Trigger {
    /// False if it has fired a short time ago.
    fn takes_turn(&self) -> bool {
        let mut fired = lock(&self.fired);
        let is_due = fired.is_none_or(|last| last.elapsed() >= COOL_DOWN);
        if is_due {
            *fired = Some(Instant::now());
        }
        is_due
    }

    /// The log's subscriber is user code.
    fn save(&self, records: &Arc<Records>, why: &str) {
        contained("saving a trace panicked", || {
            let Some(timeline) = records.timeline(Duration::MAX) else { return };
            let flow = timeline.flow.clone();
            let (flow, file) = (&*flow, self.file.display());
            match Trace::new(vec![timeline]).save(&self.file) {
                Ok(()) => tracing::warn!(flow, %file, "{why}: the last seconds are saved"),
                Err(error) => {
                    tracing::error!(flow, error = %format_args!("{error:#}"), "{why}: the last seconds cannot be saved")
                }
            }
        });
    }
}

impl TriggerCause {
    fn path(&self) -> Option<&str> {
        if let Self::Slower(path, _) = self { Some(path) } else { None }
    }

    fn why(&self, happened: &Happened) -> Option<String> {
        match self {
            Self::Slower(path, limit) => {
                let is_it = |(slow, took): &&(String, Duration)| slow == path && took > limit;
                let (_, took) = happened.slowest.iter().find(is_it)?;
                Some(format!("a message took {took:?} on path `{path}`"))
            }
            Self::Stalled => happened.stalled.then(|| "operators have stalled".into()),
            Self::Failed => happened.failed.then(|| "the flow has failed".into()),
            Self::Blocked(limit) => {
                let (operator, took) = happened.blocked.as_ref().filter(|(_, took)| took > limit)?;
                Some(format!("`{operator}` has blocked its thread for {took:?}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_what_it_says() {
        let limit = Duration::from_millis(20);
        let all = [
            TriggerCause::Slower("a > b".into(), limit),
            TriggerCause::Stalled,
            TriggerCause::Failed,
            TriggerCause::Blocked(limit),
        ];
        let why = |happened: &Happened| all.clone().map(|cause| cause.why(happened).is_some());
        let none = Happened::default();
        assert_eq!(why(&none), [false; 4]);
        let below = Happened {
            slowest: vec![("a > b".into(), limit), ("a".into(), Duration::MAX)],
            blocked: Some(("a".into(), limit)),
            ..Happened::default()
        };
        assert_eq!(why(&below), [false; 4]);
        let above = Happened {
            slowest: vec![("a > b".into(), Duration::MAX)],
            stalled: true,
            failed: true,
            blocked: Some(("a".into(), Duration::MAX)),
        };
        assert_eq!(why(&above), [true; 4]);
    }

    #[test]
    fn a_trigger_rests_after_it_has_fired() {
        let trigger = Trigger { cause: TriggerCause::Stalled, file: PathBuf::new(), fired: Mutex::default() };
        assert!(trigger.takes_turn() && !trigger.takes_turn());
        let Some(past) = Instant::now().checked_sub(COOL_DOWN) else { return };
        *lock(&trigger.fired) = Some(past);
        assert!(trigger.takes_turn());
    }
}
