//! Device memory: a stream-ordered pool of wakeline's own on the device.
//!
//! All allocations and frees are enqueued into one private stream, which carries nothing else. Nothing there ever
//! waits for work of the device, so an allocation can be waited for in place: it is a matter of microseconds, and
//! afterwards the memory may be used on any stream. A free is enqueued when nothing that was enqueued touches the
//! memory any more (that is the seam's contract), so it takes effect at once, and never holds up the device as
//! `cuMemFree` does. The pool keeps what is freed (its release threshold is all there is), so the next allocation is
//! cheap too; it gives memory back to the driver when an allocation fails and when the device is closed.
//!
//! Stream-ordered allocations ([`Memory::alloc_on`]) have a second pool. To use memory of theirs again, the driver may
//! make one user's stream wait for another's; in the first pool that would be the private stream, and whoever allocates
//! would wait for it.
//!
//! Nodes of graphs that make memory have a pool of the driver's own, which keeps what they give back as well: it is counted
//! and given back with the others.
//!
//! Where a device has no pools, `cuMemAlloc` and `cuMemFree` take their place, and nothing is stream-ordered.
//!
//! Memory of a pool can be reached by its own device alone until other devices are let in; that is what
//! [`Memory::let_in`] is for.

use std::{ffi::c_uint, mem, ptr};

use cudarc::driver::sys::{
    CUdevice, CUdevice_attribute, CUgraphMem_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationType, CUmemLocation, CUmemLocationType, CUmemPool_attribute, CUmemPoolHandle_st, CUmemPoolProps,
    CUstream_flags, CUstream_st,
};

use super::{
    context::Context,
    driver::{Code, Driver, Handle},
    stream,
};
use crate::{
    device::backend::{Address, MemoryInfo, RawStream},
    error::{Error, ErrorKind, Result},
};

/// The memory of one device.
#[derive(Debug)]
pub(super) struct Memory {
    /// None where the device has no pools.
    pooled: Option<Pooled>,
}

#[derive(Debug)]
struct Pooled {
    pool: Handle<CUmemPoolHandle_st>,
    /// What users' streams allocate and free from.
    ordered: Handle<CUmemPoolHandle_st>,
    /// Only allocations and frees of the first.
    stream: Handle<CUstream_st>,
}

impl Memory {
    /// What the driver's pools round sizes up to.
    pub(super) const GRANULARITY: u64 = 512;

    pub(super) fn open(cx: &Context) -> Result<Self> {
        let driver = cx.enter()?;
        let pools = driver
            .attribute(cx.device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)
            .map_err(|code| cx.fail(code, "cuDeviceGetAttribute"))?;
        if pools == 0 {
            return Ok(Self { pooled: None });
        }
        let pool = make_pool(cx, driver)?;
        let rest = make_pool(cx, driver).and_then(|ordered| Ok((ordered, make_stream(cx, driver)?)));
        if rest.is_err() {
            // SAFETY: made above, and nothing was allocated from it.
            let _ = unsafe { (driver.mem_pool_destroy)(pool.raw()) };
        }
        let (ordered, stream) = rest?;
        Ok(Self { pooled: Some(Pooled { pool, ordered, stream }) })
    }

    pub(super) fn alloc(&self, cx: &Context, bytes: u64) -> Result<Address> {
        let driver = cx.enter()?;
        let mut address = 0;
        let mut code = self.ask(driver, &mut address, bytes);
        if code == Code::OUT_OF_MEMORY && self.trim(cx)? {
            code = self.ask(driver, &mut address, bytes);
        }
        if code.is_success() {
            self.settle(cx, driver)?;
            return Ok(Address(address));
        }
        if code == Code::OUT_OF_MEMORY || is_beyond(cx, code, bytes) {
            return Err(self.exhausted(cx, bytes));
        }
        Err(cx.fail(code, if self.pooled.is_some() { "cuMemAllocFromPoolAsync" } else { "cuMemAlloc" }))
    }

    fn ask(&self, driver: &Driver, address: &mut u64, bytes: u64) -> Code {
        match &self.pooled {
            // SAFETY: the pool and the stream live as long as `self`; `address` outlives the call.
            Some(Pooled { pool, stream, .. }) => unsafe {
                (driver.mem_alloc_from_pool_async)(address, bytes as usize, pool.raw(), stream.raw())
            },
            // SAFETY: `address` outlives the call.
            None => unsafe { (driver.mem_alloc)(address, bytes as usize) },
        }
    }

    /// Waits until the allocations and frees made so far have happened. Short: nothing else is in that stream.
    fn settle(&self, cx: &Context, driver: &Driver) -> Result<()> {
        let Some(Pooled { stream, .. }) = &self.pooled else { return Ok(()) };
        // SAFETY: the stream lives as long as `self`.
        cx.check(unsafe { (driver.stream_synchronize)(stream.raw()) }, "cuStreamSynchronize")
    }

    /// Gives what the pools do not use back to the driver, that of graphs too. False where there is no pool, and so nothing
    /// to hope for.
    pub(super) fn trim(&self, cx: &Context) -> Result<bool> {
        let Some(Pooled { pool, ordered, .. }) = &self.pooled else { return Ok(false) };
        let driver = cx.enter()?;
        self.settle(cx, driver)?;
        for pool in [pool, ordered] {
            // SAFETY: the pool lives as long as `self`; what is allocated from it is not touched by trimming.
            cx.check(unsafe { (driver.mem_pool_trim_to)(pool.raw(), 0) }, "cuMemPoolTrimTo")?;
        }
        // SAFETY: the device is this context's; what graphs that run or may run use is not touched.
        cx.check(unsafe { (driver.device_graph_mem_trim)(cx.device) }, "cuDeviceGraphMemTrim")?;
        Ok(true)
    }

    fn exhausted(&self, cx: &Context, asked: u64) -> Error {
        let held = match self.usage(cx) {
            Some((_, used)) => format!(", {used} are in use by wakeline in this process"),
            None => String::new(),
        };
        let numbers = match cx.memory_info() {
            Ok((free, total)) => format!("{free} of {total} bytes are free{held}"),
            Err(_) => "the driver does not say how much is free".into(),
        };
        Error::new(ErrorKind::OutOfMemory, format!("asked for {asked} bytes; {numbers}")).at(cx.name.clone())
    }

    /// # Safety
    /// As [`Backend::free`](crate::device::backend::Backend::free).
    pub(super) unsafe fn free(&self, cx: &Context, address: Address) -> Result<()> {
        let driver = cx.enter()?;
        match &self.pooled {
            Some(Pooled { stream, .. }) => {
                // SAFETY: it came from this pool, and by contract nothing that is enqueued touches it any more.
                cx.check(unsafe { (driver.mem_free_async)(address.0, stream.raw()) }, "cuMemFreeAsync")
            }
            // SAFETY: it came from `cuMemAlloc`; the rest as above.
            None => cx.check(unsafe { (driver.mem_free)(address.0) }, "cuMemFree"),
        }
    }

    pub(super) fn alloc_on(&self, cx: &Context, on: RawStream, bytes: u64) -> Result<Address> {
        let driver = cx.enter()?;
        let pool = &self.pools(cx)?.ordered;
        let mut address = 0;
        // SAFETY: the pool lives as long as `self`, the stream is the caller's and live, and `address` outlives the call.
        let ask = |address: &mut u64| unsafe {
            (driver.mem_alloc_from_pool_async)(address, bytes as usize, pool.raw(), stream(on))
        };
        let mut code = ask(&mut address);
        if code == Code::OUT_OF_MEMORY && self.trim(cx)? {
            code = ask(&mut address);
        }
        match code {
            Code::OUT_OF_MEMORY => Err(self.exhausted(cx, bytes)),
            code if is_beyond(cx, code, bytes) => Err(self.exhausted(cx, bytes)),
            code => cx.check(code, "cuMemAllocFromPoolAsync").map(|()| Address(address)),
        }
    }

    /// # Safety
    /// As [`Backend::free_on`](crate::device::backend::Backend::free_on).
    pub(super) unsafe fn free_on(&self, cx: &Context, on: RawStream, address: Address) -> Result<()> {
        let driver = cx.enter()?;
        // SAFETY: it came from this pool, and by contract what may still touch it comes before this in the stream.
        cx.check(unsafe { (driver.mem_free_async)(address.0, stream(on)) }, "cuMemFreeAsync")
    }

    fn pools(&self, cx: &Context) -> Result<&Pooled> {
        self.pooled.as_ref().ok_or_else(|| {
            let text = "it has no memory pools, so nothing is stream-ordered: use `Allocator::unbounded`";
            Error::new(ErrorKind::Usage, text).at(cx.name.clone())
        })
    }

    /// What nobody uses: free in the driver's eyes, or kept by our pool for the next allocation.
    pub(super) fn info(&self, cx: &Context) -> Result<MemoryInfo> {
        let driver = cx.enter()?;
        self.settle(cx, driver)?;
        let (free, total) = cx.memory_info().map_err(|code| cx.fail(code, "cuMemGetInfo"))?;
        let kept = self.usage(cx).map_or(0, |(reserved, used)| reserved.saturating_sub(used));
        Ok(MemoryInfo { free: free.saturating_add(kept).min(total), total })
    }

    /// Bytes that the pools have from the driver, that of graphs too, and those of them that are allocated.
    fn usage(&self, cx: &Context) -> Option<(u64, u64)> {
        let driver = cx.driver;
        let Pooled { pool, ordered, .. } = self.pooled.as_ref()?;
        let read = |attribute| {
            [pool, ordered].iter().try_fold(0_u64, |sum, pool| {
                let mut value = 0_u64;
                // SAFETY: both attributes below are `cuuint64_t`, which the driver writes to `value` during the call.
                let code =
                    unsafe { (driver.mem_pool_get_attribute)(pool.raw(), attribute, ptr::from_mut(&mut value).cast()) };
                code.is_success().then_some(sum + value)
            })
        };
        let of_graphs = |attribute| {
            let mut value = 0_u64;
            // SAFETY: as above.
            let code = unsafe {
                (driver.device_get_graph_mem_attribute)(cx.device, attribute, ptr::from_mut(&mut value).cast())
            };
            if code.is_success() { value } else { 0 }
        };
        // In this order: what is freed and given back in between then reads as nothing kept, not as something.
        let reserved = read(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?
            + of_graphs(CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
        let used = read(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?
            + of_graphs(CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT);
        Some((reserved, used))
    }

    /// Lets `other` reach this memory, so that copies between the two go straight. Later allocations too.
    pub(super) fn let_in(&self, cx: &Context, other: CUdevice) -> Result<()> {
        let Some(Pooled { pool, ordered, .. }) = &self.pooled else { return Ok(()) };
        let driver = cx.enter()?;
        let access =
            CUmemAccessDesc { location: location(other), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        [pool, ordered].iter().try_for_each(|pool| {
            // SAFETY: `access` is one descriptor, read during the call.
            cx.check(unsafe { (driver.mem_pool_set_access)(pool.raw(), &access, 1) }, "cuMemPoolSetAccess")
        })
    }

    /// Gives everything back. The context must be current; nothing may use the memory any more. What is still allocated
    /// keeps the pool alive in the driver until the context ends.
    pub(super) fn close(&self, driver: &Driver) {
        let Some(Pooled { pool, ordered, stream }) = &self.pooled else { return };
        // SAFETY: made by `open`, and used by nobody after this: the caller is the destructor of the device.
        unsafe {
            let _ = (driver.mem_pool_destroy)(pool.raw());
            let _ = (driver.mem_pool_destroy)(ordered.raw());
            let _ = (driver.stream_destroy)(stream.raw());
        }
    }
}

/// What a pool of plain memory on the device is.
pub(super) fn pool_props(device: CUdevice) -> CUmemPoolProps {
    // SAFETY: a C struct of numbers, pointers and enums that have a 0. Which fields it has depends on the version of CUDA, and those
    // that are not set below are to be 0.
    let mut props: CUmemPoolProps = unsafe { mem::zeroed() };
    props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    props.handleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
    props.location = location(device);
    props
}

/// A pool that keeps what is freed.
fn make_pool(cx: &Context, driver: &Driver) -> Result<Handle<CUmemPoolHandle_st>> {
    let props = pool_props(cx.device);
    let mut pool = ptr::null_mut();
    // SAFETY: both outlive the call; the driver reads the one and writes a handle to the other.
    let code = unsafe { (driver.mem_pool_create)(&mut pool, &props) };
    cx.check(code, "cuMemPoolCreate")?;
    let mut keep = u64::MAX;
    // SAFETY: the release threshold is a `cuuint64_t`, which the driver reads from `keep` during the call.
    let code = unsafe {
        (driver.mem_pool_set_attribute)(
            pool,
            CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            ptr::from_mut(&mut keep).cast(),
        )
    };
    let set = cx.check(code, "cuMemPoolSetAttribute");
    if set.is_err() {
        // SAFETY: made above, and nothing was allocated from it.
        let _ = unsafe { (driver.mem_pool_destroy)(pool) };
    }
    set.map(|()| Handle::new(pool))
}

fn make_stream(cx: &Context, driver: &Driver) -> Result<Handle<CUstream_st>> {
    let mut stream = ptr::null_mut();
    // SAFETY: `stream` outlives the call, which writes one handle.
    let code = unsafe { (driver.stream_create)(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint, 0) };
    cx.check(code, "cuStreamCreateWithPriority")?;
    Ok(Handle::new(stream))
}

fn location(device: CUdevice) -> CUmemLocation {
    /// Its layout in every version of CUDA: from 13.2 on cudarc has a union where the ordinal is.
    #[repr(C)]
    struct Location {
        kind: CUmemLocationType,
        id: CUdevice,
    }
    let location = Location { kind: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    // SAFETY: the same C struct; that it has the same size is checked as it is compiled.
    unsafe { mem::transmute::<Location, CUmemLocation>(location) }
}

/// Numbers beyond all reason are an invalid value to some drivers.
fn is_beyond(cx: &Context, code: Code, bytes: u64) -> bool {
    code == Code::INVALID_VALUE && cx.memory_info().is_ok_and(|(_, total)| bytes > total)
}

// Sizes are 64 bits at the seam and `usize` in the driver, and keys of host functions travel as pointers.
const _: () = assert!(mem::size_of::<usize>() == 8, "CUDA needs a 64-bit host");
