//! Vector clocks: how much of each stream something is known to come after.
//!
//! A component is one stream of one device, numbered for good, so that a handle which the driver uses again is another
//! component. A clock is a lower bound: an entry that is missing says nothing. Most clocks have an entry or two, because
//! what the host has seen is left out of them (see [`universe`](mod@super::universe)).

use smallvec::SmallVec;

/// A stream, numbered for good.
pub(super) type Component = u64;

/// For each component, how many of its calls are known to be before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock(SmallVec<[(Component, u64); 4]>);

impl Clock {
    /// True if the component's call `tick` comes before.
    pub(super) fn knows(&self, component: Component, tick: u64) -> bool {
        self.find(component).is_ok_and(|at| self.0[at].1 >= tick)
    }

    /// From now on, the component's call `tick` comes before.
    pub(super) fn learn(&mut self, component: Component, tick: u64) {
        match self.find(component) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(tick),
            Err(at) => self.0.insert(at, (component, tick)),
        }
    }

    /// From now on, all that `other` knows of the components in `which` comes before.
    pub(super) fn merge(&mut self, other: &Clock, which: impl Fn(Component, u64) -> bool) {
        for (component, tick) in &other.0 {
            if which(*component, *tick) {
                self.learn(*component, *tick);
            }
        }
    }

    /// Keeps the entries that `which` says.
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
