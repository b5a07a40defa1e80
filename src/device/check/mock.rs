//! A mock device for tests of the checker. It accepts every call, runs nothing, and answers queries as the test has
//! set.
//!
//! The checker's result must not depend on timing, so most of its tests use a device that runs nothing.

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use futures::FutureExt;

use crate::{
    device::backend::*,
    error::{Error, ErrorKind, Result},
    sync::Mutex,
};

#[derive(Debug, Default)]
pub(crate) struct MockBackend {
    pub(crate) answer: AtomicBool,
    pub(crate) refuse: AtomicBool,
    /// Between any two events.
    pub(crate) elapsed: Mutex<Duration>,
    pub(crate) event_time: Mutex<Duration>,
    /// How often two events were compared.
    pub(crate) compared: AtomicUsize,
    /// How many of the next records take 5 ms.
    pub(crate) slow: AtomicUsize,
    /// How many there were.
    pub(crate) records: AtomicUsize,
    pub(super) functions: Mutex<Vec<Function>>,
}

pub(crate) struct Function(pub(super) HostFunction);

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("function")
    }
}

/// Has a call take `time` on tokio's clock, which must be paused.
pub(crate) fn pass(time: Duration) {
    // The first poll advances the clock.
    let _ = tokio::time::advance(time).now_or_never();
}

/// The start of a range of `size` numbers that no other test uses.
fn new_id(size: u64) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 61);
    NEXT.fetch_add(size.next_multiple_of(4096) + 4096, Ordering::Relaxed)
}

impl MockBackend {
    fn taken(&self) -> Result<()> {
        if self.refuse.load(Ordering::Relaxed) { Err(Error::new(ErrorKind::Driver, "refused")) } else { Ok(()) }
    }
}

impl Backend for MockBackend {
    fn name(&self) -> &str {
        "mock:0"
    }
    fn description(&self) -> String {
        "mock".into()
    }
    fn make_current(&self) -> Result<()> {
        Ok(())
    }
    fn memory(&self) -> Result<MemoryInfo> {
        Ok(MemoryInfo { free: 0, total: 0 })
    }
    fn alloc(&self, bytes: u64) -> Result<Address> {
        Ok(Address(new_id(bytes)))
    }
    unsafe fn free(&self, _: Address) -> Result<()> {
        self.taken()
    }
    fn alloc_on(&self, _stream: RawStream, bytes: u64) -> Result<Address> {
        self.alloc(bytes)
    }

    unsafe fn free_on(&self, _stream: RawStream, _address: Address) -> Result<()> {
        Ok(())
    }

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        Ok(NonNull::new(std::ptr::without_provenance_mut(new_id(bytes as u64) as usize)).unwrap())
    }
    unsafe fn free_host(&self, _: NonNull<u8>, _: usize) -> Result<()> {
        self.taken()
    }
    fn stream_create(&self, _: &StreamSpec) -> Result<RawStream> {
        Ok(RawStream(new_id(1)))
    }
    fn stream_destroy(&self, _: RawStream) {}
    fn stream_query(&self, _: RawStream) -> Result<bool> {
        Ok(self.answer.load(Ordering::Relaxed))
    }
    fn stream_synchronize(&self, _: RawStream) -> Result<()> {
        Ok(())
    }
    fn event_create(&self, _: bool) -> Result<RawEvent> {
        Ok(RawEvent(new_id(1)))
    }
    fn event_destroy(&self, _: RawEvent) {}
    fn event_record(&self, _: RawEvent, _: RawStream) -> Result<()> {
        self.records.fetch_add(1, Ordering::Relaxed);
        if self.slow.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |slow| slow.checked_sub(1)).is_ok() {
            pass(Duration::from_millis(5));
        }
        self.taken()
    }
    fn event_query(&self, _: RawEvent) -> Result<bool> {
        Ok(self.answer.load(Ordering::Relaxed))
    }
    fn event_elapsed(&self, _: RawEvent, _: RawEvent) -> Result<Duration> {
        self.compared.fetch_add(1, Ordering::Relaxed);
        Ok(*self.elapsed.lock())
    }
    fn event_time(&self) -> Duration {
        *self.event_time.lock()
    }
    fn stream_wait(&self, _: RawStream, _: RawEvent) -> Result<()> {
        self.taken()
    }
    unsafe fn copy(&self, _: RawStream, _: Endpoint, _: Endpoint, _: u64) -> Result<()> {
        self.taken()
    }
    unsafe fn fill(&self, _: RawStream, _: Address, _: Pattern, _: u64) -> Result<()> {
        self.taken()
    }
    fn load(&self, _: &'static KernelDef) -> Result<()> {
        Ok(())
    }
    unsafe fn launch(&self, _: RawStream, _: &Launch<'_>) -> Result<()> {
        self.taken()
    }
    fn graph_create(&self) -> Result<RawGraph> {
        Ok(RawGraph(new_id(1)))
    }
    unsafe fn graph_add(&self, _: RawGraph, _: &[RawNode], _: &NodeWork<'_>) -> Result<RawNode> {
        self.taken().map(|()| RawNode(new_id(1)))
    }
    fn graph_instantiate(&self, _: RawGraph) -> Result<RawExec> {
        Ok(RawExec(new_id(1)))
    }
    unsafe fn exec_launch(&self, _: RawExec, _: RawStream) -> Result<()> {
        self.taken()
    }
    fn host_function(&self, _: RawStream, function: &mut Option<HostFunction>) -> Result<()> {
        self.functions.lock().extend(function.take().map(Function));
        Ok(())
    }
}

pub(super) fn kernel() -> &'static KernelDef {
    static KERNEL: KernelDef = KernelDef {
        name: "touch",
        file: "",
        declared: "",
        source: KernelSource::None,
        prototype: |_| String::new(),
        body: |_| (),
        number: crate::device::backend::KernelNumber::new(),
    };
    &KERNEL
}
