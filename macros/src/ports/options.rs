//! The options in the brackets of `#[input(..)]`, `#[output(..)]` and the attributes of links.
//!
//! [`OPTIONS`] lists them all; each becomes a call of the method of its name on `PortOptions`. An option is first
//! checked by itself, then together with the other options of its port.

use proc_macro2::{Span, TokenStream};
use quote::quote_spanned;
use syn::{
    Attribute, Expr, ExprLit, Ident, Lit, LitStr, Meta, Token,
    ext::IdentExt,
    parse::{Parse, ParseStream},
    parse_quote_spanned,
    punctuated::Punctuated,
    spanned::Spanned,
};

use super::{
    Direction,
    values::{duration, is_string, number},
};
use crate::errors::Errors;

struct Known {
    name: &'static str,
    on: On,
    value: Value,
    /// Whether it sets what an input waits for.
    waits: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum On {
    Both,
    /// Inputs, outputs and links.
    All,
    Input,
    Output,
    /// Links that take exclusive access to a chunk.
    Link,
}

#[derive(Clone, Copy)]
enum Value {
    /// None: `done`.
    None,
    /// A number, and the error for 0.
    Number(&'static str),
    /// `"5ms"`, or a `Duration`.
    Time,
    /// `Sent` or `Arrived`.
    Clock,
    /// `"decoded"`.
    Event,
}

/// All options, in the order in which they are generated.
const OPTIONS: [Known; 13] = [
    known("capacity", On::Both, Value::Number("a queue with capacity 0 holds nothing: use at least 1")),
    known(
        "envelope_bytes",
        On::Output,
        Value::Number("an envelope of 0 bytes holds nothing: use at least one element"),
    ),
    known("envelopes", On::Output, Value::Number("a hub with 0 envelopes carries nothing: use at least 1")),
    waits("at_least", On::Input, Value::Number("waiting for 0 messages has no effect: use `optional`, or at least 1")),
    waits("at_most", On::Input, Value::Number("the operator would never run: use at least 1")),
    waits("batch", On::Input, Value::Number("a batch of 0 holds nothing: use at least 1, or `optional`")),
    waits("within", On::Input, Value::Time),
    waits("since", On::Input, Value::Clock),
    known("room", On::Output, Value::Number("waiting for room for 0 messages has no effect: use `optional`")),
    waits("optional", On::All, Value::None),
    known("by_hand", On::Link, Value::None),
    known("done", On::Input, Value::None),
    known("event", On::Input, Value::Event),
];

const fn known(name: &'static str, on: On, value: Value) -> Known {
    Known { name, on, value, waits: false }
}

const fn waits(name: &'static str, on: On, value: Value) -> Known {
    Known { name, on, value, waits: true }
}

impl Known {
    fn find(name: &Ident) -> Option<&'static Self> {
        OPTIONS.iter().find(|known| name == known.name)
    }

    fn suits(&self, direction: Direction) -> bool {
        match direction {
            Direction::Input => matches!(self.on, On::Input | On::Both | On::All),
            Direction::Output => matches!(self.on, On::Output | On::Both | On::All),
            Direction::Peek => self.on == On::All,
            _ => matches!(self.on, On::All | On::Link),
        }
    }

    /// The error for a port that it does not suit.
    fn belongs(&self) -> &'static str {
        match (self.on, self.name) {
            (On::Output, "room") => "belongs to an output: it is what the writer waits for",
            (On::Output, _) => "belongs to an output: the sender sets the size and the number of envelopes",
            (On::Link, _) => "belongs to a link that produces, consumes or modifies: only those commit a chunk",
            (On::Both, _) => "belongs to an input or an output: for a hub of chunks, set it on the hub",
            _ => "belongs to an input: it is what the reader waits for",
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

pub(super) struct Options(Vec<PortOption>);

impl Options {
    pub(super) fn read(direction: Direction, attribute: &Attribute, errors: &mut Errors) -> Self {
        let list = match &attribute.meta {
            Meta::Path(_) => return Self(Vec::new()),
            Meta::List(list) => list,
            Meta::NameValue(_) => {
                errors.at(
                    attribute,
                    format!(
                        "write `#[{0}]`, or options in brackets: `#[{0}({1})]`",
                        direction.word(),
                        if direction.role().is_some() { "optional" } else { "capacity = 4" }
                    ),
                );
                return Self(Vec::new());
            }
        };
        let parsed = list.parse_args_with(Punctuated::<PortOption, Token![,]>::parse_terminated);
        let mut options = Self(errors.keep(parsed).into_iter().flatten().collect());
        for at in 0..options.0.len() {
            let (before, rest) = options.0.split_at_mut(at);
            rest[0].check(direction, before, errors);
        }
        options.check_together(direction, errors);
        options
    }

    fn find(&self, name: &str) -> Option<&PortOption> {
        self.0.iter().find(|option| option.name == name)
    }

    /// The first of these options that is present.
    fn first<'a>(&self, names: &[&'a str]) -> Option<&'a str> {
        names.iter().copied().find(|name| self.find(name).is_some())
    }

    /// Checks options that conflict, or that need another one.
    fn check_together(&self, direction: Direction, errors: &mut Errors) {
        if let Some(optional) = self.find("optional") {
            let waits = match direction {
                Direction::Input => self.first(&["at_least", "at_most", "batch", "within", "since"]),
                _ => self.first(&["room"]),
            };
            if let Some(waits) = waits {
                let word = direction.word();
                errors.at(
                    &optional.name,
                    format!("an `optional` {word} waits for nothing, but `{waits}` does: remove one"),
                );
            }
            return;
        }
        if direction != Direction::Input {
            return;
        }
        let least = self.first(&["at_least", "batch"]);
        if let (Some(batch), Some("at_least")) = (self.find("batch"), least) {
            errors.at(&batch.name, "`batch` and `at_least` both set how many messages to wait for: remove one");
        }
        if let (Some(within), None) = (self.find("within"), least) {
            errors.at(
                &within.name,
                "`within` needs a number of messages: add `batch = ..`; the operator runs with that many, or with \
                 fewer once the oldest has waited that long",
            );
        }
        if let (Some(since), None) = (self.find("since"), self.find("within")) {
            errors.at(&since.name, "`since` sets when `within` begins: add `within = ..`");
        }
        if let (Some(most), Some(least)) = (self.find("at_most"), least)
            && let (Some(is), Some(needed)) = (self.number("at_most"), self.number(least))
            && is < needed
        {
            errors.at(
                &most.value,
                format!("the operator waits for {needed} messages, so it never runs with at most {is}"),
            );
        }
    }

    fn number(&self, name: &str) -> Option<u128> {
        number(self.find(name)?.value.as_ref()?)
    }

    pub(super) fn event(&self) -> Option<&LitStr> {
        match &self.find("event")?.value {
            Some(Expr::Lit(ExprLit { lit: Lit::Str(name), .. })) => Some(name),
            _ => None,
        }
    }

    /// The options that set how many messages the port waits for.
    pub(super) fn waits(&self) -> impl Iterator<Item = &Ident> {
        let waits = |name: &Ident| Known::find(name).is_some_and(|known| known.waits);
        self.0.iter().map(|option| &option.name).filter(move |name| waits(name))
    }

    /// `PortOptions::new().capacity(4)`
    pub(super) fn generate(&self) -> TokenStream {
        let site = Span::mixed_site();
        let mut built = quote_spanned!(site=> ::wakeline::__private::PortOptions::new());
        for Known { name: known, .. } in OPTIONS {
            for PortOption { value, .. } in self.0.iter().filter(|option| option.name == known) {
                let known = Ident::new(known, site);
                built = quote_spanned!(site=> #built.#known(#value));
            }
        }
        built
    }
}

impl PortOption {
    /// Checks it by itself. Its value becomes an expression of the type that is needed.
    fn check(&mut self, direction: Direction, before: &[Self], errors: &mut Errors) {
        let Self { name, value } = self;
        let word = direction.word();
        let Some(known) = Known::find(name) else {
            let known = OPTIONS.iter().filter(|known| known.suits(direction));
            let known: Vec<_> = known.map(|known| format!("`{}`", known.name)).collect();
            errors.at(&*name, format!("there is no option `{name}`: those of `#[{word}]` are {}", known.join(", ")));
            return;
        };
        if !known.suits(direction) {
            errors.at(&*name, format!("`{name}` {}", known.belongs()));
        } else if before.iter().any(|option| option.name == *name) {
            errors.at(&*name, format!("`{name}` is given twice: remove one"));
        }
        match (known.value, value) {
            (Value::None, None) => {}
            (Value::None, Some(value)) => {
                errors.at(value, format!("`{name}` takes no value: write just `#[{word}({name})]`"));
            }
            (_, None) => errors.at(&*name, format!("this option needs a value: `{name} = ..`")),
            (Value::Number(zero), Some(value)) => {
                if number(value) == Some(0) {
                    errors.at(value, zero);
                }
            }
            (Value::Time, Some(value)) => {
                if let Some(span) = errors.keep(duration(value)) {
                    *value = span;
                }
            }
            (Value::Clock, Some(value)) => {
                if let Some(clock) = errors.keep(clock(value)) {
                    *value = clock;
                }
            }
            (Value::Event, Some(value)) => {
                if !is_string(value) {
                    errors.at(value, "an event is named by a string: `event = \"decoded\"`");
                }
            }
        }
    }
}

/// `Sent`, `Arrived`
fn clock(value: &Expr) -> syn::Result<Expr> {
    if let Expr::Path(path) = value
        && let Some(word) = path.path.get_ident()
        && (word == "Sent" || word == "Arrived")
    {
        return Ok(parse_quote_spanned!(value.span()=> ::wakeline::condition::Since::#word));
    }
    Err(syn::Error::new_spanned(value, "`since` is `Sent`, or `Arrived`, the default"))
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::{super::expand, *};
    use crate::errors::messages;

    #[test]
    fn options_become_calls() {
        let item = quote! {
            struct P {
                #[input(since = Sent, within = "5ms", batch = 8, capacity = N)]
                a: A,
                #[output(optional)]
                b: B,
            }
        };
        let expanded = expand(item).unwrap().to_string();
        let wanted = quote! {
            ::wakeline::__private::PortOptions::new()
                .capacity(N)
                .batch(8)
                .within(::core::time::Duration::new(0u64, 5000000u32))
                .since(::wakeline::condition::Since::Sent)
        };
        assert!(expanded.contains(&wanted.to_string()), "{expanded}");
        assert!(expanded.contains(&quote!(PortOptions::new().optional()).to_string()), "{expanded}");
    }

    fn refusals(port: TokenStream) -> Vec<String> {
        messages(expand(quote!(struct P { #port a: A })))
    }

    #[test]
    fn conflicting_options_are_refused() {
        let refused = [
            (quote!(#[input(within = "5ms")]), "`within` needs a number of messages"),
            (quote!(#[input(batch = 2, at_least = 2)]), "`batch` and `at_least` both set how many"),
            (
                quote!(#[input(at_least = 3, at_most = 2)]),
                "the operator waits for 3 messages, so it never runs with at most 2",
            ),
            (quote!(#[input(batch = 8, within = "5ms", at_most = 2)]), "the operator waits for 8 messages"),
            (quote!(#[input(batch = 8, since = Sent)]), "add `within = ..`"),
            (quote!(#[input(batch = 8, within = "5ms", since = Now)]), "`since` is `Sent`, or"),
            (quote!(#[input(optional, at_most = 2)]), "an `optional` input waits for nothing, but `at_most` does"),
            (quote!(#[output(room = 2, optional)]), "an `optional` output waits for nothing, but `room` does"),
            (quote!(#[input(at_least = 0)]), "use `optional`"),
            (quote!(#[input(at_most = 0)]), "the operator would never run"),
            (quote!(#[input(batch = 0)]), "a batch of 0"),
            (quote!(#[output(room = 0)]), "use `optional`"),
            (quote!(#[input(batch = 2, within = "0s")]), "a duration of zero"),
            (quote!(#[input(batch = 2, within = 5)]), "not a duration"),
            (quote!(#[input(room = 2)]), "belongs to an output: it is what the writer waits for"),
            (quote!(#[output(batch = 2)]), "belongs to an input"),
        ];
        for (port, wanted) in refused {
            let found = refusals(port.clone());
            assert!(matches!(&found[..], [one] if one.contains(wanted)), "{port}: {found:#?}");
        }
        for port in [
            quote!(#[input(at_least = 2, within = "5ms")]),
            quote!(#[input(at_least = 2, at_most = 2)]),
            quote!(#[input(at_least = N, at_most = 2)]),
            quote!(#[input(batch = 8)]),
            quote!(#[input(optional, done, capacity = 4)]),
        ] {
            assert!(expand(quote!(struct P { #port a: A })).is_ok(), "{port}");
        }
    }
}
