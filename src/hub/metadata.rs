//! [`Metadata`]: named values that travel with messages.

use std::{any::Any, borrow::Cow, collections::BTreeMap, fmt, sync::Arc};

use crate::{
    error::{Error, ErrorKind, Result},
    sync::DiscardOnDrop,
};

/// Named values of any type that travel beside a message: a frame's number, the time of its capture, the user who
/// asked for it. They are passed on to the messages that an operator makes of it; see
/// [`Cx::metadata`](crate::Cx::metadata).
///
/// ```
/// use wakeline::hub::Metadata;
///
/// let mut metadata = Metadata::default();
/// metadata.insert("frame", 7_u64);
/// assert_eq!(metadata.get::<u64>("frame"), Some(&7));
/// assert_eq!(metadata.get::<u32>("frame"), None);     // of another type
/// ```
///
/// A clone is one more reference to the same values.
#[derive(Clone, Default)]
pub struct Metadata(Option<Arc<BTreeMap<Cow<'static, str>, Value>>>);

/// A [`DiscardOnDrop`] user value. Several values share one map, which drops them together; a value may itself be
/// metadata that contains metadata.
pub(crate) type Value = Arc<dyn Any + Send + Sync>;

/// What to do when an operator takes two messages that both have a value of the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MergePolicy {
    /// Keep the value of the later message. Holoscan's `kUpdate`.
    #[default]
    Update,
    /// Keep the value of the earlier message. Holoscan's `kReject`.
    Reject,
    /// Fail when the message is taken. The message is dropped, with all messages that were taken by the same call.
    /// Holoscan's `kRaise`.
    Raise,
}

impl Metadata {
    /// Returns the value of this name if there is one and it is a `T`.
    pub fn get<T: Send + Sync + 'static>(&self, name: &str) -> Option<&T> {
        self.0.as_ref()?.get(name)?.downcast_ref::<DiscardOnDrop<T>>()?.get()
    }

    /// Sets a value and replaces a former one of the same name.
    pub fn insert<T: Send + Sync + 'static>(&mut self, name: impl Into<Cow<'static, str>>, value: T) {
        drop(self.replace(name.into(), Self::value(value)));
    }

    /// Wraps a value for [`replace`](Self::replace).
    pub(crate) fn value<T: Send + Sync + 'static>(value: T) -> Value {
        Arc::new(DiscardOnDrop::new(value))
    }

    /// Like `insert`, but returns the replaced value, for the caller to drop with no lock held.
    pub(crate) fn replace(&mut self, name: Cow<'static, str>, value: Value) -> Option<Value> {
        Arc::make_mut(self.0.get_or_insert_default()).insert(name, value)
    }

    /// Like `remove`, but returns the value, for the caller to drop with no lock held.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        Arc::make_mut(self.0.as_mut()?).remove(name)
    }

    /// Removes a value. Returns true if there was one.
    pub fn remove(&mut self, name: &str) -> bool {
        self.take(name).is_some()
    }

    /// The names, in sorted order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|values| values.keys()).map(|name| &**name)
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |values| values.len())
    }

    /// Returns true if there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Merges the metadata of a later message into this.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) under [`MergePolicy::Raise`] if both have a value of the same name; then nothing
    /// changes.
    pub fn merge(&mut self, later: &Self, policy: MergePolicy) -> Result<()> {
        self.merge_and_replace(later, policy).map(drop)
    }

    /// Like `merge`, but returns the replaced values, for the caller to drop with no lock held.
    pub(crate) fn merge_and_replace(&mut self, later: &Self, policy: MergePolicy) -> Result<Vec<Value>> {
        let mut replaced = Vec::new();
        let Some(new) = later.0.as_ref().filter(|values| !values.is_empty()) else { return Ok(replaced) };
        let Some(values) = self.0.as_mut().filter(|values| !values.is_empty()) else {
            self.0 = Some(new.clone());
            return Ok(replaced);
        };
        if Arc::ptr_eq(values, new) && policy != MergePolicy::Raise {
            return Ok(replaced);
        }
        if policy == MergePolicy::Raise
            && let Some(name) = new.keys().find(|name| values.contains_key(*name))
        {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "two messages of one run have metadata `{name}`: take one a run, remove it from one of them, or choose \
                     another `MergePolicy`"
                ),
            ));
        }
        let values = Arc::make_mut(values);
        for (name, value) in &**new {
            if policy == MergePolicy::Update || !values.contains_key(name) {
                replaced.extend(values.insert(name.clone(), value.clone()));
            }
        }
        Ok(replaced)
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[(&'static str, u32)]) -> Metadata {
        let mut metadata = Metadata::default();
        values.iter().for_each(|(name, value)| metadata.insert(*name, *value));
        metadata
    }

    #[test]
    fn each_policy_merges_in_its_own_way() {
        let (first, later) = (of(&[("a", 1), ("b", 1)]), of(&[("b", 2), ("c", 2)]));
        for (policy, b) in [(MergePolicy::Update, 2), (MergePolicy::Reject, 1)] {
            let mut both = first.clone();
            both.merge(&later, policy).unwrap();
            assert_eq!(both.names().collect::<Vec<_>>(), ["a", "b", "c"]);
            assert_eq!(both.get::<u32>("b"), Some(&b), "{policy:?}");
        }
        let mut both = first.clone();
        let error = both.merge(&later, MergePolicy::Raise).unwrap_err();
        assert!(error.to_string().contains("`b`"), "{error}");
        assert_eq!(both.len(), 2);
        both.merge(&of(&[("c", 2)]), MergePolicy::Raise).unwrap();
        assert_eq!(both.len(), 3);
    }

    #[test]
    fn a_clone_is_not_changed_by_the_other() {
        let first = of(&[("a", 1)]);
        let mut second = first.clone();
        second.insert("a", 2_u32);
        assert!(second.remove("a") && !second.remove("a"));
        assert_eq!(first.get::<u32>("a"), Some(&1));
        assert!(second.is_empty());
    }
}
