//! Instantiated graphs: launched, and changed between launches.
//!
//! Creating and destroying an exec use the context exclusively (see `gate.rs`). Other launches wait, and the gate lets
//! them continue if this takes too long. Without the gate, an instantiation would wait for a moment without launches,
//! which might never come.
//!
//! A change that the driver refuses is not an error but a result ([`Refused`]), with the reason and, if known, the
//! node. It leaves the exec unchanged.

use std::{mem::MaybeUninit, ptr};

use cudarc::driver::sys::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraphExecUpdateResult, CUgraphExecUpdateResultInfo, CUgraphInstantiateResult,
    CUgraphNode,
};

use super::{
    CudaBackend, CudaExec,
    conditional::ALLOWED_IN_BODY,
    exec, graph, node,
    node::{copy, fill},
    raw_node,
};
use crate::{
    device::{
        backend::{Endpoint, NodeWork, RawExec, RawGraph, RawNode, RawStream, Refused},
        cuda::{
            driver::{Code, Driver},
            event,
            host::GraphCallback,
            peers, stream,
        },
    },
    error::{Error, ErrorKind, Result},
};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`: memory of the last launch that no node freed is freed before the
/// next.
const AUTO_FREE: u64 = 1;

type Changed = Result<Result<(), Refused>>;

impl CudaBackend {
    pub(in super::super) fn instantiate(&self, raw: RawGraph) -> Result<RawExec> {
        self.check_not_body(raw)?;
        self.finish(raw)?;
        let driver = self.cx.enter()?;
        let (memory, second) = {
            let mut records = self.graphs.records();
            let graph = records.graph(raw);
            (graph.memory, graph.is_single().filter(|_| graph.execs > 0))
        };
        if let Some(what) = second {
            let text = format!("a graph that {what} can have only one exec at a time: drop the existing exec first");
            return Err(self.usage(&text));
        }
        let mut made = ptr::null_mut();
        // `MaybeUninit`, as the driver writes into it: its enum is read as a number, which may have no variant.
        let mut params = MaybeUninit::new(CUDA_GRAPH_INSTANTIATE_PARAMS {
            flags: if memory { AUTO_FREE } else { 0 },
            hUploadStream: ptr::null_mut(),
            hErrNode_out: ptr::null_mut(),
            result_out: CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS,
        });
        let mut ask = || {
            let _exclusive = self.gate.exclusive();
            // SAFETY: a live graph; both results outlive the call.
            unsafe { (driver.graph_instantiate)(&mut made, graph(raw), params.as_mut_ptr()) }
        };
        let mut code = ask();
        if code == Code::OUT_OF_MEMORY && self.memory.trim(&self.cx)? {
            code = ask();
        }
        if !code.is_success() {
            // SAFETY: initialised above; the enum is read as a number, the other is a pointer.
            let (result, node) = unsafe {
                let params = params.as_ptr();
                ((&raw const (*params).result_out).cast::<u32>().read(), (&raw const (*params).hErrNode_out).read())
            };
            return Err(self.not_instantiated(raw, code, result, node));
        }
        let raw_exec = RawExec(made.expose_provenance() as u64);
        self.graphs.records().add_exec(raw_exec, raw);
        Ok(raw_exec)
    }

    #[cold]
    fn not_instantiated(&self, raw: RawGraph, code: Code, result: u32, node: CUgraphNode) -> Error {
        let error = self.cx.fail(code, "cuGraphInstantiate");
        if error.kind() != ErrorKind::Driver {
            return error;
        }
        let Some(why) = not_instantiable(result) else { return error };
        // A node that is not in this graph is in a graph within it.
        let which = self.nodes_of(graph(raw)).unwrap_or_default();
        let which = match which.iter().position(|&known| known == node) {
            _ if node.is_null() => String::new(),
            Some(at) => format!("; it is node {} of {}, {}", at + 1, which.len(), self.kind_name(node)),
            None => format!("; it is {} of a graph within it ({ALLOWED_IN_BODY})", self.kind_name(node)),
        };
        self.usage(&format!("the graph cannot be instantiated: {why}{which} ({})", self.cx.driver.describe(code)))
    }

    /// A node's kind, for messages: `a kernel`.
    fn kind_name(&self, node: CUgraphNode) -> &'static str {
        self.kind_of(node).map_or("of a kind that the driver does not report", kind_name)
    }

    /// # Safety
    /// The contract of [`Backend::exec_destroy`](crate::device::backend::Backend::exec_destroy).
    pub(in super::super) unsafe fn destroy_exec(&self, raw: RawExec) {
        // Removed first, as the driver can reuse the handle once it has destroyed the exec. The guard is dropped at the
        // end of the statement: the entry runs users' destructors when it is dropped, at the end of this function.
        let ended = self.graphs.records().execs.remove(&raw);
        if let Ok(driver) = self.cx.enter() {
            self.destroy_raw_exec(driver, raw, &ended);
        }
        // Only now can a graph with one exec at a time have another.
        let graph = ended.as_ref().and_then(|ended| Some((ended.of, self.graphs.records().exec_destroyed(ended.of)?)));
        if let Some((graph, _)) = &graph {
            self.destroy(*graph);
        }
    }

    fn destroy_raw_exec(&self, driver: &Driver, raw: RawExec, ended: &Option<CudaExec>) {
        for memory in ended.iter().flat_map(|ended| &ended.unfreed) {
            // SAFETY: memory of the last launch, which is done. If there was no launch, the driver refuses the call.
            if let Err(error) = unsafe { self.memory.free(&self.cx, *memory) } {
                crate::sync::log(
                    move || tracing::debug!(error = %format_args!("{error:#}"), "memory that no node frees was not freed"),
                );
            }
        }
        let exclusive = self.gate.exclusive();
        // SAFETY: created by `instantiate`; its owner calls this once and no longer uses it.
        let destroyed = self.cx.check(unsafe { (driver.exec_destroy)(exec(raw)) }, "cuGraphExecDestroy");
        drop(exclusive);
        if let Err(error) = destroyed {
            crate::sync::log(
                move || tracing::warn!(error = %format_args!("{error:#}"), "an exec of a graph was not destroyed"),
            );
        }
    }

    pub(in super::super) fn upload(&self, raw: RawExec, at: RawStream) -> Result<()> {
        let driver = self.cx.enter()?;
        self.gate.wait_for_exclusive();
        // SAFETY: a live exec and a live stream of this context.
        let mut code = unsafe { (driver.exec_upload)(exec(raw), stream(at)) };
        if code == Code::OUT_OF_MEMORY && self.memory.trim(&self.cx)? {
            // SAFETY: as above.
            code = unsafe { (driver.exec_upload)(exec(raw), stream(at)) };
        }
        self.cx.check(code, "cuGraphUpload")
    }

    /// # Safety
    /// The contract of [`Backend::exec_launch`](crate::device::backend::Backend::exec_launch).
    #[inline]
    pub(in super::super) unsafe fn launch_exec(&self, raw: RawExec, at: RawStream) -> Result<()> {
        let driver = self.cx.enter()?;
        self.gate.wait_for_exclusive();
        // SAFETY: a live exec and a live stream of this context. The caller guarantees the memory that the nodes use.
        let mut code = unsafe { (driver.exec_launch)(exec(raw), stream(at)) };
        if code == Code::OUT_OF_MEMORY && self.memory.trim(&self.cx)? {
            // SAFETY: as above; nothing was enqueued.
            code = unsafe { (driver.exec_launch)(exec(raw), stream(at)) };
        }
        self.cx.check(code, "cuGraphLaunch")
    }

    /// # Safety
    /// The contract of [`Backend::exec_update`](crate::device::backend::Backend::exec_update).
    pub(in super::super) unsafe fn update_exec(&self, raw: RawExec, from: RawGraph) -> Changed {
        self.finish(from)?;
        let driver = self.cx.enter()?;
        // As in `instantiate`.
        let mut info = MaybeUninit::new(CUgraphExecUpdateResultInfo {
            result: CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS,
            errorNode: ptr::null_mut(),
            errorFromNode: ptr::null_mut(),
        });
        // SAFETY: a live exec and a live graph, used only by this thread during the call; `info` outlives the call. The
        // caller guarantees the memory that the nodes use.
        let code = unsafe { (driver.exec_update)(exec(raw), graph(from), info.as_mut_ptr()) };
        // SAFETY: initialised above; the enum is read as a number, the other is a pointer.
        let (result, refused) = unsafe {
            let info = info.as_ptr();
            ((&raw const (*info).result).cast::<u32>().read(), (&raw const (*info).errorNode).read())
        };
        let refused = (!refused.is_null()).then(|| raw_node(refused));
        self.changed(code, "cuGraphExecUpdate", refused, not_updatable(result))
    }

    /// # Safety
    /// The contract of [`Backend::exec_set`](crate::device::backend::Backend::exec_set).
    pub(in super::super) unsafe fn set_node(&self, raw: RawExec, of: RawNode, work: &NodeWork<'_>) -> Changed {
        let driver = self.cx.enter()?;
        let (exec, node, context) = (exec(raw), node(of), self.cx.raw());
        let refused = |why: &str| Ok(Err(Refused { node: Some(of), why: why.into() }));
        // SAFETY, for all calls below: a live exec and a node of the graph that it was made of, which lives as long as
        // the exec, and no other call uses this exec concurrently. Parameters outlive the call, which copies them. The
        // caller guarantees the memory that the node uses when it runs.
        let (code, call, rule) = match work {
            NodeWork::Kernel(launch) => {
                let mut prepared = self.kernels.prepare(&self.cx, launch)?;
                let params = prepared.node();
                // SAFETY: above; the function belongs to this context and stays loaded, and its parameters are correct
                // and valid (`Prepared`).
                let code = unsafe { (driver.exec_set_kernel)(exec, node, &params) };
                (
                    code,
                    "cuGraphExecKernelNodeSetParams",
                    "the node is not a kernel, or this kernel cannot replace the node's kernel",
                )
            }
            NodeWork::Copy { bytes: 0, .. } | NodeWork::Fill { bytes: 0, .. } => {
                return refused("a node cannot be set to do nothing: disable it instead");
            }
            NodeWork::Copy { to: Endpoint::Device(to), from: Endpoint::Device(from), .. }
                if peers::contexts(driver, *to, *from).is_some() =>
            {
                return refused("it is a copy between devices without peer access");
            }
            NodeWork::Copy { to, from, bytes } => {
                let params = copy(*to, *from, *bytes);
                // SAFETY: above.
                let code = unsafe { (driver.exec_set_memcpy)(exec, node, &params, context) };
                (
                    code,
                    "cuGraphExecMemcpyNodeSetParams",
                    "both ends must stay the same kind of memory on the same device",
                )
            }
            NodeWork::Fill { to, pattern, bytes } => {
                self.check_fill(*to, *pattern, *bytes)?;
                let params = fill(*to, *pattern, *bytes);
                // SAFETY: above.
                let code = unsafe { (driver.exec_set_memset)(exec, node, &params, context) };
                (code, "cuGraphExecMemsetNodeSetParams", "the memory must stay on the same device")
            }
            NodeWork::Host(function) => {
                let known = {
                    let records = self.graphs.records();
                    let functions = records.execs.get(&raw).map(|exec| &exec.set);
                    functions.and_then(|functions| functions.iter().find(|known| known.is(function)).cloned())
                };
                let function = match known {
                    Some(known) => known,
                    None => GraphCallback::new(&self.cx, function)?,
                };
                let params = function.node();
                // SAFETY: above; the function may be called with this or any number, at any time.
                let code = unsafe { (driver.exec_set_host)(exec, node, &params) };
                if code.is_success() {
                    self.graphs.records().add_exec_functions(raw, vec![function]);
                }
                (code, "cuGraphExecHostNodeSetParams", "the node is not a host function")
            }
            NodeWork::Child(child) => {
                self.check_child(*child)?;
                // SAFETY: above; the child is a live graph, which is copied.
                let code = unsafe { (driver.exec_set_child)(exec, node, graph(*child)) };
                if code.is_success() {
                    let mut records = self.graphs.records();
                    let functions = records.functions(*child);
                    records.add_exec_functions(raw, functions);
                }
                (code, "cuGraphExecChildGraphNodeSetParams", "the child must have the same nodes in the same order")
            }
            NodeWork::Record(recorded) => {
                // SAFETY: above; a live event.
                let code = unsafe { (driver.exec_set_record)(exec, node, event(*recorded)) };
                (code, "cuGraphExecEventRecordNodeSetEvent", "the node does not record an event")
            }
            NodeWork::Wait(awaited) => {
                // SAFETY: above; a live event.
                let code = unsafe { (driver.exec_set_wait)(exec, node, event(*awaited)) };
                (code, "cuGraphExecEventWaitNodeSetEvent", "the node does not wait for an event")
            }
            NodeWork::Empty => return refused("an empty node has nothing to change"),
            NodeWork::Free(_) => return refused("memory nodes cannot be changed"),
        };
        self.changed(code, call, Some(of), Some(rule))
    }

    pub(in super::super) fn enable_node(&self, raw: RawExec, of: RawNode, enabled: bool) -> Changed {
        let driver = self.cx.enter()?;
        // SAFETY: as in `set_node`.
        let code = unsafe { (driver.exec_set_enabled)(exec(raw), node(of), u32::from(enabled)) };
        self.changed(code, "cuGraphNodeSetEnabled", Some(of), Some("only kernels, copies and fills can be disabled"))
    }

    fn changed(&self, code: Code, call: &str, node: Option<RawNode>, rule: Option<&str>) -> Changed {
        if code.is_success() {
            return Ok(Ok(()));
        }
        let error = self.cx.fail(code, call);
        if error.kind() != ErrorKind::Driver {
            return Err(error);
        }
        let what = self.cx.driver.describe(code);
        let why = rule.map_or_else(|| format!("{call}: {what}"), |rule| format!("{rule} ({call}: {what})"));
        Ok(Err(Refused { node, why }))
    }
}

fn not_instantiable(result: u32) -> Option<&'static str> {
    Some(match result {
        2 => "its nodes form a cycle, or one of them is not allowed where it is",
        3 => "one of its nodes is not supported where it is, or not on this device",
        4 => "its nodes belong to several contexts",
        5 => "one of its condition handles is not used by any node",
        _ => return None,
    })
}

fn not_updatable(result: u32) -> Option<&'static str> {
    Some(match result {
        2 => "the graph has other nodes, or other edges between them",
        3 => "a node is of another kind",
        4 | 7 => "a node has a different kernel, which cannot replace the old one",
        5 => "a parameter changed that cannot change: the kind of memory at an end of a copy, or the device of memory",
        6 => "a node cannot be updated, such as one that allocates or frees memory",
        8 => "an attribute of a node changed that cannot change",
        _ => return None,
    })
}

fn kind_name(kind: u32) -> &'static str {
    match kind {
        0 => "a kernel",
        1 => "a copy",
        2 => "a fill",
        3 => "a host function",
        4 => "a child graph",
        5 => "an empty node",
        6 => "a wait for an event",
        7 => "a record of an event",
        10 => "an allocation",
        11 => "a free",
        13 => "a conditional node",
        _ => "a node of another kind",
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUgraphNodeType as Kind;

    use super::*;

    #[test]
    fn refused_updates_have_reasons() {
        let changed = CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED as u32;
        assert!(not_updatable(changed).is_some_and(|why| why.contains("other nodes")));
        let kind = CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED as u32;
        assert!(not_updatable(kind).is_some_and(|why| why.contains("kind")));
        // Success, a general error, and an unknown code.
        assert_eq!([0, 1, 99].map(not_updatable), [None; 3]);
    }

    #[test]
    fn refused_instantiations_have_reasons() {
        let unused = CUgraphInstantiateResult::CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED as u32;
        assert!(not_instantiable(unused).is_some_and(|why| why.contains("condition")));
        assert_eq!([0, 1, 99].map(not_instantiable), [None; 3]);
    }

    #[test]
    fn kinds_of_nodes_have_names() {
        for (kind, name) in [
            (Kind::CU_GRAPH_NODE_TYPE_MEMCPY, "a copy"),
            (Kind::CU_GRAPH_NODE_TYPE_GRAPH, "a child graph"),
            (Kind::CU_GRAPH_NODE_TYPE_MEM_FREE, "a free"),
            (Kind::CU_GRAPH_NODE_TYPE_CONDITIONAL, "a conditional node"),
            (Kind::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, "a node of another kind"),
        ] {
            assert_eq!(kind_name(kind as u32), name);
        }
    }
}
