//! Scenario F2: a kernel that traps in a graph. See `common/fault.rs`.

use common::a_fault;
use wakeline::{Stream, graph::Graph, prelude::*};

mod node {
    use super::*;

    /// x += 1, and a trap where x is `what`. On the emulated device the fault is injected.
    #[kernel(unsafe(cuda = "kernels/trap_at.cu"))]
    pub(super) fn trap_at(x: &mut [u32], _what: u32) {
        for x in x {
            *x += 1;
        }
    }
}

/// Replaces the kernel's own module.
mod trap_at {
    use super::*;

    /// Launches the kernel as a graph whose exec is dropped while it runs.
    pub(super) fn launch(stream: &Stream, x: &mut Envelope<u32>, what: u32) -> Result<()> {
        let capture = |capture: &mut wakeline::graph::Capturing| node::trap_at::launch(capture.stream(), x, what);
        let (graph, ()) = Graph::capture(stream.device(), capture)?;
        graph.instantiate()?.launch(stream).map(drop)
    }
}

a_fault!(f2_a_kernel_that_traps_in_a_graph, trap_at);
