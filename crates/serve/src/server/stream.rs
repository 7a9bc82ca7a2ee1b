//! Answers as server-sent events, token by token.
//!
//! The status is sent with the first token, so that a request that is refused gets its 4xx. When the client goes, the
//! stream's end is dropped, which the engine notices.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::mpsc::{Sender, UnboundedReceiver, channel};
use tokio_stream::wrappers::ReceiverStream;

use super::App;
use super::fault::Fault;
use super::reply::{CALLS, Head, Style};
use super::spoken::{Spoken, Utterance};
use crate::request::{Event, Trouble};

/// Pieces that wait for a slow client before the stream waits too; the engine never does.
const AHEAD: usize = 64;

pub(super) async fn pieces(
    app: Arc<App>,
    head: Head,
    include_usage: bool,
    mut events: UnboundedReceiver<Event>,
) -> Response {
    let first = match events.recv().await {
        Some(Event::Trouble(trouble)) => return Fault::from(trouble).into_response(),
        None => return Fault::from(Trouble::Failed("it has ended".into())).into_response(),
        Some(event) => event,
    };
    let (out, stream) = channel::<Result<Bytes, Infallible>>(AHEAD);
    tokio::spawn(async move {
        let lengths = head.echo.iter().map(|text| text.chars().count()).collect();
        let spoken = head.reading.iter().flat_map(|reading| vec![reading.begin(); head.answers]).collect();
        let calls = vec![0; head.answers];
        let mut teller = Teller { lengths, spoken, calls, app, head, out };
        // A client that went away ends it early.
        let _ = teller.tell(first, include_usage, events).await;
    });
    let kinds = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (kinds, Body::from_stream(ReceiverStream::new(stream))).into_response()
}

struct Gone;

struct Teller {
    app: Arc<App>,
    head: Head,
    out: Sender<Result<Bytes, Infallible>>,
    /// Characters told of each answer.
    lengths: Vec<usize>,
    /// A chat's answers, as they are taken apart.
    spoken: Vec<Spoken>,
    /// Calls told of each answer.
    calls: Vec<usize>,
}

impl Teller {
    async fn send(&self, text: String) -> Result<(), Gone> {
        self.out.send(Ok(Bytes::from(text))).await.map_err(|_| Gone)
    }

    async fn say(&self, piece: &Value) -> Result<(), Gone> {
        self.send(format!("data: {piece}\n\n")).await
    }

    /// The words of more of an answer's text; what it thinks and calls is told at once.
    async fn words(&mut self, answer: usize, text: String, is_last: bool) -> Result<String, Gone> {
        let Some(spoken) = self.spoken.get_mut(answer) else { return Ok(text) };
        let mut said = spoken.push(&text);
        if is_last {
            said.extend(spoken.finish());
        }
        let mut words = String::new();
        for one in said {
            match one {
                Utterance::Content(text) => words += &text,
                aside => {
                    // Words before a call come before it.
                    if !words.is_empty() {
                        let before = Utterance::Content(std::mem::take(&mut words));
                        self.say(&self.head.aside(&self.app, answer, &before, 0)).await?;
                    }
                    self.say(&self.head.aside(&self.app, answer, &aside, self.calls[answer])).await?;
                    if let Utterance::Calls(calls) = &aside {
                        self.calls[answer] += calls.len();
                    }
                }
            }
        }
        Ok(words)
    }

    async fn tell(
        &mut self,
        first: Event,
        include_usage: bool,
        mut events: UnboundedReceiver<Event>,
    ) -> Result<(), Gone> {
        for answer in 0..self.head.answers {
            if self.head.style == Style::Chat {
                self.say(&self.head.opening(&self.app, answer)).await?;
            } else if !self.head.echo[answer].is_empty() {
                let echo = self.head.piece(&self.app, answer, &self.head.echo[answer], None, None);
                self.say(&echo).await?;
            }
        }
        let (mut event, mut finished, mut tokens) = (Some(first), 0, 0);
        while let Some(said) = event.take() {
            match said {
                Event::Token { answer, text, logprobs } => {
                    let text = self.words(answer, text, false).await?;
                    let offset = self.lengths[answer];
                    self.lengths[answer] += text.chars().count();
                    if !text.is_empty() || logprobs.is_some() {
                        let told = logprobs.as_ref().map(|told| (told, offset));
                        self.say(&self.head.piece(&self.app, answer, &text, told, None)).await?;
                    }
                }
                Event::Finished { answer, text, finish, tokens: used } => {
                    let text = self.words(answer, text, true).await?;
                    let finish = if self.calls[answer] > 0 { CALLS } else { finish.name() };
                    self.say(&self.head.piece(&self.app, answer, &text, None, Some(finish))).await?;
                    (finished, tokens) = (finished + 1, tokens + used);
                }
                Event::Embedding { .. } | Event::Scored { .. } => {}
                Event::Trouble(trouble) => return self.say(&Fault::from(trouble).body()).await,
            }
            if finished == self.head.answers {
                break;
            }
            event = tokio::select! {
                event = events.recv() => event,
                () = self.out.closed() => return Err(Gone),
            };
            if event.is_none() {
                return self.say(&Fault::from(Trouble::Failed("it has ended".into())).body()).await;
            }
        }
        if include_usage {
            self.say(&self.head.usage_piece(&self.app, tokens)).await?;
        }
        self.send("data: [DONE]\n\n".to_owned()).await
    }
}
