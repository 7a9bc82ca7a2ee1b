//! `/v1/completions`: goes on with a text.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::mpsc::unbounded_channel;

use super::fault::Fault;
use super::fields::Fields;
use super::parameters::{Parameters, tokens};
use super::reply::{Head, Style, whole};
use super::{App, form, stream};
use crate::request::{Event, Finish};

/// Prompts of one request.
const MAX_PROMPTS: usize = 64;
/// Tokens of an answer where nothing is said: OpenAI's number.
const DEFAULT_TOKENS: usize = 16;

pub(super) async fn answer(State(app): State<Arc<App>>, fields: Fields) -> Response {
    match submit(&app, fields).await {
        Ok(response) => response,
        Err(fault) => fault.into_response(),
    }
}

async fn submit(app: &Arc<App>, mut fields: Fields) -> Result<Response, Fault> {
    let mut parameters = Parameters::read(&mut fields, app, Some(DEFAULT_TOKENS))?;
    let form = form::read(&mut fields)?;
    let prompts = prompts(app, &mut fields, "prompt")?;
    let logprobs = fields.whole("logprobs", 0..=20)?.map(|count| count as usize);
    let echo = fields.flag("echo")?;
    if echo && logprobs.is_some() && parameters.stream {
        let why = "is told whole together with logprobs; leave out one of stream, echo and logprobs";
        return Err(Fault::field("stream", why));
    }
    if parameters.writes_nothing() && !echo {
        return Err(Fault::field("max_tokens", "must be 1 or more; 0 is for echo: true alone"));
    }
    fields.refuse("suffix", |suffix| suffix.as_str() == Some(""))?;
    fields.finish()?;
    parameters.constrain(form::start(app, form).await?);
    let (events, replies) = unbounded_channel();
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let count = prompts.len() * parameters.answers;
    let mut head = Head::new(app, Style::Text, count, prompt_tokens, logprobs.is_some());
    for (index, prompt) in prompts.into_iter().enumerate() {
        let first = index * parameters.answers;
        if echo {
            let text = app
                .facts()
                .codec
                .decode(&prompt)
                .map_err(|error| Fault::field("prompt", error.to_string()))?;
            head.echo[first..first + parameters.answers].fill(text);
        }
        if let (true, Some(alternatives)) = (echo, logprobs) {
            head.echoed.push((first, prompt.clone()));
            app.engine.submit(Parameters::score(app, prompt.clone(), first, alternatives), events.clone());
        }
        if parameters.writes_nothing() {
            for answer in first..first + parameters.answers {
                let (text, finish) = (String::new(), Finish::Length);
                // Whoever asked is here.
                let _ = events.send(Event::Finished { answer, text, finish, tokens: 0 });
            }
        } else {
            app.engine.submit(parameters.request(app, prompt, first, logprobs), events.clone());
        }
    }
    drop(events);
    Ok(match parameters.stream {
        true => stream::pieces(Arc::clone(app), head, parameters.include_usage, replies).await,
        false => whole(app, &head, replies).await,
    })
}

/// Refuses a text of more bytes than `longest` tokens can have, before it costs the time to make tokens of it: they have 64 bytes
/// at most.
pub(super) fn can_fit(text: &str, longest: usize, name: &str) -> Result<(), Fault> {
    if text.len() / 64 <= longest {
        return Ok(());
    }
    let bytes = text.len();
    let fault = Fault::field(name, format!("has {bytes} bytes, which are more than {longest} tokens can be"));
    Err(Fault { code: Some("context_length_exceeded"), ..fault })
}

/// A text, a list of texts, a list of tokens, or a list of such lists.
pub(super) fn prompts(app: &App, fields: &mut Fields, name: &str) -> Result<Vec<Vec<i64>>, Fault> {
    let facts = app.facts();
    let encode = |text: &str| -> Result<Vec<i64>, Fault> {
        can_fit(text, facts.longest, name)?;
        let ids = facts.codec.encode_prompt(text).map_err(|error| Fault::field(name, error.to_string()))?;
        facts.readable(ids).map_err(|why| Fault::field(name, why))
    };
    let wrong = || {
        Fault::field(
            name,
            format!("must be a string, up to {MAX_PROMPTS} strings, or tokens below {}", facts.vocabulary),
        )
    };
    match fields.take(name) {
        None => Err(Fault::field(name, "is missing")),
        Some(Value::String(text)) => Ok(vec![encode(&text)?]),
        Some(Value::Array(list)) if list.is_empty() => Err(wrong()),
        Some(Value::Array(list)) if list[0].is_number() => {
            Ok(vec![tokens(&list, facts.vocabulary).ok_or_else(wrong)?])
        }
        Some(Value::Array(list)) if list.len() <= MAX_PROMPTS => {
            let one = |value: &Value| match value {
                Value::String(text) => encode(text),
                Value::Array(ids) => tokens(ids, facts.vocabulary).ok_or_else(wrong),
                _ => Err(wrong()),
            };
            list.iter().map(one).collect()
        }
        Some(_) => Err(wrong()),
    }
}
