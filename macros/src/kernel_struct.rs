//! `#[derive(KernelStruct)]`: a struct that kernels take, and its definition in CUDA C++.
//!
//! The definition is written at run time, from the sizes that the compiler knows, together with assertions that the C++
//! compiler gives the struct the same layout. What makes the generated `unsafe impl`s sound is checked at compile
//! time: the struct has C's layout and no padding, and each field is plain data.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::{
    Attribute, Data, DeriveInput, Expr, Fields, Ident, LitInt, Type, ext::IdentExt, parenthesized, token::Paren,
};

use crate::{
    errors::{self, Errors},
    kernel::has_name,
};

/// The keywords and alternative tokens of C++20, sorted. Those that are keywords of Rust, too, can be raw identifiers.
const KEYWORDS: [&str; 92] = [
    "alignas",
    "alignof",
    "and",
    "and_eq",
    "asm",
    "auto",
    "bitand",
    "bitor",
    "bool",
    "break",
    "case",
    "catch",
    "char",
    "char16_t",
    "char32_t",
    "char8_t",
    "class",
    "co_await",
    "co_return",
    "co_yield",
    "compl",
    "concept",
    "const",
    "const_cast",
    "consteval",
    "constexpr",
    "constinit",
    "continue",
    "decltype",
    "default",
    "delete",
    "do",
    "double",
    "dynamic_cast",
    "else",
    "enum",
    "explicit",
    "export",
    "extern",
    "false",
    "float",
    "for",
    "friend",
    "goto",
    "if",
    "inline",
    "int",
    "long",
    "mutable",
    "namespace",
    "new",
    "noexcept",
    "not",
    "not_eq",
    "nullptr",
    "operator",
    "or",
    "or_eq",
    "private",
    "protected",
    "public",
    "register",
    "reinterpret_cast",
    "requires",
    "return",
    "short",
    "signed",
    "sizeof",
    "static",
    "static_assert",
    "static_cast",
    "struct",
    "switch",
    "template",
    "this",
    "thread_local",
    "throw",
    "true",
    "try",
    "typedef",
    "typeid",
    "typename",
    "union",
    "unsigned",
    "using",
    "virtual",
    "void",
    "volatile",
    "wchar_t",
    "while",
    "xor",
    "xor_eq",
];

struct KernelField<'a> {
    name: &'a Ident,
    /// As declared.
    whole: &'a Type,
    /// The innermost element, if it is an array.
    element: &'a Type,
    /// The lengths of an array, outermost first.
    lengths: Vec<&'a Expr>,
}

pub(crate) fn expand(item: TokenStream) -> syn::Result<TokenStream> {
    let item: DeriveInput = syn::parse2(item)?;
    let mut errors = Errors::default();
    let alignment = alignment(&item, &mut errors);
    if !item.generics.params.is_empty() {
        errors.at(
            &item.generics,
            "a kernel's struct cannot be generic, since it has one definition in CUDA C++: write one for each type",
        );
    }
    check_name(&item.ident, &mut errors);
    let fields = fields(&item.data, &mut errors);
    errors.finish()?;

    let site = Span::mixed_site();
    let name = &item.ident;
    let plain = name.unraw().to_string();
    let alignment = match alignment {
        Some(bytes) => quote!(::core::option::Option::Some(#bytes)),
        None => quote!(::core::option::Option::None),
    };
    let added = fields.iter().map(|KernelField { name, element, lengths, .. }| {
        let plain = name.unraw().to_string();
        quote_spanned! {errors::at(element)=>
            fields.add::<#element>(#plain, &[#(#lengths),*]);
        }
    });
    let sizes = fields.iter().map(|KernelField { whole, .. }| quote_spanned!(site=> ::core::mem::size_of::<#whole>()));
    let padding = format!(
        "`{plain}` has padding, whose bytes would be uninitialised: order its fields from the largest to the smallest, or \
         add one such as `padding: [u8; 4]`"
    );
    let check = quote_spanned! {errors::at(name)=>
        ::core::assert!(::core::mem::size_of::<#name>() == 0_usize #(+ #sizes)*, #padding);
    };
    let derived = impls(name);
    Ok(quote_spanned! {site=>
        const _: () = {
            #check
        };

        #derived

        // SAFETY: the definition has the same fields in the same order, without padding; the C++ compiler asserts their sizes.
        #[automatically_derived]
        unsafe impl ::wakeline::kernel::KernelType for #name {
            const CUDA: &'static str = #plain;

            fn declare(types: &mut ::wakeline::__private::CudaTypes) {
                types.define::<Self>(#alignment, |fields| {
                    #(#added)*
                });
            }
        }
    })
}

/// Stands in for the code of a struct with a mistake.
pub(crate) fn stub(item: TokenStream) -> TokenStream {
    let Ok(DeriveInput { ident: name, generics, .. }) = syn::parse2(item) else { return TokenStream::new() };
    if !generics.params.is_empty() {
        return TokenStream::new();
    }
    let derived = impls(&name);
    quote_spanned! {Span::mixed_site()=>
        #derived

        // Never used, as this does not compile. A field may be neither.
        unsafe impl ::core::marker::Send for #name {}
        unsafe impl ::core::marker::Sync for #name {}

        unsafe impl ::wakeline::kernel::KernelType for #name {
            const CUDA: &'static str = "";
        }
    }
}

fn impls(name: &Ident) -> TokenStream {
    quote_spanned! {errors::at(name)=>
        // SAFETY: the struct has C's layout and no padding, and all its fields are `Pod`.
        #[automatically_derived]
        unsafe impl ::wakeline::__private::bytemuck::Zeroable for #name {}
        // SAFETY: as above.
        #[automatically_derived]
        unsafe impl ::wakeline::__private::bytemuck::Pod for #name {}
    }
}

fn fields<'a>(data: &'a Data, errors: &mut Errors) -> Vec<KernelField<'a>> {
    const NAMED: &str = "a kernel's struct needs named fields, since CUDA C++ knows them by their names: name them";
    let named = match data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) if !fields.named.is_empty() => fields,
            Fields::Named(fields) => {
                errors
                    .push(syn::Error::new(fields.brace_token.span.join(), "C++ has no structs of size 0: add a field"));
                return Vec::new();
            }
            Fields::Unnamed(fields) => {
                errors.at(fields, NAMED);
                return Vec::new();
            }
            Fields::Unit => {
                errors.at(data.struct_token, "C++ has no structs of size 0: add a field");
                return Vec::new();
            }
        },
        Data::Enum(data) => {
            errors.at(
                data.enum_token,
                "an enum cannot be given to a kernel, which could write a value that is none of its variants: use a number",
            );
            return Vec::new();
        }
        Data::Union(data) => {
            errors.at(data.union_token, NAMED);
            return Vec::new();
        }
    };
    let fields = named.named.iter().filter_map(|field| {
        let name = field.ident.as_ref()?;
        check_name(name, errors);
        let (mut element, mut lengths) = (&field.ty, Vec::new());
        loop {
            match element {
                Type::Array(array) => {
                    lengths.push(&array.len);
                    element = &array.elem;
                }
                Type::Paren(inner) => element = &inner.elem,
                Type::Group(inner) => element = &inner.elem,
                _ => break,
            }
        }
        match element {
            Type::Reference(_) | Type::Ptr(_) | Type::Slice(_) => {
                errors.at(
                    element,
                    "a kernel's struct holds only values: pass this memory to the kernel as a slice parameter",
                );
                return None;
            }
            _ if !has_name(element, "a field of a kernel's struct", errors) => return None,
            _ => {}
        }
        Some(KernelField { name, whole: &field.ty, element, lengths })
    });
    fields.collect()
}

fn check_name(name: &Ident, errors: &mut Errors) {
    let plain = name.unraw().to_string();
    if KEYWORDS.contains(&plain.as_str()) {
        errors.at(name, format!("`{plain}` is a keyword of C++: choose another name"));
    }
}

/// Reads `#[repr(C)]` or `#[repr(C, align(16))]`.
fn alignment(item: &DeriveInput, errors: &mut Errors) -> Option<LitInt> {
    const REPR: &str = "the fields of a kernel's struct have the order and the offsets of C: add `#[repr(C)]`";
    let (mut is_c, mut alignment) = (false, None);
    let reprs = item.attrs.iter().filter(|attribute: &&Attribute| attribute.path().is_ident("repr"));
    for attribute in reprs {
        let read = attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("C") {
                is_c = true;
            } else if meta.path.is_ident("align") {
                let inside;
                parenthesized!(inside in meta.input);
                alignment = Some(inside.parse::<LitInt>()?);
            } else {
                if meta.input.peek(Paren) {
                    let inside;
                    parenthesized!(inside in meta.input);
                    inside.parse::<TokenStream>()?;
                }
                return Err(syn::Error::new_spanned(
                    &meta.path,
                    "a kernel's struct has the layout of C: write `#[repr(C)]` or, to align it, `#[repr(C, align(16))]`",
                ));
            }
            Ok(())
        });
        if let Err(error) = read {
            errors.push(error);
            is_c = true;
        }
    }
    if !is_c {
        errors.at(&item.ident, REPR);
    }
    alignment
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::messages;

    #[test]
    fn an_array_is_its_element_and_its_lengths() {
        let expanded = expand(quote! {
            #[repr(C, align(16))]
            struct Camera { view: [[f32; 4]; ROWS], r#type: u32 }
        });
        let expanded = expanded.unwrap().to_string();
        for part in [
            "fields . add :: < f32 > (\"view\" , & [ROWS , 4])",
            "fields . add :: < u32 > (\"type\" , & [])",
            "types . define :: < Self > (:: core :: option :: Option :: Some (16)",
        ] {
            assert!(expanded.contains(part), "{part} in {expanded}");
        }
    }

    #[test]
    fn no_name_is_a_keyword_of_cpp() {
        assert!(KEYWORDS.is_sorted());
        for keyword in ["and_eq", "co_await", "inline", "requires", "typename", "wchar_t", "while", "xor"] {
            let name: Ident = syn::parse_str(keyword).or_else(|_| syn::parse_str(&format!("r#{keyword}"))).unwrap();
            let field = messages(expand(quote!(#[repr(C)] struct Frame { #name: u32 })));
            let itself =
                messages(expand(quote!(#[repr(C)] #[allow(non_camel_case_types)] struct #name { count: u32 })));
            assert_eq!(field, itself, "{keyword}");
            assert!(field.len() == 1 && field[0].contains("is a keyword of C++"), "{keyword}: {field:#?}");
        }
        assert!(
            expand(quote!(
                #[repr(C)]
                struct Frame {
                    crate_count: u32,
                    r#yield: u32,
                    r#move: u32,
                }
            ))
            .is_ok()
        );
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let messages = messages(expand(quote! {
            struct Frame<T> { alive: bool, next: *const u8, class: u32, name: [String; 2] }
        }));
        let wanted =
            ["`#[repr(C)]`", "generic", "`bool` cannot be a field", "holds only values", "keyword of C++", "`String`"];
        assert_eq!(messages.len(), wanted.len(), "{messages:#?}");
        for (message, wanted) in messages.iter().zip(wanted) {
            assert!(message.contains(wanted), "{message} has no {wanted}");
        }
    }
}
