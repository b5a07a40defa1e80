//! One launch: collects the arguments, orders and enqueues the work, and notes the uses. Called by code that
//! `#[kernel]` generates.

use std::fmt;

use smallvec::SmallVec;

use super::{DeviceSlice, DeviceSliceMut, buffer::Access, use_lock::UseLockGuard};
use crate::{
    device::{
        KernelType,
        backend::{Arg, KernelDef, Launch, Scalar},
    },
    error::{Error, ErrorKind, Result},
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

    pub fn slice<T: KernelType, S: DeviceSlice<T> + ?Sized>(&mut self, slice: &'a S) {
        self.push::<T>(Access::Read(slice.view()));
    }

    pub fn slice_mut<T: KernelType, S: DeviceSliceMut<T> + ?Sized>(&mut self, slice: &'a mut S) {
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

    /// # Safety
    /// The arguments are those of the kernel's declaration, in its order, and the kernel keeps to its declaration.
    pub unsafe fn enqueue(self) -> Result<()> {
        let Self { def, stream, shape, args: mut given } = self;
        let place = || format!("kernel `{}` on `{}`", def.name, stream.name());
        let longest = |write: bool| {
            let of = |arg: &Argument<'_>| match arg {
                Argument::Slice { access, .. } if access.writes() == write => Some(access.len() as u64),
                _ => None,
            };
            given.iter().filter_map(of).max()
        };
        // A kernel with scalar arguments only runs one block.
        let elements = longest(true).or_else(|| longest(false)).unwrap_or(1);
        let Some((grid, block)) = shape.resolve(elements).map_err(|error| error.at(place()))? else {
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

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("kernel", &self.def.name).finish_non_exhaustive()
    }
}

/// Grid, block and shared memory, where set.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    pub(crate) blocks: Option<[u32; 3]>,
    pub(crate) threads: Option<[u32; 3]>,
    pub(crate) shared_bytes: u32,
}

impl Shape {
    /// The grid and the block for `elements` elements; `None` if there are no elements.
    fn resolve(&self, elements: u64) -> Result<Option<([u32; 3], [u32; 3])>> {
        /// CUDA's limit for a grid's first dimension, since compute capability 3.0.
        const MAX_BLOCKS: u64 = (1 << 31) - 1;
        /// CUDA's limits for all dimensions (CUDA C++ Programming Guide, technical specifications; the same for all
        /// GPUs that CUDA 12 supports).
        const MAX_GRID: [u64; 3] = [MAX_BLOCKS, 65_535, 65_535];
        /// CUDA's limit for a block.
        const MAX_THREADS: u64 = 1024;
        let threads = self.threads.unwrap_or([256, 1, 1]);
        let per_block = threads.iter().try_fold(1_u64, |all, n| all.checked_mul(u64::from(*n)));
        let Some(per_block) = per_block.filter(|all| *all <= MAX_THREADS) else {
            let text =
                format!("a block of {threads:?} threads is too large: the limit is {MAX_THREADS} threads in all");
            return Err(Error::new(ErrorKind::Usage, text));
        };
        let over = |grid: &[u32; 3]| grid.iter().zip(MAX_GRID).any(|(blocks, most)| u64::from(*blocks) > most);
        if let Some(blocks) = self.blocks.filter(over) {
            let text = format!("a grid of {blocks:?} blocks is too large: the limit is {MAX_GRID:?}");
            return Err(Error::new(ErrorKind::Usage, text));
        }
        if per_block == 0 || self.blocks.is_some_and(|blocks| blocks.contains(&0)) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "a grid of {:?} blocks of {threads:?} threads is empty: every dimension must be at least 1",
                    self.blocks.unwrap_or([1; 3])
                ),
            ));
        }
        match self.blocks {
            Some(blocks) => Ok(Some((blocks, threads))),
            None if elements == 0 => Ok(None),
            None => match u32::try_from(elements.div_ceil(per_block).min(MAX_BLOCKS + 1)) {
                Ok(blocks) if u64::from(blocks) <= MAX_BLOCKS => Ok(Some(([blocks, 1, 1], threads))),
                _ => Err(Error::new(
                    ErrorKind::Usage,
                    format!(
                        "{elements} elements need more than {MAX_BLOCKS} blocks of {per_block} threads: set the grid \
                         with `Grid::blocks`"
                    ),
                )),
            },
        }
    }
}
