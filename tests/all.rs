//! All tests that share a process, in one executable: a new file of tests is a module here. Those that need a process for
//! themselves are executables of their own; `Cargo.toml` lists them, and says why.

mod after;
mod calls_that_wait;
mod chunk_stalls;
mod chunks;
mod chunks_contested;
mod chunks_edges;
mod chunks_flow;
mod closed_late;
mod concurrency;
mod conditions;
mod conditions_events;
mod conditions_messages;
mod conditions_status;
mod conditions_time;
mod config;
mod device_times;
mod dropping;
mod edges;
mod embedding;
mod examples;
mod external;
#[path = "extremes/main.rs"]
mod extremes;
mod fan_out;
mod faults;
#[path = "graph_edges/main.rs"]
mod graph_edges;
mod graph_limits;
mod graphs;
#[path = "hostile_conditions/main.rs"]
mod hostile_conditions;
#[path = "hostile_devices/main.rs"]
mod hostile_devices;
#[path = "hostile_flows/main.rs"]
mod hostile_flows;
mod hostile_messages;
mod hostile_wakers;
mod hubs;
mod ingress;
mod inputs;
mod lifecycle;
mod memory;
mod memory_condition;
mod odd_requests;
mod open_ends;
mod outside;
mod own_flow;
mod own_threads;
mod queues;
#[path = "replay/main.rs"]
mod replay;
mod replay_edges;
mod replay_random;
mod service;
mod service_ends;
mod service_over_http;
mod simulation;
mod stalls;
mod steps;
mod stream_handling;
mod streams;
mod two_devices;
mod uppercase;
mod user_memory;
mod waits_given_up;
mod waits_in_run;

/// `REQUIRE_CUDA=1`: a run that leaves out the tests that need a GPU fails.
#[test]
fn tests_that_need_a_gpu_run_where_they_are_required() {
    let required = std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1");
    let included = std::env::args().any(|argument| argument == "--include-ignored" || argument == "--ignored");
    assert!(
        included || !required,
        "REQUIRE_CUDA=1 and the tests that need a GPU are left out: add `-- --include-ignored`"
    );
}
