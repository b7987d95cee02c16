//! `#[derive(Module)]`, which `convoke-graph`, `convoke-nn` and `convoke` export beside the trait. See `convoke_nn::Module` for how to use it.

use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, Field, Generics, Index, LitStr, Member, Result, parse_quote};

/// Derives the trait for users of `convoke-nn`.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand(input, &quote!(::convoke_nn))
}

/// Derives the trait for users of `convoke-graph`.
#[proc_macro_derive(GraphModule, attributes(module))]
pub fn derive_module_of_graph(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand(input, &quote!(::convoke_graph))
}

/// Derives the trait for users of `convoke`, who need not depend on `convoke-nn`.
#[proc_macro_derive(FacadeModule, attributes(module))]
pub fn derive_module_of_facade(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand(input, &quote!(::convoke::nn))
}

fn expand(input: proc_macro::TokenStream, nn: &TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as DeriveInput);
    module(input, nn).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// A field that holds a part of the module.
struct Held {
    name: LitStr,
    member: Member,
    ty: syn::Type,
}

fn module(input: DeriveInput, nn: &TokenStream) -> Result<TokenStream> {
    let Data::Struct(data) = &input.data else {
        return Err(Error::new_spanned(&input.ident, "Module can be derived for structs only"));
    };
    if let Some(attribute) = input.attrs.iter().find(|attribute| attribute.path().is_ident("module")) {
        return Err(Error::new_spanned(attribute, "`#[module(...)]` belongs on fields"));
    }
    let mut held: Vec<Held> = Vec::new();
    for (index, field) in data.fields.iter().enumerate() {
        let Some(field) = read(index, field)? else { continue };
        if held.iter().any(|known| known.name.value() == field.name.value()) {
            let message = format!("two fields are named {:?}", field.name.value());
            return Err(Error::new(field.name.span(), message));
        }
        held.push(field);
    }
    let generics = bounded(input.generics, &held, nn);
    let (of_impl, of_type, bounds) = generics.split_for_impl();
    let ident = &input.ident;
    // The code for a field has the span of its type, so that the compiler underlines a field whose type cannot be a part.
    let parts = held.iter().map(|Held { name, member, ty }| {
        let add = quote::quote_spanned!(ty.span()=> #nn::Field::add_to);
        quote!(#add(&self.#member, #name, parts);)
    });
    let folds = held.iter().map(|Held { member, .. }| quote!(+ #nn::Field::fold(&mut self.#member)?));
    let unused = if held.is_empty() { quote!(let _ = parts;) } else { TokenStream::new() };
    Ok(quote! {
        #[automatically_derived]
        impl #of_impl #nn::Module for #ident #of_type #bounds {
            fn parts<'convoke_parts>(&'convoke_parts self, parts: &mut #nn::Parts<'convoke_parts>) {
                #unused
                #(#parts)*
            }

            fn fold(&mut self) -> #nn::Result<usize> {
                ::core::result::Result::Ok(0 #(#folds)*)
            }
        }
    })
}

/// Reads a field and its attributes; none if it is skipped.
fn read(index: usize, field: &Field) -> Result<Option<Held>> {
    let member = match &field.ident {
        Some(ident) => Member::Named(ident.clone()),
        None => Member::Unnamed(Index { index: index as u32, span: field.span() }),
    };
    let mut name = match &field.ident {
        Some(ident) => LitStr::new(&ident.unraw().to_string(), ident.span()),
        None => LitStr::new(&index.to_string(), Span::call_site()),
    };
    let (mut skipped, mut renamed) = (false, false);
    for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("module")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("skip") {
                skipped = true;
                return Ok(());
            }
            if meta.path.is_ident("name") {
                name = meta.value()?.parse()?;
                renamed = true;
                return match name.value().split('.').any(str::is_empty) {
                    true => Err(Error::new(
                        name.span(),
                        "a name is not empty, and neither is what stands between its dots",
                    )),
                    false => Ok(()),
                };
            }
            Err(meta.error("expected `skip` or `name = \"...\"`"))
        })?;
    }
    if skipped && renamed {
        return Err(Error::new_spanned(field, "a field that is skipped has no name"));
    }
    Ok((!skipped).then(|| Held { name, member, ty: field.ty.clone() }))
}

/// The generics, with the bounds that the trait needs.
fn bounded(mut generics: Generics, held: &[Held], nn: &TokenStream) -> Generics {
    if generics.type_params().next().is_none() {
        return generics;
    }
    let bounds = generics.make_where_clause();
    for Held { ty, .. } in held {
        bounds.predicates.push(parse_quote!(#ty: #nn::Field));
    }
    bounds.predicates.push(parse_quote!(
        Self: #nn::Forward + ::core::marker::Send + ::core::marker::Sync + 'static
    ));
    generics
}
