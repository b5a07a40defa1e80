//! `#[derive(Ports)]`: a struct of ports, and beside it a struct of handles to connect them.
//!
//! [`Declaration::read`] takes the struct apart and collects the mistakes; the rest only generates. The methods of the
//! generated `impl` go through the ports in the order of the fields. Claiming is all or nothing: it nests, so that the
//! first port that has nothing to give makes those before it give back what they gave, the latest first.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::{
    Attribute, Data, DeriveInput, Expr, ExprLit, Fields, GenericParam, Generics, Ident, Lit, LitStr, Meta, Token, Type,
    Visibility,
    ext::IdentExt,
    parse::{Parse, ParseStream},
    parse_quote_spanned,
    punctuated::Punctuated,
};

use crate::errors::{self, Errors};

/// An option that a port may have.
struct Known {
    name: &'static str,
    input: bool,
    output: bool,
    /// `capacity = 4`, or just `done`.
    has_value: bool,
}

/// All of them, in the order in which they are generated.
const OPTIONS: [Known; 7] = [
    Known { name: "capacity", input: true, output: true, has_value: true },
    Known { name: "envelope_bytes", input: false, output: true, has_value: true },
    Known { name: "envelopes", input: false, output: true, has_value: true },
    Known { name: "room", input: false, output: true, has_value: true },
    Known { name: "unconditional", input: false, output: true, has_value: false },
    Known { name: "done", input: true, output: false, has_value: false },
    Known { name: "event", input: true, output: false, has_value: true },
];

impl Known {
    fn find(name: &Ident) -> Option<&'static Self> {
        OPTIONS.iter().find(|known| name == known.name)
    }

    fn suits(&self, direction: Direction) -> bool {
        match direction {
            Direction::Input => self.input,
            Direction::Output => self.output,
        }
    }
}

pub(crate) fn expand(item: TokenStream) -> syn::Result<TokenStream> {
    let declaration = Declaration::read(syn::parse2(item)?)?;
    let handles = declaration.handles();
    let ports = declaration.ports();
    let checks = declaration.checks();
    Ok(quote!(#handles #ports #checks))
}

/// What `#[derive(Ports)]` stands on.
struct Declaration {
    vis: Visibility,
    name: Ident,
    handles: Ident,
    hidden: bool,
    generics: Generics,
    ports: Vec<PortField>,
}

/// One field of it.
struct PortField {
    vis: Visibility,
    name: Ident,
    ty: Type,
    /// `#[doc]` and `#[cfg]`, for the field of the handles.
    attributes: Vec<Attribute>,
    direction: Direction,
    options: Vec<PortOption>,
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Input,
    Output,
}

impl Direction {
    fn of(attribute: &Attribute) -> Option<Self> {
        let path = attribute.path();
        if path.is_ident("input") {
            Some(Self::Input)
        } else if path.is_ident("output") {
            Some(Self::Output)
        } else {
            None
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
        }
    }
}

/// `capacity = 4`, `done`
struct PortOption {
    name: Ident,
    value: Option<Expr>,
}

impl Parse for PortOption {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let name = input.call(Ident::parse_any)?;
        let value = match input.parse::<Option<Token![=]>>()? {
            Some(_) => Some(input.parse()?),
            None => None,
        };
        Ok(Self { name, value })
    }
}

impl Declaration {
    fn read(item: DeriveInput) -> syn::Result<Self> {
        let mut errors = Errors::default();
        let handles = handles_name(&item, &mut errors);
        let hidden = item.attrs.iter().any(is_doc_hidden);
        for param in &item.generics.params {
            if let GenericParam::Lifetime(lifetime) = param {
                errors.at(
                    lifetime,
                    "ports cannot borrow: they belong to a task, which may outlive what they borrow; remove the \
                     lifetime and let the messages own their data",
                );
            }
        }
        let fields = match item.data {
            Data::Struct(data) => match data.fields {
                Fields::Named(fields) => fields.named,
                Fields::Unit => Punctuated::new(),
                Fields::Unnamed(fields) => {
                    errors.at(
                        fields,
                        "ports need names, to connect them by: write a struct with named fields, \
                         `{ #[input] lines: Input<..> }`",
                    );
                    Punctuated::new()
                }
            },
            Data::Enum(data) => {
                errors.at(data.enum_token, "only a struct can declare ports: one named field for each port");
                Punctuated::new()
            }
            Data::Union(data) => {
                errors.at(data.union_token, "only a struct can declare ports: one named field for each port");
                Punctuated::new()
            }
        };
        let ports = fields.into_iter().filter_map(|field| PortField::read(field, &mut errors)).collect();
        errors.finish()?;
        Ok(Self { vis: item.vis, name: item.ident, handles, hidden, generics: item.generics, ports })
    }

    /// The struct of handles, and what makes it a plain value whatever the parameters are.
    fn handles(&self) -> TokenStream {
        let Self { vis, handles, generics, .. } = self;
        let doc = format!(" The ports of [`{}`], to connect them.", self.name.unraw());
        let hidden = self.hidden.then(|| quote!(#[doc(hidden)]));
        let bounded = self.bounded();
        let where_clause = &generics.where_clause;
        let (impl_generics, ty_generics, bounds) = bounded.split_for_impl();
        let fields = self.ports.iter().map(|port| {
            let PortField { vis, name, attributes, ty, .. } = port;
            let undocumented = !attributes.iter().any(|attribute| attribute.path().is_ident("doc"));
            let doc = undocumented.then(|| {
                let doc = format!(" The {} `{}`.", port.direction.word(), name.unraw());
                quote!(#[doc = #doc])
            });
            let ty = quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::__private::Port>::Handle);
            quote!(#(#attributes)* #doc #vis #name: #ty)
        });
        let shown = handles.unraw().to_string();
        quote_spanned! {Span::mixed_site()=>
            #[doc = #doc]
            #hidden
            #[allow(dead_code)]
            #vis struct #handles #generics #where_clause {
                #(#fields,)*
            }

            #[automatically_derived]
            impl #impl_generics ::core::clone::Clone for #handles #ty_generics #bounds {
                #[inline]
                fn clone(&self) -> Self {
                    *self
                }
            }

            #[automatically_derived]
            impl #impl_generics ::core::marker::Copy for #handles #ty_generics #bounds {}

            #[automatically_derived]
            impl #impl_generics ::core::fmt::Debug for #handles #ty_generics #bounds {
                fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                    ::core::fmt::DebugStruct::finish_non_exhaustive(&mut ::core::fmt::Formatter::debug_struct(f, #shown))
                }
            }
        }
    }

    /// The bounds of the generated `impl`s: those of the struct, and that each field is a port. The compiler would know
    /// that; but where it is not so, this is the one place that says it, instead of each use in turn.
    fn bounded(&self) -> Generics {
        let mut generics = self.generics.clone();
        for PortField { ty, .. } in &self.ports {
            let bound = parse_quote_spanned!(errors::at(ty)=> #ty: ::wakeline::__private::Port);
            generics.make_where_clause().predicates.push(bound);
        }
        generics
    }

    /// `impl Ports`.
    fn ports(&self) -> TokenStream {
        let site = Span::mixed_site();
        let Self { name, handles, .. } = self;
        let bounded = self.bounded();
        let (impl_generics, ty_generics, where_clause) = bounded.split_for_impl();
        let fields: Vec<_> = self.ports.iter().map(|port| &port.name).collect();
        let names: Vec<_> = fields.iter().map(|field| field.unraw().to_string()).collect();
        let ports: Vec<_> = self
            .ports
            .iter()
            .map(|PortField { ty, .. }| quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::__private::Port>))
            .collect();
        let options: Vec<_> = self.ports.iter().map(PortField::options).collect();
        let claim = self.ports.iter().zip(&ports).rev().fold(None, |later, (field, port)| {
            let name = &field.name;
            Some(match later {
                None => quote_spanned!(site=> #port::claim(&mut self.#name)),
                Some(later) => quote_spanned! {site=>
                    #port::claim(&mut self.#name) && (#later || {
                        #port::unclaim(&mut self.#name);
                        false
                    })
                },
            })
        });
        let claim = claim.unwrap_or_else(|| quote!(true));
        // Of a generic port it shows only here, where it is used.
        let events = if self.generics.params.is_empty() { Vec::new() } else { self.events() };
        quote_spanned! {site=>
            #[automatically_derived]
            impl #impl_generics ::wakeline::operator::Ports for #name #ty_generics #where_clause {
                type Handles = #handles #ty_generics;

                fn declare(plan: &mut ::wakeline::__private::Plan) -> Self::Handles {
                    let _ = &plan;
                    #(const { #events })*
                    #handles { #(#fields: #ports::declare(plan, #names, #options),)* }
                }

                fn bind(binder: &mut ::wakeline::__private::Binder<'_>) -> ::wakeline::Result<Self> {
                    let _ = &binder;
                    ::core::result::Result::Ok(Self { #(#fields: #ports::bind(binder, #names, #options)?,)* })
                }

                fn poll_ready(&mut self, cx: &mut ::core::task::Context<'_>) -> ::wakeline::__private::Readiness {
                    let _ = &cx;
                    let ready = ::wakeline::__private::Readiness::READY;
                    #(let ready = if ::wakeline::__private::Readiness::is_ready(ready) {
                        #ports::poll_ready(&mut self.#fields, cx)
                    } else {
                        ready | #ports::look(&mut self.#fields, cx)
                    };)*
                    ready
                }

                fn claim(&mut self) -> bool {
                    #claim
                }

                fn unclaim(&mut self) {
                    #(#ports::unclaim(&mut self.#fields);)*
                }

                fn visit(
                    &mut self,
                    visit: &mut dyn ::core::ops::FnMut(&'static str, &mut dyn ::wakeline::__private::AnyPort),
                ) {
                    let _ = &visit;
                    #(visit(#names, &mut self.#fields);)*
                }
            }
        }
    }

    /// That an `#[input]` is an input, and an `#[output]` an output: the compiler says so at the field's type.
    fn checks(&self) -> TokenStream {
        let (impl_generics, _, where_clause) = self.generics.split_for_impl();
        let checks = self.ports.iter().map(|port| {
            let ty = &port.ty;
            let check = match port.direction {
                Direction::Input => format_ident!("is_input", span = Span::mixed_site()),
                Direction::Output => format_ident!("is_output", span = Span::mixed_site()),
            };
            quote!(#check::<#ty>();)
        });
        let events = if self.generics.params.is_empty() { self.events() } else { Vec::new() };
        quote_spanned! {Span::mixed_site()=>
            const _: () = {
                #[allow(dead_code)]
                fn check #impl_generics () #where_clause {
                    fn is_input<T: ::wakeline::__private::InputPort>() {}
                    fn is_output<T: ::wakeline::__private::OutputPort>() {}
                    #(#checks)*
                }
            };
            #(const _: () = { #events };)*
        }
    }

    /// That the messages of each input know the event that it waits for.
    fn events(&self) -> Vec<TokenStream> {
        let inputs = self.ports.iter().filter(|port| port.direction == Direction::Input);
        let waits = inputs.filter_map(|port| port.event().map(|event| (port, event)));
        waits
            .map(|(PortField { ty, .. }, event)| {
                let told = format!(
                    "no message of this port carries an event `{0}`: mark a field of it `#[event(\"{0}\")]`",
                    event.value()
                );
                let events = quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::__private::InputPort>::EVENTS);
                quote_spanned! {event.span()=>
                    ::core::assert!(::wakeline::__private::knows_event(#events, #event), #told);
                }
            })
            .collect()
    }
}

impl PortField {
    fn read(field: syn::Field, errors: &mut Errors) -> Option<Self> {
        let name = field.ident?;
        let mut found: Option<(Direction, &Attribute)> = None;
        for attribute in &field.attrs {
            if attribute.path().is_ident("ports") {
                errors.at(attribute, "`#[ports(..)]` goes on the struct; a field has `#[input]` or `#[output]`");
            }
            let Some(direction) = Direction::of(attribute) else { continue };
            match found {
                None => found = Some((direction, attribute)),
                Some((first, _)) if first == direction => {
                    errors.at(attribute, format!("`#[{}]` is here twice: remove one", direction.word()));
                }
                Some(_) => errors.at(
                    attribute,
                    "a port is an input or an output, not both: remove one of the attributes, or make two fields",
                ),
            }
        }
        let Some((direction, attribute)) = found else {
            errors.at(&name, format!("is `{name}` an input or an output? Mark it `#[input]` or `#[output]`"));
            return None;
        };
        let options = PortOption::read_all(direction, attribute, errors);
        let attributes = field
            .attrs
            .into_iter()
            .filter(|attribute| attribute.path().is_ident("doc") || attribute.path().is_ident("cfg"))
            .collect();
        Some(Self { vis: field.vis, name, ty: field.ty, attributes, direction, options })
    }

    /// The name of the event that it waits for.
    fn event(&self) -> Option<&LitStr> {
        let event = self.options.iter().find(|option| option.name == "event")?;
        match &event.value {
            Some(Expr::Lit(ExprLit { lit: Lit::Str(name), .. })) => Some(name),
            _ => None,
        }
    }

    /// `PortOptions::new().capacity(4)`
    fn options(&self) -> TokenStream {
        let site = Span::mixed_site();
        let mut built = quote_spanned!(site=> ::wakeline::__private::PortOptions::new());
        for Known { name: known, .. } in OPTIONS {
            for PortOption { value, .. } in self.options.iter().filter(|option| option.name == known) {
                let known = Ident::new(known, site);
                built = quote_spanned!(site=> #built.#known(#value));
            }
        }
        built
    }
}

impl PortOption {
    fn read_all(direction: Direction, attribute: &Attribute, errors: &mut Errors) -> Vec<Self> {
        let list = match &attribute.meta {
            Meta::Path(_) => return Vec::new(),
            Meta::List(list) => list,
            Meta::NameValue(_) => {
                errors.at(
                    attribute,
                    format!("write `#[{0}]`, or options in brackets: `#[{0}(capacity = 4)]`", direction.word()),
                );
                return Vec::new();
            }
        };
        let parsed = list.parse_args_with(Punctuated::<Self, Token![,]>::parse_terminated);
        let options: Vec<Self> = errors.keep(parsed).into_iter().flatten().collect();
        for (at, option) in options.iter().enumerate() {
            option.check(direction, &options[..at], errors);
        }
        options
    }

    fn check(&self, direction: Direction, before: &[Self], errors: &mut Errors) {
        let Self { name, value } = self;
        let word = direction.word();
        let Some(known) = Known::find(name) else {
            let known: Vec<_> = OPTIONS
                .iter()
                .filter(|known| known.suits(direction))
                .map(|known| format!("`{}`", known.name))
                .collect();
            errors.at(name, format!("there is no option `{name}`: those of `#[{word}]` are {}", known.join(", ")));
            return;
        };
        if !known.suits(direction) {
            let whose = match direction {
                Direction::Input if name == "room" || name == "unconditional" => {
                    "belongs to an output: it is what the writer waits for"
                }
                Direction::Input => {
                    "belongs to an output: whoever sends envelopes says how large and how many they are"
                }
                Direction::Output => "belongs to an input: it is what the reader waits for",
            };
            errors.at(name, format!("`{name}` {whose}"));
        } else if before.iter().any(|option| option.name == *name) {
            errors.at(name, format!("`{name}` is here twice: remove one"));
        } else if name == "unconditional" && before.iter().any(|option| option.name == "room")
            || name == "room" && before.iter().any(|option| option.name == "unconditional")
        {
            errors.at(name, "an output waits for `room`, or it is `unconditional`: remove one");
        }
        match value {
            None if known.has_value => errors.at(name, format!("this option has a value: `{name} = ..`")),
            Some(value) if !known.has_value => {
                errors.at(value, format!("`{name}` has no value: write just `#[{word}({name})]`"));
            }
            Some(value) if name == "capacity" && is_zero(value) => {
                errors.at(value, "a queue of 0 can hold nothing: at least 1");
            }
            Some(value) if name == "room" && is_zero(value) => {
                errors.at(value, "room for 0 messages is always there: write `unconditional`");
            }
            Some(value) if name == "event" && !is_string(value) => {
                errors.at(value, "an event is named by a string: `event = \"decoded\"`");
            }
            _ => {}
        }
    }
}

/// `UpperPorts` has `UpperHandles`, unless `#[ports(handles = ..)]` says otherwise.
fn handles_name(item: &DeriveInput, errors: &mut Errors) -> Ident {
    let mut chosen: Option<Ident> = None;
    for attribute in &item.attrs {
        if let Some(direction) = Direction::of(attribute) {
            errors.at(attribute, format!("`#[{}]` goes on a field", direction.word()));
        }
        if !attribute.path().is_ident("ports") {
            continue;
        }
        let parsed = attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("handles") {
                let path = meta.path.to_token_stream();
                return Err(meta.error(format!("there is no option `{path}`: the only one of `#[ports]` is `handles`")));
            }
            let name: Ident = meta.value()?.parse()?;
            if chosen.replace(name).is_some() {
                return Err(meta.error("`handles` is here twice: remove one"));
            }
            Ok(())
        });
        errors.keep(parsed);
    }
    chosen.unwrap_or_else(|| {
        let name = item.ident.unraw().to_string();
        Ident::new(&format!("{}Handles", name.strip_suffix("Ports").unwrap_or(&name)), item.ident.span())
    })
}

fn is_doc_hidden(attribute: &Attribute) -> bool {
    attribute.path().is_ident("doc") && attribute.parse_args::<Ident>().is_ok_and(|word| word == "hidden")
}

fn is_zero(value: &Expr) -> bool {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => number.base10_digits() == "0",
        Expr::Paren(inner) => is_zero(&inner.expr),
        Expr::Group(inner) => is_zero(&inner.expr),
        _ => false,
    }
}

fn is_string(value: &Expr) -> bool {
    matches!(value, Expr::Lit(ExprLit { lit: Lit::Str(_), .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::messages;

    fn handles_of(item: TokenStream) -> String {
        let file: syn::File = syn::parse2(expand(item).unwrap()).unwrap();
        let Some(syn::Item::Struct(handles)) = file.items.first() else { panic!("no struct first") };
        handles.ident.to_string()
    }

    #[test]
    fn handles_are_named_after_the_struct() {
        assert_eq!(
            handles_of(quote!(
                struct UpperPorts {
                    #[input]
                    a: Input<u32>,
                }
            )),
            "UpperHandles"
        );
        assert_eq!(
            handles_of(quote!(
                struct Foo {
                    #[output]
                    a: Output<u32>,
                }
            )),
            "FooHandles"
        );
        assert_eq!(
            handles_of(quote!(
                struct Ports;
            )),
            "Handles"
        );
        assert_eq!(
            handles_of(quote!(
                #[ports(handles = Other)]
                struct Foo {}
            )),
            "Other"
        );
    }

    #[test]
    fn a_failed_claim_gives_back_what_came_before() {
        let item = quote!(
            struct P {
                #[input]
                a: A,
                #[input]
                b: B,
            }
        );
        let expanded = expand(item).unwrap().to_string();
        let wanted = quote! {
            fn claim(&mut self) -> bool {
                <A as ::wakeline::__private::Port>::claim(&mut self.a)
                    && (<B as ::wakeline::__private::Port>::claim(&mut self.b) || {
                        <A as ::wakeline::__private::Port>::unclaim(&mut self.a);
                        false
                    })
            }
        };
        assert!(expanded.contains(&wanted.to_string()), "{expanded}");
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let item = quote! {
            struct P<'a> {
                a: Input<u32>,
                #[input] #[output] b: Input<u32>,
                #[input(capacity = 0, size = 3)] c: Input<u32>,
                #[input(envelopes = 2)] d: Input<u32>,
                #[output(capacity = 1, capacity = 2)] e: Output<u32>,
                #[output(done, room = 0, unconditional)] f: Output<u32>,
                #[input(done = true, capacity, event = 3)] g: Input<u32>,
            }
        };
        let messages = messages(expand(item));
        assert_eq!(messages.len(), 13, "{messages:#?}");
        assert!(messages[0].contains("cannot borrow"));
        assert!(messages[1].contains("Mark it `#[input]` or `#[output]`"));
        assert!(messages[2].contains("not both"));
        assert_eq!(messages[3], "a queue of 0 can hold nothing: at least 1");
        assert_eq!(messages[4], "there is no option `size`: those of `#[input]` are `capacity`, `done`, `event`");
        assert!(messages[5].contains("belongs to an output"));
        assert!(messages[6].contains("twice"));
        assert!(messages[7].contains("belongs to an input"));
        assert!(messages[8].contains("room for 0"));
        assert!(messages[9].contains("or it is `unconditional`"));
        assert!(messages[10].contains("has no value"));
        assert!(messages[11].contains("has a value"));
        assert!(messages[12].contains("named by a string"));
    }

    #[test]
    fn zero_is_zero_however_it_is_written() {
        for zero in ["0", "0usize", "0x0_0", "(0)"] {
            assert!(is_zero(&syn::parse_str(zero).unwrap()), "{zero}");
        }
        for other in ["1", "1 << 20", "N", "10"] {
            assert!(!is_zero(&syn::parse_str(other).unwrap()), "{other}");
        }
    }
}
