//! Host functions: Rust closures that a stream calls once, or that a graph calls at each launch.
//!
//! The driver receives a number, never a pointer: the key of an entry in a table of the process, which owns the closure
//! until it is called. So no closure can dangle or leak, whatever the driver does:
//!
//! ```text
//!            enqueued                 the stream reaches it
//!  (nothing) ────────▶ pending(key) ────────────────────────▶ taken, called, dropped
//!                          │ refused, device lost, device closed
//!                          └────────────────────────────────▶ taken, dropped
//!
//!            a node is added          a launch reaches it
//!  (nothing) ────────▶ callback(key) ───────────────────────▶ cloned, called, entry kept
//!                          │ the last handle is dropped (with its graphs and execs), refused, device lost or closed
//!                          └────────────────────────────────▶ taken, dropped
//! ```
//!
//! An entry is taken under the table's lock, and called and dropped outside the lock. A key has a generation: a key
//! that the driver passes twice, or after its slot was reused, finds no entry. No panic unwinds into the driver.

use std::{
    cell::Cell,
    ffi::c_void,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys::{CUDA_HOST_NODE_PARAMS, CUstream};
use slab::Slab;

use super::context::Context;
use crate::{
    device::{
        backend::{HostCallback, HostFunction},
        thread::DeviceThread,
    },
    error::{Error, ErrorKind, Result},
    sync::{Mutex, MutexGuard, contained, discard, lock},
};

/// Identifies the owner of a function: one opening of one device. Unique in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FunctionOwner(u64);

impl FunctionOwner {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// An index into the table and a generation, in the 64 bits of the driver's user data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FunctionKey(u64);

impl FunctionKey {
    fn new(index: usize, generation: u32) -> Self {
        Self((u64::from(generation) << 32) | index as u64)
    }

    fn index(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn to_user_data(self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    fn from_user_data(data: *mut c_void) -> Self {
        Self(data.addr() as u64)
    }
}

struct FunctionEntry<F> {
    generation: u32,
    owner: FunctionOwner,
    function: F,
}

/// Functions that the driver may call, by their keys.
struct FunctionTable<F> {
    entries: Slab<FunctionEntry<F>>,
    generation: u32,
}

impl<F> FunctionTable<F> {
    const fn new() -> Self {
        Self { entries: Slab::new(), generation: 0 }
    }

    fn insert(&mut self, owner: FunctionOwner, function: F) -> FunctionKey {
        self.generation = self.generation.wrapping_add(1);
        let entry = FunctionEntry { generation: self.generation, owner, function };
        FunctionKey::new(self.entries.insert(entry), self.generation)
    }

    fn get(&self, key: FunctionKey) -> Option<&F> {
        let entry = self.entries.get(key.index())?;
        (entry.generation == key.generation()).then_some(&entry.function)
    }

    fn take(&mut self, key: FunctionKey) -> Option<F> {
        self.get(key)?;
        self.entries.try_remove(key.index()).map(|entry| entry.function)
    }

    fn take_all(&mut self, owner: FunctionOwner) -> Vec<F> {
        let keys: Vec<usize> =
            self.entries.iter().filter(|(_, entry)| entry.owner == owner).map(|(index, _)| index).collect();
        keys.into_iter().filter_map(|index| self.entries.try_remove(index)).map(|entry| entry.function).collect()
    }
}

/// Functions that were enqueued and not yet called.
static PENDING: Mutex<FunctionTable<HostFunction>> = Mutex::new(FunctionTable::new());

/// Functions that nodes of graphs call.
static GRAPH_CALLBACKS: Mutex<FunctionTable<HostCallback>> = Mutex::new(FunctionTable::new());

fn pending() -> MutexGuard<'static, FunctionTable<HostFunction>> {
    lock(&PENDING)
}

fn graph_callbacks() -> MutexGuard<'static, FunctionTable<HostCallback>> {
    lock(&GRAPH_CALLBACKS)
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// True while this thread of the driver runs a host function, which must not call the driver.
pub(super) fn on_callback_thread() -> bool {
    IN_CALLBACK.get()
}

/// Fails during a callback of the driver, which forbids calls from callbacks; some calls would deadlock.
///
/// # Errors
/// [`Usage`](ErrorKind::Usage).
#[inline]
pub(super) fn may_call_driver() -> Result<()> {
    if on_callback_thread() { Err(forbidden()) } else { Ok(()) }
}

#[cold]
fn forbidden() -> Error {
    let text = "a host function or a waker made this call on the driver's callback thread, where the driver permits \
                no calls: let the waker wake a task of a runtime, and make the call in that task";
    Error::new(ErrorKind::Usage, text)
}

/// Enqueues `function` into `stream`. If it is refused, it stays in `function`.
pub(super) fn launch(cx: &Context, stream: CUstream, function: &mut Option<HostFunction>) -> Result<()> {
    let driver = cx.enter()?;
    let Some(given) = function.take() else { return Ok(()) };
    let key = pending().insert(cx.owner, given);
    // SAFETY: the stream belongs to this context, as the backend's caller guarantees. `call` may be called with this or
    // any number, any number of times, at any time in the process: it only looks the number up.
    let code = unsafe { (driver.launch_host_func)(stream, Some(call), key.to_user_data()) };
    // After a fault that is not reported yet, the driver accepts functions and never calls them. The thread that
    // observes the fault drops them. If it did so between `enter` and `insert`, it missed this function.
    let result = match cx.lost() {
        Some(error) => Err(error.clone()),
        None => cx.check(code, "cuLaunchHostFunc"),
    };
    if result.is_err() {
        // `None` if the thread that observed the fault has already dropped it.
        *function = pending().take(key);
    }
    result
}

/// A function that nodes of graphs call. Launches find it as long as this handle exists.
#[derive(Debug)]
pub(super) struct GraphCallback {
    key: FunctionKey,
    /// The function's address, for comparisons.
    address: usize,
}

impl GraphCallback {
    pub(super) fn new(cx: &Context, function: &HostCallback) -> Result<Arc<Self>> {
        let made = Self::of(cx.owner, function);
        // A thread that observed a fault before the insertion has not dropped it.
        match cx.lost() {
            Some(error) => Err(error.clone()),
            None => Ok(made),
        }
    }

    pub(super) fn of(owner: FunctionOwner, function: &HostCallback) -> Arc<Self> {
        let key = graph_callbacks().insert(owner, Arc::clone(function));
        Arc::new(Self { key, address: Arc::as_ptr(function).addr() })
    }

    pub(super) fn is(&self, function: &HostCallback) -> bool {
        self.address == Arc::as_ptr(function).addr()
    }

    /// The parameters of a node. The driver may call the function with any number, at any time in the process.
    pub(super) fn node(&self) -> CUDA_HOST_NODE_PARAMS {
        CUDA_HOST_NODE_PARAMS { fn_: Some(call_graph_callback), userData: self.key.to_user_data() }
    }
}

impl Drop for GraphCallback {
    fn drop(&mut self) {
        // Two statements: the guard is dropped at the end of the first. The function's destructor is user code.
        let function = graph_callbacks().take(self.key);
        discard(function);
    }
}

/// Drops all functions of `owner` that were not called, and those of its graphs. Called when its device is lost or
/// closed.
pub(super) fn drop_all(owner: FunctionOwner) {
    let functions = pending().take_all(owner);
    functions.into_iter().for_each(discard);
    let functions = graph_callbacks().take_all(owner);
    functions.into_iter().for_each(discard);
}

/// Called by the driver at a launch of a graph, on a thread of its own.
unsafe extern "C" fn call_graph_callback(data: *mut c_void) {
    let _device = DeviceThread::enter();
    IN_CALLBACK.set(true);
    let function = graph_callbacks().get(FunctionKey::from_user_data(data)).cloned();
    if let Some(function) = function {
        contained("a host function of a graph panicked", || function());
        discard(function);
    }
    IN_CALLBACK.set(false);
}

/// Called by the driver for an enqueued function, on a thread of its own.
unsafe extern "C" fn call(data: *mut c_void) {
    let _device = DeviceThread::enter();
    IN_CALLBACK.set(true);
    run(FunctionKey::from_user_data(data));
    IN_CALLBACK.set(false);
}

fn run(key: FunctionKey) {
    let function = pending().take(key);
    if let Some(function) = function {
        contained("a host function panicked", function);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn counting(count: &Arc<AtomicU64>) -> HostFunction {
        let count = Arc::clone(count);
        Box::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
        })
    }

    #[test]
    fn a_function_is_taken_once() {
        let (mut table, owner, count) = (FunctionTable::new(), FunctionOwner::new(), Arc::new(AtomicU64::new(0)));
        let key = table.insert(owner, counting(&count));
        table.take(key).expect("there")();
        assert!(table.take(key).is_none());
        assert_eq!(count.load(Ordering::SeqCst), 1);
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn a_late_key_does_not_take_a_later_function() {
        let (mut table, owner, count) = (FunctionTable::new(), FunctionOwner::new(), Arc::new(AtomicU64::new(0)));
        let old = table.insert(owner, counting(&count));
        drop(table.take(old));
        let new = table.insert(owner, counting(&count));
        assert_eq!(old.index(), new.index());
        assert!(table.take(old).is_none());
        assert!(table.take(new).is_some());
    }

    #[test]
    fn the_key_survives_the_trip_through_the_driver() {
        let key = FunctionKey::new(0x1234_5678, 0xfedc_ba98);
        assert_eq!(FunctionKey::from_user_data(key.to_user_data()), key);
        assert_eq!((key.index(), key.generation()), (0x1234_5678, 0xfedc_ba98));
    }

    #[test]
    fn a_lost_device_drops_its_own_functions_and_no_others() {
        let (mine, other, count) = (FunctionOwner::new(), FunctionOwner::new(), Arc::new(AtomicU64::new(0)));
        let kept = pending().insert(other, counting(&count));
        let keys = [(); 2].map(|()| pending().insert(mine, counting(&count)));
        assert_eq!(Arc::strong_count(&count), 4);
        drop_all(mine);
        assert_eq!(Arc::strong_count(&count), 2);
        // Late calls of the driver have no effect.
        keys.into_iter().for_each(run);
        assert_eq!(count.load(Ordering::SeqCst), 0);
        // SAFETY: `call` takes any number.
        unsafe { call(kept.to_user_data()) };
        assert_eq!((count.load(Ordering::SeqCst), Arc::strong_count(&count)), (1, 1));
    }

    #[test]
    fn a_graphs_function_is_called_until_its_last_handle_is_dropped() {
        let (owner, count) = (FunctionOwner::new(), Arc::new(AtomicU64::new(0)));
        let function: HostCallback = Arc::new({
            let count = Arc::clone(&count);
            move || {
                count.fetch_add(1, Ordering::SeqCst);
                panic!("from a host function of a graph");
            }
        });
        let first = GraphCallback::of(owner, &function);
        assert!(first.is(&function) && !first.is(&(Arc::new(|| ()) as HostCallback)));
        drop(function);
        let (second, data) = (Arc::clone(&first), first.node().userData);
        drop(first);
        for _ in 0..3 {
            // SAFETY: `call_graph_callback` takes any number.
            unsafe { call_graph_callback(data) };
        }
        assert!(!on_callback_thread());
        assert_eq!((count.load(Ordering::SeqCst), Arc::strong_count(&count)), (3, 2));
        drop(second);
        assert_eq!(Arc::strong_count(&count), 1);
        // SAFETY: as above.
        unsafe { call_graph_callback(data) };
        assert_eq!(count.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_lost_device_drops_the_functions_of_its_graphs() {
        let (owner, inside) = (FunctionOwner::new(), Arc::new(()));
        let function: HostCallback = Arc::new({
            let inside = Arc::clone(&inside);
            move || drop(Arc::clone(&inside))
        });
        let node = GraphCallback::of(owner, &function);
        drop(function);
        drop_all(owner);
        assert_eq!(Arc::strong_count(&inside), 1);
        // Late calls of the driver have no effect.
        // SAFETY: `call_graph_callback` takes any number.
        unsafe { call_graph_callback(node.node().userData) };
    }

    #[test]
    fn a_destructor_may_use_the_table_and_panic() {
        struct Rude(FunctionOwner);
        impl Drop for Rude {
            fn drop(&mut self) {
                drop_all(self.0);
                panic!("from a destructor");
            }
        }
        let owner = FunctionOwner::new();
        let rude = Rude(owner);
        pending().insert(owner, Box::new(move || drop(rude)));
        drop_all(owner);
        assert!(pending().take_all(owner).is_empty());
    }

    #[test]
    fn a_panic_does_not_reach_the_driver() {
        let owner = FunctionOwner::new();
        let key = pending().insert(owner, Box::new(|| panic!("from a host function")));
        // SAFETY: `call` takes any number.
        unsafe { call(key.to_user_data()) };
        assert!(!on_callback_thread());
    }
}
