//! The form that an answer is asked for: OpenAI's `response_format`, and vLLM's `guided_json`, `guided_regex`, `guided_choice` and
//! `guided_grammar`.

use std::sync::Arc;

use serde_json::Value;

use super::App;
use super::fault::Fault;
use super::fields::Fields;
use crate::constrain::{Constraint, Form};

/// Texts of `guided_choice`.
const MAX_CHOICES: usize = 1024;

/// A form, and the field that asks for it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Asked {
    pub(super) field: &'static str,
    pub(super) form: Form,
}

/// Which form is asked for, if any.
pub(super) fn read(fields: &mut Fields) -> Result<Option<Asked>, Fault> {
    let mut found: Option<Asked> = None;
    let readers: [(&'static str, fn(&Value) -> Result<Option<Form>, String>); 5] = [
        ("response_format", response_format),
        ("guided_json", |schema| Ok(Some(Form::Schema(schema_of(schema)?)))),
        ("guided_regex", |value| Ok(Some(Form::Regex(text(value)?)))),
        ("guided_choice", |value| choice(value).map(Some)),
        ("guided_grammar", |value| Ok(Some(Form::Lark(text(value)?)))),
    ];
    for (field, read) in readers {
        let Some(value) = fields.take(field) else { continue };
        let Some(form) = read(&value).map_err(|why| Fault::field(field, why))? else { continue };
        if let Some(other) = found {
            return Err(Fault::field(
                field,
                format!("an answer has one form, and {} asks for another", other.field),
            ));
        }
        found = Some(Asked { field, form });
    }
    Ok(found)
}

/// Gets ready what the engine needs to keep to a form, beside those who talk to other clients: the first one takes a moment.
pub(super) async fn start(app: &Arc<App>, asked: Option<Asked>) -> Result<Option<Constraint>, Fault> {
    let Some(Asked { field, form }) = asked else { return Ok(None) };
    let forms = Arc::clone(&app.forms);
    let started = tokio::task::spawn_blocking(move || forms.start(&form)).await;
    match started {
        Ok(Ok(constraint)) => Ok(Some(constraint)),
        Ok(Err(why)) => Err(Fault::field(field, why)),
        Err(_) => Err(Fault::field(field, "cannot be worked on")),
    }
}

fn response_format(format: &Value) -> Result<Option<Form>, String> {
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Form::object())),
        Some("json_schema") => match &format["json_schema"]["schema"] {
            Value::Null => {
                Err("json_schema.schema is missing: the schema that the answer has to keep to".into())
            }
            schema => Ok(Some(Form::Schema(schema_of(schema)?))),
        },
        _ => Err("its type must be text, json_object or json_schema".into()),
    }
}

/// A schema, which may be written as a text.
fn schema_of(value: &Value) -> Result<Value, String> {
    let schema = match value {
        Value::String(text) => serde_json::from_str(text).map_err(|error| format!("is no JSON: {error}"))?,
        other => other.clone(),
    };
    match schema {
        Value::Object(_) | Value::Bool(true) => Ok(schema),
        _ => Err("must be a JSON schema: an object".into()),
    }
}

fn text(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).filter(|text| !text.is_empty()).ok_or_else(|| "must be a text".into())
}

fn choice(value: &Value) -> Result<Form, String> {
    let texts = value.as_array().filter(|texts| (1..=MAX_CHOICES).contains(&texts.len()));
    let texts = texts.and_then(|texts| texts.iter().map(|one| text(one).ok()).collect::<Option<Vec<_>>>());
    texts.map(Form::Choice).ok_or_else(|| format!("must be a list of 1 to {MAX_CHOICES} texts"))
}
