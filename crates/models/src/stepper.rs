//! One decoding step, the same work for every token: recorded once where the device can, and replayed.
//!
//! What changes from token to token (the tokens and their place) lies in tensors that are made once; so do the results.

use ferrospeed_nn::{AttentionState, Mode};
use ferrospeed_tensor::{DType, Device, Out, Param, Recording, Tensor, TensorError, ops};

use crate::decoder::{Decoder, StepTables};
use crate::error::Result;
use crate::shortlist::Shortlist;

/// What a pass says of the next tokens.
pub(crate) struct Outcome {
    /// `[batch, 1, vocabulary]`.
    pub(crate) logits: Tensor,
    /// `[batch, 1, 1]` of i64, the most likely tokens, where the device is not the host.
    pub(crate) best: Option<Tensor>,
}

impl Outcome {
    pub(crate) fn of(logits: Tensor) -> Result<Outcome> {
        let best = match logits.device().backend().is_host() {
            true => None,
            false => Some(ops::top_k(&logits, 1)?.1),
        };
        Ok(Outcome { logits, best })
    }
}

/// What a step says of the next tokens.
pub(crate) enum Step<'a> {
    /// Something of every token.
    All(&'a Outcome),
    /// The logits of the tokens that can be chosen, in order.
    Few(Vec<(usize, f32)>),
}

/// Continues sequences of one length, none of them padded, by a token at a time.
pub(crate) struct Stepper<'a> {
    model: &'a Decoder,
    tables: StepTables,
    /// `[batch + 2]` of i64: the tokens, their place, and its row in the table of learned positions.
    inputs: Tensor,
    outcome: Outcome,
    recording: Option<Recording>,
    can_record: bool,
    /// How many steps have run.
    steps: usize,
    /// Spares most of the head.
    shortlist: Option<Shortlist<'a>>,
}

impl<'a> Stepper<'a> {
    /// `None` where a step of this model depends on more than its place.
    pub(crate) fn new(
        model: &'a Decoder,
        batch: usize,
        capacity: usize,
        device: &Device,
    ) -> Result<Option<Stepper<'a>>> {
        let Some(tables) = model.step_tables(capacity, device)? else { return Ok(None) };
        let shape = [batch, 1, model.config().vocab];
        Ok(Some(Stepper {
            model,
            tables,
            inputs: Tensor::zeros([batch + 2], DType::I64, device)?,
            outcome: Outcome::of(Tensor::zeros(shape, model.dtype(), device)?)?,
            recording: None,
            can_record: model.parameters().as_slice().iter().all(Param::value_stays),
            steps: 0,
            shortlist: None,
        }))
    }

    /// Steps ask this first which tokens can be chosen.
    pub(crate) fn set_shortlist(&mut self, shortlist: Option<Shortlist<'a>>) {
        // What is chosen from its answer is known on the host alone.
        self.can_record &= shortlist.is_none();
        self.shortlist = shortlist;
    }

    /// What comes after `tokens`, one per sequence.
    pub(crate) fn step(&mut self, tokens: &[i64], state: &mut AttentionState) -> Result<Step<'_>> {
        let place = state.len();
        self.model.check_length(place + 1)?;
        state.advance(1)?;
        let mut inputs = tokens.to_vec();
        inputs.extend([place as i64, (place + self.tables.row_offset) as i64]);
        let device = self.inputs.device().clone();
        // A recording looks at the inputs too.
        let target =
            if device.backend().is_host() { self.inputs.out()? } else { Out::of_device(&self.inputs)? };
        device.backend().copy_from_host(bytemuck::cast_slice(&inputs), target)?;
        // The first step compiles kernels and chooses algorithms, which is no part of a recording.
        if self.steps == 1 && self.can_record {
            self.recording = record(&device, || self.work(state).map(drop))?;
        }
        self.steps += 1;
        match (&self.recording, &mut self.shortlist) {
            (Some(recording), _) => recording.replay()?,
            (None, None) => {
                if let Some(outcome) = self.work(state)? {
                    self.outcome = outcome;
                }
            }
            (None, Some(shortlist)) => {
                let hidden = run(self.model, &self.tables, &self.inputs, state)?;
                if let Some(few) = shortlist.of(&hidden)? {
                    return Ok(Step::Few(few));
                }
                if shortlist.fails() {
                    self.shortlist = None;
                }
                self.outcome = Outcome::of(self.model.logits(&hidden)?)?;
            }
        }
        Ok(Step::All(&self.outcome))
    }

    /// One step. Of a device that may replay it, the outcome goes where the last one was; else it is returned.
    fn work(&self, state: &mut AttentionState) -> Result<Option<Outcome>> {
        let hidden = run(self.model, &self.tables, &self.inputs, state)?;
        let outcome = Outcome::of(self.model.logits(&hidden)?)?;
        let backend = outcome.logits.device().backend();
        if backend.is_host() {
            return Ok(Some(outcome));
        }
        backend.copy(&outcome.logits, Out::of_device(&self.outcome.logits)?)?;
        if let (Some(best), Some(target)) = (&outcome.best, &self.outcome.best) {
            backend.copy(best, Out::of_device(target)?)?;
        }
        Ok(None)
    }
}

/// Records the work of a model, where the device can.
pub(crate) fn record(device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<Option<Recording>> {
    let mut failure = None;
    let recorded = device.record(&mut || {
        work().map_err(|error| {
            let what = error.to_string();
            failure = Some(error);
            TensorError::argument("decoding step", what)
        })
    });
    match (recorded, failure) {
        (Err(_), Some(error)) => Err(error),
        (recorded, _) => Ok(recorded?),
    }
}

/// The hidden states of the tokens in `inputs`, at their place.
fn run(model: &Decoder, tables: &StepTables, inputs: &Tensor, state: &mut AttentionState) -> Result<Tensor> {
    let batch = inputs.numel() - 2;
    let input = |start: usize, shape: &[usize]| inputs.slice(start, shape);
    let places = tables.at(&input(batch, &[1])?, &input(batch + 1, &[1, 1])?)?;
    let (hidden, _) = model.run_at(&input(0, &[batch, 1])?, &places, Some(state), Mode::Evaluate, None)?;
    Ok(hidden)
}
