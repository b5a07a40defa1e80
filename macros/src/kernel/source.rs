//! The attribute of a kernel: which file the device code is in, and the `unsafe` that vouches for it.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote, quote_spanned};
use syn::{
    Expr, ExprLit, Ident, Lit, Token,
    ext::IdentExt,
    parenthesized,
    parse::{Parse, ParseStream},
    punctuated::Punctuated,
    token::Paren,
};

use crate::errors;

const SOURCES: &str =
    "device code comes from one file: `unsafe(cuda = \"..\")`, `unsafe(ptx = \"..\")` or `unsafe(cubin = \"..\")`";

/// Where the device code comes from, and the `unsafe` that vouches for it.
pub(super) struct DeviceCode {
    pub(super) vouched: Token![unsafe],
    form: Form,
    pub(super) file: Expr,
}

#[derive(Clone, Copy)]
enum Form {
    Cuda,
    Ptx,
    Cubin,
}

impl Form {
    fn of(name: &Ident) -> Option<Self> {
        match name.to_string().as_str() {
            "cuda" => Some(Self::Cuda),
            "ptx" => Some(Self::Ptx),
            "cubin" => Some(Self::Cubin),
            _ => None,
        }
    }
}

/// `cuda = "saxpy.cu"`
struct SourceFile {
    name: Ident,
    form: Form,
    file: Expr,
}

impl Parse for SourceFile {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let name = input.call(Ident::parse_any)?;
        let Some(form) = Form::of(&name) else {
            return Err(syn::Error::new(name.span(), format!("there is no source `{name}`: {SOURCES}")));
        };
        if !input.peek(Token![=]) {
            return Err(syn::Error::new(name.span(), format!("name the file: `{name} = \"..\"`")));
        }
        input.parse::<Token![=]>()?;
        let mut file: Expr = input.parse()?;
        while let Expr::Group(group) = file {
            // From a `macro_rules!` of the user's.
            file = *group.expr;
        }
        match &file {
            Expr::Lit(ExprLit { lit: Lit::Str(path), .. }) if path.value().is_empty() => {
                Err(syn::Error::new(path.span(), "the path is empty: name the file, relative to this one"))
            }
            Expr::Lit(ExprLit { lit: Lit::Str(_), .. }) | Expr::Macro(_) => Ok(Self { name, form, file }),
            other => Err(syn::Error::new_spanned(
                other,
                "a path has to be known to the compiler: a string, or `concat!(env!(\"OUT_DIR\"), \"/saxpy.ptx\")`",
            )),
        }
    }
}

impl DeviceCode {
    /// What stands in the brackets of `#[kernel(..)]`.
    pub(super) fn read(input: ParseStream<'_>) -> syn::Result<Option<Self>> {
        if input.is_empty() {
            return Ok(None);
        }
        if !input.peek(Token![unsafe]) {
            let bare: SourceFile = input.parse()?;
            let SourceFile { name, file, .. } = &bare;
            let file = file.to_token_stream();
            return Err(syn::Error::new_spanned(
                quote!(#name = #file),
                format!(
                    "device code needs `unsafe`: write `unsafe({name} = {file})`. Nobody checks that it keeps to this \
                     signature: the same parameters, only reading what is `&[T]`, staying within its slices. With \
                     `unsafe` you vouch for that, here and once; launching it is then safe"
                ),
            ));
        }
        let vouched: Token![unsafe] = input.parse()?;
        if !input.peek(Paren) {
            return Err(syn::Error::new(vouched.span, SOURCES));
        }
        let inside;
        let paren = parenthesized!(inside in input);
        let files = Punctuated::<SourceFile, Token![,]>::parse_terminated(&inside)?;
        let mut files = files.into_iter();
        let Some(SourceFile { form, file, .. }) = files.next() else {
            return Err(syn::Error::new(paren.span.join(), SOURCES));
        };
        if let Some(second) = files.next() {
            return Err(syn::Error::new(second.name.span(), format!("one source is enough: {SOURCES}")));
        }
        if input.peek(Token![,]) {
            input.parse::<Token![,]>()?;
        }
        if !input.is_empty() {
            return Err(input.error(format!("one source is enough: {SOURCES}")));
        }
        Ok(Some(Self { vouched, form, file }))
    }

    /// `Source::Cuda(include_str!("saxpy.cu"))`, at the attribute's place: that is what the path is relative to.
    pub(super) fn expand(&self) -> TokenStream {
        let file = &self.file;
        let site = errors::at(file);
        match self.form {
            Form::Cuda => quote_spanned!(site=> ::wakeline::__private::Source::Cuda(::core::include_str!(#file))),
            Form::Ptx => quote_spanned!(site=> ::wakeline::__private::Source::Ptx(::core::include_str!(#file))),
            Form::Cubin => quote_spanned!(site=> ::wakeline::__private::Source::Cubin(::core::include_bytes!(#file))),
        }
    }
}
