//! Owned memory, and its return when it is dropped.

use std::{
    fmt,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
};

use super::{Memory, Origin};
use crate::sync::lock;

/// An owned piece of memory. When dropped, it is returned to where it came from.
///
/// It is one pointer. The same box goes to the free list of its heap, with its last uses, and comes back from there, so
/// that reuse needs no host allocation either.
pub(crate) struct Owned(ManuallyDrop<Box<Memory>>);

impl Owned {
    #[inline]
    pub(super) fn new(memory: Box<Memory>) -> Self {
        Self(ManuallyDrop::new(memory))
    }
}

impl Deref for Owned {
    type Target = Memory;

    #[inline]
    fn deref(&self) -> &Memory {
        &self.0
    }
}

impl DerefMut for Owned {
    #[inline]
    fn deref_mut(&mut self) -> &mut Memory {
        &mut self.0
    }
}

impl Drop for Owned {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: taken only here, and the value is not used after its drop.
        let memory = unsafe { ManuallyDrop::take(&mut self.0) };
        memory.give_back();
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl Memory {
    /// Called when its owner is dropped. Never blocks.
    pub(super) fn give_back(mut self: Box<Self>) {
        if self.account.is_some() {
            self.discount();
        }
        if self.is_staged() && !matches!(self.origin, Origin::User(_)) {
            self.forget_arrivals();
        }
        if self.shared_uses.get().is_some() || matches!(self.origin, Origin::Graph { .. }) {
            match self.unless_kept() {
                Some(memory) => self = memory,
                None => return,
            }
        }
        match &self.origin {
            Origin::Heap(_) => self.go_back(),
            Origin::Ordered { .. } => self.go_back_in_order(),
            Origin::User(_) => (*self).give_back_to_user(),
            Origin::Graph { .. } | Origin::Node | Origin::Detached => {}
        }
    }

    /// Removes it from its account.
    #[cold]
    fn discount(&mut self) {
        let Some(account) = self.account.take() else { return };
        account.give_back(self.bytes as u64);
        if let Some(heap) = self.origin.heap() {
            lock(&heap.state).disown(account.flow(), self.bytes as u64);
        }
    }

    #[cold]
    fn give_back_to_user(self) {
        let Self { device, home, bytes, uses, staging, origin, .. } = self;
        if let Origin::User(mut user) = origin {
            let uses = uses.into_inner();
            user.give_back(&device, home, bytes, uses, staging);
        }
    }
}
