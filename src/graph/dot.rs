//! Drawings of graphs.

use std::fmt::Write;

use super::{Graph, NodeKind};

impl Graph {
    /// The graph in the DOT language of Graphviz: nodes as boxes with their names, edges as arrows, operators as
    /// frames.
    ///
    /// ```
    /// # use wakeline::{Buffer, device::{Device, Emulated}, graph::Graph};
    /// # let device = Device::emulated(Emulated::new());
    /// # let mut data = Buffer::<u8>::new(&device, 8)?;
    /// let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 7))?;
    /// assert!(graph.to_dot().contains(r#"0 [label="fill of 8 bytes""#));
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    pub fn to_dot(&self) -> String {
        let nodes = self.nodes();
        let mut dot = String::from("digraph {\n  rankdir=LR;\n  node [shape=box];\n");
        let mut operators: Vec<Option<&str>> = nodes.iter().map(|node| node.operator.as_deref()).collect();
        operators.sort_unstable();
        operators.dedup();
        for (number, operator) in operators.into_iter().enumerate() {
            if let Some(operator) = operator {
                let _ = writeln!(dot, "  subgraph cluster_{number} {{\n  label={};", quoted(operator));
            }
            for node in nodes.iter().filter(|node| node.operator.as_deref() == operator) {
                let shape = match node.kind {
                    NodeKind::Empty => ", shape=point",
                    NodeKind::Copy | NodeKind::Fill => ", style=rounded",
                    NodeKind::Host => ", shape=oval",
                    NodeKind::Conditional => ", shape=diamond",
                    NodeKind::Child | NodeKind::External => ", peripheries=2",
                    _ => "",
                };
                let _ = writeln!(dot, "  {} [label={}{shape}];", node.node.at, quoted(&node.name));
            }
            if operator.is_some() {
                dot.push_str("  }\n");
            }
        }
        for node in &nodes {
            for before in &node.after {
                let _ = writeln!(dot, "  {} -> {};", before.at, node.node.at);
            }
        }
        dot.push_str("}\n");
        dot
    }
}

/// A string literal of DOT. Names are the user's, and a NUL in one would end the file for Graphviz.
fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{}\"", text.replace(char::is_control, " "))
}
