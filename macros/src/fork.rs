//! The implementation of [`Fork`] by `#[derive(Message)]`: a message is forked field by field; fields that hold
//! envelopes by their own `fork`, all others by `clone`.
//!
//! Only code that sends a message to several readers needs these bounds. A message with a field that is not `Clone` is
//! still a message, so the derive must not require them. Each field's bound is therefore a `where` clause behind a
//! `for<'..>`, which keeps the compiler from checking it at the declaration.

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::{Data, DeriveInput, Fields, Generics, Index, Member, Meta, parse_quote};

use crate::errors;

/// Generates `impl Fork`, or nothing for a type whose fields cannot be borrowed.
pub(crate) fn expand(item: &DeriveInput, mut generics: Generics) -> Option<TokenStream> {
    if is_packed(item) {
        return None;
    }
    let site = Span::mixed_site();
    let variants: Vec<_> = match &item.data {
        Data::Struct(data) => vec![(quote!(Self), &data.fields)],
        Data::Enum(data) => data
            .variants
            .iter()
            .map(|variant| (&variant.ident, &variant.fields))
            .map(|(name, fields)| (quote!(Self::#name), fields))
            .collect(),
        Data::Union(_) => return None,
    };
    let clause = generics.make_where_clause();
    for field in variants.iter().flat_map(|(_, fields)| fields.iter()) {
        let ty = &field.ty;
        clause.predicates.push(if is_marked(field) {
            parse_quote!(for<'__fork> #ty: ::wakeline::Fork)
        } else {
            parse_quote!(for<'__fork> #ty: ::core::clone::Clone)
        });
    }
    let arms: Vec<_> = variants.iter().map(|(path, fields)| arm(path, fields)).collect();
    let matched = if arms.is_empty() { quote_spanned!(site=> *self) } else { quote_spanned!(site=> self) };
    let name = &item.ident;
    let (impl_generics, ty_generics, where_clause) = generics.split_for_impl();
    Some(quote_spanned! {site=>
        #[automatically_derived]
        #[allow(unreachable_code, reason = "an enum without variants")]
        impl #impl_generics ::wakeline::Fork for #name #ty_generics #where_clause {
            fn fork(&self, copier: &mut ::wakeline::hub::Copier<'_>) -> ::wakeline::Result<Self> {
                let _ = &copier;
                ::core::result::Result::Ok(match #matched { #(#arms)* })
            }
        }
    })
}

/// `Self::Drawn { 0: field_0 } => Self::Drawn { 0: Fork::fork(field_0, copier)? },`
fn arm(path: &TokenStream, fields: &Fields) -> TokenStream {
    let mut taken = Vec::new();
    let mut made = Vec::new();
    for (at, field) in fields.iter().enumerate() {
        let member = field.ident.clone().map_or_else(|| Member::Unnamed(Index::from(at)), Member::Named);
        let name = format_ident!("field_{at}", span = Span::mixed_site());
        let (ty, span) = (&field.ty, errors::at(&field.ty));
        made.push(if is_marked(field) {
            quote_spanned!(span=> #member: <#ty as ::wakeline::Fork>::fork(#name, copier)?)
        } else {
            quote_spanned!(span=> #member: <#ty as ::core::clone::Clone>::clone(#name))
        });
        taken.push(quote!(#member: #name));
    }
    quote!(#path { #(#taken),* } => #path { #(#made),* },)
}

fn is_marked(field: &syn::Field) -> bool {
    field.attrs.iter().any(|attribute| attribute.path().is_ident("envelope"))
}

pub(crate) fn is_packed(item: &DeriveInput) -> bool {
    item.attrs.iter().filter(|attribute| attribute.path().is_ident("repr")).any(|attribute| match &attribute.meta {
        Meta::List(list) => list.tokens.clone().into_iter().any(|token| token.to_string() == "packed"),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(item: DeriveInput) -> String {
        expand(&item, item.generics.clone()).map(|tokens| tokens.to_string()).unwrap_or_default()
    }

    #[test]
    fn envelopes_are_forked_and_other_fields_are_cloned() {
        let code = expanded(parse_quote!(
            struct Frame {
                number: u64,
                #[envelope]
                pixels: Envelope<u8>,
            }
        ));
        let clause = quote!(where for<'__fork> u64: ::core::clone::Clone, for<'__fork> Envelope<u8>: ::wakeline::Fork);
        assert!(code.contains(&clause.to_string()), "{code}");
    }

    #[test]
    fn packed_fields_are_not_borrowed() {
        assert_eq!(
            expanded(parse_quote!(
                #[repr(C, packed)]
                struct Point {
                    x: f32,
                }
            )),
            ""
        );
    }
}
