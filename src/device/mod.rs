//! Devices: the one seam to the hardware, and what stands behind it.
//!
//! A [`Device`] is a CUDA GPU, the emulated device, or the host. It is a cheap handle: clones are the same device, and
//! so are two [`Device::cuda(0)`](Device::cuda) in one process.
//!
//! ```text
//!   Stream, Buffer, hubs, kernels          written once
//!             |
//!       dyn Backend (backend.rs)           the one seam
//!        /      |       \
//!   check ->  cuda    emulated   host      the race checker wraps either of the first two
//! ```

pub(crate) mod backend;
pub(crate) mod check;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod draft;
pub(crate) mod emulated;
mod host;
pub(crate) mod human;
mod kernel_type;
pub(crate) mod piece;
mod process;
pub(crate) mod recorder;
pub(crate) mod thread;
pub(crate) mod ticks;
pub(crate) mod touched;

use std::{
    any::{Any, TypeId},
    fmt,
    ops::RangeInclusive,
    str::FromStr,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use backend::Backend;
pub use backend::MemoryInfo;
pub use emulated::{Emulated, Faults, Simulation, Task, Unfinished};
pub(crate) use host::host_memory;
pub use kernel_type::KernelType;

use crate::{
    error::{Error, ErrorKind, Result},
    sync::{Mutex, discard, discard_all, lock, logged},
};

/// Chooses the device of [`Device::first`]: `cuda:1`, `emulated`.
const DEVICE_VARIABLE: &str = "WAKELINE_DEVICE";
/// Set to anything but `0`: every device opened from then on has the race checker on.
const CHECK_VARIABLE: &str = "WAKELINE_RACE_CHECK";

/// A GPU, the emulated device, or the host.
///
/// # Forks
/// A device works in the process that has opened it. In a child that was forked after that (`fork` without `exec`, as
/// Python's `multiprocessing` does by default on Linux) every device is lost, those that the child opens too: making a
/// stream, taking new memory from the driver, waiting for work that was not done, and [`Device::cuda`] are
/// [`DeviceLost`](ErrorKind::DeviceLost) errors there that say so. Other calls may be accepted and come to nothing. As with
/// any program of several threads, a lock that another thread held at the fork stays locked in the child. The host is no
/// such device, and a [simulated](Device::simulated) one has no threads: they work on. A child that is started as a program
/// of its own ([`std::process::Command`]) is not concerned.
///
/// ```
/// use wakeline::device::{Device, Emulated};
///
/// let device = Device::emulated(Emulated::new().memory(1 << 20));
/// assert_eq!(device.memory()?.total, 1 << 20);
/// assert!(device.name().starts_with("emulated:"));
/// # Ok::<(), wakeline::Error>(())
/// ```
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    backend: Arc<dyn Backend>,
    kind: Kind,
    /// It works in the process that has opened it, and in no fork of that.
    of_process: bool,
    id: u64,
    /// The handle that this one puts the race checker before.
    unchecked: Option<Device>,
    /// Set once, by whoever learns of the fault first.
    lost: OnceLock<Error>,
    /// And runs nothing any more: found once, and so for good.
    ended: AtomicBool,
    /// Who is told of that.
    hearers: Mutex<Vec<Weak<dyn HearsOfLoss>>>,
    /// Off only by a test hook: buffers then no longer order the streams that use them.
    tracked: AtomicBool,
    extensions: Extensions,
}

/// Where tasks wait for what comes from others, who may never bring it once a device is lost.
pub(crate) trait HearsOfLoss: Send + Sync {
    fn device_lost(&self);

    /// Called before the first of all is notified; what it returns is dropped after the last. Meanwhile a flow that waits there
    /// counts as one that goes on, as some of its operators may not be notified yet.
    fn hold(&self) -> Box<dyn Any> {
        Box::new(())
    }

    /// Whether a task waits there. Looks under the lock under which waiters register.
    fn has_waiters(&self) -> bool;
}

/// What the layers above keep for each device (streams, memory), without this one knowing them. Each takes the first free
/// place, for good, so that it is found again without a lock.
type Extensions = [OnceLock<(TypeId, Arc<dyn Any + Send + Sync>)>; 8];

static ANY_LOST: AtomicBool = AtomicBool::new(false);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Host,
    Cuda,
    /// All of them share one engine.
    Emulated,
    /// Those of one simulation share one engine, which this number stands for.
    Simulated(usize),
}

impl Device {
    fn open(backend: Arc<dyn Backend>, kind: Kind, of_process: bool) -> Self {
        Self::over(backend, kind, of_process, None)
    }

    /// Over what another handle is for, with the race checker before it, or over a device that has no handle yet.
    fn over(backend: Arc<dyn Backend>, kind: Kind, of_process: bool, unchecked: Option<Device>) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let checked = kind != Kind::Host && std::env::var(CHECK_VARIABLE).is_ok_and(|value| value != "0");
        let backend = if checked { check::checked(backend) } else { backend };
        Self(Arc::new(Inner {
            backend,
            kind,
            of_process,
            id,
            unchecked,
            lost: OnceLock::new(),
            ended: AtomicBool::new(false),
            hearers: Mutex::default(),
            tracked: AtomicBool::new(true),
            extensions: Extensions::default(),
        }))
    }

    /// The first CUDA GPU, or, where there is no driver, the emulated device; `WAKELINE_DEVICE=cuda:1` or `emulated`
    /// in the environment chooses another. That it emulates is logged, once a call, as a `tracing` event.
    ///
    /// # Errors
    /// [`NoDevice`](ErrorKind::NoDevice) if the variable names none that is there, or if there is a driver but no GPU
    /// that works: then nothing is emulated in silence.
    pub fn first() -> Result<Self> {
        match std::env::var(DEVICE_VARIABLE) {
            Ok(name) if !name.is_empty() => {
                return name.parse().map_err(|error: Error| error.at(format!("{DEVICE_VARIABLE}={name}")));
            }
            _ => {}
        }
        #[cfg(feature = "cuda")]
        if cuda::driver_present() {
            return Self::cuda(0);
        }
        logged(|| tracing::info!("no CUDA driver here: running on the emulated device"));
        Ok(Self::emulated(Emulated::new()))
    }

    /// The `n`-th CUDA GPU, counted from 0, the same device at every call.
    ///
    /// # Errors
    /// [`NoDevice`](ErrorKind::NoDevice) where there is no driver, no such GPU, or wakeline was built without its
    /// feature `cuda`.
    pub fn cuda(n: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        {
            // For as long as the process lives: closing a device would have to wait for its work.
            static OPENED: Mutex<Vec<(usize, Device)>> = Mutex::at(crate::sync::Level::Devices, Vec::new());
            let mut opened = lock(&OPENED);
            if let Some((_, device)) = opened.iter().find(|(at, _)| *at == n) {
                device.check_process()?;
                return Ok(device.clone());
            }
            process::enter()?;
            let device = Self::open(cuda::open(n)?, Kind::Cuda, true);
            opened.push((n, device.clone()));
            Ok(device)
        }
        #[cfg(not(feature = "cuda"))]
        Err(Error::new(ErrorKind::NoDevice, format!("cuda:{n}: wakeline was built without its feature `cuda`")))
    }

    /// How many CUDA GPUs this process sees; 0 where there is no driver.
    pub fn cuda_count() -> usize {
        #[cfg(feature = "cuda")]
        {
            cuda::device_count().unwrap_or(0)
        }
        #[cfg(not(feature = "cuda"))]
        0
    }

    /// A new emulated device: memory of its own, streams that run at once, on the CPU. See [`Emulated`].
    pub fn emulated(config: Emulated) -> Self {
        let here = process::enter();
        let device = Self::open(emulated::open(config), Kind::Emulated, true);
        if let Err(forked) = here {
            device.set_lost(forked.at(device.name()));
        }
        device
    }

    /// A new emulated device without threads: the simulation's loop runs it. See [`Simulation`].
    pub fn simulated(simulation: &Simulation, config: Emulated) -> Self {
        Self::open(simulation.device(config), Kind::Simulated(simulation.engine_id()), false)
    }

    /// The host: where operators run that were given no device. It has memory but no streams.
    pub fn host() -> Self {
        static HOST: OnceLock<Device> = OnceLock::new();
        HOST.get_or_init(|| Self::open(Arc::new(host::Host), Kind::Host, false)).clone()
    }

    /// The same hardware with the race checker before it: two accesses to one buffer that nothing orders become an
    /// error, [`Race`](ErrorKind::Race), whatever their timing was, before the second is enqueued. So do, as
    /// [`InvalidMemory`](ErrorKind::InvalidMemory), the use of memory that was freed, and a read of bytes none of which
    /// anybody has written. Two nodes of a graph that no edge orders are found when the second is added, or, where one was
    /// changed, at the launch; and a launch is a call like any other. It costs a lock and some bookkeeping a call. Use the device that this returns for everything;
    /// `WAKELINE_RACE_CHECK=1` in the environment does the same for every device of the process.
    ///
    /// ```
    /// use wakeline::device::{Device, Emulated};
    /// let device = Device::emulated(Emulated::new()).race_checked();
    /// ```
    #[must_use]
    pub fn race_checked(self) -> Self {
        if self.0.kind == Kind::Host || self.0.backend.is_checked() {
            return self;
        }
        let backend = check::checked(self.0.backend.clone());
        let device = Self::over(backend, self.0.kind, self.0.of_process, Some(self.clone()));
        if let Some(lost) = self.0.lost.get() {
            device.set_lost(lost.again());
        }
        device
    }

    /// `cuda:0`, `emulated:3`, `host`.
    pub fn name(&self) -> &str {
        self.0.backend.name()
    }

    /// What it is, for people: `NVIDIA H200`.
    pub fn description(&self) -> String {
        self.0.backend.description()
    }

    /// True for the host.
    #[inline]
    pub fn is_host(&self) -> bool {
        self.0.kind == Kind::Host
    }

    /// True for a CUDA GPU.
    pub fn is_cuda(&self) -> bool {
        self.0.kind == Kind::Cuda
    }

    /// True for an emulated device.
    pub fn is_emulated(&self) -> bool {
        matches!(self.0.kind, Kind::Emulated | Kind::Simulated(_))
    }

    /// The priorities that its streams can have, lower is more urgent: `-5..=0` on most GPUs. `0..=0` on the host, which
    /// has no streams.
    pub fn stream_priorities(&self) -> RangeInclusive<i32> {
        let (least, greatest) = self.0.backend.stream_priorities();
        greatest..=least
    }

    /// The error that ended the device, if one has.
    pub fn lost(&self) -> Option<Error> {
        self.0.lost.get().map(Error::again)
    }

    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.0.lost.get().is_some()
    }

    /// True once the device is lost and none of its work touches memory any more, or ever will. Always false where that is
    /// not known: of a CUDA device.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.is_lost() && self.has_ended_since()
    }

    #[cold]
    fn has_ended_since(&self) -> bool {
        let has_ended = self.0.ended.load(Ordering::Acquire) || self.0.backend.has_ended();
        if has_ended {
            self.0.ended.store(true, Ordering::Release);
        }
        has_ended
    }

    /// An error if the device is lost.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.0.lost.get() {
            None => Ok(()),
            Some(error) => Err(error.again()),
        }
    }

    /// An error in a fork of the process that has opened it, where it is lost from then on. A system call: not for an
    /// enqueue's path.
    pub(crate) fn check_process(&self) -> Result<()> {
        if !self.0.of_process {
            return Ok(());
        }
        process::check().map_err(|forked| {
            let forked = forked.at(self.name());
            // Nothing else is told: whoever could be is the parent's.
            self.set_lost(forked.again());
            forked
        })
    }

    /// True once any device of the process was lost. It is set before the loss can be seen.
    pub(crate) fn any_is_lost() -> bool {
        ANY_LOST.load(Ordering::Relaxed)
    }

    /// The first call's error stays. True if it was this one.
    pub(crate) fn set_lost(&self, error: Error) -> bool {
        ANY_LOST.store(true, Ordering::Relaxed);
        self.0.lost.set(error).is_ok()
    }

    /// Whoever is waited at for what others bring is told, once, when the device is lost. Who asks the device after this
    /// misses nothing.
    pub(crate) fn tell_when_lost(&self, whom: Weak<dyn HearsOfLoss>) {
        let mut hearers = lock(&self.0.hearers);
        hearers.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&whom));
        hearers.push(whom);
    }

    /// Whether a task waits at anything that is notified when the device is lost.
    pub(crate) fn has_waiters(&self) -> bool {
        let hearers: Vec<_> = lock(&self.0.hearers).iter().filter_map(Weak::upgrade).collect();
        let has_waiters = hearers.iter().any(|hearer| hearer.has_waiters());
        // Any of them may be the last handle.
        discard_all(hearers);
        has_waiters
    }

    /// Notifies all of its loss.
    pub(crate) fn tell_lost(&self) {
        let hearers = std::mem::take(&mut *lock(&self.0.hearers));
        let hearers: Vec<_> = hearers.iter().filter_map(Weak::upgrade).collect();
        let _held: Vec<_> = hearers.iter().map(|hearer| hearer.hold()).collect();
        for hearer in hearers {
            hearer.device_lost();
            // It may be the last to hold it, with messages of the user's in it.
            discard(hearer);
        }
    }

    /// The handle without the race checker: one for all handles of the same hardware.
    pub(crate) fn unchecked(&self) -> &Self {
        self.0.unchecked.as_ref().unwrap_or(self)
    }

    #[inline]
    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.0.backend
    }

    /// Whether both are handles of the same hardware: a stream of one reaches memory of the other at its address.
    #[inline]
    pub(crate) fn shares_hardware_with(&self, other: &Self) -> bool {
        self.unchecked() == other.unchecked()
    }

    /// Whether copies run directly between memories of the two: both are GPUs, or one engine runs both. Each simulation
    /// has an engine of its own, which knows no stream or event of another.
    #[inline]
    pub(crate) fn copies_with(&self, other: &Self) -> bool {
        self == other || self.is_host() || other.is_host() || self.0.kind == other.0.kind
    }

    #[inline]
    pub(crate) fn tracked(&self) -> bool {
        self.0.tracked.load(Ordering::Relaxed)
    }

    /// A test hook: buffers of this device no longer order its streams that use them, so that the race checker has something to
    /// find. Streams of other handles, which the checker may not see, are ordered all the same.
    ///
    /// # Panics
    /// Without the race checker, which then is all that keeps safe code from racing.
    #[doc(hidden)]
    pub fn switch_tracking_off(&self) {
        assert!(self.0.backend.is_checked(), "only the race checker may take the tracking's place");
        self.0.tracked.store(false, Ordering::Relaxed);
    }

    /// What a layer above keeps for this device: made at first use, gone with the device.
    #[inline]
    pub(crate) fn extension<T: Any + Send + Sync>(&self, make: impl FnOnce(&Self) -> Arc<T>) -> Arc<T> {
        let mut make = Some(make);
        for place in &self.0.extensions {
            let (of, kept) = place.get_or_init(|| match make.take() {
                Some(make) => (TypeId::of::<T>(), make(self) as Arc<dyn Any + Send + Sync>),
                None => unreachable!("whoever has made it takes the place"),
            });
            if *of == TypeId::of::<T>()
                && let Ok(found) = kept.clone().downcast::<T>()
            {
                return found;
            }
        }
        unreachable!("the crate has fewer extensions than places")
    }

    pub(crate) fn downgrade(&self) -> WeakDevice {
        WeakDevice(Arc::downgrade(&self.0))
    }
}

/// For what a device keeps and what refers back to it.
#[derive(Clone)]
pub(crate) struct WeakDevice(Weak<Inner>);

impl WeakDevice {
    pub(crate) fn upgrade(&self) -> Option<Device> {
        self.0.upgrade().map(Device)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}#{})", self.name(), self.0.id)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `cuda:0`, `cuda` (the first), `emulated` (a new one, as [`Emulated::new`]) and `host`.
impl FromStr for Device {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name.split_once(':') {
            None if name == "emulated" => Ok(Self::emulated(Emulated::new())),
            None if name == "host" => Ok(Self::host()),
            None if name == "cuda" => Self::cuda(0),
            Some(("cuda", n)) if n.parse::<usize>().is_ok() => Self::cuda(n.parse().unwrap_or_default()),
            _ => Err(Error::new(
                ErrorKind::NoDevice,
                format!("`{name}` names no device: write `cuda:0`, `cuda:1`, ... or `emulated`"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes down what is called.
    struct Hearer(Arc<Mutex<Vec<&'static str>>>);

    struct Held(Arc<Mutex<Vec<&'static str>>>);

    impl Drop for Held {
        fn drop(&mut self) {
            lock(&self.0).push("released");
        }
    }

    impl HearsOfLoss for Hearer {
        fn device_lost(&self) {
            lock(&self.0).push("notified");
        }

        fn hold(&self) -> Box<dyn Any> {
            lock(&self.0).push("held");
            Box::new(Held(self.0.clone()))
        }

        fn has_waiters(&self) -> bool {
            true
        }
    }

    /// A flow may wait at several: it is at rest only once all of them are notified.
    #[test]
    fn all_are_held_while_they_are_notified_of_a_loss() {
        let (device, calls) = (Device::emulated(Emulated::new()), Arc::default());
        let hearers = [(); 2].map(|()| Arc::new(Hearer(Arc::clone(&calls))));
        for hearer in &hearers {
            let hears: Weak<dyn HearsOfLoss> = Arc::downgrade(hearer) as Weak<dyn HearsOfLoss>;
            device.tell_when_lost(hears);
        }
        device.tell_lost();
        assert_eq!(*lock(&calls), ["held", "held", "notified", "notified", "released", "released"]);
    }
}
