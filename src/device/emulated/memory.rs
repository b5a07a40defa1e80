//! The address space of the emulated devices.
//!
//! An address here is a number that is never a valid host pointer: it is non-canonical on every machine this runs on,
//! so code that takes one for a pointer dies at once instead of working by luck. All the devices of the process share one
//! space, so a copy between two of them needs no more than two addresses. Addresses are never used twice, and a gap lies
//! behind each block, so that what was freed and what is past an end is found to be so.
//!
//! ```text
//!   address ──► SPACE: base ─► Block ──► host allocation, aligned to 256
//!                                │
//!                                └─ counted by the Memory of the device it belongs to, against its capacity
//! ```
//!
//! Fresh memory holds `0xAD`, released memory `0xDD`: who reads what nobody wrote sees it. An operation holds the block
//! that it uses, so memory that is freed too early is the wrong memory, but never memory of somebody else's.

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
    device::backend::{Address, MOST_ALIGNMENT, MemoryInfo},
    device::{host_memory, human},
    error::{Error, ErrorKind, Result},
    sync::Mutex,
};

/// What every fresh byte holds.
pub(super) const FRESH: u8 = 0xAD;
/// What every released byte holds.
pub(super) const RELEASED: u8 = 0xDD;

const ALIGN: u64 = MOST_ALIGNMENT as u64;
const GAP: u64 = 4096;
/// From here on the host is asked how much memory it has.
const LARGE: usize = 1 << 30;

static SPACE: RwLock<BTreeMap<u64, Arc<Block>>> = RwLock::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(0x7e00_0000_0000_0000);

/// One live allocation.
#[derive(Debug)]
struct Block {
    base: u64,
    bytes: u64,
    host: HostBlock,
}

/// Host bytes, poisoned when they come and when they go.
#[derive(Debug)]
struct HostBlock {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its bytes; who may touch them when is settled by the streams, as the unsafe calls of `Backend` demand.
unsafe impl Send for HostBlock {}
// SAFETY: as above; nothing here reads or writes the bytes through a shared reference.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    fn new(layout: Layout) -> Result<Self> {
        assert!(layout.size() > 0);
        let refuse = || {
            let text = format!("the host has no {} left for an emulated device", human::bytes(layout.size() as u64));
            Error::new(ErrorKind::OutOfMemory, text)
        };
        // All of it is written below: what a system promises and does not have would end the process.
        if layout.size() > LARGE && host_memory().is_some_and(|most| layout.size() as u64 > most) {
            return Err(refuse());
        }
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refuse)?;
        // SAFETY: just allocated with this size, and nobody else knows it yet.
        unsafe { start.write_bytes(FRESH, layout.size()) };
        Ok(Self { start, layout })
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout and released only here. No operation is using it: each one holds
        // the block, and host memory's owner has vouched for it.
        unsafe {
            self.start.write_bytes(RELEASED, self.layout.size());
            dealloc(self.start.as_ptr(), self.layout);
        }
    }
}

/// Bytes of an operation, found and held: a host pointer, and the block that keeps it valid.
#[derive(Debug)]
pub(super) struct Reach {
    pub(super) start: *mut u8,
    _block: Option<Arc<Block>>,
}

/// Finds the host bytes behind `bytes` bytes at `address`. The error says what is wrong with it, for people.
pub(super) fn reach(address: Address, bytes: u64) -> Result<Reach, String> {
    if bytes == 0 {
        // Aligned for everything and never read: a slice of no elements must still not be null.
        return Ok(Reach { start: std::ptr::without_provenance_mut(ALIGN as usize), _block: None });
    }
    let space = SPACE.read().unwrap_or_else(PoisonError::into_inner);
    let block = space.range(..=address.0).next_back().map(|(_, block)| block);
    let Some(block) = block.filter(|block| address.0 - block.base < block.bytes) else {
        return Err(format!("illegal address {address:?}: no memory is allocated there"));
    };
    let offset = address.0 - block.base;
    if bytes > block.bytes - offset {
        return Err(format!(
            "illegal address: {bytes} bytes at offset {offset} of an allocation of {} bytes",
            block.bytes
        ));
    }
    // SAFETY: the offset is inside the block, as was just asked.
    let start = unsafe { block.host.start.as_ptr().add(offset as usize) };
    Ok(Reach { start, _block: Some(block.clone()) })
}

/// The memory of one device: what is its own in the space, and the host memory it gave out.
#[derive(Debug)]
pub(super) struct Memory {
    capacity: u64,
    ledger: Mutex<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    in_use: u64,
    /// Base and size of all live device memory.
    blocks: BTreeMap<u64, u64>,
    /// Live host memory.
    host: BTreeMap<usize, HostBlock>,
}

impl Memory {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity, ledger: Mutex::default() }
    }

    pub(super) fn info(&self) -> MemoryInfo {
        MemoryInfo { free: self.capacity - lock(&self.ledger).in_use, total: self.capacity }
    }

    /// `planned`: it is to fail even if it would fit.
    pub(super) fn alloc(&self, bytes: u64, planned: bool) -> Result<Address> {
        let mut ledger = lock(&self.ledger);
        if planned || bytes > self.capacity - ledger.in_use {
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!(
                    "asked for {bytes} bytes, {} in use of {}{}",
                    ledger.in_use,
                    self.capacity,
                    if planned { " (a planned fault)" } else { "" }
                ),
            ));
        }
        let size = usize::try_from(bytes).ok().filter(|size| *size > 0);
        let layout = size.and_then(|size| Layout::from_size_align(size, ALIGN as usize).ok());
        let layout = layout.ok_or_else(|| cannot_allocate(bytes))?;
        // First: what there is no memory for takes no addresses either.
        let host = HostBlock::new(layout)?;
        let base = next_base(bytes)?;
        let block = Arc::new(Block { base, bytes, host });
        ledger.in_use += bytes;
        ledger.blocks.insert(base, bytes);
        SPACE.write().unwrap_or_else(PoisonError::into_inner).insert(base, block);
        Ok(Address(base))
    }

    pub(super) fn free(&self, address: Address) -> Result<()> {
        let mut ledger = lock(&self.ledger);
        let Some(bytes) = ledger.blocks.remove(&address.0) else {
            return Err(Error::new(ErrorKind::Driver, format!("{address:?} is not the start of an allocation here")));
        };
        ledger.in_use -= bytes;
        drop(ledger);
        release(address.0);
        Ok(())
    }

    pub(super) fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        let layout = Layout::from_size_align(bytes, MOST_ALIGNMENT).ok().filter(|layout| layout.size() > 0);
        let layout = layout.ok_or_else(|| cannot_allocate(bytes as u64))?;
        let block = HostBlock::new(layout)?;
        let start = block.start;
        lock(&self.ledger).host.insert(start.as_ptr().addr(), block);
        Ok(start)
    }

    pub(super) fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()> {
        let mut ledger = lock(&self.ledger);
        let key = memory.as_ptr().addr();
        match ledger.host.get(&key) {
            Some(block) if block.layout.size() == bytes => {
                let block = ledger.host.remove(&key);
                drop(ledger);
                drop(block);
                Ok(())
            }
            Some(block) => {
                let message = format!("host memory of {} bytes given back as {bytes}", block.layout.size());
                Err(Error::new(ErrorKind::Driver, message))
            }
            None => Err(Error::new(ErrorKind::Driver, "host memory that did not come from this device")),
        }
    }
}

/// Memory of a graph's: an address that is fixed for as long as this lives and counted for as long, with memory behind it
/// only from where a launch makes it to where one gives it back. In between lies nothing: who uses it then is found out.
#[derive(Debug)]
pub(super) struct Reserved {
    memory: Arc<Memory>,
    base: u64,
    bytes: u64,
}

impl Reserved {
    /// `planned`: as for [`Memory::alloc`].
    pub(super) fn new(memory: &Arc<Memory>, bytes: u64, planned: bool) -> Result<Self> {
        let Address(base) = memory.alloc(bytes, planned)?;
        // The device counts it on; only the bytes are not there yet.
        release(base);
        lock(&memory.ledger).blocks.remove(&base);
        Ok(Self { memory: memory.clone(), base, bytes })
    }

    pub(super) fn address(&self) -> Address {
        Address(self.base)
    }

    /// Fresh memory lies there from now on.
    pub(super) fn appear(&self) -> Result<()> {
        let layout = Layout::from_size_align(self.bytes as usize, ALIGN as usize);
        let layout = layout.map_err(|error| Error::new(ErrorKind::Driver, error.to_string()))?;
        let block = Arc::new(Block { base: self.base, bytes: self.bytes, host: HostBlock::new(layout)? });
        let before = SPACE.write().unwrap_or_else(PoisonError::into_inner).insert(self.base, block);
        drop(before);
        Ok(())
    }

    /// And from now on nothing.
    pub(super) fn vanish(&self) {
        release(self.base);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        release(self.base);
        lock(&self.memory.ledger).in_use -= self.bytes;
    }
}

impl Drop for Memory {
    /// The device's own memory goes with it. Host memory that is still out stays valid for ever: somebody has a pointer.
    fn drop(&mut self) {
        let ledger = self.ledger.get_mut();
        for base in ledger.blocks.keys() {
            release(*base);
        }
        std::mem::take(&mut ledger.host).into_values().for_each(std::mem::forget);
    }
}

#[cold]
fn cannot_allocate(bytes: u64) -> Error {
    let text = format!("asked for {bytes} bytes, and an allocation has from 1 to {}", isize::MAX);
    Error::new(ErrorKind::OutOfMemory, text)
}

/// Where the next block of so many bytes lies.
fn next_base(bytes: u64) -> Result<u64> {
    let step = bytes.checked_next_multiple_of(ALIGN).and_then(|bytes| bytes.checked_add(GAP));
    let next = |base: u64| base.checked_add(step?);
    NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_err(|_| {
        Error::new(
            ErrorKind::OutOfMemory,
            "the emulated devices' addresses are used up: each is used once in a process",
        )
    })
}

fn release(base: u64) {
    let block = SPACE.write().unwrap_or_else(PoisonError::into_inner).remove(&base);
    drop(block);
}
