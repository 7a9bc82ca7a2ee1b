//! How likely the model holds tokens that are there already: what evaluation and `echo` ask of a pass.
//!
//! The row of a token predicts the next one. Log probabilities are taken where the logits lie, so that no vocabulary leaves a
//! device; a row's depend on its sequence alone, as its logits do.

use ferrospeed_tensor::{DType, Tensor, autograd, ops, rows_alone};

use crate::core::schedule::Share;
use crate::error::Result;
use crate::paired::Likelihoods;
use crate::runner::lines;
use crate::sampling::{Likelihood, MAX_TOP_LOGPROBS, least_told};

/// Which rows of a pass predict tokens that are asked for, and what they say.
#[derive(Default)]
pub(crate) struct Known {
    /// The rows.
    pub(crate) rows: Vec<i64>,
    /// Of each, the token that follows, and how many alternatives are told.
    wanted: Vec<(i64, usize)>,
    /// How many rows each share has.
    shares: Vec<usize>,
    told: Vec<Likelihoods>,
}

impl Known {
    /// Adds those of a share whose first row is `first_row`.
    pub(crate) fn add(
        &mut self,
        share: &Share,
        tokens: &[i64],
        first_row: usize,
        from: usize,
        alternatives: usize,
    ) {
        let predicted =
            share.first.max(from.saturating_sub(1))..(share.first + share.count).min(tokens.len() - 1);
        self.shares.push(predicted.len());
        for place in predicted {
            self.rows.push((first_row + place - share.first) as i64);
            self.wanted.push((tokens[place + 1], alternatives.min(MAX_TOP_LOGPROBS)));
        }
    }

    /// Takes the logits of some of the rows, the first of which is number `first` of them.
    pub(crate) fn take(&mut self, first: usize, logits: &Tensor) -> Result<()> {
        let wanted = &self.wanted[first..first + logits.shape().rows()];
        let next: Vec<i64> = wanted.iter().map(|(token, _)| *token).collect();
        let most = wanted.iter().map(|(_, alternatives)| *alternatives).max().unwrap_or(0);
        let most = most.min(logits.shape().last());
        let (own, top) = autograd::no_grad(|| {
            rows_alone(|| -> Result<_> {
                let logits = ops::cast(logits, DType::F32)?;
                let all = ops::log_softmax(&logits)?;
                let next = Tensor::from_slice(&next, [next.len(), 1], logits.device())?;
                let top = if most > 0 { Some(ops::top_k(&all, most)?) } else { None };
                Ok((ops::gather(&all, &next)?, top))
            })
        })?;
        let own = own.to_vec::<f32>()?;
        let (values, ids) = match &top {
            Some((values, ids)) => (lines(values)?, ids.to_vec::<i64>()?),
            None => (vec![Vec::new(); own.len()], Vec::new()),
        };
        for (row, (&(token, alternatives), logprob)) in wanted.iter().zip(own).enumerate() {
            let ids = ids.iter().skip(row * most);
            let top = ids.zip(&values[row]).take(alternatives.min(most));
            let top = top.map(|(&token, &logprob)| Likelihood { token, logprob: least_told(logprob) });
            self.told.push((Likelihood { token, logprob: least_told(logprob) }, top.collect()));
        }
        Ok(())
    }

    /// What was said of the rows of each share.
    pub(crate) fn given(self) -> Vec<Vec<Likelihoods>> {
        let mut told = self.told.into_iter();
        self.shares.into_iter().map(|count| told.by_ref().take(count).collect()).collect()
    }
}
