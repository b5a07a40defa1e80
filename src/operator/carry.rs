//! [`Carry`]: what the messages of an operator's run brought with them, and what those that it sends take along.
//!
//! Shared by an operator and its ports. Where no message ever had any, a run costs two looks at a flag.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use crate::{
    error::Result,
    hub::{MergePolicy, Metadata, baggage::Load},
    sync::lock,
};

/// The load of one operator's present run.
#[derive(Debug, Default)]
pub(crate) struct Carry {
    policy: MergePolicy,
    any: AtomicBool,
    /// A run is under way; otherwise each message that is taken begins anew.
    running: AtomicBool,
    load: Mutex<Load>,
}

impl Carry {
    pub(crate) fn new(policy: MergePolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    pub(super) fn policy(&self) -> MergePolicy {
        self.policy
    }

    #[inline]
    fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// A run begins.
    #[inline]
    pub(crate) fn begin(&self) {
        self.running.store(true, Ordering::Relaxed);
        if self.any() {
            self.clear();
        }
    }

    /// A run has ended.
    #[inline]
    pub(crate) fn end(&self) {
        self.running.store(false, Ordering::Relaxed);
    }

    #[cold]
    fn clear(&self) {
        *lock(&self.load) = Load::default();
        self.any.store(false, Ordering::Relaxed);
    }

    /// A message was taken; `load` came with it.
    #[inline]
    pub(super) fn receive(&self, load: Option<Load>) -> Result<()> {
        if self.any() && !self.running.load(Ordering::Relaxed) {
            self.clear();
        }
        match load {
            None => Ok(()),
            Some(load) => self.merge(load),
        }
    }

    #[cold]
    fn merge(&self, new: Load) -> Result<()> {
        let mut load = lock(&self.load);
        load.metadata.merge(&new.metadata, self.policy)?;
        self.any.store(!load.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// For a message that is sent.
    #[inline]
    pub(super) fn load(&self) -> Option<Load> {
        if self.any() { Some(lock(&self.load).clone()) } else { None }
    }

    pub(super) fn metadata(&self) -> Metadata {
        lock(&self.load).metadata.clone()
    }

    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Metadata) -> R) -> R {
        let mut load = lock(&self.load);
        let changed = change(&mut load.metadata);
        self.any.store(!load.is_empty(), Ordering::Relaxed);
        changed
    }
}
