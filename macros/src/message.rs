//! `#[derive(Message)]`: what ports can carry, and where in it the envelopes are.
//!
//! Structs and enums are read as the same thing, a list of variants with their marked fields, and both methods are one
//! `match` over those. A type without a marked field needs no methods at all: the trait's own will do.

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::{Attribute, Data, DeriveInput, Fields, Generics, Ident, Index, Member, Meta, Type, parse_quote};

use crate::errors::{self, Errors};

pub(crate) fn expand(item: TokenStream) -> syn::Result<TokenStream> {
    let item: DeriveInput = syn::parse2(item)?;
    let variants = read(&item)?;
    let site = Span::mixed_site();
    let name = &item.ident;
    let marked: Vec<_> = variants.iter().flat_map(|variant| &variant.marked).map(|(_, ty)| ty).collect();
    let generics = bounded(item.generics.clone(), &marked);
    let (impl_generics, ty_generics, where_clause) = generics.split_for_impl();

    let members = (!marked.is_empty()).then(|| {
        let envelopes = arms(&variants, |fields| {
            let visits = fields.iter().map(
                |(field, ty)| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::envelopes(#field, visit);),
            );
            quote_spanned!(site=> { #(#visits)* })
        });
        let bytes = arms(&variants, |fields| {
            let bytes = fields.iter().map(
                |(field, ty)| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::size_in_bytes(#field)),
            );
            quote_spanned!(site=> { 0 #(+ #bytes)* })
        });
        let carries =
            marked.iter().map(|ty| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::CARRIES_ENVELOPES));
        quote_spanned! {site=>
            const CARRIES_ENVELOPES: bool = #(#carries)||*;

            fn envelopes(
                &mut self,
                visit: &mut dyn ::core::ops::FnMut(&mut ::wakeline::__private::RawEnvelope),
            ) {
                match self { #envelopes }
            }

            fn size_in_bytes(&self) -> usize {
                ::core::mem::size_of_val(self) + match self { #bytes }
            }
        }
    });
    Ok(quote_spanned! {site=>
        #[automatically_derived]
        impl #impl_generics ::wakeline::Message for #name #ty_generics #where_clause { #members }
    })
}

/// A variant of an enum, or a struct, with the fields that are marked.
struct Variant {
    /// `Self::Drawn`, or `Self`.
    path: TokenStream,
    marked: Vec<(Member, Type)>,
}

fn read(item: &DeriveInput) -> syn::Result<Vec<Variant>> {
    let mut errors = Errors::default();
    misplaced(&item.attrs, &mut errors);
    let mut variants = Vec::new();
    match &item.data {
        Data::Struct(data) => {
            variants.push(Variant { path: quote!(Self), marked: marked(&data.fields, &mut errors) });
        }
        Data::Enum(data) => {
            for variant in &data.variants {
                misplaced(&variant.attrs, &mut errors);
                let name = &variant.ident;
                variants.push(Variant { path: quote!(Self::#name), marked: marked(&variant.fields, &mut errors) });
            }
        }
        Data::Union(data) => {
            errors.at(data.union_token, "a union cannot be a message: nobody can tell which of its fields is there");
        }
    }
    errors.finish()?;
    Ok(variants)
}

fn marked(fields: &Fields, errors: &mut Errors) -> Vec<(Member, Type)> {
    let mut marked = Vec::new();
    for (at, field) in fields.iter().enumerate() {
        let mut seen = false;
        for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("envelope")) {
            if !matches!(attribute.meta, Meta::Path(_)) {
                errors.at(attribute, "`#[envelope]` has no options: write just that");
            } else if seen {
                errors.at(attribute, "`#[envelope]` is here twice: remove one");
            }
            seen = true;
        }
        if seen {
            let member = field.ident.clone().map_or_else(|| Member::Unnamed(Index::from(at)), Member::Named);
            marked.push((member, field.ty.clone()));
        } else {
            let ty = &field.ty;
            if mentions(quote!(#ty), &[Ident::new("Envelope", Span::call_site())]) {
                errors.at(ty, "this field holds envelopes, which no hub would find or move: mark it `#[envelope]`");
            }
        }
    }
    marked
}

fn misplaced(attributes: &[Attribute], errors: &mut Errors) {
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("envelope")) {
        errors.at(attribute, "`#[envelope]` goes on a field: the one that holds the envelopes");
    }
}

/// The bounds that make a generic type a message: as a whole it can go to another thread, and what is marked is a
/// message where that depends on a parameter.
fn bounded(mut generics: Generics, marked: &[&Type]) -> Generics {
    if generics.params.is_empty() {
        return generics;
    }
    let params: Vec<Ident> = generics.type_params().map(|param| param.ident.clone()).collect();
    let clause = generics.make_where_clause();
    clause.predicates.push(parse_quote!(Self: ::core::marker::Send + 'static));
    for ty in marked {
        if mentions(quote!(#ty), &params) {
            clause.predicates.push(parse_quote!(#ty: ::wakeline::Message));
        }
    }
    generics
}

fn mentions(tokens: TokenStream, names: &[Ident]) -> bool {
    tokens.into_iter().any(|token| match token {
        proc_macro2::TokenTree::Ident(ident) => names.contains(&ident),
        proc_macro2::TokenTree::Group(group) => mentions(group.stream(), names),
        _ => false,
    })
}

/// One arm for each variant that has marked fields, and one for all the others.
fn arms(variants: &[Variant], body: impl Fn(&[(Ident, &Type)]) -> TokenStream) -> TokenStream {
    let some = variants.iter().filter(|variant| !variant.marked.is_empty()).map(|Variant { path, marked }| {
        let members = marked.iter().map(|(member, _)| member);
        let fields: Vec<_> = marked
            .iter()
            .enumerate()
            .map(|(at, (_, ty))| (format_ident!("field_{at}", span = Span::mixed_site()), ty))
            .collect();
        let names = fields.iter().map(|(name, _)| name);
        let body = body(&fields);
        quote!(#path { #(#members: #names,)* .. } => #body)
    });
    let none = variants.iter().any(|variant| variant.marked.is_empty()).then(|| {
        let body = body(&[]);
        quote!(_ => #body)
    });
    quote!(#(#some)* #none)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::messages;

    #[test]
    fn plain_data_needs_no_methods() {
        let expanded = expand(quote!(
            struct Point {
                x: f32,
            }
        ))
        .unwrap()
        .to_string();
        let wanted = quote!(
            #[automatically_derived]
            impl ::wakeline::Message for Point {}
        );
        assert_eq!(expanded, wanted.to_string());
    }

    #[test]
    fn a_generic_message_is_bound_by_what_it_marks() {
        let item = quote!(
            struct Pair<T, U> {
                #[envelope]
                a: Envelope<T>,
                #[envelope]
                b: Frame,
                c: U,
            }
        );
        let expanded = expand(item).unwrap().to_string();
        let wanted = quote!(where Self: ::core::marker::Send + 'static, Envelope<T>: ::wakeline::Message);
        assert!(expanded.contains(&wanted.to_string()), "{expanded}");
        assert!(!expanded.contains("Frame : ::"), "{expanded}");
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let item = quote! {
            #[envelope]
            enum E {
                #[envelope]
                A(#[envelope(x)] u8),
                B { #[envelope] #[envelope] b: u8 },
            }
        };
        let messages = messages(expand(item));
        assert_eq!(messages.len(), 4, "{messages:#?}");
        assert!(messages[0].contains("goes on a field"));
        assert!(messages[1].contains("goes on a field"));
        assert!(messages[2].contains("no options"));
        assert!(messages[3].contains("twice"));
    }
}
