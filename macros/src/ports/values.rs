//! The values of options: numbers and durations, as far as a macro can evaluate them.
//!
//! An expression that is not a literal is left to the compiler: the generated call determines its type.

use std::time::Duration;

use syn::{Expr, ExprLit, Lit, parse_quote_spanned, spanned::Spanned};

/// The value of an integer literal, in any notation.
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

/// A duration: `"5ms"` is evaluated here, anything else is an expression of type `Duration`.
pub(super) fn duration(value: &Expr) -> syn::Result<Expr> {
    let Expr::Lit(ExprLit { lit, .. }) = value else { return Ok(value.clone()) };
    let hint = "write a string such as \"5ms\" or \"1s 500ms\", or an expression of type `Duration`";
    let Lit::Str(text) = lit else {
        return Err(syn::Error::new_spanned(lit, format!("not a duration: {hint}")));
    };
    let span: Duration = humantime::parse_duration(&text.value())
        .map_err(|error| syn::Error::new_spanned(lit, format!("not a duration ({error}): {hint}")))?;
    if span.is_zero() {
        return Err(syn::Error::new_spanned(
            lit,
            "a duration of zero has no effect: remove the option, or use a longer duration",
        ));
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
    fn numbers_are_read_in_every_notation() {
        for zero in ["0", "0usize", "0x0_0", "(0)"] {
            assert_eq!(number(&parsed(zero)), Some(0), "{zero}");
        }
        assert_eq!(number(&parsed("0x10")), Some(16));
        for other in ["1 << 20", "N", "-1", "1.0", "\"1\""] {
            assert_eq!(number(&parsed(other)), None, "{other}");
        }
    }

    #[test]
    fn a_duration_is_evaluated_at_compile_time() {
        let span = duration(&parsed("\"1s 500us\"")).unwrap().into_token_stream().to_string();
        assert_eq!(span, quote!(::core::time::Duration::new(1u64, 500000u32)).to_string());
        let own = duration(&parsed("Self::PATIENCE")).unwrap().into_token_stream().to_string();
        assert_eq!(own, "Self :: PATIENCE");
    }

    #[test]
    fn an_invalid_duration_is_refused() {
        let refusal = |text: &str| duration(&parsed(text)).unwrap_err().to_string();
        assert!(refusal("\"5\"").contains("time unit needed"), "{}", refusal("\"5\""));
        assert!(refusal("\"soon\"").contains("\"5ms\""));
        assert!(refusal("5").contains("not a duration"));
        assert!(refusal("\"0ms\"").contains("a duration of zero"));
    }
}
