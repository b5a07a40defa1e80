//! [`relocate`]: copies the envelopes of a message to memory of their own, which belongs to no hub.
//!
//! A hub copies to envelopes of one size that it has allocated beforehand. Here each copy gets memory of the size of its
//! original, so that no size has to be known: for messages that are written and read by hand.

use std::sync::Weak;

use super::{Message, pool::RawEnvelope};
use crate::{
    device::Device,
    error::{Error, Result},
    memory::{HostAccess, Memory, transfer},
    stream::Stream,
};

/// The envelopes to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relocated {
    /// Those that are elsewhere.
    Others,
    All,
}

/// Copies envelopes of the message to `to`; the originals return to their hubs. `stream`: a stream on a device, for its
/// copies. The copies are enqueued. A copy from host to host is made at once, when its data is there.
///
/// # Errors
/// [`OutOfMemory`](crate::ErrorKind::OutOfMemory); [`Usage`](crate::ErrorKind::Usage) if there is no copy path between
/// two devices; [`DeviceLost`](crate::ErrorKind::DeviceLost).
pub(crate) async fn relocate<M: Message>(
    message: &mut M,
    which: Relocated,
    to: &Device,
    stream: Option<&Stream>,
) -> Result<()> {
    if !M::CARRIES_ENVELOPES {
        return Ok(());
    }
    let mut done = 0;
    while let Some(access) = relocate_available(message, which, to, stream, &mut done)? {
        access.wait().await?;
    }
    Ok(())
}

/// Relocates envelopes, from number `done` on, up to the first whose data is not there yet.
fn relocate_available<M: Message>(
    message: &mut M,
    which: Relocated,
    to: &Device,
    stream: Option<&Stream>,
    done: &mut usize,
) -> Result<Option<HostAccess>> {
    let (mut number, mut pending, mut failed) = (0, None, None::<Error>);
    // Dropped after the visit: an envelope that returns to its hub wakes others.
    let mut originals = Vec::new();
    message.envelopes(&mut |envelope| {
        number += 1;
        if number <= *done || pending.is_some() || failed.is_some() {
            return;
        }
        if which == Relocated::All || !envelope.memory().is_at(to) {
            match copy_of(envelope, to, stream) {
                Ok(Ok(copy)) => originals.push(std::mem::replace(envelope, copy)),
                Ok(Err(access)) => return pending = Some(access),
                Err(error) => return failed = Some(error),
            }
        }
        *done = number;
    });
    drop(originals);
    failed.map_or(Ok(pending), Err)
}

/// A copy on `to`, or what it has to wait for.
fn copy_of(from: &RawEnvelope, to: &Device, stream: Option<&Stream>) -> Result<Result<RawEnvelope, HostAccess>> {
    let (source, valid) = (from.memory(), from.bytes());
    let capacity = source.bytes().max(1);
    let memory = if source.is_host() && to.is_host() {
        if !source.state()?.is_available() {
            return Ok(Err(source.host_access(false)));
        }
        let mut memory = Memory::pinned(source.device(), capacity)?;
        memory.host_slice_mut()?[..valid].copy_from_slice(&source.host_slice()?[..valid]);
        memory
    } else {
        let device = if to.is_host() { source.device() } else { to };
        let own = match stream {
            Some(stream) if stream.device() == device => stream.clone(),
            _ => Stream::named(device, "copies of a message")?,
        };
        let mut memory =
            if to.is_host() { Memory::pinned_for(&own, capacity)? } else { Memory::on_for(&own, capacity)? };
        transfer::copy(&own, source, &mut memory, valid)?;
        memory
    };
    let mut copy = RawEnvelope::new(memory, Weak::new());
    copy.set_bytes(valid);
    Ok(Ok(copy))
}
