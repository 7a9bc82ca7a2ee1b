//! A model behind the engine that serves, and questions to it: a few at a time, answered in their order.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrospeed_serve::Engine;
use ferrospeed_serve::core::schedule::Limits;
use ferrospeed_serve::engine::Replies;
use ferrospeed_serve::model::{ModelFacts, OpenOptions, open};
use ferrospeed_serve::request::{Event, Request, Special, Work};
use ferrospeed_serve::sampling::SamplingOptions;
use ferrospeed_tensor::Device;

use crate::error::{EvaluateError, Result};

/// An answer that takes longer has failed: nobody waits for ever.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// Questions that are worked on at once.
const RUNNING: usize = 64;
/// Tokens of a pass.
const PASS_TOKENS: usize = 1024;

/// A model that can be asked.
#[derive(Debug)]
pub struct Model {
    engine: Engine,
    path: PathBuf,
}

impl Model {
    /// Opens the model in a Hugging Face directory or a GGUF file, in a type of its own or another.
    pub fn open(path: &Path, dtype: Option<&str>, device: &Device) -> Result<Model> {
        let options =
            OpenOptions { dtype: dtype.map(str::to_owned), running: RUNNING, ..OpenOptions::default() };
        let (facts, runner, blocks) = open(path, &options, device)?;
        let limits = Limits {
            pass_tokens: PASS_TOKENS,
            running: RUNNING,
            waiting: 4 * RUNNING,
            sequence_tokens: usize::MAX,
        };
        let engine = Engine::start(facts, runner, blocks, limits).map_err(EvaluateError::Engine)?;
        Ok(Model { engine, path: path.to_path_buf() })
    }

    /// What is known of it.
    pub fn facts(&self) -> &ModelFacts {
        self.engine.facts()
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tokens that a text may have.
    pub fn longest(&self) -> usize {
        self.engine.limits().sequence_tokens
    }

    fn submit(&self, prompt: Vec<i64>, work: Work) -> Replies {
        self.engine.ask(Request { prompt, work, first_answer: 0, deadline: Instant::now() + PATIENCE })
    }

    /// Asks how likely the tokens of a text are from `from` on.
    pub(crate) fn score(&self, tokens: Vec<i64>, from: usize) -> Pending {
        Pending(self.submit(tokens, Work::Score { from, alternatives: 0 }))
    }

    /// Asks for the likeliest continuation of so many tokens at most.
    pub(crate) fn write(&self, prompt: Vec<i64>, max_tokens: usize, stops: Vec<String>) -> Pending {
        let stop_tokens = self.facts().end_tokens.clone();
        let answers = vec![SamplingOptions::default()];
        Pending(self.submit(
            prompt,
            Work::Generate {
                answers,
                max_tokens: Some(max_tokens),
                stops,
                stop_tokens,
                special: Special::Hidden,
            },
        ))
    }
}

/// A question that is under way.
pub(crate) struct Pending(Replies);

impl Pending {
    /// The log-probabilities that were asked for, or what the engine says in place of them.
    pub(crate) fn scores(self) -> Result<Vec<f32>, String> {
        for event in self.0 {
            match event {
                Event::Scored { tokens, .. } => {
                    return Ok(tokens.into_iter().map(|(own, _)| own.logprob).collect());
                }
                Event::Trouble(trouble) => return Err(trouble.to_string()),
                _ => {}
            }
        }
        Err("the engine has ended".into())
    }

    /// The text that was written.
    pub(crate) fn text(self) -> Result<String, String> {
        let mut written = String::new();
        for event in self.0 {
            match event {
                Event::Token { text, .. } => written += &text,
                Event::Finished { text, .. } => return Ok(written + &text),
                Event::Trouble(trouble) => return Err(trouble.to_string()),
                _ => {}
            }
        }
        Err("the engine has ended".into())
    }
}

/// Things that are under way, handed on in their order; only so many at once.
pub(crate) struct InOrder<T, F: FnMut(T) -> Result<()>> {
    waiting: VecDeque<T>,
    done: F,
}

impl<T, F: FnMut(T) -> Result<()>> InOrder<T, F> {
    pub(crate) fn new(done: F) -> InOrder<T, F> {
        InOrder { waiting: VecDeque::new(), done }
    }

    /// Adds one; where there are many, the first is waited for.
    pub(crate) fn add(&mut self, item: T) -> Result<()> {
        self.waiting.push_back(item);
        match self.waiting.len() > RUNNING {
            true => self.waiting.pop_front().map_or(Ok(()), &mut self.done),
            false => Ok(()),
        }
    }

    /// Waits for all that are left.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.waiting.into_iter().try_for_each(&mut self.done)
    }
}
