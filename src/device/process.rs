//! The process that owns the devices: no device works in a fork of it.
//!
//! A fork copies the memory of a process and one of its threads. The driver refuses to work in the child, and the
//! threads of an emulated device do not exist there, so waiting for them would never end. Opening the first device
//! therefore records the process id, and calls in another process fail.
//!
//! The check costs a system call, `getpid` (0.5 us in the container that this was built in). It is made where a device
//! is opened, a stream is created or memory comes from the driver, and where a wait does not end immediately, but not
//! at enqueues.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// The process in which the first device was opened; 0 before that.
static OPENED_IN: AtomicU32 = AtomicU32::new(0);

/// Records that a device is opened in this process.
///
/// # Errors
/// [`DeviceLost`](ErrorKind::DeviceLost) if one was opened before this process was forked.
pub(super) fn enter() -> Result<()> {
    let process = std::process::id();
    match OPENED_IN.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => Ok(()),
        Err(opened_in) if opened_in == process => Ok(()),
        Err(opened_in) => Err(forked(opened_in)),
    }
}

/// Checks that this process is the one in which devices were opened.
///
/// # Errors
/// [`DeviceLost`](ErrorKind::DeviceLost) in a fork of it.
pub(super) fn check() -> Result<()> {
    match OPENED_IN.load(Ordering::Relaxed) {
        0 => Ok(()),
        opened_in if opened_in == std::process::id() => Ok(()),
        opened_in => Err(forked(opened_in)),
    }
}

pub(super) fn is_fork() -> bool {
    check().is_err()
}

#[cold]
fn forked(opened_in: u32) -> Error {
    let text = format!(
        "process {} was forked from process {opened_in} after that process had opened a device, and devices do not \
         work in a fork: open devices only after the fork, or start the child as a separate program \
         (`std::process::Command`)",
        std::process::id()
    );
    Error::new(ErrorKind::DeviceLost, text)
}
