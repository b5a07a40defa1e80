//! Collects the errors of one declaration, so that a user sees all of them at once; and gives the spans that compiler
//! errors in generated code point at.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;

#[derive(Default)]
pub(crate) struct Errors(Option<syn::Error>);

impl Errors {
    pub(crate) fn at(&mut self, tokens: impl ToTokens, message: impl std::fmt::Display) {
        self.push(syn::Error::new_spanned(tokens, message));
    }

    /// Adds an error that has its own span.
    pub(crate) fn push(&mut self, error: syn::Error) {
        match &mut self.0 {
            Some(all) => all.combine(error),
            None => self.0 = Some(error),
        }
    }

    /// Returns the parsed value, or records the error.
    pub(crate) fn keep<T>(&mut self, parsed: syn::Result<T>) -> Option<T> {
        parsed.map_err(|error| self.push(error)).ok()
    }

    pub(crate) fn finish(self) -> syn::Result<()> {
        self.0.map_or(Ok(()), Err)
    }
}

/// The code generated for `item`; or a `compile_error!` for each error, and the stub, without which the code that uses the
/// item would not compile either: a mistake is one error, and not one at each use.
pub(crate) fn or_report(
    item: TokenStream,
    expand: fn(TokenStream) -> syn::Result<TokenStream>,
    stub: fn(TokenStream) -> TokenStream,
) -> TokenStream {
    expand(item.clone()).unwrap_or_else(|error| {
        let mut tokens = error.into_compile_error();
        tokens.extend(stub(item));
        tokens
    })
}

/// Tokens of the user's as they would be written: `Input<Vec<u32>>`.
pub(crate) fn shown(tokens: impl ToTokens) -> String {
    let mut text = tokens.to_token_stream().to_string();
    for (spaced, written) in [
        (" < ", "<"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
        (" ,", ","),
        (" ::", "::"),
        (":: ", "::"),
        ("& ", "&"),
        (" ;", ";"),
    ] {
        text = text.replace(spaced, written);
    }
    text
}

/// The span for generated code about some tokens of the user's: an error in it points at them, yet its names are the
/// macro's own, and lints do not treat it as code that the user wrote.
pub(crate) fn at(tokens: &impl ToTokens) -> Span {
    Span::mixed_site().located_at(syn::spanned::Spanned::span(tokens))
}

/// For tests: the messages of an expansion that must fail, in order.
#[cfg(test)]
pub(crate) fn messages(expanded: syn::Result<TokenStream>) -> Vec<String> {
    expanded.expect_err("should be refused").into_iter().map(|error| error.to_string()).collect()
}
