//! [`StreamPool`]: reusable streams of one kind.
//!
//! ```text
//!              take                              return (drop)
//!   idle ───────────────> a Stream, newly named ──────────────────> idle
//!     ^ created: in advance (reserved), or when none is idle, up to the maximum
//! ```
//!
//! A returned stream may still have work in flight: the next user's work is ordered after it, as always within a
//! stream. So a return never waits, and clones of a returned [`Stream`] stay usable; they share the stream with the
//! next user.

use std::{fmt, ops::Deref, sync::Arc};

use super::{Stream, Streams, driver_stream::DriverStream};
use crate::{
    device::{Device, backend::StreamSpec},
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    sync::{Mutex, lock},
};

/// The maximum number of streams that are created in advance. Others are created on demand.
const MAX_RESERVED: usize = 1 << 16;

/// Streams of one device with one priority, created on demand and reused. A cheap handle: clones refer to the same
/// pool.
///
/// An operator takes its stream from the pool that was set with [`Added::streams`](crate::flow::Added::streams), or
/// otherwise from the device's [default pool](StreamPool::default_of).
///
/// ```
/// use wakeline::{StreamPool, device::{Device, Emulated}};
///
/// let device = Device::emulated(Emulated::new());
/// let pool = StreamPool::builder(&device).name("decode").priority(-1).maximum(2).build()?;
/// let stream = pool.take()?;
/// assert_eq!((stream.priority(), pool.in_use()), (-1, 1));
/// drop(stream);
/// assert_eq!((pool.made(), pool.in_use()), (1, 0));
/// # Ok::<(), wakeline::Error>(())
/// ```
#[derive(Clone)]
pub struct StreamPool {
    device: Device,
    pool: Arc<PoolState>,
}

/// The contents of the pool. Holds no device, since the device may hold the pool.
struct PoolState {
    name: String,
    priority: i32,
    blocking: bool,
    maximum: Option<usize>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The stream that was returned last is reused first.
    idle: Vec<Arc<DriverStream>>,
    made: usize,
}

/// Builds a [`StreamPool`]. See [`StreamPool::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct StreamPoolBuilder {
    device: Device,
    name: String,
    priority: i32,
    blocking: bool,
    reserved: usize,
    maximum: Option<usize>,
}

/// A stream of a pool, which is returned to the pool on drop. Clones of the [`Stream`] may outlive this; they share the
/// stream with the next user.
pub struct PooledStream {
    stream: Stream,
    pool: Arc<PoolState>,
}

impl StreamPool {
    /// A builder for a pool. The defaults: no maximum, priority 0, non-blocking streams.
    pub fn builder(device: &Device) -> StreamPoolBuilder {
        StreamPoolBuilder {
            device: device.clone(),
            name: "streams".into(),
            priority: 0,
            blocking: false,
            reserved: 0,
            maximum: None,
        }
    }

    /// The device's default pool, the same at every call: no maximum, priority 0, non-blocking streams. Operators
    /// without a pool of their own take their streams from it.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, which has no streams.
    pub fn default_of(device: &Device) -> Result<Self> {
        check_device(device)?;
        let pool = device.extension(|_| {
            Arc::new(PoolState {
                name: "default".into(),
                priority: 0,
                blocking: false,
                maximum: None,
                state: Mutex::default(),
            })
        });
        Ok(Self { device: device.clone(), pool })
    }

    /// Takes a stream for exclusive use.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the maximum is in use; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn take(&self) -> Result<PooledStream> {
        self.take_as(&self.pool.name)?.ok_or_else(|| self.used_up())
    }

    /// Like [`take`](Self::take), under another name; `None` if the maximum is in use.
    pub(crate) fn take_as(&self, name: &str) -> Result<Option<PooledStream>> {
        self.device.check()?;
        let pool = &self.pool;
        let mut state = lock(&pool.state);
        let driver_stream = match state.idle.pop() {
            Some(driver_stream) => {
                drop(state);
                driver_stream
            }
            None if pool.maximum.is_some_and(|maximum| state.made >= maximum) => return Ok(None),
            None => {
                state.made += 1;
                drop(state);
                pool.make(&self.device, name).inspect_err(|_| lock(&pool.state).made -= 1)?
            }
        };
        driver_stream.rename(name);
        match Stream::over(&self.device, name.into(), driver_stream.clone()) {
            Ok(stream) => Ok(Some(PooledStream { stream, pool: pool.clone() })),
            Err(error) => {
                lock(&pool.state).idle.push(driver_stream);
                Err(error)
            }
        }
    }

    pub(crate) fn used_up(&self) -> Error {
        let maximum = self.pool.maximum.unwrap_or_default();
        let s = if maximum == 1 { "" } else { "s" };
        Error::new(
            ErrorKind::Usage,
            format!(
                "pool `{}` is used up: its maximum of {maximum} stream{s} is in use; raise the maximum, or let \
                 operators share a stream with `.without_own_stream()`",
                self.pool.name
            ),
        )
    }

    /// The device of the pool's streams.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        &self.pool.name
    }

    /// The priority of the streams' work, clamped to the device's range.
    pub fn priority(&self) -> i32 {
        let range = self.device.stream_priorities();
        self.pool.priority.clamp(*range.start(), *range.end())
    }

    /// The maximum number of streams, if one was set.
    pub fn maximum(&self) -> Option<usize> {
        self.pool.maximum
    }

    /// The number of streams created so far.
    pub fn made(&self) -> usize {
        lock(&self.pool.state).made
    }

    /// The number of streams taken and not yet returned.
    pub fn in_use(&self) -> usize {
        let state = lock(&self.pool.state);
        state.made - state.idle.len()
    }

    pub(crate) fn is(&self, other: &StreamPool) -> bool {
        Arc::ptr_eq(&self.pool, &other.pool)
    }
}

impl StreamPoolBuilder {
    /// Sets the name that errors and warnings show.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets the priority of the streams' work: lower is more urgent, 0 is the default. It is clamped to the device's
    /// range, see [`Device::stream_priorities`].
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Sets whether the streams synchronise with the legacy default stream, as CUDA's streams do by default. Off by
    /// default: buffers are ordered without it, and any use of the default stream would delay all of these streams.
    pub fn blocking(mut self, blocking: bool) -> Self {
        self.blocking = blocking;
        self
    }

    /// Sets how many streams are created in advance, so that the first user does not wait for their creation: at most
    /// 65,536.
    pub fn reserved(mut self, count: usize) -> Self {
        self.reserved = count;
        self
    }

    /// Sets the maximum number of streams. An operator that finds all of them in use gets no stream of its own.
    pub fn maximum(mut self, count: usize) -> Self {
        self.maximum = Some(count);
        self
    }

    /// Creates the pool and its reserved streams.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, for a maximum of 0 or below the number of reserved streams, and for
    /// too many reserved streams; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn build(self) -> Result<StreamPool> {
        let Self { device, name, priority, blocking, reserved, maximum } = self;
        let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what).at(format!("pool `{name}`")));
        match maximum {
            _ if reserved > MAX_RESERVED => {
                return wrong(format!("cannot reserve {reserved} streams: the limit is {MAX_RESERVED}"));
            }
            Some(0) => return wrong("its maximum is 0: it must be at least 1".into()),
            Some(maximum) if maximum < reserved => {
                return wrong(format!(
                    "{reserved} streams are reserved, and its maximum is {maximum}: raise the maximum, or reserve \
                     fewer"
                ));
            }
            _ => {}
        }
        check_device(&device).map_err(|error| error.at(format!("pool `{name}`")))?;
        let pool = PoolState { name, priority, blocking, maximum, state: Mutex::default() };
        let made = (0..reserved).map(|_| pool.make(&device, &pool.name)).collect::<Result<Vec<_>>>()?;
        *lock(&pool.state) = State { made: made.len(), idle: made };
        Ok(StreamPool { device, pool: Arc::new(pool) })
    }
}

fn check_device(device: &Device) -> Result<()> {
    match device.is_host() {
        true => Err(Error::new(
            ErrorKind::Usage,
            Device::instead_of_host("the host has no streams: choose a device, for example with `Device::first()`"),
        )),
        false => Ok(()),
    }
}

impl PoolState {
    fn make(&self, device: &Device, name: &str) -> Result<Arc<DriverStream>> {
        let spec = StreamSpec { name: name.into(), priority: self.priority, non_blocking: !self.blocking };
        Streams::of(device).observe(DriverStream::new(device, &spec))
    }
}

impl PooledStream {
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Deref for PooledStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for PooledStream {
    fn drop(&mut self) {
        if !mutants::is(Mutant::StreamKept) {
            lock(&self.pool.state).idle.push(self.stream.0.driver_stream.clone());
        }
    }
}

impl fmt::Debug for PooledStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PooledStream").field("stream", &self.stream).field("pool", &self.pool.name).finish()
    }
}

impl fmt::Debug for StreamPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamPool")
            .field("name", &self.pool.name)
            .field("device", &self.device)
            .field("priority", &self.pool.priority)
            .field("blocking", &self.pool.blocking)
            .field("maximum", &self.pool.maximum)
            .field("made", &self.made())
            .field("in_use", &self.in_use())
            .finish()
    }
}
