//! Captures work that other libraries enqueue: the only nodes that wakeline does not add itself.
//!
//! A separate stream captures directly into the graph while the library's function runs:
//!
//! ```text
//!   success   the new nodes are the library's; later work comes after the stream's last ones
//!   failure   the added nodes are removed and the stream is destroyed; if the driver does not remove them (580.159.04
//!             does not), the graph is poisoned, and later calls return an error that says so
//! ```
//!
//! If the driver cannot capture into a graph (before CUDA 12.3), or could not remove the added nodes (in a graph that
//! allocates memory), the stream captures into a separate graph, which becomes a child of the given one.
//!
//! The capture is local to the calling thread, so other threads may make calls that captures forbid. Of a library's
//! work, only copies between host and device are examined, since they access host memory at every launch.

use std::{cell::Cell, collections::HashSet, mem::MaybeUninit, ptr};

use cudarc::driver::sys::{
    CUDA_MEMCPY3D, CUgraph, CUgraphEdgeData, CUgraphNode, CUpointer_attribute, CUstream, CUstream_flags, CUstream_st,
    CUstreamCaptureMode,
};
use smallvec::SmallVec;

use super::{CudaBackend, Nodes, graph, node, nodes, raw_node};
use crate::{
    device::{
        backend::{ExternalNodes, ExternalWork, RawGraph, RawNode},
        cuda::driver::{Code, Driver, DriverHandle},
    },
    error::{Error, ErrorKind, Result},
};

const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// The driver's numbers of kinds of nodes and of memory.
const MEMCPY_NODE: u32 = 1;
const CHILD_NODE: u32 = 4;
const ALLOC_NODE: u32 = 10;
const FREE_NODE: u32 = 11;
const CONDITIONAL_NODE: u32 = 13;
const HOST_MEMORY: u32 = 1;
const UNIFIED_MEMORY: u32 = 4;

/// Features of captured nodes that not every graph may have.
#[derive(Default)]
struct CapturedFeatures {
    memory: bool,
    conditions: bool,
}

const POISONED: &str = "it contains nodes of a failed capture, which the driver does not remove; build a new graph";

/// The predecessors of the next node of a stream.
type Ends = SmallVec<[RawNode; 2]>;

impl CudaBackend {
    /// # Safety
    /// The contract of [`Backend::graph_external`](crate::device::backend::Backend::graph_external).
    pub(in super::super) unsafe fn capture_external(
        &self,
        raw: RawGraph,
        after: &[RawNode],
        external: ExternalWork<'_>,
    ) -> Result<ExternalNodes> {
        let (call, mut recorded, mut has) = (external.call, ExternalNodes::default(), CapturedFeatures::default());
        let inspect = |captured: &[CUgraphNode]| self.inspect_nodes(captured, &mut recorded, &mut has);
        let ends = self.capture(raw, &nodes(after), |stream| call(stream.cast()), inspect);
        recorded.ends = ends.map_err(|error| error.at(format!("external work `{}`", external.name)))?;
        let mut records = self.graphs.records();
        let graph = records.graph(raw);
        graph.memory |= has.memory;
        graph.conditions |= has.conditions;
        Ok(recorded)
    }

    /// Adds a node for a call that the driver can capture, but not add as a node directly.
    pub(super) fn capture_one(
        &self,
        raw: RawGraph,
        after: Nodes,
        name: &str,
        call: impl Fn(CUstream) -> Code,
    ) -> Result<RawNode> {
        let code = Cell::new(Code::SUCCESS);
        let other = |count| {
            let text = format!("{name} was captured as {count} nodes instead of one");
            Error::new(ErrorKind::Driver, text).at(self.cx.name.clone())
        };
        let inspect = |nodes: &[CUgraphNode]| match nodes {
            [_] => self.cx.check(code.get(), name),
            _ => Err(other(nodes.len())),
        };
        let ends = self.capture(raw, &after, |stream| code.set(call(stream)), inspect);
        self.cx.check(code.get(), name)?;
        match ends?.as_slice() {
            [end] if !after.contains(&node(*end)) => Ok(*end),
            ends => Err(other(ends.len())),
        }
    }

    /// Passes a capturing stream to `call`, and the added nodes to `inspect`. If either fails, nothing was added or the
    /// graph is poisoned.
    fn capture(
        &self,
        raw: RawGraph,
        after: &Nodes,
        call: impl FnOnce(CUstream),
        inspect: impl FnOnce(&[CUgraphNode]) -> Result<()>,
    ) -> Result<Ends> {
        let driver = self.cx.enter()?;
        let into = driver.stream_begin_capture_to_graph.zip(driver.stream_get_capture_info);
        let memory = self.graphs.records().graph(raw).memory;
        let stream = self.capturing_stream(driver)?;
        let captured = match into {
            Some(_) if !memory => self.capture_into(driver, raw, after, stream.raw(), call, inspect),
            _ => self.capture_child(driver, raw, after, stream.raw(), call, inspect),
        };
        match &captured {
            Ok(_) => self.graphs.idle().push(stream),
            // After a fault the stream is leaked, like all resources.
            Err(error) if error.is_device_lost() => {}
            Err(_) => {
                let _exclusive = self.gate.exclusive();
                // SAFETY: created by `capturing_stream`, and not shared; if the capture has not ended, this ends it.
                let _ = unsafe { (driver.stream_destroy)(stream.raw()) };
            }
        }
        captured
    }

    fn capture_into(
        &self,
        driver: &Driver,
        raw: RawGraph,
        after: &Nodes,
        stream: CUstream,
        call: impl FnOnce(CUstream),
        inspect: impl FnOnce(&[CUgraphNode]) -> Result<()>,
    ) -> Result<Ends> {
        let Some(begin) = driver.stream_begin_capture_to_graph else { return Ok(Ends::new()) };
        let before: HashSet<CUgraphNode> = self.nodes_of(graph(raw))?.into_iter().collect();
        // SAFETY: a stream of this context that is not capturing, a live graph, and as many nodes of it as the count
        // passed; edges are plain. Only this thread uses the graph during the capture.
        let code = unsafe { begin(stream, graph(raw), after.as_ptr(), ptr::null(), after.len(), MODE) };
        self.cx.check(code, "cuStreamBeginCaptureToGraph")?;
        let (ends, captured) = self.capture_call(stream, call)?;
        let added = || {
            let mut nodes = self.nodes_of(graph(raw))?;
            nodes.retain(|node| !before.contains(node));
            Ok(nodes)
        };
        let result = captured.and(ends).and_then(|ends| added().and_then(|nodes| inspect(&nodes)).map(|()| ends));
        if let Err(error) = &result
            && !error.is_device_lost()
        {
            let taken_out = added().and_then(|nodes| {
                nodes.into_iter().rev().try_for_each(|node| {
                    // SAFETY: a node that the capture added, and that is not shared.
                    self.cx.check(unsafe { (driver.graph_destroy_node)(node) }, "cuGraphDestroyNode")
                })
            });
            if let Err(second) = taken_out {
                crate::sync::log(
                    move || tracing::warn!(error = %second, "a graph cannot be used any more: {POISONED}"),
                );
                self.poison(raw, POISONED);
            }
        }
        result
    }

    /// Captures into a graph that becomes a child of this one.
    fn capture_child(
        &self,
        driver: &Driver,
        raw: RawGraph,
        after: &Nodes,
        stream: CUstream,
        call: impl FnOnce(CUstream),
        inspect: impl FnOnce(&[CUgraphNode]) -> Result<()>,
    ) -> Result<Ends> {
        // SAFETY: a stream of this context that is not capturing.
        let code = unsafe { (driver.stream_begin_capture)(stream, MODE) };
        self.cx.check(code, "cuStreamBeginCapture")?;
        let (ends, captured) = self.capture_call(stream, call)?;
        let captured = captured?;
        if captured.is_null() {
            return Err(self.usage(INVALIDATED));
        }
        let add = || {
            ends?;
            let nodes = self.nodes_of(captured)?;
            if nodes.is_empty() {
                return Ok(after.iter().copied().map(raw_node).collect());
            }
            inspect(&nodes)?;
            let mut node = ptr::null_mut();
            // SAFETY: a live graph and as many nodes of it as the count passed, and another live graph, which is
            // copied; `node` outlives the call.
            let code =
                unsafe { (driver.graph_add_child_node)(&mut node, graph(raw), after.as_ptr(), after.len(), captured) };
            self.cx.check(code, "cuGraphAddChildGraphNode").map_err(|error| {
                error.advise("work that allocates memory cannot be captured here: give the library a workspace")
            })?;
            Ok(Ends::from_elem(raw_node(node), 1))
        };
        let ends = add();
        if self.cx.lost().is_none() {
            // SAFETY: the capture's graph, which was copied and is not shared.
            let _ = unsafe { (driver.graph_destroy)(captured) };
        }
        ends
    }

    /// Passes a capturing stream to `call`, and ends the capture except after a fault. Returns the predecessors of the
    /// stream's next node, and the capture's own graph, if it has one.
    fn capture_call(&self, stream: CUstream, call: impl FnOnce(CUstream)) -> Result<(Result<Ends>, Result<CUgraph>)> {
        call(stream);
        // The library might have made another context current.
        let entered = self.cx.enter();
        if let Some(lost) = self.cx.lost() {
            return Err(lost.clone());
        }
        let ends = entered.and_then(|_| self.ends(stream));
        let mut captured = ptr::null_mut();
        // SAFETY: a live stream; `captured` outlives the call, which writes one handle.
        let code = unsafe { (self.cx.driver.stream_end_capture)(stream, &mut captured) };
        Ok((ends, self.check_capture(code, "cuStreamEndCapture").map(|()| captured)))
    }

    /// An idle or new stream for a capture.
    fn capturing_stream(&self, driver: &Driver) -> Result<DriverHandle<CUstream_st>> {
        if let Some(stream) = self.graphs.idle().pop() {
            return Ok(stream);
        }
        let mut stream = ptr::null_mut();
        let _exclusive = self.gate.exclusive();
        // SAFETY: `stream` outlives the call, which writes one handle.
        let code = unsafe { (driver.stream_create)(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32, 0) };
        self.cx.check(code, "cuStreamCreateWithPriority")?;
        Ok(DriverHandle::new(stream))
    }

    /// The predecessors of the next node of a capturing stream.
    fn ends(&self, stream: CUstream) -> Result<Ends> {
        let Some(info) = self.cx.driver.stream_get_capture_info else { return Ok(Ends::new()) };
        // The status is an enum of the driver, to which later versions can add variants, so it is read as a number.
        let (mut status, mut id, mut graph) = (0_u32, 0_u64, ptr::null_mut());
        let (mut ends, mut count): (*const CUgraphNode, usize) = (ptr::null(), 0);
        // Requested, since the call fails without it if edges are not plain. The plain edges that are used in their
        // place are stricter.
        let mut edges: *const CUgraphEdgeData = ptr::null();
        // SAFETY: a live stream; all results outlive the call, which writes one of each.
        let code =
            unsafe { info(stream, (&raw mut status).cast(), &mut id, &mut graph, &mut ends, &mut edges, &mut count) };
        self.check_capture(code, "cuStreamGetCaptureInfo")?;
        if ends.is_null() || count == 0 {
            return Ok(Ends::new());
        }
        // SAFETY: as many nodes as the count returned, valid until the next call for this stream.
        let ends = unsafe { std::slice::from_raw_parts(ends, count) };
        Ok(ends.iter().copied().map(raw_node).collect())
    }

    fn check_capture(&self, code: Code, call: &str) -> Result<()> {
        match forbidden(code) {
            Some(text) => Err(self.usage(&format!("{text} ({})", self.cx.driver.describe(code)))),
            None => self.cx.check(code, call),
        }
    }

    /// Counts nodes, including those of children, and records copies between host and device, and features that not
    /// every graph may have.
    fn inspect_nodes(
        &self,
        nodes: &[CUgraphNode],
        recorded: &mut ExternalNodes,
        has: &mut CapturedFeatures,
    ) -> Result<()> {
        let driver = self.cx.enter()?;
        for &node in nodes {
            let kind = self.kind_of(node)?;
            if kind == CHILD_NODE {
                let mut child = ptr::null_mut();
                // SAFETY: a child graph's node; `child` outlives the call, which writes one handle.
                let code = unsafe { (driver.graph_child_node_get_graph)(node, &mut child) };
                self.cx.check(code, "cuGraphChildGraphNodeGetGraph")?;
                self.inspect_nodes(&self.nodes_of(child)?, recorded, has)?;
                continue;
            }
            recorded.nodes += 1;
            has.memory |= matches!(kind, ALLOC_NODE | FREE_NODE);
            has.conditions |= kind == CONDITIONAL_NODE;
            if kind == MEMCPY_NODE {
                recorded.host_copies.extend(self.host_copy(driver, node)?);
            }
        }
        Ok(())
    }

    pub(super) fn kind_of(&self, node: CUgraphNode) -> Result<u32> {
        let mut kind = 0_u32;
        // SAFETY: a live node; `kind` outlives the call, which writes one enum, read as a number.
        let code = unsafe { (self.cx.driver.graph_node_get_type)(node, (&raw mut kind).cast()) };
        self.cx.check(code, "cuGraphNodeGetType").map(|()| kind)
    }

    /// The direction and the bytes of a copy, if it is between host and device.
    fn host_copy(&self, driver: &Driver, node: CUgraphNode) -> Result<Option<(&'static str, u64)>> {
        let mut params = MaybeUninit::<CUDA_MEMCPY3D>::zeroed();
        // SAFETY: a node that is a copy; `params` outlives the call, which fills it.
        let code = unsafe { (driver.graph_memcpy_node_get_params)(node, params.as_mut_ptr()) };
        self.cx.check(code, "cuGraphMemcpyNodeGetParams")?;
        let params = params.as_ptr();
        // SAFETY: all of it is initialised, by zeros or by the driver. The kinds of memory are read as numbers, and the
        // rest are numbers.
        let (from, from_address, to, to_address, bytes) = unsafe {
            (
                (&raw const (*params).srcMemoryType).cast::<u32>().read(),
                (&raw const (*params).srcDevice).read(),
                (&raw const (*params).dstMemoryType).cast::<u32>().read(),
                (&raw const (*params).dstDevice).read(),
                (&raw const (*params).WidthInBytes).read()
                    * (&raw const (*params).Height).read().max(1)
                    * (&raw const (*params).Depth).read().max(1),
            )
        };
        let (from, to) = (is_host(driver, from, from_address), is_host(driver, to, to_address));
        Ok(direction(from, to).map(|direction| (direction, bytes as u64)))
    }
}

fn direction(from_host: bool, to_host: bool) -> Option<&'static str> {
    match (from_host, to_host) {
        (true, false) => Some("host to device"),
        (false, true) => Some("device to host"),
        _ => None,
    }
}

fn is_host(driver: &Driver, kind: u32, address: u64) -> bool {
    if kind != UNIFIED_MEMORY {
        return kind == HOST_MEMORY;
    }
    let mut kind = 0_u32;
    // SAFETY: this attribute is an unsigned int, which the driver writes to `kind` during the call; it does not access
    // the memory at the address.
    let code = unsafe {
        (driver.pointer_get_attribute)(
            (&raw mut kind).cast(),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            address,
        )
    };
    // Memory that is unknown to the driver is pageable host memory.
    !code.is_success() || kind == HOST_MEMORY
}

const INVALIDATED: &str = "it made a call that cannot be captured: it waited for the device, queried completion, allocated \
                           or freed memory other than in stream order, or used the default stream";

/// Describes a call that captures do not allow, by the driver's code.
fn forbidden(code: Code) -> Option<&'static str> {
    Some(match code.0 {
        900..=903 => INVALIDATED,
        904 => "it forked work onto another stream, which was not joined to the stream that it was given",
        905 => "it waits for an event that was recorded outside of the capture, and such work cannot be captured",
        906 => "it used the default stream, which cannot be captured",
        907 => "it queried an event that it had recorded, which has no state during a capture",
        908 => "it continued on another thread than it began on, which captures do not allow",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_captures_forbid_are_described() {
        for code in 900..=908 {
            assert!(forbidden(Code(code)).is_some(), "{code}");
        }
        // Out of memory, a fault, and codes outside of the range, such as a refused update of an exec.
        for code in [2, 719, 899, 909, 910] {
            assert_eq!(forbidden(Code(code)), None, "{code}");
        }
        assert!(forbidden(Code(904)).is_some_and(|text| text.contains("joined")));
    }

    #[test]
    fn only_copies_between_host_and_device_have_a_direction() {
        assert_eq!(direction(true, false), Some("host to device"));
        assert_eq!(direction(false, true), Some("device to host"));
        assert_eq!((direction(true, true), direction(false, false)), (None, None));
    }
}
