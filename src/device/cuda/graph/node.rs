//! Adds a node for each kind of work that a stream can have.
//!
//! The conversion of a copy, a fill or a kernel to the driver's parameters is used when a node is added and when it is
//! changed in an exec. The driver copies all parameters during the call. Copies and fills of 0 bytes are empty nodes.
//!
//! Memory that a node allocates gets its address when the node is added. It exists during a launch, from that node to
//! the node that frees it. It is accessible only from its own device.

use std::{mem::MaybeUninit, ptr};

use cudarc::driver::sys::{
    CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUgraphNode, CUmemorytype,
};

use super::{CudaBackend, graph, nodes, raw_node};
use crate::{
    device::{
        backend::{Address, Endpoint, NodeWork, Pattern, RawGraph, RawNode},
        cuda::{driver::Code, event, host::GraphCallback, memory, peers},
        human,
    },
    error::{Error, ErrorKind, Result},
};

/// The parameters of a copy: one row of `bytes` bytes.
pub(super) fn copy(to: Endpoint, from: Endpoint, bytes: u64) -> CUDA_MEMCPY3D {
    let end = |place: Endpoint| match place {
        Endpoint::Host(memory) => (CUmemorytype::CU_MEMORYTYPE_HOST, memory, 0),
        Endpoint::Device(address) => (CUmemorytype::CU_MEMORYTYPE_DEVICE, ptr::null_mut(), address.0),
    };
    let ((to_kind, to_host, to_device), (from_kind, from_host, from_device)) = (end(to), end(from));
    CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: from_kind,
        srcHost: from_host.cast_const().cast(),
        srcDevice: from_device,
        srcArray: ptr::null_mut(),
        reserved0: ptr::null_mut(),
        // Zero, as there is only one row, and a pitch has a limit that the width of a row does not.
        srcPitch: 0,
        srcHeight: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: to_kind,
        dstHost: to_host.cast(),
        dstDevice: to_device,
        dstArray: ptr::null_mut(),
        reserved1: ptr::null_mut(),
        dstPitch: 0,
        dstHeight: 0,
        WidthInBytes: bytes as usize,
        Height: 1,
        Depth: 1,
    }
}

/// The parameters of a fill: one row. The pattern was checked by [`CudaBackend::check_fill`].
pub(super) fn fill(to: Address, pattern: Pattern, bytes: u64) -> CUDA_MEMSET_NODE_PARAMS {
    let value = match pattern.width {
        1 => pattern.bits & 0xff,
        2 => pattern.bits & 0xffff,
        _ => pattern.bits,
    };
    CUDA_MEMSET_NODE_PARAMS {
        dst: to.0,
        pitch: 0,
        value,
        elementSize: pattern.width as u32,
        width: bytes as usize / pattern.width,
        height: 1,
    }
}

/// Describes the work for messages: `copy to device of 4.0 MiB`.
pub(super) fn describe(work: &NodeWork<'_>) -> String {
    match work {
        NodeWork::Kernel(launch) => format!("kernel `{}`", launch.kernel.name),
        NodeWork::Copy { to, from, bytes } => {
            format!("copy {} of {}", human::direction(*to, *from), human::bytes(*bytes))
        }
        NodeWork::Fill { bytes, .. } => format!("fill of {}", human::bytes(*bytes)),
        NodeWork::Host(_) => "host function".into(),
        NodeWork::Empty => "empty node".into(),
        NodeWork::Child(_) => "child graph".into(),
        NodeWork::Record(_) => "record of an event".into(),
        NodeWork::Wait(_) => "wait for an event".into(),
        NodeWork::Free(_) => "free".into(),
    }
}

impl CudaBackend {
    /// # Safety
    /// The contract of [`Backend::graph_add`](crate::device::backend::Backend::graph_add).
    pub(in super::super) unsafe fn add_node(
        &self,
        raw: RawGraph,
        after: &[RawNode],
        work: &NodeWork<'_>,
    ) -> Result<RawNode> {
        let driver = self.cx.enter()?;
        let (graph, after) = (graph(raw), nodes(after));
        let (before, count) = (after.as_ptr(), after.len());
        let mut node: CUgraphNode = ptr::null_mut();
        let to = &raw mut node;
        let context = self.cx.raw();
        // SAFETY, for all calls below: a live graph and as many nodes of it as the count passed; no other call uses
        // this graph concurrently. `node` outlives the call, which writes one handle, and so do the parameters, which it
        // copies. The caller guarantees the memory that the node uses when it runs.
        if let NodeWork::Copy { to: Endpoint::Device(into), from: Endpoint::Device(from), bytes } = work
            && *bytes > 0
            && let Some((into_cx, from_cx)) = peers::contexts(driver, *into, *from)
        {
            let bytes = *bytes as usize;
            return self.capture_one(raw, after, "cuMemcpyPeerAsync", |stream| {
                // SAFETY: above, as far as it applies; each context is that of the device on which the driver
                // reports the memory.
                unsafe { (driver.memcpy_peer_async)(into.0, into_cx, from.0, from_cx, bytes, stream) }
            });
        }
        match work {
            NodeWork::Kernel(launch) => {
                let mut prepared = self.kernels.prepare(&self.cx, launch)?;
                let params = prepared.node();
                // SAFETY: above; the function belongs to this context and stays loaded, and its parameters are correct
                // and valid (`Prepared`).
                let code = unsafe { (driver.graph_add_kernel_node)(to, graph, before, count, &params) };
                let added = prepared.check(&self.cx, code, "cuGraphAddKernelNode");
                return added.map(|()| raw_node(node)).map_err(|error| self.advise_for_body(raw, error));
            }
            NodeWork::Copy { bytes: 0, .. } | NodeWork::Fill { bytes: 0, .. } | NodeWork::Empty => {
                // SAFETY: above.
                let code = unsafe { (driver.graph_add_empty_node)(to, graph, before, count) };
                self.added(raw, work, code, "cuGraphAddEmptyNode")?;
            }
            NodeWork::Copy { to: into, from, bytes } => {
                let params = copy(*into, *from, *bytes);
                // SAFETY: above.
                let code = unsafe { (driver.graph_add_memcpy_node)(to, graph, before, count, &params, context) };
                self.added(raw, work, code, "cuGraphAddMemcpyNode")?;
            }
            NodeWork::Fill { to: into, pattern, bytes } => {
                self.check_fill(*into, *pattern, *bytes)?;
                let params = fill(*into, *pattern, *bytes);
                // SAFETY: above.
                let code = unsafe { (driver.graph_add_memset_node)(to, graph, before, count, &params, context) };
                self.added(raw, work, code, "cuGraphAddMemsetNode")?;
            }
            NodeWork::Host(function) => {
                let function = GraphCallback::new(&self.cx, function)?;
                let params = function.node();
                // SAFETY: above; the function may be called with this or any number, at any time.
                let code = unsafe { (driver.graph_add_host_node)(to, graph, before, count, &params) };
                self.added(raw, work, code, "cuGraphAddHostNode")?;
                self.graphs.records().graph(raw).functions.push(function);
            }
            NodeWork::Child(child) => {
                self.check_child(*child)?;
                // SAFETY: above; the child is another live graph, which is copied.
                let code = unsafe { (driver.graph_add_child_node)(to, graph, before, count, super::graph(*child)) };
                self.added(raw, work, code, "cuGraphAddChildGraphNode")?;
                let mut records = self.graphs.records();
                let functions = records.functions(*child);
                records.graph(raw).functions.extend(functions);
            }
            NodeWork::Record(recorded) => {
                // SAFETY: above; a live event.
                let code = unsafe { (driver.graph_add_record_node)(to, graph, before, count, event(*recorded)) };
                self.added(raw, work, code, "cuGraphAddEventRecordNode")?;
            }
            NodeWork::Wait(awaited) => {
                // SAFETY: above; a live event.
                let code = unsafe { (driver.graph_add_wait_node)(to, graph, before, count, event(*awaited)) };
                self.added(raw, work, code, "cuGraphAddEventWaitNode")?;
            }
            NodeWork::Free(address) => {
                // SAFETY: above; the driver refuses an address that no node of this graph allocates.
                let code = unsafe { (driver.graph_add_free_node)(to, graph, before, count, address.0) };
                self.added(raw, work, code, "cuGraphAddMemFreeNode")?;
                let mut records = self.graphs.records();
                let graph = records.graph(raw);
                graph.memory = true;
                graph.unfreed.retain(|unfreed| unfreed != address);
            }
        }
        Ok(raw_node(node))
    }

    pub(in super::super) fn add_alloc(
        &self,
        raw: RawGraph,
        after: &[RawNode],
        bytes: u64,
    ) -> Result<(RawNode, Address)> {
        let driver = self.cx.enter()?;
        let after = nodes(after);
        let mut node: CUgraphNode = ptr::null_mut();
        // `MaybeUninit`, as the driver writes into it; only the address is read back.
        let mut params = MaybeUninit::new(CUDA_MEM_ALLOC_NODE_PARAMS {
            poolProps: memory::pool_props(self.cx.device),
            accessDescs: ptr::null(),
            accessDescCount: 0,
            bytesize: bytes as usize,
            dptr: 0,
        });
        // SAFETY: a live graph and as many nodes of it as the count passed; both results outlive the call, which writes
        // a handle to `node` and an address into `params`.
        let code = unsafe {
            (driver.graph_add_alloc_node)(&mut node, graph(raw), after.as_ptr(), after.len(), params.as_mut_ptr())
        };
        if !code.is_success() {
            let error = self.cx.fail(code, "cuGraphAddMemAllocNode");
            let place = format!("allocation node of {}", human::bytes(bytes));
            return Err(self.advise_for_body(raw, error.at(place)));
        }
        // SAFETY: initialised above; the driver has written this field, a number.
        let address = Address(unsafe { (&raw const (*params.as_ptr()).dptr).read() });
        let mut records = self.graphs.records();
        let graph = records.graph(raw);
        graph.memory = true;
        graph.unfreed.push(address);
        Ok((raw_node(node), address))
    }

    fn added(&self, graph: RawGraph, work: &NodeWork<'_>, code: Code, call: &str) -> Result<()> {
        if code.is_success() {
            return Ok(());
        }
        let error = self.cx.fail(code, call);
        if error.is_device_lost() {
            return Err(error);
        }
        Err(self.advise_for_body(graph, error.at(format!("graph node, {}", describe(work)))))
    }

    /// Adds advice on the supported nodes to the error of a node in the body of a conditional node.
    pub(super) fn advise_for_body(&self, graph: RawGraph, error: Error) -> Error {
        let within = self.graphs.records().graphs.get(&graph).is_some_and(|graph| graph.within);
        if within && error.kind() == ErrorKind::Driver {
            error.advise(super::conditional::ALLOWED_IN_BODY)
        } else {
            error
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_one_row() {
        let mut host = 0_u8;
        let bytes = 5 << 32;
        let params = copy(Endpoint::Device(Address(0x1000)), Endpoint::Host(&raw mut host), bytes);
        assert_eq!((params.WidthInBytes as u64, params.Height, params.Depth), (bytes, 1, 1));
        assert_eq!(
            (params.srcMemoryType, params.dstMemoryType),
            (CUmemorytype::CU_MEMORYTYPE_HOST, CUmemorytype::CU_MEMORYTYPE_DEVICE)
        );
        assert_eq!((params.srcHost, params.srcDevice), ((&raw const host).cast(), 0));
        assert!(params.dstHost.is_null() && params.dstDevice == 0x1000);
    }

    #[test]
    fn a_fill_counts_patterns_and_keeps_their_low_bytes() {
        for (width, value, count) in [(1, 0x44, 64), (2, 0x3344, 32), (4, 0x1122_3344, 16)] {
            let params = fill(Address(0x1000), Pattern { width, bits: 0x1122_3344 }, 64);
            assert_eq!((params.value, params.elementSize as usize, params.width), (value, width, count));
            assert_eq!((params.dst, params.height), (0x1000, 1));
        }
    }

    #[test]
    fn nodes_are_described_for_messages() {
        let device = Endpoint::Device(Address(0));
        let copy = NodeWork::Copy { to: device, from: Endpoint::Host(ptr::null_mut()), bytes: 4 << 20 };
        assert_eq!(describe(&copy), "copy to device of 4.0 MiB");
    }
}
