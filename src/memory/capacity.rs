//! Whether so much memory can ever be there: asked before many pieces are taken one by one.

use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
};

/// Pieces that one allocator reserves, or one hub has at one place, at most: each is an allocation of the driver's.
const MOST_PIECES: usize = 1 << 20;

/// What a piece takes at least.
const LEAST_BYTES: u64 = crate::device::backend::MOST_ALIGNMENT as u64;

/// Below this a host is not asked how much it has.
const SMALL: u64 = 1 << 30;

/// An error if `count` pieces of `bytes` bytes can never be there: in the memory of `device`, or, for `host`, in the host's.
///
/// What is there now is not looked at: others may give some back.
///
/// # Errors
/// [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers.
pub(crate) fn can_hold(device: &Device, host: bool, bytes: u64, count: usize) -> Result<()> {
    let refuse = |text: String| Err(Error::new(ErrorKind::OutOfMemory, text));
    if count > MOST_PIECES {
        return refuse(format!(
            "asked for {count} pieces of {bytes} bytes: at most {MOST_PIECES}; ask for fewer that are larger"
        ));
    }
    let all = bytes.max(LEAST_BYTES).checked_mul(count as u64);
    let on_device = if host { None } else { device.backend().memory().ok().map(|info| info.total) };
    // The memory of an emulated device is the host's.
    let on_host = if host || device.is_emulated() { host_bytes(all.unwrap_or(u64::MAX)) } else { None };
    let most = on_device.into_iter().chain(on_host).min().unwrap_or(u64::MAX);
    match all {
        Some(all) if all <= most => Ok(()),
        _ => {
            let place = if host { "the host" } else { device.name() };
            refuse(format!(
                "asked for {count} pieces of {bytes} bytes (each takes {LEAST_BYTES} at least), and {place} never has more \
                 than {most}: ask for less"
            ))
        }
    }
}

/// The host's memory, where `wanted` is a large part of what a host has and the system says how much that is.
fn host_bytes(wanted: u64) -> Option<u64> {
    if wanted < SMALL { None } else { crate::device::host_memory() }
}
