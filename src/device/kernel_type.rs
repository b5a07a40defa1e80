//! The types of kernel arguments, and their definitions in CUDA C++.

use std::fmt::Write as _;

/// A type with a name in CUDA C++. It is either an argument by value, of at most 64 bytes and an alignment of at most
/// 16, or the element of a slice, with the size and alignment limits of [`Plain`](crate::memory::Plain).
///
/// Numbers have one, and `#[derive(KernelStruct)]` gives one to a struct of your own
/// ([`KernelStruct`](macro@crate::kernel::KernelStruct)). Implement the trait by hand only for a type whose definition in
/// C++ cannot be derived.
///
/// # Safety
/// [`CUDA`](Self::CUDA) names a C++ type of the same size, alignment and layout.
///
/// ```
/// use wakeline::kernel::KernelType;
///
/// /// A `__half`.
/// #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
/// #[repr(C)]
/// struct Half(u16);
///
/// // SAFETY: a `__half` is two bytes, aligned to two.
/// unsafe impl KernelType for Half {
///     const CUDA: &'static str = "__half";
///     const DECLARE: &'static str = "#include <cuda_fp16.h>";
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no name in CUDA C++",
    label = "a kernel takes numbers and structs: a struct needs `#[derive(KernelStruct)]`"
)]
pub unsafe trait KernelType: bytemuck::Pod + Send + Sync + 'static {
    /// The type's name in CUDA C++.
    const CUDA: &'static str;
    /// A declaration that the name needs before its use, if any.
    const DECLARE: &'static str = "";

    /// Adds the declarations that the type needs.
    #[doc(hidden)]
    fn declare(types: &mut CudaTypes) {
        types.add(Self::DECLARE);
    }
}

/// The declarations of types before a kernel's prototype, each once, in the order in which they need each other.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct CudaTypes {
    declarations: Vec<String>,
    /// The names of the structs that are defined.
    structs: Vec<&'static str>,
    /// A struct of a name that is defined is left out.
    keeps_defined: bool,
}

#[allow(missing_docs)]
impl CudaTypes {
    pub fn new() -> Self {
        Self::default()
    }

    fn add(&mut self, declaration: &str) {
        if !declaration.is_empty() && !self.declarations.iter().any(|added| added == declaration) {
            self.declarations.push(declaration.into());
        }
    }

    /// What is added from now on is needed by other kernels, which check it themselves. If a struct of theirs has the name of
    /// one that is defined, that one stays the only one.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "nothing is compiled"))]
    pub(crate) fn of_other_kernels(&mut self) {
        self.keeps_defined = true;
    }

    /// Defines the struct `T`; `alignment`: that of its `repr`. It has no padding: if its size and those of its fields are
    /// the same in C++, then so are the offsets.
    pub fn define<T: KernelType>(&mut self, alignment: Option<usize>, fields: impl FnOnce(&mut StructFields<'_>)) {
        let name = T::CUDA;
        if self.keeps_defined && self.structs.contains(&name) {
            return;
        }
        let mut added = StructFields { types: self, name, fields: String::new(), checks: String::new() };
        fields(&mut added);
        let StructFields { fields, checks, .. } = added;
        let alignas = alignment.map(|bytes| format!("alignas({bytes}) ")).unwrap_or_default();
        let (size, align) = (size_of::<T>(), align_of::<T>());
        self.structs.push(name);
        let definition = format!("struct {alignas}{name} {{\n{fields}}};");
        if self.keeps_defined {
            return self.add(&definition);
        }
        self.add(&format!(
            "{definition}\n{checks}static_assert(sizeof({name}) == {size} && alignof({name}) == \
             {align}, \"{name} has {size} bytes, aligned to {align}, in Rust\");"
        ));
    }

    pub fn finish(self) -> String {
        self.declarations.join("\n")
    }
}

/// The fields of a struct that is being defined.
#[doc(hidden)]
#[derive(Debug)]
pub struct StructFields<'a> {
    types: &'a mut CudaTypes,
    name: &'static str,
    fields: String,
    checks: String,
}

#[allow(missing_docs)]
impl StructFields<'_> {
    /// A field of type `T`, or an array with these lengths, the outermost first, of `T`.
    pub fn add<T: KernelType>(&mut self, field: &str, lengths: &[usize]) {
        T::declare(self.types);
        let (name, ty) = (self.name, T::CUDA);
        let bytes = lengths.iter().product::<usize>() * size_of::<T>();
        let lengths: String = lengths.iter().map(|length| format!("[{length}]")).collect();
        let _ = writeln!(self.fields, "    {ty} {field}{lengths};");
        let _ = writeln!(
            self.checks,
            "static_assert(sizeof({name}::{field}) == {bytes}, \"{name}::{field} has {bytes} bytes in Rust\");"
        );
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C)]
    struct Point([f32; 2]);

    // SAFETY: tests only look at the declaration.
    unsafe impl KernelType for Point {
        const CUDA: &'static str = "Point";
        const DECLARE: &'static str = "struct Point;";
    }

    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C)]
    struct Line([Point; 4]);

    // SAFETY: the same four points; tests only look at the declaration.
    unsafe impl KernelType for Line {
        const CUDA: &'static str = "Line";

        fn declare(types: &mut CudaTypes) {
            types.define::<Self>(Some(4), |fields| {
                fields.add::<Point>("ends", &[1, 2]);
                fields.add::<Point>("more", &[2]);
            });
        }
    }

    #[test]
    fn a_type_is_declared_once_and_before_those_that_contain_it() {
        let mut types = CudaTypes::new();
        Line::declare(&mut types);
        Point::declare(&mut types);
        Line::declare(&mut types);
        u8::declare(&mut types);
        assert_eq!(
            types.finish(),
            "struct Point;\nstruct alignas(4) Line {\n    Point ends[1][2];\n    Point more[2];\n};\n\
             static_assert(sizeof(Line::ends) == 16, \"Line::ends has 16 bytes in Rust\");\n\
             static_assert(sizeof(Line::more) == 16, \"Line::more has 16 bytes in Rust\");\n\
             static_assert(sizeof(Line) == 32 && alignof(Line) == 4, \"Line has 32 bytes, aligned to 4, in Rust\");"
        );
    }
}
