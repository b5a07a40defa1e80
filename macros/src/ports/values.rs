//! What stands behind the `=` of an option: numbers and spans of time, as far as a macro can know them.
//!
//! An expression that is not a literal is left to the compiler: its type is what the generated call asks for.

use std::time::Duration;

use syn::{Expr, ExprLit, Lit, parse_quote_spanned, spanned::Spanned};

/// A number that is written out, however it is.
pub(super) fn number(value: &Expr) -> Option<u128> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => number.base10_parse().ok(),
        Expr::Paren(inner) => number(&inner.expr),
        Expr::Group(inner) => number(&inner.expr),
        _ => None,
    }
}

pub(super) fn is_string(value: &Expr) -> bool {
    matches!(value, Expr::Lit(ExprLit { lit: Lit::Str(_), .. }))
}

/// A span of time: `"5ms"` is worked out here, anything else is an expression of type `Duration`.
pub(super) fn duration(value: &Expr) -> syn::Result<Expr> {
    let Expr::Lit(ExprLit { lit, .. }) = value else { return Ok(value.clone()) };
    let told = "write a string such as \"5ms\" or \"1s 500ms\", or an expression of type `Duration`";
    let Lit::Str(text) = lit else {
        return Err(syn::Error::new_spanned(lit, format!("how long is that? {told}")));
    };
    let span: Duration = humantime::parse_duration(&text.value())
        .map_err(|error| syn::Error::new_spanned(lit, format!("this is no span of time ({error}): {told}")))?;
    if span.is_zero() {
        return Err(syn::Error::new_spanned(lit, "no time at all: leave it out, or give it more"));
    }
    let (seconds, nanos) = (span.as_secs(), span.subsec_nanos());
    Ok(parse_quote_spanned!(value.span()=> ::core::time::Duration::new(#seconds, #nanos)))
}

#[cfg(test)]
mod tests {
    use quote::{ToTokens, quote};

    use super::*;

    fn parsed(text: &str) -> Expr {
        syn::parse_str(text).unwrap()
    }

    #[test]
    fn a_number_is_one_however_it_is_written() {
        for zero in ["0", "0usize", "0x0_0", "(0)"] {
            assert_eq!(number(&parsed(zero)), Some(0), "{zero}");
        }
        assert_eq!(number(&parsed("0x10")), Some(16));
        for other in ["1 << 20", "N", "-1", "1.0", "\"1\""] {
            assert_eq!(number(&parsed(other)), None, "{other}");
        }
    }

    #[test]
    fn a_span_of_time_is_worked_out_when_compiling() {
        let span = duration(&parsed("\"1s 500us\"")).unwrap().into_token_stream().to_string();
        assert_eq!(span, quote!(::core::time::Duration::new(1u64, 500000u32)).to_string());
        let own = duration(&parsed("Self::PATIENCE")).unwrap().into_token_stream().to_string();
        assert_eq!(own, "Self :: PATIENCE");
    }

    #[test]
    fn a_span_that_is_none_is_refused() {
        let told = |text: &str| duration(&parsed(text)).unwrap_err().to_string();
        assert!(told("\"5\"").contains("time unit needed"), "{}", told("\"5\""));
        assert!(told("\"soon\"").contains("\"5ms\""));
        assert!(told("5").contains("how long is that?"));
        assert!(told("\"0ms\"").contains("no time at all"));
    }
}
