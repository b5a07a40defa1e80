//! The accounting of memory: [`Accounting`] of a heap, [`DeviceTotals`] of a device, [`Account`] of an operator.
//!
//! ```text
//!            hand_out_new           park           settle          return_to_driver, evict       released
//!   driver ──────────────> in use ────────> parked ────────> free ───────────────────> leaving ──────────> driver
//!                            ^  │ return_free │               ^ │
//!                            │  └─────────────│───────────────┘ │
//!                            ├────────────────┘ hand_out_parked │
//!                            └──────────────────────────────────┘ hand_out_free
//! ```
//!
//! A parked block was freed while a stream might still be using it. It becomes free once its uses are complete. A block
//! that is in use or parked leaks if its device is lost or refuses to free it.
//!
//! Only the transitions change a count. Each is called under the lock of its heap, together with the change of the free
//! lists that it accounts for. This file depends neither on a device nor on a heap, and the tests compare every
//! transition with a model.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use smallvec::SmallVec;

use super::MemoryStats;

/// A block: its size, and the bytes that were requested of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) size: u64,
    pub(super) bytes: u64,
}

/// The bytes of one heap by their state, and how often requests were granted.
pub(super) struct Accounting {
    device: Arc<DeviceTotals>,
    /// Page-locked host memory, which does not count as the device's memory in use.
    host: bool,
    /// The maximum number of bytes that the heap holds.
    limit: Option<u64>,
    /// A request may get any parked block: its stream waits for the block's uses.
    hands_out_parked: bool,
    /// Bytes of all blocks, of the parked ones and of the free ones. The remaining blocks are in use.
    held: u64,
    parked: u64,
    free: u64,
    /// Bytes of blocks that are being returned to the driver. The heap no longer holds them.
    leaving: u64,
    /// Requested bytes of the blocks in use or parked, and of the parked ones alone.
    requested: u64,
    requested_parked: u64,
    /// The highest value of `requested`.
    peak: u64,
    /// Bytes that are reserved for runs that have started.
    reserved: u64,
    /// Bytes that are in use by, or reserved for, the operators of each flow.
    owners: SmallVec<[(usize, u64); 1]>,
    /// The number of requests that got a freed block.
    reused: u64,
    /// The number of blocks that the driver allocated.
    from_driver: u64,
    /// How often free blocks were evicted, and how often a request that does not wait was refused after its bytes were
    /// counted.
    evictions: u64,
    refused: u64,
}

impl Accounting {
    pub(super) fn new(device: &Arc<DeviceTotals>, host: bool, limit: Option<u64>, hands_out_parked: bool) -> Self {
        Self {
            device: device.clone(),
            host,
            limit,
            hands_out_parked,
            held: 0,
            parked: 0,
            free: 0,
            leaving: 0,
            requested: 0,
            requested_parked: 0,
            peak: 0,
            reserved: 0,
            owners: SmallVec::new(),
            reused: 0,
            from_driver: 0,
            evictions: 0,
            refused: 0,
        }
    }

    /// True if `size` more bytes can be handed out besides the bytes reserved for other requests. `drawn` is the number
    /// of bytes reserved for this request.
    pub(super) fn has_room(&self, size: u64, drawn: u64) -> bool {
        let Some(limit) = self.limit else { return true };
        let taken = if self.hands_out_parked { self.blocks_in_use() } else { self.held - self.free };
        let others = taken.saturating_add(self.reserved.saturating_sub(drawn));
        others.saturating_add(size) <= limit
    }

    /// Bytes that must be evicted before the heap can hold `size` more.
    pub(super) fn excess(&self, size: u64) -> u64 {
        self.limit.map_or(0, |limit| (self.held + size).saturating_sub(limit))
    }

    /// The driver allocated a block in advance.
    pub(super) fn add_free(&mut self, size: u64) {
        self.held += size;
        self.free += size;
        self.from_driver += 1;
    }

    /// Counts a block as in use that the driver is about to allocate, so that no other request takes the same room.
    /// [`new_arrived`](Self::new_arrived) or [`new_failed`](Self::new_failed) follows.
    pub(super) fn hand_out_new(&mut self, block: Extent, drawn: u64) {
        self.held += block.size;
        self.requested += block.bytes;
        self.reserved -= drawn;
    }

    pub(super) fn new_arrived(&mut self, block: Extent) {
        self.from_driver += 1;
        self.peak = self.peak.max(self.requested);
        self.count_in_use(0, block.bytes);
    }

    pub(super) fn new_failed(&mut self, block: Extent, drawn: u64) {
        self.held -= block.size;
        self.requested -= block.bytes;
        self.reserved += drawn;
    }

    #[inline]
    pub(super) fn hand_out_free(&mut self, block: Extent, drawn: u64) {
        self.free -= block.size;
        self.granted(0, block.bytes, drawn);
    }

    /// `bytes` is the size of the new request.
    #[inline]
    pub(super) fn hand_out_parked(&mut self, block: Extent, bytes: u64, drawn: u64) {
        self.parked -= block.size;
        self.requested_parked -= block.bytes;
        self.granted(block.bytes, bytes, drawn);
    }

    #[inline]
    fn granted(&mut self, before: u64, after: u64, drawn: u64) {
        self.reserved -= drawn;
        self.reused += 1;
        self.replace_request(before, after);
    }

    /// Returns the reservation of a request that failed after it was granted.
    pub(super) fn restore(&mut self, drawn: u64) {
        self.reserved += drawn;
    }

    /// Counts a request that does not wait and was refused after its bytes were counted.
    pub(super) fn refuse(&mut self) {
        self.refused += 1;
    }

    /// A block was freed while a stream might still be using it.
    #[inline]
    pub(super) fn park(&mut self, block: Extent) {
        self.parked += block.size;
        self.requested_parked += block.bytes;
    }

    /// The uses of a parked block are complete: it becomes free or, with `at_driver`, has already been returned to the
    /// driver.
    pub(super) fn settle(&mut self, block: Extent, at_driver: bool) {
        self.parked -= block.size;
        self.requested_parked -= block.bytes;
        self.replace_request(block.bytes, 0);
        if at_driver {
            self.held -= block.size;
        } else {
            self.free += block.size;
        }
    }

    /// A block was freed, and no stream uses it.
    pub(super) fn return_free(&mut self, block: Extent) {
        self.free += block.size;
        self.replace_request(block.bytes, 0);
    }

    /// A block in use can neither be reused nor freed.
    pub(super) fn leak(&mut self, block: Extent) {
        self.held -= block.size;
        self.replace_request(block.bytes, 0);
        self.device.leak(block.bytes);
    }

    /// A parked block can neither be reused nor freed.
    pub(super) fn leak_parked(&mut self, block: Extent) {
        self.parked -= block.size;
        self.requested_parked -= block.bytes;
        self.leak(block);
    }

    /// Free blocks of `size` bytes in all are about to be returned to the driver. [`released`](Self::released) follows.
    pub(super) fn return_to_driver(&mut self, size: u64) {
        self.free -= size;
        self.held -= size;
        self.leaving += size;
    }

    /// Like [`return_to_driver`](Self::return_to_driver), for cached blocks; counts an eviction.
    pub(super) fn evict(&mut self, size: u64) {
        self.return_to_driver(size);
        self.evictions += u64::from(size > 0);
    }

    /// The driver has taken or lost the blocks that were leaving.
    pub(super) fn released(&mut self, left: Released) {
        self.leaving -= left.all;
        self.device.returned.fetch_add(left.returned, Ordering::SeqCst);
        self.device.leak(left.leaked);
    }

    /// Reserves bytes for a run of an operator of this flow.
    pub(super) fn reserve(&mut self, flow: usize, bytes: u64) {
        self.reserved += bytes;
        self.own(flow, bytes);
    }

    /// Returns the rest of a reservation that was not drawn.
    pub(super) fn unreserve(&mut self, flow: usize, bytes: u64) {
        self.reserved -= bytes;
        self.disown(flow, bytes);
    }

    /// Memory was handed out to this flow, or `bytes` of it were reserved.
    pub(super) fn own(&mut self, flow: usize, bytes: u64) {
        match self.owners.iter_mut().find(|(owner, _)| *owner == flow) {
            Some((_, owned)) => *owned += bytes,
            None => self.owners.push((flow, bytes)),
        }
    }

    /// Memory of this flow was freed, or `bytes` of a reservation were drawn.
    pub(super) fn disown(&mut self, flow: usize, bytes: u64) {
        if let Some((_, owned)) = self.owners.iter_mut().find(|(owner, _)| *owner == flow) {
            *owned -= bytes;
        }
        self.owners.retain(|(_, owned)| *owned > 0);
    }

    #[inline]
    fn replace_request(&mut self, before: u64, after: u64) {
        if before != after {
            self.requested = self.requested - before + after;
            self.peak = self.peak.max(self.requested);
            self.count_in_use(before, after);
        }
    }

    #[inline]
    fn count_in_use(&self, before: u64, after: u64) {
        if !self.host {
            self.device.change(before, after);
        }
    }

    /// Bytes of blocks that are in use.
    pub(super) fn blocks_in_use(&self) -> u64 {
        self.held - self.parked - self.free
    }

    /// Bytes of blocks that are parked.
    pub(super) fn parked(&self) -> u64 {
        self.parked
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Bytes that are in use or parked, as requested.
    pub(super) fn requested(&self) -> u64 {
        self.requested
    }

    /// Bytes in use, as requested.
    pub(super) fn in_use(&self) -> u64 {
        self.requested - self.requested_parked
    }

    /// Bytes that operators of this flow have in use or reserved.
    pub(super) fn owned(&self, flow: usize) -> u64 {
        self.owners.iter().find(|(owner, _)| *owner == flow).map_or(0, |(_, owned)| *owned)
    }

    /// If nothing is in use, parked, reserved or leaving, returns a number that changes with each granted request, each
    /// eviction and each refused request that does not wait.
    pub(super) fn idle_mark(&self) -> Option<u64> {
        let is_idle = self.blocks_in_use() + self.parked + self.reserved + self.leaving == 0;
        is_idle.then(|| self.reused + self.from_driver + self.evictions + self.refused)
    }

    /// `in_advance` is true if the driver allocated all blocks before they were requested.
    pub(super) fn stats(&self, capacity: Option<u64>, in_advance: bool) -> MemoryStats {
        MemoryStats {
            in_use: self.in_use(),
            waiting: self.requested_parked,
            cached: self.free,
            reserved: self.reserved,
            peak: self.peak,
            capacity,
            allocations: self.reused + if in_advance { 0 } else { self.from_driver },
            reused: self.reused,
            from_driver: self.from_driver,
        }
    }
}

/// Bytes of blocks that were to be returned to the driver.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Released {
    pub(super) all: u64,
    /// Bytes that the driver took.
    pub(super) returned: u64,
    /// Bytes that leaked, as the device was lost.
    pub(super) leaked: u64,
}

/// The sums over all heaps of a device.
#[derive(Debug, Default)]
pub(super) struct DeviceTotals {
    /// Bytes of device memory that are in use or parked, as requested.
    in_use: AtomicU64,
    peak: AtomicU64,
    /// Bytes of device and host memory.
    leaked: AtomicU64,
    /// Bytes that were ever returned to the driver.
    returned: AtomicU64,
}

impl DeviceTotals {
    /// Replaces `before` bytes in use with `after`.
    #[inline]
    fn change(&self, before: u64, after: u64) {
        match after.checked_sub(before) {
            Some(more) => {
                let now = self.in_use.fetch_add(more, Ordering::Relaxed) + more;
                self.peak.fetch_max(now, Ordering::Relaxed);
            }
            None => _ = self.in_use.fetch_sub(before - after, Ordering::Relaxed),
        }
    }

    /// Counts memory that can neither be reused nor freed. Called directly only for memory that belongs to no heap.
    pub(super) fn leak(&self, bytes: u64) {
        self.leaked.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::Relaxed)
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub(super) fn leaked(&self) -> u64 {
        self.leaked.load(Ordering::Relaxed)
    }

    pub(super) fn returned(&self) -> u64 {
        self.returned.load(Ordering::SeqCst)
    }
}

/// The memory that one operator has in use, and its peak.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// A number that identifies its flow.
    flow: usize,
    in_use: AtomicU64,
    peak: AtomicU64,
}

impl Account {
    pub(crate) fn new(flow: usize) -> Self {
        Self { flow, ..Self::default() }
    }

    pub(super) fn flow(&self) -> usize {
        self.flow
    }

    pub(super) fn charge(&self, bytes: u64) {
        let now = self.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(super) fn discharge(&self, bytes: u64) {
        self.in_use.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::{collection::vec, prelude::*};

    use super::*;

    const LIMIT: u64 = 100;
    const FLOWS: usize = 2;

    /// A number that selects a block of some state: modulo how many there are.
    type Pick = usize;

    #[derive(Clone, Debug)]
    enum Op {
        /// A block of the driver, if there is room, which arrives or is refused. It draws on a reservation if there is one.
        New {
            size: u64,
            slack: u64,
            arrives: bool,
            draws: bool,
        },
        HandOutFree {
            pick: Pick,
            slack: u64,
        },
        HandOutParked {
            pick: Pick,
            slack: u64,
        },
        /// Freed while a stream might be using it.
        Park(Pick),
        /// Freed while no stream uses it.
        Return(Pick),
        Settle(Pick),
        Leak(Pick),
        LeakParked(Pick),
        Evict(Pick),
        /// Evicted blocks arrive at the driver, or their device was lost.
        Release {
            lost: bool,
        },
        Reserve {
            flow: usize,
            bytes: u64,
        },
        Unreserve {
            flow: usize,
        },
        Own {
            flow: usize,
            pick: Pick,
        },
        Refuse,
    }

    fn op() -> impl Strategy<Value = Op> {
        let pick = || 0..16_usize;
        let flow = || 0..FLOWS;
        let new = (1..40_u64, 0..8_u64, prop::bool::weighted(0.8), any::<bool>());
        prop_oneof![
            6 => new.prop_map(|(size, slack, arrives, draws)| Op::New { size, slack, arrives, draws }),
            3 => (pick(), 0..8_u64).prop_map(|(pick, slack)| Op::HandOutFree { pick, slack }),
            3 => (pick(), 0..8_u64).prop_map(|(pick, slack)| Op::HandOutParked { pick, slack }),
            4 => pick().prop_map(Op::Park),
            2 => pick().prop_map(Op::Return),
            3 => pick().prop_map(Op::Settle),
            1 => pick().prop_map(Op::Leak),
            1 => pick().prop_map(Op::LeakParked),
            2 => pick().prop_map(Op::Evict),
            2 => any::<bool>().prop_map(|lost| Op::Release { lost }),
            2 => (flow(), 1..30_u64).prop_map(|(flow, bytes)| Op::Reserve { flow, bytes }),
            1 => flow().prop_map(|flow| Op::Unreserve { flow }),
            1 => (flow(), pick()).prop_map(|(flow, pick)| Op::Own { flow, pick }),
            1 => Just(Op::Refuse),
        ]
    }

    /// All blocks by their state.
    #[derive(Default)]
    struct Model {
        in_use: Vec<Extent>,
        parked: Vec<Extent>,
        free: Vec<u64>,
        leaving: Vec<u64>,
        reserved: [u64; FLOWS],
        owned: BTreeMap<usize, u64>,
        leaked: u64,
        returned: u64,
        peak: u64,
        /// Granted requests, evictions and refusals.
        mark: u64,
        reused: u64,
        from_driver: u64,
    }

    fn sizes(blocks: &[Extent]) -> u64 {
        blocks.iter().map(|block| block.size).sum()
    }

    fn bytes(blocks: &[Extent]) -> u64 {
        blocks.iter().map(|block| block.bytes).sum()
    }

    fn take<T>(blocks: &mut Vec<T>, pick: Pick) -> Option<T> {
        if blocks.is_empty() { None } else { Some(blocks.swap_remove(pick % blocks.len())) }
    }

    impl Model {
        fn reserved(&self) -> u64 {
            self.reserved.iter().sum()
        }

        fn has_room(&self, size: u64, drawn: u64, hands_out_parked: bool) -> bool {
            let parked = if hands_out_parked { 0 } else { sizes(&self.parked) };
            sizes(&self.in_use) + parked + self.reserved() - drawn + size <= LIMIT
        }

        /// Takes out free blocks until so many bytes are free to be allocated.
        fn evict(&mut self, excess: u64) -> u64 {
            let mut sum = 0;
            while sum < excess
                && let Some(size) = self.free.pop()
            {
                sum += size;
                self.leaving.push(size);
            }
            self.mark += u64::from(sum > 0);
            sum
        }

        fn check(&mut self, counts: &Accounting) -> Result<(), TestCaseError> {
            let requested = bytes(&self.in_use) + bytes(&self.parked);
            self.peak = self.peak.max(requested);
            let free: u64 = self.free.iter().sum();
            prop_assert_eq!(counts.blocks_in_use(), sizes(&self.in_use));
            prop_assert_eq!(counts.parked(), sizes(&self.parked));
            prop_assert_eq!(
                counts.held,
                counts.blocks_in_use() + counts.parked() + free,
                "in use, parked and free are all"
            );
            prop_assert!(counts.held <= LIMIT, "{} bytes are held", counts.held);
            prop_assert_eq!(counts.requested(), requested);
            prop_assert_eq!(counts.leaving, self.leaving.iter().sum::<u64>());
            let stats = MemoryStats {
                in_use: bytes(&self.in_use),
                waiting: bytes(&self.parked),
                cached: free,
                reserved: self.reserved(),
                peak: self.peak,
                capacity: Some(LIMIT),
                allocations: self.reused + self.from_driver,
                reused: self.reused,
                from_driver: self.from_driver,
            };
            prop_assert_eq!(counts.stats(Some(LIMIT), false), stats);
            for flow in 0..FLOWS {
                let owned = self.owned.get(&flow).copied().unwrap_or_default() + self.reserved[flow];
                prop_assert_eq!(counts.owned(flow), owned);
            }
            let is_idle = self.in_use.is_empty() && self.parked.is_empty() && self.leaving.is_empty();
            let mark = (is_idle && self.reserved() == 0).then_some(self.mark);
            prop_assert_eq!(counts.idle_mark(), mark);
            let device = &counts.device;
            let in_use = if counts.host { 0 } else { requested };
            prop_assert_eq!(device.in_use(), in_use);
            prop_assert_eq!(device.peak(), if counts.host { 0 } else { self.peak });
            prop_assert_eq!((device.leaked(), device.returned()), (self.leaked, self.returned));
            Ok(())
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 500 } else { 5000 }))]

        /// After each transition, all counts are those of a list of blocks, and the heap holds no more than its limit.
        #[test]
        fn the_counts_are_those_of_a_list_of_blocks(
            host in any::<bool>(), hands_out_parked in any::<bool>(), ops in vec(op(), 1..100)
        ) {
            let mut counts = Accounting::new(&Arc::default(), host, Some(LIMIT), hands_out_parked);
            let mut model = Model::default();
            for op in ops {
                match op {
                    Op::New { size, slack, arrives, draws } => {
                        let flow = (0..FLOWS).find(|flow| draws && model.reserved[*flow] > 0);
                        let drawn = flow.map_or(0, |flow| model.reserved[flow].min(size));
                        let room = counts.has_room(size, drawn);
                        prop_assert_eq!(room, model.has_room(size, drawn, hands_out_parked));
                        // Where parked blocks are handed out instead, none is allocated beside them.
                        if !room || sizes(&model.parked) + sizes(&model.in_use) + size > LIMIT {
                            continue;
                        }
                        let excess = counts.excess(size);
                        let evicted = model.evict(excess);
                        prop_assert!(evicted >= excess, "too few blocks are free");
                        if excess > 0 {
                            counts.evict(evicted);
                        }
                        let block = Extent { size, bytes: size.saturating_sub(slack).max(1) };
                        counts.hand_out_new(block, drawn);
                        prop_assert!(counts.held <= LIMIT);
                        if arrives {
                            counts.new_arrived(block);
                            if let Some(flow) = flow {
                                counts.disown(flow, drawn);
                                model.reserved[flow] -= drawn;
                            }
                            model.in_use.push(block);
                            model.from_driver += 1;
                            model.mark += 1;
                        } else {
                            counts.new_failed(block, drawn);
                        }
                    }
                    Op::HandOutFree { pick, slack } => {
                        if let Some(size) = take(&mut model.free, pick) {
                            let block = Extent { size, bytes: size.saturating_sub(slack).max(1) };
                            counts.hand_out_free(block, 0);
                            model.in_use.push(block);
                            model.reused += 1;
                            model.mark += 1;
                        }
                    }
                    Op::HandOutParked { pick, slack } => {
                        if let Some(block) = take(&mut model.parked, pick) {
                            let bytes = block.size.saturating_sub(slack).max(1);
                            counts.hand_out_parked(block, bytes, 0);
                            model.in_use.push(Extent { bytes, ..block });
                            model.reused += 1;
                            model.mark += 1;
                        }
                    }
                    Op::Park(pick) => {
                        if let Some(block) = take(&mut model.in_use, pick) {
                            counts.park(block);
                            model.parked.push(block);
                        }
                    }
                    Op::Return(pick) => {
                        if let Some(block) = take(&mut model.in_use, pick) {
                            counts.return_free(block);
                            model.free.push(block.size);
                        }
                    }
                    Op::Settle(pick) => {
                        if let Some(block) = take(&mut model.parked, pick) {
                            let at_driver = pick % 4 == 0;
                            counts.settle(block, at_driver);
                            if !at_driver {
                                model.free.push(block.size);
                            }
                        }
                    }
                    Op::Leak(pick) => {
                        if let Some(block) = take(&mut model.in_use, pick) {
                            counts.leak(block);
                            model.leaked += block.bytes;
                        }
                    }
                    Op::LeakParked(pick) => {
                        if let Some(block) = take(&mut model.parked, pick) {
                            counts.leak_parked(block);
                            model.leaked += block.bytes;
                        }
                    }
                    Op::Evict(pick) => counts.evict(model.evict(pick as u64)),
                    Op::Release { lost } => {
                        let all = model.leaving.drain(..).sum();
                        let (returned, leaked) = if lost { (0, all) } else { (all, 0) };
                        counts.released(Released { all, returned, leaked });
                        model.returned += returned;
                        model.leaked += leaked;
                    }
                    Op::Reserve { flow, bytes } => {
                        if counts.has_room(bytes, 0) {
                            counts.reserve(flow, bytes);
                            model.reserved[flow] += bytes;
                        }
                    }
                    Op::Unreserve { flow } => {
                        counts.unreserve(flow, std::mem::take(&mut model.reserved[flow]));
                    }
                    Op::Own { flow, pick } => {
                        let owned = model.owned.entry(flow).or_default();
                        if pick % 2 == 0 {
                            counts.own(flow, pick as u64);
                            *owned += pick as u64;
                        } else {
                            counts.disown(flow, std::mem::take(owned));
                        }
                    }
                    Op::Refuse => {
                        counts.refuse();
                        model.mark += 1;
                    }
                }
                model.check(&counts)?;
            }
        }
    }
}
