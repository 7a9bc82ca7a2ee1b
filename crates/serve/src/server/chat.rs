//! `/v1/chat/completions`: the assistant's next message.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use ferrospeed_text::{Conversation, template};
use serde_json::{Map, Value};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::calls::CallFormat;
use super::completions::can_fit;
use super::fault::Fault;
use super::fields::Fields;
use super::form::{self, Asked as AskedForm};
use super::parameters::Parameters;
use super::reply::{Head, Style, whole};
use super::spoken::Reading;
use super::tools::{Choice, Tools};
use super::{App, stream};
use crate::request::{Event, Special};

/// Messages of a conversation.
const MAX_MESSAGES: usize = 4096;
/// What a template may be told beside the messages, in bytes.
const MAX_VARIABLES: usize = 1 << 16;

pub(super) async fn answer(State(app): State<Arc<App>>, fields: Fields) -> Response {
    match submit(&app, fields).await {
        Ok(response) => response,
        Err(fault) => fault.into_response(),
    }
}

async fn submit(app: &Arc<App>, fields: Fields) -> Result<Response, Fault> {
    let Begun { head, stream, include_usage, replies, .. } = begin(app, fields).await?;
    Ok(match stream {
        true => stream::pieces(Arc::clone(app), head, include_usage, replies).await,
        false => whole(app, &head, replies).await,
    })
}

/// A chat that the engine works on.
pub(super) struct Begun {
    pub(super) head: Head,
    pub(super) stream: bool,
    include_usage: bool,
    /// Texts that end an answer.
    pub(super) stops: Vec<String>,
    pub(super) replies: UnboundedReceiver<Event>,
}

/// Reads what is asked for, and hands it to the engine.
pub(super) async fn begin(app: &Arc<App>, mut fields: Fields) -> Result<Begun, Fault> {
    let mut parameters = Parameters::read(&mut fields, app, None)?;
    let messages = fields.take("messages").unwrap_or_default();
    let logprobs = logprobs(&mut fields)?;
    let tools = Tools::read(&mut fields)?;
    let mut form = form::read(&mut fields)?;
    let asked = Asked::read(&mut fields, &messages, tools.told())?;
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.refuse("functions", empty)?;
    fields.refuse("function_call", |choice| choice.as_str() == Some("none"))?;
    fields.refuse("modalities", |list| {
        list.as_array().is_some_and(|list| list.iter().all(|one| one == "text"))
    })?;
    fields.finish()?;
    let calls = CallFormat::of(&app.facts().template);
    if tools.told().is_some() && calls.is_none() {
        let why = "the chat template of this model has no place for tools, or writes calls in a way that is not known here";
        return Err(Fault::field("tools", why));
    }
    if let Some(forced) = tools.form(calls, &app.forms)? {
        if let Some(AskedForm { field, .. }) = form {
            return Err(Fault::field(field, "an answer that has to call a tool has the form of a call"));
        }
        form = Some(AskedForm { field: "tools", form: forced });
    }
    let prompt = prompt(app, &asked)?;
    parameters.constrain(form::start(app, form).await?);
    let reading = Reading {
        thinks: app.facts().template.source().is_some_and(|source| source.contains("</think>")),
        is_thinking: prompt.text.trim_end().ends_with("<think>"),
        calls: calls.filter(|&calls| calls == CallFormat::Harmony || tools.choice != Choice::None),
        tools,
    };
    // Some begin calls with a token that has no text.
    parameters.special = if reading.calls.is_some() { Special::Shown } else { Special::Hidden };
    let mut head = Head::new(app, Style::Chat, parameters.answers, prompt.ids.len(), logprobs.is_some());
    head.reading = Some(reading);
    let (events, replies) = unbounded_channel();
    app.engine.submit(parameters.request(app, prompt.ids, 0, logprobs), events);
    let Parameters { stream, include_usage, stops, .. } = parameters;
    Ok(Begun { head, stream, include_usage, stops, replies })
}

/// How many alternatives are told of each token, where likelihoods are asked for.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, Fault> {
    let wanted = fields.flag("logprobs")?;
    let top = fields.whole("top_logprobs", 0..=20)?;
    if top.is_some() && !wanted {
        return Err(Fault::field("top_logprobs", "is for logprobs: true alone"));
    }
    Ok(wanted.then(|| top.unwrap_or(0) as usize))
}

/// What the model's template is asked to write.
pub(super) struct Asked {
    conversation: Conversation,
    tools: Option<Value>,
    variables: Map<String, Value>,
    /// Whether the assistant is asked for a new message.
    begins: bool,
    /// Whether it goes on with the last one.
    goes_on: bool,
}

impl Asked {
    /// Reads messages and what else the template is told: `chat_template_kwargs`, `reasoning_effort`, `add_generation_prompt` and
    /// `continue_final_message`.
    pub(super) fn read(fields: &mut Fields, list: &Value, tools: Option<Value>) -> Result<Asked, Fault> {
        const KWARGS: &str = "chat_template_kwargs";
        let mut variables = match fields.take(KWARGS) {
            None => Map::new(),
            Some(Value::Object(variables))
                if Value::from(variables.clone()).to_string().len() <= MAX_VARIABLES =>
            {
                variables
            }
            Some(_) => {
                return Err(Fault::field(
                    KWARGS,
                    format!("must be an object of at most {MAX_VARIABLES} bytes"),
                ));
            }
        };
        if let Some(effort) = fields.text("reasoning_effort")? {
            variables.insert("reasoning_effort".into(), effort.into());
        }
        let goes_on = fields.flag("continue_final_message")?;
        let begins = match fields.take("add_generation_prompt") {
            None => !goes_on,
            Some(Value::Bool(begins)) => begins,
            Some(_) => return Err(Fault::field("add_generation_prompt", "must be true or false")),
        };
        if goes_on && begins {
            let why = "goes on with the last message, and add_generation_prompt asks for a new one";
            return Err(Fault::field("continue_final_message", why));
        }
        let messages = messages(list)?;
        let conversation = Conversation::new(&messages.into(), None)
            .map_err(|error| Fault::field("messages", error.to_string()))?;
        Ok(Asked { conversation, tools, variables, begins, goes_on })
    }
}

/// What the model goes on with.
pub(super) struct Prompt {
    text: String,
    pub(super) ids: Vec<i64>,
}

/// Has the template write it.
pub(super) fn prompt(app: &App, asked: &Asked) -> Result<Prompt, Fault> {
    let facts = app.facts();
    let request = template::Request {
        messages: asked.conversation.messages(),
        tools: asked.tools.as_ref(),
        asks: asked.begins,
        variables: &asked.variables,
    };
    let written = match asked.goes_on {
        true => facts.template.prompt_within(&request),
        false => facts.template.prompt(&request),
    };
    let text = written.map_err(|why| Fault::field("messages", why))?;
    can_fit(&text, facts.longest, "messages")?;
    // The template has written what the tokenizer would put around a text.
    let ids = facts.codec.encode(&text).map_err(|error| Fault::field("messages", error.to_string()))?;
    let ids = facts.readable(ids).map_err(|why| Fault::field("messages", why))?;
    Ok(Prompt { text, ids })
}

fn messages(list: &Value) -> Result<Vec<Value>, Fault> {
    const NAME: &str = "messages";
    let Value::Array(list) = list else {
        return Err(Fault::field(NAME, "must be a list of messages"));
    };
    if list.is_empty() || list.len() > MAX_MESSAGES {
        return Err(Fault::field(NAME, format!("must have 1 to {MAX_MESSAGES} entries")));
    }
    list.iter().enumerate().map(|(index, value)| message(&format!("{NAME}[{index}]"), value)).collect()
}

/// A message without what it leaves empty.
fn message(place: &str, value: &Value) -> Result<Value, Fault> {
    let Value::Object(fields) = value else { return Err(Fault::field(place, "must be an object")) };
    let known = ["role", "content", "name", "refusal", "tool_calls", "tool_call_id", "reasoning_content"];
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
    let mut message: Map<String, Value> = fields
        .iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(key, v)| (key.clone(), v.clone()))
        .collect();
    message.insert("content".into(), content.into());
    let calls = message.get("tool_calls");
    let is_call = |call: &Value| call["function"]["name"].is_string();
    if calls.is_some_and(|calls| !calls.as_array().is_some_and(|calls| calls.iter().all(is_call))) {
        let why = "must be a list of calls, each with the name of a function and its arguments";
        return Err(Fault::field(format!("{place}.tool_calls"), why));
    }
    Ok(message.into())
}
