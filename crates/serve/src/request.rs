//! What clients ask the engine for, and what it tells them.

use std::time::Instant;

use tokio::sync::mpsc;

use crate::core::schedule::Refusal;
use crate::sampling::{Likelihood, SamplingOptions};

/// A request, checked and in tokens.
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<i64>,
    /// What is wanted of it.
    pub work: Work,
    /// Its answers are numbered from this on, so that several requests can share one channel.
    pub first_answer: usize,
    /// It is given up at this time.
    pub deadline: Instant,
}

/// What is wanted.
#[derive(Debug, Clone)]
pub enum Work {
    /// Answers, one for each way of choosing.
    Generate {
        /// How each answer chooses its tokens.
        answers: Vec<SamplingOptions>,
        /// Tokens of an answer, at most; as many as fit when absent.
        max_tokens: Option<usize>,
        /// Texts that end an answer.
        stops: Vec<String>,
        /// Tokens that end an answer.
        stop_tokens: Vec<i64>,
        /// Whether tokens with a meaning of their own are read.
        special: Special,
    },
    /// The hidden state behind the last token.
    Embed,
    /// How likely the model holds the prompt's own tokens.
    Score {
        /// The first token that is scored; at least 1, for nothing predicts token 0.
        from: usize,
        /// How many alternatives are told of each.
        alternatives: usize,
    },
}

/// What the text of an answer shows of tokens that have a meaning of their own, such as one that begins a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Special {
    /// Nothing.
    #[default]
    Hidden,
    /// Their names.
    Shown,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A token that ends texts, or the end of the answer's form.
    Stop,
    /// A stop string: the one with this number among those of the request.
    StopText(usize),
    /// It has as many tokens as it may have.
    Length,
}

impl Finish {
    /// As OpenAI's interface calls it.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop | Finish::StopText(_) => "stop",
            Finish::Length => "length",
        }
    }
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// It was not taken.
    #[error("{0}")]
    Refused(Refusal),
    /// Its time was over.
    #[error("the request's time is over")]
    TimedOut,
    /// The server is going away.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// A pass failed; why the log says.
    #[error("the engine failed: {0}")]
    Failed(String),
}

/// What the engine tells of a request, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A token was chosen for an answer.
    Token {
        /// Which answer.
        answer: usize,
        /// The text that is certain now; may be empty.
        text: String,
        /// Where they were asked for.
        logprobs: Option<(Likelihood, Vec<Likelihood>)>,
    },
    /// An answer is complete.
    Finished {
        /// Which.
        answer: usize,
        /// The text that was held back.
        text: String,
        /// Why.
        finish: Finish,
        /// How many tokens were computed for it.
        tokens: usize,
    },
    /// The hidden state that was asked for.
    Embedding {
        /// Of which request.
        answer: usize,
        /// The state.
        values: Vec<f32>,
    },
    /// How likely the prompt's tokens are.
    Scored {
        /// Of which request.
        answer: usize,
        /// Each of them from the first that was asked for, and the likeliest alternatives.
        tokens: Vec<(Likelihood, Vec<Likelihood>)>,
    },
    /// Nothing more will come.
    Trouble(Trouble),
}

/// Where events go. A client that is gone has dropped the other end.
pub type Events = mpsc::UnboundedSender<Event>;
