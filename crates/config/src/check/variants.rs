//! Sections whose keys depend on the value of another key: an optimizer's parameters on its type.

use serde_json::{Map, Value};

use super::path::Path;
use super::walk::Walker;
use super::{coerce, suggest};
use crate::diagnostic::Code;
use crate::reader::{Content, Member, Node, shorten};
use crate::table::{Form, Key, Kind, Status, Tag, Variant, find_variant};

/// Schedules of the framework that are made from functions.
const NEED_A_FUNCTION: [&str; 4] = ["LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"];

impl Walker<'_> {
    /// The parameters of `optimizer` and `scheduler`: their keys depend on the `type` beside them.
    pub(super) fn beside(
        &mut self,
        node: &Node,
        tag: &str,
        variants: &'static [Variant],
        path: &Path<'_>,
        siblings: &[Member],
    ) -> Option<Value> {
        let Content::Object(members) = &node.content else {
            return self.misfit(node, path, coerce::wrong_type(node, &Kind::Named(&Kind::Json)));
        };
        let given_tag = siblings.iter().find(|member| member.key == tag);
        let Some(Content::Text(name)) = given_tag.map(|member| &member.value.content) else {
            if given_tag.is_none() {
                let why = format!("has no effect, because `{tag}` is not given beside it");
                self.warning(Code::NoEffect, node.offset, path, why, format!("add `{tag}`"));
            }
            return None;
        };
        let variant = find_variant(variants, name)?;
        let Some(keys) = variant.keys else { return Some(node.to_value()) };
        let silences = usize::from(variant.status == Status::NotYet);
        self.silenced += silences;
        let given = self.section(members, keys, path, Form::Plain, Some(variant));
        self.silenced -= silences;
        Some(Value::Object(given))
    }

    /// A section whose own `mode` decides about its keys.
    pub(super) fn within(
        &mut self,
        node: &Node,
        members: &[Member],
        tag: &str,
        default: &str,
        variants: &'static [Variant],
        path: &Path<'_>,
    ) -> Option<Map<String, Value>> {
        let given_tag = members.iter().find(|member| member.key == tag);
        let name = match given_tag.map(|member| &member.value.content) {
            Some(Content::Text(name)) => name.as_str(),
            Some(_) => {
                return self.misfit(node, &path.key(tag), coerce::wrong_type(node, &Kind::Text)).and(None);
            }
            None => default,
        };
        let Some(variant) = variants.iter().find(|variant| variant.tag == name) else {
            self.unknown_variant(name, variants, given_tag.and_then(|tag| tag.value.offset), &path.key(tag));
            return None;
        };
        Some(self.section(members, variant.keys.unwrap_or_default(), path, Form::Plain, Some(variant)))
    }

    /// The value of a `type` key: the canonical name of a variant.
    pub(super) fn tag(
        &mut self,
        node: &Node,
        variants: &'static [Variant],
        path: &Path<'_>,
    ) -> Option<Value> {
        let Content::Text(name) = &node.content else {
            return self.misfit(node, path, coerce::wrong_type(node, &Kind::Text));
        };
        let Some(variant) = find_variant(variants, name) else {
            self.unknown_variant(name, variants, node.offset, path);
            return None;
        };
        if variant.status == Status::NotYet {
            let why = format!("\"{}\" does not run here", variant.tag);
            let runs = variants.iter().filter(|variant| variant.status == Status::Implemented);
            let runs = coerce::list_of(runs.map(|variant| variant.tag.to_owned()));
            let help = format!("write one of {runs}, or leave it out and give the engine one of your own");
            self.error(Code::UnsupportedCombination, node.offset, path, why, help);
        }
        Some(Value::String(variant.tag.to_owned()))
    }

    fn unknown_variant(
        &mut self,
        name: &str,
        variants: &'static [Variant],
        offset: Option<usize>,
        path: &Path<'_>,
    ) {
        if NEED_A_FUNCTION.iter().any(|needs| needs.eq_ignore_ascii_case(name)) {
            let why = format!("\"{}\" needs a function, which a file cannot hold", shorten(name));
            let help = "give the engine a schedule of your own, or use another one here".to_owned();
            self.error(Code::UnsupportedCombination, offset, path, why, help);
            return;
        }
        let names = coerce::list_of(variants.iter().map(|variant| variant.tag.to_owned()));
        let help = match suggest::nearest(name, variants.iter().map(|variant| variant.tag)) {
            Some(near) => format!("did you mean \"{near}\"? There are {names}"),
            None => format!("write one of {names}"),
        };
        self.error(Code::NotAChoice, offset, path, format!("there is no \"{}\"", shorten(name)), help);
    }
}

/// Whether a key names the variant of a neighbour, as `type` does for `params`.
pub(super) fn tagged_neighbour(name: &str, keys: &'static [Key]) -> Option<&'static [Variant]> {
    keys.iter().find_map(|key| match key.kind {
        Kind::Variants { tag: Tag::Beside(tag), variants } if tag == name => Some(variants),
        _ => None,
    })
}
