//! The current stream, for functions that do not get a stream as an argument.
//!
//! A scope sets the current stream for a closure or for a future. Scopes nest, and the innermost applies. A future
//! keeps its current stream on every thread that polls it; a task that it spawns has none.

use std::{
    cell::RefCell,
    future::poll_fn,
    mem::ManuallyDrop,
    pin::{Pin, pin},
};

use super::Stream;

thread_local! {
    /// `ManuallyDrop`: without a destructor it stays usable while the thread's other locals are destroyed, whose
    /// destructors use streams (tokio's `task_local!` panics there, which aborts the process). [`Scope`] empties it.
    static CURRENT: ManuallyDrop<RefCell<Option<Stream>>> = const { ManuallyDrop::new(RefCell::new(None)) };
}

/// A guard that sets the current stream until it is dropped.
struct Scope(Option<Stream>);

impl Scope {
    fn enter(stream: &Stream) -> Self {
        let stream = stream.clone();
        Self(CURRENT.try_with(|current| current.replace(Some(stream))).unwrap_or_default())
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let before = self.0.take();
        let left = CURRENT.try_with(|current| current.replace(before));
        drop(left);
    }
}

/// A future that is polled and dropped within the stream's scope.
struct Scoped<'a, F> {
    stream: &'a Stream,
    future: Pin<&'a mut Option<F>>,
}

impl<F> Drop for Scoped<'_, F> {
    fn drop(&mut self) {
        let _scope = Scope::enter(self.stream);
        self.future.set(None);
    }
}

impl Stream {
    /// Runs a function with this as the [current](Self::current) stream.
    ///
    /// ```
    /// use wakeline::{Buffer, Result, Stream, device::{Device, Emulated}};
    ///
    /// fn clear(buffer: &mut Buffer<u32>) -> Result<()> {
    ///     Stream::current().expect("a scope around it").fill(buffer, 0)
    /// }
    ///
    /// let device = Device::emulated(Emulated::new());
    /// let stream = Stream::new(&device)?;
    /// let mut buffer = Buffer::new(&device, 8)?;
    /// stream.scope(|| clear(&mut buffer))?;
    /// assert_eq!(Stream::current(), None);
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    pub fn scope<R>(&self, function: impl FnOnce() -> R) -> R {
        let _scope = Scope::enter(self);
        function()
    }

    /// Runs a future with this as the [current](Self::current) stream.
    ///
    /// # Cancel safety
    /// The same as that of the future.
    pub async fn scoped<F: Future>(&self, future: F) -> F::Output {
        let future = pin!(Some(future));
        let mut scoped = Scoped { stream: self, future };
        poll_fn(|cx| {
            let _scope = Scope::enter(self);
            match scoped.future.as_mut().as_pin_mut() {
                Some(future) => future.poll(cx),
                // Only the drop takes the future out.
                None => std::task::Poll::Pending,
            }
        })
        .await
    }

    /// The stream of the innermost scope around this call. An operator's own stream is not set automatically: write
    /// `cx.stream()?.clone().scope(..)`.
    pub fn current() -> Option<Stream> {
        CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
    }
}
