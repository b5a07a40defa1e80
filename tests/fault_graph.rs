//! Scenario F2: a kernel that traps in a graph. See `common/fault.rs`.

use common::a_fault;
use wakeline::{graph::Graph, prelude::*};

mod node {
    use super::*;

    /// x += 1, and a trap where x is `what`. The emulated device has the fault planned.
    #[kernel(unsafe(cuda = "kernels/trap_at.cu"))]
    pub(super) fn trap_at(x: &mut [u32], _what: u32) {
        for x in x {
            *x += 1;
        }
    }
}

/// In place of the kernel's own.
mod trap_at {
    use super::*;

    /// As a graph, whose exec is dropped while it runs.
    pub(super) fn launch(stream: &Stream, x: &mut Envelope<u32>, what: u32) -> Result<()> {
        let capture = |capture: &mut wakeline::graph::Capturing| node::trap_at::launch(capture.stream(), x, what);
        let (graph, ()) = Graph::capture(stream.device(), capture)?;
        graph.instantiate()?.launch(stream).map(drop)
    }
}

a_fault!(f2_a_kernel_that_traps_in_a_graph, trap_at);
