//! The address space of the emulated devices.
//!
//! An address is never a valid host pointer: it is non-canonical on every supported machine, so code that uses it as a
//! pointer crashes at once. All devices of the process share one address space, so a copy between two devices needs
//! only two addresses. Addresses are never reused, and a gap follows each block, so that accesses to freed memory and
//! past the end of a block are detected.
//!
//! ```text
//!   address ──► SPACE: base ─► Block ──► host allocation, aligned to 256
//!                                │
//!                                └─ counted by the Memory of the device it belongs to, against its capacity
//! ```
//!
//! Fresh memory is filled with `0xAD`, released memory with `0xDD`. An operation owns a reference to the block that it
//! uses, so after a premature free it accesses stale memory, but never another owner's.

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::BTreeMap,
    ptr::NonNull,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use super::lock;
use crate::{
    device::backend::{Address, MAX_ALIGNMENT, MemoryInfo},
    device::{host_memory, human},
    error::{Error, ErrorKind, Result},
    sync::Mutex,
};

/// The value of every fresh byte.
pub(super) const FRESH: u8 = 0xAD;
/// The value of every released byte.
pub(super) const RELEASED: u8 = 0xDD;

const ALIGN: u64 = MAX_ALIGNMENT as u64;
const GAP: u64 = 4096;
/// Larger allocations are checked against the host's memory.
const LARGE: usize = 1 << 30;

static SPACE: RwLock<BTreeMap<u64, Arc<Mapping>>> = RwLock::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(0x7e00_0000_0000_0000);

#[derive(Debug)]
struct Mapping {
    base: u64,
    bytes: u64,
    host: HostBlock,
}

/// Host bytes, poisoned on allocation and on release.
#[derive(Debug)]
struct HostBlock {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its bytes; streams order the accesses to them, as the contracts of `Backend` require.
unsafe impl Send for HostBlock {}
// SAFETY: as above; nothing here reads or writes the bytes through a shared reference.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    fn new(layout: Layout) -> Result<Self> {
        assert!(layout.size() > 0);
        let refuse = || {
            let text =
                format!("the host cannot allocate {} for an emulated device", human::bytes(layout.size() as u64));
            Error::new(ErrorKind::OutOfMemory, text)
        };
        // All bytes are written below: a system that overcommits its memory would kill the process.
        if layout.size() > LARGE && host_memory().is_some_and(|most| layout.size() as u64 > most) {
            return Err(refuse());
        }
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refuse)?;
        // SAFETY: just allocated with this size, and not shared yet.
        unsafe { start.write_bytes(FRESH, layout.size()) };
        Ok(Self { start, layout })
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout and released only here. No operation is using it: each operation
        // owns a reference to the block, and the caller that freed host memory has guaranteed it.
        unsafe {
            self.start.write_bytes(RELEASED, self.layout.size());
            dealloc(self.start.as_ptr(), self.layout);
        }
    }
}

/// The host bytes that an operation accesses: a pointer, and the block that keeps it valid.
#[derive(Debug)]
pub(super) struct Resolved {
    pub(super) start: *mut u8,
    _block: Option<Arc<Mapping>>,
}

/// Finds the host bytes behind `bytes` bytes at `address`. The error is a message for the user.
pub(super) fn resolve(address: Address, bytes: u64) -> Result<Resolved, String> {
    if bytes == 0 {
        // Aligned for any type and never read; even the pointer of an empty slice must not be null.
        return Ok(Resolved { start: std::ptr::without_provenance_mut(ALIGN as usize), _block: None });
    }
    let space = SPACE.read().unwrap_or_else(PoisonError::into_inner);
    let block = space.range(..=address.0).next_back().map(|(_, block)| block);
    let Some(block) = block.filter(|block| address.0 - block.base < block.bytes) else {
        return Err(format!("illegal address {address:?}: no memory is allocated there"));
    };
    let offset = address.0 - block.base;
    if bytes > block.bytes - offset {
        return Err(format!(
            "illegal address: {bytes} bytes at offset {offset} exceed the allocation of {} bytes",
            block.bytes
        ));
    }
    // SAFETY: the offset is inside the block, as was just checked.
    let start = unsafe { block.host.start.as_ptr().add(offset as usize) };
    Ok(Resolved { start, _block: Some(block.clone()) })
}

/// The memory of one device: its blocks in the address space, and its page-locked host memory.
#[derive(Debug)]
pub(super) struct EmulatedMemory {
    capacity: u64,
    state: Mutex<MemoryState>,
}

#[derive(Debug, Default)]
struct MemoryState {
    in_use: u64,
    /// The sizes of all live blocks of device memory, by base address.
    blocks: BTreeMap<u64, u64>,
    /// Live host memory.
    host: BTreeMap<usize, HostBlock>,
}

impl EmulatedMemory {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity, state: Mutex::default() }
    }

    pub(super) fn info(&self) -> MemoryInfo {
        MemoryInfo { free: self.capacity - lock(&self.state).in_use, total: self.capacity }
    }

    /// If `planned` is set, the allocation fails even if there is room.
    pub(super) fn alloc(&self, bytes: u64, planned: bool) -> Result<Address> {
        let mut state = lock(&self.state);
        if planned || bytes > self.capacity - state.in_use {
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!(
                    "asked for {bytes} bytes; {} of {} bytes are in use{}",
                    state.in_use,
                    self.capacity,
                    if planned { " (a planned fault)" } else { "" }
                ),
            ));
        }
        let size = usize::try_from(bytes).ok().filter(|size| *size > 0);
        let layout = size.and_then(|size| Layout::from_size_align(size, ALIGN as usize).ok());
        let layout = layout.ok_or_else(|| cannot_allocate(bytes))?;
        // Before an address is taken, so that a failed allocation uses up no addresses.
        let host = HostBlock::new(layout)?;
        let base = next_base(bytes)?;
        let block = Arc::new(Mapping { base, bytes, host });
        state.in_use += bytes;
        state.blocks.insert(base, bytes);
        SPACE.write().unwrap_or_else(PoisonError::into_inner).insert(base, block);
        Ok(Address(base))
    }

    pub(super) fn free(&self, address: Address) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(bytes) = state.blocks.remove(&address.0) else {
            return Err(Error::new(
                ErrorKind::Driver,
                format!("cannot free {address:?}: no allocation on this device starts there"),
            ));
        };
        state.in_use -= bytes;
        drop(state);
        release(address.0);
        Ok(())
    }

    pub(super) fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        let layout = Layout::from_size_align(bytes, MAX_ALIGNMENT).ok().filter(|layout| layout.size() > 0);
        let layout = layout.ok_or_else(|| cannot_allocate(bytes as u64))?;
        let block = HostBlock::new(layout)?;
        let start = block.start;
        lock(&self.state).host.insert(start.as_ptr().addr(), block);
        Ok(start)
    }

    pub(super) fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()> {
        let mut state = lock(&self.state);
        let key = memory.as_ptr().addr();
        match state.host.get(&key) {
            Some(block) if block.layout.size() == bytes => {
                let block = state.host.remove(&key);
                drop(state);
                drop(block);
                Ok(())
            }
            Some(block) => {
                let message = format!("host memory of {} bytes was freed as {bytes} bytes", block.layout.size());
                Err(Error::new(ErrorKind::Driver, message))
            }
            None => Err(Error::new(
                ErrorKind::Driver,
                "cannot free host memory that was not allocated by this device, or was freed before",
            )),
        }
    }
}

/// Memory of a graph: a reserved range of addresses, counted against the capacity for the life of this value. There is
/// memory behind it only between the nodes of a launch that allocate and free it.
#[derive(Debug)]
pub(super) struct ReservedRange {
    memory: Arc<EmulatedMemory>,
    base: u64,
    bytes: u64,
}

impl ReservedRange {
    /// For `planned` see [`EmulatedMemory::alloc`].
    pub(super) fn new(memory: &Arc<EmulatedMemory>, bytes: u64, planned: bool) -> Result<Self> {
        let Address(base) = memory.alloc(bytes, planned)?;
        // The range still counts against the device's capacity; only the bytes are released.
        release(base);
        lock(&memory.state).blocks.remove(&base);
        Ok(Self { memory: memory.clone(), base, bytes })
    }

    pub(super) fn address(&self) -> Address {
        Address(self.base)
    }

    pub(super) fn map(&self) -> Result<()> {
        let layout = Layout::from_size_align(self.bytes as usize, ALIGN as usize);
        let layout = layout.map_err(|error| Error::new(ErrorKind::Driver, error.to_string()))?;
        let block = Arc::new(Mapping { base: self.base, bytes: self.bytes, host: HostBlock::new(layout)? });
        let before = SPACE.write().unwrap_or_else(PoisonError::into_inner).insert(self.base, block);
        drop(before);
        Ok(())
    }

    pub(super) fn unmap(&self) {
        release(self.base);
    }
}

impl Drop for ReservedRange {
    fn drop(&mut self) {
        release(self.base);
        lock(&self.memory.state).in_use -= self.bytes;
    }
}

impl Drop for EmulatedMemory {
    /// Releases the device's memory. Host memory that was not freed is leaked, as pointers to it might exist.
    fn drop(&mut self) {
        let state = self.state.get_mut();
        for base in state.blocks.keys() {
            release(*base);
        }
        std::mem::take(&mut state.host).into_values().for_each(std::mem::forget);
    }
}

#[cold]
fn cannot_allocate(bytes: u64) -> Error {
    let text = format!("asked for {bytes} bytes: an allocation has at least 1 and at most {} bytes", isize::MAX);
    Error::new(ErrorKind::OutOfMemory, text)
}

fn next_base(bytes: u64) -> Result<u64> {
    let step = bytes.checked_next_multiple_of(ALIGN).and_then(|bytes| bytes.checked_add(GAP));
    let next = |base: u64| base.checked_add(step?);
    NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_err(|_| {
        Error::new(
            ErrorKind::OutOfMemory,
            "the emulated devices of this process have used all addresses, which are never reused: start a new process",
        )
    })
}

fn release(base: u64) {
    let block = SPACE.write().unwrap_or_else(PoisonError::into_inner).remove(&base);
    drop(block);
}
