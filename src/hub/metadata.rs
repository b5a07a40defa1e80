//! [`Metadata`]: named values that travel with messages.

use std::{any::Any, borrow::Cow, collections::BTreeMap, fmt, sync::Arc};

use crate::{
    error::{Error, ErrorKind, Result},
    sync::Discarded,
};

/// Named values of any type beside a message: a frame's number, when it was taken, who asked for it. They go on with
/// whatever an operator makes of the message; see [`Cx::metadata`](crate::Cx::metadata).
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

/// A [`Discarded`] value of the user's. Several lie in one map, which drops them together; one may be other metadata, with
/// metadata in it.
pub(crate) type Value = Arc<dyn Any + Send + Sync>;

/// What happens where an operator takes two messages, both with a value of one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MergePolicy {
    /// The value of the later message counts. Holoscan's `kUpdate`.
    #[default]
    Update,
    /// The value of the earlier message counts. Holoscan's `kReject`.
    Reject,
    /// Taking the message is an error, and the message is dropped, with those that were taken in one call with it.
    /// Holoscan's `kRaise`.
    Raise,
}

impl Metadata {
    /// The value of that name, if there is one and it is a `T`.
    pub fn get<T: Send + Sync + 'static>(&self, name: &str) -> Option<&T> {
        self.0.as_ref()?.get(name)?.downcast_ref::<Discarded<T>>()?.get()
    }

    /// Sets a value. What was there under that name is replaced.
    pub fn insert<T: Send + Sync + 'static>(&mut self, name: impl Into<Cow<'static, str>>, value: T) {
        drop(self.replace(name.into(), Self::value(value)));
    }

    /// A value, as [`replace`](Self::replace) takes it.
    pub(crate) fn value<T: Send + Sync + 'static>(value: T) -> Value {
        Arc::new(Discarded::new(value))
    }

    /// As `insert`. The value replaced is the caller's, to drop with no lock held.
    pub(crate) fn replace(&mut self, name: Cow<'static, str>, value: Value) -> Option<Value> {
        Arc::make_mut(self.0.get_or_insert_default()).insert(name, value)
    }

    /// As `remove`. The value is the caller's, to drop with no lock held.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        Arc::make_mut(self.0.as_mut()?).remove(name)
    }

    /// Takes a value away. True if there was one.
    pub fn remove(&mut self, name: &str) -> bool {
        self.take(name).is_some()
    }

    /// The names, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|values| values.keys()).map(|name| &**name)
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |values| values.len())
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes in what came with a later message.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) under [`MergePolicy::Raise`], if both have a value of one name; nothing is changed then.
    pub fn merge(&mut self, later: &Self, policy: MergePolicy) -> Result<()> {
        self.merge_and_replace(later, policy).map(drop)
    }

    /// As `merge`. The values replaced are the caller's, to drop with no lock held.
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
