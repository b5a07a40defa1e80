//! The signature of a kernel: which functions are allowed, and their arguments.

use syn::{FnArg, Ident, Pat, ReturnType, Safety, Signature, Type};

use crate::errors::{Errors, shown};

const ARGUMENT: &str = "an argument of a kernel";

pub(super) struct Argument {
    pub(super) name: Ident,
    pub(super) kind: ArgumentKind,
    /// The type of the value, or of the slice's elements.
    pub(super) ty: Type,
}

#[derive(Clone, Copy)]
pub(super) enum ArgumentKind {
    Slice,
    SliceMut,
    Scalar,
}

/// Returns the arguments, and records the errors of the signature.
pub(super) fn check(sig: &Signature, errors: &mut Errors) -> Vec<Argument> {
    if let Some(token) = &sig.constness {
        errors.at(token, "a kernel cannot be `const`: remove it");
    }
    if let Some(token) = &sig.asyncness {
        errors
            .at(token, "a kernel cannot be `async`: its body runs to completion, like the device code; remove `async`");
    }
    if let Safety::Unsafe(token) = &sig.safety {
        errors.at(
            token,
            "a kernel's Rust body is called by safe code: remove `unsafe`; the `unsafe` for the device code goes in the attribute",
        );
    }
    if let Some(abi) = &sig.abi {
        errors
            .at(abi, "a kernel is a plain Rust function: remove the `extern`; only the device code is `extern \"C\"`");
    }
    if !sig.generics.params.is_empty() {
        errors.at(
            &sig.generics,
            "a kernel cannot be generic, since it has one compiled body: write one kernel for each type",
        );
    } else if let Some(clause) = &sig.generics.where_clause {
        errors.at(clause, "a kernel cannot be generic: remove the where clause");
    }
    if let Some(variadic) = &sig.variadic {
        errors.at(variadic, "a kernel has a fixed list of arguments");
    }
    if let ReturnType::Type(_, ty) = &sig.output
        && !matches!(&**ty, Type::Tuple(unit) if unit.elems.is_empty())
    {
        errors.at(ty, "a kernel returns nothing: write results to a `&mut [T]` argument");
    }
    sig.inputs.iter().filter_map(|input| argument(input, errors)).collect()
}

fn argument(input: &FnArg, errors: &mut Errors) -> Option<Argument> {
    let typed = match input {
        FnArg::Receiver(receiver) => {
            errors.at(receiver, "a kernel is a free function, without `self`: pass what it needs as arguments");
            return None;
        }
        FnArg::Typed(typed) => typed,
    };
    for attribute in &typed.attrs {
        if ["cfg", "cfg_attr"].iter().any(|name| attribute.path().is_ident(name)) {
            errors.at(attribute, "a kernel's arguments cannot be conditional: put `#[cfg]` on the whole function");
        }
    }
    let name = match &*typed.pat {
        Pat::Ident(pat) if pat.by_ref.is_none() && pat.subpat.is_none() => Some(pat.ident.clone()),
        pattern => {
            errors.at(pattern, "a kernel's argument needs a plain name: `name: T`");
            None
        }
    };
    let name = name?;
    let (kind, ty) = kind_of(&typed.ty, errors)?;
    Some(Argument { name, kind, ty })
}

fn kind_of(ty: &Type, errors: &mut Errors) -> Option<(ArgumentKind, Type)> {
    const BY_VALUE: &str = "a kernel takes slices (`&[T]`, `&mut [T]`) and values (`T`)";
    match ty {
        Type::Paren(inner) => kind_of(&inner.elem, errors),
        Type::Group(inner) => kind_of(&inner.elem, errors),
        Type::Reference(reference) => {
            if let Some(lifetime) = &reference.lifetime {
                errors.at(lifetime, "a kernel holds a slice only while it runs: remove the lifetime");
                return None;
            }
            let kind = if reference.mutability.is_some() { ArgumentKind::SliceMut } else { ArgumentKind::Slice };
            match strip(&reference.elem) {
                Type::Slice(slice) => {
                    return has_name(&slice.elem, ARGUMENT, errors).then(|| (kind, (*slice.elem).clone()));
                }
                Type::Array(array) => {
                    let elem = shown(&array.elem);
                    let mutability = reference.mutability.map_or("", |_| "mut ");
                    errors.at(ty, format!("{BY_VALUE}: write `&{mutability}[{elem}]`, a slice of any length"));
                }
                Type::Path(path) if path.path.is_ident("str") => {
                    errors.at(ty, format!("{BY_VALUE}: pass text as bytes, `&[u8]`"))
                }
                _ if reference.mutability.is_some() => {
                    errors.at(ty, format!("{BY_VALUE}: write `&mut [T]`, a slice of one element"));
                }
                _ => errors.at(ty, format!("{BY_VALUE}: pass it by value, or as a slice of one element")),
            }
            None
        }
        Type::Slice(slice) => {
            let elem = shown(&slice.elem);
            errors.at(ty, format!("{BY_VALUE}: write `&[{elem}]` or `&mut [{elem}]`"));
            None
        }
        Type::ImplTrait(_) => {
            errors.at(ty, "a kernel cannot be generic: name the type");
            None
        }
        Type::Ptr(_) => {
            errors.at(
                ty,
                format!(
                    "{BY_VALUE}: write a slice instead of a pointer; the device code gets the pointer and the length"
                ),
            );
            None
        }
        value => has_name(value, ARGUMENT, errors).then(|| (ArgumentKind::Scalar, value.clone())),
    }
}

/// Refuses the types of Rust that are known to have no equivalent in CUDA C++; the compiler finds the others.
pub(crate) fn has_name(ty: &Type, what: &str, errors: &mut Errors) -> bool {
    let name = match ty {
        Type::Paren(inner) => return has_name(&inner.elem, what, errors),
        Type::Group(inner) => return has_name(&inner.elem, what, errors),
        Type::Array(_) | Type::Tuple(_) => {
            let written = shown(ty);
            errors.at(
                ty,
                format!(
                    "`{written}` has no name in CUDA C++: make it a field of a struct with `#[derive(KernelStruct)]`"
                ),
            );
            return false;
        }
        Type::Path(path) => match path.path.segments.last() {
            Some(last) => last.ident.to_string(),
            None => return true,
        },
        _ => return true,
    };
    let instead = match name.as_str() {
        "bool" => {
            "use `u8`; device code could leave a `bool` that is neither 0 nor 1, which is undefined behaviour in Rust"
        }
        "char" => "use `u32`, and `char::from_u32` on the host",
        "i128" | "u128" => "use two 64-bit numbers",
        "String" | "OsString" | "CString" | "PathBuf" => "pass text as bytes, `&[u8]`",
        "Vec" | "Box" | "Rc" | "Arc" | "Buffer" | "Envelope" if what != ARGUMENT => {
            "pass it as a slice of the kernel's own"
        }
        "Vec" | "Box" | "Rc" | "Arc" => "pass the data as a slice, `&[T]`; on launch it is a `Buffer` or an `Envelope`",
        "Option" | "Result" => "pass the value, and a `u8` that says whether there is one",
        "Buffer" | "Envelope" => "write `&[T]` or `&mut [T]`: the launch takes a `Buffer` or an `Envelope` for it",
        _ => return true,
    };
    errors.at(ty, format!("`{name}` cannot be {what}: {instead}"));
    false
}

fn strip(ty: &Type) -> &Type {
    match ty {
        Type::Paren(inner) => strip(&inner.elem),
        Type::Group(inner) => strip(&inner.elem),
        other => other,
    }
}
