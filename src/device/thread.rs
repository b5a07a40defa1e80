//! [`DeviceThread`]: marks a thread that a device, or its completion monitor, depends on.
//!
//! Wakers and host functions run on the thread that finds out that work has completed: a worker of an emulated device,
//! the GPU driver's callback thread, or the completion monitor's thread. A call that waits for a device on such a
//! thread might wait for work that only this thread can do, or delay the timers and scans of all streams. So a call
//! that would wait returns an error there.

use std::{cell::Cell, marker::PhantomData, thread};

use crate::error::{Error, ErrorKind, Result};

thread_local! {
    /// It has no destructor, so it is usable in destructors that run when the thread ends.
    static IS_DEVICE_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// While a guard lives, its thread counts as a device's thread. Guards nest.
#[must_use]
pub(crate) struct DeviceThread {
    before: bool,
    _of_thread: PhantomData<*mut ()>,
}

impl DeviceThread {
    pub(crate) fn enter() -> Self {
        Self { before: IS_DEVICE_THREAD.replace(true), _of_thread: PhantomData }
    }

    pub(crate) fn is_current() -> bool {
        IS_DEVICE_THREAD.get()
    }

    /// Returns an error on a device's thread. Check this before a call waits for a device. `what` describes the wait.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage).
    #[inline]
    pub(crate) fn may_wait(what: impl FnOnce() -> String) -> Result<()> {
        if Self::is_current() { Err(Self::would_wait_error(&what())) } else { Ok(()) }
    }

    #[cold]
    fn would_wait_error(what: &str) -> Error {
        let thread = thread::current();
        let text = format!(
            "{what} on thread `{}`, which calls the device's wakers and host functions: a call that waits on it can \
             deadlock or delay others; let the waker wake a task of a runtime, and make this call from that task",
            thread.name().unwrap_or("without a name")
        );
        Error::new(ErrorKind::Usage, text)
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        IS_DEVICE_THREAD.set(self.before);
    }
}
