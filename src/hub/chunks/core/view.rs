//! [`ChunkHubView`]: a flow's view of a chunk hub.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use super::{Core, Inner, place_name};
use crate::{
    device::Device,
    hub::{
        chunks::{
            roles::{LinkName, Role},
            state::LinkId,
        },
        external_guard::OutsideTracker,
        view::{EnvelopeHolders, whereabouts},
    },
    memory::Plain,
    stream::{Stream, Ticket},
    sync::lock,
};

/// A flow's view of a chunk hub, independent of the element type.
pub(crate) trait ChunkHubView: fmt::Debug + Send + Sync {
    fn name(&self) -> &Arc<str>;
    /// The number of chunks that are still to be consumed.
    fn queued(&self) -> usize;
    /// The numbers of chunks produced and consumed.
    fn counts(&self) -> (u64, u64);
    fn link_count(&self, role: Role) -> usize;
    fn is_empty(&self) -> bool;
    fn envelopes_at(&self, device: &Device) -> usize;
    /// The number of chunks that its queue has room for, and the number of its envelopes at all places.
    fn most(&self) -> (usize, usize);
    /// Whether data can get to `device` without a copy.
    fn has_source_at(&self, device: &Device) -> bool;
    /// The name of one of the hub's devices that has no copy path to `device`.
    fn device_without_copy_path(&self, device: &Device) -> Option<String>;
    /// The links that data is restricted to, if `flow_to` was called.
    fn flow(&self) -> Vec<LinkName>;
    /// The last copies that were enqueued.
    fn last_copies(&self) -> Vec<Ticket>;
    /// Describes what `link` waits for, if it waits.
    fn lacks(&self, link: LinkId, holders: &dyn EnvelopeHolders) -> Option<MissingResource>;
    /// Called when a flow with links here begins.
    fn join(&self, flow: &Arc<dyn OutsideTracker>);
    /// Called when a flow with links here ends.
    fn leave(&self, flow: &Arc<dyn OutsideTracker>);
}

/// A description of what a link waits for.
#[derive(Debug)]
pub(crate) enum MissingResource {
    /// A chunk, which may never come.
    Chunk(String),
    /// Room or an envelope: there is work that cannot make progress.
    Room(String),
}

impl<T: Plain, S: Clone + Send + Sync + 'static> ChunkHubView for Core<T, S> {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn queued(&self) -> usize {
        let inner = lock(&self.inner);
        if inner.state.consumes() { inner.state.len() } else { 0 }
    }

    fn counts(&self) -> (u64, u64) {
        (self.counts.produced.load(Ordering::Relaxed), self.counts.consumed.load(Ordering::Relaxed))
    }

    fn link_count(&self, role: Role) -> usize {
        lock(&self.inner).state.link_count(role)
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn envelopes_at(&self, device: &Device) -> usize {
        self.envelopes(device)
    }

    fn most(&self) -> (usize, usize) {
        let Inner { state, places } = &*lock(&self.inner);
        (state.capacity(), (0..places.all.len()).map(|place| places.count(place)).sum())
    }

    fn has_source_at(&self, device: &Device) -> bool {
        let Inner { state, places } = &*lock(&self.inner);
        places.find(device).is_some_and(|place| state.has_source_at(place))
    }

    fn device_without_copy_path(&self, device: &Device) -> Option<String> {
        let inner = lock(&self.inner);
        let devices = inner.places.all.iter().map(|place| &place.device);
        devices.into_iter().find(|other| !other.copies_with(device)).map(|other| other.name().to_string())
    }

    fn flow(&self) -> Vec<LinkName> {
        lock(&self.inner).state.flow().unwrap_or_default().to_vec()
    }

    fn last_copies(&self) -> Vec<Ticket> {
        lock(&self.streams).values().map(Stream::ticket).collect()
    }

    fn lacks(&self, link: LinkId, holders: &dyn EnvelopeHolders) -> Option<MissingResource> {
        let name = &self.name;
        let (place, pool) = {
            let Inner { state, places } = &*lock(&self.inner);
            let (role, at) = state.waits_at(link)?;
            let place = places.all.get(at)?;
            let on = place_name(&place.device);
            if state.may_proceed(link, places) {
                // The link waits for something else.
                return None;
            }
            if role == Role::Produce && !state.has_room() {
                let directed = if state.flow().is_some() { ", and `flow_to` restricts the flow" } else { "" };
                return Some(MissingResource::Room(format!(
                    "room in hub `{name}`: all of its places are taken{directed}"
                )));
            }
            if role != Role::Produce && !state.lacks_envelope(link) {
                return Some(MissingResource::Chunk(match state.next_number(link) {
                    Some(number) => format!("chunk {number} of hub `{name}` on {on}: other links get it first"),
                    None if state.is_excluded(link) => {
                        format!("a chunk of hub `{name}` on {on}: `flow_to` does not name this link")
                    }
                    None => format!("a chunk of hub `{name}` on {on}"),
                }));
            }
            (format!("a blank envelope of hub `{name}` on {on}"), place.pool.clone())
        };
        // No hub lock is held, since this queries the hubs.
        let whereabouts = pool.map_or_else(|| "it has none".to_string(), |pool| whereabouts(&pool, holders));
        Some(MissingResource::Room(format!("{place}: {whereabouts}")))
    }

    fn join(&self, flow: &Arc<dyn OutsideTracker>) {
        self.join(flow);
    }

    fn leave(&self, flow: &Arc<dyn OutsideTracker>) {
        self.leave(flow);
    }
}
