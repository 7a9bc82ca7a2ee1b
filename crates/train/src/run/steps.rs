//! The parts of a run: going on from a checkpoint, a step, an evaluation, a sample of text.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use ferrospeed_comm::{ReduceOp, tell};
use ferrospeed_data::Split;
use ferrospeed_engine::{BackwardOptions, StepReport};
use ferrospeed_models::{Decoder, Tokens};
use ferrospeed_observe::trace::Activity;
use ferrospeed_observe::{EvalRecord, StepRecord};
use ferrospeed_serve::hybrid::{HybridEngine, HybridOptions};
use ferrospeed_serve::inference::engine::GenerateCall;
use ferrospeed_serve::sampling::SamplingOptions;
use ferrospeed_tensor::{Param, Tensor};

use super::listening::Listening;
use super::{Progress, Run, RunInfo};
use crate::architecture::{self, check_adapter, check_same};
use crate::checkpoint::{Checkpoints, Ending, Resumed, RunState, StopRequests};
use crate::error::{Result, TrainError};
use crate::folder::RunFolder;
use crate::health::Health;
use crate::objective::Objective;
use crate::resume::Resume;
use crate::told::{self, Own};

impl Run<'_> {
    /// Goes on from a checkpoint, if one is asked for and there.
    pub(super) fn resume(
        &mut self,
        checkpoints: &Checkpoints,
        resume: &Resume,
        folder: &RunFolder,
        progress: &mut dyn Progress,
    ) -> Result<Option<Resumed>> {
        let Some((loaded, state)) = checkpoints.load(&mut self.engine, resume, folder, progress)? else {
            return Ok(None);
        };
        let mut changes = loaded.changes;
        if checkpoints.begins_optimizer_anew() {
            changes.push("the optimizer's states begin anew".to_owned());
        }
        let (own, step) = (self.state(), self.engine.global_steps());
        let pass = state.as_ref().and_then(|state| state.pass.clone());
        let earlier = state.as_ref().map(|state| state.trail).unwrap_or_default();
        self.health = Health::new(self.recipe.max_bad_steps, self.engine.config().precision, step, earlier);
        if let Some(state) = state {
            check_same(&loaded.path, &state.model_config, &self.model_config)?;
            check_adapter(&loaded.path, state.adapter.as_ref(), self.adapter.as_ref())?;
            changes.extend(architecture::changes(&state.model_config, &self.model_config));
            self.tokens = state.tokens;
            self.best = state.best;
            self.owes_validation = state.owes_validation;
            if let (Some(before), Some(now)) = (&state.data, &self.data) {
                changes.extend(before.changes(now));
            }
            for (what, before, now) in [
                ("sequences to train on", state.train_sequences, own.train_sequences),
                ("tokens per sequence", state.sequence, own.sequence),
            ] {
                if before != now {
                    changes.push(format!("{what}: {before} -> {now}; the order of samples is another one"));
                }
            }
        }
        if self.engine.seed() != self.recipe.seed {
            changes.push(format!("seed: the saved {} is kept, not {}", self.engine.seed(), self.recipe.seed));
        }
        self.position.samples = loaded.data_position;
        let count = self.sequences.count(Split::Train);
        changes.extend(self.order.go_on(count, self.engine.seed(), pass.as_ref(), step));
        self.model.seed_sparse_attention(self.engine.seed());
        Ok(Some(Resumed { path: loaded.path, step, changes }))
    }

    /// What a checkpoint holds besides the engine's state.
    pub(super) fn state(&self) -> RunState {
        RunState {
            tokens: self.tokens,
            train_sequences: self.sequences.count(Split::Train),
            sequence: self.recipe.data.sequence,
            model_config: self.model_config.clone(),
            data: self.data.clone(),
            trail: self.health.trail(),
            pass: self.order.pass().cloned(),
            best: self.best,
            owes_validation: self.owes_validation,
            adapter: self.adapter.clone(),
        }
    }

    pub(super) fn info(
        &self,
        warnings: Vec<String>,
        resumed: Option<Resumed>,
        peak_flops_per_s: f64,
    ) -> RunInfo {
        let (trained, _) = self.model.parameters().partition(Param::is_trainable);
        RunInfo {
            parameters: self.model.parameters().whole_numel() as u64,
            trained: trained.whole_numel() as u64,
            ranks: self.engine.world().size(),
            steps: self.recipe.steps,
            stage: self.engine.config().zero.stage.number(),
            dtype: self.engine.store().dtype().to_string(),
            batch: self.engine.train_batch_size(),
            sequence: self.recipe.data.sequence,
            train_sequences: self.sequences.count(Split::Train),
            validation_sequences: self.sequences.count(Split::Validation),
            warnings,
            peak_flops_per_s,
            division: self.engine.division().map(ToString::to_string),
            resumed,
        }
    }

    /// The first `kept` tokens of some sequences.
    pub(super) fn batch(&self, split: Split, indices: impl Iterator<Item = u64>, kept: u64) -> Result<Batch> {
        let (length, kept) = (self.recipe.data.sequence as usize, kept as usize);
        let (mut ids, mut documents, mut labels) = (Vec::new(), Vec::new(), Vec::new());
        for index in indices {
            let start = ids.len();
            ids.resize(start + length, 0);
            self.sequences.read(split, index, &mut ids[start..])?;
            ids.truncate(start + kept);
            documents.extend(self.sequences.documents(split, index, &ids[start..])?);
            if let Some(trained) = self.sequences.trained(split, index, kept)? {
                let pairs = ids[start..].iter().zip(trained);
                labels.extend(pairs.map(|(&id, trained)| if trained { id } else { IGNORED }));
            }
        }
        let documents = Some(documents).filter(|documents| !documents.is_empty());
        let shape = [ids.len() / kept, kept];
        let device = self.engine.device();
        let tokens = Tokens { documents, ..Tokens::new(Tensor::from_slice(&ids, shape, device)?) };
        Ok(match labels.is_empty() {
            true => {
                Batch { predicted: tokens.predicted(), labels: tokens.ids.clone(), tokens, is_masked: false }
            }
            false => Batch {
                predicted: learnt(&labels, kept, tokens.documents.as_deref()),
                labels: Tensor::from_slice(&labels, shape, device)?,
                tokens,
                is_masked: true,
            },
        })
    }

    /// Where a part of the tokens is learnt, every learnt token of a step counts alike, whichever micro-batch and rank has it.
    fn weigh(&self, batches: &mut [Batch]) -> Result<()> {
        if !batches.iter().any(|batch| batch.is_masked) {
            return Ok(());
        }
        let mut sum = [batches.iter().map(|batch| batch.predicted as f64).sum::<f64>()];
        self.engine.world().group().all_reduce(&mut sum, ReduceOp::Sum)?;
        // Ranks that share samples have each counted them.
        let ranks = self.engine.data_ranks();
        let all = sum[0] / (self.engine.world().size() / ranks).max(1) as f64;
        let even = (batches.len() * ranks) as f64 / all.max(1.0);
        for batch in batches {
            batch.tokens.weight = Some((batch.predicted as f64 * even) as f32);
        }
        Ok(())
    }

    /// The rows of a step's micro-batches on this rank.
    fn indices_of_step(&self) -> Vec<Vec<u64>> {
        let (rank, ranks) = (self.engine.data_rank() as u64, self.engine.data_ranks() as u64);
        let size = self.engine.train_micro_batch_size_per_gpu();
        let of = |micro| self.order.micro_batch(self.position, micro, rank, ranks, size);
        (0..self.engine.gradient_accumulation_steps()).map(of).collect()
    }

    /// One optimizer step; says whether any rank was asked to stop, and how.
    pub(super) fn step(
        &mut self,
        step: u64,
        requests: &StopRequests,
    ) -> Result<(StepRecord, Option<Ending>)> {
        let start = Instant::now();
        let device = self.engine.device().clone();
        device.backend().reset_peak_memory();
        let (lr, loss_scale) =
            (self.engine.get_lr().first().copied().unwrap_or(0.0), self.engine.loss_scale());
        let length = self.engine.curriculum_length(self.recipe.data.sequence);
        let reading = Instant::now();
        self.order.begin_step(step, self.position, self.engine.train_batch_size());
        let indices = self.indices_of_step();
        let ((loss, report), share, measures) = if self.objective == Objective::NextToken {
            let batches = indices.into_iter().map(|own| self.batch(Split::Train, own.into_iter(), length));
            let mut batches = batches.collect::<Result<Vec<_>>>()?;
            self.weigh(&mut batches)?;
            self.engine.trace(Activity::Files, "data", reading);
            let share = share_with_targets(&batches);
            (self.train_on(batches)?, share, BTreeMap::new())
        } else {
            self.engine.trace(Activity::Files, "data", reading);
            let (trained, measures) = self.train_on_comparisons(&indices)?;
            (trained, 1.0, measures)
        };
        self.tell_checkpoint_times();
        self.position.samples += self.engine.train_batch_size();
        let tokens = self.engine.train_batch_size() * length;
        self.tokens += tokens;
        let (memory, times) = (device.memory_usage(), self.engine.last_step_times());
        let own = Own { loss, share, requests: requests.asked(), times, memory };
        let told = told::tell(&self.engine.world().group(), own)?;
        let seconds = start.elapsed().as_secs_f64();
        let record = StepRecord {
            step,
            // Stages have agreed on it, and averaging equal numbers may round.
            loss: told.loss.map_or(f32::NAN, |told| if self.engine.stage().1 > 1 { loss } else { told }),
            no_targets: told.loss.is_none(),
            lr,
            grad_norm: match report {
                StepReport::Applied { grad_norm } => Some(grad_norm),
                _ => None,
            },
            tokens: self.tokens,
            tokens_per_s: tokens as f64 / seconds,
            step_ms: seconds * 1e3,
            forward_ms: times.forward.as_secs_f64() * 1e3,
            backward_ms: times.backward.as_secs_f64() * 1e3,
            optimizer_ms: times.step.as_secs_f64() * 1e3,
            flops_per_s: self.flops_per_token * tokens as f64 / seconds,
            memory_bytes: told::peaks(&memory),
            skipped: matches!(report, StepReport::Skipped { .. }),
            loss_scale,
            routing: Vec::new(),
            ranks: told.times,
            rank_memory_bytes: told.memory,
            layer_norms: self.engine.layer_norms().to_vec(),
            measures,
        };
        Ok((record, Ending::asked(told.requests)))
    }

    /// With `activation_checkpointing.profile`, how long recomputed blocks took in the last step.
    pub(super) fn tell_checkpoint_times(&self) {
        let Some(times) = &self.checkpoint_times else { return };
        let time = times.take();
        if self.engine.world().rank() == 0 {
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let (forward, backward) = (ms(time.forward), ms(time.backward));
            tell(&format!(
                "time (ms) | checkpointed forward: {forward:.2} | checkpointed backward: {backward:.2} | calls: {}",
                time.calls
            ));
        }
    }

    /// Takes a step on some micro-batches; returns the mean loss of those that have something to predict, of this rank's or of
    /// all (0 where none has), and what became of it.
    fn train_on(&mut self, batches: Vec<Batch>) -> Result<(f32, StepReport)> {
        let model: &Decoder = &self.model;
        if self.engine.stage().1 > 1 {
            let labelled = |micro: usize| {
                Ok::<_, TrainError>((batches[micro].tokens.clone(), batches[micro].labels.clone()))
            };
            return self.engine.train_batch(model, labelled);
        }
        let (mut sum, mut counted, mut report) = (0.0, 0u32, StepReport::Accumulating);
        for (micro, batch) in batches.iter().enumerate() {
            let Batch { tokens, labels, .. } = batch;
            if micro == 0 {
                let loss = |mode| -> Result<Tensor> { Ok(model.loss(tokens, labels, mode)?) };
                self.engine.update_eigenvalues(loss)?;
            }
            let loss = self.engine.forward(|mode| model.loss(tokens, labels, mode))?;
            let counts_in_mean = batch.counts();
            if counts_in_mean {
                sum += loss.item()?;
                counted += 1;
            }
            self.engine.backward_with(&loss, BackwardOptions { counts_in_mean, ..Default::default() })?;
            report = self.engine.step()?;
        }
        Ok((sum / counted.max(1) as f32, report))
    }

    /// The loss of some tokens, without gradients.
    fn loss_of(&mut self, Batch { tokens, labels, .. }: &Batch) -> Result<f32> {
        let model: &Decoder = &self.model;
        if self.engine.stage().1 > 1 {
            let labelled = |_| Ok::<_, TrainError>((tokens.clone(), labels.clone()));
            return Ok(self.engine.eval_losses(model, 1, labelled)?[0]);
        }
        Ok(self.engine.forward(|mode| model.loss(tokens, labels, mode))?.item()?)
    }

    /// The mean loss over the tokens of validation sequences that are predicted, if any are. Ranks share the sequences out.
    pub(super) fn evaluate(
        &mut self,
        step: u64,
        listening: &mut Listening,
    ) -> Result<ControlFlow<Ending, Option<EvalRecord>>> {
        let available = self.sequences.count(Split::Validation);
        let count = if self.recipe.eval.sequences == 0 {
            available
        } else {
            self.recipe.eval.sequences.min(available)
        };
        if self.objective != Objective::NextToken {
            return self.evaluate_comparisons(step, count, listening);
        }
        let (rank, ranks) = (self.engine.data_rank() as u64, self.engine.data_ranks() as u64);
        let size = self.engine.train_micro_batch_size_per_gpu();
        self.engine.eval();
        // Every rank takes part in every round (stage 3 gathers together); a rank without a sequence of its own
        // repeats one that does not count.
        let mut sums = [0.0f64, 0.0];
        for round in 0..count.div_ceil(ranks * size) {
            if let ControlFlow::Break(ending) = listening.round()? {
                self.engine.train();
                return Ok(ControlFlow::Break(ending));
            }
            let first = (round * ranks + rank) * size;
            let own: Vec<u64> = (first..(first + size).min(count)).collect();
            let counts = !own.is_empty();
            let indices = if counts { own } else { vec![0] };
            let batch = self.batch(Split::Validation, indices.into_iter(), self.recipe.data.sequence)?;
            let counted = if counts { batch.predicted as f64 } else { 0.0 };
            sums[0] += f64::from(self.loss_of(&batch)?) * counted;
            sums[1] += counted;
        }
        self.engine.train();
        self.engine.world().group().all_reduce(&mut sums, ReduceOp::Sum)?;
        // Ranks that share samples have each counted them.
        let alike = (self.engine.world().size() as u64 / ranks).max(1);
        let tokens = sums[1] as u64 / alike;
        let (loss, measures) = ((sums[0] / sums[1]) as f32, BTreeMap::new());
        Ok(ControlFlow::Continue((tokens > 0).then_some(EvalRecord { step, loss, tokens, measures })))
    }

    /// How many tokens a sample and its prompt may have, and what allows no more.
    fn longest_sample(&self) -> (usize, &'static str) {
        // What the configuration grants generation counts here too.
        let granted =
            self.engine.config().hybrid_engine.as_ref().map_or(u64::MAX, |section| section.max_out_tokens);
        let limits = [
            (self.recipe.data.sequence, "data.sequence"),
            (granted, "hybrid_engine.max_out_tokens"),
            (self.model.longest_paged() as u64, "what the model can hold"),
        ];
        let [first, others @ ..] = limits;
        let least =
            others.into_iter().fold(first, |least, limit| if limit.0 < least.0 { limit } else { least });
        (usize::try_from(least.0).unwrap_or(usize::MAX), least.1)
    }

    /// The prompts of the samples in tokens, where there are some to write.
    fn sample_prompts(&self) -> Result<Option<Vec<Vec<i64>>>> {
        // Data that was tokens from the start has no text to show.
        let (Some(sample), Some(codec), false) =
            (&self.recipe.sample, &self.codec, self.engine.is_pipeline())
        else {
            return Ok(None);
        };
        let all = std::iter::once(&sample.prompt).chain(&sample.prompts);
        let ids = all.map(|prompt| Ok(codec.encode_prompt(prompt)?.into_iter().map(i64::from).collect()));
        ids.collect::<Result<_>>().map(Some)
    }

    /// What to say of a sample that will be shorter than was asked for.
    pub(super) fn shortened_sample(&self) -> Result<Option<String>> {
        let (Some(sample), Some(prompts)) = (&self.recipe.sample, self.sample_prompts()?) else {
            return Ok(None);
        };
        let ((longest, why), prompt) =
            (self.longest_sample(), prompts.iter().map(Vec::len).max().unwrap_or(0));
        let kept = longest.saturating_sub(prompt) as u64;
        let rest =
            format!("a prompt of {prompt} tokens and its answer have at most {longest} together ({why})");
        Ok(match kept {
            _ if kept >= sample.tokens => None,
            0 => Some(format!(
                "sample: {} tokens are asked for and none will be written: {rest}",
                sample.tokens
            )),
            _ => Some(format!(
                "sample: {} tokens are asked for and {kept} will be written: {rest}",
                sample.tokens
            )),
        })
    }

    /// Lets the model write, on the weights as they are. All ranks do, since they may hold them together.
    pub(super) fn samples(
        &self,
        listening: &mut Listening,
    ) -> Result<ControlFlow<Ending, Option<Vec<String>>>> {
        let Some(prompts) = self.sample_prompts()? else { return Ok(ControlFlow::Continue(None)) };
        let mut written = Vec::new();
        for prompt in prompts {
            if let ControlFlow::Break(ending) = listening.round()? {
                return Ok(ControlFlow::Break(ending));
            }
            written.push(self.sample(prompt)?);
        }
        Ok(ControlFlow::Continue(Some(written)))
    }

    fn sample(&self, prompt: Vec<i64>) -> Result<String> {
        let (Some(sample), Some(codec)) = (&self.recipe.sample, &self.codec) else {
            return Ok(String::new());
        };
        let (longest, _) = self.longest_sample();
        let call = GenerateCall {
            max_new_tokens: (sample.tokens as usize).min(longest.saturating_sub(prompt.len())),
            sampling: SamplingOptions {
                temperature: sample.temperature,
                top_k: Some(50),
                seed: self.recipe.seed,
                ..SamplingOptions::default()
            },
            end_tokens: codec.end_token().map(i64::from).into_iter().collect(),
            ..GenerateCall::default()
        };
        // A prompt that fills a sequence is shown as it is.
        if call.max_new_tokens == 0 {
            return Ok(codec.decode(&prompt)?);
        }
        let options = HybridOptions { max_out_tokens: longest, release_inference_cache: true };
        let mut hybrid = HybridEngine::with(&self.engine, self.model.clone(), options)?;
        let written = hybrid.generate(&[prompt], &call)?;
        Ok(codec.decode(&written[0])?)
    }
}

/// A label that the loss passes over.
pub(super) const IGNORED: i64 = -100;

/// A micro-batch: tokens, and what they should predict.
pub(super) struct Batch {
    tokens: Tokens,
    labels: Tensor,
    /// How many tokens the loss counts.
    predicted: usize,
    /// Whether only a part of them is learnt.
    is_masked: bool,
}

impl Batch {
    /// Whether its loss counts in the mean of its step: what has a weight counts by that, be it nothing.
    fn counts(&self) -> bool {
        self.tokens.weight.map_or(self.predicted > 0, |_| true)
    }
}

/// How many labels count: not those of the first token of a sequence or document, which nothing predicts.
fn learnt(labels: &[i64], length: usize, documents: Option<&[Vec<usize>]>) -> usize {
    let rows = labels.chunks(length).enumerate();
    rows.map(|(row, labels)| {
        let whole = [0, length];
        let borders = documents.and_then(|documents| documents.get(row)).map_or(&whole[..], Vec::as_slice);
        let texts = borders.windows(2).flat_map(|text| labels[text[0]..text[1]].iter().skip(1));
        texts.filter(|&&label| label != IGNORED).count()
    })
    .sum()
}

/// How many of some micro-batches have something to predict, of all; of those that are weighed, all, if any has.
fn share_with_targets(batches: &[Batch]) -> f32 {
    let is_weighed = batches.iter().any(|batch| batch.tokens.weight.is_some_and(|weight| weight > 0.0));
    let has = |batch: &&Batch| is_weighed || batch.predicted > 0;
    batches.iter().filter(has).count() as f32 / batches.len().max(1) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_counted_that_something_predicts() {
        let labels = [7, 7, IGNORED, 7, 7, 7, IGNORED, 7];
        assert_eq!(learnt(&labels, 8, None), 5);
        assert_eq!(learnt(&labels, 4, None), 4);
        let documents = [vec![0, 1, 4], vec![0, 3, 4]];
        assert_eq!(learnt(&labels, 4, Some(&documents)), 2);
    }
}
