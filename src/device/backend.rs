//! The interface between the framework and the hardware.
//!
//! A [`Backend`] only enqueues: no call waits for the device unless its documentation says so. [`cuda`](super::cuda)
//! and [`emulated`](super::emulated) are the devices that run work; the race checker ([`check`](super::check)) wraps
//! either.
//!
//! Handles are plain numbers, so that one backend can wrap another; the layers above own streams, events and buffers.
//! Every call that accesses memory states which bytes it reads and writes, so that the checker derives order from these
//! calls alone, never from the tracking that it checks.

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
use tokio::time::Instant;

use super::{CudaTypes, KernelType, emulated::simulation::SimulationHandle};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::DiscardOnDrop;

/// The alignment of every allocation, and therefore the maximum alignment of an element.
pub(crate) const MAX_ALIGNMENT: usize = 256;

/// An address in a device's memory, never a host pointer. Addresses of all devices of a process are distinct.
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

/// A graph of one backend: nodes and their dependencies, from which execs are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawGraph(pub(crate) u64);

/// A node of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawNode(pub(crate) u64);

/// A graph that was instantiated and can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawExec(pub(crate) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// Host memory. A copy is asynchronous only if the memory is page-locked ([`Backend::alloc_host`]).
    Host(*mut u8),
    /// Memory of this device or, on one end of a copy, of another device of the same kind.
    Device(Address),
}

// SAFETY: an endpoint is a number until a backend copies from or to it. The caller that enqueues the copy guarantees
// (the calls are unsafe) that the memory stays valid until the copy is done, on whatever thread that happens.
unsafe impl Send for Endpoint {}
// SAFETY: as above; nothing is read or written through a shared endpoint.
unsafe impl Sync for Endpoint {}

/// The pattern of a fill: the low `width` bytes of `bits`. `width` is 1, 2 or 4, and divides the address and the
/// length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub(crate) width: usize,
    pub(crate) bits: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct StreamSpec {
    /// For logs and for the race checker's reports.
    pub(crate) name: String,
    /// Lower is more urgent, as in CUDA; clamped to the device's range.
    pub(crate) priority: i32,
    /// Not ordered with the legacy default stream.
    pub(crate) non_blocking: bool,
}

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// The bytes that no process uses, as reported by the driver.
    pub free: u64,
    /// The device's total memory.
    pub total: u64,
}

/// A kernel's device code.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub enum KernelSource {
    /// CUDA C++, compiled by NVRTC once per process and device architecture.
    Cuda(&'static str),
    /// PTX compiled beforehand; the driver compiles it further when it is loaded.
    Ptx(&'static str),
    /// Machine code for one architecture, compiled beforehand.
    Cubin(&'static [u8]),
    /// No device code: the kernel runs on the emulated device only.
    None,
}

/// A kernel as `#[kernel]` declares it, in a `static`.
#[doc(hidden)]
pub struct KernelDef {
    /// The function's name, in Rust and in the device code.
    pub name: &'static str,
    /// The device code's file, as written in the attribute; for the compiler's log.
    pub file: &'static str,
    /// The place of the declaration: `file.rs:line`.
    pub declared: &'static str,
    /// The device code.
    pub source: KernelSource,
    /// The C++ declaration for the Rust signature, without `extern "C" __global__`, such as
    /// `void name(const float* x, unsigned long long x_len, float a)`. Adds the declarations of the types that it needs.
    pub prototype: fn(&mut CudaTypes) -> String,
    /// The Rust body.
    ///
    /// # Safety
    /// The arguments are those of the declaration, in order; each slice is valid for its length, aligned for its type,
    /// and, if written, not accessed by anything else for the duration of the call.
    pub body: unsafe fn(&[BodyArg]),
    /// [`KernelNumber::new`].
    pub number: KernelNumber,
}

/// A kernel's number, unique in the process, by which a device looks up its data for the kernel. Assigned at first use.
#[derive(Debug, Default)]
#[doc(hidden)]
pub struct KernelNumber(OnceLock<usize>);

impl KernelNumber {
    /// No number yet.
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }

    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the emulated device looks nothing up"))]
    #[inline]
    pub(crate) fn get(&self) -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        *self.0.get_or_init(|| NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Debug for KernelDef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("name", &self.name).field("file", &self.file).finish_non_exhaustive()
    }
}

/// An entry in the program's list of all kernels.
#[doc(hidden)]
#[derive(Debug)]
pub struct Registered(pub &'static KernelDef);

inventory::collect!(Registered);

/// An argument as it is passed to the Rust body on the emulated device.
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
    /// It is a slice of `T`, valid and not accessed by anything else for `'a`.
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

/// A scalar argument by value: up to 64 bytes, aligned for any type.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
#[doc(hidden)]
pub struct Scalar {
    /// The value is in the first `size` bytes.
    pub bytes: [u8; 64],
    /// The number of bytes.
    pub size: usize,
}

impl Scalar {
    /// The largest size, in bytes.
    pub(crate) const MAX_BYTES: usize = 64;

    pub(crate) fn new(value: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX_BYTES];
        bytes[..value.len()].copy_from_slice(value);
        Self { bytes, size: value.len() }
    }
}

impl fmt::Debug for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scalar({:02x?})", &self.bytes[..self.size])
    }
}

/// An argument as a launch passes it to the backend.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg<'a> {
    /// A slice in this device's memory. The device code gets a pointer and a 64-bit length in elements.
    Slice { address: Address, len: u64, bytes: u64, write: bool },
    /// A scalar's bytes, at an address that is aligned for its type: at most [`Scalar::MAX_BYTES`] bytes.
    Scalar(&'a [u8]),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'static KernelDef,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) args: &'a [Arg<'a>],
}

pub(crate) struct ExternalWork<'a> {
    /// For messages.
    pub(crate) name: &'static str,
    /// All memory that the work accesses, without scalars.
    pub(crate) args: &'a [Arg<'a>],
    /// Enqueues the work, given the driver's handle of the stream. Called at most once.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "no device here has a driver"))]
    pub(crate) call: &'a mut dyn FnMut(*mut c_void),
    /// The body that the emulated device runs instead.
    pub(crate) emulated: Option<Emulation>,
}

/// The body that replaces external work on the emulated device. In a graph it runs at each launch.
pub(crate) type Emulation = Arc<dyn Fn(&[BodyArg]) + Send + Sync + 'static>;

/// A host function. It runs on a thread of the backend, and must neither call the device nor wait.
pub(crate) type HostFunction = Box<dyn FnOnce() + Send + 'static>;

/// A host function that is called at each launch of a graph.
pub(crate) type HostCallback = Arc<dyn Fn() + Send + Sync + 'static>;

/// Wraps a user's function. When the last handle is dropped, a panic in a destructor of a captured value is contained.
pub(crate) fn host_callback(function: impl Fn() + Send + Sync + 'static) -> HostCallback {
    let function = DiscardOnDrop::new(function);
    Arc::new(move || function.get().into_iter().for_each(|function| function()))
}

/// A function that a backend calls with the fault that ended its device.
pub(crate) type LossHandler = Box<dyn Fn(Error) + Send + Sync>;

/// The work of a node of a graph.
#[derive(Clone)]
pub(crate) enum NodeWork<'a> {
    Kernel(Launch<'a>),
    Copy {
        to: Endpoint,
        from: Endpoint,
        bytes: u64,
    },
    Fill {
        to: Address,
        pattern: Pattern,
        bytes: u64,
    },
    Host(HostCallback),
    /// Joins its predecessors.
    Empty,
    /// A copy of another graph as it is now, which allocates no memory and has no conditional nodes.
    Child(RawGraph),
    Record(RawEvent),
    /// Waits for the event's last record before the launch.
    Wait(RawEvent),
    /// Frees memory allocated by a node that [`Backend::graph_add_alloc`] added.
    Free(Address),
}

/// The condition under which the body of a conditional node runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GraphCondition {
    /// Once, if the flag is not 0 when the node is reached.
    If,
    /// Repeatedly, as long as the flag is not 0 before an iteration.
    While,
}

/// The nodes that [`Backend::graph_external`] added.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExternalNodes {
    /// The nodes that a successor of the whole work must depend on.
    pub(crate) ends: SmallVec<[RawNode; 2]>,
    pub(crate) nodes: usize,
    /// The copies between host and device among these nodes: the direction, such as `host to device`, and the number of
    /// bytes.
    pub(crate) host_copies: SmallVec<[(&'static str, u64); 1]>,
}

/// The reason why a change to an exec was refused.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    /// The node that caused the refusal, if known.
    pub(crate) node: Option<RawNode>,
    /// The reason, for messages: `its topology is another one`.
    pub(crate) why: String,
}

/// A device at the lowest level. See the [module](self).
///
/// Errors: [`DeviceLost`](crate::ErrorKind::DeviceLost) from any call once a fault has ended the device,
/// [`OutOfMemory`](crate::ErrorKind::OutOfMemory) from the allocations, [`Driver`](crate::ErrorKind::Driver) otherwise.
pub(crate) trait Backend: fmt::Debug + Send + Sync + 'static {
    /// `cuda:0`, `emulated:3`.
    fn name(&self) -> &str;

    /// The device's model: `NVIDIA H200`, `emulated, 64 MiB`.
    fn description(&self) -> String;

    /// Makes the device the calling thread's current one, for libraries that expect it there (cuBLAS, cudarc).
    fn make_current(&self) -> Result<()>;

    fn memory(&self) -> Result<MemoryInfo>;

    /// Allocates device memory, aligned to [`MAX_ALIGNMENT`] and usable on any stream. `bytes` is not zero. May block
    /// briefly.
    fn alloc(&self, bytes: u64) -> Result<Address>;

    /// Frees memory. Never waits for the device.
    ///
    /// # Safety
    /// The memory came from [`alloc`](Self::alloc) of this backend, and no enqueued work still accesses it.
    unsafe fn free(&self, address: Address) -> Result<()>;

    /// The size to multiples of which [`alloc`](Self::alloc) rounds up.
    fn granularity(&self) -> u64 {
        1
    }

    /// Allocates device memory for work that is enqueued into this stream later, or is ordered after such work. Never
    /// waits.
    ///
    /// # Errors
    /// Can fail while memory freed by [`free_on`](Self::free_on) is still in use.
    fn alloc_on(&self, stream: RawStream, bytes: u64) -> Result<Address>;

    /// Frees memory once the work that is now in this stream is done.
    ///
    /// # Safety
    /// The memory came from [`alloc_on`](Self::alloc_on) of this backend, and no enqueued work still accesses it,
    /// except work that is ordered before this point in the stream.
    unsafe fn free_on(&self, stream: RawStream, address: Address) -> Result<()>;

    /// True if [`recycle`](Self::recycle) must be called when memory is reused.
    fn wants_recycled(&self) -> bool {
        false
    }

    /// Gives memory to a new owner: its contents become invalid, and it is filled like fresh memory. This happens in
    /// stream order or, if no stream is given, at once; in that case no enqueued work may access the memory.
    ///
    /// # Safety
    /// The memory is valid for `bytes` until the call has taken effect.
    unsafe fn recycle(&self, stream: Option<RawStream>, address: Address, bytes: u64) -> Result<()> {
        let _ = (stream, address, bytes);
        Ok(())
    }

    /// Allocates page-locked host memory, initialised, aligned to [`MAX_ALIGNMENT`]. `bytes` is not zero. May block.
    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Frees host memory. Never waits for the device.
    ///
    /// # Safety
    /// The memory came from [`alloc_host`](Self::alloc_host) of this backend with the same `bytes`, and no enqueued
    /// work still accesses it.
    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()>;

    /// The least and the most urgent priority that a stream can have, such as 0 and -5.
    fn stream_priorities(&self) -> (i32, i32) {
        (0, 0)
    }

    fn stream_create(&self, spec: &StreamSpec) -> Result<RawStream>;

    /// Renames a stream that was handed to another user.
    fn stream_rename(&self, stream: RawStream, name: &str) {
        let _ = (stream, name);
    }

    /// Destroys a stream. Work already in it still runs.
    fn stream_destroy(&self, stream: RawStream);

    /// True if all work in the stream is done. Never waits. Reports a fault of the device.
    fn stream_query(&self, stream: RawStream) -> Result<bool>;

    /// [`stream_query`](Self::stream_query), to measure: nothing is ordered by the answer.
    fn stream_is_idle(&self, stream: RawStream) -> Result<bool> {
        self.stream_query(stream)
    }

    /// Blocks the thread until all work in the stream is done. For teardown and tests only.
    fn stream_synchronize(&self, stream: RawStream) -> Result<()>;

    /// Creates an event, which measures time if `timed`.
    fn event_create(&self, timed: bool) -> Result<RawEvent>;

    /// Destroys an event. Waits and host functions that were enqueued behind the event still take effect.
    fn event_destroy(&self, event: RawEvent);

    /// Records the event at the current end of the stream.
    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// True if the work before the event's last record is done, or if the event was never recorded. Never waits.
    /// Reports a fault.
    fn event_query(&self, event: RawEvent) -> Result<bool>;

    /// [`event_query`](Self::event_query), to measure: nothing is ordered by the answer.
    fn event_is_passed(&self, event: RawEvent) -> Result<bool> {
        self.event_query(event)
    }

    /// The time on the device between two timed events that the device has reached.
    fn event_elapsed(&self, from: RawEvent, to: RawEvent) -> Result<Duration>;

    /// The same, `None` while the device has not reached `to`, which was recorded after `from` in the same stream. To measure:
    /// nothing is ordered by the answer.
    fn event_elapsed_if_passed(&self, from: RawEvent, to: RawEvent) -> Result<Option<Duration>> {
        Ok(if self.event_is_passed(to)? { Some(self.event_elapsed(from, to)?) } else { None })
    }

    /// How long the device takes to pass a timed event: the time between two with nothing between them. Zero if it is unknown.
    fn event_time(&self) -> Duration {
        Duration::ZERO
    }

    /// When, on tokio's clock, the device reached a timed event, which it has reached. `None` if the device has a clock
    /// of its own.
    fn event_instant(&self, event: RawEvent) -> Option<Result<Instant>> {
        let _ = event;
        None
    }

    /// Makes work that is enqueued into `stream` from now on wait for the event's last record. The event may belong to
    /// another device of the same kind.
    fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes.
    ///
    /// # Safety
    /// Both ends are valid for `bytes` until the copy is done.
    unsafe fn copy(&self, stream: RawStream, to: Endpoint, from: Endpoint, bytes: u64) -> Result<()>;

    /// Enqueues a fill of `bytes` bytes.
    ///
    /// # Safety
    /// The memory is valid for `bytes` until the fill is done.
    unsafe fn fill(&self, stream: RawStream, to: Address, pattern: Pattern, bytes: u64) -> Result<()>;

    /// Compiles and loads a kernel, once per process. Slow and blocking, so not for a runtime's worker thread.
    fn load(&self, kernel: &'static KernelDef) -> Result<()>;

    /// Enqueues a kernel, and loads it first if necessary.
    ///
    /// # Safety
    /// The arguments are those of the declaration and valid until the kernel is done.
    unsafe fn launch(&self, stream: RawStream, launch: &Launch<'_>) -> Result<()>;

    /// Lets another library enqueue work, with this device current, or enqueues the emulation in its place. If this
    /// fails, nothing was enqueued and `call` was not called.
    ///
    /// # Safety
    /// The work is enqueued into this stream and accesses no device memory but the arguments, which are valid until it
    /// is done. The emulation accepts these arguments.
    unsafe fn external(&self, stream: RawStream, external: ExternalWork<'_>) -> Result<()> {
        let _ = stream;
        let message = format!(
            "{} cannot run external work (`{}`): use a CUDA device or the emulated one",
            self.name(),
            external.name
        );
        Err(Error::new(ErrorKind::Usage, message))
    }

    /// Creates an empty graph. Graphs are not shared: only one thread at a time makes calls for a graph.
    fn graph_create(&self) -> Result<RawGraph> {
        Err(no_graphs(self.name()))
    }

    /// Destroys a graph. Its execs remain valid.
    fn graph_destroy(&self, graph: RawGraph) {
        let _ = graph;
    }

    /// Adds a node that depends on the nodes `after` of the same graph.
    ///
    /// # Safety
    /// The contract of the call that enqueues the same work, for as long as an exec of the graph, or of a graph with
    /// this one as a child, can be launched or is running.
    unsafe fn graph_add(&self, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> Result<RawNode> {
        let _ = (graph, after, work);
        Err(no_graphs(self.name()))
    }

    /// Adds a node that allocates memory when it runs, at an address that is fixed now. Only nodes that depend on this
    /// one may use the memory, and one of them may free it ([`NodeWork::Free`]). Such a graph can have one exec at a
    /// time.
    fn graph_add_alloc(&self, graph: RawGraph, after: &[RawNode], bytes: u64) -> Result<(RawNode, Address)> {
        let _ = (graph, after, bytes);
        Err(no_graphs(self.name()))
    }

    /// Adds a conditional node with an empty graph as its body. A flag, a `u32` in this device's memory, decides
    /// whether the body runs. A graph with such a node can have one exec at a time.
    ///
    /// # Safety
    /// The flag is valid for as long as memory used by a kernel node must be.
    unsafe fn graph_add_conditional(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        when: GraphCondition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        let _ = (graph, after, when, flag);
        Err(no_graphs(self.name()))
    }

    /// Like [`external`](Self::external), but adds the work as nodes that depend on the nodes `after`. If this fails,
    /// either nothing was added, or the graph is unusable and its instantiation fails, as a driver does not remove the
    /// nodes that a failed capture added.
    ///
    /// # Safety
    /// The contracts of [`external`](Self::external) and [`graph_add`](Self::graph_add).
    unsafe fn graph_external(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        external: ExternalWork<'_>,
    ) -> Result<ExternalNodes> {
        let _ = (graph, after, external);
        Err(no_graphs(self.name()))
    }

    /// Makes `after` depend on `before` too. The caller ensures that this does not create a cycle.
    fn graph_order(&self, graph: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        let _ = (graph, before, after);
        Err(no_graphs(self.name()))
    }

    /// Removes a node. Its successors then depend on its predecessors.
    fn graph_remove(&self, graph: RawGraph, node: RawNode) -> Result<()> {
        let _ = (graph, node);
        Err(no_graphs(self.name()))
    }

    /// Instantiates the graph as it is now. Slow.
    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawExec> {
        let _ = graph;
        Err(no_graphs(self.name()))
    }

    /// Destroys an exec.
    ///
    /// # Safety
    /// Its launches are done.
    unsafe fn exec_destroy(&self, exec: RawExec) {
        let _ = exec;
    }

    /// Uploads the exec to the device before its first launch, in stream order.
    fn exec_upload(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        let _ = (exec, stream);
        Err(no_graphs(self.name()))
    }

    /// Enqueues a launch. Launches of one exec run one after another, even on different streams.
    ///
    /// # Safety
    /// The memory that its nodes use is valid until the launch is done.
    unsafe fn exec_launch(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        let _ = (exec, stream);
        Err(no_graphs(self.name()))
    }

    /// Makes later launches do the work of this graph. It must have the same nodes as the exec's graph, in the same
    /// order; their parameters may differ.
    ///
    /// # Safety
    /// The contract of [`graph_add`](Self::graph_add). The graph is not destroyed before the launches that do its work
    /// are done.
    unsafe fn exec_update(&self, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
        let _ = (exec, graph);
        Err(no_graphs(self.name()))
    }

    /// Sets the parameters of one node of the exec's graph for later launches, to work of the same kind. A host
    /// function is kept until [`release_callback`](Self::release_callback), or as long as the exec.
    ///
    /// # Safety
    /// The contract of [`graph_add`](Self::graph_add).
    unsafe fn exec_set(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
        let _ = (exec, node, work);
        Err(no_graphs(self.name()))
    }

    /// Sets whether later launches run a node (a kernel, a copy or a fill) or skip it.
    fn exec_enable(&self, exec: RawExec, node: RawNode, enabled: bool) -> Result<Result<(), Refused>> {
        let _ = (exec, node, enabled);
        Err(no_graphs(self.name()))
    }

    /// Releases a function that was passed to [`exec_set`](Self::exec_set) and that no launch calls any more.
    fn release_callback(&self, function: &HostCallback) {
        let _ = function;
    }

    /// Registers a function to be called, on a separate thread, when the device has a fault. No call might have
    /// reported the fault, such as one that is found when an event is destroyed. Earlier faults are not reported.
    fn when_lost(&self, handler: LossHandler) {
        let _ = handler;
    }

    /// True once a fault has ended the device and no work on it accesses memory any more. False if that is not known: a
    /// driver reports the fault of one kernel while others might still be running.
    fn has_ended(&self) -> bool {
        false
    }

    /// The simulation that is polling the calling task, if it runs this device.
    fn simulation(&self) -> Option<SimulationHandle> {
        None
    }

    #[cfg(feature = "cuda")]
    fn cuda_context(&self) -> Option<&std::sync::Arc<cudarc::driver::CudaContext>> {
        None
    }

    /// Enqueues a host function and takes it out of `function`. The function is called once, or never if the device is
    /// lost, and dropped in either case. A panic in it is contained and logged. If the call is refused, the function
    /// stays in `function`, so that the caller can drop it after releasing its locks: destructors of captured values
    /// might call the device.
    fn host_function(&self, stream: RawStream, function: &mut Option<HostFunction>) -> Result<()>;

    /// Like [`host_function`](Self::host_function), for a function that can be called again, as it is when recorded
    /// into a graph. The caller keeps a handle until it has released its locks.
    fn host_callback(&self, stream: RawStream, function: HostCallback) -> Result<()> {
        self.host_function(stream, &mut Some(Box::new(move || function())))
    }

    /// The number of kernels, copies, fills and graph launches that can be pending in a stream before a call that
    /// enqueues one more waits for the device and delays other callers; `None` if no call waits. Events, waits and host
    /// functions do not count.
    fn queue_depth(&self) -> Option<u64> {
        None
    }

    /// Makes the next launch quick. Called now and then by a task that polls: takes no longer than a launch.
    fn warm_up(&self) -> Result<()> {
        Ok(())
    }

    /// True if the backend can reuse addresses of freed memory and handles of destroyed streams and events.
    fn reuses_handles(&self) -> bool {
        false
    }

    fn is_checked(&self) -> bool {
        false
    }

    /// Reports that the host itself now accesses memory from [`alloc_host`](Self::alloc_host). Used by the race checker
    /// only.
    fn host_access(&self, memory: *const u8, bytes: usize, write: bool) -> Result<()> {
        let _ = (memory, bytes, write);
        Ok(())
    }

    /// Reports that the host borrows such memory, as `&mut [u8]` if `exclusive`. The end of the borrow is not reported:
    /// it is proved by a later added graph node that uses the memory in a way that the borrow would not allow. A launch
    /// of a node that was added before the borrow might run while the borrow exists. Used by the race checker only.
    fn host_borrow(&self, memory: *const u8, bytes: usize, exclusive: bool) {
        let _ = (memory, bytes, exclusive);
    }
}

#[cold]
fn no_graphs(name: &str) -> Error {
    Error::new(ErrorKind::Usage, format!("{name} does not support graphs"))
}
