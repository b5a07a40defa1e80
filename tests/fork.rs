//! A process forks after it has opened a device: in the child, every use of this or another device is an error that
//! names the fork.
//!
//! The tests run one at a time, so that no other thread holds a lock at the fork. The fork uses C functions, as Rust's library has none.

#![cfg(unix)]

use std::{
    io::{Read, Write, pipe},
    sync::Mutex,
};

use common::*;
use wakeline::{Stream, device::Simulation, memory::Allocator, prelude::*};

gpu_tests_run_where_required!();

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
    fn alarm(seconds: u32) -> u32;
}

static ALONE: Mutex<()> = Mutex::new(());

/// Runs `work` in a fork of this process and returns its text.
fn in_a_fork(work: impl FnOnce() -> String) -> String {
    let (mut read, mut write) = pipe().unwrap();
    // SAFETY: the child runs `work` on its only thread and leaves by `_exit`: no destructor of the parent runs there.
    // The parent's other threads sleep, so none of them holds a lock that the child could wait for; if one does, the
    // alarm ends the child.
    match unsafe { fork() } {
        0 => {
            // SAFETY: it sets a timer.
            unsafe { alarm(30) };
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            let _ = write.write_all(result.unwrap_or_else(|_| "it panicked".into()).as_bytes());
            drop(write);
            // SAFETY: it ends the process.
            unsafe { _exit(0) }
        }
        child => {
            assert!(child > 0, "no fork");
            drop(write);
            let (mut output, mut status) = (String::new(), 0);
            read.read_to_string(&mut output).unwrap();
            // SAFETY: the child is this process's own, and `status` outlives the call.
            assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "the child was killed: it hung. Its output: {output}");
            output
        }
    }
}

fn describe<T>(outcome: Result<T>) -> String {
    match outcome {
        Ok(_) => "ok".into(),
        Err(error) => format!("{:?}: {error:#}", error.kind()),
    }
}

#[track_caller]
fn assert_lost(output: &str) {
    assert!(output.starts_with("DeviceLost: ") && output.contains("forked from process"), "{output}");
}

/// Uses a parent's device in forks, in all ways that a child may try.
fn assert_lost_in_forks(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let used = Buffer::from_slice(&stream, &[1_u32; 64]).unwrap();
    futures::executor::block_on(used.to_vec(&stream)).unwrap();

    assert_lost(&in_a_fork(|| describe(Stream::new(device))));
    assert_lost(&in_a_fork(|| describe(Buffer::<u8>::new(device, 1 << 20))));
    assert_lost(&in_a_fork(|| describe(Buffer::<u8>::pinned(device, 1 << 20))));
    assert_lost(&in_a_fork(|| describe(Allocator::blocks(device, 1 << 10, 2))));
    assert_lost(&in_a_fork(|| describe(StreamPool::builder(device).reserved(1).build())));
    assert_lost(&in_a_fork(|| {
        // Once the loss is noticed, all calls report it, and no drop waits for a thread that the child does not have.
        drop(Stream::new(device));
        let lost = device.lost().map_or("not lost".into(), |error| describe::<()>(Err(error)));
        drop((used, stream, device.clone()));
        lost
    }));

    // Work in flight; its completion never reaches the child.
    let stream = Stream::new(device).unwrap();
    let held = hold(&stream);
    assert_lost(&in_a_fork(|| describe(futures::executor::block_on(stream.completed()))));
    assert_lost(&in_a_fork(|| describe(stream.synchronize_blocking())));
    // More work than the device's queue holds.
    let mut data = Buffer::<u32>::new(device, 4).unwrap();
    assert_lost(&in_a_fork(|| describe((0..4096).try_for_each(|_| stream.fill(&mut data, 1)))));
    drop(held);
    futures::executor::block_on(stream.completed()).unwrap();
    let checked = device.clone().race_checked();
    assert_lost(&in_a_fork(|| describe(Stream::new(&checked))));
}

#[test]
fn devices_are_lost_in_a_fork_with_a_clear_error() {
    let _alone = lock(&ALONE);
    assert_eq!(in_a_fork(|| describe(Stream::new(&Device::emulated(Emulated::new())))), "ok");

    let device = Device::emulated(Emulated::new().workers(1).queue_depth(64));
    assert_lost_in_forks(&device);
    assert_lost(&in_a_fork(|| describe(Stream::new(&Device::emulated(Emulated::new())))));
    assert_lost(&in_a_fork(|| {
        let own = Device::emulated(Emulated::new());
        let lost = own.lost().map_or("not lost".into(), |error| describe::<()>(Err(error)));
        drop(own);
        lost
    }));
    // Host and simulated devices have no threads, and cannot be lost.
    let host = in_a_fork(|| {
        describe(Buffer::<u8>::pinned(&Device::host(), 16).and_then(|mut mine| mine.as_mut_slice().map(drop)))
    });
    assert_eq!(host, "ok");
    let simulated = in_a_fork(|| {
        let simulation = Simulation::new(1);
        let device = Device::simulated(&simulation, Emulated::new());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let run =
            async { Buffer::from_slice(&Stream::new(&device)?, &[1_u8; 4])?.to_vec(&Stream::new(&device)?).await };
        describe(runtime.block_on(simulation.run(run)))
    });
    assert_eq!(simulated, "ok");
}

#[test]
#[ignore = "needs a GPU"]
fn gpus_are_lost_in_a_fork_with_a_clear_error() {
    let _alone = lock(&ALONE);
    let device = common::cuda();
    assert_lost_in_forks(&device);
    assert_lost(&in_a_fork(|| describe(Device::cuda(0))));
}
