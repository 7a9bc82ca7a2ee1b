//! `/v1/embeddings`: the hidden state behind a text's last token, of length one.
//!
//! A causal model has seen all of a text only there. Its last block's output, after the final norm, is scaled to unit
//! length, as OpenAI's vectors are.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

use super::App;
use super::completions::prompts;
use super::fault::Fault;
use super::fields::Fields;
use crate::request::{Event, Request, Trouble, Work};

pub(super) async fn answer(State(app): State<Arc<App>>, fields: Fields) -> Response {
    match embed(&app, fields).await {
        Ok(body) => axum::Json(body).into_response(),
        Err(fault) => fault.into_response(),
    }
}

async fn embed(app: &App, mut fields: Fields) -> Result<Value, Fault> {
    let facts = app.facts();
    if let Some(asked) = fields.text("model")?
        && asked != facts.name
    {
        return Err(Fault::no_model(&asked, &facts.name));
    }
    let inputs = prompts(app, &mut fields, "input")?;
    let most = app.engine.limits().sequence_tokens;
    if let Some(long) = inputs.iter().map(Vec::len).find(|tokens| *tokens > most) {
        let fault = Fault::field("input", format!("has {long} tokens, and {most} are the most; shorten it"));
        return Err(Fault { code: Some("context_length_exceeded"), ..fault });
    }
    let as_base64 = match fields.text("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(Fault::field("encoding_format", "must be float or base64")),
    };
    fields.refuse("dimensions", |_| false)?;
    fields.finish()?;
    let (count, prompt_tokens) = (inputs.len(), inputs.iter().map(Vec::len).sum::<usize>());
    let (events, mut replies) = unbounded_channel();
    let deadline = Instant::now() + app.options.request_time;
    for (first_answer, prompt) in inputs.into_iter().enumerate() {
        app.engine.submit(Request { prompt, work: Work::Embed, first_answer, deadline }, events.clone());
    }
    drop(events);
    let mut found: Vec<Option<Value>> = vec![None; count];
    while found.iter().any(Option::is_none) {
        match replies.recv().await {
            Some(Event::Embedding { answer, values }) => found[answer] = Some(vector(&values, as_base64)?),
            Some(Event::Trouble(trouble)) => return Err(trouble.into()),
            Some(_) => {}
            None => return Err(Trouble::Failed("it has ended".into()).into()),
        }
    }
    let entry = |(index, vector)| json!({"object": "embedding", "index": index, "embedding": vector});
    Ok(json!({
        "object": "list", "model": facts.name,
        "data": found.into_iter().flatten().enumerate().map(entry).collect::<Vec<_>>(),
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    }))
}

/// Scaled to length one; zeros stay zeros.
fn vector(values: &[f32], as_base64: bool) -> Result<Value, Fault> {
    if values.iter().any(|value| !value.is_finite()) {
        return Err(Trouble::Failed("the model's hidden state is no number".into()).into());
    }
    let norm = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    let scaled = values.iter().map(|&value| if norm > 0.0 { (f64::from(value) / norm) as f32 } else { 0.0 });
    if as_base64 {
        let bytes: Vec<u8> = scaled.flat_map(f32::to_le_bytes).collect();
        return Ok(base64::engine::general_purpose::STANDARD.encode(bytes).into());
    }
    Ok(scaled.collect::<Vec<f32>>().into())
}
