//! `#[derive(Message)]`: makes a type a message, and finds the envelopes in it.
//!
//! Structs and enums are read as a list of variants with their marked fields, and each method is one `match` over
//! those. Where no field is marked, the trait's default method is used. `fork.rs` generates `Fork`.

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::{
    Attribute, Data, DeriveInput, Field, Fields, GenericArgument, Generics, Ident, Index, LitStr, Member, Meta,
    PathArguments, Type, ext::IdentExt, parse_quote,
};

use crate::errors::{self, Errors};

pub(crate) fn expand(item: TokenStream) -> syn::Result<TokenStream> {
    let item: DeriveInput = syn::parse2(item)?;
    let mut errors = Errors::default();
    let mut variants = read(&item, &mut errors);
    errors.finish()?;
    if crate::fork::is_packed(&item) {
        // The fields of a packed struct cannot be borrowed.
        variants.iter_mut().for_each(|variant| variant.others.clear());
    }
    let site = Span::mixed_site();
    let name = &item.ident;
    let marked: Vec<_> = variants.iter().flat_map(|variant| &variant.envelopes).map(|(_, ty)| ty).collect();
    let generics = bounded(item.generics.clone(), &marked);
    let (impl_generics, ty_generics, where_clause) = generics.split_for_impl();

    let members = (!marked.is_empty()).then(|| {
        let envelopes = arms(
            &variants,
            |variant| variant.envelopes.clone(),
            |fields| {
                let visits = fields.iter().map(
                |(field, ty)| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::envelopes(#field, visit);),
            );
                quote_spanned!(site=> { #(#visits)* })
            },
        );
        let locked =
            marked.iter().map(|ty| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::VISITS_UNDER_LOCK));
        let carries =
            marked.iter().map(|ty| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::CARRIES_ENVELOPES));
        let element =
            marked.iter().map(|ty| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::ELEMENT_BYTES));
        let counts = variants.iter().map(|variant| {
            let each = variant
                .envelopes
                .iter()
                .map(|(_, ty)| quote_spanned!(errors::at(ty)=> .and(<#ty as ::wakeline::Message>::ENVELOPES)));
            quote_spanned!(site=> ::wakeline::__private::EnvelopeCount::NONE #(#each)*)
        });
        let (first, others) = {
            let mut counts = counts;
            (counts.next(), counts.collect::<Vec<_>>())
        };
        quote_spanned! {site=>
            const CARRIES_ENVELOPES: bool = #(#carries)||*;
            const ELEMENT_BYTES: usize = {
                let bytes = 1;
                #(let bytes = ::wakeline::__private::larger_element(bytes, #element);)*
                bytes
            };
            const ENVELOPES: ::wakeline::__private::EnvelopeCount = #first #(.or(#others))*;
            const VISITS_UNDER_LOCK: bool = #(#locked)&&*;

            fn envelopes(
                &mut self,
                visit: &mut dyn ::core::ops::FnMut(&mut ::wakeline::__private::RawEnvelope),
            ) {
                match self { #envelopes }
            }
        }
    });
    let size = size(&variants);
    let events = events(&variants);
    let fork = crate::fork::expand(&item, generics.clone());
    let carries = carries(name, &generics, &marked);
    Ok(quote_spanned! {site=>
        #[automatically_derived]
        impl #impl_generics ::wakeline::Message for #name #ty_generics #where_clause { #members #size #events }

        #carries

        #fork
    })
}

/// `impl Carries<T>`, for those `T` of which the marked fields hold envelopes if all do so of one type; for several, for
/// every `T`, since there can be only one implementation.
fn carries(name: &Ident, generics: &Generics, marked: &[&Type]) -> Option<TokenStream> {
    let site = Span::mixed_site();
    let first = list_element(marked.first()?);
    let elements: Vec<_> = marked.iter().map(|ty| list_element(ty)).collect();
    let are_one = elements.iter().all(|one| elements.iter().all(|other| is_same(one, other)));
    let (_, ty_generics, _) = generics.split_for_impl();
    let mut generics = generics.clone();
    let element = Ident::new("__Element", site);
    generics.params.push(parse_quote!(#element: ::wakeline::memory::Plain));
    if are_one {
        let bound = quote_spanned!(errors::at(first)=> ::wakeline::hub::Carries<#element>);
        generics.make_where_clause().predicates.push(parse_quote!(#first: #bound));
    }
    let (impl_generics, _, where_clause) = generics.split_for_impl();
    Some(quote_spanned! {site=>
        #[automatically_derived]
        impl #impl_generics ::wakeline::hub::Carries<#element> for #name #ty_generics #where_clause {}
    })
}

/// The messages in a list, an option or a box: `Envelope<u8>` of `Vec<Option<Envelope<u8>>>`.
fn list_element(ty: &Type) -> &Type {
    match ty {
        Type::Array(array) => list_element(&array.elem),
        Type::Paren(inner) => list_element(&inner.elem),
        Type::Group(inner) => list_element(&inner.elem),
        Type::Path(path) if path.qself.is_none() => {
            let Some(last) = path.path.segments.last() else { return ty };
            let PathArguments::AngleBracketed(arguments) = &last.arguments else { return ty };
            match arguments.args.first() {
                Some(GenericArgument::Type(element))
                    if arguments.args.len() == 1 && ["Vec", "Option", "Box"].iter().any(|list| last.ident == list) =>
                {
                    list_element(element)
                }
                _ => ty,
            }
        }
        _ => ty,
    }
}

/// Whether two types are the same as far as their text shows, which may spell a path in several ways: `Envelope<u8>`,
/// `wakeline::Envelope<u8>` and `wakeline::hub::Envelope<u8>` are one type, as are `Pixel` and `image::Pixel`, but not
/// `image::Pixel` and `font::Pixel`.
fn is_same(one: &Type, other: &Type) -> bool {
    match (one, other) {
        (Type::Paren(inner), _) => is_same(&inner.elem, other),
        (Type::Group(inner), _) => is_same(&inner.elem, other),
        (_, Type::Paren(_) | Type::Group(_)) => is_same(other, one),
        (Type::Array(one), Type::Array(other)) => one.len == other.len && is_same(&one.elem, &other.elem),
        (Type::Path(one), Type::Path(other)) if one.qself.is_none() && other.qself.is_none() => {
            let (mut one, mut other) = (one.path.segments.iter().rev(), other.path.segments.iter().rev());
            let (Some(last), Some(other_last)) = (one.next(), other.next()) else { return false };
            let is_path_same = last.ident == "Envelope" || one.zip(other).all(|(one, other)| one == other);
            last.ident == other_last.ident && is_path_same && have_same(&last.arguments, &other_last.arguments)
        }
        _ => one == other,
    }
}

fn have_same(ones: &PathArguments, others: &PathArguments) -> bool {
    let (PathArguments::AngleBracketed(ones), PathArguments::AngleBracketed(others)) = (ones, others) else {
        return ones == others;
    };
    let are_same = |(one, other): (&GenericArgument, &GenericArgument)| match (one, other) {
        (GenericArgument::Type(one), GenericArgument::Type(other)) => is_same(one, other),
        _ => one == other,
    };
    ones.args.len() == others.args.len() && ones.args.iter().zip(&others.args).all(are_same)
}

/// Stands in for the code of a type with a mistake: a message with the events that could be read.
pub(crate) fn stub(item: TokenStream) -> TokenStream {
    let Ok(item) = syn::parse2::<DeriveInput>(item) else { return TokenStream::new() };
    let name = &item.ident;
    let variants = read(&item, &mut Errors::default());
    let marked: Vec<_> = variants.iter().flat_map(|variant| &variant.envelopes).map(|(_, ty)| ty).collect();
    let events = variants.iter().flat_map(|variant| &variant.events).map(|event| &event.name);
    let generics = bounded(item.generics.clone(), &[]);
    let (impl_generics, ty_generics, where_clause) = generics.split_for_impl();
    let carries = carries(name, &generics, &marked);
    quote_spanned! {Span::mixed_site()=>
        impl #impl_generics ::wakeline::Message for #name #ty_generics #where_clause {
            const EVENTS: &'static [&'static str] = &[#(#events),*];
        }

        #carries

        impl #impl_generics ::wakeline::Fork for #name #ty_generics #where_clause {
            fn fork(&self, _: &mut ::wakeline::hub::Copier<'_>) -> ::wakeline::Result<Self> {
                ::core::unreachable!()
            }
        }
    }
}

/// The size on the stack, the sizes of the marked fields, and the heap data of the other fields.
fn size(variants: &[Variant]) -> Option<TokenStream> {
    let site = Span::mixed_site();
    let sum = |chosen: fn(&Variant) -> &Vec<(Member, Type)>, of_field: &dyn Fn(&Ident, &Type) -> TokenStream| {
        variants.iter().any(|variant| !chosen(variant).is_empty()).then(|| {
            let arms = arms(
                variants,
                |variant| chosen(variant).clone(),
                |fields| {
                    let bytes = fields.iter().map(|(field, ty)| of_field(field, ty));
                    quote_spanned!(site=> { 0_usize #(.saturating_add(#bytes))* })
                },
            );
            quote_spanned!(site=> .saturating_add(match self { #arms }))
        })
    };
    let marked = sum(
        |variant| &variant.envelopes,
        &|field, ty| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::size_in_bytes(#field)),
    );
    let others = sum(
        |variant| &variant.others,
        &|field, ty| quote_spanned!(errors::at(ty)=> (&::wakeline::__private::HeapSize(#field)).heap_bytes()),
    );
    if marked.is_none() && others.is_none() {
        return None;
    }
    let traits = others.is_some().then(|| {
        quote_spanned! {site=>
            #[allow(unused_imports)]
            use ::wakeline::__private::{OfAnything as _, OfContainer as _};
        }
    });
    Some(quote_spanned! {site=>
        fn size_in_bytes(&self) -> usize {
            #traits
            ::core::mem::size_of_val(self) #marked #others
        }
    })
}

/// The names of all events, its own and those of nested messages, and the method that visits those of one name.
fn events(variants: &[Variant]) -> Option<TokenStream> {
    let site = Span::mixed_site();
    let marked: Vec<_> = variants.iter().flat_map(|variant| &variant.envelopes).map(|(_, ty)| ty).collect();
    let mut names: Vec<&LitStr> = Vec::new();
    for event in variants.iter().flat_map(|variant| &variant.events) {
        if !names.iter().any(|name| name.value() == event.name.value()) {
            names.push(&event.name);
        }
    }
    if names.is_empty() && marked.is_empty() {
        return None;
    }
    let within = (!marked.is_empty()).then(|| {
        let arms = arms(
            variants,
            |variant| variant.envelopes.clone(),
            |fields| {
                let shown = fields.iter().map(|(field, ty)| {
                    quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::events(#field, name, visit);)
                });
                quote_spanned!(site=> { #(#shown)* })
            },
        );
        quote_spanned!(site=> match self { #arms })
    });
    let of_marked = marked.iter().map(|ty| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::Message>::EVENTS));
    let all = if marked.is_empty() {
        quote_spanned!(site=> &[#(#names),*])
    } else {
        quote_spanned!(site=> const {
            &::wakeline::__private::EventNames::of_all(&[&[#(#names),*], #(#of_marked),*])
        }.get())
    };
    let arms = names.iter().map(|name| {
        let of_this_name = |variant: &Variant| {
            let events = variant.events.iter().filter(|event| event.name.value() == name.value());
            events.map(|event| (event.member.clone(), event.ty.clone())).collect::<Vec<_>>()
        };
        let arms = arms(variants, of_this_name, |fields| {
            let shown = fields.iter().map(|(field, ty)| {
                quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::__private::EventField>::show(#field, visit);)
            });
            quote_spanned!(site=> { #(#shown)* })
        });
        quote_spanned!(site=> #name => match self { #arms },)
    });
    let own = (!names.is_empty()).then(|| {
        quote_spanned! {site=>
            match name {
                #(#arms)*
                _ => {}
            }
        }
    });
    Some(quote_spanned! {site=>
        const EVENTS: &'static [&'static str] = #all;

        fn events(
            &mut self,
            name: &::core::primitive::str,
            visit: &mut dyn ::core::ops::FnMut(&mut ::wakeline::stream::Ticket),
        ) {
            #own
            #within
        }
    })
}

struct Variant {
    /// `Self::Drawn`, or `Self`.
    path: TokenStream,
    envelopes: Vec<(Member, Type)>,
    events: Vec<Event>,
    /// Fields that are not marked and may have heap data.
    others: Vec<(Member, Type)>,
}

struct Event {
    member: Member,
    ty: Type,
    name: LitStr,
}

impl Variant {
    fn read(path: TokenStream, fields: &Fields, errors: &mut Errors) -> Self {
        let mut variant = Self { path, envelopes: Vec::new(), events: Vec::new(), others: Vec::new() };
        for (at, field) in fields.iter().enumerate() {
            let member = || field.ident.clone().map_or_else(|| Member::Unnamed(Index::from(at)), Member::Named);
            let is_envelope = is_envelope(field, errors);
            if let Some(name) = event_name(field, errors) {
                if is_envelope {
                    errors.at(field, "a field holds envelopes or is an event, not both: remove one of the attributes");
                }
                if variant.events.iter().any(|event| event.name.value() == name.value()) {
                    errors.at(&name, format!("there are two events `{}`: give each its own name", name.value()));
                }
                variant.events.push(Event { member: member(), ty: field.ty.clone(), name });
            } else if is_envelope {
                variant.envelopes.push((member(), field.ty.clone()));
            } else if !is_number(&field.ty) {
                variant.others.push((member(), field.ty.clone()));
            }
        }
        variant
    }
}

fn read(item: &DeriveInput, errors: &mut Errors) -> Vec<Variant> {
    misplaced(&item.attrs, errors);
    let mut variants = Vec::new();
    match &item.data {
        Data::Struct(data) => {
            variants.push(Variant::read(quote!(Self), &data.fields, errors));
        }
        Data::Enum(data) => {
            for variant in &data.variants {
                misplaced(&variant.attrs, errors);
                let name = &variant.ident;
                variants.push(Variant::read(quote!(Self::#name), &variant.fields, errors));
            }
        }
        Data::Union(data) => {
            errors.at(data.union_token, "a union cannot be a message: it is unknown which of its fields is valid");
        }
    }
    variants
}

/// A number, a `char` or a `bool`, or an array of them: it has no heap data.
pub(crate) fn is_number(ty: &Type) -> bool {
    const NUMBERS: [&str; 16] = [
        "bool", "char", "f32", "f64", "i8", "i16", "i32", "i64", "i128", "isize", "u8", "u16", "u32", "u64", "u128",
        "usize",
    ];
    match ty {
        Type::Array(array) => is_number(&array.elem),
        Type::Path(path) => path.path.get_ident().is_some_and(|name| NUMBERS.iter().any(|number| name == number)),
        _ => false,
    }
}

fn is_envelope(field: &Field, errors: &mut Errors) -> bool {
    let mut seen = false;
    for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("envelope")) {
        if !matches!(attribute.meta, Meta::Path(_)) {
            errors.at(attribute, "`#[envelope]` takes no options");
        } else if seen {
            errors.at(attribute, "`#[envelope]` is given twice: remove one");
        }
        seen = true;
    }
    let ty = &field.ty;
    if !seen && mentions(quote!(#ty), &[Ident::new("Envelope", Span::call_site())]) {
        errors.at(ty, "this field holds envelopes, which no hub would find or move: mark it `#[envelope]`");
    }
    seen
}

/// `#[event]`: the field's own name; `#[event("scaled")]`: that name.
fn event_name(field: &Field, errors: &mut Errors) -> Option<LitStr> {
    let mut attributes = field.attrs.iter().filter(|attribute| attribute.path().is_ident("event"));
    let attribute = attributes.next()?;
    for again in attributes {
        errors.at(again, "`#[event]` is given twice: remove one");
    }
    match (&attribute.meta, &field.ident) {
        (Meta::Path(_), Some(name)) => Some(LitStr::new(&name.unraw().to_string(), name.span())),
        (Meta::Path(_), None) => {
            errors.at(attribute, "this event needs a name, as its field has none: `#[event(\"decoded\")]`");
            None
        }
        _ => match attribute.parse_args::<LitStr>() {
            Ok(name) => Some(name),
            Err(_) => {
                errors.at(attribute, "write `#[event]`, or the event's name in brackets: `#[event(\"decoded\")]`");
                None
            }
        },
    }
}

fn misplaced(attributes: &[Attribute], errors: &mut Errors) {
    for attribute in attributes {
        if attribute.path().is_ident("envelope") {
            errors.at(attribute, "`#[envelope]` goes on a field: the one that holds the envelopes");
        } else if attribute.path().is_ident("event") {
            errors.at(attribute, "`#[event]` goes on a field: the one that holds the `Event`");
        }
    }
}

/// The bounds that make a generic type a message: the whole can be sent to another thread, and each marked field is a
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

/// One arm for each variant that has such fields, and one for all others.
fn arms<F: AsRef<[(Member, Type)]>>(
    variants: &[Variant],
    chosen: impl Fn(&'_ Variant) -> F,
    body: impl Fn(&[(Ident, &Type)]) -> TokenStream,
) -> TokenStream {
    let mut arms = TokenStream::new();
    let mut others = false;
    for variant in variants {
        let chosen = chosen(variant);
        let chosen = chosen.as_ref();
        if chosen.is_empty() {
            others = true;
            continue;
        }
        let path = &variant.path;
        let members = chosen.iter().map(|(member, _)| member);
        let fields: Vec<_> = chosen
            .iter()
            .enumerate()
            .map(|(at, (_, ty))| (format_ident!("field_{at}", span = Span::mixed_site()), ty))
            .collect();
        let names = fields.iter().map(|(name, _)| name);
        let body = body(&fields);
        arms.extend(quote!(#path { #(#members: #names,)* .. } => #body));
    }
    if others {
        let body = body(&[]);
        arms.extend(quote!(_ => #body));
    }
    arms
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
        assert!(expanded.starts_with(&wanted.to_string()), "{expanded}");
    }

    #[test]
    fn what_may_be_on_the_heap_is_counted_where_fields_can_be_borrowed() {
        let counts = |item| expand(item).unwrap().to_string().contains("heap_bytes");
        assert!(counts(quote! { struct Line { text: String } }));
        assert!(counts(quote! { enum Line { None, Some(u8, Vec<u8>) } }));
        assert!(!counts(quote! { struct Point([f32; 3], bool); }));
        assert!(!counts(quote! { #[repr(C, packed)] struct Line(u8, Text); }));
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
        assert!(!expanded.contains("Frame : :: wakeline :: Message"), "{expanded}");
    }

    #[test]
    fn paths_of_one_type_may_be_spelled_in_several_ways() {
        let one_type = |first: TokenStream, second: TokenStream| {
            let item = quote!(struct Pair { #[envelope] first: #first, #[envelope] second: #second });
            expand(item).unwrap().to_string().contains(": :: wakeline :: hub :: Carries < __Element >")
        };
        assert!(one_type(quote!(Envelope<u8>), quote!(wakeline::Envelope<u8>)));
        assert!(one_type(quote!(wakeline::hub::Envelope<u8>), quote!(Vec<::wakeline::Envelope<u8>>)));
        assert!(one_type(quote!(Envelope<image::Pixel>), quote!(Envelope<Pixel>)));
        assert!(one_type(quote!(Envelope<[Pixel; 3]>), quote!(wakeline::Envelope<[image::Pixel; 3]>)));
        assert!(one_type(quote!(Frame<T>), quote!(crate::Frame<T>)));
        assert!(!one_type(quote!(Envelope<u8>), quote!(wakeline::Envelope<u16>)));
        assert!(!one_type(quote!(Envelope<font::Pixel>), quote!(Envelope<image::Pixel>)));
        assert!(!one_type(quote!(Envelope<[u8; 3]>), quote!(Envelope<[u8; 4]>)));
        assert!(!one_type(quote!(font::Frame), quote!(image::Frame)));
    }

    #[test]
    fn an_event_has_its_fields_name_or_another() {
        let item = quote!(
            enum Step {
                One {
                    #[event]
                    decoded: Ticket,
                    #[event("scaled")]
                    other: Ticket,
                },
                Two(#[event("decoded")] Ticket),
                Three,
            }
        );
        let expanded = expand(item).unwrap().to_string();
        let wanted = quote!(
            const EVENTS: &'static [&'static str] = &["decoded", "scaled"];
        );
        assert!(expanded.contains(&wanted.to_string()), "{expanded}");
        assert!(!expanded.contains("CARRIES_ENVELOPES"), "{expanded}");
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let item = quote! {
            #[envelope]
            enum E {
                #[envelope]
                A(#[envelope(x)] u8),
                B { #[envelope] #[envelope] b: u8 },
                #[event]
                C(#[event] Ticket, #[event("a")] #[event] Ticket, #[event("a")] Ticket, #[event(a)] Ticket),
                D(#[event("d")] #[envelope] Ticket),
            }
        };
        let mut messages = messages(expand(item));
        let events = messages.split_off(4);
        assert_eq!(events.len(), 6, "{events:#?}");
        assert!(events[0].contains("goes on a field"));
        assert!(events[1].contains("needs a name"));
        assert!(events[2].contains("twice"));
        assert!(events[3].contains("two events `a`"));
        assert!(events[4].contains("in brackets"));
        assert!(events[5].contains("not both"));
        assert_eq!(messages.len(), 4, "{messages:#?}");
        assert!(messages[0].contains("goes on a field"));
        assert!(messages[1].contains("goes on a field"));
        assert!(messages[2].contains("no options"));
        assert!(messages[3].contains("twice"));
    }
}
