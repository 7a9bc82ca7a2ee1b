//! What trains also generates: on the training engine's own weights, of which nothing is copied.
//!
//! DeepSpeed's `hybrid_engine`, for training that learns from what the model writes. A pass reads the parameters as training does,
//! so weights may be whole, sharded, in slices, spread as experts or offloaded, and are always those of the last step. Where
//! ranks bring each other weights, they make their passes together: one whose texts are complete accompanies the others. Stage 3
//! follows an order of reads that generation has for itself, and training keeps its own.
//!
//! A model in stages is refused: no rank has all of it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use ferrospeed_comm::{Group, ReduceOp};
use ferrospeed_models::Decoder;
use ferrospeed_zero::ZeroStore;

use crate::core::pool::BLOCK_TOKENS;
use crate::core::schedule::{Limits, SequenceId};
use crate::inference::engine::GenerateCall;
use crate::inference::{InferenceError, Result};
use crate::runner::{Runner, Said, Wish};
use crate::sampling::{SamplingOptions, choose};

/// Sequences that are worked on at once.
const RUNNING: usize = 64;
/// Tokens of a pass.
const PASS_TOKENS: usize = 512;

/// What bounds generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HybridOptions {
    /// Tokens of prompt and answer together.
    pub max_out_tokens: usize,
    /// Whether the cache is given back after every call.
    pub release_inference_cache: bool,
}

/// A model in training that generates.
pub struct HybridEngine {
    model: Arc<Decoder>,
    store: Arc<ZeroStore>,
    options: HybridOptions,
    /// All ranks, where their passes meet.
    ranks: Option<Group>,
    slices: Option<Group>,
    /// The cache, and for how many texts of the longest kind it has room.
    cache: Option<(Runner, usize)>,
}

impl HybridEngine {
    /// As the `hybrid_engine` section of the training engine's configuration says. All ranks call it, and then every method.
    pub fn new(engine: &ferrospeed_engine::Engine, model: Arc<Decoder>) -> Result<HybridEngine> {
        let Some(section) = &engine.config().hybrid_engine else {
            let why = "the configuration does not enable it: add \"hybrid_engine\": {\"enabled\": true}";
            return Err(InferenceError::NotBuilt { what: "generate".into(), why: why.into() });
        };
        let options = HybridOptions {
            max_out_tokens: usize::try_from(section.max_out_tokens).unwrap_or(usize::MAX),
            release_inference_cache: section.release_inference_cache,
        };
        HybridEngine::with(engine, model, options)
    }

    /// The same with options of the caller's own.
    pub fn with(
        engine: &ferrospeed_engine::Engine,
        model: Arc<Decoder>,
        options: HybridOptions,
    ) -> Result<HybridEngine> {
        if engine.is_pipeline() {
            let why = "no rank has all of it; export the weights and use `ferrospeed generate`".to_owned();
            return Err(InferenceError::NotBuilt { what: "generation by a model in stages".into(), why });
        }
        Ok(HybridEngine {
            options: HybridOptions {
                max_out_tokens: options.max_out_tokens.min(model.longest_paged()),
                ..options
            },
            store: engine.store().clone(),
            ranks: engine.passes_meet().then(|| engine.world().group()),
            slices: engine.slices().cloned(),
            model,
            cache: None,
        })
    }

    /// Goes on with every prompt, by the weights as they are; gives prompts and continuations together. Ranks may bring prompts
    /// of their own, in any number; those that hold slices of one model bring the same. Drawn tokens depend on the seed and on
    /// the prompt's number in the call.
    pub fn generate(&mut self, prompts: &[Vec<i64>], call: &GenerateCall) -> Result<Vec<Vec<i64>>> {
        let checked = self.check(prompts, call);
        self.agree(checked, prompts, call)?;
        let most = if call.max_new_tokens == 0 { 0 } else { prompts.len() };
        let mut runner = self.take_cache(most)?;
        let written = self.write(&mut runner.0, &prompts[..most], call);
        if !self.options.release_inference_cache && written.is_ok() {
            self.cache = Some(runner);
        }
        let mut texts = prompts.to_vec();
        for (text, answer) in texts.iter_mut().zip(written?) {
            text.extend(answer);
        }
        Ok(texts)
    }

    /// Whether memory for keys and values is held between calls.
    pub fn holds_cache(&self) -> bool {
        self.cache.is_some()
    }

    fn check(&self, prompts: &[Vec<i64>], call: &GenerateCall) -> Result<()> {
        if call.num_beams.is_some_and(|beams| beams > 1) {
            let why = "one sequence is followed at a time".to_owned();
            return Err(InferenceError::NotBuilt { what: "`num_beams` > 1".into(), why });
        }
        let most = self.options.max_out_tokens;
        for (number, prompt) in prompts.iter().enumerate() {
            let tokens = prompt.len().saturating_add(call.max_new_tokens);
            if tokens > most {
                return Err(InferenceError::TooLong { tokens, most });
            }
            let known = 0..self.model.config().vocab as i64;
            let why = match prompt.iter().find(|token| !known.contains(token)) {
                Some(token) => format!("has token {token}, which is none of the model's {}", known.end),
                None if prompt.is_empty() => "is empty".to_owned(),
                None => continue,
            };
            return Err(InferenceError::Prompt { number, why });
        }
        Ok(())
    }

    /// Where passes meet, one rank that refuses its prompts holds all of them back, and slices are asked the same.
    fn agree(&self, checked: Result<()>, prompts: &[Vec<i64>], call: &GenerateCall) -> Result<()> {
        let Some(ranks) = &self.ranks else { return checked };
        let mut first_bad = [if checked.is_ok() { ranks.size() } else { ranks.rank() } as i64];
        ranks.all_reduce(&mut first_bad, ReduceOp::Min).map_err(failed)?;
        checked?;
        if first_bad[0] < ranks.size() as i64 {
            return Err(InferenceError::Failed(format!("rank {} refuses its prompts", first_bad[0])));
        }
        let Some(slices) = &self.slices else { return Ok(()) };
        let mut hash = DefaultHasher::new();
        (prompts, call.max_new_tokens, &call.end_tokens, call.sampling.seed).hash(&mut hash);
        let own = hash.finish() as i64;
        let mut all = vec![0; slices.size()];
        slices.all_gather(&[own], &mut all).map_err(failed)?;
        let differs = all.iter().any(|theirs| *theirs != all[0]);
        // Of every group of slices, on all ranks: nobody begins passes that others do not.
        let mut anyone = [i64::from(differs)];
        ranks.all_reduce(&mut anyone, ReduceOp::Max).map_err(failed)?;
        if anyone[0] == 0 {
            return Ok(());
        }
        let why =
            "ranks that hold slices of one model were given different prompts; give all of them the same";
        Err(InferenceError::Failed(why.into()))
    }

    /// A cache with room for so many texts, or for as many as are worked on at once.
    fn take_cache(&mut self, texts: usize) -> Result<(Runner, usize)> {
        let texts = texts.clamp(1, RUNNING);
        if let Some(cache) = self.cache.take().filter(|(_, room)| *room >= texts) {
            return Ok(cache);
        }
        let blocks = self.blocks(texts);
        let new = if self.ranks.is_some() { Runner::new_meeting } else { Runner::new };
        let store = Some(self.store.clone());
        Ok((new(self.model.clone(), blocks, self.store.device(), store)?, texts))
    }

    fn blocks(&self, texts: usize) -> u32 {
        let blocks = self.options.max_out_tokens.div_ceil(BLOCK_TOKENS).saturating_mul(texts);
        u32::try_from(blocks).unwrap_or(u32::MAX - 1)
    }

    fn write(&self, runner: &mut Runner, prompts: &[Vec<i64>], call: &GenerateCall) -> Result<Vec<Vec<i64>>> {
        let limits = Limits {
            pass_tokens: PASS_TOKENS,
            running: RUNNING,
            waiting: prompts.len().max(1),
            sequence_tokens: self.options.max_out_tokens,
        };
        // What blocks held at the last call are keys of other weights: a new scheduler knows nothing of them.
        let mut scheduler = runner.scheduler(limits, self.blocks(prompts.len().clamp(1, RUNNING)));
        let mut places: BTreeMap<SequenceId, usize> = BTreeMap::new();
        for (place, prompt) in prompts.iter().enumerate() {
            let ids = scheduler.submit(prompt, call.max_new_tokens, 1);
            let ids = ids.map_err(|refusal| InferenceError::Failed(format!("{refusal:?}")))?;
            places.extend(ids.into_iter().map(|id| (id, place)));
        }
        let wish = if call.sampling.takes_the_likeliest() { Wish::Likeliest } else { Wish::Logits };
        let mut answers = vec![Vec::new(); prompts.len()];
        loop {
            let plan = scheduler.plan();
            if !self.anyone(!plan.is_empty())? {
                return Ok(answers);
            }
            if plan.is_empty() {
                runner.accompany()?;
                continue;
            }
            let mut next = runner.pass(&scheduler, &plan, |_| wish, || ())?.next.into_iter();
            for share in &plan {
                scheduler.computed(share);
                let (true, Some(&place)) = (share.chooses, places.get(&share.id)) else { continue };
                let Some(said) = next.next() else { continue };
                let answer = &mut answers[place];
                let sampling = SamplingOptions { stream: place as u32, ..call.sampling.clone() };
                let token = match said {
                    Said::Likeliest(token) => token,
                    Said::Logits(logits) => {
                        let choice = choose(&logits, &sampling, &prompts[place], answer);
                        choice.map_err(|why| InferenceError::Failed(why.to_string()))?.token
                    }
                };
                answer.push(token);
                if call.end_tokens.contains(&token) || answer.len() == call.max_new_tokens {
                    scheduler.end(share.id);
                } else {
                    scheduler.push(share.id, token);
                }
            }
        }
    }

    /// Whether this rank, or where passes meet any rank, has something to compute.
    fn anyone(&self, has_work: bool) -> Result<bool> {
        let Some(ranks) = &self.ranks else { return Ok(has_work) };
        let mut anyone = [i64::from(has_work)];
        ranks.all_reduce(&mut anyone, ReduceOp::Max).map_err(failed)?;
        Ok(anyone[0] == 1)
    }
}

fn failed(error: ferrospeed_comm::Error) -> InferenceError {
    InferenceError::Failed(error.to_string())
}
