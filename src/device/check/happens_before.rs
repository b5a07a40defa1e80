//! Vector clocks: for each stream, the calls that are known to happen before something.
//!
//! A component is one stream on one device; a handle that the driver reuses is a new component. A clock is a lower
//! bound: no entry means that nothing is known. Most clocks have an entry or two, as work that the host has observed to
//! be done is left out (see [`race_state`](mod@super::race_state)).

use smallvec::SmallVec;

/// A stream's number, which is never reused.
pub(super) type Component = u64;

/// For each component, how many of its calls are known to happen before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HappensBefore(SmallVec<[(Component, u64); 4]>);

impl HappensBefore {
    /// True if the component's call `tick` happens before.
    pub(super) fn includes(&self, component: Component, tick: u64) -> bool {
        self.find(component).is_ok_and(|at| self.0[at].1 >= tick)
    }

    /// Adds that the component's call `tick` happens before.
    pub(super) fn include(&mut self, component: Component, tick: u64) {
        match self.find(component) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(tick),
            Err(at) => self.0.insert(at, (component, tick)),
        }
    }

    pub(super) fn merge(&mut self, other: &HappensBefore, which: impl Fn(Component, u64) -> bool) {
        for (component, tick) in &other.0 {
            if which(*component, *tick) {
                self.include(*component, *tick);
            }
        }
    }

    pub(super) fn retain(&mut self, which: impl Fn(Component, u64) -> bool) {
        self.0.retain(|(component, tick)| which(*component, *tick));
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    fn find(&self, component: Component) -> Result<usize, usize> {
        self.0.binary_search_by_key(&component, |entry| entry.0)
    }
}
