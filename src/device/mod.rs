//! Devices: the interface to the hardware, and its implementations.
//!
//! A [`Device`] is a CUDA GPU, the emulated device, or the host. It is a cheap handle: clones are the same device, and
//! so are two [`Device::cuda(0)`](Device::cuda) in one process.
//!
//! ```text
//!   Stream, Buffer, hubs, kernels          written once
//!             |
//!           dyn Backend                    the one interface to the hardware
//!        /      |       \
//!   check ->  cuda    emulated   host      the race checker wraps either of the first two
//! ```

pub(crate) mod backend;
pub(crate) mod check;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod emulated;
pub(crate) mod graph_ir;
mod host;
pub(crate) mod human;
mod kernel_type;
#[cfg(feature = "cuda")]
pub(crate) mod nvtx;
mod process;
pub(crate) mod recorder;
pub(crate) mod thread;
pub(crate) mod ticks;
pub(crate) mod touched;
pub(crate) mod work_item;

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
pub use kernel_type::{CudaTypes, KernelType};

use crate::{
    error::{Error, ErrorKind, Result},
    sync::{Mutex, discard, discard_all, lock, logged},
};

/// Chooses the device of [`Device::first`]: `cuda:1`, `emulated`.
const DEVICE_VARIABLE: &str = "WAKELINE_DEVICE";
/// If set to anything but `0`, every device that is opened has the race checker.
const CHECK_VARIABLE: &str = "WAKELINE_RACE_CHECK";

/// A GPU, the emulated device, or the host.
///
/// ```
/// use wakeline::device::{Device, Emulated};
///
/// let device = Device::emulated(Emulated::new().memory(1 << 20));
/// assert_eq!(device.memory()?.total, 1 << 20);
/// assert!(device.name().starts_with("emulated:"));
/// # Ok::<(), wakeline::Error>(())
/// ```
///
/// # Forks
/// A device works only in the process that opened it. In a child that was forked after that (`fork` without `exec`, as
/// Python's `multiprocessing` does by default on Linux) every device is lost, including those that the child opens.
/// There, creating a stream, allocating new memory from the driver, waiting for unfinished work and [`Device::cuda`]
/// fail with [`DeviceLost`](ErrorKind::DeviceLost); other calls may succeed without effect. As in any multithreaded
/// program, a lock that another thread held at the fork stays locked in the child. The host and
/// [simulated](Device::simulated) devices, which have no threads, continue to work. A child that is started as a
/// separate program ([`std::process::Command`]) is not affected.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    backend: Arc<dyn Backend>,
    kind: DeviceKind,
    /// The device works only in the process that opened it, not in a fork of it.
    of_process: bool,
    id: u64,
    /// The handle without the race checker, if this one adds it.
    unchecked: Option<Device>,
    /// Set once, by the first caller to notice the fault.
    lost: OnceLock<Error>,
    /// The device is lost and runs nothing any more. Never reset.
    ended: AtomicBool,
    observers: Mutex<Vec<Weak<dyn LossObserver>>>,
    /// Cleared only by a test hook: buffers then no longer order the streams that use them.
    tracked: AtomicBool,
    extensions: Extensions,
}

/// An object on which tasks wait for other tasks, whose results might never come once a device is lost.
pub(crate) trait LossObserver: Send + Sync {
    fn device_lost(&self);

    /// Called before the first waiter is notified; the returned value is dropped after the last one is. While it
    /// exists, a flow with waiters here counts as running, as some of its operators might not be notified yet.
    fn hold(&self) -> Box<dyn Any> {
        Box::new(())
    }

    /// True if a task waits here. Takes the lock under which waiters register.
    fn has_waiters(&self) -> bool;
}

/// The data that the layers above (streams, memory) store for each device. Each layer takes the first free slot and
/// never releases it, so that lookups need no lock.
type Extensions = [OnceLock<(TypeId, Arc<dyn Any + Send + Sync>)>; 8];

static ANY_LOST: AtomicBool = AtomicBool::new(false);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceKind {
    Host,
    Cuda,
    /// All emulated devices of the process share one engine.
    Emulated,
    /// The devices of one simulation share one engine, which this number identifies.
    Simulated(usize),
}

impl Device {
    fn open(backend: Arc<dyn Backend>, kind: DeviceKind, of_process: bool) -> Self {
        Self::over(backend, kind, of_process, None)
    }

    /// Opens a handle: for new hardware, or with the race checker over the hardware of the handle `unchecked`.
    fn over(backend: Arc<dyn Backend>, kind: DeviceKind, of_process: bool, unchecked: Option<Device>) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let checked = kind != DeviceKind::Host
            && std::env::var_os(CHECK_VARIABLE).is_some_and(|value| !value.is_empty() && value != "0");
        let backend = if checked { check::checked(backend) } else { backend };
        Self(Arc::new(Inner {
            backend,
            kind,
            of_process,
            id,
            unchecked,
            lost: OnceLock::new(),
            ended: AtomicBool::new(false),
            observers: Mutex::default(),
            tracked: AtomicBool::new(true),
            extensions: Extensions::default(),
        }))
    }

    /// The first CUDA GPU or, if no driver is installed, a new emulated device. `WAKELINE_DEVICE=cuda:1`, `emulated` or
    /// `host` in the environment selects another device. Each fallback to the emulated device is logged as a `tracing`
    /// event.
    ///
    /// # Errors
    /// [`NoDevice`](ErrorKind::NoDevice) if the variable names a device that does not exist, or if there is a driver
    /// but no working GPU: there is no silent fallback to emulation.
    pub fn first() -> Result<Self> {
        if let Some(name) = std::env::var_os(DEVICE_VARIABLE).filter(|name| !name.is_empty()) {
            // A name that is not UTF-8 is an error, too: no device has it.
            let name = name.to_string_lossy();
            return name.parse().map_err(|error: Error| error.at(format!("{DEVICE_VARIABLE}={name}")));
        }
        #[cfg(feature = "cuda")]
        if cuda::driver_present() {
            return Self::cuda(0);
        }
        logged(|| tracing::info!("no CUDA driver is installed: running on the emulated device"));
        Ok(Self::emulated(Emulated::new()))
    }

    /// The `n`-th CUDA GPU, counted from 0. Every call returns the same device.
    ///
    /// # Errors
    /// [`NoDevice`](ErrorKind::NoDevice) if no driver is installed, if there is no such GPU, or if wakeline was built
    /// without its feature `cuda`.
    pub fn cuda(n: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        {
            // Open for the life of the process: closing a device would have to wait for its work.
            static OPENED: Mutex<Vec<(usize, Device)>> = Mutex::at(crate::sync::Level::Devices, Vec::new());
            // Before the lock: the names of streams are for a profiler that is loaded.
            nvtx::Nvtx::get();
            let mut opened = lock(&OPENED);
            if let Some((_, device)) = opened.iter().find(|(at, _)| *at == n) {
                device.check_process()?;
                return Ok(device.clone());
            }
            process::enter()?;
            let device = Self::open(cuda::open(n)?, DeviceKind::Cuda, true);
            opened.push((n, device.clone()));
            Ok(device)
        }
        #[cfg(not(feature = "cuda"))]
        Err(Error::new(ErrorKind::NoDevice, format!("cuda:{n}: wakeline was built without its feature `cuda`")))
    }

    /// What to do where a device is needed and the host was given: `otherwise`, unless the environment chose the host.
    pub(crate) fn instead_of_host(otherwise: &str) -> String {
        if std::env::var_os(DEVICE_VARIABLE).is_some_and(|name| name == "host") {
            let text = "makes the host the first device: set it to `emulated`, `cuda:0`, `cuda:1`, .., or unset it";
            return format!("{otherwise}; `{DEVICE_VARIABLE}=host` {text}");
        }
        otherwise.into()
    }

    /// The number of CUDA GPUs that this process sees; 0 if no driver is installed.
    pub fn cuda_count() -> usize {
        #[cfg(feature = "cuda")]
        {
            cuda::device_count().unwrap_or(0)
        }
        #[cfg(not(feature = "cuda"))]
        0
    }

    /// A new emulated device with its own memory, whose streams run immediately, on the CPU. See [`Emulated`].
    pub fn emulated(config: Emulated) -> Self {
        let here = process::enter();
        let device = Self::open(emulated::open(config), DeviceKind::Emulated, true);
        if let Err(forked) = here {
            device.set_lost(forked.at(device.name()));
        }
        device
    }

    /// A new emulated device without threads: the simulation's loop runs it. See [`Simulation`].
    pub fn simulated(simulation: &Simulation, config: Emulated) -> Self {
        Self::open(simulation.device(config), DeviceKind::Simulated(simulation.engine_id()), false)
    }

    /// The host: the default device of an operator. It has memory but no streams.
    pub fn host() -> Self {
        static HOST: OnceLock<Device> = OnceLock::new();
        HOST.get_or_init(|| Self::open(Arc::new(host::HostBackend), DeviceKind::Host, false)).clone()
    }

    /// The same hardware with the race checker. If two accesses to one buffer are unordered, the second is refused with
    /// [`Race`](ErrorKind::Race) before it is enqueued, whatever the timing. Using freed memory, or reading bytes of
    /// which none was ever written, is refused with [`InvalidMemory`](ErrorKind::InvalidMemory). Two unordered nodes of
    /// a graph are reported when the second is added or, if one was changed, at the launch; a launch is checked like
    /// any other call. The checker costs a lock and some bookkeeping per call.
    ///
    /// Use the device that this returns for everything. `WAKELINE_RACE_CHECK=1` in the environment turns the checker on
    /// for every device of the process.
    ///
    /// ```
    /// use wakeline::device::{Device, Emulated};
    /// let device = Device::emulated(Emulated::new()).race_checked();
    /// ```
    #[must_use]
    pub fn race_checked(self) -> Self {
        if self.0.kind == DeviceKind::Host || self.0.backend.is_checked() {
            return self;
        }
        let backend = check::checked(self.0.backend.clone());
        let device = Self::over(backend, self.0.kind, self.0.of_process, Some(self.clone()));
        if let Some(lost) = self.0.lost.get() {
            device.set_lost(lost.clone());
        }
        device
    }

    /// `cuda:0`, `emulated:3`, `host`.
    pub fn name(&self) -> &str {
        self.0.backend.name()
    }

    /// A description: `NVIDIA H200`.
    pub fn description(&self) -> String {
        self.0.backend.description()
    }

    /// True for the host.
    #[inline]
    pub fn is_host(&self) -> bool {
        self.0.kind == DeviceKind::Host
    }

    /// True for a CUDA GPU.
    pub fn is_cuda(&self) -> bool {
        self.0.kind == DeviceKind::Cuda
    }

    /// True for an emulated device.
    pub fn is_emulated(&self) -> bool {
        matches!(self.0.kind, DeviceKind::Emulated | DeviceKind::Simulated(_))
    }

    /// The priorities that streams on this device can have; lower is more urgent. `-5..=0` on most GPUs, `0..=0` on the
    /// host, which has no streams.
    pub fn stream_priorities(&self) -> RangeInclusive<i32> {
        let (least, greatest) = self.0.backend.stream_priorities();
        greatest..=least
    }

    /// The error with which the device was lost, if it was.
    pub fn lost(&self) -> Option<Error> {
        self.0.lost.get().cloned()
    }

    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.0.lost.get().is_some()
    }

    /// True once the device is lost and no work on it accesses memory any more. Always false for a CUDA device, whose
    /// driver does not report this.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.is_lost() && self.query_ended()
    }

    #[cold]
    fn query_ended(&self) -> bool {
        let has_ended = self.0.ended.load(Ordering::Acquire) || self.0.backend.has_ended();
        if has_ended {
            self.0.ended.store(true, Ordering::Release);
        }
        has_ended
    }

    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.0.lost.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Fails in a fork of the process that opened the device, and marks the device lost there. Makes a system call, so
    /// it is not called on the enqueue path.
    pub(crate) fn check_process(&self) -> Result<()> {
        if !self.0.of_process {
            return Ok(());
        }
        process::check().map_err(|forked| {
            let forked = forked.at(self.name());
            // No notification: all waiters are the parent's.
            self.set_lost(forked.clone());
            forked
        })
    }

    /// True once any device of the process was lost. Set before the loss becomes visible.
    pub(crate) fn any_is_lost() -> bool {
        ANY_LOST.load(Ordering::Relaxed)
    }

    /// Records the device's loss. Returns true if this was the first error, which is the one kept.
    pub(crate) fn set_lost(&self, error: Error) -> bool {
        ANY_LOST.store(true, Ordering::Relaxed);
        self.0.lost.set(error).is_ok()
    }

    /// Registers an observer that is notified once, when the device is lost. Check the device after this call, as it
    /// might have been lost before.
    pub(crate) fn on_loss(&self, observer: Weak<dyn LossObserver>) {
        let mut observers = lock(&self.0.observers);
        observers.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&observer));
        observers.push(observer);
    }

    pub(crate) fn has_waiters(&self) -> bool {
        let observers: Vec<_> = lock(&self.0.observers).iter().filter_map(Weak::upgrade).collect();
        let has_waiters = observers.iter().any(|observer| observer.has_waiters());
        // Any of these might be the last reference.
        discard_all(observers);
        has_waiters
    }

    /// Notifies all registered observers of the device's loss.
    pub(crate) fn notify_lost(&self) {
        let observers = std::mem::take(&mut *lock(&self.0.observers));
        let observers: Vec<_> = observers.iter().filter_map(Weak::upgrade).collect();
        let _held: Vec<_> = observers.iter().map(|observer| observer.hold()).collect();
        for observer in observers {
            observer.device_lost();
            // This might be the last reference, and the observer can own a user's messages.
            discard(observer);
        }
    }

    /// The handle without the race checker: the same one for all handles of the hardware.
    pub(crate) fn unchecked(&self) -> &Self {
        self.0.unchecked.as_ref().unwrap_or(self)
    }

    #[inline]
    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.0.backend
    }

    /// True if both are handles to the same hardware, so that a stream on one can access memory on the other by
    /// address.
    #[inline]
    pub(crate) fn shares_hardware_with(&self, other: &Self) -> bool {
        self.unchecked() == other.unchecked()
    }

    /// True if the two devices copy directly between their memories: both are GPUs, or one engine runs both. Each
    /// simulation has its own engine, which does not know the streams and events of other engines.
    #[inline]
    pub(crate) fn copies_with(&self, other: &Self) -> bool {
        self == other || self.is_host() || other.is_host() || self.0.kind == other.0.kind
    }

    #[inline]
    pub(crate) fn tracked(&self) -> bool {
        self.0.tracked.load(Ordering::Relaxed)
    }

    /// A test hook: buffers on this device no longer order the device's streams that use them, so that the race checker
    /// has something to find. Streams of other handles, which the checker might not see, are still ordered.
    ///
    /// # Panics
    /// If the device has no race checker: safe code would race undetected.
    #[doc(hidden)]
    pub fn switch_tracking_off(&self) {
        assert!(self.0.backend.is_checked(), "switching the tracking off requires the race checker");
        self.0.tracked.store(false, Ordering::Relaxed);
    }

    /// The value that a layer above stores for this device: created at first use, dropped with the device.
    #[inline]
    pub(crate) fn extension<T: Any + Send + Sync>(&self, make: impl FnOnce(&Self) -> Arc<T>) -> Arc<T> {
        let mut make = Some(make);
        for slot in &self.0.extensions {
            let (of, value) = slot.get_or_init(|| match make.take() {
                Some(make) => (TypeId::of::<T>(), make(self) as Arc<dyn Any + Send + Sync>),
                None => unreachable!("`make` is called for one slot only, which is then returned"),
            });
            if *of == TypeId::of::<T>()
                && let Ok(found) = value.clone().downcast::<T>()
            {
                return found;
            }
        }
        unreachable!("there are more slots than extensions in the crate")
    }

    pub(crate) fn downgrade(&self) -> WeakDevice {
        WeakDevice(Arc::downgrade(&self.0))
    }
}

/// A weak handle, for values that a device owns and that refer back to it.
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
            Some(("emulated", _)) => Err(Error::new(
                ErrorKind::NoDevice,
                format!("`{name}` cannot be opened by its number: write `emulated`, which makes a new emulated device"),
            )),
            _ => Err(Error::new(
                ErrorKind::NoDevice,
                format!("`{name}` is not a device: write `cuda:0`, `cuda:1`, ..., `emulated` or `host`"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Listener(Arc<Mutex<Vec<&'static str>>>);

    struct Held(Arc<Mutex<Vec<&'static str>>>);

    impl Drop for Held {
        fn drop(&mut self) {
            lock(&self.0).push("released");
        }
    }

    impl LossObserver for Listener {
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

    /// A flow can wait on several objects: it is idle only once all of them are notified.
    #[test]
    fn all_are_held_while_they_are_notified_of_a_loss() {
        let (device, calls) = (Device::emulated(Emulated::new()), Arc::default());
        let observers = [(); 2].map(|()| Arc::new(Listener(Arc::clone(&calls))));
        for observer in &observers {
            let weak: Weak<dyn LossObserver> = Arc::downgrade(observer) as Weak<dyn LossObserver>;
            device.on_loss(weak);
        }
        device.notify_lost();
        assert_eq!(*lock(&calls), ["held", "held", "notified", "notified", "released", "released"]);
    }
}
