//! Planned faults: the calls that a test makes fail.
//!
//! Calls are counted from 1 when they are **enqueued**, so that a plan hits the same call in whatever order the worker
//! threads run. The call fails when its work runs, as on a GPU: a kernel that traps is enqueued without an error.

use rustc_hash::FxHashMap;

use super::lock;
use crate::sync::Mutex;

/// The faults of an emulated device.
///
/// Calls are counted from 1, in the order in which they are made: `Faults::new().trap_kernel("scale", 3)` traps the
/// third launch of `scale`. A graph node counts once for each launch of the graph, in the order in which the nodes were
/// added; a node in the body of a conditional node counts each time that it runs. The methods can be called several
/// times; all planned faults occur.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    kernels: Vec<(String, u64)>,
    allocations: Vec<u64>,
    copies: Vec<u64>,
    functions: Vec<u64>,
}

impl Faults {
    /// No faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The `nth` launch of the kernel `name` traps: the device is lost.
    #[must_use]
    pub fn trap_kernel(mut self, name: impl Into<String>, nth: u64) -> Self {
        self.kernels.push((name.into(), nth));
        self
    }

    /// The `nth` allocation of device memory fails as if no memory were left. The device continues to work.
    #[must_use]
    pub fn fail_alloc(mut self, nth: u64) -> Self {
        self.allocations.push(nth);
        self
    }

    /// The `nth` copy fails when it runs: the device is lost.
    #[must_use]
    pub fn fail_copy(mut self, nth: u64) -> Self {
        self.copies.push(nth);
        self
    }

    /// The `nth` host function is never called, and no error is reported: the stream skips it, and the function is
    /// dropped with the device.
    #[must_use]
    pub fn lose_host_function(mut self, nth: u64) -> Self {
        self.functions.push(nth);
        self
    }
}

/// A device's progress through its [`Faults`]. Each method counts one call, and returns whether that call is to fail.
/// Calls of a kind for which no fault is planned always succeed and are not counted.
#[derive(Debug)]
pub(super) struct FaultPlan {
    faults: Faults,
    counts: Mutex<CallCounts>,
}

#[derive(Debug, Default)]
struct CallCounts {
    kernels: FxHashMap<&'static str, u64>,
    allocations: u64,
    copies: u64,
    functions: u64,
}

impl FaultPlan {
    pub(super) fn new(faults: Faults) -> Self {
        Self { faults, counts: Mutex::default() }
    }

    /// True if no fault is planned, so that no call is counted.
    pub(super) fn is_empty(&self) -> bool {
        let Faults { kernels, allocations, copies, functions } = &self.faults;
        kernels.is_empty() && allocations.is_empty() && copies.is_empty() && functions.is_empty()
    }

    pub(super) fn next_kernel_fails(&self, name: &'static str) -> bool {
        let planned = &self.faults.kernels;
        if planned.is_empty() {
            return false;
        }
        let nth = increment(lock(&self.counts).kernels.entry(name).or_default());
        planned.iter().any(|(kernel, at)| kernel == name && *at == nth)
    }

    pub(super) fn next_allocation_fails(&self) -> bool {
        self.next_fails(&self.faults.allocations, |counts| &mut counts.allocations)
    }

    pub(super) fn next_copy_fails(&self) -> bool {
        self.next_fails(&self.faults.copies, |counts| &mut counts.copies)
    }

    pub(super) fn next_function_is_lost(&self) -> bool {
        self.next_fails(&self.faults.functions, |counts| &mut counts.functions)
    }

    fn next_fails(&self, planned: &[u64], count: impl FnOnce(&mut CallCounts) -> &mut u64) -> bool {
        !planned.is_empty() && planned.contains(&increment(count(&mut lock(&self.counts))))
    }
}

fn increment(count: &mut u64) -> u64 {
    *count += 1;
    *count
}
