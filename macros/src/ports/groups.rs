//! The contents of `#[ports(..)]` on the struct: another name for the handles, and conditions over several inputs.
//!
//! ```text
//!   #[ports(handles = Name)]
//!   #[ports(sum(left, right) = 3)]
//!   #[ports(each(left = 2, right = 1), or_after = "10ms")]
//! ```
//!
//! There may be any number of attributes, each with at most one condition, so that it is clear which condition an
//! `or_after` belongs to. Each attribute is first read by itself ([`Settings::read`]) and then, once the fields are
//! known, checked against them ([`Settings::check`]).

use proc_macro2::{Span, TokenStream};
use quote::quote_spanned;
use syn::{
    Attribute, Expr, Ident, Token,
    ext::IdentExt,
    parenthesized,
    parse::{Parse, ParseStream},
    punctuated::Punctuated,
    token::Paren,
};

use super::{
    Direction, PortField,
    values::{duration, number},
};
use crate::errors::{self, Errors};

#[derive(Default)]
pub(super) struct Settings {
    pub(super) handles: Option<Ident>,
    groups: Vec<Group>,
}

struct Group {
    /// `sum` or `each`.
    word: Ident,
    members: Vec<Member>,
    /// The number of messages of all members together.
    sum: Option<Expr>,
    or_after: Option<Expr>,
}

/// `left`, `left = 2`
struct Member {
    port: Ident,
    count: Option<Expr>,
}

/// `handles = Name`, `sum(left, right) = 3`, `or_after = "10ms"`
struct Entry {
    word: Ident,
    members: Option<Vec<Member>>,
    value: Option<Expr>,
}

impl Parse for Member {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        Ok(Self { port: input.call(Ident::parse_any)?, count: value(input)? })
    }
}

impl Parse for Entry {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let word = input.call(Ident::parse_any)?;
        let members = if input.peek(Paren) {
            let inside;
            parenthesized!(inside in input);
            Some(Punctuated::<Member, Token![,]>::parse_terminated(&inside)?.into_iter().collect())
        } else {
            None
        };
        Ok(Self { word, members, value: value(input)? })
    }
}

/// `= 3`
fn value(input: ParseStream<'_>) -> syn::Result<Option<Expr>> {
    match input.parse::<Option<Token![=]>>()? {
        Some(_) => input.parse().map(Some),
        None => Ok(None),
    }
}

impl Settings {
    pub(super) fn read(attributes: &[Attribute], errors: &mut Errors) -> Self {
        let mut settings = Self::default();
        for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("ports")) {
            let parsed = attribute.parse_args_with(Punctuated::<Entry, Token![,]>::parse_terminated);
            if let Some(entries) = errors.keep(parsed) {
                settings.add(entries, errors);
            }
        }
        settings
    }

    fn add(&mut self, entries: impl IntoIterator<Item = Entry>, errors: &mut Errors) {
        let mut group: Option<Group> = None;
        let mut or_after: Option<(Ident, Expr)> = None;
        for entry in entries {
            let word = entry.word.clone();
            if word == "handles" {
                match entry.ident() {
                    None => errors.at(&word, "`handles` needs a name: `handles = Name`"),
                    Some(_) if self.handles.is_some() => errors.at(&word, "`handles` is given twice: remove one"),
                    name => self.handles = name,
                }
            } else if word == "sum" || word == "each" {
                let read = Group::read(entry, errors);
                if group.is_some() {
                    errors.at(&word, "only one condition in each `#[ports(..)]`: move this one to another");
                } else {
                    group = read;
                }
            } else if word == "or_after" {
                match entry {
                    Entry { members: None, value: Some(_), .. } if or_after.is_some() => {
                        errors.at(&word, "`or_after` is given twice: remove one");
                    }
                    Entry { members: None, value: Some(value), .. } => {
                        or_after = errors.keep(duration(&value)).map(|span| (word, span));
                    }
                    _ => errors.at(&word, "`or_after` needs a duration: `or_after = \"10ms\"`"),
                }
            } else {
                errors.at(
                    &word,
                    format!(
                        "there is no option `{word}`: those of `#[ports]` are `handles`, `sum`, `each`, `or_after`"
                    ),
                );
            }
        }
        match (&mut group, or_after) {
            (Some(group), Some((_, span))) => group.or_after = Some(span),
            (None, Some((word, _))) => errors
                .at(&word, "`or_after` goes with a condition: `#[ports(sum(left, right) = 3, or_after = \"10ms\")]`"),
            (_, None) => {}
        }
        self.groups.extend(group);
    }

    /// Checks that the ports exist, and wait for nothing else.
    pub(super) fn check(&self, ports: &[PortField], errors: &mut Errors) {
        for Group { word, members, .. } in &self.groups {
            for (at, Member { port: name, .. }) in members.iter().enumerate() {
                let Some(port) = ports.iter().find(|port| port.name.unraw() == name.unraw()) else {
                    let inputs = ports.iter().filter(|port| port.direction == Direction::Input);
                    let inputs: Vec<_> = inputs.map(|port| format!("`{}`", port.name)).collect();
                    let inputs = if inputs.is_empty() { "none".into() } else { inputs.join(", ") };
                    errors.at(name, format!("there is no port `{name}`: the inputs are {inputs}"));
                    continue;
                };
                if port.direction.role().is_some() {
                    errors.at(
                        name,
                        format!("`{name}` is linked to a hub of chunks: `{word}` waits for messages at inputs"),
                    );
                } else if port.direction == Direction::Output {
                    errors.at(name, format!("`{name}` is an output: `{word}` waits for messages at inputs"));
                } else if members[..at].iter().any(|other| other.port.unraw() == name.unraw()) {
                    errors.at(name, format!("`{name}` is given twice: remove one"));
                }
            }
        }
        let grouped = |port: &&PortField| {
            let groups = self.groups.iter().filter(|group| group.has(&port.name));
            groups.map(|group| &group.word).next()
        };
        for port in ports.iter().filter(|port| port.direction == Direction::Input) {
            let Some(word) = grouped(&port) else { continue };
            for option in port.options.waits() {
                errors.at(
                    option,
                    format!("`{}` is in `{word}(..)`, which sets what to wait for: remove `{option}`", port.name),
                );
            }
        }
    }

    /// The calls on the plan in `declare`, where the ports' handles are in scope.
    pub(super) fn generate(&self) -> impl Iterator<Item = TokenStream> {
        self.groups.iter().map(Group::generate)
    }
}

impl Entry {
    /// The identifier that is its value.
    fn ident(&self) -> Option<Ident> {
        match (&self.members, &self.value) {
            (None, Some(Expr::Path(path))) => path.path.get_ident().cloned(),
            _ => None,
        }
    }
}

impl Group {
    fn read(Entry { word, members, value }: Entry, errors: &mut Errors) -> Option<Self> {
        let is_sum = word == "sum";
        let example = if is_sum { "sum(left, right) = 3" } else { "each(left = 2, right = 1)" };
        let members = members.unwrap_or_default();
        if members.is_empty() {
            errors.at(&word, format!("`{word}` needs inputs: `{example}`"));
            return None;
        }
        let mut zero = |count: &Expr, instead: &str| {
            if number(count) == Some(0) {
                errors.at(count, format!("waiting for 0 messages has no effect: {instead}"));
            }
        };
        for Member { count, .. } in &members {
            count.iter().for_each(|count| zero(count, "leave the port out, and mark it `#[input(optional)]`"));
        }
        value.iter().for_each(|count| zero(count, "mark the ports `#[input(optional)]`, or wait for at least 1"));
        match &value {
            None if is_sum => errors.at(&word, format!("`sum` needs a number of messages: `{example}`")),
            Some(value) if !is_sum => errors.at(value, format!("`each` has a number for each input: `{example}`")),
            _ => {}
        }
        for Member { port, count } in &members {
            match count {
                Some(count) if is_sum => {
                    errors.at(count, format!("`sum` has one number: `{example}`; or use `each(left = 2, right = 1)`"))
                }
                None if !is_sum => errors.at(port, format!("`{port}` needs a number of messages: `{example}`")),
                _ => {}
            }
        }
        Some(Self { word, members, sum: value, or_after: None })
    }

    fn has(&self, port: &Ident) -> bool {
        self.members.iter().any(|member| member.port.unraw() == port.unraw())
    }

    /// `plan.condition(sum([..], 3).or_after(..));`
    fn generate(&self) -> TokenStream {
        let site = Span::mixed_site();
        let members = self.members.iter().map(|Member { port, count }| {
            let id = quote_spanned!(errors::at(port)=>
                ::core::convert::Into::<::wakeline::condition::PortId>::into(handles.#port)
            );
            match count {
                Some(count) => quote_spanned!(site=> (#id, #count)),
                None => id,
            }
        });
        let word = Ident::new(&self.word.to_string(), site);
        let sum = self.sum.as_ref().map(|count| quote_spanned!(site=> , #count));
        let or_after = self.or_after.as_ref().map(|span| quote_spanned!(site=> .or_after(#span)));
        quote_spanned!(site=> plan.condition(::wakeline::condition::#word([#(#members),*] #sum) #or_after);)
    }
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::{super::expand, *};
    use crate::errors::messages;

    #[test]
    fn groups_become_conditions() {
        let item = quote! {
            #[ports(sum(a, r#type) = Self::SUM, or_after = "10ms")]
            #[ports(handles = Other, each(c = 2))]
            struct P {
                #[input]
                a: A,
                #[input]
                r#type: B,
                #[input(capacity = 2)]
                c: C,
            }
        };
        let expanded = expand(item).unwrap().to_string();
        let id =
            |name: TokenStream| quote!(::core::convert::Into::<::wakeline::condition::PortId>::into(handles.#name));
        let (a, b, c) = (id(quote!(a)), id(quote!(r#type)), id(quote!(c)));
        let wanted = quote! {
            plan.condition(
                ::wakeline::condition::sum([#a, #b], Self::SUM)
                    .or_after(::core::time::Duration::new(0u64, 10000000u32))
            );
            plan.condition(::wakeline::condition::each([(#c, 2)]));
            handles
        };
        assert!(expanded.contains(&wanted.to_string()), "{expanded}");
        assert!(expanded.contains("struct Other"), "{expanded}");
    }

    #[test]
    fn groups_that_cannot_be() {
        let refused = [
            (quote!(#[ports(sum(a, x) = 3)]), "there is no port `x`: the inputs are `a`, `b`"),
            (quote!(#[ports(sum(a, out) = 3)]), "`out` is an output: `sum` waits for messages at inputs"),
            (quote!(#[ports(each(a = 1, a = 2))]), "`a` is given twice"),
            (quote!(#[ports(sum(a, full) = 3)]), "`full` is in `sum(..)`, which sets what to wait for"),
            (quote!(#[ports(sum(a, b))]), "`sum` needs a number of messages: `sum(left, right) = 3`"),
            (quote!(#[ports(sum(a, b) = 0)]), "waiting for 0 messages has no effect"),
            (quote!(#[ports(each(a = 0, b = 1))]), "waiting for 0 messages has no effect"),
            (quote!(#[ports(sum(a = 1, b) = 3)]), "`sum` has one number"),
            (quote!(#[ports(each(a, b = 1))]), "`a` needs a number of messages"),
            (quote!(#[ports(each(a = 1) = 3)]), "`each` has a number for each input"),
            (quote!(#[ports(sum = 3)]), "`sum` needs inputs"),
            (quote!(#[ports(each())]), "`each` needs inputs"),
            (quote!(#[ports(or_after = "10ms")]), "`or_after` goes with a condition"),
            (quote!(#[ports(sum(a) = 1, or_after)]), "`or_after` needs a duration"),
            (quote!(#[ports(sum(a) = 1, or_after = "10")]), "time unit needed"),
            (quote!(#[ports(sum(a) = 1, or_after = "1s", or_after = "1s")]), "`or_after` is given twice"),
            (quote!(#[ports(sum(a) = 1, each(b = 1))]), "only one condition in each `#[ports(..)]`"),
            (quote!(#[ports(handles = One, handles = Two)]), "`handles` is given twice"),
            (quote!(#[ports(handles)]), "`handles` needs a name"),
            (quote!(#[ports(most(a, b) = 3)]), "those of `#[ports]` are `handles`, `sum`, `each`, `or_after`"),
        ];
        for (group, wanted) in refused {
            let messages = messages(expand(quote! {
                #group
                struct P {
                    #[input]
                    a: A,
                    #[input(done)]
                    b: B,
                    #[input(at_least = 2)]
                    full: B,
                    #[output]
                    out: C,
                }
            }));
            let ours: Vec<_> = messages.iter().filter(|message| message.contains(wanted)).collect();
            assert!(ours.len() == 1 && messages.len() == 1, "{group}: {messages:#?}");
        }
    }
}
