//! Work that other libraries enqueue. The caller declares the memory that it uses, and wakeline orders it.
//!
//! ```text
//!   declared: reads a, writes b      the stream waits for the uses that come before, as for a kernel's arguments
//!   the caller's function            enqueues work of cuBLAS, cuDNN or another library into the raw stream
//!   a ticket, noted in a and b       whatever the function returned: it may have enqueued work before an error
//! ```
//!
//! The stream is not locked while the function runs. The ticket is created after the call, so it covers all work that
//! the function enqueued, and perhaps some later work. The slices are borrowed until then, so no other use conflicts
//! with them.

use std::{
    any::TypeId,
    ffi::c_void,
    fmt,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use smallvec::SmallVec;

use super::{
    DeviceSlice, DeviceSliceMut, Plain, arena::Arena, buffer::Access, shared_uses::LentUses, use_lock::UseLockGuard,
};
use crate::{
    device::backend::{self, Arg, BodyArg, Emulation},
    error::Result,
    stream::Stream,
    sync::DiscardOnDrop,
};

impl Stream {
    /// Declares work that another library will enqueue into this stream: cuBLAS, cuDNN, your own FFI. The name is used
    /// in errors and by the race checker.
    ///
    /// ```
    /// use wakeline::{Buffer, Stream, device::{Device, Emulated}};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// # let device = Device::emulated(Emulated::new());
    /// # fn gemv(_: *mut std::ffi::c_void, _: u64, _: u64) -> std::io::Result<()> { Ok(()) }
    /// let stream = Stream::new(&device)?;
    /// let x = Buffer::from_slice(&stream, &[1.0_f32, 2.0, 3.0])?;
    /// let mut y = Buffer::<f32>::new(&device, 3)?;
    /// let call = stream.external("double").read(&x).write(&mut y).emulated(|[x, mut y]| {
    ///     for (y, x) in y.as_mut_slice::<f32>().iter_mut().zip(x.as_slice::<f32>()) {
    ///         *y = 2.0 * x;
    ///     }
    /// });
    /// // SAFETY: it enqueues into this stream only, reads three elements of `x`, writes three of `y`, no others.
    /// unsafe { call.enqueue(|stream, [x, y]| Ok(gemv(stream, x, y)?)) }?;
    /// assert_eq!(y.to_vec(&stream).await?, [2.0, 4.0, 6.0]);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn external(&self, name: &'static str) -> External<'_> {
        External { stream: self, name, slices: SmallVec::new(), emulated: None, of: PhantomData }
    }
}

/// External work under construction: its declared slices. See [`Stream::external`].
#[must_use = "nothing is enqueued before `enqueue` is called"]
pub struct External<'a, A = [u64; 0]> {
    stream: &'a Stream,
    name: &'static str,
    slices: SmallVec<[DeclaredSlice<'a>; 8]>,
    emulated: Option<Emulation>,
    of: PhantomData<fn() -> A>,
}

struct DeclaredSlice<'a> {
    access: Access<'a>,
    bytes: usize,
    element: Element,
}

/// A declared slice, without its memory.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy)]
pub(super) struct Declaration {
    pub(super) len: usize,
    pub(super) bytes: usize,
    pub(super) writes: bool,
    pub(super) element: Element,
}

/// The type of a slice's elements, which the function's slices are checked against.
#[derive(Clone, Copy)]
pub(super) struct Element {
    id: TypeId,
    pub(super) name: &'static str,
}

impl Element {
    fn of<T: 'static>() -> Self {
        Self { id: TypeId::of::<T>(), name: std::any::type_name::<T>() }
    }

    /// Panics if the slice was declared with elements of another type.
    pub(super) fn check<T: Plain>(&self) {
        assert!(
            self.id == TypeId::of::<T>(),
            "this slice was declared with elements of `{}`, not `{}`",
            self.name,
            std::any::type_name::<T>()
        );
    }
}

/// The panic of a function that would write a slice that it declared as read.
pub(super) fn check_declared_write(writes: bool) {
    assert!(writes, "this slice was declared with `read`: to change it, declare it with `write`");
}

impl<'a, A: RoomForSlice> External<'a, A> {
    /// The work reads these elements, in device memory.
    pub fn read<T: Plain>(self, slice: &'a (impl DeviceSlice<T> + ?Sized)) -> External<'a, A::More> {
        self.using::<T>(Access::Read(slice.view()))
    }

    /// The work writes these elements, in device memory, and may read them.
    pub fn write<T: Plain>(self, slice: &'a mut (impl DeviceSliceMut<T> + ?Sized)) -> External<'a, A::More> {
        self.using::<T>(Access::Write(slice.view_mut()))
    }

    fn using<T: Plain>(mut self, access: Access<'a>) -> External<'a, A::More> {
        self.slices.push(DeclaredSlice { bytes: access.len() * size_of::<T>(), access, element: Element::of::<T>() });
        External { stream: self.stream, name: self.name, slices: self.slices, emulated: None, of: PhantomData }
    }
}

impl<A: Addresses> External<'_, A> {
    /// Sets the function that runs in place of the work on the emulated device. It receives the slices in the order of
    /// declaration, and runs at the work's position in the stream; in a graph, at each launch. A panic in it is a trap.
    ///
    /// Call this after the last slice is declared. Without this function, the work is an error on the emulated device.
    pub fn emulated(mut self, body: impl for<'s> Fn(A::Array<EmulatedSlice<'s>>) + Send + Sync + 'static) -> Self {
        let of: SmallVec<[(Element, bool); 8]> =
            self.slices.iter().map(|used| (used.element, used.access.writes())).collect();
        let body = DiscardOnDrop::new(body);
        self.emulated = Some(Arc::new(move |args: &[BodyArg]| {
            let slice = |at: usize| match (args[at], of[at]) {
                (BodyArg::Slice(start, len), (element, write)) => {
                    EmulatedSlice { start, len, element, write, of: PhantomData }
                }
                (BodyArg::Scalar(_), _) => unreachable!("only slices are declared"),
            };
            body.get().into_iter().for_each(|body| body(A::array(slice)));
        }));
        self
    }

    #[cfg(feature = "cuda")]
    pub(super) fn stream(&self) -> &Stream {
        self.stream
    }

    #[cfg(feature = "cuda")]
    pub(super) fn declarations(&self) -> SmallVec<[Declaration; 8]> {
        let of = |used: &DeclaredSlice<'_>| {
            let DeclaredSlice { access, bytes, element } = used;
            Declaration { len: access.len(), bytes: *bytes, writes: access.writes(), element: *element }
        };
        self.slices.iter().map(of).collect()
    }

    /// Orders the stream after the uses that its slices must come after, calls the function, and notes the uses. The
    /// function gets the driver's stream, a `CUstream`, and the slices' addresses (`CUdeviceptr`s) in order of
    /// declaration. The device's context is current, and no lock is held. If a graph uses one of the slices too, or if it
    /// is a part of memory that was [split](super::SliceMut::split_at_mut), other threads that launch the graph or use the
    /// memory wait until the function has returned, so the function must not wait for these threads. The function
    /// itself must not use such memory through wakeline either, not even another part of it, unless the work and that
    /// operation only read: until the function has returned, the operation is a [`Usage`](crate::ErrorKind::Usage) error.
    ///
    /// An error or a panic of the function is returned or resumed. The slices count as used in any case, since work
    /// that the function enqueued still runs. On the emulated device the [counterpart](Self::emulated) is enqueued
    /// instead.
    ///
    /// # Errors
    /// The function's error, with the place. [`Usage`](crate::ErrorKind::Usage) for a slice that is not on the stream's
    /// device or, on the emulated device, without a counterpart; [`Race`](crate::ErrorKind::Race) if the race checker
    /// finds one; [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault. Unless the error is the function's own,
    /// the function was not called.
    ///
    /// # Safety
    /// The work that the function enqueues goes into the given stream, or is ordered within it (forked from it and
    /// joined to it) when the function returns. It accesses no device memory of wakeline except the declared slices,
    /// within their lengths, and writes only slices that are declared as written, with valid values of their type. The
    /// stream is not destroyed, captured or reset. Operations of wakeline within the function are checked as anywhere, and
    /// are not part of that work.
    pub unsafe fn enqueue(self, call: impl FnOnce(*mut c_void, A) -> Result<()>) -> Result<()> {
        let Self { stream, name, mut slices, emulated, .. } = self;
        let place = || format!("external work `{name}` on `{}`", stream.name());
        // The work of the function is counted below, so the slot is released at once.
        let losses = stream.make_room(|| ()).map_err(|error| error.at(place()))?.0.losses;
        let use_lock = UseLockGuard::for_memory(slices.iter().map(|used| used.access.memory().shared.get()));
        // Dropped at the end, after the ticket is noted, or on an error.
        let mut _lent = LentUses::default();
        let mut args: SmallVec<[Arg<'_>; 8]> = SmallVec::with_capacity(slices.len());
        for DeclaredSlice { access, bytes, .. } in &mut slices {
            let address = access.reachable(stream).map_err(|error| error.at(place()))?;
            access.order(stream).map_err(|error| error.at(place()))?;
            args.push(Arg::Slice { address, len: access.len() as u64, bytes: *bytes as u64, write: access.writes() });
        }
        // The function is called without the lock: no other thread uses lent memory during the call.
        if use_lock.is_some() {
            _lent = LentUses::new(
                slices.iter().filter_map(|used| Some((used.access.memory().shared.get()?, used.access.writes()))),
            );
        }
        drop(use_lock);
        let addresses = A::addresses(|at| match args[at] {
            Arg::Slice { address, .. } => address.0,
            Arg::Scalar(_) => unreachable!("only slices are declared"),
        });
        let mut call = Some(|raw| call(raw, addresses));
        let mut called = None;
        let mut once = |raw| {
            if let Some(call) = call.take() {
                called = Some(catch_unwind(AssertUnwindSafe(|| call(raw))));
            }
        };
        let external = backend::ExternalWork { name, args: &args, call: &mut once, emulated };
        stream.begin_work();
        // SAFETY: by this function's contract the work accesses no more than `args` states. Each slice is in memory of
        // this device (`reachable`). It stays valid until the work is done: a ticket issued after the work is noted in
        // it below, and memory with an open ticket is not freed.
        let taken = unsafe { stream.backend().external(stream.raw(), external) };
        if stream.capture().is_some() {
            // When the library's capture ends, graphs that were dropped during it are destroyed, and the driver has
            // their memory back.
            Arena::of(stream.device()).ledger.notify_later();
        }
        // If the device refused the work, nothing was enqueued.
        stream.streams().observe(taken).map_err(|error| error.at(place()))?;
        // The amount of work is unknown and is counted as a few calls.
        let ticket = stream.ticket_after_work(16, losses);
        slices.iter_mut().for_each(|used| used.access.note(&ticket));
        match called {
            None => Ok(()),
            Some(Ok(outcome)) => outcome.map_err(|error| error.at(place())),
            Some(Err(panic)) => resume_unwind(panic),
        }
    }
}

impl<A> fmt::Debug for External<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("External").field("name", &self.name).field("slices", &self.slices.len()).finish_non_exhaustive()
    }
}

/// A slice of device memory, as the emulated counterpart of external work receives it.
pub struct EmulatedSlice<'s> {
    start: *mut u8,
    len: usize,
    element: Element,
    write: bool,
    of: PhantomData<&'s mut [u8]>,
}

impl EmulatedSlice<'_> {
    /// The elements.
    ///
    /// # Panics
    /// If the slice was declared with elements of another type.
    pub fn as_slice<T: Plain>(&self) -> &[T] {
        self.element.check::<T>();
        // SAFETY: the emulated device calls the body with slices that are valid and aligned for their lengths, in the
        // elements that they were declared with, which are `T`s; nothing else writes to them during the call
        // (`enqueue`).
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len) }
    }

    /// The elements, for writing.
    ///
    /// # Panics
    /// If the slice was declared with elements of another type, or with `read`.
    pub fn as_mut_slice<T: Plain>(&mut self) -> &mut [T] {
        self.element.check::<T>();
        check_declared_write(self.write);
        // SAFETY: as in `as_slice`. The slice was declared as written, so nothing else accesses it during the call, and
        // this value is the only one for the slice and is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.len) }
    }
}

impl fmt::Debug for EmulatedSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmulatedSlice").field("of", &self.element.name).field("len", &self.len).finish_non_exhaustive()
    }
}

/// The addresses of `N` slices: `[u64; N]`. Sealed.
pub trait Addresses: Sealed {
    /// As many values of another type, such as the slices that the emulated counterpart receives.
    type Array<E>;

    #[doc(hidden)]
    fn addresses(address: impl FnMut(usize) -> u64) -> Self;
    #[doc(hidden)]
    fn address(&self, at: usize) -> u64;
    #[doc(hidden)]
    fn array<E>(element: impl FnMut(usize) -> E) -> Self::Array<E>;
}

/// Fewer than twelve slices, so that one more can be declared. Sealed.
#[diagnostic::on_unimplemented(message = "external work has at most twelve slices")]
pub trait RoomForSlice: Addresses {
    /// One slice more.
    type More: Addresses;
}

mod sealed {
    #[allow(unreachable_pub, reason = "public in a private module: that is what seals it")]
    pub trait Sealed {}
}
use sealed::Sealed;

impl<const N: usize> Sealed for [u64; N] {}

impl<const N: usize> Addresses for [u64; N] {
    type Array<E> = [E; N];

    fn addresses(address: impl FnMut(usize) -> u64) -> Self {
        std::array::from_fn(address)
    }

    fn address(&self, at: usize) -> u64 {
        self[at]
    }

    fn array<E>(element: impl FnMut(usize) -> E) -> [E; N] {
        std::array::from_fn(element)
    }
}

macro_rules! room {
    ($($count:literal)*) => { $(impl RoomForSlice for [u64; $count] { type More = [u64; $count + 1]; })* };
}

room!(0 1 2 3 4 5 6 7 8 9 10 11);
