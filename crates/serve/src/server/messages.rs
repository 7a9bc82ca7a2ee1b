//! `/v1/messages`: the assistant's next message in Anthropic's words, which are put into OpenAI's and back.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::{Sender, channel};
use tokio_stream::wrappers::ReceiverStream;

use super::calls::Call;
use super::chat::{self, Begun};
use super::fault::Fault;
use super::fields::Fields;
use super::spoken::{Spoken, Utterance};
use super::tools::Tools;
use super::{App, parameters};
use crate::request::{Event, Finish, Trouble};

/// Pieces that wait for a slow client.
const AHEAD: usize = 64;

pub(super) async fn answer(State(app): State<Arc<App>>, fields: Fields) -> Response {
    let begun = match translated(fields) {
        Ok(fields) => chat::begin(&app, fields).await,
        Err(fault) => Err(fault),
    };
    match begun {
        Ok(begun) if begun.stream => stream(app, begun).await,
        Ok(begun) => whole(&app, begun).await.unwrap_or_else(refusal),
        Err(fault) => refusal(fault),
    }
}

/// How many tokens a request would have.
pub(super) async fn count(State(app): State<Arc<App>>, fields: Fields) -> Response {
    let counted = || {
        let mut fields = translated(fields)?;
        parameters::served(&app, &mut fields)?;
        let messages = fields.take("messages").unwrap_or_default();
        let tools = Tools::read(&mut fields)?;
        let asked = chat::Asked::read(&mut fields, &messages, tools.told())?;
        fields.finish()?;
        Ok(json!({"input_tokens": chat::prompt(&app, &asked)?.ids.len()}))
    };
    counted().map_or_else(refusal, |body| Json(body).into_response())
}

/// A fault in Anthropic's shape.
fn refusal(fault: Fault) -> Response {
    let body = json!({"type": "error", "error": {"type": fault.kind(), "message": fault.message}});
    let mut response = fault.clone().into_response();
    let status = response.status();
    let headers = std::mem::take(response.headers_mut());
    let mut told = (status, Json(body)).into_response();
    for (name, value) in headers.iter().filter(|(name, _)| *name == header::RETRY_AFTER) {
        told.headers_mut().insert(name.clone(), value.clone());
    }
    told
}

/// The same request in OpenAI's words. What is not known here is left for who reads those.
fn translated(mut fields: Fields) -> Result<Fields, Fault> {
    let mut messages: Vec<Value> = Vec::new();
    if let Some(system) = fields.take("system") {
        let text = text_of(&system).map_err(|why| Fault::field("system", why))?;
        messages.push(json!({"role": "system", "content": text}));
    }
    let Some(Value::Array(list)) = fields.take("messages") else {
        return Err(Fault::field("messages", "must be a list of messages"));
    };
    for (index, message) in list.iter().enumerate() {
        let place = |why: String| Fault::field(format!("messages[{index}]"), why);
        messages.extend(said(message).map_err(place)?);
    }
    let mut own = Map::new();
    own.insert("messages".into(), messages.into());
    own.extend(fields.take("stop_sequences").map(|stops| ("stop".to_owned(), stops)));
    if let Some(tools) = fields.take("tools") {
        own.insert("tools".into(), tools_of(tools)?);
    }
    if let Some(choice) = fields.take("tool_choice") {
        let (choice, several) = choice_of(&choice)?;
        own.extend([("tool_choice".into(), choice), ("parallel_tool_calls".into(), several.into())]);
    }
    match fields.take("thinking").map(|thinking| thinking["type"].as_str().map(str::to_owned)) {
        None => {}
        Some(Some(kind)) if ["enabled", "disabled"].contains(&kind.as_str()) => {
            let variables = json!({"enable_thinking": kind == "enabled"});
            own.insert("chat_template_kwargs".into(), variables);
        }
        Some(_) => return Err(Fault::field("thinking", "its type must be enabled or disabled")),
    }
    own.extend(fields.rest());
    Ok(Fields::of(own))
}

/// A text, or the texts of blocks.
fn text_of(content: &Value) -> Result<String, String> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => blocks.iter().map(block_text).collect(),
        Value::Null => Ok(String::new()),
        _ => Err("must be a text or a list of blocks".into()),
    }
}

fn block_text(block: &Value) -> Result<String, String> {
    let kind = block["type"].as_str().unwrap_or("none");
    let text = block["text"].as_str().filter(|_| kind == "text").map(str::to_owned);
    text.ok_or_else(|| format!("a block of type {kind} is not read here"))
}

/// A message, behind what tools have answered in it.
fn said(message: &Value) -> Result<Vec<Value>, String> {
    let role = message["role"].as_str().filter(|role| ["user", "assistant", "system"].contains(role));
    let role = role.ok_or("its role must be user or assistant")?;
    let Value::Array(blocks) = &message["content"] else {
        return Ok(vec![json!({"role": role, "content": text_of(&message["content"])?})]);
    };
    let (mut results, mut text, mut thought, mut calls) =
        (Vec::new(), String::new(), String::new(), Vec::new());
    for block in blocks {
        match (role, block["type"].as_str()) {
            ("user", Some("tool_result")) => results.push(json!({
                "role": "tool", "tool_call_id": block["tool_use_id"], "content": text_of(&block["content"])?,
            })),
            ("assistant", Some("tool_use")) => calls.push(json!({
                "id": block["id"], "type": "function",
                "function": {"name": block["name"], "arguments": block["input"].to_string()},
            })),
            ("assistant", Some("thinking")) => thought += block["thinking"].as_str().unwrap_or_default(),
            _ => text += &block_text(block)?,
        }
    }
    if text.is_empty() && calls.is_empty() && !results.is_empty() {
        return Ok(results);
    }
    let mut own = json!({"role": role, "content": text});
    if !calls.is_empty() {
        own["tool_calls"] = calls.into();
    }
    if !thought.is_empty() {
        own["reasoning_content"] = thought.into();
    }
    results.push(own);
    Ok(results)
}

fn tools_of(tools: Value) -> Result<Value, Fault> {
    let Value::Array(list) = tools else { return Err(Fault::field("tools", "must be a list of tools")) };
    let one = |(index, tool): (usize, &Value)| match tool["type"].as_str() {
        None | Some("custom") => Ok(json!({"type": "function", "function": {
            "name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}})),
        Some(kind) => {
            let why = format!("a tool of type {kind} is a server's own; this one has none");
            Err(Fault::field(format!("tools[{index}]"), why))
        }
    };
    list.iter().enumerate().map(one).collect::<Result<Vec<_>, _>>().map(Value::from)
}

/// The choice, and whether an answer may have several calls.
fn choice_of(choice: &Value) -> Result<(Value, bool), Fault> {
    let several = choice["disable_parallel_tool_use"] != true;
    let own = match choice["type"].as_str() {
        Some("auto") => json!("auto"),
        Some("any") => json!("required"),
        Some("none") => json!("none"),
        Some("tool") => json!({"type": "function", "function": {"name": choice["name"]}}),
        _ => return Err(Fault::field("tool_choice", "its type must be auto, any, tool or none")),
    };
    Ok((own, several))
}

/// Why an answer ended, and the text that ended it.
fn reason(finish: Finish, has_called: bool, stops: &[String]) -> (&'static str, Option<String>) {
    match finish {
        Finish::Length => ("max_tokens", None),
        _ if has_called => ("tool_use", None),
        Finish::Stop => ("end_turn", None),
        Finish::StopText(index) => ("stop_sequence", stops.get(index).cloned()),
    }
}

fn tool_use(app: &App, call: &Call) -> Value {
    // What is no JSON is told as it is: who called must know what was said.
    let input: Value =
        serde_json::from_str(&call.arguments).unwrap_or_else(|_| call.arguments.as_str().into());
    json!({"type": "tool_use", "id": app.next_id("toolu"), "name": call.name, "input": input})
}

async fn whole(app: &App, begun: Begun) -> Result<Response, Fault> {
    let Begun { head, stops, mut replies, .. } = begun;
    let mut spoken = head.reading.as_ref().map(|reading| reading.begin());
    let (mut thought, mut words, mut calls) = (String::new(), String::new(), Vec::new());
    let mut take = |said: Vec<Utterance>| {
        for one in said {
            match one {
                Utterance::Thought(text) => thought += &text,
                Utterance::Content(text) => words += &text,
                Utterance::Calls(more) => calls.extend(more),
            }
        }
    };
    let mut read = |text: &str| spoken.as_mut().map_or_else(Vec::new, |spoken| spoken.push(text));
    let (finish, tokens) = loop {
        match replies.recv().await {
            Some(Event::Token { text, .. }) => take(read(&text)),
            Some(Event::Finished { text, finish, tokens, .. }) => {
                take(read(&text));
                break (finish, tokens);
            }
            Some(Event::Trouble(trouble)) => return Err(trouble.into()),
            Some(_) => {}
            None => return Err(Trouble::Failed("it has ended".into()).into()),
        }
    };
    take(spoken.as_mut().map_or_else(Vec::new, Spoken::finish));
    let (reason, sequence) = reason(finish, !calls.is_empty(), &stops);
    let mut content = Vec::new();
    if !thought.is_empty() {
        content.push(json!({"type": "thinking", "thinking": thought, "signature": ""}));
    }
    if !words.is_empty() || content.is_empty() && calls.is_empty() {
        content.push(json!({"type": "text", "text": words}));
    }
    content.extend(calls.iter().map(|call| tool_use(app, call)));
    let body = json!({
        "id": head.id, "type": "message", "role": "assistant", "model": app.facts().name, "content": content,
        "stop_reason": reason, "stop_sequence": sequence,
        "usage": {"input_tokens": head.prompt_tokens, "output_tokens": tokens},
    });
    Ok(Json(body).into_response())
}

async fn stream(app: Arc<App>, mut begun: Begun) -> Response {
    // The status goes with the first token, so that what is refused gets its own.
    let first = match begun.replies.recv().await {
        Some(Event::Trouble(trouble)) => return refusal(trouble.into()),
        None => return refusal(Trouble::Failed("it has ended".into()).into()),
        Some(event) => event,
    };
    let (out, pieces) = channel::<Result<Bytes, Infallible>>(AHEAD);
    tokio::spawn(async move {
        let spoken = begun.head.reading.as_ref().map(|reading| reading.begin());
        let mut teller = Teller { app, out, spoken, blocks: 0, open: None, has_called: false };
        // A client that went away ends it early.
        let _ = teller.tell(first, begun).await;
    });
    let kinds = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (kinds, Body::from_stream(ReceiverStream::new(pieces))).into_response()
}

struct Gone;

/// Tells an answer as it comes: a message of blocks, of which one at a time is open.
struct Teller {
    app: Arc<App>,
    out: Sender<Result<Bytes, Infallible>>,
    spoken: Option<Spoken>,
    blocks: usize,
    /// The kind of the block that is open.
    open: Option<&'static str>,
    has_called: bool,
}

impl Teller {
    async fn say(&self, event: &Value) -> Result<(), Gone> {
        let kind = event["type"].as_str().unwrap_or_default();
        let text = format!("event: {kind}\ndata: {event}\n\n");
        self.out.send(Ok(Bytes::from(text))).await.map_err(|_| Gone)
    }

    async fn tell(&mut self, first: Event, begun: Begun) -> Result<(), Gone> {
        let Begun { head, stops, mut replies, .. } = begun;
        self.say(&json!({"type": "message_start", "message": {
            "id": head.id, "type": "message", "role": "assistant", "model": self.app.facts().name, "content": [],
            "stop_reason": null, "stop_sequence": null,
            "usage": {"input_tokens": head.prompt_tokens, "output_tokens": 0}}}))
            .await?;
        let mut event = Some(first);
        loop {
            match event {
                Some(Event::Token { text, .. }) => self.words(&text, false).await?,
                Some(Event::Finished { text, finish, tokens, .. }) => {
                    self.words(&text, true).await?;
                    self.close().await?;
                    let (reason, sequence) = reason(finish, self.has_called, &stops);
                    self.say(&json!({"type": "message_delta",
                        "delta": {"stop_reason": reason, "stop_sequence": sequence},
                        "usage": {"output_tokens": tokens}}))
                        .await?;
                    return self.say(&json!({"type": "message_stop"})).await;
                }
                Some(Event::Trouble(trouble)) => return self.trouble(trouble).await,
                Some(_) => {}
                None => return self.trouble(Trouble::Failed("it has ended".into())).await,
            }
            event = tokio::select! {
                event = replies.recv() => event,
                () = self.out.closed() => return Err(Gone),
            };
        }
    }

    async fn trouble(&self, trouble: Trouble) -> Result<(), Gone> {
        let fault = Fault::from(trouble);
        let error = json!({"type": fault.kind(), "message": fault.message});
        self.say(&json!({"type": "error", "error": error})).await
    }

    async fn words(&mut self, text: &str, is_last: bool) -> Result<(), Gone> {
        let mut said = self.spoken.as_mut().map_or_else(Vec::new, |spoken| spoken.push(text));
        if is_last {
            said.extend(self.spoken.as_mut().map_or_else(Vec::new, Spoken::finish));
        }
        for one in said {
            match one {
                Utterance::Thought(text) => {
                    self.delta("thinking", json!({"type": "thinking_delta", "thinking": text})).await?;
                }
                Utterance::Content(text) => {
                    self.delta("text", json!({"type": "text_delta", "text": text})).await?;
                }
                Utterance::Calls(calls) => {
                    for call in calls {
                        self.call(&call).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// More of a block of this kind, which is opened if need be.
    async fn delta(&mut self, kind: &'static str, delta: Value) -> Result<(), Gone> {
        if self.open != Some(kind) {
            self.close().await?;
            self.start(kind, json!({"type": kind, kind: ""})).await?;
        }
        self.say(&json!({"type": "content_block_delta", "index": self.blocks, "delta": delta})).await
    }

    async fn call(&mut self, call: &Call) -> Result<(), Gone> {
        self.close().await?;
        self.has_called = true;
        let mut block = tool_use(&self.app, call);
        block["input"] = json!({});
        self.start("tool_use", block).await?;
        let delta = json!({"type": "input_json_delta", "partial_json": call.arguments});
        self.say(&json!({"type": "content_block_delta", "index": self.blocks, "delta": delta})).await
    }

    async fn start(&mut self, kind: &'static str, block: Value) -> Result<(), Gone> {
        self.open = Some(kind);
        self.say(&json!({"type": "content_block_start", "index": self.blocks, "content_block": block})).await
    }

    async fn close(&mut self) -> Result<(), Gone> {
        if self.open.take().is_some() {
            self.say(&json!({"type": "content_block_stop", "index": self.blocks})).await?;
            self.blocks += 1;
        }
        Ok(())
    }
}
