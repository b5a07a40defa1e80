//! What a declaration with a mistake expands to, besides its error: the struct of handles, and an `impl Ports` that is
//! never called. So the operator that has these ports, and the flow that connects them, cause no errors of their own.

use proc_macro2::{Group, Ident, Spacing, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Data, DeriveInput, Fields, GenericParam, PathArguments, Type};

use super::{groups::Settings, handles_name};
use crate::errors::{self, Errors};

const PORTS: [&str; 7] = ["Input", "Inputs", "Output", "Produce", "Consume", "Peek", "Modify"];

pub(super) fn expand(item: &DeriveInput) -> TokenStream {
    let site = Span::mixed_site();
    let (vis, name) = (&item.vis, &item.ident);
    let given = Settings::read(&item.attrs, &mut Errors::default()).handles;
    let handles = given.unwrap_or_else(|| handles_name(name));
    // Ports cannot borrow, and a lifetime was reported.
    let ty = {
        let (_, ty_generics, _) = item.generics.split_for_impl();
        with_static_lifetimes(quote!(#name #ty_generics))
    };
    let is_lifetime = |param: &GenericParam| matches!(param, GenericParam::Lifetime(_));
    let borrows = item.generics.params.iter().any(is_lifetime);
    let mut generics = item.generics.clone();
    generics.params = generics.params.into_iter().filter(|param| !is_lifetime(param)).collect();
    if borrows {
        generics.where_clause = None;
    }
    let (impl_generics, ty_generics, where_clause) = generics.split_for_impl();
    let params = generics.type_params().map(|param| &param.ident);
    let fields = match &item.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => fields.named.iter().collect(),
            _ => Vec::new(),
        },
        _ => Vec::new(),
    };
    let fields = fields.into_iter().filter(|field| is_port(&field.ty)).map(|field| {
        let (vis, name) = (&field.vis, &field.ident);
        let ty = with_static_lifetimes(field.ty.to_token_stream());
        let cfgs = field.attrs.iter().filter(|attribute| attribute.path().is_ident("cfg"));
        let ty = quote_spanned!(errors::at(&field.ty)=> <#ty as ::wakeline::__private::Port>::Handle);
        quote!(#(#cfgs)* #vis #name: #ty)
    });
    quote_spanned! {site=>
        #[allow(dead_code)]
        #vis struct #handles #generics #where_clause {
            #(#fields,)*
            __ports: ::core::marker::PhantomData<fn() -> (#(#params,)*)>,
        }

        impl #impl_generics ::core::clone::Clone for #handles #ty_generics #where_clause {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl #impl_generics ::core::marker::Copy for #handles #ty_generics #where_clause {}

        impl #impl_generics ::wakeline::operator::Ports for #ty #where_clause {
            type Handles = #handles #ty_generics;

            fn declare(_: &mut ::wakeline::__private::Plan) -> Self::Handles {
                ::core::unreachable!()
            }

            fn bind(_: &mut ::wakeline::__private::Binder<'_>) -> ::wakeline::Result<Self> {
                ::core::unreachable!()
            }

            fn poll_ready(&mut self, _: &mut ::core::task::Context<'_>) -> ::wakeline::__private::Readiness {
                ::core::unreachable!()
            }

            fn claim(&mut self) -> bool {
                ::core::unreachable!()
            }

            fn give_back(&mut self) {}

            fn visit<'a>(
                &'a mut self,
                _: &mut dyn ::core::ops::FnMut(&'static str, &'a mut dyn ::wakeline::__private::AnyPort),
            ) {
            }

            fn visit_handles(_: Self::Handles, _: &mut impl ::wakeline::__private::HandleVisitor) {}
        }
    }
}

fn is_port(ty: &Type) -> bool {
    let Type::Path(path) = ty else { return false };
    path.path.segments.last().is_some_and(|last| {
        matches!(last.arguments, PathArguments::AngleBracketed(_)) && PORTS.iter().any(|port| last.ident == port)
    })
}

fn with_static_lifetimes(tokens: TokenStream) -> TokenStream {
    let mut is_lifetime = false;
    let replaced = tokens.into_iter().map(|token| {
        let named = std::mem::replace(
            &mut is_lifetime,
            matches!(&token, TokenTree::Punct(punct) if punct.as_char() == '\'' && punct.spacing() == Spacing::Joint),
        );
        match token {
            TokenTree::Ident(ident) if named => Ident::new("static", ident.span()).into(),
            TokenTree::Group(group) => {
                let mut inner = Group::new(group.delimiter(), with_static_lifetimes(group.stream()));
                inner.set_span(group.span());
                inner.into()
            }
            token => token,
        }
    });
    replaced.collect()
}
