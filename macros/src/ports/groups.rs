//! What stands in `#[ports(..)]` on the struct: another name for the handles, and conditions over several inputs.
//!
//! ```text
//!   #[ports(handles = Name)]
//!   #[ports(sum(left, right) = 3)]
//!   #[ports(each(left = 2, right = 1), or_after = "10ms")]
//! ```
//!
//! Any number of attributes, each with one condition at most, so that it is plain whose `or_after` that is. First each is
//! read by itself ([`Settings::read`]), then, once the fields are known, compared with those ([`Settings::check`]).

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

/// All that the attributes of a struct say.
#[derive(Default)]
pub(super) struct Settings {
    pub(super) handles: Option<Ident>,
    groups: Vec<Group>,
}

/// A condition over several inputs.
struct Group {
    /// `sum` or `each`.
    word: Ident,
    members: Vec<Member>,
    /// Of all together.
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

    /// What one attribute says.
    fn add(&mut self, entries: impl IntoIterator<Item = Entry>, errors: &mut Errors) {
        let mut group: Option<Group> = None;
        let mut or_after: Option<(Ident, Expr)> = None;
        for entry in entries {
            let word = entry.word.clone();
            if word == "handles" {
                match entry.ident() {
                    None => errors.at(&word, "the struct of handles has a name: `handles = Name`"),
                    Some(_) if self.handles.is_some() => errors.at(&word, "`handles` is here twice: remove one"),
                    name => self.handles = name,
                }
            } else if word == "sum" || word == "each" {
                let read = Group::read(entry, errors);
                if group.is_some() {
                    errors.at(&word, "one condition in each `#[ports(..)]`: write this one in another");
                } else {
                    group = read;
                }
            } else if word == "or_after" {
                match entry {
                    Entry { members: None, value: Some(_), .. } if or_after.is_some() => {
                        errors.at(&word, "`or_after` is here twice: remove one");
                    }
                    Entry { members: None, value: Some(value), .. } => {
                        or_after = errors.keep(duration(&value)).map(|span| (word, span));
                    }
                    _ => errors.at(&word, "after how long? `or_after = \"10ms\"`"),
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
            (None, Some((word, _))) => errors.at(
                &word,
                "or after what else? It goes beside a condition: `#[ports(sum(left, right) = 3, or_after = \"10ms\")]`",
            ),
            (_, None) => {}
        }
        self.groups.extend(group);
    }

    /// Whether the ports are there, and wait for nothing else.
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
                    errors.at(name, format!("`{name}` is here twice: remove one"));
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
                    format!("`{}` stands in `{word}(..)`, which says what is waited for: remove `{option}`", port.name),
                );
            }
        }
    }

    /// What `declare` tells the plan of them, with the ports' handles at hand.
    pub(super) fn generate(&self) -> impl Iterator<Item = TokenStream> {
        self.groups.iter().map(Group::generate)
    }
}

impl Entry {
    /// The name that it is given.
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
            errors.at(&word, format!("of which inputs? `{example}`"));
            return None;
        }
        let mut zero = |count: &Expr, instead: &str| {
            if number(count) == Some(0) {
                errors.at(count, format!("0 messages are always there: {instead}"));
            }
        };
        for Member { count, .. } in &members {
            count.iter().for_each(|count| zero(count, "leave the port out, and mark it `#[input(optional)]`"));
        }
        value.iter().for_each(|count| zero(count, "mark the ports `#[input(optional)]`, or wait for at least 1"));
        match &value {
            None if is_sum => errors.at(&word, format!("how many messages? `{example}`")),
            Some(value) if !is_sum => errors.at(value, format!("each input has a number of its own: `{example}`")),
            _ => {}
        }
        for Member { port, count } in &members {
            match count {
                Some(count) if is_sum => errors
                    .at(count, format!("a sum has one number for all: `{example}`; or `each(left = 2, right = 1)`")),
                None if !is_sum => errors.at(port, format!("how many messages at `{port}`? `{example}`")),
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
            (quote!(#[ports(each(a = 1, a = 2))]), "`a` is here twice"),
            (quote!(#[ports(sum(a, full) = 3)]), "`full` stands in `sum(..)`, which says what is waited for"),
            (quote!(#[ports(sum(a, b))]), "how many messages? `sum(left, right) = 3`"),
            (quote!(#[ports(sum(a, b) = 0)]), "0 messages are always there"),
            (quote!(#[ports(each(a = 0, b = 1))]), "0 messages are always there"),
            (quote!(#[ports(sum(a = 1, b) = 3)]), "a sum has one number for all"),
            (quote!(#[ports(each(a, b = 1))]), "how many messages at `a`?"),
            (quote!(#[ports(each(a = 1) = 3)]), "each input has a number of its own"),
            (quote!(#[ports(sum = 3)]), "of which inputs?"),
            (quote!(#[ports(each())]), "of which inputs?"),
            (quote!(#[ports(or_after = "10ms")]), "or after what else?"),
            (quote!(#[ports(sum(a) = 1, or_after)]), "after how long?"),
            (quote!(#[ports(sum(a) = 1, or_after = "10")]), "time unit needed"),
            (quote!(#[ports(sum(a) = 1, or_after = "1s", or_after = "1s")]), "`or_after` is here twice"),
            (quote!(#[ports(sum(a) = 1, each(b = 1))]), "one condition in each `#[ports(..)]`"),
            (quote!(#[ports(handles = One, handles = Two)]), "`handles` is here twice"),
            (quote!(#[ports(handles)]), "the struct of handles has a name"),
            (quote!(#[ports(most(a, b) = 3)]), "those of `#[ports]` are `handles`, `sum`, `each`, `or_after`"),
        ];
        for (group, wanted) in refused {
            let told = messages(expand(quote! {
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
            let ours: Vec<_> = told.iter().filter(|told| told.contains(wanted)).collect();
            assert!(ours.len() == 1 && told.len() == 1, "{group}: {told:#?}");
        }
    }
}
