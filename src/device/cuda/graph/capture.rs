//! What other libraries enqueue, captured: the only nodes that wakeline does not add itself.
//!
//! A stream that carries nothing else captures, straight into the graph, while the library's function runs. Then
//!
//! ```text
//!   all is well       the nodes that are new are the library's; whoever comes after it comes after the stream's last ones
//!   anything is not   what has been added is taken out again, and the stream is not used again; a driver that does not
//!                     take it out (580.159.04 does not) leaves a graph that is of no use any more, and says so
//! ```
//!
//! Where the driver cannot capture into a graph (before CUDA 12.3), and where it could not take out again what was added
//! (of a graph that makes memory), the stream captures a graph of its own, which becomes a child of the other.
//!
//! The capture is the calling thread's: other threads may do what captures forbid meanwhile. Of what a library enqueues only
//! copies between host and device are looked at, since they read or write memory of the host at every launch.

use std::{cell::Cell, collections::HashSet, mem::MaybeUninit, ptr};

use cudarc::driver::sys::{
    CUDA_MEMCPY3D, CUgraph, CUgraphEdgeData, CUgraphNode, CUpointer_attribute, CUstream, CUstream_flags, CUstream_st,
    CUstreamCaptureMode,
};
use smallvec::SmallVec;

use super::{CudaBackend, Nodes, graph, node, nodes, raw_node};
use crate::{
    device::{
        backend::{External, RawGraph, RawNode, Recorded},
        cuda::driver::{Code, Driver, Handle},
    },
    error::{Error, ErrorKind, Result},
};

const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// Kinds of nodes and of memory, as the driver numbers them.
const MEMCPY_NODE: u32 = 1;
const CHILD_NODE: u32 = 4;
const ALLOC_NODE: u32 = 10;
const FREE_NODE: u32 = 11;
const CONDITIONAL_NODE: u32 = 13;
const HOST_MEMORY: u32 = 1;
const UNIFIED_MEMORY: u32 = 4;

/// What captured nodes have that not every graph can have.
#[derive(Default)]
struct Rare {
    /// Memory that they make or give back.
    memory: bool,
    conditions: bool,
}

const SPOILED: &str = "work that could not be captured could not be taken out of it again";

/// What the next node of a stream comes after.
type Ends = SmallVec<[RawNode; 2]>;

impl CudaBackend {
    /// # Safety
    /// As [`Backend::graph_external`](crate::device::backend::Backend::graph_external).
    pub(in super::super) unsafe fn capture_external(
        &self,
        raw: RawGraph,
        after: &[RawNode],
        external: External<'_>,
    ) -> Result<Recorded> {
        let (call, mut recorded, mut has) = (external.call, Recorded::default(), Rare::default());
        let look = |captured: &[CUgraphNode]| self.survey(captured, &mut recorded, &mut has);
        let ends = self.capture(raw, &nodes(after), |stream| call(stream.cast()), look);
        recorded.ends = ends.map_err(|error| error.at(format!("external work `{}`", external.name)))?;
        let mut book = self.graphs.book();
        let graph = book.graph(raw);
        graph.memory |= has.memory;
        graph.conditions |= has.conditions;
        Ok(recorded)
    }

    /// A node of one call that has no node of its own.
    pub(super) fn capture_one(
        &self,
        raw: RawGraph,
        after: Nodes,
        name: &str,
        call: impl Fn(CUstream) -> Code,
    ) -> Result<RawNode> {
        let code = Cell::new(Code::SUCCESS);
        let other = |count| {
            let text = format!("{name} was captured as {count} nodes");
            Error::new(ErrorKind::Driver, text).at(self.cx.name.clone())
        };
        let look = |nodes: &[CUgraphNode]| match nodes {
            [_] => self.cx.check(code.get(), name),
            _ => Err(other(nodes.len())),
        };
        let ends = self.capture(raw, &after, |stream| code.set(call(stream)), look);
        self.cx.check(code.get(), name)?;
        match ends?.as_slice() {
            [end] if !after.contains(&node(*end)) => Ok(*end),
            ends => Err(other(ends.len())),
        }
    }

    /// Calls with a stream that captures, and then looks at what that has added. If any of it fails, nothing was added, or
    /// the graph is spoiled.
    fn capture(
        &self,
        raw: RawGraph,
        after: &Nodes,
        call: impl FnOnce(CUstream),
        look: impl FnOnce(&[CUgraphNode]) -> Result<()>,
    ) -> Result<Ends> {
        let driver = self.cx.enter()?;
        let into = driver.stream_begin_capture_to_graph.zip(driver.stream_get_capture_info);
        let memory = self.graphs.book().graph(raw).memory;
        let stream = self.capturing_stream(driver)?;
        let captured = match into {
            Some(_) if !memory => self.capture_into(driver, raw, after, stream.raw(), call, look),
            _ => self.capture_child(driver, raw, after, stream.raw(), call, look),
        };
        match &captured {
            Ok(_) => self.graphs.idle().push(stream),
            // After a fault it is leaked with all the rest.
            Err(error) if error.is_device_lost() => {}
            Err(_) => {
                let _alone = self.gate.alone();
                // SAFETY: made by `capturing_stream`, and nobody else knows it; if the capture is not ended, this ends it.
                let _ = unsafe { (driver.stream_destroy)(stream.raw()) };
            }
        }
        captured
    }

    /// Into the graph itself.
    fn capture_into(
        &self,
        driver: &Driver,
        raw: RawGraph,
        after: &Nodes,
        stream: CUstream,
        call: impl FnOnce(CUstream),
        look: impl FnOnce(&[CUgraphNode]) -> Result<()>,
    ) -> Result<Ends> {
        let Some(begin) = driver.stream_begin_capture_to_graph else { return Ok(Ends::new()) };
        let before: HashSet<CUgraphNode> = self.nodes_of(graph(raw))?.into_iter().collect();
        // SAFETY: a stream of this context that does not capture, a live graph, as the seam's callers own what they name,
        // and as many nodes of it as said; edges are plain. The graph is used by this thread alone meanwhile.
        let code = unsafe { begin(stream, graph(raw), after.as_ptr(), ptr::null(), after.len(), MODE) };
        self.cx.check(code, "cuStreamBeginCaptureToGraph")?;
        let (ends, captured) = self.capture_call(stream, call)?;
        let added = || {
            let mut nodes = self.nodes_of(graph(raw))?;
            nodes.retain(|node| !before.contains(node));
            Ok(nodes)
        };
        let result = captured.and(ends).and_then(|ends| added().and_then(|nodes| look(&nodes)).map(|()| ends));
        if let Err(error) = &result
            && !error.is_device_lost()
        {
            let taken_out = added().and_then(|nodes| {
                nodes.into_iter().rev().try_for_each(|node| {
                    // SAFETY: a node that came by the capture, which nobody else knows of.
                    self.cx.check(unsafe { (driver.graph_destroy_node)(node) }, "cuGraphDestroyNode")
                })
            });
            if let Err(second) = taken_out {
                crate::sync::log(move || tracing::warn!(error = %second, "a graph: {SPOILED}"));
                self.spoil(raw, SPOILED);
            }
        }
        result
    }

    /// Into a graph that becomes a child of this one.
    fn capture_child(
        &self,
        driver: &Driver,
        raw: RawGraph,
        after: &Nodes,
        stream: CUstream,
        call: impl FnOnce(CUstream),
        look: impl FnOnce(&[CUgraphNode]) -> Result<()>,
    ) -> Result<Ends> {
        // SAFETY: a stream of this context that does not capture.
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
            look(&nodes)?;
            let mut node = ptr::null_mut();
            // SAFETY: a live graph and as many nodes of it as said, as the seam's callers own what they name, and another
            // live graph, which is copied; `node` outlives the call.
            let code =
                unsafe { (driver.graph_add_child_node)(&mut node, graph(raw), after.as_ptr(), after.len(), captured) };
            self.cx.check(code, "cuGraphAddChildGraphNode").map_err(|error| {
                error.advise("work that makes memory itself cannot be captured here: give the library its workspace")
            })?;
            Ok(Ends::from_elem(raw_node(node), 1))
        };
        let ends = add();
        if self.cx.lost().is_none() {
            // SAFETY: the capture's, and copied; nobody else knows it.
            let _ = unsafe { (driver.graph_destroy)(captured) };
        }
        ends
    }

    /// Calls with a stream that captures, and ends the capture, come what may: only after a fault it is not ended. What the
    /// stream's next node would have come after, and the graph of the capture, if it has one of its own.
    fn capture_call(&self, stream: CUstream, call: impl FnOnce(CUstream)) -> Result<(Result<Ends>, Result<CUgraph>)> {
        call(stream);
        // Libraries make other contexts current.
        let entered = self.cx.enter();
        if let Some(lost) = self.cx.lost() {
            return Err(lost.again());
        }
        let ends = entered.and_then(|_| self.ends(stream));
        let mut captured = ptr::null_mut();
        // SAFETY: a live stream; `captured` outlives the call, which writes one handle.
        let code = unsafe { (self.cx.driver.stream_end_capture)(stream, &mut captured) };
        Ok((ends, self.check_capture(code, "cuStreamEndCapture").map(|()| captured)))
    }

    /// A stream to capture on.
    fn capturing_stream(&self, driver: &Driver) -> Result<Handle<CUstream_st>> {
        if let Some(stream) = self.graphs.idle().pop() {
            return Ok(stream);
        }
        let mut stream = ptr::null_mut();
        let _alone = self.gate.alone();
        // SAFETY: `stream` outlives the call, which writes one handle.
        let code = unsafe { (driver.stream_create)(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32, 0) };
        self.cx.check(code, "cuStreamCreateWithPriority")?;
        Ok(Handle::new(stream))
    }

    /// What the next node of a capturing stream would come after.
    fn ends(&self, stream: CUstream) -> Result<Ends> {
        let Some(info) = self.cx.driver.stream_get_capture_info else { return Ok(Ends::new()) };
        // The status is an enum of the driver's, which may have more of them some day: a number.
        let (mut status, mut id, mut graph) = (0_u32, 0_u64, ptr::null_mut());
        let (mut ends, mut count): (*const CUgraphNode, usize) = (ptr::null(), 0);
        // Asked for, since where edges are not plain the call fails without. Plain ones in their place wait for more.
        let mut edges: *const CUgraphEdgeData = ptr::null();
        // SAFETY: a live stream; all results outlive the call, which writes one of each.
        let code =
            unsafe { info(stream, (&raw mut status).cast(), &mut id, &mut graph, &mut ends, &mut edges, &mut count) };
        self.check_capture(code, "cuStreamGetCaptureInfo")?;
        if ends.is_null() || count == 0 {
            return Ok(Ends::new());
        }
        // SAFETY: as many nodes as said, until the next call for this stream.
        let ends = unsafe { std::slice::from_raw_parts(ends, count) };
        Ok(ends.iter().copied().map(raw_node).collect())
    }

    fn check_capture(&self, code: Code, call: &str) -> Result<()> {
        match forbidden(code) {
            Some(text) => Err(self.usage(&format!("{text} ({})", self.cx.driver.describe(code)))),
            None => self.cx.check(code, call),
        }
    }

    /// Counts nodes, those of children among them, and notes the copies between host and device and what is rare.
    fn survey(&self, nodes: &[CUgraphNode], recorded: &mut Recorded, has: &mut Rare) -> Result<()> {
        let driver = self.cx.enter()?;
        for &node in nodes {
            let kind = self.kind_of(node)?;
            if kind == CHILD_NODE {
                let mut child = ptr::null_mut();
                // SAFETY: a node with a graph in it; `child` outlives the call, which writes one handle.
                let code = unsafe { (driver.graph_child_node_get_graph)(node, &mut child) };
                self.cx.check(code, "cuGraphChildGraphNodeGetGraph")?;
                self.survey(&self.nodes_of(child)?, recorded, has)?;
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

    /// What a node is, as the driver numbers it.
    pub(super) fn kind_of(&self, node: CUgraphNode) -> Result<u32> {
        let mut kind = 0_u32;
        // SAFETY: a live node; `kind` outlives the call, which writes one enum, taken as the number it is.
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
        // SAFETY: all of it is initialised, with zeros if not by the driver. The kinds of memory are read as the numbers
        // that they are, the rest are numbers.
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

/// Whether an end of a copy is memory of the host's.
fn is_host(driver: &Driver, kind: u32, address: u64) -> bool {
    if kind != UNIFIED_MEMORY {
        return kind == HOST_MEMORY;
    }
    let mut kind = 0_u32;
    // SAFETY: this attribute is an unsigned int, which the driver writes to `kind` during the call; it does not look behind
    // the address.
    let code = unsafe {
        (driver.pointer_get_attribute)(
            (&raw mut kind).cast(),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            address,
        )
    };
    // What the driver does not know is plain memory of the host's.
    !code.is_success() || kind == HOST_MEMORY
}

const INVALIDATED: &str = "it did something that cannot be captured: waited for the device, asked whether something is \
                           done, allocated or freed memory other than in stream order, or used the default stream";

/// What a capture does not allow, in words.
fn forbidden(code: Code) -> Option<&'static str> {
    Some(match code.0 {
        900..=903 => INVALIDATED,
        904 => "it forked work onto another stream that was not joined to the one that it was given",
        905 => "it waits for an event that was recorded outside of it, and such work cannot be captured",
        906 => "it used the default stream, which cannot be captured",
        907 => "it asked for the state of an event that it had recorded, which has none while work is captured",
        908 => "it went on on another thread than it began on, which captures do not allow",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_captures_forbid_is_told_in_words() {
        for code in 900..=908 {
            assert!(forbidden(Code(code)).is_some(), "{code}");
        }
        // A refused update of an exec, a fault, no memory.
        for code in [2, 719, 899, 909, 910] {
            assert_eq!(forbidden(Code(code)), None, "{code}");
        }
        assert!(forbidden(Code(904)).is_some_and(|text| text.contains("joined")));
    }

    #[test]
    fn copies_within_the_device_or_the_host_are_none_between_them() {
        assert_eq!(direction(true, false), Some("host to device"));
        assert_eq!(direction(false, true), Some("device to host"));
        assert_eq!((direction(true, true), direction(false, false)), (None, None));
    }
}
