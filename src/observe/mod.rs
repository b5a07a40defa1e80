//! Seeing a flow run: what its operators do and wait for, how full its hubs are, and what limits it.
//!
//! [`Handle::snapshot`](crate::flow::Handle::snapshot) is a picture of a flow as it is now, at no cost for a flow that
//! nothing looks at. With an [`Observe`], the picture also has the last seconds in it: of how much of the time each
//! operator did what, messages in a second, and one sentence about the [bottleneck](Bottleneck).
//!
//! ```
//! use std::time::Duration;
//! use wakeline::{observe::Observe, prelude::*};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! # let mut flow = Flow::new("ticks");
//! # let ticks = flow.add("ticks", source(async || Ok(Some(()))));
//! # let count = flow.add("count", sink(async |()| Ok(())));
//! # flow.connect(ticks.output, count.input);
//! let watch = Observe::new().keep(Duration::from_secs(5));
//! flow.observe(&watch);
//! let running = flow.spawn()?;
//! # tokio::task::yield_now().await;
//! for snapshot in watch.snapshots() {
//!     println!("{snapshot}");
//!     if let Some(bottleneck) = snapshot.bottleneck {
//!         println!("{bottleneck}");
//!     }
//! }
//! # running.stop();
//! # running.await?;
//! # Ok::<(), wakeline::Error>(())
//! # }).unwrap();
//! ```
//!
//! It prints, for example:
//!
//! ```text
//! flow `shout` is running after 12.4 s
//! `upper` is the bottleneck: its queue was full 93 % of the last 10 s; it computed 97 % of the time
//! operator on               runs    runs/s     ran in runs s  now
//! read     host             1244       100     8 %     12.31  waits for room for 8 ms: room in hub `read.output -> upper.input`: its queue of 2 is full
//! upper    host             1241       100    97 %     12.11  runs for 3 ms
//! write    host             1241       100     3 %      0.40  waits for a message for 6 ms: a message in hub `upper.output -> write.input`
//! ```
//!
//! # Paths
//!
//! One message in 64 of each source is followed to where it ends ([`Observe::paths`]): a snapshot has the percentiles of each
//! path, and where the time goes: [queued, host, device, copy](PathParts). [`Observe::device_times`] times the device work
//! of those runs; it is placed on the host's axis, on a GPU to some microseconds.
//!
//! # Traces
//!
//! With [`Observe::record`], a flight recorder keeps the last events of each thread: polls and runs of operators, and the way
//! of each message. [`Observe::trace`] makes a file for [Perfetto] of them, with device work and how full the hubs
//! were. Triggers save it when it matters: [`when_slower`](Observe::when_slower), [`when_stalled`](Observe::when_stalled),
//! [`when_failed`](Observe::when_failed), [`when_blocked`](Observe::when_blocked).
//!
//! ```
//! # use std::time::Duration;
//! # use wakeline::{observe::Observe, prelude::*};
//! # fn run(mut flow: Flow) {
//! let watch = Observe::new()
//!     .record(65_536)
//!     .keep(Duration::from_secs(5))
//!     .when_slower("read > upper > write", Duration::from_millis(20), "slow.pftrace")
//!     .when_stalled("stalled.pftrace");
//! flow.observe(&watch);
//! # }
//! ```
//!
//! The recorder overwrites the oldest events of a thread, and counts those that a trace lacks ([`Trace::lost`]). Its times
//! are those of the processor's clock, or tokio's where that is paused, and in a simulation; how full the hubs were, and the
//! memory in use, are then not in the trace.
//!
//! # Warnings
//!
//! What is probably wrong with a flow is a [`Warning`]: an operator blocks a worker thread of the runtime for a second
//! ([`Observe::warn_blocked`]), one waits for 30 seconds ([`Observe::warn_waiting`]), or operators wait only for each other
//! ([`Observe::warn_stalled`]). Each says what to do, and who would have to do what:
//!
//! ```text
//! for 1.0 s: `upper` blocks a worker thread of the runtime, which delays the other tasks there: give it a thread of its own with `.on_own_thread()`, or make the blocking call in `tokio::task::spawn_blocking`
//! for 30.0 s: `write` waits for a message in hub `upper.output -> write.input`: `upper`, which runs, would have to send one
//! ```
//!
//! It begins once for each occurrence: it is logged (of one operator at most every 10 s, and by the first observer of the
//! flow), and the [hooks](Observe::on_warning) are called. While it lasts, it is in [`Snapshot::warnings`].
//!
//! # From outside
//!
//! `WAKELINE_STATUS=2s` in the environment makes every flow of a program print its snapshot every two seconds to the
//! standard error, and once more at its end, which waits until it is written. Units are `ms`, `s` and `m`.
//!
//! `WAKELINE_TRACE=flow.pftrace` records every flow of a program, and saves its last seconds, up to ten, at its end: the first that
//! ends in this file, the next ones in `flow.2.pftrace` and so on.
//!
//! `WAKELINE_PAGE=127.0.0.1:7070` serves a live page of every flow of a program until it ends, and prints its URL to the
//! standard error.
//!
//! # In a browser
//!
//! `watch.page("127.0.0.1:0").await?` (`Observe::page`, with the feature `page`) serves a page that begins with the sentence
//! about the bottleneck. Below are the graph of the flow, where its operators wait for each other, its paths, the times of
//! operators on the host and on the device, memory, and with [`record`](Observe::record) the last two seconds.
//!
//! # Profilers
//!
//! Nsight Systems, Nsight Compute and other profilers that attach through NVTX see runs, polls and messages of every flow,
//! observed or not: see [the guide](crate::guide::performance#profiling-with-nsight).
//!
//! # Metrics
//!
//! [`Observe::open_metrics`] is the text for a scraper, in the [OpenMetrics] format. With the feature `metrics`,
//! `Observe::export_to` writes them to a recorder of the crate [`metrics`]; with the feature `prometheus-client` an
//! [`Observe`] is a `Collector` for a registry of that crate. All have these metrics, and cost only when they are read.
//!
//! Each has the label `flow`, and those in the table. Units are seconds, bytes and messages. Shares and the times of
//! paths are of the [window](Observe::keep); counters are of the flow's whole run. A path's name is that of its
//! operators, `read > upper > write`.
//!
//! | metric | type | labels | meaning |
//! |---|---|---|---|
//! | `wakeline_flow_state` | stateset | `wakeline_flow_state` | What the flow does. |
//! | `wakeline_flow_active_warnings` | gauge | `kind` | Warnings that are not over, of the 64 oldest. |
//! | `wakeline_flow_warnings_total` | counter | `kind` | Warnings that have begun. |
//! | `wakeline_operator_activity` | stateset | `operator` `wakeline_operator_activity` | What the operator does. |
//! | `wakeline_operator_share` | gauge | `operator` `activity` | Of how much of the window the operator did what, as a ratio. |
//! | `wakeline_operator_runs_total` | counter | `operator` | Runs that have ended. |
//! | `wakeline_operator_busy_seconds_total` | counter | `operator` | The host's time for its runs, with their waits. |
//! | `wakeline_operator_device_seconds_total` | counter | `operator` | The device's time for those of its runs that were measured. |
//! | `wakeline_operator_device_runs_total` | counter | `operator` | Runs whose time on the device was measured. |
//! | `wakeline_hub_queued_messages` | gauge | `hub` | Messages that were not taken. |
//! | `wakeline_hub_capacity_messages` | gauge | `hub` | Messages that fit in the queue. |
//! | `wakeline_hub_passed_messages_total` | counter | `hub` | Messages that were taken. |
//! | `wakeline_hub_dropped_messages_total` | counter | `hub` | Messages that were dropped. |
//! | `wakeline_hub_envelopes` | gauge | `hub` `side` `state` | Envelopes of the hub, by side (writer, reader) and state (free, used). |
//! | `wakeline_section_rounds_total` | counter | `section` `kind` | Rounds of the section, by kind (replayed, streamed). |
//! | `wakeline_section_captures_total` | counter | `section` | Graphs that were captured. |
//! | `wakeline_section_device_seconds_total` | counter | `section` | The device's time for those of its replays that were measured. |
//! | `wakeline_section_device_replays_total` | counter | `section` | Replays whose time on the device was measured. |
//! | `wakeline_path_latency_seconds` | gauge | `path` `quantile` | The time from the source to where the message ended, of those measured in the window. |
//! | `wakeline_path_part_seconds` | gauge | `path` `part` | Where the time of an average message went (queued, host, device, copy). |
//! | `wakeline_path_measured_messages_total` | counter | `path` | Messages that were measured on the path. |
//! | `wakeline_path_dropped_messages_total` | counter |  | Messages that were to be measured and did not reach an end. |
//! | `wakeline_device_memory_bytes` | gauge | `device` `state` | Memory of the whole device that wakeline uses while the flow runs, by state (in_use, waiting, cached). |
//! | `wakeline_device_memory_peak_bytes` | gauge | `device` | The most memory that was in use or waiting at once. |
//!
//! # How it works, and what it costs
//!
//! The state of operators and hubs is never derived from events, which can get lost: a thread of its own,
//! `wakeline-observer`, looks at it every 10 ms. It takes about 1 % of a core at most, and up to 4 % if less than 10 s are kept:
//! with very many operators, or in a debug build, it looks less often. It is no thread of the runtime, and so sees what blocks the runtime's.
//!
//! Time is real time, also where tokio's clock is paused and in a simulation; only the times of paths are on tokio's clock,
//! and those of [traces](#traces) if it is paused.
//! A flow is observed from when its operators have started.
//!
//! The intervals between samples differ, by half of [`Observe::every`] at most, so that a flow with the same period is seen
//! in all of its phases. Shares are shares of the samples. A share of 50 % in 1,000 samples, 10 s, is exact to 3 percentage points (two standard
//! deviations).
//!
//! [`metrics`]: https://docs.rs/metrics
//! [Perfetto]: https://ui.perfetto.dev
//! [OpenMetrics]: https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md

mod activity;
mod bottleneck;
mod device_work;
mod environment;
mod finder;
mod flight;
mod histogram;
mod hooks;
mod long_waits;
mod metrics;
#[cfg(feature = "cuda")]
mod nvtx;
mod observer;
#[cfg(feature = "page")]
mod page;
mod paths;
mod perfetto;
mod recording;
mod records;
mod ring;
mod sample;
mod sampler;
mod snapshot;
mod timeline;
mod trace;
mod triggers;
mod warnings;
mod watchdogs;

pub use activity::{Activity, Shares};
pub use bottleneck::{Bottleneck, Reason};
pub(crate) use environment::from_environment;
#[cfg(feature = "cuda")]
pub(crate) use nvtx::attached_profiler;
pub use observer::Observe;
#[cfg(feature = "page")]
#[cfg_attr(docsrs, doc(cfg(feature = "page")))]
pub use page::{Page, PageOptions};
pub use paths::{PathCounts, PathParts, PathSnapshot, SlowMessage};
pub use snapshot::{
    ChunkHubSnapshot, ChunkLinkSnapshot, DeviceSnapshot, EnvelopesSnapshot, FailureSnapshot, FlowState, HubSnapshot,
    LinkRole, OperatorSnapshot, SectionSnapshot, Snapshot,
};
pub use trace::Trace;
pub use warnings::{Warning, WarningCounts, WarningKind};

/// A profiler attaches to programs with CUDA.
#[cfg(not(feature = "cuda"))]
pub(crate) fn attached_profiler() -> Option<std::sync::Arc<dyn crate::flow::FlowObserver>> {
    None
}
