//! `/tokenize` and `/detokenize`: the model's tokens of a text or of a conversation, and the text of tokens, as vLLM has them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::completions::prompts;
use super::fault::Fault;
use super::fields::Fields;
use super::parameters::{served, tokens};
use super::{App, chat};

pub(super) async fn tokenize(State(app): State<Arc<App>>, fields: Fields) -> Response {
    tokens_of(&app, fields).map_or_else(IntoResponse::into_response, |body| Json(body).into_response())
}

pub(super) async fn detokenize(State(app): State<Arc<App>>, fields: Fields) -> Response {
    text_of(&app, fields).map_or_else(IntoResponse::into_response, |body| Json(body).into_response())
}

fn tokens_of(app: &App, mut fields: Fields) -> Result<Value, Fault> {
    served(app, &mut fields)?;
    let ids = match fields.take("messages") {
        Some(messages) => {
            let asked = chat::Asked::read(&mut fields, &messages, None)?;
            chat::prompt(app, &asked)?.ids
        }
        None => {
            let mut all = prompts(app, &mut fields, "prompt")?;
            match all.len() {
                1 => all.remove(0),
                _ => return Err(Fault::field("prompt", "must be one text")),
            }
        }
    };
    fields.finish()?;
    Ok(json!({"count": ids.len(), "max_model_len": app.engine.limits().sequence_tokens, "tokens": ids}))
}

fn text_of(app: &App, mut fields: Fields) -> Result<Value, Fault> {
    const NAME: &str = "tokens";
    served(app, &mut fields)?;
    let vocabulary = app.facts().vocabulary;
    let ids = fields.take(NAME).and_then(|list| tokens(list.as_array()?, vocabulary));
    let ids =
        ids.ok_or_else(|| Fault::field(NAME, format!("must be a list of tokens below {vocabulary}")))?;
    fields.finish()?;
    let text = app.facts().codec.decode_all(&ids).map_err(|error| Fault::field(NAME, error.to_string()))?;
    Ok(json!({"prompt": text}))
}
