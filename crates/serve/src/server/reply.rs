//! Answers in OpenAI's words, whole or in pieces, for both text endpoints.

use std::collections::HashMap;

use axum::response::{IntoResponse, Response};
use ferrospeed_text::TextError;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::calls::Call;
use super::fault::Fault;
use super::spoken::{Reading, Utterance};
use super::{App, now_s};
use crate::detokenize::Detokenizer;
use crate::request::{Event, Trouble};
use crate::sampling::Likelihood;

/// Which endpoint speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Chat,
    Text,
}

impl Style {
    pub(super) fn id_prefix(self) -> &'static str {
        match self {
            Style::Chat => "chatcmpl",
            Style::Text => "cmpl",
        }
    }

    fn object(self, streams: bool) -> &'static str {
        match (self, streams) {
            (Style::Chat, false) => "chat.completion",
            (Style::Chat, true) => "chat.completion.chunk",
            (Style::Text, _) => "text_completion",
        }
    }
}

/// Why an answer ends that calls a tool.
pub(super) const CALLS: &str = "tool_calls";

type Told = (Likelihood, Vec<Likelihood>);

/// What all parts of one reply have in common.
pub(super) struct Head {
    pub(super) style: Style,
    pub(super) id: String,
    pub(super) created_s: u64,
    pub(super) answers: usize,
    pub(super) prompt_tokens: usize,
    /// Put before the text of every answer.
    pub(super) echo: Vec<String>,
    /// Prompts whose tokens are told with how likely they are, each with the first of the answers to it.
    pub(super) echoed: Vec<(usize, Vec<i64>)>,
    pub(super) logprobs: bool,
    /// How a chat's answers are taken apart.
    pub(super) reading: Option<Reading>,
}

impl Head {
    pub(super) fn new(app: &App, style: Style, answers: usize, prompt_tokens: usize, logprobs: bool) -> Head {
        let id = app.next_id(style.id_prefix());
        Head {
            style,
            id,
            created_s: now_s(),
            answers,
            prompt_tokens,
            echo: vec![String::new(); answers],
            echoed: Vec::new(),
            logprobs,
            reading: None,
        }
    }

    fn envelope(&self, app: &App, streams: bool, choices: Vec<Value>) -> Map<String, Value> {
        let mut envelope = Map::new();
        envelope.insert("id".into(), self.id.as_str().into());
        envelope.insert("object".into(), self.style.object(streams).into());
        envelope.insert("created".into(), self.created_s.into());
        envelope.insert("model".into(), app.facts().name.as_str().into());
        envelope.insert("choices".into(), choices.into());
        envelope
    }

    fn usage(&self, completion_tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        })
    }

    /// One piece of a stream.
    pub(super) fn piece(
        &self,
        app: &App,
        answer: usize,
        text: &str,
        told: Option<(&Told, usize)>,
        finish: Option<&str>,
    ) -> Value {
        let logprobs =
            told.map(|(told, offset)| self.logprobs(app, &[(Some(told.clone()), told.0.token)], &[offset]));
        let choice = match self.style {
            Style::Chat => {
                let delta = if text.is_empty() { json!({}) } else { json!({"content": text}) };
                json!({"index": answer, "delta": delta, "logprobs": logprobs, "finish_reason": finish})
            }
            Style::Text => {
                json!({"index": answer, "text": text, "logprobs": logprobs, "finish_reason": finish})
            }
        };
        self.envelope(app, true, vec![choice]).into()
    }

    /// A piece of a chat's stream that is no word of the answer: a thought, or calls of which the first has this number.
    pub(super) fn aside(&self, app: &App, answer: usize, said: &Utterance, first: usize) -> Value {
        let delta = match said {
            Utterance::Thought(text) => json!({"reasoning_content": text}),
            Utterance::Content(text) => json!({"content": text}),
            Utterance::Calls(calls) => {
                let mut calls = calls_told(app, calls);
                for (index, call) in calls.iter_mut().enumerate() {
                    call["index"] = (first + index).into();
                }
                json!({"tool_calls": calls})
            }
        };
        let choice = json!({"index": answer, "delta": delta, "logprobs": null, "finish_reason": null});
        self.envelope(app, true, vec![choice]).into()
    }

    /// The first piece of a chat's stream says who speaks.
    pub(super) fn opening(&self, app: &App, answer: usize) -> Value {
        let delta = json!({"role": "assistant", "content": ""});
        let choice = json!({"index": answer, "delta": delta, "logprobs": null, "finish_reason": null});
        self.envelope(app, true, vec![choice]).into()
    }

    /// The last piece of a stream whose client wants to know what it has used.
    pub(super) fn usage_piece(&self, app: &App, completion_tokens: usize) -> Value {
        let mut piece = self.envelope(app, true, Vec::new());
        piece.insert("usage".into(), self.usage(completion_tokens));
        piece.into()
    }

    /// Tokens with what is told of them: nothing of one that begins a text.
    fn logprobs(&self, app: &App, tokens: &[(Option<Told>, i64)], offsets: &[usize]) -> Value {
        let told = tokens.iter().filter_map(|(told, _)| told.as_ref());
        let text = |token: i64| app.facts().codec.token_text(token).unwrap_or_default();
        match self.style {
            Style::Chat => {
                let one = |of: &Likelihood| {
                    let text = text(of.token);
                    // A part of a character has no bytes of its own that could be told.
                    let bytes =
                        (!text.contains(char::REPLACEMENT_CHARACTER)).then(|| text.as_bytes().to_vec());
                    json!({"token": text, "logprob": of.logprob, "bytes": bytes})
                };
                let each = told.map(|(own, top)| {
                    let mut entry = one(own);
                    entry["top_logprobs"] = top.iter().map(one).collect();
                    entry
                });
                json!({"content": each.collect::<Vec<_>>(), "refusal": null})
            }
            Style::Text => {
                let told = || tokens.iter().map(|(told, _)| told.as_ref());
                let top = told().map(|told| {
                    let top = |(_, top): &Told| -> Map<String, Value> {
                        top.iter().map(|of| (text(of.token), of.logprob.into())).collect()
                    };
                    told.map(top)
                });
                let own = told().map(|told| told.map(|(own, _)| own.logprob));
                json!({
                    "tokens": tokens.iter().map(|(_, token)| text(*token)).collect::<Vec<_>>(),
                    "token_logprobs": own.collect::<Vec<_>>(),
                    "top_logprobs": top.collect::<Vec<_>>(),
                    "text_offset": offsets,
                })
            }
        }
    }
}

/// Calls in OpenAI's words.
fn calls_told(app: &App, calls: &[Call]) -> Vec<Value> {
    let one = |call: &Call| {
        json!({"id": app.next_id("call"), "type": "function",
               "function": {"name": call.name, "arguments": call.arguments}})
    };
    calls.iter().map(one).collect()
}

/// The message that a chat's answer is, and whether it calls a tool.
fn message(app: &App, reading: Option<&Reading>, text: String) -> (Value, bool) {
    let Some(reading) = reading else {
        return (json!({"role": "assistant", "content": text, "refusal": null}), false);
    };
    let mut spoken = reading.begin();
    let mut said = spoken.push(&text);
    said.extend(spoken.finish());
    let (mut thought, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    for one in said {
        match one {
            Utterance::Thought(text) => thought += &text,
            Utterance::Content(text) => content += &text,
            Utterance::Calls(more) => calls.extend(more),
        }
    }
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !thought.is_empty() {
        message["reasoning_content"] = thought.into();
    }
    if !calls.is_empty() {
        if content.is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls_told(app, &calls).into();
    }
    (message, !calls.is_empty())
}

#[derive(Default)]
struct Gathered {
    text: String,
    told: Vec<(Option<Told>, i64)>,
    offsets: Vec<usize>,
    finish: Option<&'static str>,
}

/// The tokens of a prompt with what is told of them, and where the text of each begins, in characters.
fn echoed(
    app: &App,
    prompt: &[i64],
    told: Vec<Told>,
) -> Result<(Vec<(Option<Told>, i64)>, Vec<usize>), TextError> {
    let (mut detokenizer, mut length, mut offsets) = (Detokenizer::default(), 0, Vec::new());
    for &token in prompt {
        offsets.push(length);
        length += detokenizer.push(&app.facts().codec, token)?.chars().count();
    }
    let told = std::iter::once(None).chain(told.into_iter().map(Some));
    Ok((told.zip(prompt.iter().copied()).collect(), offsets))
}

/// Waits for all answers and gives them as one reply.
pub(super) async fn whole(app: &App, head: &Head, mut events: UnboundedReceiver<Event>) -> Response {
    let mut answers: Vec<Gathered> =
        head.echo.iter().map(|text| Gathered { text: text.clone(), ..Default::default() }).collect();
    let (mut finished, mut completion_tokens) = (0, 0);
    let mut scored: HashMap<usize, Vec<Told>> = HashMap::new();
    while finished < head.answers || scored.len() < head.echoed.len() {
        match events.recv().await {
            Some(Event::Scored { answer, tokens }) => drop(scored.insert(answer, tokens)),
            Some(Event::Token { answer, text, logprobs }) => {
                let gathered = &mut answers[answer];
                if let Some(told) = logprobs {
                    gathered.offsets.push(gathered.text.chars().count());
                    let token = told.0.token;
                    gathered.told.push((Some(told), token));
                }
                gathered.text += &text;
            }
            Some(Event::Finished { answer, text, finish, tokens }) => {
                answers[answer].text += &text;
                answers[answer].finish = Some(finish.name());
                completion_tokens += tokens;
                finished += 1;
            }
            Some(Event::Embedding { .. }) => {}
            Some(Event::Trouble(trouble)) => return Fault::from(trouble).into_response(),
            None => return Fault::from(Trouble::Failed("it has ended".into())).into_response(),
        }
    }
    for (first, prompt) in &head.echoed {
        let told = scored.remove(first).unwrap_or_default();
        let (told, offsets) = match echoed(app, prompt, told) {
            Ok(echoed) => echoed,
            Err(error) => return Fault::field("prompt", error.to_string()).into_response(),
        };
        for gathered in answers.iter_mut().skip(*first).take(head.answers / head.echoed.len().max(1)) {
            gathered.told.splice(..0, told.iter().cloned());
            gathered.offsets.splice(..0, offsets.iter().copied());
        }
    }
    let choices = answers.into_iter().enumerate().map(|(index, gathered)| {
        let Gathered { text, told, offsets, finish } = gathered;
        let logprobs = head.logprobs.then(|| head.logprobs(app, &told, &offsets));
        match head.style {
            Style::Chat => {
                let (message, calls) = message(app, head.reading.as_ref(), text);
                let finish = if calls { Some(CALLS) } else { finish };
                json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
            }
            Style::Text => {
                json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})
            }
        }
    });
    let mut body = head.envelope(app, false, choices.collect());
    body.insert("usage".into(), head.usage(completion_tokens));
    axum::Json(Value::from(body)).into_response()
}
