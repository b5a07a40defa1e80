//! [`ChunkState`]: what a flow sees of a hub of chunks.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use super::{Core, Inner, place_name};
use crate::{
    device::Device,
    hub::{
        abroad::Lender,
        chunks::{
            roles::{LinkName, Role},
            state::LinkId,
        },
        link::Holders,
    },
    memory::Plain,
    stream::{Stream, Ticket},
    sync::lock,
};

/// What a flow sees of a hub of chunks, whatever is in them.
pub(crate) trait ChunkState: fmt::Debug + Send + Sync {
    fn name(&self) -> &Arc<str>;
    /// Chunks that are to be consumed, and were not.
    fn queued(&self) -> usize;
    /// Chunks produced, and consumed.
    fn counts(&self) -> (u64, u64);
    /// Links that do this, here or elsewhere.
    fn links_that(&self, role: Role) -> usize;
    fn is_empty(&self) -> bool;
    fn envelopes_at(&self, device: &Device) -> usize;
    /// Chunks that it has places for, and envelopes wherever they are.
    fn most(&self) -> (usize, usize);
    /// Something can come to lie there without a copy.
    fn may_lie_at(&self, device: &Device) -> bool;
    /// One of its devices that nothing can be copied to from this one.
    fn misfit(&self, device: &Device) -> Option<String>;
    /// Whom data flows to, if it was said.
    fn flow(&self) -> Vec<LinkName>;
    /// The copies that were enqueued last.
    fn last_copies(&self) -> Vec<Ticket>;
    /// What a link waits for, if it waits.
    fn lacks(&self, link: LinkId, holders: &dyn Holders) -> Option<Lack>;
    /// A flow with links here begins, and ends.
    fn join(&self, flow: &Arc<dyn Lender>);
    fn leave(&self, flow: &Arc<dyn Lender>);
}

/// What a link waits for, in words.
#[derive(Debug)]
pub(crate) enum Lack {
    /// A chunk, which may not come.
    Chunk(String),
    /// Room, or an envelope: something is there that cannot go on.
    Room(String),
}

impl<T: Plain, S: Clone + Send + Sync + 'static> ChunkState for Core<T, S> {
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

    fn links_that(&self, role: Role) -> usize {
        lock(&self.inner).state.links_that(role)
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

    fn may_lie_at(&self, device: &Device) -> bool {
        let Inner { state, places } = &*lock(&self.inner);
        places.find(device).is_some_and(|place| state.may_lie_at(place))
    }

    fn misfit(&self, device: &Device) -> Option<String> {
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

    fn lacks(&self, link: LinkId, holders: &dyn Holders) -> Option<Lack> {
        let name = &self.name;
        let (place, pool) = {
            let Inner { state, places } = &*lock(&self.inner);
            let (role, at) = state.waits_at(link)?;
            let place = places.all.get(at)?;
            let on = place_name(&place.device);
            if state.may_go(link, places) {
                // It waits for something else.
                return None;
            }
            if role == Role::Produce && !state.has_room() {
                let directed = if state.flow().is_some() { ", and `flow_to` says whom chunks go to" } else { "" };
                return Some(Lack::Room(format!("room in hub `{name}`: all of its places are taken{directed}")));
            }
            if role != Role::Produce && !state.lacks_envelope(link) {
                return Some(Lack::Chunk(match state.next_number(link) {
                    Some(number) => format!("chunk {number} of hub `{name}` on {on}: others have it first"),
                    None if state.is_left_out(link) => {
                        format!("a chunk of hub `{name}` on {on}: `flow_to` says that they go to others alone")
                    }
                    None => format!("a chunk of hub `{name}` on {on}"),
                }));
            }
            (format!("a blank envelope of hub `{name}` on {on}"), place.pool.clone())
        };
        // The lock of no hub is held: it asks them.
        let whereabouts = pool.map_or_else(|| "it has none".to_string(), |pool| pool.whereabouts(holders));
        Some(Lack::Room(format!("{place}: {whereabouts}")))
    }

    fn join(&self, flow: &Arc<dyn Lender>) {
        self.join(flow);
    }

    fn leave(&self, flow: &Arc<dyn Lender>) {
        self.leave(flow);
    }
}
