//! Device memory: a private stream-ordered pool on the device.
//!
//! All allocations and frees are enqueued into one private stream, which contains no other work. Nothing in this stream
//! waits for other work on the device, so an allocation waits until it is complete: this takes microseconds, and
//! afterwards the memory may be used on any stream. A free is enqueued when no enqueued work accesses the memory any
//! more (the backend's contract), so it takes effect at once, and never blocks the device as `cuMemFree` does. The pool
//! keeps freed memory (its release threshold is unlimited), so the next allocation is cheap as well. It returns memory
//! to the driver when an allocation fails and when the device is closed.
//!
//! Stream-ordered allocations ([`DriverMemory::alloc_on`]) have a second pool. To reuse their memory, the driver can
//! make one user's stream wait for another's. In the first pool the private stream would wait, and allocations with it.
//!
//! Graph nodes that allocate memory use a pool of the driver, which also keeps freed memory. It is counted and trimmed
//! with the other pools.
//!
//! If a device has no pools, `cuMemAlloc` and `cuMemFree` are used instead, and nothing is stream-ordered.
//!
//! Memory of a pool is accessible only from its own device until [`DriverMemory::grant_access`] grants other devices access.

use std::{ffi::c_uint, mem, ptr};

use cudarc::driver::sys::{
    CUdevice, CUdevice_attribute, CUgraphMem_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationType, CUmemLocation, CUmemLocationType, CUmemPool_attribute, CUmemPoolHandle_st, CUmemPoolProps,
    CUstream_flags, CUstream_st,
};

use super::{
    context::Context,
    driver::{Code, Driver, DriverHandle},
    stream,
};
use crate::{
    device::backend::{Address, MemoryInfo, RawStream},
    error::{Error, ErrorKind, Result},
};

#[derive(Debug)]
pub(super) struct DriverMemory {
    /// `None` if the device has no pools.
    pooled: Option<Pooled>,
}

#[derive(Debug)]
struct Pooled {
    pool: DriverHandle<CUmemPoolHandle_st>,
    /// The pool of allocations on users' streams.
    ordered: DriverHandle<CUmemPoolHandle_st>,
    /// Carries only allocations and frees of `pool`.
    stream: DriverHandle<CUstream_st>,
}

impl DriverMemory {
    /// The driver's pools round sizes up to multiples of this.
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
        let mut code = self.try_alloc(driver, &mut address, bytes);
        if code == Code::OUT_OF_MEMORY && self.trim(cx)? {
            code = self.try_alloc(driver, &mut address, bytes);
        }
        if code.is_success() {
            self.synchronize(cx, driver)?;
            return Ok(Address(address));
        }
        if code == Code::OUT_OF_MEMORY || is_beyond(cx, code, bytes) {
            return Err(self.exhausted(cx, bytes));
        }
        Err(cx.fail(code, if self.pooled.is_some() { "cuMemAllocFromPoolAsync" } else { "cuMemAlloc" }))
    }

    fn try_alloc(&self, driver: &Driver, address: &mut u64, bytes: u64) -> Code {
        match &self.pooled {
            // SAFETY: the pool and the stream live as long as `self`; `address` outlives the call.
            Some(Pooled { pool, stream, .. }) => unsafe {
                (driver.mem_alloc_from_pool_async)(address, bytes as usize, pool.raw(), stream.raw())
            },
            // SAFETY: `address` outlives the call.
            None => unsafe { (driver.mem_alloc)(address, bytes as usize) },
        }
    }

    /// Waits until the allocations and frees so far have taken effect. This is short, as the stream contains no other
    /// work.
    fn synchronize(&self, cx: &Context, driver: &Driver) -> Result<()> {
        let Some(Pooled { stream, .. }) = &self.pooled else { return Ok(()) };
        // SAFETY: the stream lives as long as `self`.
        cx.check(unsafe { (driver.stream_synchronize)(stream.raw()) }, "cuStreamSynchronize")
    }

    /// Returns unused memory of the pools, including the graphs' pool, to the driver. False if there are no pools, so
    /// that a retry is pointless.
    pub(super) fn trim(&self, cx: &Context) -> Result<bool> {
        let Some(Pooled { pool, ordered, .. }) = &self.pooled else { return Ok(false) };
        let driver = cx.enter()?;
        self.synchronize(cx, driver)?;
        for pool in [pool, ordered] {
            // SAFETY: the pool lives as long as `self`; trimming does not affect memory that is allocated from it.
            cx.check(unsafe { (driver.mem_pool_trim_to)(pool.raw(), 0) }, "cuMemPoolTrimTo")?;
        }
        // SAFETY: the device is this context's; memory that graphs use or can use is not affected.
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
    /// The contract of [`Backend::free`](crate::device::backend::Backend::free).
    pub(super) unsafe fn free(&self, cx: &Context, address: Address) -> Result<()> {
        let driver = cx.enter()?;
        match &self.pooled {
            Some(Pooled { stream, .. }) => {
                // SAFETY: it came from this pool, and by contract no enqueued work accesses it any more.
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
        // SAFETY: the pool lives as long as `self`, the stream is the caller's and live, and `address` outlives the
        // call.
        let try_alloc = |address: &mut u64| unsafe {
            (driver.mem_alloc_from_pool_async)(address, bytes as usize, pool.raw(), stream(on))
        };
        let mut code = try_alloc(&mut address);
        if code == Code::OUT_OF_MEMORY && self.trim(cx)? {
            code = try_alloc(&mut address);
        }
        match code {
            Code::OUT_OF_MEMORY => Err(self.exhausted(cx, bytes)),
            code if is_beyond(cx, code, bytes) => Err(self.exhausted(cx, bytes)),
            code => cx.check(code, "cuMemAllocFromPoolAsync").map(|()| Address(address)),
        }
    }

    /// # Safety
    /// The contract of [`Backend::free_on`](crate::device::backend::Backend::free_on).
    pub(super) unsafe fn free_on(&self, cx: &Context, on: RawStream, address: Address) -> Result<()> {
        let driver = cx.enter()?;
        // SAFETY: it came from this pool, and by contract all work that might still access it precedes this call in the
        // stream.
        cx.check(unsafe { (driver.mem_free_async)(address.0, stream(on)) }, "cuMemFreeAsync")
    }

    fn pools(&self, cx: &Context) -> Result<&Pooled> {
        self.pooled.as_ref().ok_or_else(|| {
            let text = "the device has no memory pools, which stream-ordered memory needs: use `Allocator::unbounded`";
            Error::new(ErrorKind::Usage, text).at(cx.name.clone())
        })
    }

    /// The memory that is not in use: free in the driver, or kept by the pools for later allocations.
    pub(super) fn info(&self, cx: &Context) -> Result<MemoryInfo> {
        let driver = cx.enter()?;
        self.synchronize(cx, driver)?;
        let (free, total) = cx.memory_info().map_err(|code| cx.fail(code, "cuMemGetInfo"))?;
        let kept = self.usage(cx).map_or(0, |(reserved, used)| reserved.saturating_sub(used));
        Ok(MemoryInfo { free: free.saturating_add(kept).min(total), total })
    }

    /// The bytes that the pools, including the graphs' pool, have reserved from the driver, and the bytes that are
    /// allocated from them.
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
        // Read in this order, so that memory which is freed and returned in between does not count as kept by the
        // pools.
        let reserved = read(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?
            + of_graphs(CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
        let used = read(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?
            + of_graphs(CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT);
        Some((reserved, used))
    }

    /// Grants `other` access to this memory, including later allocations, so that copies between the two devices are
    /// direct.
    pub(super) fn grant_access(&self, cx: &Context, other: CUdevice) -> Result<()> {
        let Some(Pooled { pool, ordered, .. }) = &self.pooled else { return Ok(()) };
        let driver = cx.enter()?;
        let access =
            CUmemAccessDesc { location: location(other), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        [pool, ordered].iter().try_for_each(|pool| {
            // SAFETY: `access` is one descriptor, read during the call.
            cx.check(unsafe { (driver.mem_pool_set_access)(pool.raw(), &access, 1) }, "cuMemPoolSetAccess")
        })
    }

    /// Destroys the pools and the stream. The context must be current, and nothing may use the memory any more. Memory
    /// that is still allocated keeps its pool alive in the driver until the context is destroyed.
    pub(super) fn close(&self, driver: &Driver) {
        let Some(Pooled { pool, ordered, stream }) = &self.pooled else { return };
        // SAFETY: created by `open` and not used after this: the caller is the device's destructor.
        unsafe {
            let _ = (driver.mem_pool_destroy)(pool.raw());
            let _ = (driver.mem_pool_destroy)(ordered.raw());
            let _ = (driver.stream_destroy)(stream.raw());
        }
    }
}

/// The properties of a pool of plain memory on the device.
pub(super) fn pool_props(device: CUdevice) -> CUmemPoolProps {
    // SAFETY: a C struct of numbers, pointers and enums for which 0 is valid. Its fields depend on the version of CUDA,
    // and those that are not set below must be 0.
    let mut props: CUmemPoolProps = unsafe { mem::zeroed() };
    props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    props.handleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
    props.location = location(device);
    props
}

/// Creates a pool that keeps freed memory.
fn make_pool(cx: &Context, driver: &Driver) -> Result<DriverHandle<CUmemPoolHandle_st>> {
    let props = pool_props(cx.device);
    let mut pool = ptr::null_mut();
    // SAFETY: both outlive the call, which reads `props` and writes a handle to `pool`.
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
    set.map(|()| DriverHandle::new(pool))
}

fn make_stream(cx: &Context, driver: &Driver) -> Result<DriverHandle<CUstream_st>> {
    let mut stream = ptr::null_mut();
    // SAFETY: `stream` outlives the call, which writes one handle.
    let code = unsafe { (driver.stream_create)(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint, 0) };
    cx.check(code, "cuStreamCreateWithPriority")?;
    Ok(DriverHandle::new(stream))
}

fn location(device: CUdevice) -> CUmemLocation {
    /// The layout in every version of CUDA. From 13.2 on, cudarc has a union in place of the ordinal.
    #[repr(C)]
    struct OrdinalLocation {
        kind: CUmemLocationType,
        id: CUdevice,
    }
    let location = OrdinalLocation { kind: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
    // SAFETY: the same C struct; its size is checked at compile time.
    unsafe { mem::transmute::<OrdinalLocation, CUmemLocation>(location) }
}

/// True if the size exceeds the device's memory: some drivers call such sizes an invalid value.
fn is_beyond(cx: &Context, code: Code, bytes: u64) -> bool {
    code == Code::INVALID_VALUE && cx.memory_info().is_ok_and(|(_, total)| bytes > total)
}

// Sizes have 64 bits in the backend's interface and are `usize` in the driver, and keys of host functions are passed as
// pointers.
const _: () = assert!(mem::size_of::<usize>() == 8, "CUDA needs a 64-bit host");
