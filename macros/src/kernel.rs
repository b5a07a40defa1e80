//! `#[kernel(..)]`: a function that is a kernel's Rust body, and a type of the same name that launches it.
//!
//! The function is in the value namespace and the type in the type namespace, so that `saxpy(..)` runs the body on the
//! host and `saxpy::launch(..)` enqueues it, wherever the kernel is declared and however it is imported. `source.rs`
//! and `over.rs` read the attribute, `signature.rs` the function, and `launcher.rs` generates the type.
//!
//! Why launching is safe: the launches, the prototype for the device code and the call of the Rust body are all
//! generated from one list of arguments, in its order. The compiler cannot check that the device code matches; the
//! author asserts it with the `unsafe` of the attribute, and that very token marks the generated block. So
//! `unsafe_code` lints report it at the place where the user wrote it.

mod launcher;
mod over;
mod signature;
mod source;

pub(crate) use self::signature::has_name;
use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{FnArg, ItemFn, PatType, Type};

use self::{launcher::Launcher, source::KernelOptions};
use crate::errors::Errors;

pub(crate) fn expand_or_report(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand(attribute, item.clone()).unwrap_or_else(|error| {
        let (mut tokens, stub) = (error.into_compile_error(), stub(&item));
        tokens.extend(kept(item));
        tokens.extend(stub);
        tokens
    })
}

fn expand(attribute: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let mut errors = Errors::default();
    let options = errors.keep(syn::parse2::<KernelOptions>(attribute)).unwrap_or_default();
    let function = read_function(item.clone());
    if let Some(function) = errors.keep(function) {
        let arguments = signature::check(&function.sig, &mut errors);
        errors.finish()?;
        let launcher = Launcher { function: &function, arguments, options }.expand();
        // The function is emitted as it was written, token for token: parsed and printed, it might differ.
        return Ok(quote!(#item #launcher));
    }
    Err(errors.finish().expect_err("a function that could not be read"))
}

/// The part of the item that is emitted if the macro fails. A function is kept, so that its callers do not fail as
/// well, but not one that the compiler would reject for the reason already reported.
fn kept(item: TokenStream) -> TokenStream {
    let refused = match read_function(item.clone()) {
        Ok(function) => function.sig.receiver().is_some(),
        Err(_) => {
            syn::parse2::<syn::Item>(item.clone()).is_err() || syn::parse2::<syn::ForeignItemFn>(item.clone()).is_ok()
        }
    };
    if refused { TokenStream::new() } else { item }
}

/// The type that launches a kernel with a mistake: its functions take any arguments, as many as the kernel.
fn stub(item: &TokenStream) -> TokenStream {
    let Ok(function) = read_function(item.clone()) else { return TokenStream::new() };
    let ItemFn { vis, sig, attrs, .. } = &function;
    if sig.receiver().is_some() {
        // Within an `impl`, where no type can be declared.
        return TokenStream::new();
    }
    let name = &sig.ident;
    let cfgs: Vec<_> = attrs.iter().filter(|attribute| attribute.path().is_ident("cfg")).collect();
    let types: Vec<_> = (0..sig.inputs.len()).map(|at| format_ident!("Argument{at}")).collect();
    // References, so that a mutable one is borrowed again and not moved.
    let arguments: Vec<_> = sig
        .inputs
        .iter()
        .zip(&types)
        .map(|(input, ty)| match input {
            FnArg::Typed(PatType { ty: of, .. }) => match &**of {
                Type::Reference(reference) if reference.mutability.is_some() => quote!(&mut #ty),
                Type::Reference(_) => quote!(&#ty),
                _ => quote!(#ty),
            },
            FnArg::Receiver(_) => quote!(#ty),
        })
        .collect();
    quote! {
        #(#cfgs)*
        #[allow(non_camel_case_types, unreachable_pub, dead_code)]
        #vis enum #name {}

        #(#cfgs)*
        #[allow(unreachable_pub, dead_code, clippy::too_many_arguments)]
        const _: () = {
            impl #name {
                #vis fn launch<#(#types),*>(_: &::wakeline::Stream, #(_: #arguments),*) -> ::wakeline::Result<()> {
                    ::core::unreachable!()
                }

                #vis fn launch_with<#(#types),*>(
                    _: ::wakeline::kernel::Grid,
                    _: &::wakeline::Stream,
                    #(_: #arguments),*
                ) -> ::wakeline::Result<()> {
                    ::core::unreachable!()
                }

                #vis fn kernel() -> ::wakeline::kernel::Kernel {
                    ::core::unreachable!()
                }
            }
        };
    }
}

fn read_function(item: TokenStream) -> syn::Result<ItemFn> {
    if let Ok(bodiless) = syn::parse2::<syn::ForeignItemFn>(item.clone()) {
        return Err(syn::Error::new_spanned(
            bodiless.semi_token,
            "a kernel needs a Rust body, which the emulated device runs and which tests can compare with",
        ));
    }
    if let Ok(other) = syn::parse2::<syn::Item>(item.clone())
        && !matches!(other, syn::Item::Fn(_))
    {
        return Err(syn::Error::new_spanned(
            other,
            "`#[kernel]` goes on a function: `fn name(x: &[f32], y: &mut [f32])`",
        ));
    }
    syn::parse2(item)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::messages;

    fn expanded(attribute: TokenStream, item: TokenStream) -> String {
        let tokens = expand(attribute, item).unwrap();
        syn::parse2::<syn::File>(tokens.clone()).unwrap();
        tokens.to_string()
    }

    #[test]
    fn device_code_needs_unsafe() {
        let messages = messages(expand(
            quote!(cuda = "a.cu"),
            quote!(
                fn f() {}
            ),
        ));
        assert_eq!(messages.len(), 1);
        assert!(messages[0].contains("write `unsafe(cuda = \"a.cu\")`"), "{}", messages[0]);
    }

    #[test]
    fn each_source_is_read() {
        for (attribute, wanted) in [
            (quote!(unsafe(cuda = "a.cu")), "Cuda (:: core :: include_str ! (\"a.cu\"))"),
            (
                quote!(unsafe(ptx = concat!("a", ".ptx"))),
                "Ptx (:: core :: include_str ! (concat ! (\"a\" , \".ptx\")))",
            ),
            (quote!(unsafe(cubin = "a.cubin")), "Cubin (:: core :: include_bytes ! (\"a.cubin\"))"),
            (quote!(), "Source :: None"),
        ] {
            let expanded = expanded(
                attribute,
                quote!(
                    fn f(x: &mut [u8]) {}
                ),
            );
            assert!(expanded.contains(wanted), "{expanded}");
        }
    }

    #[test]
    fn bad_sources_are_refused() {
        for (attribute, wanted) in [
            (quote!(unsafe), "comes from one file"),
            (quote!(unsafe()), "comes from one file"),
            (quote!(unsafe(spirv = "a")), "there is no source `spirv`"),
            (quote!(unsafe(cuda)), "name the file"),
            (quote!(unsafe(cuda = "")), "empty"),
            (quote!(unsafe(cuda = 3)), "known to the compiler"),
            (quote!(unsafe(cuda = "a", ptx = "b")), "only one source is allowed"),
            (quote!(unsafe(cuda = "a"), unsafe(ptx = "b")), "only one source is allowed"),
            (quote!(file = "a"), "there is no option `file`"),
        ] {
            let messages = messages(expand(
                attribute,
                quote!(
                    fn f() {}
                ),
            ));
            assert!(messages.len() == 1 && messages[0].contains(wanted), "{messages:?}");
        }
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let item = quote! {
            async unsafe extern "C" fn f<T>(
                &self, text: &str, array: &[f32; 4], one: &mut f32, any: impl Copy, raw: *const u8, whole: [u8],
                kept: &'static [u8], _: u8, #[cfg(x)] maybe: u8, fine: &[f32]
            ) -> u32 { 0 }
        };
        let messages = messages(expand(quote!(), item));
        let wanted = [
            "`async`",
            "`unsafe`",
            "`extern`",
            "generic",
            "nothing",
            "`self`",
            "`&[u8]`",
            "`&[f32]`",
            "`&mut [T]`",
            "name the type",
            "pointer",
            "`&[u8]`",
            "lifetime",
            "plain name",
            "cannot be conditional",
        ];
        assert_eq!(messages.len(), wanted.len(), "{messages:#?}");
        for (message, wanted) in messages.iter().zip(wanted) {
            assert!(message.contains(wanted), "{message} has no {wanted}");
        }
    }

    #[test]
    fn only_functions_with_bodies() {
        assert!(
            messages(expand(
                quote!(),
                quote!(
                    struct S;
                )
            ))[0]
                .contains("goes on a function")
        );
        assert!(
            messages(expand(
                quote!(),
                quote!(
                    fn f();
                )
            ))[0]
                .contains("needs a Rust body")
        );
    }
}
