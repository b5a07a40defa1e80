//! [`grouped`]: a flow of very many operators, as groups that a page can show.
//!
//! Operators of one section are a group, and those whose names differ only in numbers: `load-1`, `load-2`. If that
//! leaves too many, those are whose names begin with the same word; and if those are too many, neighbours in the order of
//! adding.

use std::{collections::hash_map::Entry, sync::Arc};

use rustc_hash::FxHashMap;

use super::super::{Activity, HubSnapshot, OperatorSnapshot, Snapshot};

/// The most operators that are shown one by one, and the most groups.
const MOST: usize = 300;
/// Groups of neighbours.
const NEIGHBOURS: usize = 100;
/// Waits that are named of a group.
const WAITS: usize = 3;

/// The snapshot, and where its bottleneck is, with groups in place of operators if there are too many.
pub(super) fn grouped(snapshot: Snapshot, at: Option<Arc<str>>) -> (Snapshot, Option<Arc<str>>) {
    if snapshot.operators.len() <= MOST {
        return (snapshot, at);
    }
    let names = counted(names(&snapshot.operators));
    let Snapshot { operators, hubs, .. } = snapshot;
    let mut group_of = FxHashMap::default();
    let mut places: FxHashMap<Arc<str>, usize> = FxHashMap::default();
    let mut groups: Vec<Group> = Vec::new();
    for (operator, name) in operators.into_iter().zip(names) {
        group_of.insert(operator.name.clone(), name.clone());
        match places.entry(name.clone()) {
            Entry::Occupied(place) => groups[*place.get()].add(operator),
            Entry::Vacant(place) => {
                place.insert(groups.len());
                groups.push(Group::new(name, operator));
            }
        }
    }
    let in_group = |name: &Arc<str>| group_of.get(name).unwrap_or(name).clone();
    let mut between: FxHashMap<(Arc<str>, Arc<str>), usize> = FxHashMap::default();
    let (mut merged, mut at_hub) = (Vec::<HubSnapshot>::new(), None);
    for hub in hubs {
        let (from, to) = (in_group(&hub.from), in_group(&hub.to));
        let is_bottleneck = at.as_ref() == Some(&hub.name);
        if from == to {
            at_hub = at_hub.or(is_bottleneck.then_some(from));
            continue;
        }
        let place = match between.entry((from.clone(), to.clone())) {
            Entry::Occupied(place) => {
                merge(&mut merged[*place.get()], &hub);
                *place.get()
            }
            Entry::Vacant(place) => {
                let name = format!("{from} -> {to}").into();
                merged.push(HubSnapshot { name, from, to, ..hub });
                *place.insert(merged.len() - 1)
            }
        };
        at_hub = at_hub.or_else(|| is_bottleneck.then(|| merged[place].name.clone()));
    }
    let at = at.map(|at| at_hub.unwrap_or_else(|| in_group(&at)));
    let operators = groups.into_iter().map(Group::end).collect();
    (Snapshot { operators, hubs: merged, ..snapshot }, at)
}

/// The names of groups, with the number of operators in them.
fn counted(names: Vec<Arc<str>>) -> Vec<Arc<str>> {
    let mut counts: FxHashMap<Arc<str>, usize> = FxHashMap::default();
    names.iter().for_each(|name| *counts.entry(name.clone()).or_default() += 1);
    let with_count = |(name, count): (Arc<str>, usize)| match count {
        1 => (name.clone(), name),
        _ => (name.clone(), format!("{name} ×{count}").into()),
    };
    let known: FxHashMap<Arc<str>, Arc<str>> = counts.into_iter().map(with_count).collect();
    names.into_iter().map(|name| known.get(&name).cloned().unwrap_or(name)).collect()
}

/// The name of each operator's group.
fn names(operators: &[OperatorSnapshot]) -> Vec<Arc<str>> {
    let ways: [fn(&str) -> String; 2] = [without_numbers, first_word];
    for way in ways {
        let mut known: FxHashMap<String, Arc<str>> = FxHashMap::default();
        let names = operators.iter().map(|operator| {
            let name =
                operator.section.as_deref().map_or_else(|| way(&operator.name), |section| format!("section {section}"));
            known.entry(name).or_insert_with_key(|name| name.as_str().into()).clone()
        });
        let names = names.collect();
        if known.len() <= MOST {
            return names;
        }
    }
    let stretch = operators.len().div_ceil(NEIGHBOURS);
    let name = |some: &[OperatorSnapshot]| -> Arc<str> {
        let name =
            |operator: Option<&OperatorSnapshot>| operator.map(|operator| operator.name.clone()).unwrap_or_default();
        format!("{} … {}", name(some.first()), name(some.last())).into()
    };
    operators.chunks(stretch).flat_map(|some| std::iter::repeat_n(name(some), some.len())).collect()
}

/// `#` for each number.
fn without_numbers(name: &str) -> String {
    let mut shape = String::with_capacity(name.len());
    for letter in name.chars() {
        match letter.is_ascii_digit() {
            true if shape.ends_with('#') => {}
            true => shape.push('#'),
            false => shape.push(letter),
        }
    }
    shape
}

fn first_word(name: &str) -> String {
    let end = name.find(|letter: char| !letter.is_alphabetic()).filter(|end| *end > 0);
    let end = end.or_else(|| name.char_indices().nth(1).map(|(end, _)| end)).unwrap_or(name.len());
    format!("{} …", &name[..end])
}

/// What a group's operators do.
struct Group {
    sum: OperatorSnapshot,
    count: f32,
    activities: [u32; Activity::ALL.len()],
}

impl Group {
    fn new(name: Arc<str>, first: OperatorSnapshot) -> Self {
        let mut activities = [0; Activity::ALL.len()];
        activities[first.activity as usize] += 1;
        Self { sum: OperatorSnapshot { name, ..first }, count: 1.0, activities }
    }

    fn add(&mut self, next: OperatorSnapshot) {
        let Self { sum, count, activities } = self;
        *count += 1.0;
        activities[next.activity as usize] += 1;
        if sum.device != next.device {
            sum.device = "several".into();
        }
        if sum.waits_for.len() < WAITS {
            sum.waits_for.extend(next.waits_for.into_iter().take(1));
        }
        sum.since = sum.since.max(next.since);
        sum.runs += next.runs;
        sum.busy = sum.busy.saturating_add(next.busy);
        if let (Some(sum), Some(next)) = (&mut sum.device_time, next.device_time) {
            sum.total = sum.total.saturating_add(next.total);
            sum.longest = sum.longest.max(next.longest);
            sum.runs += next.runs;
            sum.missed += next.missed;
        }
        if let (Some(sum), Some(next)) = (&mut sum.shares, next.shares) {
            sum.0.iter_mut().zip(next.0).for_each(|(sum, next)| *sum += next);
        }
        add_rate(&mut sum.runs_per_second, next.runs_per_second);
    }

    fn end(self) -> OperatorSnapshot {
        let Self { mut sum, count, activities } = self;
        let most = Activity::ALL.into_iter().max_by_key(|activity| activities[*activity as usize]);
        sum.activity = most.unwrap_or(sum.activity);
        if let Some(shares) = &mut sum.shares {
            shares.0.iter_mut().for_each(|share| *share /= count);
        }
        sum
    }
}

fn merge(sum: &mut HubSnapshot, next: &HubSnapshot) {
    sum.queued = sum.queued.saturating_add(next.queued);
    sum.capacity = sum.capacity.saturating_add(next.capacity);
    sum.passed += next.passed;
    sum.dropped += next.dropped;
    for (sum, next) in [(&mut sum.blanks, next.blanks), (&mut sum.arrivals, next.arrivals)] {
        if let (Some(sum), Some(next)) = (sum, next) {
            sum.free += next.free;
            sum.count += next.count;
        }
    }
    add_rate(&mut sum.messages_per_second, next.messages_per_second);
    // The fullest of them.
    if next.full > sum.full {
        sum.full = next.full;
    }
}

fn add_rate(sum: &mut Option<f64>, next: Option<f64>) {
    if let (Some(sum), Some(next)) = (sum, next) {
        *sum += next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_numbers_are_one_group() {
        assert_eq!(without_numbers("load-12.7"), "load-#.#");
        assert_eq!(without_numbers("1"), "#");
        assert_eq!(first_word("load-12"), "load …");
        assert_eq!(first_word("Übung3"), "Übung …");
        assert_eq!(first_word("12"), "1 …");
        assert_eq!(first_word(""), " …");
    }
}
