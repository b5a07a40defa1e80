//! The type beside a kernel's function that launches it.
//!
//! Everything but the type itself is in a `const _`, where its names cannot collide with others: the `static` that
//! describes the kernel, its entry in the list of all kernels, and the associated functions.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Attribute, Ident, ItemFn, ext::IdentExt};

use super::{
    signature::{Argument, ArgumentKind},
    source::KernelOptions,
};
use crate::{errors, message::is_number};

/// A checked kernel.
pub(super) struct Launcher<'a> {
    pub(super) function: &'a ItemFn,
    pub(super) arguments: Vec<Argument>,
    pub(super) options: KernelOptions,
}

impl Launcher<'_> {
    pub(super) fn expand(&self) -> TokenStream {
        let ItemFn { vis, sig, attrs, .. } = self.function;
        let name = &sig.ident;
        let plain = name.unraw().to_string();
        let docs = attrs.iter().filter(|attribute| is(attribute, "doc"));
        let cfgs: Vec<_> = attrs.iter().filter(|attribute| is(attribute, "cfg")).collect();
        let allows: Vec<_> = attrs.iter().filter(|attribute| is(attribute, "allow")).collect();
        let about = format!(" Launches the kernel `{plain}`: the function of the same name is its Rust body.");
        let definition = self.definition(&plain);
        let launches = self.launches();
        quote_spanned! {Span::mixed_site()=>
            #(#cfgs)*
            #(#docs)*
            #[doc = ""]
            #[doc = #about]
            #[allow(non_camel_case_types, unreachable_pub)]
            #[derive(::core::fmt::Debug)]
            #vis enum #name {}

            #(#cfgs)*
            #[allow(unreachable_pub, dead_code, clippy::undocumented_unsafe_blocks, clippy::too_many_arguments)]
            #(#allows)*
            const _: () = {
                #definition

                #[automatically_derived]
                impl #name { #launches }
            };
        }
    }

    /// The `static` that describes the kernel, and its entry in the list of all kernels.
    fn definition(&self, plain: &str) -> TokenStream {
        let name = &self.function.sig.ident;
        let site = Span::mixed_site();
        let (file, source) = match &self.options.code {
            Some(code) => {
                let file = &code.file;
                (quote!(#file), code.expand())
            }
            None => (quote!(""), quote!(::wakeline::__private::KernelSource::None)),
        };
        let pieces = self.prototype(plain);
        let types = self.arguments.iter().map(
            |Argument { ty, .. }| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::kernel::KernelType>::declare(types)),
        );
        let locals: Vec<_> = (0..self.arguments.len()).map(|at| Ident::new(&format!("argument_{at}"), site)).collect();
        let bind = self.arguments.iter().zip(&locals).enumerate().map(|(at, (argument, local))| {
            let ty = &argument.ty;
            let read = match argument.kind {
                ArgumentKind::Slice => quote_spanned!(site=> unsafe { arguments[#at].slice::<#ty>() }),
                ArgumentKind::SliceMut => quote_spanned!(site=> unsafe { arguments[#at].slice_mut::<#ty>() }),
                ArgumentKind::Scalar => quote_spanned!(site=> arguments[#at].scalar::<#ty>()),
            };
            quote_spanned!(errors::at(ty)=> let #local = #read;)
        });
        let parameters = self.arguments.iter().map(|Argument { kind, ty, .. }| match kind {
            ArgumentKind::Slice => quote_spanned!(site=> &[#ty]),
            ArgumentKind::SliceMut => quote_spanned!(site=> &mut [#ty]),
            ArgumentKind::Scalar => quote!(#ty),
        });
        // Expanded at the attribute's span, which `file!`, `line!` and the paths of the files are relative to.
        let declared = quote!(::core::concat!(::core::file!(), ":", ::core::line!()));
        quote_spanned! {site=>
            static __WAKELINE_KERNEL: ::wakeline::__private::KernelDef = ::wakeline::__private::KernelDef {
                name: #plain,
                file: #file,
                declared: #declared,
                source: #source,
                // Closures, so that an argument of a wrong type is reported once for the whole definition.
                prototype: |types: &mut ::wakeline::__private::CudaTypes| {
                    let _ = &types;
                    #(#types;)*
                    let pieces: &[&'static str] = &[#(#pieces),*];
                    pieces.concat()
                },
                // Called with the contract of `KernelDef::body`: the arguments are those of the declaration, in its
                // order. Each is read as the type that the declaration gives it, and borrowed no longer than the call.
                body: |arguments: &[::wakeline::__private::BodyArg]| {
                    let _ = arguments;
                    // A safe function with exactly these arguments, whatever attributes the function has.
                    let body: fn(#(#parameters),*) = #name;
                    #(#bind)*
                    body(#(#locals),*);
                },
                number: ::wakeline::__private::KernelNumber::new(),
            };

            ::wakeline::__private::inventory::submit! { ::wakeline::__private::Registered(&__WAKELINE_KERNEL) }
        }
    }

    /// The pieces of `void saxpy(const float *, unsigned long long, float)`: parameters need no names.
    fn prototype(&self, plain: &str) -> Vec<TokenStream> {
        let mut pieces = Vec::new();
        let mut text = format!("void {plain}(");
        for (at, Argument { kind, ty, .. }) in self.arguments.iter().enumerate() {
            text.push_str(if at == 0 { "" } else { ", " });
            text.push_str(if matches!(kind, ArgumentKind::Slice) { "const " } else { "" });
            if !text.is_empty() {
                pieces.push(std::mem::take(&mut text).to_token_stream());
            }
            pieces.push(quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::kernel::KernelType>::CUDA));
            if !matches!(kind, ArgumentKind::Scalar) {
                text.push_str(" *, unsigned long long");
            }
        }
        text.push(')');
        pieces.push(text.to_token_stream());
        pieces
    }

    /// `launch`, `launch_with` and `kernel`.
    fn launches(&self) -> TokenStream {
        let site = Span::mixed_site();
        let ItemFn { vis, sig, .. } = self.function;
        let [launch, launch_with, kernel] =
            ["launch", "launch_with", "kernel"].map(|name| Ident::new(name, errors::at(&sig.ident)));
        let names: Vec<_> = self.arguments.iter().map(|argument| &argument.name).collect();
        let parameters: Vec<_> = self
            .arguments
            .iter()
            .map(|Argument { name, kind, ty }| match kind {
                ArgumentKind::Slice => {
                    quote_spanned!(errors::at(ty)=> #name: &(impl ::wakeline::kernel::DeviceSlice<#ty> + ?Sized))
                }
                ArgumentKind::SliceMut => {
                    quote_spanned!(errors::at(ty)=> #name: &mut (impl ::wakeline::kernel::DeviceSliceMut<#ty> + ?Sized))
                }
                ArgumentKind::Scalar => quote!(#name: #ty),
            })
            .collect();
        let pass = self.arguments.iter().map(|Argument { name, kind, ty }| match kind {
            ArgumentKind::Slice => quote_spanned!(errors::at(ty)=> call.slice::<#ty, _>(#name);),
            ArgumentKind::SliceMut => quote_spanned!(errors::at(ty)=> call.slice_mut::<#ty, _>(#name);),
            ArgumentKind::Scalar if is_number(ty) => quote_spanned!(errors::at(ty)=> call.scalar::<#ty>(&#name);),
            // The definition reports a type that is none of a kernel's; here, it is not one more error.
            ArgumentKind::Scalar => quote_spanned! {errors::at(ty)=>
                (&::wakeline::__private::ScalarOf::<#ty>::NEW).pass(&mut call, &#name);
            },
        });
        let enqueue = match &self.options.over {
            Some(_) => quote_spanned!(site=> call.enqueue_over(&over)),
            None => quote_spanned!(site=> call.enqueue()),
        };
        let enqueue = match &self.options.code {
            Some(code) => quote_spanned!(code.vouched.span=> unsafe { #enqueue }),
            None => quote_spanned!(site=> unsafe { #enqueue }),
        };
        let over = self.over();
        let (derived, refused) = match &self.options.over {
            Some(_) => (
                " Enqueues the kernel on a stream, with a grid that covers its `over`, and returns at once.",
                " Those of `launch`, and a grid that the device does not support or that does not cover the kernel's `over`.",
            ),
            None => (
                " Enqueues the kernel on a stream, with a grid derived from the number of elements, and returns at once.",
                " Those of `launch`, and a grid that the device does not support.",
            ),
        };
        quote_spanned! {site=>
            #[doc = #derived]
            /// Its reads and writes are ordered with all other accesses to the same memory.
            ///
            /// # Errors
            /// Memory of another device, device code that does not load, or a device that is lost.
            #vis fn #launch(stream: &::wakeline::Stream, #(#parameters),*) -> ::wakeline::Result<()>
            {
                Self::#launch_with(
                    <::wakeline::kernel::Grid as ::core::default::Default>::default(),
                    stream,
                    #(#names),*
                )
            }

            /// The same as `launch`, with the given grid.
            ///
            /// # Errors
            #[doc = #refused]
            #vis fn #launch_with(
                grid: ::wakeline::kernel::Grid,
                stream: &::wakeline::Stream,
                #(#parameters),*
            ) -> ::wakeline::Result<()>
            {
                #[allow(unused_imports)]
                use ::wakeline::__private::{PassAny as _, PassKernelType as _};
                #over
                let mut call = ::wakeline::__private::Call::new(&__WAKELINE_KERNEL, stream, grid);
                #(#pass)*
                #enqueue
            }

            /// The kernel itself, for loading it ahead of time.
            #vis fn #kernel() -> ::wakeline::kernel::Kernel {
                ::wakeline::__private::kernel(&__WAKELINE_KERNEL)
            }
        }
    }
}

impl Launcher<'_> {
    /// `let over = ..;`: the extents, evaluated where the arguments have their names. A slice has only its length.
    fn over(&self) -> Option<TokenStream> {
        let site = Span::mixed_site();
        let extents = self.options.over.as_ref()?.expand();
        let lengths = self.arguments.iter().filter(|argument| !matches!(argument.kind, ArgumentKind::Scalar)).map(
            |Argument { name, ty, .. }| {
                quote_spanned!(errors::at(ty)=> let #name = ::wakeline::__private::SliceLength::of::<#ty, _>(&*#name);)
            },
        );
        Some(quote_spanned! {site=>
            #[allow(unused_variables)]
            let over = {
                #(#lengths)*
                #extents
            };
        })
    }
}

fn is(attribute: &Attribute, name: &str) -> bool {
    attribute.path().is_ident(name)
}

#[cfg(test)]
mod tests {
    use syn::LitStr;

    use super::*;
    use crate::{errors::Errors, kernel::signature};

    #[test]
    fn a_prototype_has_a_length_behind_each_slice() {
        let function: ItemFn = syn::parse_quote!(
            fn f(a: A, x: &[B], mut y: &mut [C], b: u8) {}
        );
        let arguments = signature::check(&function.sig, &mut Errors::default());
        let pieces = Launcher { function: &function, arguments, options: KernelOptions::default() }.prototype("f");
        let shown: String = pieces
            .iter()
            .map(|piece| match syn::parse2::<LitStr>(piece.clone()) {
                Ok(text) => text.value(),
                Err(_) => piece.to_string().chars().nth(2).unwrap().to_string(),
            })
            .collect();
        assert_eq!(shown, "void f(A, const B *, unsigned long long, C *, unsigned long long, u)");
    }
}
