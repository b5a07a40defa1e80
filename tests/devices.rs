//! Tests of flows with devices: memory, streams, graphs, faults, simulations. See `flows.rs`.

mod agreement;
mod concurrency;
mod covering;
mod device_times;
mod examples;
mod external;
#[path = "extremes/main.rs"]
mod extremes;
mod faults;
#[path = "graph_edges/main.rs"]
mod graph_edges;
mod graph_limits;
mod graphs;
#[path = "hostile_devices/main.rs"]
mod hostile_devices;
#[path = "hostile_flows/main.rs"]
mod hostile_flows;
mod hostile_wakers;
mod kernel_structs;
mod lifecycle;
mod memory;
mod memory_condition;
mod odd_requests;
#[cfg(feature = "cuda")]
mod of_cudarc;
mod own_flow;
mod own_threads;
#[path = "replay/main.rs"]
mod replay;
mod replay_edges;
mod replay_random;
mod simulation;
mod slices;
mod stalls;
mod steps;
mod stream_handling;
mod streams;
mod two_devices;
mod uppercase;
mod user_memory;

common::gpu_tests_run_where_required!();
common::every_kernel_compiles!();
