//! [`Plain`]: the types of elements, and casts between bytes and elements.

use crate::{
    device::backend::MAX_ALIGNMENT,
    error::{Error, ErrorKind, Result},
};

/// Plain data: any bit pattern is a valid value, there is no padding, and values can be copied byte by byte. Derive
/// `bytemuck::Pod` and `bytemuck::Zeroable` for your own types.
///
/// # Size and alignment
/// Elements have at least one byte and an alignment of at most 256. The addresses of device memory are multiples of 256
/// (CUDA C++ Programming Guide, *Device Memory Accesses*: an address that an allocation routine of the driver or the
/// runtime returns is aligned to at least 256 bytes), and so are those of wakeline's page-locked memory and emulated
/// devices. A buffer, an envelope or a chunk hub with other elements does not compile:
///
/// ```compile_fail,E0080
/// #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
/// #[repr(C, align(512))]
/// struct Wide([u8; 512]);
///
/// let device = wakeline::Device::host();
/// let buffer = wakeline::Buffer::<Wide>::pinned(&device, 1)?;
/// # Ok::<(), wakeline::Error>(())
/// ```
///
/// ```compile_fail,E0080
/// let device = wakeline::Device::host();
/// let buffer = wakeline::Buffer::<()>::pinned(&device, 1)?;
/// # Ok::<(), wakeline::Error>(())
/// ```
pub trait Plain: bytemuck::Pod + Send + Sync + 'static {
    /// Evaluated wherever memory is allocated for elements of the type. Fails to compile for a type of size 0, or with
    /// an alignment of more than 256.
    #[doc(hidden)]
    const FITS: () = {
        assert!(size_of::<Self>() > 0, "elements of size 0 are not supported");
        assert!(
            align_of::<Self>() <= MAX_ALIGNMENT,
            "the elements of device memory have an alignment of at most 256 bytes"
        );
    };
}

impl<T: bytemuck::Pod + Send + Sync + 'static> Plain for T {}

/// The size of `len` elements.
pub(crate) fn bytes_of<T: Plain>(len: usize) -> Result<usize> {
    const { T::FITS }
    len.checked_mul(size_of::<T>()).ok_or_else(|| {
        let text =
            format!("{len} elements of {} bytes are more than an address space holds: ask for fewer", size_of::<T>());
        Error::new(ErrorKind::OutOfMemory, text)
    })
}

/// Casts bytes to elements.
///
/// # Errors
/// [`Usage`](ErrorKind::Usage) if the memory is not aligned for them or its length is not a multiple of their size: it
/// was allocated for elements of another type.
pub(crate) fn elements<T: Plain>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|error| not_of::<T>(error, bytes))
}

pub(crate) fn elements_mut<T: Plain>(bytes: &mut [u8]) -> Result<&mut [T]> {
    let range = bytes.as_ptr_range();
    bytemuck::try_cast_slice_mut(bytes).map_err(|error| cannot_hold::<T>(error, range))
}

#[cold]
fn not_of<T>(error: bytemuck::PodCastError, bytes: &[u8]) -> Error {
    cannot_hold::<T>(error, bytes.as_ptr_range())
}

#[cold]
fn cannot_hold<T>(error: bytemuck::PodCastError, at: std::ops::Range<*const u8>) -> Error {
    let bytes = at.end.addr() - at.start.addr();
    let text = format!(
        "{bytes} bytes of memory at {:?} cannot hold elements of `{}` ({} bytes each, aligned to {}): {error}; it was \
         allocated for elements of another type",
        at.start,
        std::any::type_name::<T>(),
        size_of::<T>(),
        align_of::<T>()
    );
    Error::new(ErrorKind::Usage, text)
}
