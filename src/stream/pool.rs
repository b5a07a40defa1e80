//! [`StreamPool`]: streams of one kind, used again.
//!
//! ```text
//!              take                              give back (drop)
//!   idle ───────────────> a Stream, newly named ──────────────────> idle
//!     ^ made: at once (reserved), or when none is idle, up to the maximum
//! ```
//!
//! What is given back may still have work in flight: whoever gets it next comes after that, as anything in a stream
//! comes after what is before it. So nobody waits, and clones of a [`Stream`] that was given back go on working; they
//! share it then.

use std::{fmt, ops::Deref, sync::Arc};

use super::{Stream, held::Held};
use crate::{
    device::{Device, backend::StreamSpec},
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    sync::{Mutex, lock},
};

/// Streams that are made at once, at most. Others are made when they are needed.
const MOST_RESERVED: usize = 1 << 16;

/// Streams of one device, one priority, made when they are needed and used again. A cheap handle: clones are the same
/// pool.
///
/// An operator takes its stream from the pool that it was given with [`Added::streams`](crate::flow::Added::streams);
/// from the device's [default pool](StreamPool::default_of) otherwise.
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
    shelf: Arc<Shelf>,
}

/// What is in the pool. Knows no device, which may hold it.
struct Shelf {
    name: String,
    priority: i32,
    blocking: bool,
    maximum: Option<usize>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The one given back last is given out next.
    idle: Vec<Arc<Held>>,
    made: usize,
}

/// A pool in the making. See [`StreamPool::builder`].
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

/// A stream of a pool: given back when it is dropped. Clones of the [`Stream`] behind it may outlive that and then share
/// it with whoever gets it next.
pub struct PooledStream {
    stream: Stream,
    shelf: Arc<Shelf>,
}

impl StreamPool {
    /// A pool without a maximum, with priority 0 and non-blocking streams, unless it is told otherwise.
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

    /// The device's default pool, the same at every call: no maximum, priority 0, non-blocking streams. Operators that
    /// were given no other take their streams from it.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, which has no streams.
    pub fn default_of(device: &Device) -> Result<Self> {
        check_device(device)?;
        let shelf = device.extension(|_| {
            Arc::new(Shelf {
                name: "default".into(),
                priority: 0,
                blocking: false,
                maximum: None,
                state: Mutex::default(),
            })
        });
        Ok(Self { device: device.clone(), shelf })
    }

    /// A stream, for whoever holds it alone.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the maximum is in use; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn take(&self) -> Result<PooledStream> {
        self.take_as(&self.shelf.name)?.ok_or_else(|| self.used_up())
    }

    /// A stream under another name; `None` if the maximum is in use.
    pub(crate) fn take_as(&self, name: &str) -> Result<Option<PooledStream>> {
        self.device.check()?;
        let shelf = &self.shelf;
        let mut state = lock(&shelf.state);
        let held = match state.idle.pop() {
            Some(held) => {
                drop(state);
                held
            }
            None if shelf.maximum.is_some_and(|maximum| state.made >= maximum) => return Ok(None),
            None => {
                state.made += 1;
                drop(state);
                shelf.make(&self.device, name).inspect_err(|_| lock(&shelf.state).made -= 1)?
            }
        };
        held.rename(name);
        match Stream::over(&self.device, name.into(), held.clone()) {
            Ok(stream) => Ok(Some(PooledStream { stream, shelf: shelf.clone() })),
            Err(error) => {
                lock(&shelf.state).idle.push(held);
                Err(error)
            }
        }
    }

    pub(crate) fn used_up(&self) -> Error {
        let maximum = self.shelf.maximum.unwrap_or_default();
        let s = if maximum == 1 { "" } else { "s" };
        Error::new(
            ErrorKind::Usage,
            format!(
                "pool `{}` is used up: its maximum of {maximum} stream{s} is in use; raise it, or let operators share with `.without_own_stream()`",
                self.shelf.name
            ),
        )
    }

    /// The device of its streams.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shelf.name
    }

    /// How urgent its streams' work is, as the device has it.
    pub fn priority(&self) -> i32 {
        let range = self.device.stream_priorities();
        self.shelf.priority.clamp(*range.start(), *range.end())
    }

    /// The most streams that it makes, if that was said.
    pub fn maximum(&self) -> Option<usize> {
        self.shelf.maximum
    }

    /// Streams that it has made so far.
    pub fn made(&self) -> usize {
        lock(&self.shelf.state).made
    }

    /// Streams that were taken and not yet given back.
    pub fn in_use(&self) -> usize {
        let state = lock(&self.shelf.state);
        state.made - state.idle.len()
    }

    pub(crate) fn is(&self, other: &StreamPool) -> bool {
        Arc::ptr_eq(&self.shelf, &other.shelf)
    }
}

impl StreamPoolBuilder {
    /// A name, for errors and warnings.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// How urgent the streams' work is: lower is more urgent, 0 is the default. Clamped to what the device has, see
    /// [`Device::stream_priorities`].
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Whether the streams order themselves with the legacy default stream, as CUDA's do by default. Off here: what
    /// uses a buffer is ordered without it, and a default stream that anybody uses would hold up all.
    pub fn blocking(mut self, blocking: bool) -> Self {
        self.blocking = blocking;
        self
    }

    /// So many streams are made at once, so that the first to take one does not wait for that: at most 65,536.
    pub fn reserved(mut self, count: usize) -> Self {
        self.reserved = count;
        self
    }

    /// The most streams that it makes. An operator that finds all of them in use has no stream of its own.
    pub fn maximum(mut self, count: usize) -> Self {
        self.maximum = Some(count);
        self
    }

    /// Makes the pool and the streams that are reserved.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, for a maximum of 0 and for one below what is reserved, and for too many of these;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn build(self) -> Result<StreamPool> {
        let Self { device, name, priority, blocking, reserved, maximum } = self;
        let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what).at(format!("pool `{name}`")));
        match maximum {
            _ if reserved > MOST_RESERVED => {
                return wrong(format!("{reserved} streams are to be made at once: at most {MOST_RESERVED}"));
            }
            Some(0) => return wrong("its maximum is 0, and nobody could ever take a stream: at least 1".into()),
            Some(maximum) if maximum < reserved => {
                return wrong(format!("{reserved} streams are reserved, and its maximum is {maximum}"));
            }
            _ => {}
        }
        check_device(&device).map_err(|error| error.at(format!("pool `{name}`")))?;
        let shelf = Shelf { name, priority, blocking, maximum, state: Mutex::default() };
        let made = (0..reserved).map(|_| shelf.make(&device, &shelf.name)).collect::<Result<Vec<_>>>()?;
        *lock(&shelf.state) = State { made: made.len(), idle: made };
        Ok(StreamPool { device, shelf: Arc::new(shelf) })
    }
}

fn check_device(device: &Device) -> Result<()> {
    match device.is_host() {
        true => Err(Error::new(ErrorKind::Usage, "the host has no streams: choose a device, `Device::first()` say")),
        false => Ok(()),
    }
}

impl Shelf {
    fn make(&self, device: &Device, name: &str) -> Result<Arc<Held>> {
        Held::new(device, &StreamSpec { name: name.into(), priority: self.priority, non_blocking: !self.blocking })
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
            lock(&self.shelf.state).idle.push(self.stream.0.held.clone());
        }
    }
}

impl fmt::Debug for PooledStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PooledStream").field("stream", &self.stream).field("pool", &self.shelf.name).finish()
    }
}

impl fmt::Debug for StreamPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamPool")
            .field("name", &self.shelf.name)
            .field("device", &self.device)
            .field("priority", &self.shelf.priority)
            .field("blocking", &self.shelf.blocking)
            .field("maximum", &self.shelf.maximum)
            .field("made", &self.made())
            .field("in_use", &self.in_use())
            .finish()
    }
}
