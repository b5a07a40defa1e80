//! Host functions: Rust closures that a stream calls, once, or a graph, at each of its launches.
//!
//! The driver is given a number, never a pointer: the key of an entry in one table of the process, which owns the
//! closure until it is called. So nothing can dangle and nothing can leak, whatever the driver does:
//!
//! ```text
//!            enqueued                 the stream comes to it
//!  (nothing) ────────▶ pending(key) ────────────────────────▶ taken, called, dropped
//!                          │ refused, device lost, device closed
//!                          └────────────────────────────────▶ taken, dropped
//!
//!            a node is made           a launch comes to it
//!  (nothing) ────────▶ repeated(key) ───────────────────────▶ shared, called, there as before
//!                          │ the last Repeated is dropped (its graphs and execs are gone), refused, device lost or closed
//!                          └────────────────────────────────▶ taken, dropped
//! ```
//!
//! Taking is under the table's lock, calling and dropping are not. A key holds a generation, so one that comes twice,
//! or late after its slot was given to another, finds nothing and does nothing. No panic crosses into the driver.

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

/// Who enqueued a function: one opening of one device. Never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner(u64);

impl Owner {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A place in the table and its generation, in the 64 bits that the driver carries for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

impl Key {
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

struct Entry<F> {
    generation: u32,
    owner: Owner,
    function: F,
}

/// Functions that the driver may call, by their keys.
struct Table<F> {
    entries: Slab<Entry<F>>,
    generation: u32,
}

impl<F> Table<F> {
    const fn new() -> Self {
        Self { entries: Slab::new(), generation: 0 }
    }

    fn insert(&mut self, owner: Owner, function: F) -> Key {
        self.generation = self.generation.wrapping_add(1);
        let entry = Entry { generation: self.generation, owner, function };
        Key::new(self.entries.insert(entry), self.generation)
    }

    fn get(&self, key: Key) -> Option<&F> {
        let entry = self.entries.get(key.index())?;
        (entry.generation == key.generation()).then_some(&entry.function)
    }

    fn take(&mut self, key: Key) -> Option<F> {
        self.get(key)?;
        self.entries.try_remove(key.index()).map(|entry| entry.function)
    }

    fn take_all(&mut self, owner: Owner) -> Vec<F> {
        let keys: Vec<usize> =
            self.entries.iter().filter(|(_, entry)| entry.owner == owner).map(|(index, _)| index).collect();
        keys.into_iter().filter_map(|index| self.entries.try_remove(index)).map(|entry| entry.function).collect()
    }
}

/// Those that were enqueued and not yet called.
static PENDING: Mutex<Table<HostFunction>> = Mutex::new(Table::new());

/// Those that nodes of graphs call.
static REPEATED: Mutex<Table<HostCallback>> = Mutex::new(Table::new());

fn pending() -> MutexGuard<'static, Table<HostFunction>> {
    lock(&PENDING)
}

fn repeated() -> MutexGuard<'static, Table<HostCallback>> {
    lock(&REPEATED)
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// True while this thread is the driver's and runs a host function: it must not call the driver.
pub(super) fn on_callback_thread() -> bool {
    INSIDE.get()
}

/// An error on a thread on which the driver makes a callback: it forbids calls there, and some of them would wait for ever.
///
/// # Errors
/// [`Usage`](ErrorKind::Usage).
#[inline]
pub(super) fn may_call_driver() -> Result<()> {
    if on_callback_thread() { Err(is_forbidden()) } else { Ok(()) }
}

#[cold]
fn is_forbidden() -> Error {
    let text = "called on the thread on which the driver makes its callbacks, by a host function or a waker, where it \
                permits no calls: let the waker wake a task of a runtime, and make the call in that task";
    Error::new(ErrorKind::Usage, text)
}

/// Enqueues `function` into `stream`. One that is refused lies where it was.
pub(super) fn launch(cx: &Context, stream: CUstream, function: &mut Option<HostFunction>) -> Result<()> {
    let driver = cx.enter()?;
    let Some(given) = function.take() else { return Ok(()) };
    let key = pending().insert(cx.owner, given);
    // SAFETY: the stream is one of this context's, as the caller of the seam says by passing it. `call` may be called
    // with this or any number, once or more, at any time for the rest of the process: it only looks it up.
    let code = unsafe { (driver.launch_host_func)(stream, Some(call), key.to_user_data()) };
    // The driver accepts functions behind a fault that nobody has seen yet, and never calls them. Whoever sees the
    // fault drops them; if that was between `enter` and `insert`, it did not see this one.
    let result = match cx.lost() {
        Some(error) => Err(error.again()),
        None => cx.check(code, "cuLaunchHostFunc"),
    };
    if result.is_err() {
        // Nothing, if the error was dropped where the fault was seen.
        *function = pending().take(key);
    }
    result
}

/// A function that nodes of graphs call. While one of these lives, launches find it.
#[derive(Debug)]
pub(super) struct Repeated {
    key: Key,
    /// The function's address, to be compared.
    address: usize,
}

impl Repeated {
    pub(super) fn new(cx: &Context, function: &HostCallback) -> Result<Arc<Self>> {
        let made = Self::of(cx.owner, function);
        // Whoever saw a fault before it was there has not dropped it.
        match cx.lost() {
            Some(error) => Err(error.again()),
            None => Ok(made),
        }
    }

    pub(super) fn of(owner: Owner, function: &HostCallback) -> Arc<Self> {
        let key = repeated().insert(owner, Arc::clone(function));
        Arc::new(Self { key, address: Arc::as_ptr(function).addr() })
    }

    /// Whether it is this function.
    pub(super) fn is(&self, function: &HostCallback) -> bool {
        self.address == Arc::as_ptr(function).addr()
    }

    /// For a node. The driver may call it with any number, at any time for the rest of the process.
    pub(super) fn node(&self) -> CUDA_HOST_NODE_PARAMS {
        CUDA_HOST_NODE_PARAMS { fn_: Some(call_again), userData: self.key.to_user_data() }
    }
}

impl Drop for Repeated {
    fn drop(&mut self) {
        // Two statements: the guard is gone at the end of the first, and what is dropped may do anything.
        let function = repeated().take(self.key);
        discard(function);
    }
}

/// Drops all functions of `owner` that were not called, and those of its graphs: their device is lost or closed.
pub(super) fn drop_all(owner: Owner) {
    let functions = pending().take_all(owner);
    functions.into_iter().for_each(discard);
    let functions = repeated().take_all(owner);
    functions.into_iter().for_each(discard);
}

/// What the driver calls at a launch of a graph, on a thread of its own.
unsafe extern "C" fn call_again(data: *mut c_void) {
    let _device = DeviceThread::enter();
    INSIDE.set(true);
    let function = repeated().get(Key::from_user_data(data)).cloned();
    if let Some(function) = function {
        contained("a host function of a graph panicked", || function());
        discard(function);
    }
    INSIDE.set(false);
}

/// What the driver calls, on a thread of its own.
unsafe extern "C" fn call(data: *mut c_void) {
    let _device = DeviceThread::enter();
    INSIDE.set(true);
    run(Key::from_user_data(data));
    INSIDE.set(false);
}

fn run(key: Key) {
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
        let (mut table, owner, count) = (Table::new(), Owner::new(), Arc::new(AtomicU64::new(0)));
        let key = table.insert(owner, counting(&count));
        table.take(key).expect("there")();
        assert!(table.take(key).is_none());
        assert_eq!(count.load(Ordering::SeqCst), 1);
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn a_late_key_does_not_take_its_successor() {
        let (mut table, owner, count) = (Table::new(), Owner::new(), Arc::new(AtomicU64::new(0)));
        let old = table.insert(owner, counting(&count));
        drop(table.take(old));
        let new = table.insert(owner, counting(&count));
        assert_eq!(old.index(), new.index());
        assert!(table.take(old).is_none());
        assert!(table.take(new).is_some());
    }

    #[test]
    fn the_key_survives_the_trip_through_the_driver() {
        let key = Key::new(0x1234_5678, 0xfedc_ba98);
        assert_eq!(Key::from_user_data(key.to_user_data()), key);
        assert_eq!((key.index(), key.generation()), (0x1234_5678, 0xfedc_ba98));
    }

    #[test]
    fn a_lost_device_drops_its_own_functions_and_no_others() {
        let (mine, other, count) = (Owner::new(), Owner::new(), Arc::new(AtomicU64::new(0)));
        let kept = pending().insert(other, counting(&count));
        let keys = [(); 2].map(|()| pending().insert(mine, counting(&count)));
        assert_eq!(Arc::strong_count(&count), 4);
        drop_all(mine);
        assert_eq!(Arc::strong_count(&count), 2);
        // The driver comes late after all: nothing happens.
        keys.into_iter().for_each(run);
        assert_eq!(count.load(Ordering::SeqCst), 0);
        // SAFETY: `call` takes any number.
        unsafe { call(kept.to_user_data()) };
        assert_eq!((count.load(Ordering::SeqCst), Arc::strong_count(&count)), (1, 1));
    }

    #[test]
    fn a_graphs_function_is_called_until_nothing_has_it() {
        let (owner, count) = (Owner::new(), Arc::new(AtomicU64::new(0)));
        let function: HostCallback = Arc::new({
            let count = Arc::clone(&count);
            move || {
                count.fetch_add(1, Ordering::SeqCst);
                panic!("from a host function of a graph");
            }
        });
        let first = Repeated::of(owner, &function);
        assert!(first.is(&function) && !first.is(&(Arc::new(|| ()) as HostCallback)));
        drop(function);
        let (second, data) = (Arc::clone(&first), first.node().userData);
        drop(first);
        for _ in 0..3 {
            // SAFETY: `call_again` takes any number.
            unsafe { call_again(data) };
        }
        assert!(!on_callback_thread());
        assert_eq!((count.load(Ordering::SeqCst), Arc::strong_count(&count)), (3, 2));
        drop(second);
        assert_eq!(Arc::strong_count(&count), 1);
        // SAFETY: as above.
        unsafe { call_again(data) };
        assert_eq!(count.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_lost_device_drops_the_functions_of_its_graphs() {
        let (owner, inside) = (Owner::new(), Arc::new(()));
        let function: HostCallback = Arc::new({
            let inside = Arc::clone(&inside);
            move || drop(Arc::clone(&inside))
        });
        let node = Repeated::of(owner, &function);
        drop(function);
        drop_all(owner);
        assert_eq!(Arc::strong_count(&inside), 1);
        // The driver comes late after all: nothing happens.
        // SAFETY: `call_again` takes any number.
        unsafe { call_again(node.node().userData) };
    }

    #[test]
    fn what_is_dropped_may_use_the_table_and_panic() {
        struct Rude(Owner);
        impl Drop for Rude {
            fn drop(&mut self) {
                drop_all(self.0);
                panic!("from a destructor");
            }
        }
        let owner = Owner::new();
        let rude = Rude(owner);
        pending().insert(owner, Box::new(move || drop(rude)));
        drop_all(owner);
        assert!(pending().take_all(owner).is_empty());
    }

    #[test]
    fn a_panic_stays_inside() {
        let owner = Owner::new();
        let key = pending().insert(owner, Box::new(|| panic!("from a host function")));
        // SAFETY: `call` takes any number.
        unsafe { call(key.to_user_data()) };
        assert!(!on_callback_thread());
    }
}
