//! The guide: from a first flow to several GPUs, in pages with complete programs.
//!
//! Read [`first_flow`] and [`kernels`] first, then the pages that your program needs. Each program is
//! a documentation test: it compiles, and unless a page says otherwise it runs on the emulated device, without a GPU.
//!
//! | page | contents |
//! |---|---|
//! | [`first_flow`] | operators, ports, a kernel, a device; what runs when |
//! | [`kernels`] | CUDA C++ beside Rust: two dimensions, structs, reductions, parts of a buffer |
//! | [`messages`] | messages with envelopes, metadata, fan-out, joins |
//! | [`conditions`] | when an operator runs; a condition of your own |
//! | [`batching`] | several messages in one run, and across operators |
//! | [`loops`] | feedback: messages that return |
//! | [`services`] | requests and responses, sources and sinks outside the flow |
//! | [`chunk_hubs`] | data that several operators read and change, on several devices |
//! | [`memory`] | buffers, allocators, your own memory |
//! | [`streams`] | streams by hand, completion |
//! | [`graphs`] | CUDA graphs: captured, built, replayed sections |
//! | [`errors`] | what fails, how it is reported, how to react |
//! | [`testing`] | one operator alone, the emulated device, the race checker, seeds, faults |
//! | [`observing`] | traces of the last seconds in Perfetto: record, open, read, triggers |
//! | [`performance`] | how quick it is, against what, and where to look first |
//! | [`several_gpus`] | several devices in one flow |
//! | [`existing_code`] | cuBLAS, cuDNN, cuFFT, cudarc and candle beside wakeline |
//! | [`from_cudarc`], [`from_cuda`], [`from_holoscan`] | what you know, and what it is called here |
//!
//! For contributors: [`design`] (the decisions and their reasons), [`behaviours`] (the numbered list that tests are named
//! after), [`facts`] (what a GPU and its driver cost, measured, and the rules of the driver that bite).

#[doc = include_str!("batching.md")]
pub mod batching {}
#[doc = include_str!("behaviours.md")]
pub mod behaviours {}
#[doc = include_str!("chunk_hubs.md")]
pub mod chunk_hubs {}
#[doc = include_str!("conditions.md")]
pub mod conditions {}
#[doc = include_str!("design.md")]
pub mod design {}
#[doc = include_str!("errors.md")]
pub mod errors {}
// Its programs, which need more of cudarc, are tested in the package `wakeline-tests`.
#[cfg_attr(not(doctest), doc = include_str!("existing_code.md"))]
pub mod existing_code {}
#[doc = include_str!("facts.md")]
pub mod facts {}
#[doc = include_str!("first_flow.md")]
pub mod first_flow {}
#[doc = include_str!("from_cuda.md")]
pub mod from_cuda {}
#[doc = include_str!("from_cudarc.md")]
pub mod from_cudarc {}
#[doc = include_str!("from_holoscan.md")]
pub mod from_holoscan {}
#[doc = include_str!("graphs.md")]
pub mod graphs {}
#[doc = include_str!("kernels.md")]
pub mod kernels {}
#[doc = include_str!("loops.md")]
pub mod loops {}
#[doc = include_str!("memory.md")]
pub mod memory {}
#[doc = include_str!("messages.md")]
pub mod messages {}
#[doc = include_str!("observing.md")]
pub mod observing {}
#[doc = include_str!("performance.md")]
pub mod performance {}
#[doc = include_str!("services.md")]
// Its program needs OpenTelemetry.
#[cfg_attr(not(doctest), doc = include_str!("request_spans.md"))]
pub mod services {}
#[doc = include_str!("several_gpus.md")]
pub mod several_gpus {}
#[doc = include_str!("streams.md")]
pub mod streams {}
#[doc = include_str!("testing.md")]
pub mod testing {}
