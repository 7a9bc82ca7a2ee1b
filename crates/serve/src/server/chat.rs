//! `/v1/chat/completions`: the assistant's next message.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::mpsc::unbounded_channel;

use super::completions::can_fit;
use super::fault::Fault;
use super::fields::Fields;
use super::parameters::Parameters;
use super::reply::{Head, Style, whole};
use super::{App, stream};
use ferrospeed_text::Message;

/// Messages of a conversation.
const MAX_MESSAGES: usize = 4096;

pub(super) async fn answer(State(app): State<Arc<App>>, fields: Fields) -> Response {
    match submit(&app, fields).await {
        Ok(response) => response,
        Err(fault) => fault.into_response(),
    }
}

async fn submit(app: &Arc<App>, mut fields: Fields) -> Result<Response, Fault> {
    let parameters = Parameters::read(&mut fields, app, None)?;
    let messages = messages(&mut fields)?;
    let wanted = fields.flag("logprobs")?;
    let top = fields.whole("top_logprobs", 0..=20)?;
    if top.is_some() && !wanted {
        return Err(Fault::field("top_logprobs", "is for logprobs: true alone"));
    }
    let logprobs = wanted.then(|| top.unwrap_or(0) as usize);
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.refuse("tools", empty)?;
    fields.refuse("functions", empty)?;
    fields.refuse("tool_choice", |choice| matches!(choice.as_str(), Some("none" | "auto")))?;
    fields.refuse("function_call", |choice| choice.as_str() == Some("none"))?;
    fields.refuse("response_format", |format| format["type"].as_str() == Some("text"))?;
    fields.refuse("modalities", |list| {
        list.as_array().is_some_and(|list| list.iter().all(|one| one == "text"))
    })?;
    fields.finish()?;
    let prompt = prompt(app, &messages)?;
    let mut head = Head::new(app, Style::Chat, parameters.answers, prompt.len(), wanted);
    head.logprobs = wanted;
    let (events, replies) = unbounded_channel();
    app.engine.submit(parameters.request(app, prompt, 0, logprobs), events);
    Ok(match parameters.stream {
        true => stream::pieces(Arc::clone(app), head, parameters.include_usage, replies).await,
        false => whole(app, &head, replies).await,
    })
}

fn prompt(app: &App, messages: &[Message]) -> Result<Vec<i64>, Fault> {
    let facts = app.facts();
    let text = facts.template.render(messages).map_err(|why| Fault::field("messages", why))?;
    can_fit(&text, facts.longest, "messages")?;
    // The template has written what the tokenizer would put around a text.
    let ids = facts.codec.encode(&text).map_err(|error| Fault::field("messages", error.to_string()))?;
    facts.readable(ids).map_err(|why| Fault::field("messages", why))
}

fn messages(fields: &mut Fields) -> Result<Vec<Message>, Fault> {
    const NAME: &str = "messages";
    let Some(Value::Array(list)) = fields.take(NAME) else {
        return Err(Fault::field(NAME, "must be a list of messages"));
    };
    if list.is_empty() || list.len() > MAX_MESSAGES {
        return Err(Fault::field(NAME, format!("must have 1 to {MAX_MESSAGES} entries")));
    }
    list.iter().enumerate().map(|(index, value)| message(&format!("{NAME}[{index}]"), value)).collect()
}

fn message(place: &str, value: &Value) -> Result<Message, Fault> {
    let Value::Object(fields) = value else { return Err(Fault::field(place, "must be an object")) };
    let known = ["role", "content", "name", "refusal"];
    if let Some((key, _)) =
        fields.iter().find(|(key, value)| !known.contains(&key.as_str()) && !value.is_null())
    {
        let shown: String = key.chars().take(100).collect();
        return Err(Fault::field(format!("{place}.{shown}"), "is not supported by this server"));
    }
    let role = value["role"].as_str().filter(|role| !role.is_empty());
    let role = role.ok_or_else(|| Fault::field(format!("{place}.role"), "must be a string such as user"))?;
    let content = match &value["content"] {
        Value::String(text) => Some(text.clone()),
        Value::Null if role == "assistant" => Some(String::new()),
        Value::Array(parts) => {
            let text = |part: &Value| {
                (part["type"] == "text").then(|| part["text"].as_str()).flatten().map(str::to_owned)
            };
            parts.iter().map(text).collect::<Option<Vec<_>>>().map(|texts| texts.concat())
        }
        _ => None,
    };
    let content = content
        .ok_or_else(|| Fault::field(format!("{place}.content"), "must be a string or parts of type text"))?;
    Ok(Message { role: role.to_owned(), content })
}
