//! [`HeapSize`]: the bytes that a field of a derived message has on the heap.
//!
//! The derive macro does not know the types of fields, so the compiler chooses, by the first of these that applies:
//!
//! ```text
//!   a `Message`              its `heap_bytes`
//!   `Vec`, `VecDeque`, `Box` the elements, or the value, of any type
//!   anything else            0
//! ```
//!
//! Each is a constant number of steps, whatever the data: data behind a second pointer is not counted.

use std::collections::VecDeque;

use super::Message;

/// A field of a derived message. Ask `(&HeapSize(&field)).heap_bytes()`, with [`OfContainer`] and [`OfAnything`] in scope.
#[derive(Debug)]
#[doc(hidden)]
pub struct HeapSize<'a, T: ?Sized>(pub &'a T);

#[allow(missing_docs)]
impl<T: Message + ?Sized> HeapSize<'_, T> {
    #[inline]
    pub fn heap_bytes(&self) -> usize {
        self.0.heap_bytes()
    }
}

#[allow(missing_docs)]
#[doc(hidden)]
pub trait OfContainer {
    fn heap_bytes(&self) -> usize;
}

impl<T> OfContainer for HeapSize<'_, Vec<T>> {
    #[inline]
    fn heap_bytes(&self) -> usize {
        size_of_val(&**self.0)
    }
}

impl<T> OfContainer for HeapSize<'_, VecDeque<T>> {
    #[inline]
    fn heap_bytes(&self) -> usize {
        size_of::<T>().saturating_mul(self.0.len())
    }
}

impl<T: ?Sized> OfContainer for HeapSize<'_, Box<T>> {
    #[inline]
    fn heap_bytes(&self) -> usize {
        size_of_val(&**self.0)
    }
}

#[allow(missing_docs)]
#[doc(hidden)]
pub trait OfAnything {
    fn heap_bytes(&self) -> usize;
}

impl<T: ?Sized> OfAnything for &HeapSize<'_, T> {
    #[inline]
    fn heap_bytes(&self) -> usize {
        0
    }
}
