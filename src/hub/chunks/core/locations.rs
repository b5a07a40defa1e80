//! [`HubLocations`]: the locations of a chunk hub, with the pools of their envelopes.

use std::sync::{Arc, OnceLock};

use super::super::state::{Blanks, LocationId};
use crate::{
    device::Device,
    error::{Error, Result},
    hub::{envelope::Envelope, pool::Pool},
    memory::Plain,
};

/// An envelope, which peeking links share.
pub(super) type Envelopes<T> = Arc<Envelope<T>>;

/// The locations of a hub, by their numbers.
pub(super) struct HubLocations<T> {
    pub(super) all: Vec<HubLocation>,
    /// The error of the first copy that failed because a device was lost.
    pub(super) lost: OnceLock<Error>,
    of: std::marker::PhantomData<fn() -> T>,
}

/// The host or a device, and the pool of the hub's envelopes there, if it has any.
pub(super) struct HubLocation {
    pub(super) device: Device,
    pub(super) pool: Option<Arc<Pool>>,
    /// Whether the hub is registered for a notification of the device's loss.
    pub(super) loss_registered: bool,
}

/// The builder call that adds envelopes on that device.
pub(crate) fn makes_envelopes(device: &Device) -> &'static str {
    if device.is_host() { "host_envelopes(2)" } else { "envelopes(&device, 2)" }
}

/// For example `the host` or `cuda:0`.
pub(crate) fn place_name(device: &Device) -> &str {
    if device.is_host() { "the host" } else { device.name() }
}

impl<T: Plain> HubLocations<T> {
    pub(super) fn new() -> Self {
        Self { all: Vec::new(), lost: OnceLock::new(), of: std::marker::PhantomData }
    }

    /// The number of a place; assigns a new one if it has none.
    pub(super) fn number(&mut self, device: &Device) -> LocationId {
        self.find(device).unwrap_or_else(|| {
            self.all.push(HubLocation { device: device.clone(), pool: None, loss_registered: false });
            self.all.len() - 1
        })
    }

    pub(super) fn find(&self, device: &Device) -> Option<LocationId> {
        self.all.iter().position(|place| place.device == *device)
    }

    /// The device that host memory is page-locked for: one that is not lost, if there is one.
    pub(super) fn healthy_device(&self) -> Option<&Device> {
        self.all.iter().map(|place| &place.device).find(|device| !device.is_host() && !device.is_lost())
    }

    pub(super) fn count(&self, place: LocationId) -> usize {
        self.all.get(place).and_then(|place| place.pool.as_ref()).map_or(0, |pool| pool.count())
    }
}

impl<T: Plain> Blanks<Envelopes<T>> for HubLocations<T> {
    fn take(&mut self, place: LocationId) -> Option<Envelopes<T>> {
        let pool = self.all.get(place)?.pool.as_ref()?;
        pool.take().ok()?.map(|raw| Arc::new(Envelope::of_raw(raw)))
    }

    fn count(&self, place: LocationId) -> usize {
        self.all.get(place).and_then(|place| place.pool.as_ref()).map_or(0, |pool| pool.idle())
    }

    fn total(&self, place: LocationId) -> usize {
        Self::count(self, place)
    }

    fn places(&self) -> usize {
        self.all.len()
    }

    fn is_own(&self, place: LocationId, envelope: &Envelopes<T>) -> bool {
        let pool = self.all.get(place).and_then(|place| place.pool.as_ref());
        pool.is_some_and(|pool| std::ptr::eq(envelope.raw().pool().as_ptr(), Arc::as_ptr(pool)))
    }

    fn has_failed(&self, envelope: &Envelopes<T>) -> bool {
        let failed = Device::any_is_lost().then(|| envelope.raw().memory().check_contents()).and_then(Result::err);
        let has_failed = failed.is_some();
        // Only the first one is kept.
        failed.into_iter().for_each(|error| _ = self.lost.set(error));
        has_failed
    }
}
