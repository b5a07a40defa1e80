//! [`agree`]: compares the two bodies of kernels on random inputs.

use std::{fmt, ops::Range};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    device::{Device, Emulated},
    error::{Error, ErrorKind, Result},
    stream::Stream,
};

/// Compares the results of kernels on a GPU with those of their Rust bodies, on the same random inputs.
///
/// The closure makes inputs, launches, and returns what the kernels have written: one `Vec`, or a tuple of them. In each
/// round it runs on an emulated device and then on the GPU, with the same random numbers.
///
/// ```no_run
/// use wakeline::{kernel, prelude::*};
///
/// #[kernel(over = [x.len()])]
/// fn saxpy(a: f32, x: &[f32], y: &mut [f32]) {
///     y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
/// }
///
/// # async fn test() -> Result<()> {
/// kernel::agree(4711)
///     .run(async |stream, random| {
///         let n = random.value(1..10_000);
///         let x = Buffer::from_slice(stream, &random.values(n, -1.0..1.0))?;
///         let mut y = Buffer::from_slice(stream, &random.values(n, -1.0..1.0))?;
///         saxpy::launch(stream, random.value(0.0..2.0), &x, &mut y)?;
///         y.to_vec(stream).await
///     })
///     .await?;
/// # Ok(())
/// # }
/// ```
///
/// The same seed makes the same inputs on every machine, with one version of wakeline.
pub fn agree(seed: u64) -> Agreement {
    Agreement { seed, rounds: 16, tolerance: 1e-5, device: None }
}

/// A comparison of kernels' two bodies: see [`agree`].
#[derive(Clone, Debug)]
#[must_use = "it runs nothing until `run` is called"]
pub struct Agreement {
    seed: u64,
    rounds: u64,
    tolerance: f64,
    device: Option<Device>,
}

impl Agreement {
    /// Sets the number of rounds, each with inputs of its own: 16, unless set.
    pub fn rounds(mut self, rounds: u64) -> Self {
        self.rounds = rounds;
        self
    }

    /// Sets how far floating-point numbers may differ, as a fraction of the larger of both and of 1: 1e-5, unless set.
    /// The compiler of a GPU fuses multiplications with additions, so equal results are not to be expected.
    pub fn tolerance(mut self, tolerance: f64) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Sets the device that is compared with an emulated one: the first GPU, unless set.
    pub fn on(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// Runs the comparison.
    ///
    /// # Errors
    /// - [`NoDevice`](ErrorKind::NoDevice) where there is no GPU.
    /// - [`Kernel`](ErrorKind::Kernel): the results differ. The message has the first element that does, both values and
    ///   the seed of that round; `agree(seed).rounds(1)` repeats it.
    /// - Any error of `body`, with its device and seed.
    ///
    /// # Cancel safety
    /// Dropping the future drops that of `body`; work that it has enqueued still runs.
    pub async fn run<R: Comparable>(self, body: impl AsyncFn(&Stream, &mut RandomInputs) -> Result<R>) -> Result<()> {
        let device = match self.device {
            Some(device) => device,
            None => Device::cuda(0)?,
        };
        let reference = Device::emulated(Emulated::new());
        for round in 0..self.rounds {
            let seed = self.seed.wrapping_add(round);
            let expected = run_on(&reference, seed, &body).await?;
            let found = run_on(&device, seed, &body).await?;
            if let Some(difference) = expected.difference(&found, self.tolerance) {
                let Difference { place, expected, found } = difference;
                let text = format!(
                    "the bodies disagree: {place} is {expected} on {reference}, which runs the Rust body, and {found} on \
                     {device}; `agree({seed}).rounds(1)` repeats this"
                );
                return Err(Error::new(ErrorKind::Kernel, text));
            }
        }
        Ok(())
    }
}

async fn run_on<R>(
    device: &Device,
    seed: u64,
    body: &impl AsyncFn(&Stream, &mut RandomInputs) -> Result<R>,
) -> Result<R> {
    let result = match Stream::new(device) {
        Ok(stream) => body(&stream, &mut RandomInputs::new(seed)).await,
        Err(error) => Err(error),
    };
    result.map_err(|error| error.at(format!("{device}, seed {seed}")))
}

/// The random numbers of one round of [`agree`].
#[derive(Debug)]
pub struct RandomInputs(StdRng);

impl RandomInputs {
    fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// A number in the range, which does not include its end: `random.value(1..1000)`. The start of an empty range.
    pub fn value<T: RandomNumber>(&mut self, range: Range<T>) -> T {
        T::from_bits(self.0.random(), range)
    }

    /// As many numbers in the range, which does not include its end.
    pub fn values<T: RandomNumber>(&mut self, len: usize, range: Range<T>) -> Vec<T> {
        (0..len).map(|_| self.value(range.clone())).collect()
    }
}

/// A number that [`RandomInputs`] makes.
pub trait RandomNumber: Clone {
    /// The number of `range` that 64 random bits stand for; its start if it is empty.
    fn from_bits(bits: u64, range: Range<Self>) -> Self;
}

/// An element of a result, which [`agree`] compares. Implement it for structs that a kernel writes.
pub trait ComparableElement: fmt::Debug {
    /// Whether both are the same; `tolerance`: see [`Agreement::tolerance`].
    fn agrees(&self, other: &Self, tolerance: f64) -> bool;
}

macro_rules! integers {
    ($($integer:ty)*) => {
        $(
            impl RandomNumber for $integer {
                fn from_bits(bits: u64, range: Range<Self>) -> Self {
                    // Both within 64 bits, so exact in 128; and the result is below the range's end.
                    let width = (range.end as i128 - range.start as i128).max(0);
                    (range.start as i128 + ((u128::from(bits) * width as u128) >> 64) as i128) as $integer
                }
            }

            impl ComparableElement for $integer {
                fn agrees(&self, other: &Self, _tolerance: f64) -> bool {
                    self == other
                }
            }
        )*
    };
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64 usize isize);

macro_rules! floats {
    ($($float:ty)*) => {
        $(
            impl RandomNumber for $float {
                fn from_bits(bits: u64, range: Range<Self>) -> Self {
                    let fraction = (bits >> 11) as f64 / (1_u64 << 53) as f64;
                    let value = (f64::from(range.start) * (1.0 - fraction) + f64::from(range.end) * fraction) as $float;
                    // Rounding can reach the end.
                    if value < range.end && value >= range.start { value } else { range.start }
                }
            }

            impl ComparableElement for $float {
                fn agrees(&self, other: &Self, tolerance: f64) -> bool {
                    let (a, b) = (f64::from(*self), f64::from(*other));
                    // Equal infinities have no difference that is a number.
                    a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= tolerance * a.abs().max(b.abs()).max(1.0)
                        && a.is_finite() && b.is_finite()
                }
            }
        )*
    };
}

floats!(f32 f64);

/// What the closure of [`agree`] returns: a `Vec`, or a tuple of them.
pub trait Comparable {
    /// The first difference, if any.
    #[doc(hidden)]
    fn difference(&self, found: &Self, tolerance: f64) -> Option<Difference>;
}

/// Where two results differ.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Difference {
    place: String,
    expected: String,
    found: String,
}

impl<T: ComparableElement> Comparable for Vec<T> {
    fn difference(&self, found: &Self, tolerance: f64) -> Option<Difference> {
        if self.len() != found.len() {
            let (expected, found) = (self.len().to_string(), found.len().to_string());
            return Some(Difference { place: "the number of elements".into(), expected, found });
        }
        let mut different = self.iter().zip(found).enumerate().filter(|(_, (a, b))| !a.agrees(b, tolerance));
        let (at, (expected, found)) = different.next()?;
        let others = different.count();
        let place = format!("element {at} of {}, the first of {} that differ,", self.len(), others + 1);
        Some(Difference { place, expected: format!("{expected:?}"), found: format!("{found:?}") })
    }
}

macro_rules! tuples {
    ($(($($name:ident $at:tt),*))*) => {
        $(
            impl<$($name: Comparable),*> Comparable for ($($name,)*) {
                fn difference(&self, found: &Self, tolerance: f64) -> Option<Difference> {
                    $(
                        if let Some(mut difference) = self.$at.difference(&found.$at, tolerance) {
                            difference.place = format!("in result {}, {}", $at, difference.place);
                            return Some(difference);
                        }
                    )*
                    None
                }
            }
        )*
    };
}

tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differs<R: Comparable>(a: R, b: R) -> Option<String> {
        a.difference(&b, 1e-3).map(|found| format!("{} is {} and {}", found.place, found.expected, found.found))
    }

    #[test]
    fn numbers_are_within_their_range() {
        let mut random = RandomInputs::new(1);
        for _ in 0..10_000 {
            assert!((-3..4).contains(&random.value(-3_i8..4)));
            assert!((1.0..1.0 + 2.0 * f32::EPSILON).contains(&random.value(1.0..1.0 + 2.0 * f32::EPSILON)));
            assert!(random.value(i64::MIN..i64::MAX) < i64::MAX);
        }
        assert_eq!(
            (
                random.value(5..5_u32),
                random.value(std::ops::Range { start: 7, end: 3_i64 }),
                random.value(2.0..2.0_f64)
            ),
            (5, 7, 2.0)
        );
        let seen: std::collections::BTreeSet<_> = random.values(1000, 0..10_u8).into_iter().collect();
        assert_eq!(seen.len(), 10);
        assert!(random.values(100, f64::MIN..f64::MAX).iter().all(|value| value.is_finite()));
    }

    #[test]
    fn a_seed_decides_all_numbers() {
        let values = |seed| RandomInputs::new(seed).values(8, 0..u64::MAX);
        assert_eq!(values(3), values(3));
        assert_ne!(values(3), values(4));
    }

    #[test]
    fn floats_are_compared_within_the_tolerance_and_integers_are_not() {
        assert_eq!(differs(vec![1.0, 1000.0], vec![1.0009, 1000.9]), None);
        assert_eq!(differs(vec![f32::NAN, f32::INFINITY], vec![f32::NAN, f32::INFINITY]), None);
        let text = differs(vec![1.0, 2.0, 3.0], vec![1.0, 2.5, 3.5]).unwrap();
        assert_eq!(text, "element 1 of 3, the first of 2 that differ, is 2.0 and 2.5");
        for (a, b) in [(f32::NAN, 0.0), (f32::INFINITY, f32::MAX), (f32::INFINITY, f32::NEG_INFINITY)] {
            assert!(differs(vec![a], vec![b]).is_some() && differs(vec![b], vec![a]).is_some());
        }
        assert!(differs(vec![1_000_000_u32], vec![1_000_001]).is_some());
        assert!(differs(vec![1, 2], vec![1]).unwrap().starts_with("the number of elements is 2 and 1"));
        let text = differs((vec![1], vec![2.0]), (vec![1], vec![3.0])).unwrap();
        assert!(text.starts_with("in result 1, element 0 of 1"), "{text}");
    }
}
