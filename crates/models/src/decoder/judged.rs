//! Losses that are functions of how likely each label is: preferences between answers, and whatever else looks at whole texts.
//!
//! Somebody is told the log-probability of every label and says the loss and how it grows with each of them. The gradient of that loss
//! is the gradient of the cross-entropies, each times its slope, so nothing but a chunk of logits is ever held: the head runs once to
//! say how likely labels are and once more, with the slopes known, for the gradient.

use std::cell::{Cell, RefCell};

use ferrospeed_nn::Mode;
use ferrospeed_nn::activation_bits::input_of;
use ferrospeed_tensor::backend::{Binary, LossGradient};
use ferrospeed_tensor::ops::{self, CrossEntropyOptions, RowLoss};
use ferrospeed_tensor::{DType, Device, Operand, Out, Tensor, TensorError, autograd};

use super::labels::next_labels;
use super::{Decoder, Tokens};
use crate::error::{ModelError, Result};

/// What somebody says of log-probabilities.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Verdict {
    /// The loss.
    pub loss: f32,
    /// How it grows with each log-probability, in their order; not asked for where nothing is recorded.
    pub slopes: Vec<f32>,
}

impl Decoder {
    /// The loss that `judge` says. It is given, for each of the tokens of all sequences, the log-probability of the label behind
    /// it: 0 where that is -100 or in another document.
    pub fn judged_loss(
        &self,
        tokens: &Tokens,
        labels: &Tensor,
        mode: Mode,
        judge: impl FnOnce(&[f32]) -> Verdict,
    ) -> Result<Tensor> {
        if self.slices.is_some() || self.shared(labels)?.is_some() {
            let why = "no rank has whole sequences and their whole likelihoods where ranks share layers or sequences; train without --tp and --sp";
            return Err(ModelError::config("objective", why));
        }
        let (hidden, routers) = self.run(tokens, None, mode, None)?;
        let ignored = CrossEntropyOptions::default().ignore_index;
        let targets = next_labels(labels, ignored, tokens.documents.as_deref())?.to_vec::<i64>()?;
        let mut wanted: Vec<usize> = (0..targets.len()).filter(|&row| targets[row] != ignored).collect();
        if wanted.is_empty() {
            // A row that counts for nothing keeps the shapes of those that do.
            wanted.push(0);
        }
        let device = labels.device();
        let rows: Vec<i64> = wanted.iter().map(|&row| row as i64).collect();
        let rows = Tensor::from_slice(&rows, [rows.len()], device)?;
        let next: Vec<i64> = wanted.iter().map(|&row| targets[row]).collect();
        let next = Tensor::from_slice(&next, [next.len()], device)?;
        let hidden = &input_of(&self.head, &hidden)?;
        let hidden = ops::reshape(hidden, [hidden.shape().rows(), hidden.shape().last()])?;
        let hidden = ops::index_select(&hidden, 0, &rows)?;

        let likelihood = Rowwise::default();
        autograd::no_grad(|| self.row_losses(&hidden.detach(), &next, &likelihood))?;
        let mut logprobs = vec![0.0; targets.len()];
        for (&row, loss) in wanted.iter().zip(likelihood.losses()?) {
            logprobs[row] = if targets[row] == ignored { 0.0 } else { -loss };
        }
        let Verdict { loss, slopes } = judge(&logprobs);
        let value = Tensor::full([], loss, DType::F32, device)?;
        if !autograd::is_recording() {
            return Ok(value);
        }
        // The mean over rows is taken of what is as large as each row's own, which small types can hold.
        let count = wanted.len() as f32;
        let weights: Vec<f32> = wanted.iter().map(|&row| -slopes[row] * count).collect();
        let weights = Some(Tensor::from_slice(&weights, [weights.len(), 1], device)?);
        let weighted = self.row_losses(&hidden, &next, &Rowwise { weights, ..Rowwise::default() })?;
        let weighted = Operand::from(&weighted);
        let loss = autograd::record("judged_loss", &[&weighted], value, |dy| Ok(vec![Some(dy)]));
        self.with_balance(loss, &routers, tokens, labels)
    }

    fn row_losses(&self, hidden: &Tensor, next: &Tensor, of: &Rowwise) -> Result<Tensor> {
        self.as_head(|| self.head_loss(hidden, next, of))
    }
}

/// Cross-entropies of rows that come in order, a few at a time.
#[derive(Default)]
struct Rowwise {
    /// `[rows, 1]`: by what the gradient of each row is multiplied. Without, losses are kept.
    weights: Option<Tensor>,
    kept: RefCell<Vec<Tensor>>,
    next: Cell<usize>,
}

impl Rowwise {
    fn losses(self) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for losses in self.kept.into_inner() {
            all.extend(losses.to_vec::<f32>()?);
        }
        Ok(all)
    }
}

impl RowLoss for &Rowwise {
    fn ignore_index(&self) -> i64 {
        CrossEntropyOptions::default().ignore_index
    }

    fn columns(&self, device: &Device, classes: usize) -> usize {
        CrossEntropyOptions::default().columns(device, classes)
    }

    fn rows(
        &self,
        logits: &mut Tensor,
        classes: usize,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<(), TensorError> {
        let (options, device) = (CrossEntropyOptions::default(), logits.device().clone());
        let count = targets.numel();
        let first = self.next.replace(self.next.get() + count);
        let Some(weights) = &self.weights else {
            let mut own = Tensor::empty([count], DType::F32, &device)?;
            options.rows(logits, classes, targets, own.out()?, gradient)?;
            device.backend().copy(&own, losses)?;
            self.kept.borrow_mut().push(own);
            return Ok(());
        };
        if matches!(gradient, LossGradient::Nowhere) {
            return options.rows(logits, classes, targets, losses, gradient);
        }
        options.rows(logits, classes, targets, losses, LossGradient::OverLogits)?;
        let weights = weights.slice(first, [count, 1])?;
        let wide = ops::cast(&*logits, DType::F32)?;
        let mut scaled = Tensor::empty(*logits.shape(), DType::F32, &device)?;
        device.backend().binary(Binary::Mul, &wide, &weights, scaled.out()?)?;
        drop(wide);
        match gradient {
            LossGradient::Into(out) => device.backend().cast(&scaled, out),
            _ => device.backend().cast(&scaled, logits.out()?),
        }
    }
}
