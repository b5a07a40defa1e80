//! Which device work an operator waits for, when it waits for a device.
//!
//! A message is ordered after all device work before it: the operator that waits for it on the host waits for the
//! slowest of that. What each operator's work and the copies in each direction take is measured now and then; the slowest is the one
//! that takes the most of a second. Where nothing was measured, the nearest work is named.
//!
//! ```text
//!   load ──> first ──> heavy ──> last ──> read  waits for a device
//!        copies 20 us  50 us    6 ms    50 us
//! ```

use std::{collections::VecDeque, time::Duration};

use super::{
    bottleneck::{Bottleneck, Reason},
    finder::{Finder, percent},
};
use crate::stream::DeviceTime;

/// Work that takes at least this share of the time for which an operator waits explains its wait.
const EXPLAINS: f64 = 0.5;

/// What uses a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DeviceUser {
    Operator(usize),
    /// All operators of it; and the one that is nearest.
    Section(usize, usize),
    /// The copies of a hub.
    Copies(usize),
}

/// How much of the time it keeps a device busy.
struct WorkLoad {
    work: DeviceUser,
    mean: Option<Duration>,
    /// The share of the time for which it keeps a device busy.
    load: f64,
}

impl Finder<'_> {
    /// The work that `waits` waited for, `share` of the time.
    pub(super) fn device(&self, waits: usize, share: f64) -> Bottleneck {
        let mut found = self.work(waits, false);
        // A writer waits for the envelopes that it fills, on which operators behind it work.
        let behind = found.iter().all(|known| known.operator().is_none());
        if behind {
            found.extend(self.work(waits, true));
        }
        let (timed, untimed): (Vec<_>, Vec<_>) = found.iter().partition(|known| known.mean.is_some());
        let most = timed.iter().max_by(|one, other| one.load.total_cmp(&other.load));
        if let Some(known) = most.filter(|known| known.load >= EXPLAINS * share || untimed.is_empty()) {
            return self.waits_for(known, waits, share);
        }
        let nearest = untimed.first().filter(|first| {
            let Some(at) = first.operator() else { return false };
            // Another one that is not beyond the first might be it as well.
            let is_beyond = |other: usize| if behind { self.leads_to(at, other) } else { self.leads_to(other, at) };
            at == waits
                || untimed.iter().filter_map(|known| known.operator()).all(|other| other == at || is_beyond(other))
        });
        let Some(known) = nearest else {
            let what =
                format!("it waited for a device {} of the time: see the operators' device times", percent(share));
            return self.operator(waits, Reason::Device, &what);
        };
        let mut found = self.waits_for(known, waits, share);
        let others =
            untimed[1..].iter().filter_map(|known| Some(format!("`{}`", self.control.names[known.operator()?])));
        let others = others.collect::<Vec<_>>().join(" or ");
        if !timed.is_empty() && !others.is_empty() {
            found.sentence.push_str(&format!(", or for that of {others}: work on streams of others is not timed"));
        }
        found
    }

    /// The work before an operator, or behind it, nearest first; beginning with its own.
    fn work(&self, waits: usize, behind: bool) -> Vec<WorkLoad> {
        let (mut found, mut open) = (Vec::<WorkLoad>::new(), VecDeque::from([waits]));
        let mut seen = vec![false; self.control.tasks.len()];
        while let Some(operator) = open.pop_front() {
            if std::mem::replace(&mut seen[operator], true) {
                continue;
            }
            found.extend(self.work_of(operator).filter(|known| found.iter().all(|other| !other.is_same(known))));
            for (number, hub) in self.hubs.numbered(operator) {
                let (here, there) = if behind { (hub.from, hub.to) } else { (hub.to, hub.from) };
                if here == operator {
                    let copies = hub.state.copies().then(|| self.copies(number)).flatten();
                    found.extend(copies);
                    open.push_back(there);
                }
            }
        }
        found
    }

    fn is_on_host(&self, operator: usize) -> bool {
        self.parts.is_none_or(|parts| parts.devices.is_host(operator))
    }

    fn work_of(&self, operator: usize) -> Option<WorkLoad> {
        if self.is_on_host(operator) {
            return None;
        }
        let rate = self.rate(operator);
        let section = self.control.section(operator);
        let replays = section.and_then(|number| Some((number, self.parts?.sections.get(number)?.work.sums())));
        if let Some((number, times)) = replays.filter(|(_, times)| times.runs > 0) {
            return Some(WorkLoad::new(DeviceUser::Section(number, operator), times, rate));
        }
        let watched = self.control.watched().and_then(|watched| watched.work.as_ref());
        let times = watched.and_then(|work| work.times.get(operator)).map(|times| times.sums()).unwrap_or_default();
        Some(WorkLoad::new(DeviceUser::Operator(operator), times, rate))
    }

    /// The copies of all hubs in its direction count for it. `None` if none was measured: most copies are quick.
    fn copies(&self, hub: usize) -> Option<WorkLoad> {
        let connected = &self.hubs.all[hub];
        let reader = &self.control.watched()?.work.as_ref()?.reader;
        let times = reader.copies(self.is_on_host(connected.to)).sums();
        (times.runs > 0).then(|| WorkLoad::new(DeviceUser::Copies(hub), times, self.passes(hub)))
    }

    fn waits_for(&self, known: &WorkLoad, waits: usize, share: f64) -> Bottleneck {
        let (share, waiter) = (percent(share), &self.control.names[waits]);
        let each = |of: &str| known.mean.map_or(String::new(), |mean| format!(", {} for each {of}", time(mean)));
        let device = |operator: usize| self.parts.map_or("a device", |parts| parts.devices.name(operator));
        match known.work {
            DeviceUser::Copies(hub) => {
                let (at, each) = (self.hubs.all[hub].state.name().clone(), each("message"));
                let window = self.window();
                let sentence = format!(
                    "hub `{at}` is the bottleneck: of the {window}, `{waiter}` waited for its copies {share} of the time{each}"
                );
                Bottleneck { at, reason: Reason::Device, sentence }
            }
            DeviceUser::Section(number, operator) => {
                let section = self.control.section_name(number);
                let what = format!(
                    "`{waiter}` waited for the work of its section `{section}` on {} {share} of the time{}",
                    device(operator),
                    each("round")
                );
                self.operator(operator, Reason::Device, &what)
            }
            DeviceUser::Operator(own) => {
                let work =
                    if own == waits { "it waited for".into() } else { format!("`{waiter}` waited for its work on") };
                let what = format!("{work} {} {share} of the time{}", device(own), each("run"));
                self.operator(own, Reason::Device, &what)
            }
        }
    }
}

impl WorkLoad {
    fn new(work: DeviceUser, times: DeviceTime, rate: f64) -> Self {
        let mean = (times.runs > 0).then(|| times.mean());
        Self { work, mean, load: mean.map_or(0.0, |mean| mean.as_secs_f64() * rate) }
    }

    fn operator(&self) -> Option<usize> {
        match self.work {
            DeviceUser::Operator(operator) | DeviceUser::Section(_, operator) => Some(operator),
            DeviceUser::Copies(_) => None,
        }
    }

    /// A section has many operators.
    fn is_same(&self, other: &Self) -> bool {
        match (self.work, other.work) {
            (DeviceUser::Section(one, _), DeviceUser::Section(two, _)) => one == two,
            (one, two) => one == two,
        }
    }
}

/// For a sentence: `6.1 ms`, `50 us`.
fn time(time: Duration) -> String {
    let micros = time.as_secs_f64() * 1e6;
    if micros < 1000.0 { format!("{micros:.0} us") } else { format!("{:.1} ms", micros / 1000.0) }
}
