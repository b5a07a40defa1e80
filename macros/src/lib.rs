//! The derive and attribute macros of wakeline.
