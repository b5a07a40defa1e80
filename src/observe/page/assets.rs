//! The files of the page, which need no key: they show nothing of the flows.

use hyper::body::Bytes;

/// The content type and the content of a path.
pub(super) fn asset(path: &str) -> Option<(&'static str, Bytes)> {
    const SCRIPT: &str = "text/javascript; charset=utf-8";
    const STYLE: &str = "text/css; charset=utf-8";
    macro_rules! files {
        ($($path:literal, $kind:expr, $file:literal;)*) => {
            match path {
                $($path => ($kind, include_bytes!(concat!("assets/", $file)) as &'static [u8]),)*
                _ => return None,
            }
        };
    }
    let (kind, content) = files! {
        "/", "text/html; charset=utf-8", "index.html";
        "/style.css", STYLE, "style.css";
        "/favicon.svg", "image/svg+xml", "favicon.svg";
        "/page.js", SCRIPT, "page.js";
        "/connection.js", SCRIPT, "connection.js";
        "/format.js", SCRIPT, "format.js";
        "/headline.js", SCRIPT, "headline.js";
        "/graph.js", SCRIPT, "graph.js";
        "/stall.js", SCRIPT, "stall.js";
        "/tables.js", SCRIPT, "tables.js";
        "/history.js", SCRIPT, "history.js";
        "/memory.js", SCRIPT, "memory.js";
        "/timeline.js", SCRIPT, "timeline.js";
        "/dagre.min.js", SCRIPT, "dagre.min.js";
        "/uPlot.iife.min.js", SCRIPT, "uPlot.iife.min.js";
        "/uPlot.min.css", STYLE, "uPlot.min.css";
    };
    Some((kind, Bytes::from_static(content)))
}
