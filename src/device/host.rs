//! The host as a device: memory, and no streams.
//!
//! Hubs between two operators on the host allocate their envelopes here, so that the layers above need no special case.

use std::{alloc, ptr::NonNull, sync::OnceLock, time::Duration};

use super::backend::{
    Address, Backend, Endpoint, HostFunction, KernelDef, Launch, MAX_ALIGNMENT, MemoryInfo, Pattern, RawEvent,
    RawStream, StreamSpec,
};
use crate::error::{Error, ErrorKind, Result};

#[derive(Debug)]
pub(super) struct HostBackend;

/// The bytes of the machine's memory, or the process's limit if that is lower; `None` if the system reports neither.
pub(crate) fn host_memory() -> Option<u64> {
    static BYTES: OnceLock<Option<u64>> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        });
        // A container's limits, in both versions of control groups. `max` does not parse and means no limit.
        let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        let limits = limits.iter().filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok());
        limits.chain(machine).min()
    })
}

fn unsupported<T>(what: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Usage, format!("the host has no {what}: choose a device, such as `Device::first()`")))
}

fn layout(bytes: usize) -> Result<alloc::Layout> {
    alloc::Layout::from_size_align(bytes, MAX_ALIGNMENT)
        .map_err(|_| Error::new(ErrorKind::OutOfMemory, format!("{bytes} bytes exceed the address space")))
}

impl Backend for HostBackend {
    fn name(&self) -> &str {
        "host"
    }

    fn description(&self) -> String {
        "the host".into()
    }

    fn make_current(&self) -> Result<()> {
        Ok(())
    }

    fn memory(&self) -> Result<MemoryInfo> {
        unsupported("device memory")
    }

    fn alloc(&self, _bytes: u64) -> Result<Address> {
        unsupported("device memory")
    }

    unsafe fn free(&self, _address: Address) -> Result<()> {
        unsupported("device memory")
    }

    fn alloc_on(&self, _stream: RawStream, _bytes: u64) -> Result<Address> {
        unsupported("device memory")
    }

    unsafe fn free_on(&self, _stream: RawStream, _address: Address) -> Result<()> {
        unsupported("device memory")
    }

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        // SAFETY: by the contract of `Backend`, `bytes` is not zero, so the layout has a size.
        let memory = unsafe { alloc::alloc_zeroed(layout(bytes)?) };
        NonNull::new(memory)
            .ok_or_else(|| Error::new(ErrorKind::OutOfMemory, format!("the host cannot allocate {bytes} bytes")))
    }

    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()> {
        // SAFETY: by this function's contract the memory came from `alloc_host` with the same size, so the same layout,
        // and it is no longer in use.
        unsafe { alloc::dealloc(memory.as_ptr(), layout(bytes)?) };
        Ok(())
    }

    fn stream_create(&self, _spec: &StreamSpec) -> Result<RawStream> {
        unsupported("streams")
    }

    fn stream_destroy(&self, _stream: RawStream) {}

    fn stream_query(&self, _stream: RawStream) -> Result<bool> {
        unsupported("streams")
    }

    fn stream_synchronize(&self, _stream: RawStream) -> Result<()> {
        unsupported("streams")
    }

    fn event_create(&self, _timed: bool) -> Result<RawEvent> {
        unsupported("events")
    }

    fn event_destroy(&self, _event: RawEvent) {}

    fn event_record(&self, _event: RawEvent, _stream: RawStream) -> Result<()> {
        unsupported("streams")
    }

    fn event_query(&self, _event: RawEvent) -> Result<bool> {
        unsupported("events")
    }

    fn event_elapsed(&self, _from: RawEvent, _to: RawEvent) -> Result<Duration> {
        unsupported("events")
    }

    fn stream_wait(&self, _stream: RawStream, _event: RawEvent) -> Result<()> {
        unsupported("streams")
    }

    unsafe fn copy(&self, _stream: RawStream, _to: Endpoint, _from: Endpoint, _bytes: u64) -> Result<()> {
        unsupported("streams")
    }

    unsafe fn fill(&self, _stream: RawStream, _to: Address, _pattern: Pattern, _bytes: u64) -> Result<()> {
        unsupported("streams")
    }

    fn load(&self, _kernel: &'static KernelDef) -> Result<()> {
        unsupported("kernels")
    }

    unsafe fn launch(&self, _stream: RawStream, _launch: &Launch<'_>) -> Result<()> {
        unsupported("streams")
    }

    fn host_function(&self, _stream: RawStream, _function: &mut Option<HostFunction>) -> Result<()> {
        unsupported("streams")
    }
}
