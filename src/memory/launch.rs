//! One launch: collects the arguments, orders and enqueues the work, and notes the uses. Called by code that
//! `#[kernel]` generates.

use std::{fmt, marker::PhantomData};

use smallvec::SmallVec;

use super::{
    DeviceSlice, DeviceSliceMut, Plain,
    buffer::Access,
    shape::{Dimensions, Shape},
    use_lock::UseLockGuard,
};
use crate::{
    device::{
        KernelType,
        backend::{Arg, KernelDef, Launch, Scalar},
    },
    error::Result,
    stream::{Launched, Stream},
};

/// A launch under construction.
#[doc(hidden)]
#[allow(missing_docs)]
pub struct Call<'a> {
    def: &'static KernelDef,
    stream: &'a Stream,
    shape: Shape,
    args: SmallVec<[Argument<'a>; 8]>,
}

enum Argument<'a> {
    Slice { access: Access<'a>, bytes: usize },
    Scalar(&'a [u8]),
}

#[allow(missing_docs)]
impl<'a> Call<'a> {
    pub fn new(def: &'static KernelDef, stream: &'a Stream, shape: impl Into<Shape>) -> Self {
        Self { def, stream, shape: shape.into(), args: SmallVec::new() }
    }

    pub fn slice<T: Plain, S: DeviceSlice<T> + ?Sized>(&mut self, slice: &'a S) {
        self.push::<T>(Access::Read(slice.view()));
    }

    pub fn slice_mut<T: Plain, S: DeviceSliceMut<T> + ?Sized>(&mut self, slice: &'a mut S) {
        self.push::<T>(Access::Write(slice.view_mut()));
    }

    fn push<T>(&mut self, access: Access<'a>) {
        let bytes = access.len() * size_of::<T>();
        self.args.push(Argument::Slice { access, bytes });
    }

    pub fn scalar<T: KernelType>(&mut self, value: &'a T) {
        const {
            assert!(size_of::<T>() > 0, "a scalar argument of size 0: C++ has no such types");
            assert!(
                size_of::<T>() <= Scalar::MAX_BYTES && align_of::<T>() <= 16,
                "a scalar argument has at most 64 bytes"
            );
        };
        self.args.push(Argument::Scalar(bytemuck::bytes_of(value)));
    }

    /// Launches with one thread for each element of the longest slice, unless a grid was given.
    ///
    /// # Safety
    /// The arguments are those of the kernel's declaration, in its order, and the kernel keeps to its declaration.
    pub unsafe fn enqueue(self) -> Result<()> {
        let longest = |write: bool| {
            let of = |arg: &Argument<'_>| match arg {
                Argument::Slice { access, .. } if access.writes() == write => Some(access.len() as u64),
                _ => None,
            };
            self.args.iter().filter_map(of).max()
        };
        // A kernel with scalar arguments only runs one block.
        let elements = longest(true).or_else(|| longest(false)).unwrap_or(1);
        let dimensions = self.shape.for_elements(elements);
        // SAFETY: this function's contract.
        unsafe { self.enqueue_shaped(dimensions) }
    }

    /// Launches a kernel with `over`: 1 to 3 extents, each `None` where its arithmetic has no value.
    ///
    /// # Safety
    /// That of [`enqueue`](Self::enqueue).
    pub unsafe fn enqueue_over(self, over: &[Option<i128>]) -> Result<()> {
        let dimensions = self.shape.covering(over);
        // SAFETY: this function's contract.
        unsafe { self.enqueue_shaped(dimensions) }
    }

    /// # Safety
    /// That of [`enqueue`](Self::enqueue).
    #[inline]
    unsafe fn enqueue_shaped(self, dimensions: Result<Option<Dimensions>>) -> Result<()> {
        let Self { def, stream, shape, args: mut given } = self;
        let place = || format!("kernel `{}` on stream `{}`", def.name, stream.name());
        let Some((grid, block)) = dimensions.map_err(|error| error.at(place()))? else {
            return Ok(());
        };
        // Compiles the kernel, if necessary, before any lock is taken.
        stream.streams().observe(stream.device().backend().load(def)).map_err(|error| error.at(place()))?;
        let slices = given.iter().filter_map(|arg| match arg {
            Argument::Slice { access, .. } => Some(access.memory()),
            Argument::Scalar(_) => None,
        });
        let (room, _use_lock) = stream
            .make_room(|| UseLockGuard::for_memory(slices.clone().map(|memory| memory.shared.get())))
            .map_err(|error| error.at(place()))?;
        let mut args: SmallVec<[Arg<'_>; 8]> = SmallVec::with_capacity(given.len());
        for arg in &mut given {
            args.push(match arg {
                Argument::Scalar(scalar) => Arg::Scalar(scalar),
                Argument::Slice { access, bytes } => {
                    let address = access.reachable(stream).map_err(|error| error.at(place()))?;
                    access.order(stream).map_err(|error| error.at(place()))?;
                    Arg::Slice { address, len: access.len() as u64, bytes: *bytes as u64, write: access.writes() }
                }
            });
        }
        let launch = Launch { kernel: def, grid, block, shared_bytes: shape.shared_bytes, args: &args };
        let enqueued = stream.enqueue_launch(room, Launched::Kernel(def.name), |backend, raw| {
            // SAFETY: by this function's contract the arguments are the declaration's. Each slice is in memory of this
            // device (`reachable`) and in bounds. It stays valid until the kernel is done: the ticket is noted in it
            // below, and memory with an open ticket is not freed.
            unsafe { backend.launch(raw, &launch) }
        });
        let ticket = enqueued.map_err(|error| error.at(place()))?;
        for arg in &mut given {
            if let Argument::Slice { access, .. } = arg {
                access.note(&ticket);
            }
        }
        Ok(())
    }
}

/// Passes a scalar of a user's type. `(&ScalarOf::<T>::NEW).pass(..)` is [`PassKernelType`]'s method where `T` is a
/// [`KernelType`]. Otherwise the kernel's definition does not compile, and [`PassAny`]'s method keeps the launches from
/// repeating that error.
#[doc(hidden)]
#[derive(Debug)]
pub struct ScalarOf<T>(PhantomData<T>);

#[allow(missing_docs)]
impl<T> ScalarOf<T> {
    pub const NEW: Self = Self(PhantomData);
}

#[doc(hidden)]
#[allow(missing_docs)]
pub trait PassKernelType<T> {
    fn pass<'a>(&self, call: &mut Call<'a>, value: &'a T);
}

impl<T: KernelType> PassKernelType<T> for ScalarOf<T> {
    #[inline]
    fn pass<'a>(&self, call: &mut Call<'a>, value: &'a T) {
        call.scalar(value);
    }
}

#[doc(hidden)]
#[allow(missing_docs)]
pub trait PassAny<T> {
    fn pass<'a>(&self, call: &mut Call<'a>, value: &'a T);
}

impl<T> PassAny<T> for &ScalarOf<T> {
    fn pass<'a>(&self, _call: &mut Call<'a>, _value: &'a T) {
        unreachable!("the kernel's definition does not compile")
    }
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("kernel", &self.def.name).finish_non_exhaustive()
    }
}
