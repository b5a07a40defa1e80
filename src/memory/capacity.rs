//! Whether an amount of memory can ever be available: checked before many pieces are allocated one by one.

use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
};

/// The largest number of pieces of one allocator, or of one hub at one place: each is an allocation of the driver.
const MOST_PIECES: usize = 1 << 20;

/// The least that a piece takes.
const LEAST_BYTES: u64 = crate::device::backend::MOST_ALIGNMENT as u64;

/// For less than this, the host's memory size is not queried.
const SMALL: u64 = 1 << 30;

/// Returns an error if `count` pieces of `bytes` bytes can never be available: in the memory of `device` or, with
/// `host`, in host memory.
///
/// The free memory at present does not matter: other users may free some.
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
    // The memory of an emulated device is host memory.
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

/// The size of host memory, if `wanted` is large enough for it to matter and the system reports it.
fn host_bytes(wanted: u64) -> Option<u64> {
    if wanted < SMALL { None } else { crate::device::host_memory() }
}
