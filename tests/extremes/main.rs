//! Extremes that safe code can request: sizes, counts, durations, alignments, names, and a thread that ends. Each works
//! or is an error that says what is wrong; none is a panic, an abort or undefined behaviour, in debug and in release
//! (`cargo test -p wakeline-tests --release --test devices extremes::`).

#![deny(unsafe_code)]

mod alignment;
mod chains;
mod names;
mod panics;
mod sizes;
mod thread_end;
mod wakes;

use std::{
    any::Any,
    cell::RefCell,
    future::ready,
    sync::{Arc, Mutex, OnceLock, mpsc},
    time::Duration,
};

use common::*;
use futures::FutureExt;
use wakeline::{
    Stream,
    condition::{self, Condition, MissedTicks, at_least, at_most, batch, count, every, memory, predicate, room},
    device::Simulation,
    flow::LocalFlow,
    graph::Graph,
    hub::{Metadata, RawEnvelope},
    kernel::Grid,
    memory::Allocator,
    operator::concurrent,
    prelude::*,
};

const MOST: usize = usize::MAX;

/// Asserts that a call fails with an error about the size.
#[track_caller]
fn refused<T>(what: &str, outcome: Result<T>) -> Error {
    let Err(error) = outcome else { panic!("{what} was accepted") };
    let expected = [ErrorKind::OutOfMemory, ErrorKind::Usage, ErrorKind::Setup, ErrorKind::Driver];
    assert!(expected.contains(&error.kind()), "{what}: {error}");
    error
}

#[track_caller]
fn out_of_memory<T>(what: &str, outcome: Result<T>) {
    let error = refused(what, outcome);
    assert!(error.is_out_of_memory(), "{what}: {error}");
}

fn host_only() -> Flow {
    Flow::new("host")
}
