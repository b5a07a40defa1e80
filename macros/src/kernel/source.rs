//! The attribute of a kernel: the file of the device code, the `unsafe` that asserts its correctness, and `over`.

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

use super::over::Over;
use crate::errors;

const OPTIONS: &str = "those of `#[kernel]` are `unsafe(cuda = \"..\")`, `unsafe(ptx = \"..\")`, `unsafe(cubin = \"..\")` and `over = [..]`";
const SOURCES: &str =
    "device code comes from one file: `unsafe(cuda = \"..\")`, `unsafe(ptx = \"..\")` or `unsafe(cubin = \"..\")`";

/// The source of the device code, and the `unsafe` of the attribute.
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
            // Comes from a `macro_rules!` of the user.
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

impl Parse for DeviceCode {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if !input.peek(Token![unsafe]) {
            if let Ok(name) = input.fork().call(Ident::parse_any)
                && Form::of(&name).is_none()
            {
                return Err(syn::Error::new(name.span(), format!("there is no option `{name}`: {OPTIONS}")));
            }
            let bare: SourceFile = input.parse()?;
            let SourceFile { name, file, .. } = &bare;
            let file = file.to_token_stream();
            return Err(syn::Error::new_spanned(
                quote!(#name = #file),
                format!(
                    "device code needs `unsafe`: write `unsafe({name} = {file})`. The compiler cannot check that it \
                     matches this signature: it must take the same parameters, only read `&[T]`, and stay within \
                     its slices. `unsafe` asserts that it does; launching the kernel is then safe"
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
            return Err(syn::Error::new(second.name.span(), format!("only one source is allowed: {SOURCES}")));
        }
        Ok(Self { vouched, form, file })
    }
}

/// The arguments of `#[kernel(..)]`.
#[derive(Default)]
pub(super) struct KernelOptions {
    pub(super) code: Option<DeviceCode>,
    pub(super) over: Option<Over>,
}

impl Parse for KernelOptions {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut options = Self::default();
        while !input.is_empty() {
            let start = input.span();
            if Over::is_next(input) {
                if options.over.replace(input.parse()?).is_some() {
                    return Err(syn::Error::new(start, "`over` is given twice: remove one"));
                }
            } else if options.code.is_some() {
                return Err(syn::Error::new(start, format!("only one source is allowed: {SOURCES}")));
            } else {
                options.code = Some(input.parse()?);
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(options)
    }
}

impl DeviceCode {
    /// Generates `KernelSource::Cuda(include_str!("saxpy.cu"))` at the attribute's span, which the path is relative to.
    pub(super) fn expand(&self) -> TokenStream {
        let file = &self.file;
        let site = errors::at(file);
        match self.form {
            Form::Cuda => quote_spanned!(site=> ::wakeline::__private::KernelSource::Cuda(::core::include_str!(#file))),
            Form::Ptx => quote_spanned!(site=> ::wakeline::__private::KernelSource::Ptx(::core::include_str!(#file))),
            Form::Cubin => {
                quote_spanned!(site=> ::wakeline::__private::KernelSource::Cubin(::core::include_bytes!(#file)))
            }
        }
    }
}
