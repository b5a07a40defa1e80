//! The mistakes of one declaration, gathered so that a user sees all of them at once; and where those that
//! only the compiler finds will point.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;

/// Every mistake found so far.
#[derive(Default)]
pub(crate) struct Errors(Option<syn::Error>);

impl Errors {
    /// A mistake at these tokens.
    pub(crate) fn at(&mut self, tokens: impl ToTokens, message: impl std::fmt::Display) {
        self.push(syn::Error::new_spanned(tokens, message));
    }

    /// A mistake that carries its own place.
    pub(crate) fn push(&mut self, error: syn::Error) {
        match &mut self.0 {
            Some(all) => all.combine(error),
            None => self.0 = Some(error),
        }
    }

    /// What was parsed, or a mistake more.
    pub(crate) fn keep<T>(&mut self, parsed: syn::Result<T>) -> Option<T> {
        parsed.map_err(|error| self.push(error)).ok()
    }

    /// An error if there was any mistake.
    pub(crate) fn finish(self) -> syn::Result<()> {
        self.0.map_or(Ok(()), Err)
    }
}

/// The generated code, or the `compile_error!`s that stand for the mistakes.
pub(crate) fn or_report(expanded: syn::Result<TokenStream>) -> TokenStream {
    expanded.unwrap_or_else(syn::Error::into_compile_error)
}

/// Where generated code stands that is about some tokens of the user's: an error in it points at them, yet its names are
/// the macro's own, and lints do not take it for something that the user wrote.
pub(crate) fn at(tokens: &impl ToTokens) -> Span {
    Span::mixed_site().located_at(syn::spanned::Spanned::span(tokens))
}

/// For tests: the messages of an expansion that has to fail, in order.
#[cfg(test)]
pub(crate) fn messages(expanded: syn::Result<TokenStream>) -> Vec<String> {
    expanded.expect_err("should be refused").into_iter().map(|error| error.to_string()).collect()
}
