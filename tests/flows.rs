//! Tests of messages in a flow: conditions, hubs, chunks, requests and ends. This executable and `devices.rs` contain all
//! tests that can share a process; each test that needs its own process is a separate executable, which `Cargo.toml`
//! lists with the reason. There are two shared executables because rustc compiles one executable on a single thread for
//! half of the time.

mod after;
mod calls_that_wait;
mod chunk_stalls;
mod chunks;
mod chunks_contested;
mod chunks_edges;
mod chunks_flow;
mod closed_late;
mod conditions;
mod conditions_events;
mod conditions_messages;
mod conditions_status;
mod conditions_time;
mod config;
mod dropping;
mod edges;
mod embedding;
mod fan_out;
mod frames;
mod harness;
#[path = "hostile_conditions/main.rs"]
mod hostile_conditions;
mod hostile_messages;
mod hubs;
mod ingress;
mod inputs;
mod joined;
mod observe;
mod open_ends;
mod outside;
mod paths;
mod paths_edges;
mod queues;
mod service;
mod service_drops;
mod service_ends;
mod service_over_http;
mod unsent;
mod waits_given_up;
mod waits_in_run;
mod with_cx;

common::gpu_tests_run_where_required!();
common::every_kernel_compiles!();
