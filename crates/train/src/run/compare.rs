//! Micro-batches of what is compared: rows of two documents, and what the objective says of them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;

use ferrospeed_comm::{Group, ReduceOp};
use ferrospeed_data::{Mark, Split};
use ferrospeed_engine::{BackwardOptions, StepReport};
use ferrospeed_models::decoder::Verdict;
use ferrospeed_models::{Decoder, ModelError, Tokens};
use ferrospeed_nn::Mode;
use ferrospeed_observe::EvalRecord;
use ferrospeed_tensor::Tensor;

use super::Run;
use super::listening::Listening;
use super::steps::IGNORED;
use crate::checkpoint::Ending;
use crate::error::Result;
use crate::objective::{Document, Documents, Judgement, Measured, Objective, Row, Slope};

/// Rows are cut behind the longest of a micro-batch, at a multiple of this.
const STEP_TOKENS: usize = 16;

/// A micro-batch.
pub(super) struct Compared {
    tokens: Tokens,
    labels: Tensor,
    rows: Vec<Spans>,
}

/// Where the documents of a row lie among all tokens of the batch, and what is known of them.
#[derive(Debug, Clone, Default)]
struct Spans {
    /// Which document of the row, where it begins, and the marks of its tokens.
    documents: Vec<(usize, usize, Vec<u8>)>,
    reference: [f64; 2],
    is_wanted: bool,
}

/// A row as it is stored.
struct Stored {
    documents: [(Vec<i64>, Vec<u8>); 2],
    reference: [f64; 2],
}

impl Run<'_> {
    /// Some rows of a split.
    pub(super) fn compared(&self, split: Split, indices: &[u64], which: Documents) -> Result<Compared> {
        let rows = indices.iter().map(|&index| self.stored(split, index)).collect::<Result<Vec<_>>>()?;
        let chosen: &[usize] = match which {
            Documents::Both => &[0, 1],
            Documents::Learnt => &[0],
            Documents::Stranger => &[1],
        };
        let length = |row: &Stored| chosen.iter().map(|&at| row.documents[at].0.len()).sum::<usize>();
        let longest = rows.iter().map(length).max().unwrap_or(1).next_multiple_of(STEP_TOKENS);
        let width = longest.min(self.sequences.length() as usize);
        let learns_prompts = self.objective.learns_prompts();
        let (mut ids, mut labels, mut borders, mut spans) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for Stored { documents, reference } in rows {
            let begin = ids.len();
            let is_wanted = documents[0].1.contains(&(Mark::Learnt as u8));
            let mut own = Spans { documents: Vec::new(), reference, is_wanted };
            let mut ends = vec![0];
            for &at in chosen {
                let (tokens, marks) = &documents[at];
                own.documents.push((at, ids.len(), marks.clone()));
                let is_learnt = |mark: u8| mark != Mark::Shown as u8 || (learns_prompts && at == 0);
                labels.extend(
                    tokens.iter().zip(marks).map(|(&id, &mark)| if is_learnt(mark) { id } else { IGNORED }),
                );
                ids.extend(tokens);
                ends.push(ids.len() - begin);
            }
            let filling = begin + width - ids.len();
            if filling > 0 {
                ids.resize(begin + width, 0);
                labels.resize(begin + width, IGNORED);
                ends.push(width);
            }
            borders.push(ends);
            spans.push(own);
        }
        let (shape, device) = ([spans.len(), width], self.engine.device());
        let tokens =
            Tokens { documents: Some(borders), ..Tokens::new(Tensor::from_slice(&ids, shape, device)?) };
        Ok(Compared { tokens, labels: Tensor::from_slice(&labels, shape, device)?, rows: spans })
    }

    fn stored(&self, split: Split, index: u64) -> Result<Stored> {
        let count = self.sequences.length() as usize;
        let mut ids = vec![0; count];
        self.sequences.read(split, index, &mut ids)?;
        let marks = self.sequences.marks(split, index, count)?.unwrap_or_default();
        let borders = self.sequences.documents(split, index, &ids)?.unwrap_or_default();
        let document = |at: usize| match borders.get(at..at + 2) {
            Some(&[first, end]) => {
                (ids[first..end].to_vec(), marks.get(first..end).unwrap_or_default().to_vec())
            }
            _ => (Vec::new(), Vec::new()),
        };
        let reference = self.reference.as_ref().map_or([0.0; 2], |reference| reference.of(split, index));
        Ok(Stored { documents: [document(0), document(1)], reference })
    }

    /// How far the model has gone from its reference on the rows of some micro-batches, over all ranks; each of them has it. The engine
    /// evaluates meanwhile, as its caller has told it.
    /// Where that may take long, somebody listens.
    fn drifts(
        &mut self,
        split: Split,
        micro_batches: &[Vec<u64>],
        mut listening: Option<&mut Listening>,
    ) -> Result<ControlFlow<Ending, Vec<Measured>>> {
        let mut drifts = vec![[0.0; 2]; micro_batches.len()];
        if !matches!(self.objective, Objective::Kto(_)) {
            return Ok(ControlFlow::Continue(drifts));
        }
        for (drift, own) in drifts.iter_mut().zip(micro_batches) {
            if let Some(listening) = &mut listening
                && let ControlFlow::Break(ending) = listening.round()?
            {
                return Ok(ControlFlow::Break(ending));
            }
            // Every rank takes part in every round; one without rows of its own repeats one that does not count.
            let indices = if own.is_empty() { &[0][..] } else { own };
            let rows = self.rows_of(split, indices, Documents::Stranger)?;
            *drift = if own.is_empty() { [0.0; 2] } else { self.objective.drift(&rows) };
        }
        let mut sums = drifts.as_flattened().to_vec();
        self.engine.world().group().all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(ControlFlow::Continue(sums.chunks_exact(2).map(|sum| [sum[0], sum[1]]).collect()))
    }

    /// How likely the model holds the documents of some rows, without a loss.
    pub(super) fn rows_of(&mut self, split: Split, indices: &[u64], which: Documents) -> Result<Vec<Row>> {
        let compared = self.compared(split, indices, which)?;
        let (model, found): (&Decoder, _) = (&self.model, RefCell::new(Vec::new()));
        self.engine.forward(|mode| {
            model.judged_loss(&compared.tokens, &compared.labels, mode, |logprobs| {
                found.replace(compared.rows(logprobs));
                Verdict::default()
            })
        })?;
        Ok(found.into_inner())
    }
}

impl Compared {
    /// How many tokens it has, filling and all.
    pub(super) fn tokens(&self) -> usize {
        self.tokens.ids.numel()
    }

    /// The loss of an objective, and what it says of the rows into `said`.
    pub(super) fn loss(
        &self,
        model: &Decoder,
        objective: &Objective,
        drift: Measured,
        mode: Mode,
        said: &RefCell<Option<Judgement>>,
    ) -> Result<Tensor, ModelError> {
        model.judged_loss(&self.tokens, &self.labels, mode, |logprobs| {
            let judgement = objective.judge(&self.rows(logprobs), drift);
            let verdict = Verdict {
                loss: judgement.loss as f32,
                slopes: self.slopes(logprobs.len(), &judgement.slopes),
            };
            said.replace(Some(judgement));
            verdict
        })
    }

    /// What was said of the token behind each, by row.
    fn rows(&self, logprobs: &[f32]) -> Vec<Row> {
        let row = |spans: &Spans| {
            let mut documents =
                spans.reference.map(|reference| Document { reference, ..Document::default() });
            for (at, first, marks) in &spans.documents {
                let document = &mut documents[*at];
                for (place, &mark) in marks.iter().enumerate().skip(1) {
                    let logprob = f64::from(logprobs[first + place - 1]);
                    if mark != Mark::Shown as u8 {
                        document.answer.add(logprob);
                    }
                    document.whole.add(logprob);
                }
            }
            Row { documents, is_wanted: spans.is_wanted }
        };
        self.rows.iter().map(row).collect()
    }

    /// Of each token, how the loss grows with the log-probability of the one behind it.
    fn slopes(&self, count: usize, of_rows: &[[Slope; 2]]) -> Vec<f32> {
        let mut slopes = vec![0.0; count];
        for (spans, of_documents) in self.rows.iter().zip(of_rows) {
            for (at, first, marks) in &spans.documents {
                let Slope { answer, whole } = of_documents[*at];
                for (place, &mark) in marks.iter().enumerate().skip(1) {
                    let own = if mark == Mark::Shown as u8 { whole } else { answer + whole };
                    slopes[first + place - 1] = own as f32;
                }
            }
        }
        slopes
    }
}

impl Run<'_> {
    /// Takes a step on rows that are compared, those of each micro-batch on this rank. Returns the mean loss of this rank's rows, what
    /// became of it, and what is to be watched, over all ranks.
    pub(super) fn train_on_comparisons(
        &mut self,
        micro_batches: &[Vec<u64>],
    ) -> Result<((f32, StepReport), BTreeMap<String, f64>)> {
        self.engine.eval();
        let drifts = self.drifts(Split::Train, micro_batches, None);
        self.engine.train();
        let drifts = drifts?.continue_value().unwrap_or_default();
        let (objective, mut watched) = (self.objective, Watched::of(&self.objective));
        let (mut sum, mut report) = (0.0, StepReport::Accumulating);
        for (index, (indices, drift)) in micro_batches.iter().zip(drifts).enumerate() {
            let compared = self.compared(Split::Train, indices, objective.learnt_documents())?;
            let (model, said): (&Decoder, _) = (&self.model, RefCell::new(None));
            let loss = |mode| -> Result<Tensor> { Ok(compared.loss(model, &objective, drift, mode, &said)?) };
            if index == 0 {
                self.engine.update_eigenvalues(&loss)?;
            }
            let loss = self.engine.forward(loss)?;
            sum += loss.item()?;
            watched.add(said.into_inner());
            self.engine.backward_with(&loss, BackwardOptions::default())?;
            report = self.engine.step()?;
        }
        let loss = sum / micro_batches.len().max(1) as f32;
        Ok(((loss, report), watched.over(&self.engine.world().group())?))
    }

    /// The mean loss over the first `count` rows to validate on, and what is watched of them.
    pub(super) fn evaluate_comparisons(
        &mut self,
        step: u64,
        count: u64,
        listening: &mut Listening,
    ) -> Result<ControlFlow<Ending, Option<EvalRecord>>> {
        let (rank, ranks) = (self.engine.data_rank() as u64, self.engine.data_ranks() as u64);
        let size = self.engine.train_micro_batch_size_per_gpu();
        let rounds: Vec<Vec<u64>> = (0..count.div_ceil(ranks * size))
            .map(|round| (round * ranks + rank) * size)
            .map(|first| (first..(first + size).min(count)).collect())
            .collect();
        self.engine.eval();
        let (objective, mut watched) = (self.objective, Watched::of(&self.objective));
        let drifts = match self.drifts(Split::Validation, &rounds, Some(listening))? {
            ControlFlow::Continue(drifts) => drifts,
            ControlFlow::Break(ending) => {
                self.engine.train();
                return Ok(ControlFlow::Break(ending));
            }
        };
        let mut sums = [0.0f64; 2];
        for (own, drift) in rounds.iter().zip(drifts) {
            if let ControlFlow::Break(ending) = listening.round()? {
                self.engine.train();
                return Ok(ControlFlow::Break(ending));
            }
            let indices = if own.is_empty() { &[0][..] } else { own };
            let compared = self.compared(Split::Validation, indices, objective.learnt_documents())?;
            let (model, said): (&Decoder, _) = (&self.model, RefCell::new(None));
            let loss = self.engine.forward(|mode| compared.loss(model, &objective, drift, mode, &said))?;
            if !own.is_empty() {
                sums[0] += f64::from(loss.item()?) * own.len() as f64;
                sums[1] += own.len() as f64;
                watched.add(said.into_inner());
                watched.tokens += compared.tokens() as f64;
            }
        }
        self.engine.train();
        let group = self.engine.world().group();
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        let mut tokens = [watched.tokens];
        group.all_reduce(&mut tokens, ReduceOp::Sum)?;
        let measures = watched.over(&group)?;
        let (loss, tokens) = ((sums[0] / sums[1]) as f32, tokens[0] as u64);
        Ok(ControlFlow::Continue((sums[1] > 0.0).then_some(EvalRecord { step, loss, tokens, measures })))
    }
}

/// What an objective says besides the loss, added up.
struct Watched {
    names: &'static [&'static str],
    sums: Vec<Measured>,
    tokens: f64,
}

impl Watched {
    fn of(objective: &Objective) -> Watched {
        let names = objective.measures();
        Watched { names, sums: vec![[0.0; 2]; names.len()], tokens: 0.0 }
    }

    fn add(&mut self, said: Option<Judgement>) {
        let said = said.map(|judgement| judgement.measures).unwrap_or_default();
        for ([sum, of], [value, count]) in self.sums.iter_mut().zip(said) {
            *sum += value;
            *of += count;
        }
    }

    /// The means over all ranks; nothing of what none of them has seen.
    fn over(&self, group: &Group) -> Result<BTreeMap<String, f64>> {
        let mut sums = self.sums.as_flattened().to_vec();
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        let named = self.names.iter().zip(sums.chunks_exact(2)).filter(|(_, sum)| sum[1] > 0.0);
        Ok(named.map(|(name, sum)| ((*name).to_owned(), sum[0] / sum[1])).collect())
    }
}
