//! The walk itself: objects against sections, lists against items.

use serde_json::{Map, Value};

use super::path::Path;
use super::variants::tagged_neighbour;
use super::{Checked, MAX_FINDINGS, Places, coerce, suggest};
use crate::defaults::{default_of, fill_value};
use crate::diagnostic::{Code, Diagnostic, Report, Severity};
use crate::reader::{Content, Document, Member, Node, is_comment, shorten};
use crate::table::{Form, Key, Kind, Status, Tag, Variant, find_variant};

/// The state of one walk.
pub(super) struct Walker<'a> {
    pub(super) document: &'a Document,
    pub(super) report: Report,
    pub(super) places: Places,
    autos: Vec<(String, Form)>,
    unlisted: usize,
    /// How many sections above have a warning of their own that nothing acts on them.
    pub(super) silenced: usize,
}

impl<'a> Walker<'a> {
    pub(super) fn new(document: &'a Document, report: Report) -> Self {
        let places = Places { file: document.name.clone(), ..Places::default() };
        Walker { document, report, places, autos: Vec::new(), unlisted: 0, silenced: 0 }
    }

    pub(super) fn root_is_no_object(&mut self) {
        let root = &self.document.root;
        let why = format!("the configuration must be an object, found {}", root.type_name());
        self.error(
            Code::WrongType,
            root.offset,
            &Path::ROOT,
            why,
            "write { \"train_batch_size\": 8, … }".into(),
        );
    }

    pub(super) fn finish(mut self, given: Map<String, Value>) -> Checked {
        if self.unlisted > 0 {
            let why = format!("{} more findings are not listed", self.unlisted);
            self.report.push(Diagnostic {
                severity: Severity::Error,
                code: Code::Syntax,
                file: self.document.name.clone(),
                position: None,
                path: String::new(),
                why,
                help: String::new(),
            });
        }
        Checked { given, places: self.places, autos: self.autos, report: self.report }
    }

    /// An object with known keys. `tag` is the key that decides about a neighbour's keys, already looked at.
    pub(super) fn section(
        &mut self,
        members: &[Member],
        keys: &'static [Key],
        path: &Path<'_>,
        form: Form,
        inside: Option<&'static Variant>,
    ) -> Map<String, Value> {
        let mut given = Map::new();
        for member in members.iter().filter(|member| !is_comment(&member.key)) {
            let by_name = keys.iter().find(|key| key.name == member.key);
            let known =
                by_name.or_else(|| keys.iter().find(|key| key.aliases.contains(&member.key.as_str())));
            let Some(key) = known else {
                self.unknown_key(member, keys, path);
                continue;
            };
            if key.name == member.key
                && let Some(alias) =
                    key.aliases.iter().find(|&&alias| members.iter().any(|other| other.key == alias))
            {
                let why = format!("given together with `{alias}`, which is the same option");
                self.error(
                    Code::BothSpellings,
                    member.offset,
                    &path.key(key.name),
                    why,
                    "keep one of the two".into(),
                );
                continue;
            }
            if let Some(deprecation) = key.deprecated {
                self.deprecated(member, members, key, deprecation, keys, path, form, &mut given);
                continue;
            }
            self.place(&path.key(key.name), member.offset);
            let silences = usize::from(key.status != Status::Implemented);
            self.silenced += silences;
            let value = self.member(&member.value, key, &path.key(key.name), form, members, keys);
            self.silenced -= silences;
            if let Some(value) = value {
                self.note_status(key, &value, member.offset, &path.key(key.name));
                given.insert(key.name.to_owned(), value);
            }
        }
        self.missing(members, keys, path, &given, inside);
        given
    }

    /// The value of a known key.
    pub(super) fn member(
        &mut self,
        node: &Node,
        key: &'static Key,
        path: &Path<'_>,
        form: Form,
        siblings: &[Member],
        keys: &'static [Key],
    ) -> Option<Value> {
        if node.content == Content::Null && key.takes_null() {
            return key
                .nullable
                .then_some(Value::Null)
                .filter(|_| !matches!(key.kind, Kind::Section(..) | Kind::Variants { .. }));
        }
        if let Some(variants) = tagged_neighbour(key.name, keys) {
            return self.tag(node, variants, path);
        }
        if let Kind::Variants { tag: Tag::Beside(tag), variants } = key.kind {
            return self.beside(node, tag, variants, path, siblings);
        }
        self.value(node, &key.kind, path, form)
    }

    /// A value of any type.
    pub(super) fn value(&mut self, node: &Node, kind: &Kind, path: &Path<'_>, form: Form) -> Option<Value> {
        if takes_auto(kind, form) && matches!(&node.content, Content::Text(text) if text == "auto") {
            self.autos.push((path.to_string(), form));
            return Some(Value::String("auto".into()));
        }
        match (kind, &node.content) {
            (Kind::Section(keys, form), Content::Object(members)) => {
                Some(Value::Object(self.section(members, keys, path, *form, None)))
            }
            (Kind::Variants { tag: Tag::Within(tag, default), variants }, Content::Object(members)) => {
                self.within(node, members, tag, default, variants, path).map(Value::Object)
            }
            (Kind::Named(kind), Content::Object(members)) => {
                let named = members.iter().filter(|member| !is_comment(&member.key));
                let mut map = Map::new();
                for member in named {
                    self.place(&path.key(&member.key), member.offset);
                    let value = self.value(&member.value, kind, &path.key(&member.key), form)?;
                    map.insert(member.key.clone(), value);
                }
                Some(Value::Object(map))
            }
            (Kind::List { item, length }, Content::List(items)) => {
                if length.is_some_and(|length| length != items.len()) {
                    let why = format!("expected {}, found {} of them", coerce::describe(kind), items.len());
                    self.error(Code::WrongType, node.offset, path, why, String::new());
                    return None;
                }
                let values = items
                    .iter()
                    .enumerate()
                    .map(|(index, node)| self.value(node, item, &path.index(index), form));
                values.collect::<Vec<_>>().into_iter().collect::<Option<Vec<_>>>().map(Value::Array)
            }
            (Kind::Either(kinds), _) => match kinds.iter().find(|kind| fits_shape(kind, node)) {
                Some(kind) => self.value(node, kind, path, form),
                None => self.misfit(node, path, coerce::wrong_type(node, kind)),
            },
            _ => match coerce::scalar(node, kind, form) {
                Ok(fit) => {
                    if let Some(how) = fit.converted {
                        let help = format!("write {}", fit.value);
                        self.warning(Code::Converted, node.offset, path, how, help);
                    }
                    Some(fit.value)
                }
                Err(misfit) => self.misfit(node, path, misfit),
            },
        }
    }

    fn unknown_key(&mut self, member: &Member, keys: &'static [Key], path: &Path<'_>) {
        if self.is_full() {
            return;
        }
        let here = path.to_string();
        if member.key == "max_grad_norm" && here == "optimizer.params" {
            let why = "gradients are not clipped by the optimizer";
            let help = format!(
                "write \"gradient_clipping\": {} at the top level",
                shorten(&member.value.to_value().to_string())
            );
            self.error(Code::UnsupportedCombination, member.offset, &path.key(&member.key), why.into(), help);
            return;
        }
        let help = suggest::for_unknown_key(&member.key, keys);
        self.error(Code::UnknownKey, member.offset, &path.key(&member.key), "unknown key".into(), help);
    }

    /// Required keys that are absent, and required parameters where no parameters are given at all.
    fn missing(
        &mut self,
        members: &[Member],
        keys: &'static [Key],
        path: &Path<'_>,
        given: &Map<String, Value>,
        inside: Option<&'static Variant>,
    ) {
        let is_given = |key: &Key| members.iter().any(|member| member.key == key.name);
        for key in keys.iter().filter(|key| key.required && !is_given(key)) {
            let whose = inside.map_or_else(String::new, |variant| format!(" by {}", variant.tag));
            let why = format!("required{whose}, but not given");
            let help = format!("add \"{}\": {}", key.name, coerce::describe(&key.kind));
            let diagnostic = self.places.error(Code::Missing, &path.key(key.name).to_string(), why, help);
            self.push(diagnostic);
        }
        for key in keys.iter().filter(|key| !given.contains_key(key.name)) {
            if let Kind::Variants { tag: Tag::Beside(tag), variants } = key.kind
                && !is_given(key)
                && let Some(Value::String(name)) = given.get(tag)
                && let Some(variant) = find_variant(variants, name)
                && let Some(keys) = variant.keys
            {
                self.missing(&[], keys, &path.key(key.name), &Map::new(), Some(variant));
            }
        }
    }

    /// One warning for an option that is given, differs from its default, and does nothing yet.
    pub(super) fn note_status(
        &mut self,
        key: &'static Key,
        value: &Value,
        offset: Option<usize>,
        path: &Path<'_>,
    ) {
        let default = fill_value(&default_of(key), &key.kind, &Map::new());
        let asks_for_nothing = *value == Value::String("auto".into())
            || value.get("enabled") == Some(&Value::Bool(false))
            || value.as_object().is_some_and(Map::is_empty)
            || same(&default, &fill_value(value, &key.kind, &Map::new()));
        if asks_for_nothing {
            return;
        }
        let no_effect = |why: &str| format!("has no effect: {why}");
        match key.status {
            // Of what is below a section the section has said it.
            Status::Implemented | Status::NotYet => {}
            _ if self.silenced > 0 => {}
            Status::Inert(why) => self.warning(Code::NoEffect, offset, path, no_effect(why), String::new()),
            Status::Always { value: asked, why } => {
                let asked: Value = serde_json::from_str(asked).unwrap_or(Value::Null);
                if !agrees(&asked, value) {
                    self.warning(Code::NoEffect, offset, path, no_effect(why), String::new());
                }
            }
            Status::Refused(why) => {
                let help = "remove it".to_owned();
                self.error(Code::UnsupportedCombination, offset, path, format!("not supported: {why}"), help);
            }
        }
    }

    pub(super) fn place(&mut self, path: &Path<'_>, offset: Option<usize>) {
        self.places.by_path.insert(path.to_string(), self.document.position(offset));
    }

    pub(super) fn misfit(&mut self, node: &Node, path: &Path<'_>, misfit: coerce::Misfit) -> Option<Value> {
        self.error(misfit.code, node.offset, path, misfit.why, misfit.help);
        None
    }

    pub(super) fn error(
        &mut self,
        code: Code,
        offset: Option<usize>,
        path: &Path<'_>,
        why: String,
        help: String,
    ) {
        self.emit(Severity::Error, code, offset, path, why, help);
    }

    pub(super) fn warning(
        &mut self,
        code: Code,
        offset: Option<usize>,
        path: &Path<'_>,
        why: String,
        help: String,
    ) {
        self.emit(Severity::Warning, code, offset, path, why, help);
    }

    fn emit(
        &mut self,
        severity: Severity,
        code: Code,
        offset: Option<usize>,
        path: &Path<'_>,
        why: String,
        help: String,
    ) {
        if self.is_full() {
            return;
        }
        let position = self.document.position(offset);
        let file = self.document.name.clone();
        self.report.push(Diagnostic { severity, code, file, position, path: path.to_string(), why, help });
    }

    fn push(&mut self, diagnostic: Diagnostic) {
        if !self.is_full() {
            self.report.push(diagnostic);
        }
    }

    /// Whether enough was found; what is found beyond that is only counted.
    fn is_full(&mut self) -> bool {
        let full = self.report.all().len() >= MAX_FINDINGS;
        self.unlisted += usize::from(full);
        full
    }
}

/// Whether `"auto"` may stand for a value of this type.
fn takes_auto(kind: &Kind, form: Form) -> bool {
    match kind {
        Kind::Bool
        | Kind::Int { .. }
        | Kind::Interval
        | Kind::IntChoice(_)
        | Kind::Float(_)
        | Kind::List { .. }
        | Kind::DataType => true,
        Kind::Choice { values, .. } => !values.contains(&"auto"),
        Kind::Text | Kind::NonEmptyText => form == Form::Schema,
        Kind::Either(kinds) => kinds.iter().all(|kind| takes_auto(kind, form)),
        Kind::Section(..) | Kind::Variants { .. } | Kind::Named(_) | Kind::Json => false,
    }
}

fn fits_shape(kind: &Kind, node: &Node) -> bool {
    match &node.content {
        Content::Object(_) => {
            matches!(kind, Kind::Section(..) | Kind::Named(_) | Kind::Variants { .. } | Kind::Json)
        }
        Content::List(_) => matches!(kind, Kind::List { .. } | Kind::Json),
        Content::Bool(_) => matches!(kind, Kind::Bool | Kind::Json),
        Content::Number(_) => {
            matches!(
                kind,
                Kind::Int { .. } | Kind::Interval | Kind::IntChoice(_) | Kind::Float(_) | Kind::Json
            )
        }
        Content::Text(_) => matches!(
            kind,
            Kind::Text | Kind::NonEmptyText | Kind::Choice { .. } | Kind::DataType | Kind::Json
        ),
        Content::Null => matches!(kind, Kind::Json),
    }
}

/// Whether a value asks for nothing but what is in `asked`.
fn agrees(asked: &Value, value: &Value) -> bool {
    match (asked, value) {
        (Value::Object(asked), Value::Object(value)) => {
            value.iter().all(|(key, value)| asked.get(key).is_some_and(|asked| agrees(asked, value)))
        }
        _ => same(asked, value),
    }
}

/// Equality in which 1 and 1.0 are the same number.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        _ => a == b,
    }
}
