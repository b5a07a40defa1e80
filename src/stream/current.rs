//! The current stream: for functions that are not handed one.
//!
//! A scope sets it, for a closure or for a future; scopes nest, and the inner one counts. A future takes its stream
//! along, to whatever thread it is polled on; a task that it spawns has none.

use super::Stream;

tokio::task_local! {
    static CURRENT: Stream;
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
        CURRENT.sync_scope(self.clone(), function)
    }

    /// Runs a future with this as the [current](Self::current) stream.
    ///
    /// # Cancel safety
    /// That of the future.
    pub async fn scoped<F: Future>(&self, future: F) -> F::Output {
        CURRENT.scope(self.clone(), future).await
    }

    /// The stream of the innermost scope around this call. An operator's own is not set by itself: write
    /// `cx.stream()?.clone().scope(..)`.
    pub fn current() -> Option<Stream> {
        CURRENT.try_with(Stream::clone).ok()
    }
}
