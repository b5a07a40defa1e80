//! Conditional nodes, whose bodies run depending on a flag in device memory.
//!
//! The driver's conditional nodes read a value of their own, which only a kernel can set, by a function that the driver
//! links into the kernel when it is loaded. So a conditional node comes after a kernel of one thread, the setter, which
//! reads the flag and sets the value. In a loop, the same kernel is also the last node of the body. It is added when
//! the whole graph is instantiated, since only then is the body complete.
//!
//! ```text
//!   ..after ──▶ set ──▶ node ──▶              while the flag is not 0:   everything ──▶ set
//! ```
//!
//! The setter is PTX, so that no compiler is needed.

use std::ptr;

use cudarc::driver::sys::{
    CUDA_CONDITIONAL_NODE_PARAMS, CUgraphConditionalNodeType, CUgraphNode, CUgraphNodeParams, CUgraphNodeType,
};

use super::{CudaBackend, CudaGraph, graph, node, raw_graph, raw_node};
use crate::{
    device::{
        CudaTypes,
        backend::{
            Address, Arg, BodyArg, GraphCondition, KernelDef, KernelNumber, KernelSource, Launch, NodeWork, RawGraph,
            RawNode,
        },
    },
    error::{Error, ErrorKind, Result},
};

/// Advice on the kinds of nodes that the driver supports in a body.
pub(super) const ALLOWED_IN_BODY: &str = "the body of a conditional node can contain kernels, fills, copies of device \
                                       and page-locked memory, empty nodes, child graphs and conditional nodes";

/// A conditional node and its body.
#[derive(Debug)]
pub(super) struct Conditional {
    pub(super) node: RawNode,
    pub(super) body: RawGraph,
    /// The setter at the end of the body, if this is a loop.
    pub(super) loop_setter: Option<LoopSetter>,
}

/// The last node of a loop's body, which sets the condition for the next iteration.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoopSetter {
    handle: u64,
    flag: Address,
    /// `None` if the node has not been added yet.
    node: Option<RawNode>,
}

static SETTER: KernelDef = KernelDef {
    name: "wakeline_set_condition",
    file: "conditional.rs",
    declared: concat!(file!(), ":", line!()),
    source: KernelSource::Ptx(PTX),
    prototype,
    body: unused_body,
    number: KernelNumber::new(),
};

fn prototype(_: &mut CudaTypes) -> String {
    "void wakeline_set_condition(unsigned long long handle, const unsigned int* flag)".into()
}

/// Never called: the emulated device reads flags itself.
fn unused_body(_: &[BodyArg]) {}

/// `cudaGraphSetConditional(handle, *flag != 0)`. The function is provided by the driver, not by a library.
const PTX: &str = "
.version 7.5
.target sm_60
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 of, .param .b32 value);
.visible .entry wakeline_set_condition(.param .u64 handle, .param .u64 flag)
{
    .reg .pred %set;
    .reg .b32 %value;
    .reg .b64 %handle, %flag;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %flag, [flag];
    cvta.to.global.u64 %flag, %flag;
    ld.global.u32 %value, [%flag];
    setp.ne.u32 %set, %value, 0;
    selp.u32 %value, 1, 0, %set;
    {
        .param .b64 to_handle;
        .param .b32 to_value;
        st.param.b64 [to_handle], %handle;
        st.param.b32 [to_value], %value;
        call.uni cudaGraphSetConditional, (to_handle, to_value);
    }
    ret;
}
";

impl CudaBackend {
    /// # Safety
    /// The contract of [`Backend::graph_add_conditional`](crate::device::backend::Backend::graph_add_conditional).
    pub(in super::super) unsafe fn add_conditional(
        &self,
        raw: RawGraph,
        after: &[RawNode],
        when: GraphCondition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        let driver = self.cx.enter()?;
        let (Some(create), Some(add)) = (driver.graph_conditional_handle_create, driver.graph_add_node) else {
            return Err(self.usage("conditional nodes need a driver for CUDA 12.4 or newer"));
        };
        // Before the handle is created: the driver does not instantiate a graph with a handle that no node uses.
        self.kernels.load(&self.cx, &SETTER).map_err(with_requirements)?;
        let mut handle = 0;
        // SAFETY: a live graph, and its context; `handle` outlives the call, which writes one number.
        let code = unsafe { create(&mut handle, graph(raw), self.cx.raw(), 0, 0) };
        self.cx.check(code, "cuGraphConditionalHandleCreate").map_err(with_requirements)?;
        let poison = |error| {
            self.poison(raw, "adding a conditional node to it failed halfway; build a new graph");
            error
        };
        // SAFETY: the caller guarantees that the flag is valid.
        let setter = unsafe { self.add_setter(raw, after, handle, flag) }.map_err(poison)?;
        let mut params = CUgraphNodeParams {
            type_: CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL,
            // SAFETY: numbers, pointers and enums with a variant 0: zeros are valid for all of them.
            ..unsafe { std::mem::zeroed() }
        };
        params.__bindgen_anon_1.conditional = CUDA_CONDITIONAL_NODE_PARAMS {
            handle,
            type_: match when {
                GraphCondition::If => CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF,
                GraphCondition::While => CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_WHILE,
            },
            size: 1,
            phGraph_out: ptr::null_mut(),
            ctx: self.cx.raw(),
        };
        let (before, mut added): (_, CUgraphNode) = (node(setter), ptr::null_mut());
        // SAFETY: a live graph and one node of it, with a plain edge; `added` and `params` outlive the call, which
        // writes a handle to `added`, reads `params` and writes a pointer into it.
        let code = unsafe { add(&mut added, graph(raw), &before, ptr::null(), 1, &mut params) };
        let checked =
            self.cx.check(code, "cuGraphAddNode").map_err(|error| with_requirements(self.advise_for_body(raw, error)));
        checked.map_err(poison)?;
        // SAFETY: the driver has written a pointer to an array of as many graphs as requested, one, which lives as long
        // as the node.
        let body = raw_graph(unsafe { params.__bindgen_anon_1.conditional.phGraph_out.read() });
        let loop_setter = (when == GraphCondition::While).then_some(LoopSetter { handle, flag, node: None });
        let mut records = self.graphs.records();
        records.graphs.insert(body, CudaGraph { within: true, ..CudaGraph::default() });
        let graph = records.graph(raw);
        graph.conditions = true;
        graph.conditionals.push(Conditional { node: raw_node(added), body, loop_setter });
        Ok((raw_node(added), body))
    }

    /// Adds the setter: a kernel that reads the flag and sets the condition.
    ///
    /// # Safety
    /// The flag is valid whenever the graph runs.
    unsafe fn add_setter(&self, raw: RawGraph, after: &[RawNode], handle: u64, flag: Address) -> Result<RawNode> {
        let args = [Arg::Scalar(bytemuck::bytes_of(&handle)), Arg::Scalar(bytemuck::bytes_of(&flag.0))];
        let launch = Launch { kernel: &SETTER, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
        // SAFETY: the arguments are the kernel's: a handle of this graph or of its outer graph, and an address that the
        // caller guarantees to be valid.
        unsafe { self.add_node(raw, after, &NodeWork::Kernel(launch)) }
    }

    /// Adds the setter to the body of each loop in the graph, at any depth, after all other nodes. If nodes were added
    /// since, the setter is moved after them.
    pub(super) fn finish(&self, raw: RawGraph) -> Result<()> {
        self.check_not_poisoned(raw)?;
        let loops: Vec<(RawGraph, RawGraph, LoopSetter)> = {
            let records = self.graphs.records();
            let graphs = records.all(raw).into_iter().filter_map(|raw| Some((raw, records.graphs.get(&raw)?)));
            let all = graphs.flat_map(|(raw, graph)| graph.conditionals.iter().map(move |inner| (raw, inner)));
            all.filter_map(|(raw, inner)| inner.loop_setter.map(|loop_setter| (raw, inner.body, loop_setter))).collect()
        };
        for (outer, body, loop_setter) in loops {
            let leaves = self.leaves(body)?;
            if leaves.as_slice() == loop_setter.node.as_slice() && loop_setter.node.is_some() {
                continue;
            }
            if let Some(old) = loop_setter.node {
                self.set_loop_setter(outer, body, None);
                self.remove_node(body, old)?;
            }
            let leaves = self.leaves(body)?;
            // SAFETY: the caller that added the condition guaranteed that the flag is valid.
            let setter = unsafe { self.add_setter(body, &leaves, loop_setter.handle, loop_setter.flag) }?;
            self.set_loop_setter(outer, body, Some(setter));
        }
        Ok(())
    }

    fn set_loop_setter(&self, outer: RawGraph, body: RawGraph, setter: Option<RawNode>) {
        let mut records = self.graphs.records();
        let inner = records.graph(outer).conditionals.iter_mut().find(|inner| inner.body == body);
        if let Some(loop_setter) = inner.and_then(|inner| inner.loop_setter.as_mut()) {
            loop_setter.node = setter;
        }
    }

    /// The nodes without successors.
    fn leaves(&self, raw: RawGraph) -> Result<Vec<RawNode>> {
        let mut leaves = Vec::new();
        for node in self.nodes_of(graph(raw))? {
            if self.dependents_of(node)?.is_empty() {
                leaves.push(raw_node(node));
            }
        }
        Ok(leaves)
    }
}

/// Adds the likely cause to an error of the driver.
fn with_requirements(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Driver | ErrorKind::Kernel => {
            error.advise("conditional nodes need a driver for CUDA 12.4 or newer, and a device that supports them")
        }
        _ => error,
    }
}
