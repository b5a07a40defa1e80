//! The shape of a launch: given, or derived from what it must cover.

use super::{DeviceSlice, Plain};
use crate::{
    device::human,
    error::{Error, ErrorKind, Result},
};

/// CUDA's limits for a grid's blocks in each dimension, for a block's threads in each dimension, and for a block's
/// threads in all (CUDA C++ Programming Guide, technical specifications; the same for all GPUs that CUDA 12 supports).
const MAX_BLOCKS: [u64; 3] = [(1 << 31) - 1, 65_535, 65_535];
const MAX_THREADS: [u64; 3] = [1024, 1024, 64];
const MAX_THREADS_IN_ALL: u64 = 1024;

const DIMENSIONS: [&str; 3] = ["x", "y", "z"];

/// Grid, block and shared memory, where set.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    pub(crate) blocks: Option<[u32; 3]>,
    pub(crate) threads: Option<[u32; 3]>,
    pub(crate) shared_bytes: u32,
}

/// Blocks, and threads per block.
pub(super) type Dimensions = ([u32; 3], [u32; 3]);

impl Shape {
    /// The grid and the block for `elements` elements; `None` if there are no elements.
    pub(super) fn for_elements(&self, elements: u64) -> Result<Option<Dimensions>> {
        let threads = self.threads.unwrap_or([256, 1, 1]);
        let per_block = self.check(threads)?;
        match self.blocks {
            Some(blocks) => Ok(Some((blocks, threads))),
            None if elements == 0 => Ok(None),
            None => match u32::try_from(elements.div_ceil(per_block)) {
                Ok(blocks) if u64::from(blocks) <= MAX_BLOCKS[0] => Ok(Some(([blocks, 1, 1], threads))),
                _ => Err(usage(format!(
                    "{elements} elements need more than {} blocks of {per_block} threads: set the grid with \
                     `Grid::blocks`",
                    MAX_BLOCKS[0]
                ))),
            },
        }
    }

    /// The grid and the block for a kernel whose `over` has these extents; `None` if one of them is 0. A grid that was
    /// given must cover all of them.
    pub(super) fn covering(&self, over: &[Option<i128>]) -> Result<Option<Dimensions>> {
        let mut extents = [1_u64; 3];
        for ((extent, value), dimension) in extents.iter_mut().zip(over).zip(DIMENSIONS) {
            let Some(value) = *value else {
                return Err(usage(format!(
                    "`over` has no value in dimension {dimension}: its arithmetic overflows or divides by 0; check the \
                     arguments"
                )));
            };
            *extent = u64::try_from(value).map_err(|_| {
                usage(format!(
                    "`over` is {value} in dimension {dimension}, which is not a number of threads: check the arguments"
                ))
            })?;
        }
        let threads = self.threads.unwrap_or(match over.len() {
            1 => [256, 1, 1],
            2 => [32, 8, 1],
            _ => [8, 8, 4],
        });
        self.check(threads)?;
        if extents.contains(&0) {
            return Ok(None);
        }
        let mut grid = [1; 3];
        for at in 0..over.len() {
            let (dimension, extent, threads) = (DIMENSIONS[at], extents[at], u64::from(threads[at]));
            let needed = extent.div_ceil(threads);
            if needed > MAX_BLOCKS[at] {
                return Err(usage(format!(
                    "`over` is {extent} in dimension {dimension}, which needs {needed} blocks of {threads} threads: the \
                     limit is {} blocks; launch more threads per block in {dimension} (`Grid::threads`), or make \
                     another dimension of `over` the long one",
                    MAX_BLOCKS[at]
                )));
            }
            let Some(blocks) = self.blocks else {
                grid[at] = u32::try_from(needed).unwrap_or(u32::MAX);
                continue;
            };
            let covered = u64::from(blocks[at]) * threads;
            if covered < extent {
                return Err(usage(format!(
                    "the grid covers {covered} of {extent} in dimension {dimension} ({} of {threads} threads): \
                     launch at least {needed} blocks in {dimension}, or leave the blocks out \
                     (`Grid::default().threads(..)`), which are then derived from the kernel's `over`",
                    human::count(blocks[at] as usize, "block")
                )));
            }
        }
        Ok(Some((self.blocks.unwrap_or(grid), threads)))
    }

    /// Refuses what no device supports. Returns the number of threads of a block.
    fn check(&self, threads: [u32; 3]) -> Result<u64> {
        let exceeds = |given: [u32; 3], most: [u64; 3]| given.iter().zip(most).any(|(n, most)| u64::from(*n) > most);
        let per_block = threads.iter().try_fold(1_u64, |all, n| all.checked_mul(u64::from(*n)));
        let Some(per_block) = per_block.filter(|all| *all <= MAX_THREADS_IN_ALL && !exceeds(threads, MAX_THREADS))
        else {
            return Err(usage(format!(
                "a block of {threads:?} threads is too large: the limit is {MAX_THREADS:?}, and {MAX_THREADS_IN_ALL} \
                 threads in all"
            )));
        };
        if let Some(blocks) = self.blocks.filter(|blocks| exceeds(*blocks, MAX_BLOCKS)) {
            return Err(usage(format!("a grid of {blocks:?} blocks is too large: the limit is {MAX_BLOCKS:?}")));
        }
        if per_block == 0 || self.blocks.is_some_and(|blocks| blocks.contains(&0)) {
            return Err(usage(format!(
                "a grid of {:?} blocks of {threads:?} threads is empty: every dimension must be at least 1",
                self.blocks.unwrap_or([1; 3])
            )));
        }
        Ok(per_block)
    }
}

fn usage(text: String) -> Error {
    Error::new(ErrorKind::Usage, text)
}

/// An operand in a kernel's `over`.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`over` is computed from integers, and this is not one",
    label = "write an integer parameter of the kernel, or the length of a slice, such as `x.len()`"
)]
pub trait ExtentOperand {
    /// `None` if it is out of range.
    fn get(self) -> Option<i128>;
}

macro_rules! extents {
    ($($integer:ty)*) => {
        $(
            impl ExtentOperand for $integer {
                #[inline]
                fn get(self) -> Option<i128> {
                    i128::try_from(self).ok()
                }
            }
        )*
    };
}

extents!(u8 i8 u16 i16 u32 i32 u64 i64 usize isize);

/// What an `over` can see of a slice.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct SliceLength(usize);

#[allow(missing_docs)]
impl SliceLength {
    #[inline]
    pub fn of<T: Plain, S: DeviceSlice<T> + ?Sized>(slice: &S) -> Self {
        Self(slice.view().len)
    }

    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "only its length is a number")]
    pub fn len(self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covering(shape: Shape, over: &[i128]) -> Result<Option<Dimensions>> {
        shape.covering(&over.iter().copied().map(Some).collect::<Vec<_>>())
    }

    fn refusal(shape: Shape, over: &[i128]) -> String {
        let error = covering(shape, over).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        error.to_string()
    }

    fn given(blocks: [u32; 3], threads: [u32; 3]) -> Shape {
        Shape { blocks: Some(blocks), threads: Some(threads), shared_bytes: 0 }
    }

    #[test]
    fn the_default_grid_covers_each_dimension() {
        let default = Shape::default();
        assert_eq!(covering(default, &[257]).unwrap(), Some(([2, 1, 1], [256, 1, 1])));
        assert_eq!(covering(default, &[33, 8]).unwrap(), Some(([2, 1, 1], [32, 8, 1])));
        assert_eq!(covering(default, &[1, 9, 5]).unwrap(), Some(([1, 2, 2], [8, 8, 4])));
        let wide = Shape { threads: Some([64, 16, 1]), ..default };
        assert_eq!(covering(wide, &[65, 16]).unwrap(), Some(([2, 1, 1], [64, 16, 1])));
    }

    #[test]
    fn nothing_is_launched_over_nothing() {
        for over in [&[0][..], &[7, 0], &[0, i128::from(u64::MAX)], &[4, 4, 0]] {
            assert_eq!(covering(Shape::default(), over).unwrap(), None);
            assert_eq!(covering(given([1; 3], [1; 3]), over).unwrap(), None);
        }
    }

    #[test]
    fn a_grid_that_does_not_cover_is_refused_in_the_dimension_that_is_short() {
        let shape = given([4, 2, 1], [32, 8, 1]);
        assert_eq!(covering(shape, &[128, 16]).unwrap(), Some(([4, 2, 1], [32, 8, 1])));
        let refused = refusal(shape, &[128, 17]);
        assert!(refused.contains("covers 16 of 17 in dimension y (2 blocks of 8 threads)"), "{refused}");
        assert!(refused.contains("at least 3 blocks in y"), "{refused}");
        assert!(refusal(shape, &[129, 1]).contains("128 of 129 in dimension x"));
        assert!(refusal(shape, &[1, 1, 2]).contains("1 of 2 in dimension z"));
        assert_eq!(covering(given([4, 9, 1], [32, 8, 1]), &[128]).unwrap(), Some(([4, 9, 1], [32, 8, 1])));
    }

    #[test]
    fn the_limits_of_cuda_hold_on_every_device() {
        let most = 256 * i128::from(MAX_BLOCKS[0]);
        assert_eq!(covering(Shape::default(), &[most]).unwrap(), Some(([(1 << 31) - 1, 1, 1], [256, 1, 1])));
        assert!(refusal(Shape::default(), &[most + 1]).contains("2147483648 blocks of 256 threads"));
        assert!(refusal(Shape::default(), &[1, 8 * 65_535 + 1]).contains("the limit is 65535 blocks"));
        assert!(refusal(Shape::default(), &[1, 1, i128::from(u64::MAX)]).contains("dimension z"));
        assert!(refusal(Shape::default(), &[i128::from(u64::MAX) + 1]).contains("not a number of threads"));
        assert!(refusal(Shape::default(), &[3, -1]).contains("`over` is -1 in dimension y"));
        assert!(Shape::default().covering(&[None]).unwrap_err().to_string().contains("overflows or divides by 0"));
        assert!(refusal(given([1; 3], [1, 1, 65]), &[1]).contains("too large"));
        assert!(refusal(given([1, 65_536, 1], [1; 3]), &[1]).contains("too large"));
        assert!(refusal(given([1, 0, 1], [1; 3]), &[0]).contains("empty"));
    }
}
