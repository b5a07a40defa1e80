//! The process that devices belong to: none of them works in a fork of it.
//!
//! A fork copies the memory of a process and one of its threads. The driver refuses to work in the child, and the threads of
//! an emulated device are not there: what waits for them would wait for ever. So the first device that is opened notes the
//! process, and who finds itself in another one gets an error.
//!
//! A look costs a system call, `getpid` (0.5 us in the container that this was built in). So it is made where a device is
//! opened or a stream is made, where memory comes from the driver, and where a wait begins that the device does not end at
//! once; no enqueue pays for it.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// The process in which the first device was opened; 0 before that.
static OPENED_IN: AtomicU32 = AtomicU32::new(0);

/// A device is opened.
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

/// An error in a fork of the process whose devices these are.
///
/// # Errors
/// [`DeviceLost`](ErrorKind::DeviceLost).
pub(super) fn check() -> Result<()> {
    match OPENED_IN.load(Ordering::Relaxed) {
        0 => Ok(()),
        opened_in if opened_in == std::process::id() => Ok(()),
        opened_in => Err(forked(opened_in)),
    }
}

/// True in a fork of the process whose devices these are.
pub(super) fn is_fork() -> bool {
    check().is_err()
}

#[cold]
fn forked(opened_in: u32) -> Error {
    let text = format!(
        "process {} was forked from process {opened_in} after that had opened a device, and devices do not work in a fork: \
         open devices after the fork alone, or start the child as a program of its own (`std::process::Command`)",
        std::process::id()
    );
    Error::new(ErrorKind::DeviceLost, text)
}
