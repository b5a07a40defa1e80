//! The one seam between the framework and the hardware.
//!
//! A [`Backend`] only enqueues: apart from the calls that say otherwise it never waits for the device. Two exist,
//! [`cuda`](super::cuda) and [`emulated`](super::emulated); the race checker ([`check`](super::check)) wraps either.
//! Everything above is written once, against this trait.
//!
//! Handles are plain numbers, so that a backend may be a decorator of another: what owns them (streams, events,
//! buffers) lives above the seam. Every call that touches memory says which bytes it reads and writes, so that the
//! checker can know order from these calls alone, never from the tracker that it checks.

use std::{
    ffi::c_void,
    fmt,
    ptr::NonNull,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use smallvec::SmallVec;

use super::{KernelType, emulated::simulation::SimulationHandle};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Discarded;

/// What every allocation is aligned to, and so the most that elements may ask for.
pub(crate) const MOST_ALIGNMENT: usize = 256;

/// A place in a device's memory. No host pointer, even on the emulated device: only copies and kernels reach it.
/// Addresses of all the devices of a process differ.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Address(pub(crate) u64);

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A stream of one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawStream(pub(crate) u64);

impl RawStream {
    /// The legacy default stream, which every device has.
    pub(crate) const DEFAULT: Self = Self(0);
}

/// An event of one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawEvent(pub(crate) u64);

/// A graph of one backend: nodes and what comes after what, to make execs of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawGraph(pub(crate) u64);

/// A node of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawNode(pub(crate) u64);

/// A graph as it can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawExec(pub(crate) u64);

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Host memory. Copies are asynchronous only if it is page-locked ([`Backend::alloc_host`]).
    Host(*mut u8),
    /// Memory of this device or, on one end of a copy, of another device of the same kind.
    Device(Address),
}

// SAFETY: a place is a number until a backend copies from or to it, and whoever enqueues that copy vouches (the calls
// are unsafe) that the memory stays valid until it is done, on whatever thread that happens.
unsafe impl Send for Place {}
// SAFETY: as above; nothing is read or written through a shared place.
unsafe impl Sync for Place {}

/// What a fill repeats: the low `width` bytes of `bits`. `width` is 1, 2 or 4, and divides the address and the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub(crate) width: usize,
    pub(crate) bits: u32,
}

/// How a stream is made.
#[derive(Clone, Debug)]
pub(crate) struct StreamSpec {
    /// For people: logs, the checker's reports.
    pub(crate) name: String,
    /// Lower is more urgent, as in CUDA; clamped to what the device has.
    pub(crate) priority: i32,
    /// Does not order itself with the legacy default stream.
    pub(crate) non_blocking: bool,
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// Not in use by anybody, as the driver says.
    pub free: u64,
    /// All the device has.
    pub total: u64,
}

/// Where a kernel's device code comes from.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub enum Source {
    /// CUDA C++: compiled by NVRTC, once a process and device architecture.
    Cuda(&'static str),
    /// PTX made beforehand: the driver compiles it when it is loaded.
    Ptx(&'static str),
    /// Machine code made beforehand for one architecture.
    Cubin(&'static [u8]),
    /// None: the kernel runs on the emulated device alone.
    None,
}

/// A kernel as `#[kernel]` declares it, in a `static`.
#[doc(hidden)]
pub struct KernelDef {
    /// The function's name, in Rust and in the device code.
    pub name: &'static str,
    /// The device code's file, as it was written in the attribute; for the compiler's log.
    pub file: &'static str,
    /// Where it was declared: `file.rs:line`.
    pub declared: &'static str,
    /// The device code.
    pub source: Source,
    /// The C++ declaration that the Rust signature stands for, without `extern "C" __global__`:
    /// declarations of the types it needs and then `void name(const float* x, unsigned long long x_len, float a)`.
    pub prototype: fn() -> Prototype,
    /// The Rust body.
    ///
    /// # Safety
    /// The arguments are those of the declaration, in order; each slice is valid for its length, aligned for its type,
    /// and, if written, touched by nobody else for the length of the call.
    pub body: unsafe fn(&[BodyArg]),
    /// [`Known::new`].
    pub known: Known,
}

/// A kernel's number in the process, by which a device finds what it keeps for the kernel: given when it is first asked for.
#[derive(Debug, Default)]
#[doc(hidden)]
pub struct Known(OnceLock<usize>);

impl Known {
    /// No number yet.
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }

    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the emulated device looks nothing up"))]
    #[inline]
    pub(crate) fn number(&self) -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        *self.0.get_or_init(|| NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Debug for KernelDef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("name", &self.name).field("file", &self.file).finish_non_exhaustive()
    }
}

/// See [`KernelDef::prototype`].
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Prototype {
    /// What has to stand before it: declarations of types of the user's (`struct Point;`), or nothing.
    pub types: String,
    /// `void name(const float* x, unsigned long long x_len, float a)`
    pub function: String,
}

/// An argument as the Rust body gets it, on the emulated device.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub enum BodyArg {
    /// A slice: its first element and its length in elements.
    Slice(*mut u8, usize),
    /// A scalar.
    Scalar(Scalar),
}

impl BodyArg {
    /// A slice argument.
    ///
    /// # Safety
    /// It is a slice of `T`, valid and not written to for `'a`.
    pub unsafe fn slice<'a, T: KernelType>(&self) -> &'a [T] {
        match self {
            // SAFETY: this function's contract.
            Self::Slice(first, len) => unsafe { std::slice::from_raw_parts(first.cast::<T>(), *len) },
            Self::Scalar(_) => unreachable!("the generated launch passes a slice here"),
        }
    }

    /// A slice argument that the kernel writes.
    ///
    /// # Safety
    /// It is a slice of `T`, valid and touched by nobody else for `'a`.
    pub unsafe fn slice_mut<'a, T: KernelType>(&self) -> &'a mut [T] {
        match self {
            // SAFETY: this function's contract.
            Self::Slice(first, len) => unsafe { std::slice::from_raw_parts_mut(first.cast::<T>(), *len) },
            Self::Scalar(_) => unreachable!("the generated launch passes a slice here"),
        }
    }

    /// A scalar argument.
    pub fn scalar<T: KernelType>(&self) -> T {
        match self {
            Self::Scalar(scalar) => bytemuck::pod_read_unaligned(&scalar.bytes[..size_of::<T>()]),
            Self::Slice(..) => unreachable!("the generated launch passes a scalar here"),
        }
    }
}

/// A scalar argument by value: up to 64 bytes, aligned for anything.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
#[doc(hidden)]
pub struct Scalar {
    /// Its bytes, the first `size` of them.
    pub bytes: [u8; 64],
    /// How many.
    pub size: usize,
}

impl Scalar {
    /// Bytes.
    pub(crate) const MOST: usize = 64;

    pub(crate) fn new(value: &[u8]) -> Self {
        let mut bytes = [0; Self::MOST];
        bytes[..value.len()].copy_from_slice(value);
        Self { bytes, size: value.len() }
    }
}

impl fmt::Debug for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scalar({:02x?})", &self.bytes[..self.size])
    }
}

/// An argument as a launch passes it to the seam.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    /// A slice in this device's memory. The device code gets a pointer and a 64-bit length in elements.
    Slice {
        address: Address,
        /// Elements.
        len: u64,
        /// Bytes.
        bytes: u64,
        write: bool,
    },
    /// A scalar's bytes, at an address that is aligned for it: at most [`Scalar::MOST`] of them.
    Scalar(&'a [u8]),
}

/// One launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'static KernelDef,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub(crate) shared_bytes: u32,
    pub(crate) args: &'a [Arg<'a>],
}

/// Work that another library enqueues.
pub(crate) struct External<'a> {
    /// For people.
    pub(crate) name: &'static str,
    /// All that it touches; no scalars.
    pub(crate) args: &'a [Arg<'a>],
    /// Enqueues it, given the driver's handle of the stream. Called once, or not at all.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "no device here has a driver"))]
    pub(crate) call: &'a mut dyn FnMut(*mut c_void),
    /// What the emulated device does in its place.
    pub(crate) emulated: Option<Emulation>,
}

/// A kernel's body that some work stands in with; run again at each launch of a graph.
pub(crate) type Emulation = Arc<dyn Fn(&[BodyArg]) + Send + Sync + 'static>;

/// What a host function does. It runs on a thread of the backend's, must not call the device and must not wait.
pub(crate) type HostFunction = Box<dyn FnOnce() + Send + 'static>;

/// The same, called at each launch of a graph.
pub(crate) type HostCallback = Arc<dyn Fn() + Send + Sync + 'static>;

/// A function of the user's. The drop of its last handle contains a panic of what it has captured.
pub(crate) fn host_callback(function: impl Fn() + Send + Sync + 'static) -> HostCallback {
    let function = Discarded::new(function);
    Arc::new(move || function.get().into_iter().for_each(|function| function()))
}

/// What a backend calls with the fault that ended its device.
pub(crate) type TellsOfLoss = Box<dyn Fn(Error) + Send + Sync>;

/// What a node of a graph does.
#[derive(Clone)]
pub(crate) enum NodeWork<'a> {
    Kernel(Launch<'a>),
    Copy {
        to: Place,
        from: Place,
        bytes: u64,
    },
    Fill {
        to: Address,
        pattern: Pattern,
        bytes: u64,
    },
    Host(HostCallback),
    /// Joins what it comes after.
    Empty,
    /// All of another graph, as it is now: one that makes no memory and has no conditions.
    Child(RawGraph),
    Record(RawEvent),
    /// For the event's last record before the launch.
    Wait(RawEvent),
    /// Gives memory back that a node of [`Backend::graph_add_alloc`] has made.
    Free(Address),
}

/// When the graph within a node runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Once, if the flag is not 0 when its turn comes.
    If,
    /// Again and again, as long as the flag is not 0 before each round.
    While,
}

/// What [`Backend::graph_external`] has added.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorded {
    /// Whoever comes after all of it comes after these.
    pub(crate) ends: SmallVec<[RawNode; 2]>,
    /// How many nodes.
    pub(crate) nodes: usize,
    /// Copies between host and device among them: for people, `host to device`, and how many bytes.
    pub(crate) host_copies: SmallVec<[(&'static str, u64); 1]>,
}

/// An exec was not changed.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    /// Which node it was for.
    pub(crate) node: Option<RawNode>,
    /// For people: `its topology is another one`.
    pub(crate) why: String,
}

/// A device, as low as wakeline knows it. See the [module](self).
///
/// Errors: [`DeviceLost`](crate::ErrorKind::DeviceLost) from any call once a fault has ended the device,
/// [`OutOfMemory`](crate::ErrorKind::OutOfMemory) from the allocations, [`Driver`](crate::ErrorKind::Driver) otherwise.
pub(crate) trait Backend: fmt::Debug + Send + Sync + 'static {
    /// `cuda:0`, `emulated:3`.
    fn name(&self) -> &str;

    /// The device's make, for people: `NVIDIA H200`, `emulated, 64 MiB`.
    fn description(&self) -> String;

    /// Makes the device the calling thread's, for libraries that look for it there (cuBLAS, cudarc).
    fn make_current(&self) -> Result<()>;

    /// Free and total bytes.
    fn memory(&self) -> Result<MemoryInfo>;

    /// Device memory, aligned to [`MOST_ALIGNMENT`], usable at once on any stream. `bytes` is not zero. May block shortly.
    fn alloc(&self, bytes: u64) -> Result<Address>;

    /// Gives memory back. Never waits for the device.
    ///
    /// # Safety
    /// It came from [`alloc`](Self::alloc) here, and nothing enqueued may still touch it.
    unsafe fn free(&self, address: Address) -> Result<()>;

    /// Sizes that [`alloc`](Self::alloc) rounds up by itself: asking for so much more costs nothing. 1: it rounds nothing.
    fn granularity(&self) -> u64 {
        1
    }

    /// Device memory for work that is enqueued into this stream from now on, and for what comes after that. Never waits.
    ///
    /// # Errors
    /// Also while memory that was given back by [`free_on`](Self::free_on) is still in use.
    fn alloc_on(&self, stream: RawStream, bytes: u64) -> Result<Address>;

    /// Gives memory back once the work that is in this stream now is done.
    ///
    /// # Safety
    /// It came from [`alloc_on`](Self::alloc_on) here, and nothing enqueued may still touch it but what this stream comes
    /// after.
    unsafe fn free_on(&self, stream: RawStream, address: Address) -> Result<()>;

    /// Whether it wants to hear of memory that is used again: [`recycle`](Self::recycle).
    fn wants_recycled(&self) -> bool {
        false
    }

    /// Memory is somebody else's from now on, and what it holds is worth nothing any more: it is filled as fresh memory is.
    /// In its turn in a stream; without one now, and then nothing that is enqueued touches it.
    ///
    /// # Safety
    /// The memory is valid for `bytes` until that is done.
    unsafe fn recycle(&self, stream: Option<RawStream>, address: Address, bytes: u64) -> Result<()> {
        let _ = (stream, address, bytes);
        Ok(())
    }

    /// Page-locked host memory, initialised, aligned to [`MOST_ALIGNMENT`]. `bytes` is not zero. May block.
    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Gives host memory back. Never waits for the device.
    ///
    /// # Safety
    /// It came from [`alloc_host`](Self::alloc_host) here with this many bytes, and nothing enqueued may still touch it.
    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()>;

    /// The least and the greatest urgency that a stream can have: 0 and -5.
    fn stream_priorities(&self) -> (i32, i32) {
        (0, 0)
    }

    /// A new stream.
    fn stream_create(&self, spec: &StreamSpec) -> Result<RawStream>;

    /// The stream has another user, and another name for people.
    fn stream_rename(&self, stream: RawStream, name: &str) {
        let _ = (stream, name);
    }

    /// Ends a stream. Work already in it still runs.
    fn stream_destroy(&self, stream: RawStream);

    /// True if all its work is done. Never waits. Reports a fault of the device.
    fn stream_query(&self, stream: RawStream) -> Result<bool>;

    /// Waits, blocking the thread, until all its work is done. For teardown and tests; never called on a message's path.
    fn stream_synchronize(&self, stream: RawStream) -> Result<()>;

    /// A new event: one that can tell times if `timed`.
    fn event_create(&self, timed: bool) -> Result<RawEvent>;

    /// Ends an event. Waits and host functions that were enqueued behind it still happen.
    fn event_destroy(&self, event: RawEvent);

    /// Marks the stream's present end.
    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// True if what came before the last record is done (true too if never recorded). Never waits. Reports a fault.
    fn event_query(&self, event: RawEvent) -> Result<bool>;

    /// Time on the device between two timed events whose work is done.
    fn event_elapsed(&self, from: RawEvent, to: RawEvent) -> Result<Duration>;

    /// Work enqueued into `stream` from now on waits for the event's last record. The event may be another device's
    /// of the same kind.
    fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes.
    ///
    /// # Safety
    /// Both ends are valid for `bytes` until the copy is done.
    unsafe fn copy(&self, stream: RawStream, to: Place, from: Place, bytes: u64) -> Result<()>;

    /// Enqueues a fill of `bytes` bytes.
    ///
    /// # Safety
    /// The memory is valid for `bytes` until the fill is done.
    unsafe fn fill(&self, stream: RawStream, to: Address, pattern: Pattern, bytes: u64) -> Result<()>;

    /// Compiles and loads a kernel, unless that was done before in this process. Slow the first time, and blocking:
    /// not for a runtime's worker.
    fn load(&self, kernel: &'static KernelDef) -> Result<()>;

    /// Enqueues a kernel. Loads it first if nobody has.
    ///
    /// # Safety
    /// The arguments are those of the declaration and valid until the kernel is done.
    unsafe fn launch(&self, stream: RawStream, launch: &Launch<'_>) -> Result<()>;

    /// Lets another library enqueue work, with the device current, or enqueues what stands in for it. If it fails, nothing
    /// was enqueued and nobody was called.
    ///
    /// # Safety
    /// What is enqueued goes into this stream and touches no memory of the device's but the arguments, each of them valid
    /// until it is done. What stands in takes the arguments as they are.
    unsafe fn external(&self, stream: RawStream, external: External<'_>) -> Result<()> {
        let _ = stream;
        let message = format!("external work `{}`: {} runs none", external.name, self.name());
        Err(Error::new(ErrorKind::Usage, message))
    }

    /// An empty graph. Graphs are not shared: its calls are made by one thread at a time.
    fn graph_create(&self) -> Result<RawGraph> {
        Err(no_graphs(self.name()))
    }

    /// Ends a graph. Its execs stay.
    fn graph_destroy(&self, graph: RawGraph) {
        let _ = graph;
    }

    /// A node that comes after others of the graph.
    ///
    /// # Safety
    /// As for the call that enqueues the same work, for as long as an exec of the graph, or of one that it is a child of,
    /// may be launched or runs.
    unsafe fn graph_add(&self, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> Result<RawNode> {
        let _ = (graph, after, work);
        Err(no_graphs(self.name()))
    }

    /// A node that makes memory when its turn comes, at an address that is known now and stays: to be used by nodes that
    /// come after it, and given back by one of them ([`NodeWork::Free`]). Such a graph has one exec at a time.
    fn graph_add_alloc(&self, graph: RawGraph, after: &[RawNode], bytes: u64) -> Result<(RawNode, Address)> {
        let _ = (graph, after, bytes);
        Err(no_graphs(self.name()))
    }

    /// A node with a graph within it, empty at first, which belongs to it: that runs as a flag says, an `u32` in this
    /// device's memory. Such a graph has one exec at a time.
    ///
    /// # Safety
    /// The flag is valid, as the memory of a kernel node would have to be.
    unsafe fn graph_add_conditional(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        when: Condition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        let _ = (graph, after, when, flag);
        Err(no_graphs(self.name()))
    }

    /// Lets another library enqueue work, as [`external`](Self::external) does, and makes nodes of it that come after
    /// others. If it fails nothing was added, or the graph is of no use any more, and says so when it is instantiated: a driver
    /// does not take back what a capture that broke has added.
    ///
    /// # Safety
    /// As for [`external`](Self::external) and [`graph_add`](Self::graph_add).
    unsafe fn graph_external(&self, graph: RawGraph, after: &[RawNode], external: External<'_>) -> Result<Recorded> {
        let _ = (graph, after, external);
        Err(no_graphs(self.name()))
    }

    /// One node comes after another, too. The caller sees to it that this makes no cycle.
    fn graph_order(&self, graph: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        let _ = (graph, before, after);
        Err(no_graphs(self.name()))
    }

    /// Takes a node out: what came after it comes after what that came after.
    fn graph_remove(&self, graph: RawGraph, node: RawNode) -> Result<()> {
        let _ = (graph, node);
        Err(no_graphs(self.name()))
    }

    /// The graph as it is now, to be launched. Slow.
    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawExec> {
        let _ = graph;
        Err(no_graphs(self.name()))
    }

    /// Ends an exec.
    ///
    /// # Safety
    /// Its launches are done.
    unsafe fn exec_destroy(&self, exec: RawExec) {
        let _ = exec;
    }

    /// Brings it to the device before its first launch, in its turn in the stream.
    fn exec_upload(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        let _ = (exec, stream);
        Err(no_graphs(self.name()))
    }

    /// Enqueues all of it. A launch comes after the one before it, whatever stream that was on.
    ///
    /// # Safety
    /// What its nodes use is valid until it is done.
    unsafe fn exec_launch(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        let _ = (exec, stream);
        Err(no_graphs(self.name()))
    }

    /// Makes of it what an instantiation of this graph would be, for launches from now on: a graph of the same nodes in the
    /// same order, whose parameters may differ.
    ///
    /// # Safety
    /// As for [`graph_add`](Self::graph_add). The graph stays until the launches that do what it does are done.
    unsafe fn exec_update(&self, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
        let _ = (exec, graph);
        Err(no_graphs(self.name()))
    }

    /// Gives one node of the graph that it was made of other parameters, for launches from now on: work of the same kind. A
    /// host function is kept until [`callback_over`](Self::callback_over), or as long as the exec.
    ///
    /// # Safety
    /// As for [`graph_add`](Self::graph_add).
    unsafe fn exec_set(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
        let _ = (exec, node, work);
        Err(no_graphs(self.name()))
    }

    /// Whether launches from now on run a node, a kernel, a copy or a fill, or pass over it.
    fn exec_enable(&self, exec: RawExec, node: RawNode, enabled: bool) -> Result<Result<(), Refused>> {
        let _ = (exec, node, enabled);
        Err(no_graphs(self.name()))
    }

    /// No launch calls a host function any more that a node was set to.
    fn callback_over(&self, function: &HostCallback) {
        let _ = function;
    }

    /// Calls this once a fault has ended the device that no call's answer may have told of: where an event is destroyed, say.
    /// On a thread of its own; not for a fault of before.
    fn when_lost(&self, tell: TellsOfLoss) {
        let _ = tell;
    }

    /// True once a fault has ended the device and none of its work runs any more, nor ever will: then nothing of it touches
    /// memory. False where that is not known. A driver does not say it: a fault of one kernel is reported while others run.
    fn has_ended(&self) -> bool {
        false
    }

    /// The simulation that polls the calling task, if it runs this device.
    fn simulation(&self) -> Option<SimulationHandle> {
        None
    }

    /// The context of a CUDA device.
    #[cfg(feature = "cuda")]
    fn cuda_context(&self) -> Option<&std::sync::Arc<cudarc::driver::CudaContext>> {
        None
    }

    /// Enqueues a function of the host: takes it from where it lies. It is called once, or never if the device is lost, and
    /// dropped in any case. A panic in it ends there and is logged. One that is refused lies where it was: what it captured may
    /// call back into the device as it is dropped, so the caller drops it once it holds no lock.
    fn host_function(&self, stream: RawStream, function: &mut Option<HostFunction>) -> Result<()>;

    /// The same for one that can be called again, as it is where this is recorded into a graph. The caller keeps it until it
    /// holds no lock.
    fn host_callback(&self, stream: RawStream, function: HostCallback) -> Result<()> {
        self.host_function(stream, &mut Some(Box::new(move || function())))
    }

    /// How many kernels, copies, fills and launches of graphs a stream takes before the call that enqueues one more waits for
    /// the device, and holds up others; `None` where none waits. Events, waits and host functions do not count.
    fn queue_depth(&self) -> Option<u64> {
        None
    }

    /// True where an address, a stream or an event that has ended may come again as another.
    fn reuses_handles(&self) -> bool {
        false
    }

    /// True if the race checker stands before it.
    fn is_checked(&self) -> bool {
        false
    }

    /// The host touches memory of [`alloc_host`](Self::alloc_host) itself, now. Only the race checker listens.
    fn host_access(&self, memory: *const u8, bytes: usize, write: bool) -> Result<()> {
        let _ = (memory, bytes, write);
        Ok(())
    }

    /// The host borrows such memory, as `&mut [u8]` if `exclusive`. When the borrow ends is not known: what proves its end is
    /// a node of a graph that is added later and uses the memory in a way that the borrow would not allow. A launch of a node
    /// that was added before the borrow may run beside it. Only the race checker listens.
    fn host_borrow(&self, memory: *const u8, bytes: usize, exclusive: bool) {
        let _ = (memory, bytes, exclusive);
    }
}

#[cold]
fn no_graphs(name: &str) -> Error {
    Error::new(ErrorKind::Usage, format!("{name} has no graphs"))
}
