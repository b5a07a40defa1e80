//! The types of kernel arguments.

/// A type with a name in CUDA C++. It is either an argument by value, of at most 64 bytes and an alignment of at most
/// 16, or the element of a slice, with the size and alignment limits of [`Plain`](crate::memory::Plain).
///
/// # Safety
/// [`CUDA`](Self::CUDA) names a C++ type of the same size, alignment and layout.
///
/// ```
/// use wakeline::kernel::KernelType;
///
/// #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
/// #[repr(C)]
/// struct Point {
///     x: f32,
///     y: f32,
/// }
///
/// // SAFETY: point.cu has `struct Point { float x, y; };`
/// unsafe impl KernelType for Point {
///     const CUDA: &'static str = "Point";
///     const DECLARE: &'static str = "struct Point;";
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no name in CUDA C++",
    label = "a kernel takes numbers, and plain types that implement `KernelType`"
)]
pub unsafe trait KernelType: bytemuck::Pod + Send + Sync + 'static {
    /// The type's name in CUDA C++.
    const CUDA: &'static str;
    /// A declaration that the name needs before its use, if any.
    const DECLARE: &'static str = "";
}

macro_rules! kernel_types {
    ($($rust:ty => $cuda:literal),* $(,)?) => {
        $(
            // SAFETY: the same size, alignment and layout on every platform that CUDA supports.
            unsafe impl KernelType for $rust {
                const CUDA: &'static str = $cuda;
            }
        )*
    };
}

kernel_types! {
    u8 => "unsigned char",
    i8 => "signed char",
    u16 => "unsigned short",
    i16 => "short",
    u32 => "unsigned int",
    i32 => "int",
    u64 => "unsigned long long",
    i64 => "long long",
    usize => "unsigned long long",
    isize => "long long",
    f32 => "float",
    f64 => "double",
}
