//! [`groups`]: the groups of operators of a running flow that wait only for each other.
//!
//! ```text
//!   ticks ──> log        a ──> b        `ticks` continues, so `log` may. `a` waits for `b`, and `b` for `a`:
//!                        ^     │        no other operator can release them.
//!                        └─────┘
//! ```
//!
//! A waiting operator may continue if one of the operators that it waits for may continue. Starting with all
//! [active](Dependency::Active) operators, this is followed to its fixed point. The remaining operators stay at
//! rest, whatever the others do: they form an idle loop, or a deadlock.
//!
//! A group has [cores], which wait for no other operator of the group. The other members wait for them, directly
//! or indirectly.

use std::collections::HashSet;

use super::components::components;
use crate::{
    mutants::{self, Mutant},
    operator::dependency::Dependency,
};

/// The groups of operators that are at rest, each in the order of adding. No operator of one group waits for an
/// operator of another.
pub(super) fn groups(stands: &[Dependency]) -> Vec<Vec<usize>> {
    let mut waited_for_by = vec![Vec::new(); stands.len()];
    for (operator, stand) in stands.iter().enumerate() {
        if let Dependency::Waits(on) = stand {
            on.iter().for_each(|&other| waited_for_by[other].push(operator));
        }
    }
    let is_active = |operator: &usize| stands[*operator] == Dependency::Active;
    let mut live = vec![false; stands.len()];
    let mut next: Vec<_> = (0..stands.len()).filter(is_active).collect();
    while let Some(operator) = next.pop() {
        if !std::mem::replace(&mut live[operator], true) {
            next.extend(&waited_for_by[operator]);
        }
    }
    // An operator that waits for a member of a group, or is waited for by one, is a member.
    let mut left: Vec<_> =
        stands.iter().zip(&live).map(|(stand, live)| !live && matches!(stand, Dependency::Waits(_))).collect();
    let mut groups = Vec::new();
    for first in 0..stands.len() {
        let (mut group, mut next) = (Vec::new(), vec![first]);
        while let Some(operator) = next.pop() {
            if std::mem::replace(&mut left[operator], false) {
                group.push(operator);
                next.extend(&waited_for_by[operator]);
                if let Dependency::Waits(on) = &stands[operator] {
                    next.extend(on);
                }
            }
        }
        if !group.is_empty() {
            group.sort_unstable();
            if group.len() > 1 && mutants::is(Mutant::GroupShort) {
                group.pop();
            }
            if mutants::is(Mutant::GroupLong) {
                group.extend((0..stands.len()).find(|at| live[*at] && matches!(stands[*at], Dependency::Waits(_))));
            }
            groups.push(group);
        }
    }
    groups
}

/// The smallest parts of the group whose operators wait only for each other, each in the order of adding. The rest of
/// the group may be waiting for them to end.
pub(super) fn cores(stands: &[Dependency], group: &[usize]) -> Vec<Vec<usize>> {
    let waits_on = |stand: &Dependency| match stand {
        Dependency::Waits(on) => on.iter().copied().filter(|other| stands[*other] != Dependency::Ended).collect(),
        Dependency::Active | Dependency::Ended => Vec::new(),
    };
    let waits: Vec<Vec<usize>> = stands.iter().map(waits_on).collect();
    let group: HashSet<_> = group.iter().copied().collect();
    let mut all = components(&waits, |other| *other);
    let is_core = |part: &Vec<usize>| {
        part.iter().all(|at| {
            let on_each_other = waits[*at].iter().all(|other| part.binary_search(other).is_ok());
            matches!(stands[*at], Dependency::Waits(_)) && group.contains(at) && on_each_other
        })
    };
    all.retain(is_core);
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        Dependency::{Active, Ended, Waits},
        *,
    };

    #[test]
    fn a_loop_beside_an_active_operator_is_a_group() {
        let stands = [Active, Waits(vec![0]), Waits(vec![3]), Waits(vec![2]), Waits(vec![3])];
        assert_eq!(groups(&stands), [[2, 3, 4]]);
        // One of them also waits for the active operator.
        let stands = [Active, Waits(vec![0]), Waits(vec![0, 3]), Waits(vec![2]), Waits(vec![3])];
        assert!(groups(&stands).is_empty());
    }

    #[test]
    fn independent_groups_are_separate() {
        let stands = [Waits(vec![1]), Waits(vec![0]), Ended, Waits(vec![2]), Waits(Vec::new())];
        assert_eq!(groups(&stands), [vec![0, 1], vec![3], vec![4]]);
    }

    #[test]
    fn the_cores_of_a_group_are_what_the_others_wait_for() {
        // `0` and `1` wait for each other, `2` for both, `3` for `2`; `4` waits for itself.
        let stands = [
            Waits(vec![1]),
            Waits(vec![0]),
            Waits(vec![0, 5]),
            Waits(vec![2]),
            Waits(vec![4]),
            Ended,
            Active,
            Waits(vec![6]),
        ];
        assert_eq!(cores(&stands, &[0, 1, 2, 3]), [[0, 1]]);
        assert_eq!(cores(&stands, &[0, 1, 2, 3, 4, 6, 7]), [vec![0, 1], vec![4]]);
    }

    fn stands() -> impl Strategy<Value = Vec<Dependency>> {
        (1_usize..12).prop_flat_map(|count| {
            let stand = prop_oneof![
                Just(Active),
                Just(Ended),
                prop::collection::vec(0..count, 0..3).prop_map(Waits),
                prop::collection::vec(0..count, 0..3).prop_map(Waits),
            ];
            prop::collection::vec(stand, count)
        })
    }

    proptest! {
        /// Whatever the other operators do, no member of a group ever continues; and every other operator may.
        #[test]
        fn what_others_do_never_ends_a_group(stands in stands()) {
            // The most that can happen: an active operator may let all operators continue that wait for it.
            let mut may: Vec<_> = stands.iter().map(|stand| *stand == Active).collect();
            for _ in 0..stands.len() {
                for (at, stand) in stands.iter().enumerate() {
                    may[at] |= matches!(stand, Waits(on) if on.iter().any(|other| may[*other]));
                }
            }
            let groups = groups(&stands);
            let grouped: Vec<_> = groups.iter().flatten().copied().collect();
            for (at, stand) in stands.iter().enumerate() {
                let count = grouped.iter().filter(|other| **other == at).count();
                prop_assert_eq!(count, usize::from(!may[at] && matches!(stand, Waits(_))));
            }
            // Each group has a core, and a core contains every operator that its members wait for.
            for group in &groups {
                let cores = cores(&stands, group);
                prop_assert!(!cores.is_empty());
                for core in &cores {
                    for at in core {
                        let Waits(on) = &stands[*at] else { panic!("{stands:?}") };
                        prop_assert!(on.iter().all(|other| core.contains(other) || stands[*other] == Ended));
                    }
                }
            }
        }
    }
}
