//! `#[derive(Ports)]`: generates a struct of handles for a struct of ports, to connect them.
//!
//! [`Declaration::read`] parses the struct and collects the errors, including those in the attributes of the fields
//! ([`options`]) and of the struct ([`groups`]); the rest only generates code. The methods of the generated `impl`
//! visit the ports in the order of the fields. Claiming is all or nothing: the calls nest, so that when one port has
//! nothing to claim, the ports before it undo their claims, the latest first.

mod groups;
mod options;
mod stub;
mod values;

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::{
    Attribute, Data, DeriveInput, Fields, GenericArgument, GenericParam, Generics, Ident, PathArguments, Type,
    Visibility, ext::IdentExt, parse_quote_spanned, punctuated::Punctuated,
};

use self::{groups::Settings, options::Options};
use crate::{
    errors::{self, Errors},
    message::is_number,
};

pub(crate) fn expand(item: TokenStream) -> syn::Result<TokenStream> {
    let declaration = Declaration::read(syn::parse2(item)?)?;
    let handles = declaration.handles();
    let ports = declaration.ports();
    let checks = declaration.checks();
    Ok(quote!(#handles #ports #checks))
}

/// Stands in for the code of a declaration with a mistake.
pub(crate) fn stub(item: TokenStream) -> TokenStream {
    syn::parse2(item).map(|item| stub::expand(&item)).unwrap_or_default()
}

struct Declaration {
    vis: Visibility,
    name: Ident,
    handles: Ident,
    hidden: bool,
    generics: Generics,
    ports: Vec<PortField>,
    settings: Settings,
}

struct PortField {
    vis: Visibility,
    name: Ident,
    ty: Type,
    /// `#[doc]` and `#[cfg]`, for the field of the handles.
    attributes: Vec<Attribute>,
    direction: Direction,
    options: Options,
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Input,
    Output,
    Produce,
    Consume,
    Peek,
    Modify,
}

impl Direction {
    fn of(attribute: &Attribute) -> Option<Self> {
        let all = [Self::Input, Self::Output, Self::Produce, Self::Consume, Self::Peek, Self::Modify];
        all.into_iter().find(|direction| attribute.path().is_ident(direction.word()))
    }

    /// For a link to a hub of chunks: the marker type of its role.
    fn role(self) -> Option<Ident> {
        let role = match self {
            Self::Input | Self::Output => return None,
            Self::Produce => "Produce",
            Self::Consume => "Consume",
            Self::Peek => "Peek",
            Self::Modify => "Modify",
        };
        Some(Ident::new(role, Span::mixed_site()))
    }

    /// The type of an input or an output.
    fn port(self) -> Option<&'static str> {
        match self {
            Self::Input => Some("Input"),
            Self::Output => Some("Output"),
            _ => None,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
            Self::Produce => "produce",
            Self::Consume => "consume",
            Self::Peek => "peek",
            Self::Modify => "modify",
        }
    }

    /// The field's kind, for messages.
    fn noun(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
            _ => "link",
        }
    }
}

impl Declaration {
    fn read(item: DeriveInput) -> syn::Result<Self> {
        let mut errors = Errors::default();
        for attribute in &item.attrs {
            if let Some(direction) = Direction::of(attribute) {
                errors.at(attribute, format!("`#[{}]` goes on a field", direction.word()));
            }
        }
        let settings = Settings::read(&item.attrs, &mut errors);
        let handles = settings.handles.clone().unwrap_or_else(|| handles_name(&item.ident));
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
        let count = fields.len();
        let ports: Vec<_> = fields.into_iter().filter_map(|field| PortField::read(field, &mut errors)).collect();
        // Checked only if every field was understood: the kind of the others is unknown.
        if ports.len() == count {
            settings.check(&ports, &mut errors);
        }
        errors.finish()?;
        Ok(Self { vis: item.vis, name: item.ident, handles, hidden, generics: item.generics, ports, settings })
    }

    /// The struct of handles, and the `impl`s that make it a plain value whatever the parameters are.
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
                let doc = format!(" The {} `{}`.", port.direction.noun(), name.unraw());
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

    /// The bounds of the generated `impl`s: those of the struct, that each field is a port, and that what it carries is
    /// a message. The compiler finds a violation without them, but reports it at each use. Behind a `for<'..>` it does
    /// not check them at the declaration: the error is reported at the field.
    fn bounded(&self) -> Generics {
        let mut generics = self.carrying_messages();
        for PortField { ty, .. } in &self.ports {
            let bound = parse_quote_spanned!(errors::at(ty)=> for<'__ports> #ty: ::wakeline::__private::Port);
            generics.make_where_clause().predicates.push(bound);
        }
        generics
    }

    /// The bounds of the struct, and that each type between the brackets of an `Input<..>` or an `Output<..>` is a
    /// message.
    fn carrying_messages(&self) -> Generics {
        let mut generics = self.generics.clone();
        // A parameter of the struct has its own bounds.
        let is_own = |ty: &&Type| {
            let is =
                |parameter: &syn::TypeParam| matches!(ty, Type::Path(path) if path.path.is_ident(&parameter.ident));
            self.generics.type_params().any(is)
        };
        for ty in self.ports.iter().filter_map(|port| message_of(&port.ty)).filter(|ty| !is_own(ty)) {
            let bound = parse_quote_spanned!(errors::at(ty)=> for<'__ports> #ty: ::wakeline::Message);
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
        let options: Vec<_> = self.ports.iter().map(|port| port.options.generate()).collect();
        let groups = self.settings.generate();
        let claim = self.ports.iter().zip(&ports).rev().fold(None, |later, (field, port)| {
            let name = &field.name;
            Some(match later {
                None => quote_spanned!(site=> #port::claim(&mut self.#name)),
                Some(later) => quote_spanned! {site=>
                    #port::claim(&mut self.#name) && (#later || {
                        #port::give_back(&mut self.#name);
                        false
                    })
                },
            })
        });
        let claim = claim.unwrap_or_else(|| quote!(true));
        // For a generic port the check can run only here, where the type is used.
        let events = if self.generics.params.is_empty() { Vec::new() } else { self.events() };
        quote_spanned! {site=>
            #[automatically_derived]
            impl #impl_generics ::wakeline::operator::Ports for #name #ty_generics #where_clause {
                type Handles = #handles #ty_generics;

                fn declare(plan: &mut ::wakeline::__private::Plan) -> Self::Handles {
                    let _ = &plan;
                    #(const { #events })*
                    let handles = #handles { #(#fields: #ports::declare(plan, #names, #options),)* };
                    #(#groups)*
                    handles
                }

                fn bind(binder: &mut ::wakeline::__private::Binder<'_>) -> ::wakeline::Result<Self> {
                    let _ = &binder;
                    ::core::result::Result::Ok(Self { #(#fields: #ports::bind(binder, #names, #options)?,)* })
                }

                fn poll_ready(&mut self, cx: &mut ::core::task::Context<'_>) -> ::wakeline::__private::Readiness {
                    let _ = &cx;
                    let ready = ::wakeline::__private::Readiness::READY;
                    #(let ready = ready | #ports::poll_ready(&mut self.#fields, ready, cx);)*
                    ready
                }

                fn claim(&mut self) -> bool {
                    #claim
                }

                fn give_back(&mut self) {
                    #(#ports::give_back(&mut self.#fields);)*
                }

                fn visit<'a>(
                    &'a mut self,
                    visit: &mut dyn ::core::ops::FnMut(&'static str, &'a mut dyn ::wakeline::__private::AnyPort),
                ) {
                    let _ = &visit;
                    #(visit(#names, &mut self.#fields);)*
                }

                fn visit_handles(handles: Self::Handles, visitor: &mut impl ::wakeline::__private::HandleVisitor) {
                    let _ = (&handles, &visitor);
                    #(#ports::visit_handle(handles.#fields, visitor);)*
                }
            }
        }
    }

    /// Checks that an `#[input]` is an input, and an `#[output]` an output: the compiler reports it at the field's
    /// type.
    fn checks(&self) -> TokenStream {
        let generics = self.carrying_messages();
        let (impl_generics, _, where_clause) = generics.split_for_impl();
        let checks = self.ports.iter().map(|port| {
            let ty = &port.ty;
            if let Some(role) = port.direction.role() {
                return quote!(is_link::<#ty, ::wakeline::hub::role::#role>(););
            }
            let check = match port.direction {
                Direction::Output => format_ident!("is_output", span = Span::mixed_site()),
                _ => format_ident!("is_input", span = Span::mixed_site()),
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
                    fn is_link<T: ::wakeline::__private::LinkPort<R>, R>() {}
                    #(#checks)*
                }
            };
            #(const _: () = { #events };)*
        }
    }

    /// Checks that the messages of each input have the event that it waits for.
    fn events(&self) -> Vec<TokenStream> {
        let inputs = self.ports.iter().filter(|port| port.direction == Direction::Input);
        let waits = inputs.filter_map(|port| port.options.event().map(|event| (port, event)));
        waits
            .map(|(PortField { ty, .. }, event)| {
                let message = format!(
                    "no message of this port carries an event `{0}`: mark a field of it `#[event(\"{0}\")]`",
                    event.value()
                );
                let events = quote_spanned!(errors::at(ty)=> <#ty as ::wakeline::__private::InputPort>::EVENTS);
                quote_spanned! {event.span()=>
                    ::core::assert!(::wakeline::__private::knows_event(#events, #event), #message);
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
                    errors.at(attribute, format!("`#[{}]` is given twice: remove one", direction.word()));
                }
                Some(_) => {
                    errors.at(attribute, "a field is one port: remove one of the attributes, or make two fields")
                }
            }
        }
        let Some((direction, attribute)) = found else {
            errors.at(
                &name,
                format!(
                    "`{name}` is not marked as a port: add `#[input]` or `#[output]`; or, for a hub of chunks, \
                     `#[produce]`, `#[consume]`, `#[peek]` or `#[modify]`"
                ),
            );
            return None;
        };
        if let Some(port) = direction.port()
            && is_no_port(&field.ty)
        {
            let ty = errors::shown(&field.ty);
            let wraps_a_port = ["<Input<", "<Inputs<", "<Output<"].iter().any(|port| ty.contains(port));
            let instead = if wraps_a_port {
                format!("remove what wraps it, and mark a port that may stay empty `#[{}(optional)]`", direction.word())
            } else {
                format!("write `{port}<{ty}>`, a port for messages of this type")
            };
            errors.at(&field.ty, format!("`{ty}` is not a port: {instead}"));
            return None;
        }
        let options = Options::read(direction, attribute, errors);
        let attributes = field
            .attrs
            .into_iter()
            .filter(|attribute| attribute.path().is_ident("doc") || attribute.path().is_ident("cfg"))
            .collect();
        Some(Self { vis: field.vis, name, ty: field.ty, attributes, direction, options })
    }
}

/// Whether it is known to be no port: a number, or another type of that name. An alias of a port may have any other name.
fn is_no_port(ty: &Type) -> bool {
    const NAMES: [&str; 9] = ["Vec", "Option", "String", "Box", "Arc", "Rc", "Envelope", "Buffer", "Host"];
    match ty {
        Type::Reference(_) | Type::Tuple(_) | Type::Array(_) | Type::Slice(_) | Type::Ptr(_) => true,
        Type::Path(path) => {
            is_number(ty) || path.path.segments.last().is_some_and(|last| NAMES.iter().any(|name| last.ident == name))
        }
        _ => false,
    }
}

/// The `M` of an `Input<M>`, an `Inputs<M>` or an `Output<M>`.
fn message_of(port: &Type) -> Option<&Type> {
    let Type::Path(path) = port else { return None };
    let last =
        path.path.segments.last().filter(|last| ["Input", "Inputs", "Output"].iter().any(|port| last.ident == port))?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match arguments.args.first() {
        Some(GenericArgument::Type(message)) => Some(message),
        _ => None,
    }
}

/// `UpperPorts` has `UpperHandles`.
fn handles_name(item: &Ident) -> Ident {
    let name = item.unraw().to_string();
    Ident::new(&format!("{}Handles", name.strip_suffix("Ports").unwrap_or(&name)), item.span())
}

fn is_doc_hidden(attribute: &Attribute) -> bool {
    attribute.path().is_ident("doc") && attribute.parse_args::<Ident>().is_ok_and(|word| word == "hidden")
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
    fn a_failed_claim_undoes_the_claims_before_it() {
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
                        <A as ::wakeline::__private::Port>::give_back(&mut self.a);
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
                #[output(done)] f: Output<u32>,
                #[input(done = true, capacity, event = 3)] g: Input<u32>,
            }
        };
        let messages = messages(expand(item));
        assert_eq!(messages.len(), 11, "{messages:#?}");
        assert!(messages[0].contains("cannot borrow"));
        assert!(messages[1].contains("add `#[input]` or `#[output]`"));
        assert!(messages[2].contains("one port"));
        assert_eq!(messages[3], "a queue with capacity 0 holds nothing: use at least 1");
        assert_eq!(
            messages[4],
            "there is no option `size`: those of `#[input]` are `capacity`, `at_least`, `at_most`, `batch`, `within`, \
             `since`, `optional`, `done`, `event`"
        );
        assert!(messages[5].contains("belongs to an output"));
        assert!(messages[6].contains("twice"));
        assert!(messages[7].contains("belongs to an input"));
        assert!(messages[8].contains("takes no value"));
        assert!(messages[9].contains("needs a value"));
        assert!(messages[10].contains("named by a string"));
    }
}
