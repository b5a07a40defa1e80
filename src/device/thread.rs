//! [`DeviceThread`]: a thread that a device, or its lookout, cannot go on without.
//!
//! Wakers and host functions run where the end of work is found: on a worker of an emulated device, on the thread on which a
//! GPU's driver makes its callbacks, on the lookout's thread. A call there that waits for a device may wait for what only this
//! thread does, or holds up the alarms and scans of all others. So no call of the crate waits there: where another thread would
//! wait, it is an error.

use std::{cell::Cell, marker::PhantomData, thread};

use crate::error::{Error, ErrorKind, Result};

thread_local! {
    /// No destructor: it is there for destructors that run at the thread's end.
    static IS_ONE: Cell<bool> = const { Cell::new(false) };
}

/// While one of these lives, its thread is a device's. They nest.
#[must_use]
pub(crate) struct DeviceThread {
    before: bool,
    _of_thread: PhantomData<*mut ()>,
}

impl DeviceThread {
    pub(crate) fn enter() -> Self {
        Self { before: IS_ONE.replace(true), _of_thread: PhantomData }
    }

    pub(crate) fn is_one() -> bool {
        IS_ONE.get()
    }

    /// An error on a device's thread. `what` says what the call would wait for. To be asked before a call waits for a device.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage).
    #[inline]
    pub(crate) fn may_wait(what: impl FnOnce() -> String) -> Result<()> {
        if Self::is_one() { Err(Self::may_not(&what())) } else { Ok(()) }
    }

    #[cold]
    fn may_not(what: &str) -> Error {
        let thread = thread::current();
        let text = format!(
            "{what} on thread `{}`, on which a device calls wakers and host functions: a call that waits there may wait for \
             itself, or holds up others; let the waker wake a task of a runtime, and call this from that task",
            thread.name().unwrap_or("without a name")
        );
        Error::new(ErrorKind::Usage, text)
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        IS_ONE.set(self.before);
    }
}
