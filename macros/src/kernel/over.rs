//! `over = [width, height]`: what a launch must cover, one thread for each element of it.
//!
//! The macro evaluates the arithmetic between the operands itself, in `i128` and checked, so that operands of different
//! integer types can be mixed and a product such as `width * height` cannot wrap to a small grid. Everything else in an
//! expression is left as it was written.

use proc_macro2::{Span, TokenStream};
use quote::quote_spanned;
use syn::{
    BinOp, Expr, ExprBinary, Ident, Token, bracketed,
    ext::IdentExt,
    parse::{Parse, ParseStream},
    punctuated::Punctuated,
    token::Bracket,
};

use crate::errors;

const FORM: &str = "`over` lists what a launch must cover in 1 to 3 dimensions: `over = [width, height]`";

/// The extents, innermost dimension first.
pub(super) struct Over(Vec<Expr>);

impl Over {
    pub(super) fn is_next(input: ParseStream<'_>) -> bool {
        input.fork().call(Ident::parse_any).is_ok_and(|name| name == "over")
    }
}

impl Parse for Over {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let name = input.call(Ident::parse_any)?;
        if !input.peek(Token![=]) {
            return Err(syn::Error::new(name.span(), FORM));
        }
        input.parse::<Token![=]>()?;
        if !input.peek(Bracket) {
            let extent: Expr = input.parse()?;
            let shown = errors::shown(&extent);
            return Err(syn::Error::new_spanned(extent, format!("{FORM}; write `over = [{shown}]`")));
        }
        let inside;
        let bracket = bracketed!(inside in input);
        let extents: Vec<_> = Punctuated::<Expr, Token![,]>::parse_terminated(&inside)?.into_iter().collect();
        match extents.get(3) {
            _ if extents.is_empty() => Err(syn::Error::new(bracket.span.join(), FORM)),
            Some(fourth) => {
                Err(syn::Error::new_spanned(fourth, "a grid has at most 3 dimensions: multiply some of these"))
            }
            None => Ok(Self(extents)),
        }
    }
}

impl Over {
    /// `[Some(width), Some(height)]`, each an `Option<i128>`: `None` where the arithmetic is undefined.
    pub(super) fn expand(&self) -> TokenStream {
        let extents = self.0.iter().map(extent);
        quote_spanned!(Span::mixed_site()=> [#(#extents),*])
    }
}

fn extent(expr: &Expr) -> TokenStream {
    match expr {
        Expr::Paren(inner) => extent(&inner.expr),
        Expr::Group(inner) => extent(&inner.expr),
        Expr::Binary(ExprBinary { left, op, right, .. }) => {
            let method = match op {
                BinOp::Add(_) => "checked_add",
                BinOp::Sub(_) => "checked_sub",
                BinOp::Mul(_) => "checked_mul",
                BinOp::Div(_) => "checked_div",
                BinOp::Rem(_) => "checked_rem",
                _ => return operand(expr),
            };
            let (method, left, right) = (Ident::new(method, Span::mixed_site()), extent(left), extent(right));
            quote_spanned! {Span::mixed_site()=>
                match (#left, #right) {
                    (::core::option::Option::Some(left), ::core::option::Option::Some(right)) => {
                        ::core::primitive::i128::#method(left, right)
                    }
                    _ => ::core::option::Option::None,
                }
            }
        }
        _ => operand(expr),
    }
}

fn operand(expr: &Expr) -> TokenStream {
    // At the operand, where the compiler reports one of a wrong type.
    quote_spanned!(errors::at(expr)=> ::wakeline::__private::ExtentOperand::get(#expr))
}
