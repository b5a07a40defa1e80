//! The sampler: one thread of the process, `wakeline-observer`, looks at each observed flow now and then.
//!
//! It is not one of the runtime's: it also runs while all workers are blocked. It ends with the last observed flow.

use std::{
    sync::{Arc, LazyLock, Weak},
    thread,
    time::{Duration, Instant},
};

use super::records::{Records, Sampling};
use crate::sync::{Condvar, Level, Mutex, contained, lock, logged};

/// The thread sleeps this number of times as long as it has worked: it takes at most 1 % of a core, with its wakes.
const REST: f64 = 208.0;
/// Where less time is kept it sleeps as much less, down to a fourth: shares of few samples say little.
const KEPT: Duration = Duration::from_secs(10);
/// The longest that a round may count as having taken.
const LONGEST: Duration = Duration::from_millis(100);

/// Samples a run from now on, until it has ended.
pub(super) fn add(records: &Arc<Records>) {
    Sampler::add(records);
}

struct Due {
    records: Vec<Arc<Records>>,
    /// The shortest time that any flow keeps.
    kept: Duration,
}

/// The flows that are sampled.
struct Sampler {
    records: Vec<(Weak<Records>, Instant)>,
    has_thread: bool,
    random: u64,
}

static SAMPLER: Mutex<Sampler> =
    Mutex::at(Level::Records, Sampler { records: Vec::new(), has_thread: false, random: 0x2545_f491_4f6c_dd1d });
/// Signalled when a flow is added.
static ADDED: LazyLock<Condvar> = LazyLock::new(Condvar::default);

impl Sampler {
    fn add(records: &Arc<Records>) {
        let mut sampler = lock(&SAMPLER);
        sampler.records.push((Arc::downgrade(records), Instant::now()));
        if std::mem::replace(&mut sampler.has_thread, true) {
            drop(sampler);
            return ADDED.notify_all();
        }
        drop(sampler);
        if let Err(error) = thread::Builder::new().name("wakeline-observer".into()).spawn(Self::observe) {
            lock(&SAMPLER).has_thread = false;
            logged(
                || tracing::error!(%error, "cannot spawn the thread that observes flows: they run on, without shares"),
            );
        }
    }

    fn observe() {
        let mut ended = false;
        contained("the observer's thread panicked", || {
            Self::run();
            ended = true;
        });
        if !ended {
            // The next flow begins anew.
            lock(&SAMPLER).has_thread = false;
        }
    }

    fn run() {
        let mut cost = Duration::ZERO;
        loop {
            let now = Instant::now();
            let Some(Due { records: due, kept }) = Self::due(now) else { return };
            for records in due {
                // The last reference to a flow may be dropped here, and with it values of the user's.
                contained("a value of a flow panicked in the observer's thread", || {
                    if let Some(control) = records.control.upgrade() {
                        let polled = records.sample(&control, now);
                        if !control.has_ended() {
                            records.collect(&control, polled, false);
                        }
                    }
                    drop(records);
                });
            }
            // A round in which the thread was preempted or stopped says little about its cost: where all processors are busy,
            // nearly all rounds are.
            let took = now.elapsed().min(LONGEST);
            cost = if took < cost { took } else { cost + (took - cost) / 16 };
            let rested = Instant::now() + rest(cost, kept);
            let mut sampler = lock(&SAMPLER);
            loop {
                let next = sampler.records.iter().map(|(_, next)| *next).min().unwrap_or(now).max(rested);
                let nap = next.saturating_duration_since(Instant::now());
                if nap.is_zero() {
                    break;
                }
                sampler = ADDED.wait_timeout(sampler, nap);
            }
        }
    }

    /// What to sample now. `None` if there are no records at all, and the thread ends.
    fn due(now: Instant) -> Option<Due> {
        let mut sampler = lock(&SAMPLER);
        let (mut due, mut gone) = (Due { records: Vec::new(), kept: Duration::MAX }, Vec::new());
        let Self { records, random, .. } = &mut *sampler;
        records.retain_mut(|(records, next)| {
            let Some(records) = records.upgrade() else { return false };
            if records.control.strong_count() == 0 || records.last().is_some() {
                gone.push(records);
                return false;
            }
            let Sampling { every, keep, .. } = records.sampling();
            due.kept = due.kept.min(keep);
            if *next <= now {
                *next = now + irregular(every, random);
                due.records.push(records);
            } else {
                gone.push(records);
            }
            true
        });
        sampler.has_thread = !sampler.records.is_empty();
        let more = sampler.has_thread;
        drop(sampler);
        drop(gone);
        more.then_some(due)
    }
}

/// How long the thread sleeps after a round. `kept`: the shortest time that is kept of a flow.
fn rest(cost: Duration, kept: Duration) -> Duration {
    cost.mul_f64(REST * kept.div_duration_f64(KEPT).clamp(0.25, 1.0))
}

/// Between half and one and a half of an interval: a flow with the same period is not always sampled at the same point.
fn irregular(interval: Duration, random: &mut u64) -> Duration {
    // Xorshift.
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    interval.mul_f64(0.5 + (*random >> 11) as f64 / (1_u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_rests_shorter_where_less_time_is_kept() {
        let cost = Duration::from_millis(1);
        for (kept, rests) in [(0, 52.0), (2, 52.0), (5, 104.0), (10, 208.0), (u64::MAX, 208.0)] {
            let took = rest(cost, Duration::from_secs(kept)).as_secs_f64() * 1e3;
            assert!((took - rests).abs() < 0.001, "{kept} s are kept: it rests {took} ms");
        }
    }
}
